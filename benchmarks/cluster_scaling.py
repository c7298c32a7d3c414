"""Measure what a second process gives, and what it costs: training spread over ranks, and a server step shared by them.

First a federation whose work is training (12 clients, the digits at 32 x 32, a small ResNet, FedAvg, one thread each):
seconds of the rounds after the first, with one rank against two on two cores. Start-up is not counted, nor is the first
round, in which costs are guessed. Aim: 1.7 times as fast.

Then the server's step alone: 30 clients, d = 10 million float32, two ranks with 15 rows each, against the same step in
one process. Bytes are what the busier rank sends; the least that R ranks could do with, counted as follows:

  mean      2 (R-1)/R d values: an all-reduce. Ours sends float64 sums, which are exact, so that nothing depends on who
            has which rows: (8 + 4) (R-1)/R d bytes against (4 + 4).
  pcgrad    a Gram matrix needs every pair of values of a column in one place. The values that do not travel are in one
            process, which has K/R of them, so K (R-1)/R of every column's must: (R-1)/R^2 K d a rank, if ranks take
            equal parts. Then the result, (R-1)/R d a rank.
  personal  as pcgrad, and K/R rows of results for each process, of which it has the share 1/R: (R-1)/R^2 K d more.

`exact` sends all rows to rank 0: K/R d values from each other rank, and one model back.

Both parts want an idle machine with two cores; the load average is printed, for with other work beside it the numbers
say little. The least of several turns counts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from _common import arguments, machine, phases, without_data

K, RANKS = 30, 2
WAYS = {
    "mean": ("fedavg", {}, False),
    "pcgrad": ("fedavg", {"pcgrad": {}}, False),
    "personal": ("matfl", {}, False),
    "mean, exact": ("fedavg", {}, True),
    "pcgrad, exact": ("fedavg", {"pcgrad": {}}, True),
}


def torchrun(ranks: int, *words: str) -> None:
    """This file in so many processes of one thread."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), __file__]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, *words], env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)


def training(quick: bool) -> None:
    """Seconds of rounds with one and with two ranks."""
    repeats, seconds = (1, {1: [], 2: []}) if quick else (3, {1: [], 2: []})
    for _ in range(repeats):
        for ranks, found in seconds.items():
            with tempfile.TemporaryDirectory() as scratch:
                torchrun(ranks, "train", scratch, "quick" if quick else "")
                parts = ("dispatch", "train and aggregate", "evaluate")
                found.append(min(sum(spent[p] for p in parts) for spent in phases(Path(scratch) / "run")[1:]))
    one, two = (min(seconds[ranks]) for ranks in (1, 2))
    print(f"a round of training: 1 rank {one:.2f} s, 2 ranks {two:.2f} s: {one / two:.2f} times as fast")


def train(scratch: str, quick: bool) -> None:
    """One of the processes that train."""
    from fedloom.engines.cluster.comm import Comm
    from fedloom.engines.cluster.launch import take_part
    from fedloom.federation.recipes import load

    changes = [
        "data.size=32",
        "model={name: resnet10, width: 8, norm: group}",
        f"partition={{name: class-dirichlet, clients: {4 if quick else 12}, alpha: 100}}",
        f"training.rounds={2 if quick else 5}",
        f"training.epochs={1 if quick else 6}",
        "evaluation={every: 100, splits: [test]}",
        "runtime.exact=false",
    ]
    comm = Comm.join()
    take_part(comm, Path(scratch) / "run", load("digits-tasks", changes))
    comm.leave()


