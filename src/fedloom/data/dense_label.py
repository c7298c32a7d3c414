"""Where the dense labels of an archive are. Free of torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field


class DenseLabel(BaseModel):
    """Where the label images of one task are, and what their numbers mean."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["semseg", "human_parts", "saliency", "normals", "depth", "edge"]
    key: str
    classes: Annotated[int, Field(ge=1, le=255)] | None = None
    """semseg and human_parts: number of classes; by default the largest label plus one, or 7 parts."""
    boundaries: bool = False
    """edge: the key holds a segmentation, of which the edges are the boundaries."""
    threshold: Annotated[float, Field(gt=0, le=1)] | None = None
    """saliency and edge: the key holds shares 0..255 (or 0..1), which count from here on."""
    factor: Annotated[float, Field(gt=0)] = 1.0
    """depth: metres per unit."""
    encoding: Literal["centred", "positive"] = "centred"
    """normals in uint8: 0..255 stands for -1..1, or for 0..1."""
