"""Pictures of what finished runs predict for their dense tasks, in the end or over the rounds."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedloom.core.errors import StateError
from fedloom.core.grouping import grouped
from fedloom.core.lazy import need
from fedloom.data.drawing import Cell, below_each_other, grid, label, legend_of_wrong, legends, wrong
from fedloom.data.prepare import Array
from fedloom.experiments.export.finished import Finished, open_runs
from fedloom.federation.rounds.showing import some_examples
from fedloom.federation.runs.reader import PREDICTIONS, Run
from fedloom.models.tasks.dense import DenseTask, as_label
from fedloom.study.report.predictions import Picture, of_run


def predictions(folders: Path | Sequence[Path], count: int = 4) -> Any:
    """Return a Pillow image of `count` test examples with the predictions of the final models of one or several runs.

    One row per example and task; the columns are input, truth, each run's prediction with its model's owner, and of a
    single run where it is wrong. The model is the first holder's own, else the global one. Raises StateError where a
    run has no dense task or no model yet, or where runs have different data.
    """
    runs = open_runs([folders] if isinstance(folders, Path) else folders)
    for run in runs:
        tasks = run.built.federation.tasks
        if not any(isinstance(task, DenseTask) for task in tasks):
            raise StateError(f"{run.folder}: none of its tasks ({', '.join(task.name for task in tasks)}) is dense")
    first = runs[0].built.federation
    dense = [task for task in first.tasks if isinstance(task, DenseTask)]
    by_part = grouped((id(first.holder(task.name).test), task) for task in dense)
    return below_each_other([_sheet(runs, some, count) for some in by_part.values()])


def _answers(run: Finished, task: DenseTask, x: Tensor) -> tuple[list[Tensor], str]:
    """Return (a prediction for each image, in the form of the label; whose model it is from)."""
    owner = run.owner(run.built.federation.holder(task.name).id, task.name)
    mine = next(t for t in run.built.federation.tasks if t.name == task.name)
    assert isinstance(mine, DenseTask)
    with torch.inference_mode():
        output = run.network(owner)(x, (task.name,))[task.name]
    return [as_label(mine, answer) for answer in output], owner or "global model"


def _sheet(runs: Sequence[Finished], tasks: Sequence[DenseTask], count: int) -> Any:
    """Return a row per example and task; of a single run also where it is wrong."""
    x, truth, shown = some_examples(runs[0].built.federation.holder(tasks[0].name), tasks, count)
    answers = {task.name: [_answers(run, task, x) for run in runs] for task in tasks}
    alone = len(runs) == 1
    rows: list[list[Cell]] = []
    for number, picture in enumerate(shown):
        for task in tasks:
            target = truth[task.name][number]
            row: list[Cell] = [(picture, task.name), label(task, target)]
            row += [(label(task, each[number], target)[0], whose) for each, whose in answers[task.name]]
            rows.append([*row, *([wrong(task, target, answers[task.name][0][0][number])] if alone else [])])
    predictions = [{task.name: torch.stack(answers[task.name][at][0]) for task in tasks} for at in range(len(runs))]
    means = legends(runs[0].built.dataset, tasks, truth, *predictions)
    if alone:
        means |= {f"{task.name}, wrong": legend_of_wrong(task) for task in tasks}
    columns = ["input", "truth", *(run.name for run in runs), *(["where it is wrong"] if alone else [])]
    return grid(columns, rows, f"test examples: {len(shown)}", means)


def over_rounds(folder: Path, count: int = 4) -> Any:
    """Return a Pillow image of `count` test examples, those of the report: one row per example and dense task; the
    columns are input, truth, and the answers after some rounds, the last one's at the end.

    Raises StateError where the run did not keep answers of several rounds, or a picture of them is damaged.
    """
    run = Run.read(folder)
    stored = of_run(run)
    if not stored.over_rounds:
        why = "".join(f"; {note}" for note in stored.notes)
        raise StateError(
            f"{folder}: expected predictions of several rounds in its folder {PREDICTIONS}, which a run with "
            f"dense tasks stores if evaluation.predictions is true, found none{why}"
        )
    sheets = []
    for tasks, examples in grouped((example.tasks, example) for example in stored.over_rounds).items():
        some = examples[:count]
        rows = [
            [(_pixels(folder, example.input), task), *(_cell(folder, of[at]) for _, of in example.rows)]
            for example in some
            for at, task in enumerate(tasks)
        ]
        title = f"{run.recipe['name']}, {run.label}: {len(some)} test examples over the rounds"
        means = {task: stored.legends[task][0] for task in tasks}
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
