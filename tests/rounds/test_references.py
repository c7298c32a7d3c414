"""Test the reference methods: the constant prediction and centralised training."""

from __future__ import annotations

import json
import math
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedloom
from fedloom.data.dataset import TensorExamples, Withheld, without_label
from fedloom.engines.api import Result, plan, trained_models
from fedloom.engines.plan import activations
from fedloom.errors import DataError, RecipeError, UserError
from fedloom.federation.rounds.build import build
from fedloom.federation.rounds.federation import TOGETHER, BuiltFederation, Part, together
from fedloom.methods import centralised, constant
from fedloom.methods.method import InOnePlace
from fedloom.stages import Identity
from fedloom.tasks import Classification, Depth, Edge, Normals, Regression, Saliency, Semseg
from fedloom.training.rules import label_means
from tests_support import POOLED, Quick, assert_same, load_recipe, outcome, stopped_after

ALIKE = ("partition={name: iid, clients: 3}", "training={rounds: 2, epochs: 1, batch_size: 5000, optimizer: {lr: 0.1}}")
SCENES = ("data.count=48", "data.test_count=12", "training.rounds=1", "training.epochs=1", "training.schedule.warmup=0")


def values(result: Result, split: str = "test") -> dict[tuple[str, str], float]:
    """(task, metric) -> the final number."""
    final = result.run.final(split)
    return {(task, metric): v for task, of in final.values.items() for metric, v in of.items()}


def test_the_trivial_answer_to_classes_is_the_most_frequent_one(quick: Quick) -> None:
    built = build(load_recipe("method=constant"))
    found = values(quick("method=constant"))
    for task in built.federation.tasks:
        clients = [c for c in built.federation.clients.values() if task.name in c.tasks]
        held = np.concatenate([built.dataset.train.labels_of(task.name)[c.train.positions] for c in clients])
        truth = built.dataset.test.labels_of(task.name)
        share = np.bincount(held) / len(held)
        assert found[task.name, "accuracy"] == pytest.approx((truth == share.argmax()).mean())
        assert found[task.name, "loss"] == pytest.approx(-np.log(share[truth]).mean(), rel=1e-5)


def test_the_trivial_answer_to_maps_is_pixel_by_pixel(tmp_path: Path) -> None:
    recipe = load_recipe(*SCENES, "training.steps=null", "method=constant", recipe="feddea/scenes")
    built = build(recipe)
    found = values(fedloom.run(recipe, tmp_path / "run"))
    every = torch.arange(len(built.dataset.test))
    cpu = torch.device("cpu")

    def labels(task: str) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        (client,) = (c for c in built.federation.clients.values() if task in c.tasks)
        mine = built.dataset.train.batch(client.train.index, cpu, tasks=[task])[1][task].double().numpy()
        return mine, built.dataset.test.batch(every, cpu, tasks=[task])[1][task].double().numpy()

    mine, truth = (of.reshape(len(of), *of.shape[-2:]) for of in labels("depth"))
    known, asked = (np.isfinite(of) & (of > 0) & (of != 255) for of in (mine, truth))
    counted = known.sum(0)
    mean = np.where(counted > 0, (mine * known).sum(0) / np.maximum(counted, 1), mine[known].mean())
    squares = ((mean - truth) ** 2)[asked]
    assert found["depth", "rmse"] == pytest.approx(math.sqrt(squares.mean()), rel=1e-4)
    mine, truth = (of.reshape(len(of), *of.shape[-2:]) for of in labels("semseg"))
    votes = np.stack([(mine == c).sum(0) for c in range(int(mine[mine != 255].max()) + 1)])
    right = (votes.argmax(0) == truth)[truth != 255]
    assert found["semseg", "pixel_accuracy"] == pytest.approx(right.mean(), abs=1e-6)
    mine, truth = labels("normals")
    there = ((mine != 255).all(1) & (mine != 0).any(1))[:, None]
    mean = (mine * there).sum(0)
    mean = np.where(np.linalg.norm(mean, axis=0) > 0, mean, (mine * there).sum((0, 2, 3))[:, None, None])
    mean = mean / np.linalg.norm(mean, axis=0)
    asked = (truth != 255).all(1) & (truth != 0).any(1)
    cosine = (mean * truth).sum(1) / np.maximum(np.linalg.norm(truth, axis=1), 1e-9)
    angles = np.degrees(np.arccos(cosine.clip(-1, 1)))[asked]
    assert found["normals", "merr"] == pytest.approx(angles.mean(), rel=1e-3)


