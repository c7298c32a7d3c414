"""`fedloom demo`: what the project is for, in three minutes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedloom.cli import shared
from fedloom.cli.grid import grid
from fedloom.cli.report import report
from fedloom.cli.tables import table
from fedloom.extras import need


def demo(
    changes: shared.Changes = None,
    out: Annotated[Path, shared.out_option("The grid's folder.", file_okay=False)] = Path("grids/demo"),
    quiet: shared.Quiet = False,
) -> None:
    """Train 16 clients alone and together, on four tasks and three seeds: a table, tests and a page of each client."""
    for package, extra in (("scipy", "digits"), ("plotly", "report")):
        need(package, extra)  # before minutes of training, not after
    grid("demo", changes, out, quiet=quiet)
    table(str(out))
    table(str(out), tests=True)
    typer.echo("The page of these runs, with every client:")
    report(str(out))
