"""Broken and foreign weights files: they are loaded as they are, or refused in a sentence with the file's name."""

from __future__ import annotations

import io
import pickle
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save, save_file
from torch import Tensor

from fedloom.models.encoders import ENCODERS
from fedloom.models.nets import load_weights
from trials.hostile import STRANGE, Tally, bytes_like, judged
from trials.scale import cases


def strange(value: Tensor, rng: random.Random) -> Any:
    """Another thing in the place of a tensor."""
    return rng.choice(
        (
            lambda: value.to(rng.choice((torch.float16, torch.float64, torch.bfloat16, torch.int64, torch.bool))),
            lambda: value.to(torch.complex64),
            lambda: value.to_sparse(),
            lambda: torch.quantize_per_tensor(value, 0.1, 0, torch.qint8),
            lambda: value.to("meta"),
            lambda: value[:-1],
            lambda: value[None],
            lambda: value.reshape(-1),
            lambda: torch.zeros(1).expand(10**6, 10**6),
            lambda: value * float("nan"),
            lambda: value.double() * 1e300,
            lambda: value.numpy(),
            lambda: rng.choice(STRANGE),
        )
    )()


def content(state: Mapping[str, Tensor], rng: random.Random) -> Any:
    """Return what a file may hold in the place of a state dictionary."""
    name = rng.choice(list(state))
    return rng.choice(
        (
            lambda: {**state, name: strange(state[name], rng)},
            lambda: {key: value for key, value in state.items() if key != name},
            lambda: {**state, "more": torch.zeros(2)},
            lambda: {**state, 7: torch.zeros(2)},
            lambda: {"state_dict": {"model": dict(state)}, "epoch": 3},
            lambda: {"model": list(state.values())},
            lambda: list(state.items()),
            lambda: rng.choice(STRANGE),
            lambda: {"optimizer": torch.optim.Adam([torch.zeros(2)]).state_dict(), **state},
            lambda: {f"module.{key}": value for key, value in state.items()},
        )
    )()


@pytest.mark.filterwarnings("ignore:torch.quantize:UserWarning")
def test_weights(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    tally = Tally(record_property)
    encoders = {
        "small-cnn": ((1, 8, 8), {"width": 2, "hidden": 4}),
        "resnet10": ((3, 8, 8), {"width": 4}),
        "tiny-swin": ((3, 32, 32), {"width": 8}),
        "tiny-vit": ((3, 8, 8), {"width": 8, "depth": 1}),
    }
    made = {name: ENCODERS[name].function(shape, **params) for name, (shape, params) in encoders.items()}
    for number in range(cases(25, 2500)):
        rng = random.Random(number)
        encoder = made[rng.choice(list(made))]
        state = {name: value.clone() for name, value in encoder.state_dict().items()}
        file = tmp_path / f"weights.{rng.choice(('safetensors', 'pth'))}"
        try:
            if file.suffix == ".pth":
                buffer = io.BytesIO()
                torch.save(content(state, rng) if rng.random() < 0.6 else state, buffer)
                data = buffer.getvalue()
            else:
                data = save(content(state, rng) if rng.random() < 0.4 else state)
        except Exception:
            data = save(state)  # what cannot be written cannot be read
        file.write_bytes(bytes_like(data, rng) if rng.random() < 0.5 else data)
        before = {name: (value.shape, value.dtype) for name, value in encoder.state_dict().items()}
        with tally.case(f"{number}, {type(encoder).__name__}, {file.suffix}"):
            loaded = tally.answer(judged(lambda: load_weights(encoder, file) or True, file))  # noqa: B023
            after = encoder.state_dict()
            assert {name: (value.shape, value.dtype) for name, value in after.items()} == before
            assert all(bool(torch.isfinite(value).all()) for value in after.values())
            if loaded is None:  # nothing of a refused file is kept
                assert all(torch.equal(after[name], value) for name, value in state.items())
        encoder.load_state_dict(state)
    tally.close()


def test_a_file_that_runs_code_is_not_unpickled(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "ran",))

    for number, data in enumerate((pickle.dumps(Evil()), pickle.dumps({"state_dict": Evil()}))):
        file = tmp_path / f"{number}.pth"
        file.write_bytes(data)
        assert judged(lambda: load_weights(ENCODERS["mlp"].function((2,)), file) or True, file) is None  # noqa: B023
    save_file({"x": torch.zeros(1)}, tmp_path / "other.safetensors")
    assert not (tmp_path / "ran").exists()
