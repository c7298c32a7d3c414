"""Encoders from timm: sizes, layouts of maps, weights files."""

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
from fedloom.models.nets import load_weights, pretrained_file
from fedloom.models.timm_encoder import TimmPyramid
from fedloom.tasks import Classification
from fedloom.training.flat import FlatModel

pytestmark = pytest.mark.skipif(find_spec("timm") is None, reason="timm is not installed")

SMALL = "resnet10t"
FILES = ("weights.safetensors", "weights.pth")


def count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def encoder(architecture, shape=(3, 64, 64), weights=None, **params):
    built = ENCODERS["timm"].function(shape, architecture=architecture, **params)
    if weights is not None:
        load_weights(built, weights)
    return built.eval()


def save(state, file):
    (save_file if file.suffix == ".safetensors" else torch.save)(state, file)
    return str(file)


def test_swin_t_has_the_published_size():
    with torch.device("meta"):
        swin = encoder("swin_tiny_patch4_window7_224", (3, 448, 576))
        assert (count(swin), swin.dim) == (27_520_698, 96)
        assert (swin.channels, swin.strides) == ((96, 192, 384, 768), (4, 8, 16, 32))
        assert encoder("swin_base_patch4_window7_224", (3, 448, 576)).dim == 128


@pytest.mark.parametrize("architecture", ["resnet18", "resnet10t", "convnext_atto", "mobilenetv3_small_050"])
def test_maps_are_channels_first_at_strides_4_to_32(architecture):
    model = encoder(architecture)
    maps = model(torch.zeros(1, 3, 64, 96))
    expected = [(1, c, 64 // s, 96 // s) for c, s in zip(model.channels, (4, 8, 16, 32), strict=True)]
    assert [tuple(m.shape) for m in maps] == expected


@pytest.mark.parametrize("size", [(64, 64), (96, 64), (32, 160)])
def test_swin_takes_other_sizes_than_it_was_built_for(size):
    model = ENCODERS["tiny-swin"].function((3, 64, 96)).eval()
    assert [tuple(m.shape[2:]) for m in model(torch.zeros(1, 3, *size))] == [
        (size[0] // s, size[1] // s) for s in model.strides
    ]


def test_swin_of_another_size_computes_the_same():
    """Only the windows that the map's size limits may differ, so maps larger than a window agree."""
    small, large = (ENCODERS["tiny-swin"].function((3, s, s), window=2).eval() for s in (64, 128))
    large.load_state_dict(small.state_dict())
    x = torch.randn(1, 3, 64, 64)
    for a, b in zip(small(x), large(x), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(("name", "params"), [("timm", {"architecture": "resnet18"}), ("tiny-swin", {})])
def test_layout_and_flat_model(name, params):
    model = build_model(name, params, (3, 64, 64), (Classification("scene", 3),), 0)
    layout = Layout.from_module(model)
    tables = [b for b in layout.blocks if b.name.endswith("relative_position_bias_table")]
    assert bool(tables) == (name == "tiny-swin")
    assert all((b.role, b.part) == ("encoder", "encoder") for b in tables)
    assert layout.parameters.d == count(model)
    assert bool(layout.buffers.blocks) == (name == "timm")
    flat = FlatModel(model.eval())
    before = model(torch.ones(1, 3, 64, 64))["scene"]
    flat.vector.mul_(0.5)
    assert not torch.equal(before, model(torch.ones(1, 3, 64, 64))["scene"])


def test_drop_path_is_on_for_swin_only():
    from timm.layers import DropPath

    def rates(model):
        return [m.drop_prob for m in model.modules() if isinstance(m, DropPath)]

    with torch.device("meta"):
        assert max(rates(encoder("swin_tiny_patch4_window7_224"))) == pytest.approx(0.1)
        assert not rates(encoder("resnet18"))
    assert not rates(ENCODERS["tiny-swin"].function((3, 64, 64)))


@pytest.mark.parametrize("name", FILES)
def test_weights_with_a_classifier_are_loaded(tmp_path, name):
    whole = need("timm", "vision").create_model(SMALL, num_classes=7).eval()
    model = encoder(SMALL, weights=save(whole.state_dict(), tmp_path / name))
    x = torch.randn(1, 3, 64, 64)
    torch.testing.assert_close(model(x)[-1], whole.forward_features(x))


def test_swin_weights_with_the_final_norm_and_another_size(tmp_path):
    small = {"embed_dim": 8, "depths": (1, 1, 1, 1), "num_heads": (1, 1, 1, 1)}

    name = "swin_tiny_patch4_window7_224"
    whole = need("timm", "vision").create_model(name, img_size=224, **small)
    file = tmp_path / "swin.safetensors"
    save_file(whole.state_dict(), file)
    model = TimmPyramid(name, (3, 64, 64), **small)
    load_weights(model, file)
    torch.testing.assert_close(model.net.patch_embed.proj.weight, whole.patch_embed.proj.weight)
    table = model.net.get_parameter("layers.3.blocks.0.attn.relative_position_bias_table")
    assert table.shape == (9, 1)  # resized from a window of 7 to one of 2


def test_backbone_of_a_segmentation_checkpoint_in_the_original_swin_names(tmp_path):
    small = {"embed_dim": 8, "depths": (1, 1, 1, 1), "num_heads": (1, 1, 1, 1)}

    name = "swin_tiny_patch4_window7_224"
    donor = TimmPyramid(name, (3, 224, 224), **small)
    state = {}
    for key, value in donor.net.state_dict().items():
        # The original downsamples at the end of a stage, timm at the start of the next.
        for stage in (1, 2, 3):
            key = key.replace(f"layers.{stage}.downsample", f"layers.{stage - 1}.downsample")
        state[f"backbone.{key}"] = value
    for i in range(4):
        state[f"backbone.norm{i}.weight"] = torch.full((8 * 2**i,), float(i))
        state[f"backbone.norm{i}.bias"] = torch.ones(8 * 2**i)
    state["decode_head.conv_seg.weight"] = torch.ones(3)
    file = tmp_path / "upernet.pth"
    torch.save({"meta": {"epoch": 3}, "state_dict": state}, file)
    model = TimmPyramid(name, (3, 224, 224), **small)
    load_weights(model, file)
    for key, value in donor.net.state_dict().items():
        torch.testing.assert_close(model.net.state_dict()[key], value, msg=key)
    assert model.norms[3].weight[0] == 3


def test_weights_that_do_not_fit(tmp_path):
    state = need("timm", "vision").create_model(SMALL, num_classes=0).state_dict()
    removed = {k: v for k, v in state.items() if k != "layer1.0.conv1.weight"}
    with pytest.raises(UserError, match=r"weights file .*a\.pth: missing 'net\.layer1\.0\.conv1\.weight'"):
        encoder(SMALL, weights=save(removed, tmp_path / "a.pth"))
    with pytest.raises(UserError, match=r"unexpected 'net\.more'"):
        encoder(SMALL, weights=save({**state, "more": torch.ones(1)}, tmp_path / "b.pth"))
    wrong = {**state, "layer1.0.conv1.weight": torch.ones(3)}
    with pytest.raises(UserError, match=r"layer1\.0\.conv1\.weight: expected shape \(.*\), found \(3,\)"):
        encoder(SMALL, weights=save(wrong, tmp_path / "c.pth"))
    state["layer1.0.conv1.weight"][0] = float("nan")
    with pytest.raises(
        UserError, match=r"d\.pth: expected finite values, found nan or inf in 'net\.layer1\.0\.conv1\.weight'"
    ):
        encoder(SMALL, weights=save(state, tmp_path / "d.pth"))
    large = {**state, "layer1.0.conv1.weight": state["layer1.0.conv1.weight"].nan_to_num().double() + 1e300}
    with pytest.raises(
        UserError, match=r"e\.pth: expected finite values, found nan or inf in 'net\.layer1\.0\.conv1\.weight'"
    ):
        encoder(SMALL, weights=save(large, tmp_path / "e.pth"))
    whole = {**state, "layer1.0.conv1.weight": torch.ones_like(state["layer1.0.conv1.weight"], dtype=torch.int64)}
    with pytest.raises(UserError, match=r"layer1\.0\.conv1\.weight: expected shape \(.*\), found \(.*\) of integers"):
        encoder(SMALL, weights=save(whole, tmp_path / "f.pth"))


def test_weights_files_that_cannot_be_read(tmp_path):
    class Evil:
        def __reduce__(self):
            return (print, ("run",))

    with pytest.raises(UserError, match="holds more than tensors"):
        encoder(SMALL, weights=save({"x": Evil()}, tmp_path / "evil.pth"))
    for name in FILES:
        (tmp_path / name).write_bytes(b"no weights at all")
        with pytest.raises(UserError, match=name):
            encoder(SMALL, weights=str(tmp_path / name))
    with pytest.raises(UserError, match=r"weights file .*absent\.pth does not exist"):
        encoder(SMALL, weights=str(tmp_path / "absent.pth"))
    stray = save({"layers.9.attn.relative_position_bias_table": torch.ones(3, 1)}, tmp_path / "stray.pth")
    with pytest.raises(UserError, match="do not fit this architecture"):
        encoder("swin_tiny_patch4_window7_224", weights=stray)


def test_pretrained_looks_in_one_folder_and_says_how_to_fill_it(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDLOOM_WEIGHTS", str(tmp_path))
    with pytest.raises(UserError, match=r"hf download timm/resnet10t\.c3_in1k .*resnet10t\.safetensors'"):
        encoder(SMALL, pretrained=True)
    for name in ("resnet10t; touch owned", f"{SMALL}.it'; touch owned; '"):  # no part of a command
        with pytest.raises(UserError, match="timm has no pretrained weights of .*touch owned"):
            pretrained_file(name)
    with pytest.raises(RecipeError, match="Invalid pretrained tag"):
        encoder(f"{SMALL}.none")
    whole = need("timm", "vision").create_model(SMALL)
    save_file(whole.state_dict(), tmp_path / f"{SMALL}.safetensors")
    model = encoder(SMALL, pretrained=True)
    torch.testing.assert_close(model.net.layer1[0].conv1.weight, whole.layer1[0].conv1.weight)


@pytest.mark.parametrize(
    ("architecture", "message"),
    [
        ("resnet81", r"unknown architecture 'resnet81'\. Did you mean"),
        ("vit_tiny_patch16_224", r"expected feature maps at several strides, found \[16\]"),
    ],
)
def test_architectures_that_cannot_serve(architecture, message):
    with pytest.raises(RecipeError, match=message):
        encoder(architecture)


@pytest.mark.parametrize(
    ("name", "params"), [("timm", {"architecture": "swin_tiny_patch4_window7_224"}), ("tiny-swin", {})]
)
def test_stochastic_depth_is_as_asked_for(name: str, params: dict[str, str]) -> None:
    from timm.layers import DropPath

    def rates(**more: float) -> list[float]:
        modules = ENCODERS[name].function((3, 64, 64), **params, **more).modules()
        return [module.drop_prob for module in modules if isinstance(module, DropPath)]

    assert max(rates(drop_path=0.3)) == pytest.approx(0.3)
    assert max(rates(drop_path=0.0), default=0.0) == 0.0
