"""The predictions of the final models on test data, from the folder `predictions` of runs (see `rounds/showing.py`).

A few images with the predictions of dense tasks, side by side for the runs of a grid, and confusion matrices.
"""

from __future__ import annotations

import base64
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import repeat
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, Field, NonNegativeInt, ValidationError, model_validator

from fedloom.core.disclosure import hidden
from fedloom.core.errors import first_of
from fedloom.core.legend import Legend
from fedloom.federation.runs.reader import CONFUSION, INDEX, PREDICTIONS, Run, index_of
from fedloom.study.charts import thinned
from fedloom.study.grid import Cell, together
from fedloom.study.report import words
from fedloom.study.report.records import minimum_of

LARGEST = 200_000
"""Bytes of a picture, at most."""
ROOM = 8_000_000
"""Bytes of all pictures of a page, about; further ones are left out."""
_PNG = b"\x89PNG\r\n\x1a\n"
_NAMES = 3  # clients named in full
_EARLIER = 5  # rounds before the last whose answers are shown, at most
_LOOKED = 64  # files of such rounds that are read, at most

Counts = tuple[tuple[int, ...], ...]
"""Truth x prediction."""
File = Annotated[str, Field(pattern=r"^[\w-]{1,80}\.png$")]
B = TypeVar("B", bound=BaseModel)


class _StoredPicture(BaseModel):
    file: File
    text: str
    ends: tuple[str, str] | None = None


class _StoredTask(BaseModel):
    task: str
    truth: list[_StoredPicture]
    answer: list[_StoredPicture]
    wrong: list[_StoredPicture] = []
    legend: Legend = Legend()
    wrong_legend: Legend = Legend()


class _StoredExample(BaseModel):
    position: NonNegativeInt
    input: File


class _StoredPart(BaseModel):
    domain: str | None
    examples: list[_StoredExample]
    tasks: list[_StoredTask]

    @model_validator(mode="after")
    def _fits(self) -> _StoredPart:
        for task in self.tasks:
            several = (task.truth, task.answer, task.wrong or task.answer)
            if any(len(pictures) != len(self.examples) for pictures in several):
                raise ValueError(f"task {task.task!r}: expected {len(self.examples)} pictures each")
        return self


class _StoredIndex(BaseModel):
    round: NonNegativeInt = 0
    parts: list[_StoredPart]


class _StoredModel(BaseModel):
    clients: list[str]
    model: str
    data: str
    examples: NonNegativeInt
    examples_in_all: NonNegativeInt
    counts: list[list[NonNegativeInt]]


class _StoredConfusion(BaseModel):
    unit: Literal["examples", "pixels"]
    in_all: NonNegativeInt
    models: list[_StoredModel] = Field(min_length=1)
    classes: list[str] = []

    @model_validator(mode="after")
    def _square(self) -> _StoredConfusion:
        classes = len(self.models[0].counts)
        if any(len(one.counts) != classes or {*map(len, one.counts)} - {classes} for one in self.models):
            raise ValueError("expected square matrices of one size")
        return self


class _StoredConfusions(BaseModel):
    tasks: dict[str, _StoredConfusion]


@dataclass(frozen=True)
class Picture:
    """A picture as a data URI, a short text for it, and the meaning of the ends of its own range of colours."""

    uri: str
    text: str = ""
    ends: tuple[str, str] | None = None


@dataclass(frozen=True)
class ShownExample:
    """A test image with its labels and its predictions; None where there is no picture."""

    title: str
    input: Picture | None
    tasks: tuple[str, ...]
    rows: tuple[tuple[str, tuple[Picture | None, ...]], ...]
    """The truth, then each run."""
    wrong: Mapping[str, tuple[Picture | None, ...]] = field(default_factory=dict)
    """Run -> the places where its predictions are wrong."""


