"""FedMTL: MOCHA's coupled tasks, for networks."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from fedloom import stages, training
from fedloom.methods import registry as m


@m.METHODS.register("fedmtl", source="MOCHA: Smith et al., NeurIPS 2017")
def fedmtl(
    *,
    lam: Annotated[float, Field(ge=0)] = 1e-3,
    centre: bool = True,
    floor: Annotated[float, Field(gt=0, lt=1)] = 1e-7,
    share: Literal["everything", "encoder"] = "everything",
) -> m.Method:
    """Each client keeps its own model; a learned relation of the tasks couples them.

    min sum_k F_k(w_k) + lam tr(W Omega W'), Sigma = Omega^-1 = (W'W)^(1/2) / tr, from the latest models of all clients.
    Client: gradient + 2 lam (Omega_kk w + v_k), the others frozen; v_k = sum_{j != k} Omega_kj w_j and Omega_kk come
    from the server, which never sends a model back. No term in the first round.

    paper    convex losses, solved in the dual by SDCA, with stragglers; Sigma starts at I/N
    release  as the paper; a widely used port for networks builds the term from detached weights: no gradient at all
    here     gradient steps on networks. `centre` (default) takes W as deviations from the clients' mean, because raw
             weights that started alike have a Gram matrix of almost rank one. Eigenvalues below `floor` times the
             largest are raised. lam = 1e-3 is ours (1e-4 .. 1e-2 are in use).

    `share: encoder` leaves decoders and heads out, as clients with different tasks need. lam = 0 is local training.

    Couples tasks by design: relations are learned between all clients.
    """
    from fedloom.core.layout import ALL_BUT_ENCODER

    return m.Method(
        name="fedmtl",
        local=(training.TaskCoupling(lam),),
        stage=stages.TaskCovariance(centre, floor),
        private=ALL_BUT_ENCODER if share == "encoder" else None,
        start="own",
        buffers="local",
    )
