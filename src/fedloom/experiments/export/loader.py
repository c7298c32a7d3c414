"""The script beside exported weights that loads them with timm and torch alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from fedloom.core.extras import need
from fedloom.models.multitask import MultiTask
from fedloom.models.nets import PyramidEncoder
from fedloom.models.tasks.task import Task

WEIGHTS, LOADER = "model.safetensors", "load.py"


def loader_fits(module: MultiTask, wanted: Sequence[Task]) -> bool:
    """Whether the model is a network as timm makes it, pruned to its maps or not, with linear heads."""
    encoder = module.encoder
    made = getattr(encoder, "made", None)
    if made is None or not all(type(module.heads[task.name]) is nn.Linear for task in wanted):
        return False
    plain = need("timm", "vision").create_model(**made, pretrained=False, num_classes=0)
    if isinstance(encoder, PyramidEncoder):
        plain.prune_intermediate_layers(encoder.levels, prune_norm=True, prune_head=True)
    # with adapters, modules of a method, or norms of its own it is more than that
    mine = {key for key in module.state_dict() if not key.startswith("heads.")}
    return mine == {f"encoder.net.{key}" for key in plain.state_dict()}


def loader(module: MultiTask, about: Mapping[str, Any], wanted: Sequence[Task]) -> str:
    """A script that loads a model that `loader_fits` without fedloom; `about` is what export.json says."""
    made: Mapping[str, Any] = module.encoder.made  # type: ignore[assignment]
    levels = module.encoder.levels if isinstance(module.encoder, PyramidEncoder) else None
    heads = {t.name: (module.heads[t.name].in_features, module.heads[t.name].out_features) for t in wanted}
    return f'''"""The model of this folder with torch and timm alone. `python {LOADER} IMAGE...` prints its outputs."""

import sys
from pathlib import Path

import timm
import torch
from safetensors.torch import load_file

SHAPE = {tuple(about["input_shape"])!r}  # channels, height, width
MEAN, STD = {about["mean"]!r}, {about["std"]!r}
HEADS = {heads!r}  # task: features, outputs
LEVELS = {levels!r}  # maps that the network was trained with, the last of which is read; None: its own features


def load(file=Path(__file__).with_name({WEIGHTS!r})):
    """(encoder, {{task: head}})."""
    state = load_file(file)

    def below(prefix):
        return {{k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}}

    encoder = timm.create_model(**{dict(made)!r}, pretrained=False, num_classes=0)
    if LEVELS is not None:
        encoder.prune_intermediate_layers(LEVELS, prune_norm=True, prune_head=True)
    encoder.load_state_dict(below("encoder.net."))
    heads = torch.nn.ModuleDict({{task: torch.nn.Linear(*size) for task, size in HEADS.items()}})
    heads.load_state_dict(below("heads."))
    return encoder.eval(), heads.eval()


def features(encoder, x):
    """What the heads read (N x F), of images N x C x H x W."""
    if LEVELS is None:
        return encoder(x)
    maps = encoder.forward_intermediates(x, indices=LEVELS, output_fmt="NCHW", intermediates_only=True)
    return maps[-1].mean((2, 3))


def read(path):
    """An image as the model takes it (1 x C x H x W)."""
    import numpy as np
    from PIL import Image

    image = Image.open(path).convert("L" if SHAPE[0] == 1 else "RGB").resize(SHAPE[:0:-1], Image.Resampling.BILINEAR)
    x = torch.from_numpy(np.array(image)).float().div(255).reshape(*SHAPE[1:], SHAPE[0]).permute(2, 0, 1)[None]
    if MEAN is None:
        return x
    return (x - torch.tensor(MEAN).view(1, -1, 1, 1)) / torch.tensor(STD).view(1, -1, 1, 1)


if __name__ == "__main__":
    encoder, heads = load()
    for path in sys.argv[1:]:
        with torch.inference_mode():
            found = features(encoder, read(path))
            for task, head in heads.items():
                print(path, task, head(found)[0].tolist())
'''
