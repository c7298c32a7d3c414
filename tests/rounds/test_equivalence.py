"""Test what must be the same, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import fedloom
from fedloom import Method
from fedloom.engines.api import trained_models
from fedloom.federation.rounds.build import build
from fedloom.federation.rounds.worker import InProcess, Worker
from fedloom.methods import ADDONS, METHODS
from fedloom.stages import Identity, Mean, Split
from tests_support import MERGING, ROBUST, TORCHJD, Quick, assert_same, load_recipe, named, needed, stopped_after

# What differs in how it travels and in what is kept; every method is below, in one process.
POOL_CASES = [
    "method=local",
    "method={name: scaffold, add: {pcgrad: }}",
    "method={name: moon, add: {heal: }}",
    "method={name: fedga, buffers: local}",
    "method={name: fedamp, start: mix, scale: median, share: encoder}",
    "method={name: fedprox, add: {feddea: {rho: 0.5, keep: random}}, codec: sparse}",
    "method={name: fedopt, optimizer: yogi, weights: uniform, add: {heal: {zeros: none}, activated-dimensions: }}",
    "method={name: matu, heads: local}",
    "method={name: fedper, add: {by-task: }}",
    "method={name: fedavg, add: {feature-modules: {scope: local}}}",
]
KINDS = {
    "no updates": ("centralised", "constant", "local", "simple"),
    "one mean": (
        *("condistfl", "f2dc", "fedacg", "fedavg", "feddyn", "fedga", "fednova", "fedopt", "fedprox", "fedrcl", "moon"),
        "ntk-fedavg",
    ),
    "broadcasts": ("fedproto", "fedsa", "fedtgp", "fpl", "scaffold", "sheaf-fmtl"),
    "private blocks": ("fedbabu", "fedbn", "fedbone", "fedmd", "fedper", "fedrep", "fedsta"),
    "a model of the client's own": ("ditto", "fedamp", "fedmtl", "fedsoft", "pfedme"),
    "a row for each client": (
        *("cfl", "colnet", "dfmtl", "dpsgd", "fdse", "fedhca2", "fedmerge", "fedpmt", "fedspd", "ifca", "matfl"),
        "rr-cluster",
    ),
    "a row for each task": ("matu", "separate"),
}
ADDED = {
    "at the client": ("dare", "feddea", "plateau"),
    "changes or weighs rows": (
        *("activated-dimensions", "clip", "domain-weights", "famo", "gradvac", "heal", "nnm", "pcgrad", "staleness"),
    ),
    "replaces the mean": (
        *("cagrad", "config", "min-norm", "support-mean", *TORCHJD),
        *(name for name in (*ROBUST, *MERGING) if name not in ("clip", "nnm", "dare")),
    ),
    "changes the model": ("feature-modules", "fedex-lora", "fedsa-lora", "flora"),
    "other rows": ("across-tasks", "by-task"),
    "server rule": ("server-step",),
}


NAMES = sorted(METHODS.entries)
# Pairs of a method and an add-on, and whether they run (2), run each night only (1) or are built only (0): each method
# meets an add-on of each kind, each add-on runs with a method of one kind, and each night with a method of each.
# Methods of each kind run with an add-on of each kind.
PAIRS: dict[str, dict[str, int]] = {name: {} for name in NAMES}
for (number, kind), added in product(enumerate(KINDS.values()), ADDED.values()):
    for i in range(max(len(kind), len(added))):
        always = len(added) < 4 or (i - number) % len(KINDS) == 0
        PAIRS[kind[i % len(kind)]][added[i % len(added)]] = (1 + always) * (i < len(added))
MODULES = ("feddea: {rho: 0.3}", "pcgrad: ", "heal: {weights: multiply}")
# Each method alone, and, each night, each module with one method of each kind, in turn.
MATRIX = [
    *((name, "") for name in NAMES),
    *((kind[i % len(kind)], module) for kind in KINDS.values() for i, module in enumerate(MODULES)),
]
# How a combination may be refused when it is built.
WHY = (
    "would have no effect",
    "replaces ",
    "would replace ",
    "would be lost",
    "does not read it",
    "overwrites it without reading it",
    "cannot be combined",
    "already has ",
    "running statistics",
    "which only asynchronous peers have",
    "train one model for all clients",
    "an encoder with maps",
    "need a task with one class per example",
    "which is not installed",
    "expected low-rank factors",
)
ONCE = "evaluation={every: 3, splits: [test], predictions: false}"
HARD = (
    "training.optimizer={name: adamw, lr: 0.001, weight_decay: 0.01}",
    "training.keep_optimizer=true",
    "training.participation=0.6",
    "training.schedule={name: cosine, warmup: 1}",
    "model.heads=own",
)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """FedAvg."""
    return fedloom.run(load_recipe(), tmp_path_factory.mktemp("plain") / "run").folder


@pytest.mark.parametrize(
    "change",
    [
        "method.add.feddea.rho=1",
        "method={name: fedprox, mu: 0}",
        "method={name: moon, mu: 0}",
        "method={name: fedopt, optimizer: momentum, b1: 0}",
        "method={name: fedacg, lam: 0, beta: 0, weights: size}",
        "method.add.cagrad.c=0",
        "method.add.server-step.step=1",
        "method.codec=sparse",
    ],
)
def test_equal_to_fedavg(plain: Path, quick: Quick, change: str) -> None:
    assert_same(plain, quick(change))


def test_fedga_without_a_step_is_the_uniform_mean(quick: Quick) -> None:
    assert_same(quick("method={name: fedavg, weights: uniform}"), quick("method={name: fedga, step: 0}"))


def test_mu_above_zero_is_not_fedavg(plain: Path, quick: Quick) -> None:
    with pytest.raises(AssertionError):
        assert_same(plain, quick("method={name: fedprox, mu: 10}"))


def test_local_is_mixing_with_the_identity(quick: Quick) -> None:
    identity = Method(name="identity", stage=Identity())
    assert_same(quick("method=local"), quick(method=identity))


@pytest.mark.parametrize("case", POOL_CASES)
def test_workers_do_not_matter(quick: Quick, case: str) -> None:
    assert_same(quick(case, *HARD), quick(case, *HARD, "runtime.workers=2"))


def test_batch_norm_buffers_and_trained_models_do_not_depend_on_workers(quick: Quick) -> None:
    changes = (
        "model={name: resnet10, width: 4}",
        "method.buffers=pooled",
        "evaluation.models=[global, personal, trained]",
    )
    assert_same(quick(*changes), quick(*changes, "runtime.workers=2"))


class TwoInDisorder(InProcess):
    """Two workers here, which take the jobs in turns, the last one first."""

    def __init__(self, setup: Any, *_: Any) -> None:
        self.workers = [Worker(setup), Worker(setup)]

    def run(self, jobs: Sequence[Any], **options: Any) -> Iterator[Any]:
        for i, job in enumerate(reversed(jobs)):
            yield job.on(self.workers[i % 2], **options)


@pytest.mark.parametrize(
    ("name", "module"),
    [
        pytest.param(n, m, id=f"{n}-{m.split(':')[0] or 'alone'}", marks=[pytest.mark.slow] if m else [])
        for n, m in MATRIX
    ],
)
def test_every_method_with_every_module(
    quick: Quick, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, module: str
) -> None:
    """Trains; the same for any order and place of work, and after a stop; or is refused with a reason."""
    changes = (f"method={{{named(name)}, add: {{{module}}}}}", *HARD, ONCE, "training.rounds=3")
    try:
        whole = quick(*changes)
    except fedloom.errors.RecipeError as error:
        refused = str(error)
    else:
        refused = ""
    if refused:
        assert module
        assert any(reason in refused for reason in WHY), refused
        return
    for model in trained_models(whole.folder).values():
        assert all(bool(torch.isfinite(v).all()) for v in model.values() if v.is_floating_point())
    monkeypatch.setattr(fedloom.engines.api, "executor", TwoInDisorder)
    parts = stopped_after(whole.run.last_round - 1, tmp_path / "parts", load_recipe(*changes))
    monkeypatch.undo()
    assert_same(whole, fedloom.resume(parts))


@pytest.mark.parametrize("buffers", ["mean", "local", "pooled"])
def test_stop_and_resume_with_batch_norm(quick: Quick, tmp_path: Path, buffers: str) -> None:
    changes = ("model={name: resnet10, width: 4}", f"method.buffers={buffers}")
    whole = quick(*changes)
    assert_same(whole, fedloom.resume(stopped_after(1, tmp_path / "parts", load_recipe(*changes))))


def test_absent_clients_keep_the_part_that_is_common(quick: Quick) -> None:
    """One encoder for all and personal heads: nobody's encoder drifts, although 3 of 5 clients are there in a round."""
    method = Method(name="split", stage=Split({"encoder": Mean(), "*": Identity()}))
    run = quick("training.participation=0.6", "training.rounds=4", method=method)
    models = list(trained_models(run.folder).values())
    assert len(models) == 5
    for name, tensor in models[0].items():
        if name.startswith("encoder"):
            assert all(torch.equal(tensor, other[name]) for other in models), name


