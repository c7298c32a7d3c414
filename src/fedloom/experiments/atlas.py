"""`fedloom study atlas`: train every pair of a benchmark's tasks: which help each other, do early cosines say so?"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np

from fedloom.core.errors import RecipeError, StateError, UserError
from fedloom.experiments.grid_run import BENCHMARK, SILENT, Runner, on_test
from fedloom.federation.recipes.schema import Recipe
from fedloom.study import charts
from fedloom.study.agreement import Array, pair_ranks
from fedloom.study.grid import SMALLEST, Grid, write
from fedloom.study.output import HasTable, Records, Table
from fedloom.study.report.records import agreement_of
from fedloom.study.results import of_grid
from fedloom.study.significance import CORRECTED
from fedloom.study.statistics import LEVEL, Paired, delta_terms, family, holm, p_text

if TYPE_CHECKING:
    from fedloom.federation.rounds.built import Built

OWN, TOGETHER, EVERYONE = "own task", "together", "everyone"
"""Encoders averaged among clients with the same task; FedAvg of all, where cosines are read; averaged among all."""
EARLY = 0.2
"""The share of the rounds, at the beginning, whose cosines predict."""
SHUFFLES = 5000
"""Orders of the tasks that the permutation test tries, where there are more."""


def matchings(tasks: Sequence[str]) -> list[list[tuple[str, ...]]]:
    """Return every pair of tasks in one list of disjoint pairs (the circle method); of an odd number one is alone."""
    circle: list[str | None] = [*tasks, *([None] if len(tasks) % 2 else [])]
    rounds = []
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        pairs = zip(circle[:half], reversed(circle[half:]), strict=True)
        rounds.append([tuple(sorted(task for task in pair if task is not None)) for pair in pairs])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return rounds


def atlas_grid(name: str, recipe: Mapping[str, Any], clients: Mapping[str, Sequence[str]], seeds: int) -> Grid:
    """Return the runs of an atlas: each task's clients among themselves, each pair of tasks, everyone; and FedAvg.

    `clients` are those of each task. Only encoders are averaged, and every client is alike to those it hears, so that
    the runs of pairs differ from those of single tasks in nothing but the other task. All pairs of a matching train in
    the same run, without hearing of each other.
    """
    if len(clients) < 3:
        raise RecipeError(f"an atlas needs at least three tasks, found {', '.join(clients)}")
    local = {"name": "fedavg", "buffers": "local"}
    alike = {"weights": {"kind": "uniform"}, "scope": "encoder"}

    def among(groups: Sequence[Sequence[str]]) -> dict[str, Any]:
        names = [[client for task in group for client in clients[task]] for group in groups]
        return {"method": local, "peers": {"graph": {"name": "groups", "groups": names}, **alike}}

    bases = {
        TOGETHER: {"method": local, "peers": None},
        OWN: among([[task] for task in clients]),
        EVERYONE: {"method": local, "peers": alike},
        **{f"pairs {n}": among(groups) for n, groups in enumerate(matchings(list(clients)), 1)},
    }
    about = {"name": f"{name}-atlas", "title": f"Who helps whom on {name}", "references": [], "delta": f"{OWN}/-"}
    return on_test(recipe, **about, bases=bases, seeds=list(range(seeds)))


@dataclass(frozen=True, eq=False)
class Atlas(HasTable):
    """The result of `read_atlas`."""

    title: str
    tasks: tuple[str, ...]
    seeds: tuple[int, ...]
    changes: Array
    """Seed x task x other: the task's change in percent against clients of its own alone; nan in the diagonal."""
    everyone: Array
    """Seed x task: the same with all tasks."""
    cosines: Mapping[str, Mapping[int, Array]]
    """Layers of the encoder -> round -> seed x task x task: mean cosine of updates, while all train together."""
    rounds: int
    ratio: float = 0.0
    """Where the seeds redraw the test part from one pool, the ratio of `against_zero`; else 0."""

    def early(self, layers: str | None = None, span: tuple[float, float] = (0.0, EARLY)) -> Array:
        """Return seed x T x T: mean cosine over these layers (all, each group alike) and this part of the rounds."""
        low, high = (share * self.rounds for share in span)
        groups = self.cosines if layers is None else {layers: self.cosines[layers]}
        parts = [[M for r, M in by.items() if low < r <= max(high, 1)] for by in groups.values()]
        if not all(parts):
            return np.full(self.changes.shape, math.nan)
        with np.errstate(invalid="ignore"):  # of a pair without any cosine
            return np.asarray(np.mean([np.nansum(each, 0) / (~np.isnan(each)).sum(0) for each in parts], 0))

    def _unknown(self, layers: str | None = None, span: tuple[float, float] = (0.0, EARLY)) -> Any:
        """Return T x T, bool: pairs without a change, or such a cosine, that is a number at every seed."""
        apart = (self.early(layers, span) + self.changes).sum(0)
        return np.isnan(apart + apart.T)

    @cached_property
    def left_out(self) -> tuple[str, ...]:
        """Pairs of tasks of which nobody knows what early cosines foretell."""
        unknown = self._unknown()
        named = itertools.combinations(enumerate(self.tasks), 2)
        return tuple(f"{a} and {b}" for (i, a), (j, b) in named if unknown[i, j])

    @cached_property
    def effects(self) -> dict[tuple[int, int], tuple[Paired, float]]:
        """Return (task, with which other) -> change over seeds and p after Holm's correction over all pairs."""
        gains = {pair: self.changes[:, *pair].tolist() for pair in self._pairs}
        tests = family(gains, dict.fromkeys(gains, self.ratio), SMALLEST)
        return {pair: (of.change, of.holm) for pair, of in tests.items() if of.change is not None}

    @property
    def _pairs(self) -> list[tuple[int, int]]:
        """(task, with which other), in the order of the runs."""
        groups = (group for matching in matchings(self.tasks) for group in matching)
        return [(self.tasks.index(a), self.tasks.index(b)) for of in groups for a, b in itertools.permutations(of, 2)]

    def rank_correlation(
        self, layers: str | None = None, span: tuple[float, float] = (0.0, EARLY)
    ) -> tuple[float, float]:
        """Return (Spearman's correlation of cosines with gains, p): cosines of one seed, gains of all others, mean over
        seeds.

        It is over pairs of tasks, whose two gains are averaged; pairs with an unknown value are left out. p is
        one-sided (a larger cosine, a larger gain), from permutations of the cosines' tasks (Mantel, 1967).
        """
        T = len(self.tasks)
        first, second = np.triu_indices(T, 1)
        out = np.where(self._unknown(layers, span), math.nan, 0.0)
        cosines = np.stack([pair_ranks(M + out) for M in self.early(layers, span)])
        others = (np.delete(self.changes, at, 0).mean(0) for at in range(len(self.seeds)))
        gains = np.stack([pair_ranks(M + out) for M in others])

        def correlation(order: Sequence[int]) -> float:
            at = np.asarray(order)
            both = np.stack([cosines[:, at[first], at[second]], gains[:, first, second]])
            known = ~np.isnan(both).any(0)
            means = np.where(known, both, 0.0).sum(-1, keepdims=True) / np.maximum(known.sum(-1, keepdims=True), 1)
            both = np.where(known, both - means, 0.0)
            size = np.sqrt(np.square(both).sum(-1).prod(0))
            return float(np.mean(both.prod(0).sum(-1) / np.where(size > 0, size, math.nan)))

        every = math.factorial(T) <= SHUFFLES
        rng = np.random.default_rng(0)
        orders: Any = itertools.permutations(range(T)) if every else (rng.permutation(T) for _ in range(SHUFFLES))
        observed = correlation(range(T))
        if math.isnan(observed):
            return math.nan, math.nan
        drawn = [value for order in orders if not math.isnan(value := correlation(order))]
        above = sum(value >= observed - 1e-12 for value in drawn)
        return observed, above / len(drawn) if every else (above + 1) / (len(drawn) + 1)

    @cached_property
    def overall(self) -> tuple[float, float]:
        """Return the correlation for early cosines of all layers; see `rank_correlation`."""
        return self.rank_correlation()

    def as_table(self) -> Table:
        """Return a line for each task and other task."""
        early = self.early().mean(0)
        lines = []
        for (i, j), (of, p) in sorted(self.effects.items(), key=lambda item: -item[1][0].mean):
            change = f"{of.mean:+.2f} ({of.low:+.2f} to {of.high:+.2f})"
            effect = ("helps" if of.mean > 0 else "hurts") if p <= LEVEL else "not significant"
            lines.append((self.tasks[i], self.tasks[j], change, p_text(p), effect, f"{early[i, j]:+.3f}"))
        return Table(self.title, ("task", "with", "change %", "p, Holm", "", "early cosine"), tuple(lines), self.notes)

    @cached_property
    def notes(self) -> tuple[str, ...]:
        """Return what was measured, and whether early cosines predict the gains."""
        together = "; ".join(f"{t} {v:+.2f} %" for t, v in zip(self.tasks, self.everyone.mean(0), strict=True))
        value, p = self.overall
        outcome = "nothing to correlate"
        if not math.isnan(value):
            outcome = f"Spearman {value:+.2f}, p {p_text(p)} ({'' if p <= LEVEL else 'not '}significant)"
        spans = {"first fifth": (0.0, 0.2), "middle": (0.2, 0.8), "last fifth": (0.8, 1.0)}
        looks = [(of, name, *self.rank_correlation(of, at)) for of in self.cosines for name, at in spans.items()]
        known = [look for look in looks if not math.isnan(look[3])]
        parts = [
            f"{layers}, {name} {value:+.2f} (p {p_text(p)})"
            for (layers, name, value, _), p in zip(known, holm([look[3] for look in known]), strict=True)
        ]
        left_out = f"Left out, because not every seed has a number: {'; '.join(self.left_out)}."
        return (
            "Change of a task's own metric on test data, in percent, where its clients average encoders with those of "
            f"the other task too, compared with averages among themselves; {len(self.seeds)} seeds, mean (95 % "
            f"t-interval); p after Holm's correction over {len(self.effects)} lines. With all tasks: {together}.",
            f"Do early cosines predict gains? Cosines of updates in the first {EARLY:.0%} of the rounds of one seed, "
            f"while all tasks train one encoder, against gains of the other seeds: {outcome}, by permutation of tasks.",
            f"By layers and rounds, after Holm's correction over {len(known)}: {'; '.join(parts)}.",
            *([CORRECTED.format(ratio=self.ratio)] if self.ratio else []),
            *([left_out] if self.left_out else []),
        )

    def records(self) -> Records:
        """Return a line for each task, other task and seed."""
        rows = [
            (self.tasks[i], self.tasks[j], seed, float(value))
            for i, j in self._pairs
            for seed, value in zip(self.seeds, self.changes[:, i, j], strict=True)
        ]
        return Records(("task", "with", "seed", "change"), rows)

    def cosine_records(self) -> Records:
        """Return a line for each seed, group of layers, round and pair of tasks."""
        rows = [
            (seed, layers, number, a, b, float(M[at, i, j]))
            for at, seed in enumerate(self.seeds)
            for layers, by_round in self.cosines.items()
            for number, M in by_round.items()
            for (i, a), (j, b) in itertools.combinations_with_replacement(list(enumerate(self.tasks)), 2)
        ]
        return Records(("seed", "layers", "round", "task", "with", "cosine"), rows)


