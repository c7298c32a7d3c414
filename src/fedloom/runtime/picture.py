"""A picture of a finished run: input, truth and prediction of every dense task."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedloom.data.preview import grid, label, pictures
from fedloom.errors import StateError
from fedloom.runtime.api import trained_models
from fedloom.runtime.build import Built, build
from fedloom.runtime.federation import Client
from fedloom.runtime.folder import RunFolder
from fedloom.tasks.dense import DenseTask, Depth
from fedloom.tasks.metrics import probability


def predictions(folder: Path, count: int = 4) -> Any:
    """A Pillow image: a row per test example, and two columns a task, truth and prediction of the run's final model.

    The global model where the run has one; else each task is shown by the personal model of the first client that
    holds it. Raises StateError where the run has no dense task or no model yet.
    """
    recipe, partition = RunFolder.read(folder)
    built = build(recipe, partition=partition)
    dense = [task for task in built.federation.tasks if isinstance(task, DenseTask)]
    if not dense:
        raise StateError(f"{folder}: none of its tasks ({', '.join(t.name for t in built.federation.tasks)}) is dense")
    models = trained_models(folder)
    first = _holder(built, dense[0].name)
    part = first.test
    spread = torch.linspace(0, len(part) - 1, min(count, len(part))).long()
    names = [task.name for task in dense if _holder(built, task.name).test is part]
    x, truth = part.examples.batch(part.index[spread], torch.device("cpu"), tasks=names)
    shown = pictures(part.examples, x)
    columns, cells = ["image"], [[(picture, "")] for picture in shown]
    for task in (t for t in dense if t.name in names):
        client = _holder(built, task.name).id
        built.module.load_state_dict(models.get("") or models[client])
        built.module.eval()
        with torch.inference_mode():
            output = built.module(x, (task.name,))[task.name]
        columns += [task.name, f"{task.name}, predicted"]
        for row, target, answer in zip(cells, truth[task.name], output, strict=True):
            row += [label(task, target), label(task, as_label(task, answer), target)]
    return grid(columns, cells)


def _holder(built: Built, task: str) -> Client:
    return next(c for c in built.federation.clients.values() if task in c.tasks)


def as_label(task: DenseTask, output: Tensor) -> Tensor:
    """A prediction (C x H x W) in the form of the label."""
    if task.label == "classes":
        return output.argmax(0)
    if task.label == "normals":
        return torch.nn.functional.normalize(output, dim=0)
    if isinstance(task, Depth):
        return output.expm1() if task.log else output
    return probability(output[None])[0].reshape(1, *output.shape[1:])
