"""The app with all commands. A command imports torch only when it runs, so that help and errors appear at once."""

from __future__ import annotations

import atexit
import gc
import sys
import traceback
from typing import Annotated, Any

import typer

from fedloom._version import __version__
from fedloom.cli import data, deploy, grid, look, shared, tables, train
from fedloom.core.errors import printable
from fedloom.core.machine import elsewhere, message_of

app = typer.Typer(
    name="fedloom",
    help="Federated multi-task learning: clients with different tasks train together and share no data.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    # newer versions of click, below typer, suggest one themselves
    suggest_commands=not hasattr(sys.modules[typer.Abort.__module__], "NoSuchCommand"),
)


def main() -> None:
    """Run the app. It prints one message for an error that the user can correct (exit code 2), a traceback for a bug.

    For an error in the user's own code it prints both.
    """
    atexit.register(gc.freeze)  # otherwise the interpreter searches all of torch's objects for garbage before it exits
    try:
        app()
    except Exception as error:
        text = message_of(error)
        if text is None:
            traceback.print_exc()
            text = elsewhere(error)
        if text is None:
            typer.echo("This is a bug of fedloom, not your mistake: please report it with the lines above.", err=True)
            sys.exit(1)
        text = printable(text, "\n\t")  # it may quote what came from elsewhere
        typer.echo(f"{typer.style('error:', fg='red', bold=True)} {text}", err=True)
        sys.exit(2)


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


def _group(name: str, about: str, *members: Any) -> typer.Typer:
    """Return the command `name` with its subcommands."""
    group = typer.Typer(name=name, help=about, no_args_is_help=True)
    for member in members:
        group.command()(member)
    return group


plot = _group("plot", "Draw figures of grids, and the predictions of runs on images.", look.picture, tables.figure)
study = _group(
    "study",
    "Study many runs: is a benchmark sensitive, which method is best, which tasks help each other?",
    *(tables.benchmark, grid.claims, grid.tournament, grid.atlas, tables.relatedness, train.pretrain, deploy.merge),
)
of_papers = _group(
    "papers",
    "Compute figures and tables of the five papers from a run.",
    *(tables.activated, tables.hyper, tables.domains, tables.join, tables.features),
)
deploy.flower.command()(deploy.audit)

_ALL: dict[str, tuple[Any, ...]] = {
    "Train": (train.demo, train.run, train.resume, grid.grid),
    "Look": (look.show, look.watch, look.report, plot, look.methods, look.recipes),
    "Compare": (tables.compare, grid.tune, study, of_papers),
    "Data": (data.init, data.data),
    "Deploy": (deploy.export, deploy.predict, deploy.flower, deploy.doctor),
}
FORMER: dict[str, tuple[Any, str]] = {
    "table": (tables.compare, "compare"),
    "bed": (tables.benchmark, "study benchmark"),
    "audit": (deploy.audit, "flower audit"),
}
"""Former name of a command -> its function and its present name. They still work, but the help does not list them."""
PANELS: dict[str, list[str]] = {panel: [] for panel in _ALL}
"""The groups of commands in the order of the help, with the names of their commands."""
for panel, members in _ALL.items():
    for member in members:
        if isinstance(member, typer.Typer):
            below: list[Any] = member.registered_commands
            for each in below:
                if member in (plot, study, of_papers):
                    FORMER[each.callback.__name__] = each.callback, f"{member.info.name} {each.callback.__name__}"
                each.callback = shared.allowing_code(each.callback)
            app.add_typer(member, rich_help_panel=panel)
        else:
            app.command(rich_help_panel=panel)(shared.allowing_code(member))
        PANELS[panel].append(str(member.info.name if isinstance(member, typer.Typer) else member.__name__))

recipe = typer.Typer(name="recipe", hidden=True, callback=lambda: None)
recipe.command("schema")(shared.renamed(look.schema, "recipe schema", "recipes --schema"))
app.add_typer(recipe)
for former, (member, now) in FORMER.items():
    app.command(former, hidden=True)(shared.renamed(shared.allowing_code(member), former, now))
