"""Wide and odd tables: 20,000 columns cost as much each as 20 do, and no list of them is printed."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pandas
import pytest
import yaml
from PIL import Image
from typer.testing import CliRunner

import fedloom.cli.app as cli
from fedloom.core.errors import MANY, DataError, shortened
from fedloom.data.tables import images
from fedloom.data.tables.columns import LISTED, association, draft
from fedloom.data.tables.read import Column, read
from fedloom.data.tables.table import Rows, RowSplit, _quarters, rows_of
from fedloom.data.tables.workbook import different


def wide(columns: int, rows: int = 90) -> pandas.DataFrame:
    rng = np.random.default_rng(0)
    site = {"site": [f"s{i % 3}" for i in range(rows)]}
    genes = {f"g{i}": rng.normal(6, 2, rows).round(3) for i in range(columns)}
    return pandas.DataFrame({**site, "sex": rng.choice(["f", "m"], rows), **genes, "ill": rng.integers(0, 2, rows)})


def init(*options: str) -> str:
    result = CliRunner().invoke(cli.app, ["init", *options], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_the_recipe_of_a_wide_table_lists_what_no_message_does(tmp_path: Path) -> None:
    wide(LISTED + 50).to_csv(tmp_path / "w.csv", index=False)
    out = tmp_path / "w.yaml"
    shown = init(str(tmp_path / "w.csv"), "--labels", "ill", "--clients", "site", "--out", str(out))
    assert "and 51 more" in shown
    about = yaml.safe_load(out.read_text())["data"]
    assert about["inputs"] == {"sex": "category", **{f"g{i}": "number" for i in range(LISTED + 50)}}
    assert all(len(line) < 1500 for line in draft(wide(LISTED + 50), ["ill"], "site", features=["g1", "sex"]).lines())


def test_many_sentences_are_shortened_and_columns_that_a_site_lacks_are_one() -> None:
    assert shortened(map(str, range(MANY + 3)))[-1] == "and 3 more notes like these"
    assert shortened(["a"]) == ["a"]
    frame = wide(30)
    frame.loc[frame["site"] == "s1", [f"g{i}" for i in range(30)]] = np.nan
    notes = [note for note in draft(frame, ["ill"], "site").notes if "no value" in note]
    assert notes == ["g0, g1, g2, g3, g4 and 25 more: no value at s1"]


def test_numbers_are_looked_up_among_images_only_if_one_is_called_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    found_in = images.found_in
    monkeypatch.setattr(images, "found_in", lambda column, *a: (asked.append(column.name), found_in(column, *a))[1])
    wide(9).assign(number=np.arange(90)).to_csv(tmp_path / "w.csv", index=False)
    table = read(tmp_path / "w.csv", "site")
    assert images.draft_of_images(table, tmp_path / "w.csv", {"ill": {}}) is None
    assert asked == []
    for i in range(90):
        Image.new("L", (4, 4)).save(tmp_path / f"{i:03}.png")
    plan = images.draft_of_images(table, tmp_path / "w.csv", {"ill": {}})
    assert plan is not None
    assert plan.image == "number"


def test_quick_numbers_are_those_of_numpy_and_pandas() -> None:
    rng = np.random.default_rng(0)
    for count in (8, 9, 50, 51):
        values = rng.normal(size=count)
        np.testing.assert_allclose(_quarters(values), np.percentile(values, (25, 50, 75)), rtol=1e-12)
    y = rng.normal(size=60)
    cells = pandas.Series((y + rng.normal(size=60)).round(1), name="x")
    frame = pandas.DataFrame({"x": cells, "y": y})
    best = max(frame.corr().loc["x", "y"] ** 2, frame.rank().corr().loc["x", "y"] ** 2)
    assert association(Column(cells), "number", y, True, np.arange(60)) == pytest.approx(best)


def test_names_of_many_columns_are_compared_once() -> None:
    names = [f"c{i}" for i in range(100_000)]  # each with each would take minutes
    assert different(names) == names
    with pytest.raises(ValueError, match="columns 1 and 100001 are all named 'c0'"):
        different([*names, "c0"])


def test_codes_for_missing_are_found_among_numbers_and_texts() -> None:
    for cells, code, there in (
        ([1, -9], -9, True),
        ([1.5, 2], "-9", False),
        (["?", "a"], "?", True),
        ([1], "?", False),
    ):
        assert Column(pandas.Series(cells, name="x")).has(code) is there


def test_sites_that_are_one_number_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "s.csv"
    file.write_text("site,x\n1,2\n01,3\n2,4\n")
    with pytest.raises(DataError, match="sites '01' and '1' found, which are the same number; write them alike"):
        read(file, "site")
    assert len(read(file, None).frame) == 3
    file.write_text("hospital,x\n01,2\n02,3\n02.0,3\n")
    assert read(file, "site", rename={"hospital": "site"}).column("site").distinct == ["1", "2"]
    file.write_text("site,x\n01,2\n1a,3\n1,4\n")
    assert sorted(read(file, "site").column("site").distinct) == ["01", "1", "1a"]


@pytest.mark.parametrize(
    ("cells", "said"),
    [
        (["1.200", "950", "2.350"], True),
        (["1.200", "9.5", "950"], False),  # two digits
        (["1.200", "2.350"], False),  # nothing beside them
        (["0.912", "950"], False),  # a thousand has no leading zero
        (["1.200", "1950"], False),  # a thousand without a point
        (["1.200", "7"], False),
    ],
)
def test_points_that_may_part_thousands_are_noted(tmp_path: Path, cells: list[str], said: bool) -> None:
    (tmp_path / "t.csv").write_text("\n".join(["dose", *cells]))
    sentence = "dose: 1.200 beside 950 is read as 1.2; if the point parts thousands, write numbers without it"
    assert read(tmp_path / "t.csv", None).notes == ((sentence,) if said else ())


def test_patients_of_several_sites_are_noted() -> None:
    frame = wide(3).assign(patient=[i % 40 for i in range(90)])
    several = "are at more than one site; if each is one person"
    (note,) = (note for note in draft(frame, ["ill"], "site").notes if several in note)
    assert note.startswith("patient: 40 values")
    plan = draft(frame, ["ill"], "site")
    rows: Rows = rows_of(plan.table, plan.tasks, RowSplit(group="patient"), 0)
    assert [each for each in rows.notes if several in each] == [note]
    alone = frame.assign(patient=[f"{site}{i % 40}" for i, site in enumerate(frame["site"])])
    assert not [note for note in draft(alone, ["ill"], "site").notes if several in note]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no named pipes")
def test_a_pipe_is_not_said_to_be_absent(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.csv")
    with pytest.raises(DataError, match="a pipe or a device found, expected a file or folder"):
        read(tmp_path / "x.csv", None)


@pytest.mark.parametrize("name", ["a.gif", "a.heic"])
def test_images_that_are_not_read_are_named(name: str, tmp_path: Path) -> None:
    (tmp_path / "photos" / "cat").mkdir(parents=True)
    (tmp_path / "photos" / "cat" / name).write_bytes(b"GIF89a")
    ending = name[1:]
    for path, found in (
        (tmp_path / "photos", f"{ending} files are not read: save them as PNG"),
        (tmp_path / "photos" / "cat" / name, "one image found, expected a folder of images"),
    ):
        result = CliRunner().invoke(cli.app, ["init", str(path), "--clients", "2", "--out", str(tmp_path / "r.yaml")])
        assert found in str(result.exception)
