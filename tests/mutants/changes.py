"""Small changes of Python source, one at a time: another operator, comparison, number, sign or boolean."""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

Lines = tuple[int, int]  # the first and the last, counted from 1

ARITHMETIC: dict[type[ast.AST], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "/"),
    ast.Mod: ("%", "*"),
    ast.Pow: ("**", "*"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"),
}
# A comparison has its edge moved, or is turned round.
COMPARISONS: dict[type[ast.AST], tuple[str, tuple[str, ...]]] = {
    ast.Lt: ("<", ("<=", ">=")),
    ast.LtE: ("<=", ("<", ">")),
    ast.Gt: (">", (">=", "<=")),
    ast.GtE: (">=", (">", "<")),
    ast.Eq: ("==", ("!=",)),
    ast.NotEq: ("!=", ("==",)),
    ast.Is: ("is", ("is not",)),
    ast.IsNot: ("is not", ("is",)),
    ast.In: ("in", ("not in",)),
    ast.NotIn: ("not in", ("in",)),
}
TINY = 1e-6  # smaller numbers only keep a division from zero: twice as much is no other behaviour

CHUNKS = ("CHUNK", "_COLUMNS", "_VALUES", "_GRAM", "pieces", "threads")
LOOKS = ("dpi", "fontsize", "pad", "rotation", "shrink")


@dataclass(frozen=True)
class Change:
    """Replace bytes `start` to `end` of the file `path` by `new`.

    `places` are the lines whose tests may notice, the nearest first: those of the statement, of the function or class
    around it, and of the whole file. What runs at import, as a default does (`at_import`), has no test of its own line.
    """

    path: str
    start: int
    end: int
    new: str
    line: int
    places: tuple[Lines, ...]
    at_import: bool = False

    def apply(self, source: bytes) -> bytes:
        return source[: self.start] + self.new.encode() + source[self.end :]

    def was_and_now(self, source: bytes) -> tuple[str, str]:
        """The lines that differ, without indentation; what a list of known survivors is matched by."""
        first = source.count(b"\n", 0, self.start)
        count = source.count(b"\n", self.start, self.end)
        was = source.splitlines()[first : first + count + 1]
        now = self.apply(source).splitlines()[first : first + self.new.count("\n") + 1]
        return tuple("\n".join(line.decode().strip() for line in lines) for lines in (was, now))  # type: ignore[return-value]

    def diff(self, source: bytes) -> str:
        texts = (source.decode().splitlines(), self.apply(source).decode().splitlines())
        return "\n".join(difflib.unified_diff(*texts, self.path, self.path, lineterm="", n=0))


def changes(path: str, source: bytes) -> list[Change]:
    """All changes of one file, in the order of the text.

    Left out: what is only text or typing (f-strings, `raise`, annotations but for calls in them, as bounds are), what
    only checks (`zip(strict=...)`, the options of `@dataclass`), how a figure looks (LOOKS), and how many values are
    read at a time (constants whose names end in CHUNKS, and `max(1, CHUNK // n)`) or cached (`maxsize`), on which
    nothing but memory and time depends.
    """
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    tree, found = ast.parse(source), []
    called = [
        (node.body[0].lineno, node.end_lineno or 0) for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)
    ]
    for node, places in _nodes(tree, ((1, len(starts)),)):
        for a, b, new in _changes_of(node, source, lambda line, column: starts[line - 1] + column):
            line = source.count(b"\n", 0, a) + 1
            at_import = not any(first <= line <= last for first, last in called)
            found.append(Change(path, a, b, new, line, places, at_import))
    return sorted(set(found), key=lambda change: (change.start, change.new))


def _nodes(tree: ast.AST, around: tuple[Lines, ...]) -> Iterator[tuple[ast.AST, tuple[Lines, ...]]]:
    """Every node that may change, with the lines of its statement and of what is around it."""
    statement = around
    for node in _parts(tree):
        if isinstance(node, ast.Raise | ast.JoinedStr) or _typing_only(node) or _size_of_chunks(node):
            continue
        if isinstance(node, ast.stmt):
            body = getattr(node, "body", None)
            end = max(node.lineno, body[0].lineno - 1) if body else node.end_lineno or node.lineno
            statement = ((node.lineno, end), *around)
        inner = statement
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            inner = ((node.lineno, node.end_lineno or node.lineno), *around)
        yield node, statement
        yield from _nodes(node, inner if isinstance(node, ast.stmt) and hasattr(node, "body") else statement)


def _parts(node: ast.AST) -> Iterator[ast.AST]:
    """The children of a node, without what is not to be changed; of an annotation only the calls in it."""
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST):
                continue
            if name in ("annotation", "returns"):
                yield from (part for part in ast.walk(child) if isinstance(part, ast.Call))
            elif not (isinstance(child, ast.keyword) and child.arg in ("strict", "maxsize", *LOOKS)) and not (
                name == "decorator_list" and "dataclass" in ast.unparse(child)
            ):
                yield child


def _typing_only(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def _size_of_chunks(node: ast.AST) -> bool:
    match node:
        case ast.Assign():
            return all(ast.unparse(x).rstrip(")").endswith(CHUNKS) for x in node.targets)
        case ast.Call(ast.Name("max"), [_, ast.BinOp(ast.Name(name), ast.FloorDiv())]):
            return name.endswith(CHUNKS)
    return False


def _changes_of(node: ast.AST, source: bytes, at) -> Iterator[tuple[int, int, str]]:  # type: ignore[no-untyped-def]
    """(start, end, new text) for each change of this one node."""

    def begin(part: ast.AST) -> int:
        return at(part.lineno, part.col_offset)  # type: ignore[attr-defined]

    def finish(part: ast.AST) -> int:
        return at(part.end_lineno, part.end_col_offset)  # type: ignore[attr-defined]

    def between(left: ast.AST, right: ast.AST, operator: str) -> tuple[int, int]:
        """Where the operator stands between two operands, past brackets and comments."""
        word = r"\s+".join(map(re.escape, operator.split()))
        for match in re.finditer(rb"#[^\n]*|" + word.encode(), source[finish(left) : begin(right)]):
            if not match.group().startswith(b"#"):
                return finish(left) + match.start(), finish(left) + match.end()
        raise AssertionError(f"no {operator} between {ast.unparse(left)} and {ast.unparse(right)}")

    match node:
        case ast.BinOp(left, operator, right) if type(operator) in ARITHMETIC:
            old, new = ARITHMETIC[type(operator)]
            yield *between(left, right, old), new
        case ast.AugAssign(target, operator, value) if type(operator) in ARITHMETIC:
            old, new = ARITHMETIC[type(operator)]
            yield *between(target, value, old + "="), new + "="
        case ast.Compare(left, operators, others):
            for before, operator, after in zip([left, *others[:-1]], operators, others, strict=True):
                old, news = COMPARISONS[type(operator)]
                for new in news:
                    yield *between(before, after, old), new
        case ast.BoolOp(operator, values):
            old, new = ("and", "or") if isinstance(operator, ast.And) else ("or", "and")
            for before, after in pairwise(values):
                yield *between(before, after, old), new
        case ast.UnaryOp(ast.USub() | ast.Not() | ast.Invert()):
            yield begin(node), begin(node) + (3 if isinstance(node.op, ast.Not) else 1), ""
        case ast.Constant(bool() as value):
            yield begin(node), finish(node), str(not value)
        case ast.Constant(int() as value):
            yield begin(node), finish(node), str(value + 1)
        case ast.Constant(float() as value) if value == 0 or abs(value) >= TINY:
            yield begin(node), finish(node), repr(2 * value if value else 1.0)
