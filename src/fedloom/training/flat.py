"""A model whose parameters, gradients and float buffers lie in consecutive memory, and its encoder's features."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedloom.core.layout import Layout


class FlatModel:
    """A module bound to one vector, so that loading, deltas and optimiser steps do not loop over tensors.

    The vector leaves out frozen parameters: they are only in the module and never change.

    vector   parameters, then float buffers (layout.d); writing to it changes the model
    params   the first p values of `vector`
    buffers  the rest
    grad     p values; the gradients of the parameters are views of it and backward adds to them
    initial  the first values of `vector`: a copy, unless they are given
    """

    def __init__(
        self,
        module: nn.Module,
        layout: Layout | None = None,
        device: str | torch.device = "cpu",
        initial: Tensor | None = None,
    ) -> None:
        self.device = torch.device(device)
        self.module = module.to(self.device)
        self.layout = layout or Layout.from_module(module)
        self.vector = self.layout.bind(self.module)
        p = self.layout.parameters.d
        self.params, self.buffers = self.vector[:p], self.vector[p:]
        self.grad = torch.zeros_like(self.params)
        for block, s in zip(self.layout.blocks, self.layout.slices, strict=True):
            if block.role != "buffer":
                module.get_parameter(block.name).grad = self.grad[s].view(block.shape)
        self.integers = integer_buffers(self.module)
        self.initial = self.vector.clone() if initial is None else initial
        self.initial_integers = {name: b.clone() for name, b in self.integers.items()}
        self.has_buffers = bool(len(self.buffers) or self.integers)
        self.has_batch_norm = any(isinstance(m, nn.modules.batchnorm._NormBase) for m in module.modules())

    @classmethod
    def copy_of(cls, module: nn.Module, device: str | torch.device = "cpu") -> FlatModel:
        """Return a copy of a module that is not trained: `initial` are that module's own values where it is bound."""
        layout = Layout.from_module(module)
        return cls(copy.deepcopy(module), layout, device, layout.flatten(module).to(device))

    def outputs_under(self, vector: Tensor, x: Tensor, tasks: Sequence[str]) -> dict[str, Tensor]:
        """Return predictions under another model, given as one vector: eval mode, no gradient.

        The model in training and its buffers are not touched.
        """
        outputs: dict[str, Tensor] = _under(self.module, self.named(vector), (x, tuple(tasks)))
        return outputs

    def named(self, vector: Tensor) -> dict[str, Tensor]:
        """Return the tensors of a model that is given as one vector of parameters and buffers, as views, by name."""
        blocks = zip(self.layout.blocks, self.layout.slices, strict=True)
        return {block.name: vector[s].view(block.shape) for block, s in blocks}

    def load_integers(self, values: dict[str, Tensor]) -> None:
        """Set integer buffers (such as the batch counter of batch norm)."""
        for name, value in values.items():
            self.integers[name].copy_(value)


def integer_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return integer buffers that belong to the model's state, such as batch norm's counter, but not unsaved tables."""
    saved = module.state_dict(keep_vars=True)
    return {
        name: b
        for name, b in module.named_buffers()
        if name in saved and not b.is_floating_point() and not b.is_complex()
    }


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
        """Store the encoder's input and output within this context."""

        with_grad = torch.is_grad_enabled()

        def keep(_module: nn.Module, args: tuple[Tensor, ...], outputs: Any) -> None:
            if torch.is_grad_enabled() == with_grad:  # a pass under another model is not the batch's own
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
        """Return features under another model, given as one vector of parameters and buffers: eval mode, no gradient.

        The model in training and its buffers are not touched.
        """
        named = self.model.named(vector).items()
        tensors = {name.removeprefix("encoder."): value for name, value in named if name.startswith("encoder.")}
        return pooled(_under(self._encoder, tensors, (self._inputs,)))


def _under(module: nn.Module, tensors: Mapping[str, Tensor], inputs: tuple[Any, ...]) -> Any:
    """Return the outputs of a module with these tensors in place of its own: eval mode, no gradient.

    Each of its parts is in the mode that it had, afterwards.
    """
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        with torch.no_grad():
            return functional_call(module, dict(tensors), inputs)
    finally:
        for part, mode in modes:
            part.training = mode


def pooled(outputs: Tensor | list[Tensor]) -> Tensor:
    """Return B x F from an encoder's output: features, a map, or a list of maps, whose last one counts."""
    last = outputs if isinstance(outputs, Tensor) else outputs[-1]
    return last.mean((2, 3)) if last.ndim == 4 else last
