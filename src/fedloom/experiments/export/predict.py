"""Predictions on new data: the rows of a table, pictures and volumes from files, arrays."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pandas import DataFrame
from torch import Tensor
from torch.nn import functional

from fedloom.core.errors import DataError, StateError, UserError, listed, parsing, shortened, warn, writing
from fedloom.core.lazy import need
from fedloom.core.machine import need_memory
from fedloom.core.settings.yaml import section_of
from fedloom.data.drawing import Cell, grid, label, palette, save
from fedloom.data.inputs import (
    ENDINGS,
    SUFFIXES,
    VOLUMES,
    as_images,
    as_inputs,
    finite,
    opened,
    package_of,
    pixels_of,
    resized,
    signal_of,
    with_vocabulary,
)
from fedloom.data.prepare import Array, mapped
from fedloom.data.tables.preprocessing import ALL, Preprocessing
from fedloom.data.tables.read import ENDS, Table, read
from fedloom.data.tables.table import EVERYONE, sites_of, task_of
from fedloom.data.texts import Words, texts_of
from fedloom.engines.result import fill, model_key, trained_models
from fedloom.experiments.export.bundle import ABOUT, OFF, Bundle, is_image, network, of_tasks
from fedloom.federation.runs.reader import Run
from fedloom.federation.runs.recorded import recipe_in
from fedloom.models.multitask import MultiTask
from fedloom.models.signal import Signal
from fedloom.models.tasks.dense import DenseTask, as_label
from fedloom.models.tasks.labels import Linear, Multilabel, Regression
from fedloom.models.tasks.task import IGNORE
from fedloom.study.output import no_formula

ROWS = 4096
"""Rows of a table that pass the model together."""
BATCH, DRAWN = 64, 24
"""Other inputs that pass the model together, and how many are drawn."""
STORED = ("stored", "stretched")
"""The values of `About.pixels` with which inputs are the numbers in files."""
_ENDINGS = (*ENDINGS, ".npy")
TABLE = "predictions.csv"
Chosen = Callable[[str, str], MultiTask | None]
"""(site, task) -> the model that predicts the task there; None where the site's own model never learned it."""


@dataclass
class Answers:
    """The predictions of a model on files."""

    words: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    """For each input its name, and task -> the prediction in words, of tasks without maps."""
    unread: dict[str, str] = field(default_factory=dict)
    """File -> the reason for which it was left out."""
    maps: list[Path] = field(default_factory=list)
    """The files of maps (masks, depth, ...) that were written."""
    folders: tuple[Path, ...] = ()
    """The folders of these files, one per task."""
    table: Path | None = None
    """The file with a row per input: its name, predictions with probabilities, and the files of maps."""
    picture: Path | None = None
    """The picture of the first inputs and all predictions on them."""


