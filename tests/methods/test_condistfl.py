"""ConDistFL: labels of some classes only, the marginal loss, and the distillation against the literal formula."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

import fedloom as fl
from fedloom.errors import RecipeError
from fedloom.methods.distill.rules import conditional_dice, groups
from fedloom.models.multitask import MultiTask, Plain
from fedloom.models.tasks.dense import Semseg
from fedloom.tasks import Multilabel, Regression
from fedloom.training.flat import FlatModel

LABELLED = {"a": (1,), "b": (2, 3)}


def test_labels_outside_a_clients_classes_become_their_sets() -> None:
    task = Semseg("s", 4, labelled=LABELLED)
    assert task.sets == ((0, 1), (0, 2, 3))
    assert task.codes("a")[[0, 1, 2, 3, 255]].tolist() == [5, 1, 5, 5, 255]  # type: ignore[index]
    assert task.codes("b")[[0, 1, 2, 3, 255]].tolist() == [4, 4, 2, 3, 255]  # type: ignore[index]
    assert task.codes("c") is None
    assert Semseg("s", 4, labelled={"a": (3, 1, 2)}).codes("a") is None


def test_the_loss_adds_up_the_probabilities_of_a_set() -> None:
    task = Semseg("s", 4, labelled=LABELLED)
    z = torch.tensor([0.1, 2.0, -1.0, 0.7]).view(1, 4, 1, 1).expand(1, 4, 1, 3)
    p = [math.exp(v) / sum(map(math.exp, (0.1, 2.0, -1.0, 0.7))) for v in (0.1, 2.0, -1.0, 0.7)]
    y = torch.tensor([[[5, 1, 255]]])
    expected = -(math.log(p[0] + p[2] + p[3]) + math.log(p[1])) / 2
    assert float(task.loss(z, y)) == pytest.approx(expected, rel=1e-6)
    weighted = Semseg("s", 4, labelled=LABELLED, class_weights=(3.0, 1.0, 9.0, 9.0))
    expected = -(3 * math.log(p[0] + p[2] + p[3]) + math.log(p[1])) / 4
    assert float(weighted.loss(z, y)) == pytest.approx(expected, rel=1e-6)


def test_a_set_counts_as_background_in_the_metric() -> None:
    metric = Semseg("s", 4, labelled=LABELLED).metric()
    guess = torch.tensor([0, 3, 1, 1, 2])  # the truth is none of 1, none of 1, none of 1, 1, none
    z = torch.nn.functional.one_hot(guess, 4).float().t().view(1, 4, 1, 5)
    metric.update(z, torch.tensor([[[5, 5, 5, 1, 255]]]))
    assert metric.confusion is not None
    assert metric.confusion[0].tolist() == [2, 1, 0, 0]
    assert metric.confusion[1].tolist() == [0, 1, 0, 0]


def test_the_distillation_is_the_papers_by_hand() -> None:
    """Two groups (background; an organ and its tumour) of three pixels, of which the teacher calls one the client's."""
    torch.manual_seed(0)
    z, t = torch.randn(1, 4, 1, 3), torch.randn(1, 4, 1, 3)
    t[0, :, 0, 2] = torch.tensor([0.0, 9.0, 0.0, 0.0])  # filtered: the client's own class 1
    of = groups((0, 2, 3), ((2, 3),))
    assert of == [[0], [2, 3]]
    total = 0.0
    for group in of:
        products = sums = 0.0
        for i in (0, 1):
            q, p = (
                sum(math.exp(v[0, c, 0, i] / 2) for c in group) / sum(math.exp(v[0, c, 0, i] / 2) for c in (0, 2, 3))
                for v in (z, t)
            )
            products, sums = products + q * p, sums + q + p
        total += 1 - 2 * products / (sums + 1e-5)
    inside = torch.isin(t.argmax(1), torch.tensor([0, 2, 3]))
    assert inside.flatten().tolist() == [True, True, False]
    found = conditional_dice(z, t, torch.ones(1, 1, 3).bool(), of, 2.0)
    assert float(found) == pytest.approx(total / 2, rel=1e-5)
    # the condition takes the softmax over the set alone: the logit of the client's own class changes nothing
    other = z.clone()
    other[0, 1] += 5
    assert torch.equal(conditional_dice(other, t, torch.ones(1, 1, 3).bool(), of, 2.0), found)


def test_no_pixel_that_the_teacher_agrees_on_gives_no_gradient() -> None:
    z = torch.randn(1, 3, 2, 2, requires_grad=True)
    t = torch.zeros(1, 3, 2, 2)
    t[:, 1] = 1
    conditional_dice(z, t, torch.ones(1, 2, 2).bool(), [[0], [2]], 2.0).backward()
    assert z.grad is not None
    assert not z.grad.any()


