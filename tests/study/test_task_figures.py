"""The figures of MaTU: shares of a reference around a circle, and numbers over tasks per client."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from fedloom.errors import RecipeError, StateError
from fedloom.study.figures import data_sets, draw, radar, tasks_per_client
from fedloom.study.grid import Cell, Grid, save
from grid_support import paper_grid, write_run


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
    (axes,) = radar(grid, tmp_path, "test").axes
    assert axes.name == "polar"
    circle, fedavg, matu = axes.lines
    assert circle.get_label() == "Individual = 100 %"
    assert set(circle.get_ydata()) == {100.0}
    # semseg: the mean of 0.4 / 0.5 and 0.4 / 1; depth, where less is better: 2 / 2.5; edge: a half
    assert matu.get_ydata() == pytest.approx([60.0, 80.0, 50.0, 60.0])
    assert matu.get_label() == f"MaTU, mean {190 / 3:.1f} %"
    assert matu.get_xdata() == pytest.approx([0, 2 * math.pi / 3, 4 * math.pi / 3, 0])
    assert fedavg.get_ydata() == pytest.approx([50.0, 200.0, 100.0, 50.0])  # of seed 1 alone
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["semseg", "depth", "edge"]
    draw(grid, tmp_path, tmp_path / "f.png")
    assert (tmp_path / "f.png").stat().st_size > 10_000

    (axes,) = radar(grid, tmp_path, "test", reference="FedAvg/-", tasks=["edge", "semseg"]).axes
    assert {line.get_label().split(",")[0] for line in axes.lines[1:]} == {"Individual", "MaTU"}
    assert axes.lines[1].get_ydata() == pytest.approx([200.0, 100.0, 200.0])
    with pytest.raises(RecipeError, match=r"no cell 'FedAv/-'\. Did you mean 'FedAvg/-'"):
        radar(grid, tmp_path, "test", reference="FedAv/-")
    with pytest.raises(RecipeError, match="no task 'edges'"):
        radar(grid, tmp_path, "test", tasks=["edges"])


def test_radar_without_a_reference(tmp_path: Path) -> None:
    grid = made(tmp_path, delta="none")
    write_run(tmp_path, Cell("NYUD", "MaTU", "-", 0), {"semseg": 0.4})
    with pytest.raises(RecipeError, match=r"figure\.reference: expected a cell"):
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
    bits, mean = tasks_per_client(grid, tmp_path, "test").axes
    assert (bits.get_title(), mean.get_title()) == ("Mbit up a task ↓", "mean over tasks mIoU ↑")
    assert [line.get_label() for line in bits.lines if not line.get_label().startswith("_")] == ["FedAvg", "MaTU"]
    found = {line.get_label(): line for line in bits.lines}
    assert (list(found["MaTU"].get_xdata()), list(found["MaTU"].get_ydata())) == ([2, 8], [4.0, 1.0])
    assert list(found["FedAvg"].get_ydata()) == [2.0, 0.5]
    found = {line.get_label(): line for line in mean.lines}
    assert found["FedAvg"].get_ydata() == pytest.approx([0.55, 0.55])
    assert list(found["MaTU"].get_ydata()) == [0.5, 2.0]
    draw(grid, tmp_path, tmp_path / "f.svg")
    _, share = tasks_per_client(grid, tmp_path, "test", reference="other/Individual/-").axes
    assert share.get_title() == "mean over tasks mIoU ↑, % of Individual"
    found = {line.get_label(): line for line in share.lines}
    assert found["FedAvg"].get_ydata() == pytest.approx([50 / 0.9, 50 / 0.9])  # of seed 0, which the reference has
    with pytest.raises(RecipeError, match="no cell 'others/Individual/-', expected DATA/BASE/ADDON"):
        tasks_per_client(grid, tmp_path, "test", reference="others/Individual/-")
    with pytest.raises(StateError, match="the reference other/MaTU/- of its figure has not finished"):
        tasks_per_client(grid, tmp_path, "test", reference="other/MaTU/-")


def test_data_sets_as_bars(tmp_path: Path) -> None:
    grid = made(tmp_path, ("alone", "easy", "hard"), figure={"name": "data-sets", "reference": "alone/Individual/-"})
    for seed, best in ((0, 1.0), (1, 0.8)):
        write_run(tmp_path, Cell("alone", "Individual", "-", seed), {"semseg": best})
        write_run(tmp_path, Cell("easy", "MaTU", "-", seed), {"semseg": 0.8})
        write_run(tmp_path, Cell("hard", "MaTU", "-", seed), {"semseg": 0.4})
    write_run(tmp_path, Cell("hard", "FedAvg", "-", 0), {"semseg": 0.2})
    share, mean = data_sets(grid, tmp_path, "test", reference="alone/Individual/-").axes
    assert [tick.get_text() for tick in mean.get_xticklabels()] == ["easy", "hard"]

    def bars(axes: Any) -> dict[str, list[float]]:
        return {c.get_label(): [bar.get_height() for bar in c] for c in axes.containers if hasattr(c, "patches")}

    assert bars(share) == {"FedAvg": [pytest.approx(20)], "MaTU": pytest.approx([90.0, 45.0])}
    assert bars(mean) == {"FedAvg": [pytest.approx(0.2)], "MaTU": pytest.approx([0.8, 0.4])}
    fedavg, matu = (c for c in mean.containers if hasattr(c, "patches"))
    assert fedavg[0].get_x() < matu[1].get_x() == pytest.approx(1.0)  # side by side at the second data set
    (alone,) = data_sets(grid, tmp_path, "test").axes
    assert bars(alone)["Individual"] == [pytest.approx(0.9)]
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
    assert len(tasks_per_client(other, tmp_path / "b", "test", tasks=["depth"]).axes) == 2
