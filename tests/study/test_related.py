"""The page of a relatedness study, from relatedness.json as `Relatedness.write` has it."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedloom.errors import StateError
from fedloom.study.charts import rows_of
from fedloom.study.report import collect, write
from fedloom.study.report.related import FILE, POINTS, About, Relatedness
from report_support import NASTY, SHOWN, Page, cells, check_figures, view_of

NAN = math.nan


def study(folder: Path, scores: dict[str, Any], tasks: Sequence[str] | None = None, **more: Any) -> Path:
    """A folder with relatedness.json of these scores."""
    names = tasks or [f"t{i}" for i in range(len(next(iter(scores.values()))))]
    arrays = {name: np.array(R, dtype=np.float64) for name, R in scores.items()}
    made = Relatedness("r, matu, seed 7", tuple(names), arrays, **more)
    folder.mkdir(exist_ok=True)
    (folder / FILE).write_text(made.to_json(), encoding="utf-8")
    return folder


def page_of(folder: Path) -> tuple[Page, dict[str, Any]]:
    """The page, and what the file holds."""
    return Page(write(folder).read_text("utf-8")), json.loads((folder / FILE).read_text("utf-8"))


def drawn(names: Sequence[str]) -> dict[str, Any]:
    """Scores of each metric between tasks, random but the same each time; logme is directed."""
    T, rng = len(names), np.random.default_rng(0)
    found = {}
    for metric in ("sign", "logme", "wte"):
        R = rng.normal(size=(T, T))
        found[metric] = R if metric == "logme" else (R + R.T) / 2
    return found


def test_numbers_are_those_of_the_file(tmp_path: Path) -> None:
    scores = drawn("abcdef")
    scores["logme"][0, 3] = NAN
    about = About(method="matu", data="toy", seed=7, clients={"a": 2, "b": 4}, examples={"a": 9, "b": 9})
    page, value = page_of(study(tmp_path, scores, list("abcdef"), about=about, notes=("one is left out: why",)))
    data, figures = page.data, page.data["figures"]
    assert data["kind"] == "relatedness"
    assert data["about"]["clients per task"] == "2 to 4"
    assert data["about"]["examples per task"] == "9"
    assert "one is left out: why" in page.text
    check_figures(figures)
    for i, metric in enumerate(scores):
        first, *others = (cells(view["chart"]) for view in figures[f"heat-{i}"])
        assert first == table(value["symmetrised"][metric], value["tasks"])
        assert others == ([table(value["scores"][metric], value["tasks"])] if metric == "logme" else [])
    pearson, spearman = (cells(view["chart"]) for view in figures["agreement"])
    assert pearson == table(value["agreement"]["pearson"], list(scores))
    assert spearman == table(value["agreement"]["spearman"], list(scores))
    assert data["agreement"] == value["agreement"]
    names = ["logme against sign", "wte (a distance) against sign", "wte (a distance) against logme"]
    assert [view["name"] for view in figures["pairs"]] == names
    chart = view_of(figures["pairs"], names[1])
    r, rho = (value["agreement"][which][0][2] for which in ("pearson", "spearman"))
    assert chart["encoding"]["x"]["title"] == f"sign; r {r:.2f}, ρ {rho:.2f}"  # noqa: RUF001
    first, *_, last = rows_of(chart)
    sign, wte = (value["symmetrised"][metric] for metric in ("sign", "wte"))
    assert first == {"name": "a, b", "x": sign[0][1], "y": wte[0][1]}
    assert last == {"name": "e, f", "x": sign[4][5], "y": wte[4][5]}


def table(M: list[list[float | None]], names: Sequence[str]) -> dict[str, dict[str, float]]:
    """Row -> column -> number, without those that are not defined."""
    return {
        a: {b: v for b, v in zip(names, row, strict=True) if v is not None} for a, row in zip(names, M, strict=True)
    }


def test_brighter_is_more_related_and_the_diagonal_does_not_count(tmp_path: Path) -> None:
    M = [[99, 0.2, 0.4], [0.2, 99, 0.3], [0.4, 0.3, 99]]
    page, _ = page_of(study(tmp_path, {"cosine": M, "wte": M}))
    scales = [page.data["figures"][f"heat-{i}"][0]["chart"]["layer"][0]["encoding"]["color"]["scale"] for i in (0, 1)]
    assert scales[0]["range"] == scales[1]["range"][::-1]
    assert scales[0]["domain"] == [0.2, 0.4]


def test_ranks_of_the_pairs_that_stand_out(tmp_path: Path) -> None:
    T = 6
    sign = np.zeros((T, T))
    above = [(a, b) for a in range(T) for b in range(a + 1, T)]
    for place, (a, b) in enumerate(above):  # 15 pairs: 0-1 is the least, 4-5 the most related; two are equal
        sign[a, b] = sign[b, a] = max(place, 1)
    wte = sign.copy()
    wte[0, 1] = wte[1, 0] = NAN
    page, _ = page_of(study(tmp_path, {"sign": sign, "wte": wte}))
    ends = page.data["ends"]["sign"]
    assert [e["ranks"]["sign"] for e in ends] == [1, 2, 3, 4, 5, 11, 12, 13, 14, 14]
    assert ends[0] == {"tasks": ["t4", "t5"], "score": 14.0, "ranks": {"sign": 1, "wte": 14}}
    assert (ends[-2]["tasks"], ends[-2]["ranks"]["wte"]) == (["t0", "t1"], None)
    nearest = page.data["ends"]["wte"][0]
    assert (nearest["tasks"], nearest["ranks"]["wte"]) == (["t0", "t2"], 1)  # of a distance the least
    assert "The first 5 and the last 5 of 15 pairs" in page.text


def test_two_tasks_and_one_metric(tmp_path: Path) -> None:
    page, value = page_of(study(tmp_path / "two", {"sign": [[1, 0.5], [0.5, 1]], "cosine": [[1, 0.2], [0.2, 1]]}))
    assert sorted(page.data["figures"]) == ["heat-0", "heat-1"]  # correlations need several pairs
    assert value["agreement"]["pearson"] == [[None, None], [None, None]]
    assert "There is no correlation to show" in page.text
    check_figures(page.data["figures"])
    page, _ = page_of(study(tmp_path / "one", {"sign": [[1, 0.5, 0.1], [0.5, 1, 0.2], [0.1, 0.2, 1]]}))
    assert sorted(page.data["figures"]) == ["heat-0"]
    assert {"agreement", "pairs"}.isdisjoint(page.ids)
    assert "All pairs" in page.text


def test_nothing_is_known(tmp_path: Path) -> None:
    page, _ = page_of(study(tmp_path, {"sign": np.full((3, 3), NAN), "cosine": np.full((3, 3), NAN)}))
    assert page.data["ends"] == {"sign": [], "cosine": []}
    assert page.text.count("No pair has a score.") == 2
    check_figures(page.data["figures"])


def test_hostile_names(tmp_path: Path) -> None:
    tasks = [NASTY, "%{z}", "b"]
    page, value = page_of(study(tmp_path, {"sign": drawn(tasks)["sign"], NASTY: drawn(tasks)["logme"]}, tasks))
    assert value["tasks"] == tasks
    assert not [e for e in page.elements if e[0] == "img"]
    assert NASTY in page.text
    assert list(cells(page.data["figures"]["heat-0"][0]["chart"])) == [SHOWN, *tasks[1:]]
    check_figures(page.data["figures"])


def test_many_tasks(tmp_path: Path) -> None:
    names = [f"task-{i}" for i in range(130)]
    folder = study(tmp_path, drawn(names), names)
    page, value = page_of(folder)
    shown = cells(page.data["figures"]["heat-0"][0]["chart"])
    assert len(shown) == 100
    assert shown["task-129"]["task-0"] == value["symmetrised"]["sign"][129][0]
    assert len(rows_of(page.data["figures"]["pairs"][0]["chart"])) == POINTS
    assert "Figures show 100 of 130 tasks" in page.text
    flat = np.array(value["symmetrised"]["sign"])[np.triu_indices(130, 1)]
    assert page.data["ends"]["sign"][0]["score"] == flat.max()
    assert (tmp_path / "report.html").stat().st_size < 6_000_000


def changed(value: dict[str, Any], path: str, new: Any) -> str:
    *parents, last = path.split(".")
    part = value
    for name in parents:
        part = part[name]
    part[last] = new
    return json.dumps(value)


@pytest.mark.parametrize(
    ("path", "new", "message"),
    [
        ("scores.sign", [[1.0, 2.0]], r"scores\.sign: expected 3 x 3 numbers, found 1 rows of \[2\]"),
        ("scores.sign", [["x", 1, 1], [1, 1, 1], [1, 1, 1]], r"scores\.sign\.0\.0: .* valid number"),
        ("scores", {}, "scores: .* at least 1"),
        ("tasks", ["a", "a", "b"], "two have the same name"),
        ("tasks", ["a"], "tasks: .* at least 2"),
        ("scores.cosine", [[NAN] * 3] * 3, "scores.cosine.0.0: .* finite"),
    ],
)
def test_a_damaged_file(tmp_path: Path, path: str, new: Any, message: str) -> None:
    scores = {name: drawn("abc")["sign"] for name in ("sign", "cosine")}
    file = study(tmp_path, scores) / FILE
    assert isinstance(collect(tmp_path), Relatedness)
    file.write_text(changed(json.loads(file.read_text()), path, new))
    with pytest.raises(StateError, match=f"^{file}: .*{message}"):
        write(tmp_path)


def test_a_file_cut_off(tmp_path: Path) -> None:
    file = study(tmp_path, {"sign": drawn("abc")["sign"]}) / FILE
    file.write_text(file.read_text()[:200])
    with pytest.raises(StateError, match=f"^{file}: Invalid JSON"):
        write(tmp_path)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(StateError, match=f"^{file}: "):
        write(tmp_path)
