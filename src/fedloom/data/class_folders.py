"""Images with classes in the files and folders in which the field keeps them."""

from __future__ import annotations

import bz2
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from pydantic import Field

from fedloom.core.errors import DataError, RecipeError, choices, first_of, parsing
from fedloom.core.lazy import need
from fedloom.core.settings.section import Count, Positive
from fedloom.data import prepare
from fedloom.data.combine import TASK, Columns, Pad, Pieces, Side, combine, of_classes, pictures
from fedloom.data.folders import matlab, split_list
from fedloom.data.inputs import SUFFIXES, Fit, as_images, marks, read
from fedloom.data.prepare import DATASETS, SPLITS, Array, Name, Part, TestFraction

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from fedloom.data.dataset import Batch, Dataset, Examples

Colour = tuple[float, float, float]
DigitSet = Literal["mnist", "usps", "svhn", "syn"]
BINARY, PICKLED = "cifar-10-batches-bin", "cifar-10-batches-py"
RECORD = 1 + 3 * 32 * 32
NAMES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
GONE = {
    "cars": ". The address of Stanford Cars no longer answers: get the images elsewhere, or leave cars out of data.sets"
}
"""Sets that cannot be had where they were published."""
URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
LITTER = {"thumbs.db", "desktop.ini"}
"""Files that Windows leaves in folders of images."""


@dataclass(frozen=True)
class Content:
    """The names in a folder, sorted: of images, of other files and of folders, without hidden ones."""

    images: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()


def content(base: Path) -> Content:
    """Return what a folder has. Names that begin with '.', and folders such as __MACOSX, are hidden."""
    with os.scandir(base) as entries:
        is_folder = {entry.name: entry.is_dir() for entry in entries}
    names = [name for name in sorted(is_folder) if not name.startswith(".") and name.lower() not in LITTER]
    files = [name for name in names if not is_folder[name]]
    images = tuple(name for name in files if name.lower().endswith(SUFFIXES))
    others = tuple(name for name in files if not name.lower().endswith(SUFFIXES))
    return Content(images, others, tuple(name for name in names if is_folder[name] and not name.startswith("__")))


def left_out(around: Mapping[str, Content], classes: Mapping[str, Content]) -> tuple[str, ...]:
    """Return a sentence for each kind of entry that is no image of a class. `around` (folder -> content) are the
    folders that hold class folders, and `classes` the class folders."""
    files = {where: found for where, found in classes.items() if found.files}
    places = [f"{len(c.files)} of {len(c.files) + len(c.images)} in {where}" for where, c in files.items()]
    endings = sorted({os.path.splitext(name)[1].lower() or "no ending" for c in files.values() for name in c.files})
    folders = [f"{where}/{name}" for where, found in classes.items() for name in found.folders]
    outside = [f"{where}/{name}" for where, found in around.items() for name in found.images]
    said = {f"files that are not images ({first_of(endings)})": places}
    said |= {"folders inside class folders": folders, "images outside class folders": outside}
    return tuple(f"{what} are left out: {first_of(names)}" for what, names in said.items() if names)


def alike(classes: Sequence[str]) -> Iterator[str]:
    """Yield a sentence about class folders whose names differ in case or blanks only, where there are some."""
    if both := [f"{name!r} and {other!r}" for name, other in prepare.alike(classes)]:
        found = f"names of classes differ in case or blanks only: {first_of(both)}"
        yield f"{found}; if each is one class, write them alike"


