"""Metrics over the examples of all clients together: when there are some, and that they are those of all examples."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fedloom.federation.rounds.measure import MeasuredGroup, Model, headline, pooled, records_of
from fedloom.federation.rounds.messages import Message
from fedloom.federation.rounds.worker import POOL
from fedloom.federation.runs.reader import POOLED
from fedloom.tasks import Classification

TASK = Classification("sort", 2, judge=("accuracy",))
OUTPUTS = {
    "ann": ([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0]], [0, 0, 1]),
    "bob": ([[0.0, 1.0]], [0]),
    "cleo": ([[0.0, 1.0], [0.0, 1.0]], [1, 1]),
}


class Part:
    """Examples of a client: how many, and how many of them have a label."""

    def __init__(self, labelled: int) -> None:
        self.labelled = labelled

    def of(self, task: str) -> range:
        return range(self.labelled)


def records(*clients: str, unlabelled: tuple[str, ...] = (), withheld: tuple[str, ...] = (), one: bool = False) -> Any:
    """Return what is pooled of these clients; `one`: all have the same examples."""
    shared, measured = Part(3), []
    for name in clients:
        part = shared if one else Part(0 if name in unlabelled else len(OUTPUTS[name][1]))
        who: Any = SimpleNamespace(id=name, part=lambda split, part=part: part)
        model = Model("personal", ("sort",), Message(None, None, {}), {}, owner=name)
        output, target = OUTPUTS[name]
        kept = {"sort": (torch.tensor(output), torch.tensor(target))}
        scores = {} if name in unlabelled + withheld else {POOL: kept}
        measured.append((MeasuredGroup((name, None, 0), model, name, "test", [(who, model)]), scores))
    built: Any = SimpleNamespace(federation=SimpleNamespace(tasks=(TASK,)))
    return pooled(built, measured)


def test_the_number_is_that_of_all_examples_in_one() -> None:
    about = {"client": None, "task": "sort", "model": "personal", "split": "test", "data": "all clients' test"}
    for names, share in ((("ann", "bob"), 2 / 4), (("ann", "bob", "cleo"), 4 / 6)):
        assert records(*names) == [{**about, "metric": f"{POOLED}accuracy", "value": pytest.approx(share)}]


def test_a_client_without_a_label_of_the_task_is_left_out() -> None:
    assert records("ann", "bob", "cleo", unlabelled=("bob",))[0]["value"] == pytest.approx(4 / 5)


@pytest.mark.parametrize(
    ("clients", "how"),
    [
        (("ann",), {}),
        (("ann", "bob"), {"one": True}),
        (("ann", "bob"), {"unlabelled": ("bob",)}),
        (("ann", "bob", "cleo"), {"withheld": ("bob",)}),
        ((), {}),
    ],
    ids=["one client", "the same examples", "labels at one client", "one withholds its outputs", "nobody"],
)
def test_there_is_none_where_it_says_nothing_new_or_a_part_is_missing(clients: tuple[str, ...], how: Any) -> None:
    assert records(*clients, **how) == []


@pytest.mark.parametrize(
    ("labelled", "value", "said"), [(2, 0.5, True), (2, math.nan, True), (0, 0.5, True), (0, math.nan, False)]
)
def test_a_task_without_labels_and_without_a_value_has_no_line(labelled: int, value: float, said: bool) -> None:
    """Labels of a node lie elsewhere, and a model that diverged has no value."""
    part: Any = Part(labelled)
    part.name = "own"
    client: Any = SimpleNamespace(id="ann", part=lambda split: part)
    scores: Any = {"sort": {"accuracy": value, "macro_f1": math.nan}}
    lines = records_of(client, "global", "test", scores, ["sort"])
    assert [line["metric"] for line in lines] == (["accuracy", "macro_f1"] if said else [])
    about = {"client": "ann", "task": "sort", "model": "global", "split": "test", "data": "own test"}
    assert all(about.items() <= line.items() for line in lines)


def test_the_headline_is_the_mean_of_primary_metrics_on_validation_else_on_test_data() -> None:
    tasks = (SimpleNamespace(name="sort", primary="accuracy"), SimpleNamespace(name="far", primary="rmse"))
    built: Any = SimpleNamespace(federation=SimpleNamespace(tasks=tasks))

    def measured(task: str, metric: str, split: str, value: float) -> dict[str, Any]:
        return {"task": task, "metric": metric, "split": split, "value": value}

    test = [measured("sort", "accuracy", "test", 0.25), measured("far", "rmse", "test", 3.0)]
    val = [
        *(measured("sort", "accuracy", "val", value) for value in (0.5, 1.0, math.nan)),
        measured("sort", "macro_f1", "val", 0.1),
        measured("far", "accuracy", "val", 0.1),
    ]
    train = [{"loss": 1.0}, {"loss": 2.0}, {"loss": math.nan}]
    assert headline(built, {"metrics": test + val, "train": train}) == {"training loss": 1.5, "val accuracy": 0.75}
    assert headline(built, {"metrics": test, "train": []}) == {"test accuracy": 0.25, "test rmse": 3.0}
    assert headline(built, {"metrics": [], "train": train[2:]}) == {}
