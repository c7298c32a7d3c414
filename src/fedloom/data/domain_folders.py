"""Image classification over several domains, from the folders and files in which the field keeps them."""

from __future__ import annotations

import bz2
import gzip
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
from pydantic import Field

from fedloom.core.errors import DataError, RecipeError, nearest, parsing
from fedloom.data.domains import Pad
from fedloom.data.folders import matlab, split_list
from fedloom.data.images import as_images, read
from fedloom.data.prepare import SPLITS, Array, TestFraction, no_repeats, stratified
from fedloom.data.registry import DATASETS

if TYPE_CHECKING:
    from fedloom.data.dataset import Dataset
    from fedloom.data.pictures import Piece

Size = Annotated[int, Field(ge=8)]
DigitSet = Literal["mnist", "usps", "svhn", "syn"]
SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".ppm")


@DATASETS.register("domain-folders", source="PACS (Li et al., 2017), Office-Caltech (Gong et al., 2012); F2DC release")
def domain_folders(
    seed: int,
    *,
    root: str,
    domains: Annotated[list[str], Field(min_length=1)] | None = None,
    size: Size = 128,
    test_fraction: TestFraction | None = None,
    lists: dict[Literal["train", "test"], str] | None = None,
    pad: Pad = 4,
    flip: bool = True,
) -> Dataset:
    """Images of several domains in folders ROOT/DOMAIN/CLASS/IMAGE, as one task `label`. Needs pillow.

    `domains` names the folders in the order wanted (by default all, sorted). All have the same classes, numbered in
    the order of their names. Images are read once, resized to `size` x `size` and kept in memory as uint8.

    By default the last two of every ten images of a domain, sorted by class and name, are the test part, as in F2DC's
    release. `test_fraction` draws that share of each class and domain instead, from the recipe's seed. `lists` names
    files instead, for example {train: "splits/{domain}_train_kfold.txt", test: "splits/{domain}_crossval_kfold.txt"},
    one image a line: its path relative to `root`, up to the first blank.

    In training, images are padded by `pad` black pixels, cropped at a random place and, with `flip`, mirrored with
    probability 1/2; they are always normalised by ImageNet's mean and standard deviation. Raises DataError for what is
    absent or unreadable.
    """
    from fedloom.data.pictures import TASK, dataset

    if lists is not None and (test_fraction is not None or set(lists) != set(SPLITS)):
        raise RecipeError("domain-folders: expected lists of both train and test, without test_fraction")
    base = Path(root).expanduser()
    known = _folders(base, "domain")
    names = known if domains is None else domains
    for name in names:
        if name not in known:
            raise DataError(f"domain-folders: no folder {name!r} in {base}.{nearest(name, known)} Found: {_few(known)}")
    no_repeats("domain-folders", "domain", names)
    classes = _folders(base / names[0], "class")
    parts: dict[str, list[Piece]] = {split: [] for split in SPLITS}
    for number, name in enumerate(names):
        if (found := _folders(base / name, "class")) != classes:
            other = sorted(set(found) ^ set(classes))
            raise DataError(f"domain-folders: {base / name}: expected the classes of {names[0]!r}, but {_few(other)}")
        files = [(file, label) for label, kind in enumerate(classes) for file in _pictures(base / name / kind)]
        labels = np.array([label for _, label in files])
        if lists is None:
            last_two = np.arange(len(files)) % 10 > 7
            test = last_two if test_fraction is None else stratified(labels, test_fraction, seed)
            chosen = {"train": ~test, "test": test}
        else:
            chosen = _listed(base, name, [file for file, _ in files], lists)
        images = read([file for file, _ in files], size).contiguous()
        for split, mask in chosen.items():
            parts[split].append((images[np.flatnonzero(mask)], labels[mask], np.full(int(mask.sum()), number)))
    made = dataset("domain-folders", parts, tuple(names), len(classes), pad, flip)
    return replace(made, classes={TASK: tuple(classes)})


@DATASETS.register("digit-files", source="MNIST, USPS, SVHN, SYN: the domains Digits of FedHEAL and F2DC")
def digit_files(
    seed: int,
    *,
    root: str,
    domains: Annotated[list[DigitSet], Field(min_length=1)] = ["mnist", "usps", "svhn", "syn"],  # noqa: B006
    size: Size = 32,
    pad: Pad = 4,
    flip: bool = True,
) -> Dataset:
    """Digits of several origins as domains of one task `label` (10 classes), each with its own train and test part.

    ROOT holds, as torchvision leaves them, MNIST/raw/{train,t10k}-{images-idx3,labels-idx1}-ubyte (or .gz), usps.bz2
    and usps.t.bz2, {train,test}_32x32.mat (SVHN; needs scipy) and syn/{train,val}/CLASS/IMAGE (needs pillow). Each may
    also lie in a folder called like its domain. Grey images are repeated; all are resized to `size` x `size`, uint8.

    In training, images are padded by `pad` black pixels, cropped at a random place and, with `flip`, mirrored with
    probability 1/2, as in F2DC's release; they are always normalised by ImageNet's mean and standard deviation. Raises
    DataError for what is absent or damaged.
    """
    from fedloom.data.pictures import dataset

    no_repeats("digit-files", "domain", domains)
    base = Path(root).expanduser()
    parts: dict[str, list[Piece]] = {split: [] for split in SPLITS}
    for number, name in enumerate(domains):
        for split in SPLITS:
            where = f"digit-files, {name}, {split}, below {base.absolute()}"
            images, labels = READERS[name](base, split == "train", size)
            if len(images) != len(labels) or not len(labels):
                raise DataError(f"{where}: {len(images)} images and {len(labels)} labels found")
            if labels.min() < 0 or labels.max() > 9:
                raise DataError(f"{where}: expected labels in 0..9, found others")
            colour = as_images(np.array(images, order="C"), size, 3, where)
            parts[split].append((colour, labels, np.full(len(labels), number)))
    return dataset("digit-files", parts, tuple(domains), 10, pad, flip)


