"""NYU Depth v2: in the folders of the field's multi-task repositories, and in the one file of its authors."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import numpy as np
from pydantic import Field

from fedloom.core.errors import DataError, parsing
from fedloom.core.lazy import need
from fedloom.core.settings.section import Count, NonNegative
from fedloom.data import folders
from fedloom.data.folders import Files, FileSplit, Folder
from fedloom.data.inputs import nearest_pixels
from fedloom.data.prepare import DATASETS, Array, Augment
from fedloom.models.tasks.task import IGNORE

if TYPE_CHECKING:
    from fedloom.data.dataset import Dataset

NyudTask = Literal["semseg", "normals", "depth", "edge"]
LabelledTask = Literal["semseg", "normals", "depth"]
NormalsFrom = Literal["camera", "pixels"]
Size = tuple[int, int] | None

EXPECTED = {"train": 795, "val": 654}
FILES = {"semseg": "segmentation/{}.png", "normals": "normals/{}.png", "depth": "depth/{}.npy", "edge": "edge/{}.png"}
IMAGES = Files(("images/{}.png", "images/{}.jpg"), folders.colours)
ADVICE = (
    f"Expected images/ID.png, {', '.join(FILES.values()).format(*['ID'] * 4)} and gt_sets/{{train,val}}.txt; "
    "images may be .jpg, normals and edge .npy"
)

LABELLED = "nyu_depth_v2_labeled.mat"
LABELLED_ADVICE = (
    "Expected the file of the data set's authors (2.8 GB), with splits.mat and classMapping40.mat in the same folder"
)
FOCAL, CENTRE = (518.857901, 519.469611), (325.582449, 253.736166)
"""Of the colour camera in pixels, x and y, at 640 x 480; source: the data set's toolbox."""

THIRTEEN = {
    "bed": (4,), "books": (23,), "ceiling": (22,), "chair": (5,), "floor": (2, 20),
    "furniture": (3, 10, 12, 15, 17, 24, 32, 39),
    "objects": (18, 19, 21, 26, 27, 28, 29, 30, 31, 33, 34, 35, 36, 37, 38, 40),
    "picture": (11,), "sofa": (6,), "table": (7, 14), "tv": (25,), "wall": (1, 8), "window": (9, 13, 16),
}  # fmt: skip
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
    keep: NonNegative = 0,
) -> Dataset:
    """NYU Depth v2 (795 + 654 indoor images) from a folder: `semseg`, `normals`, `depth`, `edge`. Downloads nothing.

    `root` holds images/ID.png, segmentation/ID.png (0..40; 0 is ignored, the classes are 1..40), normals/ID.png
    (0..255 for -1..1), depth/ID.npy (metres, float; 0, NaN and infinity are ignored), edge/ID.png (above 127 is an
    edge) and the lists gt_sets/train.txt and gt_sets/val.txt. A label file that is absent is ignored for its image. The
    older archive (NYUD_MT.tgz, as in ATRC's release) has images/ID.jpg, normals/ID.npy (-1..1) and edge/ID.npy (0..1)
    in the place of these, which is read too.

    `size` is what images are cropped or padded to; it must hold them in evaluation (they are 425 x 560) and be a
    multiple of the encoder's stride. `classes: 13` joins the 40 classes to 13. `limit` keeps that many random
    images of each part. Each process keeps up to `keep` GB of what it decoded in memory (all images with four tasks
    take 7), and reads the rest again in every epoch. DataError where lists or images are absent or a file is not as
    stated.
    """
    options: dict[str, dict[str, Any]] = {"semseg": {"channels": classes}, "edge": {"max_dist": 0.011}}
    opened = partial(open_split, root, tasks=tasks, classes=classes)
    return folders.dataset("nyud", tasks, options, opened, size, augment, limit, keep, seed)


def open_split(root: str, split: str, tasks: list[NyudTask], classes: int = 40) -> FileSplit:
    """Open the images that `split` (train or val) lists. DataError where the list or an image is absent."""
    path = folders.find("nyud", root, "gt_sets", ADVICE)
    listed = path / "gt_sets" / f"{split}.txt"
    known: dict[str, Files] = {
        "semseg": Files((FILES["semseg"],), partial(_semseg, classes=classes)),
        "normals": Files((FILES["normals"], "normals/{}.npy"), partial(_picture_or_values, task="normals")),
        "depth": Files((FILES["depth"],), metres),
        "edge": Files((FILES["edge"], "edge/{}.npy"), partial(_picture_or_values, task="edge")),
    }
    return Folder(path, folders.split_list(listed), IMAGES, {str(t): known[t] for t in tasks}).split(listed)


def _semseg(files: tuple[Path, ...], size: tuple[int, ...], classes: int) -> Array:
    stored = folders.picture(files[0], "semseg", colour=False)
    return shifted(folders.class_map(files[0], "semseg", stored, 40), classes)


def _picture_or_values(files: tuple[Path, ...], size: tuple[int, ...], task: str) -> Array:
    """Read normals or edges, of which the older archive has arrays."""
    if files[0].suffix == ".npy":
        return unit_values(files[0], task)
    stored = folders.picture(files[0], task, colour=task == "normals")
    return folders.normals_of(stored) if task == "normals" else folders.above_half(stored)


