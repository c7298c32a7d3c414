"""Runs side by side: one row per task, one column per method, an interval over seeds, the change against a base."""

from __future__ import annotations

import io
import math
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import pairwise
from pathlib import Path
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any, TypeVar

from fedloom.core.errors import StateError, choices
from fedloom.core.extras import need
from fedloom.core.settings.names import differs
from fedloom.federation.runs.reader import IN_VAIN, Final, Run, TaskMetric, human_bytes
from fedloom.study.delta import delta_m, without_base
from fedloom.study.keys import QUIET
from fedloom.study.references import at_trivial, note
from fedloom.study.student import bound
from fedloom.study.tables.labels import labels_of
from fedloom.study.tables.markup import Cell, Recorded, Records, fragment, html, latex, span, tex

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.table import Table

CSV = (
    *("run", "task", "metric", "direction", "mean", "ci95_half", "seeds"),
    *("split", "model", "bytes_up", "bytes_down"),
)


Name = TypeVar("Name", bound=Hashable)
ACROSS, LETTERS = 7, 120
"""Runs that stand side by side at most, and letters across; more stand below each other."""
_RULE = 3  # letters between two columns of a terminal
CUT = "of fractions cut off at 0 and 1"
FRACTIONS = frozenset(
    {"accuracy", "macro_f1", "auc", "miou", "pixel_accuracy", "maxf", "max_iou", "odsf", "edge_f_plain"}
    | {"within_11_25", "within_22_5", "within_30", "delta1", "delta2", "delta3"}
)
"""Metrics that are fractions: their intervals end at 0 and 1."""


@dataclass(frozen=True)
class Estimate:
    """A mean over `n` seeds; `half` is half the 95 % t-interval, nan for one seed, or if one is not finite."""

    mean: float
    half: float
    n: int

    @staticmethod
    def of(values: Sequence[float]) -> Estimate:
        n = len(values)
        if n < 2 or not all(map(math.isfinite, values)):
            return Estimate(sum(values) / n, math.nan, n)
        return Estimate(mean(values), bound(0.05, n - 1) * stdev(values) / math.sqrt(n), n)

    def __str__(self) -> str:
        digits = 2 if abs(self.mean) >= 10 else 4
        return f"{self.mean:.{digits}f}" + ("" if math.isnan(self.half) else f" ± {self.half:.{digits}f}")

    def ends(self, metric: str) -> tuple[float, float]:
        """The interval's ends, of a fraction cut off at 0 and 1; nan where there is no interval."""
        low, high = self.mean - self.half, self.mean + self.half
        if metric not in FRACTIONS or not 0 <= self.mean <= 1 or math.isnan(self.half):
            return low, high
        return max(0.0, low), min(1.0, high)

    def of_metric(self, metric: str) -> str:
        """As text; of a fraction whose interval would leave 0 to 1, with the ends of what is left of the interval."""
        low, high = self.ends(metric)
        if math.isnan(self.half) or (low, high) == (self.mean - self.half, self.mean + self.half):
            return str(self)
        return f"{self.mean:.4f} ({low:.4f} to {high:.4f})"

    @property
    def signed(self) -> str:
        """As a change in percent: '+10.59 ± 1.20'; 'nan' where there is none."""
        if math.isnan(self.mean):
            return "nan"
        return f"{self.mean:+.2f}" + ("" if math.isnan(self.half) else f" ± {self.half:.2f}")


def clear_best(found: Mapping[Name, Estimate], direction: str) -> set[Name]:
    """Who is best, where that stands clear: no interval of a worse one meets the interval of the best.

    Equal numbers share the place. A number without an interval, as of one seed, counts as it is. Empty where there is
    nothing to choose from, or where nothing stands clear.
    """
    known = {name: of for name, of in found.items() if not math.isnan(of.mean)}
    if len(found) < 2 or not known:
        return set()
    top = (max if direction == "max" else min)(of.mean for of in known.values())
    best = {name for name, of in known.items() if of.mean == top}
    reach = max(_reach(known[name]) for name in best)
    is_clear = all(abs(of.mean - top) > reach + _reach(of) for name, of in known.items() if name not in best)
    return best if is_clear else set()


def _reach(of: Estimate) -> float:
    return 0.0 if math.isnan(of.half) else of.half


Line = tuple[str, list[str], list[bool]]
"""A name, a text for each column, and whether each is the best."""


