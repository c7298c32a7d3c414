"""Test that messages arrive unchanged, and that malformed ones are refused without executing any of them."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("flwr")

from flwr.app import Array, ArrayRecord, ConfigRecord

from fedloom.engines.flower.wire import RefusedError, decode, encode, head_of, numbers_of
from tests_support import same

TREE = {
    "vector": torch.arange(5, dtype=torch.float32),
    "half": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "mask": torch.tensor([True, False]),
    "bits": torch.tensor([3, 255], dtype=torch.uint8),
    "count": torch.tensor(7),
    "nothing": torch.zeros(0, 3),
    "double": torch.tensor([float("nan"), float("inf")], dtype=torch.float64),
    "part": torch.arange(12.0).view(3, 4).t()[1:],
    "plain": {"a/b": [1, 0.1, None, True, "text"], "empty": {}},
}


def test_a_tree_comes_back_bit_for_bit() -> None:
    content = encode(TREE, {"round": 3, "rows": ["a", "b"]}, {"x": 1.5, "n": 2})
    assert same(decode(content), TREE)
    assert head_of(content)["rows"] == ["a", "b"]
    assert numbers_of(content) == {"x": 1.5, "n": 2}


def test_a_tensor_that_is_there_twice_travels_once() -> None:
    vector = torch.randn(1000)
    tree = {"a": vector, "b": [vector, vector + 0]}
    content = encode(tree, {})
    assert same(decode(content), tree)
    assert sum(len(a.data) for a in content["payload"].values()) < 9000


class Bomb:
    def __reduce__(self) -> Any:
        return pytest.fail, ("something was unpickled",)


def _saved(values: np.ndarray[Any, Any]) -> bytes:
    file = io.BytesIO()
    np.save(file, values, allow_pickle=True)
    return file.getvalue()


def _claims(shape: tuple[int, ...]) -> bytes:
    """The header of a large array, and no data."""
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": shape})
    return file.getvalue()


def _header(text: str) -> bytes:
    """An array whose header is any text."""
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode()


@pytest.mark.parametrize(
    ("array", "why"),
    [
        (Array("object", (1,), "numpy.ndarray", _saved(np.array([Bomb()], dtype=object))), "Python objects"),
        (Array("float32", (1,), "pickle", b"anything"), "expected numpy.ndarray"),
        (Array("float32", (1,), "numpy.ndarray", b"garbage"), "cannot be read"),
        (Array("float32", (1,), "numpy.ndarray", _claims((1 << 40,))), "but 0 bytes follow"),
        (Array("float32", (1,), "numpy.ndarray", _saved(np.zeros(4, np.float32))[:-3]), "but 13 bytes follow"),
        (Array("str", (1,), "numpy.ndarray", _saved(np.array(["text"]))), "found, expected numbers"),
        (Array("float32", (1,), "numpy.ndarray", _saved(np.zeros(4, np.float32))[:40]), "cannot be read"),
        (Array("float32", (1,), "numpy.ndarray", _header("{'descr': '<f4', 'fortran_order': (")), "cannot be read"),
    ],
    ids=["pickle", "other kind", "garbage", "huge claim", "cut", "text", "no end", "open bracket"],
)
def test_bad_arrays_are_refused(array: Any, why: str) -> None:
    content = encode({"x": torch.zeros(1)}, {})
    content["payload"] = ArrayRecord({"0": array})
    with pytest.raises(RefusedError, match=why):
        decode(content)


@pytest.mark.parametrize(
    "changes",
    [
        {"tree": "no json"},
        {"tree": '[{"$tensor": "9"}, {}]'},
        {"tree": "[[[1], 2]"},
        {"tree": '[{"a": 1, "b": 2}, {}]'},
        {"tree": "[" * 100_000 + "]" * 100_000},
        {"bfloat16": ["9"]},
        {"bfloat16": 3},
        {"format": 99},
    ],
)
def test_bad_heads_are_refused(changes: dict[str, Any]) -> None:
    content = encode({"x": torch.zeros(1)}, {})
    content["meta"] = ConfigRecord({**dict(content["meta"]), **changes})
    with pytest.raises(RefusedError):
        decode(content)
    del content["meta"]
    with pytest.raises(RefusedError, match="expected the records"):
        decode(content)
