"""Make the folders that `class-folders` reads, ROOT/NAME/{train,test}/CLASS/IMAGE, from other forms of a data set.

The sources are torchvision's data sets, which download themselves, and folders of classes. The conversion is tested
on small made-up data sets of torchvision's form. The downloads themselves, and with them the arguments in `SOURCES`,
have never been run against the servers that hold the data; the arguments were compared with torchvision's signatures.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from fedloom.core.errors import DataError, choices, naming
from fedloom.core.extras import need
from fedloom.core.machine import LOCK, locked
from fedloom.data.images import SUFFIXES, opened
from fedloom.data.prepare import SPLITS, stratified

LOSSLESS = 64
"""Images with no side above this are written as PNG, others as JPEG of quality 95."""

Arguments = Mapping[str, Any]


class TorchvisionImages(Protocol):
    """What torchvision's data sets are: pairs of a Pillow image and a class from 0."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> tuple[Any, Any]: ...


@dataclass(frozen=True)
class TorchvisionSet:
    """A data set of torchvision: its class, the arguments of its parts, and the share to split off where it has none.

    The sets of a part are read one after another. Where `test` is empty, the share `test_fraction` of each class of
    `train` becomes the test part.
    """

    library: str
    train: tuple[Arguments, ...] = ({},)
    test: tuple[Arguments, ...] = ()
    test_fraction: float | None = None


def _splits(library: str, train: Sequence[str] = ("train",), test: str = "test") -> TorchvisionSet:
    return TorchvisionSet(library, tuple({"split": split} for split in train), ({"split": test},))


def _flags(library: str, **more: str) -> TorchvisionSet:
    return TorchvisionSet(library, ({"train": True, **more},), ({"train": False, **more},))


SOURCES: dict[str, TorchvisionSet] = {
    # The eight tasks of model merging (Ilharco et al., 2023) without RESISC45, which torchvision lacks. SUN397 has
    # equal parts, as its authors' ten splits; DTD trains on its train and val parts.
    "sun397": TorchvisionSet("SUN397", test_fraction=0.5),
    "cars": _splits("StanfordCars"),
    "eurosat": TorchvisionSet("EuroSAT", test_fraction=0.1),
    "svhn": _splits("SVHN"),
    "gtsrb": _splits("GTSRB"),
    "mnist": _flags("MNIST"),
    "dtd": _splits("DTD", ("train", "val")),
    # Others of EMR-Merging's thirty (Huang et al., 2024).
    "cifar10": _flags("CIFAR10"),
    "cifar100": _flags("CIFAR100"),
    "emnist": _flags("EMNIST", split="balanced"),
    "fashion-mnist": _flags("FashionMNIST"),
    "food101": _splits("Food101"),
    "pets": _splits("OxfordIIITPet", ("trainval",)),
    "stl10": _splits("STL10"),
}


