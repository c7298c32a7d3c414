"""Rules that a few hostile rows cannot own, as coefficients of the rows: all from their Gram matrix (K x K, float64).

Nothing depends on the scale of the rows, and no finite row makes another's coefficient nan. Each row becomes what its
group, the clients with the same tasks, says: of 6 rows of one task and 2 of another, all honest, Multi-Krum (f = 2)
would keep only the 6.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations

import torch
from torch import Tensor

from fedloom.core.context import Ctx, State
from fedloom.core.gram import gram
from fedloom.core.layout import pieces
from fedloom.core.mean import problems
from fedloom.core.stage import Stage, Traits
from fedloom.core.updates import Updates
from fedloom.methods.robust import CentredClipSettings, RobustSettings


def squared_distances(G: Tensor) -> Tensor:
    """Return |X_i - X_j|^2 (K x K)."""
    size = G.diagonal()
    return (size[:, None] + size[None, :] - 2 * G).clamp(min=0)


def krum_order(G: Tensor, f: int) -> Tensor:
    """Return positions (K) by each row's sum of squared distances to its K - f nearest rows, itself among them."""
    scores = squared_distances(G).sort(dim=1).values[:, : len(G) - f].sum(1)
    return scores.argsort(stable=True)


def mean_of(G: Tensor, positions: Tensor) -> Tensor:
    """Return W (K x K) that replaces every row by the mean of those at these positions."""
    W = torch.zeros_like(G)
    W[:, positions] = 1 / len(positions)
    return W


def nearest(G: Tensor, count: int) -> Tensor:
    """Return positions of the `count` rows that are nearest to each row (K x count), itself first; ties by position."""
    D = squared_distances(G)
    D.fill_diagonal_(-1.0)
    return D.argsort(dim=1, stable=True)[:, :count]


def distances_to(G: Tensor, c: Tensor) -> Tensor:
    """Return |X_i - sum_j c_j X_j| (K)."""
    inner = G @ c
    return (G.diagonal() - 2 * inner + c @ inner).clamp(min=0).sqrt()


def geometric_median(G: Tensor, iterations: int = 100) -> Tensor:
    """Return c (K, sums to 1) such that sum_i |X_i - sum_j c_j X_j| is least, by the smoothed Weiszfeld algorithm.

    c_i <- (1 / max(nu, |X_i - v|)) / sum with nu a millionth of the smallest distance between two different rows. It
    begins with the rows weighted by the inverse of their median distance to all, for from the mean it would need a step
    for every power of two by which some rows are too large; and ends where no coefficient moves by more than 1e-12.
    """
    D = squared_distances(G).sqrt()
    if not bool((D > 0).any()):
        return torch.full((len(G),), 1 / len(G), dtype=G.dtype)
    nu = 1e-6 * float(D[D > 0].min())
    c = 1 / D.median(dim=1).values.clamp(min=nu)
    c = c / c.sum()
    for _ in range(iterations):
        before, c = c, 1 / distances_to(G, c).clamp(min=nu)
        c = c / c.sum()
        if float((c - before).abs().max()) <= 1e-12:
            break
    return c


def clipping(sizes: Tensor, limit: float | None) -> Tensor:
    """Return factors (K) that bring sizes above `limit`, None for their lower median, down to it."""
    bound = sizes.median() if limit is None else torch.tensor(limit, dtype=sizes.dtype)
    return torch.where(sizes > bound, bound / sizes, 1.0)


def centred_clip(G: Tensor, limit: float | None, iterations: int, start: int | None) -> Tensor:
    """Return c (K) of v after v <- v + mean_i (X_i - v) min(1, limit / |X_i - v|), from row `start`, None for v = 0.

    Without a limit each step uses the lower median of the distances |X_i - v|.
    """
    c = torch.zeros(len(G), dtype=G.dtype)
    if start is not None:
        c[start] = 1.0
    for _ in range(iterations):
        factors = clipping(distances_to(G, c), limit)
        c = c * (1 - factors.mean()) + factors / len(G)
    return c


def in_order(X: Tensor) -> Tensor:
    """Return each column's values in ascending order (K x columns), nan as if it were inf.

    Rows are compared two at a time, as Batcher's odd-even merge sort says (AFIPS 1968): for some thousand columns,
    which stay in a cache, this is several times as fast as sorting column by column.
    """
    rows = list(torch.where(X.isnan(), torch.inf, X).unbind(0))
    spare = torch.empty_like(X[0])
    for low, high in _comparisons(len(rows)):
        torch.minimum(rows[low], rows[high], out=spare)
        torch.maximum(rows[low], rows[high], out=rows[high])
        rows[low], spare = spare, rows[low]
    return torch.stack(rows)


def _comparisons(count: int) -> Iterator[tuple[int, int]]:
    """Return the pairs of positions that are put in order, one after another, to sort any `count` values."""
    merged = 1
    while merged < count:
        apart = merged
        while apart:
            for first in range(apart % merged, count - apart, 2 * apart):
                for i in range(first, first + min(apart, count - first - apart)):
                    if i // (2 * merged) == (i + apart) // (2 * merged):
                        yield i, i + apart
            apart //= 2
        merged *= 2


