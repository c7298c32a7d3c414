"""From columns to inputs: imputation with indicators, one-hot coding and standardisation, by what sites count.

Each site sends counts, means, sums of squared deviations and counts of categories of its training rows, and no cell of
fewer rows than a stated minimum; or it sends nothing and scales by its own numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import AfterValidator, Field, FiniteFloat

from fedloom.core.context import draws
from fedloom.core.errors import DataError, listed
from fedloom.core.settings.section import NonNegative, Positive, Problems, Section
from fedloom.data.prepare import Array
from fedloom.data.tables.read import Column, Table, number_of, quoted
from fedloom.models.tasks.task import USUAL

Kind = Literal["number", "yes/no", "category"]
Mode = Literal["federated", "local"]
Declared = Kind | Sequence[str]
"""An input as a recipe declares it: its kind, or its categories."""
Columns = Mapping[str, Declared]
"""The inputs of a table, by their columns."""
Scale = tuple[FiniteFloat, Positive]
Tell = Callable[[str], None]
LEAST = 0.05
"""The least standard deviation that statistics with noise may give, over half the range."""
OFF = 3
"""A column's mean so many standard deviations from the mean of training looks like another unit."""
FAR = 10
"""A number so many standard deviations from the mean looks like another unit or a lost decimal comma."""
ALL = ""
"""The key of the numbers that all sites share."""


def _distinct(names: Declared) -> Declared:
    if not isinstance(names, str) and len(set(names)) < len(names):
        raise ValueError(f"{', '.join(names)} found, expected different names")
    return names


DISTINCT = AfterValidator(_distinct)
"""The names in a list of categories or classes differ."""


class Input(Section):
    """One column as an input. `values` are the categories that have a place of their own, in their order."""

    column: str
    kind: Kind
    values: Annotated[tuple[str, ...], DISTINCT] = ()
    indicator: bool
    """True: a further place says where the value is missing."""


_OF_CLASSES = ("auc", "pr-auc", "balanced-accuracy", "brier", "calibration", "accuracy")
METRICS: dict[str, tuple[str, ...]] = {
    "classes": _OF_CLASSES,
    "ordinal": (*_OF_CLASSES, "kappa", "mae"),
    "numbers": ("rmse", "mae", "r2"),
    "segmentation": ("miou", "dice", "pixel_accuracy"),
    "depth": ("rmse", "mae", "rel", "delta1", "delta2", "delta3"),
}
"""Metrics of the tasks of columns."""
MAPS = ("segmentation", "depth")
"""Kinds of labels that are images, with a label for each pixel; a cell names the file."""


_WITHOUT = ("regression", "multilabel", "depth")  # kinds without classes


