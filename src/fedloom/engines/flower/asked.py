"""Checks of what a server asks of a node: no more than the recipe makes necessary, and no more often."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedloom.core.context import Row
from fedloom.core.untrusted import Array, Each, Exactly, Named, Nothing, Number, OneOf, Sender, Text, Untrusted, shown
from fedloom.engines.flower.fields import Packed, integer_fields
from fedloom.engines.flower.relay import TURNS
from fedloom.engines.flower.wire import RefusedError, reading
from fedloom.federation.rounds.built import Built
from fedloom.federation.rounds.messages import Message, blank, nothing

MOST = 3
"""Different messages of one kind (training, a turn of a peer, evaluation) that a node answers in a round: one, and two
more of a server that begins the round again with other answers, or measures what takes long."""
_PERSONAL = {"global": False, "personal": True}
"""Name of a model -> whether an evaluation of it asks for the client's own."""


@dataclass(frozen=True)
class _AnyTensor:
    """A tensor: what stages broadcast is for the local rules to judge."""

    def read(self, value: Any, sender: Sender) -> Tensor:
        if not isinstance(value, Tensor):
            raise ValueError(f"expected a tensor, found {shown(value)}")
        return value


def read_round(rounds: int, head: Mapping[str, Any]) -> int:
    """Return the round of a message. Raises RefusedError for one of other than so many rounds."""
    with reading():
        found = Named({"round": Number(0, rounds, whole=True)}).read({"round": head["round"]}, Sender())
    return int(found["round"])


def wants_trained(models: Sequence[str], tree: Mapping[str, Any]) -> bool:
    """Return whether a message asks for scores right after training. RefusedError where none are wanted."""
    there = "trained" in models
    with reading():
        return bool(OneOf((False, True) if there else (False,)).read(tree["evaluate_trained"], Sender()))


def read_message(built: Built, client: str, tree: Mapping[str, Any]) -> Message:
    """Return the `message` in what a server sends. Raises RefusedError, with the field, for anything else."""
    method, mine = built.method, sorted(built.federation.clients[client].tasks)
    shared, buffers = method.shared_part(built.layout), method.shared_buffers(built.layout)
    with reading():
        value = _mapping(tree["message"])
        tasks = [*value["tasks"]]
        if tasks != [task for task in mine if method.task_vectors and task in tasks]:
            raise ValueError(f"tasks: expected some of {', '.join(mine)}, sorted, found {shown(tasks)}")
        rows: tuple[Row, ...] = tuple((client, task) for task in tasks)
        like = blank(shared, built.federation, rows or ((client, None),), nothing(max(len(rows), 1), shared.d))
        own = method.task_vectors or (method.turn.start == "own" and value["vector"] is None)
        fields: dict[str, Untrusted] = {
            "vector": Nothing() if own else Array((shared.d,)),
            "buffers": Nothing() if method.buffers == "local" else Array((buffers.d,)),
            "integers": Named({} if method.buffers == "local" else integer_fields(built)),
            "broadcast": Named({name: _AnyTensor() for name in value["broadcast"]}),
            "packed": Packed(method.codec, like) if tasks else Named({}),
            "tasks": Each(tuple(map(Exactly, tasks))),
        }
        Named(fields).read(value, Sender())
        return Message(**{**value, "tasks": tuple(tasks)})


