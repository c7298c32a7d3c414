"""Pictures under headings on one sheet of paper, with a title, texts below them, and what their colours mean."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedloom.core.errors import UserError
from fedloom.core.extras import need
from fedloom.data.drawing import Cell, Colour, Legend
from fedloom.data.prepare import Array

CELL = 160  # about as wide, in pixels, as a picture is drawn
GAP, LINE, LETTERS, TITLE = 8, 17, 13, 16
ACROSS = 1000  # pixels that pictures of examples without further pictures fill before a new line begins
PAPER, INK, SOFT = (255, 255, 255), (34, 34, 34), (95, 95, 95)
_SWATCH, _BAR = 12, 96


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
    pen = _Pen(library, max(GAP + max(map(len, drawn)) * (wide + GAP), 3 * CELL))
    if title:
        pen.write(title, TITLE, INK, lines=TITLE + 10)
    if heads:
        pen.beside([(GAP + at * (wide + GAP), name) for at, name in enumerate(heads)], wide)
    for blocks in drawn:
        tall = high + max(len(texts) for _, texts in blocks) * LINE + GAP
        pen.room(tall)
        for at, (picture, texts) in enumerate(blocks):
            left = GAP + at * (wide + GAP)
            if picture is not None:
                pen.paste(library.fromarray(picture).resize((wide, high), library.Resampling.NEAREST), left)
            for number, text in enumerate(texts):
                pen.text(left, high + 1 + number * LINE, text, wide)
        pen.done(tall)
    for name, of in legends.items():
        pen.legend(name, of)
    return pen.picture()


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


class _Pen:
    """Draws from the top down on paper that grows as it is needed."""

    def __init__(self, library: Any, width: int) -> None:
        self.library, self.width, self.top = library, width, GAP
        self.paper = library.new("RGB", (width, GAP), PAPER)
        fonts = need("PIL.ImageFont", "vision")
        self.fonts = {size: fonts.load_default(size) for size in (LETTERS, TITLE)}
        self.draw: Any = None

    def room(self, more: int) -> None:
        """Have so many pixels below what is drawn."""
        grown = self.library.new("RGB", (self.width, self.top + more + GAP), PAPER)
        grown.paste(self.paper, (0, 0))
        self.paper, self.draw = grown, need("PIL.ImageDraw", "vision").Draw(grown)

    def done(self, more: int) -> None:
        self.top += more

    def paste(self, drawn: Any, left: int) -> None:
        self.paper.paste(drawn, (left, self.top))

    def text(self, left: int, down: int, text: str, most: float, colour: Colour = SOFT, size: int = LETTERS) -> None:
        """One line; what is wider than `most` pixels is cut."""
        font = self.fonts[size]
        if font.getlength(text) > most:
            while text and font.getlength(text + "…") > most:
                text = text[:-1]
            text += "…"
        self.draw.text((left, self.top + down), text, fill=colour, font=font)

    def write(self, text: str, size: int, colour: Colour, lines: int) -> None:
        self.room(lines)
        self.text(GAP, 0, text, self.width - 2 * GAP, colour, size)
        self.done(lines)

    def beside(self, texts: Sequence[tuple[int, str]], most: int) -> None:
        """Headings."""
        self.room(LINE + 2)
        for left, text in texts:
            self.text(left, 0, text, most, INK)
        self.done(LINE + 2)

    def legend(self, name: str, of: Legend) -> None:
        """A task's name, and its colours, in as many lines as they need."""
        font = self.fonts[LETTERS]
        self.room(LINE)
        self.text(GAP, 0, name, 2 * CELL, INK)
        left = GAP + max(90, int(font.getlength(name)) + 12)
        for colour, text in of.colours:
            taken = _SWATCH + 5 + int(font.getlength(text)) + 14
            if left + taken > self.width - GAP:
                self.done(LINE)
                self.room(LINE)
                left = GAP + 90
            box = (left, self.top + 2, left + _SWATCH, self.top + 2 + _SWATCH)
            self.draw.rectangle(box, fill=colour, outline=SOFT)
            self.text(left + _SWATCH + 5, 0, text, self.width)
            left += taken
        if of.ramp:
            low, high = of.ends
            self.text(left, 0, low, self.width)
            left += int(font.getlength(low)) + 6
            bar = self.library.new("RGB", (len(of.ramp), 1))
            bar.putdata(list(of.ramp))
            self.paper.paste(bar.resize((_BAR, _SWATCH), self.library.Resampling.BILINEAR), (left, self.top + 2))
            self.draw.rectangle((left, self.top + 2, left + _BAR, self.top + 2 + _SWATCH), outline=SOFT)
            self.text(left + _BAR + 6, 0, high, self.width)
        self.done(LINE + 3)

    def picture(self) -> Any:
        self.room(0)
        return self.paper
