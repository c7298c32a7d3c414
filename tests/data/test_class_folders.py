"""Image sets in folders of classes: made from torchvision's data sets or other folders, and read as tasks."""

from __future__ import annotations

import pickle
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import fedloom
from fedloom.cli.app import app
from fedloom.core.machine import locked
from fedloom.data import DATASETS, download
from fedloom.errors import DataError, InUseError, RecipeError
from fedloom.federation.recipes import load as load_recipe

CPU = torch.device("cpu")


def picture(colour: tuple[int, int, int], size: tuple[int, int] = (10, 8)) -> Image.Image:
    return Image.new("RGB", size, colour)


class Fake(list):
    """What torchvision's data sets are: pairs of an image and a class; `classes` is optional there, too."""


@pytest.fixture
def torchvision(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, object]]:
    """Made-up data sets instead of torchvision's; returns the arguments with which they were opened."""
    calls: list[dict[str, object]] = []

    def svhn(root: str, split: str, download: bool) -> Fake:
        calls.append({"root": root, "split": split, "download": download})
        return Fake((picture((40 * i, 0, 0)), np.int64(i % 3)) for i in range(6 if split == "train" else 3))

    def sun397(root: str, download: bool) -> Fake:
        found = Fake((Image.new("L", (200, 100), 20 * i), i % 2) for i in range(8))
        found.classes = ["b/outdoor", "a b"]
        return found

    def cars(root: str, split: str, download: bool) -> Fake:
        raise RuntimeError("the server is gone")

    def dtd(root: str, split: str, download: bool) -> Fake:
        return Fake([(picture((0, 0, {"train": 1, "val": 2, "test": 3}[split])), 0)])

    fakes = SimpleNamespace(SVHN=svhn, SUN397=sun397, StanfordCars=cars, DTD=dtd)
    monkeypatch.setattr(download, "need", lambda module, extra: fakes if "torchvision" in module else Image)
    return calls


def pixel(file: Path) -> tuple[int, int, int]:
    with Image.open(file) as image:
        return image.getpixel((0, 0))


def tree(root: Path) -> list[str]:
    return sorted(p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file() and p.suffix != ".lock")


def test_what_another_process_prepares_is_left_alone(torchvision, tmp_path):
    begun = tmp_path / "svhn.partial" / "train"
    begun.mkdir(parents=True)
    with (
        locked(tmp_path / ".svhn.lock", tmp_path),
        pytest.raises(InUseError, match="svhn is in use by another process"),
    ):
        download.prepare("svhn", tmp_path)
    assert begun.is_dir()
    assert download.prepare("svhn", tmp_path) == {"train": 6, "test": 3}  # what was broken off is begun anew


def test_a_set_with_parts_is_written_class_by_class(torchvision, tmp_path):
    assert download.prepare("svhn", tmp_path) == {"train": 6, "test": 3}
    assert torchvision == [
        {"root": str(tmp_path / "downloads" / "svhn"), "split": split, "download": True} for split in ("train", "test")
    ]
    assert tree(tmp_path) == [
        *(f"svhn/test/{c:03d}/{c:06d}.png" for c in range(3)),
        *(f"svhn/train/{c:03d}/{i:06d}.png" for c in range(3) for i in (c, c + 3)),
    ]
    assert pixel(tmp_path / "svhn/train/001/000004.png") == (160, 0, 0)
    with pytest.raises(DataError, match="is there already"):
        download.prepare("svhn", tmp_path)
    with pytest.raises(DataError, match="has a test part"):
        download.prepare("dtd", tmp_path, test_fraction=0.5)


def test_a_set_without_parts_is_split_in_every_class(torchvision, tmp_path):
    assert download.prepare("sun397", tmp_path, size=50) == {"train": 4, "test": 4}
    files = tree(tmp_path / "sun397")
    for split in ("train", "test"):
        for kind in ("000-b-outdoor", "001-a-b"):
            assert sum(f.startswith(f"{split}/{kind}/") for f in files) == 2
    assert not (tmp_path / "sun397.partial").exists()
    with Image.open(tmp_path / "sun397" / files[0]) as image:
        assert (image.size, image.format) == ((100, 50), "JPEG")
    again = tmp_path / "again"
    download.prepare("sun397", again, size=50)
    assert tree(again / "sun397") == files


