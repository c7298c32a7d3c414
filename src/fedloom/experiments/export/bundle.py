"""One model of a finished run in a folder of its own: weights, a card, and what it takes to use it again.

Without fedloom the weights are named tensors; where they are a network of timm and linear heads, `load.py` beside them
loads them with timm and torch alone. Nothing is pickled.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from string import Template
from typing import Annotated, Any, Literal, get_args

import torch
from jinja2 import Environment
from pydantic import Field
from safetensors.torch import load_file
from torch import Tensor, nn

from fedloom._version import __version__
from fedloom.core.disclosure import shown
from fedloom.core.errors import StateError, UserError, at, check_empty, choices, naming, parsing, warn
from fedloom.core.lazy import need
from fedloom.core.settings.section import Positive, Problems, Section, found
from fedloom.core.settings.trust import Origin
from fedloom.core.settings.yaml import section_of
from fedloom.data.dataset import Examples, JoinedExamples, normal
from fedloom.data.inputs import Fit
from fedloom.data.tables.preprocessing import ALL, Preprocessing
from fedloom.data.tables.table import task_of
from fedloom.data.texts import Words, words_in
from fedloom.data.transforms import Crop, Dense
from fedloom.engines.flower.nodes import Elsewhere
from fedloom.engines.result import Result, check_model, model_key, trained_models
from fedloom.experiments.export.finished import reopen
from fedloom.federation.recipes.loader import dump, load
from fedloom.federation.recipes.schema import Recipe
from fedloom.federation.rounds.build import method_of
from fedloom.federation.rounds.built import Built
from fedloom.federation.rounds.federation import BuiltClient
from fedloom.federation.runs.checkpoint import save_tensors
from fedloom.federation.runs.reader import Final, Run, TaskMetric, human_bytes
from fedloom.federation.runs.recorded import json_of, sum_of
from fedloom.models.build import build_model
from fedloom.models.changes import PublicOutputs, changed
from fedloom.models.multitask import MultiTask
from fedloom.models.nets import PyramidEncoder, check_weights
from fedloom.models.signal import Signal
from fedloom.models.tasks.task import Task, as_plain, as_task

ABOUT, CARD, CONFIG = "export.json", "README.md", "config.json"
RECIPE, WEIGHTS, LOADER, WORDS = "recipe.yaml", "model.safetensors", "load.py", "words.txt"
_SOME, OFF = 64, 1e-3
"""The number of inputs that are looked at, and how far beyond 0 to 1 they may lie by rounding."""
LICENCE = r"[A-Za-z0-9][A-Za-z0-9.+-]*"
"""An identifier of a licence."""


class About(Section):
    """export.json: what made the model, and what it takes and predicts.

    It has no checksum of its own, for people edit it (the licence, names of classes): each key is checked instead.
    """

    fedloom: str = __version__
    recipe: str = ""
    method: str = ""
    seed: int = 0
    licence: Annotated[str, Field(pattern=f"^{LICENCE}$", description="an identifier, such as mit")] = "unknown"
    client: str | None = None
    """The client whose model it is; None for the model of all."""
    task: str | None = None
    """The task whose model it is, where each has its own."""
    input_shape: Annotated[list[Annotated[int, Field(ge=1, lt=1 << 31)]], Field(min_length=1, max_length=4)]
    signal: Signal | None = None
    mean: list[float] | None
    std: list[Positive] | None
    pixels: Fit | Literal["stored", "stretched", "pad"] | None = "stretch"
    """The way in which the file of a picture gets the inputs' size. "stored": inputs are the numbers in files of more
    than 8 bits (volumes, 16-bit images), at the files' size; "stretched": at the inputs' size. "pad": pictures keep
    their size, and the mean colour fills the rest. None: no picture becomes an input, because the model was trained on
    arrays of other values than a picture's, which are 0 to 1, or on computed features."""
    bytes: bool | None = None
    """True: the inputs of training were uint8, which became 0 to 1. None in folders of earlier versions."""
    turned: bool = False
    """True: the last two axes of arrays were exchanged."""
    tasks: list[dict[str, Any]]
    classes: dict[str, list[str]] = Field(default_factory=dict)
    """Task -> the names of its classes, where they have names and inputs are no table."""
    table: Preprocessing | None = None
    """The rules by which columns of a table become inputs; None where inputs are no table."""
    text: str | None = None
    """The column of texts, whose words are those of words.txt; None where inputs are no texts."""
    weights_sha256: str | None = None
    """The checksum of the weights; None where an earlier version wrote the folder."""

    def _problems(self) -> Problems:
        for key, values in {"mean": self.mean, "std": self.std}.items():
            if values is not None and len(values) not in (1, self.input_shape[0]):
                yield key, f"{len(values)} values found, expected {self.input_shape[0]}"
        channels = {str(task.get("name")): task.get("channels") for task in self.tasks}
        for name, classes in self.classes.items():
            if (expected := channels.get(name, len(classes))) != len(classes):
                yield f"classes.{name}", f"{len(classes)} names found, expected {found(expected)}"
        if self.text is not None and (len(self.input_shape) > 1 or self.signal is None or not self.signal.digest):
            yield (
                "text",
                f"{found(self.text)} found, expected null, for the inputs are not the tokens of a list of words",
            )
        if self.table is None:
            return
        if [len(self.table.names)] != self.input_shape:
            yield "table.inputs", f"inputs for {len(self.table.names)} numbers found, input_shape is {self.input_shape}"
        for task in self.tasks:
            name = str(task.get("name"))
            if name not in self.table.tasks:
                yield "table.tasks", f"no {name!r} found, expected each name in the key tasks"
                continue
            (made,) = described([task_of(name, self.table.tasks[name])])
            for key in ("class", "channels", "mean", "std"):
                if made.get(key) != task.get(key):
                    wanted = f"the key tasks says {found(task.get(key))}"
                    yield f"table.tasks.{name}", f"its task would have {key} {found(made.get(key))}, but {wanted}"