def test_a_run_leaves_the_initial_values_of_its_module_alone(quick: Quick) -> None:
    """Workers and the server's first state share that memory."""
    first, built = build(load_recipe()), quick().built
    assert built is not None
    assert torch.equal(built.layout.flatten(built.module), first.layout.flatten(first.module))


def test_seeds_differ_and_repeat(plain: Path, quick: Quick) -> None:
    assert_same(plain, quick())
    with pytest.raises(AssertionError):
        assert_same(plain, quick("seed=2"), models_only=True)


def test_the_global_random_state_is_left_alone(quick: Quick) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    quick()
    assert torch.equal(before, torch.get_rng_state())


def with_addon(name: str, addon: str) -> tuple[str, ...]:
    """Return what makes a recipe's method one with an add-on, for one short round."""
    given = ", ".join(f"{key}: {value}" for key, value in needed(addon).items())
    method = named(name).replace("tune: 1", "tune: 0")
    return f"method={{{method}, add: {{{addon}: {{{given}}}}}}}", "training.rounds=1", ONCE


def refusal(name: str, addon: str) -> str:
    """Return why the method itself refuses an add-on, before any data are seen; empty if it does not."""
    try:
        ADDONS[addon].make(METHODS[name].make(), **needed(addon))
    except (ValueError, fedloom.errors.RecipeError) as error:
        return str(error)
    return ""


