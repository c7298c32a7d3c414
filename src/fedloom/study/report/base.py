"""The base of a run where nobody named one: of its grid, or beside it with the same clients and data."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path

from fedloom.errors import UserError
from fedloom.runs.reader import Run
from fedloom.runs.recorded import read_info
from fedloom.study import grid
from fedloom.study.report.against import Against, against

BASES = ("local", "trivial")
"""Methods that are a base, the better one first."""
_MOST = 500  # folders beside the run that are looked at
_SAME = ("partition_hash", "data_hash")


def beside(run: Run) -> Against | None:
    """The run held against the first of these that can be: what its grid says, then Local and then the trivial answer
    with the same clients and data, in its grid or in the folder beside it. None where there is none.
    """
    for folder in _candidates(run):
        with suppress(UserError):  # damaged, or of other tasks: no base, but no reason to show nothing either
            return against(run, Run.read(folder))
    return None


def _candidates(run: Run) -> Iterator[Path]:
    here = run.folder.resolve()
    for home in here.parents:
        if (home / grid.FILE).is_file():
            yield from _of_grid(home, here)
            break
    found: dict[str, list[Path]] = {name: [] for name in BASES}
    for folder in islice(sorted(here.parent.iterdir()), _MOST):
        if folder != here and (folder / "run.json").is_file():
            with suppress(UserError):
                info = read_info(folder)
                if info.get("method") in found and all(run.info.get(k) == info.get(k) is not None for k in _SAME):
                    found[info["method"]].append(folder)
    for name in BASES:
        yield from found[name]


def _of_grid(home: Path, here: Path) -> Iterator[Path]:
    with suppress(UserError):
        opened = grid.load_grid(home / grid.FILE)
        all_cells = {cell.folder(home).resolve(): cell for cell in grid.cells(opened)}
        mine = all_cells.get(here)
        if mine is None:
            return
        wanted = [opened.reference(mine.base), ("trivial", next(iter(opened.addons)))]
        for folder, cell in all_cells.items():
            if (
                (cell.data, cell.seed) == (mine.data, mine.seed)
                and (cell.base, cell.addon) in wanted
                and folder != here
            ):
                yield folder
