"""One model of a finished run in a folder of its own: weights, a card, and what it takes to use it again.

Without fedloom the weights are named tensors; where they are a network of timm and linear heads, `load.py` beside them
loads them with timm and torch alone. Nothing is pickled.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fedloom import tasks as task_classes
from fedloom._version import __version__
from fedloom.data.dataset import Examples
from fedloom.data.joined import JoinedExamples
from fedloom.data.preview import Cell, grid, label, normal
from fedloom.engines.api import trained_models
from fedloom.errors import StateError, UserError, nearest
from fedloom.export.finished import model_keys
from fedloom.extras import need
from fedloom.models.changes import changed
from fedloom.models.multitask import MultiTask, build_model
from fedloom.models.nets import PyramidEncoder
from fedloom.recipes.loader import dump, load
from fedloom.recipes.schema import Recipe
from fedloom.rounds.build import Built, build, method_of
from fedloom.rounds.federation import Client
from fedloom.runs.folder import RunFolder
from fedloom.runs.reader import Run, TaskMetric, human_bytes
from fedloom.tasks.dense import DenseTask, as_label
from fedloom.tasks.regression import Regression
from fedloom.tasks.task import Task

ABOUT, WEIGHTS, CARD, LOADER, RECIPE = "export.json", "model.safetensors", "README.md", "load.py", "recipe.yaml"


def export(run: Path, out: Path, client: str | None = None, task: str | None = None, licence: str = "unknown") -> Path:
    """Write a model of a finished run to the new or empty folder `out`, which is returned.

    The global model, or the one that `client` uses; with `task`, without the heads and decoders of other tasks. The
    run's data are loaded, for they say how inputs are normalised. `licence` is the identifier that the card gives.

    Raises StateError where the run is not finished or `out` is not empty, UserError for a client or a task that is not
    there or that must be named, and for a licence that is no identifier.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9.+-]*", licence):
        raise UserError(f"licence {licence!r}: expected an identifier, such as apache-2.0, cc-by-nc-4.0 or unknown")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise StateError(f"{out} exists and is not empty; choose another folder")
    recipe, partition = RunFolder.read(run)
    models = trained_models(run)
    built = build(recipe, partition=partition)
    clients = built.federation.clients
    if client is not None and client not in clients:
        raise UserError(f"{run}: no client {client!r}.{nearest(client, clients)} Clients: {', '.join(clients)}")
    held = [t for t in built.federation.tasks if client is None or t.name in clients[client].tasks]
    if task is not None and task not in {t.name for t in held}:
        names = [t.name for t in held]
        whose = "the run" if client is None else f"client {client!r}"
        raise UserError(f"{run}: {whose} has no task {task!r}.{nearest(task, names)} Tasks: {', '.join(names)}")
    key = _key(run, models, client, task)
    wanted = [t for t in held if task in (None, t.name)]
    mine = _of_tasks(models[key], {t.name for t in wanted})
    about = _about(built, key, client, wanted, licence)
    out.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in mine.items()}, out / WEIGHTS, metadata={"format": "pt"})
    files = {
        ABOUT: json.dumps(about, indent=1),
        RECIPE: dump(recipe),
        CARD: _card(built, Run.read(run), about, wanted, client),
    }
    loader = _loader(built.module, about, wanted)
    if loader is not None:
        files[LOADER] = loader
    for name, text in files.items():
        (out / name).write_text(text, encoding="utf-8")
    return out


def _key(run: Path, models: Mapping[str, Any], client: str | None, task: str | None) -> str:
    """Which of a run's models is meant, by its name in `trained_models`."""
    found = next((key for key in model_keys(client, task) if key in models), None)
    if found is not None:
        return found
    if any(key.startswith("task/") or "/task/" in key for key in models) and task is None:
        raise UserError(f"{run}: each task has a model of its own; name one with --task")
    owners = sorted({key.partition("/task/")[0] for key in models if not key.startswith("task/")})
    raise UserError(
        f"{run}: there is no global model; name the client whose model is meant with --client ({', '.join(owners)})"
    )