@dataclass(frozen=True)
class RunSet:
    """Runs that differ only in the seed, in the order of their seeds."""

    label: str
    runs: tuple[Run, ...]
    finals: tuple[Final, ...]
    cells: Mapping[TaskMetric, Estimate]
    delta: Estimate | None = None
    pairing: str = ""
    """How the seeds were matched with the base's."""

    @property
    def model(self) -> str:
        return " / ".join(dict.fromkeys(f.model for f in self.finals))

    def total(self, way: str) -> float:
        """Bytes 'up' or 'down' of a run, mean over seeds."""
        return mean(run.bytes_total()[way] for run in self.runs)


@dataclass(frozen=True)
class Comparison(Recorded):
    """What `compare` found. `notes` say what to know before the numbers are believed."""

    columns: tuple[RunSet, ...]
    rows: tuple[TaskMetric, ...]
    split: str
    base: str | None = None
    notes: tuple[str, ...] = ()
    untold: tuple[str, ...] = ()
    """The tasks on which no method is better than the trivial answer, so that Delta_m leaves them out."""

    @property
    def caption(self) -> str:
        """Which split, whose data, which model, and what is averaged."""
        data = sorted({d for c in self.columns for f in c.finals for d in f.data})
        seeds = f"; ± 95 % t-interval over seeds, {CUT}" if any(len(c.runs) > 1 for c in self.columns) else ""
        return (
            f"{self.split} split ({', '.join(data) or 'data not stated'}), mean over the clients with the task{seeds}"
        )

    def best(self, row: TaskMetric) -> set[str]:
        """Labels of the best columns of a row, see `clear_best`."""
        return clear_best({c.label: c.cells[row] for c in self.columns}, row.direction)

    def table(self, width: int = LETTERS) -> Table:
        """A rich table, laid out for a terminal of so many letters; the best of each row in bold."""
        from rich.table import Table
        from rich.text import Text

        # Text, for labels hold brackets, which are rich's markup.
        table = Table(caption=Text("\n".join([self.caption, *self.notes])), caption_justify="left")
        table.add_column("", overflow="fold")
        heads, lines = self._laid(width)
        for head in heads:
            table.add_column(Text(head), justify="right", overflow="fold")
        for name, cells, best in lines:
            table.add_row(Text(name), *(Text(c, "bold" if b else "") for c, b in zip(cells, best, strict=True)))
        return table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.table(options.max_width)

    def to_text(self) -> str:
        """The table as plain text."""
        from rich.console import Console

        console = Console(file=io.StringIO(), width=10_000, highlight=False)
        console.print(self.table())
        return "".join(f"{line.rstrip()}\n" for line in console.file.getvalue().splitlines())  # type: ignore[attr-defined]

    def to_markdown(self) -> str:
        """A Markdown table with the caption and the notes below it."""
        heads, laid = self._laid()
        lines = ["| | " + " | ".join(heads) + " |", "|---|" + "---:|" * len(heads)]
        for name, cells, best in laid:
            texts = (f"**{c}**" if b else c for c, b in zip(cells, best, strict=True))
            lines.append(f"| {name} | " + " | ".join(texts) + " |")
        return "\n".join([*lines, "", self.caption + ".", *(f"\n{note}" for note in self.notes)]) + "\n"

    def records(self) -> Records:
        """One line per run set and task, and one with the metric `delta_m`; numbers in full precision."""
        found: list[list[Cell]] = []
        for c in self.columns:
            lines = [(r.task, r.metric, r.direction, c.cells[r]) for r in self.rows]
            if c.delta is not None:
                lines.append(("", "delta_m", "max", c.delta))
            tail = (tuple(r.seed for r in c.runs), self.split, c.model, c.total("up"), c.total("down"))
            for task, metric, direction, e in lines:
                found.append([c.label, task, metric, direction, e.mean, e.half, *tail])
        return Records(CSV, found)

    def to_html(self) -> str:
        """A page of its own, with the best of each row in bold."""
        heads, lines = self._laid()
        head = "".join(f'<th scope="col">{escape(each)}</th>' for each in heads)
        body = []
        for name, cells, best in lines:
            texts = (f"<b>{escape(c)}</b>" if b else escape(c) for c, b in zip(cells, best, strict=True))
            row = "".join(f"<td>{text}</td>" for text in texts)
            body.append(f'<tr><th scope="row" class="label">{escape(name)}</th>{row}</tr>')
        about = (f"{self.caption}.", *self.notes)
        return html("Runs side by side", fragment("Runs side by side", [f"<tr><td></td>{head}</tr>"], body, about))

    def to_pandas(self) -> Any:
        """A pandas.DataFrame: method, as the table calls its columns, then the columns of `Result.to_pandas`."""
        rows = [{"method": c.label, **row} for c in self.columns for run in c.runs for row in run.rows()]
        return need("pandas", "notebook").DataFrame(rows)

    def to_latex(self) -> str:
        """A table environment with the best of each row in bold; needs the package booktabs."""
        heads, lines = self._laid()
        rows = ["".join(f" & {tex(head)}" for head in heads) + r" \\", r"\midrule"]
        for name, cells, best in lines:
            texts = (rf" & \textbf{{{tex(c)}}}" if b else f" & {tex(c)}" for c, b in zip(cells, best, strict=True))
            rows.append(tex(name) + "".join(texts) + r" \\")
        return latex((f"{self.caption}.", *self.notes), len(heads) + 1, rows)

    def _laid(self, width: int = LETTERS) -> tuple[list[str], list[Line]]:
        """(headings, lines): a column a run, or a line a run where columns would be too many or too wide."""
        labels, grid = [c.label for c in self.columns], self._grid()
        turned = (
            [name for name, *_ in grid],
            [
                (label, [cells[at] for _, cells, _ in grid], [best[at] for _, _, best in grid])
                for at, label in enumerate(labels)
            ],
        )
        fits = _width(labels, grid) <= max(width, _width(*turned))
        return (labels, grid) if fits and len(labels) <= ACROSS else turned

    def _grid(self) -> list[Line]:
        """A line for each row."""
        plain = [False] * len(self.columns)
        grid: list[Line] = []
        for row in self.rows:
            name, best = f"{row}{' †' if row.task in self.untold else ''}", self.best(row)
            grid.append(
                (
                    name,
                    [c.cells[row].of_metric(row.metric) for c in self.columns],
                    [c.label in best for c in self.columns],
                )
            )
        if self.base is not None:
            deltas = ["base" if c.delta is None else c.delta.signed for c in self.columns]
            grid.append((f"Δm % against {self.base}", deltas, plain))
        for name, texts in {
            "model": [c.model for c in self.columns],
            "seeds": [_seeds(c.runs) for c in self.columns],
            "round of the model": [span(f.round for f in c.finals) for c in self.columns],
            "rounds run": [span(r.last_round for r in c.runs) for c in self.columns],
            "sent by clients": [human_bytes(c.total("up")) for c in self.columns],
            "sent to clients": [human_bytes(c.total("down")) for c in self.columns],
        }.items():
            grid.append((name, texts, plain))
        return grid


