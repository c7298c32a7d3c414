"""Data sets in folders of files: split lists, checked files, their examples, and a check of a whole folder."""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from fedloom.core.errors import DataError, first_of, parsing
from fedloom.core.lazy import need
from fedloom.core.machine import need_memory
from fedloom.data.inputs import FORMATS
from fedloom.data.prepare import Array, Augment, DenseKind, Reader, copies, no_repeats, resolve, subset
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
class Files:
    """The files of one kind in a folder: patterns with {} for an image's name, of which the first that exists counts.

    `read` (files, size of the image) reads the raw label in them; the files `also` must be there too.
    """

    patterns: tuple[str, ...]
    read: Callable[[tuple[Path, ...], tuple[int, ...]], Array]
    also: tuple[str, ...] = ()

    def of(self, root: Path, name: str) -> tuple[Path, ...]:
        """Return the files of an image."""
        some = [root / pattern.format(name) for pattern in self.patterns]
        also = (root / each.format(name) for each in self.also)
        return next((file for file in some if file.is_file()), some[0]), *also


@dataclass(frozen=True)
class Folder:
    """A reader of image `names[i]` and its labels of some tasks from files in `root`; it can be pickled."""

    root: Path
    names: tuple[str, ...]
    images: Files
    labels: Mapping[str, Files]

    def __call__(self, i: int, tasks: Collection[str]) -> dict[str, Array | None]:
        """Read image (H x W x 3, uint8) and raw labels of `tasks`, None where a file is absent."""
        name = self.names[i]
        image = self.images.read(self.images.of(self.root, name), ())
        example: dict[str, Array | None] = {"image": image}
        for task in (t for t in self.labels if t in tasks):
            files, size = self.labels[task].of(self.root, name), image.shape[:2]
            there = all(file.is_file() for file in files)
            example[task] = fits(files[0], task, self.labels[task].read(files, size), size) if there else None
        return example

    def split(self, listed: Path, annotated: Mapping[str, Array] = MappingProxyType({})) -> FileSplit:
        """Return all images as a part; `annotated` says of a task which images may have a label at most."""
        images = [self.images.of(self.root, name)[0] for name in self.names]
        version = sizes(images, listed)
        known: dict[str, Array] = {}
        labels: dict[Path, None] = {}
        for task, of in self.labels.items():
            files = [of.of(self.root, name) for name in self.names]
            there = np.array([all(file.is_file() for file in each) for each in files], bool)
            known[task] = there & annotated.get(task, True)
            labels |= {file: None for each, has in zip(files, known[task], strict=True) if has for file in each}
        return FileSplit(self.names, self, known, version, (*images, *labels))


@dataclass(eq=False)
class Memory:
    """Arrays that the parts of a data set read from files and keep, at most `limit` bytes. What came first stays, for
    each example is wanted once an epoch."""

    limit: float
    taken: int = 0
    arrays: dict[tuple[str, int, str], Array | None] = field(default_factory=dict)
    """(part, example, task or `image`) -> what was read."""

    def read(self, reader: Reader, part: str, i: int, tasks: Collection[str]) -> dict[str, Array | None]:
        """Read what is not kept of a part. Threads may read at once; then a few arrays more are kept."""
        keys = {name: (part, i, name) for name in ("image", *tasks)}
        found = {name: self.arrays[key] for name, key in keys.items() if key in self.arrays}
        if len(found) < len(keys):
            read = reader(i, [task for task in tasks if task not in found])
            taken = sum(array.nbytes for name, array in read.items() if array is not None and name not in found)
            if self.taken + taken <= self.limit:
                self.taken += taken
                self.arrays.update({keys[name]: array for name, array in read.items() if name not in found})
            found = {**read, **found}
        return found


def colours(files: tuple[Path, ...], size: tuple[int, ...]) -> Array:
    """Read an image (H x W x 3, uint8)."""
    return picture(files[0], "image", colour=True)


