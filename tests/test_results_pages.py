"""The tables of docs/results whose numbers lie beside them in a file say what the file says."""

from __future__ import annotations

import csv
from collections import defaultdict
from pathlib import Path
from statistics import fmean

RESULTS = Path(__file__).parents[1] / "docs" / "results"
PAGE = (RESULTS / "peers-growth.md").read_text(encoding="utf-8")


def numbers(name: str) -> list[dict[str, str]]:
    with (RESULTS / name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def table(beginning: str) -> list[list[str]]:
    """The rows of the page's table whose head begins so, without their marks for bold."""
    lines = PAGE[PAGE.index(beginning) :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip(" *") for cell in line.strip("|").split("|")] for line in lines]


def test_how_a_round_grows() -> None:
    expected = []
    for row in numbers("peers-growth.csv"):
        peers = int(row["peers"])
        seconds, training, sent, models, memory = (
            float(row[key]) for key in ("seconds", "training", "signal bytes", "model bytes", "memory")
        )
        digits = ((seconds, 2), (1000 * seconds / peers, 1), (training, 2), (sent / 1e6, 2), (sent / 1e3 / peers, 0))
        each = [f"{value:.{n}f}" for value, n in (*digits, (models / 1e6, 1), (memory / 1e6, 0))]
        expected.append([row["peers"], row["candidates"], row["signals"], *each])
    assert table("| N | candidates |") == expected


def test_how_many_choices_a_sketch_keeps() -> None:
    found = defaultdict(list)
    for row in numbers("sketch-choices.csv"):
        if row["kind"] == "count":
            found[row["peers"], row["m"]].append({k: float(row[k]) for k in ("strict", "0.01", "bound", "recipe")})
    shown, peers = {}, ""
    for first, m, _, *cells in table("| peers | m |"):
        peers = first.split()[0] if first else peers
        shown[peers, m] = [float(cell.removesuffix(" %")) for cell in cells]
    for case, (kept, worst, near, bound, recipe) in shown.items():
        rows = found[case]
        means = {key: 100 * fmean(row[key] for row in rows) for key in rows[0]}
        least = 100 * min(row["strict"] for row in rows)
        for told, true in zip(
            (kept, worst, near, bound, recipe),
            (means["strict"], least, means["0.01"], means["bound"], means["recipe"]),
            strict=True,
        ):
            assert abs(told - true) < 0.06, (case, told, true)
    assert len(shown) == 8
