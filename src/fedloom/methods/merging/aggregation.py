"""Rules that merge task vectors into one, for any rows: each tensor is merged over the rows that trained it, so a
decoder that belongs to one row comes out as that row's. Rows count by `weight`; the papers' rules have equal weights.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from fedloom.core.codecs import Folded
from fedloom.core.context import Ctx, State
from fedloom.core.mean import of_tasks, rows_of_tasks, shares
from fedloom.core.stage import Stage, Traits
from fedloom.core.taskvectors import Upload, aggregate_tasks
from fedloom.core.updates import Updates
from fedloom.methods.merging import ConsensusMaskSettings, LowRankAndSparseSettings, TaskVectorsSettings


@dataclass(frozen=True)
class Merging(Stage):
    """One vector from all rows, tensor by tensor, over the rows that have it, trained it and count (weight above 0).

    A stage that is not separable merges matrices: tensors of one dimension get the mean.
    """

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
                only_mean = len(block.shape) < 2 and not self.traits.separable
                out[columns] = p @ parts if only_mean else self.merged(parts, p, block.shape)
        return updates.reduced(out), state


_BY_COLUMN = Traits("matrix", reads={"X", "weight"}, wants={"support"}, reduces=True, separable=True, presence="block")


@dataclass(frozen=True)
class ElectedMean(Merging):
    """Per coordinate, the mean of the rows that have the sign of the sum (TIES: Yadav et al., NeurIPS 2023)."""

    traits = _BY_COLUMN

    def merged(self, parts: Tensor, p: Tensor, shape: Sequence[int]) -> Tensor:
        sign = (p @ parts).sign()
        agree = (parts * sign > 0).to(parts)
        total = p @ agree
        return torch.where(total > 0, p @ (agree * parts) / total, 0.0)


@dataclass(frozen=True)
class ConsensusMask(ConsensusMaskSettings, Merging):
    """The mean, where at least `least` rows find a coordinate important; see `consensus`."""

    traits = _BY_COLUMN

    def merged(self, parts: Tensor, p: Tensor, shape: Sequence[int]) -> Tensor:
        others = (parts.sum(0) - parts).abs()
        votes = (parts.abs() >= self.lam * others).sum(0)
        return torch.where(votes >= min(self.least, len(parts)), p @ parts, 0.0)


@dataclass(frozen=True)
class IsotropicMerge(Merging):
    """The mean with all singular values of a matrix made equal, to their mean; see `iso-c`."""

    def merged(self, parts: Tensor, p: Tensor, shape: Sequence[int]) -> Tensor:
        U, S, V = _svd((p @ parts).view(shape[0], -1))
        return (S.sum() / max(len(S), 1) * (U @ V)).flatten()


@dataclass(frozen=True)
class SingularMerge(Merging):
    """Each row's leading singular vectors, made orthogonal among the rows, with their values; see `tsv-m`."""

    def merged(self, parts: Tensor, p: Tensor, shape: Sequence[int]) -> Tensor:
        matrices = parts.reshape(len(parts), shape[0], -1)
        most = max(1, min(matrices.shape[1:]) // len(parts))
        factors = [tuple(x[:most] for x in (U.t(), S, V)) for U, S, V in map(_svd, matrices)]
        U, S, V = (torch.cat(side) for side in zip(*factors, strict=True))
        return (_orthonormal(U.t()) * S @ _orthonormal(V)).flatten()


@dataclass(frozen=True)
class LeastInterference(Merging):
    """Of each matrix the shortest U with the least sum_j |(U - M_j) M_j'|^2 / |M_j|^2 over rows j; see `wudi`.

    Rows that are zero do not count, nor do directions in which all rows are zero within round-off of their own type.
    """

    def merged(self, parts: Tensor, p: Tensor, shape: Sequence[int]) -> Tensor:
        matrices = parts.cpu().double().reshape(len(parts), shape[0], -1)
        unit = matrices / torch.linalg.matrix_norm(matrices, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
        # with M_j' / |M_j| side by side as A, and M_j M_j' / |M_j| as B, it is the least |U A - B|
        inputs, outputs = unit.flatten(0, 1), (unit @ matrices.mT).flatten(0, 1)
        # by singular values: the shortest solution, whatever the rank; torch's "gelsy" pivots as memory happens to be
        least = max(inputs.shape) * torch.finfo(parts.dtype).eps
        return torch.linalg.lstsq(inputs, outputs, rcond=least, driver="gelsd").solution.t().flatten().to(parts)


@dataclass(frozen=True)
class LowRankAndSparse(LowRankAndSparseSettings, Merging):
    """The mean of the rows' low-rank parts and beta times that of their sparse parts, by robust PCA; see `fedrpca`."""

    def merged(self, parts: Tensor, p: Tensor, shape: Sequence[int]) -> Tensor:
        if len(parts) < 2:
            return p @ parts
        sparse = sparse_part(parts.double())
        beta = self.beta
        if beta is None:
            beta = min(float(parts.double().norm()) / (float(sparse.norm()) or math.inf), _LIMIT)
        return p @ parts + (beta - 1) * (p.double() @ sparse).to(p)


_LIMIT = 10.0


def sparse_part(M: Tensor) -> Tensor:
    """Return S of M = L + S (k x n, float64) for which |L|_* + |S|_1 / sqrt(max(k, n)) is least: robust PCA.

    By alternating directions: Candes, Li, Ma, Wright, J. ACM 58, 2011, Algorithm 1, with steps 1.6 times as long (Boyd
    et al., 2011, section 3.4.3), until neither |M - L - S| nor a step of S is above 1e-6 of |M|, at most 1000 times.
    Singular values are those of the k x k Gram matrix.
    """
    S = Y = torch.zeros_like(M)
    shrink, size = 4 * float(M.abs().mean()), 1e-6 * float(M.norm())
    least = shrink / math.sqrt(max(M.shape))
    for step in range(1000 if shrink else 0):
        A = M - S + Y
        squares, U = torch.linalg.eigh(A @ A.t())
        left = M - U * (1 - shrink / squares.clamp(min=0).sqrt()).clamp(min=0) @ U.t() @ A  # M - L
        rest = 1.6 * left - 0.6 * S + Y
        before, Y = S, rest.clamp(-least, least)
        S = rest - Y
        if step % 10 == 9 and max(float((left - S).norm()), float((S - before).norm())) <= size:
            break
    return S


def _svd(matrix: Tensor) -> Sequence[Tensor]:
    """Return (U, S, V') of the singular values that are not zero within round-off."""
    U, S, V = torch.linalg.svd(matrix, full_matrices=False)
    some = S[:1] * max(matrix.shape) * torch.finfo(S.dtype).eps < S
    return U[:, some], S[some], V[some]


def _orthonormal(matrix: Tensor) -> Tensor:
    """Return the nearest matrix whose singular values are 1 (or 0)."""
    U, _, V = _svd(matrix)
    return U @ V


@dataclass(frozen=True)
class TaskVectors(TaskVectorsSettings, Stage):
    """New task vectors (T x d, rows ("*", task)) from rows (client, task): MaTU, eqs. 3 to 7.

    Columns that belong to no task go through `aggregate_tasks`, which explains the parameters. Rows that are still
    packed by the codec `Unified` are read piece by piece, never as a K x d matrix. Columns of a task, such as its head,
    become the weighted mean over the clients that hold it. Tasks that no client sent have no row.

    Records the similarity of tasks (eq. 5) and each task's partners (eq. 6) in every round.
    """

    traits = Traits("matrix", reads={"X", "weight"}, writes={"X", "tasks"}, reduces=True, presence="coupled")

    def __call__(self, updates: Updates, state: State, ctx: Ctx) -> tuple[Updates, State]:
        holders, layout = rows_of_tasks(updates), updates.layout
        uploads, beside = _uploads(updates)
        tasks = list(holders)
        X = uploads[0].vector.new_zeros(len(tasks), layout.d)
        spans = layout.spans(layout.common)
        out = X[:, spans[0]] if len(spans) == 1 else X.new_empty(len(tasks), layout.common.d)
        new = aggregate_tasks(uploads, out=out, **asdict(self))
        if len(spans) != 1:
            layout.put(X, layout.common, out)
        for x, (task, members) in zip(X, holders.items(), strict=True):
            w = updates.weight[members]
            w = w / w.sum() if float(w.sum()) > 0 else torch.full_like(w, 1 / len(w))
            mine = layout.select(task=task)
            layout.put(x, mine, w.to(x) @ layout.own.take(beside[members], mine))
        ctx.record(
            "task-vectors",
            {
                "tasks": tasks,
                "similarity": [[round(v, 6) for v in row] for row in new.similarity.tolist()],
                "partners": [[tasks[j] for j, v in enumerate(row) if v > 0] for row in new.partners.tolist()],
            },
        )
        return of_tasks(updates, holders, X), state


def _uploads(updates: Updates) -> tuple[list[Upload], Tensor]:
    """Return the senders' common columns, and the columns of tasks (K x their number)."""
    if isinstance(updates.given, Folded) and updates.mixing is None:
        return updates.given.uploads(updates.weight), updates.given.own()
    common = updates.layout.take(updates.X, updates.layout.common)
    uploads = [
        Upload(x, (str(task),), (n,), client=client)
        for x, n, (client, task) in zip(common, updates.weight.tolist(), updates.rows, strict=True)
    ]
    return uploads, updates.layout.take(updates.X, updates.layout.own)
