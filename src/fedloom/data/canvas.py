"""Pictures under headings on one sheet of paper, with a title, texts below them, and what their colours mean."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedloom.core.errors import UserError
from fedloom.core.lazy import need
from fedloom.data.drawing import Cell, Colour, Legend
from fedloom.data.prepare import Array

CELL = 160  # about as wide, in pixels, as a picture is drawn
GAP, LINE, LETTERS, TITLE = 8, 17, 13, 16
ACROSS = 1000  # pixels that pictures of examples without further pictures fill before a new line begins
PAPER, INK, SOFT = (255, 255, 255), (34, 34, 34), (95, 95, 95)
_SWATCH, _BAR = 12, 96
Text = tuple[int, str, Colour]
"""Where a text begins, the text, and its colour."""


def grid(
    columns: Sequence[str],
    rows: Sequence[Sequence[Cell]],
    title: str = "",
    legends: Mapping[str, Legend] = {},
) -> Any:
    """Rows of cells under headings, as a Pillow image; the first cell of the first row gives all cells their size.

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
    drawn = [_blocks(columns, row, shown) for row in rows]
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
        texts: list[list[Text]] = [[] for _ in range(max(len(said) for _, said in blocks))]
        for at, (picture, said) in enumerate(blocks):
            left = GAP + at * (wide + GAP)
            if picture is not None:
                pictures.paste(library.fromarray(picture).resize((wide, high), library.Resampling.NEAREST), (left, 0))
            for line, text in zip(texts, said, strict=False):
                line.append((left, text, SOFT))
        strips += [pictures, *(_strip(width, LINE, line, wide) for line in texts), _strip(width, GAP - 1, [])]
    for name, of in legends.items():
        strips += _legend(name, of, width)
    margin = _strip(width, GAP, [])
    return below_each_other([margin, *strips, margin])


def _blocks(columns: Sequence[str], row: Sequence[Cell], shown: Sequence[int]) -> list[tuple[Array | None, list[str]]]:
    """The pictures of a row, each with the texts below it."""
    told = [f"{columns[c]}: {text}" for c, (_, text) in enumerate(row) if c not in shown and text]
    own = {c: [text for text in (row[c][1],) if text] for c in shown}
    return [(row[c][0], [*own[c], *(told if c == shown[0] else ())]) for c in shown]


def below_each_other(sheets: Sequence[Any]) -> Any:
    """Several sheets on one."""
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
    """Return a strip of paper with these texts on a line; what is wider than `most` pixels is cut."""
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
    swatches: list[tuple[Sequence[Colour], str]] = [((colour,), text) for colour, text in of.colours]
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
            drawn.putdata(list(colours))
            box = library.new("RGB", (bar + 2, _SWATCH + 2), SOFT)
            box.paste(drawn.resize((bar, _SWATCH), library.Resampling.BILINEAR), (1, 1))
            strips[-1].paste(box, (left, 1))
        label = _strip(width - left - bar - 5, LINE, [(0, text, SOFT)], width)
        strips[-1].paste(label, (left + bar + 5, 0))
        left += taken
    return strips
