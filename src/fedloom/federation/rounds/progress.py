"""The reports of a run, or of a grid, on itself: bars on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, TypeVar

from fedloom.core import errors
from fedloom.federation.runs.reader import clock

Shown = TypeVar("Shown")


class Silent:
    """A report that says nothing but warnings, which all others build on."""

    def event(self, text: str) -> None:
        """Note something that a person should see."""

    @cached_property
    def warned(self) -> set[str]:
        """The warnings that were printed: those on the data are the same for all runs of a grid or a comparison."""
        return set()

    def warn(self, text: str, of: str = "") -> None:
        """Print, once, what the user must know, however quiet they want the run; `of` says before it of which run."""
        if text not in self.warned:
            self.warned.add(text)
            self._warn(of + text)

    def _warn(self, text: str) -> None:
        errors.warn(text)

    def stop(self) -> None:
        """End."""


class Printed(Silent):
    """Events are lines on stderr."""

    def event(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


class Drawn(Silent):
    """Events scroll by above bars, which have a description and these columns of rich."""

    def __init__(self, *columns: Any) -> None:
        from rich import progress as rich
        from rich.console import Console

        described = rich.TextColumn("{task.description}"), rich.BarColumn()
        self._bars = rich.Progress(*described, *columns, console=Console(stderr=True))

    def event(self, text: str) -> None:
        self._bars.console.print(text, markup=False, highlight=False)

    def _warn(self, text: str) -> None:
        self.event(f"warning: {text}")

    def stop(self) -> None:
        self._bars.stop()


def suited(quiet: bool, silent: Callable[[], Shown], bars: Callable[[], Shown], lines: Callable[[], Shown]) -> Shown:
    """Return bars if stderr is a terminal, lines if it is not, no reports at all if `quiet`."""
    return silent() if quiet else bars() if sys.stderr.isatty() else lines()


class Progress(Silent):
    """Receives what happens in a run. This one is silent.

    `numbers` of a round are what `measure.headline` returns: 'val accuracy' -> the mean, and the like.
    """

    def start(self, rounds: int, done: int) -> None:
        """Begin with a run of so many rounds, of which some are done."""

    def round(self, round: int, numbers: Mapping[str, float]) -> None:
        """Note that a round has ended."""

    def client(self, round: int, done: int, of: int) -> None:
        """Note that so many clients of a round have trained."""


def progress(quiet: bool = False) -> Progress:
    """Return what suits stderr."""
    return suited(quiet, Progress, Bars, Lines)


def shown() -> Progress:
    """Return bars on a terminal and in a notebook; elsewhere silence, as suits a library."""
    from rich.console import Console

    return Bars() if sys.stderr.isatty() or Console().is_jupyter else Progress()


class Lines(Printed, Progress):
    """A plain line on stderr about every tenth of the rounds, and one for each event."""

    def start(self, rounds: int, done: int) -> None:
        self._rounds, self._done, self._began = rounds, done, time.monotonic()

    def round(self, round: int, numbers: Mapping[str, float]) -> None:
        if round * 10 // self._rounds == (round - 1) * 10 // self._rounds:
            return
        spent = time.monotonic() - self._began
        left = spent / max(1, round - self._done) * (self._rounds - round)
        times = f"{clock(spent)} spent, {clock(left)} left"
        self.event("  ".join([f"round {round}/{self._rounds}", *_texts(numbers), times]))


class Bars(Drawn, Progress):
    """One bar for the rounds and one for the clients of the round."""

    def __init__(self) -> None:
        from rich import progress as rich

        times = rich.MofNCompleteColumn(), rich.TimeElapsedColumn(), rich.TimeRemainingColumn()
        super().__init__(*times, rich.TextColumn("{task.fields[numbers]}", markup=False))

    def start(self, rounds: int, done: int) -> None:
        self._round_bar = self._bars.add_task("rounds", total=rounds, completed=done, numbers="")
        self._client_bar = self._bars.add_task("clients", total=None, numbers="")
        self._bars.start()

    def client(self, round: int, done: int, of: int) -> None:
        self._bars.update(self._client_bar, completed=done, total=of)

    def round(self, round: int, numbers: Mapping[str, float]) -> None:
        self._bars.update(self._round_bar, completed=round, numbers="  ".join(_texts(numbers)))


def _texts(numbers: Mapping[str, float]) -> list[str]:
    return [f"{name} {value:.4g}" for name, value in numbers.items()]
