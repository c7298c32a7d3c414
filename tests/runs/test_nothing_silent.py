"""Test that a resumed run reads what was written and continues unchanged, or says so."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

import fedloom
from fedloom.cli.app import app, message_of
from fedloom.data import Partition, Share
from fedloom.engines.api import trained_models
from fedloom.errors import StateError
from fedloom.federation.rounds.progress import Progress
from fedloom.federation.runs import checkpoint, folder
from fedloom.federation.runs.reader import Run
from fedloom.federation.runs.recorded import digest_of
from fedloom.study.grid import is_over
from runs.conftest import CHANGES, PEERS
from tests_support import QUICK, Stop, assert_same, load_recipe, stopped_after


def edit(file: Path, old: str, new: str, count: int = 1) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, count))


def peers_stopped_while_saving(folder_: Path, times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of peers that is killed again and again after the peers of round 3 were saved, and before the rest was."""
    recipe = load_recipe(*PEERS)

    class Killed(Exception):
        pass

    real = checkpoint.save

    def save(home: Path, name: str, tree: Any, **labels: Any) -> None:
        if home == folder_ and name == "state" and labels["round"] == 3:
            raise Killed
        real(home, name, tree, **labels)

    with monkeypatch.context() as patch:
        patch.setattr(folder.checkpoint, "save", save)
        with pytest.raises(Killed):
            fedloom.run(recipe, folder_)
        for _ in range(times - 1):
            with pytest.raises(Killed):
                fedloom.resume(folder_)


