"""NYU Depth v2 in folders and in its authors' one file."""

from __future__ import annotations

import pickle
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.io import savemat

from fedloom.data import DATASETS, folders
from fedloom.data.folders import check
from fedloom.data.nyud import LABELLED as FILE
from fedloom.data.nyud import THIRTEEN, from_camera, from_pixels
from fedloom.errors import DataError, RecipeError, UserError
from folders_support import SIZE, nyud, save

CPU = torch.device("cpu")
PADDED = (16, 16)


def load(root, name="nyud", **params):
    entry = DATASETS[name]
    return entry.function(0, **entry.params.model_validate({"root": str(root), **params}).model_dump())


def batch(examples, *index):
    return examples.batch(torch.tensor(index), CPU)


@pytest.fixture
def root(tmp_path):
    return nyud(tmp_path)


def test_labels_follow_the_conventions(root):
    dataset = load(root, size=PADDED)
    assert [t.name for t in dataset.tasks] == ["semseg", "normals", "depth", "edge"]
    assert (len(dataset.train), len(dataset.test)) == (3, 2)
    assert dataset.input_shape == (3, *PADDED)
    x, y = batch(dataset.test, 1)
    inner = slice(2, 14)
    assert x.shape == (1, 3, *PADDED)

    stored = np.array(Image.open(root / "segmentation/0004.png")).astype(int)
    assert np.array_equal(y["semseg"][0, inner], np.where(stored == 0, 255, stored - 1))
    assert (y["semseg"][0, :2] == 255).all()
    vectors = np.array(Image.open(root / "normals/0004.png")) * 2.0 / 255 - 1
    vectors /= np.linalg.norm(vectors, axis=-1, keepdims=True)
    assert np.allclose(y["normals"][0, :, inner].permute(1, 2, 0), vectors, atol=1e-5)
    assert np.array_equal(y["depth"][0, 0, inner], np.load(root / "depth/0004.npy"))
    assert np.array_equal(y["edge"][0, 0, inner] * 255, np.array(Image.open(root / "edge/0004.png")))


def older(root):
    """Turn the files into those of the older archive: images .jpg, normals and edges .npy."""
    for file in [*root.glob("images/*.png")]:
        Image.open(file).save(file.with_suffix(".jpg"), quality=100, subsampling=0)
        file.unlink()
    for file in [*root.glob("normals/*.png"), *root.glob("edge/*.png")]:
        stored = np.array(Image.open(file))
        values = stored.astype(np.float32) * 2 / 255 - 1 if stored.ndim == 3 else stored > 127
        save(file.with_suffix(".npy"), values)
        file.unlink()


def test_the_older_archive_is_read_as_the_newer_one(root):
    newer = batch(load(root, size=SIZE).train, 0, 1, 2)
    older(root)
    x, y = batch(load(root, size=SIZE).train, 0, 1, 2)
    assert x.shape == newer[0].shape
    assert float((x - newer[0]).abs().mean()) < 0.05
    assert y.keys() == newer[1].keys()
    for task, label in y.items():
        torch.testing.assert_close(label, newer[1][task], rtol=0, atol=1e-5)
    assert check("nyud", str(root)).usable


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        (
            "normals/0000.npy",
            np.full((*SIZE, 3), 200.0),
            r"normals: expected H x W x 3 of numbers in -1\.\.1, found float64",
        ),
        ("normals/0000.npy", np.zeros(SIZE), r"normals: expected H x W x 3 of numbers in -1\.\.1"),
        ("normals/0000.npy", np.zeros((12, 15, 3)), "normals: expected the image's size"),
        (
            "edge/0000.npy",
            np.full(SIZE, 255, np.uint8),
            r"edge: expected H x W of numbers in 0\.\.1, found uint8 of .* 255\.\.255",
        ),
        ("edge/0000.npy", np.full(SIZE, -1.0), r"edge: expected H x W of numbers in 0\.\.1"),
        ("edge/0000.npy", np.zeros(SIZE, "U1"), r"edge: expected H x W of numbers in 0\.\.1, found <U1"),
    ],
)
def test_damaged_files_of_the_older_archive_are_named(root, file, content, message):
    older(root)
    np.save(root / file, content)
    with pytest.raises(DataError, match=message):
        batch(load(root, size=SIZE, augment=False).train, 0)


