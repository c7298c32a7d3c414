"""`fedloom report`: a run, a grid or a relatedness study as one HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedloom.cli import shared


def report(
    source: Annotated[
        str,
        typer.Argument(
            metavar="RUN|GRID|DIR",
            help="A run's folder, a grid's folder, a grid that ran in its own, or the --out of fedloom relatedness.",
        ),
    ],
    out: Annotated[
        Path | None,
        shared.out_option("The file to write.", show_default="report.html in the folder", dir_okay=False),
    ] = None,
    png: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write every figure to this folder too, for papers.", file_okay=False),
    ] = None,
    svg: Annotated[Path | None, typer.Option(metavar="DIR", help="The same, as SVG files.", file_okay=False)] = None,
    pdf: Annotated[Path | None, typer.Option(metavar="DIR", help="The same, as PDF files.", file_okay=False)] = None,
    csv: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The numbers behind every figure, as CSV files.", file_okay=False)
    ] = None,
    base: Annotated[
        str | None,
        typer.Option(
            metavar="RUN|CELL",
            help="What a run is compared with: another run's folder. For a grid: a cell, as for table.",
        ),
    ] = None,
) -> None:
    """Show a run or a grid, finished or not, or a relatedness study as one HTML page that needs no network."""
    from fedloom.study.report import write

    asked = {"png": png, "svg": svg, "pdf": pdf, "csv": csv}
    images = {kind: folder for kind, folder in asked.items() if folder is not None}
    for written in (write(source, out, images, base), *dict.fromkeys(images.values())):
        typer.echo(f"{written}")
