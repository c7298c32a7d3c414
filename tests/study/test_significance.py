"""Tests and ranks of run folders and grids, with the numbers of a thesis that were recomputed from its runs."""

from __future__ import annotations

import csv
import io
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from fedloom.errors import RecipeError, StateError
from fedloom.study.grid import Cell, Grid, against, open_folder
from fedloom.study.significance.contrasts import contrasts, grid_contrasts
from fedloom.study.significance.ranks import grid_ranked, ranked
from fedloom.study.tables.compare import compare
from fedloom.study.tables.table import tabulate
from grid_support import paper_grid, write_grid

SEEDS = (42, 123, 456)
# A thesis on tasks without a server, PASCAL, three runs each: a loss at the best round.
LOSS = {"A1": (1.0931, 1.1259, 1.1206), "A2": (0.9828, 0.9792, 0.9857), "B4": (0.9730, 1.0078, 1.0013)}


def thesis(**changes: Any) -> Grid:
    bases = {"A1": {"method": "fedavg"}, "A2": {"method": "fedprox"}, "B4": {"method": "local"}}
    value = {"data": {"PASCAL": {"recipe": "digits-tasks"}}, "bases": bases, "addons": {"-": {}}, "seeds": SEEDS}
    return paper_grid(**(value | {"delta": "A1/-"} | changes))


def runs(losses: dict[str, tuple[float, ...]] = LOSS, seeds: tuple[int, ...] = SEEDS) -> dict[tuple[Any, ...], Any]:
    return {
        ("PASCAL", name, "-", seed): {"normals": value}
        for name, values in losses.items()
        for seed, value in zip(seeds, values, strict=False)
    }


@pytest.fixture
def grid(tmp_path: Path) -> Path:
    return write_grid(tmp_path / "g", thesis(), runs())


def tell(folder: Path, cell: Cell, **about: Any) -> Path:
    """Change what a run says about itself."""
    path = cell.folder(folder)
    info = json.loads((path / "run.json").read_text())
    (path / "run.json").write_text(json.dumps({**info, **about}))
    return path


def lines(text: str) -> dict[tuple[str, str], dict[str, str]]:
    return {(r["method"], r["task"]): r for r in csv.DictReader(io.StringIO(text))}


def test_the_statement_of_a_thesis_from_its_grid(grid):
    found = lines(grid_contrasts(*open_folder(grid)).to_csv())
    assert list(found) == [("A2", "normals"), ("A2", ""), ("B4", "normals"), ("B4", "")]
    loss = found["A2", "normals"]
    # it printed p < 0.001, d = 6.81 and 13.3 %
    assert float(loss["p"]) == pytest.approx(0.0067, abs=5e-5)
    assert float(loss["d_av"]) == pytest.approx(10.3, abs=0.05)
    assert float(loss["gain"]) == pytest.approx(0.13063, abs=1e-5)  # a smaller loss is a gain
    assert float(loss["gain_percent"]) == pytest.approx(11.7, abs=0.05)
    assert (loss["base"], loss["n"], loss["seeds"], loss["df"], loss["state"]) == (
        "A1",
        "3",
        "42 123 456",
        "2",
        "tested",
    )
    # Holm over the two tests of tasks: the larger p stays
    ps = {name: float(found[name, "normals"]["p"]) for name in ("A2", "B4")}
    corrected = {name: float(found[name, "normals"]["p_holm"]) for name in ("A2", "B4")}
    assert corrected[min(ps, key=ps.get)] == pytest.approx(2 * min(ps.values()))
    assert corrected[max(ps, key=ps.get)] == max(ps.values())


def test_another_reference_is_one_option(grid):
    opened, folder = open_folder(grid)
    found = lines(grid_contrasts(against(opened, "B4/-"), folder).to_csv())
    assert float(found["A2", "normals"]["p"]) == pytest.approx(0.42, abs=5e-3)
    with pytest.raises(RecipeError, match="'B5/-' found"):
        against(opened, "B5/-")
    with pytest.raises(StateError, match="delta is none"):
        grid_contrasts(against(opened, "none"), folder)


