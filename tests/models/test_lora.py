"""LoRA in an encoder, and that what is frozen is part of the model but of nothing else."""

from __future__ import annotations

import copy
import json
import pickle
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import fedloom
from fedloom.core.layout import Layout
from fedloom.engines.api import plan
from fedloom.errors import RecipeError, StateError
from fedloom.federation.recipes import dump, load, recipe_hash
from fedloom.federation.rounds.build import build
from fedloom.methods import METHODS
from fedloom.models import ENCODERS, build_model
from fedloom.models.changes import adapted_layers, add_lora, factors
from fedloom.models.signal import Lora
from fedloom.tasks import Classification
from fedloom.training import FlatModel, MergeFactors, View
from tests_support import assert_same, load_recipe, stopped_after

pytestmark = pytest.mark.skipif(None in (find_spec("peft"), find_spec("timm")), reason="peft or timm is not installed")

TASKS = (Classification("digit", 10), Classification("odd", 2))
VIT = {"width": 16, "depth": 2, "num_heads": 2}
SMALL = ("model=tiny-vit", "model.width=16", "model.depth=1", "model.num_heads=2", "model.lora.rank=2")


def model(lora: Lora | None, seed: int = 0, **more):
    return build_model("tiny-vit", VIT, (1, 16, 16), TASKS, seed, lora=lora, **more)


def size(module: nn.Module, trained: bool) -> int:
    return sum(p.numel() for p in module.parameters() if p.requires_grad == trained)


def test_lora_of_rank_16_in_vit_b_32():
    """By hand, a block: qkv 16 (768 + 2304), proj 16 (768 + 768), fc1 and fc2 16 (768 + 3072) each; twelve blocks."""
    with torch.device("meta"):
        encoder = ENCODERS["vit"].function((3, 224, 224), architecture="vit_base_patch32_224")
        add_lora(encoder, Lora())
    assert size(encoder, True) == 12 * 16 * (3072 + 1536 + 3840 + 3840) == 2_359_296
    assert size(encoder, False) == 87_455_232


def test_merging_factors_leaves_the_outputs_as_they_are():
    adapted = model(Lora(rank=2, alpha=6)).double()
    rule, view = MergeFactors(), View(*[torch.zeros(0)] * 3, (), module=adapted)
    state = rule.begin(view, {})
    layers = adapted_layers(adapted)
    before = [layer.base_layer.weight.clone() for layer in layers]
    start = [[x.detach().clone() for x in factors(layer)] for layer in layers]
    trained = [[torch.randn_like(x) for x in factors(layer)] for layer in layers]
    for layer, values in zip(layers, trained, strict=True):
        for x, value in zip(factors(layer), values, strict=True):
            x.data.copy_(value)
    x = torch.randn(3, 1, 16, 16, dtype=torch.float64)
    outputs = adapted(x)
    rule.finish(view, state)
    for task, y in adapted(x).items():
        torch.testing.assert_close(y, outputs[task])
    for layer, weight, (A, B), first in zip(layers, before, trained, start, strict=True):
        torch.testing.assert_close(layer.base_layer.weight - weight, 3 * B @ A)  # alpha / rank = 3
        assert all(torch.equal(x, y) for x, y in zip(factors(layer), first, strict=True))


def test_nothing_changes_at_first_and_heads_are_those_without():
    plain, adapted = model(None), model(Lora(rank=4))
    x = torch.randn(3, 1, 16, 16)
    for task, y in plain(x).items():
        torch.testing.assert_close(adapted(x)[task], y)
    assert torch.equal(plain.heads["odd"].weight, adapted.heads["odd"].weight)


def test_factors_depend_on_the_seed_alone_and_b_is_zero():
    torch.manual_seed(1)
    one = model(Lora(rank=4), 3).state_dict()
    torch.manual_seed(2)
    two, other = model(Lora(rank=4), 3).state_dict(), model(Lora(rank=4), 4).state_dict()
    a = [key for key in one if "lora_A" in key]
    assert len(a) == 8
    assert all(torch.equal(one[key], two[key]) for key in one)
    assert not any(torch.equal(one[key], other[key]) for key in a)
    assert all(not one[key].any() for key in one if "lora_B" in key)


