"""FedBABU: only the body learns; heads are tuned at the end."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from fedloom.methods import registry as m


@m.METHODS.register("fedbabu", source="Oh, Kim, Yun, ICLR 2022")
def fedbabu(*, tune: Annotated[int, Field(ge=0)] = 5) -> m.Method:
    """The heads stay at their common initialisation; the encoder is trained and averaged.

    A client's model is measured after `tune` epochs of training the whole model on the client's data; the tuned model
    is not kept for the next round. tune = 0 measures the untrained heads.

    paper    as above; fine-tuning after federated training
    release  5 epochs of fine-tuning; heads get learning rate 0 (zeroing their gradient only would not freeze them under
             momentum or weight decay); uniform mean
    here     heads and decoders are not stepped, decayed or given momentum; uniform mean. Every evaluation tunes first,
             so evaluate seldom (evaluation.every)

    A random frozen decoder of a dense task is far harsher than a random linear classifier.
    With FedDEA, rho counts the encoder's parameters only.
    """
    from fedloom.core.layout import ALL_BUT_ENCODER
    from fedloom.training.phases import Phase, Tune

    return m.Method(
        name="fedbabu",
        phases=(Phase("encoder"),),
        private=ALL_BUT_ENCODER,
        tune=Tune(tune) if tune else None,
        weights="uniform",
    )
