"""A stage as a Flower strategy."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedloom.errors import RecipeError
from fedloom.methods.private import PrivateMean
from fedloom.stages import Identity, Mean, PCGrad, TopMagnitude

pytest.importorskip("flwr")

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, MetricRecord, RecordDict
from flwr.app import Message as FlowerMessage
from flwr.clientapp import ClientApp

from fedloom.engines.flower.engine import LocalGrid

EXAMPLE = Path(__file__).parents[2] / "examples" / "flower-deployment" / "as_strategy.py"
as_strategy = runpy.run_path(str(EXAMPLE))["as_strategy"]

ROWS = {"b": [3.0, -1, 0, 2], "a": [-2.0, 2, 1, 0], "c": [1.0, 1, -4, 0]}
SIZES = {"b": 10, "a": 30, "c": 20}


class Grid(LocalGrid):
    """With what Flower's own strategies use."""

    def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> list[Any]:
        ids = self.push_messages(messages)
        return [reply for _ in ids for reply in self.pull_messages(ids)]


def app() -> Any:
    client = ClientApp()

    @client.train()
    def train(message: FlowerMessage, context: Context) -> FlowerMessage:
        name = str(context.node_config["client"])
        arrays = message.content["arrays"]
        w = arrays["w"].numpy() + np.array(ROWS[name], np.float32).reshape(2, 2)
        count = arrays["count"].numpy() + len(ROWS[name]) * (name == "c")
        content = {
            "arrays": ArrayRecord({"w": Array(w), "count": Array(count)}),
            "metrics": MetricRecord({"num-examples": SIZES[name]}),
            "who": ConfigRecord({"client-id": name}),
        }
        return FlowerMessage(RecordDict(content), reply_to=message)

    return client


@pytest.mark.parametrize("stage", [Mean(), TopMagnitude(0.5) >> Mean(), PCGrad() >> Mean()], ids=repr)
def test_a_round_is_what_the_stage_does(stage: Any) -> None:
    grid = Grid(app(), {7: {"client": "b"}, 9: {"client": "a"}, 8: {"client": "c"}})
    start = ArrayRecord({"w": Array(np.ones((2, 2), np.float32)), "count": Array(np.array([5]))})
    strategy = as_strategy(stage, fraction_evaluate=0.0, min_train_nodes=3, min_available_nodes=3)
    result = strategy.start(grid=grid, initial_arrays=start, num_rounds=1)
    names = sorted(ROWS)
    rows = [(name, None) for name in names]
    expected, _ = stage.on([ROWS[n] for n in names], n=[SIZES[n] for n in names], rows=rows, round=1)
    found = torch.from_numpy(result.arrays["w"].numpy())
    torch.testing.assert_close(found, 1 + expected.view(2, 2).float())
    assert result.arrays["count"].numpy() == 9


def test_what_a_strategy_cannot_carry_is_refused() -> None:
    with pytest.raises(RecipeError, match="returns a model per client"):
        as_strategy(Identity())
    with pytest.raises(RecipeError, match="a strategy keeps no privacy budget"):
        as_strategy(PrivateMean(clip=1.0, noise=2.0))
