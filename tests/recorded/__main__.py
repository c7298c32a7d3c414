"""Run short runs and write down all that came out, or find out what has changed since.

PYTHONPATH=src:tests python -m recorded write FILE.json    # every number and tensor of every run
PYTHONPATH=src:tests python -m recorded check FILE.json    # run again and print each difference; exit with 1 if any

Compare on one machine only: bits depend on the processor and on the version of torch. All is run through the public
door and read from run folders, so that the same file of runs holds before and after code has moved.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import hashlib
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file

import fedloom

RUNS = Path(__file__).with_name("runs.yaml")
LOGS = ("metrics.jsonl", "bytes.jsonl", "diagnostics.jsonl")
TIMED = ("seconds", "seconds_of")
"""Keys of a round that say how fast this machine was."""


def known_runs() -> dict[str, list[str]]:
    """Return name -> a recipe and changes, of all runs."""
    read = yaml.safe_load(RUNS.read_text())
    settings: Mapping[str, list[str]] = read["settings"]
    runs: Mapping[str, list[str]] = read["runs"]
    return {name: [x for word in words for x in settings.get(word, [word])] for name, words in runs.items()} | {
        "own": []
    }


def run(name: str, folder: Path) -> Path:
    """Run one of the known runs in an empty folder, and return the folder."""
    if name == "own":
        own_objects(folder)
        return folder
    recipe, *changes = known_runs()[name]
    fedloom.run(recipe, folder, overrides=changes)
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
    tasks = {"sort": fedloom.task(classes=3), "odd": fedloom.task(classes=2), "far": fedloom.task()}
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


def digest(tensor: torch.Tensor) -> str:
    """Return type, shape and a checksum of the bytes of a tensor."""
    data = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    return f"{tensor.dtype} {list(tensor.shape)} {hashlib.sha256(data).hexdigest()[:24]}"


def named_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of the last checkpoint, by their places in the state, and those of the final models."""
    tensors = load_file(folder / "state.safetensors")
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


def outcome(folder: Path) -> dict[str, str]:
    """Return all that a run folder says, as texts: each tensor's checksum, each number with all its digits."""
    plan = {
        name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in ("recipe.yaml", "partition.json")
    }
    pictures = {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest()
                for p in sorted((folder / "predictions").rglob("*")) if p.is_file()}  # fmt: skip
    tensors = {name: digest(tensor) for name, tensor in named_tensors(folder).items()}
    return {**plan, **pictures, **tensors, **{name: json.dumps(value) for name, value in numbers(folder).items()}}


def compare(name: str, found: Mapping[str, str], expected: Mapping[str, str]) -> int:
    """Print the differences of a run, and return how many there are."""
    different = [key for key in {**expected, **found} if found.get(key) != expected.get(key)]
    for key in different:
        print(f"{name}: {key}: {found.get(key, 'nothing')} found, expected {expected.get(key, 'nothing')}")
    return len(different)


def main() -> int:
    parser = argparse.ArgumentParser(prog="recorded", description="What do short runs compute, to the last bit?")
    parser.add_argument("command", choices=["write", "check"])
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", action="append", metavar="NAME", help="of this run alone; may be given several times")
    options = parser.parse_args()
    torch.set_num_threads(1)
    names = options.only or list(known_runs())
    expected = json.loads(options.file.read_text()) if options.only or options.command == "check" else {}
    differences = 0
    for name in names:
        begin = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            try:
                found = outcome(run(name, Path(folder, "run")))
            except Exception as error:
                traceback.print_exc()
                found = {"failed": f"{type(error).__name__}: {error}"}
        if options.command == "check":
            differences += compare(name, found, expected.get(name, {}))
        expected[name] = found
        print(f"{name}: {len(found)} values, {time.monotonic() - begin:.1f} s", file=sys.stderr)
    if options.command == "write":
        options.file.write_text(json.dumps(expected, indent=0))
    else:
        print(f"{len(names)} runs, {differences} differences")
    return int(differences > 0)


if __name__ == "__main__":
    sys.exit(main())
