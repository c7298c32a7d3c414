"""`fedloom grid`: the runs of a whole table of a paper as one command."""

from __future__ import annotations

import re
import shlex
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedloom.cli import complete, shared
from fedloom.core.errors import UserError, at

if TYPE_CHECKING:
    from fedloom.experiments.grid_run import Outcome, Prepared

GridArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="GRID",
        help="A packaged grid (no argument: list them), a YAML file, or a grid's folder.",
        autocompletion=complete.grid,
    ),
]
Only = Annotated[
    list[str] | None,
    typer.Option(metavar="LABEL", help="Only cells with this data set, base or add-on; may be given several times."),
]


def grid(
    name: GridArgument = None,
    changes: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE...",
            help="Changes of every cell, for example training.rounds=2; seeds=[0,1], delta=, show=, at= change the "
            "grid.",
            autocompletion=complete.change,
        ),
    ] = None,
    out: Annotated[
        Path | None, shared.out_option("The grid's folder.", show_default="grids/NAME", file_okay=False)
    ] = None,
    jobs: shared.Jobs = None,
    memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Memory for all cells, such as 8GB.", show_default="80 % of what is free"),
    ] = None,
    only: Only = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check every cell and say what would run.")] = False,
    quiet: shared.Quiet = False,
    as_json: shared.Json = False,
) -> None:
    """Run every cell and seed of a grid that has not been run yet; interrupted cells are resumed."""
    from fedloom.study.grid import FILE, default_folder, load_grid

    if name is None:
        _list(as_json)
        return
    budget = None if memory is None else size(memory)
    continues = (Path(name) / FILE).is_file()
    asked = load_grid(Path(name) / FILE if continues else name, changes or ())
    folder = out or (Path(name) if continues else default_folder(asked))
    from fedloom.experiments.grid_progress import progress
    from fedloom.experiments.grid_run import prepare, run_prepared

    try:
        with at(str(Path(name) / FILE)) if continues else nullcontext():
            prepared = prepare(asked, folder, only or ())
        _before(prepared)
        if dry_run:
            _plan(prepared, as_json)
            return
        outcome = run_prepared(prepared, progress(quiet), jobs, budget)
    except KeyboardInterrupt:
        known = (folder / FILE).is_file()
        more = f"continue with: fedloom grid {folder}" if known else "nothing was written yet"
        typer.echo(f"interrupted; {more}", err=True)
        raise typer.Exit(130) from None
    _after(prepared, outcome, as_json)


def size(text: str) -> int:
    """'8GB', '500 MB' or '2e9' in bytes (powers of ten). Raises UserError."""
    found = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([kMGT]?)B?\s*", text)
    try:
        value = float(found[1]) * 1000 ** " kMGT".index(found[2] or " ") if found else 0.0
    except ValueError:
        value = 0.0
    if not 0 < value < 1e18:
        raise UserError(f"--memory: {text!r} found, expected a size such as 8GB or 500MB")
    return int(value)


def _list(as_json: bool) -> None:
    from fedloom.study.grid import cells, load_grid, names, summary

    rows = [
        {"grid": name, "what it compares": summary(name), "runs": sum(1 for _ in cells(load_grid(name)))}
        for name in names()
    ]
    shared.answer(rows, as_json, shared.table_of(rows), "Run one: fedloom grid NAME, with --dry-run to see its cells")


def _before(prepared: Prepared) -> None:
    """What a person should know before anything runs."""
    for name, reason in prepared.refused.items():
        typer.echo(f"refused: {name}: {reason}", err=True)
    done = sum(state == "finished" for state in prepared.states.values())
    if done:
        typer.echo(f"{done} of {len(prepared.states)} runs are finished already", err=True)


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
    last = f"{len(prepared.todo)} runs would start, in {prepared.folder}"
    shared.answer(rows, as_json, shared.table_of(rows), last)


def _after(prepared: Prepared, outcome: Outcome, as_json: bool) -> None:
    from fedloom.federation.runs.reader import human_bytes

    for name, reason in outcome.refused.items():
        typer.echo(f"refused: {name}: {reason}", err=True)
    for cell, message in outcome.failed.items():
        typer.echo(f"failed: {cell}: {message}", err=True)
    done = sum(state == "finished" for state in prepared.states.values()) + len(outcome.finished)
    peak = f"; the largest run took {human_bytes(outcome.peak)} of memory" if outcome.peak else ""
    lines = [f"{done} of {len(prepared.states)} runs are finished{peak}"]
    lines.append(f"its table: fedloom table {prepared.folder}")
    draw = f"fedloom figure {prepared.folder} --out FILE.png"
    if prepared.grid.figure is not None:
        lines.append(f"its figure: {draw}")
    lines += [f"its figure {name}: {draw} --named {shlex.quote(name)}" for name in prepared.grid.figures]
    value = {"folder": prepared.folder, "runs": len(prepared.states), "finished": done, "peak_bytes": outcome.peak}
    failed = {str(cell): message for cell, message in outcome.failed.items()}
    shared.answer({**value, "failed": failed, "refused": outcome.refused}, as_json, *lines)
    if outcome.failed:
        raise typer.Exit(1)
