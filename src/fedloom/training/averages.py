"""A local rule without training: the means of the labels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedloom.core.context import State
from fedloom.models.constant import ConstantHead
from fedloom.tasks.task import Task
from fedloom.training.rules import LocalRule, View


@dataclass(frozen=True)
class LabelMeans(LocalRule):
    """The answers of `ConstantAnswers` become the means of the client's labels in its first round, and stay so."""

    def finish(self, view: View, state: State) -> tuple[State, dict[str, Any]]:
        """What steps have made of the model is forgotten."""
        assert view.module is not None
        assert view.labels is not None
        view.params.copy_(view.base)
        heads = {name: head for name, head in view.module.heads.items() if isinstance(head, ConstantHead)}  # type: ignore[union-attr, operator]
        if not state:
            answers = label_means({name: head.task for name, head in heads.items()}, view.labels())
            with torch.no_grad():
                for name, answer in answers.items():
                    heads[name].answer.copy_(answer)
        return {"known": True}, {}


def label_means(tasks: Mapping[str, Task], batches: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Task -> the answer (channels x ...) that the mean of all its labels is (`Task.constant`).

    Tasks without a label are left out. A pixel without a label gets the mean over all pixels.
    """
    totals: dict[str, tuple[Tensor, Tensor]] = {}
    for labels in batches:
        for name, target in labels.items():
            if name in tasks:
                new = tasks[name].sums(target.cpu())
                old = totals.get(name)
                totals[name] = new if old is None else (old[0] + new[0], old[1] + new[1])
    answers = {}
    for name, (total, count) in totals.items():
        if count.sum() > 0:
            everywhere = total.flatten(1).sum(1) / count.sum() if total.ndim > 1 else total / count
            everywhere = everywhere.view(-1, *(1,) * (total.ndim - 1))
            answers[name] = tasks[name].constant(torch.where(count > 0, total / count, everywhere)).float()
    return answers