def test_thirteen_classes(root):
    members = sorted(number for group in THIRTEEN.values() for number in group)
    assert members == list(range(1, 41))
    stored = np.arange(SIZE[0] * SIZE[1]).reshape(SIZE) % 41
    save(root / "segmentation/0000.png", stored.astype(np.uint8))
    dataset = load(root, tasks=["semseg"], classes=13, size=SIZE)
    assert dataset.tasks[0].channels == 13
    label = batch(dataset.train, 0)[1]["semseg"][0].flatten()
    assert label[:6].tolist() == [255, 11, 4, 5, 0, 3]  # none, wall, floor, cabinet, benchmark, chair
    assert label[40] == 6


def test_depth_without_a_value_is_ignored(root):
    depth = np.ones(SIZE)
    depth[0, :3] = [0, np.nan, np.inf]
    save(root / "depth/0000.npy", depth[None])
    label = batch(load(root, tasks=["depth"], size=SIZE).train, 0)[1]["depth"][0, 0]
    assert label[0, :4].tolist() == [255, 255, 255, 1]


def test_absent_label_files_are_ignored_for_their_image(root):
    (root / "depth/0001.npy").unlink()
    dataset = load(root, size=SIZE)
    assert dataset.train.labels_of("depth").tolist() == [0, -1, 0]
    assert dataset.train.labels_of("edge").tolist() == [0, 0, 0]
    assert (batch(dataset.train, 1)[1]["depth"] == 255).all()
    for name in ("0003", "0004"):
        (root / f"edge/{name}.png").unlink()
    with pytest.raises(DataError, match="nyud, test: none of 2 images has a label of task 'edge'"):
        load(root, size=SIZE)


def test_lists_are_honoured_and_limits_draw_from_them(root):
    (root / "gt_sets/train.txt").write_text("0002\n\n0000  \n")
    examples = load(root, size=SIZE, tasks=["depth"]).train
    assert np.array_equal(batch(examples, 0)[1]["depth"][0, 0], np.load(root / "depth/0002.npy"))
    limited = load(root, size=SIZE, tasks=["depth"], limit=1)
    assert (len(limited.train), len(limited.test)) == (1, 1)
    assert examples.fingerprint() != load(root, size=SIZE, tasks=["edge"]).train.fingerprint()


def test_a_reader_can_be_pickled(root):
    reader = load(root, size=SIZE, limit=1).train.read.reader
    again = pickle.loads(pickle.dumps(reader))
    assert all(np.array_equal(again(0, ["semseg"])[key], value) for key, value in reader(0, ["semseg"]).items())


def test_what_was_decoded_is_kept_within_a_limit(root, monkeypatch):
    decoded, picture = [], folders.picture

    def noted(file, *more, **how):
        decoded.append(file)
        return picture(file, *more, **how)

    monkeypatch.setattr(folders, "picture", noted)
    plain, kept = load(root, size=SIZE), load(root, size=SIZE, keep=1)
    for _ in range(2):  # the second time nothing is decoded, and nobody has changed what is kept
        decoded.clear()
        for one, other in ((plain.train, kept.train), (plain.test, kept.test)):
            for i in range(len(one)):
                torch.testing.assert_close(batch(one, i), batch(other, i), rtol=0, atol=0)
                drawn = [p.batch(torch.tensor([i]), CPU, torch.Generator().manual_seed(i)) for p in (one, other)]
                torch.testing.assert_close(*drawn, rtol=0, atol=0)
    assert len(decoded) == 2 * 5 * 4  # by `plain` alone: 5 images with 3 pictures of labels, twice
    assert kept.train.nbytes + kept.test.nbytes == 1e9
    small = load(root, size=SIZE, keep=1.5e-9 * (3 + 1 + 12 + 4 + 1) * SIZE[0] * SIZE[1]).train  # one image and a half
    for _ in range(2):
        decoded.clear()
        for i in range(3):
            batch(small, i)
    assert {file.stem for file in decoded} == {"0001", "0002"}
    one_task = load(root, size=SIZE, keep=1).train
    one_task.batch(torch.tensor([0]), CPU, tasks=["semseg"])
    decoded.clear()
    one_task.batch(torch.tensor([0]), CPU, tasks=["semseg", "edge"])
    assert [file.parent.name for file in decoded] == ["images", "edge"]
    with pytest.raises(UserError, match=r"nyud: data.keep needs 9e\+05 GB of memory, but only .* GB are free"):
        load(root, size=SIZE, keep=9e5)
    with pytest.raises(UserError, match="nyud: data.keep needs inf GB of memory"):
        load(root, size=SIZE, keep=float("inf"))


