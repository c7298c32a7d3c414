"""MaTU's server: the next round's task vectors from the clients' unified vectors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedloom.core.codecs import Folded
from fedloom.core.context import Ctx, State
from fedloom.core.layout import Layout
from fedloom.core.mean import rows_of_tasks
from fedloom.core.stage import Stage, Traits
from fedloom.core.taskvectors import Upload, aggregate_tasks
from fedloom.core.updates import EVERYONE, Updates
from fedloom.methods.matu import TaskVectorsSettings


@dataclass(frozen=True)
class TaskVectors(TaskVectorsSettings, Stage):
    """New task vectors (T x d, rows ("*", task)) from rows (client, task): MaTU, eqs. 3 to 7.

    Columns that belong to no task go through `aggregate_tasks`, which explains the parameters. Rows that are still
    packed by the codec `Unified` are read piece by piece, never as a K x d matrix. Columns of a task, such as its head,
    become the weighted mean over the clients that hold it. Tasks that no client sent have no row.

    Records the similarity of tasks (eq. 5) and each task's partners (eq. 6) in every round.
    """

    traits = Traits("matrix", reads={"X", "weight"}, writes={"X", "tasks"}, reduces=True, presence="coupled")

    def __call__(self, updates: Updates, state: State, ctx: Ctx) -> tuple[Updates, State]:
        holders, layout = rows_of_tasks(updates), updates.layout
        own = layout.without(layout.common)
        uploads, beside = _uploads(updates, own)
        tasks = list(holders)
        X = uploads[0].vector.new_zeros(len(tasks), layout.d)
        spans = layout.spans(layout.common)
        out = X[:, spans[0]] if len(spans) == 1 else X.new_empty(len(tasks), layout.common.d)
        new = aggregate_tasks(
            uploads,
            rho=self.rho,
            kappa=self.kappa,
            epsilon=self.epsilon,
            combine=self.combine,
            cross=self.cross,
            source=self.source,
            out=out,
        )
        if len(spans) != 1:
            layout.put(X, layout.common, out)
        for x, (task, members) in zip(X, holders.items(), strict=True):
            w = updates.weight[members]
            w = w / w.sum() if float(w.sum()) > 0 else torch.full_like(w, 1 / len(w))
            mine = layout.select(task=task)
            layout.put(x, mine, w.to(x) @ own.take(beside[members], mine))
        n, weight = (
            torch.stack([v[members].sum() for members in holders.values()]) for v in (updates.n, updates.weight)
        )
        ctx.record(
            "task-vectors",
            {
                "tasks": tasks,
                "similarity": [[round(v, 6) for v in row] for row in new.similarity.tolist()],
                "partners": [[tasks[j] for j, v in enumerate(row) if v > 0] for row in new.partners.tolist()],
            },
        )
        return Updates(layout, tuple((EVERYONE[0], task) for task in tasks), X, n, weight), state


def _uploads(updates: Updates, own: Layout) -> tuple[list[Upload], Tensor]:
    """Return the senders' common columns, and the columns of tasks (K x their number)."""
    if isinstance(updates.given, Folded) and updates.mixing is None:
        return updates.given.uploads(updates.weight), updates.given.own()
    common = updates.layout.take(updates.X, updates.layout.common)
    uploads = [
        Upload(x, (str(task),), (n,), client=client)
        for x, n, (client, task) in zip(common, updates.weight.tolist(), updates.rows, strict=True)
    ]
    return uploads, updates.layout.take(updates.X, own)
