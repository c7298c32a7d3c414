"""Tournaments: what each method is tried with, who is chosen by validation data, when seeds end, who stands where."""

from __future__ import annotations

import csv
import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedloom.cli.app import app
from fedloom.errors import RecipeError, StateError
from fedloom.experiments import grid_run
from fedloom.experiments import tournament as experiment
from fedloom.experiments.grid_run import BENCHMARK, Outcome, Prepared, Runner
from fedloom.experiments.tournament import Standings, Tournament, opened, save
from fedloom.experiments.tune import RATE, chosen_of
from fedloom.federation.recipes import load
from fedloom.study import grid as grid_module
from fedloom.study.grid import cells
from fedloom.study.output import Records, Table
from grid_support import write_run

GOOD, BASE = {"semseg": 0.30, "depth": 1.6}, {"semseg": 0.20, "depth": 2.0}


OWN = load("benchmarks/digits").training.optimizer.lr


def plan(*methods: str, **more: Any) -> Tournament:
    recipe = load("benchmarks/digits").model_dump(mode="json")
    given = {"name": "t", "recipe": recipe, "methods": methods, "tries": 3, "tuning": (100,), "least": 2, "most": 4}
    return Tournament(**given | more)


def test_references_do_not_take_part() -> None:
    assert not {"centralised", "constant", "separate", "simple"} & set(experiment.all_methods())


def pretend(monkeypatch: pytest.MonkeyPatch, numbers: Any, ran: list[str]) -> None:
    """Runs that never ran: `numbers`(method, learning rate, seed) -> task -> number, None for one that is refused."""

    def prepare(grid: Any, folder: Path) -> Prepared:
        refused = {
            cell.combination: "no" for cell in cells(grid) if numbers(_method(grid, cell), 0.0, cell.seed) is None
        }
        return Prepared(grid, folder, {}, {}, refused, (), {})

    def run(prepared: Prepared, *args: Any) -> Outcome:
        grid, folder = prepared.grid, prepared.folder
        grid_module.save(grid, folder, prepared.refused)
        for cell in cells(grid):
            if cell.combination in prepared.refused or cell.folder(folder).exists():
                continue
            rate = (grid.bases.get(cell.base) or grid.tuned[BENCHMARK].get(f"{cell.base}/-", {})).get(RATE, OWN)
            values = numbers(_method(grid, cell), rate, cell.seed)
            ran.append(f"{folder.name} {cell}")
            # on the split that is not looked at all is the other way round
            other = {task: 1 / value for task, value in values.items()}
            tuning = grid.name == "trials"
            write_run(folder, cell, other if tuning else values, val={1: values if tuning else other})
        return Outcome()

    monkeypatch.setattr(grid_run, "prepare", prepare)
    monkeypatch.setattr(grid_run, "run_prepared", run)


def _method(grid: Any, cell: Any) -> str:
    """The method of a cell of a tuning grid or of the final."""
    section = grid.bases.get(cell.base, {"method": cell.base})["method"]
    return section if isinstance(section, str) else section["name"]


def test_the_best_settings_by_validation_play_and_seeds_end_when_all_is_significant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def numbers(method: str, rate: float, seed: int) -> dict[str, float] | None:
        if method == "fedper":
            return None
        jitter = 1 + 0.001 * ((7 * seed + len(method)) % 5)
        values = GOOD if method == "fedprox" and rate > 2 * OWN else BASE
        return {"semseg": values["semseg"] * jitter, "depth": values["depth"] / jitter}

    ran: list[str] = []
    pretend(monkeypatch, numbers, ran)
    told: list[str] = []
    tournament = plan("fedprox", "fedper")
    made = experiment.play(tournament, tmp_path, Runner(tell=told.append))
    rows = list(csv.DictReader(io.StringIO((tmp_path / "standings.csv").read_text())))
    assert [row["method"] for row in rows] == [
        *("fedprox", "local", "centralised", "centralised-by-task", "separate", "simple", "constant")
    ]
    assert rows[0]["settings"].startswith(f"{RATE}=")
    assert rows[1]["settings"] == "the recipe's own settings"
    assert float(rows[0]["delta"]) == pytest.approx(35, abs=1)
    assert float(rows[1]["behind"]) == pytest.approx(-float(rows[0]["delta"]))
    assert (made.is_settled, made.seeds) == (True, 2)
    assert made.to_csv() == (tmp_path / "standings.csv").read_text()
    assert chosen_of(tmp_path / "curves.csv")[BENCHMARK]["fedprox"].keys() == {RATE}
    assert "not on this benchmark: fedper: no" in (tmp_path / "standings.md").read_text()
    # one more method: nothing that is there is run again
    before = set(ran)
    ran.clear()
    joined = tournament.model_copy(update={"methods": ("fedprox", "fedper", "fedavg")})
    experiment.play(joined, tmp_path, Runner(tell=told.append))
    assert ran
    assert not before & set(ran)
    assert all("fedavg" in cell or cell.endswith(("s2", "s3")) for cell in ran), ran
    assert opened(tmp_path) == joined


