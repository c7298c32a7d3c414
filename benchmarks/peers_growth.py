"""Measure how a round of N peers grows: seconds, bytes and memory, with whole signals and with sketches.

Real peers without a server: N shares of the embedded digits, a small CNN (38,737 parameters), one local epoch; all
choose the three whose updates are most similar. Candidates are all others, or 20 drawn at random for each. Each case is
a process of its own, so that its peak memory is its own; exact and sketched take turns.

Seconds are CPU seconds of one thread, for other work on the machine stretches the others; the least of some rounds,
without local training, after a round of six peers that loads what torch loads late. Memory (on Linux) is the peak above
what was resident after that round. Slopes are those of a least-squares line through log-log for N >= 100: 1 is linear
growth.

`--quick` stops at 6 peers. `--out DIR` writes peers-growth.csv and figures/peers-growth.svg there.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from _common import alone, arguments, machine, resident, write_table

SIZES = (6, 30, 100, 300, 1000)
GRAPHS = {"20": "random-k", "all": "full"}
KINDS = ("sketched", "exact")
FIELDS = ("peers", "candidates", "signals", "seconds", "wall", "training", "signal bytes", "model bytes", "memory")


class Community:
    """N peers in this process; `go` runs a round and leaves its cost in `spent`."""

    def __init__(self, n: int, candidates: str, kind: str) -> None:
        from fedloom.engines.peers.rounds import initial_peers, without_server
        from fedloom.engines.pool import executor
        from fedloom.federation.recipes.loader import load
        from fedloom.federation.rounds.build import build

        k = "" if candidates == "all" else f", k: {min(int(candidates), n - 1)}"
        changes = (
            f"partition.clients={n}",
            "partition.val_fraction=0",
            "training.epochs=1",
            "peers.warmup=null",
            "peers.similarity={signals: {gradient: 1}}",
            f"peers.similarity.sketch={'{}' if kind == 'sketched' else 'null'}",
            f"peers.graph={{name: {GRAPHS[candidates]}{k}}}",
        )
        self.built = build(load("dfmtl-digits", changes))
        self.executor = executor(self.built.setup, ("cpu",), 1)
        self.advance, self.state = without_server(self.built), initial_peers(self.built)
        self.training = 0.0

    def run(self, jobs: Sequence[Any], **options: Any) -> Iterator[Any]:
        """As an executor; what training takes is not the peers' own work."""
        done = self.executor.run(jobs, **options)
        while True:
            start = time.process_time()
            item = next(done, None)
            self.training += time.process_time() - start
            if item is None:
                return
            yield item

    def close(self) -> None:
        """As an executor."""

    def go(self) -> dict[str, float]:
        """One round."""
        from fedloom.federation.rounds.round import Progress, Round

        now = Round(self.built, self.state["round"] + 1, Progress())
        self.training, wall, start = 0.0, time.perf_counter(), time.process_time()
        self.state, _ = self.advance(self.built, self, self.state, now)
        seconds = time.process_time() - start - self.training
        up: dict[str, int] = {}
        for counts in now.ledger.up.values():
            for (role, _), count in counts.items():
                up[role] = up.get(role, 0) + count
        signals = up.pop("signal")
        return {
            "seconds": seconds,
            "wall": time.perf_counter() - wall,
            "training": self.training,
            "signal bytes": signals,
            "model bytes": sum(up.values()),
        }


def case(n: int, candidates: str, kind: str) -> dict[str, float]:
    """Return what the cheapest of some rounds took."""
    import torch

    torch.set_num_threads(1)
    Community(6, candidates, kind).go()
    before = resident("VmHWM")
    community = Community(n, candidates, kind)
    rounds = [community.go() for _ in range(3 if n <= 100 else 1)]
    return {**min(rounds, key=lambda r: r["seconds"]), "memory": resident("VmHWM") - before}


def slope(rows: Sequence[dict[str, Any]], field: str) -> float:
    """Of a line through log-log; nan for a single point."""
    far = [(math.log(row["peers"]), math.log(row[field])) for row in rows if row["peers"] >= 100]
    if len(far) < 2:
        far = [(math.log(row["peers"]), math.log(row[field])) for row in rows]
    return statistics.linear_regression(*zip(*far, strict=True)).slope if len(far) > 1 else math.nan


def draw(rows: Sequence[dict[str, Any]], file: Path) -> None:
    """One panel each for seconds, bytes of signals and memory."""
    from fedloom.study.charts import concat, lines, save

    panels = {"seconds": ("CPU seconds a round", 1.0), "signal bytes": ("MB of signals a round", 1e6)}
    panels["memory"] = ("MB of memory", 1e6)
    drawn = []
    for field, (label, unit) in panels.items():
        several, groups = {}, {}
        for kind in KINDS:
            for candidates in GRAPHS:
                line = [row for row in rows if (row["candidates"], row["signals"]) == (candidates, kind)]
                name = f"{kind}, {candidates} candidates: slope {slope(line, field):.2f}"
                several[name] = {row["peers"]: row[field] / unit for row in line}
                groups[name] = kind
        drawn.append(lines(several, "peers N", label, title=label, groups=groups, log="xy"))
    file.parent.mkdir(parents=True, exist_ok=True)
    save(concat(drawn), file)


def write(rows: Sequence[dict[str, Any]], folder: Path) -> None:
    """The table and the figure so far, for the largest cases take long."""
    write_table(folder / "peers-growth.csv", FIELDS, rows)
    draw(rows, folder / "figures" / "peers-growth.svg")


def main() -> None:
    """Print the table; each case in a process of its own."""
    options = arguments(__doc__, out="write the table as CSV and the figure into this folder")
    print(machine(), "\n")
    print("peers candidates  signals  seconds  ms a peer  training  MB signals  kB a peer  MB models  MB memory")
    rows: list[dict[str, Any]] = []
    for n in SIZES[:1] if options.quick else SIZES:
        for candidates in GRAPHS:
            for kind in KINDS:
                spent = alone(case, n, candidates, kind)
                r: dict[str, Any] = {"peers": n, "candidates": candidates, "signals": kind, **spent}
                rows.append(r)
                print(
                    f"{n:>5} {candidates:>10} {kind:>8} {r['seconds']:>8.2f} {r['seconds'] / n * 1e3:>10.1f} "
                    f"{r['training']:>9.2f} {r['signal bytes'] / 1e6:>11.2f} {r['signal bytes'] / n / 1e3:>10.1f} "
                    f"{r['model bytes'] / 1e6:>10.1f} {r['memory'] / 1e6:>10.0f}",
                    flush=True,
                )
        if options.out:
            write(rows, options.out)
    print("\nslopes over N      seconds  signals  memory")
    for candidates in GRAPHS:
        for kind in KINDS:
            line = [row for row in rows if (row["candidates"], row["signals"]) == (candidates, kind)]
            slopes = [slope(line, field) for field in ("seconds", "signal bytes", "memory")]
            print(f"{candidates:>4} {kind:<10} " + " ".join(f"{s:>8.2f}" for s in slopes))


if __name__ == "__main__":
    main()