class Label(Section):
    """One column as the label of a task; `classes` in their order, `mean` and `std` of a real number.

    A multilabel task has several columns of yes and no. `metric` stands for the task, or the first of some: by default
    auc of two classes and of several labels, accuracy of more classes, mae of ordered ones (in classes), rmse, and
    miou. Of maps, which only images have, `classes` are the values of pixels; `factor` makes metres of a depth,
    and `root` is the folder of the maps, from that of the images, if it is another one.
    """

    column: str | None = None
    """null: the task's name."""
    columns: tuple[str, ...] = ()
    """The columns of a multilabel task."""
    kind: Literal["binary", "classification", "ordinal", "regression", "multilabel", "segmentation", "depth"]
    classes: Annotated[tuple[str, ...], DISTINCT] = ()
    metric: str | tuple[str, ...] | None = None
    mean: FiniteFloat | None = None
    std: Positive | None = None
    factor: Positive = 1.0
    root: str | None = None

    @property
    def judge(self) -> tuple[str, ...]:
        """The names of the metrics."""
        named = (self.metric,) if isinstance(self.metric, str) else self.metric
        return USUAL.get(self.kind, ()) if named is None else named

    def read_from(self, task: str) -> tuple[str, ...]:
        """Return the columns that the label of a task is read from."""
        return self.columns or (self.column or task,)

    @property
    def lacks_classes(self) -> bool:
        """Return whether a recipe has to list its classes yet."""
        return self.kind not in _WITHOUT and not self.classes

    @property
    def wants_scale(self) -> bool:
        """Return whether a mean or standard deviation is not known yet."""
        return self.kind == "regression" and (self.mean is None or self.std is None)

    def _problems(self) -> Problems:
        known = METRICS.get("numbers" if self.kind == "regression" else self.kind, METRICS["classes"])
        for name in self.judge:
            if name not in known:
                yield f"metric {name!r} found, expected one of {', '.join(known)} for {self.kind}"
        if bool(self.columns) != (self.kind == "multilabel"):
            yield f"{len(self.columns)} columns found for {self.kind}; list the columns of multilabel only"
        few = 0 if self.kind in _WITHOUT else 2
        most = {"classification": math.inf, "ordinal": math.inf, "segmentation": 255}.get(self.kind, few)
        if self.kind == "segmentation" and (texts := [text for text in self.classes if number_of(text) is None]):
            yield f"class {texts[0]!r} found, expected the values of pixels, such as 0 and 255"
        if self.classes and not few <= len(self.classes) <= most:
            yield f"{len(self.classes)} classes found, expected {'at least ' * (most > few)}{few}"


def _cell(label: Label) -> Label:
    if label.kind in MAPS:
        raise ValueError(f"kind {label.kind} found, which is for images: expected a label that is a cell")
    return label


CellLabel = Annotated[Label, AfterValidator(_cell)]
"""A label that is the cell of a column, or of several."""


def _with_classes(tasks: dict[str, Label]) -> dict[str, Label]:
    for name, label in tasks.items():
        if label.lacks_classes:
            raise ValueError(f"task {name!r}: no classes found, expected those of kind {label.kind}")
    return tasks


Labels = Annotated[dict[str, CellLabel], AfterValidator(_with_classes)]
"""The labels of tasks as others send them and runs store them."""


Tasks = Mapping[str, Label]


def label_columns(tasks: Tasks) -> list[str]:
    """Return the columns that the labels of some tasks are read from."""
    return [column for task, label in tasks.items() for column in label.read_from(task)]


LARGEST = 1e100
"""The largest number that a site sends of a column: sums over sites, and products of two, can be computed."""
_Count = Annotated[int, Field(ge=0, lt=1 << 53)]
Sent = Annotated[float, Field(ge=-LARGEST, le=LARGEST)]


class Statistics(Section):
    """The numbers that one site sends of one column: nothing that fewer rows than the minimum make up."""

    count: _Count = 0
    mean: Sent = 0.0
    squares: Annotated[float, Field(ge=0, le=LARGEST)] = 0.0
    """The sum of squared deviations from the mean."""
    missing: _Count = 0
    values: dict[str, _Count] = Field(default_factory=dict)

    def plus(self, other: Statistics) -> Statistics:
        """Return the statistics of both sites' rows together."""
        count = self.count + other.count
        apart = other.mean - self.mean
        return Statistics.model_construct(  # all sites' may be larger than one site's
            count=count,
            mean=self.mean + apart * other.count / max(count, 1),
            squares=self.squares + other.squares + apart**2 * self.count * other.count / max(count, 1),
            missing=self.missing + other.missing,
            values={v: self.values.get(v, 0) + other.values.get(v, 0) for v in {**self.values, **other.values}},
        )

    @staticmethod
    def total(of: Iterable[Statistics]) -> Statistics:
        """Return the statistics of all sites' rows together."""
        return reduce(Statistics.plus, of, Statistics())

    @property
    def scale(self) -> Scale:
        """Mean and standard deviation; 1 where all values are equal."""
        std = (self.squares / self.count) ** 0.5 if self.count else 0.0
        return self.mean, std if std > 1e-9 * max(abs(self.mean), 1e-300) else 1.0


