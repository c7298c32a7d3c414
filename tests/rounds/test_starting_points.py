"""Models that begin from known weights: parts that stay as they are, rates of their own, inputs as they want them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import fedloom
from fedloom.core.lazy import need
from fedloom.data.dataset import Dataset, TensorExamples, normal
from fedloom.engines.api import trained_models
from fedloom.errors import RecipeError
from fedloom.experiments.export.bundle import Bundle, export
from fedloom.experiments.pretrain import pretrain
from fedloom.federation.recipes.loader import load
from fedloom.federation.recipes.schema import Recipe
from fedloom.federation.rounds.build import build, starting_model
from fedloom.models.multitask import MultiTask
from fedloom.models.tasks.labels import Classification
from fedloom.training.config import Schedule, Training
from fedloom.training.flat import learning_rate
from tests_support import Quick, assert_same, load_recipe, stopped_after

SMALL = ("data.count=8", "data.test_count=4", "training.steps=null", "training.epochs=1")
RESNET = "model={name: resnet10, width: 4"


def model_of(recipe: Recipe) -> MultiTask:
    return build(recipe).module


def test_frozen_parts_neither_move_nor_travel(quick: Quick) -> None:
    frozen = quick(RESNET + ", freeze: 'encoder.*'}", "training.optimizer.weight_decay=0.1")
    free = quick(RESNET + "}")
    before = model_of(load_recipe(RESNET + "}")).state_dict()
    (after,) = trained_models(frozen.folder).values()
    for name, _ in model_of(load_recipe(RESNET + "}")).named_parameters():
        assert torch.equal(after[name], before[name]) == name.startswith("encoder."), name
    assert sum(frozen.run.bytes_total().values()) < 0.2 * sum(free.run.bytes_total().values())


def test_what_cannot_be_frozen() -> None:
    with pytest.raises(RecipeError, match=r"model\.freeze: 'encodr\.\*' matches no parameter; names look like enc"):
        build(load_recipe("model.freeze=encodr.*"))
    with pytest.raises(RecipeError, match=r"model\.freeze: '\*' matches every parameter"):
        build(load_recipe("model.freeze='*'"))


def test_frozen_statistics_are_used_and_stay(quick: Quick) -> None:
    recipe = load_recipe(RESNET + ", frozen_statistics: true}")
    module = copy.deepcopy(model_of(recipe)).train()
    x = torch.randn(4, 1, 16, 16)
    assert torch.equal(module(x)["digit"], module.eval()(x)["digit"])
    plain = model_of(load_recipe(RESNET + "}")).train()
    assert not torch.allclose(plain(x)["digit"], plain.eval()(x)["digit"])
    before = model_of(recipe).state_dict()
    (after,) = trained_models(quick(RESNET + ", frozen_statistics: true}").folder).values()
    assert all(torch.equal(after[name], before[name]) for name in before if "running" in name)
    assert any(not torch.equal(after[name], before[name]) for name in before if name.startswith("encoder."))


def test_the_encoder_moves_at_its_own_rate(quick: Quick) -> None:
    """One step of SGD: what moves at a tenth of the rate goes a tenth of the way."""
    one = ("method=local", "training={rounds: 1, steps: 1, batch_size: 64, optimizer: {lr: 0.1}}")
    before = model_of(load_recipe()).state_dict()
    plain, slow = (
        trained_models(quick(*one, *more).folder)["digit-0"] for more in ((), ("training.optimizer.encoder_lr=0.01",))
    )
    for name, start in before.items():
        share = 0.1 if name.startswith("encoder.") else 1.0
        torch.testing.assert_close(slow[name] - start, share * (plain[name] - start), atol=1e-6, rtol=1e-4)


def test_a_run_with_two_rates_resumes_bit_identically(tmp_path: Path) -> None:
    optimizer = "training.optimizer={name: adamw, lr: 0.01, encoder_lr: 0.001}"
    changes = (optimizer, "training.keep_optimizer=true", "training.rounds=3")
    recipe = load_recipe(*changes, "training.schedule={name: cosine, warmup_share: 0.4}")
    whole = fedloom.run(recipe, tmp_path / "whole")
    assert_same(whole, fedloom.resume(stopped_after(1, tmp_path / "part", recipe)))


def test_equal_rates_are_one_rate(quick: Quick) -> None:
    same = ("training.optimizer={name: adamw, lr: 0.01%s}", "training.keep_optimizer=true")
    a, b = (quick(same[0] % more, same[1]) for more in ("", ", encoder_lr: 0.01"))
    (one,), (two,) = (trained_models(run.folder).values() for run in (a, b))
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, two[name], atol=1e-6, rtol=1e-5)


def test_a_share_of_the_run_is_so_many_epochs() -> None:
    def rates(**schedule: Any) -> list[float]:
        training = Training(rounds=10, epochs=3, schedule=Schedule(name="cosine", warmup_start=0.1, **schedule))
        return [learning_rate(training, round, epoch) for round in range(1, 11) for epoch in range(3)]

    assert rates(warmup_share=0.2) == pytest.approx(rates(warmup=6))
    assert rates(warmup_share=0.2) != pytest.approx(rates())
    with pytest.raises(RecipeError, match="expected warmup .* or warmup_share .*, found both"):
        load_recipe("training.schedule={warmup: 1, warmup_share: 0.1}")


def test_inputs_are_as_the_weights_want_them() -> None:
    timm = need("timm", "vision")
    architecture = "model={name: timm, architecture: tf_efficientnet_lite0, inputs: weights}"
    built = build(load_recipe(*SMALL, architecture, recipe="feddea/scenes"))
    index = torch.arange(4)
    x, _ = built.dataset.train.batch(index, torch.device("cpu"))
    seen: list[torch.Tensor] = []
    built.module.encoder.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    built.module.eval()(x)
    config = timm.get_pretrained_cfg("tf_efficientnet_lite0")
    found = normal(built.dataset.train, index)
    assert found is not None
    image = x * found[1].float().view(1, -1, 1, 1) + found[0].float().view(1, -1, 1, 1)
    mean, std = (torch.tensor(config_value).view(1, -1, 1, 1) for config_value in (config.mean, config.std))
    torch.testing.assert_close(seen[0], (image - mean) / std, atol=1e-5, rtol=1e-5)
    with pytest.raises(RecipeError, match="the normalisation of images for SmallCNN is unknown"):
        build(load_recipe("model.inputs=weights"))
    with pytest.raises(RecipeError, match="expected images of 3 channels, as the weights need, found 1"):
        build(load_recipe("model={name: timm, architecture: resnet18, inputs: weights}", "data.size=32"))


@pytest.mark.parametrize(
    ("mean", "std", "scale", "shift"),
    [
        (None, None, [2.0, 2, 2], [-1.0, -1, -1]),  # (x - 0.5) / 0.5
        ([0.5, 1.0, 0.0], [1.0, 2.0, 0.5], [2.0, 4, 1], [0.0, 1, -1]),  # (x std + mean - 0.5) / 0.5
    ],
)
def test_inputs_go_from_the_datas_normalisation_to_that_of_the_weights(
    mean: Any, std: Any, scale: list[float], shift: list[float]
) -> None:
    need("timm", "vision")
    recipe = load_recipe("model={name: timm, architecture: tf_efficientnet_lite0, inputs: weights}")
    examples = TensorExamples(torch.zeros(2, 3, 32, 32), {"a": torch.zeros(2).long()}, mean=mean, std=std)
    found = starting_model(
        recipe.model, recipe.seed, Dataset("two", (Classification("a", 2),), examples, examples)
    ).rescale
    assert found is not None
    assert [v.flatten().tolist() for v in found] == [scale, shift]


def test_an_exported_model_gets_images_as_its_weights_want_them(quick: Quick, tmp_path: Path) -> None:
    """The same answers to the same images: 0..1, scaled by the run's data set and then for the weights, or at once."""
    model = "model={name: timm, architecture: tf_efficientnet_lite0, inputs: weights}"
    run = quick(*SMALL, "training.rounds=1", model, recipe="feddea/scenes").folder
    bundle = Bundle.read(export(run, tmp_path / "out"))
    built = build(load_recipe(*SMALL, model, recipe="feddea/scenes"))
    built.module.load_state_dict(trained_models(run)[""])
    index = torch.arange(2)
    x, _ = built.dataset.test.batch(index, torch.device("cpu"))
    found = normal(built.dataset.test, index)
    assert found is not None
    assert bundle.about.mean is not None
    assert bundle.about.std is not None
    mean, std, own_mean, own_std = (
        torch.as_tensor(v, dtype=torch.float32).view(1, -1, 1, 1) for v in (*found, bundle.about.mean, bundle.about.std)
    )
    with torch.inference_mode():
        expected = built.module.eval()(x)
        found_outputs = bundle.module(((x * std + mean) - own_mean) / own_std)
    for task, output in expected.items():
        torch.testing.assert_close(found_outputs[task], output, atol=1e-4, rtol=1e-4)


def test_pretraining_sees_inputs_as_the_run_will(tmp_path: Path) -> None:
    model = "model={name: timm, architecture: tf_efficientnet_lite0%s}"
    plain, scaled = (
        pretrain(load("feddea/scenes", [*SMALL, model % more]), 1, tmp_path / f"{i}.safetensors").scores
        for i, more in enumerate(("", ", inputs: weights"))
    )
    # the weights were trained with another mean than that of the data, so the first step already differs
    assert plain != scaled
    with pytest.raises(RecipeError, match=r"set model\.freeze=null"):
        pretrain(load("digits-tasks", ["model.freeze='encoder.*'"]), 1, tmp_path / "x.safetensors")
