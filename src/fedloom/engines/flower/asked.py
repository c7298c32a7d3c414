"""Checks of a server's requests to a node: it may ask no more than the recipe makes necessary, and no more often."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedloom.core.context import Row
from fedloom.core.untrusted import Array, Each, Exactly, Named, Nothing, Number, OneOf, Sender, Text, Untrusted, shown
from fedloom.engines.flower.received import Packed, integer_fields
from fedloom.engines.flower.relay import TURNS
from fedloom.engines.flower.wire import RefusedError, reading
from fedloom.federation.rounds.built import Built
from fedloom.federation.rounds.messages import Message, blank, nothing

MOST = 3
"""The number of different messages of one kind (training, a turn of a peer, evaluation) that a node answers in a round:
one, and two more from a server that begins the round again with other answers, or that measures what takes long."""
_PERSONAL = {"global": False, "personal": True}
"""Name of a model -> whether an evaluation of it asks for the client's own."""


@dataclass(frozen=True)
class _AnyTensor:
    """A tensor. Local rules judge what stages broadcast."""

    def read(self, value: Any, sender: Sender) -> Tensor:
        if not isinstance(value, Tensor):
            raise ValueError(f"expected a tensor, found {shown(value)}")
        return value


def _read(value: Untrusted, what: Any) -> Any:
    """Read a value of a message that needs nothing known of its sender."""
    return value.read(what, Sender())


@reading()
def read_round(rounds: int, head: Mapping[str, Any]) -> int:
    """Return the round of a message. Raises RefusedError for a round outside 0 to `rounds`."""
    return int(_read(Named({"round": Number(0, rounds, whole=True)}), {"round": head["round"]})["round"])


@reading()
def wants_trained(models: Sequence[str], tree: Mapping[str, Any]) -> bool:
    """Return whether a message asks for scores right after training. RefusedError where none are wanted."""
    return bool(_read(OneOf((False, True) if "trained" in models else (False,)), tree["evaluate_trained"]))


@reading()
def read_message(built: Built, client: str, tree: Mapping[str, Any]) -> Message:
    """Return the `message` in a server's request. Raises RefusedError, with the field, for anything else."""
    method, mine = built.method, sorted(built.federation.clients[client].tasks)
    shared, buffers = method.shared_part(built.layout), method.shared_buffers(built.layout)
    value = _mapping(tree["message"])
    tasks = [*value["tasks"]]
    if tasks != [task for task in mine if method.task_vectors and task in tasks]:
        raise ValueError(f"tasks: expected a sorted selection of {', '.join(mine)}, found {shown(tasks)}")
    rows: tuple[Row, ...] = tuple((client, task) for task in tasks)
    like = blank(shared, built.federation, rows or ((client, None),), nothing(max(len(rows), 1), shared.d))
    own = method.task_vectors or (method.turn.start == "own" and value["vector"] is None)
    by_task = (len(tasks),) if tasks and buffers.d else ()
    fields: dict[str, Untrusted] = {
        "vector": Nothing() if own else Array((shared.d,)),
        "buffers": Nothing() if method.buffers == "local" else Array((*by_task, buffers.d)),
        "integers": Named({} if method.buffers == "local" else integer_fields(built)),
        "broadcast": Named({name: _AnyTensor() for name in value["broadcast"]}),
        "packed": Packed(method.codec, like) if tasks else Named({}),
        "tasks": Each(tuple(map(Exactly, tasks))),
    }
    _read(Named(fields), value)
    return Message(**{**value, "tasks": tuple(tasks)})


@reading()
def read_state(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the marker by which a server names a client's `state`: its round (`node`), perhaps its `task`, or nothing.

    Raises RefusedError for anything else.
    """
    # the server also has a marker for each task, of which it sends one alone where that is wanted
    marker = {name: each for name, each in _mapping(tree["state"]).items() if name != "tasks"}
    node, task = {"node": Number(0, 1 << 53, whole=True)}, {"task": Text()} if "task" in marker else {}
    read: dict[str, Any] = _read(Named({**node, **task} if marker else {}), marker)
    return read


@reading()
def read_turn(client: str, tree: Mapping[str, Any]) -> tuple[str, list[str], list[Tensor]]:
    """Return (turn, names of all peers, peer messages for this one). Raises RefusedError for anything else."""
    turn = str(_read(OneOf(TURNS), tree["turn"]))
    names = _read(Each(tuple([Text()] * len(tree["names"]))), tree["names"])
    if names != sorted({*names, client}):
        raise ValueError(f"names: expected the sorted names of all peers, with {client!r} among them")
    return turn, names, [_read(Array((each.numel(),), torch.uint8), each) for each in tree["peer_messages"]]


@reading()
def read_jobs(built: Built, client: str, round_: int, tree: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the evaluations that a message asks for, each with the `name` of its model.

    Raises RefusedError where the recipe has none after this round, and for a split, model, task or client that it does
    not measure.
    """
    evaluation, last = built.recipe.evaluation, built.recipe.training.rounds
    # a private run may end after any round
    if round_ % evaluation.every and round_ != last and built.recipe.privacy is None:
        raise RefusedError(
            f"round {round_}: the recipe (evaluation.every: {evaluation.every}) measures nothing after this round"
        )
    names = {_PERSONAL[name]: name for name in evaluation.models if name in built.models}
    fields: dict[str, Untrusted] = {
        "key": Number(0, 1 << 53, whole=True),
        "client": Exactly(client),
        "split": OneOf(evaluation.splits),
        "round": Exactly(round_),
        "personal": OneOf((*names,)),
        "costly": OneOf((False, True)),
    }
    jobs = [_of_model(built, client, fields, _mapping(job)) for job in tree["jobs"]]
    keys = [(job["personal"], job["task"], job["split"]) for job in jobs]
    if len({*keys}) < len(keys):
        raise ValueError("jobs: expected each model at most once per split")
    return [{**job, "name": names[job["personal"]]} for job in jobs]


@reading()
def read_models(built: Built, client: str, tree: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the models that a message asks to be written down. Raises RefusedError for anything else."""
    fields: dict[str, Untrusted] = {"name": OneOf(built.models), "prefix": Text(1000)}
    models = [{key: each for key, each in _mapping(one).items() if key != "owner"} for one in tree["models"]]
    return [_of_model(built, client, fields, one) for one in models]


def _of_model(built: Built, client: str, fields: Mapping[str, Untrusted], value: Mapping[str, Any]) -> dict[str, Any]:
    """Read a request about a model: some fields, and the message and state that it is loaded from."""
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
    read = _read(Named(parts), plain)
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
            f"round {asked['round']}: this node has answered {count} messages to {asked['what']}, expected at most "
            f"{MOST}"
        )
