"""Every seed of every method of a grid as one line per task: the evidence behind verdicts, as CSV. Free of torch."""

from __future__ import annotations

import csv
import io
import math
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from statistics import fmean

from fedloom.core.errors import StateError
from fedloom.study.grid import Grid
from fedloom.study.tables.output import HasTable, Records, Table
from fedloom.study.tables.results import STILL, Values, columns_of, falling, losses, read


@dataclass(frozen=True)
class SeedLine:
    """The number of one task, or domain, of one run."""

    data: str
    method: str
    seed: int
    task: str
    metric: str
    value: float
    direction: str
    """'max' where larger is better, else 'min'."""
    training_loss: float
    """The training loss of the task in the last round; nan where it is unknown."""
    falling: float
    """Percent by which it still falls per tenth of the rounds; nan where that is unknown."""
    ratio: float
    """Where the seeds redraw the test part from one pool, the ratio of `against_zero`; else 0."""


@dataclass(frozen=True)
class Seeds(HasTable):
    """All lines of a grid; `title` heads the table."""

    title: str
    lines: tuple[SeedLine, ...]

    def as_table(self) -> Table:
        """Return the first six columns as text."""
        shown = [astuple(line)[:6] for line in self.lines]
        return Table(self.title, HEAD[:6], tuple((*map(str, line[:-1]), f"{line[-1]:.4f}") for line in shown))

    def records(self) -> Records:
        """Return all columns in full precision."""
        return Records(HEAD, [astuple(line) for line in self.lines])

    def values(self, data: str, method: str) -> Values:
        """Return seed -> task -> number; empty where the method has no run."""
        return self._by_seed(data, method, "value")

    def falling(self, data: str, method: str) -> Values:
        """Return seed -> task -> the fall of the training loss."""
        return self._by_seed(data, method, "falling")

    def is_moving(self, data: str, method: str) -> bool:
        """Return whether the training loss still falls, so that no verdict on the method is possible."""
        known = [line.falling for line in self._of(data, method) if not math.isnan(line.falling)]
        return bool(known) and fmean(known) > STILL

    def directions(self, data: str) -> dict[str, str]:
        """Return task -> direction."""
        return {line.task: line.direction for line in self.lines if line.data == data}

    def methods(self, data: str) -> list[str]:
        """Return the methods of a data set, in their order."""
        return list(dict.fromkeys(line.method for line in self.lines if line.data == data))

    def ratio(self, data: str) -> float:
        """Return the ratio of a data set's lines."""
        return max((line.ratio for line in self.lines if line.data == data), default=0.0)

    def _by_seed(self, data: str, method: str, column: str) -> Values:
        found: dict[int, dict[str, float]] = {}
        for line in self._of(data, method):
            found.setdefault(line.seed, {})[line.task] = getattr(line, column)
        return found

    def _of(self, data: str, method: str) -> list[SeedLine]:
        return [line for line in self.lines if (line.data, line.method) == (data, method)]


HEAD = tuple(field.name for field in fields(SeedLine))


def of_seeds(grid: Grid, folder: Path, split: str = "test") -> Seeds:
    """Return the number of every task of every finished run. Raises StateError where no run has finished."""
    sides, _ = read(grid, folder, split)
    lines = []
    for seed in grid.seeds:
        for (data, *_), side in sides.items():
            columns = {c.task: c for c in columns_of(grid, data, sides) if c.task}
            if seed not in side.values:
                continue
            by_task = losses(side.runs[seed])
            for task, value in side.values[seed].items():
                if task not in columns:
                    continue
                # a domain is a part of the run's only task
                by_round = next(iter(by_task.values()), []) if side.by_domain else by_task.get(task, [])
                last = by_round[-1] if by_round else math.nan
                c, fall = columns[task], falling(by_round)
                lines.append(
                    SeedLine(data, side.label, seed, task, c.metric, value, c.direction, last, fall, side.ratio)
                )
    return Seeds(f"{grid.title or grid.name}: every seed", tuple(lines))


def read_seeds(file: Path) -> Seeds:
    """Return the lines of a CSV file that `of_seeds` made. Raises StateError where it is none."""
    rows = csv.DictReader(io.StringIO(file.read_text("utf-8")))
    if absent := [name for name in HEAD if name not in (rows.fieldnames or ())]:
        raise StateError(
            f"{file}: the column {absent[0]} is absent; make the file with `fedloom compare GRID --seeds --format csv`"
        )
    lines = []
    for number, row in enumerate(rows, 2):
        try:
            value, *more = (float(row[key] or math.nan) for key in ("value", *HEAD[-3:]))
            names = row["data"], row["method"], int(row["seed"]), row["task"], row["metric"]
            lines.append(SeedLine(*names, value, row["direction"], *more))
        except (TypeError, ValueError) as error:
            raise StateError(f"{file}, line {number}: {error}") from None
    return Seeds(file.stem, tuple(lines))
