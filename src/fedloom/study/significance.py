"""Paired tests of runs and of grids over seeds, or over clients, as `--tests` shows them. Free of torch.

The replicate is the seed: a run of a method against the run of its base with the same seed and the same examples. Over
clients, a pair is a client under both methods, with its means over the seeds.

Ranks of methods over tasks and seeds, as `--ranks` shows them. Free of torch.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from statistics import fmean
from typing import Any, Literal

from fedloom.core.errors import StateError
from fedloom.core.grouping import grouped
from fedloom.federation.runs.reader import Run, TaskMetric
from fedloom.study.output import HasTable, Records, Table, Value
from fedloom.study.results import STILL, Combination, Results, Side, same_data
from fedloom.study.statistics import (
    EXACT,
    LEVEL,
    NOISE,
    Paired,
    Ranking,
    Verdict,
    against_zero,
    corrected,
    delta_m,
    delta_terms,
    judge,
    p_is,
    p_text,
    paired,
    ranking,
)

CSV = (
    *("data", "method", "base", "task", "metric", "direction", "over", "n", "seeds", "gain", "ci95_low", "ci95_high"),
    *("gain_percent", "t", "df", "p", "p_holm", "family", "wilcoxon_p", "wilcoxon_least_p", "d_z", "g_z", "d_av"),
    *("g_av", "clients_better", "worst_client", "split", "state", "verdict", "smallest", "detectable"),
)
Numbers = Mapping[Any, Mapping[str, float]]
"""Seed, or client -> task -> number."""
Over = Literal["seeds", "clients"]
"""The pairs of a test."""
WORDS: dict[Over, dict[str, str]] = {
    "seeds": {
        "title": "paired tests over seeds",
        "about": "n seeds are the replicates",
        "pair": "each seed against the base's same seed",
        "few": "a test needs two seeds that both have",
        "none": "a seed in common",
        "undefined": "no number at seed",
        "same": "the same difference at every seed",
        "holders": "Their means are over different clients",
    },
    "clients": {
        "title": "paired tests over clients",
        "about": "n clients are the pairs, a client's number is its mean over the seeds that both methods have",
        "pair": "each client against itself with the base",
        "few": "a test needs two clients with numbers of both",
        "none": "a client with numbers in common",
        "undefined": "no number of client",
        "same": "the same difference for every client",
        "holders": "Only clients with numbers of both are paired",
    },
}
FORMULAS = (
    "Gain: how much better than the base, value - base for ↑ and base - value for ↓, {pair}; gain %: in percent of "
    "the base's size; Δm: the mean of gain % over tasks.",
    "[ ]: 95 % t-interval of the mean gain. t, p: two-sided paired t-test, t = mean / (sd / sqrt n), n - 1 degrees of "
    "freedom, for gains that are normal, which few {over} cannot show. Wilcoxon: two-sided signed-rank test, exact "
    f"up to {EXACT} pairs; in brackets the least p that n {{over}} admit, 2^(1-n).",
    "d_z = mean gain / sd of the gains; g_z = d_z Gamma(f/2) / (sqrt(f/2) Gamma((f-1)/2)), f = n - 1, is Hedges' "
    "correction, which two {over} do not have; d_av = mean gain / sqrt((sd^2 + sd_base^2) / 2); n - 1 in every sd.",
)
VERDICTS = (
    "Verdict on a gain of {smallest:g} % or more: yes, if p after Holm is at most 0.05 and the mean is that large; "
    "no, if the interval excludes such a gain; else cannot tell, with the gain that these seeds detect with 80 % power."
)
CORRECTED = (
    "Each seed redraws the test part from one pool, so the t-test is the corrected resampled one of Nadeau and Bengio: "
    "variance (1/n + {ratio:.3g}) sd^2, where {ratio:.3g} is the smaller of its two parts over the larger one."
)
OF_CLIENTS = (
    "Clients better: of the clients with the task, those who gain by their own number; worst client: the least gain of "
    "a client; both are means over seeds."
)
NOT_TESTED = " Clients of a run are trained together, so they are no replicates: no test here counts them."
NOT_INDEPENDENT = (
    "Clients of one run share a model, or mix their models, so their gains are not independent and p is smaller than "
    "it should be. It speaks about these clients in these runs, not about other seeds: for those, test over seeds."
)


@dataclass(frozen=True)
class Contrast:
    """One line: a method against its base on a task, or over tasks (`row` None)."""

    data: str
    method: str
    base: str
    row: TaskMetric | None
    seeds: tuple[int, ...]
    gains: Mapping[Any, float] = field(default_factory=dict)
    """Seed, or client -> improvement, in the metric's units, or in percent over tasks."""
    percent: float = math.nan
    """Mean improvement in percent of the base; nan where the base is 0."""
    change: Paired | None = None
    state: Literal["tested", "refused", "too few", "undefined"] = "tested"
    reason: str = ""
    better: float = math.nan
    """Share of the clients that gain, mean over seeds."""
    worst: float = math.nan
    """Least gain of a client, mean over seeds."""
    same_holders: bool = True
    """True if the clients with the task are the same with both."""
    holm: float = math.nan
    smallest: float = 0.0
    """The smallest gain that counts, in the unit of the gains."""
    verdict: Verdict | None = None
    """None for tests over clients, which are not independent."""

    @property
    def label(self) -> str:
        """Return the data set and the method."""
        return " / ".join(part for part in (self.data, self.method) if part)

    @property
    def mean(self) -> float:
        """Return the mean gain over seeds, or over clients."""
        return fmean(self.gains.values())


