"""Measure what checkpoints cost: rounds of FedHCA2 with 5 clients and 9.2 million parameters, 1 step each.

The recipe of `round_copies.py` with `runtime.checkpoint_every` 1, auto and never, each in a process of its own, one
after the other, three times. Seconds on the wall, because a checkpoint waits for the disk: the time from the end of the
first round to that of the last one, per round; CPU seconds beside it. Aim: auto takes at most 1.15 times as long as
never.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from unittest import mock

from _common import alone, arguments, machine
from round_copies import recipe

NEVER = 10_000


def a_round(every: int | str, width: int, count: int) -> tuple[float, float, int]:
    """(Seconds of a round, its CPU seconds, checkpoints after the first round)."""
    import torch

    from fedloom.engines import api
    from fedloom.federation.recipes.loader import load
    from fedloom.federation.runs.folder import RunFolder

    torch.set_num_threads(1)
    ends: list[tuple[float, float]] = []
    saved: list[int] = []
    save = RunFolder.save

    def counted(self, state, name="state"):  # type: ignore[no-untyped-def]
        saved.append(state["round"])
        save(self, state, name)

    progress = api.Progress()
    progress.round = lambda *_: ends.append((time.perf_counter(), time.process_time()))  # type: ignore[method-assign]
    # a test calls this in its own process, whose later tests need the class as it was
    with tempfile.TemporaryDirectory(dir=".") as folder, mock.patch.object(RunFolder, "save", counted):
        one = load(recipe("fedhca2", width, count), [f"runtime.checkpoint_every={every}"])
        api.run(one, Path(folder) / "run", progress=progress)
    ends.pop()  # the last round is saved in any case
    wall, cpu = ((b - a) / (len(ends) - 1) for a, b in zip(ends[0], ends[-1], strict=True))
    return wall, cpu, sum(1 < number < count for number in saved)


def main() -> None:
    quick = arguments(__doc__).quick
    width, turns = (256, 1) if quick else (2560, 3)
    counts = {1: 5, "auto": 5 if quick else 60, NEVER: 5 if quick else 20}
    print(f"{machine()}; FedHCA2, 5 clients, 1 thread")
    found: dict[int | str, list[tuple[float, float, int]]] = {every: [] for every in counts}
    for _ in range(turns):
        for every, count in counts.items():
            found[every].append(alone(a_round, every, width, count))
    base = statistics.median(wall for wall, _, _ in found[NEVER])
    for every, results in found.items():
        wall, cpu = (statistics.median(one[i] for one in results) for i in (0, 1))
        print(
            f"checkpoint_every {'never' if every == NEVER else every}: {wall:.3f} s a round ({cpu:.3f} CPU seconds), "
            f"{wall / base:.2f} times never; {results[0][2]} checkpoints in {counts[every] - 2} rounds"
        )


if __name__ == "__main__":
    main()
