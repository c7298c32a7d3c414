"""The files of a deployment, and a deployment on one machine.

An app of Flower comes from a recipe (`new`), and start kits for a server and its sites from sites.yaml (`provision`):
keys, certificates, terms, and one command to start each. `deployment` starts kits on one machine, and stops them.
"""

from __future__ import annotations

import contextlib
import hashlib
import ipaddress
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
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
from fedloom.core.settings.yaml import checked, to_yaml
from fedloom.data.digits import digits
from fedloom.data.prepare import alike
from fedloom.engines.flower import QUIET
from fedloom.engines.flower.check import RECIPE, SUM
from fedloom.engines.flower.nodes import NodeConfig
from fedloom.engines.flower.relay import refuse
from fedloom.engines.flower.wire import public_key
from fedloom.engines.result import Result
from fedloom.federation.recipes.loader import dump, load, read
from fedloom.federation.runs.recorded import json_of

x509, ec = need("cryptography.x509", "flower"), need("cryptography.hazmat.primitives.asymmetric.ec", "flower")
hashes, serialization = (
    need(f"cryptography.hazmat.primitives.{name}", "flower") for name in ("hashes", "serialization")
)

_TERMS = {"code": "none", "changes": []}  # a site's terms where sites.yaml has none


class Sites(Section):
    """The content of sites.yaml: the sites of a deployment."""

    recipe: str
    """A packaged recipe, or a file beside sites.yaml."""
    address: Annotated[
        str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9.-]*$", description="a host name or IPv4 address, without a port")
    ]
    """The server's name or IPv4 address, as the sites reach it."""
    port: Annotated[int, Field(ge=1, le=65535)] = 9092
    sites: Annotated[dict[ClientId, dict[str, Any]], Field(min_length=1)]
    """Site -> its node.yaml without `client`: data, tasks, terms and so on."""


class Authority:
    """A certificate authority that lasts as long as this object: its key is never written."""

    def __init__(self) -> None:
        self.key = ec.generate_private_key(ec.SECP384R1())
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
        builder = builder.not_valid_after(now + timedelta(days=365))
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
        for file, each in (("ca.crt", self.certificate), (f"{name}.pem", signed)):
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


def _filled(name: str, **values: object) -> str:
    """Return the template of this name with its values."""
    template = Path(__file__).with_name("templates") / f"{name}.txt"
    return template.read_text("utf-8").format(**values)


def provision(file: Path, out: Path) -> list[Path]:
    """Write a start kit for the server and one per site; return the folders. Raises UserError for a wrong file."""
    check_empty(out)
    value = read(file, kind="sites", follow=False).value
    admit(names_in(value), Origin.FILE, str(file))
    about = checked(Sites, value, f"{file}: ", between="; ")
    beside = file.parent / about.recipe
    recipe = str(beside) if beside.is_file() else about.recipe
    loaded = load(recipe)
    nodes, changes = _nodes(file, about, recipe, loaded.data.name)
    authority, server = Authority(), out / "server"
    (server / "sites").mkdir(parents=True)
    direct = '"127.0.0.1,${no_proxy:-$NO_PROXY}"'  # a proxy does not lead to this machine itself
    env = {**QUIET, "FLWR_HOME": '"$PWD/flwr"', "NO_PROXY": direct, "no_proxy": direct}
    values = {"env": " ".join(f"{key}={value}" for key, value in env.items())}
    values |= {"address": about.address, "port": str(about.port)}
    keys = {}
    for name, node in nodes.items():
        kit = out / name
        (kit / "home").mkdir(parents=True)
        authority.issue(kit, "own")
        (server / "sites" / f"{name}.pub").write_bytes(private_key(kit / "auth"))
        (kit / "home" / "node.yaml").write_text(to_yaml(node), "utf-8")
        keys[name] = public_key(kit / "home")
        _script(kit / "check.sh", "check.sh", **values)
        (kit / "READ-ME-FIRST.txt").write_text(_filled("kit", site=name, **values), "utf-8")
        _script(kit / "start.sh", "site.sh", site=name, **values)
    listed = ", ".join(f"{name!r}: {key}" for name, key in keys.items())
    changes += [f"runtime.flower.keys={{{listed}}}", f"runtime.flower.nodes={len(keys)}"]
    app = new(server / "app", recipe, changes)
    authority.issue(server, "server", [about.address])
    _script(server / "start.sh", "server.sh", **values)
    text = next(path for path in app if path.name == RECIPE)
    for name in nodes:  # a site checks its data against the text of the recipe before it starts
        shutil.copyfile(text, out / name / RECIPE)
        (out / name / SUM).write_text(f"{hashlib.sha256(text.read_bytes()).hexdigest()}  {RECIPE}\n")
    _script(server / "run.sh", "run.sh", recipe=loaded.name, **values)
    return [server, *(out / name for name in nodes)]


