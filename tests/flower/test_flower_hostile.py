"""One authorised node that sends what no honest node would: it loses its answer or its place, and others nothing."""

from __future__ import annotations

import hashlib
import json
import math
import random
import re
import time
import tracemalloc
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fedloom.core.context import State
from fedloom.core.lazy import need
from fedloom.engines.api import Result, run
from fedloom.engines.flower import Node, client_app
from fedloom.engines.flower.at_nodes import ClientManager
from fedloom.engines.flower.engine import LocalGrid, OverGrid
from fedloom.engines.flower.nodes import NodeReport, federation_of
from fedloom.engines.flower.received import result_of, scores_of, sender_of
from fedloom.engines.peers.transport import PeerMessage
from fedloom.errors import UserError
from fedloom.federation.recipes.schema import recipe_hash
from fedloom.federation.runs import checkpoint
from fedloom.models.tasks.labels import Classification, Ordinal, Regression
from sites_support import SITES, Go, events, recipe, trained

HONEST = sorted({*SITES} - {"lab"})
Spoil = Callable[[dict[str, Any]], object]
Change = Callable[[dict[str, Any], int], object]


def dropped(result: Result) -> list[dict[str, Any]]:
    return [event for event in events(result.folder) if event["event"] == "answer dropped"]


def hostile(monkeypatch: pytest.MonkeyPatch, what: str, change: Change) -> None:
    """From now on the node of "lab" changes what it answers to messages of one kind."""
    honest = getattr(Node, what)

    def answer(self: Node, head: Any, tree: Any) -> Any:
        value, numbers = honest(self, head, tree)
        if self.client == "lab":
            change(value, head["round"])
        return value, numbers

    monkeypatch.setattr(Node, what, answer)


def put(*path: str, value: Any) -> Spoil:
    def change(tree: dict[str, Any]) -> None:
        for key in path[:-1]:
            tree = tree[key]
        tree[path[-1]] = value

    return change


def large(*path: str) -> Spoil:
    """Finite as float64, infinite as float32."""

    def change(tree: dict[str, Any]) -> None:
        *above, last = path
        for key in above:
            tree = tree[key]
        tree[last] = torch.full_like(tree[last], 1e300, dtype=torch.float64)

    return change


def replaced(change: Callable[[Tensor], Tensor]) -> Spoil:
    """Other values of the update."""
    return lambda tree: tree["packed"].update(values=change(tree["packed"]["values"]))


def negative_variance(tree: dict[str, Any]) -> None:
    tree["buffers"] = -tree["buffers"].abs() - 1


def other_classes(tree: dict[str, Any]) -> None:
    tree["extra"]["prototype_labels"][:, 1] += 7


def half_a_point(tree: dict[str, Any]) -> None:
    tree["extra"]["prototypes"] = tree["extra"]["prototypes"][:, :-1]


def another_rank(tree: dict[str, Any]) -> None:
    tree["packed"]["corners"] += 3


