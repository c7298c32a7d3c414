"""Global class prototypes at the server, from those that clients send beside their updates; X passes as it is.

They arrive as the extras `prototypes` (M_k x F) and `prototype_labels` (M_k x 3: task, class, examples). Under the same
names, with (task, class) as labels, they are broadcast to every client alike. A class that no client has in a round
keeps its prototypes. Tasks are kept apart; `fedloom.methods.prototypes.rules` is the clients' part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedloom.core.context import Broadcast, Ctx, State, derive_seed
from fedloom.core.layout import Layout
from fedloom.core.settings.section import Count, Natural, NonNegative, Positive
from fedloom.core.stage import Identity, Traits
from fedloom.core.untrusted import Array, Sender
from fedloom.core.updates import Updates
from fedloom.methods.prototypes import ClusteredPrototypesSettings, MovingAnchorsSettings, maths


@dataclass(frozen=True)
class ClassLabels:
    """The values that a node's prototype labels may have: task by task, all classes in order or none."""

    def read(self, value: Any, sender: Sender) -> Tensor:
        """Return the checked value."""
        labels = Array(("points", 3), torch.int64, 0, 1 << 53).read(value, sender)
        tasks = labels[:, 0].unique().tolist()
        if labels[:, :2].tolist() != [[task, c] for task in tasks for c in range(sender.classes.get(task, 0))]:
            raise ValueError("expected the classes of the sender's own tasks")
        return labels


def by_task(updates: Updates) -> dict[str, list[maths.Prototypes]]:
    """Return the clients' prototypes of each task, by its number as text; rows with nan or inf count as unknown."""
    prototypes: dict[int, list[maths.Prototypes]] = {}
    for points, labels in zip(updates.extra["prototypes"], updates.extra["prototype_labels"], strict=True):
        for task in labels[:, 0].unique().tolist():
            mine = labels[:, 0] == task
            means, counts = points[mine], labels[mine, 2].double()
            real = torch.isfinite(means).all(1)
            prototypes.setdefault(task, []).append(
                maths.Prototypes(means.where(real[:, None], 0), counts.where(real, 0))
            )
    return {str(task): prototypes[task] for task in sorted(prototypes)}


class KeepsPrototypes(Identity):
    """Base of these stages. State: task -> the result of `update`; `points` is what is broadcast of it."""

    traits = Traits(
        "mix",
        reads={"X", "extra:prototype_labels", "extra:prototypes"},
        writes={"broadcast:prototype_labels", "broadcast:prototypes"},
        separable=True,
        presence="block",
        extras={"prototypes": Array(("points", "features")), "prototype_labels": ClassLabels()},
    )

    def update(self, before: State | None, prototypes: Sequence[maths.Prototypes], task: str, ctx: Ctx) -> State:
        """Return a task's new state from the clients' prototypes of the round."""
        raise NotImplementedError

    def points(self, state: State) -> tuple[Tensor, Tensor]:
        """Return a task's global prototypes (M x F) and their classes (M)."""
        raise NotImplementedError

    def init(self, layout: Layout) -> State:
        return {"tasks": {}}

    def broadcast(self, state: State, clients: Sequence[str], models: Mapping[str, Tensor]) -> dict[str, Broadcast]:
        if not state["tasks"]:
            return super().broadcast(state, clients, models)
        points, labels = [], []
        for task, kept in state["tasks"].items():
            of_task, classes = self.points(kept)
            points.append(of_task)
            labels.append(torch.stack([torch.full_like(classes, int(task)), classes], 1))
        every = {"prototypes": torch.cat(points), "prototype_labels": torch.cat(labels)}
        return {client: dict(every) for client in clients}

    def __call__(self, updates: Updates, state: State, ctx: Ctx) -> tuple[Updates, State]:
        tasks = dict(state["tasks"])
        for task, prototypes in by_task(updates).items():
            tasks[task] = self.update(tasks.get(task), prototypes, task, ctx)
        return updates, {"tasks": dict(sorted(tasks.items(), key=lambda item: int(item[0])))}


