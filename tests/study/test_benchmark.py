"""Test whether a benchmark is sensitive enough: the three rules, and the command that prints their results."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import fedloom
from fedloom.errors import StateError
from fedloom.experiments.tune import tuning_seeds
from fedloom.federation.rounds.build import build
from fedloom.federation.runs.reader import Run
from fedloom.study.claims import sensitivities, sensitivity
from fedloom.study.comparison import compare
from fedloom.study.grid import Cell, load_grid, names, recipes
from fedloom.study.results import (
    Column,
    SeedLine,
    Seeds,
    at_constant,
    estimate,
    falling,
    falls,
    last_loss,
    losses,
    of_grid,
    of_seeds,
    uneven,
)
from fedloom.study.statistics import Estimate
from grid_support import CONSTANT_ROW, WORSE, benchmark, paper_grid
from tests_support import load_recipe


def means(estimates: Any) -> dict[str, float]:
    return {task: estimate.mean for task, estimate in estimates.items()}


def test_a_benchmark_that_is_sensitive(tmp_path: Path) -> None:
    ((found,), _) = sensitivities(benchmark(tmp_path), tmp_path)
    assert means(found.over_constant) == pytest.approx({"semseg": 100, "depth": 10})
    # the better of both centralised trainings, task by task
    assert means(found.over_alone) == pytest.approx({"semseg": 10, "depth": 10})
    assert means(found.falling) == pytest.approx(dict.fromkeys(CONSTANT_ROW, 100 * (1 - (0.898 / 0.899) ** 0.4)))
    assert (found.seeds, found.gain.n, found.reasons) == ((100, 101, 102), 3, [])


def test_each_rule_may_fail_alone(tmp_path: Path) -> None:
    ((found,), _) = sensitivities(benchmark(tmp_path / "a", constant={"semseg": 0.196, "depth": 2.0}), tmp_path / "a")
    assert found.reasons == [
        "semseg: training alone is +2.04 ± 0.00 % better than the constant prediction, expected 5 % or more at the "
        "lower end of the interval"
    ]
    grid = benchmark(tmp_path / "b", centralised=WORSE, **{"centralised-by-task": WORSE})
    ((found,), _) = sensitivities(grid, tmp_path / "b")
    assert found.reasons == [
        "all data in one place is -10.00 ± 0.00 % better than training alone (mean over tasks), expected 5 % or more "
        "at the lower end of the interval"
    ]
    ((found,), _) = sensitivities(benchmark(tmp_path / "c", losses=(1.0, 0.9, 0.8, 0.6)), tmp_path / "c")
    assert [reason.partition(":")[0] for reason in found.reasons] == ["semseg", "depth"]
    assert "still falls by +10.87 ± 0.00 % per tenth of the rounds, expected 5 % or less" in found.reasons[0]
    with pytest.raises(StateError, match="NYUD: centralised has not been run; a benchmark needs Local, centralised"):
        sensitivities(benchmark(tmp_path / "d", centralised=None), tmp_path / "d")


def test_the_rule_is_about_intervals_over_three_seeds(tmp_path: Path) -> None:
    ((found,), _) = sensitivities(benchmark(tmp_path / "two", seeds=(100, 101)), tmp_path / "two")
    assert found.reasons == ["2 validation seeds found, expected 3 or more: the rule is about intervals"]
    # the mean gain is 10 %, of which semseg's half is 5.5 % more or less at two seeds: t = 4.303, sd = 2.75, n = 3
    ((found,), _) = sensitivities(benchmark(tmp_path / "wide", spread=0.05), tmp_path / "wide")
    assert (found.gain.mean, found.gain.half) == pytest.approx((10, 4.3027 * 2.75 / 3**0.5), abs=1e-3)
    assert ["all data in one place is +10.00 ± 6.83 %" in reason for reason in found.reasons] == [True]


def test_a_constant_prediction_that_varies_does_not_widen_the_interval() -> None:
    """Differences are in percent of the base's mean: of 1/9, 1/12 and 1/15 correct, training alone has .8 more."""
    constants = (1 / 9, 1 / 12, 1 / 15)
    lines = [
        SeedLine("D", method, seed, "digit", "accuracy", value, "max", 0.1, 0.0, 0.0)
        for seed, constant in zip((100, 101, 102), constants, strict=True)
        for method, value in (("constant", constant), ("Local", constant + 0.8), ("centralised", constant + 0.9))
    ]
    found = sensitivity(Seeds("", tuple(lines)), "D")
    mean = sum(constants) / 3
    assert means(found.over_constant) == pytest.approx({"digit": 80 / mean})
    assert means(found.over_alone) == pytest.approx({"digit": 10 / (mean + 0.8)})
    assert found.over_constant["digit"].half == pytest.approx(0, abs=1e-6)
    assert found.reasons == []
    # R2 is 0 for a constant prediction, so nothing is any percent better
    signed = [replace(line, metric="r2", value=line.value - constants[line.seed - 100] - 0.001) for line in lines]
    assert "no change in percent on validation data of digit" in sensitivity(Seeds("", tuple(signed)), "D").reasons[0]
    # seeds that redraw one pool share examples, so their intervals are wider
    shared = [replace(x, ratio=0.25, value=x.value + 0.01 * (x.seed % 2) * (x.method == "Local")) for x in lines]
    alone = [replace(x, ratio=0.0) for x in shared]
    wide, narrow = (sensitivity(Seeds("", tuple(of)), "D").over_constant["digit"].half for of in (shared, alone))
    assert wide == pytest.approx(narrow * ((1 / 3 + 0.25) * 3) ** 0.5)
    apart = [replace(line, seed=line.seed + 10 * (line.method == "Local")) for line in lines]
    with pytest.raises(StateError, match="D: .* have no seed in common"):
        sensitivity(Seeds("", tuple(apart)), "D")


