"""A run that is killed, at any write or any instant, goes on to the same bits and loses at most its running round."""

from __future__ import annotations

import json
import multiprocessing
import random
import re
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

import fedloom
from fedloom.federation.recipes.schema import Recipe
from fedloom.federation.rounds.progress import Progress
from fedloom.federation.runs.folder import RunFolder
from tests_support import assert_same, load_recipe, stopped_after
from trials.faults import KILLED, SENTENCE, Fault, in_a_process
from trials.scale import cases

SMALL = ("data.size=8", "training.rounds=3", "training.keep_optimizer=true", "runtime.diagnostics=false")
FAMILIES = {
    "one model": ("method=fedavg", "runtime.diagnostics=true"),
    "peers": ("method=fedavg", "model.heads=own", "peers={}"),
    "nodes": ("method=fedper", "runtime.engine=flower"),
    "workers": ("method={name: fedper, buffers: local}", "model={name: resnet10, width: 4}", "runtime.workers=2"),
    "state of the server": ("method=fedopt", "training.participation=0.6"),
    "auxiliary vectors": ("method=scaffold",),
    "personal models": ("method=ditto", "training.participation=0.6"),
    "models that do not change": ("method=ditto", "training.participation=0.2", "training.rounds=6"),
    "clusters": ("method=ifca",),
    "task vectors": ("method={name: matu, heads: local}", "model.heads=own"),
    "prototypes": ("method=fedproto", "model.heads=own"),
    "an add-on": ("method={name: fedprox, add: {feddea: {rho: 0.5, keep: random}}, codec: sparse}",),
    "one place": ("method=centralised",),
    "the best round": ("training.optimizer.lr=3.0", "early_stopping={patience: 1}"),
    "every second round": ("runtime.checkpoint_every=2",),
    "by time": ("runtime.checkpoint_every=auto",),
    "peers at their own pace": ("peers.mode=asynchronous", "peers.scenario={speed: 1}", "method=fedavg"),
    "several processes": ("method=fedamp", "runtime.engine=cluster", "runtime.workers=2"),
}
"""What differs in where the state of a run lies."""
CHOSEN = list(FAMILIES)[: cases(3, len(FAMILIES))]
Record = Callable[[str, object], None]


@dataclass(frozen=True)
class Whole:
    """A run that nothing disturbed."""

    recipe: Recipe
    folder: Path
    seconds: float
    writes: int


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Whole]:
    """The run of a family."""

    @cache
    def find(family: str) -> Whole:
        if family == "nodes":
            pytest.importorskip("flwr")
        recipe, folder = load_recipe(*SMALL, *FAMILIES[family]), tmp_path_factory.mktemp("whole") / "run"
        fedloom.run(recipe, folder.with_name("here"))  # so that children need not import anything
        start = time.monotonic()
        code, text = in_a_process(partial(fedloom.run, recipe, folder), folder)
        assert code == 0, text
        return Whole(recipe, folder, time.monotonic() - start, int(text))

    return find


def written(folder: Path) -> int:
    """The last whole line of metrics.jsonl."""
    file = folder / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return max((json.loads(line)["round"] for line in lines if line.endswith("}\n")), default=0)


def check(folder: Path, whole: Whole) -> None:
    """What was cut off goes on from its running round to the same bits; what never began says so."""
    resume = partial(fedloom.resume, folder)
    if not (folder / "recipe.yaml").is_file():
        assert not written(folder)
        code, text = in_a_process(resume, folder)
        assert code == SENTENCE
        assert "is not a run folder" in text
        return
    with RunFolder(folder) as opened:
        found = opened.load()
    saved = found[0]["round"] if found else 0
    if every := whole.recipe.runtime.saved_every:
        assert saved >= written(folder) - every
    code, text = in_a_process(resume, folder)
    assert code == 0, text
    assert_same(whole.folder, folder)


def faults(kinds: Sequence[str], writes: int, count: int, rng: random.Random) -> list[Fault]:
    """Of these kinds at every write; `count` of them by chance where these are fewer."""
    every = [Fault(kind, at, at) for kind in kinds for at in range(1, writes + 1)]
    return every if count >= len(every) else rng.sample(every, count)