def of_files(bundle: Bundle, paths: Sequence[Path], picture: Path) -> Answers:
    """Predict pictures, volumes and arrays (files and folders of them), and write what `Answers` has.

    Inputs that are images are drawn in `picture`; all else goes to the folder of that name without its ending. What
    cannot be read is left out with a warning. Raises DataError where nothing can be read, and UserError for a model
    that takes no such inputs, for two files whose maps would have one name, and where an input would be overwritten.
    """
    sources, folder = _sources(paths), picture.with_suffix("")
    dense = [task for task in bundle.tasks if isinstance(task, DenseTask)]
    if is_image(bundle.about.input_shape) and picture.suffix.lower() not in SUFFIXES:
        raise UserError(f"{picture}: expected the name of a picture, which ends in {', '.join(SUFFIXES)}")
    ours = {folder.resolve(), *((folder / task.name).resolve() for task in dense)}
    if any(ours & {*source.resolve().parents} for source in sources):
        raise UserError(f"predict: inputs lie in {folder}, where predictions go: choose another name with --out")
    if folder.exists() and not (folder / TABLE).is_file() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(
            f"predict: {folder} holds other files, and predictions go there: choose another name with --out"
        )
    stems = _stems(sources) if dense else {}
    named = {task.name: _names(bundle, task) for task in bundle.tasks if isinstance(task, Linear)}
    pixels = {task.name: _pixels(task, bundle.about.classes.get(task.name, ())) for task in dense}
    answers, columns, drawn = Answers(), dict[str, list[Any]](), list[list[Cell]]()
    for file in sources:
        try:
            x, back, seen = inputs(bundle, file)
        except DataError as error:
            answers.unread[f"{file}"] = f"{error}"
            continue
        maps: dict[str, list[Array]] = {task.name: [] for task in dense}
        for at, outputs in enumerate(_outputs(bundle, x)):
            name = f"{file}" if len(x) == 1 else f"{file} [{at}]"
            words: dict[str, str] = {}
            cells: list[Cell] = []
            numbers: dict[str, Any] = {"input": name}
            for task in bundle.tasks:
                output = outputs[task.name]
                if isinstance(task, DenseTask):
                    cells.append(label(task, as_label(task, output)))
                    maps[task.name].append(_stored(task, as_label(task, back(output)), pixels[task.name]))
                    continue
                assert isinstance(task, Linear)  # there is no third kind
                predicted = task.predictions(output[None].double()).numpy()
                names, own = named[task.name]
                numbers |= {key: values[0] for key, values in columns_of(task, predicted, own).items()}
                words[task.name] = _words(task, predicted[0].tolist(), names)
                cells.append((None, words[task.name]))
            answers.words.append((name, words))
            for column, value in numbers.items():
                columns.setdefault(column, []).append(value)
            if seen is not None and len(drawn) < DRAWN:
                drawn.append([(seen(at), file.name), *cells])
        for task in dense:
            where = _save(task, maps[task.name], pixels[task.name], file, folder / task.name / stems[file])
            answers.maps.append(where)
            columns.setdefault(task.name, []).extend([where.relative_to(folder).as_posix()] * len(x))
    if len(answers.unread) == len(sources):
        raise DataError("; ".join([*answers.unread.values()][:3]))
    for why in answers.unread.values():
        warn(f"left out: {why}")
    answers.folders = tuple(folder / task.name for task in dense)
    answers.table = folder / TABLE  # also where all tasks have maps: it says that the folder is of predictions
    folder.mkdir(parents=True, exist_ok=True)
    with writing(answers.table, "csv"):
        DataFrame(columns).to_csv(answers.table, index=False)
    if drawn:
        answers.picture = picture
        save(grid(["input", *(task.name for task in bundle.tasks)], drawn), picture)
    return answers


def _names(bundle: Bundle, task: Linear) -> tuple[Sequence[Any], Sequence[Any]]:
    """Return the names of a task's classes or labels, and what they are called in columns."""
    names = bundle.about.classes.get(task.name) or [*(getattr(task, "labels", None) or range(task.channels))]
    return names, [f"{task.name}={each}" for each in names] if isinstance(task, Multilabel) else names


def _sources(paths: Sequence[Path]) -> list[Path]:
    """Return files, and those in folders (nothing hidden) by name. Raises UserError for a folder without any."""
    files: list[Path] = []
    for path in paths:
        within = [path]
        if path.is_dir():
            fit = (file for file in sorted(path.rglob("*")) if file.name.lower().endswith(_ENDINGS) or package_of(file))
            within = [file for file in fit if not any(part[0] == "." for part in file.relative_to(path).parts)]
        if not within:
            raise UserError(f"predict: {path} has no inputs: their names end in {', '.join(_ENDINGS)}")
        files += within
    return [*dict.fromkeys(files)]


def _stems(files: Sequence[Path]) -> dict[Path, Path]:
    """Return file -> its place below their folder, without the ending. Raises UserError for two files of one place."""
    top = Path(os.path.commonpath([file.absolute().parent for file in files]))
    whose: dict[Path, Path] = {}
    for file in files:
        ending = next((end for end in _ENDINGS if file.name.lower().endswith(end)), file.suffix)
        stem = file.absolute().relative_to(top).with_name(file.name[: len(file.name) - len(ending)])
        if (other := whose.setdefault(stem, file)) is not file:
            raise UserError(f"predict: {other} and {file} would have maps of one name: rename one, or predict it apart")
    return {file: stem for stem, file in whose.items()}


