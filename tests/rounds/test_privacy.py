"""Private runs: what rounds cost, that it is on record and kept, where a run stops, and what is refused."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import fedloom
from fedloom.core.context import State
from fedloom.core.mean import Mean
from fedloom.core.stage import Chain, Identity, Stage, Traits
from fedloom.engines.api import plan
from fedloom.errors import RecipeError, StateError, UserError
from fedloom.federation.recipes.loader import load
from fedloom.federation.rounds.build import build
from fedloom.federation.rounds.built import Built
from fedloom.federation.rounds.federation import cohort
from fedloom.federation.rounds.privacy import PrivacyTerms, forecast, ratio, share_of, terms_of
from fedloom.federation.rounds.progress import Progress
from fedloom.federation.rounds.round import Round
from fedloom.federation.rounds.rounds import SPENT, Budget, initial_state, status, stopped
from fedloom.federation.rounds.seen import needed
from fedloom.federation.rounds.server import server_step
from fedloom.federation.runs.reader import Run
from fedloom.methods.method import Method
from fedloom.methods.private import PrivateClusters, PrivateMean, private
from tests_support import Quick, assert_same, load_recipe, stopped_after

GIVEN = "privacy={clip: 1, noise: 2.0, delta: 1.0e-3}"
FEDPER = "method={name: fedper, weights: uniform}"
SMALL = "model={name: small-cnn, width: 1, hidden: 2}"


def terms(**changes: object) -> PrivacyTerms:
    about = {"noise": 1.0, "delta": 1e-5, "accountant": "rdp", "trust": "central", "sampling": "poisson"}
    return PrivacyTerms(**{**about, "clients": 0, "drawn": 0.1, **changes})  # type: ignore[arg-type]


@pytest.fixture
def dp() -> object:
    return pytest.importorskip("dp_accounting", reason="needs the extra `privacy`")


def test_epsilon_is_that_of_the_library(dp: object) -> None:
    from dp_accounting import (
        GaussianDpEvent,
        NeighboringRelation,
        PoissonSampledDpEvent,
        SampledWithoutReplacementDpEvent,
    )
    from dp_accounting.pld import PLDAccountant
    from dp_accounting.rdp import RdpAccountant

    poisson = PoissonSampledDpEvent(0.1, GaussianDpEvent(1.0))
    expected = RdpAccountant().compose(poisson, 300).get_epsilon(1e-5)
    assert terms().epsilon(300) == pytest.approx(expected, abs=1e-6) == pytest.approx(13.71, abs=0.01)
    tighter = PLDAccountant().compose(poisson, 300).get_epsilon(1e-5)
    assert terms(accountant="pld").epsilon(300) == pytest.approx(tighter, abs=1e-6) == pytest.approx(12.40, abs=0.01)
    replaced = RdpAccountant(neighboring_relation=NeighboringRelation.REPLACE_ONE)
    replaced.compose(SampledWithoutReplacementDpEvent(100, 10, GaussianDpEvent(2.0)), 20)
    fixed = terms(sampling="fixed", clients=100, drawn=10, noise=4.0)
    assert fixed.epsilon(20) == pytest.approx(replaced.get_epsilon(1e-5), abs=1e-6)


def test_another_client_in_the_place_of_one_moves_a_sum_twice_as_far(dp: object) -> None:
    everyone = terms(drawn=1.0)
    assert terms(sampling="fixed", clients=10, drawn=10, noise=2.0).epsilon(3) == pytest.approx(everyone.epsilon(3))
    assert terms(trust="local", drawn=1.0, noise=2.0).epsilon(3) == pytest.approx(everyone.epsilon(3))


def test_noise_is_the_least_for_a_wanted_epsilon(dp: object) -> None:
    recipe = load_recipe("privacy={clip: 1, epsilon: 8, delta: 1.0e-5}", FEDPER, "training.rounds=100")
    found = terms_of(recipe.privacy, recipe.training, 10)
    assert found is not None
    assert found.noise == pytest.approx(6.38, abs=0.02), "100 rounds of all clients"
    assert 7.97 < found.epsilon(100) <= 8
    assert ratio(found, 14_000, 10, 1.0) == pytest.approx(75, abs=0.6)
    assert ratio(found, 600_000, 10, 1.0) == pytest.approx(494, abs=2)


@pytest.mark.parametrize(
    ("changes", "sampling", "clients", "drawn", "share"),
    [
        ((), "poisson", 0, 0.5, 0.5),
        (("privacy.sampling=fixed",), "fixed", 5, 3, 0.6),
        (("privacy.trust=local",), "poisson", 0, 1.0, 0.5),
    ],
)
def test_terms_say_how_clients_are_drawn(
    changes: tuple[str, ...], sampling: str, clients: int, drawn: float, share: float
) -> None:
    """They are in the state of a run, which cannot go on with others."""
    recipe = load_recipe(GIVEN, "training.participation=0.5", *changes)
    found = terms_of(recipe.privacy, recipe.training, 5)
    assert found is not None
    assert (found.noise, found.delta, found.accountant, found.sampling) == (2.0, 1e-3, "rdp", sampling)
    assert (found.clients, found.drawn) == (clients, drawn)
    assert share_of(recipe.training, found) == share


def test_the_noise_of_a_round_is_that_of_a_sum_or_of_a_mean_of_noisy_rows() -> None:
    assert ratio(terms(noise=3.0), 400, 50, 0.2) == pytest.approx(3 * 20 / 10)
    assert ratio(terms(noise=3.0, trust="local"), 400, 50, 0.5) == pytest.approx(3 * 20 / 5)


@pytest.mark.parametrize("epsilon", [0.5, 50.0])
def test_noise_is_the_least_to_a_thousandth_whether_little_or_much_is_needed(dp: object, epsilon: float) -> None:
    recipe = load_recipe(f"privacy={{clip: 1, epsilon: {epsilon}, delta: 1.0e-5}}", "training.rounds=20")
    found = terms_of(recipe.privacy, recipe.training, 10)
    assert found is not None
    less = replace(found, noise=found.noise * (1 - 1.1e-3))
    assert found.epsilon(20) <= epsilon < less.epsilon(20)


def test_the_last_round_that_a_bound_pays(dp: object) -> None:
    costs = [terms().epsilon(rounds) for rounds in range(6)]
    assert costs[0] == 0
    for rounds, cost in enumerate(costs[1:5], 1):
        assert [terms().last(bound, 5) for bound in (cost - 1e-9, cost)] == [rounds - 1, rounds]
    assert terms().last(costs[5], 5) == terms().last(None, 5) == 5


def test_it_can_learn_up_to_noise_of_two_clipped_updates(dp: object) -> None:
    section = load_recipe(GIVEN).privacy
    assert section is not None
    whole = terms(noise=1.0, drawn=1.0)
    for d, least, ends in ((400, 0, "can learn"), (401, 0, "will not"), (400, 10, "can learn"), (400, 5, "will not")):
        *_, note = forecast(section, whole, d, 10, 1.0, 1, least)
        assert ends in note, (d, least)
    assert "is 2 times as long as a clipped update (10 clients expected" in forecast(section, whole, 400, 10, 1.0, 1)[1]
    assert "in a cluster of 5 clients 2 times more" in forecast(section, whole, 400, 10, 1.0, 1, 5)[2]
    assert "; the budget" not in forecast(section, whole, 400, 10, 1.0, 1)[0]


def test_each_round_is_on_record_and_a_resumed_run_is_the_same(quick: Quick, tmp_path: Path, dp: object) -> None:
    changes = (FEDPER, SMALL, GIVEN, "training.participation=0.5", "training.rounds=3")
    whole = quick(*changes)
    spent = [record["epsilon"] for _, record in Run.read(whole.folder).records("privacy")]
    assert len(spent) == 3
    assert spent == sorted(set(spent))
    assert spent[-1] == pytest.approx(terms(noise=2.0, delta=1e-3, drawn=0.5).epsilon(3))
    part = stopped_after(2, tmp_path / "part", load_recipe(*changes))
    assert_same(fedloom.resume(part), whole)


def test_a_run_stops_before_its_budget_is_overdrawn(quick: Quick, dp: object) -> None:
    one, two = (terms(noise=2.0, delta=1e-3, drawn=1.0).epsilon(rounds) for rounds in (1, 2))
    budget = (one + two) / 2
    found = quick(
        FEDPER, SMALL, f"privacy={{clip: 1, noise: 2.0, delta: 1.0e-3, budget: {budget}}}", "training.rounds=3"
    )
    assert found.status == SPENT
    assert Run.read(found.folder).last_round == 1
    assert found.final().values, "the last round is measured"
    with pytest.raises(RecipeError, match=r"privacy.budget: 0.01 found, but one round alone costs"):
        build(load_recipe(FEDPER, "privacy={clip: 1, noise: 2.0, delta: 1.0e-3, budget: 0.01}"))


def test_what_rounds_cost_cannot_change_behind_their_back() -> None:
    with pytest.raises(StateError, match="the 2 finished rounds had no privacy"):
        terms().agree({"round": 2})
    with pytest.raises(StateError, match=r"had \{'noise': 2.0\}"):
        terms().agree({"round": 2, "privacy": {**vars(terms()), "noise": 2.0}})
    terms().agree({"round": 0})
    terms().agree({"round": 2, "privacy": dict(vars(terms()))})


def paid(built: Built, state: State) -> tuple[float, State]:
    """The last round that the budget allows, and the state with which it begins."""
    budget = Budget(built, SimpleNamespace(save=lambda state: None))  # type: ignore[arg-type]
    state = budget.begin(state)
    return budget.last, state


def test_a_missing_accountant_is_said_before_the_first_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    built = build(load_recipe(FEDPER, "privacy={clip: 1, noise: 2.71, delta: 1.0e-3}"))
    with pytest.raises(UserError, match=r"pip install 'fedloom\[privacy\]'"):
        paid(built, {"round": 0})


@pytest.mark.parametrize("key", [0, bytes(32)], ids=["seed", "secret"])
def test_poisson_draws_each_client_by_itself(key: int | bytes) -> None:
    pytest.importorskip("cryptography", reason="needs the extra `privacy`")
    names = [f"c{i:03}" for i in range(200)]
    sizes = [len(cohort(names, 0.1, key, round, poisson=True)) for round in range(200)]
    assert len(set(sizes)) > 5
    assert sum(sizes) / 200 == pytest.approx(20, abs=1)
    fixed = [cohort(names, 0.1, key, round) for round in range(5)]
    assert {len(set(each)) for each in fixed} == {20}
    assert len(set(fixed)) == 5
    assert fixed[1] == cohort(names, 0.1, key, 1)
    assert cohort(["a"], 0.01, key, 1, poisson=True) == ()


def test_rounds_without_anyone_release_noise(dp: object) -> None:
    private = "privacy={clip: 2, noise: 0.25, delta: 1.0e-3}"
    built = build(load_recipe(FEDPER, private, "training.participation=0.5"))
    before = initial_state(built)["server"]
    now = Round(built, 1, Progress())
    after = server_step(built, [], before, now.ctx(()))
    added = after["model"] - before["model"]
    assert float(added.std()) == pytest.approx(2 * 0.25 / (0.5 * 5), rel=0.05), "noise x clip over the expected clients"


def test_a_deployment_draws_noise_and_cohorts_from_what_nobody_knows() -> None:
    pytest.importorskip("cryptography", reason="needs the extra `privacy`")
    here, nodes = (build(load_recipe(FEDPER, GIVEN, *more)).setup for more in ((), ("runtime.engine=flower",)))
    assert here.ctx(1).secret is None
    assert nodes.ctx(1).secret != nodes.ctx(1).secret, "also where the server asks for a round again"
    built = build(load_recipe(FEDPER, GIVEN, "training.participation=0.5"))
    assert len({Round(built, 1, Progress(), secret=bytes([i] * 32)).cohort() for i in range(8)}) > 1


def test_each_start_of_a_deployment_costs_two_rounds_more(dp: object) -> None:
    nodes, here = (build(load_recipe(FEDPER, GIVEN, *more)) for more in (("runtime.engine=flower",), ()))
    done = {"round": 1, "privacy": vars(here.terms)}
    assert "again" not in paid(here, done)[1]
    assert paid(nodes, paid(nodes, done)[1])[1]["again"] == 4
    first = paid(nodes, {"round": 0})[1]
    assert "again" not in first
    assert paid(nodes, first)[1]["again"] == 2, "its first round may have been released, too"


def test_starts_alone_may_spend_a_budget(dp: object) -> None:
    budget = terms(noise=2.0, delta=1e-3, drawn=1.0).epsilon(5)
    private = f"privacy={{clip: 1, noise: 2.0, delta: 1.0e-3, budget: {budget}}}"
    built = build(load_recipe(FEDPER, private, "runtime.engine=flower", "training.rounds=4"))
    rounds, state = paid(built, {"round": 1, "privacy": vars(built.terms)})
    assert (rounds, "spent" in state) == (3, False)
    rounds, state = paid(built, state)
    assert (rounds, status({**state, "server": {}, "stopped": False})) == (1, SPENT)


def test_a_round_is_charged_with_all_that_were_begun_again(dp: object) -> None:
    whole = terms(noise=2.0, delta=1e-3, drawn=1.0)
    private = f"privacy={{clip: 1, noise: 2.0, delta: 1.0e-3, budget: {whole.epsilon(5)}}}"
    built = build(load_recipe(FEDPER, private, "training.rounds=9"))
    budget = Budget(built, SimpleNamespace(save=lambda state: None))  # type: ignore[arg-type]
    state, told = budget.begin({"round": 0, "again": 2}), []
    assert budget.last == 3, "the budget is that of five rounds, and no less"
    assert whole.last(whole.epsilon(5), 5) == 5
    for number in (2, 3):
        now = SimpleNamespace(
            number=number, record=lambda *what: told.append(what), log=lambda *what: told.append(what)
        )
        state = budget.after(state, now)  # type: ignore[arg-type]
    paid_ = [("privacy", {"epsilon": whole.epsilon(n), "delta": 1e-3}) for n in (4, 5)]
    assert told == [*paid_, (SPENT, {"epsilon": whole.epsilon(5), "next": whole.epsilon(6)})]
    assert stopped(state) == SPENT


def test_a_round_that_was_begun_under_other_terms_is_not_forgotten() -> None:
    with pytest.raises(StateError, match=r"the 0 finished rounds had \{'noise': 2.0\}"):
        terms().agree({"round": 0, "privacy": {**vars(terms()), "noise": 2.0}})
    with pytest.raises(RecipeError, match=r"runtime.checkpoint_every: 2 found, .* expected 1"):
        build(load_recipe(FEDPER, GIVEN, "runtime.engine=flower", "runtime.checkpoint_every=2"))


CENTRAL = {
    "method=fedavg": "set method.weights: uniform",
    "method=local": "so there is nothing to protect",
    "method=sheaf-fmtl": "sends edges, projections beside the update, without noise",
    "method={name: matu, weights: uniform}": "sends one row per task",
    "method={name: scaffold, weights: uniform}": "sends control beside the update, without noise",
    "method={name: fedavg, weights: uniform, add: {feddea: {at: server}}}": "changes rows after the clip",
    "method={name: fedavg, weights: uniform, add: {pcgrad: }}": "weights or mixes rows by their values",
    "method={name: fedhca2, weights: uniform}": "sends support beside the update",
    "method={name: fedamp, weights: uniform, share: encoder}": "expected a server that takes a mean of rows",
    "method={name: rr-cluster, weights: uniform}": "starts with groups that it computes from the rows",
    "method={name: fedspd}": "sends share0, share1 beside the update",
    "method={name: ifca, weights: uniform, first: noise, add: {pcgrad: }}": "reads the columns of all rows",
    "early_stopping={patience: 1}": "it reads clients' validation data",
    "peers={graph: full}": "set trust: local",
    "model=resnet10": "running statistics",
    "runtime={engine: flower, flower: {enough: 2}}": "one more client displaces another",
    "privacy.delta=0.2": "privacy.delta: 0.2 found, expected less than one over the number of clients (5)",
}


@pytest.mark.parametrize("change", CENTRAL)
def test_what_nobody_can_account_for_is_refused(change: str) -> None:
    with pytest.raises(RecipeError, match="privacy|early_stopping|buffers|enough") as refused:
        build(load_recipe("method={name: fedavg, weights: uniform}", GIVEN, change))
    assert CENTRAL[change] in str(refused.value)


def test_a_vocabulary_that_is_counted_over_private_texts_is_refused(tmp_path: Path) -> None:
    lines = [f"{'sun' if i % 2 else 'rain'} today,{'ab'[i % 2]}" for i in range(40)]
    (tmp_path / "t.csv").write_text("\n".join(["text,topic", *lines]))
    (tmp_path / "words.txt").write_text("rain\nsun\n")
    about: dict[str, Any] = {
        "name": "t",
        "data": {"name": "texts", "path": str(tmp_path / "t.csv")},
        "partition": {"name": "iid", "clients": 2},
    }
    about |= {"model": {"name": "transformer", "width": 8, "depth": 1, "num_heads": 1}}
    about |= {"method": {"name": "fedavg", "weights": "uniform"}, "privacy": {"clip": 1, "noise": 1, "delta": 0.01}}
    with pytest.raises(RecipeError, match="data.words: null found, but then the vocabulary is counted"):
        build(load(about))
    about["data"]["words"] = str(tmp_path / "words.txt")
    assert build(load(about)).dataset.signal.vocabulary == 4


def test_a_rule_that_is_no_mean_is_not_replaced_by_one() -> None:
    """Of one's own too, which says that other rules may take its place."""

    @dataclass(frozen=True)
    class Middle(Stage):
        traits = Traits("matrix", reads={"X"}, reduces=True)
        replaceable = True

    method = Method(name="own", stage=Middle(), weights="uniform")
    with pytest.raises(RecipeError, match=r"own: .*Middle\(\) reads the columns of all rows"):
        private(method, clip=1.0, noise=1.0, share=1.0, local=False)
    assert needed(Middle()) == "each of them"


