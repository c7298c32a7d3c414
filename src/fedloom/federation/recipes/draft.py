"""A first recipe for a folder of images, an .npz archive or a table: what `fedloom init` asks and writes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fedloom.core.errors import DataError, RecipeError, choices, first_of
from fedloom.data.arrays import REAL
from fedloom.data.class_folders import Content, alike, content, left_out
from fedloom.data.folders import copied_files
from fedloom.data.inputs import ENDINGS, LAYOUTS, SUFFIXES, doubtful_axes, kinds_of, stem_of
from fedloom.data.prepare import PARTS, SPLITS, Array, Store
from fedloom.data.tables.columns import Draft
from fedloom.data.tables.files import IMAGES
from fedloom.data.tables.images import ImageDraft
from fedloom.data.tables.read import ENDS
from fedloom.models.signal import Kind, Signal

_SIZE = 64  # images of a folder are resized to so many pixels a side, which the small CNN is for
_TEST = 0.2
_IMAGES: dict[str, Any] = {"size": _SIZE, "test_fraction": _TEST}
UNREAD = {".gif", ".heic", ".heif", ".avif", ".svg", ".jp2", ".jxl"}
"""Endings of images that no command reads."""
MODELS: dict[Kind, str] = {"image": "small-cnn", "series": "conv1d", "features": "mlp", "tokens": "transformer"}
MAPPING = "tiny-pyramid"
"""The model of images with a label for each pixel."""
RATE = 0.003
"""Adam's rate for tables. On `heart` and `ist`, after 20 rounds, the validation AUC of .001, .003 and .01 differs by
noise only; `fedloom tune` chooses a rate for a table."""
BATCHES, STEPS = (32, 64, 128, 256, 512, 1024), 50
"""Batch sizes for tables: the first with which an epoch of a site of mean size has at most STEPS steps. With 32 always,
a table of 35,000 rows per site would train for hours where minutes do."""
_MASKS = ("mask", "label", "seg", "annot", "manual", "truth", "depth")
"""Parts of names of folders of masks."""
_MASK = re.compile(rf"[_. -]({'|'.join(_MASKS)})\w*$", re.IGNORECASE)
_MOST = 100  # a column of whole numbers with more values than these is no class label


@dataclass(frozen=True)
class Found:
    """The content of the data."""

    data: dict[str, Any]
    """The recipe's section, without labels and domains."""
    columns: tuple[str, ...]
    """Columns that may be a label or a client; none for a folder, whose classes are folders."""
    groups: bool = False
    """True if the data has domains without a column for them."""
    signal: Kind = "image"
    """The kind of input."""
    suffix: str = ""
    """The end of a column's key, after its name: '_{split}', or nothing."""
    others: Mapping[str, str] = field(default_factory=dict)
    """Array -> why it can neither be a label nor name clients."""
    values: Mapping[str, int] = field(default_factory=dict)
    """Array of integers or texts, one for each example -> the number of different ones."""
    count: int = 0
    """The number of examples in the arrays, of the train part where there are two."""
    lines: tuple[str, ...] = ()
    """Lines that `init` prints: the sites, classes and split of a folder and what is left out; the inputs of arrays."""


def look(path: Path) -> Found:
    """Return what the data has, by the kind of file or the layout of the folder. Raises DataError for other kinds."""
    if path.is_dir() and not any(path.glob("*.npy")):
        return _folder(path)
    if path.suffix != ".npz" and not path.is_dir():
        if path.suffix.lower() in (*SUFFIXES, *UNREAD):
            raise DataError(f"{path}: one image found, expected a folder of images ({', '.join(SUFFIXES)})")
        kinds = "a folder of images, a .npz file or a table"
        raise DataError(f"{path}: expected {kinds} ({ENDS}); save a spreadsheet as CSV in UTF-8 or as .xlsx")
    arrays, others = {}, {}
    store = Store(path.expanduser())
    for key in store.keys:
        try:
            arrays[key] = store.read(key)
        except DataError as error:  # such as a sampling rate
            others[key] = str(error)
    return _arrays(path, arrays, others)


