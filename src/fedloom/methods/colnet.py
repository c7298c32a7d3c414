"""ColNet: groups of equal tasks, whose leaders resolve conflicts between groups."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from fedloom import stages
from fedloom.methods import registry as m


@m.METHODS.register("colnet", source="Feng et al., 2025 (arXiv 2501.10347)")
def colnet(*, c: Annotated[float, Field(ge=0, lt=1)] = 0.4, alpha: Annotated[float, Field(ge=0)] = 1.0) -> m.Method:
    """Clients with the same tasks average their encoders; the groups' leaders mix them and resolve conflicts.

    v_g and Delta_g: uniform means of a group's encoders before the round and of its updates. All clients of g end at
    v_g + Delta_g + alpha U(Delta_1 .. Delta_G) with U = (g_0 + c |g_0| g_w / |g_w|) / (1 + c^2), g_0 the mean of the
    groups' updates and g_w their convex combination that minimises <g_w, g_0> + c |g_0| |g_w|.

    paper    leaders take turns; groups known from tasks, in a later version by what models and data are sensitive to
    release  the first client of a group leads; alpha fixed at 1, which counts the group's own update twice
    here     the leader adds nothing of its own, so it does not matter which client leads. One group gets its plain
             mean, where the release would add U of a single update to that update

    This computes in one place what peers would do. Groups are clients with equal tasks. Decoders, heads and batch norm
    statistics stay with the client. alpha = 0 is FedAvg of encoders inside each group.

    Couples tasks by design: leaders of the groups of tasks exchange updates.
    """
    from fedloom.core.layout import ALL_BUT_ENCODER

    return m.Method(
        name="colnet",
        stage=stages.TaskLeaders(c, alpha),
        private=ALL_BUT_ENCODER,
        weights="uniform",
        buffers="local",
    )