@pytest.mark.parametrize("family", CHOSEN)
def test_killed_at_a_write(
    family: str, undisturbed: Callable[[str], Whole], tmp_path: Path, record_property: Record
) -> None:
    """Killed at a write, and now and then once more while it is resumed."""
    whole, folder, rng = undisturbed(family), tmp_path / "run", random.Random(family)
    large = {"one model": 1000, "peers": 1000, "several processes": 2}.get(family, 20)
    tried, again = faults(("kill", "torn"), whole.writes, cases(1, large), rng), 0
    for fault in tried:
        code, text = in_a_process(partial(fedloom.run, whole.recipe, folder), folder, fault)
        # by time, another run has another number of checkpoints, and so of writes
        assert code == KILLED or (code == 0 and family == "by time" and int(text) < fault.at), text
        if rng.random() < 0.3 and (folder / "recipe.yaml").is_file():
            second = Fault(fault.kind, rng.randint(1, 60), fault.at)
            again += in_a_process(partial(fedloom.resume, folder), folder, second)[0] == KILLED
        check(folder, whole)
        shutil.rmtree(folder, ignore_errors=True)
    record_property("kills", len(tried) + again)


@pytest.mark.parametrize("family", CHOSEN)
def test_killed_at_any_instant(
    family: str, undisturbed: Callable[[str], Whole], tmp_path: Path, record_property: Record
) -> None:
    """Killed again and again."""
    whole, rng, kills = undisturbed(family), random.Random(family), 0
    for number in range(cases(1, 2 if family == "several processes" else 10)):
        folder = tmp_path / f"run{number}"
        begin: Callable[[], object] = partial(fedloom.run, whole.recipe, folder)
        for _ in range(cases(1, 3)):
            kills += in_a_process(begin, folder, seconds=rng.uniform(0.0, whole.seconds))[0] == KILLED
            if not (folder / "recipe.yaml").is_file():
                break
            begin = partial(fedloom.resume, folder)
        if folder.exists():
            check(folder, whole)
    record_property("kills", kills)


@pytest.mark.parametrize("kind", ["full", "read-only", "no growth"])
@pytest.mark.parametrize("family", ["one model", "peers"])
def test_a_disk_that_refuses(
    kind: str, family: str, undisturbed: Callable[[str], Whole], tmp_path: Path, record_property: Record
) -> None:
    """The run ends with one sentence; once the disk takes what is written, it goes on to the same bits."""
    whole, folder, rng = undisturbed(family), tmp_path / "run", random.Random(f"{kind} {family}")
    tried = faults((kind,), whole.writes, cases(1, 40), rng)
    for fault in tried:
        code, text = in_a_process(partial(fedloom.run, whole.recipe, folder), folder, fault)
        assert code == SENTENCE or (kind == "no growth" and fault.at > whole.writes - 3), (fault, text)
        assert text.startswith(str(folder)) or code == 0, (fault, text)
        if folder.exists():
            check(folder, whole)
        shutil.rmtree(folder, ignore_errors=True)
    record_property("faults", len(tried))


