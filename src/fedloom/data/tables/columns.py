"""Which columns of a table are inputs and labels, and which are left out and why: what `fedloom init` writes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
from pydantic import ValidationError

from fedloom.core.errors import DataError, choices
from fedloom.data.prepare import Array
from fedloom.data.tables.preprocessing import Kind, Label, Mode
from fedloom.data.tables.read import THOUSANDS, Code, Column, column_of, read
from fedloom.data.tables.table import Split, labelled, rows_of

AUC, R2 = 0.97, 0.9
"""A column that tells a label this well alone is taken for another form of it."""
CATEGORIES = 50
"""A text column with more values is no category, unless it is named."""
CODES = 5
"""Whole numbers of so few values are codes, each a category; a linear model loses nothing by it."""
CLASSES = 20
"""Whole numbers of more values are a real number as a label."""
_ROWS = 20_000
"""As many training rows are enough to look at."""
_TAKEN = {
    *("type", "keys", "values", "items", "pop", "clear", "update", "train", "training", "eval", "half", "float"),
    *("double", "apply", "forward", "to", "cpu", "cuda", "modules", "children", "parameters", "buffers", "compile"),
}
"""Columns that cannot be a task under their own name, because torch.nn.ModuleDict has an attribute of that name."""
_IDENTIFIERS = {
    *("hospital", "clinic", "centre", "center", "patient", "subject", "name", "id", "ids", "uid", "uuid", "guid"),
    *("mrn", "ssn", "identifier", "index", "email", "phone"),
}
_OUTCOMES = {
    *("outcome", "outcomes", "death", "dead", "died", "deceased", "mortality", "survival", "survived", "alive"),
    *("relapse", "readmission", "readmitted", "recurrence", "recovered", "target", "label", "diagnosis"),
}


@dataclass(frozen=True, eq=False)
class Draft:
    """A table with what its columns are."""

    frame: Any
    where: str
    site: str | None
    tasks: Mapping[str, Label]
    inputs: Mapping[str, Kind | list[str]]
    left_out: Mapping[str, str]
    missing: tuple[Code, ...]
    mode: Mode
    allowed: frozenset[str]
    """Columns that are left out, but may be inputs where they are named."""

    @property
    def section(self) -> dict[str, Any]:
        """The keys of a recipe's section `data`."""
        tasks = {task: label.model_dump(mode="json", exclude_defaults=True) for task, label in self.tasks.items()}
        found: dict[str, Any] = {"site": self.site, "tasks": tasks, "inputs": dict(self.inputs)}
        found |= {"left_out": dict(self.left_out), "missing": list(self.missing), "preprocess": self.mode}
        return {key: value for key, value in found.items() if value not in (None, {}, [], "federated")}

    def told(self) -> list[str]:
        """Lines that say what is used as label and as input, and what is left out and why."""
        labels = [
            f"{label.column or task} ({label.kind}{': ' + ', '.join(label.classes[:10]) if label.classes else ''})"
            for task, label in self.tasks.items()
        ]
        inputs = [f"{name} ({kind if isinstance(kind, str) else 'category'})" for name, kind in self.inputs.items()]
        lines = [f"labels: {', '.join(labels)}", f"inputs: {', '.join(inputs)}"]
        asked = [name for name, why in self.left_out.items() if why == ASKED]
        lines += [f"left out as asked: {', '.join(asked)}"] if asked else []
        return [*lines, *self.refused, *([ALLOW] if self.allowed else [])]

    @property
    def refused(self) -> list[str]:
        """A sentence for each reason for which columns are left out though nobody asked for that."""
        reasons: dict[str, list[str]] = {}
        for name, why in self.left_out.items():
            if why != ASKED:
                reasons.setdefault(why, []).append(name)
        return [f"left out: {', '.join(names)}: {why}" for why, names in reasons.items()]


