"""One model of a finished run in a folder of its own: weights, a card, and what it takes to use it again.

Without fedloom the weights are named tensors; where they are a network of timm and linear heads, `load.py` beside them
loads them with timm and torch alone. Nothing is pickled.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BaseModel, Field, FiniteFloat, TypeAdapter, ValidationError, model_validator
from safetensors.torch import load_file
from torch import Tensor

from fedloom import tasks as task_classes
from fedloom._version import __version__
from fedloom.core.errors import StateError, UserError, at, check_empty, choices, naming, parsing
from fedloom.core.lazy import need
from fedloom.core.settings.trust import Origin
from fedloom.data.dataset import Examples, JoinedExamples, normal
from fedloom.data.drawing import Cell, grid, label
from fedloom.data.inputs import FORMATS
from fedloom.data.tables.preprocessing import Preprocessing
from fedloom.engines.result import model_keys, trained_models
from fedloom.experiments.export.card import LOADER, RECIPE, WEIGHTS, card, is_image, loader, loader_fits
from fedloom.experiments.export.finished import reopen
from fedloom.federation.recipes.loader import dump, load
from fedloom.federation.recipes.schema import Recipe
from fedloom.federation.rounds.build import method_of
from fedloom.federation.rounds.built import Built
from fedloom.federation.runs.checkpoint import save_tensors
from fedloom.federation.runs.reader import Run
from fedloom.models.build import build_model
from fedloom.models.changes import changed
from fedloom.models.multitask import MultiTask
from fedloom.models.signal import Signal
from fedloom.models.tasks.dense import DenseTask, as_label
from fedloom.models.tasks.regression import Regression
from fedloom.models.tasks.task import Task

ABOUT, CARD, CONFIG = "export.json", "README.md", "config.json"
LICENCE = r"[A-Za-z0-9][A-Za-z0-9.+-]*"
"""An identifier of a licence."""


def export(
    run: Path,
    out: Path,
    client: str | None = None,
    task: str | None = None,
    licence: str = "unknown",
    hub: bool = False,
) -> Path:
    """Write a model of a finished run to the new or empty folder `out`, which is returned.

    The global model, or the one that `client` uses; with `task`, without the heads and decoders of other tasks. The
    run's data are loaded, for they say how inputs are normalised. `licence` is the identifier that the card gives.
    `hub` makes it a model repository of Hugging Face: a config.json, and what was measured in the card's head.

    Raises StateError where the run is not finished or `out` is not empty, UserError for a client or a task that is not
    there or that must be named, and for a licence that is no identifier.
    """
    if not re.fullmatch(LICENCE, licence):
        raise UserError(f"licence {licence!r}: expected an identifier, such as apache-2.0, cc-by-nc-4.0 or unknown")
    check_empty(out)
    built, _ = reopen(run)
    models = trained_models(run)
    clients = built.federation.clients
    if client is not None and client not in clients:
        raise UserError(f"{run}: no client {client!r}.{choices('Clients', client, clients)}")
    held = [t for t in built.federation.tasks if client is None or t.name in clients[client].tasks]
    if task is not None and task not in {t.name for t in held}:
        names = [t.name for t in held]
        whose = "the run" if client is None else f"client {client!r}"
        raise UserError(f"{run}: {whose} has no task {task!r}.{choices('Tasks', task, names)}")
    key = _key(run, models, client, task)
    wanted = [t for t in held if task in (None, t.name)]
    mine = _of_tasks(models[key], {t.name for t in wanted})
    said = _about(built, key, client, wanted, licence)
    files = {RECIPE: dump(built.recipe), CARD: card(built, Run.read(run), said, wanted, client, hub)}
    if hub:  # with the keys by which the hub finds models
        kind = {"model_type": "fedloom", "architectures": [type(built.module.encoder).__name__]}
        files[CONFIG] = json.dumps({**kind, **said}, indent=1)
    return write(out, built.module, mine, wanted, said, files)


def write(
    out: Path,
    module: MultiTask,
    state: Mapping[str, Tensor],
    wanted: Sequence[Task],
    about: Mapping[str, Any],
    files: Mapping[str, str],
) -> Path:
    """Write weights, export.json, other files, and load.py where that loads it, to the folder `out`; return it."""
    out.mkdir(parents=True, exist_ok=True)
    save_tensors({name: tensor.contiguous() for name, tensor in state.items()}, out / WEIGHTS, {"format": "pt"})
    texts = {ABOUT: json.dumps(about, indent=1), **files}
    if loader_fits(module, wanted):
        texts[LOADER] = loader(module, about, wanted)
    for name, text in texts.items():
        with naming(out / name):
            (out / name).write_text(text, encoding="utf-8")
    return out


def _key(run: Path, models: Mapping[str, Any], client: str | None, task: str | None) -> str:
    """Return the name of one of a run's models in `trained_models`."""
    owner = next((key for key in model_keys(client, task) if key in models), None)
    if owner is not None:
        return owner
    if any(key.startswith("task/") or "/task/" in key for key in models) and task is None:
        raise UserError(f"{run}: each task has its own model; choose a task with --task")
    owners = sorted({key.partition("/task/")[0] for key in models if not key.startswith("task/")})
    raise UserError(f"{run}: the run has no global model; choose a client with --client ({', '.join(owners)})")


