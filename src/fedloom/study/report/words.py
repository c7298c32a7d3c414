"""What pages say in words: plain functions over numbers, each with a sentence, or '' where there is nothing to say."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from fedloom.study.tables.estimate import Estimate
from fedloom.study.tables.results import SPOKEN

STILL = 0.05
"""Percent a round below which a loss counts as standing still."""
NOTHING = 1e-9
"""Percent by which rounding alone moves a mean change away from 0."""
SQUARE = 0.05
"""Cosine up to which two updates count as neither with nor against each other."""
_NAMED = 4  # names in a sentence, at most


def number(value: float) -> str:
    """As comparisons write it; '–' for nan."""
    return "–" if math.isnan(value) else f"{value:.2f}" if abs(value) >= 10 else f"{value:.4f}"  # noqa: RUF001


def percent(value: float) -> str:
    """A change with its sign; '–' for nan."""
    return "–" if math.isnan(value) else f"{value:+.2f}\u00a0%"  # noqa: RUF001


def share(value: float) -> str:
    """A share as a percentage: '45 %'."""
    return f"{100 * value:.0f}\u00a0%"


def count(number: int, what: str) -> str:
    """'1 client', '2 clients'."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def listed(names: Sequence[str], most: int = _NAMED) -> str:
    """'a', 'a and b', 'a, b and c', 'a, b, c, d and 3 more'."""
    names = list(names)
    if len(names) > most + 1:  # a name takes no more room than '1 more'
        names = [*names[:most], f"{len(names) - most} more"]
    return " and ".join(part for part in (", ".join(names[:-1]), *names[-1:]) if part)


