"""The data set `image-table`: images that a table names, with labels and names of masks in its other columns. Folders
of images and of their masks are such a table, too."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from fedloom.core.errors import DataError, RecipeError, first_of
from fedloom.core.machine import need_memory
from fedloom.data.combine import Pad, Side
from fedloom.data.inputs import Fit, ending, marks, pixels_of
from fedloom.data.prepare import DATASETS, Array, MaskDoubt, Reading, channel_statistics, copies, has_label
from fedloom.data.tables import preprocessing as fitting
from fedloom.data.tables.columns import labels_in, named, repeated, split_in, stated
from fedloom.data.tables.files import FAR, FOLDER, IMAGES, Files, base_of, found_in, numbers_in, table_at
from fedloom.data.tables.preprocessing import MAPS, Label, label_columns
from fedloom.data.tables.read import Code, Column, Table, text_of
from fedloom.data.tables.table import Rows, RowSplit, of_rows, one_sided, refuse, rows_of, task_name
from fedloom.models.tasks.task import IGNORE

if TYPE_CHECKING:
    import pandas
    from torch import Tensor

    from fedloom.data.dataset import Dataset

SOME, LOOKED = 50, 500
"""So many cells of a column decide whether it names images, and so many maps which classes there are."""
CLASSES = 64
"""Maps of more values have no classes."""
BETWEEN = 3
"""A mask whose edges were interpolated has at least so many values beside the two of its classes."""
SIDES = 64, 128
"""Images are resized to so many pixels a side in a first recipe, without and with maps."""


@DATASETS.register("image-table")
def image_table(
    seed: int,
    *,
    path: str,
    tasks: Annotated[dict[str, Label], Field(min_length=1)],
    image: str = "image",
    root: str | None = None,
    site: str | None = None,
    missing: list[Code] | None = None,
    rename: dict[str, str] | None = None,
    size: Side = 128,
    fit: Fit = "stretch",
    pad: Pad = 4,
    flip: bool = False,
    rules: RowSplit,
) -> Dataset:
    """Read images and their labels from a table with a row for each image. Needs pillow. `fedloom init` writes it.

    The cells of the column `image` are names of files below `root` (by default the table's folder), with or without
    their ending. `path` may also be a folder that has the folder `image` with the images and a folder for each kind of
    masks, whose files have the names of the images, perhaps with more after "_", "-" or "."; around them may be folders
    of sites, of train, val and test, or of both. Its columns are these folders, `site` and `split`.

    `tasks`, `site`, `missing`, `rename`, `test_fraction`, `val_fraction`, `limit`, `least`, `group`, `time` and
    `split` are as in `table`: labels may be classes, ordered ones, numbers or several yes or no, and a row may lack
    some; rows with the same cell in `group`, such as the images of a patient, stay in one part. A regression without
    `mean` and `std` takes those of the training rows; nodes of a deployment need them in the recipe. Labels of the
    kinds `segmentation` and `depth` are images, too: the cell names a file below `root` that is as large as the image.
    With `root`, its own folder of a task, the file there may have the name of the image, when `column` is `image`.
    Segmentation has a class for each value of `classes`; 255, unless it is one of these, and `missing` are no label.
    Depth is in metres after it was multiplied by `factor`, and 0 is none.

    Images are read once, resized to `size` x `size` as in `class-folders`, and kept in memory as uint8. In training,
    they are padded by `pad` black pixels, cropped at a random place and, with `flip`, mirrored with probability 1/2,
    and their masks with them; they are always normalised by ImageNet's mean and standard deviation. Images of more than
    8 bits (DICOM, NIfTI, 16-bit pictures) are float32, stretched, not augmented, and normalised per channel by the mean
    and the standard deviation of the images that are not for tests. Each slice of a volume is an example with the
    labels of its row; without `group`, those of a file stay in one part. Rows whose image is not there are left out,
    and said. Raises DataError for a file that cannot be read, and as `table` does.
    """
    from fedloom.data.transforms import MEAN, STD, Crop

    place = Path(path).expanduser()
    whole, base = table_at(place, site, missing or (), rename), base_of(place, root)
    refuse(whole.where, {task: label for task, label in tasks.items() if label.root is None}, (image,))
    if fit != "stretch" and any(label.kind in MAPS for label in tasks.values()):
        raise RecipeError(f"data.fit: {fit} found, expected stretch for labels of pixels (kinds {', '.join(MAPS)})")
    files = Files.of(whole, base, image, tasks)
    if rules.group is None and files.level.any():
        rules = replace(rules, group=image)
    rows = rows_of(files.table, files.tasks, rules, seed)
    known = dict(files.tasks)
    if real := {name: label for name, label in tasks.items() if label.wants_scale}:
        trains = {who: train for who, (train, _, _) in rows.parts.items()}
        known |= fitting.fit(files.table, {}, real, trains, "federated", 1).tasks
    taken = rows.taken
    bytes_of_pixel = 3 + sum({"segmentation": 1, "depth": 4}.get(label.kind, 0) for label in tasks.values())
    need_memory(len(taken) * bytes_of_pixel * size**2, f"{whole.where}: {len(taken):,} images of {size} x {size}")
    pixels, deep = files.pixels(taken, size, fit)
    maps = {task: files.labels(task, taken, size) for task in files.maps}
    normal = channel_statistics(pixels[np.searchsorted(taken, rows.learned)]) if deep else (MEAN, STD)
    changes = (None, None) if deep else (Crop(pad, flip), Crop(0, False))

    def seen(index: Array) -> Iterator[tuple[bytes, str]]:
        names = (os.path.relpath(files.images[row], base) for row in index.tolist())
        return marks(pixels[np.searchsorted(taken, index)], names)

    doubts = copies(seen(rows.learned), seen(rows.tests), len(rows.tests))
    doubts += tuple(_unlike(known, maps, rows))
    made = of_rows(files.table, rows, known, pixels, maps, normal, changes)
    return replace(made, reading=Reading(stored="stretched" if deep else None), doubts=doubts)


def _unlike(tasks: Mapping[str, Label], maps: Mapping[str, Tensor], rows: Rows) -> Iterator[str]:
    """Yield a doubt for each site whose masks have one class only, beside no label, or alone have a class."""
    for task, y in maps.items():
        found_at: dict[str, Array] = {}
        for site, parts in rows.parts.items() if tasks[task].kind == "segmentation" else ():
            places = np.sort(np.concatenate(parts))
            places = places[has_label(rows.labels[task][places])]
            values = set(y[np.searchsorted(rows.taken, places)].unique().tolist())
            if len(values - {IGNORE}) == 1:
                found = f"task {task!r}: class {tasks[task].classes[min(values)]} only found at site {site!r}"
                advice = "; pixels without a label found, too: if they have one, write classes as at other sites"
                said = f"{found}{advice if IGNORE in values else ''}"
                yield MaskDoubt.of(said, task=task, site=site, classes=values - {IGNORE})
            found_at[site] = np.array(sorted(values - {IGNORE}), np.int64)
        asked = [*one_sided(task, tasks[task].classes, found_at, is_map=True)]
        yield from asked
        if asked:
            said = f"{task}: a site that outlines only some classes belongs in tasks.{task}.labelled={{SITE: [CLASS]}}"
            yield MaskDoubt.of(said, task=task)


@dataclass(frozen=True, eq=False)
class ImageDraft:
    """A table that names images, and the roles of its columns."""

    table: Table
    tasks: Mapping[str, Label]
    image: str
    base: Path
    notes: tuple[str, ...]
    split: str | None

    name: ClassVar[str] = "image-table"
    signal: ClassVar[Literal["image"]] = "image"

    @property
    def has_maps(self) -> bool:
        """Return whether some labels are of pixels."""
        return any(label.kind in MAPS for label in self.tasks.values())

    @property
    def section(self) -> dict[str, Any]:
        """The keys of a recipe's section `data`."""
        section: dict[str, Any] = {"image": self.image, "root": str(self.base.resolve()), "site": self.table.site}
        section |= {"size": SIDES[self.has_maps], "tasks": stated(self.tasks), "split": self.split}
        section |= {"missing": list(self.table.missing), "rename": dict(self.table.rename)}
        return {key: value for key, value in section.items() if value not in (None, [], {})}

    def lines(self) -> list[str]:
        """Return lines that name the labels, the images, and the columns that are not used."""
        used = {self.image, self.table.site, self.split, *label_columns(self.tasks)}
        unused = [name for name in map(str, self.table.frame) if name not in used]
        lines = [named(self.tasks), f"inputs: the images that {self.image} names, in {self.base}"]
        if self.table.site is not None:
            sites = self.table.frame[self.table.site].map(text_of).value_counts(sort=False)
            lines.append(f"sites and their rows: {first_of([f'{name} ({count})' for name, count in sites.items()])}")
        lines += [] if self.split is None else [f"train and test: as {self.split} says"]
        return [*lines, *([f"not used: {', '.join(unused)}"] if unused else []), *self.notes]


def draft_of_images(
    table: Table,
    path: Path,
    labels: Mapping[str, Mapping[str, Any]],
    images: Path | None = None,
    features: Sequence[str] | None = None,
    leave_out: Sequence[str] = (),
) -> ImageDraft | None:
    """Look for a column that names images below `images`, or beside the table, and find the role of each column. None
    where there is no such column, or where `features` names inputs. A label may be a column that names maps, or a
    folder beside the table with a map for each image.

    Raises DataError as `columns.draft` does, where `images` has none of the images that a column names, and for a
    choice that is for other inputs.
    """
    if features is not None and images is None:
        return None
    here = path if path.is_dir() else path.parent
    below = sorted(each for each in here.iterdir() if each.is_dir() and not each.name.startswith((".", "__")))
    inputs = [name for name in map(str, table.frame) if name not in labels and name not in leave_out]
    inputs.sort(key=lambda name: name.casefold() not in IMAGES)  # masks may have a column, too
    is_sure = images is not None or any(
        bool(_ends_alike(table.frame[label].dropna())) if label in table.frame else (here / label).is_dir()
        for label in labels
    )
    bases = [here, *below] if images is None else [images]
    found = _image_column(table, bases, inputs, is_refused=not is_sure) if inputs else None
    if found is None:
        if not is_sure:
            return None
        around = str(images) if images is not None else f"{here} or a folder there"
        ends = {name: _ends_alike(table.frame[name].dropna()) for name in map(str, table.frame)}
        alike = next((f"; {cell!r} found in column {name!r}" for name, cell in ends.items() if cell), "")
        raise DataError(f"{table.where}: no column names images in {around}, expected names of files below it{alike}")
    if features is not None:
        raise DataError(f"{table.where}: images are the inputs, so features cannot be: leave one of them out")
    if leave_out:
        raise DataError(f"{table.where}: only the images that {found[0]!r} names are inputs, so none can be left out")
    image, base = found
    tasks: dict[str, Label] = {}
    cells: dict[str, Mapping[str, Any]] = {}
    for name, known in labels.items():
        column, places = name, [base, *below]
        if is_map := name not in table.frame:  # a folder with a map for each image, or for some
            column, places = image, [each for each in below if each.name == name]
        where = None if known.get("columns") else _image_column(table, places, [column], is_map)
        if where is None:
            if known.get("kind") in MAPS or (name in table.frame and _ends_alike(table.frame[name].dropna())):
                table.column(name).fail(f"no names of images found, expected those of maps in {base} or below")
            cells[name] = known
            continue
        label, task = _map_label(table.column(column), where[1], known, is_map), task_name(name)
        root = None if where[1] == base else str(where[1].resolve())
        tasks[task] = label.model_copy(update={"column": None if task == column else column, "root": root})
    # Nodes send nothing about labels, so the recipe says their scale.
    tasks |= labels_in(table, cells, "local") if cells or not tasks else {}
    refuse(table.where, {task: label for task, label in tasks.items() if label.root is None}, [image])
    part = split_in(table, {table.site, image, *label_columns(tasks)})
    rows = rows_of(table, tasks, RowSplit(split=part), 0)
    names = [name for name in map(str, table.frame) if name != table.site]
    notes = rows.notes
    if path.is_dir() and FOLDER in table.frame and table.site != FOLDER:
        inside = f"images lie in {table.frame[FOLDER].nunique():,} folders of their own"
        notes = (*notes, f"{inside}: if each is a patient, set data.group={FOLDER} to keep its images in one part")
    return ImageDraft(table, tasks, image, base, (*notes, *repeated(table, names, {}, len(rows.parts))), part)


def _image_column(
    table: Table, bases: Sequence[Path], columns: Sequence[str], is_map: bool = False, is_refused: bool = True
) -> tuple[str, Path] | None:
    """Return the first of some columns of which more than half of the cells, or with `is_map` any, name images below
    one of the folders, and that folder. Most of its cells differ: an age may be the name of an image by chance. Where
    no column does, and if `is_refused`, raises DataError for one whose cells end as images do and are no names below a
    folder."""
    refused: DataError | None = None
    cells = {name: table.frame[name].dropna() for name in columns if name in table.frame}
    for base in bases:
        numbers = [] if is_map else numbers_in(base)
        for name, series in cells.items():
            if not is_map and series.dtype.kind in "iuf" and not series.head(SOME).isin(numbers).any():
                continue
            differ = 2 * series.nunique() >= len(series)
            if not differ and not _ends_alike(series):
                continue
            some = Column(series.head(SOME), table.missing, f"{table.where}, column {name!r}")
            try:
                files = found_in(some, base, is_map)
            except DataError as error:
                refused = error if refused is None and _ends_alike(series) else refused
                continue
            there = sum(file is not None for file in files)
            if there > (0 if is_map else 0.5) * len(files) and differ:
                return name, base
    if refused is not None and is_refused:
        raise refused
    return None


def _ends_alike(series: pandas.Series) -> str:
    return next((cell for cell in series.head(SOME) if isinstance(cell, str) and ending(cell)), "")


def _is_smoothed(maps: Array) -> bool:
    """Return whether nearly every pixel of maps (n x H x W) that has neither the least nor the largest value, of at
    least BETWEEN values, touches a lower and a higher one: interpolated edges do, and classes have an inside."""
    padded = np.pad(maps, ((0, 0), (1, 1), (1, 1)), "edge")
    around = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(1, 2))
    inner = (maps > maps.min()) & (maps < maps.max())
    between = (around.min((3, 4)) < maps) & (maps < around.max((3, 4)))
    return len(np.unique(maps[inner])) >= BETWEEN and bool(between[inner].mean() > 0.95)


