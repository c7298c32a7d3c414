"""`fedloom demo` and `doctor`; and what goes wrong outside fedloom is one sentence, what goes wrong inside it a bug."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import fedloom.core.machine
from fedloom.cli import deploy as cli_doctor
from fedloom.cli.app import app, main, message_of
from fedloom.core.updates import Updates
from fedloom.errors import UserError
from fedloom.federation.runs.checkpoint import join_tree
from folders_support import nyud

Fedloom = Callable[..., tuple[int, str, str]]


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (UserError("so it is"), "so it is"),
        (FileNotFoundError(2, "No such file or directory", "/a/b"), "/a/b: No such file or directory"),
        (OSError(28, "No space left on device"), "No space left on device"),
        (OSError(28, "No space left on device", "/from", None, "/to"), "/to: No space left on device"),
        (OSError("odd"), "odd"),
        (MemoryError(), "memory ran out: nothing more is known"),
        (
            RuntimeError("alloc: can't allocate memory: 72 bytes\nmore"),
            "memory ran out: alloc: can't allocate memory: 72 bytes",
        ),
        (KeyError("x"), None),
        (RuntimeError("shapes"), None),
    ],
    ids=repr,
)
def test_what_can_be_mended_is_a_sentence(error: Exception, text: str | None) -> None:
    assert message_of(error) == text


def test_a_bug_shows_its_traceback_and_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("fedloom.cli.app.app", partial(join_tree, {"$tensor": "inner"}, {}))
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    shown = capsys.readouterr().err
    assert "KeyError: 'inner'" in shown
    assert "This is a bug of fedloom" in shown


def test_an_error_does_not_write_to_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["fedloom", "watch", "\x1b]0;title\x07"])
    with pytest.raises(SystemExit):
        main()
    shown = capsys.readouterr().err
    assert r"\x1b]0;title\x07 is not a run folder" in shown
    assert "\x07" not in shown


def test_a_bug_in_code_of_the_users_own_is_not_ours(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where a library that it calls, or fedloom itself, raises the error."""

    def broken() -> None:
        np.concatenate([])

    def short() -> None:
        updates = Updates.of([[1.0, 2.0]])
        updates.reduced(updates.X[0, :1])

    for own, why in ((broken, "need at"), (short, "X: expected shape")):
        monkeypatch.setattr("fedloom.cli.app.app", own)
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 2
        shown = capsys.readouterr().err
        assert "Traceback" in shown
        assert re.search(rf"error: .*test_commands.py, line \d+, which is no part of fedloom: ValueError: {why}", shown)
        assert "This is a bug" not in shown


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("run", "digits-tasks", "training.rounds=1", "--out", "{file}/run"), "Not a directory"),
        (("run", "digits-tasks", "runtime.device=[]"), "runtime.device: no device found"),
        (("show", "digits-tasks", "runtime.threads=99999999"), "of at most 1024"),
    ],
)
def test_on_the_command_line(fedloom_: Fedloom, arguments: tuple[str, ...], text: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, _, err = fedloom_(*(argument.format(file=tmp_path / "file") for argument in arguments))
    assert code == 2
    assert text in err
    assert "Traceback" not in err


@pytest.mark.slow
def test_the_demo_ends_with_a_table_two_sentences_and_a_page(fedloom_: Fedloom, tmp_path: Path) -> None:
    code, out, err = fedloom_("demo", "training.rounds=1", "seeds=[0]", "--out", tmp_path / "demo", "-q")
    assert code == 0, err
    assert out.index("8 of 8 runs are finished") < out.index("centralised") < out.index("FedAvg changes the metrics by")
    assert out.splitlines()[-1] == str(tmp_path / "demo" / "report.html")
    assert "paired tests" not in out
    assert (tmp_path / "demo" / "report.html").stat().st_size > 100_000


@pytest.mark.slow
def test_without_an_extra_the_demo_lacks_only_its_page(
    fedloom_: Fedloom, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for package in ("vl_convert", "sklearn"):
        monkeypatch.setitem(sys.modules, package, None)
    code, out, err = fedloom_("demo", "training.rounds=1", "seeds=[0,1]", "--tests", "--out", tmp_path / "demo", "-q")
    assert code == 0, err
    assert err.startswith(
        "The demo will end without a page, because vl-convert is not installed: pip install 'fedloom[report]'"
    )
    assert "paired tests" in out
    assert not (tmp_path / "demo" / "report.html").exists()


def test_says_what_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0, result.output
    for expected in (torch.__version__, "gloo", "scikit-learn", "free memory"):
        assert expected in result.output
    monkeypatch.setattr(cli_doctor, "rendezvous", lambda: "no socket on 127.0.0.1")
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert "no socket on 127.0.0.1" in result.output


def test_a_loopback_device_that_is_not_there_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cli_doctor.rendezvous() is None
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nothing9")
    assert "GLOO_SOCKET_IFNAME" in (cli_doctor.rendezvous() or "")


def test_extras_are_those_that_the_package_declares(monkeypatch: pytest.MonkeyPatch) -> None:
    required = ["torch>=2", 'good>=1,<2; extra == "a"', 'other; extra == "a"', "more ; extra == 'b'"]
    monkeypatch.setattr(cli_doctor.metadata, "requires", lambda name: required)
    monkeypatch.setattr(cli_doctor, "_version", {"good": "1.5", "more": "2", "other": "absent", "fedloom": "1"}.get)
    assert list(cli_doctor.extras()) == [
        ("fedloom[a]", "absent", "good 1.5, other absent"),
        ("fedloom[b]", "ok", "more 2"),
    ]


def test_no_memory_beyond_the_limit_of_a_container(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {
        "/proc/meminfo": "MemTotal: 9 kB\nMemAvailable:   4096 kB\n",
        "/sys/fs/cgroup/memory.max": "3000000\n",
        "/sys/fs/cgroup/memory.current": "1000000\n",
    }
    monkeypatch.setattr(fedloom.core.machine.Path, "read_text", lambda path, encoding: texts[str(path)])
    assert fedloom.core.machine.free_memory() == 2_000_000
    texts["/sys/fs/cgroup/memory.max"] = "max\n"
    assert fedloom.core.machine.free_memory() == 4096 * 1024


def test_a_folder_that_can_be_used_and_one_that_cannot(tmp_path):
    root = nyud(tmp_path)
    result = CliRunner().invoke(app, ["data", "check", "nyud", "--root", str(root), "--limit", "1"])
    assert result.exit_code == 0, result.output
    assert "train  images       3" in result.output
    assert "note: train: 3 images, the published set has 795" in result.output
    assert result.output.endswith("\nusable\n")
    (root / "gt_sets/val.txt").unlink()
    result = CliRunner().invoke(app, ["data", "check", "nyud", "--root", str(root)])
    assert result.exit_code == 2
    assert "val.txt: cannot be read as a list of images" in result.output
    assert result.output.endswith("\nnot usable\n")
