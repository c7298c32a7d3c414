"""The files of a deployment, and a deployment on one machine.

An app of Flower comes from a recipe (`new`), and start kits for a server and its sites from sites.yaml (`provision`):
keys, certificates, terms, and one command to start each. On one machine a SuperLink and SuperNodes run on loopback with
TLS and a key for each node (`deployment`). Everything lies in one folder, and everything that is started is stopped.
"""

from __future__ import annotations

import contextlib
import hashlib
import ipaddress
import json
import os
import re
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
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from fedloom._version import __version__
from fedloom.core.errors import RecipeError, UserError, check_empty, naming
from fedloom.core.lazy import need
from fedloom.core.settings.section import ClientId, Section
from fedloom.core.settings.trust import Origin, admit, names_in
from fedloom.core.settings.yaml import to_yaml
from fedloom.data.digits import digits
from fedloom.engines.flower import QUIET
from fedloom.engines.flower.nodes import NodeConfig, checked
from fedloom.engines.flower.wire import public_key
from fedloom.engines.result import Result
from fedloom.federation.recipes.loader import dump, load, read

x509, ec = need("cryptography.x509", "flower"), need("cryptography.hazmat.primitives.asymmetric.ec", "flower")
hashes, serialization = (
    need(f"cryptography.hazmat.primitives.{name}", "flower") for name in ("hashes", "serialization")
)

AUTH, CA = "auth", "ca.crt"
_TERMS = {"code": "none", "changes": []}
"""A site's terms where sites.yaml has none."""


class Sites(Section):
    """The content of sites.yaml: the sites of a deployment."""

    recipe: str
    """A packaged recipe, or a file beside sites.yaml."""
    address: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9.-]*$")]
    """The server's name or IPv4 address, as the sites reach it."""
    port: Annotated[int, Field(ge=1, le=65535)] = 9092
    sites: Annotated[dict[ClientId, dict[str, Any]], Field(min_length=1)]
    """Site -> its node.yaml without `client`: data, tasks, terms and so on."""


class Authority:
    """A certificate authority that lasts as long as this object: its key is never written."""

    def __init__(self, days: int = 365) -> None:
        self.days, self.key = days, ec.generate_private_key(ec.SECP384R1())
        others = "content_commitment key_encipherment data_encipherment key_agreement encipher_only decipher_only"
        usage = x509.KeyUsage(
            digital_signature=True, key_cert_sign=True, crl_sign=True, **dict.fromkeys(others.split(), False)
        )
        builder = self._start("fedloom", self.key).add_extension(x509.BasicConstraints(True, 0), critical=True)
        self.certificate = builder.add_extension(usage, critical=True).sign(self.key, hashes.SHA256())

    def _start(self, subject: str, key: Any) -> Any:
        named, issuer = (
            x509.Name([x509.NameAttribute(x509.oid.NameOID.COMMON_NAME, text)]) for text in (subject, "fedloom")
        )
        now = datetime.now(UTC)
        builder = x509.CertificateBuilder().subject_name(named).issuer_name(issuer).public_key(key.public_key())
        builder = builder.serial_number(x509.random_serial_number()).not_valid_before(now - timedelta(minutes=5))
        builder = builder.not_valid_after(now + timedelta(days=self.days))
        return builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)

    def issue(self, folder: Path, name: str, addresses: Sequence[str] = ()) -> None:
        """Write ca.crt, NAME.pem and NAME.key: a certificate for addresses and for this machine itself."""
        key = ec.generate_private_key(ec.SECP384R1())
        names = []
        for address in dict.fromkeys((*addresses, "127.0.0.1", "localhost")):
            try:
                names.append(x509.IPAddress(ipaddress.ip_address(address)))
            except ValueError:
                names.append(x509.DNSName(address))
        builder = self._start(f"fedloom {name}", key).add_extension(x509.SubjectAlternativeName(names), critical=False)
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key())
        builder = builder.add_extension(x509.BasicConstraints(False, None), critical=True)
        signed = builder.add_extension(issuer, critical=False).sign(self.key, hashes.SHA256())
        for file, each in ((CA, self.certificate), (f"{name}.pem", signed)):
            (folder / file).write_bytes(each.public_bytes(serialization.Encoding.PEM))
        form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        _secret(folder / f"{name}.key", key.private_bytes(*form))


def private_key(path: Path) -> bytes:
    """Write a new key of a node in the form of ssh-keygen, and its public half beside it, which is returned."""
    key = ec.generate_private_key(ec.SECP384R1())
    form = serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    _secret(path, key.private_bytes(*form))
    public: bytes = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    path.with_suffix(".pub").write_bytes(public)
    return public


def _secret(path: Path, content: bytes) -> None:
    """Write a file that only its owner can read."""
    with naming(path), os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)


def superlink(port: int | str, host: str = "127.0.0.1") -> list[str]:
    """Return the command that starts a server in its folder."""
    tls = ["--ssl-ca-certfile", CA, "--ssl-certfile", "server.pem", "--ssl-keyfile", "server.key"]
    state = ["--enable-supernode-auth", "--database", "superlink.db", "--disable-runtime-dependency-installation"]
    return ["flower-superlink", "--host", host, "--port", str(port), *tls, *state]


def supernode(server: str, port: int | str) -> list[str]:
    """Return the command that starts a node in its folder, but for its `--node-config`."""
    tls = ["--ssl-ca-certfile", CA, "--ssl-certfile", "own.pem", "--ssl-keyfile", "own.key"]
    own = ["--auth-supernode-private-key", AUTH, "--host", "127.0.0.1", "--port", str(port), *tls]
    return ["flower-supernode", "--superlink", server, "--root-certificates", CA, *own]