def test_several_parts_of_the_source_train_together(torchvision, tmp_path):
    assert download.prepare("dtd", tmp_path) == {"train": 2, "test": 1}
    assert [pixel(tmp_path / "dtd" / f)[2] for f in tree(tmp_path / "dtd")] == [3, 1, 2]


def test_what_cannot_be_had_is_said(torchvision, tmp_path):
    with pytest.raises(DataError, match=r"StanfordCars cannot be loaded \(the server is gone\)"):
        download.prepare("cars", tmp_path)
    with pytest.raises(DataError, match="'svnh' is not one that torchvision downloads. Did you mean 'svhn'"):
        download.prepare("svnh", tmp_path)
    assert not (tmp_path / "cars").exists()


def test_sources_fit_the_signatures_of_torchvision():
    import inspect

    from fedloom.core.extras import need

    library = need("torchvision.datasets", "vision")
    for name, source in download.SOURCES.items():
        signature = inspect.signature(getattr(library, source.library))
        for arguments in (*source.train, *source.test):
            signature.bind("root", download=True, **arguments)
        assert bool(source.test) != (source.test_fraction is not None), name


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of two classes, five images each, in the order ripe < unripe."""
    for number, kind in enumerate(("ripe", "unripe")):
        (tmp_path / "fruit" / kind).mkdir(parents=True)
        for i in range(5):
            picture((100 * number, 10 * i, 0), (80, 40)).save(tmp_path / "fruit" / kind / f"{i}.png")
    return tmp_path


def test_the_command_line_takes_a_folder_of_classes(folder):
    root = str(folder / "root")
    result = CliRunner().invoke(app, ["data", "prepare", "fruit", "--out", root, "--source", str(folder / "fruit")])
    assert result.exit_code == 0
    assert "fruit: 8 train, 2 test" in result.output
    assert len(tree(folder / "root" / "fruit" / "train" / "001-unripe")) == 4
    result = CliRunner().invoke(app, ["data", "prepare", "fruits", "--out", root])
    assert isinstance(result.exception, DataError)
    assert "--source" in str(result.exception)


def test_folders_with_parts_keep_them(folder):
    base = folder / "parts"
    for split, kinds in (("train", ("a", "b")), ("test", ("b",))):
        for kind in kinds:
            (base / split / kind).mkdir(parents=True)
            picture((1, 2, 3)).save(base / split / kind / "x.png")
    assert download.prepare("p", folder / "root", base) == {"train": 2, "test": 1}
    assert tree(folder / "root" / "p" / "test") == ["001-b/000000.png"]
    (base / "test" / "c").mkdir()
    with pytest.raises(DataError, match="class 'c' is in the test part only"):
        download.prepare("q", folder / "root", base)


def load(root: Path, *sets: str, **params):
    return DATASETS["class-folders"].function(0, root=str(root), sets=list(sets), size=8, **params)


@pytest.fixture
def root(folder: Path) -> Path:
    download.prepare("fruit", folder / "root", folder / "fruit")
    (folder / "wide" / "only").mkdir(parents=True)
    (folder / "wide" / "other").mkdir()
    wide = np.zeros((40, 120, 3), np.uint8)
    wide[:, 40:80, 1] = 255  # green in the middle
    for i in range(2):
        for kind in ("only", "other"):
            Image.fromarray(wide).save(folder / "wide" / kind / f"{i}.png")
    download.prepare("wide", folder / "root", folder / "wide", test_fraction=0.5)
    return folder / "root"


def test_sets_are_tasks_whose_images_are_read_on_demand(root):
    data = load(root, "fruit", "wide")
    assert [(t.name, t.channels) for t in data.tasks] == [("fruit", 2), ("wide", 2)]
    assert data.classes["fruit"] == ("000-ripe", "001-unripe"), "as the folders are called"
    assert data.domains == ("fruit", "wide")
    assert data.train.labels_of("fruit").tolist() == [0] * 4 + [1] * 4 + [-1] * 2
    assert data.train.labels_of("wide").tolist() == [-1] * 8 + [0, 1]
    assert data.train.prefetch
    assert data.input_shape == (3, 8, 8)
    x, y = data.train.batch(torch.tensor([8, 0, 5]), CPU)
    assert x.shape == (3, 3, 8, 8)
    assert x[2, 0].mean().item() == pytest.approx((100 / 255 - 0.5) / 0.5, abs=0.02)  # an unripe one; jpeg
    assert y["fruit"].tolist() == [-1, 0, 1]
    assert pickle.loads(pickle.dumps(data.train)).fingerprint() == data.train.fingerprint()
    assert load(root, "fruit", limit=3).train.labels_of("fruit").size == 3


def test_images_are_stretched_or_cropped(root):
    stretched, _ = load(root, "wide").train.batch(torch.tensor([0]), CPU)
    cropped, _ = load(root, "wide", fit="crop").train.batch(torch.tensor([0]), CPU)
    assert cropped[0, 1].min() > 0.7  # the green middle, but for what jpeg makes of its borders
    assert stretched[0, 1, :, 0].max() < -0.7
    assert stretched[0, 1, :, 4].min() > 0.7


def test_statistics_may_be_given(root):
    plain, _ = load(root, "fruit", mean=(0, 0, 0), std=(1, 1, 1)).train.batch(torch.arange(8), CPU)
    other, _ = load(root, "fruit", mean=(0.1, 0.2, 0.3), std=(0.5, 0.5, 0.25)).train.batch(torch.arange(8), CPU)
    expected = (plain - torch.tensor([0.1, 0.2, 0.3]).view(3, 1, 1)) / torch.tensor([0.5, 0.5, 0.25]).view(3, 1, 1)
    assert torch.allclose(other, expected, atol=1e-6)


def test_what_is_absent_is_named_with_the_command_that_makes_it(root):
    with pytest.raises(
        DataError, match=r"there is no folder .*mnist.train. To make it: fedloom data prepare mnist --out \S+$"
    ):
        load(root, "mnist")
    with pytest.raises(DataError, match=r"fedloom data prepare resisc45 --out \S+ --source FOLDER"):
        load(root, "fruit", "resisc45")
    with pytest.raises(DataError, match="set 'fruit' is named twice"):
        load(root, "fruit", "fruit")
    broken = next((root / "fruit" / "train").rglob("*.jpg"))
    broken.write_bytes(b"no image")
    with pytest.raises(DataError, match=f"{broken.name}: cannot be read as an image"):
        load(root, "fruit").train.batch(torch.arange(8), CPU)


def test_a_wrong_name_is_refused_when_the_recipe_is_read():
    data = {"name": "class-folders", "root": ".", "sets": ["stanford cars"]}
    with pytest.raises(RecipeError, match="data.sets"):
        load_recipe({"name": "x", "data": data, "partition": {"name": "iid", "clients": 2}, "model": "small-cnn",
                     "method": "fedavg"})  # fmt: skip


def test_it_trains(root, tmp_path):
    recipe = {
        "name": "t",
        "data": {"name": "class-folders", "root": str(root), "sets": ["fruit", "wide"], "size": 8},
        "partition": {"name": "iid", "clients": 1, "val_fraction": 0},
        "model": {"name": "small-cnn", "width": 2, "hidden": 4},
        "method": "fedavg",
        "training": {"rounds": 2},
        "evaluation": {"splits": ["test"]},
    }
    assert set(fedloom.run(recipe, tmp_path / "run").run.final().values) == {"fruit", "wide"}
