"""Figures over rounds: a line for each client, and panels in several rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedloom.errors import RecipeError
from fedloom.federation.runs.reader import Run
from fedloom.study.charts import rows_of
from fedloom.study.figures import convergence, draw, sweep
from fedloom.study.grid import Cell, save
from grid_support import PRIMARY, paper_grid, write_run
from report_support import panels

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
    found = panels(figure)
    assert list(found) == ["semseg mIoU ↑, x, y", "depth RMSE ↓, y"]
    semseg = found["semseg mIoU ↑, x, y"]
    assert list(means(semseg)) == [f"{base}, client {n} of 2" for base in ("Local", "FedAvg") for n in (1, 2)]
    assert means(semseg)["Local, client 1 of 2"] == [1.5, 2.5]  # means over the seeds
    assert means(semseg)["FedAvg, client 2 of 2"] == [12.5, 14.5]
    assert len(set(semseg["encoding"]["color"]["scale"]["range"])) == 2
    assert {row["name"] for row in rows_of(semseg) if "low" in row} == set(means(semseg))  # a band each
    assert list(means(found["depth RMSE ↓, y"])) == ["Local", "FedAvg"]
    draw(grid, tmp_path, tmp_path / "f.png")
    assert (tmp_path / "f.png").stat().st_size > 10_000
    found = panels(convergence(grid, tmp_path, "test"))
    assert list(means(found["semseg mIoU ↑"]).values()) == [[2.0, 3.5], [12.0, 13.5]]


def means(chart: dict[str, Any]) -> dict[str, list[float]]:
    """Name -> y of the lines of a chart."""
    found: dict[str, list[float]] = {}
    for row in rows_of(chart):
        if "y" in row:
            found.setdefault(row["name"], []).append(row["y"])
    return found


def lines_of(figure: dict[str, Any]) -> dict[str, dict[str, list[float]]]:
    """Title of each panel -> name -> y of its lines."""
    return {title: means(chart) for title, chart in panels(figure).items()}


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


@pytest.mark.parametrize(("tasks", "wide"), [(6, 6), (7, 4), (9, 5)])
def test_many_panels_stand_in_several_rows(tmp_path, monkeypatch, tasks, wide):
    for name in NAMES:
        monkeypatch.setitem(PRIMARY, name, "miou")
    monkeypatch.setattr("grid_support.DIRECTIONS", dict.fromkeys(NAMES, "max"))
    grid = made(tmp_path, figure="convergence")
    write_run(tmp_path, Cell("NYUD", "Local", "-", 0), dict.fromkeys(NAMES[:tasks], 1.0))
    figure = convergence(grid, tmp_path, "test")
    assert figure["columns"] == wide
    assert [title.split()[0] for title in panels(figure)][4:] == NAMES[4:tasks]


OF = {"a": "photo", "b": "photo", "c": "sketch"}


def scores(photo: float, sketch: float) -> dict[str, dict[str, float]]:
    """The clients of photo are one below and one above its mean."""
    return {"a": {"semseg": photo - 1}, "b": {"semseg": photo + 1}, "c": {"semseg": sketch}}


@pytest.fixture
def domains(tmp_path: Path) -> Any:
    """A grid of two values of rho over two domains and two seeds; on validation data round 1 is best."""
    rhos = {"-": None, "rho 0.1": 0.1, "rho 10": 10.0}
    grid = paper_grid(
        data={"D": {"recipe": "digits-domains"}},
        bases={"FedAvg": {"method": "fedavg"}},
        addons={name: {} if rho is None else {"method.add.feddea": {"rho": rho}} for name, rho in rhos.items()},
        seeds=[0, 1],
        show="domains",
        figure={"name": "sweep", "parameter": "method.add.feddea.rho"},
    )
    save(grid, tmp_path, {})
    for seed in (0, 1):
        for number, (name, rho) in enumerate(rhos.items()):
            history = {r: scores(40.0 + 10 * number + seed, 20.0 * r) for r in (1, 2)}
            val = {1: scores(9.0, 9.0), 2: scores(8.0, 8.0)}
            write_run(
                tmp_path, Cell("D", "FedAvg", name, seed), history[2], rho=rho, history=history, val=val, domains=OF
            )
    return grid


def test_domains_over_rounds(domains, tmp_path):
    found = lines_of(convergence(domains, tmp_path, "test"))
    assert list(found) == ["average ↑", "photo mIoU ↑", "sketch mIoU ↑"]
    assert found["photo mIoU ↑"] == {"FedAvg": [40.5] * 2, "FedAvg rho 0.1": [50.5] * 2, "FedAvg rho 10": [60.5] * 2}
    assert found["sketch mIoU ↑"] == {label: [20.0, 40.0] for label in found["photo mIoU ↑"]}
    assert found["average ↑"]["FedAvg rho 10"] == [40.25, 50.25]  # not the mean over three clients
    some = lines_of(convergence(domains, tmp_path, "test", tasks=["average", "sketch"]))
    assert list(some) == ["average ↑", "sketch mIoU ↑"]
    assert some["average ↑"] == found["average ↑"]
    with pytest.raises(RecipeError, match=r"no task 'averge'\. Did you mean 'average'\?"):
        convergence(domains, tmp_path, "test", tasks=["averge"])
    with pytest.raises(RecipeError, match=r"figure\.clients: true found, expected false where 'show' is 'domains'"):
        convergence(domains, tmp_path, "test", clients=True)


def test_a_sweep_over_domains(domains, tmp_path):
    def drawn(at: str, **keys: Any) -> Any:
        grid = domains.model_copy(update={"at": at})
        return sweep(grid, tmp_path, "test", parameter="method.add.feddea.rho", **keys)

    figure = drawn("last")
    found = lines_of(figure)
    assert list(found) == ["Δ % ↑", "average ↑", "photo mIoU ↑", "sketch mIoU ↑"]
    assert found["average ↑"] == {"FedAvg alone": [40.25] * 2, "FedAvg": [45.25, 50.25]}
    assert found["photo mIoU ↑"]["FedAvg"] == [50.5, 60.5]
    delta = [50 * (v / 40.0 + v / 41.0) / 2 for v in (10.0, 20.0)]  # sketch is as before
    assert found["Δ % ↑"]["FedAvg"] == pytest.approx(delta)
    assert figure["concat"][0]["encoding"]["x"]["scale"]["type"] == "linear"
    assert "model kept at the end (round 2)" in " ".join(figure["title"]["subtitle"])
    best = drawn("best-validation", tasks=["average", "spread"], log=True)
    assert lines_of(best)["average ↑"]["FedAvg"] == [35.25, 40.25]
    assert lines_of(best)["standard deviation ↓"]["FedAvg"] == pytest.approx([30.5 / 2**0.5, 40.5 / 2**0.5])
    assert best["concat"][0]["encoding"]["x"]["scale"]["type"] == "log"
    assert "best round by its mean over domains on validation data (round 1)" in " ".join(best["title"]["subtitle"])


def test_no_logarithm_of_zero(domains, tmp_path):
    file = next((tmp_path / "cells/D/FedAvg/rho_0.1/s0").glob("recipe.yaml"))
    file.write_text(file.read_text().replace("rho: 0.1", "rho: 0.0"))
    with pytest.raises(RecipeError, match=r"figure\.log: method\.add\.feddea\.rho is 0 in a cell of FedAvg"):
        sweep(domains, tmp_path, "test", parameter="method.add.feddea.rho", log=True)


def test_some_cells_only(tmp_path):
    grid = made(tmp_path, figure="convergence")
    for base in ("Local", "FedAvg"):
        write_run(tmp_path, Cell("NYUD", base, "-", 0), {"x": {"semseg": 1.0}})
    drawn = [convergence(grid, tmp_path, "test", only=only)["concat"][0] for only in (None, ["FedAvg"])]
    labels = [list(means(chart)) for chart in drawn]
    assert labels == [["Local", "FedAvg"], ["FedAvg"]]
    with pytest.raises(RecipeError, match="no label 'FedAvgg'"):
        convergence(grid, tmp_path, "test", only=["FedAvgg"])


@pytest.mark.parametrize("seeds", [1, 2])
def test_a_figure_of_one_seed_claims_no_interval(tmp_path, seeds):
    grid = made(tmp_path, figure="convergence")
    for seed in range(seeds):
        write_run(tmp_path, Cell("NYUD", "Local", "-", seed), {"x": {"semseg": 1.0 + seed}})
    for figure in (convergence(grid, tmp_path, "test"), sweep(grid, tmp_path, "test", parameter="training.rounds")):
        said = " ".join(figure["title"]["subtitle"])
        assert ("95 % t-interval over seeds" in said) == (seeds == 2)
        assert ("one seed, so no interval" in said) == (seeds == 1)


def test_bands_of_fractions_end_at_0_and_1(tmp_path):
    grid = made(tmp_path, figure="convergence")
    for seed, value in enumerate((0.0, 0.1)):
        write_run(tmp_path, Cell("NYUD", "Local", "-", seed), {"x": {"semseg": value, "depth": value}})
    assert [rows_of(chart)[0]["low"] for chart in convergence(grid, tmp_path, "test")["concat"]] == [
        0.0,
        pytest.approx(0.05 - 12.706 * 0.05, abs=1e-3),
    ]
