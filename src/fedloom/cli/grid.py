"""`fedloom grid`, `tune`, `tournament`, `atlas` and `claims`: many runs in one command, which can be interrupted."""

from __future__ import annotations

import re
import shlex
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedloom.cli import shared
from fedloom.cli.shared import argument, flag, option
from fedloom.core.errors import UserError, at, warn

if TYPE_CHECKING:
    from fedloom.experiments.grid_run import Outcome, Prepared, Runner
    from fedloom.study.output import HasTable

GridArgument = Annotated[
    str | None,
    argument(
        "A packaged grid (no argument: list them), a YAML file, or a grid's folder.",
        "GRID",
        autocompletion=shared.complete_grid,
    ),
]
Only = Annotated[
    list[str] | None,
    option("Run only the cells with this data set, base or add-on; repeat the option for several.", "LABEL"),
]


def grid(
    name: GridArgument = None,
    changes: Annotated[
        list[str] | None,
        argument(
            "Changes of every cell, for example training.rounds=2. seeds=[0,1], delta=, show= and at= change the grid.",
            "KEY=VALUE...",
            autocompletion=shared.complete_change,
        ),
    ] = None,
    out: Annotated[Path | None, shared.out_folder("The grid's folder.", default="grids/NAME")] = None,
    jobs: shared.Jobs = None,
    memory: Annotated[
        str | None, option("Memory for all cells together, such as 8GB.", "SIZE", show_default="80 % of free memory")
    ] = None,
    only: Only = None,
    dry_run: Annotated[bool, flag("--dry-run", "Check every cell and print what would run, without training.")] = False,
    quiet: shared.Quiet = False,
    as_json: shared.Json = False,
    benchmark: Annotated[
        str | None,
        option(
            "Run the grid on this benchmark: one of its own, or a recipe (packaged, or a file) with your data.",
            autocompletion=shared.complete_recipe,
        ),
    ] = None,
) -> None:
    """Run all cells and seeds of a grid that have not finished yet. Interrupted runs are resumed."""
    from fedloom.study.grid import FILE, GRIDS, load_grid

    if name is None:
        _list(as_json)
        return
    budget = None if memory is None else size(memory)
    continues = (Path(name) / FILE).is_file()
    if continues and benchmark is not None:
        raise UserError(
            f"--benchmark: {name} is a grid's folder, whose benchmark cannot change; give the grid's name or file"
        )
    opened = load_grid(Path(name) / FILE if continues else name, changes or (), benchmark=benchmark)
    folder = out or (Path(name) if continues else GRIDS / opened.name)
    from fedloom.experiments.grid_run import prepare, progress, run_prepared

    with shared.interruptible(folder / FILE, f"continue with: fedloom grid {folder}"):
        with at(str(Path(name) / FILE)) if continues else nullcontext():
            prepared = prepare(opened, folder, only or ())
        _before(prepared)
        if dry_run:
            _plan(prepared, as_json)
            return
        outcome = run_prepared(prepared, progress(quiet), jobs, budget)
    _after(prepared, outcome, as_json)


