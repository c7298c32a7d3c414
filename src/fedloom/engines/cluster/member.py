"""One process of a cluster: its clients, its part of a round, and what it sends to the others.

All processes run the same rounds with the same recipe. Each trains its own clients and holds their states and personal
models; all of them know the numbers that decide something (of a round, scores). Rank 0 owns the run folder.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from fedloom.core.codecs import ByteCount
from fedloom.core.context import State
from fedloom.engines.cluster.comm import Comm
from fedloom.federation.rounds.built import Built
from fedloom.federation.rounds.messages import ALL, Payload
from fedloom.federation.rounds.round import Round
from fedloom.federation.rounds.server import dispatch, server_step
from fedloom.federation.rounds.worker import EvalJob, Executor, Job, TrainDone, TrainJob
from fedloom.federation.runs.folder import RunFolder
from fedloom.training.loop import LocalResult

_WORTH_IT = 0.9  # clients move if the slowest process will need less than this share of its time


class Member(Executor):
    """The part of one process in a run with a server; also the executor of its evaluations."""

    def __init__(self, built: Built, comm: Comm, executor: Executor) -> None:
        self.built, self.comm, self.executor = built, comm, executor
        self.costs = Costs(built)
        self.owner = deal(self.costs.of(built.federation.clients), comm.size)
        self.broadcasts = bool(built.method.stage.traits.broadcasts)
        self.knows_all = comm.rank == 0 or self.broadcasts
        """True if this process has the personal models of all clients."""

    def run(self, jobs: Sequence[Job], **options: Any) -> Iterator[Any]:
        """Yield results of all evaluations, in every process; a personal model is measured in its process."""
        measured = [job for job in jobs if isinstance(job, EvalJob)]
        places = self._places(measured)
        mine = [job for job, rank in zip(measured, places, strict=True) if rank == self.comm.rank]
        with self.comm.together():
            measured_here = [[key, scores] for key, scores in self.executor.run(mine, **options)]
        for each in self.comm.all(measured_here):
            yield from map(tuple, each)

    def _places(self, jobs: Sequence[EvalJob]) -> list[int]:
        clients, load = self.built.federation.clients, [0.0] * self.comm.size
        cost = [float(len(clients[job.client].part(job.split)) * len(job.tasks)) for job in jobs]
        for job, c in zip(jobs, cost, strict=True):
            load[self.owner[job.client]] += c * job.personal
        shared = deal({i: c for i, c in enumerate(cost) if not jobs[i].personal}, self.comm.size, load)
        return [shared.get(i, self.owner[job.client]) for i, job in enumerate(jobs)]

    def close(self) -> None:
        self.executor.close()

    def advance(self, built: Built, executor: Executor, state: State, now: Round) -> tuple[State, Sequence[str]]:
        """Do a round of clients and a server (see `fedloom.federation.rounds.rounds.run_rounds`)."""
        members = now.cohort()
        state = self._balanced(state, members)
        mine = [m for m in members if self.owner[m] == self.comm.rank]
        with now.ledger.phase("dispatch"):
            messages = dispatch(built, state["server"], mine)
            jobs = [TrainJob(m, now.number, messages[m], state["clients"].get(m, {})) for m in mine]
        with now.ledger.phase("train and aggregate"):
            server = self._step(state["server"], self._trained(now, jobs), now, members)
        return now.after(state, server), members

    def _trained(self, now: Round, jobs: list[TrainJob]) -> Iterator[Payload]:
        """Yield payloads of this process's clients; after the last one all processes know all results of training."""
        with self.comm.together():
            yield from now.payloads(self.executor, jobs)
        meet(self.comm, now)
        self.costs.seconds |= {d.client: d.seconds for d in now.done}

    def _step(self, server: State, payloads: Iterator[Payload], now: Round, members: Sequence[str]) -> State:
        """Send all payloads to rank 0, which does the server's step and sends its state to the others."""
        built, comm = self.built, self.comm
        if comm.rank:
            for payload in list(payloads):
                comm.send(0, [payload.row[0], payload.tree()])
            return comm.receive(0)
        ranks = sorted(rank for m in members if (rank := self.owner[m]))
        received = chain(payloads, (Payload.of(*comm.receive(rank)) for rank in ranks))
        new = server_step(built, now.conspired(received), server, now.ctx(members))
        for rank in range(1, comm.size):
            comm.send(rank, self._view(new, rank))
        return new

    def _view(self, server: State, rank: int) -> State:
        """Return the part of a server's state that a process needs for its clients and their broadcasts."""
        if rank == 0:
            return server
        mine = {c for c, owner in self.owner.items() if owner == rank}
        names = {ALL, *mine}
        ahead = self.built.method.server.looks_ahead
        return {
            **server,
            "personal": {c: x for c, x in server["personal"].items() if self.broadcasts or c in mine},
            "rule": {c: memory if ahead else {} for c, memory in server["rule"].items() if c in names},
            "stage": server["stage"] if self.broadcasts else {},
        }

    def _balanced(self, state: State, members: Sequence[str]) -> State:
        """Move clients, with their states, to other processes if the round will then end sooner."""
        comm = self.comm
        cost = self.costs.of(members)
        before = {m: self.owner[m] for m in members}
        after = deal(cost, comm.size)
        if longest(cost, after) >= _WORTH_IT * longest(cost, before):
            return state
        moved = {m: rank for m, rank in after.items() if rank != before[m]}
        self.owner |= moved
        server = state["server"]
        own = {"clients": dict(state["clients"]), "personal": dict(server["personal"]), "rule": dict(server["rule"])}
        out: dict[int, dict[str, State]] = {q: {} for q in comm.others}
        for m, rank in moved.items():
            if before[m] == comm.rank:
                out[rank][m] = {kind: states[m] for kind, states in own.items() if m in states}
                for kind, states in own.items():
                    if kind == "clients" or not self.knows_all:
                        states.pop(m, None)
        for tree in comm.swap(out).values():
            for m, arrived in tree.items():
                for kind, each in arrived.items():
                    own[kind][m] = each
        server = {**server, "personal": own["personal"], "rule": own["rule"]}
        return {**state, "clients": own["clients"], "server": server}

    def scattered(self, state: State | None) -> State:
        """Return this process's part of a whole state, which rank 0 has."""
        parts = [] if state is None else [self._part(state, rank) for rank in range(self.comm.size)]
        return self.comm.from_first(parts)

    def _part(self, state: State, rank: int) -> State:
        clients = {c: x for c, x in state["clients"].items() if self.owner[c] == rank}
        return {**state, "clients": clients, "server": self._view(state["server"], rank)}

    def gathered(self, state: State) -> State:
        """Return the whole state at rank 0, as one process would have it; elsewhere nothing of use."""
        return {**state, "clients": self._together(state["clients"])}

    def _together(self, states: State) -> State:
        """Return all processes' states of their clients at rank 0, in the order of the clients."""
        mine = {c: x for c, x in states.items() if self.owner.get(c, 0) == self.comm.rank}
        every = {c: x for part in self.comm.to_first(mine) for c, x in part.items()}
        return {c: every[c] for c in (ALL, *self.built.federation.clients) if c in every}


