"""FedDEA: keep the largest part of each update and rescale it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from fedloom import stages
from fedloom.methods.registry import ADDONS

if TYPE_CHECKING:
    from fedloom.methods.method import Method


@ADDONS.register("feddea", source="FedDEA, eq. 2-6")
def feddea(
    method: Method,
    *,
    rho: Annotated[float, Field(gt=0, le=1)] = 0.5,
    keep: Literal["largest", "smallest", "random"] = "largest",
    rescale: bool = True,
    per_block: bool = False,
) -> Method:
    """Keep the floor(rho d) largest coordinates of each client's update and multiply them by 1/rho.

    Acts at the client, before the update is sent, so before any weighting. d counts the shared parameters of the
    whole model. The paper states no rho (it sweeps 10 % .. 100 %); 0.5 is ours. rho = 1 changes nothing, bit for
    bit. The paper's remark that 1/rho preserves the update's energy does not hold for the largest coordinates: the
    norm grows by at least 1/sqrt(rho), so compare with a larger server step before crediting the selection.
    """
    return method.plus(stages.TopMagnitude(rho, keep, rescale, per_block), at="edge")
