"""Inputs as models take them: the kinds of arrays, and images from arrays and files. Imports torch when it is used."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from fedloom.core.errors import DataError, RecipeError, parsing
from fedloom.core.lazy import need
from fedloom.data.prepare import Array, copies, in_threads
from fedloom.models.signal import Kind, Signal, sized
from fedloom.models.tasks.task import IGNORE

if TYPE_CHECKING:
    from torch import Tensor

    from fedloom.models.tasks.task import Task

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".ppm", ".webp", ".tif", ".tiff")
FORMATS = ("JPEG", "PNG", "BMP", "PPM", "WEBP", "GIF", "TIFF")
"""The formats that a file may have, whatever its name says. Pillow would run other programs for some, such as EPS."""
VOLUMES = (".nii.gz", ".nii", ".dcm")
ENDINGS = (*VOLUMES, *SUFFIXES)
DEEP = ("I", "F")
"""Beginnings of Pillow's modes with more than 8 bits per channel."""
LARGE, SMALL = 10.0, 0.01
"""Labels of a regression, and inputs, with a mean or a deviation above LARGE are better standardised; so are inputs
whose deviations are all below SMALL."""
FAR = 5.0
"""The mean of a site that is so many standard deviations from the others' makes its units doubtful."""
MANY = 20
"""Of more sites than these, one hardly moves the medians of all, and is not left out of them."""
COMPARED, BYTES = 1_000_000, 1 << 30
"""Examples, and bytes of them, in which copies are looked for, which takes a second or two."""
ROWS = 1024  # examples converted at a time
DEFLATED = 1032  # gzip makes at most so many bytes one
_ORIENTATION = 274  # EXIF's number of the note about how a camera was held
Fit = Literal["stretch", "crop"]
Moments = tuple["Tensor", "Tensor"]
"""Mean and standard deviation of each channel."""
Axes = Literal["NCT", "NTC"]
"""The order of examples, channels and steps (times) in an array of series."""
LAYOUTS: dict[Kind, str] = {
    "image": "N x H x W, N x H x W x C or N x C x H x W, uint8 or floating point",
    "series": "N x channels x steps or N x steps",
    "features": "N x F",
    "tokens": "N x T, whole numbers",
}
_AXES: dict[Kind, tuple[int, ...]] = {"image": (3, 4), "series": (2, 3), "features": (2,), "tokens": (2,)}
_NUMBER = re.compile(r"(\d+)")
_LONGEST = 4
"""A uint8 array is taken for grey images by default if the longer side has less than so many times the shorter one."""


def stated(signal: Kind | Signal | None) -> Signal | None:
    """Return a signal as a recipe or a user states it: a kind alone is one."""
    return signal if signal is None or isinstance(signal, Signal) else Signal(kind=signal)


def signal_of(array: Array, said: Kind | Signal | None, where: str) -> Signal:
    """Return the kind of the inputs in an array: as stated, or by shape and type.

    By default N x F are features, four axes are images, and N x A x B are grey images where A = B, or where they are
    uint8 and neither side is four times the other. Raises DataError for an array of another kind than stated, and, with
    the candidates, for one that may be of several kinds.
    """
    shown = f"found {array.dtype} of shape {array.shape}"
    if (known := stated(said)) is None:
        if not (kinds := kinds_of(array)):
            shapes = "; ".join(f"{layout} ({kind})" for kind, layout in LAYOUTS.items())
            raise DataError(f"{where}: {shown}, expected numbers of one of the shapes {shapes}")
        if len(kinds) > 1:
            each = " or ".join(f"{kind} ({LAYOUTS[kind]})" for kind in kinds)
            raise DataError(f"{where}: {shown}, which may be {each}; say which, for example signal: {kinds[0]}")
        return Signal(kind=kinds[0])
    measured = array.dtype == np.uint8 or array.dtype.kind == "f"
    fits = {"image": measured, "tokens": array.dtype.kind in "iu"}.get(known.kind, array.dtype.kind in "iuf")
    if not fits or array.ndim not in _AXES[known.kind]:
        raise DataError(f"{where}: expected {known.kind} ({LAYOUTS[known.kind]}), {shown}")
    return known


