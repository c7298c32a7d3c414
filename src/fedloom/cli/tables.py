"""Numbers of runs and grids: `fedloom compare`, `plot figure`, `study benchmark` and `relatedness`, and `papers`."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from fedloom.cli import shared
from fedloom.cli.shared import argument, flag, option
from fedloom.core.errors import UserError

if TYPE_CHECKING:
    from fedloom.study.charts import Chart
    from fedloom.study.grid import Grid
    from fedloom.study.output import HasTable


Source = Annotated[
    str,
    argument(
        "A grid that has run: its folder, or its name or file if it ran in the default folder.",
        "GRID",
        autocompletion=shared.complete_grid,
    ),
]
AtOption = Annotated[
    Literal["last", "best-validation"] | None,
    option(
        "The model of each run to use: the last one, or the best one on validation data.",
        show_default="as the grid says",
    ),
]
WIDE = 200
"""Characters per line if the output is not a terminal."""


def compare(
    runs: Annotated[
        list[Path],
        argument(
            "Run folders (runs that differ only in the seed become one column), or one grid that has run (its name, "
            "file or folder), or one recipe with changes of its keys. A recipe is trained first, to see whether "
            "training together pays off; its runs are stored in comparisons/NAME.",
            "RUN|GRID|RECIPE...",
        ),
    ],
    base: Annotated[
        str | None,
        option(
            "The baseline of the changes (Δm): a column or a run folder; for a grid a cell, or 'base' for "
            "the same method with the first add-on.",
            "RUN|BASE/ADDON",
            show_default="the first column, or as the grid says",
        ),
    ] = None,
    kind: shared.Kind = "text",
    as_json: shared.Json = False,
    out: shared.Out = None,
    split: shared.SplitOption = "test",
    metric: Annotated[str | None, option("The metric to compare.", show_default="each task's own")] = None,
    tests: Annotated[
        bool, flag("--tests", "Print paired tests against the baseline instead, with intervals and effect sizes.")
    ] = False,
    over: Annotated[
        Literal["seeds", "clients"],
        option(
            "The pairs of --tests: runs of the same seed, or clients (these train together and are not independent)."
        ),
    ] = "seeds",
    ranks: Annotated[
        Literal["seeds", "tasks"] | None,
        option("Print mean ranks instead, over (task, seed) pairs or over each task's mean over seeds."),
    ] = None,
    plot: Annotated[
        Path | None,
        option(
            "Also draw the ranks as a critical-difference plot, to this file (.svg, .png or .pdf).",
            "FILE",
            dir_okay=False,
        ),
    ] = None,
    at: AtOption = None,
    losses: Annotated[
        Literal["best", "rounds"] | None,
        option(
            "best: print the best validation loss of each cell of a grid instead, with its round, the number of rounds "
            "and the spread over seeds. rounds: print the losses of each round and task."
        ),
    ] = None,
    metrics: Annotated[
        bool, flag("--metrics", "Print every metric of every task of a grid instead, with ranks.")
    ] = False,
    seeds: Annotated[
        bool, flag("--seeds", "Print the number of every seed, method and task of a grid instead.")
    ] = False,
    percent: Annotated[
        bool, flag("--percent", "In the table of a grid, print fractions such as accuracies in percent.")
    ] = False,
    trials: Annotated[
        int | None, option("The number of settings to try per method of a recipe.", min=1, show_default="8")
    ] = None,
    seed_count: Annotated[
        int | None, option("The number of seeds to run each method of a recipe with.", min=2, show_default="3")
    ] = None,
    jobs: shared.Jobs = None,
) -> None:
    """Compare runs task by task, with intervals over seeds; or test or rank them.

    For a grid, print its table, with tasks as columns. For a recipe, tune and run local training, three federated
    methods, centralised training and a linear model, and say which clients benefit.
    """
    from fedloom.federation.recipes.loader import names as recipes
    from fedloom.study.comparison import compare as side_by_side
    from fedloom.study.grid import against, means_grid
    from fedloom.study.results import of_grid, of_seeds
    from fedloom.study.significance import contrasts, ranked

    source, of_grids = str(runs[0]), {"losses": losses, "metrics": metrics, "seeds": seeds}
    is_grid = len(runs) == 1 and means_grid(source, if_ran=True)
    for name, value in {} if is_grid else {"at": at, "percent": percent, **of_grids}.items():
        if value:
            raise UserError(f"--{name} is only for a grid: give a grid's name, file or folder")
    changes = [str(change) for change in runs[1:] if "=" in str(change) and not change.exists()]
    is_one = runs[0].is_file() or (source in recipes() and not runs[0].is_dir())
    is_recipe = not is_grid and is_one and len(changes) == len(runs) - 1
    for name, given in {"--trials": trials, "--seed-count": seed_count, "--jobs": jobs}.items():
        if given is not None and not is_recipe:
            raise UserError(
                f"{name} is only for a recipe, whose methods are tuned and run: give a recipe's name or file"
            )
    if base is not None and is_recipe:
        raise UserError("--base: the runs of a recipe are compared with local: leave --base out")
    asked = [f"--{name}" for name, wanted in {"tests": tests, "ranks": ranks, **of_grids}.items() if wanted]
    if len(asked) > 1:
        raise UserError(f"{asked[0]} and {asked[1]} are two tables: choose one")
    if percent and (asked or kind == "csv" or as_json):
        raise UserError("--percent is for the text of a grid's table: leave it out with CSV, JSON and other tables")
    if over == "clients" and not tests:
        raise UserError("--over is only for --tests: add --tests, or leave --over out")
    if plot is not None and not ranks:
        raise UserError("--plot draws ranks: add --ranks seeds or --ranks tasks")
    shown: HasTable
    if is_grid:
        opened, folder = _opened(source, at)
        if metric is not None:
            opened = opened.model_copy(update={"metric": metric})
        if base is not None:
            opened = against(opened, base)
            if any(of_grids.values()):
                raise UserError(
                    "--base is for tables of changes, but --losses, --metrics and --seeds show none: leave --base out"
                )
        from fedloom.study.papers import losses_of, over_rounds
        from fedloom.study.table import all_metrics, tabulate

        others: Any = {"best": losses_of, "rounds": over_rounds, "metrics": all_metrics, "seeds": of_seeds}
        if ranks or tests:
            results = of_grid(opened, folder, split)
        elif other := losses or "metrics" * metrics or "seeds" * seeds:
            shown = others[other](opened, folder, split)
        else:
            shown = tabulate(opened, folder, split, percent)
    else:
        if is_recipe:
            from fedloom.experiments.compared import compare as run_and_compare
            from fedloom.experiments.tune import Budget
            from fedloom.federation.recipes.loader import load

            recipe, budget = load(source, changes), None if trials is None else Budget(trials=trials)
            home = Path("comparisons") / recipe.name
            with shared.interruptible(home, "run the same command to continue"):
                comparison = run_and_compare(
                    recipe, folder=home, seeds=seed_count, split=split, metric=metric, budget=budget, jobs=jobs
                )
        else:
            comparison = side_by_side(runs, base, split, metric)
        shown, results = comparison, comparison.results
    if ranks:
        shown = ranked(results, ranks)
        if plot is not None:
            from fedloom.study.charts import save
            from fedloom.study.figures import of_ranks

            save(of_ranks(shown), plot)
    elif tests:
        shown = contrasts(results, over)
    _print(shown, kind, as_json, out)


def figure(
    source: Source,
    out: Annotated[Path, shared.out_file("The file to write: .png, .svg or .pdf.", "FILE")],
    split: shared.SplitOption = "test",
    at: AtOption = None,
    named: Annotated[str | None, option("The name of one of the grid's `figures`.", "NAME")] = None,
) -> None:
    """Draw the figure of a grid, or one of its figures by name."""
    from fedloom.study.figures import draw

    opened, folder = _opened(source, at)
    draw(opened, folder, out, split, named)
    typer.echo(f"{out}")


def benchmark(source: Source, as_json: shared.Json = False) -> None:
    """Say whether a benchmark is sensitive enough to separate methods, from a grid of Local, centralised and constant.

    It reads validation data. docs/benchmarks.md explains the rules. The exit code is 1 if a data set of the grid fails
    a rule or has not been run.
    """
    from fedloom.study.claims import sensitivities, sentences

    opened, folder = _opened(source, None)
    found, unjudged = sensitivities(opened, folder)
    shown: list[Any] = []
    for one in found:
        shown.append(f"{one.data} (validation data, seeds {', '.join(map(str, one.seeds))}), percent")
        head = ("task", "alone over constant", "centralised over alone", "loss falls per tenth")
        shown.append(shared.table_of([dict(zip(head, row, strict=True)) for row in one.rows]))
    shown += [*sentences(found), *unjudged]
    shared.answer({"benchmarks": found, "not judged": unjudged}, as_json, *shown)
    if unjudged or any(one.reasons for one in found):
        raise typer.Exit(1)


def _opened(source: str, at: str | None) -> tuple[Grid, Path]:
    from fedloom.study.grid import open_folder

    opened, folder = open_folder(source)
    return (opened if at is None else opened.model_copy(update={"at": at})), folder


def _print(table: HasTable, kind: str, as_json: bool, out: Path | None) -> None:
    """Write a table in the chosen format; on a terminal the best numbers are bold."""
    from fedloom.study.comparison import Comparison

    if kind != "text" or out is not None or as_json:
        shared.put_table(table, kind, as_json, out)
        return
    on_terminal = sys.stdout.isatty()
    width = shutil.get_terminal_size().columns if on_terminal else WIDE
    sheet = table.as_table(width) if isinstance(table, Comparison) else table.as_table()
    shared.put(sheet.to_text(color=on_terminal), None)


RunArgument = Annotated[Path, argument("The folder of a finished run.", "RUN")]
PictureOut = Annotated[
    Path | None,
    shared.out_file(
        "The file to write: .png, .svg or .pdf for the picture, .csv or .md for the numbers.",
        "FILE",
        default="print tables",
    ),
]


def activated(
    folder: Annotated[Path, argument("The folder of a run with the add-on activated-dimensions.", "RUN")],
    out: PictureOut = None,
    scope: Annotated[
        Literal["encoder", "all"] | None,
        option("The part of the model whose dimensions count.", show_default="encoder"),
    ] = None,
    as_json: shared.Json = False,
) -> None:
    """Print the dimensions that each client's update activates, and how far clients agree (FedDEA, Figure 2)."""
    from fedloom.study.papers import draw_overlaps, overlaps_of

    _show(found := overlaps_of(folder, scope), out, lambda: draw_overlaps([found]), as_json)