def _of_tasks(state: Mapping[str, Tensor], tasks: set[str]) -> dict[str, Tensor]:
    """Without what belongs to other tasks."""
    owner = {name: name.split(".")[1] for name in state if name.split(".")[0] in ("decoders", "heads")}
    return {name: tensor for name, tensor in state.items() if owner.get(name) in (None, *tasks)}


def _about(built: Built, key: str, client: str | None, wanted: Sequence[Task], licence: str) -> dict[str, Any]:
    """What export.json says; `key` is the model's name in `trained_models`."""
    part, mean, std = _inputs(built, client, wanted)
    return {
        "fedloom": __version__,
        "recipe": built.recipe.name,
        "method": built.method.name,
        "seed": built.recipe.seed,
        "licence": licence,
        "client": client if client is not None and key in (client, f"{client}/task/{wanted[0].name}") else None,
        "task": wanted[0].name if re.search(r"(^|/)task/", key) else None,
        "input_shape": list(part.input_shape),
        "mean": mean,
        "std": std,
        "tasks": [{"class": type(t).__name__, **asdict(t)} for t in wanted],
    }


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
    found = normal(part, index)
    if found is None:
        return part, None, None
    each = torch.cat(found, 1).unique(dim=0)
    if len(each) > 1:
        names = ", ".join(task.name for task in wanted)
        raise UserError(
            f"the inputs of tasks {names} are normalised in {len(each)} ways, for each set of images has its own; name "
            "one task with --task"
        )
    mean, std = each[0].tensor_split(2)
    return part, mean.tolist(), std.tolist()


def _card(built: Built, run: Run, about: Mapping[str, Any], wanted: Sequence[Task], client: str | None) -> str:
    """The model card: which model, of what, with which data, measured how, at what cost."""
    owner = " and ".join(f"{what} {_plain(about[what])}" for what in ("client", "task") if about[what] is not None)
    shape = " x ".join(map(str, about["input_shape"]))
    mean, std = (None if about[k] is None else ", ".join(f"{v:.4g}" for v in about[k]) for k in ("mean", "std"))
    normalised = "as they are" if mean is None else f"normalised (mean {mean}; standard deviation {std})"
    sent = run.bytes_total()
    data = _plain(run.recipe["data"]["name"])
    return "\n".join(
        [
            "---",
            f"license: {about['licence']}",
            "library_name: fedloom",
            "tags: [federated-learning, multi-task-learning]",
            "---",
            "",
            f"# {_plain(about['recipe'])}: {_plain(about['method'])}",
            "",
            f"This is {f'the model of {owner}' if owner else 'the global model'} of a federated run of "
            f"{len(run.info['clients'])} clients and {run.last_round} rounds.",
            "",
            f"- Tasks: {', '.join(f'{t.name} ({t.kind}, {t.channels})' for t in wanted)}",
            f"- Input: {shape}, {'values of 0 to 1, ' if len(about['input_shape']) == 3 else ''}{normalised}",
            f"- Data: {data}; partition: {_plain(run.recipe['partition']['name'])}",
            f"- Method: {_plain(about['method'])}; seed {about['seed']}; fedloom {about['fedloom']}; {RECIPE} says all",
            f"- Sent over the run: {human_bytes(sent['up'])} by clients, {human_bytes(sent['down'])} to clients",
            f"- Licence: {about['licence']}. Weights inherit what the licence of the data asks for, and that of "
            "pretrained weights where training began from some.",
            "",
            "## Splits",
            "",
            *_splits(built.federation.clients, client),
            "",
            "## Measured",
            "",
            *_measured(run, about, {t.name for t in wanted}, client),
            "",
            "## Use",
            "",
            *_used(built.module, about, wanted),
            "",
            "No statement is made about other data than that, nor about what can be told from the weights about the "
            "clients' data.",
            "",
        ]
    )


def _splits(clients: Mapping[str, Client], client: str | None) -> list[str]:
    """A table of how many examples the clients have; a part that several share counts once."""
    rows = [["part", "examples", "of each client"]]
    for split in ("train", "val", "test"):
        parts = [c.part(split) for c in clients.values()]
        shared = any(part.name == "shared" for part in parts)
        total = sum(len(part) for part in ({id(part): part for part in parts}.values()))
        sizes = sorted({len(part) for part in parts})
        each = f"{sizes[0]:,}" if len(sizes) == 1 else f"{sizes[0]:,} to {sizes[-1]:,}"
        rows.append([split + (" (shared)" if shared else ""), f"{total:,}", each])
        if client is not None:
            rows[-1].append(f"{len(clients[client].part(split)):,}")
    if client is not None:
        rows[0].append(f"of client {_plain(client)}")
    return _table(rows)


