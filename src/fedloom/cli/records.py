"""What was measured during a run, as tables or as a picture: `fedloom activated`, `hyper` and `domains`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from fedloom.errors import writing

Out = Annotated[
    Path | None,
    typer.Argument(
        metavar="OUT",
        help="The file to write: .png, .svg or .pdf for the picture, .csv or .md for the numbers.",
        show_default="print tables",
        dir_okay=False,
    ),
]


def activated(
    folder: Annotated[
        Path, typer.Argument(metavar="RUN", help="The folder of a run with the add-on activated-dimensions.")
    ],
    out: Out = None,
    scope: Annotated[
        Literal["encoder", "all"] | None,
        typer.Option(help="Where the dimensions are chosen from.", show_default="encoder"),
    ] = None,
) -> None:
    """Which dimensions each client's update activates, and how far the clients agree (FedDEA, Figure 2)."""
    from fedloom.study.papers.activated_dimensions import draw, table

    _show(table(folder, scope), out, draw)


def hyper(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run with the method fedhca2.")],
    out: Out = None,
) -> None:
    """How much each client takes of what the others learned, over the rounds (FedHCA2's hyper weights)."""
    from fedloom.study.papers.hyper_weights import draw, table

    _show(table(folder), out, draw)


def domains(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run whose clients have domains.")],
    out: Out = None,
    task: Annotated[str | None, typer.Option(metavar="NAME", help="The task.", show_default="the only one")] = None,
    split: Annotated[str, typer.Option(metavar="test|val", help="Which examples.")] = "test",
) -> None:
    """A task's metric on each domain over the rounds, with average and spread: last round and best on validation."""
    from fedloom.runs.reader import Run
    from fedloom.study.papers.domains import draw
    from fedloom.study.tables.domains import domain_history

    _show(domain_history(Run.read(folder), task, split=split), out, draw)


def _show(found: Any, out: Path | None, draw: Callable[[Any, Path], None]) -> None:
    """Print tables, or write numbers or a picture, as the file's name says."""
    if out is None:
        typer.echo(found.to_text(), nl=False)
        return
    writers = {".csv": found.to_csv, ".md": found.to_markdown}
    if out.suffix in writers:
        with writing(out):
            out.write_text(writers[out.suffix](), encoding="utf-8")
    else:
        draw(found, out)
    typer.echo(f"{out}")
