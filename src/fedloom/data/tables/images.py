"""The data set `image-table`: images that a table names, with labels in its other columns."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from fedloom.core.errors import DataError, RecipeError
from fedloom.core.machine import need_memory
from fedloom.core.settings.section import BelowOne, Count
from fedloom.data.combine import Pad, Side
from fedloom.data.inputs import SUFFIXES, VOLUMES, Fit, ending, is_deep, marks, read, read_deep
from fedloom.data.prepare import DATASETS, Array, Reading, TestFraction, channel_statistics, copies
from fedloom.data.tables import preprocessing as fitting
from fedloom.data.tables import read as tables
from fedloom.data.tables.columns import labels_in, named, repeated, split_in, stated
from fedloom.data.tables.preprocessing import Label, label_columns
from fedloom.data.tables.read import Code, Column, Table
from fedloom.data.tables.table import Split, of_rows, refuse, rows_of

if TYPE_CHECKING:
    from fedloom.data.dataset import Dataset

SOME = 50
"""So many cells of a column decide whether it names images."""
SIDE = 64
"""Images are resized to so many pixels a side in a first recipe, whose model is a small CNN."""


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
    size: Side = 128,
    fit: Fit = "stretch",
    pad: Pad = 4,
    flip: bool = False,
    test_fraction: TestFraction = 0.2,
    val_fraction: BelowOne = 0.1,
    limit: Count | None = None,
    least: Count = 1,
    group: str | None = None,
    time: str | Annotated[list[str], Field(min_length=1)] | None = None,
    split: str | None = None,
) -> Dataset:
    """Read images and their labels from a table with a row for each image. Needs pillow. `fedloom init` writes it.

    The cells of the column `image` are names of files below `root` (by default the table's folder), with or without
    their ending. `tasks`, `site`, `missing`, `test_fraction`, `val_fraction`, `limit`, `least`, `group`, `time` and
    `split` are as in `table`: labels may be classes, ordered ones, numbers or several yes or no, and a row may lack
    some; rows with the same cell in `group`, such as the images of a patient, stay in one part. A regression without
    `mean` and `std` takes those of the training rows; nodes of a deployment need them in the recipe.

    Images are read once, resized to `size` x `size` as in `class-folders`, and kept in memory as uint8. In training,
    they are padded by `pad` black pixels, cropped at a random place and, with `flip`, mirrored with probability 1/2;
    they are always normalised by ImageNet's mean and standard deviation. Images of more than 8 bits (DICOM, NIfTI,
    16-bit pictures) are float32, stretched, not augmented, and normalised per channel by the mean and the standard
    deviation of the images that are not for tests. Rows whose image is not there are left out, and said. Raises
    DataError for a file that cannot be read, and as `table` does.
    """
    from fedloom.data.transforms import MEAN, STD, Crop

    rules = Split(test_fraction, val_fraction, limit, least, group, time, split)
    whole = tables.read(path, site, missing or ())
    refuse(whole.where, tasks, (image,))
    place = Path(path).expanduser()
    base = (place if place.is_dir() else place.parent) if root is None else Path(root).expanduser()
    found = [*_found(whole.column(image), base, {})]
    there = np.flatnonzero([file is not None for file in found])
    if not len(there):
        ends = ", ".join((*SUFFIXES, *VOLUMES))
        whole.column(image).fail(f"no cell names an image in {base}, expected files that end in {ends}")
    files = [file for file in found if file is not None]
    notes = list(whole.notes)
    if lost := len(found) - len(files):
        row = next(row for row, file in enumerate(found, 1) if file is None)
        notes.append(f"rows whose image is not in {base}, left out: {lost:,}, the first is row {row}")
    table = replace(whole, frame=whole.frame.iloc[there].reset_index(drop=True), notes=tuple(notes), _columns={})
    rows = rows_of(table, tasks, rules, seed)
    trains = {who: train for who, (train, _, _) in rows.parts.items()}
    known = {name: label for name, label in tasks.items() if not label.wants_scale}
    if known != tasks:
        known = dict(fitting.fit(table, {}, tasks, trains, "federated", 1).tasks)
    taken = rows.taken
    need_memory(len(taken) * 3 * size * size, f"{table.where}: {len(taken):,} images of {size} x {size}")
    some = [files[row] for row in taken.tolist()]
    if (deep := is_deep(some[0])) and fit != "stretch":
        raise RecipeError(f"data.fit: {fit} found, expected stretch for images of more than 8 bits, as {some[0].name}")
    pixels = (read_deep(some, size) if deep else read(some, size, fit)).contiguous()
    mean, std = channel_statistics(pixels[np.searchsorted(taken, rows.learned)]) if deep else (MEAN, STD)

    def inputs(index: Array, training: bool) -> dict[str, Any]:
        change = None if deep else Crop(pad, flip) if training else Crop(0, False)
        return {"images": pixels[np.searchsorted(taken, index)], "mean": mean, "std": std, "change": change}

    def seen(index: Array) -> Iterator[tuple[bytes, str]]:
        names = (os.path.relpath(files[row], base) for row in index.tolist())
        return marks(pixels[np.searchsorted(taken, index)], names)

    doubts = copies(seen(rows.learned), seen(rows.tests), len(rows.tests))
    reading = Reading(stored="stretched" if deep else None)
    return replace(of_rows(table, rows, known, inputs), reading=reading, doubts=doubts)


def _found(column: Column, base: Path, by_stem: dict[str, dict[str, Path]]) -> Iterator[Path | None]:
    """Yield the file of each row, None where there is none. Raises DataError for a name that leads out of `base`.
    `by_stem` keeps the images of the folders that were listed, by their names without ending."""
    for text, missing in zip(map(tables.text_of, column.series), column.series.isna(), strict=True):
        name = text.strip().replace("\\", "/")
        if missing or not name or text in column.codes:
            yield None
            continue
        if name.startswith("/") or ".." in name.split("/"):
            column.fail(f"{text!r} found, expected the name of a file below {base}")
        file = base / name
        if ending(name):
            yield file if file.is_file() else None
            continue
        folder = str(file.parent)
        if folder not in by_stem:  # a listing of a folder is quicker than a look for each ending
            listed = sorted(file.parent.iterdir()) if file.parent.is_dir() else []
            by_stem[folder] = {each.name.removesuffix(end): each for each in listed if (end := ending(each.name))}
        yield by_stem[folder].get(file.name)


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
    def section(self) -> dict[str, Any]:
        """The keys of a recipe's section `data`."""
        section: dict[str, Any] = {"image": self.image, "root": str(self.base.resolve()), "site": self.table.site}
        section |= {"size": SIDE, "tasks": stated(self.tasks), "missing": list(self.table.missing), "split": self.split}
        return {key: value for key, value in section.items() if value not in (None, [])}

    def lines(self) -> list[str]:
        """Return lines that name the labels, the images, and the columns that are not used."""
        used = {self.image, self.table.site, self.split, *label_columns(self.tasks)}
        unused = [name for name in map(str, self.table.frame) if name not in used]
        lines = [named(self.tasks), f"inputs: the images that {self.image} names, in {self.base}"]
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
    where there is no such column, or where `features` names inputs.

    Raises DataError as `columns.draft` does, where `images` has none of the images that a column names, and for a
    choice that is for other inputs.
    """
    if features is not None and images is None:
        return None
    here = path if path.is_dir() else path.parent
    below = sorted(each for each in here.iterdir() if each.is_dir() and not each.name.startswith((".", "__")))
    found = _image_column(table, [here, *below] if images is None else [images])
    if found is None:
        if images is None:
            return None
        raise DataError(f"{table.where}: no column names images in {images}, expected names of files below it")
    if features is not None:
        raise DataError(f"{table.where}: images are the inputs, so features cannot be: leave one of them out")
    if leave_out:
        raise DataError(f"{table.where}: only the images that {found[0]!r} names are inputs, so none can be left out")
    tasks = labels_in(table, labels, "local")  # nodes send nothing about labels, so the recipe says their scale
    refuse(table.where, tasks, found[:1])
    part = split_in(table, {table.site, found[0], *label_columns(tasks)})
    rows = rows_of(table, tasks, Split(column=part), 0)
    names = [name for name in map(str, table.frame) if name != table.site]
    return ImageDraft(table, tasks, *found, (*rows.notes, *repeated(table, names, {}, len(rows.parts))), part)


def _image_column(table: Table, bases: Sequence[Path]) -> tuple[str, Path] | None:
    """Return the first column of which most cells name images below one of the folders, and that folder. Most of its
    cells differ: an age may be the name of an image by chance."""
    names = [name for name in map(str, table.frame) if 2 * table.frame[name].nunique() >= table.frame[name].count()]
    for base in bases:
        known: dict[str, dict[str, Path]] = {}
        for name in names:
            some = Column(table.frame[name].dropna().head(SOME), table.missing, f"{table.where}, column {name!r}")
            with suppress(DataError):
                files = [*_found(some, base, known)]
                if 2 * sum(file is not None for file in files) > len(files):
                    return name, base
    return None
