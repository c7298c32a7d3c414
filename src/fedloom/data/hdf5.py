"""NYU Depth v2 from the one file of its authors, as the decentralised thesis reads it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from pydantic import Field

from fedloom.core.errors import DataError, parsing
from fedloom.core.extras import need
from fedloom.core.settings.section import Count
from fedloom.data import folders
from fedloom.data.augment import Augment
from fedloom.data.folders import FileSplit
from fedloom.data.nyud import shifted
from fedloom.data.prepare import Array
from fedloom.data.registry import DATASETS
from fedloom.models.tasks.task import IGNORE

if TYPE_CHECKING:
    from fedloom.data.dataset import Dataset

LabelledTask = Literal["semseg", "normals", "depth"]
NormalsFrom = Literal["camera", "pixels"]

FILE = "nyu_depth_v2_labeled.mat"
EXPECTED = {"train": 795, "val": 654}
ADVICE = "Expected the file of the data set's authors (2.8 GB), and beside it splits.mat and classMapping40.mat"
FOCAL, CENTRE = (518.857901, 519.469611), (325.582449, 253.736166)
"""Of the colour camera in pixels, x and y, at 640 x 480; source: the data set's toolbox."""


@DATASETS.register("nyud-labeled", source="Silberman et al. (2012); as in the decentralised thesis")
def nyud_labeled(
    seed: int,
    *,
    root: str,
    tasks: Annotated[list[LabelledTask], Field(min_length=1)] = ["semseg", "normals", "depth"],  # noqa: B006
    size: tuple[Count, Count] = (288, 384),
    classes: Literal[40, 13] = 13,
    first_ids: bool = False,
    normals_from: NormalsFrom = "camera",
    augment: bool | Augment = True,
    limit: Count | None = None,
) -> Dataset:
    """NYU Depth v2 (795 + 654 indoor images) from nyu_depth_v2_labeled.mat: `semseg`, `normals`, `depth`.

    `root` holds that file (HDF5: images N x 3 x W x H, depths and labels N x W x H) and, with `trainNdxs` and
    `testNdxs` (from 1), splits.mat; without it the first 795 images train, as in the thesis. Everything is resized to
    `size` (images bilinearly, labels to the nearest pixel); the thesis takes 256 x 256, its release 288 x 384. Needs
    h5py.

    The labels are 894 names. `mapClass` of classMapping40.mat in `root` makes 40 classes of them, which `classes: 13`
    joins to 13. `first_ids: true` does as the thesis' release: names 0..12 are the classes, 0 (unlabelled) among them,
    the others are ignored.

    The file has no normals. `normals_from: camera` takes the cross product of neighbouring points in space; `pixels`
    is the thesis' formula (-dz/dx, -dz/dy, 1), which knows no camera, so nearly all its normals face the viewer.

    DataError where a file is absent or an array is not as stated.
    """
    options = {"semseg": {"channels": classes}}

    def opened(split: str) -> FileSplit:
        return open_split(root, split, tasks, classes, first_ids, normals_from, size)

    return folders.dataset("nyud-labeled", tasks, options, opened, size, augment, limit, seed)


def open_split(
    root: str,
    split: str,
    tasks: Sequence[LabelledTask],
    classes: int = 13,
    first_ids: bool = False,
    normals_from: NormalsFrom = "camera",
    size: tuple[int, int] | None = None,
) -> FileSplit:
    """The images of `split` (train or val). DataError where the file is not as expected."""
    path = folders.find("nyud-labeled", root, FILE, ADVICE)
    file = path / FILE
    total = _shape(file, tasks)
    positions = _positions(path / "splits.mat", split, total)
    table = None
    if "semseg" in tasks:
        table = _first(classes) if first_ids else _mapping(path / "classMapping40.mat", classes)
    reader = LabelledReader(file, positions, table, normals_from, size)
    names = tuple(f"{FILE}, image {p + 1}" for p in positions)
    version = f"{file.stat().st_size} {table is None or table.tobytes().hex()}"
    return FileSplit(names, reader, {task: np.ones(len(names), bool) for task in tasks}, version, (file,))


@dataclass(frozen=True, eq=False)
class LabelledReader:
    """Reads the image at `positions[i]` of the file and its labels; `table` makes classes of the names' numbers."""

    file: Path
    positions: tuple[int, ...]
    table: Array | None
    normals_from: NormalsFrom
    size: tuple[int, int] | None

    def __call__(self, i: int, tasks: Collection[str]) -> dict[str, Array | None]:
        """Image (H x W x 3, uint8) and raw labels of `tasks`."""
        p = self.positions[i]
        depth = labels = None
        with _open(self.file) as opened, parsing(f"{self.file}, image {p + 1}: cannot be read"):
            image = np.asarray(opened["images"][p]).transpose(2, 1, 0)
            if "depth" in tasks or "normals" in tasks:
                depth = np.asarray(opened["depths"][p]).T
            if "semseg" in tasks:
                labels = np.asarray(opened["labels"][p]).T
        found: dict[str, Array | None] = {"image": self._image(np.ascontiguousarray(image))}
        if labels is not None and self.table is not None:
            if labels.max(initial=0) >= len(self.table):
                raise DataError(
                    f"{self.file}, labels of image {p + 1}: expected 0..{len(self.table) - 1}, found {labels.max()}"
                )
            found["semseg"] = self._nearest(self.table[labels])
        if depth is not None:
            depth = np.where(np.isfinite(depth) & (depth > 0), depth, 0).astype(np.float32)
            if "depth" in tasks:
                found["depth"] = self._nearest(depth)
            if "normals" in tasks:
                found["normals"] = self._nearest((from_camera if self.normals_from == "camera" else from_pixels)(depth))
        return found

    def _image(self, image: Array) -> Array:
        if self.size is None:
            return image
        pillow = need("PIL.Image", "vision")
        resized = pillow.fromarray(image).resize((self.size[1], self.size[0]), pillow.Resampling.BILINEAR)
        return np.asarray(resized)

    def _nearest(self, label: Array) -> Array:
        if self.size is None:
            return label
        # The pixel whose square holds the centre of the new one.
        rows, cols = (((np.arange(self.size[a]) + 0.5) * label.shape[a] / self.size[a]).astype(int) for a in (0, 1))
        return label[rows[:, None], cols]