def test_the_kinds_cover_every_method_and_every_add_on_once() -> None:
    assert sorted(name for kind in KINDS.values() for name in kind) == NAMES
    assert sorted(name for kind in ADDED.values() for name in kind) == sorted(ADDONS.entries)


@pytest.mark.parametrize("least", [2, pytest.param(1, marks=pytest.mark.slow)], ids=["some", "all"])
@pytest.mark.parametrize("name", NAMES)
def test_every_add_on_composes_with_every_method_or_says_why_not(quick: Quick, name: str, least: int) -> None:
    refused = {}
    for addon, often in PAIRS[name].items():
        try:
            if often >= least:
                models = trained_models(quick(*with_addon(name, addon)).folder).values()
                assert all(bool(v.isfinite().all()) for m in models for v in m.values() if v.is_floating_point()), addon
            elif not often:
                build(load_recipe(*with_addon(name, addon)))
        except fedloom.errors.RecipeError as error:
            refused[addon] = str(error)
    assert all(any(why in text for why in WHY) for text in refused.values()), refused


@pytest.mark.parametrize("name", ["fedavg", "fedprox"])
def test_a_plain_mean_goes_with_all_add_ons_but_staleness(name: str) -> None:
    refused = set()
    for addon in ADDONS.entries:
        try:
            build(load_recipe(*with_addon(name, addon)))
        except fedloom.errors.RecipeError as error:
            # for another environment, another model
            if not any(why in str(error) for why in ("which is not installed", "expected low-rank factors")):
                refused.add(addon)
    assert refused == {"staleness"}


@pytest.mark.parametrize("name", NAMES)
def test_methods_refuse_feddea_if_they_send_nothing_and_robust_rules_alike(name: str) -> None:
    assert bool(refusal(name, "feddea")) == (name in ("local", "sheaf-fmtl", "simple"))
    robust = {addon for addon in ROBUST if refusal(name, addon)}
    assert robust in (set(), {*ROBUST}, {*ROBUST} - {"clip", "nnm"}), "those that take a mean's place, or all"


def test_a_mean_stage_given_in_python_is_fedavg(plain: Path, quick: Quick) -> None:
    assert_same(plain, quick(method=Method(name="fedavg", stage=Mean())))
