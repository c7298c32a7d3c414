"""MOON: model-contrastive local training."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from fedloom import training
from fedloom.methods import registry as m


@m.METHODS.register("moon", source="Li, He, Song, CVPR 2021")
def moon(*, mu: Annotated[float, Field(ge=0)] = 1.0, temperature: Annotated[float, Field(gt=0)] = 0.5) -> m.Method:
    """Features are drawn to those of the received model and away from those of the client's own last model.

    loss + mu mean over the batch of -log( e^(s_g/T) / (e^(s_g/T) + e^(s_p/T)) ), s_g = cos(z, z_global),
    s_p = cos(z, z_previous), z = encoder features. For dense tasks z is the mean of the last map over its area.

    paper    T = 0.5, mu tuned (1 by default, 5 on CIFAR-10); z behind a 2-layer projection head of its own
    release  the same; no term in a client's first round, because its pool of previous models is empty
    here     z is the encoder's output, because all methods are compared on the same network. The previous model is that
             of the client's own last participation, however long ago. Both reference models run in eval mode with their
             own buffers and without gradient.

    Costs two more encoder passes a batch, and one model of memory per client. mu = 0 is FedAvg, bit for bit. With
    FedDEA the previous model is the client's own, untransformed.
    """
    return m.Method(name="moon", local=(training.ModelContrast(mu, temperature),))
