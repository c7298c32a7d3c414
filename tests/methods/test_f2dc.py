"""F2DC through whole runs: its modules in the model, on the wire and in evaluation."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fedloom
from fedloom.core.layout import Layout
from fedloom.engines.api import Result, trained_models
from fedloom.federation.rounds.build import build
from fedloom.methods.f2dc.rules import AttachFeatureModules, FeatureModule, FeatureModules, feature_losses, map_channels
from fedloom.models.multitask import MultiTask
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
    model(X.double())
    (module,) = model.encoder.attached.values()  # type: ignore[union-attr, operator]
    parts = module.parts
    assert torch.allclose(parts.fused, parts.robust + parts.corrected, atol=1e-12)


def test_the_terms_of_several_stages_add_up(plain: MultiTask) -> None:
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
    torch.testing.assert_close(total, terms[0].penalty + terms[1].penalty)


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
    whole = run(tmp_path / "whole", method, "training.rounds=3")
    sent = [e for line in lines(whole, "bytes.jsonl") for e in line["up"] + line["down"]]
    plain = run(tmp_path / "plain", "method=fedavg", "training.rounds=3")
    expected = [e for line in lines(plain, "bytes.jsonl") for e in line["up"] + line["down"]]
    assert sent == expected  # as if there were no modules
    assert_same(whole, fedloom.resume(stopped_after(2, tmp_path / "parts", tiny(method, "training.rounds=3"))))


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
