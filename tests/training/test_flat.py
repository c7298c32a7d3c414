"""A model as one vector: what counts as its buffers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedloom.core.layout import Layout
from fedloom.training.flat import FeatureRecorder, FlatModel, integer_buffers


class Net(nn.Linear):
    """A layer with buffers of these names; those that begin with an underscore are not saved."""

    def __init__(self, **buffers: torch.Tensor) -> None:
        super().__init__(2, 1)
        for name, value in buffers.items():
            self.register_buffer(name, value, persistent=not name.startswith("_"))


def flat(net: nn.Module) -> FlatModel:
    """Return a model all of whose parameters are an encoder's."""
    return FlatModel(net, Layout.from_module(net, {"*": "encoder"}))


REAL, WHOLE, COMPLEX = torch.tensor([1.5]), torch.tensor([3]), torch.tensor([1j])


@pytest.mark.parametrize(
    ("buffers", "has", "whole"),
    [
        ({}, False, []),
        ({"mean": REAL}, True, []),
        ({"count": WHOLE}, True, ["count"]),
        ({"mean": REAL, "count": WHOLE}, True, ["count"]),
        ({"_table": WHOLE}, False, []),
    ],
)
def test_buffers_are_numbers_that_are_saved(buffers: dict[str, torch.Tensor], has: bool, whole: list[str]) -> None:
    net = Net(**buffers)
    assert list(integer_buffers(net)) == whole
    model = flat(net)
    assert (model.has_buffers, list(model.integers)) == (has, whole)
    assert not model.has_batch_norm


def test_complex_buffers_are_no_integers() -> None:
    assert integer_buffers(Net(phase=COMPLEX)) == {}


def test_batch_norm_has_statistics_and_a_counter() -> None:
    model = flat(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)))
    assert (model.has_buffers, model.has_batch_norm, list(model.integers)) == (True, True, ["1.num_batches_tracked"])


def test_features_under_another_model_leave_each_layer_in_its_mode() -> None:
    """Layers that rest, as norm layers with frozen statistics do, still rest after it."""
    module = nn.Module()
    module.encoder = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    module.encoder[1].eval()
    model = flat(module)
    recorder = FeatureRecorder(model)
    with recorder.recording():
        module.encoder(torch.randn(4, 3))
    assert not recorder.under(model.vector.clone()).requires_grad
    assert [part.training for part in module.encoder.modules()] == [True, True, False]