def shifted(stored: Array, classes: int) -> Array:
    """Return stored labels (0 = none, 1..40, 255 = none; uint8) as classes from 0, 255 = none."""
    table = np.full(256, IGNORE, np.uint8)
    if classes == 13:
        for number, members in enumerate(THIRTEEN.values()):
            table[list(members)] = number
    else:
        table[1:41] = np.arange(40)
    return np.asarray(table[stored])


def _array(file: Path, field: str) -> Array:
    with parsing(f"{file}, {field}: cannot be read"):
        return np.asarray(np.load(file, allow_pickle=False))


def unit_values(file: Path, task: str) -> Array:
    """Read normals (H x W x 3 in -1..1, float32) or edges (H x W in 0..1, as 0 and 1) of the older archive. Values that
    are not finite count as 0. DataError where the file holds anything else."""
    values, low, shape = _array(file, task), *((-1, "H x W x 3") if task == "normals" else (0, "H x W"))
    if task == "edge" and values.ndim == 3 and values.shape[2] == 1:
        values = values[..., 0]
    right = values.dtype.kind in "fbui" and (values.ndim == 2 if task == "edge" else values.shape[2:] == (3,))
    real = np.where(np.isfinite(values), values, 0).astype(np.float32) if right else np.zeros(1)
    if not right or real.min(initial=0) < low - 0.01 or real.max(initial=0) > 1.01:
        found = f"{values.dtype} of shape {values.shape}"
        found += f" in {real.min():g}..{real.max():g}" if right else ""
        raise DataError(f"{file}, {task}: expected {shape} of numbers in {low}..1, found {found}")
    return real if task == "normals" else (real > 0.5).astype(np.uint8)


def metres(files: tuple[Path, ...], size: tuple[int, ...]) -> Array:
    """Read a depth map (H x W, float32), 0 where there is no value. DataError where the file holds anything else."""
    depth = _array(file := files[0], "depth")
    if depth.ndim == 3 and 1 in (depth.shape[0], depth.shape[2]):
        depth = depth.squeeze(0 if depth.shape[0] == 1 else 2)
    if depth.ndim != 2 or depth.dtype.kind != "f":
        raise DataError(f"{file}, depth: expected metres, H x W of floats, found {depth.dtype} of shape {depth.shape}")
    depth = np.where(np.isfinite(depth), depth, 0).astype(np.float32)
    if depth.min(initial=0) < 0 or depth.max(initial=0) > 255:
        raise DataError(f"{file}, depth: expected metres in 0..255, found {depth.min():g}..{depth.max():g}")
    return depth


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
    keep: NonNegative = 0,
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

    `limit` and `keep` are as in `nyud`; all images take 2 GB at 256 x 256. DataError where a file is absent or an array
    is not as stated.
    """
    how: dict[str, Any] = {"classes": classes, "first_ids": first_ids, "normals_from": normals_from, "size": size}
    opened, options = partial(open_labelled, root, tasks=tasks, **how), {"semseg": {"channels": classes}}
    return folders.dataset("nyud-labeled", tasks, options, opened, size, augment, limit, keep, seed)


def open_labelled(
    root: str,
    split: str,
    tasks: Sequence[LabelledTask],
    classes: int = 13,
    first_ids: bool = False,
    normals_from: NormalsFrom = "camera",
    size: Size = None,
) -> FileSplit:
    """Open the images of `split` (train or val). DataError where the file is not as expected."""
    path = folders.find("nyud-labeled", root, LABELLED, LABELLED_ADVICE)
    file, listed, table = path / LABELLED, path / "splits.mat", None
    positions = _positions(listed, split, _shape(file, tasks))
    if "semseg" in tasks:
        table = _mapping(path / "classMapping40.mat", classes) if not first_ids else np.full(895, IGNORE, np.uint8)
        table[:classes] = np.arange(classes) if first_ids else table[:classes]
    names = tuple(f"{LABELLED}, image {p + 1}" for p in positions)
    version = f"{file.stat().st_size} {table is None or table.tobytes().hex()}"
    absent = f"splits.mat is absent, so the first {EXPECTED['train']} images train"
    note = "splits.mat found" if listed.is_file() else absent
    annotated: dict[str, Array] = {task: np.ones(len(names), bool) for task in tasks}
    normals = from_camera if normals_from == "camera" else from_pixels
    reader = partial(_read, file, positions, table, normals, size)
    return FileSplit(names, reader, annotated, version, (file,), (note,))


def _read(
    file: Path, positions: Sequence[int], table: Array | None, normals: Any, size: Size, i: int, tasks: Collection[str]
) -> dict[str, Array | None]:
    """Read the image at `positions[i]` of the file (H x W x 3, uint8) and raw labels of `tasks`, resized to `size` if
    there is one; `table` turns names' numbers into classes, and `normals` depths into normals."""
    p, want = positions[i], {*tasks}
    with _open(file) as opened, parsing(f"{file}, image {p + 1}: cannot be read"):
        image = np.ascontiguousarray(np.asarray(opened["images"][p]).transpose(2, 1, 0))
        depth = np.asarray(opened["depths"][p]).T if want & {"depth", "normals"} else None
        labels = np.asarray(opened["labels"][p]).T if "semseg" in want else None
    if size is not None:
        pillow = need("PIL.Image", "vision")
        image = np.asarray(pillow.fromarray(image).resize(size[::-1], pillow.Resampling.BILINEAR))
    raw: dict[str, Array] = {}
    if labels is not None and table is not None:
        if labels.max(initial=0) >= len(table):
            expected = f"expected 0..{len(table) - 1}, found {labels.max()}"
            raise DataError(f"{file}, labels of image {p + 1}: {expected}")
        raw["semseg"] = table[labels]
    if depth is not None:
        depth = np.where(np.isfinite(depth) & (depth > 0), depth, 0).astype(np.float32)
        raw |= {"depth": depth} if "depth" in want else {}
        raw |= {"normals": normals(depth)} if "normals" in want else {}
    resized = {task: y if size is None else nearest_pixels(y[None], *size)[0] for task, y in raw.items()}
    return {"image": image, **resized}


