"""Places where jobs run: this process, a pool of worker processes that share memory, or the faster of both."""

from __future__ import annotations

import contextlib
import pickle
import time
import traceback
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from types import FunctionType
from typing import Any

import torch
import torch.multiprocessing
from torch import Tensor

from fedloom.core.errors import UserError
from fedloom.engines import processes
from fedloom.federation.rounds.worker import (
    EvalJob,
    Executor,
    InProcess,
    Job,
    Setup,
    TrainDone,
    TrainJob,
    Worker,
    check_device,
    set_torch,
)
from fedloom.federation.runs.checkpoint import map_tensors

_SMALL = 1 << 18  # bytes
HELD = 4
"""For each worker so many results may wait for an earlier one before new jobs do."""


class Stacked(InProcess):
    """One worker in this process that trains clients of equal shape together."""

    def run(self, jobs: Sequence[Job], **options: Any) -> Iterator[Any]:
        """Yield results, of training first."""
        train = [job for job in jobs if isinstance(job, TrainJob)]
        if train:
            yield from self.worker.train_stacked(train, **options)
        yield from super().run([job for job in jobs if isinstance(job, EvalJob)])


class WorkerPool(Executor):
    """Worker processes, each with its own model; data and vectors lie in shared memory.

    A job goes to the next idle worker. Results do not depend on which worker takes a job. Processes start empty and
    receive the setup over the pipe, so a worker that cannot load it reports this, and nobody waits for it.
    """

    repeats = True

    def __init__(self, setup: Setup, devices: Sequence[str], workers: int) -> None:
        names = [check_device(devices[i % len(devices)]) for i in range(workers)]
        self.processes = []
        self.pipes: list[Connection] = []
        for name in names:
            here, there = Pipe()
            process = processes.start(_serve, there, name, daemon=True)
            there.close()
            self.processes.append(process)
            self.pipes.append(here)
        try:
            for pipe in self.pipes:
                self._talk(pipe, setup)
        except UserError:
            self.close()
            raise
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            self.close()
            raise UserError(
                "the model, the method, the tasks or the data cannot be sent to a worker process: "
                f"{type(error).__name__}: {error}. Remove what cannot be copied, such as open files and locks, "
                "or set runtime.workers to 1"
            ) from error
        self.loading = list(self.pipes)  # workers that have not reported yet that they have loaded the setup

    def run(self, jobs: Sequence[Job], **options: Any) -> Generator[Any, int | None]:
        """Yield results in order of completion. Raises UserError if a worker fails or dies.

        The caller may send how many results it holds back; no job begins while these are HELD times the workers.
        """
        self.load()
        todo = list(reversed(jobs))
        busy: set[Connection] = set()
        idle = list(self.pipes)
        held = 0
        while todo or busy:
            while idle and todo and held < HELD * len(self.pipes):
                pipe = idle.pop()
                self._talk(pipe, (todo.pop(), options))
                busy.add(pipe)
            for ready in wait(list(busy)):
                assert isinstance(ready, Connection)
                value = self._hear(ready)
                busy.discard(ready)
                idle.append(ready)
                if isinstance(value, TrainDone):  # shared memory between processes is scarce: keep a copy
                    value = replace(value, state=map_tensors(value.state, lambda t: t.clone() if t.is_shared() else t))
                held = (yield value) or 0

    def load(self) -> None:
        """Wait until all workers have loaded the setup. Raises UserError if one cannot."""
        while self.loading:
            self._hear(self.loading.pop())

    def _talk(self, pipe: Connection, message: Any) -> None:
        try:
            pipe.send_bytes(_Pickler.dumps(message))
        except (BrokenPipeError, OSError) as error:
            self._died(pipe, error)

    def _hear(self, pipe: Connection) -> Any:
        """Return a worker's answer; close the pool and raise the error where it is one."""
        try:
            ok, value = pipe.recv()
        except (EOFError, OSError) as error:
            self._died(pipe, error)
        if not ok:
            self.close()
            raise value
        return value

    def _died(self, pipe: Connection, error: Exception) -> None:
        process = self.processes[self.pipes.index(pipe)]
        process.join(timeout=5)
        self.close()
        raise UserError(
            f"worker process {process.pid} ended with exit code {process.exitcode}; "
            "-9 often means that memory ran out. `fedloom resume` goes on from what was saved last."
        ) from error

    def close(self) -> None:
        """End all workers."""
        for pipe in self.pipes:
            with contextlib.suppress(OSError):
                pipe.close()
        for process in self.processes:
            process.terminate()  # it holds nothing to save, and unloading torch would take a second
        for process in self.processes:
            processes.end(process, patience=1)
        self.pipes, self.processes = [], []


class _Pickler(ForkingPickler):
    """Small tensors travel as bytes: sharing one's memory takes about a millisecond, whatever its size.

    Functions and classes that a notebook or the script that runs defines travel by value.
    """

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, FunctionType | type):
            # no notebook, script or function defines it, so another process can import it
            importable = value.__module__ != "__main__" and "<" not in value.__qualname__
            return NotImplemented if importable else (pickle.loads, (_by_value(value),))
        plain = type(value) is Tensor and value.device.type == "cpu" and value.layout == torch.strided
        if not plain or value.requires_grad or value.nbytes > _SMALL:
            return NotImplemented
        raw = bytearray(value.contiguous().view(-1).view(torch.uint8).numpy().data)
        return _tensor, (raw, value.dtype, tuple(value.shape))


