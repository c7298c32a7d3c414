"""Checks of a deployment before round 0: versions, sizes, keys, certificates, clocks, ports."""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import ssl
import stat
import tomllib
from base64 import b64encode
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

from fedloom.core.errors import UserError
from fedloom.core.lazy import need
from fedloom.core.untrusted import shown
from fedloom.engines.flower.nodes import NodeConfig, joining
from fedloom.engines.flower.sends import sentences, sizes
from fedloom.engines.flower.terms import Offer, SitePolicy
from fedloom.engines.flower.wire import public_key
from fedloom.federation.recipes.loader import load
from fedloom.federation.rounds.build import build

Finding = tuple[str, bool, str]
SUPPORTED = (1, 30), (2, 0)
"""Supported versions of flwr: from the first, below the second."""
_FAB = 10_000_000  # most bytes of an app that Flower sends to the nodes
_MESSAGE = 2_000_000_000  # most bytes of one message, below the 2 GiB of protobuf
_SKEW = 60.0  # most seconds by which clocks may differ: node authentication signs times
_PATIENCE = 10.0
RECIPE = "recipe.yaml"  # the file that makes a folder a start kit
SUM = "recipe.sha256"  # the file of a kit with the checksum of the recipe.yaml that it came with
_SUFFIXES = {".py", ".toml", ".md", ".yaml", ".yml", ".json", ".jsonl"}


def findings(
    app: Path, superlink: str | None, root_certificates: Path | None, key: Path | None, home: Path | None
) -> Iterator[Finding]:
    """Yield (check, whether it is good, explanation); nothing is sent but a request for the start page.

    `app` is the folder of an app, or a site's start kit, which has the other files, too.
    """
    own = app.absolute().parent / "server.pem"
    if is_kit := (app / RECIPE).is_file():
        key, home, root_certificates = key or app / "auth", home or app / "home", root_certificates or app / "ca.crt"
        own = app / "own.pem"
    yield _guard("versions", _versions)
    yield _guard("app", _app, app)
    if is_kit:
        yield _guard("files", _files, app)
    if own.is_file():  # of a start kit, of a site or of the server
        yield _guard("certificates", _valid, own.with_name("ca.crt"), own)
    yield _guard("sizes", _sizes, app)
    if home is not None:
        told: list[Finding] = []
        yield _guard("node", _node, app, home, told)
        yield from told
    if key is not None:
        yield _guard("key", _key, key)
    if superlink is not None:
        yield from _superlink(superlink, root_certificates)


def _guard(what: str, look: Callable[..., str], *where: Any) -> Finding:
    try:
        return what, True, look(*where)
    except (UserError, OSError, ValueError) as error:
        port = where[1] if len(where) > 1 and isinstance(error, OSError) else None
        address = f"{where[0]}:{port}: " if isinstance(port, int) else ""  # the errors of sockets lack it
        return what, False, f"{address}{error}"


def _versions() -> str:
    try:
        installed = version("flwr")
    except PackageNotFoundError:
        raise UserError("flwr is not installed: pip install 'fedloom[flower]'") from None
    number = tuple(int(part) for part in installed.split(".")[:2])
    low, high = SUPPORTED
    if not low <= number < high:
        raise UserError(f"flwr {installed} found, expected {low[0]}.{low[1]} or later, below {high[0]}.{high[1]}")
    versions = f"flwr {installed}, torch {version('torch')}, fedloom {version('fedloom')}"
    return f"{versions}; install the same versions on all machines"


def _read(app: Path) -> tuple[dict[str, Any], Path]:
    """Return (Flower's section of pyproject.toml, the recipe's path) of an app."""
    file = app / "pyproject.toml"
    if not file.is_file():
        hint = f"; the app is {app / 'app'}" if (app / "app").is_dir() else ""
        raise UserError(f"{file}: not found, expected the file of a Flower app{hint}")
    try:
        flwr: dict[str, Any] = tomllib.loads(file.read_text("utf-8"))["tool"]["flwr"]["app"]
        package = str(flwr["components"]["clientapp"]).split(":")[0].split(".")[0]
    except (OSError, KeyError, TypeError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"{file}: expected the file of a Flower app: {error!r}") from None
    return flwr, app / package / "recipe.yaml"


def _recipe(app: Path) -> Path:
    """Return the recipe of an app, or of a start kit."""
    return kit if (kit := app / RECIPE).is_file() else _read(app)[1]


