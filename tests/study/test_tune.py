"""Tuning: equal numbers of trials, rates beyond the edge, and nothing but validation data decides."""

from __future__ import annotations

import csv
import html
import json
import math
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import fedloom as fl
from fedloom.cli.app import app
from fedloom.core.settings.yaml import to_yaml
from fedloom.errors import RecipeError, StateError, UserError
from fedloom.experiments import compared
from fedloom.experiments.grid_run import Outcome, Runner
from fedloom.experiments.tune import (
    RATE,
    Budget,
    Curve,
    RefusedError,
    Search,
    UnlearnedError,
    as_grid,
    changes_against_first,
    key,
    search_of,
    tune,
    tune_grid,
    tuning_seeds,
)
from fedloom.federation.recipes import dump, load
from fedloom.federation.recipes.loader import texts
from fedloom.federation.recipes.objects import described
from fedloom.federation.recipes.schema import Recipe
from fedloom.federation.runs.reader import TaskMetric
from fedloom.federation.runs.recorded import recipe_in
from fedloom.study.claims import Effort
from fedloom.study.grid import Grid, load_grid, recipes, save
from fedloom.study.report import write as write_report
from fedloom.study.significance import contrasts
from fedloom.study.significance import sites as sites_of_runs
from fedloom.study.statistics import Estimate

SHORT = Budget(trials=4)


def spent(search: Search, score: Callable[[dict[str, Any]], float]) -> dict[str, float]:
    """Return the scores of all trials of a search."""
    scores: dict[str, float] = {}
    while new := search.next(scores):
        assert not {key(trial) for trial in new} & scores.keys()
        scores |= {key(trial): score(trial) for trial in new}
    return scores


def trial_of(*changes: str) -> Callable[[dict[str, Any]], Recipe]:
    """Return what makes the recipe of a trial on digits."""
    return lambda trial: load("benchmarks/digits", [*changes, *texts(trial)])


def rates(scores: dict[str, float], own: float) -> list[float]:
    return sorted({json.loads(name).get(RATE, own) for name in scores})


def test_rates_cover_two_decades_and_go_on_while_the_best_is_at_an_end() -> None:
    search = Search(0.1, {}, 9)
    peak = spent(search, lambda trial: -abs(math.log10(trial.get(RATE, 0.1)) - 1.5))  # best at 32
    assert rates(peak, 0.1)[0] == 0.01
    assert rates(peak, 0.1)[-1] > 32
    assert not search.at_edge(peak)
    up = spent(search, lambda trial: trial.get(RATE, 0.1))
    assert (len(up), search.at_edge(up)) == (9, True)
    inside = spent(search, lambda trial: -abs(math.log10(trial.get(RATE, 0.1)) + 1.25))
    assert {0.01, 0.032, 0.1, 0.32, 1.0} < set(rates(inside, 0.1))
    assert max(inside, key=inside.get) == key({RATE: 0.057})  # half a step beside the best of the grid, 0.032 or 0.1
    for few in (3, 4):  # two decades with fewer trials, too
        tried = rates(spent(Search(0.1, {}, few), lambda trial: -abs(trial.get(RATE, 0.1) - 0.1)), 0.1)
        assert (tried[0], tried[-1], len(tried)) == (0.01, 1.0, few)


def test_numbers_of_the_method_are_tried_at_the_best_rate() -> None:
    search = search_of(trial_of("method=fedprox", "method.mu=0.01"), 9)
    own = load("benchmarks/digits").training.optimizer.lr
    scores = spent(search, lambda trial: trial.get("method.mu", 0.01) - abs(math.log10(trial.get(RATE, own) / own)))
    assert key({"method.mu": 0.03}) in scores
    assert key({"method.mu": 0.0033}) in scores
    assert max(scores, key=scores.get) == key({"method.mu": 0.03})
    assert search_of(trial_of("method=constant"), 9).next({}) == [{}]
    for method, parameter, tried in (
        ("matfl", "groups", {6, 1}),
        ("fedmd", "digest_epochs", set()),  # benchmarks fix how much clients train, and on what
        ("fedmd", "public", set()),
        ("fedbabu", "tune", set()),
        ("fedhca2", "c", {0.13}),  # the library refuses 3 x 0.4
    ):
        scores = spent(
            search_of(trial_of(f"method={method}"), 12), lambda of: -abs(math.log10(of.get(RATE, own) / own))
        )
        assert {json.loads(name).get(f"method.{parameter}") for name in scores} == {None, *tried}


@pytest.mark.parametrize(("optimizer", "steps"), [("adam", {0.03, 0.0033}), ("momentum", {3.0, 0.33})])
def test_the_step_of_an_optimiser_at_the_server_is_tuned_where_nothing_sets_it(
    optimizer: str, steps: set[float]
) -> None:
    search = search_of(trial_of(f"method={{name: fedopt, optimizer: {optimizer}}}"), 12)
    assert next(iter(search.numbers)) == "method.step"
    own = load("benchmarks/digits").training.optimizer.lr
    tried = spent(search, lambda trial: -abs(math.log10(trial.get(RATE, own) / own)))
    assert {json.loads(name).get("method.step") for name in tried} == {None, *steps}


def test_rates_that_diverge_are_followed_by_smaller_ones() -> None:
    scores = spent(Search(1.0, {}, 8), lambda trial: -math.inf if trial.get(RATE, 1.0) > 0.005 else 1.0)
    assert key({RATE: 0.0032}) in scores


