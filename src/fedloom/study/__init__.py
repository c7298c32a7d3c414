"""Studies: read run folders and compare them; grids of runs and their tables. Free of torch."""

from __future__ import annotations

from fedloom.federation.runs.reader import Final as Final
from fedloom.federation.runs.reader import Run as Run
from fedloom.study.comparison import Comparison as Comparison
from fedloom.study.comparison import compare as compare
from fedloom.study.grid import Grid as Grid
from fedloom.study.grid import load_grid as load_grid
from fedloom.study.grid import open_folder as open_folder
from fedloom.study.results import of_grid as of_grid
from fedloom.study.significance import contrasts as contrasts
from fedloom.study.significance import ranked as ranked
from fedloom.study.statistics import delta_m as delta_m
from fedloom.study.table import tabulate as tabulate
