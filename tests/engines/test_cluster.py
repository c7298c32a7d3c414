"""A run in several processes under torchrun: the same as in one, and after the death of a process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import fedloom
from cluster_support import start
from fedloom.engines.cluster.member import deal, longest
from fedloom.errors import RecipeError, StateError, UserError
from fedloom.federation.recipes.schema import recipe_hash
from fedloom.methods import METHODS
from fedloom.methods.robust import ATTACKS
from tests_support import POOLED, QUICK, Quick, assert_same, load_recipe, named, outcome, same

HARD = (
    "digits-tasks",
    "data.size=8",
    "training.optimizer={name: adamw, lr: 0.001, weight_decay: 0.01}",
    "training.keep_optimizer=true",
    "training.participation=0.6",
    "training.schedule={name: cosine, warmup: 1}",
    "model.heads=own",
    "training.rounds=3",
)
NORM = ("model={name: resnet10, width: 4}", "evaluation.models=[global, personal, trained]")
ALL_HEADS = "model.heads=all"
ENORMOUS = ("digits-tasks", "training.steps=1", "tasks.large.weight=1e30")  # two of five clients send updates of 1e28
PEERS = ("dfmtl-digits", "training.rounds=3", "partition.clients=5", "peers.choose.top=2", "peers.warmup.until=2")

# What differs in what travels, in what is kept, and in how columns are combined.
EXACT: Mapping[str, tuple[str, ...]] = {
    "fedavg": HARD,
    "scaffold": (*HARD, "method=scaffold"),
    "personal": (*HARD, "method=fedhca2"),
    "tasks": (*HARD, "method=matu"),
    "tasks with batch norm": (*HARD, NORM[0], "method=separate"),
    "by task": (*HARD, "method={name: fedprox, add: {by-task: }}"),
    "told": (*HARD, "method={name: fedamp, share: encoder}"),
    "norm": (*HARD, *NORM, "method.buffers=pooled"),
    "codec": (*HARD, "method={name: fedprox, add: {feddea: {rho: 0.5}, heal: }}", "method.codec=sparse"),
    "nothing-shared": (*HARD, "method=local"),
    "stopped-early": (*HARD, "early_stopping={patience: 1, min_delta: 9}", "training.rounds=5"),
    "enormous": ENORMOUS,
    "attacked": (*HARD, "partition.clients_per_task=2", "attack={name: ipm, clients: [digit-0, holes-1]}"),
    "peers": PEERS,
    "peers-scenario": (*PEERS, "peers.scenario={latency: 0.1}", "peers.similarity.signals={cross-loss: 1}"),
}
SHARED: Mapping[str, tuple[str, ...]] = {
    "fedavg": HARD,
    "scaffold": (*HARD, "method=scaffold"),
    "dual": (*HARD, "method=feddyn"),
    "history": (*HARD, "method=fedbone"),
    "personal": (*HARD, "method=matfl"),
    "told": (*HARD, "method={name: fedamp, share: encoder}"),
    "hyper": (*HARD, "method=fedhca2", "method.decoder=mean"),
    "clusters": (*HARD, "method=cfl", "method.start=1", "method.eps1=9", "method.eps2=0", "training.participation=1"),
    "pcgrad": (*HARD, "method={name: fedavg, add: {pcgrad: }}"),
    "cagrad": (*HARD, "method={name: fedavg, add: {cagrad: }}"),
    "support": (*HARD, "method={name: fedavg, add: {support-mean: }}"),
    "median": (*HARD, "method={name: fedavg, add: {nnm: {within: all, f: 1}, median: {within: all, f: 1}}}", ALL_HEADS),
    "rfa": (*HARD, "method={name: fedavg, add: {rfa: {f: 0}}}", "attack=replay"),
    "norm": (*HARD, *NORM, "method=fedper"),
    "enormous": (*ENORMOUS, "method=scaffold"),
    "not-separable": (*HARD, "method={name: fedavg, add: {heal: }}"),
}
TOLERANCE = 2e-4
"""Of the largest value of a tensor, after three rounds of training from sums that were rounded differently."""


def run_all(out: Path, cases: Mapping[str, Sequence[str]], ranks: int) -> None:
    """All cases in a cluster; and each in one process, in OUT/one."""
    with ThreadPoolExecutor(1) as pool:
        cluster = pool.submit(start, out / str(ranks), cases, ranks)
        for name, (recipe, *changes) in cases.items():
            if not (out / "one" / name).exists():
                fedloom.run(load_recipe(*changes, recipe=recipe), out / "one" / name)
        cluster.result()
    for name in cases:
        error = out / str(ranks) / f"{name}.error"
        assert not error.exists(), f"{name}: {error.read_text()}"


def assert_near(a: Path, b: Path, tolerance: float) -> None:
    """Equal models up to a share of each tensor's largest value, and the same lines of metrics."""
    (tensors_a, lines_a), (tensors_b, lines_b) = outcome(a), outcome(b)
    assert tensors_a.keys() == tensors_b.keys()
    for name, tensor in tensors_a.items():
        scale = float(tensor.double().abs().max()) if tensor.numel() else 0.0
        assert torch.allclose(tensor.double(), tensors_b[name].double(), rtol=0, atol=tolerance * scale), name
    for one, other in zip(lines_a, lines_b, strict=True):
        assert one["cohort"] == other["cohort"]
        for kind in ("train", "metrics"):
            assert [_key(r) for r in one[kind]] == [_key(r) for r in other[kind]]


