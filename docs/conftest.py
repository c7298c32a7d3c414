"""Every block of code on a page runs, in order, in a folder of the page's own: Python, commands, and YAML, which must
be a valid recipe or grid. A block after `<!-- skip: next "WHY" -->` does not run; tests/test_site.py counts these, and
checks the commands in them against the command line."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

from sybil import Example, Sybil
from sybil.parsers.myst import CodeBlockParser, PythonCodeBlockParser
from sybil.parsers.myst.skip import SkipParser

from fedloom.core.settings.yaml import parse
from fedloom.federation.recipes import load
from fedloom.study.grid import load_grid

os.environ.setdefault("OMP_NUM_THREADS", "1")


def commands(example: Example) -> None:
    """Run each line."""
    for line in re.sub(r"\\\n\s*", "", example.parsed).splitlines():
        run(line.partition(" #")[0].strip())


def run(line: str) -> None:
    """A command as a reader types it. AssertionError with what it says, where it fails."""
    shell = f"fedloom() {{ '{sys.executable}' -m fedloom \"$@\"; }}\n{line}"
    done = subprocess.run(["bash", "-ec", shell], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"


def recipe(example: Example) -> None:
    """A valid recipe, a part of one that fits into `digits-tasks`, or a valid grid."""
    value = parse(example.parsed, Path(example.path).name)
    if "bases" in value:
        load_grid(value)
    else:
        load(value if "name" in value else {**load("digits-tasks").model_dump(mode="json"), **value})


def toml(example: Example) -> None:
    """A part of a pyproject.toml, which only has to be TOML."""
    assert tomllib.loads(example.parsed)


def begin(namespace: dict[str, Any]) -> None:
    """Each page has a folder of its own."""
    import tempfile

    namespace["_begun_in"] = os.getcwd()
    namespace["_folder"] = tempfile.TemporaryDirectory()
    os.chdir(namespace["_folder"].name)


def end(namespace: dict[str, Any]) -> None:
    """Back to where it began."""
    os.chdir(namespace["_begun_in"])
    namespace["_folder"].cleanup()


pytest_collect_file = Sybil(
    parsers=[
        PythonCodeBlockParser(),
        *(CodeBlockParser(language=language, evaluator=commands) for language in ("console", "bash")),
        CodeBlockParser(language="yaml", evaluator=recipe),
        CodeBlockParser(language="toml", evaluator=toml),
        SkipParser(),
    ],
    patterns=["*.md"],
    setup=begin,
    teardown=end,
).pytest()
