"""Ctrl-C and full disks: no traceback, no half file."""

from __future__ import annotations

import errno
import multiprocessing
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pandas
import pytest
import typer
from torch import ones
from typer.testing import CliRunner

import fedloom.cli.app as cli
from fedloom.cli.shared import interruptible
from fedloom.core.errors import UserError, writing
from fedloom.experiments import compared
from fedloom.experiments.export import bundle

HOOK = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell runs in the background ignores it
class Hook:
    def find_spec(self, name, *others):
        if name == "fedloom.cli.app":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Hook())
from fedloom.cli import main
main()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows sends Ctrl-C to consoles only")
def test_ctrl_c_while_the_app_loads_prints_no_traceback() -> None:
    done = subprocess.run([sys.executable, "-c", HOOK], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (130, "")


@pytest.mark.skipif(sys.platform == "win32", reason="Windows does not fork")
def test_ctrl_c_ends_a_child_that_nobody_has_noted_yet(tmp_path: Path) -> None:
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    child.start()
    with pytest.raises(typer.Exit), interruptible(tmp_path, "go on"):
        raise KeyboardInterrupt
    child.join(timeout=10)
    assert child.exitcode == -signal.SIGTERM


def test_an_interrupted_comparison_says_how_to_continue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(recipe: Any, folder: Path, **others: Any) -> None:
        folder.mkdir(parents=True)
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(compared, "compare", interrupted)
    result = CliRunner().invoke(cli.app, ["compare", "digits-tasks", "--trials", "1"])
    assert result.exit_code == 130
    assert result.stderr == "interrupted; run the same command to continue\n"


def test_a_half_file_is_removed_and_an_untouched_one_stays(tmp_path: Path) -> None:
    file = tmp_path / "p.csv"

    def full() -> None:
        file.write_text("half")
        raise OSError(errno.ENOSPC, "No space left on device")

    def interrupted() -> None:
        pandas.DataFrame({"a": [1, 2]}).to_csv(file)
        raise KeyboardInterrupt

    with pytest.raises(UserError, match=r"p.csv: No space left on device"), writing(file, "csv"):
        full()
    assert not file.exists()
    file.write_text("old")
    with pytest.raises(UserError, match="Permission denied"), writing(file, "csv"):
        raise OSError(errno.EACCES, "Permission denied")
    assert file.read_text() == "old"
    with pytest.raises(KeyboardInterrupt), writing(file, "csv"):
        interrupted()
    assert not file.exists()


@pytest.mark.parametrize("there", [True, False])
def test_an_export_that_fails_leaves_nothing(there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    out = tmp_path / "e"
    if there:
        out.mkdir()
    monkeypatch.setattr(bundle, "sum_of", full)
    with pytest.raises(OSError, match="No space left"):
        bundle.write(out, {"w": ones(3)}, bundle.About.model_construct(), {})
    assert [*tmp_path.rglob("*")] == ([out] if there else [])