@DATASETS.register("class-folders", source="MaTU, section 4; Ilharco et al. (2023); EMR-Merging (Huang et al., 2024)")
def class_folders(
    seed: int,
    *,
    root: str,
    sets: Annotated[list[Name], Field(min_length=1)],
    size: Annotated[int, Field(ge=8)] = 224,
    fit: Fit = "stretch",
    mean: Colour = (0.5, 0.5, 0.5),
    std: tuple[Positive, Positive, Positive] = (0.5, 0.5, 0.5),
    limit: Count | None = None,
) -> Dataset:
    """Image sets in ROOT/NAME/{train,test}/CLASS/IMAGE, one classification task per set, in the form of `many`.

    Nothing is downloaded. Tasks and domains are called like the sets; an example has a label of its own set's task and
    -1 for all others. Classes are numbered in the order of the names of the train part's folders.

    Images are read when they are wanted (needs pillow), converted to colour and resized bilinearly to `size` x `size`:
    `stretch` changes the proportions, as EMR-Merging does; `crop` resizes the shorter side and keeps the centre. They
    are not augmented. `mean` and `std`, of 0..1, normalise; the defaults are those of timm's ViT on ImageNet-21k.
    `limit` keeps that many random examples of each part of each set.

    DataError for what is absent or cannot be read.
    """
    from fedloom.data.dataset import ItemExamples, label_bytes

    base = Path(root).expanduser()
    prepare.no_repeats("class-folders", "set", sets)
    pieces: dict[str, dict[str, tuple[Columns, list[str]]]] = {name: {} for name in sets}
    called: dict[str, tuple[str, ...]] = {}
    around: dict[str, Content] = {}
    inside: dict[str, Content] = {}
    drawn_from = 0
    for name, both in pieces.items():
        where = f"class-folders, set {name!r}"
        for split in SPLITS:
            folder = base / name / split
            if not folder.is_dir():
                form = f"ROOT/NAME/{{train,test}}/CLASS/IMAGE (docs/bring-your-data.md){GONE.get(name, '')}"
                raise DataError(f"{where}: the folder {folder.absolute()} does not exist, expected {form}")
            around[f"{name}/{split}"] = there = _holding(folder, "class", where)
            kinds = there.folders
            for kind in kinds:
                if kind not in called.setdefault(name, kinds):
                    raise DataError(f"{where}: class {kind!r} is in the test part only")
            own = {kind: content(folder / kind) for kind in kinds}
            inside |= {f"{name}/{split}/{kind}": found for kind, found in own.items()}
            images, numbers = _labelled(folder, own)
            kept = prepare.subset(len(images), limit, seed, split)
            drawn_from += len(images) * (split == "train")
            column = np.array([called[name].index(kind) for kind in kinds])[numbers[kept]]
            both[split] = {name: column}, [images[i].relative_to(base).as_posix() for i in kept]

    def examples(split: str, inputs: list[list[str]], labels: dict[str, Tensor], domain: Tensor) -> Examples:
        files = [file for each in inputs for file in each]
        paths = tuple(os.path.join(base, file) for file in files)  # texts take less memory than paths
        mark = f"{zlib.crc32(chr(10).join(files).encode()):08x}".encode() + label_bytes(labels)
        reader, shape = partial(_normalised, paths, size, fit, (mean, std)), (3, size, size)
        return ItemExamples(reader, len(paths), shape, labels, domain, mean, std, mark=mark, files=paths)

    counts = {name: len(kinds) for name, kinds in called.items()}
    built = combine("class-folders", pieces, counts, examples)
    return replace(built, classes=called, doubts=left_out(around, inside), drawn_from=drawn_from)


def _normalised(
    files: Sequence[str], size: int, fit: Fit, normal: Sequence[Colour], index: Tensor, device: torch.device, *_: Any
) -> Batch:
    """Read images at `index`, on `device`, normalised by mean and standard deviation."""
    import torch

    x = read([files[position] for position in index.tolist()], size, fit).to(device)
    mean, std = (torch.tensor(values, device=device).view(1, 3, 1, 1) for values in normal)
    return (x.float().div_(255) - mean).div_(std), {}


