"""Run the cells of a grid: several at once, each in a process of its own, within a memory budget.

The parent stays free of torch: it schedules, and children build. They end with the parent, however it ends.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar

from fedloom.core.errors import InUseError, RecipeError, StateError, UserError, at, check_links
from fedloom.core.grouping import grouped
from fedloom.core.machine import LOCK, available_memory, cores, locked
from fedloom.engines import processes
from fedloom.engines.processes import end as _end
from fedloom.federation.recipes.schema import Recipe, recipe_hash
from fedloom.federation.rounds.progress import Drawn, Printed, Progress, Silent, suited
from fedloom.federation.runs.reader import Run, clock
from fedloom.federation.runs.recorded import began, changed, read_info
from fedloom.study.grid import Cell, Grid, load_grid, recipes, refused_in, same_family, save, select, state_of
from fedloom.study.results import check_shown

# What a cell needs, in bytes: the largest resident size of a process that ran a cell, which outcome.peak tells. With
# torch 2.13 for CPU and one thread, importing everything took 234 MB; digits took 376 MB (425 MB by this formula),
# feddea/scenes 488 MB (575 MB), feddea/nyud-mini 669 MB (665 MB), and Swin-T (28 million parameters) on scenes 2.9 GB
# (3.2 GB), where the plan said 1.9 GB. Activations in training are the plan's; in evaluation they are by the byte of
# input, 20 with tiny-pyramid. All this is a first guess: a cell that runs reports its
# real peak, and the ones still to come are judged by that.
PROCESS = 400_000_000
PLANNED = 1.4
AGAIN = 1.0
"""Seconds after which a cell that another process is at work on is asked for again."""

BENCHMARK = "benchmark"
"""The label of the only data set in the grids of a study of one recipe."""

Result = TypeVar("Result")
_LEFT_BY_A_TORN_START = {LOCK, "partition.json", "run.json", "partition.json.part", "run.json.part"}


class Watch(Silent):
    """The observer of a grid: it counts cells and rounds, tells the time left, and prints warnings alone."""

    def start(self, cells: int, rounds: int) -> None:
        """Begin."""
        self.cells, self.rounds, self.over, self.done, self.skipped = cells, rounds, 0, 0, 0
        self.running: dict[Cell, int] = {}
        self.began_at = time.monotonic()
        self.show()

    def show(self) -> None:
        """Show the state, which has changed."""

    def began(self, cell: Cell) -> None:
        """Note that a cell has begun."""
        self.running[cell] = -1
        self.show()

    def round(self, cell: Cell, rounds: int) -> None:
        """Note that a cell has finished a round."""
        if self.running[cell] < 0:  # where a resumed run starts: these rounds cost nothing now
            self.skipped += rounds
            self.running[cell] = 0
        self.done += rounds - self.running[cell]
        self.running[cell] = rounds
        self.show()

    def put_off(self, cell: Cell) -> None:
        """Note that a cell waits."""
        del self.running[cell]

    def ended(self, cell: Cell, how: str, seconds: float, rounds: int) -> None:
        """Note that a cell has ended."""
        left = rounds - max(0, self.running.pop(cell))
        self.done, self.skipped = self.done + left, self.skipped + (0 if how == "finished" else left)
        self.over += 1
        self.show()

    @property
    def left(self) -> str:
        """The time left as text; '' before a round has been run."""
        run = self.done - self.skipped
        spent = time.monotonic() - self.began_at
        return f"{clock(spent / run * (self.rounds - self.done))} left" if run > 0 else ""


class CellLines(Printed, Watch):
    """A plain line on stderr for each cell that ends."""

    def ended(self, cell: Cell, how: str, seconds: float, rounds: int) -> None:
        super().ended(cell, how, seconds, rounds)
        left = f", {self.left}" if self.left else ""
        self.event(f"[{self.over}/{self.cells}] {cell}: {how}  {clock(seconds)} spent{left}")


class Bar(Drawn, Watch):
    """One bar over all rounds of all cells, with the cells that run."""

    def __init__(self) -> None:
        from rich.progress import TextColumn, TimeElapsedColumn

        left, names = TextColumn("{task.fields[left]}"), TextColumn("{task.fields[names]}", markup=False)
        super().__init__(TimeElapsedColumn(), left, names)

    def start(self, cells: int, rounds: int) -> None:
        self._task = self._bars.add_task("cells", total=rounds, left="", names="")
        self._bars.start()
        super().start(cells, rounds)

    def ended(self, cell: Cell, how: str, seconds: float, rounds: int) -> None:
        super().ended(cell, how, seconds, rounds)
        if not how.startswith(("finished", "stopped")):
            self.event(f"{cell}: {how}")

    def show(self) -> None:
        names = ", ".join(f"{cell} ({max(0, rounds)})" for cell, rounds in self.running.items())
        about: dict[str, Any] = {"description": f"cells {self.over}/{self.cells}", "left": self.left, "names": names}
        self._bars.update(self._task, completed=self.done, **about)


def progress(quiet: bool = False) -> Watch:
    """Return what suits stderr."""
    return suited(quiet, Watch, Bar, CellLines)


@dataclass(frozen=True)
class Prepared:
    """A grid before it runs: its recipes, what is done, what is refused and why, and bytes of memory a cell."""

    grid: Grid
    folder: Path
    recipes: Mapping[Cell, Recipe]
    states: Mapping[Cell, str]
    refused: Mapping[str, str]
    """Combination -> the library's reason."""
    todo: tuple[Cell, ...]
    needs: Mapping[Cell, int]

    def count(self, refused: Collection[str] = ()) -> int:
        """Return the number of runs, without those of combinations that are refused, here or among `refused`."""
        out = {*self.refused, *refused}
        return sum(state == "finished" or cell.combination not in out for cell, state in self.states.items())


