"""Encoder features of the batch in training, under the current model and under others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedloom.training.flat import FlatModel


class FeatureRecorder:
    """Features of the last batch that went through `model.module.encoder`: B x F.

    Maps become the mean of the last map over its area, so dense tasks have features too.
    """

    def __init__(self, model: FlatModel) -> None:
        self.model = model
        self._encoder: nn.Module = model.module.encoder  # type: ignore[assignment]
        self._inputs: Tensor | None = None
        self._outputs: Any = None

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Within this context the encoder's input and output are kept."""

        def keep(_module: nn.Module, args: tuple[Tensor, ...], outputs: Any) -> None:
            self._inputs, self._outputs = args[0], outputs

        handle = self._encoder.register_forward_hook(keep)
        try:
            yield
        finally:
            handle.remove()

    @property
    def now(self) -> Tensor:
        """Features under the model in training, with a gradient."""
        return pooled(self._outputs)

    def under(self, vector: Tensor) -> Tensor:
        """Features under another model, given as one vector of parameters and buffers: eval mode, no gradient.

        The model in training and its buffers are not touched.
        """
        layout = self.model.layout
        tensors = {
            block.name.removeprefix("encoder."): vector[s].view(block.shape)
            for block, s in zip(layout.blocks, layout.slices, strict=True)
            if block.name.startswith("encoder.")
        }
        inputs, outputs = self._inputs, self._outputs
        self._encoder.eval()
        try:
            with torch.no_grad():
                return pooled(functional_call(self._encoder, tensors, (inputs,)))
        finally:
            self._encoder.train()
            self._inputs, self._outputs = inputs, outputs  # the hook saw this pass too


def pooled(outputs: Tensor | list[Tensor]) -> Tensor:
    """B x F from an encoder's output: features, a map, or a list of maps, whose last one counts."""
    last = outputs if isinstance(outputs, Tensor) else outputs[-1]
    return last.mean((2, 3)) if last.ndim == 4 else last
