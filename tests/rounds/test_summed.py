"""Test rows that are added up as they come: no row is kept, and the models are those of the matrix but for rounding."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fedloom
import fedloom.engines.api
from fedloom import methods
from fedloom.core.context import Ctx
from fedloom.core.layout import Layout
from fedloom.core.updates import RowsNeededError, Summed, Updates
from fedloom.engines.api import trained_models
from fedloom.federation.rounds import server
from fedloom.federation.rounds.build import build
from fedloom.federation.rounds.federation import Common
from fedloom.federation.rounds.messages import Payload
from fedloom.federation.rounds.server import adds_up, collect, server_init, server_step_by_sums, summed
from fedloom.methods.method import Method
from fedloom.methods.private import PrivateMean
from rounds.test_equivalence import TwoInDisorder
from rounds.test_recovery import events, spoilt, times
from tests_support import Quick, assert_same, load_recipe, outcome, stopped_after

EPS = 2.0**-23


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are added up however small their matrix would be."""
    monkeypatch.setattr(server, "WHOLE", -1)


class Sent:
    """The server's step of a small model, from made-up updates."""

    def __init__(self, *changes: str) -> None:
        self.built = build(load_recipe("method=fedavg", *changes))
        self.layout, self.federation = self.built.layout, self.built.federation
        method = self.method = self.built.method
        self.shared = self.built.shared
        self.rows = tuple((client, None) for client in sorted(self.federation.clients))
        g = torch.Generator().manual_seed(1)
        self.X = torch.randn(len(self.rows), self.shared.d, generator=g)
        self.n = torch.arange(1, len(self.rows) + 1, dtype=torch.float64) * 7
        self.state = server_init(method, self.layout, torch.randn(self.layout.d, generator=g), {})
        present = self.federation.presence(self.shared, self.rows)
        self.updates = Updates.of(self.X, self.n, self.shared, self.rows, present=present)
        if present is not None:
            for i, s in enumerate(self.shared.slices):
                self.X[:, s] *= present[:, i : i + 1]

    @property
    def common(self) -> Common:
        return self.of(self.method)

    def of(self, method: Method) -> Common:
        return Common(method, self.layout, self.federation)

    def payloads(self, order: Any = None) -> Iterator[Payload]:
        """Payloads in some order, each in memory of its own."""
        for i in range(len(self.rows)) if order is None else order:
            one = self.updates.keep([i]).replace(X=self.X[i : i + 1].clone())
            yield Payload(self.rows[i], float(self.n[i]), self.method.codec.pack(one))

    def mean(self, how: Any, order: Any = None) -> torch.Tensor:
        """The mean, from a matrix or from a sum."""
        updates, received = how(self.common, self.payloads(order), self.rows)
        assert [p.row for p in received] == list(self.rows)
        out, _ = self.method.stage(updates, {}, Ctx(population=len(self.rows), held=self.federation.held))
        return out.X[0]


@pytest.mark.parametrize("changes", [(), ("model.heads=own",), ("method.weights=uniform",), ("method.codec=sparse",)])
def test_a_sum_is_the_mean_but_for_rounding(changes: tuple[str, ...]) -> None:
    """Clients with heads of their own lack blocks; by hand in float64, the bound stated in `adds_up`."""
    sent = Sent(*changes)
    w = torch.ones_like(sent.n) if "method.weights=uniform" in changes else sent.n
    present = sent.updates.present
    have = torch.ones_like(sent.X, dtype=torch.float64)
    if present is not None:
        for i, s in enumerate(sent.shared.slices):
            have[:, s] = present[:, i : i + 1].double()
    p = w[:, None] * have
    p /= p.sum(0).clamp(min=1e-300)
    expected, bound = (p * sent.X).sum(0), (p * sent.X.abs()).sum(0) * (len(w) + 2) * EPS
    for order in (None, [2, 0, *range(3, len(w)), 1]):
        assert bool(((sent.mean(summed, order) - expected).abs() <= bound).all())
    assert bool(((sent.mean(collect) - expected).abs() <= bound).all())
    assert ("model.heads=own" in changes) == (present is not None)


def test_a_single_row_comes_back_bit_for_bit() -> None:
    sent = Sent()
    sent.rows = sent.rows[:1]
    assert torch.equal(sent.mean(summed), sent.X[0])


def test_the_private_sum_is_that_of_the_matrix() -> None:
    """Clipped rows and weights under the cap: shares that are no weights."""
    sent = Sent()
    sent.method = replace(sent.method, stage=PrivateMean(clip=30.0, noise=0.5, cap=20.0))
    a, b = sent.mean(summed), sent.mean(collect)
    assert bool((a - b).abs().max() <= 1e-5)
    assert bool(a.abs().max() > 0.1)