def hyper(
    folder: Annotated[Path, argument("The folder of a run with the method fedhca2.", "RUN")],
    out: PictureOut = None,
    as_json: shared.Json = False,
) -> None:
    """Print how much each client takes from the others in each round (FedHCA2's hyper weights)."""
    from fedloom.study.papers import draw_weights, weights_of

    _show(found := weights_of(folder), out, lambda: draw_weights([found]), as_json)


def domains(
    folder: Annotated[Path, argument("The folder of a run whose clients have domains.", "RUN")],
    out: PictureOut = None,
    task: Annotated[str | None, option("The task.", "NAME", show_default="the only one")] = None,
    split: Annotated[str, option("The examples.", "test|val")] = "test",
    as_json: shared.Json = False,
) -> None:
    """Print a task's metric per domain: last round and best on validation data, average and spread, over the rounds."""
    from fedloom.federation.runs.reader import Run
    from fedloom.study.charts import lines
    from fedloom.study.results import domain_history

    history = domain_history(Run.read(folder), task, split=split)

    def draw() -> Chart:
        each = {name: {s.round: s.values[name] for s in history.rounds} for name in history.last.values}
        mean = {"average": {scores.round: scores.average for scores in history.rounds}}
        return lines(each | mean, "round", f"{history.task} {history.metric}", title=history.label, strong=mean)

    _show(history, out, draw, as_json)