def _of_tasks(state: Mapping[str, Tensor], tasks: set[str]) -> dict[str, Tensor]:
    """Return the tensors of a model without those of other tasks."""
    owner = {name: name.split(".")[1] for name in state if name.split(".")[0] in ("decoders", "heads")}
    return {name: tensor for name, tensor in state.items() if owner.get(name) in (None, *tasks)}


def _about(built: Built, key: str, client: str | None, wanted: Sequence[Task], licence: str) -> dict[str, Any]:
    """Return what export.json says; `key` is the model's name in `trained_models`."""
    part, mean, std = _inputs(built, client, wanted)
    owner = client if client is not None and key in (client, f"{client}/task/{wanted[0].name}") else None
    of = built.recipe.name, built.recipe.seed, built.method.name
    said = about(*of, licence, wanted, part.input_shape, built.dataset.signal, mean, std, built.dataset.table)
    return {**said, "client": owner, "task": wanted[0].name if re.search(r"(^|/)task/", key) else None}


def about(
    recipe: str,
    seed: int,
    method: str,
    licence: str,
    tasks: Sequence[Task],
    shape: Sequence[int],
    signal: Signal | None,
    mean: Sequence[float] | None,
    std: Sequence[float] | None,
    table: Preprocessing | None = None,
) -> dict[str, Any]:
    """Return what export.json says of a model for all clients: made by what, of which inputs and tasks."""
    return {
        "fedloom": __version__,
        "recipe": recipe,
        "method": method,
        "seed": seed,
        "licence": licence,
        "client": None,
        "task": None,
        "input_shape": list(shape),
        "signal": None if signal is None else signal.model_dump(),
        "mean": None if mean is None else list(mean),
        "std": None if std is None else list(std),
        "tasks": described(tasks),
        "table": None if table is None else table.model_dump(mode="json"),
    }


def described(tasks: Sequence[Task]) -> list[dict[str, Any]]:
    """Tasks as export.json has them."""
    return [{"class": type(t.known).__name__, **asdict(t.known)} for t in tasks]


def _inputs(
    built: Built, client: str | None, wanted: Sequence[Task]
) -> tuple[Examples, list[float] | None, list[float] | None]:
    """(examples of these tasks, mean and standard deviation of each channel that they are normalised with)."""
    federation, part = built.federation, built.dataset.test
    holders = [federation.holder(t.name) if client is None else federation.clients[client] for t in wanted]
    tests = [holder.test.of(task.name).index for holder, task in zip(holders, wanted, strict=True)]
    index = torch.cat(tests)
    if isinstance(part, JoinedExamples):
        _, part, index = part.piece(tests[0])
    statistics = normal(part, index)
    if statistics is None:
        return part, *_before_encoder(built, None, None)
    each = torch.cat(statistics, 1).unique(dim=0)
    if len(each) > 1:
        names = ", ".join(task.name for task in wanted)
        raise UserError(
            f"the inputs of the tasks {names} are normalised in {len(each)} ways, one per set of images; choose "
            "one task with --task"
        )
    mean, std = each[0].tensor_split(2)
    return part, *_before_encoder(built, mean.tolist(), std.tolist())


def _before_encoder(
    built: Built, mean: list[float] | None, std: list[float] | None
) -> tuple[list[float] | None, list[float] | None]:
    """How images reach the encoder: as the data set has them, or as its weights want them (`model.inputs`)."""
    seen = built.module.encoder.seen
    return (mean, std) if built.module.rescale is None or seen is None else (list(seen[0]), list(seen[1]))


class _About(BaseModel):
    """export.json, as far as a bundle needs it."""

    tasks: list[dict[str, Any]]
    input_shape: Annotated[list[Annotated[int, Field(ge=1, lt=1 << 31)]], Field(min_length=1, max_length=4)]
    signal: Signal | None = None
    mean: list[FiniteFloat] | None
    std: list[Annotated[FiniteFloat, Field(gt=0)]] | None
    licence: Annotated[str, Field(pattern=f"^{LICENCE}$")] = "unknown"
    client: str | None = None
    table: Preprocessing | None = None

    @model_validator(mode="after")
    def _fits(self) -> _About:
        for key, values in {"mean": self.mean, "std": self.std}.items():
            if values is not None and len(values) not in (1, self.input_shape[0]):
                raise ValueError(f"{key}: {len(values)} values found, expected {self.input_shape[0]}")
        return self


