"""Tables as hospitals have them: each is read, trained and predicted, or refused in one sentence."""

from __future__ import annotations

import gzip
import random
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import fedloom.cli.app as cli
from fedloom.core import machine
from fedloom.core.disclosure import hidden
from fedloom.data import DATASETS
from fedloom.data.combine import loaded
from fedloom.data.tables.columns import draft
from fedloom.data.tables.read import read
from fedloom.data.tables.table import counts
from fedloom.errors import RecipeError, UserError
from fedloom.federation.recipes.loader import load

HEAD = ["site", "age", "dose", "kind", "ill"]
Rows = list[list[str]]


def rows(count: int = 90, sites: tuple[str, ...] = ("north", "south", "west")) -> Rows:
    """A clean table: whether one is ill follows from age and kind, but not entirely."""
    draw = random.Random(0)
    made = []
    for i in range(count):
        age, kind = draw.gauss(60, 9), draw.choice("abc")
        ill = int(age + 6 * (kind == "a") + draw.gauss(0, 8) > 62)
        made.append([sites[i % len(sites)], f"{age:.1f}", f"{draw.gauss(3, 1):.2f}", kind, str(ill)])
    return made


def text(made: Rows, head: list[str] | None = None, sep: str = ",", end: str = "\n") -> str:
    return end.join(sep.join(line) for line in [head or HEAD, *made]) + end


def column(values: Callable[[int], str], name: str = "extra", made: Rows | None = None) -> str:
    """The clean table with one more column."""
    return text([[*line, values(i)] for i, line in enumerate(made or rows())], [*HEAD, name])


def changed(place: int, values: Callable[[int, str], str]) -> str:
    """The clean table with other cells in a column."""
    return text([[*line[:place], values(i, line[place]), *line[place + 1 :]] for i, line in enumerate(rows())])