def _key(record: Mapping[str, object]) -> tuple[object, ...]:
    return tuple(v for k, v in record.items() if k not in ("value", "loss"))


def bytes_of(folder: Path) -> str:
    return (folder / "bytes.jsonl").read_text()


def diagnostics_of(folder: Path) -> list[Any]:
    return [json.loads(text) for text in (folder / "diagnostics.jsonl").read_text().splitlines()]


def shape_of(value: Any) -> Any:
    """With its measured numbers left out."""
    if isinstance(value, list):
        return [shape_of(v) for v in value]
    if isinstance(value, dict):
        return {key: shape_of(v) for key, v in value.items()}
    return None if isinstance(value, float) else value


def flat_of(value: Any) -> list[float]:
    """Its measured numbers."""
    if isinstance(value, list | dict):
        return [x for v in (value.values() if isinstance(value, dict) else value) for x in flat_of(v)]
    return [value] if isinstance(value, float) else []


def both(cases: Mapping[str, tuple[str, ...]], shared: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """All cases by name; those of shared work are called NAME~."""
    return {**cases, **{f"{name}~": (*changes, "runtime.exact=false") for name, changes in shared.items()}}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("two")
    quick = ("fedavg", "personal", "peers-scenario")
    shared = ("scaffold", "enormous")
    run_all(out, both({n: EXACT[n] for n in quick}, {n: SHARED[n] for n in shared}), 2)
    return out


def test_processes_agree_on_who_is_to_blame(two: Path) -> None:
    name = "enormous~"
    said = [[line["events"] for line in outcome(two / ranks / name)[1]] for ranks in ("one", "2")]
    assert said[0] == said[1]
    assert {e["client"] for line in said[0] for e in line if "client" in e} == {"all-0", "large-0"}
    assert_near(two / "one" / name, two / "2" / name, 0.01)


@pytest.mark.parametrize("name", ["fedavg", "personal", "peers-scenario"])
def test_two_processes_equal_one(two: Path, name: str) -> None:
    assert_same(two / "one" / name, two / "2" / name)
    assert bytes_of(two / "one" / name) == bytes_of(two / "2" / name)
    confusions = [(two / ranks / name / "predictions" / "confusion.json").read_bytes() for ranks in ("one", "2")]
    assert confusions[0] == confusions[1]


def test_two_processes_that_share_the_work_are_near_one(two: Path) -> None:
    one, other = two / "one" / "scaffold~", two / "2" / "scaffold~"
    assert_near(one, other, TOLERANCE)
    assert bytes_of(one) == bytes_of(other)
    one, other = diagnostics_of(one), diagnostics_of(other)
    assert one
    assert shape_of(one) == shape_of(other)
    # in the first round all start from the same bits, so what is looked at differs by the rounding of sums only
    assert flat_of(other[0]) == pytest.approx(flat_of(one[0]), rel=1e-3, abs=1e-3)


def test_a_whole_checkpoint_is_that_of_one_process(two: Path) -> None:
    """So that any engine, with any number of processes, can go on from it."""
    from fedloom.federation.runs import checkpoint

    for name in ("fedavg", "personal", "peers-scenario"):
        a, b = (
            checkpoint.load(folder, "state", lambda head: int(head["round"]))[0]
            for folder in (two / "one" / name, two / "2" / name)
        )
        assert same(a, b), name


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("ranks", [2, 3])
def test_every_method_and_every_way(tmp_path: Path, ranks: int) -> None:
    every = {f"method-{name}": (*HARD, f"method={{{named(name)}}}") for name in METHODS.entries.keys() - {*POOLED}}
    run_all(tmp_path, both({**EXACT, **every}, {**SHARED, **every}), ranks)
    for name in (*EXACT, *every):
        assert_same(tmp_path / "one" / name, tmp_path / str(ranks) / name)
    for name in (*SHARED, *every):
        assert_near(tmp_path / "one" / f"{name}~", tmp_path / str(ranks) / f"{name}~", TOLERANCE)


@pytest.mark.slow
def test_every_attack_is_that_of_one_process(tmp_path: Path) -> None:
    base = (*HARD, "partition.clients_per_task=2", "training.participation=1")
    cases = {name: (*base, f"attack={{name: {name}, clients: [digit-0, holes-1]}}") for name in ATTACKS.entries}
    cases["alie"] = (*cases["alie"], "attack.factor=1.5")  # the paper's would be 0
    run_all(tmp_path, cases, 2)
    for name in cases:
        assert_same(tmp_path / "2" / name, tmp_path / "one" / name)


@pytest.mark.slow
def test_shared_work_does_not_depend_on_who_has_which_rows(tmp_path: Path) -> None:
    """Sums are exact, so a plain mean is the same for any number of processes."""
    cases = {"fedavg": (*SHARED["fedavg"], "runtime.exact=false")}
    for ranks in (2, 3):
        start(tmp_path / str(ranks), cases, ranks)
    assert_same(tmp_path / "2" / "fedavg", tmp_path / "3" / "fedavg")


def ranks_of(folder: Path) -> list[int]:
    """Process ids of the members of a run, the youngest last."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes().decode().split("\0")
        except (OSError, UnicodeDecodeError):
            continue
        if "fedloom.engines.cluster" in words and str(folder) in words and "torch.distributed.run" not in words:
            found.append(int(entry.name))
    return sorted(found)


def written(folder: Path) -> int:
    """The last round in metrics.jsonl."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return max((json.loads(line)["round"] for line in lines if line.endswith("}")), default=-1)


