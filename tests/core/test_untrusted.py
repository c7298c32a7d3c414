"""Values from a node or peer: what is accepted up to the last value, and what is refused from the next one on."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from fedloom.core.untrusted import (
    Array,
    Each,
    Exactly,
    Named,
    Nothing,
    Number,
    OneOf,
    Scalar,
    Sender,
    Text,
    Untrusted,
    plain,
    shown,
)

LARGEST = torch.finfo(torch.float32).max
LONG = "a" * 200


def read(kind: Untrusted, value: Any) -> Any:
    return kind.read(value, Sender(sizes={"k": 3}))


ACCEPTED: list[tuple[Untrusted, list[Any]]] = [
    (Number(), [0, -1.5, LARGEST, -LARGEST]),
    (Number(0, 2), [0, 0.5, 2]),
    (Number(whole=True), [3, 3.0, -2]),
    (Text(), ["", "a é", LONG]),
    (Text(2), ["ab"]),
    (Scalar(), [1.5, "a", LONG]),
    (Exactly(1), [1, 1.0]),
    (Exactly("a"), ["a"]),
    (Exactly(True), [True]),
    (OneOf((1, "a")), [1, "a"]),
    (Array((2,)), [torch.tensor([1.0, 2]), torch.tensor([1.0, 2]).double(), torch.tensor([1.0, 2]).half()]),
    (Array((2,), low=0, high=1), [torch.tensor([0.0, 1])]),
    (Array((2,), torch.int64, low=0, high=1), [torch.tensor([0, 1]), torch.tensor([0, 1], dtype=torch.int32)]),
    (Array((2,), torch.int64, exact=True), [torch.tensor([0, 1])]),
    (Array((2,), torch.bool, low=0, high=0), [torch.tensor([False, True])]),
    (Array((0,), low=0, high=0), [torch.zeros(0)]),
    (Array(("k", 2)), [torch.zeros(3, 2)]),
    (Array(("n", "k")), [torch.zeros(5, 3), torch.zeros(0, 3), torch.zeros(0, 2)]),
    (Array(("n", "m")), [torch.zeros(5, 7), torch.zeros(0, 0)]),
    (Each((Number(), Text())), [[1, "a"]]),
    (Named({"a": Number(), "b": Text()}), [{"a": 1, "b": "c"}]),
    (Named({}), [{}]),
    (Nothing(), [None]),
]
REFUSED: list[tuple[Untrusted, list[Any], str]] = [
    (Number(), [True, "1", None, math.nan, math.inf, -math.inf, 2 * LARGEST], "expected a number from -3.4"),
    (Number(0, 2), [-1e-9, 2 + 1e-9], "expected a number from 0 to 2, found"),
    (Number(whole=True), [1.5], "expected a whole number from"),
    (Text(), [LONG + "a", "a\n", 1, b"a"], "expected a printable text of at most 200 characters"),
    (Scalar(), [LONG + "a"], "expected a printable text"),
    (Scalar(), [math.inf, [1]], "expected a number"),
    (Exactly(1), [2, True, "1"], "expected 1, found"),
    (Exactly(True), [1, False], "expected True, found"),
    (OneOf((1, "a")), [2, "b", True, 1.0], "expected 1 or 'a', found"),
    (Array((2,)), [torch.zeros(3), torch.zeros(2, 1), torch.zeros(2, dtype=torch.int64), [0, 0]], "expected shape"),
    (Array((2,)), [torch.tensor([1.0, math.nan]), torch.tensor([1e300, 0]).double()], "expected finite values"),
    (Array((2,), low=0, high=1), [torch.tensor([-1e-6, 1]), torch.tensor([0, 1 + 1e-6])], "expected values from 0 to"),
    (Array((2,), torch.int64, exact=True), [torch.tensor([0, 1], dtype=torch.int32)], "expected shape"),
    (Array((1,), torch.int64), [torch.tensor([True]), torch.tensor([1j])], "expected shape"),
    (Array(("k", 2)), [torch.zeros(2, 2), torch.zeros(3, 3), torch.zeros(0, 2)], r"expected shape \(3, 2\) of"),
    (Array(("n", "k")), [torch.zeros(0, 4), torch.zeros(5, 2)], "expected shape"),
    (Array(("n", "m")), [torch.zeros(0, 1)], "expected shape"),
    (Array(("n", "n")), [torch.zeros(4, 5)], "expected shape"),
    (Each((Number(), Text())), [[1], [1, "a", 1], (1, "a")], "expected a list of 2, found"),
    (Each((Number(), Text())), [["a", 1]], "expected a number"),
    (Named({"a": Number()}), [{}, {"a": 1, "b": 1}, {"b": 1}], "expected a, found"),
    (Named({"a": Number()}), [{"a": "b"}], "a: expected a number"),
    (Named({"a": Named({"b": Number()})}), [{"a": {"b": "c"}}], "a.b: expected a number"),
    (Named({}), [[]], "expected nothing, found"),
    (Nothing(), [0, ""], "expected nothing, found"),
]


@pytest.mark.parametrize(("kind", "values"), ACCEPTED, ids=[repr(kind) for kind, _ in ACCEPTED])
def test_accepted(kind: Untrusted, values: list[Any]) -> None:
    for value in values:
        found = read(kind, value)
        if isinstance(kind, Array):
            assert found.dtype == kind.dtype
            assert torch.equal(found, value.to(kind.dtype))
        else:
            assert found == value


@pytest.mark.parametrize(
    ("kind", "values", "message"), REFUSED, ids=[f"{kind!r}: {message}" for kind, _, message in REFUSED]
)
def test_refused(kind: Untrusted, values: list[Any], message: str) -> None:
    for value in values:
        with pytest.raises(ValueError, match=f"^{message}"):
            read(kind, value)


def test_an_error_names_20_keys_at_most() -> None:
    with pytest.raises(ValueError, match=r"expected a, found 0, 1, .*, 18, 19$"):
        read(Named({"a": Number()}), dict.fromkeys(range(30)))


def test_a_size_that_is_not_known_is_that_of_the_first_tensor_with_it() -> None:
    sender = Sender()
    Array((2, "n")).read(torch.zeros(2, 5), sender)
    Array(("n",)).read(torch.zeros(5), sender)
    with pytest.raises(ValueError, match=r"expected shape \(5,\)"):
        Array(("n",)).read(torch.zeros(4), sender)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1 << 53, "9007199254740992"),
        (-(1 << 53), "-9007199254740992"),
        ((1 << 53) + 1, "a larger integer"),
        (-(1 << 53) - 1, "a larger integer"),
        (0.5, "0.5"),
        (None, "None"),
        (True, "True"),
        ([1, 2], "a list of 2"),
        ({1: 2}, "a dict of 1"),
        (object(), "a object"),
        ("a\nb", r"'a\nb'"),
        (torch.zeros(2, 3), "shape (2, 3) of torch.float32"),
        ("a" * 300, "'" + "a" * 199 + " ..."),
    ],
)
def test_what_an_error_text_repeats_is_short_and_one_line(value: Any, text: str) -> None:
    assert shown(value) == text


def test_a_plain_text_is_cut_after_so_many_characters() -> None:
    assert plain("abc", 3) == "abc"
    assert plain("abcd", 3) == "abc ..."
    assert plain("a\x1bc", 3) == "a c"
