"""Test what a node may send, spoilt at random: it is refused with a sentence, or what is made of it works.

Payloads, peer messages and hellos of honest nodes are spoilt in one to three places, and so are messages of Flower that
hold them. Nothing but a RefusedError may come out, and what is accepted passes the server's stages.
"""

from __future__ import annotations

import copy
import hashlib
import json
import random
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from fedloom.core.context import Ctx, State
from fedloom.federation.rounds.build import build
from fedloom.federation.rounds.built import Built
from fedloom.federation.rounds.messages import Payload, rows_of
from fedloom.federation.rounds.server import dispatch, server_init, server_step
from fedloom.federation.rounds.worker import TrainJob, Worker
from fedloom.training.flat import integer_buffers
from tests_support import load_recipe
from trials.hostile import STRANGE
from trials.scale import cases

pytest.importorskip("flwr")

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord

from fedloom.engines.api import run
from fedloom.engines.flower.at_nodes import AtNodes
from fedloom.engines.flower.nodes import NodeReport, agreed, federation_of
from fedloom.engines.flower.received import limit_of, open_reply, payload_of, turn_of
from fedloom.engines.flower.wire import RefusedError, encode, reading
from fedloom.engines.peers.messages import acquainted, count
from fedloom.engines.peers.rounds import community_of
from fedloom.engines.peers.transport import PeerMessage

METHODS = (
    ("method={name: fedavg, codec: sparse}", "model={name: resnet10, width: 4}"),
    ("method=fednova", "model.heads=own"),
    ("method=scaffold",),
    ("method=fedproto",),
    ("method=ifca",),
    ("method=fedsoft",),
    ("method=matu", "model.heads=own"),
    ("method=fedhca2", "model.heads=own"),
    ("method=fedga",),
)
PAYLOADS, MESSAGES, HELLOS, PEER_MESSAGES = cases(25, 500), cases(60, 3000), cases(150, 3000), cases(60, 3000)
"""Payloads of each method, messages, hellos and peer_messages."""
PLAIN: tuple[Any, ...] = (*STRANGE, 1e300, "\x1b[2J\n")
Rng = random.Random


def strange(rng: Rng, like: Any) -> Any:
    """Something else: of a tensor often another tensor."""
    if not isinstance(like, Tensor) or rng.random() < 0.2:
        return copy.deepcopy(rng.choice((*PLAIN, torch.zeros(2), torch.tensor(1.5))))
    flat = like.reshape(-1).clone()
    kind = rng.randrange(7)
    if kind == 0:
        return flat[: rng.randrange(len(flat) + 1)]
    if kind == 1:
        return like.to(rng.choice((torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool)))
    if kind == 2 and flat.is_floating_point() and len(flat):
        flat = flat.double()
        flat[rng.randrange(len(flat))] = rng.choice((1e300, float("nan"), -float("inf"), -1e-3, 3.0))
        return flat.view(like.shape)
    if kind == 3 and not flat.is_floating_point() and flat.dtype != torch.bool and len(flat):
        flat[rng.randrange(len(flat))] = rng.choice((0, 1, 100, 2**7))
        return flat.view(like.shape)
    if kind == 4:
        return torch.cat([flat, flat[:1]])
    if kind == 5:
        return like[None]
    return like.to(torch.float64) * rng.choice((-1, 0, 1e300))


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """All (holder, key) in a tree."""
    for key, inner in list(value.items() if isinstance(value, dict) else enumerate(value)):
        yield value, key
        if isinstance(inner, dict | list):
            yield from places(inner)


def spoilt(tree: Any, rng: Rng) -> Any:
    """A copy with one to three places changed, left out, added or called otherwise."""
    tree = copy.deepcopy(tree)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        found = list(places(tree))
        if not found:
            return copy.deepcopy(rng.choice(PLAIN))
        holder, key = rng.choice(found)
        kind = rng.randrange(8)
        if kind == 0:
            del holder[key]
        elif kind == 1 and isinstance(holder, dict):
            holder[rng.choice(("", "x", "values", "\u2028"))] = holder.pop(key)
        elif kind == 2 and isinstance(holder, dict):
            holder["more"] = strange(rng, torch.zeros(3))
        else:
            holder[key] = strange(rng, holder[key])
    return tree


