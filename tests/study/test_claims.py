"""The verdicts on claims: from files alone, the same as from runs, and never a yes or no that the rules forbid."""

from __future__ import annotations

import csv
import io
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from scipy import stats
from typer.testing import CliRunner

from fedloom.cli.app import app
from fedloom.errors import RecipeError, StateError
from fedloom.experiments import claims as experiment
from fedloom.experiments.claims import rule_grid
from fedloom.experiments.grid_run import Outcome, Runner, prepare
from fedloom.study.claims import Effort, judged, load_claims, verdicts
from fedloom.study.grid import Grid, against, load_grid, open_folder, recipes, save
from fedloom.study.results import HEAD, SeedLine, Seeds, of_grid, of_seeds, read_seeds
from fedloom.study.significance import contrasts
from fedloom.study.statistics import Estimate
from grid_support import paper_grid, write_grid

FAMILY = {"FedAvg/-": ["Local/-"], "FedProx/-": ["Local/-", "FedAvg/-"]}
LEVELS = {"constant": 0.1, "Local": 0.2, "FedAvg": 0.23, "FedProx": 0.2305, "centralised": 0.24}


def plan(**more: Any) -> Grid:
    value = {
        "data": {"NYUD": {"recipe": "digits-tasks"}},
        "bases": {name: {"method": name.lower()} for name in ("Local", "FedAvg", "FedProx")},
        "addons": {"-": {}},
        "references": ["centralised", "constant"],
        "seeds": [0, 1, 2, 3, 4],
        "delta": "Local/-",
        "family": FAMILY,
    }
    return paper_grid(**value | more)


def number(name: str, seed: int, task: str) -> float:
    """A level for each method, on which seeds are 0.5 % apart, and methods at a seed 0.1 %."""
    drawn = random.Random(f"{name} {seed} {task}").uniform(-1, 1)
    return LEVELS[name] * (1 + 0.005 * (seed % 3) + 0.001 * drawn)


def lines(seeds: Any, fall: Callable[[str], float] = lambda name: 0.1, ratio: float = 0.0, **levels: float) -> Seeds:
    found = []
    for name in LEVELS:
        for seed in seeds:
            for task in ("semseg", "edge"):
                value = number(name, seed, task) * levels.get(name, 1.0)
                found.append(SeedLine("NYUD", name, seed, task, "miou", value, "max", 0.3, fall(name), ratio))
    return Seeds("t", tuple(found))


TEST, RULE = lines(range(5)), lines((102, 103, 104))


def said(test: Seeds = TEST, rule: Seeds | None = RULE, **more: Any) -> dict[str, str]:
    found = judged(plan(**more), test, rule).comparisons
    return {f"{method} over {over}": of.verdict.in_words() for (_, method, over), of in found.items()}


def test_the_three_verdicts_and_what_forbids_them() -> None:
    assert said() == {"FedAvg over Local": "yes", "FedProx over Local": "yes", "FedProx over FedAvg": "no"}
    assert set(said(rule=None).values()) == {"cannot tell (benchmark not judged)"}
    poor = lines((102, 103, 104), centralised=0.85)  # nothing to gain from others
    assert set(said(rule=poor).values()) == {"cannot tell (benchmark not sensitive)"}
    assert set(said(rule=lines((102, 103))).values()) == {"cannot tell (benchmark not sensitive)"}
    moving = lines(range(5), fall=lambda name: 9.0 if name == "FedAvg" else 0.1)
    assert said(moving)["FedAvg over Local"] == "cannot tell (not converged: FedAvg)"
    assert said(moving)["FedProx over Local"] == "yes"
    # the loss of a single round says nothing of its fall; a method without any loss trains nothing
    brief = lines(range(5), fall=lambda name: math.nan if name in ("FedAvg", "FedProx") else 0.1)
    assert said(brief)["FedAvg over Local"] == "cannot tell (convergence not known: FedAvg)"
    assert said(brief)["FedProx over FedAvg"] == "cannot tell (convergence not known: FedProx, FedAvg)"
    lossless = [replace(x, training_loss=math.nan) if math.isnan(x.falling) else x for x in brief.lines]
    assert said(replace(brief, lines=tuple(lossless))) == said()
    assert said(smallest=20.0)["FedAvg over Local"] == "no"
    short = replace(TEST, lines=tuple(x for x in TEST.lines if (x.method, x.seed) != ("FedAvg", 3)))
    assert said(short)["FedAvg over Local"] == "cannot tell (no seed 3: FedAvg)"
    assert said(short)["FedProx over Local"] == "yes"
    # nor is a verdict on half of the tasks one on all
    for name, gap in (("FedAvg", [x for x in TEST.lines if (x.method, x.task) != ("FedAvg", "edge")]),
                      ("Local", [replace(x, value=math.nan) if (x.method, x.task, x.seed) == ("Local", "edge", 2) else x
                                 for x in TEST.lines])):  # fmt: skip
        of = said(replace(TEST, lines=tuple(gap)))["FedAvg over Local"]
        assert of == f"cannot tell (no number of edge at some seed: {name})"
    # R2 of -0.02 is no baseline: of that, 0.2 is a gain of 1100 %
    signed = [replace(x, metric="r2", value=x.value - 0.22) if x.task == "edge" else x for x in TEST.lines]
    assert (
        said(replace(TEST, lines=tuple(signed)))["FedAvg over Local"]
        == "cannot tell (about 0 with Local, so no percent: edge)"
    )
    # a task on which no method is better than the constant prediction counts for nothing
    swapped = [replace(x, value=0.9 if x.method == "constant" else 0.1) if x.task == "edge" else x for x in TEST.lines]
    assert said(replace(TEST, lines=tuple(swapped)))["FedAvg over Local"] == "yes"


