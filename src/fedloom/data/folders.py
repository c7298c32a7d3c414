"""What data sets in folders of files share: split lists, checked files, and their examples."""

from __future__ import annotations

import zlib
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
    """

    names: tuple[str, ...]
    reader: Reader
    annotated: Mapping[str, Array]
    version: str
    files: tuple[Path, ...]


@dataclass(frozen=True)
class Folder:
    """Reads image `names[i]` and its labels from files in `root`, of some tasks; can be pickled.

    A data set says where images and labels are and how labels are decoded.
    """

    root: Path
    names: tuple[str, ...]
    tasks: tuple[str, ...]

    def image(self, name: str) -> Path:
        """The file of an image."""
        raise NotImplementedError

    def files(self, task: str, name: str) -> tuple[Path, ...]:
        """The files that a label is made of; all must exist."""
        raise NotImplementedError

    def label(self, task: str, files: tuple[Path, ...], size: tuple[int, ...]) -> Array:
        """The raw label in these files, of an image of this size."""
        raise NotImplementedError

    def __call__(self, i: int, tasks: Collection[str]) -> dict[str, Array | None]:
        """Image (H x W x 3, uint8) and raw labels of `tasks`, None where a file is absent."""
        name = self.names[i]
        image = picture(self.image(name), "image", colour=True)
        found: dict[str, Array | None] = {"image": image}
        for task in (t for t in self.tasks if t in tasks):
            files, size = self.files(task, name), image.shape[:2]
            there = all(file.is_file() for file in files)
            found[task] = fits(files[0], task, self.label(task, files, size), size) if there else None
        return found

    def split(self, listed: Path, annotated: Mapping[str, Array] = MappingProxyType({})) -> FileSplit:
        """All images as a part; `annotated` says of a task which images may have a label at most."""
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
    """The lists `train` and `val` as a train and a test part. A task's kind is its name; `options` are by task.

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
        kept = np.arange(total) if kept is None else kept
        annotated: dict[str, Array] = {task: part.annotated[task][kept] for task in tasks}
        reader = DenseFiles(part.reader, Dense(kinds, size, training), tuple(kept.tolist()))
        mark = mark_of(part.version, kinds, annotated)
        ready.append(ItemExamples(reader, len(kept), (3, *size), annotated=annotated, mark=mark, files=part.files))
    heads = tuple(KINDS[task](task, **options.get(task, {})) for task in tasks)
    return Dataset(name, heads, ready[0], ready[1])


def find(name: str, root: str, wanted: str, advice: str) -> Path:
    """`root` as a folder; DataError where `wanted` is not in it."""
    path = Path(root).expanduser()
    if not (path / wanted).exists():
        raise DataError(f"{name}: {wanted} is not in {path.absolute()}. {advice}")
    return path


def split_list(file: Path) -> tuple[str, ...]:
    """The image names of a split file, one a line. DataError where it is absent, empty or names one twice."""
    try:
        names = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file}: cannot be read as a list of images ({error})") from None
    names = [name for name in names if name]
    if not names:
        raise DataError(f"{file}: expected one image name a line, found none")
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise DataError(f"{file}: image {name!r} is named twice")
        if not Path(name).parts or ".." in Path(name).parts or Path(name).is_absolute():
            raise DataError(f"{file}: expected image names, found {name!r}")
        seen.add(name)
    return tuple(names)


def sizes(files: Iterable[Path], listed_in: Path) -> str:
    """A short text that changes with the names and sizes of files. DataError where some are absent."""
    digest, absent = 0, []
    for file in files:
        try:
            digest = zlib.crc32(f"{file.name} {file.stat().st_size}\n".encode(), digest)
        except OSError:
            absent.append(file)
    if absent:
        more = f" and {len(absent) - 1} more" if len(absent) > 1 else ""
        raise DataError(f"image {absent[0]}{more}, named in {listed_in}: absent")
    return f"{digest:08x}"


def picture(file: Path, field: str, colour: bool) -> Array:
    """A picture file: H x W x 3 uint8, or the stored numbers H x W (palette indices where there is a palette).

    DataError where it cannot be read, or where numbers are wanted and the file has colours.
    """
    image = need("PIL.Image", "vision")
    with parsing(f"{file}, {field}: cannot be read"), image.open(file, formats=FORMATS) as opened:
        found: Array = np.asarray(opened.convert("RGB") if colour else opened)
    if not colour and found.ndim != 2:
        raise DataError(f"{file}, {field}: expected one number per pixel, found an array of shape {found.shape}")
    return found.astype(np.uint8) if found.dtype == bool else found


def matlab(file: Path, key: str, simple: bool = False) -> Any:
    """One variable of a MATLAB file (up to version 7.2). DataError where it cannot be read or is absent."""
    library = need("scipy.io", "data")
    with parsing(f"{file}, {key}: cannot be read"):
        content = library.loadmat(file, variable_names=[key], simplify_cells=simple)
    if key not in content:
        raise DataError(f"{file}: expected a variable {key!r}, found none")
    return content[key]


def fits(file: Path, field: str, found: Array, size: tuple[int, ...]) -> Array:
    """`found`, whose first two dimensions must be `size`; DataError otherwise."""
    if found.shape[:2] != tuple(size):
        expected, have = (" x ".join(map(str, s)) for s in (size, found.shape[:2]))
        raise DataError(f"{file}, {field}: expected the image's size {expected}, found {have}")
    return found


def class_map(file: Path, field: str, found: Array, highest: int) -> Array:
    """Whole numbers in 0..`highest`, or 255, as uint8; DataError names the others."""
    if found.dtype.kind not in "bui":
        raise DataError(f"{file}, {field}: expected whole numbers, found {found.dtype}")
    stray = np.unique(found[((found < 0) | (found > highest)) & (found != IGNORE)])
    if len(stray):
        more = ", ..." if len(stray) > 5 else ""
        raise DataError(
            f"{file}, {field}: expected labels in 0..{highest} or {IGNORE}, found "
            f"{', '.join(map(str, stray[:5].tolist()))}{more}"
        )
    return found.astype(np.uint8)


def above_half(found: Array) -> Array:
    """A map of 0..255 as 0 and 1."""
    return (found > 127).astype(np.uint8)


def normals_of(found: Array) -> Array:
    """Vectors (H x W x 3, float32) from the colours 0..255 that stand for -1..1."""
    return found.astype(np.float32) * 2 - 255
