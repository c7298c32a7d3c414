"""`fedloom tournament`: which method is best on a bed, with the same budget for all."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedloom.cli import complete, shared
from fedloom.core.errors import UserError


def tournament(
    bed: Annotated[
        str,
        typer.Argument(
            metavar="BED",
            help="A packaged recipe or a YAML file with validation data, or a tournament's folder, to go on.",
            autocompletion=complete.recipe,
        ),
    ],
    changes: shared.Changes = None,
    methods: Annotated[
        str | None,
        typer.Option(
            metavar="A,B+ADDON,...",
            help="Who takes part; of a folder, who joins.",
            show_default="all methods that the bed allows",
        ),
    ] = None,
    tries: Annotated[
        int | None,
        typer.Option(min=1, help="Settings that each method is tried with on validation data.", show_default="4"),
    ] = None,
    seeds: Annotated[int | None, typer.Option(min=2, help="Seeds that every method has.", show_default="3")] = None,
    most: Annotated[
        int | None, typer.Option(min=2, help="Seeds that end it where intervals do not tell.", show_default="10")
    ] = None,
    out: Annotated[
        Path | None, shared.out_option("The tournament's folder.", show_default="tournaments/NAME", file_okay=False)
    ] = None,
    jobs: shared.Jobs = None,
    quiet: shared.Quiet = False,
    as_json: shared.Json = False,
) -> None:
    """Tune all methods that a bed allows with the same budget, then add seeds until the intervals tell them apart.

    A folder keeps everything: the same command goes on where it was stopped, more tries and seeds are added to those
    that are there, and with --methods a new method joins.
    """
    from fedloom.experiments.grid_progress import progress
    from fedloom.experiments.tournament import planned, play

    entered = dict.fromkeys(name.strip() for name in methods.split(",")) if methods is not None else ()
    given = {key: value for key, value in (("tries", tries), ("least", seeds), ("most", most)) if value is not None}
    plan, folder = planned(bed, changes or (), out, tuple(entered), given)
    if plan.most < plan.least:
        raise UserError(f"--most {plan.most} found, expected at least --seeds, {plan.least}")

    def tell(text: str) -> None:
        if not quiet:
            typer.echo(text, err=True)

    try:
        made = play(plan, folder, lambda: progress(quiet), tell, jobs)
    except KeyboardInterrupt:
        typer.echo(f"interrupted; continue with: fedloom tournament {folder}", err=True)
        raise typer.Exit(130) from None
    if as_json:
        typer.echo(made.to_json(), nl=False)
        return
    shared.answer(
        None,
        False,
        made.to_text(),
        f"its table: {folder / 'standings.csv'}; its page: fedloom report {folder / 'final'}; "
        f"one more method: fedloom tournament {folder} --methods NAME",
    )
