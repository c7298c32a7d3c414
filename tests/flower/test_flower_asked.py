"""A server that asks for more than the recipe makes necessary: the node refuses, and its audit file says so."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from fedloom.engines.api import Result, run
from fedloom.errors import UserError
from fedloom.federation.runs.reader import Run
from fedloom.federation.runs.track import verified
from sites_support import Demand, Go, Server, events, recipe

pytest.importorskip("flwr")

from fedloom.engines.flower import client_app, received
from fedloom.engines.flower.engine import LocalGrid, OverGrid
from fedloom.engines.flower.node import MOST
from fedloom.engines.flower.wire import RefusedError
from fedloom.engines.peers.transport import PeerMessage
from fedloom.federation.runs.checkpoint import join_tree

Homes = dict[int, dict[str, str]]
LOCAL = "privacy={clip: 1, noise: 2.0, delta: 1.0e-3, trust: local}"
UNIFORM = "method={name: fedper, weights: uniform}"


def noted(server: Server, what: str) -> list[dict[str, Any]]:
    """Return what the clinic wrote down in this run."""
    lines = verified(server.home("clinic") / "audit.jsonl")
    return [line for line in lines if line["what"] == what and line.get("run") in (None, server.at.run_id)]


ELSE: dict[str, tuple[dict[str, Any], str]] = {
    "train": ({"split": "train"}, "jobs|split: expected 'val' or 'test', found 'train'"),
    "a split that is not measured": ({"split": "val"}, "split: expected 'test', found 'val'"),
    "the client's own model": ({"personal": True}, "personal: expected False, found True"),
    "a task of another": ({"tasks": ["even"]}, "expected 'digit', found 'even'"),
    "a model of a task": ({"task": "digit"}, "task: expected nothing"),
    "the data of another": ({"client": "lab"}, "client: expected 'clinic', found 'lab'"),
    "another round": ({"round": 2}, "round: expected 1, found 2"),
    "a text": ({"split": None}, "split: expected 'test'"),
    "no tasks": ({"tasks": 3}, "cannot be read: TypeError"),
    "more": ({"more": 1}, "expected key, client, split"),
}


@pytest.mark.parametrize("case", ELSE)
def test_only_what_the_recipe_has_measured_is_answered(homes: Homes, case: str) -> None:
    """The recipe measures the global model on test data; train is never answered."""
    server = Server(homes, "evaluation.splits=[test]" if case != "train" else "seed=0")
    changed, why = ELSE[case]
    with pytest.raises(RefusedError, match=why.split("|")[-1]):
        server.evaluate(job=changed)
    assert why.split("|")[-1] in noted(server, "refuse")[-1]["why"]
    assert noted(server, "evaluate") == []
    assert server.evaluate()[1]["0/digit/accuracy"] >= 0


def test_an_evaluation_is_on_record(homes: Homes) -> None:
    server = Server(homes)
    server.evaluate(round=0, job={"split": "val"})
    (line,) = noted(server, "evaluate")
    assert (line["round"], line["models"], line["splits"], line["tasks"]) == (0, ["global"], ["val"], ["digit"])


def test_one_message_may_not_ask_twice(homes: Homes) -> None:
    server = Server(homes)
    job = {"key": 0, "client": "clinic", "split": "val", "tasks": ["digit"], "round": 1, "personal": False}
    job |= {"task": None, "costly": False, "message": server.message(), "state": {}}
    with pytest.raises(RefusedError, match="expected each model at most once per split"):
        server.ask("evaluate.fedloom", {"jobs": [job, {**job, "key": 1, "message": server.message(1.0)}]})


def test_a_round_has_so_many_evaluations_also_after_the_node_began_anew(homes: Homes) -> None:
    server = Server(homes)
    for moved in range(MOST):
        server.evaluate(moved=float(moved))
        server.evaluate(moved=float(moved))  # the same again tells nothing new
    server.restart()
    with pytest.raises(
        RefusedError, match=rf"round 1: this node has answered {MOST} messages to evaluate, expected at most"
    ):
        server.evaluate(moved=9.0)
    assert server.evaluate(moved=0.0)
    assert len(noted(server, "evaluate")) == 2 * MOST + 1
    assert server.evaluate(round=2, moved=9.0)


@pytest.mark.parametrize("round", [-1, 4, 10**6])
def test_rounds_end_where_the_recipe_says(homes: Homes, round: int) -> None:
    server = Server(homes)
    for ask in (server.evaluate, server.train):
        with pytest.raises(RefusedError, match="round: expected a whole number from 0 to 3"):
            ask(round=round)


def test_nothing_is_measured_after_rounds_that_the_recipe_leaves_out(homes: Homes) -> None:
    server = Server(homes, "evaluation.every=2")
    with pytest.raises(RefusedError, match="round 1: the recipe \\(evaluation.every: 2\\) measures nothing"):
        server.evaluate(round=1)
    assert server.evaluate(round=2)
    assert server.evaluate(round=3), "the last one"


def test_training_tells_losses_only_so_often(homes: Homes) -> None:
    """Each answer has the mean loss on training data under a model of the server's choice."""
    server = Server(homes)
    for moved in range(MOST):
        server.train(moved=float(moved))
    with pytest.raises(RefusedError, match=f"has answered {MOST} messages to train"):
        server.train(moved=9.0)
    assert server.train(moved=0.0)


