"""What the benchmarks share: interleaved repeats and medians."""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path


def arguments(about: str | None, out: str | None = None) -> argparse.Namespace:
    """The command line that all benchmarks have, and --out for those that say what they write there."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer repeats and less work: does it run at all?")
    if out:
        parser.add_argument("--out", type=Path, help=out)
    return parser.parse_args()


def interleaved(ways: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median seconds of each way, taken in turn so that other load hits all alike; one turn is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(repeats + 1):
        for name, way in ways.items():
            start = time.perf_counter()
            way()
            if turn:
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def machine() -> str:
    """Cores and versions, for the head of a report."""
    import torch

    return f"{os.cpu_count()} cores, Python {platform.python_version()}, torch {torch.__version__}"
