"""Joining a run late."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import fedloom
from fedloom.core.context import Ctx
from fedloom.engines.api import Result
from fedloom.errors import DataError, RecipeError, StateError
from fedloom.experiments.export.finished import task_models
from fedloom.experiments.papers.join import NEW, LateJoin, Start, join, start_for
from fedloom.taskvectors import sign_similarity
from fedloom.training.flat import FlatModel
from fedloom.training.loop import train
from tests_support import load_recipe

Quick = Callable[..., Result]
SMALL = ("model.width=4", "model.hidden=8", "data.size=8", "evaluation.splits=[test]", "evaluation.every=2")
WHOLE = "data.tasks=[digit,parity,large,holes]"


def test_the_mean_of_similar_task_vectors() -> None:
    new = torch.tensor([1.0, 1.0, 1.0, 1.0])
    vectors = {
        "d": torch.tensor([-1.0, -1.0, -1.0, 4.0]),  # S = 1/4
        "c": torch.tensor([2.0, 2.0, 2.0, -2.0]),  # S = 3/4
        "b": torch.tensor([1.0, 1.0, -1.0, -1.0]),  # S = 1/2, which is not above 1/2
        "a": torch.tensor([4.0, 4.0, 4.0, 4.0]),  # S = 1
    }
    start = start_for(new, vectors, kappa=3, epsilon=0.5)
    assert start.similarity == {"a": 1.0, "b": 0.5, "c": 0.75, "d": 0.25}
    assert list(start.weights) == ["a", "c"]
    assert start.weights["a"] == pytest.approx(4 / 7)
    # (1 * 4 + 3/4 * 2) / (7/4), and (4 - 3/2) / (7/4)
    assert torch.allclose(start.vector, torch.tensor([22 / 7, 22 / 7, 22 / 7, 10 / 7]))
    assert start.vector.dtype == new.dtype

    alone = start_for(new, vectors, kappa=1, epsilon=0.5)
    assert alone.weights == {"a": 1.0}
    assert torch.equal(alone.vector, vectors["a"])
    assert start_for(new, vectors, kappa=4, epsilon=0.0).weights.keys() == vectors.keys()


def test_without_similar_tasks_it_is_the_initial_model() -> None:
    new = torch.tensor([1.0, -1.0])
    for kappa, epsilon in ((0, 0.0), (3, 0.5)):
        start = start_for(new, {"a": -new, "b": torch.tensor([1.0, 1.0])}, kappa, epsilon)
        assert start.weights == {}
        assert torch.equal(start.vector, torch.zeros(2))
    with pytest.raises(ValueError, match="kappa"):
        start_for(new, {"a": new}, -1, 0.5)


def test_ties_go_by_name_and_zeros_count_half() -> None:
    new = torch.tensor([1.0, 0.0])
    same = torch.tensor([1.0, 1.0])
    start = start_for(new, {"z": same, "y": same, "x": same}, 2, 0.5)
    assert start.similarity == {"x": 0.75, "y": 0.75, "z": 0.75}
    assert list(start.weights) == ["x", "y"]


def test_gain_is_positive_where_better() -> None:
    start = Start(torch.zeros(1), {"a": 0.75, "b": 0.25}, {"a": 1.0})
    made = LateJoin("run", "t", "new", 7, start, "rmse", "min", (3.0, 2.0), (2.5, 2.25))
    assert made.gain == (0.5, -0.25)
    assert LateJoin("run", "t", "new", 7, start, "acc", "max", (0.5, 0.5), (0.25, 1.0)).gain == (-0.25, 0.5)
    text = made.to_text()
    assert "run: t at new, 7 examples" in text
    assert "mean gain over the rounds: -0.2500" in text


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two rounds on three of the four tasks of digits."""
    recipe = load_recipe("method=matu", "data.tasks=[digit,large,holes]", *SMALL)
    return fedloom.run(recipe, tmp_path_factory.mktemp("join") / "run").folder


def test_a_new_task_joins(run: Path) -> None:
    told: list[tuple[object, ...]] = []
    before = {file: file.read_bytes() for file in run.iterdir() if file.is_file()}
    found = join(run, "parity", steps=2, rounds=3, data=[WHOLE], tell=lambda *done: told.append(done))
    assert told == [(i, 7, "training") for i in range(1, 8)]
    assert (found.task, found.client, found.metric, found.direction) == ("parity", NEW, "accuracy", "max")
    assert found.examples == 1438  # all train images: the run labels them otherwise
    assert found.start.similarity.keys() == {"digit", "large", "holes"}
    assert len(found.initial) == len(found.similar) == len(found.gain) == 4
    assert found.gain[2] == pytest.approx(found.similar[2] - found.initial[2])
    assert "from similar tasks" in found.to_text()
    assert {file: file.read_bytes() for file in run.iterdir() if file.is_file()} == before  # the run stays as it is

    again = join(run, "parity", steps=2, rounds=3, data=[WHOLE])
    assert (again.initial, again.similar) == (found.initial, found.similar)
    longer = join(run, "parity", steps=3, rounds=1, data=[WHOLE])
    assert longer.initial == found.initial[:2]  # what is compared does not depend on the steps before
    assert longer.start.similarity != found.start.similarity


