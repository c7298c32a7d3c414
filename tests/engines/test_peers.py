"""Peers without a server: what must equal a server, what must survive, and what safeguards are for."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

import fedloom
from fedloom import Ctx, Method
from fedloom.codecs import Sparse
from fedloom.core.context import State
from fedloom.core.settings.section import strict
from fedloom.core.updates import Updates
from fedloom.engines.api import Result, trained_models
from fedloom.engines.peers.community import PeerContext, Trained
from fedloom.engines.peers.messages import signal_fields, signals, statistics
from fedloom.engines.peers.rounds import community_of
from fedloom.engines.peers.transport import PeerMessage
from fedloom.engines.plan import plan
from fedloom.errors import RecipeError, StateError
from fedloom.federation.recipes.loader import load
from fedloom.federation.recipes.schema import PeersSection
from fedloom.federation.rounds.build import build
from fedloom.federation.rounds.evaluation import evaluate
from fedloom.federation.rounds.messages import Message, Payload
from fedloom.federation.rounds.progress import Progress
from fedloom.federation.rounds.worker import EvalJob, Worker
from fedloom.federation.runs import checkpoint
from fedloom.federation.runs.reader import human_bytes
from fedloom.methods import METHODS, feddea, heal, local, pcgrad
from fedloom.methods.peers.aggregation import AtPeer, at_peers
from fedloom.methods.peers.config import SketchSection
from fedloom.peers import Safeguards, shared_columns
from fedloom.stages import Identity, Mean, MinNorm, Split
from fedloom.training.flat import FlatModel
from peers_support import Valleys
from quadratics import Quadratics
from tests_support import Quick, load_recipe, outcome, same

B = [[1.0, 2, -3], [0, 5, 1], [-2, 2, 2], [4, -1, 0.5]]
H = [[1.0, 2, 3], [0.5, 1, 1], [2, 0.1, 1], [1, 1, 4]]
STEPS = {"steps": [2, 3, 1, 2]}
SERVER: Mapping[str, Callable[[], Method]] = {
    "fedavg": lambda: METHODS["fedavg"].function(),
    "fedprox": lambda: METHODS["fedprox"].function(mu=0.1),
    "scaffold": lambda: METHODS["scaffold"].function(),
    "feddyn": lambda: METHODS["feddyn"].function(),
    "fednova": lambda: METHODS["fednova"].function(),
    "adam": lambda: METHODS["fedopt"].function(optimizer="adam"),
    "fedacg": lambda: METHODS["fedacg"].function(),
    "pcgrad": lambda: pcgrad(METHODS["fedavg"].function()),
    "heal": lambda: heal(METHODS["fedavg"].function()),
    "feddea": lambda: dataclasses.replace(feddea(METHODS["fedavg"].function(), rho=0.5), codec=Sparse()),
}


def assert_equal(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        assert torch.equal(tensor, b[name]), name


@pytest.mark.parametrize("name", SERVER)
@pytest.mark.parametrize("weights", ["size", "uniform"])
def test_on_a_complete_graph_all_peers_equal_the_server(name: str, weights: Any) -> None:
    method = dataclasses.replace(SERVER[name](), weights=weights)
    server = Quadratics(method, H, B, optimizer={"name": "sgd", "lr": 0.1}, **STEPS)
    peers = Valleys({"weights": {"kind": weights}}, H, B, method, **STEPS)
    for _ in range(4):
        server.go()
        assert_equal(peers.go(), dict.fromkeys(server.names, server.point))
    assert float(server.point.abs().min()) > 0


def test_isolated_peers_train_alone() -> None:
    peers = Valleys({"graph": {"name": "erdos-renyi", "p": 0}}, H, B, **STEPS)
    alone = Quadratics(local(), H, B, optimizer={"name": "sgd", "lr": 0.1}, **STEPS)
    for _ in range(3):
        alone.go()
        assert_equal(peers.go(), {name: state["private"] for name, state in alone.clients.items()})
    assert all(not count for ledger in peers.ledgers for count in (*ledger.up.values(), *ledger.down.values()))


def test_phases_alone_then_the_mean_then_conflict_averse() -> None:
    """Two rounds equal Local and send nothing, the third is the mean of all, the fourth is conflict-averse."""
    warmup = {"until": 4, "alone": 3, "scope": "full"}
    section = {"similarity": {"every": 9}, "choose": {"top": 3}, "weights": {"kind": "uniform"}}
    peers = Valleys({**section, "conflict_averse": {}, "warmup": warmup}, H, B, steps=2)
    alone = Quadratics(local(), H, B, optimizer={"name": "sgd", "lr": 0.1}, steps=2)
    for _ in range(2):
        alone.go()
        assert_equal(peers.go(), {name: state["private"] for name, state in alone.clients.items()})
    assert not any(count for ledger in peers.ledgers for count in ledger.up.values())
    peers.go()
    # they first judge each other when they first speak
    assert {len(record["neighbours"]) for record in peers.recorded("peer")[-4:]} == {3}
    models = list(peers.models.values())
    assert all(torch.allclose(model, models[0]) for model in models)
    assert not peers.recorded("conflict-averse")
    peers.go()
    assert len(peers.recorded("conflict-averse")) == 4


@pytest.mark.parametrize("what", ["local training gave nan or inf", "the mix failed"])
def test_a_peer_goes_back_to_the_model_that_it_kept(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    peers = Valleys({"graph": "ring", "rollback": 2}, H, B)
    peers.go()
    assert not any("kept" in state for state in peers.states.values())
    kept = {name: model.clone() for name, model in peers.go().items()}
    peers.go()
    if what == "the mix failed":
        mixed = AtPeer.__call__

        def spoilt(stage: AtPeer, updates: Updates, state: State, ctx: Any) -> Any:
            out, state = mixed(stage, updates, state, ctx)
            return out.replace(X=torch.full_like(out.X, torch.nan)), state

        monkeypatch.setattr(AtPeer, "__call__", spoilt)
    else:
        for state in peers.states.values():
            state["server"] = {**state["server"], "model": torch.full_like(state["server"]["model"], torch.inf)}
    assert_equal(peers.go(), kept)
    said = [fields["why"] for event, fields in peers.events if event == "rolled back"]
    assert said == [what] * 4
    monkeypatch.undo()
    assert all(model.isfinite().all() and not model.equal(kept[name]) for name, model in peers.go().items())


@pytest.mark.parametrize(
    "section",
    [
        {"graph": "ring"},
        {"choose": {"top": 1}},
        {"choose": {"top": 2}, "conflict_averse": {}, "warmup": {"until": 2}},
        {"graph": "ring", "weights": {"kind": "metropolis"}, "similarity": {"signals": {"parameters": 1}}},
    ],
    ids=str,
)
def test_zero_updates_change_no_tensor(section: dict[str, Any]) -> None:
    start = torch.tensor([1.5, -2.25, 1e-30])
    peers = Valleys(section, 0.0, B, start=start)
    for model in peers.go(3).values():
        assert torch.equal(model, start.double())


@pytest.mark.parametrize(
    "section",
    [
        {"choose": {"top": 1}},
        {"choose": {"top": 2}, "conflict_averse": {"add_own": True}},
        {"choose": {"top": 1}, "similarity": {"signals": {"gradient": 1, "parameters": 2}}, "penalty": 0.5},
    ],
    ids=str,
)
def test_names_and_their_order_do_not_matter(section: dict[str, Any]) -> None:
    one = Valleys(section, H, B)
    other = Valleys(section, H, B, names=["z", "m", "a", "k"])
    names = dict(zip(sorted(one.models), ["z", "m", "a", "k"], strict=True))
    for _ in range(4):
        a, b = one.go(), other.go()
        for name, renamed in names.items():
            torch.testing.assert_close(a[name], b[renamed], rtol=1e-12, atol=1e-13)
    assert not torch.equal(*list(one.models.values())[:2])


def test_a_ring_by_hand() -> None:
    """One step of length 1 leads to b_k itself, so a round is gossip of the b_k, and the next ones start there."""
    peers = Valleys(
        {"graph": "ring", "weights": {"kind": "metropolis"}}, 1.0, B, steps=1, optimizer={"name": "sgd", "lr": 1.0}
    )
    b = torch.tensor(B, dtype=torch.float64)
    models = peers.go()
    torch.testing.assert_close(models["c00"], (b[3] + b[0] + b[1]) / 3)
    torch.testing.assert_close(models["c02"], (b[1] + b[2] + b[3]) / 3)
    # everybody reads one snapshot: no one hears a model that was mixed in the same round
    torch.testing.assert_close(peers.go()["c01"], (b[0] + b[1] + b[2]) / 3)


def test_soft_weights_by_hand_with_and_without_self() -> None:
    b = [[1.0, 0], [1, 1], [-1, 0]]
    for include, expected in ((True, None), (False, torch.tensor([1.0, 1.0]))):
        peers = Valleys(
            {"choose": {"top": 1}, "weights": {"include_self": include}},
            1.0,
            b,
            steps=1,
            optimizer={"name": "sgd", "lr": 1.0},
        )
        model = peers.go()["c00"]
        s = (2**-0.5 + 1) / 2  # of c00 and c01
        mixed = (torch.tensor([1.0, 0]) + s * torch.tensor([1.0, 1])) / (1 + s)
        torch.testing.assert_close(model, (mixed if expected is None else expected).double())
        about = peers.recorded("peer")[0]
        assert about["neighbours"] == ["c01"]
        assert about["similarity"] == pytest.approx({"c01": s, "c02": 0.0})
        assert about["weights"]["c00"] == pytest.approx(1 / (1 + s) if include else 0.0)


def test_the_own_model_is_kept_where_neighbours_have_nothing() -> None:
    """Without the peer itself and without a neighbour, its training is not lost."""
    nobody = {"graph": {"name": "erdos-renyi", "p": 0}}
    peers = Valleys({**nobody, "weights": {"kind": "uniform", "include_self": False}}, H, B)
    alone = Valleys(nobody, H, B)
    assert_equal(peers.go(2), alone.go(2))


def test_a_crashed_peer_goes_on_from_its_own_files(tmp_path: Path) -> None:
    section = {"choose": {"top": 2}, "similarity": {"every": 2}, "conflict_averse": {}, "penalty": 0.1}
    method = METHODS["scaffold"].function
    whole = Valleys(section, H, B, method()).go(5)
    parts = Valleys(section, H, B, method())
    parts.go(3)
    checkpoint.save(tmp_path, "state", parts.states["c02"], round=3)
    again = Valleys(section, H, B, method())
    again.states, again.round = dict(parts.states), 3
    again.states["c02"], _, _ = checkpoint.load(tmp_path, "state", lambda head: head["round"])
    assert same(again.states["c02"], parts.states["c02"])
    assert_equal(again.go(2), whole)


def test_models_are_sent_to_those_who_ask_only() -> None:
    peers = Valleys({"choose": {"top": 1}}, H, B)
    peers.go(2)
    chosen = {(a["peer"], a["neighbours"][0]) for a in peers.recorded("peer")[4:]}
    up, down = peers.ledgers[1].up, peers.ledgers[1].down
    for name in peers.models:
        asked = sum(neighbour == name for _, neighbour in chosen)
        assert up[name] == {("signal", None): 3 * 3 * 8, **({("encoder", None): asked * 3 * 8} if asked else {})}
        assert down[name] == {("signal", None): 3 * 3 * 8, ("encoder", None): 3 * 8}


def test_lost_messages_replay_from_the_seed() -> None:
    def run(seed: int) -> Valleys:
        scenario = {"seed": seed, "loss": 0.4, "dropout": 0.2, "churn": {"c01": {"joins": 2, "away": [[4, None]]}}}
        peers = Valleys({"scenario": scenario}, H, B)
        peers.go(5)
        return peers

    one, again, other = run(1), run(1), run(2)
    assert_equal(one.models, again.models)
    assert one.records == again.records
    assert one.records != other.records
    there = [about["peer"] for about in one.recorded("peer")]
    assert there.count("c01") <= 2  # rounds 2 and 3
    counts = [len(about["neighbours"]) for about in one.recorded("peer")]
    assert min(counts) < 3
    assert all(torch.isfinite(model).all() for model in one.models.values())


def test_who_hears_nobody_trains_alone() -> None:
    nobody = Valleys({"scenario": {"loss": 0.999999}}, H, B).go(2)
    assert_equal(nobody, Valleys({"graph": {"name": "erdos-renyi", "p": 0}}, H, B).go(2))


def test_an_absent_peer_stays_as_it_is() -> None:
    peers = Valleys({}, H, B)
    before = peers.go(1)
    after = peers.go(1, ["c00", "c02"])
    assert torch.equal(before["c01"], after["c01"])
    assert not torch.equal(before["c00"], after["c00"])
    assert [about["neighbours"] for about in peers.recorded("peer")[4:]] == [["c02"], ["c00"]]


def test_simulated_time_by_hand() -> None:
    """10 steps a second, signals of 24 bytes at 96 byte/s, 1 s latency: each message takes 1.25 s, a request 1 s."""
    section = {"scenario": {"speed": 10, "bandwidth": 768, "latency": 1, "speeds": {"c03": 0.5}}}
    peers = Valleys(section, H, B, steps=5)
    peers.go()
    # c03 trains 10 s; its signal is there at 11.25, requests by then at 12.25, models at 13.5
    assert peers.clock == pytest.approx(13.5)
    quick = Valleys({**section, "deadline": 5.0}, H, B, steps=5)
    quick.go()
    assert quick.clock == 5.0
    assert {about["peer"]: about["neighbours"] for about in quick.recorded("peer")}["c00"] == ["c01", "c02"]
    assert quick.recorded("peer")[3]["neighbours"] == []
    late = [f for e, f in quick.events if f.get("what") == "late"]
    assert {f["sender"] for f in late} == {"c03"}
    assert quick.recorded("clock") == [{"start": 0.0, "end": 5.0}]


def test_sketches_choose_as_whole_gradients_do() -> None:
    g = torch.Generator().manual_seed(1)
    centres = torch.randn(3, 2000, generator=g)
    b = (centres.repeat_interleave(3, 0) + 0.3 * torch.randn(9, 2000, generator=g)).tolist()
    chosen = []
    for sketch in (None, {"m": 256}):
        peers = Valleys({"choose": {"top": 2}, "similarity": {"sketch": sketch}}, 1.0, b)
        peers.go()
        chosen.append([about["neighbours"] for about in peers.recorded("peer")])
        assert peers.ledgers[0].up["c00"]["signal", None] == 8 * (2000 * 8 if sketch is None else 256 * 2)
    assert chosen[0] == chosen[1]
    assert chosen[0][0] == ["c01", "c02"]


@pytest.mark.parametrize("d", [3_000, 24_000])
def test_what_a_peer_hears_does_not_grow_with_the_model(d: int) -> None:
    assert heard(d, {}) == 3 * 2 * SketchSection().m < heard(d, None)


def test_what_is_no_longer_than_a_sketch_is_sent_whole() -> None:
    assert heard(100, {}) == heard(100, None)


def heard(d: int, sketch: Any) -> int:
    """Bytes of signals that one of four peers hears in a round."""
    b = torch.randn(4, d, generator=torch.Generator().manual_seed(0)).tolist()
    peers = Valleys({"choose": {"top": 1}, "similarity": {"sketch": sketch}}, 1.0, b, steps=1)
    peers.go()
    return peers.ledgers[0].down["c00"]["signal", None]


def test_similarities_last_until_the_next_look() -> None:
    peers = Valleys({"choose": {"top": 1}, "similarity": {"every": 3}}, H, B)
    peers.go(4)
    signals = [sum(up.get(("signal", None), 0) for up in ledger.up.values()) for ledger in peers.ledgers]
    assert signals == [288, 0, 0, 288]
    similarity = [about["similarity"] for about in peers.recorded("peer") if about["peer"] == "c00"]
    assert similarity[0] == similarity[1] == similarity[2] != similarity[3]


def bytes_of(result: Result) -> list[dict[str, Any]]:
    lines = [json.loads(text) for text in (result.folder / "bytes.jsonl").read_text().splitlines()]
    return [line for line in lines if line["round"]]


def test_a_signal_may_come_less_often_than_others_and_from_few_examples(quick: Quick) -> None:
    """Section 4.2.3: models are sent and measured every second round, gradients in each, and decide in between."""
    each = "every: {cross-loss: 2}, samples: 4"
    section = "peers={{choose: {{top: 1}}, similarity: {{signals: {{{}}}, normalise: min-max, {}}}}}"
    more = ("training.rounds=3", "training.steps=1", "partition.val_fraction=0.2", "evaluation.splits=[val]")
    both = quick(*more, section.format("gradient: 1, cross-loss: 3", each))
    sent = [sum(e["bytes"] for e in line["up"] if e["role"] == "signal") for line in bytes_of(both)]
    assert sent[0] == sent[2] > 2 * sent[1] > 0
    found = [
        {r["peer"]: r["similarity"] for r in line["records"] if r["kind"] == "peer"}
        for run in (both, quick(*more, section.format("gradient: 1", "every: 1")))
        for line in run.run.rounds[1:]
    ]
    assert found[0] != found[3]
    built = build(load_recipe(*more, section.format("gradient: 1, cross-loss: 3", each)))
    assert f"signals are {human_bytes(sent[0])} more per round" in " ".join(plan(built).notes)
    similarity = built.recipe.peers.similarity  # type: ignore[union-attr]
    assert [{*similarity.due(round)} for round in range(3)] == [
        {"gradient", "cross-loss"},
        {"gradient"},
        {"gradient", "cross-loss"},
    ]
    client = next(iter(built.federation.clients.values()))
    message = Message(built.layout.flatten(built.module).detach()[: built.layout.parameters.d])
    worker = Worker(built.setup)
    few, cut = (worker.evaluate(EvalJob(0, message, {}, client.id, "val", (*client.tasks,), 1, some=n)) for n in (0, 4))
    whole = client.val.spread(4)
    assert len(whole) == 4
    by_hand = evaluate(worker.model, whole, {name: task for name, (task, _) in client.tasks.items()}, 50, True, True)
    assert {t: of["loss"] for t, of in cut[1].items()} == pytest.approx({t: of["loss"] for t, of in by_hand.items()})
    assert few[1] != cut[1]


@pytest.mark.parametrize(
    ("section", "why"),
    [
        ({"similarity": {"every": {"overlap": 2}}}, "every names 'overlap', which is not among signals"),
        ({"similarity": {"samples": 4}}, "samples is about cross-loss and disparity"),
        ({"mode": "asynchronous", "similarity": {"every": {"gradient": 2}}, "scenario": {"speed": 1}}, "in one round"),
        ({"weights": {"kind": "metropolis"}, "graph": "random-k"}, "graph 'random-k' is directed; set graph.directed"),
    ],
)
def test_keys_that_do_not_fit_each_other_are_refused(section: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        strict(PeersSection, section)


def test_a_peer_whose_update_conflicts_has_no_weight_and_one_without_agreement_keeps_its_own_model() -> None:
    """Eqs. 4.3 and 4.9 by hand: from zero, updates point to b, so cosines are those of b."""
    b = [[1.0, 0], [1, 1], [-1, 0], [0, -1]]
    peers = Valleys({"choose": {"top": 3}, "similarity": {"scale": "cosine"}}, 1.0, b)
    models = peers.go()
    weights = {about["peer"]: about["weights"] for about in peers.recorded("peer")}
    half = 2**-0.5
    assert weights["c00"] == pytest.approx({"c00": 1 / (1 + half), "c01": half / (1 + half), "c02": 0, "c03": 0})
    assert weights["c03"] == pytest.approx({"c00": 0, "c01": 0, "c02": 0, "c03": 1})
    trained = 1 - 0.9**2
    assert models["c03"].tolist() == pytest.approx([0, -trained])
    unit = Valleys({"choose": {"top": 3}}, 1.0, b)
    unit.go()
    assert unit.recorded("peer")[0]["weights"]["c03"] == pytest.approx(0.5 / (1 + (half + 1) / 2 + 0.5))


@pytest.mark.parametrize("which", ["change", "model"])
def test_models_are_compared_as_they_are_or_by_what_they_learned(which: str) -> None:
    """Section 6.2.2 by hand: two steps of 0.1 take a peer 19 % of the way from the start to its b."""
    b, start = torch.tensor([[1.0, 0], [1, 1], [-1, 0], [0, -1]]).double(), torch.tensor([10.0, 8.0]).double()
    similarity = {"signals": {"parameters": 1}, "scale": "cosine", "parameters": which}
    peers = Valleys({"choose": {"top": 3}, "similarity": similarity}, 1.0, b.tolist(), start=start)
    peers.go()
    X = torch.nn.functional.normalize(0.19 * (b - start) + (start if which == "model" else 0))
    found = next(about["similarity"] for about in peers.recorded("peer") if about["peer"] == "c00")
    assert [found[name] for name in ("c01", "c02", "c03")] == pytest.approx((X[1:] @ X[0]).tolist())


@pytest.mark.parametrize("model", ["trained", "received"])
def test_the_loss_gradient_is_that_of_one_batch_of_all_examples(model: str) -> None:
    """Eq. 4.2 against torch on all training examples at once, at the model that signals describe."""
    names = "gradient: 1, parameters: 1, cross-loss: 1"
    section = f"peers={{choose: {{top: 1}}, similarity: {{signals: {{{names}}}, gradient: loss, model: {model}}}}}"
    built = build(load_recipe("model.heads=own", "training.batch_size=7", section))
    context = community_of(built).context.at("all-0")
    start, client = context.origin, context.client
    payload = Payload((client.id, None), 1.0)
    step = 0.1 * torch.randn(len(start), generator=torch.Generator().manual_seed(0))
    found = signals(context, trained := Trained(payload, start, step, 1, before=Message(start, start[:0])))
    module = built.module.eval()
    at = trained.model if model == "trained" else start
    torch.nn.utils.vector_to_parameters(at, module.parameters())
    x, targets = client.train.examples.batch(client.train.index, torch.device("cpu"), tasks=tuple(client.tasks))
    outputs = module(x, tuple(client.tasks))
    loss = sum(weight * task.loss(outputs[name], targets[name]) for name, (task, weight) in client.tasks.items())
    part = shared_columns(context.shared)
    whole = torch.autograd.grad(loss, [module.get_parameter(name) for name in part.names])
    torch.testing.assert_close(found["gradient"], torch.cat([g.flatten() for g in whole]), rtol=1e-4, atol=1e-6)
    assert bool(found["parameters"].any()) == (model == "trained")
    assert found.keys() == signal_fields(context, 1).keys() == {"gradient", "parameters", "model"}


@pytest.mark.parametrize(("signal", "rule"), [("gradient", "exp"), ("cross-loss", "negative"), ("cross-loss", "exp")])
def test_every_peer_judges_others_by_what_they_and_it_trained(
    quick: Quick, monkeypatch: pytest.MonkeyPatch, signal: str, rule: str
) -> None:
    """Eqs. 4.2, 4.3 and 4.5, 4.6 by hand at each of five peers, with each model's own statistics of batch norm."""
    ended: dict[str, Trained] = {}

    def heard(context: PeerContext, trained: Trained) -> dict[str, torch.Tensor]:
        ended[context.client.id] = trained
        found = signals(context, trained)
        assert found.keys() == signal_fields(context, 1).keys() >= ({"buffers"} if signal == "cross-loss" else set())
        return found

    monkeypatch.setattr("fedloom.engines.peers.messages.signals", heard)
    section = f"{{signals: {{{signal}: 1}}, gradient: loss, scale: cosine, cross_loss: {rule}}}"
    changes = ("model={name: resnet10, width: 4, heads: own}", "partition.val_fraction=0.3", "training.rounds=1")
    result = quick(*changes, f"peers={{choose: {{top: 2}}, weights: {{kind: uniform}}, similarity: {section}}}")
    built = build(load_recipe(*changes))
    clients, model = built.federation.clients, FlatModel.copy_of(built.module)
    part = shared_columns(built.layout.parameters)
    assert len(ended) == 5

    def loss(of: str, at: str, split: str) -> torch.Tensor:
        """The loss of one peer's trained model on another's data, all of it at once; the other has the heads."""
        model.params.copy_(ended[of].model)
        for block, span in zip(model.layout.parameters.blocks, model.layout.parameters.slices, strict=True):
            if block.task is not None and block.task not in clients[of].tasks:
                model.params[span] = ended[at].model[span]
        buffers = ended[of].payload.buffers
        assert buffers is not None
        model.buffers.copy_(buffers)
        tasks, data = clients[at].tasks, clients[at].part(split)
        x, targets = data.examples.batch(data.index, torch.device("cpu"), tasks=tuple(tasks))
        outputs = model.module.eval()(x, tuple(tasks))
        return torch.stack([w * task.loss(outputs[name], targets[name]) for name, (task, w) in tasks.items()])

    def gradient(of: str) -> torch.Tensor:
        model.grad.zero_()
        loss(of, of, "train").sum().backward()
        return model.layout.parameters.take(model.grad, part).double()

    records = [r for r in result.run.rounds[-1]["records"] if r["kind"] == "peer"]
    gradients = {name: gradient(name) for name in clients} if signal == "gradient" else {}
    for record in records:
        me, others = record["peer"], record["similarity"]
        assert len(others) == 4
        if signal == "gradient":
            cosine = torch.nn.functional.cosine_similarity
            wanted = {name: float(cosine(gradients[me], gradients[name], 0)) for name in others}
        else:
            with torch.no_grad():
                each = {name: loss(name, me, "val") for name in others}
            if rule == "exp":  # relative to the median candidate's, mean over tasks
                median = torch.stack([*each.values()]).quantile(0.5, 0, interpolation="lower")
                wanted = {name: float((-(found / median).mean()).exp()) for name, found in each.items()}
            else:
                wanted = {name: -float(found.sum()) for name, found in each.items()}
        assert others == pytest.approx(wanted, rel=1e-3, abs=1e-4)


