"""Three verdicts on a gain: yes, no, or cannot tell, with the gain that could have been detected. Free of torch.

Source of the correction for seeds that share their examples: Nadeau and Bengio, Inference for the generalization error
(2003); `against_zero` applies it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist
from typing import Literal

from fedloom.study.significance.statistics import LEVEL, Paired
from fedloom.study.tables.estimate import bound

POWER = 0.8
"""The power for which the detectable gain is stated."""
_STEPS = 1000  # of Simpson's rule


@dataclass(frozen=True)
class Verdict:
    """The answer to the question whether there is a gain that counts."""

    answer: Literal["yes", "no", "cannot tell"]
    is_worse: bool = False
    """True if there is a loss that counts; the answer is no."""
    detectable: float = math.nan
    """The gain that this many seeds detect with a power of 80 %; nan where that is unknown."""
    reason: str = ""
    """Why the numbers allow neither yes nor no, whatever they are."""

    @property
    def label(self) -> str:
        """Return the answer, with 'worse' where there is a loss that counts."""
        return "no, worse" if self.is_worse else self.answer

    def in_words(self, unit: str = "") -> str:
        """Return the label, and for 'cannot tell' the reason or the detectable gain in `unit`."""
        if self.answer != "cannot tell":
            return self.label
        if self.reason:
            return f"{self.label} ({self.reason})"
        known = "" if math.isnan(self.detectable) else f" (detectable: {self.detectable:.2g}{unit})"
        return f"{self.label}{known}"


def judge(found: Paired | None, smallest: float, p: float | None = None, reason: str = "") -> Verdict:
    """Return the verdict on gains over seeds, of which `smallest`, in the same unit, is the smallest that counts.

    yes: p, after Holm's correction where one is given, is at most 0.05, and the mean gain counts. no: the 95 % interval
    excludes every gain that counts. cannot tell: all else, and everything where a `reason` forbids a verdict. Gains
    that are the same at every seed allow no verdict, because nothing tells how much they vary.
    """
    if found is None:
        return Verdict("cannot tell", reason=reason or "no test")
    if reason or found.is_constant:
        return Verdict("cannot tell", reason=reason or "the same at every seed")
    detectable = detectable_gain((found.high - found.low) / 2, found.n)
    is_significant = (found.p if p is None else p) <= LEVEL
    if is_significant and found.mean >= smallest:
        return Verdict("yes", detectable=detectable)
    if found.high < smallest:
        return Verdict("no", is_significant and found.mean <= -smallest, detectable)
    return Verdict("cannot tell", detectable=detectable)


def detectable_gain(half: float, n: int) -> float:
    """Return the gain that a two-sided t-test at 5 % over n seeds detects with 80 % power (`half` its interval)."""
    return shift(n - 1) * half / bound(LEVEL, n - 1)


@cache
def shift(freedom: int) -> float:
    """Return that mean in standard errors, by bisection of `power`."""
    low, high = 0.0, 2 * bound(LEVEL, freedom) + 10
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if power(middle, freedom) < POWER else (low, middle)
    return high


def power(mean: float, freedom: int) -> float:
    """Return the probability that a two-sided t-test at 5 % finds a positive mean of this many standard errors.

    It is P(T > t) of the noncentral t distribution: the chance of a normal numerator, integrated over the chi
    distribution of the estimated standard error by Simpson's rule.
    """
    t, normal, scale = bound(LEVEL, freedom), NormalDist(), math.sqrt(freedom)
    width = (scale + 10) / _STEPS
    constant = (1 - freedom / 2) * math.log(2) - math.lgamma(freedom / 2)

    def at(x: float) -> float:
        density = x ** (freedom - 1) * math.exp(constant - x * x / 2)
        return density * normal.cdf(mean - t * x / scale)

    inner = math.fsum((4 if step % 2 else 2) * at(step * width) for step in range(1, _STEPS))
    return width / 3 * (at(0.0) + inner + at(_STEPS * width))
