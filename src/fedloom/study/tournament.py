"""The standings of a tournament: methods on one bed, tuned with equal budgets. Reads run folders; free of torch."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from pydantic import Field, ValidationError

from fedloom.core.errors import StateError, parsing
from fedloom.core.settings.problems import explain
from fedloom.core.settings.section import Count, Section, strict
from fedloom.core.settings.yaml import parse, to_yaml
from fedloom.federation.runs.reader import human_bytes
from fedloom.study.delta import delta_m
from fedloom.study.grid import Changes, Grid, load_grid, write
from fedloom.study.significance.pairs import of_clients
from fedloom.study.significance.ranks import grid_ranked
from fedloom.study.significance.statistics import LEVEL, Paired, against_zero, holm, p_text
from fedloom.study.tables.compare import Estimate
from fedloom.study.tables.markup import Cell, Records
from fedloom.study.tables.results import read
from fedloom.study.tables.sheet import Sheet, Sheeted
from fedloom.study.tables.sides import Side, of_grid
from fedloom.study.tables.table import columns_of

FILE = "tournament.yaml"
ALONE = "local"
"""The method of clients that train alone, which takes part in every tournament: changes are against it."""
BED = "bed"

CSV = (
    *("method", "delta", "half", "behind", "p", "rank", "ahead"),
    *("worst_client", "worst", "bytes", "seconds", "settings"),
)

Tries = Mapping[str, Sequence[Changes]]
"""Method -> the settings that it is tried with, the default ones first."""


class Tournament(Section):
    """What a tournament is of: with this file in its folder it goes on, and takes more methods."""

    name: str = Field(pattern=r"^\w[\w.-]*$", description="a name of letters, digits, '_', '-' and '.'")
    recipe: dict[str, Any]
    """The bed: a recipe, whose method does not count."""
    methods: tuple[str, ...] = Field(min_length=1)
    """METHOD or METHOD+ADDON."""
    tries: Count
    """Settings that each method is tried with on validation data: the default ones, and others drawn."""
    tuning: tuple[Count, ...] = Field(min_length=1)
    """Seeds of these runs, which are used for nothing else."""
    least: Count
    """Seeds, from 0, that every method has."""
    most: Count
    """Seeds that end the tournament where intervals do not tell."""


def save(tournament: Tournament, folder: Path) -> None:
    """Write it to its folder."""
    write(folder, {FILE: to_yaml(tournament.model_dump(mode="json"))})


def opened(folder: Path) -> Tournament:
    """The tournament of a folder. Raises StateError where it has none, or a damaged one."""
    file = folder / FILE
    if not file.is_file():
        raise StateError(f"{folder} is not a tournament's folder: {FILE} is absent")
    with parsing(f"{file} cannot be read"):
        value = parse(file.read_text("utf-8"), str(file))
    try:
        return strict(Tournament, value)
    except ValidationError as error:
        path, message = explain(error, Tournament)[0]
        raise StateError(f"{file}, {path}: {message}") from None


def tuning_grid(tournament: Tournament, tries: Tries) -> Grid:
    """Every method with all of its settings, measured on validation data alone."""
    bases = {label(method, number): one for method, each in tries.items() for number, one in enumerate(each)}
    return _grid(tournament, "tuning", bases, tournament.tuning, "val", references=[])


def final_grid(tournament: Tournament, chosen: Mapping[str, Changes], seeds: int) -> Grid:
    """Every method with its best settings beside the references, measured on test data."""
    return _grid(tournament, "final", chosen, range(seeds), "test", delta=f"{ALONE}/-")


def label(method: str, number: int) -> str:
    """A method with one of its settings; 0 are the default ones."""
    return f"{method} try {number}"


def _grid(
    tournament: Tournament, what: str, bases: Mapping[str, Changes], seeds: Sequence[int], split: str, **more: Any
) -> Grid:
    last = {"evaluation.splits": [split], "evaluation.every": tournament.recipe["training"]["rounds"]}
    return load_grid(
        {
            "name": f"{tournament.name}-{what}",
            "title": f"Tournament {tournament.name}",
            "data": {BED: {"recipe": tournament.recipe, "set": last}},
            "bases": dict(bases),
            "seeds": list(seeds),
            **more,
        }
    )


def scores(grid: Grid, folder: Path, base: str) -> dict[str, float]:
    """Base of the grid -> mean over seeds of its change against `base` on validation data, in percent.

    -inf where a number is not finite, as after divergence.
    """
    results, _ = read(grid, folder, "val")
    directions = {c.task: c.direction for c in columns_of(grid, BED, results) if c.task}
    by_label = {name: result.values() for (_, name, _), result in results.items()}
    if base not in by_label:
        raise StateError(f"{folder}: {base} has not finished, and all others are held against it")
    found = {}
    for name, values in by_label.items():
        changes = [
            delta_m(values[seed], against, directions) for seed, against in by_label[base].items() if seed in values
        ]
        mean = fmean(changes) if changes else math.nan
        found[name] = mean if math.isfinite(mean) else -math.inf
    return found


def best(found: Mapping[str, float], tries: Tries) -> dict[str, int]:
    """Method -> the number of its settings with the best score, the first of equal ones; only methods that ran."""
    return {
        method: max(scored, key=lambda number: (scored[number], -number))
        for method, each in tries.items()
        if (scored := {n: found[name] for n in range(len(each)) if (name := label(method, n)) in found})
    }


@dataclass(frozen=True)
class Standing:
    """One method at the end."""

    method: str
    settings: str
    change: Estimate
    """Change against training alone, in percent, over seeds."""
    behind: Paired | None
    """Its change minus the leader's, seed by seed; None for the leader and with one seed."""
    p: float
    """Of the paired t-test of that, after Holm's correction over the methods; nan where there is none."""
    rank: float
    """Mean over tasks and seeds, 1 is best."""
    ahead: float
    """Share of clients, of the mean over seeds, that are ahead of training alone; nan where clients cannot be told."""
    worst: tuple[str, float]
    """The client that gains least or loses most, with its change in percent."""
    bytes: float
    """Sent both ways in a run."""
    seconds: float
    """Of a run, on the machine at hand."""

    @property
    def told(self) -> bool:
        """Whether it is told from the leader."""
        return self.p <= LEVEL


