"""Images from arrays and from files, brought to one form. Imports torch when it is used."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from fedloom.core.errors import DataError, parsing
from fedloom.core.extras import need
from fedloom.data.prepare import Array

if TYPE_CHECKING:
    from torch import Tensor

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".ppm", ".webp")
FORMATS = ("JPEG", "PNG", "BMP", "PPM", "WEBP", "GIF", "TIFF")
"""What a file may be, whatever its ending says. Pillow would hand others, such as EPS, to another program to run."""
ROWS = 1024  # examples converted at a time
Fit = Literal["stretch", "crop"]


def opened(file: Path) -> Any:
    """A file as a Pillow image in colour; DataError where it cannot be read."""
    library = need("PIL.Image", "vision")
    with parsing(f"{file}: cannot be read as an image"), library.open(file, formats=FORMATS) as image:
        return image.convert("RGB")


def read(files: Sequence[Path], size: int, fit: Fit = "stretch") -> Tensor:
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
