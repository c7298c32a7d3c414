"""Peers at nodes: the server carries their letters, as bytes, and aggregates nothing.

A round has four turns: train and tell, choose and ask, answer, mix. A node may be a new process at each turn, so what
it trained and heard is in its folder, and a turn begins by doing again what the turns before it did with that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fedloom.codecs import ByteCount
from fedloom.core.context import State
from fedloom.engines.peers.peer import Peer
from fedloom.engines.peers.rounds import community_of
from fedloom.engines.peers.transport import Mailbox
from fedloom.errors import RecipeError
from fedloom.recipes.schema import Recipe
from fedloom.rounds.built import Built
from fedloom.rounds.measure import train_records
from fedloom.rounds.messages import Payload
from fedloom.rounds.worker import Job, TrainDone, Worker
from fedloom.runs import checkpoint
from fedloom.runs.folder import RunFolder
from fedloom.runs.ledger import Ledger

TURNS = ("train", "choose", "answer", "mix")
_MEMORY = "turns"


@dataclass
class Line:
    """A peer's end of the relay: a Transport."""

    heard: list[bytes] = field(default_factory=list)
    said: list[tuple[str, bytes]] = field(default_factory=list)

    def send(self, receiver: str, data: bytes) -> None:
        """Give a letter to the relay."""
        self.said.append((receiver, data))

    def receive(self) -> list[bytes]:
        """What the relay brought."""
        heard, self.heard = self.heard, []
        return heard


@dataclass
class Turn:
    """What one turn of one peer left."""

    letters: list[tuple[str, Tensor]] = field(default_factory=list)
    """Receiver and bytes (uint8); a letter to several is one tensor."""
    records: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    ledger: Ledger = field(default_factory=Ledger)
    done: TrainDone | None = None
    state: State | None = None
    """The peer's state after the round, where this was the last turn."""
    train: list[dict[str, Any]] = field(default_factory=list)


def take_turn(
    built: Built,
    worker: Worker,
    folder: RunFolder,
    me: str,
    names: Sequence[str],
    round: int,
    before: State,
    turn: str,
    letters: Sequence[Tensor],
    evaluate_trained: bool = False,
) -> Turn:
    """One turn of peer `me` in a round that it begins in the state `before`; `names` are all peers of the run."""
    left, line = Turn(), Line()
    community = community_of(built)
    community.names = tuple(names)

    def log(event: str, fields: dict[str, Any]) -> None:
        left.events.append((event, fields))

    def record(kind: str, fields: dict[str, Any] | Callable[[], dict[str, Any]]) -> None:
        if not callable(fields):
            left.records.append((kind, fields))
        elif turn == TURNS[-1] and built.recipe.runtime.diagnostics:
            left.records.append((kind, fields()))

    def evaluate(jobs: Sequence[Job]) -> list[Any]:
        return [worker.run(job) for job in jobs]

    peer = Peer(me, community, Mailbox(me, built.layout.hash, line, log), before)
    job = peer.begin(round, left.ledger, log, record)
    if turn == TURNS[0]:
        left.done = worker.train(job, evaluate_trained)
        payload, client = left.done.payload, left.done.state
        left.train = train_records([left.done])
        memory: State = {"payload": payload.tree(), "client": client, "heard": {}}
        memory["train"] = left.train
    else:
        memory = checkpoint.load(folder.path, _MEMORY, newest=lambda head: head["round"])[0]
        memory["heard"][turn] = list(letters)
        payload = Payload.of(me, memory["payload"])
        client, left.train = memory["client"], memory["train"]
    checkpoint.save(folder.path, _MEMORY, memory, round=round)
    peer.trained(payload, client)
    peer.publish(community.graph(round), community.features)
    acts: dict[str, Callable[[], None]] = {
        "choose": lambda: peer.choose(evaluate),
        "answer": peer.answer,
        "mix": peer.mix,
    }
    for name in TURNS[1 : TURNS.index(turn) + 1]:
        line.heard = [t.numpy().tobytes() for t in memory["heard"].get(name, [])]
        line.said, left.records, left.events = [], [], []
        acts[name]()
    same: dict[int, Tensor] = {}
    for receiver, data in line.said:
        if id(data) not in same:
            same[id(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        left.letters.append((receiver, same[id(data)]))
    left.state = peer.state if turn == TURNS[-1] else None
    return left


def counted(counts: ByteCount) -> list[list[Any]]:
    """Byte counts as plain values."""
    return [[role, task, count] for (role, task), count in counts.items()]


def as_counts(values: Any) -> ByteCount:
    """Inverse of `counted`. Raises ValueError for anything else."""
    counts: ByteCount = {}
    for role, task, count in values:
        if not isinstance(role, str) or not isinstance(task, str | None) or not isinstance(count, int) or count < 0:
            raise ValueError("byte counts: expected role, task and a number")
        counts[role, task] = count
    return counts


def stub(marker: Mapping[str, Any]) -> State:
    """What the server has instead of a peer's state."""
    nothing: State = {"model": None, "personal": {}, "buffers": None, "integers": {}, "tasks": {}}
    return {"server": nothing, "client": dict(marker)}


def refuse(recipe: Recipe) -> None:
    """Raise RecipeError for what only simulated peers can do."""
    if recipe.peers is None:
        return
    for key, found, expected in (
        ("mode", recipe.peers.mode, "synchronous"),
        ("scenario", recipe.peers.scenario, None),
        ("deadline", recipe.peers.deadline, None),
    ):
        if found != expected:
            raise RecipeError(
                f"peers.{key}: {found!r} is about simulated time, but with runtime.engine flower time is real; "
                "runtime.flower.deadline limits how long answers are waited for"
            )
