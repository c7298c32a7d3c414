"""The data sets `table` and `ist`: a table of rows from several sites becomes clients, tasks and inputs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, TypeVar
from unicodedata import combining, normalize

import numpy as np
from pydantic import AfterValidator, Field, FiniteFloat

from fedloom.core.context import derive_seed
from fedloom.core.disclosure import hidden, shown
from fedloom.core.errors import DataError, RecipeError, choices, first_of, shortened
from fedloom.core.settings.section import PARTS as SECTIONS
from fedloom.core.settings.section import BelowOne, Checked, Count, Section, client_name
from fedloom.data import prepare
from fedloom.data.prepare import DATASETS, PARTS, Array, TestFraction, alike, has_label, means_by, part_of, spread
from fedloom.data.tables import preprocessing as fitting
from fedloom.data.tables.files import Files, base_of, table_at
from fedloom.data.tables.preprocessing import MAPS, CellLabel, Kind, Label, Labels, Mode, Noise, Preprocessing
from fedloom.data.tables.read import Code, Column, Table, read

if TYPE_CHECKING:
    from torch import Tensor

    from fedloom.data.dataset import Dataset


def _ordered(value: tuple[float, float]) -> tuple[float, float]:
    if value[0] >= value[1]:
        raise ValueError(f"{list(value)} found, expected the least number, then a larger one")
    return value


Inputs = Annotated[dict[str, Annotated[Kind | list[str], fitting.DISTINCT]], Field(min_length=1)]
Range = Annotated[tuple[FiniteFloat, FiniteFloat], AfterValidator(_ordered)]
D = TypeVar("D")
FAR, WIDE = 3.0, 20.0
"""From how many usual ranges between the quartiles a site's median is far off, and from how many times wider or
narrower a site's own range."""
EVERYONE = "all"
"""The site of a table without a column of sites."""


@dataclass(frozen=True)
class RowSplit(Checked):
    """The split of each site's rows, as keys of the data sets that take it."""

    test_fraction: TestFraction = 0.2
    val_fraction: BelowOne = 0.1
    limit: Count | None = None
    least: Count = 1
    group: str | None = None
    time: str | Annotated[list[str], Field(min_length=1)] | None = None
    split: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.split is not None and (self.time is not None or self.limit is not None):
            other = "data.limit" if self.time is None else "data.time"
            raise RecipeError(f"data.split names the rows for tests, and so does {other}: leave one of them out")

    def without_group(self, inputs: Mapping[str, D]) -> dict[str, D]:
        """Return inputs without the columns that say whose a row is, and in which part it is."""
        return {name: kind for name, kind in inputs.items() if name not in (self.group, self.split)}

    def of(
        self,
        labels: Sequence[Array],
        seed: int,
        site: str,
        groups: Array | None = None,
        times: Array | None = None,
        given: Array | None = None,
        with_tests: bool = True,
    ) -> tuple[Array, Array, Array]:
        """Return positions of one site's train, validation and test rows: in the order of their `times` if there are
        any, else each spread over the labels. `given` are the rows' parts, if these are known; without `with_tests`
        none are for tests.

        Rows of one of the `groups` (a number for each row, or None) stay together, at the mean of their labels and at
        their first time.
        """
        if given is not None:
            learned, validated, tested = (np.flatnonzero(given == part) for part in range(3))
            if not len(validated):
                whose = None if groups is None else groups[learned]
                inside = self.of([each[learned] for each in labels], seed, site, whose, with_tests=False)
                learned, validated = learned[inside[0]], learned[inside[1]]
            return learned, validated, tested
        if groups is not None:
            member, first = np.unique(groups, return_inverse=True)[1], None
            if times is not None:
                rows = np.lexsort((times, member))
                first = times[rows[np.unique(member[rows], return_index=True)[1]]]
            parts = self.of(means_by(member, labels), seed, site, None, first, with_tests=with_tests)
            learned, validated, tested = (np.flatnonzero(np.isin(member, part)) for part in parts)
            return learned, validated, tested
        count = len(labels[0])
        rng = np.random.default_rng(derive_seed(seed, "data", "table", site))
        ties = rng.permutation(count) if times is None else np.arange(count)  # rows of one time stay as in the file
        order = np.lexsort((ties, *(reversed(labels) if times is None else (times,))))
        test = part_of(self.test_fraction, count) if with_tests else 0
        if self.limit is not None:
            test = max(test, count - self.limit)
        apart: Any = spread if times is None else lambda some, last, _: np.split(some, [len(some) - last])
        order, tests = apart(order, test, rng)
        val = part_of(self.val_fraction, len(order)) if self.val_fraction and len(order) > 2 else 0
        train, vals = apart(order, val, rng)
        return np.sort(train), np.sort(vals), np.sort(tests)


SECTIONS["RowSplit"] = "fedloom.data.tables.table:RowSplit", RowSplit


