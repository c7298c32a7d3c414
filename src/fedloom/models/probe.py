"""Looking at an encoder from inside, by one pass of zeros."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle


def pass_zeros(encoder: nn.Module, shape: tuple[int, ...], hooks: Sequence[RemovableHandle]) -> None:
    """One example of zeros in evaluation mode, for hooks that look; they are removed afterwards in any case."""
    mode = encoder.training
    try:
        with torch.no_grad():
            encoder.eval()(torch.zeros(1, *shape))
    finally:
        encoder.train(mode)
        for hook in hooks:
            hook.remove()