def export(
    run: Result | Path | str,
    out: Path | str,
    client: str | None = None,
    task: str | None = None,
    licence: str = "unknown",
    hub: bool = False,
) -> Path:
    """Write a model of a finished run, a result or its folder, to the new or empty folder `out`, which is returned.

    It exports the global model, or the one that `client` uses; with `task`, without the heads and decoders of other
    tasks. The run's data are loaded to learn how inputs are normalised. `licence` is the identifier in the card. `hub`
    writes a model repository of Hugging Face: a config.json, and the metrics in the card's head.

    Raises StateError if the run is not finished or `out` is not empty, UserError for an unknown client or task or one
    that must be named, for a licence that is no identifier, and for a model from Python (given a folder, also for data
    from Python).
    """
    if not re.fullmatch(LICENCE, licence):
        raise UserError(f"licence {licence!r}: expected an identifier, such as apache-2.0, cc-by-nc-4.0 or unknown")
    out, parts = Path(out), run.built if isinstance(run, Result) else None
    run = run.folder if isinstance(run, Result) else Path(run)
    check_empty(out)
    built = reopen(run)[0] if parts is None else parts
    if built.recipe.model.is_held or built.modules:
        raise UserError(
            f"{run}: the model was made in Python, and an export can only name it: `Result.model` returns it with its "
            "weights; or name it as package.module:name"
        )
    models = trained_models(run)
    clients = built.federation.clients
    if client is not None and client not in clients:
        raise UserError(f"{run}: no client {client!r}.{choices('Clients', client, clients)}")
    if client is None and len(clients) == 1:
        (client,) = clients  # as at a node
    held = [t for t in built.federation.tasks if client is None or t.name in clients[client].tasks]
    if task is not None and task not in {t.name for t in held}:
        names = [t.name for t in held]
        whose = "the run" if client is None else f"client {client!r}"
        raise UserError(f"{run}: {whose} has no task {task!r}.{choices('Tasks', task, names)}")
    key = _key(run, models, client, task)
    check_model(built.module, models[key], run, key)
    tasks = [t for t in held if task in (None, t.name)]
    mine = of_tasks(models[key], {t.name for t in tasks})
    facts = _about(built, key, client, tasks, licence)
    loads = loader(built.module, facts, tasks)
    files = loads | {RECIPE: dump(built.recipe), CARD: card(built, Run.read(run), facts, tasks, client, loads, hub)}
    files |= words_file(built.dataset.words)
    if hub:  # with the keys by which the hub finds models
        kind = {"model_type": "fedloom", "architectures": [type(built.module.encoder).__name__]}
        files[CONFIG] = json.dumps({**kind, **facts.model_dump(mode="json")}, indent=1)
    return write(out, mine, facts, files)


