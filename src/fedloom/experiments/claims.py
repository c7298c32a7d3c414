"""Run the grids of a file of claims (`fedloom study claims --run`), and one claim again (`--redo`).

Of each grid: judge the benchmark by training alone and on all data, tune the methods of the claims and the references,
run them with more seeds until each claim is decided, and keep trials and seeds as CSV beside the file.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from fedloom.core.errors import StateError
from fedloom.experiments.grid_run import SILENT, Runner, until_decided
from fedloom.experiments.tune import Budget, CrashedError, chosen_of, on_validation, refuse_used, tune_grid
from fedloom.federation.recipes.loader import load, texts
from fedloom.study.claims import (
    ALONE,
    Effort,
    Judged,
    Verdicts,
    counted_tasks,
    file_of,
    judged,
    load_claims,
    sensitivity,
    sentences,
)
from fedloom.study.grid import Grid, cell_of, load_grid, safe, write
from fedloom.study.results import Seeds, read, read_seeds, seeds_of
from fedloom.study.significance import refusal

JUDGES = {ALONE, "centralised", "centralised-by-task", "constant"}
"""The rows by which a benchmark is judged."""

BESIDE = {"separate", "simple"}
"""The rows with which methods are compared beside them, where the grid has these."""


def claimed(
    file: Path, folder: Path, only: Collection[str] = (), runner: Runner = SILENT, changes: Sequence[str] = ()
) -> None:
    """Run the grids of a file of claims, or those in `only`, and write their CSV files beside it.

    What ran before in `folder` is not run again, and a grid whose file has tuned settings is not tuned. A grid that
    needs `changes` (`Effort.given`, KEY=VALUE, or GRID:KEY=VALUE for one grid alone) takes those, and is left out where
    one is absent. Raises StateError where a name in `only` is no grid of the file, and for a change that no grid takes.
    """
    claims = load_claims(file)
    for name in only:
        if name not in claims.grids:
            raise StateError(f"{file}: no grid {name!r} among those to run: {', '.join(claims.grids)}")
    given = {change.partition("=")[0]: change for change in changes}
    taken = {key for name, effort in claims.grids.items() for of in effort.given for key in (of, f"{name}:{of}")}
    if unknown := given.keys() - taken:
        some = ", ".join(sorted({key for effort in claims.grids.values() for key in effort.given})) or "none"
        raise StateError(f"{file}: no grid takes a change of {', '.join(sorted(unknown))}; what grids take: {some}")
    for name, effort in claims.grids.items():
        if only and name not in only:
            continue
        found = {key: given.get(f"{name}:{key}", given.get(key, "")) for key in effort.given}
        if absent := [f"{key}=..." for key, change in found.items() if not change]:
            runner.tell(f"{name}: not run, for it needs {' '.join(absent)}")
            continue
        grid = load_grid(name, [change.removeprefix(f"{name}:") for change in found.values()])
        _claimed(grid, effort, folder / grid.name, partial(file_of, file, grid), runner)


def _claimed(grid: Grid, effort: Effort, folder: Path, file: Callable[[str], Path], runner: Runner) -> None:
    """Run one grid in its folder; `file` gives the CSV file of each kind. Files are written when all is there.

    The rows of the rule come first: no others run where no data set is sensitive. Raises StateError where a run fails,
    and for a grid in which no client trains alone.
    """
    if ALONE not in grid.bases:
        raise StateError(f"{grid.name}: no base {ALONE}; a benchmark is judged by clients that train alone")

    kept: dict[str, str] = {}

    def tuned(made: Grid) -> Grid:
        if grid.tuned:
            return made
        runner.tell(f"{made.name}: tuning {', '.join(made.bases)} with {effort.trials} trials per method")
        budget = Budget(trials=effort.trials, seeds=effort.tuning)
        chosen, _, *left_out = tune_grid(made, budget, folder / "tuning", runner)
        for error in (error for why in left_out for error in why.values() if isinstance(error, CrashedError)):
            raise error
        kept["tuning"] = (folder / "tuning" / "curves.csv").read_text("utf-8")
        return chosen

    rule = _ran(rule_grid(tuned(of_rows(grid, JUDGES)), effort), folder / "rule", "val", runner)
    kept["rules"] = rule.to_csv()
    found = [sensitivity(rule, data) for data in grid.data]
    if all(of.reasons for of in found):
        runner.tell("\n".join([f"{grid.name}: no other row is tuned or run", *sentences(found)]))
    else:
        compared = {cell_of(each)[0] for name, others in grid.family.items() for each in (name, *others)}
        whole = tuned(of_rows(grid, JUDGES | BESIDE | compared) if compared else grid)

        def final(count: int) -> Judged:
            made = whole.model_copy(update={"seeds": tuple(range(count))})
            runner.tell(f"{grid.name}: {count} seeds on test data")
            seeds = _ran(made, folder / "test", "test", runner)
            kept["seeds"] = seeds.to_csv()
            return judged(made, seeds, rule)

        until_decided(effort.least, effort.most, final, lambda found: found.is_decided)
    for kind, text in kept.items():
        write(file(kind).parent, {file(kind).name: text})


def _ran(grid: Grid, folder: Path, split: str, runner: Runner) -> Seeds:
    """Run a grid and return the number of every seed. Raises StateError where it fails or compares other data."""
    for cell, reason in runner.run(grid, folder).failed.items():
        raise StateError(f"{cell} failed: {reason}")
    sides = read(grid, folder, split)
    for (data, *names), one in sides.items() if grid.family else ():
        for base in [sides[data, *of] for of in grid.compared(*names) if (data, *of) in sides]:
            if why := refusal(one, base, sorted(one.values.keys() & base.values.keys())):
                raise StateError(f"{grid.name}, {data}: {one.label} and {base.label}: {why}")
    return seeds_of(grid, sides)


def redone(file: Path, number: int, folder: Path, runner: Runner = SILENT, changes: Sequence[str] = ()) -> Verdicts:
    """Run both methods of one claim again, with the settings that were chosen for them, and return the verdict.

    `changes` are seeds, such as seeds=[20,21,22] (by default those of the file of seeds, or the grid's), and what the
    grid needs to know (`Effort.given`). p is not corrected for the family. Raises StateError for an unknown number,
    settings or change, for fewer than two seeds or one of the tuning or the rule, and where a run fails.
    """
    claims = load_claims(file)
    if not 1 <= number <= len(claims.claims):
        raise StateError(f"{file}: no claim {number}; they have the numbers 1 to {len(claims.claims)}")
    claim = claims.claims[number - 1]
    stated = {change.partition("=")[0] for change in changes}
    effort = claims.grids.get(claim.grid, Effort())
    if absent := [f"{key}=..." for key in effort.given if key not in stated]:
        raise StateError(f"claim {number}: its grid {claim.grid} needs {' '.join(absent)}")
    if other := sorted(stated - {"seeds", *effort.given}):
        expected = ", ".join(("seeds", *effort.given))
        raise StateError(
            f"claim {number}: a change of {', '.join(other)} makes another experiment; expected {expected}"
        )
    grid = load_grid(claim.grid, changes)
    data = claim.data or next(iter(grid.data))
    stored = file_of(file, grid, "seeds")
    before = read_seeds(stored) if stored.is_file() else None
    if "seeds" not in stated and before is not None:
        grid = grid.model_copy(update={"seeds": tuple(sorted({line.seed for line in before.lines}))})
    if len(grid.seeds) < 2:
        raise StateError(
            f"claim {number}: {len(grid.seeds)} seed found, expected two or more: a verdict has an interval"
        )
    used = (*effort.tuning, *effort.rule)
    refuse_used(f"claim {number}", grid.seeds, used, "tuned the methods or judged the benchmark")
    named = [cell_of(cell) for cell in (claim.method, claim.over)]
    cells = [f"{base}/{addon or '-'}" for base, addon in named]
    value = of_rows(grid, {*(base for base, _ in named), "constant"}).model_dump(mode="json")
    tuning = file_of(file, grid, "tuning")
    if not grid.tuned and not tuning.is_file():
        raise StateError(f"claim {number} has not been tuned: run its grid with --run")
    tuned = grid.tuned or chosen_of(tuning)
    if not grid.tuned and (unknown := [cell for cell in cells if cell not in tuned.get(data, {})]):
        raise StateError(
            f"claim {number}: no settings were chosen yet for {', '.join(unknown)}: run its grid with --run"
        )
    value |= {
        "data": {data: value["data"][data]},
        "tuned": {data: {cell: of for cell, of in tuned.get(data, {}).items() if cell in {*cells, "constant/-"}}},
        "family": {cells[0]: cells[1:]},
    }
    # named by what is compared, for a claim's number changes when claims are added before it
    made, where = load_grid(value, origin=grid._origin), folder / f"{grid.name}-{safe(' over '.join([data, *cells]))}"
    rule = file_of(file, grid, "rules")
    counted = None if before is None else counted_tasks(grid, before, data)
    found = judged(made, _ran(made, where, "test", runner), read_seeds(rule) if rule.is_file() else None, counted)
    return Verdicts({number: claim}, {claim.grid: found})


def of_rows(grid: Grid, kept: Collection[str]) -> Grid:
    """Return a grid with those of its bases and references alone, and the comparisons among them."""
    value = grid.model_dump(mode="json")

    def of_kept(cells: Mapping[str, Any]) -> dict[str, Any]:
        return {cell: of for cell, of in cells.items() if cell_of(cell)[0] in kept}

    family = of_kept(grid.family)
    value |= {
        "bases": {base: of for base, of in value["bases"].items() if base in kept},
        "references": [name for name in grid.reference_rows if name in kept],
        "cells": of_kept(value["cells"]),
        "family": {cell: of for cell, of in family.items() if {cell_of(other)[0] for other in of} <= {*kept}},
        "tuned": {label: of_kept(of) for label, of in value["tuned"].items()},
        "data": {label: {**row, "bases": None} for label, row in value["data"].items()},  # the rule needs Local on each
        "delta": "none",
        "figure": None,
        "figures": {},
    }
    return load_grid(value, origin=grid._origin)


def rule_grid(grid: Grid, effort: Effort) -> Grid:
    """Return the rows of a tuned grid by which its benchmark is judged, on validation data of other seeds."""
    rows = of_rows(grid, JUDGES)
    data = rows.model_dump(mode="json")["data"]
    for label, row in rows.data.items():
        data[label]["set"] = {**row.set, **on_validation(load(row.recipe, texts(row.set), grid._origin))}
    changes = {key: value for key, value in grid.set.items() if not key.startswith("evaluation.")}
    tuned = {label: {c: of[c] for c in of if cell_of(c)[1] == "-"} for label, of in rows.tuned.items()}
    about = {"name": f"{grid.name}-rule", "seeds": list(effort.rule), "delta": f"{ALONE}/-", "show": grid.show}
    ran = {"data": data, "bases": rows.bases, "references": list(rows.reference_rows), "set": changes, "tuned": tuned}
    return load_grid({**about, **ran, "columns": grid.columns}, origin=grid._origin)
