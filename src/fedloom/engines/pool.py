"""Places where jobs run: this process, or a pool of worker processes that share memory."""

from __future__ import annotations

import contextlib
import pickle
import traceback
from collections.abc import Iterator, Sequence
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
from fedloom.federation.rounds.worker import EvalJob, InProcess, Job, Setup, TrainJob, Worker, check_device

_SMALL = 1 << 18  # bytes


class Stacked(InProcess):
    """One worker, here, that trains clients of equal shape together."""

    def run(self, jobs: Sequence[Job], **options: Any) -> Iterator[Any]:
        train = [job for job in jobs if isinstance(job, TrainJob)]
        if train:
            yield from self.worker.train_stacked(train, **options)
        yield from super().run([job for job in jobs if isinstance(job, EvalJob)])


class WorkerPool:
    """Worker processes, each with its own model; data and vectors lie in shared memory.

    A job goes to the next idle worker. Results do not depend on which worker takes a job. Processes start empty and get
    what they need over the pipe, so one that cannot load it says so, and nobody waits for it.
    """

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
            raise UserError(_unsendable(error)) from error
        self.loading = list(self.pipes)
        """Workers that have not said yet that they have loaded it."""

    def run(self, jobs: Sequence[Job], **options: Any) -> Iterator[Any]:
        """Results in order of completion. Raises UserError if a worker fails or dies."""
        self.load()
        todo = list(reversed(jobs))
        busy: set[Connection] = set()
        idle = list(self.pipes)
        while todo or busy:
            while idle and todo:
                pipe = idle.pop()
                self._talk(pipe, (todo.pop(), options))
                busy.add(pipe)
            for ready in wait(list(busy)):
                assert isinstance(ready, Connection)
                ok, value = self._hear(ready)
                busy.discard(ready)
                idle.append(ready)
                if not ok:
                    self.close()
                    raise value
                yield value

    def load(self) -> None:
        """Wait until all have loaded what they need. Raises UserError if one cannot."""
        while self.loading:
            ok, value = self._hear(self.loading.pop())
            if not ok:
                self.close()
                raise value

    def _talk(self, pipe: Connection, message: Any) -> None:
        try:
            pipe.send_bytes(_Pickler.dumps(message))
        except (BrokenPipeError, OSError) as error:
            self._died(pipe, error)

    def _hear(self, pipe: Connection) -> tuple[bool, Any]:
        try:
            ok, value = pipe.recv()
        except (EOFError, OSError) as error:
            self._died(pipe, error)
        return ok, value

    def _died(self, pipe: Connection, error: Exception) -> None:
        process = self.processes[self.pipes.index(pipe)]
        process.join(timeout=5)
        self.close()
        raise UserError(
            f"worker process {process.pid} ended with exit code {process.exitcode}; "
            "-9 often means that memory ran out. The last finished round is saved; resume continues from it."
        ) from error

    def close(self) -> None:
        for pipe in self.pipes:
            with contextlib.suppress(OSError):
                pipe.close()
        for process in self.processes:
            process.terminate()  # it holds nothing to save, and unloading torch would take a second
        for process in self.processes:
            process.join(timeout=1)
            if process.is_alive():
                process.kill()
                process.join()
        self.pipes, self.processes = [], []


class _Pickler(ForkingPickler):
    """Small tensors travel as bytes: sharing one's memory takes about a millisecond, whatever its size.

    Functions and classes that a notebook or the script that runs defines travel by value.
    """

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, FunctionType | type):
            return NotImplemented if _importable(value) else (_loads, (_by_value(value),))
        plain = type(value) is Tensor and value.device.type == "cpu" and value.layout == torch.strided
        if not plain or value.requires_grad or value.nbytes > _SMALL:
            return NotImplemented
        raw = bytearray(value.contiguous().view(-1).view(torch.uint8).numpy().data)
        return _tensor, (raw, value.dtype, tuple(value.shape))


def _tensor(raw: bytearray, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return torch.frombuffer(raw, dtype=dtype).view(shape) if raw else torch.empty(shape, dtype=dtype)


def _importable(value: Any) -> bool:
    """Whether another process can import a function or class: no notebook, no script and no function defines it."""
    return value.__module__ != "__main__" and "<" not in value.__qualname__


def _by_value(value: Any) -> bytes:
    try:
        import cloudpickle
    except ImportError:
        raise UserError(
            f"{value.__qualname__} is defined in a notebook, in the script that runs or inside a function, so worker "
            "processes cannot import it: pip install 'fedloom[notebook]', which sends it to them; or put it into a "
            "module that can be imported, or set runtime.workers to 1"
        ) from None
    data: bytes = cloudpickle.dumps(value)
    return data


def _loads(data: bytes) -> Any:
    return pickle.loads(data)


def _serve(pipe: Connection, device: str) -> None:
    """A worker process: what it needs in, then jobs in and results out, until the pipe closes."""
    try:
        setup: Setup = pipe.recv()
        torch.set_num_threads(setup.threads)
        worker = Worker(setup, device)
    except (EOFError, KeyboardInterrupt):
        return
    except Exception as error:
        pipe.send_bytes(_Pickler.dumps((False, UserError(_unloadable(error)))))
        return
    pipe.send_bytes(_Pickler.dumps((True, None)))
    while True:
        try:
            job, options = pipe.recv()
        except (EOFError, OSError, KeyboardInterrupt):
            return
        try:
            answer: tuple[bool, Any] = (True, worker.run(job, **options))
        except KeyboardInterrupt:
            return
        except Exception as error:
            answer = (False, _portable(error))
        pipe.send_bytes(_Pickler.dumps(answer))


def _unsendable(error: Exception) -> str:
    return (
        f"the model, the method, the tasks or the data cannot be sent to a worker process: {type(error).__name__}: "
        f"{error}. Leave out what cannot be copied, such as open files and locks, or set runtime.workers to 1"
    )


def _unloadable(error: Exception) -> str:
    return (
        f"a worker process cannot load the model, the method or the data: {type(error).__name__}: {error}. What they "
        "need must be in modules that worker processes can import; or set runtime.workers to 1"
    )


def _portable(error: Exception) -> Exception:
    """The error itself if it survives the pipe, else one with its text and traceback."""
    if isinstance(error, UserError):
        return error
    text = "".join(traceback.format_exception(error))
    with contextlib.suppress(Exception):
        pickle.loads(pickle.dumps(error))
        error.add_note(f"in a worker process:\n{text}")
        return error
    return RuntimeError(text)
