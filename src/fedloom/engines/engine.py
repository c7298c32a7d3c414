"""Engines by name: the places where the jobs of a run are done. Rounds and their results are the same in all."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from fedloom.core.context import State
from fedloom.data.partition import Partition
from fedloom.engines.peers.rounds import initial_peers, without_server
from fedloom.engines.pool import executor
from fedloom.federation.recipes.runtime import Runtime
from fedloom.federation.recipes.schema import Recipe
from fedloom.federation.rounds.build import build
from fedloom.federation.rounds.built import Built
from fedloom.federation.rounds.measure import complete, export
from fedloom.federation.rounds.round import Advance, Progress
from fedloom.federation.rounds.rounds import initial_state, status
from fedloom.federation.rounds.showing import keep
from fedloom.federation.rounds.worker import Executor
from fedloom.federation.runs.folder import RunFolder

ENGINES = {
    "process": "fedloom.engines.engine:Engine",
    "cluster": "fedloom.engines.cluster.launch:Cluster",
    "flower": "fedloom.engines.flower.engine:Flower",
}
"""Name -> module:class, a subclass of Engine, imported when a recipe asks for it."""


class Engine:
    """The engine that runs jobs in this process or in a pool of workers. No subclass has state between two runs."""

    def takes_over(self, recipe: Recipe, folder: Path, progress: Progress, fresh: bool) -> str | None:
        """Do the whole run, a `fresh` one or the rest of the folder's, in other processes; returns how it ended.

        Returns None if this process shall do it. Raises UserError as `fedloom.engines.api.run` does.
        """
        return None

    def build(self, recipe: Recipe, partition: Partition | None = None) -> Built:
        """Build a recipe; `partition` is the saved one, when resuming."""
        return build(recipe, partition)

    def initial(self, built: Built) -> State:
        """Return the state before the first round."""
        return initial_peers(built) if built.recipe.peers else initial_state(built)

    @contextmanager
    def start(self, built: Built, folder: RunFolder) -> Iterator[tuple[Executor, Advance | None]]:
        """Start for a run; yield the executor of jobs, and the function that does a round (None: with a server)."""
        runtime = built.recipe.runtime
        workers = executor(built.setup, runtime.devices, runtime.processes, runtime.workers == "auto")
        try:
            yield workers, without_server(built) if built.recipe.peers else None
        finally:
            workers.close()

    def show(self, built: Built, executor: Executor, folder: Path, state: State, final: bool = True) -> None:
        """Store predictions on test data, of the final models or of earlier ones; called before `start` ends."""
        keep(folder, built, executor, state, final)

    def export(self, built: Built, state: State) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Return the final models as named tensors, and labels; called before `start` ends."""
        return export(built, state)

    def conclude(self, built: Built, executor: Executor, folder: RunFolder, state: State) -> str:
        """Write the files of a finished run, and return how it ended."""
        final = folder.kept(state, built.recipe.early_stopping)
        complete(built, executor, folder, final)
        folder.save_model(*self.export(built, final))
        self.show(built, executor, folder.path, final)
        folder.describe(built.about, status(state), state["round"], final["round"])
        return status(state)


def engine_of(runtime: Runtime) -> Engine:
    """Return the engine that a recipe names."""
    module, name = ENGINES[runtime.engine].split(":")
    engine: Engine = getattr(importlib.import_module(module), name)()
    return engine
