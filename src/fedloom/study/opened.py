"""The folder of a grid in Python: its table, and every number of its runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fedloom.core.errors import StateError
from fedloom.core.extras import need
from fedloom.federation.runs.reader import Run
from fedloom.study.grid import Grid, cells, is_over, open_folder
from fedloom.study.tables.formats import to_markdown, to_text
from fedloom.study.tables.table import tabulate


@dataclass(frozen=True)
class OpenedGrid:
    """A grid, and the folder in which it ran."""

    grid: Grid
    folder: Path

    def table(self, split: Literal["test", "val"] = "test") -> str:
        """What `fedloom table` prints. Raises StateError where no run has finished."""
        return to_text(tabulate(self.grid, self.folder, split))

    def to_pandas(self) -> Any:
        """A pandas.DataFrame of all finished runs: data, base and addon, the labels of a cell, then the columns of
        `Result.to_pandas`; one row a number. Raises StateError where no run has finished.
        """
        rows = [
            {"data": cell.data, "base": cell.base, "addon": cell.addon, **row}
            for cell in cells(self.grid)
            if is_over(path := cell.folder(self.folder))
            for row in Run.read(path).rows()
        ]
        if not rows:
            raise StateError(f"no cell of grid {self.grid.name} has finished in {self.folder}")
        return need("pandas", "notebook").DataFrame(rows)

    def _repr_markdown_(self) -> str:
        """For notebooks."""
        return to_markdown(tabulate(self.grid, self.folder, "test"))


def grid(source: str | Path) -> OpenedGrid:
    """A grid that `fedloom grid` ran, finished or not, to read: its folder, or a grid that ran in its default folder.

    Raises StateError where there is no such folder, RecipeError for a grid that cannot be read.
    """
    return OpenedGrid(*open_folder(source))
