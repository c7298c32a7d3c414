"""F2DC's modules in a model: attached behind stages of the encoder, trained by a local rule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fedloom.core.context import State
from fedloom.errors import RecipeError
from fedloom.models.linearised import Linearised
from fedloom.models.multitask import MultiTask
from fedloom.models.nets import pass_zeros
from fedloom.training.decoupling import (
    AuxiliaryHead,
    Corrector,
    Decoupled,
    Decoupler,
    Form,
    Noise,
    decouple,
    feature_losses,
    gumbel_mask,
)
from fedloom.training.rules import LocalRule, View

Scope = Literal["aggregate", "identity", "local"]


class FeatureModule(nn.Module):
    """A module behind one stage of an encoder: f (B x C x H x W) becomes f~ (the same shape).

    In training the mask is drawn with noise and `parts` keeps f+, f-, f* and f~ of the batch. In evaluation there is no
    noise unless `noisy_eval`; with `bypass` f passes unchanged. Without a corrector f~ is always f.
    """

    def __init__(
        self,
        channels: int,
        classes: dict[str, int],
        sigma: float,
        form: Form,
        hidden: int | None,
        noise: Noise,
        noisy_eval: bool,
        bypass: bool,
        correct: bool,
    ) -> None:
        super().__init__()
        self.sigma, self.noise, self.noisy_eval, self.bypass = sigma, noise, noisy_eval, bypass
        self.decoupler = Decoupler(channels, form, hidden)
        self.corrector = Corrector(channels, form, hidden) if correct else None
        self.auxiliary = nn.ModuleDict({task: AuxiliaryHead(channels, count) for task, count in classes.items()})
        self.parts: Decoupled | None = None
        # so that the layout gives them the role "adapter"
        self.adapter_layer_names = tuple(name for name, _ in self.named_children())

    def forward(self, f: Tensor) -> Tensor:
        """B x C x H x W to the same shape."""
        if not self.training and (self.bypass or self.corrector is None):
            return f
        score = self.decoupler(f)
        noisy = self.training or self.noisy_eval
        keep, drop = (torch.rand_like(score), torch.rand_like(score)) if noisy else (None, None)
        mask = gumbel_mask(score, self.sigma, keep, drop, self.noise)
        parts = decouple(f, mask, self.corrector or torch.zeros_like)
        if self.training:
            self.parts = parts
        return f if self.corrector is None else parts.fused


class _Behind:
    """A forward hook that puts a feature module behind another module."""

    def __init__(self, module: FeatureModule) -> None:
        self.module = module

    def __call__(self, _stage: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
        result: Tensor = self.module(output)
        return result


@dataclass(frozen=True)
class AttachFeatureModules:
    """Puts a `FeatureModule` behind each of the encoder's modules in `layers`; by default behind its last map.

    They become the encoder's module `attached`. With `scope` "aggregate" they have the role "adapter" and are part of
    the encoder; otherwise they are private (role "private"). "identity" leaves them out in evaluation.

    Raises RecipeError if the encoder has no such module or no maps, or if no task is a classification.
    """

    layers: tuple[str, ...] = ()
    sigma: float = 0.1
    form: Form = "paper"
    hidden: int | None = None
    noise: Noise = "gumbel"
    noisy_eval: bool = False
    scope: Scope = "aggregate"
    correct: bool = True

    def __call__(self, model: MultiTask, shape: tuple[int, ...]) -> None:
        if isinstance(model.encoder, Linearised):
            raise RecipeError("feature modules do not go together with a linearised encoder")
        if hasattr(model.encoder, "attached"):
            raise RecipeError(
                "feature modules are there already; f2dc has its own, so name its parts on fedavg instead"
            )
        classes = {task: head.out_features for task, head in model.heads.items() if isinstance(head, nn.Linear)}
        if not classes:
            raise RecipeError("feature modules need a task with one class per example")
        maps = map_channels(model.encoder, shape)
        if not maps:
            raise RecipeError("feature modules need an encoder with maps (B x C x H x W), found none")
        for name in self.layers:
            if name not in maps:
                raise RecipeError(f"feature modules: {name!r} is no map of the encoder; it has: {', '.join(maps)}")
        bypass = self.scope == "identity"
        attached = nn.ModuleDict()
        for name in self.layers or (list(maps)[-1],):
            module = FeatureModule(
                maps[name],
                classes,
                self.sigma,
                self.form,
                self.hidden,
                self.noise,
                self.noisy_eval,
                bypass,
                self.correct,
            )
            attached[name.replace(".", "_")] = module
            model.encoder.get_submodule(name).register_forward_hook(_Behind(module))
        model.encoder.attached = attached
        if self.scope != "aggregate":
            model.more_roles["encoder.attached.*"] = "private"


def map_channels(encoder: nn.Module, shape: tuple[int, ...]) -> dict[str, int]:
    """The encoder's modules that give a map (B x C x H x W), with its channels, in the order in which they finish."""
    found: dict[str, int] = {}

    def note(name: str) -> Any:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            if isinstance(output, Tensor) and output.ndim == 4:
                found.pop(name, None)
                found[name] = output.shape[1]

        return hook

    handles = [module.register_forward_hook(note(name)) for name, module in encoder.named_modules() if name]
    pass_zeros(encoder, shape, handles)
    return found


@dataclass(frozen=True)
class FeatureModules(LocalRule):
    """Adds lambda1 L_DFD + lambda2 L_DFC of every attached feature module to the loss (F2DC, eqs. 5 to 9).

    `AttachFeatureModules` must have given the model these modules. The wrong label is the most confident wrong class of
    the main classifier. Clients without a classification task train as if there were no modules.
    """

    tau: float = 0.06
    lambda1: float = 0.8
    lambda2: float = 1.0

    def penalty(self, view: View, state: State) -> Tensor | None:
        if self.lambda1 == 0 and self.lambda2 == 0:
            return None
        assert view.module is not None
        assert view.outputs is not None
        assert view.targets is not None
        total: Tensor | None = None
        for module in view.module.encoder.attached.values():  # type: ignore[union-attr, operator]
            lambda2 = self.lambda2 if module.corrector is not None else 0.0
            for task in view.outputs:
                if task in module.auxiliary:
                    losses = feature_losses(
                        module.parts,
                        view.outputs[task],
                        view.targets[task],
                        module.auxiliary[task],
                        self.tau,
                        self.lambda1,
                        lambda2,
                    )
                    total = losses.penalty if total is None else total + losses.penalty
        return total