def draft(content: Found, name: str, labels: Sequence[str], clients: str, method: str, rounds: int) -> dict[str, Any]:
    """Return the recipe, to be checked by `load`. Raises RecipeError for a column that is not there.

    `clients` is a number, of each group where the data has groups, or the column that says whose an example is.
    """
    data = dict(content.data)
    by_number = clients.isdigit()
    for column in (*labels, *([] if by_number else [clients])):
        if column not in content.columns:
            if column in content.others:
                raise RecipeError(f"{column!r} can be neither a label nor name clients: {content.others[column]}")
            more = choices("Found", column, content.columns)
            raise RecipeError(f"no column {column!r} that could be a label or name the client of each row.{more}")
    if content.columns:
        data["labels"] = {label: label + content.suffix for label in labels}
    if not by_number:
        data["domain"] = clients + content.suffix
    grouped = content.groups or not by_number
    partition = {"name": "domains" if grouped else "iid", "clients": int(clients) if by_number else 1}
    partition |= {"named": True} if grouped else {}
    return _recipe(rounds, name=name, data=data, partition=partition, model=MODELS[content.signal], method=method)


def draft_of_table(
    content: Draft | ImageDraft, path: Path, name: str, clients: int | None, method: str, rounds: int
) -> dict[str, Any]:
    """Return the recipe of a table, to be checked by `load`; `clients` share it where no column says whose a row is."""
    partition = {"name": "own"} if clients is None else {"name": "iid", "clients": clients}
    data = {"name": content.name, "path": str(path.resolve()), **content.section}
    frame, site = content.table.frame, content.table.site
    sites = clients or (1 if site is None else frame[site].nunique())
    model = MAPPING if isinstance(content, ImageDraft) and content.has_maps else MODELS[content.signal]
    recipe = _recipe(rounds, RATE, name=name, data=data, partition=partition, model=model, method=method)
    fits = (size for size in BATCHES if len(frame) / sites <= STEPS * size)
    recipe["training"]["batch_size"] = next(fits, BATCHES[-1])
    return recipe


def _recipe(rounds: int, rate: float = 0.001, **sections: Any) -> dict[str, Any]:
    optimizer = {"name": "adam", "lr": rate}
    return {**sections, "training": {"rounds": rounds, "epochs": 1, "batch_size": 32, "optimizer": optimizer}}


def _folder(path: Path) -> Found:
    """Return the layout CLASS/IMAGE, DOMAIN/CLASS/IMAGE or {train,test}/CLASS/IMAGE."""
    root, name = path.resolve().parent, path.resolve().name
    top = content(path)
    inside = {folder: content(path / folder) for folder in top.folders}
    below = {folder: {kind: content(path / folder / kind) for kind in has.folders} for folder, has in inside.items()}
    deep = {folder for folder, kinds in below.items() if any(kind.images for kind in kinds.values())}
    flat = {folder for folder, has in inside.items() if has.images}
    if flat and deep <= flat:  # folders inside class folders are left out
        _refuse_parts(path, inside, whole=True)
        _refuse_masks(path, inside)
        section = {"name": "domain-folders", "root": str(root), "domains": [name], **_IMAGES}
        return Found(section, (), lines=_lines({name: top}, {name: inside}))
    _refuse_parts(path, [f"{folder}/{kind}" for folder, kinds in below.items() for kind in kinds], whole=True)
    _refuse_masks(path, inside, are_classes=False)
    for folder, kinds in below.items():
        _refuse_masks(path / folder, kinds)
    divided = {*inside} == {*SPLITS}
    if not divided:
        _refuse_parts(path, inside)
    if not deep or deep != {*inside}:
        expected = "expected images in CLASS, DOMAIN/CLASS or train/CLASS and test/CLASS below it, or images and masks"
        expected += " in two folders beside each other, at most two levels below it"
        where = next((folder for folder in inside if folder not in deep), name)
        holders = (top, *inside.values(), *(kind for kinds in below.values() for kind in kinds.values()))
        others = {Path(file).suffix.lower() for has in holders for file in has.files} & UNREAD
        advice = f"; {', '.join(sorted(others))} files are not read: save them as PNG" if others else ""
        raise DataError(f"{path}: {expected}, found no class folder with images in {where!r}{advice}")
    if divided:
        section = {"name": "class-folders", "root": str(root), "sets": [name], "size": _SIZE}
        train, test = (
            [path / part / kind / image for kind, has in below[part].items() for image in has.images] for part in SPLITS
        )
        copied = (f"note: {doubt}" for doubt in copied_files(train, test))
        return Found(section, (), lines=(*_lines(inside, below, "split"), *copied))
    section = {"name": "domain-folders", "root": str(path.resolve()), **_IMAGES}
    return Found(section, (), groups=True, lines=_lines(inside, below, "sites"))


