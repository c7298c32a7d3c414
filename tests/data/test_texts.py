"""Texts as tokens: a file of a user's."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from typer.testing import CliRunner

import fedloom as fl
from fedloom.cli.app import app
from fedloom.data import DATASETS
from fedloom.data.texts import frequent, words_of
from fedloom.engines.flower.nodes import NodeConfig, about, agreed, build_at, own_data
from fedloom.errors import DataError, RecipeError, UserError
from fedloom.experiments.export.bundle import Bundle, export
from fedloom.experiments.export.merge import merge
from fedloom.experiments.export.predict import inputs, of_table
from fedloom.experiments.papers.join import _data
from fedloom.federation.recipes import load
from fedloom.federation.runs.recorded import recipe_in

texts = DATASETS["texts"].make
ROWS = [
    ("A cat, a cat and a dog.", "animal", "ann", "train"),
    ("The dog's tail", "animal", "bob", "train"),
    ("Bread and butter", "food", "ann", "train"),
    ("the butter", "", "bob", "train"),
    ("A cat and a mouse", "animal", "ann", "test"),
    ("BREAD, the food", "food", "bob", "test"),
]


def write(file: Path, rows: Any = ROWS, head: Any = ("text", "topic", "who", "part")) -> str:
    with file.open("w", encoding="utf-8", newline="") as opened:
        csv.writer(opened).writerows([head, *rows])
    return str(file)


def test_words_are_lower_case_letters_and_digits():
    assert words_of("It's 3 o\u2019clock -- in Zürich_West!") == ["it's", "3", "o\u2019clock", "in", "zürich", "west"]
    assert frequent([["b", "a", "b"], ["c", "a"]]) == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("e\u0301tude, CAFE\u0301S", ["\u00e9tude", "caf\u00e9s"]),
        ("\u0130stanbul", ["i\u0307stanbul"]),
        (
            "\u0939\u093f\u0928\u094d\u0926\u0940 \u092e\u0947\u0902",
            ["\u0939\u093f\u0928\u094d\u0926\u0940", "\u092e\u0947\u0902"],
        ),
        ("\u2764\ufe0f \u0301 a", ["a"]),
    ],
    ids=["accents apart from their letters", "a dot above", "Hindi", "marks without a letter"],
)
def test_marks_do_not_part_words(text, words):
    assert words_of(text) == words


def test_a_table_becomes_tokens_of_the_train_parts_vocabulary(tmp_path):
    rows = [(*row, i, i) for i, row in enumerate(ROWS)]  # beside columns without a name, as tables of others have them
    path = write(tmp_path / "t.csv", rows, ("text", "topic", "who", "part", "", ""))
    data = texts(0, path=path, split="part", domain="who", vocabulary=6, length=4)
    assert data.domains == ("ann", "bob")
    assert [(t.name, t.channels) for t in data.tasks] == [("topic", 2)]
    assert data.train.labels["topic"].tolist() == [0, 0, 1, -1]
    assert (data.train.domain.tolist(), data.test.domain.tolist()) == ([0, 1, 0, 1], [0, 1])
    # most frequent: a (3), then and, butter, cat, the (2 each) by the alphabet; 0 fills up, 1 is any other word
    assert data.train.images.tolist() == [[2, 5, 2, 5], [1, 1, 1, 0], [1, 3, 4, 0], [1, 4, 0, 0]]
    assert data.test.images.tolist() == [[2, 5, 3, 2], [1, 1, 1, 0]]
    assert (data.signal.kind, data.signal.vocabulary, data.signal.padding) == ("tokens", 6, 0)


def test_a_share_becomes_the_test_part(tmp_path):
    rows = [(f"word {i}", f"t{i % 2}", f"p{i % 4}", "") for i in range(40)]
    data = texts(0, path=write(tmp_path / "t.csv", rows), domain="who", test_fraction=0.25, limit=20)
    assert (len(data.train), len(data.test)) == (20, 8)
    assert np.bincount(data.test.domain).tolist() == [2, 2, 2, 2]


@pytest.mark.parametrize(
    ("rows", "params", "message"),
    [
        (ROWS, {"text": "txt"}, r"t\.csv: no column 'txt'. Did you mean 'text'\? Found: text, topic, who, part"),
        ([*ROWS, ("a", "b")], {}, "line 8: expected 4 cells like the first line, found 2"),
        ([("--", *row[1:]) for row in ROWS], {}, "column 'text': no row with a word found"),
        (
            [*ROWS, ("x", "food", "ann", "dev")],
            {"split": "part"},
            "column 'part': expected train or test.* found 'dev'",
        ),
        ([*ROWS, ("x", "food", "ann", "")], {"split": "part"}, "column 'part'.* found an empty cell"),
        (ROWS[:3], {"split": "part"}, "no text is in the test part$"),
        (
            [("x", "ab"[i % 2], f"{i}", "") for i in range(8)],
            {"domain": "who"},
            "test part; no two texts have the same",
        ),
        (
            [ROWS[0], ROWS[5]],
            {"split": "part"},
            "task 'topic': expected texts of two or more classes in the train part",
        ),
        ([*ROWS, ("x", "Food", "ann", "test")], {}, "labels 'Food' and 'food' found, which differ in case only"),
        ([*ROWS, ("x", "food", "", "test")], {"domain": "who"}, "rows without a site found: 1, such as row 7"),
        ([*ROWS, ("x", "food", "Ann", "test")], {"domain": "who"}, "sites 'Ann' and 'ann' would both be client"),
        ([("x", f"{i % 9 / 4}", "", "") for i in range(40)], {}, "9 different numbers found, expected classes"),
        ([("x", f"{i}", "", "") for i in range(40)], {}, "40 different numbers found, expected classes"),
        ([("x", f"id{i}", "", "") for i in range(40)], {}, "40 different labels in 40 rows found"),
        ([*ROWS * 4, ("x", "fod", "ann", "test")], {}, "one row only has the label 'fod'.*missing: "),
        ([], {}, "expected a line of names and one line per example"),
    ],
)
def test_tables_that_are_wrong(tmp_path, rows, params, message):
    with pytest.raises(DataError, match=message):
        texts(0, path=write(tmp_path / "t.csv", rows), **params)


def test_files_that_are_none(tmp_path):
    with pytest.raises(DataError, match="the file or folder does not exist"):
        texts(0, path=str(tmp_path / "none.csv"))
    (tmp_path / "b.csv").write_bytes(b"text,topic\n\x81,a\n")
    with pytest.raises(DataError, match="save it as CSV in UTF-8"):
        texts(0, path=str(tmp_path / "b.csv"))
    with pytest.raises(RecipeError, match="split names the test part"):
        texts(0, path=write(tmp_path / "t.csv"), split="part", test_fraction=0.5)


def test_files_are_read_as_tables_are(tmp_path):
    """Other separators, a file for each site, space around labels, and cells that mean missing."""
    lines = [
        "text;topic",
        *(f"word {i % 3};{' ab'[i % 2]}{'b'[: i % 2 == 0]} " for i in range(20)),
        "word;NA",
        "word;?",
    ]
    for site in ("north", "south"):
        (tmp_path / "sites").mkdir(exist_ok=True)
        (tmp_path / "sites" / f"{site}.csv").write_text("\n".join(lines))
    data = texts(0, path=str(tmp_path / "sites"), missing=["?"])
    assert (data.name, data.domains, data.classes) == ("sites", ("north", "south"), {"topic": ("a", "b")})
    assert sum(int((part.labels["topic"] < 0).sum()) for part in (data.train, data.test)) == 4


def test_rows_without_a_word_are_left_out(tmp_path):
    rows = [ROWS[0], ("\U0001f600", "food", "eve", "train"), *ROWS[1:4], ("", "food", "bob", "train"), *ROWS[4:]]
    given = {"split": "part", "domain": "who"}
    data, without = (texts(0, path=write(tmp_path / "t.csv", some), **given) for some in (rows, ROWS))
    assert data.notes == ("rows without a word in column 'text', left out: 2, the first is row 2",)
    assert data.domains == without.domains == ("ann", "bob")
    for one, other in ((data.train, without.train), (data.test, without.test)):
        assert torch.equal(one.images, other.images)
        assert torch.equal(one.labels["topic"], other.labels["topic"])
        assert torch.equal(one.domain, other.domain)


def test_stated_classes_number_labels_alike_where_some_are_absent(tmp_path):
    path, stated = write(tmp_path / "t.csv"), {"topic": ["food", "tool", "animal"]}
    data = texts(0, path=path, split="part", classes=stated)
    assert [(task.name, task.channels) for task in data.tasks] == [("topic", 3)]
    assert data.classes == {"topic": ("food", "tool", "animal")}
    assert data.train.labels["topic"].tolist() == [2, 2, 0, -1]
    assert data.notes == ("no text of tool of task 'topic' to train on",)
    one = texts(0, path=write(tmp_path / "one.csv", [ROWS[0], ROWS[4]]), split="part", classes=stated)
    assert (one.tasks[0].channels, one.train.labels["topic"].tolist()) == (3, [2])
    with pytest.raises(DataError, match="column 'topic': the label 'animal' found, expected food, tool; add it to"):
        texts(0, path=path, classes={"topic": ["food", "tool"]})
    with pytest.raises(RecipeError, match="classes of 'tone' found, which is no task. Tasks: topic"):
        texts(0, path=path, classes={"tone": ["a", "b"]})
    with pytest.raises(RecipeError, match="class 'a' is named twice"):
        texts(0, path=path, classes={"topic": ["a", "a"]})


@pytest.mark.parametrize(
    ("rows", "params", "doubt"),
    [
        (
            [(f"{i} one two {i}", "ab"[i % 2], "", "") for i in range(20)],
            {"length": 4},
            "8 of 16 words of the test part (50%)",
        ),
        (
            [(f"one two {i % 2}", "ab"[i % 2], "", "") for i in range(20)],
            {},
            "4 of 4 test texts are word for word copies",
        ),
        (
            [(f"one two {i % 2}", "ab"[i % 2], "", "") for i in range(20)],
            {"length": 2},
            "20 of 20 texts have more than 2",
        ),
        ([("ab"[i % 2] * 9, "ab"[i % 2], "", "") for i in range(20)], {}, "20 of 20 texts are a single word"),
    ],
)
def test_what_looks_wrong_is_said(tmp_path, rows, params, doubt):
    assert [said for said in texts(0, path=write(tmp_path / "t.csv", rows), **params).doubts if doubt in said]


def test_good_texts_raise_no_doubt(tmp_path):
    rows = [(f"{'ab'[i % 2]} text {' '.join(f'{i:06b}')}", "ab"[i % 2], "", "") for i in range(60)]
    assert texts(0, path=write(tmp_path / "t.csv", rows)).doubts == ()


def test_nodes_with_texts_of_their_own_need_one_list_of_words(tmp_path):
    """Two vocabularies of one size with other words would make tokens of other meaning, and nobody would notice."""
    other = [(text.replace("cat", "fox"), *rest) for text, *rest in ROWS]
    (tmp_path / "words").write_text("a\ncat\nfox\nbutter\n")

    def reports(**more: Any):
        found = {}
        for client, rows in (("ann", ROWS), ("bob", other)):
            data = {"name": "texts", "path": write(tmp_path / f"{client}.csv", rows), "split": "part", **more}
            recipe = load({"name": "t", "data": data, "partition": "own", "model": "transformer", "method": "fedavg"})
            config = NodeConfig(client=client, data=recipe.data)
            dataset, who = own_data(recipe, config)
            at_node = build_at(recipe, config, dataset.tasks)
            assert at_node.module.encoder.embed.num_embeddings == dataset.signal.vocabulary
            found[client] = about(who, dataset)
        return found

    apart = reports()
    assert apart["ann"].signal.vocabulary == apart["bob"].signal.vocabulary
    why = agreed(apart)[1]["bob"]
    assert "inputs signal" in why
    assert why.endswith("the lists of words differ: give all the same file as data.words, such as the words.txt of an "
                        "exported model")  # fmt: skip
    assert agreed(reports(words=str(tmp_path / "words")))[1] == {}


@pytest.mark.parametrize(
    ("lines", "message"), [("a\nB\n", "lower case on each line, found 'B'"), ("a\na\n", "'a' twice")]
)
def test_lists_of_words_that_are_wrong(tmp_path, lines, message):
    (tmp_path / "words").write_text(lines)
    with pytest.raises(DataError, match=message):
        texts(0, path=write(tmp_path / "t.csv"), split="part", words=str(tmp_path / "words"))


def test_a_task_that_comes_late_needs_the_same_words(tmp_path):
    data = {"name": "texts", "path": write(tmp_path / "t.csv"), "split": "part"}
    recipe = load({"name": "t", "data": data, "partition": "own", "model": "transformer", "method": "matu"})
    run: Any = SimpleNamespace(recipe=recipe, dataset=recipe.data.make(0))
    assert _data(run, "topic", ["data.labels={topic: topic}"]).signal == run.dataset.signal
    with pytest.raises(
        DataError,
        match=r"expected the inputs of the run, tokens \(vocabulary 1.*, found tokens \(vocabulary 7.*as data.words",
    ):
        _data(run, "topic", ["data.vocabulary=7"])


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run on texts whose first word says their topic, and its exported model."""
    folder = tmp_path_factory.mktemp("trained")
    rows = [(f"{'woof' if i % 2 else 'munch'} {i % 7} {i % 5}", "ab"[i % 2], "", "") for i in range(80)]
    recipe = {
        "name": "t",
        "data": {"name": "texts", "path": write(folder / "t.csv", rows, ("said", "topic", "", "")), "text": "said"},
        "partition": {"name": "iid", "clients": 2},
        "model": {"name": "transformer", "width": 8, "num_heads": 2, "depth": 1},
        "method": "fedavg",
        "training": {"rounds": 3, "batch_size": 8, "optimizer": {"name": "adam", "lr": 0.05}},
    }
    result = fl.run(load(recipe, ["data.length=6"]), folder / "run")
    return result, export(folder / "run", folder / "out")