def test_a_head_that_the_sender_lacks_is_measured_with_the_peers_own_statistics() -> None:
    """Of a model that came, only the blocks that its sender has are the sender's, of batch norm in decoders too."""
    built = build(load_recipe("data.count=24", "model.heads=own", recipe="thesis/scenes-single"))
    context, clients = community_of(built).context, built.federation.clients
    names = {next(iter(client.tasks)): name for name, client in clients.items() if len(client.tasks) == 1}
    (task, me), (other, sender) = [*names.items()][:2]
    every = context.method.shared_buffers(built.layout)
    own, told = torch.zeros(every.d), torch.ones(every.d)
    about = {"tasks": clients[sender].shares}
    message = PeerMessage("signal", sender, 1, built.layout.hash, {"buffers": told}, about)
    found = statistics(context.at(me), message, own)
    assert found is not None
    for block, span in zip(every.blocks, every.slices, strict=True):
        assert bool(found[span].all()) == (block.task in (None, other)), block.name
    assert {block.task for block in every.blocks} >= {task, other}
    assert told.all()
    assert statistics(context.at(me), dataclasses.replace(message, tensors={}), own) is own


def test_equation_4_19_is_the_shortest_convex_combination() -> None:
    """`min-norm` at peers against scipy's SLSQP, and its inequality: it works against no row."""
    rng = np.random.default_rng(0)
    for _ in range(5):
        X = rng.normal(size=(4, 6))
        rows = Updates.of(torch.from_numpy(X), rows=[(name, None) for name in "abcd"])
        mix, _ = AtPeer(MinNorm(unit=False), own="a", shares=dict.fromkeys("abcd", 1.0))(rows, {}, Ctx(1, 0))
        least = minimize(
            lambda a, X=X: float(np.sum((a @ X) ** 2)), np.full(4, 0.25), method="SLSQP", tol=1e-14,
            bounds=[(0, 1)] * 4, constraints={"type": "eq", "fun": lambda a: a.sum() - 1},
        )  # fmt: skip
        direction = mix.X[0].numpy()
        assert direction == pytest.approx(least.x @ X, abs=1e-5)
        assert float((X @ direction).min()) >= direction @ direction - 1e-9