def statistics(column: Column, kind: Kind, rows: Array, minimum: int) -> Statistics:
    """Compute the numbers that a site sends of a column of its training rows (positions)."""

    def enough(count: Any) -> int:
        return int(count) if count >= minimum else 0

    if kind == "category":
        index = column.index[rows]
        counts = np.bincount(index[index >= 0], minlength=len(column.distinct))
        values = {text: enough(n) for text, n in zip(column.distinct, counts, strict=True) if enough(n)}
        return Statistics(count=sum(values.values()), missing=enough((index < 0).sum()), values=values)
    cells = (column.yes_or_no() if kind == "yes/no" else column.finite())[rows]
    there = cells[~np.isnan(cells)]
    missing = enough(len(cells) - len(there))
    if kind == "yes/no":  # a sum would tell how few they are
        no, yes = enough((there == 0).sum()), enough((there == 1).sum())
        both = max(no + yes, 1)
        return Statistics(count=no + yes, mean=yes / both, squares=yes * no / both, missing=missing)
    if not enough(len(there)):
        return Statistics(missing=missing)
    with np.errstate(over="ignore"):
        mean, squares = float(there.mean()), float(((there - there.mean()) ** 2).sum())
    if not (abs(mean) <= LARGEST and squares <= LARGEST):
        what = f"numbers up to {np.abs(there).max():.3g} found, whose squares are too large to add"
        column.fail(f"{what}: leave the column out, or divide it")
    return Statistics(count=len(there), mean=mean, squares=squares, missing=missing)


