"""Metrics over the examples of all clients together: when there are some, and that they are those of all examples."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fedloom.federation.rounds.measure import MeasuredGroup, Model, pooled
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
        measured.append((MeasuredGroup(model, name, "test", [(who, model)]), scores))
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
