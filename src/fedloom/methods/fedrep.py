"""FedRep: first the head, then the shared representation."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from fedloom.methods import registry as m


@m.METHODS.register("fedrep", source="Collins et al., ICML 2021")
def fedrep(*, head: Annotated[float, Field(gt=0, lt=1)] = 0.8) -> m.Method:
    """Every round trains the client's own head with the encoder frozen, then the encoder with the head frozen.

    Decoders and heads never leave a client; the encoder is averaged. `head` is the first phase's share of a round's
    batches; each phase has at least one.

    paper    several head epochs, then few of the representation
    release  5 local epochs, the last one for the representation (a share of 0.8); `requires_grad` is switched, which
             leaves old momentum and weight decay at work on some versions; 10 more head epochs before the final test
    here     frozen means no step, no decay, no momentum, and norm layers keep their statistics. Each phase has an
             optimiser of its own. No extra epochs before measuring: heads are trained in every round

    With FedDEA, rho counts the encoder's parameters only.
    """
    from fedloom.core.layout import ALL_BUT_ENCODER
    from fedloom.training.phases import Phase

    phases = (Phase(ALL_BUT_ENCODER, head), Phase("encoder", 1 - head))
    return m.Method(name="fedrep", phases=phases, private=ALL_BUT_ENCODER)