@pytest.mark.parametrize("times", [1, 3])
def test_peers_killed_while_the_same_round_is_saved(
    times: int, whole_peers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peers_stopped_while_saving(tmp_path / "killed", times, monkeypatch)
    assert_same(whole_peers, fedloom.resume(tmp_path / "killed"))
    # only what the last two checkpoints of the rest ask for is kept
    kept = {path.name.partition(".")[0] for path in (tmp_path / "killed" / "peers" / "digit-0").iterdir()}
    assert kept == {"state-3", "state-4"}


@pytest.fixture(scope="module")
def stopped_peers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of peers, stopped in its fourth round; for copies."""
    return stopped_after(3, tmp_path_factory.mktemp("peers") / "run", load_recipe(*PEERS))


def test_a_damaged_peer_falls_back_to_the_round_before(whole_peers: Path, stopped_peers: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(stopped_peers, tmp_path / "part"))
    file = path / "peers" / "digit-0" / "state-3.safetensors"
    file.write_bytes(file.read_bytes()[:-7])
    assert_same(whole_peers, fedloom.resume(path))


@pytest.mark.parametrize("kind", ["safetensors", "json"])
def test_a_damaged_older_checkpoint_of_a_peer_is_told(kind: str, stopped_peers: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(stopped_peers, tmp_path / "part"))
    file = path / "peers" / "digit-0" / f"state-2.{kind}"
    file.write_bytes(file.read_bytes()[:-7])
    said: list[str] = []

    class Heard(Progress):
        def event(self, text: str) -> None:
            said.append(text)

    fedloom.resume(path, progress=Heard())
    (about,) = [text for text in said if text.startswith("checkpoint")]
    assert "digit-0" in about
    assert "state-2" in about
    assert about.endswith("continuing from round 3")


def test_a_changed_digit_in_a_checkpoint_is_damage(part: Path, whole: Path) -> None:
    edit(part / "state.json", '"round": 2', '"round": 1', count=2)
    assert_same(whole, fedloom.resume(part))  # from the checkpoint before it


def test_checkpoints_from_before_there_were_checksums_are_read(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, "s", {"n": 1}, round=1)
    head = json.loads((tmp_path / "s.json").read_text().splitlines()[0])
    (tmp_path / "s.json").write_text(json.dumps({**head, "format": 1}))
    assert checkpoint.load(tmp_path, "s", lambda head: 0)[0] == {"n": 1}
    (tmp_path / "s.json").write_text(json.dumps(head))
    with pytest.raises(StateError, match=r"s\.json is damaged \(its checksum does not match its content\)"):
        checkpoint.load(tmp_path, "s", lambda head: 0)


@pytest.mark.parametrize("tree", [{"$tensor": []}, {"$float": 3}, {"$dict": 3}, {"a": 1, "b": 2}])
def test_a_checkpoint_with_the_right_checksum_and_another_content(tmp_path: Path, tree: Any) -> None:
    checkpoint.save(tmp_path, "s", {"n": 1}, round=1)
    head = {**json.loads((tmp_path / "s.json").read_text().splitlines()[0]), "tree": tree}
    (tmp_path / "s.json").write_text(f"{json.dumps(head)}\n{digest_of(json.dumps(head))}\n")
    with pytest.raises(StateError, match=r"s\.safetensors is damaged"):
        checkpoint.load(tmp_path, "s", lambda head: 0)


@pytest.mark.parametrize("name", ["metrics.jsonl", "bytes.jsonl", "diagnostics.jsonl"])
@pytest.mark.parametrize("damage", ["digit", "line", "file"])
def test_lines_that_the_run_did_not_write(name: str, damage: str, part: Path) -> None:
    file = part / name
    text = file.read_text()
    if damage == "digit":
        number = re.search(r"\d(?=\d\d)", text)
        assert number is not None
        at = number.start()
        file.write_text(text[:at] + str((int(text[at]) + 1) % 10) + text[at + 1 :])
    elif damage == "line":
        file.write_text("".join(text.splitlines(keepends=True)[1:]))
    else:
        file.unlink()
    before = {path.name: path.read_bytes() for path in part.iterdir() if path.is_file()}
    with pytest.raises(StateError, match=rf"{name}: the lines up to round 2 are not those that the run wrote"):
        fedloom.resume(part)
    assert before == {path.name: path.read_bytes() for path in part.iterdir() if path.is_file()}


def test_a_changed_run_json_and_another_partition(part: Path) -> None:
    edit(part / "run.json", '"rounds": 0', '"rounds": 1')
    with pytest.raises(StateError, match=r"run\.json: the checksum does not match the content: the file was changed"):
        fedloom.resume(part)


def test_another_partition_is_refused(part: Path, tmp_path: Path) -> None:
    other = fedloom.run(load_recipe("training.rounds=1", "seed=1"), tmp_path / "other").folder
    shutil.copy(other / "partition.json", part / "partition.json")
    with pytest.raises(StateError, match="the partition has changed since the run began"):
        fedloom.resume(part)


@pytest.mark.parametrize("value", [-1, [0, -1], [10**6]], ids=str)
@pytest.mark.parametrize("command", ["resume", "export"])
def test_a_position_that_is_not_in_the_data_set_is_refused(
    command: str, value: Any, part: Path, whole: Path, tmp_path: Path
) -> None:
    run = part if command == "resume" else shutil.copytree(whole, tmp_path / "run")
    file = run / "partition.json"
    saved = json.loads(file.read_text())
    saved["clients"][0]["train"] = value
    if isinstance(value, list):  # with its hash, as somebody who means it would write it
        saved["hash"] = Partition(
            tuple(
                Share(c["client"], c["tasks"], np.array(c["train"]), np.array(c["val"]), c["domain"])
                for c in saved["clients"]
            )
        ).hash
    file.write_text(json.dumps(saved))
    out = ["--out", str(tmp_path / "out")] if command == "export" else []
    error = CliRunner().invoke(app, [command, str(run), *out]).exception
    text = message_of(error) or ""  # None for a bug
    assert text.startswith(str(file))
    assert "all-0" in text
    assert "tasks digit, parity, large, holes" in text
    assert re.search(r"(-1|1000000) found, expected (a list|an integer of at least 0|0 to 1437)", text)


def test_an_edited_recipe_is_refused_with_its_keys(part: Path) -> None:
    recipe = yaml.safe_load((part / "recipe.yaml").read_text())
    recipe["training"]["optimizer"]["lr"] *= 10
    recipe["training"]["batch_size"] = 16
    recipe["runtime"]["workers"] = 2  # results do not depend on it
    (part / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    with pytest.raises(
        StateError,
        match=r"the recipe has changed since the run began: .*training\.batch_size was 32, is 16, "
        r"training\.optimizer\.lr was 0\.05, is 0\.5.*--accept-changes",
    ):
        fedloom.resume(part)


def test_accepted_changes_are_recorded_once(part: Path) -> None:
    recipe = yaml.safe_load((part / "recipe.yaml").read_text())
    recipe["training"]["optimizer"]["lr"] = 0.01
    (part / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    result = CliRunner().invoke(app, ["resume", str(part), "--quiet"])
    assert result.exit_code != 0
    result = CliRunner().invoke(app, ["resume", str(part), "--quiet", "--accept-changes"])
    assert result.exit_code == 0, result.output
    (event,) = [e for line in Run.read(part).rounds for e in line["events"] if e["event"] == "recipe changed"]
    assert event["keys"] == "training.optimizer.lr was 0.05, is 0.01"
    info = json.loads((part / "run.json").read_text())
    keys = {"training.optimizer.lr": [0.05, 0.01]}
    assert info["changes"] == [{"after_round": 0, "keys": keys}] or info["changes"][0]["keys"] == keys
    assert fedloom.resume(part).status == "finished"  # now it is the run's recipe


def test_another_method_is_never_accepted(part: Path) -> None:
    recipe = yaml.safe_load((part / "recipe.yaml").read_text())
    recipe["method"] = {"name": "fedprox", "mu": 0.1}
    (part / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    with pytest.raises(StateError, match="the method has changed since the run began"):
        fedloom.resume(part, accept_changes=True)


def test_another_version_is_an_event(part: Path, whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "__version__", "9.9")
    resumed = fedloom.resume(part)
    (event,) = [e for line in resumed.run.rounds for e in line["events"] if e["event"] == "version changed"]
    assert (event["was"], event["now"]) == (fedloom.__version__, "9.9")
    assert_same(whole, resumed, models_only=True)


def test_without_its_checkpoints_a_run_does_not_begin_anew(part: Path) -> None:
    for path in part.glob("state*"):
        path.unlink()
    lines = (part / "metrics.jsonl").read_bytes()
    with pytest.raises(StateError, match=r"the checkpoints .* are missing, but metrics\.jsonl has 2 rounds"):
        fedloom.resume(part)
    assert (part / "metrics.jsonl").read_bytes() == lines


def test_a_run_that_stopped_before_its_first_checkpoint_begins_anew(whole: Path, tmp_path: Path) -> None:
    path = stopped_after(0, tmp_path / "run", load_recipe(*CHANGES))
    for file in path.glob("state*"):
        file.unlink()
    assert_same(whole, fedloom.resume(path))


def test_a_run_that_learned_nothing_says_so(tmp_path: Path) -> None:
    result = CliRunner().invoke(
        app,
        ["run", "digits-tasks", *QUICK, "training.optimizer.lr=1e30", "-q", "--out", str(tmp_path / "r")],
    )
    assert result.exit_code == 1
    assert "nothing learned: " in result.output
    assert "every update of every round was dropped" in result.output
    assert json.loads((tmp_path / "r" / "run.json").read_text())["status"] == "nothing learned"
    assert fedloom.resume(tmp_path / "r").status == "nothing learned"


def test_other_inputs_with_the_same_labels_are_refused(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    arrays = {f"x_{split}": rng.integers(0, 256, (60, 8, 8), dtype=np.uint8) for split in ("train", "test")}
    arrays |= {f"y_{split}": np.arange(60) % 3 for split in ("train", "test")}
    np.savez(tmp_path / "a.npz", **arrays)
    data = f"data={{name: arrays, path: {tmp_path / 'a.npz'}, images: 'x_{{split}}', labels: {{kind: 'y_{{split}}'}}}}"
    recipe = load_recipe("training.rounds=3", data, "partition={name: iid, clients: 2}")
    path = stopped_after(1, tmp_path / "run", recipe)
    np.savez(tmp_path / "a.npz", **{**arrays, "x_train": 255 - arrays["x_train"]})
    with pytest.raises(StateError, match="the data set, in its inputs, has changed since the run began"):
        fedloom.resume(path)
    np.savez(tmp_path / "a.npz", **arrays)
    assert fedloom.resume(path).status == "finished"


def test_equal_runs_write_equal_models(whole: Path, part: Path, tmp_path: Path) -> None:
    again = fedloom.run(load_recipe(*CHANGES), tmp_path / "again").folder
    resumed = fedloom.resume(part).folder
    models = {path: (path / "model.safetensors").read_bytes() for path in (whole, again, resumed)}
    assert len(set(models.values())) == 1


@pytest.mark.parametrize("name", ["metrics.jsonl", "bytes.jsonl", "diagnostics.jsonl", "recipe.yaml"])
def test_readers_refuse_a_finished_run_that_was_changed(name: str, whole: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(whole, tmp_path / "run"))
    assert Run.read(run).is_finished
    file = run / name
    file.write_text(re.sub(r"\d\b", "7" if "7" not in file.read_text()[-9:] else "8", file.read_text(), count=1))
    with pytest.raises(StateError, match=rf"{name}: the content differs from what the run wrote"):
        Run.read(run)


def test_readers_refuse_a_stopped_run_that_was_changed(part: Path) -> None:
    edit(part / "metrics.jsonl", '"split": "test"', '"split": "Test"')
    with pytest.raises(StateError, match=r"metrics\.jsonl: the content differs from what the run wrote"):
        Run.read(part)


def test_an_empty_run_json_is_not_a_run_that_has_not_begun(whole: Path, tmp_path: Path) -> None:
    run = shutil.copytree(whole, tmp_path / "run")
    (run / "run.json").write_text("{}")
    with pytest.raises(StateError, match=r"run.json, status: field required"):
        is_over(run)


def test_models_that_were_changed_are_not_opened(whole: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(whole, tmp_path / "run"))
    data = bytearray((run / "model.safetensors").read_bytes())
    data[-3] ^= 1
    (run / "model.safetensors").write_bytes(data)
    with pytest.raises(StateError, match=r"model\.safetensors: the content differs from what the run wrote"):
        trained_models(run)


def test_a_finished_run_that_goes_on_is_not_finished(whole: Path, tmp_path: Path) -> None:
    """Without its newest checkpoint it makes the last round again; until then nobody takes it for finished."""
    run = Path(shutil.copytree(whole, tmp_path / "run"))
    (run / "state.safetensors").write_bytes(b"")

    class Look(Progress):
        status = ""

        def client(self, round: int, done: int, of: int) -> None:
            self.status = str(Run.read(run).info["status"])

    look = Look()
    assert_same(whole, fedloom.resume(run, progress=look))
    assert look.status == "running"
    assert Run.read(run).is_finished


def test_a_run_killed_while_it_measures_round_0_anew_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = fedloom.run(load_recipe(), tmp_path / "whole")

    def stop(*_: Any, **__: Any) -> None:
        raise Stop

    with monkeypatch.context() as patch:
        patch.setattr("fedloom.federation.rounds.round.server_step", stop)  # round 0 is saved, and nothing else
        with pytest.raises(Stop):
            fedloom.run(load_recipe(), tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr(folder.RunFolder, "write_round", stop)  # its lines have been cut off
        with pytest.raises(Stop):
            fedloom.resume(tmp_path / "run")
    fedloom.resume(tmp_path / "run")
    assert_same(whole.folder, tmp_path / "run")