def test_feddea_before_the_clip_and_local_noise_before_any_mix_are_accepted() -> None:
    method = build(load_recipe("method={name: fedavg, weights: uniform, add: {feddea: }}", GIVEN)).method
    assert [type(stage).__name__ for stage in method.edge.stages] == ["TopMagnitude", "Bounded"]
    capped = build(load_recipe("method={name: fedavg, max_examples: 50}", GIVEN)).method.stage
    assert capped == PrivateMean(1.0, 2.0, 1.0, 50.0)
    local = build(load_recipe("method={name: fedavg, add: {pcgrad: }}", GIVEN, "privacy.trust=local")).method
    assert [type(stage).__name__ for stage in local.edge.stages] == ["Bounded", "RowNoise"]


def test_a_fixed_number_of_clients_is_what_a_sum_is_divided_by(dp: object) -> None:
    """0.5 of 5 clients are 3 of 5."""
    private = (FEDPER, GIVEN, "privacy.sampling=fixed", "training.participation=0.5")
    assert build(load_recipe(*private)).method.stage == PrivateMean(1.0, 2.0, share=0.6)
    assert any("(3 clients expected in a round" in note for note in plan(load_recipe(*private)).notes)


CLUSTERS = "method={name: rr-cluster, first: noise, weights: uniform}"


