"""F2DC's domain-aware weights against worked examples."""

from __future__ import annotations

import math

import pytest
import torch

from fedloom.core.context import Ctx
from fedloom.core.stage import check_closed
from fedloom.core.updates import Updates
from fedloom.methods.f2dc.rules import domain_aware_weights, domain_discrepancy
from fedloom.stages import DomainWeights, Mean

# 80 % of each PACS domain, 30 % of that per client; 2, 3, 2, 3 clients.
PACS = {"photo": (400, 2), "art": (492, 3), "cartoon": (562, 2), "sketch": (943, 3)}
N = [n for n, count in PACS.values() for _ in range(count)]
DOMAIN = [name for name, (_, count) in PACS.items() for _ in range(count)]


def weights(stage: DomainWeights, n, state=None, **extra):
    updates = Updates.of(torch.zeros(len(n), 1), n, **extra)
    out, state = stage(updates, {} if state is None else state, Ctx(1))
    return out.weight, state


def test_the_worked_example_of_pacs():
    w, state = weights(DomainWeights(classes=7), N, domain=DOMAIN)
    expected = [p for p, c in zip((0.09685, 0.09815, 0.09914, 0.10452), (2, 3, 2, 3), strict=True) for _ in range(c)]
    assert w.tolist() == pytest.approx(expected, abs=5e-6)
    assert state == {"domains": ["art", "cartoon", "photo", "sketch"]}
    n = torch.tensor([400.0, 492, 562, 943], dtype=torch.float64)
    d = domain_discrepancy((n / sum(N))[:, None].expand(-1, 7), 4)
    assert d.tolist() == pytest.approx([0.34757, 0.31994, 0.29892, 0.18448], abs=5e-6)
    torch.testing.assert_close(weights(DomainWeights(classes=7, domains=4), N)[0], w)


def test_golden_values():
    w, _ = weights(DomainWeights(classes=7, domains=4), [2, 1, 1])
    assert w.tolist() == pytest.approx([0.339374, 0.330313, 0.330313], abs=5e-7)


@pytest.mark.parametrize("kept", [[0], [0, 9], [2, 3, 4], range(10)])
@pytest.mark.parametrize("form", ["total", "class", "none"])
def test_any_participants_get_weights_that_sum_to_one(kept, form):
    extra = {"classes": torch.tensor([[float(c + i) for c in range(3)] for i in kept])}
    stage = DomainWeights(classes=3, discrepancy=form)
    w, _ = weights(stage, [N[i] for i in kept], domain=[DOMAIN[i] for i in kept], **extra)
    assert float(w.sum()) == pytest.approx(1)
    assert (w > 0).all()


def test_the_number_of_classes_comes_from_their_counts():
    w, _ = weights(DomainWeights(domains=4), N, classes=torch.ones(len(N), 7))
    torch.testing.assert_close(w, weights(DomainWeights(classes=7, domains=4), N)[0])
    assert "extra:classes" in DomainWeights(domains=4).traits.reads


def test_one_client_and_one_domain():
    assert weights(DomainWeights(classes=7), [5], domain=["x"])[0].tolist() == [1]
    # Q = 1: d = sqrt(C/2) |n/N - 1|
    w, _ = weights(DomainWeights(classes=2), [1, 3], domain=["x", "x"])
    a, b = (1 / (1 + math.exp(-z)) for z in (0.25 - 0.4 * 0.75, 0.75 - 0.4 * 0.25))
    assert w.tolist() == pytest.approx([a / (a + b), b / (a + b)])


def test_sample_weights_are_those_of_fedavg():
    assert weights(DomainWeights(classes=7, discrepancy="none"), [2, 1, 1])[0].tolist() == [0.5, 0.25, 0.25]


def test_class_shares_with_equal_class_mixtures_are_the_total_form():
    extra = {"classes": torch.tensor([[2.0] * 7, [1.0] * 7, [1.0] * 7])}
    total, _ = weights(DomainWeights(classes=7, domains=4), [14, 7, 7])
    torch.testing.assert_close(
        weights(DomainWeights(classes=7, domains=4, discrepancy="class"), [14, 7, 7], **extra)[0], total
    )


