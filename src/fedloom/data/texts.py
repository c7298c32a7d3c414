"""Texts with classes, from a table with a column of texts."""

from __future__ import annotations

import hashlib
import re
import sys
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import Field

from fedloom.core.errors import DataError, RecipeError, at, choices, parsing, twice
from fedloom.core.machine import need_memory
from fedloom.core.settings.section import Count
from fedloom.data import prepare
from fedloom.data.combine import of_classes
from fedloom.data.prepare import DATASETS, SPLITS, Array, Part, TestFraction
from fedloom.data.tables.columns import classes_of, is_real
from fedloom.data.tables.read import Code, Column, Table, read, text_of
from fedloom.data.tables.table import sites_of
from fedloom.models.signal import Signal

if TYPE_CHECKING:
    from fedloom.data.dataset import Dataset

PADDING, OTHER = 0, 1
"""Tokens that are no word: what fills up short texts, and what stands for words outside the vocabulary."""
CUT, SINGLE, UNKNOWN, COPIED = 0.05, 0.5, 0.2, 0.01
"""Shares from which on the data set doubts its texts: those that are cut, and those of a single word; test words that
are not in the vocabulary, and test texts that are copies."""

Vocabulary = Annotated[int, Field(ge=3)]
Classes = Annotated[list[str], Field(min_length=2)]


@dataclass(frozen=True, eq=False)
class Words:
    """How texts become tokens: their column, the words in the order of their tokens, and how many of a text count."""

    column: str
    listed: tuple[str, ...]
    length: int

    @property
    def signal(self) -> Signal:
        """The kind of the inputs, with what tells this list of words from others."""
        digest = hashlib.sha256("\n".join(self.listed).encode()).hexdigest()[:16]
        return Signal(kind="tokens", vocabulary=len(self.listed) + OTHER + 1, padding=PADDING, digest=digest)

    def tokens(self, texts: Sequence[Sequence[str]]) -> Array:
        """Return the first `length` words of each text as tokens (N x length, int64)."""
        known = {word: token for token, word in enumerate(self.listed, OTHER + 1)}
        tokens = np.full((len(texts), self.length), PADDING, np.int64)
        for row, words in zip(tokens, texts, strict=True):
            own = [known.get(word, OTHER) for word in words[: self.length]]
            row[: len(own)] = own
        return tokens