@dataclass(frozen=True)
class ConfusionViews:
    """Confusion matrices of a task, by the models that they count."""

    title: str
    unit: str
    views: Mapping[str, Counts]
    note: str = ""
    classes: tuple[str, ...] = ()
    """Names of the classes; empty where they have none."""
    minimum: int = 0
    """Counts of fewer rows of a table are not shown."""
    summed: frozenset[int] = frozenset()
    """True classes that only the first view shows, a sum: beside it, those of single clients would tell such counts."""

    def name(self, number: int) -> str:
        """Return a class by its name, or else its number."""
        return self.classes[number] if number < len(self.classes) else str(number)

    @property
    def order(self) -> list[int]:
        """Return the classes, the best recognised first; those that do not occur at the end."""
        counts = next(iter(self.views.values()), ())
        recall = {i: row[i] / total if (total := sum(row)) else -1.0 for i, row in enumerate(counts)}
        return sorted(recall, key=lambda i: (-recall[i], i))

    @property
    def mixed_up(self) -> str:
        """Say which classes the first view confuses most often."""
        counts = next(iter(self.views.values()), ())
        shares = {
            (self.name(i), self.name(j)): n / sum(row)
            for i, row in enumerate(counts)
            for j, n in enumerate(row)
            if n >= max(self.minimum, 1) and i != j
        }
        return words.mixed_up(shares)


@dataclass(frozen=True)
class Predictions:
    """All predictions of a run or a grid."""

    examples: tuple[ShownExample, ...] = ()
    over_rounds: tuple[ShownExample, ...] = ()
    """The same examples, with the predictions of several rounds."""
    confusions: tuple[ConfusionViews, ...] = ()
    notes: tuple[str, ...] = ()
    """Notes on what could not be read or is left out."""
    legends: Mapping[str, tuple[Legend, Legend]] = field(default_factory=dict)
    """Task -> the meaning of the colours of its labels, and of those where a prediction is wrong."""


@dataclass
class _Reader:
    """A reader of files that remembers what went wrong."""

    notes: list[str] = field(default_factory=list)
    room: int = field(default_factory=lambda: ROOM)
    absent: int = 0
    legends: dict[str, tuple[Legend, Legend]] = field(default_factory=dict)

    def read(self, run: Run, name: str, kind: type[B]) -> B | None:
        path = run.folder / PREDICTIONS / name
        if not self.is_regular(path):
            return None
        try:
            return kind.model_validate_json(path.read_bytes())
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            self.notes.append(f"{run.label}: {name} is not used, because it is damaged: {where} {first['msg']}".strip())
        except OSError as error:
            self.notes.append(f"{run.label}: {name} cannot be read: {error.strerror}")
        return None

    def is_regular(self, path: Path) -> bool:
        """Return whether it is a regular file. Others, as a pipe that would never end, are named and not opened."""
        regular = path.is_file()
        if not regular and path.exists():
            self.notes.append(f"{path.name} is not opened, because it is no regular file.")
        return regular

    def picture(self, folder: Path, of: _StoredPicture | None) -> Picture | None:
        """Read a picture of a run, if there is one, as text that a page can hold."""
        if of is None:
            return None
        path = folder / PREDICTIONS / of.file
        data = b""
        with suppress(OSError):
            if self.is_regular(path):
                with path.open("rb") as file:
                    data = file.read(LARGEST + 1)
        if not data.startswith(_PNG) or len(data) > LARGEST:
            self.absent += 1
            return None
        self.room -= len(data)
        return Picture("data:image/png;base64," + base64.b64encode(data).decode(), of.text, of.ends)


def of_run(run: Run) -> Predictions:
    """Read the predictions of one run."""
    reader = _Reader()
    index, counted = reader.read(run, INDEX, _StoredIndex), reader.read(run, CONFUSION, _StoredConfusions)
    examples: list[ShownExample] = []
    over_rounds: list[ShownExample] = []
    if index is not None:
        label = "prediction" if run.is_finished else f"prediction after round {index.round}"
        examples += _examples(reader, {label: (run, index)})
        if len(earlier := _earlier(reader, run, index)) > 1:
            over_rounds += _examples(reader, earlier)
    tasks = {} if counted is None else counted.tasks
    confusions = tuple(_one(task, tasks[task], minimum_of(run)) for task in run.info["tasks"] if task in tasks)
    return replace(_made(reader, examples, confusions), over_rounds=tuple(over_rounds))