def test_noise_that_is_drawn_anew_counts_the_same_message_too(homes: Homes) -> None:
    pytest.importorskip("dp_accounting", reason="needs the extra `privacy`")
    server = Server(homes, UNIFORM, LOCAL)
    for _ in range(MOST):
        server.train()
    with pytest.raises(RefusedError, match=f"has answered {MOST} messages to train"):
        server.train()


def test_models_are_measured_after_training_only_where_the_recipe_says_so(homes: Homes) -> None:
    server = Server(homes)
    with pytest.raises(RefusedError, match="expected False, found True"):
        server.train(evaluate_trained=True)
    assert noted(server, "train") == []
    server = Server(homes, "evaluation.models=[global, trained]", "evaluation.splits=[test]")
    _, numbers = server.train(evaluate_trained=True)
    assert {name for name in numbers if name.startswith("trained/")} == {
        f"trained/test/digit/{metric}" for metric in ("accuracy", "macro_f1", "loss")
    }
    (line,) = noted(server, "train")
    assert (line["models"], line["splits"]) == (["trained"], ["test"])


def test_turns_of_peers_are_bounded_too(homes: Homes) -> None:
    """By cross-loss a peer measures the models in peer messages on its own data."""
    server = Server(homes, "peers={similarity: {signals: {cross-loss: 1.0}}}")
    tree = {"turn": "train", "names": ["clinic", "lab"], "peer_messages": [], "state": {}, "evaluate_trained": False}
    server.ask("train.peer", tree)
    for turn in ("choose",) * MOST:
        tree = {**tree, "turn": turn, "names": [*tree["names"], f"x{len(tree['names'])}"]}
        server.ask("train.peer", tree)
    with pytest.raises(RefusedError, match=f"has answered {MOST} messages to turn choose"):
        server.ask("train.peer", {**tree, "names": ["clinic"]})
    with pytest.raises(RefusedError, match="expected 'train' or"):
        server.ask("train.peer", {**tree, "turn": "tell"})


def told(numbers: dict[str, float]) -> set[str]:
    return {name.partition("/")[0] for name in numbers} - {"seconds", "waiting"}


@pytest.mark.parametrize(
    ("terms", "trained", "measured"),
    [
        ({}, {"steps", "examples", "loss"}, {"accuracy", "macro_f1", "loss"}),
        ({"withhold": ["losses"]}, {"steps", "examples"}, {"accuracy", "macro_f1"}),
        ({"withhold": ["scores"]}, {"steps", "examples", "loss"}, set()),
    ],
)
def test_what_a_site_withholds_does_not_leave(
    homes: Homes, demand: Demand, terms: dict[str, Any], trained: set[str], measured: set[str]
) -> None:
    demand(**terms)
    server = Server(homes)
    payload, numbers = server.train()
    assert told(numbers) == trained
    assert payload["n"] == 54
    tree, scores = server.evaluate()
    assert {name.rpartition("/")[2] for name in scores} == measured
    assert tree == ({} if measured else {"withheld": True})