class Preprocessing(Section):
    """The preprocessing of columns to inputs and labels: part of a run, of an exported model and of its card."""

    site: str | None
    """The column that holds a row's site."""
    missing: tuple[str | int | float, ...]
    rename: dict[str, str] = Field(default_factory=dict)
    """Name of a column in a file -> its name here."""
    mode: Mode
    minimum: int
    noise: NonNegative = 0.0
    """The noise on what sites sent, over the most that one of them adds."""
    inputs: tuple[Input, ...] = ()
    scales: dict[str, tuple[Scale, ...]] = Field(default={ALL: ()})
    """Site, or "" for all -> mean and standard deviation of each input that is no category."""
    tasks: Labels = Field(default_factory=dict)

    def _problems(self) -> Problems:
        numbers = sum(each.kind != "category" for each in self.inputs)
        if not self.scales:
            yield "scales", "an empty mapping found, expected a key for each site, or '' for all"
        for who, scales in self.scales.items():
            if len(scales) != numbers:
                yield f"scales[{who!r}]", f"{len(scales)} pairs found, expected {numbers}: one per input of numbers"
        if len({each.column for each in self.inputs}) < len(self.inputs):
            yield "inputs", f"{', '.join(each.column for each in self.inputs)} found, expected different columns"

    @property
    def names(self) -> list[str]:
        """The name of each of the model's inputs."""
        names = []
        for each in self.inputs:
            names += [f"{each.column}={value}" for value in each.values] if each.kind == "category" else [each.column]
            names += [f"{each.column} is missing"] if each.indicator else []
        return names

    def apply(
        self, table: Table, sites: Sequence[str], which: Array, rows: Array | None = None, tell: Tell = lambda _: None
    ) -> Array:
        """Return inputs (N x F, float32) of a table's rows, or of the `rows` named.

        `which` is the position of the site of each of the rows among `sites`. `tell` gets a sentence for each column
        with categories that are not known, which count as none of the known ones, or with numbers `FAR` from the mean,
        a mean `OFF` from that of training, or with many more missing cells.
        Raises DataError for an absent column, a cell that is no number where one is expected, and a row of a site whose
        own numbers are not known.
        """
        for site in sites if ALL not in self.scales else ():
            if site not in self.scales:
                how = f"scales each site by its own numbers, and knows those of {', '.join(self.scales)}"
                raise DataError(f"{table.where}: site {site!r} is unknown. The model {how}")
        rows = np.arange(len(table.frame)) if rows is None else rows
        scales = np.array([self.scales.get(ALL, self.scales.get(site)) for site in sites], np.float64)
        out = np.zeros((len(rows), len(self.names)), np.float32)
        place = scaled = 0
        for each in self.inputs:
            column = table.column(each.column)
            if each.kind == "category":
                index, new = column.coded(each.values)
                index = index[rows]
                known = np.flatnonzero(index >= 0)
                out[known, place + index[known]] = 1
                place += len(each.values)
                absent = column.index[rows] < 0
                if count := int(((index < 0) & ~absent).sum()):
                    what = f"rows have a value that the model does not know ({quoted(new)})"
                    tell(f"{column.where}: {count} of {len(rows)} {what}. {listed('Known', new[0], each.values)}")
            else:
                values = (column.yes_or_no() if each.kind == "yes/no" else column.finite())[rows]
                absent = np.isnan(values)
                mean, std = scales[:, scaled, 0][which], scales[:, scaled, 1][which]
                with np.errstate(over="ignore"):
                    out[:, place] = np.where(absent, 0, (values - mean) / std)
                if len(huge := np.flatnonzero(~np.isfinite(out[:, place]))):
                    what = f"the number {values[huge[0]]:.6g} found, too large for an input"
                    column.fail(f"{what} (mean {mean[huge[0]]:.6g}, standard deviation {std[huge[0]]:.6g})")
                far = np.flatnonzero((each.kind == "number") & (abs(out[:, place]) > FAR))
                if len(far):
                    what = f"rows have a number more than {FAR} standard deviations from the mean of training"
                    of = f"{values[far[0]]:.6g}; mean {mean[far[0]]:.6g}, standard deviation {std[far[0]]:.6g}"
                    tell(f"{column.where}: {len(far)} of {len(rows)} {what} (such as {of})")
                there = out[~absent, place]
                off = float(there.mean(dtype=np.float64)) if len(there) >= 5 else 0.0
                if each.kind == "number" and abs(off) > OFF:
                    of = f"{values[~absent].mean():.6g}; mean of training {mean.mean():.6g}"
                    what = f"the column's mean is {abs(off):.3g} standard deviations from the mean of training"
                    tell(f"{column.where}: {what} (mean {of}): check the unit")
                place, scaled = place + 1, scaled + 1
            lost = int(absent.sum())
            if lost and (lost == len(rows) or (not each.indicator and lost >= max(5, len(rows) / 5))):
                none = "" if each.indicator else f"; in training no site had {self.minimum} missing ones"
                tell(f"{column.where}: {lost} of {len(rows)} rows are missing{none}")
            if each.indicator:
                out[:, place] = absent
                place += 1
        return out

    def fitted(
        self, inputs: Sequence[Input], scales: Mapping[str, Mapping[str, Scale]], tasks: Tasks, noise: float = 0.0
    ) -> Preprocessing:
        """Return it with these inputs and labels, scaled by {site: {column: mean and standard deviation}}."""
        labels = dict(tasks)
        for task, label in tasks.items():
            if label.wants_scale:
                mean, std = scales[ALL][label.read_from(task)[0]]
                labels[task] = label.model_copy(update={"mean": mean, "std": std})
        numbers = [each.column for each in inputs if each.kind != "category"]
        own = {who: tuple(of[name] for name in numbers) for who, of in scales.items()} if numbers else {ALL: ()}
        return self.model_copy(update={"inputs": tuple(inputs), "scales": own, "tasks": labels, "noise": noise})


def sent_of(table: Table, declared: Columns, tasks: Tasks, rows: Array, minimum: int) -> dict[str, Statistics]:
    """Return what a site sends of its training rows (positions): column -> its statistics. The columns are the inputs,
    and the labels of regressions whose scale the recipe does not say."""
    kinds = {name: kind_of(stated)[0] for name, stated in declared.items()}
    kinds |= {label.read_from(name)[0]: "number" for name, label in tasks.items() if label.wants_scale}
    return {name: statistics(table.column(name), kind, rows, minimum) for name, kind in kinds.items()}


