"""Commands for the figures and tables of five papers: `fedloom papers activated`, `hyper`, `domains`, `features`,
`relatedness` and `join`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from fedloom.cli import shared
from fedloom.cli.shared import argument, flag, option
from fedloom.core.errors import UserError

if TYPE_CHECKING:
    from fedloom.study.charts import Chart

Run = Annotated[Path, argument("The folder of a finished run.", "RUN")]
Out = Annotated[
    Path | None,
    shared.out_option(
        "The file to write: .png, .svg or .pdf for the picture, .csv or .md for the numbers.",
        metavar="FILE",
        show_default="print tables",
        dir_okay=False,
    ),
]


def activated(
    folder: Annotated[Path, argument("The folder of a run with the add-on activated-dimensions.", "RUN")],
    out: Out = None,
    scope: Annotated[
        Literal["encoder", "all"] | None,
        option("The part of the model from which the dimensions are chosen.", show_default="encoder"),
    ] = None,
    as_json: shared.Json = False,
) -> None:
    """Print which dimensions each client's update activates, and how far clients agree (FedDEA, Figure 2)."""
    from fedloom.study.papers import draw_overlaps, overlaps_of

    _show(found := overlaps_of(folder, scope), out, lambda: draw_overlaps([found]), as_json)


def hyper(
    folder: Annotated[Path, argument("The folder of a run with the method fedhca2.", "RUN")],
    out: Out = None,
    as_json: shared.Json = False,
) -> None:
    """Print how much each client takes from the others over the rounds (FedHCA2's hyper weights)."""
    from fedloom.study.papers import draw_weights, weights_of

    _show(found := weights_of(folder), out, lambda: draw_weights([found]), as_json)


def domains(
    folder: Annotated[Path, argument("The folder of a run whose clients have domains.", "RUN")],
    out: Out = None,
    task: Annotated[str | None, option("The task.", "NAME", show_default="the only one")] = None,
    split: Annotated[str, option("Which examples.", "test|val")] = "test",
    as_json: shared.Json = False,
) -> None:
    """Print a task's metric on each domain over the rounds, with average and spread: last round and best on
    validation.
    """
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
    """Print tables, or write numbers or a picture, as the file's name says."""
    writers = {".csv": result.to_csv, ".md": result.to_markdown}
    if as_json or out is None:
        shared.put(result.to_json() if as_json else result.to_text(), out)
    elif out.suffix in writers:
        shared.put(writers[out.suffix](), out)
    else:
        from fedloom.study.charts import save

        save(draw(), out)
        typer.echo(f"{out}")


def features(
    folders: Annotated[list[Path], argument("The folders of finished runs on the same domains.", "RUN...")],
    out: Annotated[
        Path | None, shared.out_option("Write figures and CSV files there too.", metavar="DIR", file_okay=False)
    ] = None,
    examples: Annotated[
        int, option("The largest number of test examples per domain, for spectra and t-SNE.", min=2)
    ] = 500,
    images: Annotated[int, option("The number of test images per domain, for Grad-CAM.", min=1)] = 2,
    task: Annotated[str | None, option("The classification task.", "NAME", show_default="the only one")] = None,
    device: shared.Device = None,
    quiet: shared.Quiet = False,
    as_json: shared.Json = False,
) -> None:
    """Compute features of runs with domains: effective ranks, and accuracies of f+, f-, f* and f~ (F2DC, Figure 1,
    Table 7).

    With --out also figures: singular values of their covariance, t-SNE and Grad-CAM (Figures 1, 4 and 2).
    """
    for folder in folders:
        shared.threads_of(folder)
    from fedloom.experiments.papers.features import features as look

    with shared.bar(quiet) as advance:
        study = look(folders, examples, images, task, out is not None, device, advance)
    shared.answer({name: records.rows() for name, records in study.records().items()}, as_json, study.to_text())
    if out is not None:
        for file in study.write(out):
            typer.echo(f"{file}", err=True)


def relatedness(
    folder: Run,
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
        shared.out_option(
            "Write a CSV file per metric and heat maps there too; fedloom report DIR then makes a page of them.",
            metavar="DIR",
            file_okay=False,
        ),
    ] = None,
    examples: Annotated[int, option("The largest number of examples per task.", min=2)] = 200,
    kind: Annotated[Literal["text", "csv"], flag("--format", "The output format.")] = "text",
    device: shared.Device = None,
    quiet: shared.Quiet = False,
    as_json: shared.Json = False,
) -> None:
    """Print how related a run's tasks are by several metrics, and how far these agree (MaTU, Figures 2 and 3).

    The run needs a model per task: a run of matu, or of local with clients that hold one task each.
    """
    named = None if metrics is None else [name.strip() for name in metrics.split(",") if name.strip()]
    if named == []:
        raise UserError("--metrics: expected names, for example sign,cosine")
    shared.threads_of(folder)
    from fedloom.experiments.papers.relatedness import relatedness as relate

    with shared.bar(quiet) as advance:
        result = relate(folder, named, examples, device, advance)
    typer.echo(getattr(result, f"to_{'json' if as_json else kind}")(), nl=False)
    if out is not None:
        for file in result.write(out):
            typer.echo(f"{file}", err=True)


def join(
    folder: Run,
    task: Annotated[str, option("The newcomer's task.", "NAME")],
    client: Annotated[
        str | None, option("A client of the run that takes up the task.", "NAME", show_default="a new one")
    ] = None,
    steps: Annotated[int, option("The number of local steps before signs are compared.", min=1)] = 5,
    rounds: Annotated[int, option("The number of rounds of local training from each start.", min=1)] = 5,
    data: Annotated[
        list[str] | None,
        option("Change the data, for example data.count=9; repeat the option for several.", "KEY=VALUE"),
    ] = None,
    device: shared.Device = None,
    quiet: shared.Quiet = False,
    as_json: shared.Json = False,
) -> None:
    """Let a new task join a run of matu: does it gain from a start near tasks with similar signs?"""
    shared.threads_of(folder)
    from fedloom.experiments.papers.join import join as join_run

    with shared.bar(quiet) as advance:
        newcomer = join_run(
            folder, task, client, steps, rounds, data or (), device, lambda done, of: advance(done, of, "training")
        )
    sides = [*enumerate(zip(newcomer.initial, newcomer.similar, newcomer.gain, strict=True))]
    value = {
        **{key: getattr(newcomer, key) for key in ("task", "client", "examples", "metric", "notes")},
        "similarity": newcomer.start.similarity,
        "shares": newcomer.start.weights,
        "rounds": [{"round": r, "initial": a, "similar": b, "gain": gain} for r, (a, b, gain) in sides],
    }
    shared.answer(value, as_json, newcomer.to_text())
