"""`fedloom study tournament`: tune every method with the same budget, then add seeds until the intervals tell."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from pydantic import Field

from fedloom.core.errors import RecipeError, StateError, UserError
from fedloom.core.settings.registry import Registered
from fedloom.core.settings.section import Count, Problems, Section
from fedloom.core.settings.trust import Origin, admit, is_import, names_in
from fedloom.core.settings.yaml import read_section, to_yaml
from fedloom.experiments.grid_run import BENCHMARK, SILENT, Runner, on_test, until_decided
from fedloom.experiments.tune import Budget, Curve, curves_csv, described, tune, weighted
from fedloom.federation.recipes.loader import load
from fedloom.federation.runs.reader import TaskMetric, human_bytes
from fedloom.methods import ADDONS, METHODS
from fedloom.study.grid import CHANGES, FILE, Changes, Grid, cells, load_grid, same, write
from fedloom.study.output import Made, Records, Table
from fedloom.study.results import MOVING, Side, deltas, near_0, note, of_grid, troubles
from fedloom.study.significance import of_clients, ranked
from fedloom.study.statistics import Estimate, delta_m, family, p_text

TOURNAMENT = "tournament.yaml"
ALONE = "local"
"""The method of clients that train alone, which takes part in every tournament: changes are against it."""

HEAD = (
    *("method", "Δ % against local", "behind the leader", "p, Holm", "rank", "clients ahead", "worst client"),
    *("last training loss", "bytes", "seconds"),
)
CSV = (
    *("method", "delta", "half", "behind", "p", "rank", "ahead"),
    *("worst_client", "worst", "bytes", "seconds", "settings", "unsettled"),
)


class Tournament(Section):
    """The settings of a tournament: with this file in its folder it can continue, and more methods can join."""

    name: str = Field(pattern=r"^\w[\w.-]*$", description="a name of letters, digits, '_', '-' and '.'")
    recipe: dict[str, Any]
    """The benchmark: a recipe, whose method does not count."""
    methods: tuple[str, ...] = Field(min_length=1)
    """METHOD or METHOD+ADDON."""
    tries: Count
    """Settings that each method is tried with on validation data (`tune`)."""
    tuning: tuple[Count, ...] = Field(min_length=1)
    """Seeds of these runs, which are used for nothing else."""
    least: Count
    """Seeds, from 0, that every method has."""
    most: Count
    """The number of seeds after which the tournament ends in any case."""

    def _problems(self) -> Problems:
        if both := sorted({*self.tuning} & {*range(self.most)}):
            yield f"seed {both[0]} is one of tuning and of the final, 0 to {self.most - 1}: expected others"


def save(tournament: Tournament, folder: Path) -> None:
    """Write it to its folder."""
    write(folder, {TOURNAMENT: to_yaml(tournament.model_dump(mode="json"))})


def opened(folder: Path) -> Tournament:
    """Return the tournament of a folder. Raises StateError where it has none, or a damaged one."""
    file = folder / TOURNAMENT
    if not file.is_file():
        raise StateError(f"{folder} is not a tournament's folder: {TOURNAMENT} is absent")
    return read_section(Tournament, file, StateError)


def final_grid(tournament: Tournament, chosen: Mapping[str, Changes], tuned: Mapping[str, Changes], seeds: int) -> Grid:
    """Return every method with its best settings beside the references with theirs, measured on test data."""
    about = {"name": f"{tournament.name}-final", "title": f"Tournament {tournament.name}", "delta": f"{ALONE}/-"}
    settings = {"bases": dict(chosen), "tuned": {BENCHMARK: dict(tuned)}}
    return on_test(tournament.recipe, **about, **settings, seeds=list(range(seeds)))


@dataclass(frozen=True)
class Standings(Made):
    """All methods, the best first; centralised training and the constant prediction stand below them."""

    seeds: int
    is_settled: bool
    """True if of every other method it is known whether the leader is better by a change that counts."""


def standings(
    tournament: Tournament, grid: Grid, folder: Path, refused: Mapping[str, str], at_edge: Sequence[str] = ()
) -> Standings:
    """Return what the final's runs say; methods without a number at every seed are left out. `refused` says why
    others are, `at_edge` names those whose best learning rate is the largest or the smallest that was tried.

    Raises StateError where training alone has not finished.
    """
    results = of_grid(grid, folder)
    sides = {side.label: side for side in results.sides.values()}
    if ALONE not in sides:
        raise StateError(f"{folder}: {ALONE} has not finished, but the other methods are compared with it")
    alone, unlearned = sides[ALONE], results.excluded.get(BENCHMARK, [])
    rows = [row for row in results.rows[BENCHMARK] if row.task not in unlearned] or results.rows[BENCHMARK]
    directions, seeds = {row.task: row.direction for row in rows}, sorted(alone.values)
    by_seed = {name: deltas(side.values, alone.values, directions) for name, side in sides.items()}
    each = {name: [of.get(seed, math.nan) for seed in seeds] for name, of in by_seed.items()}
    changes = {name: of for name, of in each.items() if all(map(math.isfinite, of))}
    if ALONE not in changes:
        unknown = ", ".join(f"{seed}" for seed, gain in zip(seeds, each[ALONE], strict=True) if not math.isfinite(gain))
        raise StateError(f"{folder}: no number of {ALONE} on any task at seed {unknown}, but changes are against it")
    methods = sorted((name for name in changes if name in grid.bases), key=lambda name: -fmean(changes[name]))
    leader = changes[methods[0]]
    unsettled = {name: sides[name].unsettled for name in changes}
    vague = near_0(alone.values, {row.task: row.metric for row in rows})  # a change in percent of that says nothing
    ahead_of = {  # of the leader over each other method, where both have converged
        name: [a - b for a, b in zip(leader, changes[name], strict=True)]
        for name in methods[1:]
        if len(seeds) > 1 and not unsettled[name] and not unsettled[methods[0]] and not vague
    }
    leads = family(ahead_of, dict.fromkeys(ahead_of, alone.ratio), grid.smallest)
    ranks = ranked(results).ranking.ranks
    lines, records, t = [], [], tournament
    for name in (*methods, *(name for name in changes if name not in grid.bases)):
        side, delta, lead = sides[name], Estimate.of(changes[name], alone.ratio), leads.get(name)
        of, p = (lead.change, lead.holm) if lead else (None, math.nan)
        rank = ranks.get(name, math.nan)
        gains = _gains(side, alone, rows, seeds) if name != ALONE else {}
        ahead = fmean(gain > 0 for gain in gains.values()) if gains else math.nan
        client, worst = min(gains.items(), key=lambda item: item[1]) if gains else ("", math.nan)
        sent = fmean(sum(run.bytes_total().values()) for run in side.runs.values())
        seconds = fmean(run.seconds_total() for run in side.runs.values())
        behind = "" if of is None else f"{-of.mean:+.2f} ({-of.high:+.2f} to {-of.low:+.2f})"
        change = (name, delta.signed if name != ALONE else "base", behind, "" if math.isnan(p) else p_text(p))
        clients = (f"{100 * ahead:.0f} %", f"{client} {worst:+.1f} %") if gains else ("", "")
        costs = (side.last_loss, human_bytes(sent), f"{seconds:.1f}")
        lines.append((*change, "" if math.isnan(rank) else f"{rank:.2f}", *clients, *costs))
        numbers = (delta.mean, delta.half, -of.mean if of else math.nan, p, rank, ahead)
        records.append((name, *numbers, client, worst, sent, seconds, described(_own(grid, name)), unsettled[name]))
    about = (
        f"{len(seeds)} seeds from 0; test split, model of the last round; mean ± 95 % t-interval over seeds. Each "
        f"method had at most {t.tries} setting{'s' * (t.tries > 1)}, tried on validation data with other seeds "
        f"({', '.join(map(str, t.tuning))}), and uses the best. Seeds were added until the verdict on the leader "
        f"against every other method was yes or no ({grid.smallest:g} % counts), up to {t.most}; such p-values are "
        "too small, and the lead of the best of many is too large (docs/statistics.md)."
    )
    at_end = "the best rate is the largest or the smallest one tried, so more trials may help"
    edge = [f"{at_end}: {', '.join(at_edge)}."] if at_edge else []
    chosen = [f"settings of {name}: {text}." for name in methods if (text := described(_own(grid, name)))]
    out = [f"not on this benchmark: {name}: {reason}." for name, reason in refused.items()]
    notes = [MOVING] if any(sides[name].is_moving for name in changes) else []
    notes += troubles(results.sides)
    if gone := sorted(each.keys() - changes):
        notes.append(f"left out, without a number at every seed: {', '.join(gone)}.")
    if unlearned:
        idle = "no method is better than the constant prediction on any task, so the changes say nothing."
        notes.append(idle if len(unlearned) == len(results.rows[BENCHMARK]) else note(unlearned))
    if vague:
        notes.append(f"no verdict: {ALONE} is about 0 on {', '.join(vague)}, so a change in percent says nothing.")
    made = Table(f"Tournament {t.name}", HEAD, tuple(lines), (about, *notes, *chosen, *edge, *out))
    decided = len(seeds) > 1 and all(of.verdict.answer != "cannot tell" for of in leads.values())
    return Standings(made, Records(CSV, records), len(seeds), decided)


def _gains(side: Side, alone: Side, rows: Sequence[TaskMetric], seeds: Sequence[int]) -> dict[str, float]:
    """Return client -> its change against training alone in percent, of the mean over seeds, where that is a number."""
    mine, theirs = of_clients(side, alone, rows, seeds)
    directions = {row.task: row.direction for row in rows}
    gains = {client: delta_m(mine[client], theirs[client], directions) for client in mine}
    return {client: gain for client, gain in gains.items() if math.isfinite(gain)}


def _own(grid: Grid, name: str) -> Changes:
    """Return the settings of a method or a reference of the final that differ from the benchmark's."""
    changes = grid.bases.get(name, grid.tuned.get(BENCHMARK, {}).get(f"{name}/-", {}))
    return {key: value for key, value in changes.items() if key != "method"}