class Costs:
    """The cost of each client's round: guessed from examples and tasks until it is measured."""

    def __init__(self, built: Built) -> None:
        epochs = built.recipe.training.steps is None
        batch = built.recipe.training.batch_size
        self.guess = {
            c.id: float((len(c.train) if epochs else min(len(c.train), batch)) * len(c.tasks))
            for c in built.federation.clients.values()
        }
        self.seconds: dict[str, float] = {}
        """Measured seconds of clients, which all processes must know."""

    def of(self, clients: Sequence[str] | Mapping[str, Any]) -> dict[str, float]:
        """Return seconds, or shares of an unknown unit before anything was measured."""
        known = sum(self.guess[c] for c in self.seconds)
        unit = sum(self.seconds.values()) / known if known else 1.0
        return {c: self.seconds.get(c, unit * self.guess[c]) for c in clients}


def deal(cost: Mapping[Any, float], size: int, load: Sequence[float] = ()) -> dict[Any, int]:
    """Assign clients or jobs to ranks, which have a `load` already: the most costly first, each to the rank with the
    least work (the lowest of equals)."""
    work, owner = [*load] or [0.0] * size, {}
    for one in sorted(cost, key=lambda c: (-cost[c], c)):
        owner[one] = work.index(min(work))
        work[owner[one]] += cost[one]
    return owner


