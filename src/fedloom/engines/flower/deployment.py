"""A deployment on one machine: a SuperLink and SuperNodes on loopback, with TLS and a key for each node.

Everything lies in one folder, Flower's own files too; everything that is started is stopped.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from fedloom.core.errors import UserError
from fedloom.core.settings.yaml import to_yaml
from fedloom.data.digits import digits
from fedloom.engines.flower import QUIET, kits
from fedloom.engines.flower.kits import new
from fedloom.engines.result import Result

BIN = Path(sys.executable).parent


def free_port() -> int:
    """Return a port that nobody uses now."""
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
            **QUIET,
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
        """Start the SuperLink; its state is in a file, so that it survives a restart."""
        self.start("superlink", *kits.superlink(self.port))
        end = time.monotonic() + 120
        while time.monotonic() < end:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1):
                return
            if self.processes["superlink"].poll() is not None:
                break
            time.sleep(0.2)
        raise UserError(f"the SuperLink does not answer; see its log, {self.logs / 'superlink.log'}")

    def start_node(self, name: str, config: str = "", register: bool = True, options: Sequence[object] = ()) -> None:
        """Start a node with the key in keys/NAME and the folder nodes/NAME; node.yaml there is `config`."""
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
        """Run a flwr command, and return its output."""
        done = subprocess.run(
            [str(BIN / "flwr"), *map(str, command)], env=self.env, cwd=self.folder, capture_output=True, text=True
        )
        if done.returncode:
            raise UserError(f"flwr {shlex.join(map(str, command))}: {done.stdout}{done.stderr}")
        return done.stdout

    def submit(self, app: Path, out: Path, changes: str = "") -> str:
        """Begin a run of an app, or its continuation, with the run folder `out`. Returns Flower's id of the run."""
        settings = f"folder='{out.resolve()}' changes='{changes}'"
        answer = self.flwr("run", app.resolve(), "tls", "--run-config", settings, "--format", "json")
        return str(json.loads(answer)["run-id"])

    def status(self, run: str) -> tuple[str, str]:
        """Return (status, details) of a run as Flower sees it."""
        listed = json.loads(self.flwr("list", "--run-id", run, "tls", "--format", "json"))["runs"][0]
        return listed["status"], listed.get("status-details", "")

    def finished(self, run: str, out: Path, seconds: float) -> Mapping[str, object]:
        """Wait for the end of a run, and return its run.json: `flwr run --stream` does not say how a run ended."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            status, details = self.status(run)
            if status.startswith("finished"):
                if status != "finished:completed":
                    raise UserError(f"{status}: {details}; see `flwr log {run}`")
                return dict(json.loads((out / "run.json").read_text()))
            time.sleep(2)
        raise UserError(f"{out} has not finished after {seconds} s; see the logs in {self.logs}")

    def stop(self, name: str, kind: signal.Signals = signal.SIGTERM) -> None:
        """End a process and all that it started."""
        process = self.processes.pop(name)
        for each in (kind, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, each)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=15)
        process.wait()

    def close(self) -> None:
        """Stop all processes."""
        for name in reversed(list(self.processes)):
            self.stop(name)


@contextlib.contextmanager
def deployment(folder: Path) -> Iterator[Deployment]:
    """Run a SuperLink; it and all nodes are stopped in the end, also where this process is terminated."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    here = Deployment(folder)
    try:
        here.start_superlink()
        yield here
    finally:
        here.close()


SITES = {"clinic": ("digit",), "lab": ("parity",), "office": ("digit", "large")}
_RECIPE = {
    "name": "sites",
    "data": "nodes",
    "partition": "nodes",
    "model": "small-cnn",
    "method": "fedavg",
    "training": {"rounds": 3, "epochs": 5},
    "runtime": {"engine": "flower", "flower": {"nodes": 3, "min_clients": 2, "deadline": 300}},
}


def prepare(out: Path) -> dict[str, str]:
    """Write the app and a third of the digits for each site into a folder; return the text of node.yaml by site."""
    (out / "data").mkdir(parents=True, exist_ok=True)
    (out / "recipe.yaml").write_text(to_yaml(_RECIPE))
    new(out / "sites", str(out / "recipe.yaml"))
    dataset = digits(0, tasks=["digit", "parity", "large"])
    configs = {}
    for number, (site, tasks) in enumerate(SITES.items()):
        arrays = {}
        for split, part in (("train", dataset.train), ("test", dataset.test)):
            mine = np.random.default_rng(0).permutation(len(part))[number :: len(SITES)]
            arrays[f"x_{split}"] = part.images.numpy()[mine]  # type: ignore[attr-defined]
            arrays |= {f"{task}_{split}": part.labels_of(task)[mine] for task in tasks}
        file = out / "data" / f"{site}.npz"
        np.savez(file, **arrays)
        data = {"name": "arrays", "path": str(file), "labels": {task: f"{task}_{{split}}" for task in tasks}}
        configs[site] = to_yaml({"client": site, "data": data})
    return configs


def demo(out: Path | None, rounds: int, tell: Callable[[str], None]) -> str:
    """Run the sites over Flower, with TLS and node keys, and return the table; everything that starts is stopped.

    Without `out` the files are deleted in the end.
    """
    home = Path(tempfile.mkdtemp(prefix="fedloom-flower-")) if out is None else out.resolve()
    try:
        configs = prepare(home)
        with deployment(home) as here:
            for site, config in configs.items():
                tell(f"start site {site}: {', '.join(SITES[site])}")
                here.start_node(site, config)
            tell(f"run {rounds} rounds of FedAvg over TLS; logs are in {here.logs}")
            run = here.submit(home / "sites", home / "run", f"training.rounds={rounds}")
            here.finished(run, home / "run", 600 + 60 * rounds)
        return Result(home / "run", "finished").table()
    finally:
        if out is None:
            shutil.rmtree(home, ignore_errors=True)
