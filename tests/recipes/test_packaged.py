"""Packaged recipes that need no files, or only the small real ones, train."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedloom

REAL = Path(__file__).parents[3] / "shared" / "data" / "nyuv2.npz"
SMALL = ("training.rounds=1", "training.epochs=null", "training.steps=1", "evaluation.every=1", "training.batch_size=2")
TWINS = {
    "feddea/scenes": ("data.count=24", "data.test_count=4"),
    "feddea/scenes-pascal": ("data.count=24", "data.test_count=4"),
    "dfmtl-digits": (),
    "gossip-digits": (),
    "dfmtl-scenes": ("data.count=24", "data.test_count=4"),
    "thesis/scenes-b2": ("data.count=24", "data.test_count=4"),
    "thesis/scenes-c1": ("data.count=24", "data.test_count=4"),
    "thesis/scenes-c2": ("data.count=72", "data.test_count=4"),
    "thesis/scenes-pairwise": ("data.count=24", "data.test_count=4"),
    "thesis/scenes-weak-pairwise": ("data.count=36", "data.test_count=4"),
    "fedhca2/scenes-outside-st-rooms-mt": (
        "data.sets.outside.count=24", "data.sets.outside.test_count=4",
        "data.sets.rooms.count=12", "data.sets.rooms.test_count=4", "partition.val_fraction=0.3",
    ),
}  # fmt: skip
TWINS["fedhca2/scenes-rooms-st-outside-mt"] = TWINS["fedhca2/scenes-outside-st-rooms-mt"]
TWINS["fedhca2/scenes-outside-st-rooms-mt-2c"] = (
    *TWINS["fedhca2/scenes-outside-st-rooms-mt"],
    "data.sets.outside.count=40",
)
MINI = {"feddea/nyud-mini": "data.path", "thesis/nyud-mini": "data.path", "fedhca2/nyud-mini": "data.sets.nyud.path"}


NIGHTLY = (
    "feddea/scenes-pascal", "thesis/scenes-c2", "thesis/scenes-pairwise", "thesis/scenes-weak-pairwise",
    "fedhca2/scenes-rooms-st-outside-mt", "fedhca2/scenes-outside-st-rooms-mt-2c",
    "thesis/nyud-mini", "fedhca2/nyud-mini",
)  # fmt: skip
"""Twins that differ from another one in their partition or method."""


def often(names: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=[pytest.mark.slow] if name in NIGHTLY else []) for name in names]


@pytest.mark.parametrize("name", often(TWINS))
def test_scenes_twin_trains(name: str, tmp_path: Path) -> None:
    result = fedloom.run(name, tmp_path / "run", overrides=[*SMALL, *TWINS[name]])
    assert set(result.run.final().values) == set(result.run.info["tasks"])


@pytest.mark.parametrize("name", often(MINI))
def test_real_twin_trains(name: str, tmp_path: Path) -> None:
    if not REAL.exists():
        pytest.skip("the small NYU v2 is not here")
    more = ["data.sets.outside.count=24", "data.sets.outside.test_count=4"] if name.startswith("fedhca2") else []
    result = fedloom.run(name, tmp_path / "run", overrides=[*SMALL, f"{MINI[name]}={REAL}", *more])
    assert set(result.run.final().values) == set(result.run.info["tasks"])


def test_activities_of_people_train(tmp_path: Path) -> None:
    """A file as the recipe wants it: windows of nine channels, a class and a person each."""
    rng, made = np.random.default_rng(0), {}
    for split, n in (("train", 10), ("test", 4)):
        made[f"x_{split}"] = rng.normal(size=(3 * n, 9, 128)).astype(np.float16)
        made[f"y_{split}"], made[f"subject_{split}"] = np.arange(3 * n) % 6, np.repeat([1, 3, 27], n)
    np.savez(tmp_path / "har.npz", **made)
    run = fedloom.run("har-people", tmp_path / "run", overrides=[*SMALL, f"data.path={tmp_path / 'har.npz'}"]).run
    assert set(run.final().values) == {"activity"}
    assert {share["domain"] for share in run.info["clients"].values()} == {"1", "3", "27"}
