"""Sites in other units are found among few sites and among many, with medians that are computed once for many."""

from __future__ import annotations

import pytest
import torch

from fedloom.data.inputs import MANY, far_off


@pytest.mark.parametrize("count", [4, MANY, MANY + 1, 500])
def test_a_site_in_other_units_is_found(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    moments = {f"c{i}": (torch.tensor([i / count, 0.0]), torch.ones(2)) for i in range(count)}
    moments["c1"] = torch.tensor([100.0, 0.0]), torch.ones(2)
    calls, quantile = [], torch.Tensor.quantile

    def counted(*arguments: object) -> torch.Tensor:
        calls.append(arguments)
        return quantile(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(torch.Tensor, "quantile", counted)
    (found,) = far_off(moments, None)
    assert found.startswith("c1: channel 0 has mean 100, where the others have about 0.")
    assert len(calls) == (2 if count > MANY else 2 + 2 * count)