def test_the_numbers_by_hand() -> None:
    found = judged(plan(), TEST, RULE).comparisons
    ratios = [[number("FedAvg", s, t) / number("Local", s, t) for t in ("semseg", "edge")] for s in range(5)]
    gains = [100 * (sum(each) / 2 - 1) for each in ratios]
    plain = found["NYUD", "FedAvg", "Local"]
    assert plain.change is not None
    assert plain.change.mean == pytest.approx(sum(gains) / 5)
    assert plain.change.p == pytest.approx(stats.ttest_1samp(gains, 0).pvalue)
    rows = {row[1]: row for row in judged(plan(), TEST, RULE).methods}
    assert [row[0] for row in rows.values()] == ["NYUD"] * len(LEVELS)
    assert rows["FedAvg"][2:] == ("5", Estimate.of(gains).signed, "0.3", "0.1")
    assert rows["Local"][3] == ""
    # Holm over the three comparisons of the family, and over nothing else
    ps = sorted(of.change.p for of in found.values() if of.change)
    assert sorted(of.holm for of in found.values()) == pytest.approx(
        [3 * ps[0], max(3 * ps[0], 2 * ps[1]), max(3 * ps[0], 2 * ps[1], ps[2])]
    )
    # a comparison that is the same at every seed was named too, so the others are still two of three
    same = {x.seed: x.value for x in TEST.lines if (x.method, x.task) == ("FedAvg", "edge")}
    level = [replace(x, value=same[x.seed]) if x.method in ("FedAvg", "FedProx") else x for x in TEST.lines]
    equal = judged(plan(), replace(TEST, lines=tuple(level)), RULE).comparisons
    assert equal["NYUD", "FedProx", "FedAvg"].verdict.in_words() == "cannot tell (the same at every seed)"
    one = equal["NYUD", "FedAvg", "Local"]
    assert one.change is not None
    assert one.holm == pytest.approx(3 * one.change.p)
    shared = judged(plan(), lines(range(5), ratio=0.25), RULE).comparisons["NYUD", "FedAvg", "Local"]
    assert shared.change is not None
    width = (shared.change.high - shared.change.low) / (plain.change.high - plain.change.low)
    assert width == pytest.approx((0.45 / 0.2) ** 0.5)  # (1/5 + 1/4) / (1/5)


def test_files_and_runs_give_the_same(tmp_path: Path) -> None:
    grid = plan()
    cells = {
        ("NYUD", name, "-", seed): {task: number(name, seed, task) for task in ("semseg", "edge")}
        for name in LEVELS
        for seed in range(5)
    }
    folder = write_grid(tmp_path / "g", grid, cells)
    tests = {(t.data, t.method, t.base): t for t in contrasts(of_grid(*open_folder(folder))).tests if t.row is None}
    found = judged(grid, of_seeds(grid, folder), RULE).comparisons
    assert tests.keys() == found.keys()
    for key, test in tests.items():
        assert test.verdict is not None
        assert (test.change.mean, test.change.p, test.holm) == pytest.approx(  # type: ignore[union-attr]
            (found[key].change.mean, found[key].change.p, found[key].holm)  # type: ignore[union-attr]
        )
        assert test.verdict == found[key].verdict
    # another base has no family: all are compared with it
    other = contrasts(of_grid(against(grid, "FedAvg/-"), folder)).tests
    assert {(t.method, t.base) for t in other} == {("Local", "FedAvg"), ("FedProx", "FedAvg")}


