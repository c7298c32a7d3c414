"""From a recipe to everything a runner needs."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from fedloom.core.context import generator, seeded
from fedloom.core.errors import RecipeError, UserError, choices, unknown
from fedloom.core.layout import Layout
from fedloom.core.settings.trust import imported, is_import
from fedloom.data.combine import loaded
from fedloom.data.dataset import Dataset, Examples, normal
from fedloom.data.partition import Partition, Pool
from fedloom.data.partition.rules import as_partition
from fedloom.data.prepare import MaskDoubt
from fedloom.data.tables.preprocessing import Noise
from fedloom.federation.recipes.runtime import Privacy
from fedloom.federation.recipes.schema import DataSection, MethodSection, ModelSection, PeersSection, Recipe
from fedloom.federation.rounds import refusals
from fedloom.federation.rounds.built import Built
from fedloom.federation.rounds.federation import BuiltFederation
from fedloom.federation.rounds.measure import models_to_measure, unmeasured
from fedloom.federation.rounds.privacy import share_of, terms_of
from fedloom.federation.runs.recorded import MODEL, verify_model
from fedloom.methods.method import AGES, Method
from fedloom.methods.peers.aggregation import at_peers
from fedloom.methods.private import private
from fedloom.methods.registry import ADDONS, CODECS
from fedloom.models.build import build_model, is_whole
from fedloom.models.changes import changed
from fedloom.models.multitask import MultiTask
from fedloom.models.nets import form, infinite
from fedloom.models.tasks.labels import Classification, Regression
from fedloom.models.tasks.own import Own, judged
from fedloom.models.tasks.task import Task
from fedloom.training.stacked import kind, pays, stacks
from fedloom.training.stacked import refuse as refuse_stack


def build_method(section: MethodSection) -> Method:
    """Return the recipe's method with its add-ons and common settings. Raises RecipeError for a refused combination."""
    try:
        method = section.make()
        if section.is_held:
            return _a_method(method, "method")
        for name, params in section.add.items():
            method = _a_method(ADDONS[name].make(method, **params), f"method.add.{name}")
        return replace(
            _a_method(method, "method"),
            name=" + ".join([section.name, *section.add]),
            codec=CODECS[section.codec].make() if section.codec else method.codec,
            weights=section.weights or method.weights,
            max_examples=section.max_examples or method.max_examples,
            buffers=section.buffers or method.buffers,
        )
    except ValueError as error:
        raise RecipeError(f"method: {error}") from error


def _a_method(value: Any, where: str) -> Method:
    if not isinstance(value, Method):
        raise RecipeError(f"{where}: {type(value).__name__} found, expected a function that returns a fedloom.Method")
    return value


def with_options(dataset: Dataset, options: Mapping[str, Mapping[str, Any]]) -> Dataset:
    """Return the data set with some options of its tasks changed. Raises RecipeError for an unknown task or option."""
    tasks = {task.name: task for task in dataset.tasks}
    for name, changes in options.items():
        if name not in tasks:
            raise RecipeError(f"tasks.{name}: unknown task.{choices('Tasks', name, tasks)}")
        task = tasks[name].known
        known = [*(f.name for f in fields(task) if f.name not in ("name", "channels", "judge")), *OWN]
        for key in changes:
            if key not in known:
                raise RecipeError(f"tasks.{name}.{key}: unknown option.{choices('Options', key, known)}")
        try:
            usual = {key: value for key, value in changes.items() if key not in OWN}
            chosen = {"judge": judged(f"tasks.{name}", changes["metric"])} if "metric" in changes else {}
            base = TypeAdapter(type(task)).validate_python({**asdict(task), **usual, **chosen})
        except ValidationError as error:
            wrong = error.errors()[0]
            raise RecipeError(f"tasks.{name}.{wrong['loc'][0]}: {wrong['input']!r} found: {wrong['msg']}") from None
        tasks[name] = _own(base, changes) if changes.keys() & {"loss", "metrics"} else tasks[name].on(base)
    labelled = {name: getattr(task.known, "labelled", None) or {} for name, task in tasks.items()}
    left = (d for d in dataset.doubts if not (isinstance(d, MaskDoubt) and d.answered(labelled[d.task])))
    return replace(dataset, tasks=tuple(tasks.values()), doubts=tuple(left))


