"""Where jobs run: here, in a pool, or here until training has shown that a pool would be faster."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from fedloom.core.errors import UserError
from fedloom.engines.pool import Stacked, WorkerPool
from fedloom.federation.rounds.worker import Executor, InProcess, Job, Setup, TrainJob

START, TRAVEL = 3.0, 0.003
"""Seconds that it takes to start a pool, and that a job takes to travel to a worker and back."""
TRIED = 2
"""Rounds after which a way is known: the first ones also load what stays."""


class Adaptive:
    """Jobs run in this process, and in a pool from the round on after which that is expected to end the run sooner.

    What the pool then takes is held against what was measured here, and where it is slower, as on cores that other
    work uses, jobs come back for good. Results do not depend on where a job runs, so nobody can tell from them.
    """

    def __init__(self, setup: Setup, devices: Sequence[str], workers: int) -> None:
        self.setup, self.devices, self.workers = setup, devices, workers
        self.here = InProcess(setup, devices)
        self.pool: WorkerPool | None = None
        self.settled = False
        self._alone: list[float] = []
        self._shared: list[float] = []

    def run(self, jobs: Sequence[Job], **options: Any) -> Iterator[Any]:
        """Results as they come."""
        results, seconds = (self.pool or self.here).run(jobs, **options), 0.0
        while True:
            start = time.perf_counter()
            try:
                value = next(results)
            except StopIteration:
                break
            seconds += time.perf_counter() - start  # without what is done with it
            yield value
            del value  # before the next client trains
        trained = [job for job in jobs if isinstance(job, TrainJob)]
        if trained and not self.settled:
            self._judge(len(trained), seconds, self.setup.training.rounds - trained[0].round)

    def _judge(self, jobs: int, seconds: float, left: int) -> None:
        """Choose a place for the next rounds, of which so many are left, after one that took so long."""
        if self.pool is not None:
            self._shared.append(seconds)
            if len(self._shared) == TRIED:
                self.settled = True
                if min(self._shared) > min(self._alone):
                    self.pool.close()
                    self.pool = None
            return
        self._alone.append(seconds)
        one = min(self._alone)
        saved = one - one / min(self.workers, jobs) - jobs * TRAVEL
        if (len(self._alone) >= TRIED or seconds > START) and left * saved > START:
            try:
                self.pool = WorkerPool(self.setup, self.devices, self.workers)
                self.pool.load()
            except UserError:  # what cannot travel to another process trains here
                self.pool, self.settled = None, True

    def close(self) -> None:
        """Free all resources."""
        if self.pool is not None:
            self.pool.close()


def executor(setup: Setup, devices: Sequence[str], workers: int, adaptive: bool = False) -> Executor:
    """Runs jobs in this process for one worker, else in a pool, or where that is faster."""
    if setup.training.stacked:
        return Stacked(setup, devices)
    if workers == 1:
        return InProcess(setup, devices)
    return Adaptive(setup, devices, workers) if adaptive else WorkerPool(setup, devices, workers)