def test_recency_gives_others_a_turn() -> None:
    """Whom each peer chooses is whom the factor and the similarities that it found say, round by round."""
    b = [[1.0, 2], [1.2, 2.1], [1, -2], [3, 0.5], [-1, 1]]
    section: dict[str, Any] = {"choose": {"top": 1, "recency": 0.4}, "weights": {"kind": "uniform"}}
    peers, plain = Valleys(section, 1.0, b), Valleys({**section, "choose": {"top": 1}}, 1.0, b)
    peers.go(6)
    plain.go(6)
    last: dict[tuple[str, str], int] = {}
    each = len(b)
    for i, about in enumerate(peers.recorded("peer")):
        round, me = i // each, about["peer"]
        score = {
            other: s * (1 - np.exp(-0.4 * (round - last[me, other])) if (me, other) in last else 1)
            for other, s in about["similarity"].items()
        }
        assert about["neighbours"] == [max(score, key=score.__getitem__)]
        last[me, about["neighbours"][0]] = round
    assert len({(a["peer"], *a["neighbours"]) for a in plain.recorded("peer")}) < len(last)


def test_disparity_is_the_opposite_of_cross_loss(quick: Quick) -> None:
    """Of both, which cost one measurement, every candidate is half as similar as can be."""
    section = "peers={similarity: {signals: {cross-loss: 1, disparity: 1}}, choose: {top: 2}, weights: {kind: uniform}}"
    short = ("training.steps=1", "training.rounds=1", "partition.val_fraction=0.1", "evaluation.splits=[val]")
    run = quick(*short, section)
    found = [s for _, about in run.run.records("peer") for s in about["similarity"].values()]
    assert found == pytest.approx([0.5] * len(found))
    assert found