def all_methods() -> tuple[str, ...]:
    """Return every registered method but the references, which stand in every table anyway."""
    return tuple(entry.name for entry in METHODS if entry.name not in CHANGES)


def planned(
    benchmark: str, changes: Sequence[str], out: Path | None, entered: Sequence[str], given: Mapping[str, int]
) -> tuple[Tournament, Path]:
    """Return (the tournament on a benchmark, or that of a folder with who joins it and what is given anew; its folder).

    Raises UserError for names that do not exist, and for another benchmark than the folder's.
    """
    admit(_code(entered), Origin.TYPED, "--methods")
    for name in entered:
        named(name)
    begun = (Path(benchmark) / TOURNAMENT).is_file()
    if begun and (changes or out is not None):
        raise UserError(f"{benchmark}: the tournament has begun, so its recipe and its folder cannot change")
    recipe = None if begun else load(benchmark, changes)
    folder = Path(benchmark) if recipe is None else out or Path("tournaments") / recipe.name
    if not (folder / TOURNAMENT).is_file():
        assert recipe is not None
        defaults = {"tries": 8, "tuning": (100, 101), "least": 3, "most": 10, "methods": entered or all_methods()}
        return Tournament(name=recipe.name, recipe=recipe.model_dump(mode="json"), **{**defaults, **given}), folder
    before = opened(folder)
    admit([*_code(before.methods), *names_in(before.recipe)], Origin.FOLDER, f"{folder / TOURNAMENT}")
    # what an older version wrote lacks keys that came later
    held = load(before.recipe, origin=Origin.FOLDER)
    if recipe is not None:
        same(f"{folder} was begun", held, recipe)
    joined = tuple(dict.fromkeys((*before.methods, *entered)))
    about = {"recipe": (recipe or held).model_dump(mode="json"), "methods": joined}
    return before.model_copy(update={**about, **given}), folder


