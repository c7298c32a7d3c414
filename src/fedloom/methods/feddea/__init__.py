"""The coordinates of an update that count: FedDEA's selection at the client, FedHEAL's masks at the server."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

from pydantic import Field

from fedloom import stages
from fedloom.core.settings.section import Positive, Share, UnitInterval, parameters
from fedloom.methods import registry as m


@parameters("fedloom.methods.feddea.aggregation:TopMagnitude")
class TopMagnitudeSettings:
    rho: Share = 0.5
    keep: Literal["largest", "smallest", "random"] = "largest"
    rescale: bool = True
    per_block: bool = False


@m.ADDONS.register("feddea", source="FedDEA, eq. 2-6")
def feddea(method: m.Method, rule: stages.TopMagnitude, *, at: Literal["edge", "server"] = "edge") -> m.Method:
    """Keep the floor(rho d) largest coordinates of each client's update and multiply them by 1/rho.

    T(Delta)_i = Delta_i / rho where |Delta_i| is among the k = max(1, floor(rho d)) largest, else 0. d counts the
    shared parameters of the whole model; ties go to the lowest index. Acts before any weighting. rho = 1 changes
    nothing, bit for bit.

    paper    states no rho (it sweeps 10 % .. 100 %); one choice over the whole vector; ablations: smallest (`keep`),
             random (`keep`), no 1/rho (`rescale: false`)
    release  none found
    here     rho = 0.5 by default; `per_block` chooses within each tensor instead. `at: edge` (default): the client
             transforms what it sends, so a sparse codec saves bytes. `at: server`: as the paper's Figure 3 draws it, at
             its place among the server's add-ons; rules that keep a history (FedDyn's h, HEAL's signs if HEAL is listed
             before) then see raw updates.

    The remark that 1/rho preserves the update's energy does not hold for the largest coordinates: the norm grows by at
    least 1/sqrt(rho), about 1.9 at rho = 0.5 and 6.6 at 0.1. In a unified model it also undoes the division of each
    task's decoder by the number of clients. Compare with `server-step` (the same larger step without selection) and
    `support-mean` (no division) before crediting the selection.
    """
    return method.plus(rule, at=at)


@parameters("fedloom.methods.feddea.aggregation:ActivatedDimensions")
class ActivatedDimensionsSettings:
    rho: Annotated[float, Field(gt=0, lt=1)] = 0.1
    bins: Annotated[int, Field(ge=1, le=4096)] = 64


@m.ADDONS.register("activated-dimensions", source="FedDEA, Figure 2")
def activated_dimensions(method: m.Method, records: stages.ActivatedDimensions) -> m.Method:
    """Record which dimensions each update activates and how far the clients agree; changes nothing.

    A_k = the floor(rho d) largest |Delta_k|, without exact zeros; overlap of two clients = |A & B| / k, in general
    2 |A & B| / (|A| + |B|). Two sets drawn at random overlap by about rho. Once over the encoder alone, and once over
    all shared parameters. In a unified model every client is exactly zero on the decoders and heads of other tasks, so
    those parts are disjoint whatever the tasks have in common: read the encoder.

    paper    four clients with a task each train independently; the top 10 % of each update in round 1 and round 100,
             drawn along the parameters; no numbers
    release  none found
    here     counts of every round in metrics.jsonl, under "records": per block, per pair of clients, and a histogram of
             `bins` pieces along the flat vector. `fedloom papers activated RUN` prints tables and draws the picture;
             the grids feddea/activated-dimensions and feddea/activated-dimensions-scenes run the experiment

    It sees the rows at its place in the list: `feddea` at the client comes before it, and with the same or a larger rho
    does not change the choice, because the largest stay the largest. To look at raw rows, list it before `feddea: {at:
    server}`. Costs one look at every row and a bool per row and parameter; models are the same, bit for bit. With
    `local` there would be no rows, so updates are sent and every client gets its own back: the same models, bit for
    bit, but bytes are counted.
    """
    if method.shares_nothing:
        method = replace(method, private=None, stage=stages.Identity(), buffers="local")
    return method.plus(records, at="server")


@m.ADDONS.register("support-mean")
def support_mean(method: m.Method) -> m.Method:
    """Average each parameter over only those clients that trained it (a control).

    u_i = sum_k p_k Delta_ki / sum_{k trained i} p_k, and 0 if no client trained i.

    Why: in a unified model every client holds the decoders of all tasks, but trains only its own task's. FedAvg divides
    a decoder's update by the number of all clients: with one task a client about 1/K of it is left, and decoders learn
    K times more slowly than alone. A rule that multiplies updates by a constant, such as FedDEA's 1/rho, undoes part of
    that. If FedAvg with this control does as well, the constant was the reason.

    A parameter was trained if its tensor received a gradient in the round; clients report this. Parameters that
    everybody trains get the plain mean. Clients with personal heads are averaged like this anyway, so nothing changes.

    Replaces the mean, so methods without a plain mean are refused (local training, a mean already replaced by cagrad or
    min-norm). It reads the weights that other rules set. No parameters, no state; one yes or no per tensor is sent.
    """
    return method.combined_by(stages.SupportMean())


@m.ADDONS.register("server-step")
def server_step(method: m.Method, *, step: Positive) -> m.Method:
    """Multiply the server's update by a step, theta <- theta + step * u (a control).

    Why: keeping the largest coordinates and multiplying by 1/rho makes an update longer, by at least 1/sqrt(rho) (for
    Gaussian updates 6.6 times at rho 0.1, 1.9 times at 0.5), so FedDEA takes larger steps than FedAvg. Compare it with
    FedAvg and a step of 1/rho, or with the step that makes updates equally long, before crediting the selection.

    `step` has no default. 1 changes nothing, bit for bit. Buffers such as batch norm statistics are not stepped. No
    state, nothing more is sent.

    The method's server rule must be the plain one with step 1: a method with a server optimiser has a step of its own.
    Local training shares nothing and is refused.
    """
    if method.shares_nothing:
        raise ValueError(f"{method.name}: a server step would have no effect, because everything is private")
    if method.server != m.Plain():
        raise ValueError(f"{method.name}: server-step replaces Plain(step=1.0), but the method has {method.server!r}")
    return replace(method, server=m.Plain(step))


@parameters("fedloom.methods.feddea.aggregation:Heal")
class HealSettings:
    tau: Annotated[float, Field(ge=-1, lt=1)] = 0.3
    beta: UnitInterval = 0.4
    zeros: Literal["paper", "none"] = "paper"
    weights: Literal["replace", "multiply"] = "replace"


@m.ADDONS.register("heal", source="FedHEAL: Chen, Huang, Ye, CVPR 2024")
def heal(method: m.Method, rule: stages.Heal) -> m.Method:
    """Average each coordinate over the clients that move it consistently; weigh clients by the length of their updates.

    q_ki = share of client k's earlier rounds in which Delta_ki had the sign it has now;  M_ki = [q_ki > tau], all ones
    in a client's first round.  dist_k = |M_k Delta_k|;  dw_k <- (1 - beta) dw_k + beta dist_k / sum_j dist_j;
    w_k <- w_k + dw_k, from w_k = 1/N, dw_k = 0.  u_i = sum_k w_k M_ki Delta_ki / sum_k w_k M_ki, and 0 where all are
    masked. Acts at the server; nothing more is sent. The weights take the place of the method's (its number of
    examples); with `weights: multiply` they are multiplied, which methods with learned weights (fedga) need. Statistics
    of batch norm keep the method's own weights. State at the server: 2 bytes per client and coordinate (4 with `zeros:
    none`).

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
