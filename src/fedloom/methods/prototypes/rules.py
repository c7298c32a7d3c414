"""Local rules on class prototypes (FedProto, FPL, FedTGP, FedSA) and on features within a batch (FedRCL).

Prototypes travel as `fedloom.methods.prototypes.aggregation` says; a task's number is the position of its head in the
model, which all clients share. Only tasks with one class per example take part; a client without any trains as if there
were no rule. Features are what the heads read; of maps it is the mean of the last one. `ModelContrast` is MOON's.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, softplus

from fedloom.core.context import State
from fedloom.core.errors import RecipeError
from fedloom.core.settings.section import Checked
from fedloom.methods.f2dc.rules import map_channels
from fedloom.methods.prototypes import ClusterContrastSettings, ModelContrastSettings, maths
from fedloom.models.changes import Linearised
from fedloom.models.multitask import MultiTask
from fedloom.training.flat import pooled
from fedloom.training.rules import LocalRule, View, added

BROADCAST = frozenset({"broadcast:prototypes", "broadcast:prototype_labels"})
PROVIDED = frozenset({"extra:prototypes", "extra:prototype_labels"})


@dataclass(frozen=True, eq=False)
class Labelled:
    """The batch as one classification task sees it: its number, labels (B), number of classes, and its head."""

    number: int
    labels: Tensor
    classes: int
    head: nn.Module


def classified(view: View) -> Iterator[Labelled]:
    """Return the batch's tasks with one class per example."""
    heads: nn.ModuleDict = view.module.heads  # type: ignore[assignment]
    for number, (task, head) in enumerate(heads.items()):
        labels = view.targets.get(task)
        if task in view.outputs and labels is not None and labels.ndim == 1 and not labels.is_floating_point():
            yield Labelled(number, labels, view.outputs[task].shape[1], head)


def features_now(view: View) -> Tensor:
    """Return encoder features of the batch (B x F), with a gradient."""
    return view.features.now.to(view.params.dtype)


def told_points(view: View, number: int) -> maths.ClusterPrototypes:
    """Return the broadcast points of one task: none if the server has none."""
    labels = view.broadcast["prototype_labels"]
    mine = labels[:, 0] == number
    return maths.ClusterPrototypes(view.broadcast["prototypes"][mine].to(view.params.dtype), labels[mine, 1])


@dataclass(frozen=True)
class CollectPrototypes(LocalRule):
    """Provides the mean features of each class as seen in training, and the number of examples behind them.

    They cover the last pass over the training data: the round's last batches with, together, at most as many examples
    as the client has. Without `last_epoch` they cover the whole round. State: the number of examples, counted once.
    """

    last_epoch: bool = True
    features = True
    provides = PROVIDED

    def begin(self, view: View, state: State) -> State:
        return {**state, "batches": deque()}

    def grad(self, view: View, state: State) -> None:
        tasks = list(classified(view))
        if not tasks:
            return
        z = features_now(view).detach()
        prototypes = {t.number: maths.class_prototypes(z, t.labels, t.classes) for t in tasks}
        state["batches"].append((len(z), prototypes))
        if "examples" in state:
            keep_last(state["batches"], state["examples"])

    def finish(self, view: View, state: State) -> tuple[State, dict[str, Any]]:
        batches = state.pop("batches")
        if self.last_epoch and batches and "examples" not in state:
            state["examples"] = len(view.losses())
            keep_last(batches, state["examples"])
        prototypes = self._merged(batches)
        means = [p.means for p in prototypes.values()]
        labels = [
            torch.stack([torch.full_like(c, number), torch.arange(len(c), device=c.device), c], 1)
            for number, c in ((number, p.counts.long()) for number, p in prototypes.items())
        ]
        return state, {
            "prototypes": torch.cat(means) if means else view.params.new_zeros(0, 0),
            "prototype_labels": torch.cat(labels) if labels else torch.zeros(0, 3, dtype=torch.int64),
        }

    @staticmethod
    def _merged(batches: deque[tuple[int, dict[int, maths.Prototypes]]]) -> dict[int, maths.Prototypes]:
        numbers = sorted({number for _, prototypes in batches for number in prototypes})
        return {
            number: maths.aggregated([prototypes[number] for _, prototypes in batches if number in prototypes])
            for number in numbers
        }


def keep_last(batches: deque[tuple[int, Any]], examples: int) -> None:
    """Drop the first batches (examples in it, anything) until the others have at most `examples` examples."""
    total = sum(size for size, _ in batches)
    while total > examples:
        total -= batches.popleft()[0]


@dataclass(frozen=True)
class PrototypePull(LocalRule):
    """Adds lam times the `prototype_pull` of features to the broadcast prototypes (FedProto, FedTGP)."""

    lam: float = 1.0
    distance: Literal["mse", "norm"] = "mse"
    over: maths.Over = "known"
    features = True
    needs = BROADCAST

    def penalty(self, view: View, state: State) -> Tensor | None:
        if self.lam == 0 or "prototypes" not in view.broadcast:
            return None
        z = features_now(view)
        total = added(
            maths.prototype_pull(z, t.labels, told_points(view, t.number).unbiased(t.classes), self.distance, self.over)
            for t in classified(view)
        )
        return None if total is None else self.lam * total


