"""The progress of runs, from their files alone, and a server that shows it to one user. Free of torch.

Requests need the token in the address that it prints, for other users of the machine can reach the port, and the
server's own Host and Origin, so that no site can reach it through a name that leads here.
"""

from __future__ import annotations

import math
import secrets
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import parse_qs, urlsplit

from fedloom.core.errors import StateError, UserError
from fedloom.federation.runs.reader import (
    Run,
    TaskMetric,
    best_round,
    clock,
    described,
    human_bytes,
    mean_of,
    number_of,
    seconds_of,
)
from fedloom.study import grid, report
from fedloom.study.charts import thinned
from fedloom.study.output import filled, text_of
from fedloom.study.report import words

HOST = "127.0.0.1"
MOST = 500
"""Runs in the table, at most."""
COLUMNS = 8
"""Tasks in the table, at most: those of the most runs."""
RUN, GRID = "run.json", grid.FILE
_RECENT = 10  # rounds that tell how long one takes
_EVENTS = 5  # the last ones that are shown
_BLOCKS, _SPARKS = "▁▂▃▄▅▆▇█", 24
_CLOSED = "This page is for whoever started it: open the address that `fedloom watch` printed, with its token."
_HEADERS = {
    "Cache-Control": "no-cache",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}


@dataclass(frozen=True)
class TaskNow:
    """One task after the last round in which it was measured."""

    name: str
    """As comparisons write it: 'task (metric) ↑'."""
    direction: str
    loss: float | None
    """Mean training loss over the clients that took part in the last round."""
    value: float | None
    """The kept model's mean primary metric over clients, as in the report; nan where one of them has none."""
    best: float | None
    """The best value on validation data; None where there are none."""
    best_round: int | None
    split: str
    """The data of `value` and `series`: test, or val where nothing was measured on test data."""
    series: Mapping[int, float]
    """Round -> value, of all rounds in which it was measured."""

    def sparkline(self) -> str:
        """Return one block per round, from the least to the largest value, for at most `_SPARKS`; blank for nan."""
        values = [self.series[r] for r in thinned(sorted(self.series), _SPARKS)]
        known = [v for v in values if math.isfinite(v)]
        if not known:
            return ""
        low, step = min(known), (max(known) - min(known)) / (len(_BLOCKS) - 1) or 1.0
        return "".join(_BLOCKS[round((v - low) / step)] if math.isfinite(v) else " " for v in values)


@dataclass(frozen=True)
class Now:
    """The progress of a run."""

    title: str
    method: str
    seed: int
    status: str
    round: int
    rounds: int | None
    """The number of rounds that the recipe asks for."""
    clients: int
    cohort: int
    """The number of clients that took part in the last round."""
    tasks: tuple[TaskNow, ...]
    up: int
    down: int
    """Bytes from and to clients so far."""
    seconds: float | None
    """Seconds of a recent round."""
    left: float | None
    """Seconds that are left, about; None where unknown."""
    quiet: float | None
    """Seconds since the last line was written; None of a run that is over."""
    events: tuple[str, ...]
    slow: tuple[str, float] | None
    """The client whose local training took longest in the last round, and its seconds."""

    def facts(self) -> str:
        """Return status, rounds, clients, bytes and time in one line."""
        clients = words.count(self.clients, "client")
        facts = [self.status, f"round {self.round}" + ("" if self.rounds is None else f" of {self.rounds}")]
        facts.append(f"{self.cohort} of {clients} in the last one" if self.round else clients)
        facts.append(f"{human_bytes(self.up)} sent by clients, {human_bytes(self.down)} to them")
        if self.seconds is not None:
            facts.append(f"{self.seconds:.2g} s per round")
        if self.left is not None:
            facts.append(f"{clock(self.left)} left")
        if self.quiet is not None:
            facts.append(f"last written {clock(self.quiet)} ago")
        if self.slow is not None:
            facts.append(f"slowest {self.slow[0]}, {self.slow[1]:.2g} s")
        return " · ".join(facts)


def now(folder: Path) -> Now:
    """Read a run's folder; its files are read again only when they have changed. Raises StateError where it is none."""
    state = _read(folder, _stamp(folder))
    return state if state.quiet is None else replace(state, quiet=max(0.0, time.time() - _changed(folder)))


