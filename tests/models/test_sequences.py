"""Encoders of series and tokens: what they compute, what they refuse, LoRA, freezing and stacked training."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch.nn.functional import conv1d, max_pool1d

import fedloom as fl
from fedloom.engines.api import trained_models
from fedloom.errors import RecipeError
from fedloom.models import MultiTask, build_model
from fedloom.models.changes import Linearise, changed
from fedloom.models.signal import Lora, Signal
from fedloom.tasks import Classification

TASKS = (Classification("activity", 3),)
SERIES = Signal(kind="series")
TOKENS = Signal(kind="tokens", vocabulary=20, padding=0)
SMALL = {
    "conv1d": {"name": "conv1d", "width": 4, "depth": 2, "hidden": 8},
    "series": {"name": "transformer", "width": 8, "num_heads": 2, "depth": 1},
    "tokens": {"name": "transformer", "width": 8, "num_heads": 2, "depth": 1},
}


def model(name: str, shape: tuple[int, ...], signal: Signal | None, **params: Any) -> MultiTask:
    return build_model(name, params, shape, TASKS, 0, signal=signal)


def federation(what: str) -> fl.Federation:
    """Two clients with 16 examples each, of three classes that can be told apart."""
    g = torch.Generator().manual_seed(0)
    y = torch.arange(40) % 3
    if what == "tokens":
        x = torch.randint(1, 20, (40, 6), generator=g)
        x[:, 0], x[:, 4:] = y + 1, 0
    else:
        x = torch.randn(40, 3, 16, generator=g) + y[:, None, None]
    tasks = {"activity": fl.task(classes=3)}
    signal = TOKENS if what == "tokens" else "series"
    return fl.Federation(
        data=(x, y), partition=[[*range(16)], [*range(16, 32)]], tasks=tasks, test=(x, y), signal=signal
    )


def trained(what: str, **training: Any) -> dict[str, torch.Tensor]:
    result = fl.run(
        federation(what),
        model={**SMALL[what], **training.pop("model", {})},
        method="fedavg",
        training={"rounds": 2, "batch_size": 4, **training},
    )
    return trained_models(result.folder)[""]


def test_conv1d_is_convolutions_over_steps():
    made = model("conv1d", (3, 21), SERIES, width=4, depth=2, hidden=5)
    x = torch.randn(2, 3, 21)
    want = x
    for layer in made.encoder.convs:
        want = max_pool1d(torch.relu(conv1d(want, layer.weight[:, :, 0], layer.bias, padding=2)), 2)
    linear = made.encoder.linear
    torch.testing.assert_close(made.encoder(x), torch.relu(want.mean(2) @ linear.weight.T + linear.bias))
    assert sum(p.numel() for p in model("conv1d", (9, 128), SERIES).encoder.parameters()) == 36_480


def test_a_transformer_sees_order_and_not_the_padding():
    made = model("transformer", (6,), TOKENS, width=8, num_heads=2)
    x = torch.tensor([[3, 4, 5, 0, 0, 0], [5, 4, 3, 0, 0, 0], [0, 0, 0, 0, 0, 0]])
    before = made.encoder(x)
    assert not torch.allclose(before[0], before[1])
    assert bool(before.isfinite().all())
    with torch.no_grad():
        made.encoder.embed.weight[0].normal_()
    assert torch.equal(made.encoder(x)[:2], before[:2])
    plain = model("transformer", (6,), Signal(kind="tokens", vocabulary=20), width=8, num_heads=2)
    seen = plain.encoder(x)
    with torch.no_grad():
        plain.encoder.embed.weight[0].normal_()
    assert not torch.allclose(plain.encoder(x), seen)


def test_a_transformer_attends_as_torch_does():
    made = model("transformer", (3, 16), SERIES, width=8, num_heads=2, depth=1, piece=4)
    block = made.encoder.blocks[0]
    theirs = torch.nn.TransformerEncoderLayer(8, 2, 16, 0.0, "gelu", batch_first=True, norm_first=True)
    names = {
        "self_attn.in_proj_weight": block.qkv.weight, "self_attn.in_proj_bias": block.qkv.bias,
        "self_attn.out_proj.weight": block.proj.weight, "self_attn.out_proj.bias": block.proj.bias,
        "linear1.weight": block.fc1.weight, "linear1.bias": block.fc1.bias,
        "linear2.weight": block.fc2.weight, "linear2.bias": block.fc2.bias,
        "norm1.weight": block.norm1.weight, "norm1.bias": block.norm1.bias,
        "norm2.weight": block.norm2.weight, "norm2.bias": block.norm2.bias,
    }  # fmt: skip
    theirs.load_state_dict({name: tensor.detach() for name, tensor in names.items()})
    x = torch.randn(2, 4, 8)
    ignored = torch.tensor([[False, False, True, True], [False, False, False, True]])
    torch.testing.assert_close(block(x, ignored), theirs(x, src_key_padding_mask=ignored))
    pieces = made.encoder.embed(torch.arange(96.0).view(2, 3, 16))
    first = torch.cat([torch.arange(4.0) + 16 * channel for channel in range(3)])
    linear = made.encoder.embed.linear
    torch.testing.assert_close(pieces[0, 0], linear(first))


@pytest.mark.parametrize(
    ("name", "shape", "signal", "params", "message"),
    [
        (
            "conv1d",
            (9, 128),
            None,
            {},
            r"shape \(9, 128\), which may be a grey image or a series; add: signal=",
        ),
        ("conv1d", (1, 8, 8), Signal(kind="image"), {}, r"found image of 1 x 8 x 8 \(channels x height x width\)"),
        ("conv1d", (6,), TOKENS, {}, r"found tokens of 6 \(positions\), a vocabulary of 20"),
        (
            "conv1d",
            (9, 7),
            SERIES,
            {},
            "at least 8 steps .* found 7 and 9 channels; .* set axes=NTC",
        ),
        (
            "transformer",
            (5,),
            Signal(kind="features"),
            {},
            r"series \(channels x steps\) or tokens, found features of 5",
        ),
        ("transformer", (9, 127), SERIES, {}, "steps that piece 8 divides, found 127"),
        ("transformer", (6,), TOKENS, {"width": 10}, "a width that 4 heads can share, found 10"),
        ("transformer", (6,), Signal(kind="tokens"), {}, "needs the size of the vocabulary"),
        (
            "mlp",
            (6,),
            TOKENS,
            {},
            r"MLP cannot take an input of shape \(1, 6\), torch.int64: .*; for tokens, .*; for numbers, say",
        ),
        ("small-cnn", (6,), TOKENS, {}, "for tokens 'transformer'"),
        ("small-cnn", (9, 128), SERIES, {}, r"shape \(9, 128\). For series use 'conv1d' or 'transformer'"),
    ],
)
def test_inputs_that_an_encoder_cannot_take(name, shape, signal, params, message):
    with pytest.raises(RecipeError, match=message):
        model(name, shape, signal, **params)


def test_a_perceptron_takes_a_series_flattened():
    made = model("mlp", (3, 4), SERIES, hidden=[5])
    x = torch.randn(2, 3, 4)
    assert torch.equal(made(x)["activity"], made(x.flatten(1))["activity"])


@pytest.mark.parametrize("what", SMALL)
def test_linearised_begins_as_it_was(what):
    x = federation(what).dataset.train.images[:4]
    shape, signal = tuple(x.shape[1:]), federation(what).dataset.signal
    params = {key: value for key, value in SMALL[what].items() if key != "name"}
    plain = model(SMALL[what]["name"], shape, signal, **params)
    before = plain(x)["activity"]
    torch.testing.assert_close(changed(plain, (Linearise(),), shape, 0)(x)["activity"], before)


@pytest.mark.parametrize("what", SMALL)
def test_a_run_is_the_same_again_and_stacked(what):
    first, again, stacked = trained(what), trained(what), trained(what, stacked=True)
    for name, tensor in first.items():
        assert torch.equal(again[name], tensor), name
        torch.testing.assert_close(stacked[name], tensor, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.skipif(find_spec("peft") is None, reason="peft is not installed")
@pytest.mark.parametrize(
    ("what", "targets"), [("tokens", Lora().targets), ("series", ("qkv",)), ("conv1d", ("linear",))]
)
def test_lora_trains_factors_and_nothing_else_of_the_encoder(what, targets):
    lora = {"lora": {"rank": 2, "targets": list(targets)}}
    start, end = trained(what, model=lora, rounds=1, optimizer={"lr": 1e-12}), trained(what, model=lora)
    moved = {name for name, tensor in end.items() if not torch.allclose(tensor, start[name])}
    assert {name for name in end if "lora_" in name} <= moved
    assert all("lora_" in name or name.startswith("heads.") for name in moved)


@pytest.mark.parametrize("what", SMALL)
def test_a_frozen_encoder_stays(what):
    frozen = {"freeze": "encoder.*"}
    start, end = trained(what, model=frozen, rounds=1, optimizer={"lr": 1e-12}), trained(what, model=frozen)
    for name, tensor in end.items():
        assert torch.allclose(tensor, start[name]) == name.startswith("encoder."), name