@pytest.mark.parametrize(("alpha", "scale"), [(None, 1.0), (8.0, 2.0)])
def test_a_layer_is_w_plus_alpha_over_rank_b_a(alpha, scale):
    encoder = ENCODERS["mlp"].function((5,), hidden=[3])
    add_lora(encoder, Lora(rank=4, alpha=alpha, targets=["0"]))
    layer = encoder.layers[0]
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    nn.init.normal_(b)
    x = torch.randn(2, 5)
    expected = x @ (layer.base_layer.weight + scale * b @ a).T + layer.base_layer.bias
    torch.testing.assert_close(layer(x), expected)


@pytest.mark.parametrize("target", ["linear1", "linear2"])
@pytest.mark.parametrize("stacked", [False, True])
def test_torchs_transformer_layers_use_factors_in_evaluation(target, stacked):
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    encoder = nn.Sequential(nn.TransformerEncoder(layer, 2) if stacked else layer).eval()
    x = torch.randn(3, 5, 8)
    before = encoder(x).detach()
    add_lora(encoder, Lora(rank=2, targets=[target]))
    torch.testing.assert_close(encoder(x), before)
    for adapted in adapted_layers(encoder):
        nn.init.normal_(factors(adapted)[1])
    with torch.inference_mode():
        after = encoder(x)
    assert not torch.allclose(after, before)
    torch.testing.assert_close(after, encoder.train()(x))


def test_a_layer_that_attention_passes_by_is_no_target():
    encoder = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True))
    with pytest.raises(RecipeError, match=r"'0\.self_attn\.out_proj' is part of a torch\.nn\.MultiheadAttention"):
        add_lora(encoder, Lora(rank=2, targets=["linear1", "out_proj"]))


class Tied(nn.Module):
    """An embedding of words whose weight is that of the last layer too, or not, and a layer that is used twice."""

    def __init__(self, tied: bool):
        super().__init__()
        self.embed, self.layer, self.out = nn.Embedding(5, 4), nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 5)
        self.again = self.layer
        if tied:
            self.out.weight = self.embed.weight

    def forward(self, x):
        return self.out(self.again(self.layer(self.embed(x)).relu())).mean(1)


@pytest.mark.parametrize("method", [{"name": "fedex-lora"}, {"name": "fedavg", "add": {"flora": {}}}])
def test_factors_are_not_merged_into_a_tied_weight(method):
    x, y = torch.randint(5, (24, 3)), torch.arange(24) % 2
    fed = fedloom.Federation({"ann": fedloom.Client((x, y))}, {"odd": fedloom.task(classes=2)})

    def run(tied: bool, target: str, method=method):
        net = {"name": fedloom.model(Tied(tied), heads="linear"), "lora": {"rank": 2, "targets": [target]}}
        return fedloom.run(fed, model=net, method=method, rounds=1)

    with pytest.raises(RecipeError, match=r"'encoder.net.out' shares its weight with another layer .*embed.weight"):
        run(True, "out")
    for tied, target, each in ((False, "out", method), (True, "layer.0", method), (True, "out", "fedavg")):
        assert run(tied, target, each).status == "finished"


def test_roles_of_adapters_and_what_is_in_the_layout():
    adapted = model(Lora(rank=4))
    layout = Layout.from_module(adapted)
    adapters = layout.select("adapter")
    assert layout.select("encoder") == adapters
    assert {(b.role, b.part, b.task) for b in adapters.blocks} == {("adapter", "encoder", None)}
    # two blocks; qkv 16 x 48, proj 16 x 16, fc1 16 x 32, fc2 32 x 16
    assert adapters.d == 2 * 4 * (64 + 32 + 48 + 48)
    assert layout.d == adapters.d + 17 * 12 == size(adapted, True)
    assert adapters.names[0] == "encoder.net.blocks.0.attn.qkv.lora_A.default.weight"
    assert METHODS["fedavg"].function().shared_part(layout).d == layout.d


def test_only_linear_layers_are_targets():
    """A convolution of patches is called proj too."""
    adapted = model(Lora(rank=2, targets=["proj"]))
    names = [name for name, p in adapted.encoder.named_parameters() if p.requires_grad]
    assert names == [f"net.blocks.{i}.attn.proj.lora_{f}.default.weight" for i in (0, 1) for f in "AB"]


