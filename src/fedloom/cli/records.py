"""What was measured during a run, as tables or as a picture: `fedloom activated`, `hyper` and `domains`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from fedloom.cli import shared

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
    folder: Annotated[
        Path, typer.Argument(metavar="RUN", help="The folder of a run with the add-on activated-dimensions.")
    ],
    out: Out = None,
    scope: Annotated[
        Literal["encoder", "all"] | None,
        typer.Option(help="Where the dimensions are chosen from.", show_default="encoder"),
    ] = None,
    as_json: shared.Json = False,
) -> None:
    """Which dimensions each client's update activates, and how far the clients agree (FedDEA, Figure 2)."""
    from fedloom.study.papers.activated_dimensions import draw, table

    _show(table(folder, scope), out, draw, as_json)


def hyper(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run with the method fedhca2.")],
    out: Out = None,
    as_json: shared.Json = False,
) -> None:
    """How much each client takes of what the others learned, over the rounds (FedHCA2's hyper weights)."""
    from fedloom.study.papers.hyper_weights import draw, table

    _show(table(folder), out, draw, as_json)


def domains(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run whose clients have domains.")],
    out: Out = None,
    task: Annotated[str | None, typer.Option(metavar="NAME", help="The task.", show_default="the only one")] = None,
    split: Annotated[str, typer.Option(metavar="test|val", help="Which examples.")] = "test",
    as_json: shared.Json = False,
) -> None:
    """A task's metric on each domain over the rounds, with average and spread: last round and best on validation."""
    from fedloom.federation.runs.reader import Run
    from fedloom.study.papers.domains import draw
    from fedloom.study.tables.domains import domain_history

    _show(domain_history(Run.read(folder), task, split=split), out, draw, as_json)


def _show(found: Any, out: Path | None, draw: Callable[[Any, Path], None], as_json: bool) -> None:
    """Print tables, or write numbers or a picture, as the file's name says."""
    writers = {".csv": found.to_csv, ".md": found.to_markdown}
    if as_json or out is None:
        shared.put(found.to_json() if as_json else found.to_text(), out)
    elif out.suffix in writers:
        shared.put(writers[out.suffix](), out)
    else:
        draw(found, out)
        typer.echo(f"{out}")
