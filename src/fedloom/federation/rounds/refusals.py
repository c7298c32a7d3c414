"""Combinations in a recipe that do not work, refused with a RecipeError before a run begins: one idea per function."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from fedloom.core.errors import RecipeError, nearest
from fedloom.core.stage import Stage, every, inner
from fedloom.core.updates import Updates
from fedloom.federation.recipes.schema import PeersSection
from fedloom.federation.rounds.built import Built, group_of
from fedloom.federation.rounds.messages import nothing, rows_of
from fedloom.training.flat import integer_buffers


def judges_without_validation(built: Built) -> None:
    """Refuse peers that judge models, and rules that measure models, if a client has no validation data."""
    recipe = built.recipe
    without = [client for client in built.federation.clients.values() if not len(client.part("val"))]
    if recipe.peers is not None and without:
        for what in judged_on_data(recipe.peers):
            raise RecipeError(
                f"peers: {what} judges models on validation data, but client {without[0].id!r} has none; "
                "set partition.val_fraction, or val of fl.Client"
            )
    for rule in built.method.rules:
        if rule.validation and without:
            raise RecipeError(
                f"method: {rule!r} measures models on validation data, but client {without[0].id!r} has none "
                f"({len(without)} of {len(built.federation.clients)} clients); set partition.val_fraction, or val of "
                "fl.Client"
            )


def judged_on_data(peers: PeersSection) -> list[str]:
    """Return the settings by which peers judge each other's models on their own validation data."""
    groups = peers.choose.groups
    fine = ["choose.groups.fine"] if groups is not None and groups.fine is not None else []
    return [*(f"similarity {signal}" for signal in peers.similarity.measured), *fine]


def pooled(built: Built) -> None:
    """Refuse training on the examples of all clients in one place, where there is no such place."""
    recipe, method = built.recipe, built.method
    if method.turn.pool is None:
        return
    elsewhere = f"runtime.engine: {recipe.runtime.engine}" if recipe.runtime.engine != "process" else None
    if setting := "peers" if recipe.peers is not None else elsewhere:
        raise RecipeError(
            f"method: {method.name} needs the examples of all clients in one place, but {setting} provides no such "
            "place; set runtime.engine: process, and leave peers out"
        )


def rows_by_task(built: Built) -> None:
    """Refuse tasks trained alone, together with something that needs one model for all of a client's tasks."""
    method, buffers = built.method, built.layout.buffers
    if not method.turn.by_task:
        return
    if buffers.blocks and not (method.task_vectors and built.recipe.peers is None):
        where = "with one model for all" if built.recipe.peers is None else "among peers"
        raise RecipeError(
            f"model: {method.name} trains each task alone, so running statistics cannot be shared {where} "
            f"({buffers.names[0]}); use a model without them, for example norm: group"
        )
    if "trained" in built.recipe.evaluation.models:
        raise RecipeError(
            f"evaluation.models: {method.name} trains a model for each task of a client, so there is no one "
            "model 'trained' to measure; use global and personal"
        )


def unaware_of_presence(built: Built) -> None:
    """Refuse stages that do not say how they treat rows that lack blocks, where rows may lack some."""
    method, federation, peers = built.method, built.federation, built.recipe.peers
    if not (peers is not None and peers.sends_parts):
        have = federation.presence(built.shared, rows_of(built, federation.trainers))
        if have is None or bool(have.all()):
            return
    for stage in (*_unaware(method.edge), *_unaware(method.stage)):
        raise RecipeError(
            f"method: {method.name}: {stage} does not declare how it treats rows that lack blocks, but here some do: "
            "clients have only their own tasks' heads (model.heads: own), send one row per task, or send parts of "
            "their models. Keep such parts with the clients (for example share: encoder); or let the stage look at "
            "Updates.present and declare Traits(presence=...), or put PerBlock around it"
        )


def _unaware(stage: Stage) -> Iterator[Stage]:
    """Yield the stages in one, or itself, that do not say how they treat rows that lack blocks."""
    if stage.traits.presence is None:
        yield from [part for one in inner(stage) for part in _unaware(one)] or [stage]


