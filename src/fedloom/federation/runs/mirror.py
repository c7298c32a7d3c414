"""A second copy of what a run needs to be continued, on another disk."""

from __future__ import annotations

import filecmp
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from fedloom.core.errors import naming

_NEEDED = (
    "recipe.yaml",
    "partition.json",
    "nodes.json",
    "flower.json",
    "keys.json",
    "*.jsonl",
    "peers/*/*.safetensors",
    "peers/*/*.json",
    *(
        f"{name}.{part}{kind}"
        for name in ("best", "state")
        for part in ("prev.", "")
        for kind in ("safetensors", "json")
    ),
    "run.json",
)
"""Patterns of the files, in the order in which they are copied: peers before the rest, the checkpoint but one before
the last, and tensors before their text, so that at every instant the copy has a whole checkpoint."""


def place(folder: Path, parent: str | None) -> Path | None:
    """Where the copy of a run folder lies in `parent`, under its name; None where that is the folder itself."""
    found = None if parent is None else Path(parent).expanduser() / folder.resolve().name
    return None if found is None or found.resolve() == folder.resolve() else found


def copy(source: Path, target: Path) -> None:
    """Make what `target` has of a run's needed files what `source` has. Raises OSError."""
    target.mkdir(parents=True, exist_ok=True)
    here = list(_files(source))
    for file in here:
        to = target / file.relative_to(source)
        if not (to.is_file() and filecmp.cmp(file, to)):  # by size and time of change, which are copied too
            to.parent.mkdir(parents=True, exist_ok=True)
            part = to.with_name(to.name + ".part")
            with naming(part):
                shutil.copy2(file, part)
                with part.open("rb") as opened:
                    os.fsync(opened.fileno())
            os.replace(part, to)
    kept = {file.relative_to(source) for file in here}
    for stale in [file for file in _files(target) if file.relative_to(target) not in kept]:
        stale.unlink()


def _files(folder: Path) -> Iterator[Path]:
    for pattern in _NEEDED:
        yield from sorted(folder.glob(pattern))
