"""The files that a table of images names: images, and maps with a label for each pixel. Folders of both are a table."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedloom.core.errors import DataError, RecipeError
from fedloom.core.grouping import grouped
from fedloom.core.machine import need_memory
from fedloom.data.inputs import (
    SUFFIXES,
    VOLUMES,
    Fit,
    ending,
    frames_of,
    is_deep,
    is_image,
    nearest_pixels,
    package_of,
    pixels_of,
    read,
    read_deep,
    stem_of,
)
from fedloom.data.prepare import PARTS, Array, in_threads
from fedloom.data.tables import read as tables
from fedloom.data.tables.preprocessing import MAPS, Label
from fedloom.data.tables.read import SITE, Code, Column, Table, number_of
from fedloom.models.tasks.task import IGNORE

if TYPE_CHECKING:
    from torch import Tensor

IMAGES = ("image", "images", "imagestr", "img", "imgs", "jpegimages", "scans")
"""Names of a folder of images beside which folders of their maps lie."""
FOLDER, DEPTH = "folder", 2
"""The column of the folders inside a folder of images, and how deep these may lie."""
AROUND = (SITE, "split", FOLDER)
"""The columns that folders around and inside those of images are."""
Tree = Mapping[str, Mapping[str, Path]]
"""Folder inside a folder -> name without ending -> file."""
FAR = 80.0
"""Depths of more metres do not count (`tasks.Depth`)."""


@dataclass(frozen=True, eq=False)
class Files:
    """The files that a table names, a row for each slice of an image.

    `maps` have the file with the labels of each row's pixels, by task, and `sizes` (slices, height, width) of each
    image; they are known where a map or a volume is among the files. `tasks` read their maps from columns of their own.
    """

    table: Table
    tasks: Mapping[str, Label]
    images: Sequence[Path]
    level: Array
    """The number of each row's slice in its file."""
    maps: Mapping[str, Sequence[Path | None]]
    sizes: Mapping[Path, tuple[int, int, int]]

    @staticmethod
    def of(whole: Table, base: Path, image: str, tasks: Mapping[str, Label]) -> Files:
        """Find the images of a table below `base`, and the maps of its tasks. Rows without an image are left out.
        Raises DataError where there is none, and for a name that leads out of the folder."""
        found = found_in(whole.column(image), base)
        there = np.flatnonzero([file is not None for file in found])
        if not len(there):
            ends = ", ".join((*SUFFIXES, *VOLUMES))
            whole.column(image).fail(f"no cell names an image in {base}, expected files that end in {ends}")
        notes = list(whole.notes)
        if lost := len(found) - len(there):
            row = next(row for row, file in enumerate(found, 1) if file is None)
            notes.append(f"rows whose image is not in {base}, left out: {lost:,}, the first is row {row}")
        maps: dict[str, list[Path | None]] = {}
        places: dict[str, Path] = {}
        known, frame = dict(tasks), whole.frame
        for task, label in tasks.items():
            if label.kind in MAPS:
                column = whole.column(label.column or task)
                folder = places[task] = base if label.root is None else base / Path(label.root).expanduser()
                maps[task] = found_in(column, folder, is_map=column.name == image)
                gone = np.array([file is None for file in maps[task]])
                if label.root is None and (lost := int((gone & column.present).sum())):
                    notes.append(
                        f"{column.name}: {lost:,} cells name no file in {folder}, so {task!r} has no label there"
                    )
                known[task] = label.model_copy(update={"column": f"{column.name} ({task})"})
                frame = frame.assign(**{f"{column.name} ({task})": [None if lost else "map" for lost in gone]})
        if len(maps) == len(tasks) and not any(file for files in maps.values() for file in files):
            folders = " and ".join(sorted({*map(str, places.values())}))
            found_there = f"no file with the labels of an image's pixels found in {folders}"
            raise DataError(f"{whole.where}: {found_there}, expected one for each image that has labels")
        images = [file for file in found if file is not None]
        if several := sorted(file for file, count in Counter(images).items() if count > 1):
            some = f"{len(several):,} images are named by several rows, such as {several[0].name}"
            notes.append(f"{some}; data.group={image} keeps these rows in one part")
        wanted = {*images} if maps or any(map(package_of, images)) else set()
        sizes = dict(zip(wanted, in_threads(frames_of, wanted), strict=True))
        slices = np.array([sizes[file][0] if sizes else 1 for file in images])
        if (slices > 1).any():
            notes.append(f"{len(images):,} images have {slices.sum():,} slices, each an example with its row's labels")
        need_memory(64 * int(slices.sum()), f"{whole.where}: {slices.sum():,} slices")
        which = np.repeat(there, slices)
        table = replace(whole, frame=frame.iloc[which].reset_index(drop=True), notes=tuple(notes), _columns={})
        level = np.arange(len(which)) - np.repeat(np.cumsum(slices) - slices, slices)
        of_row = {task: [files[row] for row in which.tolist()] for task, files in maps.items()}
        return Files(table, known, [file for row in which.tolist() if (file := found[row])], level, of_row, sizes)

    def pixels(self, rows: Array, size: int, fit: Fit) -> tuple[Tensor, bool]:
        """Return the images of some rows (n x C x size x size), and whether they have more than 8 bits."""
        some = [self.images[row] for row in rows.tolist()]
        files = [*dict.fromkeys(some)]
        if (deep := is_deep(files[0])) and fit != "stretch":
            raise RecipeError(
                f"data.fit: {fit} found, expected stretch for images of more than 8 bits, as {files[0].name}"
            )
        slices = np.array([self.sizes[file][0] if self.sizes else 1 for file in files])
        starts = dict(zip(files, (np.cumsum(slices) - slices).tolist(), strict=True))
        pixels = read_deep(files, size) if deep else read(files, size, fit)
        places = np.array([starts[file] for file in some]) + self.level[rows]
        if len(pixels) != slices.sum():
            found = f"{len(pixels)} slices found in all, expected {slices.sum()}"
            raise DataError(f"{self.table.where}: {found}, as the headers of the images say: one of them is damaged")
        is_whole = len(places) == len(pixels) and bool((places == np.arange(len(places))).all())
        return (pixels if is_whole else pixels[places]).contiguous(), deep

    def labels(self, task: str, rows: Array, size: int) -> Tensor:
        """Return the label of each pixel of some rows (n x size x size): classes as uint8 or metres as float32, the
        nearest ones where the size is another; IGNORE where there is none. Raises DataError for a file that is not as
        large as its image, and for a pixel that is of no class."""
        import torch

        label = self.tasks[task]
        codes = self.table.column(label.column or task).numeric_codes
        dtype = np.float32 if label.kind == "depth" else np.uint8
        out = np.full((len(rows), size, size), IGNORE, dtype)
        files = enumerate((self.maps[task][row], self.images[row]) for row in rows.tolist())
        places = grouped(((file, image), place) for place, (file, image) in files if file is not None)

        def one(pair: tuple[Path, Path]) -> None:
            file, image = pair
            values = pixels_of(file, as_label=True)[:, 0]
            if values.shape != self.sizes[image]:
                found, expected = (" x ".join(map(str, each)) for each in (values.shape, self.sizes[image]))
                raise DataError(
                    f"task {task!r}: {file} is {found}, expected {expected} (slices, height, width) as {image}"
                )
            own = nearest_pixels(values[self.level[rows[places[pair]]]], size, size)
            out[places[pair]] = _coded(own, label, codes, f"task {task!r}: {file}")

        in_threads(one, places)
        if label.kind == "depth" and len(known := out[out != IGNORE]) and (middle := np.median(known)) >= FAR:
            found = f"depths of {middle:g} found in the middle, expected metres below {FAR:g}"
            raise DataError(f"task {task!r}: {found}; set data.tasks.{task}.factor, such as 0.001 for millimetres")
        return torch.from_numpy(out)