def connection(folder: Path, port: int) -> None:
    """Write the folder that Flower's own commands on the server's machine read (FLWR_HOME)."""
    (folder / "flwr").mkdir(parents=True, exist_ok=True)
    text = _filled("config.toml", port=port, root=folder.resolve() / CA)
    (folder / "flwr" / "config.toml").write_text(text)


def _filled(name: str, **values: object) -> str:
    """Return the template of this name with its values."""
    template = Path(__file__).with_name("templates") / f"{name}.txt"
    return template.read_text("utf-8").format(**values)


def provision(file: Path, out: Path) -> list[Path]:
    """Write a folder with a start kit for the server and one per site; return these folders.

    Raises UserError for a file that is wrong, and where `out` is not empty.
    """
    check_empty(out)
    value = read(file, kind="sites", follow=False).value
    admit(names_in(value), Origin.TYPED, str(file))
    about = checked(Sites, value, f"{file}")
    nodes = {name: {"client": name, "terms": _TERMS, **section} for name, section in about.sites.items()}
    if "server" in nodes:
        raise RecipeError(f"{file}: sites: the name 'server' is reserved for the server's folder; choose another name")
    for name, node in nodes.items():
        checked(NodeConfig, node, f"{file}, site {name!r}")
    beside = file.parent / about.recipe
    recipe = str(beside) if beside.is_file() else about.recipe
    load(recipe)  # what is wrong with it is said before anything is written
    authority, server = Authority(), out / "server"
    (server / "sites").mkdir(parents=True)
    env = " ".join(f"{key}={value}" for key, value in QUIET.items())
    keys = {}
    for name, node in nodes.items():
        kit = out / name
        (kit / "home").mkdir(parents=True)
        authority.issue(kit, "own")
        (server / "sites" / f"{name}.pub").write_bytes(private_key(kit / AUTH))
        (kit / "home" / "node.yaml").write_text(to_yaml(node), "utf-8")
        keys[name] = public_key(kit / "home")
        command = shlex.join(supernode(f"{about.address}:{about.port}", "PORT")).replace("PORT", '"${PORT:-9100}"')
        start = _filled(
            "start.sh", about=f"Start the node of {name}; Ctrl-C stops it. Nothing listens outside.", env=env
        )
        _script(kit / "start.sh", f'{start}exec {command} --node-config "home=\\"$PWD/home\\""\n')
    listed = ", ".join(f"{name!r}: {key}" for name, key in keys.items())
    app = new(server / "app", recipe, [f"runtime.flower.keys={{{listed}}}", f"runtime.flower.nodes={len(keys)}"])
    authority.issue(server, "server", [about.address])
    connection(server, about.port)
    start = _filled("start.sh", about="Start the server (a SuperLink) and admit the sites; Ctrl-C stops it.", env=env)
    _script(server / "start.sh", start + _filled("server.sh", command=shlex.join(superlink(about.port, "0.0.0.0"))))
    start = _filled("start.sh", about="Run the recipe over the sites; run it again after a crash to continue.", env=env)
    name = load(next(path for path in app if path.name == "recipe.yaml")).name
    _script(server / "run.sh", f"{start}exec flwr run app tls --stream --run-config \"folder='$PWD/runs/{name}'\"\n")
    return [server, *(out / name for name in nodes)]


def _script(path: Path, text: str) -> None:
    path.write_text(text, "utf-8")
    path.chmod(0o755)


_ABOUT = {
    "client_app": "The app of every node: it trains on the node's own data and has the client's state in its folder.",
    "server_app": "The app of the server: rounds, aggregation, checkpoints. It sees payloads and scores, and no data.",
}


def new(folder: Path, recipe: str, changes: Sequence[str] = (), publisher: str = "fedloom") -> list[Path]:
    """Write the app of a recipe into a new folder; returns its files. Raises UserError if the folder is not empty."""
    check_empty(folder)
    checked = load(recipe, [*changes, "runtime.engine=flower"])
    if checked.training.stacked:
        raise RecipeError("training.stacked: each node trains one client, so clients cannot be stacked")
    package = re.sub(r"\W", "_", folder.resolve().name.lower())
    package = package if package.isidentifier() else f"app_{package}"
    text = dump(checked)
    names = {
        "digest": hashlib.sha256(text.encode()).hexdigest(),
        "project": package.replace("_", "-"),
        "package": package,
        "recipe": checked.name,
        "publisher": publisher,
        "version": __version__,
        "folder": f"runs/{checked.name}",
    }
    texts = {
        "pyproject.toml": _filled("pyproject.toml", **names),
        "README.md": _filled("README.md", **names),
        f"{package}/__init__.py": "",
        **{f"{package}/{kind}.py": _filled("app.py", about=about, kind=kind) for kind, about in _ABOUT.items()},
        f"{package}/recipe.yaml": text,
    }
    for name, text in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with naming(path):
            path.write_text(text, encoding="utf-8", newline="\n")
    return [folder / name for name in texts]


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
        self.authority = Authority(30)
        self.authority.issue(self.folder, "server")
        connection(self.folder, self.port)

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
        self.start("superlink", *superlink(self.port))
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
            private_key(kit / AUTH)
            if register:
                self.flwr("supernode", "register", kit / f"{AUTH}.pub", "tls")
        command = supernode(f"127.0.0.1:{self.port}", free_port())
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
