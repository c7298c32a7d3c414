"""Clients that keep their data: the report of a node about itself, and a federation built from such reports."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field, TypeAdapter, ValidationError
from torch import Tensor

from fedloom.core.context import new_secret
from fedloom.core.errors import DataError, RecipeError, StateError, UserError, choices
from fedloom.core.grouping import grouped
from fedloom.core.settings.section import ClientId, Section
from fedloom.core.settings.trust import Origin, admit, names_in
from fedloom.core.settings.yaml import checked, section_of
from fedloom.core.untrusted import shown
from fedloom.data.dataset import Batch, Dataset
from fedloom.data.partition import PARTITIONERS, Partition, Pool, Share, ValFraction
from fedloom.data.tables.preprocessing import Label, Noise, Preprocessing
from fedloom.data.tables.table import OwnTable, TableReport, far_off, together
from fedloom.data.tables.workbook import harmless
from fedloom.engines.flower.terms import SitePolicy, agree_to_statistics, agree_to_withhold, withheld
from fedloom.engines.flower.wire import RefusedError
from fedloom.federation.recipes.loader import read
from fedloom.federation.recipes.schema import DataSection, Recipe, recipe_hash
from fedloom.federation.rounds.build import assemble, load_data, method_of, with_options
from fedloom.federation.rounds.built import Built
from fedloom.federation.rounds.federation import BuiltClient, BuiltFederation, Part, coded
from fedloom.federation.rounds.measure import unmeasured
from fedloom.federation.rounds.privacy import terms_of
from fedloom.federation.runs.checkpoint import write_text
from fedloom.federation.runs.recorded import digest_of, json_of, read_info
from fedloom.models.multitask import check_name
from fedloom.models.signal import Signal, about_words
from fedloom.models.tasks.labels import Regression
from fedloom.models.tasks.task import Task, as_plain, as_task

REPORTS = "nodes.json"
"""The file of a run folder that has the reports of nodes with their own data."""
AT_NODE = "node.json"
"""The file of a run folder at a node that has data of its own."""

_MOST = 10_000_000  # most examples of one split of a client
_VALUES = 1 << 26  # most values of one input
_CHANNELS = 1 << 15  # most channels of a task
_CLASSES = (
    "; list all sites' classes alike as `classes` of texts and arrays, or by an empty folder for one that a site lacks"
)
_Line = Annotated[str, Field(max_length=200, pattern=r"^\P{C}*$")]
_LINE: TypeAdapter[str] = TypeAdapter(_Line)
_Names = Annotated[tuple[_Line, ...], Field(min_length=1, max_length=_CHANNELS)]
_Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
_FEW = 1000  # most classes of a task whose names are sent
_BYTES = 1 << 16  # most bytes of the names that one node sends, so that its hello stays within its limit
_LISTED = 20  # most names that a message lists


class Sizes(Section):
    """Number of examples."""

    train: Annotated[int, Field(ge=1, le=_MOST)]
    val: Annotated[int, Field(ge=0, le=_MOST)]
    test: Annotated[int, Field(ge=0, le=_MOST)]


class NodeReport(Section):
    """The report of a node with its own data: nothing about single examples."""

    client: ClientId
    tasks: Annotated[tuple[dict[str, Any], ...], Field(min_length=1, max_length=256)]
    weights: dict[str, Annotated[float, Field(gt=0, le=1e6)]]
    sizes: Sizes
    domain: _Line | None
    input_shape: Annotated[tuple[Annotated[int, Field(ge=0, le=_VALUES)], ...], Field(min_length=1, max_length=4)]
    table: TableReport | None = None
    """The statistics of a table, from which its inputs follow; then `input_shape` is (0,)."""
    signal: Signal | None = None
    counted: bool = True
    """If false, a size of 1 only says that there are some examples."""
    classes: Annotated[dict[str, _Names], Field(max_length=256)] = Field(default_factory=dict)
    """Task -> the names of its classes, of those that have names; a table's labels have theirs. Long lists, and names
    that do not fit one line, are left out."""
    digests: Annotated[dict[str, _Digest], Field(max_length=256)] = Field(default_factory=dict)
    """Task -> the checksum of the names of its classes, also of those whose names are left out."""

    @staticmethod
    def read(value: Any, client: str) -> NodeReport:
        """Read a client's report. Raises ValueError or DataError, with the field, if no model could be built."""
        if odd := [text for text in _texts(value) if harmless(text) != text]:  # the server's log quotes them
            raise ValueError(f"expected texts without control characters, found {shown(odd[0])}")
        report = NodeReport.model_validate(value)
        if report.client != client:
            raise ValueError(f"client: expected {client!r}, found {report.client!r}")
        tasks = [as_task(plain) for plain in report.tasks]
        if sorted(report.weights) != sorted(task.name for task in tasks):
            raise ValueError(f"weights: expected one per task, found {shown(', '.join(report.weights))}")
        for task in tasks:
            check_name(task.name)
            if not 1 <= task.channels <= _CHANNELS:
                raise ValueError(
                    f"task {task.name!r}: expected 1 to {_CHANNELS} channels, found {shown(task.channels)}"
                )
        channels = {task.name: task.channels for task in tasks}
        for name, classes in report.classes.items():
            if channels.get(name) != len(classes):
                expected = f"{channels[name]} names" if name in channels else f"one of {', '.join(channels)}"
                raise ValueError(f"classes of {shown(name)}: {len(classes)} names found, expected {expected}")
            if report.digests.get(name, right := _digest(classes)) != right:
                raise ValueError(f"digests: expected {right} of the names of {shown(name)}'s classes, found another")
        if unknown := [name for name in report.digests if name not in channels]:
            raise ValueError(f"digests of {shown(unknown[0])}: expected one of {', '.join(channels)}")
        if 0 in report.input_shape if report.table is None else report.input_shape != (0,):
            raise ValueError(f"input_shape: {report.input_shape} found, expected (0,) beside a table, else no 0")
        if math.prod(report.input_shape) > _VALUES:
            raise ValueError(f"input_shape: expected at most {_VALUES} values, found {report.input_shape}")
        if report.signal is not None and (report.signal.vocabulary or 0) > _VALUES:
            raise ValueError(f"signal.vocabulary: expected at most {_VALUES}, found {report.signal.vocabulary}")
        return report