def longest(cost: Mapping[str, float], owner: Mapping[str, int]) -> float:
    """Return the cost of the process with the most work."""
    load = dict.fromkeys(owner.values(), 0.0)
    for client, rank in owner.items():
        load[rank] += cost[client]
    return max(load.values(), default=0.0)


def meet(comm: Comm, now: Round) -> None:
    """Exchange how a round went: all processes learn its losses, bytes, events, records and seconds."""
    head = {
        "done": [{**vars(d), "payload": d.payload.n, "result": _result_tree(d.result), "state": {}} for d in now.done],
        "up": _bytes_tree(now.ledger.up),
        "down": _bytes_tree(now.ledger.down),
        "seconds": now.ledger.seconds,
        "events": now.events,
        "records": now.records,
    }
    heads = comm.all(head)
    clients = now.built.federation.clients
    done = [_done_of(d) for head in heads for d in head["done"]]
    # in the order of one process: the longest first
    now.done[:] = sorted(done, key=lambda d: (-len(clients[d.client].train), d.client))
    place = {d.client: i for i, d in enumerate(now.done)}
    events = [event for head in heads for event in head["events"]]
    now.events[:] = sorted(events, key=lambda e: -1 if "peer" in e else place.get(e.get("client", ""), -1))
    # records of peers come from their processes, sorted; all others are equal in all processes
    of_peers = [record for head in heads for record in head["records"] if "peer" in record]
    others = [record for record in now.records if "peer" not in record]
    now.records[:] = [*sorted(of_peers, key=lambda r: str(r["peer"])), *others]
    for rank, head in enumerate(heads):
        if rank != comm.rank:
            for direction, counts in ((now.ledger.up, head["up"]), (now.ledger.down, head["down"])):
                for client, entries in counts:
                    direction[client] = {(role, task): count for role, task, count in entries}
            for name, seconds in head["seconds"].items():
                if name.endswith("sum over clients"):
                    now.ledger.add(name, seconds)


def _bytes_tree(counts: Mapping[str, ByteCount]) -> list[Any]:
    return [[client, [[*key, count] for key, count in each.items()]] for client, each in counts.items()]


def _result_tree(result: LocalResult) -> dict[str, Any]:
    parts = {task: _result_tree(part) for task, part in result.by_task.items()}
    return {**vars(result), "optimizer": {}, "rules": {}, "extra": {}, "by_task": parts}


def _result_of(tree: Mapping[str, Any]) -> LocalResult:
    return LocalResult(**{**tree, "by_task": {task: _result_of(part) for task, part in tree["by_task"].items()}})


def _done_of(tree: Mapping[str, Any]) -> TrainDone:
    payload = Payload((tree["client"], None), tree["payload"])
    return TrainDone(**{**tree, "payload": payload, "result": _result_of(tree["result"])})


class SharedFolder(RunFolder):
    """The run folder as all processes see it: rank 0 writes, and a state that is saved is gathered first."""

    def __init__(self, member: Member, folder: RunFolder | None) -> None:
        self.member, self.folder = member, folder

    def write_round(self, line: Mapping[str, Any], sent: Mapping[str, Any]) -> None:
        """Append one round, at rank 0."""
        if self.folder is not None:
            self.folder.write_round(line, sent)

    def save(self, state: State, name: str = "state") -> None:
        """Gather the state and save it, at rank 0."""
        whole = self.member.gathered(state)
        if self.folder is not None:
            self.folder.save(whole, name)

    def agreed(self, decision: bool) -> bool:
        """Return what rank 0 has decided."""
        return self.member.comm.from_first([decision] * self.member.comm.size)
