"""The roles of a table's columns: inputs, labels, and those left out with the reason; `fedloom init` writes them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import ValidationError

from fedloom.core.errors import DataError, choices, first_of, shortened
from fedloom.core.grouping import grouped
from fedloom.data.inputs import ending
from fedloom.data.prepare import PARTS, Array, alike, has_label
from fedloom.data.tables.preprocessing import Kind, Label, Mode, label_columns, statistics
from fedloom.data.tables.read import AROUND, THOUSANDS, Code, Column, Table, read, text_of
from fedloom.data.tables.table import RowSplit, at_several, rows_of, sites_of, task_name, uneven

AUC, R2 = 0.97, 0.9
"""A column that tells a label this well alone is taken for another form of it."""
CATEGORIES = 50
"""A text column with more values is no category, unless it is named."""
CODES = 5
"""Whole numbers of so few values are codes, each a category; a linear model loses nothing by it."""
LONG = 200
"""A text with more characters is no category."""
WORDS = 5
"""Texts that all differ are sentences, which are no input of a table, if they have that many words in the mean."""
KINDS = ("binary", "classification", "ordinal", "regression")
"""Kinds of a label that is one column."""
LISTED = 100
"""More columns of one kind than so many are not listed one by one."""
CLASSES = 20
"""Whole numbers of more values are a real number as a label."""
_ROWS = 20_000  # as many training rows are enough to look at
_TAKEN = {
    *("type", "keys", "values", "items", "pop", "clear", "update", "train", "training", "eval", "half", "float"),
    *("double", "apply", "forward", "to", "cpu", "cuda", "modules", "children", "parameters", "buffers", "compile"),
}
"""Columns that cannot be a task under their own name, because torch.nn.ModuleDict has an attribute of that name."""
_SITES = {"hospital", "clinic", "centre", "center"}
_IDENTIFIERS = {
    *(*_SITES, "patient", "subject", "name", "id", "ids", "uid", "uuid", "guid"),
    *("mrn", "ssn", "identifier", "index", "email", "phone", "person", "participant", "wearer", "recording", "session"),
}
_OUTCOMES = {
    *("outcome", "outcomes", "death", "dead", "died", "deceased", "mortality", "survival", "survived", "alive"),
    *("relapse", "readmission", "readmitted", "recurrence", "recovered", "target", "label", "diagnosis"),
}


ONE_PATIENT = "rows of one patient"
"""The words that the sentence about an identifier with repeated values has."""


@dataclass(frozen=True, eq=False)
class Draft:
    """A table and the roles of its columns."""

    name: ClassVar[str] = "table"
    signal: ClassVar[Literal["features"]] = "features"
    table: Table
    tasks: Mapping[str, Label]
    inputs: Mapping[str, Kind | list[str]]
    left_out: Mapping[str, str]
    mode: Mode
    allowed: frozenset[str]
    """Columns that are left out, but may be inputs where they are named."""
    notes: tuple[str, ...]
    """Sentences about rows, sites and labels."""
    split: str | None = None
    """The column that names the part of each row."""

    @property
    def section(self) -> dict[str, Any]:
        """The keys of a recipe's section `data`."""
        section: dict[str, Any] = {"site": self.table.site, "tasks": stated(self.tasks), "inputs": dict(self.inputs)}
        section |= {"left_out": self.stored, "missing": list(self.table.missing), "preprocess": self.mode}
        section |= {"split": self.split, "rename": dict(self.table.rename)}
        return {key: value for key, value in section.items() if value not in (None, {}, [], "federated")}

    @property
    def stored(self) -> dict[str, str]:
        """The columns that are left out, with reasons that quote no cell: recipes and reports are sent to others."""
        return {name: _CELLS.sub("", why) for name, why in self.left_out.items()}

    def lines(self) -> list[str]:
        """Return lines that name the labels, the inputs, and the columns that are left out with the reason."""
        inputs = [f"{name} ({kind if isinstance(kind, str) else 'category'})" for name, kind in self.inputs.items()]
        lines = [named(self.tasks), f"inputs: {first_of(inputs, LISTED)}"]
        if asked := [name for name, why in self.left_out.items() if why == ASKED]:
            lines.append(f"left out as asked: {first_of(asked, LISTED)}")
        allowed = first_of([name for name in self.left_out if name in self.allowed])
        return [*lines, *self.refused, *([ALLOW.format(allowed)] if allowed else []), *self.notes]

    @property
    def refused(self) -> list[str]:
        """A sentence for each reason for which columns are left out though nobody asked for that."""
        reasons = grouped((why, name) for name, why in self.left_out.items() if why != ASKED)
        return shortened(f"left out: {first_of(names, LISTED)}: {why}" for why, names in reasons.items())