def test_delta_is_that_of_the_table(grid):
    opened, folder = open_folder(grid)
    overall = lines(grid_contrasts(opened, folder).to_csv())["A2", ""]
    entry = tabulate(opened, folder).lines[1].entries[-1].estimate
    assert float(overall["gain"]) == pytest.approx(entry.mean, rel=1e-12)
    assert float(overall["gain"]) - float(overall["ci95_low"]) == pytest.approx(entry.half, rel=1e-9)
    assert overall["d_av"] == ""  # a change has no spread of the base


def test_what_people_read(grid):
    made = grid_contrasts(*open_folder(grid))
    text = made.to_text()
    assert text.splitlines()[0] == "A table: paired tests over seeds, against A1"
    assert [w for w in text.splitlines()[3].split() if w != "↓"] == [
        "A2", "normals", "(merr)", "3", "+0.1306", "[+0.0845,", "+0.1768]", "+11.72", "12.18", "0.0067", "0.0067",
        "0.2500", "(0.2500)", "7.03", "3.97", "10.32", "-", "-",
    ]  # fmt: skip
    for said in (
        "d_av = mean gain / sqrt((sd^2 + sd_base^2) / 2)",
        "those of tasks (2)",
        "cannot reach p < 0.05 where n < 6",
    ):
        assert said in text
    assert "| A2 | normals (merr) ↓ | 3 |" in made.to_markdown()
    assert r"A2 & $\Delta$m \% & 3 &" in made.to_latex()
    assert '<th scope="row" class="label">A2</th>' in made.to_html()