def dataset(
    name: str,
    tasks: Sequence[DenseKind],
    options: Mapping[str, Mapping[str, Any]],
    open_split: Callable[[str], FileSplit],
    size: tuple[int, int],
    augment: bool | Augment,
    limit: int | None,
    keep: float,
    seed: int,
) -> Dataset:
    """Open the lists `train` and `val` as a train and a test part, which keep `keep` GB of what they read in memory.

    A task's kind is its name; `options` are by task. RecipeError where a task is named twice, DataError where no image
    of a part is annotated for a task, UserError where there is less free memory than is to be kept.
    """
    from fedloom.data.dataset import Dataset, ItemExamples
    from fedloom.data.dense import DenseFiles, mark_of
    from fedloom.data.transforms import Dense
    from fedloom.models.tasks.dense import KINDS

    no_repeats(name, "task", tasks)
    need_memory(keep * 1e9, f"{name}: data.keep")
    kinds: dict[str, DenseKind] = {task: task for task in tasks}
    ready, memory, drawn_from = [], Memory(keep * 1e9), 0
    for which, training in (("train", resolve(augment)), ("test", None)):
        part = open_split("train" if which == "train" else "val")
        total = len(part.names)
        for task, has in part.annotated.items():
            if not has.any():
                raise DataError(f"{name}, {which}: none of {total} images has a label of task {task!r}")
        kept = subset(total, limit, seed, which)
        drawn_from = drawn_from or total
        annotated: dict[str, Array] = {task: part.annotated[task][kept] for task in tasks}
        single = partial(memory.read, part.reader, which) if keep else part.reader
        reader = DenseFiles(single, Dense(kinds, size, training), tuple(kept.tolist()))
        mark = mark_of(part.version, kinds, annotated)
        held = int(memory.limit) if which == "train" else 0  # both parts share it
        ready.append(
            ItemExamples(reader, len(kept), (3, *size), annotated=annotated, mark=mark, held=held, files=part.files)
        )
    heads = tuple(KINDS[task](task, **options.get(task, {})) for task in tasks)
    return Dataset(name, heads, ready[0], ready[1], drawn_from=drawn_from)


def find(name: str, root: str, what: str, advice: str) -> Path:
    """Return `root` as a folder; DataError where `what` is not in it."""
    path = Path(root).expanduser()
    if not (path / what).exists():
        raise DataError(f"{name}: {what} is not in {path.absolute()}. {advice}")
    return path


def split_list(file: Path) -> tuple[str, ...]:
    """Read the image names of a split file, one a line. DataError where it is absent, empty or names one twice."""
    with parsing(f"{file}: cannot be read as a list of images"):
        lines = file.read_text(encoding="utf-8").splitlines()
    if not (names := [name for line in lines if (name := line.strip())]):
        raise DataError(f"{file}: expected one image name per line, found none")
    no_repeats(str(file), "image", names, DataError)
    for name in names:
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
    DataError where it cannot be read, or where numbers are wanted and the file has colours."""
    image = need("PIL.Image", "vision")
    with parsing(f"{file}, {field}: cannot be read"), image.open(file, formats=FORMATS) as opened:
        pixels: Array = np.asarray(opened.convert("RGB") if colour else opened)
    if not colour and pixels.ndim != 2:
        raise DataError(f"{file}, {field}: expected one number per pixel, found an array of shape {pixels.shape}")
    return pixels.astype(np.uint8) if pixels.dtype == bool else pixels


def matlab(file: Path, key: str, simple: bool = False) -> Any:
    """Read one variable of a MATLAB file (up to version 7.2). DataError where it cannot be read or is absent."""
    from scipy import io

    with parsing(f"{file}, {key}: cannot be read"):
        content = io.loadmat(file, variable_names=[key], simplify_cells=simple)
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
        raise DataError(f"{file}, {field}: expected labels in 0..{highest} or {IGNORE}, found {first_of(stray)}")
    return stored.astype(np.uint8)


def above_half(stored: Array) -> Array:
    """Return a map of 0..255 as 0 and 1."""
    return (stored > 127).astype(np.uint8)


def normals_of(stored: Array) -> Array:
    """Return vectors (H x W x 3, float32) from the colours 0..255 that stand for -1..1."""
    return stored.astype(np.float32) * 2 - 255


PROBLEMS = 20


@dataclass(frozen=True)
class Checkable:
    """The checks of one data set: `open(root, split, tasks)`, the published counts, and the loader's default size."""

    open: Callable[..., FileSplit]
    tasks: tuple[str, ...]
    expected: Mapping[str, int]
    size: tuple[int, int] | None