@DATASETS.register("table")
def table(
    seed: int,
    *,
    path: str,
    tasks: Annotated[dict[str, CellLabel], Field(min_length=1)],
    inputs: Inputs,
    left_out: dict[str, str] | None = None,
    site: str | None = None,
    missing: list[Code] | None = None,
    rename: dict[str, str] | None = None,
    preprocess: Mode = "federated",
    minimum: Count = 5,
    ranges: dict[str, Range] | None = None,
    rules: RowSplit,
) -> Dataset:
    """Read a table of several sites, a client each: a CSV (also .gz, .xz) or Parquet file, or a folder with one a site.

    `site` is the column of a row's site; in a folder, without one, the files' names are the sites. `tasks` are labels,
    {task: {kind: binary, classification or regression, ...}}, of the column `column` (by default the task's name);
    `classes` are in their order. `inputs` are {column: number, yes/no, category, or a list of categories}, and
    `left_out` are all other columns with the reason. `missing` are cells that mean missing, beside empty ones, NA and
    NaN. `rename` is {a column's name in the file: its name here}, for a site whose table has other names than those of
    other sites. `fedloom init FILE` writes all of these.

    A row without a label of a task is left out for this task only, and a site that has no label of a task lacks it.
    Each site's rows are split by itself: the share `test_fraction` for tests, and of the rest `val_fraction` for
    validation, each spread over the labels. With `limit` a site has that many rows for training and validation, and
    the rest is for tests; sites of fewer than `least` rows take no part. Rows with the same cell in the column `group`,
    such as the visits of a patient, stay in one part; then the shares and `limit` count patients. With `time`, a
    column of numbers or of times as in 2024-03-31T14:00+02:00 or 31.3.2024, or several such as [year, month], a
    site's tests are its last rows (or the patients who came last), and its validation rows the last before these.
    `split` is a column that says train, val or test; without rows of val, `val_fraction` of the training rows is
    for validation.

    Numbers are standardised and missing ones become the mean, with an input that says so; a category becomes an input
    for each of its values. `preprocess: federated` takes the mean, the deviation and the categories from counts and
    sums that sites send of their training rows, without cells of fewer than `minimum` rows; `local` sends nothing: each
    site is scaled by its own numbers, and the recipe lists the categories. With a section `privacy`, they send counts
    and sums with noise, of numbers clipped to `ranges` ({column: [least, most]}), and the recipe lists the categories.

    Raises DataError for what does not fit, naming the column and the site.
    """
    cells = read(path, site, missing or (), rename)
    return build(cells, tasks, {**inputs}, preprocess, minimum, rules, seed, left_out, ranges)


@dataclass(frozen=True, eq=False)
class Rows:
    """The rows of each site of a table, with all labels."""

    labels: Mapping[str, Array]
    """Task -> a label for each row: a class (-1: none), a real number (NaN: none), or some of 0 and 1 (NaN: none)."""
    parts: Mapping[str, tuple[Array, Array, Array]]
    """Site -> rows of its train, validation and test part."""
    notes: tuple[str, ...]
    fixed: bool = False
    """True: test rows are the last ones, or those that a column names, the same at every seed."""

    @cached_property
    def learned(self) -> Array:
        """The rows of all train and validation parts, in order."""
        return np.sort(np.concatenate([part for train, val, _ in self.parts.values() for part in (train, val)]))

    @cached_property
    def tests(self) -> Array:
        """The rows of all test parts, in order."""
        return np.sort(np.concatenate([test for _, _, test in self.parts.values()]))

    @cached_property
    def taken(self) -> Array:
        """The rows of all parts, in order."""
        return np.sort(np.concatenate([self.learned, self.tests]))

    @cached_property
    def whose(self) -> Array:
        """The number of each row's site, -1 of rows that take no part."""
        whose = np.full(len(next(iter(self.labels.values()))), -1)
        for number, parts in enumerate(self.parts.values()):
            whose[np.concatenate(parts)] = number
        return whose


def plain_name(column: str) -> str:
    """Return a column's name as part of the names of metrics and parameters."""
    return re.sub(r"[^A-Za-z0-9_-]+", "_", column).strip("_") or "task"


def task_name(column: str) -> str:
    """Return a column's name as the name of a new task: without accents, and then as a `plain_name`."""
    letters = normalize("NFKD", column.replace("ß", "ss"))  # recipes have the result, so old ones keep their names
    return plain_name("".join(letter for letter in letters if not combining(letter)))


def sites_of(table: Table, site: str | None, alone: str = EVERYONE) -> tuple[Array, list[str]]:
    """Return each row's site by number, and the sites' names in their order; without a column, `alone` has all rows.
    Raises DataError where one is missing."""
    if site is None:
        return np.zeros(len(table.frame), np.int64), [alone]
    column = table.column(site)
    if len(absent := np.flatnonzero(column.index < 0)):
        found = f"{len(absent)}, such as row {', '.join(str(row + 1) for row in absent[:3])}"
        column.fail(f"rows without a site found: {found}: fill in the site, or remove them")
    names = [re.sub(r"[^\w .-]", "-", text).lstrip(" .-") or "site" for text in column.distinct]
    for name in names:
        try:
            client_name(name)
        except ValueError as error:
            column.fail(f"{error}; shorten the site's name")
    folded = [name.casefold() for name in names]
    for name, text in zip(folded, column.distinct, strict=True):
        if (first := column.distinct[folded.index(name)]) != text:
            advice = "write them alike if they are one site, else rename one"
            column.fail(f"sites {first!r} and {text!r} would both be client {name!r}; {advice}")
    order = sorted(range(len(names)), key=names.__getitem__)
    return np.argsort(order)[column.index], [names[i] for i in order]


