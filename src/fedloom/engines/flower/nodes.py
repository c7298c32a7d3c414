"""Clients that keep their data: what a node reports about itself, and a federation made from such reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field, TypeAdapter, ValidationError
from torch import Tensor

import fedloom.tasks.classification
import fedloom.tasks.dense
import fedloom.tasks.regression  # noqa: F401  (makes all kinds of tasks known)
from fedloom.data.dataset import Batch, Dataset
from fedloom.data.partition import PARTITIONERS, Partition, Pool, Share, ValFraction
from fedloom.data.registry import loaded
from fedloom.errors import DataError, RecipeError, nearest
from fedloom.methods.method import Method
from fedloom.recipes.loader import read
from fedloom.recipes.schema import DataSection, Recipe
from fedloom.rounds import refusals
from fedloom.rounds.build import assemble, method_of, with_options
from fedloom.rounds.built import Built
from fedloom.rounds.federation import Client, Federation, Part
from fedloom.settings.problems import explain
from fedloom.settings.section import Section, strict
from fedloom.tasks.task import Task

ClientId = Annotated[str, Field(pattern=r"^\w[\w .-]*$", max_length=200)]
_MOST = 50_000_000  # most examples of one client


class Sizes(Section):
    """Number of examples."""

    train: Annotated[int, Field(ge=1, le=_MOST)]
    val: Annotated[int, Field(ge=0, le=_MOST)]
    test: Annotated[int, Field(ge=0, le=_MOST)]


class NodeReport(Section):
    """What a node with its own data reports about itself: nothing about single examples."""

    client: ClientId
    tasks: tuple[dict[str, Any], ...]
    weights: dict[str, Annotated[float, Field(gt=0)]]
    sizes: Sizes
    domain: str | None
    input_shape: tuple[Annotated[int, Field(ge=1, le=1 << 20)], ...]


class NodeConfig(Section):
    """node.yaml: a node's client and data. Without `data` it takes its client's share of the recipe's data."""

    client: ClientId
    data: DataSection | None = None
    tasks: dict[str, Annotated[float, Field(gt=0)]] | None = None
    """Tasks with loss weights; null: all tasks of the data set, each with weight 1."""
    val_fraction: ValFraction = 0.1
    domain: str | None = None
    device: str = "cpu"

    @staticmethod
    def read(path: Path) -> NodeConfig:
        """Read a file. Raises RecipeError that names what is wrong in it."""
        _, value = read(path, kind="node")
        try:
            return strict(NodeConfig, value)
        except ValidationError as error:
            lines = [f"{where}: {what}" for where, what in explain(error, NodeConfig, {})]
            raise RecipeError(f"{path}: " + "; ".join(lines)) from None


@dataclass(frozen=True, eq=False)
class Elsewhere:
    """Examples that are elsewhere: their number and shape. Fulfils `Examples`, except for batches."""

    count: int
    input_shape: tuple[int, ...]
    prefetch: bool = False
    domain: Tensor | None = None
    nbytes: int = 0

    def __len__(self) -> int:
        return self.count

    def fingerprint(self) -> bytes:
        """Their number."""
        return self.count.to_bytes(8, "little")

    def batch(self, index: Tensor, device: torch.device, rng: Any = None, tasks: Any = None) -> Batch:
        """Raises DataError: the examples are at a node."""
        raise DataError("these examples lie at a node")

    def labels_of(self, task: str) -> np.ndarray[Any, Any]:
        """-1 for each: labels stay at the node."""
        return np.full(self.count, -1)


def own_data(recipe: Recipe, config: NodeConfig) -> tuple[Dataset, Client]:
    """A node's data set and the client that holds all of it. Raises DataError for a task that the data set lacks."""
    assert config.data is not None
    dataset = loaded(config.data.entry, recipe.seed, config.data.arguments)
    known = {task.name: task for task in dataset.tasks}
    options = {name: changes for name, changes in recipe.tasks.items() if name in known}
    known = {task.name: task for task in with_options(dataset, options).tasks}
    weights = config.tasks or dict.fromkeys(known, 1.0)
    for name in weights:
        if name not in known:
            raise DataError(
                f"client {config.client!r}: its data set {dataset.name!r} has no task {name!r}."
                f"{nearest(name, known)} Tasks: {', '.join(known)}"
            )
    everyone = PARTITIONERS["iid"].function(Pool.of(dataset), recipe.seed, clients=1, val_fraction=config.val_fraction)
    share = everyone.shares[0]
    test = np.arange(len(dataset.test), dtype=np.int64)
    client = Client(
        config.client,
        {name: (known[name], weight * known[name].weight) for name, weight in sorted(weights.items())},
        Part(dataset.train, share.train, "own"),
        Part(dataset.train, share.val, "own"),
        Part(dataset.test, test, "own"),
        config.domain,
    )
    return dataset, client


