"""Finished runs, opened again: what they were built from, their final models, and the task vectors of these."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from fedloom.core.errors import StateError
from fedloom.core.layout import Layout
from fedloom.engines.flower.nodes import AT_NODE, build_again, build_alone
from fedloom.engines.result import check_model, fill, model_file, model_key, trained_models
from fedloom.federation.rounds.build import build
from fedloom.federation.rounds.built import Built
from fedloom.federation.runs.folder import RunFolder, check_parts
from fedloom.federation.runs.reader import Run
from fedloom.models.multitask import MultiTask

Tell = Callable[[int, int, str], None]
"""A function of (steps done, of how many, the next step)."""
Step = Callable[[str], None]
"""A function of the step that begins; with '' all steps are done."""


def steps(total: int, tell: Tell) -> Step:
    """Return what counts the steps of some work, and tells of each when it begins."""
    done = itertools.count()
    return lambda what: tell(next(done) if what else total, total, what)


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
        key = model_key(self.models, client, task)
        assert key is not None
        return key

    def network(self, owner: str) -> MultiTask:
        """Return the run's network with one of the models in it, in evaluation mode."""
        module = self.built.modules.get(owner.partition("/")[0], self.built.module)
        fill(module, self.models[owner], self.folder, owner)
        return module.eval()


def reopen(folder: Path, like: Built | None = None) -> tuple[Built, Run]:
    """Return (what a finished run was built from, its files), with the data set of `like` where both name the same.

    Raises StateError where the folder is not a finished run's, or the model or the data are not what they were.
    """
    recipe, partition = RunFolder.read(folder)
    model_file(folder)  # asked first, for what follows takes long
    if (folder / AT_NODE).is_file():
        return _of_run(folder, build_alone(recipe, folder))
    if recipe.data.name == "nodes":
        return _of_run(folder, build_again(recipe, folder, partition)[0])
    same = like is not None and (like.recipe.data, like.recipe.seed) == (recipe.data, recipe.seed)
    return _of_run(folder, build(recipe, partition=partition, dataset=like.dataset if like and same else None))


def _of_run(folder: Path, built: Built) -> tuple[Built, Run]:
    run = Run.read(folder)
    about = built.about
    check_parts(folder, {key: about[key] for key in ("layout_hash", "data_hash", "inputs_hash")})
    # the recipe cannot hold a Method that was made in Python, but the run's record has its name
    return replace(built, method=replace(built.method, name=run.label)), run


def open_runs(folders: Sequence[Path | str], tell: Tell = lambda *_: None) -> list[Finished]:
    """Return finished runs on the same data, named by their methods, with a number where several have the same.

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


@dataclass(frozen=True, eq=False)
class TaskModels:
    """One model for each task of a finished run."""

    label: str
    built: Built
    models: Mapping[str, Tensor]
    """Task -> the whole vector of its model (parameters and float buffers, in the order of `built.layout`)."""
    clients: Mapping[str, tuple[str, ...]]
    """Task -> the clients that hold it and count for it."""
    notes: tuple[str, ...]

    @property
    def tasks(self) -> tuple[str, ...]:
        """Task names, in the order of the data set."""
        return tuple(self.models)

    @property
    def common(self) -> Layout:
        """The parameters that belong to no task: the columns of task vectors."""
        return self.built.layout.parameters.common

    @property
    def origin(self) -> Tensor:
        """The initial model's common parameters, theta_p (d)."""
        return self.of(self.built.layout.flatten(self.built.module).detach())

    def of(self, model: Tensor) -> Tensor:
        """Return the common parameters of a model's whole vector (d)."""
        return self.built.layout.take(model, self.common)

    def vectors(self) -> dict[str, Tensor]:
        """Return task -> its task vector (d): the common parameters minus the initial ones."""
        origin = self.origin
        return {task: self.of(model) - origin for task, model in self.models.items()}


def task_models(folder: str | Path) -> TaskModels:
    """Return the tasks' models of a run.

    Where each task has a model (matu), that one. Else the mean of the models of the clients that hold this task alone
    (local): they began at the same initial model, so the task vector is the mean of theirs. Clients with one model for
    several tasks do not count, and a note names them.

    Raises StateError where the run has not finished, its model or method is not what the recipe says, a task has no
    model of its own, or all tasks have the same encoder.
    """
    folder = Path(folder)
    built, run = reopen(folder)
    recipe = built.recipe
    models: dict[str, Tensor] = {}
    clients: dict[str, tuple[str, ...]] = {}
    several: set[str] = set()
    saved = trained_models(folder)
    for task in built.federation.tasks:
        owner_of: dict[str, str] = {}
        for client in (c for c in built.federation.clients.values() if task.name in c.tasks):
            own = client.id
            # a client's model of several tasks is not a model of this task alone
            names = [f"task/{task.name}", f"{own}/task/{task.name}", *([own] if len(client.tasks) == 1 else [])]
            if (owner := next((name for name in names if name in saved), None)) is not None:
                owner_of[own] = owner
            else:
                several.add(own)
        for owner in owner_of.values():
            check_model(built.module, saved[owner], folder, owner)
        if owner_of:
            each = [[saved[o][n].reshape(-1) for n in built.layout.names] for o in sorted({*owner_of.values()})]
            models[task.name] = torch.stack([torch.cat(tensors) for tensors in each]).mean(0)
            clients[task.name] = tuple(sorted(owner_of))
    missing = [task.name for task in built.federation.tasks if task.name not in models]
    if missing:
        some = any(owner and not owner.startswith("task/") for owner in saved)
        why = "no client holds it alone" if some else f"{run.label} leaves one model for all tasks"
        raise StateError(
            f"{folder}: task {missing[0]!r} does not have its own model: {why}. Run the method matu, or local with "
            "clients that hold one task each (partition=one-task)"
        )
    label = f"{recipe.name}, {run.label}, seed {recipe.seed}"
    notes = [f"clients with several tasks are left out: {', '.join(sorted(several))}"] if several else []
    result = TaskModels(label, built, models, clients, tuple(notes))
    return replace(result, notes=(*notes, *_alike(folder, run.label, result.vectors())))


def _alike(folder: Path, method: str, vectors: Mapping[str, Tensor]) -> list[str]:
    """Return notes on encoders that cannot be distinguished. Raises StateError where none can."""
    groups: dict[str, list[str]] = {}  # by the first task of each
    for task, vector in vectors.items():
        groups.setdefault(next((g for g in groups if torch.equal(vectors[g], vector)), task), []).append(task)
    if len(groups) < 2:
        what = "there is one task" if len(vectors) == 1 else f"with {method} all tasks have the same encoder"
        raise StateError(f"{folder}: {what}, so there is nothing to compare")
    notes = [f"the same encoder, which cannot be distinguished: {', '.join(g)}" for g in groups.values() if len(g) > 1]
    return notes + [f"the encoder of {t} is still the initial one" for t, v in vectors.items() if not v.any()]
