"""Local training, FedAvg and FedProx.

References for every federation: a constant predictor, and training on all data in one place.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from fedloom import stages, training
from fedloom.core.settings.section import NonNegative
from fedloom.methods import registry as m


@m.METHODS.register("local")
def local() -> m.Method:
    """Train each client alone; nothing is sent.

    The reference of Delta_m: same optimiser and number of local epochs as the federated runs. Mixing with the
    identity matrix (`Method(stage=Identity())`) gives the same models, bit for bit.
    """
    return m.Method(name="local", stage=stages.Identity(), private="*", buffers="local")


@m.METHODS.register("fedavg", source="McMahan et al., AISTATS 2017")
def fedavg() -> m.Method:
    """Average the clients' updates, with weights.

    u = sum_k p_k Delta_k, theta+ = theta + u, with p_k proportional to a client's examples (or uniform).

    In a unified model every client holds the heads of all tasks. A head's update is then divided by the number of all
    clients, although only those with the task changed it; the add-on support-mean is the control for that.
    """
    return m.Method(name="fedavg")


@m.METHODS.register("fedprox", source="Li et al., MLSys 2020")
def fedprox(*, mu: NonNegative = 0.01) -> m.Method:
    """Add (mu/2) |y - theta|^2 to FedAvg's local loss; theta is the model received this round.

    mu = 0.01 follows the FedHCA2 supplement; the authors of FedProx tune it over 0.001 .. 1 and name no default.
    mu = 0 is FedAvg, bit for bit. The term covers the shared parameters only.
    """
    return m.Method(name="fedprox", local=(training.Proximal(mu),))


@m.METHODS.register("separate")
def separate() -> m.Method:
    """Run one FedAvg per task: a whole model per task, averaged among the clients that hold it.

    The gain of another method over this one is the gain from sharing between tasks. A client with k tasks trains k
    models in turn, each from its task's model on the examples of that task, and sends k updates; theta_t+ is the
    weighted mean of the trained models of task t, running statistics included. At peers it runs where `weights.kind` is
    `size` or `uniform` and `scope` is `full`.
    """
    return m.Method(name="separate", stage=stages.TaskMeans(), turn=m.EachTask())


@m.METHODS.register("simple")
def simple() -> m.Method:
    """Train a linear model on the raw inputs at every client alone; a network should at least beat it.

    Logistic regression for classes, ridge regression for numbers (with `training.optimizer.weight_decay`), trained by
    the recipe's optimiser in place of the recipe's model. Refused for tasks of images (dense) and for tokens.
    """
    from fedloom.models.changes import LinearAnswers

    return replace(local(), name="simple", model=(LinearAnswers(),))


@m.METHODS.register("constant")
def constant() -> m.Method:
    """Predict the mean of the training labels, whatever the input; a trained model should at least beat it.

    Classes: their shares among the labels (per pixel if labels are maps), so the prediction is the most frequent class;
    edges and saliency: the share of positives at each pixel; depth, normals and numbers: the mean.

    The labels are those of all clients, in one place. There is no network, and `training` has no effect.
    """
    from fedloom.models.changes import ConstantAnswers

    return m.Method(name="constant", model=(ConstantAnswers(),), local=(training.LabelMeans(),), turn=m.InOnePlace())


@m.METHODS.register("centralised")
def centralised(*, by: Literal["all", "task"] = "all") -> m.Method:
    """Train one multi-task model on all clients' examples in one place: an upper reference for collaboration.

    The examples have the labels that some client holds. A round has as many steps as the largest client and as many
    passes over the examples. Its batches are therefore larger than the recipe's, by the ratio of all examples to those
    of the largest client. Nothing is sent. With `by: task` each task has its own model, trained on the examples of all
    clients that hold it.
    """
    if by == "task":
        return replace(local(), name="centralised", turn=m.InOnePlace("task"))
    return m.Method(name="centralised", turn=m.InOnePlace())
