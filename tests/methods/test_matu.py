"""MaTU through whole rounds."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch

import fedloom
from fedloom.core.context import Ctx, State
from fedloom.engines.api import Result, trained_models
from fedloom.federation.rounds.build import build
from fedloom.federation.rounds.built import Built
from fedloom.federation.rounds.messages import rows_of
from fedloom.federation.rounds.rounds import initial_state
from fedloom.federation.rounds.server import dispatch, server_step
from fedloom.methods import METHODS
from fedloom.methods.method import EachTask
from fedloom.stages import Identity, TaskVectors
from fedloom.training.flat import FlatModel
from tests_support import client_step, load_recipe

Quick = Callable[..., Result]
MANY = "partition={name: task-dirichlet, clients: 5, alpha_tasks: 1.0}"


def rounds(built: Built, count: int, forget: bool = False) -> State:
    """The server's state after some rounds in which everybody takes part; `forget`: clients keep nothing."""
    method, federation, state = built.method, built.federation, initial_state(built)["server"]
    model = FlatModel(copy.deepcopy(built.module), built.layout)
    clients, memory = sorted(federation.clients), {}
    for number in range(1, count + 1):
        ctx = Ctx(number, 0, rows_of(built, clients), len(clients))
        messages = dispatch(built, state, clients)
        payloads = []
        for name in clients:
            own = {} if forget else memory.get(name, {})
            payload, _, memory[name] = client_step(
                method, model, federation, federation.clients[name], messages[name], own, ctx, built.recipe.training
            )
            payloads.append(payload)
        state = server_step(built, payloads, state, ctx)
    return state


def lines(result: Result, name: str) -> list[dict[str, Any]]:
    return [json.loads(text) for text in (result.folder / name).read_text().splitlines()]


def test_clients_without_memory_change_nothing() -> None:
    built = build(load_recipe("method=matu", MANY, "training.keep_optimizer=false"))
    kept, forgotten = rounds(built, 3), rounds(built, 3, forget=True)
    assert kept["tasks"].keys() == {"digit", "parity", "large", "holes"}
    for task, vector in kept["tasks"].items():
        assert vector.any()
        assert torch.equal(vector, forgotten["tasks"][task])


def test_without_partners_and_masks_a_single_task_is_fedavg() -> None:
    """Every coordinate counts in full (rho 0) and nobody gives to others: task vectors are averaged, as updates are."""
    whole = ("training.batch_size=2000", "training.keep_optimizer=false")  # order and memory do not matter
    changes = ("data.tasks=[digit]", "partition={name: iid, clients: 3}", *whole)
    ours = rounds(build(load_recipe("method={name: matu, rho: 0, cross: none}", *changes)), 3)
    built = build(load_recipe("method=fedavg", *changes))
    theirs = rounds(built, 3)
    initial = initial_state(built)["server"]["model"]
    assert torch.allclose(initial + ours["tasks"]["digit"], theirs["model"], atol=1e-6)
    assert not torch.allclose(initial, theirs["model"], atol=1e-3)


