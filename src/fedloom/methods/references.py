"""What every federation is compared with: the answer without any input, and all data in one place."""

from __future__ import annotations

from typing import Literal

from fedloom import stages, training
from fedloom.methods import registry as m


@m.METHODS.register("trivial")
def trivial() -> m.Method:
    """The answer that ignores its input: the mean of the training labels, which a trained model should at least beat.

    Classes: their shares among the labels, pixel by pixel where labels are maps, so the answer is the most frequent
    one; edges and saliency: the share of positives at each pixel; depth, normals and numbers: the mean.

    The labels are those that the clients hold, all in one place. There is no network; `training` says nothing.
    """
    from fedloom.models.constant import ConstantAnswers  # imports torch

    return m.Method(name="trivial", model=(ConstantAnswers(),), local=(training.LabelMeans(),), pooled="all")


@m.METHODS.register("joint")
def joint(*, by: Literal["all", "task"] = "all") -> m.Method:
    """One multi-task model, trained on the examples of all clients in one place: what collaboration can hope for.

    The examples have the labels that some client holds. A round makes as many steps as the largest client does and
    passes over all examples as often, so its batches are larger than the recipe's: as many times as there are more
    examples than the largest client has. Nothing is sent. With `by: task` each task has a model of its own, trained on
    the examples of all who hold it.
    """
    if by == "task":
        return m.Method(name="joint", stage=stages.Identity(), private="*", buffers="local", pooled="task")
    return m.Method(name="joint", pooled="all")