def from_camera(depth: Array) -> Array:
    """Normals (H x W x 3, float32; x right, y up, z to the viewer) of metres (H x W); 0 beside pixels without."""
    height, width = depth.shape
    scale = width / 640
    x = (np.arange(width) + 0.5 - CENTRE[0] * scale) / (FOCAL[0] * scale) * depth
    y = -(np.arange(height)[:, None] + 0.5 - CENTRE[1] * scale) / (FOCAL[1] * scale) * depth
    points = np.stack([x, y, -depth], -1)
    across, down = np.gradient(points, axis=1), np.gradient(points, axis=0)
    normals = np.cross(down, across)
    length = np.linalg.norm(normals, axis=-1, keepdims=True)
    normals = np.divide(normals, length, out=np.zeros_like(normals), where=length > 0)
    missing = depth == 0
    for axis in (0, 1):
        for step in (-1, 1):
            missing = missing | (np.roll(depth, step, axis) == 0)
    normals[missing] = 0
    return normals.astype(np.float32)


def from_pixels(depth: Array) -> Array:
    """The thesis' normals (H x W x 3, float32; y turned up): differences of depth per pixel as slopes."""
    down, across = np.gradient(depth)
    normals = np.stack([-across, down, np.ones_like(depth)], -1)
    return (normals / np.linalg.norm(normals, axis=-1, keepdims=True)).astype(np.float32)


def _open(file: Path) -> Any:
    library = need("h5py", "data")
    with parsing(f"{file}: cannot be read as HDF5"):
        return library.File(file, "r")


def _shape(file: Path, tasks: Sequence[str]) -> int:
    """The number of images, after a look at the arrays' shapes and types."""
    wanted = {"images": "u"}
    if "semseg" in tasks:
        wanted["labels"] = "u"
    if {"depth", "normals"} & set(tasks):
        wanted["depths"] = "f"
    with _open(file) as opened:
        for key, kind in wanted.items():
            if key not in opened:
                raise DataError(f"{file}: expected an array {key!r}, found {', '.join(sorted(opened)[:8])}")
            array = opened[key]
            images = opened["images"].shape
            expected = ("N", 3, "W", "H") if key == "images" else (images[0], *images[2:])
            good = array.ndim == 4 and images[1] == 3 if key == "images" else array.shape == expected
            if not good or array.dtype.kind != kind:
                shape = " x ".join(map(str, expected))
                what = {"u": "unsigned whole numbers", "f": "floats"}[kind]
                raise DataError(
                    f"{file}, {key}: expected {shape}, {what}, found {array.dtype} of shape {tuple(array.shape)}"
                )
        return int(opened["images"].shape[0])


def _positions(file: Path, split: str, total: int) -> tuple[int, ...]:
    """Positions of a split's images, from 0."""
    if not file.is_file():
        cut = EXPECTED["train"]
        positions = tuple(range(min(cut, total)) if split == "train" else range(cut, total))
    else:
        key = "trainNdxs" if split == "train" else "testNdxs"
        numbers = np.asarray(folders.matlab(file, key)).reshape(-1).astype(int)
        if numbers.size and not (numbers.min() >= 1 and numbers.max() <= total):
            raise DataError(f"{file}, {key}: expected 1..{total}, found {numbers.min()}..{numbers.max()}")
        positions = tuple((numbers - 1).tolist())
    if not positions:
        raise DataError(f"{file.parent / FILE}: no image is in the part {split!r}; it holds {total}")
    return positions


def _first(classes: int) -> Array:
    """Names 0..classes-1 as they are, the others ignored."""
    table = np.full(895, IGNORE, np.uint8)
    table[:classes] = np.arange(classes)
    return table


def _mapping(file: Path, classes: int) -> Array:
    """From the numbers of names (0 = unlabelled) to classes from 0, 255 = ignored."""
    if not file.is_file():
        raise DataError(
            f"{file}: absent. It maps the 894 names to 40 classes (variable mapClass, published with the data set's "
            "toolbox). Put it there, or set first_ids: true for the thesis' reading of the names"
        )
    found = np.asarray(folders.matlab(file, "mapClass")).reshape(-1)
    if not len(found) or found.dtype.kind not in "uif" or found.min() < 0 or found.max() > 40:
        raise DataError(f"{file}, mapClass: expected classes 0..40, one per name, found {found.dtype}")
    return shifted(np.concatenate([[0], found]).astype(np.uint8), classes)
