"""A checksum of the contents of many files, which are read only where their size or time of change is new."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from fedloom.core.errors import DataError
from fedloom.data.prepare import cache_folder

Known = dict[str, list[int | str]]
"""File -> [size, times of change (ns) of its contents and of its entry, checksum]."""


def digest(files: Sequence[Path]) -> bytes:
    """Checksum of the files' contents, in their order. What is found is kept in FEDLOOM_CACHE for the next time.

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
        found = dict(zip(names, pool.map(one, names), strict=True))
    if found != known:
        _keep(place, found)
    return hashlib.sha256("".join(str(entry[3]) for entry in found.values()).encode()).digest()


def _known(place: Path) -> Known:
    """What was found before; nothing where that is absent or damaged."""
    try:
        value = json.loads(place.read_text("utf-8"))
        return {
            str(name): [int(size), int(made), int(moved), str(sum_)]
            for name, (size, made, moved, sum_) in value.items()
        }
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return {}


def _keep(place: Path, found: Known) -> None:
    part = place.with_suffix(f".{os.getpid()}.part")
    with suppress(OSError):  # a cache that cannot be written only costs time
        place.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(found), "utf-8")
        os.replace(part, place)