@pytest.mark.parametrize(
    ("recipe", "change", "examples"),
    [
        ("digits-tasks", [], lambda data: len(data.train) + len(data.test)),
        ("benchmarks/scenes", ["data.count=40", "data.test_count=4"], lambda data: math.inf),
    ],
)
def test_validation_examples_are_counted_against_all_that_seeds_draw_from(
    recipe: str, change: list[str], examples: Any
) -> None:
    built = build(load_recipe(*change, recipe=recipe))
    clients = built.federation.clients.values()
    share = sum(len(c.val) for c in clients) / sum(len(c.train) + len(c.val) for c in clients)
    few = share * len(built.dataset.train)
    assert few > 0
    assert built.about["validated"] == pytest.approx(few / (examples(built.dataset) - few))


def test_the_ratio_is_that_of_the_part_that_was_measured(tmp_path: Path) -> None:
    grid = benchmark(tmp_path)
    for number, file in enumerate(sorted(tmp_path.rglob("run.json"))):
        info = json.loads(file.read_text())
        file.write_text(json.dumps({**info, "partition_hash": f"{number}", "validated": 0.2, "redrawn": 0.5}))
    assert {line.ratio for line in of_seeds(grid, tmp_path, "val").lines} == {0.2}
    side = next(iter(of_grid(grid, tmp_path, "val").sides.values()))
    task = Column("NYUD", "semseg", "miou", "max")
    assert estimate(task, [task], side) == Estimate.of([of["semseg"] for of in side.values.values()], 0.2)
    loss = Column("NYUD", "", "training_loss", "min")
    assert estimate(loss, [task], side) == Estimate.of([last_loss(run) for run in side.runs.values()]), "not measured"


def test_the_fall_is_that_of_a_tenth_of_the_rounds(tmp_path: Path) -> None:
    """A loss that shrinks by 2 % in every round, over the last fifth of 40."""
    benchmark(tmp_path, losses=[0.98**n for n in range(40)])
    run = Run.read(Cell("NYUD", "Local", "-", 100).folder(tmp_path))
    assert falling(losses(run)["depth"]) == pytest.approx(100 * (1 - 0.98**4), abs=0.01)
    assert math.isnan(falling([1.0]))


