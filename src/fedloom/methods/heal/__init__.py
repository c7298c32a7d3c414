"""FedHEAL as an add-on: consistent coordinates only, and clients weighted by how far they move."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from fedloom import stages
from fedloom.core.settings.section import UnitInterval, parameters
from fedloom.methods import registry as m


@parameters("fedloom.methods.heal.aggregation:Heal")
class HealSettings:
    tau: Annotated[float, Field(ge=-1, lt=1)] = 0.3
    beta: UnitInterval = 0.4
    zeros: Literal["paper", "none"] = "paper"
    weights: Literal["replace", "multiply"] = "replace"


@m.ADDONS.register("heal", source="FedHEAL: Chen, Huang, Ye, CVPR 2024")
def heal(method: m.Method, rule: stages.Heal) -> m.Method:
    """Average each coordinate over the clients that move it consistently; weigh clients by how far they move.

    q_ki = share of client k's earlier rounds in which Delta_ki had the sign it has now;  M_ki = [q_ki > tau], all ones
    in a client's first round.  dist_k = |M_k Delta_k|;  dw_k <- (1 - beta) dw_k + beta dist_k / sum_j dist_j;
    w_k <- w_k + dw_k, from w_k = 1/N, dw_k = 0.  u_i = sum_k w_k M_ki Delta_ki / sum_k w_k M_ki, and 0 where all are
    masked. Acts at the server; nothing more is sent. The weights take the place of the method's (its number of
    examples); with `weights: multiply` they are multiplied, which methods with learned weights (fedga) need. State at
    the server: 2 bytes per client and coordinate (4 with `zeros: none`).

    paper    tau 0.3, beta 0.4; an exact zero counts as one of the two signs
    release  the same constants; there the share is over the round number, so it is wrong for clients that were absent;
             distances are sums of norms per tensor; the sum runs over every client ever seen; zeros group with negative
             updates (seen as new minus old)
    here     each client's own rounds; the norm of the whole row; the participants of the round. `zeros: paper` groups
             zeros as the release does. `zeros: none` has three states: a zero is no evidence, is masked out, and q is a
             share of the rounds in which the coordinate moved

    In a unified model a client's update is exactly zero on the decoders of other tasks. In paper mode such zeros are
    perfectly consistent, so every client counts there and a decoder's update is divided by all; with `zeros: none` only
    clients that trained it count.

    w is never normalised in the recursion and its sum grows by about 1 each round, so late rounds change the weights
    less and less. tau >= 0.5 asks for a majority; tau = 0 still masks a sign that was never seen before; tau = -1 masks
    nothing (only the weights are left), and with beta = 0 in addition the result is the uniform mean. One participant
    gets its masked row back. If all rows are zero, no state changes; an absent client's state never does.

    With FedDEA: `feddea` acts at the client, so the history is one of transformed rows. Coordinates that were not
    chosen arrive as zeros: in paper mode they count as negative, and the smaller rho, the more positive updates are
    masked; `zeros: none` avoids that, but then divides by the clients that chose the coordinate. For a history of raw
    updates use `feddea: {at: server}` listed after `heal`: history and distances come from raw rows, then rows are
    transformed, then the mask is applied. Listed before `heal` it is the same as at the client.

    A method without a mean that reads weights and masks (local training, mixing) is refused. With methods that have a
    server optimiser (fedopt, fedacg), u is what the optimiser gets.

    Couples tasks by design: weights compare the lengths of all clients' masked updates.
    """
    return method.plus(rule, at="server")