def read_state(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the marker by which a server names a client's `state`: its round (`node`), perhaps its `task`, or nothing.

    Raises RefusedError for anything else.
    """
    with reading():
        value = _mapping(tree["state"])
        # the server also has a marker for each task, of which it sends one alone where that is wanted
        marker = {name: each for name, each in value.items() if name != "tasks"}
        node, task = {"node": Number(0, 1 << 53, whole=True)}, {"task": Text()} if "task" in marker else {}
        return Named({**node, **task} if marker else {}).read(marker, Sender())


def read_turn(client: str, tree: Mapping[str, Any]) -> tuple[str, list[str], list[Tensor]]:
    """Return (turn, names of all peers, peer messages for this one). Raises RefusedError for anything else."""
    with reading():
        turn = str(OneOf(TURNS).read(tree["turn"], Sender()))
        names = Each(tuple([Text()] * len(tree["names"]))).read(tree["names"], Sender())
        if names != sorted({*names, client}):
            raise ValueError(f"names: expected those of all peers, sorted, and {client!r} among them")
        peer_messages = [
            Array((peer_message.numel(),), torch.uint8).read(peer_message, Sender())
            for peer_message in tree["peer_messages"]
        ]
    return turn, names, peer_messages


def read_jobs(built: Built, client: str, round_: int, tree: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the evaluations that a message asks for, each with the `name` of its model.

    Raises RefusedError where the recipe has none after this round, and for another split, model, task or client than it
    has measured.
    """
    evaluation, last = built.recipe.evaluation, built.recipe.training.rounds
    # a private run may end after any round
    if round_ % evaluation.every and round_ != last and built.recipe.privacy is None:
        raise RefusedError(f"round {round_}: nothing is measured after it, with evaluation.every: {evaluation.every}")
    names = {_PERSONAL[name]: name for name in evaluation.models if name in built.models}
    fields: dict[str, Untrusted] = {
        "key": Number(0, 1 << 53, whole=True),
        "client": Exactly(client),
        "split": OneOf(evaluation.splits),
        "round": Exactly(round_),
        "personal": OneOf((*names,)),
        "costly": OneOf((False, True)),
    }
    with reading():
        jobs = [_of_model(built, client, fields, _mapping(job)) for job in tree["jobs"]]
        asked = [(job["personal"], job["task"], job["split"]) for job in jobs]
        if len({*asked}) < len(asked):
            raise ValueError("jobs: expected each model once on each split")
    return [{**job, "name": names[job["personal"]]} for job in jobs]


def read_models(built: Built, client: str, tree: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the models that a message asks to be written down. Raises RefusedError for anything else."""
    fields: dict[str, Untrusted] = {"name": OneOf(built.models), "prefix": Text(1000)}
    with reading():
        models = [{key: each for key, each in _mapping(one).items() if key != "owner"} for one in tree["models"]]
        return [_of_model(built, client, fields, one) for one in models]


def _of_model(built: Built, client: str, fields: Mapping[str, Untrusted], value: Mapping[str, Any]) -> dict[str, Any]:
    """What is asked about a model: some fields, and what it is loaded from."""
    method, mine = built.method, (*built.federation.clients[client].tasks,)
    # test data of the recipe's own is the same at several clients, and measured at one of them for all
    known = tuple(task.name for task in built.federation.tasks) if built.whole else mine
    one_each = method.task_vectors or (method.turn.by_task and "global" not in built.models)
    parts: dict[str, Untrusted] = {
        **fields,
        "tasks": Each(tuple([OneOf(known)] * len(value["tasks"]))),
        "task": OneOf(mine) if one_each else Nothing(),
    }
    plain = {name: each for name, each in value.items() if name not in ("message", "state")}
    read = Named(parts).read(plain, Sender())
    # a peer has its models itself
    message = None if built.recipe.peers is not None else read_message(built, client, value)
    return {**read, "tasks": tuple(read["tasks"]), "message": message, "state": read_state(value)}


def _mapping(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"expected fields, found {shown(value)}")
    return value


def agree_to_answer(lines: Sequence[Mapping[str, Any]], asked: Mapping[str, Any], anew: bool) -> None:
    """Raise RefusedError where a node has answered enough messages of a kind in a round, as its audit file says.

    `asked` are the kind (`what`), the run, the round and the checksum (`asked`) of the next one. The same message gets
    the same answer, so it counts once, unless noise is drawn `anew` for each answer.
    """
    alike = [line for line in lines if all(line.get(key) == asked[key] for key in ("what", "run", "round"))]
    before = [line.get("asked") for line in alike]
    count = len(before) if anew else len({*before} - {asked["asked"]})
    if count >= MOST:
        raise RefusedError(
            f"round {asked['round']}: {count} messages to {asked['what']} were answered, expected at most {MOST}"
        )