@dataclass(frozen=True)
class Contrasts(HasTable):
    """The result of `contrasts`; `notes` say what to know before reading the numbers."""

    title: str
    tests: tuple[Contrast, ...]
    split: str
    notes: tuple[str, ...] = ()
    over: Over = "seeds"
    smallest: float = 1.0
    """The smallest change in percent that counts."""

    @property
    def families(self) -> dict[str, int]:
        """Return the family of p that were corrected together -> its size."""
        tested = [test.row is None for test in self.tests if test.change is not None]
        return {"Δm": tested.count(True), "tasks": tested.count(False)}

    def as_table(self) -> Table:
        """Return one line per method and task, and one for all tasks together."""
        many, bases = len({t.data for t in self.tests}) > 1, {t.base for t in self.tests}
        verdicts = ("verdict",) if self.over == "seeds" else ()
        head = (
            *("method", "task", "n", "gain", "95 % interval", *verdicts),
            *("gain %", "t", "p", "p Holm", "Wilcoxon p (least)"),
            *("d_z", "g_z", "d_av", "clients better", "worst client"),
        )
        lines = []
        for t in self.tests:
            name = (t.label if many else t.method) + (f" vs {t.base}" if len(bases) > 1 else "")
            f = t.change
            numbers: list[str] = [f"[{_signed(f.low)}, {_signed(f.high)}]" if f else t.state]
            if t.verdict is not None:
                numbers.append(t.verdict.in_words(" %" if t.row is None else ""))
            numbers += ["-" if t.row is None or math.isnan(t.percent) else f"{t.percent:+.2f}"]
            if f is None:
                numbers += ["-"] * 7
            else:
                numbers += [f"{f.t:.2f}", p_text(f.p), p_text(t.holm), f"{p_text(f.wilcoxon)} ({p_text(f.least)})"]
                numbers += [f"{f.d_z:.2f}", "-" if f.n < 3 else f"{f.g_z:.2f}"]
                numbers += ["-" if t.row is None else f"{f.d_av:.2f}"]
            of_clients = ["-", "-"] if math.isnan(t.better) else [f"{t.better:.0%}", _signed(t.worst)]
            task = "Δm %" if t.row is None else str(t.row)
            lines.append((name, task, str(len(t.gains)), _signed(t.mean), *numbers, *of_clients))
        overall, of_tasks = self.families.values()
        family = f"Holm: over the tests of Δm ({overall}) and, apart from these, over those of tasks ({of_tasks})."
        clients: tuple[str, ...] = (NOT_INDEPENDENT,) if self.over == "clients" else ()
        if any(not math.isnan(t.better) for t in self.tests):
            clients = (OF_CLIENTS + (NOT_TESTED if self.over == "seeds" else ""), *clients)
        against = f", against {next(iter(bases))}" if len(bases) == 1 else ""
        words = WORDS[self.over]
        about = f"{self.split} split; {words['about']}."
        formulas = (text.format(over=self.over, **words) for text in FORMULAS)
        said = (VERDICTS.format(smallest=self.smallest),) if self.over == "seeds" else ()
        return Table(
            f"{self.title}{against}", head, tuple(lines), (about, *said, *formulas, family, *clients, *self.notes)
        )

    def records(self) -> Records:
        """Return the same lines in full precision."""
        lines: list[tuple[Value, ...]] = []
        for t in self.tests:
            row = ("", "delta_m", "max") if t.row is None else (t.row.task, t.row.metric, t.row.direction)
            f = t.change
            numbers: list[float] = [math.nan] * 14
            if f is not None:
                numbers = [f.low, f.high, t.percent, f.t, f.n - 1, f.p, t.holm]
                numbers += [self.families["Δm" if t.row is None else "tasks"], f.wilcoxon, f.least]
                numbers += [f.d_z, f.g_z, f.d_av, f.g_av]
            pairs = (self.over, len(t.gains), tuple(t.seeds))
            numbers += [t.better, t.worst]
            v = t.verdict
            found = ("", t.smallest, math.nan) if v is None else (v.label, t.smallest, v.detectable)
            lines.append((t.data, t.method, t.base, *row, *pairs, t.mean, *numbers, self.split, t.state, *found))
        return Records(CSV, lines)


