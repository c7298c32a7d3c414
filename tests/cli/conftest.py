"""Test what tests of the command line share."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fedloom.cli.app import main


@pytest.fixture
def fedloom_(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Run the command line; returns (exit code, stdout, stderr)."""

    def call(*args: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["fedloom", *map(str, args)])
        with pytest.raises(SystemExit) as done:
            main()
        out, err = capsys.readouterr()
        return int(done.value.code or 0), out, err

    return call


@pytest.fixture
def answers_without_torch(tmp_path: Path):
    """Give a fresh Python these command lines; fails, with the line, at the first that loads torch or the like."""

    def check(*lines: str) -> None:
        code = f"""
import sys
from fedloom.cli import main
for line in {lines!r}:
    sys.argv = ["fedloom", *line.split()]
    try:
        main()
    except SystemExit:
        pass
    heavy = {{"torch", "scipy", "sklearn", "vl_convert"}} & set(sys.modules)
    if heavy:
        sys.exit(f"{{line}}: imported {{heavy}}")
"""
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 0, done.stderr

    return check
