"""Break the lines of pages at 100 characters: `python docs/_ext/wrap.py FILE...`. Tables, headings, and blocks stay."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

WIDTH = 100
_ATOM = re.compile(r"(?:`[^`]*`|\$[^$]*\$|\S)+")  # code and formulas stay whole
_ITEM = re.compile(r"( *)(?:[-*]|\d+\.) +")
_STAYS = re.compile(r" *(?:\||#|<|:::|\$\$|\[[^\]]+\]: )|$")
_FENCE = re.compile(r" *(```|:::|\$\$|<!--)")


def wrapped(text: str) -> str:
    """Return a page with lines of at most 100 characters, where they can be broken; other paragraphs stay."""
    return "\n".join(line for unit, stays in _units(text.split("\n")) for line in (unit if stays else _broken(unit)))


def _units(lines: list[str]) -> Iterator[tuple[list[str], bool]]:
    """Yield paragraphs and items of lists, and every line that stays as it is with True."""
    unit: list[str] = []
    closes = ""
    for line in lines:
        begins = _FENCE.match(line)
        if closes or begins or _STAYS.match(line):
            yield unit, False
            yield [line], True
            unit = []
            if closes:
                closes = "" if closes in line else closes
            elif begins:
                ends = {"<!--": "-->"}.get(begins[1], begins[1])
                closes = "" if ends in line[begins.end() :] else ends
        elif _ITEM.match(line):
            yield unit, False
            unit = [line]
        else:
            unit.append(line)
    yield unit, False


def _broken(unit: list[str]) -> list[str]:
    if not unit or max(map(len, unit)) <= WIDTH:
        return unit
    marker = _ITEM.match(unit[0])
    first = marker[0] if marker else re.match(r" *", unit[0])[0]  # type: ignore[index]
    made, line = [], first
    rest = " " * len(first)
    text = " ".join([unit[0][len(first) :], *(line.strip() for line in unit[1:])])
    atoms = [part for atom in _ATOM.findall(text) for part in ([atom] if len(atom) < WIDTH - 10 else atom.split())]
    for atom in _glued(atoms):
        if line.strip() and line != first and len(line) + 1 + len(atom) > WIDTH:
            made.append(line)
            line = rest
        line += atom if line in (first, rest) else f" {atom}"
    return [*made, line]


def _glued(atoms: list[str]) -> Iterator[str]:
    """Yield words; what would be a marker, or MyST's %, at the beginning of a line stays with the word before it."""
    held = ""
    for i, atom in enumerate(atoms):
        following = atoms[i + 1] if i + 1 < len(atoms) else ""
        held = f"{held} {atom}" if held else atom
        if not re.fullmatch(r"[-+*#=>|]+|\d+[.)]|%.*", following):
            yield held
            held = ""


if __name__ == "__main__":
    for name in sys.argv[1:]:
        page = Path(name)
        page.write_text(wrapped(page.read_text("utf-8")), "utf-8")