def test_clusters_have_private_means_where_all_clients_come_or_as_many(dp: object) -> None:
    made = build(load_recipe(CLUSTERS, GIVEN)).method
    assert made.stage == PrivateClusters(2, "noise", 1.0, PrivateMean(1.0, 2.0), least=2)
    assert made.edge == Identity(), "rows are clipped where the models of the clusters are known"
    build(load_recipe(CLUSTERS, GIVEN, "training.participation=0.8", "privacy.sampling=fixed"))
    with pytest.raises(RecipeError, match=r"privacy.sampling: poisson found, with training.participation 0.8, but"):
        build(load_recipe(CLUSTERS, GIVEN, "training.participation=0.8"))
    with pytest.raises(RecipeError, match="sends cluster beside the update, without noise"):
        build(load_recipe(CLUSTERS, GIVEN, "privacy.trust=local"))
    notes = [note for note in plan(load_recipe(CLUSTERS, GIVEN)).notes if note.startswith("privacy")]
    assert notes[2] == "privacy: in a cluster of 2 clients 2.5 times more than that: this will not learn"


@pytest.mark.slow
def test_private_clusters_run_and_resume(quick: Quick, tmp_path: Path, dp: object) -> None:
    changes = (CLUSTERS, SMALL, GIVEN, "training.rounds=3")
    whole = quick(*changes)
    assert [record["epsilon"] > 0 for _, record in Run.read(whole.folder).records("privacy")] == [True] * 3
    part = stopped_after(2, tmp_path / "part", load_recipe(*changes))
    assert_same(fedloom.resume(part), whole)