def write(folder: Path, text: str, test: Seeds = TEST, rule: Seeds | None = RULE) -> Path:
    (folder / "grid.yaml").write_text(GRID)
    for name, of in {"seeds": test, "rules": rule}.items():
        (folder / name).mkdir(exist_ok=True)
        if of is not None:
            (folder / name / "small.csv").write_text(of.to_csv())
    file = folder / "claims.yaml"
    file.write_text(text.replace("GRID", str(folder / "grid.yaml")))
    return file


GRID = """
name: small
data: {NYUD: {recipe: digits-tasks}}
bases: {Local: {method: local}, FedAvg: {method: fedavg}, FedProx: {method: fedprox}}
references: [centralised, constant]
delta: Local/-
family: {FedAvg/-: [Local/-], FedProx/-: [Local/-, FedAvg/-]}
"""
CLAIMS = """
grids: {GRID: {trials: 2}}
claims:
  - {paper: A, claim: Together is better, grid: GRID, method: FedAvg, over: Local}
  - {paper: B, claim: The new one is better still, grid: GRID, method: FedProx, over: FedAvg}
  - {paper: C, claim: An older one, grid: claims/fedhca2-scenes, method: FedHCA2, over: Local}
"""


def test_a_table_of_verdicts(tmp_path: Path) -> None:
    file = write(tmp_path, CLAIMS)
    shown = verdicts(file).as_table().lines
    assert [line[-1] for line in shown] == ["yes", "no", "none"]
    assert [line[5] for line in shown] == ["sensitive", "sensitive", "before equal tuning"]
    note = "before equal tuning: no numbers of tuned methods are here, so there is no verdict; --run makes them."
    assert note in verdicts(file).as_table().notes
    result = CliRunner().invoke(app, ["study", "claims", str(file), "--format", "csv"])
    rows = list(csv.DictReader(io.StringIO(result.output)))
    kept = [(row["seeds"], row["family"], row["verdict"]) for row in rows]
    assert kept == [("5", "3", "yes"), ("5", "3", "no"), ("", "", "none")]
    assert float(rows[0]["gain"]) == pytest.approx(15, abs=0.5)


def test_grids_are_found_beside_the_file_of_claims(tmp_path: Path) -> None:
    file = write(tmp_path, CLAIMS)
    file.write_text(CLAIMS.replace("GRID", "grid.yaml"))
    assert [line[-1] for line in verdicts(file).as_table().lines] == ["yes", "no", "none"]
    assert [*load_claims(file).grids] == [str(tmp_path / "grid.yaml")]


class Rows(Runner):
    """Runs nothing, and lists the rows it was asked for."""

    def run(self, grid: Grid, folder: Path) -> Outcome:
        asked.setdefault(folder.name, []).append([base for base, _ in grid.combinations])
        return Outcome()


asked: dict[str, list[list[str]]] = {}


@pytest.mark.parametrize("rule", [RULE, lines((102, 103, 104), centralised=0.85)], ids=["sensitive", "not"])
def test_rows_that_no_verdict_is_about_are_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rule: Seeds
) -> None:
    file = write(tmp_path, CLAIMS, rule=None)
    (tmp_path / "seeds" / "small.csv").unlink()
    more = GRID.replace("FedProx: {", "Step 2: {method: {name: fedavg, add: {server-step: {}}}}, FedProx: {")
    (tmp_path / "grid.yaml").write_text(more.replace("[centralised,", "[centralised, separate, simple,"))
    tuned, told = list[list[str]](), list[str]()

    def tune(grid: Grid, budget: Any, folder: Path, runner: Any) -> tuple[Grid, list[Any]]:
        tuned.append([base for base, _ in grid.combinations])
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "curves.csv").write_text("")
        return grid, []

    asked.clear()
    monkeypatch.setattr(experiment, "tune_grid", tune)
    monkeypatch.setattr(experiment, "seeds_of", lambda grid, sides: rule if grid.name.endswith("-rule") else TEST)
    monkeypatch.setattr(experiment, "read", lambda *_: {})
    experiment.claimed(file, tmp_path / "runs", runner=Rows(tell=told.append))
    judges = ["Local", "centralised", "constant"]
    compared = ["Local", "FedAvg", "FedProx", "centralised", "separate", "simple", "constant"]
    shown = verdicts(file).as_table().lines
    if rule is RULE:
        assert tuned == [judges, compared]
        assert asked == {"rule": [judges], "test": [compared]}
        assert [line[-1] for line in shown] == ["yes", "no", "none"]
    else:
        assert tuned == asked["rule"] == [judges]
        assert asked.keys() == {"rule"}
        assert "no other row is tuned or run\nNYUD: all data in one place is" in told[-1]
        assert [line[-1] for line in shown] == 2 * ["cannot tell (benchmark not sensitive)"] + ["none"]
        assert verdicts(file).records().lines[0][6:8] == ("not sensitive", None)


