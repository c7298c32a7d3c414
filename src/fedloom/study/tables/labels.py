"""What runs are called where they stand side by side: their methods, and what else tells them apart."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import accumulate

from fedloom.core.settings.names import differs, value_at
from fedloom.federation.runs.reader import Run
from fedloom.study.keys import QUIET


def labels_of(groups: Sequence[Sequence[Run]]) -> list[str]:
    """Method labels; where two are equal, with the recipe keys in which those runs differ from the others.

    Keys of methods are always among these; others are left out where a run has what most runs of the comparison have.
    Methods made in Python may differ in what neither their names nor recipes say: then with the folder of a run.
    """
    firsts = [group[0] for group in groups]
    shown = {}
    for at, run in enumerate(firsts):
        alike = [other for other in firsts if other.label == run.label]
        keys = sorted({key for other in alike for key in differs("", run.recipe, other.recipe)} - QUIET)
        shown[at] = [key for key in keys if key.startswith("method.") or not _is_usual(key, run, firsts)]
    short = shortened({key for keys in shown.values() for key in keys})
    labels = []
    for at, run in enumerate(firsts):
        detail = ", ".join(f"{short[key]}={value_at(run.recipe, key)}" for key in shown[at])
        labels.append(f"{run.label} [{detail}]" if detail else run.label)
    return [
        f"{label} [{run.folder}]" if labels.count(label) > 1 else label
        for label, run in zip(labels, firsts, strict=True)
    ]


def shortened(keys: Collection[str]) -> dict[str, str]:
    """Each key with the shortest end that no other one has: 'training.rounds' -> 'rounds'. A name keeps its section."""
    found = {}
    for key in keys:
        ends = accumulate(reversed(key.split(".")), lambda end, part: f"{part}.{end}")
        found[key] = next(
            end for end in ends if end != "name" and sum(f".{other}".endswith(f".{end}") for other in keys) == 1
        )
    return found


def _is_usual(key: str, run: Run, runs: Sequence[Run]) -> bool:
    """Whether more than half of the runs have the same value of a key as this one."""
    mine = value_at(run.recipe, key)
    return 2 * sum(value_at(other.recipe, key) == mine for other in runs) > len(runs)
