"""What dense labels are, who reads them from files, and where they are in an archive. Free of torch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Annotated, Literal

from pydantic import Field

from fedloom.core.settings.section import Positive, Section
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
    """Where the label images of one task are, and what their numbers mean."""

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