def test_the_adaptive_scope_follows_the_alignment() -> None:
    same, apart = [[1.0, 1]] * 3, [[1.0, 0], [-1, 0], [0, 1]]
    for b, scope in ((same, "encoder"), (apart, "full")):
        peers = Valleys({"scope": "adaptive"}, 1.0, b)
        peers.go(2)
        assert {about["scope"] for about in peers.recorded("peer")} == {scope}


def test_the_penalty_draws_to_those_not_chosen() -> None:
    b = [[0.0], [0.2], [10]]
    free, drawn = (
        Valleys({"choose": {"top": 1}, "weights": {"include_self": True}, "penalty": mu}, 1.0, b, start=[0.1])
        for mu in (0.0, 0.5)
    )
    assert_equal(free.go(1), drawn.go(1))  # nothing is known yet
    before = {name: float(model) for name, model in free.go(3).items()}
    after = {name: float(model) for name, model in drawn.go(3).items()}
    chosen = {about["peer"]: about["neighbours"] for about in drawn.recorded("peer")}
    assert chosen["c00"] == ["c01"] or chosen["c01"] == ["c00"]
    assert after["c00"] > before["c00"]


def test_the_penalty_is_to_the_mean_of_all_that_are_not_chosen() -> None:
    b = [[0.0], [0.2], [4], [10]]
    peers = Valleys({"choose": {"top": 1}, "penalty": 0.5}, 1.0, b)
    peers.go(1)
    sent = {f"c0{i}": (1 - 0.9**2) * value for i, (value,) in enumerate(b)}  # two steps of 0.1 from 0
    for about in peers.recorded("peer"):
        me = about["peer"]
        others = [sent[name] for name in sent if name not in (me, *about["neighbours"])]
        assert len(others) == 2
        told = peers.states[me]["told"]
        assert (float(told["others"]), float(told["pull"])) == pytest.approx((sum(others) / 2, 0.5))


