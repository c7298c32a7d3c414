"""Combinations in a recipe that do not work, refused before a run begins: one idea a function.

Each raises RecipeError with the key to change.
"""

from __future__ import annotations

from collections.abc import Callable

from fedloom.errors import RecipeError, nearest
from fedloom.methods.method import AGES, Method
from fedloom.recipes.schema import Recipe
from fedloom.rounds.built import Built
from fedloom.training import stacked


def pace(recipe: Recipe, method: Method) -> None:
    """Ages of models without asynchronous peers, and partial participation with them."""
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


def judges_without_validation(built: Built) -> None:
    """Peers that judge each other's models, and rules that measure models, if a client has no validation data."""
    recipe = built.recipe
    without = [client for client in built.federation.clients.values() if not len(client.part("val"))]
    if recipe.peers is not None and without:
        groups = recipe.peers.choose.groups
        judged = {
            "similarity cross-loss": "cross-loss" in recipe.peers.similarity.signals,
            "choose.groups.fine": groups is not None and groups.fine is not None,
        }
        for what in (what for what, there in judged.items() if there):
            raise RecipeError(
                f"peers: {what} judges models on validation data, but client {without[0].id!r} has none; "
                "set partition.val_fraction"
            )
    for rule in built.method.local:
        if rule.validation and without:
            raise RecipeError(
                f"method: {rule!r} measures models on validation data, but client {without[0].id!r} has none "
                f"({len(without)} of {len(built.federation.clients)} clients); set partition.val_fraction"
            )


def rows_by_task(built: Built) -> None:
    """Tasks that are trained alone, together with something that needs one model for all of a client's tasks."""
    method, buffers = built.method, built.layout.buffers
    if method.rows != "client-task":
        return
    if buffers.blocks:
        raise RecipeError(
            f"model: {method.name} trains each task alone, so running statistics cannot be shared "
            f"({buffers.names[0]}); use a model without, for example norm: group"
        )
    if "trained" in built.recipe.evaluation.models:
        raise RecipeError(
            f"evaluation.models: {method.name} trains a model for each task of a client, so there is no one "
            "model 'trained' to measure; use global and personal"
        )


def epochs_by_domain(built: Built) -> None:
    """Epochs by domain that do not fit the clients' domains."""
    recipe = built.recipe
    epochs, clients = recipe.training.epochs, built.federation.clients.values()
    if not isinstance(epochs, dict):
        return
    if recipe.training.stacked:
        raise RecipeError("training.stacked: clients of a stack train equally long, but training.epochs is by domain")
    domains = list(dict.fromkeys(c.domain for c in clients if c.domain is not None))
    for client in clients:
        if client.domain not in epochs:
            where = "no domain" if client.domain is None else f"domain {client.domain!r}"
            raise RecipeError(f"training.epochs: client {client.id!r} is of {where}, found {', '.join(epochs)}")
    for name in epochs:
        if name not in domains:
            raise RecipeError(
                f"training.epochs.{name}: no client is of this domain.{nearest(name, domains)} "
                f"Domains: {', '.join(domains)}"
            )


def stacks(built: Built) -> None:
    """Stacked training together with something that cannot be stacked."""
    recipe, method = built.recipe, built.method
    if not recipe.training.stacked:
        return
    if recipe.runtime.workers > 1:
        raise RecipeError(f"training.stacked: runs in one process, but runtime.workers is {recipe.runtime.workers}")
    if method.phases or method.stream or method.rows == "client-task":
        raise RecipeError(f"training.stacked: a stack trains all of one model, but {method.name} does more")
    if built.dataset.train.prefetch:
        raise RecipeError(
            f"training.stacked: data set {built.dataset.name!r} may augment its batches, a stack does not"
        )
    stacked.refuse(built.module, recipe.training, method.local)


ALL: tuple[Callable[[Built], None], ...] = (judges_without_validation, rows_by_task, epochs_by_domain, stacks)
