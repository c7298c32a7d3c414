"""Methods on prototypes through whole runs; global prototypes against values worked out by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fedloom import methods
from fedloom.core.context import State
from fedloom.core.stage import check_closed
from fedloom.core.untrusted import Sender
from fedloom.engines.api import Result, trained_models
from fedloom.methods.prototypes.aggregation import ClassLabels
from fedloom.methods.prototypes.maths import random_anchors
from fedloom.stages import ClusteredPrototypes, Mean, MeanPrototypes, MovingAnchors, Stage, TrainedPrototypes
from tests_support import assert_same, same

Quick = Callable[..., Result]


def beside(result: Result, direction: str, round_: int) -> dict[str, int]:
    """Bytes beside the model, by client."""
    lines = map(json.loads, (result.folder / "bytes.jsonl").read_text().splitlines())
    line = next(line for line in lines if line["round"] == round_)
    return {e["client"]: e["bytes"] for e in line[direction] if e["role"] == "side"}


@pytest.mark.parametrize(
    "method",
    [
        "{name: fedproto, lam: 0}",
        "{name: fedtgp, lam: 0, server_epochs: 2}",
        "{name: fedsa, lam: 0, margin: 0, calibration: 0}",
        "{name: fedrcl, lam: 0}",
    ],
)
def test_without_its_terms_it_is_fedavg(quick: Quick, method: str) -> None:
    assert_same(quick(), quick(f"method={method}"))


def test_labels_of_prototypes_are_of_the_senders_own_tasks() -> None:
    def read(labels: torch.Tensor) -> torch.Tensor:
        return ClassLabels().read(labels, Sender(classes={0: 2, 3: 1}))

    for good in ([[0, 0, 5], [0, 1, 0]], [[3, 0, 7]], [[0, 0, 5], [0, 1, 0], [3, 0, 7]]):
        assert read(torch.tensor(good)).tolist() == good
    for bad in ([[0, 0, 5]], [[0, 1, 5], [0, 0, 5]], [[7, 0, 5]], [[3, 0, 7], [0, 0, 5], [0, 1, 0]], [[3, 0, -1]]):
        with pytest.raises(ValueError, match="expected"):
            read(torch.tensor(bad))


def test_without_a_classification_it_is_fedavg(quick: Quick) -> None:
    small = ("data.count=24", "data.test_count=4", "training.batch_size=4", "training.steps=1", "evaluation.every=2")
    expected, found = (quick(f"method={m}", *small, recipe="feddea/scenes") for m in ("fedavg", "fedsa"))
    assert_same(expected, found)


@pytest.mark.parametrize("name", ["fedproto", "fpl", "fedtgp", "fedsa"])
def test_terms_start_in_the_second_round(quick: Quick, name: str) -> None:
    method = f"method={name}"
    assert_same(quick("training.rounds=1"), quick(method, "training.rounds=1"), models_only=True)
    with pytest.raises(AssertionError):
        assert_same(quick("training.rounds=2"), quick(method, "training.rounds=2"), models_only=True)


def test_what_travels_beside_the_model_is_counted(quick: Quick) -> None:
    result = quick("method=fedproto", "model={name: small-cnn, hidden: 5}")
    # n, prototypes of ten classes, their labels
    assert beside(result, "up", 1)["digit-0"] == 8 + 10 * 5 * 4 + 10 * 3 * 8
    assert not beside(result, "down", 1)
    down = beside(result, "down", 2)
    assert len(set(down.values())) == 1
    assert next(iter(down.values())) % (5 * 4 + 2 * 8) == 0


def test_prototypes_alone_may_travel(quick: Quick) -> None:
    method = methods.fedproto(share="nothing")
    assert method.shares_nothing
    result = quick("method={name: fedproto, share: nothing, lam: 0}")
    local = quick("method=local")
    a, b = trained_models(result.folder), trained_models(local.folder)
    assert a.keys() == b.keys()
    for client, model in a.items():
        assert all(torch.equal(model[name], tensor) for name, tensor in b[client].items()), client
    pulled = trained_models(quick("method={name: fedproto, share: nothing}").folder)
    assert any(not torch.equal(pulled["digit-0"][name], tensor) for name, tensor in a["digit-0"].items())


def test_modules_of_f2dc_go_with_fpl(quick: Quick) -> None:
    options: dict[str, Any] = {"recipe": "f2dc/digits-embedded"}
    tiny = ("data.size=16", "model.width=4", "training.batch_size=16", "evaluation.splits=[test]")
    method = "method={name: fpl, add: {feature-modules: {}}}"
    (model,) = trained_models(quick(method, *tiny, **options).folder).values()
    assert all(bool(torch.isfinite(v).all()) for v in model.values() if v.is_floating_point())


ALL: list[Stage] = [MeanPrototypes(), ClusteredPrototypes(), TrainedPrototypes(epochs=5), MovingAnchors(0.5)]
every = pytest.mark.parametrize("stage", ALL, ids=repr)
NOTHING = (torch.zeros(0, 0), torch.zeros(0, 3, dtype=torch.int64))
Sent = tuple[Tensor, Tensor]


def sent(*rows: tuple[int, int, int, list[float]]) -> Sent:
    """A client's prototypes: (task, class, examples, vector) each."""
    return torch.tensor([vector for *_, vector in rows]), torch.tensor([about for *about, _ in rows])


def after(stage: Stage, *clients: Sent, state: State | None = None, round: int = 1, **more: Any) -> State:
    extra = {"prototypes": [p for p, _ in clients], "prototype_labels": [about for _, about in clients]}
    X = torch.ones(len(clients), 2)
    out, state = stage.on(X, state=state, round=round, **extra, **more)
    assert torch.equal(out, X)
    return state


