"""`fedloom tournament`: which method is best on a bed, with the same budget for all."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedloom.cli import complete, shared
from fedloom.errors import UserError


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
    tries: Annotated[int, typer.Option(min=1, help="Settings that each method is tried with on validation data.")] = 4,
    seeds: Annotated[int, typer.Option(min=2, help="Seeds that every method has.")] = 3,
    most: Annotated[int, typer.Option(min=2, help="Seeds that end it where intervals do not tell.")] = 10,
    out: Annotated[
        Path | None, shared.out_option("The tournament's folder.", show_default="tournaments/NAME", file_okay=False)
    ] = None,
    jobs: shared.Jobs = None,
    quiet: shared.Quiet = False,
    as_json: shared.Json = False,
) -> None:
    """Tune all methods that a bed allows with the same budget, then add seeds until the intervals tell them apart.

    A folder keeps everything: the same command goes on where it was stopped, and with --methods a new method joins.
    """
    from fedloom.experiments.grid_progress import progress
    from fedloom.experiments.tournament import all_methods, play
    from fedloom.recipes import load
    from fedloom.study.tournament import FILE, Tournament, opened

    named = tuple(dict.fromkeys(name.strip() for name in (methods or "").split(",") if name.strip()))
    if (Path(bed) / FILE).is_file():
        if changes or out is not None:
            raise UserError(f"{bed} is a tournament that has begun: its recipe and its folder cannot be changed")
        folder = Path(bed)
        before = opened(folder)
        plan = before.model_copy(update={"methods": tuple(dict.fromkeys((*before.methods, *named)))})
    else:
        recipe = load(bed, changes or ())
        if most < seeds:
            raise UserError(f"--most {most} found, expected at least --seeds, {seeds}")
        folder = out or Path("tournaments") / recipe.name
        if (folder / FILE).is_file():
            raise UserError(f"{folder} holds a tournament: go on with `fedloom tournament {folder}`, or choose --out")
        plan = Tournament(
            name=recipe.name,
            recipe=recipe.model_dump(mode="json"),
            methods=named or all_methods(),
            tries=tries,
            tuning=(100,),
            least=seeds,
            most=most,
        )

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
