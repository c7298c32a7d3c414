"""`runtime.workers: auto`: worker processes from when they pay, never for long where they do not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from multiprocessing import Pipe
from types import SimpleNamespace
from typing import Any

import pytest

from fedloom.engines import pool as places_of
from fedloom.engines.api import Result
from fedloom.errors import UserError
from fedloom.experiments.grid_run import one_worker
from fedloom.federation.recipes.loader import load
from fedloom.federation.recipes.runtime import Runtime
from fedloom.federation.rounds import server
from fedloom.federation.rounds.messages import Message
from fedloom.federation.rounds.round import _in_order
from fedloom.federation.rounds.worker import TrainJob
from tests_support import assert_same

ROUNDS = 100
WorkerPool = places_of.WorkerPool


class Clock:
    """Seconds that pass when a place says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


def places(
    monkeypatch: pytest.MonkeyPatch, here: Sequence[float], pool: Sequence[float], workers: int = 2, jobs: int = 10
) -> str:
    """Where the rounds of a run are trained (h: here, p: in a pool), if they take so long in either; the last again."""
    clock, where = Clock(), []

    def place(name: str, seconds: Sequence[float]) -> type:
        class Place:
            def __init__(self, *_: Any) -> None:
                self.rounds = 0

            def run(self, jobs: Sequence[Any]) -> Iterator[Any]:
                where.append(name)
                clock.now += seconds[min(self.rounds, len(seconds) - 1)]
                self.rounds += 1
                yield from jobs

            def load(self) -> None:
                if not seconds:
                    raise UserError("it does not travel")

            def close(self) -> None:
                where.append("x")

        return Place

    monkeypatch.setattr(places_of, "time", clock)
    monkeypatch.setattr(places_of, "InProcess", place("h", here))
    monkeypatch.setattr(places_of, "WorkerPool", place("p", pool))
    run = places_of.Adaptive(SimpleNamespace(training=SimpleNamespace(rounds=ROUNDS)), ["cpu"], workers)  # type: ignore[arg-type]
    for round in range(1, 9):
        for _ in run.run([TrainJob(str(i), round, Message(None), {}) for i in range(jobs)]):
            clock.now += 100  # what the server does with a result is not held against anyone
    return "".join(where)


@pytest.mark.parametrize(
    ("here", "pool", "expected"),
    [
        ([0.05], [0.03], "hhhhhhhh"),  # a hundred rounds are over before a pool is ready
        ([1.0], [0.5], "hhpppppp"),
        ([9.0], [5.0], "hppppppp"),  # seen at once
        ([2.0, 0.05], [0.03], "hhhhhhhh"),  # the first round loads what stays
        ([1.0], [2.0, 0.5], "hhpppppp"),  # likewise
        ([1.0], [1.5], "hhppxhhhh"),  # others work on the cores
        ([1.0], [], "hhhhhhhh"),  # the model does not travel
    ],
)
def test_jobs_go_where_they_are_done_first(
    monkeypatch: pytest.MonkeyPatch, here: list[float], pool: list[float], expected: str
) -> None:
    assert places(monkeypatch, here, pool) == expected


def test_one_client_a_round_stays_here(monkeypatch: pytest.MonkeyPatch) -> None:
    assert places(monkeypatch, [1.0], [0.5], jobs=1) == "hhhhhhhh"


@pytest.mark.parametrize("matrix", [True, False])
def test_a_run_that_moves_to_workers_is_the_same(
    quick: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, matrix: bool
) -> None:
    monkeypatch.setattr(server, "WHOLE", server.WHOLE if matrix else -1)  # rows are added up as they come
    monkeypatch.setattr(places_of, "START", -1.0)
    monkeypatch.setattr(Runtime, "processes", 2)
    pools = []
    monkeypatch.setattr(places_of, "WorkerPool", lambda *setup: pools.append(pool := WorkerPool(*setup)) or pool)
    assert_same(quick("training.rounds=3"), quick("training.rounds=3", "runtime.workers=auto"))
    assert pools


def test_few_results_wait_for_an_earlier_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two workers, of which one is at the first job until nobody else has anything to do."""
    jobs = [TrainJob(str(i), 1, Message(None), {}) for i in range(30)]
    ends = [Pipe() for _ in range(2)]
    begun: list[str] = []

    class Pool(WorkerPool):
        def __init__(self) -> None:
            self.pipes, self.processes, self.loading = [here for here, _ in ends], [], []
            self.at: dict[Any, str] = {}

        def _talk(self, pipe: Any, message: Any) -> None:
            self.at[pipe] = message[0].client
            begun.append(message[0].client)

        def _hear(self, pipe: Any) -> Any:
            if self.at[pipe] == "0":
                before.append(len(begun))
            return SimpleNamespace(client=self.at.pop(pipe))

    before: list[int] = []
    pool = Pool()
    monkeypatch.setattr(places_of, "wait", lambda pipes: [p for p in pipes if pool.at[p] != "0"] or list(pipes))
    assert [d.client for d in _in_order(pool.run(jobs), jobs)] == [str(i) for i in range(30)]
    assert begun == [str(i) for i in range(30)]
    assert before == [1 + 2 * places_of.HELD]


def test_cells_beside_others_have_one_worker() -> None:
    assert one_worker(load("digits-tasks", ["runtime.workers=auto"])).runtime.workers == 1
    assert one_worker(load("digits-tasks", ["runtime.workers=3"])).runtime.workers == 3
