"""Measure what fedloom costs beside what it does, in one table: the work, a reference measured in turns with it, and
the aim.

`make bench` runs it. Times are CPU seconds of one thread (of the process and its children), or, where it says so,
seconds on the wall; a ratio says more than they do. With names, only those rows: `table.py copies start`.

    step        FedHCA2's stage for the encoder (6 rows of 6 million), against a pass that sums the Gram matrix and one
                that mixes the rows; aim 1.5
    rules       robust rules for 20 rows of a million, against the Gram matrix and the mean; aim 1.5
    noise       normal numbers of a secret, a million of them, against those of torch's generator; aim at most 3
    copies      a round beside its forward and backward passes, in copies of its matrix: see round_copies.py
    clients     a round of 1000 clients with 20 examples and a tiny network, one at a time, against stacked; aim 15
    evaluation  the share of a run that goes into measuring: matu/eight-embedded, dfmtl-scenes and
                fedhca2/scenes-rooms-st-outside-mt; aim 10 %
    cell        a grid's cell of one tiny round, on the wall: the difference of grids with five cells and with one
    start       `fedloom show digits-tasks`, against `import torch`
    loop        FedAvg of 10 clients x 600 images, whole processes on the wall: see peers
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import round_copies
from _common import alone, interleaved, machine, phases

Row = tuple[str, str, str, str]
"""What was done, what it took, the reference, and the ratio with its aim."""


def step(quick: bool) -> Iterator[Row]:
    """FedHCA2's stage against two passes over the matrix."""
    import torch

    from fedloom.core.context import Ctx
    from fedloom.core.updates import Updates
    from fedloom.stages import HyperConflictAverse

    torch.set_num_threads(1)
    N, d = 6, 300_000 if quick else 6_000_000
    updates, stage = Updates.of(1e-4 * torch.randn(N, d) + 1e-5), HyperConflictAverse(average_identical=False)
    ctx = Ctx(2, 0, updates.rows)
    _, state = stage(updates, stage.init(updates.layout), ctx)
    out, wide = torch.empty(N, d), torch.empty(N, 1 << 14, dtype=torch.float64)

    def streamed() -> None:
        G = torch.zeros(N, N, dtype=torch.float64)
        for part in updates.data.split(1 << 14, dim=1):
            G.addmm_(chunk := wide[:, : part.shape[1]].copy_(part), chunk.t())
        torch.mm(G.float(), updates.data, out=out)

    def ours() -> None:
        assert stage(updates, state, ctx)[0].X.shape == out.shape

    found = interleaved({"ours": ours, "streamed": streamed}, 3 if quick else 7, min, time.process_time)
    yield (
        f"FedHCA2's stage, {N} x {d:,}",
        f"{found['ours']:.3f} s",
        f"{found['streamed']:.3f} s",
        _aim(found["ours"] / found["streamed"], 1.5),
    )


def rules(quick: bool) -> Iterator[Row]:
    """Rules against hostile rows."""
    import torch

    from fedloom import stages
    from fedloom.core.context import Ctx
    from fedloom.core.gram import gram
    from fedloom.core.updates import Updates

    torch.set_num_threads(1)
    k, d = 20, 50_000 if quick else 1_000_000
    updates, mean, ctx = Updates.of(torch.randn(k, d)), stages.Mean(), Ctx(1)

    def ours(stage: stages.Stage) -> Callable[[], object]:
        whole, state = stage >> mean, (stage >> mean).init(updates.layout)
        return lambda: whole(updates, state, ctx)[0].X

    ways: dict[str, Callable[[], object]] = {"plain": lambda: (gram(updates), mean(updates, {}, ctx)[0].X)}
    choosing = (stages.Krum, stages.MultiKrum, stages.NearestMix, stages.GeometricMedian)
    others = (stages.CentredClip, stages.ClipNorms, stages.TrimmedMean, stages.Median)
    ways |= {rule.__name__: ours(rule()) for rule in (*choosing, *others)}
    found = interleaved(ways, 2 if quick else 5, min, time.process_time)
    plain = found.pop("plain")
    for name, spent in found.items():
        yield f"{name}, {k} x {d:,}", f"{spent:.3f} s", f"{plain:.3f} s", _aim(spent / plain, 1.5)