def test_bytes_of_both_directions_are_counted_on_what_travels(quick: Quick) -> None:
    result = quick("method=matu", MANY, "training.rounds=2")
    built = build(load_recipe("method=matu", MANY))
    d = built.layout.parameters.common.d
    heads = {t: built.layout.select("head", task=t).d for t in built.layout.tasks}
    first, second = (line for line in lines(result, "bytes.jsonl") if line["round"] > 0)
    assert not first["down"]  # everybody starts at the initial model
    for direction in (first["up"], second["up"], second["down"]):
        for client in built.federation.clients.values():
            tasks = tuple(client.tasks)
            found = {(e["role"], e["task"]): e["bytes"] for e in direction if e["client"] == client.id}
            assert found["encoder", None] == 4 * d
            assert found["codec", None] == len(tasks) * (-(-d // 8) + 4)
            assert {t: found["head", t] for t in tasks} == {t: 4 * heads[t] for t in tasks}


def test_an_absent_task_keeps_its_vector_and_gives_nothing() -> None:
    built = build(load_recipe("method={name: matu, cross: uniform}", MANY))
    state = rounds(built, 1)
    method, federation = built.method, built.federation
    client = min(federation.clients.values(), key=lambda c: len(c.tasks))
    assert len(client.tasks) < 4
    message = dispatch(built, state, [client.id])[client.id]
    ctx = Ctx(2, 0, rows_of(built, [client.id]), 5)
    model = FlatModel(copy.deepcopy(built.module), built.layout)
    payload, _, _ = client_step(method, model, federation, client, message, {}, ctx, built.recipe.training)
    after = server_step(built, [payload], state, ctx)
    for task, vector in state["tasks"].items():
        assert torch.equal(after["tasks"][task], vector) == (task not in client.tasks)


def test_what_a_client_starts_from_is_what_came_over_the_wire() -> None:
    """The personal model is measured after unification, the global one before: they differ for several tasks only."""
    built = build(load_recipe("method=matu", "partition={name: task-dirichlet, clients: 4, alpha_tasks: 0}"))
    state = rounds(built, 1)
    for name, message in dispatch(built, state, built.federation.clients).items():
        (task,) = built.federation.clients[name].tasks
        assert message.tasks == (task,)
        common = built.layout.parameters.take(state["tasks"][task], built.layout.parameters.common)
        assert torch.equal(message.packed["vector"], common)


def test_local_heads_never_travel(quick: Quick) -> None:
    result = quick("method={name: matu, heads: local}", MANY)
    roles = {e["role"] for line in lines(result, "bytes.jsonl") for e in line["up"] + line["down"]}
    assert "head" not in roles
    assert {r["model"] for line in lines(result, "metrics.jsonl") for r in line["metrics"]} == {"personal"}


def test_frozen_heads_stay_what_they_were(quick: Quick) -> None:
    result = quick("method={name: matu, heads: frozen}", MANY)
    built = build(load_recipe("method=matu", MANY))
    before = {name: p for name, p in built.module.named_parameters() if name.startswith("heads.")}
    for key, model in trained_models(result.folder).items():
        assert key.startswith("task/")
        for name, value in before.items():
            assert torch.equal(model[name], value)
        assert not torch.equal(
            model["encoder.linear.weight"], dict(built.module.named_parameters())["encoder.linear.weight"]
        )


def test_a_task_that_diverges_is_dropped_and_named(quick: Quick, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedloom.models.tasks.labels import Classification

    loss = Classification.loss

    def broken(self: Classification, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return loss(self, output, target) * (float("nan") if self.name == "parity" else 1)

    monkeypatch.setattr(Classification, "loss", broken)
    result = quick("method=matu", MANY)
    events = [e for line in lines(result, "metrics.jsonl") for e in line["events"]]
    assert events
    assert {e["task"] for e in events} == {"parity"}
    assert all(e["why"] == "local training gave nan or inf" for e in events)
    assert trained_models(result.folder).keys() == {"task/digit", "task/parity", "task/large", "task/holes"}


def test_similarity_is_recorded_every_round(quick: Quick) -> None:
    result = quick("method=matu", MANY)
    for line in lines(result, "metrics.jsonl")[1:]:
        (record,) = [r for r in line["records"] if r["kind"] == "task-vectors"]
        assert record["tasks"] == ["digit", "holes", "large", "parity"]


def test_raw_codec_sends_every_task_vector(quick: Quick) -> None:
    unified = sum(e["bytes"] for line in lines(quick("method=matu", MANY), "bytes.jsonl") for e in line["up"])
    raw = sum(
        e["bytes"] for line in lines(quick("method={name: matu, codec: raw}", MANY), "bytes.jsonl") for e in line["up"]
    )
    held = sum(len(c.tasks) for c in build(load_recipe(MANY)).federation.clients.values())
    assert 1.5 < raw / unified < held / 5


def test_unrelated_parts_are_refused() -> None:
    with pytest.raises(ValueError, match="the method has one row per client, but TaskVectors"):
        fedloom.Method(name="mine", stage=TaskVectors())
    with pytest.raises(ValueError, match=r"cannot be combined with Identity\(\), which returns one row"):
        fedloom.Method(name="mine", stage=Identity(), turn=EachTask())
    with pytest.raises(fedloom.errors.RecipeError, match="running statistics"):
        build(load_recipe("method.add.by-task={}", "model={name: resnet10, width: 4}"))
    with pytest.raises(fedloom.errors.RecipeError, match="no one model 'trained'"):
        build(load_recipe("method=matu", "evaluation.models=[trained]"))
    with pytest.raises(fedloom.errors.RecipeError, match="stacked"):
        build(load_recipe("method=matu", "training.stacked=true"))


# Task vectors of the product of low-rank factors

LORA = "model={name: tiny-vit, width: 16, depth: 1, num_heads: 2, lora: {rank: 2}}"
LOW_RANK = pytest.mark.skipif(None in (find_spec("peft"), find_spec("timm")), reason="peft or timm is not installed")


@LOW_RANK
def test_task_vectors_of_the_product_of_factors() -> None:
    few = ("training.epochs=null", "training.steps=2", "training.keep_optimizer=false")
    one = "partition={name: task-dirichlet, clients: 4, alpha_tasks: 0}"
    built = build(load_recipe("method={name: matu, delta_w: true, cross: none}", LORA, one, *few))
    shared = built.method.shared_part(built.layout)
    weights = [b for b in shared.blocks if b.task is None]
    assert {b.name.rsplit(".", 2)[1] for b in weights} == {"base_layer"}
    first, vectors = rounds(built, 1)["tasks"], rounds(built, 2)["tasks"]
    for task, vector in first.items():
        (_,) = [client for client in built.federation.clients.values() if task in client.tasks]
        for block in weights:
            values = torch.linalg.svdvals(shared.take(vector, shared.select(name=block.name)).view(block.shape))
            assert values[1] > 100 * values[2]  # one client's update has the rank of the factors
        assert not torch.allclose(vectors[task], vector, atol=1e-4)
    for task, vector in rounds(built, 2, forget=True)["tasks"].items():
        assert torch.equal(vector, vectors[task])  # clients keep nothing that matters


@LOW_RANK
@pytest.mark.parametrize("heads", ["shared", "local", "frozen"])
def test_the_product_of_factors_through_a_run(quick: Quick, heads: str) -> None:
    result = quick(LORA, f"method={{name: matu, delta_w: true, heads: {heads}}}", "training.rounds=2")
    assert {r["model"] for line in result.run.rounds for r in line["metrics"]} == {"personal"}
    for tensors in trained_models(result.folder).values():
        assert not any(bool(v.any()) for name, v in tensors.items() if "lora_B" in name)


def test_the_product_of_factors_needs_factors() -> None:
    with pytest.raises(fedloom.errors.RecipeError, match=r"model\.lora: null found, expected low-rank factors"):
        build(load_recipe("method={name: matu, delta_w: true}", "model=mlp"))


# Its rivals, which send an update for each task

BY_TASK = "method={name: fedavg, add: {by-task: }}"


def test_by_task_with_one_task_a_client_is_the_method_itself() -> None:
    # whole batches: their order does not matter
    one = (
        "partition={name: task-dirichlet, clients: 4, alpha_tasks: 0}",
        "training.batch_size=2000",
        "model.heads=own",
    )
    ours, theirs = (rounds(build(load_recipe(method, *one)), 3) for method in (BY_TASK, "method=fedavg"))
    torch.testing.assert_close(ours["model"], theirs["model"], atol=1e-6, rtol=0)
    assert not torch.allclose(ours["model"], rounds(build(load_recipe(*one)), 1)["model"], atol=1e-3)


def test_by_task_is_the_mean_over_clients_and_tasks_that_were_trained_alone() -> None:
    changes = (MANY, "training={epochs: 1, batch_size: 2000, optimizer: {name: sgd, lr: 0.1}}")
    built = build(load_recipe(BY_TASK, *changes))
    after = rounds(built, 1)["model"]
    shared, start = built.layout.parameters, initial_state(built)["server"]["model"]
    alone: list[tuple[int, str, torch.Tensor]] = []
    model = FlatModel(copy.deepcopy(built.module), built.layout)
    for client in built.federation.clients.values():
        for task, (what, _) in client.tasks.items():
            model.vector.copy_(model.initial)
            part = client.only(task).train
            x, y = part.examples.batch(part.index, model.device, tasks=[task])
            loss = what.loss(model.module(x, [task])[task], y[task])
            gradients = torch.autograd.grad(loss, list(model.module.parameters()), allow_unused=True)
            named = dict(zip([n for n, _ in model.module.named_parameters()], gradients, strict=True))
            moved = [torch.zeros(b.size) if (g := named[b.name]) is None else -0.1 * g.flatten() for b in shared.blocks]
            alone.append((len(part), task, torch.cat(moved)))
    for block, s in zip(shared.blocks, shared.slices, strict=True):
        rows = [(n, x[s]) for n, task, x in alone if block.task in (None, task)]
        mean = sum((n * x for n, x in rows), torch.zeros(block.size)) / sum(n for n, _ in rows)
        torch.testing.assert_close(after[s] - start[s], mean, atol=1e-5, rtol=0)
        assert bool(mean.abs().max() > 1e-4)


def test_by_task_sends_one_update_for_each_task_and_receives_one_model(quick: Quick) -> None:
    result = quick(BY_TASK, MANY)
    built = build(load_recipe(BY_TASK, MANY))
    d = built.layout.parameters.common.d
    (line,) = (line for line in lines(result, "bytes.jsonl") if line["round"] == 1)
    for direction, times in (("up", lambda tasks: len(tasks)), ("down", lambda _: 1)):
        for client in built.federation.clients.values():
            found = {(e["role"], e["task"]): e["bytes"] for e in line[direction] if e["client"] == client.id}
            assert found["encoder", None] == 4 * d * times(client.tasks)
    assert max(len(client.tasks) for client in built.federation.clients.values()) > 1
    assert {r["model"] for line in lines(result, "metrics.jsonl") for r in line["metrics"]} == {"global"}


def test_by_task_keeps_private_parts_for_each_task(quick: Quick) -> None:
    result = quick("method={name: fedper, add: {by-task: }}", MANY)
    names = set(trained_models(result.folder))
    clients = build(load_recipe(MANY)).federation.clients
    assert names == {f"{c}/task/{task}" for c, client in clients.items() for task in client.tasks}


@pytest.mark.parametrize(
    ("method", "why"),
    [
        ("{name: scaffold, add: {by-task: }}", "cannot be combined with auxiliary vectors"),
        ("{name: ditto, add: {by-task: }}", "Beside.* cannot be combined with one row per client and task"),
        ("{name: fedamp, add: {by-task: }}", r"Own\(\) cannot be combined with one row per client and task"),
        ("{name: matu, add: {by-task: }}", r"already has one row per client and task"),
    ],
)
def test_by_task_is_refused_where_clients_or_tasks_keep_more(method: str, why: str) -> None:
    with pytest.raises(fedloom.errors.RecipeError, match=why):
        build(load_recipe(f"method={method}"))


def test_by_task_of_a_method_with_a_model_per_client_has_one_per_client_and_task(quick: Quick) -> None:
    """matfl keeps and sends an adapter for each task; with one task per client it is matfl itself."""
    matfl = "method={name: matfl, groups: 2, add: {by-task: }}"
    whole, apart = build(load_recipe("method={name: matfl, groups: 2}", MANY)), build(load_recipe(matfl, MANY))
    for client in whole.federation.clients.values():
        for task in client.tasks:
            name = f"{client.id}-{task}" if len(client.tasks) > 1 else client.id
            mine = apart.federation.clients[name]
            assert [*mine.tasks] == [task]
            assert mine.train.positions.tolist() == client.only(task).train.positions.tolist()
    assert len(apart.federation.clients) == sum(len(c.tasks) for c in whole.federation.clients.values()) > 5
    result = quick(matfl, MANY)
    (line,) = (line for line in lines(result, "bytes.jsonl") if line["round"] == 1)
    sent = [e["bytes"] for e in line["up"] if e["role"] == "encoder"]
    assert sent == [4 * apart.layout.parameters.select("encoder").d] * len(apart.federation.clients)
    assert fedloom.resume(result.folder).run.info["clients"].keys() == apart.federation.clients.keys()
    one = "partition={name: task-dirichlet, clients: 4, alpha_tasks: 0}"
    both = [build(load_recipe(method, one)).partition.hash for method in (matfl, "method=matfl")]
    assert both[0] == both[1]


def test_by_task_needs_a_server() -> None:
    with pytest.raises(fedloom.errors.RecipeError, match="sends one update per task to one model, which needs"):
        build(load_recipe(BY_TASK, "peers={}"))


def test_page_has_the_three_way_difference() -> None:
    page = METHODS["matu"].function.__doc__ or ""
    assert all(word in page for word in ("paper ", "release ", "here "))


def test_a_client_all_of_whose_tasks_diverged_says_so_and_keeps_nothing() -> None:
    built = build(load_recipe("method=matu", MANY, "training.optimizer.lr=1e38"))
    method, federation, state = built.method, built.federation, initial_state(built)["server"]
    name = min(federation.clients)
    ctx = Ctx(1, 0, rows_of(built, [name]), 1)
    message = dispatch(built, state, [name])[name]
    model = FlatModel(copy.deepcopy(built.module), built.layout)
    payload, result, memory = client_step(
        method, model, federation, federation.clients[name], message, {}, ctx, built.recipe.training
    )
    assert not payload.finite
    assert memory == {}
    assert result.steps == 2 * len(federation.clients[name].tasks)