OWN = ("loss", "metrics", "metric")
"""Options of every task: a name of the form package.module:name; {metric: such a name, or [name, "min"]}; the name of
the metric that stands for the task, or some names."""


def _own(base: Task, changes: Mapping[str, Any]) -> Task:
    """Return the task with a loss and metrics of a module."""

    def named(value: Any, key: str) -> Any:
        if isinstance(value, list) and len(value) == 2:
            return named(value[0], key), value[1]
        if not isinstance(value, str) or not is_import(value):
            raise RecipeError(f"tasks.{base.name}.{key}: {value!r} found, expected package.module:name")
        return imported(value)

    loss, metrics = changes.get("loss"), changes.get("metrics")
    if not isinstance(metrics, Mapping | None):
        raise RecipeError(f"tasks.{base.name}.metrics: {metrics!r} found, expected {{metric: package.module:name}}")
    measured = {name: named(value, f"metrics.{name}") for name, value in (metrics or {}).items()}
    return Own.of(base, None if loss is None else named(loss, "loss"), measured)


def load_data(section: DataSection, seed: int) -> Dataset:
    """Return the recipe's data set, equal for equal data sections and seeds. Raises RecipeError for another object."""
    return loaded(section.entry, seed, section.arguments)


def method_of(recipe: Recipe) -> Method:
    """Return the recipe's method as it runs at a server or at peers."""
    method = build_method(recipe.method)
    if recipe.peers is not None:
        method = at_peers(method, recipe.peers)
    _pace(recipe.peers, recipe.training.participation, method)
    if recipe.peers is not None:
        _numbered_apart(recipe.peers, recipe.training.participation, method)
    return method


def _pace(peers: PeersSection | None, share: float, method: Method) -> None:
    """Refuse ages of models without asynchronous peers, and partial participation with them."""
    free = peers is not None and peers.mode == "asynchronous"
    ages = sorted(f.removeprefix("extra:") for f in method.stage.traits.reads & AGES)
    if ages and not free:
        raise RecipeError(
            f"method: {method.name} reads {', '.join(ages)}, which only asynchronous peers have; "
            "set peers: {mode: asynchronous}, or choose another method"
        )
    if free and share < 1:
        raise RecipeError(
            f"training.participation: {share} found, but asynchronous peers train at their "
            "own pace; set it to 1 and describe absences with churn and dropout in peers.scenario"
        )


def _numbered_apart(peers: PeersSection, share: float, method: Method) -> None:
    """Refuse groups that peers number each for itself, where not every peer hears all others from the first round."""
    if "groups" not in method.stage.traits.writes:
        return
    choose, warmup = peers.choose, peers.warmup
    partly = {
        f"peers.graph: {peers.graph.name}": peers.graph.name != "full",
        "peers.choose": any(rule is not None for rule in (choose.top, choose.threshold, choose.groups)),
        "peers.mode: asynchronous": peers.mode == "asynchronous",
        "peers.scenario": peers.scenario is not None,
        "peers.warmup.alone": warmup is not None and warmup.alone > 1,
        f"training.participation: {share}": share < 1,
    }
    for what, there in partly.items():
        if there:
            raise RecipeError(
                f"{what} found, but {method.name} starts with groups of the clients that a peer hears, and groups have "
                "the same numbers at all peers only if each hears all others; set method.first: noise"
            )


def build(recipe: Recipe, partition: Partition | None = None, dataset: Dataset | None = None) -> Built:
    """Load the data (or take `dataset`), partition it (or take `partition`), build the model and the method."""
    method = method_of(recipe)
    dataset = with_options(dataset or load_data(recipe.data, recipe.seed), recipe.tasks)
    pool = Pool.of(dataset)
    dataset = replace(dataset, doubts=(*dataset.doubts, *_one_class(dataset, pool)))
    if partition is None:
        _enough(recipe.partition.arguments, pool)
        partition = as_partition(recipe.partition.make(pool, recipe.seed), pool, recipe.seed)
        partition = partition.by_task(pool) if method.turn.apart else partition
    if method.public:
        dataset, partition = _with_public(method, dataset, partition, recipe.seed)
    partition.check(pool, shared=True)
    _labellers(dataset, partition)
    if recipe.privacy is not None and dataset.private is not None:
        dataset = _with_noise(recipe, recipe.privacy, dataset, len(partition.shares))
    federation = BuiltFederation.build(dataset, partition, unified=recipe.model.heads == "all")
    federation = federation.pooled(method.turn.pool) if method.turn.pool else federation
    built = assemble(recipe, method, dataset, pool, partition, federation)
    unmeasured(built)
    return built


