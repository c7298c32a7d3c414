"""Encoders and the multi-task model."""

from __future__ import annotations

from fnmatch import fnmatchcase

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, stack_module_state, vmap

from fedloom.errors import RecipeError
from fedloom.models import ENCODERS, MultiTask, build_model
from fedloom.tasks import Classification

TASKS = (Classification("digit", 10), Classification("holes", 3))


def count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize("name", ["small-cnn", "cnn", "mlp", "resnet10"])
@pytest.mark.parametrize("shape", [(1, 8, 8), (1, 28, 28), (3, 32, 32), (3, 17, 23)])
def test_every_encoder_maps_images_to_features(name, shape):
    params = {"resnet10": {"width": 8}, "mlp": {}}.get(name, {"width": 4, "hidden": 12})
    encoder = ENCODERS[name].function(shape, **params)
    assert encoder(torch.zeros(2, *shape)).shape == (2, encoder.features)


def test_small_cnn_stays_small():
    for side in range(8, 65):
        encoder = ENCODERS["small-cnn"].function((1, side, side))
        assert count(encoder) < 60_000
        assert encoder(torch.zeros(1, 1, side, side)).shape == (1, 64)


def test_parameter_counts_of_the_literature():
    ten = (Classification("label", 10),)
    seven = (Classification("label", 7),)
    assert count(build_model("cnn", {}, (1, 28, 28), ten, 0)) == 1_663_370
    assert count(build_model("cnn", {"width": 4, "hidden": 48}, (1, 28, 28), ten, 0)) == 20_266
    assert count(build_model("resnet10", {}, (3, 32, 32), seven, 0)) == 4_901_703
    assert count(build_model("mlp", {"hidden": [5]}, (9,), (Classification("mine", 2),), 0)) == 50 + 12


def test_group_norm_keeps_no_statistics():
    model = ENCODERS["resnet10"].function((3, 32, 32), width=24, norm="group")
    assert not list(model.buffers())
    assert model(torch.zeros(1, 3, 8, 8)).shape == (1, 192)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        (
            "small-cnn",
            (9,),
            r"'small-cnn' expects images .* found inputs of shape \(9,\)\. For feature vectors use 'mlp'",
        ),
        ("cnn", (1, 3, 28), r"at least 4 pixels a side, found inputs of shape \(1, 3, 28\)"),
        ("resnet10", (1, 4, 4), "at least 8 pixels"),
    ],
)
def test_inputs_that_do_not_fit(name, shape, message):
    with pytest.raises(RecipeError, match=message):
        build_model(name, {}, shape, TASKS, 0)


def test_small_cnn_under_vmap():
    """Gradients of several clients at once are those of one after the other."""
    models = [build_model("small-cnn", {"width": 4, "hidden": 8}, (1, 12, 12), TASKS, seed) for seed in range(3)]
    params, buffers = stack_module_state(models)
    assert not buffers
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(3, 5, 1, 12, 12, generator=rng)
    y = torch.randint(-1, 10, (3, 5), generator=rng)

    def loss(p, x, y):
        return TASKS[0].loss(functional_call(models[0], p, (x,))["digit"], y)

    together = vmap(grad(loss))(params, x, y)
    for k, model in enumerate(models):
        alone = grad(loss)(dict(model.named_parameters()), x[k], y[k])
        for name, value in alone.items():
            torch.testing.assert_close(together[name][k], value)


def test_forward_runs_the_tasks_asked_for():
    model = build_model("mlp", {}, (4,), TASKS, 0)
    x = torch.zeros(2, 4)
    assert {task: tuple(y.shape) for task, y in model(x).items()} == {"digit": (2, 10), "holes": (2, 3)}
    assert list(model(x, ["holes"])) == ["holes"]


def test_every_parameter_has_exactly_one_role():
    model = build_model("resnet10", {"width": 8}, (1, 8, 8), TASKS, 0)
    roles = model.roles()
    for name, _ in [*model.named_parameters(), *model.named_buffers()]:
        found = [role for glob, role in roles.items() if fnmatchcase(name, glob)]
        if name.startswith("encoder."):
            assert found == ["encoder"]
        else:
            assert found == [("head", name.split(".")[1])]


def test_model_depends_on_the_seed_alone():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = build_model("small-cnn", {}, (1, 16, 16), TASKS, 5).state_dict()
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(2)
    again = build_model("small-cnn", {}, (1, 16, 16), TASKS, 5).state_dict()
    other = build_model("small-cnn", {}, (1, 16, 16), TASKS, 6).state_dict()
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not torch.equal(first["encoder.conv1.weight"], other["encoder.conv1.weight"])


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["a.b"], r"task name 'a\.b': expected letters, digits"),
        (["a*"], "expected letters, digits"),
        (["type"], "'type' cannot be used: torch.nn.ModuleDict has an attribute of that name. .*'type_task'"),
        (["a", "a"], "expected different task names, found 'a' twice"),
    ],
)
def test_task_names_that_cannot_be_used(names, message):
    encoder = ENCODERS["mlp"].function((4,))
    with pytest.raises(RecipeError, match=message):
        MultiTask(encoder, [Classification(name, 2) for name in names])


def test_unknown_encoder():
    with pytest.raises(RecipeError, match=r"unknown encoder 'smal-cnn'. Did you mean 'small-cnn'\?"):
        build_model("smal-cnn", {}, (1, 8, 8), TASKS, 0)
