"""A relatedness study: its matrices as tables, as files and as a page (`fedloom study relatedness`). Free of torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from fedloom.core.errors import StateError, writing
from fedloom.study import charts
from fedloom.study.agreement import DISTANCES, Agreement, Array, agreement, symmetrised
from fedloom.study.charts import ONE_SIDED, Chart, plain, thinned
from fedloom.study.grid import write
from fedloom.study.output import HasTables, Records, Table, json_text, span
from fedloom.study.report import pages, words
from fedloom.study.report.collect import Facts
from fedloom.study.report.figures import SIDE, Figure, View
from fedloom.study.report.words import number

FILE, PICTURE = "relatedness.json", "relatedness.png"
ENDS = 5
"""Pairs of tasks at each end of a metric's order that its table shows."""
POINTS = 600
"""Pairs of tasks in the figures of one metric against another, at most."""
_FEW = 12  # tasks up to which two maps stand side by side, and a terminal shows whole matrices
_MEANS = {
    "sign": "Share of equal signs of two task vectors.",
    "cosine": "Cosine of two task vectors.",
    "logme": "LogME: evidence for a task's labels in features by another task's encoder.",
    "etran": "ETran: how familiar a task's examples are to another task's encoder, and how well it separates labels.",
    "fim": "Cosine of the diagonals of two tasks' Fisher information.",
    "wte": "WTE: distance of two tasks' examples and labels by optimal transport, in the initial encoder's features.",
}


class _Strict(BaseModel):
    """A part of the file. Fields that this version does not know are ignored."""

    model_config = ConfigDict(frozen=True, strict=True, allow_inf_nan=False)


class About(_Strict):
    """The facts about a study; absent parts are not shown."""

    name: str = ""
    method: str = ""
    data: str = ""
    seed: int | None = None
    clients: dict[str, int] = {}
    """Task -> clients that count for it."""
    examples: dict[str, int] = {}
    """Task -> examples that were looked at; empty where no metric looks at examples."""


class _Stored(_Strict):
    """The parts of relatedness.json that are read; the rest follows from the scores."""

    run: str
    tasks: list[str] = Field(min_length=2)
    scores: dict[str, list[list[float | None]]] = Field(min_length=1)
    notes: list[str] = []
    about: About = About()

    @model_validator(mode="after")
    def _shapes(self) -> _Stored:
        if len(set(self.tasks)) < len(self.tasks):
            raise ValueError("tasks: two have the same name")
        side = len(self.tasks)
        for name, M in self.scores.items():
            if len(M) != side or any(len(row) != side for row in M):
                shape = f"{len(M)} rows of {sorted({len(row) for row in M})}"
                raise ValueError(f"scores.{name}: expected {side} x {side} numbers, found {shape}")
        return self