def compare(
    runs: Sequence[Run | str | Path], base: str | Path | None = None, split: str = "test", metric: str | None = None
) -> Comparison:
    """Compare runs task by task; runs that differ only in the seed become one column.

    `base` is a label as the table shows it, or the folder of one of the runs; without it the first run is the base.
    Delta_m is computed per seed, against the base run of the same seed where there is one and against the mean over
    the base's seeds elsewhere.
    `metric` names the metric to judge by; without it each task is judged by its primary one.
    """
    read = [run if isinstance(run, Run) else Run.read(run) for run in runs]
    if not read:
        raise StateError("no runs to compare")
    groups: dict[str, list[Run]] = defaultdict(list)
    for run in read:
        groups[run.group].append(run)
    ordered = [sorted(group, key=lambda run: run.seed) for group in groups.values()]
    for group in ordered:
        for one, two in pairwise(group):
            if one.seed == two.seed:
                raise StateError(
                    f"{one.folder} and {two.folder} are the same recipe and seed: compare only one of them"
                )
    notes = _comparable(ordered)
    rows = read[0].judged_by(metric).judged
    columns = [_column(label, group, rows, split) for label, group in zip(labels_of(ordered), ordered, strict=True)]
    notes += _finals_notes(columns)
    if len(columns) == 1 and base is None:
        return Comparison(tuple(columns), rows, split, notes=tuple(notes))
    reference = columns[0] if base is None else _find(columns, base)
    found = [(c.runs[0].info["method"], {r.task: c.cells[r].mean for r in rows}) for c in columns]
    untold = at_trivial(found, {row.task: row.direction for row in rows})
    notes += [note(untold)] if untold else []
    told = tuple(row for row in rows if row.task not in untold)
    columns = [c if c is reference else _with_delta(c, reference, told, notes) for c in columns]
    pairings = sorted({c.pairing for c in columns if c.pairing})
    for pairing in pairings:
        of = f" of {', '.join(c.label for c in columns if c.pairing == pairing)}" if len(pairings) > 1 else ""
        notes.append(f"Δm{of}: {pairing}.")
    return Comparison(tuple(columns), rows, split, reference.label, tuple(notes), tuple(untold))


