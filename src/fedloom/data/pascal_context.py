"""PASCAL-Context in the folders of the field's multi-task repositories."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
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
from fedloom.data.prepare import DATASETS, Array, Augment
from fedloom.models.tasks.task import IGNORE

if TYPE_CHECKING:
    from fedloom.data.dataset import Dataset

PascalTask = Literal["semseg", "human_parts", "saliency", "normals", "edge"]

EXPECTED = {"train": 4998, "val": 5105}
PERSON = 15
"""Number of the category person in PASCAL VOC."""
PARTS = {
    "head": ("head", "leye", "reye", "lear", "rear", "lebrow", "rebrow", "nose", "mouth", "hair"),
    "torso": ("torso", "neck"),
    "upper arms": ("luarm", "ruarm"),
    "lower arms": ("llarm", "rlarm", "lhand", "rhand"),
    "upper legs": ("luleg", "ruleg"),
    "lower legs": ("llleg", "rlleg", "lfoot", "rfoot"),
}
"""The six classes 1..6 and the 24 parts of PASCAL-Part that they hold; 0 is background."""
FIFTEEN = (
    *(("head",), ("hair",), ("leye", "reye"), ("lebrow", "rebrow"), ("lear", "rear"), ("nose",), ("mouth",)),
    *(("neck",), ("torso",), ("luarm", "ruarm"), ("llarm", "rlarm"), ("lhand", "rhand")),
    *(("luleg", "ruleg"), ("llleg", "rlleg"), ("lfoot", "rfoot")),
)
"""The same 24 parts with left and right joined."""
CLASS_OF_PART = {
    len(groups): {part: number for number, names in enumerate(groups, start=1) for part in names}
    for groups in (tuple(PARTS.values()), FIFTEEN)
}
"""Number of classes beside background -> part -> class."""
# fmt: off
NORMALS = (
    3, 4, 6, 9, 10, 11, 13, 15, 17, 18, 22, 23, 29, 30, 33, 34, 36, 37, 38, 39, 41, 43, 46, 49, 50, 51, 53, 55,
    56, 59, 61, 62, 65, 66, 68, 69, 72, 73, 78, 83, 84, 85, 87, 88, 95, 96, 101, 104, 105, 107, 111, 113, 115,
    122, 124, 135, 141, 142, 143, 146, 150, 154, 157, 158, 159, 165, 172, 174, 181, 183, 184, 191, 193, 195,
    197, 199, 202, 213, 215, 216, 219, 220, 223, 225, 228, 230, 232, 233, 238, 239, 242, 243, 246, 250, 251,
    252, 255, 260, 261, 263, 269, 272, 273, 275, 281, 283, 284, 285, 286, 287, 288, 290, 291, 292, 293, 295,
    304, 307, 309, 310, 314, 315, 319, 323, 329, 330, 331, 336, 342, 345, 349, 350, 351, 352, 355, 357, 368,
    370, 371, 374, 379, 380, 383, 384, 397, 401, 403, 405, 407, 408, 411, 412, 413, 414, 417, 419, 421, 423,
    427, 429, 430, 432, 440, 441, 442, 443, 444, 446, 454, 457,
)
# fmt: on
"""Numbers of the classes of PASCAL-Context (1..459) whose normals count: those whose names are among NYU's 894, for the
network that made the normals was trained on these, and tvmonitor; source: the lists in the archive PASCAL_MT."""
LABEL_MAP = "pascal-context/trainval/{}.mat"
IMAGES = Files(("JPEGImages/{}.jpg",), folders.colours)
ADVICE = (
    "Expected JPEGImages/ID.jpg, pascal-context/trainval/ID.mat, semseg/{VOC12,pascal-context}/ID.png, "
    "human_parts/ID.mat, sal_distill/ID.png, normals_distill/ID.png and "
    "ImageSets/Context/{train,val}.txt, as in the archive PASCAL_MT"
)


@DATASETS.register("pascal-context", source="Mottaghi et al. (2014); folders as in FedHCA2's release")
def pascal_context(
    seed: int,
    *,
    root: str,
    tasks: Annotated[list[PascalTask], Field(min_length=1)] = list(get_args(PascalTask)),  # noqa: B006, B008
    size: tuple[Count, Count] = (512, 512),
    classes: Literal[21, 59] = 21,
    parts: Literal[6, 15] = 6,
    augment: bool | Augment = True,
    limit: Count | None = None,
    keep: NonNegative = 0,
) -> Dataset:
    """PASCAL-Context (4,998 + 5,105 images): `semseg`, `human_parts`, `saliency`, `normals`, `edge`. Downloads nothing.

    `root` holds JPEGImages/ID.jpg and the lists ImageSets/Context/train.txt and val.txt, and per task:

    - semseg: semseg/VOC12/ID.png, else semseg/pascal-context/ID.png, 0..20. With `classes: 59` only the latter, as in
      the thesis' release: 0..58, higher numbers ignored.
    - human_parts: human_parts/ID.mat (`anno` of PASCAL-Part). The 24 parts of persons become 6 classes beside
      background: head with face and hair, torso with neck, upper arms, lower arms with hands, upper legs, lower legs
      with feet. With `parts: 15` left and right are joined and nothing else, as in chapters 5 and 6 of the thesis.
      Where parts overlap the later one counts. Images without a person's parts are ignored as a whole; with
      ImageSets/Parts/train.txt and val.txt (JSON: ID -> VOC categories) clients of this task get none of those whose
      categories lack person (15).
    - saliency: sal_distill/ID.png, above 127 is salient.
    - normals: normals_distill/ID.png (0..255 for -1..1), where the class in `LabelMap` is one of the 170 that are
      classes of NYU too, or tvmonitor; ignored elsewhere.
    - edge: pixels of `LabelMap` (pascal-context/trainval/ID.mat) where its Laplacian is not zero, thinned to lines.

    A label file that is absent is ignored for its image. `size` is what images are cropped or padded to; it must hold
    them in evaluation (they have at most 500 pixels a side) and be a multiple of the encoder's stride. `limit` keeps
    that many random images of each part. Each process keeps up to `keep` GB of what it decoded in memory (all images
    with five tasks take 36). DataError where lists or images are absent or a file is not as stated.
    """
    options: dict[str, dict[str, Any]] = {"semseg": {"channels": classes}, "human_parts": {"channels": 1 + parts}}
    opened = partial(open_split, root, tasks=tasks, classes=classes, parts=parts)
    return folders.dataset("pascal-context", tasks, options, opened, size, augment, limit, keep, seed)


def open_split(root: str, split: str, tasks: list[PascalTask], classes: int = 21, parts: int = 6) -> FileSplit:
    """Open the images that `split` (train or val) lists. DataError where the list or an image is absent."""
    path = folders.find("pascal-context", root, "ImageSets/Context", ADVICE)
    listed = path / "ImageSets" / "Context" / f"{split}.txt"
    names = folders.split_list(listed)
    parts_list = path / "ImageSets" / "Parts" / f"{split}.txt"
    people = {"human_parts": _with_people(parts_list, names)} if "human_parts" in tasks else {}
    voc = ("semseg/VOC12/{}.png",) * (classes == 21)
    known: dict[str, Files] = {
        "semseg": Files((*voc, "semseg/pascal-context/{}.png"), partial(_semseg, classes=classes)),
        "human_parts": Files(("human_parts/{}.mat",), partial(parts_of, parts=parts)),
        "saliency": Files(("sal_distill/{}.png",), _saliency),
        "normals": Files(("normals_distill/{}.png",), _normals, also=(LABEL_MAP,)),
        "edge": Files((LABEL_MAP,), _edges),
    }
    split_of = Folder(path, names, IMAGES, {task: known[task] for task in tasks}).split(listed, people)
    if not people:
        return split_of
    where, there = parts_list.relative_to(path), parts_list.is_file()
    note = f"{where} found" if there else f"{where} is absent, so images without a person count for human_parts too"
    return replace(split_of, notes=(note,))


def _semseg(files: tuple[Path, ...], size: tuple[int, ...], classes: int) -> Array:
    stored = folders.fits(files[0], "semseg", folders.picture(files[0], "semseg", colour=False), size)
    label = folders.class_map(files[0], "semseg", stored, 20 if classes == 21 else IGNORE)
    return label if classes == 21 else np.where(label < classes, label, np.uint8(IGNORE))


def _saliency(files: tuple[Path, ...], size: tuple[int, ...]) -> Array:
    return folders.above_half(folders.picture(files[0], "saliency", colour=False))


def _normals(files: tuple[Path, ...], size: tuple[int, ...]) -> Array:
    stored = folders.fits(files[0], "normals", folders.picture(files[0], "normals", colour=True), size)
    normals = folders.normals_of(stored)
    normals[~np.isin(_label_map(files[1], size), NORMALS)] = 0
    return normals


def _edges(files: tuple[Path, ...], size: tuple[int, ...]) -> Array:
    return edges_of(_label_map(files[0], size))


def parts_of(files: tuple[Path, ...], size: tuple[int, ...], parts: int) -> Array:
    """Read classes 0..`parts` (H x W, uint8) of a PASCAL-Part annotation; DataError where it is not as expected."""
    file, label, classes = files[0], np.zeros(size, np.uint8), CLASS_OF_PART[parts]
    anno = folders.matlab(file, "anno", simple=True)
    for thing in _structs(file, "anno", anno):
        for obj in _structs(file, "objects", thing.get("objects", ())):
            number = obj.get("class_ind")
            if not isinstance(number, int | float | np.number):
                raise DataError(f"{file}, class_ind: expected a number, found {number!r}")
            if int(number) != PERSON:
                continue
            for part in _structs(file, "parts", obj.get("parts", ())):
                name, mask = part.get("part_name"), part.get("mask")
                if name not in classes:
                    raise DataError(f"{file}, part_name: expected a part of a person of PASCAL-Part, found {name!r}")
                if not isinstance(mask, np.ndarray) or mask.ndim != 2:
                    raise DataError(f"{file}, mask of part {name!r}: expected H x W, found {type(mask).__name__}")
                label[folders.fits(file, f"mask of part {name!r}", mask, size) != 0] = classes[name]
    return label


def edges_of(labels: Array) -> Array:
    """Return thin boundaries (H x W, bool) of a map of labels: its non-zero Laplacian (4 neighbours), thinned."""
    from scipy import ndimage

    laplacian = ndimage.laplace(labels.astype(np.int64), mode="mirror")
    return np.asarray(need("skimage.morphology", "data").thin(laplacian != 0))


def _label_map(file: Path, size: tuple[int, ...]) -> Array:
    stored = np.asarray(folders.matlab(file, "LabelMap"))
    if stored.ndim != 2 or stored.dtype.kind not in "buif" or (stored != np.floor(stored)).any():
        raise DataError(f"{file}, LabelMap: expected H x W whole numbers, found {stored.dtype} of shape {stored.shape}")
    return folders.fits(file, "LabelMap", stored, size)


def _structs(file: Path, field: str, value: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the structs of a MATLAB field, which may be one, several or none."""
    items = [value] if isinstance(value, Mapping) else list(np.asarray(value, dtype=object).reshape(-1))
    for item in items:
        if not isinstance(item, Mapping):
            raise DataError(f"{file}, {field}: expected a struct, found {type(item).__name__}")
        yield item


def _with_people(file: Path, names: tuple[str, ...]) -> Array:
    """Return which images (N, bool) may show a person: all where the file (JSON) is absent."""
    if not file.is_file():
        return np.ones(len(names), bool)
    with parsing(f"{file}: cannot be read as JSON"):
        categories = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(categories, Mapping):
        raise DataError(f"{file}: expected an object of images and their categories, found {type(categories).__name__}")
    keys = {PERSON, str(PERSON), "person"}
    return np.array([any(c in keys for c in categories.get(name, ())) for name in names], bool)


folders.CHECKABLE["pascal-context"] = folders.Checkable(open_split, get_args(PascalTask), EXPECTED, (512, 512))