@lru_cache(maxsize=MOST)
def _read(folder: Path, stamp: tuple[tuple[int, float], ...]) -> Now:
    run = Run.read(folder)
    done = [line for line in run.rounds if line["round"] > 0]
    asked = run.recipe.get("training", {}).get("rounds")
    times = [seconds_of(line) for line in done[-_RECENT:]]
    each = median(times) if times else None
    left = None if run.is_finished or asked is None or each is None else each * max(0, int(asked) - run.last_round)
    total = run.bytes_total()
    trained = {name: number_of(value) for name, value in ((done and done[-1].get("seconds_of")) or {}).items()}
    events = [
        f"round {line['round']}: {event['event']}{described({k: v for k, v in event.items() if k != 'event'})}"
        for line in done
        for event in line.get("events", ())
    ]
    return Now(
        f"{run.recipe['name']}: {run.label}, seed {run.seed}",
        run.label,
        run.seed,
        str(run.info["status"]),
        run.last_round,
        None if asked is None else int(asked),
        len(run.info["clients"]),
        len(done[-1].get("cohort", ())) if done else 0,
        tuple(_task(run, name, about) for name, about in run.info["tasks"].items()),
        total["up"],
        total["down"],
        each,
        left,
        None if run.is_finished else 0.0,
        tuple(events[-_EVENTS:]),
        max(trained.items(), key=lambda item: item[1]) if len(trained) > 1 else None,
    )


def _stamp(folder: Path) -> tuple[tuple[int, float], ...]:
    """Return size and time of change of the files of a run that grow."""
    files = [folder / name for name in ("run.json", "metrics.jsonl", "bytes.jsonl")]
    return tuple((file.stat().st_size, file.stat().st_mtime) for file in files if file.is_file())


def _changed(folder: Path) -> float:
    return max((when for _, when in _stamp(folder)), default=0.0)


def _task(run: Run, name: str, about: Mapping[str, Any]) -> TaskNow:
    metric = about["primary"]
    direction = run.direction(name, metric)
    trained = [line["train"] for line in run.rounds if line.get("train")]
    losses = [e["loss"] for e in trained[-1] if e["task"] == name] if trained else []
    test, val = (run.curves(split)[name] for split in ("test", "val"))
    split, series = ("test", test) if test or not val else ("val", val)
    best = best_round(val, direction)  # test data choose nothing
    return TaskNow(
        str(TaskMetric(name, metric, direction)),
        direction,
        mean_of([number_of(loss) for loss in losses]) if losses else None,
        run.final(split).values.get(name, {}).get(metric) if series else None,
        None if best is None else val[best],
        best,
        split,
        series,
    )


def folders(root: Path, name: str) -> dict[str, Path]:
    """Return the folders below another one that have a file of this name, by their path; none that lies elsewhere."""
    root = root.resolve()
    found = (file.parent for file in sorted(root.rglob(name)))
    return {str(path.relative_to(root)): path for path in found if path.resolve().is_relative_to(root)}


@dataclass(frozen=True)
class Line:
    """A line of the table of runs: a run, or a grid with its runs below it."""

    name: str
    changed: float
    run: Now | None = None
    problem: str = ""
    """Why the run cannot be read."""
    below: tuple[Line, ...] = ()

    @property
    def when(self) -> str:
        """Return the time of the last change."""
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(self.changed))

    @property
    def finished(self) -> int:
        """Return how many runs of a grid are over."""
        return sum(line.run is not None and line.run.quiet is None for line in self.below)

    def score(self, name: str, split: str) -> float | None:
        """Return a task's number by `TaskNow.name` and split, of a grid the best of its runs; None where unknown."""
        each = [line.run for line in (self, *self.below) if line.run is not None]
        tasks = [t for run in each for t in run.tasks if (t.name, t.split) == (name, split) and t.value is not None]
        known = [t.value for t in tasks if t.value is not None and math.isfinite(t.value)]
        return (max if tasks[0].direction == "max" else min)(known) if known else None


