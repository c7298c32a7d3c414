"""FedSA: features and classifiers tied to anchors that hardly move."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from fedloom import stages, training
from fedloom.methods import registry as m


@m.METHODS.register("fedsa", source="Zhou et al., AAAI 2025")
def fedsa(
    *,
    lam: Annotated[float, Field(ge=0)] = 1.0,
    margin: Annotated[float, Field(ge=0)] = 1.0,
    calibration: Annotated[float, Field(ge=0)] = 1.0,
    momentum: Annotated[float, Field(ge=0, le=1)] = 0.9999,
) -> m.Method:
    """Features are drawn to one anchor a class, apart from the others by a margin; heads must classify the anchors.

    loss + lam |z - A_y|^2 + margin CE(-(|z - A_c| + g [c = y]), y) + calibration CE(head(A), 1..C), z = encoder
    features, |.|^2 averaged over the dimensions; g = the mean distance to the nearest other among the anchors or, if
    larger, the client's own prototypes of its last round. Server: A_c <- momentum A_c + (1 - momentum) P_c,
    P_c = the mean of the prototypes (mean z of a class over the local round) of the clients that have c.

    paper    A_0 from a random network; only prototypes and anchors travel
    release  A_0 is normal noise through a random, frozen (linear, batch norm, ReLU) twice; weights 1, momentum 0.9999
    here     the same. Anchors are drawn from the run's seed once the first prototypes show their width, so there is no
             term in the first round. Parameters are averaged too (FedAvg), as in comparisons of global models

    A class that no client of a round has keeps its anchor. For tasks with one class per example, each with its own
    anchors; others are trained as in FedAvg. lam = margin = calibration = 0 is FedAvg, bit for bit. Add-ons act on
    parameters only.
    """
    rule = training.SemanticAnchors(pull=lam, margin=margin, calibration=calibration)
    return m.Method(name="fedsa", local=(rule,), stage=stages.MovingAnchors(momentum) >> stages.Mean())
