"""Studies: read run folders and compare them; grids of runs and their tables. Free of torch."""

from __future__ import annotations

from fedloom.study.compare import Comparison, compare
from fedloom.study.grid import Grid, load_grid, open_folder
from fedloom.study.runs import Final, Run
from fedloom.study.table import tabulate
from fedloom.tasks.delta import delta_m

__all__ = ["Comparison", "Final", "Grid", "Run", "compare", "delta_m", "load_grid", "open_folder", "tabulate"]