@DATASETS.register("texts")
def texts(
    seed: int,
    *,
    path: str,
    text: str = "text",
    labels: Annotated[dict[str, str], Field(min_length=1)] | None = None,
    classes: dict[str, Classes] | None = None,
    missing: list[Code] | None = None,
    rename: dict[str, str] | None = None,
    domain: str | None = None,
    split: str | None = None,
    test_fraction: TestFraction | None = None,
    vocabulary: Vocabulary = 5000,
    words: str | None = None,
    length: Count = 64,
    limit: Count | None = None,
) -> Dataset:
    """Read texts with classes from a table: a CSV (also .gz, .xz) or Parquet file, or a folder with one a site.

    `text` and `labels` (task -> column; default: task `topic`, column `topic`) are columns. Classes are the different
    values of a column, numbers by size and then texts by the alphabet. `classes` ({task: [names]}) states all of them
    in their order: sites that lack some then number them alike. A cell that is empty, NA, NaN or one of `missing` is no
    label. `rename` is {a column's name in the file: its name here}. The column `domain` says where a text is from, such
    as a person or a site; in a folder, without one, the files' names do. The column `split` holds `train` or `test`;
    without it, the share `test_fraction` (stratified by the first task and the domain; default 0.2) becomes the test
    part.

    Words are letters and digits, in lower case; a text is its first `length` words. The vocabulary is the most frequent
    words of the train part, of all clients, ties in alphabetical order: `vocabulary` tokens, of which 0 fills up and 1
    stands for all other words. `words` is a file with a word a line to take instead: nodes that have their own texts
    need one list, and what clients count together is not private. `limit` keeps that many random texts of each part.
    Rows without a word are left out.

    Raises DataError for a file that cannot be read, an absent column, labels that are no classes, a row without a
    domain, another value of `split`, and a task without two classes in the train part (with `classes`, without one).
    """
    import torch

    if split is not None and test_fraction is not None:
        raise RecipeError("texts: split names the test part, so test_fraction has no effect: leave one of them out")
    columns, stated = labels or {"topic": "topic"}, classes or {}
    for task, listed in stated.items():
        if task not in columns:
            raise RecipeError(f"texts: classes of {task!r} found, which is no task.{choices('Tasks', task, columns)}")
        prepare.no_repeats("texts", f"task {task!r}: class", listed)
    table = read(path, domain, missing or (), rename)
    where = table.where
    names = {task: _classes(table.column(column), stated.get(task)) for task, column in columns.items()}
    known = {task: table.column(column).coded(names[task])[0] for task, column in columns.items()}
    which, sites = sites_of(table, table.site)
    rows, there = texts_of(table, text)
    used, which[there] = np.unique(which[there], return_inverse=True)
    domains = () if table.site is None else tuple(sites[number] for number in used)
    pool = Part(np.arange(len(rows)), known, which if domains else None).take(there)
    notes = list(table.notes)
    if lost := len(rows) - len(there):
        first = next(number for number, row in enumerate(rows, 1) if not row)
        notes.append(f"rows without a word in column {text!r}, left out: {lost:,}, the first is row {first}")
    if split is None:
        halves, advice = pool.cut(test_fraction or 0.2, seed), "; no two texts have the same label and domain"
    else:
        part, strange = table.column(split).coded(SPLITS)
        if strange or (part < 0).any():
            value = repr(strange[0]) if strange else "an empty cell"
            table.column(split).fail(f"expected train or test in each row, found {value}")
        halves, advice = [pool.take(part[there] == number) for number in range(len(SPLITS))], ""
    drawn_from = len(halves[0].inputs)
    halves = prepare.limited(halves, limit, seed)
    for half, name in zip(halves, SPLITS, strict=True):
        if not len(half.inputs):
            raise DataError(f"{where}: no text is in the {name} part{advice}")
    for task, numbers in halves[0].labels.items():
        absent = [name for number, name in enumerate(names[task]) if number not in numbers]
        if len(names[task]) - len(absent) < (1 if task in stated else 2):
            wanted = "of a class" if task in stated else "of two or more classes"
            raise DataError(f"{where}, task {task!r}: expected texts {wanted} in the train part")
        if absent:
            notes.append(f"no text of {', '.join(absent)} of task {task!r} to train on")
    train, test = ([rows[number] for number in half.inputs.tolist()] for half in halves)
    if words is None:
        found = frequent(train)
    else:
        with at("data.words"):
            found = words_in(Path(words).expanduser())
    own = Words(text, tuple(found[: vocabulary - OTHER - 1]), length)
    for half, part_of in zip(halves, (train, test), strict=True):
        half.inputs = torch.from_numpy(own.tokens(part_of))
    counts = {task: len(classes) for task, classes in names.items()}
    more: dict[str, Any] = {"classes": names, "words": own, "notes": tuple(notes), "drawn_from": drawn_from}
    more |= {"signal": own.signal, "redrawn": split is None, "doubts": tuple(_doubts(own, train, test))}
    with at(where):
        return of_classes(Path(where).name.split(".")[0], counts, halves, (), domains, **more)


def _classes(column: Column, stated: Sequence[str] | None) -> tuple[str, ...]:
    """Return the classes of a column. Raises DataError for labels that are no classes, or not among those `stated`."""
    if stated is not None:
        if strange := column.coded(stated)[1]:
            advice = "add it to data.classes, or to data.missing if it means missing"
            column.fail(f"the label {strange[0]!r} found, expected {', '.join(stated[:20])}; {advice}")
        return tuple(stated)
    if is_real(column):
        advice = "replace them by a few ranges, such as low and high, or list them as data.classes"
        column.fail(f"{len(column.distinct)} different numbers found, expected classes: {advice}")
    return tuple(classes_of(column))