def _signed(gain: float) -> str:
    """Return a gain as text; rounding of a mean of 0, such as 1e-17, is none."""
    return f"{0.0 if abs(gain) < NOISE else gain:+.4g}"


def contrasts(results: Results, over: Over = "seeds") -> Contrasts:
    """Test every method against the one that it is compared with, as a comparison or a grid's `delta` says.

    Numbers are those of the table, means over the clients with the task (or of a domain). Raises StateError where
    nothing is compared, and for tests over clients where the grid shows domains.
    """
    if over == "clients" and results.by_domain:
        raise StateError("the grid shows domains: tests over clients need 'show' to be tasks")
    if not results.pairs:
        raise StateError("a test needs two methods, and a grid needs 'delta', as in delta: base")
    lines, alone = [], []
    for key, named in results.pairs:
        side, base = results.sides[key], results.sides.get(named)
        tests = [] if base is None else _against(key[0], side, base, results, over)
        lines += tests
        alone += [] if tests else [" / ".join(part for part in (key[0], side.label) if part)]
    none = WORDS[over]["none"]
    if not lines:
        raise StateError(f"no method has {none} with the one it is compared with: tests compare runs of the same seed")
    notes = [*results.notes, *results.about_delta]
    notes += [f"Not compared, without {none} with their reference: {', '.join(alone)}."] if alone else []
    for of_tasks in (True, False):
        at = [i for i, test in enumerate(lines) if (test.row is not None) is of_tasks]
        for i, p in zip(at, corrected([lines[i].change for i in at]), strict=True):
            lines[i] = replace(lines[i], holm=p)
    if over == "seeds":
        moving = {(key[0], side.label): side.fall for key, side in results.sides.items() if side.is_moving}
        for i, test in enumerate(lines):
            rows = [row for row in results.rows[test.data] if row.task in results.directions(test.data)]
            reason = results.unfit(test.data, test.method, test.base, rows if test.row is None else [test.row])
            lines[i] = replace(test, verdict=judge(test.change, test.smallest, test.holm, reason))
        each = [f"{' / '.join(filter(None, key))} ({fall:.1f} %)" for key, fall in moving.items()]
        about = f"Not converged: the loss still falls by more than {STILL:g} % per tenth of the rounds"
        notes += [f"{about}: {', '.join(each)}."] if moving else []
    title = WORDS[over]["title"]
    title = f"{results.title}: {title}" if results.title else title.capitalize()
    notes += _notes(lines, results, over)
    return Contrasts(title, tuple(lines), results.split, tuple(notes), over, results.smallest)