def _show(result: Any, out: Path | None, draw: Callable[[], Chart], as_json: bool) -> None:
    """Print tables, or write numbers or a picture, by the extension of the file."""
    writers = {".csv": result.to_csv, ".md": result.to_markdown}
    if as_json or out is None:
        shared.put(result.to_json() if as_json else result.to_text(), out)
    elif out.suffix in writers:
        shared.put(writers[out.suffix](), out, out.suffix[1:])
    else:
        from fedloom.study.charts import save

        save(draw(), out)
        typer.echo(f"{out}")


def features(
    folders: Annotated[list[Path], argument("The folders of finished runs on the same domains.", "RUN...")],
    out: Annotated[Path | None, shared.out_folder("Also write figures and CSV files to this folder.", "DIR")] = None,
    examples: Annotated[
        int, option("The largest number of test examples per domain, for spectra and t-SNE.", min=2)
    ] = 500,
    images: Annotated[int, option("The number of test images per domain, for Grad-CAM.", min=1)] = 2,
    task: Annotated[str | None, option("The classification task.", "NAME", show_default="the only one")] = None,
    device: shared.Device = None,
    quiet: shared.Quiet = False,
    as_json: shared.Json = False,
) -> None:
    """Compare features of runs with domains: effective ranks; accuracies of f+, f-, f*, f~ (F2DC, Figure 1, Table 7).

    With --out, also draw singular values of their covariance, t-SNE and Grad-CAM (Figures 1, 4 and 2).
    """
    for folder in folders:
        shared.threads_of(folder)
    from fedloom.experiments.papers.features import features as look

    with shared.bar(quiet) as advance:
        study = look(folders, examples, images, task, out is not None, device, advance)
    shared.answer({name: records.rows() for name, records in study.records().items()}, as_json, study.to_text())
    for file in study.write(out) if out is not None else ():
        typer.echo(f"{file}", err=True)


