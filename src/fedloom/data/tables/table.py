"""The data sets `table` and `ist`: a table of rows from several sites becomes clients, tasks and inputs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import Field

from fedloom.core.context import derive_seed
from fedloom.core.errors import DataError
from fedloom.core.settings.section import Count, client_name
from fedloom.data.prepare import DATASETS, Array, TestFraction
from fedloom.data.tables.preprocessing import Kind, Label, Mode, fit, numbers
from fedloom.data.tables.read import Code, column_of, read

if TYPE_CHECKING:
    from fedloom.data.dataset import Dataset
    from fedloom.data.partition import Partition, Pool
    from fedloom.models.tasks.task import Task

Inputs = Annotated[dict[str, Kind | list[str]], Field(min_length=1)]
Labels = Annotated[dict[str, Label], Field(min_length=1)]
ValFraction = Annotated[float, Field(ge=0, lt=1)]
EVERYONE = "all"
"""The site of a table without a column of sites."""


@DATASETS.register("table")
def table(
    seed: int,
    *,
    path: str,
    tasks: Labels,
    inputs: Inputs,
    left_out: dict[str, str] | None = None,
    site: str | None = None,
    missing: list[Code] | None = None,
    preprocess: Mode = "federated",
    minimum: Count = 5,
    test_fraction: TestFraction = 0.2,
    val_fraction: ValFraction = 0.1,
    limit: Count | None = None,
    least: Count = 1,
) -> Dataset:
    """A table of several sites, a client each: a CSV file (also .gz, .xz), a Parquet file, or a folder with one a site.

    `site` is the column of a row's site; in a folder, without one, the files' names are the sites. `tasks` are labels,
    {task: {kind: binary, classification or regression, ...}}, of the column `column` (by default the task's name);
    `classes` are in their order. `inputs` are {column: number, yes/no, category, or a list of categories}, and
    `left_out` are all other columns with the reason. `missing` are cells that mean missing, beside empty ones, NA and
    NaN. `fedloom init FILE` writes all of these.

    A row without a label of a task is left out for this task only, and a site that has no label of a task lacks it.
    Each site's rows are split by itself: the share `test_fraction` for tests, and of the rest `val_fraction` for
    validation, each spread over the labels. With `limit` a site has that many rows for training and validation, and
    the rest is for tests; sites of fewer than `least` rows take no part.

    Numbers are standardised and missing ones become the mean, with an input that says so; a category becomes an input
    for each of its values. `preprocess: federated` takes the mean, the deviation and the categories from counts and
    sums that sites send of their training rows, without cells of fewer than `minimum` rows; `local` sends nothing: each
    site is scaled by its own numbers, and the recipe lists the categories.

    Raises DataError for what does not fit, naming the column and the site.
    """
    frame, where, site = read(path, site)
    rules = Split(test_fraction, val_fraction, limit, least)
    named = {**inputs}
    return build(frame, where, tasks, named, site, missing or (), preprocess, minimum, rules, seed, left_out)


@dataclass(frozen=True)
class Split:
    """How each site's rows are split."""

    test: float = 0.2
    val: float = 0.1
    limit: int | None = None
    least: int = 1

    def of(self, labels: Sequence[Array], seed: int, site: str) -> tuple[Array, Array, Array]:
        """Return positions of one site's train, validation and test rows, each spread over the labels."""
        count = len(labels[0])
        rng = np.random.default_rng(derive_seed(seed, "data", "table", site))
        order = np.lexsort((rng.permutation(count), *reversed(labels)))
        test = min(max(round(self.test * count), 1), count - 1)
        if self.limit is not None:
            test = max(test, count - self.limit)
        order, tests = _spread(order, test, rng)
        val = min(max(round(self.val * len(order)), 1), len(order) - 1) if self.val and len(order) > 2 else 0
        train, vals = _spread(order, val, rng)
        return np.sort(train), np.sort(vals), np.sort(tests)


def _spread(order: Array, count: int, rng: np.random.Generator) -> tuple[Array, Array]:
    """Return the rest of an order and `count` members at equal distances."""
    taken = np.zeros(len(order), bool)
    taken[((np.arange(count) + rng.random()) * len(order) / max(count, 1)).astype(int)] = True
    return order[~taken], order[taken]


@dataclass(frozen=True, eq=False)
class Rows:
    """Who holds which rows of a table, with all labels."""

    labels: Mapping[str, Array]
    """Task -> a label for each row: a class (-1: none) or a real number (NaN: none)."""
    parts: Mapping[str, tuple[Array, Array, Array]]
    """Site -> rows of its train, validation and test part."""
    notes: tuple[str, ...]


def name_of(site: str) -> str:
    """Return a site's name as that of a client."""
    return client_name(re.sub(r"[^\w .-]", "-", site).lstrip(" .-") or "site")


def sites_of(frame: Any, site: str | None, where: str) -> tuple[Array, list[str]]:
    """Return each row's site by number, and the sites' names in their order. Raises DataError where one is missing."""
    if site is None:
        return np.zeros(len(frame), np.int64), [EVERYONE]
    column = column_of(frame, site, (), where)
    absent = np.flatnonzero(column.index < 0)
    if len(absent):
        rows = ", ".join(str(row + 1) for row in absent[:3])
        raise DataError(
            f"{where}, column {site!r}: {len(absent)} rows have no site, such as row {rows}; fill it in or remove them"
        )
    names = [name_of(text) for text in column.distinct]
    for name, text in zip(names, column.distinct, strict=True):
        if names.count(name) > 1:
            same = [other for other, made in zip(column.distinct, names, strict=True) if made == name and other != text]
            raise DataError(
                f"{where}, column {site!r}: sites {text!r} and {same[0]!r} would both be client {name!r}; rename one"
            )
    order = sorted(range(len(names)), key=names.__getitem__)
    return np.argsort(order)[column.index], [names[i] for i in order]


def labels_of(frame: Any, tasks: Mapping[str, Label], missing: Sequence[Code], where: str) -> dict[str, Array]:
    """Return each task's labels. Raises DataError for a cell that is no label of its task."""
    found = {}
    for name, label in tasks.items():
        column = column_of(frame, label.column or name, missing, where)
        if label.kind == "regression":
            found[name] = numbers(column, "regression", f"{where}, task {name!r}")
            if (np.abs(found[name]) > np.finfo(np.float32).max).any():
                raise DataError(f"{where}, column {column.name!r}: numbers above 3e38 found; divide the label")
            continue
        found[name], strange = column.coded(label.classes)
        if strange:
            listed = ", ".join(label.classes[:20])
            raise DataError(
                f"{where}, column {column.name!r}: the label {strange[0]!r} found, expected {listed}; add it to "
                f"data.tasks.{name}.classes, or to data.missing if it means missing"
            )
    return found


def labelled(labels: Array) -> Array:
    """Return which rows have a label: a class (-1: none) or a real number (NaN: none)."""
    return ~np.isnan(labels) if labels.dtype.kind == "f" else labels >= 0


def rows_of(
    frame: Any,
    where: str,
    tasks: Mapping[str, Label],
    site: str | None,
    missing: Sequence[Code],
    split: Split,
    seed: int,
) -> Rows:
    """Read labels, and split each site's rows that have one. Raises DataError where nothing is left to learn."""
    labels = labels_of(frame, tasks, missing, where)
    which, names = sites_of(frame, site, where)
    has = {task: labelled(column) for task, column in labels.items()}
    useful, notes = np.any([*has.values()], axis=0), []
    if not useful.all():
        notes.append(f"rows without a label of any task, left out: {int((~useful).sum()):,}")
    parts = {}
    for number, name in enumerate(names):
        rows = np.flatnonzero((which == number) & useful)
        if len(rows) < split.least:
            notes.append(f"site {name!r} is left out: {len(rows)} labelled rows found, at least {split.least} needed")
            continue
        own = [np.nan_to_num(column[rows], nan=-np.inf) for column in labels.values()]
        parts[name] = tuple(rows[part] for part in split.of(own, seed, name))
    if not parts:
        raise DataError(f"{where}: no row has a label of {', '.join(tasks)}")
    for task, there in has.items():
        holders = [name for name, (train, _, _) in parts.items() if there[train].any()]
        if not holders:
            column = tasks[task].column or task
            raise DataError(f"{where}, column {column!r}: no site has a training row with a label; leave the task out")
        if lacking := [name for name in parts if name not in holders]:
            notes.append(f"no label of task {task!r} to train on: {_some(lacking)}")
        if tasks[task].kind != "regression":
            single = [
                name for name in holders if len(np.unique(labels[task][parts[name][0]][there[parts[name][0]]])) < 2
            ]
            if single:
                notes.append(f"one class only of task {task!r} to train on: {_some(single)}")
    return Rows(labels, parts, tuple(notes))  # type: ignore[arg-type]


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more


def task_of(name: str, label: Label) -> Task:
    """Return the task that a label describes."""
    from fedloom.models.tasks.classification import Classification
    from fedloom.models.tasks.regression import Regression

    if label.kind == "regression":
        return Regression(name, mean=label.mean or 0.0, std=label.std or 1.0, judge=label.judge)
    return Classification(name, len(label.classes), judge=label.judge)


def build(
    frame: Any,
    where: str,
    tasks: Mapping[str, Label],
    inputs: Mapping[str, Kind | Sequence[str]],
    site: str | None,
    missing: Sequence[Code],
    mode: Mode,
    minimum: int,
    split: Split,
    seed: int,
    left_out: Mapping[str, str] | None = None,
    name: str = "",
) -> Dataset:
    """Make the data set of a table that was read."""
    import torch

    from fedloom.data.dataset import Dataset, TensorExamples
    from fedloom.data.partition import Partition, Share

    for task, label in tasks.items():
        if (label.column or task) in inputs:
            raise DataError(f"{where}: column {label.column or task!r} is a label and an input; leave it out of one")
    rows = rows_of(frame, where, tasks, site, missing, split, seed)
    trains = {who: train for who, (train, _, _) in rows.parts.items()}
    made = fit(frame, where, inputs, tasks, trains, site, missing, mode, minimum)
    whose = np.full(len(frame), -1)
    for number, parts in enumerate(rows.parts.values()):
        whose[np.concatenate(parts)] = number
    keep = np.flatnonzero(whose >= 0)
    x = made.apply(frame.iloc[keep], list(rows.parts), whose[keep], where)
    learned = np.sort(np.concatenate([part for train, val, _ in rows.parts.values() for part in (train, val)]))
    tests = np.sort(np.concatenate([test for _, _, test in rows.parts.values()]))
    known = tuple(task_of(task, label) for task, label in made.tasks.items())

    def examples(index: Array) -> TensorExamples:
        labels, annotated = {}, {}
        for task, column in rows.labels.items():
            mine = column[index]
            real = mine.dtype.kind == "f"
            labels[task] = torch.from_numpy(mine.astype(np.float32 if real else np.int64))
            if real:
                annotated[task] = ~np.isnan(mine)
        domain = None if site is None else torch.from_numpy(whose[index])
        return TensorExamples(torch.from_numpy(x[np.searchsorted(keep, index)]), labels, domain, annotated=annotated)

    shares = []
    for who, (train, val, _) in rows.parts.items():
        held = [task for task, column in rows.labels.items() if labelled(column[train]).any()]
        if not held:
            raise DataError(f"{where}, site {who!r}: no training row has a label; leave its rows out")
        own, apart = (np.searchsorted(learned, part) for part in (train, val))
        shares.append(Share(who, dict.fromkeys(held, 1.0), own, apart, None if site is None else who))
    partition = Partition(tuple(shares))

    def deal(pool: Pool, seed: int) -> Partition:
        return partition

    unknown = [c for c in map(str, frame.columns) if c not in {*inputs, *(left_out or {}), site, *_columns(tasks)}]
    notes = [f"column {column!r} of the table is neither input nor label" for column in unknown]
    return Dataset(
        name or Path(where).name.split(".")[0],
        known,
        examples(learned),
        examples(tests),
        tuple(rows.parts) if site is not None else (),
        deal,
        classes={task: label.classes for task, label in tasks.items() if label.classes},
        table=made,
        notes=(*rows.notes, *notes),
    )


def _columns(tasks: Mapping[str, Label]) -> set[str]:
    return {label.column or task for task, label in tasks.items()}


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
    "recurrent_14d": "an outcome that nothing known at randomisation tells",
}


