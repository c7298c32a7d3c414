"""Reading and drawing activated dimensions."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedloom.cli.app import app
from fedloom.engines.api import Result
from fedloom.errors import StateError, UserError
from fedloom.study.charts import thinned
from fedloom.study.papers.activated_dimensions import CSV, Activated, Overlaps, _prefixes, draw, table
from fedloom.study.tables.output import Table

Quick = Callable[..., Result]


def activated(round: int, rows: tuple[str, ...] = ("a", "b"), overlap: tuple[float, ...] = (0.5,)) -> Activated:
    return Activated(
        round,
        "encoder",
        0.2,
        10,
        rows,
        ("e.a", "e.b"),
        ("encoder", "encoder"),
        (4, 6),
        ((2, 0), (1, 1), (0, 2))[: len(rows)],
        ((1, 0),),
        ((2, 0, 0), (1, 1, 0), (0, 2, 0))[: len(rows)],
        {"encoder": {"overlap": overlap, "expected": (0.2,) * len(overlap), "jaccard": (1 / 3,) * len(overlap)}},
    )


@pytest.fixture
def run(quick: Quick) -> Path:
    return quick("method.add.activated-dimensions={}").folder


def test_tables_of_a_run(run: Path) -> None:
    found = table(run)
    assert found.scope == "encoder"
    assert [r.round for r in found.rounds] == [1, 2]
    assert len(found.pairs) == 10
    assert table(run, "all").rounds[0].columns > found.rounds[0].columns
    agreement, shares = found.agreement(), found.shares()
    assert agreement.head[0] == "round"
    assert agreement.head[-1] == "if independent"
    assert [line[0] for line in agreement.lines] == ["1", "2"]
    total = sum(float(line[1]) for line in shares.lines)
    assert total == pytest.approx(100, abs=0.5)
    assert " > " in shares.lines[0][2]
    for text in (found.to_text(), found.to_markdown()):
        assert "digits-tasks, fedavg, seed 0: top 10 %" in text
    rows = list(csv.DictReader(io.StringIO(found.to_csv())))
    assert tuple(rows[0]) == CSV
    of = [float(r["percent"]) for r in rows if r["quantity"] == "share" and r["a"] == "digit-0" and r["round"] == "1"]
    assert sum(of) == pytest.approx(100)
    pair = found.pairs[0]
    value = next(float(r["percent"]) for r in rows if r["quantity"] == "overlap" and (r["a"], r["b"]) == pair)
    assert value == pytest.approx(100 * found.series(pair)[0][1])


def test_the_picture(run: Path, tmp_path: Path) -> None:
    draw(run, tmp_path / "p.png")
    assert (tmp_path / "p.png").stat().st_size > 10_000
    with pytest.raises(UserError, match=r"p\.nothing"):
        draw(run, tmp_path / "p.nothing")


def test_the_command(run: Path, tmp_path: Path) -> None:
    call = CliRunner().invoke
    assert "if independent" in call(app, ["activated", str(run)]).output
    for name in ("a.csv", "a.md", "a.svg"):
        assert call(app, ["activated", str(run), "--out", str(tmp_path / name), "--scope", "all"]).exit_code == 0
        assert (tmp_path / name).stat().st_size


def test_a_run_without_records(quick: Quick) -> None:
    with pytest.raises(StateError, match=r"method\.add\.activated-dimensions"):
        table(quick("training.rounds=1").folder)


def test_a_scope_that_was_not_recorded(run: Path) -> None:
    with pytest.raises(StateError, match="recorded: all, encoder"):
        table(run, "heads")


def test_numbers_of_a_round() -> None:
    assert activated(1).density() == [[2 / 3, 0, 0], [1 / 3, 1 / 3, 0]]
    assert activated(1).matrix() == [[1, 0.5], [0.5, 1]]
    assert activated(1).expected == 0.2
    assert activated(1, ("a",), ()).expected == 0.2


def test_clients_that_are_absent_in_some_rounds(tmp_path: Path) -> None:
    rounds = (activated(1), activated(2, ("b", "c"), (0.25,)), activated(3, ("c",), ()))
    found = Overlaps("x", rounds)
    assert found.pairs == (("a", "b"), ("b", "c"))
    assert found.series(("b", "c")) == [(2, 0.25)]
    assert [line[1:3] for line in found.agreement().lines] == [("50.0", ""), ("", "25.0"), ("", "")]
    assert found.shares().head == ("blocks", "of all dimensions")
    draw(found, tmp_path / "p.png")


def test_long_runs_and_deep_names_are_cut() -> None:
    assert [r.round for r in thinned([activated(i) for i in range(1, 101)], 12)] == [
        *(1, 10, 19, 28, 37, 46, 55, 64, 73, 82, 91, 100)
    ]
    names = [f"encoder.layer{i}.{j}.weight" for i in range(4) for j in range(9)]
    assert set(_prefixes(names)) == {f"encoder.layer{i}" for i in range(4)}
    assert _prefixes(["x"]) == ["x"]


def test_sheets() -> None:
    sheet = Table("t", ("a", "b|c"), (("x", "1"),))
    assert sheet.to_text() == "t\na  b|c\n-  ---\nx    1\n"
    assert sheet.to_markdown() == "**t**\n\n| a | b\\|c |\n|---|---:|\n| x | 1 |\n"