def relatedness(
    folder: RunArgument,
    metrics: Annotated[
        str | None,
        option(
            "The metrics to compute: sign, cosine, logme, etran, fim, wte.",
            "NAME,...",
            show_default="all that the tasks allow",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        shared.out_folder(
            "Also write a CSV file per metric and heat maps to this folder; `fedloom report DIR` shows it.", "DIR"
        ),
    ] = None,
    examples: Annotated[int, option("The largest number of examples per task.", min=2)] = 200,
    kind: Annotated[Literal["text", "csv"], flag("--format", "The output format.")] = "text",
    device: shared.Device = None,
    quiet: shared.Quiet = False,
    as_json: shared.Json = False,
) -> None:
    """Print how related the tasks of a run are by several metrics, and how far these agree (MaTU, Figures 2 and 3).

    The run needs a model per task: use a run of matu, or of local with one task per client.
    """
    named = shared.listed(metrics)
    if named == []:
        raise UserError("--metrics: expected names, for example sign,cosine")
    shared.threads_of(folder)
    from fedloom.experiments.papers.relatedness import relatedness as relate

    with shared.bar(quiet) as advance:
        result = relate(folder, named, examples, device, advance)
    typer.echo(getattr(result, f"to_{'json' if as_json else kind}")(), nl=False)
    for file in result.write(out) if out is not None else ():
        typer.echo(f"{file}", err=True)


def join(
    folder: RunArgument,
    task: Annotated[str, option("The new task.", "NAME")],
    client: Annotated[
        str | None, option("The client of the run that gets the task.", "NAME", show_default="a new client")
    ] = None,
    steps: Annotated[int, option("The number of local steps before signs are compared with other tasks.", min=1)] = 5,
    rounds: Annotated[int, option("The number of rounds of local training from each start.", min=1)] = 5,
    data: Annotated[
        list[str] | None,
        option("Change the data, for example data.count=9; repeat the option for several.", "KEY=VALUE"),
    ] = None,
    device: shared.Device = None,
    quiet: shared.Quiet = False,
    as_json: shared.Json = False,
) -> None:
    """Let a new task join a run of matu: does it learn faster from a start near tasks with similar signs?"""
    shared.threads_of(folder)
    from fedloom.experiments.papers.join import join as join_run

    with shared.bar(quiet) as advance:
        newcomer = join_run(folder, task, client, steps, rounds, data or (), device, advance)
    sides = [*enumerate(zip(newcomer.initial, newcomer.similar, newcomer.gain, strict=True))]
    value = {
        **{key: getattr(newcomer, key) for key in ("task", "client", "examples", "metric", "notes")},
        "similarity": newcomer.start.similarity,
        "shares": newcomer.start.weights,
        "rounds": [{"round": r, "initial": a, "similar": b, "gain": gain} for r, (a, b, gain) in sides],
    }
    shared.answer(value, as_json, newcomer.to_text())
