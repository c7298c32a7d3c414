"""The kinds of inputs of a model (image, series, features, tokens), and choices that networks take. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, field_validator

from fedloom.core.settings.section import Count, Natural, Positive, Problems, Section

if TYPE_CHECKING:
    from torch import Tensor

Norm = Literal["batch", "group"]
Decoding = Literal["pyramid", "transposed", "thesis"]
Shape = tuple[int, int, int]
"""Channels, height and width of images."""
Kind = Literal["image", "series", "features", "tokens"]
AXES: dict[Kind, tuple[str, ...]] = {
    "image": ("channels", "height", "width"),
    "series": ("channels", "steps"),
    "features": ("features",),
    "tokens": ("positions",),
}
"""The axes of one input of each kind."""


class Signal(Section):
    """The kind of a model's inputs. In a recipe, the kind alone is short for a signal of that kind."""

    kind: Kind
    vocabulary: Count | None = None
    """Of tokens: they are whole numbers from 0 to below it; null: the largest in the data and one."""
    padding: Natural | None = None
    """The token that pads shorter inputs, and that models ignore; null: there is none."""

    digest: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")] | None = None
    """Of tokens: what tells one list of words from another of the same size, where there is such a list."""

    def _problems(self) -> Problems:
        for key, value in self.of_tokens.items():
            if self.kind != "tokens":
                yield key, f"{value!r} found, but it is for tokens, and the kind is {self.kind!r}"
        if self.vocabulary is not None and self.padding is not None and self.padding >= self.vocabulary:
            yield "padding", f"{self.padding} found, expected one below the vocabulary, {self.vocabulary}"

    @property
    def of_tokens(self) -> dict[str, Any]:
        """Return the settings of tokens, by key."""
        return self.model_dump(exclude={"kind"}, exclude_none=True)

    def __str__(self) -> str:
        more = ", ".join(f"{key} {value}" for key, value in self.of_tokens.items())
        return f"{self.kind} ({more})" if more else self.kind


def about_words(one: Any, other: Any) -> str:
    """Return what to do about two signals whose lists of words differ; an empty text where that is not the problem."""
    digests = {signal.digest for signal in (one, other) if isinstance(signal, Signal)} - {None}
    advice = "give all the same file as data.words, such as the words.txt of an exported model"
    return f"; the lists of words differ: {advice}" if len(digests) > 1 else ""


def inferred(shape: Sequence[int], whole: bool) -> Signal | None:
    """Guess the signal of inputs of a shape: None where that is not certain. Whole numbers are tokens, vectors
    features, what has three axes an image. What has two may be a series, or a grey image without its channel."""
    if whole:
        return Signal(kind="tokens")
    kinds: dict[int, Kind] = {1: "features", 3: "image"}
    return Signal(kind=kinds[len(shape)]) if len(shape) in kinds else None


def blank(shape: Sequence[int], signal: Signal | None) -> Tensor:
    """Return one input (1 x ...) of zeros: int64 for tokens, float32 for all else."""
    import torch

    whole = signal is not None and signal.kind == "tokens"
    return torch.zeros(1, *shape, dtype=torch.int64 if whole else torch.float32)


def sized(shape: Sequence[int], signal: Signal | None) -> str:
    """Return an input in words: 'series of 9 x 128 (channels x steps)'."""
    size = " x ".join(map(str, shape))
    if signal is None or len(shape) != len(AXES[signal.kind]):
        return f"{'numbers' if signal is None else signal.kind} of {size}"
    words = f"{signal.kind} of {size} ({' x '.join(AXES[signal.kind])})"
    return f"{words}, a vocabulary of {signal.vocabulary}" if signal.vocabulary is not None else words


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
