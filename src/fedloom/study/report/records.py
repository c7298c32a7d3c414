"""The records of a run for its page: metrics, bytes, seconds, matrices of similarity and weights, events.

The agreement and the weights of updates, from a run's diagnostics.jsonl (see `rounds/diagnostics.py`).
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations, pairwise
from typing import Any

import numpy as np

from fedloom.core.errors import StateError
from fedloom.core.grouping import grouped, nested
from fedloom.core.lazy import need
from fedloom.federation.runs.reader import DIAGNOSTICS, Run, best_round, described, mean_of, number_of
from fedloom.federation.runs.recorded import check_record
from fedloom.study.output import span

Series = Mapping[int, float]
"""Round -> value."""
EVERYBODY = "all clients"
"""The name of the client where the files state none."""


PEERS = 200
"""Peers that are put into clusters, at most: more would take longer than a reader waits."""


@dataclass(frozen=True)
class Matrices:
    """One matrix per round, stored by its known entries, because there may be many clients."""

    name: str
    title: str
    rows: str
    """The meaning of a row."""
    columns: str
    names: tuple[str, ...]
    rounds: Mapping[int, Mapping[str, Mapping[str, float | None]]]
    """Round -> row -> column -> number."""
    marked: Mapping[int, Sequence[tuple[str, str]]] = field(default_factory=dict)
    """Round -> (row, column) of the pairs that were chosen."""
    legend: str = ""
    """The meaning of a mark."""
    graph: bool = False
    """True if rows are peers that choose the models they mix."""


def traffic(run: Run) -> dict[tuple[str, str], dict[str, dict[int, float]]]:
    """Return ('up' or 'down', 'role', 'task' or 'client') -> name -> bytes of each round."""
    by_part: dict[tuple[str, str], dict[str, dict[int, float]]] = {
        (way, by): defaultdict(lambda: defaultdict(int)) for way in ("up", "down") for by in ("role", "task", "client")
    }
    for sent in run.sent:
        for (role, task), count in sent.parts.items():
            by_part[sent.way, "role"][role][sent.round] += count
            by_part[sent.way, "task"]["no task" if task is None else task][sent.round] += count
        for client, count in sent.clients.items():
            by_part[sent.way, "client"][client][sent.round] += count
    return {key: {name: dict(series) for name, series in names.items()} for key, names in by_part.items() if names}


def totals(run: Run) -> tuple[tuple[str, str, int, int], ...]:
    """Return (role, task, bytes from clients, bytes to clients) over all rounds."""
    total: dict[tuple[str, str], dict[str, int]] = defaultdict(lambda: {"up": 0, "down": 0})
    for sent in run.sent:
        for (role, task), count in sent.parts.items():
            total[role, task or ""][sent.way] += count
    return tuple((role, task, counts["up"], counts["down"]) for (role, task), counts in sorted(total.items()))


def minimum_of(run: Run) -> int:
    """Return the least count of a table's rows that reports show; 0 for other data."""
    return int((run.info.get("table") or {"minimum": 0})["minimum"])


def small_clients(run: Run, split: str) -> frozenset[str]:
    """Return the clients of a table with fewer rows in a part than the minimum: reports show no value of theirs."""
    minimum = minimum_of(run)
    return frozenset(name for name, about in run.info["clients"].items() if about.get(split, minimum) < minimum)


def timed(run: Run, key: str = "seconds") -> dict[str, dict[int, float]]:
    """Return phase (or client, where the key is seconds_of) -> seconds of each round."""
    seconds = ((int(line["round"]), (line.get(key) or {}).items()) for line in run.rounds)
    return nested((name, round, number_of(value)) for round, each in seconds for name, value in each)


def clock(run: Run) -> dict[str, dict[int, float]]:
    """Return a simulated time -> its seconds in each round; empty where time was not simulated."""
    seconds: dict[str, dict[int, float]] = defaultdict(dict)
    for round, record in run.records("clock"):
        seconds["per round"][round] = float(record["end"]) - float(record["start"])
        seconds["since the start"][round] = float(record["end"])
    for round, record in run.records("staleness"):
        seconds["age of mixed models, mean"][round] = float(record["seconds"]["mean"])
    return dict(seconds)


