"""Pictures of labels and predictions, legends of their colours, and sheets of them: of a data set, or of any cells."""

from __future__ import annotations

import colorsys
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedloom.core.errors import UserError
from fedloom.core.lazy import need
from fedloom.core.legend import Colour, Legend, between, named
from fedloom.data.dataset import Dataset, Examples, normal
from fedloom.data.prepare import Array
from fedloom.models.tasks.task import IGNORE, Task

CLASSES = ("semseg", "human_parts")
"""Kinds of tasks whose labels are one class a pixel."""

NOTHING, BACKDROP = (0, 0, 0), (40, 40, 40)  # pixels without a label; background of human parts
# Anchors of the colours of depth, near to far, evenly spaced: viridis from its light end.
NEAR_TO_FAR = ((253, 231, 37), (94, 201, 98), (33, 145, 140), (59, 82, 139), (68, 1, 84))
NO_TO_YES = (BACKDROP, (255, 255, 255))
RIGHT_TO_WRONG = ((245, 245, 245), (240, 160, 90), (213, 94, 0), (110, 30, 0))
WRONG = 2  # of these, the colour of a wrong class
ANGLE, SHARE = 60.0, 0.5
"""Errors of normals (degrees) and of depth (share of the truth) from which on the colour is the strongest."""

Cell = tuple[Array | None, str]
"""A picture (H x W x 3, uint8) or none, and a short text on it."""


def label(task: Task, target: Tensor, like: Tensor | None = None) -> Cell:
    """Draw one label as (H x W x 3 uint8 or None, a short text); depth has the colours of the range of `like`."""
    kind = task.kind
    if target.ndim < 2:
        value = target.item() if target.numel() == 1 else target.tolist()
        return None, "unlabelled" if value == -1 else f"{value:.4g}" if isinstance(value, float) else f"{value}"
    values = target.numpy()
    if kind in CLASSES:
        shown = palette(task)[np.where((values < 0) | (values == IGNORE), task.channels, values)]
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
        low, high = extent(target if like is None else like)
        return ramp((plane - low) / max(high - low, 1e-9), valid, NEAR_TO_FAR), f"{low:.1f}-{high:.1f} m"
    return ramp(plane, valid, NO_TO_YES), ""


def extent(depth: Tensor) -> tuple[float, float]:
    """Return the least and the largest depth of a label, in metres; zeros where it has none."""
    known = depth[depth != IGNORE]
    return (float(known.min()), float(known.max())) if known.numel() else (0.0, 0.0)


def wrong(task: Task, target: Tensor, prediction: Tensor) -> Cell:
    """Draw where a prediction (in the form of the label) is wrong, and say how much it is on the whole. Classes are
    right or wrong; normals differ by an angle, depth by a share of the truth, all else by the probability."""
    truth, predicted = target.numpy(), prediction.numpy()
    if task.kind in CLASSES:
        valid = truth != IGNORE
        off, unit = (truth != predicted).astype(float), "{:.0f} % wrong"
    elif task.kind == "normals":
        valid = (truth != IGNORE).all(0)
        cosine = np.clip((truth * predicted).sum(0) / np.maximum(np.linalg.norm(truth, axis=0), 1e-9), -1, 1)
        off, unit = np.degrees(np.arccos(cosine)), "mean {:.0f} degrees"
    else:
        truth, predicted = truth.reshape(truth.shape[-2:]), predicted.reshape(predicted.shape[-2:])
        valid, off, unit = truth != IGNORE, np.abs(truth - predicted), "mean {:.2f}"
        if task.kind == "depth":
            off, unit = off / np.maximum(truth, 1e-9), "mean {:.0f} %"
    least = (len(RIGHT_TO_WRONG) - 1) / WRONG if task.kind in CLASSES else 1.0
    most = {"normals": ANGLE, "depth": SHARE}.get(task.kind, least)
    text = unit.format(off[valid].mean() * (100 if "%" in unit else 1)) if valid.any() else "no label"
    return ramp(np.nan_to_num(off / most, nan=1.0), valid, RIGHT_TO_WRONG), text


def legend(task: Task, names: Sequence[str] = (), occur: Iterable[int] = ()) -> Legend:
    """Return the legend of a task's labels; of its classes those that `occur`, by name or else by number."""
    if task.kind in CLASSES:
        colours = [(r, g, b) for r, g, b in palette(task).tolist()]
        known = [number for number in sorted(set(occur)) if 0 <= number < task.channels]
        return named(*((colours[n], names[n] if n < len(names) else str(n)) for n in known))
    if task.kind == "normals":
        return named(((255, 128, 128), "right"), ((128, 255, 128), "up"), ((128, 128, 255), "towards the viewer"))
    if task.kind == "depth":
        return between("near", "far", NEAR_TO_FAR)
    no, yes = ("no edge", "edge") if task.kind == "edge" else ("no", "yes")
    return between(no, yes, NO_TO_YES)


