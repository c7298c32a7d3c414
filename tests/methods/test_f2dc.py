"""F2DC: mask, split and losses worked out by hand; through whole runs, its modules in the model, on the wire and in
evaluation."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedloom
from fedloom.core.errors import UserError
from fedloom.core.layout import Layout, Select
from fedloom.engines.api import Result, trained_models
from fedloom.federation.rounds.build import build
from fedloom.methods.f2dc.rules import (
    AttachFeatureModules,
    AuxiliaryHead,
    Corrector,
    Decoupler,
    FeatureModule,
    FeatureModules,
    decouple,
    feature_losses,
    gumbel_mask,
    map_channels,
    noise_of,
    wrong_labels,
)
from fedloom.models.multitask import MultiTask
from fedloom.models.tasks.labels import Classification, Multilabel, Ordinal, Regression
from fedloom.training.rules import View
from tests_support import assert_same, load_recipe, stopped_after

Quick = Callable[..., Result]
TINY = ("data.size=16", "model.width=4", "training.batch_size=16", "evaluation.splits=[test]")


def tiny(*changes: str) -> fedloom.federation.recipes.schema.Recipe:
    return load_recipe(*TINY, *changes, recipe="f2dc/digits-embedded")


def run(folder: Path, *changes: str) -> Result:
    return fedloom.run(tiny(*changes), folder)


def lines(result: Result, name: str) -> list[dict[str, Any]]:
    return [json.loads(text) for text in (result.folder / name).read_text().splitlines()]


@pytest.fixture
def plain() -> MultiTask:
    built = build(tiny("method=fedavg"))
    return built.module


def attached(plain: MultiTask, **options: Any) -> MultiTask:
    model = copy.deepcopy(plain)
    torch.manual_seed(0)
    AttachFeatureModules(**options)(model, (1, 16, 16))
    return model


X = torch.rand(6, 1, 16, 16, generator=torch.Generator().manual_seed(1))


def test_without_a_corrector_the_network_is_the_plain_one(plain: MultiTask) -> None:
    model = attached(plain, correct=False)
    for mode in (True, False):
        a, b = (m.train(mode)(X)["digit"] for m in (copy.deepcopy(plain), copy.deepcopy(model)))
        assert torch.equal(a, b)


def test_with_a_corrector_it_is_not_and_bypassed_it_is_again(plain: MultiTask) -> None:
    expected = plain.eval()(X)["digit"]
    assert not torch.allclose(attached(plain).eval()(X)["digit"], expected)
    assert torch.equal(attached(plain, scope="identity").eval()(X)["digit"], expected)
    assert not torch.allclose(attached(plain, scope="local").eval()(X)["digit"], expected)


def test_two_evaluations_are_identical_and_two_training_passes_are_not(plain: MultiTask) -> None:
    model = attached(plain)
    assert torch.equal(model.eval()(X)["digit"], model(X)["digit"])
    assert not torch.equal(model.train()(X)["digit"], model(X)["digit"])
    noisy = attached(plain, noisy_eval=True).eval()
    assert not torch.equal(noisy(X)["digit"], noisy(X)["digit"])


def test_what_the_module_keeps_fits_together(plain: MultiTask) -> None:
    model = attached(plain).double().train()
    logits = model(X.double())["digit"]
    (module,) = model.encoder.attached.values()  # type: ignore[union-attr, operator]
    parts = module.parts
    assert torch.allclose(parts.fused, parts.robust + parts.corrected, atol=1e-12)
    pooled = parts.fused.mean((2, 3))
    assert torch.allclose(logits, model.heads["digit"](pooled), atol=1e-12)  # eq. 8: h(r(f~))


def test_the_terms_of_several_stages_are_averaged(plain: MultiTask) -> None:
    model = attached(plain, layers=("stages.1", "stages")).train()
    outputs = model(X)
    labels = {"digit": torch.arange(6)}
    nothing = torch.zeros(0)
    view = View(nothing, nothing, nothing, (), outputs=outputs, targets=labels, module=model)
    terms = [
        feature_losses(module.parts, outputs["digit"], labels["digit"], module.auxiliary["digit"], 0.06, 0.8, 1.0)
        for module in model.encoder.attached.values()  # type: ignore[union-attr, operator]
    ]
    total = FeatureModules().penalty(view, {})
    torch.testing.assert_close(total, (terms[0].penalty + terms[1].penalty) / 2)  # eq. 9: 1 / |L|


def test_a_copy_of_the_model_uses_its_own_modules(plain: MultiTask) -> None:
    model = attached(plain).eval()
    twin = copy.deepcopy(model)
    before = model(X)["digit"]
    with torch.no_grad():
        for p in twin.encoder.attached.parameters():  # type: ignore[union-attr]
            p.add_(1)
    assert torch.equal(model(X)["digit"], before)
    assert not torch.allclose(twin(X)["digit"], before)


def test_several_stages_and_names_that_are_none(plain: MultiTask) -> None:
    maps = map_channels(plain.encoder, (1, 16, 16))
    assert list(maps)[-1] == "stages"
    assert maps["stages.1"] == 8
    model = attached(plain, layers=("stages.1", "stages"))
    assert list(model.encoder.attached) == ["stages_1", "stages"]  # type: ignore[arg-type]
    with pytest.raises(
        fedloom.errors.RecipeError, match="'stages.9' is not a map of the encoder; its maps: .*stages.1"
    ):
        attached(plain, layers=("stages.9",))
    with pytest.raises(fedloom.errors.RecipeError, match="an encoder with maps"):
        build(load_recipe("method=f2dc", "model=mlp"))
    with pytest.raises(fedloom.errors.RecipeError, match="already has feature modules"):
        build(tiny("method={name: f2dc, add: {feature-modules: {}}}"))


def test_roles_say_who_the_modules_belong_to(plain: MultiTask) -> None:
    shared = Layout.from_module(attached(plain)).select(name="encoder.attached.*")
    assert {b.part for b in shared.blocks} == {"encoder"}
    assert {b.role for b in shared.parameters.blocks} == {"adapter", "norm"}
    private = Layout.from_module(attached(plain, scope="local"))
    assert {b.part for b in private.select("private").blocks} == {"private"}
    assert not [b for b in private.select("encoder").blocks if "attached" in b.name]


def test_with_everything_switched_off_a_run_is_fedavg(tmp_path: Path) -> None:
    off = "{name: fedavg, add: {feature-modules: {correct: false, lambda1: 0, lambda2: 0}}}"
    ours, theirs = run(tmp_path / "a", f"method={off}"), run(tmp_path / "b", "method=fedavg")
    (a,), (b,) = trained_models(ours.folder).values(), trained_models(theirs.folder).values()
    assert a.keys() - b.keys()
    for name, tensor in b.items():
        assert torch.equal(a[name], tensor), name
    metrics = [[line["metrics"] for line in lines(r, "metrics.jsonl")] for r in (ours, theirs)]
    assert metrics[0] == metrics[1]


def test_each_part_changes_the_run(tmp_path: Path) -> None:
    cases = {
        "decoupling": "{name: fedavg, add: {feature-modules: {correct: false}}}",
        "correction": "{name: fedavg, add: {feature-modules: {lambda1: 0}}}",
        "weights": "{name: fedavg, add: {domain-weights: {}}}",
        "all": "f2dc",
        "fedavg": "fedavg",
    }
    models = {}
    for name, method in cases.items():
        (models[name],) = trained_models(run(tmp_path / name, f"method={method}").folder).values()
    found = [
        (a, b)
        for a in models
        for b in models
        if a < b and torch.equal(*(models[m]["heads.digit.weight"] for m in (a, b)))
    ]
    assert not found


@pytest.mark.parametrize("scope", ["identity", "local"])
def test_private_modules_stay_with_their_client_and_survive_a_stop(tmp_path: Path, scope: str) -> None:
    method = f"method={{name: fedavg, add: {{feature-modules: {{scope: {scope}}}}}}}"
    whole = run(tmp_path / "whole", method, "training.rounds=2")
    sent = [e for line in lines(whole, "bytes.jsonl") for e in line["up"] + line["down"]]
    plain = run(tmp_path / "plain", "method=fedavg", "training.rounds=2")
    expected = [e for line in lines(plain, "bytes.jsonl") for e in line["up"] + line["down"]]
    assert sent == expected  # as if there were no modules
    assert_same(whole, fedloom.resume(stopped_after(1, tmp_path / "parts", tiny(method, "training.rounds=2"))))


def test_modules_differ_between_clients_where_they_are_local(tmp_path: Path) -> None:
    result = run(tmp_path / "r", "method={name: fedavg, add: {feature-modules: {scope: local}}}")
    models = trained_models(result.folder)
    name = next(
        n for n in next(iter(models.values())) if "attached" in n and "decoupler" in n and n.endswith("running_mean")
    )
    values = [m[name] for m in models.values()]
    assert len(values) == 7
    assert not torch.equal(values[0], values[1])
    plain = [m["encoder.stem.weight"] for m in models.values()]
    assert all(torch.equal(plain[0], p) for p in plain)


def test_identity_measures_the_same_model_everywhere(tmp_path: Path) -> None:
    method = "method={name: fedavg, add: {feature-modules: {scope: identity}}}"
    recipe = tiny(method)
    domains = {c.id: c.domain for c in build(recipe).federation.clients.values()}
    by_domain: dict[tuple[str | None, str], set[float]] = {}
    for r in lines(fedloom.run(recipe, tmp_path / "r"), "metrics.jsonl")[-1]["metrics"]:
        by_domain.setdefault((domains[r["client"]], r["metric"]), set()).add(r["value"])
    assert all(len(values) == 1 for values in by_domain.values())


def test_dense_tasks_have_no_labels_for_it() -> None:
    with pytest.raises(fedloom.errors.RecipeError, match="a task with one class per example"):
        build(load_recipe("method=f2dc", recipe="feddea/scenes"))


def test_counters_of_norm_layers_do_not_travel(plain: MultiTask) -> None:
    model = attached(plain)
    assert not [n for n, b in model.named_buffers() if "attached" in n and not b.is_floating_point()]
    assert isinstance(next(iter(model.encoder.attached.values())), FeatureModule)  # type: ignore[union-attr, operator, arg-type]
    twin = attached(plain, sigma=0.5)
    twin.load_state_dict(dict(model.state_dict()))  # as it comes from a file, without torch's metadata
    for a, b in zip(twin.state_dict().values(), model.state_dict().values(), strict=True):
        assert torch.equal(a, b)


SHAPE = (2, 3, 4, 5)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def uniform(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_without_noise_the_mask_is_the_sigmoid_of_the_score_over_sigma():
    score = torch.tensor([-0.1, 0.0, 0.05], dtype=torch.float64)
    expected = [1 / (1 + math.e), 0.5, 1 / (1 + math.exp(-0.5))]
    torch.testing.assert_close(gumbel_mask(score, 0.1), torch.tensor(expected, dtype=torch.float64))
    half = torch.full_like(score, 0.5)
    torch.testing.assert_close(gumbel_mask(score, 0.1, half, half), gumbel_mask(score, 0.1))


@pytest.mark.parametrize("noise", ["gumbel", "logistic"])
def test_the_mask_is_the_papers_softmax(noise):
    score, a, b, sigma = draw(*SHAPE), uniform(*SHAPE), uniform(*SHAPE, seed=1), 0.3
    p = torch.sigmoid(score)
    keep = torch.exp((torch.log(p) + noise_of(a, noise)) / sigma)
    drop = torch.exp((torch.log(1 - p) + noise_of(b, noise)) / sigma)
    torch.testing.assert_close(gumbel_mask(score, sigma, a, b, noise), keep / (keep + drop))


def test_noise_by_hand_and_its_variance():
    u = torch.tensor([0.5, 0.9], dtype=torch.float64)
    torch.testing.assert_close(noise_of(u), -torch.log(-torch.log(u)), rtol=1e-6, atol=1e-6)
    assert noise_of(u, "logistic").tolist() == pytest.approx([0, math.log(9)])
    a, b = uniform(100_000), uniform(100_000, seed=1)
    for noise, variance in (("gumbel", math.pi**2 / 3), ("logistic", 2 * math.pi**2 / 3)):
        difference = noise_of(a, noise) - noise_of(b, noise)
        assert float(difference.var()) == pytest.approx(variance, rel=0.03)


@pytest.mark.parametrize("noise", ["gumbel", "logistic"])
def test_the_mask_is_finite_at_the_extremes(noise):
    score = torch.tensor([-1e30, -1e3, -1.0, 1.0, 1e3, 1e30]).requires_grad_()
    for u, v in ((0.0, 1.0), (1.0, 0.0), (1.0, 1.0), (0.0, 0.0)):
        mask = gumbel_mask(score, 1e-3, torch.full((6,), u), torch.full((6,), v), noise)
        assert ((mask >= 0) & (mask <= 1)).all()
        (grad,) = torch.autograd.grad(mask.sum(), score)
        assert torch.isfinite(grad).all()


def test_wrong_arguments_of_the_mask():
    with pytest.raises(ValueError, match="expected sigma > 0, found 0"):
        gumbel_mask(torch.zeros(1), 0)
    with pytest.raises(ValueError, match="both draws"):
        gumbel_mask(torch.zeros(1), 1, torch.zeros(1))


def test_the_parts_add_up():
    f, mask = draw(*SHAPE), uniform(*SHAPE)
    corrector = nn.Conv2d(3, 3, 1).double()
    parts = decouple(f, mask, corrector)
    torch.testing.assert_close(parts.robust + parts.related, f)
    torch.testing.assert_close(parts.robust + parts.corrected, parts.fused)
    torch.testing.assert_close(parts.fused, f + (1 - mask) * corrector((1 - mask) * f))


def test_a_mask_of_one_and_a_corrector_of_zero_change_nothing():
    f = draw(*SHAPE)
    kept = decouple(f, torch.ones(*SHAPE), lambda x: x + 7)
    assert torch.equal(kept.fused, f)
    assert torch.equal(kept.robust, f)
    assert not kept.related.any()
    assert torch.equal(decouple(f, uniform(*SHAPE), torch.zeros_like).fused, f)
    dropped = decouple(f, torch.zeros(*SHAPE), lambda x: 2 * x)
    assert torch.equal(dropped.fused, f + 2 * f)
    assert not dropped.robust.any()


def test_modules_have_the_sizes_of_the_release():
    def size(module: nn.Module) -> int:
        return sum(p.numel() for p in module.parameters())

    assert size(Decoupler(512, "release")) == size(Corrector(512, "release")) == 483_500
    assert size(AuxiliaryHead(512, 7)) == 3_591
    assert size(Decoupler(512)) == 2 * 9 * 512 * 64 + 2 * 64
    assert size(Corrector(8, "release", 4)) == 2 * 9 * 8 * 4 + 9 * 16 + 4 * 4
    kinds = [nn.Conv2d, nn.BatchNorm2d, nn.ReLU, nn.Conv2d]
    assert all(isinstance(layer, kind) for layer, kind in zip(Decoupler(8), kinds, strict=True))
    assert Decoupler(8)(torch.zeros(2, 8, 4, 5)).shape == (2, 8, 4, 5)


def test_the_wrong_label_is_the_most_confident_wrong_class():
    logits = torch.tensor([[3.0, 2.0, 1.0], [3.0, 2.0, 1.0], [-5.0, -9.0, -7.0]])
    assert wrong_labels(logits, torch.tensor([0, 1, 0])).tolist() == [1, 0, 2]
    with pytest.raises(ValueError, match="at least two classes"):
        wrong_labels(torch.zeros(1, 1), torch.zeros(1, dtype=torch.int64))


def pixel(*values: float) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.float64)[:, :, None, None]


def test_losses_by_hand():
    # f = (3, 4), mask = (1, .5): f+ = (3, 2), f- = (0, 2); A_C gives (1, 4), so f* = (0, 4) and f~ = (3, 6).
    parts = decouple(pixel(3, 4), pixel(1, 0.5), lambda x: pixel(1, 4))
    assert parts.fused.flatten().tolist() == [3, 6]
    losses = feature_losses(parts, pixel(1, 0).flatten(1), torch.tensor([1]), lambda x: x, tau=0.5)
    log = math.log
    assert float(losses.classification) == pytest.approx(log(1 + math.e))
    assert float(losses.separability) == pytest.approx(2 * 2 / math.sqrt(13))
    assert float(losses.robust) == pytest.approx(log(1 + math.e))
    assert float(losses.related) == pytest.approx(log(1 + math.exp(2)))  # the wrong label is 0, m says (0, 2)
    assert float(losses.corrected) == pytest.approx(log(1 + math.exp(-4)))
    penalty = 0.8 * (4 / math.sqrt(13) + log(1 + math.e) + log(1 + math.exp(2))) + log(1 + math.exp(-4))
    assert float(losses.penalty) == pytest.approx(penalty)
    assert float(losses.total) == pytest.approx(penalty + log(1 + math.e))


def test_pooling_is_the_mean_over_positions_and_unlabelled_examples_do_not_count():
    f, mask, m = draw(3, 4, 2, 2), uniform(3, 4, 2, 2), AuxiliaryHead(4, 3).double()
    logits, labels = draw(3, 3), torch.tensor([2, -1, 0])
    every = feature_losses(decouple(f, mask, torch.sin), logits, labels, m)
    means = f.mean((2, 3), keepdim=True)  # constant maps have the same mean
    known = [0, 2]
    some = feature_losses(decouple(f[known], mask[known], torch.sin), logits[known], labels[known], m)
    torch.testing.assert_close(every.total, some.total)
    flat = torch.full_like(f, 0.25)
    a = feature_losses(decouple(f, flat, torch.zeros_like), logits, labels, m)
    b = feature_losses(decouple(means.expand_as(f), flat, torch.zeros_like), logits, labels, m)
    torch.testing.assert_close(a.total, b.total)
    assert float(a.separability) == pytest.approx(1 / 0.06)  # f+ and f- are parallel
    nobody = feature_losses(decouple(f, mask, torch.sin), logits, torch.full((3,), -1), m)
    assert float(nobody.total) == 0
    with pytest.raises(ValueError, match="tau"):
        feature_losses(decouple(f, mask, torch.sin), logits, labels, m, tau=0)


def test_every_module_learns_and_the_wrong_label_passes_no_gradient():
    torch.manual_seed(0)
    f = torch.randn(4, 6, 3, 3, requires_grad=True)
    decoupler, corrector, m, head = Decoupler(6), Corrector(6), AuxiliaryHead(6, 3), nn.Linear(6, 3)
    parts = decouple(f, gumbel_mask(decoupler(f), 0.1), corrector)
    losses = feature_losses(parts, head(parts.fused.mean((2, 3))), torch.tensor([0, 1, 2, 0]), m)
    losses.total.backward()
    for module in (decoupler, corrector, m, head):
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in module.parameters())
    head.zero_grad()
    parts = decouple(f.detach(), gumbel_mask(decoupler(f.detach()), 0.1), corrector)
    logits = head(parts.fused.mean((2, 3)))
    feature_losses(parts, logits, torch.tensor([0, 1, 2, 0]), m).penalty.backward()
    assert head.weight.grad is None or not head.weight.grad.any()


@pytest.mark.parametrize("scope", ["identity", "local"])
def test_modules_that_stay_go_with_methods_whose_heads_stay(scope: str) -> None:
    changes = ("model={name: resnet10, width: 4, heads: own}", *TINY[2:])
    add = f"add: {{feature-modules: {{scope: {scope}}}}}"
    assert build(load_recipe(f"method={{name: fedhca2, {add}}}", *changes)).method.private == Select(
        role=("head", "private")
    )
    with pytest.raises(UserError, match="feature-modules: with scope .* but fedbn chooses what stays there by other"):
        build(load_recipe(f"method={{name: fedbn, {add}}}", *changes))


def test_only_tasks_with_one_class_per_example_have_an_auxiliary_head(plain: MultiTask) -> None:
    kinds = [Regression("age"), Multilabel("findings", 3), Classification("site", 4), Ordinal("grade", 3)]
    model = MultiTask(copy.deepcopy(plain.encoder), kinds)
    AttachFeatureModules()(model, (1, 16, 16))
    (module,) = model.encoder.attached.values()
    assert {task: head.out_features for task, head in module.auxiliary.items()} == {"site": 4, "grade": 3}
    with pytest.raises(UserError, match="feature modules need a task with one class per example"):
        AttachFeatureModules()(MultiTask(copy.deepcopy(plain.encoder), kinds[:2]), (1, 16, 16))