def rounded(value: float) -> str:
    """Two digits that count, or all before the point: '0.31', '4', '12', '120'."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    places = max(0, 1 - math.floor(math.log10(abs(value))))
    text = f"{value:.{places}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def change(percent: float) -> str:
    """'+11 %', with a true minus and no more than two decimals; '' for nan."""
    if math.isnan(percent):
        return ""
    size = rounded(abs(percent) if abs(percent) >= 0.1 else round(abs(percent), 2))
    sign = "±" if size == "0" else "+" if percent > 0 else "\u2212"
    return f"{sign}{size}\u00a0%"


def interval(of: Estimate) -> str:
    """'4 to 18', '' where there is none."""
    if math.isnan(of.half):
        return ""
    places = (
        0 if of.half == 0 else max(0, 1 - math.floor(math.log10(of.half)))
    )  # no end is finer than the interval is wide
    ends = (round(end, places) + 0.0 for end in (of.mean - of.half, of.mean + of.half))  # + 0.0: no minus before a 0
    return " to ".join(f"{end:.{places}f}".replace("-", "\u2212") for end in ends)


def told(of: Estimate | None) -> bool | None:
    """Whether an interval leaves out 0; None where there is no interval."""
    return None if of is None or math.isnan(of.half) else abs(of.mean) > of.half


def metric(name: str) -> str:
    """A metric as papers write it, with its unit: 'RMSE in metres', 'accuracy'."""
    spoken, unit = SPOKEN.get(name, (name, ""))
    return f"{spoken} in {unit}" if unit else spoken


def axis(name: str, direction: str) -> str:
    """'mIoU, higher is better'."""
    return f"{metric(name)}, {'higher' if direction == 'max' else 'lower'} is better"


def ahead(rounds: int, base: str, changes: Mapping[str, float]) -> str:
    """For how many clients it was worth it; `changes` is client -> percent, positive is better."""
    known = sorted(v for v in changes.values() if not math.isnan(v))
    if not known:
        return f"After {count(rounds, 'round')} no client can be held against {base}."
    gained = sum(v > NOTHING for v in known)
    middle = (known[(len(known) - 1) // 2] + known[len(known) // 2]) / 2
    are = "is" if gained == 1 else "are"
    who = "every client is" if gained == len(known) > 1 else f"{gained} of {count(len(known), 'client')} {are}"
    who = "no client is" if not gained else "the only client is" if gained == len(known) == 1 else who
    return f"After {count(rounds, 'round')} {who} ahead of {base} (median {change(middle)})."


def came_out(rounds: int, values: Sequence[tuple[str, str, str]]) -> str:
    """What came out where there is no base; from (task, metric, number)."""
    each = [f"{value} {metric(name)} on {task}" for task, name, value in values]
    return f"After {count(rounds, 'round')}: {listed(each)}." if each else ""


def told_for(by_task: Mapping[str, Estimate], base: str) -> str:
    """On which tasks a change is told apart from 0, for better or worse, and on which it is not."""
    better, worse, open_ = _sides(by_task)
    parts = [f"clearly better on {listed(better)}"] if better else []
    parts += [f"clearly worse on {listed(worse)}"] if worse else []
    parts += [f"not told apart from {base} on {listed(open_)}"] if open_ else []
    return _sentence("; ".join(parts))


def grid_told(deltas: Mapping[str, Estimate], references: Collection[str]) -> str:
    """Which methods of a grid are told apart from what they are held against."""
    base = listed(sorted(references)) or "their base"
    better, worse, open_ = _sides(deltas)
    parts = [f"{_are(better)} clearly better than {base}"] if better else []
    parts += [f"{_are(worse)} clearly worse" + ("" if parts else f" than {base}")] if worse else []
    parts += [f"{_are(open_)} not told apart from {'it' if parts else base}"] if open_ else []
    if not parts and deltas:
        return f"No method is told apart from {base}: one seed has no interval."
    seeds = max((of.n for of in deltas.values()), default=0)
    own = f", each by its own interval; fedloom table --tests corrects for {len(deltas)}" if len(deltas) > 1 else ""
    return f"{'; '.join(parts)} ({count(seeds, 'seed')}{own})." if parts else ""


def _sides(by_name: Mapping[str, Estimate]) -> tuple[list[str], list[str], list[str]]:
    """Names of what is better, of what is worse, and of what is not told apart."""
    better = [name for name, of in by_name.items() if told(of) and of.mean > 0]
    worse = [name for name, of in by_name.items() if told(of) and of.mean < 0]
    return better, worse, [name for name, of in by_name.items() if told(of) is False]


def _are(names: Sequence[str]) -> str:
    return f"{listed(names)} {'is' if len(names) == 1 else 'are'}"


def mixed_up(shares: Mapping[tuple[str, str], float], most: int = 3) -> str:
    """The pairs of classes (truth, answer) that are mixed up most, with the share of the truth."""
    worst = sorted(shares, key=lambda pair: (-shares[pair], pair))[:most]
    named = [f"{truth} for {answer} ({share(shares[truth, answer])} of all {truth})" for truth, answer in worst]
    return f"Most often mistaken: {listed(named)}." if named else ""


def alike(most: Sequence[tuple[str, ...]], least: Sequence[tuple[str, ...]]) -> str:
    """The most and the least related pair of tasks: of what each metric says, that which most of them do."""
    parts = []
    for which, pairs in (("most", most), ("least", least)):
        if pairs:
            pair, times = Counter(pairs).most_common(1)[0]
            by = "" if len(pairs) == 1 else f" ({times} of {len(pairs)} metrics say so)"
            parts.append(f"{which} alike are {listed(pair)}{by}")
    return _sentence(", ".join(parts))


def about_changes(base: str) -> str:
    """What the numbers of a tile are."""
    return (
        f"A change is the mean over the task's clients, each against itself with {base}; in brackets its 95 % "
        f"t-interval over them. The dashed line is {base}."
    )


def losers(changes: Mapping[str, float]) -> str:
    """Who pays, the worst first."""
    lost = sorted((v, name) for name, v in changes.items() if v < -NOTHING)
    if not lost:
        return ""
    each = [f"{name} lost {rounded(-v)}\u00a0%" for v, name in lost[:2]]
    more = len(lost) - len(each)
    return listed([*each, *([f"{more} more lost less"] if more else [])]) + "."


def trend(slope: float) -> str:
    """What the training loss does in the last rounds; `slope` in percent a round, nan where it is not known."""
    if math.isnan(slope):
        return ""
    if abs(slope) < STILL:
        return "The training loss stands still."
    return f"The training loss {'still falls' if slope < 0 else 'rises'} by {rounded(abs(slope))}\u00a0% a round."


def conflict(groups: Mapping[str, float], pair: tuple[str, str, float] | None) -> str:
    """Where updates pull against each other most (group -> share of pairs), and who does (with their mean cosine)."""
    text = ""
    if groups:
        where = max(groups, key=lambda name: groups[name])
        text = (
            f"Most in each other's way: {where}, where {share(groups[where])} of the pairs of updates "
            "pull against each other."
            if groups[where] > 0
            else "No two updates pull against each other."
        )
    if pair is not None and pair[2] < -SQUARE:
        text += f" Furthest apart are {pair[0]} and {pair[1]} (mean cosine \u2212{-pair[2]:.2f})."
    elif pair is not None:
        text += " No two clients pull against each other over all layers and rounds."
    return text.strip()


def held_against(base: str, found: bool, named: bool) -> str:
    """What a page is held against where nobody said so, and how to get a better base; `named`: the page names it."""
    if not base:
        return (
            "No run of Local with the same clients and data is beside this one to hold it against: train one with "
            "method=local, the other keys the same, into a folder beside this one, or name a run with --base."
        )
    if found and base == "constant":
        return (
            "Held against the answer without any input, for no run of Local with the same clients and data is beside "
            "this one: train one with method=local, the other keys the same."
        )
    return f"Held against {base}, which was found beside this run." if found and not named else ""


def worst_tasks(named: Sequence[tuple[str, str, str, str]]) -> str:
    """From (metric, split, task, its number)."""
    tasks = [f"{metric} on {split}: {task} ({value})" for metric, split, task, value in named]
    return f"Worst task by {'; by '.join(tasks)}." if tasks else ""


def lowest(changes: Mapping[tuple[str, str], float], split: str) -> str:
    """The task that gained least of several; (task, metric) -> percent."""
    if len(changes) < 2:
        return ""
    task, name = min(changes, key=lambda key: changes[key])
    return f"Lowest change on {split}: {task} ({name}), {percent(changes[task, name])}."


def deltas(base: str, each: Sequence[tuple[str, str, str]]) -> str:
    """From (change, split, how many tasks)."""
    parts = [f"{change} on {split} (mean change of {tasks})" for change, split, tasks in each]
    return f"Δm against {base}: {'; '.join(parts)}. Positive is better."


def hurt(worse: int, of: int, split: str) -> str:
    """How many clients have a worse model for some task of theirs."""
    return f"{worse} of {of} clients have a worse model than the base's for a task of theirs ({split})."


def hurt_over_all(means: Mapping[str, float]) -> str:
    """How many lost over all their tasks; client -> mean change in percent."""
    worse = sum(mean < -NOTHING for mean in means.values())
    return f"Over all tasks of a client, {worse} of {len(means)} lost: their mean change is below 0." if means else ""


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + "." if text else ""
