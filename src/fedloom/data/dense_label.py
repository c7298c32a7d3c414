"""Dense labels: their kinds and readers, their place in an archive, and augmentations. Free of torch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Annotated, Literal

from pydantic import Field, field_validator

from fedloom.core.settings.section import Count, Positive, Section, UnitInterval
from fedloom.data.prepare import Array

Kind = Literal["semseg", "human_parts", "saliency", "normals", "depth", "edge"]

Reader = Callable[[int, Collection[str]], Mapping[str, Array | None]]
"""Reads one example by its position, and its labels of some tasks: `"image"` (H x W x 3, uint8) and an array or None
per task.

Labels are raw, as `fedloom.data.transforms` describes, with the image's height and width: semseg and human_parts are
H x W integers in 0..255 (255 = ignore), saliency and edge H x W of 0, 1 and 255 (or bool), depth H x W floating point
(metres, 0 = no value), normals H x W x 3 (int8 or floating point, any common factor, zero = no value). None, or an
absent key, means that the image is not annotated for the task: it is ignored there. Images may differ in size.

A reader is called from several threads at once, and is pickled where a run has worker processes: it should hold paths,
not open files. Its errors should be DataErrors that name the file.
"""


class DenseLabel(Section):
    """The place of the label images of one task, and the meaning of their numbers."""

    kind: Kind
    key: str
    classes: Annotated[int, Field(ge=1, le=255)] | None = None
    """semseg and human_parts: number of classes; by default the largest label plus one, or 7 parts."""
    boundaries: bool = False
    """edge: the key holds a segmentation, whose boundaries are the edges."""
    threshold: Annotated[float, Field(gt=0, le=1)] | None = None
    """saliency and edge: the key holds shares 0..255 (or 0..1); those from the threshold on count as 1."""
    factor: Positive = 1.0
    """depth: metres per unit."""
    encoding: Literal["centred", "positive"] = "centred"
    """normals in uint8: 0..255 stands for -1..1, or for 0..1."""


class Augment(Section):
    """Random changes of images and their labels; the defaults are those of the field's dense multi-task work.

    Images smaller than about 128 x 128 lose their objects at half size: there, `scale: [0.75, 1.5]` is kinder.
    """

    scale: tuple[Positive, Positive] = (0.5, 2.0)
    """Range of the factor by which images are scaled, drawn uniformly. Depth is divided by it."""
    flip: UnitInterval = 0.5
    """Probability of mirroring left and right."""
    jitter: UnitInterval = 0.5
    """Probability of each of the four changes of colour."""
    brightness: UnitInterval = 32 / 255
    """Largest value added to or taken from colours in 0..1."""
    contrast: UnitInterval = 0.5
    """Colours are multiplied by 1 +- this at most."""
    saturation: UnitInterval = 0.5
    """Distances from grey are multiplied by 1 +- this at most."""
    hue: Annotated[float, Field(ge=0, le=180)] = 36.0
    """Largest turn of the hue, in degrees (18 of OpenCV's 180 steps)."""
    crop_share: Annotated[float, Field(gt=0, le=1)] = 0.75
    """With a segmentation: a crop in which one class fills this share is drawn again."""
    crop_tries: Count = 10
    """The number of crops drawn at most; the last is taken in any case."""

    @field_validator("scale")
    @classmethod
    def _ordered(cls, scale: tuple[float, float]) -> tuple[float, float]:
        if scale[0] > scale[1]:
            raise ValueError(f"expected (smallest, largest) factor, found {list(scale)}")
        return scale


def resolve(augment: bool | Augment) -> Augment | None:
    """Resolve a recipe's `augment`: true stands for the defaults, false for None."""
    return augment if isinstance(augment, Augment) else Augment() if augment else None
