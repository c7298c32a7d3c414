"""A round that would spoil the model is rolled back and done again without the rows to blame, or it is lost."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import fedloom
from fedloom import Ctx, Method
from fedloom.cli.app import app
from fedloom.core.context import State
from fedloom.core.updates import Updates
from fedloom.engines.api import Result, trained_models
from fedloom.federation.rounds import client
from fedloom.federation.rounds.build import build
from fedloom.federation.rounds.messages import Message, Payload
from fedloom.federation.rounds.recovery import nothing_received, reject_outliers, usable, usual
from fedloom.federation.rounds.worker import InProcess, TrainDone
from fedloom.federation.runs import checkpoint
from fedloom.methods import METHODS
from fedloom.server import Plain
from fedloom.stages import Mean
from fedloom.training.flat import FlatModel
from fedloom.training.loop import LocalResult
from peers_support import Valleys
from quadratics import Quadratics
from tests_support import QUICK, Quick, assert_same, client_step, load_recipe, outcome, same, stopped_after

ROUNDS = ("training.rounds=4",)


def events(result: Result, name: str) -> list[dict[str, Any]]:
    return [e for line in result.run.rounds for e in line["events"] if e["event"] == name]


def finite(result: Result) -> bool:
    models = trained_models(result.folder)
    return all(bool(v.isfinite().all()) for model in models.values() for v in model.values() if v.is_floating_point())


def spoilt(monkeypatch: pytest.MonkeyPatch, spoil: Callable[[str, int, Payload], Payload]) -> None:
    """From now on what clients send is what `spoil` makes of (client, round, payload)."""

    class Spoils(InProcess):
        def __init__(self, setup: Any, devices: Sequence[str], *_: Any) -> None:
            super().__init__(setup, devices)

        def run(self, jobs: Sequence[Any], **options: Any) -> Iterator[Any]:
            for job, done in zip(jobs, super().run(jobs, **options), strict=True):
                if isinstance(done, TrainDone):
                    done = dataclasses.replace(done, payload=spoil(done.client, job.round, done.payload))
                yield done

    monkeypatch.setattr(fedloom.engines.api, "executor", Spoils)


def times(factor: float, payload: Payload) -> Payload:
    return dataclasses.replace(payload, packed={k: v * factor for k, v in payload.packed.items()})


@pytest.mark.parametrize(("method", "size"), [("fedavg", 1e4), ("fedopt", 1e15), ("fedhca2", 1e30)])
def test_an_enormous_update_is_to_blame_and_nobody_else(
    method: str, size: float, quick: Quick, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoilt(monkeypatch, lambda client, r, p: times(size, p) if (client, r) == ("digit-0", 3) else p)
    result = quick(f"method={method}", *ROUNDS)
    assert result.status == "finished"
    assert [e["client"] for e in events(result, "update dropped")] == ["digit-0"]
    assert len(events(result, "round rolled back")) == 1
    # the round is as one in which that client's training had failed
    monkeypatch.undo()
    spoilt(
        monkeypatch,
        lambda client, r, p: times(float("nan"), p) if (client, r) == ("digit-0", 3) else p,
    )
    other = quick(f"method={method}", *ROUNDS)
    assert_same(result, other, models_only=True)
    assert outcome(result)[1][3]["metrics"] == outcome(other)[1][3]["metrics"]


GROUP = ("data.tasks=[digit]", "partition={name: one-task, clients_per_task: 4}", "evaluation.splits=[test]")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ((), True),
        (("method=fedhca2",), True),
        (("method={name: fedavg, add: {multi-krum: {f: 0}}}",), True),
        (("method={name: fedavg, add: {multi-krum: {}}}",), False),
        (("method={name: fedper, add: {clip: {}}}",), False),
    ],
    ids=str,
)
def test_who_moves_a_model_by_a_hundred_usual_updates_is_named(
    changes: tuple[str, ...], said: bool, quick: Quick, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no robust rule bounds it; the update is finite, and no reason to roll the round back."""
    spoilt(monkeypatch, lambda client, r, p: times(100, p) if (client, r) == ("digit-0", 2) else p)
    result = quick(*GROUP, *changes)
    found = events(result, "long update")
    assert [event["client"] for event in found] == ["digit-0"] * said
    assert not events(result, "round rolled back")
    for event in found:
        ratio = re.search(r"its norm [\d.]+ is (\d+) times the usual [\d.]+, and no robust rule bounds", event["why"])
        assert ratio is not None
        assert 50 < int(ratio[1]) < 200
        assert "method.add.clip={} (docs/robust.md)" in event["why"]