UNEQUAL = ([[1.0, 1], [1000, 1000]], [[1.0, 2], [-1, -2]], {"steps": 5, "optimizer": {"name": "sgd", "lr": 1.5e-3}})
NONE: dict[str, Any] = dict.fromkeys(Safeguards.model_fields)


def farthest(
    problem: tuple[Any, Any, dict[str, Any]], safeguards: dict[str, Any], rounds: int
) -> tuple[float, Valleys]:
    h, b, training = problem
    averse = {"add_own": True, "safeguards": safeguards}
    peers = Valleys({"weights": {"kind": "uniform"}, "conflict_averse": averse}, h, b, **training)
    return max(float(model.abs().max()) for model in peers.go(rounds).values()), peers


def test_safeguards_hold_on_loss_scales_of_one_to_a_thousand() -> None:
    """The release counts the own update twice: where that reaches the optimum, it overshoots more every round."""
    bare, _ = farthest(UNEQUAL, NONE, 50)
    assert bare > 1e4
    for safeguards in ({}, {"normalise": "own-norm", "clip": 5.0}, {**NONE, "clip_result": 5.0}):
        held, peers = farthest(UNEQUAL, safeguards, 50)
        assert held < 30
        assert any(about["acted"] for about in peers.recorded("conflict-averse"))