def from_camera(depth: Array) -> Array:
    """Compute normals (H x W x 3, float32; x right, y up, z to the viewer) of metres; 0 beside pixels without."""
    height, width = depth.shape
    scale = width / 640
    x = (np.arange(width) + 0.5 - CENTRE[0] * scale) / (FOCAL[0] * scale) * depth
    y = -(np.arange(height)[:, None] + 0.5 - CENTRE[1] * scale) / (FOCAL[1] * scale) * depth
    points = np.stack([x, y, -depth], -1)
    across, down = np.gradient(points, axis=1), np.gradient(points, axis=0)
    normals = np.cross(down, across)
    length = np.linalg.norm(normals, axis=-1, keepdims=True)
    normals = np.divide(normals, length, out=np.zeros_like(normals), where=length > 0)
    for axis, step in ((0, 0), (0, -1), (0, 1), (1, -1), (1, 1)):
        normals[np.roll(depth, step, axis) == 0] = 0
    return normals.astype(np.float32)


def from_pixels(depth: Array) -> Array:
    """Compute the thesis' normals (H x W x 3, float32; y turned up): differences of depth per pixel as slopes."""
    down, across = np.gradient(depth)
    normals = np.stack([-across, down, np.ones_like(depth)], -1)
    return (normals / np.linalg.norm(normals, axis=-1, keepdims=True)).astype(np.float32)


def _open(file: Path) -> Any:
    library = need("h5py", "data")
    with parsing(f"{file}: cannot be read as HDF5"):
        return library.File(file, "r")


def _shape(file: Path, tasks: Sequence[str]) -> int:
    """Check the arrays' shapes and types; return the number of images."""
    users = {"images": set(tasks), "labels": {"semseg"}, "depths": {"depth", "normals"}}
    with _open(file) as opened:
        for key in (key for key, own in users.items() if own & set(tasks)):
            if key not in opened:
                raise DataError(f"{file}: expected an array {key!r}, found {', '.join(sorted(opened)[:8])}")
            array, images = opened[key], opened["images"].shape
            expected = ("N", 3, "W", "H") if key == "images" else (images[0], *images[2:])
            good = array.ndim == 4 and images[1] == 3 if key == "images" else array.shape == expected
            kind, numbers = ("f", "floats") if key == "depths" else ("u", "unsigned whole numbers")
            if not good or array.dtype.kind != kind:
                found = f"{array.dtype} of shape {tuple(array.shape)}"
                raise DataError(f"{file}, {key}: expected {' x '.join(map(str, expected))}, {numbers}, found {found}")
        return int(opened["images"].shape[0])


def _positions(file: Path, split: str, total: int) -> tuple[int, ...]:
    """Return positions of a split's images, from 0."""
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
        raise DataError(f"{file.parent / LABELLED}: none of its {total} images is in the part {split!r}")
    return positions


def _mapping(file: Path, classes: int) -> Array:
    """Read the table from the numbers of names (0 = unlabelled) to classes from 0, 255 = ignored."""
    if not file.is_file():
        what = "It maps the 894 names to 40 classes (variable mapClass, published with the data set's toolbox)"
        advice = "Put the file there, or set first_ids: true to read the names as the thesis does"
        raise DataError(f"{file} does not exist. {what}. {advice}")
    numbers = np.asarray(folders.matlab(file, "mapClass")).reshape(-1)
    if not len(numbers) or numbers.dtype.kind not in "uif" or numbers.min() < 0 or numbers.max() > 40:
        raise DataError(f"{file}, mapClass: expected classes 0..40, one per name, found {numbers.dtype}")
    return shifted(np.concatenate([[0], numbers]).astype(np.uint8), classes)


folders.CHECKABLE["nyud"] = folders.Checkable(open_split, get_args(NyudTask), EXPECTED, (448, 576))
folders.CHECKABLE["nyud-labeled"] = folders.Checkable(open_labelled, get_args(LabelledTask), EXPECTED, None)
