"""NYU Depth v2 in the folders of the field's multi-task repositories."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from pydantic import Field

from fedloom.core.errors import DataError, parsing
from fedloom.core.settings.section import Count
from fedloom.data import folders
from fedloom.data.augment import Augment
from fedloom.data.folders import FileSplit
from fedloom.data.prepare import Array
from fedloom.data.registry import DATASETS
from fedloom.models.tasks.task import IGNORE

if TYPE_CHECKING:
    from fedloom.data.dataset import Dataset

NyudTask = Literal["semseg", "normals", "depth", "edge"]

EXPECTED = {"train": 795, "val": 654}
FILES = {"semseg": "segmentation/{}.png", "normals": "normals/{}.png", "depth": "depth/{}.npy", "edge": "edge/{}.png"}
ADVICE = (
    "Expected images/ID.png, segmentation/ID.png, normals/ID.png, depth/ID.npy, edge/ID.png and gt_sets/{train,val}.txt"
)

THIRTEEN = {
    "bed": (4,),
    "books": (23,),
    "ceiling": (22,),
    "chair": (5,),
    "floor": (2, 20),
    "furniture": (3, 10, 12, 15, 17, 24, 32, 39),
    "objects": (18, 19, 21, 26, 27, 28, 29, 30, 31, 33, 34, 35, 36, 37, 38, 40),
    "picture": (11,),
    "sofa": (6,),
    "table": (7, 14),
    "tv": (25,),
    "wall": (1, 8),
    "window": (9, 13, 16),
}
"""The 13 classes and those of the 40 (from 1) that they hold; source: the published class13Mapping."""


@DATASETS.register("nyud", source="Silberman et al. (2012); folders as in FedHCA2's release")
def nyud(
    seed: int,
    *,
    root: str,
    tasks: Annotated[list[NyudTask], Field(min_length=1)] = ["semseg", "normals", "depth", "edge"],  # noqa: B006
    size: tuple[Count, Count] = (448, 576),
    classes: Literal[40, 13] = 40,
    augment: bool | Augment = True,
    limit: Count | None = None,
) -> Dataset:
    """NYU Depth v2 (795 + 654 indoor images) from a folder: `semseg`, `normals`, `depth`, `edge`. Downloads nothing.

    `root` holds images/ID.png, segmentation/ID.png (0..40; 0 is ignored, the classes are 1..40), normals/ID.png
    (0..255 for -1..1), depth/ID.npy (metres, float; 0, NaN and infinity are ignored), edge/ID.png (above 127 is an
    edge) and the lists gt_sets/train.txt and gt_sets/val.txt. A label file that is absent is ignored for its image.

    `size` is what images are cropped or padded to; it must hold them in evaluation (they are 425 x 560) and be a
    multiple of the encoder's stride. `classes: 13` joins the 40 classes to 13. `limit` keeps that many random
    images of each part. DataError where lists or images are absent or a file is not as stated.
    """
    options: dict[str, dict[str, Any]] = {"semseg": {"channels": classes}, "edge": {"max_dist": 0.011}}

    def opened(split: str) -> FileSplit:
        return open_split(root, split, tasks, classes)

    return folders.dataset("nyud", tasks, options, opened, size, augment, limit, seed)


def open_split(root: str, split: str, tasks: list[NyudTask], classes: int = 40) -> FileSplit:
    """The images that `split` (train or val) lists. DataError where the list or an image is absent."""
    path = folders.find("nyud", root, "gt_sets", ADVICE)
    listed = path / "gt_sets" / f"{split}.txt"
    names = folders.split_list(listed)
    annotated = {str(task): folders.present(path / FILES[task].format(name) for name in names) for task in tasks}
    images = [path / "images" / f"{name}.png" for name in names]
    labels = [
        path / FILES[task].format(name)
        for task in tasks
        for name, there in zip(names, annotated[task], strict=True)
        if there
    ]
    reader = NyudReader(path, names, tuple(tasks), classes)
    return FileSplit(names, reader, annotated, folders.sizes(images, listed), (*images, *labels))


@dataclass(frozen=True)
class NyudReader:
    """Reads image `names[i]` and its labels."""

    root: Path
    names: tuple[str, ...]
    tasks: tuple[NyudTask, ...]
    classes: int

    def __call__(self, i: int, tasks: Collection[str]) -> dict[str, Array | None]:
        """Image (H x W x 3, uint8) and raw labels of `tasks`, None where a file is absent."""
        image = folders.picture(self.root / "images" / f"{self.names[i]}.png", "image", colour=True)
        found: dict[str, Array | None] = {"image": image}
        for task in (t for t in self.tasks if t in tasks):
            file = self.root / FILES[task].format(self.names[i])
            found[task] = folders.fits(file, task, self._label(file, task), image.shape[:2]) if file.is_file() else None
        return found

    def _label(self, file: Path, task: NyudTask) -> Array:
        if task == "semseg":
            return shifted(folders.class_map(file, task, folders.picture(file, task, colour=False), 40), self.classes)
        if task == "normals":
            return folders.normals_of(folders.picture(file, task, colour=True))
        if task == "edge":
            return folders.above_half(folders.picture(file, task, colour=False))
        return metres(file)


def shifted(stored: Array, classes: int) -> Array:
    """Stored labels (0 = none, 1..40, 255 = none; uint8) as classes from 0, 255 = none."""
    table = np.full(256, IGNORE, np.uint8)
    if classes == 13:
        for number, members in enumerate(THIRTEEN.values()):
            table[list(members)] = number
    else:
        table[1:41] = np.arange(40)
    joined: Array = table[stored]
    return joined


def metres(file: Path) -> Array:
    """A depth map (H x W, float32), 0 where there is no value. DataError where the file holds anything else."""
    with parsing(f"{file}, depth: cannot be read"):
        depth: Array = np.asarray(np.load(file, allow_pickle=False))
    if depth.ndim == 3 and 1 in (depth.shape[0], depth.shape[2]):
        depth = depth.squeeze(0 if depth.shape[0] == 1 else 2)
    if depth.ndim != 2 or depth.dtype.kind != "f":
        raise DataError(f"{file}, depth: expected metres, H x W of floats, found {depth.dtype} of shape {depth.shape}")
    depth = np.where(np.isfinite(depth), depth, 0).astype(np.float32)
    if depth.min(initial=0) < 0 or depth.max(initial=0) > 255:
        raise DataError(f"{file}, depth: expected metres in 0..255, found {depth.min():g}..{depth.max():g}")
    return depth