def noise(quick: bool) -> Iterator[Row]:
    """Private noise from a cipher, against that of a seed."""
    import torch

    from fedloom.core.context import Ctx

    torch.set_num_threads(1)
    n, secret = 50_000 if quick else 1_000_000, Ctx(1, secret=bytes(32))
    ways = {"secret": lambda: secret.hidden("noise").normal(n), "seed": lambda: Ctx(1).hidden("noise").normal(n)}
    found = interleaved(ways, 3 if quick else 15, min, time.process_time)
    yield (
        f"{n:,} normal numbers of a secret",
        f"{found['secret']:.4f} s",
        f"{found['seed']:.4f} s, of a seed",
        _aim(found["secret"] / found["seed"], 3),
    )


def copies(quick: bool) -> Iterator[Row]:
    """A round beside the bare loop, in copies."""
    for method, (aim, _) in round_copies.METHODS.items():
        m = alone(round_copies.measure, method, 256 if quick else 2560, 4 if quick else 8)
        spent = (m["round"] - m["loop"]) / m["copy"]
        yield (
            f"a round of {method}, 5 x {m['d']:,.0f}",
            f"{m['round']:.3f} s",
            f"{m['loop']:.3f} s",
            f"{spent:.1f} copies (aim {aim})",
        )


def tiny(stacked: bool, count: int) -> float:
    """CPU seconds of a round of many tiny clients, the least of some rounds after the first."""
    import numpy as np
    import torch

    from fedloom.engines import api
    from fedloom.federation.recipes.loader import load

    torch.set_num_threads(1)
    rng, ends = np.random.default_rng(0), []
    progress = api.Progress()
    progress.round = lambda *_: ends.append(time.process_time())  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.npz"
        train = {"x_train": rng.random((20 * count, 16), np.float32), "y_train": rng.integers(0, 4, 20 * count)}
        np.savez(file, x_test=train["x_train"][:50], y_test=train["y_train"][:50], **train)
        recipe = {
            "name": "tiny",
            "data": {"name": "arrays", "path": str(file)},
            "partition": {"name": "iid", "clients": count, "val_fraction": 0.0},
            "model": {"name": "mlp", "hidden": [16]},
            "method": "fedavg",
            "training": {"rounds": 5, "epochs": 2, "batch_size": 10, "stacked": stacked, "optimizer": {"lr": 0.1}},
            "evaluation": {"every": 10_000, "splits": ["test"], "predictions": False},
        }
        api.run(load(recipe), Path(folder) / "run", progress=progress)
    return min(b - a for a, b in pairwise(ends[:-1]))


def clients(quick: bool) -> Iterator[Row]:
    """Many clients one at a time and stacked."""
    count = 100 if quick else 1000
    one, stacked = (alone(tiny, way, count) for way in (False, True))
    yield (
        f"a round of {count} tiny clients, stacked",
        f"{stacked:.2f} s",
        f"{one:.2f} s",
        f"{one / stacked:.1f} times faster (aim 15)",
    )


def evaluation(quick: bool) -> Iterator[Row]:
    """Yield what share of a run is measuring."""
    import torch

    from fedloom.engines import api
    from fedloom.federation.recipes.loader import load

    torch.set_num_threads(1)
    names = ("matu/eight-embedded", "dfmtl-scenes", "fedhca2/scenes-rooms-st-outside-mt")
    for name in names[:1] if quick else names:
        changes = ("training.rounds=2",) if quick else ("training.rounds=10",)
        with tempfile.TemporaryDirectory() as folder:
            start = time.perf_counter()
            api.run(load(name, changes), Path(folder) / "run")
            whole = time.perf_counter() - start
            spent = sum(parts.get("evaluate", 0.0) for parts in phases(Path(folder) / "run"))
        yield f"measuring, of {name}", f"{spent:.1f} s", f"{whole:.1f} s", f"{spent / whole:.0%} (aim 10 %)"