def test_latex_compiles(grid, tmp_path):
    if shutil.which("pdflatex") is None:
        pytest.skip("no pdflatex")
    opened, folder = open_folder(grid)
    body = grid_contrasts(opened, folder).to_latex() + grid_ranked(opened, folder).to_latex()
    page = rf"\documentclass{{article}}\usepackage{{booktabs}}\begin{{document}}{body}\end{{document}}"
    (tmp_path / "t.tex").write_text(page)
    subprocess.run(["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "t.tex"], cwd=tmp_path, check=True)


def test_too_few_seeds_are_said_and_not_computed(tmp_path):
    folder = write_grid(tmp_path / "g", thesis(seeds=[42]), runs(seeds=(42,)))
    made = grid_contrasts(*open_folder(folder))
    assert {t.state for t in made.tests} == {"too few"}
    assert all(t.found is None for t in made.tests)
    assert "PASCAL / A2, PASCAL / B4: too few: a test needs two seeds that both have." in made.notes
    assert lines(made.to_csv())["A2", "normals"]["p"] == ""


def test_two_seeds_have_no_hedges_correction(tmp_path):
    folder = write_grid(tmp_path / "g", thesis(seeds=[42, 123]), runs(seeds=(42, 123)))
    made = grid_contrasts(*open_folder(folder))
    assert lines(made.to_csv())["A2", "normals"]["g_z"] == ""
    assert made.sheet().lines[0][11] == "-"


def test_seeds_without_a_partner_are_left_out(tmp_path):
    losses = {**LOSS, "A2": LOSS["A2"][:2]}
    folder = write_grid(tmp_path / "g", thesis(), runs(losses))
    made = grid_contrasts(*open_folder(folder))
    found = lines(made.to_csv())
    assert (found["A2", "normals"]["n"], found["B4", "normals"]["n"]) == ("2", "3")
    assert "Seeds that only one of two methods has are left out." in made.notes
    assert "Runs of the grid that have not finished: 1." in made.notes


def test_cells_without_a_reference_are_named(tmp_path):
    folder = write_grid(tmp_path / "g", thesis(), runs({"A2": LOSS["A2"]}))
    with pytest.raises(StateError, match="no cell in .* has a seed in common"):
        grid_contrasts(*open_folder(folder))
    more = {("PASCAL", "B4", "+DEA", 42): {"normals": 1.0}, ("PASCAL", "A2", "+DEA", 42): {"normals": 1.0}}
    again = thesis(addons={"-": {}, "+DEA": {"method.add.feddea": {}}}, delta="base")
    folder = write_grid(tmp_path / "h", again, {**runs({"A2": LOSS["A2"]}), **more})
    assert any(
        n.endswith("without a seed in common with their reference: PASCAL / B4 +DEA.")
        for n in grid_contrasts(again, folder).notes
    )


def test_equal_gains_and_undefined_numbers_are_said(tmp_path):
    values = {"A1": (1.0, 2.0, 3.0), "A2": (0.5, 1.5, 2.5), "B4": (1.0, float("nan"), 1.5)}
    folder = write_grid(tmp_path / "g", thesis(), runs(values))
    made = grid_contrasts(*open_folder(folder))
    same, undefined = made.tests[0], made.tests[2]
    assert (same.found.d_z, same.found.wilcoxon, made.sheet().lines[0][7]) == (float("inf"), 0.25, "nan")
    assert any(note.startswith("p nan: the same difference at every seed") for note in made.notes)
    assert (undefined.state, undefined.found) == ("undefined", None)
    assert any("PASCAL / B4 (normals)" in n and "no number at seed 123" in n for n in made.notes)


def test_gains_on_negative_bases_and_on_none_are_in_percent_of_its_size(tmp_path):
    """R2 does so: -2 to -1 is a gain of 1, 50 %; of a base of 0 there is no percent, and that is said."""
    several = {"A1": (-2.0, -2.0, -4.0), "A2": (-1.0, -1.0, -3.0), "B4": (-3.0, -2.0, -4.0)}
    grid = thesis(delta="A1/-")
    made_of = {where: {"edge": of["normals"], "semseg": 0.0} for where, of in runs(several).items()}
    made = grid_contrasts(*open_folder(write_grid(tmp_path / "g", grid, made_of)))
    by = {(t.method, t.row.task if t.row else ""): t for t in made.tests}
    assert by["A2", "edge"].percent == pytest.approx((50 + 50 + 25) / 3)
    assert by["B4", "edge"].percent == pytest.approx((-50 + 0 + 0) / 3)
    assert by["A2", "edge"].mean == 1.0
    assert by["A2", ""].mean == pytest.approx((50 + 50 + 25) / 3)
    assert by["A2", "semseg"].percent != by["A2", "semseg"].percent
    note = "PASCAL / A2 (semseg), PASCAL / B4 (semseg): no gain %, and not in Δm where the base is 0"
    assert any(n.startswith(note) for n in made.notes)


def test_one_run_counted_twice_is_refused(tmp_path):
    twice = {**LOSS, "A2": (0.98, 0.98, 0.99)}
    made = grid_contrasts(*open_folder(write_grid(tmp_path / "g", thesis(), runs(twice))))
    assert {t.method: t.state for t in made.tests} == {"A2": "refused", "B4": "tested"}
    assert any("A2 measured the same to the last digit at seeds 42 and 123" in note for note in made.notes)
    assert made.families == {"Δm": 1, "tasks": 1}  # what is refused is no test


def test_pairs_must_have_the_same_examples(grid):
    cell = Cell("PASCAL", "A2", "-", 123)
    tell(grid, cell, partition_hash="other")
    made = grid_contrasts(*open_folder(grid))
    assert {t.method: t.state for t in made.tests} == {"A2": "refused", "B4": "tested"}
    assert any("not the same clients with the same examples at seed 123" in note for note in made.notes)
    # other tasks on the same examples are a comparison that papers make
    for name, train in (("A1", [0, 1]), ("A2", [0, 1])):
        shares = [{"client": "a", "tasks": {name: 1.0}, "train": train, "val": []}]
        path = Cell("PASCAL", name, "-", 123).folder(grid)
        (path / "partition.json").write_text(json.dumps({"clients": shares}))
    assert {t.state for t in grid_contrasts(*open_folder(grid)).tests} == {"tested"}
    (grid / "cells" / "PASCAL" / "A2" / "plain" / "s123" / "partition.json").write_text(
        '{"clients": [{"client": "a"}]}'
    )
    with pytest.raises(StateError, match=r"partition\.json: not a partition: 'train'"):
        grid_contrasts(*open_folder(grid))
    tell(grid, cell, data_hash="other")
    assert any("not the same data set at seed 123" in note for note in grid_contrasts(*open_folder(grid)).notes)


def test_seeds_that_share_everything_are_said(grid):
    for name in LOSS:
        for seed in SEEDS:
            tell(grid, Cell("PASCAL", name, "-", seed), partition_hash="p", data_hash="d")
    note = "PASCAL: all seeds have the same clients and examples: p speaks about training alone."
    assert note in grid_contrasts(*open_folder(grid)).notes


def test_clients_are_counted_but_not_tested(tmp_path):
    def clients(*values: float) -> dict[str, dict[str, float]]:
        return {f"c{i}": {"normals": v} for i, v in enumerate(values)}

    cells = {
        ("PASCAL", "A1", "-", 1): clients(1.0, 1.0, 1.0, 1.0),
        ("PASCAL", "A1", "-", 2): clients(2.0, 2.0, 2.0, 2.0),
        ("PASCAL", "A2", "-", 1): clients(0.5, 0.6, 0.7, 1.4),
        ("PASCAL", "A2", "-", 2): clients(1.0, 2.2, 1.0, 2.0),
    }
    made = grid_contrasts(*open_folder(write_grid(tmp_path / "g", thesis(seeds=[1, 2]), cells)))
    of_task = made.tests[0]
    assert of_task.better == pytest.approx((3 / 4 + 2 / 4) / 2)
    assert of_task.worst == pytest.approx((-0.4 - 0.2) / 2)
    assert of_task.found.n == 2  # seeds, not clients
    assert "so they are no replicates: no test here counts them" in made.to_text()


def of_clients(*several: tuple[float, ...]) -> dict[tuple[Any, ...], Any]:
    """Cells of methods A1 and A2 at two seeds: each client's number of normals."""
    cells = [("PASCAL", name, "-", seed) for name in ("A1", "A2") for seed in (1, 2)]
    return {cell: {f"c{i}": {"normals": v} for i, v in enumerate(of)} for cell, of in zip(cells, several, strict=True)}


def test_clients_are_paired_by_their_means_over_seeds(tmp_path):
    stats = pytest.importorskip("scipy.stats")
    cells = of_clients((1.0, 2.0, 3.0, 4.0), (1.2, 2.4, 2.0, 4.0), (0.5, 1.7, 2.9, 4.1), (0.9, 2.0, 1.0, 4.3))
    opened, folder = open_folder(write_grid(tmp_path / "g", thesis(seeds=[1, 2]), cells))
    made = grid_contrasts(opened, folder, over="clients")
    base, mine = ([1.1, 2.2, 2.5, 4.0], [0.7, 1.85, 1.95, 4.2])
    found = lines(made.to_csv())["A2", "normals"]
    assert (found["over"], found["n"], found["seeds"], found["df"]) == ("clients", "4", "1 2", "3")
    t = stats.ttest_rel(base, mine)  # less is better
    assert (float(found["t"]), float(found["p"])) == pytest.approx((t.statistic, t.pvalue))
    assert float(found["wilcoxon_p"]) == pytest.approx(stats.wilcoxon(base, mine, method="exact").pvalue)
    assert float(found["gain"]) == pytest.approx(sum(base) / 4 - sum(mine) / 4)
    percent = [100 * (b - m) / b for b, m in zip(base, mine, strict=True)]
    overall = lines(made.to_csv())["A2", ""]
    assert float(overall["p"]) == pytest.approx(stats.ttest_1samp(percent, 0).pvalue)
    text = made.to_text()
    assert text.startswith("A table: paired tests over clients, against A1")
    assert "their gains are not independent and p is smaller" in text
    assert "no test here counts them" not in text
    # the mean is that of tests over seeds, where all clients are there at both seeds
    seeds = grid_contrasts(opened, folder).tests[0]
    assert made.tests[0].mean == pytest.approx(seeds.mean)
    assert (seeds.found.n, made.tests[0].found.n) == (2, 4)


def test_one_number_for_all_clients_is_no_pair(tmp_path):
    same = of_clients((1.0,) * 3, (2.0,) * 3, (0.5,) * 3, (1.7,) * 3)
    made = grid_contrasts(*open_folder(write_grid(tmp_path / "g", thesis(seeds=[1, 2]), same)), over="clients")
    assert {t.state for t in made.tests} == {"refused"}
    assert "PASCAL / A2: refused: one number stands for all clients." in made.notes


def test_what_clients_lack_is_said(tmp_path):
    nan = float("nan")
    cells = of_clients((1.0, 2.0), (2.0, 3.0), (nan, 1.0), (1.0, 2.0))
    made = grid_contrasts(*open_folder(write_grid(tmp_path / "g", thesis(seeds=[1, 2]), cells)), over="clients")
    assert {t.state for t in made.tests} == {"undefined"}
    assert any("no number of client c0" in note for note in made.notes)
    few = of_clients((1.0,), (2.0,), (3.0,), (1.5,))
    made = grid_contrasts(*open_folder(write_grid(tmp_path / "f", thesis(seeds=[1, 2]), few)), over="clients")
    assert {t.state for t in made.tests} == {"too few"}
    assert "PASCAL / A2: too few: a test needs two clients with numbers of both." in made.notes
    apart = {cell: {f"{cell[1]}{c}": v for c, v in of.items()} for cell, of in cells.items()}
    with pytest.raises(StateError, match="a client with numbers in common"):
        grid_contrasts(*open_folder(write_grid(tmp_path / "a", thesis(seeds=[1, 2]), apart)), over="clients")
    with pytest.raises(StateError, match="shows domains"):
        grid_contrasts(thesis(show="domains"), tmp_path / "a", over="clients")


def test_means_over_different_clients_are_said(tmp_path):
    cells = {
        ("PASCAL", name, "-", seed): {"c0": {"normals": 1.0 + at + seed}, other: {"normals": 2.0 + at * seed}}
        for at, (name, other) in enumerate((("A1", "c1"), ("A2", "c2"), ("B4", "c1")))
        for seed in (1, 2)
    }
    made = grid_contrasts(*open_folder(write_grid(tmp_path / "g", thesis(seeds=[1, 2]), cells)))
    said = "Not the same clients have the task: A2 and A1. Their means are over different clients."
    assert said in made.notes
    over = grid_contrasts(*open_folder(tmp_path / "g"), over="clients")
    assert "Not the same clients have the task: A2 and A1. Only clients with numbers of both are paired." in over.notes
    assert {t.method: len(t.gains) for t in over.tests} == {"A2": 1, "B4": 2}


def test_a_comparison_of_runs(grid):
    folders = [
        tell(grid, Cell("PASCAL", name, "-", seed), partition_hash=f"p{seed}", recipe_text=name)
        for name in LOSS
        for seed in SEEDS
    ]
    found = compare(folders)
    made = contrasts(found)
    assert float(lines(made.to_csv())["A2-", "normals"]["p"]) == pytest.approx(0.0067, abs=5e-5)
    assert not any("each seed against" in note for note in made.notes)
    order = list(ranked(found).ranking.ranks)
    assert order[-1] == "A1-"
    with pytest.raises(StateError, match="a test needs two methods"):
        contrasts(compare(folders[:3]))
    with pytest.raises(StateError, match="no method has a seed in common with A1-"):
        contrasts(compare([folders[0], folders[4]]))
    with pytest.raises(StateError, match="ranks need two methods"):
        ranked(compare(folders[:3]))


def test_ranks_of_a_grid(tmp_path):
    # the first is best on both tasks, of which one is to be small and one large
    cells = {
        (data, name, "-", seed): {"semseg": 3.0 - at + shift, "normals": 1.0 + at + shift}
        for data in ("NYUD", "PASCAL")
        for at, name in enumerate(("A1", "A2", "B4"))
        for seed, shift in ((1, 0.1), (2, 0.2))
    }
    two = {"NYUD": {"recipe": "digits-tasks"}, "PASCAL": {"recipe": "digits-tasks"}}
    opened, folder = open_folder(write_grid(tmp_path / "g", thesis(data=two, seeds=[1, 2]), cells))
    made = grid_ranked(opened, folder)
    assert dict(made.ranking.ranks) == {"A1": 1.0, "A2": 2.0, "B4": 3.0}
    assert made.ranking.blocks == 2 * 2 * 2
    assert made.sheet().lines == (("A1", "1.000", "1"), ("A2", "2.000", "1 2"), ("B4", "3.000", "2"))
    few = grid_ranked(opened, folder, blocks="tasks")
    assert few.ranking.blocks == 4
    rows = list(csv.DictReader(io.StringIO(few.to_csv())))
    assert next((r["method"], float(r["mean_rank"]), r["blocks"]) for r in rows) == ("A1", 1.0, "4")
    assert all("blocks are not independent" in " ".join(m.notes).lower() for m in (made, few))
    assert any(note.startswith("Blocks 4, methods 3: Friedman's chi2 is an approximation") for note in few.notes)
    shutil.rmtree(Cell("PASCAL", "B4", "-", 2).folder(folder))
    part = grid_ranked(opened, folder)
    assert part.ranking.blocks == 6
    assert "Blocks left out, for not every method has a number there: 2." in part.notes