def table(root: Path) -> list[Line]:
    """Return the runs and grids below a folder, those that changed last first; at most `MOST` runs."""
    homes = folders(root, GRID)
    several: dict[str, list[Line]] = {}
    for name, path in sorted(folders(root, RUN).items(), key=lambda item: -_changed(item[1]))[:MOST]:
        try:
            line = Line(name, _changed(path), now(path))
        except UserError as error:
            line = Line(name, _changed(path), problem=str(error))
        home = next((n for n, of in homes.items() if path.is_relative_to(of)), None)
        several.setdefault(name if home is None else home, []).append(line)
    return [
        Line(name, lines[0].changed, below=tuple(lines)) if name in homes else lines[0]
        for name, lines in several.items()
    ]


def index(root: Path, token: str) -> str:
    """Return the page of all runs below a folder, with links that carry the token."""
    lines = table(root)
    each = [line for top in lines for line in (top.below or (top,))]
    tasks = Counter((t.name, t.split) for line in each if line.run for t in line.run.tasks if t.series)
    return filled(
        "watch",
        title=f"Runs in {root}",
        lines=lines,
        columns=[column for column, _ in tasks.most_common(COLUMNS)],
        note=f"The {MOST} runs that changed last are shown." if len(each) == MOST else "",
        token=token,
        number=words.number,
        bytes=human_bytes,
        clock=clock,
        script=text_of("watch.js"),
    )


@lru_cache(maxsize=1)  # pages are large
def _report(folder: Path, base: Path | None, stamp: tuple[Any, ...]) -> str:
    return report.render(report.collect(folder, base))


class Server(ThreadingHTTPServer):
    """A server of a folder on the loopback address, for requests with its token. Raises UserError for a taken port."""

    def __init__(self, root: Path, port: int) -> None:
        if not root.is_dir():
            raise UserError(f"{root}: no such folder, expected one with runs in it")
        self.root, self.token = root, secrets.token_urlsafe(32)
        try:
            super().__init__((HOST, port), _Handler)
        except OSError as error:
            raise UserError(f"port {port}: {error.strerror}; name another one with --port") from None

    @property
    def url(self) -> str:
        """Return the address of the list, with the token."""
        return f"http://{HOST}:{self.server_port}/?token={self.token}"


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        """Answer with the table at /, and at /run?at=NAME with the page of a run or grid; both need &token=TOKEN.

        &base=NAME compares a run with another one.
        """
        own = {f"{host}:{self.server.server_port}" for host in (HOST, "localhost")}
        origin = self.headers.get("Origin")
        if self.headers.get("Host") not in own or origin not in (None, *(f"http://{host}" for host in own)):
            return self._answer(HTTPStatus.FORBIDDEN, "This page is for the machine that it runs on.", "text/plain")
        try:
            asked = urlsplit(self.path)
        except ValueError:  # such as //[
            return self._answer(HTTPStatus.FORBIDDEN, _CLOSED, "text/plain")
        if asked.path == "/favicon.ico":  # browsers ask for one, and complain where there is none
            return self._answer(HTTPStatus.NO_CONTENT, "", "image/x-icon")
        query = parse_qs(asked.query)
        root, token = self.server.root, self.server.token
        if not secrets.compare_digest("&".join(query.get("token", [])).encode(), token.encode()):
            return self._answer(HTTPStatus.FORBIDDEN, _CLOSED, "text/plain")
        try:
            if asked.path == "/":
                return self._answer(HTTPStatus.OK, index(root, token))
            if asked.path == "/run":
                known = folders(root, RUN) | folders(root, GRID)
                names = [*query.get("at", [""]), *query.get("base", [])]
                for name in names:
                    if name not in known:
                        raise StateError(f"{name}: no run of this name in {root}")
                path, *base = (known[name] for name in names)
                stamps = [_stamp(each) for each in (*folders(path, RUN).values(), *base)]
                return self._answer(HTTPStatus.OK, _report(path, base[0] if base else None, tuple(stamps)))
        except UserError as error:
            return self._answer(HTTPStatus.NOT_FOUND, str(error), "text/plain")
        return self._answer(HTTPStatus.NOT_FOUND, "There is no such page.", "text/plain")

    def _answer(self, status: HTTPStatus, text: str, kind: str = "text/html") -> None:
        body = text.encode()
        self.send_response(status)
        for name, value in {**_HEADERS, "Content-Type": f"{kind}; charset=utf-8"}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        with suppress(BrokenPipeError, ConnectionResetError):
            self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Log nothing."""