def _against(data: str, one: Side, base: Side, results: Results, over: Over) -> list[Contrast]:
    """Return the lines of one method against its base: its tasks, and all that Delta counts together."""
    rows, by_client = results.rows[data], not results.by_domain
    seeds = [seed for seed in one.values if seed in base.values]
    if not seeds:
        return []
    reason = refusal(one, base, seeds)
    values: Numbers = {seed: one.values[seed] for seed in seeds}
    others: Numbers = base.values
    if over == "clients":
        values, others = of_clients(one, base, rows, seeds)
    ratio = one.ratio if over == "seeds" else 0.0
    directions = {row.task: row.direction for row in rows}
    both = {pair: {t: v for t, v in of.items() if t in directions and t in others[pair]} for pair, of in values.items()}
    if not both:
        return []
    tests = []
    for row in rows:
        mine = {pair: of[row.task] for pair, of in both.items() if row.task in of}
        if mine:
            theirs = {pair: others[pair][row.task] for pair in mine}
            measured = tuple(s for s in seeds if row.task in one.values[s] and row.task in base.values[s])
            level = fmean(map(abs, theirs.values())) * results.smallest / 100
            test = Contrast(data, one.label, base.label, row, measured, smallest=level)
            test = _of_task(test, mine, theirs, over, reason, ratio)
            if by_client:
                alike = all(holders(one.runs[s], row.task) == holders(base.runs[s], row.task) for s in measured)
                test = replace(test, same_holders=alike)
                sign = -1 if row.direction == "min" else 1
                gains = [[sign * (a - b) for a, b in _both(one, base, row, seed).values()] for seed in seeds]
                each = [of for of in gains if of and all(map(math.isfinite, of))]
                if any(len(set(of)) > 1 for of in each):  # else one number stands for all clients
                    better = fmean(sum(gain > 0 for gain in of) / len(of) for of in each)
                    test = replace(test, better=better, worst=fmean(map(min, each)))
            tests.append(test)
    excluded = results.excluded.get(data, ())
    counted = {pair: {task: v for task, v in of.items() if task not in excluded} for pair, of in both.items()}
    if not any(counted.values()):
        return tests
    deltas = {pair: delta_m(of, others[pair], directions) for pair, of in counted.items()}
    mean = fmean(deltas.values())
    test = Contrast(data, one.label, base.label, None, tuple(seeds), deltas, mean, smallest=results.smallest)
    # where one number stands for all clients, their Δm differ only because their tasks do
    reason = next((t.reason for t in tests if t.state == "refused"), "")
    # these are percentages, so they are rounded as numbers of about 100 are
    tested = _state(test, over, reason)
    return [*tests, tested or replace(test, change=against_zero(list(deltas.values()), NOISE * 100, ratio))]


def _of_task(
    test: Contrast, mine: Mapping[Any, float], theirs: Mapping[Any, float], over: Over, why: str, ratio: float
) -> Contrast:
    """Return the line of a task from the numbers of its pairs; `why` says why they cannot be tested."""
    assert test.row is not None
    task, sign = test.row.task, -1 if test.row.direction == "min" else 1
    values, others = [sign * v for v in mine.values()], [sign * v for v in theirs.values()]
    gains = {pair: sign * (mine[pair] - theirs[pair]) for pair in mine}
    terms = [delta_terms({task: mine[p]}, {task: theirs[p]}, {task: test.row.direction}).get(task) for p in mine]
    percent = math.nan if None in terms else fmean(term for term in terms if term is not None)
    test = replace(test, gains=gains, percent=percent)
    if not why and over == "clients" and len(mine) > 1 and all(len(set(of)) == 1 for of in (values, others)):
        why = "one number stands for all clients"
    return _state(test, over, why) or replace(test, change=paired(values, others, ratio))


