"""Features split by a mask into domain-robust and domain-related ones, the latter then corrected (F2DC).

Source: Wang et al., Domain-Skewed Federated Learning with Feature Decoupling and Calibration (F2DC), equations 3-9,
which the add-on `feature-modules` has. If the mask M is 1 everywhere, or the corrector A_C gives 0, f~ is f.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, cross_entropy

from fedloom.core.context import Ctx, State
from fedloom.core.errors import RecipeError
from fedloom.core.settings.section import Checked, Count
from fedloom.core.stage import Stage, Traits
from fedloom.core.updates import Updates
from fedloom.methods.f2dc import AttachFeatureModulesSettings, DomainWeightsSettings, FeatureModulesSettings
from fedloom.models.changes import Linearised
from fedloom.models.multitask import MultiTask
from fedloom.models.nets import pass_zeros
from fedloom.models.tasks.labels import Classification
from fedloom.training.flat import pooled
from fedloom.training.rules import LocalRule, View, added

Noise = Literal["gumbel", "logistic"]
Form = Literal["paper", "release"]
FORMS: dict[Form, tuple[int, int]] = {"paper": (2, 64), "release": (3, 50)}
"""Form -> (number of convolutions, hidden channels). The paper gives no width; 64 is the first release's."""
EPS = 1e-8  # the release's guard of both logarithms


def noise_of(u: Tensor, noise: Noise = "gumbel") -> Tensor:
    """Return noise from uniform draws in 0..1, any shape, always finite.

    `gumbel` is -log(-log u), as in the release; `logistic`, as in the paper, is log u - log(1 - u).
    """
    if noise == "logistic":
        return torch.logit(u, eps=1e-7)
    return -torch.log(-torch.log(u + EPS) + EPS)


def gumbel_mask(
    score: Tensor, sigma: float, u_keep: Tensor | None = None, u_drop: Tensor | None = None, noise: Noise = "gumbel"
) -> Tensor:
    """Return the mask M in 0..1 (like `score`): sigmoid((score + g_keep - g_drop) / sigma) (F2DC, eq. 3).

    This is the paper's softmax over log sigmoid(score) and log(1 - sigmoid(score)), which cannot overflow. `u_keep` and
    `u_drop` are uniform draws in the shape of `score`; without them there is no noise.
    """
    if not sigma > 0:
        raise ValueError(f"gumbel_mask: expected sigma > 0, found {sigma}")
    if (u_keep is None) != (u_drop is None):
        raise ValueError("gumbel_mask: expected both draws, u_keep and u_drop, or none")
    if u_keep is not None and u_drop is not None:
        score = score + noise_of(u_keep, noise) - noise_of(u_drop, noise)
    return torch.sigmoid(score / sigma)


class _Norm(nn.BatchNorm2d):
    """Batch norm that does not count its batches: with a fixed momentum the counter is never read, and integers would
    travel outside the matrix of updates."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.register_buffer("num_batches_tracked", None)

    def _load_from_state_dict(self, *args: Any) -> None:
        nn.Module._load_from_state_dict(self, *args)  # batch norm's own would ask for the counter


class _Convolutions(nn.Sequential):
    """3 x 3 convolutions without bias, with batch norm and ReLU between them: C x H x W to the same shape."""

    def __init__(self, channels: int, form: Form = "paper", hidden: int | None = None) -> None:
        count, usual = FORMS[form]
        widths = [channels, *[hidden or usual] * (count - 1), channels]
        layers: list[nn.Module] = []
        for i in range(count):
            layers.append(nn.Conv2d(widths[i], widths[i + 1], 3, padding=1, bias=False))
            if i < count - 1:
                layers += [_Norm(widths[i + 1]), nn.ReLU()]
        super().__init__(*layers)


class Decoupler(_Convolutions):
    """A_D: the score of each feature unit, B x C x H x W to B x C x H x W; high is domain-robust.

    `form` "paper" has two convolutions and 64 hidden channels, "release" three and 50; `hidden` changes the width.
    With 512 channels the release's form has 483,500 parameters.
    """


class Corrector(_Convolutions):
    """A_C: the correction of domain-related features, B x C x H x W to B x C x H x W. Same forms as `Decoupler`."""


class AuxiliaryHead(nn.Linear):
    """m: logits (B x classes) from pooled features (B x C); one head for f+, f- and f*."""


@dataclass(frozen=True, eq=False)
class Decoupled:
    """f+, f-, f* and f~, each B x C x H x W."""

    robust: Tensor
    related: Tensor
    corrected: Tensor
    fused: Tensor


def decouple(f: Tensor, mask: Tensor, corrector: Callable[[Tensor], Tensor]) -> Decoupled:
    """Split f (B x C x H x W) by the mask (same shape) and correct the domain-related part (F2DC, eqs. 4 and 6)."""
    rest = 1 - mask
    related = rest * f
    residual = rest * corrector(related)
    return Decoupled(mask * f, related, related + residual, f + residual)


def wrong_labels(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the most confident wrong class of each example (B, int64), from the release's logits (B x classes)."""
    if logits.shape[1] < 2:
        raise ValueError("F2DC: expected at least two classes, because a wrong label is needed")
    return logits.detach().scatter(1, labels[:, None], -math.inf).argmax(1)


