"""Methods made in Python: what they are called, what run folders say of them, and what of the recipe they undo."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

import pytest

import fedloom
from fedloom import Ctx, Method, methods
from fedloom.core.context import State
from fedloom.core.stage import Traits
from fedloom.core.updates import Updates
from fedloom.errors import RecipeError, StateError, UserError
from fedloom.experiments.export.finished import reopen
from fedloom.federation.recipes.loader import load
from fedloom.federation.recipes.schema import recipe_hash
from fedloom.federation.rounds.build import build, method_of
from fedloom.federation.runs.reader import Run
from fedloom.methods import METHODS
from fedloom.stages import CAGrad, Heal, MinNorm, PCGrad, PerBlock, Stage, TopMagnitude
from fedloom.study import compare
from fedloom.training import Proximal
from tests_support import Quick, load_recipe


@dataclass(frozen=True)
class Half(Stage):
    """Half of each row."""

    by: float = 0.5

    def __call__(self, updates: Any, state: Any, ctx: Any) -> Any:
        return updates.replace(X=updates.X * self.by), state


@pytest.mark.parametrize(
    ("method", "name"),
    [
        (methods.fedavg().plus(TopMagnitude(0.3)), "fedavg + TopMagnitude(rho=0.3)"),
        (methods.fedavg().plus(TopMagnitude(0.3), at="server"), "fedavg + TopMagnitude(rho=0.3) at the server"),
        (methods.fedavg().plus(Half()).plus(Half(0.25)), "fedavg + Half + Half(by=0.25)"),
        (methods.fedavg().plus(Half() >> TopMagnitude(0.3)), "fedavg + Half >> TopMagnitude(rho=0.3)"),
        (methods.fedprox(mu=1).plus(Heal(), at="server"), "fedprox + Heal at the server"),
        (methods.fedavg().combined_by(CAGrad(0.2)), "fedavg + CAGrad(c=0.2)"),
        (methods.fedavg().with_local(Proximal(0.1)), "fedavg + Proximal(mu=0.1)"),
        (methods.server_step(methods.feddea(methods.fedprox()), step=2.0), "fedprox + feddea + server-step"),
        (methods.feddea(methods.fedavg()).plus(Half()), "fedavg + feddea + Half"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_added_is_in_the_name(method: Method, name: str) -> None:
    assert method.name == name
    assert str(method).startswith(f"method {name}\n")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: methods.fedavg().plus(Half(), at="client"),
            "at='client' found, expected 'edge' .* or 'server'",
        ),
        (lambda: methods.fedavg().plus(Half), "Method: edge: <class .*Half'> found, expected Stage"),
        (lambda: methods.fedavg().with_local(Proximal), "local: .*Proximal.* expected a list .*: LocalRule or Phase"),
        (lambda: Method(stage=lambda updates, state, ctx: (updates, state)), "stage: .* found, expected Stage"),
        (lambda: Method(server=Half()), r"server: Half\(by=0.5\) found, expected ServerRule"),
        (lambda: Method(weights="sizes"), "weights: 'sizes' found, expected 'size', 'declared' or 'uniform'"),
        (lambda: PerBlock("mean"), "PerBlock: stage: 'mean' found, expected Stage"),
        (lambda: methods.fedprox(mu="much"), "Proximal: mu: 'much' found, expected a number of at least 0"),
    ],
    ids=["at", "stage class", "rule class", "function", "server", "weights", "in a stage", "number"],
)
def test_a_part_of_another_kind_is_refused_where_it_is_given(make: Any, message: str) -> None:
    """Some of these would have trained plain FedAvg under another name."""
    with pytest.raises(ValueError, match=message):
        make()


def test_a_recipe_may_add_the_class_of_a_stage() -> None:
    method = method_of(load_recipe("method={name: fedavg, add: {'fedloom.stages:Heal': {tau: 0.7, at: server}}}"))
    assert method.name == "fedavg + fedloom.stages:Heal"
    assert method.stage == methods.fedavg().plus(Heal(0.7), at="server").stage


def test_the_class_of_a_rule_that_combines_rows_takes_the_place_of_the_mean() -> None:
    for at in ("", "at: server"):
        method = method_of(load_recipe(f"method={{name: fedprox, add: {{'fedloom.stages:MinNorm': {{{at}}}}}}}"))
        assert method.stage == MinNorm()
    row = method_of(load_recipe("method={name: fedavg, add: {'fedloom.stages:TopMagnitude': {rho: 0.5}}}"))
    assert (row.edge, row.stage) == (TopMagnitude(0.5), methods.fedavg().stage)
    with pytest.raises(RecipeError, match="would replace a mean, but"):
        method_of(load_recipe("method={name: fedhca2, add: {'fedloom.stages:MinNorm': {}}}"))


@dataclass(frozen=True)
class Forgot(Stage):
    """A rule whose author forgot what its traits promise: one row, and the state."""

    state: bool
    traits = Traits("mix", reads={"X"}, reduces=True)

    def __call__(self, updates: Updates, state: State, ctx: Ctx) -> Any:
        return (updates, state) if self.state else updates.reduced(updates.X.mean(0))


def test_a_stage_that_breaks_its_promise_is_named(quick: Quick) -> None:
    for stage, why in (
        (Forgot(True), r"Forgot\(state=True\) returned rows of 5 clients, but .* expected updates.reduced"),
        (Forgot(False), r"Forgot\(state=False\) returned Updates, expected updates and state"),
    ):
        with pytest.raises(UserError, match=why):
            quick(method=Method(name="own", stage=stage, weights="uniform"))


def test_methods_of_recipes_keep_their_names() -> None:
    for entry in METHODS:
        assert entry.function().name == entry.name
    recipe = load_recipe("method=fedprox", "method.add={heal: , feddea: {rho: 0.3}}")
    assert method_of(recipe).name == "fedprox + heal + feddea"
    assert method_of(load_recipe("peers={penalty: 0.1}")).name == "fedavg"


def test_a_folder_says_what_ran_and_that_it_was_made_in_python(quick: Quick) -> None:
    method = methods.fedavg().plus(Half())
    made, plain = quick(method=method), quick()
    assert json.loads((made.folder / "run.json").read_text())["method"] == made.run.label == "fedavg + Half"
    assert made.run.recipe["method"]["python"] == "fedavg + Half"
    assert plain.run.recipe["method"]["python"] is None
    assert recipe_hash(made.run.recipe) == recipe_hash(plain.run.recipe)
    assert reopen(made.folder)[0].method.name == "fedavg + Half"
    with pytest.raises(RecipeError, match=r"method.python: the method was the Python object 'fedavg \+ Half'"):
        fedloom.resume(made.folder)
    with pytest.raises(RecipeError, match=r"method.python: .* pass it as method="):
        fedloom.run(made.folder / "recipe.yaml", plain.folder.with_name("again"))
    with pytest.raises(RecipeError, match="method.python"):
        fedloom.plan(load(made.folder / "recipe.yaml"))
    with pytest.raises(StateError, match="the method has changed since the run began"):
        fedloom.resume(made.folder, method=methods.fedavg().plus(Half(0.25)))
    assert fedloom.resume(made.folder, method=method).status == "finished"
    assert not plain.folder.with_name("again").exists()


def test_two_methods_have_two_columns_with_two_heads(quick: Quick) -> None:
    """Also where not even the name tells them apart."""
    half = methods.fedavg().plus(Half())
    runs = [quick(method=method).folder for method in (half, methods.fedavg().plus(Half(0.25)))]
    runs += [quick().folder, quick(method=replace(half, weights="uniform")).folder]
    heads = [column.label for column in compare(runs).columns]
    assert heads[1:3] == ["fedavg + Half(by=0.25)", "fedavg"]
    assert (heads[0], heads[3]) == (f"fedavg + Half [{runs[0]}]", f"fedavg + Half [{runs[3]}]")
    text = compare(runs[1:3]).to_markdown()
    assert "\n| | fedavg + Half(by=0.25) | fedavg |\n" in text
    assert len({Run.read(run).group for run in runs}) == 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            "method={name: fedprox, mu: 0.5}",
            r"method.mu: 0.5 found, but the Python object 'fedavg \+ PCGrad at the server'",
        ),
        (
            "method.add.feddea.rho=0.3",
            r"method.add: feddea found, .* would have no effect; leave it out \(method=fedavg\)",
        ),
        ("method.codec=sparse", "method.codec: sparse found"),
        ("method.weights=uniform", "method.weights: uniform found"),
        ("method.buffers=local", "method.buffers: local found"),
    ],
)
def test_keys_that_a_method_would_undo_are_refused(quick: Quick, change: str, message: str) -> None:
    method = methods.fedavg().plus(PCGrad(), at="server")
    with pytest.raises(RecipeError, match=message):
        quick(change, method=method)
    with pytest.raises(RecipeError, match=message):
        fedloom.plan(load_recipe(change), method)
    assert build(load_recipe("method=fedprox").holding(method=method)).method.name == method.name
