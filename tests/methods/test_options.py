"""Parameters of methods that no packaged recipe changes reach the stage or rule that uses them."""

from __future__ import annotations

import inspect

import pytest

from fedloom import methods
from fedloom.core.layout import ALL_BUT_ENCODER, EVERYTHING
from fedloom.methods import METHODS


@pytest.mark.parametrize(
    ("name", "params", "text"),
    [
        ("fednova", {"tau_eff": "steps"}, "NormaliseSteps(tau_eff='steps')"),
        ("fedtgp", {"server_lr": 0.5, "server_batch_size": 3}, "lr=0.5, batch_size=3"),
        ("fedrcl", {"penalty": 0.25}, "penalty_weight=0.25"),
        ("fedrcl", {"over_levels": "mean"}, "over_levels='mean'"),
        ("fpl", {"over": "batch"}, "ClusterContrast(temperature=0.02, over='batch')"),
        ("fedtgp", {"over": "batch"}, "distance='mse', over='batch')"),
        ("cfl", {"linkage": "complete"}, "by complete linkage"),
    ],
)
def test_a_parameter_reaches_what_uses_it(name: str, params: dict[str, object], text: str) -> None:
    assert text in str(METHODS[name].function(**params))
    assert text not in str(METHODS[name].function())


def test_what_is_not_shared_is_private() -> None:
    sharing = [entry for entry in METHODS if "share" in inspect.signature(entry.function).parameters]
    for entry in sharing:
        rest = ("nothing", EVERYTHING) if entry.name == "fedproto" else ("encoder", ALL_BUT_ENCODER)
        assert (rest[0], entry.function(share=rest[0]).private) == rest, entry.name
        assert entry.function(share="everything").private is None, entry.name
    assert len(sharing) > 9
    assert [methods.fedproto(share=share).buffers for share in ("everything", "nothing")] == ["mean", "local"]
