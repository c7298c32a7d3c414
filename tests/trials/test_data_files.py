"""Broken and lying data files: a data set is read as it is, or refused in a sentence with the file's name."""

from __future__ import annotations

import bz2
import gzip
import io
import random
import shutil
import struct
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.io import savemat

from fedloom.cli.data import build
from folders_support import nyud, pascal, save
from trials.hostile import Tally, bytes_like, judged
from trials.scale import cases

Arrays = Mapping[str, Any]
SPLITS = ("train", "test")


def pictures(rng: np.random.Generator) -> dict[str, Any]:
    """Images with class labels and domains."""
    found: dict[str, Any] = {}
    for split in SPLITS:
        found[f"x_{split}"] = rng.integers(0, 256, (12, 8, 8, 3), dtype=np.uint8)
        found[f"y_{split}"] = np.arange(12) % 3
        found[f"task_{split}"] = np.arange(12) % 2
        found[f"depth_{split}"] = rng.random((12, 8, 8)).astype(np.float32)
        found[f"sem_{split}"] = rng.integers(0, 4, (12, 8, 8))
    return found


def lying(array: Any, rng: random.Random) -> bytes:
    """An .npy file whose header says something else than what follows."""
    shape = list(array.shape)
    shape[rng.randrange(len(shape))] = rng.choice((0, 1, 10**5, 10**10, 10**30, -1))
    kind = rng.choice((array.dtype.str, "|O", "<f8", "<f2", ">i8", "|S3", "<c16", "|b1", "<M8[s]", "<U9", "|V7"))
    head = {"descr": kind, "fortran_order": rng.random() < 0.5, "shape": tuple(shape)}
    text = (rng.choice((repr(head), "(" * 5000, "{}", repr(head)[:-3], repr([head]))) + "\n").encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", min(len(text), 65535)) + text + array.tobytes()


def strange(array: Any, rng: random.Random) -> Any:
    """An array of another kind, shape or range."""
    return rng.choice(
        (
            lambda: array.astype(rng.choice(("f2", "f4", "f8", "i1", "u8", "c8", "?", "S2", "U2", "M8[s]"))),
            lambda: array.astype(object),
            lambda: array[:0],
            lambda: array[..., None],
            lambda: array.reshape(-1),
            lambda: array[:-1],
            lambda: np.full_like(array, 2_000_000_000 if array.dtype.itemsize >= 4 else 255),
            lambda: np.where(np.arange(array.size).reshape(array.shape) == 5, np.iinfo("i8").max, array),
            lambda: np.where(np.arange(array.size).reshape(array.shape) == 5, np.nan, array),
            lambda: -array.astype("i8") - 2,
            lambda: array.astype("f8") * 1e308,
            lambda: np.zeros((3,), [("a", "i4"), ("b", "f8")]),
            lambda: np.array(5),
        )
    )()


def write(path: Path, arrays: Arrays, rng: random.Random) -> None:
    """An archive or a folder of arrays in which something is wrong."""
    files = {}
    victim, how = rng.choice(list(arrays)), rng.randrange(4)
    for name, array in arrays.items():
        buffer = io.BytesIO()
        if name == victim and how == 0:
            with np.errstate(all="ignore"):
                np.save(buffer, strange(array, rng), allow_pickle=True)
        elif name == victim and how == 1:
            buffer.write(lying(array, rng))
        else:
            np.save(buffer, array)
        files[name] = bytes_like(buffer.getvalue(), rng) if name == victim and how == 2 else buffer.getvalue()
    if path.suffix:
        with zipfile.ZipFile(path, "w", rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))) as archive:
            for name, data in files.items():
                archive.writestr(f"{name}.npy", data)
        if how == 3:
            path.write_bytes(bytes_like(path.read_bytes(), rng))
    else:
        path.mkdir()
        for name, data in files.items():
            (path / f"{name}.npy").write_bytes(data)


READERS = {
    "images": ("arrays", "images=x_{split}", "labels={kind: 'y_{split}'}", "domain=task_{split}"),
    "sized": ("arrays", "images=x_{split}", "labels={kind: 'y_{split}'}", "size=16", "channels=1", "limit=5"),
    "pool": ("arrays", "images=x_train", "labels={kind: y_train}", "test_fraction=0.5"),
    "dense": (
        "arrays",
        "dense={depth: {kind: depth, key: 'depth_{split}'}, s: {kind: semseg, key: 'sem_{split}', classes: 4}}",
    ),
    "classes": ("tables", "kind=classification", "features=x_{split}"),
    "numbers": ("tables", "kind=regression", "features=sem_{split}", "targets=y_{split}"),
}


def opened(name: str, *changes: str) -> Any:
    """Read a data set, a batch of it, and build a head for each task, as a run does."""
    dataset = build(name, changes)
    for part in (dataset.train, dataset.test):
        x, y = part.batch(torch.arange(min(3, len(part))), torch.device("cpu"), torch.Generator())
        assert bool(torch.isfinite(x).all())
        for task in dataset.tasks:
            if not task.dense:
                head = task.head(4)
                loss = task.loss(head(torch.zeros(len(x), 4)), y[task.name])
                assert not bool(torch.isinf(loss).any())
    return dataset


