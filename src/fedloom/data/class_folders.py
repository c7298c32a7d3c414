"""Image sets in folders of classes, each a task: the benchmarks of model merging."""

from __future__ import annotations

import os
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
from pydantic import Field

from fedloom.core.errors import DataError
from fedloom.core.settings.section import Count, Positive
from fedloom.data.digests import digest
from fedloom.data.download import SOURCES
from fedloom.data.images import SUFFIXES, Fit, read
from fedloom.data.many import Columns, joined
from fedloom.data.prepare import SPLITS, Name, subset
from fedloom.data.registry import DATASETS

if TYPE_CHECKING:
    from torch import Tensor

    from fedloom.data.dataset import Dataset

Colour = tuple[float, float, float]


@DATASETS.register("class-folders", source="MaTU, section 4; Ilharco et al. (2023); EMR-Merging (Huang et al., 2024)")
def class_folders(
    seed: int,
    *,
    root: str,
    sets: Annotated[list[Name], Field(min_length=1)],
    size: Annotated[int, Field(ge=8)] = 224,
    fit: Fit = "stretch",
    mean: Colour = (0.5, 0.5, 0.5),
    std: tuple[Positive, Positive, Positive] = (0.5, 0.5, 0.5),
    limit: Count | None = None,
) -> Dataset:
    """Image sets in ROOT/NAME/{train,test}/CLASS/IMAGE, one classification task per set, in the form of `many`.

    `fedloom data prepare NAME --out ROOT` makes such folders. Tasks and domains are called like the sets; an example
    has a label of its own set's task and -1 for all others. Classes are numbered in the order of the names of the
    train part's folders.

    Images are read when they are wanted (needs pillow), converted to colour and resized bilinearly to `size` x `size`:
    `stretch` changes the proportions, as EMR-Merging does; `crop` resizes the shorter side and keeps the centre. They
    are not augmented. `mean` and `std`, of 0..1, normalise; the defaults are those of timm's ViT on ImageNet-21k.
    `limit` keeps that many random examples of each part of each set.

    DataError for what is absent, with the command that makes it, or cannot be read.
    """
    import torch

    base = Path(root).expanduser()
    twice = sorted({name for name in sets if sets.count(name) > 1})
    if twice:
        raise DataError(f"class-folders: set {twice[0]!r} is named twice")
    columns: dict[str, list[Columns]] = {"train": [], "test": []}
    files: dict[str, list[str]] = {"train": [], "test": []}
    classes = {}
    called = {}
    for name in sets:
        kinds = _classes(base, name, "train")
        classes[name] = len(kinds)
        called[name] = tuple(kinds)
        for split in SPLITS:
            found = [
                (file, kinds[kind])
                for kind in _classes(base, name, split, kinds)
                for file in _files(base, name, split, kind)
            ]
            kept = subset(len(found), limit, seed, split)
            found = found if kept is None else [found[i] for i in kept.tolist()]
            files[split] += [file for file, _ in found]
            columns[split].append({name: np.array([label for _, label in found], np.int64)})
    sources = {split: Decoded(str(base), tuple(names), size, fit) for split, names in files.items()}
    table = [torch.tensor([values]).expand(len(sets), -1) for values in (mean, std)]
    return replace(joined("class-folders", columns, sources, tuple(sets), table[0], table[1], classes), classes=called)


@dataclass(frozen=True, eq=False)
class Decoded:
    """Images read from files, relative to `root`, when they are asked for; can be pickled."""

    root: str
    files: tuple[str, ...]
    size: int
    fit: Fit
    prefetch: bool = True
    nbytes: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """3 x size x size."""
        return (3, self.size, self.size)

    @property
    def version(self) -> str:
        """Changes with the names of the files."""
        return f"{zlib.crc32(chr(10).join(self.files).encode()):08x}"

    def contents(self) -> bytes:
        """Checksum of all files."""
        return digest([Path(self.root, file) for file in self.files])

    def __call__(self, index: Tensor) -> Tensor:
        return read([Path(self.root, self.files[position]) for position in index.tolist()], self.size, self.fit)


def _classes(base: Path, name: str, split: str, known: dict[str, int] | None = None) -> dict[str, int]:
    """The folders of a part with their class numbers: in their own order, or as `known`."""
    folder = base / name / split
    if not folder.is_dir():
        more = "" if name in SOURCES else " --source FOLDER, a folder of classes"
        raise DataError(
            f"class-folders, set {name!r}: there is no folder {folder.absolute()}. To make it: fedloom data prepare "
            f"{name} --out {base}{more}"
        )
    found = sorted(entry.name for entry in folder.iterdir() if entry.is_dir())
    if not found:
        raise DataError(f"class-folders, set {name!r}: expected a folder for each class in {folder}, found none")
    if known is None:
        return {kind: number for number, kind in enumerate(found)}
    for kind in found:
        if kind not in known:
            raise DataError(f"class-folders, set {name!r}: class {kind!r} is in the test part only")
    return {kind: known[kind] for kind in found}


def _files(base: Path, name: str, split: str, kind: str) -> list[str]:
    """The image files of a class, relative to `base`, sorted."""
    with os.scandir(base / name / split / kind) as entries:
        names = sorted(entry.name for entry in entries if entry.name.lower().endswith(SUFFIXES))
    return [f"{name}/{split}/{kind}/{file}" for file in names]