@pytest.mark.parametrize(
    ("validation", "other", "falls_by"),
    [
        ([0.9] * 8 + [0.8, 0.9], [0.9] * 10, (0, 0)),
        ([0.9] * 10, [0.9] * 9 + [0.9 * 0.96], (0, 4)),
        ([0.9] * 9 + [0.3], [0.9] * 10, (67, 0)),  # a mean of 33
        ([0.9] * 9 + [0.1], [0.9] * 10, (36, 36)),  # 44: neither loss has stopped, though each stopped for one task
        ([0.9], [0.9], (36, 36)),
        ([0.9] * 10, [0.9], (0, 36)),
    ],
)
def test_what_falls_on_its_own_examples_alone_has_converged(
    tmp_path: Path, validation: list[float], other: list[float], falls_by: tuple[float, float]
) -> None:
    """The training loss falls by 20 % in each of the last rounds; the validation loss is that of every other round."""
    grid = benchmark(tmp_path, losses=[1.0] * 16 + [0.8**n for n in range(1, 5)])
    file = Cell("NYUD", "Local", "-", 100).folder(tmp_path) / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for task, values in zip(CONSTANT_ROW, (validation, other), strict=True):
        for line, value in zip(lines[-2 * len(values) + 1 :: 2], values, strict=True):
            measured = {"metric": "loss", "split": "val", "model": "global", "client": "a", "value": value}
            line["metrics"].append({**measured, "task": task})
    file.write_text("\n".join(map(json.dumps, lines)) + "\n")
    expected = dict(zip(CONSTANT_ROW, falls_by, strict=True))
    assert falls(Run.read(file.parent)) == pytest.approx(expected, abs=0.4)
    lines_of_local = [
        line for line in of_seeds(grid, tmp_path, "val").lines if (line.method, line.seed) == ("Local", 100)
    ]
    assert {line.task: line.falling for line in lines_of_local} == pytest.approx(expected, abs=0.4)


def test_a_loss_that_is_nearly_gone_has_converged() -> None:
    """Below a tenth of the first loss a fall is in percent of that tenth; above it, of the loss itself."""
    known_by_heart = [2.0] * 16 + [0.002] * 2 + [0.001] * 2  # halved within two rounds of 20, which are a tenth
    assert falling(known_by_heart) == pytest.approx(100 * 0.5 * 0.002 / 0.2)
    assert falling([2.0] * 16 + [1.0] * 2 + [0.5] * 2) == pytest.approx(50)
    assert falling([2.0] * 16 + [0.2] * 2 + [0.1] * 2) == pytest.approx(50)
    assert falling([2.0] * 16 + [0.1] * 2 + [0.2] * 2) == 0  # rises
    assert falling([0.0] * 20) == 0
    assert falling([0.0] * 16 + [1.0] * 4) == 0


def test_rounds_that_were_measured_at_uneven_distances() -> None:
    """A loss that shrinks by 2 % in every round falls as much, however often it was measured, and after the last."""
    for rounds in ([*range(1, 41)], [15, 30, 40], [10, 20, 30, 31], [39, 40], [38, 39, 40]):
        fall = 100 * (1 - 0.98 ** (rounds[-1] / 10))
        assert falling([0.98**n for n in rounds], rounds) == pytest.approx(fall, abs=0.01), rounds


def test_tasks_on_which_nobody_beats_the_trivial_answer() -> None:
    directions = {"a": "max", "b": "min", "c": "max"}
    constant = ("constant", {"a": 0.5, "b": 2.0, "c": 0.0})
    one, centralised = ("fedavg", {"a": 0.5, "b": 1.9, "c": 0.0}), ("centralised", {"a": 0.9, "b": 1.0, "c": 1.0})
    assert at_constant([constant, one, centralised], directions) == ["a"]  # without a size of c nothing is known of it
    assert at_constant([constant, one, ("local", {"a": 0.6, "b": math.nan})], directions) == []
    assert at_constant([constant, centralised], directions) == []
    assert at_constant([one, centralised], directions) == []


