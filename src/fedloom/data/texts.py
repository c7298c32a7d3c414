"""Texts with classes, from a file of a user's or from the dictionary that timm brings; as tokens."""

from __future__ import annotations

import csv
import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import numpy as np
from pydantic import Field

from fedloom.core.errors import DataError, RecipeError, at, nearest, parsing
from fedloom.core.extras import need
from fedloom.core.settings.section import Count
from fedloom.core.signal import Signal
from fedloom.data.prepare import SPLITS, Array, TestFraction, no_repeats, stratified, subset
from fedloom.data.registry import DATASETS

if TYPE_CHECKING:
    from fedloom.data.dataset import Dataset, TensorExamples

PADDING, OTHER = 0, 1
"""Tokens that are no word: what fills up short texts, and what stands for words outside the vocabulary."""
WORD = re.compile(r"[^\W_]+(?:['\u2019][^\W_]+)*")
"""A word: letters and digits, with apostrophes inside."""

Vocabulary = Annotated[int, Field(ge=3)]
Topic = Literal["animal", "artifact", "food", "person", "plant"]

OFFSETS: dict[Topic, tuple[int, int]] = {
    "animal": (1_300_000, 2_665_900),
    "artifact": (2_665_900, 4_616_000),
    "food": (7_550_000, 7_940_000),
    "person": (9_600_000, 11_400_000),
    "plant": (11_540_000, 13_241_000),
}
"""WordNet 3.0 numbers its nouns by where they stand in a file that goes topic by topic (noun.animal, ...)."""


class Texts(NamedTuple):
    """Texts, the class of each for every task (N, -1 = none), and where each is from."""

    texts: Sequence[str]
    labels: Mapping[str, Array]
    domain: Array | None = None

    def take(self, index: Array) -> Texts:
        """Those at `index` (positions)."""
        labels = {task: column[index] for task, column in self.labels.items()}
        return Texts([self.texts[i] for i in index], labels, None if self.domain is None else self.domain[index])


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
    if split is not None and test_fraction is not None:
        raise RecipeError("texts: test_fraction has no use beside split, which says what the test part is")
    file = Path(path).expanduser()
    where = f"texts, {file}"
    columns = labels or {"topic": "topic"}
    wanted = [text, *columns.values(), *(c for c in (domain, split) if c is not None)]
    table = _columns(file, where, wanted)
    names = {task: sorted({cell for cell in table[column] if cell}) for task, column in columns.items()}
    known = {task: _numbers(table[column], names[task]) for task, column in columns.items()}
    domains = sorted(set(table[domain])) if domain is not None else []
    pool = Texts(table[text], known, _numbers(table[domain], domains) if domain is not None else None)
    for row, said in enumerate(pool.texts, 1):
        if not WORD.search(said):
            raise DataError(f"{where}: row {row}, column {text!r}: expected a word, found {said[:40]!r}")
    if split is None:
        test = _test(pool, test_fraction or 0.2, seed)
    else:
        for value in table[split]:
            if value not in SPLITS:
                raise DataError(f"{where}: column {split!r}: expected train or test, found {value!r}")
        test = np.array([value == "test" for value in table[split]])
    known_words = None if words is None else _listed(Path(words).expanduser())
    return _dataset(file.stem, where, pool, test, names, vocabulary, length, seed, tuple(domains), limit, known_words)


@DATASETS.register("glosses", source="WordNet 3.0 (Fellbaum, 1998; Princeton University), as timm brings it")
def glosses(
    seed: int,
    *,
    tasks: Annotated[dict[str, Annotated[list[Topic], Field(min_length=2)]], Field(min_length=1)] = {  # noqa: B006
        "topic": ["animal", "artifact", "food", "person", "plant"]
    },
    per_topic: Count | None = 1500,
    test_fraction: TestFraction = 0.2,
    vocabulary: Vocabulary = 3000,
    length: Count = 24,
) -> Dataset:
    """Definitions of English nouns, by topic: 'any of several large cats', animal. Nothing is downloaded; needs timm.

    Topics are WordNet's own, with `per_topic` random definitions of each (null: all, 1,852 to 7,859). A task, {name:
    topics}, asks which of its topics a definition is of; definitions of other topics have no label of it. The defined
    words are left out, so only what is said of them tells. Tokens are as in `texts`.

    Raises RecipeError where a task names a topic twice.
    """
    for task, topics in tasks.items():
        no_repeats(f"glosses, task {task!r}", "topic", topics)
    known = need("timm.data", "vision").ImageNetInfo("imagenet-21k-goog")
    said: list[str] = []
    topic: list[int] = []
    used = [each for each in OFFSETS if any(each in topics for topics in tasks.values())]
    for number, name in enumerate(used):
        first, end = OFFSETS[name]
        mine = [label for label in known.label_names() if first <= int(label[1:]) < end]
        kept = subset(len(mine), per_topic, seed, name)
        mine = mine if kept is None else [mine[i] for i in kept]
        for label in mine:
            lemmas = known.label_name_to_description(label)
            said.append(known.label_name_to_description(label, detailed=True).removeprefix(f"{lemmas}: "))
        topic += [number] * len(mine)
    of = np.array(topic)
    labels = {}
    for task, topics in tasks.items():
        place = np.array([topics.index(name) if name in topics else -1 for name in used])
        labels[task] = place[of]
    test = stratified(of, test_fraction, seed)
    pool = Texts(said, labels)
    return _dataset("glosses", "glosses", pool, test, tasks, vocabulary, length, seed)