@dataclass(frozen=True, eq=False)
class FeatureLosses:
    """Terms of F2DC's objective, each a scalar; `total` is eq. 9 for one layer.

    classification  CE of the classifier on f~ (eq. 8)
    separability    mean cosine of pooled f+ and f-, over tau (eq. 5)
    robust          CE of m on f+ with the label (eq. 5)
    related         CE of m on f- with the most confident wrong label (eq. 5)
    corrected       CE of m on f* with the label (eq. 7)
    """

    classification: Tensor
    separability: Tensor
    robust: Tensor
    related: Tensor
    corrected: Tensor
    lambda1: float
    lambda2: float

    @property
    def penalty(self) -> Tensor:
        """The terms beside the classifier's own loss: lambda1 L_DFD + lambda2 L_DFC."""
        return self.lambda1 * (self.separability + self.robust + self.related) + self.lambda2 * self.corrected

    @property
    def total(self) -> Tensor:
        """Eq. 9."""
        return self.classification + self.penalty


def feature_losses(
    parts: Decoupled,
    logits: Tensor,
    labels: Tensor,
    auxiliary: Callable[[Tensor], Tensor],
    tau: float = 0.06,
    lambda1: float = 0.8,
    lambda2: float = 1.0,
) -> FeatureLosses:
    """Return the losses of F2DC, eqs. 5-9, as means over the labelled examples of the batch; 0 where none is labelled.

    `logits` (B x classes) are the main classifier's on the pooled f~, `labels` (B, int64; -1 = unlabelled), `auxiliary`
    maps pooled features (B x C) to logits. No gradient is stopped, and m learns from three terms, as in the release.
    log(exp(s / tau)) in eq. 5 is s / tau. Raises ValueError if tau is not above 0.
    """
    if not tau > 0:
        raise ValueError(f"feature_losses: expected tau > 0, found {tau}")
    known = labels >= 0
    if not bool(known.any()):
        zero = logits.new_zeros(())
        return FeatureLosses(zero, zero, zero, zero, zero, lambda1, lambda2)
    robust, related, corrected = (pooled(f)[known] for f in (parts.robust, parts.related, parts.corrected))
    logits, labels = logits[known], labels[known]
    return FeatureLosses(
        cross_entropy(logits, labels),
        cosine_similarity(robust, related).mean() / tau,
        cross_entropy(auxiliary(robust), labels),
        cross_entropy(auxiliary(related), wrong_labels(logits, labels)),
        cross_entropy(auxiliary(corrected), labels),
        lambda1,
        lambda2,
    )


class FeatureModule(nn.Module):
    """A module behind one stage of an encoder: f (B x C x H x W) becomes f~ (the same shape).

    In training the mask is drawn with noise and `parts` keeps f+, f-, f* and f~ of the batch. In evaluation there is no
    noise unless `noisy_eval`; with `scope` "identity" f passes unchanged. Without a corrector f~ is always f.
    """

    def __init__(self, channels: int, classes: dict[str, int], about: AttachFeatureModulesSettings) -> None:
        super().__init__()
        self.about = about
        self.decoupler = Decoupler(channels, about.form, about.hidden)
        self.corrector = Corrector(channels, about.form, about.hidden) if about.correct else None
        self.auxiliary = nn.ModuleDict({task: AuxiliaryHead(channels, count) for task, count in classes.items()})
        self.parts: Decoupled | None = None
        # so that the layout gives them the role "adapter"
        self.adapter_layer_names = tuple(name for name, _ in self.named_children())

    def forward(self, f: Tensor) -> Tensor:
        """Map B x C x H x W to the same shape."""
        if not self.training and (self.about.scope == "identity" or self.corrector is None):
            return f
        score = self.decoupler(f)
        noisy = self.training or self.about.noisy_eval
        keep, drop = (torch.rand_like(score), torch.rand_like(score)) if noisy else (None, None)
        mask = gumbel_mask(score, self.about.sigma, keep, drop, self.about.noise)
        parts = decouple(f, mask, self.corrector or torch.zeros_like)
        if self.training:
            self.parts = parts
        return f if self.corrector is None else parts.fused

    def behind(self, _stage: nn.Module, _inputs: Any, output: Tensor) -> Any:
        """Return f~ in the place of another module's output, as its forward hook."""
        return self(output)


