"""F2DC's recipes: the paper's federations on fake files, and one round of each real twin."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import fedloom
from fedloom.data import DATASETS, PARTITIONERS, Pool
from fedloom.federation.recipes import load

SHARED = Path(__file__).parents[3] / "shared" / "data"
ONE_STEP = ("training.rounds=1", "training.epochs=null", "training.steps=1", "evaluation.every=1", "model.width=2")


def pictures(folder: Path, count: int) -> None:
    folder.mkdir(parents=True)
    for i in range(count):
        Image.new("RGB", (9, 8), (i, 0, 0)).save(folder / f"{i:03d}.png")


@pytest.mark.parametrize(
    ("name", "classes", "clients", "share"),
    [
        ("pacs", 7, {"photo": 2, "art_painting": 3, "cartoon": 2, "sketch": 3}, 0.3),
        ("office-caltech", 10, {"caltech": 3, "amazon": 2, "webcam": 2, "dslr": 3}, 0.2),
    ],
)
def test_the_papers_federations(name: str, classes: int, clients: dict[str, int], share: float, tmp_path: Path) -> None:
    for domain in clients:
        for c in range(classes):
            pictures(tmp_path / domain / f"class{c}", 10)
    recipe = load(f"f2dc/{name}", (f"data.root={tmp_path}", "data.size=8"))
    data = DATASETS[recipe.data.name].function(recipe.seed, **recipe.data.params)
    assert data.domains == tuple(clients)
    pool = Pool.of(data)
    assert np.bincount(pool.domain).tolist() == [8 * classes] * 4
    shares = PARTITIONERS["domains"].function(pool, 0, **recipe.partition.params).shares
    assert Counter(s.domain for s in shares) == clients
    for s in shares:
        assert (len(s.train), len(s.val)) == (int(share * 8 * classes), 0)
        assert set(pool.labels["label"][s.train]) == set(range(classes))
    changes = [f"data.root={tmp_path}", "data.size=8", *ONE_STEP]
    result = fedloom.run(f"f2dc/{name}", tmp_path.parent / f"{tmp_path.name}-run", overrides=changes)
    assert set(result.run.final().values) == {"label"}


@pytest.mark.parametrize(
    ("name", "clients"),
    [
        ("pacs-real", 10),
        pytest.param("office-real", 10, marks=pytest.mark.slow),
        pytest.param("digits-real", 20, marks=pytest.mark.slow),
    ],
)
def test_the_real_twins_train(name: str, clients: int, tmp_path: Path) -> None:
    if not (SHARED / "pacs.npz").exists():
        pytest.skip("the small real sets are not here")
    result = fedloom.run(f"f2dc/{name}", tmp_path / "run", overrides=[f"data.root={SHARED}", *ONE_STEP])
    about = result.run.info["clients"].values()
    assert len(about) == clients
    assert len({client["domain"] for client in about}) == 4
    assert all(50 <= client["train"] + client["val"] <= 76 or client["domain"] == "dslr" for client in about)
