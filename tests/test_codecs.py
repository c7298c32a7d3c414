"""The unified codec: what travels, what comes back, and rows that stay packed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fedloom.codecs import Codec, Cropped, Folded, Raw, Sparse, Unified
from fedloom.core.codecs import _sides
from fedloom.core.context import Ctx
from fedloom.core.layout import Block, Layout
from fedloom.core.updates import RowList, Updates, Zeros
from fedloom.stages import TaskVectors
from fedloom.taskvectors import modulate, unify

LAYOUT = Layout(
    (
        Block("encoder.a", (5, 3)),
        Block("heads.x.w", (4,), role="head", task="x"),
        Block("encoder.b", (6,)),
        Block("heads.y.w", (2,), role="head", task="y"),
        Block("heads.z.w", (3,), role="head", task="z"),
    )
)
D = 21  # common columns


def sent(client: str, tasks: str, seed: int = 0, layout: Layout = LAYOUT) -> Updates:
    """Rows of one client: zero in the columns of other tasks."""
    have = torch.tensor([[b.task in (None, t) for b in layout.blocks] for t in tasks])
    X = torch.randn(len(tasks), layout.d, generator=torch.Generator().manual_seed(seed))
    sizes = torch.tensor([b.size for b in layout.blocks])
    X *= have.repeat_interleave(sizes, dim=1)
    return Updates.of(X, [10.0 + i for i in range(len(tasks))], layout, [(client, t) for t in tasks], present=have)


def empty(updates: Updates) -> Updates:
    return updates.replace(X=torch.zeros_like(updates.X))


def folded(*clients: Updates) -> tuple[Updates, Tensor]:
    """The clients' rows as they travelled, and the same as a matrix."""
    parts = [(Unified().pack(u), empty(u)) for u in clients]
    rows = tuple(r for u in clients for r in u.rows)
    n = torch.cat([u.n for u in clients])
    present = torch.cat([u.present for u in clients if u.present is not None])
    dense = torch.cat([Unified().unpack(packed, like) for packed, like in parts])
    return Updates(clients[0].layout, rows, Folded(tuple(parts)), n, n, present=present), dense


@pytest.mark.parametrize("present", [None, "y"])
def test_rows_of_several_senders_are_packed_at_once_as_each_alone(present: str | None) -> None:
    clients = [sent(name, "y", seed) for seed, name in enumerate("abc")]
    if present is None:
        clients = [client.replace(present=None) for client in clients]
    X = torch.cat([client.X for client in clients])
    for packed, client in zip(Raw().pack_each(X, LAYOUT, clients[0].present), clients, strict=True):
        assert torch.equal(packed["values"], Raw().pack(client)["values"])
    assert Unified().pack_each(X, LAYOUT, None) is None
    if present is None:
        assert torch.equal(Raw().unpack_each(Raw().pack_each(X, LAYOUT, None)), X)
    assert (Raw.unpacks_each, Unified.unpacks_each) == (True, False)


def test_a_single_row_comes_back_bit_for_bit() -> None:
    one = sent("c", "y")
    assert torch.equal(Unified().unpack(Unified().pack(one), empty(one)), one.X)


def test_several_rows_come_back_modulated_and_their_own_columns_as_they_were() -> None:
    three = sent("c", "xyz")
    X = Unified().unpack(Unified().pack(three), empty(three))
    common = LAYOUT.take(three.X, LAYOUT.common)
    assert torch.equal(LAYOUT.take(X, LAYOUT.common), modulate(*unify(common)))
    own = LAYOUT.without(LAYOUT.common)
    assert torch.equal(LAYOUT.take(X, own), LAYOUT.take(three.X, own))
    assert not torch.equal(X, three.X)


@pytest.mark.parametrize("tasks", ["x", "xy", "xyz"])
def test_bytes_are_those_of_the_paper(tasks: str) -> None:
    updates = sent("c", tasks)
    packed = Unified().pack(updates)
    counted = Unified().count(packed, empty(updates))
    k = len(tasks)
    heads = {"x": 4, "y": 2, "z": 3}
    assert counted["encoder", None] == 4 * D
    assert counted["codec", None] == k * (3 + 4)  # 21 bits are 3 bytes, and a scale
    assert {t: counted["head", t] for t in tasks} == {t: 4 * heads[t] for t in tasks}
    assert sum(counted.values()) == sum(t.nbytes for t in packed.values())