def kinds_of(array: Array) -> tuple[Kind, ...]:
    """Return the kinds of inputs that an array may be, the likeliest first."""
    picture = array.dtype == np.uint8
    measured = picture or array.dtype.kind == "f"
    if not measured and array.dtype.kind not in "iu":
        return ()
    if array.ndim == 2:
        return ("features",) if measured else ("tokens", "features")
    if array.ndim == 4 and measured:
        return ("image",)
    if array.ndim != 3:
        return ()
    short, long = sorted(array.shape[1:])
    if measured and (short == long or (picture and long < _LONGEST * short)):
        return ("image",)
    return ("series", "image")


def as_inputs(
    array: Array, signal: Signal, size: int | None, channels: int | None, where: str, axes: Axes | None = None
) -> Tensor:
    """Return inputs as models take them: N x C x H x W, N x C x T or N x F, uint8 or float32; tokens N x T, int64."""
    import torch

    if axes is not None and signal.kind != "series":
        raise RecipeError(f"{where}: axes is only for series, but the inputs are {signal.kind}: leave it out")
    if signal.kind == "image":
        return as_images(array, size, channels, where)
    if size is not None or channels is not None:
        raise RecipeError(f"{where}: size and channels are only for images, but the inputs are {signal.kind}")
    if signal.kind == "tokens":
        return torch.from_numpy(array.astype(np.int64))
    with np.errstate(over="ignore"):  # what becomes infinite is found where statistics are taken
        x = torch.from_numpy(array if array.dtype == np.uint8 else array.astype(np.float32, copy=False))
    x = turned(x, where) if axes == "NTC" else x
    return x[:, None] if signal.kind == "series" and x.ndim == 2 else x


def finite(inputs: Tensor | Array, where: str) -> None:
    """Raise DataError for inputs (N x ...) with NaN or infinity, or with numbers that float32 cannot hold."""
    import torch

    bad = []
    for start in range(0, len(inputs), ROWS):  # some of those that lie on disk at a time
        rows = inputs[start : start + ROWS]
        with np.errstate(over="ignore"):
            real = rows if isinstance(rows, torch.Tensor) else torch.from_numpy(rows.astype(np.float32, copy=False))
        bad.append(~real.reshape(len(real), -1).isfinite().all(1))
    if len(places := torch.cat(bad).nonzero()):
        found = f"{len(places)} of {len(inputs)} inputs have NaN or infinity, the first at position {int(places[0])}"
        raise DataError(f"{where}: {found}; replace these values, or leave the examples out")


def turned(inputs: Tensor, where: str, axes: int = 3) -> Tensor:
    """Return series whose steps come before their channels in the models' order: the last two of `axes` exchanged."""
    if inputs.ndim != axes:
        shape = tuple(inputs.shape)
        raise DataError(f"{where}: inputs of shape {shape} found, expected N x steps x channels for axes NTC")
    return inputs.transpose(-1, -2).contiguous()


def doubtful_axes(shape: Sequence[int], signal: Signal | None, setting: str) -> tuple[str, ...]:
    """Return a doubt about a series (channels x steps) with more channels than steps; `setting` says how to set the
    order of axes, with {} in its place."""
    if signal is None or signal.kind != "series" or len(shape) != 2 or shape[0] <= shape[1]:
        return ()
    found = f"{sized(shape, signal)} found, more channels than steps"
    return (f"{found}: add {setting.format('NTC')} if the steps come first, {setting.format('NCT')} if not",)


def with_vocabulary(signal: Signal, parts: Sequence[Tensor], where: str) -> Signal:
    """Return tokens with their vocabulary: as stated, or the largest in `parts` and one. DataError for others."""
    low, high = min(int(x.min()) for x in parts), max(int(x.max()) for x in parts)
    size = high + 1 if signal.vocabulary is None else signal.vocabulary
    if low < 0 or high >= size:
        raise DataError(f"{where}: expected tokens from 0 to {size - 1}, found {low if low < 0 else high}")
    return signal.model_copy(update={"vocabulary": size})


def badly_scaled(moments: Mapping[str, Moments], signal: Signal | None) -> tuple[str, ...]:
    """Return a doubt about inputs of clients, neither images nor tokens, on whose scale training may not converge.

    Some channel or feature has a mean or a deviation above LARGE, or all have deviations below SMALL.
    """
    import torch

    if not moments or (signal is not None and signal.kind in ("image", "tokens")):
        return ()
    means, stds = (torch.stack(each) for each in zip(*moments.values(), strict=True))
    mean = means.mean(0)
    std = (stds.square() + (means - mean).square()).mean(0).sqrt()
    size = torch.maximum(mean.abs(), std)
    if float(size.max()) <= LARGE and (signal is None or not 0 < float(std.max()) < SMALL):
        return ()
    worst = int(size.argmax())
    found = f"{_axis(signal)} {worst} has mean {mean[worst]:.3g} and standard deviation {std[worst]:.3g}"
    advice = "subtract a mean and divide by a standard deviation, the same ones for all clients"
    return (f"inputs: {found}, so training may not converge; {advice}",)


