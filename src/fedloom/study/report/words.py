"""The sentences of pages: plain functions over numbers; '' where there is nothing to say."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from statistics import fmean, median
from typing import NamedTuple

from fedloom.study.results import SPOKEN
from fedloom.study.statistics import Verdict

STILL = 0.05
"""Percent per round below which a loss counts as unchanged."""
NOTHING = 1e-9
"""Percent by which rounding alone moves a mean change away from 0."""
SQUARE = 0.05
"""Cosine up to which two updates count as unrelated."""
_NAMED = 4  # names in a sentence, at most


_FOLDER = re.compile(r"(^|: |- )(['\"]?)(?:~|[A-Za-z]:)?[\\/](?:.*[\\/])?", re.MULTILINE)


def without_folders(text: str) -> str:
    """Return YAML, or a value, with the last part alone of each absolute path: the folders are the user's own."""
    return _FOLDER.sub(r"\1\2", text)


def number(value: float) -> str:
    """Format a number as comparisons write it; '–' for nan."""
    return "–" if math.isnan(value) else f"{value:.2f}" if abs(value) >= 10 else f"{value:.4f}"  # noqa: RUF001


def percent(value: float) -> str:
    """Format a change with its sign; '–' for nan."""
    return "–" if math.isnan(value) else f"{value:+.2f}\u00a0%"  # noqa: RUF001


def share(value: float) -> str:
    """Format a share as a percentage: '45 %'."""
    return f"{100 * value:.0f}\u00a0%"


def count(number: int, what: str) -> str:
    """Return '1 client', '2 clients'."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def listed(names: Sequence[str], most: int = _NAMED) -> str:
    """Return 'a', 'a and b', 'a, b and c', 'a, b, c, d and 3 more'."""
    names = list(names)
    if len(names) > most + 1:  # a name takes no more room than '1 more'
        names = [*names[:most], f"{len(names) - most} more"]
    return " and ".join(part for part in (", ".join(names[:-1]), *names[-1:]) if part)


def rounded(value: float) -> str:
    """Format two digits that count, or all before the point: '0.31', '4', '12', '120'."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    places = max(0, 1 - math.floor(math.log10(abs(value))))
    text = f"{value:.{places}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def change(percent: float) -> str:
    """Format '+11 %', with a true minus and at most two decimals; '' for nan."""
    if math.isnan(percent):
        return ""
    size = rounded(abs(percent) if abs(percent) >= 0.1 else round(abs(percent), 2))
    sign = "±" if size == "0" else "+" if percent > 0 else "\u2212"
    return f"{sign}{size}\u00a0%"


class Spread(NamedTuple):
    """The changes of several clients, in percent."""

    mean: float
    low: float
    high: float


def spread_of(changes: Iterable[float]) -> Spread | None:
    """Return mean, smallest and largest of the changes that are known; None where none is."""
    known = [value for value in changes if not math.isnan(value)]
    return Spread(fmean(known), min(known), max(known)) if known else None


def ends(of: Spread) -> str:
    """Format the smallest and the largest change; '' where they are equal."""
    return "" if of.low == of.high else f"{change(of.low)} to {change(of.high)}"


def metric(name: str, unit: str = "") -> str:
    """Return a metric as papers write it, with its unit: 'RMSE in metres', 'accuracy'."""
    spoken = SPOKEN.get(name, name)
    return f"{spoken} in {unit}" if unit else spoken


def axis(name: str, direction: str, unit: str = "") -> str:
    """Return 'mIoU, higher is better'."""
    return f"{metric(name, unit)}, {'higher' if direction == 'max' else 'lower'} is better"


def ahead(rounds: int, base: str, changes: Mapping[str, float]) -> str:
    """Say how many clients improve on the baseline; `changes` is client -> percent, positive is better."""
    known = [v for v in changes.values() if not math.isnan(v)]
    after = f"After {count(rounds, 'round')}"
    if not known:
        return f"{after} no client can be compared with {base}."
    gained = sum(v > NOTHING for v in known)
    who = f"{gained} of {count(len(known), 'client')} {'is' if gained == 1 else 'are'}"
    if gained in (0, len(known)):
        who = "no client is" if not gained else "every client is" if gained > 1 else "the only client is"
    return f"{after} {who} better than with {base} (median {change(median(known))})."