def labels_of(table: Table, tasks: Mapping[str, Label]) -> dict[str, Array]:
    """Return each task's labels, and 0 where a cell names a map, else -1. Raises DataError for a cell that is no label
    of its task."""
    labels = {}
    for name, label in tasks.items():
        column = table.column(label.read_from(name)[0])
        if label.kind == "multilabel":
            labels[name] = np.stack([table.column(each).yes_or_no() for each in label.columns], 1)
        elif label.kind == "regression":
            labels[name] = column.finite()
            if (np.abs(labels[name]) > np.finfo(np.float32).max).any():
                column.fail("numbers above 3e38 found, which are too large: divide the label")
        else:
            if label.lacks_classes:
                problem = f"data.tasks.{name} has no classes, expected those of kind {label.kind}"
                has = "" if label.kind in MAPS else f"; the column has {', '.join(column.distinct[:20])}"
                column.fail(f"{problem}{has}")
            if label.kind in MAPS:
                labels[name] = np.where(column.present, 0, -1)
                continue
            labels[name], strange = column.coded(label.classes)
            if strange:
                found = f"the label {strange[0]!r} found, expected {', '.join(label.classes[:20])}"
                advice = f"add it to data.tasks.{name}.classes, or to data.missing if it means missing"
                column.fail(f"{found}; {advice}")
    return labels


def rows_of(table: Table, tasks: Mapping[str, Label], split: RowSplit, seed: int, alone: str | None = None) -> Rows:
    """Read labels, and split each site's rows that have one. Raises DataError where nothing is left to learn. `alone`
    is the only site, one among others elsewhere: it may lack tasks."""
    labels = labels_of(table, tasks)
    which, names = sites_of(table, table.site, alone or EVERYONE)
    if alone is not None and len(names) > 1:
        found = f"{len(names)} sites found, expected the rows of one site"
        raise DataError(f"{table.where}, column {table.site!r}: {found}")
    groups = None if split.group is None else table.column(split.group).index
    groups = None if groups is None else np.where(groups < 0, -1 - np.arange(len(groups)), groups)  # none: by itself
    more = [] if groups is None or len(names) == 1 else [at_several(split.group, groups, which)]
    times: Array | None = None
    if split.time is not None:
        columns = [split.time] if isinstance(split.time, str) else split.time
        _, times = np.unique([table.column(each).times() for each in columns], axis=1, return_inverse=True)
    given = None if split.split is None else _parts_in(table.column(split.split))
    has = {task: has_label(column) for task, column in labels.items()}
    useful, notes = np.any([*has.values()], axis=0), [*table.notes, *filter(None, more)]
    if not useful.all():
        notes.append(f"rows without a label of any task, left out: {int((~useful).sum()):,}")
    parts: dict[str, tuple[Array, Array, Array]] = {}
    for number, name in enumerate(names):
        rows = np.flatnonzero((which == number) & useful)
        if len(rows) < split.least:
            notes.append(f"site {name!r} is left out: {len(rows)} labelled rows found, at least {split.least} needed")
            continue
        if given is not None and 0 not in given[rows]:
            notes.append(f"site {name!r} is left out: no labelled row for training found")
            continue
        parts_of = [each for y in labels.values() for each in y[rows].reshape(len(rows), -1).T]
        known = [np.nan_to_num(each, nan=-np.inf) for each in parts_of]
        own, at, stated = (None if each is None else each[rows] for each in (groups, times, given))
        split_of = split.of(known, seed, name, own, at, stated)
        parts[name] = rows[split_of[0]], rows[split_of[1]], rows[split_of[2]]
        if given is not None and groups is not None:
            both = len(np.intersect1d(groups[rows[given[rows] == 2]], groups[rows[given[rows] < 2]]))
            found = f"{both} values of {split.group} have rows for tests and for training"
            notes += [f"site {name!r}: {found}: test scores are too good"] if both else []
    if not parts:
        raise DataError(f"{table.where}: no row has a label of {', '.join(tasks)}")
    for task, there in has.items():
        trains = {name: train[there[train]] for name, (train, _, _) in parts.items()}
        holders = [name for name, train in trains.items() if len(train)]
        if not holders and alone is None:
            column = table.column(tasks[task].read_from(task)[0])
            column.fail("no site has a training row with a label; leave the task out")
        if lacking := [name for name in parts if name not in holders]:
            notes.append(f"no label of task {task!r} to train on: {first_of(lacking)}")
        for about, y in zip(tasks[task].read_from(task), labels[task].reshape(len(there), -1).T, strict=True):
            if tasks[task].kind in ("regression", *MAPS):
                continue
            seen = {who: len(np.unique(y[train][has_label(y[train])])) for who, train in trains.items()}
            if tasks[task].columns and (lacking := [who for who in seen if who in holders and not seen[who]]):
                notes.append(f"no label {about!r} of task {task!r} to train on: {first_of(lacking)}")
            if single := [who for who, count in seen.items() if count == 1]:
                which_one = f"label {about!r}" if tasks[task].columns else f"task {task!r}"
                notes.append(f"one class only of {which_one} to train on: {first_of(single)}")
            classes = tasks[task].classes or ("no", "yes")
            notes += one_sided(about, classes, {who: y[trains[who]] for who in holders})
    return Rows(labels, parts, tuple(notes), times is not None or given is not None)


