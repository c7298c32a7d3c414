"""Peers at nodes: the server carries their peer messages, as bytes, and aggregates nothing.

A round has four turns: train and publish, choose and ask, answer, mix. A node may be a new process at each turn. So its
folder has the result of training and the received messages, and a turn first repeats the turns before it with these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from fedloom.core.codecs import ByteCount
from fedloom.core.context import State
from fedloom.core.errors import RecipeError
from fedloom.core.untrusted import Each, Number, Sender, Text
from fedloom.engines.peers.community import Environment
from fedloom.engines.peers.peer import Peer
from fedloom.engines.peers.rounds import community_of
from fedloom.engines.peers.transport import Mailbox, as_tensor
from fedloom.federation.recipes.schema import Recipe
from fedloom.federation.rounds.built import Built
from fedloom.federation.rounds.measure import train_records
from fedloom.federation.rounds.messages import Ledger, Payload
from fedloom.federation.rounds.worker import TrainDone, TrainJob, Worker
from fedloom.federation.runs import checkpoint
from fedloom.federation.runs.folder import RunFolder

TURNS = ("train", "choose", "answer", "mix")
_MEMORY = "turns"
_COUNT = Each((Text(), Text(), Number(0, 1 << 53, whole=True)))  # role, task ("" for none), bytes


Train = Callable[[TrainJob], TrainDone]


@dataclass(frozen=True, eq=False)
class TurnJob:
    """One turn of a peer in a round; `names` are all peers of the run, `peer_messages` (uint8) those sent to it."""

    client: str
    round: int
    turn: str
    names: Sequence[str]
    peer_messages: Sequence[Tensor]


@dataclass
class TurnDone:
    """The result of one turn of one peer."""

    peer_messages: list[tuple[str, Tensor]] = field(default_factory=list)
    """Receiver and bytes (uint8); a peer message to several is one tensor."""
    records: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    ledger: Ledger = field(default_factory=Ledger)
    done: TrainDone | None = None
    state: State | None = None
    """The peer's state after the round, where this was the last turn."""
    train: list[dict[str, Any]] = field(default_factory=list)


def take_turn(built: Built, worker: Worker, train: Train, folder: RunFolder, before: State, job: TurnJob) -> TurnDone:
    """Do one turn of a peer in a round that it begins in the state `before`; `train` does its training."""
    left, community = TurnDone(), community_of(built, names=job.names)
    heard: list[bytes] = []
    sent: list[tuple[str, bytes]] = []

    def log(*event: Any) -> None:
        left.events.append(event)

    def record(kind: str, fields: dict[str, Any] | Callable[[], dict[str, Any]]) -> None:
        if not callable(fields):
            left.records.append((kind, fields))
        elif job.turn == TURNS[-1] and built.recipe.runtime.diagnostics:
            left.records.append((kind, fields()))

    env = Environment(partial(map, train), lambda jobs: [each.on(worker) for each in jobs], left.ledger, log, record)
    mailbox = Mailbox(job.client, built.layout.hash, lambda to, data: sent.append((to, data)), lambda: heard, log)
    peer = Peer(community.context.at(job.client), mailbox, before, env)
    begun = peer.begin(job.round)
    if job.turn == TURNS[0]:
        (left.done,) = env.train([begun])
        trained: State = {"payload": left.done.payload.tree(), "client": left.done.state}
        memory: State = {**trained, "heard": {}, "train": train_records([left.done])}
    else:
        memory = checkpoint.load(folder.path, _MEMORY, newest=lambda head: head["round"])[0]
        memory["heard"][job.turn] = list(job.peer_messages)
    checkpoint.save(folder.path, _MEMORY, memory, round=job.round)
    left.train = memory["train"]
    turns = peer.turns(Payload.of(job.client, memory["payload"]), memory["client"], community.graph(job.round))
    for name in TURNS[: TURNS.index(job.turn) + 1]:
        heard[:] = [t.numpy().tobytes() for t in memory["heard"].get(name, [])]
        sent.clear()
        left.records, left.events = [], []
        next(turns, None)
    once = {id(data): data for _, data in sent}  # a message to several receivers becomes one tensor
    same = {key: as_tensor(data) for key, data in once.items()}
    left.peer_messages = [(receiver, same[id(data)]) for receiver, data in sent]
    left.state = peer.state if job.turn == TURNS[-1] else None
    return left


def counted(counts: ByteCount) -> list[list[Any]]:
    """Return byte counts as plain values."""
    return [[role, task or "", count] for (role, task), count in counts.items()]


def as_counts(values: Any) -> ByteCount:
    """Invert `counted`. Raises ValueError for anything else."""
    each = (_COUNT.read(value, Sender()) for value in values)
    return {(role, task or None): count for role, task, count in each}


def stub(marker: Mapping[str, Any]) -> State:
    """Return the server's stand-in for a peer's state."""
    nothing: State = {"model": None, "personal": {}, "buffers": None, "integers": {}, "tasks": {}}
    return {"server": nothing, "client": dict(marker)}


def refuse(recipe: Recipe) -> None:
    """Raise RecipeError for what nodes cannot do, and for what only simulated peers can do."""
    if recipe.training.stacked:
        raise RecipeError("training.stacked: each node trains one client, so clients cannot be stacked")
    if (peers := recipe.peers) is None:
        return
    if recipe.runtime.flower.enough is not None:
        raise RecipeError(
            "runtime.flower.enough: only for runs with a server, because peers wait for each other's messages"
        )
    for key, expected in {"mode": "synchronous", "scenario": None, "deadline": None}.items():
        if (value := getattr(peers, key)) != expected:
            raise RecipeError(
                f"peers.{key}: {value!r} is for simulated time, but with runtime.engine: flower time is real: "
                "set runtime.flower.deadline, the longest wait for an answer, instead"
            )
