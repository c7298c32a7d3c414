"""Clusters of clients or tasks: CFL, IFCA, RR-Cluster, FedSoft, FedSPD, FedMerge, FedSTA, FedPMT, FedBone, ColNet and
MaT-FL.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from fedloom import stages, training
from fedloom.core.settings.section import BelowOne, Count, Natural, NonNegative, Positive, UnitInterval, parameters
from fedloom.methods import registry as m
from fedloom.methods.registry import Shared

First = Literal["groups", "noise"]
BY_CLUSTER = """Batch norm statistics stay with the client. `share: encoder` leaves decoders and heads out, as clients
with different tasks need.

Couples tasks by design: clusters are made of all clients, whatever their tasks."""


@m.METHODS.register("cfl", source="Sattler, Müller, Samek, IEEE TNNLS 2021", note=BY_CLUSTER)
def cfl(
    *,
    eps1: NonNegative | None = None,
    eps2: NonNegative | None = None,
    start: Natural = 20,
    relative: bool = True,
    linkage: Literal["single", "complete"] = "single",
    share: Shared = "everything",
) -> m.Method:
    """Run FedAvg per cluster; split a cluster if its mean update is short but its members' updates are long.

    From round `start` + 1 on, for each cluster of more than two members:
    |sum_k p_k Delta_k| < eps1 r  and  max_k |Delta_k| > eps2 r  ->  the two parts with the smallest largest similarity
    across: the members with the largest cos(Delta_i, Delta_j) are joined first, until two parts are left (single
    linkage). r = 1, or with `relative` the mean norm of the first round's updates. Parts continue from the cluster's
    model; the round's updates are averaged within the new parts.

    paper    thresholds as above, chosen from the first rounds; parts as above; an optional test on the gap of the
             similarities
    release  eps1 0.4, eps2 1.6 (absolute), start 20, uniform weights; complete linkage on -cos (`linkage: complete`),
             whose parts may be more similar than need be; later splits return positions within the cluster as if they
             were client numbers, so they move the wrong clients
    here     `relative`, because absolute norms mean nothing under another optimiser, architecture or FedDEA: by default
             eps1 0.2, eps2 0.4 (ours); with `relative: false` those of the release. No gap test. Clusters hold client
             ids

    A cluster is split only in a round in which all its members are present (the first: all clients), so hardly ever
    under low participation. Absent members receive their cluster's model. A cluster of one is local training. Until a
    split this is FedAvg with uniform weights, bit for bit. Add-ons at the server (pcgrad, cagrad, min-norm, heal, ...)
    act inside each cluster; after a split both parts inherit their state. With FedDEA, similarity and norms are those
    of the sent updates.
    """
    defaults = (0.2, 0.4) if relative else (0.4, 1.6)
    eps = [default if given is None else given for given, default in zip((eps1, eps2), defaults, strict=True)]
    return m.sharing(
        share, "cfl", stages.SplittingClusters(eps[0], eps[1], start, relative, linkage), weights="uniform"
    )


@m.METHODS.register("ifca", source="Ghosh et al., NeurIPS 2020", note=BY_CLUSTER)
def ifca(
    *, clusters: Count = 2, first: First = "groups", noise: NonNegative = 1.0, share: Shared = "everything"
) -> m.Method:
    """Keep C models at the server; a client trains the one with the smallest loss on its training data.

    j_k = argmin_j F_k(theta_j), ties by index;  theta_j <- theta_j + sum_{k: j_k = j} p_k Delta_k, p_k by data size
    within the cluster. A model that no client chose stays as it is.

    paper    models start at random, so it needs several restarts or a good start; averaging of models or of gradients;
             optionally shared first layers
    release  2 to 4 clusters, 10 local steps, learning rate 0.1 (MNIST)
    here     models that start alike never part, and one network's random restarts cost too much. Round 1 is FedAvg;
             then the C models are the mean trained models of C groups of its clients (average linkage on cosine
             distance: `first: groups`), or its result plus noise of `noise` times the update's root mean square, drawn
             from the run's seed (`first: noise`). The choice is made without augmentation or dropout

    A client is measured with its cluster's model, also while it is absent; one that never took part with the first
    round's model. A client compares only its own losses, so tasks may differ. All C models and the client's last one
    are sent; C passes over the training data come before each round of training. If one model is the best for all, as
    may happen to clients with different tasks on the same images, this is FedAvg: look at the choices. clusters = 1 is
    FedAvg.

    Without a server (`peers`) each peer keeps all C models and moves each with the neighbours that chose it: DFCA
    (Kirch et al., 2025), with a mean in place of its running mean. Where not every peer hears all others it takes
    `first: noise`, the same noise at all peers; `first: groups` is refused, because each peer would number groups for
    itself.

    Add-ons at the server (pcgrad, cagrad, min-norm, heal, ...) act inside each cluster, on rows relative to its model.
    With FedDEA, an update is measured from the model that the client had: when the client changes cluster, and in round
    2, the selection also covers the displacement from one model to the other. A server step moves the clients' copies
    and not the C models: leave it at 1. With `privacy`: as rr-cluster with B = 1.
    """
    return m.sharing(share, "ifca", stages.ChosenClusters(clusters, first, noise), training.BestCluster(clusters))


@m.METHODS.register("rr-cluster", source="RR-Cluster: Yang, Hu, Kim, Li, 2025 (arXiv 2508.06183)", note=BY_CLUSTER)
def rr_cluster(
    *,
    clusters: Count = 2,
    least: Count = 2,
    first: First = "groups",
    noise: NonNegative = 1.0,
    share: Shared = "everything",
) -> m.Method:
    """Run IFCA with at least `least` clients per model: large clusters lend random clients to small ones.

    j_k as in ifca; while a cluster has fewer than B = `least` participants, one drawn from those with more counts there
    theta_j <- theta_j + sum_{k counted in j} p_k Delta_k, Delta_k from the model that k chose

    So noise that hides one client of a cluster's mean need not hide one of fewer than B, at the price of updates that
    were made elsewhere. The parameters, and everything else, are those of ifca.

    paper    an add-on to federated clustering with client-level differential privacy: random rebalancing of assignments
             to a minimum size B, with noise on the updates and on what clients are assigned by; read in its abstract
             and its public reviews
    release  none found
    here     with IFCA. A client is visited once, in random order from the run's seed, and moves to the smallest
             cluster. It is measured with the model that it chose. B = 2 is ours

    With `privacy` (trust: central, `first: noise`, `weights: uniform`), whose noise is z and whose clip is c: s_j =
    #{k: j_k = j} + z / sqrt(0.1) g theta_j <- theta_j + (sum_{k counted in j} clip(Delta_k) + z c / sqrt(0.9) g) / m_j
    Clients are lent by draws of their own, with probabilities that follow from the sizes s alone, so that a client more
    moves no other; m_j >= B is the size then expected. So the noise of a mean is at most z c / (B sqrt(0.9)), and B
    holds on average only. This protects a client in all models together, but not its choice of a model: the trusted
    server and the run folder contain that. `trust: local` is refused, because clients send their choice.

    Fewer than B x clusters participants fill as many clusters as they can; a federation that never has as many, or a
    peer that never hears as many, is refused. B = 1 only keeps models that nobody chose from resting; where all
    clusters have B or more it is ifca, bit for bit.
    """
    lent = stages.ChosenClusters(clusters, first, noise, least=least)
    return m.sharing(share, "rr-cluster", lent, training.BestCluster(clusters))


@m.METHODS.register("fedsoft", source="Ruan, Joe-Wong, AAAI 2022", note=BY_CLUSTER)
def fedsoft(
    *,
    clusters: Count = 2,
    lam: NonNegative = 0.1,
    every: Count = 2,
    floor: Annotated[float, Field(gt=0, lt=1)] = 1e-4,
    first: First = "groups",
    noise: NonNegative = 1.0,
    share: Shared = "everything",
) -> m.Method:
    """Pull each client's own model towards C cluster models, each by the share of the client's data that it fits best.

    u_ks = share of client k's training examples for which c_s has the smallest loss of all, at least `floor`;
    client: loss + lam/2 sum_s u_ks |w - c_s|^2, from its own model of the last round;
    server: c_s = sum_k v_ks w_k over the participants, v_ks proportional to u_ks n_k. The server never overwrites w_k.

    paper    as above; shares estimated every 2 rounds; lam 0.01 to 1 by data set
    release  for each cluster 15 of 100 clients are drawn with probability v_ks and their plain mean is taken; its
             estimator is called with one argument too many
    here     the weighted mean over all participants. Shares are computed in every `every`-th round in which a client
             takes part; for a dense task by an image's mean loss. lam = 0.1 and floor = 1e-4 are ours. The first models
             are made from round 1, see ifca; there is no term in that round. A model whose shares at the participants
             are all at most the floor stays as it is

    Shares sum to 1 except for the floor. lam = 0 is local training; clusters = 1 draws to the mean of all. A
    loss-weighted mean of cluster models that is sent to the client, as some texts describe FedSoft, is another method.
    Clients are measured with w_k. C models are sent. Without a server (`peers`) each peer keeps all C models, each the
    mean of what its neighbours say of it; for `first: groups` see ifca. Rules at the server would be lost and are
    refused; FedDEA at the client makes w_k = base_k + T(Delta_k).
    """
    anchors = training.SoftAnchors(clusters, lam, every, floor)
    return m.sharing(share, "fedsoft", stages.SoftClusters(clusters, first, noise, floor), anchors, turn=m.Own())


@m.METHODS.register("fedspd", source="FedSPD: Lin, Yagan, Joe-Wong, UAI 2025 (PMLR 286)", note=BY_CLUSTER)
def fedspd(
    *, clusters: Count = 2, least: Count = 10, tune: Natural = 5, noise: NonNegative = 1.0, share: Shared = "everything"
) -> m.Method:
    """Cluster examples, not clients: a client trains one of C models per round, on the examples that this model fits.

    s(x) = argmin_s loss(x; c_s) for each training example x of client k;  u_ks = share of them with s(x) = s;
    client k draws s_k, trains c_s on {x: s(x) = s_k};  c_s <- mean of what those with s_k = s trained;
    k is measured with sum_s u_ks c_s after `tune` epochs on all of its examples (final phase), which are not kept

    paper    for peers: each mixes the model of s_k with neighbours that drew the same, so one model travels. Read in
             its abstract, in public summaries, and in the code that was submitted with it
    release  that code: every model is drawn by as many clients; one that fits fewer than 10 examples is given 10 of the
             largest; models begin at random, examples are dealt out at random, and the numbers of models are matched
             every 10 rounds; the final phase takes 5 times the local epochs, from half the learning rate
    here     each client draws alike among the models that fit at least `least` of its examples, or takes the one that
             fits most. Models begin as with ifca's `first: noise`, so they need no matching. At a server all are
             neighbours, and it sends all C models; peers send the one that they trained

    C passes over the training data come before each round. Every evaluation tunes; tune = 0 measures the mix. Absent
    clients move with the models; one that never took part has the model of round 1. clusters = 1 is FedAvg with equal
    weights. Add-ons and a server step as with ifca.
    """
    local = training.DrawnCluster(clusters, least), *([m.Tune(tune)] if tune else [])
    mixed = stages.ChosenClusters(clusters, "noise", noise, mixed=True)
    return m.sharing(share, "fedspd", mixed, *local, weights="uniform")


@m.METHODS.register("fedmerge", source="FedMerge: 2025 (arXiv 2504.06768)", note=BY_CLUSTER)
def fedmerge(
    *,
    models: Count = 5,
    step: NonNegative = 0.1,
    mu: NonNegative = 0.02,
    first: First = "groups",
    noise: NonNegative = 1.0,
    share: Shared = "everything",
) -> m.Method:
    """Send each client its own mix of the server's C models, with weights that the server learns.

    m_k = sum_j w_kj theta_j,  w_k = softmax(v_k), v_k = 0 at first;  client k trains m_k, with loss + mu/2 |w - m_k|^2
    v_kj <- v_kj - step s_kj / max |s|,  s_kj = p_k w_kj <theta_j - m_k, -Delta_k>, over all participants and models
    theta_j <- theta_j + sum_k p_k w_kj Delta_k / sum_k p_k w_kj,  with the new w

    s is the gradient of the clients' losses in v by the chain rule, with -Delta_k for the gradient at m_k. Only the mix
    is sent, so a client receives and sends what it would with FedAvg. The server keeps the models and v.

    paper    one objective over models and weights; only its abstract could be read
    release  5 models, 500 rounds of 2 epochs with learning rate 0.01; models begin at random; v moves by 0.01 times p s
             until a coordinate has moved by 0.01; s over the classifier's layers alone; 0.01 |w - m_k|^2
    here     the largest step is exactly `step`, which is 0.1 because runs here have tens of rounds; s over all that is
             shared. Models that start alike never part, and random ones have no mean that a client could train: round 1
             is FedAvg, and makes the models as with ifca, shifted so that their mean is the model of round 1

    An absent client moves with the models; one that never took part has their mean. models = 1 is FedAvg with
    the term of mu. step = 0 leaves all mixes equal. Add-ons at the server (pcgrad, cagrad, ...) act in each model, on
    rows weighed by the mixes; those that read no weights (robust rules) move all models alike. A server step moves the
    clients' copies and not the models: leave it at 1. Refused at peers, and with `privacy` but for `trust: local`.
    """
    local = (training.Proximal(mu),) if mu else ()
    return m.sharing(share, "fedmerge", stages.MergedModels(models, first, noise, step), *local)


@m.METHODS.register("fedsta", source="FESTA: Park et al., NeurIPS 2021")
def fedsta(*, every: Count | None = None) -> m.Method:
    """Share one encoder; keep decoders and heads personal or average them among clients with the same task.

    theta_enc <- theta_enc + mean_k Delta_k,enc;  every `every` rounds, for each task: theta_k,dec <- the mean of the
    trained decoders (and heads) of the participants that trained the task. `every: null` never averages them.

    paper    split learning: clients own a first part and a task's last part, the server trains the transformer body on
             their features; first and last parts of clients with the same task are averaged every so many rounds
    release  as the paper
    here     as FedHCA2's supplement adapts it (`every: null`, the default): the encoder is the body and is averaged,
             uniformly; there is no first part. Heads go with their decoders

    With `every: null` this is FedPer with uniform weights, and FedBABU without its frozen heads: state this in tables.
    Decoders of a task that only one client has are never averaged. A client that is absent when decoders are averaged
    keeps its own. Encoder buffers (batch norm) are averaged. With `every` set, decoders travel in each round, and
    FedDEA's rho counts them; add-ons at the server (pcgrad, cagrad, heal, ...) act on the encoder only.
    """
    if every is None:
        return m.Method(name="fedsta", private=m.ALL_BUT_ENCODER, weights="uniform")
    own = stages.Every(every, stages.PerTask(stages.SimilarGroups(1)))
    return m.Method(name="fedsta", stage=stages.PartlyShared("encoder", stages.Mean(), own), weights="uniform")


@parameters("fedloom.methods.clusters.aggregation:SingleTaskModels")
class SingleTaskModelsSettings:
    attenuation: UnitInterval = 0.5


@m.METHODS.register("fedpmt", source="FedPMT: Xin, Li, Niu, Wu, Chen, JPDC 205, 2025")
def fedpmt(mean: stages.SingleTaskModels) -> m.Method:
    """Make a model per task of all clients' models, and each client's model of those of its tasks.

    theta_t = sum_k a_kt n_k w_k / sum_k a_kt n_k,  a_kt = 1 where client k holds task t, else `attenuation`
    w_k <- mean of theta_t over the tasks t of client k;  a task's decoder and head: sum over its holders by n_k

    paper    multi-task models of each client's subset of tasks; at the server, of another architecture, models of
             single tasks between them, with transformations both ways; task attenuation factors against negative
             transfer; NYUD-v2, PASCAL-Context, Cityscapes. Only its abstract and highlights could be read
    release  none found
    here     as above, with one architecture: a multi-task model is taken as each of its tasks' models, and made of
             these as their mean. The form of the factor, its value and the weights are ours

    attenuation = 1 is FedAvg, with decoders averaged among their holders alone; 0 joins clients by common tasks only,
    and with one task a client is FedAvg within each task. An absent client keeps its model, and one that never took
    part begins with the initial one. Encoder buffers (batch norm) stay with the client. With FedDEA, models are base_k
    + T(Delta_k). pcgrad acts on the updates before models are mixed. cagrad, min-norm and heal are refused: there is no
    mean to change.
    """
    own = stages.PerTask(stages.SimilarGroups(1))
    mix = stages.Split({"encoder": mean, "*": own})
    return m.Method(name="fedpmt", stage=mix, buffers="local")


@parameters("fedloom.methods.clusters.aggregation:HistoryAttention")
class HistoryAttentionSettings:
    beta: BelowOne = 0.9
    temperature: Positive = 1.0


@m.METHODS.register("fedbone", source="emulated, after Chen et al., JCST 2024")
def fedbone(history: stages.HistoryAttention) -> m.Method:
    """Emulated FedBone: weigh updates by agreement with past ones, project conflicts away, then average.

    a_k = softmax_k(cos(Delta_k, H) / temperature);  rows K a_k Delta_k -> PCGrad -> u = sum_k p_k rows_k;
    H <- beta H + (1 - beta) u, an exponential mean of past u. In round 1, a_k = 1/K. Decoders and heads never leave a
    client.

    paper    split learning: the server holds a large model, runs it on the clients' embeddings, rescales each task's
             gradient by attention against past ones and projects those in conflict
    release  not known to us
    here     an emulation in rounds of local training, on the updates of a shared encoder. The form of the attention
             (cosine, softmax), beta and temperature are ours: call results "FedBone (emulated)"

    One participant: its update. No conflict and equal cosines: FedAvg on the encoder. A large temperature leaves
    PCGrad on the encoder. The encoder's float buffers (batch norm) are averaged. H is at the server; nothing more is
    sent.

    With FedDEA: before the attention. Add-ons at the server (pcgrad again, heal) act after the projection; cagrad and
    min-norm take the place of the mean.

    Couples tasks by design: weights compare a client's update with the history of all.
    """
    return m.Method(name="fedbone", stage=history, private=m.ALL_BUT_ENCODER)


@parameters("fedloom.methods.clusters.aggregation:CosineMix")
class CosineMixSettings:
    tau: Positive = 0.5


@parameters("fedloom.methods.clusters.aggregation:TaskLeaders")
class TaskLeadersSettings:
    c: BelowOne = 0.4
    alpha: NonNegative = 1.0


@m.METHODS.register("colnet", source="Feng et al., 2025 (arXiv 2501.10347)")
def colnet(leaders: stages.TaskLeaders) -> m.Method:
    """Average encoders among clients with the same tasks; the groups' leaders mix them and resolve conflicts.

    v_g and Delta_g: uniform means of a group's encoders before the round and of its updates. All clients of g end at
    v_g + Delta_g + alpha U(Delta_1 .. Delta_G) with U = (g_0 + c |g_0| g_w / |g_w|) / (1 + c^2), g_0 the mean of the
    groups' updates and g_w their convex combination that minimises <g_w, g_0> + c |g_0| |g_w|.

    paper    leaders take turns; groups known from tasks, in a later version by what models and data are sensitive to
    release  the first client of a group leads; alpha fixed at 1, which counts the group's own update twice
    here     the leader adds nothing of its own, so it does not matter which client leads. One group gets its plain
             mean, where the release would add U of a single update to that update

    This computes in one place what peers would do. Decoders, heads and batch norm statistics stay with the client.
    alpha = 0 is FedAvg of encoders inside each group, the clients with equal tasks.

    Couples tasks by design: leaders of the groups of tasks exchange updates.
    """
    return m.Method(name="colnet", stage=leaders, private=m.ALL_BUT_ENCODER, weights="uniform", buffers="local")


@parameters("fedloom.methods.clusters.aggregation:SimilarGroups")
class SimilarGroupsSettings:
    groups: Count = 2
    soft: bool = False
    threshold: Annotated[float, Field(gt=-1)] = 0.0
    source: Literal["centred-weights", "update"] = "centred-weights"


@m.METHODS.register("matfl", source="MaT-FL: Cai et al., CVPR Workshops 2023")
def matfl(mix: stages.SimilarGroups) -> m.Method:
    """Group clients by their encoders each round; a client receives the mean encoder of its group.

    r_k = w_k - mean_j w_j over the participants' trained encoders; average linkage on 1 - cos(r_j, r_k) until `groups`
    are left; w_k <- mean of the group. `soft`: w_k <- sum_j m_kj w_j, m_kj proportional to relu(cos(r_j, r_k) +
    threshold). Decoders and heads never leave a client.

    paper    many tasks, one model a task; groups found anew in every round; 2 groups by default, as in the FedHCA2
             supplement
    release  groups by r_k as above; Adam, learning rate x 0.99 a round; running batch norm statistics are averaged
             within the group; an argument of the clustering call that current scikit-learn no longer has
    here     own linkage, ties go to the client that comes first by name; batch norm statistics stay with the client.
             threshold = 0 is ours. `source: update` compares the round's updates instead of r_k

    r_k is a position, not an update: once groups have moved apart, grouping is sticky. Updates separate groups while
    they move; at rest only differences within a group are left, and they break it up. With two participants r_1 = -r_2
    always, and among K the mean cosine is about -1/(K-1): for `soft` mind the threshold. groups of at least K: local
    training, bit for bit. groups = 1: the encoder's mean for all (FedPer with uniform weights when all take part,
    except for rounding). Absent clients keep their encoder, and are not compared. With FedDEA, groups are made from the
    sent updates, and the group's mean is that of base_k + T(Delta_k). pcgrad acts on the updates before models are
    compared. cagrad, min-norm and heal are refused: there is no mean to change.

    Couples tasks by design: groups are formed from the models of all clients.
    """
    return m.Method(name="matfl", stage=mix, private=m.ALL_BUT_ENCODER, weights="uniform", buffers="local")
