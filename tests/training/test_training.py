"""The local loop against plain PyTorch, the rules, the schedule, and the learning rate by validation progress."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedloom as fl
from fedloom.core.context import Ctx, State
from fedloom.data.dataset import TensorExamples
from fedloom.engines.api import Result, trained_models
from fedloom.errors import RecipeError, UserError
from fedloom.federation.rounds.build import build as built
from fedloom.federation.rounds.evaluation import at_once, evaluate
from fedloom.federation.rounds.federation import Part
from fedloom.methods.personal.aggregation import Anchor
from fedloom.models.multitask import MultiTask
from fedloom.models.tasks.labels import Classification
from fedloom.models.tasks.own import Own
from fedloom.training import FlatModel, LocalRule, Optimizer, Plateau, Proximal, Schedule, Training, View
from fedloom.training.flat import Adam, Sgd, build, export_state, import_state, learning_rate, rate
from fedloom.training.loop import Additions, Work, _Turn, batches, channels_last, clip, laid_out, passes, train
from fedloom.training.stacked import Stackable, group, refuse, train_stacked
from quadratics import Point, Valley
from tests_support import load_recipe

TASKS = {"a": (Classification("a", 3), 1.0), "b": (Classification("b", 2), 2.0)}


class Encoder(nn.Module):
    """Two layers, optionally with batch norm or dropout."""

    features = 4

    def __init__(self, extra: nn.Module | None = None) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(6, 4), extra or nn.Identity(), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def network(extra: nn.Module | None = None) -> MultiTask:
    torch.manual_seed(0)
    return MultiTask(Encoder(extra), [task for task, _ in TASKS.values()])


def data(n: int = 20) -> TensorExamples:
    g = torch.Generator().manual_seed(1)
    labels = {"a": torch.randint(3, (n,), generator=g), "b": torch.randint(2, (n,), generator=g)}
    return TensorExamples(torch.randn(n, 1, 2, 3, generator=g), labels)


def run(
    module: nn.Module, training: Training, rules: tuple[LocalRule, ...] = (), **options: Any
) -> tuple[Any, FlatModel]:
    model = FlatModel(copy.deepcopy(module))
    work = Work("c", data(), torch.arange(20), options.pop("tasks", TASKS))
    added = Additions((slice(0, model.layout.parameters.d),), rules, **options.pop("added", {}))
    return train(model, work, training, options.pop("ctx", Ctx(1, 0)), added, **options), model


def by_hand(module: nn.Module, training: Training, make: Any, clip: float | None = None) -> nn.Module:
    """The same work with an ordinary module and optimiser."""
    module = copy.deepcopy(module)
    optimizer = make(module.parameters())
    examples = data()
    for _, index in batches(torch.arange(20), training, Ctx(1, 0), "c"):
        x, y = examples.batch(index, torch.device("cpu"))
        out = module(x, ("a", "b"))
        loss = nn.functional.cross_entropy(out["a"], y["a"]) + 2 * nn.functional.cross_entropy(out["b"], y["b"])
        optimizer.zero_grad()
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(module.parameters(), clip)
        optimizer.step()
    return module


OPTIMISERS = [
    (Optimizer(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
     lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)),
    (Optimizer(name="adam", lr=0.01), lambda p: torch.optim.Adam(p, lr=0.01)),
    (Optimizer(name="adamw", lr=0.01, weight_decay=0.1), lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1)),
    (Optimizer(name="adamw", lr=0.01, fused=True), lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0)),
]  # fmt: skip


@pytest.mark.parametrize(("config", "make"), OPTIMISERS, ids=["sgd", "adam", "adamw", "fused"])
@pytest.mark.parametrize("length", [{"epochs": 3}, {"steps": 7}], ids=["epochs", "steps"])
def test_equals_ordinary_training(config: Optimizer, make: Any, length: dict[str, int]) -> None:
    training = Training(optimizer=config, batch_size=8, **length)
    result, model = run(network(), training)
    for (name, ours), theirs in zip(
        model.module.named_parameters(), by_hand(network(), training, make).parameters(), strict=True
    ):
        torch.testing.assert_close(ours, theirs, msg=name, rtol=1e-4, atol=1e-6)
    assert result.steps == (9 if "epochs" in length else 7)
    assert set(result.losses) == {"a", "b"}


STEPS = {
    "sgd": (Optimizer(lr=0.1), torch.optim.SGD, {}),
    "momentum": (Optimizer(lr=0.1, momentum=0.9), torch.optim.SGD, {"momentum": 0.9}),
    "nesterov": (Optimizer(lr=0.1, momentum=0.9, nesterov=True), torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "adam": (Optimizer(name="adam", lr=0.1), torch.optim.Adam, {}),
    "betas": (Optimizer(name="adam", lr=0.1, betas=(0.5, 0.9)), torch.optim.Adam, {"betas": (0.5, 0.9)}),
    "eps": (Optimizer(name="adam", lr=0.1, eps=0.01), torch.optim.Adam, {"eps": 0.01}),
    "adamw": (Optimizer(name="adamw", lr=0.1), torch.optim.AdamW, {}),
}  # fmt: skip


@pytest.mark.parametrize("decay", [0, 0.1])
@pytest.mark.parametrize(("config", "kind", "options"), STEPS.values(), ids=STEPS)
def test_our_steps_are_torchs_bit_for_bit(config: Optimizer, kind: Any, options: dict[str, Any], decay: float) -> None:
    config = config.model_copy(update={"weight_decay": decay})
    ours, grad = torch.randn(50, generator=torch.Generator().manual_seed(0)), torch.zeros(50)
    theirs = nn.Parameter(ours.clone())
    theirs.grad = grad
    optimizer = build(config, ours, grad, (slice(0, 50),))
    expected = kind([theirs], lr=0.1, weight_decay=decay, **options)
    for step in range(5):
        grad.normal_(generator=torch.Generator().manual_seed(step))
        if step == 3:  # state goes through a checkpoint
            state = export_state(optimizer)
            optimizer = build(config, ours, grad, (slice(0, 50),))
            import_state(optimizer, state)
        optimizer.step()
        expected.step()
        assert torch.equal(ours, theirs.detach())


def test_only_fused_steps_load_torchs_optimisers() -> None:
    x, grad = torch.ones(3), torch.ones(3)
    fused = build(Optimizer(lr=0.5, fused=True), x, grad, (slice(0, 3),))
    assert isinstance(fused, torch.optim.SGD)
    fused.step()
    assert x.tolist() == [0.5, 0.5, 0.5]
    assert isinstance(build(Optimizer(lr=0.5), x, grad, (slice(0, 3),)), Sgd)
    assert isinstance(build(Optimizer(name="adamw"), x, grad, (slice(0, 3),)), Adam)


def test_clipping_equals_torch() -> None:
    training = Training(optimizer=Optimizer(lr=1.0), batch_size=8, epochs=2, clip_norm=0.1)
    _, model = run(network(), training)
    expected = by_hand(network(), training, lambda p: torch.optim.SGD(p, lr=1.0), clip=0.1)
    for ours, theirs in zip(model.module.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_kept_optimiser_state_continues() -> None:
    config = Training(optimizer=Optimizer(name="adamw", lr=0.01), batch_size=20, steps=1, rounds=2, keep_optimizer=True)
    first, model = run(network(), config)
    again = copy.deepcopy(first.optimizer)
    second, model = run(model.module, config, memory={"optimizer": first.optimizer})
    assert float(second.optimizer["0"]["0"]["step"]) == 2
    assert float(first.optimizer["0"]["0"]["step"]) == float(again["0"]["0"]["step"]) == 1  # not changed
    assert torch.equal(first.optimizer["0"]["0"]["exp_avg"], again["0"]["0"]["exp_avg"])
    fresh, _ = run(network(), Training(steps=1))
    assert fresh.optimizer == {}


def test_other_heads_neither_move_nor_decay() -> None:
    config = Training(optimizer=Optimizer(name="adamw", lr=0.1, weight_decay=0.5), epochs=2)
    module = network()
    _, model = run(module, config, tasks={"a": TASKS["a"]})
    assert torch.equal(model.module.heads["b"].weight, module.heads["b"].weight)
    assert not torch.equal(model.module.heads["a"].weight, module.heads["a"].weight)
    assert model.layout.trained(("a",)).tasks == ("a",)


def test_frozen_parameters_stay() -> None:
    module = network()
    module.encoder.layers[1].weight.requires_grad_(False)
    _, model = run(module, Training(optimizer=Optimizer(lr=0.1, weight_decay=0.5)))
    assert torch.equal(model.module.encoder.layers[1].weight, module.encoder.layers[1].weight)
    assert not torch.equal(model.module.encoder.layers[1].bias, module.encoder.layers[1].bias)


def test_only_modules_with_parameters_of_their_own_and_none_trained_are_put_into_eval_mode() -> None:
    module = network(nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5)))
    model = FlatModel(module)
    turn = _Turn(model.layout.parameters.select(name="heads.*"), None, [], 1)  # type: ignore[arg-type]
    module.train()
    turn.freeze_others(model)
    linear, (norm, dropout) = module.encoder.layers[1], module.encoder.layers[2]
    assert [part.training for part in (linear, norm, dropout, module)] == [False, False, True, True]
    assert all(head.training for head in module.heads.values())


def test_a_last_batch_of_one_is_left_out_under_batch_norm_only() -> None:
    training = Training(batch_size=19, epochs=1)
    with_norm, _ = run(network(nn.BatchNorm1d(4)), training)
    without, _ = run(network(), training)
    assert (with_norm.steps, with_norm.examples) == (1, 19)
    assert (without.steps, without.examples) == (2, 20)
    assert [len(b) for _, b in batches(torch.arange(1), Training(batch_size=1, steps=3), Ctx(), "c", True)] == [1] * 3


@pytest.mark.parametrize("mu", [0.0, 0.5, 1.0, 2.0])
def test_an_anchor_draws_with_mu_times_the_distance_in_shared_columns(mu: float) -> None:
    params, anchor, grad = torch.tensor([3.0, 1, 5]), torch.tensor([1.0, 2, 0]), torch.tensor([0.5, 0.5, 0.5])
    view = View(params, grad, torch.zeros(3), (slice(0, 2),), broadcast={"anchor": anchor})
    Anchor(mu).grad(view, {})
    assert grad.tolist() == [0.5 + 2 * mu, 0.5 - mu, 0.5]


def test_passes_counts_the_batches() -> None:
    for examples in range(1, 12):
        for size in range(1, 12):
            for skip in (False, True):
                training = Training(batch_size=size)
                drawn = list(batches(torch.arange(examples), training, Ctx(1, 0), "c", skip))
                assert passes([examples], training, skip) == len(drawn), (examples, size, skip)
    assert (
        passes([3], Training(batch_size=2))
        == len(list(batches(torch.arange(3), Training(batch_size=2), Ctx(), "c")))
        == 2
    )


def test_order_of_data_is_a_function_of_seed_round_client_and_epoch() -> None:
    def order(seed: int, round_: int, client: str, epochs: int = 1) -> list[list[int]]:
        training = Training(batch_size=20, epochs=epochs)
        return [b.tolist() for _, b in batches(torch.arange(20), training, Ctx(round_, seed), client)]

    assert order(0, 1, "c") == order(0, 1, "c")
    assert len({str(order(*key)) for key in [(0, 1, "c"), (1, 1, "c"), (0, 2, "c"), (0, 1, "d")]}) == 4
    two = order(0, 1, "c", epochs=2)
    assert two[0] == order(0, 1, "c")[0] != two[1]
    assert sorted(two[1]) == list(range(20))


def test_proximal_gradient_is_the_closed_form_and_pulls_to_the_base() -> None:
    y, base = torch.tensor([1.0, 2.0, 5.0]), torch.tensor([0.0, 4.0, 1.0])
    view = View(y, torch.ones(3), base, (slice(0, 2),))
    Proximal(0.5).grad(view, {})
    assert view.grad.tolist() == [1.5, 0.0, 1.0]  # only the shared columns
    Proximal(1.0).grad(view, {})
    assert view.grad.tolist() == [2.5, -2.0, 1.0]
    view.grad.fill_(-0.0)
    Proximal(0.0).grad(view, {})
    assert bool(view.grad.signbit().all()), "nothing is added, not even zeros"
    _, loose = run(network(), Training(epochs=5, optimizer=Optimizer(lr=0.1)))
    _, tight = run(network(), Training(epochs=5, optimizer=Optimizer(lr=0.1)), (Proximal(10.0),))
    start = FlatModel(network()).params
    assert float((tight.params - start).norm()) < 0.5 * float((loose.params - start).norm())


@dataclass(frozen=True)
class Pull(LocalRule):
    """A rule with everything: a penalty, state and an extra."""

    strength: float
    provides = frozenset({"extra:pulled"})

    def init(self, base: Tensor) -> State:
        return {"rounds": 0}

    def penalty(self, view: View, state: State) -> Tensor | None:
        assert view.outputs is not None
        return self.strength * sum(out.square().mean() for out in view.outputs.values())

    def finish(self, view: View, state: State) -> tuple[State, dict[str, Any]]:
        return {"rounds": state["rounds"] + 1}, {"pulled": float(view.step)}


def test_rules_add_up_and_keep_their_state() -> None:
    config = Training(epochs=10, optimizer=Optimizer(lr=0.1))
    result, strong = run(network(), config, (Pull(3.0), Proximal(0.1)))
    assert result.rules == {"0": {"rounds": 1}, "1": {}}
    assert result.extra == {"pulled": 10.0}
    _, weak = run(network(), config)
    x = data().images
    assert strong.module(x)["a"].abs().mean() < 0.6 * weak.module(x)["a"].abs().mean()
    result, _ = run(network(), config, (Pull(1.0),), memory={"rules": result.rules})
    assert result.rules["0"] == {"rounds": 2}


def test_rules_see_the_rate_and_number_of_each_step() -> None:
    seen: list[Any] = []

    class Watch(LocalRule):
        def begin(self, view: View, state: State) -> State:
            seen.append((view.lr, view.step))
            return state

        def grad(self, view: View, state: State) -> None:
            seen.append((view.lr, view.step))

    schedule = Schedule(name="step", step_every=1, gamma=0.5)
    run(network(), Training(epochs=2, batch_size=10, optimizer=Optimizer(lr=0.4), schedule=schedule), (Watch(),))
    assert seen == [(0, 0), (0.4, 0), (0.4, 1), (0.2, 2), (0.2, 3)]


def test_half_precision_trains() -> None:
    result, model = run(network(), Training(epochs=30, optimizer=Optimizer(lr=0.1), precision="bf16"))
    first, _ = run(network(), Training(epochs=1, precision="bf16"))
    assert result.losses["a"] < first.losses["a"]
    assert model.params.dtype == torch.float32


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (Schedule(), [1, 1, 1, 1]),
        (Schedule(warmup=2), [0.5, 1, 1, 1]),
        (Schedule(warmup=2, warmup_start=0.5), [0.75, 1, 1, 1]),
        (Schedule(name="cosine"), [1, 0.5 + 0.5 * math.cos(math.pi / 4), 0.5, 0.5 - 0.5 * math.cos(math.pi / 4)]),
        (Schedule(name="cosine", warmup=1, floor=0.1), [1, 1, 0.1 + 0.9 * 0.75, 0.1 + 0.9 * 0.25]),
        (Schedule(name="step", step_every=2, gamma=0.1), [1, 1, 0.1, 0.1]),
        (Schedule(name="step", step_every=1, gamma=0.1, floor=0.05), [1, 0.1, 0.05, 0.05]),
    ],
)
def test_schedule(schedule: Schedule, expected: list[float]) -> None:
    assert [rate(schedule, epoch, 4) for epoch in range(4)] == pytest.approx(expected)
    training = Training(rounds=2, epochs=2, schedule=schedule, optimizer=Optimizer(lr=0.5))
    found = [learning_rate(training, number, epoch) for number, epoch in ((1, 0), (1, 1), (2, 0), (2, 1), (1, 7))]
    assert found == pytest.approx([0.5 * x for x in (*expected, expected[1])]), "beyond the last epoch it stays"


@pytest.mark.parametrize("rules", [(), (Proximal(0.5),)], ids=["plain", "proximal"])
@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("optimiser", [Optimizer(lr=0.1, momentum=0.9), Optimizer(name="adamw", lr=0.01)])
@pytest.mark.parametrize("schedule", [Schedule(), Schedule(name="step", step_every=1)], ids=["constant", "step"])
def test_stacked_equals_one_at_a_time(
    rules: tuple[LocalRule, ...], clip: float | None, optimiser: Optimizer, schedule: Schedule
) -> None:
    training = Training(
        optimizer=optimiser, batch_size=4, epochs=2, clip_norm=clip, stacked=True, schedule=schedule, rounds=2
    )
    module, examples, ctx = network(), data(), Ctx(1, 0)
    base = FlatModel(copy.deepcopy(module)).params
    one = {"a": TASKS["a"]}
    stack = [
        Stackable(Work("p", examples, torch.arange(0, 7), TASKS), base),
        Stackable(Work("q", examples, torch.arange(7, 14), TASKS), base),
        Stackable(Work("t", examples, torch.arange(1, 4), TASKS), base),  # has half as many batches
        Stackable(Work("r", examples, torch.arange(14, 20), TASKS), base),
        Stackable(Work("s", examples, torch.arange(0, 7), one), base),
    ]
    groups = group(stack, training)
    assert [[c.work.who for c in g] for g in groups] == [["p", "q", "r", "t"], ["s"]]
    for members in groups:
        model = FlatModel(copy.deepcopy(module))
        shared = (slice(0, len(base)),)
        stacked = train_stacked(model, members, training, ctx, shared, rules)
        for c, params, result in zip(members, *stacked, strict=True):
            alone = FlatModel(copy.deepcopy(module))
            expected = train(alone, c.work, training, ctx, Additions(shared, rules))
            torch.testing.assert_close(params, alone.params, rtol=1e-4, atol=1e-6)
            assert (result.steps, result.examples) == (expected.steps, expected.examples)
            assert result.waiting == 0  # nothing is loaded
            assert result.losses == pytest.approx(expected.losses, rel=1e-4)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [["p", "q"]]),
        ({"schedule": Schedule(name="cosine")}, [["p", "q"]]),  # each with its rate: their epochs begin at other steps
        ({"schedule": Schedule(name="cosine"), "batch_size": 8}, [["p", "q"]]),
    ],
)
def test_who_shares_a_stack(settings: Any, expected: list[list[str]]) -> None:
    training = Training(**{"batch_size": 4, "epochs": 2, **settings})
    examples = data()
    stack = [Stackable(Work(who, examples, torch.arange(n), TASKS), torch.zeros(1)) for who, n in (("q", 3), ("p", 7))]
    assert sorted(sorted(c.work.who for c in g) for g in group(stack, training)) == expected
    own = {name: (Own.of(task, loss=nn.CrossEntropyLoss()), weight) for name, (task, weight) in TASKS.items()}
    stack = [Stackable(Work(who, examples, torch.arange(n), own), torch.zeros(1)) for who, n in (("q", 6), ("p", 7))]
    assert len(group(stack, training)) == 2  # nobody knows what such a loss makes of padding


def test_targets_of_several_numbers_are_stacked_too() -> None:
    """A step of 0.1 down h (y - b) from 0 is 0.1 times the mean of h b over a client's examples."""
    h, b = torch.rand(2, 4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    examples = TensorExamples(torch.zeros(4, 1), {"valley": torch.stack([h, b], dim=-1)})
    tasks = {"valley": (Valley("valley", 1), 1.0)}
    members = [
        Stackable(Work(who, examples, torch.tensor(index), tasks), torch.zeros(3, dtype=torch.float64))
        for who, index in (("p", [0, 1]), ("q", [2, 3]))
    ]
    training = Training(optimizer=Optimizer(lr=0.1), batch_size=2, stacked=True)
    stacked = train_stacked(FlatModel(Point(3)), group(members, training)[0], training, Ctx(1, 0), (slice(0, 3),))
    for params, pair in zip(stacked[0], ((h * b)[:2], (h * b)[2:]), strict=True):
        torch.testing.assert_close(params, 0.1 * pair.mean(0))


@pytest.mark.parametrize(("gone", "batches_"), [(5, 7), (11, 4)])
def test_one_pass_measures_tasks_that_lack_few_labels(gone: int, batches_: int) -> None:
    """Of 14 examples in batches of 2, tasks lack 5 or 11; a task is scored as on its labelled examples alone."""
    model, examples, seen = FlatModel(network()), data(), []
    examples.labels["a"][3 : 3 + gone] = -1
    examples.labels["b"][:gone] = -1
    model.module.encoder.register_forward_hook(lambda *_: seen.append(1))
    part, tasks = Part(examples, np.arange(14), "c"), {name: task for name, (task, _) in TASKS.items()}
    scores = evaluate(model, part, tasks, 2)
    assert len(seen) == batches_
    for name, task in tasks.items():
        rows = part.of(name).index
        loss = nn.functional.cross_entropy(
            model.module(examples.images[rows], (name,))[name], examples.labels[name][rows]
        )
        assert scores[name]["loss"] == pytest.approx(loss.item(), rel=1e-6)
        assert scores[name]["accuracy"] == evaluate(model, part.of(name), {name: task}, 2)[name]["accuracy"]


@pytest.mark.parametrize("stacked", [False, True])
def test_losses_are_means_over_the_labelled_examples(stacked: bool) -> None:
    training = Training(optimizer=Optimizer(lr=1e-12), batch_size=4, epochs=1, stacked=stacked)
    model, examples, index, ctx = FlatModel(network()), data(), torch.arange(14), Ctx(1, 0)
    examples.labels["a"][3:12] = -1  # some batches have no label at all
    there, labelled = torch.tensor([0, 1, 2, 12, 13]), {"a": examples.labels["a"][:14] >= 0}
    shared = (slice(0, len(model.params)),)
    out = model.module(examples.images, ("a", "b"))
    expected = {
        "a": nn.functional.cross_entropy(out["a"][there], examples.labels["a"][there]).item(),
        "b": nn.functional.cross_entropy(out["b"][:14], examples.labels["b"][:14]).item(),
    }
    if stacked:
        members = [
            Stackable(Work("c", examples, index, TASKS, labelled), model.params.clone()),
            Stackable(Work("d", examples, index, TASKS, labelled), model.params.clone()),
        ]
        _, results = train_stacked(model, group(members, training)[0], training, ctx, shared)
    else:
        results = [train(model, Work("c", examples, index, TASKS, labelled), training, ctx, Additions(shared))]
    for result in results:
        assert result.losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("extra", "settings", "rules", "message"),
    [
        (nn.BatchNorm1d(4), {}, (), r"has buffers \(encoder.layers.2.running_mean\)"),
        (nn.Dropout(0.5), {}, (), r"has dropout \(encoder.layers.2\)"),
        (None, {"keep_optimizer": True}, (), "keep_optimizer is set"),
        (None, {"precision": "bf16"}, (), "precision is bf16"),
        (None, {}, (Pull(1.0),), r"Pull\(strength=1.0\) works on batches or keeps state"),
    ],
)
def test_what_cannot_be_stacked_is_refused(extra: Any, settings: Any, rules: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        refuse(network(extra), Training(stacked=True, **settings), rules)


def test_a_model_that_decides_by_its_data_cannot_be_stacked() -> None:
    class Decides(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if bool(x.sum() > 0) else -x

    module = network(Decides())
    model = FlatModel(module)
    member = Stackable(Work("p", data(), torch.arange(4), TASKS), model.params.clone())
    with pytest.raises(UserError, match="the model cannot be stacked"):
        train_stacked(model, group([member], Training())[0], Training(), Ctx(1), (slice(0, 1),))


@pytest.mark.parametrize("channels", [1, 3])
def test_images_with_the_channels_innermost_are_the_same_images(channels: int) -> None:
    x = torch.randn(2, channels, 4, 5)
    assert torch.equal(channels_last(x), x)
    assert channels_last(x).stride() == (20 * channels, 1, 5 * channels, channels)


@pytest.mark.parametrize("size", [1e-6, 1.0])
def test_gradients_are_clipped_as_torch_clips_them(size: float) -> None:
    ours = [size * torch.tensor([3.0, 0.0]), size * torch.tensor([4.0])]
    theirs = [nn.Parameter(torch.zeros_like(g)) for g in ours]
    for parameter, g in zip(theirs, ours, strict=True):
        parameter.grad = g.clone()
    clip(ours, 2.5 * size)
    nn.utils.clip_grad_norm_(theirs, 2.5 * size)
    for parameter, g in zip(theirs, ours, strict=True):
        torch.testing.assert_close(g, parameter.grad, rtol=1e-6, atol=0)


SHORT = ("training.steps=1", "training.optimizer={name: sgd, lr: 0.1}", "partition.val_fraction=0.2")


@pytest.mark.parametrize("settings", [{}, {"patience": 1, "factor": 0.1}, {"patience": 2, "min_delta": 0.1}])
def test_the_learning_rate_falls_as_torchs_scheduler_says(settings: dict[str, Any]) -> None:
    rule, zero = Plateau(**settings), torch.zeros(1)
    optimizer = torch.optim.SGD([zero.clone().requires_grad_()], lr=1.0)
    # torch's patience is the number of bad rounds that it forgives, ours the number after which it acts
    theirs = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, factor=rule.factor, patience=rule.patience - 1, threshold=rule.min_delta, eps=0
    )
    state, ours, expected = rule.init(zero), [], []
    for loss in (3.0, 2, 2, 1.9, 2.1, 1.95, 1.99, 1.9, 1.2, 1.3, 1.25, 1.19, 1.3, 1.4, 1.5):
        view = View(zero, zero, zero, (), validate=lambda loss=loss: loss)
        state, _ = rule.finish(view, rule.begin(view, state))
        theirs.step(loss)
        ours.append(view.scale)
        expected.append(optimizer.param_groups[0]["lr"])
    assert ours == pytest.approx(expected)
    assert ours[-1] < 1


def test_a_clients_steps_get_shorter(quick: Callable[..., Result]) -> None:
    """Only a loss a hundred times lower counts as better, so the second round moves a thousandth as far, or as far."""

    def model(rounds: int, *more: str) -> torch.Tensor:
        tensors = trained_models(quick(*SHORT, f"training.rounds={rounds}", *more).folder)[""]
        return torch.cat([tensor.flatten().double() for tensor in tensors.values()])

    once, plain = model(1), model(2)
    same, short = (
        model(2, f"method.add={{plateau: {{patience: 1, min_delta: 0.99, factor: {factor}}}}}") for factor in (1, 0.001)
    )
    assert torch.equal(same, plain)
    assert float((short - once).norm()) == pytest.approx(0.001 * float((plain - once).norm()), rel=0.1)


def test_it_needs_validation_data() -> None:
    with pytest.raises(RecipeError, match=r"Plateau.* measures models on validation data, but client .* has none"):
        built(load_recipe("partition.val_fraction=0", "method.add={plateau: }"))


def test_a_task_without_validation_labels_does_not_count_for_plateau(tmp_path):
    """Its loss is nan, which never improves, and the learning rate fell in every round."""
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] > 0).long()
    none = torch.full((10,), -1)
    client = fl.Client(train=(x[:30], {"a": y[:30], "b": y[:30]}), val=(x[30:], {"a": y[30:], "b": none}))
    fed = fl.Federation({"ann": client}, {"a": fl.task(classes=2), "b": fl.task(classes=2)})
    model = fl.model(torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU()), heads="linear")

    def trained(**add):
        method = {"name": "fedavg", "add": add}
        return fl.run(fed, model=model, method=method, rounds=3, lr=0.1, seed=0).model("ann").state_dict()

    plain, watched = trained(), trained(plateau={"patience": 1, "min_delta": 0})
    assert all(torch.equal(plain[name], watched[name]) for name in plain)


