"""`fedloom relatedness` and `fedloom join`: what a run's task vectors say about its tasks, and about new ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from fedloom.errors import StateError, UserError

Run = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a finished run.")]
Device = Annotated[str | None, typer.Option(help="cpu, or cuda.", show_default="the run's")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress; only the result.")]
Advance = Callable[[int, int, str], None]


class MatrixFormat(StrEnum):
    """How the matrices are printed."""

    text = "text"
    csv = "csv"
    json = "json"


def register(app: typer.Typer) -> None:
    """Add the commands of this module to the command line."""
    app.command()(relatedness)
    app.command()(join)


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
        typer.Option(
            metavar="DIR",
            help="Write a CSV a metric and heat maps there too; then fedloom report DIR makes a page of it.",
            file_okay=False,
        ),
    ] = None,
    examples: Annotated[int, typer.Option(min=2, help="At most so many examples of each task.")] = 200,
    kind: Annotated[MatrixFormat, typer.Option("--format", help="What to print.")] = MatrixFormat.text,
    device: Device = None,
    quiet: Quiet = False,
) -> None:
    """How related a run's tasks are, by several metrics, and how far these agree (MaTU, Figures 2 and 3).

    For runs of matu, whose tasks have a model each, and of local with clients that hold one task each.
    """
    named = None if metrics is None else [name.strip() for name in metrics.split(",") if name.strip()]
    if named == []:
        raise UserError("--metrics: expected names, for example sign,cosine")
    threads_of(folder)
    from fedloom.experiments.relatedness import relatedness as relate

    with bar(quiet) as advance:
        found = relate(folder, named, examples, device, advance)
    texts = {MatrixFormat.text: found.to_text, MatrixFormat.csv: found.to_csv, MatrixFormat.json: found.to_json}
    typer.echo(texts[kind](), nl=False)
    if out is not None:
        for file in found.write(out):
            typer.echo(f"{file}", err=True)


def join(
    folder: Run,
    task: Annotated[str, typer.Option(metavar="NAME", help="The newcomer's task.")],
    client: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="A client of the run takes the task up.", show_default="a new one"),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Local steps before signs are compared.")] = 5,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of local training from each start.")] = 5,
    data: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Change the data, such as data.count=9; may be given several times."),
    ] = None,
    device: Device = None,
    quiet: Quiet = False,
) -> None:
    """Let a new task join a run of matu: does it gain from starting where tasks with similar signs are?"""
    threads_of(folder)
    from fedloom.experiments.join import join as join_run

    with bar(quiet) as advance:
        found = join_run(
            folder, task, client, steps, rounds, data or (), device, lambda done, of: advance(done, of, "training")
        )
    typer.echo(found.to_text(), nl=False)


def threads_of(folder: Path) -> None:
    """Torch with as many threads as the run had, for results may depend on it."""
    if not (folder / "recipe.yaml").is_file():
        raise StateError(f"{folder} is not a run folder: recipe.yaml is absent")
    from fedloom.recipes import load

    threads = load(folder / "recipe.yaml").runtime.threads
    import torch

    torch.set_num_threads(threads)


@contextmanager
def bar(quiet: bool) -> Iterator[Advance]:
    """A bar on a terminal; elsewhere a line for each thing that is begun."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, disable=quiet or not console.is_terminal) as bars:
        item = bars.add_task("loading", total=None)

        def advance(done: int, total: int, what: str) -> None:
            bars.update(item, completed=done, total=total, description=what or "done")
            if what and not quiet and not console.is_terminal:
                typer.echo(f"{done}/{total}  {what}", err=True)

        yield advance