@pytest.mark.parametrize(
    ("method", "section", "why"),
    [
        (local(), {}, "shares nothing"),
        (Method(stage=Split({"encoder": Mean(), "*": Identity()})), {"conflict_averse": {}}, "peers: "),
        (heal(Method()), {}, "does not read weights"),
        (METHODS["matu"].function(), {"scope": "encoder", "weights": {"kind": "size"}}, "one vector per task"),
    ],
)
def test_what_does_not_go_is_refused(method: Method, section: dict[str, Any], why: str) -> None:
    with pytest.raises(RecipeError, match=why):
        at_peers(method, strict(PeersSection, section))


SHORT = ("training.steps=1", "training.rounds=3", "evaluation={every: 3, splits: [val]}")


def test_a_whole_run_equals_the_server(quick: Quick) -> None:
    """Batch norm, pooled statistics, AdamW that goes on: peers on a complete graph and a server, bit for bit."""
    hard = (
        *SHORT,
        "model={name: resnet10, width: 4}",
        "training.optimizer={name: adamw, lr: 0.001}",
        "training.keep_optimizer=true",
    )
    server = trained_models(quick(*hard, "method.buffers=pooled").folder)[""]
    peers = quick(*hard, "method.buffers=pooled", "peers={weights: {kind: size}}")
    for model in trained_models(peers.folder).values():
        assert_equal(model, server)
    assert {m["model"] for m in peers.run.rounds[-1]["metrics"]} == {"personal"}


