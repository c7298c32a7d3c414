"""Which model is measured on whose data: the lines of metrics.jsonl."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedloom.runtime.build import Built
from fedloom.runtime.evaluation import Scores
from fedloom.runtime.executors import Executor
from fedloom.runtime.federation import Client
from fedloom.runtime.steps import Message, model_of
from fedloom.runtime.worker import EvalJob, TrainDone
from fedloom.stages.stage import State

Record = dict[str, Any]


@dataclass
class _Group:
    """Clients with the same model and the same data: one measurement serves all."""

    message: Message
    state: State
    client: str
    split: str
    members: list[tuple[Client, str]] = field(default_factory=list)


def models_for(built: Built, state: State, client: str) -> dict[str, tuple[Message, State]]:
    """The models that a client may use: name -> (message, client state), the last one being the one to use.

    "global" is one complete model that is meant for all; "personal" is the client's own.
    """
    server, mine, method = state["server"], state["clients"].get(client, {}), built.method
    own_parts = bool(method.private_part(built.layout).blocks)
    own_buffers = method.buffers == "local" and bool(built.layout.buffers.blocks)
    common = Message(server["model"], server["buffers"], server["integers"])
    models: dict[str, tuple[Message, State]] = {}
    if method.stage.reduces and not own_parts and not own_buffers:
        models["global"] = common, {}
    if not models or method.own_model or method.tune:
        models["personal"] = Message(model_of(server, client), server["buffers"], server["integers"]), mine
    return models


def measure(built: Built, executor: Executor, state: State) -> list[Record]:
    """Records of all clients' global and personal models on all wanted splits.

    A model that several clients share, on data that they share, is measured once.
    """
    evaluation = built.recipe.evaluation
    groups: dict[tuple[str | None, int], _Group] = {}
    for client in built.federation.clients.values():
        for model, (message, mine) in models_for(built, state, client.id).items():
            if model not in evaluation.models:
                continue
            owner = client.id if model == "personal" else None
            for split in evaluation.splits:
                part = client.part(split)
                if len(part):
                    group = groups.setdefault((owner, id(part)), _Group(message, mine, client.id, split))
                    group.members.append((client, model))
    entries = list(groups.values())
    jobs = []
    for number, g in enumerate(entries):
        tasks = dict.fromkeys(name for client, _ in g.members for name in client.tasks)
        personal = g.members[0][1] == "personal"
        jobs.append(EvalJob(number, g.message, g.state, g.client, g.split, tuple(tasks), state["round"], personal))
    results: dict[int, Scores] = dict(executor.run(jobs))
    records: list[Record] = []
    for number, g in enumerate(entries):
        for client, model in g.members:
            records += _records(client, model, g.split, results[number])
    return sorted(records, key=lambda r: (r["client"], r["model"], r["split"], r["task"], r["metric"]))


def trained_records(built: Built, done: Iterable[TrainDone]) -> list[Record]:
    """Records of the models straight after local training, where they were measured."""
    clients = built.federation.clients
    return [
        record
        for d in sorted(done, key=lambda d: d.client)
        for split, scores in d.trained.items()
        for record in _records(clients[d.client], "trained", split, scores)
    ]


def train_records(done: Iterable[TrainDone]) -> list[Record]:
    """Mean training loss of each client and task in a round."""
    return [
        {"client": d.client, "task": task, "loss": loss, "examples": d.result.examples, "steps": d.result.steps}
        for d in sorted(done, key=lambda d: d.client)
        for task, loss in d.result.losses.items()
    ]


def _records(client: Client, model: str, split: str, scores: Scores) -> list[Record]:
    data = f"{client.part(split).name} {split}"
    return [
        {
            "client": client.id,
            "task": task,
            "metric": metric,
            "value": value,
            "model": model,
            "split": split,
            "data": data,
        }
        for task in client.tasks
        for metric, value in scores[task].items()
    ]


def validation_loss(built: Built, records: Sequence[Mapping[str, Any]]) -> float | None:
    """Mean over clients of the task-weighted validation loss, personal model before global; None if not measured.

    Clients without validation data do not count.
    """
    losses: dict[str, dict[str, dict[str, float]]] = {}
    for r in records:
        if r["split"] == "val" and r["metric"] == "loss" and r["model"] != "trained":
            losses.setdefault(r["client"], {}).setdefault(r["model"], {})[r["task"]] = r["value"]
    scores = []
    for client, by_model in losses.items():
        chosen = by_model.get("personal") or by_model["global"]
        weights = {name: w for name, (_, w) in built.federation.clients[client].tasks.items()}
        scores.append(sum(weights[t] * v for t, v in chosen.items()) / sum(weights.values()))
    return math.fsum(scores) / len(scores) if scores else None


def headline(built: Built, line: Mapping[str, Any]) -> tuple[float | None, float | None]:
    """(mean training loss, mean primary metric on validation, else test data), for a progress bar.

    The second is None where tasks are judged by different metrics, whose mean says nothing.
    """
    losses = [r["loss"] for r in line["train"]]
    primary = {t.name: t.primary for t in built.federation.tasks}
    values: dict[str, list[float]] = {}
    for r in line["metrics"]:
        if r["metric"] == primary[r["task"]] and r["value"] == r["value"]:
            values.setdefault(r["split"], []).append(r["value"])
    shown = values.get("val") or values.get("test") or []
    return _mean(losses), _mean(shown) if len(set(primary.values())) == 1 else None


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None
