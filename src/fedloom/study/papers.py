"""Figures and tables of the papers that are read from records of runs. Free of torch.

- Activated dimensions (FedDEA's Figure 2): overlap of the clients, shares per block, and the picture. The run must have
  the add-on `activated-dimensions`.
- FedHCA2's hyper weights: alpha per client, beta per decoder and layer, as a picture. The run must use the method
  `fedhca2`, or one of its stages.
- The validation losses by which the DFMTL thesis ranks its experiments (Tables 6.4 to 6.14). A loss is the one by which
  early stopping judges: the mean over clients of their tasks' losses, weighted as the clients weigh them. So losses of
  cells whose clients hold other tasks, or weigh them otherwise, are not comparable, although the thesis compares them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from pydantic import TypeAdapter

from fedloom.core.errors import StateError, parsing
from fedloom.core.grouping import grouped, nested
from fedloom.federation.runs.reader import Run, best_round, number_of
from fedloom.study import charts
from fedloom.study.charts import Chart, tenths, thinned
from fedloom.study.grid import Cell, Grid, select, together
from fedloom.study.output import HasTable, HasTables, Made, Records, Table, Value
from fedloom.study.results import Combination, read

ACTIVATED = "activated-dimensions"
CSV_ACTIVATED = ("round", "scope", "quantity", "part", "a", "b", "percent")
_MANY = 10  # pairs with a line each; of more, only mean and span are shown
LINES = 12


@dataclass(frozen=True)
class Activated:
    """The record of one round for one scope ('encoder' or 'all'); see the stage ActivatedDimensions."""

    round: int
    scope: str
    rho: float
    columns: int
    rows: tuple[str, ...]
    blocks: tuple[str, ...]
    sizes: tuple[int, ...]
    active: tuple[tuple[int, ...], ...]
    """Rows x blocks: how many activated dimensions lie in a block."""
    bins: tuple[tuple[int, ...], ...]
    """Rows x bins along the flat vector."""
    groups: Mapping[str, Mapping[str, Sequence[float]]]
    """The scope, or a part of it -> overlap, expected or jaccard -> one number per pair."""

    def __post_init__(self) -> None:
        """Raise ValueError where numbers of pairs are missing."""
        if any(len(of) != len(self.pairs) for by in self.groups.values() for of in by.values()):
            raise ValueError(f"expected {len(self.pairs)} numbers, one for each pair of rows")

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """Return pairs of rows, in the order of the numbers."""
        return tuple(combinations(self.rows, 2))

    @property
    def by_pair(self) -> dict[tuple[str, str], float]:
        """Return pair -> its overlap, over the whole scope."""
        return dict(zip(self.pairs, self.groups[self.scope]["overlap"], strict=True))

    @property
    def expected(self) -> float:
        """Return the overlap of sets drawn independently, mean over the pairs."""
        return fmean(self.groups[self.scope]["expected"] or [self.rho])

    def matrix(self) -> dict[str, dict[str, float]]:
        """Return the overlap of all rows with all rows in percent; 100 on the diagonal."""
        of = {frozenset(pair): 100 * value for pair, value in self.by_pair.items()}
        return {a: {b: 100.0 if a == b else of.get(frozenset((a, b)), 0.0) for b in self.rows} for a in self.rows}

    def density(self) -> dict[str, dict[int, float]]:
        """Return row -> the place of each bin -> the percentage of the bin's dimensions that is activated."""
        count = len(self.bins[0])
        places = [round(i * self.columns / count) for i in range(count)]
        sizes = [b - a for a, b in pairwise(i * self.columns // count for i in range(count + 1))]
        shares = ([100 * (n / size) if size else 0.0 for n, size in zip(row, sizes, strict=True)] for row in self.bins)
        return {name: dict(zip(places, of, strict=True)) for name, of in zip(self.rows, shares, strict=True)}


@dataclass(frozen=True)
class Overlaps(HasTables):
    """The numbers of one run and scope. `rounds` are the rounds that recorded something, in order."""

    label: str
    rounds: tuple[Activated, ...]

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """Return all pairs that took part in one round."""
        rows = sorted({row for r in self.rounds for row in r.rows})
        met = {pair for r in self.rounds for pair in r.pairs}
        return tuple(pair for pair in combinations(rows, 2) if pair in met)

    @property
    def title(self) -> str:
        """Return the title of the tables."""
        first = self.rounds[0]
        return f"{self.label}: top {100 * first.rho:.3g} % of {first.columns:,} dimensions ({first.scope})"

    def agreement(self) -> Table:
        """Return the overlap in percent: rounds by pairs; of a long run, some rounds evenly spaced."""
        pairs = self.pairs if len(self.pairs) <= _MANY else ()
        lines = []
        for r in thinned(self.rounds, LINES):
            of = r.by_pair
            each = [_percent(of[p]) if p in of else "" for p in pairs]
            span = [_percent(f(of.values())) if of else "" for f in (fmean, min, max)]
            lines.append((str(r.round), *each, *span, _percent(r.expected)))
        head = ("round", *(f"{a} & {b}" for a, b in pairs), "mean", "least", "most", "if independent")
        return Table(f"{self.title}: overlap in percent", head, tuple(lines))

    def shares(self) -> Table:
        """Return where each client's activated dimensions lie, in percent: first round > last round."""
        first, last = self.rounds[0], self.rounds[-1]
        names = _prefixes(first.blocks)
        places = list(dict.fromkeys(names))
        rows = [row for row in first.rows if row in last.rows]
        lines = []
        for place in places:
            members = [i for i, name in enumerate(names) if name == place]
            size = sum(first.sizes[i] for i in members) / first.columns
            cells = [" > ".join(_percent(_share(r, row, members)) for r in _ends(self)) for row in rows]
            lines.append((place, _percent(size), *cells))
        when = " > ".join(f"round {r.round}" for r in _ends(self))
        title = f"{self.title}: where they lie, in percent, {when}"
        return Table(title, ("blocks", "of all dimensions", *rows), tuple(lines))

    def tables(self) -> tuple[Table, Table]:
        """Return both tables."""
        return self.agreement(), self.shares()

    def records(self) -> Records:
        """Return all numbers in percent: overlap, expected and jaccard of pairs; share of rows by block."""
        lines: list[Sequence[Value]] = []
        for r in self.rounds:
            for part, numbers in r.groups.items():
                for quantity, values in numbers.items():
                    for (a, b), value in zip(r.pairs, values, strict=True):
                        lines.append((r.round, r.scope, quantity, part, a, b, 100 * value))
            for row in r.rows:
                for i, block in enumerate(r.blocks):
                    lines.append((r.round, r.scope, "share", block, row, "", 100 * _share(r, row, [i])))
        return Records(CSV_ACTIVATED, lines)


def overlaps_of(run: str | Path | Run, scope: str | None = None) -> Overlaps:
    """Read the activated dimensions that a run recorded, by default over the encoder. Raises StateError without any."""
    run = run if isinstance(run, Run) else Run.read(run)
    with parsing(f"{run.folder}: records of activated dimensions"):
        records = [{**record, "round": round} for round, record in run.records(ACTIVATED)]
        lines = TypeAdapter(list[Activated]).validate_python(records)
    if not lines:
        raise StateError(
            f"{run.folder}: no activated dimensions recorded; run with the add-on: method.add.{ACTIVATED}={{}}"
        )
    scopes = {r.scope for r in lines}
    scope = scope or ("encoder" if "encoder" in scopes else "all")
    if scope not in scopes:
        raise StateError(f"{run.folder}: no activated dimensions of {scope!r}; recorded: {', '.join(sorted(scopes))}")
    label = f"{run.recipe['name']}, {run.label.replace(f' + {ACTIVATED}', '')}, seed {run.seed}"
    return Overlaps(label, tuple(r for r in lines if r.scope == scope))


def draw_overlaps(several: Sequence[Overlaps]) -> Chart:
    """Draw one run below the other.

    Left, as FedDEA's Figure 2: the dimensions along the flat vector, in the first and in the last round; then the
    overlap of all pairs; then overlap over the rounds, against sets drawn independently.
    """
    drawn = []
    for overlaps in several:
        shown = _ends(overlaps)
        dense = {r.round: r.density() for r in shown}
        top = max(value for rows in dense.values() for of in rows.values() for value in of.values()) or 1.0
        for number, rows in dense.items():
            look: dict[str, Any] = {"along": "dimension", "value": "% activated", "low": 0, "high": top}
            places = [*next(iter(rows.values()))]
            drawn.append(charts.heat(rows, places, title=f"{overlaps.title}, round {number}", **look))
        look = {"value": "overlap, %", "low": 0, "high": 100, "numbers": ".0f"}
        drawn += [charts.heat(r.matrix(), r.rows, title=f"round {r.round}: overlap, %", **look) for r in shown]
        met = nested((" & ".join(p), r.round, 100 * of) for r in overlaps.rounds for p, of in r.by_pair.items())
        pairs = {" & ".join(pair): met[" & ".join(pair)] for pair in overlaps.pairs}
        mean = {"mean of all pairs": {r.round: 100 * fmean(r.by_pair.values()) for r in overlaps.rounds if r.pairs}}
        independent = {"if independent": {r.round: 100 * r.expected for r in overlaps.rounds}}
        lines = (pairs if len(pairs) <= _MANY else mean) | independent
        rest = tenths([*pairs.values()], [r.round for r in overlaps.rounds]) if len(pairs) > _MANY else {}
        bands = {f"10 % to 90 % of {len(pairs)} pairs": rest} if rest else {}
        look = {"dashed": independent, "strong": mean, "zero": True, "bands": bands}
        drawn.append(charts.lines(lines, "round", "overlap, %", title="overlap, %", **look))
    return charts.concat(drawn, 5)


def _ends(overlaps: Overlaps) -> tuple[Activated, ...]:
    """Return the first and the last round, or the only one."""
    return (overlaps.rounds[0], *overlaps.rounds[1:][-1:])


def _share(r: Activated, row: str, blocks: Sequence[int]) -> float:
    """Return the share of a row's activated dimensions in some blocks."""
    counts = r.active[r.rows.index(row)]
    return sum(counts[i] for i in blocks) / (sum(counts) or 1)


def _percent(value: float) -> str:
    return f"{100 * value:.1f}"


def _prefixes(names: Sequence[str]) -> list[str]:
    """Cut names to the most components that leave at most LINES different names, and to one component at least."""
    most = max(name.count(".") for name in names) + 1
    for depth in range(most, 1, -1):
        cut = [".".join(name.split(".")[:depth]) for name in names]
        if len(set(cut)) <= LINES:
            return cut
    return [name.split(".")[0] for name in names]


HYPER = "hyper-weights"
CSV_WEIGHTS = ("round", "weight", "client", "task", "layer", "value", "used")

_NAMED = 12  # lines of one panel that are drawn and named each

Series = Mapping[int, float]
"""Round -> weight, of the rounds in which it was used."""


def used(value: float) -> float:
    """Return a weight as a round uses it: clamped to [0, 1]. The learned weight itself may lie outside."""
    return min(max(value, 0.0), 1.0)


@dataclass(frozen=True)
class HyperWeights(HasTables):
    """The weights of one run, as learned, not clamped. A client has no weight in rounds without it."""

    label: str
    rounds: tuple[int, ...]
    alpha: Mapping[str, Series]
    """Client -> its weight over the rounds."""
    beta: Mapping[tuple[str, str], Mapping[str, Series]]
    """(client, task) -> layer -> its weight over the rounds."""

    @property
    def layers(self) -> tuple[str, ...]:
        """Return the layers of decoders, in the order of the network."""
        return tuple(dict.fromkeys(layer for layers in self.beta.values() for layer in layers))

    def alphas(self) -> Table:
        """Return rounds by clients; of a long run, some evenly spaced. Weights outside [0, 1] stand in brackets."""
        lines = [
            (str(r), *(_text(of[r]) if r in of else "" for of in self.alpha.values()))
            for r in thinned(self.rounds, LINES)
        ]
        return Table(f"{self.label}: alpha of the encoders", ("round", *self.alpha), tuple(lines))

    def betas(self) -> Table:
        """Return decoders by layers: first use > last use."""
        lines = []
        for decoder, layers in self.beta.items():
            each = [[*layers.get(name, {}).values()] for name in self.layers]
            cells = [" > ".join(map(_text, [*values[:1], *values[1:][-1:]])) for values in each]
            lines.append((" ".join(decoder).strip(), *cells))
        return Table(f"{self.label}: beta of the decoders, first > last", ("decoder", *self.layers), tuple(lines))

    def tables(self) -> list[Table]:
        """Return alpha and beta, where there are any."""
        return [*([self.alphas()] if self.alpha else []), *([self.betas()] if self.beta else [])]

    def records(self) -> Records:
        """Return every weight of every round, as learned and as used."""
        lines = [(r, "alpha", client, "", "", v) for client, of in self.alpha.items() for r, v in of.items()]
        for (client, task), layers in self.beta.items():
            lines += [(r, "beta", client, task, layer, v) for layer, of in layers.items() for r, v in of.items()]
        ordered = sorted(lines, key=lambda line: line[0])
        return Records(CSV_WEIGHTS, [(*line, used(line[-1])) for line in ordered])


def weights_of(run: str | Path | Run) -> HyperWeights:
    """Read the hyper weights that a run recorded. Raises StateError where it recorded none."""
    run = run if isinstance(run, Run) else Run.read(run)
    records = list(run.records(HYPER))
    if not records:
        raise StateError(f"{run.folder}: no hyper weights recorded; run with method=fedhca2")
    weights = [(round, client, of) for round, r in records for client, of in r["weights"].items()]
    each = [(not isinstance(of, Mapping), round, client, of) for round, client, of in weights]
    alpha = nested((client, round, number_of(of)) for is_encoder, round, client, of in each if is_encoder)
    beta = nested(
        ((client, task), layer, round, number_of(weight))
        for is_encoder, round, client, of in each
        if not is_encoder
        for task, layers in of.items()
        for layer, weight in layers.items()
    )
    label, rounds = f"{run.recipe['name']}, {run.label}, seed {run.seed}", dict.fromkeys(round for round, _ in records)
    return HyperWeights(label, tuple(rounds), dict(sorted(alpha.items())), dict(sorted(beta.items())))


def draw_weights(several: Sequence[HyperWeights]) -> Chart:
    """Draw one run below the other: the weights as they were used (clamped to [0, 1]).

    alpha of each client over the rounds; beta of each decoder over the rounds, the mean of its layers; and the last
    beta of every decoder and layer (FedHCA2's Figures 6 and 7; 2 and 3 of its supplement).
    """
    drawn = []
    for weights in several:
        if weights.alpha:
            alphas = {client: _by_round([of]) for client, of in weights.alpha.items()}
            drawn.append(_over_rounds(f"{weights.label}: encoder of each client", "α", alphas))  # noqa: RUF001
        if weights.beta:
            named = {" ".join(decoder).strip(): layers for decoder, layers in weights.beta.items()}
            betas = {name: _by_round(layers.values()) for name, layers in named.items()}
            drawn.append(_over_rounds(f"{weights.label}: decoders, mean of their layers", "β", betas))
            last = {name: {layer: used([*of.values()][-1]) for layer, of in by.items()} for name, by in named.items()}
            title = f"{weights.label}: β of the decoders in round {weights.rounds[-1]} or last used"
            drawn.append(charts.heat(last, weights.layers, title=title, value="β", spoken=".3f", numbers=".3f"))
    return charts.concat(drawn, 3)


def _over_rounds(title: str, weight: str, lines: Mapping[str, Mapping[int, Sequence[float]]]) -> Chart:
    """Draw the mean of each line's weights; of many lines, those with the least and the largest end, and a band."""
    means = {name: {r: math.fsum(of) / len(of) for r, of in by.items()} for name, by in lines.items()}
    ranked = sorted(means, key=lambda name: [*means[name].values()][-1])
    named = ranked if len(ranked) <= _NAMED else [ranked[0], ranked[-1]]
    bands = {}
    if rest := [means[name] for name in ranked if name not in named]:
        bands = {f"{len(rest)} more": {r: (min(of), max(of)) for r, of in _by_round(rest).items()}}
    return charts.lines({name: means[name] for name in named}, "round", weight, title=title, bands=bands)


def _by_round(several: Iterable[Series]) -> dict[int, list[float]]:
    """Return round -> the weights of several lines as used, in the order of the rounds."""
    return dict(sorted(grouped((round, used(value)) for of in several for round, value in of.items()).items()))


def _text(value: float) -> str:
    return f"{value:.4f}" if 0 <= value <= 1 else f"{used(value):.4f} ({value:.3g})"


CSV_LOSSES = ("data", "cell", "seed", "best", "best_round", "last", "rounds", "configured", "first_not_finite")


@dataclass(frozen=True)
class RunLosses:
    """One run's validation losses by round, from round 1 on."""

    by_round: Mapping[int, float]
    by_task: Mapping[str, Mapping[int, float]]
    """Task -> round -> mean over the clients with the task."""
    configured: int
    best_round: int | None
    """The round with the least loss; None where no loss is finite."""
    best: float
    """The least loss; nan where no loss is finite."""
    rounds: int
    """The number of rounds."""
    last: float
    """The loss after the last round."""
    first_not_finite: int | None
    """The first round whose loss is nan or infinite."""

    @staticmethod
    def of(run: Run) -> RunLosses:
        """Read the losses of a run. Raises StateError where it has none."""
        losses = run.validation_losses()
        if not losses:
            raise StateError(f"{run.folder}: no validation loss was measured: evaluation.splits needs val")
        finite = {number: loss for number, loss in losses.items() if math.isfinite(loss)}
        best, last = best_round(finite, "min"), max(losses)
        measured = ((final.round, final.values.items()) for final in run.history("val") if final.round)
        by_task = nested((t, round, of["loss"]) for round, values in measured for t, of in values if "loss" in of)
        least, failed = math.nan if best is None else losses[best], min(losses.keys() - finite.keys(), default=None)
        configured = int(run.recipe["training"]["rounds"])
        return RunLosses(losses, by_task, configured, best, least, last, losses[last], failed)


@dataclass(frozen=True)
class GridLosses(HasTable):
    """The losses of all finished runs of a grid, by data set and cell, the least mean first."""

    title: str
    cells: Mapping[Combination, Mapping[int, RunLosses]]
    """(data set, base, add-on) -> seed -> losses."""
    seeds: tuple[int, ...]

    @property
    def by_data(self) -> dict[str, dict[str, Mapping[int, RunLosses]]]:
        """Return data set -> cell -> its runs."""
        return nested((data, together(base, addon), runs) for (data, base, addon), runs in self.cells.items())

    def as_table(self) -> Table:
        """Return one line per cell: the best loss of each seed, mean, deviation and variation of these, and when."""
        several = len(self.seeds) > 1
        head = ("best validation loss", *(f"seed {seed}" for seed in self.seeds))
        head += ("mean", "SD", "CV %") if several else ()
        head += ("in round", "at the end", "rounds", "configured", "not finite from")
        lines = []
        for (data, base, addon), runs in self.cells.items():
            bests = [runs[seed].best if seed in runs else None for seed in self.seeds]
            known = [run.best for run in runs.values()]
            mean = fmean(known)
            spread = stdev(known) if len(known) > 1 and math.isfinite(mean) else math.nan
            over = (
                [loss_text(mean), loss_text(spread), loss_text(100 * spread / (mean or math.nan), 1)] if several else []
            )
            rounds = [run.best_round for run in runs.values() if run.best_round is not None]
            failed = [run.first_not_finite for run in runs.values() if run.first_not_finite is not None]
            lines.append(
                (
                    f"{data}: {together(base, addon)}",
                    *("…" if best is None else loss_text(best) for best in bests),
                    *over,
                    loss_text(fmean(rounds), 1) if rounds else "",
                    loss_text(fmean(run.last for run in runs.values())),
                    loss_text(fmean(run.rounds for run in runs.values()), 1),
                    ", ".join(sorted({str(run.configured) for run in runs.values()})),
                    str(min(failed)) if failed else "",
                )
            )
        about = (
            "Mean over clients of the task-weighted validation loss, as early stopping judges. Not comparable between "
            "cells whose clients hold other tasks or weigh them otherwise. SD: standard deviation over seeds (n - 1); "
            "CV: SD / mean; rounds: means over seeds."
        )
        return Table(self.title, head, tuple(lines), (about,))

    def records(self) -> Records:
        """Return one line per run, in full precision."""
        lines = [
            (data, together(*cell), seed, run.best, run.best_round or None, run.last, run.rounds, run.configured,
             run.first_not_finite or None)
            for (data, *cell), runs in self.cells.items()
            for seed, run in runs.items()
        ]  # fmt: skip
        return Records(CSV_LOSSES, lines)


def loss_text(value: float, digits: int = 4) -> str:
    """Format a loss as people read it: large ones with a power of ten, '' for none."""
    return "nan" if math.isnan(value) else f"{value:.3e}" if abs(value) >= 1e4 else f"{value:.{digits}f}"


def losses_of(grid: Grid, folder: Path, split: str = "test", only: Sequence[str] = ()) -> GridLosses:
    """Read the finished runs with these labels (`select`), the least loss first. Raises StateError without any."""
    wanted = {(cell.data, cell.base, cell.addon) for cell in select(grid, only)}
    runs = {where: result.runs for where, result in read(grid, folder, split).items() if where in wanted}
    if not runs:
        raise StateError(f"grid {grid.name}: no cell of {', '.join(only)} has finished in {folder}")
    cells = {where: {seed: RunLosses.of(run) for seed, run in result.items()} for where, result in runs.items()}

    def place(where: Combination) -> tuple[int, bool, float]:
        mean = fmean(run.best for run in cells[where].values())
        return list(grid.data).index(where[0]), math.isnan(mean), mean

    ordered = {where: cells[where] for where in sorted(cells, key=place)}
    return GridLosses(grid.title or grid.name, ordered, grid.seeds)


def over_rounds(grid: Grid, folder: Path, split: str = "test", only: Sequence[str] = ()) -> Made:
    """Return the losses of one run of each cell round by round: of all tasks together, then of each.

    These are Tables 6.10 and 6.14. The run is the one of the first seed; `only` and errors are as in `losses_of`.
    """
    measured = losses_of(grid, folder, split, only)
    first = {where: min(runs.items()) for where, runs in measured.cells.items()}
    tasks = tuple(dict.fromkeys(task for _, run in first.values() for task in run.by_task))
    lines, records = [], []
    for where, (seed, run) in first.items():
        for number, loss in run.by_round.items():
            losses = (loss, *(run.by_task.get(task, {}).get(number) for task in tasks))  # None where nobody has it
            numbers = ("" if value is None else loss_text(value) for value in losses)
            lines.append((f"{Cell(*where, seed)}, round {number}", *numbers))
            records.append((where[0], together(*where[1:]), seed, number, *losses))
    title, head = f"{measured.title}: validation losses by round", ("", "all tasks", *tasks)
    return Made(Table(title, head, tuple(lines)), Records(("data", "cell", "seed", "round", "all", *tasks), records))
