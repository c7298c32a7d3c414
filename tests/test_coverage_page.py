"""docs/coverage.md names things that exist, and leaves out no table, figure or equation of the five documents."""

from __future__ import annotations

import ast
import re
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import pytest
from typer.main import get_command

from fedloom.cli.app import app
from fedloom.federation.recipes import loader
from fedloom.study import grid
from fedloom.study.claims import sensitivity
from fedloom.study.results import read_seeds

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "coverage.md"
RULES = ROOT / "docs" / "results" / "rules"
STATES = ("full", "small", "cannot tell", "tried", "packaged", "tested", "missing", "none")
GRID = r"\b(?:feddea|fedhca2|matu|f2dc|fmtl|thesis|benchmarks|claims|robust)/(?![\w-]+\.py)[\w*-]+|\bdemo(?:-digits)?\b"
COLUMNS = ("where", "what", "command", "test", "state")
# What each document has, by its own numbers.
NUMBERED = {
    "FedDEA": {"Table": range(1, 7), "Figure": range(1, 9), "eq.": range(1, 8)},
    "MaTU": {"Table": range(1, 3), "Figure": range(1, 7), "eq.": range(1, 8)},
    "F2DC": {"Table": range(1, 8), "Figure": range(1, 9), "eq.": range(1, 12)},
    "FedHCA2": {"Table": range(1, 9), "Figure": range(1, 6), "eq.": range(1, 49), "Algorithm": range(1, 3)},
    "DFMTL": {
        "Table": [f"{c}.{n}" for c, last in ((2, 2), (3, 1), (4, 1), (5, 4), (6, 18)) for n in range(1, last + 1)],
        "Figure": [f"{c}.{n}" for c, last in (("2", 2), ("4", 6), ("6", 4), ("A", 5)) for n in range(1, last + 1)],
        "eq.": [f"{c}.{n}" for c, last in ((2, 5), (4, 20), (5, 1), (6, 3)) for n in range(1, last + 1)],
        "Algorithm": range(1, 4),
    },
}


@cache
def rows() -> list[tuple[str, dict[str, str]]]:
    """(document, cells of one row) of every table of the page."""
    found, document, header = [], "", False
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            document = line[3:].split(" ")[0]
        if not document:
            continue
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if not line.startswith("|") or set("".join(cells)) <= set("-"):
            header = False
        elif cells == list(COLUMNS):
            header = True
        else:
            assert len(cells) == len(COLUMNS), f"{document}: expected {len(COLUMNS)} cells, found {line}"
            found.append((document, dict(zip(COLUMNS, cells, strict=True))))
    assert not header
    return found


def quoted(column: str) -> list[str]:
    """All texts in backticks in a column."""
    return [text for _, row in rows() for text in re.findall(r"`([^`]+)`", row[column])]


def packaged() -> set[str]:
    return {*grid.names(), *loader.names()}


@cache
def functions(file: str) -> frozenset[str]:
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def numbers(where: str, kind: str) -> set[str]:
    """The numbers of a kind that a cell names: "Tables 4, 5", "Figures 4.1, 4.3 to 4.6", "eqs. 1-3"."""
    names = {"Table": "Tables?", "Figure": "Figures?", "eq.": r"eqs?\.", "Algorithm": "Algorithms?"}[kind]
    one = r"(?:[A-Z]\.)?\d+(?:\.\d+)?"
    found: set[str] = set()
    for text in re.findall(rf"{names} ((?:{one}(?:, | to | and |-)?)+)", where):
        for first, last in re.findall(rf"({one})(?:(?: to |-)({one}))?", text):
            head, _, low = first.rpartition(".")
            high = (last or first).rpartition(".")[2]
            found |= {f"{head}.{n}" if head else str(n) for n in range(int(low), int(high) + 1)}
    return found


@pytest.mark.parametrize("document", NUMBERED)
def test_every_table_figure_and_equation_has_a_row(document: str) -> None:
    mine = [row["where"] for name, row in rows() if name == document]
    for kind, expected in NUMBERED[document].items():
        named = set().union(*(numbers(where, kind) for where in mine))
        assert {str(n) for n in expected} <= named, f"{document}: {kind} {sorted({str(n) for n in expected} - named)}"


