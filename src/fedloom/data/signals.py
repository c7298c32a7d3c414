"""Arrays as inputs of what they are: images, series, features or tokens. Imports torch when it is used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from fedloom.core.errors import DataError, RecipeError
from fedloom.core.signal import Kind, Signal
from fedloom.data.images import as_images
from fedloom.data.prepare import Array

if TYPE_CHECKING:
    from torch import Tensor

LAYOUTS: dict[Kind, str] = {
    "image": "N x H x W, N x H x W x C or N x C x H x W, uint8 or floating point",
    "series": "N x channels x steps or N x steps",
    "features": "N x F",
    "tokens": "N x T, whole numbers",
}
_AXES: dict[Kind, tuple[int, ...]] = {"image": (3, 4), "series": (2, 3), "features": (2,), "tokens": (2,)}
_LONGEST = 4
"""A uint8 array is taken for grey images unasked if the longer side has less than so many times the shorter one."""


def stated(signal: Kind | Signal | None) -> Signal | None:
    """A signal as a recipe or a user states it: a kind alone is one."""
    return signal if signal is None or isinstance(signal, Signal) else Signal(kind=signal)


def signal_of(array: Array, said: Signal | None, where: str) -> Signal:
    """What the inputs in an array are: as said, or as shape and type tell.

    Unasked, N x F are features, what has four axes images, and N x A x B grey images where A = B, or where they are
    uint8 and neither side is four times the other. Raises DataError for an array that is not what is said, and, with
    the candidates, for one that may be several things.
    """
    found = f"found {array.dtype} of shape {array.shape}"
    kinds = kinds_of(array)
    if said is None:
        if not kinds:
            known = "; ".join(f"{layout} ({kind})" for kind, layout in LAYOUTS.items())
            raise DataError(f"{where}: {found}, expected numbers of one of the shapes {known}")
        if len(kinds) > 1:
            each = " or ".join(f"{kind} ({LAYOUTS[kind]})" for kind in kinds)
            raise DataError(f"{where}: {found}, which may be {each}; say which, for example signal: {kinds[0]}")
        return Signal(kind=kinds[0])
    measured = array.dtype == np.uint8 or array.dtype.kind == "f"
    fits = {"image": measured, "tokens": array.dtype.kind in "iu"}.get(said.kind, array.dtype.kind in "iuf")
    if not fits or array.ndim not in _AXES[said.kind]:
        raise DataError(f"{where}: expected {said.kind} ({LAYOUTS[said.kind]}), {found}")
    return said


def kinds_of(array: Array) -> tuple[Kind, ...]:
    """What an array may be, the likeliest first."""
    picture = array.dtype == np.uint8
    measured = picture or array.dtype.kind == "f"
    if not measured and array.dtype.kind not in "iu":
        return ()
    if array.ndim == 2:
        return ("features",) if measured else ("tokens", "features")
    if array.ndim == 4 and measured:
        return ("image",)
    if array.ndim != 3:
        return ()
    short, long = sorted(array.shape[1:])
    if measured and (short == long or (picture and long < _LONGEST * short)):
        return ("image",)
    return ("series", "image")


def as_inputs(array: Array, signal: Signal, size: int | None, channels: int | None, where: str) -> Tensor:
    """Inputs as models take them: N x C x H x W, N x C x T or N x F, uint8 or float32; tokens N x T, int64."""
    import torch

    if signal.kind == "image":
        return as_images(array, size, channels, where)
    if size is not None or channels is not None:
        raise RecipeError(f"{where}: size and channels are for images, found {signal.kind}")
    if signal.kind == "tokens":
        return torch.from_numpy(array.astype(np.int64))
    with np.errstate(over="ignore"):  # what becomes infinite is found where statistics are taken
        x = torch.from_numpy(array if array.dtype == np.uint8 else array.astype(np.float32, copy=False))
    return x[:, None] if signal.kind == "series" and x.ndim == 2 else x


def with_vocabulary(signal: Signal, parts: Sequence[Tensor], where: str) -> Signal:
    """Tokens with the size of their vocabulary: as stated, or the largest in `parts` and one.

    Raises DataError for tokens outside of it.
    """
    low, high = min(int(x.min()) for x in parts), max(int(x.max()) for x in parts)
    size = high + 1 if signal.vocabulary is None else signal.vocabulary
    if low < 0 or high >= size:
        raise DataError(f"{where}: expected tokens from 0 to {size - 1}, found {low if low < 0 else high}")
    return signal.model_copy(update={"vocabulary": size})