@dataclass(frozen=True, eq=False)
class Relatedness(HasTables):
    """Matrices of one run. Rows and columns are `tasks`, in clustered order."""

    label: str
    tasks: tuple[str, ...]
    scores: Mapping[str, Array]
    """Metric -> T x T; of a directed metric R[s, t]: the encoder of s on the examples of t."""
    notes: tuple[str, ...] = ()
    about: About = About()
    folder: Path = Path()
    """The folder that it was read from."""

    @cached_property
    def agreement(self) -> Agreement:
        """The agreement of the metrics over the pairs of tasks."""
        return agreement(self.scores)

    @cached_property
    def symmetrised(self) -> dict[str, Array]:
        """Metric -> T x T, the mean of both directions."""
        return {name: symmetrised(R) for name, R in self.scores.items()}

    @property
    def distances(self) -> list[str]:
        """The metrics of which less is more related."""
        return [name for name in self.scores if name in DISTANCES]

    def is_directed(self, metric: str) -> bool:
        """Return whether the scores are not symmetric, apart from round-off."""
        R = self.scores[metric]
        return not np.allclose(R, R.T, rtol=1e-9, atol=0, equal_nan=True)

    @property
    def title(self) -> str:
        """Return the title of the page."""
        return f"{self.label}: how related its tasks are"

    @property
    def facts(self) -> Facts:
        """Return the facts about the study."""
        about = self.about
        facts = {
            "run": self.label,
            "method": about.method,
            "data": about.data,
            "seed": "" if about.seed is None else str(about.seed),
            "tasks": str(len(self.tasks)),
            "pairs of tasks": str(len(self.pairs)),
            "clients per task": span(about.clients.values()),
            "examples per task": span(about.examples.values()),
            "metrics": ", ".join(self.scores),
            "order of tasks": f"alike tasks stand together, by {next(iter(self.scores))}",
        }
        return tuple((name, text) for name, text in facts.items() if text)

    @cached_property
    def pairs(self) -> list[tuple[int, int]]:
        """Return every pair of tasks once, as places in `tasks`."""
        return list(combinations(range(len(self.tasks)), 2))

    @cached_property
    def values(self) -> dict[str, Array]:
        """Return metric -> the symmetrised score of each pair; nan where it is not defined."""
        above = np.triu_indices(len(self.tasks), 1)
        return {name: M[above] for name, M in self.symmetrised.items()}

    @cached_property
    def ranks(self) -> dict[str, list[int | None]]:
        """Return metric -> the rank of each pair, 1 for the most related; equal scores share the better rank."""
        from pandas import Series

        ranked = {name: Series(v).rank(method="min", ascending=name in DISTANCES) for name, v in self.values.items()}
        return {name: [None if math.isnan(rank) else int(rank) for rank in of] for name, of in ranked.items()}

    def ends(self, metric: str) -> list[int]:
        """Return the `ENDS` most and least related pairs by a metric, as places in `pairs`, in its order."""
        ranked = sorted((rank, at) for at, rank in enumerate(self.ranks[metric]) if rank is not None)
        shown = ranked if len(ranked) <= 2 * ENDS else ranked[:ENDS] + ranked[-ENDS:]
        return [at for _, at in shown]

    def tables(self) -> list[Table]:
        """Return the symmetrised matrices (of few tasks), and the metrics' correlations."""
        tables = []
        for name, M in self.symmetrised.items() if len(self.tasks) <= _FEW else ():
            title = f"{self.label}: {name}" + (", a distance" if name in DISTANCES else "")
            tables.append(_sheet(title, self.tasks, M))
        if len(self.scores) > 1:
            both = self.agreement
            for title, M in (("Pearson", both.pearson), ("Spearman", both.spearman)):
                title = f"{title}'s correlation of metrics over {len(self.pairs)} pairs of tasks"
                tables.append(_sheet(title, both.names, M))
        return tables

    def to_text(self) -> str:
        """Return tables for a terminal, and the notes."""
        lines = [sheet.to_text() for sheet in self.tables()]
        if len(self.tasks) > _FEW:
            lines.insert(0, f"{self.label}: {len(self.tasks)} tasks: {', '.join(self.tasks)}\n")
        if self.notes:
            lines.append("".join(f"note: {note}\n" for note in self.notes))
        return "\n".join(lines)

    def records(self) -> Records:
        """Return a line for each metric and ordered pair of tasks: the score, and the symmetrised one."""
        rows = [
            (name, s, t, float(R[i, j]), float(self.symmetrised[name][i, j]))
            for name, R in self.scores.items()
            for i, s in enumerate(self.tasks)
            for j, t in enumerate(self.tasks)
        ]
        return Records(("metric", "encoder", "task", "score", "symmetrised"), rows)

    def to_json(self) -> str:
        """Return everything as JSON; null where a score is not defined."""
        value = {
            "run": self.label,
            "about": self.about.model_dump(),
            "tasks": self.tasks,
            "distances": self.distances,
            "scores": {name: R.tolist() for name, R in self.scores.items()},
            "symmetrised": {name: M.tolist() for name, M in self.symmetrised.items()},
            "agreement": self.correlations(),
            "notes": self.notes,
        }
        return json_text(value)

    def correlations(self) -> dict[str, Any]:
        """Return the agreement as plain values."""
        of = self.agreement
        numbers = {name: getattr(of, name).tolist() for name in ("pearson", "spearman", "pairs")}
        return {"metrics": of.names, **numbers}

    def write(self, folder: Path) -> list[Path]:
        """Write METRIC.csv (T x T, as scored) of each metric, agreement.csv, relatedness.png with heat maps of all.

        Also relatedness.json, which is `to_json` and what `fedloom report` reads.
        """
        from pandas import DataFrame

        both = self.agreement
        files = {f"{name}.csv": DataFrame(R, self.tasks, self.tasks).to_csv() for name, R in self.scores.items()}
        rows = [
            (a, b, float(both.pearson[i, j]), float(both.spearman[i, j]), int(both.pairs[i, j]))
            for i, b in enumerate(both.names)
            for j, a in enumerate(both.names[:i])
        ]
        files["agreement.csv"] = Records(("a", "b", "pearson", "spearman", "pairs"), rows).to_csv()
        files[FILE] = self.to_json()
        with writing(folder):
            write(folder, files)
        charts.save(picture(self), folder / PICTURE)
        return [folder / name for name in (*files, PICTURE)]