def far_off(moments: Mapping[str, Moments], signal: Signal | None) -> tuple[str, ...]:
    """Return a doubt for each client or domain whose inputs, neither images nor tokens, may be in other units.

    There the mean of a channel or feature is more than FAR standard deviations away from the others' mean. The others'
    mean and deviation are medians over sites, which one more site of other units does not move.
    """
    import torch

    if len(moments) < 2 or (signal is not None and signal.kind in ("image", "tokens")):
        return ()
    means, stds = (torch.stack(each) for each in zip(*moments.values(), strict=True))
    sentences = []
    centre, theirs = means.quantile(0.5, 0), stds.quantile(0.5, 0)
    for place, who in enumerate(moments):
        if len(moments) <= MANY:
            others = [other for other in range(len(moments)) if other != place]
            centre, theirs = means[others].quantile(0.5, 0), stds[others].quantile(0.5, 0)
        # A rare value, or one that only this site has, is no other unit.
        width = torch.maximum(torch.where(theirs > 1e-6 * centre.abs(), theirs, stds[place]), stds[place] / 10)
        distance = torch.where(width > 0, (means[place] - centre).abs() / width, 0.0)
        if distance[worst := int(distance.argmax())] > FAR:
            found = f"{who}: {_axis(signal)} {worst} has mean {means[place][worst]:.3g}"
            like = f"the others have about {centre[worst]:.3g} (standard deviation {theirs[worst]:.3g})"
            sentences.append(f"{found}, where {like}; if these are other units, convert them")
    more = f"{len(sentences) - 3} more sites are as far from the others"
    return (*sentences[:3], *([more] if len(sentences) > 3 else []))


def _axis(signal: Signal | None) -> str:
    return "feature" if signal is not None and signal.kind == "features" else "channel"


def copied(train: Mapping[str, Tensor], test: Mapping[str, Tensor], signal: Signal | None) -> tuple[str, ...]:
    """Return what `copies` says of inputs in memory, name -> N x ..., which are compared byte by byte.

    More than COMPARED examples, or BYTES of them together, are not compared, and neither are features of whole numbers:
    rows of a few codes are alike by chance. An empty name stands for examples that cannot be named.
    """
    every = [*train.values(), *test.values()]
    if sum(map(len, every)) > COMPARED or sum(x.nbytes for x in every) > BYTES:
        return ()
    if signal is not None and signal.kind == "features" and all(bool((x == x.round()).all()) for x in every):
        return ()

    def of(part: Mapping[str, Tensor]) -> Iterator[tuple[bytes, str]]:
        for name, x in part.items():
            yield from marks(x, (name and f"{name}[{i}]" for i in range(len(x))))

    return copies(of(train), of(test), sum(map(len, test.values())), "examples")


def marks(inputs: Tensor, names: Iterable[str]) -> Iterator[tuple[bytes, str]]:
    """Yield the hash of each of some inputs (N x ...), with its name, as `copies` takes them."""
    for row, name in zip(inputs.numpy(), names, strict=True):
        yield blake2b(row.tobytes(), digest_size=16).digest(), name


def opened(file: Path | str, mode: Literal["RGB", "L"] = "RGB") -> Any:
    """Open a file as a Pillow image, upright as the camera's note (EXIF) says; DataError where it cannot be read, and
    where it has more than 8 bits, which Pillow would cut off."""
    upright = need("PIL.ImageOps", "vision").exif_transpose
    with parsing(f"{file}: cannot be read as an image"), _picture(file) as image:
        if image.mode.startswith(DEEP):
            advice = "convert it, or give all images of a table more (docs/bring-your-data.md)"
            raise ValueError(f"mode {image.mode} found, expected 8 bits per channel; {advice}")
        return _seen(upright(image), mode)


