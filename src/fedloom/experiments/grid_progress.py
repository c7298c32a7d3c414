"""Progress of a grid while it runs: a bar on a terminal, elsewhere one line per cell."""

from __future__ import annotations

import sys

from fedloom.experiments.grid_run import Watch
from fedloom.federation.runs.reader import clock
from fedloom.study.grid import Cell


def progress(quiet: bool = False) -> Watch:
    """Return a bar where stderr is a terminal, lines where it is not, nothing where `quiet`."""
    if quiet:
        return Watch()
    return Bar() if sys.stderr.isatty() else CellLines()


class _Counting(Watch):
    """Counts cells and rounds, and extrapolates what is left from the rounds run so far."""

    def start(self, cells: int, rounds: int) -> None:
        import time

        self.cells, self.rounds, self.over, self.now = cells, rounds, 0, time.monotonic
        self.running: dict[Cell, int] = {}
        self.done, self.skipped, self.began_at = 0, 0, time.monotonic()

    def began(self, cell: Cell) -> None:
        self.running[cell] = -1

    def round(self, cell: Cell, rounds: int) -> None:
        if self.running[cell] < 0:  # where a resumed run starts: these rounds cost nothing now
            self.skipped += rounds
            self.running[cell] = 0
        self.done += rounds - self.running[cell]
        self.running[cell] = rounds

    def put_off(self, cell: Cell) -> None:
        del self.running[cell]

    def ended(self, cell: Cell, how: str, seconds: float, rounds: int) -> None:
        left = rounds - max(0, self.running.pop(cell))
        self.done, self.skipped = self.done + left, self.skipped + (0 if how == "finished" else left)
        self.over += 1

    @property
    def seconds_left(self) -> float | None:
        """None before a round has been run."""
        run = self.done - self.skipped
        return (self.now() - self.began_at) / run * (self.rounds - self.done) if run > 0 else None


class CellLines(_Counting):
    """A plain line on stderr for each cell that ends."""

    def ended(self, cell: Cell, how: str, seconds: float, rounds: int) -> None:
        super().ended(cell, how, seconds, rounds)
        left = "" if self.seconds_left is None else f", {clock(self.seconds_left)} left"
        self.event(f"[{self.over}/{self.cells}] {cell}: {how}  {clock(seconds)} spent{left}")

    def event(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


class Bar(_Counting):
    """One bar over all rounds of all cells, with the cells that run; events scroll by above it."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            TextColumn("{task.fields[names]}", markup=False),
            console=Console(stderr=True),
        )

    def start(self, cells: int, rounds: int) -> None:
        super().start(cells, rounds)
        self._task = self._bar.add_task("cells", total=rounds, left="", names="")
        self._bar.start()
        self._show()

    def began(self, cell: Cell) -> None:
        super().began(cell)
        self._show()

    def round(self, cell: Cell, rounds: int) -> None:
        super().round(cell, rounds)
        self._show()

    def ended(self, cell: Cell, how: str, seconds: float, rounds: int) -> None:
        super().ended(cell, how, seconds, rounds)
        if not how.startswith(("finished", "stopped")):
            self.event(f"{cell}: {how}")
        self._show()

    def event(self, text: str) -> None:
        self._bar.console.print(text, markup=False, highlight=False)

    def warn(self, text: str) -> None:
        self.event(f"warning: {text}")

    def stop(self) -> None:
        self._bar.stop()

    def _show(self) -> None:
        left = "" if self.seconds_left is None else f"{clock(self.seconds_left)} left"
        names = ", ".join(f"{cell} ({max(0, rounds)})" for cell, rounds in self.running.items())
        self._bar.update(
            self._task, completed=self.done, description=f"cells {self.over}/{self.cells}", left=left, names=names
        )
