"""Whole runs whose clients train stacked end where clients that train one at a time end, up to rounding."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from fedloom.engines.api import Result, trained_models

Quick = Callable[..., Result]


@pytest.mark.parametrize("method", ["fedavg", "{name: fedprox, mu: 0.1}"])
def test_a_stacked_run_is_the_same(quick: Quick, method: str) -> None:
    changes = (f"method={method}", "model={name: mlp, hidden: [16]}")
    alone, together = (
        trained_models(quick(*changes, f"training.stacked={stacked}").folder)[""] for stacked in ("false", "true")
    )
    for name, tensor in alone.items():
        torch.testing.assert_close(together[name], tensor, rtol=1e-4, atol=1e-5, msg=name)