def matrices(run: Run) -> tuple[Matrices, ...]:
    """Return the similarity of tasks, the weights of senders at receivers, and the similarity that peers computed."""
    result = []
    similar = dict(run.records("task-vectors"))
    if similar:
        tasks = tuple(t for t in run.info["tasks"] if any(t in record["tasks"] for record in similar.values()))
        rounds, chosen = {}, {}
        for round, record in similar.items():
            rounds[round] = {
                a: dict(zip(record["tasks"], row, strict=True))
                for a, row in zip(record["tasks"], record["similarity"], strict=True)
            }
            partners = zip(record["tasks"], record.get("partners", ()), strict=False)
            chosen[round] = [(a, b) for a, several in partners for b in several]
        legend = "A dot: the column's task is a partner of the row's."
        title = "Similarity of task vectors"
        result.append(Matrices("task-similarity", title, "task", "task", tasks, rounds, chosen, legend))
    weights: dict[int, dict[str, Mapping[str, float]]] = defaultdict(dict)
    for round, record in run.records("mixing"):
        weights[round].update(record["weights"])

    def by_peer(kind: str, part: str) -> dict[int, dict[str, Mapping[str, float]]]:
        return nested((round, record["peer"], record.get(part) or {}) for round, record in run.records(kind))

    for name, title, records in (
        ("mixing", "Mixing weights", weights),
        ("neighbours", "Neighbours and their weights", by_peer("peer", "weights")),
        ("conflict-weights", "Conflict-averse weights", by_peer("conflict-averse", "weights")),
        ("peer-similarity", "Similarity as peers found it", by_peer("peer", "similarity")),
    ):
        if any(row for rows in records.values() for row in rows.values()):
            peers = tuple(run.info["clients"])
            result.append(Matrices(name, title, "receiver", "sender", peers, records, graph=name == "neighbours"))
    return tuple(result)


def happened(run: Run) -> list[tuple[str, str, str, str]]:
    """Return (text, client, how often, rounds) of events and safeguards that acted; those that began first on top."""
    rounds: dict[tuple[str, str], list[int]] = defaultdict(list)
    for line in run.rounds:
        at = int(line["round"])
        for event in line.get("events", ()):
            about = described({k: event.get(k) for k in ("why", "what", "kind", "task")})
            who = event.get("client", event.get("peer", event.get("cluster", "")))
            sender = f" from {event['sender']}" if "sender" in event else ""
            rounds[f"{event['event']}{about}", f"{who}{sender}"].append(at)
    for at, record in run.records("conflict-averse"):
        for safeguard in record.get("acted") or ():
            rounds[f"safeguard: {safeguard}", str(record["peer"])].append(at)
    ordered = sorted(rounds.items(), key=lambda item: (min(item[1]), *item[0]))
    return [(what, who, str(len(at)), span(at)) for (what, who), at in ordered]


def worst(values: Mapping[str, float], direction: str) -> tuple[str, float] | None:
    """Return (name, value) of the worst value, the first of equal ones; nan does not count. None where all are nan."""
    known = {name: value for name, value in values.items() if not math.isnan(value)}
    return (min if direction == "max" else max)(known.items(), key=lambda item: item[1]) if known else None


@dataclass(frozen=True)
class Curves:
    """One metric of one task over the rounds, one series per client; nan where nothing could be measured."""

    task: str
    metric: str
    direction: str
    split: str
    model: str
    """'personal', 'global' or both: the models that count; 'trained' straight after local training."""
    clients: Mapping[str, Series]
    best: int | None = None
    """The round with the best mean over clients on validation data; None without these: test data choose nothing."""
    is_primary: bool = False
    """True if the task is judged by this metric."""
    unit: str = ""
    small: frozenset[str] = frozenset()
    """The clients that no line is drawn for, as of `small_clients`; they count in the mean."""

    @cached_property
    def mean(self) -> dict[int, float]:
        """Return round -> mean over the clients that were measured; nan where one of them is.

        A client without any number does not count, as in the final numbers: the metric is not defined on its data.
        """
        known = [of for of in self.clients.values() if not all(map(math.isnan, of.values()))]
        each = grouped(pair for series in known or self.clients.values() for pair in series.items())
        return {round: mean_of(each[round]) for round in sorted(each)}


