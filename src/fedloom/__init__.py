"""fedloom: federated multi-task learning, one method object on a laptop, a cluster and in a deployment."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedloom._lazy import lazy

if TYPE_CHECKING:
    from fedloom.context import Ctx
    from fedloom.methods.method import Method
    from fedloom.runtime.api import Result, plan, resume, run
    from fedloom.updates import Block, Layout, Select, Updates

__version__ = "0.1.0"
__getattr__, __dir__ = lazy(
    __name__,
    {
        "context": "Ctx",
        "methods.method": "Method",
        "runtime.api": "Result plan resume run",
        "updates": "Block Layout Select Updates",
    },
)
__all__ = [
    "Block", "Ctx", "Layout", "Method", "Result", "Select", "Updates", "__version__", "plan", "resume", "run",
]  # fmt: skip
