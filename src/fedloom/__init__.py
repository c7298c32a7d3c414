"""fedloom: federated multi-task learning, one method object on a laptop, a cluster and in a deployment."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from fedloom._version import __version__ as __version__
from fedloom.core.lazy import lazy

if TYPE_CHECKING:
    from fedloom.core.context import Ctx as Ctx
    from fedloom.core.layout import Block as Block
    from fedloom.core.layout import Layout as Layout
    from fedloom.core.layout import Select as Select
    from fedloom.core.updates import Updates as Updates
    from fedloom.data.own import Client as Client
    from fedloom.data.own import Federation as Federation
    from fedloom.engines.api import Result as Result
    from fedloom.engines.api import plan as plan
    from fedloom.engines.api import resume as resume
    from fedloom.engines.api import run as run
    from fedloom.experiments.compared import compare as compare
    from fedloom.experiments.export.bundle import export as export
    from fedloom.experiments.tune import Budget as Budget
    from fedloom.methods.laws import check as check
    from fedloom.methods.method import Method as Method
    from fedloom.models.build import model as model
    from fedloom.models.tasks.own import task as task
    from fedloom.study.table import grid as grid

# Torch then asks for large pages for large tensors, where the system has them: touching fresh small ones took half of a
# round. It reads this when it makes its first tensor.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

__getattr__, __dir__ = lazy(__name__)
