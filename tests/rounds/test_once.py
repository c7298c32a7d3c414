"""Test what is the same for many clients is there once: a model that they share, its measurement, bytes of messages."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from fedloom.engines.pool import executor
from fedloom.federation.recipes.loader import load
from fedloom.federation.rounds import round as round_
from fedloom.federation.rounds import worker as workers
from fedloom.federation.rounds.build import build
from fedloom.federation.rounds.built import Built
from fedloom.federation.rounds.measure import groups
from fedloom.federation.rounds.messages import Message, Payload, form, rows_of
from fedloom.federation.rounds.progress import Progress
from fedloom.federation.rounds.round import Round
from fedloom.federation.rounds.rounds import initial_state
from fedloom.federation.rounds.server import collect, dispatch
from fedloom.federation.rounds.worker import TrainDone, TrainJob, Worker
from tests_support import load_recipe


def many(*changes: str) -> Built:
    return build(load("matu/eight-embedded", ["partition.clients=12", *changes]))


def test_clients_with_one_task_share_the_measurement_of_its_model() -> None:
    built = many()
    found = groups(built, initial_state(built), ["test"])
    assert {group.model.owner for group in found} == {None}
    assert len(found) == len(built.federation.tasks)
    assert sorted(c.id for g in found for c, model in g.members if model.name == "personal") == [
        *built.federation.clients
    ]


def test_what_a_client_keeps_for_itself_or_unifies_is_its_own_model() -> None:
    built = many("partition.alpha_tasks=0.5")
    several = {name for name, client in built.federation.clients.items() if len(client.tasks) > 1}
    assert several
    assert {g.model.owner for g in groups(built, initial_state(built), ["test"])} == {None, *several}
    state, built = initial_state(built), many()
    (task,) = built.federation.clients["c03"].tasks
    state["clients"]["c03"] = {"tasks": {task: {"private": torch.zeros(1)}}}
    assert {g.model.owner for g in groups(built, state, ["test"])} == {None, "c03"}


def test_a_model_is_loaded_once_until_another_takes_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    built = build(load_recipe())
    loaded, real = [], workers.load
    monkeypatch.setattr(workers, "load", lambda *what: loaded.append(1) or real(*what))
    worker, state = Worker(built.setup), initial_state(built)
    jobs = [group.job(i, 0) for i, group in enumerate(groups(built, state, ["val", "test"]))]
    before = [job.on(worker) for job in jobs]
    assert len(jobs) > 2
    assert len(loaded) == 1
    (name,) = list(built.federation.clients)[:1]
    worker.train(TrainJob(name, 1, dispatch(built, state["server"], [name])[name], {}))
    assert [job.on(worker) for job in jobs] == before
    assert len(loaded) == 2


def test_bytes_are_counted_once_for_what_is_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    built = build(load_recipe("model.heads=own", "method=fedavg", "partition.clients_per_task=2"))
    now, names = Round(built, 1, Progress()), list(built.federation.clients)
    messages = dispatch(built, initial_state(built)["server"], names)
    jobs = [TrainJob(name, 1, messages[name], {}) for name in names]
    counted, real = [], round_.count_bytes
    monkeypatch.setattr(round_, "count_bytes", lambda *what: counted.append(what[-1]) or real(*what))
    payloads = [*now.payloads(executor(built.setup, ["cpu"], 1), jobs)]
    kinds = {tuple(client.tasks) for client in built.federation.clients.values()}
    assert len(counted) == 2 * len(kinds) < 2 * len(names)
    for payload in payloads:
        client = payload.row[0]
        assert now.ledger.up[client] == real(built, client, payload)
        assert now.ledger.down[client] == real(built, client, messages[client])


def test_the_form_of_a_payload_has_all_that_its_bytes_depend_on() -> None:
    plain = Payload(("a", None), 3.0, {"values": torch.zeros(4)})
    assert form(plain) == form(Payload(("b", None), 5.0, {"values": torch.ones(4)}))
    for other in (
        Payload(("a", None), 3.0, {"values": torch.zeros(5)}),
        Payload(("a", None), 3.0, {"vector": torch.zeros(4)}),
        Payload(("a", None), 3.0, {"values": torch.zeros(4)}, extra={"classes": torch.zeros(2)}),
        Payload(("a", None), 3.0, {"values": torch.zeros(4)}, extra={"steps": [1.0, 2.0]}),
        Payload(("a", None), 3.0, {"values": torch.zeros(4)}, support=torch.zeros(2)),
        Payload(("a", None), 3.0, {"values": torch.zeros(4)}, buffers=torch.zeros(2)),
        Payload(("a", None), 3.0, {"values": torch.zeros(4)}, integers={"n": torch.zeros(2)}),
        Payload(("a", None), 3.0, {"values": torch.zeros(4)}, tasks={"x": 3.0}),
        Payload(("a", None), 3.0, {"values": torch.zeros(4)}, finite=False),
    ):
        assert form(other) != form(plain)
    assert form(Message(None, tasks=("x",))) != form(Message(None, tasks=("y",)))


def test_the_initial_values_are_there_once() -> None:
    built = build(load_recipe())
    model, worker = initial_state(built)["server"]["model"], Worker(built.setup).model
    assert worker.initial.data_ptr() == model.data_ptr() == built.layout.flatten(built.module).data_ptr()
    assert worker.vector.data_ptr() != model.data_ptr()


def test_clients_with_the_same_tasks_are_sent_the_same_packed_vectors() -> None:
    built = many()
    state = initial_state(built)["server"]
    state = {**state, "tasks": {task.name: torch.randn_like(state["model"]) for task in built.federation.tasks}}
    messages = dispatch(built, state, built.federation.clients)
    kinds = {(*client.tasks,) for client in built.federation.clients.values()}
    assert len(kinds) < len(messages)
    assert len({id(message) for message in messages.values()}) == len(kinds)


@pytest.mark.parametrize(("method", "whole"), [("fedavg", True), ("fedper", False)])
def test_a_client_starts_from_the_vector_that_was_sent_where_that_is_all(method: str, whole: bool) -> None:
    built = build(load_recipe(f"method={method}"))
    worker, (name, *_) = Worker(built.setup), built.federation.clients
    message = dispatch(built, initial_state(built)["server"], [name])[name]
    assert message.vector is not None
    sent = message.vector.clone()
    assert (workers.load(built.method, worker.model, message, {}) is message.vector) == whole
    worker.train(TrainJob(name, 1, message, {}))
    assert torch.equal(message.vector, sent)


def test_a_payload_is_let_go_of_before_the_next_client_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    built = build(load_recipe())
    names = list(built.federation.clients)
    now, state = Round(built, 1, Progress()), initial_state(built)["server"]
    messages = dispatch(built, state, names)
    held, real = list[weakref.ref[Tensor]](), Worker.train

    def watched(self: Worker, *what: Any, **options: Any) -> TrainDone:
        assert [one for one in held if one() is not None] == []
        done = real(self, *what, **options)
        held.extend(map(weakref.ref, done.payload.packed.values()))
        return done

    monkeypatch.setattr(Worker, "train", watched)
    place, jobs = executor(built.setup, ["cpu"], 2, adaptive=True), [TrainJob(n, 1, messages[n], {}) for n in names]
    rows = rows_of(built, names)
    collect(built, now.payloads(place, jobs), rows)
    assert len(held) == len(names) > 1