RUNS = ""
"""The recipe runs, and nothing of the table is left out."""
GOOD: dict[str, tuple[str | bytes, str] | tuple[str | bytes, str, tuple[str, ...]]] = {
    "a byte order mark": ("\ufeff" + text(rows()), RUNS),
    "semicolons and decimal commas": (text(rows(), sep=";").replace(".", ","), "age (number), dose (number)"),
    "Windows in Western Europe": (
        text(rows(90, ("Zürich", "Genève", "Bern")), sep=";").replace(".", ",").encode("cp1252"),
        "t.csv: it is not in UTF-8 and is read as Windows-1252 (Western Europe); if letters are wrong, save it as CSV",
    ),
    "a separator in the first line": ("sep=;\n" + text(rows(), sep=";"), RUNS),
    "tabs": (text(rows(), sep="\t"), RUNS),
    "lines of Windows": (text(rows(), end="\r\n"), RUNS),
    "quotes with commas and lines in them": (column(lambda i: '"a, ""b""\n c"' if i % 2 else "d"), "extra (category)"),
    "empty lines at the end": (text(rows()) + "\n\n\n", RUNS),
    "spaces around cells": (text(rows(), sep=" , "), RUNS),
    "spaces in names": (text(rows(), [" site ", "age at  entry", "dose", "kind", "ill"]), "age at entry (number)"),
    "names in other alphabets": (
        text(rows(90, ("Zürich", "東京", "Łódź")), ["site", "возраст", "dosé", "kind", "ill"]),
        "возраст (number), dosé (number)",
    ),
    "sites that no folder can be called": (text(rows(90, ("St. Mary's", "A/B", "C:D"))), RUNS),
    "sites that are numbers": (text(rows(90, ("3", "12", "7.0"))), RUNS),
    "missing cells of all kinds": (
        changed(1, lambda i, age: ["", "NA", "NaN", " "][i % 4] if i % 5 == 0 else age),
        RUNS,
    ),
    "a code for missing": (changed(1, lambda i, age: "-9" if i % 5 == 0 else age), RUNS, ("--missing", "-9")),
    "a mark for missing": (changed(1, lambda i, age: "?" if i % 9 == 0 else age), "age (number)", ("--missing", "?")),
    "a code that no cell has": (
        changed(1, lambda i, age: "-9" if i % 5 == 0 else age),
        "no cell is -99: does another code mean missing?",
        ("--missing", "-99", "--features", "age,dose,kind"),
    ),
    "a mark that is not named": (
        changed(1, lambda i, age: "?" if i % 9 == 0 else age),
        "left out: age: it has numbers and 1 text such as '?'; if that means missing, name it with --missing '?'",
    ),
    "no value in a column": (column(lambda i: ""), "left out: extra: no cell has a value"),
    "one value in a column": (column(lambda i: "5"), "left out: extra: it has one value only"),
    "a column that one site never filled": (column(lambda i: "" if i % 3 == 0 else str(i % 7)), "extra (number)"),
    "booleans": (column(lambda i: ["True", "False"][i % 2]), "extra (yes/no)"),
    "yes and no": (column(lambda i: ["Yes", "no", ""][i % 3]), "extra (yes/no)"),
    "codes": (column(lambda i: str(i % 4)), "extra (category)"),
    "dates": (
        column(lambda i: f"2020-01-{i % 28 + 1:02d}"),
        "left out: extra: it has dates or times; make a number of it",
    ),
    "dates of Germany": (column(lambda i: f"{i % 28 + 1}.01.2020"), "left out: extra: it has dates"),
    "infinite numbers": (
        column(lambda i: "inf" if i == 4 else str(i / 7)),
        "left out: extra: it has infinite numbers; if that means missing, name it with --missing inf",
    ),
    "huge whole numbers": (column(lambda i: str(10**30 + i % 9 * 10**28)), "extra (number)"),
    "numbers whose squares overflow": (column(lambda i: f"{i}e300"), "left out: extra: it has numbers up to 8.9e+301"),
    "an identifier by its name": (
        column(lambda i: str(i % 40), "PatientID"),
        "left out: PatientID: its name says that",
    ),
    "an identifier by its values": (
        column(lambda i: f"x{i * 7919}"),
        "extra: 90 of 90 values differ, so it looks like",
    ),
    "an index without a name": (
        text([[str(i), *line] for i, line in enumerate(rows())], ["", *HEAD]),
        "left out: column 1",
    ),
    "free text": (column(lambda i: f"word {i % 60}"), "left out: extra: it has 60 different texts, more than 50"),
    "the label in other words": (
        text([[*line, "yx"[int(line[4])]] for line in rows()], [*HEAD, "extra"]),
        "left out: extra: it predicts the label 'ill' nearly by itself (AUC 1.000",
    ),
    "a column that is there for the ill alone": (
        text([[*line, "7.5" if line[4] == "1" else "", "1"] for line in rows()], [*HEAD, "extra", "one"]),
        "left out: extra: it predicts the label 'ill' nearly by itself",
    ),
    "an outcome by its name": (
        column(lambda i: str(i % 2), "died"),
        "left out: died: its name says that it is an outcome",
    ),
    "texts as labels": (changed(4, lambda i, ill: ["well", "ill"][int(ill)]), "ill (binary: ill, well)"),
    "yes and no as labels": (changed(4, lambda i, ill: ["N", "Y"][int(ill)]), "ill (binary: N, Y)"),
    "labels as fractions with missing ones": (
        changed(4, lambda i, ill: "" if i % 7 == 0 else f"{ill}.0"),
        "ill (binary: 0, 1)",
    ),
    "a real number as a label": (changed(4, lambda i, ill: f"{float(ill) + i / 91:.3f}"), "ill (regression)"),
    "a label with 15 classes": (changed(4, lambda i, ill: str(i % 15)), "ill (classification: 0, 1, 2"),
    "a label with one class at a site": (changed(4, lambda i, ill: "1" if i % 3 == 0 else ill), RUNS),
    "a label that a site lacks": (changed(4, lambda i, ill: "" if i % 3 == 0 else ill), RUNS),
    "a site with one row": (text([["east", "50.5", "3", "a", "1"], *rows()]), RUNS),
    "a site with two rows": (text([["east", "50.5", "3", "a", "1"], ["east", "51", "3", "b", "0"], *rows()]), RUNS),
    "a label called type": (text(rows(), [*HEAD[:4], "type"]), "type (binary: 0, 1)", ("--labels", "type")),
    "a label with a point in its name": (text(rows(), [*HEAD[:4], "ill.6m"]), "ill.6m", ("--labels", "ill.6m")),
    "percent signs": (column(lambda i: f"{i % 70} %"), "left out: extra: it has numbers with something around them"),
    "units": (column(lambda i: f"$ {i}.5"), "such as '$ 0.5'; write numbers alone"),
    "thousands with a decimal point": (column(lambda i: f'"{i + 1},234.{i % 9}"'), "extra (number)"),
    "thousands with a decimal comma": (column(lambda i: f'"{i + 1}.234,{i % 9}"'), "extra (number)"),
    "a minus sign of typesetters": (column(lambda i: f"{chr(0x2212) if i % 3 else ''}{i / 7:.2f}"), "extra (number)"),
    "separators at the end of all lines": (text([[*line, ""] for line in rows()], [*HEAD, ""]), "left out: column 6"),
    "dashes of typesetters in a name": (column(lambda i: str(i / 7), "age \u2013 years"), "age \u2013 years (number)"),
    "true, false, 1 and 0": (column(lambda i: ["TRUE", "0", "FALSE", "1"][i % 4]), "extra (yes/no)"),
    "yes and no in several writings": (column(lambda i: ["yes ", "Yes", "no", "NO"][i % 4]), "extra (yes/no)"),
    "a code for missing that is not named": (
        changed(1, lambda i, age: "-99" if i % 8 == 0 else age),
        "left out: age: 12 cells are -99 and no other is below 0; if that means missing, name it with --missing -99",
    ),
    "a large code for missing that is not named": (
        changed(1, lambda i, age: "999" if i % 8 == 0 else age),
        "left out: age: 12 cells are 999 and no other is nearly as large",
    ),
    "several marks that are not named": (
        changed(1, lambda i, age: ["NULL", ".", "N/A"][i % 3] if i % 5 == 0 else age),
        "name it with --missing '.,N/A,NULL'",
    ),
    "a code for missing among texts": (
        changed(3, lambda i, kind: "-9" if i % 8 == 0 else kind),
        "left out: kind: 12 cells are -9 and no other is a number; if that means missing, name it with --missing -9",
    ),
    "a code for missing among few numbers": (
        column(lambda i: ["0", "1", "-9"][i % 3]),
        "left out: extra: 30 cells are -9 and no other is below 0",
    ),
    "texts of whole reports": (column(lambda i: "word " * 999 if i % 9 else "x"), "{name: texts, text: extra, "),
    "sentences that all differ": (column(lambda i: f"she came in {i} days late"), "it has sentences, which only the"),
    "times of day": (column(lambda i: f"{i % 24:02d}:30"), "left out: extra: it has dates or times"),
    "dates with names of months": (column(lambda i: f"{i % 28 + 1} Jan 2020"), "left out: extra: it has dates"),
    "dates of eight digits": (column(lambda i: f"202001{i % 28 + 1:02d}"), "left out: extra: it has dates"),
    "a label at one site alone": (
        changed(4, lambda i, ill: "" if i % 3 else ill),
        "site 'south' is left out: 0 labelled rows found, at least 1 needed",
    ),
    "rows that occur twice": (text(rows() + rows()), "180 rows are identical to others: copies can be in train and"),
    "patients that occur twice": (
        column(lambda i: str(i % 45), "patient_id"),
        "patient_id: 45 values in 90 rows, so rows of one patient can be in train and test",
    ),
    "lines that end in several ways": (text(rows()).replace("\n", "\r\n", 30), RUNS),
    "old lines of Macintosh": (text(rows(), end="\r"), RUNS),
    "many columns": (
        text(
            [[*line, *(str(i * j % 97 / 7) for j in range(1, 96))] for i, line in enumerate(rows())],
            [*HEAD, *(f"c{j}" for j in range(1, 96))],
        ),
        "c95 (number)",
    ),
    "quoted numbers with thousands": (
        column(lambda i: f'"{i % 9 + 1},{i % 7}00"'),
        "the comma in numbers such as '1,000'",
    ),
}
BAD: dict[str, tuple[str | bytes, str] | tuple[str | bytes, str, tuple[str, ...]]] = {
    "nothing": ("", "cannot be read as a .csv file (it is empty)"),
    "names alone": (",".join(HEAD) + "\n", "no row found, expected a line of names and one line per example"),
    "another encoding": (text(rows(90, ("Москва", "b"))).encode("cp1251"),
                         "'Ìîñê' found, letters of another encoding; save it as CSV in UTF-8"),
    "an encoding of old": (text(rows(90, ("Zürich", "b"))).encode("cp850"),
                           "'\ufffd' found, letters of another encoding; save it as CSV in UTF-8"),
    "what is no text": (b"\x89PNG\r\n\x1a\n\x00\xff" * 40, "save it as CSV in UTF-8"),
    "a line of more cells": (text(rows()) + "north,1,2,a,1,9\n", "line 92: expected 5 cells like the first line"),
    "a line of fewer cells": (text(rows()) + "north,1\n", "line 92: expected 5 cells like the first line, found 2"),
    "a quote that is never closed": (text(rows()) + 'north,"1,2,a,1\n', "cannot be read as a .csv file ("),
    "two columns of one name": (column(lambda i: "1", "age"), "file (columns 2 and 6 are all named 'age'; rename them"),
    "sentences as an input": (column(lambda i: f"she came in {i} days late"), "column 'extra': it has sentences, which",
                              ("--features", "extra")),
    "missing sites": (changed(0, lambda i, site: "" if i == 3 else site),
                      "rows without a site found: 1, such as row 4:"),
    "sites that differ in case": (changed(0, lambda i, site: ["Oslo", "oslo", "Bergen"][i % 3]),
                                  "sites 'Oslo' and 'oslo' would both be client 'oslo'; write them alike"),
    "labels that differ in case": (changed(4, lambda i, ill: [["no", "No"], ["yes", "YES"]][int(ill)][i % 2]),
                                   "labels 'No' and 'no' found, which differ in case only; write them alike"),
    "labels in two writings": (changed(4, lambda i, ill: [["FALSE", "TRUE"], ["0", "1"]][i % 2][int(ill)]),
                               "0, 1, FALSE, TRUE found for yes and no; write all yes alike"),
    "a code for missing among labels": (changed(4, lambda i, ill: "-9" if i % 8 == 0 else ill),
                                        "'ill': 12 cells are -9 and no other is below 0"),
    "a code for missing among labels that are texts": (
        changed(4, lambda i, ill: "-9" if i % 8 == 0 else ["mild", "severe"][int(ill)]),
        "'ill': 12 cells are -9 and no other is a number"),
    "texts as real labels": (changed(4, lambda i, ill: ["mild", "severe"][int(ill)]),
                             "texts are classes of a label", ("--labels", "ill=regression")),
    "an unknown kind": (text(rows()), "unknown kind 'regresion'. Did you mean 'regression'?",
                        ("--labels", "ill=regresion")),
    "a count": (text(rows()), "unknown kind 'count'. Known: binary", ("--labels", "ill=count")),
    "a count, with what to do": (text(rows()), "a count is a regression: 'ill=regression'", ("--labels", "ill=count")),
    "a task without a name": (text(rows()), "'=ill' found, expected NAME, NAME=KIND or TASK=A+B", ("--labels", "=ill")),
    "a label twice": (text(rows()), "--labels: 'ill' is named twice", ("--labels", "ill,ill")),
    "a label that is left out": (text(rows()), "column 'ill': it is a label, so it cannot be left out as well",
                                 ("--leave-out", "ill")),
    "a site of its own for every row": (column(lambda i: f"patient {i}"), "90 rows of 90 clients found, expected at",
                                        ("--clients", "extra")),
    "a quotation mark that is not closed": (
        text(rows()) + 'north,61,3,"a,0\nsouth,62,3,b,1\n',
        "the row that begins in line 92: unexpected end of data; check its quotation marks",
    ),
    "a quotation mark within quotes": (
        text(rows()) + 'north,61,3,"an "a"",0\n',
        "the row that begins in line 92: ',' expected after '\"'; check its quotation marks",
    ),
    "a line of totals": (text(rows()) + "Total,5400,270,,45\n", "if labels are amounts, use --labels 'ill=regression'"),
    "lines above the names": ("# made in 2020\n" + text(rows()), "line 2: expected 1 cells like the first line"),
    "separators at the end of rows alone": (text(rows()).replace("\n", ",\n").replace(",\n", "\n", 1),
                                            "line 2: expected 5 cells like the first line"),
    "a file of Excel": (b"PK\x03\x04" + bytes(range(256)) * 9, "it is an Excel file or a ZIP archive; save its table"),
    "UTF-16": (text(rows()).encode("utf-16"), "save it as CSV in UTF-8"),
    "UTF-16 without a mark": (text(rows()).encode("utf-16-le"), "there is a NUL byte in it; save it as CSV in UTF-8"),
    "a NUL byte": (text(rows()).replace("north", "no\0rth", 1), "there is a NUL byte in it"),
    "two sites of one name": (text(rows(90, ("a/b", "a:b"))), "'a/b' and 'a:b' would both be client 'a-b'"),
    "no such label": (text(rows()), "no column 'il'. Did you mean 'ill'?", ("--labels", "il")),
    "no such site": (text(rows()), "no column 'sit'. Did you mean 'site'?", ("--clients", "sit")),
    "no such feature": (text(rows()), "no column 'agee'. Did you mean 'age'?", ("--features", "agee")),
    "a label as a feature": (text(rows()), "column 'ill': it is a label or the site", ("--features", "ill,age")),
    "a label without a value": (changed(4, lambda i, ill: ""), "'ill': no cell has a label: leave the task out"),
    "a label with one class": (changed(4, lambda i, ill: "1"), "'ill': all labels are '1', so there is nothing"),
    "dates as labels": (changed(4, lambda i, ill: f"2020-01-{i % 28 + 1:02d}"), "column 'ill': dates found"),
    "infinite labels": (changed(4, lambda i, ill: "inf" if i == 2 else f"{i / 7}"), "'ill': 1 infinite labels found"),
    "a mark among real labels": (changed(4, lambda i, ill: "?" if i % 9 == 0 else f"{i / 7:.2f}"),
                                 "'ill': numbers and texts such as '?' found; if that means missing,"),
    "a label of its own for every row": (changed(4, lambda i, ill: f"word {i}"), "90 different labels in 90 rows"),
    "no column beside labels and sites": (text([[line[0], line[4]] for line in rows()], ["site", "ill"]),
                                          "no column remains as an input"),
    "a feature of dates": (column(lambda i: f"2020-01-{i % 28 + 1:02d}"), "column 'extra': it has dates or times;",
                           ("--features", "extra,age")),
    "a metric of something else": (text(rows()), "metric 'rmse' found, expected one of auc,", ("--metric", "rmse")),
}  # fmt: skip