def stated(tasks: Mapping[str, Label]) -> dict[str, Any]:
    """Return labels as a recipe states them."""
    return {task: label.model_dump(mode="json", exclude_defaults=True) for task, label in tasks.items()}


def named(tasks: Mapping[str, Label]) -> str:
    """Return a line with the columns of the labels, their kinds and some of their classes."""
    labels = []
    for task, label in tasks.items():
        names = label.classes or label.columns
        name = task if label.root is not None else label.column or task
        labels.append(f"{name} ({label.kind}{': ' + ', '.join(names[:10]) if names else ''})")
    return f"labels: {', '.join(labels)}"


ASKED = "as asked"
_CELLS = re.compile(r""",? such as ('([^'\\]|\\.)*'|"([^"\\]|\\.)*")|; if that means missing, .*""")
ALLOW = "To use {}, name all inputs with --features; to agree, name what is left out with --leave-out."


def draft(
    source: Any,
    labels: Sequence[str] | Mapping[str, Mapping[str, Any]],
    site: str | None = None,
    features: Sequence[str] | None = None,
    leave_out: Sequence[str] = (),
    missing: Sequence[Code] = (),
    mode: Mode = "federated",
    minimum: int = 5,
) -> Draft:
    """Look at a table, read already or to be read, and find the role of each column.

    `labels` are columns, or {column: what is known of the task: kind, classes, metric}; of a multilabel task {task:
    kind, columns, metric}. `features` and `leave_out` are names or globs. With `features` these columns are inputs
    whatever they tell; without, a column is left out that nearly predicts a label alone, looks like an outcome or an
    identifier, or has nothing to learn from.

    Raises DataError for a column that is not there, a label that cannot be one, and where no input is left.
    """
    table = source if isinstance(source, Table) else read(source, site, missing)
    where, site = table.where, table.site
    names = [str(name) for name in table.frame.columns]
    tasks = labels_in(table, labels, mode)
    wanted = label_columns(tasks)
    chosen = dict.fromkeys(_matching(features, names, where, "features")) if features is not None else None
    away = {*_matching(leave_out, names, where, "leave_out")}
    if twice := [name for name in chosen or () if name in wanted or name == site]:
        raise DataError(f"{where}, column {twice[0]!r}: it is a label or the site, so it cannot be an input as well")
    for name in leave_out:
        if name in wanted or name in (features or ()):
            what = "a label" if name in wanted else "named as an input"
            raise DataError(f"{where}, column {name!r}: it is {what}, so it cannot be left out as well")
    part = split_in(table, {*wanted, site, *away, *(chosen or ())})
    rows = rows_of(table, tasks, RowSplit(split=part), 0)
    trains = [train for train, _, _ in rows.parts.values()]
    train = np.sort(np.concatenate(trains))
    some = train[:: -(-len(train) // _ROWS)]
    outcomes = set() if chosen is not None else set(_outcome_block(table, names, wanted))
    inputs, left_out, allowed = dict[str, Kind | list[str]](), dict[str, str](), set[str]()
    notes = [*rows.notes]
    for name in names:
        if name in wanted or name == site:
            continue
        is_asked = name in away or (chosen is not None and name not in chosen)
        if is_asked or name == part:
            left_out[name] = ASKED if is_asked else "it names the part of each row, train or test (data.split)"
            continue
        column = table.column(name)
        kind, why = kind_of(column, named=chosen is not None)
        is_allowed = bool(why) and kind_of(column, named=True)[0] is not None
        is_category, is_counted = kind == "category", mode == "federated" or kind == "category"
        if kind is not None and is_counted and not any(statistics(column, kind, t, minimum).count for t in trains):
            advice = "" if is_category else "; preprocess: local takes it"
            why = f"no site has {minimum} training rows with one value, so none would be sent{advice}"
        elif kind is not None and not why and chosen is None:
            is_allowed, why = True, _suspicious(column, kind, name in outcomes, tasks, rows.labels, some)
        if why and chosen is not None:
            column.fail(why)
        if why:
            left_out[name] = why
            allowed |= {name} if is_allowed else set()
        elif kind is not None:
            inputs[name] = kind
            if is_category and mode == "local":  # sites send the recipe to each other, so it lists no rare categories
                sent = {value for train in trains for value in statistics(column, kind, train, minimum).values}
                inputs[name] = [text for text in column.distinct if text in sent]
                if rare := len(column.distinct) - len(sent):
                    few = f"with fewer than {minimum} training rows at every site"
                    notes.append(f"{name}: {rare} of {len(column.distinct)} categories are not listed: {few}")
    if not inputs and site is not None and len(rows.parts) * minimum > len(table.frame):
        found = f"{len(table.frame):,} rows of {len(rows.parts):,} clients found, expected at least {minimum} for each"
        raise DataError(f"{where}, column {site!r}: {found}; name a column of sites, such as the hospital")
    if not inputs:
        reasons = "; ".join(f"{name}: {why}" for name, why in list(left_out.items())[:3])
        raise DataError(f"{where}: no column remains as an input ({reasons}); name inputs with features")
    absent = [code for code in table.missing if not any(table.column(name).has(code) for name in names)]
    notes += [f"no cell is {code!r}: does another code mean missing?" for code in absent]
    dates = [name for name in left_out if table.column(name).is_date]
    advice = "rows for tests are drawn at random in time; data.time={0} tests on each site's last rows"
    notes += [f"{name} has times: {advice.format(name)}" for name in dates[:1]]
    notes += shortened(uneven(table, inputs, rows, minimum))
    notes += shortened(repeated(table, [*left_out], inputs, len(rows.parts)))
    return Draft(table, tasks, inputs, left_out, mode, frozenset(allowed), tuple(notes), part)


def split_in(table: Table, used: Collection[str | None]) -> str | None:
    """Return the first column, none of `used`, whose cells are all names of parts, with train and test among them."""
    for column in (table.column(name) for name in map(str, table.frame) if name not in used):
        if column.is_stored_as_numbers:
            continue
        parts = {PARTS.get(text.strip().casefold()) for text in column.distinct[: len(PARTS) + 1]}
        if parts in ({0, 2}, {0, 1, 2}) and column.present.all():
            return column.name
    return None


def labels_in(table: Table, labels: Sequence[str] | Mapping[str, Mapping[str, Any]], mode: Mode) -> dict[str, Label]:
    """Return task -> label, of `labels` as in `draft`. Raises DataError as `draft` does."""
    where, site = table.where, table.site
    if not labels:
        names = ", ".join(list(map(str, table.frame))[:20])
        raise DataError(f"{where}: no label is named, expected at least one of {names}")
    described = labels if isinstance(labels, Mapping) else {name: {} for name in labels}
    wanted = [column for name, known in described.items() for column in known.get("columns") or (name,)]
    for name in (*wanted, *([site] if site is not None else [])):
        table.column(name)
    if site in wanted:
        raise DataError(f"{where}, column {site!r}: it is the column of the sites, so it cannot be a label")
    tasks: dict[str, Label] = {}
    for name, known in described.items():
        plain = task_name(name)  # part of the names of parameters
        task = f"{plain}_task" if plain in _TAKEN else plain
        if task in tasks:
            clash = f"its task would get the name {task!r}, which another task has: rename the column"
            raise DataError(f"{where}, column {name!r}: {clash}")
        several = known.get("kind") == "multilabel"
        try:
            one = labels_of_columns(table, name, known) if several else label_of(table.column(name), known, mode)
        except ValidationError as error:
            raise DataError(f"{where}, column {name!r}: {error.errors()[0]['msg']}") from None
        tasks[task] = one if task == name or several else one.model_copy(update={"column": name})
    return tasks


def label_of(column: Column, known: Mapping[str, Any], mode: Mode) -> Label:
    """Return a column as a label; `known` says what is already decided. Raises DataError where it is none."""
    distinct, numbers = column.distinct, column.numbers
    kind, metric, count = known.get("kind"), known.get("metric"), known.get("classes")
    if column.is_date:
        column.fail("dates found, expected a label: convert them to numbers, such as days since admission")
    if kind not in (None, *KINDS):
        column.fail(f"kind {kind!r} found, expected multilabel, {' or '.join(KINDS)} for a column")
    if kind is None and count is None and (code := _code_in(column)):
        column.fail(f"{code}; if it is a label, say so with fl.task(kind=...) or --labels NAME=KIND")
    texts = column.not_numbers
    if kind is None:
        kind = "regression" if count is None and is_real(column) else "classification"
        kind = "ordinal" if column.order is not None and len(distinct) > 2 else kind
    if kind == "regression":
        if texts:
            if column.are_texts:
                column.finite()  # says which kinds fit
            column.fail(f"the label has numbers and {texts[0]!r}; {_perhaps_missing(column)}")
        values = numbers[~np.isnan(numbers)]
        if not len(values):
            column.fail("no cell has a label: leave the task out")
        if np.isinf(values).any():
            column.fail(f"{int(np.isinf(values).sum())} infinite labels found; remove them")
        if mode == "federated":
            return Label(kind=kind, metric=metric)
        std = float(f"{values.std():.3g}")
        return Label(kind=kind, metric=metric, mean=float(f"{values.mean():.3g}"), std=std if std > 0 else 1.0)
    if isinstance(count, tuple):
        two = len(count) == 2 and known.get("kind") is None
        return Label(kind="binary" if two else kind, classes=count, metric=metric)
    classes = classes_of(column, is_sure=count is not None, is_guess=known.get("kind") is None)
    if count is not None and count < len(classes):
        column.fail(f"classes={count} found, but there are {len(classes)}: {', '.join(classes[:10])}")
    if count is not None and count > len(classes):
        own = numbers[column.present]
        if texts or own.min() < 0 or own.max() >= count or (own % 1).any():
            column.fail(f"classes={count} found, but the labels are {', '.join(classes[:10])}")
        classes = [str(number) for number in range(count)]
    if kind == "binary" and len(classes) != 2:
        column.fail(f"{len(classes)} labels found, expected two for kind binary: {', '.join(classes[:5])}")
    if kind == "ordinal":
        if column.order is None and texts:
            advice = f"set data.tasks.{column.name}.kind=ordinal and its classes in order in a recipe or fl.task"
            column.fail(f"the order of {', '.join(classes[:5])} is unknown: replace them by numbers, or {advice}")
        return Label(kind=kind, classes=tuple(column.order or sorted(classes, key=float)), metric=metric)
    two = len(classes) == 2 and known.get("kind") in (None, "binary")
    return Label(kind="binary" if two else "classification", classes=tuple(classes), metric=metric)


def is_real(column: Column) -> bool:
    """Return whether labels are real numbers rather than classes: they have a fraction, or many values."""
    values = column.numbers[np.isfinite(column.numbers)]
    return not column.not_numbers and (column.series.nunique() > CLASSES or bool((values % 1).any()))


def classes_of(column: Column, is_sure: bool = False, is_guess: bool = False) -> list[str]:
    """Return the different labels of a column, numbers in the order of their size, no before yes. Raises DataError
    where they are no classes; unless the user `is_sure`, also where some look like mistakes."""
    distinct, texts = column.distinct, column.not_numbers
    if 0 < len(texts) < len(distinct) and len(distinct) > CLASSES:
        column.fail(f"numbers and texts such as {texts[0]!r} found; {_perhaps_missing(column)}")
    if not distinct:
        column.fail("no cell has a label: leave the task out")
    if len(distinct) < 2:
        column.fail(f"all labels are {distinct[0]!r}, so there is nothing to learn: leave the column out")
    if len(distinct) > max((n := len(column.series)) // 2, 2):
        wanted = "classes that occur several times" + ", or numbers" * is_guess
        column.fail(f"{len(distinct)} different labels in {n} rows found, expected {wanted}")
    if not is_sure:
        _refuse_strange_classes(column, is_guess)
    if (yes := column.yes) is None:
        return distinct
    return sorted(distinct, key=lambda text: float(yes[column.index == distinct.index(text)][0]))


def _refuse_strange_classes(column: Column, is_guess: bool) -> None:
    """Raise DataError for labels that differ in writing only, or occur once. `is_guess`: they may be no classes."""
    distinct = column.distinct
    for one, other in alike(distinct):
        column.fail(f"labels {one!r} and {other!r} found, which differ in case only; write them alike")
    if len(distinct) > 2 and column.yes is not None:
        column.fail(f"{', '.join(distinct)} found for yes and no; write all yes alike and all no alike")
    sizes = np.bincount(column.index[column.index >= 0])
    if (once := np.flatnonzero(sizes == 1)).size and len(column.series) >= 20:
        one = distinct[once[0]]
        is_amount = is_guess and not column.not_numbers
        amounts = f", or if labels are amounts, use --labels '{column.name}=regression'" if is_amount else ""
        advice = f"correct it, or if it means missing, {_named_missing([one])}{amounts}"
        column.fail(f"one row only has the label {one!r}, so it cannot be learned and tested; {advice}")


def _code_in(column: Column) -> str:
    """Return a sentence about a number that looks like a code for missing, or an empty text."""
    if (found := column.code()) is None:
        return ""
    code, apart = found
    count = int((column.numbers == code).sum())
    return f"{count} cells are {code} and {apart}; if that means missing, name it with --missing {code}"


def labels_of_columns(table: Table, task: str, known: Mapping[str, Any]) -> Label:
    """Return some columns as the labels of a multilabel task. Raises DataError for one that is no label."""
    columns = tuple(known.get("columns") or ())
    if not columns:
        raise DataError(f"{table.where}, task {task!r}: no columns found for kind multilabel, expected columns=[...]")
    for name in columns:
        column = table.column(name)
        if not column.distinct:
            column.fail(f"no cell has a label; leave it out of the task {task!r}")
        if len({*column.yes_or_no()[column.present]}) < 2:
            same = f"all labels are {column.distinct[0]!r}, so there is nothing to learn"
            column.fail(f"{same}; leave it out of the task {task!r}")
    return Label(kind="multilabel", columns=columns, metric=known.get("metric"))


def kind_of(column: Column, named: bool) -> tuple[Kind | None, str]:
    """Return the kind of a column as an input, or why it cannot be one. `named`: it may have any number of values."""
    if column.is_date:
        return None, "it has dates or times; make a number of it, such as an age or days since admission"
    strange, whole = column.not_numbers, False
    values = column.numbers[~np.isnan(column.numbers)]
    numeric = column.is_stored_as_numbers or (not strange and len(column.distinct) > 0)
    distinct = 0 if numeric else len(column.distinct)
    if numeric:
        if np.isinf(values).any():
            infinite = text_of(values[np.isinf(values)][0])
            return None, f"it has infinite numbers; if that means missing, name it with --missing {infinite}"
        if len(values) and np.abs(values).max() > 1e150:
            return None, f"it has numbers up to {np.abs(values).max():.3g}, whose squares are too large to add up"
        distinct, whole = len(np.unique(values)), not (values % 1).any()
    if not distinct:
        return None, "no cell has a value"
    if distinct == 1:
        return (None, "it has one value only") if column.present.all() else ("category", "")
    if strange and _are_sentences(column):
        keys = f"data: {{name: texts, text: {column.name}, path: FILE, labels: {{TASK: COLUMN}}}}"
        return None, f"it has sentences, which only the data set `texts` reads; in a recipe, {keys}"
    if strange and all(THOUSANDS.fullmatch(text) for text in strange):
        return None, f"the comma in numbers such as {strange[0]!r} may be decimal or not; write them without"
    if not named:
        count = int(column.present.sum())
        if _is_identifier(column.name) or re.fullmatch(r"column \d+", column.name):
            return None, "its name says that it is an identifier"
        if strange and all(map(ending, strange)):
            return None, "it names images, which no folder beside the table has; fedloom init --images DIR finds them"
        if strange and sum(AROUND.fullmatch(text) is not None for text in strange) > 0.9 * distinct:
            return None, f"it has numbers with something around them, such as {strange[0]!r}; write numbers alone"
        if (not numeric or whole) and count >= 20 and distinct > 0.95 * count:
            return None, f"{distinct} of {count} values differ, so it looks like an identifier"
    if numeric:
        if set(values) == {0.0, 1.0}:
            return "yes/no", ""
        return ("category" if distinct <= CODES and whole else "number"), "" if named else _code_in(column)
    if column.yes is not None:
        return "yes/no", ""
    if 0 < len(strange) < distinct - 5 * len(strange):
        texts = f"{len(strange)} text{'s'[: len(strange) > 1]}"
        return None, f"it has numbers and {texts} such as {strange[0]!r}; {_perhaps_missing(column)}"
    if distinct > CATEGORIES and not named:
        return None, f"it has {distinct} different texts, more than {CATEGORIES}"
    return "category", "" if named else _code_in(column)


def _are_sentences(column: Column) -> bool:
    """Return whether a text is too long for a category, or nearly all texts differ and have several words."""
    texts, count = column.not_numbers, int(column.present.sum())
    differ = count >= 20 and len(column.distinct) > 0.95 * count
    words = sum(len(text.split()) for text in texts)
    return max(map(len, texts)) > LONG or (differ and words >= WORDS * len(texts))


def _perhaps_missing(column: Column) -> str:
    return f"if that means missing, {_named_missing(column.not_numbers[:10])}"


def _named_missing(texts: list[str]) -> str:
    codes = ",".join(f'"{text}"' if "," in text else text for text in texts)  # a decimal comma ends no code
    return f"name it with --missing '{codes}' (in a recipe: missing: {texts})"


def _is_identifier(name: str) -> bool:
    words = _words(name)
    return bool({*words[:1], *words[-1:]} & _IDENTIFIERS)


def repeated(table: Table, left_out: Sequence[str], inputs: Mapping[str, Any], sites: int) -> Iterator[str]:
    """Yield a sentence for each identifier with repeated values, and one for rows that are identical."""
    both = "can be in train and test"
    for column in map(table.column, left_out):
        values, rows = len(column.distinct), int(column.present.sum())
        if _is_identifier(column.name) and not {*_words(column.name)} & _SITES and sites < values < rows:
            together = f"data.group={column.name} keeps them together"
            yield f"{column.name}: {values:,} values in {rows:,} rows, so {ONE_PATIENT} {both}; {together}"
            if sites > 1:
                there = column.index >= 0
                which = sites_of(table, table.site)[0][there]
                yield from filter(None, [at_several(column.name, column.index[there], which)])
    if "number" in inputs.values():  # rows of a few codes are alike by chance
        cells = table.frame.drop(columns=[] if table.site is None else table.site)
        if copies := int(cells.duplicated(keep=False).sum()):
            yield f"{copies:,} rows are identical to others: copies {both}"


def _words(name: str) -> list[str]:
    return re.findall(r"[a-z]+", re.sub(r"([a-z])([A-Z])", r"\1 \2", name).lower())


def _matching(globs: Sequence[str], names: Sequence[str], where: str, what: str) -> list[str]:
    """Return the columns that some names or globs stand for. Raises DataError for one that stands for none."""
    matching, known = list[str](), {*names}
    for glob in globs:
        is_name = glob in known and not {*glob} & {*"*?["}  # thousands of columns may be named one by one
        some = [glob] if is_name else [name for name in names if name == glob or fnmatchcase(name, glob)]
        if not some:
            raise DataError(f"{where}, {what}: no column {glob!r}.{choices('Found', glob, names)}")
        matching += some
    return matching


def _outcome_block(table: Table, names: Sequence[str], labels: Sequence[str]) -> Iterator[str]:
    """Yield columns that stand among the labels at the table's end and have the same values. Tables have their outcomes
    last; where one of them is a label, the others are no inputs."""

    @cache
    def coded(name: str) -> tuple[str, ...] | None:
        column = table.column(name)
        return tuple(column.distinct) if column.series.nunique() <= CLASSES else None

    label = next((name for name in names if name in labels and coded(name) is not None), None)
    if label is None:
        return
    block: list[str] = []
    for name in reversed(names):
        if name not in labels and coded(name) == ():
            continue  # an empty column parts nothing
        if coded(name) != coded(label):
            break
        block.append(name)
    inside = {*block}
    others = [name for name in names if name not in inside and name != table.site]
    if label not in block or not others:
        return
    special = len(block) >= 6 and all(coded(name) != coded(label) for name in others)
    after = {*names[names.index(label) :]}
    yield from (name for name in block if name not in labels and (special or name in after))


def _suspicious(
    column: Column, kind: Kind, in_block: bool, tasks: Mapping[str, Label], labels: Mapping[str, Array], rows: Array
) -> str:
    """Return why a column should not be an input by itself, or an empty text."""
    if outcomes := [word for word in _words(column.name) if word in _OUTCOMES]:
        return f"its name says that it is an outcome ({outcomes[0]})"
    if in_block:
        return "it stands among the outcomes at the table's end and has the label's values"
    for task, label in tasks.items():
        real = label.kind == "regression"
        for name, y in zip(label.columns or (task,), labels[task].reshape(len(labels[task]), -1).T, strict=True):
            value = association(column, kind, y, real, rows)
            if value > (R2 if real else AUC):
                measure = "R2" if real else "AUC"
                return f"it predicts the label {name!r} nearly by itself ({measure} {value:.3f} on training rows)"
    return ""


def association(column: Column, kind: Kind, labels: Array, real: bool, rows: Array) -> float:
    """Compute how well a column alone predicts a label on some rows: R2 of a real number, AUC of classes."""
    rows = rows[has_label(labels[rows])]
    y = labels[rows].astype(np.float64)
    if len(y) < 20 or len(np.unique(y)) < 2:
        return 0.0
    cells = column.numbers[rows] if kind == "number" else column.index[rows]
    known = ~np.isnan(cells)
    levels, codes = np.unique(cells, return_inverse=True)
    many = kind == "number" and (~np.isnan(levels)).sum() > CLASSES
    if many:
        codes = known.astype(int)  # of many numbers, whether there is one
    targets, weights = [y], [1.0]
    if not real:
        classes, sizes = np.unique(y, return_counts=True)
        common = np.argsort(-sizes, kind="stable")[:CLASSES]
        targets, weights = [(y == value).astype(np.float64) for value in classes[common]], sizes[common].tolist()
    scores = [[_agreement(_means(codes, target), target, real) for target in targets]]
    if many and known.sum() >= 20:
        scores.append([_agreement(cells[known], target[known], real) for target in targets])
    return max(float(np.average(each, weights=weights)) for each in scores)


def _means(codes: Array, y: Array) -> Array:
    """Return the mean label of each row's group; groups of fewer than five rows tell nothing."""
    count = np.bincount(codes)
    mean = np.where(count >= 5, np.bincount(codes, y) / np.maximum(count, 1), y.mean())
    return np.asarray(mean[codes])


def _agreement(score: Array, y: Array, real: bool) -> float:
    """Compute R2 of a score (linear, or of the ranks), or the area under the ROC curve in its better direction."""
    import pandas

    ranks, order = (pandas.Series(each).rank().to_numpy() for each in (score, y))
    if np.ptp(ranks) == 0 or np.ptp(order) == 0:
        return 0.0
    if real:
        return float(max(np.corrcoef(a, b)[0, 1] ** 2 for a, b in ((score, y), (ranks, order))))
    positive = y > 0
    n, m = int(positive.sum()), int((~positive).sum())
    auc = (ranks[positive].sum() - n * (n + 1) / 2) / (n * m)
    return float(max(auc, 1 - auc))
