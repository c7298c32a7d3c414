"""A contact sheet of a data set: a row per example, a column for the image and for each task's label."""

from __future__ import annotations

import colorsys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedloom.data.dataset import Dataset, Examples, TensorExamples
from fedloom.data.joined import JoinedExamples
from fedloom.data.mixed import MixedExamples
from fedloom.data.prepare import Array
from fedloom.data.transforms import MEAN, STD
from fedloom.errors import UserError
from fedloom.extras import need
from fedloom.tasks.task import IGNORE, Task

CELL = 160  # about as wide, in pixels, as a cell is drawn
GAP, HEADER = 4, 16
BACKGROUND, INK = (24, 24, 28), (235, 235, 235)
NOTHING, BACKDROP = (0, 0, 0), (40, 40, 40)  # pixels without a label; background of human parts
# Anchors of the colours of depth, near to far, evenly spaced: viridis from its light end.
NEAR_TO_FAR = ((253, 231, 37), (94, 201, 98), (33, 145, 140), (59, 82, 139), (68, 1, 84))

Cell = tuple[Array | None, str]
"""A picture (H x W x 3, uint8) or none, and a short text on it."""


def sheet(dataset: Dataset, count: int = 6, split: str = "train", augmented: int | None = None) -> Any:
    """The contact sheet as a Pillow image: `count` examples, evenly spaced over the split ("train" or "test").

    Classes have one colour each, depth goes from yellow (near) to violet, normals (x, y, z) are (red, green, blue) from
    -1 to 1, and what is ignored is black. A class of a whole image, or a number, stands as text. `augmented` is the
    seed of a training batch; without it, examples are shown as evaluation sees them. UserError where Pillow is absent.
    """
    need("PIL.Image", "vision")
    part: Examples = getattr(dataset, split)
    index = torch.linspace(0, len(part) - 1, min(count, len(part))).long()
    rng = None if augmented is None else torch.Generator().manual_seed(augmented)
    x, y = part.batch(index, torch.device("cpu"), rng)
    images = pictures(part, x, index)
    rows = [
        [(images[row], f"{int(index[row])}"), *(label(task, y[task.name][row]) for task in dataset.tasks)]
        for row in range(len(images))
    ]
    return grid(["image", *(task.name for task in dataset.tasks)], rows)