def read_atlas(grid: Grid, folder: Path, clients: Mapping[str, Sequence[str]]) -> Atlas:
    """Return the atlas of a grid's runs. Raises StateError where one has not finished."""
    results = of_grid(grid, folder)
    if results.missing:
        first, count = results.missing[0], len(results.missing)
        raise StateError(f"{count} of the atlas' runs in {folder} have not finished, the first: {first}")
    sides = {base: side for (_, base, _), side in results.sides.items()}
    directions = {row.task: row.direction for row in results.rows[BENCHMARK]}
    tasks, seeds = tuple(clients), tuple(sides[TOGETHER].runs)

    def changed(base: str) -> Array:
        """Return seed x task: change in percent against clients of the task alone."""
        terms = [delta_terms(sides[base].values[s], sides[OWN].values[s], directions) for s in seeds]
        return np.array([[of.get(task, math.nan) for task in tasks] for of in terms])

    changes = np.full((len(seeds), len(tasks), len(tasks)), math.nan)
    for number, groups in enumerate(matchings(tasks), 1):
        change = changed(f"pairs {number}")
        for group in groups:
            for i, j in itertools.permutations(map(tasks.index, group), 2):
                changes[:, i, j] = change[:, i]
    each = [_cosines(run, clients) for run in sides[TOGETHER].runs.values()]
    cosines = {name: {r: np.stack([of[name][r] for of in each]) for r in by} for name, by in each[0].items()}
    last = max(run.last_round for run in sides[TOGETHER].runs.values())
    return Atlas(grid.title, tasks, seeds, changes, changed(EVERYONE), cosines, last, sides[OWN].ratio)