class NodeConfig(Section):
    """node.yaml: a node's client and data. Without `data` it takes its client's share of the recipe's data."""

    client: ClientId
    data: DataSection | None = None
    tasks: dict[str, Annotated[float, Field(gt=0)]] | None = None
    """Tasks with loss weights; null: all tasks of the data set, each with weight 1."""
    val_fraction: ValFraction = 0.1
    domain: str | None = None
    device: str = "cpu"
    terms: SitePolicy | None = None
    """The demands of this site on a run; null: none."""

    @staticmethod
    def read(path: Path) -> NodeConfig:
        """Read a file. Raises RecipeError that names what is wrong in it."""
        value = read(path, kind="node", follow=False).value
        admit(names_in(value), Origin.FILE, str(path))  # perhaps as it came in a start kit
        return checked(NodeConfig, value, f"{path}: ", between="; ")


class AtNode(Section):
    """node.json: a node's config without its terms, and the tasks of the whole federation."""

    config: NodeConfig
    tasks: tuple[dict[str, Any], ...]


@dataclass(frozen=True, eq=False)
class Elsewhere:
    """Examples at a node: their number and shape. Fulfils `Examples`, except for batches."""

    count: int
    input_shape: tuple[int, ...]
    prefetch: bool = False
    domain: Tensor | None = None
    nbytes: int = 0

    def __len__(self) -> int:
        return self.count

    def fingerprint(self) -> bytes:
        """Return the number of examples: nothing else is known."""
        return self.count.to_bytes(8, "little")

    def batch(self, index: Tensor, device: torch.device, rng: Any = None, tasks: Any = None) -> Batch:
        """Raise DataError: the examples are at a node."""
        raise DataError("the examples are at a node, so this process cannot read them")

    def labels_of(self, task: str) -> np.ndarray[Any, Any]:
        """Return -1 for each: labels stay at the node."""
        return np.broadcast_to(np.int64(-1), (self.count,))