def told(stage: Stage, state: State) -> dict[tuple[int, int], list[list[float]]]:
    """(task, class) -> its prototypes, as a client is told."""
    message = stage.broadcast(state, ["b", "a"], {})
    assert message["a"].keys() == message["b"].keys()
    found: dict[tuple[int, int], list[list[float]]] = {}
    for key, vector in zip(message["a"]["prototype_labels"].tolist(), message["a"]["prototypes"].tolist(), strict=True):
        found.setdefault((key[0], key[1]), []).append(vector)
    return found


A = sent((0, 0, 1, [0.0, 0.0]), (0, 1, 3, [4.0, 0.0]))
B = sent((0, 0, 3, [4.0, 8.0]), (0, 1, 0, [0.0, 0.0]))


def test_means_by_clients_and_by_counts() -> None:
    assert told(MeanPrototypes("clients"), after(MeanPrototypes("clients"), A, B)) == {
        (0, 0): [[2, 4]],
        (0, 1): [[4, 0]],
    }
    assert told(MeanPrototypes(), after(MeanPrototypes(), A, B))[0, 0] == [[3, 6]]


def test_a_class_that_is_absent_keeps_its_prototype() -> None:
    stage = MeanPrototypes()
    state = after(stage, A)
    state = after(stage, B, state=state, round=2)
    assert told(stage, state) == {(0, 0): [[4, 8]], (0, 1): [[4, 0]]}


def test_tasks_are_kept_apart_and_others_send_nothing() -> None:
    stage = MeanPrototypes()
    other = sent((2, 0, 1, [7.0, 7.0]), (2, 1, 0, [0.0, 0.0]), (2, 2, 1, [9.0, 9.0]))
    state = after(stage, A, NOTHING, other)
    assert told(stage, state) == {(0, 0): [[0, 0]], (0, 1): [[4, 0]], (2, 0): [[7, 7]], (2, 2): [[9, 9]]}
    assert after(stage, NOTHING, state=state) == state


def test_a_prototype_that_is_not_finite_does_not_count() -> None:
    bad = sent((0, 0, 5, [float("nan"), 0.0]), (0, 1, 1, [2.0, 2.0]))
    assert told(MeanPrototypes("clients"), after(MeanPrototypes("clients"), A, bad)) == {
        (0, 0): [[0, 0]],
        (0, 1): [[3, 1]],
    }


def test_clusters_of_a_class_and_those_of_before() -> None:
    stage = ClusteredPrototypes()
    clients = [sent((0, 0, 1, v), (0, 1, 1, [1.0, 1.0])) for v in ([2.0, 0.0], [4.0, 0.0], [0.0, 2.0], [0.0, 6.0])]
    state = after(stage, *clients)
    assert told(stage, state) == {(0, 0): [[3, 0], [0, 4]], (0, 1): [[1, 1]]}
    state = after(stage, sent((0, 0, 0, [0.0, 0.0]), (0, 1, 1, [5.0, 5.0])), state=state, round=2)
    assert told(stage, state) == {(0, 0): [[3, 0], [0, 4]], (0, 1): [[5, 5]]}


def test_the_generator_learns_on_and_tells_known_classes_only() -> None:
    stage = TrainedPrototypes(epochs=20, lr=0.1)
    first = after(stage, A, B, seed=1)
    assert torch.equal(first["tasks"]["0"]["points"], after(stage, A, B, seed=1)["tasks"]["0"]["points"])
    assert not torch.equal(first["tasks"]["0"]["points"], after(stage, A, B, seed=2)["tasks"]["0"]["points"])
    assert told(stage, first).keys() == {(0, 0), (0, 1)}
    assert told(stage, after(stage, B)).keys() == {(0, 0)}
    # what was known stays known, and training goes on from where it was
    assert told(stage, after(stage, B, state=after(stage, A))).keys() == {(0, 0), (0, 1)}
    still = after(TrainedPrototypes(epochs=0), A, B, state=first, round=2)
    assert torch.equal(still["tasks"]["0"]["points"], first["tasks"]["0"]["points"])


def test_anchors_follow_the_mean_of_clients_and_all_are_told() -> None:
    stay = MovingAnchors(1.0)
    start = after(stay, A, B)["tasks"]["0"]["anchors"]
    assert start.shape == random_anchors(2, 2).shape
    moved = told(MovingAnchors(0.75), after(MovingAnchors(0.75), A, B))
    assert moved[0, 0] == [pytest.approx([0.75 * float(start[0, 0]) + 0.5, 0.75 * float(start[0, 1]) + 1.0])]
    absent = told(MovingAnchors(0.75), after(MovingAnchors(0.75), B))
    assert absent[0, 1] == [start[1].tolist()]
    assert not torch.equal(start, after(stay, A, B, seed=5)["tasks"]["0"]["anchors"])


@every
def test_nothing_is_told_before_there_is_something(stage: Stage) -> None:
    state = after(stage, NOTHING)
    assert stage.broadcast(state, ["a"], {}) == {"a": {}}


@every
def test_the_order_of_clients_does_not_matter(stage: Stage) -> None:
    one = after(stage, A, B, NOTHING, rows=["a", "b", "c"])
    assert same(one, after(stage, NOTHING, B, A, rows=["c", "b", "a"]))


@every
def test_it_goes_before_a_mean(stage: Stage) -> None:
    check_closed([stage >> Mean()], "test")
    assert (stage >> Mean()).traits.reduces
