"""Scenarios: read and written, replayed, and what they answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedloom.errors import RecipeError
from fedloom.methods.peers.scenario import Presence
from fedloom.peers import Scenario

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
