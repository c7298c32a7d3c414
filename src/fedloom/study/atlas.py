"""A conflict atlas: which pairs of tasks help or hurt each other, in which layers and rounds, and whether early cosines
tell beforehand. Reads run folders; free of torch."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from fedloom.core.errors import RecipeError, StateError, writing
from fedloom.core.extras import figure, save_figure
from fedloom.study.delta import delta_terms
from fedloom.study.grid import Grid, load_grid
from fedloom.study.palette import COLORS
from fedloom.study.relatedness.compare import pair_ranks
from fedloom.study.report import agreement as updates
from fedloom.study.significance.statistics import LEVEL, Paired, against_zero, holm, p_text
from fedloom.study.tables.markup import Records
from fedloom.study.tables.results import CombinationRuns, read
from fedloom.study.tables.sheet import Sheet, Sheeted
from fedloom.study.tables.table import columns_of

OWN, TOGETHER, EVERYONE = "own task", "together", "everyone"
"""Encoders averaged among clients with the same task; FedAvg of all, where cosines are read; averaged among all."""
BED = "bed"
EARLY = 0.2
"""The share of the rounds, at the beginning, whose cosines predict."""
SHUFFLES = 5000
"""Orders of the tasks that the permutation test tries, where there are more."""

Pair = tuple[str, str]
Matrix = np.ndarray[Any, np.dtype[Any]]


def matchings(tasks: Sequence[str]) -> list[list[tuple[str, ...]]]:
    """Every pair of tasks in exactly one list of disjoint pairs (the circle method); of an odd number one is alone."""
    circle: list[str | None] = [*tasks, *([None] if len(tasks) % 2 else [])]
    found = []
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        pairs = zip(circle[:half], reversed(circle[half:]), strict=True)
        found.append([tuple(sorted(task for task in pair if task is not None)) for pair in pairs])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return found


def atlas_grid(name: str, recipe: Mapping[str, Any], clients: Mapping[str, Sequence[str]], seeds: int) -> Grid:
    """The runs of an atlas: each task's clients among themselves, each pair of tasks, everyone; and FedAvg.

    `clients` are those of each task. Only encoders are averaged, and every client is alike to those it hears, so that
    the runs of pairs differ from those of single tasks in nothing but the other task. All pairs of a matching train in
    the same run, without hearing of each other.
    """
    if len(clients) < 3:
        raise RecipeError(f"an atlas needs three tasks or more, found {', '.join(clients)}")
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
    last = {"evaluation.splits": ["test"], "evaluation.every": recipe["training"]["rounds"]}
    return load_grid(
        {
            "name": f"{name}-atlas",
            "title": f"Who helps whom on {name}",
            "data": {BED: {"recipe": dict(recipe), "set": last}},
            "bases": bases,
            "references": [],
            "seeds": list(range(seeds)),
            "delta": f"{OWN}/-",
        }
    )


@dataclass(frozen=True, eq=False)
class Atlas(Sheeted):
    """What `read_atlas` found."""

    title: str
    tasks: tuple[str, ...]
    changes: Mapping[Pair, Mapping[int, float]]
    """(task, with which other) -> seed -> its change in percent against clients of its own task alone."""
    everyone: Mapping[str, Mapping[int, float]]
    """Task -> seed -> the same with all tasks."""
    cosines: Mapping[int, Mapping[str, Mapping[int, Matrix]]]
    """Seed -> layers of the encoder -> round -> mean cosine of two tasks' updates (T x T), while all train together."""
    rounds: int

    @property
    def seeds(self) -> tuple[int, ...]:
        """All seeds."""
        return tuple(self.cosines)

    def gains(self, seeds: Sequence[int]) -> Matrix:
        """T x T: what a row's task gains from the column's, mean over seeds; nan in the diagonal."""
        made = np.full((len(self.tasks),) * 2, math.nan)
        for (task, other), by_seed in self.changes.items():
            change = fmean(by_seed.get(seed, math.nan) for seed in seeds)
            made[self.tasks.index(task), self.tasks.index(other)] = change
        return made

    def early(self, seed: int, layers: str | None = None, span: tuple[float, float] = (0.0, EARLY)) -> Matrix:
        """T x T: mean cosine over these layers (all, each group alike) and this part of the rounds."""
        low, high = (share * self.rounds for share in span)
        groups = self.cosines[seed] if layers is None else {layers: self.cosines[seed][layers]}
        parts = [[M for r, M in by.items() if low < r <= max(high, 1)] for by in groups.values()]
        if not all(parts):
            return np.full((len(self.tasks),) * 2, math.nan)
        with np.errstate(invalid="ignore"):  # of a pair without any cosine
            return np.asarray(np.mean([np.nansum(each, 0) / (~np.isnan(each)).sum(0) for each in parts], 0))

    def _unknown(self, layers: str | None = None, span: tuple[float, float] = (0.0, EARLY)) -> Any:
        """T x T, bool: pairs without a change, or such a cosine, that is a number at every seed."""
        apart = sum(self.early(seed, layers, span) + self.gains([seed]) for seed in self.seeds)
        return np.isnan(apart + np.transpose(apart))

    @cached_property
    def left_out(self) -> tuple[str, ...]:
        """Pairs of tasks of which nobody knows what early cosines foretell."""
        unknown = self._unknown()
        named = itertools.combinations(enumerate(self.tasks), 2)
        return tuple(f"{a} and {b}" for (i, a), (j, b) in named if unknown[i, j])

    @cached_property
    def effects(self) -> dict[Pair, tuple[Paired, float]]:
        """(task, with which other) -> its change over seeds, and p after Holm's correction over all pairs.

        A pair with a change that is no number is not among them.
        """
        known = {pair: list(by.values()) for pair, by in self.changes.items() if all(map(math.isfinite, by.values()))}
        found = {pair: against_zero(changes) for pair, changes in known.items()}
        ps = holm([1.0 if of.is_constant else of.p for of in found.values()])
        return {pair: (of, p) for (pair, of), p in zip(found.items(), ps, strict=True)}

    def foretold(self, layers: str | None = None, span: tuple[float, float] = (0.0, EARLY)) -> tuple[float, float]:
        """(Spearman's correlation of cosines with gains, p): cosines of one seed, gains of all others, mean over seeds.

        Over pairs of tasks, whose two gains are averaged; those of which something is unknown are left out. p is
        one-sided (a larger cosine, a larger gain), from orders of the tasks of the cosines, under which nothing is
        foretold (Mantel, 1967).
        """
        T = len(self.tasks)
        first, second = np.triu_indices(T, 1)
        out = np.where(self._unknown(layers, span), math.nan, 0.0)
        cosines = np.stack([pair_ranks(self.early(seed, layers, span) + out) for seed in self.seeds])
        gains = np.stack([pair_ranks(self.gains([one for one in self.seeds if one != s]) + out) for s in self.seeds])

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
        orders: Iterator[Any] = (
            itertools.permutations(range(T)) if every else (rng.permutation(T) for _ in range(SHUFFLES))
        )
        found = correlation(range(T))
        if math.isnan(found):
            return math.nan, math.nan
        others = [value for order in orders if not math.isnan(value := correlation(order))]
        above = sum(value >= found - 1e-12 for value in others)
        return found, above / len(others) if every else (above + 1) / (len(others) + 1)

    @cached_property
    def overall(self) -> tuple[float, float]:
        """What early cosines of all layers foretell; see `foretold`."""
        return self.foretold()

    def sheet(self) -> Sheet:
        """A line for each task and other task."""
        lines = []
        for (task, other), (of, p) in sorted(self.effects.items(), key=lambda item: -item[1][0].mean):
            early = fmean(self.early(seed)[self.tasks.index(task), self.tasks.index(other)] for seed in self.seeds)
            told = "helps" if of.mean > 0 else "hurts"
            lines.append(
                (
                    task,
                    other,
                    f"{of.mean:+.2f} ({of.low:+.2f} to {of.high:+.2f})",
                    p_text(p),
                    told if p <= LEVEL else "not told",
                    f"{early:+.3f}",
                )
            )
        head = ("task", "with", "change %", "p, Holm", "", "early cosine")
        return Sheet(self.title, head, tuple(lines), self.notes)

    @cached_property
    def notes(self) -> tuple[str, ...]:
        """What was measured, and whether early cosines tell."""
        together = "; ".join(f"{t} {fmean(by.values()):+.2f} %" for t, by in self.everyone.items())
        value, p = self.overall
        found = "nothing to correlate" if math.isnan(value) else f"Spearman {value:+.2f}, p {p_text(p)} ({_verdict(p)})"
        parts = []
        spans = {"first fifth": (0.0, 0.2), "middle": (0.2, 0.8), "last fifth": (0.8, 1.0)}
        looks = [(layers, name, *self.foretold(layers, at)) for layers in self.layers for name, at in spans.items()]
        known = [look for look in looks if not math.isnan(look[3])]
        for (layers, name, value, _), p in zip(known, holm([look[3] for look in known]), strict=True):
            parts.append(f"{layers}, {name} {value:+.2f} (p {p_text(p)})")
        return (
            f"Change of a task's own metric on test data, in percent, where its clients average encoders with those of "
            f"the other task too, against among themselves alone; {len(self.seeds)} seeds, mean (95 % t-interval); p "
            f"after Holm's correction over {len(self.effects)} lines. With all tasks: {together}.",
            f"Do early cosines tell? Cosines of updates in the first {EARLY:.0%} of the rounds of one seed, while all "
            f"tasks train one encoder, against gains of the other seeds: {found}, by permutation of tasks.",
            f"By layers and rounds, after Holm's correction over {len(known)}: {'; '.join(parts)}.",
            *(
                [f"Left out of this, for want of a number at every seed: {'; '.join(self.left_out)}."]
                * bool(self.left_out)
            ),
        )

    @property
    def layers(self) -> tuple[str, ...]:
        """Groups of layers of the encoder, the first ones first."""
        return tuple(next(iter(self.cosines.values())))

    def records(self) -> Records:
        """A line for each task, other task and seed."""
        rows = [(t, o, seed, v) for (t, o), by_seed in self.changes.items() for seed, v in by_seed.items()]
        return Records(("task", "with", "seed", "change"), rows)

    def cosine_records(self) -> Records:
        """A line for each seed, group of layers, round and pair of tasks."""
        rows = [
            (seed, layers, number, a, b, float(M[i, j]))
            for seed, groups in self.cosines.items()
            for layers, by_round in groups.items()
            for number, M in by_round.items()
            for (i, a), (j, b) in itertools.combinations_with_replacement(list(enumerate(self.tasks)), 2)
        ]
        return Records(("seed", "layers", "round", "task", "with", "cosine"), rows)


