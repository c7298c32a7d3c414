"""Parts that data sets share: registry, keys, splits, statistics, caches, arrays on disk, labels. Free of torch."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import json
import lzma
import math
import os
import shutil
import uuid
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, Literal, NoReturn, TypeVar

import numpy as np
from pydantic import Field, field_validator

from fedloom.core.context import derive_seed
from fedloom.core.errors import DataError, RecipeError, UserError, choices, parsing, twice
from fedloom.core.machine import available_memory, need_memory
from fedloom.core.settings.registry import Registry
from fedloom.core.settings.section import Count, Positive, Section, UnitInterval
from fedloom.models.tasks.task import IGNORE

if TYPE_CHECKING:
    from torch import Tensor

Array = np.ndarray[Any, Any]
T = TypeVar("T")
R = TypeVar("R")
SPLITS = ("train", "test")
SHOWN = 5
"""So many files that cannot be used are named."""
PARTS = {"train": 0, "training": 0, "val": 1, "valid": 1, "validation": 1, "test": 2, "testing": 2}
"""Names of the parts of a split, with the part's number. Files and folders so called are neither sites nor classes."""
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$")]
TestFraction = Annotated[float, Field(gt=0, lt=1)]
DATASETS = Registry("data set", "fedloom.data", ("fedloom.data.dataset:Dataset", "fedloom.data.own:Federation"))
"""Functions `f(seed, *, ...) -> Dataset`, or Federation; their keyword-only arguments are the recipe's keys."""
MANIFEST = "manifest.json"


def at_nodes() -> NoReturn:
    """Raise the DataError of data and of a partition that stay with the nodes."""
    raise DataError(
        "data: nodes stays at the nodes, so this machine cannot read it: start the run with `flwr run`; at a node, "
        "`fedloom flower check` shows what it would train on"
    )


class MaskDoubt(str):
    """A doubt about a task's classes in a site's masks, which `others` lack; the option `labelled` may answer it."""

    task, site, others, classes = "", "", frozenset[str](), frozenset[int]()

    @classmethod
    def of(cls, text: str, **about: Any) -> MaskDoubt:
        """Return a doubt about this task, and perhaps site, others and classes (sets)."""
        vars(made := cls(text)).update(about)
        return made

    def answered(self, labelled: Mapping[str, Collection[int]]) -> bool:
        """Return whether the site labels only some classes, these among them, or each other site only other ones."""
        if self.site in labelled or not self.site:
            return bool(labelled) and self.classes <= {0, *labelled.get(self.site, ())}
        apart = (name in labelled and self.classes.isdisjoint(labelled[name]) for name in self.others)
        return bool(self.others) and all(apart)


def has_label(labels: Array) -> Array:
    """Return which examples (N) have a label: a class from 0, a real number, or any number or pixel of several."""
    if labels.ndim == 1 and labels.dtype.kind != "f":
        return np.asarray(labels >= 0)
    known = labels == labels  # NaN is no label
    if labels.ndim > 1:
        known = (known & (labels != IGNORE) & (labels != -1)).reshape(len(labels), -1).any(1)
    return np.asarray(known)


def no_repeats(where: str, what: str, names: Iterable[str], error: type[UserError] = RecipeError) -> None:
    """Raise an error where a task, a domain or the like (`what`) is named twice."""
    if again := twice(names):
        raise error(f"{where}: {what} {again[0]!r} is named twice")


def alike(names: Iterable[str]) -> list[tuple[str, str]]:
    """Return each name that differs from an earlier one in case or blanks only, behind the earlier one."""
    first: dict[str, str] = {}
    pairs = [(first.setdefault(name.strip().casefold(), name), name) for name in names]
    return [(one, other) for one, other in pairs if one != other]


def part_of(fraction: float, count: int) -> int:
    """Return a share of some examples as a number: rounded, at least one and at most all but one."""
    return min(max(1, round(fraction * count)), count - 1)


def stratified(strata: Array, fraction: float, seed: int) -> Array:
    """Return which examples (N, bool) go to the test part: `fraction` of each stratum.

    The number is rounded; a stratum of two or more examples has at least one on either side, a single example trains.
    `strata` (N integers) may be any labelling, such as class x domain.
    """
    test = np.zeros(len(strata), bool)
    rng = np.random.default_rng(derive_seed(seed, "data", "test"))
    for value in np.unique(strata):
        members = rng.permutation(np.flatnonzero(strata == value))
        test[members[: part_of(fraction, len(members))]] = True
    return test


