"""The files beside exported weights: a card (the model, its measurements, its cost), and a script that loads
it with timm and torch alone.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from string import Template
from typing import Any

from torch import nn

from fedloom.core.errors import StateError
from fedloom.core.lazy import need
from fedloom.data.tables.preprocessing import ALL, Preprocessing
from fedloom.federation.rounds.built import Built
from fedloom.federation.rounds.federation import BuiltClient
from fedloom.federation.runs.reader import Final, Run, TaskMetric, human_bytes
from fedloom.models.multitask import MultiTask
from fedloom.models.nets import PyramidEncoder
from fedloom.models.tasks.task import Task

RECIPE, WEIGHTS, LOADER = "recipe.yaml", "model.safetensors", "load.py"


def card(
    built: Built, run: Run, about: Mapping[str, Any], wanted: Sequence[Task], client: str | None, hub: bool = False
) -> str:
    """Return the card in Markdown; `about` is what export.json says, `wanted` the tasks of the model.

    `hub`: with what was measured as a `model-index`, which the Hugging Face hub shows.
    """
    names = {task.name for task in wanted}
    owner = " and ".join(f"{what} {_plain(about[what])}" for what in ("client", "task") if about[what] is not None)
    shape = " x ".join(map(str, about["input_shape"]))
    kind = "" if about["signal"] is None else f"{about['signal']['kind']}, "
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
            *(_index(run, about, names, client) if hub else []),
            "---",
            "",
            f"# {_plain(about['recipe'])}: {_plain(about['method'])}",
            "",
            f"This is {f'the model of {owner}' if owner else 'the global model'} of a federated run of "
            f"{len(run.info['clients'])} clients and {run.last_round} rounds.",
            "",
            f"- Tasks: {', '.join(f'{t.name} ({t.kind}, {t.channels})' for t in wanted)}",
            f"- Input: {kind}{shape}, {'values of 0 to 1, ' if is_image(about['input_shape']) else ''}{normalised}",
            f"- Data: {data}; partition: {_plain(run.recipe['partition']['name'])}",
            f"- Method: {_plain(about['method'])}; seed {about['seed']}; fedloom {about['fedloom']}; {RECIPE} says all",
            f"- Sent over the run: {human_bytes(sent['up'])} by clients, {human_bytes(sent['down'])} to clients",
            f"- Licence: {about['licence']}. Weights inherit what the licence of the data asks for, and that of "
            "pretrained weights where training began from some.",
            "",
            *(_columns(built.dataset.table, wanted) if built.dataset.table is not None else []),
            "## Splits",
            "",
            *_splits(built.federation.clients, client),
            "",
            "## Measured",
            "",
            *_measured(run, about, names, client),
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


def _columns(table: Preprocessing, wanted: Sequence[Task]) -> list[str]:
    """Sections about a table's columns: how each becomes inputs, and what each task predicts in which unit."""
    own = ALL not in table.scales
    scales = iter(() if own else table.scales[ALL])
    rows = [["column", "kind", "becomes"]]
    for each in table.inputs:
        if each.kind == "category":
            how = f"one input for each of {', '.join(each.values)}"
        elif own:
            how = "less the site's mean, over its standard deviation"
        else:
            how = "less {:.6g}, over {:.6g}".format(*next(scales))
        rows.append([_plain(each.column), each.kind, _plain(how) + "; one for missing" * each.indicator])
    labels = [["task", "column", "predicts"]]
    for task in wanted:
        label = table.tasks[task.name]
        real = "a number in the unit of the column"
        what = "a probability of each" if label.columns else ", ".join(label.classes) or real
        labels.append([task.name, _plain(", ".join(label.read_from(task.name))), _plain(what)])
    missing = ", ".join(f"`{code}`" for code in ("empty", "NA", "NaN", *table.missing))
    how = (
        "by its own numbers; nothing was sent"
        if own
        else (f"by what all sites counted in their training rows, without counts of fewer than {table.minimum} rows")
    )
    return [
        "## Columns",
        "",
        f"Missing are cells that are {missing}; a missing number becomes the mean. Each site is scaled {how}. The "
        "units are those of the table.",
        "",
        *_table(rows),
        "",
        *_table(labels),
        "",
    ]  # fmt: skip


def _splits(clients: Mapping[str, BuiltClient], client: str | None) -> list[str]:
    """Return a table of how many examples the clients have; a part that several share counts once."""
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


