"""The key by which a node is known again: drawn once, kept in its home, shown in every hello.

A client's name belongs to the key that said it first, or that the recipe lists for it (`runtime.flower.keys`).
Flower's own node authentication says which machines may take part; this says which of them is which client, whatever
ids Flower gives them, and also where Flower's authentication is off.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedloom.core.errors import UserError, naming
from fedloom.core.lazy import need
from fedloom.core.untrusted import shown
from fedloom.engines.flower.wire import RefusedError

_FILE = "key"


def public_key(home: Path) -> str:
    """The public half of a node's key, as 64 hexadecimal digits; the key is drawn if there is none yet."""
    found: bytes = _private(home).public_key().public_bytes_raw()
    return found.hex()


def signed(home: Path, nonce: str, client: str) -> dict[str, str]:
    """What a hello holds to show that the node has its key."""
    key = _private(home)
    return {"key": key.public_key().public_bytes_raw().hex(), "signature": key.sign(_text(nonce, client)).hex()}


def key_of(head: Mapping[str, Any], nonce: str, client: str) -> str:
    """The public key that a hello was signed with. Raises RefusedError where it was not."""
    ed25519 = need("cryptography.hazmat.primitives.asymmetric.ed25519", "flower")
    key = str(head.get("key"))
    try:
        known = ed25519.Ed25519PublicKey.from_public_bytes(bytes.fromhex(key))
        known.verify(bytes.fromhex(str(head.get("signature"))), _text(nonce, client))
    except Exception:
        raise RefusedError(
            f"client {client!r}: the hello is not signed by the key that it shows, {shown(key)}"
        ) from None
    return known.public_bytes_raw().hex()


def _text(nonce: str, client: str) -> bytes:
    return f"fedloom hello\n{nonce}\n{client}".encode()


def _private(home: Path) -> Any:
    ed25519 = need("cryptography.hazmat.primitives.asymmetric.ed25519", "flower")
    path = home / _FILE
    if not path.is_file():
        home.mkdir(parents=True, exist_ok=True)
        drawn = home / f"{_FILE}.{os.getpid()}"
        with naming(drawn), os.fdopen(os.open(drawn, os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:
            file.write(ed25519.Ed25519PrivateKey.generate().private_bytes_raw().hex())
        with contextlib.suppress(FileExistsError):  # of two processes at once, one gives the key
            os.link(drawn, path)
        drawn.unlink()
    try:
        return ed25519.Ed25519PrivateKey.from_private_bytes(bytes.fromhex(path.read_text()))
    except ValueError as error:
        raise UserError(f"{path} is not this node's key ({error}); restore it, or delete it for a new one") from None