@contextmanager
def _picture(file: Path | str) -> Iterator[Any]:
    """Open a file with Pillow. Raises ValueError for a file of several images, of which Pillow reads the first, and for
    colours of 16 bits, of which it reads 8."""
    with need("PIL.Image", "vision").open(file, formats=FORMATS) as image:
        pages = 1 if image.format == "MPO" else getattr(image, "n_frames", 1)  # a camera adds previews to a JPEG
        if pages > 1:
            raise ValueError(f"{pages} images found in one file, expected one; save each as a file, or all as .nii")
        if not image.mode.startswith(DEEP) and ";16" in str(image.tile):
            raise ValueError("colours of 16 bits found, expected 8 bits per channel, or grey of 16; convert it")
        yield image


def _seen(image: Any, mode: str) -> Any:
    """Return a Pillow image in a mode, white where it is transparent, as viewers show it."""
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = need("PIL.Image", "vision").new("RGBA", image.size, "white")
        white.alpha_composite(image)
        image = white
    return image.convert(mode)


def resized(image: Any, size: tuple[int, int], fit: Fit) -> Any:
    """Resize a Pillow image bilinearly to (width, height): `crop` keeps proportions and the middle of it."""
    bilinear = need("PIL.Image", "vision").Resampling.BILINEAR
    if fit == "crop":
        return need("PIL.ImageOps", "vision").fit(image, size, bilinear)
    return image.resize(size, bilinear)


def read(files: Sequence[Path | str], size: int, fit: Fit = "stretch") -> Tensor:
    """Read colour images as `opened` and `resized` do (N x 3 x size x size, uint8, the channels innermost in memory).
    DataError where a file cannot be read."""
    import torch

    out = np.empty((len(files), size, size, 3), np.uint8)

    def one(row: int) -> None:
        out[row] = np.asarray(resized(opened(files[row]), (size, size), fit))

    in_threads(one, range(len(files)))
    return torch.from_numpy(out).permute(0, 3, 1, 2)


def ending(name: str) -> str:
    """Return the ending of the name of an image as it is written there; an empty text of other names."""
    lower = name.lower()
    return next((name[len(name) - len(end) :] for end in ENDINGS if lower.endswith(end)), "")


def package_of(file: Path) -> str:
    """Return the package that reads a volume or a scan, which may lack its ending; an empty text of other files."""
    name = file.name.lower()
    if name.endswith(VOLUMES):
        return "pydicom" if name.endswith(VOLUMES[2]) else "nibabel"
    if not ending(name) and os.path.isfile(file):  # a text of a table may be no name at all
        with suppress(OSError), file.open("rb") as opened:
            return "pydicom" if opened.read(132)[128:] == b"DICM" else ""
    return ""


def is_image(file: Path) -> bool:
    """Return whether a file is an image by the ending of its name, or a scan."""
    return bool(ending(file.name) or package_of(file))


def stem_of(name: str) -> str:
    """Return the name of an image without its ending."""
    return name[: len(name) - len(ending(name))]


def is_deep(file: Path) -> bool:
    """Return whether an image has more than 8 bits. DataError where it cannot be read."""
    if package_of(file):
        return True
    need("PIL.Image", "vision")
    with parsing(f"{file}: cannot be read as an image"), _picture(file) as image:
        return bool(image.mode.startswith(DEEP))


def frames_of(file: Path) -> tuple[int, int, int]:
    """Return (slices, height, width) of the images that `pixels_of` reads, from a file's header, or a DataError."""
    with parsing(f"{file}: cannot be read"):
        if (package := package_of(file)) == "nibabel":
            high, wide, *slices = _volume(file).shape
            return math.prod(slices), high, wide
        if package:
            scan = need("pydicom", "volumes").dcmread(file, stop_before_pixels=True)
            frames, high, wide = (int(scan.get(key, 1)) for key in ("NumberOfFrames", "Rows", "Columns"))
            claimed = frames * high * wide * int(scan.get("BitsAllocated", 8)) // 8
            if frames < 1 or claimed > DEFLATED * file.stat().st_size:
                raise ValueError(f"its header claims {frames} images of {high} x {wide}, which it cannot hold")
            return frames, high, wide
        with _picture(file) as image:
            turned = image.getexif().get(_ORIENTATION, 1) in (5, 6, 7, 8)
            return (1, image.width, image.height) if turned else (1, image.height, image.width)