def at_several(name: str | None, groups: Array, which: Array) -> str:
    """Return a sentence about groups, such as patients, with rows at several sites; an empty text if there are none."""
    pairs = np.unique(groups.astype(np.int64) * (which.max() + 1) + which) // (which.max() + 1)
    count = int((np.unique(pairs, return_counts=True)[1] > 1).sum())
    several = f"{name}: {count:,} values are at more than one site; if each is one person, their rows"
    return f"{several} can be in training at one site and in test at another" if count else ""


def _parts_in(column: Column) -> Array:
    """Return the part of each row by number, as in PARTS. Raises DataError for a cell that names none."""
    numbers = np.array([PARTS.get(text.strip().casefold(), -1) for text in column.distinct], np.int64)
    given = np.where(column.index < 0, -1, numbers[column.index])
    if len(wrong := np.flatnonzero(given < 0)):
        cell = "an empty cell" if column.index[wrong[0]] < 0 else repr(column.distinct[column.index[wrong[0]]])
        column.fail(f"row {wrong[0] + 1}: {cell} found, expected train, val or test in each row")
    return given


def one_sided(label: str, classes: Sequence[str], labels: Mapping[str, Array], is_map: bool = False) -> Iterator[str]:
    """Yield a sentence for each site that alone has a class and, unless labels are maps, lacks one of all others."""
    has = {site: {*np.unique(y[has_label(y)]).astype(int).tolist()} for site, y in labels.items()}
    sites = Counter(each for own in has.values() for each in own)
    for site, own in has.items() if len(has) > 1 else ():
        only = [each for each in own if sites[each] == 1]
        lacks = [each for each, count in sites.items() if count == len(has) - 1 and each not in own]
        if only and (lacks or is_map):
            one, two = (", ".join(classes[each] for each in sorted(some)) for some in (only, lacks))
            other = f", class {two} is not there" * bool(lacks)
            said = f"class {one} of {label} is only at {site}{other}: do sites code it alike?"
            yield prepare.MaskDoubt.of(said, task=label, site=site, others=has.keys() - {site}, classes={*only})


def uneven(table: Table, inputs: Mapping[str, Kind | Sequence[str]], rows: Rows, minimum: int) -> Iterator[str]:
    """Yield a sentence for each input that some sites lack, or whose categories differ in case only."""
    whole, absent = {who: np.concatenate(parts) for who, parts in rows.parts.items()}, dict[str, list[str]]()
    for name, stated in inputs.items():
        column, kind = table.column(name), fitting.kind_of(stated)[0]
        there = column.present
        if lacking := [] if there.all() else [who for who, own in whole.items() if not there[own].any()]:
            absent.setdefault(first_of(lacking), []).append(name)
        trains = [train for train, _, _ in rows.parts.values()] if kind == "category" else []
        known = sorted({text for train in trains for text in fitting.statistics(column, kind, train, minimum).values})
        if same := sorted({text for pair in alike(known) for text in pair}):
            yield f"{name}: categories {', '.join(same)} differ only in case; write them alike if they mean the same"
        yield from _other_units(column, whole, minimum) if kind == "number" else ()
    yield from (f"{first_of(names)}: no value at {sites}" for sites, names in absent.items())


def _other_units(column: Column, whole: Mapping[str, Array], minimum: int) -> Iterator[str]:
    """Yield a sentence where one site's numbers lie far from those of most sites, or spread far more or less."""
    known = {who: own[~np.isnan(own)] for who, rows in whole.items() if len(own := column.numbers[rows])}
    quarters = {who: _quarters(own) for who, own in known.items() if len(own) >= max(minimum, 8)}
    yield from _far_off(column.name, {who: (float(of[1]), float(of[2] - of[0])) for who, of in quarters.items()})


def _quarters(values: Array) -> Array:
    """Return the quartiles, as np.percentile does in ten times the time."""
    place = np.array((0.25, 0.5, 0.75)) * (len(values) - 1)
    low, high = np.floor(place).astype(int), np.ceil(place).astype(int)
    ordered = np.partition(values, [*low, *high])
    return np.asarray(ordered[low] + (ordered[high] - ordered[low]) * (place - low))