def test_all_weigh_clients_as_the_recipe_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else FedAvg would weigh them by numbers of examples, which a private recipe refuses."""
    pretend(monkeypatch, lambda method, rate, seed: BASE, [])
    recipe = load("benchmarks/digits", ["method.weights=uniform"]).model_dump(mode="json")
    experiment.play(plan("fedprox", recipe=recipe, tries=1), tmp_path)
    for folder in (tmp_path / "final", *tmp_path.glob("tuning/*")):
        grid = grid_module.load_grid(folder / "grid.yaml")
        assert {made.method.weights for made in grid_module.recipes(grid).values()} == {"uniform"}, folder


def test_a_method_whose_best_settings_are_new_plays_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def numbers(method: str, rate: float, seed: int) -> dict[str, float]:
        jitter = 1 + 0.001 * ((7 * seed + len(method)) % 5)
        good = method in ("fedprox", "simple") and rate > 6 * OWN
        return {t: x * jitter for t, x in (GOOD if good else BASE).items()}

    ran: list[str] = []
    pretend(monkeypatch, numbers, ran)
    told: list[str] = []
    finals = []
    for tries in (1, 5, 5):
        ran.clear()
        experiment.play(plan("fedprox", "fedavg", tries=tries), tmp_path, Runner(tell=told.append))
        finals.append([cell.removeprefix("final ") for cell in ran if cell.startswith("final ")])
    assert len(finals[0]) > len(finals[1])
    assert finals[1:] == [[f"benchmark / {name} s{seed}" for seed in range(2) for name in ("fedprox", "simple")], []]
    moved = [text for text in told if "the best settings have changed" in text]
    assert [text.partition(":")[0] for text in moved] == ["fedprox", "simple"]
    assert "the largest or the smallest one tried, so more trials may help: fedprox, simple" in (
        " ".join((tmp_path / "standings.md").read_text().split())
    )
    assert (tmp_path / "final" / "earlier" / "fedprox 1" / "s0" / "run.json").is_file()


def test_what_is_not_significant_ends_with_the_most_seeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    pretend(
        monkeypatch, lambda method, rate, seed: {"semseg": 0.2 + 0.01 * ((seed + len(method)) % 2), "depth": 2.0}, ran
    )
    made = experiment.play(plan("fedavg", "scaffold"), tmp_path)
    assert (made.seeds, made.is_settled) == (4, False)


def test_the_help_says_the_defaults(tmp_path: Path) -> None:
    made, _ = experiment.planned("benchmarks/digits", (), tmp_path, ("fedavg",), {})
    text = CliRunner().invoke(app, ["study", "tournament", "--help"], env={"COLUMNS": "200"}).output
    lines = {line.split()[1]: line for line in text.splitlines() if "--" in line}
    for name, default in (("--tries", made.tries), ("--seeds", made.least), ("--most", made.most)):
        assert f"[default: ({default})]" in lines[name]


def test_a_task_that_nobody_learns_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def numbers(method: str, rate: float, seed: int) -> dict[str, float]:
        jitter = 1 + 0.001 * ((7 * seed + len(method)) % 5)
        edge = 0.9 if method == "constant" else 0.4 if method == "fedavg" else 0.2
        return {"semseg": jitter * (0.3 if method == "fedavg" else 0.1 if method == "constant" else 0.2), "edge": edge}

    pretend(monkeypatch, numbers, [])
    made = experiment.play(plan("fedavg", most=2), tmp_path)
    assert "no method is better than the constant prediction on edge" in " ".join(made.to_markdown().split())
    rows = {row["method"]: row for row in csv.DictReader(io.StringIO(made.to_csv()))}
    assert float(rows["fedavg"]["delta"]) == pytest.approx(50, abs=1)
    # where nobody learns anything, all tasks are shown, and the page says what they are worth
    pretend(monkeypatch, lambda method, rate, seed: {"semseg": 0.2, "edge": 0.1 + 0.01 * seed}, [])
    made = experiment.play(plan("fedavg", most=2), tmp_path / "idle")
    assert "no method is better than the constant prediction on any task" in " ".join(made.to_markdown().split())


def test_no_verdict_is_about_percent_of_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def numbers(method: str, rate: float, seed: int) -> dict[str, float]:
        level = {"fedavg": 0.3, "constant": 0.001}.get(method, 0.02)
        return {"semseg": level * (1 + 0.001 * ((7 * seed + len(method)) % 5))}

    pretend(monkeypatch, numbers, [])
    monkeypatch.setattr("fedloom.study.results.SIGNED", {"miou"})
    made = experiment.play(plan("fedavg", most=2), tmp_path)
    rows = {row["method"]: row for row in csv.DictReader(io.StringIO(made.to_csv()))}
    assert {row["p"] for row in rows.values()} == {""}
    assert "no verdict: local is about 0 on semseg" in " ".join(made.to_markdown().split())


@pytest.mark.parametrize("gone", ["fedavg", "local"])
def test_a_method_without_a_number_at_a_seed_is_named(
    gone: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def numbers(method: str, rate: float, seed: int) -> dict[str, float]:
        value = math.nan if method == gone and seed == 1 else 0.2 + 0.01 * seed + 0.001 * len(method)
        return {"semseg": value if method != "constant" else 0.1}

    pretend(monkeypatch, numbers, [])
    if gone == "local":
        with pytest.raises(StateError, match="no number of local on any task at seed 1, but changes are against it"):
            experiment.play(plan("fedavg", most=2), tmp_path)
        return
    made = experiment.play(plan("fedavg", "scaffold", most=2), tmp_path)
    assert "left out, without a number at every seed: fedavg" in " ".join(made.to_markdown().split())


def test_a_method_that_has_not_converged_is_marked_and_has_no_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def numbers(method: str, rate: float, seed: int) -> dict[str, float]:
        jitter = 1 + 0.001 * ((7 * seed + len(method)) % 5)
        return {t: x * jitter for t, x in (GOOD if method == "fedavg" else BASE).items()}

    pretend(monkeypatch, numbers, [])
    of_grid = experiment.of_grid

    def with_losses(grid: Any, folder: Path) -> Any:
        for file in folder.glob("cells/*/*/*/s*/metrics.jsonl"):
            falls = "scaffold" in file.parts
            train = [
                {"client": "a", "task": "semseg", "loss": 1 - number / 10 if falls else 0.5} for number in range(9)
            ]
            lines = [json.loads(line) for line in file.read_text().splitlines()]
            lines += [{**lines[-1], "round": 2 + number} for number in range(len(train))]
            text = "".join(
                json.dumps({**line, "train": [one]}) + "\n" for line, one in zip(lines[1:], train, strict=True)
            )
            file.write_text(json.dumps(lines[0]) + "\n" + text)
            info = json.loads((run := file.with_name("run.json")).read_text())
            run.write_text(json.dumps(info | {"final_round": 1 + len(train)}))
        return of_grid(grid, folder)

    monkeypatch.setattr(experiment, "of_grid", with_losses)
    made = experiment.play(plan("fedavg", "scaffold", most=2), tmp_path)
    rows = {row["method"]: row for row in csv.DictReader(io.StringIO(made.to_csv()))}
    assert (rows["scaffold"]["unsettled"], rows["scaffold"]["p"]) == ("not converged", "")
    assert rows["local"]["unsettled"] == ""
    assert float(rows["local"]["p"]) < 1
    page = made.to_markdown()
    assert "| 0.2000 ± 0.0000 ‡ |" in next(line for line in page.splitlines() if line.startswith("| scaffold"))
    assert "| 0.5000 ± 0.0000 |" in next(line for line in page.splitlines() if line.startswith("| fedavg"))
    assert "which allows no verdict" in page


def test_a_benchmark_on_which_nobody_can_be_tuned_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, lambda method, rate, seed: None, [])
    with pytest.raises(RecipeError, match="tournament t: local: no"):
        experiment.play(plan("fedavg"), tmp_path)


def test_wrong_input_is_refused_in_a_sentence(tmp_path: Path) -> None:
    def said(*arguments: object) -> str:
        result = CliRunner().invoke(app, ["study", "tournament", *map(str, arguments)])
        assert result.exit_code != 0
        return " ".join(str(result.exception or result.output).split())

    assert "--most 2 found, expected at least 3 (--seeds)" in said(
        "benchmarks/digits", "--most", 2, "--out", tmp_path / "x"
    )
    wrong = {
        "fedavg,nosuch": "method 'nosuch'",
        "fedavg+nosuch": "add-on 'nosuch'",
        "centralised": "centralised is a reference",
        "a,": "'a'",
    }
    for names, text in wrong.items():  # before anything is trained or written
        assert text in said("benchmarks/digits", "--methods", names, "--out", tmp_path / "x")
    assert not (tmp_path / "x").exists()
    save(plan("fedavg"), tmp_path)
    text = said("benchmarks/digits", "training.rounds=2", "training.epochs=1", "--out", tmp_path)
    assert "was begun with another recipe; they differ in training.epochs, training.rounds." in text
    (tmp_path / "tournament.yaml").write_text("name: 3")
    assert "tournament.yaml, name: " in said(tmp_path)
    assert "the tournament has begun" in said(tmp_path, "training.rounds=2")


def test_the_same_command_goes_on_and_more_seeds_tries_and_methods_are_added(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    played: list[Tournament] = []

    def play(tournament: Tournament, folder: Path, *more: Any) -> Standings:
        save(tournament, folder)
        played.append(tournament)
        return Standings(Table("t", ("method",), ()), Records(("method",), ()), 2, True)

    monkeypatch.setattr(experiment, "play", play)
    first = ["study", "tournament", "benchmarks/digits", "--methods", "fedavg", "--most", "4", "--out", str(tmp_path)]
    more = ["--methods", "fedprox", "--methods", "moon"]
    again = ["study", "tournament", str(tmp_path), "--tries", "5", "--most", "6", *more]
    for arguments in (first, first, again, ["study", "tournament", str(tmp_path)]):
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, result.output
    kept = [(one.methods, one.tries, one.least, one.most) for one in played]
    assert kept == [(("fedavg",), 8, 3, 4)] * 2 + [(("fedavg", "fedprox", "moon"), 5, 3, 6)] * 2
    older = {key: value for key, value in played[0].recipe.items() if key not in ("runtime", "privacy")}
    save(played[0].model_copy(update={"recipe": older}), tmp_path)  # by a version that knew fewer keys
    assert CliRunner().invoke(app, first).exit_code == 0
    assert played[-1] == played[0]


@pytest.mark.slow
def test_a_tournament_is_played_resumed_and_joined(tmp_path: Path) -> None:
    small = ("training.rounds=2", "training.epochs=1", "partition.clients_per_task=1")
    first = [
        "tournament",
        "benchmarks/digits",
        *small,
        "--methods",
        "fedavg",
        "--tries",
        "2",
        "--seeds",
        "2",
        "--most",
        "2",
    ]
    result = CliRunner().invoke(app, [*first, "--out", str(tmp_path / "t"), "-q"])
    assert result.exit_code == 0, result.output
    before = (tmp_path / "t" / "standings.csv").read_text()
    assert {line.partition(",")[0] for line in before.splitlines()[1:]} >= {
        "local",
        "fedavg",
        "centralised",
        "constant",
    }
    again = CliRunner().invoke(app, ["study", "tournament", str(tmp_path / "t"), "-q"])
    assert again.exit_code == 0, again.output
    assert (tmp_path / "t" / "standings.csv").read_text() == before
    joined = CliRunner().invoke(app, ["study", "tournament", str(tmp_path / "t"), "--methods", "fedprox", "-q"])
    assert joined.exit_code == 0, joined.output
    assert "fedprox" in (tmp_path / "t" / "standings.csv").read_text()
