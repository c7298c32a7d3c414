"""Test what a run survives: damaged files, a client whose training fails, the folder of another run."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import fedloom
from fedloom.errors import StateError, UserError
from fedloom.federation.rounds.progress import Progress
from fedloom.federation.runs import checkpoint
from tests_support import Quick, Stop, assert_same, load_recipe, outcome, same


class Notes(Progress):
    """Remembers events."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def event(self, text: str) -> None:
        self.said.append(text)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 0xFF
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [truncate, flip, Path.unlink])
@pytest.mark.parametrize("name", ["state.safetensors", "state.json"])
def test_a_damaged_checkpoint_falls_back_to_the_one_before(
    whole: Path, part: Path, damage: Callable[[Path], object], name: str
) -> None:
    if damage is flip and name == "state.json":
        truncate(part / name)
    else:
        damage(part / name)
    notes = Notes()
    assert_same(whole, fedloom.resume(part, progress=notes))
    if damage is not Path.unlink or name == "state.safetensors":
        assert any("state" in text and "round 1" in text for text in notes.said), notes.said


def test_no_whole_checkpoint_is_one_clear_error_and_nothing_is_lost(part: Path) -> None:
    for path in part.glob("state*.safetensors"):
        truncate(path)
    before = (part / "metrics.jsonl").read_bytes()
    with pytest.raises(StateError, match="no intact checkpoint 'state'.*truncated, changed or missing"):
        fedloom.resume(part)
    assert (part / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize("step", range(9))
def test_a_checkpoint_is_whole_at_every_instant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Fail at the n-th write, sync or rename of the third save: the second or the third is there."""

    class Crash(Exception):
        pass

    for number in (1, 2):
        checkpoint.save(tmp_path, "s", {"x": torch.full((3,), float(number)), "n": number}, round=number)
    calls = 0

    def counted(function: Callable[..., object]) -> Callable[..., object]:
        def wrapped(*args: object, **kwargs: object) -> object:
            nonlocal calls
            calls += 1
            if calls == step + 1:
                raise Crash
            return function(*args, **kwargs)

        return wrapped

    monkeypatch.setattr(os, "replace", counted(os.replace))
    monkeypatch.setattr(os, "fsync", counted(os.fsync))
    try:
        checkpoint.save(tmp_path, "s", {"x": torch.full((3,), 3.0), "n": 3}, round=3)
    except Crash:
        pass
    else:
        assert calls <= step
    monkeypatch.undo()
    tree, labels, _ = checkpoint.load(tmp_path, "s", lambda head: int(head["round"]))
    assert tree["n"] == labels["round"] == tree["x"][0]
    assert tree["n"] in (2, 3)
    checkpoint.save(tmp_path, "s", {"n": 4}, round=4)
    assert checkpoint.load(tmp_path, "s", lambda head: int(head["round"]))[0] == {"n": 4}


def test_trees_come_back_as_they_were(tmp_path: Path) -> None:
    shared = torch.arange(6.0)
    tree = {
        "empty": {},
        "list": [],
        "nested": [{"a": None, "b": True}, 1, 1.5, "x", float("inf")],
        "nan": float("nan"),
        "half": torch.ones(2, dtype=torch.bfloat16),
        "ints": torch.tensor(7),
        "none": torch.zeros(0),
        "view": shared[2:4],
        "again": shared[2:4],
    }
    checkpoint.save(tmp_path, "s", tree, round=1)
    back, _, _ = checkpoint.load(tmp_path, "s", lambda head: 0)
    assert back.pop("nan") != tree.pop("nan")
    assert same(tree, back)
    with pytest.raises(TypeError, match=r"state\.a\[1\]: a set cannot be saved"):
        checkpoint.save(tmp_path, "s", {"a": [1, {2}]})
    with pytest.raises(TypeError, match="keys must be strings, found 1"):
        checkpoint.save(tmp_path, "s", {1: 2})


def test_nan_in_one_client_drops_its_update_and_is_said(quick: Quick, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedloom.federation.rounds import client as steps

    def spoil(model: fedloom.training.FlatModel, *args: object, **kwargs: object) -> object:
        result = train(model, *args, **kwargs)
        if args[0].who == "holes-0":
            model.params[0] = float("nan")
        return result

    train = steps.train
    monkeypatch.setattr(steps, "train", spoil)
    notes = Notes()
    result = quick(progress=notes)
    tensors, lines = outcome(result)
    assert all(torch.isfinite(t).all() for t in tensors.values())
    assert lines[1]["events"] == [
        {"event": "update dropped", "client": "holes-0", "why": "local training gave nan or inf"}
    ]
    assert any("round 1: update dropped: client holes-0" in text for text in notes.said)


def test_a_run_never_writes_over_another(quick: Quick) -> None:
    result = quick()
    with pytest.raises(StateError, match="exists and is not empty; continue the run with `fedloom resume`"):
        fedloom.run(load_recipe(), result.folder)


def test_a_folder_in_use_is_refused(part: Path) -> None:
    from fedloom.federation.runs.folder import RunFolder

    with RunFolder(part), pytest.raises(StateError, match="is in use by another process"):
        fedloom.resume(part)


@pytest.mark.parametrize("name", [".lock", "metrics.jsonl", "run.json.part", "state.next.safetensors", "predictions"])
def test_a_link_in_a_run_folder_is_not_written_through(part: Path, tmp_path: Path, name: str) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("mine")
    (part / name).unlink(missing_ok=True)
    (part / name).symlink_to(elsewhere)
    with pytest.raises(StateError, match=f"{name}: a link to .*elsewhere found, expected a file or folder of its own"):
        fedloom.resume(part)
    assert elsewhere.read_text() == "mine"


def test_the_links_of_a_tracker_are_its_own(part: Path) -> None:
    (part / "wandb").mkdir()
    (part / "wandb" / "latest-run").symlink_to(part / "wandb")
    assert len(fedloom.resume(part).run.rounds) == 5  # and round 0


def test_what_is_no_run_folder(tmp_path: Path) -> None:
    with pytest.raises(StateError, match=r"is not a run folder: recipe.yaml is absent"):
        fedloom.resume(tmp_path)


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("recipe.yaml", lambda t: t.replace("name: fedavg", "name: fedprox"), "the method has changed"),
        ("recipe.yaml", lambda t: t.replace("width: 16", "width: 8"), "the model has changed"),
        ("recipe.yaml", lambda t: t.replace("seed: 0", "seed: 1"), "the data set has changed"),
        ("recipe.yaml", lambda t: t.replace("rounds: 4", "rounds: four"), "training.rounds"),
        ("partition.json", lambda t: t.replace('"digit": 1.0', '"digit": 2.0'), "hash"),
        ("partition.json", lambda t: t[:100], "partition"),
        ("run.json", lambda t: t[:100], r"run\.json: "),
    ],
)
def test_a_changed_folder_is_refused(part: Path, file: str, change: Callable[[str], str], message: str) -> None:
    path = part / file
    text = path.read_text()
    assert change(text) != text
    path.write_text(change(text))
    with pytest.raises(UserError, match=message):
        fedloom.resume(part)


def test_resuming_a_finished_run_changes_nothing(quick: Quick, tmp_path: Path) -> None:
    result = quick()
    copy = shutil.copytree(result.folder, tmp_path / "copy")
    assert_same(copy, fedloom.resume(result.folder))


def test_stopped_before_anything_was_saved(quick: Quick, tmp_path: Path) -> None:
    whole = quick()
    folder = shutil.copytree(whole.folder, tmp_path / "copy")
    for path in [
        *folder.glob("state*"),
        folder / "metrics.jsonl",
        folder / "bytes.jsonl",
        folder / "model.safetensors",
    ]:
        path.unlink()
    assert_same(whole, fedloom.resume(folder))


def test_round_0_is_not_written_twice(quick: Quick, tmp_path: Path) -> None:
    class Crash(Progress):
        def client(self, round: int, done: int, of: int) -> None:
            raise Stop

    whole, folder = quick(), tmp_path / "stopped"
    with pytest.raises(Stop):
        fedloom.run(load_recipe(), folder, progress=Crash())
    assert_same(whole, fedloom.resume(folder))


def test_lines_after_the_checkpoint_and_a_torn_line_are_cut(whole: Path, part: Path) -> None:
    with (part / "metrics.jsonl").open("a") as file:
        file.write(
            '{"round": 3, "cohort": [], "train": [], "metrics": [], "events": [], "seconds": {}}\n{"round": 4, "co'
        )
    assert_same(whole, fedloom.resume(part))


def test_a_client_that_fails_is_named(quick: Quick, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedloom.models.tasks.labels import Classification

    def broken(self: Classification, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(Classification, "loss", broken)
    monkeypatch.setattr("fedloom.federation.rounds.rounds.measure", lambda *args, **options: [])
    with pytest.raises(UserError, match=r"client '\S+' \(tasks .*\), round 1: no such kernel"):
        quick()


@pytest.mark.parametrize(
    ("device", "message"),
    [("cuda:7", "CUDA devices"), ("tpu", "expected a device such as"), ("meta", "expected cpu or cuda")],
)
def test_a_device_that_is_absent(quick: Quick, device: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        quick(f"runtime.device={device}")