def _one_class(dataset: Dataset, pool: Pool) -> Iterator[str]:
    """Yield a doubt for each task whose training examples are all of one class."""
    for task in dataset.tasks:
        known = pool.labels[task.name]
        if isinstance(task.known, Classification) and len(known := known[known >= 0]) and (known == known[0]).all():
            yield f"task {task.name!r}: all training examples are of one class, so there is nothing to learn"


def _with_public(method: Method, dataset: Dataset, partition: Partition, seed: int) -> tuple[Dataset, Partition]:
    """Return the data with a public set: its own, or training examples drawn by the seed, which leave all shares."""
    if dataset.public is not None:
        return dataset, partition
    if method.public >= len(dataset.train):
        raise RecipeError(
            f"method.public: {method.public} found, but the data set has only {len(dataset.train)} training examples"
        )
    chosen = torch.randperm(len(dataset.train), generator=generator(seed, "public"))[: method.public].sort().values
    x, _ = dataset.train.batch(chosen, torch.device("cpu"), tasks=())
    return replace(dataset, public=x), partition.without(chosen.numpy())


def _labellers(dataset: Dataset, partition: Partition) -> None:
    """Refuse clients in `labelled` that the federation does not have."""
    clients = [share.client for share in partition.shares]
    for task in dataset.tasks:
        for name in getattr(task.known, "labelled", None) or ():
            if name not in clients:
                raise RecipeError(f"tasks.{task.name}.labelled: {unknown('client', name, clients)}")


def _with_noise(recipe: Recipe, section: Privacy, dataset: Dataset, clients: int) -> Dataset:
    """Return a data set preprocessed by what clients send with noise, with the tasks that it has."""
    assert dataset.private is not None
    terms = terms_of(section, recipe.training, clients, statistics=True)
    noised = dataset.private(Noise(terms.noise, section.trust == "local", recipe.seed))
    tasks = [_rescaled(task, other) for task, other in zip(dataset.tasks, noised.tasks, strict=True)]
    return replace(noised, tasks=tuple(tasks))


def _rescaled(task: Task, other: Task) -> Task:
    """Return a task with another's mean and standard deviation, where it has some."""
    base = task.known
    if not isinstance(base, Regression) or not isinstance(other, Regression):
        return task
    return task.on(replace(base, mean=other.mean, std=other.std))


def _enough(arguments: Mapping[str, Any], pool: Pool) -> None:
    """Refuse more clients than there are examples, before any are made."""
    for key, value in arguments.items():
        counts = value.values() if isinstance(value, Mapping) else [value]
        if "clients" in key and any(isinstance(count, int) and count > len(pool) for count in counts):
            raise RecipeError(
                f"partition.{key}: {value} found, but the data set has only {len(pool)} training examples"
            )


def _rescaling(module: MultiTask, examples: Examples) -> tuple[Tensor, Tensor]:
    """Return (scale, shift) from the data set's normalisation to that of the weights (1 x C x 1 x 1 each)."""
    normalisation = module.encoder.seen
    if normalisation is None:
        raise RecipeError(
            f"model.inputs: weights found, but the normalisation of images for {type(module.encoder).__name__} is "
            "unknown; only timm's architectures state it (model: timm, vit)"
        )
    known = normal(examples, torch.arange(min(len(examples), 1000)))
    mean, std = (v[:1].double() for v in known) if known else (torch.zeros(1, 1), torch.ones(1, 1))
    if known and any(bool((v != v[:1]).any()) for v in known):
        raise RecipeError(
            "model.inputs: weights found, but the data set normalises each of its sets differently; leave it out"
        )
    goal, spread = (torch.tensor([list(v)], dtype=torch.float64) for v in normalisation)
    if examples.input_shape[0] != goal.shape[1]:
        raise RecipeError(
            f"model.inputs: expected images of {goal.shape[1]} channels, as the weights need, found "
            f"{examples.input_shape[0]}"
        )
    scale, shift = std / spread, (mean - goal) / spread
    return scale.view(1, -1, 1, 1).float(), shift.view(1, -1, 1, 1).float()


