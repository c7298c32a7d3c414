"""Domains of one classification task: from folders, from digit files, and joined from other data sets."""

from __future__ import annotations

import bz2
import gzip
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.io import savemat
from typer.testing import CliRunner

from fedloom.cli.app import app
from fedloom.core import machine
from fedloom.data import DATASETS, PARTITIONERS, Pool
from fedloom.data.transforms import MEAN, STD, crop
from fedloom.errors import DataError, RecipeError, UserError

CPU = torch.device("cpu")
folders = DATASETS["domain-folders"].function
digit_files = DATASETS["digit-files"].function
joined = DATASETS["joined-domains"].function


def write(file: Path, colour: tuple[int, int, int], size: tuple[int, int] = (10, 8)) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(file)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two domains, two classes; image i of a class has red 10 i, the class is green, the domain blue."""
    for d, domain in enumerate(("photo", "art")):
        for c, kind in enumerate(("dog", "cat")):
            for i in range(8):
                write(tmp_path / domain / kind / f"pic_{i:03d}.png", (10 * i, 100 * c, 100 * d))
    (tmp_path / "photo" / "cat" / "notes.txt").write_text("no image")
    return tmp_path


def test_folders_become_domains_and_classes(root: Path) -> None:
    data = folders(0, root=str(root), domains=["photo", "art"], size=8)
    assert data.domains == ("photo", "art")
    assert [(t.name, t.channels) for t in data.tasks] == [("label", 2)]
    assert data.classes == {"label": ("cat", "dog")}
    assert data.input_shape == (3, 8, 8)
    # 16 images a domain, cat before dog: positions 8 and 9 of ten are the first two dogs.
    assert (len(data.train), len(data.test)) == (28, 4)
    assert data.test.labels_of("label").tolist() == [1, 1, 1, 1]
    assert data.test.domain.tolist() == [0, 0, 1, 1]
    assert data.test.images[:, :, 0, 0].tolist() == [[0, 0, 0], [10, 0, 0], [0, 0, 100], [10, 0, 100]]
    assert data.train.labels_of("label").tolist() == ([0] * 8 + [1] * 6) * 2
    assert folders(0, root=str(root), size=8).domains == ("art", "photo")


def test_a_drawn_split_has_every_class_of_every_domain(root: Path) -> None:
    a, b = (folders(seed, root=str(root), size=8, test_fraction=0.25) for seed in (0, 1))
    for data in (a, b):
        pairs = list(zip(data.test.domain.tolist(), data.test.labels_of("label").tolist(), strict=True))
        assert sorted(pairs) == [(d, c) for d in (0, 1) for c in (0, 1) for _ in range(2)]
    assert not torch.equal(a.test.images, b.test.images)


def test_lists_decide_the_split(root: Path) -> None:
    for domain in ("photo", "art"):
        for name, taken in (("train", (0, 1, 2)), ("crossval", (3,))):
            lines = [f"{domain}/{kind}/pic_{i:03d}.png {c + 1}" for c, kind in enumerate(("cat", "dog")) for i in taken]
            (root / f"{domain}_{name}_kfold.txt").write_text("\n".join(lines))
    lists = {"train": "{domain}_train_kfold.txt", "test": "{domain}_crossval_kfold.txt"}
    data = folders(0, root=str(root), size=8, lists=lists)
    assert (len(data.train), len(data.test)) == (12, 4)
    assert data.test.images[:, 0, 0, 0].tolist() == [30] * 4
    with pytest.raises(DataError, match="is in both lists of domain 'art'"):
        folders(0, root=str(root), size=8, lists=lists | {"test": "{domain}_train_kfold.txt"})
    (root / "art_crossval_kfold.txt").write_text("art/cat/pic_999.png 1")
    with pytest.raises(DataError, match=r"art_crossval_kfold.txt: image 'art/cat/pic_999.png' is not in"):
        folders(0, root=str(root), size=8, lists=lists)
    with pytest.raises(RecipeError, match="and no test_fraction"):
        folders(0, root=str(root), lists=lists, test_fraction=0.1)


def test_what_is_absent_is_named(root: Path) -> None:
    with pytest.raises(DataError, match="no folder 'photos' .* Did you mean 'photo'"):
        folders(0, root=str(root), domains=["photos"])
    with pytest.raises(DataError, match="a folder for each domain in .*nowhere, found none"):
        folders(0, root=str(root / "nowhere"))
    with pytest.raises(RecipeError, match="'art' is named twice"):
        folders(0, root=str(root), domains=["art", "art"])
    (root / "art" / "cat" / "broken.jpg").write_bytes(b"no jpeg")
    with pytest.raises(DataError, match=r"broken.jpg: cannot be read as an image"):
        folders(0, root=str(root), size=8)
    (root / "art" / "cat" / "broken.jpg").unlink()
    for file in root.glob("photo/*/*.png"):
        file.unlink()
    with pytest.raises(DataError, match=r"domain 'photo' has no train example: no image found in .*photo, expected"):
        folders(0, root=str(root), size=8)


def test_a_domain_may_lack_classes_and_hidden_folders_are_none(root: Path) -> None:
    (root / "photo" / "cow").mkdir()  # an empty folder is no class
    write(root / "art" / "horse" / "a.png", (0, 0, 9))
    write(root / "art" / "horse" / "b.png", (0, 0, 10))
    for hidden in (".git", "__MACOSX", "art/.git", "art/__MACOSX"):
        write(root / hidden / "dog" / "._pic_000.png", (0, 0, 0))
    write(root / "art" / "dog" / ".hidden.png", (0, 0, 0))
    data = folders(0, root=str(root), size=8, test_fraction=0.25)
    assert data.domains == ("art", "photo")
    assert data.classes == {"label": ("cat", "dog", "horse")}
    horses = [part.domain[part.labels_of("label") == 2].tolist() for part in (data.train, data.test)]
    assert horses == [[0], [0]]
    assert len(data.train) + len(data.test) == 34
    shares = PARTITIONERS["domains"].function(Pool.of(data), 0, clients=1, cover_classes=True).shares
    assert {share.domain for share in shares} == {"art", "photo"}


def test_classes_whose_names_differ_in_case_are_said(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / "art" / "cat").rename(root / "art" / "Cat")
    said = "names of classes differ in case or blanks only: 'Cat' and 'cat'; if each is one class, write them alike"
    assert said in folders(0, root=str(root), size=8).doubts
    monkeypatch.chdir(root.parent)
    chosen = ["--clients", "1", "--method", "fedavg", "--out", "r.yaml"]
    assert f"note: {said}" in CliRunner().invoke(app, ["init", root.name, *chosen]).output


def test_one_domain_alone_names_a_class_that_it_lacks_by_an_empty_folder(root: Path) -> None:
    """As at a node, whose classes must be those of all sites."""
    (root / "photo" / "cow").mkdir()
    (root / "photo" / "notes").mkdir()
    (root / "photo" / "notes" / "a.txt").write_text("")
    data = folders(0, root=str(root), domains=["photo"], size=8)
    assert data.classes == {"label": ("cat", "cow", "dog")}
    assert data.tasks[0].channels == 3
    assert {*data.train.labels_of("label")} == {0, 2}


def test_what_is_left_out_is_said(root: Path) -> None:
    (root / "art" / "dog" / "Thumbs.db").write_bytes(b"")
    write(root / "art" / "dog" / "old" / "a.png", (0, 0, 0))
    write(root / "art" / "stray.png", (0, 0, 0))
    (root / "art" / "dog" / "scan.DCM").write_bytes(b"")
    (root / "art" / "dog" / "README").write_bytes(b"")
    said = (
        "files that are not images (.dcm, .txt, no ending) are left out: 2 of 10 in art/dog, 1 of 9 in photo/cat",
        "folders inside class folders are left out: art/dog/old",
        "images outside class folders are left out: art/stray.png",
    )
    assert folders(0, root=str(root), size=8).doubts == said
    section = {"name": "domain-folders", "root": str(root), "size": 16}
    joined_up = joined(0, sets={"d": section}, size=16)
    assert joined_up.doubts == tuple(f"set 'd': {doubt}" for doubt in said)


def test_copies_in_both_parts_are_said(root: Path) -> None:
    assert folders(0, root=str(root), size=8).doubts[1:] == ()
    write(root / "art" / "dog" / "pic_000.png", (20, 0, 100))  # this dog is for tests
    (doubt,) = folders(0, root=str(root), size=8, domains=["art"]).doubts
    pair = "for example art/dog/pic_000.png and art/dog/pic_002.png"
    assert doubt.startswith(f"1 of 2 test images are copies of training images, {pair}: ")


def test_a_crop_moves_and_mirrors() -> None:
    x = torch.arange(1, 10, dtype=torch.uint8).view(1, 1, 3, 3).expand(4, 3, 3, 3)
    top, left = torch.tensor([1, 0, 2, 1]), torch.tensor([1, 1, 0, 1])
    y = crop(x, 1, top, left, torch.tensor([False, False, False, True]))[:, 2].tolist()
    assert y[0] == [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    assert y[1] == [[0, 0, 0], [1, 2, 3], [4, 5, 6]]
    assert y[2] == [[0, 4, 5], [0, 7, 8], [0, 0, 0]]
    assert y[3] == [[3, 2, 1], [6, 5, 4], [9, 8, 7]]


def test_only_training_is_augmented_and_all_is_normalised(root: Path) -> None:
    data = folders(0, root=str(root), size=8, pad=2)
    index = torch.arange(len(data.train))
    x, y = data.train.batch(index, CPU)
    mean, std = torch.tensor(MEAN).view(3, 1, 1), torch.tensor(STD).view(3, 1, 1)
    torch.testing.assert_close(x, (data.train.images / 255 - mean) / std)
    assert y["label"].tolist() == data.train.labels_of("label").tolist()
    a, b, c = (data.train.batch(index, CPU, torch.Generator().manual_seed(s))[0] for s in (0, 0, 1))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)
    assert not torch.equal(a, x)
    assert data.train.prefetch
    assert not data.test.prefetch
    test, _ = data.test.batch(torch.arange(4), CPU, torch.Generator().manual_seed(0))
    assert torch.equal(test, data.test.batch(torch.arange(4), CPU)[0])
    plain = folders(0, root=str(root), size=8, pad=0, flip=False)
    assert torch.equal(plain.train.batch(index, CPU, torch.Generator())[0], x)
    assert not plain.train.prefetch


def test_every_place_and_both_sides_occur(root: Path) -> None:
    train = folders(0, root=str(root), size=8, pad=1).train
    pattern = torch.arange(64, dtype=torch.uint8).view(1, 8, 8).expand(3, 8, 8)
    train.images[0] = pattern
    seen = {
        tuple(train.batch(torch.tensor([0]), CPU, torch.Generator().manual_seed(s))[0][0, 0].flatten().tolist())
        for s in range(200)
    }
    assert len(seen) == 2 * 3 * 3


def idx(array: np.ndarray) -> bytes:
    head = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes()
    return head + array.astype(np.uint8).tobytes()


@pytest.fixture
def digits_root(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for stem, count in (("train", 6), ("t10k", 4)):
        images = rng.integers(0, 256, (count, 28, 28))
        (raw / f"{stem}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(images)))
        (raw / f"{stem}-labels-idx1-ubyte").write_bytes(idx(np.arange(count)))
    for name, count in (("usps.bz2", 3), ("usps.t.bz2", 2)):
        lines = [f"{i + 8} " + " ".join(f"{j + 1}:{-1 + 2 * (j % 2)}" for j in range(256)) for i in range(count)]
        (tmp_path / name).write_bytes(bz2.compress("\n".join(lines).encode()))
    (tmp_path / "svhn").mkdir()
    for name, count in (("train", 5), ("test", 3)):
        X = np.zeros((32, 32, 3, count), np.uint8)
        X[:, :, 1] = 200
        savemat(tmp_path / f"svhn/{name}_32x32.mat", {"X": X, "y": np.array([[10], [1], [9], [2], [3]][:count])})
    for part in ("train", "val"):
        for digit in range(10):
            write(tmp_path / "syn" / part / str(digit) / "a.png", (digit, 0, 7))
    return tmp_path


def test_digit_files(digits_root: Path) -> None:
    data = digit_files(0, root=str(digits_root), size=16)
    assert data.domains == ("mnist", "usps", "svhn", "syn")
    assert np.bincount(data.train.domain).tolist() == [6, 3, 5, 10]
    assert np.bincount(data.test.domain).tolist() == [4, 2, 3, 10]
    assert data.train.labels_of("label").tolist() == [0, 1, 2, 3, 4, 5, 7, 8, 9, 0, 1, 9, 2, 3, *range(10)]
    assert data.input_shape == (3, 16, 16)
    usps, svhn, syn = (data.train.images[data.train.domain == i] for i in (1, 2, 3))
    assert usps[0, 2, 3].tolist() == [0, 255] * 8
    assert svhn.float().mean((0, 2, 3)).tolist() == [0, 200, 0]
    assert syn[:, 0, 0, 0].tolist() == list(range(10))
    two = digit_files(0, root=str(digits_root), domains=["syn", "usps"])
    assert two.domains == ("syn", "usps")
    assert two.input_shape == (3, 32, 32)


@pytest.mark.parametrize(("name", "packed"), [("mnist", "train-images-idx3-ubyte.gz"), ("usps", "usps.bz2")])
def test_digit_files_that_hold_more_than_memory_are_refused(
    digits_root: Path, monkeypatch: pytest.MonkeyPatch, name: str, packed: str
) -> None:
    file = next(digits_root.rglob(packed))
    file.write_bytes({".gz": gzip.compress, ".bz2": bz2.compress}[file.suffix](bytes(5_000_000)))
    monkeypatch.setattr(machine, "free_memory", lambda: 4 * 10**6)
    with pytest.raises(UserError, match=f"{packed} needs .* GB of memory"):
        digit_files(0, root=str(digits_root), domains=[name])


def test_damaged_digit_files(digits_root: Path) -> None:
    file = digits_root / "MNIST/raw/t10k-labels-idx1-ubyte"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(DataError, match="t10k-labels-idx1-ubyte: expected an idx file of bytes"):
        digit_files(0, root=str(digits_root), domains=["mnist"])
    file.write_bytes(file.read_bytes()[:6])
    with pytest.raises(DataError, match="t10k-labels-idx1-ubyte: expected an idx file of bytes"):
        digit_files(0, root=str(digits_root), domains=["mnist"])
    (digits_root / "MNIST/raw/train-images-idx3-ubyte.gz").write_bytes(b"\x1f\x8bxx")
    with pytest.raises(DataError, match=r"ubyte.gz: cannot be read"):
        digit_files(0, root=str(digits_root), domains=["mnist"])
    (digits_root / "usps.bz2").write_bytes(bz2.compress(b"1 1:0 2:0"))
    with pytest.raises(DataError, match=r"usps.bz2: cannot be read as lines of a label and 256 values"):
        digit_files(0, root=str(digits_root), domains=["usps"])
    (digits_root / "svhn/test_32x32.mat").unlink()
    with pytest.raises(DataError, match=r"digit-files, svhn: test_32x32.mat is not in"):
        digit_files(0, root=str(digits_root), domains=["svhn"])
    with pytest.raises(RecipeError, match="'syn' is named twice"):
        digit_files(0, root=str(digits_root), domains=["syn", "syn"])


def arrays_file(path: Path, side: int, grey: bool, count: int = 20, classes: int = 4, domains: int = 0) -> dict:
    rng = np.random.default_rng(side)
    arrays = {}
    for split in ("train", "test"):
        shape = (count, side, side) if grey else (count, side, side, 3)
        arrays[f"x_{split}"] = rng.integers(0, 256, shape, dtype=np.uint8)
        arrays[f"y_{split}"] = np.arange(count) % classes
        arrays[f"d_{split}"] = np.arange(count) % max(domains, 1)
    np.savez(path, names=np.array(["x", "y", "z"][:domains] or ["x"]), **arrays)
    own = {"domain": "d_{split}", "domain_names": "names"} if domains else {}
    return {"name": "arrays", "path": path.name, **own}


def test_sets_become_domains_of_one_task(tmp_path: Path) -> None:
    sets = {
        "a": arrays_file(tmp_path / "a.npz", 12, grey=True),
        "many": arrays_file(tmp_path / "b.npz", 16, grey=False, domains=2),
    }
    data = joined(0, sets=sets, root=str(tmp_path), size=16)
    assert data.domains == ("a", "x", "y")
    assert data.train.domain.tolist() == [0] * 20 + [1, 2] * 10
    assert data.train.labels_of("label").tolist() == [0, 1, 2, 3] * 10
    assert data.input_shape == (3, 16, 16)
    assert torch.equal(data.train.images[:20, 0], data.train.images[:20, 2])
    with np.load(tmp_path / "b.npz") as file:
        assert np.array_equal(data.test.images[20:].permute(0, 2, 3, 1).numpy(), file["x_test"])
    partition = PARTITIONERS["domains"].function(Pool.of(data), 0, clients={"a": 2, "y": 1}, fraction=0.5)
    assert sorted(s.domain for s in partition.shares) == ["a", "a", "y"]


def test_the_embedded_digits_can_be_joined() -> None:
    section = {"name": "digits", "tasks": ["digit"], "domains": ["plain", "inverted"]}
    data = joined(0, sets={"digits": section}, size=16)
    assert data.domains == ("plain", "inverted")
    plain = DATASETS["digits"].function(0, tasks=["digit"], domains=["plain", "inverted"])
    assert torch.equal(data.test.images[:, 1], plain.test.images[:, 0].mul(255).round().to(torch.uint8))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"b": {"classes": 5}}, "the same number of classes, found {'a': 4, 'b': 5}"),
        ({"b": {"size": 8}}, "set 'b': expected images 1 or 3 x 16 x 16 in memory, found torch.uint8 3 x 8 x 8"),
        ({"b": {"domains": 2}, "x": {}}, "another domain has the name 'x' too"),
        ({"b": {"tasks": ["digit", "parity"]}}, "expected one task, found digit, parity"),
    ],
)
def test_sets_that_do_not_fit(tmp_path: Path, changes: dict, message: str) -> None:
    sets = {"a": arrays_file(tmp_path / "a.npz", 16, grey=False)}
    for name, change in changes.items():
        change = dict(change)
        known = {k: change.pop(k) for k in ("classes", "domains") if k in change}
        section = arrays_file(tmp_path / f"{name}.npz", 16, grey=False, **known)
        sets[name] = {"name": "digits", **change} if "tasks" in change else section | change
    with pytest.raises(DataError, match=message):
        joined(0, sets=sets, root=str(tmp_path), size=16)


def test_dense_tasks_have_no_classes_to_join() -> None:
    scenes = {"name": "scenes", "tasks": ["depth"], "count": 2, "test_count": 2, "height": 16, "width": 16}
    with pytest.raises(DataError, match="one class per image, found the dense task 'depth'"):
        joined(0, sets={"s": scenes}, size=16)


def test_names_of_folders_do_not_write_to_a_terminal(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / "art").rename(root / "a\x1b]0;title\x07rt")
    monkeypatch.chdir(root.parent)
    chosen = ["--clients", "1", "--method", "fedavg", "--rounds", "1", "--out", "named.yaml"]
    told = CliRunner().invoke(app, ["init", root.name, *chosen], color=True)
    assert told.exit_code == 0, told.exception
    assert r"a\x1b]0;title\x07rt" in told.output
    assert "\x1b" not in told.output
