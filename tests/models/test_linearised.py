"""The first-order expansion of an encoder."""

from __future__ import annotations

import copy
import pickle
from importlib.util import find_spec

import pytest
import torch
from torch import nn
from torch.func import functional_call

from fedloom.core.layout import Layout
from fedloom.errors import RecipeError
from fedloom.models import ENCODERS, build_model
from fedloom.models.changes import Linearised
from fedloom.models.nets import Encoder
from fedloom.models.signal import Lora
from fedloom.tasks import Classification
from fedloom.training import FlatModel
from fedloom.training.loop import channels_last

TASKS = (Classification("digit", 3),)
KINDS = {
    "small-cnn": ("small-cnn", {"width": 2, "hidden": 6}, None),
    "tiny-vit": ("tiny-vit", {"width": 8, "depth": 2, "num_heads": 2}, None),
    "lora": ("tiny-vit", {"width": 8, "depth": 2, "num_heads": 2}, Lora(rank=2)),
}
kinds = pytest.mark.parametrize(
    "kind",
    [
        "small-cnn",
        pytest.param("tiny-vit", marks=pytest.mark.skipif(find_spec("timm") is None, reason="no timm")),
        pytest.param(
            "lora", marks=pytest.mark.skipif(None in (find_spec("timm"), find_spec("peft")), reason="no timm or peft")
        ),
    ],
)


def both(kind: str):
    """(the model, the same with its encoder linearised), in float64, and inputs."""
    name, params, lora = KINDS[kind]
    plain = build_model(name, params, (1, 8, 8), TASKS, 0, lora=lora).double()
    linear = copy.deepcopy(plain)
    linear.encoder = Linearised(linear.encoder)
    return plain, linear, torch.randn(4, 1, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def move(module: nn.Module, seed: int, size: float = 0.1) -> None:
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in module.parameters():
            if p.requires_grad:
                p.add_(size * torch.randn(p.shape, dtype=p.dtype, generator=rng))


class Square(Encoder):
    """theta^2 x: the expansion at theta0 is theta0^2 x + 2 theta0 (theta - theta0) x."""

    features = 1

    def __init__(self) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.tensor(3.0))
        self.frozen = nn.Parameter(torch.tensor(5.0), requires_grad=False)

    def forward(self, x):
        return self.theta**2 * self.frozen * x


class Torchs(Encoder):
    """A transformer of torch's own layers, which have fused kernels in evaluation."""

    features = 4

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)

    def forward(self, x):
        return self.layer(x).mean(1)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_torchs_transformer_layers_are_linearised(mode):
    linear, x = Linearised(Torchs()), torch.randn(3, 5, 4)
    move(linear, 1)
    expected = linear(x).detach()
    with mode():
        torch.testing.assert_close(linear(x), expected)
    assert torch.backends.mha.get_fastpath_enabled()


def test_by_hand():
    linear = Linearised(Square())
    x = torch.tensor([[1.0], [2.0]])
    assert linear(x).flatten().tolist() == [45.0, 90.0]
    with torch.no_grad():
        linear.theta.add_(2.0)
    assert linear(x).flatten().tolist() == [(9 + 12) * 5, (9 + 12) * 10]  # the square itself is 25 * 5 and 25 * 10
    linear(x).sum().backward()
    assert linear.theta.grad == 2 * 3 * 5 * (1 + 2)
    assert linear.frozen.grad is None
    with torch.inference_mode():
        assert linear(x * 1).flatten().tolist() == [105.0, 210.0]


@kinds
def test_equals_the_original_where_it_was_made(kind):
    plain, linear, x = both(kind)
    torch.testing.assert_close(linear(x)["digit"], plain(x)["digit"])


@kinds
def test_the_mean_of_parameters_gives_the_mean_of_features(kind):
    linear = both(kind)[1].encoder
    x = both(kind)[2]
    a, b, mean = (copy.deepcopy(linear) for _ in range(3))
    move(a, 1)
    move(b, 2)
    with torch.no_grad():
        for p, q, r in zip(mean.parameters(), a.parameters(), b.parameters(), strict=True):
            p.copy_(0.25 * q + 0.75 * r)
    expected = 0.25 * a(x) + 0.75 * b(x)
    torch.testing.assert_close(mean(x), expected)
    assert not torch.allclose(a(x), b(x))


