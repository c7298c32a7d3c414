"""Rendered scenes on disk: one folder of plain .npy files per split, written once, mapped when used."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedloom.core.context import derive_seed
from fedloom.data.prepare import Array, cache_folder
from fedloom.data.scenes import render, world

MANIFEST = "manifest.json"
PIXELS = 65536  # rendered together; more would not fit into a processor's own cache


def key(settings: Mapping[str, Any]) -> str:
    """20 hexadecimal digits that change with any setting and with the code that renders."""
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    for module in (world, render):
        digest.update(Path(str(module.__file__)).read_bytes())
    return digest.hexdigest()[:20]


def split(settings: Mapping[str, Any]) -> dict[str, Array]:
    """One split, from the cache where it is there and undamaged, else rendered (and kept, where that is possible).

    `settings`: seed, split, count, height, width, outdoor, people, shadows, noise. The arrays are those of
    `render.render`, and per example `indoor` (uint8) and `person` (uint8, whether any part of a person is visible).
    """
    place = cache_folder() / "scenes" / key(settings)
    found = _load(place)
    if found is not None:
        return found
    made = _render(settings)
    try:
        _save(place, made)
    except OSError:
        return made  # a cache that cannot be written only costs time
    return _load(place) or made


def examples(settings: Mapping[str, Any], numbers: range) -> dict[str, Array]:
    """The examples with the given numbers; each depends on the settings (without count) and its number alone."""
    seeds = [derive_seed(settings["seed"], "scenes", settings["split"], i) for i in numbers]
    scenes = [world.scene(seed, settings["outdoor"], settings["people"]) for seed in seeds]
    height, width = settings["height"], settings["width"]
    made = render.render(scenes, seeds, height, width, settings["shadows"], settings["noise"])
    made["indoor"] = np.array([s.indoor for s in scenes], np.uint8)
    made["person"] = np.asarray(made["human_parts"].reshape(len(scenes), -1).max(1) > 0, np.uint8)
    return made


def _render(settings: Mapping[str, Any]) -> dict[str, Array]:
    # One thread: numpy holds the interpreter's lock for too much of this for a second one to help.
    count = settings["count"]
    rows = max(1, PIXELS // (settings["height"] * settings["width"]))
    arrays: dict[str, Array] = {}
    for start in range(0, count, rows):
        numbers = range(start, min(start + rows, count))
        for name, array in examples(settings, numbers).items():
            if name not in arrays:
                arrays[name] = np.empty((count, *array.shape[1:]), array.dtype)
            arrays[name][start : numbers.stop] = array
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