def inputs(bundle: Bundle, file: Path) -> tuple[Tensor, Callable[[Tensor], Tensor], Callable[[int], Array] | None]:
    """Return (inputs as the model takes them, N x ...; what gives an output, C x h x w, the height and width of the
    file's images; what makes the picture of one, H x W x 3 of uint8).

    A picture gets the size that the model was trained on, as in training. Raises DataError where a file cannot be read
    or does not fit, UserError where the model takes no such files.
    """
    about, shape = bundle.about, tuple(bundle.about.input_shape)
    channels = shape[0]
    if about.table is not None or (about.text is not None and file.suffix.lower() != ".npy"):
        raise UserError(f"{file}: expected a table ({ENDS})")
    if file.suffix.lower() == ".npy":
        raw = _array(bundle, file)
        size = (raw.shape[2], raw.shape[3]) if is_image(shape) else None
    elif not is_image(shape):
        raise UserError(
            f"{file}: the model takes inputs of shape {shape}, which are not images; expected an array (.npy), "
            f"N x {' x '.join(map(str, shape))}"
        )
    elif about.pixels is None:
        raise UserError(
            f"{file}: the model was trained on other values than 0 to 1, so the file of a picture does not become "
            "its input: write arrays as in training to an .npy file"
        )
    elif about.pixels in STORED:
        pixels = np.array(pixels_of(file))  # Pillow's memory is read-only
        size = (pixels.shape[2], pixels.shape[3])
        raw = as_images(pixels, shape[1] if about.pixels == "stretched" else None, None, str(file))
        if tuple(raw.shape[1:]) != shape or raw.dtype == torch.uint8:
            found = f"{str(raw.dtype).removeprefix('torch.')} of shape {tuple(raw.shape[1:])}"
            raise DataError(f"{file}: {found} found, expected more than 8 bits and shape {shape}, as in training")
    else:
        image = opened(file, "L" if channels == 1 else "RGB")
        size = None if about.pixels == "crop" else (image.height, image.width)
        if about.pixels == "pad":
            less = min(1.0, shape[1] / image.height, shape[2] / image.width)
            if less < 1:  # larger than all images of training
                image = resized(image, (max(1, int(less * image.width)), max(1, int(less * image.height))), "stretch")
        else:
            image = resized(image, (shape[2], shape[1]), "crop" if about.pixels == "crop" else "stretch")
        raw = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
        raw = raw.view(1, image.height, image.width, channels).permute(0, 3, 1, 2)
    x = raw.float().div(255) if raw.dtype == torch.uint8 else raw
    seen = _seen(x) if is_image(shape) else None
    if about.mean is not None and about.std is not None:
        mean, std = (torch.tensor(of).view(-1, *(1,) * (x.ndim - 2)) for of in (about.mean, about.std))
        x = (x - mean) / std
    if about.pixels != "pad":
        return x, lambda output: _resized(output, size), seen
    (high, wide), inner = (shape[1] - x.shape[2], shape[2] - x.shape[3]), (x.shape[2], x.shape[3])
    if min(high, wide) < 0:
        raise DataError(f"{file}: images of {inner} found, expected at most {shape[1:]}, as in training")
    top, left = high // 2, wide // 2
    x = functional.pad(x, (left, wide - left, top, high - top))
    return x, lambda output: _resized(output[:, top : top + inner[0], left : left + inner[1]], size), seen