@pytest.mark.parametrize(
    ("capability", "convolution", "first"),
    [
        ("AVX2", {"in_channels": 4, "kernel_size": 1, "stride": 2}, True),
        ("AVX512", {"in_channels": 4, "kernel_size": 1, "stride": 2}, False),
        ("AVX2", {"in_channels": 16, "groups": 4, "kernel_size": 1, "stride": (1, 2)}, True),
        ("AVX2", {"in_channels": 8, "kernel_size": 1, "stride": 2}, False),
        ("AVX2", {"in_channels": 4, "kernel_size": 1}, False),
        ("AVX2", {"in_channels": 4, "kernel_size": (1, 3), "stride": 2}, False),
    ],
)
def test_images_have_the_channels_first_where_the_other_order_would_damage_memory(
    capability: str, convolution: dict[str, Any], first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    module = nn.Sequential(nn.ReLU(), nn.Conv2d(out_channels=8, **convolution))
    module.roles = lambda: {"*": "encoder"}  # type: ignore[assignment]
    model = FlatModel(module)
    x = torch.zeros(2, convolution["in_channels"], 6, 5)
    for image in (x, channels_last(x)):
        assert laid_out(model, image, innermost=True).is_contiguous() == first
    assert laid_out(model, x, innermost=False).is_contiguous()
    assert laid_out(model, channels_last(x), innermost=False).is_contiguous() == first


def test_as_many_examples_are_measured_at_once_as_memory_has_room_for() -> None:
    assert at_once(512, (3, 96, 128)) == at_once(512, (7,)) == 512
    assert at_once(512, (3, 512, 512)) == 34
    assert at_once(4, (3, 512, 512)) == 4
    assert at_once(512, (3, 9000, 9000)) == 1


def _unlike(view: View) -> Tensor:
    return (view.params - view.base).square().sum()


@dataclass(frozen=True)
class Slip(LocalRule):
    """A rule of a user who made one mistake."""

    kind: str
    provides = frozenset({"extra:known"})

    def begin(self, view: View, state: State) -> State:
        if self.kind == "assigned params":
            view.params = view.params * 0
        return state

    def penalty(self, view: View, state: State) -> Any:
        assert view.module is not None
        return {
            "constant": lambda: _unlike(view),
            "vector": lambda: view.params.square(),
            "float": lambda: 1.0,
            "zero": lambda: torch.zeros(()),
            "module": lambda: sum(p.square().sum() for p in view.module.parameters()),  # type: ignore[union-attr]
        }.get(self.kind, lambda: None)()

    def grad(self, view: View, state: State) -> None:
        if self.kind == "assigned grad":
            view.grad = view.grad * 0

    def finish(self, view: View, state: State) -> Any:
        if self.kind == "state alone":
            return state
        kept = {1: 2} if self.kind == "key" else state
        return kept, {"undeclared": {"size": 1.0}, "prefixed": {"extra:known": 1.0}}.get(self.kind, {})


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("constant", r"penalty returned a constant, .* add its gradient to view.grad"),
        ("vector", r"penalty returned a Tensor of shape \(\d+,\), expected a scalar"),
        ("float", "penalty returned a float, expected a scalar tensor or None"),
        ("assigned params", r"assigned view.params, which has no effect: write into .*view.params.copy_"),
        ("assigned grad", r"assigned view.grad, which has no effect"),
        ("state alone", "finish returned dict, expected a tuple of two dictionaries"),
        ("key", r"state has the key 1 \(int\), expected a text"),
        ("undeclared", r"finish returned size, .* declare it in provides \(extra:size"),
        ("prefixed", "finish returned extra:known, expected known, without the kind"),
    ],
)
def test_a_rule_without_effect_is_named(kind: str, why: str) -> None:
    with pytest.raises(UserError, match=rf"Slip\(kind='{kind}'\).*{why}"):
        run(network(), Training(steps=2), (Slip(kind),))


def test_a_penalty_of_the_model_or_of_zero_is_none_without_effect() -> None:
    _, plain = run(network(), Training(steps=3))
    _, zero = run(network(), Training(steps=3), (Slip("zero"),))
    assert torch.equal(plain.params, zero.params)
    _, smaller = run(network(), Training(steps=3), (Slip("module"),))
    assert float(smaller.params.norm()) < float(plain.params.norm())


def test_a_penalty_on_features_of_a_frozen_encoder_may_be_constant() -> None:
    @dataclass(frozen=True)
    class Small(LocalRule):
        features = True

        def penalty(self, view: View, state: State) -> Tensor:
            assert view.features is not None
            return view.features.now.square().sum()

    module = network()
    module.encoder.requires_grad_(False)
    run(module, Training(steps=1), (Small(),))


def test_a_stacked_rule_writes_into_the_gradient() -> None:
    model, training = FlatModel(network()), Training(steps=1)
    members = [Stackable(Work("c", data(), torch.arange(20), TASKS), model.params.clone())] * 2
    with pytest.raises(UserError, match=r"Slip.* assigned view.grad"):
        train_stacked(model, members, training, Ctx(1), (), (Slip("assigned grad"),))
