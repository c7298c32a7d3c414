"""Small cases of methods: equal models, nobody in a round, what counts examples."""

from __future__ import annotations

import pytest
import torch

from fedloom import Method
from fedloom.core.context import Ctx
from fedloom.core.updates import Updates
from fedloom.methods.clusters.centres import rebalanced
from fedloom.methods.personal.aggregation import attention
from fedloom.stages import ChosenClusters, DomainWeights, Mean, Stage


def test_attention_of_equal_models_is_what_alpha_and_sigma_say() -> None:
    """Their median distance is 0, and nothing is divided by it."""
    for scale in ("absolute", "median"):
        xi = attention(torch.ones(3, 2), 0.2, 1.0, scale)  # type: ignore[arg-type]
        expected = torch.full((3, 3), 0.2).fill_diagonal_(0.6).double()
        torch.testing.assert_close(xi.double(), expected)
    assert attention(torch.ones(1, 2), 0.2, 1.0, "median").tolist() == [[1.0]]


@pytest.mark.parametrize("scale", [1.0, 10.0])
def test_attention_by_the_median_does_not_depend_on_the_unit_of_parameters(scale: float) -> None:
    W = torch.tensor([[0.0], [1.0], [3.0]])  # squared distances 1, 4 and 9
    xi = attention(scale * W, 0.1, 2.0, "median")
    assert float(xi[0, 1]) == pytest.approx(0.1 * float(torch.tensor(-1 / 8).exp()) / 2)
    assert xi.sum(1).tolist() == pytest.approx([1, 1, 1])


@pytest.mark.parametrize(
    ("weights", "stage", "counts"),
    [
        ("size", Mean(), True),
        ("declared", Mean(), True),
        ("uniform", Mean(), False),
        ("uniform", DomainWeights(classes=2, domains=2) >> Mean(), True),
    ],
)
def test_numbers_of_examples_travel_only_where_something_reads_them(weights: str, stage: Stage, counts: bool) -> None:
    assert Method(weights=weights, stage=stage).counts_examples == counts  # type: ignore[arg-type]


def test_clusters_move_no_model_in_a_round_without_rows() -> None:
    stage = ChosenClusters(2)
    nobody = Updates.of(torch.ones(1, 3)).keep([])
    state = stage.init(nobody.layout)
    out, after = stage(nobody, state, Ctx(1))
    assert out.X.tolist() == [[0, 0, 0]]
    assert after == state


def test_clients_of_no_cluster_stay_where_others_are_moved() -> None:
    for seed in range(5):
        moved = rebalanced([2, 0, 0, 0, 2], 2, 1, torch.Generator().manual_seed(seed))
        assert (moved[0], moved[4], sorted(moved[1:4])) == (2, 2, [0, 0, 1])
