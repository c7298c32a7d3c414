"""Means over seeds with intervals by Student's t, and changes against a baseline in percent.

Tests over few seeds: paired differences with effect sizes, Holm's correction, ranks, verdicts. Free of torch; SciPy is
imported where it computes, because a table of one seed needs none of it.

Sources: Cohen, Statistical Power Analysis (1988); Cumming, Understanding the New Statistics (2012), d_av; Hedges,
Distribution theory for Glass's estimator (1981); Holm, A simple sequentially rejective procedure (1979); Wilcoxon,
Individual comparisons by ranking methods (1945); Demsar, Statistical comparisons of classifiers (2006), ranks; Nadeau
and Bengio, Inference for the generalization error (2003), seeds that share their examples.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import fmean, mean, stdev, variance
from typing import Literal, TypeVar

from fedloom.federation.runs.reader import POOLED

Name = TypeVar("Name", bound=Hashable)
Key = TypeVar("Key", bound=Hashable)
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
    def of(values: Sequence[float], ratio: float = 0.0) -> Estimate:
        """Return the estimate of the values of several seeds; `ratio` is as in `against_zero`, which tests them."""
        n = len(values)
        if n < 2 or not all(map(math.isfinite, values)):
            return Estimate(sum(values) / n, math.nan, n)
        return Estimate(mean(values), bound(0.05, n - 1) * stdev(values) * math.sqrt(1 / n + ratio), n)

    def __str__(self) -> str:
        digits = 2 if abs(self.mean) >= 10 else 4
        return f"{self.mean:.{digits}f}" + ("" if math.isnan(self.half) else f" ± {self.half:.{digits}f}")

    def ends(self, metric: str) -> tuple[float, float]:
        """Return the ends of the interval; intervals of fractions are clipped to [0, 1], and nan is no interval."""
        low, high = self.mean - self.half, self.mean + self.half
        if metric.removeprefix(POOLED) not in FRACTIONS or not 0 <= self.mean <= 1 or math.isnan(self.half):
            return low, high
        return max(0.0, low), min(1.0, high)

    def of_metric(self, metric: str, percent: bool = False) -> str:
        """Format as text, or 100 times that with `percent`; an interval that is clipped is written with its ends."""
        low, high = self.ends(metric)
        clipped = not math.isnan(self.half) and (low, high) != (self.mean - self.half, self.mean + self.half)
        unit, digits = (100, 2) if percent else (1, 4)
        if clipped:
            return f"{unit * self.mean:.{digits}f} ({unit * low:.{digits}f} to {unit * high:.{digits}f})"
        return f"{100 * self.mean:.2f} ± {100 * self.half:.2f}".removesuffix(" ± nan") if percent else str(self)

    @property
    def signed(self) -> str:
        """Format as a change in percent: '+10.59 ± 1.20'; 'nan' where there is none."""
        if math.isnan(self.mean):
            return "nan"
        return f"{self.mean:+.2f}" + ("" if math.isnan(self.half) else f" ± {self.half:.2f}")


def mean_of_known(values: Iterable[float]) -> float:
    """Return the mean of the numbers that are not nan; nan where none is."""
    known = [value for value in values if not math.isnan(value)]
    return fmean(known) if known else math.nan


def clear_best(estimates: Mapping[Name, Estimate], direction: str) -> set[Name]:
    """Return the names of the best, if no interval of another meets the interval of the best.

    Equal numbers share the place. A number without an interval, as of one seed, counts as it is. The result is empty
    where there is nothing to choose from, or where intervals meet.
    """
    halves = {name: 0.0 if math.isnan(of.half) else of.half for name, of in estimates.items()}
    known = {name: of.mean for name, of in estimates.items() if not math.isnan(of.mean)}
    if len(estimates) < 2 or not known:
        return set()
    top = (max if direction == "max" else min)(known.values())
    best = {name for name, mean in known.items() if mean == top}
    reach = max(halves[name] for name in best)
    is_clear = all(abs(mean - top) > reach + halves[name] for name, mean in known.items() if name not in best)
    return best if is_clear else set()


def two_sided(t: float, freedom: int) -> float:
    """Return P(|T| >= |t|) for T with `freedom` >= 1 degrees of freedom; t may be infinite."""
    from scipy import special

    return 2 * float(special.stdtr(freedom, -abs(t)))


@cache
def bound(level: float, freedom: int) -> float:
    """Return the t >= 0 with P(|T| >= t) = `level`, 0 < level <= 1."""
    from scipy import special

    return -float(special.stdtrit(freedom, level / 2))


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


LEVEL = 0.05
"""The level of intervals (95 %) and of the critical difference."""
EXACT = 100
"""Differences up to which the signed-rank test counts all signs; with more, a normal distribution stands for them."""
NOISE = 1e-12
"""Differences below this share of the numbers they come from are rounding, not differences."""


POWER = 0.8
"""The power for which the detectable gain is stated."""


@dataclass(frozen=True)
class Paired:
    """The statistics of the differences of n >= 2 pairs; nan is not defined, inf has no bound.

    If all differences are equal, t and d_z are infinite with the difference's sign, or nan where it is 0, and p is nan,
    because the differences do not vary. Wilcoxon's p is defined there too; it is 1 where all are 0.
    """

    n: int
    mean: float
    low: float
    """Lower end of the 95 % t-interval of the mean."""
    high: float
    t: float
    p: float
    """Two-sided paired t-test with n - 1 degrees of freedom, corrected where a `ratio` was given."""
    wilcoxon: float
    """Two-sided p of the signed-rank test, see `signed_rank`; differences of 0 are left out, equal ones tie."""
    d_z: float
    """Mean difference / standard deviation of the differences (n - 1 in the denominator)."""
    d_av: float
    """Mean difference / sqrt((variance of the one + variance of the other) / 2); nan where there are not two."""

    @property
    def least(self) -> float:
        """Return the smallest p that the signed-rank test can give with n pairs."""
        return 2.0 ** (1 - self.n)

    @property
    def g_z(self) -> float:
        """Return d_z with Hedges' correction for few pairs; nan for two, where the correction does not exist."""
        return hedges(self.n - 1) * self.d_z

    @property
    def g_av(self) -> float:
        """Return d_av with the same correction."""
        return hedges(self.n - 1) * self.d_av

    @property
    def is_constant(self) -> bool:
        """Return whether all differences are equal, so that t-test and d_z say nothing."""
        return math.isnan(self.p)


