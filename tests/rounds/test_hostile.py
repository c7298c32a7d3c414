"""Hostile clients in whole runs: who they are, where they act, and that no number counts them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fedloom
from fedloom.codecs import Raw, Sparse
from fedloom.core.updates import Updates
from fedloom.data.partition import Partition
from fedloom.engines.api import Result, plan
from fedloom.errors import RecipeError
from fedloom.federation.recipes import dump, load
from fedloom.federation.rounds import refusals
from fedloom.federation.rounds.build import build, build_method
from fedloom.federation.rounds.built import conspired
from fedloom.federation.rounds.messages import Payload, blank, clip_counts, unpacked
from fedloom.federation.rounds.server import collect
from fedloom.federation.runs import checkpoint
from fedloom.methods import METHODS
from fedloom.methods.robust import ATTACKS
from tests_support import Quick, assert_same, load_recipe, named, stopped_after

FLOWER = "runtime.engine=flower"
NAMES = ["all-0", "digit-0", "holes-0", "large-0", "parity-0"]


def test_an_attack_is_named_as_briefly_as_a_method() -> None:
    brief = load_recipe("attack=alie", "attack.clients=3")
    assert brief == load_recipe("attack={name: alie, clients: 3, factor: null}")
    assert load(dict(brief.model_dump(mode="json"))) == brief
    assert "attack: null" in dump(load_recipe())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["attack=ali"], r"attack.name: unknown attack 'ali'.* Did you mean 'alie'"),
        (["attack={name: scaled, factor: 0}"], r"attack.factor: 0 found, expected a number greater than 0"),
        (["attack={name: replay, factor: 2}"], r"attack.factor: unknown key"),
        (["attack=replay", "attack.clients=0"], r"attack.clients: 0 found, expected a number of clients, or a list of"),
        (["attack={name: replay, clients: [digit-9]}"], r"attack.clients: no client 'digit-9'. Did you mean 'digit-0'"),
        (["attack={name: replay, clients: 5}"], r"5 of 5 clients are hostile, expected at least one honest client"),
        (
            ["attack=mimic", "peers={mode: asynchronous, scenario: {speed: 1}}"],
            r"attack: mimic needs .* among asynchronous peers has no such place",
        ),
        (["attack=ipm", "runtime={engine: cluster, exact: false}"], r"ipm needs .* with runtime.exact: false"),
        (
            ["attack=alie", "peers={}", "runtime.engine=flower"],
            r"alie needs .* among peers with runtime.engine: flower has no such place",
        ),
        (["attack=alie", "method=matu"], r"attack: alie needs unpacked rows, but Unified"),
        (["attack=replay", "method=centralised"], r"attack: clients of centralised send nothing"),
        (
            ["method.add.krum={}"],
            r"Krum\(f=None, within='tasks'\) needs at least 3 rows in a group, but .* has 1 \(digit-0\)",
        ),
        (["peers={}", "method.add.median={}"], r"peers: Median.* a peer hears too few .* clip and centred-clip"),
        (
            ["peers={}", "method.weights=declared"],
            r"peers: method.weights: declared found, but peers know .*; set method.max_examples",
        ),
    ],
    ids=lambda value: ", ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_is_refused(changes: list[str], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        build(load_recipe(*changes))


def test_hostile_clients_are_drawn_from_the_seed() -> None:
    drawn = [sorted(build(load_recipe("attack=replay", "attack.clients=2", f"seed={s}")).attacks) for s in range(6)]
    said = [note for note in plan(load_recipe("attack=replay", "attack.clients=2")).notes if "hostile" in note]
    assert said == [f"attack: {', '.join(drawn[0])} are hostile (replay); no number counts them"]
    again = sorted(build(load_recipe("attack=scaled", "attack.clients=2", "seed=0")).attacks)
    assert again == drawn[0]
    assert len({*map(tuple, drawn)}) > 1
    assert all(len(names) == 2 and set(names) < set(NAMES) for names in drawn)


def test_a_node_that_knows_only_itself_judges_nobody_else() -> None:
    def alone(name: str, *changes: str) -> Any:
        built = build(load_recipe("attack={name: replay, clients: [digit-0]}", "method.add.krum={f: 0}"))
        federation = replace(built.federation, clients={name: built.federation.clients[name]})
        return replace(built, recipe=load_recipe(*changes), federation=federation, partition=Partition(()))

    named = "attack={name: replay, clients: [digit-0, holes-0]}"
    assert set(alone("digit-0", named).attacks) == {"digit-0"}
    assert not alone("large-0", named).attacks
    with pytest.raises(
        RecipeError, match="does not know the other clients, so it cannot draw some of them; list the clients' names"
    ):
        _ = alone("digit-0", "attack=replay").attacks
    strict = replace(alone("digit-0"), method=build_method(load_recipe("method.add.krum={}").method))
    refusals.too_few_rows(strict)


@pytest.mark.parametrize("codec", [Raw(), Sparse()])
def test_who_knows_all_sends_last_and_knows_rows_of_its_own_tasks_only(codec: Any) -> None:
    recipe = load_recipe(
        "partition={name: one-task, clients_per_task: 3}", "model.heads=own", "attack={name: ipm, factor: 1}",
        "attack.clients=[digit-0, holes-1]",
    )  # fmt: skip
    built = build(recipe)
    built, shared = replace(built, method=replace(built.method, codec=codec)), built.shared
    sent: dict[str, torch.Tensor] = {}
    payloads = []
    for i, name in enumerate(built.federation.clients):
        like = blank(shared, built.federation, ((name, None),), torch.full((1, shared.d), float(i + 1)))
        assert like.present is not None
        for s, have in zip(shared.slices, like.present[0].tolist(), strict=True):
            like.X[:, s] *= have
        sent[name] = like.X[0]
        payloads.append(Payload((name, None), 10.0, codec.pack(like)))
    memory: dict[str, Any] = {}
    came = list(conspired(built, built.attacks, payloads, memory, lambda *_: None))
    assert [p.row[0] for p in came[-2:]] == ["digit-0", "holes-1"]
    rows = [(name, None) for name in built.federation.clients]
    updates, _ = collect(built, came, rows)
    found = {name: x for (name, _), x in zip(updates.rows, updates.X, strict=True)}
    for task, liar, others in (("digit", "digit-0", "12"), ("holes", "holes-1", "02")):
        torch.testing.assert_close(found[liar], -torch.stack([sent[f"{task}-{i}"] for i in others]).mean(0))
    assert torch.equal(found["large-1"], sent["large-1"])


def conspiring(*changes: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], list[Any]]:
    """Return what clients made and what arrives, by client, of rows of random numbers; and what was logged."""
    recipe = load_recipe("partition={name: one-task, clients_per_task: 7}", *changes)
    built = build(recipe)
    method, shared, logged = built.method, built.shared, list[Any]()
    draw, made, payloads = torch.Generator().manual_seed(0), dict[str, torch.Tensor](), []
    for name in built.federation.clients:
        made[name] = torch.randn(shared.d, generator=draw)
        like = blank(shared, built.federation, ((name, None),), made[name][None])
        payloads.append(Payload((name, None), 10.0, method.codec.pack(like)))
    came = conspired(built, built.attacks, payloads, {}, lambda event, about: logged.append((event, about)))
    arrived = {p.row[0]: unpacked(built, p.rows, p.packed)[0][0] for p in came}
    return made, arrived, logged


@pytest.mark.parametrize(("hostile", "z"), [(2, 0.25335), (3, 0.67449)])
def test_the_papers_factor_of_alie_is_that_of_each_group(hostile: int, z: float) -> None:
    """Among seven, s = 4 - m: Phi^-1(3 / 5) of two hostile clients, Phi^-1(3 / 4) of three."""
    liars = [f"digit-{i}" for i in range(hostile)]
    made, arrived, logged = conspiring("attack=alie", f"attack.clients=[{', '.join(liars)}]")
    honest = torch.stack([made[f"digit-{i}"] for i in range(hostile, 7)]).double()
    expected = honest.mean(0) - z * honest.std(0, correction=0)
    for name in made:
        if name in liars:
            torch.testing.assert_close(arrived[name].double(), expected, atol=2e-5, rtol=0)
        else:
            assert torch.equal(arrived[name], made[name])
    assert logged == [("attack", {"tasks": "digit", "clients": 7, "hostile": hostile, "z": pytest.approx(z, rel=1e-3)})]


def test_an_attack_that_would_be_the_honest_mean_is_refused() -> None:
    base = ("partition={name: one-task, clients_per_task: 7}", "attack=alie", "attack.clients=[digit-0]")
    with pytest.raises(RecipeError) as refused:
        build(load_recipe(*base))
    assert str(refused.value).startswith(
        "attack: alie has the factor 0 among the 7 clients with digit, 1 of them hostile"
    )
    assert "attack.factor" in str(refused.value)
    build(load_recipe(*base, "attack.factor=1.5"))


def test_the_dry_run_says_how_hostile_clients_act_together() -> None:
    base = ("partition={name: one-task, clients_per_task: 7}", "attack.clients=[digit-0, digit-1]")

    def notes(*changes: str) -> list[str]:
        return [note for note in plan(load_recipe(*changes, *base)).notes if "together" in note]

    assert notes("attack=alie") == ["attack: 2 of the 7 clients with digit act together, with the factor 0.253"]
    assert notes("attack=mimic") == ["attack: 2 of the 7 clients with digit act together"]
    assert notes("attack=scaled") == []


def test_a_mimic_keeps_to_its_victim_also_over_a_stop(quick: Quick, tmp_path: Path) -> None:
    changes = ("partition={name: one-task, clients_per_task: 4}", "attack={name: mimic, clients: [digit-0]}",
               "training.rounds=4", "evaluation.splits=[test]")  # fmt: skip
    run = quick(*changes)
    said = [event for line in lines(run) for event in line["events"] if event["event"] == "attack"]
    assert len(said) == 1, "in the first round, and never again"
    assert said[0]["copied"] in {"digit-1", "digit-2", "digit-3"}
    part = stopped_after(1, tmp_path / "parts", load_recipe(*changes))
    state, _, _ = checkpoint.load(part, "state", lambda head: head["round"])
    assert state["attack"] == {"digit": {"copied": said[0]["copied"]}}
    assert_same(run, fedloom.resume(part))


def test_claims_that_the_method_does_not_believe() -> None:
    built = build(load_recipe("method=fedavg"))
    known = float(len(built.federation.clients["digit-0"].train))
    for given, expected in (
        ({}, 1e6),
        ({"weights": "declared"}, known),
        ({"max_examples": 50}, 50.0),
        ({"max_examples": 2_000_000}, 1e6),
        ({"weights": "declared", "max_examples": 50}, 50.0),
    ):
        method = replace(built.method, **given)
        assert clip_counts(replace(built, method=method), Payload(("digit-0", None), 1e6)).n == expected
    by_task = Payload(("all-0", None), 1e6, tasks={"digit": 1e6, "holes": 3.0})
    some = clip_counts(replace(built, method=replace(built.method, max_examples=50)), by_task)
    assert (some.n, dict(some.tasks)) == (50, {"digit": 50.0, "holes": 3.0})


def weights_of(built: Any, **given: Any) -> Updates:
    """The matrix of a round in which one client claims a million examples."""
    built, shared = replace(built, method=replace(built.method, **given)), built.shared
    zeros = torch.zeros(1, shared.d)
    rows = [(name, None) for name in built.federation.clients]
    n = {name: 1e6 if name == "digit-0" else float(len(c.train)) for name, c in built.federation.clients.items()}
    payloads = [Payload(row, n[row[0]], Raw().pack(blank(shared, built.federation, (row,), zeros))) for row in rows]
    return collect(built, payloads, rows)[0]


def test_one_client_does_not_own_the_mean_by_what_it_claims() -> None:
    built = build(load_recipe())
    claimed, declared, bounded = (
        weights_of(built, **given) for given in ({}, {"weights": "declared"}, {"max_examples": 100})
    )
    assert float(claimed.weight.max() / claimed.weight.sum()) > 0.99
    assert declared.weight.tolist() == [float(len(c.train)) for c in built.federation.clients.values()]
    assert bounded.weight.tolist() == [100.0] * 5
    assert torch.equal(bounded.n, bounded.weight)


def lines(run: Result) -> list[dict[str, Any]]:
    return [json.loads(text) for text in (run.folder / "metrics.jsonl").read_text().splitlines()]


def test_no_number_counts_hostile_clients_and_a_stopped_run_goes_on(quick: Quick, tmp_path: Path) -> None:
    changes = ("attack=replay", "attack.clients=[digit-0, holes-0]", "training.rounds=3", "method=fedper",
               "evaluation.models=[global, personal, trained]")  # fmt: skip
    run = quick(*changes)
    assert json.loads((run.folder / "run.json").read_text())["hostile"] == ["digit-0", "holes-0"]
    for line in lines(run):
        assert {m["client"] for m in line["metrics"]} == {"all-0", "large-0", "parity-0"}
    assert_same(run, fedloom.resume(stopped_after(1, tmp_path / "parts", load_recipe(*changes))))


def test_who_sends_nothing_is_said_to_be_hostile(quick: Quick) -> None:
    run = quick(
        "attack=drop-out", "attack.clients=[large-0]", "training.rounds=1", "method={name: fedavg, add: {by-task: }}"
    )
    assert lines(run)[1]["events"] == [
        {"event": "update dropped", "client": "large-0", "why": "a hostile client sent nothing"}
    ]


@pytest.mark.parametrize(("attack", "rules"), [("scaled", ("none", "clip", "centred-clip")), ("ipm", ("none", "clip"))])
def test_peers_clip_around_themselves_and_a_liar_does_not_reach_them(
    quick: Quick, attack: str, rules: tuple[str, ...]
) -> None:
    """Without it, one round of a peer's lies is in every model; also of lies made of what all others learned."""
    base = ("peers={}", f"attack={{name: {attack}, factor: 3000, clients: [digit-0]}}", "training.rounds=1",
            "partition.clients_per_task=2", "evaluation.splits=[test]")  # fmt: skip
    worst = {}
    for rule in rules:
        add = () if rule == "none" else (f"method.add.{rule}={{}}",)
        model = fedloom.engines.api.trained_models(quick(*base, *add).folder)
        worst[rule] = max(float(v.abs().max()) for v in model["large-0"].values() if v.is_floating_point())
    assert worst.pop("none") > 1
    assert max(worst.values()) < 0.5


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n == "mimic" else pytest.mark.slow) for n in ATTACKS.names]
)
def test_an_attack_is_the_same_in_workers_and_over_flower(quick: Quick, name: str) -> None:
    """In a cluster too: tests/engines/test_cluster.py."""
    pytest.importorskip("flwr")
    changes = ("partition={name: one-task, clients_per_task: 3}", f"attack={{name: {name}, clients: [digit-0]}}",
               "training.rounds=2", "evaluation.splits=[test]")  # fmt: skip
    changes += ("attack.factor=1.5",) if name == "alie" else ()  # the paper's would be 0
    whole, there = quick(*changes), quick(*changes, FLOWER)
    if name == "fake":  # a node is held to the number of examples that it told when it joined
        events = [event for line in lines(there) for event in line["events"]]
        assert [(e["event"], e["client"]) for e in events] == [("answer dropped", "digit-0")] * 2
    else:
        assert_same(whole, there)
    if name == "mimic":
        return
    assert_same(whole, quick(*changes, "runtime.workers=2"))
    if not ATTACKS[name].make().knows_all and name != "fake":
        peers, nodes = quick(*changes, "peers={}"), quick(*changes, "peers={}", FLOWER)
        # what peers say of huge and of long updates is told in the words of their nodes
        assert_same(peers, nodes, models_only=name in ("huge", "scaled"))
        assert [line["metrics"] for line in lines(peers)] == [line["metrics"] for line in lines(nodes)]


@pytest.mark.slow
@pytest.mark.parametrize("attack", sorted(ATTACKS.entries))
@pytest.mark.parametrize("name", sorted(METHODS.entries))
def test_every_method_trains_under_every_attack_or_says_why_not(quick: Quick, name: str, attack: str) -> None:
    try:
        run = quick(f"method={{{named(name)}}}", f"attack={attack}", "training.rounds=2", "evaluation.splits=[test]")
    except RecipeError as error:
        refused = str(error)
    else:
        refused = ""
    if refused:
        assert any(
            why in refused for why in ("needs unpacked rows", "send nothing", "so these would send the honest mean")
        ), refused
        return
    for model in fedloom.engines.api.trained_models(run.folder).values():
        assert all(bool(torch.isfinite(v).all()) for v in model.values() if v.is_floating_point())
