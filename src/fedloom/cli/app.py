"""The app: all commands. What needs torch is imported inside them, so that help and mistakes answer at once."""

from __future__ import annotations

import sys
import traceback
from typing import Annotated, Any

import typer

from fedloom._version import __version__
from fedloom.cli import data, deploy, grid, lists, look, papers, shared, tables, train
from fedloom.core.errors import UserError, of_system

app = typer.Typer(
    name="fedloom",
    help="Federated multi-task learning: clients with different tasks train together.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Entry point: what the user or the machine can mend ends in one message and exit code 2; a bug shows itself."""
    try:
        app()
    except Exception as error:
        text = told(error)
        if text is None:
            traceback.print_exc()
            typer.echo("This is a bug of fedloom, not your mistake: please report it with the lines above.", err=True)
            sys.exit(1)
        typer.echo(f"{typer.style('error:', fg='red', bold=True)} {text}", err=True)
        sys.exit(2)


def told(error: Exception) -> str | None:
    """One sentence for what the user or the machine can mend, None for a bug."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, OSError):
        return of_system(error)
    if isinstance(error, MemoryError) or "allocate memory" in str(error) or "out of memory" in str(error):
        return f"memory ran out: {str(error).splitlines()[0] if str(error) else 'nothing more is known'}"
    return None


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


_ALL: dict[str, tuple[Any, ...]] = {
    "Train": (train.demo, train.run, train.resume, grid.grid, train.pretrain),
    "Look": (look.show, look.watch, look.report, look.picture, lists.methods, lists.recipes, lists.recipe),
    "Compare": (
        *(tables.compare, tables.table, tables.figure, tables.benchmark),
        *(grid.tune, grid.tournament, grid.atlas, papers.relatedness),
    ),
    "Data": (data.init, data.data),
    "Deploy": (deploy.export, deploy.predict, deploy.merge, deploy.flower, deploy.audit, deploy.doctor),
    "Papers": (papers.activated, papers.hyper, papers.domains, papers.join, papers.features),
}
PANELS: dict[str, list[str]] = {panel: [] for panel in _ALL}
"""The groups of the help in their order, with the names of their commands."""
for panel, members in _ALL.items():
    for member in members:
        if isinstance(member, typer.Typer):
            below: list[Any] = member.registered_commands
            for each in below:
                each.callback = shared.allowing_code(each.callback)
            app.add_typer(member, rich_help_panel=panel)
        else:
            app.command(rich_help_panel=panel)(shared.allowing_code(member))
        PANELS[panel].append(str(member.info.name if isinstance(member, typer.Typer) else member.__name__))