def test_the_constant_prediction_costs_one_pass(quick: Quick, monkeypatch: pytest.MonkeyPatch) -> None:
    """More rounds and steps read no more examples, and make no step."""
    read: list[int] = []
    batch = TensorExamples.batch

    def counted(self: TensorExamples, index: torch.Tensor, *given: Any, **named: Any) -> Any:
        read[-1] += len(index)
        return batch(self, index, *given, **named)

    monkeypatch.setattr(TensorExamples, "batch", counted)
    for rounds in (1, 3):
        read.append(0)
        result = quick("method=constant", f"training.rounds={rounds}", f"training.steps={rounds}")
    assert read[0] == read[1] > 0
    _, lines = outcome(result)
    assert [line["round"] for line in lines] == [0, 1]
    assert result.status == "finished"
    assert not lines[1]["train"]
    assert [m["value"] for m in lines[0]["metrics"]] != [m["value"] for m in lines[1]["metrics"]]


def test_means_of_every_kind_of_label_by_hand() -> None:
    zeros = torch.zeros(2, 2)

    def constant(task: Any, *batches: Any) -> torch.Tensor:
        return label_means({"t": task}, [{"t": torch.as_tensor(batch)} for batch in batches])["t"]

    shares = constant(Classification("t", 3), [0, 0, -1], [1, 0])
    torch.testing.assert_close(shares.exp(), torch.tensor([0.75, 0.25, 1e-6]))
    assert constant(Classification("t", 2), [0, 1, 1, 1]).exp().tolist() == pytest.approx([0.25, 0.75])
    target = torch.tensor([1.0, math.nan, 5.0])
    assert constant(Regression("t", mean=1.0, std=4.0), target).tolist() == [0.5]
    # the second pixel of the first row has no label: it gets the mean over all pixels
    maps = torch.tensor([[[1.0, 255], [4, 6]], [[3, 255], [-1, 2]]])
    depth = torch.tensor([[2.0, 16 / 5], [4.0, 4.0]])
    torch.testing.assert_close(constant(Depth("t"), maps), depth[None])
    torch.testing.assert_close(constant(Depth("t", log=True), maps[:1], maps[1:]), depth.log1p()[None])
    marks = torch.tensor([[[0.0, 255], [1, 1]], [[1, 255], [1, 0]]])
    yes = torch.tensor([[0.5, 4 / 6], [1.0, 0.5]])
    torch.testing.assert_close(constant(Edge("t"), marks).sigmoid()[0], yes, atol=1e-5, rtol=0)
    torch.testing.assert_close(constant(Saliency("t"), marks).softmax(0)[1], yes, atol=1e-5, rtol=0)
    found = constant(Semseg("t", 3), torch.tensor([[[0, 2], [1, 255]], [[0, 1], [1, 255]], [[2, 2], [1, -1]]]))
    assert found.argmax(0)[0].tolist() == [0, 2]
    assert found[:, 1, 1].exp().tolist() == pytest.approx([2 / 9, 4 / 9, 3 / 9])  # no label here: as everywhere
    east, up = torch.tensor([1.0, 0, 0]), torch.tensor([0.0, 0, 1])
    vectors = torch.stack([east, up, up, torch.full((3,), 255.0)])[:, :, None, None]
    torch.testing.assert_close(constant(Normals("t"), vectors)[:, 0, 0], torch.tensor([1 / 3, 0, 2 / 3]))
    assert label_means({"t": Depth("t")}, [{"t": zeros[None]}]) == {}


def test_labels_that_no_client_holds_are_not_seen() -> None:
    recipe = load_recipe("method=centralised", "partition.all_task_clients=0")
    built = build(recipe)
    (trainer,) = built.federation.trainers.values()
    clients = built.federation.clients.values()
    assert trainer.id == TOGETHER
    assert sorted(trainer.train.positions) == sorted(p for c in clients for p in c.train.positions)
    for client in clients:
        (task,) = client.tasks
        assert set(trainer.train.of(task).positions) == set(client.train.positions)
        assert set(trainer.val.of(task).positions) == set(client.val.positions)
        _, labels = trainer.train.examples.batch(client.train.index, torch.device("cpu"))
        assert {name: bool((y >= 0).any()) for name, y in labels.items()} == {name: name == task for name in labels}