def write(out: Path, state: Mapping[str, Tensor], about: About, files: Mapping[str, str]) -> Path:
    """Write weights, export.json and other files to the folder `out`, which is new or empty; return it. If that fails,
    none of them is left."""
    is_new = not out.exists()
    try:
        out.mkdir(parents=True, exist_ok=True)
        save_tensors({name: tensor.contiguous() for name, tensor in state.items()}, out / WEIGHTS, {"format": "pt"})
        about = about.model_copy(update={"weights_sha256": sum_of(out / WEIGHTS)[1]})
        for name, text in {ABOUT: json.dumps(about.model_dump(mode="json"), indent=1), **files}.items():
            with naming(out / name):
                (out / name).write_text(text, encoding="utf-8")
    except BaseException:
        for file in out.glob("*"):
            file.unlink()
        if is_new and out.exists():
            out.rmdir()
        raise
    return out


def words_file(words: Words | None) -> dict[str, str]:
    """Return the file of a list of words, by its name; nothing where there is none."""
    return {} if words is None else {WORDS: "".join(f"{word}\n" for word in words.listed)}


def _key(run: Path, models: Mapping[str, Any], client: str | None, task: str | None) -> str:
    """Return the name of one of a run's models in `trained_models`."""
    owner = model_key(models, client, task)
    if owner is not None:
        return owner
    if any(key.startswith("task/") or "/task/" in key for key in models) and task is None:
        raise UserError(f"{run}: each task has its own model; choose a task with --task")
    owners = sorted({key.partition("/task/")[0] for key in models if not key.startswith("task/")})
    raise UserError(f"{run}: the run has no global model; choose a client with --client ({', '.join(owners)})")


def of_tasks(state: Mapping[str, Tensor], tasks: set[str]) -> dict[str, Tensor]:
    """Return the tensors with which a model predicts these tasks: without its predictions on a public set (FedMD)."""
    state = {name: tensor for name, tensor in state.items() if not name.startswith("public_outputs.")}
    owner = {name: name.split(".")[1] for name in state if name.split(".")[0] in ("decoders", "heads")}
    return {name: tensor for name, tensor in state.items() if owner.get(name) in (None, *tasks)}


def _about(built: Built, key: str, client: str | None, tasks: Sequence[Task], licence: str) -> About:
    """Return what export.json says; `key` is the model's name in `trained_models`."""
    part, mean, std, pixels = _inputs(built, client, tasks)
    stored = getattr(part, "images", None)
    names = {} if built.dataset.table is not None else built.dataset.classes
    return About(
        recipe=built.recipe.name,
        method=built.method.name,
        seed=built.recipe.seed,
        licence=licence,
        client=client if client is not None and key in (client, f"{client}/task/{tasks[0].name}") else None,
        task=tasks[0].name if re.search(r"(^|/)task/", key) else None,
        input_shape=list(part.input_shape),
        signal=built.dataset.signal,
        mean=mean,
        std=std,
        pixels=pixels,
        bytes=None if stored is None else stored.dtype == torch.uint8,
        turned=built.dataset.reading.turned,
        tasks=described(tasks),
        classes={task.name: [*names[task.name]] for task in tasks if task.name in names},
        table=built.dataset.table,
        text=None if built.dataset.words is None else built.dataset.words.column,
    )


def described(tasks: Sequence[Task]) -> list[dict[str, Any]]:
    """Return tasks as export.json has them."""
    return [as_plain(task, "class") for task in tasks]


