"""Encoders from timm as plain ones: a network's pooled features, without maps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fedloom.errors import RecipeError
from fedloom.models.nets import Encoder
from fedloom.models.timm_encoder import converted, network, own, timm


class TimmEncoder(Encoder):
    """A vision transformer or another architecture of timm: what it would give its classifier, B x features.

    A transformer is built for images of `shape` (C x H x W), whose sides must be multiples of its patches. `overrides`
    goes to timm.create_model. RecipeError where timm does not know the architecture, or it does not take such images.
    """

    def __init__(self, architecture: str, shape: tuple[int, int, int], **overrides: Any) -> None:
        super().__init__()
        config = timm.get_pretrained_cfg(architecture) if timm.is_model(architecture) else None
        if config is not None and config.fixed_input_size:
            overrides["img_size"] = shape[1:]
        self.net = network(architecture, shape[0], **overrides)
        self.made: dict[str, Any] = {"model_name": architecture, "in_chans": shape[0], **overrides}
        """Arguments of timm.create_model for the network; it has no classifier."""
        patch = getattr(getattr(self.net, "patch_embed", None), "patch_size", (1, 1))
        if any(side % step for side, step in zip(shape[1:], patch, strict=True)):
            raise RecipeError(
                f"timm, {architecture!r}: expected images whose height and width are multiples of its patches, "
                f"{patch[0]} x {patch[1]}, found {shape[1]} x {shape[2]}"
            )
        self.features = self.net.head_hidden_size

    def forward(self, x: Tensor) -> Tensor:
        """B x C x H x W to B x features."""
        features: Tensor = self.net(x)
        return features

    @property
    def seen(self) -> tuple[Sequence[float], Sequence[float]]:
        """As timm says."""
        return self.net.pretrained_cfg["mean"], self.net.pretrained_cfg["std"]

    def adopt(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Timm's own weights too: position embeddings are resized, a classifier is left out."""
        return state if own(self, state) else converted(self.net, state, ())
