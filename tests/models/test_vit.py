"""Plain encoders from timm: sizes, features, weights files."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from fedloom.core.layout import Layout
from fedloom.core.lazy import need
from fedloom.errors import RecipeError, UserError
from fedloom.models import ENCODERS, build_model
from fedloom.models.nets import load_weights
from fedloom.tasks import Classification

pytestmark = pytest.mark.skipif(find_spec("timm") is None, reason="timm is not installed")

TASKS = (Classification("scene", 3),)


def count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def tiny(shape=(3, 32, 32), **params):
    return ENCODERS["tiny-vit"].function(shape, **params).eval()


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 32, 32), (3, 64, 24)])
@pytest.mark.parametrize("patch", [4, 8])
def test_tiny_vit_maps_images_to_features(shape, patch):
    model = tiny(shape, patch=patch, width=16, depth=1)
    assert model(torch.randn(2, *shape)).shape == (2, model.features) == (2, 16)
    assert not list(model.buffers())
    assert not [m for m in model.modules() if isinstance(m, nn.Dropout) and m.p > 0]


def test_size_of_tiny_vit():
    """By hand: patches 48 x 64 + 64, 64 positions of 64, last norm 128; a block is two norms of 128, 64 x 192 + 192,
    64 x 64 + 64, 64 x 128 + 128 and 128 x 64 + 64."""
    block = 2 * 128 + (64 * 192 + 192) + (64 * 64 + 64) + (64 * 128 + 128) + (128 * 64 + 64)
    assert count(tiny()) == (48 * 64 + 64) + 64 * 64 + 128 + 4 * block == 141_248
    assert count(tiny(depth=2)) == 141_248 - 2 * block


def test_features_of_tiny_vit_are_the_norm_of_the_mean_token():
    model = tiny(width=16, depth=2)
    x = torch.randn(2, 3, 32, 32)
    tokens = model.net.forward_features(x)
    assert tokens.shape == (2, 64, 16)  # no class token
    torch.testing.assert_close(model(x), model.net.fc_norm(tokens.mean(1)))


@pytest.mark.parametrize(
    ("shape", "params", "message"),
    [
        ((3, 30, 32), {}, "multiples of 4, found 30 x 32"),
        ((3, 12, 12), {"patch": 8}, "multiples of 8, found 12 x 12"),
        ((9,), {}, "For feature vectors use 'mlp'"),
        ((3, 32, 32), {"width": 30}, "multiple of num_heads 4, found 30"),
    ],
)
def test_what_tiny_vit_does_not_take(shape, params, message):
    with pytest.raises(RecipeError, match=message):
        tiny(shape, **params)


def test_vit_b_32_has_the_published_size():
    """Without its classifier of 1000 classes: 88,224,232 - 768 * 1000 - 1000."""
    with torch.device("meta"):
        model = ENCODERS["vit"].function((3, 224, 224), architecture="vit_base_patch32_224")
    assert (count(model), model.features) == (87_455_232, 768)


@pytest.mark.parametrize("architecture", ["resnet10t", "mobilenetv3_small_050", "vit_tiny_patch16_224"])
def test_features_are_what_the_classifier_would_read(architecture):
    model = ENCODERS["vit"].function((3, 64, 64), architecture=architecture).eval()
    classifier = need("timm", "vision").create_model(architecture, num_classes=5).get_classifier()
    assert model(torch.randn(2, 3, 64, 64)).shape == (2, model.features) == (2, classifier.in_features)


def test_layout_of_a_vit():
    model = build_model("tiny-vit", {"depth": 1}, (3, 16, 16), TASKS, 0)
    layout = Layout.from_module(model)
    assert {b.part for b in layout.blocks} == {"encoder", "head"}
    assert {b.kind for b in layout.select("norm").blocks} == {"layer-norm"}
    assert layout.d == count(model)


def test_the_vit_depends_on_the_seed_alone():
    torch.manual_seed(1)
    one = build_model("tiny-vit", {"depth": 1}, (3, 16, 16), TASKS, 5).state_dict()
    torch.manual_seed(2)
    two = build_model("tiny-vit", {"depth": 1}, (3, 16, 16), TASKS, 5).state_dict()
    assert all(torch.equal(one[key], two[key]) for key in one)


@pytest.mark.parametrize("side", [224, 64])
def test_weights_of_timm_are_loaded_and_fitted_to_the_image(tmp_path, side):
    """Published weights have a classifier, and positions for images of 224 pixels."""
    whole = need("timm", "vision").create_model("vit_tiny_patch16_224", num_classes=7).eval()
    save_file(whole.state_dict(), tmp_path / "vit.safetensors")
    params = {"architecture": "vit_tiny_patch16_224"}
    model = build_model("vit", params, (3, side, side), TASKS, 0, weights=str(tmp_path / "vit.safetensors")).encoder
    torch.testing.assert_close(model.net.blocks[3].mlp.fc1.weight, whole.blocks[3].mlp.fc1.weight)
    assert model.net.pos_embed.shape[1] == (side // 16) ** 2 + 1
    if side == 224:
        x = torch.randn(1, 3, 224, 224)
        torch.testing.assert_close(model.eval()(x), whole.forward_head(whole.forward_features(x), pre_logits=True))


def test_pretrained_takes_the_file_of_its_architecture(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDLOOM_WEIGHTS", str(tmp_path))
    params = {"architecture": "resnet10t", "pretrained": True}
    with pytest.raises(UserError, match=r"pretrained weights of 'resnet10t' are missing: expected .*safetensors"):
        build_model("vit", params, (3, 32, 32), TASKS, 0)
    whole = need("timm", "vision").create_model("resnet10t", num_classes=7)
    save_file(whole.state_dict(), tmp_path / "resnet10t.safetensors")
    model = build_model("vit", params, (3, 32, 32), TASKS, 0)
    torch.testing.assert_close(model.encoder.net.layer1[0].conv1.weight, whole.layer1[0].conv1.weight)


@pytest.mark.parametrize(
    ("architecture", "shape", "message"),
    [
        ("vit_bas_patch32_224", (3, 64, 64), r"unknown architecture 'vit_bas_patch32_224'\. Did you mean"),
        ("vit_tiny_patch16_224", (3, 40, 64), r"multiples of its patches, 16 x 16, found 40 x 64"),
    ],
)
def test_architectures_and_images_that_do_not_fit(architecture, shape, message):
    with pytest.raises(RecipeError, match=message):
        ENCODERS["vit"].function(shape, architecture=architecture)


# weights files of any encoder


def test_weights_under_the_encoder_s_own_names(tmp_path):
    donor = build_model("small-cnn", {}, (1, 16, 16), TASKS, 1)
    save_file(donor.encoder.state_dict(), tmp_path / "a.safetensors")
    plain = build_model("small-cnn", {}, (1, 16, 16), TASKS, 2)
    model = build_model("small-cnn", {}, (1, 16, 16), TASKS, 2, weights=str(tmp_path / "a.safetensors"))
    for key, value in donor.encoder.state_dict().items():
        assert torch.equal(model.encoder.state_dict()[key], value)
    assert torch.equal(model.heads["scene"].weight, plain.heads["scene"].weight)


def test_weights_that_do_not_fit(tmp_path):
    model = tiny(width=16, depth=1)
    state = model.state_dict()
    file = tmp_path / "w.safetensors"
    with pytest.raises(UserError, match=r"weights file .*w\.safetensors does not exist"):
        load_weights(model, file)
    save_file({k: v for k, v in state.items() if k != "net.pos_embed"} | {"more": torch.ones(1)}, file)
    with pytest.raises(UserError, match=r"w\.safetensors: missing 'net\.pos_embed'; unexpected 'more'"):
        load_weights(model, file)
    save_file(state, file)
    with pytest.raises(UserError, match=r"pos_embed: expected shape \(1, 4, 16\), found \(1, 64, 16\)"):
        load_weights(tiny((3, 8, 8), width=16, depth=1), file)
    before = {k: v.clone() for k, v in state.items()}
    load_weights(model, file)
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
