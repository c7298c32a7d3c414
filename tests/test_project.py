"""Test the files around the code: workflows, images and templates name what exists; the wheel has what commands
need.
"""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
import re
import sys
import tomllib
import zipfile
from fnmatch import fnmatch
from functools import cached_property
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import yaml

import fedloom
from fedloom import __version__

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
IMAGES = [ROOT / "Dockerfile", *sorted((ROOT / "docker").glob("*"))]
# the paths and the make targets that commands in the root name; what is built comes later
PATH = r"(?<![\w/.:-])((?:src|tests|docs|constraints|docker|examples)(?:/[\w.-]*\w)*)"
MADE = "docs/_build"
DESCRIBED = (property, cached_property, staticmethod, classmethod)


def commands(file: Path) -> list[str]:
    """The commands of a workflow, or of an image and its comments."""
    text = file.read_text(encoding="utf-8")
    if file in IMAGES:
        return [text]
    jobs: dict[str, Any] = yaml.safe_load(text)["jobs"]
    return [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]


@pytest.mark.parametrize("file", [*WORKFLOWS, *IMAGES], ids=lambda path: path.name)
def test_what_a_workflow_or_an_image_names_exists(file: Path) -> None:
    text = "\n".join(commands(file))
    paths = [path for path in re.findall(PATH, text) if not path.startswith(MADE)]
    assert [path for path in paths if not (ROOT / path).exists()] == []
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"\bmake ([\w-]+)", text):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    for extras in re.findall(r"\.\[([\w,]+)\]", text):
        assert {*extras.split(",")} <= {*PROJECT["optional-dependencies"]}


def test_a_release_is_tried_on_each_python_that_is_named() -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text(encoding="utf-8"))["jobs"]
    named = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    assert jobs["bare"]["strategy"]["matrix"]["python"] == named
    assert jobs["publish"]["needs"] == "bare"
    assert jobs["publish"]["permissions"] == {"id-token": "write"}


def test_actions_are_named_by_commit() -> None:
    used = {line.strip(" -") for file in WORKFLOWS for line in file.read_text("utf-8").splitlines() if "uses:" in line}
    named = re.compile(r"uses: ([\w-]+/[\w-]+)@[0-9a-f]{40} # v[0-9.]+")
    assert [line for line in used if not named.fullmatch(line)] == []
    assert len({line.partition("@")[0] for line in used}) == len(used)  # one commit of each
    updates = yaml.safe_load((ROOT / ".github" / "dependabot.yml").read_text(encoding="utf-8"))["updates"]
    assert [update["package-ecosystem"] for update in updates] == ["github-actions"]


@pytest.mark.parametrize("file", IMAGES, ids=lambda path: path.name)
def test_an_image_has_its_files_and_its_command_and_runs_as_a_user(file: Path) -> None:
    said = [line.partition(" ")[::2] for line in file.read_text(encoding="utf-8").splitlines() if line[:1].isupper()]
    copied = [name for word, rest in said if word == "COPY" for name in rest.split()[:-1]]
    left_out = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    assert [name for name in copied if not (ROOT / name).exists() or any(fnmatch(name, one) for one in left_out)] == []
    if file.name == "Dockerfile":  # what the wheel is built from
        assert {"pyproject.toml", "hatch_build.py", "README.md", "src", *PROJECT["license-files"]} <= {*copied}
    assert [rest for word, rest in said if word == "USER"][-1] == "1000"
    scripts = {script.name for script in entry_points(group="console_scripts")}
    assert [rest for word, rest in said if word == "ENTRYPOINT" and json.loads(rest)[0] not in scripts] == []


@pytest.mark.parametrize("file", FORMS, ids=lambda path: path.name)
def test_a_form_has_what_a_form_needs(file: Path) -> None:
    form = yaml.safe_load(file.read_text(encoding="utf-8"))
    if file.name != "config.yml":
        assert {"name", "description", "body"} <= form.keys()
        assert all(part["attributes"]["label"] for part in form["body"])


def test_the_citation_is_of_this_version() -> None:
    said = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert said["version"] == __version__ == PROJECT["version"]
    assert said["license"] == PROJECT["license"]
    assert len(said["references"]) == 5
    assert all(work["title"] and work["authors"] for work in said["references"])


