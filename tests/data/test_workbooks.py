"""Tables in Excel workbooks: read as they were saved, or refused with what to change."""

from __future__ import annotations

import datetime
import struct
import tracemalloc
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas
import pytest
from typer.testing import CliRunner

import fedloom as fl
from fedloom.cli.app import app
from fedloom.data.tables.read import read
from fedloom.errors import DataError

openpyxl = pytest.importorskip("openpyxl")
pytest.importorskip("python_calamine")

NAMES = ["site", "age", "since", "at", "ill"]


def rows(count: int = 60) -> list[list[Any]]:
    day, clock = datetime.datetime(2024, 1, 1), datetime.time(9, 30)
    return [
        ["Köln" if i % 2 else "Ulm", None if i % 7 == 0 else i % 17 + 0.5, day, clock, "yes" if i % 3 else "no"]
        for i in range(count)
    ]


def save(path: Path, lines: list[list[Any]], change: Callable[[Any], object] = lambda book: None) -> Path:
    book = openpyxl.Workbook()
    for line in lines:
        book.active.append(line)
    change(book)
    book.save(path)
    return path


def test_a_workbook_is_the_table_that_it_shows(tmp_path: Path) -> None:
    """Rows and columns without cells around the table are none, and neither is an empty sheet."""
    around = [[], [], [None, *NAMES, None], *([None, *row, ""] for row in rows())]
    path = save(tmp_path / "t.xlsx", around, lambda book: book.create_sheet("notes"))
    frame = read(path, None).frame
    expected = pandas.DataFrame(rows(), columns=NAMES).assign(at="09:30:00")
    assert [*frame.columns] == NAMES
    assert frame.astype(object).where(frame.notna(), None).to_numpy().tolist() == (
        expected.astype(object).where(expected.notna(), None).to_numpy().tolist()
    )
    assert (frame.age.dtype.kind, frame.since.dtype.kind) == ("f", "M")


def test_a_federation_of_workbooks_and_other_files_trains_and_predicts(tmp_path: Path) -> None:
    """A file for each site; a column that pandas leaves without a name has its place as one."""
    folder = tmp_path / "sites"
    folder.mkdir()
    lines = [[row[1], i % 5, row[4]] for i, row in enumerate(rows())]
    frame = pandas.DataFrame(lines, columns=["age", "grade", "ill"])
    frame.to_csv(folder / "ulm.csv", index=False)
    save(folder / "bonn.xlsx", [["age", "grade", "ill"], *lines])
    for passing in ("~$bonn.xlsx", "._bonn.xlsx"):  # of Excel while it is open, and of macOS
        (folder / passing).write_bytes(b"\x05bonn")
    out = CliRunner().invoke(app, ["init", str(folder), "--labels", "ill", "--out", str(tmp_path / "r.yaml")])
    assert out.exit_code == 0, out.output
    result = fl.run(tmp_path / "r.yaml", tmp_path / "run", overrides=["training.rounds=1"])
    assert {*result.run.by_client()} == {"bonn", "ulm"}
    written = tmp_path / "p.csv"
    arguments = ["predict", str(tmp_path / "run"), str(folder / "bonn.xlsx"), "--client", "bonn", "--out", str(written)]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    assert len(pandas.read_csv(written)) == 60
    unnamed = read(save(tmp_path / "u.xlsx", [[None, "a", "b"], *([i, i, i] for i in range(4))]), None)
    assert [*unnamed.frame.columns] == ["column 1", "a", "b"]


def merge(book: Any) -> None:
    book.active.merge_cells("A2:A5")


def two_sheets(book: Any) -> None:
    book.create_sheet("old").append(NAMES[:3])


def title(book: Any) -> None:
    two_sheets(book)
    book["old"].insert_rows(1)
    book["old"]["A1"] = "Patients of last year"


def formula(book: Any) -> None:
    book.active["B3"] = "=SUM(B4:B9)"


