"""Studies: read run folders and compare them. Free of torch."""

from __future__ import annotations

from fedloom.study.compare import Comparison, compare
from fedloom.study.runs import Final, Run
from fedloom.tasks.delta import delta_m

__all__ = ["Comparison", "Final", "Run", "compare", "delta_m"]
