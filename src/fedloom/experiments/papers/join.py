"""Joining late: what a finished run's task vectors are worth to a newcomer. This is what `fedloom papers join` does.

A newcomer sends the signs of what a few steps taught it and starts where the tasks with the most similar signs are
(MaTU, eqs. 5 to 7, for a task that the server does not know); the same training from the initial model is beside it.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedloom.core.context import Ctx, State
from fedloom.core.errors import DataError, RecipeError, StateError, choices
from fedloom.core.layout import Layout
from fedloom.core.taskvectors import sign_similarity
from fedloom.data.dataset import Dataset
from fedloom.data.partition import Indices, Partition, Pool, Share, labelled
from fedloom.experiments.export.finished import TaskModels, Tell, task_models
from fedloom.federation.recipes.loader import load
from fedloom.federation.recipes.schema import Recipe
from fedloom.federation.rounds.build import load_data, with_options
from fedloom.federation.rounds.built import Built
from fedloom.federation.rounds.evaluation import evaluate
from fedloom.federation.rounds.federation import BuiltClient, BuiltFederation
from fedloom.federation.rounds.worker import check_device
from fedloom.models.build import build_model
from fedloom.models.signal import about_words
from fedloom.study.output import Table
from fedloom.training.config import Schedule, Training
from fedloom.training.flat import FlatModel
from fedloom.training.loop import Additions, Work, train

NEW = "new"
"""The name of a newcomer that is not a client of the run."""


@dataclass(frozen=True, eq=False)
class Start:
    """Where a newcomer begins."""

    vector: Tensor
    """Task vector (d): to be added to the initial model; zero where no task is similar enough."""
    similarity: Mapping[str, float]
    """Task -> S of the newcomer's few steps with it."""
    weights: Mapping[str, float]
    """The tasks in it, the most similar first -> their share; they add up to 1."""


def start_for(tau_new: Tensor, vectors: Mapping[str, Tensor], kappa: int, epsilon: float) -> Start:
    """Return the mean of the `kappa` task vectors (d each) most similar to `tau_new` (d), weighted by S.

    S is `sign_similarity` (eq. 5); only tasks with S > epsilon count, ties go by name. The sum is that of eq. 6 divided
    by its weights, as `combine: normalized` has it, but without a vector of the newcomer's own: its few steps only
    tell which tasks are similar. Its mask is 1 everywhere, for it is alone with its task.
    """
    if kappa < 0:
        raise ValueError(f"kappa: expected a number of partners, found {kappa}")
    names = sorted(vectors)
    S = sign_similarity(torch.stack([tau_new, *(vectors[name] for name in names)]))[0, 1:].tolist()
    similarity = dict(zip(names, S, strict=True))
    chosen = [name for name in sorted(names, key=lambda name: -similarity[name])[:kappa] if similarity[name] > epsilon]
    total = sum(similarity[name] for name in chosen)
    weights = {name: similarity[name] / total for name in chosen}
    start = torch.zeros_like(tau_new, dtype=torch.float64)
    for name, weight in weights.items():
        start += weight * vectors[name].double()
    return Start(start.to(tau_new), similarity, weights)


@dataclass(frozen=True)
class LateJoin:
    """A newcomer's training from two starts."""

    label: str
    task: str
    client: str
    examples: int
    start: Start
    metric: str
    direction: str
    initial: tuple[float, ...]
    """The task's metric on test examples before training and after each round, from the initial model."""
    similar: tuple[float, ...]
    """The same from the similar tasks."""
    notes: tuple[str, ...] = ()

    @property
    def gain(self) -> tuple[float, ...]:
        """Return how much better the second is; positive is better, whatever the metric's direction."""
        sign = 1 if self.direction == "max" else -1
        return tuple(sign * (b - a) for a, b in zip(self.initial, self.similar, strict=True))

    def sheets(self) -> tuple[Table, Table]:
        """Return who is similar, and the metric over the rounds."""
        ranked = sorted(self.start.similarity.items(), key=lambda item: -item[1])
        shares = [(t, f"{s:.4f}", f"{self.start.weights[t]:.4f}" if t in self.start.weights else "") for t, s in ranked]
        rounds = [
            (str(r), *(f"{v:.4f}" for v in values), f"{gain:+.4f}")
            for r, (*values, gain) in enumerate(zip(self.initial, self.similar, self.gain, strict=True))
        ]
        title = f"{self.label}: {self.task} at {self.client}, {self.examples} examples"
        return (
            Table(f"{title}\nsimilarity of signs after a few steps, and share in the start", ("task", "S", "share"),
                  tuple(shares)),
            Table(f"{self.metric} on test examples, by rounds of local training",
                  ("round", "from the initial model", "from similar tasks", "gain"), tuple(rounds)),
        )  # fmt: skip

    def to_text(self) -> str:
        """Return both tables, and the mean gain over the rounds."""
        lines = [sheet.to_text() for sheet in self.sheets()]
        lines.append(f"mean gain over the rounds: {math.fsum(self.gain[1:]) / (len(self.gain) - 1):+.4f}\n")
        if not self.start.weights:
            lines.append("no task is similar enough, so both starts are the same\n")
        return "\n".join(lines) + "".join(f"note: {note}\n" for note in self.notes)