def test_a_run_on_a_users_texts(trained):
    """An exported model is read back with its vocabulary."""
    result, out = trained
    assert result.run.final().values["topic"]["accuracy"] == 1.0
    section = recipe_in(result.folder).data
    data = section.make(0)
    x, _ = data.test.batch(torch.arange(4), torch.device("cpu"))
    model = result.model(next(iter(result.run.info["clients"]))).eval()
    torch.testing.assert_close(Bundle.read(out).module(x)["topic"], model(x)["topic"])
    assert (out / "words.txt").read_text().splitlines() == [*data.words.listed]
    card = (out / "README.md").read_text()
    assert "texts in the column said" in card
    assert "words of the training texts" in card
    again = texts(0, path=section.arguments["path"], text="said", words=str(out / "words.txt"), length=6)
    assert again.signal == data.signal


def test_an_exported_model_predicts_new_texts(trained, tmp_path):
    """A model without its words is of no use to anybody."""
    result, out = trained
    new = write(tmp_path / "new.csv", [("1", "Munch!"), ("2", "?!"), ("3", "a WOOF 3")], ("id", "said"))
    result_of = CliRunner().invoke(app, ["predict", str(out), new, "--out", str(tmp_path / "p.csv")])
    assert result_of.exit_code == 0, result_of.output
    found = pd.read_csv(tmp_path / "p.csv", keep_default_na=False)
    assert found["topic"].tolist() == ["a", "", "b"]
    assert [*found.columns] == ["topic", "p(topic=a)", "p(topic=b)"]
    assert [cell == "" for cell in found["p(topic=a)"]] == [False, True, False]
    with pytest.raises(DataError, match="no column 'said'"):
        of_table(out, Path(write(tmp_path / "other.csv", [("a", "b")], ("x", "y"))))
    with pytest.raises(DataError, match="no row with a word found"):
        of_table(out, Path(write(tmp_path / "none.csv", [("?", "b")], ("said", "y"))))
    with pytest.raises(UserError, match="leave --client out"):
        of_table(out, Path(new), client="ann")
    with pytest.raises(UserError, match="`fedloom export` its model"):
        of_table(result.folder, Path(new))
    (tmp_path / "new.png").write_bytes(b"")
    with pytest.raises(UserError, match=r"expected a table \(.csv"):
        inputs(Bundle.read(out), tmp_path / "new.png")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: (folder / "words.txt").unlink(), "words.txt does not exist, but export.json says"),
        (lambda folder: (folder / "words.txt").write_text("a\nb\n"), "words.txt was changed after the export: tokens"),
        (lambda folder: (folder / "words.txt").write_text("a\na\n"), "words.txt: expected different words, found 'a'"),
        (lambda folder: (folder / "words.txt").write_bytes(b"\xff"), "words.txt cannot be read as text of UTF-8"),
        (
            lambda folder: stated(folder, signal={"kind": "tokens", "vocabulary": 14}),
            "(?s)export.json.*not the tokens of a list of words",
        ),
        (lambda folder: stated(folder, text=3), "(?s)export.json.*text: 3 found, expected"),
    ],
)
def test_words_that_are_not_the_models_are_refused(trained, tmp_path, change, message):
    shutil.copytree(trained[1], tmp_path / "out")
    change(tmp_path / "out")
    with pytest.raises(UserError, match=message):
        Bundle.read(tmp_path / "out")


def stated(folder: Path, **values: Any) -> None:
    file = folder / "export.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def test_a_merged_model_has_the_words(trained, tmp_path):
    result, out = trained
    (merged,) = merge([out, out], result.folder, tmp_path / "merged")
    assert (merged / "words.txt").read_bytes() == (out / "words.txt").read_bytes()
    assert Bundle.read(merged).words.listed == Bundle.read(out).words.listed
