"""Rendered rooms and open places with exact labels: the dense data set that needs no download."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from pydantic import Field

from fedloom.core.context import derive_seed
from fedloom.core.errors import RecipeError
from fedloom.core.settings.section import Count, UnitInterval
from fedloom.data.prepare import DATASETS, Array, Augment, DenseKind, cache_folder, kept, no_repeats, resolve

if TYPE_CHECKING:
    from fedloom.data.dataset import Dataset, Examples

Side = Annotated[int, Field(ge=16, le=512)]

SETTINGS: dict[str, tuple[DenseKind, ...]] = {
    "all": ("semseg", "human_parts", "saliency", "normals", "depth", "edge"),
    "strong": ("semseg", "normals", "depth"),
    "weak": ("semseg", "human_parts", "edge"),
}
"""Tasks that belong together: all of them, or the DFMTL thesis' groups of strong and weak correlation."""
PIXELS = 65536  # rendered together; more would not fit into a processor's own cache
SMALL = 96  # below this, images lose their objects where they are scaled by less than 0.75


@DATASETS.register(
    "scenes", source="ours; groups of tasks after the DFMTL thesis, labels after PASCAL-Context and NYUD"
)
def scenes(
    seed: int,
    *,
    count: Count = 2000,
    test_count: Count = 400,
    height: Side = 64,
    width: Side = 64,
    setting: Literal["all", "strong", "weak"] = "all",
    tasks: Annotated[list[DenseKind], Field(min_length=1)] | None = None,
    outdoor: UnitInterval = 0.35,
    people: UnitInterval = 0.8,
    shadows: bool = True,
    noise: Annotated[float, Field(ge=0, le=0.5)] = 0.015,
    augment: bool | Augment = True,
) -> Dataset:
    """Render rooms and open places (two domains, `indoor` and `outdoor`) with six exact dense labels.

    `count` train and `test_count` test images of `height` x `width`. Each depends on (seed, split, its number) alone,
    so a smaller count is the beginning of a larger one. A share `outdoor` lies outdoors (0 and 1 leave one domain); in
    a share `people` there are one to three people, if they find room. Images and labels:

    - `semseg`: 13 classes (floor, wall, ceiling, window, table, ground, sky, building, tree, box, ball, cylinder,
      person);
    - `human_parts`: background, head, torso, upper arms, lower arms, upper legs, lower legs. Images without a person
      are ignored, and not dealt to clients that hold nothing else;
    - `saliency`: the people in view, or the largest and most central thing where there are none;
    - `normals`: unit vectors in camera coordinates, x right, y up, z towards the viewer (0.2 degrees of rounding);
    - `depth`: metres along the optical axis, up to 20; the sky and what is farther has none;
    - `edge`: boundaries between things and jumps of depth, one pixel wide.

    `setting` takes all tasks, the strongly correlated (semseg, normals, depth) or the weakly correlated (semseg,
    human_parts, edge); `tasks` names them instead. `noise` is the sensor's standard deviation, of colours in 0..1.
    `augment: true` scales training images by 0.5 to 2, or 0.75 to 1.5 where they are smaller than 96 pixels.

    Scenes are rendered once and kept in FEDLOOM_CACHE (default ~/.cache/fedloom), about 50 kB per image of 64 x 64.
    RecipeError where a task is named twice, or `tasks` beside a `setting`.
    """
    if tasks is not None and setting != "all":
        raise RecipeError(f"scenes: setting {setting!r} determines the tasks: leave tasks or setting out")
    names = tuple(tasks or SETTINGS[setting])
    no_repeats("scenes", "task", names)
    from fedloom.data.dataset import Dataset
    from fedloom.data.scenes.world import CLASSES, PARTS
    from fedloom.models.tasks.dense import KINDS

    look = {"height": height, "width": width, "outdoor": outdoor, "people": people, "shadows": shadows, "noise": noise}
    change = resolve(augment)
    if augment is True and min(height, width) < SMALL:
        change = Augment(scale=(0.75, 1.5))
    domains = tuple(name for name, there in (("indoor", outdoor < 1), ("outdoor", outdoor > 0)) if there)
    train, test = (
        _examples({"seed": seed, "split": split, "count": n, **look}, names, change)
        for split, n in (("train", count), ("test", test_count))
    )
    heads = tuple(KINDS[name](name, *((len(CLASSES),) if name == "semseg" else ())) for name in names)
    called = {"semseg": CLASSES, "human_parts": PARTS}
    known = {str(name): called[name] for name in names if name in called}
    return Dataset("scenes", heads, train, test, domains, classes=known, drawn_from=math.inf)


def _examples(settings: dict[str, object], names: tuple[DenseKind, ...], augment: Augment | None) -> Examples:
    import torch

    from fedloom.data.dense import stored
    from fedloom.data.transforms import Dense

    arrays = split(settings)
    images, labels = torch.from_numpy(arrays["image"]), {str(name): torch.from_numpy(arrays[name]) for name in names}
    change = Dense({name: name for name in names}, (images.shape[2], images.shape[3]), augment)
    domain = torch.from_numpy((arrays["indoor"] == 0).astype("int64")) * (settings["outdoor"] != 1)
    return stored(images, labels, change, {"human_parts": arrays["person"] > 0}, domain, key(settings))


def key(settings: Mapping[str, Any]) -> str:
    """Return 20 hexadecimal digits that change with any setting and with the code that renders."""
    from fedloom.data.scenes import render, world

    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    for module in (world, render):
        digest.update(Path(str(module.__file__)).read_bytes())
    return digest.hexdigest()[:20]


def split(settings: Mapping[str, Any]) -> dict[str, Array]:
    """Return one split from the cache; where it is absent or damaged, render it, and keep it where that is possible.

    `settings`: seed, split, count, height, width, outdoor, people, shadows, noise. The arrays are those of
    `render.render`, and per example `indoor` (uint8) and `person` (uint8, whether any part of a person is visible).
    """
    size, count = settings["height"] * settings["width"], settings["count"]

    def rendered() -> dict[str, Array]:
        # One thread: numpy holds the interpreter's lock for too much of this for a second one to help.
        rows = max(1, PIXELS // size)
        arrays: dict[str, Array] = {}
        for start in range(0, count, rows):
            for name, array in examples(settings, range(start, min(start + rows, count))).items():
                whole = arrays.setdefault(name, np.empty((count, *array.shape[1:]), array.dtype))
                whole[start : start + rows] = array
        return arrays

    return kept(cache_folder() / "scenes" / key(settings), rendered)


def examples(settings: Mapping[str, Any], numbers: range) -> dict[str, Array]:
    """Render the examples with these numbers; each depends on the settings (without count) and its number alone."""
    from fedloom.data.scenes import render, world

    seeds = [derive_seed(settings["seed"], "scenes", settings["split"], i) for i in numbers]
    scenes = [world.scene(seed, settings["outdoor"], settings["people"]) for seed in seeds]
    height, width = settings["height"], settings["width"]
    arrays = render.render(scenes, seeds, height, width, settings["shadows"], settings["noise"])
    arrays["indoor"] = np.array([s.indoor for s in scenes], np.uint8)
    arrays["person"] = np.asarray(arrays["human_parts"].reshape(len(scenes), -1).max(1) > 0, np.uint8)
    return arrays