def tune(
    source: Annotated[
        str,
        argument(
            "A packaged recipe or grid, or a YAML file with one.",
            "RECIPE_OR_GRID",
            autocompletion=shared.complete_recipe,
        ),
    ],
    changes: shared.Changes = None,
    trials: Annotated[int, option("The number of settings to try per method.", min=1)] = 8,
    seeds: Annotated[
        int, option("The number of seeds per trial: 100, 101, 99, 98, ... Results need other seeds.", min=1, max=90)
    ] = 2,
    out: Annotated[Path | None, shared.out_folder("The folder of the trials.", default="tuning/NAME")] = None,
    jobs: shared.Jobs = None,
    quiet: shared.Quiet = False,
    as_json: shared.Json = False,
) -> None:
    """Tune the method of a recipe, or every method of a grid, on validation data with equal budgets.

    Learning rates lie on a log grid over two decades, which grows while the best rate is at its end. The other trials
    vary the method's own first numbers, unless a grid or KEY=VALUE sets them, and then try finer rates. The folder
    keeps all trials (curves.csv) and the tuned grid (grid.yaml); the same command continues an interrupted search. The
    command lists the methods that the library refuses. The exit code is 1 if no setting of a method learned anything
    or a trial crashed. That method is left out, and the same command tries it again.
    """
    from fedloom.core.settings.yaml import to_yaml
    from fedloom.experiments.tune import Budget, RefusedError, as_grid, described, tune_grid, tuning_seeds
    from fedloom.study.grid import FILE, write

    grid = as_grid(source, changes or ())
    folder = out or Path("tuning") / grid.name
    budget = Budget(trials=trials, seeds=tuning_seeds(seeds))
    with shared.interruptible(folder, "run the same command to continue"):
        tuned, curves, left_out = tune_grid(grid, budget, folder, _runner(quiet, jobs))
    failed = [name for name, error in left_out.items() if not isinstance(error, RefusedError)]
    said = {name: f"{'failed' if name in failed else 'refused'}: {name}: {error}" for name, error in left_out.items()}
    if not curves:
        raise UserError("\n".join(said.values()))
    write(folder, {FILE: to_yaml(tuned.model_dump(mode="json"))})
    found = [
        {"data": data, "method": curve.label.removesuffix("/-"), "settings": dict(curve.best),
         "validation": curve.scores[curve.key], "trials": len(curve.scores),
         "rate": "at the end of those tried" if curve.at_edge else "inside"}
        for data, curve in curves
    ]  # fmt: skip
    rows = [
        {**row, "settings": described(curve.best), "validation": f"{curve.scores[curve.key]:+.1f} %"}
        for row, (_, curve) in zip(found, curves, strict=True)
    ]
    last = (f"validation: change against the recipe's own settings; all trials: {folder / 'curves.csv'}",
            f"run it: fedloom grid {folder / FILE}")  # fmt: skip
    for text in said.values():
        typer.echo(text, err=True)
    shared.answer([*found, *({"left out": name, "reason": str(error)} for name, error in left_out.items())],
                  as_json, shared.table_of(rows), *last)  # fmt: skip
    if failed:
        raise typer.Exit(1)


def tournament(
    benchmark: Annotated[
        str,
        argument(
            "A packaged recipe or a YAML file with validation data; or a tournament's folder, to continue it.",
            "BENCHMARK",
            autocompletion=shared.complete_recipe,
        ),
    ],
    changes: shared.Changes = None,
    methods: Annotated[
        list[str] | None,
        option(
            "The methods to compare; for a folder, the methods to add.",
            "A,B+ADDON,...",
            show_default="all methods that the benchmark allows",
        ),
    ] = None,
    tries: Annotated[
        int | None, option("The number of settings to try per method on validation data.", min=1, show_default="8")
    ] = None,
    seeds: Annotated[int | None, option("The number of seeds per method at first.", min=2, show_default="3")] = None,
    most: Annotated[
        int | None, option("The largest number of seeds; the tournament then ends.", min=2, show_default="10")
    ] = None,
    out: Annotated[Path | None, shared.out_folder("The tournament's folder.", default="tournaments/NAME")] = None,
    jobs: shared.Jobs = None,
    quiet: shared.Quiet = False,
    as_json: shared.Json = False,
) -> None:
    """Tune all methods of a benchmark with the same budget, then add seeds until they differ significantly.

    The folder stores everything. The same command continues an interrupted tournament, or adds trials and seeds; with
    --methods it adds a method.
    """
    from fedloom.experiments.tournament import planned, play

    entered = dict.fromkeys(name.strip() for text in methods or () for name in text.split(","))
    given = {key: value for key, value in (("tries", tries), ("least", seeds), ("most", most)) if value is not None}
    plan, folder = planned(benchmark, changes or (), out, tuple(entered), given)
    if plan.most < plan.least:
        raise UserError(f"--most {plan.most} found, expected at least {plan.least} (--seeds)")

    with shared.interruptible(folder, f"continue with: fedloom study tournament {folder}"):
        standings = play(plan, folder, _runner(quiet, jobs))
    _show(
        standings,
        as_json,
        f"its table: {folder / 'standings.csv'}; all trials: {folder / 'curves.csv'}; its page: fedloom report "
        f"{folder / 'final'}; one more method: fedloom study tournament {folder} --methods NAME",
    )