def test_what_a_file_of_seeds_lacks_is_named(tmp_path: Path) -> None:
    file = write(tmp_path, CLAIMS, rule=None)
    seeds, rules = tmp_path / "seeds" / "small.csv", tmp_path / "rules" / "small.csv"
    without = [line for line in TEST.lines if line.method != "FedProx"]
    broken = [replace(x, value=math.inf) if (x.method, x.task) == ("FedAvg", "edge") else x for x in without]
    seeds.write_text(Seeds("t", tuple(broken)).to_csv())
    notes = verdicts(file).as_table().notes
    assert f"{seeds}, NYUD: no seed 0, 1, 2, 3, 4: FedProx." in notes
    assert f"{seeds}, NYUD: no number of edge at some seed: FedAvg." in notes
    assert f"{rules} is absent: the benchmark is not judged." in notes


def test_wrong_files_are_refused_in_a_sentence(tmp_path: Path) -> None:
    swapped = CLAIMS.replace("method: FedAvg, over: Local", "method: Local, over: FedAvg")
    with pytest.raises(RecipeError, match="Local over FedAvg on NYUD is not in the family of grid"):
        verdicts(write(tmp_path, swapped)).as_table()
    with pytest.raises(RecipeError, match=r"claims\.yaml, claims\[0\]\.over: missing"):
        load_claims(write(tmp_path, CLAIMS.replace(", over: Local", "", 1)))
    with pytest.raises(StateError, match="no grid 'x' among those to run"):
        experiment.claimed(write(tmp_path, CLAIMS), tmp_path / "runs", ["x"])
    result = CliRunner().invoke(app, ["study", "claims", str(tmp_path / "claims.yaml"), "--only", "x"])
    assert "they need --run" in str(result.exception)


@pytest.mark.parametrize(
    ("last", "message"),
    [
        ("D,A,1,t,accuracy,0.5,max,,,0", "line 3: accuracy max of t found, the lines above have auc max"),
        ("D,A,1,t,auc,0.5,min,,,0", "line 3: auc min of t found, the lines above have auc max"),
    ],
)
def test_seeds_of_a_task_have_one_metric(tmp_path: Path, last: str, message: str) -> None:
    file = tmp_path / "g.csv"
    file.write_text(f"{','.join(HEAD)}\nD,A,0,t,auc,0.5,max,,,0\n{last}\n")
    with pytest.raises(StateError, match=message):
        read_seeds(file)


def test_a_grid_that_needs_to_know_where_its_data_is_runs_where_that_is_stated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path, CLAIMS.replace("trials: 2", "trials: 2, given: [training.rounds]"))
    told, ran = list[str](), list[int]()
    monkeypatch.setattr(
        experiment, "_claimed", lambda grid, *_: ran.extend({r.training.rounds for r in recipes(grid).values()})
    )
    experiment.claimed(file, tmp_path / "runs", runner=Runner(tell=told.append))
    assert told == [f"{tmp_path / 'grid.yaml'}: not run, for it needs training.rounds=..."]
    experiment.claimed(file, tmp_path / "runs", changes=["training.rounds=3"])
    assert sorted(ran) == [1, 3]  # constant needs one round
    ran.clear()
    experiment.claimed(
        file, tmp_path / "runs", changes=["training.rounds=3", f"{tmp_path / 'grid.yaml'}:training.rounds=4"]
    )
    assert sorted(ran) == [1, 4]
    with pytest.raises(RecipeError, match=r"'training.rounds': expected key\.path=value"):
        experiment.claimed(file, tmp_path / "runs", changes=["training.rounds"])
    with pytest.raises(StateError, match="no grid takes a change of rounds; what grids take: training.rounds"):
        experiment.claimed(file, tmp_path / "runs", changes=["rounds=3"])