def _nodes(file: Path, about: Sites, recipe: str, source: str) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Return (site -> the value of its node.yaml, changes of the recipe, whose data are the set `source`). Raises
    UserError for what does not fit.

    A site's `data` without a name replaces keys of the recipe's own section, which `fedloom init` wrote for a table of
    all sites; the recipe then becomes one whose data stay at the nodes.
    """
    if taken := [name for name in about.sites if name.casefold() == "server"]:
        raise RecipeError(
            f"{file}: sites: the name {taken[0]!r} is reserved for the server's folder; choose another name"
        )
    for one, other in alike(about.sites):  # where case does not count, their kits would share a folder
        raise RecipeError(
            f"{file}: sites: {one!r} and {other!r} differ in case only, but name a folder each; rename one"
        )
    written = read(recipe).value["data"]
    nodes = {name: {"client": name, "terms": _TERMS, **section} for name, section in about.sites.items()}
    changes: list[str] = []
    for name, node in nodes.items():
        data = node.get("data")
        if source != "nodes" and isinstance(data, dict) and "name" not in data and isinstance(written, dict):
            node["data"] = {key: each for key, each in written.items() if key not in ("path", "site")} | data
            changes = ["data=nodes", "partition=nodes"]
        checked(NodeConfig, node, f"{file}, site {name!r}: ", between="; ")
        if node["client"] != name:  # its key is listed under the site's name
            raise RecipeError(f"{file}, site {name!r}: client: {node['client']!r} found, expected none: it is the site")
    for name, node in nodes.items():
        if "data" in node and source != "nodes" and not changes:
            found = f"data: {source} found, expected data: nodes, for site {name!r} has data"
            raise RecipeError(f"{recipe}: {found}; write data: nodes and partition: nodes in place of these sections")
    return nodes, changes


def _script(path: Path, template: str, **values: str) -> None:
    path.write_text(_filled(template, **values), "utf-8")
    path.chmod(0o755)


_ABOUT = {
    "client_app": "The app of every node: it trains on the node's own data and has the client's state in its folder.",
    "server_app": "The app of the server: rounds, aggregation, checkpoints. It sees payloads and scores, and no data.",
}


def new(folder: Path, recipe: str, changes: Sequence[str] = (), publisher: str = "fedloom") -> list[Path]:
    """Write the app of a recipe into a new folder; returns its files. Raises UserError if the folder is not empty."""
    check_empty(folder)
    checked = load(recipe, [*changes, "runtime.engine=flower"])
    refuse(checked)
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


def free_port() -> int:
    """Return a port that nobody uses now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