def _far_off(column: str, sites: Mapping[str, tuple[float, float]]) -> Iterator[str]:
    """Yield what `_other_units` says, from the middle of each site's numbers and the range between their quartiles."""
    if len(sites) < 3:
        return
    usual, spread = (float(np.median(each)) for each in zip(*sites.values(), strict=True))
    far = [who for who, (middle, width) in sites.items() if spread > 0 and (abs(middle - usual) > FAR * spread
           or not spread / WIDE <= width <= spread * WIDE)]  # fmt: skip
    if far and 2 * len(far) < len(sites):
        yield f"{column}: the numbers at {first_of(far)} lie far from those of other sites: are they in another unit?"


def task_of(name: str, label: Label) -> Any:
    """Return the task that a label describes: a `Linear` one of cells, a dense one of pixels."""
    from fedloom.models.tasks.own import KINDS

    known: dict[str, Any] = {"channels": len(label.classes)}
    if label.kind == "multilabel":
        known = {"channels": len(label.columns), "labels": tuple(map(plain_name, label.columns))}
    elif label.kind in ("depth", "regression"):
        known = {} if label.kind == "depth" else {"mean": label.mean or 0.0, "std": label.std or 1.0}
    return KINDS[label.kind](name, judge=label.judge, **known)


def build(
    table: Table,
    tasks: Mapping[str, Label],
    inputs: Mapping[str, Kind | Sequence[str]],
    mode: Mode,
    minimum: int,
    split: RowSplit,
    seed: int,
    left_out: Mapping[str, str] | None = None,
    ranges: fitting.Ranges | None = None,
) -> Dataset:
    """Make the data set of a table that was read."""
    refuse(table.where, tasks, inputs)
    rows, inputs = rows_of(table, tasks, split, seed), split.without_group(inputs)
    if not inputs:
        raise DataError(f"{table.where}: {split.group!r} is the column of groups and the only input; name other inputs")
    rows = replace(rows, notes=(*rows.notes, *shortened(uneven(table, inputs, rows, minimum))))
    trains = {who: train for who, (train, _, _) in rows.parts.items()}
    fitted = fitting.fit(table, inputs, tasks, trains, mode, minimum)
    doubts = codes_in(table, inputs, tasks, rows.parts, minimum)
    made = replace(dataset_of(table, rows, fitted, left_out or {}), doubts=doubts)
    if mode == "local" or ranges is None:
        return made
    refuse(table.where, tasks, inputs, ranges)

    def private(noise: Noise) -> Dataset:
        columns = fitting.wanted(inputs, tasks, ranges)
        total = noise.sum({who: fitting.shares_of(table, columns, train, minimum) for who, train in trains.items()})
        found = fitting.with_noise(total, inputs, tasks, ranges, noise.multiplier, fitted)
        return replace(dataset_of(table, rows, found, left_out or {}), doubts=doubts)

    return replace(made, private=private)


def refuse(where: str, tasks: Mapping[str, Label], inputs: Collection[str], ranges: Collection[str] = ()) -> None:
    """Raise DataError for a column that is a label twice, or a label and an input, and for a range of no column."""
    columns = fitting.label_columns(tasks)
    for place, column in enumerate(columns):
        if column in inputs:
            raise DataError(f"{where}: column {column!r} is both a label and an input: remove it from one of them")
        if column in columns[:place]:
            raise DataError(f"{where}: column {column!r} is a label twice; leave it out of one task")
    if strange := [name for name in ranges if name not in {*inputs, *columns}]:
        raise DataError(f"data.ranges: {strange[0]!r} found, which is no input and no label")


def dataset_of(table: Table, rows: Rows, fitted: Preprocessing, left_out: Collection[str] = ()) -> Dataset:
    """Return the data set of a table's rows, preprocessed as was fitted."""
    import torch

    x = fitted.apply(table, list(rows.parts), rows.whose[rows.taken], rows.taken)
    made = of_rows(table, rows, fitted.tasks, torch.from_numpy(x))
    known = {*(each.column for each in fitted.inputs), *left_out, table.site, *fitting.label_columns(fitted.tasks)}
    others = [name for name in map(str, table.frame) if name not in known]
    notes = shortened(f"column {name!r} of the table is neither input nor label" for name in others)
    return replace(made, table=fitted, notes=(*rows.notes, *notes))


