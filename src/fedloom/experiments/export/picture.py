"""A picture of finished runs: input, truth and predictions of every dense task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedloom.core.errors import StateError
from fedloom.data.drawing import Cell, below_each_other, grid, label, legend_of_wrong, legends, wrong
from fedloom.experiments.export.finished import Finished, open_runs
from fedloom.federation.rounds.showing import some_examples
from fedloom.models.tasks.dense import DenseTask, as_label


def predictions(folders: Path | Sequence[Path], count: int = 4) -> Any:
    """Return a Pillow image of `count` test examples with the predictions of the final models of one or several runs.

    One row per example and task; the columns are input, truth and each run's prediction, which says whose model it is
    from, and of a single run where it is wrong. The model is that of the first client that holds the task, where it has
    its own, else the global one.

    Raises StateError where a run has no dense task or no model yet, or where runs have different data.
    """
    runs = open_runs([folders] if isinstance(folders, Path) else folders)
    for run in runs:
        tasks = run.built.federation.tasks
        if not any(isinstance(task, DenseTask) for task in tasks):
            raise StateError(f"{run.folder}: none of its tasks ({', '.join(task.name for task in tasks)}) is dense")
    first = runs[0].built.federation
    dense = [task for task in first.tasks if isinstance(task, DenseTask)]
    by_part: dict[int, list[DenseTask]] = {}
    for task in dense:
        by_part.setdefault(id(first.holder(task.name).test), []).append(task)
    return below_each_other([_sheet(runs, some, count) for some in by_part.values()])


def _answers(run: Finished, task: DenseTask, x: Tensor) -> tuple[list[Tensor], str]:
    """Return (a prediction for each image, in the form of the label; whose model it is from)."""
    client = run.built.federation.holder(task.name).id
    owner = run.owner(client, task.name)
    mine = next(t for t in run.built.federation.tasks if t.name == task.name)
    assert isinstance(mine, DenseTask)
    with torch.inference_mode():
        output = run.network(owner)(x, (task.name,))[task.name]
    return [as_label(mine, answer) for answer in output], owner or "global model"


def _examples(run: Finished, tasks: Sequence[DenseTask], count: int) -> tuple[Tensor, Mapping[str, Tensor], Any]:
    """Return (inputs, labels, inputs as pictures) of examples evenly spaced over the test part that the tasks share."""
    return some_examples(run.built.federation.holder(tasks[0].name), tasks, count)


def _sheet(runs: Sequence[Finished], tasks: Sequence[DenseTask], count: int) -> Any:
    """Return a row per example and task; of a single run also where it is wrong."""
    x, truth, shown = _examples(runs[0], tasks, count)
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
