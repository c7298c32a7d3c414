"""The predictions of one run for the same test images over its rounds, as one picture, from what its folder keeps."""

from __future__ import annotations

import base64
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from fedloom.core.errors import StateError
from fedloom.core.lazy import need
from fedloom.data.drawing import Cell, Colour, Legend, below_each_other, grid
from fedloom.data.prepare import Array
from fedloom.federation.runs.reader import PREDICTIONS, Run
from fedloom.study.report import predictions
from fedloom.study.report.predictions import Picture, ShownExample


def over_rounds(folder: Path, count: int = 4) -> Any:
    """Return a Pillow image of `count` test examples, those of the report: one row per example and dense task; the
    columns are input, truth, and the answers after some rounds, the last one's at the end.

    Raises StateError where the run did not keep answers of several rounds, or a picture of them is damaged.
    """
    run = Run.read(folder)
    stored = predictions.of_run(run)
    if not stored.over_rounds:
        why = "".join(f"; {note}" for note in stored.notes)
        raise StateError(
            f"{folder}: expected predictions of several rounds in its folder {PREDICTIONS}, which a run with "
            f"dense tasks stores if evaluation.predictions is true, found none{why}"
        )
    parts: dict[tuple[str, ...], list[ShownExample]] = {}
    for example in stored.over_rounds:
        parts.setdefault(example.tasks, []).append(example)
    sheets = []
    for tasks, examples in parts.items():
        some = examples[:count]
        rows = [
            [(_pixels(folder, example.input), task), *(_cell(folder, of[at]) for _, of in example.rows)]
            for example in some
            for at, task in enumerate(tasks)
        ]
        title = f"{run.recipe['name']}, {run.label}: {len(some)} test examples over the rounds"
        means = {task: _legend(stored.legends[task][0]) for task in tasks}
        sheets.append(grid(["input", *(name for name, _ in some[0].rows)], rows, title, means))
    return below_each_other(sheets)


def _cell(folder: Path, picture: Picture | None) -> Cell:
    """Return what was answered; a round may lack a task."""
    return (None, "absent") if picture is None else (_pixels(folder, picture), picture.text)


def _pixels(folder: Path, picture: Picture | None) -> Array:
    """Return a picture (H x W x 3, uint8) from what a page would hold."""
    try:
        data = b"" if picture is None else base64.b64decode(picture.uri.partition(",")[2])
        with need("PIL.Image", "vision").open(BytesIO(data), formats=("PNG",)) as image:
            return np.array(image.convert("RGB"))
    except (OSError, ValueError, SyntaxError):
        raise StateError(f"{folder}: a picture in its folder {PREDICTIONS} is absent or damaged") from None


def _legend(of: predictions.Legend) -> Legend:
    return Legend(tuple((_colour(c), name) for c, name in of.colours), tuple(map(_colour, of.ramp)), of.ends)


def _colour(web: str) -> Colour:
    red, green, blue = bytes.fromhex(web[1:])
    return red, green, blue
