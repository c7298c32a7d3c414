"""The rows that a table's methods stand beside: the answer without any input, and training on all data in one place."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal, get_args

from fedloom.study.delta import delta_terms

Reference = Literal["joint", "joint-by-task", "trivial"]
"""The methods `joint`, for all tasks at once and for each alone, and `trivial`."""

_POOLED = {"evaluation.models": ["global"], "peers": None}
CHANGES: dict[Reference, dict[str, Any]] = {
    "joint": {"method": "joint", **_POOLED},
    "joint-by-task": {"method": {"name": "joint", "by": "task"}, **_POOLED},
    "trivial": {
        "method": "trivial",
        **_POOLED,
        "training.rounds": 1,  # there is nothing to train
        "training.schedule": {"name": "constant"},
        "early_stopping": None,
    },
}
"""What makes a cell of them from a grid's recipe: one model, measured on the data of every client."""


def at_trivial(found: Iterable[tuple[str, Mapping[str, float]]], directions: Mapping[str, str]) -> list[str]:
    """The tasks, sorted, on which no method is better than `trivial`, from (method, task -> mean); none without it.

    A change there is one between answers that have not begun to look at their input, so it counts in no Delta_m.
    `joint` is no federated method and does not count.
    """
    rows = list(found)
    trivial = [values for method, values in rows if method == "trivial"]
    others = [values for method, values in rows if method not in get_args(Reference)]
    if not trivial or not others:
        return []

    def better(values: Mapping[str, float], task: str) -> bool:
        known = task in values and not math.isnan(values[task])
        return known and any(
            term > 0 for term in delta_terms({task: values[task]}, {task: trivial[0][task]}, directions).values()
        )

    judged = [t for t in directions if t in trivial[0] and trivial[0][t] and not math.isnan(trivial[0][t])]
    return sorted(task for task in judged if not any(better(values, task) for values in others))


def note(tasks: Iterable[str]) -> str:
    """What a table says of these tasks."""
    return f"†: no method is better than the trivial answer on {', '.join(tasks)}, which Δm therefore leaves out."