def _refuse_parts(path: Path, folders: Iterable[str], whole: bool = False) -> None:
    """Raise DataError where any folder is named like a part of a split, or with `whole`, where all are: their images
    would be taken for those of sites or classes, and test images would be trained on."""
    named = [Path(folder).name.lower() in PARTS for folder in folders]
    if named and (all(named) if whole else any(named)):
        found = f"the folders {first_of([*folders])} found, of which some are parts of a split"
        wanted = "expected the folders train/CLASS and test/CLASS, in lower case, and no others beside train and test"
        advice = "Move validation images into train: each client sets some apart (partition.val_fraction)"
        raise DataError(f"{path}: {found}; {wanted}. {advice}")


def _refuse_masks(path: Path, kinds: Mapping[str, Content], are_classes: bool = True) -> None:
    """Raise DataError where folders are rather folders of images and of masks, of which none belong together."""
    images = [name for name in kinds if name.casefold() in IMAGES]
    masks = [name for name in kinds if any(word in name.casefold() for word in _MASKS)]
    if images and (masks or (are_classes and len(kinds) == 1)):
        wanted = "expected classes, or masks in a folder beside the images, with the names of these"
        ends = f"the ending {', '.join(ENDINGS)}"
        raise DataError(f"{path}: folders {first_of([*images, *masks])} found; {wanted}, and {ends}")


def _lines(
    around: Mapping[str, Content], below: Mapping[str, Mapping[str, Content]], upper: str = ""
) -> tuple[str, ...]:
    """Return what the folders in `below` (folder -> class -> content) are taken for, with their numbers of images, and
    what is left out. `upper` is what the upper folders are: "sites", "split", or "" for a single one."""
    classes: Counter[str] = Counter()
    for kinds in below.values():
        classes.update({kind: len(has.images) for kind, has in kinds.items()})
    totals = {folder: sum(len(has.images) for has in kinds.values()) for folder, kinds in below.items()}
    lines = [_sizes(f"{upper} (upper folders)", totals)] if upper else []
    lines.append(_sizes("classes (lower folders)" if upper else "classes", {k: classes[k] for k in sorted(+classes)}))
    if upper != "split":
        lines.append(f"split: {_TEST:.0%} of the images of each class are test images (data.test_fraction)")
    lacking = {
        folder: [kind for kind in sorted(+classes) if not kinds.get(kind, Content()).images]
        for folder, kinds in below.items()
    }
    if some := [f"{folder} ({first_of(lacks)})" for folder, lacks in lacking.items() if lacks]:
        lines.append(f"classes without an image: {first_of(some)}")
    every = {f"{folder}/{kind}": has for folder, kinds in below.items() for kind, has in kinds.items()}
    return (
        *lines,
        *(f"note: {note}" for note in (*alike(sorted(+classes)), *left_out(around, every), *_masks_among(every))),
    )


def _masks_among(classes: Mapping[str, Content]) -> Iterator[str]:
    """Yield a sentence for images of a class that rather are masks of others, as their names say."""
    found = []
    for folder, has in classes.items():
        stems = {stem_of(name) for name in has.images}
        longer = {stem for stem in stems if _MASK.search(stem) and _MASK.sub("", stem) in stems}
        found += [f"{folder}/{name}" for name in has.images if stem_of(name) in longer]
    if found:
        advice = "training would take them for images: move masks into a folder of their own, beside one of the images"
        yield f"{len(found)} images are called like masks of others, such as {found[0]}; {advice}"


def _sizes(what: str, images: Mapping[str, int]) -> str:
    return f"{what} and their images: {first_of([f'{name} ({count})' for name, count in images.items()])}"