def test_who_holds_all_labels_sees_them_as_they_are() -> None:
    examples = TensorExamples(torch.zeros(6, 1), {"a": torch.arange(6), "b": torch.tensor([0, -1, 1, 1, 0, 0])})
    one, two = Part(examples, np.array([3, 4]), "own"), Part(examples, np.array([0, 1]), "own")
    both = together([(one, ["a"]), (two, ["a"])])
    assert both.examples is examples
    assert both.positions.tolist() == [0, 1, 3, 4]
    some = together([(one, ["a"]), (two, ["a", "b"])])
    assert some.of("b").positions.tolist() == [0]  # 1 has no label, 3 and 4 are of a client without the task
    assert isinstance(some.examples, Withheld)
    assert len(some.examples) == 6
    assert some.examples.labels_of("b").tolist() == [0, -1, -1, -1, -1, -1]


def test_examples_that_all_clients_share_are_joined_once() -> None:
    examples = TensorExamples(torch.zeros(20_000, 1), {"a": torch.zeros(20_000, dtype=torch.int64)})
    shared = Part(examples, np.arange(20_000), "shared")
    tracemalloc.start()
    joined = together([(shared, ["a"])] * 1000)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert joined.positions.tolist() == list(range(20_000))
    assert most < 2_000_000  # the positions of all clients one after the other are 160 MB


def test_withheld_labels_are_missing_ones_of_their_kind() -> None:
    gone = torch.tensor([True, False])
    assert without_label(torch.tensor([1, 2]), gone).tolist() == [-1, 2]
    assert without_label(torch.tensor([1.0, 2.0]), gone).tolist() == pytest.approx([math.nan, 2], nan_ok=True)
    for task, target in {
        Semseg("t", 4): torch.ones(2, 2, 2, dtype=torch.long),
        Depth("t"): torch.ones(2, 1, 2, 2),
        Normals("t"): torch.ones(2, 3, 2, 2),
        Edge("t"): torch.ones(2, 2, 2),
    }.items():
        pred = torch.rand(2, task.channels, 2, 2)
        both, one = (task.loss(pred[at], without_label(target, gone)[at]) for at in (slice(0, 2), slice(1, 2)))
        torch.testing.assert_close(both, one)  # a mean over the labels that are there


def test_joint_training_is_fedavg_where_each_takes_one_step_on_all_it_has(quick: Quick) -> None:
    """A mean of the clients' gradients, by examples, is the gradient on all examples."""
    for model in ("mlp", "small-cnn"):
        one = quick(*ALIKE, f"model={model}", "method=centralised")
        two = quick(*ALIKE, f"model={model}", "method=fedavg")
        (a,), (b,) = (trained_models(run.folder).values() for run in (one, two))
        assert a.keys() == b.keys()
        for name, tensor in a.items():
            torch.testing.assert_close(tensor, b[name], atol=2e-5, rtol=1e-4)


