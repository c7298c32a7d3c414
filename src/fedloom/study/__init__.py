"""Studies: read run folders and compare them; grids of runs and their tables. Free of torch."""

from __future__ import annotations

from fedloom.federation.runs.reader import Final, Run
from fedloom.study.grid import Grid, load_grid, open_folder
from fedloom.study.significance.contrasts import contrasts
from fedloom.study.significance.ranks import ranked
from fedloom.study.tables.compare import Comparison, compare
from fedloom.study.tables.estimate import delta_m
from fedloom.study.tables.results import of_grid
from fedloom.study.tables.table import tabulate

__all__ = [
    "Comparison",
    "Final",
    "Grid",
    "Run",
    "compare",
    "contrasts",
    "delta_m",
    "load_grid",
    "of_grid",
    "open_folder",
    "ranked",
    "tabulate",
]
