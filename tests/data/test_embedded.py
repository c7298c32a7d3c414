"""Features of a frozen encoder in the place of inputs: what they are, what is kept, what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from fedloom.data import DATASETS, embedded
from fedloom.errors import DataError, RecipeError
from fedloom.federation.recipes import load as load_recipe
from fedloom.models.build import build_model

CPU = torch.device("cpu")
CNN = {"name": "small-cnn", "width": 2, "hidden": 6}


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two sets of images with 3 and 4 classes; the cache is empty."""
    monkeypatch.setenv("FEDLOOM_CACHE", str(tmp_path / "cache"))
    rng = np.random.default_rng(0)
    for name, classes in (("a", 3), ("b", 4)):
        arrays = {}
        for split, n in (("train", 12), ("test", 6)):
            arrays[f"x_{split}"] = rng.integers(0, 256, (n, 8, 8), dtype=np.uint8)
            arrays[f"y_{split}"] = np.arange(n) % classes
        np.savez(tmp_path / f"{name}.npz", **arrays)
    return tmp_path


def many(root: Path) -> dict[str, object]:
    sets = {name: {"name": "arrays", "path": f"{name}.npz"} for name in "ab"}
    return {"name": "many", "root": str(root), "size": 8, "sets": sets}


def load(of: dict[str, object], encoder: dict[str, object] = CNN, seed: int = 0):
    return DATASETS["embedded"].make(seed, of=of, encoder=encoder)


def test_features_are_what_the_encoder_gives_scaled_over_the_train_part(files):
    data = load(many(files))
    inner = DATASETS["many"].make(0, **{k: v for k, v in many(files).items() if k != "name"})
    model = build_model("small-cnn", {"width": 2, "hidden": 6}, inner.input_shape, inner.tasks, 0)
    index = torch.arange(24)
    with torch.no_grad():
        train = model.encoder(inner.train.batch(index, CPU)[0])
        test = model.encoder(inner.test.batch(index[:12], CPU)[0])
    for rows, part in ((train, data.train), (test, data.test)):
        expected = (rows - train.mean(0)) / train.std(0, correction=0).clamp(min=1e-6)
        assert torch.allclose(part.batch(index[: len(part)], CPU)[0], expected, atol=1e-5)
    assert (data.tasks, data.domains) == (inner.tasks, inner.domains)
    assert data.signal.kind == "features"
    for task in ("a", "b"):
        assert data.test.labels_of(task).tolist() == inner.test.labels_of(task).tolist()
    assert data.train.domain.tolist() == inner.train.domain.tolist()


def test_features_are_computed_once_and_anew_for_another_encoder_or_other_data(files, monkeypatch):
    first = load(many(files))
    monkeypatch.setattr(embedded, "_seen", None)  # nothing passes the encoder
    again = load(many(files))
    assert torch.equal(first.train.images, again.train.images)
    for change in ({"seed": 1}, {"encoder": {**CNN, "hidden": 5}}, {"of": {**many(files), "limit": 5}}):
        with pytest.raises(TypeError):
            load(**{"of": many(files), **change})


def test_an_encoder_that_knows_how_its_images_were_normalised_sees_them_so(files):
    class Known(torch.nn.Module):
        seen = ((0.5, 0.25, 0.0), (0.5, 1.0, 2.0))

    inner = DATASETS["many"].make(0, **{k: v for k, v in many(files).items() if k != "name"})
    index = torch.arange(24)
    raw = inner.train.source(index).float() / 255
    expected = (raw - torch.tensor(Known.seen[0]).view(3, 1, 1)) / torch.tensor(Known.seen[1]).view(3, 1, 1)
    assert torch.allclose(embedded._seen(Known(), inner.train, index), expected, atol=1e-5)
    Known.seen = ((0.5,), (0.5,))
    with pytest.raises(DataError, match="the encoder's weights are for 1 channels, found 3"):
        embedded._seen(Known(), inner.train, index)


def test_what_has_no_features_is_refused(files):
    scenes = {"name": "scenes", "tasks": ["depth"], "count": 2, "test_count": 2, "height": 32, "width": 32}
    with pytest.raises(DataError, match="features have no positions, which the dense task 'depth' asks for"):
        load(scenes)
    several = {"name": "several", "sets": dict(many(files)["sets"])}
    for name in "ab":
        several["sets"][name] = {**several["sets"][name], "path": str(files / f"{name}.npz")}
    with pytest.raises(DataError, match="'several' has inputs of several shapes, expected one"):
        load(several)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("data.encoder={name: small-cn}", "data.encoder.*unknown encoder 'small-cn'"),
        ("data.encoder={name: small-cnn, width: -1}", "data.encoder.*width"),
        ("data.encoder={width: 2}", "data.encoder.*expected a mapping with 'name'"),
        ("data.of={name: array}", "data.of.*unknown data set 'array'"),
        ("data.of={}", "data.of.*names no data set"),
    ],
)
def test_a_wrong_recipe_is_refused(change, message):
    data = {"name": "embedded", "of": {"name": "digits"}, "encoder": CNN}
    rest = {"name": "x", "partition": {"name": "iid", "clients": 2}, "model": "mlp", "method": "fedavg"}
    assert load_recipe({"data": data, **rest}).data.name == "embedded"
    with pytest.raises(RecipeError, match=message):
        load_recipe({"data": data, **rest}, [change])
