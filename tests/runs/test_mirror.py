"""A copy of the checkpoints on a second path: a run goes on from it when the first is damaged or lost."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

import fedloom
from fedloom.cli.app import main
from fedloom.errors import StateError
from fedloom.federation.recipes.schema import recipe_hash
from fedloom.federation.runs import checkpoint
from fedloom.federation.runs.folder import RunFolder
from runs.conftest import CHANGES, PEERS
from tests_support import QUICK, assert_same, load_recipe, stopped_after


def with_mirror(home: Path, *changes: str, rounds: int = 2) -> tuple[Path, Path]:
    """(the folder of a run that was stopped after so many rounds, its mirror)."""
    recipe = load_recipe(*CHANGES, f"runtime.mirror={home / 'other disk'}", *changes)
    return stopped_after(rounds, home / "run", recipe), home / "other disk" / "run"


@pytest.mark.parametrize("damage", ["gone", "cut off", "lines", "lost"])
def test_a_damaged_run_goes_on_from_its_mirror(damage: str, whole: Path, tmp_path: Path) -> None:
    path, other = with_mirror(tmp_path)
    if damage == "lost":  # a lost run is resumed in its mirror
        shutil.rmtree(path)
        path = other
    for file in path.glob("state*"):
        if damage == "gone":
            file.unlink()
        elif damage == "cut off":
            file.write_bytes(file.read_bytes()[:-9])
    if damage == "lines":
        (path / "bytes.jsonl").write_text("")
    assert_same(whole, fedloom.resume(path))


def test_the_mirror_of_a_run_of_peers(whole_peers: Path, tmp_path: Path) -> None:
    path, other = with_mirror(tmp_path, *PEERS)
    shutil.rmtree(path / "peers" / "digit-0")
    assert_same(whole_peers, fedloom.resume(path))
    names = [sorted(p.name for p in home.glob("peers/digit-0/*")) for home in (path, other)]
    assert names[0] == names[1] != []  # the mirror forgets what the run forgets


@pytest.mark.parametrize("kind", ["all change", "few change"])
def test_a_mirror_that_is_killed_at_any_file_has_a_whole_checkpoint(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each copy of a file is the last one before a crash, from an older mirror to that of the next round."""
    few = ("method=ditto", "training.participation=0.2", "training.rounds=14")
    saved, changes = (2, ()) if kind == "all change" else (10, few)
    path, other = with_mirror(tmp_path, *changes, rounds=saved)
    shutil.copytree(other, tmp_path / "old" / "run")
    fedloom.resume(path)
    assert (len(list(path.glob("state.*.safetensors"))) > 1) == (kind == "few change")
    assert (len(list(other.glob("state.*.safetensors"))) > 1) == (kind == "few change")
    real, files = checkpoint.os.replace, 99

    class Killed(Exception):
        pass

    for number in range(files):
        target = tmp_path / str(number) / "run"
        shutil.copytree(tmp_path / "old" / "run", target)
        done = iter(range(files))

        def replace(source: Path, to: Path, done: object = done, number: int = number) -> None:
            if next(done) == number:  # type: ignore[call-overload]
                raise Killed
            real(source, to)

        monkeypatch.setattr(checkpoint.os, "replace", replace)
        try:
            checkpoint.mirror(path, target)
        except Killed:
            with RunFolder(target) as folder:
                found = folder.load()
                assert found is not None
                assert found[0]["round"] >= saved
        else:
            break
    assert 5 < number < files - 1


def test_a_mirror_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    result = fedloom.run(load_recipe(f"runtime.mirror={tmp_path / 'file'}"), tmp_path / "run")
    assert result.status == "finished"
    said = [e for line in result.run.rounds for e in line["events"] if e["event"] == "mirror failed"]
    assert [e["why"] for e in said] == [f"{tmp_path / 'file' / 'run'}: Not a directory"] * 4  # also of the last round