def _columns(file: Path, where: str, wanted: Iterable[str]) -> dict[str, list[str]]:
    """Columns of a .csv file by their names, cells without space around them."""
    if not file.is_file():
        raise DataError(f"{where}: there is no such file")
    with parsing(f"{where}: cannot be read as a table of UTF-8"), file.open(encoding="utf-8-sig", newline="") as opened:
        head, *rows = list(csv.reader(opened, strict=True)) or [[]]
    for name in wanted:
        if name not in head:
            raise DataError(f"{where}: no column {name!r}.{nearest(name, head)} Found: {', '.join(head) or 'none'}")
    rows = [row for row in rows if row]
    for number, row in enumerate(rows, 1):
        if len(row) != len(head):
            raise DataError(f"{where}: row {number} has {len(row)} cells, expected {len(head)} ({', '.join(head)})")
    if not rows:
        raise DataError(f"{where}: it has no row below its head")
    return {name: [row[head.index(name)].strip() for row in rows] for name in wanted}


def _numbers(cells: Sequence[str], names: Sequence[str]) -> Array:
    """The position of each cell among the names (N), -1 where it is not among them."""
    place = {name: number for number, name in enumerate(names)}
    return np.array([place.get(cell, -1) for cell in cells])


def _test(pool: Texts, fraction: float, seed: int) -> Array:
    """Which texts (N, bool) become the test part."""
    strata = next(iter(pool.labels.values()))
    if pool.domain is not None:
        strata = strata * (pool.domain.max() + 1) + pool.domain
    return stratified(strata, fraction, seed)


def words_of(text: str) -> list[str]:
    """The words of a text, in lower case."""
    return WORD.findall(text.lower())


def frequent(texts: Iterable[str]) -> list[str]:
    """The words of some texts, the most frequent first, ties in alphabetical order."""
    counts = Counter(word for text in texts for word in words_of(text))
    return sorted(counts, key=lambda word: (-counts[word], word))


def _listed(file: Path) -> list[str]:
    """A file's words, one a line."""
    with parsing(f"texts, words: {file} cannot be read as text of UTF-8"):
        lines = file.read_text("utf-8-sig").split()
    for word in lines:
        if words_of(word) != [word]:
            raise DataError(f"texts, words: {file}: expected a word in lower case on each line, found {word[:40]!r}")
    if len(set(lines)) < len(lines):
        twice = next(word for word, count in Counter(lines).items() if count > 1)
        raise DataError(f"texts, words: {file} has {twice!r} twice")
    return lines


def tokens_of(texts: Sequence[str], known: Mapping[str, int], length: int) -> Array:
    """The first `length` words of each text as tokens (N x length, int64)."""
    tokens = np.full((len(texts), length), PADDING, np.int64)
    for row, text in zip(tokens, texts, strict=True):
        found = [known.get(word, OTHER) for word in words_of(text)[:length]]
        row[: len(found)] = found
    return tokens


def _dataset(
    name: str,
    where: str,
    pool: Texts,
    test: Array,
    classes: Mapping[str, Sequence[str]],
    vocabulary: int,
    length: int,
    seed: int,
    domains: tuple[str, ...] = (),
    limit: int | None = None,
    words: Sequence[str] | None = None,
) -> Dataset:
    """Texts as a data set, with the given words for a vocabulary, or those of the train part."""
    import torch

    from fedloom.data.dataset import Dataset, TensorExamples
    from fedloom.models.tasks.classification import Classification

    halves = [pool.take(np.flatnonzero(side)) for side in (~test, test)]
    for number, split in enumerate(SPLITS):
        kept = subset(len(halves[number].texts), limit, seed, split)
        halves[number] = halves[number] if kept is None else halves[number].take(kept)
        if not len(halves[number].texts):
            raise DataError(f"{where}: no text is in the {split} part")
    for task, column in halves[0].labels.items():
        if len(np.unique(column[column >= 0])) < 2:
            raise DataError(f"{where}, task {task!r}: expected texts of two classes or more in the train part")
    listed = (frequent(halves[0].texts) if words is None else words)[: vocabulary - 2]
    known = {word: token for token, word in enumerate(listed, OTHER + 1)}
    digest = hashlib.sha256("\n".join(listed).encode()).hexdigest()[:16]

    def part(half: Texts) -> TensorExamples:
        labels = {task: torch.from_numpy(column) for task, column in half.labels.items()}
        origin = None if half.domain is None else torch.from_numpy(half.domain)
        return TensorExamples(torch.from_numpy(tokens_of(half.texts, known, length)), labels, origin)

    with at(where):
        tasks = tuple(Classification(task, len(names)) for task, names in classes.items())
    signal = Signal(kind="tokens", vocabulary=len(known) + 2, padding=PADDING, digest=digest)
    called = {task: tuple(map(str, names)) for task, names in classes.items()}
    return Dataset(name, tasks, part(halves[0]), part(halves[1]), domains, signal=signal, classes=called)
