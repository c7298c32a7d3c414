"""The first screen of a run: what it says, against the numbers it is made of."""

from __future__ import annotations

import json
import math
import re
from cProfile import Profile
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from fedloom.study.charts import COLORS, rows_of
from fedloom.study.output import Table
from fedloom.study.report import collect, words, write
from fedloom.study.report.figures import DOTS, figures_of
from fedloom.study.report.pages import sentences, slope, tiles_of
from fedloom.study.report.predictions import ConfusionViews
from fedloom.study.report.records import Curves
from fedloom.study.statistics import Verdict
from fedloom.study.watch import now
from report_support import NASTY, Page, part, write_files

NAMES = ("a", "b", "c", "d")
TASK = {"seg": {"kind": "dense", "primary": "miou", "metrics": {"miou": "max"}}}


def run(folder: Path, values: dict[str, float], method: str = "fedavg", **info: Any) -> Path:
    """Three rounds whose clients end with these numbers, and whose loss falls by a tenth of its mean a round."""
    metric = info.get("tasks", TASK)["seg"]["primary"]
    where = {"task": "seg", "metric": metric, "model": "personal", "split": "test", "data": "own test"}
    lines = [
        {
            "round": r,
            "cohort": list(values),
            "metrics": [{"client": n, "value": v * r / 3, **where} for n, v in values.items()],
            "train": [{"client": n, "task": "seg", "loss": 1.2 - r / 10} for n in values],
        }
        for r in (1, 2, 3)
    ]
    clients = {n: {"tasks": {"seg": 1.0}} for n in values}
    head = {"method": method, "tasks": TASK, "clients": clients, "status": "finished", "final_round": 3}
    head |= {"partition_hash": "p", "data_hash": "d", **info}
    return write_files(folder, head, lines, method={"name": method}, training={"rounds": 3})


def test_the_first_screen_says_what_the_numbers_say(tmp_path: Path) -> None:
    alone = run(tmp_path / "alone", dict(zip(NAMES, (0.5, 0.5, 0.5, 0.5), strict=True)), "local")
    folder = run(tmp_path / "run", dict(zip(NAMES, (0.6, 0.61, 0.62, 0.47), strict=True)))
    text = " ".join(Page(write(folder).read_text("utf-8")).text.split())
    assert "After 3 rounds 3 of 4 clients are better than with local (median +21 %)." in text
    assert "+15 % (\u22126 % to +24 %)" in text.replace("\xa0", " ")  # 20, 22, 24 and -6 %: the clients' range
    assert "includes 0" not in text
    assert "(median +21 %). The training loss still falls by 10 % per round.Compared" in text, "two sentences"
    assert "Compared with local, which was found beside this run." in text
    assert "best c 0.6200" in text
    assert "A change is the mean over the clients of the task, each compared with itself under local" in text
    assert "worst d 0.4700" in text
    (tile,) = tiles_of(collect(folder))  # type: ignore[arg-type]
    assert tile.score.mean == pytest.approx(0.575)
    assert tile.change is not None
    assert tile.change == pytest.approx((15, -6, 24))
    rows = rows_of(figures_of(collect(folder))["gains"].views[0].chart)  # type: ignore[arg-type]
    assert [row["name"] for row in rows if "text" in row] == ["c", "b", "a", "d"]
    assert [row["text"][:-2] for row in rows if "text" in row] == ["+24", "+22", "+20", "\u22126"]
    assert "found beside" not in Page(write(folder, base=alone).read_text("utf-8")).text


def test_the_base_is_of_the_same_clients_and_data_and_the_better_one(tmp_path: Path) -> None:
    values = dict.fromkeys(NAMES, 0.5)
    folder = run(tmp_path / "z", values)
    assert collect(folder).against is None  # type: ignore[union-attr]
    said = Page(write(folder).read_text("utf-8")).text
    assert "Run: fedloom run ... method=local" in said
    assert "After 3 rounds: 0.5000 mIoU on seg." in said
    run(tmp_path / "a-other-clients", values, "local", partition_hash="q")
    run(tmp_path / "b-not-known", values, "local", data_hash=None)
    (run(tmp_path / "c-damaged", values, "local") / "metrics.jsonl").write_text("{\n{}\n")
    run(tmp_path / "d", values, "constant")
    held = collect(folder).against  # type: ignore[union-attr]
    assert held is not None
    assert dict(held.facts)["folder"] == "d"
    assert "No run of training alone with the same clients" in Page(write(folder).read_text("utf-8")).text
    run(tmp_path / "y", values, "local")
    held = collect(folder).against  # type: ignore[union-attr]
    assert held is not None
    assert dict(held.facts)["folder"] == "y"


