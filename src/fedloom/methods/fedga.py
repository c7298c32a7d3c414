"""FedGA: aggregation weights that follow the generalisation gap."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from fedloom import stages, training
from fedloom.methods import registry as m


@m.METHODS.register("fedga", source="Zhang et al., CVPR 2023")
def fedga(
    *,
    step: Annotated[float, Field(ge=0)] = 0.2,
    relative: bool = True,
    centre: bool = False,
    floor: Annotated[float, Field(ge=0, lt=1)] = 0.0,
) -> m.Method:
    """A client that aggregation hurts gains weight.

    gap_k = loss_k(global model) - loss_k(trained model of client k) on k's validation data;
    a_k <- a_k + (gap_k / max_j |gap_j|) step_t / K, cut to [floor, 1], made to sum to 1; step_t = step (1 - (t-1)/R).
    a_k starts at 1/K and replaces the weight by data size. The client measures the global model when it receives it,
    so no round is added, only two passes over the validation data (partition.val_fraction must give it some).

    paper    subtracts the mean gap before scaling (as known to us, not re-read): `centre: true`
    release  no centring; divides by the literal 3, its number of training domains; accuracies with the sign turned
    here     no centring; divides by the number of clients; the gap is taken relative to the trained model's loss,
             because losses of different tasks have different scales (`relative: false` for raw gaps)

    Cutting at 0 can silence a client for good: `floor` keeps some weight. Only clients that took part in two
    consecutive rounds have a gap. If all gaps are 0, nothing changes. step = 0 is FedAvg with uniform weights. With
    FedDEA the gap is that of the transformed aggregate, which the clients receive. With HEAL, which has weights of its
    own, use `heal: {weights: multiply}`.

    Couples tasks by design: weights compare the gaps of all clients.
    """
    return m.Method(
        name="fedga",
        local=(training.ValidationLosses(),),
        stage=stages.GapWeights(step, relative, centre, floor) >> stages.Mean(),
        weights="uniform",
    )
