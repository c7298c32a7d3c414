"""Parts that data sets share: their registry, types of keys, splits, statistics, and what is kept in a cache.

Free of torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import numpy as np
from pydantic import Field

from fedloom.core.context import derive_seed
from fedloom.core.errors import DataError, RecipeError
from fedloom.core.settings.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor

Array = np.ndarray[Any, Any]
SPLITS = ("train", "test")
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$")]
TestFraction = Annotated[float, Field(gt=0, lt=1)]
DATASETS = Registry("data set", "fedloom.data", ("fedloom.data.dataset:Dataset", "fedloom.data.own:Federation"))
"""Functions `f(seed, *, ...) -> Dataset`, or Federation; their keyword-only arguments are the recipe's keys."""
MANIFEST = "manifest.json"
Known = dict[str, list[int | str]]
"""File -> [size, times of change (ns) of its contents and of its entry, checksum]."""


def at_nodes() -> NoReturn:
    """Raise the DataError of data and of a partition that stay with the nodes."""
    raise DataError("data: nodes stays where it is, so nothing can be read here: start the run with `flwr run`")


def no_repeats(where: str, what: str, names: Sequence[str]) -> None:
    """Raise RecipeError where a task, a domain or the like (`what`) is named twice."""
    for name in names:
        if list(names).count(name) > 1:
            raise RecipeError(f"{where}: {what} {name!r} is named twice")


def stratified(strata: Array, fraction: float, seed: int) -> Array:
    """Return which examples (N, bool) go to the test part: `fraction` of each stratum.

    The number is rounded; a stratum of two or more examples has at least one on either side, a single example trains.
    `strata` (N integers) may be any labelling, such as class x domain.
    """
    test = np.zeros(len(strata), bool)
    rng = np.random.default_rng(derive_seed(seed, "data", "test"))
    for value in np.unique(strata):
        members = rng.permutation(np.flatnonzero(strata == value))
        count = min(max(1, round(fraction * len(members))), len(members) - 1)
        test[members[:count]] = True
    return test


def subset(total: int, limit: int | None, seed: int, split: str) -> Array | None:
    """Return sorted positions of `limit` random examples out of `total`, or None where all are kept."""
    if limit is None or limit >= total:
        return None
    rng = np.random.default_rng(derive_seed(seed, "data", "limit", split))
    return np.sort(rng.choice(total, limit, replace=False))


def channel_statistics(images: Tensor, rows: int = 256) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Compute mean and standard deviation per channel (axis 1) in the units of a batch: uint8 counts as 0..1.

    Reads `rows` examples at a time, for images that lie on disk. A constant channel has standard deviation 1, so that
    it can be divided by. NaN or infinity in a channel makes its mean or standard deviation NaN or infinite.
    """
    import torch

    axes = [0, *range(2, images.ndim)]
    total = squares = torch.zeros(images.shape[1], dtype=torch.float64)
    for part in images.split(rows):
        x = part.double()
        total = total + x.sum(axes)
        squares = squares + x.square().sum(axes)
    count = images.numel() / images.shape[1]
    scale = 255 if images.dtype == torch.uint8 else 1
    mean = total / count
    std = (squares / count - mean.square()).clamp(min=0).sqrt()
    std = torch.where(std <= 1e-6 * mean.abs(), torch.ones_like(std) * scale, std)
    return tuple((mean / scale).tolist()), tuple((std / scale).tolist())


def cache_folder() -> Path:
    """Return the folder of caches: FEDLOOM_CACHE, or `fedloom` in XDG_CACHE_HOME, or ~/.cache/fedloom."""
    named = os.environ.get("FEDLOOM_CACHE")
    if named:
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
            manifest[name] = zlib.crc32(array.data)
        (draft / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
        shutil.rmtree(place, ignore_errors=True)  # a damaged one
        draft.rename(place)
    finally:
        # After the renaming there is nothing to remove. Where another process was faster, its folder stays.
        shutil.rmtree(draft, ignore_errors=True)


def _load(place: Path) -> dict[str, Array] | None:
    """Return the arrays of a folder, mapped, or None where it is absent or anything in it is not as it was written."""
    try:
        manifest = json.loads((place / MANIFEST).read_text(encoding="utf-8"))
        arrays = {}
        for name, checksum in manifest.items():
            # Mapped copy-on-write: torch warns about read-only memory, and nothing is ever written.
            arrays[name] = np.load(place / f"{name}.npy", mmap_mode="c", allow_pickle=False)
            if zlib.crc32(arrays[name].data) != checksum:
                return None
    except (OSError, ValueError, EOFError, AttributeError):
        return None
    return arrays


def digest(files: Sequence[Path | str]) -> bytes:
    """Compute a checksum of the files' contents, in their order, and keep it in FEDLOOM_CACHE for the next time.

    DataError where a file cannot be read.
    """
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

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # hashing leaves the interpreter lock
        entries = dict(zip(names, pool.map(one, names), strict=True))
    if entries != known:
        part = place.with_suffix(f".{os.getpid()}.part")
        with suppress(OSError):  # a cache that cannot be written only costs time
            place.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(json.dumps(entries), "utf-8")
            os.replace(part, place)
    return hashlib.sha256("".join(str(entry[3]) for entry in entries.values()).encode()).digest()


def _known(place: Path) -> Known:
    """Return the checksums of last time; nothing where the cache is absent or damaged."""
    try:
        value = json.loads(place.read_text("utf-8"))
        return {str(name): [*map(int, times), str(checksum)] for name, (*times, checksum) in value.items()}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return {}
