"""Rules by which task vectors are merged, as add-ons; MaTU, which merges them in every round; tasks alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from fedloom import stages, training
from fedloom.core.settings.section import (
    BelowOne,
    Count,
    Natural,
    NonNegative,
    Positive,
    Share,
    UnitInterval,
    parameters,
)
from fedloom.methods import registry as m

MERGES = f"""Acts at the server, per tensor, over the clients that have and trained it. Clients send one more bit per
tensor. No state. `fedloom study merge --rule NAME` merges finished models once.

{m.REPLACES}"""


@m.ADDONS.register("ties", source="TIES-Merging: Yadav et al., NeurIPS 2023")
def ties(method: m.Method, *, keep: Share = 0.2) -> m.Method:
    """Trim each update to its largest coordinates, elect a sign for each coordinate, and average those that agree.

    trim   T(Delta)_i = Delta_i where |Delta_i| is among the floor(keep d) largest of the update, else 0
    elect  s_i = sgn(sum_k p_k T(Delta_k)_i)
    merge  u_i = sum_{k in A_i} p_k T(Delta_k)_i / sum_{k in A_i} p_k,  A_i = {k : T(Delta_k)_i s_i > 0};  0 if empty

    The client trims what it sends, so `method.codec: sparse` saves bytes; the server elects and merges. No state. With
    `by-task` the rows are the clients' task vectors of the round, as in the paper; `fedloom study merge --rule ties`
    merges finished models once.

    paper    keep 20 %, p_k = 1/K, the result times lambda (1 by default), once, after all tasks were trained
    release  a sum of exactly 0 takes the sign that most coordinates have (as known to us, not re-read)
    here     in every round, on updates; p_k are the method's weights (`weights: uniform` for the paper's); lambda is
             `server-step`; a sum of exactly 0 elects no sign, and the coordinate stays

    One participant gets its trimmed update. A part that no other client holds or trains, such as a decoder, is only
    trimmed. With FedDEA: listed before `ties`, `feddea` acts before the trim; listed after, it acts on the trimmed
    update. pcgrad and gradvac see trimmed rows. Refused with rules that set weights
    of coordinates (heal) and with methods that have no plain mean to replace.
    """
    return method.combined_by(stages.ElectedMean()).plus(stages.TopMagnitude(keep, rescale=False))


@m.ADDONS.register("dare", source="DARE: Yu et al., Language Models are Super Mario, ICML 2024")
def dare(method: m.Method, *, drop: BelowOne = 0.9) -> m.Method:
    """Drop most coordinates of each update at random and rescale the rest, then combine as the method does.

    T(Delta)_i = Delta_i / (1 - drop) for floor((1 - drop) d) coordinates drawn at random, else 0; E[T(Delta)] = Delta

    It is `feddea: {keep: random, rho: 1 - drop}` under its name in model merging. The client drops coordinates, so
    `method.codec: sparse` saves bytes; before `ties` it is the paper's DARE + TIES. No state; the draw is from the
    run's seed, per client and round.

    paper    drop 0.9 and more, for large language models with small differences; each coordinate is drawn by itself
    release  not read
    here     in every round, on updates; exactly floor((1 - drop) d) coordinates are kept. drop = 0 changes nothing, bit
             for bit

    The update's squared norm grows by 1 / (1 - drop) on average, so drop = 0.9 of a small model's updates is mostly
    noise: compare with `server-step`. With heal: masks see zeros of dropped coordinates. Local training shares nothing
    and is refused.
    """
    return method.plus(stages.TopMagnitude(1 - drop, keep="random"))


@parameters("fedloom.methods.merging.aggregation:ConsensusMask")
class ConsensusMaskSettings:
    lam: NonNegative = 0.4
    least: Count = 2


@m.ADDONS.register("consensus", source="TALL masks and consensus merging: Wang et al., ICML 2024", note=MERGES)
def consensus(method: m.Method, rule: stages.ConsensusMask) -> m.Method:
    """Average the updates, but only where at least some clients find a coordinate important.

    m_k,i = [|Delta_k,i| >= lam |S_i - Delta_k,i|],  S = sum_k Delta_k
    u_i = sum_k p_k Delta_k,i where sum_k m_k,i >= least, else 0

    So coordinates that matter to only one client (selfish weights) or to none (catastrophic ones) stay as they are.
    With `by-task` the rows are the clients' task vectors of the round.

    paper    least 2; lam from 0.2 to 0.6 for each task by validation; the mask on a merged vector of 8, 14 or 20 tasks
    release  not read
    here     in every round, on updates, before the mean with the method's weights; lam 0.4 for all (ours). A tensor
             that fewer than `least` clients have or trained, such as a task's decoder, asks all of these

    Equal updates come back if K - 1 <= 1 / lam, and vanish with more clients: lower lam as their number grows, because
    S grows with it.
    """
    return method.combined_by(rule)


@m.ADDONS.register("iso-c", source="Iso-C: Marczak et al., No Task Left Behind, ICML 2025", note=MERGES)
def iso_c(method: m.Method) -> m.Method:
    """Average the updates and make all singular values of each matrix equal, to their mean.

    M = sum_k p_k Delta_k = U diag(s) V';  u = mean(s) U V'   for every matrix of the model; other tensors get the mean

    So directions that many clients share do not drown those of a few.

    paper    on the sum of task vectors of linear layers, times a factor found by validation; other tensors averaged
    release  not read
    here     in every round, on the mean with the method's weights; a convolution is a matrix with a row for each output
             channel. Singular values that are zero within round-off stay zero and do not count in the mean. A tensor's
             mean is over the clients that have and trained it

    A whole step: even one participant, and equal updates, come out with equal singular values, so noise in small
    directions is raised to the level of the rest. The nuclear norm of M is kept.
    """
    return method.combined_by(stages.IsotropicMerge())


@m.ADDONS.register("tsv-m", source="TSV-M: Gargiulo et al., Task Singular Vectors, CVPR 2025", note=MERGES)
def tsv_m(method: m.Method) -> m.Method:
    """Keep the leading singular vectors of each update's matrices, make them orthogonal among clients, and add them up.

    Delta_k ~ U_k S_k V_k', the max(1, floor(rank / K)) leading parts;  U = [U_1 .. U_K], V = [V_1 .. V_K]
    u = P(U) S P(V)'  with P(U) = U (U'U)^(-1/2), the nearest matrix with orthonormal columns
    for every matrix of the model; other tensors get the mean.

    paper    on task vectors of linear layers, once, times a factor of 1; other tensors averaged
    release  not read
    here     in every round, on updates; K are the clients that have and trained the tensor; a convolution is a matrix
             with a row for each output channel. In matrices clients count alike, whatever their weights

    Equal updates give their leading parts once; updates without a common direction add up, where a mean would divide
    them by K: compare with `server-step`. One participant gets its update, but for round-off.
    """
    return method.combined_by(stages.SingularMerge())


@m.ADDONS.register("wudi", source="WUDI-Merging: Cheng, Xiong, Wei et al., ICML 2025", note=MERGES)
def wudi(method: m.Method) -> m.Method:
    """Merge each matrix so that it acts on each client's inputs as that client's update does.

    u = argmin_U sum_k |(U - Delta_k) Delta_k'|^2 / |Delta_k|^2, of those the shortest
    u = sum_k Delta_k C_k (sum_k C_k)^+,  C_k = Delta_k' Delta_k / |Delta_k|^2   for every matrix of the model; other
    tensors get the mean. The rows of Delta_k span the inputs by which client k trained the layer, so they stand for
    its data.

    paper    the objective for each linear layer, once; the text was not at hand, the objective is the release's
    release  from the sum of the task vectors 300 steps of Adam, learning rate 2e-5 (of language models); ports have
             1e-5, and the mean of other tensors, or none of them
    here     in every round, on updates; the minimum itself, by least squares in float64; a convolution is a matrix with
             a row for each output channel. In matrices clients count alike, whatever their weights

    Equal updates, and one participant, give the update, but for round-off; updates of clients whose inputs have no
    common direction add up, where a mean would divide them by K: compare with `server-step`.
    """
    return method.combined_by(stages.LeastInterference())


@parameters("fedloom.methods.merging.aggregation:LowRankAndSparse")
class LowRankAndSparseSettings:
    beta: Positive | None = None


@m.ADDONS.register("fedrpca", source="FedRPCA: Jhunjhunwala et al., 2025 (arXiv 2506.01194)", note=MERGES)
def fedrpca(method: m.Method, rule: stages.LowRankAndSparse) -> m.Method:
    """Split the clients' updates into a common part and parts of single clients, and amplify the latter.

    M = the K updates of one tensor, a row each (K x n);  L + S = M by robust PCA:
    min |L|_* + |S|_1 / sqrt(max(K, n)),  |L|_* the sum of the singular values, |S|_1 that of the absolute values
    u = sum_k p_k L_k + beta sum_k p_k S_k,  beta = min(|M| / |S|, 10) unless it is given

    A mean divides by K what one client alone has learned; beta gives it back. With `model.lora` the factors A and B of
    each layer are a matrix M each.

    paper    for low-rank factors: the low-rank parts are averaged, the sparse ones averaged and scaled. Only its
             abstract, introduction and summaries by others could be read (November 2026); these say that the scale is
             adapted in every round, and not how
    release  none found
    here     for any tensor. The solver is that of Candes et al. (J. ACM 2011): alternating directions, mu = K n / (4
             |M|_1), to 1e-6 of |M|, at most 1000 steps, in float64, with singular values by the K x K Gram matrix. Ours
             are: a matrix M for each tensor, beta as the inverse of the share that S has in |M|, its limit, and the
             method's weights p_k, which robust PCA does not see

    Tensors of one dimension get the mean, and what one client alone has and trained comes out as it is. beta = 1 is the
    mean, but for round-off. Equal updates have no sparse part where no value is more than sqrt(K) times their root mean
    square; where K is small and updates share little, nearly all of M is sparse, and beta near 1. A round of ten
    clients takes about half a minute of one core per million weights. With FedDEA: what the clients drop is zero in M,
    so little is left for L.
    """
    return method.combined_by(rule)


@parameters("fedloom.methods.merging.aggregation:TaskVectors")
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
    vectors: stages.TaskVectors, *, heads: Literal["shared", "local", "frozen"] = "shared", delta_w: bool = False
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
    if not delta_w:
        return method
    return replace(method, model=(FreeAdaptedWeights(),), local=(*method.local, training.MergeFactors()))


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
