"""The progress of runs, from their files alone, and a server that shows it to one user. Free of torch.

The server answers only requests with its token, which is in the address that it prints and in the links of its pages,
because other users of the machine can reach its port, too. (A cookie would be sent to all ports of the machine.)
A request whose Host or Origin is another one is refused, so that no site can reach it through a name that leads here.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import islice
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
    total,
)
from fedloom.study import report
from fedloom.study.charts import thinned
from fedloom.study.report import page, words

HOST = "127.0.0.1"
MOST = 500
"""Runs in the list, at most."""
_RECENT = 10  # rounds that tell how long one takes
_EVENTS = 5  # the last ones that are shown
_BLOCKS = "▁▂▃▄▅▆▇█"
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
    task: str
    about: str
    """Its metric as pages write it: 'RMSE in metres, lower is better'."""
    loss: float | None
    """Mean training loss over the clients that took part in the last round."""
    value: float | None
    """Mean primary metric over clients; nan where one of them has none."""
    best: float | None
    """The best value on validation data; None where there are none."""
    best_round: int | None
    split: str
    series: Mapping[int, float]
    """Round -> value, of all rounds in which it was measured."""

    def sparkline(self, most: int = 24) -> str:
        """Return one block per round, from the least to the largest value, for at most `most` rounds; blank for nan."""
        values = [self.series[r] for r in thinned(sorted(self.series), most)]
        known = [v for v in values if math.isfinite(v)]
        if not known:
            return ""
        low, step = min(known), (max(known) - min(known)) / (len(_BLOCKS) - 1) or 1.0
        return "".join(_BLOCKS[round((v - low) / step)] if math.isfinite(v) else " " for v in values)


@dataclass(frozen=True)
class Now:
    """The progress of a run."""

    title: str
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
    found = _read(folder, _stamp(folder))
    return found if found.quiet is None else replace(found, quiet=max(0.0, time.time() - _changed(folder)))


@lru_cache(maxsize=MOST)
def _read(folder: Path, stamp: tuple[tuple[int, float], ...]) -> Now:
    run = Run.read(folder)
    done = [line for line in run.rounds if line["round"] > 0]
    asked = run.recipe.get("training", {}).get("rounds")
    times = [_seconds(line) for line in done[-_RECENT:]]
    each = median(times) if times else None
    open_ = not run.is_finished and asked is not None and each is not None
    total = run.bytes_total()
    trained = {name: number_of(value) for name, value in ((done and done[-1].get("seconds_of")) or {}).items()}
    events = [
        f"round {line['round']}: {event['event']}{described({k: v for k, v in event.items() if k != 'event'})}"
        for line in done
        for event in line.get("events", ())
    ]
    return Now(
        f"{run.recipe['name']}: {run.label}, seed {run.seed}",
        str(run.info["status"]),
        run.last_round,
        None if asked is None else int(asked),
        len(run.info["clients"]),
        len(done[-1]["cohort"]) if done else 0,
        tuple(_task(run, name, about) for name, about in run.info["tasks"].items()),
        total["up"],
        total["down"],
        each,
        each * max(0, int(asked) - run.last_round) if open_ and each is not None and asked is not None else None,
        None if run.is_finished else 0.0,
        tuple(events[-_EVENTS:]),
        max(trained.items(), key=lambda item: item[1]) if len(trained) > 1 else None,
    )


def _seconds(line: Mapping[str, Any]) -> float:
    """Return the seconds of a round: the sum of its phases, without sums over clients and parts of phases."""
    phases = (line.get("seconds") or {}).items()
    return total(number_of(s) for phase, s in phases if "sum over" not in phase and phase != "diagnostics")


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
    split = next((s for s in ("val", "test") if run.history(s)), "test")
    series = {
        final.round: final.values[name][metric] for final in run.history(split) if metric in final.values.get(name, {})
    }
    best = best_round(series, direction) if split == "val" else None  # test data choose nothing
    return TaskNow(
        str(TaskMetric(name, metric, direction)),
        name,
        words.axis(metric, direction),
        mean_of([number_of(loss) for loss in losses]) if losses else None,
        list(series.values())[-1] if series else None,
        None if best is None else series[best],
        best,
        split,
        series,
    )


def runs(root: Path) -> dict[str, Path]:
    """Return the runs below a folder by their path in it; none that lies elsewhere."""
    root = root.resolve()
    found = islice((file.parent for file in sorted(root.rglob("run.json"))), MOST)
    return {str(path.relative_to(root)): path for path in found if path.resolve().is_relative_to(root)}


def index(root: Path, token: str) -> str:
    """Return the page of all runs below a folder, those that changed last first, with links that carry the token."""
    rows: list[tuple[str, Now | str]] = []
    for name, path in sorted(runs(root).items(), key=lambda item: _changed(item[1]), reverse=True):
        try:
            rows.append((name, now(path)))
        except UserError as error:
            rows.append((name, str(error)))
    return page.filled("watch", title=f"Runs in {root}", rows=rows, token=token, number=words.number)


@lru_cache(maxsize=1)  # pages are large
def _report(folder: Path, stamp: tuple[tuple[int, float], ...]) -> str:
    return report.render(report.collect(folder))


class Server(ThreadingHTTPServer):
    """A server of a folder on the loopback address, for requests with its token; port 0 takes a free one.

    Raises UserError where the folder is none, or the port is taken.
    """

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
        """Answer with the list at /, and with the page of a run at /run?at=NAME; both need &token=TOKEN."""
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
                return self._answer(HTTPStatus.OK, index(root, token), Refresh="5")
            if asked.path == "/run":
                name = "".join(query.get("at", []))
                if (path := runs(root).get(name)) is None:
                    raise StateError(f"{name}: no run of this name in {root}")
                return self._answer(HTTPStatus.OK, _report(path, _stamp(path)))
        except UserError as error:
            return self._answer(HTTPStatus.NOT_FOUND, str(error), "text/plain")
        return self._answer(HTTPStatus.NOT_FOUND, "There is no such page.", "text/plain")

    def _answer(self, status: HTTPStatus, text: str, kind: str = "text/html", **more: str) -> None:
        body = text.encode()
        self.send_response(status)
        for name, value in {**_HEADERS, "Content-Type": f"{kind}; charset=utf-8", **more}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        with suppress(BrokenPipeError, ConnectionResetError):
            self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Log nothing."""
