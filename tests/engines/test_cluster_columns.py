"""Columns that lie in several processes, with threads in their place: moved, added up, and seen by stages."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from fedloom import Ctx, stages
from fedloom.core.layout import Block, Layout
from fedloom.core.updates import EVERYONE, Updates, spread
from fedloom.engines.cluster.comm import Comm, shares
from fedloom.engines.cluster.sharing import Columns, DistributedRows
from fedloom.federation.rounds import diagnostics
from fedloom.federation.rounds.diagnostics import groups_of, look
from fedloom.stages import Chain, Every, GroupBy, Mean, PerTask, Scope, Split, Stage, Switch

T = TypeVar("T")

LAYOUT = Layout(
    (
        Block("encoder.weight", (7, 5)),
        Block("encoder.bias", (3,)),
        Block("decoders.a.weight", (4, 2), role="decoder", task="a"),
        Block("decoders.b.weight", (4, 2), role="decoder", task="b"),
        Block("heads.a.bias", (1,), role="head", task="a"),
        Block("heads.b.bias", (1,), role="head", task="b"),
    )
)
NAMES = ("ann", "bob", "cat", "dan", "eve")


@pytest.fixture(autouse=True)
def _threads_do_not_wait_for_a_property(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.11 holds one lock for a cached property of all objects; processes have one each."""
    for name in ("data", "X"):
        known = vars(Updates)[name]
        if hasattr(known, "lock"):
            monkeypatch.setattr(known, "lock", contextlib.nullcontext())


class Threads(Comm):
    """A member among threads: tensors go through queues."""

    def __init__(self, rank: int, size: int, queues: Mapping[tuple[int, int], queue.Queue[list[Tensor]]]) -> None:
        super().__init__(rank, size)
        self.queues = queues

    def exchange(self, out: Mapping[int, Sequence[Tensor]], into: Mapping[int, Sequence[Tensor]]) -> None:
        for given, kept in zip(out.get(self.rank, ()), into.get(self.rank, ()), strict=True):
            kept.copy_(given)
        for rank in self.others:
            if there := [t.clone() for t in out.get(rank, ()) if t.numel()]:
                self.sent += sum(t.nbytes for t in there)
                self.queues[self.rank, rank].put(there)
        for rank in self.others:
            if wanted := [t for t in into.get(rank, ()) if t.numel()]:
                for tensor, found in zip(wanted, self.queues[rank, self.rank].get(timeout=20), strict=True):
                    assert tensor.shape == found.shape
                    assert tensor.dtype == found.dtype
                    tensor.copy_(found)


def together(size: int, work: Callable[[Threads], T]) -> list[T]:
    """Return what each of so many members makes; all messages must have been taken."""
    queues: dict[tuple[int, int], queue.Queue[list[Tensor]]] = {
        (a, b): queue.Queue() for a in range(size) for b in range(size)
    }
    with ThreadPoolExecutor(size) as pool:
        found = [pool.submit(work, Threads(rank, size, queues)) for rank in range(size)]
        failed = [error for f in found if (error := f.exception(timeout=60)) is not None]
        for error in sorted(failed, key=lambda e: isinstance(e, queue.Empty)):  # the cause, not who waited for it
            raise error
        results = [f.result() for f in found]
    assert all(q.empty() for q in queues.values())
    return results


def given(kind: str = "all") -> Updates:
    """A round of five rows: with everything, or with the blocks of the clients' own tasks only."""
    generator = torch.Generator().manual_seed(3)

    def draw() -> Tensor:
        return torch.randn(len(NAMES), LAYOUT.d, generator=generator)

    tasks = ["a", "a,b", "b", "a", "b"]
    held = [[b.task is None or b.task in t.split(",") for b in LAYOUT.blocks] for t in tasks]
    X = draw()
    present = None
    if kind == "own":
        present = torch.tensor(held)
        for i, row in enumerate(held):
            for has, s in zip(row, LAYOUT.slices, strict=True):
                X[i, s] *= has
    return Updates.of(
        X,
        [5, 1, 7, 3, 2],
        LAYOUT,
        NAMES,
        present=present,
        base=draw(),
        auxiliary={"control": draw()},
        domain=["x", "y", "x", "y", "y"],
        tasks=tasks,
        support=torch.tensor(held),
        classes=[torch.tensor([4.0, 1]), torch.tensor([1.0, 0])] * 2 + [torch.tensor([1.0, 1])],
        a=[1.0, 2, 3, 1, 2],
        steps=[1.0, 2, 3, 1, 2],
        loss_trained=[1.0, 2, 3, 1, 2],
        loss_received=[2.0, 1, 3, 2, 2],
    )