class Stop(Exception):
    """A crash."""


class Crash(Progress):
    def client(self, round: int, done: int, of: int) -> None:
        if round == 3 and done == of:
            raise Stop


def test_a_run_of_peers_resumes_each_from_its_own_folder(quick: Quick, tmp_path: Path) -> None:
    changes = (
        *SHORT,
        "model.heads=own",
        "peers={choose: {top: 2, recency: 1}, similarity: {signals: {gradient: 1, overlap: 1}, every: 2}, "
        "conflict_averse: {}, "
        "scenario: {loss: 0.2, speed: 5}, warmup: {until: 2}, rollback: 1}",
    )
    whole = quick(*changes)
    folder = tmp_path / "parts"
    with pytest.raises(Stop):
        fedloom.run(load_recipe(*changes), folder, progress=Crash())
    own = sorted(path.name for path in (folder / "peers").iterdir())
    assert own == ["all-0", "digit-0", "holes-0", "large-0", "parity-0"]
    home = folder / "peers" / "digit-0"
    tree, _, _ = checkpoint.load(home, "state-2", lambda head: head["round"])
    # one peer was faster than the others when the power went, twice
    for _ in range(2):
        checkpoint.save(home, "state-3", {**tree, "similarity": {}}, round=3)
    resumed = fedloom.resume(folder)
    (a, lines_a), (b, lines_b) = outcome(whole), outcome(resumed)
    assert_equal(a, b)
    assert lines_a == lines_b
    peer = [r for r in lines_a[2]["records"] if r["kind"] == "peer"]
    assert sorted(r["peer"] for r in peer) == own


