"""Predictions of a run or an exported model for the rows of a table, preprocessed as in training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pandas import DataFrame
from pydantic import ValidationError

from fedloom.core.errors import StateError, UserError, listed
from fedloom.data.prepare import Array
from fedloom.data.tables.preprocessing import ALL, Preprocessing
from fedloom.data.tables.read import read
from fedloom.data.tables.table import EVERYONE, sites_of, task_of
from fedloom.engines.result import fill, model_keys, trained_models
from fedloom.experiments.export.bundle import ABOUT, Bundle, network
from fedloom.federation.runs.reader import Run
from fedloom.federation.runs.recorded import recipe_in
from fedloom.models.multitask import MultiTask
from fedloom.models.signal import Signal

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
    x = torch.from_numpy(table.apply(read_rows, scaled, which))
    out: dict[Any, Any] = {table.site: frame[table.site]} if there else {}
    for task, label in table.tasks.items():
        output: Array | None = None
        for number, site in enumerate(names):
            rows = np.flatnonzero(which == number)
            if (module := chosen(site, task)) is None:
                continue
            with torch.inference_mode():
                parts = [module(part, (task,))[task] for part in x[torch.from_numpy(rows)].split(ROWS)]
            outputs = torch.cat(parts).double()
            if output is None:
                output = np.full((len(frame), outputs.shape[1]), np.nan)
            real = label.kind == "regression"
            if label.kind == "multilabel":
                outputs = outputs.sigmoid()
            else:
                outputs = outputs * (label.std or 1) + (label.mean or 0) if real else outputs.softmax(1)
            output[rows] = outputs.numpy()
        if output is None:
            continue
        if label.kind == "regression":
            out[task] = output[:, 0]
            continue
        if label.kind == "multilabel":
            out |= {f"p({name})": output[:, place] for place, name in enumerate(label.columns)}
            continue
        some = ~np.isnan(output[:, 0])
        best = np.full(len(frame), "", object)
        best[some] = np.array(label.classes, object)[output[some].argmax(1)]
        out[task] = best
        out |= {f"p({task}={name})": output[:, place] for place, name in enumerate(label.classes)}
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
    try:
        table = Preprocessing.model_validate(run.info["table"])
    except ValidationError as error:
        raise StateError(f"{folder}/run.json, table: {error.errors()[0]['msg']}") from None
    clients = run.info["clients"]
    if client is not None and client not in clients:
        raise UserError(f"{folder}: no client {client!r}. {listed('Clients', client, clients)}")
    tasks = [task_of(name, label) for name, label in table.tasks.items()]
    models, shape = trained_models(folder), (len(table.names),)
    modules: dict[str, MultiTask] = {}

    def chosen(site: str, task: str) -> MultiTask | None:
        who = client or (site if site in clients else None)
        key = next((key for key in model_keys(who, task) if key in models), None)
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
