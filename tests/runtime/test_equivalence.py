"""What must be the same, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import fedloom
from fedloom import Method
from fedloom.methods import ADDONS, METHODS
from fedloom.runtime.api import Result
from fedloom.runtime.build import build
from fedloom.runtime.process import initial_state
from fedloom.runtime.steps import client_step, dispatch, server_step
from fedloom.stages import Identity, Mean
from fedloom.training.flat import FlatModel
from tests_support import assert_same, load_recipe

Quick = Callable[..., Result]

METHOD_CASES = [f"method={name}" for name in sorted(METHODS.entries)] + [
    "method.add.feddea.rho=0.3",
    "method={name: fedprox, add: {feddea: {rho: 0.5, keep: random}}, codec: sparse}",
    "method={name: fedavg, weights: uniform}",
]
HARD = (
    "training.optimizer={name: adamw, lr: 0.001, weight_decay: 0.01}",
    "training.keep_optimizer=true",
    "training.participation=0.6",
    "training.schedule={name: cosine, warmup: 1}",
    "model.heads=own",
)


@pytest.mark.parametrize(
    "changes",
    [
        ("method.add.feddea.rho=1",),
        ("method={name: fedprox, mu: 0}",),
        ("method.codec=sparse",),
    ],
    ids=["rho=1", "mu=0", "sparse codec"],
)
def test_equal_to_fedavg(quick: Quick, changes: tuple[str, ...]) -> None:
    assert_same(quick(), quick(*changes))


def test_mu_above_zero_is_not_fedavg(quick: Quick) -> None:
    with pytest.raises(AssertionError):
        assert_same(quick(), quick("method={name: fedprox, mu: 10}"))


def test_local_is_mixing_with_the_identity(quick: Quick) -> None:
    identity = Method(name="identity", stage=Identity())
    assert_same(quick("method=local"), quick(method=identity))


@pytest.mark.parametrize("case", METHOD_CASES)
def test_workers_do_not_matter(quick: Quick, case: str) -> None:
    assert_same(quick(case, *HARD), quick(case, *HARD, "runtime.workers=2"))


def test_batch_norm_buffers_and_trained_models_do_not_depend_on_workers(quick: Quick) -> None:
    changes = (
        "model={name: resnet10, width: 4}",
        "method.buffers=pooled",
        "evaluation.models=[global, personal, trained]",
    )
    assert_same(quick(*changes), quick(*changes, "runtime.workers=2"))


@pytest.mark.parametrize("case", METHOD_CASES)
def test_stop_and_resume(quick: Quick, tmp_path: Path, case: str) -> None:
    whole = quick(case, *HARD, "training.rounds=3")
    parts = stopped_after(2, tmp_path / "parts", load_recipe(case, *HARD, "training.rounds=3"))
    assert_same(whole, fedloom.resume(parts))


@pytest.mark.parametrize("buffers", ["mean", "local", "pooled"])
def test_stop_and_resume_with_batch_norm(quick: Quick, tmp_path: Path, buffers: str) -> None:
    changes = ("model={name: resnet10, width: 4}", f"method.buffers={buffers}")
    whole = quick(*changes)
    assert_same(whole, fedloom.resume(stopped_after(1, tmp_path / "parts", load_recipe(*changes))))


class Stop(Exception):
    """A crash."""


def stopped_after(rounds: int, folder: Path, recipe: fedloom.recipes.schema.Recipe) -> Path:
    """Run until so many rounds are saved, then fail in the middle of the next."""
    from fedloom.runtime.api import Silent

    class Crash(Silent):
        def client(self, round: int, done: int, of: int) -> None:
            if round == rounds + 1 and done == of:
                raise Stop

    with pytest.raises(Stop):
        fedloom.run(recipe, folder, progress=Crash())
    return folder


@pytest.mark.parametrize("case", METHOD_CASES)
def test_arrival_order_does_not_matter(case: str) -> None:
    recipe = load_recipe(case, *HARD)
    built = build(recipe)
    model = FlatModel(copy.deepcopy(built.module), built.layout)
    members = list(built.federation.clients)
    ctx = fedloom.Ctx(1, 0, tuple((m, None) for m in members))
    results = []
    for order in (members, members[::-1]):
        server = initial_state(built)["server"]
        messages = dispatch(built.method, server, order)
        payloads = []
        for name in order:
            client = built.federation.clients[name]
            args = (built.federation, client, messages[name], {}, ctx, recipe.training)
            payloads.append(client_step(built.method, model, *args)[0])
        results.append(server_step(built.method, built.layout, built.federation, payloads, server, ctx))
    assert fedloom.runtime.state.same(results[0], results[1])


def test_seeds_differ_and_repeat(quick: Quick) -> None:
    assert_same(quick("seed=1"), quick("seed=1"))
    with pytest.raises(AssertionError):
        assert_same(quick("seed=1"), quick("seed=2"), models_only=True)


def test_the_global_random_state_is_left_alone(quick: Quick) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    quick()
    assert torch.equal(before, torch.get_rng_state())


def test_every_add_on_composes_with_every_method(quick: Quick) -> None:
    refused = []
    for name in METHODS.entries:
        for addon in ADDONS.entries:
            try:
                quick(f"method={{name: {name}, add: {{{addon}: }}}}", "training.rounds=1")
            except fedloom.errors.RecipeError as error:
                refused.append((name, addon, str(error)))
    assert [r[:2] for r in refused] == [("local", "feddea")]
    assert "would change nothing" in refused[0][2]


def test_heads_of_other_tasks_are_untouched_by_weight_decay(quick: Quick) -> None:
    """A unified model under AdamW: a task's head moves only by its own clients' training."""
    recipe = load_recipe("training.optimizer={name: adamw, lr: 0.01, weight_decay: 0.5}")
    built = build(recipe)
    model = FlatModel(copy.deepcopy(built.module), built.layout)
    server = initial_state(built)["server"]
    client = built.federation.clients["digit-0"]
    message = dispatch(built.method, server, ["digit-0"])["digit-0"]
    payload, _, _ = client_step(
        built.method, model, built.federation, client, message, {}, fedloom.Ctx(1), recipe.training
    )
    delta = payload.packed["values"]
    layout = built.layout.parameters
    for block, s in zip(layout.blocks, layout.slices, strict=True):
        moved = bool(delta[s].any())
        assert moved == (block.task in (None, "digit")), block.name


def test_a_mean_stage_given_in_python_is_fedavg(quick: Quick) -> None:
    assert_same(quick(), quick(method=Method(name="fedavg", stage=Mean())))
