"""DFMTL: models of similar clients are mixed, by similarity of updates and of tasks."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from fedloom import stages
from fedloom.methods import registry as m


@m.METHODS.register("dfmtl", source="DFMTL thesis, Zurich, chapters 4 to 6")
def dfmtl(
    *,
    top: Annotated[int, Field(ge=0)] = 3,
    alpha: Annotated[float, Field(ge=0, le=1)] = 0.5,
    step: Annotated[float, Field(gt=0, le=1)] = 1.0,
    include_self: bool = True,
    warmup: Annotated[int, Field(ge=1)] = 1,
    share: Literal["everything", "encoder"] = "everything",
) -> m.Method:
    """Every client's trained model becomes a mean of itself and of the `top` most similar ones.

    sim(i, j) = alpha sum_t min(w_it, w_jt) + (1 - alpha) (cos(Delta_i, Delta_j) + 1) / 2 (eqs. 4.3, 4.4, 4.7),
    s_ij = max(sim, 0), s_ii = 1, w_ij = s_ij / sum over the `top` and i (eqs. 4.8 to 4.10), theta_i <- theta_i +
    step sum_j w_ij (theta_j - theta_i) (eq. 4.11). Before round `warmup` all get the plain mean (eq. 4.20).

    paper    as above; similarities normalised by min-max or z-score; everybody mixes at one instant
    release  the own model is left out (every client is overwritten by its neighbours' mean), clients mix one after
             another in place, and the conflict-averse variants (B2, B3) scramble tensors
    here     the text; `include_self: false` is the first of the release's differences

    This computes in one place, with clients and a server, what the thesis's peers do; cosines cover everything that is
    shared, and tasks count alike. Without a server it is `method: fedavg` with a `peers` section, which also has the
    thesis's other signals, scopes, the conflict-averse mix and its safeguards: see the recipes thesis/... and
    dfmtl-.... `share: encoder` is its backbone-only scope. Batch norm statistics stay with the client.

    Couples tasks by design: neighbours are chosen among all clients.
    """
    from fedloom.core.layout import ALL_BUT_ENCODER

    mix: stages.Stage = stages.SimilarityMix(top, alpha, step, include_self)
    return m.Method(
        name="dfmtl",
        stage=mix if warmup == 1 else stages.Switch(warmup, stages.Mean(), mix),
        private=ALL_BUT_ENCODER if share == "encoder" else None,
        weights="uniform",
        buffers="local",
    )
