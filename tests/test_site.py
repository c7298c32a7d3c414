"""The site: docstrings as pages, a strict build with a page for each method, stage and command, and code that runs."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote

import pytest

from fedloom import stages
from fedloom.cli.app import PANELS
from fedloom.methods import ADDONS, METHODS

DOCS = Path(__file__).parents[1] / "docs"


@pytest.fixture
def prose() -> ModuleType:
    spec = importlib.util.spec_from_file_location("prose", DOCS / "_ext" / "prose.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_formulas_get_greek_letters_and_places_and_code_stays(prose: ModuleType) -> None:
    assert prose.inline("theta_kp+ = lambda_t m_t, 2^(1-n) < x_i^2") == (
        "θ<sub>kp</sub>+ = λ<sub>t</sub> m<sub>t</sub>, 2<sup>1-n</sup> &lt; x<sub>i</sub><sup>2</sup>"
    )
    assert (
        prose.inline("sum_k |T(u)_i|^2 of weight_decay")
        == "sum<sub>k</sub> |T(u)<sub>i</sub>|<sup>2</sup> of weight_decay"
    )
    assert prose.inline("`alpha` and `support_mean` of server-step") == (
        "<code>alpha</code> and <code>support_mean</code> of server-step"
    )


def test_sources_become_a_list_and_formulas_keep_their_lines(prose: ModuleType) -> None:
    page = prose.html("Does a thing.\n\nu = a\nv = b\n\npaper    states\n         nothing\nrelease  none")
    assert '<div class="equations">u = a\nv = b</div>' in page
    assert "<dt>paper</dt><dd>states nothing</dd><dt>release</dt><dd>none</dd>" in page


def test_docstrings_are_text_whatever_is_in_them(prose: ModuleType) -> None:
    lines = prose.literal(["Of `a`s and *stars | bars_.", "", "    x   = 1", "- y"])
    assert lines[0] == r"Of \ ``a``\ s and \*stars \| bars\_."
    assert lines[1:4] == ["", ".. code-block:: text", ""]


def test_every_page_is_on_the_site() -> None:
    listed = re.findall(r"^([\w-]+)$", (DOCS / "index.md").read_text("utf-8"), re.MULTILINE)
    assert {page.stem for page in DOCS.glob("*.md")} == {"index", *listed}


def test_the_reference_names_every_command_method_and_addon() -> None:
    page = (DOCS / "reference.md").read_text("utf-8")
    named = {*re.findall(r"[a-z][\w-]*", page)}
    assert [name for registry in (METHODS, ADDONS) for name in registry.names if name not in named] == []
    assert [n for names in PANELS.values() for n in names if f"fedloom {n}" not in page] == []


@pytest.mark.parametrize("page", [*DOCS.glob("*.md"), *DOCS.glob("results/*.md")], ids=lambda page: page.stem)
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
