"""FedRCL: supervised contrast within the batch, with a penalty on features that are too alike."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from fedloom import training
from fedloom.methods import registry as m


@m.METHODS.register("fedrcl", source="Seo, Kim, Kim, Han, CVPR 2024")
def fedrcl(
    *,
    lam: Annotated[float, Field(ge=0)] = 1.0,
    penalty: Annotated[float, Field(ge=0)] = 1.0,
    temperature: Annotated[float, Field(gt=0)] = 0.05,
    threshold: Annotated[float, Field(ge=-1, le=1)] = 0.7,
    positives: Annotated[int, Field(ge=1)] = 1,
    negatives: Annotated[int, Field(ge=1)] = 2,
    levels: tuple[str, ...] | None = None,
    over_levels: Literal["sum", "mean"] = "sum",
) -> m.Method:
    """Features of a class are drawn together, away from other classes'; pairs that are too alike are pushed apart.

    loss + lam sum over levels of mean over the batch of -log( e^(s_p/T) / (e^(s_p/T) + sum_n e^(s_n/T)) ) + penalty
    log(1 + sum_q e^((s_q - 1)/T)); s = cosine similarities within the batch, p = the `positives` least similar of the
    class, n = the `negatives` most similar of others, q = those p with s_q >= threshold. A level is a map's mean over
    its area. The server is FedAvg.

    paper    all pairs of the batch; features of all stages
    release  p and n as above, 1 and 2 of them; T = 0.05, threshold 0.7, stem and four stages before their last ReLU;
             the mean over levels; clients weigh the same
    here     the release's pairs; the encoder's features and its stages' outputs (resnet10: stages.0 to stages.2), after
             their ReLU. `levels` names other modules with maps; [] means the features only. The sum over levels, so
             that each weighs as much as it would alone; `over_levels: mean` is the release's and, with resnet10's four
             levels, a quarter of it. Clients weigh by size

    Large batches matter: an example without another of its class has only negatives. For tasks with one class per
    example; others are trained as in FedAvg. lam = 0 is FedAvg, bit for bit.
    """
    rule = training.RelaxedContrast(lam, penalty, temperature, threshold, positives, negatives, over_levels)
    return m.Method(name="fedrcl", model=(training.TapLevels(levels),), local=(rule,))
