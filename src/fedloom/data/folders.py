"""What data sets in folders of files share: split lists, checked files, and their examples."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedloom.core.errors import DataError, parsing
from fedloom.core.extras import need
from fedloom.data.augment import Augment, resolve
from fedloom.data.dense_label import Kind, Reader
from fedloom.data.images import FORMATS
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
class SubsetReader:
    """A reader of some examples of another reader; can be pickled."""

    reader: Reader
    positions: tuple[int, ...]

    def __call__(self, i: int, tasks: Collection[str]) -> Mapping[str, Array | None]:
        """Example `positions[i]`."""
        return self.reader(self.positions[i], tasks)


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
    from fedloom.data.dataset import Dataset
    from fedloom.data.dense import DenseExamples, Files
    from fedloom.models.tasks.dense import KINDS

    no_repeats(name, "task", tasks)
    kinds: dict[str, Kind] = {task: task for task in tasks}
    ready = {}
    for which, training in (("train", resolve(augment)), ("test", None)):
        part = open_split("train" if which == "train" else "val")
        total = len(part.names)
        for task, has in part.annotated.items():
            if not has.any():
                raise DataError(f"{name}, {which}: none of {total} images has a label of task {task!r}")
        kept = subset(total, limit, seed, which)
        source, annotated = Files(part.reader, total), part.annotated
        if kept is not None:
            source = Files(SubsetReader(part.reader, tuple(kept.tolist())), len(kept))
            annotated = {task: has[kept] for task, has in annotated.items()}
        ready[which] = DenseExamples(
            source, kinds, size, training, annotated=annotated, version=part.version, files=part.files
        )
    heads = tuple(KINDS[task](task, **options.get(task, {})) for task in tasks)
    return Dataset(name, heads, ready["train"], ready["test"])


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


def present(files: Iterable[Path]) -> Array:
    """Which files exist (N, bool)."""
    return np.array([file.is_file() for file in files], bool)


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
