"""`fedloom grid`, `fedloom table` and `fedloom figure`: a whole table of a paper as one command."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from fedloom.cli import shared
from fedloom.errors import UserError, writing

if TYPE_CHECKING:
    from fedloom.experiments.grid_run import Outcome, Prepared
    from fedloom.study.grid import Grid
    from fedloom.study.tables.sheet import Sheeted

GridArgument = Annotated[
    str | None,
    typer.Argument(metavar="GRID", help="A packaged grid (no argument: list them), a YAML file, or a grid's folder."),
]
Source = Annotated[
    str, typer.Argument(metavar="GRID_OR_FOLDER", help="A grid that ran in its default folder, or a grid's folder.")
]
Only = Annotated[
    list[str] | None,
    typer.Option(metavar="LABEL", help="Only cells with this data set, base or add-on; may be given several times."),
]
AtOption = Annotated[
    Literal["last", "best-validation"] | None,
    typer.Option(
        help="Which model of a run counts: the one kept at the end, or the best on validation data.",
        show_default="as the grid says",
    ),
]


def grid(
    name: GridArgument = None,
    changes: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE...",
            help="Changes of every cell, for example training.rounds=2; seeds=[0,1], delta=, show=, at= change the "
            "grid.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The grid's folder.", show_default="grids/NAME", file_okay=False)
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Cells at once.", show_default="as many as the CPUs can take")
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Memory for all cells, such as 8GB.", show_default="80 % of what is free"),
    ] = None,
    only: Only = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check every cell and say what would run.")] = False,
    quiet: shared.Quiet = False,
) -> None:
    """Run every cell and seed of a grid that has not been run yet; interrupted cells are resumed."""
    from fedloom.study.grid import FILE, default_folder, load_grid

    if name is None:
        _list()
        return
    budget = None if memory is None else size(memory)
    continues = (Path(name) / FILE).is_file()
    asked = load_grid(Path(name) / FILE if continues else name, changes or ())
    folder = out or (Path(name) if continues else default_folder(asked))
    from fedloom.experiments.grid_progress import progress
    from fedloom.experiments.grid_run import prepare, run_prepared

    try:
        prepared = prepare(asked, folder, only or ())
        _before(prepared)
        if dry_run:
            _plan(prepared)
            return
        outcome = run_prepared(prepared, progress(quiet), jobs, budget)
    except KeyboardInterrupt:
        known = (folder / FILE).is_file()
        more = f"continue with: fedloom grid {folder}" if known else "nothing was written yet"
        typer.echo(f"interrupted; {more}", err=True)
        raise typer.Exit(130) from None
    _after(prepared, outcome)


def table(
    source: Source,
    kind: Annotated[
        Literal["text", "markdown", "csv", "latex", "html"], typer.Option("--format", help="How to write it.")
    ] = "text",
    out: Annotated[Path | None, typer.Option(help="Write to this file instead.", dir_okay=False)] = None,
    split: shared.SplitOption = "test",
    at: AtOption = None,
    metric: Annotated[
        str | None,
        typer.Option(help="Show this metric, of the tasks that have it: loss, say.", show_default="each task's own"),
    ] = None,
    base: Annotated[
        str | None,
        typer.Option(
            metavar="BASE/ADDON",
            help="What changes are against: a cell, or 'base' for the same base with the first add-on.",
            show_default="as the grid says",
        ),
    ] = None,
    tests: shared.TestsOption = False,
    over: shared.OverOption = "seeds",
    ranks: shared.RanksOption = None,
    plot: shared.PlotOption = None,
    losses: Annotated[
        Literal["best", "rounds"] | None,
        typer.Option(
            help="Instead: the best validation loss of each cell with its round, the rounds run and the variation over "
            "seeds; or the losses of each round and task."
        ),
    ] = None,
    metrics: Annotated[
        bool, typer.Option("--metrics", help="Instead: every metric of every task, with ranks.")
    ] = False,
) -> None:
    """Print the table of a grid: tasks as columns, mean and interval over seeds, and the change in percent."""
    from fedloom.study.grid import against
    from fedloom.study.papers.losses import losses_of, over_rounds
    from fedloom.study.significance.contrasts import grid_contrasts
    from fedloom.study.significance.ranks import grid_ranked
    from fedloom.study.tables.formats import FORMATS, to_text
    from fedloom.study.tables.metrics import all_metrics
    from fedloom.study.tables.table import tabulate

    shared.one_of(tests, over, ranks, plot, losses=losses, metrics=metrics)
    opened, folder = _opened(source, at)
    if metric is not None:
        opened = opened.model_copy(update={"metric": metric})
    if base is not None:
        opened = against(opened, base)
    made: Sheeted | None = None
    if base is not None and (losses or metrics):
        raise UserError("--base says what changes are against, and --losses and --metrics show none")
    if losses:
        made = losses_of(opened, folder, split) if losses == "best" else over_rounds(opened, folder, split)
    elif metrics:
        made = all_metrics(opened, folder, split)
    if made is not None:
        text = getattr(made, f"to_{kind}")()
    elif ranks:
        found = grid_ranked(opened, folder, split, ranks)
        shared.draw_ranks(found, plot)
        text = getattr(found, f"to_{kind}")()
    elif tests:
        text = getattr(grid_contrasts(opened, folder, split, over), f"to_{kind}")()
    elif out is None and kind == "text" and sys.stdout.isatty():
        text = to_text(tabulate(opened, folder, split), color=True)
    else:
        text = FORMATS[kind](tabulate(opened, folder, split))
    if out is None:
        typer.echo(text, nl=False)
        return
    with writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text, encoding="utf-8")
    typer.echo(f"{out}")


def figure(
    source: Source,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The file to write: .png, .svg or .pdf.", dir_okay=False)],
    split: shared.SplitOption = "test",
    at: AtOption = None,
    named: Annotated[str | None, typer.Option(metavar="NAME", help="One of the grid's `figures`.")] = None,
) -> None:
    """Draw the figure of a grid, or one of its figures by its name."""
    from fedloom.study.figures import draw

    opened, folder = _opened(source, at)
    draw(opened, folder, out, split, named)
    typer.echo(f"{out}")


def bed(source: Source) -> None:
    """Say whether a test bed can tell methods apart, from a grid of Local, joint and trivial, on validation data.

    The rules, and why, are in docs/beds.md. Exit code 1 where a data set of the grid fails one or has not been run.
    """
    from fedloom.study.bed import judge, verdict_lines

    opened, folder = _opened(source, None)
    verdicts, unjudged = judge(opened, folder)
    for verdict in verdicts:
        typer.echo(f"{verdict.data} (validation data, seeds {', '.join(map(str, verdict.seeds))}), percent")
        head = ["task", "alone over trivial", "joint over alone", "loss falls a round"]
        shared.print_table(head, verdict.rows)
    for line in [*verdict_lines(verdicts), *unjudged]:
        typer.echo(line)
    if unjudged or any(verdict.reasons for verdict in verdicts):
        raise typer.Exit(1)


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


def _opened(source: str, at: str | None) -> tuple[Grid, Path]:
    from fedloom.study.grid import open_folder

    opened, folder = open_folder(source)
    return (opened if at is None else opened.model_copy(update={"at": at})), folder


def _list() -> None:
    from fedloom.study.grid import cells, load_grid, names, summary

    rows = [(name, summary(name), str(sum(1 for _ in cells(load_grid(name))))) for name in names()]
    shared.print_table(["grid", "what it compares", "runs"], rows)
    typer.echo("Run one: fedloom grid NAME, with --dry-run to see its cells")


def _before(prepared: Prepared) -> None:
    """What a person should know before anything runs."""
    for name, reason in prepared.refused.items():
        typer.echo(f"refused: {name}: {reason}", err=True)
    done = sum(state == "finished" for state in prepared.states.values())
    if done:
        typer.echo(f"{done} of {len(prepared.states)} runs are finished already", err=True)


def _plan(prepared: Prepared) -> None:
    from fedloom.runs.reader import human_bytes

    rows = []
    for name in dict.fromkeys(cell.combination for cell in prepared.recipes):
        runs = [cell for cell in prepared.recipes if cell.combination == name]
        states = [prepared.states[cell] for cell in runs]
        need = max((prepared.needs[cell] for cell in runs if cell in prepared.needs), default=0)
        count = {state: states.count(state) for state in ("new", "interrupted", "finished") if state in states}
        text = "refused" if name in prepared.refused else ", ".join(f"{n} {state}" for state, n in count.items())
        rows.append((name, text, human_bytes(need) if need else ""))
    shared.print_table(["cell", "runs", "memory a run"], rows)
    typer.echo(f"{len(prepared.todo)} runs would start, in {prepared.folder}")


def _after(prepared: Prepared, outcome: Outcome) -> None:
    from fedloom.runs.reader import human_bytes

    for name, reason in outcome.refused.items():
        typer.echo(f"refused: {name}: {reason}", err=True)
    for cell, message in outcome.failed.items():
        typer.echo(f"failed: {cell}: {message}", err=True)
    done = sum(state == "finished" for state in prepared.states.values()) + len(outcome.finished)
    peak = f"; the largest run took {human_bytes(outcome.peak)} of memory" if outcome.peak else ""
    typer.echo(f"{done} of {len(prepared.states)} runs are finished{peak}")
    typer.echo(f"its table: fedloom table {prepared.folder}")
    if prepared.grid.figure is not None:
        typer.echo(f"its figure: fedloom figure {prepared.folder} OUT.png")
    for name in prepared.grid.figures:
        typer.echo(f"its figure {name}: fedloom figure {prepared.folder} OUT.png --named {shlex.quote(name)}")
    if outcome.failed:
        raise typer.Exit(1)