def read_deep(files: Sequence[Path], size: int) -> Tensor:
    """Read images of more than 8 bits as `pixels_of` does, all slices of a file, resized bilinearly (N x C x size x
    size, float32). DataError where a file cannot be read or has other images than the first one."""
    import torch

    def one(file: Path) -> Tensor:
        pixels = pixels_of(file)
        if pixels.dtype == np.uint8:
            advice = "save all images with 8 bits, or all with more"
            raise DataError(f"{file}: 8 bits found, expected one image of more than 8 bits, as {files[0]}; {advice}")
        finite(pixels, str(file))
        return as_images(pixels, size, None, str(file))

    images = in_threads(one, files)
    channels = {len(image[0]): file for image, file in zip(images, files, strict=True)}
    if len(channels) > 1:
        (a, one_file), (b, other) = list(channels.items())[:2]
        raise DataError(f"{one_file.name} has {a} channels and {other.name} {b}, expected as many in all images")
    return torch.cat(images)


def as_images(array: Array, size: int | None, channels: int | None, where: str) -> Tensor:
    """Return images as N x C x H x W, uint8 or float32; a view of `array` where nothing changes."""
    import torch
    from torch.nn.functional import interpolate

    dtype = np.uint8 if array.dtype == np.uint8 else np.float32
    mapped = isinstance(array.base, np.memmap) and array.dtype == dtype
    with np.errstate(over="ignore"):  # what becomes infinite is found where statistics are taken
        x = channels_second(torch.from_numpy(array.astype(dtype, copy=False)), where)
    if channels is not None and channels != x.shape[1]:
        luma = torch.tensor([0.299, 0.587, 0.114]).view(3, 1, 1)
        grey = partial(_in_parts, x, (1, *x.shape[2:]), lambda part: (part * luma).sum(1, keepdim=True))
        x = x.expand(-1, 3, -1, -1) if channels == 3 else grey()
    if size is not None and x.shape[2:] != (size, size):  # antialiased where they shrink
        resized = partial(interpolate, size=(size, size), mode="bilinear", antialias=True)
        x = _in_parts(x, (x.shape[1], size, size), lambda part: resized(part.float()))
    return x if mapped else x.contiguous()


def nearest_pixels(maps: Array, *size: int) -> Array:
    """Return maps (n x H x W x ...) as n x height x width: each new pixel's centre lies in the pixel that it takes."""
    high, wide = (((np.arange(n) + 0.5) * side / n).astype(int) for n, side in zip(size, maps.shape[1:3], strict=True))
    return maps[:, high[:, None], wide]


def channels_second(x: Tensor, where: str) -> Tensor:
    """Return grey or colour images as N x C x H x W, and anything but images as it is."""
    if x.ndim == 3:
        return x[:, None]
    if x.ndim == 4 and x.shape[3] in (1, 3):
        return x.permute(0, 3, 1, 2)
    if x.ndim == 4 and x.shape[1] not in (1, 3):
        raise DataError(f"{where}: expected 1 or 3 channels in the last or second place, found {tuple(x.shape)}")
    return x


def _in_parts(x: Tensor, shape: tuple[int, ...], make: Callable[[Tensor], Tensor]) -> Tensor:
    """Convert images to N x `shape`, some at a time, in their own type."""
    import torch

    out = torch.empty(len(x), *shape, dtype=x.dtype)
    for part, place in zip(x.split(ROWS), out.split(ROWS), strict=True):
        y = make(part)
        place.copy_(y if x.is_floating_point() else y.round().clamp(0, 255))
    return out


