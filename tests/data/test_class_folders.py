"""Image sets in folders of classes, read as tasks, and CIFAR-10 in its published form."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedloom.data import DATASETS
from fedloom.data.inputs import opened
from fedloom.errors import DataError, RecipeError
from fedloom.federation.recipes import load as load_recipe

CPU = torch.device("cpu")
cifar10 = DATASETS["cifar10"].function


def picture(colour: tuple[int, int, int], size: tuple[int, int] = (10, 8)) -> Image.Image:
    return Image.new("RGB", size, colour)


def save(file: Path, image: Image.Image) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    image.save(file, quality=95)


def load(root: Path, *sets: str, **params):
    return DATASETS["class-folders"].function(0, root=str(root), sets=list(sets), size=8, **params)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A set of ripe and unripe fruit, and one whose images are green in the middle."""
    wide = np.zeros((40, 120, 3), np.uint8)
    wide[:, 40:80, 1] = 255
    for split, n in (("train", 4), ("test", 1)):
        for number, kind in enumerate(("ripe", "unripe")):
            for i in range(n):
                save(tmp_path / "fruit" / split / kind / f"{i}.jpg", picture((100 * number, 10 * i, 0), (80, 40)))
        for kind in ("only", "other"):
            save(tmp_path / "wide" / split / kind / "0.jpg", Image.fromarray(wide))
    return tmp_path


def test_sets_are_tasks_whose_images_are_read_on_demand(root):
    data = load(root, "fruit", "wide")
    assert [(t.name, t.channels) for t in data.tasks] == [("fruit", 2), ("wide", 2)]
    assert data.classes["fruit"] == ("ripe", "unripe"), "as the folders are called"
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


def test_what_is_absent_or_damaged_is_named(root):
    with pytest.raises(DataError, match=r"set 'mnist': the folder .*mnist.train does not exist, expected ROOT/NAME"):
        load(root, "mnist")
    with pytest.raises(DataError, match="address of Stanford Cars no longer answers: get the images elsewhere, or"):
        load(root, "cars")
    (root / "fruit" / "test" / "sour").mkdir()
    with pytest.raises(DataError, match="class 'sour' is in the test part only"):
        load(root, "fruit")
    (root / "fruit" / "test" / "sour").rmdir()
    with pytest.raises(RecipeError, match="set 'fruit' is named twice"):
        load(root, "fruit", "fruit")
    broken = next((root / "fruit" / "train").rglob("*.jpg"))
    broken.write_bytes(b"no image")
    with pytest.raises(DataError, match=f"{broken.name}: cannot be read as an image"):
        load(root, "fruit").train.batch(torch.arange(8), CPU)


def test_what_is_left_out_is_said(root):
    assert load(root, "fruit", "wide").doubts == ()
    (root / "fruit" / "train" / "ripe" / "scan.dcm").write_bytes(b"")
    (root / "fruit" / "test" / "ripe" / "old").mkdir()
    (root / "fruit" / "test" / ".git").mkdir()
    assert load(root, "fruit", "wide").doubts == (
        "files that are not images (.dcm) are left out: 1 of 5 in fruit/train/ripe",
        "folders inside class folders are left out: fruit/test/ripe/old",
    )


def test_a_wrong_name_is_refused_when_the_recipe_is_read():
    data = {"name": "class-folders", "root": ".", "sets": ["stanford cars"]}
    with pytest.raises(RecipeError, match="data.sets"):
        load_recipe({"name": "x", "data": data, "partition": {"name": "iid", "clients": 2}, "model": "small-cnn",
                     "method": "fedavg"})  # fmt: skip


@pytest.fixture
def batches(tmp_path):
    rng = np.random.default_rng(0)
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]:
        records = rng.integers(0, 256, (20, 3073)).astype(np.uint8)
        records[:, 0] = np.arange(20) % 10
        records[0, 1:1025] = 200  # the red plane
        (folder / f"{name}.bin").write_bytes(records.tobytes())
    return tmp_path


def test_the_binary_version_of_cifar(batches):
    data = cifar10(0, root=str(batches))
    assert (len(data.train), len(data.test)) == (100, 20)
    assert data.input_shape == (3, 32, 32)
    assert data.train.images.dtype == torch.uint8
    assert bool((data.train.images[20, 0] == 200).all())
    assert not (data.train.images[20, 1] == 200).all()
    assert data.test.labels["label"].tolist() == [*range(10), *range(10)]
    x = data.train.images.double() / 255
    np.testing.assert_allclose(data.train.mean, x.mean((0, 2, 3)))
    np.testing.assert_allclose(data.test.std, x.std((0, 2, 3), correction=0))


def test_cifar_is_limited(batches):
    data = cifar10(0, root=str(batches), limit=7)
    assert (len(data.train), len(data.test)) == (7, 7)
    assert not torch.equal(data.train.images, cifar10(1, root=str(batches), limit=7).train.images)


def test_without_cifar_the_download_is_named(tmp_path):
    with pytest.raises(
        DataError, match=r"curl -fL https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz \| tar xz"
    ) as e:
        cifar10(0, root=str(tmp_path / "no"))
    assert str(tmp_path / "no") in str(e.value)


def test_damaged_files_of_cifar(batches):
    folder = batches / "cifar-10-batches-bin"
    batch = folder / "data_batch_3.bin"
    whole = batch.read_bytes()
    batch.write_bytes(whole[:-100])
    with pytest.raises(DataError, match=r"data_batch_3.bin is truncated or damaged: .* 3073 bytes, found 61360 bytes"):
        cifar10(0, root=str(batches))
    batch.write_bytes(b"")
    with pytest.raises(DataError, match=r"data_batch_3.bin is truncated"):
        cifar10(0, root=str(batches))
    batch.write_bytes(b"\x0b" + whole[1:])
    with pytest.raises(DataError, match=r"data_batch_3.bin: expected labels in 0\.\.9, found 11"):
        cifar10(0, root=str(batches))
    batch.unlink()
    with pytest.raises(DataError, match=r"the file .*data_batch_3.bin does not exist"):
        cifar10(0, root=str(batches))


def test_foreign_pickles_are_refused(tmp_path):
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    (folder / "data_batch_1").write_bytes(b"not the published file")
    with pytest.raises(DataError, match="do not have the published checksums"):
        cifar10(0, root=str(tmp_path))


def test_files_stand_upright_and_have_8_bits(tmp_path: Path) -> None:
    pixels = np.zeros((8, 12, 3), np.uint8)
    pixels[:, :6] = 255  # bright on the left
    upright = Image.fromarray(pixels)
    exif = upright.getexif()
    exif[0x0112] = 6  # a camera held upright: turn it by 90 degrees to the right
    upright.save(tmp_path / "turned.png", exif=exif)
    assert np.asarray(opened(tmp_path / "turned.png")).shape == (12, 8, 3)
    assert np.asarray(opened(tmp_path / "turned.png", "L"))[:6].min() == 255
    Image.fromarray(np.full((8, 8), 3000, np.uint16)).save(tmp_path / "deep.png")
    with pytest.raises(DataError, match=r"deep.png: cannot be read as an image \(mode I;16 found, expected 8 bits"):
        opened(tmp_path / "deep.png")
