"""How task vectors are merged into one: elected signs, consensus masks, equal and whitened singular values.

Rules of model merging, for any rows: each tensor is merged over the rows that trained it, so a decoder that belongs to
one row comes out as that row's. Rows count by `weight`; the papers' rules are those of equal weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedloom.core.context import Ctx, State
from fedloom.core.stage import Stage, Traits
from fedloom.core.updates import Updates
from fedloom.methods.conflict.aggregation import shares
from fedloom.methods.merging import ConsensusMaskSettings


@dataclass(frozen=True)
class Merging(Stage):
    """One vector from all rows, tensor by tensor, over the rows that have it, trained it and count (weight above 0)."""

    traits = Traits("matrix", reads={"X", "weight"}, wants={"support"}, reduces=True, presence="block")

    def merged(self, parts: Tensor, p: Tensor, shape: Sequence[int]) -> Tensor:
        """Return the columns of one tensor (n) from those of k rows (k x n), which have the shares p (k, with sum 1).

        `shape` is the tensor's; a process of a cluster has only some of its columns, if the stage is separable.
        """
        raise NotImplementedError

    def __call__(self, updates: Updates, state: State, ctx: Ctx) -> tuple[Updates, State]:
        X, layout = updates.X, updates.layout
        counts = (updates.weight > 0).cpu()[:, None].expand(-1, len(layout.blocks))
        for have in (updates.present, updates.support):
            counts = counts if have is None else counts & have.cpu()
        out = X.new_zeros(layout.d)
        for block, columns, rows in zip(layout.blocks, layout.slices, counts.t(), strict=True):
            if bool(rows.any()):
                parts, p = X[rows][:, columns], shares(updates.weight.cpu()[rows]).to(X)
                out[columns] = self.merged(parts, p, block.shape)
        return updates.reduced(out), state


_BY_COLUMN = Traits("matrix", reads={"X", "weight"}, wants={"support"}, reduces=True, separable=True, presence="block")


@dataclass(frozen=True)
class ElectedMean(Merging):
    """Per coordinate, the mean of the rows that have the sign of the sum (TIES: Yadav et al., NeurIPS 2023)."""

    traits = _BY_COLUMN

    def merged(self, parts: Tensor, p: Tensor, shape: Sequence[int]) -> Tensor:
        """Return the columns of one tensor (n) from those of k rows (k x n), which have the shares p (k, with sum
        1).
        """
        sign = (p @ parts).sign()
        agree = (parts * sign > 0).to(parts)
        total = p @ agree
        return torch.where(total > 0, p @ (agree * parts) / total, 0.0)


@dataclass(frozen=True)
class ConsensusMask(ConsensusMaskSettings, Merging):
    """The mean, where at least `least` rows find a coordinate important (TALL masks: Wang et al., ICML 2024).

    Row k finds coordinate i important if |X_ki| >= lam |S_i - X_ki|, S the sum of the rows. A tensor that fewer than
    `least` rows have asks all of these.
    """

    traits = _BY_COLUMN

    def merged(self, parts: Tensor, p: Tensor, shape: Sequence[int]) -> Tensor:
        """Return the columns of one tensor (n) from those of k rows (k x n), which have the shares p (k, with sum
        1).
        """
        others = (parts.sum(0) - parts).abs()
        votes = (parts.abs() >= self.lam * others).sum(0)
        return torch.where(votes >= min(self.least, len(parts)), p @ parts, 0.0)


@dataclass(frozen=True)
class IsotropicMerge(Merging):
    """The mean with all singular values of a matrix made equal, to their mean (Iso-C: Marczak et al., ICML 2025).

    A tensor of more than two dimensions is a matrix with one row for each output; one of fewer gets the mean. Singular
    values that are zero, within round-off, stay zero and do not count.
    """

    def merged(self, parts: Tensor, p: Tensor, shape: Sequence[int]) -> Tensor:
        """Return the columns of one tensor (n) from those of k rows (k x n), which have the shares p (k, with sum
        1).
        """
        mean = p @ parts
        if len(shape) < 2:
            return mean
        U, S, V = _svd(mean.view(shape[0], -1))
        return (S.sum() / max(len(S), 1) * (U @ V)).flatten()


@dataclass(frozen=True)
class SingularMerge(Merging):
    """Each row's leading singular vectors, made orthogonal among the rows, with their values (TSV-M: CVPR 2025).

    Of each matrix (as `IsotropicMerge` has it) of k rows: U_j S_j V_j' are the max(1, rank / k) leading parts of row j;
    U and V, those of all rows side by side, become the nearest matrices with orthonormal columns; the result is
    U S V'. Rows that are orthogonal add up, equal rows give one of them. Gargiulo et al., Task Singular Vectors.
    """

    def merged(self, parts: Tensor, p: Tensor, shape: Sequence[int]) -> Tensor:
        """Return the columns of one tensor (n) from those of k rows (k x n), which have the shares p (k, with sum
        1).
        """
        if len(shape) < 2:
            return p @ parts
        matrices = parts.reshape(len(parts), shape[0], -1)
        most = max(1, min(matrices.shape[1:]) // len(parts))
        factors = [tuple(x[:most] for x in (U.t(), S, V)) for U, S, V in map(_svd, matrices)]
        U, S, V = (torch.cat(side) for side in zip(*factors, strict=True))
        return (_orthonormal(U.t()) * S @ _orthonormal(V)).flatten()


def _svd(matrix: Tensor) -> Sequence[Tensor]:
    """(U, S, V') of the singular values that are not zero within round-off."""
    U, S, V = torch.linalg.svd(matrix, full_matrices=False)
    some = S[:1] * max(matrix.shape) * torch.finfo(S.dtype).eps < S
    return U[:, some], S[some], V[some]


def _orthonormal(matrix: Tensor) -> Tensor:
    """Return the nearest matrix whose singular values are 1 (or 0)."""
    U, _, V = _svd(matrix)
    return U @ V