@dataclass(frozen=True, eq=False)
class Bundle:
    """An exported model, ready for use."""

    module: MultiTask
    tasks: tuple[Task, ...]
    input_shape: tuple[int, ...]
    mean: tuple[float, ...] | None
    std: tuple[float, ...] | None
    signal: Signal | None
    recipe: Recipe
    licence: str
    client: str | None = None
    """The client whose model it is; None for the model of all."""
    table: Preprocessing | None = None
    """How the columns of a table become inputs; None where inputs are no table."""

    @staticmethod
    def read(folder: Path) -> Bundle:
        """Read a folder that `export` wrote. Raises StateError where it holds something else."""
        if not (folder / ABOUT).is_file():
            raise StateError(
                f"{folder} is not an exported model, because it has no {ABOUT}; run `fedloom export RUN` first"
            )
        try:
            about = _About.model_validate_json((folder / ABOUT).read_bytes())
            tasks = tuple(_task(folder, value) for value in about.tasks)
            recipe, shape = load(folder / RECIPE, origin=Origin.ELSEWHERE), tuple(about.input_shape)
            with at(f"{folder / ABOUT}"):
                module = network(recipe, shape, about.signal, tasks)
            with parsing(f"{folder / WEIGHTS}: cannot be read"):
                weights = load_file(folder / WEIGHTS)
            module.load_state_dict(weights)
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise StateError(f"{folder / ABOUT} cannot be read: {error!r}") from error
        except RuntimeError as error:
            raise StateError(f"{folder / WEIGHTS} does not fit {RECIPE}: {error}") from None
        mean, std = (None if v is None else tuple(v) for v in (about.mean, about.std))
        return Bundle(
            module.eval(), tasks, shape, mean, std, about.signal, recipe, about.licence, about.client, about.table
        )

    def input(self, file: Path) -> tuple[Tensor, Any]:
        """Return (an image as the model takes it, C x H x W; the same image to look at, H x W x 3 of uint8).

        The image is resized to the size that the model was trained on. Raises UserError where it cannot be read.
        """
        library = need("PIL.Image", "vision")
        if not is_image(self.input_shape):
            raise UserError(f"{file}: the model takes inputs of shape {self.input_shape}, which are not images")
        channels, height, width = self.input_shape
        try:
            with library.open(file, formats=FORMATS) as opened:
                image = opened.convert("L" if channels == 1 else "RGB")
        except (OSError, library.DecompressionBombError) as error:
            raise UserError(f"{file} cannot be read as an image: {error}") from None
        image = image.resize((width, height), library.Resampling.BILINEAR)
        raw = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
        raw = raw.view(height, width, channels).permute(2, 0, 1)
        x = raw.float().div(255)
        if self.mean is not None and self.std is not None:
            x = (x - torch.tensor(self.mean).view(-1, 1, 1)) / torch.tensor(self.std).view(-1, 1, 1)
        return x, raw.expand(3, -1, -1).permute(1, 2, 0).contiguous().numpy()

    def predict(self, files: Sequence[Path]) -> tuple[list[dict[str, str]], Any]:
        """(for each file, task -> the answer in words where it is one; a picture of all inputs and answers)."""
        texts: list[dict[str, str]] = []
        rows: list[list[Cell]] = []
        for file in files:
            x, shown = self.input(file)
            with torch.inference_mode():
                outputs = self.module(x[None], [task.name for task in self.tasks])
            cells: list[Cell] = [(shown, file.name)]
            words = {}
            for task in self.tasks:
                output = outputs[task.name][0]
                if isinstance(task, DenseTask):
                    cells.append(label(task, as_label(task, output)))
                    continue
                words[task.name] = _words(task, output)
                cells.append((None, words[task.name]))
            texts.append(words)
            rows.append(cells)
        return texts, grid(["input", *(task.name for task in self.tasks)], rows)


def _words(task: Task, output: Tensor) -> str:
    if isinstance(task, Regression):
        return f"{float(output[0]) * task.std + task.mean:.4g}"
    share = output.softmax(0)
    best = int(share.argmax())
    return f"class {best} ({float(share[best]):.0%})"


def _task(folder: Path, value: dict[str, Any]) -> Task:
    name = value.pop("class")
    known = getattr(task_classes, name, None) if name in task_classes.__all__ else None
    if not (isinstance(known, type) and issubclass(known, Task)):
        raise StateError(f"{folder / ABOUT}: unknown kind of task {name!r}")
    try:
        task: Task = TypeAdapter(known).validate_python(value)
    except ValidationError as error:
        raise StateError(f"{folder / ABOUT}: task {value.get('name')!r}: {error}") from None
    return task


def network(recipe: Recipe, shape: tuple[int, ...], signal: Signal | None, tasks: Sequence[Task]) -> MultiTask:
    """Return the model as the run had it, with initial weights: what is loaded replaces them all."""
    model = recipe.model
    params = {k: False if k == "pretrained" else v for k, v in model.arguments.items()}
    module = build_model(model.entry, params, shape, tasks, recipe.seed, None, model.lora, signal)
    return changed(module, method_of(recipe).model, shape, recipe.seed)
