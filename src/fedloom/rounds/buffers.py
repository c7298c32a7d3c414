"""Merging float buffers such as the running statistics of batch norm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedloom.core.layout import Layout
from fedloom.methods.method import Method
from fedloom.rounds.federation import Federation

if TYPE_CHECKING:
    from fedloom.rounds.messages import Payload


def merge_buffers(
    method: Method, layout: Layout, federation: Federation, payloads: Sequence[Payload], before: Tensor
) -> Tensor:
    """Weighted mean, or pooled statistics, of float buffers over the clients that trained the block's task.

    A block that no client trained keeps its value. pooled: variance = mean of variances + variance of means.
    """
    merged = before.clone()
    means: dict[str, tuple[Tensor, Tensor, Tensor]] = {}
    for block, s in zip(layout.blocks, layout.slices, strict=True):
        who = [p for p in payloads if block.task is None or block.task in federation.clients[p.row[0]].tasks]
        if not who:
            continue
        w = torch.tensor([p.n if method.weights == "size" else 1.0 for p in who], dtype=torch.float64)
        values = torch.stack([p.buffers[s] for p in who if p.buffers is not None])
        p_k = (w / w.sum()).to(values)
        merged[s] = p_k @ values
        prefix, _, kind = block.name.rpartition(".")
        if kind == "running_mean":
            means[prefix] = (p_k, values, merged[s])
        elif kind == "running_var" and method.buffers == "pooled" and prefix in means:
            p_k, mu, centre = means[prefix]
            merged[s] += p_k @ (mu - centre) ** 2
    return merged