def _earlier(reader: _Reader, run: Run, last: _StoredIndex) -> dict[str, tuple[Run, _StoredIndex]]:
    """Return 'round 4' -> the predictions of that round, for some earlier rounds and the last."""
    files = sorted((run.folder / PREDICTIONS).glob(index_of("*")))[:_LOOKED]
    indexes = [index for file in files if (index := reader.read(run, file.name, _StoredIndex)) is not None]
    by_round = {index.round: index for index in indexes if index.round < last.round} | {last.round: last}
    chosen = [*thinned(sorted(by_round)[:-1], _EARLIER), last.round]
    return {f"round {round}": (run, by_round[round]) for round in chosen}


def of_grid(runs: Mapping[Cell, Run]) -> Predictions:
    """Read the predictions of the runs of a grid, side by side: for each data set, of the seed with the most runs."""
    reader = _Reader()
    by_cell: dict[str, dict[int, dict[str, Run]]] = defaultdict(lambda: defaultdict(dict))
    for cell, run in runs.items():
        if (run.folder / PREDICTIONS).is_dir():
            label = together(cell.base, cell.addon)
            by_cell[cell.data][cell.seed][label] = run
    examples: list[ShownExample] = []
    confusions: list[ConfusionViews] = []
    for data, by_seed in by_cell.items():
        seed, chosen = max(by_seed.items(), key=lambda pair: len(pair[1]))  # the first of equals
        about = ", ".join(part for part in (data if len(by_cell) > 1 else "", f"seed {seed}") if part)
        hashes = {run.info.get("data_hash") for run in chosen.values()}
        if len(hashes) > 1:
            reader.notes.append(f"{about}: no pictures side by side, because the data of its runs differ.")
        else:
            indices = {label: reader.read(run, INDEX, _StoredIndex) for label, run in chosen.items()}
            there = {label: (chosen[label], index) for label, index in indices.items() if index is not None}
            examples += _examples(reader, there, about)
        confusions += _side_by_side(reader, about, chosen)
    return _made(reader, examples, tuple(confusions))


def _made(reader: _Reader, examples: Sequence[ShownExample], confusions: tuple[ConfusionViews, ...]) -> Predictions:
    if reader.absent:
        are = "is" if reader.absent == 1 else "are"
        reader.notes.append(f"{words.count(reader.absent, 'picture')} {are} absent, damaged or too large.")
    return Predictions(tuple(examples), confusions=confusions, notes=tuple(reader.notes), legends=reader.legends)


Answers = Mapping[tuple[str, str, int], tuple[_StoredPicture, _StoredPicture | None]]
"""(run, task, position of the example) -> the prediction, and where it is wrong."""


def _examples(reader: _Reader, runs: Mapping[str, tuple[Run, _StoredIndex]], about: str = "") -> Iterator[ShownExample]:
    """Yield each example of the first run, with the predictions of all runs."""
    if not runs:
        return
    answers: dict[tuple[str, str, int], tuple[_StoredPicture, _StoredPicture | None]] = {}
    for label, (_, index) in runs.items():
        for part in index.parts:
            for task in part.tasks:
                mean, wrongly = reader.legends.get(task.task, (task.legend, task.wrong_legend))
                reader.legends[task.task] = (mean | task.legend, wrongly | task.wrong_legend)
                for example, answer, wrong in zip(part.examples, task.answer, task.wrong or repeat(None), strict=False):
                    answers[label, task.task, example.position] = answer, wrong
    folders = {label: run.folder for label, (run, _) in runs.items()}
    parts = next(iter(runs.values()))[1].parts
    # first the first example of each part, then the second ones, so that no whole part is left out for want of room
    most = max((len(part.examples) for part in parts), default=0)
    ordered = [(part, number) for number in range(most) for part in parts if number < len(part.examples)]
    for done, (part, number) in enumerate(ordered):
        if reader.room <= 0:
            reader.notes.append(
                f"{len(ordered) - done} more examples are not shown, because the page would be too large."
            )
            return
        yield _example(reader, folders, part, number, answers, about)