def beats(rounds: int, better: Mapping[str, bool]) -> str:
    """Say on which tasks a run is better than the constant prediction; '' without tasks."""
    won, lost = ([task for task, wins in better.items() if wins is which] for which in (True, False))
    if not better:
        return ""
    on = f"on {listed(won)}" + (f", but not on {listed(lost)}" if lost else "") if won else "on no task"
    return f"After {count(rounds, 'round')} the model is better than the constant prediction {on}."


def of_methods(verdicts: Mapping[str, Verdict], references: Collection[str], smallest: float, seeds: int) -> str:
    """Say which methods of a grid gain over their baseline: the three verdicts in a sentence."""
    base = listed(sorted(references)) or "their base"
    parts = []
    for label, rest in (
        ("yes", f"better than {base}"),
        ("no, worse", f"worse than {base}"),
        ("no", f"not better than {base} by {smallest:g} % or more"),
    ):
        names = [name for name, verdict in verdicts.items() if verdict.label == label]
        parts += [f"{_are(names)} {rest}"] if names else []
    if open_ := [name for name, verdict in verdicts.items() if verdict.answer == "cannot tell"]:
        parts.append(f"the seeds cannot tell whether {_are(open_)} better than {base}")
    if not parts:
        return ""
    own = f", after Holm's correction over {len(verdicts)}" if len(verdicts) > 1 else ""
    return f"{'; '.join(parts)} ({count(seeds, 'seed')}{own})."


def _are(names: Sequence[str]) -> str:
    return f"{listed(names)} {'is' if len(names) == 1 else 'are'}"


def mixed_up(shares: Mapping[tuple[str, str], float]) -> str:
    """Say which classes (truth, prediction) are confused most, with the share of the truth."""
    worst = sorted(shares, key=lambda pair: (-shares[pair], pair))[:3]
    named = [f"{truth} for {answer} ({share(shares[truth, answer])} of all {truth})" for truth, answer in worst]
    return f"Most often mistaken: {listed(named)}." if named else ""


def alike(most: Sequence[tuple[str, ...]], least: Sequence[tuple[str, ...]]) -> str:
    """Say which pair of tasks most metrics call the most related, and which the least."""
    parts = []
    for which, pairs in (("most", most), ("least", least)):
        if pairs:
            pair, times = Counter(pairs).most_common(1)[0]
            by = "" if len(pairs) == 1 else f" ({times} of {len(pairs)} metrics say so)"
            parts.append(f"{which} alike are {listed(pair)}{by}")
    text = ", ".join(parts)
    return f"{text[:1].upper()}{text[1:]}." if text else ""


def trend(slope: float) -> str:
    """Say how the training loss changes in the last rounds; `slope` in percent per round, nan for unknown."""
    if math.isnan(slope):
        return ""
    if abs(slope) < STILL:
        return "The training loss no longer changes."
    return f"The training loss {'still falls' if slope < 0 else 'rises'} by {rounded(abs(slope))}\u00a0% per round."


def conflict(groups: Mapping[str, float], pair: tuple[str, str, float] | None) -> str:
    """Say in which layers updates conflict most (group -> share of pairs), and which two (with their mean cosine)."""
    text = ""
    if groups:
        where = max(groups, key=lambda name: groups[name])
        text = f"Most conflict: {where} ({share(groups[where])} of pairs of updates)."
        text = text if groups[where] > 0 else "No two updates conflict."
    if pair is not None and pair[2] < -SQUARE:
        text += f" Furthest apart are {pair[0]} and {pair[1]} (mean cosine \u2212{-pair[2]:.2f})."
    elif pair is not None:
        text += " No two clients conflict over all layers and rounds."
    return text.strip()
