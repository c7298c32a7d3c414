"""The tool that asks whether tests notice: what it changes, and what it says of a small package."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from mutants.__main__ import AT_IMPORT, Known, equivalents
from mutants.changes import Change, changes

TESTS = Path(__file__).parents[1]

SOURCE = '''\
"""Text with 1 + 1."""
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Annotated

_CHUNK = 1 << 20
cached = lru_cache(maxsize=8)

@dataclass(frozen=True)
class Rate:
    """é stands before it on the line, and a character is not a byte."""
    most: Annotated[float, field(default=0.5)] = 2.0

    def __call__(self, x: int | None = 3) -> float:
        if not x:  # x + 1
            raise ValueError(f"{x + 1} is not above {0}")
        tiny = 1e-12
        part = max(1, _CHUNK // 7)
        "é", x += -x
        pairs = list(zip([x], [x], strict=True))
        return min(self.most, (x) # a * b
            * x) if x > 7 and x is not None else True
'''


def test_what_is_changed_and_what_is_only_text_or_typing() -> None:
    source = SOURCE.replace('"é", x +=', "é = 1; x +=").encode()
    found = {change.was_and_now(source) for change in changes("src/fedloom/tasks/rate.py", source)}
    last = "* x) if x > 7 and x is not None else True"
    default = "most: Annotated[float, field(default=0.5)] = 2.0"
    assert found == {
        (default, default.replace("0.5", "1.0")),
        (default, default.replace("2.0", "4.0")),
        ("def __call__(self, x: int | None = 3) -> float:", "def __call__(self, x: int | None = 4) -> float:"),
        ("if not x:  # x + 1", "if  x:  # x + 1"),
        ("é = 1; x += -x", "é = 2; x += -x"),
        ("é = 1; x += -x", "é = 1; x -= -x"),
        ("é = 1; x += -x", "é = 1; x += x"),
        (last, last.replace("* x", "/ x")),
        (last, last.replace("> 7", ">= 7")),
        (last, last.replace("> 7", "<= 7")),
        (last, last.replace("7", "8")),
        (last, last.replace("and", "or")),
        (last, last.replace("is not", "is")),
        (last, last.replace("True", "False")),
    }
    at_import = {change.line for change in changes("rate.py", source) if change.at_import}
    assert at_import == {12, 14}, "the default of a field, and that of a parameter"


def test_every_change_of_the_package_is_one_line_and_still_python() -> None:
    path = TESTS.parent / "src/fedloom/methods/peers/safeguards.py"
    source = path.read_bytes()
    found = changes("src/fedloom/methods/peers/safeguards.py", source)
    assert len(found) > 100
    for change in found:
        compile(change.apply(source), str(path), "exec")
        was, now = change.was_and_now(source)
        assert was != now
        assert change.diff(source).splitlines()[3:] in ([f"-{line}", f"+{new}"] for line, new in _lines(source, change))


def _lines(source: bytes, change) -> list[tuple[str, str]]:  # type: ignore[no-untyped-def]
    """The changed line, before and after, with its indentation."""
    at = change.line - 1
    return [(source.decode().splitlines()[at], change.apply(source).decode().splitlines()[at])]


def test_every_file_of_tests_has_a_say() -> None:
    known = Known(
        {"a::1": 1.0, "a::2": 1.5, "a::3": 2.0, "b::1": 4.0, "c::1": 0.5},
        {"x.py": {3: ["a::1", "a::2", "a::3", "b::1"], 9: ["c::1"]}},
    )
    change = Change("x.py", 0, 1, "", 3, ((3, 3), (1, 9)))
    assert known.tests(change, budget=5) == ["a::1", "a::2", "a::3", "c::1"], "b::1 is too long for it"
    assert known.tests(change, budget=7) == ["a::1", "a::2", "b::1", "c::1"], "and a::3 waits for it"
    assert known.tests(change, budget=60) == ["a::1", "a::2", "a::3", "b::1", "c::1"]
    assert known.tests(change, budget=0.1) == ["a::1"]
    known.seconds[f"{AT_IMPORT}::1"] = 1.0
    assert known.tests(replace(change, at_import=True), budget=1) == [f"{AT_IMPORT}::1"]


def test_what_is_named_as_changing_nothing_can_still_be_made() -> None:
    named = TESTS / "mutants/equivalent.yaml"
    files = {entry["file"] for entry in yaml.safe_load(named.read_text())}
    texts = {file: (TESTS.parent / file).read_bytes() for file in files}
    candidates = [change for file, text in texts.items() for change in changes(file, text)]
    assert {file for file, _, _ in equivalents(named, candidates, texts)} == files


PACKAGE = {
    "src/fedloom/__init__.py": "",
    "src/fedloom/tasks/__init__.py": "",
    "src/fedloom/tasks/rate.py": """\
def rate(x, most=10):
    if x < 0:
        return -x
    return x % most


def unseen():
    return 1
""",
    "tests/tasks/test_rate.py": """\
from fedloom.tasks.rate import rate


def test_rate():
    assert [rate(3), rate(25), rate(-1)] == [3, 5, 1]
""",
    "pyproject.toml": "[tool.pytest.ini_options]\naddopts = '--import-mode=importlib'\n",
}
SAME = """\
- file: src/fedloom/tasks/rate.py
  was: "if x < 0:"
  now: "if x <= 0:"
  why: -0 is 0
"""


@pytest.mark.slow
def test_a_small_package(tmp_path: Path) -> None:
    for name, text in {**PACKAGE, "tests/mutants/equivalent.yaml": SAME}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    def run(*options: str) -> tuple[int, str]:
        code = (
            "import sys, pathlib; from mutants.__main__ import main;"
            "sys.exit(main(sys.argv[2:], root=pathlib.Path(sys.argv[1]), kept=pathlib.Path(sys.argv[1], 'kept')))"
        )
        command = [sys.executable, "-c", code, str(tmp_path), "--sample", "0", "--processes", "1", *options]
        done = subprocess.run(command, capture_output=True, text=True, env={"PYTHONPATH": str(TESTS)}, check=False)
        return done.returncode, done.stdout + done.stderr

    code, said = run()
    assert "7 changes: 4 noticed, 1 named as changing nothing, 2 survived (28.6%; at most 5% may)" in said
    assert "-    if x < 0:\n+    if x < 1:\n  tests that ran: 1 of tests/tasks/test_rate.py" in said
    assert "-    return 1\n+    return 2\n  tests that ran: 1 of tests/tasks/test_rate.py" in said
    assert "again: make mutants ARGS='--only src/fedloom/tasks/rate.py:8'" in said
    assert code == 1
    assert (tmp_path / "src/fedloom/tasks/rate.py").read_text() == PACKAGE["src/fedloom/tasks/rate.py"]

    code, said = run("--only", "src/fedloom/tasks/rate.py:4")
    assert "1 changes: 1 noticed, 0 named as changing nothing, 0 survived (0.0%" in said
    assert code == 0

    listed = tmp_path / "tests/mutants/equivalent.yaml"
    listed.write_text(SAME.replace("<= 0", ">= 0"))
    code, said = run("--only", "src/fedloom/tasks/rate.py:2")
    assert "Named as changing nothing, but tests/tasks/test_rate.py::test_rate noticed" in said
    assert code == 1
    listed.write_text(SAME.replace("x < 0", "y < 0"))
    assert run() == (1, "equivalent.yaml: src/fedloom/tasks/rate.py has no change of `if y < 0:` to `if x <= 0:`\n")