def _array(bundle: Bundle, file: Path) -> Tensor:
    """Return the inputs in an .npy file (N x ...), before they are normalised, in the model's size. Raises DataError
    for arrays that the model does not take."""
    about, shape = bundle.about, tuple(bundle.about.input_shape)
    if not file.is_file():
        raise DataError(f"{file} cannot be read: it is no file")
    if about.pixels is None and not is_image(shape) and about.bytes is not None:
        raise UserError(f"{file}: the model's inputs were computed, such as features of an encoder; no file has them")
    where = str(file)
    with parsing(f"{file} cannot be read as a plain array"):
        array = mapped(file)
    if not array.ndim or not len(array):
        raise DataError(f"{file}: shape {array.shape} found, expected N x {' x '.join(map(str, shape))} with N above 0")
    signal = signal_of(array, about.signal, where)
    is_other = about.bytes is not None and (array.dtype == np.uint8) != about.bytes
    if signal.kind in ("series", "features") and is_other:
        trained = "uint8, which became 0 to 1" if about.bytes else "other numbers than uint8"
        raise DataError(f"{file}: {array.dtype} found, but the model was trained on {trained}; convert the array")
    if signal.kind == "image" and array.shape[1:] == shape and shape[0] not in (1, 3):
        x = torch.from_numpy(array.astype(np.uint8 if array.dtype == np.uint8 else np.float32))
    else:
        square = shape[1] if about.pixels == "stretch" and signal.kind == "image" and shape[1] == shape[2] else None
        channels = shape[0] if signal.kind == "image" and shape[0] in (1, 3) else None
        x = as_inputs(array, signal, square, channels, where, "NTC" if about.turned else None)
    if tuple(x.shape[1:]) != shape and (about.pixels != "pad" or x.shape[1] != shape[0]):
        advice = "; exchange the last two axes" if tuple(x.shape[1:]) == shape[::-1] else ""
        raise DataError(f"{file}: inputs of shape {tuple(x.shape[1:])} found, expected {shape}, as in training{advice}")
    if signal.kind != "tokens":
        finite(x, where)
    if signal.kind == "image" and about.pixels not in STORED:
        is_byte, is_share = x.dtype == torch.uint8, bool((x > -OFF).all() and (x < 1 + OFF).all())
        if is_byte if about.pixels is None else not (is_byte or is_share):
            found = "uint8" if is_byte else f"values from {float(x.min()):g} to {float(x.max()):g}"
            other = "values of 0 to 1 or uint8" if about.pixels is not None else "other values than 0 to 1"
            raise DataError(f"{file}: {found} found, but the model was trained on {other}")
    if signal.kind == "tokens":
        with_vocabulary(signal, [x], where)
    return x


def _seen(x: Tensor) -> Callable[[int], Array]:
    """Return what draws the image of a number (H x W x 3, uint8): values of 0 to 1, else from least to largest."""

    def draw(at: int) -> Array:
        image = x[at]
        low, high = float(image.min()), float(image.max())
        if low < 0 or high > 1:
            image = (image - low) / max(high - low, 1e-9)
        return image.expand(3, -1, -1).mul(255).round().to(torch.uint8).permute(1, 2, 0).contiguous().numpy()

    return draw


def _outputs(bundle: Bundle, x: Tensor) -> Iterator[dict[str, Tensor]]:
    """Yield task -> the output of each input."""
    names = [task.name for task in bundle.tasks]
    for part in x.split(BATCH):
        with torch.inference_mode():
            outputs = {name: output.detach() for name, output in bundle.module(part, names).items()}
        for at in range(len(part)):
            yield {name: outputs[name][at] for name in names}


def _resized(output: Tensor, size: tuple[int, int] | None) -> Tensor:
    """Return an output (C x h x w) at the height and width of the file, if that has one."""
    is_same = size in (None, tuple(output.shape[1:]))
    return output if is_same else functional.interpolate(output[None].float(), size=size, mode="bilinear")[0]


def _pixels(task: DenseTask, classes: Sequence[str]) -> Array:
    """Return each class's value in a file: its name where that is a number, as in a table's masks, else its number."""
    if not classes or not all(name.isdecimal() for name in classes):
        return np.arange(task.channels, dtype=np.uint8)
    values = np.array([int(name) for name in classes])
    return values.astype(np.uint8) if values.max() <= IGNORE else values


def _stored(task: DenseTask, predicted: Tensor, pixels: Array) -> Array:
    """Return a map as files have it: the values in `pixels` of classes and, of 0 to 255, probabilities as H x W; depth
    H x W, normals 3 x H x W of float32."""
    values = predicted if task.label == "normals" else predicted.reshape(predicted.shape[-2:])
    if task.label in ("normals", "depth"):
        return values.float().numpy()
    return pixels[values.numpy()] if task.label == "classes" else values.mul(255).round().to(torch.uint8).numpy()


