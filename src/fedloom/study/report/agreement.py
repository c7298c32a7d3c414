"""The agreement and the weights of updates, from a run's diagnostics.jsonl (see `rounds/diagnostics.py`)."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations
from typing import Any

from fedloom.core.errors import StateError
from fedloom.federation.runs.reader import Run, mean_of

FILE = "diagnostics.jsonl"
IN_CONFLICT = "share of pairs in conflict (cosine below 0)"
"""The name of these lines over the rounds."""
EVERYONE = "everyone"
"""The name of a row that all clients receive."""
MOST = 50
"""Rows of a matrix, at most: those that occur in the most rounds."""

MASKED = 0.95
"""The shares of updates that are not zero are shown where one is below this; a few zeros occur without any mask."""

Series = Mapping[int, float]
Cells = Mapping[int, Mapping[str, Mapping[str, float | None]]]
"""Round -> row -> column -> number."""


@dataclass(frozen=True)
class UpdateAgreement:
    """The diagnostics of a run by layer group ('encoder stem to layer1', 'decoder of depth')."""

    cosine: Mapping[str, Cells] = field(default_factory=dict)
    """Group -> the cosine of every two updates."""
    sign: Mapping[str, Cells] = field(default_factory=dict)
    """Group -> share of the columns in which two updates have the same sign."""
    rows: tuple[str, ...] = ()
    """Names of the rows of these matrices."""
    over_rounds: Mapping[str, Mapping[str, Series]] = field(default_factory=dict)
    """'mean cosine' ... -> group -> value."""
    weights: Mapping[str, Mapping[str, Series]] = field(default_factory=dict)
    """Group -> row -> its weight in the one row that all receive; empty where the rounds make more rows."""
    given: Mapping[str, Cells] = field(default_factory=dict)
    """Group -> the weights of senders (columns) in what each receiver gets (rows); empty where all get the same."""
    receivers: tuple[str, ...] = ()
    kept: Mapping[str, Mapping[str, Series]] = field(default_factory=dict)
    """Group -> row -> share of the update that is not zero, for groups where some share is below MASKED."""
    note: str = ""


@dataclass(frozen=True)
class _Look:
    """One record, with names in place of positions."""

    round: int
    rows: tuple[str, ...]
    out: tuple[str, ...]
    shown: tuple[str, ...]
    peer: str | None
    groups: Sequence[Mapping[str, Any]]

    @cached_property
    def pairs(self) -> list[tuple[str, str]]:
        """Return the two updates of each number of a group's `cosine` and `sign`."""
        if self.peer is None:
            return list(combinations(self.shown, 2))
        return [(first, other) for first in self.shown[:1] for other in self.shown[1:]]


def collect(run: Run) -> UpdateAgreement | None:
    """Read the diagnostics of a run; None without any. Raises StateError for a file of other contents."""
    try:
        looks = [_look(line["round"], about) for line in run.log(FILE) for about in line["diagnostics"]]
    except (KeyError, TypeError, IndexError) as error:
        raise StateError(f"{run.folder / FILE}: not what diagnostics are: {error!r}") from None
    looks = [look for look in looks if look.round <= run.last_round and look.groups]
    if not looks:
        return None
    cosine, sign = _matrices(looks, "cosine"), _matrices(looks, "sign")
    often = Counter(name for look in looks for name in look.shown)
    single = all(len(look.out) == 1 and look.peer is None for look in looks)
    weights, given = (_by_row(looks, "weights"), {}) if single else ({}, _given(looks))
    receivers = Counter(name for cells in given.values() for rows in cells.values() for name in rows)
    senders = Counter(n for cells in given.values() for rows in cells.values() for row in rows.values() for n in row)
    kept = {
        group: rows
        for group, rows in _by_row(looks, "kept").items()
        if any(v < MASKED for series in rows.values() for v in series.values())
    }
    return UpdateAgreement(
        cosine,
        sign,
        _most(often),
        _over_rounds(cosine, sign),
        weights,
        given,
        _most(receivers + senders),
        kept,
        _note(looks),
    )


def _look(round: int, about: Mapping[str, Any]) -> _Look:
    rows = tuple(_name(*key) for key in about["rows"])
    peer = about.get("peer")
    out = tuple(peer if peer is not None and key[0] == "*" and key[1] is None else _name(*key) for key in about["out"])
    return _Look(int(round), rows, out, tuple(rows[i] for i in about["shown"]), peer, about["groups"])


