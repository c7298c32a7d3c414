"""Test when a run saves its state, and what it writes then."""

from __future__ import annotations

import functools
import gc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from safetensors.torch import save as library

import fedloom
from fedloom.core.context import State
from fedloom.core.errors import StateError
from fedloom.engines.cluster.member import SharedFolder
from fedloom.federation.recipes.runtime import EarlyStopping, Runtime
from fedloom.federation.rounds import rounds
from fedloom.federation.rounds.rounds import Saving
from fedloom.federation.runs import checkpoint
from fedloom.federation.runs.folder import RunFolder
from tests_support import assert_same, load_recipe, same, stopped_after

TIMED = ("training.rounds=4", "data.size=8", "runtime.checkpoint_every=auto")


def test_saving_takes_at_most_a_twentieth_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Saving takes 2 s, so 38 s are trained before the next save: 2 of 40 s are 5 %."""
    now = [100.0]

    class Slow:
        def save(self, state: State) -> None:
            now[0] += 2

        def agreed(self, decision: bool) -> bool:
            return decision

    monkeypatch.setattr(rounds, "time", SimpleNamespace(monotonic=lambda: now[0]))
    folder: Any = Slow()
    saving = Saving(folder, None)
    assert saving.due(1)  # of a run that goes on it is not known how long saving takes
    saving.save({"round": 1})
    assert now == [102.0]
    for at, due in ((102.0, False), (139.9, False), (140.1, True), (500.0, True)):
        now[0] = at
        assert saving.due(2) == due, at
    counted = Saving(folder, 3)
    counted.save({"round": 0})
    assert [counted.due(number) for number in range(1, 7)] == [False, False, True, False, False, True]


def test_who_decides_when_to_save() -> None:
    assert Runtime().saved_every is None
    assert Runtime(checkpoint_every=3).saved_every == 3
    assert Runtime(engine="flower").saved_every == 1  # nodes delete older states
    rank_0: Any = SimpleNamespace(comm=SimpleNamespace(size=2, from_first=lambda trees: False))
    assert SharedFolder(rank_0, None).agreed(True) is False


@pytest.fixture
def never(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """No time is enough for saving in between; the rounds that are saved all the same."""
    saved: list[int] = []
    save = RunFolder.save

    @functools.wraps(save)
    def noted(self: RunFolder, state: State, name: str = "state") -> None:
        saved.append(state["round"])
        save(self, state, name)

    monkeypatch.setattr(Saving, "SHARE", 1e-12)
    monkeypatch.setattr(RunFolder, "save", noted)
    return saved


@pytest.mark.parametrize("changes", [("method=scaffold",), ("method=fedavg", "model.heads=own", "peers={}")])
def test_a_run_repeats_all_rounds_since_its_last_checkpoint(
    changes: tuple[str, ...], never: list[int], tmp_path: Path
) -> None:
    recipe = load_recipe(*TIMED, *changes)
    whole = fedloom.run(recipe, tmp_path / "whole")
    assert never == [0, 4]  # the last round always
    part = stopped_after(3, tmp_path / "part", recipe)
    assert len((part / "metrics.jsonl").read_text().splitlines()) == 4
    assert checkpoint.load(part, "state", lambda head: int(head["round"]))[0]["round"] == 0
    assert_same(whole, fedloom.resume(part))


def test_a_run_that_stops_early_is_saved(never: list[int], tmp_path: Path) -> None:
    changes = (*TIMED, "early_stopping={patience: 1, min_delta: 9, restore_best: false}")
    result = fedloom.run(load_recipe(*changes), tmp_path / "run")
    assert result.status == "stopped early"
    assert never == [0, result.run.last_round]


def test_lines_are_on_the_disk_before_the_checkpoint_that_counts_on_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines are not synced by themselves."""
    synced: list[str] = []
    sync, save = checkpoint.sync, checkpoint.save
    monkeypatch.setattr(checkpoint, "sync", lambda path: (synced.append(path.name), sync(path)))
    monkeypatch.setattr(checkpoint, "save", lambda *args, **labels: (synced.append("saved"), save(*args, **labels)))
    line = {"round": 1, "metrics": [], "events": []}
    with RunFolder(tmp_path) as folder:
        folder.write_round(line, {"up": [], "down": []})
        assert not synced
        folder.save({"round": 1})
        first, second, third = synced[:3]
        assert {first, second} == {"metrics.jsonl", "bytes.jsonl"}
        assert third == "saved"
        folder.save({"round": 1})
        assert synced.count("metrics.jsonl") == 1
        folder.write_round(line, {"up": [], "down": []})
    assert synced.count("metrics.jsonl") == 2  # when it is closed


