"""A method in words: the boxes that `str(method)` writes as lines and a report draws."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Box:
    """A leaf with its arguments, or a heading with boxes inside it."""

    title: str
    arguments: str | None = None
    """The text between the brackets of an object's repr; None for a leaf that is no object."""
    after: str = ""
    """The words that follow the closing bracket."""
    facts: tuple[str, ...] = ()
    inside: tuple[Box, ...] = ()
    beside: bool = False
    """True if this box works on other columns or in other rounds than the box before it, and so not after it."""

    @staticmethod
    def of(thing: object, *facts: str, after: str = "") -> Box:
        """Return the leaf of an object whose repr is NAME(ARGUMENTS)."""
        name = type(thing).__name__
        return Box(name, repr(thing)[len(name) + 1 : -1], after, facts)

    def __str__(self) -> str:
        leaf = self.title if self.arguments is None else f"{self.title}({self.arguments}){self.after}"
        return "; ".join((leaf, *self.facts)) if not self.inside else f"{self.title}:\n{listed(self.inside)}"


def listed(boxes: Iterable[Box]) -> str:
    """Return one line per box, indented; a heading ends with a colon; its boxes follow, indented further."""
    return "\n".join(f"  {line}" for box in boxes for line in str(box).split("\n"))


@dataclass(frozen=True)
class Outline:
    """The path of an update through a round, place by place."""

    local: tuple[Box, ...]
    """Local training: changes of the model, rules, phases. They have no order."""
    edge: tuple[Box, ...]
    """At the client, before sending."""
    wire: Box
    server: tuple[Box, ...]
    """At the server, or at each peer."""
    start: str
    """The model from which local training starts: received or own."""