def of_rows(
    table: Table,
    rows: Rows,
    tasks: Mapping[str, Label],
    inputs: Tensor,
    maps: Mapping[str, Tensor] = MappingProxyType({}),
    normal: tuple[Any, Any] = (None, None),
    changes: Sequence[Any] = (None, None),
) -> Dataset:
    """Return the data set of a table's rows; `inputs` (n x ...) and `maps`, the labels of pixels (task -> n x H x W),
    are those of all rows that take part, `changes` those of the train and the test part."""
    import torch

    from fedloom.data.dataset import Dataset, TensorExamples
    from fedloom.data.partition import Partition, Share

    where, site = table.where, table.site

    def examples(index: Array, change: Any) -> TensorExamples:
        place = np.searchsorted(rows.taken, index)
        labels = {task: column[index] for task, column in rows.labels.items()}
        real = {task: column for task, column in labels.items() if column.dtype.kind == "f"}
        known = {t: torch.from_numpy(y.astype(np.float32 if t in real else np.int64)) for t, y in labels.items()}
        domain = None if site is None else torch.from_numpy(rows.whose[index])
        annotated = {task: has_label(column) for task, column in labels.items() if task in real or task in maps}
        known |= {task: each[place] for task, each in maps.items()}
        return TensorExamples(inputs[place], known, domain, *normal, change, annotated)

    shares = []
    for who, (train, val, _) in rows.parts.items():
        own = [task for task, column in rows.labels.items() if has_label(column[train]).any()]
        if not own:
            raise DataError(f"{where}, site {who!r}: no training row has a label; leave its rows out")
        places, apart = np.searchsorted(rows.learned, train), np.searchsorted(rows.learned, val)
        shares.append(Share(who, dict.fromkeys(own, 1.0), places, apart, None if site is None else who))
    partition = Partition(tuple(shares))

    return Dataset(
        Path(where).name.split(".")[0],
        tuple(task_of(task, label) for task, label in tasks.items()),
        examples(rows.learned, changes[0]),
        examples(rows.tests, changes[1]),
        tuple(rows.parts) if site is not None else (),
        deal=lambda pool, seed: partition,
        classes={task: names for task, label in tasks.items() if (names := label.classes or label.columns)},
        notes=rows.notes,
        redrawn=not rows.fixed,
    )


def codes_in(
    table: Table, inputs: Iterable[str], tasks: Mapping[str, Label], parts: Mapping[str, Sequence[Array]], minimum: int
) -> tuple[str, ...]:
    """Return a sentence for each number among inputs and real labels that looks like a code for missing, with the sites
    (name -> rows, in parts) that have it."""
    columns = [*inputs, *(label.read_from(task)[0] for task, label in tasks.items() if label.kind == "regression")]
    sites = {site: np.concatenate(rows) for site, rows in parts.items()}
    every, sentences = np.concatenate([*sites.values()]), []
    for column in map(table.column, columns):
        found: dict[tuple[int, str], list[str]] = {}
        anywhere = column.code(every)
        for site, rows in sites.items():
            if (code := anywhere or column.code(rows)) is not None:
                count = int((column.numbers[rows] == code[0]).sum())
                found.setdefault(code, []).extend([f"{site} ({shown(count, minimum)})"] if count else [])
        for (number, apart), where in found.items():
            advice = f"if {number} means missing, add it to data.missing"
            cells = f"cells with {number} found at {first_of(where)}, and {apart}"
            sentences.append(f"column {column.name!r}: {cells}; {advice}")
    return tuple(shortened(sentences))


class TableReport(Section):
    """The message of one site about its table before the first round: nothing that covers fewer than `minimum` rows."""

    site: str | None
    minimum: Count
    inputs: Inputs
    tasks: Annotated[Labels, Field(min_length=1)]
    sent: dict[str, fitting.Statistics] = Field(default_factory=dict)
    """Column -> its statistics."""
    ranges: dict[str, Range] | None = None
    """Under privacy: column -> the range that its numbers are clipped to."""
    shares: dict[str, tuple[fitting.Sent, fitting.Sent, fitting.Sent]] = Field(default_factory=dict)
    """Under privacy, in place of `sent`: column -> what `shares_of` computes, perhaps with noise."""


