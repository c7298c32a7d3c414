"""Methods: recipes of a few lines over stages and local rules, and the tables that name them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedloom._lazy import lazy
from fedloom.methods.registry import ADDONS, METHODS

if TYPE_CHECKING:
    from fedloom.methods.method import Method

__getattr__, __dir__ = lazy(__name__, {"method": "Method"})

# These modules register themselves; none imports torch before it is called.
from fedloom.methods.basic import fedavg, fedprox, local  # noqa: E402
from fedloom.methods.feddea import feddea  # noqa: E402

__all__ = ["ADDONS", "METHODS", "Method", "fedavg", "feddea", "fedprox", "local"]
