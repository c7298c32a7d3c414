"""The site: docstrings as pages, a strict build with a page for each method, stage and command, and code that runs."""

from __future__ import annotations

import importlib
import inspect
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import unquote

import pytest
from typer.main import get_command

from fedloom import stages
from fedloom.cli.app import PANELS, app
from fedloom.federation.recipes import loader
from fedloom.methods import ADDONS, METHODS
from fedloom.study import grid as grids

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
COMMANDS: Any = get_command(app)
# verdicts.md is a part of claims.md that a command writes
PAGES = [*DOCS.glob("*.md"), *(page for page in DOCS.glob("results/*.md") if page.stem != "verdicts")]


@pytest.fixture
def extension(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """The modules of docs/_ext, which stand in no package."""
    monkeypatch.syspath_prepend(str(DOCS / "_ext"))
    return importlib.import_module


@pytest.fixture
def prose(extension: Callable[[str], ModuleType]) -> ModuleType:
    pytest.importorskip("latex2mathml")
    return extension("prose")


def test_formulas_in_letters_become_tex_and_words_stay(extension: Callable[[str], ModuleType]) -> None:
    pytest.importorskip("latex2mathml")
    split = extension("formulas").split

    def shown(text: str) -> str:
        return "".join(f"${re.sub(r' +', ' ', piece)}$" if formula else piece for formula, piece in split(text))

    assert shown("u = sum_k p_k Delta_k, theta+ = theta + u, with p_k") == (
        r"$u = \sum_{k} \ p_{k} \ \Delta_{k}$, $\theta ^{+} = \theta + u$, with $p_{k}$"
    )
    assert shown("x <- clamp(alpha_i, 0, 1) <g_w, u> / |g|^2") == (
        r"$x \leftarrow \operatorname{clamp} (\alpha_{i} ,\ 0,\ 1) \langle g_{w} ,\ u \rangle / |g |^{2}$"
    )
    assert shown("a = 1e-3 where |Delta_i| >= sqrt(rho) in the K x K matrix") == (
        r"$a = 10^{-3}$ where $|\Delta_{i} | \ge \sqrt{\rho}$ in the $K \times K$ matrix"
    )
    for text in ("a client with weight_decay", "support_mean of server-step", "the method's floor, 3 of 4 (A1, B2)"):
        assert shown(text) == text


def test_every_formula_of_a_docstring_can_be_set(prose: ModuleType) -> None:
    pages = [prose.html(inspect.getdoc(e.function) or "") for registry in (METHODS, ADDONS) for e in registry]
    assert sum(page.count("<math") for page in pages) > 800
    assert [left for page in pages for left in re.findall(r"(?:Delta|theta|sum)_\w+", re.sub("<.*?>", "", page))] == []


def test_sources_become_a_list_and_formulas_keep_their_lines(prose: ModuleType) -> None:
    page = prose.html("Does a thing.\n\nu = a\nv = b\n\npaper    states\n         nothing\nrelease  none")
    assert len(re.findall(r'<div class="equations"><math.*</math>\n<math.*</math></div>', page)) == 1
    assert "<dt>paper</dt><dd>states nothing</dd><dt>release</dt><dd>none</dd>" in page


def test_every_method_is_in_one_group_that_says_when_to_use_it(extension: Callable[[str], ModuleType]) -> None:
    grouped = sorted(name for group in extension("uses").GROUPS for name in group.names)
    assert grouped == sorted([*METHODS.names, *ADDONS.names])


def test_docstrings_are_text_whatever_is_in_them(prose: ModuleType) -> None:
    lines = prose.literal(["Of `a`s and *stars | bars_.", "", "    x   = 1", "- y"])
    assert lines[0] == r"Of \ ``a``\ s and \*stars \| bars\_."
    assert lines[1:4] == ["", ".. code-block:: text", ""]


def test_four_sections_and_results_with_at_most_forty_entries_before_methods() -> None:
    parts = re.findall(r":caption: (.*)\n(?::.*\n)*\n((?:.+\n)+?):::", (DOCS / "index.md").read_text("utf-8"))
    assert [caption for caption, _ in parts] == ["Get started", "Guides", "Methods", "Reference", "Results"]
    before = [entry for _, entries in parts[:2] for entry in entries.split()]
    assert "_generated/gallery/index" in before
    assert len(before) + len([*(DOCS / "gallery").glob("*.py")]) <= 40


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda page: page.stem)
def test_lines_of_sources_have_at_most_a_hundred_characters(page: Path) -> None:
    """Except tables, headings, blocks, comments, and what cannot be broken."""
    long, fenced = [], False
    for line in page.read_text("utf-8").splitlines():
        fenced ^= bool(re.match(r" *```", line))
        words = re.sub(r"`[^`]*`", "code", re.sub(r"^ *(?:[-*]|\d+\.) +", "", line)).split()
        if len(line) > 100 and not fenced and not re.match(r"[|<#:]|\$\$", line) and len(words) > 1:
            long.append(line)
        assert fenced or not re.match(r" *%", line), f"MyST drops a line that begins with %: {line}"
    assert long == [], f"lines of more than 100 characters; break them with: python docs/_ext/wrap.py {page.name}"


def test_every_page_is_on_the_site() -> None:
    listed = re.findall(r"^([\w-]+)$", (DOCS / "index.md").read_text("utf-8"), re.MULTILINE)
    assert {page.stem for page in DOCS.glob("*.md")} == {"index", *listed}