def test_a_number_of_examples_that_nobody_reads_is_not_sent(homes: Homes, demand: Demand) -> None:
    counted, plain = Server(homes), Server(homes, UNIFORM)
    assert counted.nodes.reports["clinic"].sizes.train == 54
    assert plain.nodes.reports["clinic"].sizes.model_dump() == {"train": 1, "val": 1, "test": 1}
    payload, numbers = plain.train()
    assert payload["n"] == 1
    assert told(numbers) == {"loss"}
    demand(withhold=["examples"])
    assert Server(homes, UNIFORM).train()[0]["n"] == 1
    assert sorted(Server(homes).nodes.there()) == ["lab", "office"], "the mean by size reads it"


RESNET = "model={name: resnet10, width: 4}"


@pytest.mark.parametrize("terms", [{}, {"withhold": ["examples"]}])
def test_counters_of_batches_do_not_tell_the_steps(homes: Homes, demand: Demand, terms: dict[str, Any]) -> None:
    demand(**terms)
    payload, _ = Server(homes, UNIFORM, RESNET).train()
    assert payload["integers"]
    assert {int(value) for value in payload["integers"].values()} == {0 if terms else 2}


def test_counters_of_batches_do_not_tell_the_steps_to_peers(
    go: Go, demand: Demand, monkeypatch: pytest.MonkeyPatch
) -> None:
    demand(withhold=["examples"])
    heard: dict[str, set[int]] = {}

    def listen(built: Any, community: Any, client: str, round: int, tree: Any) -> received.TurnResult:
        for _, data in tree["peer_messages"]:
            message = PeerMessage.decode(data.numpy().tobytes())
            if message.kind == "model":
                model = join_tree(message.values["payload"], message.tensors)
                heard.setdefault(client, set()).update(int(value) for value in model["integers"].values())
        return turn_of(built, community, client, round, tree)

    turn_of = received.turn_of
    monkeypatch.setattr(received, "turn_of", listen)
    go(UNIFORM, RESNET, "peers={weights: {kind: uniform}}", "training.rounds=1", "evaluation.models=[personal]")
    assert heard == {"clinic": {0}, "lab": {2}, "office": {2}}