def _map_label(column: Column, folder: Path, known: Mapping[str, Any], is_map: bool) -> Label:
    """Return the label that the maps of a column in a folder have, as some of them look. Raises DataError where they
    have none, and where 255 may be a class or no label."""
    files = [file for file in found_in(column, folder, is_map) if file is not None]
    files = files[:: -(-len(files) // LOOKED)]
    try:
        each = [np.setdiff1d(np.unique(pixels_of(file, as_label=True)), column.numeric_codes) for file in files]
    except DataError as error:
        advice = "if it has no labels of pixels, leave it out: name the others with --labels"
        raise DataError(f"{error}; {advice}") from None
    each = [own[own == own] for own in each]  # NaN is no label
    values = np.unique(np.concatenate(each))
    kind, metric = known.get("kind"), known.get("metric")
    words = re.findall("[a-z]+", f"{column.name} {folder.name}".casefold())
    if kind == "depth" or (kind is None and "depth" in words):
        metres = values[np.isfinite(values) & (values > 0)]
        return Label(kind="depth", metric=metric, factor=0.001 if len(metres) and np.median(metres) >= FAR else 1.0)
    if kind not in (None, "segmentation"):
        column.fail(f"kind {kind!r} found, expected {' or '.join(MAPS)} for images with a label for each pixel")
    jpeg = next((file for file in files if file.suffix.lower() in (".jpg", ".jpeg")), None)
    richest = files[int(np.argmax([len(own) for own in each]))]
    is_whole = bool((np.isfinite(values) & (values == np.round(values))).all())
    if not is_whole or len(values) > (CLASSES if jpeg is None else 2):
        found = f"{len(values)} different values of pixels found, such as {values[1]:g} in {jpeg or richest}"
        column.fail(f"{found}, expected a few whole numbers, one for each class; JPEG changes them, PNG does not")
    if len(values) >= 2 + BETWEEN and _is_smoothed(pixels_of(richest, as_label=True)[:, 0]):
        found = f"{len(values)} different values of pixels found, most of them on edges only, as in {richest}"
        column.fail(f"{found}: the mask was resized or smoothed; save it with the values of classes alone")
    classes = values
    if IGNORE in values and len(values) > 2:
        both = [IGNORE in own and len(own) > 2 for own in each]
        if not any(both):  # black and white here, numbers of classes there
            one = next(file for file, own in zip(files, each, strict=True) if IGNORE in own)
            other = next(file for file, own in zip(files, each, strict=True) if {*own} - {0, IGNORE})
            advice = f"write the classes alike, or say --missing {IGNORE} if such pixels have no label"
            column.fail(f"pixels of {IGNORE} in {one} found, and of other classes only in others, as {other}; {advice}")
        classes = values[values != IGNORE] if values[values != IGNORE].max() < CLASSES else values
    if len(classes) < 2:
        found = f"all pixels have the value {values[0]:g}" if len(values) else "no pixel has a label"
        column.fail(f"{found}, so there is nothing to learn: leave the label out")
    return Label(kind="segmentation", classes=tuple(map(text_of, classes)), metric=metric)
