"""Several data sets of the same classes as the domains of one task."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import numpy as np
from pydantic import Field

from fedloom.core.errors import DataError
from fedloom.data.prepare import SPLITS
from fedloom.data.registry import DATASETS
from fedloom.data.several import Sets, load

if TYPE_CHECKING:
    from torch import Tensor

    from fedloom.data.dataset import Dataset, Examples
    from fedloom.data.pictures import Piece

Pad = Annotated[int, Field(ge=0, le=32)]


@DATASETS.register("joined-domains", source="F2DC, section 5.1 and release: domains of one classification task")
def joined_domains(
    seed: int,
    *,
    sets: Sets,
    root: str | None = None,
    size: Annotated[int, Field(ge=8)] = 32,
    pad: Pad = 4,
    flip: bool = True,
) -> Dataset:
    """Sets of the same classes as domains of one task, `label`: {domain: {name: a data set, its parameters}}.

    A set that has several domains of its own keeps them, by their own names; any other set is one domain, by its name
    here. Each set has one task, and all have the same number of classes. Images become colour, `size` x `size`, uint8:
    `size` and `channels: 3` go to every set that takes such a parameter and does not state it, and a relative `path`
    starts from `root`. Floating-point images must lie in 0..1.

    In training, images are padded by `pad` black pixels, cropped at a random place and, with `flip`, mirrored with
    probability 1/2; they are always normalised by ImageNet's mean and standard deviation. Raises DataError where sets
    do not fit together or a name of a domain occurs twice.
    """
    from fedloom.data.pictures import dataset

    parts: dict[str, list[Piece]] = {split: [] for split in SPLITS}
    domains: list[str] = []
    classes: dict[str, int] = {}
    for name, section in sets.items():
        built = load(seed, section, root, {"size": size, "channels": 3})
        where = f"joined-domains, set {name!r}"
        if len(built.tasks) != 1:
            raise DataError(f"{where}: expected one task, found {', '.join(task.name for task in built.tasks)}")
        (task,) = built.tasks
        classes[name] = task.channels
        own = built.domains if len(built.domains) > 1 else (name,)
        for domain in own:
            if domain in domains:
                raise DataError(f"{where}: there is another domain called {domain!r}")
        for split, examples in (("train", built.train), ("test", built.test)):
            numbers = np.full(len(examples), len(domains))
            if len(own) > 1 and examples.domain is not None:
                numbers += examples.domain.numpy()
            parts[split].append((_images(where, examples, size), examples.labels_of(task.name), numbers))
        domains += own
    if len(set(classes.values())) > 1:
        raise DataError(f"joined-domains: sets have different numbers of classes: {classes}")
    return dataset("joined-domains", parts, tuple(domains), next(iter(classes.values())), pad, flip)


def _images(where: str, examples: Examples, size: int) -> Tensor:
    """Images in memory as N x 3 x size x size, uint8."""
    import torch

    from fedloom.data.dataset import InMemoryExamples

    if not isinstance(examples, InMemoryExamples) or len(examples.input_shape) != 3:
        raise DataError(f"{where}: expected images in memory, found another kind of data set")
    x = examples.images
    if x.shape[1] not in (1, 3) or x.shape[2:] != (size, size):
        found = " x ".join(map(str, x.shape[1:]))
        raise DataError(f"{where}: expected images 1 or 3 x {size} x {size}, found {found}; see size")
    if x.dtype != torch.uint8:
        low, high = float(x.min()), float(x.max())
        if not (low >= 0 and high <= 1):
            raise DataError(f"{where}: expected uint8 images or values in 0..1, found {low:g}..{high:g}")
        x = x.mul(255).round().to(torch.uint8)
    return x.expand(-1, 3, -1, -1)
