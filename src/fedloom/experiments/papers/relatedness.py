"""`fedloom study relatedness`: how related the tasks of a run are, by several metrics (MaTU, Figures 2 and 3)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from fedloom.core.context import derive_seed
from fedloom.core.errors import UserError, unknown
from fedloom.experiments.export.finished import Step, TaskModels, Tell, steps, task_models
from fedloom.experiments.papers.features import BATCH, encoded
from fedloom.federation.rounds.built import Built
from fedloom.federation.rounds.federation import Part
from fedloom.federation.rounds.worker import check_device
from fedloom.study.agreement import DISTANCES, Array, symmetrised
from fedloom.study.relatedness import cosine, etran, etran_totals, fim, fisher_diagonal, logme, sign, wte
from fedloom.study.report.related import About, Relatedness
from fedloom.training.flat import FlatModel

METRICS = ("sign", "cosine", "logme", "etran", "fim", "wte")
"""In the order in which they are computed and shown."""


def relatedness(
    folder: str | Path,
    metrics: Sequence[str] | None = None,
    examples: int = 200,
    device: str | None = None,
    tell: Tell = lambda done, total, what: None,
) -> Relatedness:
    """Relate the tasks of a run (see `task_models`) by the metrics named, in the order of METRICS; by default all.

    sign, cosine    of the task vectors
    logme, etran    R[s, t]: features that the encoder of s computes for examples of t, and their labels
    fim             cosine of the diagonals of the true Fisher information over the common parameters: each task's
                    model on its own examples, answers drawn from the model
    wte             features of the initial encoder, which all tasks share, and labels; as many reference samples as
                    the task with the fewest has examples

    Examples of a task are at most `examples`, drawn from the recipe's seed among those that its clients train on.
    All metrics but the first two look at data and need one answer per example, wte classes. By default those that the
    tasks do not allow are left out with a note; where they are named it is a UserError.

    `device` is by default the run's own. Raises UserError for an unknown metric, and what `task_models` raises.
    """
    for name in metrics or ():
        if name not in METRICS:
            raise UserError(f"--metrics: {unknown('metric', name, METRICS)}")
    models = task_models(folder)
    refused = _refused(models.built)
    for name in metrics or ():
        if name in refused:
            raise UserError(f"{folder}: {name} cannot be computed: {refused[name]}")
    chosen = [name for name in METRICS if name in (metrics or METRICS) and name not in refused]
    left_out = [f"{name} is left out: {why}" for name, why in refused.items()] if metrics is None else []
    recipe = models.built.recipe
    computed = _Scores(models, examples, device, tell)
    scores = computed.compute(chosen)
    first = chosen[0]
    order = clustered(-scores[first] if first in DISTANCES else scores[first])
    return Relatedness(
        models.label,
        tuple(models.tasks[i] for i in order),
        {name: R[np.ix_(order, order)] for name, R in scores.items()},
        (*models.notes, *left_out),
        About(
            name=recipe.name,
            method=models.built.method.name,
            data=recipe.data.name,
            seed=recipe.seed,
            clients={task: len(clients) for task, clients in models.clients.items()},
            # metrics of task vectors look at no examples
            examples={task: len(p) for task, p in computed.parts.items()} if {*chosen} - {"sign", "cosine"} else {},
        ),
    )


def _refused(built: Built) -> dict[str, str]:
    """Return metric -> why the tasks do not allow it."""
    refused: dict[str, str] = {}
    for task in built.federation.tasks:
        if task.kind not in ("classification", "regression"):
            why = f"task {task.name!r} ({task.kind}) has no single answer per example"
            refused = {**dict.fromkeys(("logme", "etran", "fim", "wte"), why), **refused}
        elif task.kind != "classification":
            refused.setdefault("wte", f"task {task.name!r} ({task.kind}) has no classes")
    return {name: refused[name] for name in METRICS if name in refused}


class _One(nn.Module):
    """A model's answers for one task."""

    def __init__(self, model: nn.Module, task: str) -> None:
        super().__init__()
        self.model, self.task = model, task

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x, (self.task,))[self.task]


