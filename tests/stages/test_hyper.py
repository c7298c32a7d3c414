"""FedHCA2's stages: against automatic differentiation and torch's SGD, closed forms, who learns when, what is kept."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from fedloom.core.context import Ctx
from fedloom.core.layout import Block, Layout
from fedloom.core.updates import Updates
from fedloom.methods.fedhca2.aggregation import cross_attention
from fedloom.stages import (
    HyperConflictAverse,
    HyperCrossAttention,
    Identity,
    PCGrad,
    Split,
    Stage,
    conflict_averse_weights,
)
from tests_support import Quick, assert_same, same

DECODER = {"linears.0.weight": (3, 2), "linears.0.bias": (3,), "fuse.weight": (2, 3), "norm.weight": (2,)}
TASKS = ("a", "b", "c")
LAYOUT = Layout(
    (
        Block("encoder.w", (4, 3), role="encoder"),
        Block("encoder.b", (4,), role="encoder"),
        *(Block(f"decoders.{t}.{n}", s, role="decoder", task=t) for t in TASKS for n, s in DECODER.items()),
    )
)
CLIENTS: dict[str, tuple[str, ...]] = {"c0": ("a",), "c1": ("b",), "c2": ("a", "c")}
"""Two single-task clients and a multi-task client."""
RATE = {"lr": 0.03, "momentum": 0.9, "weight_decay": 0.01}


def present_of(clients: Mapping[str, Sequence[str]]) -> Tensor:
    return torch.tensor([[b.task is None or b.task in tasks for b in LAYOUT.blocks] for tasks in clients.values()])


def rows(clients: Mapping[str, Sequence[str]], seed: int, scale: float = 0.7, common: float = 0.5) -> Tensor:
    """Updates (K x d, float64) that have something in common, zero where a client lacks a block."""
    rng = torch.Generator().manual_seed(seed)
    X = torch.randn(len(clients), LAYOUT.d, generator=rng, dtype=torch.float64)
    X += common * torch.randn(LAYOUT.d, generator=torch.Generator().manual_seed(99), dtype=torch.float64)
    sizes = torch.tensor([b.size for b in LAYOUT.blocks])
    return scale * X * present_of(clients).repeat_interleave(sizes, dim=1)


def make(
    X: Tensor, clients: Mapping[str, Sequence[str]] = CLIENTS, order: Sequence[int] | None = None, **extra: Any
) -> Updates:
    order = list(range(len(X)) if order is None else order)
    names = list(clients)
    extra = {key: [values[i] for i in order] for key, values in extra.items()}
    return Updates.of(X[order], None, LAYOUT, [names[i] for i in order], present=present_of(clients)[order], **extra)


def both(**changes: Any) -> Split:
    return Split({"encoder": HyperConflictAverse(**changes), "*": HyperCrossAttention(**changes)})


def play(stage: Stage, rounds: Sequence[Updates], state: Any = None) -> tuple[list[Updates], list[Any], list[Any]]:
    """Results, states and records of some rounds."""
    state = stage.init(LAYOUT) if state is None else state
    outs, states, records = [], [], []
    for number, updates in enumerate(rounds, 1):
        found: list[Any] = []
        ctx = Ctx(number, record=lambda kind, fields, found=found: found.append((kind, fields)))
        out, state = stage(updates, state, ctx)
        outs.append(out)
        states.append(state)
        records.append(found)
    return outs, states, records


def alphas(records: Sequence[Any]) -> list[dict[str, float]]:
    return [dict(fields["weights"]) for found in records for _, fields in found if fields["part"] == "encoder"]


# An independent implementation: named tensors, autograd through the clamp, torch.optim.SGD, a grid for the simplex.


class Reference:
    """FedHCA2's server as its supplement describes it, on dictionaries of tensors."""

    def __init__(self, clients: Mapping[str, Sequence[str]], same: Sequence[Sequence[str]] = ()) -> None:
        self.clients, self.same = clients, same
        self.decoders = [(c, t) for c, tasks in clients.items() for t in tasks]
        self.alpha = torch.full((len(clients),), 0.1, dtype=torch.float64, requires_grad=True)
        layers = {name.rsplit(".", 1)[0] for name in DECODER}
        self.beta = {
            layer: torch.full((len(self.decoders),), 0.1, dtype=torch.float64, requires_grad=True)
            for layer in sorted(layers)
        }
        self.optimizer = torch.optim.SGD([self.alpha, *self.beta.values()], **RATE)
        self.last: dict[tuple[str, str], Tensor] = {}

    def round(self, deltas: Mapping[str, Mapping[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
        """One round: client -> tensor name -> update, to the same, personalised."""
        if self.last:
            self.optimizer.zero_grad()
            outputs = list(self.last.values())
            upstream = [-deltas[client][name] for client, name in self.last]
            torch.autograd.backward(outputs, upstream)
            self.optimizer.step()
        shared = ("encoder.w", "encoder.b")
        D = torch.stack([torch.cat([deltas[c][n].flatten() for n in shared]) for c in self.clients])
        U = self.direction(D, 0.4)
        own = dict(zip(self.clients, D, strict=True))
        for group in self.same:
            mean = torch.stack([own[c] for c in group]).mean(0)
            own |= dict.fromkeys(group, mean)
        for i, c in enumerate(self.clients):
            y = own[c] + self.alpha[i].clamp(0, 1) * U
            self.last[c, "encoder.w"], self.last[c, "encoder.b"] = y[:12].view(4, 3), y[12:]
        for name, shape in DECODER.items():
            V = torch.stack([deltas[c][f"decoders.{t}.{name}"].flatten() for c, t in self.decoders])
            A = torch.softmax(V @ V.T / V.shape[1] ** 0.5, dim=1) @ V
            beta = self.beta[name.rsplit(".", 1)[0]].clamp(0, 1)
            for k, (c, t) in enumerate(self.decoders):
                self.last[c, f"decoders.{t}.{name}"] = (V[k] + beta[k] * A[k]).view(shape)
        result: dict[str, dict[str, Tensor]] = {c: {} for c in self.clients}
        for (c, n), value in self.last.items():
            result[c][n] = value.detach()
        return result

    @staticmethod
    def direction(D: Tensor, c: float) -> Tensor:
        """Three clients: a grid over the simplex, then ever finer ones around its best point."""
        g0 = D.mean(0)
        phi = c * g0.norm()
        steps = torch.linspace(0, 1, 41, dtype=torch.float64)
        grid = torch.tensor([(a, b, 1 - a - b) for a, b in itertools.product(steps, steps) if a + b <= 1 + 1e-12])
        centre, width = grid.mean(0), 2.0
        for _ in range(60):
            points = (centre + width * (grid - grid.mean(0))).clamp(min=0)
            points = torch.cat([points / points.sum(1, keepdim=True), centre[None]])
            g = points @ D
            centre = points[int((g @ g0 + phi * g.norm(dim=1)).argmin())]
            width *= 0.6
        g = centre @ D
        return (g0 + phi * g / g.norm()) / (1 + c * c)


def named(x: Tensor) -> dict[str, Tensor]:
    return {b.name: x[s].view(b.shape) for b, s in zip(LAYOUT.blocks, LAYOUT.slices, strict=True)}


@pytest.mark.parametrize("identical", [False, True])
def test_four_rounds_agree_with_autograd(identical: bool) -> None:
    reference = Reference(CLIENTS, [("c0", "c1")] if identical else ())
    kinds = ["t", "t", "t,u"] if identical else ["a", "b", "a,c"]
    stage = both(**RATE)
    state = stage.init(LAYOUT)
    for number in range(1, 5):
        X = rows(CLIENTS, number)
        records: list[Any] = []
        ctx = Ctx(number, record=lambda kind, fields, found=records: found.append(fields))
        out, state = stage(make(X, domain=["x"] * 3, tasks=kinds), state, ctx)
        expected = reference.round({c: named(x) for c, x in zip(CLIENTS, X, strict=True)})
        for c, x in zip(CLIENTS, out.X, strict=True):
            found = named(x)
            for name, value in expected[c].items():
                torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(list(records[0]["weights"].values()), reference.alpha.tolist(), rtol=0, atol=1e-6)
        for layer, beta in reference.beta.items():
            mine = [records[1]["weights"][c][t][layer] for c, t in reference.decoders]
            torch.testing.assert_close(mine, beta.tolist(), rtol=0, atol=1e-6)
    assert len({round(v, 4) for v in records[0]["weights"].values()}) == 3  # they did learn


# What is learned


def test_alpha_grows_for_who_goes_on_and_shrinks_for_who_goes_back() -> None:
    X = rows(CLIENTS, 1, 0.1)
    stage = HyperConflictAverse()
    encoder = LAYOUT.select("encoder")
    _, states, _ = play(stage, [make(X).select(encoder)])
    U = states[0]["direction"]
    again = torch.zeros_like(X)
    again[0, : encoder.d], again[1, : encoder.d] = U, -U
    _, _, records = play(stage, [make(again).select(encoder)], states[0])
    weights = alphas(records)[0]
    push = 0.01 * float(U @ U)
    decay = 0.01 * 1e-4 * 0.1
    assert weights == pytest.approx({"c0": 0.1 + push - decay, "c1": 0.1 - push - decay, "c2": 0.1 - decay}, rel=1e-12)


def test_a_weight_outside_is_used_clamped_and_moves_by_momentum_and_decay_only() -> None:
    encoder = LAYOUT.select("encoder")
    X = rows(CLIENTS, 1, 30.0, common=3)
    stage = HyperConflictAverse()
    first, states, _ = play(stage, [make(X).select(encoder)])
    for sign, used in ((1, 1.0), (-1, 0.0)):
        away = sign * X.clone()
        outs, after, _ = play(stage, [make(away).select(encoder)], states[0])
        memory = after[0]["clients"]["c0"]
        weight, velocity = memory["weight"], memory["momentum"]
        assert (weight > 1) if used else (weight < 0)
        torch.testing.assert_close(outs[0].X[0], away[0, : encoder.d] + used * after[0]["direction"])
        _, later, _ = play(stage, [make(-sign * X).select(encoder)], after[0])
        pushed = 0.9 * velocity + 1e-4 * weight
        assert later[0]["clients"]["c0"] == pytest.approx({"weight": weight - 0.01 * pushed, "momentum": pushed})
        _, projected, _ = play(HyperConflictAverse(project=True), [make(away).select(encoder)], states[0])
        assert projected[0]["clients"]["c0"]["weight"] == used


def test_at_the_bounds_gradients_pass() -> None:
    encoder = LAYOUT.select("encoder")
    X = rows(CLIENTS, 1, 0.1, common=2)
    for start in (0.0, 1.0):
        stage = HyperConflictAverse(start=start, weight_decay=0)
        _, states, records = play(stage, [make(X).select(encoder), make(X).select(encoder)])
        inner = float(X[0, : encoder.d] @ states[0]["direction"])
        assert alphas(records)[1]["c0"] == pytest.approx(start + 0.01 * inner, rel=1e-12)
        # and none where a weight is a little outside
        outside = start + 0.3 if start else -0.3
        states[0]["clients"]["c0"] = {"weight": outside, "momentum": None}
        assert alphas(play(stage, [make(X).select(encoder)], states[0])[2])[0]["c0"] == outside


def test_beta_is_learned_per_decoder_and_layer() -> None:
    stage = Split({"encoder": Identity(), "*": HyperCrossAttention(weight_decay=0)})
    X = rows(CLIENTS, 1)
    _, states, _ = play(stage, [make(X)])
    added = states[0]["1"]["added"]
    assert {(c, t) for c, tasks in added.items() for t in tasks} == {("c0", "a"), ("c1", "b"), ("c2", "a"), ("c2", "c")}
    again = torch.zeros_like(X)
    part = LAYOUT.select(task="c")
    fuse = part.slice("decoders.c.fuse.weight")
    again[2, LAYOUT.slice("decoders.c.fuse.weight")] = added["c2"]["c"][fuse]
    _, after, _ = play(stage, [make(again)], states[0])
    memory = after[0]["1"]["decoders"]["c2"]
    grown = 0.1 + 0.01 * float(added["c2"]["c"][fuse].square().sum())
    assert memory["c"]["fuse"]["weight"] == pytest.approx(grown)
    assert {memory["c"]["norm"]["weight"], memory["c"]["linears.0"]["weight"], memory["a"]["fuse"]["weight"]} == {0.1}


# Who takes part


def test_only_who_took_part_in_both_rounds_learns() -> None:
    stage = both()
    few = {c: CLIENTS[c] for c in ("c0", "c1")}
    rest = {c: CLIENTS[c] for c in ("c1", "c2")}
    given = [
        make(rows(few, 1), few),  # U from c0 and c1
        make(rows(rest, 2), rest),  # c1 learns, c2 is new
        make(rows(CLIENTS, 3)),  # c1 and c2 learn, c0 does not
    ]
    _, states, records = play(stage, given)
    one, two, three = (s["0"]["clients"] for s in states)
    assert one == {"c0": {"weight": 0.1, "momentum": None}, "c1": {"weight": 0.1, "momentum": None}}
    assert two["c0"] == one["c0"] == three["c0"]
    assert two["c2"] == {"weight": 0.1, "momentum": None}
    assert len({two["c1"]["weight"], one["c1"]["weight"], three["c1"]["weight"]}) == 3
    assert three["c2"]["momentum"] is not None
    assert states[1]["0"]["received"] == ["c1", "c2"]
    assert sorted(states[1]["1"]["added"]) == ["c1", "c2"]
    assert states[1]["1"]["decoders"]["c0"] == states[0]["1"]["decoders"]["c0"]
    assert [sorted(w) for w in alphas(records)] == [["c0", "c1"], ["c1", "c2"], ["c0", "c1", "c2"]]


def test_nobody_or_nothing_changes_no_state() -> None:
    stage = both()
    _, states, _ = play(stage, [make(rows(CLIENTS, 1))])
    zeros = make(torch.zeros(3, LAYOUT.d, dtype=torch.float64))
    outs, after, _ = play(stage, [zeros], states[0])
    assert not outs[0].X.any()
    assert same(after[0], states[0])


@pytest.mark.parametrize("names", list(itertools.permutations(["c0", "c1", "c2"])))
def test_other_names_permute_results_only(names: tuple[str, ...]) -> None:
    """Single- and multi-task clients in any order."""
    renamed = dict(zip(names, CLIENTS.values(), strict=True))
    clients = dict(sorted(renamed.items()))
    where = [list(renamed).index(name) for name in clients]
    extra = {"domain": ["x", "x", "y"], "tasks": ["t", "t", "u"]}
    plain, _, plain_records = play(both(**RATE), [make(rows(CLIENTS, n), **extra) for n in (1, 2, 3)])
    moved = {key: [values[i] for i in where] for key, values in extra.items()}
    other, _, other_records = play(both(**RATE), [make(rows(CLIENTS, n)[where], clients, **moved) for n in (1, 2, 3)])
    for a, b in zip(plain, other, strict=True):
        torch.testing.assert_close(b.X, a.X[where], rtol=1e-9, atol=1e-12)
    for a, b in zip(alphas(plain_records), alphas(other_records), strict=True):
        assert {old: b[new] for old, new in zip(CLIENTS, names, strict=True)} == pytest.approx(a)


# Limits


def test_zero_weights_are_the_identity_bit_for_bit() -> None:
    stage = both(start=0, lr=0)
    given = [make(rows(CLIENTS, n).float(), domain=["x"] * 3, tasks=["a", "b", "a,c"]) for n in (1, 2, 3)]
    outs, _, _ = play(stage, given)
    assert all(torch.equal(out.X, updates.X) for out, updates in zip(outs, given, strict=True))


def test_identical_clients_share_their_mean_wherever_they_stand() -> None:
    X = torch.tensor([[1.0], [2.0], [3.0], [4.0], [5.0]])
    stage = HyperConflictAverse(start=0, lr=0)
    extra = {"tasks": ["a", "a", "b", "a", "a"], "domain": ["x", "x", "x", "x", "y"]}
    assert stage.on(X, **extra)[0].flatten().tolist() == pytest.approx([7 / 3, 7 / 3, 3, 7 / 3, 5])
    assert torch.equal(stage.on(X, tasks=extra["tasks"])[0], X)
    assert torch.equal(HyperConflictAverse(start=0, lr=0, average_identical=False).on(X, **extra)[0], X)


def test_averaging_identical_clients_leaves_direction_and_gradients_alone() -> None:
    X, extra = torch.randn(3, 9).double(), {"tasks": ["a", "a", "b"], "domain": ["x"] * 3}
    apart = HyperConflictAverse(average_identical=False)
    together = HyperConflictAverse()
    assert together.traits.wants == {"extra:tasks", "extra:domain"}
    assert not apart.traits.wants
    (a, s), (b, t) = apart.on(X), together.on(X, **extra)
    torch.testing.assert_close(s["direction"], t["direction"])
    torch.testing.assert_close(b, a - X + torch.stack([(X[0] + X[1]) / 2, (X[0] + X[1]) / 2, X[2]]))
    _, s = apart.on(X + 1, state=s)
    _, t = together.on(X + 1, state=t, **extra)
    assert s["clients"] == t["clients"]


def test_after_a_rule_that_mixes_rows() -> None:
    """A product that is put off gives what the worked-out rows give."""
    X = rows(CLIENTS, 1)
    updates = make(X)
    W = torch.tensor([[1, 0.2, 0], [0, 1, -0.3], [0.1, 0, 1]], dtype=torch.float64)
    stage = both(**RATE)
    lazily, _, _ = play(stage, [updates.mixed(W), updates.mixed(W)])
    plainly, _, _ = play(stage, [make(W @ X), make(W @ X)])
    for a, b in zip(lazily, plainly, strict=True):
        torch.testing.assert_close(a.X, b.X)
    assert (PCGrad() >> stage)(updates, (PCGrad() >> stage).init(LAYOUT), Ctx(1))[0].X.isfinite().all()


def test_blocks_that_a_row_lacks_stay_as_they_are() -> None:
    layout = Layout((Block("encoder.a", (2,)), Block("encoder.b", (2,))))
    X = torch.tensor([[1.0, 2, 3, 4], [2.0, 1, 0, 0]])
    out, _ = HyperConflictAverse().on(X, layout=layout, present=[[True, True], [True, False]])
    assert not out[1, 2:].any()
    assert out[0, 2:].ne(X[0, 2:]).all()


# Conflict-averse weights


def test_closed_forms() -> None:
    x = torch.tensor([3.0, -1, 0, 2], dtype=torch.float64)
    factor = 1 + 0.1 * 1.4 / 1.16
    one, state = HyperConflictAverse().on(x[None])
    torch.testing.assert_close(one[0], factor * x)
    torch.testing.assert_close(state["direction"], x * 1.4 / 1.16)
    equal, _ = HyperConflictAverse().on(x.repeat(3, 1))
    torch.testing.assert_close(equal, factor * x.repeat(3, 1))
    opposed = torch.stack([x, -x])
    assert torch.equal(HyperConflictAverse().on(opposed)[0], opposed)
    zero = torch.stack([x, 0 * x])
    torch.testing.assert_close(HyperConflictAverse().on(zero)[0], zero + 0.1 * x / 2 * 1.4 / 1.16)


@pytest.mark.parametrize(
    ("X", "expected"),
    [
        ([[2.0, 1]], [1]),
        ([[2.0, 1]] * 4, [0.25] * 4),
        ([[0.0, 0]] * 2, [0.5] * 2),
        ([[2.0, 1], [0, 0]], [1, 0]),
        ([[2.0, 1], [-2, -1]], [0.5, 0.5]),
        ([[3.0, -1, 0, 2], [-2, 2, 1, 0], [1, 1, -4, 0]], [0, 1, 0]),
    ],
    ids=["one", "equal", "all zero", "one zero", "opposed", "golden"],
)
def test_conflict_averse_weights(X: list[list[float]], expected: list[float]) -> None:
    D = torch.tensor(X)
    w = conflict_averse_weights(D @ D.t(), 0.4)
    assert w.dtype == torch.float64
    assert w.tolist() == pytest.approx(expected, abs=1e-9)


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="square"):
        conflict_averse_weights(torch.zeros(2, 3), 0.4)
    with pytest.raises(ValueError, match="c < 1"):
        conflict_averse_weights(torch.eye(2), 1.0)


# Cross-attention


def test_attention_of_one_is_itself_and_of_short_rows_their_mean() -> None:
    V = torch.randn(1, 7)
    torch.testing.assert_close(cross_attention(V), V)
    V = 1e-6 * torch.randn(3, 7).double()
    torch.testing.assert_close(cross_attention(V), V.mean(0).expand(3, -1), rtol=1e-6, atol=0)
    V = 1e6 * torch.eye(3).double()
    torch.testing.assert_close(cross_attention(V), V)


def test_rows_without_a_decoder_pass_and_a_model_without_decoders_has_nothing_to_do() -> None:
    some = {"c0": ("a",), "c1": (), "c2": ("b",)}
    X = rows(some, 1)
    (out,), (state,), _ = play(Split({"encoder": Identity(), "*": HyperCrossAttention()}), [make(X, some)])
    assert torch.equal(out.X[1], X[1])
    assert sorted(state["1"]["decoders"]) == ["c0", "c2"]
    encoder = Layout((Block("encoder.w", (4,)),))
    X = torch.randn(3, 4).double()
    stage = both()
    whole, state = stage(Updates.of(X, layout=encoder), stage.init(encoder), Ctx(1))
    torch.testing.assert_close(whole.X, HyperConflictAverse().on(X, layout=encoder)[0])
    assert state["1"] == {"decoders": {}, "added": {}}


def test_equal_names_of_different_shapes_do_not_meet() -> None:
    shapes = {"a": (2,), "b": (2,), "c": (3,)}
    layout = Layout(tuple(Block(f"decoders.{t}.l.weight", s, role="decoder", task=t) for t, s in shapes.items()))
    X = torch.zeros(3, layout.d).double()
    for i, s in enumerate(layout.slices):
        X[i, s] = torch.randn(s.stop - s.start).double()
    present = torch.eye(3).bool()
    out, _ = HyperCrossAttention().on(X, layout=layout, present=present)
    torch.testing.assert_close(out[2, 4:], 1.1 * X[2, 4:])
    V = torch.stack([X[0, :2], X[1, 2:4]])
    both_ = V + 0.1 * torch.softmax(V @ V.T / 2**0.5, 1) @ V
    torch.testing.assert_close(torch.stack([out[0, :2], out[1, 2:4]]), both_)


def test_in_a_unified_model_only_trained_decoders_meet() -> None:
    stage = Split({"encoder": Identity(), "*": HyperCrossAttention()})
    X = rows(CLIENTS, 1)
    (own,), (state,), _ = play(stage, [make(X)])
    unified = Updates.of(X, None, LAYOUT, list(CLIENTS), support=present_of(CLIENTS))
    (out,), (other,), _ = play(stage, [unified])
    assert torch.equal(out.X, own.X)
    assert same(state, other)
    (all_,), (third,), _ = play(stage, [Updates.of(X, None, LAYOUT, list(CLIENTS))])
    assert sorted(third["1"]["decoders"]["c0"]) == ["a", "b", "c"]
    assert not torch.equal(all_.X, own.X)


# The method


def test_zero_weights_are_local_training(quick: Quick) -> None:
    own = ("model.heads=own",)
    frozen = "method={name: fedhca2, alpha: 0, beta: 0, lr: 0, average_identical: false}"
    assert_same(quick("method=local", *own), quick(frozen, *own), models_only=True)
    assert_same(quick("method=local", *own), quick("method={name: fedhca2, encoder: none, decoder: none}", *own))


def test_identical_clients_of_a_run_share_encoders(quick: Quick) -> None:
    import fedloom.engines.api as api

    changes = ("partition.clients_per_task=2", "model.heads=own", "training.rounds=1")
    models = api.trained_models(quick("method={name: fedhca2, alpha: 0, lr: 0}", *changes).folder)
    a, b, other = (models[c]["encoder.conv1.weight"] for c in ("digit-0", "digit-1", "parity-0"))
    assert torch.equal(a, b)
    assert not torch.equal(a, other)
    assert not torch.equal(models["digit-0"]["heads.digit.weight"], models["digit-1"]["heads.digit.weight"])