def part_of(comm: Comm, updates: Updates, places: Sequence[int]) -> tuple[Columns, Updates]:
    """The updates as one member has them: its rows whole, everything else in its columns."""
    columns = Columns(comm, LAYOUT)

    def scattered(X: Tensor) -> DistributedRows:
        return DistributedRows(columns, LAYOUT, X[[i for i, p in enumerate(places) if p == comm.rank]], tuple(places))

    assert updates.base is not None
    return columns, Updates(
        columns.here,
        updates.rows,
        scattered(updates.X),
        updates.n,
        updates.weight,
        present=updates.present,
        support=updates.support,
        extra=updates.extra,
        base=columns.cut(columns.here, updates.base),
        auxiliary={name: scattered(X).dense() for name, X in updates.auxiliary.items()},
    )


SEPARABLE: Mapping[str, Stage] = {
    "mean": Mean(),
    "weights": stages.DomainWeights() >> Mean(),
    "gap": stages.GapWeights() >> Mean(),
    "support": stages.SupportMean(),
    "pcgrad": stages.PCGrad() >> Mean(),
    "pcgrad rows": stages.PCGrad(),
    "cagrad": stages.CAGrad(),
    "min-norm": stages.MinNorm(),
    "config": stages.ConFIG(),
    "elected": stages.ElectedMean(),
    "consensus": stages.ConsensusMask(),
    "gradvac": stages.GradVac(),
    "losses": stages.LossWeights() >> Mean(),
    "steps": stages.NormaliseSteps() >> Mean(),
    "control": stages.ControlVariates() >> Mean(),
    "dual": stages.DualShift(Mean()),
    "history": stages.HistoryAttention(),
    "hyper": stages.HyperConflictAverse(),
    "groups": stages.SimilarGroups(),
    "groups of updates": stages.SimilarGroups(source="update", soft=True),
    "clusters": stages.SplittingClusters(eps1=9.0, eps2=0.0, start=0),
    "gossip": stages.Gossip(),
    "tensor by tensor": stages.PerBlock(stages.CosineMix()),
    "identity": stages.Identity(),
    "split": Split({"encoder": Mean(), "*": stages.Identity()}),
    "split means": Split({"encoder": Mean(), "*": stages.PCGrad() >> Mean()}),
    "scope": Scope("encoder", stages.PCGrad()) >> Mean(),
    "per task": Split({"decoder": PerTask(Mean()), "*": Mean()}),
    "group by": GroupBy("domain", stages.HistoryAttention()),
    "switch": Switch(2, Mean(), stages.CAGrad()),
    "every": Every(2, stages.SimilarGroups()),
}


