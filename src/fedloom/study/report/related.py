"""The page of a relatedness study, from the file of `fedloom study relatedness RUN --out DIR`. Free of torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from fedloom.core.errors import StateError
from fedloom.study import charts
from fedloom.study.charts import ONE_SIDED, Chart, plain, thinned
from fedloom.study.report import page, words
from fedloom.study.report.collect import Facts
from fedloom.study.report.figures import SIDE, Figure, View
from fedloom.study.report.words import number
from fedloom.study.tables.output import Table, span

FILE = "relatedness.json"
ENDS = 5
"""Pairs of tasks at each end of a metric's order that its table shows."""
POINTS = 600
"""Pairs of tasks in the figures of one metric against another, at most."""
_WRITTEN = 12  # tasks up to which two maps stand side by side
_MEANS = {
    "sign": "Share of equal signs of two task vectors.",
    "cosine": "Cosine of two task vectors.",
    "logme": "LogME: evidence for a task's labels in features by another task's encoder.",
    "etran": "ETran: how familiar a task's examples are to another task's encoder, and how well it separates labels.",
    "fim": "Cosine of the diagonals of two tasks' Fisher information.",
    "wte": "WTE: distance of two tasks' examples and labels by optimal transport, in the initial encoder's features.",
}

Matrix = np.ndarray[Any, np.dtype[Any]]
Numbers = list[list[float | None]]
"""Rows of numbers; None where one is not defined."""


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


class Correlations(_Strict):
    """The agreement of the metrics, K x K each."""

    metrics: list[str]
    pearson: Numbers
    spearman: Numbers
    pairs: list[list[int]]


class Study(_Strict):
    """The contents of relatedness.json. Rows and columns are `tasks`, T x T; scores are R[s, t] as computed."""

    run: str
    tasks: list[str] = Field(min_length=2)
    scores: dict[str, Numbers] = Field(min_length=1)
    symmetrised: dict[str, Numbers]
    agreement: Correlations
    distances: list[str] = []
    notes: list[str] = []
    about: About = About()

    @model_validator(mode="after")
    def _shapes(self) -> Study:
        if len(set(self.tasks)) < len(self.tasks):
            raise ValueError("tasks: two have the same name")
        metrics, T = list(self.scores), len(self.tasks)
        if list(self.symmetrised) != metrics or self.agreement.metrics != metrics:
            raise ValueError(f"symmetrised and agreement: expected the metrics of scores, {', '.join(metrics)}")
        both = self.agreement
        squares: list[tuple[str, Sequence[Sequence[object]], int]] = [
            *((f"scores.{name}", M, T) for name, M in self.scores.items()),
            *((f"symmetrised.{name}", M, T) for name, M in self.symmetrised.items()),
            ("agreement.pearson", both.pearson, len(metrics)),
            ("agreement.spearman", both.spearman, len(metrics)),
            ("agreement.pairs", both.pairs, len(metrics)),
        ]
        for where, M, side in squares:
            if len(M) != side or any(len(row) != side for row in M):
                shape = f"{len(M)} rows of {sorted({len(row) for row in M})}"
                raise ValueError(f"{where}: expected {side} x {side} numbers, found {shape}")
        return self


@dataclass(frozen=True)
class RelatedReport:
    """The contents of the page of a relatedness study."""

    folder: Path
    study: Study

    @property
    def title(self) -> str:
        """Return the title of the page."""
        return f"{self.study.run}: how related its tasks are"

    @property
    def facts(self) -> Facts:
        """Return the facts about the study."""
        s, about = self.study, self.study.about
        facts = {
            "run": s.run,
            "method": about.method,
            "data": about.data,
            "seed": "" if about.seed is None else str(about.seed),
            "tasks": str(len(s.tasks)),
            "pairs of tasks": str(len(self.pairs)),
            "clients per task": span(about.clients.values()),
            "examples per task": span(about.examples.values()),
            "metrics": ", ".join(s.scores),
            "order of tasks": f"alike tasks stand together, by {next(iter(s.scores))}",
        }
        return tuple((name, text) for name, text in facts.items() if text)

    @cached_property
    def pairs(self) -> list[tuple[int, int]]:
        """Return every pair of tasks once, as places in `tasks`."""
        return list(combinations(range(len(self.study.tasks)), 2))

    @cached_property
    def values(self) -> dict[str, Matrix]:
        """Return metric -> the symmetrised score of each pair; nan where it is not defined."""
        above = np.triu_indices(len(self.study.tasks), 1)
        return {name: np.array(M, dtype=np.float64)[above] for name, M in self.study.symmetrised.items()}

    @cached_property
    def ranks(self) -> dict[str, list[int | None]]:
        """Return metric -> the rank of each pair, 1 for the most related; equal scores share the better rank."""
        ranks: dict[str, list[int | None]] = {}
        for name, v in self.values.items():
            near = -v if name in self.study.distances else v
            known = np.sort(near[np.isfinite(near)])
            above = len(known) - np.searchsorted(known, near, side="right")
            ranks[name] = [int(n) + 1 if np.isfinite(x) else None for n, x in zip(above, near, strict=True)]
        return ranks

    def ends(self, metric: str) -> list[int]:
        """Return the `ENDS` most and least related pairs by a metric, as places in `pairs`, in its order."""
        ranked = sorted((rank, at) for at, rank in enumerate(self.ranks[metric]) if rank is not None)
        shown = ranked if len(ranked) <= 2 * ENDS else ranked[:ENDS] + ranked[-ENDS:]
        return [at for _, at in shown]


