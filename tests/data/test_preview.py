"""Contact sheets of every kind of data set."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from fedloom.cli.app import main
from fedloom.data.dataset import JoinedExamples, TensorExamples, normal
from fedloom.data.drawing import GAP, grid, label, legend, palette, pictures, wrong
from fedloom.tasks import Depth, Edge, HumanParts, Normals, Semseg


def size(path) -> tuple[int, int]:
    with Image.open(path) as picture:
        return picture.size


def pixels(path) -> np.ndarray:
    with Image.open(path) as picture:
        return np.array(picture)


def fedloom(monkeypatch, *words: str) -> None:
    monkeypatch.setattr("sys.argv", ["fedloom", "data", "preview", *words])
    with pytest.raises(SystemExit) as done:
        main()
    assert done.value.code in (0, None), done.value.code


def test_scenes(tmp_path, monkeypatch, capsys):
    out = tmp_path / "sheet.png"
    fedloom(
        monkeypatch, "scenes", "--out", str(out), "count=5", "test_count=2", "height=32", "width=40", "--count", "3"
    )
    assert "scenes: 5 train, 2 test" in capsys.readouterr().out
    picture = pixels(out)
    width = 7 * (160 + GAP) + GAP
    assert picture.shape[1] == width
    assert picture.shape[0] > 3 * 128
    assert (picture[0] == 255).all(), "on white paper"
    fedloom(monkeypatch, "scenes", "--out", str(out), "count=5", "test_count=2", "height=32", "width=40", "--augmented")
    assert not np.array_equal(pixels(out)[:200], picture[:200])


def test_digits_and_features(tmp_path, monkeypatch):
    out = tmp_path / "sheet.png"
    # labels of whole images stand below them, so that no half of the sheet is empty
    fedloom(monkeypatch, "digits", "--out", str(out), "--split", "test", "--count", "6")
    assert size(out)[0] == 3 * (160 + GAP) + GAP
    filled = (pixels(out) != 255).any(2)
    assert filled.any(0).mean() > 0.9
    assert filled.any(1).mean() > 0.75
    rng = np.random.default_rng(0)
    made = {f"x_{s}": rng.random((4, 12)).astype(np.float32) for s in ("train", "test")}
    np.savez(tmp_path / "set.npz", **made, y_train=np.arange(4), y_test=np.arange(4))
    fedloom(monkeypatch, "arrays", "--out", str(out), f"path={tmp_path / 'set.npz'}")
    assert size(out)[0] >= 3 * 160


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nothing"], "unknown data set 'nothing'"),
        (["scenes", "cuont=3"], "Did you mean 'count'?"),
        (["scenes", "count"], "'count': expected key.path=value"),
        (["scenes", "augment.scale=[2, 1]"], "augment.scale: expected (smallest, largest) factor, found [2.0, 1.0]"),
        (["scenes", "augment.sclae=[2, 1]"], "augment.sclae: unknown key. Did you mean 'scale'?"),
        (["scenes", "count=1", "test_count=1", "height=16", "width=16"], "sheet.what cannot be written"),
    ],
)
def test_mistakes_are_explained(tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.setattr("sys.argv", ["fedloom", "data", "preview", *words, "--out", str(tmp_path / "sheet.what")])
    with pytest.raises(SystemExit) as done:
        main()
    assert done.value.code == 2
    assert message in capsys.readouterr().err


def test_what_is_ignored_is_black():
    raw = torch.tensor([[0, 1], [2, 255]])
    shown, text = label(Semseg("s", 3), raw)
    assert shown[1, 1].tolist() == [0, 0, 0]
    assert len({tuple(c) for c in shown.reshape(-1, 3).tolist()}) == 4
    assert text == ""
    assert label(HumanParts("p"), torch.full((2, 2), 255))[1] == "no label"
    shown, text = label(Depth("d"), torch.tensor([[[1.0, 3.0], [2.0, 255.0]]]))
    assert text == "1.0-3.0 m"
    assert shown[0, 0].tolist() == [253, 231, 37]
    assert shown[1, 1].tolist() == [0, 0, 0]
    normals = torch.tensor([[[0.0, 255]], [[0.0, 255]], [[1.0, 255]]])
    assert label(Normals("n"), normals)[0].tolist() == [[[128, 128, 255], [0, 0, 0]]]
    assert label(Edge("e"), torch.tensor([[[0.0, 1, 255]]]))[0][0].tolist() == [[40] * 3, [255] * 3, [0] * 3]
    assert len(np.unique(palette(Semseg("s", 41)), axis=0)) == 42


def test_where_an_answer_is_wrong():
    truth, answer = torch.tensor([[0, 1], [2, 255]]), torch.tensor([[0, 2], [2, 1]])
    shown, text = wrong(Semseg("s", 3), truth, answer)
    right, off, unlabelled = shown[0, 0].tolist(), shown[0, 1].tolist(), shown[1, 1].tolist()
    assert (right, off, unlabelled) == ([245] * 3, [213, 94, 0], [0] * 3)
    assert text == "33 % wrong"
    up, right_ = (torch.tensor(v).view(3, 1, 1).float() for v in ((0, 1, 0), (1, 0, 0)))
    assert wrong(Normals("n"), up, right_)[1] == "mean 90 degrees"
    assert wrong(Depth("d"), torch.full((1, 2, 2), 2.0), torch.full((1, 2, 2), 3.0))[1] == "mean 50 %"
    assert wrong(Edge("e"), torch.zeros(1, 2, 2), torch.full((1, 2, 2), 0.25))[1] == "mean 0.25"
    assert wrong(Depth("d"), torch.full((1, 2, 2), 255.0), torch.zeros(1, 2, 2))[1] == "no label"
    assert wrong(Depth("d"), torch.ones(1, 1, 1), torch.full((1, 1, 1), float("nan")))[0].tolist() == [[[110, 30, 0]]]


def test_a_legend_has_the_classes_that_occur_with_the_colours_they_are_drawn_in():
    task = Semseg("s", 4)
    found = legend(task, ("floor", "wall", "sky"), [3, 1, 255, -1])
    assert [name for _, name in found.colours] == ["wall", "3"]
    drawn, _ = label(task, torch.tensor([[1, 3]]))
    assert [list(bytes.fromhex(colour[1:])) for colour, _ in found.colours] == drawn[0].tolist()
    assert legend(Depth("d")).ends == ("near", "far")


def test_a_sheet_grows_by_its_title_and_legend_and_long_texts_are_cut():
    cell = np.zeros((80, 80, 3), np.uint8)
    plain = grid(["input", "truth"], [[(cell, ""), (cell, "")]])
    means = {"s": legend(Semseg("s", 3), (), range(3))}
    told = grid(["input", "truth"], [[(cell, ""), (cell, "x" * 500)]], "a title", means)
    assert told.width == plain.width
    assert told.height > plain.height + 3 * 15


def test_pictures_undo_the_normalisation_of_each_example():
    pixels = torch.randint(0, 256, (6, 3, 4, 5), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    domain = torch.tensor([0, 1, 0, 1, 1, 0])
    labels = {"a": torch.where(domain == 0, 1, -1), "b": torch.where(domain == 1, 0, -1)}
    mean, std = torch.tensor([[0.1, 0.2, 0.3], [0.6, 0.5, 0.4]]), torch.tensor([[0.5, 0.6, 0.7], [1.5, 0.2, 0.3]])
    index = torch.tensor([1, 2, 5])
    mixed = TensorExamples(pixels, labels, domain, mean, std)
    plain = TensorExamples(pixels, labels, domain)
    own = TensorExamples(pixels, labels, mean=(0.1, 0.2, 0.3), std=(0.5, 0.6, 0.7))
    joined = JoinedExamples({"one": own, "two": mixed}, {"one": ("a",), "two": ("a", "b")})
    for part, where in ((mixed, index), (plain, index), (own, index), (joined, index), (joined, index + 6)):
        x, _ = part.batch(where, torch.device("cpu"))
        shown = torch.from_numpy(pictures(part, x, where)).permute(0, 3, 1, 2)
        assert torch.equal(shown, pixels[index]), part
    assert normal(plain, index) is None