def command(*words: Any) -> tuple[int, str]:
    """Exit code and output of a command; a traceback is an error of the test."""
    done = CliRunner().invoke(cli.app, [str(word) for word in words])
    if done.exception is None or isinstance(done.exception, SystemExit):
        return done.exit_code, done.output
    said = cli.message_of(done.exception) if isinstance(done.exception, Exception) else None
    assert said is not None, repr(done.exception)
    return 2, said


@pytest.mark.parametrize(("column", "task"), [("Qualität", "Qualitat"), ("Verschleiß", "Verschleiss"), ("温度 a", "a")])
def test_tasks_with_accents_are_named_in_ascii(column: str, task: str, tmp_path: Path) -> None:
    text_, said = text(rows(), ["site", "age", "dose", "kind", column]), tmp_path / "t.yaml"
    assert init(tmp_path, (text_, "", ("--labels", column)))[0] == 0
    assert load(str(said)).data.params["tasks"][task].column == column
    old = re.sub(rf"(?m)^( +){task}:", r"\1Qualit_t:", said.read_text("utf-8"))  # a recipe of an earlier version
    said.write_text(old, "utf-8")
    assert command("show", said)[0] == 0


def init(folder: Path, case: Any) -> tuple[int, str]:
    content, _, *more = case
    options = {"--labels": "ill", "--clients": "site", "--method": "fedavg", "--rounds": "1"}
    words = more[0] if more else ()
    options |= dict(zip(words[::2], words[1::2], strict=True))
    (folder / "t.csv").write_bytes(content if isinstance(content, bytes) else content.encode())
    return command("init", folder / "t.csv", *(w for each in options.items() for w in each), "--out", folder / "t.yaml")


