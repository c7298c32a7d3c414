"""Settings that must fit each other within a section of a recipe: which pairs are accepted, and which are refused."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel

from fedloom.errors import RecipeError
from fedloom.federation.recipes.loader import load
from fedloom.federation.recipes.runtime import EarlyStopping, Evaluation, FlowerSettings, Privacy, Runtime
from fedloom.federation.recipes.schema import MethodSection
from fedloom.federation.rounds.privacy import terms_of
from fedloom.methods.peers.config import AdaptiveScope, Choose, GroupsSection, PeersBase, Warmup, Weights
from fedloom.models.signal import Signal
from fedloom.training import Optimizer, Schedule, Training

GROUPS: dict[str, Any] = {"groups": {"fine": None}}
FREE: dict[str, Any] = {"mode": "asynchronous", "scenario": {"speed": 1.0}}
BUDGET: dict[str, Any] = {"clip": 1.0, "delta": 0.1, "noise": 1.0}

ACCEPTED: list[tuple[type[BaseModel], dict[str, Any]]] = [
    (Optimizer, {"momentum": 0.5}),
    (Optimizer, {"momentum": 0.5, "nesterov": True}),
    (Optimizer, {"name": "adam"}),
    (Schedule, {"warmup": 1}),
    (Schedule, {"warmup_share": 0.5}),
    (Schedule, {"warmup_share": 0.0, "warmup_start": 0.0, "floor": 0.0, "gamma": 1.0, "step_every": 1}),
    (Schedule, {"warmup_start": 1.0, "floor": 1.0}),
    (Training, {"epochs": 1}),
    (Training, {"steps": 1}),
    (Training, {"participation": 1.0, "rounds": 1, "batch_size": 1}),
    (FlowerSettings, {"enough": 2, "min_clients": 2}),
    (FlowerSettings, {"min_clients": 2}),
    (FlowerSettings, {"retries": 0}),
    (FlowerSettings, {"retries": 100}),
    (Runtime, {"workers": 1024, "threads": 1024}),
    (Runtime, {"workers": "auto", "device": ("cpu",)}),
    (Evaluation, {"every": 2, "costly_every": 4}),
    (Evaluation, {"every": 2}),
    (Evaluation, {"splits": ["test"], "models": ["personal"]}),
    (EarlyStopping, {"patience": 1, "min_delta": 0}),
    (Privacy, {**BUDGET, "sampling": "fixed"}),
    (Privacy, {**BUDGET, "accountant": "pld"}),
    (Privacy, {"clip": 1.0, "delta": 0.1, "epsilon": 1.0}),
    (GroupsSection, {"low": 2, "high": 2, "fine": 1.0}),
    (GroupsSection, {"fine": 0.0}),
    (Choose, {"recency": 1, "top": 1}),
    (Choose, {"recency": 1, "threshold": 0.5}),
    (Choose, {"top": 0}),
    (Weights, {"step": 0.5}),
    (Weights, {"kind": "size"}),
    (Weights, {"kind": "metropolis"}),
    (Weights, {"kind": "uniform", "include_self": False}),
    (AdaptiveScope, {"enter": 0.5, "leave": 0.5}),
    (AdaptiveScope, {"enter": 1, "leave": -1}),
    (Warmup, {"until": 2, "alone": 2}),
    (PeersBase, {"scope": "adaptive"}),
    (PeersBase, {"similarity": {"signals": {"overlap": 1}}}),
    (PeersBase, {"choose": GROUPS, "scope": "encoder"}),
    (PeersBase, {"choose": {"groups": {}}}),
    (PeersBase, {"choose": {"recency": 1, "top": 1}, "similarity": {"normalise": "min-max"}}),
    (PeersBase, {"similarity": {"normalise": "z-score"}}),
    (PeersBase, FREE),
    (Signal, {"kind": "tokens", "vocabulary": 3, "padding": 2}),
    (Signal, {"kind": "tokens", "vocabulary": 3}),
    (Signal, {"kind": "tokens", "vocabulary": 3, "padding": 0}),
]
REFUSED: list[tuple[type[BaseModel], dict[str, Any], str]] = [
    (Optimizer, {"name": "adam", "momentum": 0.5}, "momentum and nesterov are only for sgd, found adam"),
    (Optimizer, {"name": "adamw", "nesterov": True}, "momentum and nesterov are only for sgd, found adamw"),
    (Optimizer, {"nesterov": True}, "nesterov needs momentum > 0"),
    (Schedule, {"warmup": 1, "warmup_share": 0.5}, "expected warmup"),
    (Training, {"epochs": 1, "steps": 1}, "expected epochs or steps, found both"),
    (FlowerSettings, {"enough": 1, "min_clients": 2}, "expected at least min_clients"),
    (FlowerSettings, {"retries": 101}, "retries"),
    (FlowerSettings, {"retries": -1}, "retries"),
    (Runtime, {"workers": 1025}, "workers"),
    (Runtime, {"workers": 0}, "workers"),
    (Runtime, {"threads": 1025}, "threads"),
    (Runtime, {"threads": 0}, "threads"),
    (Runtime, {"device": ()}, "no device found"),
    (Evaluation, {"every": 2, "costly_every": 3}, "expected a multiple of every"),
    (Evaluation, {"splits": []}, "splits"),
    (Evaluation, {"models": []}, "models"),
    (Privacy, {**BUDGET, "sampling": "fixed", "accountant": "pld"}, "pld found"),
    (Privacy, {**BUDGET, "epsilon": 1.0}, "both found, expected either noise or epsilon"),
    (Privacy, {"clip": 1.0, "delta": 0.1}, "neither found, expected either noise or epsilon"),
    (Privacy, {**BUDGET, "delta": 0.0}, "delta"),
    (Privacy, {**BUDGET, "delta": 1.0}, "delta"),
    (GroupsSection, {"low": 3, "high": 2}, "low must not exceed high"),
    (GroupsSection, {"low": 1}, "low"),
    (GroupsSection, {"fine": 1.1}, "fine"),
    (GroupsSection, {"fine": -0.1}, "fine"),
    (Choose, {"recency": 1}, "set one of them"),
    (Choose, {"recency": 1, "groups": {}}, "set one of them"),
    (Choose, {"top": -1}, "top"),
    (Weights, {"kind": "size", "step": 0.5}, "step is only for soft weights, found kind size"),
    (Weights, {"kind": "metropolis", "include_self": False}, "metropolis weights always include the peer itself"),
    (AdaptiveScope, {"enter": 0.4, "leave": 0.5}, "leave must not exceed enter"),
    (Warmup, {"until": 2, "alone": 3}, "alone must not exceed until"),
    (PeersBase, {"scope": "adaptive", "similarity": {"signals": {"overlap": 1}}}, "add 'gradient'"),
    (
        PeersBase,
        {"choose": GROUPS, "similarity": {"signals": {"disparity": 1}}},
        "disparity compares only with the peer itself",
    ),
    (PeersBase, {"choose": GROUPS, "similarity": {"normalise": "z-score"}}, "choose.groups needs similarities of at"),
    (PeersBase, {"choose": {"groups": {}}, "scope": "encoder"}, "choose.groups.fine applies to"),
    (PeersBase, {"choose": GROUPS, **FREE}, "choose.groups compares all candidates at once"),
    (
        PeersBase,
        {"choose": {"recency": 1, "top": 1}, "similarity": {"normalise": "z-score"}},
        "choose.recency needs similarities of at least 0",
    ),
    (PeersBase, {"mode": "asynchronous"}, "needs scenario.speed"),
    (PeersBase, {"mode": "asynchronous", "scenario": {}}, "needs scenario.speed"),
    (PeersBase, {**FREE, "similarity": {"normalise": "min-max"}}, "compares all candidates"),
    (Signal, {"kind": "tokens", "vocabulary": 3, "padding": 3}, "padding"),
    (Signal, {"kind": "tokens", "vocabulary": 3, "padding": -1}, "padding"),
]


@pytest.mark.parametrize(("section", "given"), ACCEPTED, ids=lambda x: x.__name__ if isinstance(x, type) else str(x))
def test_settings_that_fit_are_accepted(section: type[BaseModel], given: dict[str, Any]) -> None:
    section(**given)


@pytest.mark.parametrize(("section", "given", "message"), REFUSED, ids=lambda x: getattr(x, "__name__", None))
def test_settings_that_do_not_fit_are_refused(section: type[BaseModel], given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        section(**given)


@pytest.mark.parametrize(
    ("section", "judges", "parts", "measured"),
    [
        ({}, True, False, []),
        ({"weights": {"kind": "size"}}, False, False, []),
        ({"weights": {"kind": "size"}, "choose": {"top": 0}}, True, False, []),
        ({"weights": {"kind": "size"}, "choose": {"threshold": 0.0}}, True, False, []),
        ({"weights": {"kind": "size"}, "choose": GROUPS}, True, False, []),
        ({"weights": {"kind": "size"}, "choose": {"groups": {"fine": 0.0}}}, True, True, []),
        ({"weights": {"kind": "size"}, "scope": "adaptive"}, True, True, []),
        ({"weights": {"kind": "size"}, "scope": "encoder"}, False, True, []),
        ({"weights": {"kind": "size"}, "warmup": {"until": 1}}, False, True, []),
        ({"weights": {"kind": "size"}, "warmup": {"until": 1, "scope": "full"}}, False, False, []),
        ({"similarity": {"signals": {"overlap": 1, "disparity": 2}}}, True, False, ["disparity"]),
    ],
)
def test_whether_peers_judge_each_other_and_send_parts_of_models(
    section: dict[str, Any], judges: bool, parts: bool, measured: list[str]
) -> None:
    peers = PeersBase(**section)
    assert (peers.judges, peers.sends_parts, peers.similarity.measured) == (judges, parts, measured)


def test_which_rounds_are_measured_in_full_and_kept_as_pictures() -> None:
    evaluation = Evaluation(every=2, costly_every=4)
    assert [round for round in range(11) if evaluation.in_full(round, 10)] == [4, 8, 10]
    assert [round for round in range(11) if Evaluation().in_full(round, 10)] == [10]
    assert [round for round in range(21) if evaluation.pictured(round)] == [2, 4, 8, 16]
    assert not Evaluation(predictions=False).pictured(1)


def test_a_run_has_as_many_processes_as_workers_or_else_as_its_cores_and_devices_allow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fedloom.federation.recipes.runtime.cores", lambda: 7)
    assert [Runtime(workers="auto", threads=threads).processes for threads in (1, 2, 7, 8)] == [7, 3, 1, 1]
    assert Runtime(workers=3).processes == 3
    assert Runtime(workers="auto", device=("cuda:0", "cuda:1")).processes == 6
    assert Runtime(workers="auto", device=("cuda:0",) * 9).processes == 9
    assert Runtime(workers="auto", device="cuda").processes == 4
    assert [Runtime(workers=workers).loaders for workers in (1, 2, 7, 9)] == [6, 2, 1, 1]


def test_the_epochs_of_a_domain_and_of_a_client_with_all_examples() -> None:
    training = Training(epochs={"a": 1, "b": 3})
    assert [training.of(domain).epochs for domain in ("a", "b", None)] == [1, 3, 3]
    assert Training(epochs=2).of("a") == Training(epochs=2)


@pytest.mark.parametrize(
    ("epsilon", "budget", "bound"), [(None, None, None), (None, 2.0, 2.0), (1.0, None, 1.0), (1.0, 2.0, 2.0)]
)
def test_a_private_run_stops_at_its_budget_or_else_at_its_epsilon(
    epsilon: float | None, budget: float | None, bound: float | None
) -> None:
    noise = None if epsilon else 1.0
    assert Privacy(clip=1.0, delta=0.1, noise=noise, epsilon=epsilon, budget=budget).bound == bound


@pytest.mark.parametrize(
    ("clients", "delta", "fits"), [(1, 0.9, True), (2, 0.5, False), (2, 0.49, True), (4, 0.25, False)]
)
def test_delta_is_less_than_one_over_the_number_of_clients(clients: int, delta: float, fits: bool) -> None:
    section, training = Privacy(clip=1.0, noise=1.0, delta=delta), Training(rounds=1)
    if fits:
        assert terms_of(section, training, clients).noise == 1.0
    else:
        with pytest.raises(RecipeError, match="expected less than one over the number of clients"):
            terms_of(section, training, clients)


def test_an_addons_name_is_short_for_fedavg_with_it() -> None:
    whole = MethodSection.model_validate({"name": "fedavg", "weights": "uniform", "add": {"feddea": {"rho": 0.3}}})
    assert MethodSection.model_validate({"name": "feddea", "rho": 0.3, "weights": "uniform"}) == whole
    assert MethodSection.model_validate("feddea").name == "fedavg"
    assert [*MethodSection.model_validate({"name": "feddea", "add": {"pcgrad": None}}).add] == ["feddea", "pcgrad"]


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"name": "feddea", "rho": 2}, r"add.feddea.rho: 2 found, expected a number greater than 0"),
        ({"name": "feddea", "add": 3}, "3 found, expected other add-ons than feddea, which is the name"),
        ({"name": "feddea", "add": {"feddea": {}}}, "expected other add-ons than feddea, which is the name"),
        ({"name": ["feddea"]}, "expected a text"),
    ],
)
def test_an_addons_name_with_what_does_not_fit_is_refused(section: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        load({"like": "digits-tasks", "method": section})