def test_both_starts_differ_by_the_vector_alone(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fedloom.experiments.papers.join as module

    seen: list[torch.Tensor] = []
    batches: list[torch.Tensor] = []
    vectors: list[torch.Tensor] = []

    def spy(model: FlatModel, work, training, ctx: Ctx, *rest):  # type: ignore[no-untyped-def]
        seen.append(model.params.clone())
        batches.append(torch.randperm(5, generator=ctx.rng("order", work.who, 0)))
        return train(model, work, training, ctx, *rest)

    def chosen(tau: torch.Tensor, *rest: object) -> Start:
        vectors.append(tau)
        return start_for(tau, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "train", spy)
    monkeypatch.setattr(module, "start_for", chosen)
    found = join(run, "parity", steps=2, rounds=2, data=[WHOLE])
    probe, plain, _, similar, _ = seen
    models = task_models(run)
    d = models.common.d
    assert torch.equal(probe, plain)
    assert torch.equal(plain[:d], models.origin)
    assert torch.allclose(similar[:d] - plain[:d], found.start.vector, atol=1e-7)
    assert found.start.vector.any()
    assert torch.equal(similar[d:], plain[d:])  # the head
    assert torch.equal(batches[1], batches[3])
    assert torch.equal(batches[2], batches[4])
    everyone = torch.stack([vectors[0], *(models.vectors()[t] for t in found.start.similarity)])
    assert list(found.start.similarity.values()) == sign_similarity(everyone)[0, 1:].tolist()


def test_a_client_takes_up_a_task_that_the_run_knows(run: Path) -> None:
    found = join(run, "large", client="digit-0", steps=1, rounds=1)
    clients = json.loads((run / "run.json").read_text())["clients"]
    assert (found.client, found.examples) == ("digit-0", clients["digit-0"]["train"])
    new = join(run, "parity", client="digit-0", steps=1, rounds=1, data=[WHOLE])
    assert new.examples == clients["digit-0"]["train"]
    with pytest.raises(RecipeError, match="client 'digit-0' already has the task 'digit'"):
        join(run, "digit", client="digit-0")
    with pytest.raises(RecipeError, match=r"no client 'digit-9' in the run\. Did you mean 'digit-0'"):
        join(run, "large", client="digit-9")
    with pytest.raises(DataError, match="--data changes the examples"):
        join(run, "parity", client="digit-0", data=[WHOLE, "data.test_fraction=0.3"])


def test_a_new_client_gets_what_nobody_holds(run: Path, quick: Quick) -> None:
    with pytest.raises(DataError, match="the clients of the run hold every example of task 'large'"):
        join(run, "large")
    other = join(run, "large", steps=1, rounds=1, data=["data.test_fraction=0.1"])
    assert other.examples > 1438
    assert other.notes == ("the data are not the run's, so examples may be among those that its clients hold",)
    half = quick("method=matu", "partition={name: domains, clients: 2, fraction: 0.25}", *SMALL).folder
    found = join(half, "large", steps=1, rounds=1)
    assert found.examples == 1438 - 2 * int(0.25 * 1438)
    assert found.notes == ()


def test_what_is_refused(run: Path, quick: Quick) -> None:
    with pytest.raises(RecipeError, match=r"no task 'parity' in the data.*needs --data"):
        join(run, "parity")
    with pytest.raises(RecipeError, match=r"no task 'parit' in the data\. Did you mean 'parity'\?"):
        join(run, "parit", data=[WHOLE])
    with pytest.raises(RecipeError, match=r"'training\.rounds=9': only the data may change"):
        join(run, "parity", data=[WHOLE, "training.rounds=9"])
    with pytest.raises(DataError, match=r"expected inputs of shape \(1, 8, 8\), as in the run, found \(1, 16, 16\)"):
        join(run, "parity", data=[WHOLE, "data.size=16"])
    with pytest.raises(StateError, match="server of local has no task vectors"):
        join(quick("method=local", "partition=one-task", *SMALL).folder, "digit")
