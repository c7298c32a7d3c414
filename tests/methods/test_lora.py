"""FedSA-LoRA and FedEx-LoRA: what is shared, what is exact, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

import fedloom
from fedloom.core.layout import Block, Layout
from fedloom.engines.api import Result, trained_models
from fedloom.errors import RecipeError
from fedloom.methods import fedavg, fedex_lora, fedopt, fedper, fedrep, fedsa_lora
from fedloom.rounds.build import build
from fedloom.stages import ExactFactors, Mean
from tests_support import assert_same, load_recipe, stopped_after

Quick = Callable[..., Result]
LORA = "model={name: tiny-vit, width: 16, depth: 1, num_heads: 2, lora: {rank: 2}}"
SHORT = ("training.participation=0.6", "training.rounds=2")
low_rank = pytest.mark.skipif(None in (find_spec("peft"), find_spec("timm")), reason="peft or timm is not installed")

LAYER = "encoder.fc"
SHAPES = {"base_layer.weight": (4, 3), "lora_A.default.weight": (2, 3), "lora_B.default.weight": (4, 2)}
LAYOUT = Layout((*(Block(f"{LAYER}.{name}", shape) for name, shape in SHAPES.items()), Block("heads.a", (5,))))


def matrices(vector: np.ndarray) -> list[np.ndarray]:
    """W, A and B."""
    return [vector[s].reshape(b.shape) for b, s in zip(LAYOUT.blocks[:3], LAYOUT.slices, strict=False)]


def test_the_layer_becomes_the_mean_of_the_layers() -> None:
    rng, p = np.random.default_rng(0), np.array([0.2, 0.3, 0.5])
    base, X = rng.normal(size=LAYOUT.d), rng.normal(size=(3, LAYOUT.d))
    X[:, :12] = 0  # nobody trains W
    found, _ = ExactFactors(1.5).on(X, n=[2.0, 3, 5], layout=LAYOUT, base=np.tile(base, (3, 1)))
    W, A, B = matrices(base + found[0].numpy())
    trained = [matrices(base + x) for x in X]
    np.testing.assert_allclose(
        W + 1.5 * B @ A, sum(w * (t[0] + 1.5 * t[2] @ t[1]) for w, t in zip(p, trained, strict=True))
    )
    mean = Mean().on(X, n=[2.0, 3, 5], layout=LAYOUT)[0][0]
    assert torch.equal(found[0][12:], mean[12:])  # everything else is the mean
    assert not np.allclose(matrices(base)[0] + 1.5 * B @ A, W + 1.5 * B @ A)
    alone, _ = ExactFactors(1.5).on(X[:1], layout=LAYOUT, base=base[None])
    np.testing.assert_allclose(alone.numpy(), X[:1], atol=1e-12)


@low_rank
def test_fedex_lora_through_a_run(quick: Quick, tmp_path: Path) -> None:
    """Weights beside factors move, and only by what the server adds; stopped and resumed it is the same."""
    changes = (LORA, "method.add={fedex-lora: {}}", *SHORT)
    whole = quick(*changes)
    start = build(load_recipe(*changes)).module.state_dict()
    [model] = trained_models(whole.folder).values()
    moved = {n for n, v in model.items() if n in start and not torch.equal(v, start[n]) and n.startswith("encoder")}
    assert {re.sub(r".*\.(base_layer|lora_[AB])\..*", r"\1", n) for n in moved} == {"base_layer", "lora_A", "lora_B"}
    assert_same(whole, fedloom.resume(stopped_after(1, tmp_path / "parts", load_recipe(*changes))))
    alone = quick(*changes, "training.participation=0.2", "training.rounds=1").folder  # a residual of 0
    [model] = trained_models(alone).values()
    weights = [n for n in model if "base_layer" in n]
    assert weights
    assert all(torch.equal(model[n], start[n]) for n in weights), "training leaves them alone"


@low_rank
def test_fedsa_lora_shares_a_and_keeps_b(quick: Quick, tmp_path: Path) -> None:
    changes = (LORA, "method.add={fedsa-lora: {}, pcgrad: {}}", *SHORT)
    whole = quick(*changes)
    models = [m for name, m in trained_models(whole.folder).items() if name]
    assert len(models) > 1
    for name in models[0]:
        if "lora_A" in name:
            assert all(torch.equal(models[0][name], other[name]) for other in models), name
        if "lora_B" in name:
            assert not torch.equal(models[0][name], models[1][name]), name
    built = build(load_recipe(*changes))
    assert {n for n in built.layout.names if "lora_B" in n} == {
        b.name for b in built.method.private_part(built.layout).blocks
    }
    assert_same(whole, fedloom.resume(stopped_after(1, tmp_path / "parts", load_recipe(*changes))))


def test_refused() -> None:
    for change, message in (
        ("method.add={fedex-lora: {}}", r"model\.lora: null found, expected low-rank factors"),
        ("method.add={fedsa-lora: {}}", r"model\.lora: null found, expected low-rank factors"),
    ):
        with pytest.raises(RecipeError, match=message):
            build(load_recipe(change))
    with pytest.raises(ValueError, match="private blocks are there already"):
        fedsa_lora(fedper())
    with pytest.raises(ValueError, match=r"takes the place of Plain\(step=1.0\)"):
        fedex_lora(fedopt())
    with pytest.raises(ValueError, match="phases and fedex-lora do not go together"):
        fedex_lora(fedrep())
    with pytest.raises(ValueError, match="expected a scale above 0"):
        fedex_lora(fedavg(), scale=0)


@low_rank
def test_a_scale_that_is_not_the_models_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"scale: 1.0 found, expected 3.0, which is alpha / rank of model.lora"):
        build(load_recipe(LORA, "model.lora.alpha=6", "method.add={fedex-lora: {}}"))
    build(load_recipe(LORA, "model.lora.alpha=6", "method.add={fedex-lora: {scale: 3}}"))
