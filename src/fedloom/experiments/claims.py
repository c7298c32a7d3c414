"""`fedloom study claims --run`: tune, judge the benchmark, run and keep the seeds of every grid of a file of claims."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path

from fedloom.core.errors import StateError
from fedloom.experiments.grid_run import Watch, prepare, run_prepared, until_decided
from fedloom.experiments.tune import Budget, on_validation, tune_grid
from fedloom.federation.recipes.loader import load, texts
from fedloom.study.claims import ALONE, Effort, Judged, file_of, judged, load_claims
from fedloom.study.grid import Grid, load_grid, write
from fedloom.study.results import Seeds, of_seeds


def run(
    file: Path,
    folder: Path,
    only: Collection[str] = (),
    *,
    watch: Callable[[], Watch] = Watch,
    tell: Callable[[str], None] = lambda text: None,
    jobs: int | None = None,
) -> None:
    """Run the grids of a file of claims, or those in `only`, and write their CSV files beside it.

    What ran before in `folder` is not run again, and a grid whose file has tuned settings is not tuned. Raises
    StateError where a name in `only` is no grid of the file.
    """
    claims = load_claims(file)
    for name in only:
        if name not in claims.grids:
            raise StateError(f"{file}: no grid {name!r} among those to run: {', '.join(claims.grids)}")
    for name, effort in claims.grids.items():
        if not only or name in only:
            grid = load_grid(name)
            _run(grid, effort, folder / grid.name, partial(file_of, file, grid), watch, tell, jobs)


def _run(
    grid: Grid,
    effort: Effort,
    folder: Path,
    file: Callable[[str], Path],
    watch: Callable[[], Watch],
    tell: Callable[[str], None],
    jobs: int | None,
) -> None:
    """Run one grid in its folder; `file` gives the CSV file of each kind."""

    def measured(made: Grid, where: str, split: str) -> Seeds:
        prepared = prepare(made, folder / where)
        outcome = run_prepared(prepared, watch(), jobs)
        for cell, reason in outcome.failed.items():
            raise StateError(f"{cell} failed: {reason}")
        seeds = of_seeds(made, folder / where, split)
        kind = file("seeds" if split == "test" else "rules")
        write(kind.parent, {kind.name: seeds.to_csv()})
        return seeds

    tuned = grid
    if not grid.tuned:
        tell(f"{grid.name}: tuning with {effort.trials} trials per method")
        budget = Budget(trials=effort.trials, seeds=effort.tuning)
        tuned, _ = tune_grid(grid, budget, folder / "tuning", watch=watch, tell=tell, jobs=jobs)
        curves = file("tuning")
        write(curves.parent, {curves.name: (folder / "tuning" / "curves.csv").read_text("utf-8")})
    rule = measured(rule_grid(tuned, effort), "rule", "val")

    def final(seeds: int) -> Judged:
        made = tuned.model_copy(update={"seeds": tuple(range(seeds))})
        tell(f"{grid.name}: {seeds} seeds on test data")
        return judged(made, measured(made, "test", "test"), rule)

    until_decided(effort.least, effort.most, final, lambda found: found.is_decided)


def rule_grid(grid: Grid, effort: Effort) -> Grid:
    """Return the rows of a tuned grid by which its benchmark is judged, on validation data of other seeds."""
    references = [name for name in grid.reference_rows if name in ("centralised", "centralised-by-task", "constant")]
    data = {}
    for label, row in grid.data.items():
        recipe = load(row.recipe, texts(row.set), grid._origin)
        data[label] = {**row.model_dump(mode="json"), "bases": None, "set": {**row.set, **on_validation(recipe)}}
    rows = {f"{name}/-" for name in (ALONE, *references)}
    tuned = {label: {cell: of[cell] for cell in of.keys() & rows} for label, of in grid.tuned.items()}
    value = {
        "name": f"{grid.name}-rule",
        "data": data,
        "bases": {ALONE: grid.bases.get(ALONE, {"method": "local"})},
        "references": references,
        "seeds": list(effort.rule),
        "delta": f"{ALONE}/-",
        "show": grid.show,
        "set": {key: value for key, value in grid.set.items() if not key.startswith("evaluation.")},
        "columns": grid.columns,
        "tuned": tuned,
    }
    return load_grid(value, origin=grid._origin)
