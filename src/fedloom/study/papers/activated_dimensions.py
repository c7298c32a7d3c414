"""Activated dimensions of a run, read from its records: overlap of the clients, shares per block, and the picture.

The run must have the add-on `activated-dimensions` (FedDEA's Figure 2). Free of torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import combinations, pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from fedloom.core.errors import StateError
from fedloom.federation.runs.reader import Run
from fedloom.study import charts
from fedloom.study.charts import Chart, tenths, thinned
from fedloom.study.tables.output import Cell, HasTables, Records, Table

KIND = "activated-dimensions"
CSV = ("round", "scope", "quantity", "part", "a", "b", "percent")
_MANY = 10  # pairs with a line each; of more, only mean and span are shown
_LINES = 12


@dataclass(frozen=True)
class Activated:
    """The record of one round for one scope ('encoder' or 'all'); see the stage ActivatedDimensions."""

    round: int
    scope: str
    rho: float
    columns: int
    rows: tuple[str, ...]
    blocks: tuple[str, ...]
    parts: tuple[str, ...]
    sizes: tuple[int, ...]
    active: tuple[tuple[int, ...], ...]
    """Rows x blocks: how many activated dimensions lie in a block."""
    shared: tuple[tuple[int, ...], ...]
    """Pairs x blocks: how many are activated by both."""
    bins: tuple[tuple[int, ...], ...]
    """Rows x bins along the flat vector."""
    groups: Mapping[str, Mapping[str, Sequence[float]]]
    """The scope, or a part of it -> overlap, expected or jaccard -> one number per pair."""

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """Return pairs of rows, in the order of the numbers."""
        return tuple(combinations(self.rows, 2))

    @property
    def overlap(self) -> Sequence[float]:
        """Return the overlap of every pair, over the whole scope."""
        return self.groups[self.scope]["overlap"]

    @property
    def expected(self) -> float:
        """Return the overlap of sets drawn independently, mean over the pairs."""
        return fmean(self.groups[self.scope]["expected"] or [self.rho])

    def matrix(self) -> list[list[float]]:
        """Return the overlap of all rows with all rows; 1 on the diagonal."""
        of = {frozenset(pair): value for pair, value in zip(self.pairs, self.overlap, strict=True)}
        return [[1.0 if a == b else of.get(frozenset((a, b)), 0.0) for b in self.rows] for a in self.rows]

    def density(self) -> list[list[float]]:
        """Return rows x bins: the share of a bin's dimensions that is activated."""
        count = len(self.bins[0])
        sizes = [b - a for a, b in pairwise(i * self.columns // count for i in range(count + 1))]
        return [[n / size if size else 0.0 for n, size in zip(row, sizes, strict=True)] for row in self.bins]


@dataclass(frozen=True)
class Overlaps(HasTables):
    """The numbers of one run and scope. `rounds` are the rounds that recorded something, in order."""

    label: str
    rounds: tuple[Activated, ...]

    @property
    def scope(self) -> str:
        """Return the scope of the numbers."""
        return self.rounds[0].scope

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

    def series(self, pair: tuple[str, str]) -> list[tuple[int, float]]:
        """Return (round, overlap) of one pair, for the rounds in which both took part."""
        return [(r.round, value) for r in self.rounds for p, value in zip(r.pairs, r.overlap, strict=True) if p == pair]

    def agreement(self) -> Table:
        """Return the overlap in percent: rounds by pairs; of a long run, some rounds evenly spaced."""
        pairs = self.pairs if len(self.pairs) <= _MANY else ()
        lines = []
        for r in thinned(self.rounds, _LINES):
            of = dict(zip(r.pairs, r.overlap, strict=True))
            each = [_percent(of[p]) if p in of else "" for p in pairs]
            values = list(of.values())
            span = [_percent(f(values)) if values else "" for f in (fmean, min, max)]
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
        lines: list[Sequence[Cell]] = []
        for r in self.rounds:
            for part, numbers in r.groups.items():
                for quantity, values in numbers.items():
                    for (a, b), value in zip(r.pairs, values, strict=True):
                        lines.append((r.round, r.scope, quantity, part, a, b, 100 * value))
            for row in r.rows:
                for i, block in enumerate(r.blocks):
                    lines.append((r.round, r.scope, "share", block, row, "", 100 * _share(r, row, [i])))
        return Records(CSV, lines)


def table(run: str | Path | Run, scope: str | None = None) -> Overlaps:
    """Read the activated dimensions that a run recorded, over the encoder where there is one.

    Raises StateError where the run recorded nothing of the kind, or nothing of that scope.
    """
    run = run if isinstance(run, Run) else Run.read(run)
    known = {f.name for f in fields(Activated)} - {"round"}
    lines = [
        Activated(round, **{name: _frozen(value) for name, value in record.items() if name in known})
        for round, record in run.records(KIND)
    ]
    if not lines:
        raise StateError(f"{run.folder}: no activated dimensions recorded; run with the add-on: method.add.{KIND}={{}}")
    scopes = {r.scope for r in lines}
    scope = scope or ("encoder" if "encoder" in scopes else "all")
    if scope not in scopes:
        raise StateError(f"{run.folder}: no activated dimensions of {scope!r}; recorded: {', '.join(sorted(scopes))}")
    label = f"{run.recipe['name']}, {run.label.replace(f' + {KIND}', '')}, seed {run.seed}"
    return Overlaps(label, tuple(r for r in lines if r.scope == scope))


def picture(several: Sequence[Overlaps]) -> Chart:
    """Draw one run below the other.

    Left, as FedDEA's Figure 2: the dimensions along the flat vector, in the first and in the last round; then the
    overlap of all pairs; then overlap over the rounds, against sets drawn independently.
    """
    drawn = []
    for overlaps in several:
        shown = _ends(overlaps)
        top = 100 * max(value for r in shown for row in r.density() for value in row) or 1.0
        for r in shown:
            places = [round(i * r.columns / len(r.bins[0])) for i in range(len(r.bins[0]))]
            density = {
                n: dict(zip(places, (100 * v for v in of), strict=True))
                for n, of in zip(r.rows, r.density(), strict=True)
            }
            title = f"{overlaps.title}, round {r.round}"
            drawn.append(
                charts.heat(density, places, title=title, along="dimension", value="% activated", low=0, high=top)
            )
        for r in shown:
            matrix = {
                a: {b: 100 * v for b, v in zip(r.rows, of, strict=True)}
                for a, of in zip(r.rows, r.matrix(), strict=True)
            }
            title = f"round {r.round}: overlap, %"
            drawn.append(charts.heat(matrix, r.rows, title=title, value="overlap, %", low=0, high=100, numbers=".0f"))
        pairs = {" & ".join(pair): {a: 100 * b for a, b in overlaps.series(pair)} for pair in overlaps.pairs}
        mean = {"mean of all pairs": {r.round: 100 * fmean(r.overlap) for r in overlaps.rounds if r.overlap}}
        independent = {"if independent": {r.round: 100 * r.expected for r in overlaps.rounds}}
        lines = (pairs if len(pairs) <= _MANY else mean) | independent
        rest = tenths([*pairs.values()], [r.round for r in overlaps.rounds]) if len(pairs) > _MANY else {}
        bands = {f"10 % to 90 % of {len(pairs)} pairs": rest} if rest else {}
        look: dict[str, Any] = {"dashed": independent, "strong": mean, "zero": True, "bands": bands}
        drawn.append(charts.lines(lines, "round", "overlap, %", title="overlap, %", **look))
    return charts.concat(drawn, 5)


def _ends(overlaps: Overlaps) -> tuple[Activated, ...]:
    """Return the first and the last round, or the only one."""
    return (overlaps.rounds[0], *overlaps.rounds[1:][-1:])


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def _share(r: Activated, row: str, blocks: Sequence[int]) -> float:
    """Return the share of a row's activated dimensions in some blocks."""
    counts = r.active[r.rows.index(row)]
    return sum(counts[i] for i in blocks) / (sum(counts) or 1)


def _percent(value: float) -> str:
    return f"{100 * value:.1f}"


def _prefixes(names: Sequence[str]) -> list[str]:
    """Cut names to the most components that leave at most _LINES different names, and to one component at least."""
    most = max(name.count(".") for name in names) + 1
    for depth in range(most, 1, -1):
        cut = [".".join(name.split(".")[:depth]) for name in names]
        if len(set(cut)) <= _LINES:
            return cut
    return [name.split(".")[0] for name in names]
