"""run, resume and plan: the command line calls them, and a notebook may."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from fedloom.core.context import State
from fedloom.engines.engine import Engine, engine_of
from fedloom.engines.plan import Plan, plan
from fedloom.errors import StateError, parsing
from fedloom.methods.method import Method
from fedloom.recipes.loader import load
from fedloom.recipes.schema import Recipe, with_method
from fedloom.rounds import refusals
from fedloom.rounds.built import Built
from fedloom.rounds.measure import complete
from fedloom.rounds.progress import Progress
from fedloom.rounds.rounds import run_rounds, status
from fedloom.rounds.worker import check_device
from fedloom.runs.folder import RunFolder
from fedloom.runs.reader import Run
from fedloom.runs.recorded import MODEL, verify_model
from fedloom.runs.track import tracker_of

__all__ = ["Plan", "Result", "plan", "resume", "run"]


@dataclass(frozen=True)
class Result:
    """A finished run. Everything in it is read from the run folder."""

    folder: Path
    status: str
    """finished or stopped early; nothing learned, where no round had an update that could be used; gave up, where
    several rounds in a row had none."""

    @property
    def run(self) -> Run:
        """The run as it was recorded: rounds, final numbers, bytes."""
        return Run.read(self.folder)

    def table(self, split: str | None = None) -> str:
        """Tasks x metrics of the final model, as text, with the model, the data and the split that they belong to.

        The split is test, or val if nothing was measured on test.
        """
        run = self.run
        measured = {entry["split"] for line in run.rounds for entry in line["metrics"]}
        final = run.final(split or ("val" if measured == {"val"} else "test"))
        width = max(map(len, final.values), default=0)
        lines = [
            f"{task:<{width}}  " + "  ".join(f"{metric} {value:.4f}" for metric, value in values.items())
            for task, values in final.values.items()
        ]
        about = f"{final.model} model, {', '.join(final.data)} data, round {final.round}, mean over a task's clients"
        return "\n".join([*lines, about])


def run(
    recipe: Recipe | str | Path | Mapping[str, Any],
    folder: Path | str | None = None,
    *,
    overrides: Sequence[str] = (),
    method: Method | None = None,
    progress: Progress | None = None,
    engine: Engine | None = None,
) -> Result:
    """Run a recipe (a packaged name, a file, a mapping or a Recipe) and return its result.

    `folder` must be new or empty; without it a temporary one is made. `overrides` are "key.path=value" texts. `method`
    replaces the recipe's method by a Method built in Python; `resume` then needs it again, and the recipe's section
    `method` may not say more than a name. `engine` is an existing engine, used in place of the one that the recipe
    names.

    Raises UserError (RecipeError, DataError, StateError) for bad input.
    """
    recipe = recipe if isinstance(recipe, Recipe) and not overrides else load(_plain(recipe), overrides)
    refusals.method_in_python(recipe, method)
    if method is not None:
        recipe = with_method(recipe, method.name)
    for device in recipe.runtime.devices:  # before the data is loaded, because this fails at once
        check_device(device)
    engine = engine or engine_of(recipe.runtime)
    path = Path(tempfile.mkdtemp(prefix="fedloom-")) if folder is None else Path(folder)
    if (ended := engine.takes_over(recipe, path, method, progress or Progress(), fresh=True)) is not None:
        return Result(path, ended)
    built = engine.build(recipe, method)
    with RunFolder.create(path, recipe, built.dealt, built.about) as run_folder:
        return _go(engine, built, run_folder, engine.initial(built), progress or Progress())


def resume(
    folder: Path | str,
    *,
    method: Method | None = None,
    progress: Progress | None = None,
    engine: Engine | None = None,
    accept_changes: bool = False,
) -> Result:
    """Continue a run after its last whole checkpoint, bit for bit as if it had never stopped.

    `accept_changes` lets the recipe in the folder differ from the one that the run began with, but for its method,
    model and data; what differs is recorded. Only the engine process knows it.

    Raises StateError if the folder is no run folder or is damaged, or if the data, model, method or recipe changed.
    """
    progress = progress or Progress()
    recipe, partition = RunFolder.read(Path(folder))
    if method is None:
        refusals.method_in_python(recipe, None)
    engine = engine or engine_of(recipe.runtime)
    if accept_changes and recipe.runtime.engine != "process":
        raise StateError(f"{folder}: --accept-changes works with runtime.engine: process, not {recipe.runtime.engine}")
    if (ended := engine.takes_over(recipe, Path(folder), method, progress, fresh=False)) is not None:
        return Result(Path(folder), ended)
    built = engine.build(recipe, method, partition)
    with RunFolder(Path(folder), recipe.runtime.mirror) as run_folder:
        state = run_folder.continued(built.about, lambda: engine.initial(built), progress.event, accept_changes)
        return _go(engine, built, run_folder, state, progress)


def _go(engine: Engine, built: Built, folder: RunFolder, state: State, progress: Progress) -> Result:
    recipe = built.recipe
    folder.tracker = tracker_of(recipe, folder.path, state["round"], progress.event)
    progress.start(recipe.training.rounds, state["round"])
    try:
        with _threads(recipe.runtime.threads), engine.start(built, folder) as (executor, advance):
            state = run_rounds(built, executor, folder, state, progress, advance)
            final = folder.kept(state, recipe.early_stopping)
            complete(built, executor, folder, final)
            folder.save_model(*engine.export(built, final))
            engine.show(built, executor, folder.path, final)
        folder.describe(built.about, status(state), state["round"], final["round"])
        return Result(folder.path, status(state))
    finally:
        progress.stop()


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Torch's thread count during a run: results may depend on it, so the recipe states it."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _plain(recipe: Recipe | str | Path | Mapping[str, Any]) -> str | Path | Mapping[str, Any]:
    return recipe.model_dump(mode="json") if isinstance(recipe, Recipe) else recipe


def model_file(folder: Path | str) -> Path:
    """The file of a run's final models. Raises StateError if the run has not saved them yet, or they were changed."""
    path = Path(folder) / MODEL
    if not path.is_file():
        raise StateError(f"{folder} has no {MODEL}: the run is not finished")
    verify_model(Path(folder))
    return path


def trained_models(folder: Path | str) -> dict[str, dict[str, Tensor]]:
    """A finished run's models as state dictionaries: "" is the global model, others have the name of their client, or
    task/NAME if each task has a model.

    Raises StateError if the run has not saved a model yet.
    """
    models: dict[str, dict[str, Tensor]] = {}
    file = model_file(folder)
    with parsing(f"{file}: cannot be read"):
        tensors = load_file(file)
    for key, tensor in tensors.items():
        owner, _, name = key.rpartition("/")
        models.setdefault(owner.removeprefix("client/"), {})[name] = tensor
    return models
