"""Dense labels from archives: what their numbers mean, and real images where they are at hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from fedloom.cli.data import build
from fedloom.data import Pool
from fedloom.data.dense import boundaries
from fedloom.errors import DataError, RecipeError

CPU = torch.device("cpu")
REAL = Path(__file__).parents[3] / "shared" / "data"


def made(n: int = 4, **more: np.ndarray) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    found = {}
    for split in ("train", "test"):
        seg = rng.integers(0, 5, (n, 10, 12)).astype(np.uint8)
        seg[0, 0, 0] = 255
        found |= {
            f"image_{split}": rng.integers(0, 256, (n, 10, 12, 3)).astype(np.uint8),
            f"seg_{split}": seg,
            f"depth_{split}": (rng.random((n, 10, 12)) + 1).astype(np.float16),
            f"normal_{split}": rng.integers(-120, 120, (n, 10, 12, 3)).astype(np.int8),
            f"edge_{split}": rng.integers(0, 2, (n, 10, 12)).astype(np.uint8),
        }
    return {**found, **{f"{key}_{split}": value for key, value in more.items() for split in ("train", "test")}}


@pytest.fixture
def load(tmp_path):
    def read(arrays: dict, *dense: str, **params: str):
        np.savez(tmp_path / "set.npz", **arrays)
        given = {"images": "image_{split}", "multiple": "4", **params}
        words = [f"dense={{{', '.join(dense)}}}"] if dense else []
        return build("arrays", [f"path={tmp_path / 'set.npz'}", *(f"{k}={v}" for k, v in given.items()), *words])

    return read


SEG = "seg: {kind: semseg, key: 'seg_{split}'}"


def test_every_kind(load):
    arrays = made()
    data = load(
        arrays,
        SEG,
        "parts: {kind: human_parts, key: 'seg_{split}'}",
        "far: {kind: depth, key: 'depth_{split}'}",
        "normals: {kind: normals, key: 'normal_{split}'}",
        "edge: {kind: edge, key: 'edge_{split}'}",
        "borders: {kind: edge, key: 'seg_{split}', boundaries: true}",
    )
    found = [(task.name, task.kind, task.channels) for task in data.tasks]
    assert found == [
        ("seg", "semseg", 5), ("parts", "human_parts", 7), ("far", "depth", 1),
        ("normals", "normals", 3), ("edge", "edge", 1), ("borders", "edge", 1),
    ]  # fmt: skip
    assert data.input_shape == (3, 12, 12)
    x, y = data.train.batch(torch.arange(4), CPU)
    assert x.shape == (4, 3, 12, 12)
    inner = (slice(None), slice(1, 11))
    assert np.array_equal(y["seg"][inner], arrays["seg_train"])
    assert np.array_equal(y["far"][:, 0][inner], arrays["depth_train"].astype(np.float32))
    assert np.array_equal(y["edge"][:, 0][inner], arrays["edge_train"])
    assert np.array_equal(y["borders"][:, 0][inner], boundaries(arrays["seg_train"]))
    normals = arrays["normal_train"].astype(np.float32).transpose(0, 3, 1, 2)
    normals /= np.linalg.norm(normals, axis=1, keepdims=True)
    np.testing.assert_allclose(y["normals"][:, :, 1:11], normals, atol=1e-6)
    assert bool((y["seg"][:, 0] == 255).all())
    assert data.train.batch(torch.arange(4), CPU, torch.Generator())[0].shape == (4, 3, 10, 12)
    assert Pool.of(data).tasks == ("seg", "parts", "far", "normals", "edge", "borders")


def test_what_numbers_mean(load):
    grey = made(image=np.full((4, 10, 12), 9, np.uint8))
    rgb = np.zeros((4, 10, 12, 3), np.uint8)
    rgb[:, :, :6] = (255, 128, 128)
    data = load(
        {**grey, **made(image=grey["image_train"], normal=rgb, depth=np.full((4, 10, 12), 150, np.uint8),
                        edge=np.full((4, 10, 12), 100, np.uint8), seg=np.full((4, 10, 12), -1, np.int16))},
        "normals: {kind: normals, key: 'normal_{split}'}",
        "world: {kind: normals, key: 'normal_{split}', encoding: positive}",
        "depth: {kind: depth, key: 'depth_{split}', factor: 0.01}",
        "low: {kind: edge, key: 'edge_{split}', threshold: 0.3}",
        "high: {kind: saliency, key: 'edge_{split}', threshold: 0.5}",
    )  # fmt: skip
    _, y = data.train.batch(torch.tensor([0]), CPU)
    torch.testing.assert_close(y["normals"][0, :, 5, 2], torch.tensor([1.0, 0.0, 0.0]), atol=5e-3, rtol=0)
    assert y["normals"][0, :, 5, 8].tolist() == [255] * 3
    torch.testing.assert_close(y["world"][0, :, 5, 2], torch.tensor([0.8152, 0.4092, 0.4092]), atol=5e-3, rtol=0)
    assert float(y["depth"][0, 0, 5, 5]) == pytest.approx(1.5)
    assert (float(y["low"][0, 0, 5, 5]), float(y["high"][0, 0, 5, 5])) == (1, 0)
    with pytest.raises(DataError, match="no pixel is labelled"):
        load(made(seg=np.full((4, 10, 12), -1, np.int16)), SEG)


def test_boundaries():
    classes = np.array([[[1, 1, 2], [1, 255, 2], [3, 3, 3]]], np.uint8)
    assert boundaries(classes, gap=0)[0].tolist() == [[0, 1, 0], [1, 255, 1], [0, 0, 0]]
    row = np.array([[[1, 1, 255, 2, 2, 2, 255, 255, 255, 255, 255, 255, 255]]], np.uint8)
    assert boundaries(row)[0, 0].tolist() == [0, 0, 1, 0, 0, 0, 0, 0, 255, 255, 255, 255, 255]
    assert boundaries(row.transpose(0, 2, 1))[0, :, 0].tolist() == boundaries(row)[0, 0].tolist()
    assert row[0, 0, 2] == 255


def test_a_pool_is_split_and_limited(load):
    arrays = {key.removesuffix("_train"): value for key, value in made(10).items() if key.endswith("_train")}
    arrays["seg"] = np.broadcast_to(np.arange(10, dtype=np.uint8)[:, None, None], (10, 10, 12))
    arrays["place"] = np.arange(10) % 2
    params = {"images": "image", "test_fraction": "0.4", "domain": "place"}
    data = load(arrays, "seg: {kind: semseg, key: seg}", **params)
    y = {split: getattr(data, split).batch(torch.arange(n), CPU)[1]["seg"] for split, n in (("train", 6), ("test", 4))}
    assert sorted(torch.cat([part[:, 5, 5] for part in y.values()]).tolist()) == list(range(10))
    assert torch.equal(data.train.domain, y["train"][:, 5, 5] % 2)
    assert len(load(arrays, "seg: {kind: semseg, key: seg}", **params, limit="2").train) == 2


@pytest.mark.parametrize(
    ("more", "dense", "message"),
    [
        ({}, "a: {kind: semseg, key: nothing}", "in all keys or in none"),
        ({}, "a: {kind: semseg, key: 'sge_{split}'}", "no key 'sge_train'. Did you mean 'seg_train'"),
        ({}, "a: {kind: semseg, key: 'depth_{split}'}", "'depth_train': expected integers, found float16"),
        ({}, "a: {kind: semseg, key: 'seg_{split}', classes: 3}", "task 'a': expected labels below 3, found 4"),
        (
            {},
            "a: {kind: edge, key: 'seg_{split}'}",
            "expected 0, 1 and 255 .ignore., found .*; if these values are shares, add a threshold",
        ),
        ({}, "a: {kind: normals, key: 'seg_{split}'}", "expected normals N x H x W x 3"),
        ({}, "a: {kind: depth, key: 'normal_{split}'}", "expected label images N x H x W, found"),
        ({"seg": np.zeros((4, 9, 12), np.uint8)}, SEG, "expected 4 labels of 10 x 12, as 'image_train' has, found"),
        (
            {"seg": np.zeros((3, 10, 12), np.uint8)},
            SEG,
            "'seg_train': expected 4 values, as many as 'image_train', found 3",
        ),
        (
            {"seg": np.full((4, 10, 12), 300)},
            SEG,
            "expected labels from 0 to 254, or 255 or -1 .ignore., found 300..300",
        ),
        (
            {"depth": np.full((4, 10, 12), 1e300)},
            "a: {kind: depth, key: 'depth_{split}'}",
            "that float32 can hold, found 1e",
        ),
        ({"image": np.zeros((4, 10, 12, 3), np.float32)}, SEG, "dense labels need uint8 images, found float32"),
    ],
)
def test_mistakes_are_named(load, more, dense, message):
    with pytest.raises((DataError, RecipeError), match=message):
        load(made(**more), dense)


def test_options_of_other_labels_are_refused(load):
    with pytest.raises(RecipeError, match="size cannot be combined with dense"):
        load(made(), SEG, size="8")
    with pytest.raises(RecipeError, match=r"dense.seg.knid: unknown key. Did you mean 'kind'"):
        load(made(), "seg: {knid: semseg, key: a}")


@pytest.mark.skipif(not REAL.is_dir(), reason="the reduced real data is not here")
@pytest.mark.parametrize(
    ("file", "dense", "size"),
    [
        (
            "nyuv2",
            [
                "semseg: {kind: semseg, key: 'seg40_{split}', classes: 40}",
                "coarse: {kind: semseg, key: 'seg13_{split}', classes: 13}",
                "normals: {kind: normals, key: 'normal_{split}'}",
                "depth: {kind: depth, key: 'depth_{split}'}",
                "edge: {kind: edge, key: 'seg40_{split}', boundaries: true}",
            ],
            (96, 128),
        ),
        (
            "nerf_lego",
            [
                "saliency: {kind: saliency, key: 'mask_{split}'}",
                "depth: {kind: depth, key: 'depth_{split}'}",
                "normals: {kind: normals, key: 'normal_rgb_{split}', encoding: positive}",
            ],
            (128, 128),
        ),
    ],
)
def test_real_images(file, dense, size):
    data = build("arrays", [f"path={REAL / file}.npz", "images=image_{split}", f"dense={{{', '.join(dense)}}}"])
    assert data.input_shape == (3, *size)
    index = torch.arange(12)
    for rng in (None, torch.Generator().manual_seed(0)):
        x, y = data.train.batch(index, CPU, rng)
        assert bool(torch.isfinite(x).all())
        for task in data.tasks:
            target = y[task.name]
            assert 0.02 < float((target != 255).float().mean()) <= 1, task.name
            output = torch.zeros(len(index), task.channels, *target.shape[-2:])
            assert 0 < float(task.loss(output + 0.01, target)) < 100, task.name
            if task.kind in ("edge", "saliency"):
                assert 0.01 < float((target == 1).float().mean()) < 0.6, task.name