def test_a_full_mirror_is_said_once_however_quiet_the_run_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real, calls = shutil.copyfile, []

    def copyfile(source: Path, target: Path, **options: Any) -> Any:
        calls.append(target)
        if 3 <= len(calls) <= 9:  # as the system says it: without a name, or of a copy with both
            raise OSError(
                errno.ENOSPC, os.strerror(errno.ENOSPC), *([str(source), None, str(target)] if len(calls) > 5 else [])
            )
        return real(source, target, **options)

    monkeypatch.setattr(shutil, "copyfile", copyfile)
    command = ["run", "digits-tasks", *QUICK, "-q", "--out", str(tmp_path / "run")]
    monkeypatch.setattr("sys.argv", ["fedloom", *command, f"runtime.mirror={tmp_path / 'copies'}"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    (line,) = capsys.readouterr().err.splitlines()
    place = re.escape(str(tmp_path / "copies" / "run"))
    assert re.fullmatch(
        rf"warning: runtime\.mirror: {place}/\S+\.part: No space left on device\. The run continues.*", line
    )


def test_the_mirror_of_another_run(tmp_path: Path) -> None:
    path, other = with_mirror(tmp_path)
    with pytest.raises(StateError, match=r"runtime\.mirror: .* exists already and may be the copy of another run"):
        fedloom.run(load_recipe(f"runtime.mirror={other.parent}"), tmp_path / "elsewhere" / "run")
    (path / "state.json").unlink()
    (path / "state.prev.json").unlink()
    foreign = fedloom.run(load_recipe("seed=1", "training.rounds=1"), tmp_path / "foreign").folder
    shutil.rmtree(other)
    checkpoint.mirror(foreign, other)
    with pytest.raises(StateError, match="the copy is of another run"):
        fedloom.resume(path)


def test_a_run_that_goes_on_copies_nothing_over_the_files_of_others(tmp_path: Path) -> None:
    path, _ = with_mirror(tmp_path)
    checkpoint.mirror(fedloom.run(load_recipe("seed=1"), tmp_path / "foreign").folder, tmp_path / "other run" / "run")
    for home, name in {"other run": "state.json", "no run": "notes.jsonl"}.items():
        file = tmp_path / home / "run" / name
        if not file.exists():
            file.parent.mkdir(parents=True)
            file.write_text("mine")
        before = file.read_bytes()
        with pytest.raises(StateError, match=r"runtime\.mirror: .*the copy is of another run"):
            fedloom.resume(path, mirror=str(tmp_path / home))
        assert file.read_bytes() == before
    checkpoint.mirror(path, tmp_path / "moved" / "run")  # its own copy, of a run that had fewer rounds then
    fedloom.resume(path, rounds=6)
    fedloom.resume(path, mirror=str(tmp_path / "moved"))
    assert (tmp_path / "moved" / "run" / "run.json").read_bytes() == (path / "run.json").read_bytes()


def test_a_recipe_that_was_edited_by_hand_is_no_other_run(tmp_path: Path) -> None:
    path, other = with_mirror(tmp_path)
    recipe = path / "recipe.yaml"
    edited = re.sub(r"(?m)^  rounds: \d+$", "  rounds: 6", recipe.read_text())
    assert edited != recipe.read_text()
    recipe.write_text(edited)
    assert fedloom.resume(path, accept_changes=True).run.rounds[-1]["round"] == 6
    assert (other / "recipe.yaml").read_bytes() == recipe.read_bytes()


def test_results_do_not_depend_on_a_mirror() -> None:
    assert recipe_hash(load_recipe("runtime.mirror=elsewhere")) == recipe_hash(load_recipe())
    old = load_recipe().model_dump(mode="json")
    del old["runtime"]["mirror"], old["runtime"]["flower"]["enough"]
    assert recipe_hash(json.loads(json.dumps(old))) == recipe_hash(load_recipe())