def _verdict(p: float) -> str:
    return "told" if p <= LEVEL else "not told"


def read_atlas(grid: Grid, folder: Path, clients: Mapping[str, Sequence[str]]) -> Atlas:
    """The atlas of a grid's runs. Raises StateError where one has not finished."""
    results, missing = read(grid, folder, "test")
    if missing:
        raise StateError(f"{len(missing)} of the atlas' runs in {folder} have not finished, the first: {missing[0]}")
    cells = {base: result for (_, base, _), result in results.items()}
    directions = {c.task: c.direction for c in columns_of(grid, BED, results) if c.task}
    tasks = tuple(clients)
    changes: dict[Pair, dict[int, float]] = {}
    for number, groups in enumerate(matchings(tasks), 1):
        against_own = _changes(cells[f"pairs {number}"], cells[OWN], directions)
        for group in groups:
            for task, other in itertools.permutations(group, 2):
                changes[task, other] = against_own[task]
    together = cells[TOGETHER]
    cosines = {seed: _cosines(run, clients) for seed, run in together.runs.items()}
    everyone = _changes(cells[EVERYONE], cells[OWN], directions)
    last = max(run.last_round for run in together.runs.values())
    return Atlas(grid.title, tasks, changes, everyone, cosines, last)


def _changes(one: CombinationRuns, base: CombinationRuns, directions: Mapping[str, str]) -> dict[str, dict[int, float]]:
    """Task -> seed -> change in percent."""
    values, against = one.values(), base.values()
    found: dict[str, dict[int, float]] = defaultdict(dict)
    for seed in values:
        for task, term in delta_terms(values[seed], against[seed], directions).items():
            found[task][seed] = term
    return found