LORA = (
    "model={name: tiny-vit, width: 16, depth: 1, num_heads: 2, lora: {rank: 2}}",
    "method.add={flora: {ranks: {lab: 1}}}",
)
SHEAF = ("method={name: sheaf-fmtl, gamma: 0.001}",)
BATCH_NORM = "model={name: resnet10, width: 4}"
PAYLOADS: dict[str, tuple[tuple[str, ...], Spoil, str]] = {
    "n is a tensor": ((), put("n", value=torch.ones(2)), "n: expected 54"),
    "n is a lie": ((), put("n", value=1e9), "n: expected 54"),
    "packed is nan": ((), replaced(lambda values: values * torch.nan), "packed.values: expected finite"),
    "packed is short": ((), replaced(lambda values: values[:-1]), "packed.values: expected"),
    "packed is huge": ((), replaced(lambda values: torch.zeros(3_000_000)), "payload: expected at most "),
    "packed is something else": ((), put("packed", value={"nothing": torch.zeros(1)}), "packed: expected values"),
    "integers": ((), put("integers", value=True), "integers: expected nothing"),
    "side": ((), put("side", value=[]), "side: expected nothing"),
    "extra": ((), put("extra", value=[]), "extra: expected nothing"),
    "finite": ((), put("finite", value=[]), "expected n, tasks"),
    "tasks": (
        ("method=matu",),
        put("tasks", value={"even": 1.0, "digit": 1.0}),
        "tasks: expected a sorted selection of even",
    ),
    "packed 1e300": ((), large("packed", "values"), "packed.values: expected finite"),
    "packed bits": (("method.codec=sparse",), put("packed", "mask", value=torch.ones(9)), "packed: "),
    "scales 1e300": (("method=matu",), large("packed", "scales"), "packed.scales: expected finite"),
    "control 1e300": (("method=scaffold",), large("side", "control"), "side.control: expected finite"),
    "statistics 1e300": ((BATCH_NORM,), large("buffers"), "buffers: expected finite"),
    "variances": ((BATCH_NORM,), negative_variance, "buffers: expected variances of at least 0"),
    "a counter": ((BATCH_NORM,), put("integers", value={}), "integers: expected encoder"),
    "FedNova's a": (("method=fednova",), put("extra", "a", value="x"), "extra.a: expected a number"),
    "FedNova's a < 0": (("method=fednova",), put("extra", "a", value=-3.0), "extra.a: expected a number from 0"),
    "cluster": (("method=ifca",), put("extra", "cluster", value=5.0), "extra.cluster: expected a whole number"),
    "labels": (("method=fedproto",), put("extra", "prototype_labels", value=torch.zeros(4)), "labels: expected"),
    "classes": (("method=fedproto",), other_classes, "expected the classes of the sender's own tasks"),
    "links": (SHEAF, put("extra", "edges", value=torch.zeros(4)), "extra.edges: expected shape"),
    "projections": (SHEAF, large("extra", "projections"), "extra.projections: expected finite"),
    "ranks": (LORA, another_rank, "packed.corners: expected at most "),
    "points": (("method=fedproto",), half_a_point, "extra.prototypes: expected shape"),
}


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(c, marks=pytest.mark.slow) if c is LORA else c
        for c in dict.fromkeys(c for c, _, _ in PAYLOADS.values())
    ],
)
def test_a_field_that_is_not_as_declared_drops_the_answer(
    go: Go, monkeypatch: pytest.MonkeyPatch, changes: tuple[str, ...]
) -> None:
    """Another field a round, from the second to the last but one."""
    if changes is LORA and None in (find_spec("peft"), find_spec("timm")):
        pytest.skip("peft or timm is not installed")
    cases = [(spoil, why) for of, spoil, why in PAYLOADS.values() if of == changes]
    hostile(monkeypatch, "train", lambda tree, round: cases[round - 2][0](tree) if 1 < round < len(cases) + 2 else None)
    result = go(*changes, "evaluation.every=20", f"training.rounds={len(cases) + 2}")
    assert trained(result.folder) == [sorted(SITES), *[HONEST] * len(cases), sorted(SITES)]
    assert [event["client"] for event in dropped(result)] == ["lab"] * len(cases)
    for event, (_, why) in zip(dropped(result), cases, strict=True):
        assert why in event["why"], event["why"]
    state, _, _ = checkpoint.load(result.folder, "state", newest=lambda head: head["round"])
    assert all(bool(torch.isfinite(t).all()) for t in tensors(state["server"]) if t.is_floating_point())


def tensors(state: State) -> list[Tensor]:
    return list(checkpoint.split_tree(state)[1].values())


def deep(peer_message: PeerMessage) -> bytes:
    """A peer message with a value that is nested 100,000 deep, which no encoder would write."""
    body = rewritten(peer_message, values={"x": 0})[16:]
    head = body.replace(b'{\\"x\\": 0}', b"[" * 100_000 + b"]" * 100_000)
    size = int.from_bytes(head[:8], "little") + len(head) - len(body)
    body = size.to_bytes(8, "little") + head[8:]
    return hashlib.blake2b(body, digest_size=16).digest() + body


def rewritten(peer_message: PeerMessage, **changes: Any) -> bytes:
    return replace(peer_message, **changes).encoded


PEER_MESSAGES: dict[str, tuple[Callable[[PeerMessage], bytes], str]] = {
    "nested": (deep, "maximum recursion depth"),
    "of another": (lambda m: rewritten(m, sender="office"), "sender: expected 'lab'"),
    "of another round": (lambda m: rewritten(m, round=1), "round: expected"),
    "kind": (lambda m: rewritten(m, kind="gossip"), "expected 'signal' or"),
    "a task it lacks": (lambda m: rewritten(m, values={**m.values, "tasks": {"digit": 1.0}}), "tasks: expected even"),
    "another shape": (lambda m: rewritten(m, tensors={"gradient": torch.zeros(3)}), "gradient: expected shape"),
    "1e300": (
        lambda m: rewritten(m, tensors={n: t.double() + 1e300 for n, t in m.tensors.items()}),
        "gradient: expected shape",
    ),
    "cut": (lambda m: m.encoded[:-3], "its checksum is wrong"),
    "no values": (lambda m: rewritten(m, values=[]), "expected tasks, due"),
}


