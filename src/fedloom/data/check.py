"""Check a folder of a data set: counts, sizes, ranges of labels, and absent files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import get_args

import numpy as np

from fedloom.core.errors import DataError, RecipeError, choices
from fedloom.data import nyud, pascal_context
from fedloom.data.folders import FileSplit
from fedloom.data.prepare import Array
from fedloom.models.tasks.task import IGNORE

PROBLEMS = 20


@dataclass(frozen=True)
class Checkable:
    """The checks of one data set: `open(root, split, tasks)`, the published counts, and the loader's default size."""

    open: Callable[..., FileSplit]
    tasks: tuple[str, ...]
    expected: Mapping[str, int]
    size: tuple[int, int] | None


CHECKABLE = {
    "nyud": Checkable(nyud.open_split, get_args(nyud.NyudTask), nyud.EXPECTED, (448, 576)),
    "nyud-labeled": Checkable(nyud.open_labelled, get_args(nyud.LabelledTask), nyud.EXPECTED, None),
    "pascal-context": Checkable(
        pascal_context.open_split, get_args(pascal_context.PascalTask), pascal_context.EXPECTED, (512, 512)
    ),
}


@dataclass
class Report:
    """The result of a check; `rows` are (part, what, found, expected). Without `problems` the data set is usable."""

    rows: list[tuple[str, str, str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def usable(self) -> bool:
        """Return whether a run could use the data set."""
        return not self.problems

    def text(self) -> str:
        """Return all of it, as lines for people."""
        table = [("part", "what", "found", "expected"), *self.rows]
        widths = [max(len(row[column]) for row in table) for column in range(3)]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, [*widths, 0], strict=True)).rstrip() for row in table]
        lines += [f"note: {note}" for note in self.notes] + [f"problem: {problem}" for problem in self.problems]
        return "\n".join([*lines, "usable" if self.usable else "not usable"])


def check(name: str, root: str, limit: int | None = None) -> Report:
    """Look at the data set `name` in the folder `root`, reading `limit` images of each part (None: all).

    The images read are spread evenly. Deviations from the published counts, missing label files and large images are
    notes; what would stop a run is a problem. RecipeError for a name that is not in a folder of files.
    """
    if name not in CHECKABLE:
        raise RecipeError(
            f"data set {name!r} has no folder of files, so there is nothing to "
            f"check.{choices('Known', name, CHECKABLE)}"
        )
    known, report = CHECKABLE[name], Report()
    for split, expected in known.expected.items():
        try:
            part = known.open(root, split, list(known.tasks))
        except DataError as error:
            if str(error) not in report.problems:
                report.problems.append(str(error))
            continue
        total = len(part.names)
        report.rows.append((split, "images", f"{total:,}", f"{expected:,}"))
        if total != expected:
            report.notes.append(f"{split}: {total:,} images, the published set has {expected:,}")
        for task, has in part.annotated.items():
            if not has.any():
                report.problems.append(f"{split}: no image has a label of task {task!r}; leave it out of `tasks`")
            elif not has.all():
                first = part.names[int(np.flatnonzero(~has)[0])]
                report.notes.append(f"{split}: {int((~has).sum()):,} images have no label of {task!r}, first {first}")
        report.notes += [f"{split}: {note}" for note in part.notes]
        _read(report, known, split, part, limit)
    return report


def _read(report: Report, known: Checkable, split: str, part: FileSplit, limit: int | None) -> None:
    """Read images and labels of a part, and report sizes and ranges, or the images that cannot be used."""
    total = len(part.names)
    chosen = np.unique(np.linspace(0, total - 1, min(limit or total, total)).round().astype(int)).tolist()
    report.rows.append((split, "images read", f"{len(chosen):,}", ""))
    labels = {task: _LabelSummary(task) for task in known.tasks}
    sizes, failures = [], []
    for i in chosen:
        try:
            example = part.reader(i, known.tasks)
        except DataError as error:
            failures.append(str(error))
            continue
        image = example["image"]
        assert image is not None
        sizes.append(image.shape[:2])
        for task, summary in labels.items():
            if (label := example.get(task)) is not None:
                summary.add(label)
    report.problems += [f"{split}: {failure}" for failure in failures[:PROBLEMS]]
    if len(failures) > PROBLEMS:
        report.problems.append(f"{split}: {len(failures) - PROBLEMS} more images cannot be used")
    if not sizes:
        return
    smallest, largest = np.min(sizes, 0), np.max(sizes, 0)
    limits = "" if known.size is None else f"at most {known.size[0]} x {known.size[1]}"
    report.rows.append((split, "sizes", " to ".join(f"{h} x {w}" for h, w in (smallest, largest)), limits))
    if known.size is not None and (largest > known.size).any():
        report.notes.append(
            f"{split}: images of up to {largest[0]} x {largest[1]}; set `size` to multiples of 32 that hold them"
        )
    for task, summary in labels.items():
        annotated = f"{int(part.annotated[task].sum()):,} of {total:,} images"
        report.rows.append((split, task, f"{annotated}, {summary.text()}", ""))


class _LabelSummary:
    """The labels of one task, over the images that were read."""

    def __init__(self, task: str) -> None:
        self.task = task
        self.images = self.pixels = self.valid = 0
        self.counts = np.zeros(256, np.int64)
        self.range = (np.inf, -np.inf)

    def add(self, label: Array) -> None:
        valid = (
            (label != 0).any(-1) if self.task == "normals" else label > 0 if self.task == "depth" else label != IGNORE
        )
        self.images += 1
        self.pixels += valid.size
        self.valid += int(valid.sum())
        if self.task == "depth" and valid.any():
            metres = label[valid]
            self.range = (min(self.range[0], float(metres.min())), max(self.range[1], float(metres.max())))
        elif self.task not in ("depth", "normals"):
            self.counts += np.bincount(label[valid].astype(np.uint8), minlength=256)

    def text(self) -> str:
        if not self.images:
            return "none read"
        valid = f"{self.valid / self.pixels:.1%} of the pixels labelled"
        if self.task == "normals" or not self.valid:
            return valid
        if self.task == "depth":
            return f"{self.range[0]:.2f} to {self.range[1]:.2f} m, {valid}"
        if self.task in ("edge", "saliency"):
            return f"{self.counts[1] / self.valid:.1%} positive, {valid}"
        present = np.flatnonzero(self.counts)
        return f"{len(present)} classes, {present[0]} to {present[-1]}, {valid}"
