"""Counts of few rows, which tables for others do not show."""

from __future__ import annotations

from collections.abc import Sequence


def shown(count: int, minimum: int, text: str | None = None) -> str:
    """Return a count, or a `text` that tells it; "<5" where fewer rows than the minimum make it up."""
    return f"<{minimum}" if 0 < count < minimum else f"{count:,}" if text is None else text


def hidden(counts: Sequence[int], minimum: int, rest: int = 0) -> list[bool]:
    """Return which counts to hide: those below the minimum, and the next larger ones until the hidden ones and the
    `rest` reach it together, so that the sum of all does not tell them."""
    hide = [0 < count < minimum for count in counts]
    for place in sorted(range(len(counts)), key=counts.__getitem__):
        few = sum(count for count, hid in zip(counts, hide, strict=True) if hid) + rest
        hide[place] |= 0 < few < minimum and counts[place] > 0
    return hide