CHECKABLE: dict[str, Checkable] = {}


@dataclass
class Report:
    """The result of a check; `rows` are (part, what, found, expected). Without `problems` the data set is usable."""

    rows: list[tuple[str, str, str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def usable(self) -> bool:
        """Return whether a run could use the data set."""
        return not self.problems

    def text(self) -> str:
        """Return all of it, as lines for people."""
        table = [("part", "what", "found", "expected"), *self.rows]
        widths = [max(len(row[column]) for row in table) for column in range(3)]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, [*widths, 0], strict=True)).rstrip() for row in table]
        lines += [f"note: {note}" for note in self.notes] + [f"problem: {problem}" for problem in self.problems]
        return "\n".join([*lines, "usable" if self.usable else "not usable"])


def copied_files(train: Sequence[Path | str], test: Sequence[Path | str]) -> tuple[str, ...]:
    """Return what `copies` says of files."""
    marks: list[list[tuple[Any, str]]] = [[(None, str(file)) for file in part] for part in (train, test)]
    # Few files are read as a whole: those whose size and beginning occur in both parts.
    for mark in (os.path.getsize, partial(_checksum, most=4096), _checksum):
        both = set.intersection(*({before for before, _ in part} for part in marks))
        marks = [[(mark(file), file) for before, file in part if before in both] for part in marks]
    return copies(marks[0], marks[1], len(test))


def _checksum(file: str, most: int = -1) -> bytes:
    with open(file, "rb") as opened:
        return hashlib.blake2b(opened.read(most)).digest()


def check_classes(build: Callable[[], Dataset], limit: int | None = None) -> Report:
    """Build a data set of classes and read `limit` images of each part (None: all), as `check` does."""
    import torch

    report = Report()
    try:
        dataset = build()
    except DataError as error:
        report.problems += str(error).splitlines()
        return report
    report.notes += dataset.doubts
    for split, part in (("train", dataset.train), ("test", dataset.test)):
        total = len(part)
        for task in dataset.tasks:
            known = (labels := part.labels_of(task.name))[labels >= 0]
            found = f"{len(known):,} of {total:,} images"
            if task.name not in getattr(part, "annotated", ()):  # else labels are numbers, or of pixels
                found += f", {len(np.unique(known))} classes"
            report.rows.append((split, task.name, found, ""))
        one = partial(lambda of, i: of.batch(torch.tensor([i]), torch.device("cpu")), part)
        for _ in _some(report, split, total, limit, one):
            pass
    if not report.problems:
        report.notes += copied_files(*(getattr(part, "files", ()) for part in (dataset.train, dataset.test)))
    return report


def check(name: str, root: str, limit: int | None = None) -> Report:
    """Look at the data set `name`, one of CHECKABLE, in the folder `root`, reading `limit` images of each part.

    None reads all; the images read are spread evenly. Deviations from the published counts, missing label files and
    large images are notes; what would stop a run is a problem.
    """
    known, report = CHECKABLE[name], Report()
    for split, expected in known.expected.items():
        try:
            part = known.open(root, split, list(known.tasks))
        except DataError as error:
            if str(error) not in report.problems:
                report.problems.append(str(error))
            continue
        total = len(part.names)
        report.rows.append((split, "images", f"{total:,}", f"{expected:,}"))
        if total != expected:
            report.notes.append(f"{split}: {total:,} images, the published set has {expected:,}")
        for task, has in part.annotated.items():
            if not has.any():
                report.problems.append(f"{split}: no image has a label of task {task!r}; leave it out of `tasks`")
            elif not has.all():
                first = part.names[int(np.flatnonzero(~has)[0])]
                report.notes.append(f"{split}: {int((~has).sum()):,} images have no label of {task!r}, first {first}")
        report.notes += [f"{split}: {note}" for note in part.notes]
        _read(report, known, split, part, limit)
    return report


