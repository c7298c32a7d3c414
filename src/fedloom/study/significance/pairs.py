"""The pairs of a test: which runs and clients of two methods belong together, and what each pair gained."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import combinations
from statistics import fmean
from typing import Any

from fedloom.core.errors import StateError
from fedloom.federation.runs.reader import Run, TaskMetric
from fedloom.study.tables.results import Side

Numbers = Mapping[Any, Mapping[str, float]]
"""Seed, or client -> task -> number."""


def refusal(one: Side, base: Side, seeds: Sequence[int]) -> str:
    """Why the seeds of two methods are not pairs, or not replicates; '' where they are both."""
    for seed in seeds:
        mine, theirs = one.runs[seed], base.runs[seed]
        if mine.info.get("data_hash") != theirs.info.get("data_hash"):
            return f"not the same data set at seed {seed}"
        alike = mine.info.get("partition_hash") == theirs.info.get("partition_hash")
        if not alike and (_shares(mine) is None or _shares(mine) != _shares(theirs)):
            return f"not the same clients with the same examples at seed {seed}"
    for side in (one, base):
        for first, second in combinations(seeds, 2):
            if _measured(side.runs[first]) == _measured(side.runs[second]):
                return (
                    f"{side.label} measured the same to the last digit at seeds {first} and {second}: "
                    "one run counted twice"
                )
    return ""


def _shares(run: Run) -> dict[str, tuple[list[int], list[int]]] | None:
    """Client -> its examples for training and validation, whatever its tasks; None where that was not recorded."""
    file = run.folder / "partition.json"
    if not file.is_file():
        return None
    try:
        return {c["client"]: (c["train"], c["val"]) for c in json.loads(file.read_text("utf-8"))["clients"]}
    except (ValueError, KeyError, TypeError) as error:
        raise StateError(f"{file}: not a partition: {error}") from None


def _measured(run: Run) -> list[object]:
    return [line["metrics"] for line in run.rounds]


def holders(run: Run, task: str) -> set[str]:
    """The clients with the task."""
    return {client for client, info in run.info["clients"].items() if task in info["tasks"]}


def of_clients(one: Side, base: Side, rows: Sequence[TaskMetric], seeds: Sequence[int]) -> tuple[Numbers, Numbers]:
    """For each of the two methods: client -> task -> the mean over the seeds at which both have a number of it."""
    found: tuple[dict[str, dict[str, list[float]]], ...] = (defaultdict(dict), defaultdict(dict))
    for seed in seeds:
        for client in one.clients[seed].keys() & base.clients[seed].keys():
            for row in rows:
                pair = [s.clients[seed][client].values.get(row.task, {}) for s in (one, base)]
                if all(row.metric in numbers for numbers in pair):
                    for of, numbers in zip(found, pair, strict=True):
                        of[client].setdefault(row.task, []).append(numbers[row.metric])
    mine, theirs = ({c: {t: fmean(v) for t, v in of[c].items()} for c in sorted(of)} for of in found)
    return mine, theirs


def client_gains(
    one: Side, base: Side, rows: Sequence[TaskMetric], seeds: Sequence[int]
) -> dict[TaskMetric, list[list[float]]]:
    """Task -> for each seed, the gains of the clients that have a number of it with both.

    Tasks for which no two clients of a seed differ are left out: one client has it, or one number stands for all.
    """
    found: dict[TaskMetric, list[list[float]]] = defaultdict(list)
    for seed in seeds:
        mine, theirs = one.clients[seed], base.clients[seed]
        for row in rows:
            sign = -1 if row.direction == "min" else 1
            pairs = (
                (mine[c].values.get(row.task, {}).get(row.metric), theirs[c].values.get(row.task, {}).get(row.metric))
                for c in mine
                if c in theirs
            )
            gains = [sign * (v - b) for v, b in pairs if v is not None and b is not None]
            if gains and all(map(math.isfinite, gains)):
                found[row].append(gains)
    return {row: each for row, each in found.items() if any(len(set(gains)) > 1 for gains in each)}
