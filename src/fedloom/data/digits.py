"""Real handwritten digits that come with the package: several tasks on the same images, and several domains."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, get_args

import numpy as np
from pydantic import Field

from fedloom.core.context import derive_seed, generator
from fedloom.core.settings.section import Count
from fedloom.data import prepare
from fedloom.data.combine import Columns, combine, of_classes
from fedloom.data.prepare import DATASETS, SPLITS, Array, Part, TestFraction

if TYPE_CHECKING:
    from torch import Tensor

    from fedloom.data.dataset import Dataset

FILE = Path(__file__).with_name("digits.npz")
"""The test part of UCI's "Optical Recognition of Handwritten Digits" (Alpaydin and Kaynak, 1998; CC BY 4.0), the same
that scikit-learn bundles: images (1797 x 8 x 8, uint8, 0..16) and digit (1797, uint8)."""
DigitTask = Literal["digit", "parity", "large", "holes"]
DigitDomain = Literal["plain", "inverted", "noisy", "thickened", "textured"]

RENDERINGS: tuple[DigitDomain, ...] = get_args(DigitDomain)
# The answer of each question for the digits 0..9. Holes are those of the usual handwritten form: a 4 is open.
QUESTIONS: dict[str, tuple[int, ...]] = {
    "digit": tuple(range(10)),
    "parity": (0, 1) * 5,
    "large": (0,) * 5 + (1,) * 5,
    "holes": (1, 0, 0, 0, 0, 0, 1, 0, 2, 1),
    "remainder": (0, 1, 2) * 3 + (0,),
    "prime": (0, 0, 1, 1, 0, 1, 0, 1, 0, 0),
}
NAMES: dict[str, tuple[str, ...]] = {
    "parity": ("even", "odd"),
    "large": ("0 to 4", "5 to 9"),
    "holes": ("no hole", "one hole", "two holes"),
}
"""Names of classes that are not their own numbers."""


@DATASETS.register("digits", source="Alpaydin and Kaynak (1998), UCI; the test part that scikit-learn bundles")
def digits(
    seed: int,
    *,
    tasks: Annotated[list[DigitTask], Field(min_length=1)] = ["digit", "parity", "large", "holes"],  # noqa: B006
    domains: Annotated[list[DigitDomain], Field(min_length=1)] = ["plain"],  # noqa: B006
    size: Annotated[int, Field(ge=8, le=64)] = 16,
    test_fraction: TestFraction = 0.2,
) -> Dataset:
    """1,797 real handwritten digits (8 x 8): up to four tasks and five domains.

    Tasks, all on the same images: `digit` (10 classes), `parity` (even, odd), `large` (greater than four) and `holes`
    (0: 1 2 3 4 5 7, 1: 0 6 9, 2: 8). Domains are ways to render an image: `plain`, `inverted` (dark on light), `noisy`
    (Gaussian, sigma 0.25), `thickened` (grey dilation) and `textured` (difference to stripes, in the manner of
    MNIST-M). Each image is rendered in one of the domains asked for, drawn from `seed`, so domains share no image.

    Images are float32 in 0..1, N x 1 x size x size (enlarged bilinearly), normalised per batch by the mean and standard
    deviation of the train part. The split is stratified by digit and domain. Raises RecipeError where a task or a
    domain is named twice.
    """
    prepare.no_repeats("digits", "task", tasks)
    prepare.no_repeats("digits", "domain", domains)
    import torch

    images, digit = originals(size)
    domain = _domains(digit, len(domains), seed)
    test = prepare.stratified(digit * len(domains) + domain, test_fraction, seed)
    for number, name in enumerate(domains):
        where = torch.from_numpy(np.flatnonzero(domain == number))
        images[where] = render(images[where], name, seed)

    pool = Part(images, {str(task): np.array(QUESTIONS[task])[digit] for task in tasks}, domain)
    parts = [pool.take(mask) for mask in (~test, test)]
    heads = {str(task): max(QUESTIONS[task]) + 1 for task in tasks}
    classes = {str(task): NAMES[task] for task in tasks if task in NAMES}
    normal = prepare.channel_statistics(parts[0].inputs)
    return of_classes("digits", heads, parts, normal, tuple(domains), classes=classes, redrawn=True)


@DATASETS.register("digits-many", source="Alpaydin and Kaynak (1998), UCI; the test part that scikit-learn bundles")
def digits_many(
    seed: int,
    *,
    count: Annotated[int, Field(ge=1, le=len(RENDERINGS) * len(QUESTIONS))] = 8,
    size: Annotated[int, Field(ge=8, le=64)] = 16,
    limit: Count | None = None,
    test_fraction: TestFraction = 0.2,
) -> Dataset:
    """Up to 30 tasks on scikit-learn's handwritten digits, in the form of `many`: one label per example.

    A task RENDERING-QUESTION asks one question about digits in one rendering. Renderings are the domains of `digits`:
    plain, inverted, noisy, thickened, textured. Questions are its tasks, digit (10 classes), parity, large and holes
    (3), and remainder (of a division by three, 3) and prime. The first `count` tasks are taken in an order that goes
    round the renderings while the questions shift, so that tasks are related by the one or the other.

    Every task has its own `limit` random images (by default all 1,438) for training and all 359 for testing; an image
    that trains one task tests none. Images are uint8, 1 x size x size, normalised by the statistics of their rendering.
    """
    import torch

    pictures, digit = originals(size)
    test = prepare.stratified(digit, test_fraction, seed)
    kinds = list(QUESTIONS)
    rounds = [divmod(k, len(RENDERINGS)) for k in range(count)]
    chosen = [(RENDERINGS[number], kinds[(number + turn) % len(kinds)]) for turn, number in rounds]
    sets: dict[str, dict[str, tuple[Columns, Tensor]]] = {rendering: {} for rendering in RENDERINGS[:count]}
    for rendering, both in sets.items():
        rendered = render(pictures, rendering, seed).mul(255).round().to(torch.uint8)
        questions = [question for name, question in chosen if name == rendering]
        for split, mask in zip(SPLITS, (~test, test), strict=True):
            pool = np.flatnonzero(mask)
            most = limit if split == "train" else None
            own = [pool[prepare.subset(len(pool), most, seed, f"{rendering}-{question}")] for question in questions]
            index, asked = np.concatenate(own), np.repeat(np.arange(len(questions)), [*map(len, own)])
            labels = [np.where(asked == i, np.array(QUESTIONS[q])[digit[index]], -1) for i, q in enumerate(questions)]
            columns = {f"{rendering}-{q}": column for q, column in zip(questions, labels, strict=True)}
            both[split] = columns, rendered[torch.from_numpy(index)]
    counts = {f"{rendering}-{question}": max(QUESTIONS[question]) + 1 for rendering, question in chosen}
    return replace(combine("digits-many", sets, counts), redrawn=True)


def originals(size: int) -> tuple[Tensor, Array]:
    """Return all 1,797 images (N x 1 x size x size, float32, 0..1) and their digits (N, int64)."""
    import torch
    from torch.nn.functional import interpolate

    with np.load(FILE, allow_pickle=False) as raw:
        levels, digit = raw["images"], raw["digit"]
    images = torch.from_numpy((levels / 16).astype(np.float32))[:, None]
    if size != images.shape[-1]:
        images = interpolate(images, size=(size, size), mode="bilinear", align_corners=False)
    return images, digit.astype(np.int64)


def _domains(digit: Array, count: int, seed: int) -> Array:
    """Return a random domain for every image (N, int64), each of about equal size within each digit."""
    domain = np.zeros(len(digit), np.int64)
    rng = np.random.default_rng(derive_seed(seed, "digits", "domain"))
    for value in range(10):
        order = rng.permutation(np.flatnonzero(digit == value))
        # The first domain differs from digit to digit, so that no domain gets every remainder.
        domain[order] = (np.arange(len(order)) + value) % count
    return domain


def render(x: Tensor, name: str, seed: int) -> Tensor:
    """Render images (n x 1 x S x S, 0..1) as the named domain shows them, again in 0..1."""
    import torch
    from torch.nn.functional import max_pool2d

    rng = generator(seed, "digits", "render", name)
    n, side = len(x), x.shape[-1]
    if name == "inverted":
        return 1 - x
    if name == "noisy":
        return (x + 0.25 * torch.randn(x.shape, generator=rng)).clamp(0, 1)
    if name == "thickened":
        radius = max(1, round(side / 14))
        return max_pool2d(x, 2 * radius + 1, stride=1, padding=radius)
    if name == "textured":
        angle, phase, periods = (torch.rand(3, n, 1, 1, 1, generator=rng)).unbind(0)
        grid = torch.linspace(0, 1, side)
        along = grid * torch.cos(math.pi * angle) + grid[:, None] * torch.sin(math.pi * angle)
        stripes = torch.sin(2 * math.pi * (along * (1 + 2 * periods) + phase))
        return (0.2 + 0.2 * stripes - x).abs()
    return x
