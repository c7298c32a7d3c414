"""Helpers of several test files."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import fedloom
from fedloom.core.stage import every
from fedloom.engines.api import Result
from fedloom.federation.recipes.loader import load
from fedloom.federation.recipes.schema import Recipe
from fedloom.stages import Stage

Quick = Callable[..., Result]
"""The fixture `quick`."""
POOLED = ("centralised", "constant")
"""Methods that need the examples of all clients in one place, and so one process."""
QUICK = ("data.size=8", "training.rounds=2", "training.steps=2", "training.epochs=null", "runtime.checkpoint_every=1")
"""Changes that cut the main recipe down to a few steps on small images."""


def named(name: str) -> str:
    """The keys of a method that runs quickly, also where clients have heads of their own tasks only."""
    # models whose heads nobody trained are not compared; tuning before every measurement takes long
    more = {"fedamp": ", share: encoder", "fedmtl": ", share: encoder", "fedbabu": ", tune: 1", "fedspd": ", tune: 0"}
    more |= {"fedtgp": ", server_epochs: 5"}
    return f"name: {name}{more.get(name, '')}"


ROBUST = ("krum", "multi-krum", "mda", "nnm", "rfa", "centred-clip", "clip", "trimmed-mean", "median")
"""Add-ons that need several clients with the same tasks, unless f is 0."""

TORCHJD = ("upgrad", "dualproj", "aligned-mtl", "imtl-g", "fairgrad")
"""Add-ons of the extra `methods`, which are refused without it."""

MERGING = ("ties", "dare", "consensus", "iso-c", "tsv-m", "wudi", "fedrpca")
"""Add-ons that merge updates as task vectors are merged."""


def installed(stage: Stage) -> bool:
    """Return whether the packages that a stage needs are installed."""
    return not any("which is not installed" in why for one in every(stage) for why in one.unfit(None))


def needed(addon: str) -> dict[str, Any]:
    """Parameters without which an add-on is refused where each client has another task."""
    return {"step": 2} if addon == "server-step" else {"f": 0} if addon in ROBUST else {}


def load_recipe(*changes: str, recipe: str = "digits-tasks") -> Recipe:
    """The main recipe, cut down to a few steps on small images, with changes."""
    return load(recipe, (*(QUICK if recipe == "digits-tasks" else QUICK[1:]), *changes))


def outcome(result: Result | Path) -> tuple[dict[str, torch.Tensor], list[Any]]:
    """Return what must be equal for two runs to be the same: final tensors, and all numbers of metrics.jsonl but
    seconds.
    """
    folder = result.folder if isinstance(result, Result) else result
    lines = [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]
    timed = ("seconds", "seconds_of")
    return load_file(folder / "model.safetensors"), [{k: v for k, v in x.items() if k not in timed} for x in lines]


def assert_same(a: Result | Path, b: Result | Path, *, models_only: bool = False) -> None:
    """Bit for bit."""
    (tensors_a, lines_a), (tensors_b, lines_b) = outcome(a), outcome(b)
    assert tensors_a.keys() == tensors_b.keys()
    for name, tensor in tensors_a.items():
        assert torch.equal(tensor, tensors_b[name]), name
    if not models_only:
        assert lines_a == lines_b


def same(a: Any, b: Any) -> bool:
    """Return whether two trees are equal, tensors bit for bit."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        raw_a, raw_b = (of.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for of in (a, b))
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(raw_a, raw_b)
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


def loaded(code: str, *modules: str) -> set[str]:
    """Return which of these modules a fresh Python has loaded once it has run the code, which must not fail."""
    script = f"{code}\nimport sys; print('loaded:', *sys.modules)"
    out = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, check=True).stdout
    return set(modules) & set(out.rpartition("loaded:")[2].split())


class Stop(Exception):
    """A crash."""


def stopped_after(rounds: int, folder: Path, recipe: Recipe) -> Path:
    """Run until so many rounds are saved, then fail in the middle of the next."""
    from fedloom.federation.rounds.progress import Progress

    class Crash(Progress):
        def client(self, round: int, done: int, of: int) -> None:
            if round == rounds + 1 and done == of:
                raise Stop

    with pytest.raises(Stop):
        fedloom.run(recipe, folder, progress=Crash())
    return folder


def client_step(
    method: Any, model: Any, federation: Any, client: Any, received: Any, state: Any, ctx: Any, training: Any
) -> tuple[Any, Any, Any]:
    """One client's part of a round: (payload, result, new state)."""
    from fedloom.federation.rounds.client import part_of

    part = part_of(method)(method, model.layout, federation, model, client, ctx, client.settings(training))
    return part.step(received, state)
