"""The figures of MaTU: shares of a reference around a circle, and numbers over tasks per client."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from fedloom.errors import RecipeError, StateError
from fedloom.study.charts import rows_of
from fedloom.study.figures import data_sets, draw, radar, tasks_per_client
from fedloom.study.grid import Cell, Grid, save
from grid_support import paper_grid, write_run
from report_support import panels


def made(folder: Path, data: tuple[str, ...] = ("NYUD",), **changes: Any) -> Grid:
    grid = paper_grid(
        data={name: {"recipe": "digits-tasks"} for name in data},
        bases={"Individual": {"method": "local"}, "FedAvg": {"method": "fedavg"}, "MaTU": {"method": "matu"}},
        addons={"-": {}},
        **{"seeds": [0, 1], "delta": "Individual/-", **changes},
    )
    save(grid, folder, {})
    return grid


def held(folder: Path, cell: Cell, k: int, bits: int, values: dict[str, float]) -> None:
    """A run with k tasks per client, whose client sent so many bits for each of its tasks, in each of two rounds."""
    path = write_run(folder, cell, values, history={1: values, 2: values})
    recipe = yaml.safe_load((path / "recipe.yaml").read_text())
    recipe["partition"] = {"name": "task-groups", "tasks_per_client": k}
    (path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    sent = bits * len(values) // 8
    up = [{"client": "a", "role": "encoder", "task": None, "bytes": sent}]
    lines = [{"round": r, "up": up, "down": []} for r in (1, 2)]
    (path / "bytes.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_radar(tmp_path: Path) -> None:
    grid = made(tmp_path, figure="radar")
    for seed, base in ((0, 0.5), (1, 1.0)):
        write_run(tmp_path, Cell("NYUD", "Individual", "-", seed), {"semseg": base, "depth": 2.0, "edge": 0.5})
        write_run(tmp_path, Cell("NYUD", "MaTU", "-", seed), {"semseg": 0.4, "depth": 2.5, "edge": 0.25})
    write_run(tmp_path, Cell("NYUD", "FedAvg", "-", 1), {"semseg": 0.5, "depth": 1.0, "edge": 0.5})
    found = bars(*radar(grid, tmp_path, "test")["concat"])
    matu = f"MaTU, mean {190 / 3:.1f} %"
    assert list(found) == ["Individual = 100 %", f"FedAvg, mean {350 / 3:.1f} %", matu]
    assert set(found["Individual = 100 %"].values()) == {100.0}
    # semseg: the mean of 0.4 / 0.5 and 0.4 / 1; depth, where less is better: 2 / 2.5; edge: a half
    assert found[matu] == pytest.approx({"semseg": 60.0, "depth": 80.0, "edge": 50.0})
    of_seed_1 = {"semseg": 50.0, "depth": 200.0, "edge": 100.0}
    assert found[f"FedAvg, mean {350 / 3:.1f} %"] == pytest.approx(of_seed_1)
    draw(grid, tmp_path, tmp_path / "f.png")
    assert (tmp_path / "f.png").stat().st_size > 10_000

    (chart,) = radar(grid, tmp_path, "test", reference="FedAvg/-", tasks=["edge", "semseg"])["concat"]
    circle, alone, other = bars(chart).items()
    assert [name.split(",")[0] for name in (alone[0], other[0])] == ["Individual", "MaTU"]
    assert alone[1] == pytest.approx({"semseg": 200.0, "edge": 100.0})
    with pytest.raises(RecipeError, match=r"no cell 'FedAv/-'\. Did you mean 'FedAvg/-'"):
        radar(grid, tmp_path, "test", reference="FedAv/-")
    with pytest.raises(RecipeError, match="no task 'edges'"):
        radar(grid, tmp_path, "test", tasks=["edges"])


def test_radar_without_a_reference(tmp_path: Path) -> None:
    grid = made(tmp_path, delta="none")
    write_run(tmp_path, Cell("NYUD", "MaTU", "-", 0), {"semseg": 0.4})
    with pytest.raises(RecipeError, match=r"figure\.reference: expected BASE/ADDON"):
        radar(grid, tmp_path, "test")
    with pytest.raises(StateError, match="the reference Individual/- of its figure has not finished"):
        radar(grid, tmp_path, "test", reference="Individual/-")


def test_tasks_per_client(tmp_path: Path) -> None:
    grid = made(tmp_path, ("two", "eight", "other"), figure="tasks-per-client")
    for seed in (0, 1):
        for data, k in (("eight", 8), ("two", 2)):
            held(tmp_path, Cell(data, "FedAvg", "-", seed), k, 4_000_000 // k, {"semseg": 0.5 + seed / 10})
            held(tmp_path, Cell(data, "MaTU", "-", seed), k, 8_000_000 // k, {"semseg": 0.25 * k})
    write_run(tmp_path, Cell("other", "Individual", "-", 0), {"semseg": 0.9})  # sets no tasks per client
    found = panels(tasks_per_client(grid, tmp_path, "test"))
    assert list(found) == ["MB sent by a client per round", "mean over tasks mIoU ↑"]
    sent, mean = map(means, found.values())
    # the runs' client has one task, as one of the k clients have in whose place a client with k tasks stands
    assert sent == {"FedAvg": {2: 0.5, 8: 0.5}, "MaTU": {2: 1.0, 8: 1.0}}
    assert mean == {"FedAvg": pytest.approx({2: 0.55, 8: 0.55}), "MaTU": {2: 0.5, 8: 2.0}}
    draw(grid, tmp_path, tmp_path / "f.svg")
    found = panels(tasks_per_client(grid, tmp_path, "test", reference="other/Individual/-"))
    share = means(found["mean over tasks mIoU ↑, % of Individual"])
    assert share["FedAvg"] == pytest.approx({2: 50 / 0.9, 8: 50 / 0.9})  # of seed 0, which the reference has
    (one, _) = map(means, panels(tasks_per_client(grid, tmp_path, "test", only=["MaTU"])).values())
    assert list(one) == ["MaTU"]
    with pytest.raises(RecipeError, match="no cell 'others/Individual/-', expected DATA/BASE/ADDON"):
        tasks_per_client(grid, tmp_path, "test", reference="others/Individual/-")
    with pytest.raises(StateError, match="the reference other/MaTU/- of its figure has not finished"):
        tasks_per_client(grid, tmp_path, "test", reference="other/MaTU/-")


def means(chart: dict[str, Any]) -> dict[str, dict[float, float]]:
    """Name -> x -> y of the lines, without their intervals."""
    found: dict[str, dict[float, float]] = {}
    for row in rows_of(chart):
        if "y" in row:
            found.setdefault(row["name"], {})[row["x"]] = row["y"]
    return found


def bars(chart: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Part -> group -> length."""
    found: dict[str, dict[str, float]] = {}
    for row in rows_of(chart):
        found.setdefault(row["part"], {})[row["group"]] = row["value"]
    return found


