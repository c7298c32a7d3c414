"""Test what each attack sends, by its definition."""

from __future__ import annotations

from statistics import NormalDist

import numpy as np
import pytest
import torch

from fedloom.core.context import Ctx
from fedloom.core.layout import Block, Layout
from fedloom.core.updates import Updates
from fedloom.data.dataset import TensorExamples
from fedloom.methods.robust import ATTACKS
from fedloom.methods.robust.hostile import FlippedLabels, LittleIsEnough
from fedloom.models.tasks.dense import Depth
from fedloom.models.tasks.labels import Classification
from fedloom.training.attack import HONEST, Attack

LAYOUT = Layout((Block("encoder", (3,)), Block("heads.b", (2,), task="b")))
X = torch.tensor([[1.0, -2.0, 2.0, 0.0, 0.0]])
ROWS = Updates.of(X, [7], LAYOUT, ["c1"], present=[[True, False]], steps=[4.0], tasks=["a"], prototypes=[torch.ones(2)])
NAMES = [f"c{i}" for i in range(7)]
HONEST_ROWS = torch.from_numpy(np.random.default_rng(0).normal(size=(7, 5)))


def made(name: str, **params: object) -> Attack:
    attack: Attack = ATTACKS[name].make(**params)
    return attack


def sent(attack: Attack, rounds: int = 1) -> Updates:
    """Return what is sent in the last of some rounds, in each of which the update is twice that of the one before."""
    memory: dict[str, object] = {}
    for round_ in range(1, rounds + 1):
        rows, memory = attack.answer(ROWS.replace(X=X * 2 ** (round_ - 1)), memory, Ctx(round_))
    assert rows is not None
    return rows


@pytest.mark.parametrize(
    ("attack", "expected"),
    [
        (HONEST, X),
        (made("sign-flip"), -X),
        (made("sign-flip", factor=10), -10 * X),
        (made("scaled", factor=3), 3 * X),
        (made("huge", value=5.0), torch.tensor([[5.0, 5.0, 5.0, 0.0, 0.0]])),
        (made("fake"), -X),
        (made("replay"), X),
    ],
    ids=repr,
)
def test_what_one_client_sends(attack: Attack, expected: torch.Tensor) -> None:
    before = ROWS.X.clone()
    assert torch.equal(sent(attack).X, expected), "and nothing in blocks that it lacks"
    assert torch.equal(ROWS.X, before)


def test_a_replay_is_the_first_update_whatever_comes_later() -> None:
    assert torch.equal(sent(made("replay"), rounds=3).X, X)
    assert torch.equal(sent(made("sign-flip"), rounds=3).X, -4 * X)


def test_noise_is_of_the_updates_size_and_of_the_client_and_round() -> None:
    wide = Updates.of(torch.full((1, 10_000), 2.0))
    rows = [made("gaussian", factor=5.0).answer(wide, {}, Ctx(r))[0] for r in (1, 1, 2)]
    one, same, other = (row.X for row in rows if row is not None)
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert float(one.norm() / wide.X.norm()) == pytest.approx(5, rel=0.05)


def test_claims_and_numbers_beside_the_update() -> None:
    rows = sent(made("fake", n=1000, factor=10))
    assert rows.n.tolist() == [1000]
    assert rows.extra["steps"] == [40.0]
    assert rows.extra["tasks"] == ["a"]
    assert torch.equal(rows.extra["prototypes"][0], torch.full((2,), 10.0))


def test_who_drops_out_sends_nothing() -> None:
    assert made("drop-out").answer(ROWS, {}, Ctx(1))[0] is None