def test_a_refusal_of_a_recipe_has_no_path_of_the_site(homes: Homes, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("{name: sites, data: nodes, partition: nodes, modle: small-cnn}")
    one, grid = recipe(), LocalGrid(client_app(tmp_path / "recipe.yaml"), homes)
    with pytest.raises(UserError, match="the recipe is not a valid recipe") as refused:
        run(one, tmp_path / "run", engine=OverGrid(grid, tmp_path / "run"))
    assert str(tmp_path) not in str(refused.value)


def test_local_trust_withholds_unless_the_sites_own_terms_say_otherwise(go: Go, homes: Homes, demand: Demand) -> None:
    pytest.importorskip("dp_accounting", reason="needs the extra `privacy`")
    demand(withhold=[])
    result = go(UNIFORM, LOCAL, "training.rounds=1")
    assert result.status == "finished"
    lines = [json.loads(text) for text in (result.folder / "metrics.jsonl").read_text().splitlines()]
    quiet = {"kind": "withheld", "clients": ["lab", "office"]}
    assert [r for r in lines[0]["records"] if r["kind"] == "withheld"] == [{**quiet, "what": "scores"}]
    assert [r for r in lines[1]["records"] if r["kind"] == "withheld"] == [
        {**quiet, "what": "losses"},
        {**quiet, "what": "scores"},
    ]
    assert {each["client"] for each in lines[1]["metrics"]} == {"clinic"}
    assert {each["client"]: each["loss"] is None for each in lines[1]["train"]} == {
        "clinic": False,
        "lab": True,
        "office": True,
    }
    assert all(("examples" in each) is False for each in lines[1]["train"])
    assert "train" not in json.loads((result.folder / "run.json").read_text())["clients"]["lab"]
    assert result.final().values.keys() == {"digit"}
    run_id = json.loads((result.folder / "flower.json").read_text())["run"]
    (lab,) = (Path(config["home"]) for config in homes.values() if config["home"].endswith("lab"))
    own = [json.loads(text) for text in (lab / "runs" / run_id / "metrics.jsonl").read_text().splitlines()]
    assert any(each["metric"] == "accuracy" for line in own for each in line["metrics"]), "the site has its scores"


def test_a_run_without_any_scores_ends_and_says_why(go: Go) -> None:
    pytest.importorskip("dp_accounting", reason="needs the extra `privacy`")
    result = go(UNIFORM, LOCAL, "training.rounds=1", "evaluation.models=[personal, trained]")
    assert result.table() == "no scores: clinic, lab, office withhold them"
    assert Run.read(result.folder).withheld == ("clinic", "lab", "office")
    with pytest.raises(UserError, match="no test metrics up to round 1 .* clinic, lab, office withhold their scores"):
        result.final()


NEEDS: list[tuple[dict[str, Any], tuple[str, ...], str]] = [
    ({"withhold": ["examples"]}, (), "withhold: examples, but fedavg needs them .method.weights is size."),
    ({"withhold": ["examples"]}, ("method=fednova", "method.weights=uniform"), "examples, but fednova sends a beside"),
    ({"withhold": ["examples"]}, ("method={name: fedsoft, weights: uniform}",), "examples, but fedsoft sends share0"),
    ({"withhold": ["losses"]}, ("method=fedga",), "withhold: losses, but fedga sends loss_received beside"),
    ({"withhold": ["scores"]}, ("method=fedga",), "withhold: scores, but fedga sends loss_received beside"),
    ({"withhold": ["scores"]}, ("early_stopping={patience: 2}",), "withhold: scores, but early_stopping reads"),
    ({"withhold": ["losses"]}, ("early_stopping={patience: 2}",), "withhold: losses, but early_stopping reads"),
    (
        {"withhold": ["losses"]},
        ("peers={similarity: {signals: {cross-loss: 1.0}}}",),
        "withhold: losses, but by peers' similarity cross-loss",
    ),
    (
        {"withhold": ["scores"]},
        ("peers={similarity: {signals: {cross-loss: 1.0}}}",),
        "withhold: scores, but by peers' similarity cross-loss",
    ),
    ({}, ("method=fedper", LOCAL), "withhold: examples, but fedper needs them .method.weights is size."),
]


@pytest.mark.parametrize(("terms", "changes", "why"), NEEDS)
def test_a_run_that_needs_what_a_site_withholds_is_refused_there(
    homes: Homes, demand: Demand, tmp_path: Path, terms: dict[str, Any], changes: tuple[str, ...], why: str
) -> None:
    home, one = demand(**terms), recipe(*changes, "runtime.flower.min_clients=3")
    with pytest.raises(UserError, match=r"[02] of 3 nodes reported"):
        run(one, tmp_path / "run", engine=OverGrid(LocalGrid(client_app(one), homes), tmp_path / "run"))
    assert re.search(why, verified(home / "audit.jsonl")[-1]["why"])


def test_a_method_that_reads_losses_works_where_nothing_is_withheld(go: Go) -> None:
    """FedGA's stage reads a client's losses; the server gets what the recipe says, and no more."""
    result: Result = go("method=fedga", "training.rounds=2")
    assert events(result.folder) == []


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("tasks", "{", "cannot be read: JSONDecodeError"),
        ("tasks", '[{"kind": "os:system", "name": "digit"}]', "cannot be read: DataError"),
        ("table", "{", "cannot be read: ValidationError"),
        ("run", None, "run: expected 16 hexadecimal digits, found 'None'"),
    ],
)
def test_what_a_server_says_of_the_run_is_refused_with_a_sentence(
    homes: dict[int, dict[str, str]], key: str, value: str | None, said: str
) -> None:
    server = Server(homes)
    server.at.head = {name: each for name, each in {**server.at.head, key: value}.items() if each is not None}
    with pytest.raises(RefusedError, match=said):
        server.train()
