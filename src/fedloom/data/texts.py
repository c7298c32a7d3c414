"""Texts with classes, from a .csv file."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
from pydantic import Field

from fedloom.core.errors import DataError, RecipeError, at, parsing
from fedloom.core.settings.section import Count
from fedloom.data import prepare
from fedloom.data.combine import of_classes
from fedloom.data.prepare import DATASETS, SPLITS, Array, Part, TestFraction
from fedloom.models.signal import Signal

if TYPE_CHECKING:
    from fedloom.data.dataset import Dataset

PADDING, OTHER = 0, 1
"""Tokens that are no word: what fills up short texts, and what stands for words outside the vocabulary."""
WORD = re.compile(r"[^\W_]+(?:['\u2019][^\W_]+)*")
"""A word: letters and digits, with apostrophes inside."""

Vocabulary = Annotated[int, Field(ge=3)]


@DATASETS.register("texts")
def texts(
    seed: int,
    *,
    path: str,
    text: str = "text",
    labels: Annotated[dict[str, str], Field(min_length=1)] | None = None,
    domain: str | None = None,
    split: str | None = None,
    test_fraction: TestFraction | None = None,
    vocabulary: Vocabulary = 5000,
    words: str | None = None,
    length: Count = 64,
    limit: Count | None = None,
) -> Dataset:
    """Texts with classes, from a .csv file (UTF-8) whose first line names its columns.

    `text` and `labels` (task -> column; default: task `topic`, column `topic`) are columns. Classes are the different
    values of a column, in alphabetical order; an empty cell is no label. The column `domain` says where a text is from,
    such as a person or a site. The column `split` holds `train` or `test`; without it, the share `test_fraction`
    (stratified by the first task and the domain; default 0.2) becomes the test part.

    Words are letters and digits, in lower case; a text is its first `length` words. The vocabulary is the most frequent
    words of the train part, of all clients, ties in alphabetical order: `vocabulary` tokens, of which 0 fills up and 1
    stands for all other words. `words` is a file with a word a line to take instead: nodes that have their own texts
    need one list, and what clients count together is not private. `limit` keeps that many random texts of each part.

    Raises DataError for a file that cannot be read, an absent column, a line of another number of cells, an empty text,
    another value of `split`, or a task without two classes in the train part.
    """
    import torch

    if split is not None and test_fraction is not None:
        raise RecipeError("texts: split names the test part, so test_fraction has no effect: leave one of them out")
    file = Path(path).expanduser()
    where = f"texts, {file}"
    columns = labels or {"topic": "topic"}
    table = prepare.read_table(file, where, [text, *columns.values(), *(c for c in (domain, split) if c is not None)])
    names = {task: tuple(sorted({cell for cell in table[column] if cell})) for task, column in columns.items()}
    domains = tuple(sorted(set(table[domain]))) if domain is not None else ()
    known = {task: _numbers(table[column], names[task]) for task, column in columns.items()}
    pool = Part(np.array(table[text], object), known, _numbers(table[domain], domains) if domain is not None else None)
    for row, cell in enumerate(pool.inputs, 1):
        if not WORD.search(cell):
            raise DataError(f"{where}: row {row}, column {text!r}: expected a word, found {cell[:40]!r}")
    if split is None:
        halves = pool.cut(test_fraction or 0.2, seed)
    else:
        for value in table[split]:
            if value not in SPLITS:
                raise DataError(f"{where}: column {split!r}: expected train or test, found {value!r}")
        halves = [pool.take(np.array([value == part for value in table[split]])) for part in SPLITS]
    halves = prepare.limited(halves, limit, seed)
    for half, part in zip(halves, SPLITS, strict=True):
        if not len(half.inputs):
            raise DataError(f"{where}: no text is in the {part} part")
    for task, numbers in halves[0].labels.items():
        if len(np.unique(numbers[numbers >= 0])) < 2:
            raise DataError(f"{where}, task {task!r}: expected texts of two or more classes in the train part")
    listed = (frequent(halves[0].inputs) if words is None else _listed(Path(words).expanduser()))[: vocabulary - 2]
    tokens = {word: token for token, word in enumerate(listed, OTHER + 1)}
    digest = hashlib.sha256("\n".join(listed).encode()).hexdigest()[:16]
    for half in halves:
        half.inputs = torch.from_numpy(tokens_of(half.inputs.tolist(), tokens, length))
    signal = Signal(kind="tokens", vocabulary=len(tokens) + 2, padding=PADDING, digest=digest)
    counts = {task: len(classes) for task, classes in names.items()}
    with at(where):
        return of_classes(file.stem, counts, halves, (), domains, signal=signal, classes=names, redrawn=split is None)


def _numbers(cells: Sequence[str], names: Sequence[str]) -> Array:
    """Return the position of each cell among the names (N), -1 where it is not among them."""
    place = {name: number for number, name in enumerate(names)}
    return np.array([place.get(cell, -1) for cell in cells])


def words_of(text: str) -> list[str]:
    """Return the words of a text, in lower case."""
    return WORD.findall(text.lower())


def frequent(texts: Iterable[str]) -> list[str]:
    """Return the words of some texts, the most frequent first, ties in alphabetical order."""
    counts = Counter(word for text in texts for word in words_of(text))
    return sorted(counts, key=lambda word: (-counts[word], word))


def _listed(file: Path) -> list[str]:
    """Read a file's words, one a line."""
    with parsing(f"texts, words: {file} cannot be read as text of UTF-8"):
        lines = file.read_text("utf-8-sig").split()
    for word in lines:
        if words_of(word) != [word]:
            raise DataError(f"texts, words: {file}: expected a word in lower case on each line, found {word[:40]!r}")
    if len(set(lines)) < len(lines):
        twice = next(word for word, count in Counter(lines).items() if count > 1)
        raise DataError(f"texts, words: {file}: expected different words, found {twice!r} twice")
    return lines


def tokens_of(texts: Sequence[str], known: Mapping[str, int], length: int) -> Array:
    """Return the first `length` words of each text as tokens (N x length, int64)."""
    tokens = np.full((len(texts), length), PADDING, np.int64)
    for row, text in zip(tokens, texts, strict=True):
        own = [known.get(word, OTHER) for word in words_of(text)[:length]]
        row[: len(own)] = own
    return tokens
