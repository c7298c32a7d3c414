"""A contact sheet of a data set: a row per example, a column for the image and for each task's label."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from fedloom.core.lazy import need
from fedloom.data.canvas import grid
from fedloom.data.dataset import Dataset, Examples, normal
from fedloom.data.drawing import CLASSES, Cell, Legend, label, legend
from fedloom.data.prepare import Array
from fedloom.models.tasks.task import Task


def sheet(dataset: Dataset, count: int = 6, split: str = "train", augmented: int | None = None) -> Any:
    """The contact sheet as a Pillow image: `count` examples, evenly spaced over the split ("train" or "test").

    Classes have one colour each, depth goes from yellow (near) to violet, normals (x, y, z) are (red, green, blue) from
    -1 to 1, and what is ignored is black; a legend says so. A class of a whole image, or a number, stands below it.
    `augmented` is the seed of a training batch; without it, examples are shown as evaluation sees them. UserError where
    Pillow is absent.
    """
    need("PIL.Image", "vision")
    part: Examples = getattr(dataset, split)
    index = torch.linspace(0, len(part) - 1, min(count, len(part))).long()
    rng = None if augmented is None else torch.Generator().manual_seed(augmented)
    x, y = part.batch(index, torch.device("cpu"), rng)
    images = pictures(part, x, index)
    rows = [
        [(image, f"example {int(at)}"), *(_named(dataset, task, y[task.name][row]) for task in dataset.tasks)]
        for row, (image, at) in enumerate(zip(images, index, strict=True))
    ]
    how = "" if augmented is None else ", as training sees them"
    title = f"{dataset.name}: {len(index)} of {len(part):,} {split} examples{how}"
    return grid(["image", *(task.name for task in dataset.tasks)], rows, title, legends(dataset, dataset.tasks, y))


def _named(dataset: Dataset, task: Task, target: Tensor) -> Cell:
    """A label; a class of a whole image by its name where it has one."""
    names = dataset.classes.get(task.name, ())
    if names and target.ndim == 0 and 0 <= int(target) < len(names):
        return None, names[int(target)]
    return label(task, target)


def legends(dataset: Dataset, tasks: Iterable[Task], *shown: Mapping[str, Tensor]) -> dict[str, Legend]:
    """Dense task -> what its colours mean, with the classes that occur in what is shown: several {task: labels}."""
    return {
        task.name: legend(
            task,
            dataset.classes.get(task.name, ()),
            torch.cat([of[task.name].reshape(-1) for of in shown]).unique().tolist() if task.kind in CLASSES else (),
        )
        for task in tasks
        if task.dense
    }


def pictures(part: Examples, x: Tensor, index: Tensor) -> Array:
    """Inputs of the examples at `index` as they were before normalisation (B x H x W x 3, uint8); feature vectors as
    strips of grey."""
    if (found := normal(part, index)) is not None:
        mean, std = (v.to(x).view(*v.shape, *(1,) * (x.ndim - 2)) for v in found)
        x = x * std + mean
    if x.ndim == 2:
        low, high = x.amin(1, keepdim=True), x.amax(1, keepdim=True)
        x = ((x - low) / (high - low).clamp(min=1e-9))[:, None, None, :].expand(-1, 1, 8, -1)
    x = x.expand(-1, 3, -1, -1)[:, :3]
    return x.clamp(0, 1).mul(255).round().to(torch.uint8).permute(0, 2, 3, 1).contiguous().numpy()