def tried(job: Callable[[], Any]) -> Any:
    """Return what a job returns; None where it is refused. Anything but a RefusedError fails the trial."""
    try:
        with reading():
            return job()
    except RefusedError as error:
        why = str(error)
    assert why.isprintable()
    assert len(why) < 2000
    return None


class Server:
    """A recipe made concrete, with the honest payloads of a round."""

    def __init__(self, *changes: str) -> None:
        self.recipe = load_recipe(*changes)
        self.built: Built = build(self.recipe)
        built = self.built
        worker = Worker(built.setup)
        initial = built.layout.flatten(built.module).detach()
        self.state: State = server_init(built.method, built.layout, initial, integer_buffers(built.module))
        self.trees: dict[str, Any] = {}
        clients, states = sorted(built.federation.clients), dict[str, State]()
        for round in (1, 2):  # broadcast models and prototypes are there from the second on
            messages = dispatch(built, self.state, clients)
            done = {c: worker.train(TrainJob(c, round, messages[c], states.get(c, {}))) for c in clients}
            states = {client: each.state for client, each in done.items()}
            self.trees = {client: each.payload.tree() for client, each in done.items()}
            if round == 1:
                self.step({client: each.payload for client, each in done.items()}, round)

    def step(self, payloads: dict[str, Payload], round: int, keep: bool = True) -> State:
        built = self.built
        rows = rows_of(built, list(payloads))
        ctx = Ctx(round, 0, rows, len(rows))
        server = server_step(built, payloads.values(), self.state, ctx)
        self.state = server if keep else self.state
        return server


@cache
def server(*changes: str) -> Server:
    return Server(*changes)


@pytest.mark.parametrize("changes", METHODS, ids=lambda c: c[0].split("=")[1].strip("{}").split(",")[0])
def test_payloads(changes: tuple[str, ...], record_property: Callable[[str, object], None]) -> None:
    here, rng, accepted = server(*changes), Rng(0), 0
    names = sorted(here.trees)
    honest = {name: Payload.of(name, here.trees[name]) for name in names}
    for i in range(PAYLOADS):
        name = names[i % len(names)]
        tree = spoilt(here.trees[name], rng)

        def received(name: str = name, tree: Any = tree) -> Payload:
            return payload_of(here.built, name, tree)

        payload = tried(received)
        if payload is not None:
            accepted += 1
            here.step({**honest, name: payload}, 2, keep=False)
            here.step({name: payload}, 2, keep=False)
    assert tried(lambda: payload_of(here.built, names[0], here.trees[names[0]])) is not None
    record_property("cases", PAYLOADS)
    record_property("accepted", accepted)


def test_messages(record_property: Callable[[str, object], None]) -> None:
    """Flower's records themselves: arrays whose bytes are damaged, other types, other names."""
    here, rng, accepted = server(*METHODS[0]), Rng(1), 0
    name = min(here.trees)
    limit = limit_of(here.built, name)
    for _ in range(MESSAGES):
        content = encode(here.trees[name], {"client": name, "run": "r", "round": 2}, {"seconds": 1.0})
        record = rng.choice(("payload", "payload", "meta", "metrics"))
        kind = rng.randrange(6)
        if kind == 0:
            del content[record]
        elif kind == 1:
            content[record] = rng.choice((ConfigRecord({"x": "y"}), MetricRecord({"x": 1}), ArrayRecord({})))
        elif record == "payload":
            array = content[record][rng.choice(list(content[record]))]
            data, at = bytearray(array.data), rng.randrange(min(len(array.data), 200))
            data[at : at + rng.choice((0, 1, 4))] = rng.randbytes(rng.choice((0, 1, 4)))
            array.data, array.stype = bytes(data), rng.choice((array.stype, array.stype, array.stype, "pickle"))
        else:
            meta = dict(content["meta"])
            key = rng.choice(list(meta))
            meta[key] = rng.choice(("", "[" * 50_000, 1, -1.0, b"\x00", ["x"], True, "{}", '[{"$tensor": "9"}, {}]'))
            content["meta"] = ConfigRecord(meta)

        def received(content: Any = content) -> Payload:
            return payload_of(here.built, name, open_reply(content, limit, client=name, run="r", round=2)[0])

        accepted += tried(received) is not None
    record_property("cases", MESSAGES)
    record_property("accepted", accepted)