def test_without_a_baseline_the_constant_prediction_that_the_run_recorded_is_shown(tmp_path: Path) -> None:
    folder = run(tmp_path / "run", dict.fromkeys(NAMES, 0.5))
    start = {"round": 0, "cohort": [], "metrics": []}
    start["records"] = [{"kind": "constant prediction", "tasks": {"seg": ["miou", 0.125], "gone": ["miou", 1.0]}}]
    lines = (folder / "metrics.jsonl").read_text("utf-8")
    (folder / "metrics.jsonl").write_text(json.dumps(start) + "\n" + lines)
    text = " ".join(Page(write(folder).read_text("utf-8")).text.split())
    assert "After 3 rounds the model is better than the constant prediction on seg. The training loss" in text
    assert "0.5000 constant prediction 0.1250" in text
    found = collect(folder)
    rows = rows_of(figures_of(found)["panel-0"].views[0].chart)  # type: ignore[arg-type]
    assert [(row["x"], row["y"]) for row in rows if row["name"] == "constant"] == [(r, 0.125) for r in (1, 2, 3)]
    run(tmp_path / "alone", dict.fromkeys(NAMES, 0.4), "local")
    assert "constant prediction" not in Page(write(folder).read_text("utf-8")).text.split("Final numbers")[0]


def test_rmse_is_in_metres_where_the_task_is_depth(tmp_path: Path) -> None:
    for kind, unit in (("depth", " in metres"), ("regression", "")):
        task = {"seg": {"kind": kind, "primary": "rmse", "metrics": {"rmse": "min"}}}
        found = collect(run(tmp_path / kind, dict.fromkeys(NAMES, 0.5), tasks=task))
        assert found.scores[0].unit == unit.removeprefix(" in ")  # type: ignore[union-attr]
        text = " ".join(Page(write(tmp_path / kind).read_text("utf-8")).text.split())
        assert f"RMSE{unit}, lower is better" in text


def words_by_base(page: str) -> dict[str, str]:
    """Return what the first screen says against each base that can be chosen; the first is what is shown."""
    bases = re.search(r'<select class="base"[^>]*>(.*?)</select>', page)
    assert bases is not None
    first = page[: page.index('id="gains"')]
    said = re.findall(r'<div class="compared" data-base="(\d)"( hidden)?>\s*<p class="words">(.*?)</p>', first)
    assert [(int(at), bool(hidden)) for at, hidden, _ in said] == [(i, i > 0) for i in range(len(said))]
    names = re.findall(r'<option value="\d">(.*?)</option>', bases[1])
    return dict(zip(names, (text for *_, text in said), strict=True))


def test_a_page_can_be_held_against_each_run_of_the_same_clients(tmp_path: Path) -> None:
    run(tmp_path / "alone", dict(zip(NAMES, (0.5, 0.5, 0.5, 0.5), strict=True)), "local")
    prox = run(tmp_path / "prox", dict(zip(NAMES, (0.65, 0.7, 0.65, 0.7), strict=True)), "fedprox")
    run(tmp_path / "prox-too", dict(zip(NAMES, (0.4, 0.4, 0.4, 0.4), strict=True)), "fedprox")
    run(tmp_path / "others", dict.fromkeys(NAMES, 0.1), "fedprox", partition_hash="q")
    folder = run(tmp_path / "run", dict(zip(NAMES, (0.6, 0.61, 0.62, 0.47), strict=True)))
    found = words_by_base(write(folder).read_text("utf-8"))
    assert list(found) == ["local", "fedprox (prox)", "fedprox (prox-too)"]
    assert "3 of 4 clients are better than with local" in found["local"]
    assert "no client is better than with fedprox (prox)" in found["fedprox (prox)"]
    assert "every client is better than with fedprox (prox-too)" in found["fedprox (prox-too)"]
    named = words_by_base(write(folder, base=prox).read_text("utf-8"))
    assert list(named) == ["fedprox (prox)", "local", "fedprox (prox-too)"]
    assert named == found