def test_the_length_of_a_private_row_is_not_told(quick: Quick, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("dp_accounting", reason="needs the extra `privacy`")
    spoilt(monkeypatch, lambda client, r, p: times(100, p) if client == "digit-0" else p)
    private = ("method={name: fedper, weights: uniform}", "privacy={clip: 1, noise: 0.1, delta: 1.0e-3}")
    assert not events(quick(*GROUP, *private, "training.rounds=1"), "long update")


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "matu", "fedhca2"])
def test_honest_clients_are_not_named(method: str, quick: Quick) -> None:
    """Some have one task and some five; steps are large."""
    result = quick(f"method={method}", "training.optimizer={name: sgd, lr: 0.1}")
    assert not [event for line in result.run.rounds for event in line["events"]]


def test_a_peer_names_whose_model_is_far_too_long_and_never_its_own(
    quick: Quick, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(*changes: str) -> set[tuple[str, str]]:
        result = quick("peers={}", "evaluation.splits=[test]", "training.rounds=1", *changes)
        return {(event["peer"], event["client"]) for event in events(result, "long update")}

    assert not found()
    hostile = "attack={name: scaled, factor: 200, clients: [digit-0]}"
    assert found(hostile) == {(peer, "digit-0") for peer in ("all-0", "holes-0", "large-0", "parity-0")}
    assert not found(hostile, "method.add.clip={}")


# the clients of one task send finite updates of 1e28 in each round, in every engine
HUGE = ("tasks.large.weight=1e30", "training.steps=1")


@pytest.mark.parametrize(
    "changes",
    [(), ("method=scaffold",), ("method=matu",), ("method.codec=sparse",)],
    ids=str,
)
def test_honest_clients_are_never_dropped(quick: Quick, changes: tuple[str, ...]) -> None:
    result = quick(*HUGE, *changes)
    assert result.status == "finished"
    assert {e["client"] for e in events(result, "update dropped")} == {"all-0", "large-0"}
    assert finite(result)


def test_honest_peers_are_never_dropped(quick: Quick) -> None:
    result = quick(*HUGE, "peers={}")
    assert {e["client"] for e in events(result, "update dropped")} == {"all-0", "large-0"}
    assert {e["peer"] for e in events(result, "round lost")} == {"all-0", "large-0"}
    assert finite(result)


def test_a_run_in_which_everybody_is_enormous_gives_up(
    quick: Quick, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = quick("training.rounds=2")
    spoilt(monkeypatch, lambda client, r, p: times(1e30, p) if r > 2 else p)
    result = quick("training.rounds=9")
    assert result.status == "gave up"
    assert result.run.last_round == 5
    assert len(events(result, "round lost")) == 3
    assert not events(result, "update dropped")
    assert json.loads((result.folder / "run.json").read_text())["status"] == "gave up"
    assert_same(good, result, models_only=True)  # the state is that of the last good round
    # resume tries again: in vain, and then with success
    assert fedloom.resume(result.folder).run.last_round == 8
    monkeypatch.undo()
    shown = CliRunner().invoke(app, ["resume", str(result.folder), "--quiet"])
    assert shown.exit_code == 0, shown.output
    assert json.loads((result.folder / "run.json").read_text())["status"] == "finished"


def test_the_command_line_says_that_a_run_gave_up(tmp_path: Path) -> None:
    where = ["--quiet", "--out", str(tmp_path / "r")]
    changes = [*QUICK, "training.rounds=9", "training.optimizer.lr=1e30"]
    shown = CliRunner().invoke(app, ["run", "digits-tasks", *changes, *where])
    assert shown.exit_code == 1
    assert "nothing learned: " in shown.output
    assert "every round was lost" in shown.output
    report = CliRunner().invoke(app, ["report", str(tmp_path / "r")])
    assert report.exit_code == 0
    assert "nothing learned, 3 rounds" in next((tmp_path / "r").glob("*.html")).read_text()


def test_resuming_among_lost_rounds(quick: Quick, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spoilt(monkeypatch, lambda client, r, p: times(1e30, p) if r in (2, 3, 5, 6) else p)
    whole = quick("training.rounds=6")
    assert whole.status == "finished"  # never three in a row
    parts = stopped_after(3, tmp_path / "parts", load_recipe("training.rounds=6"))
    assert_same(whole, fedloom.resume(parts))


def test_lost_rounds_leave_the_clients_as_they_were(quick: Quick, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the rounds had not been, for methods whose clients have a state."""
    changes = ("method=scaffold",)
    good = quick(*changes, "training.rounds=1")
    spoilt(monkeypatch, lambda client, r, p: times(1e30, p) if r > 1 else p)
    bad = quick(*changes, "training.rounds=3")
    load = [checkpoint.load(r.folder, "state", newest=lambda head: head["round"])[0] for r in (good, bad)]
    assert same(load[0]["clients"], load[1]["clients"])
    assert same(load[0]["server"]["stage"], load[1]["server"]["stage"])


def beside(what: str, value: float, payload: Payload) -> Payload:
    if what == "buffers":
        assert payload.buffers is not None
        return dataclasses.replace(payload, buffers=torch.full_like(payload.buffers.double(), value))
    return dataclasses.replace(
        payload, auxiliary={k: torch.full_like(v.double(), value) for k, v in payload.auxiliary.items()}
    )


@pytest.mark.parametrize(
    ("what", "changes"),
    [("auxiliary control", ("method=scaffold",)), ("buffers", ("model={name: resnet10, width: 4}",))],
)
@pytest.mark.parametrize("value", [1e300, 1e30])
def test_what_is_beside_an_update(
    what: str, changes: tuple[str, ...], value: float, quick: Quick, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = what.split()[0]
    spoilt(monkeypatch, lambda client, r, p: beside(kind, value, p) if (client, r) == ("digit-0", 1) else p)
    result = quick(*changes)
    (dropped,) = events(result, "update dropped")
    assert dropped["client"] == "digit-0"
    assert dropped["why"].startswith(what)
    assert ("not finite" if value == 1e300 else "is usual") in dropped["why"]
    assert finite(result)


class Spoils(Mean):
    """A stage that gives nan, or keeps it."""

    def __init__(self, where: str) -> None:
        object.__setattr__(self, "where", where)

    def __call__(self, updates: Any, state: State, ctx: Any) -> Any:
        out, state = super().__call__(updates, state, ctx)
        ctx.log("spoke", {})
        nan = torch.full_like(out.X, torch.nan)
        return (out.replace(X=nan), state) if self.where == "X" else (out, {"kept": [{"x": nan}]})


@pytest.mark.parametrize("where", ["X", "state"])
def test_a_stage_whose_result_is_not_finite(where: str) -> None:
    federation = Quadratics(Method(stage=Spoils(where)), [[1.0, 2]] * 3, [[1.0, 2], [3, 4], [5, 6]], steps=1)
    said: list[tuple[str, Any]] = []
    before = federation.server
    federation.go(log=lambda *what: said.append(what))
    assert federation.server["model"] is before["model"]
    assert [event for event, _ in said] == ["round rolled back", "round lost"]  # nothing of the attempt is heard


@pytest.mark.parametrize(("start", "step", "rounds"), [(0.0, 900.0, 1), (1e-6, 900.0, 1), (1.0, 100.0, 4)])
def test_large_steps_that_are_meant_are_taken(start: float, step: float, rounds: int) -> None:
    """A step of 900 updates from nothing, and a model that grows sixfold in each round."""
    federation = Quadratics(Method(server=Plain(step)), [[-1.0, -1]] * 3, [[1.0, 2], [3, 4], [5, 6]], steps=1)
    federation.server["model"] += start
    for _ in range(rounds):
        before = federation.server["model"]
        after = federation.go()
        assert not after.equal(before)
        assert federation.server["recent"]["lost"] == 0


def test_a_peer_whose_own_variate_is_not_finite_does_not_mix() -> None:
    peers = Valleys({"graph": "full"}, 1.0, [[1.0, 2], [3, 4], [5, 6]], METHODS["scaffold"].function())
    before = peers.go()
    train = peers.train

    def spoilt(jobs: Any) -> Iterator[TrainDone]:
        for done in train(jobs):
            value = float("inf") if done.client == "c00" else 1.0
            yield dataclasses.replace(done, payload=beside("auxiliary", value, done.payload))

    peers.train = spoilt  # type: ignore[method-assign]
    after = peers.go()
    assert after["c00"].equal(before["c00"])
    assert all(after[name].isfinite().all() and not after[name].equal(before[name]) for name in ("c01", "c02"))
    assert {fields["client"] for event, fields in peers.events if event == "update dropped"} == {"c00"}


@pytest.mark.parametrize("bad", ["params", "buffers", None])
def test_training_that_leaves_nan_in_parameters_or_in_buffers(bad: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    built = build(load_recipe("model={name: resnet10, width: 4}"))
    model = FlatModel(built.module)

    def trained(*_: Any) -> LocalResult:
        model.params.fill_(torch.nan if bad == "params" else 1.0)
        model.buffers.fill_(torch.nan if bad == "buffers" else 1.0)
        return LocalResult(1, 1, dict.fromkeys(built.federation.clients["all-0"].tasks, 0.0))

    monkeypatch.setattr(client, "train", trained)
    received = Message(
        built.method.shared_part(built.layout).flatten(built.module).detach(), torch.zeros(model.buffers.shape)
    )
    payload, _, _ = client_step(
        built.method,
        model,
        built.federation,
        built.federation.clients["all-0"],
        received,
        {},
        Ctx(1),
        built.recipe.training,
    )
    assert payload.finite == (bad is None)


def test_what_is_usual() -> None:
    assert usual([]) == 0
    assert usual([0.0, float("inf"), float("nan")]) == 0
    assert usual([0.0, 3.0, 1e30]) == 3
    assert usual([1.0, 2.0, 9.0]) == 2


def server_state(model: float, **more: Any) -> State:
    """The state of a server whose model, in a space of one dimension, has this norm."""
    empty: State = {"personal": {}, "tasks": {}, "rule": {}, "stage": {}, "buffers": torch.zeros(0)}
    return {**empty, "model": torch.tensor([model], dtype=torch.float64), **more}


def attempted(
    before: State, after: State, sizes: Sequence[float], spoiler: str = "", recent: Sequence[float] = ()
) -> tuple[State, list[tuple[str, Any]]]:
    """The state after rows of these norms, by a step that gives `after`, or without the row `spoiler` a model of 0."""
    before = {**before, "recent": {"updates": [*recent], "lost": 0}}
    updates = Updates.of([[size] for size in sizes])
    said: list[tuple[str, Any]] = []

    def step(rows: Updates, came: Sequence[Payload], ctx: Ctx, last: bool) -> State:
        there = not spoiler or any(client == spoiler for client, _ in rows.rows)
        return after if there else server_state(0.0)

    by_row = dict(zip(updates.rows, sizes, strict=True))
    new = reject_outliers(updates, by_row, [], before, Ctx(1, log=lambda *what: said.append(what)), step, Mean())
    return new, said


@pytest.mark.parametrize(
    ("start", "update", "largest"),
    [(1.0, 1e-4, 10.0), (1.0, 0.1, 100.0), (1.0, 1e9, 1e6), (0.01, 1e9, 1e6), (10.0, 1e9, 1e7)],
)
def test_how_far_a_model_may_grow(start: float, update: float, largest: float) -> None:
    """10 times its norm; or 1000 usual updates; but never more than 1e6 times the larger of its norm and 1."""
    for size, lost in ((largest, 0), (largest * 1.001, 1)):
        new, _ = attempted(server_state(start), server_state(size), [update] * 3)
        assert new["recent"]["lost"] == lost
        assert float(new["model"]) == (start if lost else size)


def test_a_personal_model_may_grow_from_its_own_norm() -> None:
    one = torch.ones(1).double()
    before = server_state(1.0, personal={"a": 100 * one}, tasks={"t": one})
    for kind, name, largest in (("personal", "a", 1000), ("personal", "b", 10), ("tasks", "t", 10)):
        for size, lost in ((largest, 0), (largest * 1.001, 1)):
            after = {**before, kind: {name: size * one}}
            new, said = attempted(before, after, [1e-4] * 3)
            assert new["recent"]["lost"] == lost
            assert bool(said) == bool(lost)
    assert f"the model of client 'b' would grow from norm {1:.3g} to {10.1:.3g}" in str(
        attempted(before, {**before, "personal": {"b": 10.1 * one}}, [1e-4] * 3)[1]
    )


@pytest.mark.parametrize(("start", "update", "largest"), [(0.1, 0.1, 1e6), (10.0, 0.1, 1e7), (0.1, 10.0, 1e7)])
def test_how_large_the_memory_of_a_server_rule_may_be(start: float, update: float, largest: float) -> None:
    """1e6 times the largest of the model's norm, the usual update and 1; what stages hold has only to be finite."""
    before = server_state(start)
    for size, lost in ((largest, 0), (largest * 1.001, 1)):
        memory = [torch.zeros(1), {"v": torch.tensor([size]).double()}, torch.tensor([7])]
        assert attempted(before, server_state(start, rule={"*": memory}), [update] * 3)[0]["recent"]["lost"] == lost
        held = attempted(before, server_state(start, stage={"0": memory}), [update] * 3)[0]
        assert held["recent"]["lost"] == 0
    for bad in (torch.nan, torch.inf):
        for name, value in (("stage", {"0": torch.tensor([bad])}), ("buffers", torch.tensor([0.0, bad, 1.0]))):
            new, said = attempted(before, server_state(start, **{name: value}), [update] * 3)
            assert new["recent"]["lost"] == 1
            assert "would have nan or inf" in str(said)


@pytest.mark.parametrize(("size", "blamed"), [(100.0, False), (100.1, True)])
def test_rows_of_more_than_100_usual_updates_are_to_blame(size: float, blamed: bool) -> None:
    new, said = attempted(server_state(1.0), server_state(1e5), [1.0, 1.0, size], spoiler="c2")
    why = "of norm 100, while 1 is usual, in a round that failed"
    last = ("update dropped", {"client": "c2", "why": why}) if blamed else ("round lost", {"why": "no row is to blame"})
    assert [said[0][0], said[1]] == ["round rolled back", last]
    assert new["recent"]["lost"] == (not blamed)
    if blamed:
        assert (new["recent"]["without"], new["recent"]["updates"]) == ([], [1.0])
        assert float(new["model"]) == 0


def test_what_is_usual_is_remembered_for_ten_rounds() -> None:
    recent = [float(i) for i in range(1, 11)]
    new, _ = attempted(server_state(1.0), server_state(1.0), [20.0] * 3, recent=recent)
    assert new["recent"]["updates"] == [*recent[1:], 20.0]
    _, said = attempted(server_state(1.0), server_state(1e6), [2000.0] * 2, recent=[1.0] * 10)
    assert said[-1] == ("round lost", {"why": "all rows are to blame"})


@pytest.mark.parametrize("clients", [1, 2, 3])
def test_a_round_without_any_row_is_lost_where_more_than_one_client_was_asked(clients: int) -> None:
    targets = tuple((f"c{i}", None) for i in range(clients))
    state = nothing_received(server_state(1.0), Ctx(1, targets=targets))
    assert state.get("recent", {"lost": 0})["lost"] == int(clients > 1)
    assert nothing_received(server_state(1.0), Ctx(1, targets=targets, peer="c0")).get("recent") is None


@pytest.mark.parametrize("factor", [1.0, 1.001])
def test_what_stands_beside_a_row_may_be_a_million_times_what_is_usual(factor: float) -> None:
    vectors = [torch.ones(4), torch.ones(4), torch.full((4,), 1e6 * factor).double()]
    updates = Updates.of([[1.0]] * 3, prototypes=vectors)
    said: list[tuple[str, Any]] = []
    left, sizes = usable(updates, [], Ctx(1, log=lambda *what: said.append(what)))
    assert len(left) == len(sizes) == (3 if factor == 1 else 2)
    assert [fields["client"] for _, fields in said] == ([] if factor == 1 else ["c2"])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_in_an_extra_is_left_to_the_stage_that_reads_it(bad: float) -> None:
    vectors = [torch.full((4,), 1e-9), torch.full((4,), 1e-9), torch.tensor([bad, 1e-9, 0, 0])]
    left, _ = usable(Updates.of([[1.0]] * 3, prototypes=vectors), [], Ctx(1))
    assert len(left) == 3