@DATASETS.register("domain-folders", source="PACS (Li et al., 2017), Office-Caltech (Gong et al., 2012); F2DC release")
def domain_folders(
    seed: int,
    *,
    root: str,
    domains: Annotated[list[str], Field(min_length=1)] | None = None,
    size: Side = 128,
    test_fraction: TestFraction | None = None,
    lists: dict[Literal["train", "test"], str] | None = None,
    pad: Pad = 4,
    flip: bool = True,
) -> Dataset:
    """Images of several domains in folders ROOT/DOMAIN/CLASS/IMAGE, as one task `label`. Needs pillow.

    `domains` names the folders in the order wanted (by default all, sorted). The classes are those of all domains,
    numbered in the order of their names; a domain may lack some. Of one domain alone, such as a node's, an empty folder
    is a class, too. Folders whose names begin with "." or "__" are left out. Images are read once, resized to `size` x
    `size` and kept in memory as uint8.

    By default the last two of every ten images of a domain, sorted by class and name, are the test part, as in F2DC's
    release. `test_fraction` draws that share of each class and domain instead, from the recipe's seed. `lists` names
    files instead, for example {train: "splits/{domain}_train_kfold.txt", test: "splits/{domain}_crossval_kfold.txt"},
    one image a line: its path relative to `root`, up to the first blank.

    In training, images are padded by `pad` black pixels, cropped at a random place and, with `flip`, mirrored with
    probability 1/2; they are always normalised by ImageNet's mean and standard deviation. Raises DataError for what is
    absent or unreadable.
    """
    if lists is not None and (test_fraction is not None or set(lists) != set(SPLITS)):
        raise RecipeError("domain-folders: expected both train and test lists, and no test_fraction")
    base = Path(root).expanduser()
    known = _holding(base, "domain").folders
    names = known if domains is None else domains
    for name in names:
        if name not in known:
            raise DataError(f"domain-folders: no folder {name!r} in {base}.{choices('Found', name, known)}")
    prepare.no_repeats("domain-folders", "domain", names)
    around = {name: _holding(base / name, "class") for name in names}
    inside = {name: {kind: content(base / name / kind) for kind in around[name].folders} for name in names}
    for name, own in inside.items():
        if not any(found.images for found in own.values()):
            wanted = f"expected class folders with files that end in {', '.join(SUFFIXES)}, or another list of domains"
            where = f"domain-folders: domain {name!r} has no train example"
            raise DataError(f"{where}: no image found in the folders of {base / name}, {wanted}")
    # An empty folder is no class, but at a node, which has one domain: so its site names a class that only others have.
    blank = Content() if len(names) == 1 else None
    classes = sorted({kind for own in inside.values() for kind, found in own.items() if found.images or found == blank})
    parts: Pieces = {split: [] for split in SPLITS}
    seen: dict[str, list[tuple[bytes, str]]] = {split: [] for split in SPLITS}
    for number, name in enumerate(names):
        files, labels = _labelled(base / name, {kind: inside[name].get(kind, Content()) for kind in classes})
        if lists is None:
            last_two = np.arange(len(files)) % 10 > 7
            test = last_two if test_fraction is None else prepare.stratified(labels, test_fraction, seed)
            chosen = {"train": ~test, "test": test}
        else:
            chosen = _listed(base, name, files, lists)
        images = read(files, size).contiguous()
        for split, mask in chosen.items():
            index = np.flatnonzero(mask)
            parts[split].append((images[index], labels[index], np.full(len(index), number)))
            # Pixels and not files are compared: a copy may have been saved anew, and resizing may make images equal.
            seen[split] += marks(images[index], (files[i].relative_to(base).as_posix() for i in index.tolist()))
    built = pictures("domain-folders", parts, tuple(names), len(classes), pad, flip)
    doubts = left_out(around, {f"{name}/{kind}": c for name, own in inside.items() for kind, c in own.items()})
    doubts += (*alike(classes), *prepare.copies(seen["train"], seen["test"], len(seen["test"])))
    return replace(built, classes={TASK: tuple(classes)}, redrawn=test_fraction is not None, doubts=doubts)


@DATASETS.register("digit-files", source="MNIST, USPS, SVHN, SYN: the domains Digits of FedHEAL and F2DC")
def digit_files(
    seed: int,
    *,
    root: str,
    domains: Annotated[list[DigitSet], Field(min_length=1)] = ["mnist", "usps", "svhn", "syn"],  # noqa: B006
    size: Side = 32,
    pad: Pad = 4,
    flip: bool = True,
) -> Dataset:
    """Digits of several origins as domains of one task `label` (10 classes), each with its own train and test part.

    ROOT holds, as torchvision leaves them, MNIST/raw/{train,t10k}-{images-idx3,labels-idx1}-ubyte (or .gz), usps.bz2
    and usps.t.bz2, {train,test}_32x32.mat (SVHN) and syn/{train,val}/CLASS/IMAGE (needs pillow). Each may
    also lie in a folder called like its domain. Grey images are repeated; all are resized to `size` x `size`, uint8.

    In training, images are padded by `pad` black pixels, cropped at a random place and, with `flip`, mirrored with
    probability 1/2, as in F2DC's release; they are always normalised by ImageNet's mean and standard deviation. Raises
    DataError for what is absent or damaged.
    """
    prepare.no_repeats("digit-files", "domain", domains)
    base = Path(root).expanduser()
    parts: Pieces = {split: [] for split in SPLITS}
    for number, name in enumerate(domains):
        for split in SPLITS:
            where = f"digit-files, {name}, {split}, below {base.absolute()}"
            images, labels = READERS[name](base, split == "train", size)
            if len(images) != len(labels) or not len(labels):
                found = f"{len(images)} images and {len(labels)} labels"
                raise DataError(f"{where}: expected a label per image, found {found}")
            if labels.min() < 0 or labels.max() > 9:
                raise DataError(f"{where}: expected labels from 0 to 9, found others")
            colour = as_images(np.array(images, order="C"), size, 3, where)
            parts[split].append((colour, labels, np.full(len(labels), number)))
    return pictures("digit-files", parts, tuple(domains), 10, pad, flip)