def collect(folder: Path) -> RelatedReport:
    """Read relatedness.json in this folder. Raises StateError, which names the file, where it is damaged."""
    file = folder / FILE
    try:
        return RelatedReport(folder, Study.model_validate_json(file.read_bytes()))
    except OSError as error:
        raise StateError(f"{file}: {error.strerror}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise StateError(f"{file}: " + (f"{where}: " if where else "") + first["msg"]) from None


def render(report: RelatedReport) -> str:
    """Return the HTML of a relatedness study. Raises UserError where Jinja2 or vl-convert is absent."""
    figures = figures_of(report)
    study, more = report.study, len(report.pairs) > 2 * ENDS
    return page.render(
        "relatedness",
        report.title,
        _data(report),
        figures,
        report=report,
        lead=" · ".join(
            words.count(number, what)
            for number, what in ((len(study.tasks), "task"), (len(report.pairs), "pair"), (len(study.scores), "metric"))
        ),
        sentence=_sentence(report),
        means=_MEANS,
        side=SIDE,
        fit=len(study.tasks) <= _WRITTEN,
        metrics=_metrics(report),
        directed=any(_is_directed(study, name) for name in study.scores),
        ends=[(metric, _ends(report, i, metric)) for i, metric in enumerate(study.scores)],
        which=f"The first {ENDS} and the last {ENDS} of {len(report.pairs)} pairs" if more else "All pairs",
    )


def _sentence(report: RelatedReport) -> str:
    """Say which pairs are at the two ends of the metrics' orders."""
    ends = [report.ends(metric) for metric in report.study.scores]
    most, least = ([report.pairs[order[at]] for order in ends if order] for at in (0, -1))
    return words.alike(*([tuple(report.study.tasks[i] for i in pair) for pair in side] for side in (most, least)))


def figures_of(report: RelatedReport) -> dict[str, Figure]:
    """Return name -> figure: 'heat-0' ... of the metrics, 'agreement' and 'pairs' where there are several."""
    study = report.study
    figures = {f"heat-{i}": _heat_map(report, metric) for i, metric in enumerate(study.scores)}
    if any(v is not None for i, row in enumerate(study.agreement.pearson) for v in row[:i]):
        figures["agreement"] = _correlations(study.agreement)
    if len(study.scores) > 1 and len(report.pairs) > 1:
        figures["pairs"] = _against(report)
    return figures


def picture(report: RelatedReport) -> Chart:
    """Draw the maps of all metrics and of their agreement on one sheet."""
    figures = figures_of(report)
    shown = [view for name, figure in figures.items() if name != "pairs" for view in figure.views]
    return charts.concat([view.chart for view in shown if not view.name.startswith("as scored")])


def _heat_map(report: RelatedReport, metric: str) -> Figure:
    """Draw the symmetrised matrix, and as scored where that is another; a stronger colour is more related."""
    study = report.study
    ways = {"symmetrised": study.symmetrised[metric]}
    if _is_directed(study, metric):
        ways["as scored: encoder of the row, examples of the column"] = study.scores[metric]
    places = thinned(range(len(study.tasks)), SIDE)
    names = [study.tasks[i] for i in places]
    title = f"{metric} (distance)" if metric in study.distances else metric
    colors = ONE_SIDED[::-1] if metric in study.distances else ONE_SIDED
    views = []
    for name, M in ways.items():
        cells = {study.tasks[i]: {study.tasks[j]: M[i][j] for j in places} for i in places}
        # the diagonal says nothing and may be far from the rest, so it does not set the colours
        rest = [v for i in places for j in places if i != j and (v := M[i][j]) is not None] or [0.5]
        chart = charts.heat(cells, names, value=title, low=min(rest), high=max(rest), numbers=".2g", colors=colors)
        views.append(View(name, chart))
    return Figure(metric, views)


def _is_directed(study: Study, metric: str) -> bool:
    """Return whether the scores are not symmetric, apart from round-off."""
    M = np.array(study.scores[metric], dtype=np.float64)
    return not np.allclose(M, M.T, rtol=1e-9, atol=0, equal_nan=True)


def _correlations(agreement: Correlations) -> Figure:
    """Draw the agreement of the metrics: blue is with, orange is against, as in all maps of agreement."""
    over = span([n for i, row in enumerate(agreement.pairs) for n in row[:i]])
    views = []
    for name, M in (
        ("Pearson's correlation", agreement.pearson),
        ("Spearman's correlation, of ranks", agreement.spearman),
    ):
        cells = {a: dict(zip(agreement.metrics, row, strict=True)) for a, row in zip(agreement.metrics, M, strict=True)}
        value = f"{name}, over {over} pairs"
        chart = charts.heat(cells, agreement.metrics, value=value, low=-1, high=1, middle=0.0, numbers=".2f")
        views.append(View(name, chart))
    return Figure("Agreement of metrics", views)


def _against(report: RelatedReport) -> Figure:
    """Draw one metric against another, one point per pair of tasks; of many pairs some, evenly spaced."""
    study, agreement = report.study, report.study.agreement
    kept = thinned(range(len(report.pairs)), POINTS)
    names = [", ".join(study.tasks[i] for i in report.pairs[at]) for at in kept]
    axes = [metric + (" (a distance)" if metric in study.distances else "") for metric in study.scores]
    values = [[plain(float(report.values[metric][at])) for at in kept] for metric in study.scores]
    views = []
    for i, j in combinations(range(len(axes)), 2):
        r, rho = (M[i][j] for M in (agreement.pearson, agreement.spearman))
        known = "" if r is None or rho is None else f"; r {r:.2f}, ρ {rho:.2f}"  # noqa: RUF001
        points = [{"name": n, "x": x, "y": y} for n, x, y in zip(names, values[i], values[j], strict=True)]
        chart = charts.scatter(points, axes[i] + known, axes[j], spoken=".3~g")
        views.append(View(f"{axes[j]} against {axes[i]}", chart))
    return Figure("One metric against another", views)


def _metrics(report: RelatedReport) -> Table:
    study, rows = report.study, []
    for name, v in report.values.items():
        known = v[np.isfinite(v)]
        spread = [number(float(f(known))) if len(known) else "" for f in (np.min, np.median, np.max)]
        kind = "distance" if name in study.distances else "similarity"
        rows.append((name, kind, "yes" if _is_directed(study, name) else "no", *spread, str(len(known))))
    head = ("metric", "is a", "directed", "least", "median", "largest", "pairs")
    return Table("", head, tuple(rows), name="metrics-table", text=(1, 2))


def _ends(report: RelatedReport, place: int, metric: str) -> Table | None:
    study, rows = report.study, []
    others = [m for m in study.scores if m != metric]
    for at in report.ends(metric):
        a, b = (study.tasks[place] for place in report.pairs[at])
        places = [report.ranks[m][at] for m in (metric, *others)]
        ranks = ["–" if rank is None else str(rank) for rank in places]  # noqa: RUF001
        rows.append((ranks[0], a, b, number(float(report.values[metric][at])), *ranks[1:]))
    head = ("rank", "task", "task", metric, *(f"by {m}" for m in others))
    return Table("", head, tuple(rows), name=f"ends-{place}", text=(1, 2)) if rows else None


def _data(report: RelatedReport) -> dict[str, Any]:
    """Return the numbers of the page's tables, for programs."""
    study = report.study
    ends = {
        metric: [
            {
                "tasks": [study.tasks[place] for place in report.pairs[at]],
                "score": float(report.values[metric][at]),
                "ranks": {m: ranks[at] for m, ranks in report.ranks.items()},
            }
            for at in report.ends(metric)
        ]
        for metric in study.scores
    }
    agreement = study.agreement.model_dump()
    return {"about": dict(report.facts), "distances": study.distances, "agreement": agreement, "ends": ends}