def test_only_columns_that_may_be_inputs_are_said_to_be_usable(tmp_path: Path) -> None:
    rows = "".join(f"{'AB'[i % 2]},{i % 7},{1000 + i},2024-01-{1 + i % 28:02d},x,{i % 2}\n" for i in range(60))
    code, said = init(tmp_path, ("site,age,patient_id,when,fixed,ill\n" + rows, ""))
    assert code == 0, said
    assert {line.split(": ")[1] for line in said.splitlines() if line.startswith("left out")} == {
        "patient_id",
        "when",
        "fixed",
    }
    assert "To use patient_id, name all inputs with --features; to agree, name what is left out with" in said


@pytest.mark.parametrize("name", GOOD)
def test_a_table_that_works(name: str, tmp_path: Path) -> None:
    case = GOOD[name]
    code, said = init(tmp_path, case)
    assert code == 0, said
    assert case[1] in said
    used = {word.split(" (")[0] for line in said.splitlines()[:2] for word in line.split(": ", 1)[1].split("), ")}
    left = [
        word for line in said.splitlines() if line.startswith("left out: ") for word in line.split(": ")[1].split(", ")
    ]
    if case[1] == RUNS:
        assert not left
    assert len(used) + len(left) >= 4  # all columns but the sites
    code, said = command("show", tmp_path / "t.yaml")
    assert code == 0, said
    code, said = command("run", tmp_path / "t.yaml", "--out", tmp_path / "run", "-q")
    assert (code, "finished" in said) == (0, True), said
    code, said = command("predict", tmp_path / "run", tmp_path / "t.csv", "--out", tmp_path / "p.csv")
    assert code == 0, said
    pandas = pytest.importorskip("pandas")
    from fedloom.data.tables.read import read

    made = pandas.read_csv(tmp_path / "p.csv")
    assert len(made) == len(read(tmp_path / "t.csv", "site").frame)
    chances = made[[column for column in made.columns if column.startswith("p(")]]
    assert not made.iloc[:, 1:].isna().any().any()
    assert ((chances.sum(axis=1) - 1).abs() < 1e-6).all() or not len(chances.columns)


