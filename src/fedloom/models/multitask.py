"""One shared encoder with one head, and for dense tasks one decoder, per task."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from torch import Tensor, nn
from torch.nn.functional import interpolate

from fedloom.core.errors import RecipeError
from fedloom.models.decoders import make_decoder
from fedloom.models.nets import Encoder, PyramidEncoder
from fedloom.models.tasks.task import Task


def check_name(task: str) -> None:
    """Raise RecipeError unless a task's name can be a part of parameter names."""
    if not re.fullmatch(r"[A-Za-z0-9_-]+", task):
        raise RecipeError(
            f"task name {task!r}: expected letters, digits, '_' and '-' only, since it becomes a part of "
            "parameter names"
        )
    if hasattr(nn.ModuleDict(), task):
        raise RecipeError(
            f"task name {task!r} cannot be used: torch.nn.ModuleDict has an attribute of that name. "
            f"Rename the task, for example {task + '_task'!r}"
        )


class MultiTask(nn.Module):
    """`encoder`, `decoders` (a module per dense task) and `heads` (a module per task).

    Dense tasks need an encoder that gives feature maps. Each has a decoder of its own on all maps, and its head's
    output is resized to the input's size (bilinear, align_corners false). `heads` are given where they are not to be
    the tasks' own. `encoder.decoder` says which decoder:
    `pyramid` (`PyramidDecoder`), `transposed` (`TransposedDecoder`, of the decentralised thesis) or `thesis`
    (`ThesisDecoder`, of its release). Other tasks read the encoder's features; those of maps are the mean of the last
    one.

    A task name becomes part of parameter names, so it may hold letters, digits, '_' and '-' only and must not be an
    attribute of ModuleDict (such as 'keys' or 'type'); RecipeError otherwise, where a name occurs twice, and where a
    dense task meets an encoder without maps.
    """

    more_roles: dict[str, str]
    """Globs that go before all others in `roles`: for what a `ModelChange` puts into the model."""
    rescale: tuple[Tensor, Tensor] | None
    """What inputs are multiplied by, and what is then added (1 x C x 1 x 1), before the encoder; None for nothing."""
    frozen_statistics: bool
    """Whether norm layers of the encoder stay in evaluation mode."""

    def __init__(self, encoder: Encoder, tasks: Sequence[Task], heads: Mapping[str, nn.Module] | None = None) -> None:
        super().__init__()
        self.more_roles = {}
        self.rescale: tuple[Tensor, Tensor] | None = None
        self.frozen_statistics = False
        self.tasks = tuple(tasks)
        self.encoder = encoder
        self.decoders = nn.ModuleDict()
        self.heads = nn.ModuleDict()
        for task in tasks:
            check_name(task.name)
            if task.name in self.heads:
                raise RecipeError(f"task name {task.name!r} occurs twice")
            if heads is not None:
                self.heads[task.name] = heads[task.name]
                continue
            if not task.dense:
                self.heads[task.name] = task.head(encoder.features)
                continue
            if not isinstance(encoder, PyramidEncoder):
                raise RecipeError(
                    f"task {task.name!r} predicts a map, so it needs an encoder with feature maps (tiny-pyramid, "
                    f"tiny-swin or timm), found {type(encoder).__name__}"
                )
            decoder = make_decoder(encoder)
            self.decoders[task.name], self.heads[task.name] = decoder, decoder.head(task)

    def forward(self, x: Tensor, tasks: Sequence[str] | None = None) -> dict[str, Tensor]:
        """Inputs (B x ...) to {task: its output}; all tasks if `tasks` is None. Nothing else is computed.

        The encoder runs once. A dense task's output is B x channels x H x W, as large as the input. RecipeError where
        the sides of an image are no multiples of the encoder's last stride.
        """
        if self.rescale is not None:
            scale, shift = (v.to(x) for v in self.rescale)
            x = x * scale + shift
        if not isinstance(self.encoder, PyramidEncoder):
            features = self.encoder(x)
            return {task: self.heads[task](features) for task in (self.heads if tasks is None else tasks)}
        size, stride = x.shape[2:], self.encoder.strides[-1]
        if any(side % stride for side in size):
            raise RecipeError(f"expected images whose sides are multiples of {stride}, found {size[0]} x {size[1]}")
        maps: list[Tensor] = self.encoder(x)
        outputs = {}
        for task in self.heads if tasks is None else tasks:
            if task not in self.decoders:
                outputs[task] = self.heads[task](maps[-1].mean((2, 3)))
                continue
            y = self.heads[task](self.decoders[task](maps))
            if y.shape[2:] != size:
                y = interpolate(y, size=size, mode="bilinear", align_corners=False)
            outputs[task] = y
        return outputs

    def train(self, mode: bool = True) -> MultiTask:
        """As usual, but for frozen statistics."""
        super().train(mode)
        if self.frozen_statistics:
            for module in self.encoder.modules():
                if isinstance(module, nn.modules.batchnorm._NormBase):
                    module.eval()
        return self

    def roles(self) -> dict[str, str | tuple[str, str]]:
        """Glob over parameter names -> role, or (role, task) for what belongs to one task."""
        decoders = {f"decoders.{task}.*": ("decoder", task) for task in self.decoders}
        heads = {f"heads.{task}.*": ("head", task) for task in self.heads}
        return {**self.more_roles, "encoder.*": "encoder", **decoders, **heads}
