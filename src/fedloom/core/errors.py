"""Errors that a user can correct. The command line prints them without a traceback and exits with code 2."""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path


class UserError(Exception):
    """Bad input: an invalid recipe, data set, run folder or device."""


class RecipeError(UserError):
    """A recipe with a wrong key, type, range or combination."""


class DataError(UserError):
    """A data set or federation that is absent or inconsistent."""


class StateError(UserError):
    """A run folder that cannot be read or resumed."""


class InUseError(StateError):
    """A folder that another process is using."""


def check_empty(folder: Path, advice: str = "choose another folder") -> None:
    """Raise StateError where `folder` is anything but a new or empty folder."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise StateError(f"{folder} exists and is not empty; {advice}")


def check_links(paths: Iterable[Path]) -> None:
    """Raise StateError for a link among the paths: whoever writes there would change a file elsewhere."""
    for path in paths:
        if path.is_symlink():
            raise StateError(f"{path}: a link to {path.readlink()} found, expected a file or folder of its own")


TABLES = ("csv", "tsv", "xlsx", "parquet", "npz")
"""Endings of files that are users' data more often than results."""


def ending(file: str | Path) -> str:
    """Return the ending of a file's name, without that of a compressed one: 'csv' of a.CSV and of a.csv.gz."""
    return Path(str(file).lower().removesuffix(".gz").removesuffix(".xz")).suffix[1:]


@contextmanager
def writing(where: str | Path, kind: str = "") -> Iterator[None]:
    """Turn an error while a file or folder is written into a UserError that names the file or folder.

    A name with the ending of a table is refused unless `kind` is that ending: it is a slip, and may be the user's data.
    A file of which a part was written, because the disk is full or the user pressed Ctrl-C, is removed.
    """
    if ending(where) in TABLES and ending(where) != kind:
        raise UserError(f"{where}: what is written here is no .{ending(where)} file: choose a name with another ending")
    before = _stamp(where)
    try:
        yield
    except BaseException as error:
        if (now := _stamp(where)) is not None and now != before:
            Path(where).unlink()
        if isinstance(error, OSError):
            raise UserError(f"{where}: {error.strerror or error}") from None
        raise


def _stamp(where: str | Path) -> tuple[int, int, int] | None:
    """Return what changes when a file is written; None where there is no file, or a link."""
    path = Path(where)
    if path.is_symlink() or not path.is_file():
        return None
    about = path.stat()
    return about.st_ino, about.st_size, about.st_mtime_ns


@contextmanager
def naming(file: str | Path) -> Iterator[None]:
    """Name a file in an OSError that names none: where a disk is full, Python says that, and not which file grew."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(file)
        raise


def first_of(names: Iterable[object], most: int = 5) -> str:
    """Return 'a, b and 3 more': the first names, and how many there are besides."""
    first, rest = (names := [*map(str, names)])[:most], len(names) - most
    return ", ".join(first) + (f" and {rest} more" if rest > 0 else "")


CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that no text from elsewhere may have: a terminal obeys them, they turn the direction of what follows, or
they are half of one, which no file can hold. Tabs and ends of lines are allowed."""


LINE = "[^\t\n]*"
"""The pattern of a name that takes one line of a table."""


def in_one_line(name: str) -> bool:
    """Return whether a name takes one line of a table, and has no control characters."""
    return re.fullmatch(LINE, name) is not None and not CONTROL.search(name)


def printable(text: str, kept: str = "", sign: str | None = None) -> str:
    """Return a text with `sign`, else Python's escape, for each character without a shape, which a terminal may obey,
    but for those `kept`."""
    return "".join(c if c.isprintable() or c in kept else repr(c)[1:-1] if sign is None else sign for c in text)


def twice(names: Iterable[str]) -> list[str]:
    """Return the names that occur more than once."""
    return [name for name, count in Counter(names).items() if count > 1]


def of_system(error: OSError) -> str:
    """Return an error of the system in one line: the file (for a copy, its destination) and the problem."""
    file = error.filename if error.filename2 is None else error.filename2
    reason = error.strerror or (str(error.args[0]) if error.args else type(error).__name__)
    return reason if file is None else f"{os.fsdecode(file)}: {reason}"


def line_of(error: BaseException) -> str | None:
    """Return 'FILE, line 3', where the user's own code, such as a method's, raised an error; None: it did not."""
    import traceback
    from sysconfig import get_paths

    known = [Path(get_paths()[kind]) for kind in ("stdlib", "platstdlib", "purelib", "platlib")]
    known.append(Path(__file__).parents[1])
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = Path(frame.filename)
        if file.is_absolute() and not any(file.is_relative_to(path) for path in known):
            return f"{file}, line {frame.lineno}"
    return None


class RunWarning(UserWarning):
    """A warning about a run that continues with less: dropped updates, lost rounds, inputs that look wrong."""


def warn(text: str) -> None:
    """Print a warning on stderr."""
    print(f"warning: {text}", file=sys.stderr, flush=True)


@contextmanager
def parsing(what: str) -> Iterator[None]:
    """Turn whatever a library's parser raises for an untrusted file into a DataError that begins with `what`."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        raise DataError(f"{what} ({str(error) or type(error).__name__})") from None


@contextmanager
def at(where: str) -> Iterator[None]:
    """Put a place, if there is one, before the message of a UserError that was raised where it is not known."""
    try:
        yield
    except UserError as error:
        raise type(error)(f"{where}: {error}" if where else str(error)) from None


def nearest(word: str, allowed: Iterable[str]) -> str:
    """Return ' Did you mean ...?' for the closest allowed word, or an empty string."""
    close = difflib.get_close_matches(word, list(allowed), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """Return the error message for an unknown name of a task, a method or the like."""
    return f"unknown {kind} {name!r}.{choices('Known', name, known)}"


def choices(lead: str, word: str, known: Iterable[str]) -> str:
    """Return ' Did you mean ...? Known: a, b, c' after a wrong word: the closest known one, then `listed`."""
    known = tuple(known)
    return f"{nearest(word, known)} {listed(lead, word, known)}"


MANY = 12
"""More names than so many are not listed."""


def shortened(sentences: Iterable[str]) -> list[str]:
    """Return the first sentences, and one that says how many more there are: a table may have 20,000 columns."""
    first, more = (sentences := [*sentences])[:MANY], len(sentences) - MANY
    return [*first, *([f"and {more:,} more notes like these"] if more > 0 else [])]


def listed(lead: str, word: str, known: Iterable[str]) -> str:
    """Return 'Known: a, b, c'; if there are many names, only the three nearest to the word."""
    known = tuple(known)
    if len(known) <= MANY:
        return f"{lead}: {', '.join(known) or 'none'}"
    return f"Nearest of {len(known)}: {', '.join(difflib.get_close_matches(word, known, n=3, cutoff=0))}"