def _coded(values: Array, label: Label, codes: Sequence[float], where: str) -> Array:
    """Return the values of pixels as labels: a class by its number, or metres; IGNORE of codes that mean missing."""
    absent = np.isin(values, codes) | (values != values)
    if label.kind == "depth":
        metres = values.astype(np.float32) * np.float32(label.factor)
        return np.where(absent | ~np.isfinite(metres) | (metres <= 0), IGNORE, metres)
    classes = np.array([number_of(text) for text in label.classes], np.float64)
    order = np.argsort(classes)
    place = order[np.searchsorted(classes[order], values).clip(max=len(order) - 1)]
    right = classes[place] == values
    if len(strange := values[~right & ~absent & (values != IGNORE)]):
        advice = "add it to the task's classes, or to data.missing if such pixels have no label"
        raise DataError(f"{where}: a pixel of {strange[0]:g} found, expected {', '.join(label.classes)}; {advice}")
    return np.where(right & ~absent, place, IGNORE).astype(np.uint8)


def found_in(column: Column, base: Path, is_map: bool = False) -> list[Path | None]:
    """Return the file of each row, None where there is none. Raises DataError for a name that leads out of `base`.

    A name may lack the ending, and zeros before a number, which tables lose. With `is_map` it is an image's, whose map
    may have another ending, and more after "_", "-" or "."; a folder of all images is not part of the map's name.
    """
    names: list[str] = []
    for cell, missing in zip(column.series, column.series.isna(), strict=True):
        text = cell if isinstance(cell, str) else tables.text_of(cell)
        name = "" if missing or tables.text_of(cell) in column.codes else text.strip().replace("\\", "/")
        if name.startswith("/") or name[1:2] == ":" or ".." in name.split("/"):
            column.fail(f"{text!r} found, expected the name of a file below {base}")
        names.append(name)
    heads = {name.partition("/")[0] if "/" in name else "" for name in names if name}
    if is_map and len(heads) == 1 and (head := heads.pop()) and not (base / head).is_dir():
        names = [name.partition("/")[2] for name in names]
    wanted = [base / name if name else None for name in names]
    found = [file if file and is_image(file) and os.path.isfile(file) else None for file in wanted]
    absent = [file for file, known in zip(wanted, found, strict=True) if file and not known]
    stems = grouped((file.parent, stem_of(file.name)) for file in absent if is_map or not ending(file.name))
    beside = {folder: by_stem(folder, {*own}, is_map) for folder, own in stems.items()}
    if column.is_stored_as_numbers:
        for folder, files in beside.items():
            beside[folder] = _numbered(folder, files) | files
    pairs = zip(wanted, found, strict=True)
    return [known or (beside.get(file.parent, {}).get(stem_of(file.name)) if file else None) for file, known in pairs]


