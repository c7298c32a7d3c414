"""Measure what every method and add-on costs beside FedAvg: CPU seconds, memory, bytes and what is kept.

Five clients on scikit-learn's handwritten digits (digits-tasks), one local epoch, a CNN of 545,000 parameters. Add-ons
act on FedAvg, and peers of the thesis' experiments have three neighbours. What is refused there is measured elsewhere,
beside FedAvg there: robust rules with three clients per task, low-rank factors on a small vision transformer, staleness
among asynchronous peers, Sheaf-FMTL on a smaller CNN. What is left out and why is listed.

Each case is a process of its own. Seconds are CPU seconds of one thread per round, the least of the second to the
fourth of five rounds, so that neither building nor measuring counts; FedAvg runs in each process, too. Memory (on
Linux) is the peak above what was resident before: the server, and one client that trains at a time. Kept is the
checkpoint of the last round: the state of the server and of all clients. Bytes are those of all clients together, the
mean of the rounds.

`--quick` measures four cases. `--out DIR` writes method-costs.csv there; where it is there already, the cases that it
lacks are measured and added.
"""

from __future__ import annotations

import csv
import itertools
import multiprocessing
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from _common import QUICK, arguments, machine, resident, write_table

HOST = (
    "model={name: small-cnn, hidden: 1024}",
    "training.epochs=1",
    "training.rounds=5",
    "evaluation={every: 1000, splits: [test], predictions: false}",
)
ROUNDS = 5
GRADIENT, OVERLAP = "{gradient: 1}", "{overlap: 0.5, gradient: 0.5}"
SAFE = "{c: 0.7, safeguards: {clip: 5, normalise: own-norm}}"
THESIS = {
    "A1": (OVERLAP, "min-max", "full", "null"),
    "B1": (GRADIENT, "none", "encoder", "null"),
    "B1, cross-loss": ("{cross-loss: 1}", "min-max", "encoder", "null"),
    "B2": (GRADIENT, "none", "encoder", SAFE),
    "B3": (GRADIENT, "none", "full", SAFE),
}
"""Experiments of the thesis' Table 6.2 with one task a peer: signals, how they are normalised, scope and mixing."""
NEEDS = {"server-step": "step: 2"}
THREE, FACTORS, PACES = ", three clients a task", ", low-rank factors", ", asynchronous peers"
SMALLER = ", a smaller CNN"
HOSTS = {
    "": (),
    THREE: ("partition.clients_per_task=3", "partition.all_task_clients=0"),
    FACTORS: ("model={name: tiny-vit, width: 128, depth: 4, num_heads: 4, lora: {rank: 8}}",),
    SMALLER: ("model.hidden=32",),
    PACES: ("peers={mode: asynchronous, weights: {kind: size}, scenario: {speed: 20}}",),
}
"""What follows a name -> where such cases are measured, beside FedAvg there."""
ELSEWHERE = {
    **dict.fromkeys(
        ("centred-clip", "clip", "krum", "mda", "median", "multi-krum", "nnm", "rfa", "trimmed-mean"), THREE
    ),
    **dict.fromkeys(("fedex-lora", "fedsa-lora", "flora"), FACTORS),
    "staleness": PACES,
    "sheaf-fmtl": SMALLER,  # whose maps have the square of the number of parameters
}
LEFT_OUT = {
    "constant": "nothing is trained or sent",
    "fedavg + fedrpca": "a round takes minutes on this model",
}
FIELDS = ("method", "CPU s per round", "times FedAvg", "MB of memory", "MB kept", "MB up", "MB down")