def test_data_sets_as_bars(tmp_path: Path) -> None:
    grid = made(tmp_path, ("alone", "easy", "hard"), figure={"name": "data-sets", "reference": "alone/Individual/-"})
    for seed, best in ((0, 1.0), (1, 0.8)):
        write_run(tmp_path, Cell("alone", "Individual", "-", seed), {"semseg": best})
        write_run(tmp_path, Cell("easy", "MaTU", "-", seed), {"semseg": 0.8})
        write_run(tmp_path, Cell("hard", "MaTU", "-", seed), {"semseg": 0.4})
    write_run(tmp_path, Cell("hard", "FedAvg", "-", 0), {"semseg": 0.2})
    share, mean = map(bars, data_sets(grid, tmp_path, "test", reference="alone/Individual/-")["concat"])
    assert share == {"FedAvg": {"hard": pytest.approx(20)}, "MaTU": pytest.approx({"easy": 90.0, "hard": 45.0})}
    assert mean == {"FedAvg": {"hard": pytest.approx(0.2)}, "MaTU": pytest.approx({"easy": 0.8, "hard": 0.4})}
    one = data_sets(grid, tmp_path, "test", only=["FedAvg"])
    assert bars(one["concat"][0]) == {"FedAvg": {"hard": pytest.approx(0.2)}}
    assert "easy" not in str(one), "no place for a data set without bars"
    (alone,) = map(bars, data_sets(grid, tmp_path, "test")["concat"])
    assert alone["Individual"] == {"alone": pytest.approx(0.9)}
    draw(grid, tmp_path, tmp_path / "f.svg")


def test_tasks_per_client_needs_such_cells_and_one_metric(tmp_path: Path) -> None:
    grid = made(tmp_path)
    write_run(tmp_path, Cell("NYUD", "FedAvg", "-", 0), {"semseg": 0.4})
    with pytest.raises(RecipeError, match=r"no finished cell sets partition\.tasks_per_client"):
        tasks_per_client(grid, tmp_path, "test")
    held(tmp_path, Cell("NYUD", "FedAvg", "-", 1), 2, 8, {"semseg": 0.4, "depth": 0.5})
    other = made(tmp_path / "b")
    held(tmp_path / "b", Cell("NYUD", "FedAvg", "-", 0), 2, 8, {"semseg": 0.4, "depth": 0.5})
    with pytest.raises(RecipeError, match="needs one metric, found miou, rmse"):
        tasks_per_client(other, tmp_path / "b", "test")
    assert len(panels(tasks_per_client(other, tmp_path / "b", "test", tasks=["depth"]))) == 2