def test_no_row_is_kept(always: None) -> None:
    """When the next payload comes, the values of the one before are gone."""
    sent = Sent()
    values: list[weakref.ref[torch.Tensor]] = []

    def watched() -> Iterator[Payload]:
        for payload in sent.payloads():
            gc.collect()
            assert not any(one() is not None for one in values)
            values.extend(map(weakref.ref, payload.packed.values()))
            yield payload
            del payload

    def again() -> Iterator[Payload]:
        raise AssertionError("a row was asked for")

    ctx = Ctx(1, targets=sent.rows, population=len(sent.rows))
    new = server_step_by_sums(sent.common, watched(), sent.state, ctx, again=again)
    assert len(values) == len(sent.rows)
    assert torch.allclose(new["model"] - sent.state["model"], sent.mean(collect), atol=1e-5)


PRIVATE = ("privacy={epsilon: 50, clip: 1, delta: 1.0e-5}", "method.weights=uniform")


@pytest.mark.parametrize("case", [(), PRIVATE], ids=str)
def test_runs_are_alike(
    case: tuple[str, ...], quick: Quick, always: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As with a matrix but for rounding; bit for bit in any order, in a pool, and after a stop."""
    monkeypatch.setattr(server, "collect", None)
    one = quick(*case)
    if not case:
        assert_same(one, quick("runtime.workers=2"))
    assert_same(one, fedloom.resume(stopped_after(1, tmp_path / "run", load_recipe(*case))))
    with monkeypatch.context() as patch:
        patch.setattr(fedloom.engines.api, "executor", TwoInDisorder)
        assert_same(one, quick(*case))
    monkeypatch.undo()
    other = quick(*case)
    for name, tensor in outcome(one)[0].items():
        assert torch.allclose(tensor, outcome(other)[0][name], atol=1e-5), name
    assert trained_models(one.folder).keys() == trained_models(other.folder).keys()


def test_a_row_that_must_go_is_asked_for_again(quick: Quick, always: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The round is then done with a matrix, and says once what happened."""
    spoilt(monkeypatch, lambda client, r, p: times(1e4, p) if (client, r) == ("digit-0", 2) else p)
    one = quick()
    monkeypatch.setattr(server, "WHOLE", 1 << 40)
    other = quick()
    assert outcome(one)[1][2]["events"] == outcome(other)[1][2]["events"]
    assert [e["client"] for e in events(one, "update dropped")] == ["digit-0"]
    for name, tensor in outcome(one)[0].items():
        assert torch.allclose(tensor, outcome(other)[0][name], atol=1e-5), name


def test_a_row_that_is_not_finite_needs_no_second_time(
    quick: Quick, always: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoilt(monkeypatch, lambda client, r, p: times(float("nan"), p) if (client, r) == ("digit-0", 2) else p)
    monkeypatch.setattr(server, "collect", None)
    assert [e["client"] for e in events(quick(), "update dropped")] == ["digit-0"]


def test_which_methods_add_up() -> None:
    """Stages say so themselves; small matrices are kept."""
    sent = Sent()
    layout = sent.layout
    k = server.WHOLE // (4 * layout.parameters.d)
    names = ("fedavg", "fedprox", "fedhca2", "scaffold", "fednova")
    assert [name for name in names if adds_up(sent.of(getattr(methods, name)()), k + 1)] == ["fedavg", "fedprox"]
    assert not adds_up(sent.of(methods.fedavg()), k)
    assert not adds_up(sent.of(methods.pcgrad(methods.fedavg())), k + 1)


def test_what_a_sum_cannot_say() -> None:
    two = torch.ones(2, dtype=torch.float64)
    layout: Layout = Updates.of([[1.0, 2.0]]).layout

    def rows() -> Summed:
        sizes = torch.tensor([1.0, torch.inf], dtype=torch.float64)
        return Summed(layout, [torch.ones(2)], 1.0, two, sizes, 2, torch.tensor([0]), torch.ones(2, 1))

    assert rows().keep([0]).shape == (1, 2)
    for ask in (lambda: rows().keep([1]), rows().dense, lambda: rows().take(torch.tensor([1]))):
        with pytest.raises(RowsNeededError):
            ask()
    with pytest.raises(ValueError, match="weighs rows otherwise"):
        rows().summed([(0, 1, torch.tensor([1.0, 2.0]))])


def test_an_empty_shared_part_keeps_no_update() -> None:
    """It is a view of the client's whole update; all of these stayed in memory until the round's end."""
    sent = Sent("method=local")
    whole: list[weakref.ref[torch.Tensor]] = []

    def payloads() -> Iterator[Payload]:
        for row in sent.rows:
            gc.collect()
            assert not any(one() is not None for one in whole)
            update = torch.zeros(1, sent.layout.d)
            whole.append(weakref.ref(update))
            packed = sent.method.codec.pack(Updates(sent.shared, (row,), update[:, :0], *torch.ones(2, 1).double()))
            del update
            yield Payload(row, 1.0, packed)
            del packed

    assert len(server.collect(sent.common, payloads(), sent.rows)[0]) == len(sent.rows)
