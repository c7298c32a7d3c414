"""From a recipe to everything a runner needs."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from fedloom.codecs import Raw, Sparse, Unified
from fedloom.core.layout import Layout
from fedloom.data.dataset import Dataset
from fedloom.data.partition import Partition, Pool
from fedloom.errors import RecipeError, nearest
from fedloom.methods import ADDONS
from fedloom.methods.at_peers import at_peers
from fedloom.methods.method import AGES, Method
from fedloom.models.changes import changed
from fedloom.models.multitask import MultiTask, build_model
from fedloom.recipes.schema import Recipe, recipe_hash
from fedloom.rounds.federation import Federation
from fedloom.rounds.worker import Setup
from fedloom.training.stacked import refuse

_CODECS = {"raw": Raw(), "sparse": Sparse(), "unified": Unified()}


@dataclass(frozen=True, eq=False)
class Built:
    """A recipe made concrete."""

    recipe: Recipe
    method: Method
    dataset: Dataset
    pool: Pool
    partition: Partition
    federation: Federation
    module: MultiTask
    layout: Layout

    @cached_property
    def about(self) -> dict[str, Any]:
        """What run.json says of the run: the method, its tasks and clients, and what may not change at a resume."""
        return {
            "method": self.method.name,
            "recipe_text": str(self.method),
            "outline": asdict(self.method.outline),
            "recipe_hash": recipe_hash(self.recipe),
            "partition_hash": self.partition.hash,
            "layout_hash": self.layout.hash,
            "data_hash": self.data_hash,
            "frozen_hash": self.frozen_hash,
            "parameters": self.layout.parameters.d,
            "tasks": {
                t.name: {"kind": t.kind, "primary": t.primary, "metrics": dict(t.metrics), "weight": t.weight}
                for t in self.federation.tasks
            },
            "clients": {
                c.id: {
                    "tasks": {n: w for n, (_, w) in c.tasks.items()},
                    "domain": c.domain,
                    "train": len(c.train),
                    "val": len(c.val),
                }
                for c in self.federation.clients.values()
            },
        }

    @property
    def dealt(self) -> dict[str, Any]:
        """What partition.json says of the run: who holds which examples, and how many of each class."""
        labels = {row["client"]: row["labels"] for row in self.partition.table(self.pool)}
        return {**self.partition.to_json(), "labels": labels}

    @property
    def setup(self) -> Setup:
        """The part that workers need."""
        r = self.recipe
        return Setup(self.method, self.module, self.federation, r.training, r.evaluation, r.seed, r.runtime.threads)

    @property
    def frozen(self) -> dict[str, Tensor]:
        """Parameters that nobody trains or sends: all that needs no gradient, such as the weights beside LoRA's."""
        return {name: p.detach() for name, p in self.module.named_parameters() if not p.requires_grad}

    @property
    def frozen_hash(self) -> str:
        """16 hexadecimal digits over the frozen parameters: whether a resumed run begins from the same weights."""
        digest = hashlib.sha256()
        for name, p in self.frozen.items():
            digest.update(name.encode() + p.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()[:16]

    @property
    def data_hash(self) -> str:
        """16 hexadecimal digits over the labels and the inputs' shape: whether a resumed run sees the same data."""
        digest = hashlib.sha256(repr((self.dataset.name, self.dataset.input_shape)).encode())
        for part in (self.dataset.train, self.dataset.test):
            digest.update(part.fingerprint())
        return digest.hexdigest()[:16]


def build_method(recipe: Recipe) -> Method:
    """The recipe's method with its add-ons and common settings. Raises RecipeError for a refused combination."""
    section = recipe.method
    try:
        method: Method = section.entry.function(**section.params)
        for name, params in section.add.items():
            method = ADDONS[name].function(method, **params)
        return replace(
            method,
            name=" + ".join([section.name, *section.add]),
            codec=_CODECS[section.codec] if section.codec else method.codec,
            weights=section.weights or method.weights,
            buffers=section.buffers or method.buffers,
        )
    except ValueError as error:
        raise RecipeError(f"method: {error}") from error


def with_options(dataset: Dataset, options: Mapping[str, Mapping[str, Any]]) -> Dataset:
    """The data set with some options of its tasks changed. Raises RecipeError for a task or an option it has not."""
    tasks = {task.name: task for task in dataset.tasks}
    for name, changes in options.items():
        if name not in tasks:
            raise RecipeError(f"tasks.{name}: unknown task.{nearest(name, tasks)} Tasks: {', '.join(tasks)}")
        known = [f.name for f in fields(tasks[name]) if f.name not in ("name", "channels")]
        for key in changes:
            if key not in known:
                raise RecipeError(
                    f"tasks.{name}.{key}: unknown option.{nearest(key, known)} Options: {', '.join(known)}"
                )
        try:
            kind = TypeAdapter(type(tasks[name]))
            tasks[name] = kind.validate_python({**asdict(tasks[name]), **changes})
        except ValidationError as error:
            wrong = error.errors()[0]
            raise RecipeError(f"tasks.{name}.{wrong['loc'][0]}: {wrong['input']!r} found: {wrong['msg']}") from None
    return replace(dataset, tasks=tuple(tasks.values()))


def load_data(recipe: Recipe) -> Dataset:
    """The recipe's data set, its tasks as they come with it. Equal for recipes with equal data sections and seeds."""
    dataset: Dataset = recipe.data.entry.function(recipe.seed, **recipe.data.params)
    return dataset


def _check_peers(recipe: Recipe, method: Method) -> None:
    """Refuse what goes with asynchronous peers only, or not with them."""
    free = recipe.peers is not None and recipe.peers.mode == "asynchronous"
    ages = sorted(f.removeprefix("extra:") for f in method.stage.traits.reads & AGES)
    if ages and not free:
        raise RecipeError(
            f"method: {method.name} looks at {', '.join(ages)}, but all models of a round are of one instant; "
            "peers: {mode: asynchronous} are not"
        )
    if free and recipe.training.participation < 1:
        raise RecipeError(
            f"training.participation: {recipe.training.participation} found, but asynchronous peers take part at their "
            "own pace; peers.scenario has churn and dropout"
        )


def _check_epochs(recipe: Recipe, federation: Federation) -> None:
    """Refuse epochs by domain that are not those of the clients."""
    epochs = recipe.training.epochs
    if not isinstance(epochs, dict):
        return
    if recipe.training.stacked:
        raise RecipeError("training.stacked: clients of a stack train equally long, but training.epochs is by domain")
    domains = list(dict.fromkeys(c.domain for c in federation.clients.values() if c.domain is not None))
    for client in federation.clients.values():
        if client.domain not in epochs:
            where = "no domain" if client.domain is None else f"domain {client.domain!r}"
            raise RecipeError(f"training.epochs: client {client.id!r} is of {where}, found {', '.join(epochs)}")
    for name in epochs:
        if name not in domains:
            raise RecipeError(
                f"training.epochs.{name}: no client is of this domain.{nearest(name, domains)} "
                f"Domains: {', '.join(domains)}"
            )


def method_of(recipe: Recipe, method: Method | None) -> Method:
    """The recipe's method, or the one given in its place, as it runs at a server or at peers."""
    method = method or build_method(recipe)
    if recipe.peers is not None:
        method = at_peers(method, recipe.peers)
    _check_peers(recipe, method)
    return method


def build(
    recipe: Recipe,
    method: Method | None = None,
    partition: Partition | None = None,
    dataset: Dataset | None = None,
) -> Built:
    """Load the data, deal it out, build the model and the method.

    `partition` is a saved one, when resuming; `dataset` is what `load_data` gave, where several are built from one.
    """
    method = method_of(recipe, method)
    dataset = with_options(dataset or load_data(recipe), recipe.tasks)
    pool = Pool.of(dataset)
    if partition is None:
        section = recipe.partition
        partition = section.entry.function(pool, recipe.seed, **section.params)
    else:
        partition.check(pool, shared=True)
    assert partition is not None
    federation = Federation.build(dataset, partition, unified=recipe.model.heads == "all")
    return assemble(recipe, method, dataset, pool, partition, federation)


def assemble(
    recipe: Recipe, method: Method, dataset: Dataset, pool: Pool, partition: Partition, federation: Federation
) -> Built:
    """Build the model for clients that are there already, and refuse what does not go together."""
    model = recipe.model
    module = build_model(
        model.name, model.params, dataset.input_shape, dataset.tasks, recipe.seed, model.weights, model.lora
    )
    module = changed(module, method.model, dataset.input_shape, recipe.seed)
    layout = Layout.from_module(module)
    try:
        method.stage.init(method.shared_part(layout))
        method.edge.init(method.shared_part(layout))
    except ValueError as error:
        raise RecipeError(f"method: {error}") from error
    if recipe.peers is not None:
        judged = {
            "similarity cross-loss": "cross-loss" in recipe.peers.similarity.signals,
            "choose.groups.fine": (groups := recipe.peers.choose.groups) is not None and groups.fine is not None,
        }
        for what in (what for what, there in judged.items() if there):
            for client in federation.clients.values():
                if not len(client.part("val")):
                    raise RecipeError(
                        f"peers: {what} judges models on validation data, but client {client.id!r} has none; "
                        "set partition.val_fraction"
                    )
    for rule in method.local:
        without = [c.id for c in federation.clients.values() if not len(c.part("val"))]
        if rule.validation and without:
            raise RecipeError(
                f"method: {rule!r} measures models on validation data, but client {without[0]!r} has none "
                f"({len(without)} of {len(federation.clients)} clients); set partition.val_fraction"
            )
    if method.rows == "client-task":
        if layout.buffers.blocks:
            raise RecipeError(
                f"model: {method.name} has one model a task, so running statistics cannot be shared "
                f"({layout.buffers.names[0]}); use a model without, for example norm: group"
            )
        if "trained" in recipe.evaluation.models:
            raise RecipeError(
                f"evaluation.models: {method.name} trains a model for each task of a client, so there is no one "
                "model 'trained' to measure; use global and personal"
            )
    _check_epochs(recipe, federation)
    if recipe.training.stacked:
        if recipe.runtime.workers > 1:
            raise RecipeError(f"training.stacked: runs in one process, but runtime.workers is {recipe.runtime.workers}")
        if method.phases or method.stream or method.rows == "client-task":
            raise RecipeError(f"training.stacked: a stack trains all of one model, but {method.name} does more")
        if dataset.train.prefetch:
            raise RecipeError(f"training.stacked: data set {dataset.name!r} may augment its batches, a stack does not")
        refuse(module, recipe.training, method.local)
    return Built(recipe, method, dataset, pool, partition, federation, module, layout)