def stratified_groups(groups: Array, columns: Sequence[Array], domain: Array, fraction: float, seed: int) -> Array:
    """Return which examples (N, bool) go to the test part, where examples of one group stay together.

    Of each domain `fraction` of the groups are for tests, rounded, at least one and at most all but one, spread over
    the means of their labels (`columns`, N each). A group belongs to the domain of its first example.
    """
    _, first, member = np.unique(groups, return_index=True, return_inverse=True)
    means, home, test = means_by(member, columns), domain[first], np.zeros(len(first), bool)
    rng = np.random.default_rng(derive_seed(seed, "data", "test"))
    for value in np.unique(home):
        some = np.flatnonzero(home == value)
        order = some[np.lexsort((rng.permutation(len(some)), *(mean[some] for mean in reversed(means))))]
        test[spread(order, part_of(fraction, len(some)), rng)[1]] = True
    return np.asarray(test[member])


def means_by(member: Array, columns: Sequence[Array]) -> list[Array]:
    """Return the means of columns (N each) over the examples of each group; `member` (N) are the groups' numbers."""
    sizes = np.bincount(member)
    return [np.bincount(member, column) / sizes for column in columns]


def spread(order: Array, count: int, rng: np.random.Generator) -> tuple[Array, Array]:
    """Return the rest of an order and `count` members at equal distances."""
    taken = np.zeros(len(order), bool)
    taken[((np.arange(count) + rng.random()) * len(order) / max(count, 1)).astype(int)] = True
    return order[~taken], order[taken]


def subset(total: int, limit: int | None, seed: int, split: str) -> Array:
    """Return sorted positions of `limit` random examples out of `total`, or of all."""
    if limit is None or limit >= total:
        return np.arange(total)
    rng = np.random.default_rng(derive_seed(seed, "data", "limit", split))
    return np.sort(rng.choice(total, limit, replace=False))


def channel_moments(inputs: Tensor, rows: int = 256) -> tuple[Tensor, Tensor]:
    """Compute mean and standard deviation per channel (axis 1) over all other axes.

    Reads `rows` examples at a time, for inputs that lie on disk. NaN or infinity in a channel makes its mean or
    standard deviation NaN or infinite.
    """
    import torch

    axes = [0, *range(2, inputs.ndim)]
    total = squares = torch.zeros(inputs.shape[1], dtype=torch.float64)
    for part in inputs.split(rows):
        x = part.double()
        total = total + x.sum(axes)
        squares = squares + x.square().sum(axes)
    count = inputs.numel() / inputs.shape[1]
    mean = total / count
    return mean, (squares / count - mean.square()).clamp(min=0).sqrt()