@dataclass(frozen=True)
class Score:
    """One line of the final table: the kept model's metric."""

    task: str
    metric: str
    direction: str
    split: str
    round: int
    model: str
    data: str
    mean: float
    clients: int
    worst: tuple[str, float] | None
    """The client with the worst value, and the value; None for one client alone, and where all have the same."""
    primary: bool
    """True if the task is judged by this metric."""
    best: tuple[str, float] | None
    """As `worst`, the client with the best value."""
    unit: str


def curves(run: Run) -> tuple[Curves, ...]:
    """Return the curves task by task: the primary metric on test data, its other splits, other metrics, losses."""
    measured: dict[tuple[str, str, str, str], dict[str, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for line in run.rounds:
        for e in line["metrics"]:
            client = e["client"] or EVERYBODY
            if e["client"] is None or e["task"] in run.info["clients"][client]["tasks"]:
                series = measured[e["task"], e["metric"], e["split"], e["model"]][client]
                series[int(line["round"])] = number_of(e["value"])
        for e in line.get("train", ()):
            series = measured[e["task"], "training loss", "train", "trained"][e["client"]]
            series[int(line["round"])] = number_of(e["loss"])
    for task, metric, split, model in list(measured):
        # a client's personal model counts, else the global one, as in the final numbers
        if model == "personal" and (both := measured.get((task, metric, split, "global"))):
            personal = measured.pop((task, metric, split, "personal"))
            names = both.keys() | personal.keys()
            used = "personal" if personal.keys() >= both.keys() else "personal and global"
            measured[task, metric, split, used] = {
                name: {**both.get(name, {}), **personal.get(name, {})} for name in sorted(names)
            }
    tasks, splits = list(run.info["tasks"]), ["test", "val", "train"]
    models = ["personal", "personal and global", "global", "trained"]
    primary = {task: info["primary"] for task, info in run.info["tasks"].items()}

    def order(key: tuple[str, str, str, str]) -> tuple[Any, ...]:
        task, metric, split, model = key
        rank = 0 if metric == primary[task] else 1 if metric != "training loss" else 2
        at = splits.index(split) if split in splits else len(splits)
        return tasks.index(task), rank, metric, at, models.index(model)

    result = []
    for key in sorted((k for k in measured if k[0] in tasks), key=order):
        task, metric, split, model = key
        curve = Curves(*(task, metric, run.direction(task, metric), split, model), measured[key])
        judge = replace(curve, clients=measured.get((task, metric, "val", model), {})).mean
        known = {round: mean for round, mean in judge.items() if not math.isnan(mean) and round in curve.mean}
        best = best_round(known, curve.direction) if len(known) > 1 else None
        unit = run.unit(task, metric)
        small = small_clients(run, split)
        result.append(replace(curve, best=best, is_primary=metric == primary[task], unit=unit, small=small))
    return tuple(result)


def scores(run: Run) -> tuple[Score, ...]:
    """Return the primary metrics first, on test data before validation data; then the others. Of a table, no value of a
    client with fewer rows in that part than the minimum."""
    scores = []
    for split in ("test", "val"):
        few = small_clients(run, split)
        try:
            final = run.final(split)
        except StateError:
            continue
        each = run.entries(final.round, split)
        for task, metrics in final.values.items():
            for metric, mean in metrics.items():
                direction = run.direction(task, metric)
                entries = {c or EVERYBODY: e for (c, t, m), e in each.items() if (t, m) == (task, metric)}
                mine = {client: number_of(entry["value"]) for client, entry in entries.items()}
                known = [value for value in mine.values() if not math.isnan(value)]
                shown = {client: value for client, value in mine.items() if client not in few}
                several = len(set(known)) > 1  # one model on shared data serves no client worse than another
                low, high = (worst(shown, of) if several else None for of in ("max", "min"))
                ends = (low, high) if direction == "max" else (high, low)
                judging, data = metric == run.info["tasks"][task]["primary"], ", ".join(final.data)
                about = (task, metric, direction, split, final.round, final.model, data, mean, len(known))
                scores.append(Score(*about, ends[0], judging, ends[1], run.unit(task, metric)))
    return tuple(sorted(scores, key=lambda score: not score.primary))


def worst_tasks(scores: Sequence[Score]) -> tuple[Score, ...]:
    """Return the score of the worst task for each split and metric that judges several tasks."""
    known = [score for score in scores if score.primary and not math.isnan(score.mean)]
    groups = grouped(((score.split, score.metric, score.direction), score) for score in known)
    return tuple(
        (min if direction == "max" else max)(group, key=lambda s: s.mean)
        for (*_, direction), group in groups.items()
        if len(group) > 1
    )


def quality(run: Run) -> dict[str, dict[int, float]]:
    """Return name -> round -> share or index; empty where a run has no peers, or all peers have the same tasks.

    Task groups are the peers with the same tasks. Clusters are those of average linkage on the similarities that peers
    found (the mean of both directions; 0 for a pair that never met), as many as there are task groups.

    neighbours with the same tasks   share of all chosen neighbours
    neighbours kept                  mean over peers of |now and before| / |now or before| (Jaccard)
    ARI, NMI                         adjusted Rand index and normalised mutual information of clusters and task groups
                                     (Hubert and Arabie 1985; Vinh et al. 2010): 1 where they are the same
    purity                           share of peers whose cluster mostly has their tasks
    clusters kept                    adjusted Rand index of this round's and the previous round's clusters
    """
    tasks = {name: ", ".join(sorted(about["tasks"])) for name, about in run.info["clients"].items()}
    # of many peers only a sample says what it knows of each other
    telling = [(round, record) for round, record in run.records("peer") if "neighbours" in record]
    by_round = nested((round, record["peer"], record) for round, record in telling)
    if not by_round or len(set(tasks.values())) < 2:
        return {}
    series: dict[str, dict[int, float]] = defaultdict(dict)
    chosen = {round: {n: frozenset(r["neighbours"]) for n, r in records.items()} for round, records in by_round.items()}
    for round, sets in chosen.items():
        same = [tasks.get(other) == tasks[name] for name, others in sets.items() for other in others]
        if same:
            series["neighbours with the same tasks"][round] = statistics.mean(same)
    for before, now in pairwise(sorted(chosen)):
        pairs = [(chosen[before][n], others) for n, others in chosen[now].items() if n in chosen[before]]
        kept = [len(a & b) / len(a | b) for a, b in pairs if a | b]
        if kept:
            series["neighbours kept"][now] = statistics.mean(kept)
    groups = len(set(tasks.values()))
    if not groups < len(tasks) <= PEERS:
        return series
    metrics = need("sklearn.metrics", "report")
    last: dict[str, int] = {}
    for round in sorted(by_round):
        here = sorted(by_round[round])
        cluster = _linked(here, by_round[round], groups)
        if not cluster:
            continue
        labels, true = [cluster[name] for name in here], [tasks[name] for name in here]
        series["ARI"][round] = float(metrics.adjusted_rand_score(true, labels))
        series["NMI"][round] = float(metrics.normalized_mutual_info_score(true, labels))
        series["purity"][round] = purity(true, labels)
        both = [name for name in here if name in last]
        if len(both) > 1:
            was, now_is = ([of[name] for name in both] for of in (last, cluster))
            series["clusters kept"][round] = float(metrics.adjusted_rand_score(was, now_is))
        last = cluster
    return series


def _linked(names: list[str], records: Mapping[str, Mapping[str, Any]], groups: int) -> dict[str, int]:
    """Return peer -> cluster; empty where no similarity is known."""
    found = {name: records[name].get("similarity") or {} for name in names}
    one = np.array([[found[a].get(b) for b in names] for a in names], dtype=np.float64)
    both = np.stack([one, one.T])
    count = (~np.isnan(both)).sum(0)
    if not count.any() or len(names) <= groups:
        return {}
    similar = np.nansum(both, axis=0) / np.maximum(count, 1)
    distance = similar.max() - similar
    np.fill_diagonal(distance, 0.0)
    cluster = need("sklearn.cluster", "report").AgglomerativeClustering(
        n_clusters=groups, metric="precomputed", linkage="average"
    )
    return dict(zip(names, cluster.fit_predict(distance).tolist(), strict=True))


def purity(true: Sequence[int | str], labels: Sequence[int]) -> float:
    """Return the share of members of each cluster's largest group: sum_c max_g |c and g| / N."""
    counts = need("sklearn.metrics", "report").cluster.contingency_matrix(true, labels)
    return int(counts.max(axis=0).sum()) / len(true)


FILE = "diagnostics.jsonl"
IN_CONFLICT = "share of pairs in conflict (cosine below 0)"
"""The name of these lines over the rounds."""
EVERYONE = "everyone"
"""The name of a row that all clients receive."""
MOST = 50
"""Rows of a matrix, at most: those that occur in the most rounds."""

MASKED = 0.95
"""The shares of updates that are not zero are shown where one is below this; a few zeros occur without any mask."""

Cells = Mapping[int, Mapping[str, Mapping[str, float | None]]]
"""Round -> row -> column -> number."""


@dataclass(frozen=True)
class UpdateAgreement:
    """The diagnostics of a run by layer group ('encoder stem to layer1', 'decoder of depth')."""

    cosine: Mapping[str, Cells] = field(default_factory=dict)
    """Group -> the cosine of every two updates."""
    sign: Mapping[str, Cells] = field(default_factory=dict)
    """Group -> share of the columns in which two updates have the same sign."""
    rows: tuple[str, ...] = ()
    """Names of the rows of these matrices."""
    over_rounds: Mapping[str, Mapping[str, Series]] = field(default_factory=dict)
    """'mean cosine' ... -> group -> value."""
    weights: Mapping[str, Mapping[str, Series]] = field(default_factory=dict)
    """Group -> row -> its weight in the one row that all receive; empty where the rounds make more rows."""
    given: Mapping[str, Cells] = field(default_factory=dict)
    """Group -> the weights of senders (columns) in what each receiver gets (rows); empty where all get the same."""
    receivers: tuple[str, ...] = ()
    kept: Mapping[str, Mapping[str, Series]] = field(default_factory=dict)
    """Group -> row -> share of the update that is not zero, for groups where some share is below MASKED."""
    note: str = ""


@dataclass(frozen=True)
class _Look:
    """One record, with names in place of positions."""

    round: int
    rows: tuple[str, ...]
    out: tuple[str, ...]
    shown: tuple[str, ...]
    peer: str | None
    groups: Sequence[Mapping[str, Any]]

    @cached_property
    def pairs(self) -> list[tuple[str, str]]:
        """Return the two updates of each number of a group's `cosine` and `sign`."""
        if self.peer is None:
            return list(combinations(self.shown, 2))
        return [(first, other) for first in self.shown[:1] for other in self.shown[1:]]


def agreement_of(run: Run) -> UpdateAgreement | None:
    """Read the diagnostics of a run; None without any. Raises StateError for a file of other contents."""
    try:
        each = [(line["round"], about) for line in run.log(FILE) for about in line["diagnostics"]]
        looks = [_look(round, check_record(DIAGNOSTICS, about)) for round, about in each]
    except (KeyError, TypeError, ValueError) as error:
        raise StateError(f"{run.folder / FILE}: not what diagnostics are: {error!r}") from None
    looks = [look for look in looks if look.round <= run.last_round and look.groups]
    if not looks:
        return None
    cosine, sign = _matrices(looks, "cosine"), _matrices(looks, "sign")
    often = Counter(name for look in looks for name in look.shown)
    single = all(len(look.out) == 1 and look.peer is None for look in looks)
    weights, given = (_by_row(looks, "weights"), {}) if single else ({}, _given(looks))
    receivers = Counter(name for cells in given.values() for rows in cells.values() for name in rows)
    senders = Counter(n for cells in given.values() for rows in cells.values() for row in rows.values() for n in row)
    kept = {
        group: rows
        for group, rows in _by_row(looks, "kept").items()
        if any(v < MASKED for series in rows.values() for v in series.values())
    }
    rows, over_rounds, peers = _most(often), _over_rounds(cosine, sign), _most(receivers + senders)
    return UpdateAgreement(cosine, sign, rows, over_rounds, weights, given, peers, kept, _note(looks))


def _look(round: int, about: Mapping[str, Any]) -> _Look:
    rows = tuple(_name(*key) for key in about["rows"])
    peer = about.get("peer")
    out = tuple(peer if peer is not None and key[0] == "*" and key[1] is None else _name(*key) for key in about["out"])
    return _Look(int(round), rows, out, tuple(rows[i] for i in about["shown"]), peer, about["groups"])


def _name(client: str, task: str | None) -> str:
    if client == "*":
        return EVERYONE if task is None else task
    return client if task is None else f"{client} · {task}"


def _group(group: Mapping[str, Any]) -> str:
    if group["task"] is not None:
        return f"{group['part']} of {group['task']}"
    prefix = f"{group['part']}."  # names of tensors begin with it, as a rule
    return f"{group['part']}: {' to '.join(name.removeprefix(prefix) for name in group['layers'].split(' to '))}"


def _most(names: Counter[str]) -> tuple[str, ...]:
    return tuple(sorted(name for name, _ in names.most_common(MOST)))


def _matrices(looks: Sequence[_Look], what: str) -> dict[str, Cells]:
    matrices: dict[str, dict[int, dict[str, dict[str, float | None]]]] = {}
    for look in looks:
        for group in look.groups:
            cells = matrices.setdefault(_group(group), {}).setdefault(look.round, defaultdict(dict))
            for (a, b), value in zip(look.pairs, group[what], strict=True):
                cells[a][b] = cells[b][a] = value
    # a group that never had two rows has no pairs to show
    return {name: cells for name, cells in matrices.items() if any(any(_pairs(of)) for of in cells.values())}


def _pairs(cells: Mapping[str, Mapping[str, float | None]]) -> Iterator[tuple[tuple[str, str], float]]:
    """Yield each pair once, with its number where there is one."""
    return (((a, b), v) for a, row in cells.items() for b, v in row.items() if a < b and v is not None)


def _over_rounds(cosine: Mapping[str, Cells], sign: Mapping[str, Cells]) -> dict[str, dict[str, Series]]:
    def each(of: Mapping[str, Cells], number: Callable[[list[float]], float]) -> dict[str, Series]:
        values = {group: {r: [v for _, v in _pairs(cells)] for r, cells in by.items()} for group, by in of.items()}
        return {group: {r: number(vs) if vs else math.nan for r, vs in by.items()} for group, by in values.items()}

    curves = {
        "mean cosine of two updates": each(cosine, mean_of),
        IN_CONFLICT: each(cosine, lambda vs: sum(v < 0 for v in vs) / len(vs)),
        "mean share of equal signs": each(sign, mean_of),
    }
    return {name: lines for name, lines in curves.items() if lines}


def _by_row(looks: Sequence[_Look], what: str) -> dict[str, dict[str, dict[int, float]]]:
    """Return group -> row -> number, of `kept`, or of the only row of `weights`."""
    of_groups = ((look, group, group.get(what) or ()) for look in looks for group in look.groups)
    return nested(
        (_group(group), name, look.round, value)
        for look, group, values in of_groups
        for name, value in zip(look.rows, (values or ((),))[0] if what == "weights" else values, strict=False)
        if value is not None and look.peer in (None, name)  # several peers report the same row with the same number
    )


def _given(looks: Sequence[_Look]) -> Mapping[str, Cells]:
    return nested(
        (_group(group), look.round, to, dict(zip(look.rows, numbers, strict=True)))
        for look in looks
        for group in look.groups
        for to, numbers in zip(look.out, group.get("weights") or (), strict=False)
        if any(v is not None for v in numbers)
    )


def _note(looks: Sequence[_Look]) -> str:
    """Return how exact the numbers are."""
    groups = [group for look in looks for group in look.groups]
    parts = []
    worst = min((group["looked"] for group in groups if group["looked"] < group["size"]), default=None)
    if worst is not None:
        parts.append(
            f"Of large groups a fixed choice of columns is looked at, at least {worst:,}, so that a cosine is known to "
            f"about {1 / math.sqrt(worst):.1g}."
        )
    explained = [v for group in groups for v in group.get("explained") or () if v is not None]
    if explained and min(explained) < 0.99:
        parts.append(
            "Weights are those with which a sum of the updates comes nearest to what was made of them. It is not just "
            f"such a sum, as where coordinates have weights of their own: {min(explained):.0%} of it is explained, or "
            "more."
        )
    return " ".join(parts)


def primary(curves: Sequence[Curves]) -> dict[str, Curves]:
    """Return task -> its own metric over the rounds, on test data where that was measured."""
    by_task = grouped((c.task, c) for c in curves if c.is_primary)
    return {task: several[0] for task, several in by_task.items()}  # test data come first


def cosines(agreement: UpdateAgreement) -> dict[tuple[str, str], float]:
    """Return pair of updates -> mean cosine over layer groups and rounds."""
    every = (cells for by_round in agreement.cosine.values() for cells in by_round.values())
    each = grouped(known for cells in every for known in _pairs(cells))
    return {pair: mean_of(values) for pair, values in each.items()}