def test_methods_that_learned_nothing_at_some_seeds_are_named() -> None:
    """Found where a tuned rate was at the edge: two seeds of three collapsed, and the interval of 98 % said nothing."""
    directions = {"a": "max", "b": "min"}
    nothing, something, never = {"a": 0.5, "b": 2.1}, {"a": 0.5, "b": 1.9}, {"a": 0.4, "b": math.nan}
    rows = {
        "constant": [{"a": 0.5, "b": 2.0}] * 3,
        "good": [something] * 3,
        "centralised": [something, nothing, never],
        "one": [nothing, something, something],
        "bad": [nothing] * 3,
    }
    of = {label: dict(zip((102, 103, 104), values, strict=True)) for label, values in rows.items()}
    assert uneven(of, directions) == [
        "centralised learned nothing at seeds 103, 104",
        "one learned nothing at seed 102",
    ]
    assert uneven(of, {"a": "max"}) == []  # nobody is better on a
    assert uneven({label: values for label, values in of.items() if label != "constant"}, directions) == []


def test_the_rule_names_rows_that_learned_nothing_at_some_seeds() -> None:
    """Found where two seeds of tuning had chosen a rate for training on all data with which others collapse."""
    rows = {"constant": (0.5, 0.5, 0.5), "Local": (0.8, 0.8, 0.8), "centralised": (0.9, 0.5, 0.9)}
    lines = [
        SeedLine("D", method, seed, "digit", "accuracy", value, "max", 0.1, 0.0, 0.0)
        for method, values in rows.items()
        for seed, value in zip((102, 103, 104), values, strict=True)
    ]
    found = sensitivity(Seeds("", tuple(lines)), "D")
    assert found.reasons[-1] == "centralised learned nothing at seed 103: tune it with more seeds"
    assert len(found.reasons) == 2
    lines = [line for line in lines if line.seed != 103] + [
        SeedLine("D", method, 105, "digit", "accuracy", values[0], "max", 0.1, 0.0, 0.0)
        for method, values in rows.items()
    ]
    assert sensitivity(Seeds("", tuple(lines)), "D").reasons == []


def test_a_comparison_marks_them_too(tmp_path: Path) -> None:
    """Four tasks of digits, on which two steps of training learn little."""
    runs = {name: fedloom.run(load_recipe(f"method={name}"), tmp_path / name) for name in ("local", "constant")}
    numbers = {n: {t: v["accuracy"] for t, v in run.run.final().values.items()} for n, run in runs.items()}
    expected = sorted(t for t, v in numbers["local"].items() if v <= numbers["constant"][t])
    found = compare([run.folder for run in runs.values()])
    assert expected
    assert list(found.excluded) == expected
    told = [numbers["constant"][t] / v - 1 for t, v in numbers["local"].items() if t not in expected]
    (delta,) = [column.delta for column in found.columns if column.delta is not None]
    assert delta.mean == pytest.approx(100 * sum(told) / len(told)) if told else math.isnan(delta.mean)
    assert compare([runs["local"].folder]).excluded == ()


def test_packaged_benchmarks_are_judged_by_seeds_that_no_method_is_tuned_with() -> None:
    seeds = {name: load_grid(name).seeds for name in names() if name.startswith("benchmarks/")}
    assert len(seeds) > 8
    assert {name for name, of in seeds.items() if len(of) < 3 or {*of} & {*tuning_seeds(3)}} == set()


def test_grids_have_references_unless_they_are_drawn() -> None:
    assert load_grid("feddea/table3-scenes").reference_rows == (
        *("centralised", "centralised-by-task", "separate", "simple", "constant"),
    )
    assert load_grid("f2dc/table1").reference_rows == ("centralised", "separate", "simple", "constant")  # of one task
    assert load_grid("feddea/rho-sweep").reference_rows == ()
    assert load_grid("feddea/table3-scenes", ["references=[]"]).reference_rows == ()


def test_references_have_no_add_on_where_every_method_has_one() -> None:
    addons = {"rho 0.5": {"method.add.feddea.rho": 0.5}, "rho 0.2": {"method.add.feddea.rho": 0.2}}
    data = {"NYUD": {"recipe": "digits-tasks"}}
    grid = paper_grid(data=data, addons=addons, references=["centralised"])
    assert grid.combinations[-2:] == (("FedProx", "rho 0.2"), ("centralised", "-"))
    assert [grid.reference(base) for base in ("FedProx", "centralised")] == [
        ("FedProx", "rho 0.5"),
        ("centralised", "-"),
    ]
    assert recipes(grid)[Cell("NYUD", "centralised", "-", 0)].method.name == "centralised"