def cell(quick: bool) -> Iterator[Row]:
    """One more cell of a grid."""
    taken = []
    for seeds in (1, 2 if quick else 5):
        with tempfile.TemporaryDirectory() as folder:
            grid = {
                "name": "tiny",
                "data": {"Digits": {"recipe": "digits-tasks"}},
                "bases": {"FedAvg": {"method": "fedavg"}},
                "references": [],
                "seeds": list(range(seeds)),
                "set": {"training.rounds": 1, "training.steps": 1, "training.epochs": None},
            }
            (Path(folder) / "g.yaml").write_text(json.dumps(grid))
            taken.append((seeds, _wall([*FEDLOOM, "grid", "g.yaml", "-q", "--jobs", "1"], folder)))
    (few, short), (many, long) = taken
    spent = (long - short) / (many - few)
    yield "a cell of one tiny round", f"{spent:.2f} s", f"{short:.2f} s, the grid of one", f"{spent:.2f} s (aim 1)"


FEDLOOM = (sys.executable, "-c", "import sys; sys.argv[0] = 'fedloom'; from fedloom.cli import main; main()")


def start(quick: bool) -> Iterator[Row]:
    """Until a command has said something."""
    turns = 1 if quick else 4
    shown = min(_cpu([*FEDLOOM, "show", "digits-tasks"]) for _ in range(turns))
    torch = min(_cpu([sys.executable, "-c", "import torch"]) for _ in range(turns))
    yield "`fedloom show digits-tasks`", f"{shown:.2f} s", f"{torch:.2f} s", _aim(shown / torch, 1.3)


def loop(quick: bool) -> Iterator[Row]:
    """Federated averaging by hand, and with one and two workers."""
    peers = Path(__file__).parent / "peers"
    sys.path.append(str(peers))
    from job import write

    ways = {"by hand": ("loop", "2"), "1 worker": ("ours", "1"), "2 workers": ("ours", "2")}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "images.npz"
        write(path)

        def child(kind: str, option: str) -> Callable[[], object]:
            return lambda: _wall([sys.executable, str(peers / f"{kind}.py"), str(path), option], folder)

        found = interleaved({name: child(*way) for name, way in ways.items()}, 1 if quick else 3, min)
    by_hand, *ours = (found[name] for name in ways)
    for name, spent in zip(list(ways)[1:], ours, strict=True):
        yield f"10 clients x 600 images, {name}", f"{spent:.1f} s", f"{by_hand:.1f} s", _aim(spent / by_hand, 0.65)


def _aim(ratio: float, aim: float) -> str:
    return f"{ratio:.2f} times (aim {aim})"


def _wall(command: Sequence[str], folder: str) -> float:
    begun = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True, cwd=folder)
    return time.perf_counter() - begun


def _cpu(command: Sequence[str]) -> float:
    def spent() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    before = spent()
    subprocess.run(command, check=True, capture_output=True)
    return spent() - before


ROWS: dict[str, Callable[[bool], Iterator[Row]]] = {
    f.__name__: f for f in (step, rules, noise, copies, clients, evaluation, cell, start, loop)
}


def main() -> None:
    parser: Any = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"any of {', '.join(ROWS)}; by default all")
    parser.add_argument("--quick", action="store_true", help="less work: does it run at all?")
    given = parser.parse_args()
    if unknown := set(given.rows) - ROWS.keys():
        parser.error(f"unknown rows {', '.join(sorted(unknown))}; there are {', '.join(ROWS)}")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    print(f"{machine()}\n{'work':<48} {'takes':>9}  {'reference':<24} ratio", flush=True)
    for name in given.rows or ROWS:
        for work, taken, reference, ratio in ROWS[name](given.quick):
            print(f"{work:<48} {taken:>9}  {reference:<24} {ratio}", flush=True)


if __name__ == "__main__":
    main()