def test_the_reference_names_every_command_method_and_addon() -> None:
    page = (DOCS / "reference.md").read_text("utf-8")
    named = {*re.findall(r"[a-z][\w-]*", page)}
    assert [name for registry in (METHODS, ADDONS) for name in registry.names if name not in named] == []
    assert [n for names in PANELS.values() for n in names if f"fedloom {n}" not in page] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_block_of_code_is_one_that_the_build_runs(page: Path) -> None:
    kinds, fenced, above = set(), False, ""
    for line in page.read_text("utf-8").splitlines():
        if found := re.match(r" *```(.*)", line):
            fenced = not fenced
            kinds |= {found[1]} if fenced else set()
        assert fenced or above or not re.match(r" {4,}\S", line), f"an indented block, which nothing runs: {line}"
        above = line
    run = {"python", "console", "bash", "yaml", "toml"}  # by docs/conftest.py; text and tables are no code
    assert {kind for kind in kinds if not kind.startswith("{include}")} <= {*run, "text"}


def commands_in(text: str) -> list[str]:
    """The `fedloom` commands of a page or a source file: lines of its blocks, and code within its sentences."""
    blocks = re.findall(r"^ *```(?:console|bash|text)\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL)
    lines = re.sub(r"\\\n\s*", "", "\n".join(blocks)).splitlines()
    spans = re.findall(r"`(fedloom [a-z][^`]*)`", text)
    found = [re.sub(r"\s*\n[\s#>-]*", " ", span) for span in spans]
    found += [line[line.index("fedloom ") :] for line in lines if re.match(r"\s*(?:\S+ -m )?fedloom [a-z]", line)]
    return [command.split(" #")[0] for command in found]


def unknown_in(command: str) -> list[str]:
    """Return what of a command the command line does not have: the name of a command or of an option."""
    _, *words = command.replace(";", " ").split()
    found = COMMANDS
    while hasattr(found, "commands"):
        name = words.pop(0) if words else ""
        if name.isupper() or name in ("", "..."):  # COMMAND, in a sentence about all commands
            return []
        if name not in found.commands or found.commands[name].hidden:  # those of older versions are hidden
            return [f"{found.name} {name}"]
        found = found.commands[name]
    known = {flag for option in found.params for flag in (*option.opts, *option.secondary_opts)} | {"--help"}
    return [word for word in words if re.match(r"--?[a-z]", word) and word.split("=")[0].rstrip(".,)`") not in known]


TEXTS = [
    *(*PAGES, *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md"))),
    *(*(ROOT / "src").rglob("*.py"), *(ROOT / "src").rglob("*.yaml"), *(ROOT / "examples").rglob("*.py")),
]


def test_every_command_and_option_that_a_page_or_a_docstring_names_exists() -> None:
    named = [(path, command) for path in TEXTS for command in commands_in(path.read_text("utf-8"))]
    assert len(named) > 300
    wrong = [(str(path.relative_to(ROOT)), command, found) for path, command in named if (found := unknown_in(command))]
    assert wrong == []
    assert unknown_in("fedloom bed x") == ["fedloom bed"]
    assert unknown_in("fedloom run x --quick -q") == ["--quick"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_runs_and_grids_of_a_page_have_the_cells_and_keys_that_it_names(page: Path) -> None:
    for command in commands_in(page.read_text("utf-8")):
        kind, *words = shlex.split(command)[1:]
        changes = [word for word in words if re.match(r"[a-z][\w.-]*=[^A-Z.]", word)]
        if kind == "run" and words and words[0] in loader.names():
            loader.load(words[0], changes)
        elif kind == "grid" and words and words[0] in grids.names():
            grid = grids.load_grid(words[0], changes)
            grids.recipes(grid)
            labels = [label for option, label in pairwise(words) if option == "--only"]
            assert grids.select(grid, labels), command


def test_blocks_that_do_not_run_say_why_and_are_few() -> None:
    """All other blocks run, in order, in one folder per page: docs/conftest.py."""
    why = [found for page in PAGES for found in re.findall(r"<!-- skip: (.*?) -->", page.read_text("utf-8"))]
    assert [text for text in why if not re.fullmatch(r'next "\w[^"]{15,}"', text)] == []
    assert len(why) == 27


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("sphinx_gallery")
    pytest.importorskip("furo")
    pytest.importorskip("myst_parser")
    quick = ("-D", "live_reports=0", "-D", "plot_gallery=0")  # `make docs` makes these too
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", *quick, "-b", "html", DOCS, tmp_path]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = tmp_path / "_generated"
    live = {f"report-{kind}.html" for kind in ("run", "grid", "relatedness")}  # left out above
    for registry in (METHODS, ADDONS):
        assert [name for name in registry.names if not (pages / "methods" / f"{name}.html").is_file()] == []
    commands = (pages / "commands.html").read_text("utf-8")
    assert [n for names in PANELS.values() for n in names if f"fedloom {n}" not in commands] == []
    offered = (pages / "api" / "fedloom.stages.html").read_text("utf-8")
    assert [name for name in stages.__all__ if f">{name}<" not in offered] == []
    made = [name for name in stages.__all__ if f"../stages/{name}.html" in offered]
    assert {"Mean", "PCGrad", "TopMagnitude"} <= {*made}
    assert [name for name in made if not (pages / "stages" / f"{name}.html").is_file()] == []
    for page in tmp_path.rglob("*.html"):
        text = page.read_text("utf-8")
        elsewhere = re.findall(r'<(?:script|link|img|iframe)[^>]*(?:src|href)="(https?:)?//', text)
        assert not elsewhere, page  # offline: nothing of it comes from elsewhere
        links = {unquote(link) for link in re.findall(r'href="([^":#?]+)', text)} - live
        assert [link for link in links if not (page.parent / link).exists()] == [], page


@pytest.mark.slow
def test_every_block_of_code_on_the_pages_runs() -> None:
    pytest.importorskip("sybil")
    command = [sys.executable, "-m", "pytest", "-q", "-c", "docs/pytest.ini", "docs"]
    done = subprocess.run(command, cwd=DOCS.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
