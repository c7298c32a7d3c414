"""Whole runs whose clients train stacked end where clients that train one at a time end, up to rounding."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from fedloom.engines.api import trained_models
from fedloom.engines.pool import Stacked, executor
from fedloom.federation.recipes.loader import load
from fedloom.federation.rounds import worker
from fedloom.federation.rounds.build import build
from fedloom.training import stacked
from fedloom.training.flat import FlatModel
from fedloom.training.loop import LocalResult
from fedloom.training.stacked import Stackable
from tests_support import Quick


@pytest.mark.parametrize("method", ["fedavg", "{name: fedprox, mu: 0.1}"])
def test_a_stacked_run_is_the_same(quick: Quick, method: str) -> None:
    changes = (f"method={method}", "model={name: mlp, hidden: [16]}")
    alone, together = (
        trained_models(quick(*changes, f"training.stacked={stacked}").folder)[""] for stacked in ("false", "true")
    )
    for name, tensor in alone.items():
        torch.testing.assert_close(together[name], tensor, rtol=1e-4, atol=1e-5, msg=name)


def test_stacks_stay_within_a_byte_budget(quick: Quick, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where two of five clients fit a stack there are three stacks; where not even one does there are five."""
    sizes: list[int] = []
    train = worker.train_stacked

    def noted(model: FlatModel, clients: Sequence[Stackable], *rest: Any) -> tuple[torch.Tensor, list[LocalResult]]:
        sizes.append(len(clients))
        return train(model, clients, *rest)

    monkeypatch.setattr(worker, "train_stacked", noted)
    changes = ("model={name: mlp, hidden: [16]}", "training.rounds=1", "training.stacked=true")
    changes = (*changes, "data.tasks=[digit]", "partition={name: iid, clients: 5}")
    whole = trained_models(quick(*changes).folder)[""]
    p = sum(tensor.numel() for tensor in whole.values())
    assert sizes == [5]
    monkeypatch.setattr(stacked, "BUDGET", 12 * 4 * p * 2 + 1)
    parts = trained_models(quick(*changes).folder)[""]
    assert sizes == [5, 2, 2, 1]
    monkeypatch.setattr(stacked, "BUDGET", 1)
    quick(*changes)
    assert sizes == [5, 2, 2, 1, 1, 1, 1, 1, 1]
    for name, tensor in whole.items():
        torch.testing.assert_close(parts[name], tensor, rtol=1e-5, atol=1e-6, msg=name)


def test_the_seconds_of_a_stack_are_shared_among_its_clients(quick: Quick) -> None:
    began = time.perf_counter()
    result = quick("model={name: mlp, hidden: [16]}", "training.stacked=true")
    spent = time.perf_counter() - began
    shares = [share for line in result.run.rounds for share in line.get("seconds_of", {}).values()]
    assert shares
    assert min(shares) > 0
    assert sum(shares) < spent


class Unusual(nn.Module):
    """A model of which torch cannot train copies side by side, or, without `how`, can."""

    def __init__(self, how: str = "") -> None:
        super().__init__()
        self.how, self.linear, self.gru = how, nn.Linear(4, 4), nn.GRU(4, 4, batch_first=True)

    def forward(self, x: torch.Tensor, tasks: tuple[str, ...]) -> dict[str, torch.Tensor]:
        z = self.linear(x)
        if self.how == "random":
            z = torch.nn.functional.dropout(z, 0.3, self.training)
        if self.how == "values" and z.mean() > 0:
            z = -z
        if self.how == "layer":
            z = self.gru(z[:, None])[0][:, 0]
        return dict.fromkeys(tasks, z)


@pytest.mark.parametrize(("how", "possible"), [("", True), ("random", False), ("values", False), ("layer", False)])
def test_auto_tries_whether_copies_of_a_model_train_side_by_side(how: str, possible: bool) -> None:
    model = Unusual(how).eval()
    assert stacked.stacks(model, torch.ones(1, 4), ("a", "b")) is possible
    assert not model.training


@pytest.mark.parametrize(
    ("changes", "stacked"),
    [
        ((), True),
        (("runtime.workers=2",), True),  # or results would depend on it
        (("model=mlp", "model.hidden=[512, 512]"), False),
        (("model=small-cnn", "data.size=32"), False),
        (("partition.clients=4",), False),
        (("training.rounds=2",), False),
        (("training.participation=0.1",), False),
        (("partition={name: task-weights, weights: single, clients: 20}",), True),  # five a task
        (("partition={name: task-weights, weights: single, clients: 16}",), False),  # stacks of four
        (("training.keep_optimizer=true",), False),
        (("method=fedrep",), False),
        (("method.add.trimmed-mean={}",), True),  # the server's part is what it was
    ],
)
def test_auto_stacks_where_that_can_be_done_and_pays(changes: tuple[str, ...], stacked: bool) -> None:
    built = build(
        load(
            "digits-tasks",
            (
                "training.stacked=auto",
                "training.rounds=200",
                "training.batch_size=16",
                "partition={name: iid, clients: 20}",
                "model={name: mlp, hidden: [16]}",
                *changes,
            ),
        )
    )
    assert built.setup.training.stacked is stacked
    if stacked:
        assert isinstance(executor(built.setup, ("cpu",), 1), Stacked)
