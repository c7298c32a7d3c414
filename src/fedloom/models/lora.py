"""Low-rank adapters (LoRA; Hu et al., 2021) in an encoder, through peft, which is imported only where they are used.

W x becomes W x + (alpha / rank) B A x, with A and B trained and W frozen. B begins as 0, so the output as it was.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, field_validator

from fedloom.core.errors import RecipeError
from fedloom.core.lazy import need
from fedloom.core.settings.section import Count, Positive, Section

if TYPE_CHECKING:
    from torch import nn

    from fedloom.models.nets import Encoder


class Lora(Section):
    """Train low-rank factors A (rank x inputs) and B (outputs x rank) beside the encoder's frozen linear layers."""

    rank: Count = 16
    alpha: Positive | None = None
    """Scale: B A counts alpha / rank times. Null: alpha = rank."""
    targets: Annotated[tuple[str, ...], Field(min_length=1)] = ("qkv", "proj", "fc1", "fc2")
    """Linear layers, by the last parts of their names; by default what a vision transformer has."""

    @field_validator("targets", mode="before")
    @classmethod
    def _sequence(cls, value: object) -> object:
        # A named section hands on lists, which are no tuples where JSON is checked strictly.
        return tuple(value) if isinstance(value, list) else value


def add_lora(encoder: Encoder, lora: Lora) -> None:
    """Freeze an encoder and add factors to the linear layers that `lora.targets` name, in place.

    A is drawn from torch's global generator (Kaiming uniform with a = sqrt 5, as nn.Linear), B is 0. Their names are
    those of their layer and lora_A.default.weight or lora_B.default.weight; W is then called base_layer.weight.

    Raises RecipeError for a target that names no linear layer.
    """
    from torch import nn

    linear = [name for name, module in encoder.named_modules() if isinstance(module, nn.Linear)]
    chosen = set()
    for target in lora.targets:
        matches = {name for name in linear if f".{name}".endswith(f".{target}")}
        if not matches:
            # A layer that many blocks have is listed once.
            known = ", ".join(dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in linear)) or "none"
            raise RecipeError(
                f"model.lora.targets: {target!r} names no linear layer of the encoder; its linear layers: {known}"
            )
        chosen |= matches
    peft = need("peft", "methods")
    alpha = lora.rank if lora.alpha is None else lora.alpha
    config = peft.LoraConfig(r=lora.rank, lora_alpha=alpha, lora_dropout=0.0, target_modules=sorted(chosen))
    peft.inject_adapter_in_model(config, encoder)


def adapted_layers(module: nn.Module) -> list[Any]:
    """Return the layers with factors beside them, in order: peft's, with `base_layer` and `get_delta_weight`."""
    return [layer for layer in module.modules() if hasattr(layer, "lora_A") and hasattr(layer, "base_layer")]


def factors(layer: Any) -> tuple[nn.Parameter, nn.Parameter]:
    """Return A (rank x inputs) and B (outputs x rank) of such a layer."""
    return layer.lora_A["default"].weight, layer.lora_B["default"].weight
