"""Images and their label maps from folders of files: pictures, NIfTI volumes (slice by slice) and DICOM images."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedloom.core.errors import DataError, parsing
from fedloom.core.lazy import need
from fedloom.data.inputs import FORMATS, SUFFIXES
from fedloom.data.prepare import Array
from fedloom.models.tasks.task import IGNORE, Task

VOLUMES = (".nii.gz", ".nii", ".dcm")
ENDINGS = (*VOLUMES, *SUFFIXES, ".tif", ".tiff")


def read_folders(images: Path, labels: Mapping[str, Any], tasks: Mapping[str, Task], where: str) -> tuple[Any, Any]:
    """Return the images of a folder, in the order of their names, and {task: labels}.

    Labels that are a folder are maps: files with the names of their images. An image without one has no label. Raises
    DataError for files that cannot be read, differ in size or have no image.
    """
    found = {name: _pixels(file) for name, file in _files(images, where).items()}
    sizes = {pixels.shape[1:]: name for name, pixels in found.items()}
    if len(sizes) > 1:
        (one, a), (two, b) = list(sizes.items())[:2]
        raise DataError(
            f"{where}: {images}: {a!r} is {_size(one)} and {b!r} is {_size(two)}; make all of one size and one number "
            "of channels"
        )
    columns: dict[str, Any] = {}
    for task, label in labels.items():
        columns[task] = label
        if isinstance(label, str | Path):
            folder = Path(label).expanduser()
            files = _files(folder, f"{where}, task {task!r}")
            if stray := next((name for name in files if name not in found), None):
                raise DataError(f"{where}, task {task!r}: {folder}: {stray!r} has no image of that name in {images}")
            columns[task] = _maps(found, files, tasks.get(task), f"{where}, task {task!r}")
    return np.concatenate(list(found.values())), columns


def _files(folder: Path, where: str) -> dict[str, Path]:
    """Return name without ending -> file, in the order of the names."""
    folder = folder.expanduser()
    if not folder.is_dir():
        raise DataError(f"{where}: {folder} is no folder")
    found: dict[str, Path] = {}
    for file in sorted(folder.iterdir()):
        ending = next((end for end in ENDINGS if file.name.lower().endswith(end)), None)
        if ending is not None:
            found[file.name[: -len(ending)]] = file
    if not found:
        raise DataError(f"{where}: {folder} has no images; known endings are {', '.join(ENDINGS)}")
    return found


def _pixels(file: Path, as_label: bool = False) -> Array:
    """Return a file as images (n x C x H x W): one of a picture, one per slice of a volume, as stored of labels."""
    name = file.name.lower()
    pydicom, nibabel, pillow = (
        need(library, extra) if name.endswith(endings) else None
        for library, extra, endings in (
            ("pydicom", "volumes", VOLUMES[2:]),
            ("nibabel", "volumes", VOLUMES[:2]),
            ("PIL.Image", "vision", ENDINGS[3:]),
        )
    )
    with parsing(f"{file}: cannot be read"):
        if nibabel:
            volume = np.asarray(nibabel.load(file).dataobj)
            pixels = np.moveaxis(volume.reshape(*volume.shape[:2], -1), 2, 0)[:, None]
        elif pydicom:
            read = pydicom.dcmread(file)
            plain = read.pixel_array * float(read.get("RescaleSlope", 1)) + float(read.get("RescaleIntercept", 0))
            pixels = plain.reshape(-1, 1, *plain.shape[-2:])
        else:
            assert pillow is not None
            with pillow.open(file, formats=FORMATS) as image:
                deep = image.mode in ("I", "I;16", "F")
                shown = "L" if image.mode in ("1", "L") else "RGB"
                plain = np.asarray(image if as_label or deep else image.convert(shown))
            if plain.ndim == 3 and as_label:
                raise ValueError(f"{image.mode} found, expected one channel, the label of each pixel")
            pixels = np.moveaxis(plain, 2, 0)[None] if plain.ndim == 3 else plain[None, None]
            if not deep:
                return pixels
    return pixels if as_label else pixels.astype(np.float32)


def _maps(images: Mapping[str, Array], files: Mapping[str, Path], task: Task | None, where: str) -> Array:
    """Return the label maps (N x H x W) of all images."""
    whole = task is None or task.kind != "depth"
    found = {name: _pixels(file, as_label=True)[:, 0] for name, file in files.items()}
    for name, part in found.items():
        shape = (len(images[name]), *images[name].shape[2:])
        if part.shape != shape:
            raise DataError(f"{where}: {files[name]} is {_size(part.shape)}, its image {_size(shape)}")
        if whole and (part != np.round(part)).any():
            raise DataError(f"{where}: {files[name]}: fractions found, expected whole numbers, the classes of pixels")
    values = {value for part in found.values() for value in np.unique(part).tolist()}
    if whole and values == {0, IGNORE} and task is not None and task.channels <= 2:
        found = {name: part // IGNORE for name, part in found.items()}  # masks are usually black and white
    parts = [
        found.get(name, np.full((len(pixels), *pixels.shape[2:]), IGNORE)).astype(np.int64 if whole else np.float32)
        for name, pixels in images.items()
    ]
    return np.concatenate(parts)


def _size(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))
