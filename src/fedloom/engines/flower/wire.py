"""Messages: a tree of tensors and plain values as Flower's records, and back. A received message is not trusted.

One RecordDict each way: `payload` (ArrayRecord) has the tensors, `meta` (ConfigRecord) their names and owner, and
`metrics` (MetricRecord) numbers. Arrays are read without pickle, and only after their sizes are checked.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedloom.extras import need
from fedloom.runs.checkpoint import join_tree, split_tree

FORMAT = 1
_STYPE = "numpy.ndarray"
_KINDS = "fiub"  # no objects, no texts


class RefusedError(ValueError):
    """A message that cannot be used; the text says why."""


def encode(tree: Any, head: Mapping[str, Any], numbers: Mapping[str, float] | None = None) -> Any:
    """A RecordDict. `head` has texts, numbers and lists of either; a tensor that is twice in the tree is sent once.

    bfloat16, which numpy lacks, is sent as its bits.
    """
    flwr = need("flwr.app", "flower")
    skeleton, tensors = split_tree(tree)
    arrays: dict[str, Any] = {}
    first: dict[tuple[Any, ...], str] = {}
    same: dict[str, str] = {}
    bits: list[str] = []
    for name, tensor in tensors.items():
        key = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape))
        if tensor.numel() and first.setdefault(key, name) != name:
            same[name] = first[key]
            continue
        if tensor.dtype == torch.bfloat16:
            bits.append(name)
            tensor = tensor.view(torch.uint16)
        arrays[name] = flwr.Array(tensor.numpy())
    meta = {"format": FORMAT, **head, "tree": json.dumps([skeleton, same]), "bfloat16": bits}
    records = {"payload": flwr.ArrayRecord(arrays), "meta": flwr.ConfigRecord(meta)}
    return flwr.RecordDict({**records, "metrics": flwr.MetricRecord(dict(numbers or {}))})


def head_of(content: Any) -> dict[str, Any]:
    """The plain values of a message. Raises RefusedError for a message of another kind or format."""
    if set(content) != {"payload", "meta", "metrics"}:
        raise RefusedError(f"expected the records meta, metrics, payload, found {', '.join(sorted(content)) or 'none'}")
    head = dict(content["meta"])
    if head.get("format") != FORMAT:
        raise RefusedError(f"format: expected {FORMAT}, found {head.get('format')!r}; is fedloom the same version?")
    return head


def expect(head: Mapping[str, Any], **fields: Any) -> None:
    """Raises RefusedError if a field of a message differs from what is expected."""
    for name, value in fields.items():
        if head.get(name) != value:
            raise RefusedError(f"{name}: expected {value!r}, found {_short(head.get(name))}")


def numbers_of(content: Any) -> dict[str, float]:
    """The numbers of a message; lists are left out."""
    return {name: value for name, value in content["metrics"].items() if isinstance(value, int | float)}


def decode(content: Any, limit: float = math.inf) -> Any:
    """The tree of a message. Raises RefusedError if it is damaged, or larger than `limit` bytes."""
    head = head_of(content)
    record = content["payload"]
    size = sum(len(array.data) for array in record.values()) + len(str(head.get("tree")))
    if size > limit:
        raise RefusedError(f"payload: expected at most {int(limit)} bytes, found {size}")
    tensors = {name: _tensor(name, array) for name, array in record.items()}
    try:
        for name in head["bfloat16"]:
            tensors[name] = tensors[name].view(torch.bfloat16)
        skeleton, same = json.loads(head["tree"])
        return join_tree(skeleton, {**tensors, **{name: tensors[other] for name, other in same.items()}})
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, RecursionError) as error:
        raise RefusedError(f"meta cannot be read: {type(error).__name__}: {_short(error)}") from None


def _tensor(name: str, array: Any) -> Tensor:
    """One array; nothing is allocated before its header agrees with the bytes in the message."""
    if array.stype != _STYPE:
        raise RefusedError(f"array {_short(name)}: expected {_STYPE}, found {_short(array.stype)}")
    file = io.BytesIO(array.data)
    try:
        version = np.lib.format.read_magic(file)
        read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[version]
        shape, fortran, dtype = read(file)
    except (ValueError, KeyError, TypeError, SyntaxError) as error:
        raise RefusedError(f"array {_short(name)} cannot be read: {_short(error)}") from None
    left = len(array.data) - file.tell()
    if dtype.kind not in _KINDS or math.prod(shape) * dtype.itemsize != left or any(n < 0 for n in shape):
        raise RefusedError(
            f"array {_short(name)}: {_short(dtype)} of shape {_short(shape)} does not fit its {left} bytes"
        )
    try:
        values = np.frombuffer(array.data, dtype, offset=file.tell()).copy()
        return torch.from_numpy(values.reshape(shape, order="F" if fortran else "C"))
    except (TypeError, ValueError) as error:
        raise RefusedError(f"array {_short(name)} cannot be read: {_short(error)}") from None


def _short(value: Any) -> str:
    text = str(value) if isinstance(value, Exception) else repr(value)
    return text if len(text) <= 200 else text[:200] + " ..."
