"""The audit file, which shows where it was changed: one line per event, each with the hash of the one before.

Who can write the file can write another from its beginning, or cut off its end; so `fedloom flower audit` prints the
last hash, which another party may keep. Free of torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedloom.core.errors import StateError, naming

FILE = "audit.jsonl"
START = "0" * 64
"""The hash before the first line."""


class Audit:
    """The audit file of a server's run, or of a node's home."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._lines: list[dict[str, Any]] = []
        self._size = 0
        """Bytes of the file that `lines` has read."""

    def note(self, what: str, **about: Any) -> None:
        """Append what happened; it is on the disk when this returns.

        Raises StateError where the end of the file is not one of its lines. What a crash cut short is taken away.
        """
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with naming(self.file), self.file.open("a+b") as file:
            with contextlib.suppress(ImportError):  # not a POSIX system
                import fcntl

                fcntl.flock(file, fcntl.LOCK_EX)  # a node's messages may come to several processes
            number, before = self._end(file)
            line = {"number": number, "at": datetime.now(UTC).isoformat(), "what": what, **about, "before": before}
            file.write(json.dumps({**line, "hash": _hash(line)}, sort_keys=True).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def lines(self) -> Sequence[dict[str, Any]]:
        """Return all whole lines, each checked once; none where there is no file. Raises StateError as `verified`.

        A last line that a crash cut short is left out, as `note` takes it away.
        """
        if not self.file.is_file():
            self._lines, self._size = [], 0
            return self._lines
        with self.file.open("rb") as file:
            if file.seek(0, os.SEEK_END) < self._size:
                self._lines, self._size = [], 0
            file.seek(self._size)
            raw = file.read()
        raw = raw[: raw.rfind(b"\n") + 1]
        self._lines += _following(raw, self._lines, self.file)
        self._size += len(raw)
        return self._lines

    def _end(self, file: Any) -> tuple[int, str]:
        """Return (number of the next line, hash of the last one)."""
        size, length = file.seek(0, os.SEEK_END), 1 << 12
        tail = b""
        while tail.count(b"\n") < 2 and len(tail) < size:  # the line before the last one, too
            file.seek(max(size - length, 0))
            tail, length = file.read(), 4 * length
        whole = tail[: tail.rfind(b"\n") + 1]
        if len(whole) < len(tail):
            file.truncate(size - len(tail) + len(whole))
        if not whole:
            return 0, START
        last = _read(whole.splitlines()[-1], f"{self.file}, last line")
        return last["number"] + 1, last["hash"]


def verified(file: Path, kept: str | None = None) -> list[dict[str, Any]]:
    """Return the lines of an audit file. Raises StateError, with the line, where one is not what was written.

    `kept` is the hash of a line that was there once: without it nobody sees that the end was cut off between two lines,
    or that the file was written anew from its beginning.
    """
    try:
        raw = file.read_bytes()
    except OSError as error:
        raise StateError(f"{file} cannot be read: {error.strerror}") from None
    lines = _following(raw, (), file)
    if kept is not None and kept not in {START, *(line["hash"] for line in lines)}:
        raise StateError(
            f"{file}: none of its {len(lines)} lines has the hash {kept}: lines at the end were removed, or the "
            "file was replaced"
        )
    return lines


def _following(raw: bytes, lines: Sequence[Mapping[str, Any]], file: Path) -> list[dict[str, Any]]:
    """Return the lines in `raw`, which follow others. Raises StateError as `verified`."""
    checked: list[dict[str, Any]] = []
    before = lines[-1]["hash"] if lines else START
    for number, text in enumerate(raw.splitlines(), len(lines)):
        where = f"{file}, line {number + 1}"
        line = _read(text, where)
        if line["number"] != number or line.get("before") != before:
            raise StateError(f"{where}: the line does not follow the one before it: lines were removed, added or moved")
        checked.append(line)
        before = line["hash"]
    if raw and not raw.endswith(b"\n"):
        raise StateError(f"{file}, line {len(lines) + len(checked)}: the line is truncated")
    return checked


def _read(text: bytes, where: str) -> dict[str, Any]:
    """Return one line. Raises StateError where it is not what was written."""
    try:
        line = json.loads(text)
        stated = line.pop("hash")
        right = isinstance(line["number"], int) and isinstance(line["what"], str) and isinstance(line["at"], str)
        if stated == _hash(line) and right:
            return {**line, "hash": stated}
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        pass
    raise StateError(f"{where}: the content does not match its hash: the line was changed or truncated")


def _hash(line: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(line, sort_keys=True).encode()).hexdigest()