@pytest.mark.parametrize("rule", ["multi-krum", "median"])
def test_robust_rules_see_protected_rows_and_the_tasks_that_the_server_knows(rule: str) -> None:
    add = f"method={{name: fedavg, weights: uniform, add: {{{rule}: {{f: 0}}}}}}"
    local = build(load_recipe(add, GIVEN, "privacy.trust=local")).method
    assert [type(stage).__name__ for stage in local.edge.stages] == ["Bounded", "RowNoise"]
    with pytest.raises(RecipeError, match="expected a server that takes a mean of rows"):
        build(load_recipe(add, GIVEN))


@pytest.mark.parametrize(
    ("peers", "why"),
    [
        (
            "{similarity: {signals: {features: 1}}}",
            "privacy: similarity features shows other peers values from a peer's own data",
        ),
        (
            "{similarity: {signals: {cross-loss: 1}}}",
            "privacy: similarity cross-loss shows other peers values from a peer's own",
        ),
        ("{choose: {groups: {}}}", "privacy: choose.groups.fine shows other peers"),
        (
            "{mode: asynchronous, scenario: {speed: 1}}",
            "privacy: the budget counts rounds, but asynchronous peers train",
        ),
        ("{choose: {groups: {fine: null}}}", None),
    ],
)
def test_peers_tell_each_other_nothing_but_protected_rows(peers: str, why: str | None) -> None:
    changes = (GIVEN, "privacy.trust=local", f"peers={peers}")
    if why is None:
        build(load_recipe(*changes))
        return
    with pytest.raises(RecipeError) as refused:
        build(load_recipe(*changes))
    assert why in str(refused.value)