def test_class_shares_by_hand():
    # Class 0 all at the first client, class 1 shared 1:3, class 2 nobody's: B = (1, 1/4, 1/2), (0, 3/4, 1/2), Q = 2.
    stage = DomainWeights(classes=3, domains=2, alpha=0.0, beta=1.0, discrepancy="class")
    w, _ = weights(stage, [5, 3], classes=torch.tensor([[4.0, 1, 0], [0, 3, 0]]))
    assert w.tolist() == pytest.approx([0.5, 0.5])
    stage = DomainWeights(classes=3, domains=1, alpha=0.0, beta=1.0, discrepancy="class")
    w, _ = weights(stage, [5, 3], classes=torch.tensor([[4.0, 1, 0], [0, 3, 0]]))
    a, b = (1 / (1 + math.exp(math.sqrt(s / 2))) for s in (9 / 16, 1 + 1 / 16))
    assert w.tolist() == pytest.approx([a / (a + b), b / (a + b)])


def test_a_class_that_nobody_has_is_shared_by_all_domains_and_one_example_is_enough():
    stage = DomainWeights(classes=3, domains=3, alpha=0.0, beta=1.0, discrepancy="class")
    w, _ = weights(stage, [5, 3], classes=torch.tensor([[4.0, 1, 0], [0, 0, 0]]))
    a, b = (1 / (1 + math.exp(d)) for d in (2 / 3, 1 / 3))
    assert w.tolist() == pytest.approx([a / (a + b), b / (a + b)])


def test_more_data_and_less_discrepancy_weigh_more():
    size = torch.tensor([0.2, 0.3, 0.3], dtype=torch.float64)
    w = domain_aware_weights(size, torch.tensor([0.1, 0.1, 0.2], dtype=torch.float64))
    assert w[1] > w[0]
    assert w[1] > w[2]


def test_an_extreme_beta_leaves_weights_finite():
    w, _ = weights(DomainWeights(classes=7, domains=4, beta=1e6), [2, 1, 1])
    assert w.tolist() == pytest.approx([0, 0.5, 0.5])


def test_domains_seen_in_earlier_rounds_count():
    stage = DomainWeights(classes=7)
    _, state = weights(stage, N, domain=DOMAIN)
    later, state = weights(stage, [2, 1, 1], state, domain=["art"] * 3)
    torch.testing.assert_close(later, weights(DomainWeights(classes=7, domains=4), [2, 1, 1])[0])
    assert len(state["domains"]) == 4


def test_permuted_clients_get_permuted_weights():
    order = [3, 0, 7, 9, 5, 1, 8, 2, 6, 4]
    plain, _ = weights(DomainWeights(classes=7), N, domain=DOMAIN)
    mixed, _ = weights(DomainWeights(classes=7), [N[i] for i in order], domain=[DOMAIN[i] for i in order])
    torch.testing.assert_close(mixed, plain[order])


def test_what_it_asks_for():
    assert DomainWeights(classes=7).traits.reads == {"n", "extra:domain"}
    assert DomainWeights(classes=7, domains=4).traits.reads == {"n"}
    assert DomainWeights(classes=2, domains=4, discrepancy="class").traits.reads == {"n", "extra:classes"}
    check_closed([DomainWeights(classes=7) >> Mean()], "t")
    with pytest.raises(ValueError, match="writes 'weight'"):
        check_closed([DomainWeights(classes=7)], "t")


@pytest.mark.parametrize(
    "wrong", [{"classes": 0}, {"classes": 2, "domains": 0}, {"classes": 2, "beta": math.inf},
              {"classes": 2, "discrepancy": "domain"}],
)  # fmt: skip
def test_wrong_numbers_are_refused(wrong):
    with pytest.raises(ValueError, match="DomainWeights"):
        DomainWeights(**wrong)
