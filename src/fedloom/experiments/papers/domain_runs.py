"""Features of a task's examples.

Finished runs whose clients have domains, opened to look at the features of their encoders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn

from fedloom.core.errors import StateError, choices
from fedloom.experiments.export.finished import Finished, Tell, open_runs
from fedloom.federation.rounds.built import Built
from fedloom.federation.rounds.federation import BuiltClient, Part
from fedloom.federation.rounds.worker import check_device
from fedloom.methods.f2dc.rules import FeatureModule, map_channels
from fedloom.models.changes import Linearised
from fedloom.models.multitask import MultiTask
from fedloom.models.tasks.task import Task
from fedloom.training.flat import pooled

BATCH = 64
"""Examples that go through a network together."""


@torch.inference_mode()
def encoded(encoder: nn.Module, part: Part, task: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """(pooled features n x D of a part's examples, their labels of the task n), both on the CPU."""
    features, labels = [], []
    for index in part.index.split(BATCH):
        x, y = part.examples.batch(index, device, tasks=(task,))
        features.append(pooled(encoder(x)).float().cpu())
        labels.append(y[task].cpu())
    return torch.cat(features), torch.cat(labels)


@dataclass(frozen=True, eq=False)
class DomainModel:
    """A model on the test examples of a domain. `owner` is its key among the run's models, "" the global one's."""

    domain: str
    client: BuiltClient
    owner: str
    personal: bool

    @property
    def label(self) -> str:
        """The domain; with the client, where the model is that client's own."""
        return f"{self.domain}, {self.client.id}" if self.personal else self.domain


@dataclass(frozen=True, eq=False)
class DomainRun(Finished):
    """A finished run whose clients have domains, and the task that is looked at."""

    task: Task
    device: torch.device
    last_map: nn.Module | None
    """The encoder's module that gives its last map; None where there is none, or the encoder is linearised."""
    feature_module: FeatureModule | None
    """The attached feature module that is passed last; None where there is none."""

    @cached_property
    def views(self) -> tuple[DomainModel, ...]:
        """One model per domain, in the order of the data set; one per client where clients have models of their own."""
        chosen = []
        for domain in self.built.dataset.domains:
            held = [
                c for c in self.built.federation.clients.values() if c.domain == domain and self.task.name in c.tasks
            ]
            views = [self._view(domain, client) for client in held]
            chosen += views if any(view.personal for view in views) else views[:1]
        return tuple(chosen)

    @property
    def domains(self) -> tuple[str, ...]:
        """Domains that clients of the task have."""
        return tuple(dict.fromkeys(view.domain for view in self.views))

    def first(self, domain: str) -> DomainModel:
        """Return the view of a domain's first client."""
        return next(view for view in self.views if view.domain == domain)

    def loaded(self, view: DomainModel) -> MultiTask:
        """Return the network with the view's model in it, in evaluation mode."""
        return self.network(view.owner)

    def part(self, view: DomainModel) -> Part:
        """Return the domain's test examples that have a label of the task."""
        return view.client.test.of(self.task.name)

    def features(self, view: DomainModel, most: int) -> tuple[Tensor, Tensor]:
        """(pooled features n x D of at most so many test examples, evenly spaced; their labels n), on the CPU."""
        return encoded(self.loaded(view).encoder, self.part(view).spread(most), self.task.name, self.device)

    def _view(self, domain: str, client: BuiltClient) -> DomainModel:
        owner = self.owner(client.id, self.task.name)
        return DomainModel(domain, client, owner, personal=owner in (client.id, f"{client.id}/task/{self.task.name}"))


def read(
    folders: Sequence[Path | str], task: str | None = None, device: str | None = None, tell: Tell = lambda *_: None
) -> list[DomainRun]:
    """Open finished runs on the same data; see `open_runs`.

    `task` names the classification task to look at, by default the only one; `device` is each run's own by default.
    Raises StateError where a run has not finished, its clients have no domains, the task is no classification, the
    model is not what it was, or runs have different data.
    """
    runs = []
    for run in open_runs(folders, tell):
        chosen = _task(run, task)
        where = torch.device(check_device(device or run.built.recipe.runtime.devices[0]))
        last_map, module = _places(run.built)
        run.built.module.to(where)
        runs.append(DomainRun(**vars(run), task=chosen, device=where, last_map=last_map, feature_module=module))
    return runs


def _task(run: Finished, name: str | None) -> Task:
    """Return the task that is looked at, whose clients have domains."""
    folder, federation = run.folder, run.built.federation
    tasks = {task.name: task for task in federation.tasks}
    if name is not None and name not in tasks:
        raise StateError(f"{folder}: no task {name!r}.{choices('Tasks', name, tasks)}")
    chosen = [task for task in tasks.values() if task.kind == "classification" and name in (None, task.name)]
    if not chosen:
        kinds = ", ".join(f"{task.name} ({task.kind})" for task in tasks.values() if name in (None, task.name))
        raise StateError(f"{folder}: expected a task with one class per example, found {kinds}")
    if len(chosen) > 1:
        raise StateError(
            f"{folder}: the run has several tasks; choose one with --task: {', '.join(t.name for t in chosen)}"
        )
    for client in federation.clients.values():
        if client.domain is None and chosen[0].name in client.tasks:
            raise StateError(f"{folder}: client {client.id!r} has no domain; expected a partition by domains")
    return chosen[0]


def _places(built: Built) -> tuple[nn.Module | None, FeatureModule | None]:
    """Return (the module of the encoder's last map, the feature module that is passed last)."""
    encoder = built.module.encoder
    if isinstance(encoder, Linearised):
        return None, None
    passed: list[FeatureModule] = []
    attached = [m for m in encoder.modules() if isinstance(m, FeatureModule)]
    handles = [m.register_forward_hook(lambda module, *_: passed.append(module)) for m in attached]
    maps = map_channels(encoder, built.dataset.input_shape)
    for handle in handles:
        handle.remove()
    return encoder.get_submodule(list(maps)[-1]) if maps else None, passed[-1] if passed else None
