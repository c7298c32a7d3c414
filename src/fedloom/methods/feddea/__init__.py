"""FedDEA, a record of the dimensions that updates activate, and controls that a method has to beat."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

from pydantic import Field

from fedloom import stages
from fedloom.core.settings.section import Positive, Share, parameters
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
    """Control: average each parameter over only those clients that trained it.

    u_i = sum_k p_k Delta_ki / sum_{k trained i} p_k, and 0 if no client trained i.

    Why: in a unified model every client holds the decoders of all tasks, but trains only its own task's. FedAvg divides
    a decoder's update by the number of all clients: with one task a client about 1/K of it is left, and decoders learn
    K times more slowly than alone. A rule that multiplies updates by a constant undoes part of that, such as FedDEA
    with 1/rho. If FedAvg with this control does as well, the constant was the reason.

    A parameter was trained if its tensor received a gradient in the round; clients report this. Parameters that
    everybody trains get the plain mean. Clients with personal heads are averaged like this anyway, so nothing changes.

    Replaces the mean, so methods without a plain mean are refused (local training, a mean already replaced by cagrad or
    min-norm). It reads the weights that other rules set. No parameters, no state; one yes or no per tensor is sent.
    """
    return method.combined_by(stages.SupportMean())


@m.ADDONS.register("server-step")
def server_step(method: m.Method, *, step: Positive) -> m.Method:
    """Control: the method with a server step, theta <- theta + step * u.

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