@dataclass(frozen=True)
class Standings(Sheeted):
    """All methods, the best first; joint training and the trivial answer stand below them."""

    tournament: Tournament
    rows: tuple[Standing, ...]
    references: tuple[Standing, ...]
    seeds: int
    refused: Mapping[str, str]
    """Method -> why the bed does not allow it."""

    @property
    def is_settled(self) -> bool:
        """Whether every method but the leader is told from it."""
        return all(row.told for row in self.rows[1:])

    def sheet(self) -> Sheet:
        """A line a method."""
        head = ("method", "Δ % against local", "behind the leader", "p, Holm", "rank", "clients ahead", "worst client")
        lines = [self._line(row) for row in (*self.rows, *self.references)]
        t = self.tournament
        about = (
            f"{self.seeds} seeds from 0; test split, model of the last round; mean ± 95 % t-interval over seeds. Each "
            f"method had {t.tries} settings, the default ones and {t.tries - 1} drawn, with a run each on validation "
            f"data of other seeds ({', '.join(map(str, t.tuning))}), and plays with the best. Seeds were added until "
            f"every method was told from the leader, at most {t.most}: a p found so is a little too small."
        )
        refused = [f"not on this bed: {name}: {reason}." for name, reason in self.refused.items()]
        chosen = [f"settings of {row.method}: {row.settings}." for row in self.rows if row.settings]
        columns = (*head, "bytes", "seconds")
        return Sheet(f"Tournament {t.name}", columns, tuple(lines), (about, *chosen, *refused))

    def records(self) -> Records:
        """The same in full precision."""
        rows: list[tuple[Cell, ...]] = []
        for r in (*self.rows, *self.references):
            behind = r.behind.mean if r.behind else math.nan
            numbers = (r.change.mean, r.change.half, behind, r.p, r.rank, r.ahead)
            rows.append((r.method, *numbers, *r.worst, r.bytes, r.seconds, r.settings))
        return Records(CSV, rows)

    def _line(self, row: Standing) -> tuple[str, ...]:
        of = row.behind
        client, worst = row.worst
        return (
            row.method,
            row.change.signed if row.method != ALONE else "base",
            "" if of is None else f"{of.mean:+.2f} ({of.low:+.2f} to {of.high:+.2f})",
            "" if math.isnan(row.p) else p_text(row.p),
            "" if math.isnan(row.rank) else f"{row.rank:.2f}",
            "" if math.isnan(row.ahead) else f"{100 * row.ahead:.0f} %",
            f"{client} {worst:+.1f} %" if client else "",
            human_bytes(row.bytes),
            f"{row.seconds:.1f}",
        )


