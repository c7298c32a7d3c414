"""Figures over rounds: a line for each client, and panels in several rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedloom.study.figures import convergence, draw
from fedloom.study.grid import Cell, save
from fedloom.study.runs import Run
from grid_support import PRIMARY, paper_grid, write_run

NAMES = ["semseg", "depth", "normals", "edge", "a", "b", "c", "d", "e"]


def made(folder: Path, **changes: Any) -> Any:
    grid = paper_grid(
        data={"NYUD": {"recipe": "digits-tasks"}},
        bases={"Local": {"method": "local"}, "FedAvg": {"method": "fedavg"}},
        addons={"-": {}},
        seeds=[0, 1],
        **changes,
    )
    save(grid, folder, {})
    return grid


def test_a_line_for_each_client(tmp_path):
    grid = made(tmp_path, figure={"name": "convergence", "clients": True})
    for seed in (0, 1):
        for base, plus in (("Local", 0.0), ("FedAvg", 10.0)):
            history = {
                r: {"x": {"semseg": plus + r + seed}, "y": {"semseg": plus + 2 * r + seed, "depth": 1.0 / r}}
                for r in (1, 2)
            }
            write_run(tmp_path, Cell("NYUD", base, "-", seed), history[2], history=history)
    figure = grid.figure.entry.function(grid, tmp_path, "test", **grid.figure.params)
    semseg, depth = figure.axes
    assert [a.get_title() for a in figure.axes] == ["semseg mIoU ↑\nx, y", "depth RMSE ↓\ny"]
    lines = {line.get_label(): line for line in semseg.lines}
    assert list(lines) == [f"{base}, client {n} of 2" for base in ("Local", "FedAvg") for n in (1, 2)]
    assert list(lines["Local, client 1 of 2"].get_ydata()) == [1.5, 2.5]  # means over the seeds
    assert list(lines["FedAvg, client 2 of 2"].get_ydata()) == [12.5, 14.5]
    assert [line.get_linestyle() for line in lines.values()] == ["-", "--", "-", "--"]
    assert len({line.get_color() for line in lines.values()}) == 2
    assert len(semseg.collections) == 4  # a band each
    assert [line.get_label() for line in depth.lines] == ["Local", "FedAvg"]
    draw(grid, tmp_path, tmp_path / "f.png")

    means = convergence(grid, tmp_path, "test").axes[0]
    assert [list(line.get_ydata()) for line in means.lines] == [[2.0, 3.5], [12.0, 13.5]]
    assert means.get_title() == "semseg mIoU ↑"


def test_one_model_for_all_stands_for_each_client(tmp_path):
    write_run(tmp_path, Cell("NYUD", "FedAvg", "-", 0), {"x": {"semseg": 1.0}, "y": {"depth": 2.0}})
    folder = Cell("NYUD", "FedAvg", "-", 0).folder(tmp_path)
    metrics = folder / "metrics.jsonl"
    text = metrics.read_text().replace('"client": "x"', '"client": null').replace('"client": "y"', '"client": null')
    metrics.write_text(text.replace('"personal"', '"global"'))
    run = Run.read(folder)
    assert [final.values for final in run.history("test", "x")] == [{"semseg": {"miou": 1.0}}]
    assert [final.values for final in run.history("test", "y")] == [{"depth": {"rmse": 2.0}}]
    assert run.history("val", "x") == ()


@pytest.mark.parametrize(("tasks", "rows", "wide"), [(6, 1, 6), (7, 2, 4), (9, 2, 5)])
def test_many_panels_stand_in_several_rows(tmp_path, monkeypatch, tasks, rows, wide):
    for name in NAMES:
        monkeypatch.setitem(PRIMARY, name, "miou")
    monkeypatch.setattr("grid_support.DIRECTIONS", dict.fromkeys(NAMES, "max"))
    grid = made(tmp_path, figure="convergence")
    write_run(tmp_path, Cell("NYUD", "Local", "-", 0), dict.fromkeys(NAMES[:tasks], 1.0))
    figure = convergence(grid, tmp_path, "test")
    assert figure.axes[0].get_subplotspec().get_gridspec().get_geometry() == (rows, wide)
    shown = [axes for axes in figure.axes if axes.get_visible()]
    assert len(shown) == tasks
    assert [axes.get_title().split()[0] for axes in shown[4:]] == NAMES[4:tasks]
