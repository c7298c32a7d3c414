"""Peers simulated in one matrix: gossip on a graph, and mixing by similarity. Models mixed by their cosines, and stages
that act tensor by tensor."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from fedloom.core.context import Ctx
from fedloom.core.layout import Block, Layout
from fedloom.core.stage import combined_by
from fedloom.core.updates import Updates
from fedloom.errors import RecipeError
from fedloom.methods.clusters.aggregation import cosine_mixing
from fedloom.stages import CosineMix, Gossip, Identity, Mean, MinNorm, PerBlock, SimilarityMix

X = torch.tensor([[4.0, 0], [0, 8], [-4, 0], [0, 0]])
BASE = torch.tensor([[0.0, 4], [2, 0], [0, -4], [8, 8]])


def test_models_are_mixed_not_updates() -> None:
    # Everybody adds what it gets to its own start, and so ends at the mean of the trained models around it.
    out, _ = Gossip().on(X, base=BASE)
    trained = BASE + X
    torch.testing.assert_close(BASE[0] + out[0], (trained[0] + trained[1] + trained[3]) / 3)
    torch.testing.assert_close((BASE + out).mean(0), trained.mean(0))


@pytest.mark.parametrize(
    "stage", [Gossip(), Gossip("star"), Gossip("small-world", {"k": 2, "p": 0.5}, every=1)], ids=repr
)
def test_gossip_reaches_consensus_at_the_mean(stage: Gossip) -> None:
    models = BASE.double()
    mean = models.mean(0)
    for round_ in range(1, 80):
        out, _ = stage.on(torch.zeros_like(models), base=models, round=round_, seed=1)
        models = models + out
        torch.testing.assert_close(models.mean(0), mean)
    torch.testing.assert_close(models, mean.expand(4, 2))


def test_the_complete_graph_gives_all_the_plain_mean() -> None:
    out, _ = Gossip("full").on(X, n=[1, 2, 3, 4])
    torch.testing.assert_close(out, Mean().on(X)[0].expand(4, 2))


def test_gossip_without_links_is_local_training() -> None:
    assert torch.equal(Gossip("erdos-renyi", {"p": 0.0}).on(X, base=BASE)[0], X)


def test_gossip_refuses_what_it_cannot_do() -> None:
    with pytest.raises(RecipeError, match="unknown topology 'rings'"):
        Gossip("rings")
    with pytest.raises(RecipeError, match="below the number of peers, 4, found 5"):
        Gossip("ring", {"hops": 5}).on(X)
    with pytest.raises(ValueError, match="undirected"):
        Gossip("random-k", {"k": 1})
    with pytest.raises(RecipeError, match="Did you mean 'hops'"):
        Gossip("ring", {"hop": 1})


def weights(stage: SimilarityMix, rows: torch.Tensor, **extra: Any) -> torch.Tensor:
    return stage.matrix(Updates.of(rows, **extra), Ctx(1, 0))


def test_similarity_by_hand() -> None:
    rows = torch.tensor([[1.0, 0], [2, 0], [0, 3], [-1, 0]])
    # Of the first: (cos + 1) / 2 = 1, 1/2, 0; the two best and itself: 1, 1, 1/2
    W = weights(SimilarityMix(2, 0.0), rows)
    assert W[0].tolist() == pytest.approx([0.4, 0.4, 0.2, 0])
    assert W[3].tolist() == pytest.approx([0, 0, 1 / 3, 2 / 3])  # (cos + 1) / 2 is 0 to rows 0 and 1
    assert weights(SimilarityMix(2, 0.0, include_self=False), rows)[0].tolist() == pytest.approx([0, 2 / 3, 1 / 3, 0])
    assert weights(SimilarityMix(2, 0.0, step=0.5), rows)[0].tolist() == pytest.approx([0.7, 0.2, 0.1, 0])
    # Half of it the overlap of tasks: 0 with row 1, a half with row 2, 1 with row 3: 0.5, 0.5, 0.5
    tasks = ["a", "b", "a,b", "a"]
    assert weights(SimilarityMix(2, 0.5), rows, tasks=tasks)[0].tolist() == pytest.approx([0.5, 0.25, 0.25, 0])
    assert weights(SimilarityMix(2, 1.0), rows, tasks=tasks)[0].tolist() == pytest.approx([0.4, 0, 0.2, 0.4])


def test_similar_models_are_mixed_at_one_instant_and_recorded() -> None:
    rows = torch.tensor([[1.0, 0], [2, 0], [0, 3], [-1, 0]])
    updates = Updates.of(rows, base=BASE)
    seen = []
    stage = SimilarityMix(2, 0.0)
    out, _ = stage(updates, {}, Ctx(1, record=lambda kind, fields: seen.append((kind, fields))))
    W = stage.matrix(updates, Ctx(1, 0)).float()
    torch.testing.assert_close(BASE + out.X, W @ (BASE + rows))
    kind, fields = seen[0]
    assert kind == "mixing"
    assert fields["weights"]["c3"] == pytest.approx({"c2": 1 / 3, "c3": 2 / 3})


def test_nobody_to_mix_with() -> None:
    assert torch.equal(SimilarityMix(0).on(X)[0], X)
    assert torch.equal(SimilarityMix().on(X[:1])[0], X[:1])


LAYOUT = Layout((Block("encoder.a", (2,)), Block("encoder.b", (2,))))


def t(*values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_weights_by_hand() -> None:
    X = t([1, 0], [5, 0], [0, 2])
    W = cosine_mixing(X @ X.T, tau=0.5)
    assert W[0].tolist() == pytest.approx([math.e**2 / (2 * math.e**2 + 1)] * 2 + [1 / (2 * math.e**2 + 1)])
    torch.testing.assert_close(W.sum(1), torch.ones(3, dtype=torch.float64))
    assert cosine_mixing(t([25]), 0.5).tolist() == [[1]]


def test_it_is_models_that_are_compared_and_mixed() -> None:
    base, X = t([4, 3], [4, 3], [-3, 4]), t([-3, -3], [1, -3], [3, -2])
    updates = Updates.of(X, base=base)
    out, _ = CosineMix(0.5)(updates, {}, Ctx(1))
    trained = t([1, 0], [5, 0], [0, 2])
    torch.testing.assert_close(base + out.X, cosine_mixing(trained @ trained.T, 0.5) @ trained)


def test_the_ends_of_tau() -> None:
    X = t([1, 0.2], [0.9, 0.3], [-1, 2])
    torch.testing.assert_close(CosineMix(1e9).on(X)[0], X.mean(0, keepdim=True).expand(3, -1))
    torch.testing.assert_close(CosineMix(1e9).on(X[:2])[0], X[:2].mean(0, keepdim=True).expand(2, -1))
    torch.testing.assert_close(CosineMix(1e-6).on(X)[0], X)


def test_one_row_and_equal_rows_come_back() -> None:
    X = torch.randn(1, 5)
    assert torch.equal(CosineMix().on(X)[0], X)
    assert torch.equal(CosineMix().on(X.repeat(3, 1))[0], X.repeat(3, 1))


def test_a_model_that_is_zero_resembles_no_other() -> None:
    out = CosineMix(0.01).on(t([0, 0], [1, 1], [2, 2]))[0]
    torch.testing.assert_close(out[0], t(0, 0))
    torch.testing.assert_close(out[1], t(1.5, 1.5))


def test_each_tensor_by_itself() -> None:
    X = t([1, 0, 3, 0], [0, 1, -6, 0])
    whole, _ = MinNorm().on(X, layout=LAYOUT)
    each, _ = PerBlock(MinNorm()).on(X, layout=LAYOUT)
    torch.testing.assert_close(each, t([0.5, 0.5, 0, 0]))
    assert not torch.allclose(whole, each)
    torch.testing.assert_close(each[:, :2], MinNorm().on(X[:, :2])[0])


def test_what_looks_at_columns_alone_is_the_same_per_tensor() -> None:
    X = torch.randn(3, 4)
    for stage in (Mean(), Identity()):
        assert torch.equal(PerBlock(stage).on(X, [1, 2, 3], layout=LAYOUT)[0], stage.on(X, [1, 2, 3], layout=LAYOUT)[0])


def test_a_product_put_off_is_worked_out() -> None:
    W = t([0.5, 0.5], [0, 1])
    updates = Updates.of(t([1, 0, 3, 0], [0, 1, -6, 0]), layout=LAYOUT).mixed(W)
    stage = PerBlock(MinNorm())
    out, _ = stage(updates, stage.init(LAYOUT), Ctx(1))
    torch.testing.assert_close(out.X, stage.on(updates.X, layout=LAYOUT)[0])


def test_tensors_that_only_some_have() -> None:
    X = t([1, 2, 3, 4], [5, 6, 0, 0])
    out, _ = PerBlock(MinNorm(unit=False)).on(X, layout=LAYOUT, present=[[True, True], [True, False]])
    torch.testing.assert_close(out[0, 2:], t(3, 4))


def test_a_mean_inside_cannot_be_replaced_by_name() -> None:
    with pytest.raises(ValueError, match="would replace a mean"):
        combined_by(PerBlock(MinNorm()), MinNorm())
