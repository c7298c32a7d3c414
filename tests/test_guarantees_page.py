"""docs/guarantees.md names tests that exist, at least one for each promise."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "guarantees.md").read_text(encoding="utf-8")
NAMED = re.findall(r"^- `(\S+)`$", PAGE, re.MULTILINE)


@pytest.mark.parametrize("name", NAMED)
def test_a_named_test_exists(name: str) -> None:
    file, _, function = name.partition("::")
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert (function or next(n for n in names if n.startswith("test_"))) in names


def test_every_promise_has_a_test() -> None:
    _, *sections = re.split(r"^## .*\n", PAGE, flags=re.MULTILINE)
    for section in sections:
        blocks = [block for block in section.strip().split("\n\n") if block]
        promises, checks = blocks[::2], blocks[1::2]
        assert len(promises) == len(checks) > 0
        assert not any(promise.startswith("-") for promise in promises)
        assert all(line.startswith("- `tests/") for check in checks for line in check.splitlines())


def test_every_trial_checks_a_promise() -> None:
    for file in sorted((ROOT / "tests" / "trials").glob("test_*.py")):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                assert f"tests/trials/{file.name}::{node.name}" in NAMED
