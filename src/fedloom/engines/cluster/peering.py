"""Peers in many processes: those of one process hear each other in memory, those of others over the network."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fedloom.core.context import State
from fedloom.engines.cluster.comm import Comm
from fedloom.engines.cluster.member import Member, meet
from fedloom.engines.peers.rounds import initial_peers, without_server
from fedloom.engines.peers.transport import Lost, Network, as_tensor
from fedloom.federation.rounds.built import Built
from fedloom.federation.rounds.round import Round
from fedloom.federation.rounds.worker import Executor, Job


class Spanning(Network):
    """A network that also reaches the peers of other processes: their messages travel at the end of a phase.

    A message to several peers of another process travels there once.
    """

    def __init__(self, comm: Comm, owner: Mapping[str, int], lost: Lost = None) -> None:
        super().__init__(lost)
        self.comm, self.owner = comm, owner
        self._out: dict[int, dict[tuple[str, int], tuple[bytes, list[str]]]] = {}

    def here(self, name: str) -> bool:
        """Return whether a peer is in this process."""
        return self.owner[name] == self.comm.rank

    def known(self, values: Mapping[str, float]) -> Mapping[str, float]:
        """Return one number per peer of the run, from those of the peers in this process."""
        return {name: value for part in self.comm.all(dict(values)) for name, value in part.items()}

    def put(self, sender: str, receiver: str, data: bytes) -> None:
        """Put a message into the receiver's queue, or keep it for the receiver's process."""
        if self.here(receiver):
            super().put(sender, receiver, data)
        else:
            messages = self._out.setdefault(self.owner[receiver], {})
            messages.setdefault((sender, id(data)), (data, []))[1].append(receiver)

    def carry(self, sent: list[tuple[str, str, int]]) -> list[tuple[str, str, int]]:
        """Bring messages to other processes. Returns (sender, receiver, bytes) of the messages of all processes."""
        out: dict[int, Any] = {q: {"sent": sent, "messages": []} for q in range(self.comm.size)}
        for rank, messages in self._out.items():
            about = [[sender, receivers, as_tensor(data)] for (sender, _), (data, receivers) in messages.items()]
            out[rank] = {"sent": sent, "messages": about}
        self._out = {}
        heads = self.comm.swap(out)
        for rank in range(self.comm.size):
            for sender, receivers, message in heads[rank]["messages"]:
                data = message.numpy().tobytes()
                for receiver in receivers:
                    super().put(sender, receiver, data)
        every = [(sender, to, n) for rank in range(self.comm.size) for sender, to, n in heads[rank]["sent"]]
        return sorted(every, key=lambda entry: entry[0])


class Peering(Member):
    """The part of one process in a run of peers, each of which stays where it is."""

    def __init__(self, built: Built, comm: Comm, executor: Executor) -> None:
        super().__init__(built, comm, executor)
        self._advance = without_server(built, lambda lost: Spanning(comm, self.owner, lost))

    def advance(self, built: Built, executor: Executor, state: State, now: Round) -> tuple[State, Sequence[str]]:
        """Do a round of peers (see `fedloom.federation.rounds.rounds.run_rounds`)."""
        state, members = self._advance(built, _Agreed(self.comm, self.executor), state, now)
        meet(self.comm, now)
        return state, members

    def scattered(self, state: State | None) -> State:
        """Return this process's part of a whole state, which rank 0 has; other peers have their first state here."""
        comm = self.comm
        views = []
        if state is not None:
            for rank in range(comm.size):
                mine = {name: own for name, own in state["peers"].items() if self.owner[name] == rank}
                views.append({**state, "peers": mine})
        own: State = comm.from_first(views)
        return {**own, "peers": {**initial_peers(self.built)["peers"], **own["peers"]}}

    def gathered(self, state: State) -> State:
        """Return the whole state at rank 0, as one process would have it; elsewhere nothing of use."""
        return {**state, "peers": self._together(state["peers"])}


class _Agreed:
    """The executor of a process. If training fails in one process, all of them raise the error."""

    def __init__(self, comm: Comm, executor: Executor) -> None:
        self.comm, self.executor = comm, executor

    def run(self, jobs: Sequence[Job], **options: Any) -> Iterator[Any]:
        """Yield results as they arrive. Only training is waited for by others."""
        if "evaluate_trained" not in options:
            yield from self.executor.run(jobs, **options)
            return
        with self.comm.together():
            yield from self.executor.run(jobs, **options)

    def close(self) -> None:
        """Do nothing: it owns nothing."""
