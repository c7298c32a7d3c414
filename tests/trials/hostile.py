"""Files and values as nobody would write them, and what is asked of whatever reads them."""

from __future__ import annotations

import io
import json
import random
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from typer.main import get_command

from fedloom.cli.app import app, message_of

STRANGE: tuple[Any, ...] = (
    *(None, True, -1, 0, 7, 10**30, -0.5, 1e308, float("nan"), float("inf"), "", "x", "../..", "\u2028<b>", "nan"),
    *([], [[]], ["x"], {}, {"x": 1}, {"name": []}, [1, "a", None], "9" * 5000, "\x00", [None] * 50),
)
"""Values that stand where others belong."""


class Tally:
    """Counts cases, and fails at the end, with the first few of each kind of failure."""

    def __init__(self, record: Callable[[str, object], None]) -> None:
        self.record, self.counts = record, Counter[str]()
        self.failures: dict[str, list[str]] = {}

    @contextmanager
    def case(self, name: str) -> Iterator[None]:
        """One case; what it raises is kept for the end."""
        self.counts["cases"] += 1
        try:
            yield
        except (Exception, SystemExit) as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            kind = f"{type(error).__name__} in {Path(last.filename).name}:{last.lineno}"
            self.failures.setdefault(kind, []).append(f"{name}: {error}")

    def answer(self, found: Any) -> Any:
        """Count whether a case was refused (None)."""
        self.counts["refused" if found is None else "accepted"] += 1
        return found

    def close(self) -> None:
        """Record the counts; fails where a case did."""
        for name, count in self.counts.items():
            self.record(name, count)
        told_ = [f"{len(each)} x {kind}: {each[0][:600]}" for kind, each in self.failures.items()]
        assert not told_, "\n".join(told_)


def judged(job: Callable[[], Any], *named: str | Path) -> Any:
    """Return what a job returns, or None where it ends in a sentence that has one of these names. Anything else
    fails.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return job()
    except Exception as error:
        sentence = message_of(error)
        if sentence is None:
            raise
        assert not named or any(str(name) in sentence for name in named), f"{named} is not in: {sentence}"
        assert "Traceback" not in sentence
        return None


def command(*arguments: object) -> str:
    """Return what a command prints; raises what it raises, and SystemExit where it ends with another code than 0."""
    out = io.StringIO()
    with redirect_stdout(out), redirect_stderr(out):
        code = get_command(app).main(list(map(str, arguments)), "fedloom", standalone_mode=False)
    if code:
        raise SystemExit(code)
    return out.getvalue()


def bytes_like(data: bytes, rng: random.Random) -> bytes:
    """Damaged data: cut off, with bytes changed, doubled, left out, or of something else."""
    if not data:
        return rng.randbytes(9)
    at, length = rng.randrange(len(data)), rng.choice((1, 1, 2, 8, 64, 512))
    kind = rng.randrange(6)
    if kind == 0:
        return data[:at]
    if kind == 1:
        return data[:at] + rng.randbytes(length) + data[at + length :]
    if kind == 2:
        return data[:at] + data[at : at + length] * 2 + data[at + length :]
    if kind == 3:
        return data[:at] + data[at + length :]
    if kind == 4:
        return data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]
    return rng.choice((b"", b"{}", b"[]", b"null", b"PK\x05\x06" + bytes(18), data * 2, b"[" * 100_000))


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterable[tuple[tuple[Any, ...], Any]]:
    """(path, what is there) of everything in a JSON value."""
    if path:
        yield path, value
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*path, key))


def value_like(value: Any, rng: random.Random, strange: Sequence[Any] = STRANGE) -> Any:
    """A JSON value in which one thing, at any depth, is replaced, left out or called otherwise."""
    changed = json.loads(json.dumps(value))
    every = [path for path, _ in places(changed)]
    if not every:
        return rng.choice(strange)
    *above, last = rng.choice(every)
    holder = changed
    for key in above:
        holder = holder[key]
    kind = rng.randrange(4)
    if kind == 0:
        del holder[last]
    elif kind == 1 and isinstance(holder, dict):
        holder[rng.choice(("", "x", "name", "round"))] = holder.pop(last)
    else:
        holder[last] = rng.choice(strange)
    return changed


def text_like(text: str, rng: random.Random) -> bytes:
    """A damaged text of JSON, or of lines of JSON: its bytes, or a value in it."""
    if rng.random() < 0.4:
        return bytes_like(text.encode(), rng)
    try:
        return json.dumps(value_like(json.loads(text), rng)).encode()
    except ValueError:
        lines = text.splitlines()
    try:
        at = rng.randrange(len(lines))
        lines[at] = json.dumps(value_like(json.loads(lines[at]), rng))
    except ValueError:
        return bytes_like(text.encode(), rng)
    return "\n".join([*lines, ""]).encode()
