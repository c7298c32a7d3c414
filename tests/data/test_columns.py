"""Columns of .csv files, and data sets made of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fedloom.data import DATASETS
from fedloom.data.columns import read_columns
from fedloom.errors import DataError

TEXT = "\ufeffage,height,kind,site\n" + "".join(
    f"{i / 8},{i % 5}, {'abc'[i % 3]} ,{('south', 'north', '')[i % 3]}\n" for i in range(60)
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "t.csv").write_text(TEXT, encoding="utf-8")
    return tmp_path / "t.csv"


def test_columns_are_numbers_or_texts(path: Path) -> None:
    found = read_columns(path)
    assert [column.dtype.kind for column in found.values()] == ["f", "i", "U", "U"]
    (path.parent / "u.csv").write_text("a\n1_000\n2\n")
    assert read_columns(path.parent / "u.csv")["a"].tolist() == ["1_000", "2"]
    assert found["age"][:3].tolist() == [0, 0.125, 0.25]
    assert set(found["kind"]) == {"a", "b", "c"}


def test_a_data_set_of_a_table(path: Path) -> None:
    options = {"images": "age,height", "labels": {"kind": "kind", "site": "site"}, "test_fraction": 0.2}
    made = DATASETS["arrays"].make(0, path=str(path), **options)
    assert [(task.name, task.channels) for task in made.tasks] == [("kind", 3), ("site", 2)]
    assert made.input_shape == (2,)
    labels = {
        task: np.concatenate([part.labels[task].numpy() for part in (made.train, made.test)])
        for task in options["labels"]
    }
    assert sorted(zip(labels["kind"].tolist(), labels["site"].tolist(), strict=True)) == sorted(
        (i % 3, (1, 0, -1)[i % 3]) for i in range(60)
    )


def test_domains_have_the_names_in_the_table(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(TEXT.replace(",\n", ",east\n"), encoding="utf-8")
    options = {"images": "age,height", "labels": {"kind": "kind"}, "domain": "site", "domain_names": "site"}
    made = DATASETS["arrays"].make(0, path=str(path), test_fraction=0.2, **options)
    assert made.domains == ("east", "north", "south")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n", "expected a line of names and a line for each example, found 1 lines"),
        ("a,b\n1,2\n3\n", "line 3: expected 2 cells, found 1"),
        ("a,a\n1,2\n", "expected a name of its own for each column, found 'a'"),
        ("a,\n1,2\n", "expected a name of its own for each column, found ''"),
        ('a,b\n1,"2\n', "is not a .csv file in UTF-8"),
        ("a,b\n\udcff,2\n", "is not a .csv file in UTF-8"),
    ],
)
def test_what_is_no_table_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "t.csv").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(DataError, match=message):
        read_columns(tmp_path / "t.csv")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"images": "age,heigth"}, "no column 'heigth'. Did you mean 'height'?"),
        ({"images": "age,kind"}, "column 'kind' expected numbers, found 'a'"),
        ({"labels": {"t": "age"}}, "'age' expected one integer per example, found float64"),
    ],
)
def test_keys_that_do_not_fit_are_named(path: Path, change: dict[str, object], message: str) -> None:
    options = {"images": "age,height", "labels": {"kind": "kind"}, "test_fraction": 0.2, **change}
    with pytest.raises(DataError) as caught:
        DATASETS["arrays"].make(0, path=str(path), **options)
    assert message in str(caught.value)