@pytest.mark.parametrize("kind", ["all", "own"])
@pytest.mark.parametrize("name", SEPARABLE)
def test_a_separable_stage_gives_the_same_on_columns_that_lie_apart(name: str, kind: str) -> None:
    """Three rounds, with two and three members and rows dealt anyhow."""
    stage = SEPARABLE[name]
    assert stage.traits.separable
    updates = given(kind)
    owner = dict(zip(NAMES, (1, 0, 1, 2, 0), strict=True))
    state = stage.init(LAYOUT)
    expected = []
    for round in (1, 2, 3):
        out, state = stage(updates.replace(X=round * updates.X), state, Ctx(round, population=5))
        expected.append((out, state))

    for size in (2, 3):
        places = [rank % size for rank in owner.values()]

        def work(comm: Comm, size: int = size, places: Sequence[int] = places) -> list[Any]:
            mine, found = stage.init(LAYOUT), []
            for round in (1, 2, 3):
                columns, part = part_of(comm, updates.replace(X=round * updates.X), places)
                with spread(columns):
                    out, mine = stage(part, mine, Ctx(round, population=5))
                back = columns.back(out, {c: r % size for c, r in owner.items()}, everywhere=False)
                found.append((out.rows, dict(back), mine))
            return found

        members = together(size, work)
        for rank, rounds in enumerate(members):
            for (out, whole), (rows, back, mine) in zip(expected, rounds, strict=True):
                assert rows == out.rows
                here = {row for row in rows if row == EVERYONE or owner[row[0]] % size == rank}
                assert set(back) == here
                for row, x in zip(out.rows, out.X, strict=True):
                    if row in back:
                        torch.testing.assert_close(back[row], x, rtol=1e-5, atol=1e-6)
                near(mine, whole)


@pytest.mark.parametrize("columns", [None, 12])
@pytest.mark.parametrize("name", ["mean", "identity", "gossip", "pcgrad", "split", "min-norm"])
def test_what_updates_have_in_common_is_told_alike(name: str, columns: int | None, monkeypatch: Any) -> None:
    """Of all columns and of a drawn few: rows that lie apart, that were brought together, and mixed ones."""
    if columns is not None:
        monkeypatch.setattr(diagnostics, "groups_of", lambda layout, _: groups_of(layout, columns))
    updates, stage = given("own"), SEPARABLE[name]
    out, _ = stage(updates, stage.init(LAYOUT), Ctx(1, population=5))
    expected = look(updates, out)
    assert any(group["looked"] < group["size"] for group in expected["groups"]) == (columns is not None)
    for places in ((0, 1, 1, 0, 0), (2, 1, 0, 1, 2)):

        def work(comm: Comm, places: Sequence[int] = places) -> Any:
            spread_, part = part_of(comm, updates, places)
            with spread(spread_):
                out, _ = stage(part, stage.init(LAYOUT), Ctx(1, population=5))
                return look(part, out)

        found = together(max(places) + 1, work)
        assert all(one == found[0] for one in found)  # the same bits in every process
        near(found[0], expected, 1e-3)  # of four digits


def near(a: Any, b: Any, rel: float = 1e-5) -> None:
    """Two states that differ by rounding."""
    if isinstance(a, Tensor):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            near(a[key], b[key], rel)
    elif isinstance(a, list):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            near(x, y, rel)
    elif isinstance(a, float):
        assert a == pytest.approx(b, rel=rel, abs=1e-6)
    else:
        assert a == b


@pytest.mark.parametrize(
    "stage",
    [
        stages.Heal() >> Mean(),
        stages.TopMagnitude(0.5) >> Mean(),
        stages.ChosenClusters(),
        stages.SoftClusters(),
        stages.MergedModels(),
        stages.HyperCrossAttention(),
        stages.SimilarityMix(),
        Chain((stages.PCGrad(), stages.TopMagnitude(0.5), Mean())),
        Split({"encoder": Mean(), "*": stages.HyperCrossAttention()}),
    ],
    ids=lambda s: repr(s)[:30],
)
def test_what_looks_at_whole_vectors_says_so(stage: Stage) -> None:
    assert not stage.traits.separable


def test_a_mean_depends_neither_on_who_has_which_rows_nor_on_how_many_there_are() -> None:
    updates = given()
    scale = torch.tensor([1.0, 1e-6, 1e6, 3.0, 1.0])
    X = updates.X * scale[:, None]
    p = updates.weight / updates.weight.sum()
    found = []
    for places in ((0, 0, 0, 0, 0), (0, 1, 0, 1, 1), (1, 0, 0, 1, 0), (2, 1, 0, 1, 2), (3, 2, 1, 0, 3)):

        def work(comm: Comm, places: Sequence[int] = places) -> Tensor:
            columns, part = part_of(comm, updates.replace(X=X), places)
            return columns.join(columns.here, part.summed([(0, len(LAYOUT.blocks), p)]))

        members = together(max(places) + 1, work)
        assert all(torch.equal(members[0], other) for other in members)
        found.append(members[0])
    assert all(torch.equal(found[0], other) for other in found)
    exact = (p.float().double() @ X.double()).float()
    torch.testing.assert_close(found[0], exact, rtol=2**-23, atol=0)


