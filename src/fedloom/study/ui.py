"""A folder of runs in a browser: a list with progress and the page of each, for one user. Free of torch.

It only reads. It answers whoever knows its token, which is in the address that it prints and in the links of its pages,
because other users of the machine can reach its port, too. (A cookie would be sent to all ports of the machine.)
A request whose Host or Origin is another one is refused, so that no site can reach it through a name that leads here.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import islice
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from fedloom.core.errors import StateError, UserError
from fedloom.federation.runs.reader import clock
from fedloom.study import report
from fedloom.study.report import page, words
from fedloom.study.report.drawn import spark
from fedloom.study.watch import Now, TaskNow, now

HOST = "127.0.0.1"
MOST = 500
"""Runs in the list, at most."""
_CLOSED = "This page is for whoever started it: open the address that `fedloom ui` printed, with its token."
_HEADERS = {
    "Cache-Control": "no-cache",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}


@dataclass
class Folder:
    """What is served: the runs below a folder, and their pages as long as their files do not change."""

    root: Path
    _pages: dict[str, tuple[str, str]] = field(default_factory=dict)
    _known: dict[str, tuple[str, Now | str]] = field(default_factory=dict)

    def runs(self) -> dict[str, Path]:
        """Name of a run, its path below the folder -> its folder; none that lies elsewhere."""
        root = self.root.resolve()
        found = islice((file.parent for file in sorted(root.rglob("run.json"))), MOST)
        return {str(path.relative_to(root)): path for path in found if path.resolve().is_relative_to(root)}

    def index(self, token: str) -> str:
        """The list of all runs, those that changed last first, with links that carry the token."""
        rows = [(name, self._now(name, path)) for name, path in sorted(self.runs().items(), key=_changed, reverse=True)]
        spoken = {"spark": _spark, "clock": clock, "number": words.number}
        return page.filled("ui", title=f"Runs in {self.root}", rows=rows, token=token, **spoken)

    def page(self, name: str) -> str:
        """The page of one of the runs. Raises StateError where there is none of this name."""
        path = self.runs().get(name)
        if path is None:
            raise StateError(f"{name}: no run of this name in {self.root}")
        stamp = _stamp(path)
        if self._pages.get(name, ("", ""))[0] != stamp:
            found = report.collect(path)
            self._pages = {name: (stamp, report.render(found, live=True))}  # the last one: pages are large
        return self._pages[name][1]

    def _now(self, name: str, path: Path) -> Now | str:
        """How far a run has come, or what is wrong with its folder."""
        stamp = _stamp(path)
        if self._known.get(name, ("", ""))[0] != stamp:
            try:
                self._known[name] = (stamp, now(path))
            except UserError as error:
                self._known[name] = (stamp, str(error))
        return self._known[name][1]


def _spark(task: TaskNow) -> tuple[str, str]:
    return spark(task.series, {})


class Server(ThreadingHTTPServer):
    """A server of a folder on the loopback address, for whoever has its token."""

    def __init__(self, folder: Folder, port: int) -> None:
        self.folder, self.token = folder, secrets.token_urlsafe(32)
        super().__init__((HOST, port), _Handler)

    @property
    def url(self) -> str:
        """The address of the list, with the token."""
        return f"http://{HOST}:{self.server_port}/?token={self.token}"


def server(folder: Path, port: int) -> Server:
    """A server of a folder on the loopback address, not yet running; port 0 takes a free one.

    Raises UserError where the folder is none, or the port is taken.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder, expected one with runs in it")
    try:
        return Server(Folder(folder), port)
    except OSError as error:
        raise UserError(f"port {port}: {error.strerror}; name another one with --port") from None


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        """The list at /, the page of a run at /run?at=NAME; both with &token=TOKEN."""
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
        token, folder = self.server.token, self.server.folder
        if not secrets.compare_digest("&".join(query.get("token", [])).encode(), token.encode()):
            return self._answer(HTTPStatus.FORBIDDEN, _CLOSED, "text/plain")
        try:
            if asked.path == "/":
                return self._answer(HTTPStatus.OK, folder.index(token))
            if asked.path == "/run":
                return self._answer(HTTPStatus.OK, folder.page("".join(query.get("at", []))))
        except UserError as error:
            return self._answer(HTTPStatus.NOT_FOUND, str(error), "text/plain")
        return self._answer(HTTPStatus.NOT_FOUND, "There is no such page.", "text/plain")

    def _answer(self, status: HTTPStatus, text: str, kind: str = "text/html") -> None:
        body = text.encode()
        tag = f'"{sha256(body).hexdigest()[:16]}"'
        if status == HTTPStatus.OK and self.headers.get("If-None-Match") == tag:
            status, body = HTTPStatus.NOT_MODIFIED, b""
        self.send_response(status)
        for name, value in {**_HEADERS, "Content-Type": f"{kind}; charset=utf-8", "ETag": tag}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        with suppress(BrokenPipeError, ConnectionResetError):
            self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Requests are not worth a line."""


def _files(path: Path) -> Iterator[Path]:
    return (file for name in ("run.json", "metrics.jsonl", "bytes.jsonl") if (file := path / name).is_file())


def _stamp(path: Path) -> str:
    return " ".join(f"{file.stat().st_size}-{file.stat().st_mtime_ns}" for file in _files(path))


def _changed(item: tuple[str, Path]) -> float:
    return max((file.stat().st_mtime for file in _files(item[1])), default=0.0)
