"""A ClientApp and a ServerApp of Flower, from a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedloom.core.extras import need
from fedloom.engines.flower.offered import Offer
from fedloom.federation.recipes.schema import Recipe
from fedloom.methods.method import Method


def server_app(recipe: Recipe | Path | str, method: Method | None = None) -> Any:
    """A ServerApp that runs a recipe over the nodes, or resumes its run if the run folder exists already.

    `folder` in the run config is the run folder.
    """
    app = need("flwr.serverapp", "flower").ServerApp()

    @app.main()
    def main(grid: Any, context: Any) -> None:
        from fedloom.engines import api
        from fedloom.engines.flower.engine import OverGrid
        from fedloom.federation.rounds.progress import progress

        whole = Offer.of(recipe, str(context.run_config.get("changes", ""))).resolved()
        folder = Path(str(context.run_config.get("folder", f"runs/{whole.name}"))).expanduser()
        engine = OverGrid(grid, folder)
        watch = progress(quiet=False)
        if (folder / "recipe.yaml").is_file():
            result = api.resume(folder, method=method, progress=watch, engine=engine)
        else:
            result = api.run(whole, folder, method=method, progress=watch, engine=engine)
        print(f"{result.table()}\n{result.status}: {result.folder}", flush=True)

    return app