def _folders(base: Path, what: str) -> list[str]:
    """Names of the folders in `base`, sorted; DataError where there are none."""
    found = sorted(entry.name for entry in base.iterdir() if entry.is_dir()) if base.is_dir() else []
    if not found:
        raise DataError(f"domain-folders: expected a folder for each {what} in {base.absolute()}, found none")
    return found


def _pictures(base: Path) -> list[Path]:
    """The image files in a folder, sorted by name."""
    return sorted(file for file in base.iterdir() if file.suffix.lower() in SUFFIXES)


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")


def _listed(
    base: Path, domain: str, files: Sequence[Path], lists: dict[Literal["train", "test"], str]
) -> dict[str, Array]:
    """Which files (N, bool) the lists of a domain name, per split."""
    position = {file.relative_to(base).as_posix(): i for i, file in enumerate(files)}
    chosen: dict[str, Array] = {}
    for split, pattern in lists.items():
        listed = base / pattern.replace("{domain}", domain)
        mask = np.zeros(len(files), bool)
        for line in split_list(listed):
            name = line.split()[0]
            if name not in position:
                raise DataError(f"{listed}: image {name!r} is not in {base / domain}")
            mask[position[name]] = True
        chosen[split] = mask
    both = np.flatnonzero(chosen["train"] & chosen["test"])
    if len(both):
        raise DataError(f"domain-folders: {files[both[0]]} is in both lists of domain {domain!r}")
    return chosen


def _file(base: Path, domain: str, *names: str) -> Path:
    """The first of the files that exists, in `base` or in a folder called like the domain."""
    for folder in (base, base / domain, base / domain.upper()):
        for name in names:
            if (folder / name).is_file():
                return folder / name
    raise DataError(f"digit-files, {domain}: {names[0]} is not in {base.absolute()}")


def _idx(file: Path, ndim: int) -> Array:
    """An array of bytes in MNIST's idx format, perhaps compressed."""
    with parsing(f"{file}: cannot be read"):
        raw = file.read_bytes()
        raw = gzip.decompress(raw) if file.suffix == ".gz" else raw
    head = 4 + 4 * ndim
    begins = len(raw) >= head and raw[:4] == bytes([0, 0, 8, ndim])
    shape = tuple(np.frombuffer(raw[4:head], ">u4").tolist()) if begins else ()
    if len(shape) != ndim or len(raw) - head != int(np.prod(shape)):
        raise DataError(f"{file}: is cut off or no idx file of {ndim} dimensions and bytes")
    return np.frombuffer(raw, np.uint8, offset=head).reshape(shape)


def _mnist(base: Path, train: bool, size: int) -> tuple[Array, Array]:
    stem = "train" if train else "t10k"
    found = []
    for kind, ndim in (("images-idx3", 3), ("labels-idx1", 1)):
        name = f"{stem}-{kind}-ubyte"
        places = [f"{folder}{name}{suffix}" for folder in ("MNIST/raw/", "raw/", "") for suffix in ("", ".gz")]
        found.append(_idx(_file(base, "mnist", *places), ndim))
    return found[0], found[1].astype(np.int64)


def _usps(base: Path, train: bool, size: int) -> tuple[Array, Array]:
    """Lines 'LABEL 1:VALUE ... 256:VALUE', labels 1..10 and values -1..1."""
    file = _file(base, "usps", "usps.bz2" if train else "usps.t.bz2")
    with parsing(f"{file}: cannot be read as lines of a label and 256 values"):
        words = bz2.decompress(file.read_bytes()).decode("ascii").replace(":", " ").split()
        table = np.array(words, np.float64).reshape(-1, 1 + 2 * 256)
    if not np.isfinite(table).all():
        raise DataError(f"{file}: expected finite values, found NaN or infinity")
    images = np.rint((table[:, 2::2] + 1) * 127.5).astype(np.uint8).reshape(-1, 16, 16)
    return images, table[:, 0].astype(np.int64) - 1


def _svhn(base: Path, train: bool, size: int) -> tuple[Array, Array]:
    """X is 32 x 32 x 3 x N; the digit 0 is labelled 10."""
    file = _file(base, "svhn", f"{'train' if train else 'test'}_32x32.mat")
    images: Array = np.asarray(matlab(file, "X"))
    if images.ndim != 4 or images.dtype != np.uint8:
        raise DataError(f"{file}: expected X of bytes, 32 x 32 x 3 x N, found {images.dtype} of shape {images.shape}")
    return images.transpose(3, 0, 1, 2), np.asarray(matlab(file, "y")).reshape(-1).astype(np.int64) % 10


def _syn(base: Path, train: bool, size: int) -> tuple[Array, Array]:
    """Folders of images by class; they are resized as they are read."""
    folder = base / "syn" / ("train" if train else "val")
    classes = _folders(folder, "class")
    files = [(file, label) for label, name in enumerate(classes) for file in _pictures(folder / name)]
    images = read([file for file, _ in files], size).permute(0, 2, 3, 1)
    return images.numpy(), np.array([label for _, label in files], np.int64)


READERS: dict[DigitSet, Callable[[Path, bool, int], tuple[Array, Array]]] = {
    "mnist": _mnist,
    "usps": _usps,
    "svhn": _svhn,
    "syn": _syn,
}
"""Domain -> function of (root, whether train, size) that returns images and labels 0..9."""
