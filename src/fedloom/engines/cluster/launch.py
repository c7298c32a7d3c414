"""The processes of a cluster: how they are started and watched on this machine, and each one from start to end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from fedloom.core.context import State
from fedloom.core.errors import RecipeError, UserError
from fedloom.core.settings.trust import ALLOW, allowed
from fedloom.data.partition import Partition
from fedloom.engines import cluster
from fedloom.engines.api import Engine
from fedloom.engines.cluster.comm import Comm
from fedloom.engines.cluster.member import Member, SharedFolder, meet
from fedloom.engines.cluster.sharing import Sharing
from fedloom.engines.peers.rounds import initial_peers, without_server
from fedloom.engines.peers.transport import Lost, Network, as_tensor
from fedloom.engines.pool import executor
from fedloom.engines.processes import SAFE_PATH
from fedloom.federation.recipes.loader import load
from fedloom.federation.recipes.schema import Recipe
from fedloom.federation.rounds.build import build
from fedloom.federation.rounds.built import Built
from fedloom.federation.rounds.measure import headline
from fedloom.federation.rounds.progress import Progress
from fedloom.federation.rounds.round import Round
from fedloom.federation.rounds.rounds import form_of, run_rounds, status
from fedloom.federation.rounds.showing import keep
from fedloom.federation.rounds.worker import Executor, Job, check_device, set_torch
from fedloom.federation.runs.folder import MIRROR_FAILED, RunFolder
from fedloom.federation.runs.reader import described
from fedloom.federation.runs.recorded import read_info, unpacked
from fedloom.federation.runs.track import Tracking

ERROR_FILE = "FEDLOOM_ERROR_FILE"
LOG = "cluster.log"
_RESTARTS = 3
_TAIL = 30


class Cluster(Engine):
    """One process per rank, started by torchrun; without torchrun this engine starts `runtime.workers` of them."""

    def takes_over(self, recipe: Recipe, folder: Path, progress: Progress, fresh: bool) -> str | None:
        for section in recipe.named:
            if section.is_held:
                raise RecipeError(
                    f"runtime.engine: the processes of a cluster cannot receive a {section.section} that is a Python "
                    "object. Name it in the recipe as package.module:name, or use runtime.engine=process"
                )
        if recipe.peers is not None and recipe.peers.mode == "asynchronous":
            raise RecipeError("peers.mode: asynchronous peers need runtime.engine=process")
        if cluster.rank() is not None:
            return join(folder, recipe if fresh else None, progress)
        built = build(recipe, None if fresh else RunFolder.read(folder)[1])
        (RunFolder.create(folder, built.recipe, built.dealt, built.about) if fresh else RunFolder(folder)).close()
        _Watched(built, folder, progress).run()
        return str(read_info(folder)["status"])


class _Watched:
    """The run of torchrun on this machine; the lines of metrics.jsonl show its progress."""

    def __init__(self, built: Built, folder: Path, progress: Progress) -> None:
        self.built, self.folder, self.progress = built, folder, progress
        self.done, self.offset = -1, 0

    def run(self) -> None:
        """Start, watch, and end. Raises UserError if a process reports a mistake, or if all of them are lost."""
        runtime = self.built.recipe.runtime
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(runtime.processes), "--max-restarts", str(_RESTARTS)),
            *("-m", "fedloom.engines.cluster", str(self.folder.resolve())),
        ]
        self._read(silent=True)
        self.progress.start(self.built.recipe.training.rounds, max(self.done, 0))
        with tempfile.TemporaryDirectory(prefix="fedloom-") as scratch, (self.folder / LOG).open("a") as log:
            errors = Path(scratch) / "error.txt"
            environment = {
                **os.environ,
                "OMP_NUM_THREADS": str(runtime.threads),
                # a rank finds what this process finds, such as modules beside the script that runs here
                "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
                SAFE_PATH: "1",  # python -m looks into the current folder first
                ERROR_FILE: str(errors),
                ALLOW: ",".join(filter(None, (os.environ.get(ALLOW), *allowed()))),
            }
            process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
            try:
                while process.poll() is None:
                    time.sleep(0.1)
                    self._read()
                self._read()
            finally:
                if process.poll() is None:
                    process.terminate()
                    process.wait()
                self.progress.stop()
            if errors.is_file():
                raise UserError(errors.read_text(encoding="utf-8"))
            if process.returncode:
                tail = "\n".join((self.folder / LOG).read_text(errors="replace").splitlines()[-_TAIL:])
                raise UserError(
                    f"the processes of the cluster failed (exit code {process.returncode}, after up to {_RESTARTS} "
                    "restarts). The state saved last is there for `fedloom resume`. The end of "
                    f"{self.folder / LOG}:\n{tail}"
                )

    def _read(self, silent: bool = False) -> None:
        """Report the rounds written since the last look, but no round twice."""
        path = self.folder / "metrics.jsonl"
        size = path.stat().st_size if path.exists() else 0
        if size < self.offset:  # lines after the last checkpoint were cut
            self.offset = 0
        if size == self.offset:
            return
        with path.open("rb") as file:
            file.seek(self.offset)
            for text in file:
                if not text.endswith(b"\n"):
                    break
                self.offset += len(text)
                line = unpacked(json.loads(text))
                if line["round"] <= self.done:
                    continue
                self.done = line["round"]
                if silent or not self.done:
                    continue
                for event in line["events"]:
                    about = described({k: v for k, v in event.items() if k != "event"})
                    say = self.progress.warn if event["event"] == MIRROR_FAILED else self.progress.event
                    say(f"round {self.done}: {event['event']}{about}")
                self.progress.round(self.done, headline(self.built, line))


class Spanning(Network):
    """A network that also reaches the peers of other processes, once per process, at the end of a phase."""

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
        mine = super().scattered(state)
        return {**mine, "peers": {**initial_peers(self.built)["peers"], **mine["peers"]}}

    def _part(self, state: State, rank: int) -> State:
        return {**state, "peers": {name: own for name, own in state["peers"].items() if self.owner[name] == rank}}

    def gathered(self, state: State) -> State:
        return {**state, "peers": self._together(state["peers"])}


class _Agreed(Executor):
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


def join(path: Path, recipe: Recipe | None = None, progress: Progress | None = None) -> str:
    """Take part in a run as one of the processes that torchrun started; returns how it ended."""
    comm = Comm.join()
    try:
        return take_part(comm, path, recipe, progress)
    finally:
        comm.leave()


def take_part(comm: Comm, path: Path, recipe: Recipe | None = None, progress: Progress | None = None) -> str:
    """Take part in a new run of `recipe`, or in the one in rank 0's folder; return how it ended. Errors are shared."""
    first = comm.rank == 0
    progress = progress if progress is not None and first else Progress()
    again = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0  # after a failure
    fresh = recipe is not None and not (again and (path / "recipe.yaml").is_file())
    with comm.together():
        saved = RunFolder.read(path) if first and not fresh else None
    recipe, partition = saved or (recipe, None)
    plain = None if recipe is None else recipe.model_dump(mode="json")
    plain, dealt = comm.from_first([(plain, None if partition is None else partition.to_json())] * comm.size)
    recipe, partition = load(plain), None if dealt is None else Partition.from_json(dealt)
    set_torch(recipe.runtime, recipe.training)
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
        "graph": None if built.recipe.peers is None else built.graph_hash,
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
    initial = partial(Engine().initial, built)
    if fresh:
        state = initial()
    else:
        state = folder.continued(built.about, initial, progress.event, form=form_of(built, initial()))
    folder.tracker = Tracking(built.about["recipe"], path, progress.event)
    return folder, state