def _app(app: Path) -> str:
    recipe = _recipe(app)
    about = f"recipe {load(recipe).name}, sha256 {Offer.of(recipe).sha256}"
    if recipe.parent == app:
        return f"{about}, of a start kit"
    flwr, _ = _read(app)
    size = sum(p.stat().st_size for p in app.rglob("*") if p.is_file() and p.suffix in _SUFFIXES)
    if size > _FAB:
        raise UserError(f"the app has {size} bytes of code and settings, expected at most {_FAB} (Flower's limit)")
    for part in ("serverapp", "clientapp"):
        module = str(flwr["components"].get(part, "")).split(":")[0]
        if not (app / (module.replace(".", "/") + ".py")).is_file():
            raise UserError(f"components.{part}: the module {module!r} does not exist")
    return f"{about}, {size} bytes to send"


def _files(kit: Path) -> str:
    """Check what may have become wrong with the files of a start kit since it was made."""
    if not os.access(kit, os.W_OK):
        raise UserError(
            f"{kit.resolve()}: cannot be written, expected a folder for the node's files: copy it to a disk"
        )
    recipe, stated = Offer.of(kit / RECIPE).sha256, kit / SUM
    came = stated.read_text("utf-8")[:64] if stated.is_file() else recipe
    if came != recipe:
        raise UserError(
            f"{kit / RECIPE}: sha256 {recipe} found, expected {shown(came)}, as the kit came. A run's recipe comes "
            "from the server, so a change of this file has no effect: put it back, and write demands into `terms`"
        )
    return "recipe.yaml is as it came"


def _valid(*files: Path) -> str:
    x509, now, last = need("cryptography.x509", "flower"), datetime.now(UTC), datetime.max.replace(tzinfo=UTC)
    for file in files:
        one = x509.load_pem_x509_certificate(file.read_bytes())
        begins, ends = one.not_valid_before_utc, one.not_valid_after_utc
        if not begins <= now < ends:
            raise UserError(
                f"{file}: a certificate from {begins:%Y-%m-%d %H:%M} to {ends:%Y-%m-%d %H:%M} UTC found, expected one "
                f"for {now:%Y-%m-%d %H:%M}: if this machine's clock is right, ask for a new kit"
            )
        last = min(last, ends)
    return f"{' and '.join(file.name for file in files)} are valid until {last:%Y-%m-%d}"


def _sizes(app: Path) -> str:
    from fedloom.engines.plan import plan

    recipe = load(_recipe(app))
    if recipe.data.name == "nodes":
        return "known once nodes have reported what they hold"
    planned = plan(build(recipe))
    most = max(planned.bytes_up, planned.bytes_down) // max(len(planned.clients), 1)
    if most > _MESSAGE:
        raise UserError(f"a message per client has about {most} bytes, expected at most {_MESSAGE}")
    return f"{planned.bytes_up} bytes up and {planned.bytes_down} down per round, for {len(planned.clients)} clients"


def _node(app: Path, home: Path, told: list[Finding]) -> str:
    """Check a node's settings and data against the recipe; `told` receives what a run uses and sends of them."""
    if not home.is_dir():
        raise UserError(f"{home} is not a folder")
    config = NodeConfig.read(home / "node.yaml")
    terms = config.terms or SitePolicy()
    file = _recipe(app)
    terms.agree_to_offer(offer := Offer.of(file))
    recipe, own = load(file), public_key(home)
    data = joining(recipe, config)
    keys = recipe.runtime.flower.keys
    names = [name for name, key in keys.items() if key == own]
    if keys.get(config.client, own) != own or (names and config.client not in names):
        whose = f"lists it for {' and '.join(names)}" if names else "lists another key for this client"
        raise UserError(f"{home}: client {config.client!r} with the key {own} found, but the recipe {whose}")
    if data is None:
        if recipe.data.name == "nodes":
            raise UserError(f"{home / 'node.yaml'}: data: expected a section data, for the recipe has data: nodes")
        terms.agree_to(built := build(recipe), len(built.federation.clients))
        return f"client {config.client!r}, with its share of the recipe's data, key {own}"
    dataset, client, _ = data
    told += [(use, use != "refuses", text) for use, _, text in sentences(recipe, config, *data)]
    if terms.leaves is not None or terms.clients is not None:
        known = "with heads of all sites' tasks, and the number of clients that the server states"
        told.append(("use", True, f"terms.leaves and terms.clients are tried again at each message of a run, {known}"))
    if terms.recipes != (offer.sha256,) or terms.changes:
        pin = f"to refuse any other, write recipes: [{offer.sha256}] and changes: [] under terms in node.yaml"
        told.append(("use", True, f"a run may bring another recipe, for which these lines do not hold; {pin}"))
    found = f"client {config.client!r}, tasks {', '.join(client.tasks)}, {sizes(client)} examples, key {own}"
    return "; note: ".join([found, *dataset.doubts])


