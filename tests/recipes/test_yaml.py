"""YAML as people mean it: the core schema of YAML 1.2, nothing but plain values, and nothing without bounds."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedloom.core.settings.yaml import parse, to_yaml
from fedloom.errors import RecipeError
from fedloom.federation.recipes.loader import load


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("010", 10),
        ("0o17", 15),
        ("0x1f", 31),
        ("+5", 5),
        ("1e-3", 0.001),
        ("-1E+5", -1e5),
        ("1.5e3", 1500.0),
        ("e3", "e3"),
        ("1.", 1.0),
        (".5", 0.5),
        ("-.inf", -math.inf),
        ("true", True),
        ("null", None),
        ("~", None),
        ("", None),
        ("1:30", "1:30"),
        ("off", "off"),
        ("yes", "yes"),
        ("1_000", "1_000"),
        ("0b11", "0b11"),
        ("2024-01-01", "2024-01-01"),
    ],
)
def test_scalars_are_those_of_the_core_schema(text: str, value: Any) -> None:
    found = parse(text, "x")
    assert found == value
    assert type(found) is type(value)


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text("0123456789abx_:.-~eoOfn "), lambda inner: st.lists(inner) | st.dictionaries(st.text("ab", min_size=1), inner), max_leaves=5))  # fmt: skip  # noqa: E501
def test_what_is_written_is_read_again(value: Any) -> None:
    again = parse(to_yaml({"x": value}), "x")["x"]
    assert again == value
    assert repr(again) == repr(value)


TENFOLD = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{b}: &{b} [{', '.join([f'*{a}'] * 10)}]\n" for a, b in zip("abcde", "bcdef", strict=True)
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 900 + "]" * 900, "nested"),
        ("[" * 20_000, "nested more than 100 deep"),
        ("a: &a [*a]", "contains itself"),
        (TENFOLD, "more than 100000 values"),
        ("9" * 5000, "a number of 5000 digits"),
        ("!!binary aGk=: 1", "could not determine a constructor for the tag"),
        ("!!python/object/apply:os.system [true]", "could not determine a constructor for the tag"),
        ("!!int xyz", "invalid literal"),
        ("!!bool maybe", "maybe"),
        ("? [a]\n: 1", "unhashable"),
        ("\x00", "not allowed"),
        ("!!int [1]", "expected a scalar node, but found sequence"),
        ("!!float {a: 1}", "expected a scalar node, but found mapping"),
        ("!!map [a]", "expected a mapping node, but found sequence"),
        ('"a\\e[2J": 1', "x, line 1, column 1: a control character found"),
        ('a: "\\b"', "x, line 1, column 4: a control character found"),
        ("{a: 1, a: 2}", "occurs twice"),
        ("{1: a, '1': b}", "the key '1' occurs twice"),
        ("01: a", "the key 01 found, which is read as 1: put it in quotation marks"),
        ("~: a", "the key ~ found, which is read as null"),
        ("a: " + "b" * 10_000_000, "x: 10,000,003 characters found, expected at most 10,000,000"),
        ("a:\n\tb: 1", "x, line 2, column 1: .*; a tab stands there: indent by spaces"),
    ],
    ids=lambda value: value[:12],
)
def test_what_is_refused_is_said_in_a_sentence_and_soon(text: str, message: str) -> None:
    begun = time.process_time()
    with pytest.raises(RecipeError, match=message):
        parse(text, "x")
    assert time.process_time() - begun < 20


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("training.rounds=1:30", "training.rounds: '1:30' found"),
        ("training.keep_optimizer=off", "training.keep_optimizer: 'off' found"),
        ("tasks.digit.weight=-1", "greater than or equal to 0"),
        ("tasks.digit.weight=.inf", "finite"),
        ("tasks.digit.weight=.nan", "digit.weight"),
    ],
)
def test_in_a_recipe_too(change: str, message: str) -> None:
    from fedloom.federation.rounds.build import build

    assert load("digits-tasks", ["training.rounds=010"]).training.rounds == 10
    with pytest.raises(RecipeError, match=message):
        build(load("digits-tasks", [change]))