def test_folded_rows_are_the_matrix_when_somebody_asks() -> None:
    updates, dense = folded(sent("a", "xy", 1), sent("b", "z", 2), sent("c", "xz", 3))
    assert updates.given.shape == (5, LAYOUT.d)
    assert torch.equal(updates.X, dense)
    assert torch.equal(updates.keep([0, 2, 4]).X, dense[[0, 2, 4]])
    assert isinstance(updates.keep([0, 2, 4]).given, Folded)
    assert torch.equal(updates.select(LAYOUT.select("head")).X, LAYOUT.take(dense, LAYOUT.select("head")))


@pytest.mark.parametrize("part", ["*", "encoder", "head"])
def test_columns_are_taken_without_the_matrix(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = LAYOUT.select(part)
    clients = [sent(name, tasks, i).select(layout) for i, (name, tasks) in enumerate({"a": "x", "b": "xyz"}.items())]
    updates, dense = folded(*clients)
    index = torch.randperm(layout.d)[: layout.d // 2 + 1]
    for how in ("dense", "keep"):
        monkeypatch.setattr(Folded, how, lambda self, *_: pytest.fail("made a matrix"))
    monkeypatch.setattr(Unified, "unpack", lambda self, *_: pytest.fail("made a client's matrix"))
    assert torch.equal(updates.given.take(index), dense[:, index])
    assert torch.equal(RowList(tuple(dense)).take(index), dense[:, index])
    assert torch.equal(Zeros((3, layout.d), torch.float64).take(index), torch.zeros(3, len(index), dtype=torch.float64))


def test_a_row_with_nan_is_dropped_without_the_others() -> None:
    good, bad = sent("a", "xy", 1), sent("b", "xz", 2)
    bad.X[1, -1] = float("nan")
    updates, _ = folded(good, bad)
    left, dropped = updates.finite()
    assert dropped == (("b", "z"),)
    assert left.rows == (("a", "x"), ("a", "y"), ("b", "x"))
    assert isinstance(left.given, Folded)


def test_the_stage_takes_folded_rows_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    updates, dense = folded(sent("a", "xy", 1), sent("b", "z", 2), sent("c", "xz", 3))
    stage = TaskVectors(kappa=1)
    slow, _ = stage(updates.replace(X=dense), {}, Ctx(1))
    monkeypatch.setattr(Folded, "dense", lambda self: pytest.fail("made a matrix"))
    fast, _ = stage(updates, {}, Ctx(1))
    assert fast.rows == (("*", "x"), ("*", "y"), ("*", "z"))
    assert torch.allclose(fast.X, slow.X, atol=1e-6)


def test_heads_are_the_mean_of_their_holders_weighted_by_examples() -> None:
    a, c = sent("a", "xy", 1), sent("c", "xz", 3)
    updates, _ = folded(a, c)
    out, _ = TaskVectors()(updates, {}, Ctx(1))
    head = LAYOUT.select(task="x")
    expected = (10 * a.X[0] + 10 * c.X[0]) / 20
    assert torch.allclose(LAYOUT.take(out.X[0], head), LAYOUT.take(expected, head))
    assert torch.equal(LAYOUT.take(out.X[1], LAYOUT.select(task="y")), LAYOUT.take(a.X[1], LAYOUT.select(task="y")))
    assert not LAYOUT.take(out.X[0], LAYOUT.select(task="z")).any()


def test_heads_of_holders_without_examples_count_alike() -> None:
    layout = Layout((Block("encoder.w", (1,)), Block("heads.x.w", (2,), role="head", task="x")))
    X = torch.tensor([[1.0, 2, 4], [1, 8, 0]])
    out, _ = TaskVectors()(Updates.of(X, [0, 0], layout, [("a", "x"), ("b", "x")]), {}, Ctx(1))
    assert out.X[0, 1:].tolist() == [5, 2]
    out, _ = TaskVectors()(Updates.of(X, [0.25, 0.5], layout, [("a", "x"), ("b", "x")]), {}, Ctx(1))
    assert out.X[0, 1:].tolist() == pytest.approx([6, 4 / 3])


def test_one_client_alone_with_each_task_gets_its_vector_back() -> None:
    updates, dense = folded(sent("a", "x", 1), sent("b", "y", 2))
    out, _ = TaskVectors(cross="none")(updates, {}, Ctx(1))
    assert torch.equal(out.X, dense)


def test_clients_in_any_order_and_what_is_recorded() -> None:
    kept: list[dict[str, object]] = []
    updates, _ = folded(sent("a", "xy", 1), sent("b", "yz", 2))
    other, _ = folded(sent("a", "yz", 2), sent("b", "xy", 1))
    out, _ = TaskVectors()(updates, {}, Ctx(1, record=lambda kind, fields: kept.append({"kind": kind, **fields})))
    swapped, _ = TaskVectors()(other, {}, Ctx(1))
    assert torch.allclose(out.X, swapped.X, atol=1e-6)
    (record,) = kept
    assert record["kind"] == "task-vectors"
    assert record["tasks"] == ["x", "y", "z"]
    S = torch.tensor(record["similarity"])
    assert torch.equal(S, S.t())
    assert 0 <= float(S.min()) <= float(S.max()) <= 1


def test_records_name_partners_and_similarities_to_six_digits() -> None:
    """Of three signs x and y share two, y and z one, x and z none; partners are those above epsilon = 0.5."""
    X = torch.tensor([[1.0, 1, 1], [1, 1, -1], [-1, -1, -1]])
    kept: list[dict[str, object]] = []
    updates = Updates.of(X, rows=[("a", "x"), ("b", "y"), ("c", "z")])
    TaskVectors()(updates, {}, Ctx(1, record=lambda kind, fields: kept.append(fields)))
    assert kept[0]["similarity"] == [[1.0, 0.666667, 0.0], [0.666667, 1.0, 0.333333], [0.0, 0.333333, 1.0]]
    assert kept[0]["partners"] == [["y"], ["x"], []]


def test_a_layout_with_consecutive_common_columns_gives_the_same() -> None:
    order = sorted(range(len(LAYOUT.blocks)), key=lambda i: LAYOUT.blocks[i].task is not None)
    together = Layout(tuple(LAYOUT.blocks[i] for i in order))
    clients = [sent("a", "xy", 1), sent("b", "yz", 2)]
    moved = [
        Updates(together, u.rows, LAYOUT.take(u.X, together), u.n, u.n, present=u.present[:, order])  # type: ignore[index]
        for u in clients
    ]
    out, _ = TaskVectors()(folded(*clients)[0], {}, Ctx(1))
    other, _ = TaskVectors()(folded(*moved)[0], {}, Ctx(1))
    assert torch.equal(LAYOUT.take(out.X, together), other.X)


def test_rows_without_a_task_are_refused() -> None:
    with pytest.raises(ValueError, match=r"rows are \(client, task\), but a row of 'c0' has no task"):
        TaskVectors().on(torch.ones(2, 3), rows=["c0", "c1"])


@pytest.mark.parametrize(("name", "value"), [("rho", 1.5), ("epsilon", -0.1), ("kappa", -1)])
def test_parameters_are_checked(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        TaskVectors(**{name: value})


def test_scale_zeros_and_no_change_of_the_input() -> None:
    updates, _ = folded(sent("a", "xy", 1), sent("b", "yz", 2))
    twice, _ = folded(*(u.replace(X=2 * u.X) for u in (sent("a", "xy", 1), sent("b", "yz", 2))))
    before = updates.given.dense()  # type: ignore[union-attr]
    out, _ = TaskVectors()(updates, {}, Ctx(1))
    assert torch.equal(TaskVectors()(twice, {}, Ctx(1))[0].X, 2 * out.X)
    assert torch.equal(updates.given.dense(), before)  # type: ignore[union-attr]
    nothing, _ = folded(*(u.replace(X=torch.zeros_like(u.X)) for u in (sent("a", "xy", 1), sent("b", "yz", 2))))
    assert not TaskVectors()(nothing, {}, Ctx(1))[0].X.any()


def test_a_block_is_a_matrix_with_a_row_for_each_output() -> None:
    shapes = {(4,): (1, 4), (3, 2): (3, 2), (3, 2, 5): (3, 10), (): (1, 1), (0, 3): (1, 0), (3, 0): (1, 0)}
    assert {shape: _sides(Block("b", shape)) for shape in shapes} == shapes


SMALL = Layout((Block("a", (2, 5)), Block("b", (4,)), Block("heads.x", (3, 2), role="head", task="x")))


def cornered(*present: list[bool]) -> Updates:
    """Two rows: of `a` the first row has a corner of 1 x 3 and the second none, of `b` both have 2 values."""
    X = torch.zeros(2, SMALL.d)
    X[0, :3], X[:, 10:12], X[1, 14] = torch.tensor([1.0, 0, 2]), torch.tensor([[1.0, 3], [0, 4]]), 5.0
    return Updates.of(X, layout=SMALL, present=torch.tensor(present) if present else None)


LACKS = ([True, True, False], [True, True, True])
ENCODER, HEAD, CODEC = ("encoder", None), ("head", "x"), ("codec", None)


@pytest.mark.parametrize(
    ("codec", "present", "sizes", "count"),
    [
        (Raw(), (), {"values": 40}, {ENCODER: 112, HEAD: 48}),
        (Raw(), LACKS, {"values": 34}, {ENCODER: 112, HEAD: 24}),
        (Sparse(), (), {"values": 6, "mask": 5}, {ENCODER: 20, HEAD: 4, CODEC: 5}),
        (Sparse(), LACKS, {"values": 6, "mask": 5}, {ENCODER: 20, HEAD: 4, CODEC: 5}),
        (Cropped(), (), {"values": 8, "corners": 12}, {ENCODER: 28, HEAD: 4, CODEC: 48}),
        (Cropped(), LACKS, {"values": 8, "corners": 10}, {ENCODER: 28, HEAD: 4, CODEC: 40}),
    ],
)
def test_what_travels_is_counted_by_role_and_task_and_comes_back(
    codec: Codec, present: tuple[list[bool], ...], sizes: dict[str, int], count: dict[Any, int]
) -> None:
    updates = cornered(*present)
    packed = codec.pack(updates)
    assert {name: tensor.numel() for name, tensor in packed.items()} == sizes
    assert codec.count(packed, empty(updates)) == count
    assert sum(count.values()) == sum(tensor.nbytes for tensor in packed.values())
    read = codec.read(packed, empty(updates))
    assert torch.equal(codec.unpack(read, empty(updates)), updates.X)
    with pytest.raises(ValueError, match="expected"):
        codec.read({name: tensor[:-1] for name, tensor in packed.items()}, empty(updates))
    for wrong in (None, [*packed.items()], {**packed, "more": packed["values"]}, {"values": packed["values"][:-1]}):
        with pytest.raises(ValueError, match="expected"):
            codec.read(wrong, empty(updates))


@pytest.mark.parametrize("codec", [Sparse(), Cropped()], ids=repr)
def test_what_would_not_shrink_is_sent_as_it_is(codec: Codec) -> None:
    full = cornered().replace(X=torch.ones(2, SMALL.d))
    packed = codec.pack(full)
    assert list(packed) == ["values"]
    assert codec.count(packed, empty(full)) == Raw().count(packed, full)
    assert torch.equal(codec.unpack(codec.read(packed, empty(full)), empty(full)), full.X)
    nothing = empty(full)
    packed = codec.pack(nothing)
    assert packed["values"].numel() == 0
    assert not codec.unpack(codec.read(packed, empty(full)), empty(full)).any()


@pytest.mark.parametrize(("zeros", "shrinks"), [(2, False), (3, True)])
def test_corners_are_worth_it_from_the_first_byte_that_they_save(zeros: int, shrinks: bool) -> None:
    """Two numbers of 4 bytes say which corner it is."""
    layout = Layout((Block("a", (1, 9)),))
    X = torch.ones(1, 9)
    X[0, 9 - zeros :] = 0
    assert ("corners" in Cropped().pack(Updates.of(X, layout=layout))) == shrinks


@pytest.mark.parametrize(
    ("corner", "fits"), [((2, 5), True), ((0, 0), True), ((3, 5), False), ((2, 6), False), ((-1, 5), False)]
)
def test_corners_lie_within_their_blocks(corner: tuple[int, int], fits: bool) -> None:
    like = Updates.of(torch.zeros(1, 10), layout=Layout((Block("a", (2, 5)),)))
    values = torch.ones(max(corner[0] * corner[1], 0))
    packed = {"values": values, "corners": torch.tensor([corner], dtype=torch.int32)}
    if fits:
        assert int(Cropped().unpack(Cropped().read(packed, like), like).sum()) == len(values)
    else:
        with pytest.raises(ValueError, match="corners: expected"):
            Cropped().read(packed, like)


def test_rows_without_any_block_travel_as_nothing() -> None:
    none = cornered([False] * 3, [False] * 3).replace(X=torch.zeros(2, SMALL.d))
    for codec in (Raw(), Sparse(), Cropped()):
        packed = codec.pack(none)
        assert packed["values"].shape == (0,)
        assert codec.count(packed, none) == {}
        assert not codec.unpack(codec.read(packed, none), none).any()


@pytest.mark.parametrize("tasks", ["x", "xy"])
def test_unified_reads_what_it_packed_and_refuses_masks_of_another_width(tasks: str) -> None:
    updates = sent("c", tasks)
    packed = Unified().pack(updates)
    assert packed["masks"].shape == (len(tasks), 3)  # 21 bits
    read = Unified().read(packed, empty(updates))
    assert read.keys() == packed.keys() == {"vector", "masks", "scales", "own"}
    for name in packed:
        with pytest.raises(ValueError, match=name):
            Unified().read({**packed, name: torch.cat([packed[name], packed[name]], -1)}, empty(updates))
    common = Layout((Block("encoder.a", (9,)),))
    alone = Updates.of(torch.ones(1, common.d), layout=common, rows=[("c", "x")])
    assert Unified().pack(alone).keys() == {"vector", "masks", "scales"}
    assert torch.equal(Unified().unpack(Unified().read(Unified().pack(alone), empty(alone)), empty(alone)), alone.X)


def test_norms_of_folded_rows_are_bounds_and_exact_where_one_is_not_finite() -> None:
    clients = sent("a", "xy", 1), sent("b", "z", 2)
    rows, dense = folded(*clients)
    assert bool((rows.given.norms() >= dense.norm(dim=1).double() - 1e-5).all())  # type: ignore[union-attr]
    assert float(rows.given.norms()[2]) == pytest.approx(float(dense[2].norm()))  # type: ignore[union-attr]
    packed = [Unified().pack(client) for client in clients]
    for (a, b), own in zip(((0, 2), (2, 3)), packed, strict=True):
        scale = own["vector"].norm() * own["scales"].abs()
        beside = torch.stack([LAYOUT.take(x, LAYOUT.without(LAYOUT.common)) for x in dense[a:b]])
        expected = (scale.square() + beside.square().sum(1)).sqrt()
        torch.testing.assert_close(rows.given.norms()[a:b], expected.double(), rtol=1e-5, atol=0)  # type: ignore[union-attr]
    assert [upload.client for upload in rows.given.uploads(rows.n)] == ["a", "b"]  # type: ignore[union-attr]
    assert torch.equal(folded(clients[0])[0].given.dense(), dense[:2])  # type: ignore[union-attr]
    broken = clients[0].replace(X=clients[0].X.index_fill(0, torch.tensor([1]), float("nan")))
    found = folded(broken, clients[1])[0].given.norms()  # type: ignore[union-attr]
    assert bool(found[2].isfinite())
    assert not bool(found[1].isfinite())