def too_few_rows(built: Built) -> None:
    """Refuse stages that never have enough rows in some group, whoever takes part."""
    method, federation = built.method, built.federation
    if not built.whole:
        return
    if built.recipe.peers is not None:
        stages = [stage for stage in every(method.stage) if any(stage.unfit(None, 1))]
        each = _heard(built, built.recipe.peers) if stages else {}
        for peer, heard in each.items():
            for why in (why for stage in stages for why in stage.unfit(None, heard + 1)):
                raise RecipeError(
                    f"method: {method.name}: at peer {peer!r}, which hears at most {heard} other peers: {why}"
                )
        return
    shared, rows = built.shared, rows_of(built, sorted(federation.trainers))
    ones = torch.ones(len(rows), dtype=torch.float64)
    groups = [group_of(federation, row) for row in rows]
    present, X = federation.presence(shared, rows), nothing(len(rows), shared.d)
    everyone = Updates(shared, rows, X, ones, ones, present=present, extra={"tasks": groups})
    for why in (why for stage in every(method.stage) for why in stage.unfit(everyone, len(rows))):
        raise RecipeError(f"method: {method.name}: {why}")


def _heard(built: Built, peers: PeersSection) -> dict[str, int]:
    """Return how many others each peer hears at most in a round."""
    others, graph = len(built.graph.peers) - 1, built.graph
    most = others if peers.choose.top is None else peers.choose.top
    # where graphs are drawn anew, any peer may be heard one day
    return {peer: min(most, others if peers.graph.every else len(graph.senders(peer))) for peer in graph.peers}


def strangers(built: Built) -> None:
    """Refuse names of clients in a stage or in a scenario of peers that are no clients."""
    known, method, peers = sorted(built.federation.clients), built.method, built.recipe.peers
    if built.whole and peers is not None and peers.scenario is not None:
        peers.scenario.check(known)
    if built.whole and (unknown := sorted(set().union(*(stage.clients for stage in every(method.stage))) - {*known})):
        raise RecipeError(
            f"method: {method.name}: no client {unknown[0]!r}.{nearest(unknown[0], known)} Clients: {', '.join(known)}"
        )


def attacked(built: Built) -> None:
    """Refuse hostile clients that cannot do what the recipe wants of them."""
    recipe = built.recipe
    if not built.attacks or recipe.attack is None:
        return
    if built.method.turn.pool:
        raise RecipeError(
            f"attack: clients of {built.method.name} send nothing, so they cannot attack; leave attack out"
        )
    if any(attack.knows_all for attack in built.attacks.values()):
        runtime, peers = recipe.runtime, recipe.peers
        where = ""
        if peers is not None and peers.mode == "asynchronous":
            where = "among asynchronous peers"
        elif peers is not None and runtime.engine != "process":
            where = f"among peers with runtime.engine: {runtime.engine}"
        elif runtime.engine == "cluster" and not runtime.exact:
            where = "on a cluster with runtime.exact: false"
        if where:
            raise RecipeError(
                f"attack: {recipe.attack.name} needs all honest clients' updates in one place before any is used, but "
                f"a run {where} has no such place; use a server (exact: true), or synchronous peers in one process"
            )
        if built.method.codec.stays_packed:
            raise RecipeError(
                f"attack: {recipe.attack.name} needs unpacked rows, but {built.method.codec!r} keeps them packed; "
                "choose another attack"
            )
    for group, count, hostile, factor in built.attacked_groups:
        if factor == 0:
            raise RecipeError(
                f"attack: {recipe.attack.name} has the factor 0 among the {count} clients with {group}, {hostile} of "
                "them hostile, so these would send the honest mean; set attack.factor, for example to 1.5, or name "
                "more of these clients in attack.clients"
            )


