"""`fedloom features`: what the encoders of finished runs see in each domain."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedloom.cli.shared import Device, Json, Quiet, answer, bar, out_option, threads_of


def features(
    folders: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="The folders of finished runs on the same domains.")
    ],
    out: Annotated[
        Path | None, out_option("Write figures and CSV files there too.", metavar="DIR", file_okay=False)
    ] = None,
    examples: Annotated[
        int, typer.Option(min=2, help="At most so many test examples of each domain, for spectra and t-SNE.")
    ] = 500,
    images: Annotated[int, typer.Option(min=1, help="Test images of each domain for Grad-CAM.")] = 2,
    task: Annotated[
        str | None, typer.Option(metavar="NAME", help="The classification task.", show_default="the only one")
    ] = None,
    device: Device = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Features of runs with domains: effective ranks, and accuracies of f+, f-, f* and f~ (F2DC, Figure 1, Table 7).

    With --out also figures: singular values of their covariance, t-SNE and Grad-CAM (Figures 1, 4 and 2).
    """
    for folder in folders:
        threads_of(folder)
    from fedloom.experiments.papers.features import features as look

    with bar(quiet) as advance:
        found = look(folders, examples, images, task, out is not None, device, advance)
    answer({name: records.rows() for name, records in found.records().items()}, as_json, found.to_text())
    if out is not None:
        for file in found.write(out):
            typer.echo(f"{file}", err=True)