ASKED = "as asked"
ALLOW = "To use such a column, name all inputs with --features; to agree, name it with --leave-out."


def draft(
    source: Any,
    labels: Sequence[str] | Mapping[str, Mapping[str, Any]],
    site: str | None = None,
    features: Sequence[str] | None = None,
    leave_out: Sequence[str] = (),
    missing: Sequence[Code] = (),
    mode: Mode = "federated",
    minimum: int = 5,
    split: Split | None = None,
) -> Draft:
    """Look at a table and say what each column is.

    `labels` are columns, or {column: what is known of the task: kind, classes, metric}; `features` and `leave_out` are
    names or globs. With `features` these columns are inputs whatever they tell; without, a column is left out that
    nearly predicts a label alone, looks like an outcome or an identifier, or has nothing to learn from.

    Raises DataError for a column that is not there, a label that cannot be one, and where no input is left.
    """
    frame, where, site = read(source, site)
    names = [str(name) for name in frame.columns]
    columns = {name: Column(frame[name], missing) for name in names}
    if not labels:
        raise DataError(f"{where}: no label is named, expected at least one of {', '.join(names[:20])}")
    for name in (*labels, *([site] if site is not None else [])):
        column_of(frame, name, missing, where)
        if name == site and name in labels:
            raise DataError(f"{where}, column {name!r}: it is the column of the sites, so it cannot be a label")
    given = labels if isinstance(labels, Mapping) else {name: {} for name in labels}
    tasks: dict[str, Label] = {}
    for name, known in given.items():
        task = task_name(name)
        if task in tasks:
            raise DataError(f"{where}, column {name!r}: its task would be called {task!r} like another; rename it")
        try:
            tasks[task] = label_of(columns[name], known, where, mode)
        except ValidationError as error:
            raise DataError(f"{where}, column {name!r}: {error.errors()[0]['msg'].partition(', ')[2]}") from None
        if task != name:
            tasks[task] = tasks[task].model_copy(update={"column": name})
    chosen = _matching(features, names, where, "features") if features is not None else None
    away = _matching(leave_out, names, where, "leave_out")
    if twice := [name for name in chosen or () if name in given or name == site]:
        raise DataError(f"{where}, column {twice[0]!r}: it is a label or the site, so it cannot be an input as well")
    rows = rows_of(frame, where, tasks, site, missing, split or Split(), 0)
    trains = [train for train, _, _ in rows.parts.values()]
    train = np.sort(np.concatenate(trains))
    some = train[:: -(-len(train) // _ROWS)]
    outcomes = set() if chosen is not None else set(_outcome_block(names, columns, given, site))
    inputs: dict[str, Kind | list[str]] = {}
    left_out: dict[str, str] = {}
    allowed: set[str] = set()
    for name in names:
        if name in given or name == site:
            continue
        column = columns[name]
        if name in away or (chosen is not None and name not in chosen):
            left_out[name] = ASKED
            continue
        kind, why = kind_of(column, named=chosen is not None)
        if why and kind_of(column, named=True)[0] is not None:
            allowed.add(name)
        if kind is not None and mode == "federated" and not _sent(column, kind, trains, minimum):
            why = (
                f"no site has {minimum} training rows with one value, so none would be sent; preprocess: local takes it"
            )
        if kind is not None and not why and chosen is None:
            why = _suspicious(column, kind, name in outcomes, tasks, rows.labels, some)
            allowed |= {name} if why else set()
        if why and chosen is not None:
            raise DataError(f"{where}, column {name!r}: {why}")
        if why:
            left_out[name] = why
        elif kind is not None:
            inputs[name] = kind if kind != "category" or mode == "federated" else column.distinct
    if not inputs:
        said = "; ".join(f"{name}: {why}" for name, why in list(left_out.items())[:3])
        raise DataError(f"{where}: no column is left as an input ({said}); name some with features")
    return Draft(frame, where, site, tasks, inputs, left_out, tuple(missing), mode, frozenset(allowed))


def task_name(column: str) -> str:
    """Return the name of a column's task, which is part of the names of parameters."""
    name = re.sub(r"[^A-Za-z0-9_-]+", "_", column).strip("_") or "task"
    return f"{name}_task" if name in _TAKEN else name


def label_of(column: Column, known: Mapping[str, Any], where: str, mode: Mode) -> Label:
    """Return what a column is as a label; `known` says what is already decided. Raises DataError where it is none."""
    about = f"{where}, column {column.name!r}"
    kind, metric, count = known.get("kind"), known.get("metric"), known.get("classes")
    if column.is_date:
        raise DataError(f"{about}: dates found, expected a label; make a number of it, such as days since admission")
    texts = bool(column.not_numbers)
    few = column.series.nunique() <= max(CLASSES, count or 0)
    whole = not texts and bool((column.numbers[np.isfinite(column.numbers)] % 1 == 0).all())
    if kind is None:
        kind = "classification" if texts or (few and (whole or count)) else "regression"
    elif kind == "ordinal" or kind not in ("binary", "classification", "regression"):
        raise DataError(f"{about}: kind {kind!r} found, expected binary, classification or regression for a column")
    if kind == "regression":
        if texts:
            raise DataError(f"{about}: the label has numbers and {column.not_numbers[0]!r}; {_perhaps_missing(column)}")
        values = column.numbers[~np.isnan(column.numbers)]
        if not len(values):
            raise DataError(f"{about}: no cell has a label; leave the task out")
        if np.isinf(values).any():
            raise DataError(f"{about}: {int(np.isinf(values).sum())} infinite labels found; remove them")
        if mode == "federated":
            return Label(kind=kind, metric=metric)
        std = float(f"{values.std():.3g}")
        return Label(kind=kind, metric=metric, mean=float(f"{values.mean():.3g}"), std=std if std > 0 else 1.0)
    if texts and 0 < len(column.not_numbers) < len(column.distinct) and len(column.distinct) > CLASSES:
        raise DataError(
            f"{about}: numbers and texts such as {column.not_numbers[0]!r} found; {_perhaps_missing(column)}"
        )
    if not len(column.distinct):
        raise DataError(f"{about}: no cell has a label; leave the task out")
    if len(column.distinct) < 2:
        raise DataError(f"{about}: all labels are {column.distinct[0]!r}, so there is nothing to learn; leave it out")
    if len(column.distinct) > max(len(column.series) // 2, 2):
        raise DataError(
            f"{about}: {len(column.distinct)} different labels in {len(column.series)} rows found, expected classes "
            "that occur several times, or numbers"
        )
    classes = column.distinct
    if column.yes is not None:  # no before yes, whatever the alphabet says
        classes = sorted(classes, key=lambda text: float(column.yes[column.index == classes.index(text)][0]))  # type: ignore[index]
    if count is not None and count < len(classes):
        raise DataError(f"{about}: classes={count} found, but there are {len(classes)}: {', '.join(classes[:10])}")
    if count is not None and count > len(classes):
        if not whole or column.numbers[column.present].min() < 0 or column.numbers[column.present].max() >= count:
            raise DataError(f"{about}: classes={count} found, but the labels are {', '.join(classes[:10])}")
        classes = [str(number) for number in range(count)]
    if kind == "binary" and len(classes) != 2:
        raise DataError(f"{about}: {len(classes)} labels found, expected two for kind binary: {', '.join(classes[:5])}")
    two = len(classes) == 2 and known.get("kind") in (None, "binary")
    return Label(kind="binary" if two else "classification", classes=tuple(classes), metric=metric)


def kind_of(column: Column, named: bool) -> tuple[Kind | None, str]:
    """Return what a column is as an input, or why it cannot be one. With `named` it may have any number of values."""
    if column.is_date:
        return None, "it has dates; make a number of it, such as an age or days since admission"
    numeric = column.series.dtype.kind in "iuf" or (not column.not_numbers and len(column.distinct) > 0)
    if numeric:
        values = column.numbers
        values = values[~np.isnan(values)]
        if np.isinf(values).any():
            return None, f"it has {int(np.isinf(values).sum())} infinite numbers"
        if len(values) and np.abs(values).max() > 1e150:
            return None, f"it has numbers up to {np.abs(values).max():.3g}, whose squares are too large to add up"
        distinct = len(np.unique(values))
    else:
        distinct = len(column.distinct)
    if not distinct:
        return None, "no cell has a value"
    if distinct == 1:
        return (None, "it has one value only") if column.present.all() else ("category", "")
    if not named:
        count, whole = int(column.present.sum()), numeric and bool((column.numbers[column.present] % 1 == 0).all())
        words = _words(column.name)
        if {*words[:1], *words[-1:]} & _IDENTIFIERS or re.fullmatch(r"column \d+", column.name):
            return None, "its name says that it is an identifier"
        if (not numeric or whole) and count >= 20 and distinct > 0.95 * count:
            return None, f"{distinct} of {count} values differ, so it looks like an identifier"
    if numeric:
        if distinct == 2 and set(np.unique(values)) == {0.0, 1.0}:
            return "yes/no", ""
        return ("category" if distinct <= CODES and not (values % 1).any() else "number"), ""
    if column.yes is not None:
        return "yes/no", ""
    strange = column.not_numbers
    if all(THOUSANDS.fullmatch(text) for text in strange):
        return (
            None,
            f"the comma in numbers such as {strange[0]!r} may be decimal or not; write them without",
        )
    if len(strange) < len(column.distinct) and len(column.distinct) - len(strange) > 5 * len(strange):
        return None, (f"it has numbers and {len(strange)} texts such as {strange[0]!r}; {_perhaps_missing(column)}")
    if distinct > CATEGORIES and not named:
        return None, f"it has {distinct} different texts, more than {CATEGORIES}"
    return "category", ""


def _perhaps_missing(column: Column) -> str:
    return f"if that means missing, name it with --missing '{column.not_numbers[0]}'"


def _words(name: str) -> list[str]:
    return re.findall(r"[a-z]+", re.sub(r"([a-z])([A-Z])", r"\1 \2", name).lower())


def _matching(globs: Sequence[str], names: Sequence[str], where: str, what: str) -> set[str]:
    """Return the columns that some names or globs stand for. Raises DataError for one that stands for none."""
    found = set()
    for glob in globs:
        some = [name for name in names if name == glob or fnmatchcase(name, glob)]
        if not some:
            raise DataError(f"{where}, {what}: no column {glob!r}.{choices('Found', glob, names)}")
        found |= set(some)
    return found


def _sent(column: Column, kind: Kind, trains: Sequence[Array], minimum: int) -> bool:
    """Return whether any site has enough training rows with one value (of numbers: with any)."""
    for rows in trains:
        if kind == "number":
            most = int((~np.isnan(column.numbers[rows])).sum())
        else:
            index = column.index[rows]
            most = int(np.bincount(index[index >= 0], minlength=1).max())
        if most >= minimum:
            return True
    return False


def _outcome_block(
    names: Sequence[str], columns: Mapping[str, Column], labels: Mapping[str, Any], site: str | None
) -> Iterator[str]:
    """Yield columns that stand among the labels at the table's end and have the same values.

    Tables have their outcomes last; where one of them is a label, the others are no inputs.
    """

    def values(name: str) -> tuple[str, ...] | None:
        column = columns[name]
        return tuple(column.distinct) if column.series.nunique() <= CLASSES else None

    coded = {name: values(name) for name in names}
    label = next((name for name in names if name in labels and coded[name] is not None), None)
    if label is None:
        return
    block: list[str] = []
    for name in reversed(names):
        if name not in labels and coded[name] is not None and not coded[name]:
            continue  # an empty column parts nothing
        if coded[name] != coded[label]:
            break
        block.append(name)
    others = [name for name in names if name not in block and name != site]
    if label not in block or not others:
        return
    special = len(block) >= 6 and all(coded[name] != coded[label] for name in others)
    first = names.index(label)
    yield from (name for name in block if name not in labels and (special or names.index(name) > first))


def _suspicious(
    column: Column, kind: Kind, in_block: bool, tasks: Mapping[str, Label], labels: Mapping[str, Array], rows: Array
) -> str:
    """Return why a column should not be an input by itself, or an empty text."""
    if found := [word for word in _words(column.name) if word in _OUTCOMES]:
        return f"its name says that it is an outcome ({found[0]})"
    if in_block:
        return "it stands among the outcomes at the table's end and has the label's values"
    for task, label in tasks.items():
        measure, value = told_by(column, kind, label, labels[task], rows)
        if value > (R2 if measure == "R2" else AUC):
            return f"it tells the label {task!r} nearly by itself ({measure} {value:.3f} on training rows)"
    return ""


def told_by(column: Column, kind: Kind, label: Label, labels: Array, rows: Array) -> tuple[str, float]:
    """Return how well a column alone tells a label on some rows: ("AUC" or "R2", value)."""
    real = label.kind == "regression"
    y = labels[rows]
    there = labelled(y)
    rows, y = rows[there], y[there].astype(np.float64)
    measure = "R2" if real else "AUC"
    if len(y) < 20 or len(np.unique(y)) < 2:
        return measure, 0.0
    some = column.numbers[rows] if kind == "number" else None
    levels = np.unique(some[~np.isnan(some)]) if some is not None else None
    if levels is not None and some is not None and len(levels) <= CLASSES:
        codes = np.where(np.isnan(some), -1, np.searchsorted(levels, some))
    elif some is None:
        codes = column.index[rows]
    else:
        codes = np.where(np.isnan(some), -1, 0)  # of many numbers, whether there is one
    common: Any = np.argsort(-np.bincount(y.astype(int)))[:CLASSES] if not real else []
    targets = [y] if real else [found for value in common if (found := (y == value).astype(np.float64)).any()]
    weights = [1.0] if real else [float(target.sum()) for target in targets]
    best = float(np.average([_agreement(_means(codes, t), t, real) for t in targets], weights=weights))
    if some is not None and levels is not None and len(levels) > CLASSES:
        whole = ~np.isnan(some)
        if whole.sum() >= 20:
            found = [_agreement(some[whole], target[whole], real) for target in targets]
            best = max(best, float(np.average(found, weights=weights)))
    return measure, best


def _means(codes: Array, y: Array) -> Array:
    """Return the mean label of each row's group; groups of fewer than five rows tell nothing."""
    index = codes - codes.min()
    count = np.bincount(index)
    mean = np.where(count >= 5, np.bincount(index, y) / np.maximum(count, 1), y.mean())
    found: Array = mean[index]
    return found


def _agreement(score: Array, y: Array, real: bool) -> float:
    """Return R2 of a score (linear, or of the ranks), or the area under the ROC curve in its better direction."""
    if len(np.unique(score)) < 2 or len(np.unique(y)) < 2:
        return 0.0
    if real:
        return float(max(np.corrcoef(a, b)[0, 1] ** 2 for a, b in ((score, y), (_ranks(score), _ranks(y)))))
    positive = y > 0
    n, m = int(positive.sum()), int((~positive).sum())
    auc = (_ranks(score)[positive].sum() - n * (n - 1) / 2) / (n * m)
    return float(max(auc, 1 - auc))


def _ranks(values: Array) -> Array:
    """Return ranks from 0, ties in the mean."""
    from pandas import Series

    found: Array = Series(values).rank().to_numpy() - 1
    return found