def epochs_by_domain(built: Built) -> None:
    """Refuse epochs by domain that do not fit the clients' domains."""
    epochs, clients = built.recipe.training.epochs, built.federation.clients.values()
    if not isinstance(epochs, dict):
        return
    domains = list(dict.fromkeys(c.domain for c in clients if c.domain is not None))
    for client in clients:
        if client.domain not in epochs:
            where = "no domain" if client.domain is None else f"domain {client.domain!r}"
            raise RecipeError(
                f"training.epochs: client {client.id!r} has {where}, but the keys are {', '.join(epochs)}"
            )
    for name in epochs:
        if name not in domains:
            raise RecipeError(
                f"training.epochs.{name}: no client has this domain.{nearest(name, domains)} "
                f"Domains: {', '.join(domains)}"
            )


def unprotected(built: Built) -> None:
    """Refuse what a private run would release without noise, or draw in a way that nobody accounted for."""
    recipe, method, section = built.recipe, built.method, built.recipe.privacy
    if section is None:
        return
    if recipe.peers is not None:
        if recipe.peers.mode == "asynchronous":
            raise RecipeError(
                "privacy: the budget counts rounds, but asynchronous peers train as often as they can; set "
                "peers.mode: synchronous"
            )
        features = ["similarity features"] if "features" in recipe.peers.similarity.signals else []
        for what in (*judged_on_data(recipe.peers), *features):
            raise RecipeError(
                f"privacy: {what} shows other peers values from a peer's own data without noise; set it to null or "
                "leave it out"
            )
    if recipe.early_stopping is not None:
        raise RecipeError(
            "early_stopping: it reads clients' validation data without noise, which privacy forbids; leave it out"
        )
    if recipe.runtime.engine == "flower" and section.trust == "central":
        if section.sampling == "fixed":
            raise RecipeError("privacy.sampling: fixed found, but with Flower clients may join later; set poisson")
        if recipe.runtime.flower.enough is not None:
            raise RecipeError(
                "runtime.flower.enough: if the server stops waiting early, one more client displaces another. That "
                "changes the sum by two updates, but the budget counts one; leave it out, or set privacy.trust: local"
            )
    drawn = section.sampling == "poisson" and recipe.training.participation < 1
    if drawn and method.stage.traits.hides and "base" in method.stage.traits.reads:
        raise RecipeError(
            f"privacy.sampling: poisson found, with training.participation {recipe.training.participation}, but "
            f"{method.name} needs the models of the first clients, so a first round without clients would show; "
            "expected fixed, or all clients in each round"
        )
    if built.deployed and recipe.runtime.saved_every != 1:
        raise RecipeError(
            f"runtime.checkpoint_every: {recipe.runtime.checkpoint_every} found, but a private run that continues "
            "after a crash would publish these rounds a second time; expected 1"
        )
    shared = built.shared_buffers.names
    if method.buffers != "local" and (shared or integer_buffers(built.module)):
        raise RecipeError(
            f"method.buffers: {method.buffers} found, but running statistics ({next(iter(shared), 'counters')}) travel "
            "beside the update without noise; set method.buffers: local, or use a model without them"
        )


def counts_without_noise(built: Built) -> None:
    """Refuse what sites count without noise, of a table or of texts, beside a privacy budget that promises noise."""
    recipe, table = built.recipe, built.dataset.table
    if recipe.privacy is None:
        return
    if built.dataset.words is not None and recipe.data.arguments.get("words", "") is None:
        raise RecipeError(
            "data.words: null found, but then the vocabulary is counted over all clients' texts, without noise beside "
            "the budget of privacy; name a file of words"
        )
    if table is None or table.mode != "federated":
        return
    local = "set data.preprocess: local, and list the categories in data.inputs"
    if not table.noise:
        raise RecipeError(
            "data.preprocess: federated found, but sites would send counts and sums of their rows without noise beside "
            f"the budget of privacy; set data.ranges: {{column: [least, most]}} for noise, or {local}"
        )
    if built.deployed and recipe.data.name != "nodes":
        raise RecipeError(
            f"data.preprocess: federated found, but nodes know the seed from which its noise would follow; {local}"
        )


ALL: tuple[Callable[[Built], None], ...] = (
    pooled,
    judges_without_validation,
    rows_by_task,
    unaware_of_presence,
    too_few_rows,
    strangers,
    attacked,
    epochs_by_domain,
    unprotected,
    counts_without_noise,
)