class Seen(fedloom.engines.api.Progress):
    """Remembers which rounds were reported."""

    def __init__(self) -> None:
        self.rounds: list[int] = []

    def round(self, round: int, numbers: Mapping[str, float]) -> None:
        self.rounds.append(round)


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="finds processes in /proc")
@pytest.mark.slow
@pytest.mark.parametrize(("victim", "exact"), [(1, True), (0, False), (1, False)])
def test_a_process_that_is_killed_is_started_again(quick: Quick, tmp_path: Path, victim: int, exact: bool) -> None:
    changes = ("method=fedamp" if exact else "method=scaffold", "training.rounds=8", "training.steps=6")
    cluster = ("runtime.engine=cluster", "runtime.workers=2", f"runtime.exact={str(exact).lower()}")
    folder, seen = tmp_path / "killed", Seen()
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(fedloom.run, load_recipe(*changes, *cluster), folder, progress=seen)
        deadline = time.monotonic() + 240
        while written(folder) < 2:
            assert not run.done(), run.exception()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        members = ranks_of(folder)
        assert len(members) == 2
        os.kill(members[victim], signal.SIGKILL)
        assert run.result().status == "finished"
    assert seen.rounds == list(range(1, 9))  # each once, whatever was done again
    assert "exitcode: -9" in (folder / "cluster.log").read_text()
    whole = quick(*changes, *(() if exact else cluster))
    assert_same(whole, folder)


def test_what_cannot_run_is_refused_before_anything_is_started(quick: Quick, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="cannot receive a method that is a Python object"):
        quick("runtime.engine=cluster", method=fedloom.Method())
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(StateError, match="exists and is not empty"):
        fedloom.run(load_recipe("runtime.engine=cluster"), tmp_path / "full")
    own_pace = ("runtime.engine=cluster", "peers.mode=asynchronous", "peers.scenario={speed: 1}")
    with pytest.raises(RecipeError, match="asynchronous peers need"):
        fedloom.run(load_recipe(*own_pace, recipe="dfmtl-digits"), tmp_path / "peers")


@pytest.mark.slow
def test_a_mistake_in_a_process_is_one_clear_error(tmp_path: Path) -> None:
    """Training that fails for a reason that starting again does not mend."""
    recipe = load_recipe("runtime.engine=cluster", "runtime.workers=2", "training.rounds=3")
    result = fedloom.run(recipe, tmp_path / "run")
    text = (result.folder / "recipe.yaml").read_text()
    (result.folder / "recipe.yaml").write_text(text.replace("width: 16", "width: 8"))
    with pytest.raises(UserError, match="the model has changed since the run began"):
        fedloom.resume(result.folder)


@pytest.mark.slow
def test_processes_that_torchrun_started_join(quick: Quick, tmp_path: Path) -> None:
    changes = ("training.rounds=3", "method=scaffold")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "fedloom"]
    words = ["run", "digits-tasks", *QUICK, *changes, "runtime.engine=cluster", "--out", str(tmp_path / "joined")]
    done = subprocess.run([*command, *words], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("finished:") == 1  # the first of them speaks
    assert_same(quick(*changes), tmp_path / "joined")


def test_only_rounding_is_part_of_what_a_recipe_is() -> None:
    one = recipe_hash(load_recipe())
    assert recipe_hash(load_recipe("runtime.engine=cluster", "runtime.workers=4")) == one
    assert recipe_hash(load_recipe("runtime.engine=cluster", "runtime.exact=false")) != one


def test_clients_are_dealt_by_cost() -> None:
    cost = {"a": 5.0, "b": 4.0, "c": 3.0, "d": 3.0, "e": 3.0}
    owner = deal(cost, 2)
    assert owner == {"a": 0, "b": 1, "c": 1, "d": 0, "e": 1}
    assert longest(cost, owner) == 10.0
    assert deal(dict(reversed(cost.items())), 2) == owner
    assert set(deal({"a": 1.0}, 3).values()) == {0}