def _save(task: Any, maps: Sequence[Array], pixels: Array, source: Path, stem: Path) -> Path:
    """Write the maps of a file and return where: a picture of one, a volume like that of the source, or an array."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    stack = np.stack(maps)
    if source.name.lower().endswith(VOLUMES[:2]) and stack.ndim == 3:
        library = need("nibabel", "volumes")
        volume, file = library.load(source), stem.with_name(stem.name + ".nii.gz")
        library.save(library.Nifti1Image(np.moveaxis(stack, 0, 2).reshape(volume.shape), volume.affine), file)
    elif len(stack) == 1 and stack.dtype == np.uint8:
        file = stem.with_name(stem.name + ".png")
        picture = need("PIL.Image", "vision").fromarray(stack[0])
        if task.label == "classes":  # numbers as pixels, and colours to look at
            colours = np.zeros((IGNORE + 1, 3), np.uint8)
            colours[pixels] = palette(task)[: task.channels]
            picture.putpalette(colours[: int(pixels.max()) + 1].tobytes())
        picture.save(file)
    else:
        file = stem.with_name(stem.name + ".npy")
        np.save(file, stack)
    return file


def columns_of(task: Linear, predicted: Array, names: Sequence[Any]) -> dict[str, Array]:
    """Return column -> values of a task's predictions (N x channels; NaN: none): a number, each label's probability, or
    the likeliest class and each one's probability. `names` are those of labels or classes."""
    if isinstance(task, Regression):
        return {task.name: predicted[:, 0]}
    if isinstance(task, Multilabel):
        return {f"p({name})": predicted[:, place] for place, name in enumerate(names)}
    some = ~np.isnan(predicted[:, 0])
    best = np.full(len(predicted), "", object)
    best[some] = np.array([no_formula(name) for name in names], object)[predicted[some].argmax(1)]
    return {task.name: best} | {f"p({task.name}={name})": predicted[:, place] for place, name in enumerate(names)}


def _words(task: Linear, predicted: Sequence[float], names: Sequence[Any]) -> str:
    """Return a prediction in words: a number, the likeliest class with its probability, or each label with its own."""
    if isinstance(task, Regression):
        return f"{predicted[0]:.4g}"
    if isinstance(task, Multilabel):
        return ", ".join(f"{name} {share:.0%}" for name, share in zip(names, predicted, strict=True))
    best = max(range(len(predicted)), key=predicted.__getitem__)
    return f"class {names[best]} ({predicted[best]:.0%})"


def of_table(
    model: Path,
    file: Path,
    client: str | None = None,
    bundle: Bundle | None = None,
    keep: Sequence[str] = (),
    rename: Mapping[str, str] = {},
) -> Any:
    """Return a pandas.DataFrame with a row for each row of a table: the site, the columns of the table to `keep`, each
    task's prediction, probabilities.

    `model` is a run's folder or an exported model (`bundle`, if it was read before), which may take a column of texts.
    Of a run, the rows of a site get the model of the client of that name, others the model for all; with `client` all
    rows get that client's. `rename` is {name of a column in the file: its name here}. Raises UserError for a model that
    takes no table, and DataError for a table without the columns that it takes, or without one to keep.
    """
    if bundle is None and (model / ABOUT).is_file():
        bundle = Bundle.read(model)
    if bundle is not None and client not in (None, bundle.about.client):
        raise UserError(
            f"{model}: the folder holds one model, and --client chooses among the models of a run: leave --client out"
        )
    if bundle is not None and bundle.words is not None:
        return _of_texts(bundle, bundle.words, file, keep, rename)
    table, chosen = _run(model, client) if bundle is None else _bundle(bundle, model)
    kept = {*keep} - {table.site, *(each.column for each in table.inputs)}  # an input is a number, as in training
    read_rows = read(file, table.site, table.missing, _renamed(table.rename, rename), kept)
    frame, where = read_rows.frame, read_rows.where
    there = table.site is not None and table.site in frame.columns
    which, names = sites_of(read_rows, table.site if there else None)
    if client is not None:
        scaled = [client] * len(names)
    elif not there and ALL not in table.scales and len(table.scales) > 1:
        raise UserError(
            f"{where}: no column {table.site!r}, but the model scales each site by its own numbers; choose a site "
            "with --client"
        )
    else:
        scaled = names if there else [next(iter(table.scales))]
    said: list[str] = []
    x = torch.from_numpy(table.apply(read_rows, scaled, which, tell=said.append))
    for text in shortened(said):
        warn(text)
    out: dict[str, Any] = {}
    for task, about in table.tasks.items():
        output: Array | None = None
        for number, site in enumerate(names):
            rows = np.flatnonzero(which == number)
            if (module := chosen(site, task)) is None:
                continue
            with torch.inference_mode():
                parts = [module(part, (task,))[task].detach() for part in x[torch.from_numpy(rows)].split(ROWS)]
            outputs = task_of(task, about).predictions(torch.cat(parts).double())
            if output is None:
                output = np.full((len(frame), outputs.shape[1]), np.nan)
            output[rows] = outputs.numpy()
        if output is not None:
            out |= columns_of(task_of(task, about), output, about.columns or about.classes)
    if not out:
        raise UserError(f"{model}: the model has no prediction for these rows")
    return _beside(read_rows, [table.site, *keep] if there and table.site is not None else keep, out)


