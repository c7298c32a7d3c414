"""Messages between peers: what survives the wire, and what is dropped without harm."""

from __future__ import annotations

import hashlib
from functools import partial
from typing import Any

import pytest
import torch

from fedloom.engines.peers.transport import Mailbox, Network, Newest, PeerMessage

LAYOUT = "0123456789abcdef"


def message(
    sender: str = "a", round: int = 1, kind: str = "model", layout: str = LAYOUT, value: float = 1.0
) -> PeerMessage:
    return PeerMessage(
        kind, sender, round, layout, {"x": torch.tensor([value, -0.0])}, {"n": 0.1, "extra": {"s": [1, "t"]}}
    )


class Box:
    """A mailbox of "b", and what it logged."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.events: list[dict[str, Any]] = []
        ends = partial(network.post, "b"), partial(network.take, "b")
        self.mailbox = Mailbox("b", LAYOUT, *ends, lambda event, fields: self.events.append(fields))

    @property
    def dropped(self) -> list[str]:
        return [fields["what"] for fields in self.events]


@pytest.fixture
def box() -> Box:
    return Box(Network())


def test_a_message_survives_the_wire() -> None:
    tensors = {
        "half": torch.randn(3, 2).bfloat16(),
        "long": torch.tensor(2**40),
        "none": torch.zeros(0),
        "view": torch.arange(10.0)[::3],
        "wild": torch.tensor([float("nan"), float("inf"), -0.0]),
    }
    values = {"n": 0.1, "far": float("inf"), "task": None, "names": ["a", "ü"]}
    sent = PeerMessage("signal", "peer 1", 3, LAYOUT, tensors, values)
    got = PeerMessage.decode(sent.encoded)
    assert (got.kind, got.sender, got.round, got.layout, got.values) == ("signal", "peer 1", 3, LAYOUT, values)
    assert got.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert got.tensors[name].dtype == tensor.dtype
        raw = [t.contiguous().reshape(-1).view(torch.uint8) for t in (got.tensors[name], tensor)]
        assert torch.equal(*raw), name
    assert sent.nbytes == got.nbytes == 3 * 2 * 2 + 8 + 0 + 4 * 4 + 3 * 4


def test_the_receiver_has_memory_of_its_own(box: Box) -> None:
    x = torch.ones(2)
    box.network.post("a", "b", PeerMessage("model", "a", 1, LAYOUT, {"x": x}).encoded)
    (got,) = box.mailbox.receive(1, "model")
    got.tensors["x"].zero_()
    assert torch.equal(x, torch.ones(2))


def test_messages_come_in_the_order_of_their_senders(box: Box) -> None:
    for sender in ("d", "a", "c"):
        box.network.post(sender, "b", message(sender).encoded)
    assert [m.sender for m in box.mailbox.receive(1, "model")] == ["a", "c", "d"]
    assert box.mailbox.receive(1, "model") == []
    assert box.dropped == []


def changed(at: int) -> bytes:
    data = bytearray(message().encoded)
    data[at] ^= 1
    return bytes(data)


def nested() -> bytes:
    """A message with a right checksum whose values are nested too deep to be read."""
    body = PeerMessage("model", "a", 1, LAYOUT, {}, {"x": 0}).encoded[16:]
    deep = body.replace(b'{\\"x\\": 0}', b"[" * 100_000 + b"]" * 100_000)
    size = int.from_bytes(deep[:8], "little") + len(deep) - len(body)
    body = size.to_bytes(8, "little") + deep[8:]
    return hashlib.blake2b(body, digest_size=16).digest() + body


DAMAGED = {
    **{f"byte {at}": changed(at) for at in (0, 20, 60, -1)},
    "nested": nested(),
    "empty": b"",
    "short": b"short",
    "cut": message().encoded[:-1],
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_message_is_dropped_alone(box: Box, case: str) -> None:
    box.network.post("a", "b", DAMAGED[case])
    box.network.post("c", "b", message("c").encoded)
    assert [m.sender for m in box.mailbox.receive(1, "model")] == ["c"]
    assert box.dropped == ["corrupted"]


def test_late_doubled_and_foreign_messages_are_dropped(box: Box) -> None:
    box.network.post("a", "b", message(round=1, value=5.0).encoded)
    for value in (1.0, 2.0):
        box.network.post("a", "b", message(round=2, value=value).encoded)
    box.network.post("c", "b", message("c", 2, layout="another").encoded)
    (got,) = box.mailbox.receive(2, "model")
    assert float(got.tensors["x"][0]) == 1.0  # the first of the two
    assert sorted(box.dropped) == ["doubled", "late", "wrong layout"]
    box.network.post("a", "b", message(round=2, value=3.0).encoded)
    assert box.mailbox.receive(2, "model") == []
    assert box.dropped[3:] == ["doubled"]


def test_a_peer_that_is_ahead_is_waited_for(box: Box) -> None:
    box.network.post("a", "b", message(round=3).encoded)
    box.network.post("a", "b", message(round=2, kind="signal").encoded)
    assert box.mailbox.receive(2, "model") == []
    assert [m.kind for m in box.mailbox.receive(2, "signal")] == ["signal"]
    assert [m.round for m in box.mailbox.receive(3, "model")] == [3]
    assert box.dropped == []


def test_lost_messages_and_those_taken_back_never_come() -> None:
    asked: list[tuple[int, str, str, int]] = []

    def lost(*what: Any) -> bool:
        asked.append(what)
        return bool(what[1] == "a" and what[3] == 0)

    network = Network(lost)
    box = Box(network)
    network.begin(4)
    for sender in ("a", "a", "c"):
        network.post(sender, "b", message(sender, 4).encoded)
    assert asked == [(4, "a", "b", 0), (4, "a", "b", 1), (4, "c", "b", 0)]
    assert network.cancel("c", "b") == 1
    assert network.cancel("c", "b") == 0
    assert [m.sender for m in box.mailbox.receive(4, "model")] == ["a"]


def test_the_newest_of_each_sender_counts_whatever_waits_beside_it() -> None:
    network, events = Network(), []
    ends = partial(network.post, "b"), partial(network.take, "b")
    first = Newest("b", LAYOUT, *ends, lambda event, fields: events.append(fields["what"]), seen={})
    for sent in (message("c"), message("a", kind="signal"), message("a", 2), message("a", 1), message("c", 3)):
        network.post(sent.sender, "b", sent.encoded)
        assert first.receive(1, "request") == []
    later = Network()
    for data in first.kept():  # as in a checkpoint
        later.post("anybody", "b", data)
    again = Newest("b", LAYOUT, ends[0], partial(later.take, "b"), lambda event, fields: None, seen=first.seen)
    for mailbox in (first, again):
        assert [(m.sender, m.round) for m in mailbox.receive(1, "model")] == [("a", 2), ("c", 3)]
        assert [m.sender for m in mailbox.receive(1, "signal")] == ["a"]
        assert mailbox.kept() == []
    assert events == ["doubled or overtaken"]
