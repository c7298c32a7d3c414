"""A site's own terms: its node refuses by itself, and the server learns why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from fedloom.errors import UserError
from fedloom.federation.recipes.loader import load
from fedloom.federation.recipes.schema import recipe_hash
from fedloom.federation.runs.recorded import sum_of
from fedloom.federation.runs.track import Audit, verified
from sites_support import RECIPE, Demand, Go, events, recipe, trained

pytest.importorskip("flwr")

from fedloom.engines.flower.engine import OverGrid
from fedloom.engines.flower.nodes import NodeConfig
from fedloom.engines.flower.terms import Offer, SitePolicy
from fedloom.engines.flower.wire import RefusedError
from fedloom.federation.rounds.build import build


def test_a_node_whose_terms_are_not_met_does_not_join_and_says_why(go: Go, demand: Demand) -> None:
    home = demand(methods=["fedper"], rounds=10)
    with pytest.raises(UserError, match="2 of 3 nodes reported"):
        go("runtime.flower.min_clients=3")
    last = verified(home / "audit.jsonl")[-2:]
    assert [line["what"] for line in last] == ["policy", "refuse"]
    assert last[1]["why"] == "this site's terms: methods: fedavg found, expected only fedper"


def test_what_only_the_built_run_shows_is_refused_when_it_is_asked_for(go: Go, demand: Demand) -> None:
    demand(leaves=["encoder.*"])
    result = go("training.rounds=1")
    assert trained(result.folder) == [["lab", "office"]]
    why = [event["why"] for event in events(result.folder) if event["event"] == "answer dropped"]
    assert all("this site's terms: leaves: heads." in text for text in why), why
    told = verified(result.folder / "audit.jsonl")
    assert {line["client"] for line in told if line["what"] == "join"} == {"clinic", "lab", "office"}
    assert any(line["what"] == "answer dropped" and "leaves" in line["why"] for line in told)
    assert {line["what"] for line in told} >= {"checkpoint", "export"}
    saved = [line["digest"] for line in told if line["what"] == "checkpoint"]
    assert saved[-1] == sum_of(result.folder / "state.json")[1], "it has the checksum of the tensors, too"
    assert told[0]["what"] == "policy"
    assert (told[0]["recipe"], told[0]["privacy"], told[0]["keys"]) == (
        recipe_hash(recipe("training.rounds=1")),
        None,
        {},
    )


def test_a_node_whose_terms_are_met_takes_part_and_writes_it_down(go: Go, demand: Demand) -> None:
    home = demand(methods=["fedper"], leaves=["encoder.*"], rounds=2, clients=3)
    result = go("method=fedper", "training.rounds=2")
    assert trained(result.folder) == [["clinic", "lab", "office"]] * 2
    mine = [line["what"] for line in verified(home / "audit.jsonl")]
    assert mine[-10:] == [
        *("policy", "join", "evaluate"),
        *("train", "checkpoint", "evaluate", "train", "checkpoint", "evaluate", "export"),
    ]


def of(*changes: str) -> Any:
    return build(load({**RECIPE, "data": "digits", "partition": "one-task", "runtime": {}}, changes))


PRIVATE = "privacy={clip: 1, noise: 2.0, delta: 1.0e-3, budget: 50}"
TERMS: list[tuple[dict[str, Any], tuple[str, ...], str]] = [
    ({"methods": ["fedavg"]}, ("method={name: fedavg, add: {pcgrad: }}",), "methods: pcgrad found"),
    ({"robust": ["krum", "median"]}, (), "robust: no add-on found, expected one of krum, median"),
    ({"robust": ["median"]}, ("method={name: fedavg, add: {median: {f: 0}}}",), "robust: no add-on found"),
    ({"robust": ["median"]}, ("method={name: fedavg, add: {median: {f: 1}}}", "partition.clients_per_task=3"), ""),
    ({"rounds": 2}, (), "rounds: 3 found, expected at most 2"),
    ({"privacy": {"epsilon": 8, "delta": 1e-3}}, (), "privacy: none found"),
    ({"privacy": {"epsilon": 8, "delta": 1e-5}}, ("method.weights=uniform", PRIVATE), "privacy.delta: 0.001 found"),
    ({"privacy": {"epsilon": 8, "delta": 1e-3}}, ("method.weights=uniform", PRIVATE), "privacy.epsilon: 50 found"),
    (
        {"privacy": {"epsilon": 50, "delta": 1e-3, "trust": "local"}},
        ("method.weights=uniform", PRIVATE),
        "privacy.trust: central found, expected local",
    ),
    ({"leaves": ["*"]}, ("method=scaffold", "training.rounds=1"), ""),
    ({"leaves": ["encoder.*", "heads.*"]}, ("method=scaffold",), "leaves: beside:control would leave"),
    (
        {"leaves": ["*.weight", "*.bias", "*.running_*"]},
        ("model={name: resnet10, width: 4}",),
        "leaves: encoder.norm.num_batches_tracked would leave",
    ),
    (
        {"leaves": ["encoder.*", "heads.*"]},
        ("peers={similarity: {signals: {features: 1.0}}}",),
        "leaves: beside:features would leave",
    ),
    ({"leaves": ["encoder.*", "heads.*"]}, ("peers={similarity: {signals: {gradient: 1.0}}}",), ""),
    ({"clients": 5}, (), "clients: 4 expected in a round, expected at least 5"),
]


@pytest.mark.parametrize(("terms", "changes", "why"), TERMS)
def test_each_term(terms: dict[str, Any], changes: tuple[str, ...], why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if PRIVATE in changes:
        pytest.importorskip("dp_accounting", reason="needs the extra `privacy`")
    built = of(*changes)
    site = SitePolicy.model_validate(terms)
    if not why:
        site.agree_to(built, 4)
        return
    with pytest.raises(RefusedError) as refused:
        site.agree_to(built, 4)
    assert f"this site's terms: {why}" in str(refused.value)


def test_trainings_are_counted_and_an_unknown_number_of_clients_is_refused() -> None:
    built = of("training.rounds=2")
    with pytest.raises(RefusedError, match="2 trainings are done, expected at most 2"):
        SitePolicy(rounds=2).agree_to(built, 4, answered=2)
    with pytest.raises(RefusedError, match="clients: None found, expected at least 2"):
        SitePolicy(clients=2).agree_to(built, None)


def test_what_a_node_answers_costs_it_epsilon_whoever_asks() -> None:
    pytest.importorskip("dp_accounting", reason="needs the extra `privacy`")
    built = of("method.weights=uniform", PRIVATE, "privacy.trust=local")
    assert built.terms is not None
    site = SitePolicy.model_validate({"privacy": {"epsilon": 50, "delta": 1e-3, "trust": "local"}})
    many = next(n for n in range(1, 1000) if built.terms.epsilon(n) > 50)
    site.agree_to(built, 4, answered=many - 2)
    with pytest.raises(RefusedError, match=f"privacy.epsilon: .* after {many} trainings found, expected at most 50"):
        site.agree_to(built, 4, answered=many - 1)


@pytest.mark.parametrize("changes", ["", "runtime.engine=process"])
def test_nodes_are_a_deployment_whatever_engine_the_recipe_names(changes: str) -> None:
    """Else who starts a run could have noise drawn from the seed, which all know."""
    one = load(
        {**RECIPE, "data": "digits", "partition": "one-task", "runtime": {}}, ["method.weights=uniform", PRIVATE]
    )
    assert one.runtime.engine == "process"
    assert Offer.of(one, changes).resolved().runtime.engine == "flower"
    assert OverGrid(None, Path()).build(one).deployed


@pytest.mark.parametrize(
    "terms",
    [
        *({key: value} for key in ("methods", "robust", "leaves") for value in ([], "fedavg", {"fedavg": 1}, [1])),
        *({key: value} for key in ("rounds", "clients") for value in (0, -1, 1.5, "ten", [3])),
        *({"privacy": value} for value in (8, {}, {"epsilon": 8}, {"epsilon": 0, "delta": 1e-3})),
        {"privacy": {"epsilon": 8, "delta": 1e-3, "trust": "nobody"}},
        *({"code": value} for value in ("all", ["mine"], {"mine": "3f0c"}, {"mine:f": "0" * 64}, {"a.b": "0" * 64}, 3)),
        *({"recipes": value} for value in ([], "0" * 64, ["3f0c"], [3])),
        *({"changes": value} for value in ("seed", {"seed": 1}, [1])),
        *([], "fedavg", 3, {"method": ["fedavg"]}),
    ],
    ids=repr,
)
def test_terms_that_say_something_else_are_no_terms(terms: Any) -> None:
    with pytest.raises(ValidationError, match="terms"):
        NodeConfig.model_validate({"client": "clinic", "terms": terms})


def test_a_node_whose_record_was_changed_trains_no_more(
    go: Go, demand: Demand, capsys: pytest.CaptureFixture[str]
) -> None:
    """It could not say how often it has trained already."""
    home = demand(rounds=9)
    file = home / "audit.jsonl"
    file.unlink(missing_ok=True)
    Audit(file).note("train", run="0")
    Audit(file).note("train", run="1")
    file.write_text(file.read_text().replace('"run": "0"', '"run": "2"'))
    with pytest.raises(UserError, match="2 of 3 nodes reported"):
        go("training.rounds=1", "runtime.flower.min_clients=3")
    said = capsys.readouterr()
    assert "the content does not match its hash" in said.err
    assert str(file) not in said.out
    file.unlink()


def test_terms_that_cannot_be_read_refuse_everything(go: Go, demand: Demand) -> None:
    home = demand(method=["fedavg"])
    with pytest.raises(UserError, match=r"terms\.method: unknown key"):
        NodeConfig.read(home / "node.yaml")
    with pytest.raises(UserError, match="2 of 3 nodes reported"):
        go("runtime.flower.min_clients=3")
