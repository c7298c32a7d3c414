"""Inputs as models take them: what an array is, and images from arrays and files. Imports torch when it is used."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from fedloom.core.errors import DataError, RecipeError, parsing
from fedloom.core.lazy import need
from fedloom.data.prepare import Array
from fedloom.models.signal import Kind, Signal

if TYPE_CHECKING:
    from torch import Tensor

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".ppm", ".webp")
FORMATS = ("JPEG", "PNG", "BMP", "PPM", "WEBP", "GIF", "TIFF")
"""What a file may be, whatever its ending says. Pillow would hand others, such as EPS, to another program to run."""
ROWS = 1024  # examples converted at a time
Fit = Literal["stretch", "crop"]
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


def opened(file: Path | str) -> Any:
    """A file as a Pillow image in colour; DataError where it cannot be read."""
    library = need("PIL.Image", "vision")
    with parsing(f"{file}: cannot be read as an image"), library.open(file, formats=FORMATS) as image:
        return image.convert("RGB")


def read(files: Sequence[Path | str], size: int, fit: Fit = "stretch") -> Tensor:
    """Colour images resized bilinearly (N x 3 x size x size, uint8, the channels innermost in memory).

    `crop` resizes the shorter side and keeps the centre, `stretch` changes the proportions. DataError where a file
    cannot be read.
    """
    import torch

    bilinear = need("PIL.Image", "vision").Resampling.BILINEAR
    out = np.empty((len(files), size, size, 3), np.uint8)

    def one(row: int) -> None:
        image, box = opened(files[row]), None
        if fit == "crop":
            width, height = image.size
            side = min(image.size)
            left, top = (width - side) / 2, (height - side) / 2
            box = (left, top, left + side, top + side)
        out[row] = np.asarray(image.resize((size, size), bilinear, box))

    # Decoding and resizing leave the interpreter lock.
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        list(pool.map(one, range(len(files))))
    return torch.from_numpy(out).permute(0, 3, 1, 2)


def as_images(array: Array, size: int | None, channels: int | None, where: str) -> Tensor:
    """Images as N x C x H x W, uint8 or float32; a view of `array` where nothing changes."""
    import torch

    wanted = np.uint8 if array.dtype == np.uint8 else np.float32
    mapped = isinstance(array.base, np.memmap) and array.dtype == wanted
    with np.errstate(over="ignore"):  # what becomes infinite is found where statistics are taken
        x = torch.from_numpy(array.astype(wanted, copy=False))
    if x.ndim == 3:
        x = x[:, None]
    elif x.ndim == 4 and x.shape[3] in (1, 3):
        x = x.permute(0, 3, 1, 2)
    elif x.ndim == 4 and x.shape[1] not in (1, 3):
        raise DataError(f"{where}: expected 1 or 3 channels in the last or second place, found {tuple(x.shape)}")
    if channels is not None and channels != x.shape[1]:
        x = x.expand(-1, 3, -1, -1) if channels == 3 else _grey(x)
    if size is not None and x.shape[2:] != (size, size):
        x = _resize(x, size)
    return x if mapped else x.contiguous()


def _grey(x: Tensor) -> Tensor:
    """Colour images as grey ones, N x 1 x H x W, in their own type."""
    import torch

    grey = torch.empty(len(x), 1, *x.shape[2:], dtype=x.dtype)
    luma = torch.tensor([0.299, 0.587, 0.114]).view(3, 1, 1)
    for part, out in zip(x.split(ROWS), grey.split(ROWS), strict=True):
        y = (part * luma).sum(1, keepdim=True)
        out.copy_(y if x.is_floating_point() else y.round())
    return grey


def _resize(x: Tensor, size: int) -> Tensor:
    """Images resized to size x size, in their own type; antialiased where they shrink."""
    import torch
    from torch.nn.functional import interpolate

    resized = torch.empty(*x.shape[:2], size, size, dtype=x.dtype)
    for part, out in zip(x.split(ROWS), resized.split(ROWS), strict=True):
        y = interpolate(part.float(), (size, size), mode="bilinear", antialias=True)
        out.copy_(y if x.is_floating_point() else y.round().clamp(0, 255))
    return resized