@pytest.mark.parametrize("trials", [4, 6, 8, 12, 20])
def test_every_method_with_a_rate_has_all_its_trials(trials: int) -> None:
    """A method without numbers tries finer rates around the best, and those with refused numbers do so too."""

    def near(peak: float) -> Callable[[dict[str, Any]], float]:
        return lambda trial: -abs(math.log10(trial.get(RATE, 0.123) / 0.123) - peak)

    for peak in (-1.0, -0.3, 0.0, 0.2, 0.9):
        for numbers in ({}, {"method.a": 0.1}, {"method.a": 0.1, "method.b": 2}, {"method.b": 1}):
            for valid in (lambda trial: True, lambda trial: not {"method.a", "method.b"} & trial.keys()):
                assert len(spent(Search(0.123, numbers, trials, valid), near(peak))) == trials, (peak, numbers)
    best = max(scores := spent(Search(0.123, {}, trials), near(0.2)), key=scores.get)
    assert trials < 12 or json.loads(best)[RATE] == pytest.approx(0.123 * 10**0.2, rel=0.03)


def test_numbers_that_a_row_or_a_typed_change_sets_are_not_tuned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[set[str]] = []

    def curve(search: Search, label: str, run: Any) -> Curve:
        made.append({*search.numbers})
        return Curve(label, {"{}": 0.0}, False)

    monkeypatch.setattr(Search, "curve", curve)
    file = tmp_path / "g.yaml"
    file.write_text(
        "name: g\ndata: {D: {recipe: digits-tasks, set: {method: fedavg}}}\nreferences: []\ndelta: none\n"
        "bases:\n  Own: {method: fedprox}\n  Mu: {method: {name: fedprox, mu: 0.5}}\n"
        "  DEA: {method: fedavg, method.add.feddea.rho: 0.4}\n  Half: {method: fedavg, method.add.feddea: {rho: 0.5}}\n"
    )
    tune_grid(load_grid(file), SHORT, tmp_path)
    own, mu, dea, half = made
    assert own == {"method.mu"}
    assert mu == set()
    assert "method.add.feddea.rho" not in dea | half
    tune_grid(
        load_grid(file, ["method.mu=0.2"]).model_copy(update={"bases": {"Own": {"method": "fedprox"}}}), SHORT, tmp_path
    )
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(dump(load("digits-tasks", ["method=fedprox", "method.mu=0.3"])))
    for changes in ([], ["method.mu=0.2", "seed=3"]):
        tune_grid(as_grid(str(recipe), changes), SHORT, tmp_path)
    assert made[4:] == [set(), {"method.mu"}, set()]


@given(st.integers(1, 14), st.dictionaries(st.sampled_from(["method.a", "method.b"]), st.floats(0.01, 9)), st.randoms())
def test_no_method_has_more_trials_than_the_budget_and_scores_decide_alone(
    trials: int, numbers: dict[str, float], random: Any
) -> None:
    known: dict[str, float] = {}

    def score(trial: dict[str, Any]) -> float:
        return known.setdefault(key(trial), random.choice([-math.inf, random.random(), random.random()]))

    first = spent(Search(0.05, numbers, trials), score)
    assert len(first) <= trials
    assert first == spent(Search(0.05, numbers, trials), score)  # goes the same way again
    assert len(first) == trials


def test_scores_are_changes_against_the_first_trial_with_finite_numbers() -> None:
    means = {"x": {"a": math.nan, "b": 1.0}, "y": {"a": 0.5, "b": 2.0}, "z": {"a": 0.6, "b": 1.0}, "none": {}}
    found = changes_against_first(means, {"a": "max", "b": "min"})
    assert found == {"x": -math.inf, "y": 0.0, "z": pytest.approx(35.0), "none": -math.inf}
    assert changes_against_first({"x": {}}, {"a": "max"}) == {"x": -math.inf}
    # a task that no trial has a number of does not hide the others
    nobody = {name: {"a": value, "auc": math.nan} for name, value in (("x", 0.5), ("y", 0.9))}
    assert changes_against_first(nobody, {"a": "max", "auc": "max"}) == {"x": 0.0, "y": pytest.approx(80.0)}
    # R2 of 0.001 is no number to take percent of: the trial with the better AUC is the better one
    vague = {"x": {"r2": 0.001, "auc": 0.5}, "y": {"r2": 0.021, "auc": 0.5}, "z": {"r2": 0.001, "auc": 0.6}}
    scores = changes_against_first(vague, {"r2": "max", "auc": "max"}, {"r2"})
    assert scores == {"x": 0.0, "y": pytest.approx(1.0), "z": pytest.approx(10.0)}
    columns = {
        name: SimpleNamespace(values={0: of})
        for name, of in zip(("local", "fedavg", "fedhca2"), vague.values(), strict=True)
    }
    assert compared._best(columns, [TaskMetric("r2", "r2", "max"), TaskMetric("auc", "auc", "max")]) == "fedhca2"  # type: ignore[arg-type]