def atlas(
    benchmark: shared.RecipeArgument,
    changes: shared.Changes = None,
    seeds: Annotated[int, option("The number of seeds, counted from 0.", min=2)] = 3,
    out: Annotated[Path | None, shared.out_folder("The atlas' folder.", default="atlases/NAME")] = None,
    jobs: shared.Jobs = None,
    quiet: shared.Quiet = False,
    as_json: shared.Json = False,
) -> None:
    """Train every pair of a benchmark's tasks together: which task helps which, in which layers, and do cosines of
    early updates predict it?

    The same command continues an interrupted atlas.
    """
    from fedloom.experiments.atlas import make
    from fedloom.federation.recipes import load

    recipe = load(benchmark, changes or ())
    folder = out or Path("atlases") / recipe.name
    with shared.interruptible(folder, "run the same command to continue"):
        result = make(recipe, seeds, folder, _runner(quiet, jobs))
    _show(result, as_json, f"its figure: {folder / 'atlas.svg'}; its numbers: {folder / 'atlas.csv'}")


def claims(
    file: Annotated[Path, argument("A file of claims (YAML).", "FILE", exists=True, dir_okay=False)],
    changes: Annotated[
        list[str] | None,
        argument(
            "With --run: changes of all grids, for example data.of.root=DIR, or of one grid: GRID:KEY=VALUE. "
            "With --redo: the same, and seeds, for example seeds=[20,21,22].",
            "KEY=VALUE...",
        ),
    ] = None,
    run: Annotated[
        bool, flag("--run", "First tune and run the grids that the file lists, and write their CSV files.")
    ] = False,
    only: Annotated[list[str] | None, option("With --run: only this grid; repeat it for several.", "GRID")] = None,
    redo: Annotated[
        int | None, option("Run only the methods of claim N again, with their tuned settings, and judge it.", "N")
    ] = None,
    grids: Annotated[Path, option("With --run or --redo: the folder of all runs.", "DIR", file_okay=False)] = Path(
        "grids/verdicts"
    ),
    kind: shared.Kind = "text",
    as_json: shared.Json = False,
    out: shared.Out = None,
    jobs: shared.Jobs = None,
    quiet: shared.Quiet = False,
) -> None:
    """Print the verdict on each claim of a file: yes, no, or cannot tell.

    Verdicts come from CSV files beside the file of claims: seeds/GRID.csv (test data) and rules/GRID.csv (validation
    data: is the benchmark sensitive?). --run first writes these and tuning/GRID.csv, and can be interrupted.
    """
    from fedloom.study.claims import verdicts

    if redo is not None and (run or only):
        raise UserError("--redo is about one claim, --run and --only are about grids: expected one of them")
    if redo is None and not run and (only or changes):
        raise UserError("--only and KEY=VALUE are about what runs: they need --run, and KEY=VALUE --run or --redo")
    if run or redo is not None:
        from fedloom.experiments.claims import claimed, redone

        with shared.interruptible(grids, "the same command goes on"):
            if redo is None:
                claimed(file, grids, only or (), _runner(quiet, jobs), changes or ())
            else:
                made = redone(file, redo, grids, _runner(quiet, jobs), changes or ())
    if redo is None:
        made = verdicts(file)
    shared.put_table(made, kind, as_json, out)


def _runner(quiet: bool, jobs: int | None) -> Runner:
    """Return the runner of a study's grids; it prints progress unless `quiet`."""
    from fedloom.experiments.grid_run import Runner, progress

    return Runner(lambda: progress(quiet), lambda text: None if quiet else typer.echo(text, err=True), jobs)