def _holding(base: Path, what: str, where: str = "domain-folders") -> Content:
    """Return the content of a folder of folders; DataError where there are none."""
    found = content(base) if base.is_dir() else Content()
    if not found.folders:
        raise DataError(f"{where}: expected a folder for each {what} in {base.absolute()}, found none")
    return found


def _labelled(base: Path, classes: Mapping[str, Content]) -> tuple[list[Path], Array]:
    """Return the images in class folders, in the order of the classes and sorted by name, and the classes' numbers."""
    files = [base / kind / name for kind, found in classes.items() for name in found.images]
    return files, np.repeat(np.arange(len(classes)), [len(found.images) for found in classes.values()])


def _listed(
    base: Path, domain: str, files: Sequence[Path], lists: dict[Literal["train", "test"], str]
) -> dict[str, Array]:
    """Return which files (N, bool) a domain's lists name, per split."""
    position = {file.relative_to(base).as_posix(): i for i, file in enumerate(files)}
    chosen: dict[str, Array] = {}
    for split, pattern in lists.items():
        listed = base / pattern.replace("{domain}", domain)
        mask = np.zeros(len(files), bool)
        for line in split_list(listed):
            name = line.split()[0]
            if name not in position:
                raise DataError(f"{listed}: image {name!r} is not in {base / domain}")
            mask[position[name]] = True
        chosen[split] = mask
    if len(both := np.flatnonzero(chosen["train"] & chosen["test"])):
        raise DataError(f"domain-folders: {files[both[0]]} is in both lists of domain {domain!r}")
    return chosen


def _file(base: Path, domain: str, *names: str) -> Path:
    """Return the first of the files that exists, in `base` or in a folder called like the domain."""
    for folder in (base, base / domain, base / domain.upper()):
        for name in names:
            if (folder / name).is_file():
                return folder / name
    raise DataError(f"digit-files, {domain}: {names[0]} is not in {base.absolute()}")


def _idx(file: Path, ndim: int) -> Array:
    """Read an array of bytes in MNIST's idx format, perhaps compressed."""
    prepare.need_room(file, 1)
    with parsing(f"{file}: cannot be read"), prepare.opener(file)(file, "rb") as opened:
        raw = opened.read()
    head = 4 + 4 * ndim
    begins = len(raw) >= head and raw[:4] == bytes([0, 0, 8, ndim])
    shape = tuple(np.frombuffer(raw[4:head], ">u4").tolist()) if begins else ()
    if len(shape) != ndim or len(raw) - head != int(np.prod(shape)):
        expected = f"an idx file of bytes with {ndim} dimensions"
        raise DataError(f"{file}: expected {expected}, found a truncated file or another format")
    return np.frombuffer(raw, np.uint8, offset=head).reshape(shape)


def _mnist(base: Path, train: bool, size: int) -> tuple[Array, Array]:
    def array(kind: str, ndim: int) -> Array:
        name = f"{'train' if train else 't10k'}-{kind}-ubyte"
        places = [f"{folder}{name}{suffix}" for folder in ("MNIST/raw/", "raw/", "") for suffix in ("", ".gz")]
        return _idx(_file(base, "mnist", *places), ndim)

    return array("images-idx3", 3), array("labels-idx1", 1).astype(np.int64)


def _usps(base: Path, train: bool, size: int) -> tuple[Array, Array]:
    """Read lines 'LABEL 1:VALUE ... 256:VALUE', labels 1..10 and values -1..1."""
    file = _file(base, "usps", "usps.bz2" if train else "usps.t.bz2")
    prepare.need_room(file, 12)  # a text and a number for each word
    with parsing(f"{file}: cannot be read as lines of a label and 256 values"):
        words = bz2.decompress(file.read_bytes()).decode("ascii").replace(":", " ").split()
        table = np.array(words, np.float64).reshape(-1, 1 + 2 * 256)
    if not np.isfinite(table).all():
        raise DataError(f"{file}: expected finite values, found NaN or infinity")
    images = np.rint((table[:, 2::2] + 1) * 127.5).astype(np.uint8).reshape(-1, 16, 16)
    return images, table[:, 0].astype(np.int64) - 1


