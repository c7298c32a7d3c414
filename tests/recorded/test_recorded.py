"""Every method, add-on and attack, and most settings, compute what they computed when their numbers were written down.

Where a change of the mathematics is intended: `PYTHONPATH=src:tests python -m recorded numbers` (`--only NAME`), and
look at the difference. Other processors, versions of torch and numbers of threads stay well within the room that there
is: initial values that are changed in the last digit, and two threads, use up less than half of it in all runs.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedloom.errors import UserError
from fedloom.methods import ADDONS, METHODS
from fedloom.methods.robust import ATTACKS
from recorded.runs import known_runs, run
from recorded.summary import NUMBERS, differences, summarised, summary

EXPECTED = json.loads(NUMBERS.read_text())


@pytest.mark.parametrize("name", summarised())
def test_it_computes_what_it_did(name: str, tmp_path: Path) -> None:
    try:
        folder = run(name, tmp_path / "run")
    except UserError as error:
        if "not installed" not in str(error):
            raise
        pytest.skip(str(error))  # an extra that is not installed
    different = differences(summary(folder), EXPECTED.get(name, {}))
    assert not different, f"if this is meant: python -m recorded numbers --only {name!r}\n" + "\n".join(different)


def test_everything_that_is_registered_is_run() -> None:
    names = {tuple(name.split("/")) for name in known_runs()}
    for section, registry in (("methods", METHODS), ("addons", ADDONS), ("attacks", ATTACKS)):
        missing = [name for name in registry.entries if (section, name) not in names]
        assert not missing, f"variants.yaml, {section}: add these, then run python -m recorded numbers"


def test_no_numbers_are_left_over() -> None:
    assert list(EXPECTED) == summarised()