@pytest.mark.parametrize("name", BAD)
def test_a_table_that_is_refused(name: str, tmp_path: Path) -> None:
    code, said = init(tmp_path, BAD[name])
    assert code == 2, said
    assert BAD[name][1] in said
    assert "\n" not in said.strip()
    assert not (tmp_path / "t.yaml").exists()


def test_a_zipped_table_and_a_folder_with_a_file_for_each_site(tmp_path: Path) -> None:
    sites = tmp_path / "sites"
    sites.mkdir()
    for site in ("north", "south"):
        own = [line[1:] for line in rows() if line[0] == site]
        with gzip.open(sites / f"{site}.csv.gz", "wt") as file:
            file.write(text(own, HEAD[1:]))
    words = ("--labels", "ill", "--method", "fedavg", "--rounds", 1)
    code, said = command("init", sites, *words, "--out", tmp_path / "r.yaml")
    assert code == 0, said
    code, said = command("show", tmp_path / "r.yaml", "--json")
    assert code == 0, said
    assert '"client": "north"' in said


def folder(at: Path, files: dict[str, str]) -> Path:
    at.mkdir()
    for name, content in files.items():
        (at / f"{name}.csv").write_text(content)
    return at


def test_what_is_advised_for_codes_with_a_decimal_comma_names_these_codes(tmp_path: Path) -> None:
    cells = ["<0,5", "none"]
    extra = [cells[i % 2] if i % 9 == 0 else f"{i / 7:.3f}" for i in range(90)]
    made = [[*line, cell] for line, cell in zip(rows(), extra, strict=True)]
    table = text(made, [*HEAD, "extra"], sep=";").replace(".", ",")
    said = init(tmp_path, (table, ""))[1]
    advised = re.search("--missing ('.*') \\(in a recipe", said)
    assert advised is not None, said
    (tmp_path / "t.yaml").unlink()
    code, said = init(tmp_path, (table, "", ("--missing", shlex.split(advised[1])[0])))
    assert code == 0, said
    assert "extra (number)" in said
    assert yaml.safe_load((tmp_path / "t.yaml").read_text())["data"]["missing"] == cells


