"""`fedloom atlas`: run every pair of a bed's tasks, and see who helps whom."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fedloom.core.errors import RecipeError, UserError
from fedloom.experiments.grid_run import Watch, prepare, run_prepared
from fedloom.federation.recipes.schema import Recipe
from fedloom.study.atlas import Atlas, atlas_grid, draw, read_atlas
from fedloom.study.grid import write

GRID = "runs"
"""The folder of the grid in the atlas' own."""


def clients_of(recipe: Recipe) -> dict[str, list[str]]:
    """Task -> its clients. RecipeError where a client holds several tasks, for whose gain is it then?"""
    from fedloom.federation.rounds.build import build

    built = build(recipe)
    found: dict[str, list[str]] = {task.name: [] for task in built.federation.tasks}
    for client in built.federation.clients.values():
        if len(client.tasks) > 1:
            raise RecipeError(
                f"client {client.id!r} holds {', '.join(client.tasks)}: an atlas asks which task helps which, so each "
                "client holds one (partition=one-task)"
            )
        found[next(iter(client.tasks))].append(client.id)
    return found


def make(recipe: Recipe, seeds: int, folder: Path, watch: Callable[[], Watch], jobs: int | None = None) -> Atlas:
    """Run what is missing, and write atlas.csv, cosines.csv, atlas.md and atlas.svg.

    Raises UserError where a run fails.
    """
    clients = clients_of(recipe)
    grid = atlas_grid(recipe.name, recipe.model_dump(mode="json"), clients, seeds)
    prepared = prepare(grid, folder / GRID)
    outcome = run_prepared(prepared, watch(), jobs)
    for what in (prepared.refused, outcome.refused, outcome.failed):
        for cell, reason in what.items():
            raise UserError(f"{folder / GRID}: {cell}: {reason}")
    atlas = read_atlas(grid, folder / GRID, clients)
    texts = {
        "atlas.csv": atlas.to_csv(),
        "cosines.csv": atlas.cosine_records().to_csv(),
        "atlas.md": atlas.to_markdown(),
    }
    write(folder, texts)
    draw(atlas, folder / "atlas.svg")
    return atlas
