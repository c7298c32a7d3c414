"""Every block of code on a page runs, in a folder of the page's own: Python, commands, and YAML, which must be a valid
recipe or grid. A block after `<!-- skip: next "WHY" -->` does not run; commands of pages below are parsed."""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import typer
from sybil import Example, Sybil
from sybil.parsers.myst import CodeBlockParser, PythonCodeBlockParser
from sybil.parsers.myst.skip import SkipParser
from typer.main import get_command

from fedloom.cli.app import app
from fedloom.core.settings.yaml import parse
from fedloom.federation.recipes import load
from fedloom.study.grid import load_grid

PARSED_ONLY = {
    "reference.md": "a list of commands over runs that take minutes to hours; tests/test_readme.py loads their recipes",
    "statistics.md": "commands over grids that ran; tests/study runs them on small ones",
    "flower.md": "a deployment over several machines; tests/flower and `fedloom flower demo` run it",
    "cluster.md": "several machines under torchrun and Slurm; tests/engines/test_cluster.py runs two ranks",
    "own.md": "names of packages that the reader has; tests/doors/test_outside.py installs one",
}
"""Pages whose commands are only compared with the command line's options, and whose YAML only has to be YAML: why."""
os.environ.setdefault("OMP_NUM_THREADS", "1")


def commands(example: Example) -> None:
    """Run each line, or hold it against the command line's options."""
    for line in re.sub(r"\\\n\s*", "", example.parsed).splitlines():
        line = line.partition(" #")[0].strip()
        if Path(example.path).name not in PARSED_ONLY:
            run(line)
        elif found := re.match(r"(?:fedloom|.* -m fedloom) (.*)", line):
            accepted(found[1].split())


def run(line: str) -> None:
    """A command as a reader types it. AssertionError with what it says, where it fails."""
    shell = f"fedloom() {{ '{sys.executable}' -m fedloom \"$@\"; }}\n{line}"
    done = subprocess.run(["bash", "-ec", shell], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"


def accepted(words: list[str]) -> None:
    """AssertionError where the command line has no such command, argument or option."""
    command: Any = get_command(app)
    while hasattr(command, "commands"):
        assert words[0] in command.commands, f"fedloom has no command {' '.join(words)!r}"
        command, words = command.commands[words[0]], words[1:]
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            command.make_context(command.name, list(words), resilient_parsing=False)
    except typer.Exit:
        pass
    except Exception as error:
        if "does not exist" not in str(error):  # a file of the reader's
            raise AssertionError(f"fedloom {command.name} {' '.join(words)}: {error}") from None


def recipe(example: Example) -> None:
    """A valid recipe, a part of one that fits into `digits-tasks`, or a valid grid."""
    page = Path(example.path).name
    value = parse(example.parsed, page)
    if page in PARSED_ONLY:
        assert value
    elif "bases" in value:
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