def channel_statistics(images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Compute mean and standard deviation per channel (axis 1) in the units of a batch: uint8 counts as 0..1.

    A constant channel has standard deviation 1, so that it can be divided by.
    """
    import torch

    scale = 255 if images.dtype == torch.uint8 else 1
    mean, std = channel_moments(images)
    std = torch.where(std <= 1e-6 * mean.abs(), torch.ones_like(std) * scale, std)
    return tuple((mean / scale).tolist()), tuple((std / scale).tolist())


PACKED: dict[str, Any] = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}
"""Ending of a compressed file -> the function that opens it."""


def opener(file: Path) -> Any:
    """Return the function that opens a file, perhaps a compressed one."""
    return PACKED.get(file.suffix.lower(), open)


def need_room(file: Path, times: int) -> None:
    """Raise UserError where so many times the bytes of a file are more than the free memory, and DataError where it
    cannot be unpacked: a compressed file may hold a thousand times its own bytes."""
    size, most = file.stat().st_size, available_memory() / times
    if file.suffix.lower() in PACKED:
        size = 0
        with parsing(f"{file}: cannot be read"), opener(file)(file, "rb") as opened:
            while size <= most and (piece := opened.read(1 << 20)):
                size += len(piece)
    need_memory(times * size, str(file))


def cache_folder() -> Path:
    """Return the folder of caches: FEDLOOM_CACHE, or `fedloom` in XDG_CACHE_HOME, or ~/.cache/fedloom."""
    if named := os.environ.get("FEDLOOM_CACHE"):
        return Path(named).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedloom"


def kept(place: Path, make: Callable[[], dict[str, Array]]) -> dict[str, Array]:
    """Return the arrays of a folder where it is undamaged; else make them, and keep them where that is possible."""
    arrays = _load(place)
    if arrays is None:
        arrays = make()
        with suppress(OSError):  # a cache that cannot be written only costs time
            _save(place, arrays)
            arrays = _load(place) or arrays
    return arrays


def _save(place: Path, arrays: Mapping[str, Array]) -> None:
    """Write a folder under another name, then rename it, so that no reader finds half a folder."""
    place.parent.mkdir(parents=True, exist_ok=True)
    draft = place.with_name(f"{place.name}.{uuid.uuid4().hex}.tmp")
    draft.mkdir()
    try:
        manifest = {}
        for name, array in arrays.items():
            with (draft / f"{name}.npy").open("wb") as file:
                np.save(file, array, allow_pickle=False)
                file.flush()
                os.fsync(file.fileno())
            manifest[name] = _checksum(array)
        (draft / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
        shutil.rmtree(place, ignore_errors=True)  # a damaged one
        draft.rename(place)
    finally:
        # After the renaming there is nothing to remove. Where another process was faster, its folder stays.
        shutil.rmtree(draft, ignore_errors=True)


def _load(place: Path) -> dict[str, Array] | None:
    """Return the arrays of a folder, mapped, or None where it is absent or anything in it is not as it was written."""
    try:
        with parsing("it is damaged"):  # numpy reads headers as Python
            manifest = json.loads((place / MANIFEST).read_text(encoding="utf-8"))
            # Mapped copy-on-write: torch warns about read-only memory, and nothing is ever written.
            files = {name: np.load(place / f"{name}.npy", mmap_mode="c", allow_pickle=False) for name in manifest}
            whole = all(_checksum(array) == manifest[name] for name, array in files.items())
    except DataError:
        return None
    return files if files and whole else None


def _checksum(array: Array) -> int:
    """Return a checksum of an array's values, type and shape."""
    return zlib.crc32(array.data, zlib.crc32(f"{array.dtype.str} {array.shape}".encode()))


def in_threads(one: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """Return what `one` makes of each item: decoding, resizing and hashing leave the interpreter lock.

    DataError with a line for each of the first SHOWN items that fail: a folder often has several bad files.
    """

    def attempt(item: T) -> R | DataError:
        try:
            return one(item)
        except DataError as error:
            return error

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        tried = list(pool.map(attempt, items))
    if failures := [str(each) for each in tried if isinstance(each, DataError)]:
        rest = [f"and {len(failures) - SHOWN} more that cannot be used"] if len(failures) > SHOWN else []
        raise DataError("\n".join([*failures[:SHOWN], *rest]))
    return [each for each in tried if not isinstance(each, DataError)]


def digest(files: Sequence[Path | str]) -> bytes:
    """Compute a checksum of the files' contents, in their order, and keep it in FEDLOOM_CACHE for the next time.
    DataError where a file cannot be read."""
    names = [os.path.abspath(file) for file in files]
    place = cache_folder() / "digests" / f"{hashlib.sha256(chr(0).join(names).encode()).hexdigest()[:20]}.json"
    known = _known(place)

    def one(name: str) -> list[int | str]:
        try:
            about = os.stat(name)
            state: list[int | str] = [about.st_size, about.st_mtime_ns, about.st_ctime_ns]
            before = known.get(name)
            if before is not None and before[:3] == state:
                return before
            with open(name, "rb") as opened:
                return [*state, hashlib.file_digest(opened, "sha256").hexdigest()]
        except OSError as error:
            raise DataError(f"{name}: cannot be read ({error.strerror})") from None

    entries = dict(zip(names, in_threads(one, names), strict=True))
    if entries != known:
        part = place.with_suffix(f".{os.getpid()}.part")
        with suppress(OSError):  # a cache that cannot be written only costs time
            place.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(json.dumps(entries), "utf-8")
            os.replace(part, place)
    return hashlib.sha256("".join(str(entry[3]) for entry in entries.values()).encode()).digest()


def _known(place: Path) -> dict[str, list[int | str]]:
    """Return file -> [size, times of change (ns) of its contents and of its entry, checksum], as of last time; nothing
    where the cache is absent or damaged."""
    try:
        value = json.loads(place.read_text("utf-8"))
        return {str(name): [int(size), int(changed), int(moved), str(checksum)]
                for name, (size, changed, moved, checksum) in value.items()}  # fmt: skip
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return {}


@dataclass
class Part:
    """Examples as they were read: inputs in their own layout, labels per task (N or N x ...), domains and groups (N).

    Examples with the same value in `group` stay in one part of every split.
    """

    inputs: Any
    labels: dict[str, Array]
    domain: Array | None = None
    key: str = ""
    group: Array | None = None

    def take(self, index: Array) -> Part:
        """Return the part at `index` (positions or a mask)."""
        domain, group = (None if column is None else column[index] for column in (self.domain, self.group))
        return Part(self.inputs[index], {k: v[index] for k, v in self.labels.items()}, domain, self.key, group)

    def cut(self, fraction: float, seed: int) -> list[Part]:
        """Split off a test part of this share, stratified by the domain and the first task with classes."""
        columns = [column for column in self.labels.values() if column.ndim == 1][:1]
        columns = columns or [np.zeros(len(self.inputs), np.int64)]
        domain = np.zeros(len(self.inputs), np.int64) if self.domain is None else self.domain
        if self.group is None:
            strata = np.unique(np.stack([*columns, domain], 1), axis=0, return_inverse=True)[1].reshape(-1)
            test = stratified(strata, fraction, seed)
        else:
            test = stratified_groups(self.group, columns, domain, fraction, seed)
        return [self.take(~test), self.take(test)]

    def tensors(self) -> tuple[dict[str, Tensor], Tensor | None]:
        """Return labels and domains as `TensorExamples` has them."""
        import torch

        domain = None if self.domain is None else torch.from_numpy(self.domain)
        return {task: torch.from_numpy(column) for task, column in self.labels.items()}, domain


def copies(
    train: Iterable[tuple[bytes, str]], test: Iterable[tuple[bytes, str]], total: int, what: str = "images"
) -> tuple[str, ...]:
    """Return a doubt where examples of the test part, which has `total`, are also in the train part.

    Examples are (hash, name); a name may be empty.
    """
    known = dict(train)
    if not (twins := [(name, known[mark]) for mark, name in test if mark in known]):
        return ()
    found = f"{len(twins)} of {total} test {what} are copies of training {what}"
    example = f", for example {twins[0][0]} and {twins[0][1]}" if all(twins[0]) else ""
    return (f"{found}{example}: test scores are too good, so remove one of each pair",)


def joined_groups(groups: Sequence[tuple[Array | None, int]]) -> Array | None:
    """Join the groups of data sets, (N numbers or texts, or None; N) each, as numbers that no two sets share. None
    where no set has groups."""
    if all(group is None for group, _ in groups):
        return None
    columns, start = [], 0
    for group, count in groups:
        columns.append(start + (np.arange(count) if group is None else np.unique(group, return_inverse=True)[1]))
        start += count
    return np.concatenate(columns)


def limited(parts: Sequence[Part], limit: int | None, seed: int) -> list[Part]:
    """Return the train part and the test part with at most `limit` random examples each."""
    kept = [subset(len(part.inputs), limit, seed, split) for part, split in zip(parts, SPLITS, strict=True)]
    # Taking examples copies them, which those that lie on disk are spared where all are kept.
    return [p if len(index) == len(p.inputs) else p.take(index) for p, index in zip(parts, kept, strict=True)]


def splits(name: str, keys: Sequence[str], test_fraction: float | None) -> tuple[str, ...]:
    """Return the values of `{split}` in the keys: "train" and "test", or "pool" where no key has it. RecipeError where
    only some keys have it, a pool comes without `test_fraction`, or `test_fraction` without a pool."""
    pooled = ["{split}" not in key for key in keys]
    if any(pooled) != all(pooled):
        raise RecipeError(f"{name}: expected {{split}} in all keys or in none, found {', '.join(keys)}")
    if pooled[0] != (test_fraction is not None):
        problem = "needs test_fraction" if pooled[0] else "has a test part, so test_fraction has no use"
        raise RecipeError(f"{name}: a data set with the key {keys[0]!r} {problem}")
    return ("pool",) if pooled[0] else SPLITS


@dataclass(frozen=True)
class Reading:
    """How the numbers in a file became inputs, beside what `TensorExamples` does, for files that come later.

    stored    pixels are the numbers in files of more than 8 bits, as `inputs.pixels_of` reads them, at the files' size
              or stretched to one
    derived   inputs were computed, such as features of an encoder; no file of a user's own has them
    turned    the last two axes were exchanged
    scale     (mean, standard deviation) by which they were standardised when they were read
    """

    stored: Literal["stored", "stretched"] | None = None
    derived: bool = False
    turned: bool = False
    scale: tuple[Sequence[float], Sequence[float]] | None = None


class Store:
    """Named arrays of an .npz archive or a folder, read when they are asked for. What an array's header says is
    believed only if as many bytes follow it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if path.suffix == ".csv":
            use = f"use `data: {{name: table}}`, which `fedloom init {path}` writes"
            raise DataError(f"arrays: {path} is a table: {use}")
        if path.is_dir():
            self.keys = sorted(file.stem for file in path.glob("*.npy"))
        elif path.is_file():
            with parsing(f"arrays: {path} is neither an .npz archive nor a folder of .npy files"):
                archive = zipfile.ZipFile(path)
            with archive:
                self.keys = sorted(name.removesuffix(".npy") for name in archive.namelist())
        else:
            raise DataError(f"arrays: the file or folder {path} does not exist")

    def read(self, key: str, expected: int | None = None, beside: str = "") -> Array:
        """Read the array of a key, of one dimension or more: in memory from a file, mapped from a folder. It has
        `expected` values, if that is known, as many as `beside` has."""
        if key not in self.keys:
            raise DataError(f"arrays, {self.path}: no key {key!r}.{choices('Found', key, self.keys)}")
        with parsing(f"arrays, {self.path}: {key!r} cannot be read as a plain array"):
            array = mapped(self.path / f"{key}.npy") if self.path.is_dir() else _unpacked(self.path, key)
        if not array.ndim:
            raise DataError(f"arrays, {self.path}: {key!r}: expected one value per example, found a single value")
        if expected not in (None, len(array)):
            many = f"expected {expected} values, as many as {beside!r}"
            raise DataError(f"arrays, {self.path}: {key!r}: {many}, found {len(array)}")
        return array

    def integers(self, key: str, expected: int, beside: str, texts: bool = False, real: str = "") -> Array:
        """Read a column of `expected` integers, as int64 in memory; with `texts`, a column of texts as it is, too.

        `real` is advice for a column of real numbers.
        """
        column, where = self.read(key, expected, beside), f"arrays, {self.path}"
        is_text = texts and column.dtype.kind in "US"
        if column.ndim != 1 or (column.dtype.kind not in "biu" and not is_text):
            shown = f"{column.dtype} of shape {column.shape}"
            kinds, advice = "integer or text" if texts else "integer", real if column.dtype.kind == "f" else ""
            raise DataError(f"{where}: {key!r}: expected one {kinds} per example, found {shown}{advice}")
        if column.dtype.kind == "u" and column.size and column.max() > np.iinfo(np.int64).max:
            raise DataError(f"{where}: {key!r}: expected integers below 2^63, found {column.max()}")
        return self._texts(key, column) if is_text else column.astype(np.int64)

    def _texts(self, key: str, column: Array) -> Array:
        with parsing(f"arrays, {self.path}: {key!r} cannot be read as texts"):
            return column.astype(str)

    def names(self, key: str) -> tuple[str, ...]:
        """Read a column of names."""
        column = self.read(key)
        if column.ndim != 1 or column.dtype.kind not in "US":
            shown = f"{column.dtype} of shape {column.shape}"
            raise DataError(f"arrays, {self.path}: {key!r}: expected a list of names, found {shown}")
        return tuple(self._texts(key, column).tolist())


def mapped(file: Path) -> Array:
    """Map an .npy file. Raises DataError, ValueError or OSError where it is none, or no plain array."""
    with file.open("rb") as opened:
        shape, order, kind = npy_header(opened, file.stat().st_size)
        start = opened.tell()
    if not math.prod(shape):
        return np.zeros(shape, kind)
    # Mapped copy-on-write: torch refuses read-only memory with a warning, and nothing is ever written.
    return np.asarray(np.memmap(file, kind, "c", start, shape, order))


def _unpacked(path: Path, key: str) -> Array:
    """Read an array of an archive into memory."""
    with zipfile.ZipFile(path) as archive:
        name = f"{key}.npy" if f"{key}.npy" in archive.namelist() else key
        size = archive.getinfo(name).file_size
        need_memory(size, f"arrays, {path}: {key!r}")
        with archive.open(name) as opened:
            shape, order, kind = npy_header(opened, size)
            data = opened.read()
    return np.frombuffer(bytearray(data), kind).reshape(shape, order=order)


def npy_header(opened: IO[bytes], size: int) -> tuple[tuple[int, ...], Literal["C", "F"], np.dtype[Any]]:
    """Read (shape, order, type) of an .npy file of so many bytes, and stop at its values. ValueError for others."""
    with parsing("its header is damaged"):  # numpy reads it as Python
        version = np.lib.format.read_magic(opened)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, by_column, kind = read(opened)
    if kind.hasobject:
        advice = "pad inputs of unequal length to one length, or give lists of tokens to fl.Federation in Python"
        raise ValueError(f"it holds Python objects, which could run untrusted code; {advice}")
    if any(n < 0 for n in shape) or math.prod(shape) * kind.itemsize != size - opened.tell():
        raise ValueError(f"its header says {kind} of shape {shape}, but {size - opened.tell()} bytes follow")
    return shape, "F" if by_column else "C", kind


DenseKind = Literal["semseg", "human_parts", "saliency", "normals", "depth", "edge"]

Reader = Callable[[int, Collection[str]], Mapping[str, Array | None]]
"""Reads one example by its position: `"image"` (H x W x 3, uint8) and an array of labels or None per task.

Labels are raw, as `fedloom.data.transforms` describes, with the image's height and width: semseg and human_parts are
H x W integers in 0..255 (255 = ignore), saliency and edge H x W of 0, 1 and 255 (or bool), depth H x W floating point
(metres, 0 = no value), normals H x W x 3 (int8 or floating point, any common factor, zero = no value). None, or an
absent key, means that the image is not annotated for the task: it is ignored there. Images may differ in size.

A reader is called from several threads at once, and is pickled where a run has worker processes: it should hold paths,
not open files. Its errors should be DataErrors that name the file.
"""


class DenseLabel(Section):
    """The location of the label images of one task, and the meaning of their values."""

    kind: DenseKind
    key: str
    classes: Annotated[int, Field(ge=1, le=255)] | None = None
    """semseg and human_parts: number of classes; by default the largest label plus one, or 7 parts."""
    boundaries: bool = False
    """edge: the key holds a segmentation, whose boundaries are the edges."""
    threshold: Annotated[float, Field(gt=0, le=1)] | None = None
    """saliency and edge: the key holds shares 0..255 (or 0..1); those from the threshold on count as 1."""
    factor: Positive = 1.0
    """depth: metres per unit."""
    encoding: Literal["centred", "positive"] = "centred"
    """normals in uint8: 0..255 stands for -1..1, or for 0..1."""


class Augment(Section):
    """Random augmentation of images and their labels; the defaults are usual in dense multi-task learning.

    Images below about 128 x 128 lose their objects at half size; use `scale: [0.75, 1.5]` for them.
    """

    scale: tuple[Positive, Positive] = (0.5, 2.0)
    """Range of the factor by which images are scaled, drawn uniformly. Depth is divided by it."""
    flip: UnitInterval = 0.5
    """Probability of mirroring left and right."""
    jitter: UnitInterval = 0.5
    """Probability of each of the four changes of colour."""
    brightness: UnitInterval = 32 / 255
    """Largest value added to or taken from colours in 0..1."""
    contrast: UnitInterval = 0.5
    """Colours are multiplied by 1 +- this at most."""
    saturation: UnitInterval = 0.5
    """Distances from grey are multiplied by 1 +- this at most."""
    hue: Annotated[float, Field(ge=0, le=180)] = 36.0
    """Largest turn of the hue, in degrees (18 of OpenCV's 180 steps)."""
    crop_share: Annotated[float, Field(gt=0, le=1)] = 0.75
    """With a segmentation: a crop in which one class fills this share is drawn again."""
    crop_tries: Count = 10
    """The number of crops drawn at most; the last is taken in any case."""

    @field_validator("scale")
    @classmethod
    def _ordered(cls, scale: tuple[float, float]) -> tuple[float, float]:
        if scale[0] > scale[1]:
            raise ValueError(f"expected (smallest, largest) factor, found {list(scale)}")
        return scale


def resolve(augment: bool | Augment) -> Augment | None:
    """Resolve a recipe's `augment`: true stands for the defaults, false for None."""
    return augment if isinstance(augment, Augment) else Augment() if augment else None