def read_folders(
    images: Path,
    labels: Mapping[str, Any],
    tasks: Mapping[str, Task],
    ignored: Mapping[str, float | None],
    where: str,
    size: int | None = None,
) -> tuple[Array, dict[str, Any], dict[str, list[Path]]]:
    """Return the images of a folder, in the order of their names, {task: labels}, and {task: the file of each label}.

    `ignored` has the label of a task that was stated to mean "no label"; images and maps become `size` x `size`.

    Labels that are a folder are maps: files with the names of their images. A mapping, or a pandas Series with an index
    of texts, has a label per file name. An image without one has no label: None in a list. Raises DataError for files
    that cannot be read, differ in size or have no image, and for labels in an order that the names do not determine.
    """
    sources = _files(images, where)

    def pixels(file: Path) -> tuple[Array, tuple[int, ...]]:
        found = pixels_of(file)
        # a copy, because Pillow's memory is read-only
        read = found if size is None else as_images(found.copy(), size, None, str(file)).numpy()
        return read, (len(found), *found.shape[2:])

    both = dict(zip(sources, in_threads(pixels, sources.values()), strict=True))
    read, shapes = {name: x for name, (x, _) in both.items()}, {name: shape for name, (_, shape) in both.items()}
    # those of 8 bits are scaled to 0..1, others are not
    bits = {name: "8" if x.dtype == np.uint8 else "more" for name, x in read.items()}
    forms = {f"{_size(x.shape[1:])} with {bits[name]} bits": sources[name].name for name, x in read.items()}
    if len(forms) > 1:
        (one, a), (two, b) = list(forms.items())[:2]
        advice = "make all images the same size (or give fl.Federation a size), number of channels and bits"
        raise DataError(f"{where}: {images}: {a!r} is {one} and {b!r} is {two}; {advice}")
    columns, files = dict(labels), {}
    for task, label in labels.items():
        drawn: Mapping[str, Path] = {}
        about = f"{where}, task {task!r}"
        if isinstance(label, str | Path):
            folder = Path(label).expanduser()
            drawn = _files(folder, about)
            if stray := next((name for name in drawn if name not in read), None):
                raise DataError(f"{about}: {folder}: {stray!r} belongs to no image in {images}")
            columns[task] = _maps(shapes, drawn, tasks.get(task), ignored.get(task), about, size)
        elif (pairs := _pairs(label)) is not None:
            by_name = _by_name(pairs, sources, f"{about}: {images}")
            columns[task] = [by_name.get(name) for name, x in read.items() for _ in x]
        elif label is not None:
            _check_order([file.name for file in sources.values()], f"{about}: {images}")
        files[task] = [drawn.get(name, sources[name]) for name, x in read.items() for _ in x]
    return np.concatenate(list(read.values())), columns, files


def _pairs(labels: Any) -> Iterable[tuple[Any, Any]] | None:
    """Return (file name, label) of a mapping, or of a pandas object with an index of texts; None of anything else."""
    if isinstance(labels, Mapping):
        return labels.items()
    is_named = hasattr(labels, "iloc") and all(isinstance(key, str) for key in labels.index)
    return zip(labels.index, labels.to_numpy(), strict=True) if is_named else None


def _by_name(pairs: Iterable[tuple[Any, Any]], files: Mapping[str, Path], where: str) -> dict[str, Any]:
    """Return name without ending -> label. Raises DataError for a label of no image, or a second one of an image."""
    names = {file.name: name for name, file in files.items()} | {name: name for name in files}
    found: dict[str, Any] = {}
    for key, label in pairs:
        if (name := names.get(str(key))) is None:
            raise DataError(f"{where}: a label for {str(key)!r} found, expected the name of an image in this folder")
        if name in found:
            raise DataError(f"{where}: two labels for {str(key)!r} found, expected one per image")
        found[name] = label
    return found


def _check_order(names: Sequence[str], where: str) -> None:
    """Raise DataError for file names, sorted as text, that lie in another order when their numbers are counted."""
    counted = sorted(names, key=lambda name: [int(part) if part.isdecimal() else part for part in _NUMBER.split(name)])
    if (pair := next(((a, b) for a, b in zip(names, counted, strict=True) if a != b), None)) is not None:
        order = f"{pair[0]} comes before {pair[1]} as text and after it as a number"
        advice = "give a mapping {file name: label} or a pandas Series with the file names as its index"
        raise DataError(f"{where}: labels without file names found, but {order}; {advice}")


def _files(folder: Path, where: str) -> dict[str, Path]:
    """Return name without ending -> file, in the order of the names."""
    folder = folder.expanduser()
    if not folder.is_dir():
        raise DataError(f"{where}: {folder} is not a folder")
    files: dict[str, Path] = {}
    for file in sorted(folder.iterdir()):
        if is_image(file) and (other := files.setdefault(stem_of(file.name), file)) is not file:
            advice = "names without their ending must differ: rename or remove one"
            raise DataError(f"{where}: {folder}: {other.name!r} and {file.name!r} found; {advice}")
    if not files:
        raise DataError(f"{where}: {folder} has no images; images end in {', '.join(ENDINGS)}")
    return files