def join(
    folder: str | Path,
    task: str,
    client: str | None = None,
    steps: int = 5,
    rounds: int = 5,
    data: Sequence[str] = (),
    device: str | None = None,
    tell: Tell = lambda done, total, what: None,
) -> LateJoin:
    """Let a newcomer with one task join a finished run of a method with task vectors (matu), and say what it gains.

    It takes `steps` local steps from the initial model theta_p; `start_for`, with the run's kappa and epsilon, says
    where it starts. From there, and from theta_p, it trains for `rounds` rounds alone: same batches, same head, which
    begins as the recipe's seed makes it in both, and the recipe's local training, its schedule over these rounds.

    data: `data` changes the recipe's data section (texts as data.count=9, also tasks.NAME.OPTION=..), so that the run
    may have left the task out. Examples are all train examples with a label of a task that is new to the run; of a task
    that the run knows, those that none of its clients holds. `client` names a client of the run that takes up the task
    on the images it has. The test examples are the data set's.

    Raises StateError for a run without task vectors, RecipeError for other changes than of data and for an unknown
    task or client, DataError where there are no examples or inputs have another shape.
    """
    models = task_models(folder)
    built = models.built
    method = built.method
    if not method.task_vectors:
        raise StateError(f"{folder}: the server of {method.name} has no task vectors to join; run the method matu")
    dataset = _data(built, task, data)
    positions, notes = _positions(built, dataset, task, client)
    domain = built.federation.clients[client].domain if client else None
    share = Share(client or NEW, {task: 1.0}, positions, np.empty(0, np.int64), domain)
    alone = replace(dataset, tasks=tuple(t for t in dataset.tasks if t.name == task))
    share.check(Pool.of(alone))
    me = BuiltFederation.build(alone, Partition((share,))).clients[share.client].only(task)
    if not len(me.test):
        raise DataError(f"{folder}: no test example has a label of task {task!r}")
    newcomer = _Newcomer(models, alone, me, check_device(device or built.recipe.runtime.devices[0]))
    params = built.recipe.method.params
    start = start_for(newcomer.probe(steps), models.vectors(), params["kappa"], params["epsilon"])
    done = itertools.count(1)

    def trained() -> None:
        tell(next(done), 1 + 2 * rounds, "training")

    trained()
    initial = newcomer.rounds(torch.zeros_like(start.vector), rounds, trained)
    similar = newcomer.rounds(start.vector, rounds, trained)
    (one,) = alone.tasks
    return LateJoin(
        models.label, task, share.client, len(me.train), start, one.primary, one.metrics[one.primary],
        tuple(initial), tuple(similar), notes,
    )  # fmt: skip


def _data(built: Built, task: str, changes: Sequence[str]) -> Dataset:
    """Return the data set that has the task. Its inputs are as the run's."""
    recipe = built.recipe
    for change in changes:
        if change.partition("=")[0].strip().split(".")[0] not in ("data", "tasks"):
            raise RecipeError(f"{change!r}: only the data may change, for example data.count=9")
    dataset = built.dataset
    if changes:
        other: Recipe = load(recipe.model_dump(mode="json"), changes)
        dataset = with_options(load_data(other.data, other.seed), other.tasks)
    names = [t.name for t in dataset.tasks]
    if task not in names:
        more = "" if changes else " A task that the run left out needs --data, for example --data data.tasks=[...]"
        raise RecipeError(f"no task {task!r} in the data.{choices('Tasks', task, names)}.{more}")
    if dataset.input_shape != built.dataset.input_shape:
        raise DataError(
            f"expected inputs of shape {built.dataset.input_shape}, as in the run, found {dataset.input_shape}"
        )
    if dataset.signal != built.dataset.signal:
        advice = about_words(dataset.signal, built.dataset.signal)
        raise DataError(f"expected the inputs of the run, {built.dataset.signal}, found {dataset.signal}{advice}")
    return dataset