def _needs_parts(method: Method, module: MultiTask) -> None:
    """Refuse methods that look into a model which is one module, for nobody knows where its features are."""
    if not is_whole(module):
        return
    parts = [*(change for change in method.model if not getattr(change, "any_model", False))]
    for part in (*parts, *(rule for rule in method.rules if rule.features)):
        raise RecipeError(
            f"model: {method.name} uses features, heads or layers ({part!r}), but the model is one module; give an "
            "encoder: fl.model(encoder, heads='linear') or fl.model(encoder, heads={task: module})"
        )


def starting_model(model: ModelSection, seed: int, dataset: Dataset) -> MultiTask:
    """Return the section's model before a method changes it, with the weights that it begins with."""
    about = model.entry, model.arguments, dataset.input_shape, dataset.tasks, seed
    module = build_model(*about, model.weights, model.lora, dataset.signal)
    if model.inputs == "weights":
        module.rescale = _rescaling(module, dataset.train)
    module.frozen_statistics = model.frozen_statistics
    return module


def begin_with(module: MultiTask, start: str) -> None:
    """Load the model that all clients of a run share. Raises RecipeError where there is none or it does not fit."""
    path = Path(start).expanduser()
    file = path / MODEL if path.is_dir() else path
    if not file.is_file():
        raise RecipeError(f"model.start: {start!r}: the file {file} does not exist; only a finished run has it")
    if file.name == MODEL:
        verify_model(file.parent)
    try:
        stored = load_file(file)
    except (OSError, SafetensorError) as error:
        raise RecipeError(f"model.start: {file} cannot be read: {error}") from None
    needed = module.state_dict()
    missing = [name for name in needed if name not in stored]
    if missing:
        owners = sorted({name.rpartition("/")[0] for name in stored if "/" in name})
        own = f"; it has models of {', '.join(owners)}, and none that all share" if owners else ""
        raise RecipeError(f"model.start: {file} has no {missing[0]!r} ({len(missing)} of {len(needed)} missing){own}")
    for name, tensor in needed.items():
        shape, expected = form(stored[name]), form(tensor)
        if shape != expected:
            raise RecipeError(f"model.start: {file}, {name!r}: shape {shape} found, expected {expected}")
        if count := infinite(stored[name], tensor):
            raise RecipeError(
                f"model.start: {file}, {name!r}: expected finite numbers, found {count} that are not finite"
            )
    module.load_state_dict({name: stored[name] for name in needed})


def _freeze(module: MultiTask, glob: str) -> None:
    """Freeze the parameters whose names match."""
    names = [name for name, _ in module.named_parameters()]
    chosen = fnmatch.filter(names, glob)
    if not chosen or len(chosen) == len(names):
        what = "no parameter" if not chosen else "every parameter"
        raise RecipeError(f"model.freeze: {glob!r} matches {what}; names look like {names[0]}, {names[-1]}")
    for name in chosen:
        module.get_parameter(name).requires_grad_(False)


def _module(recipe: Recipe, method: Method, dataset: Dataset, section: ModelSection) -> MultiTask:
    """Return a section's model as the method changes it."""
    module = starting_model(section, recipe.seed, dataset)
    module.public = dataset.public if method.public else None
    _needs_parts(method, module)
    return changed(module, method.model, dataset.input_shape, recipe.seed)


def _own_modules(
    recipe: Recipe, method: Method, dataset: Dataset, federation: BuiltFederation, layout: Layout
) -> dict[str, MultiTask]:
    """Return the models of clients that have their own. Raises RecipeError where shared tensors differ."""
    modules: dict[str, MultiTask] = {}
    for client, model in dataset.models.items():
        where = "peers" if recipe.peers is not None else f"runtime.engine: {recipe.runtime.engine}"
        if where != "runtime.engine: process":
            raise RecipeError(
                f"client {client!r}: a model of its own found, but with {where} all clients have the same; leave the "
                "clients' model= out, or run in one place (runtime.engine: process)"
            )
        if method.turn.pool:
            continue  # one model, of who has all examples
        try:
            named = isinstance(model, str | Mapping)
            section = ModelSection.model_validate(model) if named else recipe.model.holding(model)
            module = _module(recipe, method, dataset, section)
            own = Layout.from_module(module)
            own.bind(module)
        except (ValueError, RecipeError) as error:
            raise RecipeError(f"client {client!r}, model: {error}") from error
        for part in (method.shared_part, method.shared_buffers):
            if part == method.shared_buffers and method.buffers == "local":
                continue
            mine, common = ({b.name: b.shape for b in part(each).blocks} for each in (own, layout))
            for name in (*mine, *common):
                if (here := mine.get(name)) != (there := common.get(name)):
                    has, had = ("none" if s is None else " x ".join(map(str, s)) or "1" for s in (here, there))
                    raise RecipeError(
                        f"client {client!r}: {name!r} of shape {has} found in its own model, but {method.name} shares "
                        f"it and the run's model has {had}; give all clients the same model, or use a method that "
                        "shares no parameters (fedmd, local)"
                    )
        modules[client] = module
    return modules


