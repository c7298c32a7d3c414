"""The contents of files are covered when a run is resumed, and read only where they may have changed."""

from __future__ import annotations

import builtins
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import fedloom
from fedloom.data import prepare
from fedloom.data.dataset import contents
from fedloom.data.nyud import nyud
from fedloom.data.prepare import digest
from fedloom.errors import DataError, StateError
from fedloom.federation.recipes.loader import load
from folders_support import nyud as nyud_files
from tests_support import stopped_after


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FEDLOOM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that `digest` reads."""
    names: list[str] = []

    def opened(name: Any, *rest: Any) -> Any:
        names.append(Path(name).name)
        return builtins.open(name, *rest)

    monkeypatch.setattr(prepare, "open", opened, raising=False)
    return names


def files(home: Path) -> list[Path]:
    home.mkdir()
    made = [home / name for name in "abc"]
    for file in made:
        file.write_text(f"this is {file.name}")
    return made


def test_a_file_is_read_again_only_where_it_may_have_changed(tmp_path: Path, read: list[str]) -> None:
    three = files(tmp_path / "data")
    first = digest(three)
    assert sorted(read) == ["a", "b", "c"]
    read.clear()
    assert digest(three) == first
    assert read == []
    before = three[1].stat()
    three[1].write_text("this is B")  # of the same size, and with the time that it had before
    os.utime(three[1], ns=(before.st_atime_ns, before.st_mtime_ns))
    assert digest(three) != first
    assert read == ["b"]
    three[1].write_text("this is b")
    assert digest(three) == first  # it is the contents that count
    assert digest(list(reversed(three))) != first


@pytest.mark.parametrize("text", ["", "[1]", '{"a": 3}', '{"a": [1, 2, 3]}', "[" * 5000])
def test_a_damaged_cache_costs_only_time(text: str, tmp_path: Path, folder: Path) -> None:
    three = files(tmp_path / "data")
    first = digest(three)
    (place,) = (folder / "digests").iterdir()
    place.write_text(text)
    assert digest(three) == first
    assert len(json.loads(place.read_text())) == 3


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FEDLOOM_CACHE", str(tmp_path / "file"))
    three = files(tmp_path / "data")
    assert digest(three) == digest(three)


def test_a_file_that_is_gone_is_named(tmp_path: Path) -> None:
    three = files(tmp_path / "data")
    three[2].unlink()
    with pytest.raises(DataError, match="c: cannot be read"):
        digest(three)


@pytest.mark.parametrize("kind", ["images", "segmentation", "depth"])
def test_images_and_labels_of_a_dense_data_set(kind: str, tmp_path: Path) -> None:
    root = nyud_files(tmp_path / "nyud")

    def now() -> bytes:
        return contents(nyud(0, root=str(root), tasks=["semseg", "depth"], size=(32, 32)).train)

    first = now()
    assert now() == first
    file = sorted((root / kind).iterdir())[0]
    data = bytearray(file.read_bytes())
    data[-20] ^= 1
    file.write_bytes(data)
    assert now() != first


def test_a_run_over_changed_pictures_is_refused(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    root = tmp_path / "sets"
    for split in ("train", "test"):
        for label in "xy":
            folder = root / "toy" / split / label
            folder.mkdir(parents=True)
            for i in range(12):
                Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(folder / f"{i:02d}.png")
    recipe = load(
        {
            "name": "toy",
            "data": {"name": "class-folders", "root": str(root), "sets": ["toy"], "size": 8},
            "partition": {"name": "iid", "clients": 2},
            "model": "small-cnn",
            "method": "fedavg",
            "training": {"rounds": 3, "steps": 1, "epochs": None},
        }
    )
    path = stopped_after(1, tmp_path / "run", recipe)
    file = root / "toy" / "train" / "x" / "00.png"
    data = file.read_bytes()
    Image.fromarray(255 - np.asarray(Image.open(file))).save(file)
    with pytest.raises(StateError, match="the data set, in its inputs, has changed since the run began"):
        fedloom.resume(path)
    file.write_bytes(data)
    assert fedloom.resume(path).status == "finished"
