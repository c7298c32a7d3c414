"""`fedloom compare`, `plot figure` and `study benchmark`: what the numbers of runs and grids say."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from fedloom.cli import complete, shared
from fedloom.core.errors import UserError

if TYPE_CHECKING:
    from fedloom.study.grid import Grid
    from fedloom.study.tables.compare import Comparison
    from fedloom.study.tables.output import HasTable

Out = Annotated[Path | None, shared.out_option("Write to this file instead.", dir_okay=False)]
Source = Annotated[
    str,
    typer.Argument(
        metavar="GRID",
        help="A grid that has run: its name or file (if it ran in the default folder), or its folder.",
        autocompletion=complete.grid,
    ),
]
AtOption = Annotated[
    Literal["last", "best-validation"] | None,
    typer.Option(
        help="The model of a run that counts: the last one, or the best one on validation data.",
        show_default="as the grid says",
    ),
]
LossesOption = Annotated[
    Literal["best", "rounds"] | None,
    typer.Option(
        help="Print the best validation loss of each cell of a grid instead, with its round, the rounds run and the "
        "variation over seeds; or the losses of each round and task."
    ),
]
MetricsOption = Annotated[
    bool, typer.Option("--metrics", help="Print every metric of every task of a grid instead, with ranks.")
]
SeedsOption = Annotated[
    bool, typer.Option("--seeds", help="Print the number of every seed, method and task of a grid instead.")
]

WIDE = 200
"""Letters across where the output is no terminal."""


def compare(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN|GRID|RECIPE...",
            help="Run folders; runs that differ only in the seed become one column. Or one grid that has run: its "
            "name, "
            "its file or its folder. Or one recipe, to learn whether training together pays off; its runs are "
            "stored in "
            "comparisons/NAME.",
        ),
    ],
    base: Annotated[
        str | None,
        typer.Option(
            metavar="RUN|BASE/ADDON",
            help="The baseline of the changes (Δm): a column or a run folder; for a grid a cell, or 'base' for the "
            "same base with the first add-on.",
            show_default="the first column, or as the grid says",
        ),
    ] = None,
    kind: shared.Kind = "text",
    as_json: shared.Json = False,
    out: Out = None,
    split: shared.SplitOption = "test",
    metric: Annotated[
        str | None, typer.Option(help="The metric to compare by.", show_default="each task's own")
    ] = None,
    tests: shared.TestsOption = False,
    over: shared.OverOption = "seeds",
    ranks: shared.RanksOption = None,
    plot: shared.PlotOption = None,
    at: AtOption = None,
    losses: LossesOption = None,
    metrics: MetricsOption = False,
    seeds: SeedsOption = False,
) -> None:
    """Put runs side by side, task by task, with intervals over seeds; or test or rank them.

    For a grid, print its table, with tasks as columns. For a recipe, tune and run local training, three federated
    methods and centralised training, and say which clients benefit.
    """
    from fedloom.study.grid import against
    from fedloom.study.significance.contrasts import contrasts
    from fedloom.study.significance.ranks import ranked
    from fedloom.study.tables.results import of_grid

    source, more = str(runs[0]), {"losses": losses, "metrics": metrics, "seeds": seeds}
    made: HasTable
    if len(runs) == 1 and _is_grid(source):
        shared.one_of(tests, over, ranks, plot, **more)
        opened, folder = _opened(source, at)
        if metric is not None:
            opened = opened.model_copy(update={"metric": metric})
        if base is not None:
            opened = against(opened, base)
            if any(more.values()):
                raise UserError(
                    "--base is for tables of changes, but --losses, --metrics and --seeds show none: leave --base out"
                )
        if ranks or tests:
            results = of_grid(opened, folder, split)
        else:
            made = _of_grid(opened, folder, split, losses, metrics, seeds)
    else:
        for name, value in {"at": at, **more}.items():
            if value:
                raise UserError(f"--{name} is only for a grid: give a grid's name, file or folder")
        shared.one_of(tests, over, ranks, plot)
        made = comparison = _of_runs(runs, base, split, metric)
        results = comparison.results
    if ranks:
        made = ranked(results, ranks)
        shared.draw_ranks(made, plot)
    elif tests:
        made = contrasts(results, over)
    _print(made, kind, as_json, out)


def _of_grid(
    grid: Grid, folder: Path, split: Literal["test", "val"], losses: str | None, metrics: bool, seeds: bool
) -> HasTable:
    """Return the table of a grid, or the other one that is asked for."""
    from fedloom.study.papers.losses import losses_of, over_rounds
    from fedloom.study.tables.table import all_metrics, of_seeds, tabulate

    if losses:
        return losses_of(grid, folder, split) if losses == "best" else over_rounds(grid, folder, split)
    return (all_metrics if metrics else of_seeds if seeds else tabulate)(grid, folder, split)


def _of_runs(runs: Sequence[Path], base: str | None, split: Literal["test", "val"], metric: str | None) -> Comparison:
    """Return runs side by side, or what a recipe's own runs, which this makes, say."""
    from fedloom.federation.recipes.loader import load, names

    if len(runs) == 1 and (runs[0].is_file() or (str(runs[0]) in names() and not runs[0].is_dir())):
        from fedloom.experiments.compared import compare as run_and_compare

        recipe = load(str(runs[0]))
        return run_and_compare(recipe, folder=Path("comparisons") / recipe.name, split=split, metric=metric)
    from fedloom.study import compare as put_side_by_side

    return put_side_by_side(runs, base, split, metric)


