"""What tests of the command line share."""

from __future__ import annotations

import sys

import pytest

from fedloom.cli import main


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
