"""Comparisons of runs, with the numbers of a published table and of a textbook interval."""

from __future__ import annotations

import csv
import io
import json
import math
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from fedloom.errors import StateError
from fedloom.study import compare, delta_m
from fedloom.study.delta import delta_terms, without_base
from fedloom.study.tables.compare import ACROSS, Comparison, Estimate, clear_best
from fedloom.study.tables.labels import shortened

DIRECTIONS = {"semseg": "max", "depth": "min", "normals": "min", "edge": "max"}
PRIMARY = {"semseg": "miou", "depth": "rmse", "normals": "merr", "edge": "odsf"}
# FedDEA, table 3, NYUD.
FEDAVG = {"semseg": 23.05, "depth": 0.7213, "normals": 26.52, "edge": 75.19}
DEA = {"semseg": 30.78, "depth": 0.7052, "normals": 24.62, "edge": 74.77}


@pytest.fixture
def run(tmp_path: Path):
    """Write the folder of a run whose only client measured `values`."""

    def write(
        values: dict[str, float | None], method: str = "fedavg", seed: int = 0, folder: str = "", **changes: Any
    ) -> Path:
        path = tmp_path / (folder or f"{method}-{seed}-{len(list(tmp_path.iterdir()))}")
        path.mkdir()
        name, _, addon = method.partition("+")
        recipe = {
            "name": "t",
            "seed": seed,
            "data": {"name": "toy", "size": changes.get("size", 8)},
            "method": {"name": name, "add": {addon: {"rho": changes.get("rho", 0.3)}} if addon else {}},
            "training": {"rounds": changes.get("rounds", 1)},
            "runtime": {"workers": len(path.name)},
        }
        info = {
            "method": method.replace("+", " + "),
            "tasks": {
                t: {"kind": "dense", "primary": PRIMARY[t], "metrics": {PRIMARY[t]: DIRECTIONS[t]}} for t in values
            },
            "clients": {"a": {"tasks": dict.fromkeys(values, 1.0)}},
            "status": changes.get("status", "finished"),
            "rounds": 1,
            "final_round": 1,
            "partition_hash": changes.get("partition", f"p{seed}"),
            "data_hash": changes.get("data", "d"),
        }
        metrics = [
            {"client": "a", "task": t, "metric": m, "value": v, "split": "test", "data": "shared test",
             "model": changes.get("model", "global")}
            for t, v in values.items()
            for m in (PRIMARY[t], "loss")
        ]  # fmt: skip
        about = {"client": "a", "role": "encoder", "task": None}
        traffic = {"round": 1, "up": [{**about, "bytes": 1500}], "down": [{**about, "bytes": 3000}]}
        (path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
        (path / "run.json").write_text(json.dumps(info))
        (path / "metrics.jsonl").write_text(json.dumps({"round": 1, "metrics": metrics}) + "\n")
        (path / "bytes.jsonl").write_text(json.dumps(traffic) + "\n")
        return path

    return write


def printed(result: Comparison) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(result.table())
    return console.file.getvalue()


def test_delta_m_of_the_published_table():
    assert delta_m(DEA, FEDAVG, DIRECTIONS) == pytest.approx(10.593, abs=5e-4)
    terms = delta_terms(DEA, FEDAVG, DIRECTIONS)
    assert terms["semseg"] == pytest.approx(33.5358, abs=1e-4)
    assert terms["depth"] > 0 > terms["edge"]


def test_delta_m_leaves_out_undefined_bases_but_not_undefined_values():
    base = {"semseg": 0.0, "depth": 0.5, "normals": math.nan, "edge": 50.0}
    values = {"semseg": 1.0, "depth": 0.4, "normals": 1.0, "edge": 55.0}
    assert delta_m(values, base, DIRECTIONS) == pytest.approx(15.0)
    assert math.isnan(delta_m({"depth": math.nan}, {"depth": 1.0}, DIRECTIONS))
    assert math.isnan(delta_m({"depth": 1.0}, {"depth": 0.0}, DIRECTIONS))


def test_the_change_of_a_negative_base_has_the_right_sign():
    """R2 from -2 to -1 is better by half of 2; a loss from -4 to -5 is better by a quarter of 4."""
    directions = {"r2": "max", "loss": "min", "worse": "max", "across": "max", "none": "max"}
    base = {"r2": -2.0, "loss": -4.0, "worse": -1.0, "across": -0.5, "none": 0.0}
    values = {"r2": -1.0, "loss": -5.0, "worse": -1.5, "across": 0.5, "none": 1.0}
    terms = delta_terms(values, base, directions)
    assert terms == {"r2": 50.0, "loss": 25.0, "worse": -50.0, "across": 200.0}
    assert without_base(values, base) == ["none"]
    assert delta_m(values, base, directions) == (50 + 25 - 50 + 200) / 4


def test_t_interval():
    e = Estimate.of([1.0, 2.0, 3.0])
    assert e.mean == 2.0
    assert e.half == pytest.approx(4.302652729749464 / math.sqrt(3), rel=1e-12)
    assert math.isnan(Estimate.of([2.0]).half)
    assert str(Estimate.of([2.0])) == "2.0000"
    assert str(Estimate.of([20.0, 22.0])) == "21.00 ± 12.71"
    assert str(Estimate.of([1.0, math.nan])) == "nan"


def test_the_published_table_from_folders(run):
    result = compare([run(FEDAVG), run(DEA, "fedavg+feddea")], base="fedavg")
    base, dea = result.columns
    assert (base.label, dea.label) == ("fedavg", "fedavg + feddea")
    assert base.delta is None
    assert dea.delta.mean == pytest.approx(10.593, abs=5e-4)
    assert [result.best(row) for row in result.rows] == [{"fedavg + feddea"}] * 3 + [{"fedavg"}]
    assert result.notes == ("Δm: each seed against the base's same seed.",)
    assert result.to_markdown() == (
        "| | fedavg | fedavg + feddea |\n"
        "|---|---:|---:|\n"
        "| semseg (miou) ↑ | 23.05 | **30.78** |\n"
        "| depth (rmse) ↓ | 0.7213 | **0.7052** |\n"
        "| normals (merr) ↓ | 26.52 | **24.62** |\n"
        "| edge (odsf) ↑ | **75.19** | 74.77 |\n"
        "| Δm % against fedavg | base | +10.59 |\n"
        "| model | global | global |\n"
        "| seeds | 0 | 0 |\n"
        "| round of the model | 1 | 1 |\n"
        "| rounds run | 1 | 1 |\n"
        "| sent by clients | 1.5 kB | 1.5 kB |\n"
        "| sent to clients | 3 kB | 3 kB |\n"
        "\n"
        "test split (shared test), mean over the clients with the task.\n"
        "\n"
        "Δm: each seed against the base's same seed.\n"
    )
    assert "depth (rmse) ↓" in printed(result)


def test_csv_has_full_precision(run):
    runs = [run({"depth": 0.1}, seed=s) for s in (0, 1)] + [run({"depth": 0.3}, "fedprox")]
    lines = list(csv.DictReader(io.StringIO(compare(runs, base="fedavg").to_csv())))
    assert [(x["run"], x["task"], x["metric"]) for x in lines] == [
        ("fedavg", "depth", "rmse"),
        ("fedprox", "depth", "rmse"),
        ("fedprox", "", "delta_m"),
    ]
    assert lines[0]["seeds"] == "0 1"
    assert float(lines[0]["ci95_half"]) == 0.0
    assert lines[1]["ci95_half"] == ""
    assert float(lines[2]["mean"]) == pytest.approx(-200)
    assert (lines[0]["bytes_up"], lines[0]["split"], lines[0]["model"]) == ("1500", "test", "global")


def test_delta_is_taken_seed_by_seed(run):
    base = [run({"semseg": v}, seed=s) for s, v in enumerate((10.0, 20.0))]
    other = [run({"semseg": v}, "fedprox", seed=s) for s, v in enumerate((11.0, 24.0))]
    result = compare([*base, *other], base="fedavg")
    # 10 % and 20 %; against the mean base it would be -26.7 % and 60 %.
    assert result.columns[1].delta.mean == pytest.approx(15.0)
    assert result.columns[1].delta.half == pytest.approx(12.706204736432095 * math.sqrt(50) / math.sqrt(2))
    assert "± 95 % t-interval over seeds" in result.caption


def test_seeds_without_a_partner_meet_the_mean_base(run):
    base = [run({"semseg": v}, seed=s) for s, v in enumerate((10.0, 20.0))]
    result = compare([*base, run({"semseg": 30.0}, "fedprox", seed=7)], base=base[1])
    assert result.base == "fedavg"
    assert result.columns[1].delta.mean == pytest.approx(100.0)
    assert result.columns[1].pairing == "0 of 1 seeds against the base's same seed, the others against its mean"
    assert "The runs do not cover the same seeds." in result.notes


def test_tasks_without_a_base_are_reported(run):
    result = compare([run({"semseg": 0.0, "depth": 1.0}), run({"semseg": 5.0, "depth": 0.5}, "x")], base="fedavg")
    assert result.columns[1].delta.mean == pytest.approx(50.0)
    assert "Δm of x leaves out semseg: the base is 0 or undefined there." in result.notes


def test_the_best_is_marked_only_where_its_interval_stands_clear():
    def of(mean, half=math.nan):
        return Estimate(mean, half, 3)

    assert clear_best({"a": of(5, 1), "b": of(2, 1), "c": of(math.nan)}, "max") == {"a"}
    assert clear_best({"a": of(5, 1), "b": of(2, 1)}, "min") == {"b"}
    assert clear_best({"a": of(5, 2), "b": of(2, 1)}, "max") == set()  # the intervals meet
    assert clear_best({"a": of(5), "b": of(5), "c": of(4)}, "max") == {"a", "b"}  # one seed: the numbers as they are
    assert clear_best({"a": of(5)}, "max") == set()


def test_intervals_of_fractions_end_at_0_and_1():
    e = Estimate(0.98, 0.05, 3)
    assert e.of_metric("accuracy") == "0.9800 (0.9300 to 1.0000)"
    assert e.of_metric("rmse") == "0.9800 ± 0.0500"
    assert Estimate(0.5, 0.1, 3).of_metric("miou") == "0.5000 ± 0.1000"
    assert Estimate(23.05, 30.0, 3).of_metric("miou") == "23.05 ± 30.00"  # in percent, as papers have it


def test_a_label_says_only_what_most_runs_do_not_have(run):
    runs = [run({"depth": 1.0}, "local", rounds=60), run({"depth": 1.0}, "local"), run({"depth": 1.0}, "fedavg")]
    assert [c.label for c in compare(runs).columns] == ["local [rounds=60]", "local", "fedavg"]


def test_equal_methods_are_told_apart_by_what_differs(run):
    runs = [run({"depth": 1.0}, "fedavg+feddea", rho=rho) for rho in (0.1, 0.3)]
    runs.append(run({"depth": 1.0}, "fedavg+feddea", rho=0.3, rounds=2))
    result = compare(runs)
    assert [c.label for c in result.columns] == [
        "fedavg + feddea [rho=0.1]",
        "fedavg + feddea [rho=0.3]",
        "fedavg + feddea [rho=0.3, rounds=2]",
    ]
    assert "rho=0.1" in printed(result)
    assert result.best(result.rows[0]) == {c.label for c in result.columns}
    if find_spec("pandas") is not None:
        frame = result.to_pandas()
        assert set(frame["method"]) == {c.label for c in result.columns}
        assert list(frame) == ["method", "seed", "round", "client", "task", "metric", "split", "model", "value"]


def test_more_runs_than_stand_side_by_side_are_a_line_each(run):
    folders = [run({"depth": 1.0 + i}, f"m{i}", folder=f"f{i}") for i in range(ACROSS + 1)]
    few, many = compare(folders[:-1]), compare(folders)
    first = few.to_markdown().splitlines()[0]
    assert first.count("|") == ACROSS + 2
    lines = many.to_markdown().splitlines()
    assert [line.split("|")[1].strip() for line in lines[2 : ACROSS + 3]] == [f"m{i}" for i in range(ACROSS + 1)]
    assert "depth (rmse) ↓" in lines[0]
    assert "| **1.0000** |" in lines[2], "the best is bold as it is elsewhere"
    assert many.to_latex().count("midrule") == 1
    assert all(f">m{i}</th>" in many.to_html() for i in range(ACROSS + 1))
    assert many.records().to_csv().count("depth") == ACROSS + 1


def test_keys_in_labels_are_as_short_as_they_can_be_told_apart():
    keys = ["training.rounds", "peers.warmup.rounds", "method.mu", "training.schedule.name", "seed"]
    assert shortened(keys) == dict(
        zip(keys, ["training.rounds", "warmup.rounds", "mu", "schedule.name", "seed"], strict=True)
    )


def test_a_narrow_terminal_has_a_line_a_run_where_that_is_narrower(run):
    folders = [run({"depth": 1.0}, f"{'long-' * 9}{i}") for i in range(5)]
    result = compare(folders)

    def shown(width: int) -> str:
        console = Console(file=io.StringIO(), width=width)
        console.print(result)
        return console.file.getvalue()  # type: ignore[attr-defined]

    first = f"{'long-' * 9}0"
    side_by_side, below = ([line for line in shown(width).splitlines() if first in line] for width in (400, 220))
    assert [line.count("long-") for line in (*side_by_side[:1], below[-1])] == [45, 9]
    assert "…" not in shown(60)


def test_what_makes_runs_incomparable_is_said(run):
    runs = [
        run({"depth": 1.0}, folder="one"),
        run({"depth": None}, "x", folder="two", partition="other", size=16, status="running", model="personal"),
    ]
    result = compare(runs)
    assert result.notes == (
        "Not the same clients or examples at seed 0: one, two.",
        "Beside the method, the runs differ in data.size.",
        "Not finished: two, round 1.",
        "Not the same kind of model in all columns: see 'model'.",
        "Δm: each seed against the base's same seed.",
    )
    assert result.best(result.rows[0]) == {"fedavg"}
    gave_up = compare([runs[0], run({"depth": 1.0}, "x", folder="four", status="gave up")])
    assert any(note.startswith("four gave up: three rounds in a row were lost") for note in gave_up.notes)
    other_data = compare([runs[0], run({"depth": 1.0}, "z", folder="three", data="changed")])
    assert other_data.notes[:-1] == ("Not the same clients or examples at seed 0: one, three.",)
    with pytest.raises(StateError, match=r"the tasks differ: .*one has depth; .* has semseg"):
        compare([runs[0], run({"semseg": 1.0}, "y")])


def test_the_metric_can_be_chosen(run):
    runs = [run(FEDAVG), run(DEA, "x")]
    assert [row.metric for row in compare(runs, metric="loss").rows] == ["loss"] * 4
    assert [row.task for row in compare(runs, metric="rmse").rows] == ["depth"]
    with pytest.raises(StateError, match=r"no task has the metric 'rmsee'\. Did you mean 'rmse'\?"):
        compare(runs, metric="rmsee")


def test_mistakes_are_refused(run):
    one = run({"depth": 1.0})
    with pytest.raises(StateError, match="no runs to compare"):
        compare([])
    with pytest.raises(StateError, match="are the same recipe and seed"):
        compare([one, run({"depth": 1.0})])
    with pytest.raises(StateError, match=r"no run called 'fedavgg'\. Did you mean 'fedavg'\? Here are: fedavg"):
        compare([one], base="fedavgg")
    with pytest.raises(StateError, match="no val metrics"):
        compare([one], split="val")