def _name(client: str, task: str | None) -> str:
    if client == "*":
        return EVERYONE if task is None else task
    return client if task is None else f"{client} · {task}"


def _group(group: Mapping[str, Any]) -> str:
    if group["task"] is not None:
        return f"{group['part']} of {group['task']}"
    prefix = f"{group['part']}."  # names of tensors begin with it, as a rule
    return f"{group['part']}: {' to '.join(name.removeprefix(prefix) for name in group['layers'].split(' to '))}"


def _most(names: Counter[str]) -> tuple[str, ...]:
    return tuple(sorted(name for name, _ in names.most_common(MOST)))


def _matrices(looks: Sequence[_Look], what: str) -> dict[str, Cells]:
    matrices: dict[str, dict[int, dict[str, dict[str, float | None]]]] = {}
    for look in looks:
        for group in look.groups:
            cells = matrices.setdefault(_group(group), {}).setdefault(look.round, defaultdict(dict))
            for (a, b), value in zip(look.pairs, group[what], strict=True):
                cells[a][b] = cells[b][a] = value
    # a group that never had two rows has no pairs to show
    return {name: cells for name, cells in matrices.items() if any(_values(of) for of in cells.values())}


def _values(cells: Mapping[str, Mapping[str, float | None]]) -> list[float]:
    """Return each pair once."""
    return [v for a, row in cells.items() for b, v in row.items() if a < b and v is not None]


def _over_rounds(cosine: Mapping[str, Cells], sign: Mapping[str, Cells]) -> dict[str, dict[str, Series]]:
    def each(of: Mapping[str, Cells], number: Callable[[list[float]], float]) -> dict[str, Series]:
        values = {group: {r: _values(cells) for r, cells in by.items()} for group, by in of.items()}
        return {group: {r: number(vs) if vs else math.nan for r, vs in by.items()} for group, by in values.items()}

    curves = {
        "mean cosine of two updates": each(cosine, mean_of),
        IN_CONFLICT: each(cosine, lambda vs: sum(v < 0 for v in vs) / len(vs)),
        "mean share of equal signs": each(sign, mean_of),
    }
    return {name: lines for name, lines in curves.items() if lines}


def _by_row(looks: Sequence[_Look], what: str) -> dict[str, dict[str, dict[int, float]]]:
    """Return group -> row -> number, of `kept`, or of the only row of `weights`."""
    rows: dict[str, dict[str, dict[int, float]]] = {}
    for look in looks:
        for group in look.groups:
            values = group.get(what) or ()
            numbers = values[0] if what == "weights" and values else values
            for name, value in zip(look.rows, numbers, strict=False):
                # several peers report the same row with the same number
                if value is not None and look.peer in (None, name):
                    rows.setdefault(_group(group), {}).setdefault(name, {})[look.round] = value
    return rows


def _given(looks: Sequence[_Look]) -> Mapping[str, Cells]:
    given: dict[str, dict[int, dict[str, Mapping[str, float | None]]]] = {}
    for look in looks:
        for group in look.groups:
            for to, numbers in zip(look.out, group.get("weights") or (), strict=False):
                if any(v is not None for v in numbers):
                    rows = given.setdefault(_group(group), {}).setdefault(look.round, {})
                    rows[to] = dict(zip(look.rows, numbers, strict=True))
    return given


def _note(looks: Sequence[_Look]) -> str:
    """Return how exact the numbers are."""
    groups = [group for look in looks for group in look.groups]
    parts = []
    worst = min((group["looked"] for group in groups if group["looked"] < group["size"]), default=None)
    if worst is not None:
        parts.append(
            f"Of large groups a fixed choice of columns is looked at, at least {worst:,}, so that a cosine is known to "
            f"about {1 / math.sqrt(worst):.1g}."
        )
    explained = [v for group in groups for v in group.get("explained") or () if v is not None]
    if explained and min(explained) < 0.99:
        parts.append(
            "Weights are those with which a sum of the updates comes nearest to what was made of them. It is not just "
            f"such a sum, as where coordinates have weights of their own: {min(explained):.0%} of it is explained, or "
            "more."
        )
    return " ".join(parts)
