"""Distillation from other models' predictions: ConDistFL and FedMD."""

from __future__ import annotations

from typing import Literal

from fedloom import training
from fedloom.core.settings.section import FixedCount, Natural, NonNegative, Positive, parameters
from fedloom.methods import registry as m


@parameters("fedloom.methods.distill.rules:ConditionalDistillation")
class ConditionalDistillationSettings:
    lam: NonNegative = 1.0
    temperature: Positive = 2.0
    ramp: Natural = 10
    together: tuple[tuple[int, ...], ...] = ()


@m.METHODS.register("condistfl", source="ConDistFL: Wang et al., 2023 (arXiv 2308.04070) and 2024 (arXiv 2412.18833)")
def condistfl(rule: training.ConditionalDistillation) -> m.Method:
    r"""Distil the received model for classes that a client does not label (for sites that label only some organs).

    At a client that labels the classes $F$, $S$ is all others, the background 0 among them. Its masks have one label
    for all of $S$, and its loss is marginal: $-\log \sum_{c \in S} p_c$ there, $-\log p_y$ elsewhere. To this comes
    $$\lambda \operatorname{mean}_g\Big(1 - \frac{2 \sum_i q_{ig} t_{ig}}{\sum_i q_{ig} + \sum_i t_{ig}}\Big),
    \qquad q_{ig} = \frac{\sum_{c \in g} e^{z_{ic} / T}}{\sum_{c \in S} e^{z_{ic} / T}},$$
    where $g$ runs over groups of classes of $S$, $z$ are logits, $t$ is the same of the received model, and $i$ runs
    over the batch's pixels that are labelled $S$ and that the received model puts into $S$. So $q$ is the probability
    of a group given that the class is none of the client's. The server is FedAvg.

    paper    as above; only abstracts and excerpts could be read, so numbers are the release's
    release  T = 2; lambda grows from 0.01 to 1 evenly over the rounds; an organ and its tumour are one group where
             neither is labelled; the supervised loss is Dice + cross entropy, of four depths; 1e-5 in denominators
    here     the supervised loss is the task's own, made marginal; lambda grows from lam/100 to lam over the client's
             first `ramp` rounds (0: at once), because clients do not know how many there will be; `together` names
             the classes that are one group. Multilabel tasks: where a label is missing, the cross entropy with the
             received model's probability at temperature T, averaged over the missing ones

    Which classes a client labels stands in the task: `fl.task(kind="segmentation", classes=4, labelled={"north":
    [1]})`, in recipes `tasks: {organs: {labelled: {north: [1]}}}`. The marginal loss comes with that, for every
    method; lam = 0 is FedAvg with it, bit for bit, and so is a federation whose clients label everything.
    """
    return m.Method(name="condistfl", local=(rule,))


@parameters("fedloom.methods.distill.rules:Digest")
class DigestSettings:
    digest_epochs: FixedCount = 1
    digest_batch_size: FixedCount = 32
    distance: Literal["l1", "mse"] = "l1"


@m.METHODS.register(
    "fedmd",
    source="FedMD: Li, Wang, 2019 (arXiv 1910.03581)",
    order=("public", "digest_epochs", "digest_batch_size", "distance"),
)
def fedmd(*, public: FixedCount = 100, rule: training.Digest) -> m.Method:
    r"""Share predictions on a public set instead of parameters, so that clients' models may differ.

    Each round a client first digests: it trains towards the consensus, for `digest_epochs` passes over the public
    inputs $x_i$ on the mean of $|f_k(x_i) - \bar f(x_i)|$ over inputs and outputs. Then it revisits: it trains on its
    own examples. It sends its outputs $f_k(x_i)$ (logits of classes), and the server's consensus is their mean,
    $\bar f(x_i) = \frac{1}{K_t} \sum_k f_k(x_i)$, over the $K_t$ clients of the round that train the task.

    paper    logits; before the first round each model is trained on the public set's labels and then on its own data;
             a subset of the public set each round. Read in abstract and summaries only
    release  FedMD_clean: up to 20 epochs on the public set and 25 on the client's own examples before the first round;
             each round 5000 new public examples, one epoch of digest on the mean absolute error of logits (batches of
             128 or 256), then 2 to 10 epochs on its own (batches of 5 or 10). Digest and training each keep an Adam
    here     the same distance and epochs; the public set has no labels, so nothing is trained on them; all of it every
             round; the local optimiser, without its schedule and its memory. `distance: mse` is the squared error

    Predictions are a row of the matrix of updates, n_public x outputs per task (the change since the consensus that
    was sent), so stages, codecs, clipping and noise act on them as on parameters, and the server's model is the
    consensus. All parameters and running statistics stay with the client. The public set is `fl.Federation(public=x)`,
    or else `public` training examples drawn by the seed, which no client then has: a method that shares parameters
    has them. No digest in the first round, nor for a task that nobody has sent yet.
    """
    from fedloom.models.changes import PublicOutputs

    return m.Method(
        name="fedmd",
        model=(PublicOutputs(),),
        local=(rule,),
        private=m.Select(exclude=m.Select(role="public")),
        weights="uniform",
        public=public,
        buffers="local",
    )
