"""Data sets in folders of files: split lists, checked files, and their examples."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from fedloom.core.errors import DataError, parsing
from fedloom.core.lazy import need
from fedloom.data.dense_label import Augment, Kind, Reader, resolve
from fedloom.data.inputs import FORMATS
from fedloom.data.prepare import Array, no_repeats, subset
from fedloom.models.tasks.task import IGNORE

if TYPE_CHECKING:
    from fedloom.data.dataset import Dataset


@dataclass(frozen=True, eq=False)
class FileSplit:
    """One part of a data set, found but not read.

    names       how each example is called in messages
    reader      reads one
    annotated   task -> N, bool: which examples have a label
    version     changes when files are exchanged
    files       the files of images and labels, whose contents a resumed run must find unchanged
    notes       which optional files were found, and what follows where they were not
    """

    names: tuple[str, ...]
    reader: Reader
    annotated: Mapping[str, Array]
    version: str
    files: tuple[Path, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Folder:
    """A reader of image `names[i]` and its labels of some tasks from files in `root`; it can be pickled.

    A data set says where images and labels are and how labels are decoded.
    """

    root: Path
    names: tuple[str, ...]
    tasks: tuple[str, ...]

    def image(self, name: str) -> Path:
        """Return the file of an image."""
        raise NotImplementedError

    def files(self, task: str, name: str) -> tuple[Path, ...]:
        """Return the files that a label is made of; all must exist."""
        raise NotImplementedError

    def label(self, task: str, files: tuple[Path, ...], size: tuple[int, ...]) -> Array:
        """Read the raw label in these files, of an image of this size."""
        raise NotImplementedError

    def __call__(self, i: int, tasks: Collection[str]) -> dict[str, Array | None]:
        """Read image (H x W x 3, uint8) and raw labels of `tasks`, None where a file is absent."""
        name = self.names[i]
        image = picture(self.image(name), "image", colour=True)
        example: dict[str, Array | None] = {"image": image}
        for task in (t for t in self.tasks if t in tasks):
            files, size = self.files(task, name), image.shape[:2]
            there = all(file.is_file() for file in files)
            example[task] = fits(files[0], task, self.label(task, files, size), size) if there else None
        return example

    def split(self, listed: Path, annotated: Mapping[str, Array] = MappingProxyType({})) -> FileSplit:
        """Return all images as a part; `annotated` says of a task which images may have a label at most."""
        images = [self.image(name) for name in self.names]
        version = sizes(images, listed)
        known: dict[str, Array] = {}
        labels: dict[Path, None] = {}
        for task in self.tasks:
            files = [self.files(task, name) for name in self.names]
            there = np.array([all(file.is_file() for file in each) for each in files], bool)
            known[task] = there & annotated.get(task, True)
            labels |= {file: None for each, has in zip(files, known[task], strict=True) if has for file in each}
        return FileSplit(self.names, self, known, version, (*images, *labels))


def dataset(
    name: str,
    tasks: Sequence[Kind],
    options: Mapping[str, Mapping[str, Any]],
    open_split: Callable[[str], FileSplit],
    size: tuple[int, int],
    augment: bool | Augment,
    limit: int | None,
    seed: int,
) -> Dataset:
    """Open the lists `train` and `val` as a train and a test part. A task's kind is its name; `options` are by task.

    RecipeError where a task is named twice, DataError where no image of a part is annotated for a task.
    """
    from fedloom.data.dataset import Dataset, ItemExamples
    from fedloom.data.dense import DenseFiles, mark_of
    from fedloom.data.transforms import Dense
    from fedloom.models.tasks.dense import KINDS

    no_repeats(name, "task", tasks)
    kinds: dict[str, Kind] = {task: task for task in tasks}
    ready = []
    for which, training in (("train", resolve(augment)), ("test", None)):
        part = open_split("train" if which == "train" else "val")
        total = len(part.names)
        for task, has in part.annotated.items():
            if not has.any():
                raise DataError(f"{name}, {which}: none of {total} images has a label of task {task!r}")
        kept = subset(total, limit, seed, which)
        annotated: dict[str, Array] = {task: part.annotated[task][kept] for task in tasks}
        reader = DenseFiles(part.reader, Dense(kinds, size, training), tuple(kept.tolist()))
        mark = mark_of(part.version, kinds, annotated)
        ready.append(ItemExamples(reader, len(kept), (3, *size), annotated=annotated, mark=mark, files=part.files))
    heads = tuple(KINDS[task](task, **options.get(task, {})) for task in tasks)
    return Dataset(name, heads, ready[0], ready[1])


def find(name: str, root: str, what: str, advice: str) -> Path:
    """Return `root` as a folder; DataError where `wanted` is not in it."""
    path = Path(root).expanduser()
    if not (path / what).exists():
        raise DataError(f"{name}: {what} is not in {path.absolute()}. {advice}")
    return path


def split_list(file: Path) -> tuple[str, ...]:
    """Read the image names of a split file, one a line. DataError where it is absent, empty or names one twice."""
    try:
        names = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file}: cannot be read as a list of images ({error})") from None
    names = [name for name in names if name]
    if not names:
        raise DataError(f"{file}: expected one image name per line, found none")
    for name, count in Counter(names).items():
        if count > 1:
            raise DataError(f"{file}: image {name!r} is named twice")
        if not Path(name).parts or ".." in Path(name).parts or Path(name).is_absolute():
            raise DataError(f"{file}: expected image names, found {name!r}")
    return tuple(names)


def sizes(files: Iterable[Path], listed_in: Path) -> str:
    """Return a short text that changes with the names and sizes of files. DataError where some are absent."""
    digest, absent = 0, []
    for file in files:
        try:
            digest = zlib.crc32(f"{file.name} {file.stat().st_size}\n".encode(), digest)
        except OSError:
            absent.append(file)
    if absent:
        more = f" and {len(absent) - 1} more" if len(absent) > 1 else ""
        raise DataError(f"image {absent[0]}{more} does not exist, but {listed_in} names it")
    return f"{digest:08x}"


def picture(file: Path, field: str, colour: bool) -> Array:
    """Read a picture file: H x W x 3 uint8, or the stored numbers H x W (palette indices where there is a palette).

    DataError where it cannot be read, or where numbers are wanted and the file has colours.
    """
    image = need("PIL.Image", "vision")
    with parsing(f"{file}, {field}: cannot be read"), image.open(file, formats=FORMATS) as opened:
        pixels: Array = np.asarray(opened.convert("RGB") if colour else opened)
    if not colour and pixels.ndim != 2:
        raise DataError(f"{file}, {field}: expected one number per pixel, found an array of shape {pixels.shape}")
    return pixels.astype(np.uint8) if pixels.dtype == bool else pixels


def matlab(file: Path, key: str, simple: bool = False) -> Any:
    """Read one variable of a MATLAB file (up to version 7.2). DataError where it cannot be read or is absent."""
    library = need("scipy.io", "data")
    with parsing(f"{file}, {key}: cannot be read"):
        content = library.loadmat(file, variable_names=[key], simplify_cells=simple)
    if key not in content:
        raise DataError(f"{file}: expected a variable {key!r}, found none")
    return content[key]


def fits(file: Path, field: str, stored: Array, size: tuple[int, ...]) -> Array:
    """Return `stored`, whose first two dimensions must be `size`; DataError otherwise."""
    if stored.shape[:2] != tuple(size):
        expected, have = (" x ".join(map(str, s)) for s in (size, stored.shape[:2]))
        raise DataError(f"{file}, {field}: expected the image's size {expected}, found {have}")
    return stored


def class_map(file: Path, field: str, stored: Array, highest: int) -> Array:
    """Return whole numbers in 0..`highest`, or 255, as uint8; DataError names the others."""
    if stored.dtype.kind not in "bui":
        raise DataError(f"{file}, {field}: expected whole numbers, found {stored.dtype}")
    stray = np.unique(stored[((stored < 0) | (stored > highest)) & (stored != IGNORE)]).tolist()
    if stray:
        some = ", ".join(map(str, stray[:5])) + (", ..." if len(stray) > 5 else "")
        raise DataError(f"{file}, {field}: expected labels in 0..{highest} or {IGNORE}, found {some}")
    return stored.astype(np.uint8)


def above_half(stored: Array) -> Array:
    """Return a map of 0..255 as 0 and 1."""
    return (stored > 127).astype(np.uint8)


def normals_of(stored: Array) -> Array:
    """Return vectors (H x W x 3, float32) from the colours 0..255 that stand for -1..1."""
    return stored.astype(np.float32) * 2 - 255