def test_bytes_are_those_of_the_documentation() -> None:
    """K = 4 rows, d columns, R = 2: sums for a mean, and rows in half of the columns for a Gram matrix."""
    d, k = 100_000, 4
    layout = Layout((Block("x", (d,)),))
    X = torch.randn(k, d, generator=torch.Generator().manual_seed(0))
    sent = {}
    for name, stage in {"mean": Mean(), "gram": stages.CAGrad(), "rows": stages.Gossip()}.items():

        def work(comm: Comm, stage: Stage = stage) -> int:
            columns = Columns(comm, layout)
            own = DistributedRows(columns, layout, X[2 * comm.rank : 2 * comm.rank + 2], (0, 0, 1, 1))
            names = tuple((f"c{i}", None) for i in range(k))
            n = torch.ones(k, dtype=torch.float64)
            with spread(columns):
                out, _ = stage(Updates(columns.here, names, own, n, n), stage.init(layout), Ctx(1))
            columns.back(out, {f"c{i}": i // 2 for i in range(k)}, everywhere=False)
            return comm.sent

        sent[name] = max(together(2, work))
    small = 1000
    assert 6 * d <= sent["mean"] <= 6 * d + small  # (8 + 4) (R-1)/R d
    assert 4 * d + 2 * d <= sent["gram"] <= 6 * d + small  # 4 (R-1)/R^2 K d + 4 (R-1)/R d
    assert 4 * d + 4 * d <= sent["rows"] <= 8 * d + small  # twice 4 (R-1)/R^2 K d


@pytest.mark.parametrize("size", [1, 2, 3])
def test_trees_arrive_as_they_were_sent(size: int) -> None:
    shared = torch.arange(6.0)
    tree = {
        "tensors": [shared, shared, torch.tensor(3), torch.zeros(0), torch.ones(2, 3).t(), torch.ones(2).bool()],
        "plain": [None, True, 1, 0.1, float("inf"), "text"],
        "half": torch.ones(2, dtype=torch.bfloat16),
        "empty": {},
    }

    def work(comm: Comm) -> list[Any]:
        found = comm.all({"from": comm.rank, **tree})
        first = comm.from_first([{"for": q} for q in range(comm.size)])
        assert first == {"for": comm.rank}
        assert comm.to_first(comm.rank) == ([] if comm.rank else list(range(comm.size)))
        with pytest.raises(TypeError, match="a set cannot be saved"):
            comm.swap({(comm.rank + 1) % comm.size if comm.size > 1 else 1: {"x": {1}}})
        return found

    for found in together(size, work):
        assert [one["from"] for one in found] == list(range(size))
        for one in found:
            assert one["plain"] == tree["plain"]
            for a, b in zip([*one["tensors"], one["half"]], [*tree["tensors"], tree["half"]], strict=True):  # type: ignore[misc]
                assert a.dtype == b.dtype
                assert torch.equal(a, b)


def test_a_tensor_that_is_in_a_tree_twice_travels_once() -> None:
    big = torch.zeros(10_000)
    sent = together(2, lambda comm: (comm.all([big, {"again": big}]), comm.sent)[1])
    assert all(big.nbytes <= n < big.nbytes + 1000 for n in sent)


def test_totals_and_maxima_are_the_same_bits_everywhere() -> None:
    X = torch.randn(3, 4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found = together(3, lambda comm: (comm.total(X[comm.rank]), comm.maximum(X[comm.rank])))
    for total, largest in found:
        assert torch.equal(total, X[0] + X[1] + X[2])
        assert torch.equal(largest, X.amax(0))
    assert shares(10, 4) == [2, 3, 2, 3]
    assert shares(1, 3) == [0, 0, 1]