def test_a_trial_that_crashed_is_no_bad_trial(tmp_path: Path) -> None:
    class Crashes(Runner):
        def run(self, grid: Grid, folder: Path) -> Outcome:
            cell = next(iter(recipes(grid)))
            return Outcome(failed={cell: "no space left"})

    value = load("benchmarks/digits").model_dump(mode="json")
    with pytest.raises(StateError, match="FedAvg: the recipe's own settings, seed 100: no space left"):
        tune(value, {}, Budget(trials=2), tmp_path, label="FedAvg", runner=Crashes())
    assert not Search(0.1, {}, 3).curve("FedAvg", lambda trials: {key(trial): -math.inf for trial in trials}).is_known


def test_a_tuned_grid_runs_with_what_was_chosen_on_validation_data(tmp_path: Path) -> None:
    file = tmp_path / "g.yaml"
    file.write_text(
        "name: g\ndata: {benchmark: {recipe: benchmarks/digits}}\n"
        "bases: {FedAvg: {method: fedavg}, Prox: {method: fedprox}}\n"
        "references: [simple, constant]\nset: {training.rounds: 1, training.epochs: 1, partition.clients_per_task: 1}\n"
    )
    out = tmp_path / "tuned"
    command = ["tune", str(file), "--trials", "2", "--seeds", "1", "--out", str(out), "-q"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    lines = list(csv.DictReader((out / "curves.csv").read_text().splitlines()))
    assert [sum(line["method"] == f"{name}/-" for line in lines) for name in ("FedAvg", "Prox", "simple")] == [2, 2, 2]
    assert sum(line["method"] == "constant/-" for line in lines) == 1
    loud = " ".join(CliRunner().invoke(app, command[:-1]).output.split())  # whose trials these are stands before them
    assert loud.index("Prox/-: up to 2 settings, each with seed 100") < loud.index("benchmark: Prox/-: ")
    for name in ("FedAvg/-", "Prox/-"):  # chosen is the best by validation
        mine = [line for line in lines if line["method"] == name]
        best = max(mine, key=lambda line: float(line["validation"]))
        assert [line["chosen"] for line in mine].count("True") == 1
        assert best["chosen"] == "True"
    tuned = load_grid(out / "grid.yaml")
    for cell, recipe in recipes(tuned).items():
        chosen = tuned.tuned.get("benchmark", {}).get(f"{cell.base}/{cell.addon}", {})
        expected = chosen.get(RATE, load("benchmarks/digits").training.optimizer.lr)
        assert recipe.training.optimizer.lr == expected, cell
    with pytest.raises(RecipeError, match="seeds: seed 100 found, which chose the settings under 'tuned'"):
        load_grid(out / "grid.yaml", ["seeds=[0, 100]"])
    trained = sorted((out / "trials").rglob("run.json"))
    times = [path.stat().st_mtime_ns for path in trained]
    again = CliRunner().invoke(app, command)
    assert again.output == result.output
    numbers = json.loads(CliRunner().invoke(app, [*command, "--json"]).stdout)
    assert {row["method"]: row["settings"] for row in numbers} == {
        cell.base: tuned.tuned.get("benchmark", {}).get(f"{cell.base}/{cell.addon}", {}) for cell in recipes(tuned)
    }
    assert all(isinstance(row["validation"], float | int) for row in numbers)
    assert sorted((out / "trials").rglob("run.json")) == trained
    assert any("training.optimizer.lr=0.03" in path.parts[-4] for path in trained)
    # named by its settings, so that a search with more seeds, which may go another way, finds what ran before
    more = CliRunner().invoke(app, [*command[:4], "--seeds", "2", *command[-3:]])
    assert more.exit_code == 0, more.output
    assert {*trained} < {*(out / "trials").rglob("run.json")}
    assert [path.stat().st_mtime_ns for path in trained] == times
    wrong = "name: g\ndata: {b: {recipe: benchmarks/digits}}\nbases: {A: {method: fedavg}}\ntuned: {b: {B/-: {}}}\n"
    file.write_text(wrong)
    said = CliRunner().invoke(app, ["grid", str(file), "--dry-run"])
    assert "tuned.b.B/-: no such data set and cell" in " ".join(str(said.exception).split())


def test_a_refused_method_is_named_and_what_is_damaged_or_learns_nothing_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bases = {"A": {"method": "fedavg"}, "B": {"method": "fedprox"}, "C": {"method": "local"}}
    grid = load_grid({"name": "g", "data": {"D": {"recipe": "digits-tasks"}}, "references": [], "bases": bases})
    trials = tmp_path / "trials" / "cells" / "D" / "A" / "plain"
    torn = {"grid.yaml": "", "cells/benchmark/the_recipe_s_own_settings/plain/s100/recipe.yaml": "name: x",
            "refused.json": "{"}  # fmt: skip
    for name, text in torn.items():
        file = trials / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        with pytest.raises(
            StateError, match=rf"(?s)A/-: {file}.*delete the file \(of a run: its whole folder\)"
        ) as caught:
            tune_grid(grid, Budget(trials=1), tmp_path, Runner())
        assert not isinstance(caught.value, RefusedError)
        file.unlink()

    def made(*_: Any, label: str, **__: Any) -> Curve:
        if label in reasons:
            raise reasons[label]
        return Curve(label, {"{}": 0.0}, False)

    monkeypatch.setattr("fedloom.experiments.tune.tune", made)
    file = tmp_path / "g.yaml"
    file.write_text(to_yaml(grid.model_dump(mode="json")))
    command = ["tune", str(file), "--out", str(tmp_path / "out"), "-q"]
    reasons: dict[str, UserError] = {"B/-": RefusedError("not here")}
    result = CliRunner().invoke(app, command)
    assert (result.exit_code, result.stderr) == (0, "refused: D / B: not here\n")
    reasons |= {"B/-": UnlearnedError("nothing"), "C/-": RefusedError("no")}
    result = CliRunner().invoke(app, command)
    assert (result.exit_code, result.stderr) == (1, "failed: D / B: nothing\nrefused: D / C: no\n")
    named = json.loads(CliRunner().invoke(app, [*command, "--json"]).stdout)
    assert named[1:] == [{"left out": "D / B", "reason": "nothing"}, {"left out": "D / C", "reason": "no"}]
    reasons["A/-"] = RefusedError("none")
    assert "refused: D / A: none\nfailed: D / B" in str(CliRunner().invoke(app, command).exception)


def test_seeds_of_tuning_are_not_those_of_results_or_of_the_rule(tmp_path: Path) -> None:
    assert tuning_seeds(1) == (100,)
    assert tuning_seeds(4) == (100, 101, 99, 98)
    assert not {*tuning_seeds(90)} & {*Effort().rule}
    assert tuning_seeds(2) == Budget().seeds == Effort().tuning
    grid = tmp_path / "g.yaml"
    grid.write_text("name: g\nseeds: [5, 99]\ndata: {D: {recipe: digits-tasks}}\nbases: {A: {method: fedavg}}\n")
    result = CliRunner().invoke(app, ["tune", str(grid), "--seeds", "3", "--out", str(tmp_path / "out"), "-q"])
    assert str(result.exception) == "grid g: seed 99 tunes the methods; take others"
    with pytest.raises(UserError, match="compare: seed 101 tunes the methods; take others"):
        fl.compare(sites(), seeds=[0, 101], tell=lambda text: None)


def test_trials_do_not_replace_the_file_of_a_grid_that_ran(tmp_path: Path) -> None:
    grid = load_grid({"name": "g", "data": {"D": {"recipe": "digits-tasks"}}, "bases": {"A": {"method": "fedavg"}}})
    save(grid, tmp_path, {})
    (tmp_path / "cells").mkdir()
    with pytest.raises(StateError, match=r" is the folder of a grid, whose grid\.yaml the tuned grid would replace: "):
        tune_grid(grid, Budget(trials=1), tmp_path)


def test_a_rate_at_which_nothing_is_learned_is_no_setting(tmp_path: Path) -> None:
    changes = ["training.optimizer.lr=1e30", "training.rounds=1", "partition.clients_per_task=1"]
    command = ["tune", "digits-tasks", *changes, "--trials", "1", "--seeds", "1", "--out", str(tmp_path), "-q"]
    said = str(CliRunner().invoke(app, command).exception)
    assert "none of 1 settings learned anything or ended with finite numbers" in said
    assert "training.optimizer.lr=1e+30, expected a smaller one" in said


def sites(validate: bool = True) -> fl.Federation:
    """Three sites; what they have to learn is the same, and each has few examples."""
    rng = np.random.default_rng(3)
    w = rng.normal(size=10).astype("float32")

    def examples(n: int) -> tuple[Any, Any]:
        x = rng.normal(size=(n, 10)).astype("float32")
        return x, {"ill": (x @ w > 0).astype("int64"), "old": (x[:, 0] + x[:, 1] > 0).astype("int64")}

    def client(*tasks: str) -> fl.Client:
        x, y = examples(24)
        return fl.Client((x, {t: y[t] for t in tasks}), val=examples(60) if validate else 0, tasks=tasks)

    clients = {"ann": client("ill"), "bob": client("ill", "old"), "cleo": client("ill")}
    return fl.Federation(clients, {"ill": fl.task(classes=2), "old": fl.task(classes=2)}, test=examples(300))


def test_a_comparison_without_methods_says_for_whom_training_together_pays(tmp_path: Path) -> None:
    heard: list[str] = []
    made = fl.compare(sites(), rounds=2, folder=tmp_path / "c", budget=SHORT, tell=heard.append)
    assert [c.label.split()[0] for c in made.columns] == [
        "local",
        "separate",
        "fedavg",
        "fedhca2",
        "centralised",
        "simple",
        "constant",
    ]
    assert {tuple(c.runs) for c in made.columns} == {(0, 1, 2)}
    text = made.to_text()
    for line in (
        "Of the ways of training together, ",
        "All tasks together: ",
        "ill: ",
        "old: ",
        "ann ",
        "bob ",
        "cleo ",
        "Next: ",
    ):
        assert any(note.startswith(line) for note in made.notes), line
    assert "the best of 4 settings on validation data" in text
    assert "of 7 intervals, about " in text, "all tasks, two tasks, and four of sites"
    assert "constant: the recipe's own settings." in text
    assert heard[0].startswith("compare: 7 methods, each with 4 settings on validation data (2 seeds)")
    assert "about 0:00 left" in heard[-1]
    # the page to send to those who did not run it: all of that, without the folder
    said = made.notes[-1]
    assert said.endswith(f"fedloom report {tmp_path / 'c'}")
    page = write_report(tmp_path / "c")
    assert page == tmp_path / "c" / "report.html"
    shown = html.unescape(page.read_text("utf-8")).replace("\N{NO-BREAK SPACE}", " ")
    assert all(f"<p>{note}</p>" in shown for note in made.notes[:-1])
    assert all(f">{cell}<" in shown for line in made.as_table().lines for cell in line)
    assert not any(text in shown for text in (str(tmp_path), "://", "src=", "href="))
    with pytest.raises(fl.errors.UserError, match="--png: the page of a comparison has no figures"):
        write_report(tmp_path / "c", also={"png": tmp_path})
    with pytest.raises(fl.errors.UserError, match="--base x: expected a run or a grid to compare with, .*comparison"):
        write_report(tmp_path / "c", base="x")
    (file := tmp_path / "c" / "comparison.json").write_text(file.read_text().replace('"head"', '"had"'))
    with pytest.raises(fl.errors.StateError, match=r"comparison\.json, head: field required"):
        write_report(tmp_path / "c")
    file.unlink()
    with pytest.raises(fl.errors.StateError, match=r"which `fedloom compare RECIPE` writes"):
        write_report(tmp_path / "c")
    # what is there is not run again, and the answer is the same
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "c").rglob("run.json")}
    assert fl.compare(sites(), rounds=2, folder=tmp_path / "c", budget=SHORT, tell=heard.append).to_text() == text
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "c").rglob("run.json")}
    torn = tmp_path / "c" / "trials" / "fedhca2-0-s100" / "run.json"
    whole = torn.read_text()
    torn.write_text("{")
    with pytest.raises(fl.errors.StateError, match=rf"{torn}.*; delete the file \(of a run: its whole folder\)"):
        fl.compare(sites(), rounds=2, folder=tmp_path / "c", budget=SHORT, tell=heard.append)
    torn.write_text(whole)
    with pytest.raises(fl.errors.StateError, match="has a run of another recipe"):
        fl.compare(sites(), rounds=3, folder=tmp_path / "c", budget=SHORT, tell=heard.append)


