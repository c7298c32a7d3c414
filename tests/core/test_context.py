"""How many clients train a task, as a stage is told: of all clients, of those of one task, or unknown."""

from __future__ import annotations

import pytest

from fedloom.core.context import Ctx

HELD = {"a": 3, "b": 0}


@pytest.mark.parametrize(
    ("population", "held", "task", "present", "expected"),
    [
        (None, None, None, 2, 2),
        (None, None, "a", 2, 2),
        (None, None, "a", 0, 1),
        (5, None, None, 2, 5),
        (5, None, "a", 2, 5),
        (5, HELD, None, 2, 5),
        (5, HELD, "a", 2, 3),
        (5, HELD, "b", 2, 1),
        (5, HELD, "c", 2, 1),
        (None, HELD, "a", 2, 3),
        (None, HELD, None, 2, 2),
        (0, None, None, 2, 1),
        (1, None, None, 2, 1),
    ],
)
def test_those_who_train_a_task(
    population: int | None, held: dict[str, int] | None, task: str | None, present: int, expected: int
) -> None:
    assert Ctx(population=population, held=held).trainers(task, present) == expected


@pytest.mark.parametrize(
    ("population", "held", "task", "among", "left"),
    [
        (5, HELD, "a", 3, {"a": 3}),
        (5, HELD, "b", 1, {"b": 0}),
        (5, HELD, "c", 1, {"c": 0}),
        (5, HELD, None, 5, HELD),
        (5, None, "a", 5, None),
        (5, None, None, 5, None),
        (None, HELD, "a", None, {"a": 3}),
        (None, HELD, None, None, HELD),
        (None, None, "a", None, None),
    ],
)
def test_a_stage_that_sees_one_task_is_told_of_its_clients_only(
    population: int | None,
    held: dict[str, int] | None,
    task: str | None,
    among: int | None,
    left: dict[str, int] | None,
) -> None:
    found = Ctx(round=2, seed=7, population=population, held=held).among(task)
    assert (found.population, found.held, found.round, found.seed) == (among, left, 2, 7)