def test_overlap_is_of_the_clients_own_weights_whatever_a_task_weighs_for_all(tmp_path: Path) -> None:
    """Eq. 4.4 on 0.7 and 0.3: a loss that is scaled by ten does not make its task ten times as important."""
    changes = (
        "training.rounds=1",
        "training.epochs=1",
        "data.count=24",
        "data.test_count=2",
        "evaluation.splits=[test]",
        "partition.val_fraction=0",
        "early_stopping=null",
        "peers={similarity: {signals: {overlap: 1}}, choose: {top: 5}}",
    )
    found = []
    for number, weight in enumerate(("1", "10")):
        recipe = load("thesis/scenes-pairwise", (*changes, f"tasks.normals.weight={weight}"))
        run = fedloom.run(recipe, tmp_path / str(number)).run
        found.append({r["peer"]: r["similarity"] for r in run.rounds[1]["records"] if r["kind"] == "peer"})
    held = {
        name: about["tasks"] for name, about in json.loads((tmp_path / "0/run.json").read_text())["clients"].items()
    }
    assert found[0] == found[1]
    for peer, row in found[0].items():
        expected = {o: sum(min(held[peer].get(t, 0), held[o].get(t, 0)) for t in held[peer]) for o in row}
        assert row == pytest.approx(expected)
    assert {round(value, 6) for row in found[0].values() for value in row.values()} == {0.3, 0.6, 0.7}


def _partly_labelled(*without: str) -> fedloom.Federation:
    """Ann's validation examples have no labels of some of her tasks; bob and cat have one task each."""
    g = torch.Generator().manual_seed(0)
    x, v = torch.randn(40, 6, generator=g), torch.randn(10, 6, generator=g)
    labels = {task: (x[:, i] > 0).long() for i, task in enumerate("ab")}
    known = {task: (v[:, i] > 0).long() - (task in without) * 2 for i, task in enumerate("ab")}
    clients = {
        "ann": fedloom.Client(
            (x, labels), val=(v, {task: y.clamp(min=-1) for task, y in known.items()}), tasks=["a", "b"]
        ),
        **{
            name: fedloom.Client((x, {task: labels[task]}), val=(v, {task: (v[:, 0] > 0).long()}), tasks=[task])
            for name, task in (("bob", "a"), ("cat", "b"))
        },
    }
    return fedloom.Federation(clients, {task: fedloom.task(classes=2) for task in "ab"}, test=(x, labels))


def _net() -> Any:
    return fedloom.model(torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.ReLU()), heads="linear")


@pytest.mark.parametrize("samples", [None, 4])
def test_a_task_without_labels_where_models_are_measured_does_not_count(samples: int | None) -> None:
    section = {"similarity": {"signals": {"cross-loss": 1}, "cross_loss": "negative", "samples": samples}}
    federation = _partly_labelled("b")
    run = fedloom.run(
        federation, model=_net(), rounds=1, progress=Progress(), peers={**section, "weights": {"kind": "uniform"}}
    )
    ((_, about),) = [one for one in run.run.records("peer") if one[1]["peer"] == "ann"]
    assert about["neighbours"] == ["bob", "cat"]
    # those of one task, with its half of the weight: far below the sum over both
    assert all(-0.6 < similarity < -0.1 for similarity in about["similarity"].values())


@pytest.mark.parametrize(
    ("without", "model", "signal", "why"),
    [
        ("ab", _net, "cross-loss", r"those of client 'ann' have no label of its tasks \(a, b\)"),
        ("ab", _net, "disparity", r"those of client 'ann' have no label of its tasks \(a, b\)"),
        ("", lambda: Whole(), "features", "reads the output of an encoder, but the model is one module"),
    ],
)
def test_a_signal_that_a_peer_cannot_give_is_refused(without: str, model: Any, signal: str, why: str) -> None:
    federation = _partly_labelled(*without)
    with pytest.raises(RecipeError, match=why):
        fedloom.run(
            federation, model=model(), rounds=1, progress=Progress(), peers={"similarity": {"signals": {signal: 1}}}
        )


class Whole(torch.nn.Module):
    """A model of both tasks in one module."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Linear(6, 2), torch.nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"a": self.a(x), "b": self.b(x)}


def test_a_graph_in_a_file_that_changes_is_refused(tmp_path: Path) -> None:
    file, folder = tmp_path / "links.txt", tmp_path / "run"
    file.write_text("digit-0 parity-0")
    with pytest.raises(Stop):
        fedloom.run(load_recipe(*SHORT, f"peers.graph={{name: edge-list, file: {file}}}"), folder, progress=Crash())
    file.write_text("digit-0 holes-0")
    with pytest.raises(StateError, match="the graph of the peers has changed since the run began"):
        fedloom.resume(folder)
    file.write_text("# the same links\nparity-0 digit-0")
    assert fedloom.resume(folder).run.info["status"] == "finished"


@pytest.mark.parametrize("change", ["graph={name: ring, hops: 9}", "scenario={churn: {digit-9: {joins: 2}}}"])
def test_peers_that_do_not_fit_are_refused_before_anything_is_written(tmp_path: Path, change: str) -> None:
    with pytest.raises(RecipeError, match="topology 'ring': hops must be below|no peer 'digit-9'"):
        fedloom.run(load_recipe(*SHORT, f"peers.{change}"), tmp_path / "run")
    assert not (tmp_path / "run").exists()