@dataclass(frozen=True)
class ClusterContrast(ClusterContrastSettings, LocalRule):
    """Adds the contrast with the broadcast clusters of all classes and the pull to the own class's mean one (FPL)."""

    features = True
    needs = BROADCAST

    def penalty(self, view: View, state: State) -> Tensor | None:
        if "prototypes" not in view.broadcast:
            return None
        z = features_now(view)
        return added(
            maths.fpl_loss(z, t.labels, told_points(view, t.number), t.classes, self.temperature, self.over)
            for t in classified(view)
        )


@dataclass(frozen=True)
class SemanticAnchors(CollectPrototypes):
    """Adds FedSA's three terms on the broadcast anchors (`anchor_losses`); provides prototypes of the whole round.

    State: these prototypes, for the margin. A task without an anchor for some class gets no term. See `fedsa`.
    """

    last_epoch: bool = False
    pull: float = field(kw_only=True)
    margin: float = field(kw_only=True)
    calibration: float = field(kw_only=True)
    needs = BROADCAST

    def begin(self, view: View, state: State) -> State:
        return {**super().begin(view, state), "margins": {}}

    def penalty(self, view: View, state: State) -> Tensor | None:
        if self.pull == self.margin == self.calibration == 0 or "prototypes" not in view.broadcast:
            return None
        z, losses = features_now(view), []
        for t in classified(view):
            anchors = told_points(view, t.number).unbiased(t.classes)
            if not bool(anchors.known.all()):
                continue
            if t.number not in state["margins"]:
                own = state.get("own", {}).get(str(t.number))
                before = None if own is None else maths.Prototypes(own["means"], own["counts"])
                state["margins"][t.number] = maths.anchor_margin(anchors.means, before)
            terms = maths.anchor_losses(z, t.labels, anchors.means, t.head, state["margins"][t.number])
            losses.append(self.pull * terms[0] + self.margin * terms[1] + self.calibration * terms[2])
        return added(losses)

    def finish(self, view: View, state: State) -> tuple[State, dict[str, Any]]:
        own = self._merged(state["batches"])
        _, provided = super().finish(view, state)
        return {"own": {str(n): {"means": p.means, "counts": p.counts} for n, p in own.items()}}, provided


class _Tap:
    """A forward hook that keeps a map's mean over its area (B x C) in training."""

    def __init__(self) -> None:
        self.seen: Tensor | None = None

    def __call__(self, module: nn.Module, _inputs: Any, output: Tensor) -> None:
        if module.training:
            self.seen = pooled(output)


@dataclass(frozen=True)
class TapLevels(Checked):
    """Keeps the outputs of the encoder's modules in `levels` in training, for `RelaxedContrast`.

    None means the encoder's stages except the last, which gives the features; an encoder without stages has no levels.
    Raises RecipeError for a name that is no map of the encoder, and for a linearised encoder.
    """

    levels: tuple[str, ...] | None = None

    def __call__(self, model: MultiTask, shape: tuple[int, ...]) -> None:
        names: tuple[str, ...] = ()
        if self.levels != ():
            if isinstance(model.encoder, Linearised):
                raise RecipeError("levels of features cannot be combined with a linearised encoder")
            maps = map_channels(model.encoder, shape)
            names = self.levels or tuple(name for name in maps if re.fullmatch(r"stages\.\d+", name))[:-1]
            for name in names:
                if name not in maps:
                    known = ", ".join(maps) or "none"
                    raise RecipeError(f"fedrcl: {name!r} is not a map of the encoder; its maps: {known}")
        taps = [_Tap() for _ in names]
        for name, tap in zip(names, taps, strict=True):
            model.encoder.get_submodule(name).register_forward_hook(tap)
        model.encoder.levels = taps  # type: ignore[assignment]


@dataclass(frozen=True)
class RelaxedContrast(LocalRule):
    """Adds lam times the relaxed contrast of the features and of every tapped level (FedRCL, `relaxed_contrast`).

    `over_levels` says whether the levels' terms are added up or averaged. `TapLevels` must have given the model its
    levels.
    """

    lam: float = 1.0
    penalty_weight: float = 1.0
    temperature: float = 0.05
    threshold: float = 0.7
    positives: int = 1
    negatives: int = 2
    over_levels: Literal["sum", "mean"] = "sum"
    features = True

    def penalty(self, view: View, state: State) -> Tensor | None:
        levels = [features_now(view)]
        for tap in view.module.encoder.levels:  # type: ignore[union-attr]
            if tap.seen is not None:
                levels.append(tap.seen.to(view.params.dtype))
                tap.seen = None  # or the batch's graph would live on in the model
        if self.lam == 0:
            return None
        how = (self.temperature, self.threshold, self.positives, self.negatives, self.penalty_weight)
        total = added(maths.relaxed_contrast(z, t.labels, *how) for t in classified(view) for z in levels)
        if total is None:
            return None
        return self.lam * total / (len(levels) if self.over_levels == "mean" else 1)


@dataclass(frozen=True)
class ModelContrast(ModelContrastSettings, LocalRule):
    """Adds MOON's contrast of the batch's features with those of the received and the client's last model; see `moon`.

    A client's first round has no term. State: the last model, parameters and buffers.
    """

    features = True

    def penalty(self, view: View, state: State) -> Tensor | None:
        if self.mu == 0 or "previous" not in state:
            return None
        z = view.features.now
        to_global = cosine_similarity(z, view.features.under(view.received))
        to_previous = cosine_similarity(z, view.features.under(state["previous"]))
        return self.mu * softplus((to_previous - to_global) / self.temperature).mean()

    def finish(self, view: View, state: State) -> tuple[State, dict[str, Any]]:
        return {"previous": torch.cat([view.params, view.buffers])}, {}