@kinds
def test_gradient_is_that_of_the_original_at_the_start_wherever_it_is_taken(kind):
    plain, linear, x = both(kind)
    weights = torch.randn(plain.encoder.features, dtype=torch.float64)
    (plain.encoder(x) @ weights).sum().backward()
    move(linear, 3)
    (linear.encoder(x) @ weights).sum().backward()
    for (name, p), (same, q) in zip(plain.encoder.named_parameters(), linear.encoder.named_parameters(), strict=True):
        assert name == same
        assert (p.grad is None) == (q.grad is None) == (not p.requires_grad)
        if p.grad is not None:
            torch.testing.assert_close(q.grad, p.grad, msg=name)


def test_a_small_step_changes_it_as_the_original_up_to_second_order():
    errors = []
    for size in (1e-2, 1e-3):
        plain, linear, x = both("small-cnn")
        move(plain.encoder, 4, size)
        move(linear.encoder, 4, size)
        errors.append(float((plain.encoder(x) - linear.encoder(x)).detach().norm()))
    assert errors[1] < errors[0] / 50


@kinds
def test_layout_is_that_of_the_plain_encoder(kind):
    plain, linear, _ = both(kind)
    assert Layout.from_module(linear) == Layout.from_module(plain)
    assert linear.state_dict().keys() == plain.state_dict().keys()


@kinds
def test_copies_and_bound_vectors_are_of_one_piece(kind):
    _, linear, x = both(kind)
    still = linear(x)["digit"].detach()
    for again in (copy.deepcopy(linear), pickle.loads(pickle.dumps(linear))):
        flat = FlatModel(again)
        torch.testing.assert_close(flat.module(x)["digit"], still)
        flat.params.mul_(1.5)
        assert not torch.allclose(flat.module(x)["digit"], still)
        flat.params.copy_(flat.initial)
        flat.grad.zero_()
        flat.module(x)["digit"].sum().backward()
        assert flat.grad.any()
    torch.testing.assert_close(linear(x)["digit"], still)


def test_norms_keep_their_statistics_and_dropout_is_off():
    encoder = ENCODERS["resnet10"].function((1, 8, 8), width=2)
    linear = Linearised(encoder).train()
    before = {k: v.clone() for k, v in linear.state_dict().items()}
    x = torch.randn(4, 1, 8, 8)
    linear(x)
    assert not linear.training
    assert not any(m.training for m in linear.modules())
    assert all(torch.equal(before[k], v) for k, v in linear.state_dict().items())
    torch.testing.assert_close(linear(x), encoder(x))


def test_the_start_moves_with_the_module():
    linear = Linearised(ENCODERS["small-cnn"].function((1, 8, 8), width=2, hidden=4))
    assert linear.double().origin.dtype == torch.float64
    params, buffers = dict(linear.named_parameters()), dict(linear.named_buffers())
    y = functional_call(linear, {**params, **buffers}, (torch.ones(1, 1, 8, 8, dtype=torch.float64),))
    assert y.dtype == torch.float64


def test_encoders_of_maps_are_refused():
    with pytest.raises(RecipeError, match="found maps of TinyPyramid"):
        Linearised(ENCODERS["tiny-pyramid"].function((3, 32, 32)))


def test_frozen_parameters_are_no_blocks():
    module = Square()
    layout = Layout.from_module(module, {"theta": "encoder"})  # no rule needs to name what is frozen
    assert (layout.names, layout.d) == (("theta",), 1)
    flat = FlatModel(module, layout)
    flat.vector.fill_(1.0)
    assert (module.theta.item(), module.frozen.item()) == (1.0, 5.0)


@pytest.mark.parametrize("channels", [1, 3])
def test_group_norms_and_images_with_the_channels_last(channels):
    linear = Linearised(ENCODERS["resnet10"].function((channels, 16, 16), width=8, norm="group"))
    x = torch.randn(2, channels, 16, 16, generator=torch.Generator().manual_seed(0))
    move(linear, 1)
    y = linear(channels_last(x))
    assert torch.equal(y, linear(x))
    y.sum().backward()
    assert all(p.grad is not None for p in linear.parameters())