@pytest.mark.parametrize(
    ("encoder", "targets", "message"),
    [
        (
            "tiny-vit",
            ["qkv", "fc3"],
            r"'fc3' names no linear layer of the encoder; its linear layers: net\.blocks\.\*\.attn\.qkv",
        ),
        ("tiny-vit", ["kv"], "'kv' names no linear layer"),
        ("resnet10", ["conv1"], "'conv1' names no linear layer of the encoder; its linear layers: none"),
    ],
)
def test_targets_that_are_no_layers(encoder, targets, message):
    with pytest.raises(RecipeError, match=rf"model\.lora\.targets: {message}"):
        build_model(encoder, {}, (1, 16, 16), TASKS, 0, lora=Lora(targets=targets))


def test_flat_model_holds_what_is_trained_and_leaves_the_rest():
    adapted = model(Lora(rank=4))
    before = {name: p.clone() for name, p in adapted.named_parameters()}
    flat = FlatModel(copy.deepcopy(adapted))
    assert len(flat.vector) == len(flat.grad) == flat.layout.d == size(adapted, True)
    assert flat.layout.trained(("digit",)).d == flat.layout.d - 17 * 2
    flat.vector.fill_(0.25)
    for name, p in flat.module.named_parameters():
        assert torch.equal(p, torch.full_like(p, 0.25) if p.requires_grad else before[name]), name


def test_models_with_lora_can_be_copied_and_sent_to_workers():
    adapted = model(Lora(rank=4))
    x = torch.randn(1, 1, 16, 16)
    for again in (copy.deepcopy(adapted), pickle.loads(pickle.dumps(adapted))):
        assert torch.equal(again(x)["digit"], adapted(x)["digit"])
        assert Layout.from_module(again) == Layout.from_module(adapted)


def test_recipe_keys():
    plain = load("digits-tasks", ["model=tiny-vit"])
    assert (plain.model.lora, plain.model.weights) == (None, None)
    lora = load("digits-tasks", ["model=tiny-vit", "model.lora={}"])
    assert lora.model.lora == Lora(rank=16, alpha=None, targets=("qkv", "proj", "fc1", "fc2"))
    assert recipe_hash(lora) != recipe_hash(plain)
    assert recipe_hash(lora) != recipe_hash(load("digits-tasks", ["model=tiny-vit", "model.lora.rank=8"]))
    assert "lora:\n    rank: 16" in dump(lora)
    with pytest.raises(RecipeError, match=r"model\.lora\.rank"):
        load("digits-tasks", ["model=tiny-vit", "model.lora.rank=0"])
    with pytest.raises(RecipeError, match=r"model\.lora\.rnk"):
        load("digits-tasks", ["model=tiny-vit", "model.lora.rnk=2"])


def test_a_run_trains_and_sends_factors_only(quick):
    recipe = load_recipe(*SMALL)
    built = build(recipe)
    result = quick(*SMALL)
    final = load_file(result.folder / "model.safetensors")
    start = built.module.state_dict()
    assert final.keys() == start.keys()  # the file holds the frozen weights too
    for name, p in built.module.named_parameters():
        assert torch.equal(final[name], start[name]) != p.requires_grad, name
    adapters = built.layout.select("adapter").d
    assert adapters == 2 * (64 + 32 + 48 + 48)
    sent = result.run.traffic[1]["up"]
    assert {entry["role"] for entry in sent} == {"adapter", "head", "side"}
    assert {entry["bytes"] for entry in sent if entry["role"] == "adapter"} == {4 * adapters}


@pytest.mark.slow
def test_worker_processes_train_the_same_factors(quick):
    """They load timm and peft by themselves."""
    assert_same(quick(*SMALL), quick(*SMALL, "runtime.workers=2"))


def test_a_run_does_not_go_on_from_other_frozen_weights(tmp_path: Path) -> None:
    recipe = load_recipe(*SMALL)
    planned = plan(recipe)
    assert planned.parameters["frozen"] > planned.parameters["adapter"] > 0
    assert planned.memory["frozen parameters (per worker)"] == 4 * planned.parameters["frozen"]
    folder = stopped_after(1, tmp_path / "run", recipe)
    info = json.loads((folder / "run.json").read_text())
    assert info["frozen_hash"]
    del info["check"]
    (folder / "run.json").write_text(json.dumps({**info, "frozen_hash": "0" * 16}))
    with pytest.raises(StateError, match="the frozen part of the model has changed since the run began"):
        fedloom.resume(folder)