def test_several_runs_of_a_comparison_at_once_are_the_same_runs(tmp_path: Path) -> None:
    def made(jobs: int, said: list[str]) -> Any:
        recipe, budget = load("digits-tasks", ["training.rounds=1", "model=mlp"]), {"trials": 2, "seeds": [100]}
        return fl.compare(recipe, folder=tmp_path / str(jobs), seeds=2, budget=budget, tell=said.append, jobs=jobs)

    one: list[str] = []
    two: list[str] = []
    tables = [made(1, one).to_text(), made(2, two).to_text()]
    assert tables[0].replace(f"{tmp_path / '1'}", f"{tmp_path / '2'}") == tables[1]
    labels = [[line.partition("] ")[2].partition(";")[0] for line in said[1:]] for said in (one, two)]
    assert sorted(labels[0]) == sorted(labels[1]), "each run is counted once"
    assert two[-1].startswith(f"[{len(two) - 1}/{len(two) - 1}] ")
    models = [{path.relative_to(home): path.read_bytes() for path in home.rglob("model.safetensors")}
              for home in (tmp_path / "1", tmp_path / "2")]  # fmt: skip
    assert models[0] == models[1] != {}


def test_what_fails_beside_other_runs_is_said_as_where_it_fails_alone(tmp_path: Path) -> None:
    recipe, methods = load("digits-tasks", ["training.rounds=1", "model=mlp"]), ["local", "fedavg", "f2dc"]
    for jobs in (1, 2):
        said: list[str] = []
        with pytest.raises(RecipeError, match="an encoder with maps"):
            fl.compare(recipe, methods=methods, folder=tmp_path / f"{jobs}", tell=said.append, jobs=jobs)
        assert [line.partition("]")[0] for line in said] == ["[1/3", "[2/3"]


