"""Figures over rounds: a line for each client, and panels in several rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from fedloom.errors import RecipeError
from fedloom.federation.runs.reader import Run
from fedloom.study.figures import convergence, draw, sweep
from fedloom.study.grid import Cell, save
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


def panels(figure: Any) -> dict[str, dict[str, list[float]]]:
    """Title of each panel that is shown -> label -> y of its lines."""
    return {
        axes.get_title(): {
            line.get_label(): list(line.get_ydata()) for line in axes.lines if not line.get_label().startswith("_")
        }
        for axes in figure.axes
        if axes.get_visible()
    }


def test_domains_over_rounds(domains, tmp_path):
    found = panels(convergence(domains, tmp_path, "test"))
    assert list(found) == ["average ↑", "photo mIoU ↑", "sketch mIoU ↑"]
    assert found["photo mIoU ↑"] == {"FedAvg": [40.5] * 2, "FedAvg rho 0.1": [50.5] * 2, "FedAvg rho 10": [60.5] * 2}
    assert found["sketch mIoU ↑"] == {label: [20.0, 40.0] for label in found["photo mIoU ↑"]}
    assert found["average ↑"]["FedAvg rho 10"] == [40.25, 50.25]  # not the mean over three clients
    some = panels(convergence(domains, tmp_path, "test", tasks=["average", "sketch"]))
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
    found = panels(figure)
    assert list(found) == ["Δ % ↑", "average ↑", "photo mIoU ↑", "sketch mIoU ↑"]
    assert found["average ↑"] == {"FedAvg alone": [40.25] * 2, "FedAvg": [45.25, 50.25]}
    assert found["photo mIoU ↑"]["FedAvg"] == [50.5, 60.5]
    delta = [50 * (v / 40.0 + v / 41.0) / 2 for v in (10.0, 20.0)]  # sketch is as before
    assert found["Δ % ↑"]["FedAvg"] == pytest.approx(delta)
    assert figure.axes[0].get_xscale() == "linear"
    assert "model kept at the end (round 2)" in figure.get_suptitle()
    best = drawn("best-validation", tasks=["average", "spread"], log=True)
    assert panels(best)["average ↑"]["FedAvg"] == [35.25, 40.25]
    assert panels(best)["standard deviation ↓"]["FedAvg"] == pytest.approx([30.5 / 2**0.5, 40.5 / 2**0.5])
    assert best.axes[0].get_xscale() == "log"
    assert "best round by its mean over domains on validation data (round 1)" in best.get_suptitle()
    narrow = sweep(domains.model_copy(update={"delta": "none"}), tmp_path, "test", parameter="rho", tasks=["sketch"])
    FigureCanvasAgg(narrow).draw()
    assert narrow.bbox.x0 <= narrow.texts[0].get_window_extent().x0


def test_no_logarithm_of_zero(domains, tmp_path):
    file = next((tmp_path / "cells/D/FedAvg/rho_0.1/s0").glob("recipe.yaml"))
    file.write_text(file.read_text().replace("rho: 0.1", "rho: 0.0"))
    with pytest.raises(RecipeError, match=r"figure\.log: method\.add\.feddea\.rho is 0 in a cell of FedAvg"):
        sweep(domains, tmp_path, "test", parameter="method.add.feddea.rho", log=True)


def test_some_cells_only(tmp_path):
    grid = made(tmp_path, figure="convergence")
    for base in ("Local", "FedAvg"):
        write_run(tmp_path, Cell("NYUD", base, "-", 0), {"x": {"semseg": 1.0}})
    labels = [
        [line.get_label() for line in convergence(grid, tmp_path, "test", only=only).axes[0].lines]
        for only in (None, ["FedAvg"])
    ]
    assert labels == [["Local", "FedAvg"], ["FedAvg"]]
    with pytest.raises(RecipeError, match="no label 'FedAvgg'"):
        convergence(grid, tmp_path, "test", only=["FedAvgg"])


def test_bands_of_fractions_end_at_0_and_1(tmp_path):
    grid = made(tmp_path, figure="convergence")
    for seed, value in enumerate((0.0, 0.1)):
        write_run(tmp_path, Cell("NYUD", "Local", "-", seed), {"x": {"semseg": value, "depth": value}})
    semseg, depth = convergence(grid, tmp_path, "test").axes
    assert [axes.collections[0].get_paths()[0].vertices[:, 1].min() for axes in (semseg, depth)] == [
        0.0,
        pytest.approx(0.05 - 12.706 * 0.05, abs=1e-3),
    ]


def test_lines_beyond_the_last_colour_are_dashed_and_the_legend_fits(tmp_path):
    bases = {f"a rather long name {n}": {"method": "local"} for n in range(10)}
    grid = paper_grid(
        data={"NYUD": {"recipe": "digits-tasks"}},
        bases=bases,
        addons={"-": {}},
        seeds=[0],
        figure="convergence",
        delta="none",
    )
    save(grid, tmp_path, {})
    for base in bases:
        write_run(tmp_path, Cell("NYUD", base, "-", 0), {"x": {"semseg": 1.0}})
    figure = convergence(grid, tmp_path, "test")
    drawn = [(line.get_color(), line.get_linestyle()) for line in figure.axes[0].lines]
    assert len(set(drawn)) == 10
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    box = figure.legends[0].get_window_extent(canvas.get_renderer())
    assert box.x0 >= 0
    assert box.x1 <= figure.bbox.width