@DATASETS.register("ist", source="International Stroke Trial (Sandercock et al., 2011), doi 10.7488/ds/104, ODC-By")
def ist(
    seed: int,
    *,
    limit: Count | None = 150,
    least: Count = 230,
    lacked: Annotated[int, Field(ge=0, le=4)] = 2,
) -> Dataset:
    """Stroke patients of the 16 countries with at least 230 in the International Stroke Trial, a client each.

    From 21 facts known at randomisation follow six outcomes, measured by AUC: death within 14 days, death or
    dependence and recovery after six months, an infarct on the CT scan, and home after 14 days and six months. Outcomes
    are never inputs. Each country lacks `lacked` of the outcomes, in turn. It has `limit` patients for training and
    validation (null: 80 %); all others are for tests. `least` is how many patients a country needs to take part.
    """
    frame, _, _ = read(IST, None)
    which, names = sites_of(frame, "country", "ist")
    big = [number for number in range(len(names)) if (which == number).sum() >= least]
    for place, number in enumerate(big):
        for step in range(lacked):
            outcome = _OUTCOMES[(place + step * (1 + place // len(_OUTCOMES))) % len(_OUTCOMES)]
            frame.loc[which == number, outcome] = np.nan
    tasks = {name: Label(kind="binary", classes=("0", "1"), metric="auc") for name in _OUTCOMES}
    split = Split(limit=limit, least=least)
    made = build(frame, "ist", tasks, _KNOWN, "country", (), "federated", 5, split, seed, _LEFT_OUT)
    return replace(made, notes=())
