"""Arrays that take long to make, on disk: a folder of plain .npy files, written once, mapped when used."""

from __future__ import annotations

import json
import os
import shutil
import uuid
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from fedloom.data.prepare import Array

MANIFEST = "manifest.json"


def kept(place: Path, make: Callable[[], dict[str, Array]]) -> dict[str, Array]:
    """The arrays of a folder where they are there and undamaged, else made (and kept, where that is possible)."""
    found = _load(place)
    if found is not None:
        return found
    made = make()
    try:
        _save(place, made)
    except OSError:
        return made  # a cache that cannot be written only costs time
    return _load(place) or made


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
    """The arrays of a folder, mapped, or None where it is absent or anything in it is not as it was written."""
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