def segmented(n: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return pictures of two bars of different grey on noise, with their masks (classes 1 and 2)."""
    draw = torch.Generator().manual_seed(seed)
    x, y = torch.rand(n, 1, 8, 8, generator=draw) * 0.3, torch.zeros(n, 8, 8, dtype=torch.int64)
    for i in range(n):
        for organ in (1, 2):
            row = int(torch.randint(0, 8, (), generator=draw))
            x[i, 0, row], y[i, row] = x[i, 0, row] * 0.3 + 0.45 * organ, organ
    return x, y


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Conv2d(1, 8, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(8, 3, 1))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"organs": self.net(x)}


def federation(**labelled: tuple[int, ...]) -> fl.Federation:
    def masks(seed: int, own: tuple[int, ...]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        x, y = segmented(24, seed)
        return x, {"organs": torch.where(torch.isin(y, torch.tensor(own)), y, 0)}

    clients = {who: fl.Client(masks(i, own)) for i, (who, own) in enumerate(labelled.items())}
    x, y = segmented(16, 9)
    tasks = {"organs": fl.task(kind="segmentation", classes=3, labelled=labelled)}
    return fl.Federation(clients, tasks, test=(x, {"organs": y}))


@pytest.mark.parametrize("method", [{"name": "condistfl"}, {"name": "condistfl", "lam": 0}])
def test_without_anything_left_open_or_without_lambda_it_is_fedavg(method: dict[str, Any]) -> None:
    fed = federation(north=(1,), south=(2,)) if "lam" in method else federation(north=(1, 2), south=(1, 2))
    net = Net()
    a, b = (fl.run(fed, model=net, method=m, rounds=2).model().state_dict() for m in ("fedavg", method))
    assert all(torch.equal(tensor, b[name]) for name, tensor in a.items())


def test_two_sites_with_one_organ_each_learn_both() -> None:
    torch.manual_seed(0)
    fed = federation(north=(1,), south=(2,))
    result = fl.run(fed, model=Net(), method="condistfl", rounds=10, lr=0.3, epochs=2, batch_size=4)
    assert result.final().values["organs"]["miou"] > 0.5  # 0.4 with masks as they are


def test_missing_labels_of_a_multilabel_task_are_distilled() -> None:
    x = torch.randn(40, 5)
    y = (x[:, :2] > 0).float()
    north, south = y.clone(), y.clone()
    north[:, 1] = float("nan")
    south[:, 0] = float("nan")
    clients = {"north": fl.Client((x[:20], north[:20])), "south": fl.Client((x[20:], south[20:]))}
    fed = fl.Federation(clients, {"signs": fl.task(kind="multilabel", classes=2)}, test=(x, y))
    plain, ours = (fl.run(fed, method=m, rounds=10, lr=0.1, batch_size=4) for m in ("fedavg", "condistfl"))
    assert ours.final().values["signs"]["auc"] > 0.8
    assert plain.final().values != ours.final().values


def test_predictions_under_another_model_leave_the_model_as_it_is() -> None:
    layers = torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2), torch.nn.Dropout()
    net = MultiTask(Plain(torch.nn.Sequential(*layers), False, 2), (Regression("t"),), {"t": torch.nn.Identity()})
    layers[2].eval()
    model = FlatModel(net)
    before, other = model.vector.clone(), model.vector.clone() * 2
    x = torch.randn(4, 3)
    found = model.outputs_under(other, x, ("t",))["t"]
    z = (2 * layers[0](x)) / (2 + 1e-5) ** 0.5  # the running mean is 0, the variance 1, and both weights are doubled
    torch.testing.assert_close(found, 2 * z)
    assert torch.equal(model.vector, before)
    assert [layer.training for layer in layers] == [True, True, False]


@pytest.mark.parametrize(
    ("labelled", "said"),
    [
        ({"north": (0,)}, r"client 'north': \[0\] found, expected different classes from 1 to 2"),
        ({"north": ()}, "expected different classes from 1 to 2"),
    ],
)
def test_wrong_labels_are_refused(labelled: dict[str, Any], said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        federation(**labelled)


def test_unknown_clients_are_refused() -> None:
    fed = federation(north=(1,), south=(2,))
    (task,) = fed.dataset.tasks
    fed.dataset = replace(fed.dataset, tasks=(replace(task, labelled={"nord": (1,)}),))  # type: ignore[call-arg]
    with pytest.raises(RecipeError, match="tasks.organs.labelled: unknown client 'nord'. Did you mean 'north'"):
        fl.run(fed, model=Net(), rounds=1)


def test_ones_own_loss_and_sets_of_labels_are_refused() -> None:
    task = fl.task(kind="segmentation", classes=3, labelled={"a": [1]}, loss=torch.nn.CrossEntropyLoss())
    with pytest.raises(RecipeError, match="labelled= found beside a loss"):
        task.named("t").codes("a")
    with pytest.raises(RecipeError, match="of a segmentation"):
        fl.task(kind="multilabel", classes=2, labelled={"a": [1]})
    assert Multilabel("m", 2).codes("a") is None
