"""The rows of a large matrix become the clients' new models, where nobody needs them again."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fedloom
from fedloom.core.context import Ctx
from fedloom.core.updates import Updates
from fedloom.federation.rounds import server
from fedloom.server import Momentum, Plain, ServerRule
from rounds.test_recovery import spoilt, times
from tests_support import Quick, assert_same, load_recipe, stopped_after

PLAIN = Plain()


@pytest.fixture
def reused(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Call every matrix large, and return a list of whether each was reused."""
    found: list[bool] = []
    reusable = server._reuse

    def noted(*given: Any) -> server.Reuse:
        X = reusable(*given)
        found.append(X[0] is not None)
        return X

    monkeypatch.setattr(server, "_reuse", noted)
    return found


def both(quick: Quick, monkeypatch: pytest.MonkeyPatch, *changes: str) -> None:
    """Check that a run in which every matrix is large is the same as one in which none is."""
    kept = quick(*changes)
    with monkeypatch.context() as patch:
        patch.setattr(server, "WHOLE", -1)
        assert_same(kept, quick(*changes))


@pytest.mark.parametrize("method", ["fedhca2", "{name: fedhca2, alpha: 0, lr: 0}", "dfmtl", "fedsoft"])
def test_a_run_is_the_same(method: str, quick: Quick, monkeypatch: pytest.MonkeyPatch, reused: list[bool]) -> None:
    both(quick, monkeypatch, f"method={method}")
    assert reused[-2:] == [True, True]


@pytest.mark.parametrize(("who", "rounds"), [("digit-0", [True, True, False, True]), (None, [True] * 4)])
def test_a_round_that_fails_finds_all_as_it_was(
    who: str | None, rounds: list[bool], quick: Quick, monkeypatch: pytest.MonkeyPatch, reused: list[bool]
) -> None:
    """One client is to blame, so the rows are needed once more; or no single one is, and the round is lost."""
    spoilt(monkeypatch, lambda client, r, p: times(1e30, p) if r == 3 and who in (None, client) else p)
    both(quick, monkeypatch, "method=fedhca2", "training.rounds=4")
    assert reused[-len(rounds) :] == rounds


def test_a_run_that_was_stopped_goes_on(tmp_path: Path, quick: Quick, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = quick("method=fedhca2", "training.rounds=3")
    monkeypatch.setattr(server, "WHOLE", -1)
    recipe = load_recipe("method=fedhca2", "training.rounds=3")
    assert_same(whole, fedloom.resume(stopped_after(2, tmp_path / "stopped", recipe)))


def test_rows_that_somebody_holds_or_that_are_not_all_are_not_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    X = torch.randn(2, 3)
    updates = Updates.of(X, rows=["a", "b"])

    def reusable(rule: ServerRule = PLAIN, clients: str = "ab", stage: Any = None, out: Updates = updates) -> bool:
        about = SimpleNamespace(federation=SimpleNamespace(trainers=[*clients]), method=SimpleNamespace(server=rule))
        return server._reuse(about, updates, out, stage or {}, Ctx(1)) is not server.KEPT  # type: ignore[arg-type]

    assert not reusable()  # a small one
    monkeypatch.setattr(server, "WHOLE", -1)
    assert reusable()
    assert reusable(clients="ba", stage={"last": [X.clone()]})
    assert not reusable(stage={"last": [X[1]]})
    assert not reusable(clients="abc")
    assert not reusable(out=updates.reduced(X[0]))
    assert not reusable(Momentum())


def test_a_row_does_not_keep_its_matrix() -> None:
    X, alone = torch.randn(3, 4), torch.randn(4)
    found = server._apart({"a": X[1], "b": alone})
    assert torch.equal(found["a"], X[1])
    assert found["a"].untyped_storage().nbytes() == 16
    assert found["b"] is alone
