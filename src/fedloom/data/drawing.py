"""Labels and predictions of tasks as pictures, pictures of errors, and legends of their colours."""

from __future__ import annotations

import colorsys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from fedloom.data.prepare import Array
from fedloom.models.tasks.task import IGNORE, Task

Colour = tuple[int, int, int]

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


@dataclass(frozen=True)
class Legend:
    """The colours of a task's pictures: colours with their names, and a ramp with the names of its ends."""

    colours: tuple[tuple[Colour, str], ...] = ()
    ramp: tuple[Colour, ...] = ()
    ends: tuple[str, str] = ("", "")


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


def wrong(task: Task, target: Tensor, answer: Tensor) -> Cell:
    """Draw where a prediction (in the form of the label) is wrong, and say how much it is on the whole.

    Classes are right or wrong; normals differ by an angle, depth by a share of the truth, all else by the probability.
    """
    truth, said = target.numpy(), answer.numpy()
    if task.kind in CLASSES:
        valid = truth != IGNORE
        off, unit = (truth != said).astype(float), "{:.0f} % wrong"
    elif task.kind == "normals":
        valid = (truth != IGNORE).all(0)
        cosine = np.clip((truth * said).sum(0) / np.maximum(np.linalg.norm(truth, axis=0), 1e-9), -1, 1)
        off, unit = np.degrees(np.arccos(cosine)), "mean {:.0f} degrees"
    else:
        truth, said = truth.reshape(truth.shape[-2:]), said.reshape(said.shape[-2:])
        valid, off, unit = truth != IGNORE, np.abs(truth - said), "mean {:.2f}"
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
        return Legend(tuple((colours[n], names[n] if n < len(names) else str(n)) for n in known))
    if task.kind == "normals":
        return Legend((((255, 128, 128), "right"), ((128, 255, 128), "up"), ((128, 128, 255), "towards the viewer")))
    if task.kind == "depth":
        return Legend(ramp=NEAR_TO_FAR, ends=("near", "far"))
    no, yes = ("no edge", "edge") if task.kind == "edge" else ("no", "yes")
    return Legend(ramp=NO_TO_YES, ends=(no, yes))


def legend_of_wrong(task: Task) -> Legend:
    """Return the legend of `wrong`."""
    if task.kind in CLASSES:
        return Legend(((RIGHT_TO_WRONG[0], "right"), (RIGHT_TO_WRONG[WRONG], "wrong")))
    most = {"normals": f"{ANGLE:.0f} degrees or more", "depth": f"{100 * SHARE:.0f} % of the truth or more"}
    return Legend(ramp=RIGHT_TO_WRONG, ends=("right", most.get(task.kind, "wrong")))


CLASSES = ("semseg", "human_parts")
"""Kinds of tasks whose labels are one class a pixel."""


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
