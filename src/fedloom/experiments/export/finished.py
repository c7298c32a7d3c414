"""Finished runs, opened again: what they were built from, and their final models."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from fedloom.core.errors import StateError
from fedloom.engines.result import fill, model_file, model_keys, trained_models
from fedloom.federation.rounds.build import build
from fedloom.federation.rounds.built import Built
from fedloom.federation.runs.folder import RunFolder
from fedloom.federation.runs.reader import Run
from fedloom.models.multitask import MultiTask

Tell = Callable[[int, int, str], None]
"""A function of (steps done, of how many, the next step)."""


class Steps:
    """Counts the steps of some work, and tells of each when it begins."""

    def __init__(self, total: int, tell: Tell) -> None:
        self._done, self._total, self._tell = -1, total, tell

    def __call__(self, what: str) -> None:
        """Note that a step begins; those before it are done."""
        self._done += 1
        self._tell(self._done, self._total, what)

    def finished(self) -> None:
        """Remove the bar when all steps are done."""
        self._tell(self._total, self._total, "")


@dataclass(frozen=True, eq=False)
class Finished:
    """A finished run."""

    folder: Path
    name: str
    round: int
    """The round that the models are of."""
    built: Built
    """The parts that the run was built from."""
    models: Mapping[str, Mapping[str, Tensor]]
    """Owner -> state dictionary, as `trained_models` has them: "" is the global model."""

    def owner(self, client: str, task: str) -> str:
        """Return which of the models the client uses for the task."""
        return next(key for key in model_keys(client, task) if key in self.models)

    def network(self, owner: str) -> MultiTask:
        """Return the run's network with one of the models in it, in evaluation mode."""
        fill(self.built.module, self.models[owner], self.folder)
        return self.built.module.eval()


def reopen(folder: Path, like: Built | None = None) -> tuple[Built, Run]:
    """Return (what a finished run was built from, its files), with the data set of `like` where both recipes name the
    same.

    Raises StateError where the folder is not a run's, the run has not finished, or the model is not what it was.
    """
    recipe, partition = RunFolder.read(folder)
    model_file(folder)  # asked first, for what follows takes long
    same = like is not None and (like.recipe.data, like.recipe.seed) == (recipe.data, recipe.seed)
    built = build(recipe, partition=partition, dataset=like.dataset if like is not None and same else None)
    run = Run.read(folder)
    if run.info["layout_hash"] != built.layout.hash:
        raise StateError(f"{folder}: the model differs from the one that the run began with")
    # the recipe cannot hold a Method that was made in Python, but the run's record has its name
    return replace(built, method=replace(built.method, name=run.label)), run


def open_runs(folders: Sequence[Path | str], tell: Tell = lambda *_: None) -> list[Finished]:
    """Return finished runs on the same data. Their names are their methods, with a number where several have the same
    one.

    Raises StateError where a run has not finished, its model is not what it was, or runs have different data.
    """
    runs: list[Finished] = []
    for number, folder in enumerate(map(Path, folders)):
        tell(number, len(folders), f"loading {folder}")
        first = runs[0].built if runs else None
        built, run = reopen(folder, first)
        if first is not None and built.dataset.train is not first.dataset.train and built.data_hash != first.data_hash:
            raise StateError(
                f"not comparable, because the data differ: {folders[0]} (seed {first.recipe.seed}) and {folder} "
                f"(seed {built.recipe.seed})"
            )
        runs.append(Finished(folder, built.method.name, int(run.info["final_round"]), built, trained_models(folder)))
    names = [run.name for run in runs]
    return [
        run if names.count(run.name) == 1 else replace(run, name=f"{run.name}, run {number}")
        for number, run in enumerate(runs, 1)
    ]
