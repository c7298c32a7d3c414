"""fedloom doctor."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from fedloom.cli import doctor as cli_doctor
from fedloom.cli.app import app


def test_says_what_is_here() -> None:
    import torch

    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0, result.output
    for expected in (torch.__version__, "gloo", "loopback", "two members met", "scikit-learn", "free memory"):
        assert expected in result.output


def test_a_rendezvous_that_fails_is_said_and_is_an_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_doctor, "rendezvous", lambda: "no socket on 127.0.0.1")
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert "no socket on 127.0.0.1" in result.output


def test_extras_are_those_that_the_package_declares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        cli_doctor.metadata,
        "requires",
        lambda name: ["torch>=2", 'good>=1,<2; extra == "a"', 'other; extra == "a"', "more ; extra == 'b'"],
    )
    monkeypatch.setattr(cli_doctor, "_version", {"good": "1.5", "more": "2"}.get)
    assert list(cli_doctor.extras()) == [("a", "absent", "good 1.5, other absent"), ("b", "ok", "more 2")]


def test_no_memory_beyond_the_limit_of_a_container(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {
        "/proc/meminfo": "MemTotal: 9 kB\nMemAvailable:   4096 kB\n",
        "/sys/fs/cgroup/memory.max": "3000000\n",
        "/sys/fs/cgroup/memory.current": "1000000\n",
    }
    monkeypatch.setattr(cli_doctor.Path, "read_text", lambda path, encoding: texts[str(path)])
    assert cli_doctor.free_memory() == 2_000_000
    texts["/sys/fs/cgroup/memory.max"] = "max\n"
    assert cli_doctor.free_memory() == 4096 * 1024
