"""The Python of the README runs; its commands and YAML, and those of docs/reference.md, are valid; so are links."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

from fedloom.core.settings.yaml import parse
from fedloom.federation.recipes.loader import load

ROOT = Path(__file__).parents[1]
PAGES = {name: (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/reference.md")}
TEXT = "\n".join(PAGES.values())


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXT, flags=re.S)


@pytest.mark.parametrize("code", blocks("python"))
def test_python_runs(code: str) -> None:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(code, "README.md", "exec", dont_inherit=True), {"__name__": "readme"})
    assert out.getvalue()


def test_the_first_screen_links_the_page_that_says_which_method_to_use() -> None:
    assert "(docs/which-method.md)" in PAGES["README.md"].partition("```console\n")[0]


def test_the_first_screen_has_the_two_commands_that_do_all_the_set_up() -> None:
    """tests/test_newcomer.py types them; here, that no other command stands before them, and that they exist."""
    above, _, rest = PAGES["README.md"].partition("```console\n")
    assert above.count("\n") < 25
    assert "install" not in above
    lines = rest.partition("```")[0].splitlines()
    assert [line.split(" # ")[0].strip() for line in lines] == ["make demo", "make test"]
    assert all("minutes" in line for line in lines)
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert re.findall(r"^(demo|test):", makefile, re.MULTILINE) == ["demo", "test"]


def test_the_recipe_is_valid() -> None:
    whole, like = blocks("yaml")
    assert load(parse(whole, "README.md")).method.params == {"mu": 0.1}
    assert load(parse(like, "README.md"))


def test_the_commands_name_keys_that_exist() -> None:
    lines = [command.split() for command in re.findall(r"`(fedloom [^`]*)`", PAGES["docs/reference.md"])]
    runs = [words[2:] for words in lines if re.match(r"fedloom (run|show) \w", " ".join(words))]
    assert runs
    for name, *changes in runs:
        load(name, [change for change in changes if "=" in change])


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name: str) -> None:
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", PAGES[name])
    assert links
    assert [link for link in links if not (ROOT / name).parent.joinpath(link).exists()] == []
