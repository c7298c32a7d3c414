"""`fedloom flower keep`: a run whose server dies is started again, and one that cannot go on is given up."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedloom.cli.app import app
from fedloom.engines.flower import keep
from fedloom.errors import UserError

FLWR = """#!{python}
import json, sys
from pathlib import Path
here = Path({here!r})
lines = json.loads((here / "script.json").read_text())
(here / "calls").open("a").write(json.dumps(sys.argv[1:]) + "\\n")
step = lines.pop(0)
(here / "script.json").write_text(json.dumps(lines))
expected, answer, effect = step
assert sys.argv[1] == expected, (sys.argv[1], expected)
if effect:
    folder = here / "run"
    folder.mkdir(exist_ok=True)
    for name, text in effect.items():
        (folder / name).write_text(text)
print(json.dumps(answer) if answer else "no connection")
sys.exit(0 if answer else 1)
"""
STARTED, RUNNING = {"success": True, "run-id": 7}, {"success": True, "runs": [{"status": "running"}]}
DIED = {"success": True, "runs": [{"status": "finished:failed", "status-details": "No heartbeat received"}]}
Step = tuple[str, dict[str, Any] | None, dict[str, str] | None]


def rounds(count: int) -> dict[str, str]:
    return {"metrics.jsonl": "{}\n" * (count + 1), "run.json": json.dumps({"status": "running"})}


ENDED = {"run.json": json.dumps({"status": "finished", "rounds": 3})}


@pytest.fixture
def flwr(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A command flwr that follows a script; pauses take no time."""
    file = tmp_path / "bin" / "flwr"
    file.parent.mkdir()
    file.write_text(FLWR.format(python=sys.executable, here=str(tmp_path)))
    file.chmod(0o755)
    monkeypatch.setattr(keep.sys, "executable", str(file.with_name("python")))
    monkeypatch.setattr(keep.time, "sleep", lambda seconds: None)
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "pyproject.toml").write_text("")
    return tmp_path


def kept(here: Path, *script: Step) -> Any:
    (here / "script.json").write_text(json.dumps(script))
    arguments = ["flower", "keep", str(here / "app"), "tls", "--out", str(here / "run"), "--changes", "seed=1"]
    result = CliRunner().invoke(app, arguments)
    assert json.loads((here / "script.json").read_text()) == []
    return result


def test_a_server_that_died_is_started_again(flwr: Path) -> None:
    result = kept(
        flwr,
        ("run", STARTED, None),
        ("list", RUNNING, rounds(1)),
        ("list", None, None),  # the SuperLink is away
        ("list", DIED, None),
        ("run", None, None),
        ("run", STARTED, None),
        ("list", RUNNING, ENDED),
    )
    assert result.exit_code == 0, result.output
    assert "finished after 3 rounds" in result.output
    assert "No heartbeat received" in result.output
    calls = [json.loads(line) for line in (flwr / "calls").read_text().splitlines()]
    assert calls[0][4] == f"folder='{flwr / 'run'}' changes='seed=1'"
    assert not (flwr / "run.flwr").exists()


def test_begun_anew_it_watches_the_run_that_goes_on(flwr: Path) -> None:
    (flwr / "run.flwr").write_text("7")
    assert kept(flwr, ("list", RUNNING, rounds(1)), ("list", RUNNING, ENDED)).exit_code == 0


def test_a_run_that_ends_while_flower_is_asked_is_not_started_again(flwr: Path) -> None:
    completed = {"success": True, "runs": [{"status": "finished:completed"}]}
    assert kept(flwr, ("run", STARTED, None), ("list", completed, ENDED)).exit_code == 0


def test_a_run_that_is_finished_is_left_alone(flwr: Path) -> None:
    (flwr / "run").mkdir()
    (flwr / "run" / "run.json").write_text(ENDED["run.json"])
    assert kept(flwr).exit_code == 0


def test_a_run_that_never_gets_on_is_given_up(flwr: Path) -> None:
    one: tuple[Step, ...] = (("run", STARTED, None), ("list", DIED, None))
    result = kept(flwr, *one * 5)
    assert isinstance(result.exception, UserError)
    assert "5 runs in a row ended without a new round" in str(result.exception)
    assert "No heartbeat received" in str(result.exception)


def test_a_run_that_somebody_stopped_stays_so(flwr: Path) -> None:
    stopped = {"success": True, "runs": [{"status": "finished:stopped"}]}
    assert isinstance(kept(flwr, ("run", STARTED, None), ("list", stopped, None)).exception, UserError)
