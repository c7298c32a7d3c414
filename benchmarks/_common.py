"""Measure what the benchmarks share: turns, processes of their own, memory, and clients without data."""

from __future__ import annotations

import argparse
import csv
import json
import multiprocessing
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
QUICK = "--quick" in sys.argv
"""Whether the numbers do not matter: then nothing is repeated, and nothing has a process of its own."""


def arguments(about: str | None, out: str | None = None) -> argparse.Namespace:
    """The command line that all benchmarks have, and --out for those that say what they write there."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="no repeats and little work: does it run at all?")
    if out:
        parser.add_argument("--out", type=Path, help=out)
    return parser.parse_args()


def machine() -> str:
    """Cores and versions, for the head of a report."""
    import torch

    return f"{os.cpu_count()} cores, Python {platform.python_version()}, torch {torch.__version__}"


def interleaved(
    ways: Mapping[str, Callable[[], object]],
    repeats: int,
    pick: Callable[[Sequence[float]], float] = statistics.median,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Seconds of each way, the median or what `pick` says: taken in turn so that other load hits all alike.

    One turn is not counted, unless it is the only one, as with `--quick`. With `clock=time.process_time` they are CPU
    seconds of this process.
    """
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(1 if QUICK else repeats + 1):
        for name, way in ways.items():
            start = clock()
            way()
            if turn or QUICK:
                seconds[name].append(clock() - start)
    return {name: pick(values) for name, values in seconds.items()}


def threads(what: str = "") -> Iterator[None]:
    """Twice, or with `--quick` once: with one thread and with two, each after a heading."""
    import torch

    for count in (1,) if QUICK else (1, 2):
        torch.set_num_threads(count)
        print(f"\n{what}{count} thread{'s' * (count > 1)}")
        yield


def alone(function: Callable[..., T], *options: Any) -> T:
    """Return what a function of a module returns in a process of its own; with `--quick` it is called here."""
    if QUICK:
        return function(*options)
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *options).result()


def resident(what: str) -> float:
    """Bytes that are (VmRSS) or were at most (VmHWM) resident in this process; nan elsewhere than on Linux."""
    if not sys.platform.startswith("linux"):
        return float("nan")
    with open("/proc/self/status") as lines:
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith(what))


def peaks(aim: str, peak: Callable[..., float], cases: Mapping[str, tuple[Any, ...]], mapped: int = 1 << 20) -> None:
    """Print `peak(*options)`, in units of d floats, of each case {name: options}, each in a process of its own.

    Allocations of `mapped` bytes or more are mapped one by one, so that freed memory goes back at once.
    """
    if not sys.platform.startswith("linux"):
        print("\nmemory: measured on Linux only")
        return
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(mapped)
    print(f"\npeak memory in units of d floats; aim {aim}")
    width = max(map(len, cases))
    for name, options in cases.items():
        print(f"  {name:<{width}} {alone(peak, *options):6.2f}", flush=True)


def phases(folder: Path) -> list[dict[str, float]]:
    """Seconds by phase of each round of a run, the first one included."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line["seconds"] for line in lines if line["round"]]


def without_data(tasks: Mapping[str, Mapping[str, Any]], examples: int = 0) -> dict[str, Any]:
    """Clients without data, by id, from what each has as `tasks`; they say that they have so many examples."""
    import numpy as np

    from fedloom.federation.rounds.federation import BuiltClient, Part

    part = Part(None, np.zeros(examples, dtype=np.int64), "own")  # type: ignore[arg-type]
    return {name: BuiltClient(name, held, part, part, part) for name, held in tasks.items()}


def write_table(file: Path, fields: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """A CSV file, and its folder if there is none."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w", newline="", encoding="utf-8") as opened:
        table = csv.DictWriter(opened, fields, lineterminator="\n")
        table.writeheader()
        table.writerows(rows)
