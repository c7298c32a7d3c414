"""Rendered scenes, one folder of the cache per split."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedloom.core.context import derive_seed
from fedloom.data.kept import kept
from fedloom.data.prepare import Array, cache_folder
from fedloom.data.scenes import render, world

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
    return kept(place, lambda: _render(settings))


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
