"""Rules by which task vectors are merged, as add-ons: TIES, DARE, consensus masks, Iso-C, TSV-M, WUDI, FedRPCA."""

from __future__ import annotations

from fedloom import stages
from fedloom.core.settings.section import BelowOne, Count, NonNegative, Positive, Share, parameters
from fedloom.methods import registry as m


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

    One participant gets its trimmed update. What nobody else holds or trains, such as a decoder, comes out trimmed
    only. With FedDEA: `feddea` listed before acts before the
    trim, listed after on what is left. With pcgrad, gradvac: they see trimmed rows. Refused with rules that set weights
    of coordinates (heal) and with methods that have no plain mean to replace.
    """
    return method.combined_by(stages.ElectedMean()).plus(stages.TopMagnitude(keep, rescale=False))


@m.ADDONS.register("dare", source="DARE: Yu et al., Language Models are Super Mario, ICML 2024")
def dare(method: m.Method, *, drop: BelowOne = 0.9) -> m.Method:
    """Drop most coordinates of each update at random and rescale the rest, then combine as the method does.

    T(Delta)_i = Delta_i / (1 - drop) for floor((1 - drop) d) coordinates drawn at random, else 0; E[T(Delta)] = Delta

    It is `feddea: {keep: random, rho: 1 - drop}` under the name by which merging knows it. The client drops, so
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


@m.ADDONS.register("consensus", source="TALL masks and consensus merging: Wang et al., ICML 2024")
def consensus(method: m.Method, rule: stages.ConsensusMask) -> m.Method:
    """Average the updates, but only where at least some clients find a coordinate important.

    m_k,i = [|Delta_k,i| >= lam |S_i - Delta_k,i|],  S = sum_k Delta_k
    u_i = sum_k p_k Delta_k,i where sum_k m_k,i >= least, else 0

    So coordinates that matter to one client alone (selfish weights), and those that matter to none (catastrophic ones),
    stay as they are. Acts at the server; beside the update one yes or no per tensor is sent. No state. With `by-task`
    the rows are the clients' task vectors of the round; `fedloom study merge --rule consensus` merges
    finished models once.

    paper    least 2; lam from 0.2 to 0.6 for each task by validation; the mask on a merged vector of 8, 14 or 20 tasks
    release  not read
    here     in every round, on updates, before the mean with the method's weights; lam 0.4 for all (ours). A tensor
             that fewer than `least` clients have or trained, such as a task's decoder, asks all of these

    Equal updates come back where K - 1 <= 1 / lam, and all vanish with more clients: lam has to fall with their number,
    for S grows with it. One participant gets its update. With FedDEA: `feddea` acts at the client, so first. With
    pcgrad, gradvac: after them. Refused with rules that set weights of coordinates (heal) and with methods that have no
    plain mean to replace.
    """
    return method.combined_by(rule)


@m.ADDONS.register("iso-c", source="Iso-C: Marczak et al., No Task Left Behind, ICML 2025")
def iso_c(method: m.Method) -> m.Method:
    """Average the updates and make all singular values of each matrix equal, to their mean.

    M = sum_k p_k Delta_k = U diag(s) V';  u = mean(s) U V'   for every matrix of the model; other tensors get the mean

    So directions that many clients share do not drown those of a few. Acts at the server; beside the update one yes or
    no per tensor is sent. No state. `fedloom study merge --rule iso-c` merges finished models once.

    paper    on the sum of task vectors of linear layers, times a factor found by validation; other tensors averaged
    release  not read
    here     in every round, on the mean with the method's weights; a convolution is a matrix with a row for each output
             channel. Singular values that are zero within round-off stay zero and do not count in the mean. A tensor's
             mean is over the clients that have and trained it

    A whole step: even one participant, and equal updates, come out with equal singular values, so noise in small
    directions is raised to the level of the rest. The nuclear norm of M is kept. With FedDEA: `feddea` acts at the
    client, so first. With pcgrad, gradvac: after them. Refused with rules that set weights of coordinates (heal) and
    with methods that have no plain mean to replace.
    """
    return method.combined_by(stages.IsotropicMerge())