def paired(values: Sequence[float], base: Sequence[float], ratio: float = 0.0) -> Paired:
    """Test the differences values - base, as `against_zero`. Raises ValueError for less than two finite pairs."""
    if len(values) != len(base):
        raise ValueError(f"pairs expected, {len(values)} and {len(base)} numbers found")
    noise = NOISE * max(map(abs, (*values, *base)), default=0.0)
    differences = [v - b for v, b in zip(values, base, strict=True)]
    test = against_zero(differences, noise, ratio)
    spread = math.sqrt((variance(values) + variance(base)) / 2)
    return replace(test, d_av=_ratio(test.mean, spread, noise))


def against_zero(differences: Sequence[float], noise: float = 0.0, ratio: float = 0.0) -> Paired:
    """Test differences against 0, without d_av; those that differ by no more than `noise` count as equal.

    Where the seeds redraw the test part from one pool, they share examples, and their differences are not independent.
    With `ratio`, test examples over training examples, the t-test and its interval are those of the corrected resampled
    t-test: the variance of the mean is (1/n + ratio) sd^2. It is made for test parts that are the smaller ones; of a
    larger one, training examples over test examples take its place (docs/statistics.md).
    """
    n = len(differences)
    if n < 2:
        raise ValueError(f"a test needs two or more pairs, {n} found")
    if not all(map(math.isfinite, differences)):
        raise ValueError("a test needs finite numbers")
    mean, spread = fmean(differences), stdev(differences)
    if max(differences) - min(differences) <= noise:
        spread = 0.0
    root = math.sqrt(1 / n + ratio)
    t, p, half = _ratio(mean, spread, noise) / root, math.nan, 0.0
    if spread:
        p = two_sided(t, n - 1)
        half = bound(LEVEL, n - 1) * spread * root
    w = signed_rank(differences, noise)
    return Paired(n, mean, mean - half, mean + half, t, p, w, _ratio(mean, spread, noise), math.nan)