def test_hellos(record_property: Callable[[str, object], None]) -> None:
    rng, accepted = Rng(2), 0
    tasks = [
        {"kind": "Classification", "name": name, "channels": c, "weight": 1.0} for name, c in (("a", 2), ("b", 10))
    ]
    weights, sizes = {"a": 1.0, "b": 2.0}, {"train": 50, "val": 5, "test": 9}
    plain = {
        "client": "x",
        "tasks": tasks,
        "weights": weights,
        "sizes": sizes,
        "domain": None,
        "input_shape": [1, 8, 8],
    }
    honest = NodeReport.read({**plain, "client": "y"}, "y")
    for _ in range(HELLOS):
        told = spoilt(plain, rng)
        report = tried(lambda told=told: NodeReport.read(told, "x"))
        if report is not None:
            accepted += 1
            together = agreed({"x": report, "y": honest, "z": honest})[0]
            assert {"y", "z"} <= together.keys()
            federation, _, partition = federation_of(together, True)
            assert len(json.dumps(partition.to_json())) < 10_000
            assert all(len(client.train) for client in federation.clients.values())
    record_property("cases", HELLOS)
    record_property("accepted", accepted)


def respelt(peer_message: PeerMessage, rng: Rng) -> bytes:
    """A peer message with other values, tensors or bytes, and a checksum that is right."""
    if rng.random() < 0.7:
        tree = {
            "kind": peer_message.kind,
            "sender": peer_message.sender,
            "round": peer_message.round,
            "layout": peer_message.layout,
        }
        tree = spoilt({**tree, "tensors": dict(peer_message.tensors), "values": dict(peer_message.values)}, rng)
        try:
            return PeerMessage(**tree).encoded
        except Exception:
            pass  # nothing that can be written down
    body, at = bytearray(peer_message.encoded[16:]), rng.randrange(300)
    body[at : at + rng.choice((0, 1, 8))] = rng.randbytes(rng.choice((0, 1, 8)))
    return hashlib.blake2b(body, digest_size=16).digest() + bytes(body)


def test_letters(
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:
    seen: dict[tuple[str, str], PeerMessage] = {}
    honest = AtNodes._answers

    def answers(self: AtNodes, *args: Any, **options: Any) -> Iterator[Any]:
        for client, told, numbers in honest(self, *args, **options):
            for _, data in getattr(told, "peer_messages", ()):
                peer_message = PeerMessage.decode(data.numpy().tobytes())
                seen[client, peer_message.kind] = peer_message
            yield client, told, numbers

    monkeypatch.setattr(AtNodes, "_answers", answers)
    peers = "peers={similarity: {signals: {gradient: 1.0, overlap: 1.0}}, choose: {top: 2}}"
    recipe = load_recipe(peers, "training.rounds=1", "runtime.engine=flower", "model.heads=own")
    run(recipe, tmp_path_factory.mktemp("peers") / "run")
    assert {kind for _, kind in seen} == {"signal", "request", "model"}
    built, rng, accepted = build(recipe), Rng(3), 0
    community, found = community_of(built), sorted(seen.items())
    for i in range(PEER_MESSAGES):
        (client, _), peer_message = found[i % len(found)]
        data = respelt(peer_message, rng)

        def told(client: str = client, data: bytes = data) -> PeerMessage:
            pair = [min(built.federation.clients), torch.frombuffer(bytearray(data), dtype=torch.uint8)]
            tree: dict[str, Any] = {"peer_messages": [pair], "records": [], "events": [], "up": [], "down": []}
            turn_of(built, community, client, 1, tree)
            return PeerMessage.decode(data)

        read = tried(told)
        if read is not None:
            accepted += 1
            receiver = community.context.at(max(name for name in built.federation.clients if name != client))
            assert read.kind == "request" or client in acquainted(receiver, [read]).clients
            assert sum(count(receiver, read).values()) == read.nbytes
    record_property("cases", PEER_MESSAGES)
    record_property("accepted", accepted)
