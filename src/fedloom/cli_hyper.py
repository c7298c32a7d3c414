"""`fedloom hyper`: FedHCA2's hyper weights of a run, as tables or as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedloom.errors import UserError


def register(app: typer.Typer) -> None:
    """Add the command of this module to the command line."""
    app.command()(hyper)


def hyper(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run with the method fedhca2.")],
    out: Annotated[
        Path | None,
        typer.Argument(
            metavar="OUT",
            help="The file to write: .png, .svg or .pdf for the picture, .csv or .md for the numbers.",
            show_default="print tables",
            dir_okay=False,
        ),
    ] = None,
) -> None:
    """How much each client takes of what the others learned, over the rounds (FedHCA2's hyper weights)."""
    from fedloom.study.hyper import draw, table

    found = table(folder)
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