def grid(columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> Any:
    """Rows of cells under headings, as a Pillow image; the first cell of the first row gives all cells their size."""
    library = need("PIL.Image", "vision")
    first = rows[0][0][0]
    assert first is not None
    height, width = first.shape[:2]
    times = max(1, round(CELL / width))
    high, wide = height * times, width * times
    size = (len(columns) * (wide + GAP) + GAP, HEADER + len(rows) * (high + GAP) + GAP)
    picture = library.new("RGB", size, BACKGROUND)
    pen = need("PIL.ImageDraw", "vision").Draw(picture)
    for column, name in enumerate(columns):
        pen.text((GAP + column * (wide + GAP), 2), name, fill=INK)
    for row, cells in enumerate(rows):
        top = HEADER + GAP + row * (high + GAP)
        for column, (cell, text) in enumerate(cells):
            left = GAP + column * (wide + GAP)
            if cell is not None:
                drawn = library.fromarray(cell).resize((wide, high), library.Resampling.NEAREST)
                picture.paste(drawn, (left, top))
            if text:
                pen.rectangle(pen.textbbox((left + 2, top + 1), text), fill=BACKGROUND)
                pen.text((left + 2, top + 1), text, fill=INK)
    return picture


def save(picture: Any, path: Path) -> None:
    """Write a sheet; the ending of the name says how. UserError where that cannot be done."""
    try:
        picture.save(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be written: {error}") from None


def label(task: Task, target: Tensor, like: Tensor | None = None) -> Cell:
    """One label as (H x W x 3 uint8 or None, a short text); depth has the colours of the range of `like`."""
    kind = task.kind
    if target.ndim < 2:
        value = target.item() if target.numel() == 1 else target.tolist()
        return None, "unlabelled" if value == -1 else f"{value:.4g}" if isinstance(value, float) else f"{value}"
    values = target.numpy()
    if kind in ("semseg", "human_parts"):
        colours = palette(task.channels)
        if kind == "human_parts":
            colours[0] = BACKDROP
        shown = colours[np.where((values < 0) | (values == IGNORE), task.channels, values)]
        return shown, "" if (values != IGNORE).any() else "no label"
    if kind == "normals":
        valid = (values != IGNORE).all(0)
        shown = np.where(valid, np.rint((np.clip(values, -1, 1) + 1) * 127.5), 0).astype(np.uint8).transpose(1, 2, 0)
        return shown, "" if valid.any() else "no label"
    plane = values.reshape(values.shape[-2:])
    valid = plane != IGNORE
    if not valid.any():
        return np.zeros((*plane.shape, 3), np.uint8), "no label"
    if kind == "depth":
        scale = plane[valid] if like is None else like[like != IGNORE].numpy()
        low, high = (float(scale.min()), float(scale.max())) if scale.size else (0.0, 0.0)
        return _ramp((plane - low) / max(high - low, 1e-9), valid), f"{low:.1f}-{high:.1f} m"
    grey = np.rint(np.clip(plane, 0, 1) * 215 + 40).astype(np.uint8)
    return np.where(valid[..., None], grey[..., None], np.uint8(0)).repeat(3, -1)[..., :3], ""


def palette(classes: int) -> Array:
    """A colour for each class and one more, black, for what is ignored (classes + 1 x 3, uint8)."""
    colours = []
    for number in range(classes):
        # The golden angle keeps neighbours apart; shades tell apart what comes round again.
        hue, shade = (number * 0.381966) % 1, (0.95, 0.7, 0.5)[number % 3]
        colours.append([round(255 * c) for c in colorsys.hsv_to_rgb(hue, 0.45 + 0.4 * ((number // 3) % 2), shade)])
    return np.array([*colours, NOTHING], np.uint8)


def _ramp(share: Array, valid: Array) -> Array:
    """Colours for values in 0..1 (H x W x 3)."""
    stops = np.linspace(0, 1, len(NEAR_TO_FAR))
    channels = [np.interp(share, stops, [colour[i] for colour in NEAR_TO_FAR]) for i in range(3)]
    return np.where(valid[..., None], np.rint(np.stack(channels, -1)), 0).astype(np.uint8)


def normal(part: Examples, index: Tensor) -> tuple[Tensor, Tensor] | None:
    """(mean, standard deviation) that the examples at `index` are normalised with, None where they are not.

    Each is 1 x channels where all examples have the same, else one row an example. They must be of one data set.
    """
    if isinstance(part, JoinedExamples):
        _, part, index = part.piece(index)
    if isinstance(part, MixedExamples):
        if part.mean is None or part.std is None:
            return None
        origin = part.domain[index]
        return part.mean[origin].double(), part.std[origin].double()
    mean, std = (part.mean, part.std) if isinstance(part, TensorExamples) else (MEAN, STD)
    if mean is None or std is None:
        return None
    return torch.tensor([mean], dtype=torch.float64), torch.tensor([std], dtype=torch.float64)


def pictures(part: Examples, x: Tensor, index: Tensor) -> Array:
    """Inputs of the examples at `index` as they were before normalisation (B x H x W x 3, uint8); feature vectors as
    strips of grey."""
    if (found := normal(part, index)) is not None:
        mean, std = (v.to(x).view(*v.shape, *(1,) * (x.ndim - 2)) for v in found)
        x = x * std + mean
    if x.ndim == 2:
        low, high = x.amin(1, keepdim=True), x.amax(1, keepdim=True)
        x = ((x - low) / (high - low).clamp(min=1e-9))[:, None, None, :].expand(-1, 1, 8, -1)
    x = x.expand(-1, 3, -1, -1)[:, :3]
    return x.clamp(0, 1).mul(255).round().to(torch.uint8).permute(0, 2, 3, 1).contiguous().numpy()