def test_hooks_call_what_lint_calls() -> None:
    (repo,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"]
    lint = (ROOT / "Makefile").read_text(encoding="utf-8").partition("\nlint:")[2].partition("\n\n")[0]
    for hook in repo["hooks"]:
        tool, *_ = hook["entry"].removeprefix(".venv/bin/").split()
        assert f"$(BIN)/{tool}" in lint


def test_the_oldest_versions_are_those_that_are_allowed() -> None:
    asked = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    allowed = {re.sub(r">=([\d.]+).*", r"==\1", line) for lines in asked for line in lines}
    pinned = (ROOT / "constraints" / "oldest.txt").read_text(encoding="utf-8").splitlines()[1:]
    assert {*pinned} <= allowed
    assert {line.split("==")[0] for line in pinned} >= {re.split("[<>=]", line)[0] for line in PROJECT["dependencies"]}


def test_what_is_imported_is_declared() -> None:
    declared = {re.split(r"[<>=]", line)[0] for line in PROJECT["dependencies"]} - {"PyYAML"} | {"yaml"}
    of_pydantic = {"pydantic_core", "typing_extensions"}  # it cannot be installed without
    apart = {"cloudpickle"}  # behind an except ImportError
    text = "\n".join(file.read_text(encoding="utf-8") for file in (ROOT / "src").rglob("*.py"))
    roots = {*re.findall(r"^ *(?:import|from) (\w+)[\w.]*(?: import .*| as \w+)?$", text, re.MULTILINE)}
    assert roots - sys.stdlib_module_names - {"fedloom"} == declared | of_pydantic | apart


def test_the_wheel_has_recipes_grids_and_the_schema(tmp_path: Path) -> None:
    builder = pytest.importorskip("hatchling.builders.wheel").WheelBuilder(str(ROOT))
    (built,) = builder.build(directory=str(tmp_path), versions=["standard"])
    with zipfile.ZipFile(built) as wheel:
        names = {*wheel.namelist()}
        shown = wheel.read(f"fedloom-{__version__}.dist-info/METADATA").decode()
    assert "A first run" in shown
    assert re.findall(r"\]\((?!https?:)", shown) == []  # an index has nothing beside it that a link could lead to
    source = ROOT / "src"
    data = [p for p in (source / "fedloom").rglob("*") if p.is_file() and p.suffix not in (".py", ".pyc")]
    assert {p.relative_to(source).as_posix() for p in data} <= names
    assert {
        "fedloom/study/grids/demo.yaml",
        "fedloom/federation/recipes/recipe.schema.json",
        "fedloom/py.typed",
    } <= names
    assert not any(name.startswith("tests") or name.endswith(".pyc") for name in names)


PRIVATE_WORDS = (
    r"\b(beds?|trivial|told apart|held against|roster|answer without any input|pulls? against each other|"
    r"in each other's way|who gains and who pays)\b"
)
"""Words that earlier pages had where the field has others (CONTRIBUTING.md)."""


def test_the_fields_words_are_used() -> None:
    """Search pages, sources, recipes and grids; what reads the old words, and furniture, may name them."""
    allowed = {"src/fedloom/core/settings/renamed.py", "src/fedloom/cli/app.py", "src/fedloom/data/nyud.py"}
    found = [
        f"{name}:{number}: {line.strip()}"
        for pattern in ("README.md", "docs/**/*.md", "src/**/*.py", "src/**/*.yaml", "src/**/*.html")
        for path in ROOT.glob(pattern)
        if (name := path.relative_to(ROOT).as_posix()) not in allowed and "_build" not in name
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1)
        if re.search(PRIVATE_WORDS, line, re.IGNORECASE)
    ]
    assert not found, "\n".join(found)
    assert not re.findall(r"\btold\b", "".join(page.read_text("utf-8") for page in (ROOT / "docs").rglob("*.md")))


def test_no_docstring_begins_with_a_question() -> None:
    asks = re.compile(r'^ *"""(What|Who|Whose|Whom|Whether|Which) ', re.MULTILINE)
    assert not [path for path in (ROOT / "src").rglob("*.py") if asks.search(path.read_text("utf-8"))]


def test_public_methods_say_what_they_do_or_a_base_does() -> None:
    """The linter asks this of classes and functions; a method that a subclass fills in is described once."""
    bare = []
    for module in pkgutil.walk_packages(fedloom.__path__, "fedloom."):
        for name, kind in list(vars(importlib.import_module(module.name)).items()):
            if name.startswith("_") or not inspect.isclass(kind) or kind.__module__ != module.name:
                continue
            for method, value in list(vars(kind).items()):
                field = method in getattr(kind, "__annotations__", ())
                if field or method.startswith("_") or not (callable(value) or isinstance(value, DESCRIBED)):
                    continue
                if not any(vars(base)[method].__doc__ for base in kind.__mro__ if method in vars(base)):
                    bare.append(f"{module.name}: {name}.{method}")
    assert bare == []
