"""MaTU: one vector for all tasks of a client; and tasks that are trained and sent by themselves."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from fedloom import stages, training
from fedloom.core.settings.section import Natural, UnitInterval, parameters
from fedloom.methods import registry as m


@parameters("fedloom.methods.matu.aggregation:TaskVectors")
class TaskVectorsSettings:
    rho: UnitInterval = 0.4
    kappa: Natural = 3
    epsilon: UnitInterval = 0.5
    combine: Literal["normalized", "sum", "half", "average"] = "normalized"
    cross: Literal["similar", "uniform", "none"] = "similar"
    source: Literal["masked", "unified", "reconstructed"] = "masked"


@m.METHODS.register(
    "matu", source="MaTU: Tsouvalas, Ozcelebi, Meratnia, Many-Task Federated Fine-Tuning via Unified Task Vectors"
)
def matu(
    vectors: stages.TaskVectors,
    *,
    heads: Literal["shared", "local", "frozen"] = "shared",
    delta_w: bool = False,
) -> m.Method:
    """Train each task of a client alone and send one unified vector with a mask and a scale for each task.

    A task vector tau is what training on a task adds to the initial model theta_p. A client with tasks 1..k starts
    task t from theta_p + lambda_t m_t tau, trains, and unifies its task vectors (eq. 2): tau = sgn(sum_t tau_t) *
    max |tau_t| over the tasks with that sign, m_t = (tau_t tau > 0), lambda_t = |tau_t|_1 / |m_t tau|_1. Per task, over
    the clients n that hold it:

    a_j = |mean_n sgn(m_n tau_n)_j|; mhat_j = 1 where a_j >= rho, else a_j                       (eq. 3)
    that = mhat * sum_n gamma_n lambda_n m_n tau_n, gamma_n by the number of examples            (eq. 4)
    S(t, t') = (mean_j sgn that_j sgn that'_j + 1) / 2                                           (eq. 5)
    ttil = sum of S(t, t') mhat * that' over the kappa most similar other tasks with S > epsilon (eq. 6)

    and the new task vector is (that + ttil) / (1 + the sum of the S in it) for combine = normalized (eq. 7). A client
    receives the new vectors of its tasks unified, as it sends them.

    paper    rho = 0.4, epsilon = 0.5; no value for kappa, learning rate, optimiser, batch size. Eq. 7 is a plain sum,
             the text calls it an average. LoRA of rank 16 on ViT-B/32, one local epoch, 100 rounds
    release  none
    here     kappa = 3. `combine: sum` is eq. 7 as printed: without any training it grows about fourfold a round where
             tasks are related; `half` divides it by two. `average` takes the text at its word ("average cross-task
             vectors", "averaging these two"): half the task's own vector, half its partners' average, weighted by S.
             `source: masked` applies lambda once (`reconstructed`: twice; `unified`: without the mask). `cross: none`
             and `uniform` are the ablations of Figure 6. The server keeps one vector a task, so that clients may be
             absent: a task that nobody sent keeps its vector and gives nothing to others, and a client that returns
             gets the current vectors. sgn(0) = 0, and 0/0 in lambda is 1

    Heads (and decoders) belong to their task and are no part of tau: `shared` among the clients that hold the task
    (weighted mean), `local`, or `frozen` at their initial values. For the paper's setting let the model have `lora`;
    without it, task vectors cover all parameters of the encoder. Running statistics are averaged per task.

    With `lora` the paper does not say what tau is of: here it is of the factors A and B, the "adapter" that is sent.
    With `delta_w` it is of their product: local training adds B A to the frozen weight W and begins again from the
    initial factors in every round; W - W_0 is tau. Of the factors, sgn(A) and sgn(B) are compared one by one, although
    (-B)(-A) is the same adapter; of the product they are not, but as many values are sent as the weights have.

    On the wire: 32 d bits, and d + 32 for each task (d rounded up to whole bytes), each way; heads beside it.
    `method.codec: raw` sends every task vector by itself.

    With FedDEA: each task vector is sparsified before they are unified. pcgrad acts on the clients' task vectors at the
    server, heal on their values. Refused with a server step, a stream or a model of the client's own.

    Couples tasks by design: task vectors of similar tasks are combined.
    """
    from fedloom.models.changes import FreeAdaptedWeights

    # what is aggregated of the encoder, and what local training changes in it
    tau, trained = m.Select(role="encoder"), m.Select(role="encoder")
    if delta_w:
        tau, trained = m.Select(name="*.base_layer.weight"), m.Select(role="adapter")
    method = m.Method(
        name="matu",
        codec=m.Unified(),
        stage=vectors,
        private=m.Select(exclude=tau) if heads == "local" else trained if delta_w else None,
        local=(m.Phase(trained),) if heads == "frozen" else (m.Phase(m.Select(exclude=tau)),) if delta_w else (),
        turn=m.EachTask(),
    )
    return (
        replace(method, model=(FreeAdaptedWeights(),), local=(*method.local, training.MergeFactors()))
        if delta_w
        else method
    )


@m.ADDONS.register("by-task", source="MaTU, Table 2")
def by_task(method: m.Method) -> m.Method:
    """Train each task of a client alone from the received model, and send an update for each.

    A client with k tasks trains k times, on the examples of one task each, and sends k updates; the rows of the matrix
    are (client, task), weighted by the task's examples. What the server does with the rows is the method's. A row has
    what tasks share and what its task has alone, so that heads are averaged over the rows of their task, as where each
    client has the heads of its own tasks only (`model.heads: own`). There, with one task a client, this is the method.

    paper    "competing methods transmit multiple adapters, one per task": 20.43 M bits a round instead of 6.32 M
    release  none
    here     there is still one model for all at the server, and each client receives it once: the paper does not say
             what else FedAvg, which has no tasks, would do with several adapters. Parts that stay at the client, as
             FedPer's, are kept for each task

    A method that keeps a model for each client, as matfl does, keeps one for each client and task: a client with k
    tasks becomes k clients, called CLIENT-TASK, each with the examples of one task, and `training.participation` draws
    among these. This needs data that a recipe deals out, not nodes with data of their own.

    Refused with a model of the client's own beside it, vectors beside the
    update (scaffold), tuning, and among peers. Models with running statistics are refused.
    """
    if method.turn.by_task:
        raise ValueError(f"{method.name}: the method already has one row per client and task")
    if method.turn != m.Received():
        raise ValueError(f"{method.name}: {method.turn!r} cannot be combined with one row per client and task")
    return replace(method, turn=m.EachTask() if method.stage.traits.reduces else m.Apart())