def _state(test: Contrast, over: Over, reason: str) -> Contrast | None:
    """Return the line with the reason why nothing can be computed; None where it can."""
    if reason:
        return replace(test, state="refused", reason=reason)
    undefined = [str(pair) for pair, gain in test.gains.items() if not math.isfinite(gain)]
    if undefined:
        return replace(test, state="undefined", reason=f"{WORDS[over]['undefined']} {', '.join(undefined)}")
    if len(test.gains) < 2:
        return replace(test, state="too few", reason=WORDS[over]["few"])
    return None


def _notes(tests: Sequence[Contrast], results: Results, over: Over) -> list[str]:
    """Return what to know before reading the tests."""
    reasons: dict[str, list[str]] = defaultdict(list)
    for test in tests:
        if test.reason:
            task = "Δm" if test.row is None else test.row.task
            where = f"{test.label} ({task})" if test.state == "undefined" else test.label
            reasons[f"{test.state}: {test.reason}"].append(where)
    notes = [f"{', '.join(dict.fromkeys(names))}: {reason}." for reason, names in reasons.items()]
    zero = [t for t in tests if math.isnan(t.percent) and all(map(math.isfinite, t.gains.values()))]
    if names := [f"{t.label} ({t.row.task})" for t in zero if t.row]:
        notes.append(f"{', '.join(names)}: no gain %, and not in Δm where the base is 0, because it is 0 in some pair.")
    if others := dict.fromkeys(f"{test.method} and {test.base}" for test in tests if not test.same_holders):
        notes.append(f"Not the same clients have the task: {', '.join(others)}. {WORDS[over]['holders']}.")
    if any(test.change is not None and test.change.is_constant for test in tests):
        notes.append(f"p nan: {WORDS[over]['same']}, so nothing tells how much it varies; d_z is inf, or nan for 0.")
    counts = {len(test.seeds) for test in tests}
    if len(counts) > 1 or min(counts) < max(len(side.runs) for side in results.sides.values()):
        notes.append("Seeds that only one of two methods has are left out.")
    if (few := max((t.change.least for t in tests if t.change is not None), default=0)) > LEVEL:
        notes.append(f"The signed-rank test cannot reach p < {LEVEL} where n < 6: its least p is up to {few:g} here.")
    if over == "seeds":
        ratios = sorted({side.ratio for side in results.sides.values()} - {0})
        notes += [CORRECTED.format(ratio=ratio) for ratio in ratios]
        notes += _about_training(results.sides)
    return notes


def _about_training(sides: Mapping[Combination, Side]) -> list[str]:
    """Return notes on data sets whose seeds all have the same clients and examples."""
    notes = []
    for data in dict.fromkeys(data for data, *_ in sides):
        mine = [side for (name, *_), side in sides.items() if name == data]
        runs = [run for side in mine for run in side.runs.values()]
        hashes = {(run.info.get("partition_hash"), run.info.get("data_hash")) for run in runs}
        if max(len(side.runs) for side in mine) > 1 and len(hashes) == 1 and (None, None) not in hashes:
            where = f"{data}: all" if data else "All"
            notes.append(f"{where} seeds have the same clients and examples: p speaks about training alone.")
    return notes


def refusal(one: Side, base: Side, seeds: Sequence[int]) -> str:
    """Return why the seeds of two methods are not pairs, or not replicates; '' where they are both."""
    for seed in seeds:
        mine, theirs = one.runs[seed], base.runs[seed]
        if not same_data(mine, theirs):
            return f"not the same data set at seed {seed}"
        alike = mine.info.get("partition_hash") == theirs.info.get("partition_hash")
        if not alike and (_shares(mine) is None or _shares(mine) != _shares(theirs)):
            return f"not the same clients with the same examples at seed {seed}"
    for side in (one, base):
        measured = {seed: [line["metrics"] for line in side.runs[seed].rounds] for seed in seeds}
        for first, second in combinations(seeds, 2):
            if measured[first] == measured[second]:
                return (
                    f"{side.label} measured the same to the last digit at seeds {first} and {second}: "
                    "one run counted twice"
                )
    return ""