def _cosines(run: Any, clients: Mapping[str, Sequence[str]]) -> dict[str, dict[int, Array]]:
    """Return layers of the encoder -> round -> T x T."""
    records = agreement_of(run)
    groups = {} if records is None else {n: by for n, by in records.cosine.items() if n.startswith("encoder")}
    if not groups:
        raise StateError(f"{run.folder}: the run recorded no cosines of updates: do not set runtime.diagnostics: off")
    tasks = list(clients)
    cosines: dict[str, dict[int, Array]] = {}
    for name, by_round in groups.items():
        for number, cells in by_round.items():
            M = np.full((len(tasks),) * 2, math.nan)
            for (i, a), (j, b) in itertools.product(enumerate(tasks), repeat=2):
                pairs = [cells.get(x, {}).get(y) for x in clients[a] for y in clients[b] if x != y]
                known = [value for value in pairs if value is not None]
                M[i, j] = fmean(known) if known else math.nan
            cosines.setdefault(name.removeprefix("encoder: "), {})[number] = M
    return cosines


def draw(atlas: Atlas, out: Path) -> None:
    """Draw three panels: which task helps which; cosines of tasks by layers and rounds; early cosines and gains.

    The ending of the file says the format.
    """
    T, G = len(atlas.tasks), atlas.changes.mean(0)
    gains = {t: {o: charts.plain(float(G[i, j])) for j, o in enumerate(atlas.tasks)} for i, t in enumerate(atlas.tasks)}
    numbers = {
        (atlas.tasks[i], atlas.tasks[j]): f"{of.mean:+.1f}" + "*" * (p <= LEVEL)
        for (i, j), (of, p) in atlas.effects.items()
    }
    title = "gain of a task (row) from another; * significant"
    who = charts.heat(gains, atlas.tasks, title=title, value="change, %", middle=0.0, texts=numbers)
    off = ~np.eye(T, dtype=bool)
    rounds = sorted({number for by in atlas.cosines.values() for number in by})
    level = {name: {r: float(np.nanmean(by[r][:, off])) for r in rounds} for name, by in atlas.cosines.items()}
    title = "cosine of updates of different tasks"
    where = charts.heat(level, rounds, title=title, along="round", value="mean cosine", middle=0.0)
    C = atlas.early().mean(0)
    points = [
        {"name": f"{atlas.tasks[i]}, {atlas.tasks[j]}", "x": charts.plain(float(C[i, j]))}
        | {"y": charts.plain(float(G[i, j] + G[j, i]) / 2)}
        for i, j in itertools.combinations(range(T), 2)
    ]
    value, p = atlas.overall
    axes = f"cosine in the first {EARLY:.0%} of the rounds", "gain of a pair, %"
    title = f"early cosines and gains: Spearman {value:+.2f}, p {p_text(p)}"
    tell = charts.scatter(points, *axes, title=title, labels=T <= 5, zero=True, spoken=".2~g")
    charts.save(charts.concat([who, where, tell], title=atlas.title), out)