@dataclass(frozen=True)
class Place:
    """A run outside a grid, where a cell would stand: its folder below another, and its name in messages."""

    name: str
    combination: str

    def folder(self, home: Path) -> Path:
        """Return the run's folder."""
        return home / self.name

    def __str__(self) -> str:
        return self.combination


@dataclass
class Outcome:
    """The outcome of the cells that had to be run; `peak` is the largest resident size of one in bytes."""

    finished: list[Cell] = field(default_factory=list)
    failed: dict[Cell, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    peak: int = 0


@dataclass
class _Running:
    cell: Cell
    process: Any
    began: float


def prepare(grid: Grid, folder: Path, only: Sequence[str] = ()) -> Prepared:
    """Check every cell and estimate what it needs; nothing is run or written.

    Raises RecipeError for cells that are no valid recipes, StateError for folders of other recipes or another family of
    tests, and UserError for data that cannot be loaded or of which the grid cannot be shown (`check_shown`).
    """
    by_cell = recipes(grid)
    check_links(path for path in folder.glob("*") if not path.is_dir())
    same_family(grid, folder)
    states = {cell: state_of(cell, recipe, folder) for cell, recipe in by_cell.items()}
    chosen = select(grid, only)
    over = [cell for cell in by_cell if cell in chosen and states[cell] == "finished"]
    for done in grouped((by_cell[cell].data.model_dump_json(), cell) for cell in over).values():
        with at(str(done[0])):
            check_shown(grid, Run.read(done[0].folder(folder)))
        since = changed(by_cell[done[0]])
        if before := [cell for cell in done if began(cell.folder(folder)) < since]:
            _ask(_compare_data, before[0].folder(folder), by_cell[before[0]])
    open_ = [cell for cell in by_cell if states[cell] != "finished" and cell in chosen]
    first: dict[str, Cell] = {}
    for cell in open_:
        first.setdefault(cell.combination, cell)
    refused, needs = _ask(_probe, {name: by_cell[cell] for name, cell in first.items()}, grid) if open_ else ({}, {})
    todo = tuple(cell for cell in open_ if cell.combination not in refused)
    # what was refused earlier still holds for combinations that this call did not ask about
    known = {cell.combination for cell in by_cell}
    refused = {k: v for k, v in refused_in(folder).items() if k in known and k not in first} | refused
    return Prepared(grid, folder, by_cell, states, refused, todo, {cell: needs[_size(by_cell[cell])] for cell in todo})


def run_prepared(prepared: Prepared, watch: Watch, jobs: int | None = None, memory: int | None = None) -> Outcome:
    """Run the cells that are left. A cell that fails does not stop the others.

    `jobs` is how many cells run at once (default: as many as the CPUs can take; one on a GPU), `memory` the bytes
    that they may need together (default: 80 % of what is free now); one cell always runs.
    """
    save(prepared.grid, prepared.folder, prepared.refused)
    if not prepared.todo:
        return Outcome()
    todo = {cell: prepared.recipes[cell] for cell in prepared.todo}
    outcome = run_at_once(todo, prepared.folder, prepared.needs, watch, jobs, memory)
    if outcome.refused:
        save(prepared.grid, prepared.folder, {**prepared.refused, **outcome.refused})
    return outcome


def run_at_once(
    recipes: Mapping[Any, Recipe],
    folder: Path,
    needs: Mapping[Any, int],
    watch: Watch,
    jobs: int | None = None,
    memory: int | None = None,
) -> Outcome:
    """Run recipes by cell or `Place`, each in its folder below `folder`, and return what came of each.

    `needs` are the bytes that each may need; `jobs` and `memory` are as in `run_prepared`.
    """
    jobs = jobs or default_jobs([*recipes.values()])
    memory = int(0.8 * available_memory()) if memory is None else memory
    work = _CellJob(recipes, folder, {cell: needs[cell] for cell in recipes}, watch, jobs, memory)
    watch.start(len(recipes), sum(recipe.training.rounds for recipe in recipes.values()))
    try:
        while work.queue or work.running:
            work.begin()
            for ready in wait(list(work.running), AGAIN if work.elsewhere else None):
                assert isinstance(ready, Connection)
                work.hear(ready)
    finally:
        work.stop()
    return work.outcome


def bytes_of(recipe: Recipe) -> int:
    """Return the bytes that a run of a recipe may need, without a note on it; 0 where the library refuses it."""
    _, needs = _ask(_silent, _probe, {recipe.name: recipe})
    return max(needs.values(), default=0)


@dataclass(frozen=True)
class Runner:
    """How a study runs its grids: what watches each, what hears of the steps, and how many cells run at once."""

    watch: Callable[[], Watch] = Watch
    tell: Callable[[str], None] = lambda text: None
    jobs: int | None = None

    def run(self, grid: Grid, folder: Path) -> Outcome:
        """Run what is missing of a grid; the outcome names all that is refused, by combination."""
        prepared = prepare(grid, folder)
        outcome = run_prepared(prepared, self.watch(), self.jobs)
        return replace(outcome, refused={**prepared.refused, **outcome.refused})


SILENT = Runner()


@dataclass
class _CellJob:
    """The cells of a grid that wait and those that run, within a number of jobs and bytes of memory."""

    recipes: Mapping[Any, Recipe]
    folder: Path
    needs: dict[Any, int]
    watch: Watch
    jobs: int
    memory: int
    outcome: Outcome = field(default_factory=Outcome)
    running: dict[Connection, _Running] = field(default_factory=dict)
    elsewhere: dict[Cell, float] = field(default_factory=dict)
    """Cell that another process has -> when to ask for it again."""

    def __post_init__(self) -> None:
        self.queue = deque(self.recipes)

    def begin(self) -> None:
        """Start the cells that fit beside those that run; one where none runs, whatever it needs."""
        now = time.monotonic()
        while len(self.running) < self.jobs:
            ready = [cell for cell in self.queue if self.elsewhere.get(cell, now) <= now]
            free = self.memory - sum(self.needs[r.cell] for r in self.running.values())
            fitting = next((cell for cell in ready if self.needs[cell] <= free), None)
            if not ready or (fitting is None and self.running):
                break
            cell = ready[0] if fitting is None else fitting
            self.queue.remove(cell)
            recipe = self.recipes[cell] if self.jobs == 1 else one_worker(self.recipes[cell])
            pipe, process = _spawn(_run_cell, recipe, cell, self.folder)
            self.running[pipe] = _Running(cell, process, time.monotonic())
            self.watch.began(cell)

    def hear(self, pipe: Connection) -> None:
        """Take what a cell's process says: a round, an event, or how it ended."""
        one, recipes = self.running[pipe], self.recipes
        kind, value, peak = _hear(pipe, one.process)
        self.outcome.peak = max(self.outcome.peak, peak)
        for other in self.needs:
            if _size(recipes[other]) == _size(recipes[one.cell]):
                self.needs[other] = max(self.needs[other], peak)
        if kind == "round":
            self.watch.round(one.cell, value)
        elif kind == "event":
            self.watch.event(f"{one.cell}: {value}")
        elif kind == "warning":
            self.watch.warn(value, f"{one.cell}: ")
        else:
            del self.running[pipe]
            _end(one.process)
            if kind == "in use":  # by another process, such as another grid in the same folder
                self.queue.append(one.cell)
                self.watch.put_off(one.cell)
                if one.cell not in self.elsewhere:
                    self.watch.event(f"{one.cell}: another process runs this cell; this grid waits until it is free")
                self.elsewhere[one.cell] = time.monotonic() + AGAIN
                return
            self.elsewhere.pop(one.cell, None)
            if kind == "done":
                self.outcome.finished.append(one.cell)
            elif kind == "refused":
                self.outcome.refused[one.cell.combination] = value
            else:
                self.outcome.failed[one.cell] = value
            how = value if kind == "done" else f"{kind}: {value}"
            self.watch.ended(one.cell, how, time.monotonic() - one.began, recipes[one.cell].training.rounds)

    def stop(self) -> None:
        """End the processes that are left."""
        for one in self.running.values():
            one.process.terminate()
        for one in self.running.values():
            _end(one.process)
        self.watch.stop()


def on_test(recipe: Mapping[str, Any], **keys: Any) -> Grid:
    """Return a grid of one recipe, measured on test data in the last round alone; `keys` are the grid's other keys."""
    last = {"evaluation.splits": ["test"], "evaluation.every": recipe["training"]["rounds"]}
    return load_grid({"data": {BENCHMARK: {"recipe": dict(recipe), "set": last}}, **keys})


def until_decided(least: int, most: int, run: Callable[[int], Result], is_decided: Callable[[Result], bool]) -> Result:
    """Return the result of `run` with the first number of seeds, from `least` to `most`, that decides."""
    for seeds in range(least, most):
        if is_decided(made := run(seeds)):
            return made
    return run(most)


def default_jobs(recipes: Sequence[Recipe]) -> int:
    """Return how many cells run at once: CPUs over what one cell keeps busy, and one where a cell uses a GPU."""
    if {d for r in recipes for d in r.runtime.devices} - {"cpu"}:
        return 1
    return max(1, cores() // max(one_worker(r).runtime.processes * r.runtime.threads for r in recipes))


def one_worker(recipe: Recipe) -> Recipe:
    """Return the recipe for a cell beside others: `runtime.workers: auto` is one."""
    if recipe.runtime.workers != "auto":
        return recipe
    return recipe.model_copy(update={"runtime": recipe.runtime.model_copy(update={"workers": 1})})


def _size(recipe: Recipe) -> str:
    """Return a key that is equal for recipes that need about the same memory: all but method and seed."""
    return recipe_hash({**recipe.model_dump(mode="json"), "seed": 0, "method": {}, "workers": recipe.runtime.workers})


# In the child


def _run_cell(pipe: Connection, recipe: Recipe, cell: Cell, grid_folder: Path) -> None:
    """Run or resume one cell, and say how it ends. Another process may have ended it meanwhile."""
    folder = cell.folder(grid_folder)
    state = ""
    log = (grid_folder / "log.txt").open("a", encoding="utf-8")
    for stream in (1, 2):  # what libraries print would tear the parent's progress bar
        os.dup2(log.fileno(), stream)
    try:
        import torch

        from fedloom.engines import api

        torch.set_num_threads(recipe.runtime.threads)
        folder.parent.mkdir(parents=True, exist_ok=True)
        # beside the folder, because the folder of what was never a run is deleted
        with locked(folder.with_name(f".{folder.name}{LOCK}"), folder):
            _clean(folder)
            tell = _Tell(pipe)
            state = state_of(cell, recipe, grid_folder)
            if state == "finished":
                tell.start(recipe.training.rounds, recipe.training.rounds)
                answer = ("done", read_info(folder)["status"])
            else:
                go = partial(api.run, recipe) if state == "new" else api.resume
                answer = ("done", go(folder, progress=tell).status)
    except InUseError:
        answer = ("in use", "")
    except RecipeError as error:
        answer = ("refused" if state == "new" else "failed", str(error))  # what began was not refused
    except UserError as error:
        answer = ("failed", str(error))
    except Exception as error:
        print(f"{folder}:\n{traceback.format_exc()}", file=log, flush=True)
        answer = ("failed", f"{type(error).__name__}: {error} (traceback in {grid_folder / 'log.txt'})")
    pipe.send((*answer, _peak()))
    pipe.close()
    os._exit(0)  # to unload torch takes a second


def _clean(folder: Path) -> None:
    """Remove what is left of a run that was killed before it wrote its recipe; nothing in it is needed."""
    if folder.is_dir() and not (folder / "recipe.yaml").is_file():
        others = {path.name for path in folder.iterdir()} - _LEFT_BY_A_TORN_START - {"recipe.yaml.part"}
        if others:
            raise StateError(f"{folder} holds {', '.join(sorted(others))}, but no run")
        with locked(folder / LOCK, folder):
            shutil.rmtree(folder)


def _answer(pipe: Connection, function: Callable[..., Any], *arguments: Any) -> None:
    """Send what a function returns, or why it fails."""
    try:
        pipe.send(("done", function(*arguments), _peak()))
    except UserError as error:
        pipe.send(("failed", str(error), 0))


def _silent(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return what a function returns, which prints nothing: another process has printed its notes."""
    with Path(os.devnull).open("w") as nowhere, redirect_stderr(nowhere):
        return function(*arguments)


def _compare_data(folder: Path, recipe: Recipe) -> None:
    """Raise UserError where the data of a finished run are no longer those that it saw."""
    from fedloom.federation.rounds.build import build
    from fedloom.federation.runs.folder import check_parts

    try:
        check_parts(folder, build(recipe).about)
    except UserError as error:
        raise UserError(f"{error}. Choose another folder with --out, or delete this one") from None


def _probe(by_name: Mapping[str, Recipe], grid: Grid | None = None) -> tuple[dict[str, str], dict[str, int]]:
    """Return which combinations the library refuses, and bytes of memory by size of cell.

    Raises UserError for data that cannot be loaded, and where the tasks do not fit what the `grid` is to show of them.
    """
    from fedloom.engines.plan import plan_of
    from fedloom.federation.rounds.build import build, build_method, load_data
    from fedloom.federation.rounds.evaluation import at_once, maps_of

    refused: dict[str, str] = {}
    needs: dict[str, int] = {}
    datasets: dict[str, Any] = {}
    for name, recipe in by_name.items():
        try:
            build_method(recipe.method)  # before any data is loaded, for this answers at once
        except RecipeError as error:
            refused[name] = str(error).removeprefix("method: ")
    for name, recipe in by_name.items():
        if name in refused:
            continue
        size = _size(recipe)
        key = repr((recipe.data.model_dump(mode="json"), recipe.seed))
        with at(name):
            if key not in datasets:
                datasets = {key: load_data(recipe.data, recipe.seed)}
            try:
                built = build(recipe, dataset=datasets[key])
            except RecipeError as error:
                refused[name] = str(error).removeprefix("method: ")
                continue
            if grid is not None:
                check_shown(grid, Run(Path(f"grid {grid.name}"), {}, built.measured, (), ()))
            if size not in needs:
                plan = plan_of(built)
                shape = plan.input_shape
                batch = maps_of(shape) * at_once(recipe.evaluation.batch_size, shape)
                workers = recipe.runtime.processes
                processes = workers + 1 if workers > 1 else 1
                needs[size] = int(processes * PROCESS + PLANNED * sum(plan.memory.values()) + workers * batch)
    return refused, needs


class _Tell(Progress):
    """A Progress that passes rounds, and the first event of each kind, on to the parent; a run's folder has all."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe, self.kinds = pipe, set[str]()

    def start(self, rounds: int, done: int) -> None:
        self.pipe.send(("round", done, _peak()))

    def round(self, round: int, numbers: Mapping[str, float]) -> None:
        self.pipe.send(("round", round, _peak()))

    def event(self, text: str) -> None:
        kind = text.partition(":")[2].partition(":")[0]  # of "round 3: update dropped: client a, ..."
        if kind not in self.kinds:
            self.kinds.add(kind)
            self.pipe.send(("event", text, _peak()))

    def warn(self, text: str, of: str = "") -> None:
        self.pipe.send(("warning", text, _peak()))


def _peak() -> int:
    """Return the largest resident size of this process so far, in bytes; 0 where the system does not say."""
    try:
        import resource
    except ImportError:
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _child(function: Callable[..., None], *arguments: Any) -> None:
    """Let a child end with its own workers when it is told to, or when its parent ends by kill -9."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def leave(*signal: Any) -> None:
        for worker in multiprocessing.active_children():
            worker.kill()
        os._exit(1)

    def follow() -> None:
        parent.join()
        leave()

    signal.signal(signal.SIGTERM, leave)
    threading.Thread(target=follow, daemon=True).start()
    function(*arguments)


# In the parent


def _spawn(function: Callable[..., None], *arguments: Any) -> tuple[Connection, Any]:
    """Return (pipe, process) of a new child."""
    here, there = multiprocessing.Pipe(duplex=False)
    processes.prepare("pandas")  # without it a cell that trains a small table imports half of its time
    process = processes.start(_child, function, there, *arguments)
    there.close()
    return here, process


def _hear(pipe: Connection, process: Any) -> tuple[str, Any, int]:
    try:
        kind, value, peak = pipe.recv()
    except (EOFError, OSError):
        process.join(timeout=5)
        code = process.exitcode
        hint = "; -9 often means that memory ran out: fewer --jobs, or a smaller --memory" if code == -9 else ""
        return "failed", f"its process ended with exit code {code}{hint}", 0
    return kind, value, peak


def _ask(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return what a function answers in a child process of its own. Raises UserError where it fails."""
    pipe, process = _spawn(_answer, function, *arguments)
    try:
        kind, value, _ = _hear(pipe, process)
    except BaseException:
        process.terminate()
        raise
    finally:
        _end(process)
    if kind != "done":
        raise UserError(value)
    return value