def _shares(run: Run) -> dict[str, tuple[list[int], list[int]]] | None:
    """Return client -> its examples for training and validation, whatever its tasks; None where not recorded."""
    file = run.folder / "partition.json"
    if not file.is_file():
        return None
    try:
        return {c["client"]: (c["train"], c["val"]) for c in json.loads(file.read_text("utf-8"))["clients"]}
    except (ValueError, KeyError, TypeError) as error:
        raise StateError(f"{file}: not a partition: {error}") from None


def holders(run: Run, task: str) -> set[str]:
    """Return the clients with the task."""
    return {client for client, info in run.info["clients"].items() if task in info["tasks"]}


def sites(runs: Mapping[int, Run]) -> dict[str, dict[int, str]]:
    """Return name -> seed -> client of sites that are the same at all seeds: the only client of a domain, under the
    domain's name whatever the client is called, or a client whose domain never changes."""
    domains = {s: [(c, about.get("domain")) for c, about in run.info["clients"].items()] for s, run in runs.items()}
    alone = all(len({d for _, d in of if d is not None}) == len(of) for of in domains.values())
    found = {seed: {d if alone else (c, d): c for c, d in of} for seed, of in domains.items()}
    same: set[Any] = set.intersection(*({*of} for of in found.values()))
    named = {key if alone else key[0]: {seed: of[key] for seed, of in found.items()} for key in same}
    return dict(sorted(named.items()))


def _both(one: Side, base: Side, row: TaskMetric, seed: int) -> dict[str, tuple[float, float]]:
    """Return client -> its numbers of a task with the one and with the other method, at a seed where it has both.

    A client whose labels do not determine a number, such as an AUC of one class, has none.
    """
    mine, theirs = one.clients[seed], base.clients[seed]
    both = {}
    for client in mine:
        if client in theirs and not any((row.task, row.metric) in of[client].without for of in (mine, theirs)):
            first, second = (of[client].values.get(row.task, {}).get(row.metric) for of in (mine, theirs))
            if first is not None and second is not None:
                both[client] = first, second
    return both


def of_clients(one: Side, base: Side, rows: Sequence[TaskMetric], seeds: Sequence[int]) -> tuple[Numbers, Numbers]:
    """Return, for each of the two methods, client -> task -> the mean over the seeds at which both have a number.

    A client that is the same site at all seeds has the site's name (`sites`).
    """
    same = sites({seed: one.runs[seed] for seed in seeds})
    names = {(seed, client): site for site, clients in same.items() for seed, client in clients.items()}
    values = grouped(
        (names.get((seed, client), client), (row.task, pair))
        for row in rows
        for seed in seeds
        for client, pair in _both(one, base, row, seed).items()
    )
    mine, theirs = (
        {
            client: {task: fmean(pair[at] for pair in of) for task, of in grouped(values[client]).items()}
            for client in sorted(values)
        }
        for at in (0, 1)
    )
    return mine, theirs


Blocks = Literal["seeds", "tasks"]
"""The blocks of a ranking: each task at each seed, or each task's mean over seeds."""

CSV_RANKS = ("method", "mean_rank", "groups", "methods", "blocks", "chi2", "df", "p", "critical_difference", "split")


