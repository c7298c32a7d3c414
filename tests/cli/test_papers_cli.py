"""`fedloom papers features`, `relatedness` and `join`."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import fedloom
from fedloom.cli.app import app
from fedloom.errors import StateError
from tests_support import load_recipe, loaded

F2DC = ("method=f2dc", "data.size=8", "model.width=2", "training.rounds=1", "evaluation.splits=[test]")


def test_features(tmp_path: Path) -> None:
    recipe = load_recipe(*F2DC, "data.domains=[plain,inverted]", "partition.clients=1", recipe="f2dc/digits-embedded")
    folder = fedloom.run(recipe, tmp_path / "run").folder
    shown = CliRunner().invoke(app, ["papers", "features", str(folder), "--examples", "8"])
    assert shown.exit_code == 0, shown.output
    assert "8 test examples a domain" in shown.stdout
    assert "f2dc: accuracy in percent" in shown.stdout
    assert "0/4  f2dc: features of plain" in shown.stderr
    assert not list(tmp_path.glob("**/*.png"))


def test_a_folder_that_is_no_run(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["papers", "features", str(tmp_path)])
    assert isinstance(done.exception, StateError)
    with pytest.raises(StateError, match="is not a run folder"):
        raise done.exception


SMALL = (
    "method=matu",
    "model.width=4",
    "model.hidden=8",
    "data.size=8",
    "training.rounds=1",
    "data.tasks=[digit,holes]",
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fedloom.run(load_recipe(*SMALL, "training.rounds=1"), tmp_path_factory.mktemp("tasks") / "run").folder


def test_relatedness(run: Path, fedloom_, tmp_path: Path) -> None:
    code, out, err = fedloom_(
        "study", "relatedness", run, "--metrics", "cosine, logme", "--examples", 16, "--out", tmp_path / "o"
    )
    assert code == 0
    assert "digits-tasks, matu, seed 0: cosine" in out
    assert "sign" not in out
    assert err.splitlines()[:2] == ["0/2  features by the encoder of digit", "1/2  features by the encoder of holes"]
    assert err.splitlines()[2:] == [
        str(tmp_path / "o" / name)
        for name in ("cosine.csv", "logme.csv", "agreement.csv", "relatedness.json", "relatedness.png")
    ]
    code, out, err = fedloom_("study", "relatedness", run, "--metrics", "sign", "--format", "csv", "-q")
    assert (code, err) == (0, "")
    assert len(list(csv.DictReader(io.StringIO(out)))) == 4
    code, out, _ = fedloom_("study", "relatedness", run, "--metrics", "sign", "--json", "-q")
    assert json.loads(out)["tasks"] == ["digit", "holes"]


def test_the_page_of_a_study_needs_no_torch(run: Path, fedloom_, tmp_path: Path) -> None:
    pytest.importorskip("vl_convert")
    code, _, _ = fedloom_("study", "relatedness", run, "--metrics", "sign,cosine", "--out", tmp_path, "-q")
    assert code == 0
    plain = "import fedloom.study.report as r; r.pages.script = lambda: ''"
    assert not loaded(f"{plain}; r.write({str(tmp_path)!r})", "torch", "vl_convert")
    assert "digits-tasks, matu, seed 0: how related its tasks are" in (tmp_path / "report.html").read_text("utf-8")


def test_join(run: Path, fedloom_) -> None:
    code, out, err = fedloom_(
        "papers",
        "join",
        run,
        "--task",
        "parity",
        "--data",
        "data.tasks=[digit,parity,holes]",
        "--steps",
        1,
        "--rounds",
        2,
    )
    assert code == 0
    assert [line.split()[0] for line in out.splitlines() if line[:1].isdigit()] == ["0", "1", "2"]
    assert "mean gain over the rounds: " in out
    assert err.splitlines() == [f"{done}/5  training" for done in range(1, 6)]
    code, _, err = fedloom_("papers", "join", run, "--task", "parity")
    assert code == 2
    assert err.startswith("error: no task 'parity' in the data.")


def test_mistakes(fedloom_, tmp_path: Path) -> None:
    for command in (["study", "relatedness", tmp_path], ["papers", "join", tmp_path, "--task", "t"]):
        code, out, err = fedloom_(*command)
        assert (code, out) == (2, "")
        assert "is not a run folder: recipe.yaml is absent" in err
    assert "--metrics: expected names" in fedloom_("study", "relatedness", tmp_path, "--metrics", ",")[2]