def test_a_verdict_is_redone_with_other_seeds(tmp_path: Path) -> None:
    digits = [replace(x, task={"semseg": "digit", "edge": "parity"}[x.task]) for x in TEST.lines]
    test = replace(TEST, lines=tuple(digits))
    file = write(tmp_path, CLAIMS.replace("trials: 2", "trials: 2, given: [training.epochs, training.rounds]"), test)
    (tmp_path / "tuning").mkdir()
    chosen, other = '"{""training.optimizer.lr"": 0.04}"', '"{""training.optimizer.lr"": 0.5}"'
    curves = f"""data,method,trial,settings,validation,chosen,rate_at_edge
NYUD,FedAvg/-,0,{{}},0,False,False
NYUD,FedAvg/-,1,{chosen},1,True,False
NYUD,FedProx/-,0,{{}},0,True,False
NYUD,Local/-,1,{other},1,True,False
"""
    (tmp_path / "tuning" / "small.csv").write_text(curves)
    changes = ["training.epochs=1", "training.rounds=4", "seeds=[7,8]"]
    command = ["study", "claims", str(file), *changes, "--redo", "2", "--grids", str(tmp_path / "runs")]
    result = CliRunner().invoke(app, [*command, "--format", "csv", "-q"], catch_exceptions=False)
    (row,) = csv.DictReader(io.StringIO(result.stdout))
    assert (row["claim"], row["seeds"], row["family"]) == ("The new one is better still", "2", "1")
    assert (row["method"], row["baseline"], row["state"]) == ("FedProx", "FedAvg", "sensitive")
    made = load_grid(tmp_path / "runs" / "small-NYUD_over_FedProx_-_over_FedAvg" / "grid.yaml")
    rates = {cell.base: recipe.training.optimizer.lr for cell, recipe in recipes(made).items()}
    assert rates == {"FedAvg": 0.04, "FedProx": 0.05, "constant": 0.05}
    assert {cell.seed for cell in recipes(made)} == {7, 8}
    assert verdicts(file).as_table().lines[1][0] == "2. The new one is better still"
    assert verdicts(file).as_table().lines[1][6] == "5"  # the files are what they were

    def refused(number: int, *changes: str) -> str:
        with pytest.raises(StateError) as caught:
            experiment.redone(file, number, tmp_path / "runs", changes=changes)
        return str(caught.value)

    assert "no claim 0; they have the numbers 1 to 3" in refused(0)
    assert refused(1, *changes[:2], "seeds=[7,102]") == (
        "claim 1: seed 102 tuned the methods or judged the benchmark; take others"
    )
    assert f"claim 1: its grid {tmp_path / 'grid.yaml'} needs training.epochs=... training.rounds=..." in refused(1)
    given = changes[:2]
    assert refused(1, *given, "seeds=[7]") == ("claim 1: 1 seed found, expected two or more: a verdict has an interval")
    assert refused(1, *given, "training.optimizer.lr=1", "method.mu=1") == (
        "claim 1: a change of method.mu, training.optimizer.lr makes another experiment; "
        "expected seeds, training.epochs, training.rounds"
    )
    (tmp_path / "tuning" / "small.csv").write_text(curves.replace("FedProx", "FedSGD"))
    assert refused(2, *given) == "claim 2: no settings were chosen yet for FedProx/-: run its grid with --run"
    (tmp_path / "tuning" / "small.csv").write_text(curves.replace(chosen, "{"))
    assert "small.csv: no file of trials, which `fedloom study claims --run` writes" in refused(1, *given)
    (tmp_path / "tuning" / "small.csv").unlink()
    assert refused(1, *given) == "claim 1 has not been tuned: run its grid with --run"
    result = CliRunner().invoke(app, [*command, "--run"])
    assert "--redo is about one claim" in str(result.exception)


