"""`fedloom relatedness` and `fedloom join`: what a run's task vectors say about its tasks, and about new ones."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from fedloom.cli.shared import Device, Json, Quiet, answer, bar, out_option, threads_of
from fedloom.core.errors import UserError

Run = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a finished run.")]


def relatedness(
    folder: Run,
    metrics: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,...", help="sign, cosine, logme, etran, fim, wte.", show_default="all that the tasks allow"
        ),
    ] = None,
    out: Annotated[
        Path | None,
        out_option(
            "Write a CSV file per metric and heat maps there too; fedloom report DIR then makes a page of them.",
            metavar="DIR",
            file_okay=False,
        ),
    ] = None,
    examples: Annotated[int, typer.Option(min=2, help="At most so many examples of each task.")] = 200,
    kind: Annotated[Literal["text", "csv"], typer.Option("--format", help="How to print it.")] = "text",
    device: Device = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """How related a run's tasks are, by several metrics, and how far these agree (MaTU, Figures 2 and 3).

    For runs of matu, whose tasks have a model each, and of local with clients that hold one task each.
    """
    named = None if metrics is None else [name.strip() for name in metrics.split(",") if name.strip()]
    if named == []:
        raise UserError("--metrics: expected names, for example sign,cosine")
    threads_of(folder)
    from fedloom.experiments.papers.relatedness import relatedness as relate

    with bar(quiet) as advance:
        found = relate(folder, named, examples, device, advance)
    typer.echo(getattr(found, f"to_{'json' if as_json else kind}")(), nl=False)
    if out is not None:
        for file in found.write(out):
            typer.echo(f"{file}", err=True)


def join(
    folder: Run,
    task: Annotated[str, typer.Option(metavar="NAME", help="The newcomer's task.")],
    client: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="A client of the run that takes up the task.", show_default="a new one"),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Local steps before signs are compared.")] = 5,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of local training from each start.")] = 5,
    data: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Change the data, such as data.count=9; may be given several times."),
    ] = None,
    device: Device = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Let a new task join a run of matu: does it gain from starting where tasks with similar signs are?"""
    threads_of(folder)
    from fedloom.experiments.papers.join import join as join_run

    with bar(quiet) as advance:
        found = join_run(
            folder, task, client, steps, rounds, data or (), device, lambda done, of: advance(done, of, "training")
        )
    sides = [*enumerate(zip(found.initial, found.similar, found.gain, strict=True))]
    value = {
        **{key: getattr(found, key) for key in ("task", "client", "examples", "metric", "notes")},
        "similarity": found.start.similarity,
        "shares": found.start.weights,
        "rounds": [{"round": r, "initial": a, "similar": b, "gain": gain} for r, (a, b, gain) in sides],
    }
    answer(value, as_json, found.to_text())