def _index(run: Run, about: Mapping[str, Any], tasks: set[str], client: str | None) -> list[str]:
    """Return what was measured as lines of the card's YAML; none where nothing was. JSON is YAML."""
    final = _final(run, about, client)
    if final is None:
        return []
    results = [
        {
            "task": {"type": run.info["tasks"][task]["kind"], "name": task},
            "dataset": {"type": run.recipe["data"]["name"], "name": f"{run.recipe['data']['name']}, {final.data[0]}"},
            "metrics": [{"type": metric, "value": round(value, 6)} for metric, value in values.items()],
        }
        for task, values in _values(final, tasks).items()
    ]
    name = f"{about['recipe']}: {about['method']}"
    return [f"model-index: {json.dumps([{'name': name, 'results': results}])}"]


def _final(run: Run, about: Mapping[str, Any], client: str | None) -> Final | None:
    """Return what the run measured of this model on test data, if it did; numbers of other models are left out."""
    if about["client"] is None and about["task"] is None:
        only = [{**line, "metrics": [m for m in line["metrics"] if m["model"] == "global"]} for line in run.rounds]
        run = replace(run, rounds=tuple(only))
    try:
        return run.by_client()[client] if client is not None else run.final()
    except (StateError, KeyError):
        return None


def _values(final: Final, tasks: set[str]) -> dict[str, dict[str, float]]:
    """Task -> metric -> value, of these tasks, where there is a number."""
    return {
        task: {metric: value for metric, value in values.items() if not math.isnan(value)}
        for task, values in final.values.items()
        if task in tasks
    }


def _measured(run: Run, about: Mapping[str, Any], tasks: set[str], client: str | None) -> list[str]:
    """Return a table of what the run measured of this model."""
    final = _final(run, about, client)
    if final is None:
        return ["The run did not measure this model on test data."]
    rows = [["task", "value"]] + [
        [str(TaskMetric(task, metric, run.direction(task, metric))), f"{value:.4f}"]
        for task, values in _values(final, tasks).items()
        for metric, value in values.items()
    ]
    whose = ":" if client is not None else ", mean over the clients with the task:"
    return [f"In round {final.round}, on {', '.join(final.data)} data{whose}", "", *_table(rows)]


def _used(module: MultiTask, about: Mapping[str, Any], wanted: Sequence[Task]) -> list[str]:
    """How to use the model."""
    if about.get("table") is not None:
        return ["```console", "fedloom predict . table.csv --out predictions.csv", "```"]
    if not is_image(about["input_shape"]):
        return [
            "`fedloom.experiments.export.bundle.Bundle.read(FOLDER).module` is the model; its inputs are no images."
        ]
    loads = f"`{LOADER}` loads it without fedloom, with torch and timm."
    fits = loader_fits(module, wanted)
    return ["```console", "fedloom predict . image.png", "```", *(["", loads] if fits else [])]


def loader_fits(module: MultiTask, wanted: Sequence[Task]) -> bool:
    """Return whether the model is a network as timm makes it, pruned to its maps or not, with linear heads."""
    encoder = module.encoder
    arguments = getattr(encoder, "made", None)
    if arguments is None or not all(type(module.heads[task.name]) is nn.Linear for task in wanted):
        return False
    plain = need("timm", "vision").create_model(**arguments, pretrained=False, num_classes=0)
    if isinstance(encoder, PyramidEncoder):
        plain.prune_intermediate_layers(encoder.levels, prune_norm=True, prune_head=True)
    # with adapters, modules of a method, or norms of its own it is more than that
    mine = {key for key in module.state_dict() if not key.startswith("heads.")}
    return mine == {f"encoder.net.{key}" for key in plain.state_dict()}


def loader(module: MultiTask, about: Mapping[str, Any], wanted: Sequence[Task]) -> str:
    """Return a script that loads a model that `loader_fits` without fedloom; `about` is what export.json says."""
    arguments: Mapping[str, Any] = module.encoder.made  # type: ignore[assignment]
    levels = module.encoder.levels if isinstance(module.encoder, PyramidEncoder) else None
    heads = {t.name: (module.heads[t.name].in_features, module.heads[t.name].out_features) for t in wanted}
    values = {"shape": tuple(about["input_shape"]), "mean": about["mean"], "std": about["std"], "heads": heads}
    values |= {"levels": levels, "made": dict(arguments)}
    template = Template(Path(__file__).with_name("load.py.txt").read_text(encoding="utf-8"))
    return template.substitute({name: repr(value) for name, value in values.items()})


def is_image(shape: Sequence[int]) -> bool:
    """Return whether a shape is that of an image."""
    return len(shape) == 3 and shape[0] in (1, 3)


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table; the first row is its head."""
    head, *body = (f"| {' | '.join(row)} |" for row in rows)
    return [head, "|---" * len(rows[0]) + "|", *body]


def _plain(text: str) -> str:
    """Return a name as plain text in Markdown, on one line."""
    return re.sub(r"([\\`*\[\]<>|])", r"\\\1", " ".join(str(text).split()))
