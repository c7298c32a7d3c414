"""The runs that are pinned, and what a run folder says. All through the public door: code may move, runs stay."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import yaml
from safetensors.torch import load_file

import fedloom
from fedloom.federation.rounds.progress import Progress
from fedloom.federation.runs import checkpoint
from fedloom.tasks import Classification

HERE = Path(__file__).parent
LOGS = ("metrics.jsonl", "bytes.jsonl", "diagnostics.jsonl")
TIMED = ("seconds", "seconds_of")
"""Keys of a round that say how fast this machine was."""
FORMS = {
    "methods": "method={{name: {name}, {given}}}",
    "addons": "method={{name: fedavg, add: {{{name}: {{{given}}}}}}}",
    "attacks": "attack={{name: {name}, clients: 2, {given}}}",
}


@cache
def known_runs() -> dict[str, list[str]]:
    """Return name -> a recipe and changes: of runs.yaml, then of variants.yaml, whose names are like methods/cfl-2."""
    read = yaml.safe_load((HERE / "runs.yaml").read_text())
    found = {name: replaced(changes, read["settings"]) for name, changes in read["runs"].items()} | {"own": []}
    read = yaml.safe_load((HERE / "variants.yaml").read_text())
    tiny, settings = read["tiny"], read["settings"]
    for section, form in FORMS.items():
        for name, variants in read[section].items():
            for number, variant in enumerate(variants, 1):
                given, *changes = [text.strip() for text in variant.split(" | ")]
                changes = [form.format(name=name, given=given), *(["robust"] if section == "attacks" else []), *changes]
                key = f"{section}/{name}{f'-{number}' if number > 1 else ''}"
                found[key] = [*tiny, *replaced(changes, settings)]
    return found | {f"others/{name}": [*tiny, *replaced(x, settings)] for name, x in read["others"].items()}


def replaced(words: Sequence[str], settings: Mapping[str, Sequence[str]]) -> list[str]:
    """Put what settings stand for in their place."""
    return [text for word in words for text in settings.get(word, [word])]


def run(name: str, folder: Path) -> Path:
    """Run one of the known runs in an empty folder, and return the folder; what is kept for later is beside it."""
    with mock.patch.dict(os.environ, FEDLOOM_CACHE=str(folder.with_name("cache"))):
        if name == "own":
            own_objects(folder)
            return folder
        recipe, *changes = known_runs()[name]
        fedloom.run(recipe, folder, overrides=changes, progress=Progress())
        if name == "resumed":
            fedloom.resume(folder, overrides=["training.rounds=4"])
    return folder


def own_objects(folder: Path) -> None:
    """Run a federation, a model and a method that are made in Python."""
    rng = torch.Generator().manual_seed(1)
    x = torch.randn(200, 8, generator=rng)
    y = (x @ torch.randn(8, 3, generator=rng)).argmax(1)
    sort, odd, far = {"sort": y}, {"odd": y % 2}, {"far": x[:, :2].sum(1)}
    some = {"ann": sort | odd, "bob": odd, "cleo": far}
    clients = {
        name: fedloom.Client(train=part(x, labels, i), val=part(x, labels, i + 3), tasks=list(labels))
        for i, (name, labels) in enumerate(some.items())
    }
    accuracy = Classification("odd", 2)  # fedloom.task would choose the AUC
    tasks = {"sort": fedloom.task(classes=3), "odd": accuracy, "far": fedloom.task()}
    fed = fedloom.Federation(clients=clients, tasks=tasks, test=part(x, sort | odd | far, 6))
    torch.manual_seed(2)
    net = fedloom.model(torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU()), heads="linear")
    method = fedloom.methods.fedprox(mu=0.1).plus(fedloom.stages.TopMagnitude(0.3))
    fedloom.run(fed, folder, model=net, method=method, rounds=3)


def part(x: torch.Tensor, labels: Mapping[str, torch.Tensor], number: int) -> tuple[torch.Tensor, Any]:
    """Return 25 examples with their labels."""
    here = slice(25 * number, 25 * (number + 1))
    return x[here], {task: label[here] for task, label in labels.items()}


def leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield every number, text and tensor of a tree with its path; a list's items are named by their texts too."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from leaves(item, f"{path}.{key}")
    elif isinstance(value, list | tuple) and any(isinstance(item, Mapping | list | tuple) for item in value):
        for number, item in enumerate(value):
            texts = [x for x in item.values() if isinstance(x, str)] if isinstance(item, Mapping) else []
            rest = {key: x for key, x in item.items() if not isinstance(x, str)} if texts else item
            yield from leaves(rest, f"{path}[{' '.join([str(number), *texts])}]")
    else:
        yield path, value


def named_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of the last checkpoint, by their places in the state, and those of the final models."""
    head = json.loads((folder / "state.json").read_text().partition("\n")[0])
    tensors = checkpoint._stored(head["sha256"], folder.glob("state.*safetensors"))
    places = {key.removesuffix(".$tensor"): x for key, x in state(folder).items() if key.endswith(".$tensor")}
    models = {f"model {key}": tensor for key, tensor in load_file(folder / "model.safetensors").items()}
    return {**{place: tensors[number] for place, number in places.items()}, **models}


def state(folder: Path) -> dict[str, Any]:
    """Return the values of the last checkpoint, by their places; those of tensors are numbers of tensors."""
    text = (folder / "state.json").read_text().partition("\n")[0]
    return {key.replace(".$dict", ""): value for key, value in leaves(json.loads(text)["tree"], "state")}


def numbers(folder: Path) -> dict[str, Any]:
    """Return all values of the run's logs but times, and of its state, by their places."""
    found = {key: value for key, value in state(folder).items() if not key.endswith(".$tensor")}
    for log in LOGS:
        if (folder / log).exists():
            for text in (folder / log).read_text().splitlines():
                line = {key: value for key, value in json.loads(text).items() if key not in TIMED}
                found.update(leaves(line, f"{log} round {line['round']}"))
    return found