def test_a_sentence_says_yes_or_no_only_where_the_numbers_allow_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    score, signed = TaskMetric("ill", "auc", "max"), TaskMetric("ill", "r2", "max")
    low, high = (0.20, 0.21, 0.22), (0.30, 0.31, 0.33)
    assert compared._compared((low, high), score, 0.0, "")[0] == "yes"
    assert compared._compared((high, low), score, 0.0, "")[0] == "no, worse"
    assert compared._compared((low, high), score, 0.0, "not converged: local")[0] == "cannot tell"
    assert compared._compared((low, high), signed, 0.0, "")[0] == "yes"
    about_0 = compared._compared(([of - 0.2 for of in low], high), signed, 0.0, "")
    assert about_0 == (
        "cannot tell",
        "0.01 -> 0.313, difference +0.3, 95 % CI +0.29 to +0.32, about 0 alone, so no percent",
    )
    monkeypatch.setattr("fedloom.study.results.STILL", -1.0)  # nothing has converged
    made = fl.compare(sites(), rounds=4, lr=0.01, seeds=2, folder=tmp_path, budget={"trials": 1, "seeds": [100]})
    assert any("has not converged" in note for note in made.notes)
    notes = [note for note in made.notes if note.startswith(("All tasks", "ill: ", "old: ", "ann ", "bob ", "cleo "))]
    assert not any(word in note for note in notes for word in ("yes", "no, ", "gains on", "loses on", "does not gain"))
    assert "Next: neither yes nor no is possible (not converged: " in made.notes[-2]
    monkeypatch.setattr(compared, "small_clients", lambda run, split: {"ann"})
    made = fl.compare(sites(), rounds=4, lr=0.01, seeds=2, folder=tmp_path, budget={"trials": 1, "seeds": [100]})
    assert "ann: too few rows, so no verdict." in made.notes


