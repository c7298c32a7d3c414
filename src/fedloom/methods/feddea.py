"""FedDEA: keep the largest part of each update and rescale it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from fedloom import stages
from fedloom.methods import registry as m


@m.ADDONS.register("feddea", source="FedDEA, eq. 2-6")
def feddea(
    method: m.Method,
    *,
    rho: Annotated[float, Field(gt=0, le=1)] = 0.5,
    keep: Literal["largest", "smallest", "random"] = "largest",
    rescale: bool = True,
    per_block: bool = False,
    at: Literal["edge", "server"] = "edge",
) -> m.Method:
    """Keep the floor(rho d) largest coordinates of each client's update and multiply them by 1/rho.

    T(Delta)_i = Delta_i / rho where |Delta_i| is among the k = max(1, floor(rho d)) largest, else 0. d counts the
    shared parameters of the whole model; ties go to the lowest index. Acts before any weighting. rho = 1 changes
    nothing, bit for bit.

    paper    states no rho (it sweeps 10 % .. 100 %); one choice over the whole vector; ablations: smallest (`keep`),
             random (`keep`), no 1/rho (`rescale: false`)
    release  none found
    here     rho = 0.5 by default; `per_block` chooses within each tensor instead. `at: edge` (default): the client
             transforms what it sends, so a sparse codec saves bytes. `at: server`: as the paper's Figure 3 draws it, at
             its place among the server's add-ons; rules that keep a history (FedDyn's h, HEAL's signs if HEAL is listed
             before) then see raw updates.

    The remark that 1/rho preserves the update's energy does not hold for the largest coordinates: the norm grows by at
    least 1/sqrt(rho), about 1.9 at rho = 0.5 and 6.6 at 0.1. In a unified model it also undoes the division of each
    task's decoder by the number of clients. Compare with `server-step` (the same larger step without selection) and
    `support-mean` (no division) before crediting the selection.
    """
    return method.plus(stages.TopMagnitude(rho, keep, rescale, per_block), at=at)
