"""The meaning of the colours of pictures, in the form that folders of runs and pages have."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

from pydantic import BaseModel, Field

Colour = tuple[int, int, int]
Web = Annotated[str, Field(pattern=r"^#[0-9a-f]{6}$")]
"""A colour as pages write it."""


class Legend(BaseModel):
    """The meaning of colours: single ones by name, and a ramp by its ends."""

    colours: list[tuple[Web, str]] = []
    ramp: list[Web] = []
    ends: tuple[str, str] = ("", "")

    def __or__(self, other: Legend) -> Legend:
        """Return the legend with the colours of both."""
        return Legend(colours=list(dict.fromkeys([*self.colours, *other.colours])), ramp=self.ramp, ends=self.ends)


def named(*colours: tuple[Colour, str]) -> Legend:
    """Return the legend of colours with names."""
    return Legend(colours=[(_web(colour), name) for colour, name in colours])


def between(low: str, high: str, ramp: Iterable[Colour]) -> Legend:
    """Return the legend of a ramp of colours between two ends."""
    return Legend(ramp=[_web(colour) for colour in ramp], ends=(low, high))


def _web(colour: Colour) -> str:
    return "#" + bytes(colour).hex()
