"""The agreement of peers' neighbours with their tasks, round by round, from a run's records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import mean
from typing import Any

import numpy as np

from fedloom.core.lazy import need
from fedloom.federation.runs.reader import Run

MOST = 200
"""Peers that are put into clusters, at most: more would take longer than a reader waits."""

Series = dict[int, float]


def quality(run: Run) -> dict[str, Series]:
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
    tasks = {name: tuple(sorted(about["tasks"])) for name, about in run.info["clients"].items()}
    by_round: dict[int, dict[str, Mapping[str, Any]]] = {}
    for round, record in run.records("peer"):
        by_round.setdefault(round, {})[record["peer"]] = record
    if not by_round or len(set(tasks.values())) < 2:
        return {}
    series: dict[str, Series] = {}
    chosen = {round: {n: frozenset(r["neighbours"]) for n, r in records.items()} for round, records in by_round.items()}
    for round, sets in chosen.items():
        same = [tasks[other] == tasks[name] for name, others in sets.items() for other in others]
        if same:
            series.setdefault("neighbours with the same tasks", {})[round] = mean(same)
    for before, now in pairwise(sorted(chosen)):
        pairs = [(chosen[before][n], others) for n, others in chosen[now].items() if n in chosen[before]]
        kept = [len(a & b) / len(a | b) for a, b in pairs if a | b]
        if kept:
            series.setdefault("neighbours kept", {})[now] = mean(kept)
    groups = len(set(tasks.values()))
    if groups < len(tasks) <= MOST:
        _clusters(series, by_round, tasks, groups)
    return series


def _clusters(
    series: dict[str, Series],
    by_round: Mapping[int, Mapping[str, Mapping[str, Any]]],
    tasks: Mapping[str, tuple[str, ...]],
    groups: int,
) -> None:
    """Add the indices of clusters of similarities."""
    metrics = need("sklearn.metrics", "report")
    last: dict[str, int] = {}
    for round in sorted(by_round):
        here = sorted(by_round[round])
        cluster = _linked(here, by_round[round], groups)
        if not cluster:
            continue
        truth = [tasks[name] for name in here]
        number = {group: i for i, group in enumerate(sorted(set(truth)))}
        labels, true = [cluster[name] for name in here], [number[group] for group in truth]
        values = {
            "ARI": metrics.adjusted_rand_score(true, labels),
            "NMI": metrics.normalized_mutual_info_score(true, labels),
            "purity": purity(true, labels),
        }
        both = [name for name in here if name in last]
        if len(both) > 1:
            values["clusters kept"] = metrics.adjusted_rand_score(
                [last[name] for name in both], [cluster[name] for name in both]
            )
        for name, value in values.items():
            series.setdefault(name, {})[round] = float(value)
        last = cluster


def _linked(names: list[str], records: Mapping[str, Mapping[str, Any]], groups: int) -> dict[str, int]:
    """Return peer -> cluster; empty where no similarity is known."""
    place = {name: i for i, name in enumerate(names)}
    total = np.zeros((len(names), len(names)))
    count = np.zeros_like(total)
    for name, record in records.items():
        for other, value in (record.get("similarity") or {}).items():
            if other in place and value is not None:
                for a, b in ((place[name], place[other]), (place[other], place[name])):
                    total[a, b] += value
                    count[a, b] += 1
    if not count.any() or len(names) <= groups:
        return {}
    similar = np.divide(total, count, out=np.zeros_like(total), where=count > 0)
    distance = similar.max() - similar
    np.fill_diagonal(distance, 0.0)
    cluster = need("sklearn.cluster", "report").AgglomerativeClustering(
        n_clusters=groups, metric="precomputed", linkage="average"
    )
    return dict(zip(names, cluster.fit_predict(distance).tolist(), strict=True))


def purity(true: Sequence[int], labels: Sequence[int]) -> float:
    """Return the share of members of each cluster's largest group: sum_c max_g |c and g| / N."""
    counts = need("sklearn.metrics", "report").cluster.contingency_matrix(true, labels)
    return int(counts.max(axis=0).sum()) / len(true)
