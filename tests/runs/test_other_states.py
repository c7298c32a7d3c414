"""Checkpoints with the right checksums whose content no run wrote: a run refuses them in a sentence, or goes on."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedloom
from fedloom.engines.api import Engine
from fedloom.errors import StateError
from fedloom.federation.recipes.schema import Recipe
from fedloom.federation.rounds.built import Built
from fedloom.federation.rounds.progress import Progress
from fedloom.federation.runs import checkpoint
from fedloom.methods.drift.aggregation import ControlVariates
from tests_support import load_recipe, stopped_after
from trials.hostile import Tally, judged

TINY = (
    "data={name: digits, tasks: [digit, holes], size: 8, test_fraction: 0.1}",
    "partition={name: task-groups, groups: [[digit], [digit], [holes], [digit, holes]], val_fraction: 0.05}",
    *("model={name: small-cnn, width: 4, hidden: 8}", "training.rounds=4", "training.batch_size=16"),
    *("evaluation.predictions=false", "evaluation.splits=[val, test]"),
)
RUNS = {
    "momentum": ("method={name: fedopt, optimizer: momentum, b1: 0.5}",),
    "scaffold": ("method=scaffold",),
    "ditto": ("method=ditto", "early_stopping={patience: 5}"),
    "fedhca2": ("method=fedhca2", "model.heads=own"),
    "matu": ("method=matu",),
    "cfl": ("method={name: cfl, start: 0, eps1: 9, eps2: 0}",),
    "ifca": ("method=ifca",),
    "private": ("method={name: fedper, weights: uniform}", "privacy={clip: 0.5, noise: 1, delta: 0.01}"),
    "peers": ("peers={}", "model.heads=own"),
    "gossip": ("peers={mode: asynchronous, weights: {kind: uniform}, scenario: {speed: 20, latency: 0.05}}",),
    "edge": (
        *("method={name: fedprox, add: {feddea: {rho: 0.5}, famo: }}", "training.participation=0.5"),
        *("training.optimizer={name: adam, lr: 0.02}", "training.keep_optimizer=true"),
    ),
}
"""Methods with different kinds of state: of the server rule, of stages, at clients, at peers, of optimisers."""
GONE = object()


class Ready(Engine):
    """An engine that builds a recipe once."""

    built: Built | None = None

    def build(self, recipe: Recipe, partition: Any = None) -> Built:
        self.built = self.built or super().build(recipe, partition)
        return self.built


def places(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """All values of a tree, with their paths."""
    yield path, tree
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        yield from places(value, (*path, key))


def others(value: Any) -> Iterator[Any]:
    """What a stranger may put in the place of a value."""
    yield from (GONE, None, "x", -1, float("nan"), 10**30, True, [1], {}, {"x": 1}, torch.zeros(2, 3))
    if isinstance(value, Tensor):
        flat = value.reshape(-1)
        yield from (torch.cat([flat, flat, torch.ones(1)]), value.sum(), value[:0] if value.ndim else value.reshape(1))
        yield from (value.to(torch.float64), value.to(torch.int64), torch.full_like(value, -1), value / 0)
    elif isinstance(value, dict):
        yield from ({**value, "nobody": {}}, {**value, "nobody": torch.zeros(2)})
    elif isinstance(value, list):
        yield from ([*value, "x"], [*value, None], value[:-1])


def with_other(tree: Any, path: tuple[Any, ...], value: Any) -> Any:
    """The tree with another value, or none, at a place."""
    if not path:
        return None if value is GONE else value
    tree = dict(tree) if isinstance(tree, dict) else list(tree)
    if path[1:]:
        tree[path[0]] = with_other(tree[path[0]], path[1:], value)
    elif value is GONE:
        del tree[path[0]]
    else:
        tree[path[0]] = value
    return tree


def saved_again(home: Path, name: str, tree: Any) -> None:
    """Put a tree in the place of a checkpoint's, with its labels and new checksums."""
    head = json.loads((home / f"{name}.json").read_text().splitlines()[0])
    for file in home.glob(f"{name}.*"):
        file.unlink()
    checkpoint.save(home, name, tree, **{k: v for k, v in head.items() if k not in ("format", "sha256", "tree")})


