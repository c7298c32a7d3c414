"""A grid's folder in Python."""

from __future__ import annotations

from pathlib import Path

import pytest

import fedloom as fl
from fedloom.errors import StateError
from fedloom.study.grid import cells, save
from grid_support import FEDAVG, paper_grid, write_run


def test_every_number_of_a_grid_as_a_data_frame(tmp_path: Path) -> None:
    grid = paper_grid(seeds=[0, 1])
    save(grid, tmp_path, {})
    with pytest.raises(StateError, match="no cell of grid paper has finished"):
        fl.grid(tmp_path).to_pandas()
    some = [cell for cell in cells(grid) if (cell.data, cell.base) == ("NYUD", "FedAvg")]
    for cell in some:
        write_run(tmp_path, cell, FEDAVG, rho=None if cell.addon == "-" else 0.5)
    opened = fl.grid(str(tmp_path))
    assert "FedAvg" in opened.table()
    pytest.importorskip("pandas")
    frame = opened.to_pandas()
    assert list(frame) == [
        "data",
        "base",
        "addon",
        "seed",
        "round",
        "client",
        "task",
        "metric",
        "split",
        "model",
        "value",
    ]
    assert set(frame["addon"]) == {"-", "+DEA"}
    assert set(frame["seed"]) == {0, 1}


def test_what_is_no_grid_is_said(tmp_path: Path) -> None:
    with pytest.raises(StateError, match=r"is not a grid's folder: grid.yaml is absent"):
        fl.grid(tmp_path)
