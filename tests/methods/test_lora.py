"""FedSA-LoRA, FedEx-LoRA and FLoRA: what is shared, what is exact, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

import fedloom
from fedloom.codecs import Cropped
from fedloom.core.context import Ctx
from fedloom.core.layout import Block, Layout
from fedloom.core.updates import Updates
from fedloom.engines.api import Result, trained_models
from fedloom.errors import RecipeError
from fedloom.federation.rounds.build import build
from fedloom.federation.rounds.messages import count_bytes, unpacked
from fedloom.federation.rounds.rounds import initial_state
from fedloom.federation.rounds.server import dispatch, server_step
from fedloom.methods import (
    ditto,
    feddyn,
    fedex_lora,
    fedopt,
    fedper,
    fedrep,
    fedsa_lora,
    flora,
)
from fedloom.stages import ExactFactors, FactorProducts, Mean, PCGrad
from fedloom.training import FlatModel
from tests_support import assert_same, client_step, load_recipe, stopped_after

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


@pytest.mark.parametrize("left", [[0], [0, 1], [0, 2], [1, 2], [3]])
def test_a_layout_without_some_part_of_the_layer_gets_the_mean(left: list[int]) -> None:
    layout = Layout(tuple(LAYOUT.blocks[i] for i in left))
    X = np.random.default_rng(0).normal(size=(3, layout.d))
    assert torch.equal(ExactFactors(1.5).on(X, layout=layout)[0], Mean().on(X, layout=layout)[0])


def test_a_client_may_have_the_full_rank() -> None:
    assert FactorProducts(ranks={"a": 2}).init(LAYOUT) == {}
    with pytest.raises(ValueError, match="client 'a' has 3, expected at most 2"):
        FactorProducts(ranks={"a": 3}).init(LAYOUT)


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


RANKS = {"all-0": 1, "digit-0": 1}
FLORA = (LORA, "method.add={flora: {scale: 1.5, ranks: {all-0: 1, digit-0: 1}}}", "model.lora.alpha=3")


def test_rows_of_all_ranks_become_products() -> None:
    """Ranks 1, 2 and 2: the layer is the weighted sum of dense products, and stages that compare see these."""
    rng, p = np.random.default_rng(1), np.array([0.2, 0.3, 0.5])
    base, X = rng.normal(size=LAYOUT.d), rng.normal(size=(3, LAYOUT.d))
    base[18:26] = 0  # B
    X[:, :12] = 0
    X[0].reshape(-1)[15:18] = 0  # the second row of A
    X[0, 19:26:2] = 0  # the second column of B
    given = {"n": [2.0, 3, 5], "layout": LAYOUT, "base": np.tile(base, (3, 1))}
    products = [1.5 * b @ a for _, a, b in (matrices(base + x) for x in X)]
    assert [np.linalg.matrix_rank(product) for product in products] == [1, 2, 2]
    out, _ = (FactorProducts(1.5) >> Mean()).on(X, **given)
    np.testing.assert_allclose(matrices(out[0].numpy())[0], sum(w * x for w, x in zip(p, products, strict=True)))
    assert not out[:, 12:26].any(), "factors stay where they are"
    assert torch.equal(out[0, 26:], Mean().on(X, n=[2.0, 3, 5], layout=LAYOUT)[0][0, 26:])
    dense = X.copy()
    dense[:, 12:26] = 0
    dense[:, :12] = np.stack(products).reshape(3, -1)
    torch.testing.assert_close(
        (FactorProducts(1.5) >> PCGrad() >> Mean()).on(X, **given)[0],
        (PCGrad() >> Mean()).on(dense, n=[2.0, 3, 5], layout=LAYOUT)[0],
    )


@low_rank
def test_each_client_trains_and_sends_its_own_rank(quick: Quick) -> None:
    """One round by hand: W becomes W + s sum_k p_k B_k A_k, with decay that would move what is not trained."""
    decay = "training.optimizer={name: adamw, lr: 0.01, weight_decay: 0.5}"
    recipe = load_recipe(*FLORA, decay)
    built = build(recipe)
    layout, method = built.layout.parameters, built.method
    model = FlatModel.copy_of(built.module)
    start = model.params.clone()
    server, clients = initial_state(built)["server"], sorted(built.federation.clients)
    messages = dispatch(built, server, clients)
    names = [name.removesuffix(".base_layer.weight") for name in layout.names if name.endswith("base_layer.weight")]
    ctx, sent, sizes, sums = Ctx(1, targets=tuple((c, None) for c in clients)), [], {}, dict.fromkeys(names, 0.0)
    total = sum(len(client.train) for client in built.federation.clients.values())
    for name in clients:
        client = built.federation.clients[name]
        payload, _, _ = client_step(method, model, built.federation, client, messages[name], {}, ctx, recipe.training)
        sent.append(payload)
        sizes[name] = count_bytes(built, payload.row[0], payload)
        X, _ = unpacked(built, payload.rows, payload.packed)
        for layer in names:
            W, A, B = (
                (start[s] + X[0, s]).view(layout.blocks[layout.names.index(n)].shape).double().numpy()
                for n in (f"{layer}.{which}" for which in SHAPES)
                for s in [layout.slice(n)]
            )
            assert np.linalg.matrix_rank(B @ A) == RANKS.get(name, 2)
            assert np.array_equal(W.ravel(), start[layout.slice(f"{layer}.base_layer.weight")].double().numpy())
            sums[layer] = sums[layer] + payload.n / total * 1.5 * B @ A
    after = server_step(built, sent, server, ctx)["model"]
    for layer in names:
        s = layout.slice(f"{layer}.base_layer.weight")
        np.testing.assert_allclose((after[s] - start[s]).numpy(), sums[layer].ravel(), atol=1e-6)
        assert np.abs(sums[layer]).max() > 1e-5
    whole = sum(4 * b.size for b in layout.blocks if b.role == "adapter")
    for name in clients:
        assert whole / 2 * RANKS.get(name, 2) * 0.95 < sizes[name]["adapter", None] <= whole / 2 * RANKS.get(name, 2)
        assert ("encoder", None) not in sizes[name], "weights do not travel"


@low_rank
def test_flora_through_a_run(quick: Quick, tmp_path: Path) -> None:
    """Stopped and resumed it is the same, and so it is with every value sent as it is."""
    whole = quick(*FLORA, *SHORT)
    assert_same(whole, fedloom.resume(stopped_after(1, tmp_path / "parts", load_recipe(*FLORA, *SHORT))))
    assert_same(whole, quick(*FLORA, *SHORT, "method.codec=raw"), models_only=True)


@low_rank
@pytest.mark.slow
@pytest.mark.parametrize("where", ["runtime.workers=2", "runtime.engine=flower", "peers={weights: {kind: size}}"])
def test_flora_elsewhere(quick: Quick, where: str) -> None:
    if where.endswith("flower"):
        pytest.importorskip("flwr")
    changes = (*FLORA, "training.rounds=2", "evaluation={every: 2, splits: [val]}", "partition.val_fraction=0.1")
    here, there = quick(*changes), quick(*changes, where)
    if not where.startswith("peers"):
        assert_same(here, there)
        return
    [model] = trained_models(here.folder).values()
    for own in trained_models(there.folder).values():
        assert all(torch.equal(own[name], tensor) for name, tensor in model.items())


def test_what_is_cropped_comes_back_and_a_node_that_lies_about_it_does_not() -> None:
    X = torch.randn(2, LAYOUT.d, generator=torch.Generator().manual_seed(0))
    X[:, :12] = 0
    X[0, 15:18] = 0
    X[0, 19:26:2] = 0
    present = torch.tensor([[True] * 4, [True, True, True, False]])
    X[1, 26:] = 0
    updates = Updates.of(X, layout=LAYOUT, present=present)
    like = updates.replace(X=torch.zeros_like(X))
    packed, codec = Cropped().pack(updates), Cropped()
    assert torch.equal(codec.unpack(codec.read(packed, like), updates.replace(X=torch.zeros_like(X))), X)
    assert packed["corners"].tolist() == [[0, 0], [1, 3], [4, 1], [1, 5], [0, 0], [2, 3], [4, 2]]
    assert sum(codec.count(packed, like).values()) == sum(tensor.nbytes for tensor in packed.values())
    dense = Updates.of(torch.ones_like(X), layout=LAYOUT)
    assert codec.pack(dense).keys() == {"values"}, "nothing to save"
    assert torch.equal(codec.unpack(codec.pack(dense), dense.replace(X=torch.zeros_like(X))), dense.X)
    for corner, message in (
        ([3, 3], "corners: expected at most 2 x 3 for encoder.fc.lora_A.default.weight, found 3 x 3"),
        ([-1, 3], "expected values from 0"),
        ([2, 3], "values: expected shape"),
    ):
        lie = packed["corners"].clone()
        lie[1] = torch.tensor(corner)
        with pytest.raises(ValueError, match=message):
            codec.read({**packed, "corners": lie}, like)
    for wrong in ({"corners": packed["corners"]}, {**packed, "more": X}, {"corners": 3, "values": X}, 7):
        with pytest.raises(ValueError, match="expected"):
            codec.read(wrong, like)


def test_refused() -> None:
    for change, message in (
        ("method.add={fedex-lora: {}}", r"model\.lora: null found, expected low-rank factors"),
        ("method.add={fedsa-lora: {}}", r"model\.lora: null found, expected low-rank factors"),
        ("method.add={flora: {}}", r"model\.lora: null found, expected low-rank factors"),
    ):
        with pytest.raises(RecipeError, match=message):
            build(load_recipe(change))
    with pytest.raises(ValueError, match="already has private blocks"):
        fedsa_lora(fedper())
    with pytest.raises(ValueError, match=r"replaces Plain\(step=1.0\)"):
        fedex_lora(fedopt())
    with pytest.raises(ValueError, match="fedex-lora cannot be combined with training in phases"):
        fedex_lora(fedrep())
    with pytest.raises(ValueError, match="flora cannot be combined with training in phases"):
        flora(fedrep())
    with pytest.raises(ValueError, match="flora cannot be combined with a personal model that trains all weights"):
        flora(ditto())
    with pytest.raises(ValueError, match="flora stores products at the server, so clients cannot keep factors"):
        flora(feddyn())


@low_rank
def test_a_scale_that_is_not_the_models_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"scale: 1.0 found, expected 3.0, which is alpha / rank of model.lora"):
        build(load_recipe(LORA, "model.lora.alpha=6", "method.add={fedex-lora: {}}"))
    build(load_recipe(LORA, "model.lora.alpha=6", "method.add={fedex-lora: {scale: 3}}"))


@low_rank
@pytest.mark.parametrize(
    ("add", "message"),
    [
        ("flora: {ranks: {digit-0: 3}}", "client 'digit-0' has 3, expected at most 2, the rank of model.lora"),
        ("flora: {ranks: {digit-9: 1}}", r"no client 'digit-9'\. Did you mean 'digit-0'\? Clients: all-0, "),
        ("flora: {ranks: {digit-0: 0}}", r"flora\.ranks\.digit-0: 0 found, expected an integer of at least 1"),
        ("flora: , fedsa-lora: ", "products cannot be computed where clients keep .*lora_B.default.weight"),
    ],
)
def test_ranks_that_cannot_be_are_refused(add: str, message: str) -> None:
    for where in ((), ("peers={graph: ring}",)):
        with pytest.raises(RecipeError, match=message):
            build(load_recipe(LORA, f"method.add={{{add}}}", *where))
