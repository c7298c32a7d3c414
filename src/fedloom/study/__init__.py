"""Studies: read run folders and compare them; grids of runs and their tables. Free of torch."""

from __future__ import annotations

from fedloom.federation.runs.reader import Final, Run
from fedloom.study.comparison import Comparison, compare
from fedloom.study.grid import Grid, load_grid, open_folder
from fedloom.study.results import of_grid
from fedloom.study.significance import contrasts, ranked
from fedloom.study.statistics import delta_m
from fedloom.study.table import tabulate

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
