"""Labels follow the image through every random change, and evaluation changes nothing."""

from __future__ import annotations

import colorsys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from fedloom.data.prepare import Augment, resolve
from fedloom.data.transforms import MEAN, STD, Dense, draw_colours, draw_warp, padded, ready

CPU = torch.device("cpu")
KINDS = {k: k for k in ("semseg", "human_parts", "saliency", "normals", "depth", "edge")}


def coordinates(n: int, height: int, width: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Images whose red is the column and whose green is the row, and labels made of the same numbers."""
    y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    images = torch.stack([x, y, torch.zeros_like(x)]).to(torch.uint8).expand(n, -1, -1, -1).contiguous()
    normals = torch.stack([x + 1, y + 1, torch.full_like(x, 50)]).float()
    labels = {
        "semseg": x.to(torch.uint8),
        "human_parts": (y + 1).to(torch.uint8),
        "saliency": ((x // 4) % 2).to(torch.uint8),
        "edge": ((y // 4) % 2).to(torch.uint8),
        "depth": (1 + x + 100 * y).float(),
        "normals": normals,
    }
    return images, {task: raw.expand(n, *raw.shape).contiguous() for task, raw in labels.items()}


@settings(max_examples=40)
@given(
    height=st.integers(8, 40),
    width=st.integers(8, 40),
    h=st.integers(4, 48),
    w=st.integers(4, 48),
    low=st.floats(0.5, 1),
    high=st.floats(1, 2),
    flip=st.sampled_from([0.0, 0.5, 1.0]),
    seed=st.integers(0, 1000),
)
def test_every_label_follows_the_image(height, width, h, w, low, high, flip, seed):
    images, labels = coordinates(3, height, width)
    augment = Augment(scale=(low, high), flip=flip, jitter=0)
    x, y = Dense(KINDS, (h, w), augment)(images, labels, CPU, torch.Generator().manual_seed(seed))
    warp = draw_warp(3, (height, width), (h, w), augment, torch.Generator().manual_seed(seed), labels["semseg"])
    assert x.shape == (3, 3, h, w)
    assert y["semseg"].shape == y["human_parts"].shape == (3, h, w)
    assert y["saliency"].shape == y["edge"].shape == y["depth"].shape == (3, 1, h, w)

    colour = (x * torch.tensor(STD)[:, None, None] + torch.tensor(MEAN)[:, None, None]) * 255
    col, row = y["semseg"], y["human_parts"] - 1
    outside = col == 255
    assert torch.equal(outside, ~warp.inside((height, width)))
    # Bilinear and nearest coordinates agree within half a source pixel.
    assert bool(((colour[:, 0] - col).abs()[~outside] <= 0.51).all())
    assert bool(((colour[:, 1] - row).abs()[~outside] <= 0.51).all())
    for task in ("saliency", "edge", "depth", "human_parts"):
        assert bool((y[task].view(3, h, w)[outside] == 255).all())
    assert bool((x.permute(0, 2, 3, 1)[outside] == 0).all())
    assert bool((y["normals"].permute(0, 2, 3, 1)[outside] == 255).all())
    seen = ~outside
    assert torch.equal(y["saliency"][:, 0][seen], ((col // 4) % 2)[seen].float())
    assert torch.equal(y["edge"][:, 0][seen], ((row // 4) % 2)[seen].float())
    depth = (1 + col + 100 * row) / warp.scale[:, None, None]
    torch.testing.assert_close(y["depth"][:, 0][seen], depth[seen])
    sign = torch.where(warp.flip, -1.0, 1.0)[:, None, None]
    normals = torch.stack([sign * (col + 1), row + 1.0, torch.full_like(depth, 50)], 1)
    normals = normals / normals.norm(dim=1, keepdim=True)
    torch.testing.assert_close(y["normals"].permute(0, 2, 3, 1)[seen], normals.permute(0, 2, 3, 1)[seen])
    # A mirrored image counts its columns down.
    along = torch.where(seen[:, :, 1:] & seen[:, :, :-1], col[:, :, 1:] - col[:, :, :-1], 0)
    assert bool((along * torch.where(warp.flip, -1, 1)[:, None, None] >= 0).all())


def test_draws_come_from_the_generator_alone():
    images, labels = coordinates(4, 24, 32)

    def run(seed: int, global_seed: int) -> torch.Tensor:
        torch.manual_seed(global_seed)
        x, y = Dense(KINDS, (24, 32), Augment())(images, labels, CPU, torch.Generator().manual_seed(seed))
        return torch.cat([x, y["normals"], y["depth"]], 1)

    assert torch.equal(run(3, 0), run(3, 1))
    assert not torch.equal(run(3, 0), run(4, 0))
    before = images.clone()
    run(5, 0)
    assert torch.equal(images, before)


def test_without_any_change_training_equals_evaluation():
    images, labels = coordinates(2, 16, 20)
    still = Augment(scale=(1, 1), flip=0, jitter=0)
    x, y = Dense(KINDS, (16, 20), still)(images, labels, CPU, torch.Generator().manual_seed(0))
    x2, y2 = Dense(KINDS, (16, 20))(images, labels, CPU, None)
    torch.testing.assert_close(x, x2, atol=1e-4, rtol=1e-4)
    assert all(torch.equal(y[task], y2[task]) for task in KINDS)


def test_evaluation_is_exact_and_pads_at_the_centre():
    images, labels = coordinates(2, 10, 12)
    labels["depth"][0, 3, 4] = 0
    labels["normals"][0, :, 3, 4] = 0
    x, y = Dense(KINDS, padded((10, 12), 8))(images, labels, CPU, None)
    assert x.shape == (2, 3, 16, 16)
    inner = (slice(None), slice(3, 13), slice(2, 14))
    assert torch.equal(y["semseg"][inner], labels["semseg"].long())
    border = torch.ones(16, 16, dtype=torch.bool)
    border[3:13, 2:14] = False
    for task in KINDS:
        assert bool((y[task].view(2, -1, 16, 16)[:, :, border] == 255).all()), task
    assert bool((x[:, :, border] == 0).all())
    assert float(y["depth"][0, 0, 6, 6]) == 255
    assert y["normals"][0, :, 6, 6].tolist() == [255] * 3
    assert float(y["depth"][1, 0, 6, 6]) == 1 + 4 + 300
    with pytest.raises(ValueError, match="at most 8 x 16, found 10 x 12"):
        Dense(KINDS, (8, 16))(images, labels, CPU, None)


def test_images_without_parts_are_ignored_for_parts():
    raw = torch.zeros(3, 4, 4, dtype=torch.uint8)
    raw[1, 0, 0] = 2
    raw[2, 0, 0] = 255
    label = ready("human_parts", raw)
    assert bool((label[[0, 2]] == 255).all())
    assert label[1].sum() == 2


def test_values_that_are_none_are_ignored():
    depth = torch.tensor([[[float("nan"), float("inf"), -1.0, 0.0, 2.0]]])
    assert ready("depth", depth).flatten().tolist() == [255, 255, 255, 255, 2]
    normals = torch.tensor([[0, float("nan"), 3], [0, 0, 0], [0, 1, 4]]).view(1, 3, 1, 3)
    found = ready("normals", normals)
    assert found[0, :, 0, 0].tolist() == [255] * 3
    assert found[0, :, 0, 1].tolist() == [255] * 3
    torch.testing.assert_close(found[0, :, 0, 2], torch.tensor([0.6, 0, 0.8]))
    eighths = torch.tensor([12, 0, 124], dtype=torch.int8).view(1, 3, 1, 1)
    torch.testing.assert_close(ready("normals", eighths).norm(dim=1), torch.ones(1, 1, 1))


def test_crops_filled_by_one_class_are_drawn_again():
    semseg = torch.zeros(64, 64, 64, dtype=torch.uint8)
    semseg[:, 48:, 48:] = 1
    semseg[:, 48:, :48] = 2
    augment = Augment(scale=(1, 1), flip=0, crop_tries=30)

    def largest(given: torch.Tensor | None) -> torch.Tensor:
        warp = draw_warp(64, (64, 64), (32, 32), augment, torch.Generator().manual_seed(0), given)
        crop = semseg.flatten(1).gather(1, warp.index((64, 64)).flatten(1))
        return torch.stack([(crop == c).float().mean(1) for c in range(3)]).amax(0)

    assert float((largest(None) > 0.8).float().mean()) > 0.5
    assert float((largest(semseg) > 0.8).float().mean()) < 0.05


def test_colours_are_changed_within_their_ranges():
    torch.testing.assert_close(draw_colours(2, Augment(jitter=0), torch.Generator())[0], torch.eye(3).expand(2, 3, 3))
    # Each change alone, at its largest, against the usual definitions.
    only = {"brightness": 0.0, "contrast": 0.0, "saturation": 0.0, "hue": 0.0}
    colour = torch.tensor([0.55, 0.4, 0.3])
    rng = torch.Generator().manual_seed(0)
    matrix, shift = draw_colours(500, Augment(jitter=1, **{**only, "brightness": 0.1}), rng)
    assert bool((shift.abs() <= 0.1).all())
    assert float(shift.max()) > 0.095
    matrix, shift = draw_colours(500, Augment(jitter=1, **{**only, "saturation": 0.5}), rng)
    luma = torch.tensor([0.299, 0.587, 0.114])
    torch.testing.assert_close((matrix @ colour) @ luma, (colour @ luma).expand(500))
    matrix, shift = draw_colours(500, Augment(jitter=1, **{**only, "hue": 36.0}), rng)
    turned = matrix @ colour
    torch.testing.assert_close(turned.sum(1), colour.sum().expand(500))
    hues = torch.tensor([colorsys.rgb_to_hsv(*c)[0] for c in turned.tolist()])
    away = ((hues - colorsys.rgb_to_hsv(*colour.tolist())[0] + 0.5) % 1 - 0.5) * 360
    assert 30 < float(away.max()) < 42
    assert -42 < float(away.min()) < -30
    share = (draw_colours(2000, Augment(), rng)[1][:, 0] != 0).float().mean()
    assert 0.4 < float(share) < 0.6


def test_settings():
    assert resolve(True) == Augment()
    assert resolve(False) is None
    assert resolve(Augment(flip=0)) == Augment(flip=0)
    with pytest.raises(ValidationError, match=r"expected \(smallest, largest\) factor, found \[2\.0, 1\.0\]"):
        Augment(scale=(2, 1))
    assert padded((425, 560), 32) == (448, 576)
