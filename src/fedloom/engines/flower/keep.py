"""A run that is started again until it is finished: what Flower itself does not do after its server has died."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedloom.core.errors import UserError
from fedloom.core.foreign import plain
from fedloom.federation.runs import checkpoint

_WATCH = 5.0
"""Seconds between two looks at a run."""
_PAUSES = 10.0, 300.0
"""Seconds before a run that ended early is started again: at first, and at most."""
_TRIES = 5
"""How many runs in a row may end without a new round."""


def keep(
    app: Path, connection: str, folder: Path, changes: str = "", say: Callable[[str], None] = print
) -> dict[str, Any]:
    """Start an app's run, and start it again whenever it ends early, until run.json says how it ended; returns that.

    Begun anew, it goes on to watch the run that it started before. While the SuperLink does not answer it waits. Raises
    UserError, with Flower's words, where several runs in a row end without a new round, or one was stopped on purpose.
    """
    if not (app / "pyproject.toml").is_file():
        raise UserError(f"{app} is no Flower app: it has no pyproject.toml; `fedloom flower new` writes one")
    note, tries, done, pause = folder.with_name(f"{folder.name}.flwr"), 0, _rounds(folder), _PAUSES[0]
    run = note.read_text().strip() if note.is_file() else ""
    words = "it was not started yet"
    while True:
        try:
            status, details = _status(run, connection) if run else ("none", "")
        except ConnectionError as error:
            say(f"the SuperLink does not answer: {plain(str(error), 300)}")
            time.sleep(_WATCH)
            continue
        if (about := _about(folder)).get("status") not in (None, "running"):
            note.unlink(missing_ok=True)
            return about
        if not status.startswith(("finished", "none")):
            time.sleep(_WATCH)
            continue
        if status == "finished:stopped":
            raise UserError(f"{folder}: run {run} was stopped on purpose; to go on delete {note}")
        if run:
            words, before, done = f"{status} {details}".strip(), done, _rounds(folder)
            tries, pause = (tries + 1, min(2 * pause, _PAUSES[1])) if done == before else (0, _PAUSES[0])
            if tries >= _TRIES:
                raise UserError(f"{folder}: {tries} runs in a row ended without a new round; the last: {words}")
            say(f"run {run} ended early ({words}) after round {done}; it is started again in {pause:g} s")
            time.sleep(pause)
        try:
            settings = f"folder={_quoted(folder.resolve())} changes={_quoted(changes)}"
            told = _flwr("run", app.resolve(), connection, "--run-config", settings, "--format", "json")
            run = str(told["run-id"])
        except ConnectionError as error:
            say(f"the run cannot be started: {plain(str(error), 300)}")
            run = ""
            time.sleep(pause)
            continue
        note.parent.mkdir(parents=True, exist_ok=True)
        checkpoint.write_text(note, run)
        say(f"run {run} is started")


def _quoted(value: object) -> str:
    """A value of Flower's --run-config, which is TOML."""
    text = str(value)
    if "'" in text or not text.isprintable():
        raise UserError(f"{text!r}: expected a text in one line without apostrophes")
    return f"'{text}'"


def _about(folder: Path) -> dict[str, Any]:
    """run.json; {} before there is one."""
    try:
        return dict(json.loads((folder / "run.json").read_text()))
    except (OSError, ValueError):
        return {}


def _rounds(folder: Path) -> int:
    """How many rounds are written down."""
    file = folder / "metrics.jsonl"
    return file.read_bytes().count(b"\n") - 1 if file.is_file() else -1


def _status(run: str, connection: str) -> tuple[str, str]:
    """(status, details) of a run as Flower sees it; "none" where it does not know the run."""
    runs = _flwr("list", "--run-id", run, connection, "--format", "json").get("runs") or [{"status": "none"}]
    return str(runs[0]["status"]), str(runs[0].get("status-details", ""))


def _flwr(*command: object) -> dict[str, Any]:
    """What a flwr command says. Raises ConnectionError where it fails."""
    beside = Path(sys.executable).with_name("flwr")
    flwr = str(beside) if beside.is_file() else shutil.which("flwr")
    if flwr is None:
        raise UserError("the command flwr is not there: pip install 'fedloom[flower]'")
    done = subprocess.run([flwr, *map(str, command)], capture_output=True, text=True)
    try:
        said = dict(json.loads(done.stdout))
    except ValueError:
        said = {"success": False, "error-message": (done.stdout + done.stderr).strip()[-500:]}
    if done.returncode or said.get("success") is False:
        raise ConnectionError(said.get("error-message") or f"flwr {command[0]} ended with code {done.returncode}")
    return said