def test_it_makes_the_steps_of_the_largest_client_and_passes_over_all(quick: Quick) -> None:
    changes = ("training={rounds: 1, epochs: 2, batch_size: 16}", "partition.all_task_clients=1")
    built = build(load_recipe(*changes, "method=centralised"))
    sizes = [len(c.train) for c in built.federation.clients.values()]
    run = quick(*changes, "method=centralised").run
    (line,) = run.rounds[1:]
    assert line["cohort"] == [TOGETHER]
    assert {record["client"] for record in line["train"]} == {TOGETHER}
    assert {record["steps"] for record in line["train"]} == {2 * -(-max(sizes) // 16)}
    assert {record["examples"] for record in line["train"]} == {2 * sum(sizes)}
    assert run.bytes_total() == {"up": 0, "down": 0}
    assert run.bits_per_task() == 0
    assert {m["client"] for m in line["metrics"]} == set(built.federation.clients)


@pytest.mark.parametrize("method", ["{name: centralised, by: task}", "{name: centralised, add: {feddea: {}}}"])
def test_resume_is_bit_identical(method: str, tmp_path: Path) -> None:
    recipe = load_recipe(f"method={method}", "training.rounds=3")
    whole = fedloom.run(recipe, tmp_path / "whole")
    assert_same(whole, fedloom.resume(stopped_after(1, tmp_path / "part", recipe)))


def test_each_task_may_have_a_model_of_its_own(quick: Quick) -> None:
    result = quick("method={name: centralised, by: task}", "model={name: resnet10, width: 4}")
    assert set(trained_models(result.folder)) == {"task/digit", "task/parity", "task/large", "task/holes"}
    built = build(load_recipe("method={name: centralised, by: task}"))
    for task, who in zip(("digit", "parity", "large", "holes"), built.federation.trainers.values(), strict=True):
        assert (who.id, set(who.tasks)) == (f"together-{task}", {task})
        holders = [c for c in built.federation.clients.values() if task in c.tasks]
        assert sorted(who.train.positions) == sorted(p for c in holders for p in c.train.positions)
        assert who.batches == len(who.train) / max(len(c.train) for c in holders)


def test_a_task_alone_in_one_place_is_its_only_holder_alone(quick: Quick) -> None:
    """Where each client has one task and each task one client, up to the names of the streams of random numbers."""
    changes = ("partition.all_task_clients=0", "training={rounds: 2, epochs: 1, batch_size: 5000}", "model=mlp")
    one = trained_models(quick(*changes, "method={name: centralised, by: task}").folder)
    two = trained_models(quick(*changes, "method=local").folder)
    for task in ("digit", "parity", "large", "holes"):
        for name, tensor in one[f"task/{task}"].items():
            if ".decoders." not in name and not (name.startswith("heads.") and f".{task}." not in name):
                torch.testing.assert_close(tensor, two[f"{task}-0"][name], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "change", ["peers={}", "runtime.engine=flower", "runtime.engine=cluster", "training.stacked=true"]
)
def test_where_examples_cannot_lie_in_one_place(change: str) -> None:
    with pytest.raises(
        RecipeError,
        match="centralised needs the examples of all clients in one place|but centralised trains more or less than",
    ):
        build(load_recipe("method=centralised", change))


def test_refusals_of_what_makes_no_sense() -> None:
    with pytest.raises(ValueError, match="train one model for all clients"):
        fedloom.Method(stage=Identity(), private="*", turn=InOnePlace())
    with pytest.raises(ValueError, match="train one model per task, so clients share nothing"):
        fedloom.Method(turn=InOnePlace("task"))
    built = build(load_recipe())
    client = next(iter(built.federation.clients.values()))
    with pytest.raises(DataError, match="client 'together': this name is reserved for the pool of all"):
        BuiltFederation(built.federation.tasks, {TOGETHER: client}).pooled("all")
    assert [centralised().turn.pool, centralised(by="task").turn.pool, constant().turn.pool] == ["all", "task", "all"]


def test_show_estimates_the_trivial_answer(quick: Quick) -> None:
    """On all examples the estimate is what the method measures."""
    found = plan(load_recipe())
    truth = values(quick("method=constant"))
    assert {task: metric for task, (metric, _) in found.constant.items()} == dict.fromkeys(found.constant, "accuracy")
    assert len(found.constant) == 4
    for task, (metric, value) in found.constant.items():
        assert value == pytest.approx(truth[task, metric], abs=0.05)


def test_show_counts_activations_and_refuses_a_device_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """An MLP keeps its input (64) and the outputs of its layers (128, 64) of each example, as float32."""
    recipe = load_recipe("model=mlp", "training.batch_size=16")
    assert plan(recipe).memory["activations of a batch (per worker)"] == 4 * (64 + 128 + 64) * 16
    built = build(load_recipe("model={name: resnet10, width: 2}"))
    before = {name: b.clone() for name, b in built.module.named_buffers()}
    assert activations(built) > 0
    assert all(torch.equal(before[name], b) for name, b in built.module.named_buffers())
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(UserError, match="'cuda' found, but this machine has 0 CUDA devices"):
        plan(load_recipe("runtime.device=cuda"))


def test_a_report_of_a_reference_can_be_made(quick: Quick) -> None:
    from fedloom.study.report import write

    for method in POOLED:
        page = write(quick(f"method={method}").folder)
        assert TOGETHER in json.dumps(page.read_text())
