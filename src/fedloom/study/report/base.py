"""What a run can be held against: another one of its grid, or one beside it with the same clients and data."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path

from fedloom.core.errors import UserError
from fedloom.federation.runs.reader import Run
from fedloom.federation.runs.recorded import read_info
from fedloom.study import grid
from fedloom.study.report.against import Against, against

BASES = ("local", "constant")
"""Methods that are a base, the better one first."""
MOST = 6
"""Bases that a page offers, at most."""
_LOOKED = 500  # folders beside the run that are looked at
_SAME = ("partition_hash", "data_hash")


def bases_of(run: Run, named: Run | None = None) -> tuple[Against | None, tuple[Against, ...]]:
    """(the run held against the base that counts, the run held against what else there is); MOST in all.

    The base that counts is the one that was named. Where none was, it is the first of these: what the run's grid says,
    then Local and then the constant prediction with the same clients and data, in its grid or in the folder beside it.
    What else there is are other methods of the grid, and of the folder. Raises StateError where the run cannot be held
    against the named one.
    """
    made = {} if named is None else {named.folder.resolve(): ("", against(run, named))}
    bases, others = _candidates(run)
    first = len(made)
    for name, folder in (*bases, *others):
        if folder not in made and len(made) < MOST:
            with suppress(UserError):  # damaged, or of other tasks: no base, but no reason to show nothing either
                made[folder] = name, against(run, Run.read(folder))
                first += (name, folder) in bases
    times = Counter(held.label for _, held in made.values())
    found = tuple(
        held if times[held.label] == 1 else replace(held, label=f"{held.label} ({name or folder.name})")
        for folder, (name, held) in made.items()
    )
    return (found[0], found[1:]) if first else (None, found)


Named = list[tuple[str, Path]]
"""(What the grid calls it, folder)."""


def _candidates(run: Run) -> tuple[Named, Named]:
    """(bases, the better ones first; all else)."""
    here = run.folder.resolve()
    home = next((home for home in here.parents if (home / grid.FILE).is_file()), None)
    bases, others = ([], []) if home is None else _of_grid(home, here)
    found: dict[str, Named] = {}
    for folder in islice(sorted(here.parent.iterdir()), _LOOKED):
        if folder != here and (folder / "run.json").is_file():
            with suppress(UserError):
                info = read_info(folder)
                if all(run.info.get(k) == info.get(k) is not None for k in _SAME):
                    found.setdefault(str(info.get("method")), []).append(("", folder))
    bases += [each for name in BASES for each in found.pop(name, ())]
    return bases, [*others, *(each for several in found.values() for each in several)]


def _of_grid(home: Path, here: Path) -> tuple[Named, Named]:
    """Of the run's grid: what it is to be held against, and all else of the same data and seed that has begun."""
    bases: Named = []
    others: Named = []
    with suppress(UserError):
        opened = grid.load_grid(home / grid.FILE)
        all_cells = {cell.folder(home).resolve(): cell for cell in grid.cells(opened)}
        if (mine := all_cells.pop(here, None)) is not None:
            wanted = [opened.reference(mine.base), ("constant", "-")]
            for folder, cell in all_cells.items():
                if (cell.data, cell.seed) == (mine.data, mine.seed) and (folder / "run.json").is_file():
                    found = bases if (cell.base, cell.addon) in wanted else others
                    found.append((grid.together(cell.base, cell.addon), folder))
    return bases, others
