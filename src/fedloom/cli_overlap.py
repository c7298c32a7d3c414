"""`fedloom activated`: the activated dimensions of a run, as tables or as a picture."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from fedloom.errors import UserError


class Scope(StrEnum):
    """Which parameters the dimensions are chosen from."""

    encoder = "encoder"
    all = "all"


def register(app: typer.Typer) -> None:
    """Add the command of this module to the command line."""
    app.command()(activated)


def activated(
    folder: Annotated[
        Path, typer.Argument(metavar="RUN", help="The folder of a run with the add-on activated-dimensions.")
    ],
    out: Annotated[
        Path | None,
        typer.Argument(
            metavar="OUT",
            help="The file to write: .png, .svg or .pdf for the picture, .csv or .md for the numbers.",
            show_default="print tables",
            dir_okay=False,
        ),
    ] = None,
    scope: Annotated[
        Scope | None, typer.Option(help="Where the dimensions are chosen from.", show_default="encoder")
    ] = None,
) -> None:
    """Which dimensions each client's update activates, and how far the clients agree (FedDEA, Figure 2)."""
    from fedloom.study.overlap import draw, table

    found = table(folder, scope.value if scope else None)
    if out is None:
        typer.echo(found.to_text(), nl=False)
        return
    writers = {".csv": found.to_csv, ".md": found.to_markdown}
    if out.suffix in writers:
        try:
            out.write_text(writers[out.suffix](), encoding="utf-8")
        except OSError as error:
            raise UserError(f"{out}: {error.strerror}") from None
    else:
        draw(found, out)
    typer.echo(f"{out}")