def standings(tournament: Tournament, grid: Grid, folder: Path, refused: Mapping[str, str]) -> Standings:
    """What the final's runs say; methods without a number at every seed are left out.

    Raises StateError where training alone has not finished.
    """
    sides, rows, _ = of_grid(grid, folder, "test")
    directions = {row.task: row.direction for row in rows[BED]}
    found = {side.label: side for side in sides.values()}
    if ALONE not in found:
        raise StateError(f"{folder}: {ALONE} has not finished, and all others are held against it")
    alone = found[ALONE]
    seeds = sorted(alone.values)
    changes = {
        name: [delta_m(side.values[seed], alone.values[seed], directions) for seed in seeds]
        for name, side in found.items()
        if set(seeds) <= set(side.values)
    }
    changes = {name: each for name, each in changes.items() if all(map(math.isfinite, each))}
    methods = sorted((name for name in changes if name in grid.bases), key=lambda name: -fmean(changes[name]))
    leader = changes[methods[0]]
    behind = {
        name: against_zero([a - b for a, b in zip(changes[name], leader, strict=True)])
        for name in methods[1:]
        if len(seeds) > 1
    }
    # Equal at every seed: nothing tells how a difference varies, and nothing tells the two apart.
    ps = dict(zip(behind, holm([1.0 if of.is_constant else of.p for of in behind.values()]), strict=True))
    ranks = grid_ranked(grid, folder).ranking.ranks

    def standing(name: str) -> Standing:
        side = found[name]
        mine, theirs = of_clients(side, alone, rows[BED], seeds)
        each = {client: delta_m(mine[client], theirs[client], directions) for client in mine}
        each = {client: change for client, change in each.items() if math.isfinite(change)}
        compared = name != ALONE and bool(each)
        return Standing(
            name,
            settings(grid.bases.get(name, {})),
            Estimate.of(changes[name]),
            behind.get(name),
            ps.get(name, math.nan),
            ranks.get(name, math.nan),
            fmean(change > 0 for change in each.values()) if compared else math.nan,
            min(each.items(), key=lambda item: item[1]) if compared else ("", math.nan),
            fmean(sum(run.bytes_total().values()) for run in side.runs.values()),
            fmean(_seconds(side)),
        )

    others = [name for name in changes if name not in grid.bases]
    return Standings(tournament, tuple(map(standing, methods)), tuple(map(standing, others)), len(seeds), refused)


def settings(changes: Changes) -> str:
    """What differs from a method's defaults: 'mu=0.02, feddea.rho=0.25, training.optimizer.lr=0.05'."""
    method = changes.get("method")
    own = dict(method) if isinstance(method, Mapping) else {}
    addons = own.pop("add", {})
    found = {key: value for key, value in own.items() if key != "name"}
    found |= {f"{addon}.{key}": value for addon, params in addons.items() for key, value in params.items()}
    found |= {key: value for key, value in changes.items() if key != "method"}
    return ", ".join(f"{key}={json.dumps(value)}" for key, value in found.items())


def _seconds(side: Side) -> list[float]:
    return [sum(sum(line.get("seconds", {}).values()) for line in run.rounds) for run in side.runs.values()]