def test_a_file_that_cannot_grow(undisturbed: Callable[[str], Whole], tmp_path: Path, record_property: Record) -> None:
    """Writes that the system itself refuses, also those of libraries that are not Python."""
    resource = pytest.importorskip("resource")
    whole, folder, rng = undisturbed("one model"), tmp_path / "run", random.Random(0)
    largest, refused = max(path.stat().st_size for path in whole.folder.rglob("*") if path.is_file()), 0

    def limited(limit: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        fedloom.run(whole.recipe, folder)

    count = cases(2, 40)
    for number in range(count):
        code, text = in_a_process(partial(limited, int(largest * (number + rng.random()) / count)), folder)
        assert code == SENTENCE, text
        assert text.startswith(str(folder)), text
        refused += 1
        if folder.exists():
            check(folder, whole)
        shutil.rmtree(folder, ignore_errors=True)
    record_property("faults", refused)


def test_a_worker_that_dies(undisturbed: Callable[[str], Whole], tmp_path: Path, record_property: Record) -> None:
    whole, folder = undisturbed("workers"), tmp_path / "run"

    class Deadly(Progress):
        def __init__(self, at: int) -> None:
            self.left = at

        def client(self, round: int, done: int, of: int) -> None:
            self.left -= 1
            if not self.left:
                for child in multiprocessing.active_children():
                    child.kill()

    tried = range(2, 16, cases(14, 1))
    for at in tried:
        code, text = in_a_process(partial(fedloom.run, whole.recipe, folder, progress=Deadly(at)), folder)
        assert code == SENTENCE, text
        assert re.search("worker process .* ended with exit code -9", text)
        check(folder, whole)
        shutil.rmtree(folder)
    record_property("kills", len(tried))


CHANGED = {
    "a finished run goes on": (2, (), ("training.rounds=4",)),
    "a stopped run goes on": (1, (), ("training.rounds=4", "runtime.diagnostics=false")),
    "every second round": (1, ("runtime.checkpoint_every=2",), ("training.rounds=4",)),
    "fewer rounds": (2, ("training.rounds=3",), ("training.rounds=2",)),
    "peers": (1, ("model.heads=own", "peers={}"), ("training.rounds=4",)),
    "a copy elsewhere": (1, ("runtime.mirror={mirror}",), ("training.rounds=4",)),
    "only what has no event": (1, (), ("runtime.workers=2", "runtime.diagnostics=false")),
    "an edited recipe": (1, (), ()),
}
"""Rounds that are over (2: the run is finished), the run's recipe, and how it is changed; () is by hand."""


def told_of(folder: Path) -> list[str]:
    """The events of changes in metrics.jsonl."""
    lines = {line["round"]: line for line in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())}
    return [event["keys"] for line in lines.values() for event in line["events"] if event["event"] == "recipe changed"]


@pytest.mark.parametrize("name", list(CHANGED)[: cases(2, len(CHANGED))])
def test_killed_while_a_change_is_accepted(name: str, tmp_path: Path, record_property: Record) -> None:
    """Before the kill the change was made or it was not: a plain resume works, and the change is told once."""
    rounds, recipe, changes = CHANGED[name]
    begun, folder, mirrored = tmp_path / "begun", tmp_path / "run", tmp_path / "copies" / "run"
    keys = ("data.size=8", "training.rounds=2", "runtime.diagnostics=false")
    first = load_recipe(*keys, *(key.replace("{mirror}", str(tmp_path / "copies")) for key in recipe))
    if rounds == first.training.rounds:
        fedloom.run(first, begun)
    else:
        stopped_after(rounds, begun, first)

    def renew(to: Path) -> Path:
        for path in (to, mirrored):
            shutil.rmtree(path, ignore_errors=True)
        return Path(shutil.copytree(begun, to))

    if not changes:
        text = (begun / "recipe.yaml").read_text()
        assert "lr: 0.05" in text
        (begun / "recipe.yaml").write_text(text.replace("lr: 0.05", "lr: 0.01"))
    options: dict[str, Any] = {"overrides": changes, "accept_changes": not changes}
    change = partial(fedloom.resume, folder, **options)
    renew(folder)
    code, text = in_a_process(change, folder)
    assert code == 0, text
    whole, expected = renew(tmp_path / "whole"), told_of(folder)
    fedloom.resume(whole, **options)
    assert len(expected) == (not changes or any(key.startswith("training") for key in changes))
    tried, accepted = faults(("kill", "torn"), int(text), cases(2, 1000), random.Random(name)), 0
    for fault in tried:
        renew(folder)
        assert in_a_process(change, folder, fault)[0] == KILLED
        killed = Path(shutil.copytree(folder, tmp_path / "killed", dirs_exist_ok=True))
        code, said = in_a_process(partial(fedloom.resume, folder), folder)  # plain
        assert code == 0 or (not changes and "lr was 0.05, is 0.01" in said), (fault, said)
        assert told_of(folder) in ([], expected), fault
        if told_of(folder) == expected:
            accepted += 1
        else:  # so the user asks once more
            shutil.rmtree(folder)
            killed.rename(folder)
        code, said = in_a_process(change, folder)
        assert code == 0, (fault, said)
        assert told_of(folder) == expected, fault
        assert_same(whole, folder, models_only=True)
        assert not (folder / "recipe.next.yaml").exists()
        shutil.rmtree(killed, ignore_errors=True)
    record_property("kills", len(tried))
    record_property("accepted", accepted)