def _cosines(run: Any, clients: Mapping[str, Sequence[str]]) -> dict[str, dict[int, Matrix]]:
    """Layers of the encoder -> round -> T x T."""
    found = updates.collect(run)
    groups = {} if found is None else {n: by for n, by in found.cosine.items() if n.startswith("encoder")}
    if not groups:
        raise StateError(f"{run.folder}: there are no cosines of updates; runtime.diagnostics must not be off")
    tasks = list(clients)
    made: dict[str, dict[int, Matrix]] = {}
    for name, by_round in groups.items():
        for number, cells in by_round.items():
            M = np.full((len(tasks),) * 2, math.nan)
            for (i, a), (j, b) in itertools.product(enumerate(tasks), repeat=2):
                pairs = [cells.get(x, {}).get(y) for x in clients[a] for y in clients[b] if x != y]
                known = [value for value in pairs if value is not None]
                M[i, j] = fmean(known) if known else math.nan
            made.setdefault(name.removeprefix("encoder: "), {})[number] = M
    return made


def draw(atlas: Atlas, out: Path) -> None:
    """Three panels: who helps whom; cosines of different tasks by layers and rounds; whether early cosines tell.

    The ending of the file (.svg, .png, .pdf) says the format.
    """
    T, page = len(atlas.tasks), figure(11.5, 3.6)
    who, where, tell = page.subplots(1, 3, width_ratios=[1.1, 1.2, 1])
    G = atlas.gains(atlas.seeds)
    reach = float(np.nanmax(np.abs(G))) or 1.0
    image = who.imshow(G, cmap="RdBu", vmin=-reach, vmax=reach)
    page.colorbar(image, ax=who, shrink=0.8, label="change, %")
    who.set_xticks(range(T), atlas.tasks, rotation=45, ha="right", fontsize=7)
    who.set_yticks(range(T), atlas.tasks, fontsize=7)
    for (task, other), (of, p) in atlas.effects.items():
        at = atlas.tasks.index(other), atlas.tasks.index(task)
        ink = "white" if abs(of.mean) > 0.6 * reach else "black"
        who.text(*at, f"{of.mean:+.1f}" + "*" * (p <= LEVEL), ha="center", va="center", fontsize=7, color=ink)
    who.set_title("what a task (row) gains from another\n* told", fontsize=8)
    off = ~np.eye(T, dtype=bool)
    rounds = sorted({number for by in atlas.cosines[atlas.seeds[0]].values() for number in by})
    level = [
        [float(np.nanmean([atlas.cosines[s][name][r][off] for s in atlas.seeds])) for r in rounds]
        for name in atlas.layers
    ]
    reach = float(np.nanmax(np.abs(level))) or 1.0
    image = where.imshow(
        level, cmap="RdBu", vmin=-reach, vmax=reach, aspect="auto", extent=(rounds[0], rounds[-1], len(level), 0)
    )
    page.colorbar(image, ax=where, shrink=0.8, label="mean cosine")
    where.set_yticks(np.arange(len(level)) + 0.5, atlas.layers, fontsize=7)
    where.set_xlabel("round", fontsize=8)
    where.set_title("cosine of updates of different tasks", fontsize=8)
    C = np.mean([atlas.early(seed) for seed in atlas.seeds], 0)
    for i, j in itertools.combinations(range(T), 2):
        tell.plot(C[i, j], (G[i, j] + G[j, i]) / 2, "o", color=COLORS[0], markersize=4)
        if T <= 5:
            label = f"{atlas.tasks[i]}, {atlas.tasks[j]}"
            tell.annotate(
                label, (C[i, j], (G[i, j] + G[j, i]) / 2), fontsize=6, xytext=(3, 3), textcoords="offset points"
            )
    tell.axhline(0, color="#999999", linewidth=0.7)
    tell.margins(0.25, 0.1)  # room for names
    for axes in page.axes:
        axes.tick_params(labelsize=7)
        axes.yaxis.label.set_size(8)
    value, p = atlas.overall
    tell.set_xlabel(f"cosine in the first {EARLY:.0%} of the rounds", fontsize=8)
    tell.set_ylabel("gain of a pair, %", fontsize=8)
    tell.set_title(f"does it tell? Spearman {value:+.2f}, p {p_text(p)}", fontsize=8)
    with writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
    save_figure(page, out)