def about(client: Client, input_shape: tuple[int, ...]) -> NodeReport:
    """A node's report about itself."""
    return NodeReport(
        client=client.id,
        tasks=tuple(as_plain(task) for task, _ in client.tasks.values()),
        weights={name: weight for name, (_, weight) in client.tasks.items()},
        sizes=Sizes(train=len(client.train), val=len(client.val), test=len(client.test)),
        domain=client.domain,
        input_shape=input_shape,
    )


def as_plain(task: Task) -> dict[str, Any]:
    """A task as plain values."""
    return {"kind": type(task).__name__, **asdict(task)}


def as_task(plain: Mapping[str, Any]) -> Task:
    """Inverse of `as_plain`. Raises DataError for values that are no task."""
    kinds = {kind.__name__: kind for kind in _kinds()}
    values = dict(plain)
    kind = values.pop("kind", None)
    if kind not in kinds:
        raise DataError(f"task {plain.get('name')!r}: kind {kind!r} found, expected one of {', '.join(sorted(kinds))}")
    try:
        task: Task = TypeAdapter(kinds[kind]).validate_python(values)
        return task
    except ValidationError as error:
        wrong = error.errors()[0]
        raise DataError(f"task {plain.get('name')!r}: {wrong['loc']}: {wrong['msg']}") from None


def _kinds(base: Any = Task) -> list[Any]:
    return [kind for sub in base.__subclasses__() for kind in (sub, *_kinds(sub))]


def federation_of(reports: Mapping[str, NodeReport], unified: bool) -> tuple[Federation, Dataset, Partition]:
    """A federation whose data are elsewhere, from the nodes' reports. Tasks are in the order of their names.

    Raises DataError that names two clients which disagree about a task or the shape of inputs.
    """
    if not reports:
        raise DataError("no node has reported what it holds")
    tasks: dict[str, tuple[str, Task]] = {}
    first = min(reports)
    shape = reports[first].input_shape
    for name, node in sorted(reports.items()):
        if node.input_shape != shape:
            raise DataError(f"client {name!r}: inputs have shape {node.input_shape}, those of client {first!r} {shape}")
        for each in node.tasks:
            task = as_task(each)
            other, before = tasks.setdefault(task.name, (name, task))
            if before != task:
                raise DataError(f"task {task.name!r}: client {name!r} has {task}, client {other!r} has {before}")
    known = {task: found for task, (_, found) in sorted(tasks.items())}
    sizes = [node.sizes for node in reports.values()]
    train_part = Elsewhere(sum(size.train + size.val for size in sizes), shape)
    dataset = Dataset("nodes", tuple(known.values()), train_part, Elsewhere(sum(s.test for s in sizes), shape))
    shares, clients, at, tested = [], {}, 0, 0
    for name, node in sorted(reports.items()):
        size = node.sizes
        train, val, test = (np.arange(n, dtype=np.int64) for n in (size.train, size.val, size.test))
        train, val = train + at, val + at + len(train)
        clients[name] = Client(
            name,
            {task: (known[task], float(weight)) for task, weight in sorted(node.weights.items())},
            Part(dataset.train, train, "own"),
            Part(dataset.train, val, "own"),
            Part(dataset.test, test + tested, "own"),
            node.domain,
        )
        shares.append(Share(name, node.weights, train, val, node.domain))
        at, tested = at + len(train) + len(val), tested + len(test)
    return Federation(dataset.tasks, clients, unified), dataset, Partition(tuple(shares))


def build_from(recipe: Recipe, method: Method | None, reports: Mapping[str, NodeReport]) -> Built:
    """A recipe made concrete at a server that has no data."""
    federation, dataset, partition = federation_of(reports, recipe.model.heads == "all")
    pool = Pool.of(dataset)
    built = assemble(recipe, method_of(recipe, method), dataset, pool, partition, federation)
    refusals.unmeasured(built)
    return built


def build_at(recipe: Recipe, method: Method | None, config: NodeConfig, tasks: tuple[Task, ...]) -> Built:
    """A recipe made concrete at a node with its own data; `tasks` are those of the whole federation."""
    dataset, client = own_data(recipe, config)
    known = {task.name: task for task in tasks}
    mine = {name: (known[name], weight) for name, (_, weight) in client.tasks.items()}
    client = Client(client.id, mine, client.train, client.val, client.test, client.domain)
    federation = Federation(tasks, {client.id: client}, recipe.model.heads == "all")
    whole = Dataset(dataset.name, tasks, dataset.train, dataset.test)
    return assemble(recipe, method_of(recipe, method), whole, Pool({}), Partition(()), federation)