@dataclass(frozen=True)
class Ranks(HasTable):
    """The result of `ranked`."""

    title: str
    ranking: Ranking
    split: str
    block: str
    """The meaning of a block."""
    notes: tuple[str, ...] = ()

    def as_table(self) -> Table:
        """Return one line per method, best first, with the groups that it belongs to."""
        r = self.ranking
        lines = tuple((name, f"{rank:.3f}", " ".join(map(str, self._groups(name)))) for name, rank in r.ranks.items())
        friedman = (
            "no Friedman test"
            if math.isnan(r.p)
            else f"Friedman's test chi2 = {r.chi2:.3f}, {len(r.ranks) - 1} degrees of freedom, {p_is(r.p)}"
        )
        about = (
            f"{self.split} split; mean rank over blocks ({self.block}), 1 is best, equal numbers share "
            f"their mean rank; {friedman}; Nemenyi's critical difference at 5 %: q sqrt(k (k + 1) / (6 N)) = "
            f"{r.critical:.3f} for methods k = {len(r.ranks)} and blocks N = {r.blocks}, q from the studentised range. "
            "Methods that share a group do not differ significantly."
        )
        return Table(self.title, ("method", "mean rank", "groups"), lines, (about, *self.notes))

    def records(self) -> Records:
        """Return one line per method, in full precision."""
        r = self.ranking
        test = (r.chi2, len(r.ranks) - 1, r.p, r.critical)
        lines = [(n, rank, self._groups(n), len(r.ranks), r.blocks, *test, self.split) for n, rank in r.ranks.items()]
        return Records(CSV_RANKS, lines)

    def _groups(self, name: str) -> tuple[int, ...]:
        return tuple(number for number, group in enumerate(self.ranking.groups, 1) if name in group)


def ranked(results: Results, blocks: Blocks = "seeds") -> Ranks:
    """Rank the methods over the blocks that every one has, of all data sets. Raises StateError for one method."""
    # (data set, task, seed or None) -> method -> its number there, of which larger is better
    by_block: dict[tuple[str, str, int | None], dict[str, float]] = defaultdict(dict)
    for (data, *_), side in results.sides.items():
        for row in results.rows[data]:
            sign = -1 if row.direction == "min" else 1
            each: dict[int | None, float] = {s: sign * by.get(row.task, math.nan) for s, by in side.values.items()}
            if blocks == "tasks":
                each = {None: fmean(each.values())}
            for seed, number in each.items():
                by_block[data, row.task, seed][side.label] = number
    names = list(dict.fromkeys(side.label for side in results.sides.values()))
    complete = [b for b in by_block.values() if len(b) == len(names) and all(map(math.isfinite, b.values()))]
    if len(names) < 2:
        raise StateError(f"ranks need two methods, found {', '.join(names)}")
    if not complete:
        need = "ranks need a block of which all methods have a number"
        raise StateError(f"{need}, found none among {len(by_block)}: {', '.join(names)}")
    result = ranking(complete)
    more = []
    if len(complete) < len(by_block):
        more.append(f"Blocks left out, because not every method has a number there: {len(by_block) - len(complete)}.")
    if blocks == "tasks":
        seeds = {(data, frozenset(side.values)) for (data, *_), side in results.sides.items()}
        if len(seeds) > len({data for data, *_ in results.sides}):
            more.append("The means are not over the same seeds for all methods.")
        more.append(
            "Tasks of one data set share its examples, and a run's tasks its model: blocks are not independent."
        )
    else:
        more.append(
            "Blocks are not independent: seeds of a task share its data set, and a run's tasks its model. So p and the "
            "critical difference are smaller than they should be; blocks of tasks (means over seeds) are stricter."
        )
    if len(names) > 2 and (len(complete) <= 10 or len(names) <= 5):
        more.append(
            f"Blocks {len(complete)}, methods {len(names)}: Friedman's chi2 is an approximation for more than 10 "
            "blocks and 5 methods, and few blocks show only large differences."
        )
    if len(names) > 2 and not result.p < LEVEL:
        more.append("Friedman's test finds no difference at 5 %, so no methods differ significantly.")
    block = "a task's mean over seeds" if blocks == "tasks" else "a task at a seed"
    block += " of a data set" if len({data for data, *_ in by_block}) > 1 else ""
    title = f"{results.title}: mean ranks" if results.title else "Mean ranks"
    return Ranks(title, result, results.split, block, (*results.notes, *more))