def _measured(run: Run, about: Mapping[str, Any], tasks: set[str], client: str | None) -> list[str]:
    """What the run measured of the very model, not of the personal ones of clients beside it."""
    if about["client"] is None and about["task"] is None:
        only = [{**line, "metrics": [m for m in line["metrics"] if m["model"] == "global"]} for line in run.rounds]
        run = replace(run, rounds=tuple(only))
    try:
        final = run.by_client()[client] if client is not None else run.final()
    except (StateError, KeyError):
        return ["The run did not measure this model on test data."]
    rows = [["task", "value"]] + [
        [str(TaskMetric(task, metric, run.direction(task, metric))), f"{value:.4f}"]
        for task, values in final.values.items()
        if task in tasks
        for metric, value in values.items()
        if not math.isnan(value)
    ]
    whose = ":" if client is not None else ", mean over the clients with the task:"
    return [f"In round {final.round}, on {', '.join(final.data)} data{whose}", "", *_table(rows)]


def _used(module: MultiTask, about: Mapping[str, Any], wanted: Sequence[Task]) -> list[str]:
    """How to use the model."""
    if not _is_image(about["input_shape"]):
        return ["`fedloom.export.bundle.Bundle.read(FOLDER).module` is the model; its inputs are no images."]
    loads = f"`{LOADER}` loads it without fedloom, with torch and timm."
    fits = _loader_fits(module, wanted)
    return ["```console", "fedloom predict . image.png", "```", *(["", loads] if fits else [])]


