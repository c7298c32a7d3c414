"""Messages: a tree of tensors and plain values as Flower's records, and back. A received message is not trusted.

One RecordDict each way: `payload` (ArrayRecord) has the tensors, `meta` (ConfigRecord) their names and owner, and
`metrics` (MetricRecord) numbers. Arrays are read without pickle, and only after their sizes are checked.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedloom.core.lazy import need
from fedloom.core.untrusted import plain, shown
from fedloom.federation.runs.checkpoint import join_tree, split_tree

FORMAT = 3
_STYPE = "numpy.ndarray"
_KINDS = "fiub"  # no objects, no texts


class RefusedError(ValueError):
    """A message that cannot be used; the text says why."""


class FailedError(RefusedError):
    """No answer, for a reason that may pass: asking again may help."""


@contextmanager
def reading() -> Iterator[None]:
    """Inside, whatever goes wrong is a RefusedError: what a node sends may spoil its own answer and nothing else."""
    try:
        yield
    except RefusedError:
        raise
    except Exception as error:
        text = str(error) if type(error) is ValueError else f"cannot be read: {type(error).__name__}: {error}"
        raise RefusedError(plain(text, 500)) from None


def encode(tree: Any, head: Mapping[str, Any], numbers: Mapping[str, float] | None = None) -> Any:
    """A RecordDict. `head` has texts, numbers and lists of either; a tensor that is twice in the tree is sent once.

    bfloat16, which numpy lacks, is sent as its bits.
    """
    flwr = need("flwr.app", "flower")
    skeleton, tensors = split_tree(tree, once=True)
    bits = [name for name, tensor in tensors.items() if tensor.dtype == torch.bfloat16]
    arrays = {name: flwr.Array(_numpy(tensor)) for name, tensor in tensors.items()}
    meta = {"format": FORMAT, **head, "tree": json.dumps(skeleton), "bfloat16": bits}
    records = {"payload": flwr.ArrayRecord(arrays), "meta": flwr.ConfigRecord(meta)}
    return flwr.RecordDict({**records, "metrics": flwr.MetricRecord(dict(numbers or {}))})


def head_of(content: Any) -> dict[str, Any]:
    """The plain values of a message. Raises RefusedError for a message of another kind or format."""
    if set(content) != {"payload", "meta", "metrics"}:
        raise RefusedError(
            f"expected the records meta, metrics, payload, found {plain(', '.join(content), 200) or 'none'}"
        )
    head = dict(content["meta"])
    if head.get("format") != FORMAT:
        raise RefusedError(
            f"format: expected {FORMAT}, found {shown(head.get('format'))}; is fedloom the same version?"
        )
    return head


def expect(head: Mapping[str, Any], **fields: Any) -> None:
    """Raises RefusedError if a field of a message differs from what is expected."""
    for name, value in fields.items():
        if head.get(name) != value:
            raise RefusedError(f"{name}: expected {value!r}, found {shown(head.get(name))}")


def numbers_of(content: Any) -> dict[str, float]:
    """The numbers of a message; lists are left out."""
    return {name: value for name, value in content["metrics"].items() if isinstance(value, int | float)}


def said(words: Any, who: str = "its node says") -> str:
    """What somebody else says, marked as their own words: one line in quotation marks."""
    quoted = plain(str(words), 500).replace('"', "'")
    return f'{who} "{quoted}"'


def size_of(content: Any) -> int:
    """Bytes of a message, of its arrays, texts and numbers, before any of it is read."""
    size = 0
    for record in content.values():
        for name, value in record.items():
            size += len(name) + (len(value.data) if hasattr(value, "data") else _weight(value))
    return size


def _weight(value: Any) -> int:
    if isinstance(value, str | bytes):
        return len(value)
    return sum(map(_weight, value)) if isinstance(value, list) else 8


def decode(content: Any) -> Any:
    """The tree of a message. Raises RefusedError if it is damaged."""
    head = head_of(content)
    with reading():
        tensors = {name: _tensor(name, array) for name, array in content["payload"].items()}
        for name in head["bfloat16"]:
            tensors[name] = tensors[name].view(torch.bfloat16)
        return join_tree(json.loads(head["tree"]), tensors)


def checksum_of(tree: Any) -> str:
    """32 hexadecimal digits over a tree of tensors and plain values: equal for equal content."""
    skeleton, tensors = split_tree(tree)
    digest = hashlib.sha256(json.dumps(skeleton, sort_keys=True).encode())
    for name, tensor in tensors.items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(_numpy(tensor).tobytes())
    return digest.hexdigest()[:32]


def _numpy(tensor: Tensor) -> np.ndarray[Any, Any]:
    """A tensor's values; bfloat16, which numpy lacks, as its bits."""
    values: np.ndarray[Any, Any] = (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return values


def _tensor(name: str, array: Any) -> Tensor:
    """One array; nothing is allocated before its header agrees with the bytes in the message."""
    if array.stype != _STYPE:
        raise RefusedError(f"array {shown(name)}: expected {_STYPE}, found {shown(array.stype)}")
    file = io.BytesIO(array.data)
    try:
        version = np.lib.format.read_magic(file)
        read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[version]
        shape, fortran, dtype = read(file)
    except Exception as error:  # whatever numpy's parser meets
        raise RefusedError(f"array {shown(name)} cannot be read: {plain(str(error), 200)}") from None
    left = len(array.data) - file.tell()
    if dtype.kind not in _KINDS or math.prod(shape) * dtype.itemsize != left or any(n < 0 for n in shape):
        raise RefusedError(
            f"array {shown(name)}: {plain(f'{dtype} of shape {shape}', 200)} does not fit its {left} bytes"
        )
    values = np.frombuffer(array.data, dtype, offset=file.tell()).copy()
    return torch.from_numpy(values.reshape(shape, order="F" if fortran else "C"))
