"""Test the kinds of inputs (images, series, features, tokens): stated, inferred from the shape, or requested."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch

import fedloom as fl
from fedloom.data import DATASETS
from fedloom.errors import DataError, RecipeError
from fedloom.federation.recipes import load, recipe_hash
from fedloom.models.signal import Signal, blank, sized

CPU = torch.device("cpu")
RNG = np.random.default_rng(0)


@pytest.fixture
def arrays(tmp_path):
    """A function that stores inputs, 12 of them to train, and reads them as the data set `arrays`."""

    def read(x: np.ndarray, **params: Any):
        y = np.arange(len(x)) % 2
        np.savez(tmp_path / "set.npz", x_train=x[:12], y_train=y[:12], x_test=x[12:], y_test=y[12:])
        return DATASETS["arrays"].make(0, path=str(tmp_path / "set.npz"), **params)

    return read


def uint8(*shape: int) -> np.ndarray:
    return RNG.integers(0, 256, shape).astype(np.uint8)


@pytest.mark.parametrize(
    ("x", "kind", "shape"),
    [
        (RNG.normal(size=(16, 5)), "features", (5,)),
        (uint8(16, 5), "features", (5,)),
        (RNG.normal(size=(16, 8, 8)), "image", (1, 8, 8)),
        (uint8(16, 8, 24), "image", (1, 8, 24)),
        (uint8(16, 8, 6, 3), "image", (3, 8, 6)),
    ],
)
def test_what_shape_and_type_tell(arrays, x, kind, shape):
    data = arrays(x)
    assert (data.signal.kind, data.input_shape) == (kind, shape)


SEVERAL = (
    r"'x_train': found float32 of shape \(12, 9, 128\), which may be series \(N x channels x steps or N x steps\) or "
)


@pytest.mark.parametrize(
    ("x", "params", "message"),
    [
        (
            RNG.normal(size=(16, 9, 128)).astype(np.float32),
            {},
            SEVERAL + r"image \(.*\); say which, for .* signal: series",
        ),
        (uint8(16, 9, 128), {}, r"found uint8 of shape \(12, 9, 128\), which may be series .* or image"),
        (RNG.integers(0, 9, (16, 7)), {}, r"found int64 of shape \(12, 7\), which may be tokens .* or features"),
        (
            RNG.normal(size=(16, 2, 3, 4, 5)),
            {},
            r"found float64 of shape \(12, 2, 3, 4, 5\), expected numbers of one of",
        ),
        (np.full((16, 4), "a"), {}, r"found <U1 of shape \(12, 4\), expected numbers"),
        (
            RNG.normal(size=(16, 9)),
            {"signal": "image"},
            r"expected image \(N x H x W, .*found float64 of shape \(12, 9\)",
        ),
        (RNG.normal(size=(16, 9)), {"signal": "tokens"}, r"expected tokens \(N x T, whole numbers\), found float64"),
        (RNG.integers(0, 9, (16, 8, 8)), {"signal": "image"}, "uint8 or floating point"),
        (RNG.integers(-1, 9, (16, 7)), {"signal": "tokens"}, "expected tokens from 0 to 8, found -1"),
        (RNG.integers(0, 9, (16, 7)), {"signal": Signal(kind="tokens", vocabulary=4)}, "from 0 to 3, found 8"),
    ],
)
def test_inputs_of_several_or_other_kinds_are_refused(arrays, x, params, message):
    with pytest.raises(DataError, match=message):
        arrays(x, **params)


def test_sizes_are_for_images(arrays):
    with pytest.raises(
        RecipeError, match=r"'x_train': size and channels are only for images, but the inputs are series"
    ):
        arrays(RNG.normal(size=(16, 9, 32)), signal="series", size=8)


@pytest.mark.parametrize("dtype", [np.float16, np.int16, np.uint8])
def test_channels_of_a_series_are_normalised_apart_by_the_train_part(arrays, dtype):
    x = (RNG.uniform(size=(16, 3, 20)) * [[5], [30], [100]] + [[100], [50], [20]]).astype(dtype)
    data = arrays(x, signal="series")
    assert data.input_shape == (3, 20)
    got, _ = data.test.batch(torch.arange(4), CPU)
    train = x[:12].astype(np.float64)
    want = (x[12:].astype(np.float64) - train.mean((0, 2), keepdims=True)[0]) / train.std((0, 2), keepdims=True)[0]
    np.testing.assert_allclose(got.numpy(), want, rtol=1e-3, atol=1e-3)


def test_steps_may_come_before_channels(arrays):
    x = RNG.normal(size=(16, 30, 3)).astype(np.float32)
    (doubt,) = arrays(x, signal="series").doubts
    assert doubt == (
        "series of 30 x 3 (channels x steps) found, more channels than steps: "
        "add data.axes=NTC if the steps come first, data.axes=NCT if not"
    )
    said = arrays(x, signal="series", axes="NCT")
    assert (said.input_shape, said.doubts) == ((30, 3), ())
    turned = arrays(x, signal="series", axes="NTC")
    assert (turned.input_shape, turned.doubts) == ((3, 30), ())
    np.testing.assert_array_equal(turned.train.images.numpy(), x[:12].transpose(0, 2, 1))
    with pytest.raises(RecipeError, match=r"'x_train': axes is only for series, but the inputs are features: leave"):
        arrays(x[:, 0], axes="NTC")
    with pytest.raises(DataError, match=r"'x_train': inputs of shape \(12, 30\) found, expected N x steps x channels"):
        arrays(x[..., 0], signal="series", axes="NTC")


def test_a_series_of_one_channel_and_features_of_whole_numbers(arrays):
    assert arrays(RNG.normal(size=(16, 20)), signal="series").input_shape == (1, 20)
    batch, _ = arrays(RNG.integers(0, 9, (16, 7)), signal="features").train.batch(torch.arange(12), CPU)
    assert batch.dtype == torch.float32
    assert float(batch.mean().abs()) < 1e-5


@pytest.mark.parametrize("dtype", [np.int64, np.uint8, np.uint16])
def test_tokens_stay_whole_numbers(arrays, dtype):
    x = RNG.integers(0, 9, (16, 7)).astype(dtype)
    x[0, 0] = 11
    data = arrays(x, signal="tokens")
    assert data.signal == Signal(kind="tokens", vocabulary=12)
    batch, _ = data.train.batch(torch.arange(12), CPU)
    assert batch.dtype == torch.int64
    assert batch.tolist() == x[:12].tolist()
    said = Signal(kind="tokens", vocabulary=50, padding=0)
    assert arrays(x, signal=said).signal == said


def test_a_recipe_says_it_in_a_word_or_with_a_vocabulary():
    recipe = {
        "name": "t",
        "data": {"name": "arrays", "path": "a.npz"},
        "partition": {"name": "iid", "clients": 2},
        "model": "mlp",
        "method": "fedavg",
    }
    assert recipe_hash(load(recipe)) == "b10d9444df6ce192"  # as before there was such a key
    assert recipe_hash(load(recipe, ["data.signal=series"])) != "b10d9444df6ce192"
    full = load(recipe, ["data.signal={kind: tokens, vocabulary: 9, padding: 0}"])
    assert full.data.params["signal"] == Signal(kind="tokens", vocabulary=9, padding=0)
    assert load(full.model_dump(mode="json")) == full
    for wrong, message in (
        (
            "{kind: tokens, vocabulary: 9, padding: 9}",
            "data.signal.padding: 9 found, expected one below the vocabulary, 9",
        ),
        ("{kind: series, padding: 0}", "data.signal.padding: 0 found, but it is for tokens, and the kind is 'series'"),
        ("serie", "data.signal: 'serie' found, expected 'image', 'series',"),
    ):
        with pytest.raises(RecipeError, match=message):
            load(recipe, [f"data.signal={wrong}"])


def federation(x: Any, **more: Any) -> fl.Federation:
    y = torch.arange(len(x)) % 2
    tasks = {"odd": fl.task(classes=2)}
    return fl.Federation(data=(x, y), partition=[[0, 2, 4], [1, 3, 5]], tasks=tasks, test=(x, y), **more)


@pytest.mark.parametrize(
    ("x", "signal", "found"),
    [
        (torch.rand(8, 5), None, Signal(kind="features")),
        (torch.rand(8, 1, 6, 6), None, Signal(kind="image")),
        (torch.rand(8, 9, 16), None, None),
        (torch.rand(8, 9, 16), "series", Signal(kind="series")),
        (torch.arange(16).view(8, 2), None, Signal(kind="tokens", vocabulary=16)),
        (torch.arange(16).view(8, 2) - 1, None, Signal(kind="tokens")),
        (torch.arange(16).view(8, 2), Signal(kind="tokens", vocabulary=20, padding=3), None),
    ],
)
def test_inputs_of_a_federation(x, signal, found):
    expected = signal if isinstance(signal, Signal) else found
    assert federation(x, signal=signal).dataset.signal == expected


@pytest.mark.parametrize(
    ("x", "signal", "message"),
    [
        (torch.rand(8, 5), "sound", "Federation: signal='sound' found, expected one of 'image', 'series',"),
        (torch.rand(8, 5), "series", r"data: inputs of shape \(5,\), float32 found, expected series: channels x steps"),
        (torch.rand(8, 6, 6), "image", r"shape \(6, 6\), float32 found, expected image: channels x height x width"),
        (torch.ones(8, 5, dtype=torch.uint8), "tokens", "uint8 found, expected tokens: positions, int64"),
        (torch.arange(16).view(8, 2), Signal(kind="tokens", vocabulary=4), "expected tokens from 0 to 3, found 15"),
    ],
)
def test_inputs_of_a_federation_that_do_not_fit(x, signal, message):
    with pytest.raises(DataError, match=message):
        federation(x, signal=signal)


def test_a_dry_run_says_what_an_input_is(tmp_path):
    np.savez(tmp_path / "s.npz", x=RNG.normal(size=(40, 9, 16)), y=np.arange(40) % 2)
    recipe = {
        "name": "t",
        "data": {
            "name": "arrays", "path": str(tmp_path / "s.npz"), "images": "x", "labels": {"odd": "y"},
            "test_fraction": 0.5, "signal": "series",
        },
        "partition": {"name": "iid", "clients": 2},
        "model": {"name": "conv1d", "depth": 1, "width": 4},
        "method": "fedavg",
    }  # fmt: skip
    assert fl.plan(load(recipe)).notes[-1] == "inputs: series of 9 x 16 (channels x steps)"
    with pytest.raises(
        RecipeError, match=re.escape("of at least 8 pixels a side, found inputs of shape (9, 16). For series")
    ):
        fl.plan(load(recipe, ["model=small-cnn"]))


@pytest.mark.parametrize(
    ("shape", "signal", "words"),
    [
        ((9, 128), None, "numbers of 9 x 128"),
        ((9, 128), Signal(kind="series"), "series of 9 x 128 (channels x steps)"),
        ((9,), Signal(kind="series"), "series of 9"),
        ((3, 8, 8), Signal(kind="image"), "image of 3 x 8 x 8 (channels x height x width)"),
        ((16,), Signal(kind="tokens", vocabulary=50), "tokens of 16 (positions), a vocabulary of 50"),
        ((16,), Signal(kind="tokens"), "tokens of 16 (positions)"),
    ],
)
def test_an_input_in_words(shape: tuple[int, ...], signal: Signal | None, words: str) -> None:
    assert sized(shape, signal) == words


@pytest.mark.parametrize("kind", [None, "tokens", "image", "series", "features"])
def test_a_blank_input_is_one_of_zeros(kind: Any) -> None:
    x = blank((3, 2), None if kind is None else Signal(kind=kind))
    assert (x.shape, x.dtype) == ((1, 3, 2), torch.int64 if kind == "tokens" else torch.float32)
    assert not x.any()
