"""A deployment on one machine: a SuperLink and SuperNodes on loopback, with TLS and a key for each node.

Everything lies in one folder, Flower's own files too; everything that is started is stopped.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from fedloom.core.errors import UserError
from fedloom.engines.flower import kits

BIN = Path(sys.executable).parent


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


class Deployment:
    """A SuperLink and nodes in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self.keys, self.logs, self.homes = (self.folder / name for name in ("keys", "logs", "nodes"))
        for path in (self.keys, self.logs, self.homes):
            path.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.env = {
            **os.environ,
            **kits.QUIET,
            "PATH": f"{BIN}:{os.environ.get('PATH', '')}",
            "FLWR_HOME": str(self.folder / "flwr"),
            "OMP_NUM_THREADS": "1",
        }
        self.authority = kits.Authority(30)
        self.authority.issue(self.folder, "server")
        kits.connection(self.folder, self.port)

    def start(self, name: str, *command: object, at: Path | None = None) -> None:
        """Start a process in a group of its own, in the folder `at`; its output goes to logs/NAME.log."""
        with (self.logs / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [str(BIN / str(command[0])), *map(str, command[1:])],
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=self.env,
                cwd=at or self.folder,
            )

    def start_superlink(self) -> None:
        """The server's side; its state is in a file, so that it survives a restart."""
        self.start("superlink", *kits.superlink(self.port))
        end = time.monotonic() + 120
        while time.monotonic() < end:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1):
                return
            if self.processes["superlink"].poll() is not None:
                break
            time.sleep(0.2)
        raise UserError(f"the SuperLink does not answer: see {self.logs / 'superlink.log'}")

    def start_node(self, name: str, config: str = "", register: bool = True, options: Sequence[object] = ()) -> None:
        """A node with the key in keys/NAME and the folder nodes/NAME; node.yaml there is `config`."""
        home = self.homes / name
        home.mkdir(exist_ok=True)
        if config:
            (home / "node.yaml").write_text(config)
        kit = self.keys / name
        if not kit.exists():
            kit.mkdir()
            self.authority.issue(kit, "own")
            kits.private_key(kit / kits.AUTH)
            if register:
                self.flwr("supernode", "register", kit / f"{kits.AUTH}.pub", "tls")
        command = kits.supernode(f"127.0.0.1:{self.port}", free_port())
        self.start(name, *command, "--node-config", f'home="{home}"', *options, at=kit)

    def flwr(self, *command: object) -> str:
        """A flwr command; returns what it says."""
        done = subprocess.run(
            [str(BIN / "flwr"), *map(str, command)], env=self.env, cwd=self.folder, capture_output=True, text=True
        )
        if done.returncode:
            raise UserError(f"flwr {shlex.join(map(str, command))}: {done.stdout}{done.stderr}")
        return done.stdout

    def submit(self, app: Path, out: Path, changes: str = "") -> str:
        """Begin a run of an app, or its continuation, with the run folder `out`. Returns Flower's id of the run."""
        settings = f"folder='{out.resolve()}' changes='{changes}'"
        said = self.flwr("run", app.resolve(), "tls", "--run-config", settings, "--format", "json")
        return str(json.loads(said)["run-id"])

    def status(self, run: str) -> tuple[str, str]:
        """(status, details) of a run as Flower sees it."""
        found = json.loads(self.flwr("list", "--run-id", run, "tls", "--format", "json"))["runs"][0]
        return found["status"], found.get("status-details", "")

    def finished(self, run: str, out: Path, seconds: float) -> Mapping[str, object]:
        """Wait for the end of a run; what its run.json says. `flwr run --stream` does not tell how a run ended."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            status, details = self.status(run)
            if status.startswith("finished"):
                if status != "finished:completed":
                    raise UserError(f"{status}: {details}; see `flwr log {run}`")
                return dict(json.loads((out / "run.json").read_text()))
            time.sleep(2)
        raise UserError(f"{out} is not finished after {seconds} s: see {self.logs}")

    def rounds(self, out: Path) -> int:
        """Rounds that are written down."""
        file = out / "metrics.jsonl"
        return len(file.read_text().splitlines()) - 1 if file.is_file() else -1

    def stop(self, name: str, kind: signal.Signals = signal.SIGTERM) -> None:
        """End a process and all that it started."""
        process = self.processes.pop(name)
        for each in (kind, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, each)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=15)
        process.wait()

    def kill_inside(self, name: str, word: str) -> int:
        """Kill, with -9, what NAME started whose command has this word. Returns how many processes that were."""
        killed, above = 0, [self.processes[name].pid]
        while above:
            listed = subprocess.run(
                ["ps", "-o", "pid=,args=", "--ppid", ",".join(map(str, above))], capture_output=True
            )
            below = dict(line.split(None, 1) for line in listed.stdout.decode(errors="replace").splitlines())
            for number in (int(pid) for pid, command in below.items() if word in command):
                os.kill(number, signal.SIGKILL)
                killed += 1
            above = [int(pid) for pid in below]
        return killed

    def close(self) -> None:
        for name in reversed(list(self.processes)):
            self.stop(name)


@contextlib.contextmanager
def deployment(folder: Path) -> Iterator[Deployment]:
    """A running SuperLink; it and all nodes are stopped in the end, also where this process is told to stop."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    here = Deployment(folder)
    try:
        here.start_superlink()
        yield here
    finally:
        here.close()
