from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fedloom.core.layout import Block, Layout, Select
from fedloom.core.updates import Beside, RowList, Updates


class Net(nn.Module):
    """An encoder with a norm whose name does not say so, and two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Sequential(nn.LayerNorm(4)))
        self.heads = nn.ModuleDict({"a": nn.Linear(4, 3), "b": nn.Linear(4, 2)})


ROLES = {"encoder.*": "encoder", "heads.a.*": ("head", "a"), "heads.b.*": ("head", "b")}


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net()


@pytest.fixture
def layout(net: Net) -> Layout:
    return Layout.from_module(net, ROLES)


def test_rows_without_names_are_numbered_in_their_order() -> None:
    for count, first, last in ((1, "c0", "c0"), (9, "c0", "c8"), (10, "c0", "c9"), (11, "c00", "c10")):
        rows = Updates.of(torch.arange(float(count))[:, None])
        assert (rows.rows[0], rows.rows[-1]) == ((first, None), (last, None))
        assert rows.X[:, 0].tolist() == list(range(count))
    assert Updates.of(torch.zeros(0, 2)).rows == ()


def test_norms_are_found_by_type_and_integer_buffers_left_out(layout: Layout) -> None:
    norms = {b.name for b in layout.blocks if b.role == "norm"}
    assert norms == {"encoder.1.weight", "encoder.1.bias", "encoder.2.0.weight", "encoder.2.0.bias"}
    assert layout.select("buffer").names == ("encoder.1.running_mean", "encoder.1.running_var")
    assert not any("num_batches" in n for n in layout.names)
    assert layout.parameters.names + layout.buffers.names == layout.names


def test_a_norm_inside_the_encoder_is_encoder_and_norm(layout: Layout) -> None:
    assert set(layout.parameters.select("norm").names) < set(layout.parameters.select("encoder").names)
    bare = layout.parameters.select(Select(role="encoder", exclude=Select(role="norm")))
    assert bare.names == ("encoder.0.weight", "encoder.0.bias")


def test_select_by_role_task_and_glob(layout: Layout) -> None:
    assert layout.select(task="a").names == ("heads.a.weight", "heads.a.bias")
    assert layout.select(role="head", task=("a", "b"), name="*.bias").names == ("heads.a.bias", "heads.b.bias")
    assert layout.select("*") == layout
    assert layout.tasks == ("a", "b")


def test_a_parameter_that_no_rule_names_is_an_error(net: Net) -> None:
    with pytest.raises(ValueError, match=r"no role rule matches the parameter 'heads.a.weight' \(3, 4\)"):
        Layout.from_module(net, {"encoder.*": "encoder"})


def test_unknown_roles_and_double_names_are_errors() -> None:
    with pytest.raises(ValueError, match="role 'backbone' is unknown"):
        Block("w", (2,), role="backbone")
    with pytest.raises(ValueError, match="two blocks have the name 'w'"):
        Layout((Block("w", (2,)), Block("w", (3,))))


def test_flatten_load_round_trip(net: Net, layout: Layout) -> None:
    vector = layout.flatten(net).clone()
    assert vector.shape == (layout.d,)
    layout.load(torch.arange(float(layout.d)), net)
    assert net.encoder[0].weight.flatten()[0] == 0
    assert torch.equal(layout.flatten(net), torch.arange(float(layout.d)))
    layout.load(vector, net)
    assert torch.equal(layout.flatten(net), vector)
    with pytest.raises(ValueError, match="expected a vector of"):
        layout.load(vector[1:], net)
    assert Layout(()).flatten(net).shape == (0,)


def test_bound_parameters_are_views_of_one_vector(net: Net, layout: Layout) -> None:
    before = layout.flatten(net).clone()
    vector = layout.bind(net)
    assert torch.equal(vector, before)
    assert layout.flatten(net) is vector
    vector.zero_()
    assert all(not p.any() for p in net.parameters())
    net.heads["b"].bias.data.fill_(7)
    assert torch.equal(vector[layout.slice("heads.b.bias")], torch.full((2,), 7.0))


def test_a_layout_of_another_model_is_refused(layout: Layout) -> None:
    with pytest.raises(ValueError, match=r"block 'encoder.0.weight': expected shape \(2, 1, 3, 3\).*found nothing"):
        layout.flatten(nn.Linear(2, 2))


def test_json_round_trip_and_hash(layout: Layout) -> None:
    again = Layout.from_json(json.loads(json.dumps(layout.to_json())))
    assert again == layout
    assert again.hash == layout.hash
    renamed = Layout((Block("other", (2, 1, 3, 3)), *layout.blocks[1:]))
    assert renamed.hash != layout.hash


def test_take_is_a_view_where_columns_are_neighbours(layout: Layout) -> None:
    X = torch.arange(2.0 * layout.d).view(2, -1)
    part = layout.select(task="a")
    assert layout.take(X, part).data_ptr() == X[:, layout.slice("heads.a.weight")].data_ptr()
    scattered = layout.select(name="*.bias")
    Y = layout.put(torch.zeros_like(X), scattered, layout.take(X, scattered))
    assert torch.equal(layout.take(Y, scattered), layout.take(X, scattered))
    assert int((Y != 0).sum()) == 2 * scattered.d


def test_slice_names_what_is_there(layout: Layout) -> None:
    with pytest.raises(KeyError, match=r"no block 'nope'; blocks: encoder.0.weight"):
        layout.slice("nope")


@given(st.permutations(["c", "a", "b"]))
def test_rows_are_sorted_and_everything_follows(order: list[str]) -> None:
    value = {"a": 1.0, "b": 2.0, "c": 3.0}
    u = Updates.of(
        torch.tensor([[value[r]] * 2 for r in order]),
        n=[value[r] for r in order],
        rows=order,
        steps=torch.tensor([value[r] for r in order]),
        domain=[r.upper() for r in order],
    )
    assert u.rows == (("a", None), ("b", None), ("c", None))
    assert u.X[:, 0].tolist() == u.n.tolist() == u.extra["steps"].tolist() == [1, 2, 3]
    assert u.extra["domain"] == ["A", "B", "C"]


def test_default_rows_sort_as_numbers() -> None:
    u = Updates.of(torch.arange(12.0).view(12, 1))
    assert u.X.flatten().tolist() == list(range(12))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Updates.of([1.0, 2.0]), r"X: expected a matrix"),
        (lambda: Updates.of([[1.0]], n=[1, 2]), r"n: expected shape \(1,\), found \(2,\)"),
        (lambda: Updates.of([[1.0], [2.0]], rows=["a"]), "rows: expected 2 keys, found 1"),
        (lambda: Updates.of([[1.0], [2.0]], rows=["a", "a"]), "rows must be sorted and distinct"),
        (lambda: Updates.of([[1.0], [2.0]], steps=[1]), "extra 'steps': expected 2 values, found 1"),
    ],
)
def test_bad_input_is_named(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()  # type: ignore[operator]


def test_one_vector_for_everyone_has_the_blocks_that_some_row_has() -> None:
    layout = Layout(tuple(Block(name, (1,)) for name in "abc"))
    rows = Updates.of(torch.ones(2, 3), [1, 2], layout, present=[[True, False, False], [True, True, False]])
    mean = rows.reduced(torch.ones(3))
    assert mean.present is not None
    assert mean.present.tolist() == [[True, True, False]]
    assert (mean.n.tolist(), rows.keep([]).reduced(torch.ones(3)).present) == ([3], None)


def test_finite_drops_and_names_rows() -> None:
    X = torch.tensor([[1.0, 2.0], [float("nan"), 1.0], [3e38, 3e38], [float("inf"), -float("inf")]])
    kept, dropped = Updates.of(X).finite()
    assert dropped == (("c1", None), ("c3", None))
    assert torch.equal(kept.X, X[[0, 2]])  # a sum that overflows is not a row that is not finite


def test_rows_one_by_one_have_the_bits_of_their_matrix_and_need_none(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    k, sizes = 5, (3, 270_001, 7)  # one part in two places, one of them in several pieces
    layout = Layout(tuple(Block(f"b{i}", (size,)) for i, size in enumerate(sizes)))
    whole = Updates.of(torch.randn(k, layout.d), layout=layout)
    outer, inner = Layout((layout.blocks[0], layout.blocks[2])), Layout((layout.blocks[1],))
    parts = ((outer, whole.select(outer)), (inner, whole.select(inner).mixed(torch.rand(k, k))))
    X = whole.replace(X=Beside(layout, parts)).X
    assert torch.equal(X[:, 3:-7], parts[1][1].X)
    index = torch.tensor([0, 2, 5, 70_000, 270_003, layout.d - 1])
    assert torch.allclose(Beside(layout, parts).take(index), X[:, index])
    W = torch.rand(k, k)
    alike = tuple((part, whole.select(part).mixed(W)) for part in (outer, inner))
    torch.testing.assert_close(Beside(layout, alike).dense(), whole.mixed(W).X)
    fresh = (outer, whole.select(outer)), (inner, whole.select(inner).mixed(parts[1][1].mixing))
    monkeypatch.setattr(Beside, "dense", lambda self: pytest.fail("the matrix is made"))
    rows = list(whole.replace(X=Beside(layout, fresh)).vectors())
    assert torch.equal(torch.stack(rows), X)
    assert torch.equal(torch.stack(Beside(layout, fresh).separate()), X)
    assert "X" not in vars(fresh[1][1])
    assert len({row.untyped_storage().data_ptr() for row in rows}) == k, "each is freed by itself"
    mixed = whole.mixed(torch.rand(k, k))
    assert torch.equal(torch.stack(list(mixed.vectors())), mixed.X)


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("separate", [False, True])
def test_norms_are_those_of_the_rows_after_mixing(mixed: bool, separate: bool) -> None:
    X = torch.randn(3, 6, generator=torch.Generator().manual_seed(0))
    given = RowList(tuple(X)) if separate else X
    rows = Updates.of(X).replace(given=given)
    if mixed:
        rows = rows.mixed(torch.tensor([[0.5, 0.5, 0], [0, 1, 0], [1, -2, 3]]).double())
    torch.testing.assert_close(rows.norms, rows.X.double().norm(dim=1))
    assert bool((rows.X != X).any()) is mixed
    for i, row in enumerate(rows.vectors()):
        torch.testing.assert_close(row, rows.X[i])
