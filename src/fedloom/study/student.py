"""Student's t distribution, from its incomplete beta integral. Free of scipy, so that every table has its intervals."""

from __future__ import annotations

import math
from functools import cache


def two_sided(t: float, freedom: int) -> float:
    """P(|T| >= |t|) for T with `freedom` >= 1 degrees of freedom; t may be infinite."""
    share = 1 / (1 + t * t / freedom)
    return _beta(share, t * t / freedom * share if share else 1.0, freedom / 2, 0.5)


@cache
def bound(level: float, freedom: int) -> float:
    """The t >= 0 with P(|T| >= t) = `level`, 0 < level <= 1, by bisection to the last bit."""
    low, high = 0.0, 1.0
    while two_sided(high, freedom) > level:
        low, high = high, 2 * high
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if two_sided(middle, freedom) > level else (low, middle)
    return high


def _beta(x: float, y: float, a: float, b: float) -> float:
    """The regularised incomplete beta function I_x(a, b), y = 1 - x: a power series with positive terms, on the side of
    the mean where it converges fast (Abramowitz and Stegun 1964, 26.5.2 and 15.3.3 for 26.5.23)."""
    if x * b > y * a:  # x > a / (a + b), written so that rounding cannot send it back and forth
        return 1 - _beta(y, x, b, a)
    term = total = 1 / a
    n = 0
    while term > total * 1e-17:
        term *= x * (a + b + n) / (a + 1 + n)
        total += term
        n += 1
    return total * x**a * y**b * math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b))
