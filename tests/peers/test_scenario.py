"""Scenarios: read and written, replayed, and what they answer.

The virtual clock: who is late by hand, and an order that does not depend on who was first.
"""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest

from fedloom.errors import RecipeError
from fedloom.methods.peers.scenario import Presence
from fedloom.peers import Arrival, Events, Scenario, synchronous

TEXT = """
seed: 7
churn:
  c1: {away: [[3, 5], [8, null]]}
  c2: {joins: 4}
dropout: 0.1
loss: 0.2
bandwidth: 8e6
latency: 0.05
links:
  - {sender: c0, bandwidth: 1e6}
  - {sender: c0, receiver: c1, latency: 1, loss: 0}
speed: 10
speeds: {c1: 4}
stragglers: {share: 0.3, slowdown: 6}
"""
PEERS = ["c2", "c0", "c1"]


@pytest.fixture
def scenario(tmp_path: Path) -> Scenario:
    file = tmp_path / "network.yaml"
    file.write_text(TEXT)
    return Scenario.load(file)


def test_round_trip(scenario: Scenario, tmp_path: Path) -> None:
    file = tmp_path / "again.yaml"
    file.write_text(scenario.dump())
    again = Scenario.load(file)
    assert again == scenario
    assert again.dump() == scenario.dump()
    assert Scenario.load({}) == Scenario()


def test_churn(scenario: Scenario) -> None:
    quiet = scenario.model_copy(update={"dropout": 0.0})
    there = {r: "".join(p[1] for p in quiet.alive(PEERS, r)) for r in range(1, 10)}
    assert there == {1: "01", 2: "01", 3: "0", 4: "02", 5: "012", 6: "012", 7: "012", 8: "02", 9: "02"}
    assert quiet.alive([], 1) == ()


def test_delay_and_training(scenario: Scenario) -> None:
    # 1 MB = 8 Mbit
    assert scenario.delay(1e6, "c1", "c2") == pytest.approx(0.05 + 1)
    assert scenario.delay(1e6, "c0", "c2") == pytest.approx(0.05 + 8)
    assert scenario.delay(1e6, "c0", "c1") == pytest.approx(1 + 8)
    slow = {p: 6 if scenario.slow(p, 1) else 1 for p in PEERS}
    assert scenario.training(20, "c0", 1) == pytest.approx(2 * slow["c0"])
    assert scenario.training(20, "c1", 1) == pytest.approx(5 * slow["c1"])
    instant = Scenario()
    assert (instant.delay(1e9, "a", "b"), instant.training(100, "a", 1), instant.lost(1, "a", "b")) == (0, 0, False)


def test_answers_depend_on_the_question_and_the_seed_only(scenario: Scenario) -> None:
    def answers(s: Scenario, reverse: bool = False) -> dict[object, object]:
        ask = [(r, a, b) for r in range(1, 30) for a in PEERS for b in PEERS]
        return {q: s.lost(*q) for q in (reversed(ask) if reverse else ask)}

    first = answers(scenario)
    assert first == answers(Scenario.load({**scenario.model_dump(mode="json")}), reverse=True)
    assert first != answers(scenario.model_copy(update={"seed": 8}))
    assert not any(lost for (_, a, b), lost in first.items() if (a, b) == ("c0", "c1"))
    # To and from, and a second attempt, are questions of their own.
    assert any(first[r, "c1", "c2"] != first[r, "c2", "c1"] for r in range(1, 30))
    assert any(first[r, "c1", "c2"] != scenario.lost(r, "c1", "c2", attempt=1) for r in range(1, 30))
    alive = [scenario.alive(PEERS, r) for r in range(1, 30)]
    assert alive == [scenario.alive(PEERS[::-1], r) for r in range(1, 30)]


def test_pinned() -> None:
    # A scenario replays with any version.
    s = Scenario(seed=1, loss=0.5)
    assert "".join("x" if s.lost(r, "a", "b") else "." for r in range(1, 17)) == ".x.....x..x.x..x"


def test_frequencies() -> None:
    s = Scenario(seed=3, loss=0.2, dropout=0.1)
    names = [f"p{i}" for i in range(40)]
    lost = sum(s.lost(r, a, "q") for r in range(50) for a in names) / 2000
    assert abs(lost - 0.2) < 4 * (0.16 / 2000) ** 0.5
    alive = sum(len(s.alive(names, r)) for r in range(50)) / 2000
    assert abs(alive - 0.9) < 4 * (0.09 / 2000) ** 0.5


def test_stragglers() -> None:
    names = [f"p{i}" for i in range(200)]
    fixed = Scenario.load({"stragglers": {"share": 0.3}})
    slow = [p for p in names if fixed.slow(p, 1)]
    assert 40 < len(slow) < 80
    assert slow == [p for p in names if fixed.slow(p, 9)]
    anew = Scenario.load({"stragglers": {"share": 0.3, "every_round": True}})
    assert [anew.slow(p, 1) for p in names] != [anew.slow(p, 2) for p in names]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"lost": 0.1}, "lost: unknown key. Did you mean 'loss'?"),
        ({"loss": 1.0}, "loss: 1.0 found, expected a number of at least 0 and less than 1"),
        ({"bandwidth": 0}, "bandwidth: 0 found, expected a number greater than 0"),
        ({"churn": {"a": {"joins": 0}}}, "churn.a.joins: 0 found"),
        ({"churn": {"a": {"away": [[5, 3]]}}}, "churn.a: expected ordered absences that do not overlap"),
        ({"churn": {"a": {"away": [[5, 5]]}}}, "churn.a: expected ordered absences that do not overlap"),
        ({"churn": {"a": {"away": [[3, None], [6, 8]]}}}, "expected ordered absences that do not overlap"),
        ({"churn": {"a": {"joins": 4, "away": [[2, 3]]}}}, "none before round 4"),
        ({"links": [{"from": "a"}]}, "links[0].from: unknown key"),
        ({"speed": "fast"}, "speed: 'fast' found, expected a number greater than 0"),
    ],
)
def test_wrong_scenarios(value: dict[str, object], message: str) -> None:
    with pytest.raises(RecipeError) as error:
        Scenario.load(value)
    assert message in str(error.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"gone\.yaml"):
        Scenario.load(tmp_path / "gone.yaml")
    file = tmp_path / "list.yaml"
    file.write_text("[1, 2]")
    with pytest.raises(RecipeError, match="expected a mapping with seed, churn"):
        Scenario.load(file)


def test_unknown_peers(scenario: Scenario) -> None:
    scenario.check(PEERS)
    for value, where in (
        ({"churn": {"c11": {}}}, "churn"),
        ({"speeds": {"c11": 1.0}}, "speeds"),
        ({"links": [{"sender": "*", "receiver": "c11"}]}, "links"),
    ):
        with pytest.raises(RecipeError, match=f"scenario.{where}: no peer 'c11'. Did you mean 'c1'"):
            Scenario.load(value).check(PEERS)


def test_an_absence_may_begin_where_the_last_ended_or_the_peer_joins() -> None:
    presence = Presence(joins=2, away=((2, 3), (5, 6), (6, 7)))
    assert [round for round in range(1, 9) if presence.there(round)] == [3, 4, 7, 8]


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
