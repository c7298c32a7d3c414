"""Weights files of encoders: where they are, how they are read, and what to say where they do not fit."""

from __future__ import annotations

import os
import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from fedloom.core.errors import UserError, parsing
from fedloom.core.lazy import need
from fedloom.models.nets import Encoder

WEIGHTS = "FEDLOOM_WEIGHTS"


def load_weights(encoder: Encoder, file: str | Path) -> None:
    """Load a .safetensors file, or a .pth file without pickled code, into an encoder.

    It holds the tensors under the encoder's own names, as `fedloom study pretrain` writes them, or in another form that
    the encoder knows (see `Encoder.adopt`). UserError names what is missing, unexpected or of another shape; only the
    batch counters of norm layers may be missing.
    """
    path = Path(file).expanduser()
    if not path.is_file():
        raise UserError(f"the weights file {path} does not exist")
    state = _read(path)
    try:
        with warnings.catch_warnings():  # timm's resizing of bias tables warns about its own speed
            warnings.simplefilter("ignore")
            state = encoder.adopt(state)
    except (AttributeError, LookupError, RuntimeError) as error:
        raise UserError(f"weights file {path}: the weights do not fit this architecture ({error})") from error
    needed = encoder.state_dict()
    missing = sorted(key for key in needed.keys() - state.keys() if not key.endswith("num_batches_tracked"))
    unexpected = sorted(state.keys() - needed.keys())
    shapes = [
        f"{key}: expected shape {_kind(needed[key])}, found {_kind(state[key])}"
        for key in needed
        if key in state and _kind(needed[key]) != _kind(state[key])
    ]
    problems = [f"{what} {_few(keys)}" for what, keys in (("missing", missing), ("unexpected", unexpected)) if keys]
    if problems or shapes:
        raise UserError(f"weights file {path}: {'; '.join([*problems, *shapes[:3]])}")
    kept = {key: v.to(needed[key].dtype) for key, v in state.items()}  # a large number may become infinite
    broken = sorted(key for key, v in kept.items() if not bool(torch.isfinite(v).all()))
    if broken:
        raise UserError(f"weights file {path}: expected finite values, found nan or inf in {_few(broken)}")
    encoder.load_state_dict(kept, strict=False)


def pretrained_file(architecture: str) -> Path:
    """Return the file with timm's weights of an architecture. Raises UserError if absent; downloads nothing."""
    folder = Path(os.environ.get(WEIGHTS, "~/.cache/fedloom/weights")).expanduser()
    file = folder / f"{architecture}.safetensors"
    if file.is_file():
        return file
    timm = need("timm", "vision")
    hub = timm.get_pretrained_cfg(architecture) if timm.is_model(architecture) else None
    name = getattr(hub, "hf_hub_id", None) or f"timm/{architecture}"
    raise UserError(
        f"timm: pretrained weights of {architecture!r} are missing: expected {file}. A run downloads nothing. With "
        f"a network connection: pip install huggingface_hub && hf download {name} model.safetensors --local-dir "
        f"'{folder}' && mv '{folder / 'model.safetensors'}' '{file}'. Or replace `pretrained` by a file with "
        f"the key `weights`, or a folder with the environment variable {WEIGHTS}."
    )


def _read(file: Path) -> dict[str, Tensor]:
    """Return the tensors of a weights file, without the prefix that distributed training adds."""
    with parsing(f"weights file {file}: cannot be read"):
        try:
            if file.suffix == ".safetensors":
                content: Any = load_file(file)
            else:
                content = torch.load(file, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError:
            raise UserError(
                "it holds more than tensors and plain values, which could run untrusted code; save its state_dict "
                "alone, "
                "or as .safetensors"
            ) from None
    for key in ("state_dict", "model"):
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    named = content.items() if isinstance(content, Mapping) else ()
    tensors = {str(key).removeprefix("module."): v for key, v in named if isinstance(v, Tensor)}
    if not tensors:
        raise UserError(f"weights file {file}: expected named tensors, found none")
    for key, v in tensors.items():
        if v.layout != torch.strided or v.is_quantized or v.is_complex() or v.is_meta:
            raise UserError(f"weights file {file}: {key}: expected plain real numbers, found {v.dtype} on {v.device}")
    return tensors


def _kind(value: Tensor) -> str:
    return f"{tuple(value.shape)}{'' if value.is_floating_point() else ' of integers'}"


def _few(keys: list[str]) -> str:
    more = f" and {len(keys) - 5} more" if len(keys) > 5 else ""
    return ", ".join(map(repr, keys[:5])) + more