def test_a_tensor_file_is_that_of_the_library(tmp_path: Path) -> None:
    kinds = list(checkpoint._DTYPES)
    tensors = {f"{len(kinds) - i} ü": torch.arange(i + 1).to(kind) for i, kind in enumerate(kinds)}
    tensors |= {"scalar": torch.tensor(7), "empty": torch.zeros(0, 3), "turned": torch.arange(6.0).view(2, 3).t()}
    tensors |= {"large": torch.randn(300, 400), "part": torch.arange(9.0)[2:5]}
    file = tmp_path / "x.safetensors"
    checkpoint.save_tensors(tensors, file)
    assert file.read_bytes() == library({name: t.contiguous() for name, t in tensors.items()})
    checkpoint.save_tensors(tensors, file, {"b": "2", "a": "ü"})
    assert same(load_file(file), tensors)


def test_a_tensor_that_is_twice_in_a_state_is_written_once(tmp_path: Path) -> None:
    x = torch.randn(1000)
    checkpoint.save(tmp_path, "s", {"a": x, "b": {"c": x}, "d": x[:500]}, round=1)
    assert (tmp_path / "s.safetensors").stat().st_size < 1600 * x.element_size()
    back, _, _ = checkpoint.load(tmp_path, "s", lambda head: 0)
    assert same(back, {"a": x, "b": {"c": x}, "d": x[:500]})


def test_the_best_state_is_saved_before_the_first_state_that_names_its_round(tmp_path: Path) -> None:
    """A kill in between leaves a best state that no state names; what is named is still there, whatever comes after."""

    def state(number: int, best: int) -> State:
        early = {"best": 1.0, "best_round": best, "waited": number - best}
        peers = {"a": {"w": torch.tensor([number])}}
        return {"round": number, "early": early, "stopped": number - best == 3, "peers": peers}

    early = EarlyStopping(patience=3)
    with RunFolder(tmp_path) as folder:
        saving = Saving(folder, 5)
        for number, best in ((4, 4), (5, 4)):
            saving.best = state(4, 4) if number == best else saving.best
            if saving.due(number):
                saving.save(state(number, best))
        for killed in (6, 7):
            folder.save(state(killed, killed), "best")
    with RunFolder(tmp_path) as folder:
        newest = folder.load()
        assert newest is not None
        assert newest[0]["round"] == 5
        assert folder.kept(state(7, 4), early)["peers"]["a"]["w"].tolist() == [4]
        with pytest.raises(StateError, match="the state of round 5, the best one, is missing"):
            folder.kept(state(8, 5), early)
        folder.save(state(9, 9), "best")
        folder.save(state(9, 9))
        folder.save(state(10, 9))
        assert [path.name for path in tmp_path.rglob("best*.json")] == ["best-9.json"] * 2
        assert folder.kept(state(12, 9), early)["peers"]["a"]["w"].tolist() == [9]


def test_nothing_of_a_run_waits_for_the_search_for_garbage(tmp_path: Path) -> None:
    """A cycle with tensors would keep those of each checkpoint and each run until Python searches for cycles."""
    gc.collect()
    gc.disable()
    try:
        fedloom.run(load_recipe("data.size=8"), tmp_path / "run")
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        left = [tuple(item.shape) for item in gc.garbage if isinstance(item, torch.Tensor)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert left == []