def _sheet(title: str, names: Sequence[str], M: Array) -> Table:
    lines = [(name, *("" if math.isnan(v) else f"{v:.3f}" for v in row)) for name, row in zip(names, M, strict=True)]
    return Table(title, ("", *names), tuple(lines))


def collect(folder: Path) -> Relatedness:
    """Read relatedness.json in this folder. Raises StateError, which names the file, where it is damaged."""
    file = folder / FILE
    try:
        stored = _Stored.model_validate_json(file.read_bytes())
    except OSError as error:
        raise StateError(f"{file}: {error.strerror}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise StateError(f"{file}: " + (f"{where}: " if where else "") + first["msg"]) from None
    scores = {name: np.array(M, dtype=np.float64) for name, M in stored.scores.items()}
    return Relatedness(stored.run, tuple(stored.tasks), scores, tuple(stored.notes), stored.about, folder)


def render(study: Relatedness) -> str:
    """Return the HTML of a relatedness study. Raises UserError where Jinja2 or vl-convert is absent."""
    figures = figures_of(study)
    more = len(study.pairs) > 2 * ENDS
    return pages.render(
        "relatedness",
        study.title,
        _data(study),
        figures,
        report=study,
        lead=" · ".join(
            words.count(number, what)
            for number, what in ((len(study.tasks), "task"), (len(study.pairs), "pair"), (len(study.scores), "metric"))
        ),
        sentence=_sentence(study),
        means=_MEANS,
        side=SIDE,
        fit=len(study.tasks) <= _FEW,
        metrics=_metrics(study),
        directed=any(map(study.is_directed, study.scores)),
        ends=[(metric, _ends(study, i, metric)) for i, metric in enumerate(study.scores)],
        which=f"The first {ENDS} and the last {ENDS} of {len(study.pairs)} pairs" if more else "All pairs",
    )


def _sentence(study: Relatedness) -> str:
    """Say which pairs are at the two ends of the metrics' orders."""
    ends = [study.ends(metric) for metric in study.scores]
    most, least = ([study.pairs[order[at]] for order in ends if order] for at in (0, -1))
    return words.alike(*([tuple(study.tasks[i] for i in pair) for pair in side] for side in (most, least)))


def figures_of(study: Relatedness) -> dict[str, Figure]:
    """Return name -> figure: 'heat-0' ... of the metrics, 'agreement' and 'pairs' where there are several."""
    figures = {f"heat-{i}": _heat_map(study, metric) for i, metric in enumerate(study.scores)}
    if np.isfinite(study.agreement.pearson[np.tril_indices(len(study.scores), -1)]).any():
        figures["agreement"] = _correlations(study.agreement)
    if len(study.scores) > 1 and len(study.pairs) > 1:
        figures["pairs"] = _against(study)
    return figures


def picture(study: Relatedness) -> Chart:
    """Draw the maps of all metrics and of their agreement on one sheet."""
    figures = figures_of(study)
    shown = [view for name, figure in figures.items() if name != "pairs" for view in figure.views]
    return charts.concat([view.chart for view in shown if not view.name.startswith("as scored")])


def _heat_map(study: Relatedness, metric: str) -> Figure:
    """Draw the symmetrised matrix, and as scored where that is another; a stronger colour is more related."""
    ways = {"symmetrised": study.symmetrised[metric]}
    if study.is_directed(metric):
        ways["as scored: encoder of the row, examples of the column"] = study.scores[metric]
    places = thinned(range(len(study.tasks)), SIDE)
    names = [study.tasks[i] for i in places]
    title = f"{metric} (distance)" if metric in study.distances else metric
    colors = ONE_SIDED[::-1] if metric in study.distances else ONE_SIDED
    views = []
    for name, M in ways.items():
        cells = {study.tasks[i]: {study.tasks[j]: float(M[i, j]) for j in places} for i in places}
        # the diagonal says nothing and may be far from the rest, so it does not set the colours
        rest = [v for i in places for j in places if i != j and math.isfinite(v := float(M[i, j]))] or [0.5]
        chart = charts.heat(cells, names, value=title, low=min(rest), high=max(rest), numbers=".2g", colors=colors)
        views.append(View(name, chart))
    return Figure(metric, views)


def _correlations(agreement: Agreement) -> Figure:
    """Draw the agreement of the metrics: blue is with, orange is against, as in all maps of agreement."""
    over = span(agreement.pairs[np.tril_indices(len(agreement.names), -1)].tolist())
    views = []
    both = {"Pearson's correlation": agreement.pearson, "Spearman's correlation, of ranks": agreement.spearman}
    for name, M in both.items():
        cells = {
            a: dict(zip(agreement.names, row, strict=True)) for a, row in zip(agreement.names, M.tolist(), strict=True)
        }
        value = f"{name}, over {over} pairs"
        chart = charts.heat(cells, agreement.names, value=value, low=-1, high=1, middle=0.0, numbers=".2f")
        views.append(View(name, chart))
    return Figure("Agreement of metrics", views)


def _against(study: Relatedness) -> Figure:
    """Draw one metric against another, one point per pair of tasks; of many pairs some, evenly spaced."""
    agreement = study.agreement
    kept = thinned(range(len(study.pairs)), POINTS)
    names = [", ".join(study.tasks[i] for i in study.pairs[at]) for at in kept]
    axes = [metric + (" (a distance)" if metric in study.distances else "") for metric in study.scores]
    values = [[plain(float(study.values[metric][at])) for at in kept] for metric in study.scores]
    views = []
    for i, j in combinations(range(len(axes)), 2):
        r, rho = (M[i, j] for M in (agreement.pearson, agreement.spearman))
        known = "" if math.isnan(r + rho) else f"; r {r:.2f}, ρ {rho:.2f}"  # noqa: RUF001
        points = [{"name": n, "x": x, "y": y} for n, x, y in zip(names, values[i], values[j], strict=True)]
        chart = charts.scatter(points, axes[i] + known, axes[j], spoken=".3~g")
        views.append(View(f"{axes[j]} against {axes[i]}", chart))
    return Figure("One metric against another", views)


def _metrics(study: Relatedness) -> Table | None:
    rows = []
    for name, v in study.values.items():
        known = v[np.isfinite(v)]
        spread = [number(float(f(known))) if len(known) else "" for f in (np.min, np.median, np.max)]
        kind = "distance" if name in study.distances else "similarity"
        rows.append((name, kind, "yes" if study.is_directed(name) else "no", *spread, str(len(known))))
    head = ("metric", "is a", "directed", "least", "median", "largest", "pairs")
    return pages.table("metrics-table", head, rows, 1, 2)


def _ends(study: Relatedness, place: int, metric: str) -> Table | None:
    rows = []
    others = [m for m in study.scores if m != metric]
    for at in study.ends(metric):
        a, b = (study.tasks[place] for place in study.pairs[at])
        places = [study.ranks[m][at] for m in (metric, *others)]
        ranks = ["–" if rank is None else str(rank) for rank in places]  # noqa: RUF001
        rows.append((ranks[0], a, b, number(float(study.values[metric][at])), *ranks[1:]))
    head = ("rank", "task", "task", metric, *(f"by {m}" for m in others))
    return pages.table(f"ends-{place}", head, rows, 1, 2)


def _data(study: Relatedness) -> dict[str, Any]:
    """Return the numbers of the page's tables, for programs."""
    ends: dict[str, list[dict[str, Any]]] = {metric: [] for metric in study.scores}
    for metric, rows in ends.items():
        for at in study.ends(metric):
            score, ranks = float(study.values[metric][at]), {m: ranks[at] for m, ranks in study.ranks.items()}
            rows.append({"tasks": [study.tasks[i] for i in study.pairs[at]], "score": score, "ranks": ranks})
    return {"about": dict(study.facts), "distances": study.distances, "agreement": study.correlations(), "ends": ends}
