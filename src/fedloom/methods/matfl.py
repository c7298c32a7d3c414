"""MaT-FL: encoders of similar clients are averaged, grouped anew every round."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from fedloom import stages
from fedloom.methods import registry as m


@m.METHODS.register("matfl", source="MaT-FL: Cai et al., CVPR Workshops 2023")
def matfl(
    *,
    groups: Annotated[int, Field(ge=1)] = 2,
    soft: bool = False,
    threshold: Annotated[float, Field(gt=-1)] = 0.0,
    source: Literal["centred-weights", "update"] = "centred-weights",
) -> m.Method:
    """Each round clients are grouped by their encoders; a client receives the mean encoder of its group.

    r_k = w_k - mean_j w_j over the participants' trained encoders; average linkage on 1 - cos(r_j, r_k) until `groups`
    are left; w_k <- mean of the group. `soft`: w_k <- sum_j m_kj w_j, m_kj proportional to relu(cos(r_j, r_k) +
    threshold). Decoders and heads never leave a client.

    paper    many tasks, one model a task; groups found anew in every round; 2 groups by default, as in the FedHCA2
             supplement
    release  groups by r_k as above; Adam, learning rate x 0.99 a round; running batch norm statistics are averaged
             within the group; an argument of the clustering call that current scikit-learn no longer has
    here     own linkage, ties go to the client that comes first by name; batch norm statistics stay with the client.
             threshold = 0 is ours. `source: update` compares the round's updates instead of r_k

    r_k is a position, not an update: once groups have moved apart, grouping is sticky. Updates separate groups while
    they move; at rest only differences within a group are left, and they break it up. With two participants r_1 = -r_2
    always, whatever they do, and among K the mean cosine is about -1/(K-1): for `soft` mind the threshold.

    groups of at least K: local training, bit for bit. groups = 1: the encoder's mean for all (FedPer with uniform
    weights when all take part, except for rounding). Absent clients keep their encoder, and are not compared.

    With FedDEA: groups are made from the sent updates, so after selection, and the group's mean is that of base_k +
    T(Delta_k). pcgrad acts on the updates before models are compared. cagrad and min-norm are refused, because there is
    no mean to replace; so is heal, whose weights of coordinates would not be read.

    Couples tasks by design: groups are formed from the models of all clients.
    """
    from fedloom.core.layout import ALL_BUT_ENCODER

    return m.Method(
        name="matfl",
        stage=stages.SimilarGroups(groups, soft, threshold, source),
        private=ALL_BUT_ENCODER,
        weights="uniform",
        buffers="local",
    )
