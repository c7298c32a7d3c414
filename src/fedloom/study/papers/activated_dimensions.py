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
from fedloom.core.extras import figure, save_figure
from fedloom.federation.runs.reader import Run
from fedloom.study.tables.sheet import Cell, Recorded, Records, Sheet

KIND = "activated-dimensions"
CSV = ("round", "scope", "quantity", "part", "a", "b", "percent")
_MANY = 10  # pairs that are told apart; of more, only mean and span are shown
_LINES = 12


@dataclass(frozen=True)
class Activated:
    """What one round recorded for one scope ('encoder' or 'all'); see the stage ActivatedDimensions."""

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
        """Pairs of rows, in the order of the numbers."""
        return tuple(combinations(self.rows, 2))

    @property
    def overlap(self) -> Sequence[float]:
        """Of every pair, over the whole scope."""
        return self.groups[self.scope]["overlap"]

    @property
    def expected(self) -> float:
        """The overlap of sets drawn independently, mean over the pairs."""
        return fmean(self.groups[self.scope]["expected"] or [self.rho])

    def matrix(self) -> list[list[float]]:
        """Overlap of all rows with all rows; 1 on the diagonal."""
        of = dict(zip(self.pairs, self.overlap, strict=True))
        return [[1.0 if a == b else of.get((a, b), of.get((b, a), 0.0)) for b in self.rows] for a in self.rows]

    def density(self) -> list[list[float]]:
        """Rows x bins: which share of a bin's dimensions is activated."""
        count = len(self.bins[0])
        sizes = [b - a for a, b in pairwise(i * self.columns // count for i in range(count + 1))]
        return [[n / size if size else 0.0 for n, size in zip(row, sizes, strict=True)] for row in self.bins]


@dataclass(frozen=True)
class Overlaps(Recorded):
    """The numbers of one run and scope. `rounds` are the rounds that recorded something, in order."""

    label: str
    rounds: tuple[Activated, ...]

    @property
    def scope(self) -> str:
        return self.rounds[0].scope

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """All pairs that ever met in a round."""
        rows = sorted({row for r in self.rounds for row in r.rows})
        met = {pair for r in self.rounds for pair in r.pairs}
        return tuple(pair for pair in combinations(rows, 2) if pair in met)

    @property
    def title(self) -> str:
        first = self.rounds[0]
        return f"{self.label}: top {100 * first.rho:.3g} % of {first.columns:,} dimensions ({first.scope})"

    def series(self, pair: tuple[str, str]) -> list[tuple[int, float]]:
        """(round, overlap) of one pair, for the rounds in which both took part."""
        return [(r.round, value) for r in self.rounds for p, value in zip(r.pairs, r.overlap, strict=True) if p == pair]

    def agreement(self) -> Sheet:
        """Overlap in percent: rounds by pairs; of a long run, some rounds evenly spaced."""
        pairs = self.pairs if len(self.pairs) <= _MANY else ()
        lines = []
        for r in _spread(self.rounds):
            of = dict(zip(r.pairs, r.overlap, strict=True))
            each = [_percent(of[p]) if p in of else "" for p in pairs]
            values = list(of.values())
            span = [_percent(f(values)) if values else "" for f in (fmean, min, max)]
            lines.append((str(r.round), *each, *span, _percent(r.expected)))
        head = ("round", *(f"{a} & {b}" for a, b in pairs), "mean", "least", "most", "if independent")
        return Sheet(f"{self.title}: overlap in percent", head, tuple(lines))

    def shares(self) -> Sheet:
        """Where each client's activated dimensions lie, in percent: first round > last round."""
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
        return Sheet(title, ("blocks", "of all dimensions", *rows), tuple(lines))

    def to_text(self) -> str:
        """Both tables for a terminal."""
        return f"{self.agreement().to_text()}\n{self.shares().to_text()}"

    def to_markdown(self) -> str:
        """Both tables in Markdown."""
        return f"{self.agreement().to_markdown()}\n{self.shares().to_markdown()}"

    def records(self) -> Records:
        """All numbers of every round, in percent: overlap, expected and jaccard of pairs; share of rows by block."""
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
    """What a run recorded about its activated dimensions, over the encoder where there is one.

    Raises StateError where the run recorded nothing of the kind, or nothing of that scope.
    """
    run = run if isinstance(run, Run) else Run.read(run)
    found = [_activated(round, record) for round, record in run.records(KIND)]
    if not found:
        raise StateError(f"{run.folder}: no activated dimensions recorded; run with the add-on: method.add.{KIND}={{}}")
    scopes = {r.scope for r in found}
    scope = scope or ("encoder" if "encoder" in scopes else "all")
    if scope not in scopes:
        raise StateError(f"{run.folder}: no activated dimensions of {scope!r}; recorded: {', '.join(sorted(scopes))}")
    label = f"{run.recipe['name']}, {run.label.replace(f' + {KIND}', '')}, seed {run.seed}"
    return Overlaps(label, tuple(r for r in found if r.scope == scope))


def draw(run: str | Path | Run | Overlaps, path: str | Path, scope: str | None = None) -> None:
    """Draw a run's picture (see `picture`) to a file; its ending (.png, .svg, .pdf) says the format."""
    save_figure(picture([run if isinstance(run, Overlaps) else table(run, scope)]), path)


def picture(several: Sequence[Overlaps]) -> Any:
    """A matplotlib Figure, one run below the other.

    Left, as FedDEA's Figure 2: the dimensions along the flat vector, in the first and in the last round; middle: the
    overlap of all pairs; right: overlap over the rounds, against sets drawn independently.
    """
    heights = []
    for found in several:
        shown = _ends(found)
        heights.append(len(shown) * (1.3 + 0.32 * max(4, *(len(r.rows) for r in shown))) + 0.7)
    whole = figure(15, sum(heights), dpi=110)
    pages = whole.subfigures(len(several), 1, squeeze=False, height_ratios=heights)[:, 0]
    for page, found in zip(pages, several, strict=True):
        _page(page, found)
    return whole


def _page(page: Any, found: Overlaps) -> None:
    page.suptitle(found.title)
    shown = _ends(found)
    grid = page.add_gridspec(len(shown), 3, width_ratios=(5, 2.2, 3.4))
    top = max(value for r in shown for row in r.density() for value in row) or 1.0
    for i, r in enumerate(shown):
        strip = page.add_subplot(grid[i, 0])
        image = strip.imshow(
            [[100 * v for v in row] for row in r.density()],
            aspect="auto",
            interpolation="nearest",
            cmap="magma_r",
            vmin=0,
            vmax=100 * top,
            extent=(0, r.columns, len(r.rows) - 0.5, -0.5),
        )
        strip.set_yticks(range(len(r.rows)), r.rows)
        strip.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        strip.set_xlabel("dimension" if i == len(shown) - 1 else "")
        strip.set_title(f"round {r.round}: activated dimensions", fontsize=10)
        page.colorbar(image, ax=strip, pad=0.01, label="% activated")
        _square(page.add_subplot(grid[i, 1]), r)
    _lines(page.add_subplot(grid[:, 2]), found)


def _lines(axes: Any, found: Overlaps) -> None:
    pairs = found.pairs
    for pair in pairs:
        x, y = zip(*((a, 100 * b) for a, b in found.series(pair)), strict=True)
        many = {"color": "0.8", "linewidth": 0.8} if len(pairs) > _MANY else {"label": " & ".join(pair)}
        axes.plot(x, y, marker="." if len(x) < 20 else None, **many)
    means = [(r.round, 100 * fmean(r.overlap)) for r in found.rounds if r.overlap]
    if len(pairs) > _MANY:
        axes.plot(*zip(*means, strict=True), color="black", label="mean of all pairs")
    independent = [(r.round, 100 * r.expected) for r in found.rounds]
    axes.plot(*zip(*independent, strict=True), color="black", linestyle="--", label="if independent")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("round")
    axes.set_title("overlap, %", fontsize=10)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(fontsize=8, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.15))


def _ends(found: Overlaps) -> tuple[Activated, ...]:
    """The first and the last round, or the only one."""
    return (found.rounds[0], *found.rounds[1:][-1:])


def _square(axes: Any, r: Activated) -> None:
    matrix = r.matrix()
    axes.imshow([[100 * v for v in row] for row in matrix], cmap="Blues", vmin=0, vmax=100)
    short = r.rows if len(r.rows) <= _MANY else [""] * len(r.rows)
    axes.set_xticks(range(len(r.rows)), short, rotation=45, ha="right")
    axes.set_yticks(range(len(r.rows)), short)
    axes.set_title(f"round {r.round}: overlap, %", fontsize=10)
    if len(r.rows) <= _MANY:
        for i, row in enumerate(matrix):
            for j, value in enumerate(row):
                color = "white" if value > 0.6 else "black"
                axes.text(j, i, f"{100 * value:.0f}", ha="center", va="center", fontsize=8, color=color)


def _activated(round: int, record: Mapping[str, Any]) -> Activated:
    known = {f.name for f in fields(Activated)} - {"round"}
    return Activated(round, **{name: _frozen(value) for name, value in record.items() if name in known})


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def _share(r: Activated, row: str, blocks: Sequence[int]) -> float:
    """Which share of a row's activated dimensions lies in some blocks."""
    counts = r.active[r.rows.index(row)]
    return sum(counts[i] for i in blocks) / (sum(counts) or 1)


def _percent(value: float) -> str:
    return f"{100 * value:.1f}"


def _spread(rounds: Sequence[Activated]) -> list[Activated]:
    """At most _LINES of them, first and last included."""
    last = len(rounds) - 1
    return [rounds[i] for i in sorted({round(j * last / (_LINES - 1)) for j in range(_LINES)})]


def _prefixes(names: Sequence[str]) -> list[str]:
    """Names cut to the most components that leave at most _LINES different names, and to one component at least."""
    most = max(name.count(".") for name in names) + 1
    for depth in range(most, 1, -1):
        cut = [".".join(name.split(".")[:depth]) for name in names]
        if len(set(cut)) <= _LINES:
            return cut
    return [name.split(".")[0] for name in names]