def test_neither_a_folder_of_other_bytes_nor_numbers_without_end_keep_a_page_away(tmp_path: Path) -> None:
    try:
        run(tmp_path / "alone\udcff", dict.fromkeys(NAMES, 0.5), "local")
    except OSError:
        pytest.skip("this file system takes no such names")
    folder = run(tmp_path / "run", dict.fromkeys(NAMES, math.inf) | {"d": 0.4})
    text = write(folder).read_text("utf-8")
    assert "3 of 4 clients are better than with local" in text
    assert "alone?" in text


def test_numbers_that_no_mean_takes_keep_no_page_away(tmp_path: Path) -> None:
    """Infinities of both signs have no sum, the largest numbers none that a float holds, and null is not known."""
    values = (math.inf, -math.inf, 1.7e308, 1.7e308)
    run(tmp_path / "alone", dict(zip(NAMES, reversed(values), strict=True)), "local")
    folder = run(tmp_path / "run", dict(zip(NAMES, values, strict=True)))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line["seconds"] = {"training": math.inf, "evaluation": -math.inf}
        line["records"] = [{"kind": "hyper-weights", "part": "encoder", "weights": {"a": None, "b": 0.5}}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "weight as used" in write(folder).read_text("utf-8")
    assert math.isnan(now(folder).seconds or 0)


def test_work_for_a_page_grows_no_faster_than_its_clients(tmp_path: Path) -> None:
    """Counted in calls, not in seconds: of twice the clients, the first screen may take twice as many and a little."""
    calls = []
    for clients in (40, 80):
        names = [f"c{i}" for i in range(clients)]
        home = tmp_path / str(clients)
        run(home / "alone", {name: 0.4 + i / 1e3 for i, name in enumerate(names)}, "local")
        found = collect(run(home / "run", {name: 0.5 + i / 2e3 for i, name in enumerate(names)}))
        with Profile() as counted:
            sentences(found, tiles_of(found))  # type: ignore[arg-type]
        calls.append(sum(entry.callcount for entry in counted.getstats()))
    assert calls[1] < 2.2 * calls[0]


def test_without_a_base_that_counts_others_can_be_chosen(tmp_path: Path) -> None:
    folder = run(tmp_path / "run", dict.fromkeys(NAMES, 0.5))
    run(tmp_path / "prox", dict.fromkeys(NAMES, 0.4), "fedprox")
    text = write(folder).read_text("utf-8")
    assert list(words_by_base(text)) == ["nothing", "fedprox"]
    assert "Run: fedloom run ... method=local" in text


@pytest.mark.parametrize(
    ("percent", "text"),
    [(10.6, "+11\u00a0%"), (-0.314, "\u22120.31\u00a0%"), (4, "+4\u00a0%"), (0, "±0\u00a0%"), (math.nan, "")],
)
def test_changes_in_words(percent: float, text: str) -> None:
    assert words.change(percent) == text


def test_sentences() -> None:
    verdicts = {"x": Verdict("yes"), "z": Verdict("cannot tell"), "w": Verdict("no", True), "v": Verdict("no")}
    assert words.of_methods(verdicts, {"Local"}, 1.0, 3) == (
        "x is better than Local; w is worse than Local; v is not better than Local by 1 % or more; the seeds cannot "
        "tell whether z is better than Local (3 seeds, after Holm's correction over 4)."
    )
    assert words.of_methods({}, {"Local"}, 1.0, 1) == ""
    assert words.listed("abcde") == "a, b, c, d and e"
    assert words.listed("abcdef") == "a, b, c, d and 2 more"
    spread = words.spread_of([0.0, -52.0, math.nan])
    assert spread == (-26, -52, 0)
    assert words.ends(spread) == "\u221252\u00a0% to ±0\u00a0%"
    assert words.ends(words.Spread(0, 0, 0)) == ""
    assert words.trend(0.01) == "The training loss no longer changes."
    assert words.trend(0.2) == "The training loss rises by 0.2\u00a0% per round."
    assert (
        words.ahead(1, "Local", {"a": 1.0, "b": 2.0})
        == "After 1 round every client is better than with Local (median +1.5\u00a0%)."
    )
    assert "no client is better" in words.ahead(2, "Local", {"a": -1.0})
    assert words.axis("rmse", "min", "metres") == "RMSE in metres, lower is better"
    assert words.beats(2, {"a": True, "b": False}) == (
        "After 2 rounds the model is better than the constant prediction on a, but not on b."
    )
    assert words.beats(2, {"a": False}).endswith("on no task.")
    assert words.conflict({"stem": 0.25, "head": 0.5}, ("a", "b", -0.3)) == (
        "Most conflict: head (50\u00a0% of pairs of updates). Furthest apart are a and b (mean cosine \u22120.30)."
    )


def test_many_clients_have_a_dot_each_but_no_name(tmp_path: Path) -> None:
    many = {f"c{i}": 0.4 + i / 1e4 for i in range(2 * DOTS)}
    run(tmp_path / "alone", dict.fromkeys(many, 0.5), "local")
    chart = figures_of(collect(run(tmp_path / "run", many)))["gains"].views[0].chart  # type: ignore[arg-type]
    names = [row["name"] for row in rows_of(chart)]
    assert (len(names), names[0], names[-1]) == (DOTS, f"c{2 * DOTS - 1}", "c0")
    assert not any(layer["mark"]["type"] == "text" for layer in chart["layer"])


def test_templates_escape_what_they_are_given() -> None:
    drawn = part("parts.html", "sheet", Table(NASTY, ("a", NASTY), ((NASTY, NASTY),), (NASTY,), name=NASTY, text=(1,)))
    assert "<img" not in drawn
    assert "&lt;img" in drawn


def test_templates_load_nothing_and_escape_everything() -> None:
    home = files("fedloom.study.report") / "templates"
    safe = {"policy", "style", "script", "vega", "pictures", "data"}
    for file in home.iterdir():
        text = file.read_text("utf-8")
        assert "://" not in text
        assert not re.findall(r"\b(src|href)=\"(?![{#]|/run\?at=)", text), file.name
        assert set(re.findall(r"(\S+)\|safe", text.replace("{{", " "))) <= safe, file.name


def contrast(first: str, second: str) -> float:
    """As WCAG 2 has it, of two colours like #fff or #ffffff."""

    def light(color: str) -> float:
        digits = color[1:] if len(color) == 7 else "".join(2 * letter for letter in color[1:])
        parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
        r, g, b = (v / 12.92 if v <= 0.03928 else ((v + 0.055) / 1.055) ** 2.4 for v in parts)
        return 0.2126 * r + 0.7152 * g + 0.0722 * b

    high, low = sorted((light(first), light(second)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_letters_stand_out_by_day_by_night_and_on_paper_and_have_few_sizes() -> None:
    css = (files("fedloom.study.report") / "templates" / "page.css").read_text("utf-8")
    looks = [
        dict(re.findall(r"--(\w+): (#\w+);", block)) for block in re.findall(r":root \{([^}]*--paper[^}]*)\}", css)
    ]
    assert len(looks) == 3
    for look in looks:
        for paper in ("paper", "fill"):
            for ink in ("ink", "soft"):
                assert contrast(look[ink], look[paper]) >= 4.5, (look, ink, paper)
    for color in COLORS[:2]:  # marks, which need 3
        assert all(contrast(color, look["paper"]) >= 3 for look in looks), color
    sizes = set(re.findall(r"font(?:-size)?: ([^;/ ]+)", css)) - {"inherit"}
    assert sizes == {f"var(--{name})" for name in ("tiny", "small", "plain", "lead", "large")}


def test_a_curve_of_the_loss_that_falls() -> None:
    losses = {r: 1.0 - 0.01 * r for r in range(30)}
    (only,) = [Curves("t", "training loss", "min", "train", "trained", {"a": losses})]
    level = sum(losses[r] for r in range(20, 30)) / 10
    assert slope([only]) == pytest.approx(-1 / level)
    assert math.isnan(slope([Curves("t", "training loss", "min", "train", "trained", {"a": {1: 1.0}})]))


def test_one_palette_for_pages_and_papers(tmp_path: Path) -> None:
    text = write(run(tmp_path / "run", dict.fromkeys(NAMES, 0.5))).read_text("utf-8")
    assert all(f"--c{i}: {of};" in text for i, of in enumerate(COLORS))


def test_classes_that_are_mixed_up_are_named() -> None:
    counts = ((8, 2, 0), (0, 5, 5), (1, 0, 3))
    said = ConfusionViews("digit", "examples", {"all": counts}).mixed_up
    assert said.replace("\u00a0", " ") == (
        "Most often mistaken: 1 for 2 (50 % of all 1), 2 for 0 (25 % of all 2) and 0 for 1 (20 % of all 0)."
    )
    assert ConfusionViews("digit", "examples", {"all": ((3, 0), (0, 0))}).mixed_up == ""