@dataclass(frozen=True)
class Halved(Stage):
    looks_at: frozenset[str] = frozenset({"X"})

    @property
    def traits(self) -> Traits:
        return Traits(reads=self.looks_at)


def test_what_stands_behind_the_noise_sees_nothing_else() -> None:
    method = Method(stage=Mean() >> Halved(), weights="uniform")
    made = private(method, clip=1.0, noise=2.0, share=1.0, local=False).stage
    assert made == Chain((PrivateMean(1.0, 2.0), Halved()))
    curious = replace(method, stage=Mean() >> Halved(frozenset({"X", "n"})))
    with pytest.raises(RecipeError, match="reads n of the rows"):
        private(curious, clip=1.0, noise=2.0, share=1.0, local=False)


@pytest.mark.parametrize(
    ("privacy", "why"),
    [
        ("{clip: 1, noise: 1}", "privacy.delta: missing"),
        ("secure-aggregation", "privacy: secure-aggregation found, which is not offered"),
    ],
)
def test_a_section_that_says_too_little_or_too_much(privacy: str, why: str) -> None:
    with pytest.raises(RecipeError) as refused:
        load_recipe(f"privacy={privacy}")
    assert why in str(refused.value)


def test_the_dry_run_says_whether_it_can_learn(dp: object) -> None:
    notes = [note for note in plan(load_recipe(FEDPER, GIVEN)).notes if note.startswith("privacy")]
    assert "after 2 rounds (rdp)" in notes[0]
    assert "45.7 times as long" in notes[1]
    assert notes[1].endswith("this will not learn")