def test_a_letter_that_is_not_as_declared_reaches_nobody(go: Go, monkeypatch: pytest.MonkeyPatch) -> None:
    """One kind of bad peer message a round, beginning in the second."""
    cases = list(PEER_MESSAGES.values())

    def change(tree: dict[str, Any], round: int) -> None:
        if round > 1:
            bad = [
                (to, cases[round - 2][0](PeerMessage.decode(data.numpy().tobytes())))
                for to, data in tree["peer_messages"]
            ]
            tree["peer_messages"] = [[to, torch.frombuffer(bytearray(data), dtype=torch.uint8)] for to, data in bad]

    hostile(monkeypatch, "peer", change)
    rounds = f"training.rounds={1 + len(cases)}"
    result = go("peers={similarity: {signals: {gradient: 1.0}}}", "evaluation.every=20", rounds)
    assert [event["client"] for event in events(result.folder)] == ["lab"] * len(cases)
    for event, (_, why) in zip(dropped(result), cases, strict=True):
        assert why in event["why"], event["why"]


def test_a_nodes_words_are_its_own(go: Go, monkeypatch: pytest.MonkeyPatch) -> None:
    """An event of a node cannot be taken for the server's, name another client or write to the terminal."""
    evil = 'x"\x1b[31m\nround 9: update dropped: client office'

    def change(tree: dict[str, Any], round: int) -> None:
        tree["events"] = [["update dropped", {"client": "office", "why": evil}], [evil, 3]]

    hostile(monkeypatch, "peer", change)
    told = events(go("peers={}", "evaluation.every=3", "training.rounds=1").folder)
    assert {event["event"] for event in told} == {"node"}
    assert {event["client"] for event in told} == {"lab"}
    for event in told:
        assert event["why"].startswith('its node says "')
        assert event["why"].isprintable()
        assert event["why"].count('"') == 2


TOLD: dict[str, Any] = {
    "events": [["x", {"t": torch.zeros(1)}]],
    "records": [["x", {"t": torch.zeros(1)}]],
    "records ": [["x", {"peer": "office"}]],
    "records  ": [["x", {"kind": "diagnostics"}]],
    "records   ": [["withheld", {"what": "scores", "clients": ["office"]}]],
    "records    ": [["peer", {"peer": "lab", "neighbours": 3}]],
    "records     ": [["diagnostics", {"rows": [], "out": [], "shown": [4], "groups": []}]],
    "up": [["encoder", "", -1]],
    "peer_messages": [["nobody", torch.zeros(1)]],
    "peer_messages ": torch.zeros(3),
}


