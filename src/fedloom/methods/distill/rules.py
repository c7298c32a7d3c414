"""Local rules that pull predictions to those of other models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, l1_loss, mse_loss

from fedloom.core.context import State
from fedloom.methods.distill import ConditionalDistillationSettings, DigestSettings
from fedloom.models.tasks.dense import Semseg
from fedloom.models.tasks.labels import Multilabel
from fedloom.training.flat import build
from fedloom.training.rules import LocalRule, View


@dataclass(frozen=True)
class ConditionalDistillation(ConditionalDistillationSettings, LocalRule):
    """Adds distillation from the received model where labels are silent (ConDistFL). State: its rounds."""

    def begin(self, view: View, state: State) -> State:
        return {"rounds": state.get("rounds", 0) + 1}

    def penalty(self, view: View, state: State) -> Tensor | None:
        if self.lam == 0:
            return None
        terms: list[Tensor] = []
        taught = None
        for each in view.module.tasks:  # type: ignore[union-attr]
            task, z, y = each.known, view.outputs.get(each.name), view.targets.get(each.name)
            if z is None or y is None or not silent(task, y):
                continue
            taught = view.under(view.received) if taught is None else taught
            t = taught[each.name]
            if isinstance(task, Multilabel):
                absent = y.isnan()
                wanted = (t[absent] / self.temperature).sigmoid()
                terms.append(binary_cross_entropy_with_logits(z[absent] / self.temperature, wanted))
            else:
                y = y.view(len(y), *y.shape[-2:])
                terms += [
                    conditional_dice(z, t, y == task.channels + j, groups(some, self.together), self.temperature)
                    for j, some in enumerate(task.sets)
                    if bool((y == task.channels + j).any())
                ]
        grown = min((state["rounds"] - 1) / self.ramp, 1.0) if self.ramp else 1.0
        return self.lam * (0.01 + 0.99 * grown) * torch.stack(terms).sum() if terms else None


def silent(task: object, y: Tensor) -> bool:
    """Return whether a batch of labels leaves open which class or label it is, somewhere."""
    if isinstance(task, Multilabel):
        return bool(y.isnan().any())
    return isinstance(task, Semseg) and bool(task.sets)


def groups(some: Sequence[int], together: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return classes in groups: those that are `together`, and each of the others alone."""
    joined = [[c for c in some if c in group] for group in together]
    rest = [[c] for c in some if not any(c in group for group in together)]
    return rest + [group for group in joined if group]


def conditional_dice(z: Tensor, t: Tensor, open_: Tensor, of: Sequence[Sequence[int]], temperature: float) -> Tensor:
    """Return 1 - Dice of conditional probabilities, averaged over groups of classes (ConDistFL).

    z, t: logits of the student and the teacher, B x C x H x W; `open_`: pixels that are of some class of the groups
    (B x H x W, bool), of which those count that the teacher puts there too. 1 where none does.
    """
    inside = [c for group in of for c in group]
    here = open_ & torch.isin(t.argmax(1), torch.tensor(inside, device=t.device))

    def conditional(logits: Tensor) -> Tensor:
        """Return the probability of each group given that it is one of them (groups x pixels)."""
        p = (logits.movedim(1, -1)[here][:, inside] / temperature).softmax(1)
        return torch.stack([part.sum(1) for part in p.split([*map(len, of)], 1)])

    q, taught = conditional(z), conditional(t)
    dice = 2 * (q * taught).sum(1) / (q.sum(1) + taught.sum(1) + 1e-5)
    return 1 - dice.mean()


@dataclass(frozen=True)
class Digest(DigestSettings, LocalRule):
    """Trains towards the received outputs on the public set before a round, and puts its own there after it (FedMD).

    `PublicOutputs` must have given the model its parameters `public_outputs`.
    """

    def begin(self, view: View, state: State) -> State:
        module: Any = view.module
        x: Tensor = module.public
        known = {task: module.public_outputs[task].detach().clone() for task in view.tasks}
        known = {task: consensus for task, consensus in known.items() if bool(consensus.any())}
        if not known:
            return state
        distance = l1_loss if self.distance == "l1" else mse_loss
        optimizer = build(view.optimizer, view.params, view.grad, view.trained)
        module.train()
        for _ in range(self.digest_epochs):
            for batch in torch.randperm(len(x)).to(x.device).split(self.digest_batch_size):
                view.grad.zero_()
                outputs = module(x[batch], tuple(known))
                torch.stack([distance(outputs[task], known[task][batch]) for task in known]).sum().backward()
                optimizer.step()
        return state

    def finish(self, view: View, state: State) -> tuple[State, dict[str, Any]]:
        module: Any = view.module
        x: Tensor = module.public
        module.eval()
        with torch.no_grad():
            for batch in torch.arange(len(x), device=x.device).split(self.digest_batch_size):
                for task, output in module(x[batch], view.tasks).items():
                    module.public_outputs[task][batch] = output.to(view.params.dtype)
        module.train()
        return state, {}