@m.ADDONS.register("tsv-m", source="TSV-M: Gargiulo et al., Task Singular Vectors, CVPR 2025")
def tsv_m(method: m.Method) -> m.Method:
    """Keep the leading singular vectors of each update's matrices, make them orthogonal among clients, and add up.

    Delta_k ~ U_k S_k V_k', the max(1, floor(rank / K)) leading parts;  U = [U_1 .. U_K], V = [V_1 .. V_K]
    u = P(U) S P(V)'  with P(U) = U (U'U)^(-1/2), the nearest matrix with orthonormal columns
    for every matrix of the model; other tensors get the mean.

    Acts at the server; beside the update one yes or no per tensor is sent. No state. `fedloom study merge --rule tsv-m`
    merges finished models once.

    paper    on task vectors of linear layers, once, times a factor of 1; other tensors averaged
    release  not read
    here     in every round, on updates; K are the clients that have and trained the tensor; a convolution is a matrix
             with a row for each output channel. In matrices clients count alike, whatever their weights

    Equal updates give their leading parts once; updates without a common direction add up, where a mean would divide
    them by K: compare with `server-step`. One participant gets its update, but for round-off. With FedDEA: `feddea`
    acts at the client, so first. With pcgrad, gradvac: after them. Refused with rules that set weights of coordinates
    (heal) and with methods that have no plain mean to replace.
    """
    return method.combined_by(stages.SingularMerge())


@m.ADDONS.register("wudi", source="WUDI-Merging: Cheng, Xiong, Wei et al., ICML 2025")
def wudi(method: m.Method) -> m.Method:
    """Merge each matrix so that it does to the inputs that a client's update reacts to what that update does.

    u = argmin_U sum_k |(U - Delta_k) Delta_k'|^2 / |Delta_k|^2, of those the shortest
    u = sum_k Delta_k C_k (sum_k C_k)^+,  C_k = Delta_k' Delta_k / |Delta_k|^2   for every matrix of the model; other
    tensors get the mean. The rows of Delta_k span the inputs by which client k trained the layer, so they stand for
    its data.

    Acts at the server; beside the update one yes or no per tensor is sent. No state. `fedloom study merge --rule wudi`
    merges finished models once.

    paper    the objective for each linear layer, once; the text was not at hand, the objective is the release's
    release  from the sum of the task vectors 300 steps of Adam, learning rate 2e-5 (of language models); ports have
             1e-5, and the mean of other tensors, or none of them
    here     in every round, on updates; the minimum itself, by least squares in float64; a convolution is a matrix with
             a row for each output channel. In matrices clients count alike, whatever their weights

    Equal updates, and one participant, give the update, but for round-off; updates of clients whose inputs have no
    common direction add up, where a mean would divide them by K: compare with `server-step`. With FedDEA: `feddea` acts
    at the client, so first. With pcgrad, gradvac: after them. Refused with rules that set weights of coordinates (heal)
    and with methods that have no plain mean to replace.
    """
    return method.combined_by(stages.LeastInterference())


@parameters("fedloom.methods.merging.aggregation:LowRankAndSparse")
class LowRankAndSparseSettings:
    beta: Positive | None = None


@m.ADDONS.register("fedrpca", source="FedRPCA: Jhunjhunwala et al., 2025 (arXiv 2506.01194)")
def fedrpca(method: m.Method, rule: stages.LowRankAndSparse) -> m.Method:
    """Split the clients' updates into what they have in common and what is a client's own, and raise the latter.

    M = the K updates of one tensor, a row each (K x n);  L + S = M by robust PCA:
    min |L|_* + |S|_1 / sqrt(max(K, n)),  |L|_* the sum of the singular values, |S|_1 that of the absolute values
    u = sum_k p_k L_k + beta sum_k p_k S_k,  beta = min(|M| / |S|, 10) unless it is given

    A mean divides by K what one client alone has learned; beta gives it back. Acts at the server; beside the update one
    yes or no per tensor is sent. No state. `fedloom study merge --rule fedrpca` merges finished models once. With
    `model.lora` the factors A and B of each layer are a matrix M each.

    paper    for low-rank factors: the low-rank parts are averaged, the sparse ones averaged and scaled. Only its
             abstract and summaries by others could be read; these say that the scale is adapted in every round
    release  none found
    here     for any tensor. The solver is that of Candes et al. (J. ACM 2011): alternating directions, mu = K n / (4
             |M|_1), to 1e-6 of |M|, at most 1000 steps, in float64, with singular values by the K x K Gram matrix.
             Ours are: a matrix M for each tensor, beta as the inverse of the share that S has in |M|, its limit, and
             the method's weights p_k, which robust PCA does not see

    Tensors of one dimension get the mean, and what one client alone has and trained comes out as it is. beta = 1 is the
    mean, but for round-off. Equal updates have no sparse part where no value is more than sqrt(K) times their root mean
    square; where K is small and updates share little, nearly all of M is sparse, and beta near 1. A round of ten
    clients takes about half a minute of one core per million weights. With FedDEA: what the clients drop is zero in M,
    so little is left for L. With pcgrad, gradvac: after them. Refused with rules that set weights of coordinates (heal)
    and with methods that have no plain mean to replace.
    """
    return method.combined_by(rule)