def own_table(recipe: Recipe, config: NodeConfig) -> OwnTable | None:
    """Read a node's table, where its inputs follow from what all nodes send; of a private run they send shares."""
    section = config.data
    if section is None or section.name != "table" or section.arguments["preprocess"] != "federated":
        return None
    return OwnTable.of(config.client, recipe.seed, section.arguments, recipe.privacy is not None)


def with_own_noise(report: TableReport, recipe: Recipe, config: NodeConfig, file: Path) -> TableReport:
    """Return a report whose shares have noise where the recipe wants it of each node.

    The noise of one recipe and data section is drawn once and stored in `file`, for a second draw would tell more.
    """
    section = recipe.privacy
    if section is None or section.trust != "local":
        return report
    key = digest_of(recipe_hash(recipe) + config.model_dump_json(include={"client", "data"}))
    known = dict(json_of(file)) if file.is_file() else {}
    if key not in known:
        terms = terms_of(section, recipe.training, 1, statistics=True)
        shares = np.array([*report.shares.values()]).reshape(-1, 3)
        known[key] = Noise(terms.noise, True, new_secret()).on(shares).tolist()
        write_text(file, json.dumps(known))
    return report.model_copy(update={"shares": dict(zip(report.shares, map(tuple, known[key]), strict=True))})


def own_data(
    recipe: Recipe, config: NodeConfig, own: OwnTable | None = None, fitted: Preprocessing | None = None
) -> tuple[Dataset, BuiltClient]:
    """Load a node's data set, with the tasks' options that the recipe has, and the client that holds all of it.

    Its table is preprocessed as `fitted` (None: no inputs yet). Raises DataError for a task that the data set lacks.
    """
    assert config.data is not None
    own = own or own_table(recipe, config)
    dataset = load_data(config.data, recipe.seed) if own is None else own.dataset(fitted)
    known = {task.name: task for task in dataset.tasks}
    options = {name: each for name, each in recipe.tasks.items() if name in known}
    known = {task.name: task for task in with_options(dataset, options).tasks}
    deal = dataset.deal or partial(PARTITIONERS["iid"].function, clients=1, val_fraction=config.val_fraction)
    everyone = deal(Pool.of(dataset), recipe.seed)
    if len(everyone.shares) != 1:
        found = f"its data are of {len(everyone.shares)} sites, expected one: put all rows into one file"
        raise DataError(f"client {config.client!r}: {found}")
    share = everyone.shares[0]
    weights = config.tasks or dict.fromkeys(known if dataset.deal is None else share.tasks, 1.0)
    for name in weights:
        if name not in known:
            raise DataError(
                f"client {config.client!r}: the data set {dataset.name!r} has no task {name!r}."
                f"{choices('Tasks', name, known)}"
            )
    test = np.arange(len(dataset.test), dtype=np.int64)
    training = coded(dataset.train, known.values(), {config.client: [share.train, share.val]})
    client = BuiltClient(
        config.client,
        {name: (known[name], weight * known[name].weight) for name, weight in sorted(weights.items())},
        Part(training, share.train, "own"),
        Part(training, share.val, "own"),
        Part(coded(dataset.test, known.values(), {config.client: [test]}), test, "own"),
        config.domain,
    )
    return dataset, client


def own_scales(recipe: Recipe, config: NodeConfig, client: BuiltClient) -> list[str]:
    """Return the tasks whose scale follows from the node's own labels: neither recipe nor node.yaml states it."""
    stated = {name for name, options in recipe.tasks.items() if {"mean", "std"} <= options.keys()}
    labels = None if config.data is None else config.data.arguments.get("tasks")
    for name, label in labels.items() if isinstance(labels, Mapping) else ():
        stated |= {name} if isinstance(label, Label) and not label.wants_scale else set()
    known = {name: task.known for name, (task, _) in client.tasks.items() if name not in stated}
    return [name for name, of in known.items() if isinstance(of, Regression) and (of.mean, of.std) != (0, 1)]