def _arrays(path: Path, arrays: Mapping[str, Array], others: dict[str, str]) -> Found:
    """Return the inputs, and the arrays that may be labels or name clients. `others` are arrays that cannot be read."""
    split = [key.removesuffix("_train") for key in arrays if key.endswith("_train")]
    split = [key for key in split if f"{key}_test" in arrays]
    parts = {key: arrays[f"{key}_train"] for key in split} or arrays
    # Whole numbers may be tokens, or a series as a sensor gave it, but beside real ones they are rather labels.
    inputs = sorted((key for key, a in parts.items() if a.ndim > 1 and kinds_of(a)), key=lambda key: _whole(parts[key]))
    if not inputs:
        shapes = [f"{key} ({a.dtype} of shape {a.shape})" for key, a in arrays.items()]
        found = "; ".join([first_of(shapes) or "none", *(f"{key}: {reason}" for key, reason in others.items())])
        wanted = "expected an array of numbers that are inputs (N x F, N x channels x steps, images)"
        raise DataError(f"{path}: {wanted}, found {found}")
    chosen = "x" if "x" in inputs else inputs[0]
    count, kinds = len(parts[chosen]), kinds_of(parts[chosen])
    beside = {key: a for key, a in parts.items() if key != chosen}
    others = others | {key: reason for key, a in beside.items() if (reason := _unfit(a, count))}
    if split:
        both = {f"{key}_{part}" for key in split for part in SPLITS}
        others |= {key: f"there are no {key}_train and {key}_test" for key in arrays if key not in both}
    could = tuple(key for key in beside if key not in others)
    if not could:
        listed = "; ".join(f"{key}: {reason}" for key, reason in others.items()) or "no other array"
        raise DataError(f"{path}: no array beside the inputs {chosen!r} can be a label; found {listed}")
    suffix = "_{split}" if split else ""
    section: dict[str, Any] = {"name": "arrays", "path": str(path.resolve()), "images": chosen + suffix}
    section |= {} if split else {"test_fraction": _TEST}
    section |= {"signal": kinds[0]} if len(kinds) > 1 else {}  # else `arrays` would ask
    shape = parts[chosen].shape[1:]
    lines = [f"inputs: {chosen}, {count:,} x {' x '.join(map(str, shape))}, taken for {kinds[0]} ({LAYOUTS[kinds[0]]})"]
    lines += [f"note: {doubt}" for doubt in doubtful_axes(shape, Signal(kind=kinds[0]), "data.axes={}")]
    values = {key: _values(a) for key, a in beside.items() if a.shape == (count,) and a.dtype.kind in "biuUS"}
    more: dict[str, Any] = {"signal": kinds[0], "suffix": suffix, "others": others, "values": values, "count": count}
    return Found(section, could, lines=tuple(lines), **more)


def _whole(array: Array) -> bool:
    return array.dtype.kind in "iu" and array.dtype != np.uint8


def _values(column: Array) -> int:
    """Return the number of different values; -1 and an empty text are none."""
    values = np.unique(column)
    return len(values) - int(not values[0] if values.dtype.kind in "US" else values[0] == -1)


def _unfit(column: Array, count: int) -> str:
    """Return why an array can neither be a label of `count` examples nor name their clients; else an empty text."""
    if column.shape != (count,):
        return f"shape {column.shape} found, expected one value for each of {count:,} examples"
    if column.dtype.kind == "f":
        return REAL
    if column.dtype.kind not in "biuUS":
        return f"{column.dtype} found, expected integers or texts"
    values = np.unique(column)
    if len(values) > min(_MOST, count // 2):
        return f"{len(values):,} different values in {count:,} examples, too many for classes or clients"
    if column.dtype.kind in "iu" and values[0] < -1:
        return f"the value {values[0]} found, expected integers from 0, or -1 for no label"
    return ""


def choices_of(content: Found, data: Mapping[str, Any], clients: str) -> list[str]:
    """Return lines about what the recipe's section `data` of arrays uses, and what it leaves out."""
    labels = [key.removesuffix(content.suffix) for key in data["labels"].values()]
    used = {*labels, clients}
    many = [f"{key} ({content.values[key]} values)" for key in labels]
    lines = [f"labels: {', '.join(many)}"]
    named, sites = clients in content.values, content.values.get(clients, 1)
    lines.append(f"clients: {f'one for each of the {sites} values of {clients}' if named else f'{clients}, at random'}")
    share = f"a random {_TEST:.0%} of the examples of each class{' and client' if named else ''} (data.test_fraction)"
    lines.append(f"test examples: {'keys that end in _test' if content.suffix else share}")
    unused = [key for key in (*content.columns, *content.others) if key not in used]
    lines += [f"not used: {first_of(unused)}"] if unused else []
    most, parts = max(2, sites, *(content.values[key] for key in labels)), "validation" if content.suffix else "test"
    for key, values in content.values.items():
        if key not in used and most < values <= content.count // 2:
            found = f"{key}: {values:,} values in {content.count:,} examples"
            apart = f"examples of one {key} may land in training and {parts}"
            lines.append(f"note: {found}; {apart}; to keep them together, set data.group={key}{content.suffix}")
    return lines
