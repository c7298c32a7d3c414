"""Several data sets side by side: each with its own tasks on its own images."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator, Field

from fedloom.core.errors import DataError
from fedloom.core.signal import sized
from fedloom.data.registry import DATASETS, loaded

if TYPE_CHECKING:
    from fedloom.data.dataset import Dataset


def _check(sets: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Each set must name a data set and fit its parameters."""
    for name, section in sets.items():
        try:
            DATASETS.fits(section)
        except ValueError as error:
            raise ValueError(f"set {name!r}: {error}") from None
    return sets


def load(
    seed: int, section: Mapping[str, Any], root: str | None = None, common: Mapping[str, Any] = MappingProxyType({})
) -> Dataset:
    """The data set of one section, with the common parameters that it takes and does not state.

    A relative `path` starts from `root`.
    """
    entry = DATASETS[section["name"]]
    given = {key: value for key, value in common.items() if key in entry.params.model_fields}
    given.update((key, value) for key, value in section.items() if key != "name")
    if root is not None and "path" in given:
        given["path"] = str(Path(root, given["path"]))  # an absolute path stays as it is
    return loaded(entry, seed, dict(entry.params.model_validate(given)))


Sets = Annotated[dict[str, dict[str, Any]], Field(min_length=1), AfterValidator(_check)]


@DATASETS.register("several")
def several(seed: int, *, sets: Sets) -> Dataset:
    """Data sets that train together: {name: {name: a data set, its parameters}}.

    The tasks of a set are called NAME-TASK, for equal tasks of two sets differ in classes and cameras; the set's name
    is the domain of its examples. A client holds examples of one set (partition single-and-multi or domains).

    Raises DataError where the shapes of inputs have different numbers of channels or a set has domains of its own.
    """
    from fedloom.data.dataset import Dataset
    from fedloom.data.joined import JoinedExamples, renamed

    built = {name: load(seed, section) for name, section in sets.items()}
    for name, dataset in built.items():
        if len(dataset.domains) > 1:
            raise DataError(f"several: set {name!r} has domains of its own ({', '.join(dataset.domains)})")
    channels = {name: d.input_shape[0] for name, d in built.items()}
    if len(set(channels.values())) > 1:
        raise DataError(f"several: inputs have different numbers of channels: {channels}")
    signals = {d.signal for d in built.values()}
    if len(signals) > 1:
        told = ", ".join(f"{name!r} has {sized(d.input_shape, d.signal)}" for name, d in built.items())
        raise DataError(f"several: inputs are not of one kind: {told}")
    theirs = [(name, d, task) for name, d in built.items() for task in d.tasks]
    tasks = tuple(renamed(task, name) for name, _, task in theirs)
    own = {name: tuple(t.name for t in d.tasks) for name, d in built.items()}
    train = JoinedExamples({name: d.train for name, d in built.items()}, own)
    test = JoinedExamples({name: d.test for name, d in built.items()}, own)
    classes = {renamed(t, name).name: d.classes[t.name] for name, d, t in theirs if t.name in d.classes}
    return Dataset("several", tasks, train, test, tuple(built), signal=signals.pop(), classes=classes)
