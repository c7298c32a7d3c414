"""Messages as Flower's records, and back; and the keys that sign hellos. A received message is not trusted.

One RecordDict each way: `payload` (ArrayRecord) has the tensors, `meta` (ConfigRecord) their names and owner, and
`metrics` (MetricRecord) numbers. Arrays are read without pickle, and only after their sizes are checked.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedloom._version import __version__
from fedloom.core.errors import UserError, naming
from fedloom.core.lazy import need
from fedloom.core.untrusted import plain, shown
from fedloom.data.prepare import npy_header
from fedloom.federation.runs.checkpoint import join_tree, split_tree

FORMAT = 4
_STYPE = "numpy.ndarray"
_KINDS = "fiub"  # no objects, no texts


VERSIONS = f"fedloom {__version__}, torch {torch.__version__.partition('+')[0]}"
"""The versions on this machine that results may depend on, as hellos state them."""


class RefusedError(ValueError):
    """A message that cannot be used; the text says why."""


class FailedError(RefusedError):
    """No answer, for a reason that may pass: asking again may help."""


@contextmanager
def reading() -> Iterator[None]:
    """Turn every error inside into a RefusedError: a bad message spoils its own answer and nothing else."""
    try:
        yield
    except RefusedError:
        raise
    except Exception as error:
        text = str(error) if type(error) is ValueError else f"cannot be read: {type(error).__name__}: {error}"
        raise RefusedError(plain(text, 500)) from None


def encode(tree: Any, head: Mapping[str, Any], numbers: Mapping[str, float] | None = None) -> Any:
    """Return a RecordDict; a tensor that is twice in the tree is sent once, and bfloat16 is sent as its bits."""
    flwr = need("flwr.app", "flower")
    skeleton, tensors = split_tree(tree, once=True)
    bits = [name for name, tensor in tensors.items() if tensor.dtype == torch.bfloat16]
    arrays = {name: flwr.Array(_numpy(tensor)) for name, tensor in tensors.items()}
    meta = {"format": FORMAT, **head, "tree": json.dumps(skeleton), "bfloat16": bits}
    records = {"payload": flwr.ArrayRecord(arrays), "meta": flwr.ConfigRecord(meta)}
    return flwr.RecordDict({**records, "metrics": flwr.MetricRecord(dict(numbers or {}))})


def head_of(content: Any) -> dict[str, Any]:
    """Return the plain values of a message. Raises RefusedError for a message of another kind or format."""
    if set(content) != {"payload", "meta", "metrics"}:
        raise RefusedError(
            f"expected the records meta, metrics, payload, found {plain(', '.join(content), 200) or 'none'}"
        )
    head = dict(content["meta"])
    if head.get("format") != FORMAT:
        raise RefusedError(
            f"format: expected {FORMAT}, found {shown(head.get('format'))}; install the same version of fedloom on "
            "all machines"
        )
    return head


def expect(head: Mapping[str, Any], **fields: Any) -> None:
    """Raise RefusedError if a field of a message differs from what is expected."""
    for name, value in fields.items():
        if head.get(name) != value:
            raise RefusedError(f"{name}: expected {value!r}, found {shown(head.get(name))}")


def numbers_of(content: Any) -> dict[str, float]:
    """Return the numbers of a message, without lists."""
    return {name: value for name, value in content["metrics"].items() if isinstance(value, int | float)}


def said(words: Any, who: str = "its node says") -> str:
    """Mark words as those of somebody else: one line in quotation marks."""
    quoted = plain(str(words), 500).replace('"', "'")
    return f'{who} "{quoted}"'


def size_of(content: Any) -> int:
    """Return the bytes of a message, of its arrays, texts and numbers, before any of it is read."""
    fields = (field for record in content.values() for field in record.items())
    return sum(len(name) + (len(value.data) if hasattr(value, "data") else _weight(value)) for name, value in fields)


def _weight(value: Any) -> int:
    if isinstance(value, str | bytes):
        return len(value)
    return sum(map(_weight, value)) if isinstance(value, list) else 8


def decode(content: Any) -> Any:
    """Return the tree of a message. Raises RefusedError if it is damaged."""
    head = head_of(content)
    with reading():
        tensors = {name: _tensor(name, array) for name, array in content["payload"].items()}
        for name in head["bfloat16"]:
            tensors[name] = tensors[name].view(torch.bfloat16)
        return join_tree(json.loads(head["tree"]), tensors)


def checksum_of(tree: Any) -> str:
    """Return 32 hexadecimal digits over a tree of tensors and plain values: equal for equal content."""
    skeleton, tensors = split_tree(tree)
    digest = hashlib.sha256(json.dumps(skeleton, sort_keys=True).encode())
    for name, tensor in tensors.items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(_numpy(tensor).tobytes())
    return digest.hexdigest()[:32]


def _numpy(tensor: Tensor) -> np.ndarray[Any, Any]:
    """Return a tensor's values; bfloat16, which numpy lacks, as its bits."""
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def _tensor(name: str, array: Any) -> Tensor:
    """Read one array; nothing is allocated before its header agrees with the bytes in the message."""
    if array.stype != _STYPE:
        raise RefusedError(f"array {shown(name)}: expected {_STYPE}, found {shown(array.stype)}")
    file = io.BytesIO(array.data)
    try:
        shape, order, dtype = npy_header(file, len(array.data))
    except Exception as error:  # whatever numpy's parser meets
        raise RefusedError(f"array {shown(name)} cannot be read: {plain(str(error), 200)}") from None
    if dtype.kind not in _KINDS:
        raise RefusedError(f"array {shown(name)}: {plain(str(dtype), 200)} found, expected numbers")
    values = np.frombuffer(array.data, dtype, offset=file.tell()).copy()
    return torch.from_numpy(values.reshape(shape, order=order))