def _volume(file: Path) -> Any:
    """Return a NIfTI volume, whose values are not read yet. Raises ValueError where its header claims more than the
    file can hold: memory for all values is taken before the first is read."""
    volume = need("nibabel", "volumes").load(file)
    claimed, found = math.prod(volume.shape) * volume.get_data_dtype().itemsize, file.stat().st_size
    if claimed > DEFLATED * found:
        raise ValueError(f"its header claims {claimed} bytes of values, expected what {found} bytes can hold")
    return volume


def pixels_of(file: Path, as_label: bool = False) -> Array:
    """Return a file as images (n x C x H x W): one of a picture, one per slice of a volume, as stored of labels."""
    package = package_of(file)
    library = need(package or "PIL.Image", "volumes" if package else "vision")
    with parsing(f"{file}: cannot be read"):
        if package == "nibabel":
            volume = np.asarray(_volume(file).dataobj)
            if volume.dtype.kind not in "iuf":
                raise ValueError(f"values of type {volume.dtype} found, expected one number in each place")
            pixels = np.moveaxis(volume.reshape(*volume.shape[:2], -1), 2, 0)[:, None]
        elif package:
            scan = library.dcmread(file)
            if (samples := int(scan.get("SamplesPerPixel", 1))) != 1:
                raise ValueError(f"{samples} channels found, expected one; save colours as PNG")
            stored = scan.pixel_array
            if not as_label and scan.get("PhotometricInterpretation") == "MONOCHROME1":  # the least number is white
                ends = -1 if scan.get("PixelRepresentation") else (1 << scan.BitsStored) - 1  # least and most together
                stored = ends - stored.astype(np.int64)
            plain = stored * float(scan.get("RescaleSlope", 1)) + float(scan.get("RescaleIntercept", 0))
            pixels = plain.reshape(-1, 1, *plain.shape[-2:])
        else:
            with _picture(file) as image:
                if not as_label:  # masks are drawn on the upright image
                    need("PIL.ImageOps", "vision").exif_transpose(image, in_place=True)
                deep = image.mode.startswith(DEEP)
                shown = "L" if image.mode in ("1", "L") else "RGB"
                plain = np.asarray(image if as_label or deep else _seen(image, shown))
            if plain.dtype == bool:
                plain = plain.astype(np.uint8)
            if as_label and image.mode == "RGBA" and not np.ptp(plain[..., :3]) and np.ptp(plain[..., 3]):
                raise ValueError("pixels differ only in transparency, expected one channel (the label of each pixel)")
            if plain.ndim == 3 and as_label and (plain[..., :3] == plain[..., :1]).all():
                plain = plain[..., 0]  # grey, written as a colour image
            if plain.ndim == 3 and as_label:
                raise ValueError(f"expected one channel (the label of each pixel), found {image.mode}")
            pixels = np.moveaxis(plain, 2, 0)[None] if plain.ndim == 3 else plain[None, None]
            if not deep:
                return pixels
    return pixels if as_label else pixels.astype(np.float32)


def _maps(
    shapes: Mapping[str, tuple[int, ...]],
    files: Mapping[str, Path],
    task: Task | None,
    ignore: float | None,
    where: str,
    size: int | None,
) -> Array:
    """Return the label maps (N x H x W) of all images, whose shapes are (n, H, W), -1 where there is none."""
    whole = task is None or task.kind != "depth"
    maps = {name: pixels_of(file, as_label=True)[:, 0] for name, file in files.items()}
    for name, part in maps.items():
        if part.shape != shapes[name]:
            found = f"{files[name]} is {_size(part.shape)}"
            raise DataError(f"{where}: expected the image's size {_size(shapes[name])}, but {found}")
        if whole and (part != np.round(part)).any():
            raise DataError(f"{where}: {files[name]}: expected whole numbers (the classes of pixels), found fractions")
    values = {value for part in maps.values() for value in np.unique(part).tolist()} - {ignore}
    if whole and task is not None and task.channels <= 2 and IGNORE in values and values <= {0, IGNORE}:
        # Masks are usually black and white. A folder with white alone has a label, too.
        maps = {name: np.where(part == IGNORE, 1, part) for name, part in maps.items()}
    whole_size = [maps.get(name, np.full(shape, -1)) for name, shape in shapes.items()]
    parts = whole_size if size is None else [nearest_pixels(part, size, size) for part in whole_size]
    return np.concatenate([part.astype(np.int64 if whole else np.float32) for part in parts])


def _size(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))
