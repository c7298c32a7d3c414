"""Every sentence that a user may read stands in messages.txt, so that a bad one is seen in review.

Where one is to change, run `PYTHONPATH=src:tests python -m test_messages` and read the difference of the file.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "fedloom"
WRITTEN = Path(__file__).with_name("messages.txt")
SAYS = {"warn", "echo", "carry", "tell", "fail", "problem", "event", "checked"} | {
    *("argument", "option", "flag", "out_file", "out_folder"),
}
"""Functions that print a sentence, collect one for an error, or have the help of a command's option."""
YIELDS = {"_problems", "unfit"}
"""Generators of what does not fit."""


def text_of(node: ast.AST) -> str:
    """Return a string as its reader sees it, with {expression} where a value stands; '' for anything else."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(
            f"{{{ast.unparse(part.value)}}}" if isinstance(part, ast.FormattedValue) else text_of(part)
            for part in node.values
        )
    if isinstance(node, ast.BinOp):
        return text_of(node.left) + text_of(node.right)
    if isinstance(node, ast.IfExp):
        return " | ".join(filter(None, (text_of(node.body), text_of(node.orelse))))
    return ""


def said_in(tree: ast.AST) -> Iterator[str]:
    """Yield the texts of errors, warnings, printed lines and help."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name in YIELDS:
            for each in (each.value for each in ast.walk(node) if isinstance(each, ast.Yield)):
                yield from map(text_of, each.elts if isinstance(each, ast.Tuple) else [each] if each else [])
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name.endswith(("Error", "Problem")) or name in SAYS:
            yield from map(text_of, node.args)
        yield from (text_of(keyword.value) for keyword in node.keywords if keyword.arg == "help")


def messages() -> str:
    """Return all sentences of at least three words, file by file."""
    lines: list[str] = []
    for path in sorted(SOURCE.rglob("*.py")):
        tree = ast.parse(path.read_text("utf-8"))
        found = sorted({" ".join(text.split()) for text in said_in(tree) if len(text.split()) > 2})
        if found:
            lines += [f"## {path.relative_to(SOURCE).as_posix()}", *found, ""]
    return "\n".join(lines)


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="other Pythons spell values of f-strings otherwise")
def test_messages_are_those_written_down() -> None:
    assert messages() == WRITTEN.read_text("utf-8"), "write it again: PYTHONPATH=src:tests python -m test_messages"


if __name__ == "__main__":
    WRITTEN.write_text(messages(), "utf-8")
