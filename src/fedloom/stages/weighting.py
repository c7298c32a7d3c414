"""Weightings of TorchJD (extra `torchjd`): one combination of the rows, found in their Gram matrix.

TorchJD solves for the coefficients. What belongs to rounds is here: rows that are zero, blocks that only some rows
have, the method's weights, and a scale at which its constants mean the same for updates of any length.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from fedloom.core.context import Ctx, State
from fedloom.core.updates import Updates
from fedloom.errors import UserError
from fedloom.extras import need
from fedloom.maths.gram import nonzero, normalised
from fedloom.stages.conflict import combined, shares
from fedloom.stages.stage import Stage, Traits

Scale = Literal["min", "median", "rmse"]


@dataclass(frozen=True)
class Weighting(Stage):
    """sum_k w_k X_k, with w from a weighting of TorchJD.

    It sees the Gram matrix of the rows that are not zero, in float64, divided by its mean diagonal. If some clients
    lack blocks, columns that the same rows have form a problem of their own, solved among those rows. A subclass says
    in `made` which weighting it is; `p` are the rows' shares of `weight`, which sum to 1 with those of zero rows.
    """

    traits = Traits("mix", reads={"X", "weight"}, reduces=True, separable=True, presence="row")

    def made(self, p: Tensor) -> Any:
        """TorchJD's weighting for rows with shares p (K). Raises UserError that names the extra if a package lacks."""
        raise NotImplementedError

    def unfit(self, rows: Updates | None) -> Iterator[str]:
        """Packages that are not installed."""
        try:
            self.made(torch.ones(1, dtype=torch.float64))
        except UserError as error:
            yield f"{self!r} cannot work: {error}"

    def weights(self, G: Tensor, p: Tensor) -> Tensor:
        """The rows' coefficients (K, float64)."""
        found: Tensor = self.made(p)(G)
        return found

    def __call__(self, updates: Updates, state: State, ctx: Ctx) -> tuple[Updates, State]:
        def coefficients(G: Tensor, members: Tensor) -> Tensor:
            q, some = torch.zeros(len(G), dtype=torch.float64), nonzero(G)
            if bool(some.any()):
                q[some] = self.weights(normalised(G[some][:, some])[0], shares(updates.weight.cpu()[members])[some])
            return q

        return updates.reduced(combined(updates, coefficients, wide=True)), state


_EQUAL = Traits("mix", reduces=True, separable=True, presence="row")


def _library(*packages: str) -> Any:
    for package in packages:
        need(package, "torchjd")
    return need("torchjd.aggregation", "torchjd")


def _projector() -> Any:
    # Its default adds 1e-4 of the trace to the diagonal; in float64 much less keeps the program solvable.
    _library("quadprog", "qpsolvers")
    return need("torchjd.linalg", "torchjd").QuadprogProjector(norm_eps=0.0, reg_eps=1e-12)


@dataclass(frozen=True)
class UPGrad(Weighting):
    """The mean of the rows, each projected onto the cone of what conflicts with no row (Quinton and Rey, 2024)."""

    def made(self, p: Tensor) -> Any:
        return _library().UPGradWeighting(p, _projector())


@dataclass(frozen=True)
class DualProj(Weighting):
    """The mean, projected onto the cone of what conflicts with no row (GEM: Lopez-Paz and Ranzato, NeurIPS 2017)."""

    def made(self, p: Tensor) -> Any:
        return _library().DualProjWeighting(p, _projector())


@dataclass(frozen=True)
class AlignedMTL(Weighting):
    """The mean, once the matrix of the rows was given equal singular values (Senushkin et al., CVPR 2023)."""

    scale: Scale = "min"

    def made(self, p: Tensor) -> Any:
        return _library().AlignedMTLWeighting(p, scale_mode=self.scale)


@dataclass(frozen=True)
class IMTLG(Weighting):
    """The combination with sum of coefficients 1 whose projections on all rows are equal (Liu et al., ICLR 2021)."""

    traits = _EQUAL

    def made(self, p: Tensor) -> Any:
        return _library().IMTLGWeighting()


@dataclass(frozen=True)
class FairGrad(Weighting):
    """The alpha-fair combination, its coefficients divided by their sum (Ban and Ji, ICML 2024)."""

    alpha: float = 1.0
    traits = _EQUAL

    def __post_init__(self) -> None:
        if not self.alpha > 0:
            raise ValueError(f"FairGrad: expected alpha above 0, found {self.alpha}")

    def made(self, p: Tensor) -> Any:
        return _library("scipy").FairGradWeighting(self.alpha)

    def weights(self, G: Tensor, p: Tensor) -> Tensor:
        """The solution of G w = w^(-1/alpha), divided by its sum."""
        w = super().weights(G, p)
        return w / w.sum()