def _inputs(
    built: Built, client: str | None, tasks: Sequence[Task]
) -> tuple[Examples, list[float] | None, list[float] | None, Any]:
    """Return (examples of these tasks, mean and standard deviation of each channel, `About.pixels`)."""
    federation, part = built.federation, built.dataset.test
    if isinstance(part, Elsewhere):
        if built.dataset.table is None:
            raise UserError(
                "data: nodes: only the nodes know how their inputs are scaled, unless these are tables; export "
                "runs/RUN in a node's home"
            )
        return part, None, None, None
    holders = [federation.holder(t.name) if client is None else federation.clients[client] for t in tasks]
    tests = [holder.test.of(task.name).index for holder, task in zip(holders, tasks, strict=True)]
    index = torch.cat(tests)
    if isinstance(part, JoinedExamples):
        _, part, index = part.piece(tests[0])
    statistics = normal(part, index)
    reading, fit = built.dataset.reading, built.recipe.data.arguments.get("fit", "stretch")
    if reading.stored or reading.derived:
        fit = reading.stored
    else:  # dense labels that are not a user's own come with images that are padded
        is_padded = any(task.dense for task in tasks) and not isinstance(getattr(part, "change", Dense), Crop | None)
        fit = _pixels(part, index[:_SOME], statistics, "pad" if is_padded else fit)
    if statistics is None:
        scale = (None, None) if reading.scale is None else tuple([*map(float, each)] for each in reading.scale)
        return part, *_before_encoder(built, *scale), fit
    each = torch.cat(statistics, 1).unique(dim=0)
    if len(each) > 1:
        names = ", ".join(task.name for task in tasks)
        raise UserError(
            f"the inputs of the tasks {names} are normalised in {len(each)} ways, one per set of images; choose "
            "one task with --task"
        )
    mean, std = each[0].tensor_split(2)
    return part, *_before_encoder(built, mean.tolist(), std.tolist()), fit


def _pixels(part: Examples, index: Tensor, statistics: tuple[Tensor, Tensor] | None, fit: str) -> str | None:
    """Return `fit` where some inputs, before they are normalised, lie in 0 to 1, as those from files do; else None."""
    if not is_image(part.input_shape) or not len(index):
        return fit
    x = part.batch(index, torch.device("cpu"))[0].double()
    if statistics is not None:
        mean, std = (of[: len(x)].view(-1, of.shape[1], 1, 1) for of in statistics)
        x = x * std + mean
    return fit if bool((x > -OFF).all() and (x < 1 + OFF).all()) else None


def _before_encoder(
    built: Built, mean: list[float] | None, std: list[float] | None
) -> tuple[list[float] | None, list[float] | None]:
    """Return the normalisation of images for the encoder: that of the data set, or of its weights (`model.inputs`)."""
    seen = built.module.encoder.seen
    return (mean, std) if built.module.rescale is None or seen is None else (list(seen[0]), list(seen[1]))


@dataclass(frozen=True, eq=False)
class Bundle:
    """An exported model, ready for use."""

    module: MultiTask
    tasks: tuple[Task, ...]
    recipe: Recipe
    about: About
    words: Words | None = None
    """How texts become inputs, where the model takes texts."""

    @staticmethod
    def read(folder: Path | str) -> Bundle:
        """Read a folder that `export` wrote. Raises StateError where it holds something else."""
        folder = Path(folder)
        for name in (ABOUT, RECIPE, WEIGHTS):
            if not (folder / name).is_file():
                raise StateError(
                    f"{folder} is not an exported model, because it has no {name}; run `fedloom export RUN` first"
                )
        file, value = folder / ABOUT, json_of(folder / ABOUT)
        if isinstance(value, dict) and (version := value.get("fedloom")) != __version__:
            warn(f"{file}: fedloom {found(version)} wrote it, and this is fedloom {__version__}")
        about = section_of(About, value, str(file), StateError)
        tasks = tuple(as_task(task, f"{file}, tasks[{i}]", StateError, "class") for i, task in enumerate(about.tasks))
        recipe = load(folder / RECIPE, origin=Origin.ELSEWHERE)
        try:
            with at(str(file)):
                module = network(recipe, about.input_shape, about.signal, tasks)
        except (ValueError, LookupError, TypeError, AttributeError, RuntimeError) as error:
            raise StateError(f"{file} does not fit {RECIPE}: {error}") from error
        with parsing(f"{folder / WEIGHTS}: cannot be read"):
            weights = load_file(folder / WEIGHTS)
        check_weights(weights, module, f"{folder / WEIGHTS} does not fit {RECIPE}")
        stated, (_, checksum) = about.weights_sha256, sum_of(folder / WEIGHTS)
        if stated not in (None, checksum):
            raise StateError(
                f"{folder / WEIGHTS} was changed after the export: its sha256 is {checksum}, expected {stated} as in "
                f"{ABOUT}; export the run again"
            )
        module.load_state_dict(weights)
        return Bundle(module.eval(), tasks, recipe, about, _words(about, folder / WORDS))


