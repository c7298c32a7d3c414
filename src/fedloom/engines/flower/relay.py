"""Peers at nodes: the server carries their peer messages, as bytes, and aggregates nothing.

A round has four turns: train and tell, choose and ask, answer, mix. A node may be a new process at each turn, so what
it trained and heard is in its folder, and a turn begins by doing again what the turns before it did with that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
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
from fedloom.federation.recipes.schema import PeersSection
from fedloom.federation.rounds.built import Built
from fedloom.federation.rounds.measure import train_records
from fedloom.federation.rounds.messages import Ledger, Payload
from fedloom.federation.rounds.worker import Job, TrainDone, TrainJob, Worker
from fedloom.federation.runs import checkpoint
from fedloom.federation.runs.folder import RunFolder

TURNS = ("train", "choose", "answer", "mix")
_MEMORY = "turns"
_COUNT = Each((Text(), Text(), Number(0, 1 << 53, whole=True)))
"""Role, task ("" for none), bytes."""


@dataclass
class RelayEnd:
    """A peer's end of the relay: a Transport."""

    heard: list[bytes] = field(default_factory=list)
    said: list[tuple[str, bytes]] = field(default_factory=list)

    def send(self, receiver: str, data: bytes) -> None:
        """Give a peer message to the relay."""
        self.said.append((receiver, data))

    def receive(self) -> list[bytes]:
        """What the relay brought."""
        heard, self.heard = self.heard, []
        return heard


@dataclass(frozen=True, eq=False)
class TurnJob:
    """One turn of a peer in a round; `names` are all peers of the run, `peer_messages` (uint8) those sent to it."""

    client: str
    round: int
    turn: str
    names: Sequence[str]
    peer_messages: Sequence[Tensor]
    evaluate_trained: bool = False


@dataclass
class TurnDone:
    """What one turn of one peer left."""

    peer_messages: list[tuple[str, Tensor]] = field(default_factory=list)
    """Receiver and bytes (uint8); a peer message to several is one tensor."""
    records: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    ledger: Ledger = field(default_factory=Ledger)
    done: TrainDone | None = None
    state: State | None = None
    """The peer's state after the round, where this was the last turn."""
    train: list[dict[str, Any]] = field(default_factory=list)


def take_turn(built: Built, worker: Worker, folder: RunFolder, before: State, job: TurnJob) -> TurnDone:
    """One turn of a peer in a round that it begins in the state `before`."""
    left, end, community = TurnDone(), RelayEnd(), community_of(built, names=job.names)

    def log(event: str, fields: dict[str, Any]) -> None:
        left.events.append((event, fields))

    def record(kind: str, fields: dict[str, Any] | Callable[[], dict[str, Any]]) -> None:
        if not callable(fields):
            left.records.append((kind, fields))
        elif job.turn == TURNS[-1] and built.recipe.runtime.diagnostics:
            left.records.append((kind, fields()))

    def train(jobs: Iterable[TrainJob]) -> list[TrainDone]:
        return [worker.train(each, job.evaluate_trained) for each in jobs]

    def run(jobs: Iterable[Job]) -> list[Any]:
        return [worker.run(each) for each in jobs]

    env = Environment(train, run, left.ledger, log, record)
    peer = Peer(community.context.at(job.client), Mailbox(job.client, built.layout.hash, end, log), before, env)
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
        end.heard = [t.numpy().tobytes() for t in memory["heard"].get(name, [])]
        end.said, left.records, left.events = [], [], []
        next(turns, None)
    same: dict[int, Tensor] = {}
    for receiver, data in end.said:
        if id(data) not in same:
            same[id(data)] = as_tensor(data)
        left.peer_messages.append((receiver, same[id(data)]))
    left.state = peer.state if job.turn == TURNS[-1] else None
    return left


def counted(counts: ByteCount) -> list[list[Any]]:
    """Byte counts as plain values."""
    return [[role, task or "", count] for (role, task), count in counts.items()]


def as_counts(values: Any) -> ByteCount:
    """Inverse of `counted`. Raises ValueError for anything else."""
    counts: ByteCount = {}
    for each in values:
        role, task, count = _COUNT.read(each, Sender())
        counts[role, task or None] = count
    return counts


def stub(marker: Mapping[str, Any]) -> State:
    """What the server has instead of a peer's state."""
    nothing: State = {"model": None, "personal": {}, "buffers": None, "integers": {}, "tasks": {}}
    return {"server": nothing, "client": dict(marker)}


def refuse(peers: PeersSection | None) -> None:
    """Raise RecipeError for what only simulated peers can do."""
    if peers is None:
        return
    for key, found, expected in (
        ("mode", peers.mode, "synchronous"),
        ("scenario", peers.scenario, None),
        ("deadline", peers.deadline, None),
    ):
        if found != expected:
            raise RecipeError(
                f"peers.{key}: {found!r} is about simulated time, but with runtime.engine flower time is real; "
                "runtime.flower.deadline limits how long answers are waited for"
            )