def _numbered(folder: Path, files: Mapping[str, Path]) -> dict[str, Path]:
    """Return the files whose names are numbers by these numbers. Raises DataError where two have one."""
    numbers: dict[str, Path] = {}
    for stem, file in files.items():
        number = str(int(stem)) if stem.isascii() and stem.isdecimal() else ""
        if number and (other := numbers.setdefault(number, file)) is not file and number not in files:
            raise DataError(f"{folder}: {other.name} and {file.name} found, expected one file for {number}")
    return numbers


def numbers_in(folder: Path) -> list[float]:
    """Return the numbers among the names of a folder's images: a column of numbers can name no others."""
    images = (each for each in (os.listdir(folder) if os.path.isdir(folder) else ()) if is_image(folder / each))
    return [number for each in images if (number := number_of(stem_of(each))) is not None]


def by_stem(folder: Path, names: Collection[str] = (), is_map: bool = False) -> dict[str, Path]:
    """Return the images of a folder by their names without ending; with `is_map` also those with more after one of
    `names` and "_", "-" or "." by the longest such name. Raises DataError where two files have one name of `names` (of
    all, if there are none), and where not all of the folder have the same after these names."""
    listed = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    files: dict[str, Path] = {}

    def put(name: str, file: Path) -> None:
        if (other := files.setdefault(name, file)) is not file and (name in names or not names):
            raise DataError(f"{folder}: {other.name} and {file.name} found, expected one file for {name!r}")

    for each in listed:
        if not each.startswith(".") and is_image(folder / each):
            put(stem_of(each), folder / each)
    more: dict[str, Path] = {}
    if is_map and (same := next((name for name in names if name in files), "")):
        more[""] = files[same]
    for stem, file in [*files.items()] if is_map else ():
        cuts = [stem[:place] for place, mark in enumerate(stem) if mark in "_-."]
        if stem in names or not (name := next((cut for cut in reversed(cuts) if cut in names), "")):
            continue
        if name in files and stem_of(files[name].name) == name:
            continue
        put(name, file)
        more.setdefault(stem[len(name) :].casefold(), file)
    if len(more) > 1:
        one, other = [*more.values()][:2]
        found = f"{one.name} and {other.name} found, with different texts after the names of their images"
        raise DataError(f"{folder}: {found}; expected the same text in the names of all")
    return files


def base_of(path: Path, root: str | None) -> Path:
    """Return the folder of the files that a table at `path` names: `root`, or the table's."""
    return Path(root).expanduser() if root is not None else path if path.is_dir() else path.parent


def is_table_at(path: Path) -> bool:
    """Return whether `table_at` finds a table."""
    return tables.is_table(path) or bool(_groups(path))


def maps_in(table: Table) -> list[str]:
    """Return the columns of the maps in a table that folders of images and of their maps are."""
    _, *others = map(str, table.frame)  # the images come first
    return [name for name in others if name not in AROUND]