def test_a_compressed_table_is_as_large_as_what_is_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "t.csv.gz"
    file.write_bytes(gzip.compress(b"a,b\n" + b"1,2\n" * 300_000))
    monkeypatch.setattr(machine, "free_memory", lambda: 4 * 10**6)
    with pytest.raises(UserError, match=r"t.csv.gz needs .* GB of memory"):
        read(file, None)


def test_categories_that_a_recipe_lists_are_different() -> None:
    with pytest.raises(RecipeError, match="data.inputs.sex: F, F found, expected different names"):
        load(
            {
                "data": {
                    "name": "table",
                    "path": "t.csv",
                    "inputs": {"sex": ["F", "F"]},
                    "tasks": {"w": {"kind": "regression"}},
                }
            }
        )


def test_a_recipe_quotes_no_cell_of_a_column_that_is_left_out(tmp_path: Path) -> None:
    cells = ["declined", "Anna Mueller"]
    said = init(tmp_path, (column(lambda i: cells[i // 40] if i % 40 == 9 and i < 80 else str(i % 60 / 7)), ""))[1]
    assert "such as 'Anna Mueller'; if that means missing, name it with --missing 'Anna Mueller,declined'" in said
    recipe = (tmp_path / "t.yaml").read_text()
    assert "extra: it has numbers and 2 texts\n" in recipe
    assert not any(cell in recipe for cell in cells)


def test_columns_of_two_files_that_differ_in_case_are_refused(tmp_path: Path) -> None:
    sites = folder(tmp_path / "s", {"Oslo": text(rows()), "Rome": text(rows(), ["site", "Age", *HEAD[2:]])})
    code, said = command("init", sites, "--labels", "ill", "--clients", "site", "--out", tmp_path / "r.yaml")
    assert (code, "columns 'age' (in Oslo) and 'Age' (in Rome) differ in case only" in said) == (2, True), said


def test_files_that_are_parts_of_a_split_are_no_sites(tmp_path: Path) -> None:
    content = [text([r[1:] for r in rows()], HEAD[1:]), text(rows())]
    for number, (site, expected) in enumerate(
        ((None, "parts of a split, expected a file for each site"), ("site", ""))
    ):
        split = folder(tmp_path / f"s{number}", dict.fromkeys(("Train", "test"), content[number]))
        options = () if site is None else ("--clients", site)
        code, said = command("init", split, "--labels", "ill", *options, "--out", tmp_path / f"r{number}.yaml")
        assert (code, expected in said) == (0 if site else 2, True), said
    assert "parts of a split: their rows are joined, and each site's rows are split anew" in said


def test_a_column_of_train_and_test_is_no_input_and_says_which_rows_are_for_tests(tmp_path: Path) -> None:
    parts = ["train", "Train", "test", "train"]
    file = tmp_path / "t.csv"
    file.write_text(text([[*row, parts[i % 4], str(i // 8)] for i, row in enumerate(rows())], [*HEAD, "fold", "pid"]))
    words = ("--labels", "ill", "--clients", "site", "--method", "fedavg", "--rounds", 1, "--out", tmp_path / "r.yaml")
    code, said = command("init", file, *words)
    assert (code, "left out: fold: it names the part of each row, train or test (data.split)" in said) == (0, True), (
        said
    )
    recipe = load(str(tmp_path / "r.yaml"), ["data.group=pid"])
    assert recipe.data.arguments["split"] == "fold"
    data = loaded(recipe.data.entry, 0, recipe.data.arguments)
    assert (len(data.test), data.redrawn) == (len(rows()) // 4, False)
    assert any("values of pid have rows for tests and for training: test scores are too good" in n for n in data.notes)
    for change, problem in (
        ("data.time=age", "data.split names the rows for tests, and so does data.time: leave one of them out"),
        ("data.split=site", "found, expected train, val or test in each row"),
    ):
        code, said = command("show", tmp_path / "r.yaml", change)
        assert (code, problem in said) == (2, True), said


def test_rows_of_val_are_for_validation_and_a_site_without_training_rows_is_left_out(tmp_path: Path) -> None:
    parts = ["train", "test", "train", "valid"]
    part = [parts[i // 3 % 4] if i % 3 else "test" for i in range(len(rows()))]  # the first site has tests alone
    file = tmp_path / "t.csv"
    file.write_text(text([[*row, each] for row, each in zip(rows(), part, strict=True)], [*HEAD, "fold"]))
    section = draft(file, ["ill"], "site").section
    assert section["split"] == "fold"
    data = loaded(DATASETS["table"], 0, vars(DATASETS["table"].params(path=str(file), **section)))
    shares = data.deal(None, 0).shares
    assert [share.client for share in shares] == ["south", "west"]
    assert "site 'north' is left out: no labelled row for training found" in data.notes
    counts = [sum(each == name for i, each in enumerate(part) if i % 3) for name in ("train", "valid", "test")]
    found = sum(len(share.train) for share in shares), sum(len(share.val) for share in shares), len(data.test)
    assert [*found] == counts


def test_each_file_of_a_folder_is_a_site_whatever_points_its_name_has(tmp_path: Path) -> None:
    sites = folder(tmp_path / "s", dict.fromkeys(("Oslo.2023", "Oslo.2024"), text([r[1:] for r in rows()], HEAD[1:])))
    words = (sites, "--labels", "ill", "--method", "fedavg", "--rounds", 1, "--out", tmp_path / "r.yaml")
    assert command("init", *words)[0] == 0
    said = command("show", tmp_path / "r.yaml", "--json")[1]
    assert all(f'"client": "Oslo.{year}"' in said for year in (2023, 2024)), said
    (sites / "Oslo.2023.tsv").write_text("age\till\n1\t1\n")
    (tmp_path / "r.yaml").unlink()
    code, said = command("init", *words)
    assert (code, "files 'Oslo.2023.csv' and 'Oslo.2023.tsv' would both be site 'Oslo.2023'" in said) == (2, True), said


def test_a_comma_after_a_leading_zero_is_decimal(tmp_path: Path) -> None:
    """A column of three digits behind the comma, as laboratories write it, is read where a number is below 1."""
    table = text([[*r, f"{i % 5 // 4},{100 + i}"] for i, r in enumerate(rows())], [*HEAD, "crea"], ";").replace(
        ".", ","
    )
    assert "crea (number)" in init(tmp_path, (table, ""))[1]
    (tmp_path / "t.yaml").unlink()
    assert "the comma in numbers such as '1,100' may be" in init(tmp_path, (table.replace(";0,", ";1,"), ""))[1]


@pytest.mark.parametrize(
    ("cells", "numbers"),
    [
        (["1.333", "950", "", "12.000"], [1333, 950, np.nan, 12000]),
        (["1.333", "950,5", "", "1.000.000"], [1333, 950.5, np.nan, 1e6]),
        (["1.333", "950,5", "", "1.5"], [1.333, 950.5, np.nan, 1.5]),
        (["0.333", "950", "", "1.000"], [0.333, 950, np.nan, 1]),
    ],
)
def test_where_commas_are_decimal_points_part_thousands(tmp_path: Path, cells: list[str], numbers: list[float]) -> None:
    """A spreadsheet writes all numbers of a file alike: read as decimal, 1.333 would be less than 950."""
    lines = [f"{i},5;{cell}" for i, cell in enumerate(cells)]
    (tmp_path / "t.csv").write_text("\n".join(["age;cost", *lines]))
    np.testing.assert_array_equal(read(tmp_path / "t.csv", None).column("cost").numbers, numbers)


def test_a_recipe_is_named_after_its_file(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(text(rows()))
    for file, name in {"my recipe (1).yaml": "my-recipe-1-", "für uns.yaml": "für-uns"}.items():
        words = ("--labels", "ill", "--clients", "site", "--out", tmp_path / file)
        code, said = command("init", tmp_path / "t.csv", *words)
        assert (code, f"fedloom run '{tmp_path / file}'" in said) == (0, True), said
        assert yaml.safe_load((tmp_path / file).read_text())["name"] == name


def test_a_class_with_a_decimal_comma_is_the_one_without(tmp_path: Path) -> None:
    """A spreadsheet writes 0 and 1 of a column with empty cells as 0,0 and 1,0; another site's file has 0 and 1."""
    made = [[*row, "" if i % 7 == 0 else f"{i % 2},0", f"{i % 4},0", ("1,0", "0,0", "n/a")[i // 7 % 3]]
            for i, row in enumerate(rows())]  # fmt: skip
    table = text(made, [*HEAD, "smoker", "grade", "died"], ";").replace(".", ",")
    code, said = init(tmp_path, (table, "", ("--labels", "ill,died", "--missing", "n/a")))
    assert (code, "smoker (yes/no), grade (category)" in said) == (0, True), said
    recipe = yaml.safe_load((tmp_path / "t.yaml").read_text())
    assert recipe["data"]["tasks"]["died"]["classes"] == ["0", "1"]
    found = read(tmp_path / "t.csv", None, ["n/a"])
    assert found.column("grade").distinct == ["0", "1", "2", "3"]
    assert found.column("died").coded(["0,0", "1,0"])[1] == []  # as a recipe may list them
    assert read(tmp_path / "t.csv", None, [1]).column("died").distinct == ["0", "n/a"]


def test_commas_that_another_file_would_decide_are_refused(tmp_path: Path) -> None:
    def made(cell: str) -> str:
        return text(
            [[*r[1:], f'"{cell}"' if i % 2 else f'"{i + 1},500"'] for i, r in enumerate(rows())], [*HEAD[1:], "chol"]
        )

    words = ("--labels", "ill", "--method", "fedavg", "--rounds", 1, "--out", tmp_path / "r.yaml")
    sites = folder(tmp_path / "s", {"Oslo": made("1,540"), "Rome": made("1700,0")})
    code, said = command("init", sites, *words)
    assert (code, "column 'chol': numbers of a form such as 1,000 found at Oslo" in said) == (2, True), said
    assert "1,540" not in said
    assert command("init", sites, *words, "--leave-out", "chol")[0] == 0
    (sites / "Oslo.csv").write_text(made("154,5"))  # settles its own form
    (tmp_path / "r.yaml").unlink()
    assert "chol (number)" in command("init", sites, *words)[1]


def test_what_sites_code_differently_is_noted(tmp_path: Path) -> None:
    made = [[s, a, "" if s == "west" else d, "ABC"["abc".index(k)] if s == "north" else k, str(int(y) + (s == "west"))]
            for s, a, d, k, y in rows()]  # fmt: skip
    made[0][3] = "B-rare"
    for said in (init(tmp_path, (text(made), ""))[1], command("show", tmp_path / "t.yaml")[1]):
        assert "class 2 of ill is only at west, class 0 is not there: do sites code it alike?" in said
        assert "dose: no value at west" in said
        assert "kind: categories A, B, C, a, b, c differ only in case" in said
        assert "rare" not in said


def test_missing_codes_and_empty_files_of_other_sites_are_noted(tmp_path: Path) -> None:
    """The recipe is made at one site, whose table has neither."""
    (tmp_path / "own.csv").write_text(text(rows()))
    words = ("--labels", "ill,dose", "--clients", "site", "--method", "fedavg", "--rounds", 1)
    assert command("init", tmp_path / "own.csv", *words, "--out", tmp_path / "r.yaml")[0] == 0
    coded = text([[s, "999" if i % 9 == 0 else a, "-99" if s == "west" else d, k, y]
                  for i, (s, a, d, k, y) in enumerate(rows())])  # fmt: skip
    sites = folder(tmp_path / "s", {"other": coded, "nobody": text([])})
    recipe = (tmp_path / "r.yaml").read_text().replace(str(tmp_path / "own.csv"), str(sites))
    (tmp_path / "r.yaml").write_text(recipe)
    age = "column 'age': cells with 999 found at north (10), and no other is nearly as large; if 999 means missing, add"
    dose = "column 'dose': cells with -99 found at west (30), and no other is"
    for wanted in (("show",), ("data", "statistics"), ("run", "-q", "--out", tmp_path / "run")):
        code, said = command(*wanted, tmp_path / "r.yaml")
        assert (code, age in said, dose in said) == (0, True, True), said
        assert ("file 'nobody' is left out: it has no rows" in said) == (wanted[0] != "run")


def test_no_statistic_tells_a_count_of_few_rows_by_its_complement(tmp_path: Path) -> None:
    grades = "u" * 2 + "v" * 9 + "w" * 20 + "x" * 20 + "y" * 5 + "z" * 20 + "t" * 24
    made = [
        ["ab"[i >= 40], str(i), grade, "" if i == 50 else str(int(i < 38 or i % 2))] for i, grade in enumerate(grades)
    ]
    (tmp_path / "t.csv").write_text(text(made, ["site", "age", "grade", "ill"]))
    task = {"kind": "classification", "classes": [*"uvwxyzt"]}
    about = {"path": str(tmp_path / "t.csv"), "missing": None, "inputs": {"age": "number"},
             "tasks": {"ill": {"kind": "binary", "classes": ["0", "1"]}, "grade": task}}  # fmt: skip
    (a, b), *_ = counts({**about, "site": "site"}, 5)
    assert (a["ill"], b["ill"]) == ("40, 1 hidden", "all but <5, 1 51%")
    ((everyone,), *_) = counts({**about, "site": None}, 5)
    assert everyone["grade"] == "100, u <5, v 9%, w 20%, x 20%, y 5%, and 2 more classes"
    about["tasks"] = {"grade": {"kind": "multilabel", "columns": ["ill"]}}
    assert counts({**about, "site": "site"}, 5)[0][0]["grade"] == "40, ill hidden"


@given(st.lists(st.integers(0, 30), min_size=1, max_size=6), st.integers(0, 9), st.integers(1, 7))
def test_hidden_counts_together_are_no_count_of_few_rows(sizes: list[int], rest: int, minimum: int) -> None:
    hide = hidden(sizes, minimum, rest)
    assert all(hid for size, hid in zip(sizes, hide, strict=True) if 0 < size < minimum)
    together = rest + sum(size for size, hid in zip(sizes, hide, strict=True) if hid)
    assert not 0 < together < minimum or sum(sizes) + rest < minimum
