"""One process of a cluster from its start to its end."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import torch

from fedloom.core.context import State
from fedloom.core.errors import UserError
from fedloom.data.partition import Partition
from fedloom.engines import cluster
from fedloom.engines.auto import executor
from fedloom.engines.cluster.comm import Comm
from fedloom.engines.cluster.member import Member, SharedFolder
from fedloom.engines.cluster.peering import Peering
from fedloom.engines.cluster.sharing import Sharing
from fedloom.engines.engine import Engine
from fedloom.federation.recipes.loader import load
from fedloom.federation.recipes.schema import Recipe
from fedloom.federation.rounds.build import build
from fedloom.federation.rounds.built import Built
from fedloom.federation.rounds.round import Progress
from fedloom.federation.rounds.rounds import run_rounds, status
from fedloom.federation.rounds.showing import keep
from fedloom.federation.rounds.worker import check_device
from fedloom.federation.runs.folder import RunFolder
from fedloom.federation.runs.track import Tracking


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
    with ExitStack() as stack:
        return _run(comm, path, recipe, progress, stack)


def _run(comm: Comm, path: Path, recipe: Recipe | None, progress: Progress | None, stack: ExitStack) -> str:
    first = comm.rank == 0
    progress = progress if progress is not None and first else Progress()
    fresh = recipe is not None and not (cluster.restarted() and (path / "recipe.yaml").is_file())
    with comm.together():
        saved = RunFolder.read(path) if first and not fresh else None
    recipe, partition = _known_to_all(comm, saved or (recipe, None))
    torch.set_num_threads(recipe.runtime.threads)
    device = comm.use(recipe.runtime.devices)
    with comm.together():
        check_device(device)
        built = build(recipe, partition)
    _compared(comm, built)
    with comm.together():
        folder, state = _opened(path, built, fresh, progress, stack) if first else (None, None)
    member = membership(built)(built, comm, executor(built.setup, (device,), 1))
    try:
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
    finally:
        progress.stop()
        member.close()


def _known_to_all(comm: Comm, mine: tuple[Recipe | None, Partition | None]) -> tuple[Recipe, Partition | None]:
    """Rank 0's recipe and partition, in every process."""
    recipe, partition = mine
    about = {
        "recipe": None if recipe is None else recipe.model_dump(mode="json"),
        "partition": None if partition is None else partition.to_json(),
    }
    about = comm.from_first([about] * comm.size)
    return load(about["recipe"]), None if about["partition"] is None else Partition.from_json(about["partition"])


def membership(built: Built) -> type[Member]:
    """How processes work together: they share the server's work if the recipe and the method allow it."""
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
    """The run folder, which rank 0 holds until the end, and the state to continue from."""
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
