"""`fedloom audit`: whether an audit file is as it was written."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedloom.cli import shared


def audit(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="audit.jsonl of a run with nodes, or of a node's home.")],
    kept: Annotated[
        str | None,
        typer.Option(metavar="HASH", help="A hash that this command printed: it must still be there."),
    ] = None,
    as_json: shared.Json = False,
) -> None:
    """Check the chain of an audit file, and print what it says. Exit code 2 where a line was changed or removed.

    Lines cut off at the end, and a file written anew, show only beside a hash that was kept elsewhere (--kept).
    """
    from fedloom.federation.runs.audit import START, verified

    lines = verified(file, kept)
    last = lines[-1]["hash"] if lines else START
    known = ("number", "at", "what", "before", "hash")
    rows = [
        {
            "at": line["at"],
            "what": line["what"],
            "about": ", ".join(f"{k} {v}" for k, v in line.items() if k not in known),
        }
        for line in lines
    ]
    said = f"{len(lines)} lines, each as it was written; the last one has hash {last}"
    shared.answer({"lines": lines, "last": last}, as_json, *([shared.table_of(rows)] if rows else []), said)
