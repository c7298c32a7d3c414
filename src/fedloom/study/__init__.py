"""Studies: read run folders and compare them. Free of torch."""

from __future__ import annotations

from fedloom.study.compare import Comparison, compare, delta_m
from fedloom.study.runs import Final, Run

__all__ = ["Comparison", "Final", "Run", "compare", "delta_m"]
