"""`fedloom watch`: how far a run has come, while it goes on or afterwards."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedloom.cli.shared import Json, answer
from fedloom.federation.runs.reader import clock

if TYPE_CHECKING:
    from rich.console import RenderableType

    from fedloom.study.watch import Now


_BLOCKS = "▁▂▃▄▅▆▇█"


def watch(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.")],
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks at the files.")] = 2.0,
    once: Annotated[
        bool, typer.Option("--once", help="Look once only, as is done where the output is not a terminal.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show rounds, tasks, losses, bytes and the time left of a run, from its files; ends with the run, or Ctrl-C."""
    from rich.console import Console
    from rich.live import Live

    from fedloom.study.watch import age, now

    console = Console()
    found = now(run)
    if once or as_json or not console.is_terminal:
        answer(found, as_json, shown(found))
        return
    seen = _size(run)
    try:
        with Live(shown(found), console=console, auto_refresh=False) as live:
            while found.quiet is not None:
                time.sleep(every)
                if (size := _size(run)) != seen:
                    seen, found = size, now(run)
                else:  # a long run's files take a while to read
                    found = replace(found, quiet=age(run))
                live.update(shown(found), refresh=True)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def _size(run: Path) -> tuple[tuple[int, float], ...]:
    files = [run / name for name in ("metrics.jsonl", "bytes.jsonl", "run.json")]
    return tuple((f.stat().st_size, f.stat().st_mtime) for f in files if f.is_file())


def shown(found: Now) -> RenderableType:
    """What is drawn."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    from fedloom.federation.runs.reader import human_bytes

    of = "" if found.rounds is None else f" of {found.rounds}"
    facts = [found.status, f"round {found.round}{of}"]
    facts.append(f"{found.cohort} of {found.clients} clients in the last one" if found.round else _clients(found))
    facts.append(f"{human_bytes(found.up)} sent by clients, {human_bytes(found.down)} to them")
    if found.seconds is not None:
        facts.append(f"{found.seconds:.2g} s a round")
    if found.left is not None:
        facts.append(f"{clock(found.left)} left")
    if found.quiet is not None:
        facts.append(f"last written {clock(found.quiet)} ago")
    if found.slow is not None:
        facts.append(f"slowest {found.slow[0]}, {found.slow[1]:.2g} s")
    table = Table("task", "over the rounds", "training loss", "now", "best", "round", "split", box=SIMPLE_HEAD)
    for task in found.tasks:
        best = "" if task.best_round is None else f"{task.best_round}"
        numbers = map(_number, (task.loss, task.value, task.best))
        table.add_row(*map(Text, (task.name, sparkline(task.series), *numbers, best, task.split)))
    bar = Table.grid()
    if found.rounds is not None:
        bar.add_row(ProgressBar(total=found.rounds, completed=found.round, width=60))
    events = [Text(event, style="dim") for event in found.events]
    return Group(Text(found.title, style="bold"), bar, Text(" · ".join(facts)), table, *events)


def sparkline(series: Mapping[int, float], most: int = 24) -> str:
    """A line of blocks, one a round from the least to the largest number, of at most so many rounds; blank for nan."""
    from fedloom.study.report.looks import thinned

    values = [series[r] for r in thinned(sorted(series), most)]
    known = [v for v in values if math.isfinite(v)]
    if not known:
        return ""
    low, step = min(known), (max(known) - min(known)) / (len(_BLOCKS) - 1) or 1.0
    return "".join(_BLOCKS[round((v - low) / step)] if math.isfinite(v) else " " for v in values)


def _clients(found: Now) -> str:
    from fedloom.study.report.words import count

    return count(found.clients, "client")


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