@dataclass(frozen=True)
class MeanPrototypes(KeepsPrototypes):
    """One prototype per class: the mean of the clients' (FedProto), by `counts` of examples or over `clients`."""

    by: Literal["counts", "clients"] = "counts"

    def update(self, before: State | None, prototypes: Sequence[maths.Prototypes], task: str, ctx: Ctx) -> State:
        new = maths.aggregated(prototypes, self.by)
        if before is None:
            return {"means": new.means, "counts": new.counts}
        means = torch.where(new.known[:, None], new.means, before["means"])
        return {"means": means, "counts": torch.where(new.known, new.counts, before["counts"])}

    def points(self, state: State) -> tuple[Tensor, Tensor]:
        known = state["counts"] > 0
        return state["means"][known], known.nonzero()[:, 0]


@dataclass(frozen=True)
class ClusteredPrototypes(ClusteredPrototypesSettings, KeepsPrototypes):
    """Several prototypes per class: the means of FINCH's clusters of the clients' (FPL, `cluster_prototypes`)."""

    def update(self, before: State | None, prototypes: Sequence[maths.Prototypes], task: str, ctx: Ctx) -> State:
        new = maths.cluster_prototypes(prototypes, self.partition)
        if before is None:
            return {"points": new.points, "labels": new.labels}
        gone = ~torch.isin(before["labels"], new.labels)
        labels, order = torch.cat([new.labels, before["labels"][gone]]).sort(stable=True)
        return {"points": torch.cat([new.points, before["points"][gone]])[order], "labels": labels}

    def points(self, state: State) -> tuple[Tensor, Tensor]:
        return state["points"], state["labels"]


@dataclass(frozen=True)
class TrainedPrototypes(KeepsPrototypes):
    """One prototype per class that some client had, from a generator trained on the clients' (`trained_generator`)."""

    epochs: Natural = 100
    lr: Positive = 0.01
    batch_size: Count = 10
    limit: Annotated[NonNegative, Field(allow_inf_nan=False)] = 100.0

    def update(self, before: State | None, prototypes: Sequence[maths.Prototypes], task: str, ctx: Ctx) -> State:
        classes, width = prototypes[0].means.shape
        generator = maths.PrototypeGenerator(classes, width, derive_seed(ctx.seed, "fedtgp", task))
        known = torch.stack([p.known for p in prototypes]).any(0)
        if before is not None:
            generator.load_state_dict(before["generator"])
            known = known | before["known"]
        seed = derive_seed(ctx.seed, ctx.round, "fedtgp", task)
        generator = maths.trained_generator(generator.to(prototypes[0].means), prototypes, seed=seed, **asdict(self))
        parameters = {name: p.detach().clone() for name, p in generator.named_parameters()}
        with torch.no_grad():
            return {"generator": parameters, "known": known, "points": generator()}

    def points(self, state: State) -> tuple[Tensor, Tensor]:
        return state["points"][state["known"]], state["known"].nonzero()[:, 0]


@dataclass(frozen=True)
class MovingAnchors(MovingAnchorsSettings, KeepsPrototypes):
    """One anchor per class, all broadcast, that follows the clients' prototypes (`moved_anchors`); see `fedsa`."""

    def update(self, before: State | None, prototypes: Sequence[maths.Prototypes], task: str, ctx: Ctx) -> State:
        like = prototypes[0].means
        if before is None:
            classes, width = like.shape
            before = {"anchors": maths.random_anchors(classes, width, derive_seed(ctx.seed, "fedsa", task)).to(like)}
        return {"anchors": maths.moved_anchors(before["anchors"], prototypes, self.momentum)}

    def points(self, state: State) -> tuple[Tensor, Tensor]:
        return state["anchors"], torch.arange(len(state["anchors"]))