def test_training_batches_are_augmented(root):
    train = load(root, size=(32, 32)).train
    x, y = train.batch(torch.arange(3), CPU, torch.Generator().manual_seed(0))
    assert x.shape == (3, 3, 32, 32)
    assert y["normals"].shape == (3, 3, 32, 32)
    assert load(root, augment=False).train.read.change.augment is None


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("segmentation/0000.png", np.full(SIZE, 41, np.uint8), r"semseg: expected labels in 0\.\.40 or 255, found 41"),
        ("segmentation/0000.png", np.zeros((*SIZE, 3), np.uint8), "semseg: expected one number per pixel, found an"),
        ("segmentation/0000.png", np.zeros((3, 4), np.uint8), "expected the image's size 12 x 16, found 3 x 4"),
        (
            "normals/0000.png",
            np.zeros((12, 15, 3), np.uint8),
            "normals: expected the image's size 12 x 16, found 12 x 15",
        ),
        ("edge/0000.png", np.zeros((12, 15), np.uint8), "edge: expected the image's size"),
        ("depth/0000.npy", np.zeros((16, 12), np.float32), "depth: expected the image's size 12 x 16, found 16 x 12"),
        ("depth/0000.npy", np.zeros(SIZE, np.uint16), "depth: expected metres, H x W of floats, found uint16"),
        ("depth/0000.npy", np.full(SIZE, 4000.0), r"depth: expected metres in 0\.\.255, found 4000\.\.4000"),
        ("depth/0000.npy", np.full(SIZE, -1.0), r"expected metres in 0\.\.255, found -1"),
        ("depth/0000.npy", np.array([{}], object), r"depth: cannot be read \(Object arrays cannot be loaded"),
        ("images/0000.png", None, "image: cannot be read"),
        ("edge/0000.png", None, "edge: cannot be read"),
        ("depth/0000.npy", None, "depth: cannot be read"),
    ],
)
def test_files_that_are_not_as_stated(root, file, content, message):
    if content is None:
        (root / file).write_bytes((root / file).read_bytes()[:60])
    else:
        save(root / file, content)
    train = load(root, size=SIZE, augment=False).train
    with pytest.raises(DataError, match=message) as error:
        batch(train, 0)
    assert file in str(error.value)
    batch(train, 1)


def test_folders_that_are_not_as_stated(root, tmp_path):
    with pytest.raises(DataError, match=r"gt_sets is not in .*Expected images/ID\.png"):
        load(tmp_path / "elsewhere")
    with pytest.raises(RecipeError, match="task 'edge' is named twice"):
        load(root, tasks=["edge", "edge"])
    for text, message in [("\n", "found none"), ("a\na\n", "'a' is named twice"), ("../a\n", "found '../a'")]:
        (root / "gt_sets/val.txt").write_text(text)
        with pytest.raises(DataError, match=message):
            load(root)
    (root / "gt_sets/val.txt").unlink()
    with pytest.raises(DataError, match=r"val\.txt: cannot be read"):
        load(root)
    (root / "images/0001.png").unlink()
    with pytest.raises(DataError, match=r"image .*0001\.png does not exist, but .*train\.txt names it"):
        load(root)


needs_h5py = pytest.mark.skipif(find_spec("h5py") is None, reason="h5py is not installed")


@pytest.fixture
def labeled(tmp_path):
    """Five images of 12 x 16 in the layout of the published file: the last two axes are W, H."""
    import h5py

    rng = np.random.default_rng(0)
    arrays = {
        "images": rng.integers(0, 256, (5, 3, 16, 12), dtype=np.uint8),
        "depths": rng.uniform(1, 9, (5, 16, 12)).astype(np.float32),
        "labels": rng.integers(0, 895, (5, 16, 12), dtype=np.uint16),
    }
    with h5py.File(tmp_path / FILE, "w") as file:
        for key, array in arrays.items():
            file[key] = array
    savemat(tmp_path / "classMapping40.mat", {"mapClass": (np.arange(894) % 41)[None].astype(np.uint8)})
    savemat(tmp_path / "splits.mat", {"trainNdxs": [[2], [5]], "testNdxs": [[1], [3], [4]]})
    return tmp_path, arrays