def steps(quick: bool) -> None:
    """Bytes and seconds of the server's step."""
    d, turns = (200_000, 1) if quick else (10_000_000, 4)
    with tempfile.TemporaryDirectory() as scratch:
        torchrun(1, "step", scratch, str(d), str(turns))
        torchrun(RANKS, "step", scratch, str(d), str(turns))
        one, many = (json.loads((Path(scratch) / f"{ranks}.json").read_text()) for ranks in (1, RANKS))
    share, both = (RANKS - 1) / RANKS * d * 4, (RANKS - 1) / RANKS**2 * K * d * 4
    least = {"mean": 2 * share, "pcgrad": both + share, "personal": 2 * both}
    print(f"\nserver step, K = {K}, d = {d:,}, {RANKS} ranks\n")
    print("| | one process | shared | MB sent by the busier rank | least |")
    print("|---|---|---|---|---|")
    for name in WAYS:
        key = name.split(",")[0]
        seconds, nbytes = many[name]
        print(f"| {name} | {one[key][0]:.2f} s | {seconds:.2f} s | {nbytes / 1e6:.1f} | {least[key] / 1e6:.1f} |")


def step(scratch: str, d: int, turns: int) -> None:
    """One of the processes that take the server's step."""
    import torch

    from fedloom.core.layout import Block, Layout
    from fedloom.engines.cluster.comm import Comm
    from fedloom.engines.cluster.member import Member
    from fedloom.engines.cluster.sharing import Sharing
    from fedloom.federation.recipes import load
    from fedloom.federation.rounds.build import build_method
    from fedloom.federation.rounds.federation import BuiltFederation
    from fedloom.federation.rounds.messages import Payload
    from fedloom.federation.rounds.round import Progress, Round
    from fedloom.federation.rounds.server import server_init, server_step

    torch.set_num_threads(1)
    comm = Comm.join()
    tensors = [d // 50] * 49 + [d - 49 * (d // 50)]
    layout = Layout(tuple(Block(f"{i}.weight", (size,)) for i, size in enumerate(tensors)))
    names = [f"c{i:02}" for i in range(K)]
    federation = BuiltFederation((), without_data({c: {"t": (None, 1.0)} for c in names}, examples=100))
    found: dict[str, Any] = {}
    for name, (base, add, exact) in WAYS.items():
        if exact and comm.size == 1:
            continue
        recipe = load("digits-tasks", [f"method={json.dumps({'name': base, 'add': add})}"])
        about = {"recipe": recipe, "method": build_method(recipe.method), "layout": layout, "federation": federation}
        method = about["method"]
        about |= {"shared": method.shared_part(layout), "shared_buffers": method.shared_buffers(layout)}
        built: Any = SimpleNamespace(**about, module=None, attacks={})
        member = (Member if exact else Sharing)(built, comm, SimpleNamespace())  # type: ignore[arg-type]
        mine = [c for c in names if member.owner[c] == comm.rank]
        rows = torch.stack([torch.randn(d, generator=torch.Generator().manual_seed(int(c[1:]))) for c in mine])
        server = server_init(built.method, layout, torch.zeros(d), {})
        seconds, nbytes = [], 0
        for _ in range(turns):
            comm.all(None)
            payloads = (Payload((c, None), 100.0, {"values": row}) for c, row in zip(mine, list(rows), strict=True))
            before, start = comm.sent, time.perf_counter()
            if comm.size == 1:
                server_step(built, payloads, server, Round(built, 1, Progress()).ctx(names))
            else:
                member._step(server, payloads, Round(built, 1, Progress()), names)
            nbytes = comm.sent - before
            seconds.append(max(comm.all(time.perf_counter() - start)))
        found[name] = [min(seconds), max(comm.all(nbytes))]
    if comm.rank == 0:
        (Path(scratch) / f"{comm.size}.json").write_text(json.dumps(found))
    comm.leave()


def main() -> None:
    """Both parts, or what one of their processes does."""
    match sys.argv[1:]:
        case ["train", scratch, *quick]:
            train(scratch, quick == ["quick"])
        case ["step", scratch, d, turns]:
            step(scratch, int(d), int(turns))
        case _:
            quick = arguments(__doc__).quick
            print(f"{machine()}, load {os.getloadavg()[0]:.1f}\n")
            training(quick)
            steps(quick)
            print(f"\nload afterwards {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
