"""The files of a deployment: an app of Flower from a recipe (`new`), and start kits for a server and its sites, from
sites.yaml (`provision`): keys, certificates, terms, and one command to start each. Nothing is downloaded."""

from __future__ import annotations

import hashlib
import ipaddress
import os
import re
import shlex
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from fedloom._version import __version__
from fedloom.core.errors import RecipeError, check_empty, naming
from fedloom.core.lazy import need
from fedloom.core.settings.section import ClientId, Section
from fedloom.core.settings.trust import Origin, admit, names_in
from fedloom.core.settings.yaml import to_yaml
from fedloom.engines.flower import QUIET
from fedloom.engines.flower.nodes import NodeConfig, checked
from fedloom.engines.flower.wire import public_key
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