def legend_of_wrong(task: Task) -> Legend:
    """Return the legend of `wrong`."""
    if task.kind in CLASSES:
        return named((RIGHT_TO_WRONG[0], "right"), (RIGHT_TO_WRONG[WRONG], "wrong"))
    most = {"normals": f"{ANGLE:.0f} degrees or more", "depth": f"{100 * SHARE:.0f} % of the truth or more"}
    return between("right", most.get(task.kind, "wrong"), RIGHT_TO_WRONG)


def palette(task: Task) -> Array:
    """Return a colour for each class of a task and one more, black, for what is ignored (classes + 1 x 3, uint8)."""
    colours: list[Colour] = []
    for number in range(task.channels):
        # The golden angle keeps neighbours apart; shades distinguish classes of one hue.
        hue, shade = (number * 0.381966) % 1, (0.95, 0.7, 0.5)[number % 3]
        r, g, b = (round(255 * c) for c in colorsys.hsv_to_rgb(hue, 0.45 + 0.4 * ((number // 3) % 2), shade))
        colours.append((r, g, b))
    if task.kind == "human_parts":
        colours[0] = BACKDROP
    return np.array([*colours, NOTHING], np.uint8)


def ramp(share: Array, valid: Array, anchors: Sequence[Colour]) -> Array:
    """Return colours for values in 0..1 (H x W x 3), black where nothing is valid."""
    stops = np.linspace(0, 1, len(anchors))
    channels = [np.interp(share, stops, [colour[i] for colour in anchors]) for i in range(3)]
    return np.where(valid[..., None], np.rint(np.stack(channels, -1)), 0).astype(np.uint8)


CELL = 160  # about as wide, in pixels, as a picture is drawn
GAP, LINE, LETTERS, TITLE = 8, 17, 13, 16
ACROSS = 1000  # pixels that pictures of examples without further pictures fill before a new line begins
PAPER, INK, SOFT = (255, 255, 255), (34, 34, 34), (95, 95, 95)
_SWATCH, _BAR = 12, 96
Text = tuple[int, str, Colour]
"""The place where a text begins, the text, and its colour."""


def grid(
    columns: Sequence[str], rows: Sequence[Sequence[Cell]], title: str = "", legends: Mapping[str, Legend] = {}
) -> Any:
    """Draw rows of cells under headings, as a Pillow image; all cells have the size of the first of the first row.

    A column without any picture becomes a line of text below the first picture of each row; where only that one is
    left, several rows stand side by side. `legends` is the name of a task -> what its colours mean.
    """
    library = need("PIL.Image", "vision")
    shown = [c for c in range(len(columns)) if any(row[c][0] is not None for row in rows)]
    first = rows[0][shown[0]][0]
    assert first is not None
    height, width = first.shape[:2]
    times = max(1, round(CELL / width))
    high, wide = height * times, width * times
    drawn = [[(row[c][0], [row[c][1]] if row[c][1] else []) for c in shown] for row in rows]
    for row, blocks in zip(rows, drawn, strict=True):
        blocks[0][1].extend(f"{columns[c]}: {text}" for c, (_, text) in enumerate(row) if c not in shown and text)
    heads = [columns[c] for c in shown]
    if len(shown) == 1:
        lines = math.ceil(len(rows) / max(1, ACROSS // (wide + GAP)))
        across = math.ceil(len(rows) / lines)  # no line is much shorter than the others
        singles = [block for (block,) in drawn]
        drawn, heads = [singles[at : at + across] for at in range(0, len(singles), across)], []
    width = max(GAP + max(map(len, drawn)) * (wide + GAP), 3 * CELL)
    strips = [_strip(width, TITLE + 10, [(GAP, title, INK)], width, TITLE)] if title else []
    if heads:
        strips.append(_strip(width, LINE + 2, [(GAP + at * (wide + GAP), h, INK) for at, h in enumerate(heads)], wide))
    for blocks in drawn:
        pictures = _strip(width, high + 1, [])
        texts: list[list[Text]] = [[] for _ in range(max(len(captions) for _, captions in blocks))]
        for at, (picture, captions) in enumerate(blocks):
            left = GAP + at * (wide + GAP)
            if picture is not None:
                pictures.paste(library.fromarray(picture).resize((wide, high), library.Resampling.NEAREST), (left, 0))
            for line, text in zip(texts, captions, strict=False):
                line.append((left, text, SOFT))
        strips += [pictures, *(_strip(width, LINE, line, wide) for line in texts), _strip(width, GAP - 1, [])]
    for name, of in legends.items():
        strips += _legend(name, of, width)
    margin = _strip(width, GAP, [])
    return below_each_other([margin, *strips, margin])


def below_each_other(sheets: Sequence[Any]) -> Any:
    """Put several sheets on one."""
    size = (max(sheet.width for sheet in sheets), sum(sheet.height for sheet in sheets))
    whole = need("PIL.Image", "vision").new("RGB", size, PAPER)
    top = 0
    for sheet in sheets:
        whole.paste(sheet, (0, top))
        top += sheet.height
    return whole


def save(picture: Any, path: Path) -> None:
    """Write a sheet; the ending of the name says how. UserError where that cannot be done."""
    try:
        picture.save(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be written: {error}") from None


def _strip(width: int, height: int, texts: Sequence[Text], most: float = 0, size: int = LETTERS) -> Any:
    """Draw these texts on a strip of paper; a text wider than `most` pixels is cut."""
    paper = need("PIL.Image", "vision").new("RGB", (width, height), PAPER)
    draw, font = need("PIL.ImageDraw", "vision").Draw(paper), _font(size)
    for left, text, colour in texts:
        cut = text
        while cut and font.getlength(text if cut == text else f"{cut}…") > most:
            cut = cut[:-1]
        draw.text((left, 0), text if cut == text else f"{cut}…", fill=colour, font=font)
    return paper


def _font(size: int) -> Any:
    return need("PIL.ImageFont", "vision").load_default(size)


def _legend(name: str, of: Legend, width: int) -> list[Any]:
    """Return a task's name and its colours, in as many strips as they need; a ramp stands between its ends."""
    wide = _font(LETTERS).getlength
    strips = [_strip(width, LINE, [(GAP, name, INK)], 2 * CELL)]
    first = left = GAP + max(90, int(wide(name)) + 12)
    swatches: list[tuple[Sequence[str], str]] = [((colour,), text) for colour, text in of.colours]
    if of.ramp:
        swatches = [((), of.ends[0]), (of.ramp, of.ends[1])]
    for colours, text in swatches:
        bar = 0 if not colours else _BAR if of.ramp else _SWATCH
        taken = bar + 5 + int(wide(text)) + 14
        if left + taken > width - GAP and left > first:
            strips.append(_strip(width, LINE, []))
            left = first
        if colours:
            library = need("PIL.Image", "vision")
            drawn = library.new("RGB", (len(colours), 1))
            drawn.putdata([tuple(bytes.fromhex(colour[1:])) for colour in colours])
            box = library.new("RGB", (bar + 2, _SWATCH + 2), SOFT)
            box.paste(drawn.resize((bar, _SWATCH), library.Resampling.BILINEAR), (1, 1))
            strips[-1].paste(box, (left, 1))
        label = _strip(width - left - bar - 5, LINE, [(0, text, SOFT)], width)
        strips[-1].paste(label, (left + bar + 5, 0))
        left += taken
    return strips


def sheet(dataset: Dataset, count: int = 6, split: str = "train", augmented: int | None = None) -> Any:
    """Draw the contact sheet as a Pillow image: `count` examples, evenly spaced over the split ("train" or "test").

    Classes have one colour each, depth goes from yellow (near) to violet, normals (x, y, z) are (red, green, blue) from
    -1 to 1, and what is ignored is black; a legend says so. A class of a whole image, or a number, stands below it.
    `augmented` is the seed of a training batch; without it, examples are shown as evaluation sees them. UserError where
    Pillow is absent.
    """
    need("PIL.Image", "vision")
    part: Examples = getattr(dataset, split)
    index = torch.linspace(0, len(part) - 1, min(count, len(part))).long()
    rng = None if augmented is None else torch.Generator().manual_seed(augmented)
    x, y = part.batch(index, torch.device("cpu"), rng)
    images = pictures(part, x, index)
    rows = [
        [(image, f"example {int(at)}"), *(_named(dataset, task, y[task.name][row]) for task in dataset.tasks)]
        for row, (image, at) in enumerate(zip(images, index, strict=True))
    ]
    how = "" if augmented is None else ", as training sees them"
    title = f"{dataset.name}: {len(index)} of {len(part):,} {split} examples{how}"
    return grid(["image", *(task.name for task in dataset.tasks)], rows, title, legends(dataset, dataset.tasks, y))


def _named(dataset: Dataset, task: Task, target: Tensor) -> Cell:
    """Return a label; a class of a whole image by its name where it has one."""
    names = dataset.classes.get(task.name, ())
    if names and target.ndim == 0 and 0 <= int(target) < len(names):
        return None, names[int(target)]
    return label(task, target)


def legends(dataset: Dataset, tasks: Iterable[Task], *shown: Mapping[str, Tensor]) -> dict[str, Legend]:
    """Return the legend of each dense task, with the classes that occur in the labels shown: several {task: labels}."""
    made = {}
    for task in (task for task in tasks if task.dense):
        labels = torch.cat([of[task.name].reshape(-1) for of in shown]).unique() if task.kind in CLASSES else None
        occur = () if labels is None else labels.tolist()
        made[task.name] = legend(task, dataset.classes.get(task.name, ()), occur)
    return made


def pictures(part: Examples, x: Tensor, index: Tensor) -> Array:
    """Return inputs at `index` before normalisation (B x H x W x 3, uint8); vectors as strips of grey."""
    if (scale := normal(part, index)) is not None:
        mean, std = (v.to(x).view(*v.shape, *(1,) * (x.ndim - 2)) for v in scale)
        x = x * std + mean
    if x.ndim == 2:
        low, high = x.amin(1, keepdim=True), x.amax(1, keepdim=True)
        x = ((x - low) / (high - low).clamp(min=1e-9))[:, None, None, :].expand(-1, 1, 8, -1)
    x = x.expand(-1, 3, -1, -1)[:, :3]
    return x.clamp(0, 1).mul(255).round().to(torch.uint8).permute(0, 2, 3, 1).contiguous().numpy()