def _is_image(shape: Sequence[int]) -> bool:
    return len(shape) == 3 and shape[0] in (1, 3)


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table; the first row is its head."""
    head, *body = (f"| {' | '.join(row)} |" for row in rows)
    return [head, "|---" * len(rows[0]) + "|", *body]


def _plain(text: str) -> str:
    """A name in Markdown, in one line, that cannot be anything but text."""
    return re.sub(r"([\\`*\[\]<>|])", r"\\\1", " ".join(str(text).split()))


def _loader_fits(module: MultiTask, wanted: Sequence[Task]) -> bool:
    """Whether the model is a network as timm makes it, pruned to its maps or not, with linear heads."""
    encoder = module.encoder
    made = getattr(encoder, "made", None)
    if made is None or not all(type(module.heads[task.name]) is nn.Linear for task in wanted):
        return False
    plain = need("timm", "vision").create_model(**made, pretrained=False, num_classes=0)
    if isinstance(encoder, PyramidEncoder):
        plain.prune_intermediate_layers(encoder.levels, prune_norm=True, prune_head=True)
    # with adapters, modules of a method, or norms of its own it is more than that
    mine = {key for key in module.state_dict() if not key.startswith("heads.")}
    return mine == {f"encoder.net.{key}" for key in plain.state_dict()}


def _loader(module: MultiTask, about: Mapping[str, Any], wanted: Sequence[Task]) -> str | None:
    """A script that loads the model without fedloom, or None where that takes more than timm and linear layers."""
    if not _loader_fits(module, wanted):
        return None
    made: Mapping[str, Any] = module.encoder.made  # type: ignore[assignment]
    levels = module.encoder.levels if isinstance(module.encoder, PyramidEncoder) else None
    heads = {t.name: (module.heads[t.name].in_features, module.heads[t.name].out_features) for t in wanted}
    return f'''"""The model of this folder with torch and timm alone. `python {LOADER} IMAGE...` prints its outputs."""

import sys
from pathlib import Path

import timm
import torch
from safetensors.torch import load_file

SHAPE = {tuple(about["input_shape"])!r}  # channels, height, width
MEAN, STD = {about["mean"]!r}, {about["std"]!r}
HEADS = {heads!r}  # task: features, outputs
LEVELS = {levels!r}  # maps that the network was trained with, the last of which is read; None: its own features


def load(file=Path(__file__).with_name({WEIGHTS!r})):
    """(encoder, {{task: head}})."""
    state = load_file(file)

    def below(prefix):
        return {{k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}}

    encoder = timm.create_model(**{dict(made)!r}, pretrained=False, num_classes=0)
    if LEVELS is not None:
        encoder.prune_intermediate_layers(LEVELS, prune_norm=True, prune_head=True)
    encoder.load_state_dict(below("encoder.net."))
    heads = torch.nn.ModuleDict({{task: torch.nn.Linear(*size) for task, size in HEADS.items()}})
    heads.load_state_dict(below("heads."))
    return encoder.eval(), heads.eval()


def features(encoder, x):
    """What the heads read (N x F), of images N x C x H x W."""
    if LEVELS is None:
        return encoder(x)
    maps = encoder.forward_intermediates(x, indices=LEVELS, output_fmt="NCHW", intermediates_only=True)
    return maps[-1].mean((2, 3))


def read(path):
    """An image as the model takes it (1 x C x H x W)."""
    import numpy as np
    from PIL import Image

    image = Image.open(path).convert("L" if SHAPE[0] == 1 else "RGB").resize(SHAPE[:0:-1], Image.Resampling.BILINEAR)
    x = torch.from_numpy(np.array(image)).float().div(255).reshape(*SHAPE[1:], SHAPE[0]).permute(2, 0, 1)[None]
    if MEAN is None:
        return x
    return (x - torch.tensor(MEAN).view(1, -1, 1, 1)) / torch.tensor(STD).view(1, -1, 1, 1)


if __name__ == "__main__":
    encoder, heads = load()
    for path in sys.argv[1:]:
        with torch.inference_mode():
            found = features(encoder, read(path))
            for task, head in heads.items():
                print(path, task, head(found)[0].tolist())
'''


@dataclass(frozen=True, eq=False)
class Bundle:
    """An exported model, ready for use."""

    module: MultiTask
    tasks: tuple[Task, ...]
    input_shape: tuple[int, ...]
    mean: tuple[float, ...] | None
    std: tuple[float, ...] | None

    @staticmethod
    def read(folder: Path) -> Bundle:
        """Read what `export` wrote. Raises StateError where it is not that, or does not fit its own recipe."""
        if not (folder / ABOUT).is_file():
            raise StateError(f"{folder} is no exported model: it has no {ABOUT}; `fedloom export RUN` makes one")
        try:
            about = json.loads((folder / ABOUT).read_text("utf-8"))
            tasks = tuple(_task(folder, dict(value)) for value in about["tasks"])
            shape = tuple(int(n) for n in about["input_shape"])
            mean, std = (None if about[k] is None else tuple(map(float, about[k])) for k in ("mean", "std"))
            recipe = load(folder / RECIPE)
            module = _module(recipe, shape, tasks)
            module.load_state_dict(load_file(folder / WEIGHTS))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise StateError(f"{folder / ABOUT} cannot be read: {error!r}") from error
        except RuntimeError as error:
            raise StateError(f"{folder / WEIGHTS} does not fit {RECIPE}: {error}") from None
        return Bundle(module.eval(), tasks, shape, mean, std)

    def input(self, file: Path) -> tuple[Tensor, Any]:
        """(an image file as the model takes it, C x H x W; the same to look at, H x W x 3 of uint8).

        It is resized to the size that the model was trained on. Raises UserError where it cannot be read.
        """
        library = need("PIL.Image", "vision")
        if not _is_image(self.input_shape):
            raise UserError(f"{file}: the model takes inputs of shape {self.input_shape}, which are no images")
        channels, height, width = self.input_shape
        try:
            with library.open(file) as opened:
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


def _module(recipe: Recipe, shape: tuple[int, ...], tasks: Sequence[Task]) -> MultiTask:
    """The model as the run had it, with initial weights: what is loaded replaces them all."""
    model = recipe.model
    params = {k: False if k == "pretrained" else v for k, v in model.params.items()}
    module = build_model(model.name, params, shape, tasks, recipe.seed, None, model.lora)
    return changed(module, method_of(recipe, None).model, shape, recipe.seed)
