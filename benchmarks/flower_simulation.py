"""The same FedAvg job by fedloom and by Flower's own simulation engine, with Flower's own FedAvg.

Five clients share the digits (task: digit), `small-cnn`, one epoch a round in the same batches, SGD. Flower's clients
train with a plain torch loop on one thread and keep their data between messages. Every run is a process of its own and
the kinds take turns. Seconds of a round are those between the ends of round 2 and of the last but one, so start-up and
evaluation are not counted: fedloom's rounds hold checkpoints and metrics on the disk, Flower's write nothing. The
largest difference between the final models is printed: rounding, which grows from round to round. Needs
flwr[simulation].
"""

from __future__ import annotations

import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from _common import arguments, machine

# Neither Flower nor Ray shall report to its makers.
QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_USAGE_STATS_ENABLED": "0"}
WAYS: dict[str, tuple[str, Mapping[str, Any]]] = {
    "fedloom, process": ("fedloom", {"engine": "process"}),
    "fedloom, process, 2 workers": ("fedloom", {"engine": "process", "workers": 2}),
    "fedloom, flower": ("fedloom", {"engine": "flower"}),
    "Flower's simulation, 1 client at a time": ("simulation", {"together": 1}),
    "Flower's simulation, 2 clients at a time": ("simulation", {"together": 2}),
}


def recipe(rounds: int, **runtime: Any) -> Any:
    """The job; evaluation only before the first round and after the last."""
    from fedloom.federation.recipes import load

    settings = {
        "data": "{name: digits, tasks: [digit]}",
        "partition": "{name: iid, clients: 5, val_fraction: 0.0}",
        "training.epochs": 1,
        "training.rounds": rounds,
        "evaluation.every": 1000,
        "evaluation.splits": "[test]",
        "training.channels_last": "false",  # as the plain loop has it: other kernels round otherwise
        **{f"runtime.{key}": value for key, value in runtime.items()},
    }
    return load("digits-tasks", [f"{key}={value}" for key, value in settings.items()])


class Clock:
    """Notes when each round ends; a fedloom progress."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def round(self, round: int, numbers: Mapping[str, float]) -> None:
        self.ends.append(time.perf_counter())

    def __getattr__(self, name: str) -> Any:
        return lambda *args: None


def fedloom(out: str, rounds: int, **runtime: Any) -> list[float]:
    """When each round ended; the run and its final model lie in `out`."""
    from fedloom.engines.api import run

    clock = Clock()
    run(recipe(rounds, **runtime), out, progress=clock)
    return clock.ends


@functools.cache
def built() -> Any:
    """Data, partition and initial model; once in a process."""
    from fedloom.federation.rounds.build import build

    return build(recipe(1))


def simulation(out: str, rounds: int, together: int) -> list[float]:
    """The same by Flower; `together` clients train at once, each on a core."""
    from flwr.app import ArrayRecord
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation
    from safetensors.torch import save_file

    clock, server, clients = Clock(), ServerApp(), ClientApp()
    clients.train()(local)

    @server.main()
    def main(grid: Any, context: Any) -> None:
        strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=5, min_available_nodes=5)
        initial = ArrayRecord(built().module.state_dict())
        result = strategy.start(
            grid, initial, rounds, evaluate_fn=lambda round, arrays: clock.round(round, None, None) if round else None
        )
        Path(out).mkdir()
        save_file(result.arrays.to_torch_state_dict(), Path(out) / "model.safetensors")

    cores = (os.cpu_count() or 1) // together
    run_simulation(server, clients, 5, backend_config={"client_resources": {"num_cpus": cores, "num_gpus": 0}})
    return clock.ends


def local(message: Any, context: Any) -> Any:
    """Return what a Flower client does: an epoch of SGD by a plain loop."""
    import torch
    from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
    from torch.nn.functional import cross_entropy

    from fedloom.core.context import Ctx

    torch.set_num_threads(1)
    job, training = built(), built().recipe.training
    name = sorted(job.federation.clients)[int(context.node_config["partition-id"])]
    part = job.federation.clients[name].part("train")
    model = job.module
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=training.optimizer.lr)
    now = Ctx(round=message.content["config"]["server-round"], seed=job.recipe.seed)
    order = torch.randperm(len(part), generator=now.rng("order", name, 0))
    for batch in part.index[order].split(training.batch_size):
        x, y = part.examples.batch(batch, torch.device("cpu"))
        optimizer.zero_grad()
        cross_entropy(model(x)["digit"], y["digit"]).backward()
        optimizer.step()
    metrics = MetricRecord({"num-examples": len(part)})
    return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=message)


def main(turns: int, rounds: int) -> None:
    from safetensors.torch import load_file

    ways = {name: way for name, way in WAYS.items() if way[0] == "fedloom" or find_spec("ray") is not None}
    if len(ways) < len(WAYS):
        print("skipped Flower's simulation: pip install 'flwr[simulation]'")
    print(f"{machine()}; {turns} turns of {rounds} rounds, load {os.getloadavg()[0]:.1f}", flush=True)
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    models = {}
    with tempfile.TemporaryDirectory() as base:
        path = os.pathsep.join(filter(None, [str(Path(__file__).parent.resolve()), os.environ.get("PYTHONPATH")]))
        env = os.environ | QUIET | {"PYTHONPATH": path, "FLWR_HOME": str(Path(base) / "flwr")}
        for i in range(turns):
            for name, (kind, options) in ways.items():
                out, ends = Path(base) / f"{name}{i}", Path(base) / "ends.json"
                given = {"out": str(out), "rounds": rounds, **options}
                # Imported, not run as a script: what Ray pickles by name keeps its data between messages.
                code = f"import json, pathlib, flower_simulation as f; ends = f.{kind}(**{given!r})\n"
                code += f"pathlib.Path({str(ends)!r}).write_text(json.dumps(ends))"
                start = time.perf_counter()
                done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
                whole = time.perf_counter() - start
                if done.returncode:
                    sys.exit(f"{name}: {done.stderr[-3000:]}")
                when = json.loads(ends.read_text())
                taken[name].append(((when[-2] - when[1]) / (rounds - 3), whole))
                models[name] = load_file(out / "model.safetensors")
    first = next(iter(ways))
    base_round = statistics.median(each for each, _ in taken[first])
    print("seconds of a round, start-up not counted (median, least), over the first row; seconds of the whole process")
    for name, values in taken.items():
        each, whole = zip(*values, strict=True)
        middle = statistics.median(each)
        apart = max((models[name][k] - v).abs().max().item() for k, v in models[first].items())
        print(
            f"{name:<42} {middle:.3f} {min(each):.3f}  {middle / base_round:6.2f} times;"
            f" {statistics.median(whole):6.1f} s; models differ by {apart:.1e}"
        )


if __name__ == "__main__":
    main(*((1, 6) if arguments(__doc__).quick else (3, 22)))