def signed_rank(differences: Sequence[float], noise: float = 0.0) -> float:
    """Return the two-sided p of Wilcoxon's signed-rank test, over all signs of the differences' own ranks.

    As Wilcoxon had it, differences of 0 are left out; 1 where none is left. Unlike tables of the statistic it is exact
    with equal differences too. With more than `EXACT` that are not 0, the sum of positive ranks counts as normal, with
    the mean and the variance that it has over all signs, sum(r) / 2 and sum(r^2) / 4.
    """
    kept = sorted((d for d in differences if abs(d) > noise), key=abs)
    ranks: list[int] = []  # doubled, so that mean ranks of equal differences are integers
    while len(ranks) < len(kept):
        first = len(ranks)
        same = sum(1 for d in kept[first:] if abs(d) - abs(kept[first]) <= noise)
        ranks += [2 * first + same + 1] * same
    positive = sum(rank for rank, d in zip(ranks, kept, strict=True) if d > 0)
    if len(ranks) > EXACT:
        return math.erfc(abs(positive - sum(ranks) / 2) / math.sqrt(sum(rank**2 for rank in ranks) / 2))
    counts = [1]  # of the sign patterns, how many have this sum of positive ranks
    for rank in ranks:
        longer = counts + [0] * rank
        for at, count in enumerate(counts):
            longer[at + rank] += count
        counts = longer
    tail = min(sum(counts[: positive + 1]), sum(counts[positive:]))
    return min(1.0, 2 * tail / 2 ** len(kept))


def hedges(df: int) -> float:
    """Return Gamma(df/2) / (sqrt(df/2) Gamma((df-1)/2)), which makes a standardised mean unbiased; nan below two."""
    if df < 2:
        return math.nan
    return math.exp(math.lgamma(df / 2) - math.lgamma((df - 1) / 2)) / math.sqrt(df / 2)


def corrected(tests: Sequence[Paired | None]) -> list[float]:
    """Return p after Holm's correction over a family, nan where there is no test.

    Differences that are all equal have no p. Their comparison was named with the others, so it counts, with a p of 1.
    """
    return holm([math.nan if of is None else 1.0 if of.is_constant else of.p for of in tests])


def holm(ps: Sequence[float]) -> list[float]:
    """Return Holm's step-down adjusted p of a family; nan stays nan and does not count as a test."""
    order = sorted((p, at) for at, p in enumerate(ps) if not math.isnan(p))
    adjusted, largest = [math.nan] * len(ps), 0.0
    for done, (p, at) in enumerate(order):
        largest = max(largest, min(1.0, (len(order) - done) * p))
        adjusted[at] = largest
    return adjusted


@dataclass(frozen=True)
class Ranking:
    """Mean ranks over blocks (1 is best), Friedman's test and Nemenyi's critical difference."""

    ranks: Mapping[str, float]
    """From the best mean rank to the worst."""
    blocks: int
    chi2: float
    """Friedman's statistic, corrected for ties; nan for two methods, or where all tie."""
    p: float
    critical: float
    """Mean ranks this far apart or farther differ at the 5 % level."""

    @property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        """Return groups of methods that do not differ significantly, best first, each as large as it can be.

        One group where Friedman's test finds no difference at the 5 % level; of two, the critical difference decides.
        """
        names = list(self.ranks)
        if len(names) > 2 and not self.p < LEVEL:
            return (tuple(names),)
        groups: list[tuple[str, ...]] = []
        last = -1
        for i, name in enumerate(names):
            near = [j for j in range(i, len(names)) if self.ranks[names[j]] - self.ranks[name] < self.critical]
            if near[-1] > last:  # else the group is a part of the one before
                last = near[-1]
                groups.append(tuple(names[i : last + 1]))
        return tuple(groups)


