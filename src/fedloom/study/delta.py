"""Delta_m: how much better than a base several tasks are, in percent. Free of torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from statistics import mean


def delta_terms(
    values: Mapping[str, float], base: Mapping[str, float], directions: Mapping[str, str]
) -> dict[str, float]:
    """Task -> improvement on the base in percent of |base|, positive is better.

    The size of the base, because R2 and other metrics may be below 0: from -2 to -1 is +50 %. Tasks with a base of 0 or
    nan are left out (`without_base` names them). `directions` says for each task whether larger ("max") or smaller
    ("min") values are better.
    """
    out = without_base(values, base)
    return {
        task: (-1 if directions[task] == "min" else 1) * (values[task] - base[task]) / abs(base[task]) * 100
        for task in values
        if task not in out
    }


def without_base(values: Iterable[str], base: Mapping[str, float]) -> list[str]:
    """Those of the tasks, sorted, that have no change in percent, because the base is 0 or nan."""
    return sorted(task for task in values if base[task] == 0 or math.isnan(base[task]))


def delta_m(values: Mapping[str, float], base: Mapping[str, float], directions: Mapping[str, str]) -> float:
    """The mean of `delta_terms` over tasks (Delta_m of multi-task learning); nan where no task is left.

    Source: Maninis et al., Attentive Single-Tasking of Multiple Tasks (2019); FedHCA2 and FedDEA report it.
    """
    terms = delta_terms(values, base, directions)
    return mean(terms.values()) if terms else math.nan
