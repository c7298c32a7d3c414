"""Predictions of finished runs: pictures of every dense task, final or over the rounds; and of the rows of a table."""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pandas import DataFrame
from torch import Tensor

from fedloom.core.errors import StateError, UserError, listed, warn
from fedloom.core.lazy import need
from fedloom.core.settings.yaml import section_of
from fedloom.data.drawing import Cell, Colour, Legend, below_each_other, grid, label, legend_of_wrong, legends, wrong
from fedloom.data.prepare import Array
from fedloom.data.tables.preprocessing import ALL, Preprocessing
from fedloom.data.tables.read import read
from fedloom.data.tables.table import EVERYONE, sites_of, task_of
from fedloom.engines.result import fill, model_key, trained_models
from fedloom.experiments.export.bundle import ABOUT, Bundle, network
from fedloom.experiments.export.finished import Finished, open_runs
from fedloom.federation.rounds.showing import some_examples
from fedloom.federation.runs.reader import PREDICTIONS, Run
from fedloom.federation.runs.recorded import recipe_in
from fedloom.models.multitask import MultiTask
from fedloom.models.signal import Signal
from fedloom.models.tasks.dense import DenseTask, as_label
from fedloom.study.report import predictions as stored_predictions
from fedloom.study.report.predictions import Picture, ShownExample


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
    stored = stored_predictions.of_run(run)
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


def _legend(of: stored_predictions.Legend) -> Legend:
    return Legend(tuple((_colour(c), name) for c, name in of.colours), tuple(map(_colour, of.ramp)), of.ends)


def _colour(web: str) -> Colour:
    red, green, blue = bytes.fromhex(web[1:])
    return red, green, blue


ROWS = 4096
"""Rows that pass the model together."""
Chosen = Callable[[str, str], MultiTask | None]
"""(site, task) -> the model that predicts the task there; None where the site's own model never learned it."""


def predict(model: Path, file: Path, client: str | None = None) -> Any:
    """Return a pandas.DataFrame with a row for each row of a table: the site, each task's prediction, probabilities.

    `model` is a run's folder or an exported model. Of a run, the rows of a site get the model of the client of that
    name, others the model for all; with `client` all rows get that client's. Raises UserError for a model that takes no
    table, and DataError for a table without the columns that it takes.
    """
    table, chosen = _bundle(model, client) if (model / ABOUT).is_file() else _run(model, client)
    read_rows = read(file, table.site, table.missing)
    frame, where = read_rows.frame, read_rows.where
    there = table.site is not None and table.site in frame.columns
    which, names = sites_of(read_rows, table.site if there else None)
    if client is not None:
        scaled = [client] * len(names)
    elif not there and ALL not in table.scales and len(table.scales) > 1:
        raise UserError(
            f"{where}: no column {table.site!r}, but the model scales each site by its own numbers; choose a site "
            "with --client"
        )
    else:
        scaled = names if there else [next(iter(table.scales))]
    x = torch.from_numpy(table.apply(read_rows, scaled, which, tell=warn))
    out: dict[Any, Any] = {table.site: frame[table.site]} if there else {}
    for task, about in table.tasks.items():
        output: Array | None = None
        for number, site in enumerate(names):
            rows = np.flatnonzero(which == number)
            if (module := chosen(site, task)) is None:
                continue
            with torch.inference_mode():
                parts = [module(part, (task,))[task] for part in x[torch.from_numpy(rows)].split(ROWS)]
            outputs = task_of(task, about).predictions(torch.cat(parts).double())
            if output is None:
                output = np.full((len(frame), outputs.shape[1]), np.nan)
            output[rows] = outputs.numpy()
        if output is None:
            continue
        if about.kind == "regression":
            out[task] = output[:, 0]
            continue
        if about.kind == "multilabel":
            out |= {f"p({name})": output[:, place] for place, name in enumerate(about.columns)}
            continue
        some = ~np.isnan(output[:, 0])
        best = np.full(len(frame), "", object)
        best[some] = np.array(about.classes, object)[output[some].argmax(1)]
        out[task] = best
        out |= {f"p({task}={name})": output[:, place] for place, name in enumerate(about.classes)}
    if not out.keys() - {table.site}:
        raise UserError(f"{model}: the model has no prediction for these rows")
    return DataFrame(out)


def _bundle(folder: Path, client: str | None) -> tuple[Preprocessing, Chosen]:
    bundle = Bundle.read(folder)
    if bundle.about.table is None:
        raise UserError(f"{folder}: expected a model that was trained on a table")
    if client not in (None, bundle.about.client):
        raise UserError(
            f"{folder}: the folder holds one model, and --client chooses among the models of a run: leave --client out"
        )
    tasks = {task.name for task in bundle.tasks}
    return bundle.about.table, lambda site, task: bundle.module if task in tasks else None


def _run(folder: Path, client: str | None) -> tuple[Preprocessing, Chosen]:
    run, recipe = Run.read(folder), recipe_in(folder)
    if "table" not in run.info:
        raise UserError(f"{folder}: expected a run that was trained on a table")
    table = section_of(Preprocessing, run.info["table"], f"{folder}/run.json, table", StateError)
    clients = run.info["clients"]
    if client is not None and client not in clients:
        raise UserError(f"{folder}: no client {client!r}. {listed('Clients', client, clients)}")
    tasks = [task_of(name, label) for name, label in table.tasks.items()]
    models, shape = trained_models(folder), (len(table.names),)
    alone = next(iter(clients)) if len(clients) == 1 else None  # as at a node
    modules: dict[str, MultiTask] = {}

    def chosen(site: str, task: str) -> MultiTask | None:
        who = client or (site if site in clients else alone)
        key = model_key(models, who, task)
        if key is None:
            whose = f"site {site!r} is no client of the run" if site != EVERYONE else "the rows have no site"
            raise UserError(f"{folder}: {whose}, and the run has no global model; choose a client with --client "
                            f"({', '.join(list(clients)[:5])} ...)")  # fmt: skip
        if who is not None and key == who and task not in clients[who]["tasks"]:
            return None  # its head was never trained
        if key not in modules:
            module = network(recipe, shape, Signal(kind="features"), tasks)
            fill(module, models[key], folder)
            modules[key] = module.eval()
        return modules[key]

    return table, chosen
