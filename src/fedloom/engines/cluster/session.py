"""One process of a cluster from its start to its end."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

import torch

from fedloom.core.context import State
from fedloom.core.errors import UserError
from fedloom.data.partition import Partition
from fedloom.engines.auto import executor
from fedloom.engines.cluster import torchrun
from fedloom.engines.cluster.comm import Comm
from fedloom.engines.cluster.member import Member, SharedFolder
from fedloom.engines.cluster.peering import Peering
from fedloom.engines.cluster.sharing import Sharing
from fedloom.engines.engine import Engine
from fedloom.federation.recipes.loader import load
from fedloom.federation.recipes.schema import Recipe
from fedloom.federation.rounds.build import build
from fedloom.federation.rounds.built import Built
from fedloom.federation.rounds.measure import complete, export
from fedloom.federation.rounds.progress import Progress
from fedloom.federation.rounds.rounds import run_rounds, status
from fedloom.federation.rounds.showing import keep
from fedloom.federation.rounds.worker import Executor, check_device
from fedloom.federation.runs.folder import RunFolder
from fedloom.federation.runs.track import tracker_of

T = TypeVar("T")


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
    fresh = recipe is not None and not (torchrun.restarted() and (path / "recipe.yaml").is_file())
    saved = agreed(comm, lambda: RunFolder.read(path) if first and not fresh else None)
    recipe, partition = _known_to_all(comm, saved or (recipe, None))
    torch.set_num_threads(recipe.runtime.threads)
    device = comm.use(recipe.runtime.devices)
    built = agreed(comm, lambda: _built(recipe, partition, device))
    _compared(comm, built)
    opened = agreed(comm, lambda: _opened(path, built, fresh, progress, stack) if first else None)
    folder, state = opened or (None, None)
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
        agreed(comm, lambda: _conclude(folder, built, whole, member.executor) if folder is not None else None)
        return status(mine)
    finally:
        progress.stop()
        member.close()


def agreed(comm: Comm, make: Callable[[], T]) -> T:
    """The result of `make`; a UserError in one process is raised in all of them."""
    value, error = None, None
    try:
        value = make()
    except UserError as problem:
        error = problem
    texts = [text for text in comm.all(None if error is None else str(error)) if text is not None]
    if error is not None:
        raise error
    if texts:
        raise UserError(texts[0])
    return value  # type: ignore[return-value]


def _known_to_all(comm: Comm, mine: tuple[Recipe | None, Partition | None]) -> tuple[Recipe, Partition | None]:
    """Rank 0's recipe and partition, in every process."""
    recipe, partition = mine
    about = {
        "recipe": None if recipe is None else recipe.model_dump(mode="json"),
        "partition": None if partition is None else partition.to_json(),
    }
    about = comm.from_first([about] * comm.size)
    return load(about["recipe"]), None if about["partition"] is None else Partition.from_json(about["partition"])


def _built(recipe: Recipe, partition: Partition | None, device: str) -> Built:
    check_device(device)
    return build(recipe, partition)


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
    folder.tracker = tracker_of(built.recipe, path, state["round"], progress.event)
    return folder, state


def _conclude(folder: RunFolder, built: Built, state: State, executor: Executor) -> None:
    """What is written once the last round is over."""
    final = folder.kept(state, built.recipe.early_stopping)
    complete(built, executor, folder, final)
    folder.save_model(*export(built, final))
    keep(folder.path, built, executor, final)
    folder.describe(built.about, status(state), state["round"], final["round"])