def joining(recipe: Recipe, config: NodeConfig) -> tuple[Dataset, BuiltClient, OwnTable | None] | None:
    """Return the data that a node reports when it joins a run; None if it takes its share of the recipe's data.

    Raises RefusedError where the run, or what the report has, does not fulfil the site's terms.
    """
    (config.terms or SitePolicy()).agree(recipe)
    if config.data is not None and recipe.data.name != "nodes":
        found = f"client {config.client!r} has data of its own, and the recipe has data: {recipe.data.name}"
        raise RefusedError(f"{found}, expected data: nodes")
    hidden = withheld(config.terms, recipe.privacy, config.data is not None)
    agree_to_withhold(hidden, method_of(recipe), recipe)
    if config.data is None:
        return None
    own = own_table(recipe, config)
    dataset, client = own_data(recipe, config, own)
    scales = own_scales(recipe, config, client)
    agree_to_statistics(config.terms, hidden, recipe.privacy, own is not None, scales)
    return dataset, client, own


def about(client: BuiltClient, dataset: Dataset, counted: bool = True, table: TableReport | None = None) -> NodeReport:
    """Return a node's report about itself; with `counted` it states how many examples it has."""
    sizes = {split: len(client.part(split)) for split in ("train", "val", "test")}
    known = dataset.classes if table is None else {}
    names = {task: known[task] for task in client.tasks if task in known}
    return NodeReport(
        client=client.id,
        tasks=tuple(as_plain(task) for task, _ in client.tasks.values()),
        weights={name: weight for name, (_, weight) in client.tasks.items()},
        sizes=Sizes(**{split: size if counted else min(size, 1) for split, size in sizes.items()}),
        domain=client.domain,
        input_shape=dataset.input_shape,
        table=table,
        signal=dataset.signal,
        counted=counted,
        classes=_short(names),
        digests={name: _digest(each) for name, each in names.items()},
    )


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for each in (*value, *value.values()) if isinstance(value, Mapping) else value:
            yield from _texts(each)


def _digest(names: Sequence[str]) -> str:
    """Return the checksum of the names of a task's classes."""
    return digest_of(json.dumps([*names]))