def ranking(blocks: Sequence[Mapping[str, float]]) -> Ranking:
    """Rank methods by numbers of which larger is better; a block is one comparison of all of them.

    q of the critical difference q sqrt(k (k + 1) / (6 N)) is the studentised range's quantile for k methods and
    infinitely many degrees of freedom, over sqrt(2). Raises ValueError without a block, for less than two methods, or
    where a block lacks one or has nan.
    """
    if not blocks or len(blocks[0]) < 2:
        raise ValueError("a ranking needs a block and two methods")
    names = list(blocks[0])
    rows = [[block.get(name, math.nan) for name in names] for block in blocks]
    if any(set(block) != set(names) for block in blocks) or any(math.isnan(v) for row in rows for v in row):
        raise ValueError("every block needs a number of every method")
    from scipy import stats

    k, n = len(names), len(blocks)
    each = [[float(r) for r in stats.rankdata([-v for v in row])] for row in rows]
    means = {name: fmean(row[at] for row in each) for at, name in enumerate(names)}
    chi2 = p = math.nan
    if k > 2 and any(len(set(row)) > 1 for row in each):
        chi2, p = map(float, stats.friedmanchisquare(*zip(*each, strict=True)))
    q = float(stats.studentized_range.ppf(1 - LEVEL, k, math.inf)) / math.sqrt(2)
    ordered = dict(sorted(means.items(), key=lambda item: item[1]))
    return Ranking(ordered, n, chi2, p, q * math.sqrt(k * (k + 1) / (6 * n)))


def p_text(p: float) -> str:
    """Format a p as people read it: '0.0067', '<0.0001', 'nan'."""
    return f"{p:.4f}" if math.isnan(p) or p >= 0.0001 else "<0.0001"


def p_is(p: float) -> str:
    """Format a p in a sentence: 'p = 0.0067', 'p <0.0001'."""
    text = p_text(p)
    return f"p {text}" if text.startswith("<") else f"p = {text}"


def _ratio(mean: float, spread: float, noise: float) -> float:
    """Return mean / spread, where a spread of 0 gives an infinite number of the mean's sign, or nan for a mean of 0."""
    if spread:
        return mean / spread
    return math.nan if abs(mean) <= noise else math.copysign(math.inf, mean)


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


@dataclass(frozen=True)
class Tested:
    """One comparison of a family: its test (None without two finite gains), Holm's p over the family, the verdict."""

    change: Paired | None
    holm: float
    ratio: float
    verdict: Verdict


def family(
    gains: Mapping[Key, Sequence[float]], ratios: Mapping[Key, float], smallest: float, reasons: Mapping[Key, str] = {}
) -> dict[Key, Tested]:
    """Test each comparison's gains in percent over seeds, and judge them with Holm's correction over all."""
    found = {  # rounded as numbers of about 100 are
        key: against_zero(of, NOISE * 100, ratios[key]) if len(of) > 1 and all(map(math.isfinite, of)) else None
        for key, of in gains.items()
    }
    return {
        key: Tested(of, p, ratios[key], judge(of, smallest, p, reasons.get(key, "")))
        for (key, of), p in zip(found.items(), corrected([*found.values()]), strict=True)
    }


def detectable_gain(half: float, n: int) -> float:
    """Return the gain that a two-sided t-test at 5 % over n seeds detects with 80 % power (`half` its interval)."""
    return shift(n - 1) * half / bound(LEVEL, n - 1)


@cache
def shift(freedom: int) -> float:
    """Return that mean in standard errors: T of the noncentral t distribution is above the bound with 80 % then."""
    from scipy import optimize, special

    t = bound(LEVEL, freedom)  # scipy's own inverse, nctdtrinc, is right to 8 digits only
    return float(optimize.brentq(lambda mean: special.nctdtr(freedom, mean, t) - (1 - POWER), 0, 2 * t + 10))