def test_tasks_that_count_are_those_of_the_table_when_a_claim_is_redone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one task only FedProx is better than the constant prediction, and the claim is about the two others."""
    hard = [
        replace(x, value=0.1 + 0.001 * x.seed + 0.1 * (x.method == "FedProx") - 0.05 * (x.method == "FedAvg"))
        if x.task == "edge"
        else x
        for x in TEST.lines
    ]
    file = write(tmp_path, CLAIMS, replace(TEST, lines=tuple(hard)))
    (tmp_path / "tuning").mkdir()
    head = "data,method,trial,settings,validation,chosen,rate_at_edge\n"
    (tmp_path / "tuning" / "small.csv").write_text(head + "".join(f"NYUD,{n}/-,0,{{}},0,True,False\n" for n in LEVELS))
    pair = [x for x in hard if x.method in ("FedAvg", "Local", "constant")]
    monkeypatch.setattr(experiment, "_ran", lambda *_: replace(TEST, lines=tuple(pair)))
    again = experiment.redone(file, 1, tmp_path / "runs").as_table().lines[0]
    assert again[7] == verdicts(file).as_table().lines[0][7]
    assert again[7].startswith("-")  # half of the gain on the one task, and the loss on the other


def test_a_grid_that_stops_leaves_the_files_of_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path, CLAIMS)
    before = {path: path.read_text() for path in tmp_path.rglob("small.csv")}

    def tune(grid: Grid, budget: Any, folder: Path, runner: Any) -> tuple[Grid, list[Any]]:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "curves.csv").write_text("another")
        return grid, []

    def seeds_of(grid: Grid, sides: Any) -> Seeds:
        if not grid.name.endswith("-rule"):
            raise StateError("the disk is full")
        return RULE

    monkeypatch.setattr(experiment, "tune_grid", tune)
    monkeypatch.setattr(experiment, "seeds_of", seeds_of)
    monkeypatch.setattr(experiment, "read", lambda *_: {})
    with pytest.raises(StateError, match="the disk is full"):
        experiment.claimed(file, tmp_path / "runs", runner=Rows())
    assert {path: path.read_text() for path in tmp_path.rglob("small.csv")} == before


def test_a_claim_is_about_methods_with_the_same_examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experiment, "refusal", lambda one, base, seeds: f"not the same data set at seed {seeds[0]}")
    cells = {("NYUD", name, "-", 3): {"semseg": 0.2, "edge": 0.3} for name in ("FedAvg", "Local")}
    write_grid(tmp_path / "g", plan(), cells)
    with pytest.raises(StateError, match="NYUD: FedAvg and Local: not the same data set at seed 3"):
        experiment._ran(plan(), tmp_path / "g", "test", Rows())


def test_seeds_are_used_once() -> None:
    for more in ({"tuning": [100, 102]}, {"rule": [5, 102, 103]}, {"tuning": [3]}):
        with pytest.raises(ValidationError, match="expected seeds that are used for nothing else"):
            Effort.model_validate(more)
    with pytest.raises(ValidationError, match=r"11 found, expected at most 10 \(most\)"):
        Effort.model_validate({"least": 11})


def test_a_family_is_named_before_the_runs(tmp_path: Path) -> None:
    save(plan(), tmp_path, {})
    changed: Mapping[str, Any] = {"family": {"FedProx/-": ["Local/-"]}, "smallest": 0.5}
    for key, value in changed.items():
        with pytest.raises(StateError, match=f"grid paper: {key}: .* ran with .*proves nothing"):
            prepare(plan(**{key: value}), tmp_path)
    with pytest.raises(RecipeError, match=r"family\.FedProx/-: no cell 'Locl/-', .* Did you mean 'Local/-'"):
        plan(family={"FedProx/-": ["Locl/-"]})


def test_the_rows_of_the_rule_have_validation_data() -> None:
    effort = Effort()
    for name in ("claims/fedhca2-digits", "claims/f2dc-digits", "demo"):
        grid = load_grid(name)
        made = recipes(rule_grid(grid, effort))
        assert {cell.base for cell in made} >= {"Local", "centralised", "constant"}
        assert {cell.seed for cell in made} == {102, 103, 104}
        assert {cell.data for cell in made} == set(grid.data)
        for recipe in made.values():
            assert list(recipe.evaluation.splits) == ["val"]
            assert recipe.partition.params.get("val_fraction") != 0


@pytest.mark.slow
def test_claims_run_from_an_empty_folder_and_go_on(tmp_path: Path) -> None:
    file = write(tmp_path, CLAIMS.replace("trials: 2", "trials: 1, tuning: [100], least: 2, most: 2"), rule=None)
    tiny = "set: {training.rounds: 2, training.epochs: null, training.steps: 2}"
    (tmp_path / "grid.yaml").write_text(GRID.replace("recipe: digits-tasks", f"recipe: digits-tasks, {tiny}"))
    told: list[str] = []
    for _ in range(2):
        experiment.claimed(file, tmp_path / "runs", runner=Runner(tell=told.append))
    assert {path.name for path in tmp_path.rglob("small.csv")} == {"small.csv"}
    assert sorted(path.parent.name for path in tmp_path.rglob("small.csv")) == ["rules", "seeds", "tuning"]
    found = verdicts(file)
    assert [of.verdict.reason for of in found.grids[str(tmp_path / "grid.yaml")].comparisons.values()]