def combine(
    sent: Mapping[str, Mapping[str, Statistics]], declared: Columns, tasks: Tasks, table: Preprocessing, where: str
) -> Preprocessing:
    """Return a preprocessing with the inputs, scales and labels that follow from what sites sent: site -> column -> it.
    Raises DataError where this does not tell enough."""
    columns = dict.fromkeys(name for each in sent.values() for name in each)
    totals = {name: Statistics.total(each[name] for each in sent.values() if name in each) for name in columns}
    some, inputs = f"no site has {table.minimum} training rows with", list[Input]()
    for name, stated in declared.items():
        kind, values = kind_of(stated)
        if not totals[name].count:
            what = "a value" if kind == "number" else "the same value"
            advice = "leave the column out, lower data.minimum, or set data.preprocess: local"
            raise DataError(f"{where}, column {name!r}: {some} {what}, so no site sends counts: {advice}")
        values = values or (tuple(sorted(totals[name].values)) if kind == "category" else ())
        inputs.append(Input(column=name, kind=kind, values=values, indicator=totals[name].missing > 0))
    for name, label in tasks.items():
        if label.wants_scale and not totals[label.read_from(name)[0]].count:
            advice = "lower data.minimum, or set data.preprocess: local"
            raise DataError(f"{where}, task {name!r}: {some} a label; {advice}")
    return table.fitted(inputs, {ALL: {name: total.scale for name, total in totals.items()}}, tasks)


Ranges = Mapping[str, tuple[float, float]]
"""Column -> the least and the largest number that counts in statistics with noise."""


@dataclass(frozen=True)
class Noise:
    """Gaussian noise that hides any one site in what sites send.

    `multiplier` is its standard deviation over the most that one site can add to the sum (as a Euclidean norm). It
    follows from `key` (a public seed or a secret), and is added to the sum, or if `local` by each site.
    """

    multiplier: float
    local: bool
    key: int | bytes

    def on(self, shares: Array, *whose: str) -> Array:
        """Return shares (columns x 3) with noise: no site adds more than the root of their number."""
        from torch import float64

        drawn = draws(self.key, "statistics", *whose).normal(shares.size, float64).numpy()
        return np.asarray(shares + self.multiplier * shares.size**0.5 * drawn.reshape(shares.shape))

    def sum(self, shares: Mapping[str, Array]) -> Array:
        """Return the sum of sites' shares with noise."""
        if self.local:
            shares = {who: self.on(each, who) for who, each in shares.items()}
        total = np.sum([shares[who] for who in sorted(shares)], 0)
        return total if self.local else self.on(total)


def wanted(declared: Columns, tasks: Tasks, ranges: Ranges) -> dict[str, tuple[float, float]]:
    """Return the columns of which sites send shares and sums with noise, with their ranges. Raises DataError for
    numbers without a range, and categories that the recipe does not list."""
    kinds = {name: kind_of(stated) for name, stated in declared.items()}
    if unlisted := [name for name, (kind, values) in kinds.items() if kind == "category" and not values]:
        why = f"with noise no site sends which categories there are; list them: {{{unlisted[0]}: [a, b]}}"
        raise DataError(f"data.inputs: {', '.join(unlisted)}: category found, but {why}")
    numbers = [name for name, (kind, _) in kinds.items() if kind == "number"]
    numbers += [name for task, label in tasks.items() if label.wants_scale for name in label.read_from(task)]
    if lacking := [name for name in numbers if name not in ranges]:
        why = f"no range of {', '.join(lacking)} found, but privacy needs a bound on what one site adds"
        advice = f"state the least and the largest number that may count: {{{lacking[0]}: [least, most]}}"
        raise DataError(f"data.ranges: {why}; {advice}")
    return {name: (0.0, 1.0) for name, (kind, _) in kinds.items() if kind == "yes/no"} | {n: ranges[n] for n in numbers}