_KEY = "key"  # the file in a node's home with the key by which it is recognised


def public_key(home: Path) -> str:
    """Return the public half of a node's key, as 64 hexadecimal digits; draw the key if there is none yet."""
    return str(_private(home).public_key().public_bytes_raw().hex())


def signed(home: Path, nonce: str, client: str) -> dict[str, str]:
    """Return the fields of a hello that show that the node has its key."""
    return {"key": public_key(home), "signature": _private(home).sign(_text(nonce, client)).hex()}


def key_of(head: Mapping[str, Any], nonce: str, client: str) -> str:
    """Return the public key that a hello was signed with. Raises RefusedError for another signature.

    A client's name belongs to the key that showed it first, or that the recipe lists (`runtime.flower.keys`). Flower's
    own authentication says which machines may take part, and this which of them is which client.
    """
    ed25519 = need("cryptography.hazmat.primitives.asymmetric.ed25519", "flower")
    key = str(head.get("key"))
    try:
        known = ed25519.Ed25519PublicKey.from_public_bytes(bytes.fromhex(key))
        known.verify(bytes.fromhex(str(head.get("signature"))), _text(nonce, client))
    except Exception:
        raise RefusedError(
            f"client {client!r}: the signature of its first message does not fit its key, {shown(key)}"
        ) from None
    return known.public_bytes_raw().hex()


def _text(nonce: str, client: str) -> bytes:
    return f"fedloom hello\n{nonce}\n{client}".encode()


def _private(home: Path) -> Any:
    ed25519 = need("cryptography.hazmat.primitives.asymmetric.ed25519", "flower")
    path = home / _KEY
    if not path.is_file():
        home.mkdir(parents=True, exist_ok=True)
        drawn = home / f"{_KEY}.{os.getpid()}"
        with naming(drawn), os.fdopen(os.open(drawn, os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:
            file.write(ed25519.Ed25519PrivateKey.generate().private_bytes_raw().hex())
        with contextlib.suppress(FileExistsError):  # of two processes at once, one gives the key
            os.link(drawn, path)
        drawn.unlink()
    try:
        return ed25519.Ed25519PrivateKey.from_private_bytes(bytes.fromhex(path.read_text()))
    except ValueError as error:
        raise UserError(
            f"{path}: not a key of this node ({error}); restore the file, or delete it to get a new key"
        ) from None