def test_what_a_peer_tells_beside_letters(go: Go, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another field a round is not as it should be."""
    cases = list(TOLD.items())

    def change(tree: dict[str, Any], round: int) -> None:
        name, value = cases[round - 1]
        tree[name.strip()] = value

    hostile(monkeypatch, "peer", change)
    result = go("peers={}", "evaluation.every=20", f"training.rounds={len(cases)}")
    assert {event["client"] for event in events(result.folder)} == {"lab"}
    assert len(dropped(result)) == len(cases) - 1  # an event is taken as words
    assert '"kind": "diagnostics"' not in (result.folder / "metrics.jsonl").read_text()


def test_numbers_of_a_node_that_have_no_mean_are_nan() -> None:
    """Two of them would end the run where the mean over clients is computed."""
    found = scores_of("0", {"0/even/loss": 1.7e308, "0/even/accuracy": 0.5}, {"even": Classification("even", 2)})
    assert found["even"]["accuracy"] == 0.5
    assert math.isnan(found["even"]["loss"])
    assert math.isnan(result_of({"loss/even": -1.7e308}, {"even": 1.0}).losses["even"])


def hello(monkeypatch: pytest.MonkeyPatch, client: str, change: Callable[[dict[str, Any]], Any]) -> None:
    """The node of a client changes what it reports."""
    honest = Node.hello

    def answer(self: Node, head: Any, tree: Any) -> Any:
        report, numbers = honest(self, head, tree)
        if report is not None and self.client == client:
            change(report)
        return report, numbers

    monkeypatch.setattr(Node, "hello", answer)


HELLOS: dict[str, Spoil] = {
    "a weight of a task it lacks": lambda r: r["weights"].update(digit=1.0),
    "no tasks": lambda r: r.update(tasks=[], weights={}),
    "many tasks": lambda r: r.update(
        tasks=[{**r["tasks"][0], "name": f"t{i}"} for i in range(300)], weights={f"t{i}": 1.0 for i in range(300)}
    ),
    "many more tasks": lambda r: r.update(tasks=[{**r["tasks"][0], "name": f"t{i}"} for i in range(5_000)]),
    "many examples": lambda r: r["sizes"].update(train=50_000_000),
    "many channels": lambda r: r["tasks"][0].update(channels=10**9),
    "no channels": lambda r: r["tasks"][0].update(channels=-1),
    "a task called keys": lambda r: (r["tasks"][0].update(name="keys"), r.update(weights={"keys": 1.0})),
    "a kind that is a list": lambda r: r["tasks"][0].update(kind=[]),
    "infinite weight": lambda r: r["weights"].update(even=float("inf")),
    "large inputs": lambda r: r.update(input_shape=[1 << 20, 1 << 20, 1 << 20]),
    "another name": lambda r: r.update(client="office"),
    "a domain with an escape": lambda r: r.update(domain="\x1b[2J"),
    "a tensor": lambda r: r.update(sizes=torch.zeros(3)),
    "other inputs": lambda r: r.update(input_shape=[3, 8, 8]),
    "another task of the same name": lambda r: (
        r["tasks"][0].update(name="digit", channels=3),
        r.update(weights={"digit": 1.0}),
    ),
}


@pytest.mark.parametrize("case", HELLOS)
def test_one_bad_hello_keeps_no_run_from_starting(
    go: Go, monkeypatch: pytest.MonkeyPatch, case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The others begin once the server has waited, and it says who is missing and why.

    "lab" comes first, so its word stands before others are there.
    """
    hello(monkeypatch, "lab", HELLOS[case])

    def lab_first(grid: LocalGrid) -> None:
        grid.contexts = dict(sorted(grid.contexts.items(), key=lambda item: item[0] != 99))

    result = go("training.rounds=1", "runtime.flower.min_clients=2", change=lab_first)
    assert (result.status, trained(result.folder)) == ("finished", [HONEST])
    (event,) = [e for e in events(result.folder) if e["event"] == "begins without some"]
    assert (event["here"], event["expected"]) == (2, 3)
    assert re.match(r"(at node 99|client 'lab'): \S", event["why"])
    said = capsys.readouterr().out.splitlines()
    assert all(line.isprintable() for line in said)
    (line,) = [line for line in said if line.startswith("begins without some")]
    assert event["why"] in line
    assert "begins without some" in (result.folder / "audit.jsonl").read_text()


def test_fewer_than_the_least_do_not_begin(go: Go, monkeypatch: pytest.MonkeyPatch) -> None:
    hello(monkeypatch, "lab", HELLOS["no tasks"])
    with pytest.raises(UserError) as error:
        go("runtime.flower.min_clients=3")
    text = str(error.value)
    assert text.startswith("2 of 3 nodes reported within 1 s (runtime.flower.wait), expected at least 3 (min_clients)")
    assert "Connected: clinic, office. Absent: at node 99: " in text


def test_who_is_missing_where_the_recipe_knows_the_clients(homes: dict[int, dict[str, str]], tmp_path: Path) -> None:
    """A recipe with its own data has their names, and so has one that lists their keys."""
    one = recipe("training.rounds=1", f"runtime.flower.keys={json.dumps({'lab': '0' * 64, 'never': '1' * 64})}")
    result = run(one, tmp_path / "run", engine=OverGrid(LocalGrid(client_app(one), homes), tmp_path / "run"))
    (event,) = [e for e in events(result.folder) if e["event"] == "begins without some"]
    assert re.fullmatch(
        r"at node 99: client 'lab': runtime.flower.keys lists the key 0+, found \w+; "
        r"client 'never': no node has registered as this client",
        event["why"],
    )


def test_fifty_million_examples_cost_nothing() -> None:
    """What a server keeps of a hello does not grow with what it claims."""
    report = NodeReport(
        client="a",
        tasks=({"kind": "Classification", "name": "even", "channels": 2, "weight": 1.0},),
        weights={"even": 1.0},
        sizes={"train": 9_000_000, "val": 1, "test": 1},
        domain=None,
        input_shape=(1, 8, 8),
    )
    start = time.monotonic()
    tracemalloc.start()
    federation, _, partition = federation_of({"a": report}, True)
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert len(federation.clients["a"].train) == 9_000_000
    assert held < 1_000_000
    assert len(json.dumps(partition.to_json())) < 1000
    assert time.monotonic() - start < 5


def test_nobody_takes_the_name_of_another(homes: dict[int, dict[str, str]], tmp_path: Path) -> None:
    """A name belongs to the key that showed it first, also while its node is away and after a resume."""
    one = recipe("evaluation.every=3", "training.rounds=4")
    grid = LocalGrid(client_app(one), homes)
    impostor = tmp_path / "impostor"
    impostor.mkdir()
    (impostor / "node.yaml").write_text((Path(homes[99]["home"]) / "node.yaml").read_text())
    flwr = need("flwr.app", "flower")
    push, asked = grid.push_messages, {"train": 0}

    def pushed(messages: Any) -> list[str]:
        messages = list(messages)
        asked["train"] += any(m.metadata.message_type == "train.fedloom" for m in messages)
        return push(messages)

    def there() -> list[int]:
        if asked["train"] == 1:  # after round 1 the node of "lab" is away, and another says that it is "lab"
            grid.contexts[7] = flwr.Context(1, 7, {"home": str(impostor)}, flwr.RecordDict(), {})
        return [node for node in grid.contexts if not (node == 99 and asked["train"] in (1, 2))]

    grid.push_messages, grid.get_node_ids = pushed, there  # type: ignore[method-assign]
    result = run(one, tmp_path / "run", engine=OverGrid(grid, tmp_path / "run"))
    assert trained(result.folder) == [sorted(SITES), HONEST, HONEST, sorted(SITES)]
    refused = [e for e in events(result.folder) if e["event"] == "node refused"]
    assert {e["node"] for e in refused} == {7}
    assert "a node of this name first showed the key" in refused[0]["why"]
    keys = json.loads((result.folder / "keys.json").read_text())
    assert keys.keys() == set(SITES)


def test_keys_that_the_recipe_lists(homes: dict[int, dict[str, str]], tmp_path: Path) -> None:
    from fedloom.engines.flower.wire import public_key

    keys = {site: public_key(Path(homes[100 - i]["home"])) for i, site in enumerate(SITES)}
    assert (Path(homes[100]["home"]) / "key").stat().st_mode & 0o077 == 0
    one = recipe(f"runtime.flower.keys={json.dumps(keys)}", "training.rounds=1")
    grid = LocalGrid(client_app(one), homes)
    assert run(one, tmp_path / "a", engine=OverGrid(grid, tmp_path / "a")).status == "finished"
    two = recipe(f"runtime.flower.keys={json.dumps({**keys, 'lab': keys['office']})}", "runtime.flower.min_clients=3")
    with pytest.raises(UserError, match="2 of 3 nodes"):
        run(two, tmp_path / "b", engine=OverGrid(LocalGrid(client_app(two), homes), tmp_path / "b"))


def test_a_failure_that_passes_is_tried_again(go: Go, monkeypatch: pytest.MonkeyPatch) -> None:
    honest, failed = Node.train, []

    def train(self: Node, head: Any, tree: Any) -> Any:
        if self.client == "lab" and head["round"] not in failed:
            failed.append(head["round"])
            raise OSError("the share is not mounted")
        return honest(self, head, tree)

    monkeypatch.setattr(Node, "train", train)
    result = go()
    assert failed == [1, 2, 3]
    assert trained(result.folder) == [sorted(SITES)] * 3
    assert events(result.folder) == []


def test_answers_that_cannot_be_fetched_do_not_stand_in_the_way(go: Go) -> None:
    """Flower raises as long as one of several answers is malformed; the link itself fails now and then."""

    def change(grid: LocalGrid) -> None:
        pull, push, count, rng = grid.pull_messages, grid.push_messages, {"push": 0}, random.Random(0)

        def pulled(ids: Any) -> Any:
            if rng.random() < 0.3:
                raise ConnectionError("the link is down")
            for each in ids:
                message = grid._waiting.get(each)
                kind = "" if message is None else message.metadata.message_type
                if kind == "train.fedloom" and message.metadata.dst_node_id == 99:
                    raise ValueError("Expected 1 child objects but got 2")
            return pull(ids)

        def pushed(messages: Any) -> Any:
            count["push"] += 1
            if count["push"] % 4 == 3:
                raise ConnectionError("the link is down")
            return push(messages)

        grid.pull_messages, grid.push_messages = pulled, pushed  # type: ignore[method-assign]

    result = go("runtime.flower.deadline=300", "training.rounds=2", change=change)
    assert trained(result.folder) == [HONEST] * 2
    assert {"answer cannot be fetched" in e["why"] for e in dropped(result)} == {True}


def test_a_node_that_dies_is_not_waited_for(go: Go) -> None:
    """The deadline is far away, and the clock stands still while nobody waits."""

    def change(grid: LocalGrid) -> None:
        push = grid.push_messages

        def pushed(messages: Any) -> list[str]:
            messages = list(messages)
            if any(m.metadata.message_type == "train.fedloom" for m in messages):
                grid.silent.add(99)
            return push(messages)

        def there() -> list[int]:
            return [node for node in grid.contexts if node not in grid.silent]

        grid.push_messages, grid.get_node_ids = pushed, there  # type: ignore[method-assign]

    result = go("runtime.flower.deadline=1000000", "evaluation.every=3", change=change)
    assert trained(result.folder) == [HONEST] * 3
    assert "its node has disconnected" in dropped(result)[0]["why"]


def test_a_refused_node_is_asked_again_after_five_minutes(homes: dict[int, dict[str, str]]) -> None:
    """Not before every message: each time the others would wait for its answer. What it said first is not forgotten."""
    one = recipe()
    grid = LocalGrid(client_app(one), homes)
    sent: list[int] = []
    push = grid.push_messages
    grid.push_messages = lambda messages: sent.append(len(messages)) or push(messages)  # type: ignore[func-returns-value, method-assign]
    client_manager = ClientManager(grid, "another recipe", one.runtime.flower)
    client_manager.log = lambda event, fields: None
    clock = ClientManager.wait.__globals__["time"]
    client_manager.meet()
    why = client_manager.missing()
    assert why.count("recipe") >= len(homes) == sent[0]
    for seconds in (0, 60, 200):
        clock.sleep(seconds)
        client_manager.meet()
    assert len(sent) == 1
    clock.sleep(50)
    grid.silent |= homes.keys()
    client_manager.meet()
    assert len(sent) == 2
    assert client_manager.missing() == why


def test_a_node_that_needs_longer_than_a_minute_joins(homes: dict[int, dict[str, str]]) -> None:
    """Its answer to the first hello comes too late; the next one waits twice as long."""
    one = recipe("runtime.flower.nodes=2")
    grid = LocalGrid(client_app(one), homes)
    client_manager = ClientManager(grid, recipe_hash(one), one.runtime.flower)
    clock = ClientManager.wait.__globals__["time"]
    pull, pushed = grid.pull_messages, dict[str, float]()
    push = grid.push_messages

    def late(ids: Sequence[str]) -> Iterable[Any]:
        ready = [each for each in ids if clock.monotonic() - pushed[each] >= 100]
        return pull(ready) if ready else []

    def timed(messages: Iterable[Any]) -> list[str]:
        ids = [*push(messages)]
        return pushed.update(dict.fromkeys(ids, clock.monotonic())) or ids

    grid.push_messages, grid.pull_messages = timed, late  # type: ignore[method-assign, assignment]
    client_manager.log = lambda event, fields: None
    assert client_manager.wait(2, 240) == len(homes)
    assert 160 <= clock.monotonic() < 240


def test_a_silent_node_does_not_keep_the_others_waiting(homes: dict[int, dict[str, str]], tmp_path: Path) -> None:
    """It has a minute to say who it is, whatever the server is ready to wait for the others; then it may try again."""
    one = recipe("runtime.flower.nodes=2", "runtime.flower.wait=100000")
    grid = LocalGrid(client_app(one), homes)
    grid.silent.add(99)
    client_manager = ClientManager(grid, recipe_hash(one), one.runtime.flower)
    clock = ClientManager.wait.__globals__["time"]
    assert client_manager.wait(2, 100_000) == 2
    assert clock.monotonic() < 70
    grid.silent.clear()
    clock.sleep(30)
    client_manager.meet()
    assert sorted(client_manager.there()) == sorted(SITES)


def test_prototypes_of_ordered_classes_are_expected_too() -> None:
    tasks = {"age": Regression("age"), "grade": Ordinal("grade", 5), "site": Classification("site", 3)}
    built = SimpleNamespace(module=SimpleNamespace(heads=[*tasks], encoder=SimpleNamespace(features=8)))
    client = SimpleNamespace(tasks={name: (task, 1.0) for name, task in tasks.items()})
    assert sender_of(built, client).classes == {1: 5, 2: 3}  # type: ignore[arg-type]
