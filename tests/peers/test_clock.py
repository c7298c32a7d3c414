"""The virtual clock: who is late by hand, and an order that does not depend on who was first."""

from __future__ import annotations

import math
import random

import pytest

from fedloom.peers import Arrival, Events, synchronous

TRAINING = {"a": 1.0, "b": 4.0, "c": 20.0}
TRANSFERS = {("a", "b"): 2.0, ("b", "a"): 6.0, ("a", "c"): 9.0, ("c", "a"): 0.5}


def test_a_round_waits_for_all() -> None:
    timing = synchronous(100.0, TRAINING, TRANSFERS)
    assert timing.arrivals == {("a", "b"): 103.0, ("a", "c"): 110.0, ("b", "a"): 110.0, ("c", "a"): 120.5}
    assert (timing.start, timing.end, timing.late, timing.slow) == (100.0, 120.5, frozenset(), frozenset())
    assert synchronous(5.0, {}, {}).end == 5.0
    assert synchronous(5.0, {"a": 3.0}, {}, deadline=10).end == 8.0
    assert synchronous(5.0, {"a": 0.0, "b": 0.0}, {("a", "b"): 0.0}).end == 5.0


def test_a_deadline() -> None:
    timing = synchronous(100.0, TRAINING, TRANSFERS, deadline=10.0)
    assert timing.end == 110.0
    assert timing.late == {("c", "a")}  # at the deadline is on time
    assert timing.slow == {"c"}
    earlier = synchronous(100.0, TRAINING, TRANSFERS, deadline=9.0)
    assert earlier.late == {("c", "a"), ("b", "a"), ("a", "c")}
    assert synchronous(100.0, TRAINING, TRANSFERS, deadline=1000.0).end == 120.5
    assert synchronous(100.0, TRAINING, TRANSFERS, deadline=20.0).slow == frozenset(), "done at the deadline is on time"
    never = synchronous(0.0, {"a": math.inf, "b": 1.0}, {("a", "b"): 1.0}, deadline=5.0)
    assert (never.end, never.late, never.slow) == (5.0, {("a", "b")}, {"a"})


def test_rounds_refuse_nonsense() -> None:
    with pytest.raises(ValueError, match="sender 'z' takes no part; the participants are a, b, c"):
        synchronous(0, TRAINING, {("z", "a"): 1.0})
    with pytest.raises(ValueError, match="training of 'a': expected finite seconds >= 0, found -1"):
        synchronous(0, {"a": -1.0}, {})
    with pytest.raises(ValueError, match="transfer .* found inf"):
        synchronous(0, {"a": 1.0}, {("a", "b"): math.inf})
    with pytest.raises(ValueError, match="transfer .* found nan"):
        synchronous(0, {"a": 1.0}, {("a", "b"): math.nan}, deadline=1.0)
    with pytest.raises(ValueError, match="deadline"):
        synchronous(0, {}, {}, deadline=0)


PUT = [(2.0, "b", "a"), (1.0, "c", "a"), (2.0, "a", "b"), (2.0, "a", "a"), (1.0, "a", "c"), (1.0, "b", "c")]


def test_events_come_in_the_order_of_time_then_names() -> None:
    orders = set()
    for seed in range(10):
        events = Events(10.0)
        for put in random.Random(seed).sample(PUT, len(PUT)):
            events.put(*put)
        orders.add(tuple((a.time, a.receiver, a.sender) for a in [events.take() for _ in PUT]))
    assert orders == {
        (
            (11.0, "a", "c"),
            (11.0, "c", "a"),
            (11.0, "c", "b"),
            (12.0, "a", "a"),
            (12.0, "a", "b"),
            (12.0, "b", "a"),
        )
    }


def test_messages_of_a_pair_stay_together_and_in_order() -> None:
    events = Events()
    for sender in ("b", "c", "b"):
        events.put(1.0, sender, "a", sender)
    assert [(a.sender, a.number) for a in (events.take(), events.take(), events.take())] == [
        ("b", 0),
        ("b", 1),
        ("c", 0),
    ]


def test_events_are_the_same_whatever_they_carry() -> None:
    assert (
        len({Arrival(1.0, "b", "a", 0, ["a list has no hash"]), Arrival(1.0, "b", "a", 0), Arrival(1.0, "b", "a", 1)})
        == 2
    )
    assert Events().put(1.0, "a", "b", "this") == Events().put(1.0, "a", "b", "that")


def test_the_clock_moves_with_what_is_taken() -> None:
    events = Events()
    events.put(2.0, "a", "b", "first")
    events.put(2.0, "a", "b", {"not": "comparable"})
    assert (events.now, len(events)) == (0.0, 2)
    assert [events.take().item, events.now] == ["first", 2.0]
    assert events.put(0.0, "c", "a").time == 2.0
    assert [(a.sender, a.number) for a in (events.take(), events.take())] == [("c", 0), ("a", 1)]
    with pytest.raises(IndexError, match="no event is left"):
        events.take()
    for seconds in (-1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="'a' to 'b': expected finite seconds"):
            events.put(seconds, "a", "b")


def test_the_clock_waits_until_the_next_event_at_most() -> None:
    events = Events(1.0)
    assert events.next == math.inf
    events.put(3.0, "a", "b")
    events.put(2.0, "a", "c")
    assert events.next == 3.0
    for until, now in ((2.0, 2.0), (1.0, 2.0), (3.0, 3.0)):
        events.wait(until)
        assert events.now == now
    with pytest.raises(ValueError, match=r"an event at 3.0 comes before 3.5"):
        events.wait(3.5)


def test_events_survive_a_checkpoint() -> None:
    events = Events()
    for put in PUT:
        events.put(*put, item=put[0])
    events.take()
    again = Events.of(events.state())
    assert again.state() == events.state()
    for e in (events, again):
        e.put(0.5, "b", "a")
    assert [events.take() for _ in range(6)] == [again.take() for _ in range(6)]
    assert events.now == again.now