def test_what_all_send_who_know_the_honest_rows() -> None:
    mean, std = HONEST_ROWS.mean(0), torch.from_numpy(HONEST_ROWS.numpy().std(axis=0))
    row, memory = made("ipm", factor=0.5).together(HONEST_ROWS, NAMES, 3, {})
    torch.testing.assert_close(row, -0.5 * mean)
    assert memory == {}
    row, memory = made("alie", factor=1.5).together(HONEST_ROWS, NAMES, 3, {})
    torch.testing.assert_close(row, mean - 1.5 * std)
    assert memory == {"clients": 10, "hostile": 3, "z": 1.5}
    row, memory = made("alie").together(HONEST_ROWS, NAMES, 3, {})
    torch.testing.assert_close(row, mean - NormalDist().inv_cdf(4 / 7) * std)
    assert memory == {"clients": 10, "hostile": 3, "z": 0.18}


def test_a_mimic_copies_the_client_that_stands_out_along_the_largest_variance_and_keeps_to_it() -> None:
    """The direction is that of numpy's singular value decomposition; later rounds do not change the choice."""
    centred = HONEST_ROWS.numpy() - HONEST_ROWS.numpy().mean(0)
    z = np.linalg.svd(centred)[2][0]
    expected = NAMES[int(np.abs(HONEST_ROWS.numpy() @ z).argmax())]
    mimic = made("mimic")
    row, memory = mimic.together(HONEST_ROWS, NAMES, 3, {})
    assert memory == {"copied": expected}
    assert row is not None
    assert torch.equal(row, HONEST_ROWS[NAMES.index(expected)])
    later = HONEST_ROWS.clone()
    later[NAMES.index(expected)] = later.mean(0)
    row, again = mimic.together(later, NAMES, 3, memory)
    assert again == memory
    assert row is not None
    assert torch.equal(row, later[NAMES.index(expected)])
    others = [i for i, name in enumerate(NAMES) if name != expected]
    row, again = mimic.together(later[others], [NAMES[i] for i in others], 3, memory)
    assert (row, again) == (None, memory), "where it is absent, each sends its own"
    row, memory = mimic.together(HONEST_ROWS[:1], NAMES[:1], 1, {})
    assert row is not None
    assert memory == {"copied": "c0"}


@pytest.mark.parametrize(("clients", "hostile", "z"), [(50, 12, 0.33), (10, 3, 0.18), (5, 2, 0.43), (4, 3, 3.01)])
def test_the_factor_of_alie(clients: int, hostile: int, z: float) -> None:
    """s = floor(K / 2 + 1) - m; of K = 50 and m = 12: s = 14, (38 - 14) / 38 = 0.63. A majority needs nobody else."""
    assert LittleIsEnough(None).factor_among(clients, hostile) == pytest.approx(z, abs=0.01)
    assert LittleIsEnough(2.0).factor_among(clients, hostile) == 2


@pytest.mark.parametrize("clients", range(2, 25))
def test_the_papers_factor_is_zero_for_one_hostile_client_and_for_two_of_an_even_number(clients: int) -> None:
    """(K - m) / 2 honest rows and more are then needed, and half of the rows lie beyond the mean."""
    zero = [m for m in range(1, clients) if LittleIsEnough(None).factor_among(clients, m) == 0]
    assert zero == ([1] if clients % 2 or clients == 2 else [1, 2])


def test_labels_are_turned_round_in_classification_alone() -> None:
    labels = {"a": torch.tensor([0, 3, -1, 1]), "d": torch.rand(4, 2, 2)}
    honest = TensorExamples(torch.zeros(4, 1, 2, 2), labels)
    tasks = {"a": Classification("a", 4), "d": Depth("d")}
    wrong = FlippedLabels().examples(honest, tasks)
    _, seen = wrong.batch(torch.tensor([1, 2, 3]), torch.device("cpu"))
    assert seen["a"].tolist() == [0, -1, 2]
    assert torch.equal(seen["d"], labels["d"][1:])
    assert wrong.labels_of("a").tolist() == [3, 0, -1, 2]
    assert len(wrong) == 4
    assert FlippedLabels().unfit({"a": tasks["a"]}) is None
    assert FlippedLabels().unfit({"d": tasks["d"]}) == "expected a task with one class an example, found d"
    assert HONEST.examples(honest, tasks) is honest