def _column(label: str, runs: Sequence[Run], rows: Sequence[TaskMetric], split: str) -> RunSet:
    finals = tuple(run.final(split) for run in runs)
    cells = {row: Estimate.of([_value(final, row) for final in finals]) for row in rows}
    return RunSet(label, tuple(runs), finals, cells)


def _value(final: Final, row: TaskMetric) -> float:
    return final.values.get(row.task, {}).get(row.metric, math.nan)


def _with_delta(column: RunSet, base: RunSet, rows: Sequence[TaskMetric], notes: list[str]) -> RunSet:
    """The column with Delta_m per seed; tasks that had to be left out go to the notes."""
    directions = {row.task: row.direction for row in rows}
    by_seed = {run.seed: final for run, final in zip(base.runs, base.finals, strict=True)}
    average = {row.task: base.cells[row].mean for row in rows}
    deltas, paired, left_out = [], 0, set()
    for run, final in zip(column.runs, column.finals, strict=True):
        same = by_seed.get(run.seed)
        paired += same is not None
        against = average if same is None else {row.task: _value(same, row) for row in rows}
        values = {row.task: _value(final, row) for row in rows}
        left_out |= {*without_base(values, against)}
        deltas.append(delta_m(values, against, directions))
    if paired == len(deltas):
        pairing = "each seed against the base's same seed"
    else:
        pairing = f"{paired} of {len(deltas)} seeds against the base's same seed, the others against its mean"
    if left_out:
        notes.append(
            f"Δm of {column.label} leaves out {', '.join(sorted(left_out))}: the base is 0 or undefined there."
        )
    return replace(column, delta=Estimate.of(deltas), pairing=pairing)


def _find(columns: Sequence[RunSet], base: str | Path) -> RunSet:
    for column in columns:
        if column.label == str(base) or any(run.folder.resolve() == Path(base).resolve() for run in column.runs):
            return column
    labels = [column.label for column in columns]
    raise StateError(f"no run called {str(base)!r}.{choices('Here are', str(base), labels)}")


def _comparable(groups: Sequence[Sequence[Run]]) -> list[str]:
    """Refuse runs with other tasks; note what else makes numbers hard to compare."""
    runs = [run for group in groups for run in group]
    first, notes = runs[0], []
    kinds = {task: (t["kind"], t["primary"]) for task, t in first.info["tasks"].items()}
    for run in runs[1:]:
        other = {task: (t["kind"], t["primary"]) for task, t in run.info["tasks"].items()}
        if other != kinds:
            raise StateError(
                f"not comparable, for the tasks differ: {first.folder} has {', '.join(kinds)}; "
                f"{run.folder} has {', '.join(other)}"
            )
    examples: dict[int, dict[tuple[str | None, str | None], Run]] = defaultdict(dict)
    for run in runs:
        examples[run.seed].setdefault((run.info.get("partition_hash"), run.info.get("data_hash")), run)
    for seed, by_hash in sorted(examples.items()):
        if len(by_hash) > 1:
            names = ", ".join(run.folder.name for run in by_hash.values())
            notes.append(f"Not the same clients or examples at seed {seed}: {names}.")
    other_keys = {key for run in runs for key in differs("", first.recipe, run.recipe)} - QUIET
    if keys := sorted(key for key in other_keys if not key.startswith("method.")):
        notes.append(f"Beside the method, the runs differ in {', '.join(keys)}.")
    seeds = {tuple(run.seed for run in group) for group in groups}
    if len(seeds) > 1:
        notes.append("The runs do not cover the same seeds.")
    notes += [f"Not finished: {run.folder.name}, round {run.last_round}." for run in runs if not run.is_finished]
    ends = {run.folder.name: run.info["status"] for run in runs}
    notes += [f"{name} {status}: {IN_VAIN[status]}." for name, status in ends.items() if status in IN_VAIN]
    return notes


def _finals_notes(columns: Sequence[RunSet]) -> list[str]:
    """Notes on numbers that are of different kinds of models or of data."""
    notes = []
    if len({final.model for c in columns for final in c.finals}) > 1:
        notes.append("Not the same kind of model in all columns: see 'model'.")
    if len({final.data for c in columns for final in c.finals}) > 1:
        notes.append("Not the same kind of data in all columns.")
    return notes


def _width(heads: Sequence[str], lines: Sequence[Line]) -> int:
    """Letters that a table takes where no text is broken."""
    texts = [("", *heads), *((name, *cells) for name, cells, _ in lines)]
    return sum(_RULE + max(map(len, column)) for column in zip(*texts, strict=True))


def _seeds(runs: Sequence[Run]) -> str:
    return ", ".join(str(run.seed) for run in runs)