def shares_of(table: Table, columns: Ranges, rows: Array, minimum: int) -> Array:
    """Return what one site adds under privacy: for each column, the share of its training rows with a value, and the
    sums of the values and of their squares over the number of rows, where the range is -1 to 1.

    None is above 1, and all are 0 where fewer rows than `minimum` have a value.
    """
    made = []
    for name, (least, most) in columns.items():
        column = table.column(name)
        cells = (column.yes_or_no() if column.yes is not None else column.finite())[rows]
        there = cells[~np.isnan(cells)]
        u = (2 * there.clip(least, most) - least - most) / (most - least)
        sums = len(u), u.sum(), (u**2).sum()
        made.append([each / max(len(cells), 1) if len(u) >= minimum else 0.0 for each in sums])
    return np.array(made, np.float64).reshape(len(columns), 3)


def with_noise(
    total: Array, declared: Columns, tasks: Tasks, ranges: Ranges, multiplier: float, table: Preprocessing
) -> Preprocessing:
    """Return a preprocessing with the inputs, scales and labels that follow from sites' noisy sum of shares.

    In half ranges, the mean is s_1 / s_0 and the variance s_2 / s_0 less its square, with a column's sums s.
    """
    columns = wanted(declared, tasks, ranges)
    scales: dict[str, Scale] = {}
    for (name, (least, most)), (count, first, second) in zip(columns.items(), total, strict=True):
        mean = float(np.clip(first / max(count, 1.0), -1, 1))
        variance = float(np.clip(second / max(count, 1.0) - mean**2, LEAST**2, 1))
        half = (most - least) / 2
        scales[name] = (least + most) / 2 + half * mean, half * variance**0.5
    return table.fitted(_with_indicators(declared), {ALL: scales}, tasks, multiplier)


def _with_indicators(declared: Columns) -> list[Input]:
    kinds = {name: kind_of(stated) for name, stated in declared.items()}
    return [Input(column=name, kind=kind, values=values, indicator=True) for name, (kind, values) in kinds.items()]


def fit(
    table: Table, declared: Columns, tasks: Tasks, rows: Mapping[str, Array], mode: Mode, minimum: int
) -> Preprocessing:
    """Compute the preprocessing from the training rows (positions) of each site. Raises DataError where a site's
    statistics do not tell enough, or with `local`, where the recipe does not."""
    empty = Preprocessing(site=table.site, missing=table.missing, rename=dict(table.rename), mode=mode, minimum=minimum)
    if mode == "federated":
        sent = {who: sent_of(table, declared, tasks, index, minimum) for who, index in rows.items()}
        return combine(sent, declared, tasks, empty, table.where)
    inputs = _with_indicators(declared)
    for each in inputs:
        if each.kind == "category" and not each.values:
            lists = f"so the recipe must list the categories: data.inputs: {{{each.column}: [a, b]}}"
            raise DataError(f"{table.column(each.column).where}: with preprocess: local sites send nothing, {lists}")
    for name in (name for name, label in tasks.items() if label.wants_scale):
        why = "with preprocess: local sites send nothing, so the recipe must state the approximate mean and standard"
        how = f"deviation of the label: data.tasks: {{{name}: {{kind: regression, mean: 0, std: 1}}}}"
        raise DataError(f"{table.where}, task {name!r}: {why} {how}")
    numbers = {each.column: each.kind for each in inputs if each.kind != "category"}
    scales = {
        who: {name: statistics(table.column(name), kind, index, 1).scale for name, kind in numbers.items()}
        for who, index in rows.items()
    }
    return empty.fitted(inputs, scales, tasks)


def kind_of(stated: Declared) -> tuple[Kind, tuple[str, ...]]:
    """Return the kind of an input and its categories; a list of categories stands for a category."""
    return (stated, ()) if isinstance(stated, str) else ("category", tuple(stated))  # type: ignore[return-value]