def assemble(
    recipe: Recipe, method: Method, dataset: Dataset, pool: Pool, partition: Partition, federation: BuiltFederation
) -> Built:
    """Build the model for the clients of a federation, and refuse combinations that do not work."""
    terms, section = None, recipe.privacy
    if section is not None:
        if recipe.peers is not None and section.trust == "central":
            why = "peers have no server that could add noise; set trust: local"
            raise RecipeError(f"privacy.trust: central found, but {why}")
        statistics = dataset.table is not None and dataset.table.noise > 0
        terms = terms_of(section, recipe.training, len(federation.trainers), statistics)
        share, local = share_of(recipe.training, terms), terms.trust == "local"
        method = private(method, clip=section.clip, noise=terms.noise, share=share, local=local)
    module = _module(recipe, method, dataset, recipe.model)
    if recipe.model.start is not None:
        begin_with(module, recipe.model.start)
    if recipe.model.freeze is not None:
        _freeze(module, recipe.model.freeze)
    layout = Layout.from_module(module)
    try:
        layout.bind(module)  # whoever keeps the initial values shares this vector
    except ValueError as error:
        raise RecipeError(f"model: {error}") from error
    try:
        for rule in method.rules:
            rule.check(recipe.training.optimizer)
        with seeded(recipe.seed, "stage"):  # as `server_init` does, so that what works here works there
            method.stage.init(method.shared_part(layout))
            method.edge.init(method.shared_part(layout))
    except ValueError as error:
        raise RecipeError(f"method: {error}") from error
    modules = _own_modules(recipe, method, dataset, federation, layout)
    built = Built(method, layout, federation, recipe, dataset, pool, partition, module, terms, modules)
    for refuse in (*refusals.ALL, _stacks, models_to_measure):
        refuse(built)
    return replace(built, stacked=_stacked(built))


def _stacks(built: Built) -> None:
    """Refuse stacked training together with something that cannot be stacked."""
    if built.recipe.training.stacked is True:
        workers = built.recipe.runtime.workers
        if workers != "auto" and workers > 1:
            raise RecipeError(
                f"training.stacked: stacks run in one process, but runtime.workers is {workers}; set it to 1"
            )
        _stackable(built)


def _stackable(built: Built) -> None:
    """Refuse what cannot be stacked."""
    recipe, method = built.recipe, built.method
    own, by_domain = next(iter(built.modules), None), isinstance(recipe.training.epochs, dict)
    more, data = method.phases or not method.turn.plain, built.dataset
    refused = {
        f"clients of a stack share one model, but {own} has its own": own is not None,
        "clients of a stack need the same number of epochs, but training.epochs differs by domain": by_domain,
        f"a stack trains one whole model, but {method.name} trains more or less than that": more,
        f"data set {data.name!r} may augment its batches, which a stack cannot do": data.train.prefetch,
    }
    for why in (why for why, there in refused.items() if there):
        raise RecipeError(f"training.stacked: {why}")
    refuse_stack(built.module, recipe.training, method.rules)


def _stacked(built: Built) -> bool:
    """Return whether clients train stacked. It does not depend on the workers, for results may not."""
    training, module = built.recipe.training, built.module
    if training.stacked != "auto":
        return training.stacked
    try:
        _stackable(built)
    except UserError:
        return False
    if not all(task.masks for task in built.dataset.tasks):
        return False
    x, _ = built.dataset.train.batch(torch.zeros(1, dtype=torch.int64), torch.device("cpu"))
    trainers = built.federation.trainers.values()
    sizes = [len(client.train) for client in trainers]
    kinds = len({kind(client.tasks) for client in trainers})
    names, device = tuple(task.name for task in built.dataset.tasks), built.recipe.runtime.devices[0]
    return pays(module, x, names, training, sizes, kinds, device) and stacks(module, x, names)
