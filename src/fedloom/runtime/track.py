"""Who else is told what a round brought: trackers, beside the files of the run folder, which have it all."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from fedloom.extras import need
from fedloom.recipes.schema import Recipe


class Tracker(Protocol):
    """Is told each round's line of metrics.jsonl and of bytes.jsonl, once they are written."""

    def round(self, line: Mapping[str, Any], traffic: Mapping[str, Any]) -> None: ...
    def close(self) -> None: ...


class TensorBoard:
    """Writes events to the folder `tensorboard` of a run: means over clients, bytes, seconds.

    `done` is the last round that counts: what an interrupted run wrote of later ones is not shown.
    """

    def __init__(self, folder: Path, done: int) -> None:
        writer = need("torch.utils.tensorboard", "track").SummaryWriter
        self._writer = writer(str(folder / "tensorboard"), purge_step=done + 1 if done else None)

    def round(self, line: Mapping[str, Any], traffic: Mapping[str, Any]) -> None:
        for tag, value in scalars(line, traffic).items():
            self._writer.add_scalar(tag, value, line["round"])
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def scalars(line: Mapping[str, Any], traffic: Mapping[str, Any]) -> dict[str, float]:
    """Tag -> number of one round: 'TASK/METRIC, SPLIT, MODEL', 'TASK/training loss', 'bytes/up', 'seconds/PHASE'.

    What is measured of clients is their mean; a mean that is not finite is left out.
    """
    each: dict[str, list[float]] = defaultdict(list)
    for e in line["metrics"]:
        each[f"{e['task']}/{e['metric']}, {e['split']}, {e['model']}"].append(_number(e["value"]))
    for e in line.get("train", ()):
        each[f"{e['task']}/training loss"].append(_number(e["loss"]))
    for way in ("up", "down"):
        each[f"bytes/{way}"].append(math.fsum(entry["bytes"] for entry in traffic[way]))
    for phase, seconds in line["seconds"].items():
        each[f"seconds/{phase}"].append(seconds)
    means = {tag: math.fsum(values) / len(values) for tag, values in each.items()}
    return {tag: mean for tag, mean in means.items() if math.isfinite(mean)}


def tracker_of(recipe: Recipe, folder: Path, done: int) -> Tracker | None:
    """The tracker that a recipe asks for; `done` rounds are over. UserError where what it needs is not installed."""
    return None if recipe.runtime.track is None else TensorBoard(folder, done)


def _number(value: float | None) -> float:
    return math.nan if value is None else value