_COLUMNS = 1 << 14  # that are sorted at a time
Problem = tuple[list[slice], Tensor]
"""Columns, and the positions of the rows of one group that have them."""


@dataclass(frozen=True)
class Robust(RobustSettings, Stage):
    """Base of robust rules: rows that hold the same tasks (or `within` "all" rows) are a group of their own.

    `f` is how many rows of a group may be hostile, None for as many as a majority bears, (K - 1) // 2. Rows that have
    different blocks of the model are compared in those that they share. A group, or a block that only some rows of a
    group have, with fewer than 2 f + 1 rows (3 without f) gets no update, which is logged. Weights play no part within
    a group. `extra:tasks` are the tasks of a row's client; without it all rows are one group.
    """

    @property
    def robust(self) -> bool:  # type: ignore[override]
        """True if one row may be hostile."""
        return self.f != 0

    @property
    def least(self) -> int:
        """The fewest rows of a group."""
        return 3 if self.f is None else 2 * self.f + 1

    def unfit(self, rows: Updates | None, most: float = math.inf) -> Iterator[str]:
        if rows is None:
            yield (
                f"{self!r} chooses among the rows of a group, of which a peer hears too few to outvote a liar; at "
                "peers there are clip and centred-clip, around the peer's own row"
            )
            return
        for columns, members in self._problems(rows):
            if len(members) < self.least:
                clients = ", ".join(rows.rows[i][0] for i in members.tolist())
                block = rows.layout.names[[s.start for s in rows.layout.slices].index(columns[0].start)]
                yield (
                    f"{self!r} needs at least {self.least} rows in a group, but {block} has "
                    f"{len(members)} ({clients}); a group is the clients that hold the same tasks, or with "
                    "within: all those that have the block; more clients or a smaller f would do"
                )

    def _problems(self, updates: Updates, together: bool = False) -> Iterator[Problem]:
        tasks_of = updates.extra.get("tasks") if self.within == "tasks" and not together else None
        names = [""] * len(updates) if tasks_of is None else [str(tasks) for tasks in tasks_of]
        for name in sorted(set(names)):
            group = torch.tensor([i for i, other in enumerate(names) if other == name])
            present = None if updates.present is None else updates.present[group]
            parts = problems(updates.layout, present, len(group))
            yield from ((columns, group[rows]) for columns, rows in parts if len(rows))

    def _fit(self, updates: Updates, ctx: Ctx) -> tuple[list[Problem], bool]:
        """Return (the problems with enough rows, whether no row is in two problems), and log those with too few."""
        fit, all_ = [], list(self._problems(updates, together=ctx.peer is not None))
        once = sum(len(members) for _, members in all_) <= len(updates)
        for columns, members in all_:
            if ctx.peer is not None or len(members) >= self.least:
                fit.append((columns, members))
                continue
            clients = ", ".join(updates.rows[i][0] for i in members.tolist())
            why = f"{len(members)} rows found, expected at least {self.least}"
            ctx.log("no update", {"rule": type(self).__name__, "clients": clients, "why": why})
        return fit, once

    def _bears(self, k: int) -> int:
        """Return the f that applies among k rows."""
        return (k - 1) // 2 if self.f is None else self.f


class ByGram(Robust):
    """Rules that look at inner products only: new rows are combinations of a group's rows."""

    @cached_property
    def traits(self) -> Traits:
        wants = {"extra:tasks"} if self.within == "tasks" else set()
        return Traits("mix", wants=wants, separable=True, presence="row")

    def mixing(self, G: Tensor, f: int, own: int | None) -> Tensor:
        """Return W (K x K) for the Gram matrix of a group. `own` is the peer's own, trusted row; None at a server."""
        raise NotImplementedError

    def __call__(self, updates: Updates, state: State, ctx: Ctx) -> tuple[Updates, State]:
        fit, once = self._fit(updates, ctx)
        if not len(updates):
            return updates, state
        whole = gram(updates) if once else None
        W = torch.zeros(len(updates), len(updates), dtype=torch.float64)
        X = None if once else updates.empty(len(updates)).zero_()
        for columns, members in fit:
            group = [updates.rows[i][0] for i in members.tolist()]
            own = group.index(ctx.peer) if ctx.peer in group else None
            G = (gram(updates, columns) if whole is None else whole)[members][:, members]
            mixing = self.mixing(G, self._bears(len(group)), own)
            if X is None:
                W[members[:, None], members] = mixing
                continue
            for s in columns:
                X[members, s] = mixing.to(X) @ updates.X[members, s]
        return (updates.mixed(W) if X is None else updates.replace(X=X)), state


class AroundOwn(ByGram):
    """Rules that at a peer need no majority, because they keep to the peer's own row; there all rows are one group."""

    def unfit(self, rows: Updates | None, most: float = math.inf) -> Iterator[str]:
        return iter(()) if rows is None else super().unfit(rows, most)