class _Scores:
    """Computes the matrices of one run, and says how far it has come."""

    def __init__(self, models: TaskModels, examples: int, device: str | None, tell: Tell) -> None:
        built = models.built
        self.models, self.tell, self.seed = models, tell, built.recipe.seed
        self.tasks = models.tasks
        self.vectors = torch.stack(list(models.vectors().values()))
        self.model = FlatModel.copy_of(built.module, check_device(device or built.recipe.runtime.devices[0]))
        self.parts = {task: self._examples(task, examples) for task in self.tasks}

    def compute(self, names: Sequence[str]) -> dict[str, Array]:
        """Return metric -> T x T."""
        by_features = [name for name in names if name in ("logme", "etran")]
        step = steps(len(self.tasks) * (bool(by_features) + ("fim" in names)) + ("wte" in names), self.tell)
        of_vectors = {"sign": sign, "cosine": cosine}
        scores: dict[str, Array] = {name: of(self.vectors).numpy() for name, of in of_vectors.items() if name in names}
        if by_features:
            scores |= self._by_features(by_features, step)
        if "fim" in names:
            scores["fim"] = self._fim(step)
        if "wte" in names:
            step("wte")
            self._load(self.model.initial)
            x, y = zip(*(self._features(task) for task in self.tasks), strict=True)
            # of equal sizes, transport is an assignment, which is much faster
            scores["wte"] = wte(x, y, reference=min(map(len, x)), seed=self.seed)
        step("")
        return {name: np.asarray(scores[name]) for name in names}

    def _examples(self, task: str, most: int) -> Part:
        """Train examples of the clients that count for a task, with a label of it."""
        clients = [self.models.built.federation.clients[client] for client in self.models.clients[task]]
        parts = [client.only(task).train for client in clients]
        positions = np.unique(np.concatenate([part.positions for part in parts]))
        if len(positions) > most:
            rng = np.random.default_rng(derive_seed(self.seed, "relatedness", task))
            positions = np.sort(rng.choice(positions, most, replace=False))
        return Part(parts[0].examples, positions, "own")

    def _load(self, vector: Tensor) -> None:
        self.model.vector.copy_(vector)
        self.model.module.eval()

    def _features(self, task: str) -> tuple[Array, Array]:
        """Return (features n x D that the loaded encoder computes for a task's examples, their labels n)."""
        encoder = self.model.module.get_submodule("encoder")
        features, labels = encoded(encoder, self.parts[task], task, self.model.device)
        return features.numpy(), labels.numpy()

    def _by_features(self, names: Sequence[str], step: Step) -> dict[str, Array]:
        evidence, energy, labels = np.full((3, len(self.tasks), len(self.tasks)), math.nan)
        for s, source in enumerate(self.tasks):
            step(f"features by the encoder of {source}")
            self._load(self.models.models[source])
            for t, target in enumerate(self.tasks):
                x, y = self._features(target)
                if "logme" in names:
                    evidence[s, t] = logme(x, y)
                if "etran" in names:
                    score = etran(x, y)
                    energy[s, t], labels[s, t] = score.energy, score.labels
        return {"logme": evidence} | ({"etran": np.asarray(etran_totals(energy, labels))} if "etran" in names else {})

    def _fim(self, step: Step) -> Array:
        kinds = {task.name: task.kind for task in self.models.built.federation.tasks}
        names = [f"model.{name}" for name in self.models.common.names]
        diagonals = []
        for task in self.tasks:
            step(f"Fisher information of {task}")
            self._load(self.models.models[task])
            part = self.parts[task]
            loaded = (part.examples.batch(i, self.model.device, tasks=(task,)) for i in part.index.split(BATCH))
            how: Any = {"likelihood": "gaussian" if kinds[task] == "regression" else "categorical", "seed": self.seed}
            with sdpa_kernel(SDPBackend.MATH):  # the fused kernels of attention cannot be mapped over single samples
                known = ((x, y[task]) for x, y in loaded)
                diagonal = fisher_diagonal(_One(self.model.module, task), known, "true", parameters=names, **how)
            diagonals.append(diagonal.cpu())
        return fim(diagonals).numpy()


def clustered(S: Any) -> list[int]:
    """Return an order of tasks in which related ones stand together, from similarities (T x T, symmetrised; nan: none).

    Average linkage: the two groups with the largest mean similarity are joined until one is left, so that the more
    similar of their ends touch. Of equally similar ones the first are taken.
    """
    M = symmetrised(S)
    known = M[np.isfinite(M)]
    M = np.where(np.isfinite(M), M, known.min(initial=0.0))
    groups = [[i] for i in range(len(M))]
    while len(groups) > 1:
        pairs = [(i, j) for i in range(len(groups)) for j in range(i + 1, len(groups))]
        i, j = max(pairs, key=lambda p: (float(M[np.ix_(groups[p[0]], groups[p[1]])].mean()), -p[0], -p[1]))
        a, b = groups[i], groups.pop(j)
        turned = ((x, y) for x in (a, a[::-1]) for y in (b, b[::-1]))
        x, y = max(turned, key=lambda pair: float(M[pair[0][-1], pair[1][0]]))  # the ends that touch
        groups[i] = [*x, *y]
    return groups[0]