def texts_of(table: Table, name: str) -> tuple[list[list[str]], Array]:
    """Return the words of each row's cell in a column of texts, none of a missing one, and the rows that have words.
    Raises DataError where there are none."""
    column = table.column(name)
    cells = zip(map(text_of, column.series), column.series.isna(), strict=True)
    rows = [[] if missing or text in column.codes else words_of(text) for text, missing in cells]
    there = np.flatnonzero([*map(bool, rows)])
    if not len(there):
        column.fail("no row with a word found, expected texts of letters and digits")
    return rows, there


@cache
def _word() -> re.Pattern[str]:
    """Return the pattern of a word: letters and digits with their marks, and with apostrophes inside."""
    marks = [c for c in map(chr, range(0x300, 0x20000)) if unicodedata.category(c) in ("Mn", "Mc")]
    mark = "[" + "".join(c for c in marks if not "\ufe00" <= c <= "\ufe0f") + "]"  # those follow signs, such as emoji
    run = rf"[^\W_]+(?:{mark}+[^\W_]*)*"
    return re.compile(rf"{run}(?:['\u2019]{run})*")


def words_of(text: str) -> list[str]:
    """Return the words of a text, in lower case and in the composed form of Unicode (NFC)."""
    return [*map(sys.intern, _word().findall(unicodedata.normalize("NFC", text.lower())))]


def frequent(texts: Iterable[Sequence[str]]) -> list[str]:
    """Return the words of some texts, the most frequent first, ties in alphabetical order."""
    counts = Counter(word for words in texts for word in words)
    return sorted(counts, key=lambda word: (-counts[word], word))


def words_in(file: Path) -> list[str]:
    """Read a file's words, one a line. Raises DataError for what is no list of different words."""
    with parsing(f"{file} cannot be read as text of UTF-8"):
        need_memory(8 * file.stat().st_size, str(file))
        lines = unicodedata.normalize("NFC", file.read_text("utf-8-sig")).split()
    for word in lines:
        if words_of(word) != [word]:
            raise DataError(f"{file}: expected a word in lower case on each line, found {word[:40]!r}")
    if again := twice(lines):
        raise DataError(f"{file}: expected different words, found {again[0][:40]!r} twice")
    return lines


def _doubts(own: Words, train: Sequence[Sequence[str]], test: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield a sentence for each reason to doubt that a model can learn from these texts, or be measured on them."""
    sizes = [*map(len, train), *map(len, test)]
    total = f"of {len(sizes):,} texts"
    if (cut := sum(size > own.length for size in sizes)) >= CUT * len(sizes):
        most = f"the longest has {max(sizes):,}, and a larger data.length keeps more"
        yield f"{cut:,} {total} have more than {own.length:,} words and are cut: {most}"
    if (single := sizes.count(1)) > SINGLE * len(sizes):
        advice = "if the language has no spaces between words, put spaces between the characters or words"
        yield f"{single:,} {total} are a single word: {advice}"
    listed, known = set(own.listed), set(map(tuple, train))
    tested = [word in listed for words in test for word in words[: own.length]]
    if (other := tested.count(False)) > UNKNOWN * len(tested):
        found = f"{other:,} of {len(tested):,} words of the test part ({other / len(tested):.0%})"
        advice = "a larger data.vocabulary, another list as data.words or more training texts help"
        yield f"{found} are not in the vocabulary: {advice}"
    if (copies := sum(tuple(words) in known for words in test)) >= COPIED * len(test):
        found = f"{copies:,} of {len(test):,} test texts are word for word copies of training texts"
        yield f"{found}: test scores are too good, so remove the copies"