def test_a_sentence_says_no_more_than_its_numbers() -> None:
    score, error = TaskMetric("ill", "auc", "max"), TaskMetric("age", "rmse", "min")
    same = compared._compared(((0.5, 0.6, 0.7), (0.6, 0.7, 0.8)), score, 0.25, "")
    assert same == ("cannot tell", "0.6 -> 0.7, difference +0.1, the same at every seed"), "no interval of width 0"
    wide = (0.0, 1.0, 0.1), (1.0, 0.5, 0.9)
    assert compared._compared(wide, score, 0.25, "")[1].endswith("95 % CI -1 to +1, detectable 3.5")
    assert "95 % CI -2.2 to +3.1" in compared._compared(wide, error, 0.25, "")[1]
    noise, rest = ((1.2, 1.3, 1.4), (1.1, 1.2, 1.31)), (error, 0.25, "")
    for numbers in (noise, (*noise, (1.3, 1.3, 1.3))):
        assert compared._compared(numbers, *rest)[0] == "yes"
    nothing = compared._compared((*noise, (1.0, 1.1, 1.1)), *rest)
    assert nothing[0] == "cannot tell", "who learns nothing gains from less noise, but learned nothing"
    assert nothing[1].endswith("95 % CI -0.12 to -0.078, but the constant prediction has 1.07")
    assert compared._compared((*noise[::-1], (1.0, 1.1, 1.1)), *rest)[0] == "no, worse"
    assert all("together" not in said for said, _ in compared._SAID.values()), "one method of three was compared"


def test_the_sentence_about_all_tasks_is_the_mean_change_of_the_table(tmp_path: Path) -> None:
    """With twelve rounds FedAvg is worse than training alone, so here it is what training alone is compared with."""
    methods, options = ["fedavg", "local", "constant"], {"rounds": 12, "lr": 0.05, "seeds": 3}
    made = fl.compare(sites(), folder=tmp_path, methods=methods, tell=lambda _: None, **options)
    fedavg, local, constant = made.columns
    change = local.delta
    assert change is not None
    of, ends = f"change {change.mean:+.1f} %", [change.mean - change.half, change.mean + change.half]
    text = f"{of}, 95 % CI {ends[0]:+.1f} to {ends[1]:+.1f}"
    assert compared._over_tasks(made, made.columns, "") == ("yes", text)
    assert compared._over_tasks(made, made.columns, "not converged: local") == ("cannot tell", text)
    ahead = replace(constant, delta=Estimate(1000.0, 0.0, 3))
    said = ("cannot tell", f"{text}, but the constant prediction has +1000.0 %")
    assert compared._over_tasks(made, [fedavg, local, ahead], "") == said


def test_the_sentence_about_all_tasks_names_those_that_it_leaves_out() -> None:
    """A task on which no method is better than the constant prediction is no part of the mean change."""
    rng, names = np.random.default_rng(5), ["ill", "old", "tall"]

    def examples() -> tuple[Any, dict[str, Any]]:
        x = rng.normal(size=(30, 2))
        return x, {name: (x[:, 0] > at).astype(int) for at, name in enumerate(names, -1)}

    clients = {name: fl.Client(examples(), tasks=names) for name in ("ann", "bob")}
    fed = fl.Federation(clients, {name: fl.task(classes=2) for name in names}, test=examples())
    made = fl.compare(fed, methods=["local", "fedavg"], rounds=2, seeds=2, tell=lambda _: None)
    sides = dict(zip(("local", "fedavg"), made.columns, strict=True))
    for out, start in ((), "All tasks together: "), (("old",), "All tasks but old together: "), (("ill", "old"), ""):
        columns = tuple(replace(column, excluded=column.task in out) for column in made.results.columns[""])
        some = replace(made, results=replace(made.results, columns={"": columns}))
        said = [line for line in compared.answer(sides, some, "fedavg") if line.startswith("All tasks")]
        assert [line.startswith(start) for line in said] == [True] * bool(start), said


def test_each_seed_of_a_comparison_draws_the_test_rows_of_a_table(tmp_path: Path) -> None:
    """In Python as of a recipe; else the intervals would be about one test part."""
    rng = np.random.default_rng(5)
    rows = pandas.DataFrame({"site": list("AB") * 60, "x": rng.normal(size=120), "z": rng.normal(size=120)})
    rows["ill"] = (rows.x + rng.normal(size=120) > 0).astype(int)
    fed = fl.Federation.from_table(rows, "site", ["ill"], seed=7)

    def ask(what: fl.Federation, folder: str) -> Any:
        ways: Any = {"methods": ["local", "fedavg"], "seeds": 2, "rounds": 2, "tell": lambda text: None}
        return fl.compare(what, folder=tmp_path / folder, **ways)

    made = ask(fed, "c")
    assert [len({run.info["data_hash"] for run in side.runs.values()}) for side in made.columns] == [2, 2]
    assert [side.ratio for side in made.columns] == [0.25, 0.25]
    assert "corrected for the examples that seeds share" in made.caption
    values = [made.columns[0].values[seed]["ill"] for seed in (0, 1)]
    half = 12.7062 * np.std(values, ddof=1) * np.sqrt(1 / 2 + 0.25)
    assert made.columns[0].cells[made.rows[0]].half == pytest.approx(half, rel=1e-4), "as wide as Δm's"
    assert ask(fed, "c").to_text() == made.to_text(), "finished runs are those of the same splits"
    assert described(fed.redrawn(1)) == described(fed)
    assert fed.redrawn(7).dataset.test.fingerprint() == fed.dataset.test.fingerprint()
    own = sites()
    assert own.redrawn(1) is own
    sides = dict(zip(("local", "fedavg"), made.columns, strict=True))
    assert compared.FIXED not in compared.answer(sides, made, "fedavg")
    fixed = ask(own, "own")
    sides = dict(zip(("local", "fedavg"), fixed.columns, strict=True))
    assert compared.answer(sides, fixed, "fedavg")[0] == compared.FIXED
    assert "corrected" not in fixed.caption