def _positions(built: Built, dataset: Dataset, task: str, client: str | None) -> tuple[Indices, tuple[str, ...]]:
    """Train examples of a newcomer, and notes on them."""
    clients = built.federation.clients
    able = np.flatnonzero(labelled(dataset.train.labels_of(task)))
    known = any(t.name == task for t in built.federation.tasks)
    if client is not None and client not in clients:
        raise RecipeError(f"no client {client!r} in the run.{choices('Clients', client, clients)}")
    if client is None and not known:
        return able, ()
    same = _same_examples(built, dataset)
    if client is not None:
        if task in clients[client].tasks:
            raise RecipeError(f"client {client!r} already has the task {task!r}; choose another client or task")
        if not same:
            raise DataError("--data changes the examples, but --client needs those of the run: leave one of them out")
        mine = np.intersect1d(able, clients[client].train.positions)
        if not len(mine):
            raise DataError(f"client {client!r} holds no example with a label of task {task!r}")
        return mine, ()
    if not same:
        return able, ("the data are not the run's, so examples may be among those that its clients hold",)
    free = np.setdiff1d(able, np.concatenate([p.positions for c in clients.values() for p in (c.train, c.val)]))
    if not len(free):
        raise DataError(
            f"the clients of the run hold every example of task {task!r}: choose one of them with "
            "--client, or load more data with --data"
        )
    return free, ()


def _same_examples(built: Built, dataset: Dataset) -> bool:
    """Return whether positions mean the same examples as in the run, as far as labels tell."""
    before, now = built.dataset, dataset
    shared = {t.name for t in now.tasks} & {t.name for t in before.tasks}
    if now is before or len(now.train) != len(before.train):
        return now is before
    return bool(shared) and all(np.array_equal(before.train.labels_of(t), now.train.labels_of(t)) for t in shared)


class _Newcomer:
    """Trains one task from given starts."""

    def __init__(self, models: TaskModels, alone: Dataset, me: BuiltClient, device: str) -> None:
        built = models.built
        recipe, section = built.recipe, built.recipe.model
        multitask = build_model(
            section.entry, section.arguments, alone.input_shape, alone.tasks, recipe.seed, signal=alone.signal
        )
        # the run's initial encoder, with the head that the seed gives to a single task
        module = copy.deepcopy(built.module)
        module.heads, module.decoders = multitask.heads, multitask.decoders
        self.model = FlatModel(module, Layout.from_module(module), device)
        self.common = self.model.layout.parameters.common
        self.me, self.built = me, built
        self.tasks = {task.name: task for task in alone.tasks}

    def probe(self, steps: int) -> Tensor:
        """Return the task vector (d) of so many steps from the initial model, at the full learning rate."""
        changes = {"steps": steps, "epochs": None, "keep_optimizer": False, "schedule": Schedule()}
        self.model.vector.copy_(self.model.initial)
        self._train("probe", 1, self.built.recipe.training.model_copy(update=changes), {})
        return self._common(self.model.params - self._origin)

    def rounds(self, start: Tensor, rounds: int, tell: Callable[[], None]) -> list[float]:
        """Return the metric before training from the initial model plus `start` (d), and after each round."""
        params = self.model.layout.parameters
        self.model.vector.copy_(self.model.initial)
        params.put(self.model.params, self.common, self._common(self._origin) + start.to(self.model.device))
        values = [self._score()]
        memory: State = {}
        training = self.built.recipe.training.model_copy(update={"rounds": rounds})
        for number in range(1, rounds + 1):
            memory = self._train("join", number, training, memory)
            values.append(self._score())
            tell()
        return values

    @property
    def _origin(self) -> Tensor:
        return self.model.initial[: len(self.model.params)]

    def _common(self, params: Tensor) -> Tensor:
        return self.model.layout.parameters.take(params, self.common)

    def _train(self, what: str, number: int, training: Training, memory: State) -> State:
        """Train the loaded model for one round; returns the optimiser's state for the next round."""
        who, seed, part = f"{self.me.id}/{what}", self.built.recipe.seed, self.me.train
        work = Work(who, part.examples, part.index, self.me.tasks)
        added = Additions(phases=self.built.method.phases)
        result = train(self.model, work, training, Ctx(number, seed), added, {"optimizer": memory})
        if not bool(torch.isfinite(self.model.vector).all()):
            raise StateError(f"client {self.me.id!r}, round {number}: the model is no longer finite")
        return result.optimizer

    def _score(self) -> float:
        recipe = self.built.recipe
        (task,) = self.tasks.values()
        how = recipe.evaluation.batch_size, recipe.training.channels_last
        return evaluate(self.model, self.me.test, self.tasks, *how, costly=True)[task.name][task.primary]