@dataclass(frozen=True)
class Krum(ByGram):
    """The row that is nearest to its K - f nearest rows, for every row (Blanchard et al., NeurIPS 2017)."""

    def mixing(self, G: Tensor, f: int, own: int | None) -> Tensor:
        return mean_of(G, krum_order(G, f)[:1])


@dataclass(frozen=True)
class MultiKrum(ByGram):
    """The mean of the K - f rows with the best Krum scores, for every row (Blanchard et al., NeurIPS 2017)."""

    def mixing(self, G: Tensor, f: int, own: int | None) -> Tensor:
        return mean_of(G, krum_order(G, f)[: len(G) - f])


@dataclass(frozen=True)
class MinimumDiameter(ByGram):
    """The mean of the K - f rows with the smallest diameter, for every row (MDA: El-Mhamdi et al., PODC 2020)."""

    def unfit(self, rows: Updates | None, most: float = math.inf) -> Iterator[str]:
        yield from super().unfit(rows, most)
        for _, members in () if rows is None else self._problems(rows):
            k = int(min(len(members), most))
            f = self._bears(k)
            if (count := math.comb(k, f)) > _SETS:
                fewer = max(f for f in range((k + 1) // 2) if math.comb(k, f) <= _SETS)
                yield (
                    f"{self!r} would try {count:,} sets of {k - f} of {k} rows, expected at most {_SETS:,}: f may be "
                    f"up to {fewer} here; multi-krum needs no sets"
                )

    def mixing(self, G: Tensor, f: int, own: int | None) -> Tensor:
        D = squared_distances(G)
        sets = torch.tensor(list(combinations(range(len(G)), len(G) - f)))
        widest = torch.zeros(len(sets), dtype=G.dtype)
        for i, j in combinations(sets.unbind(1), 2):
            widest = torch.maximum(widest, D[i, j])
        return mean_of(G, sets[widest.argmin()])


_SETS = 100_000  # the most sets of rows that `MinimumDiameter` tries: 20 rows with f = 7 have 77,520


@dataclass(frozen=True)
class NearestMix(ByGram):
    """The mean of each row's K - f nearest rows, including itself (NNM: Allouah et al., AISTATS 2023)."""

    robust = False  # a hostile row stays a part of its own mean

    def mixing(self, G: Tensor, f: int, own: int | None) -> Tensor:
        return torch.zeros_like(G).scatter_(1, nearest(G, len(G) - f), 1 / (len(G) - f))


@dataclass(frozen=True)
class GeometricMedian(ByGram):
    """The geometric median of the group, for every row (RFA: Pillutla et al., IEEE TSP 2022)."""

    def mixing(self, G: Tensor, f: int, own: int | None) -> Tensor:
        return geometric_median(G).expand(len(G), -1)


@dataclass(frozen=True)
class CentredClip(CentredClipSettings, AroundOwn):
    """Every row becomes v: v <- v + mean_i (X_i - v) min(1, limit / |X_i - v|), `steps` times; see `centred_clip`."""

    def mixing(self, G: Tensor, f: int, own: int | None) -> Tensor:
        return centred_clip(G, self.limit, self.steps, own).expand(len(G), -1)


@dataclass(frozen=True)
class ClipNorms(AroundOwn):
    """A clip of norms (at a peer, of differences to its own row) to the median of the group; see the add-on `clip`."""

    def mixing(self, G: Tensor, f: int, own: int | None) -> Tensor:
        centre = torch.zeros(len(G), dtype=G.dtype)
        if own is not None:
            centre[own] = 1.0
        factors = clipping(distances_to(G, centre), None)
        return torch.diag(factors) + (1 - factors)[:, None] * centre


class ByCoordinate(Robust):
    """Rules that look at each column alone: all rows of a group become the same vector."""

    @cached_property
    def traits(self) -> Traits:
        wants = {"extra:tasks"} if self.within == "tasks" else set()
        return Traits("matrix", wants=wants, separable=True, presence="block")

    def combined(self, ordered: Tensor, f: int) -> Tensor:
        """Return one value per column, from a column's values in ascending order (K x columns)."""
        raise NotImplementedError

    def __call__(self, updates: Updates, state: State, ctx: Ctx) -> tuple[Updates, State]:
        X = updates.empty(len(updates)).zero_()
        for columns, members in self._fit(updates, ctx)[0]:
            f = self._bears(len(members))
            for s in columns:
                for part in pieces(s, _COLUMNS):
                    X[members, part] = self.combined(in_order(updates.X[members, part]), f)
        return updates.replace(X=X), state


@dataclass(frozen=True)
class TrimmedMean(ByCoordinate):
    """The mean of each coordinate without its f smallest and f largest values (Yin et al., ICML 2018)."""

    def combined(self, ordered: Tensor, f: int) -> Tensor:
        return ordered[f : len(ordered) - f].mean(0)


@dataclass(frozen=True)
class Median(ByCoordinate):
    """The median of each coordinate; for an even number of rows, the mean of the middle two (Yin et al., ICML 2018)."""

    def combined(self, ordered: Tensor, f: int) -> Tensor:
        k = len(ordered)
        return ordered[(k - 1) // 2 : k // 2 + 1].mean(0)
