"""A run in some twenty numbers, which other processors and versions of torch reach too, up to rounding."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recorded.runs import LOGS, known_runs, leaves, named_tensors

NUMBERS = Path(__file__).with_name("numbers.json")
CONTINUOUS = ("loss", "rmse", "r2", "abs_err", "rel_err", "merr")
"""Metrics that one example more or less right does not change in jumps; all others are shares of examples or pixels."""


def summarised() -> list[str]:
    """Return the names of the runs that have numbers: the small ones, in one process."""
    return [name for name in known_runs() if "/" in name or name == "own"]


def summary(folder: Path) -> dict[str, list[float]]:
    """Return two numbers for each part of the models and of the state, and the mean of each metric over the clients.

    The two are the norm, and the inner product with a fixed vector of values between -1 and 1.
    """
    found = {part: both(torch.cat(tensors)) for part, tensors in parts(folder).items()}
    for kind, values in logged(folder).items():
        found[kind] = both(torch.tensor(values, dtype=torch.float64))
    for name, values in measured(folder).items():
        found[name] = [sum(values) / len(values)]
    return {name: [float(f"{value:.7g}") for value in values] for name, values in found.items()}


def both(vector: Tensor) -> list[float]:
    """Return the norm, and the inner product with a fixed vector."""
    fixed = torch.arange(1, len(vector) + 1, dtype=torch.float64).mul(math.sqrt(2)).frac().mul(2).sub(1)
    vector = vector.nan_to_num(0, 0, 0)
    return [float(vector.norm()), float(vector @ fixed)]


def parts(folder: Path) -> dict[str, list[Tensor]]:
    """Return part -> tensors as flat float64: `personal encoder`, `global heads.digit`, `state server.rule`, ..."""
    found: dict[str, list[Tensor]] = defaultdict(list)
    for name, tensor in sorted(named_tensors(folder).items()):
        kind, _, path = name.partition(" " if name.startswith("model ") else ".")
        if kind == "model":
            *owner, block = path.split("/")
            module = block.split(".")
            key = " ".join(["personal" if owner else "global", ".".join(module[: 1 if module[0] == "encoder" else 2])])
        elif path.startswith(("server.model", "server.personal", "server.buffers", "early", "events")):
            continue  # the models once more; and messages under way, in an order of their own
        else:
            words = path.split(".")
            key = f"state {words[0]}.{words[2 if words[0] == 'clients' else 1].partition('[')[0]}"
        found[key].append(tensor.double().flatten())
    return found


def logged(folder: Path) -> dict[str, list[float]]:
    """Return the bytes, the records and the diagnostics of all rounds, as numbers in their order."""
    found: dict[str, list[float]] = defaultdict(list)
    for log in LOGS:
        for text in (folder / log).read_text().splitlines() if (folder / log).exists() else ():
            line = json.loads(text)
            # the constant prediction says nothing of the method
            line["records"] = [record for record in line.get("records", []) if record["kind"] != "constant prediction"]
            for kind in ("up", "down", "train", "records", "diagnostics"):
                some = [
                    x for path, x in sorted(leaves(line.get(kind, []), "")) if kind != "train" or path.endswith("loss")
                ]
                found[kind] += [number for value in some for number in flat(value)]
    return {kind: values for kind, values in found.items() if values}


def flat(value: Any) -> Iterator[float]:
    """Yield the numbers of a leaf but those that only rounding keeps from 0."""
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, int | float) and not 0 < abs(item) < 1e-12:
            yield float(item)


def measured(folder: Path) -> dict[str, list[float]]:
    """Return the metrics of the last round, of all clients, by task, metric, model and split."""
    found: dict[str, list[float]] = defaultdict(list)
    for m in json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])["metrics"]:
        if m["value"] is not None:
            found[" ".join(m[key] for key in ("task", "metric", "model", "split"))].append(m["value"])
    return found


def room(name: str, expected: list[float]) -> float:
    """Return how far a number may be from the expected one."""
    if len(expected) == 2:
        return (2e-3 if name in ("diagnostics", "records") else 1e-4) * expected[0] + 1e-5
    return 1e-4 * abs(expected[0]) + 1e-6 if name.split()[1] in CONTINUOUS else 0.03


def differences(found: Mapping[str, list[float]], expected: Mapping[str, list[float]]) -> list[str]:
    """Return a line for each number that is not what it was."""
    lines = [
        f"{name}: {'nothing' if name in expected else found[name]} found" for name in sorted({*found} ^ {*expected})
    ]
    for name in sorted({*found} & {*expected}):
        far = max(abs(a - b) for a, b in zip(found[name], expected[name], strict=True))
        limit = room(name, expected[name])
        if not far <= limit:
            lines.append(f"{name}: {found[name]} found, expected {expected[name]}, give or take {limit:.2g}")
    return lines