@dataclass(frozen=True, eq=False)
class OwnTable:
    """The table of one site, whose preprocessing follows from what all sites send."""

    table: Table
    rows: Rows
    report: TableReport
    lacks: Sequence[str]
    """Sentences about the tasks whose columns the table lacks."""

    @staticmethod
    def of(client: str, seed: int, about: Mapping[str, Any], private: bool = False) -> OwnTable:
        """Read the table of a recipe's section as that of one client. Raises DataError for what does not fit. With
        `private` the report has shares of clipped numbers."""
        found = read(about["path"], about["site"], about["missing"] or (), about["rename"])
        if about["site"] is None and found.site is not None:  # all files of a folder are this site's
            found = replace(found, site=None, frame=found.frame.drop(columns=found.site))
        split = RowSplit(**{key.name: about[key.name] for key in fields(RowSplit)})
        tasks, inputs = about["tasks"], split.without_group(about["inputs"])
        refuse(found.where, tasks, inputs, (about["ranges"] or ()) if private else ())
        names, wanted = [*found.frame.columns], {task: label.read_from(task) for task, label in tasks.items()}
        absent = {task: columns for task, columns in wanted.items() if {*columns}.isdisjoint(names)}
        if len(absent) < len(tasks):  # as in a folder, where another site's file has these columns
            found = replace(found, frame=found.frame.assign(**{c: np.nan for each in absent.values() for c in each}))
        rows = rows_of(found, tasks, split, seed, alone=client)
        ((train, _, _),) = rows.parts.values()
        held = {name: label for name, label in tasks.items() if has_label(rows.labels[name][train]).any()}
        minimum, ranges = about["minimum"], about["ranges"] or {}
        if private:
            columns = fitting.wanted(inputs, tasks, ranges)
            shares = map(tuple, fitting.shares_of(found, columns, train, minimum).tolist())
            more: dict[str, Any] = {"ranges": ranges, "shares": dict(zip(columns, shares, strict=True))}
        else:
            more = {"sent": fitting.sent_of(found, inputs, tasks, train, minimum)}
        report = TableReport(site=found.site, minimum=minimum, inputs=inputs, tasks=held)
        lacks = [
            f"task {task!r} is left out: no column {c!r}.{choices('Found', c, names)}"
            for task, (c, *_) in absent.items()
        ]
        return OwnTable(found, rows, report.model_copy(update=more), lacks)

    def dataset(self, fitted: Preprocessing | None) -> Dataset:
        """Return the data set as it was fitted to what all sites sent; before that, without inputs. Raises DataError
        where that has other columns than this site's recipe."""
        own = {"site": self.table.site, "missing": self.table.missing, "rename": self.table.rename}
        tasks, inputs = self.report.tasks, self.report.inputs
        kinds = {name: fitting.kind_of(declared)[0] for name, declared in inputs.items()}
        if fitted is None:
            fitted = Preprocessing(**own, mode="federated", minimum=self.report.minimum, tasks=tasks)
        elif {each.column: each.kind for each in fitted.inputs} != kinds:
            raise DataError(f"{self.table.where}: the server's inputs are not those of this site's data.inputs")
        known = {"tasks": {name: fitted.tasks[name] for name in tasks if name in fitted.tasks}}
        doubts = (*self.lacks, *codes_in(self.table, inputs, tasks, self.rows.parts, self.report.minimum))
        return replace(dataset_of(self.table, self.rows, fitted.model_copy(update={**own, **known})), doubts=doubts)


def together(reports: Mapping[str, TableReport], noise: Noise | None = None) -> Preprocessing:
    """Return the preprocessing that follows from what sites sent, client -> report. Raises DataError without enough.

    `noise` is that of a private run; if it is local, sites have added it already.
    """
    reports = dict(sorted(reports.items()))
    first = next(iter(reports.values()))
    tasks = {name: label for report in reports.values() for name, label in report.tasks.items()}
    empty = Preprocessing(site=first.site, missing=(), mode="federated", minimum=first.minimum)
    if noise is not None:
        columns = fitting.wanted(first.inputs, tasks, first.ranges or {})
        shares = [[each.shares.get(name, (0, 0, 0)) for name in columns] for each in reports.values()]
        sent = np.array(shares, np.float64).reshape(len(reports), len(columns), 3)
        total = sent.sum(0) if noise.local else noise.on(sent.clip(-1, 1).sum(0))
        return fitting.with_noise(total, first.inputs, tasks, first.ranges or {}, noise.multiplier, empty)
    every = {who: each.sent for who, each in reports.items()}
    return fitting.combine(every, first.inputs, tasks, empty, "the sites' tables")


def far_off(reports: Mapping[str, TableReport]) -> Iterator[str]:
    """Yield a sentence for each column of numbers that seems to be in another unit at one site, by what sites sent."""
    numbers = {name for each in reports.values() for name in each.sent if each.inputs.get(name, "number") == "number"}
    for name in sorted(numbers):
        sent = {who: each.sent[name] for who, each in reports.items() if name in each.sent}
        # between the quartiles of a normal distribution lie 1.35 standard deviations
        scales = {who: (each.scale[0], 1.35 * each.scale[1]) for who, each in sent.items() if each.squares}
        yield from _far_off(name, scales)


MOST = 5
"""The classes whose shares are printed."""


