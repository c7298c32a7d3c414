"""Pages name tests that exist: docs/guarantees.md for each promise, docs/threat-model.md for each defence."""

from __future__ import annotations

import re
from itertools import groupby
from pathlib import Path

from fedloom.methods.robust import ATTACKS
from trials.test_adversaries import DEFENDED

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "guarantees.md").read_text(encoding="utf-8")
NAMED = re.findall(r"^- `(\S+)`$", PAGE, re.MULTILINE)
THREATS = (ROOT / "docs" / "threat-model.md").read_text(encoding="utf-8")
TEST = r"`(tests/[\w/]+\.py(?:::\w+)?)`"
EVERYWHERE = {name for page in (ROOT / "docs").rglob("*.md") for name in re.findall(TEST, page.read_text("utf-8"))}


def test_named_tests_exist() -> None:
    named = sorted(EVERYWHERE | {*NAMED})
    for file, names in groupby(named, key=lambda name: name.partition("::")[0]):
        text = (ROOT / file).read_text(encoding="utf-8")
        there = set(re.findall(r"^def (test_\w+)", text, re.MULTILINE))
        assert there
        assert {name.partition("::")[2] for name in names} - {""} <= there, file


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
        for name in re.findall(r"^def (test_\w+)", file.read_text(encoding="utf-8"), re.MULTILINE):
            assert f"tests/trials/{file.name}::{name}" in NAMED


def section(page: str, title: str) -> str:
    return page.split(f"\n## {title}\n")[1].split("\n## ")[0]


def test_every_defence_has_a_test() -> None:
    rows = re.findall(r"^\|(.*)\|(.*)\|(.*)\|$", section(THREATS, "What is defended, with which test"), re.MULTILINE)
    assert len(rows) > 10
    for attack, _, tests in rows[2:]:
        assert all("::" in name for name in re.findall(TEST, tests) or [""]), f"{attack}: expected file.py::test_name"


def test_every_attack_is_tried_by_the_trials_or_said_not_to_be_defended() -> None:
    page = section((ROOT / "docs" / "robust.md").read_text(encoding="utf-8"), "What is not defended").lower()
    tried = {attack.partition(",")[0] for attack in DEFENDED}
    assert tried < set(ATTACKS.names)
    assert all(attack in page for attack in set(ATTACKS.names) - tried)