def _show(table: HasTable, as_json: bool, more: str) -> None:
    """Print a table and where it is stored, or its numbers as JSON."""
    shared.put(table.to_json() if as_json else f"{table.to_text()}{more}\n", None)


def size(text: str) -> int:
    """Return a size such as '8GB', '500 MB' or '2e9' in bytes (powers of ten). Raises UserError."""
    match = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([kMGT]?)B?\s*", text)
    try:
        value = float(match[1]) * 1000 ** " kMGT".index(match[2] or " ") if match else 0.0
    except ValueError:
        value = 0.0
    if not 0 < value < 1e18:
        raise UserError(f"--memory: {text!r} found, expected a size such as 8GB or 500MB")
    return int(value)


def _list(as_json: bool) -> None:
    from fedloom.study.grid import cells, load_grid, names, summary

    rows = [
        {"grid": name, "what it compares": summary(name), "runs": len([*cells(load_grid(name))])} for name in names()
    ]
    last = "Run one: fedloom grid NAME; with --dry-run to see its cells, and which of these runs the library refuses"
    shared.answer(rows, as_json, shared.table_of(rows), last)


def _before(prepared: Prepared) -> None:
    """Print warnings, refused cells and finished runs before anything runs."""
    from fedloom.study.grid import replaced

    for text in replaced(prepared.grid):
        warn(text)
    for name, reason in prepared.refused.items():
        typer.echo(f"refused: {name}: {reason}", err=True)
    done = sum(state == "finished" for state in prepared.states.values())
    if done:
        typer.echo(f"{done} of {prepared.count()} runs have finished already", err=True)


def _plan(prepared: Prepared, as_json: bool) -> None:
    from fedloom.federation.runs.reader import human_bytes

    rows = []
    for name in dict.fromkeys(cell.combination for cell in prepared.recipes):
        runs = [cell for cell in prepared.recipes if cell.combination == name]
        states = [prepared.states[cell] for cell in runs]
        need = max((prepared.needs[cell] for cell in runs if cell in prepared.needs), default=0)
        count = {state: states.count(state) for state in ("new", "interrupted", "finished") if state in states}
        text = "refused" if name in prepared.refused else ", ".join(f"{n} {state}" for state, n in count.items())
        rows.append({"cell": name, "runs": text, "memory a run": human_bytes(need) if need else ""})
    shared.answer(rows, as_json, shared.table_of(rows), f"{len(prepared.todo)} runs would start, in {prepared.folder}")


def _after(prepared: Prepared, outcome: Outcome, as_json: bool) -> None:
    from fedloom.federation.runs.reader import human_bytes

    for name, reason in outcome.refused.items():
        typer.echo(f"refused: {name}: {reason}", err=True)
    for cell, message in outcome.failed.items():
        typer.echo(f"failed: {cell}: {message}", err=True)
    done = sum(state == "finished" for state in prepared.states.values()) + len(outcome.finished)
    peak = f"; the largest run took {human_bytes(outcome.peak)} of memory" if outcome.peak else ""
    lines = [f"{done} of {(wanted := prepared.count(outcome.refused))} runs are finished{peak}"]
    lines.append(f"its table: fedloom compare {prepared.folder}")
    draw = f"fedloom plot figure {prepared.folder} --out FILE.png"
    if prepared.grid.figure is not None:
        lines.append(f"its figure: {draw}")
    lines += [f"its figure {name}: {draw} --named {shlex.quote(name)}" for name in prepared.grid.figures]
    value = {"folder": prepared.folder, "runs": wanted, "finished": done, "peak_bytes": outcome.peak}
    failed = {str(cell): message for cell, message in outcome.failed.items()}
    shared.answer({**value, "failed": failed, "refused": outcome.refused}, as_json, *lines)
    if outcome.failed:
        raise typer.Exit(1)