class Deployment:
    """The start kits in `folder`/kits, started on this machine; what they print goes to `folder`/logs."""

    def __init__(self, folder: Path) -> None:
        self.kits, self.logs = (folder.resolve() / name for name in ("kits", "logs"))
        self.logs.mkdir(exist_ok=True)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        path = f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"
        self.env = {**os.environ, "PATH": path, "FLWR_HOME": f"{self.kits / 'server' / 'flwr'}", "OMP_NUM_THREADS": "1"}

    def start(self, name: str, *options: object) -> subprocess.Popen[bytes]:
        """Start the kit `name` in a group of processes of its own."""
        with (self.logs / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [str(self.kits / name / "start.sh"), *map(str, options)],
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**self.env, "PORT": str(free_port())},
            )
        return self.processes[name]

    def start_server(self) -> None:
        """Start the server, and wait until it has admitted the sites; its state is in a file, so it may start again."""
        log = self.logs / "server.log"
        before = log.stat().st_size if log.is_file() else 0
        server = self.start("server")
        while b"The server runs" not in log.read_bytes()[before:]:
            if server.poll() is not None:
                raise UserError(f"the SuperLink does not answer; see its log, {log}")
            time.sleep(0.2)

    def run(self, seconds: float) -> Path:
        """Run the recipe to its end, and return the run folder: `flwr run --stream` does not say how a run ended."""
        with (self.logs / "run.log").open("ab") as log, contextlib.suppress(subprocess.TimeoutExpired):
            script = self.kits / "server" / "run.sh"
            subprocess.run([script], stdout=log, stderr=subprocess.STDOUT, env=self.env, timeout=seconds)
        for file in self.kits.glob("server/runs/*/run.json"):
            if json_of(file)["status"] == "finished":
                return file.parent
        raise UserError(f"the run has not finished; see the logs in {self.logs}")

    def stop(self, name: str) -> None:
        """End a process and all that it started."""
        process = self.processes.pop(name)
        for each in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, each)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=15)


@contextlib.contextmanager
def deployment(folder: Path) -> Iterator[Deployment]:
    """Run the server of a folder's kits; all that is started is stopped, also where this process is terminated."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    here = Deployment(folder)
    try:
        here.start_server()
        yield here
    finally:
        for name in reversed(list(here.processes)):
            here.stop(name)


SITES = {"clinic": ("digit",), "lab": ("parity",), "office": ("digit", "large")}


def prepare(out: Path, rounds: int) -> dict[str, Any]:
    """Write a recipe and a third of the digits for each site into a folder; return the value of a sites.yaml there."""
    (out / "data").mkdir(parents=True, exist_ok=True)
    recipe: dict[str, Any] = {"name": "sites", "data": "nodes", "partition": "nodes"}
    recipe |= {"model": "small-cnn", "method": "fedavg", "training": {"rounds": rounds, "epochs": 5}}
    recipe |= {"runtime": {"engine": "flower", "flower": {"min_clients": 2, "deadline": 300}}}
    (out / "recipe.yaml").write_text(to_yaml(recipe))
    dataset = digits(0, tasks=["digit", "parity", "large"])
    sites = {}
    for number, (site, tasks) in enumerate(SITES.items()):
        arrays = {}
        for split, part in (("train", dataset.train), ("test", dataset.test)):
            mine = np.random.default_rng(0).permutation(len(part))[number :: len(SITES)]
            arrays[f"x_{split}"] = part.images.numpy()[mine]  # type: ignore[attr-defined]
            arrays |= {f"{task}_{split}": part.labels_of(task)[mine] for task in tasks}
        file = out / "data" / f"{site}.npz"
        np.savez(file, **arrays)
        labels = {task: f"{task}_{{split}}" for task in tasks}
        sites[site] = {"data": {"name": "arrays", "path": str(file), "labels": labels}}
    return {"recipe": "recipe.yaml", "address": "127.0.0.1", "port": free_port(), "sites": sites}


def demo(out: Path | None, rounds: int, tell: Callable[[str], None]) -> str:
    """Start a server and three sites, return the table and stop all; without `out` the files are deleted."""
    home = Path(tempfile.mkdtemp(prefix="fedloom-flower-")) if out is None else out.resolve()
    try:
        check_empty(home)
        (home / "sites.yaml").write_text(to_yaml(prepare(home, rounds)))
        provision(home / "sites.yaml", home / "kits")
        with deployment(home) as here:
            for site, tasks in SITES.items():
                tell(f"start site {site}: {', '.join(tasks)}")
                here.start(site)
            tell(f"run {rounds} rounds of FedAvg over TLS; logs are in {here.logs}")
            return Result(here.run(600 + 60 * rounds), "finished").table()
    finally:
        if out is None:
            shutil.rmtree(home, ignore_errors=True)