def counts(about: Mapping[str, Any], minimum: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]], Sequence[str]]:
    """Return a row for each site and one for each column of a table, and notes; `about` is a recipe's section of it.
    Counts of fewer than `minimum` rows, and shares of them, are "<minimum"; what would tell them is "hidden"."""
    path = Path(about["path"]).expanduser()
    table = table_at(path, about["site"], about["missing"] or (), about.get("rename"))
    tasks: Mapping[str, Label] = {name: Label.model_validate(dict(label)) for name, label in about["tasks"].items()}
    if "image" in about:
        files = Files.of(table, base_of(path, about["root"]), about["image"], tasks)
        table, tasks = files.table, files.tasks
    labels = labels_of(table, tasks)
    which, names = sites_of(table, table.site)

    def shares(classes: Sequence[str], y: Array) -> list[str]:
        sizes = np.bincount(y.astype(int), minlength=len(classes)).tolist()
        hide = hidden(sizes[:MOST], minimum, sum(sizes[MOST:]))
        cells = zip(classes, sizes, hide, strict=False)
        texts = [f"{c} {shown(n, minimum, 'hidden' if hid else f'{n / len(y):.0%}')}" for c, n, hid in cells]
        more = [f"and {len(classes) - MOST} more classes"] if len(classes) > MOST else []
        return [*texts[len(classes) == 2 :], *more]  # of two classes the second one

    def told(label: Label, y: Array) -> list[str]:
        if label.kind in MAPS:
            return []
        if label.kind == "multilabel":
            known = zip(label.columns, (each[has_label(each)] for each in y.T), strict=True)
            some = {name: each for name, each in known if len(each)}
            few = f"<{minimum}"
            return [f"{n} {few}" if len(each) < minimum else shares(("", n), each)[0] for n, each in some.items()]
        return [f"mean {y.mean():.4g}"] if label.kind == "regression" else shares(label.classes, y)

    sizes = np.bincount(which, minlength=len(names))
    sites = []
    for number, name in enumerate(names):
        row: dict[str, Any] = {"site": name, "rows": shown(sizes[number], minimum)}
        for task, label in tasks.items():
            y = labels[task][which == number]
            y = y[has_label(y)]
            count = shown(len(y), minimum, f"all but <{minimum}" if 0 < sizes[number] - len(y) < minimum else None)
            row[task] = ", ".join([count, *(told(label, y) if len(y) >= minimum else ())])
        sites.append(row)
    columns = []
    for name, kind in about["inputs"].items():
        absent = ~table.column(name).present
        lost = np.bincount(which[absent], minlength=len(names))
        parts = np.where((lost > 0) & (lost < minimum), 0, lost / np.maximum(sizes, 1))
        most = int(np.argmax(parts))
        column = {"column": name, "kind": kind if isinstance(kind, str) else "category"}
        column["missing"] = shown(lost.sum(), minimum, f"{lost.sum() / len(absent):.1%}")
        alone = hidden([lost[most]], minimum, lost.sum() - lost[most])[0]
        column["most missing at"] = f"{names[most]} {parts[most]:.0%}" if parts[most] > 0 and not alone else ""
        columns.append(column)
    rows = {name: [np.flatnonzero(which == number)] for number, name in enumerate(names)}
    return sites, columns, [*table.notes, *codes_in(table, about["inputs"], tasks, rows, minimum)]


IST = Path(__file__).with_name("ist.csv.xz")
_OUTCOMES = ("dead_or_dependent_6m", "death_14d", "recovered_6m", "infarct_on_ct", "home_14d", "home_6m")
_DEFICITS = ("face", "arm", "leg", "dysphasia", "hemianopia", "visuospatial", "brainstem", "other")
_KNOWN: dict[str, Kind] = {
    **dict.fromkeys(("delay_h", "age", "systolic", "hour", "weekday"), "number"),
    **dict.fromkeys(("woke_with", "atrial_fib", "ct_before", "heparin_24h", "aspirin_3d"), "yes/no"),
    **dict.fromkeys(("sex", "conscious", "syndrome", *(f"deficit_{each}" for each in _DEFICITS)), "category"),
}
_LEFT_OUT = {
    "hospital": "its name says that it is an identifier",
    "haemorrhage": "an outcome of 3 % of the patients, too few to learn from at one site",
    "recurrent_14d": "an outcome that no fact known at randomisation predicts",
}


@DATASETS.register("ist", source="International Stroke Trial (Sandercock et al., 2011), doi 10.7488/ds/104, ODC-By")
def ist(
    seed: int, *, limit: Count | None = 150, least: Count = 230, lacked: Annotated[int, Field(ge=0, le=4)] = 2
) -> Dataset:
    """Stroke patients of the 16 countries with at least 230 in the International Stroke Trial, a client each.

    From 21 facts known at randomisation follow six outcomes, measured by AUC: death within 14 days, death or dependence
    and recovery after six months, an infarct on the CT scan, and home after 14 days and six months. Outcomes are never
    inputs. Each country lacks `lacked` of the outcomes, in turn. It has `limit` patients (null: 80 %), two thirds for
    training and one for validation; all others are for tests. A country needs `least` patients to take part.
    """
    table = replace(read(IST, None), where="ist", site="country")
    which, names = sites_of(table, "country")
    big = [number for number in range(len(names)) if (which == number).sum() >= least]
    for place, number in enumerate(big):
        for step in range(lacked):
            outcome = _OUTCOMES[(place + step * (1 + place // len(_OUTCOMES))) % len(_OUTCOMES)]
            table.frame.loc[which == number, outcome] = np.nan
    tasks = {name: Label(kind="binary", classes=("0", "1"), metric="auc") for name in _OUTCOMES}
    split = RowSplit(val_fraction=1 / 3, limit=limit, least=least)  # of 15 patients, a tenth, no AUC says anything
    return replace(build(table, tasks, _KNOWN, "federated", 5, split, seed, _LEFT_OUT), notes=(), doubts=())
