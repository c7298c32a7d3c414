"""What a run says of itself: lines about every tenth of its rounds, bars on a terminal, nothing when quiet."""

from __future__ import annotations

from typing import Any

import pytest

from fedloom.federation.rounds import progress as module
from fedloom.federation.rounds.progress import Bars, Lines, Progress, progress
from fedloom.federation.rounds.rounds import NOTHING, status


@pytest.mark.parametrize(
    ("rounds", "said"),
    [
        (3, [1, 2, 3]),
        (10, [*range(1, 11)]),
        (20, [*range(2, 21, 2)]),
        (25, [3, 5, 8, 10, 13, 15, 18, 20, 23, 25]),
        (100, [*range(10, 101, 10)]),
    ],
)
def test_a_line_comes_about_every_tenth_of_the_rounds(
    rounds: int, said: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    lines = Lines()
    lines.start(rounds, 0)
    for round in range(1, rounds + 1):
        lines.round(round, {"val accuracy": 0.123456})
    err = capsys.readouterr().err.splitlines()
    assert [text.partition("  ")[0] for text in err] == [f"round {round}/{rounds}" for round in said]
    assert all("  val accuracy 0.1235  " in text for text in err)


@pytest.mark.parametrize(
    ("done", "round", "left"),
    [(0, 5, "0:10 spent, 0:10 left"), (4, 5, "0:10 spent, 0:50 left"), (5, 5, "0:10 spent, 0:50 left")],
)
def test_the_time_that_is_left_is_that_of_the_rounds_of_this_run(
    done: int, round: int, left: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = iter([100.0, 110.0])
    monkeypatch.setattr(module.time, "monotonic", lambda: next(now))
    lines = Lines()
    lines.start(10, done)
    lines.round(round, {})
    assert capsys.readouterr().err.strip() == f"round {round}/10  {left}"


def test_bars_on_a_terminal_lines_elsewhere_and_nothing_when_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    for terminal, kind in ((True, Bars), (False, Lines)):
        monkeypatch.setattr(module.sys.stderr, "isatty", lambda terminal=terminal: terminal)
        assert type(progress()) is kind
        assert type(progress(quiet=True)) is Progress


def test_a_warning_is_said_once_and_of_the_run_that_gave_it_first(capsys: pytest.CaptureFixture[str]) -> None:
    report = Progress()
    for run in ("", "a: ", "b: "):
        report.warn("data: copies", run)
    report.warn("runtime.mirror: full", "b: ")
    assert capsys.readouterr().err == "warning: data: copies\nwarning: b: runtime.mirror: full\n"


def test_bars_count_rounds_and_clients_and_print_events_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    bars: Any = Bars()
    bars.start(10, 4)
    bars.client(5, 2, 3)
    bars.round(5, {"val accuracy": 0.5, "training loss": 1.25})
    bars.event("round 5: [bold]client 'c1'[/bold] 12 was dropped")
    bars.warn("slow")
    rounds, clients = bars._bars.tasks
    bars.stop()
    assert (rounds.total, rounds.completed, rounds.fields["numbers"]) == (10, 5, "val accuracy 0.5  training loss 1.25")
    assert (clients.total, clients.completed) == (3, 2)
    err = capsys.readouterr().err
    assert "round 5: [bold]client 'c1'[/bold] 12 was dropped" in err
    assert "warning: slow" in err


@pytest.mark.parametrize(
    ("round", "idle", "vain"), [(0, 0, False), (1, 0, False), (1, 1, True), (3, 2, False), (3, 3, True)]
)
def test_a_run_was_in_vain_if_no_round_of_it_was_used(round: int, idle: int, vain: bool) -> None:
    state = {"round": round, "idle": idle, "early": None, "stopped": False}
    assert status(state) == (NOTHING if vain else "finished")
