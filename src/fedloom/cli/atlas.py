"""`fedloom atlas`: which tasks of a bed help or hurt each other."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedloom.cli import shared


def atlas(
    bed: shared.RecipeArgument,
    changes: shared.Changes = None,
    seeds: Annotated[int, typer.Option(min=2, help="How many seeds, from 0.")] = 3,
    out: Annotated[
        Path | None, shared.out_option("The atlas' folder.", show_default="atlases/NAME", file_okay=False)
    ] = None,
    jobs: shared.Jobs = None,
    quiet: shared.Quiet = False,
    as_json: shared.Json = False,
) -> None:
    """Train every pair of a bed's tasks together: who helps whom, in which layers, and do early cosines tell?

    The same command goes on where it was stopped.
    """
    from fedloom.experiments.atlas import make
    from fedloom.experiments.grid_progress import progress
    from fedloom.federation.recipes import load

    recipe = load(bed, changes or ())
    folder = out or Path("atlases") / recipe.name
    try:
        made = make(recipe, seeds, folder, lambda: progress(quiet), jobs)
    except KeyboardInterrupt:
        typer.echo("interrupted; the same command goes on", err=True)
        raise typer.Exit(130) from None
    if as_json:
        typer.echo(made.to_json(), nl=False)
        return
    shared.answer(
        None, False, made.to_text(), f"its figure: {folder / 'atlas.svg'}; its numbers: {folder / 'atlas.csv'}"
    )