def cases() -> dict[str, tuple[str, ...]]:
    """Name -> changes of the recipe, after those of its host."""
    from fedloom.methods import ADDONS, METHODS

    found: dict[str, tuple[str, ...]] = {
        f"{name}{ELSEWHERE.get(name, '')}": (f"method={name}",) for name in ("fedavg", *sorted(METHODS.entries))
    }
    found |= {f"fedavg{where}": ("method=fedavg",) for where in HOSTS}
    for name in sorted(ADDONS.entries):
        change = f"method={{name: fedavg, add: {{{name}: {{{NEEDS.get(name, '')}}}}}}}"
        found[f"fedavg + {name}{ELSEWHERE.get(name, '')}"] = (change,)
    for name, (signals, normalised, scope, averse) in THESIS.items():
        judged = f"{{signals: {signals}, gradient: loss, scale: cosine, cross_loss: negative, normalise: {normalised}}}"
        weights = f"{{kind: {'soft' if averse == 'null' else 'uniform'}}}"
        peers = (
            f"similarity: {judged}, choose: {{top: 3}}, weights: {weights}, scope: {scope}, conflict_averse: {averse}"
        )
        found[f"thesis, {name}"] = ("method=fedavg", f"peers={{{peers}}}")
    return {name: changes for name, changes in found.items() if name not in LEFT_OUT}


def host(name: str) -> tuple[str, ...]:
    """Return the changes of the recipe that make the place where a case is measured."""
    return next((changes for where, changes in HOSTS.items() if where and name.endswith(where)), ())


def went(*changes: str) -> dict[str, float]:
    """Return the CPU seconds of a round of a run, its MB per round, and those of its checkpoint."""
    from fedloom.engines.api import run
    from fedloom.federation.recipes import load
    from fedloom.federation.rounds.progress import Progress
    from fedloom.federation.runs.checkpoint import tensors_in
    from fedloom.federation.runs.folder import RunFolder
    from fedloom.federation.runs.reader import Run

    ends: list[float] = []

    class Clock(Progress):
        def round(self, round: int, numbers: Any) -> None:
            ends.append(time.process_time())

    with tempfile.TemporaryDirectory() as folder:
        made = run(load("digits-tasks", (*HOST, *changes)), Path(folder) / "run", progress=Clock())
        total = Run.read(made.folder).bytes_total()
        with RunFolder(made.folder) as opened:  # a tensor that the state has twice is one
            kept = sum({id(x): x.nbytes for x in tensors_in(opened.load()[0])}.values())
    seconds = min(end - start for start, end in itertools.pairwise(ends[-ROUNDS:-1]))
    return {"seconds": seconds, "kept": kept / 1e6, **{way: total[way] / ROUNDS / 1e6 for way in ("up", "down")}}


def case(where: tuple[str, ...], changes: tuple[str, ...]) -> dict[str, float] | str:
    """Return the numbers of one case, or why it is refused."""
    import torch

    from fedloom.core.errors import UserError

    torch.set_num_threads(1)
    went("method=fedavg", "model.hidden=16")
    if (peak := Path("/proc/self/clear_refs")).exists():
        peak.write_text("5")  # the peak begins anew
    before = resident("VmRSS")
    try:
        found = went(*where, *changes)
    except (UserError, ValueError) as refused:
        return str(refused)
    found["memory"] = (resident("VmHWM") - before) / 1e6
    return {**found, "times": found["seconds"] / went(*where, "method=fedavg")["seconds"]}


def main() -> None:
    options = arguments(__doc__, "the folder for method-costs.csv")
    import fedloom.engines.api  # noqa: F401 - torch is there before processes part

    print(machine())
    print(("{:<34}" + "{:>11}" * 6).format("method", "CPU s", "x FedAvg", "memory", "kept", "up", "down"))
    rows, refused = [], dict(LEFT_OUT)
    every, table = cases(), options.out and options.out / "method-costs.csv"
    if table and table.exists():
        with table.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        every = {name: changes for name, changes in every.items() if name not in {row["method"] for row in rows}}
    for name in list(every)[:: 25 if QUICK else 1]:
        with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
            found = pool.submit(case, host(name), every[name]).result()
        if isinstance(found, str):
            refused[name] = found
            continue
        values = [f"{found['seconds']:.2f}", f"{found['times']:.2f}"]
        values += [f"{found[key]:.1f}" for key in ("memory", "kept")] + [f"{found[key]:.2f}" for key in ("up", "down")]
        print(("{:<34}" + "{:>11}" * 6).format(name, *values), flush=True)
        rows.append(dict(zip(FIELDS, (name, *values), strict=True)))
    for name, why in refused.items():
        print(f"left out: {name}: {why}")
    if table:
        write_table(table, FIELDS, rows)


if __name__ == "__main__":
    main()