def test_states_are_known_and_say_why_something_is_missing() -> None:
    for document, row in rows():
        state = next((state for state in STATES if re.match(rf"{state}\b", row["state"])), None)
        assert state, (document, row)
        assert state != "missing" or len(row["state"]) > len("missing: because"), (document, row)
        if state in ("full", "small", "cannot tell", "tried", "packaged"):
            assert "`" in row["command"], (document, row)
        if state == "tested":
            assert "`tests/" in row["test"], (document, row)


def test_a_claim_is_small_only_where_the_rule_accepts_its_benchmark() -> None:
    files = [*RULES.glob("claims-*.csv")]
    assert files
    for file in files:
        seeds = read_seeds(file)
        names = dict.fromkeys(line.data for line in seeds.lines)
        accepted = all(not sensitivity(seeds, data).reasons for data in names)
        grid = file.stem.replace("-", "/", 1)
        states = [row["state"] for _, row in rows() if re.search(rf"{grid}(?![\w-])", row["command"])]
        assert states, grid
        assert all(state.startswith("small" if accepted else "cannot tell") for state in states), (grid, states)


def test_a_claims_grid_has_as_many_runs_as_on_the_page_of_claims() -> None:
    page = (RULES.parent / "claims.md").read_text(encoding="utf-8")
    told = dict(re.findall(r"^\| `(claims/[\w-]+)` \| (\d+) \|", page, re.MULTILINE))
    cells = [(re.findall(GRID, row["command"]), re.findall(r"\((\d+) runs\)", row["state"])) for _, row in rows()]
    counted = [(grids[0], runs[0]) for grids, runs in cells if runs and grids and grids[0] in told]
    assert len(counted) > 1
    assert [(grid, runs) for grid, runs in counted if told[grid] != runs] == []


def test_tests_that_it_names_exist() -> None:
    named = quoted("test")
    assert len(named) > 100
    for text in named:
        file, _, name = text.partition("::")
        assert name in functions(file), text


def test_commands_that_it_names_exist() -> None:
    known = set(get_command(app).commands)  # type: ignore[attr-defined]
    for text in quoted("command"):
        if text.startswith("fedloom "):
            assert text.split()[1] in known, text
        elif text.startswith("python "):
            assert (ROOT / text.split()[1]).is_file(), text
        for name in re.findall(GRID, text):
            assert any(fnmatch(one, name) for one in packaged()), f"{name} in {text}"
        if figure := re.search(r"fedloom plot figure (\S+) .*--named (?:\"([^\"]+)\"|(\S+))", text):
            figures = grid.load_grid(figure[1]).model_dump_json()
            assert f'"{figure[2] or figure[3]}"' in figures, text


def test_every_packaged_grid_has_a_row() -> None:
    page = PAGE.read_text(encoding="utf-8")
    named = re.findall(GRID, page)
    assert [name for name in grid.names() if not any(fnmatch(name, one) for one in named)] == []


@cache
def benchmarks_of(name: str) -> dict[str, str]:
    """Data set of a grid -> its data and how they are dealt out, as text."""
    found = grid.load_grid(name)
    dealt = {data: loader.load(row.recipe, loader.texts({**row.set, **found.set})) for data, row in found.data.items()}
    return {data: f"{recipe.data.model_dump()} {recipe.partition.model_dump()}" for data, recipe in dealt.items()}


def test_small_rests_on_a_benchmark_that_the_rule_accepts() -> None:
    """Costs have no rule, and a row on the rule itself needs none."""
    accepted = set()
    for file in RULES.glob("*.csv"):
        seeds = read_seeds(file)
        benchmarks = benchmarks_of(file.stem.replace("-", "/", 1) if file.stem.startswith("claims") else file.stem)
        names = dict.fromkeys(line.data for line in seeds.lines)
        accepted |= {benchmarks[data] for data in names if not sensitivity(seeds, data).reasons}
    assert len(accepted) > 8
    for document, row in rows():
        if not row["state"].startswith("small") or "_cost" in row["command"] or "study benchmark" in row["command"]:
            continue
        named = {*re.findall(GRID, f"{row['command']} {row['state'].partition('; cannot tell')[0]}")} & {*grid.names()}
        assert any(accepted & {*benchmarks_of(name).values()} for name in named), (document, row["where"], row["state"])