def test_options_of_a_comparison_are_checked_before_anything_runs() -> None:
    heard: list[str] = []
    for options, said in (
        ({"budget": {"trials": 0}}, "compare: budget, trials: 0 found, expected an integer of at least 1"),
        ({"budget": {"tries": 4}}, "compare: budget, tries: unknown key"),
        ({"budget": {"seeds": []}}, "compare: budget, seeds: "),
        ({"budget": 4}, "compare: budget: 4 found, expected a mapping"),
        ({"methods": ["local"], "budget": {"trials": 4}}, "compare: budget={'trials': 4} found, expected none"),
        ({"base": "local"}, "compare: base='local' found, expected none"),
        ({"seeds": [3, 4, 3]}, "compare: seeds=[3, 4, 3] found: a seed occurs twice"),
        ({"budget": {"seeds": [100, 100]}}, "compare: budget, seeds: [100, 100] found: a seed occurs twice"),
        ({"split": "tset"}, "compare: split='tset' found, expected 'test' or 'val'"),
        ({"methods": ["local", "fedavg", "local"]}, "'local' occurs twice"),
        ({"methods": ["local"], "seed": 3}, "compare: seed=3 found, expected seeds=, a number of seeds or a list"),
        ({"method": "fedavg"}, "compare: method='fedavg' found, expected methods=, a list"),
        ({"overrides": ["training.rounds=-1"]}, "training.rounds"),
        ({"rounds": -1}, "rounds"),
        ({"round": 1}, "round"),
    ):
        with pytest.raises(UserError) as caught:
            fl.compare(sites(), tell=heard.append, **options)
        assert said in str(caught.value)
    assert heard == []
    for methods in (None, ["local", "fedavg"]):  # known at the end of the first run
        with pytest.raises(UserError, match="no task has the metric 'acc'"):
            fl.compare(sites(), methods=methods, tell=heard.append, metric="acc", rounds=1)
    assert len(heard) == 3  # what will run, and the first run; with named methods the first run
    untested = fl.Federation({"ann": fl.Client((np.eye(9), [0, 1, 1] * 3))}, {"ill": fl.task(classes=2)})
    with pytest.raises(UserError, match=r"the federation has no test data: give .*split='val'"):
        fl.compare(untested, methods=["local"])
    assert fl.Budget is Budget
    made = fl.compare(sites(), methods=["local", "fedavg", "constant"], rounds=1, seeds=2)
    assert made.notes[-1] == "Not tuned: each method has the settings it was given."
    verdicts = {test.verdict.reason for test in contrasts(made.results).tests if test.verdict}
    assert verdicts == {"convergence not known: fedavg, local", "convergence not known: local"}


def test_without_validation_data_nothing_is_chosen() -> None:
    made = fl.compare(sites(validate=False), rounds=1, budget={"trials": 2}, tell=lambda text: None)
    assert "No validation data, so no way of training together is recommended." in made.notes
    assert any(
        "local: not tuned: no validation data, so its settings are the recipe's own" in note for note in made.notes
    )


def test_a_comparison_of_a_private_recipe_has_the_methods_that_can_be_private(tmp_path: Path) -> None:
    """What sends nothing runs without privacy, and the recipe's weights, which have a bound, hold for all."""
    pytest.importorskip("dp_accounting", reason="needs the extra `privacy`")
    privacy = {"clip": 1.0, "noise": 1.0, "delta": 0.1}
    private = {"rounds": 1, "privacy": privacy, "overrides": ["method.weights=uniform"], "budget": {"trials": 2}}
    heard: list[str] = []
    made = fl.compare(sites(validate=False), seeds=1, folder=tmp_path / "c", tell=heard.append, **private)
    assert [c.label.split()[0] for c in made.columns] == ["local", "fedavg", "centralised", "simple", "constant"]
    recipes = {c.label.split()[0]: recipe_in(next(iter(c.runs.values())).folder) for c in made.columns}
    assert {name for name, of in recipes.items() if of.privacy is not None} == {"fedavg"}
    assert recipes["fedavg"].method.weights == "uniform"
    left = [note for note in made.notes if "is left out" in note]
    assert [note.split()[0] for note in left] == ["separate", "fedhca2"]
    assert "fedavg sends one for all its tasks" in left[0]
    numbers = [re.match(r"\[(\d+)/(\d+)\]", line) for line in heard]
    assert [int(n[1]) for n in numbers if n][-1] == int([n[2] for n in numbers if n][-1]), heard