def _tensor(raw: bytearray, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return torch.frombuffer(raw, dtype=dtype).view(shape) if raw else torch.empty(shape, dtype=dtype)


def _by_value(value: Any) -> bytes:
    try:
        import cloudpickle
    except ImportError:
        raise UserError(
            f"{value.__qualname__} is defined in a notebook, in the main script or inside a function, so worker "
            "processes cannot import it: pip install 'fedloom[notebook]', which sends it to them; or move it to a "
            "module that can be imported, or set runtime.workers to 1"
        ) from None
    return cloudpickle.dumps(value)


def _serve(pipe: Connection, device: str) -> None:
    """Serve as a worker process: the setup in, then jobs in and results out, until the pipe closes."""
    try:
        setup: Setup = pipe.recv()
        set_torch(setup.runtime, setup.training)
        worker = Worker(setup, device)
    except (EOFError, KeyboardInterrupt):
        return
    except Exception as error:
        why = (
            f"a worker process cannot load the model, the method or the data: {type(error).__name__}: {error}. What "
            "they need must be in modules that worker processes can import; or set runtime.workers to 1"
        )
        pipe.send_bytes(_Pickler.dumps((False, UserError(why))))
        return
    pipe.send_bytes(_Pickler.dumps((True, None)))
    while True:
        try:
            job, options = pipe.recv()
        except (EOFError, OSError, KeyboardInterrupt):
            return
        try:
            answer: tuple[bool, Any] = (True, job.on(worker, **options))
        except KeyboardInterrupt:
            return
        except Exception as error:
            answer = (False, _portable(error))
        pipe.send_bytes(_Pickler.dumps(answer))


def _portable(error: Exception) -> Exception:
    """Return the error itself if it survives the pipe, else one with its text and traceback."""
    if isinstance(error, UserError):
        return error
    text = "".join(traceback.format_exception(error))
    with contextlib.suppress(Exception):
        pickle.loads(pickle.dumps(error))
        error.add_note(f"in a worker process:\n{text}")
        return error
    return RuntimeError(text)


START, TRAVEL = 3.0, 0.003
"""Seconds to start a pool, and for a job to travel to a worker and back."""
CONTEXT = 1 << 30
"""Bytes of a GPU that each process takes for itself."""
TRIED = 2
"""Rounds after which the speed of a place is known: the first ones also load data that stays."""


class Adaptive(Executor):
    """An executor that moves jobs from this process to a pool once that is expected to end the run sooner.

    Where the pool proves slower, as on cores that other work uses, jobs come back for good.
    """

    repeats = True

    def __init__(self, setup: Setup, devices: Sequence[str], workers: int) -> None:
        self.setup, self.devices, self.workers = setup, devices, workers
        self.here = InProcess(setup, devices)
        self.pool: WorkerPool | None = None
        self.decided = False
        self._alone: list[float] = []
        self._shared: list[float] = []

    def run(self, jobs: Sequence[Job], **options: Any) -> Generator[Any, int | None]:
        results, seconds, held = (self.pool or self.here).run(jobs, **options), 0.0, None
        while True:
            start = time.perf_counter()
            try:
                value = results.send(held) if isinstance(results, Generator) else next(results)
            except StopIteration:
                break
            seconds += time.perf_counter() - start  # without the time in which the caller uses the result
            held = yield value
            del value  # before the next client trains
        trained = [job for job in jobs if isinstance(job, TrainJob)]
        if trained and not self.decided:
            self._judge(len(trained), seconds, self.setup.training.rounds - trained[0].round)

    def _judge(self, jobs: int, seconds: float, left: int) -> None:
        """Choose a place for the next rounds, of which so many are `left`, after one that took `seconds`."""
        if self.pool is not None:
            self._shared.append(seconds)
            if len(self._shared) == TRIED:
                self.decided = True
                if min(self._shared) > min(self._alone):
                    self.pool.close()
                    self.pool = None
            return
        self._alone.append(seconds)
        one, workers = min(self._alone), min(self.workers, self._fit())
        saved = one - one / min(workers, jobs) - jobs * TRAVEL
        if (len(self._alone) >= TRIED or seconds > START) and left * saved > START:
            try:
                self.pool = WorkerPool(self.setup, self.devices, workers)
                self.pool.load()
            except UserError:  # a setup that cannot travel to another process trains here
                self.pool, self.decided = None, True

    def _fit(self) -> int:
        """Return the number of workers with room on GPUs like the first, at twice what this process took there."""
        device = self.devices[0]
        if device == "cpu":
            return self.workers
        free, mine = torch.cuda.mem_get_info(device)[0], torch.cuda.max_memory_reserved(device)
        return max(1, len(self.devices) * (free // (2 * mine + CONTEXT)))

    def close(self) -> None:
        if self.pool is not None:
            self.pool.close()


def executor(setup: Setup, devices: Sequence[str], workers: int, adaptive: bool = False) -> Executor:
    """Return the executor of a run: this process for one worker, else a pool, or the faster of both (`adaptive`)."""
    if setup.training.stacked:
        return Stacked(setup, devices)
    if workers == 1:
        return InProcess(setup, devices)
    return Adaptive(setup, devices, workers) if adaptive else WorkerPool(setup, devices, workers)