def resumed_with_others(name: str, tmp_path: Path, share: float, record: Any) -> None:
    """Resume a run with a share of all other states."""
    run, engine, tally = stopped_after(2, tmp_path / "run", load_recipe(*TINY, *RUNS[name])), Ready(), Tally(record)
    copy, rng = tmp_path / "copy", random.Random(0)
    files = [(run, "state"), *((home, "state-2") for home in sorted(run.glob("peers/*"))[:1])]
    for home, file in files:
        tree = checkpoint.load(home, file, newest=lambda head: 0)[0]
        cases = [(path, other) for path, value in places(tree) for other in others(value)]
        for path, other in rng.sample(cases, max(int(share * len(cases)), min(6, len(cases)))):
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(run, copy, ignore=shutil.ignore_patterns("state.prev.*"))
            saved_again(copy / home.relative_to(run), file, with_other(tree, path, other))
            shown = "" if other is GONE else repr(other)[:50]
            with tally.case(f"{file}.{'.'.join(map(str, path))}: {shown}"):
                tally.answer(judged(lambda: fedloom.resume(copy, engine=engine, progress=Progress())))
    tally.close()


@pytest.mark.parametrize("name", RUNS)
def test_a_state_that_no_run_wrote(name: str, tmp_path: Path, record_property: Any) -> None:
    resumed_with_others(name, tmp_path, 0.005, record_property)


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_all_states_that_no_run_wrote(name: str, tmp_path: Path, record_property: Any) -> None:
    resumed_with_others(name, tmp_path, 1, record_property)


@pytest.fixture(scope="module")
def scaffold(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stopped_after(2, tmp_path_factory.mktemp("scaffold") / "run", load_recipe(*TINY, *RUNS["scaffold"]))


@pytest.mark.parametrize(
    ("path", "other", "sentence"),
    [
        (("server", "model"), torch.zeros(3), r"server\.model: expected shape \(717,\) of torch\.float32, found shape"),
        (("server", "model"), torch.zeros(717) / 0, r"server\.model: expected finite values"),
        (("clients", "eve"), {}, r"clients: expected no 'eve', known are c00, c01, c02, c03"),
        (("round",), -2, "round: expected 2, found -2"),
        (("stopped",), "no", "stopped: expected a bool, found 'no'"),
        (
            ("server", "stage", "0"),
            {},
            r"cannot continue.*state\.json.*report this as a bug: KeyError: 'control'",
        ),
    ],
)
def test_what_is_wrong_is_named(
    path: tuple[Any, ...], other: Any, sentence: str, scaffold: Path, tmp_path: Path
) -> None:
    run = Path(shutil.copytree(scaffold, tmp_path / "run", ignore=shutil.ignore_patterns("state.prev.*")))
    saved_again(run, "state", with_other(checkpoint.load(run, "state", newest=lambda head: 0)[0], path, other))
    with pytest.raises(StateError, match=sentence) as caught:
        fedloom.resume(run)
    assert str(run) in str(caught.value)


FAILS = """
def fails(self, updates, state, ctx):
    return 1 / (ctx.round != {round}) and call(self, updates, state, ctx)
"""


@pytest.mark.parametrize(("round_", "error"), [(3, StateError), (4, ZeroDivisionError)])
def test_a_bug_stays_a_bug(
    round_: int, error: type[Exception], scaffold: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a new run, and once nothing of the checkpoint is in use; before that nobody can know."""
    known: dict[str, Any] = {"call": ControlVariates.__call__}
    exec(compile(FAILS.format(round=round_), fedloom.__file__, "exec"), known)
    monkeypatch.setattr(ControlVariates, "__call__", known["fails"])
    with pytest.raises(error):
        fedloom.resume(shutil.copytree(scaffold, tmp_path / "run"))
    with pytest.raises(ZeroDivisionError):
        fedloom.run(load_recipe(*TINY, *RUNS["scaffold"]), tmp_path / "new")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"t": self.linear(x)}


def test_a_damaged_start_of_a_model_of_ones_own(tmp_path: Path) -> None:
    x = torch.rand(30, 3, generator=torch.Generator().manual_seed(0))
    y = (x.sum(1) > 1.5).long()
    clients = {"a": fedloom.Client((x[:20], {"t": y[:20]}), tasks=["t"])}
    fed = fedloom.Federation(
        clients, {"t": fedloom.task(kind="classification", classes=2)}, test=(x[20:], {"t": y[20:]})
    )
    run = fedloom.run(fed, tmp_path / "run", model=Net(), rounds=1, lr=0.1, progress=Progress()).folder
    file = run / "start.safetensors"
    file.write_bytes(file.read_bytes()[:-7])
    with pytest.raises(StateError, match=r"start\.safetensors: the model is not the one that the run began with"):
        fedloom.resume(run, federation=fed, model=Net(), progress=Progress())
