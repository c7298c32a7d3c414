"""Test that a tensor that did not change is not written again, and that the newest two checkpoints share no file."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fedloom.core.context import State
from fedloom.errors import StateError
from fedloom.federation.runs import checkpoint
from fedloom.federation.runs.folder import RunFolder
from runs.test_crash import flip, truncate
from tests_support import same

CLIENTS, D = 20, 1000
WHOLE = CLIENTS * D * 4


def first() -> State:
    """The state before the first round."""
    return {"round": 0, "server": torch.zeros(3), "clients": {f"c{i}": torch.randn(D) for i in range(CLIENTS)}}


def later(state: State, changed: int = 1) -> State:
    """The state after one more round, in which some clients took part."""
    number = state["round"] + 1
    new = {f"c{(number * changed + i) % CLIENTS}": torch.randn(D) for i in range(changed)}
    return {"round": number, "server": state["server"] + 1, "clients": {**state["clients"], **new}}


def saved(home: Path, rounds: int, changed: int = 1) -> list[State]:
    """The states that a run has saved in `home`."""
    states = [first()]
    while len(states) <= rounds:
        states.append(later(states[-1], changed))
    home.mkdir(exist_ok=True)
    with RunFolder(home) as folder:
        for state in states:
            folder.save(state)
    return states


def on_disk(home: Path) -> int:
    return sum(file.stat().st_size for file in home.glob("state*.safetensors"))


def found(home: Path) -> State:
    with RunFolder(home) as folder:
        loaded = folder.load()
    assert loaded is not None
    return loaded[0]


@pytest.mark.parametrize("changed", [1, 2, 10, CLIENTS])
def test_what_is_written_and_what_is_kept(changed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "_MOST", 6)
    state, written = first(), []
    with RunFolder(tmp_path) as folder:
        for number in range(24):
            folder.save(state)
            written.append((tmp_path / "state.safetensors").stat().st_size)
            loaded = folder.load()
            assert loaded is not None
            assert same(loaded[0], state)
            # a checkpoint's files are at most twice as large as its tensors, and their heads
            assert on_disk(tmp_path) < (2 if changed == CLIENTS else 4) * WHOLE + 200 * 4 * CLIENTS + 2000, number
            assert len(list(tmp_path.glob("state*.safetensors"))) <= 2 * checkpoint._MOST + 2
            state = later(state, changed)
    rest = written[2:]
    if changed == 1:
        assert min(rest) < 3 * D * 4, "two rounds with a client each"
        assert sum(rest) < len(rest) * WHOLE / 3
    elif changed == 2:
        assert sum(rest) < len(rest) * WHOLE / 2


def test_nothing_that_changes_stays_in_one_file_of_each_checkpoint(tmp_path: Path) -> None:
    saved(tmp_path, 6, CLIENTS)
    assert sorted(file.name for file in tmp_path.glob("state*.safetensors")) == [
        "state.prev.safetensors",
        "state.safetensors",
    ]


@pytest.mark.parametrize("damage", [truncate, flip, Path.unlink])
def test_damage_to_one_file_leaves_one_of_the_newest_two_whole(
    damage: Callable[[Path], object], tmp_path: Path
) -> None:
    states = saved(tmp_path / "run", 9)
    files = sorted(file.name for file in (tmp_path / "run").glob("state*.safetensors"))
    assert len(files) > 4, "each has older files"
    lost = 0
    for name in files:
        copy = Path(shutil.copytree(tmp_path / "run", tmp_path / name))
        damage(copy / name)
        state = found(copy)
        assert same(state, states[state["round"]])
        assert state["round"] >= 8
        lost += state["round"] == 8
    assert lost or damage is flip, "tensors of the last round are in one file, where a flipped byte need not be"


def test_what_one_file_lost_is_read_from_the_other(tmp_path: Path) -> None:
    """All files of the newest checkpoint, or all of the one before: the other does not need them."""
    states = saved(tmp_path, 9)
    files = sorted(tmp_path.glob("state*.safetensors"), key=lambda file: file.stat().st_mtime_ns)
    own = (tmp_path / "state.prev.safetensors", tmp_path / "state.safetensors")
    turns = files[0::2], files[1::2]  # the files of every second save; all are there
    assert [file in turn for file, turn in zip(own, turns, strict=True)] == [True, True]
    for turn, left in zip(turns, (9, 8), strict=True):
        copy = Path(shutil.copytree(tmp_path, tmp_path.with_name(f"left {left}")))
        for file in turn:
            (copy / file.name).unlink()
        assert same(found(copy), states[left])


@pytest.mark.parametrize(("key", "value"), [("shape", [3, 2]), ("dtype", "I8"), ("dtype", "F8_E5M2")])
def test_a_changed_head_is_damage(key: str, value: object, tmp_path: Path) -> None:
    """The checksum of a tensor covers what its file says of it; the checkpoint before does not suffer."""
    still = torch.zeros(2, 3, dtype=torch.bool)
    for number in (1, 2):
        checkpoint.save(tmp_path, "s", {"n": number, "x": torch.tensor(number), "still": still}, round=number)
    file = tmp_path / "s.safetensors"
    content = file.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    head = json.loads(content[8:end])
    next(about for about in head.values() if about["dtype"] == "BOOL")[key] = value
    text = json.dumps(head).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + content[end:])
    tree, _, _ = checkpoint.load(tmp_path, "s", lambda head: int(head["round"]))
    assert same(tree["still"], still)
    (tmp_path / "s.prev.safetensors").unlink()
    with pytest.raises(StateError, match="truncated, changed or missing"):
        checkpoint.load(tmp_path, "s", lambda head: int(head["round"]))


@pytest.mark.parametrize("way", ["data", "numpy", "counted"])
def test_a_change_in_place_is_written(way: str, tmp_path: Path) -> None:
    """Also one that torch does not count, of a tensor that was written twice."""
    state = first()
    with RunFolder(tmp_path) as folder:
        for number in range(5):
            tensor = state["clients"]["c3"]
            if number == 4 and way == "data":
                tensor.data.add_(1)
            elif number == 4 and way == "numpy":
                tensor.numpy()[:] += 1
            elif number == 4:
                tensor.add_(1)
            folder.save({**state, "round": number})
    assert same(found(tmp_path), {**state, "round": 4})


def test_equal_tensors_come_back_apart(tmp_path: Path) -> None:
    """They are written once; what changes one of them in place does not change the other."""
    checkpoint.save(tmp_path, "s", {"a": torch.ones(5000), "b": torch.ones(5000)}, round=1)
    assert (tmp_path / "s.safetensors").stat().st_size < 30_000
    tree, _, _ = checkpoint.load(tmp_path, "s", lambda head: 0)
    tree["a"].add_(1)
    assert same(tree["b"], torch.ones(5000))


def test_a_run_that_goes_on_writes_what_is_there_once_more(tmp_path: Path) -> None:
    """It does not count on files that it did not write, and deletes them once no checkpoint needs them."""
    *_, state = saved(tmp_path, 9)
    before, copy = state, tmp_path.with_name("damaged")
    older = {file.name for file in tmp_path.glob("state.*.safetensors")} - {"state.prev.safetensors"}
    assert older
    with RunFolder(tmp_path) as folder:
        for _ in range(2):
            state = later(state)
            folder.save(state)
            assert (tmp_path / "state.safetensors").stat().st_size > WHOLE
            if state["round"] == 10:  # the checkpoint before it is of the process before
                shutil.copytree(tmp_path, copy)
                truncate(copy / "state.safetensors")
                assert same(found(copy), before)
    assert not any((tmp_path / name).exists() for name in older)
    assert same(found(tmp_path), state)


@pytest.mark.parametrize("seed", range(4))
def test_whole_at_every_instant(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail at each write, sync, rename and removal of a save, of a run that has older files, and go on."""

    class Crash(Exception):
        pass

    rng, left = random.Random(seed), [99]

    def counted(function: Callable[..., object]) -> Callable[..., object]:
        def wrapped(*args: object, **options: object) -> object:
            left[0] -= 1
            if not left[0]:
                raise Crash
            return function(*args, **options)

        return wrapped

    for name in ("replace", "fsync", "unlink"):
        monkeypatch.setattr(os, name, counted(getattr(os, name)))
    turns: list[checkpoint.Turn] = []
    state, crashes, sure = first(), 0, 0
    states = {}
    for number in range(40):
        new = states[state["round"] + 1] = later(state)
        left[0] = rng.randint(1, 12) if number > 5 and rng.random() < 0.4 else 99
        try:
            checkpoint.save(tmp_path, "state", new, turns, round=new["round"])
            sure = new["round"]
        except Crash:
            crashes += 1
            turns = turns if rng.random() < 0.5 else []  # the process goes on, or another one does
        left[0] = 99
        tree, labels, _ = checkpoint.load(tmp_path, "state", lambda head: int(head["round"]))
        assert labels["round"] >= sure
        assert same(tree, states[labels["round"]])
        state = tree
    assert crashes > 5