REFUSED: dict[str, tuple[list[list[Any]], Callable[[Any], object], str]] = {
    "nothing": ([], lambda book: None, "it is empty"),
    "names alone": ([NAMES], lambda book: None, "no row found"),
    "two sheets": ([NAMES, *rows()], two_sheets, "sheet 'Sheet' has a column 'at', sheet 'old' has none; expected the"),
    "two, one with a title": ([NAMES, *rows()], title, "sheet 'old': the first row with cells has 1, a row below 3"),
    "merged cells": ([NAMES, *rows()], merge, "cells are merged, so all but the first would be empty; unmerge"),
    "a formula that nobody computed": ([NAMES, *rows()], formula, "formulas without a result found; open the file"),
    "a title": ([["Patients"], NAMES, *rows()], lambda book: None, "has 1, a row below 5; remove rows above the names"),
    "one name twice": ([["a", "a"], [1, 2]], lambda book: None, "columns 1 and 2 are all named 'a'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_workbook_cannot_have(tmp_path: Path, case: str) -> None:
    lines, change, said = REFUSED[case]
    with pytest.raises(DataError, match=f"t.xlsx.*{said}"):
        read(save(tmp_path / "t.xlsx", lines, change), None)


def test_a_workbook_with_more_than_it_states_is_not_unpacked(tmp_path: Path) -> None:
    """A gigabyte of one letter is a megabyte in the file."""
    path = save(tmp_path / "t.xlsx", [NAMES, *rows()])
    with zipfile.ZipFile(path) as archive:
        parts = {part.filename: archive.read(part) for part in archive.infolist()}
    sheet = next(name for name in parts if name.endswith("sheet1.xml"))
    stated, there = parts[sheet], parts[sheet] + b" " * (64 << 20)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, xml in {**parts, sheet: there}.items():
            archive.writestr(name, xml)
    packed = path.read_bytes()
    for of in (zlib.crc32, len):  # in the head of the part, and in the list of parts
        true, false = (struct.pack("<I", of(xml)) for xml in (there, stated))
        assert packed.count(true) == 2
        packed = packed.replace(true, false)
    path.write_bytes(packed)
    del there
    tracemalloc.start()
    with pytest.raises(DataError, match="cannot be read as an Excel workbook"):
        read(path, None)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 16 << 20


def test_a_sheet_for_each_site_is_a_folder_with_a_file_for_each(tmp_path: Path) -> None:
    """Also with the columns in another order; a folder's workbook has one sheet with cells."""
    names, lines = ["age", "grade", "ill"], [[row[1], i % 5, row[4]] for i, row in enumerate(rows())]

    def sites(book: Any) -> None:
        book.active.title = "Ulm"
        for line in [names[::-1], *(line[::-1] for line in lines[:40])]:
            book["Köln"].append(line) if "Köln" in book.sheetnames else book.create_sheet("Köln").append(line)
        book.create_sheet("Bonn").append(names)

    path = save(tmp_path / "sites.xlsx", [names, *lines], sites)
    assert "sheet 'Bonn' is left out: it has no rows" in read(path, None).notes
    assert read(path, "grade").site == "grade"
    out = CliRunner().invoke(app, ["init", str(path), "--labels", "ill", "--out", str(tmp_path / "r.yaml")])
    assert out.exit_code == 0, out.output
    result = fl.run(tmp_path / "r.yaml", tmp_path / "run", overrides=["training.rounds=1"])
    assert {*result.run.by_client()} == {"Köln", "Ulm"}
    written = tmp_path / "p.csv"
    out = CliRunner().invoke(app, ["predict", str(tmp_path / "run"), str(path), "--out", str(written)])
    assert out.exit_code == 0, out.output
    assert pandas.read_csv(written).site.value_counts().to_dict() == {"Ulm": 60, "Köln": 40}
    with pytest.raises(DataError, match=r"sites.xlsx: sheets 'Ulm' and 'Köln' have cells, expected one such sheet"):
        read(tmp_path, None)


def test_a_list_of_codes_beside_the_table_is_left_out_with_a_note(tmp_path: Path) -> None:
    """Its cells may be merged, and it has the names of the columns below each other."""

    def codes(book: Any) -> None:
        for line in [["Codes"], ["column", "meaning"], *([name, "see the protocol"] for name in NAMES)]:
            book["codes"].append(line) if "codes" in book.sheetnames else book.create_sheet("codes", 0).append(line)
        book["codes"].merge_cells("A1:B1")

    path = save(tmp_path / "bonn.xlsx", [NAMES, *rows()], codes)
    for found, before in ((read(path, "site"), ""), (read(tmp_path, "site"), "file 'bonn': ")):
        assert [*found.frame] == NAMES
        assert found.notes == (f"{before}sheet 'codes' is left out: it has no columns of sheet 'Sheet'",)


def test_a_stata_file_is_a_table_with_its_labels(tmp_path: Path) -> None:
    frame = pandas.DataFrame(rows(), columns=NAMES).drop(columns="at").astype({"ill": "category"})
    frame.to_stata(tmp_path / "t.dta", write_index=False, version=118)
    found = read(tmp_path / "t.dta", "site").frame
    assert found.ill.tolist() == frame.ill.tolist()
    assert (found.since.dtype.kind, [*found]) == ("M", [*frame])
    pandas.testing.assert_series_equal(found.age, frame.age)
    (tmp_path / "u.dta").write_bytes((tmp_path / "t.dta").read_bytes()[:900])
    with pytest.raises(DataError, match="u.dta cannot be read as a Stata file"):
        read(tmp_path / "u.dta", None)


def test_a_file_that_is_none_and_an_old_one_are_refused(tmp_path: Path) -> None:
    (tmp_path / "t.xlsx").write_text("a,b\n1,2\n")
    with pytest.raises(DataError, match="t.xlsx cannot be read as an Excel workbook"):
        read(tmp_path / "t.xlsx", None)
    (tmp_path / "t.xls").touch()
    with pytest.raises(DataError, match=r"expected a name that ends in .csv, .*.xlsx or .parquet; save a spreadsheet"):
        read(tmp_path / "t.xls", None)


def test_a_far_cell_is_refused_where_the_cells_before_it_need_too_much_memory(tmp_path: Path) -> None:
    """The reader allocates all of them, and the process would end; also where only rows say their place."""

    def far(book: Any) -> None:
        book.active.cell(500_000, 16_000, 1)

    path = save(tmp_path / "t.xlsx", [["a", "b"], [1, 2]], far)
    with pytest.raises(DataError, match="a table that ends in row 500000 and column 16000 needs 800 GB of memory"):
        read(path, None)
    row = b'<row r="1048576">' + 16_000 * b"<c><v>1</v></c>" + b"</row>"
    with zipfile.ZipFile(path) as before, zipfile.ZipFile(tmp_path / "u.xlsx", "w") as after:
        for name in before.namelist():
            after.writestr(name, before.read(name).replace(b"</sheetData>", row + b"</sheetData>"))
    with pytest.raises(DataError, match="ends in row 1048576 and column 16000 needs"):
        read(tmp_path / "u.xlsx", None)
    save(tmp_path / "t.xlsx", [["a", "b"], [1, 2]], lambda book: book.active.cell(50_000, 3, 1))
    assert read(tmp_path / "t.xlsx", None).frame.shape == (2, 3)


def test_an_error_of_a_formula_is_a_missing_value(tmp_path: Path) -> None:
    frame = read(save(tmp_path / "t.xlsx", [["a", "b"], [1, "#DIV/0!"], [2, 3], [3, "NA"]]), None).frame
    assert frame.b.tolist()[1:] == [3, "NA"]
    assert pandas.isna(frame.b[0])
