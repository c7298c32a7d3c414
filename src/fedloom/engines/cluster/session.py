"""One process of a cluster from its start to its end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from fedloom.core.context import State
from fedloom.core.errors import UserError
from fedloom.data.partition import Partition
from fedloom.engines import cluster
from fedloom.engines.cluster.comm import Comm
from fedloom.engines.cluster.member import Member, SharedFolder, meet
from fedloom.engines.cluster.sharing import Sharing
from fedloom.engines.engine import Engine
from fedloom.engines.peers.rounds import initial_peers, without_server
from fedloom.engines.peers.transport import Lost, Network, as_tensor
from fedloom.engines.pool import executor
from fedloom.federation.recipes.loader import load
from fedloom.federation.recipes.schema import Recipe
from fedloom.federation.rounds.build import build
from fedloom.federation.rounds.built import Built
from fedloom.federation.rounds.progress import Progress
from fedloom.federation.rounds.round import Round
from fedloom.federation.rounds.rounds import run_rounds, status
from fedloom.federation.rounds.showing import keep
from fedloom.federation.rounds.worker import Executor, Job, check_device, set_torch
from fedloom.federation.runs.folder import RunFolder
from fedloom.federation.runs.track import Tracking


class Spanning(Network):
    """A network that also reaches the peers of other processes: their messages travel at the end of a phase.

    A message to several peers of another process travels there once.
    """

    def __init__(self, comm: Comm, owner: Mapping[str, int], lost: Lost = None) -> None:
        super().__init__(lost)
        self.comm, self.owner = comm, owner
        self._out: dict[int, dict[tuple[str, int], tuple[bytes, list[str]]]] = {}

    def here(self, name: str) -> bool:
        return self.owner[name] == self.comm.rank

    def known(self, values: Mapping[str, float]) -> Mapping[str, float]:
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


def join(path: Path, recipe: Recipe | None = None, progress: Progress | None = None) -> str:
    """Take part in a run as one of the processes that torchrun started; returns how it ended."""
    comm = Comm.join()
    try:
        return take_part(comm, path, recipe, progress)
    finally:
        comm.leave()


def take_part(comm: Comm, path: Path, recipe: Recipe | None = None, progress: Progress | None = None) -> str:
    """Take part in a new run of `recipe`, else in the one in the folder; returns finished, or stopped early.

    Only rank 0 needs the folder. Raises UserError in all processes if one of them meets a mistake.
    """
    first = comm.rank == 0
    progress = progress if progress is not None and first else Progress()
    fresh = recipe is not None and not (cluster.restarted() and (path / "recipe.yaml").is_file())
    with comm.together():
        saved = RunFolder.read(path) if first and not fresh else None
    recipe, partition = _known_to_all(comm, saved or (recipe, None))
    set_torch(recipe.runtime.threads, recipe.runtime.deterministic)
    device = comm.use(recipe.runtime.devices)
    with comm.together():
        check_device(device)
        built = build(recipe, partition)
    _compared(comm, built)
    member = membership(built)(built, comm, executor(built.setup, (device,), 1))
    with ExitStack() as stack:
        stack.callback(member.close)
        stack.callback(progress.stop)
        with comm.together():
            folder, state = _opened(path, built, fresh, progress, stack) if first else (None, None)
        mine = member.scattered(state)
        progress.start(recipe.training.rounds, mine["round"])

        def show(state: State) -> None:
            whole = member.gathered(state)
            if folder is not None:
                keep(folder.path, built, member.executor, whole, final=False)

        mine = run_rounds(built, member, SharedFolder(member, folder), mine, progress, member.advance, show)
        whole = member.gathered(mine)
        with comm.together():
            if folder is not None:
                Engine().conclude(built, member.executor, folder, whole)
        return status(mine)


def _known_to_all(comm: Comm, mine: tuple[Recipe | None, Partition | None]) -> tuple[Recipe, Partition | None]:
    """Return rank 0's recipe and partition, in every process."""
    recipe, partition = mine
    about = {
        "recipe": None if recipe is None else recipe.model_dump(mode="json"),
        "partition": None if partition is None else partition.to_json(),
    }
    about = comm.from_first([about] * comm.size)
    return load(about["recipe"]), None if about["partition"] is None else Partition.from_json(about["partition"])


def membership(built: Built) -> type[Member]:
    """Return how processes work together: they share the server's work if the recipe and the method allow it."""
    if built.recipe.peers is not None:
        return Peering
    method = built.method
    separable = method.stage.traits.separable and not method.turn.by_task and not method.codec.stays_packed
    return Sharing if separable and not built.recipe.runtime.exact else Member


def _compared(comm: Comm, built: Built) -> None:
    """Check that all processes have the same run. Raises UserError that names what differs, and where."""
    mine = {
        "model": built.layout.hash,
        "partition": built.partition.hash,
        "data": built.data_hash,
        "frozen weights": built.frozen_hash,
    }
    every = comm.all(mine)
    for rank, other in enumerate(every):
        for what, value in every[0].items():
            if other[what] != value:
                raise UserError(f"the {what} of rank {rank} differs from that of rank 0: {other[what]} and {value}")


def _opened(path: Path, built: Built, fresh: bool, progress: Progress, stack: ExitStack) -> tuple[RunFolder, State]:
    """Open the run folder, which rank 0 locks until the end. Returns it, and the state to continue from."""
    folder = stack.enter_context(
        RunFolder.create(path, built.recipe, built.dealt, built.about, progress.warn)
        if fresh
        else RunFolder(path, built.recipe.runtime.mirror, progress.warn)
    )

    def initial() -> State:
        return Engine().initial(built)

    state = initial() if fresh else folder.continued(built.about, initial, progress.event)
    folder.tracker = Tracking(built.about["recipe"], path, progress.event)
    return folder, state