def _words(about: About, file: Path) -> Words | None:
    """Read the list of words of a model that takes texts. Raises StateError where it is not that of the model."""
    if about.text is None:
        return None
    if not file.is_file():
        raise StateError(f"{file} does not exist, but {ABOUT} says that the model takes texts; export the run again")
    words = Words(about.text, tuple(words_in(file)), about.input_shape[0])
    if words.signal != about.signal:
        raise StateError(f"{file} was changed after the export: {words.signal} found, expected {about.signal} as in "
                         f"{ABOUT}; export the run again")  # fmt: skip
    return words


def network(recipe: Recipe, shape: Sequence[int], signal: Signal | None, tasks: Sequence[Task]) -> MultiTask:
    """Return the model as the run had it, with initial weights: what is loaded replaces them all."""
    model = recipe.model
    params = {k: False if k == "pretrained" else v for k, v in model.arguments.items()}
    module = build_model(model.entry, params, tuple(shape), tasks, recipe.seed, None, model.lora, signal)
    changes = [change for change in method_of(recipe).model if not isinstance(change, PublicOutputs)]
    return changed(module, changes, tuple(shape), recipe.seed)


def card(
    built: Built, run: Run, about: About, tasks: Sequence[Task], client: str | None, loads: Mapping[str, str], hub: bool
) -> str:
    """Return the card in Markdown; `about` is what export.json says, `tasks` are those of the model.

    `loads` are the files of `loader`. `hub`: with the scores as a `model-index`, which the hub shows.
    """
    names, table = {task.name for task in tasks}, built.dataset.table
    owners = {"client": about.client, "task": about.task}
    final = _final(run, about, client)
    scores = {} if final is None else final.values
    values = {task: {m: v for m, v in of.items() if not math.isnan(v)} for task, of in scores.items() if task in names}
    few: list[str] = []
    if client is not None and table is not None:
        test = built.federation.clients[client].test
        few = [task for task in values if 0 < len(test.of(task)) < table.minimum]
        values = {task: of_task for task, of_task in values.items() if task not in few}
    numbers = [] if table is None else [each.column for each in table.inputs if each.kind != "category"]
    scales = {} if table is None or ALL not in table.scales else dict(zip(numbers, table.scales[ALL], strict=True))
    environment = Environment(trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
    environment.filters |= {"plain": _plain, "bytes": human_bytes}
    environment.filters["numbers"] = lambda several: ", ".join(f"{v:.4g}" for v in several)
    return environment.from_string(Path(__file__).with_name("card.md.txt").read_text("utf-8")).render(
        about=about,
        run=run,
        tasks=tasks,
        client=client,
        index=_index(run, about, final, values) if hub and final is not None else "",
        owner=" and ".join(f"{what} {_plain(name)}" for what, name in owners.items() if name is not None),
        is_image=is_image(about.input_shape),
        recipe=RECIPE,
        code=built.recipe.code,
        words=WORDS,
        sent=run.bytes_total(),
        table=table,
        own_scale=table is not None and ALL not in table.scales,
        scales=scales,
        splits=_splits(built.federation.clients, client, 0 if table is None else table.minimum),
        final=final,
        values=values,
        few=few,
        named=lambda task, metric: TaskMetric(task, metric, run.direction(task, metric)),
        loader=LOADER,
        loads=bool(loads),
    )


def _splits(clients: Mapping[str, BuiltClient], client: str | None, minimum: int) -> list[list[str]]:
    """Return part, examples, those of each client and of `client` for each part; a part that several share counts once.
    Counts below `minimum` are not shown, nor a sum that contains one."""
    rows = []
    for split in ("train", "val", "test"):
        parts = [c.part(split) for c in clients.values()]
        shared = any(part.name == "shared" for part in parts)
        total = sum(len(part) for part in ({id(part): part for part in parts}.values()))
        sizes = sorted({len(part) for part in parts})
        each = " to ".join(dict.fromkeys(shown(size, minimum) for size in (sizes[0], sizes[-1])))
        few = any(0 < size < minimum for size in sizes)
        rows.append([split + (" (shared)" if shared else ""), "hidden" if few else f"{total:,}", each])
        if client is not None:
            rows[-1].append(shown(len(clients[client].part(split)), minimum))
    return rows


def _index(run: Run, about: About, final: Final, by_task: Mapping[str, Mapping[str, float]]) -> str:
    """Return what was measured as a line of the card's YAML. JSON is YAML."""
    results = [
        {
            "task": {"type": run.info["tasks"][task]["kind"], "name": task},
            "dataset": {"type": run.recipe["data"]["name"], "name": f"{run.recipe['data']['name']}, {final.data[0]}"},
            "metrics": [{"type": metric, "value": round(value, 6)} for metric, value in values.items()],
        }
        for task, values in by_task.items()
    ]
    return f"model-index: {json.dumps([{'name': f'{about.recipe}: {about.method}', 'results': results}])}"


def _final(run: Run, about: About, client: str | None) -> Final | None:
    """Return what the run measured of this model on test data, if it did; numbers of other models are left out."""
    if about.client is None and about.task is None:
        only = [{**line, "metrics": [m for m in line["metrics"] if m["model"] == "global"]} for line in run.rounds]
        run = replace(run, rounds=tuple(only))
    try:
        return run.by_client()[client] if client is not None else run.final()
    except (StateError, KeyError):
        return None


def loader(module: MultiTask, about: About, tasks: Sequence[Task]) -> dict[str, str]:
    """Return load.py, which loads the model without fedloom, with its text; `about` is what export.json says.

    Empty for any but a network as timm makes it, pruned to its maps or not, with linear heads.
    """
    encoder = module.encoder
    arguments: Any = getattr(encoder, "made", None)
    linear = all(type(module.heads[task.name]) is nn.Linear for task in tasks)
    if about.pixels not in get_args(Fit) or arguments is None or not linear:
        return {}
    plain = need("timm", "vision").create_model(**arguments, pretrained=False, num_classes=0)
    levels = encoder.levels if isinstance(encoder, PyramidEncoder) else None
    if levels is not None:
        plain.prune_intermediate_layers(levels, prune_norm=True, prune_head=True)
    # with adapters, modules of a method, or norms of its own it is more than that
    mine = {key for key in module.state_dict() if not key.startswith("heads.")}
    if mine != {f"encoder.net.{key}" for key in plain.state_dict()}:
        return {}
    heads = {t.name: (module.heads[t.name].in_features, module.heads[t.name].out_features) for t in tasks}
    values = {"shape": tuple(about.input_shape), "mean": about.mean, "std": about.std, "pixels": about.pixels}
    more = {"heads": heads, "levels": levels, "made": dict(arguments)}
    template = Template(Path(__file__).with_name("load.py.txt").read_text(encoding="utf-8"))
    return {LOADER: template.substitute({name: repr(value) for name, value in {**values, **more}.items()})}


def is_image(shape: Sequence[int]) -> bool:
    """Return whether a shape is that of an image."""
    return len(shape) == 3 and shape[0] in (1, 3)


def _plain(text: str) -> str:
    """Return a name as plain text in Markdown, on one line."""
    return re.sub(r"([\\`*\[\]<>|])", r"\\\1", " ".join(str(text).split()))
