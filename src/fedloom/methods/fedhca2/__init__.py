"""FedHCA2: personal encoders and decoders that take a learned share of what the others learned.

Methods for one task, adapted to clients with different tasks as the supplement of FedHCA2 does it."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from fedloom import stages
from fedloom.core.settings.section import BelowOne, NonNegative, UnitInterval
from fedloom.methods import registry as m


@m.METHODS.register("fedhca2", source="Lu, Huang, Yang, Sirejiding, Ding, Lu, CVPR 2024")
def fedhca2(
    *,
    c: BelowOne = 0.4,
    alpha: UnitInterval = 0.1,
    beta: UnitInterval = 0.1,
    lr: NonNegative = 0.01,
    momentum: BelowOne = 0.9,
    weight_decay: NonNegative = 1e-4,
    rescale: Literal["none", "1+c^2", "1+c"] = "1+c^2",
    average_identical: bool = True,
    project: bool = False,
    encoder: Literal["conflict-averse", "mean", "none"] = "conflict-averse",
    decoder: Literal["cross-attention", "mean", "none"] = "cross-attention",
) -> m.Method:
    """Keep one encoder and decoders per client, and add a learned share of all clients' updates to its own.

    Encoder of client i:  theta_i+ = theta_i + Delta_i + clamp(alpha_i, 0, 1) U,  U = (g_0 + c |g_0| g_w / |g_w|) / s
    g_0 = mean_i Delta_i,  g_w = sum_i w_i Delta_i,  w = argmin <g_w, g_0> + c |g_0| |g_w| over w >= 0, sum w = 1

    Decoder k, a (client, task), layer l, tensor p:  theta_kp+ = theta_kp + Delta_kp + clamp(beta_kl, 0, 1) A_kp
    A_p = softmax(V_p V_p^T / sqrt(n_p)) V_p,  V_p: the K decoders' updates of p in rows of n_p values, self included

    alpha (one a client) and beta (one a decoder and layer) are learned at the server by SGD with momentum:
    g = -1[0 <= alpha_i <= 1] <Delta_i of the next round, U> + weight_decay alpha_i, beta alike with the sum over the
    layer's tensors. They are updated before they are used: a client that continues in the direction that was added to
    its model gets more of it. Heads and buffers never leave a client. Weights are not used: all clients count the same.

    `alpha` and `beta` are the initial values; `lr`, `momentum`, `weight_decay` are for learning them, not for training.
    `encoder` and `decoder` replace a half by the plain mean (of a task's decoders over the clients that have one) or by
    nothing, as in the paper's ablation. The weights of every round are in metrics.jsonl, under "records"; `fedloom
    papers hyper RUN` prints and draws them.

    paper    initial weights 0.01 in the text, but 0.1 is best in its tables; lr 0.01, momentum 0.9, weight decay 1e-4;
             c = 0.4 is best of 0.2 .. 0.8. Algorithm 1 has no division by s, does not say that w lies on the simplex,
             and says nothing about how the weights are learned or about identical clients
    release  initial weights 0.1; s = 1 + c^2; w by SLSQP without scaling, which stops at uniform weights for updates
             shorter than about 0.01 (those of warm-up rounds); with 2 and 4 clients a task, the updates of neighbouring
             clients with the same data set and tasks are replaced by their mean, after U was made. The weights are
             clamped in use only: outside [0, 1] only momentum and decay move them. Layers are matched
             by a part of their name. Clients start from decoders and heads of their own. The mean of decoders is over
             all of them, whatever their task
    here     the release's, with these differences. w is exact at any scale. Identical clients are averaged wherever
             they stand, not only if they are neighbours (`average_identical: false` for Algorithm 1), and layers are
             matched by exact name. All clients with a task start from the same decoder and head. Clients may be absent:
             a weight learns only if its client took part in this round and in the one before. `project: true` keeps
             the weights in [0, 1], so that none freezes. In a unified model (`model.heads: all`) only decoders that
             were trained attend and are moved

    For parity with the release: optimiser and schedule that continue over the rounds (`training.keep_optimizer: true`),
    as in the recipes fedhca2/*. The weights' gradients are not normalised: with long updates (norm 1 and more, as of
    large models) one step can carry a weight across [0, 1].

    alpha = beta = 0 with lr = 0 and average_identical false is local training of everything, bit for bit. Equal updates
    of all clients go 1 + alpha (1 + c) / s times as far. Models without decoders (classification) use the encoder's
    half only. Server memory: a model for each client, one direction U, and the last A of each decoder.

    With FedDEA at the client, alpha learns from transformed updates, which 1/rho makes longer. With pcgrad: after it.
    Rules that set weights (heal) or replace a mean are refused.

    Couples tasks by design: encoders and decoders add a share of everybody's updates.
    """
    learning = (lr, momentum, weight_decay, project)
    rules = {
        "conflict-averse": stages.HyperConflictAverse(alpha, *learning, c, rescale, average_identical),
        "cross-attention": stages.HyperCrossAttention(beta, *learning),
        "mean": stages.Mean(),
        "none": stages.Identity(),
    }
    return m.Method(
        name="fedhca2",
        # "*": decoders, or no columns at all where a model has none
        stage=stages.Split({"encoder": rules[encoder], "*": rules[decoder]}),
        private=m.Select(role="head"),
        buffers="local",
        weights="uniform",
    )


@m.ADDONS.register("across-tasks", source="FedHCA2, supplement")
def across_tasks(method: m.Method) -> m.Method:
    """Aggregate all decoders with each other, whatever their task, apart from encoders, and keep heads personal.

    Encoder: as the method has it. Decoder of client i for task t: the plain mean of the decoders of all participants
    and all their tasks, tensor by tensor. With fedamp: it is drawn to the mix of the decoders of all clients and all
    their tasks that resemble it, by the distances between decoders. Heads never leave a client.

    paper    for FedAvg and FedProx "we apply their aggregation mechanisms to the encoders and decoders separately. The
             update strategies of FedAMP and Ditto are similarly extended to both encoders and decoders"
    release  has no baselines; its `fedavg` for decoders is the uniform mean over all of them, and heads stay local
    here     the same, over parameters. Absent clients keep their decoders. Without this add-on decoders are averaged
             within a task only, which helps these methods: compare under the name that you used

    For methods with one mean for all (fedavg, fedprox, fedopt, ditto, ...) and for fedamp. Others are refused, and so
    are methods with private parts (fedamp with `share: encoder`) and those whose server broadcasts vectors over all
    parameters (scaffold). Models without decoders get personal heads.

    Couples tasks by design: decoders of all tasks are averaged.
    """
    heads = m.Select(role="head")
    if isinstance(stage := method.stage, stages.Attention) and method.private is None:
        across = stages.AttentionAcrossTasks(stage.alpha, stage.sigma, stage.scale)
        return replace(method, stage=across, private=heads)
    if not method.stage.traits.reduces or method.private is not None or method.stage.traits.broadcasts:
        raise ValueError(
            f"{method.name}: across-tasks replaces one mean or one attention over all parameters, "
            "but the method has neither"
        )
    return replace(method, stage=stages.Split({"encoder": method.stage, "*": stages.AcrossTasks()}), private=heads)
