"""Grids for tests: tiny ones that run, and folders of runs that never ran."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from fedloom.study.grid import Cell, Grid, load_grid, save

TINY: dict[str, Any] = {
    "name": "tiny",
    "data": {"Digits": {"recipe": "digits-tasks", "set": {"training.epochs": None, "training.steps": 2}}},
    "bases": {"FedAvg": {"method": "fedavg"}},
    "addons": {"-": {}, "+DEA": {"method.add.feddea": {"rho": 0.5}}},
    "references": [],
    "seeds": [0],
    "set": {"data.size": 8, "training.rounds": 1, "training.batch_size": 8, "evaluation.splits": ["test"]},
}
"""Two cells of five clients on digits, one round of two steps."""

PRIMARY = {"semseg": "miou", "depth": "rmse", "normals": "merr", "edge": "odsf"}
DIRECTIONS = {"semseg": "max", "depth": "min", "normals": "min", "edge": "max"}
# FedDEA, table 3, NYUD.
FEDAVG = {"semseg": 23.05, "depth": 0.7213, "normals": 26.52, "edge": 75.19}
DEA = {"semseg": 30.78, "depth": 0.7052, "normals": 24.62, "edge": 74.77}

Numbers = Mapping[str, float]


def paper_grid(**changes: Any) -> Grid:
    """A grid of two data sets, two bases and two add-ons."""
    value = {
        "name": "paper",
        "title": "A table",
        "data": {"NYUD": {"recipe": "digits-tasks"}, "PASCAL": {"recipe": "digits-tasks"}},
        "bases": {"FedAvg": {"method": "fedavg"}, "FedProx": {"method": "fedprox"}},
        "addons": {"-": {}, "+DEA": {"method.add.feddea": {}}},
        "references": [],
        "seeds": [0],
    }
    return load_grid(value | changes)


def write_run(
    grid_folder: Path,
    cell: Cell,
    values: Numbers | Mapping[str, Numbers],
    status: str = "finished",
    history: Mapping[int, Numbers | Mapping[str, Numbers]] | None = None,
    rho: float | None = None,
    val: Mapping[int, Numbers | Mapping[str, Numbers]] | None = None,
    domains: Mapping[str, str] | None = None,
) -> Path:
    """The folder of a run: one client that measured the global model, or client -> what its personal model measured.

    Without its own, `history` (round -> values, or client -> values) is round 1 alone; `val` is as `history`, on
    validation data. `domains` is client -> domain.
    """
    personal = {c: v for c, v in values.items() if isinstance(v, Mapping)}
    clients: dict[str, Numbers] = personal or {"a": values}  # type: ignore[dict-item]
    path = cell.folder(grid_folder)
    path.mkdir(parents=True)
    tasks = list(dict.fromkeys(task for measured in clients.values() for task in measured))
    add = {} if rho is None else {"feddea": {"rho": rho}}
    recipe = {
        "name": "t",
        "seed": cell.seed,
        "data": {"name": "toy"},
        "method": {"name": "m", "add": add},
        "runtime": {},
    }
    info = {
        "fedloom": "0.1.0",
        "method": f"{cell.base}{cell.addon}",
        "tasks": {
            t: {
                "kind": t if t in ("depth", "normals") else "dense",
                "primary": PRIMARY[t],
                "metrics": {PRIMARY[t]: DIRECTIONS[t]},
            }
            for t in PRIMARY
            if t in tasks
        },
        "clients": {
            name: {"tasks": dict.fromkeys(measured, 1.0), "domain": (domains or {}).get(name)}
            for name, measured in clients.items()
        },
        "status": status,
        "final_round": max(history or [1]),
    }
    lines = []
    for number, measured in (history or {1: None}).items():
        metrics = [
            {"client": c, "task": t, "metric": PRIMARY[t], "value": v, "split": split, "data": f"shared {split}",
             "model": "personal" if personal else "global"}
            for split, of_split in (("test", measured), ("val", (val or {}).get(number, {})))
            for c, own in clients.items()
            for t, v in (own if of_split is None else of_split.get(c, of_split)).items()
        ]  # fmt: skip
        lines.append(json.dumps({"round": number, "cohort": list(clients), "metrics": metrics}))
    (path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    (path / "run.json").write_text(json.dumps(info))
    (path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return path


def write_grid(folder: Path, grid: Grid, runs: Mapping[tuple[Any, ...], Any], refused: Mapping[str, str] = {}) -> Path:
    """A grid folder from (data, base, addon, seed) -> values."""
    save(grid, folder, refused)
    for labels, values in runs.items():
        write_run(folder, Cell(*labels), values)
    return folder


CONSTANT_ROW = {"semseg": 0.10, "depth": 2.0}
ALONE = {"semseg": 0.20, "depth": 1.8}
WORSE = {"semseg": 0.18, "depth": 1.98}
CENTRALISED = {"semseg": 0.22, "depth": 1.9}
BY_TASK = {"semseg": 0.18, "depth": 1.62}


def benchmark(
    folder: Path, losses: Any = (1.0, 0.9, 0.899, 0.898), seeds: Any = (100, 101, 102), spread: float = 0.0, **rows: Any
) -> Any:
    """A grid with a run of Local and of each reference at each seed, whose numbers on validation data are given.

    Those of `centralised` are `spread` of themselves apart from one seed to the next.
    """
    grid = paper_grid(
        data={"NYUD": {"recipe": "digits-tasks"}},
        bases={"Local": {"method": "local"}},
        addons={"-": {}},
        references=["centralised", "centralised-by-task", "constant"],
        delta="Local/-",
        seeds=list(seeds),
    )
    save(grid, folder, {})
    found = {
        "Local": ALONE,
        "centralised": CENTRALISED,
        "centralised-by-task": BY_TASK,
        "constant": CONSTANT_ROW,
    } | rows
    for (base, plain), (at, seed) in itertools.product(found.items(), enumerate(seeds)):
        if plain is not None:
            values = {t: v * (1 + spread * (at - 1) * (base == "centralised")) for t, v in plain.items()}
            # on test data all is the other way round: it must play no part
            upside_down = {task: 1 / value for task, value in values.items()}
            path = write_run(folder, Cell("NYUD", base, "-", seed), upside_down, val={1: values})
            lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
            first = {**lines[0], "train": [{"client": "c", "task": t, "loss": losses[0]} for t in values]}
            more = [
                {
                    "round": n,
                    "cohort": [],
                    "metrics": [],
                    "train": [{"client": "c", "task": t, "loss": x} for t in values],
                }
                for n, x in enumerate(losses[1:], 2)
            ]
            (path / "metrics.jsonl").write_text("\n".join(map(json.dumps, [first, *more])) + "\n")
    return grid
