"""When an update that is much longer than is usual is an event."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from fedloom.core.context import Ctx
from fedloom.core.updates import Updates
from fedloom.federation.rounds.progress import Progress
from fedloom.federation.rounds.recovery import BLAMED, FEW, LONG, reject_outliers
from fedloom.federation.rounds.round import SHOWN, Round
from fedloom.stages import ClipNorms, Identity, Mean, PCGrad, Stage


def said(norms: list[float], stage: Stage, peer: str | None = None, before: tuple[float, ...] = ()) -> list[str]:
    """Return the clients of the events `long update` of a round of these norms; '' for the event `updates grow`."""
    names = [f"c{i}" for i in range(len(norms))]
    updates = Updates.of(torch.tensor(norms)[:, None] * torch.tensor([[0.6, 0.8]]), rows=names)
    sizes = dict(zip(updates.rows, norms, strict=True))
    events: list[Any] = []
    state = {"model": torch.zeros(2), "rule": {}, "stage": {}, "buffers": None}
    state["recent"] = {"updates": [*before], "lost": 0}
    ctx = Ctx(3, log=lambda event, fields: events.append((event, fields)), peer=peer)
    new = reject_outliers(updates, sizes, [], state, ctx, lambda *_: dict(state), stage)
    assert new["recent"]["lost"] == 0
    assert all((event == "long update") == ("client" in fields) for event, fields in events)
    return [fields.get("client", "") for _, fields in events]


@pytest.mark.parametrize(
    ("norms", "stage", "who"),
    [
        ([1.0, 1.0, LONG + 1], Mean(), ["c2"]),
        ([1.0, 1.0, LONG], Mean(), []),
        ([1.0, LONG + 1], Mean(), []),
        ([1.0, 1.0, LONG + 1], ClipNorms() >> Mean(), []),
        ([1.0, 1.0, LONG + 1], Identity(), []),
        ([1.0, 1.0, LONG + 1], PCGrad(), ["c2"]),
        ([1.0, 1.0, 1.0, LONG + 1, LONG + 2], Mean(), ["c3", "c4"]),
    ],
)
def test_an_update_of_more_than_50_usual_ones_is_an_event_where_no_rule_bounds_it(
    norms: list[float], stage: Stage, who: list[str]
) -> None:
    assert FEW == 3
    assert said(norms, stage) == who


def test_a_peers_own_update_is_none_and_earlier_rounds_say_what_is_usual() -> None:
    assert said([1.0, 1.0, LONG + 1], Mean(), peer="c2") == []
    assert said([1.0, 1.0, LONG + 1], Mean(), peer="c0") == ["c2"]
    assert said([1.0, 1.0, LONG + 1], Mean(), before=(2.0, 2.0)) == []


def test_updates_that_all_grow_are_one_event_that_blames_nobody() -> None:
    grown = [LONG + 1, LONG + 2, LONG + 3]
    assert said(grown, Mean(), before=(1.0, 1.0)) == [""]
    assert said([*grown[:2], grown[1] * LONG + 1], Mean(), before=(1.0, 1.0)) == ["", "c2"]
    assert said(grown, ClipNorms() >> Mean(), before=(1.0, 1.0)) == []


def test_a_round_that_failed_is_done_again_without_the_rows_to_blame_and_what_came_with_them() -> None:
    names, norms = ["c0", "c1", "c2"], [1.0, 1.0, 2 * BLAMED]
    updates = Updates.of(torch.tensor(norms)[:, None] * torch.tensor([[0.6, 0.8]]), rows=names)
    payloads: Any = [SimpleNamespace(row=row, buffers=None) for row in [*updates.rows, ("c9", None)]]
    state = {"model": torch.zeros(2), "rule": {}, "stage": {}, "buffers": None}
    tried: list[tuple[list[str], list[str]]] = []
    events: list[str] = []

    def step(rows: Updates, received: Any, ctx: Ctx, last: bool) -> Any:
        tried.append(([client for client, _ in rows.rows], [payload.row[0] for payload in received]))
        return {**state, "model": torch.full((2,), 1e7 if "c2" in tried[-1][0] else 1.0)}

    ctx = Ctx(3, log=lambda event, fields: events.append(f"{event} {fields.get('client', '')}".strip()))
    new = reject_outliers(updates, dict(zip(updates.rows, norms, strict=True)), payloads, state, ctx, step, Mean())
    assert tried == [(names, names), (["c0", "c1"], ["c0", "c1"])]
    assert events == ["round rolled back", "update dropped c2"]
    assert new["model"].tolist() == [1.0, 1.0]
    assert new["recent"] == {"updates": [1.0], "lost": 0, "without": ["c2", "c9"]}


def test_a_round_shows_the_first_events_of_a_kind_and_records_all() -> None:
    shown: list[str] = []
    progress = Progress()
    progress.event = shown.append  # type: ignore[method-assign]
    now = Round(cast(Any, None), 4, progress)
    for client in range(SHOWN + 3):
        now.log("long update", {"client": f"c{client}"})
    now.log("round lost", {"why": "no row is to blame"})
    first = [f"round 4: long update: client c{client}" for client in range(SHOWN)]
    more = "round 4: long update: more of them are in metrics.jsonl of the run's folder"
    assert shown == [*first, more, "round 4: round lost: no row is to blame"]
    assert len(now.events) == SHOWN + 4