def play(tournament: Tournament, folder: Path, runner: Runner = SILENT) -> Standings:
    """Run what is missing, and give the standings, which are written to the folder as well.

    What was run before is not run again. A method whose run fails is left out; UserError where that is training alone.
    """
    save(tournament, folder)
    budget = Budget(trials=tournament.tries, seeds=tournament.tuning)
    chosen: dict[str, Changes] = {}
    tuned: dict[str, Changes] = {}
    refused: dict[str, str] = {}
    curves: list[tuple[str, Curve]] = []
    weights = weighted(tournament.recipe["method"])
    for method in dict.fromkeys((ALONE, *tournament.methods, *CHANGES)):
        try:
            change = {**(CHANGES[method] if method in CHANGES else section(named(method))), **weights}
            if method == ALONE and tournament.recipe.get("privacy"):
                change = {**change, "privacy": None}  # it sends nothing
            curve = tune(tournament.recipe, change, budget, folder / "tuning" / method, label=method, runner=runner)
        except (RecipeError, StateError) as error:
            refused[method] = " ".join(str(error).split())
            continue
        curves.append((BENCHMARK, curve))
        if method in CHANGES:
            tuned[f"{method}/-"] = {**weights, **curve.best}
        else:
            chosen[method] = {**change, **curve.best}
        runner.tell(f"{method}: {described(curve.best)}, the best of {len(curve.scores)} settings")
    if ALONE in refused:
        raise RecipeError(f"tournament {tournament.name}: {ALONE}: {refused[ALONE]}")
    idle = "is a reference in every table, so it does not take part"
    refused |= {name: idle for name in tournament.methods if name in CHANGES}
    for method, where in _set_aside(final_grid(tournament, chosen, tuned, tournament.least), folder / "final"):
        runner.tell(
            f"{method}: the best settings have changed; the final runs with the earlier settings are now in {where}"
        )

    def final(seeds: int) -> Standings:
        grid = final_grid(tournament, chosen, tuned, seeds)
        runner.tell(f"final: {len(chosen)} methods, {seeds} seeds")
        at_edge = [curve.label for _, curve in curves if curve.at_edge]
        outcome = runner.run(grid, folder / "final")
        failed = {cell.base: f"seed {cell.seed} failed: {message}" for cell, message in outcome.failed.items()}
        out = {base: why for base in grid.bases if (why := outcome.refused.get(f"{BENCHMARK} / {base}"))} | failed
        made = standings(tournament, grid, folder / "final", refused | out, at_edge)
        tables = {"standings.csv": made.to_csv(), "standings.md": made.to_markdown()}
        write(folder, {**tables, "curves.csv": curves_csv(curves)})
        return made

    return until_decided(tournament.least, tournament.most, final, lambda made: made.is_settled)