@needs_h5py
def test_the_authors_file(labeled):
    root, arrays = labeled
    dataset = load(root, "nyud-labeled", size=SIZE, augment=False)
    assert (len(dataset.train), len(dataset.test)) == (2, 3)
    assert dataset.tasks[0].channels == 13
    x, y = batch(dataset.train, 1)
    red = x[0, 0] * 0.229 + 0.485
    assert np.allclose(red * 255, arrays["images"][4, 0].T, atol=1e-3)
    assert np.array_equal(y["depth"][0, 0], arrays["depths"][4].T)
    forty = load(root, "nyud-labeled", size=SIZE, classes=40, tasks=["semseg"]).test
    names = arrays["labels"][2].T.astype(int)
    stored = np.where(names == 0, 0, (names - 1) % 41)
    assert np.array_equal(batch(forty, 1)[1]["semseg"][0], np.where(stored == 0, 255, stored - 1))
    first = load(root, "nyud-labeled", size=SIZE, first_ids=True, tasks=["semseg"]).test
    assert np.array_equal(batch(first, 1)[1]["semseg"][0], np.where(names < 13, names, 255))
    camera, pixels = (
        batch(load(root, "nyud-labeled", size=SIZE, normals_from=how, tasks=["normals"]).test, 0)[1]["normals"]
        for how in ("camera", "pixels")
    )
    assert not torch.equal(camera, pixels)
    small, label = batch(load(root, "nyud-labeled", size=(6, 8)).test, 0)
    assert small.shape == (1, 3, 6, 8)
    assert np.array_equal(label["depth"][0, 0], arrays["depths"][0].T[1::2, 1::2])
    assert "train: splits.mat found" in check("nyud-labeled", str(root)).notes


@needs_h5py
def test_authors_files_that_are_not_as_stated(labeled):
    import h5py

    root, arrays = labeled
    savemat(root / "splits.mat", {"trainNdxs": [[6]], "testNdxs": [[1]]})
    with pytest.raises(DataError, match=r"splits\.mat, trainNdxs: expected 1\.\.5, found 6\.\.6"):
        load(root, "nyud-labeled")
    (root / "splits.mat").unlink()
    with pytest.raises(DataError, match="none of its 5 images is in the part 'val'"):
        load(root, "nyud-labeled")
    (root / "classMapping40.mat").unlink()
    with pytest.raises(DataError, match=r"classMapping40\.mat does not exist\. .*first_ids: true"):
        load(root, "nyud-labeled")
    with h5py.File(root / FILE, "a") as file:
        del file["depths"]
        file["depths"] = arrays["depths"].transpose(0, 2, 1)
    with pytest.raises(DataError, match="depths: expected 5 x 16 x 12, floats, found float32 of shape"):
        load(root, "nyud-labeled")
    (root / FILE).write_bytes(b"no HDF5")
    with pytest.raises(DataError, match="cannot be read as HDF5"):
        load(root, "nyud-labeled")


def test_normals_from_depth():
    """A wall faces the viewer; a floor one metre below the camera looks up; missing depth has no normal."""
    wall = np.full((480, 640), 2.0, np.float32)
    wall[100, 100] = 0
    normals = from_camera(wall)
    assert np.allclose(normals[200, 300], [0, 0, 1], atol=1e-6)
    assert not normals[99:102, 100].any()
    rows = np.arange(480)[:, None] + 0.5 - 253.736166
    floor = np.where(rows > 20, 519.469611 / np.maximum(rows, 1), 0).astype(np.float32) * np.ones(
        (480, 640), np.float32
    )
    assert np.allclose(from_camera(floor)[400, 320], [0, 1, 0], atol=0.01)
    slope = np.tile(np.arange(4.0), (4, 1)).astype(np.float32)
    assert np.allclose(from_pixels(slope)[1, 1], np.array([-1, 0, 1]) / 2**0.5)
