"""`fedloom flower`: a Flower app from a recipe, and a look at a deployment before round 0."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

flower = typer.Typer(help="Deployments with Flower: write an app, check a deployment.", no_args_is_help=True)

_Changes = Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE...", help="Changes of the recipe.")]


@flower.command()
def new(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder to write, new or empty.")],
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A packaged recipe or a YAML file.")],
    changes: _Changes = None,
    publisher: Annotated[str, typer.Option(help="The publisher's name in Flower.")] = "fedloom",
) -> None:
    """Write a whole Flower app: `flwr run DIR` then runs the recipe over a SuperLink's nodes."""
    from fedloom.engines.flower.project import new as write

    for path in write(folder, recipe, changes or (), publisher):
        typer.echo(path)


@flower.command()
def check(
    app: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of an app.", file_okay=False, exists=True)],
    superlink: Annotated[str | None, typer.Option(help="HOST:PORT of a SuperLink to look at.")] = None,
    root_certificates: Annotated[
        Path | None, typer.Option(help="The certificate authority's certificate, as nodes have it.", dir_okay=False)
    ] = None,
    key: Annotated[Path | None, typer.Option(help="This node's private key.", dir_okay=False)] = None,
    home: Annotated[Path | None, typer.Option(help="This node's folder, with node.yaml.", file_okay=False)] = None,
) -> None:
    """Look at versions, sizes, keys, certificates, clocks and ports. Exit code 1 where something is wrong."""
    from fedloom.engines.flower.check import findings

    wrong = 0
    for what, good, text in findings(app, superlink, root_certificates, key, home):
        wrong += not good
        typer.echo(f"{typer.style('ok   ' if good else 'WRONG', fg='green' if good else 'red')} {what}: {text}")
    raise typer.Exit(1 if wrong else 0)


@flower.command()
def keep(
    app: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of an app.", file_okay=False, exists=True)],
    connection: Annotated[str, typer.Argument(metavar="CONNECTION", help="As for `flwr run`.")],
    folder: Annotated[Path, typer.Option(help="The run folder, on this machine, where the SuperLink is.")],
    changes: Annotated[str, typer.Option(help="Changes of the recipe, separated by semicolons.")] = "",
) -> None:
    """`flwr run`, and again whenever the run ends early, until it is finished: let it start with the machine."""
    from fedloom.engines.flower.keep import keep as watch

    about = watch(app, connection, folder, changes, typer.echo)
    typer.echo(f"{about['status']} after {about['rounds']} rounds: {folder}")