def table_at(
    path: Path, site: str | None, missing: Sequence[Code] = (), rename: Mapping[str, str] | None = None
) -> Table:
    """Read a table; folders of images and of their maps (see `image_table`) are one, too."""
    import pandas

    if not (groups := _groups(path)):
        if path.is_dir() and not tables.is_table(path):
            expected = f"expected one, or a folder of images ({', '.join(IMAGES)}) and a folder of masks beside it"
            raise DataError(f"{path}: no table found, {expected}, with files of the same names")
        return tables.read(path, site, missing, rename)
    places = [folder.parent for folder, _, _ in groups]
    around = [place.relative_to(path).parts for place in places]
    if len(depths := {len(parts) for parts in around}) > 1:
        some = " and ".join(str(place) for place in places[:2])
        raise DataError(f"{path}: folders of images and masks found in {some}, expected them at one depth")
    named = [[parts[level].casefold() in PARTS for parts in around] for level in range(*depths)]
    for level, are_parts in enumerate(named):
        if any(are_parts) and not all(are_parts):  # test images would be a site, and be trained on
            one, other = around[are_parts.index(True)][level], around[are_parts.index(False)][level]
            expected = "expected the names of parts (train, val, test) only, or of none"
            raise DataError(f"{path}: folders {one!r} and {other!r} found beside each other, {expected}")
    rows: list[dict[str, str | None]] = []
    below = [each for each in _images_below(path) if each.parent not in places]
    notes = [f"{each} is left out: no file beside it has the name of an image there" for each in below]
    holders = {*places, *(each.parent for each in below)}
    around_them = {up for each in holders for up in each.parents if up.is_relative_to(path)}
    others = {each for up in around_them for each in _folders(up)} - holders - around_them
    notes += [f"{each} is left out: it has no folder of images with masks beside it" for each in sorted(others)]
    image = groups[0][0].name
    for (folder, images, maps), parts in zip(groups, around, strict=True):
        where = {SITE: [part for part, are_parts in zip(parts, named, strict=True) if not are_parts[0]]}
        where["split"] = [part for part, are_parts in zip(parts, named, strict=True) if are_parts[0]]
        beside: dict[str, str | None] = {key: "-".join(names) for key, names in where.items() if names}
        if taken := [name for name in maps if name in (image, *AROUND)]:
            raise DataError(f"{folder.parent / taken[0]}: this name is that of another column; rename the folder")
        for inner, files in images.items():
            beside |= {FOLDER: inner} if any(images) else {}
            rows += [
                {image: str(file.relative_to(path))}
                | {
                    name: str(own[stem].relative_to(path)) if (own := tree[inner]).get(stem) else None
                    for name, tree in maps.items()
                }
                | beside
                for stem, file in files.items()
            ]
        for name, tree in maps.items():
            used = {own[stem] for inner, own in tree.items() for stem in images[inner] if stem in own}
            if strays := sorted(file.name for own in tree.values() for file in own.values() if file not in used):
                notes.append(f"{folder.parent / name}: {len(strays)} files are of no image, such as {strays[0]}")
    frame = pandas.DataFrame(rows)
    own_site = SITE if site is None and SITE in frame else site
    return replace(tables.read(frame, own_site, missing, rename), where=str(path), notes=tuple(notes))


def _tree(folder: Path, images: Tree | None = None) -> Tree:
    """Return the images of a folder and of those below it, by their names without ending; of `images`, their maps."""
    if images is not None:
        return {inner: by_stem(folder / inner, own, is_map=True) for inner, own in images.items()}
    below = {"": by_stem(folder)}
    for base, folders, _ in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith((".", "__")))
        below |= {(Path(base) / name).relative_to(folder).as_posix(): by_stem(Path(base) / name) for name in folders}
    return {inner: files for inner, files in below.items() if files}


def _groups(path: Path) -> list[tuple[Path, Tree, dict[str, Tree]]]:
    """Return the folders of images in `path` or up to DEPTH below, with their files and those of the maps beside them,
    by the maps' folders."""
    groups = []
    for folder in _images_below(path):
        images = _tree(folder)
        trees = {other.name: _tree(other, images) for other in _folders(folder.parent)[1:]}
        maps = {
            name: tree
            for name, tree in trees.items()
            if any(own.keys() & images[inner].keys() for inner, own in tree.items())
        }
        groups += [(folder, images, maps)] if maps else []
    return groups


def _images_below(path: Path, depth: int = DEPTH) -> list[Path]:
    """Return the folders of images in `path` or up to `depth` below, one of each folder."""
    folders = [] if tables.is_table(path) or not path.is_dir() else _folders(path)
    if folders and folders[0].name.casefold() in IMAGES and _tree(folders[0]):
        return folders[:1]
    return [each for folder in sorted(folders) if depth for each in _images_below(folder, depth - 1)]


def _folders(path: Path) -> list[Path]:
    """Return the folders in a folder, that of images first."""
    folders = [each for each in path.iterdir() if each.is_dir() and not each.name.startswith((".", "__"))]
    return sorted(folders, key=lambda each: (each.name.casefold() not in IMAGES, each.name))