def _short(classes: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """Return the names that fit a report: of few classes, each of one line, and not too many bytes together."""
    short, left = {}, _BYTES
    for task, names in classes.items():
        size = len(json.dumps(names))
        if len(names) <= _FEW and size <= left and all(map(_is_line, names)):
            short[task], left = names, left - size
    return short


def _is_line(name: str) -> bool:
    try:
        _LINE.validate_python(name)
    except ValidationError:
        return False
    return True


def agreed(reports: Mapping[str, NodeReport | None]) -> tuple[dict[str, NodeReport], dict[str, str]]:
    """Return (reports that fit together, client -> why it is left out).

    The value that most clients report of inputs and of a task is right; of equally frequent ones, the first. A node
    without data of its own is left out, too.
    """
    nothing = "the node has no data: its node.yaml has no section data"
    out = {name: nothing for name, report in sorted(reports.items()) if report is None}
    fitting = {name: report for name, report in sorted(reports.items()) if report is not None}
    for what, of in (("inputs", _inputs), ("task", _tasks)):
        stated = grouped((key, (value, name)) for name, one in fitting.items() for key, value in of(one).items())
        for key, pairs in stated.items():
            values = grouped(pairs)
            right = max(values, key=lambda value: len(values[value]))
            other = values.pop(right)[0]
            for value, names in values.items():
                mine, theirs = _apart(value, right)
                found = f"it has {mine}, client {other!r} has {theirs}"
                if isinstance(value, _Classes) and not (value.names and right.names):
                    found = f"its names differ from those of client {other!r}"
                advice = _CLASSES if isinstance(value, _Classes) else about_words(value, right)
                out |= dict.fromkeys(names, f"{what} {key}: {found}{advice}")
        fitting = {name: report for name, report in fitting.items() if name not in out}
    return fitting, out


def _inputs(report: NodeReport) -> dict[str, Any]:
    found: dict[str, Any] = {"shape": report.input_shape, "signal": report.signal}
    if (table := report.table) is not None:
        found |= {"columns": ", ".join(sorted(table.inputs)), "minimum": table.minimum}
        found |= {"ranges": str(sorted((table.ranges or {}).items()))}
        found |= {f"column {name}": str(kind) for name, kind in table.inputs.items()}
    return found


@dataclass(frozen=True)
class _Classes:
    """The names of a task's classes: alike if their checksums are. Without names where the report left them out."""

    digest: str
    names: tuple[str, ...] = field(compare=False)


def _tasks(report: NodeReport) -> dict[str, Any]:
    """Return the tasks and, where classes have names, their names: a node numbers the classes that it knows."""
    digests = {name: _digest(names) for name, names in report.classes.items()} | report.digests
    named = {f"{name}, classes": _Classes(each, report.classes.get(name, ())) for name, each in digests.items()}
    labels = {f"{name}, label": label for name, label in report.table.tasks.items()} if report.table else {}
    return labels | {task.name: task for task in map(as_task, report.tasks)} | named


def _apart(value: Any, other: Any) -> tuple[str, str]:
    """Return in words how two values differ: of tasks, the fields that do; of many classes, the first that does."""
    if isinstance(value, _Classes):
        lists = value.names, other.names
        if max(map(len, lists)) > _LISTED:
            apart = (i for i, pair in enumerate(zip(*lists, strict=False)) if len({*pair}) > 1)
            place = next(apart, None)
            one, two = (f"{len(x)} names" if place is None else f"{x[place]!r} as class {place}" for x in lists)
            return one, two
        is_odd = any("," in name for names in lists for name in names)
        one, two = (", ".join(map(repr, names) if is_odd else names) for names in lists)
        return one, two
    if not isinstance(value, Task | Label) or type(value) is not type(other):
        return f"{value}", f"{other}"
    fields, others = (dict(one) if isinstance(one, Label) else asdict(one) for one in (value, other))
    keys = [key for key, mine in fields.items() if mine != others[key]]
    mine, theirs = (", ".join(f"{key} {getattr(task, key)}" for key in keys) for task in (value, other))
    return mine, theirs


def fitted_of(recipe: Recipe, reports: Mapping[str, NodeReport]) -> Preprocessing | None:
    """Return the preprocessing of nodes' tables, with new noise in a private run; None without. Raises DataError."""
    tables = {name: report.table for name, report in reports.items() if report.table is not None}
    if not tables:
        return None
    section, noise = recipe.privacy, None
    if section is not None:
        terms = terms_of(section, recipe.training, len(reports), statistics=True)
        noise = Noise(terms.noise, section.trust == "local", new_secret())
    return together(tables, noise)


def federation_of(
    reports: Mapping[str, NodeReport], unified: bool, fitted: Preprocessing | None = None
) -> tuple[BuiltFederation, Dataset, Partition]:
    """Build a federation whose data are at nodes, from their reports and the preprocessing `fitted`, with sorted tasks.

    Raises DataError that names a client whose report does not fit the others'.
    """
    if not reports:
        raise DataError("no node has reported its data")
    for name, why in agreed(reports)[1].items():
        raise DataError(f"client {name!r}: {why}")
    first = next(iter(reports.values()))
    shape = first.input_shape
    known = {task.name: task for report in reports.values() for task in map(as_task, report.tasks)}
    known = dict(sorted(known.items()))
    classes = {name: names for report in reports.values() for name, names in report.classes.items()}
    if fitted is not None:
        shape = (len(fitted.names),)
        for name, label in fitted.tasks.items():
            if isinstance(task := known[name], Regression):
                known[name] = replace(task, mean=label.mean or 0.0, std=label.std or 1.0)
    sizes = [node.sizes for node in reports.values()]
    train_part = Elsewhere(sum(size.train + size.val for size in sizes), shape)
    test_part = Elsewhere(sum(size.test for size in sizes), shape)
    tables = {name: report.table for name, report in sorted(reports.items()) if report.table is not None}
    tasks, doubts = tuple(known.values()), tuple(far_off(tables))
    dataset = Dataset(
        "nodes", tasks, train_part, test_part, signal=first.signal, classes=classes, table=fitted, doubts=doubts
    )
    shares, clients = [], {}
    for name, node in sorted(reports.items()):
        train, val, test = (np.broadcast_to(np.int64(0), (count,)) for _, count in node.sizes)
        clients[name] = BuiltClient(
            name,
            {task: (known[task], float(weight)) for task, weight in sorted(node.weights.items())},
            Part(dataset.train, train, "own"),
            Part(dataset.train, val, "own"),
            Part(dataset.test, test, "own"),
            node.domain,
            counted=node.counted,
        )
        # nothing is dealt out: only the node has positions
        nowhere = np.zeros(0, dtype=np.int64)
        shares.append(Share(name, node.weights, nowhere, nowhere, node.domain))
    return BuiltFederation(dataset.tasks, clients, unified), dataset, Partition(tuple(shares))


def build_from(
    recipe: Recipe,
    reports: Mapping[str, NodeReport],
    saved: Partition | None = None,
    fitted: Preprocessing | None = None,
) -> Built:
    """Build a recipe at a server that has no data; `saved` and `fitted` are the partition and the preprocessing of a
    resumed run."""
    method = method_of(recipe)
    if method.turn.apart:
        raise RecipeError(
            f"method: {method.name} needs a client for each task, but each node is one client with all its tasks; give "
            "each task its own node, or leave by-task out"
        )
    fitted = fitted or fitted_of(recipe, reports)
    federation, dataset, partition = federation_of(reports, recipe.model.heads == "all", fitted)
    built = assemble(recipe, method, dataset, Pool.of(dataset), saved or partition, federation)
    unmeasured(built)  # refuses an evaluation without any score
    return built


def build_again(recipe: Recipe, folder: Path, partition: Partition) -> tuple[Built, dict[str, NodeReport]]:
    """Build the recipe of a run folder without the nodes; return their reports too. Raises StateError."""
    file = folder / REPORTS
    try:
        reports = {client: NodeReport.read(report, client) for client, report in dict(json_of(file)).items()}
        file = folder / "run.json"  # has the preprocessing of tables, which with noise cannot be computed again
        found = dict(json_of(file)).get("table")
        fitted = None if found is None else Preprocessing.model_validate(found)
    except (OSError, TypeError, ValueError, UserError) as error:
        raise StateError(f"{file} cannot be read: {error}") from error
    return build_from(recipe, reports, partition, fitted), reports


def build_alone(recipe: Recipe, folder: Path) -> Built:
    """Build the recipe of a run folder at a node, with its data. Raises StateError, or RecipeError for code."""
    file, info = folder / AT_NODE, read_info(folder)
    value = json_of(file)
    admit(names_in(value), Origin.FOLDER, str(file), info.get("origins"))
    at_node = section_of(AtNode, value, str(file), StateError)
    table = info.get("table")
    fitted = None if table is None else section_of(Preprocessing, table, f"{folder / 'run.json'}, table", StateError)
    return build_at(recipe, at_node.config, tuple(map(as_task, at_node.tasks)), fitted)


def build_at(recipe: Recipe, config: NodeConfig, tasks: tuple[Task, ...], fitted: Preprocessing | None = None) -> Built:
    """Build a recipe at a node with its own data; `tasks` and `fitted` are those of the whole federation."""
    dataset, client = own_data(recipe, config, fitted=fitted)
    known = {task.name: task for task in tasks}
    client = replace(client, tasks={name: (known[name], weight) for name, (_, weight) in client.tasks.items()})
    federation = BuiltFederation(tasks, {client.id: client}, recipe.model.heads == "all")
    whole = replace(dataset, tasks=tasks, domains=(), deal=None)
    return assemble(recipe, method_of(recipe), whole, Pool({}), Partition(()), federation)