def _set_aside(grid: Grid, folder: Path) -> Iterator[tuple[str, Path]]:
    """Move away runs of methods and references with other settings than the folder's grid: (name, where they are)."""
    if not (folder / FILE).is_file():
        return
    before, earlier = load_grid(folder / FILE), folder / "earlier"
    for cell in cells(grid):
        home = cell.folder(folder).parent  # of all seeds
        if home.is_dir() and _own(before, cell.base) != _own(grid, cell.base):
            earlier.mkdir(exist_ok=True)
            yield cell.base, home.rename(earlier / f"{home.parent.name} {sum(1 for _ in earlier.iterdir()) + 1}")


def _code(methods: Sequence[str]) -> list[str]:
    """Return the names of code among methods and their add-ons."""
    return [one for method in methods for one in method.split("+") if is_import(one)]


def named(method: str) -> list[Registered]:
    """Return the method and its add-ons of METHOD+ADDON. Raises RecipeError where there is none of that name."""
    name, *addons = method.split("+")
    if name in CHANGES:
        raise RecipeError(f"{name} is a reference in every table, so it does not take part: leave it out")
    for registry, given in ((METHODS, [name]), (ADDONS, addons)):
        for one in given:
            if problem := registry.problem(one):
                raise RecipeError(problem)
    return [METHODS[name], *(ADDONS[one] for one in addons)]


def section(entries: Sequence[Registered]) -> Changes:
    """Return the change of a recipe that a method and its add-ons make."""
    addons: Changes = {entry.name: {} for entry in entries[1:]}
    return {"method": {"name": entries[0].name, "add": addons} if addons else entries[0].name}