@pytest.mark.parametrize("kind", ["npz", "folder"])
def test_arrays(kind: str, tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    tally = Tally(record_property)
    for number in range(cases(25, 1500)):
        rng = random.Random(f"{kind} {number}")
        path = tmp_path / ("data.npz" if kind == "npz" else "data")
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
        write(path, pictures(np.random.default_rng(number)), rng)
        reader = rng.choice(list(READERS))
        name, *changes = READERS[reader]
        with tally.case(f"{number}, {reader}"):
            tally.answer(judged(lambda: opened(name, f"path={path}", *changes), path))  # noqa: B023
    tally.close()


def test_tables_in_csv_files(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    tally, path = Tally(record_property), tmp_path / "data.csv"
    lines = [f"{i / 8},{i % 5},{'abc'[i % 3]}" for i in range(40)]
    whole = "\n".join(["age,height,kind", *lines]).encode()
    changes = ("inputs={age: number, height: number}", "tasks={kind: {kind: classification, classes: [a, b, c]}}")
    for number in range(cases(25, 1500)):
        path.write_bytes(bytes_like(whole, random.Random(f"csv {number}")))
        with tally.case(str(number)):
            tally.answer(judged(lambda: opened("table", f"path={path}", *changes), path))
    tally.close()


def domains(root: Path) -> None:
    for number, place in enumerate(("art/cat", "art/dog", "photo/cat", "photo/dog")):
        for i in range(10):
            save(root / place / f"{i}.{'jpg' if i % 2 else 'png'}", np.full((9, 8, 3), 20 * number + i, np.uint8))


def classes(root: Path) -> None:
    for number, place in enumerate(("train/a", "train/b", "test/a", "test/b")):
        for i in range(3):
            (root / "set" / place).mkdir(parents=True, exist_ok=True)
            save(root / "set" / place / f"{i}.png", np.full((9, 8, 3), 20 * number + i, np.uint8))


def digits(root: Path) -> None:
    rng = np.random.default_rng(0)
    (root / "MNIST/raw").mkdir(parents=True)
    for stem in ("train", "t10k"):
        head = struct.pack(">IIII", 0x803, 5, 28, 28) + rng.bytes(5 * 28 * 28)
        (root / f"MNIST/raw/{stem}-images-idx3-ubyte.gz").write_bytes(gzip.compress(head))
        (root / f"MNIST/raw/{stem}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 0x801, 5) + bytes(range(5)))
    for name in ("usps", "usps.t"):
        line = "3 " + " ".join(f"{i + 1}:{0.5:.4f}" for i in range(256))
        (root / f"{name}.bz2").write_bytes(bz2.compress(f"{line}\n{line}\n".encode()))
    for name in ("train", "test"):
        pictures = rng.integers(0, 256, (32, 32, 3, 4), dtype=np.uint8)
        savemat(root / f"{name}_32x32.mat", {"X": pictures, "y": np.array([[1], [10], [3], [4]], np.uint8)})


def cifar(root: Path) -> None:
    (root / "cifar-10-batches-bin").mkdir()
    for name in (*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"):
        (root / f"cifar-10-batches-bin/{name}.bin").write_bytes(bytes([3, *bytes(3072)]) * 3)


FOLDERS: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "domain-folders": (domains, ("domain-folders", "root={root}", "size=8")),
    "class-folders": (classes, ("class-folders", "root={root}", "sets=[set]", "size=8")),
    "digit-files": (digits, ("digit-files", "root={root}", "domains=[mnist, usps, svhn]", "size=8")),
    "cifar10": (cifar, ("cifar10", "root={root}")),
    "nyud": (nyud, ("nyud", "root={root}", "size=[32, 32]")),
    "pascal-context": (pascal, ("pascal-context", "root={root}", "size=[32, 32]")),
}


def test_folders_of_files(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    """One file of a data set is damaged, exchanged for another, empty, or a folder."""
    tally, root = Tally(record_property), tmp_path / "damaged"
    for name, (make, _) in FOLDERS.items():
        (tmp_path / name).mkdir()
        make(tmp_path / name)
    for number in range(cases(6, 400)):
        rng = random.Random(number)
        name = rng.choice(list(FOLDERS))
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(tmp_path / name, root)
        files = sorted(path for path in root.rglob("*") if path.is_file())
        file, other = rng.sample(files, 2)
        if rng.random() < 0.8:
            file.write_bytes(bytes_like(file.read_bytes(), rng))
        elif rng.random() < 0.8:
            shutil.copy(other, file)
        else:
            file.unlink()
            file.mkdir()
        kind, *changes = (word.format(root=root) for word in FOLDERS[name][1])
        with tally.case(f"{number}, {name}, {file.relative_to(root)}"):
            tally.answer(judged(lambda: whole(kind, *changes), root))  # noqa: B023
    tally.close()


def whole(name: str, *changes: str) -> Any:
    """Read a data set, and all of its examples, one by one."""
    dataset = build(name, changes)
    for part in (dataset.train, dataset.test):
        for position in range(len(part)):
            x, _ = part.batch(torch.tensor([position]), torch.device("cpu"), torch.Generator())
            assert bool(torch.isfinite(x).all())
    return dataset