def _example(
    reader: _Reader, folders: Mapping[str, Path], part: _StoredPart, number: int, answers: Answers, about: str
) -> ShownExample:
    """Return one example of the first run, with all predictions."""
    first = next(iter(folders.values()))
    example = part.examples[number]
    truth = tuple(reader.picture(first, task.truth[number]) for task in part.tasks)
    rows: list[tuple[str, tuple[Picture | None, ...]]] = [("truth", truth)]
    wrong: dict[str, tuple[Picture | None, ...]] = {}
    for label, folder in folders.items():
        drawn: list[Picture | None] = []
        errors: list[Picture | None] = []
        for task in part.tasks:
            answer, off = answers.get((label, task.task, example.position), (None, None))
            shown = reader.picture(folder, answer)
            # the range of depth stands with the truth
            same = shown is not None and shown.text == task.truth[number].text
            drawn.append(replace(shown, text="") if shown is not None and same else shown)
            errors.append(reader.picture(folder, off))
        rows.append((label, tuple(drawn)))
        if any(errors):
            wrong[label] = tuple(errors)
    title = ", ".join(text for text in (about, part.domain, f"test example {example.position}") if text)
    seen = reader.picture(first, _StoredPicture(file=example.input, text=""))
    return ShownExample(title, seen, tuple(task.task for task in part.tasks), tuple(rows), wrong)


def _one(task: str, stored: _StoredConfusion, minimum: int) -> ConfusionViews:
    """Return the matrices of a run's models for a task: each, and their sum where there are several."""
    views: dict[str, Counts] = {}
    if len(stored.models) > 1:
        views[f"{len(stored.models)} models together"] = _together(stored)
    for one in stored.models:
        who = first_of(one.clients, _NAMES)
        name = f"{one.model} model of {who}" if one.model == "personal" else f"{one.model} model"
        name = f"{name}, {one.data} data" if one.model == "personal" else f"{name}, {one.data} data, {who}"
        if name in views:  # names of clients that are cut may be the same
            name += f" ({len(views)})"
        views[name] = tuple(map(tuple, one.counts))
    rows = zip(*(one.counts for one in stored.models), strict=True) if len(views) > 1 else ()
    few = frozenset(i for i, of in enumerate(rows) if any(any(hidden(row, minimum)) for row in of))
    return ConfusionViews(task, stored.unit, views, _about(stored), _named(stored), minimum, few)


def _named(stored: _StoredConfusion) -> tuple[str, ...]:
    """Return the names of all classes; none where two are the same or some are missing."""
    names = tuple(stored.classes)
    return names if len(set(names)) == len(names) == len(stored.models[0].counts) else ()


def _about(stored: _StoredConfusion) -> str:
    parts = []
    if stored.in_all > len(stored.models):
        parts.append(f"The first {len(stored.models)} of {stored.in_all} models.")
    looked, there = (sum(n) for n in zip(*((m.examples, m.examples_in_all) for m in stored.models), strict=True))
    if looked < there:
        parts.append(f"Counted on {looked:,} of {there:,} examples, evenly spaced.")
    return " ".join(parts)


def _together(stored: _StoredConfusion) -> Counts:
    size = range(len(stored.models[0].counts))
    return tuple(tuple(sum(one.counts[i][j] for one in stored.models) for j in size) for i in size)


def _side_by_side(reader: _Reader, about: str, runs: Mapping[str, Run]) -> Iterator[ConfusionViews]:
    """Yield one matrix per task, with one view per run: the sum over its models."""
    by_task: dict[str, dict[str, _StoredConfusion]] = defaultdict(dict)
    for label, run in runs.items():
        counted = reader.read(run, CONFUSION, _StoredConfusions)
        for task, stored in ({} if counted is None else counted.tasks).items():
            first = next(iter(by_task[task].values()), stored)
            if len(first.models[0].counts) != len(stored.models[0].counts):
                reader.notes.append(f"{about}: the confusions of {task} by {label} are of other classes.")
            else:
                by_task[task][label] = stored
    minimum = max(map(minimum_of, runs.values()))
    for task, by_run in by_task.items():
        views = {label: _together(stored) for label, stored in by_run.items()}
        note = " ".join(f"{label}: {text}" for label, stored in by_run.items() if (text := _about(stored)))
        classes = next(filter(None, map(_named, by_run.values())), ())
        yield ConfusionViews(f"{task}, {about}", [*by_run.values()][-1].unit, views, note, classes, minimum)
