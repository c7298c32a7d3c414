"""What dense training may change at random, as a recipe states it. Free of torch."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, field_validator

from fedloom.core.settings.section import Count, Positive, Section, UnitInterval


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
    """Where there is a segmentation: a crop in which one class fills this share is drawn again."""
    crop_tries: Count = 10
    """How many crops are drawn at most; the last is taken in any case."""

    @field_validator("scale")
    @classmethod
    def _ordered(cls, scale: tuple[float, float]) -> tuple[float, float]:
        if scale[0] > scale[1]:
            raise ValueError(f"expected the smaller factor first, found {list(scale)}")
        return scale


def resolve(augment: bool | Augment) -> Augment | None:
    """A recipe's `augment`: true stands for the defaults, false for None."""
    if isinstance(augment, bool):
        return Augment() if augment else None
    return augment
