"""Means over seeds with intervals by Student's t, and changes against a baseline in percent.

Free of scipy and torch, so that every table has them.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import mean, stdev
from typing import TypeVar

from fedloom.federation.runs.reader import POOLED

Name = TypeVar("Name", bound=Hashable)
CUT = "of fractions cut off at 0 and 1"
FRACTIONS = frozenset(
    {"accuracy", "macro_f1", "auc", "miou", "pixel_accuracy", "maxf", "max_iou", "odsf", "edge_f_plain"}
    | {"pr-auc", "balanced-accuracy", "brier", "calibration"}
    | {"within_11_25", "within_22_5", "within_30", "delta1", "delta2", "delta3"}
)
"""Metrics that are fractions: their intervals end at 0 and 1."""


@dataclass(frozen=True)
class Estimate:
    """A mean over `n` seeds; `half` is half the 95 % t-interval, nan for one seed, or if one is not finite."""

    mean: float
    half: float
    n: int

    @staticmethod
    def of(values: Sequence[float]) -> Estimate:
        """Return the estimate of the values of several seeds."""
        n = len(values)
        if n < 2 or not all(map(math.isfinite, values)):
            return Estimate(sum(values) / n, math.nan, n)
        return Estimate(mean(values), bound(0.05, n - 1) * stdev(values) / math.sqrt(n), n)

    def __str__(self) -> str:
        digits = 2 if abs(self.mean) >= 10 else 4
        return f"{self.mean:.{digits}f}" + ("" if math.isnan(self.half) else f" ± {self.half:.{digits}f}")

    def ends(self, metric: str) -> tuple[float, float]:
        """Return the ends of the interval; intervals of fractions are clipped to [0, 1], and nan is no interval."""
        low, high = self.mean - self.half, self.mean + self.half
        if metric.removeprefix(POOLED) not in FRACTIONS or not 0 <= self.mean <= 1 or math.isnan(self.half):
            return low, high
        return max(0.0, low), min(1.0, high)

    def of_metric(self, metric: str) -> str:
        """Format as text; an interval of a fraction that leaves [0, 1] is clipped and written with its ends."""
        low, high = self.ends(metric)
        if math.isnan(self.half) or (low, high) == (self.mean - self.half, self.mean + self.half):
            return str(self)
        return f"{self.mean:.4f} ({low:.4f} to {high:.4f})"

    @property
    def signed(self) -> str:
        """Format as a change in percent: '+10.59 ± 1.20'; 'nan' where there is none."""
        if math.isnan(self.mean):
            return "nan"
        return f"{self.mean:+.2f}" + ("" if math.isnan(self.half) else f" ± {self.half:.2f}")


def clear_best(estimates: Mapping[Name, Estimate], direction: str) -> set[Name]:
    """Return the names of the best, if no interval of another meets the interval of the best.

    Equal numbers share the place. A number without an interval, as of one seed, counts as it is. The result is empty
    where there is nothing to choose from, or where intervals meet.
    """
    known = {name: of for name, of in estimates.items() if not math.isnan(of.mean)}
    if len(estimates) < 2 or not known:
        return set()
    top = (max if direction == "max" else min)(of.mean for of in known.values())
    best = {name for name, of in known.items() if of.mean == top}
    reach = max(_reach(known[name]) for name in best)
    is_clear = all(abs(of.mean - top) > reach + _reach(of) for name, of in known.items() if name not in best)
    return best if is_clear else set()


def _reach(of: Estimate) -> float:
    return 0.0 if math.isnan(of.half) else of.half


def two_sided(t: float, freedom: int) -> float:
    """Return P(|T| >= |t|) for T with `freedom` >= 1 degrees of freedom; t may be infinite."""
    share = 1 / (1 + t * t / freedom)
    return _beta(share, t * t / freedom * share if share else 1.0, freedom / 2, 0.5)


@cache
def bound(level: float, freedom: int) -> float:
    """Return the t >= 0 with P(|T| >= t) = `level`, 0 < level <= 1, by bisection to the last bit."""
    low, high = 0.0, 1.0
    while two_sided(high, freedom) > level:
        low, high = high, 2 * high
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if two_sided(middle, freedom) > level else (low, middle)
    return high


def _beta(x: float, y: float, a: float, b: float) -> float:
    """Return the regularised incomplete beta function I_x(a, b), y = 1 - x.

    A power series with positive terms, on the side of the mean where it converges fast (Abramowitz and Stegun 1964,
    26.5.2 and 15.3.3 for 26.5.23).
    """
    if x * b > y * a:  # x > a / (a + b), written so that rounding cannot send it back and forth
        return 1 - _beta(y, x, b, a)
    term = total = 1 / a
    n = 0
    while term > total * 1e-17:
        term *= x * (a + b + n) / (a + 1 + n)
        total += term
        n += 1
    return total * x**a * y**b * math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b))


def delta_terms(
    values: Mapping[str, float], base: Mapping[str, float], directions: Mapping[str, str]
) -> dict[str, float]:
    """Return task -> improvement on the baseline in percent of |base|; positive is better.

    It is relative to the size of the baseline, because R2 and other metrics may be below 0: from -2 to -1 is +50 %.
    Tasks with a baseline of 0 or nan are left out (`without_base` names them). `directions` says for each task whether
    larger ("max") or smaller ("min") values are better.
    """
    out = without_base(values, base)
    return {
        task: (-1 if directions[task] == "min" else 1) * (values[task] - base[task]) / abs(base[task]) * 100
        for task in values
        if task not in out
    }


def without_base(values: Iterable[str], base: Mapping[str, float]) -> list[str]:
    """Return the tasks, sorted, without a change in percent, because the baseline is 0 or nan."""
    return sorted(task for task in values if base[task] == 0 or math.isnan(base[task]))


def delta_m(values: Mapping[str, float], base: Mapping[str, float], directions: Mapping[str, str]) -> float:
    """Return the mean of `delta_terms` over tasks (Delta_m of multi-task learning); nan where no task is left.

    Source: Maninis et al., Attentive Single-Tasking of Multiple Tasks (2019); FedHCA2 and FedDEA report it.
    """
    terms = delta_terms(values, base, directions)
    return mean(terms.values()) if terms else math.nan
