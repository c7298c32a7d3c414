"""Encoders from timm, as pyramids of feature maps or with pooled features, their input sizes, their checkpoints."""

from __future__ import annotations

import sys
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from fedloom.core.errors import RecipeError, nearest
from fedloom.core.lazy import need
from fedloom.models.nets import Encoder, PyramidEncoder
from fedloom.models.signal import Shape

timm = need("timm", "vision")
"""Imported here, so that worker processes, which unpickle modules of timm, have it through `need` too."""


class TimmPyramid(PyramidEncoder):
    """A timm architecture as a pyramid: its maps at strides of 4 and more (the last of each stride), B x C x H x W.

    Swin transformers get a LayerNorm on every map, as the reference backbone of dense prediction has (Swin-T then has
    27,520,698 parameters), accept inputs of any size that is a multiple of 32, and have no float buffers. A window is
    never larger than the map it was built for, so `shape` decides the shapes of Swin's bias tables.

    `overrides` goes to timm.create_model.
    """

    def __init__(
        self, architecture: str, shape: Shape, dim: int | None = None, drop_path: float | None = None, **overrides: Any
    ) -> None:
        super().__init__()
        swin = architecture.startswith("swin")
        if swin:
            # The shifted windows' masks are then made for the map at hand, not kept as buffers for one size.
            overrides = {"img_size": shape[1:], "strict_img_size": False, **overrides}
            drop_path = 0.1 if drop_path is None else drop_path
        if drop_path is not None:
            overrides["drop_path_rate"] = drop_path
        net = network(architecture, shape[0], **overrides)
        self._whole = frozenset(net.state_dict())
        info = [(level["num_chs"], level["reduction"]) for level in getattr(net, "feature_info", ())]
        levels = {stride: number for number, (_, stride) in enumerate(info) if stride >= 4}
        if len(levels) < 2 or not hasattr(net, "forward_intermediates"):
            found = f"found {sorted(levels)}"
            raise RecipeError(f"timm, {architecture!r}: expected feature maps at several strides, {found}")
        self.strides = tuple(sorted(levels))
        self.levels = [levels[stride] for stride in self.strides]
        self.channels = tuple(info[level][0] for level in self.levels)
        self.features = self.channels[-1]
        self.dim = dim or min(128, max(32, self.channels[0]))
        self.made: dict[str, Any] = {"model_name": architecture, "in_chans": shape[0], **overrides}
        """Arguments of timm.create_model for the network before it is pruned; it has no classifier."""
        net.prune_intermediate_layers(self.levels, prune_norm=True, prune_head=True)
        self.net, self.seen = net, (net.pretrained_cfg["mean"], net.pretrained_cfg["std"])
        self.norms = nn.ModuleList(nn.LayerNorm(c) for c in self.channels) if swin else None
        self._check(f"timm {timm.__version__}, {architecture!r}", shape[0])

    def _check(self, what: str, channels: int) -> None:
        """Compare the maps with their description: versions of timm number some architectures' maps differently."""
        side = 2 * self.strides[-1]
        with torch.no_grad():
            sizes = [tuple(m.shape[1:3]) for m in self.eval()(torch.zeros(1, channels, side, side))]
        self.train()
        expected = [(c, side // s) for c, s in zip(self.channels, self.strides, strict=True)]
        if sizes != expected:
            raise RecipeError(f"{what}: expected maps of (channels, height) {expected}, found {sizes}; update timm")

    def forward(self, x: Tensor) -> list[Tensor]:
        """Map B x C x H x W to feature maps (B x C_i x H/s_i x W/s_i), finest first."""
        maps = self.net.forward_intermediates(x, indices=self.levels, output_fmt="NCHW", intermediates_only=True)
        if self.norms is None:
            return maps
        return [norm(m.permute(0, 2, 3, 1)).permute(0, 3, 1, 2) for norm, m in zip(self.norms, maps, strict=True)]

    def adopt(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Convert timm's own weights, or those of a segmentation network whose backbone has the original Swin names. A
        classifier and what else is cut off are left out; norms of the maps that the file lacks stay as they are."""
        if own(self, state):
            return state
        if any(key.startswith("backbone.") for key in state):
            state = {key.removeprefix("backbone."): v for key, v in state.items() if key.startswith("backbone.")}
        norms = {} if self.norms is None else {f"norms.{key}": value for key, value in self.norms.state_dict().items()}
        for key in norms:
            _, level, which = key.split(".")
            norms[key] = state.pop(f"norm{level}.{which}", norms[key])
        return {**converted(self.net, state, self._whole), **norms}


def facts(architecture: str) -> Any:
    """Return what timm knows of an architecture, such as its input size. Raises RecipeError for one that it lacks, and
    for weights of an unknown name after the point."""
    if not timm.is_model(architecture):
        hint = nearest(architecture.split(".")[0], timm.list_models())
        raise RecipeError(f"timm: unknown architecture {architecture!r}.{hint}")
    try:
        return timm.get_pretrained_cfg(architecture)
    except RuntimeError as error:
        raise RecipeError(f"timm, {architecture!r}: {error}") from None


def network(architecture: str, channels: int, **overrides: Any) -> Any:
    """Build a network of timm for images of `channels` channels, without classifier. Raises RecipeError."""
    facts(architecture)
    try:
        return timm.create_model(architecture, pretrained=False, in_chans=channels, num_classes=0, **overrides)
    except TypeError as error:
        raise RecipeError(f"timm, {architecture!r}: {error}") from None


def own(encoder: nn.Module, state: Collection[str]) -> bool:
    """Return whether a state has any of the encoder's own names; those that it lacks are reported as missing later."""
    return any(key in state for key in encoder.state_dict())


def converted(net: Any, state: dict[str, Tensor], whole: Collection[str]) -> dict[str, Tensor]:
    """Return a checkpoint of timm as the encoder's module `net` has it, resized where timm knows how. `whole` names the
    tensors of the architecture before it was cut: what was cut off is left out, as is a classifier."""
    convert: Any = getattr(sys.modules[type(net).__module__], "checkpoint_filter_fn", None)
    if convert is not None:
        state = convert(state, net)
    classifier = net.pretrained_cfg.get("classifier") or ()
    heads = tuple(f"{name}." for name in ((classifier,) if isinstance(classifier, str) else classifier))
    gone = set(whole) - set(net.state_dict())
    return {f"net.{key}": v for key, v in state.items() if key not in gone and not key.startswith(heads)}


class TimmEncoder(Encoder):
    """A vision transformer or another architecture of timm: what it would give its classifier, B x features.

    A transformer is built for images of `shape` (C x H x W), whose sides must be multiples of its patches. `overrides`
    goes to timm.create_model. RecipeError where timm does not know the architecture, or it does not take such images.
    """

    def __init__(self, architecture: str, shape: Shape, **overrides: Any) -> None:
        super().__init__()
        if getattr(facts(architecture), "fixed_input_size", False):
            overrides["img_size"] = shape[1:]
        self.net = network(architecture, shape[0], **overrides)
        self.seen = self.net.pretrained_cfg["mean"], self.net.pretrained_cfg["std"]
        self.made: dict[str, Any] = {"model_name": architecture, "in_chans": shape[0], **overrides}
        """Arguments of timm.create_model for the network; it has no classifier."""
        patch = getattr(getattr(self.net, "patch_embed", None), "patch_size", (1, 1))
        if any(side % step for side, step in zip(shape[1:], patch, strict=True)):
            wanted = f"images whose height and width are multiples of its patches, {patch[0]} x {patch[1]}"
            raise RecipeError(f"timm, {architecture!r}: expected {wanted}, found {shape[1]} x {shape[2]}")
        self.features = self.net.head_hidden_size

    def forward(self, x: Tensor) -> Tensor:
        """Map B x C x H x W to B x features."""
        return self.net(x)

    def adopt(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Convert timm's own weights too: position embeddings are resized, a classifier is left out."""
        return state if own(self, state) else converted(self.net, state, ())