def test_what_ran_on_other_data_is_not_taken_for_it(tmp_path: Path) -> None:
    """A file that was only touched is the same; one with other labels is not, in a comparison and in a grid."""
    rng = np.random.default_rng(5)
    file, data = tmp_path / "site.csv", tmp_path / "mine.yaml"
    rows = [f"{'AB'[n % 2]},{rng.normal():.3f},{int(rng.random() < 0.5)}" for n in range(40)]
    file.write_text("\n".join(["site,x,ill", *rows]))
    made = ["init", str(file), "--labels", "ill", "--clients", "site", "--method", "fedavg", "--rounds", "1"]
    assert CliRunner().invoke(app, [*made, "--out", str(data)]).exit_code == 0
    grid = load_grid({"name": "g", "data": {"D": {"recipe": str(data)}}, "bases": {"A": {"method": "fedavg"}},
                      "references": []})  # fmt: skip

    def ask() -> None:
        once = Budget(trials=1, seeds=(100,))
        fl.compare(str(data), seeds=1, folder=tmp_path / "c", budget=once, tell=lambda text: None)
        assert Runner().run(grid, tmp_path / "g").failed == {}

    ask()
    os.utime(file)
    ask()
    file.write_text("\n".join(["site,x,ill", *(row[:-1] + str(1 - int(row[-1])) for row in rows)]))
    for again in (ask, lambda: Runner().run(grid, tmp_path / "g")):
        with pytest.raises(UserError, match="the data set has changed since the run began"):
            again()


CRASHES = """from dataclasses import dataclass
import fedloom as fl
from fedloom.stages import Mean, Stage

@dataclass(frozen=True)
class Trimmed(Mean):
    trim: int = 1

    def unfit(self, rows, most=0):
        if self.trim > 2:
            yield f"{self!r} needs more clients"

    def __call__(self, updates, state, ctx):
        if self.trim < 1:
            raise ValueError("a bug")
        return super().__call__(updates, state, ctx)

def trimmed(*, trim: int = 1) -> fl.Method:
    return fl.Method(name="trimmed", stage=Trimmed(trim=trim))
"""


def test_unfit_settings_are_left_out_and_a_crash_leaves_out_its_row_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "crashing.py").write_text(CRASHES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("FEDLOOM_ALLOW_CODE", "crashing")
    bases = {"Bug": {"method": {"name": "crashing:trimmed", "trim": 0}}, "Mine": {"method": "crashing:trimmed"}}
    grid = {"name": "g", "data": {"D": {"recipe": "digits-tasks"}}, "references": [], "delta": "none", "bases": bases}
    short = {"training.rounds": 1, "training.steps": 1, "training.epochs": None}
    (tmp_path / "g.yaml").write_text(to_yaml({**grid, "set": short}))
    result = CliRunner().invoke(app, ["tune", "g.yaml", "--trials", "7", "--seeds", "1", "--out", "t", "-q"])
    assert result.exit_code == 1, result.output
    assert re.search(r"failed: D / Bug: Bug/-: .*, seed 100: .*ValueError: a bug", result.stderr), result.stderr
    lines = list(csv.DictReader((tmp_path / "t" / "curves.csv").read_text().splitlines()))
    assert [line["method"] for line in lines] == ["Mine/-"] * 7
    assert not any("trim" in line["settings"] for line in lines)  # 3 is unfit, and costs no trial


def test_a_site_is_followed_over_seeds_by_its_domain() -> None:
    """Partitions may number their clients in another order at each seed."""

    def runs(*orders: str) -> dict[int, Any]:
        clients = [{f"c{place}": {"domain": domain} for place, domain in enumerate(order)} for order in orders]
        return {seed: SimpleNamespace(info={"clients": of}) for seed, of in enumerate(clients)}

    assert sites_of_runs(runs("ab", "ba")) == {"a": {0: "c0", 1: "c1"}, "b": {0: "c1", 1: "c0"}}
    assert sites_of_runs(runs("aab", "aba")) == {"c0": {0: "c0", 1: "c0"}}  # alike
    nowhere = {seed: SimpleNamespace(info={"clients": {"x": {"domain": None}, "y": {}}}) for seed in (0, 1)}
    assert sites_of_runs(nowhere) == {"x": {0: "x", 1: "x"}, "y": {0: "y", 1: "y"}}


def test_a_name_that_a_grid_and_a_recipe_have_is_the_grids(capsys: pytest.CaptureFixture[str]) -> None:
    assert as_grid("benchmarks/har").name == load_grid("benchmarks/har").name
    assert capsys.readouterr().err == (
        "warning: benchmarks/har is the name of a grid and of a recipe: this takes the grid; "
        "for the recipe, name a file with the line `like: benchmarks/har`\n"
    )


def test_a_file_with_keys_that_only_a_grid_has_is_a_grid(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    for like, keys, bases in (
        ("claims/feddea-digits", "seeds: [5]", list(load_grid("claims/feddea-digits").bases)),
        ("digits-tasks", "training.rounds: 2", ["fedavg"]),
        ("benchmarks/digits", "training.rounds: 2", ["fedavg"]),  # the name of a recipe and of a grid
    ):
        file.write_text(f"like: {like}\nname: mine\n{keys}\n")
        assert list(as_grid(str(file)).bases) == bases
    file.write_bytes(b"na\xefme: x\n")
    with pytest.raises(RecipeError, match=r"mine.yaml: 'utf-8' codec can't decode byte 0xef"):
        as_grid(str(file))