def _renamed(before: Mapping[str, str], now: Mapping[str, str]) -> dict[str, str]:
    """Return the names of columns as in training, except those that `now` gives."""
    return {name: new for name, new in before.items() if new not in now.values()} | dict(now)


def _beside(rows: Table, keep: Sequence[str], predicted: Mapping[str, Array]) -> DataFrame:
    """Return predictions behind the columns to keep, as these are in the table. Raises DataError where one is absent,
    or has the name of a prediction."""
    kept = {name: rows.column(name).series for name in keep}
    if both := [name for name in kept if name in predicted]:
        found = f"column {both[0]!r} has the name of a prediction, expected another column to keep beside it"
        raise DataError(f"{rows.where}: {found}")
    return DataFrame({**kept, **predicted})


def _of_texts(bundle: Bundle, words: Words, file: Path, keep: Sequence[str], rename: Mapping[str, str]) -> DataFrame:
    """Return the predictions for each row of a table with a column of texts; a row without a word has none."""
    if not all(isinstance(task, Linear) for task in bundle.tasks):
        raise UserError(f"{file}: the model predicts maps, expected classes or numbers for each text")
    about = bundle.recipe.data.arguments
    names = _renamed(about.get("rename") or {}, rename)
    rows = read(file, about.get("domain"), about.get("missing") or (), names, keep)
    texts, there = texts_of(rows, words.column)
    need_memory(8 * len(there) * words.length, f"{file}: the tokens of {len(there):,} texts")
    outputs = [*_outputs(bundle, torch.from_numpy(words.tokens([texts[row] for row in there])))]
    out: dict[str, Array] = {}
    for task in bundle.tasks:
        assert isinstance(task, Linear)
        predicted = np.full((len(texts), task.channels), np.nan)
        predicted[there] = task.predictions(torch.stack([each[task.name] for each in outputs]).double()).numpy()
        out |= columns_of(task, predicted, _names(bundle, task)[1])
    return _beside(rows, keep, out)


def _bundle(bundle: Bundle, folder: Path) -> tuple[Preprocessing, Chosen]:
    if bundle.about.table is None:
        advice = "predict the images, not the table that names them" if is_image(bundle.about.input_shape) else ""
        raise UserError(f"{folder}: expected a model that was trained on a table{advice and '; ' + advice}")
    tasks = {task.name for task in bundle.tasks}
    return bundle.about.table, lambda site, task: bundle.module if task in tasks else None


def _run(folder: Path, client: str | None) -> tuple[Preprocessing, Chosen]:
    run, recipe = Run.read(folder), recipe_in(folder)
    if "table" not in run.info:
        raise UserError(f"{folder}: expected a run that was trained on a table; of another, `fedloom export` its model")
    table = section_of(Preprocessing, run.info["table"], f"{folder}/run.json, table", StateError)
    clients = run.info["clients"]
    if client is not None and client not in clients:
        raise UserError(f"{folder}: no client {client!r}. {listed('Clients', client, clients)}")
    tasks = [task_of(name, label) for name, label in table.tasks.items()]
    models, shape = trained_models(folder), (len(table.names),)
    alone = next(iter(clients)) if len(clients) == 1 else None  # as at a node
    modules: dict[str, MultiTask] = {}

    def chosen(site: str, task: str) -> MultiTask | None:
        who = client or (site if site in clients else alone)
        key = model_key(models, who, task)
        if key is None:
            whose = f"site {site!r} is no client of the run" if site != EVERYONE else "the rows have no site"
            raise UserError(f"{folder}: {whose}, and the run has no global model; choose a client with --client "
                            f"({', '.join(list(clients)[:5])} ...)")  # fmt: skip
        if who is not None and key == who and task not in clients[who]["tasks"]:
            return None  # its head was never trained
        if key not in modules:
            module = network(recipe, shape, Signal(kind="features"), tasks)
            fill(module, of_tasks(models[key], {*table.tasks}), folder, key)
            modules[key] = module.eval()
        return modules[key]

    return table, chosen