def figure(
    source: Source,
    out: Annotated[Path, shared.out_option("The file to write: .png, .svg or .pdf.", metavar="FILE", dir_okay=False)],
    split: shared.SplitOption = "test",
    at: AtOption = None,
    named: Annotated[str | None, typer.Option(metavar="NAME", help="The name of one of the grid's `figures`.")] = None,
) -> None:
    """Draw the figure of a grid, or one of its figures by its name."""
    from fedloom.study.figures import draw

    opened, folder = _opened(source, at)
    draw(opened, folder, out, split, named)
    typer.echo(f"{out}")


def benchmark(source: Source, as_json: shared.Json = False) -> None:
    """Say whether a benchmark is sensitive enough, from a grid of Local, centralised and constant.

    It reads validation data. docs/benchmarks.md explains the rules. The exit code is 1 if a data set of the grid fails
    one or has not been run.
    """
    from fedloom.study.benchmark import judge, verdict_lines

    opened, folder = _opened(source, None)
    verdicts, unjudged = judge(opened, folder)
    shown: list[Any] = []
    for verdict in verdicts:
        shown.append(f"{verdict.data} (validation data, seeds {', '.join(map(str, verdict.seeds))}), percent")
        head = ("task", "alone over constant", "centralised over alone", "loss falls a round")
        shown.append(shared.table_of([dict(zip(head, row, strict=True)) for row in verdict.rows]))
    shown += [*verdict_lines(verdicts), *unjudged]
    shared.answer({"benchmarks": verdicts, "not judged": unjudged}, as_json, *shown)
    if unjudged or any(verdict.reasons for verdict in verdicts):
        raise typer.Exit(1)


def _is_grid(source: str) -> bool:
    """Return whether a source is a grid: its folder, a packaged name that no recipe has, or a file with `bases`."""
    from fedloom.federation.recipes import loader
    from fedloom.study.grid import FILE, HOME, default_folder, load_grid, names, ran

    if (Path(source) / FILE).is_file() or source in ran():
        return True
    if source in names():  # the name of a recipe, too, is the grid's only where that has run
        return source not in loader.names() or (default_folder(load_grid(source)) / FILE).is_file()
    if not Path(source).exists():
        return source not in loader.names()
    with suppress(UserError):
        return "bases" in loader.read(source, "grid", HOME).value
    return False


def _opened(source: str, at: str | None) -> tuple[Grid, Path]:
    from fedloom.study.grid import open_folder

    opened, folder = open_folder(source)
    return (opened if at is None else opened.model_copy(update={"at": at})), folder


def _print(table: HasTable, kind: str, as_json: bool, out: Path | None) -> None:
    """Write in the format that was chosen; on a terminal the best numbers are bold."""
    from fedloom.study.tables.compare import Comparison

    if kind != "text" or out is not None or as_json:
        shared.put(getattr(table, f"to_{'json' if as_json else kind}")(), out)
        return
    on_terminal = sys.stdout.isatty()
    width = shutil.get_terminal_size().columns if on_terminal else WIDE
    sheet = table.as_table(width) if isinstance(table, Comparison) else table.as_table()
    shared.put(sheet.to_text(color=on_terminal), None)