def _read(report: Report, known: Checkable, split: str, part: FileSplit, limit: int | None) -> None:
    """Read images and labels of a part, and report sizes and ranges, or the images that cannot be used."""
    total = len(part.names)
    labels = {task: _LabelSummary(task) for task in known.tasks}
    sizes = []
    for example in _some(report, split, total, limit, lambda i: part.reader(i, known.tasks)):
        sizes.append(np.asarray(example["image"]).shape[:2])
        for task, summary in labels.items():
            if (label := example.get(task)) is not None:
                summary.add(label)
    if not sizes:
        return
    smallest, largest = np.min(sizes, 0), np.max(sizes, 0)
    limits = "" if known.size is None else f"at most {known.size[0]} x {known.size[1]}"
    report.rows.append((split, "sizes", " to ".join(f"{h} x {w}" for h, w in (smallest, largest)), limits))
    if known.size is not None and (largest > known.size).any():
        advice = "set `size` to multiples of 32 that hold them"
        report.notes.append(f"{split}: images of up to {largest[0]} x {largest[1]}; {advice}")
    for task, summary in labels.items():
        annotated = f"{int(part.annotated[task].sum()):,} of {total:,} images"
        report.rows.append((split, task, f"{annotated}, {summary.text()}", ""))


def _some(report: Report, split: str, total: int, limit: int | None, one: Callable[[int], Any]) -> Iterator[Any]:
    """Yield examples that are spread evenly over a part, and report how many, and those that cannot be read."""
    chosen = np.unique(np.linspace(0, total - 1, min(limit or total, total)).round().astype(int)).tolist()
    report.rows.append((split, "images read", f"{len(chosen):,}", ""))
    failures = []
    for i in chosen:
        try:
            example = one(i)
        except DataError as error:
            failures.append(f"{split}: {error}")
        else:
            yield example
    report.problems += failures[:PROBLEMS]
    if len(failures) > PROBLEMS:
        report.problems.append(f"{split}: {len(failures) - PROBLEMS} more images cannot be used")


class _LabelSummary:
    """The labels of one task, over the images that were read."""

    def __init__(self, task: str) -> None:
        self.task, self.images, self.pixels, self.valid = task, 0, 0, 0
        self.counts, self.range = np.zeros(256, np.int64), (np.inf, -np.inf)

    def add(self, label: Array) -> None:
        depth, normals = self.task == "depth", self.task == "normals"
        valid = (label != 0).any(-1) if normals else label > 0 if depth else label != IGNORE
        self.images, self.pixels = self.images + 1, self.pixels + valid.size
        self.valid += int(valid.sum())
        if depth and valid.any():
            metres = label[valid]
            self.range = (min(self.range[0], float(metres.min())), max(self.range[1], float(metres.max())))
        elif not (depth or normals):
            self.counts += np.bincount(label[valid].astype(np.uint8), minlength=256)

    def text(self) -> str:
        if not self.images:
            return "none read"
        valid = f"{self.valid / self.pixels:.1%} of the pixels labelled"
        if self.task == "normals" or not self.valid:
            return valid
        if self.task == "depth":
            return f"{self.range[0]:.2f} to {self.range[1]:.2f} m, {valid}"
        if self.task in ("edge", "saliency"):
            return f"{self.counts[1] / self.valid:.1%} positive, {valid}"
        present = np.flatnonzero(self.counts)
        return f"{len(present)} classes, {present[0]} to {present[-1]}, {valid}"