def _key(path: Path) -> str:
    serialization = need("cryptography.hazmat.primitives.serialization", "flower")
    ec = need("cryptography.hazmat.primitives.asymmetric.ec", "flower")
    data = path.read_bytes()
    loaded: Any = None
    for read in (serialization.load_ssh_private_key, serialization.load_pem_private_key):
        with contextlib.suppress(Exception):
            loaded = loaded or read(data, password=None)
    if not isinstance(loaded, ec.EllipticCurvePrivateKey):
        raise UserError(
            f"{path}: expected a private elliptic-curve key without a password (ssh-keygen -t ecdsa -b 384)"
        )
    if stat.S_IMODE(path.stat().st_mode) & 0o077:
        raise UserError(f"{path} can be read by others: chmod 600 {path}")
    return f"{path} has the curve {loaded.curve.name}"


def _superlink(address: str, root_certificates: Path | None) -> Iterator[Finding]:
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")  # of an IPv6 address
    if not host or not port.isdigit():
        yield "superlink", False, f"{address!r} found, expected HOST:PORT"
        return
    if root_certificates is None:
        yield _guard("superlink", _connect, host, int(port))
        yield "tls", False, "no --root-certificates: the connection would not be encrypted (--insecure)"
        return
    yield (tls := _guard("tls", _certificate, host, int(port), root_certificates))
    if tls[1]:
        yield _guard("clock", _clock, host, int(port), root_certificates)


def _connect(host: str, port: int) -> str:
    with socket.create_connection((host, port), timeout=_PATIENCE):
        return f"{host}:{port} answers"


def _linked(host: str, port: int, root: Path) -> tuple[http.client.HTTPSConnection, str]:
    """Return a connection to a server, and in words the proxy that it passes, as Flower's connection would."""
    proxies, context = getproxies(), ssl.create_default_context(cafile=str(root))
    address = proxies.get("https") or proxies.get("all")
    if not address or proxy_bypass(host):
        link, way = http.client.HTTPSConnection(host, port, timeout=_PATIENCE, context=context), ""
    else:
        proxy = urlsplit(address if "//" in address else f"//{address}")
        way = f", through the proxy {proxy.hostname}:{proxy.port or 80} that this machine's environment names"
        link = http.client.HTTPSConnection(str(proxy.hostname), proxy.port or 80, timeout=_PATIENCE, context=context)
        login = b64encode(unquote(proxy.netloc.rpartition("@")[0]).encode()).decode()
        link.set_tunnel(host, port, {"Proxy-Authorization": f"Basic {login}"} if login else None)
    try:
        link.connect()
    except ssl.SSLCertVerificationError:
        raise
    except OSError as error:
        hint = (
            "add the server's address to NO_PROXY, or ask whoever runs the proxy" if way else "is the server started?"
        )
        raise UserError(f"{host}:{port} cannot be reached{way}: {error}; {hint}") from None
    return link, way


def _certificate(host: str, port: int, root: Path) -> str:
    try:
        link, way = _linked(host, port, root)
    except ssl.SSLCertVerificationError as error:
        found = f"{host}:{port}: its certificate does not fit {root} ({error.verify_message})"
        is_late = error.verify_code in (9, 10)  # not yet valid, or no longer
        hint = (
            "is this machine's clock right?" if is_late else "are this machine's files those of the newest deployment?"
        )
        raise UserError(f"{found}; {hint}") from None
    with contextlib.closing(link):
        certificate: Any = link.sock.getpeercert()
    ends = datetime.fromtimestamp(ssl.cert_time_to_seconds(str(certificate["notAfter"])), UTC)
    days = (ends - datetime.now(UTC)).days
    if days < 1:
        raise UserError(f"{host}:{port}: its certificate expires on {ends:%Y-%m-%d}")
    return f"{host}:{port} shows a certificate of {root} for this address, good for {days} days{way}"


def _clock(host: str, port: int, root: Path) -> str:
    """Compare clocks by the Date header of an HTTP answer; Flower's servers before 1.40 speak gRPC, without one."""
    stated = None
    with contextlib.closing(_linked(host, port, root)[0]) as link, contextlib.suppress(http.client.HTTPException):
        link.request("GET", "/")
        stated = link.getresponse().getheader("Date")
    if stated is None:
        return "the server does not state its time"
    skew = (datetime.now(UTC) - parsedate_to_datetime(stated)).total_seconds()
    if abs(skew) > _SKEW:
        raise UserError(
            f"this machine's clock differs by {skew:+.0f} s from the server's, expected at most {_SKEW:.0f} s"
        )
    return f"{skew:+.1f} s from the server's, which states whole seconds"