GRID = "runs"
"""The folder of the grid in the atlas' own."""


def clients_of(built: Built) -> dict[str, list[str]]:
    """Return task -> its clients. Raises RecipeError where a client holds several, to all of which its gain belongs."""
    by_task: dict[str, list[str]] = {task.name: [] for task in built.federation.tasks}
    for client in built.federation.clients.values():
        if len(client.tasks) > 1:
            raise RecipeError(
                f"client {client.id!r} holds {', '.join(client.tasks)}: an atlas compares single tasks, so each client "
                "must hold one task (partition=one-task)"
            )
        by_task[next(iter(client.tasks))].append(client.id)
    return by_task


def make(recipe: Recipe, seeds: int, folder: Path, runner: Runner = SILENT) -> Atlas:
    """Run what is missing; write atlas.csv, cosines.csv, atlas.md and atlas.svg. Raises UserError where a run fails."""
    from fedloom.federation.rounds.build import build

    clients = clients_of(build(recipe))
    grid = atlas_grid(recipe.name, recipe.model_dump(mode="json"), clients, seeds)
    outcome = runner.run(grid, folder / GRID)
    for what in (outcome.refused, outcome.failed):
        for cell, reason in what.items():
            raise UserError(f"{folder / GRID}: {cell}: {reason}")
    atlas = read_atlas(grid, folder / GRID, clients)
    tables = {"atlas.csv": atlas.to_csv(), "cosines.csv": atlas.cosine_records().to_csv()}
    write(folder, {**tables, "atlas.md": atlas.to_markdown()})
    draw(atlas, folder / "atlas.svg")
    return atlas