@dataclass(frozen=True)
class AttachFeatureModules(AttachFeatureModulesSettings, Checked):
    """Puts a `FeatureModule` behind each of the encoder's modules in `layers`; by default behind its last map.

    They become the encoder's module `attached`. With `scope` "aggregate" they have the role "adapter" and are part of
    the encoder; otherwise they are private (role "private"). "identity" leaves them out in evaluation.

    Raises RecipeError if the encoder has no such module or no maps, or if no task is a classification.
    """

    def __call__(self, model: MultiTask, shape: tuple[int, ...]) -> None:
        if isinstance(model.encoder, Linearised):
            raise RecipeError("feature modules cannot be combined with a linearised encoder")
        if hasattr(model.encoder, "attached"):
            raise RecipeError(
                "the method already has feature modules, because f2dc has its own: add them to fedavg instead"
            )
        classes = {task.name: task.channels for task in model.tasks if isinstance(task.known, Classification)}
        if not classes:
            raise RecipeError("feature modules need a task with one class per example")
        maps = map_channels(model.encoder, shape)
        if not maps:
            raise RecipeError("feature modules need an encoder with maps (B x C x H x W), found none")
        for name in self.layers:
            if name not in maps:
                raise RecipeError(f"feature modules: {name!r} is not a map of the encoder; its maps: {', '.join(maps)}")
        attached = nn.ModuleDict()
        for name in self.layers or (list(maps)[-1],):
            module = FeatureModule(maps[name], classes, self)
            attached[name.replace(".", "_")] = module
            model.encoder.get_submodule(name).register_forward_hook(module.behind)
        model.encoder.attached = attached
        if self.scope != "aggregate":
            model.more_roles["encoder.attached.*"] = "private"


def map_channels(encoder: nn.Module, shape: tuple[int, ...]) -> dict[str, int]:
    """Return the encoder's modules that give a map (B x C x H x W), with its channels, in the order of their end."""
    channels: dict[str, int] = {}

    def note(name: str, _module: nn.Module, _inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.ndim == 4:
            channels.pop(name, None)
            channels[name] = output.shape[1]

    handles = [module.register_forward_hook(partial(note, name)) for name, module in encoder.named_modules() if name]
    pass_zeros(encoder, shape, handles)
    return channels


@dataclass(frozen=True)
class FeatureModules(FeatureModulesSettings, LocalRule):
    """Adds the mean over the attached feature modules of lambda1 L_DFD + lambda2 L_DFC to the loss (F2DC, eqs. 5 to 9).

    `AttachFeatureModules` must have given the model these modules. Without a classification task nothing is added.
    """

    def penalty(self, view: View, state: State) -> Tensor | None:
        if self.lambda1 == 0 and self.lambda2 == 0:
            return None
        attached: Any = view.module.encoder.attached  # type: ignore[union-attr]
        losses: list[Tensor] = []
        for module in attached.values():
            how = self.tau, self.lambda1, self.lambda2 if module.corrector is not None else 0.0
            for task, outputs in view.outputs.items():
                if task in module.auxiliary:
                    head = module.auxiliary[task]
                    losses.append(feature_losses(module.parts, outputs, view.targets[task], head, *how).penalty)
        total = added(losses)
        return None if total is None else total / len(attached)


def domain_discrepancy(shares: Tensor, domains: int) -> Tensor:
    """Return d_k = sqrt(1/2 sum_c (B_k^c - 1/Q)^2) (K) from the clients' shares B_k of each class (K x C); eq. 10."""
    return ((shares - 1 / domains).square().sum(1) / 2).sqrt()


def domain_aware_weights(size: Tensor, discrepancy: Tensor, alpha: float = 1.0, beta: float = 0.4) -> Tensor:
    """Return p_k = sigmoid(alpha s_k - beta d_k), divided by their sum (K); eq. 11, with s_k = n_k / N."""
    # In logarithms, because a sigmoid may underflow for all clients at once.
    return torch.softmax(torch.nn.functional.logsigmoid(alpha * size - beta * discrepancy), 0)


@dataclass(frozen=True)
class DomainWeights(DomainWeightsSettings, Stage):
    """Writes weights that grow with a client's data and fall with its domain discrepancy; see `domain-weights`.

    `classes` is C, the number of classes; by default the length of the extra `classes`, the number of examples of each
    class (C). `discrepancy` "class" reads it too; a class that nobody has counts as 1/Q. "total" is
    d_k = sqrt(C/2) |n_k/N - 1/Q|. With "none" alpha and beta have no effect.
    """

    classes: Count | None = None

    @property
    def traits(self) -> Traits:
        reads = {"n"}
        if self.discrepancy != "none" and self.domains is None:
            reads.add("extra:domain")
        if self.discrepancy == "class" or (self.discrepancy == "total" and self.classes is None):
            reads.add("extra:classes")
        return Traits("mix", reads, {"weight"}, separable=True, presence="coupled")

    def __call__(self, updates: Updates, state: State, ctx: Ctx) -> tuple[Updates, State]:
        n = updates.n
        if not float(n.sum()) > 0:
            return updates, state
        size = n / n.sum()
        if self.discrepancy == "none":
            return updates.replace(weight=size), state
        known = self.domains
        if known is None:
            seen = sorted({*state.get("domains", []), *map(str, updates.extra["domain"])})
            state, known = {"domains": seen}, len(seen)
        shares = size[:, None].expand(-1, self.classes or max(1, *map(len, updates.extra["classes"]), 0))
        if self.discrepancy == "class":
            counts = torch.stack([torch.as_tensor(c).double() for c in updates.extra["classes"]])
            total = counts.sum(0)
            shares = torch.where(total > 0, counts / total.clamp(min=1), 1 / known)
        weight = domain_aware_weights(size, domain_discrepancy(shares, known), self.alpha, self.beta)
        return updates.replace(weight=weight), state
