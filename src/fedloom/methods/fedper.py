"""FedPer: personal layers."""

from __future__ import annotations

from typing import Literal

from fedloom.methods import registry as m


@m.METHODS.register("fedper", source="Arivazhagan et al., 2019")
def fedper(*, personal: Literal["decoders", "heads"] = "decoders", layers: tuple[str, ...] = ()) -> m.Method:
    """FedAvg on the base of the network; the layers after it never leave a client and are trained with it.

    theta_base <- theta_base + sum_k p_k Delta_k,base;  personal layers start from the common initialisation.

    paper    the classifier and the last few blocks of the base are personal; weights by data size
    release  none by the authors
    here     `personal: decoders` keeps decoders and heads, as clients with different tasks need; `personal: heads` the
             last layers only, and decoders are averaged. `layers` keeps more blocks of the encoder, as patterns on
             their names, e.g. [encoder.blocks.11.*]

    There is no global model: clients are measured with their own layers. The encoder's float buffers (batch norm) are
    averaged. One client is local training; a model without decoders has the same two choices of `personal`.
    FedSTA without averaged decoders, with `weights: size`, is this method. With FedDEA, rho counts the shared
    parameters only.
    """
    from fedloom.core.layout import ALL_BUT_ENCODER, Select

    if personal == "heads":
        if layers:
            raise ValueError(
                "fedper: `layers` go with `personal: decoders`; with `personal: heads` decoders are shared"
            )
        return m.Method(name="fedper", private="head")
    shared = Select(role="encoder", exclude=Select(name=tuple(layers)))
    return m.Method(name="fedper", private=Select(exclude=shared) if layers else ALL_BUT_ENCODER)