def prepare(
    name: str,
    root: str | Path,
    source: str | Path | None = None,
    test_fraction: float | None = None,
    size: int | None = None,
) -> dict[str, int]:
    """Write ROOT/NAME/{train,test}/CLASS/IMAGE and return the number of images in each part.

    Without `source`, `name` is one of `SOURCES` and torchvision downloads it to ROOT/downloads. `source` is a folder
    that holds CLASS/IMAGE, or `train` and `test` with such folders. `test_fraction` (of each class) makes a test part
    where there is none: 0.2 unless the source says otherwise, and the same images every time. `size` shrinks images
    whose shorter side is longer. DataError where the folder exists, the source is unknown or not as expected, or a
    download fails; InUseError where another process is preparing the same.
    """
    target = Path(root).expanduser() / name
    if source is None and name not in SOURCES:
        raise DataError(
            f"data set {name!r} is not one that torchvision downloads."
            f"{choices('Known', name, SOURCES)}. For others give a folder of classes as --source"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    with locked(target.with_name(f".{target.name}{LOCK}"), target):
        return _prepared(target, name, source, test_fraction, size)


def _prepared(
    target: Path, name: str, source: str | Path | None, test_fraction: float | None, size: int | None
) -> dict[str, int]:
    """Do what `prepare` does, where no other process does it at the same time."""
    if target.exists():
        raise DataError(f"data set {name!r}: {target} is there already; remove it to prepare it anew")
    fraction = test_fraction
    if source is not None:
        parts, classes = _folders(Path(source).expanduser())
    else:
        entry = SOURCES[name]
        parts, classes = _torchvision(name, entry, target.parent / "downloads")
        fraction = fraction or entry.test_fraction
    if "test" in parts and test_fraction is not None:
        raise DataError(f"data set {name!r} has a test part, so a test fraction has no use")
    # Everything goes into a folder of another name first, so that a broken conversion is not taken for a whole one.
    partial = target.with_name(f"{target.name}.partial")
    if partial.exists():
        shutil.rmtree(partial)
    written = {split: _write(parts.get(split, ()), partial / split, classes, size) for split in SPLITS}
    if "test" not in parts:
        labels = np.array([label for _, label in written["train"]])
        test = stratified(labels, fraction or 0.2, seed=0)
        for (file, _), moved in zip(written["train"], test.tolist(), strict=True):
            if moved:
                there = partial / "test" / file.parent.name / file.name
                there.parent.mkdir(parents=True, exist_ok=True)
                file.rename(there)
        counts = {"train": int((~test).sum()), "test": int(test.sum())}
    else:
        counts = {split: len(files) for split, files in written.items()}
    partial.rename(target)
    return counts


def _write(
    pairs: Iterable[tuple[Any, Any]], folder: Path, classes: Sequence[str] | None, size: int | None
) -> list[tuple[Path, int]]:
    """Write images into a folder per class, and return their files with their classes."""
    written = []
    for number, (image, value) in enumerate(pairs):
        label = int(value)
        # The number comes first, so that classes keep their order when the folders are sorted.
        kind = f"{label:03d}" if classes is None else f"{label:03d}-{re.sub(r'[^A-Za-z0-9_-]+', '-', classes[label])}"
        place = folder / kind
        place.mkdir(parents=True, exist_ok=True)
        image = image if image.mode in ("RGB", "L") else image.convert("RGB")
        if size is not None and min(image.size) > size:
            scale = size / min(image.size)
            image = image.resize(tuple(max(1, round(side * scale)) for side in image.size), reducing_gap=2.0)
        lossless = max(image.size) <= LOSSLESS
        file = place / f"{number:06d}.{'png' if lossless else 'jpg'}"
        with naming(file):
            image.save(file, **({} if lossless else {"quality": 95}))
        written.append((file, label))
    return written


def _torchvision(name: str, entry: TorchvisionSet, cache: Path) -> tuple[dict[str, Iterable[tuple[Any, Any]]], Any]:
    """The parts of a data set of torchvision, and the names of its classes where it has them."""
    library: Callable[..., TorchvisionImages] = getattr(need("torchvision.datasets", "vision"), entry.library)
    found: dict[str, list[TorchvisionImages]] = {"train": [], "test": []}
    try:
        for split, several in (("train", entry.train), ("test", entry.test)):
            found[split] = [library(root=str(cache / name), download=True, **arguments) for arguments in several]
    except (OSError, RuntimeError, ValueError) as error:
        raise DataError(
            f"data set {name!r}: torchvision's {entry.library} cannot be loaded ({error}). Put its files into "
            f"{cache / name} as torchvision expects them, or give a folder of classes as --source"
        ) from error
    classes = getattr(found["train"][0], "classes", None)
    return {split: _chained(sets) for split, sets in found.items() if sets}, classes


def _chained(sets: Sequence[TorchvisionImages]) -> Iterator[tuple[Any, Any]]:
    for part in sets:
        for index in range(len(part)):
            yield part[index]


def _folders(source: Path) -> tuple[dict[str, Iterable[tuple[Any, Any]]], list[str]]:
    """The parts of a folder of classes, and the names of the classes."""
    splits = [split for split in SPLITS if (source / split).is_dir()]
    if splits == ["test"]:
        raise DataError(f"{source}: expected a folder 'train' beside 'test'")
    where = {split: source / split for split in splits} or {"train": source}
    names = {split: sorted(p.name for p in folder.iterdir() if p.is_dir()) for split, folder in where.items()}
    classes = names["train"]
    if not classes:
        raise DataError(f"{where['train']}: expected a folder for each class, found none")
    for stray in set(names.get("test", ())) - set(classes):
        raise DataError(f"{source}: class {stray!r} is in the test part only")
    return {split: _images(folder, classes) for split, folder in where.items()}, classes


def _images(folder: Path, classes: Sequence[str]) -> Iterator[tuple[Any, int]]:
    for label, name in enumerate(classes):
        for file in sorted((folder / name).glob("*")):
            if file.suffix.lower() in SUFFIXES:
                yield opened(file), label