def _svhn(base: Path, train: bool, size: int) -> tuple[Array, Array]:
    """Read X, 32 x 32 x 3 x N, and y; the digit 0 is labelled 10."""
    file = _file(base, "svhn", f"{'train' if train else 'test'}_32x32.mat")
    images: Array = np.asarray(matlab(file, "X"))
    if images.ndim != 4 or images.dtype != np.uint8:
        raise DataError(f"{file}: expected X of bytes, 32 x 32 x 3 x N, found {images.dtype} of shape {images.shape}")
    return images.transpose(3, 0, 1, 2), np.asarray(matlab(file, "y")).reshape(-1).astype(np.int64) % 10


def _syn(base: Path, train: bool, size: int) -> tuple[Array, Array]:
    """Read folders of images by class; they are resized as they are read."""
    folder = base / "syn" / ("train" if train else "val")
    kinds = _holding(folder, "class", "digit-files, syn").folders
    files, labels = _labelled(folder, {kind: content(folder / kind) for kind in kinds})
    return read(files, size).permute(0, 2, 3, 1).numpy(), labels


READERS: dict[DigitSet, Callable[[Path, bool, int], tuple[Array, Array]]]
READERS = {"mnist": _mnist, "usps": _usps, "svhn": _svhn, "syn": _syn}
"""Domain -> function of (root, whether train, size) that returns images and labels 0..9."""


@DATASETS.register("cifar10", source="Krizhevsky (2009)")
def cifar10(seed: int, *, root: str, limit: Count | None = None) -> Dataset:
    """CIFAR-10 (50,000 + 10,000 colour images of 32 x 32, task `label`) from a folder; nothing is downloaded.

    `root` holds `cifar-10-batches-bin` (the binary version) or `cifar-10-batches-py` (the Python version, which needs
    torchvision). `limit` keeps that many random examples of each part. Images are uint8, N x 3 x 32 x 32, normalised
    per channel by the mean and standard deviation of the train part. DataError where files are absent or damaged.
    """
    import torch

    folder = Path(root).expanduser()
    if (folder / BINARY).is_dir():
        batches = [folder / BINARY / f"data_batch_{number}.bin" for number in range(1, 6)]
        parts = [_binary(batches), _binary([folder / BINARY / "test_batch.bin"])]
    elif (folder / PICKLED).is_dir():
        parts = [_pickled(folder, train) for train in (True, False)]
    else:
        get = f"mkdir -p '{folder}' && curl -fL {URL} | tar xz -C '{folder}'"
        raise DataError(f"cifar10: neither {BINARY} nor {PICKLED} is in {folder.absolute()}. To download: {get}")
    whole = [Part(images, {TASK: labels.astype(np.int64)}) for images, labels in parts]
    halves = prepare.limited(whole, limit, seed)
    for half in halves:
        half.inputs = torch.from_numpy(np.ascontiguousarray(half.inputs))
    normal = prepare.channel_statistics(halves[0].inputs)
    return of_classes("cifar10", {TASK: 10}, halves, normal, classes={TASK: NAMES}, drawn_from=len(whole[0].inputs))


def _binary(files: list[Path]) -> tuple[Array, Array]:
    """Read images (N x 3 x 32 x 32) and labels of records: one byte of label, then the planes red, green, blue."""
    read = []
    for file in files:
        if not file.is_file():
            raise DataError(f"cifar10: the file {file} does not exist")
        raw = np.fromfile(file, np.uint8)
        if not len(raw) or len(raw) % RECORD:
            expected = f"expected records of {RECORD} bytes, found {len(raw)} bytes"
            raise DataError(f"cifar10: {file} is truncated or damaged: {expected}")
        read.append(raw.reshape(-1, RECORD))
        if (highest := read[-1][:, 0].max()) > 9:
            raise DataError(f"cifar10: {file}: expected labels in 0..9, found {highest}")
    records = np.concatenate(read)
    return records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0]


def _pickled(root: Path, train: bool) -> tuple[Array, Array]:
    """Read the same from the Python version, which is a set of pickles."""
    # torchvision compares every file with its published checksum before it unpickles any.
    library = need("torchvision.datasets", "vision")
    try:
        data = library.CIFAR10(root, train=train, download=False)
    except RuntimeError as error:
        found = f"{root / PICKLED} is incomplete or damaged: its files do not have the published checksums"
        raise DataError(f"cifar10: {found}") from error
    return data.data.transpose(0, 3, 1, 2), np.asarray(data.targets)
