"""Runs whose clients are nodes of Flower: rounds, methods and files stay the same, and jobs are Flower's messages.

Only `flwr.app`, `flwr.clientapp` and `flwr.serverapp` are imported, where they are needed, so that fedloom works
without flwr. Flower reports to its makers by default; this is switched off here, before Flower is imported.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from fedloom.core.lazy import lazy

if TYPE_CHECKING:
    from fedloom.engines.flower.engine import Flower as Flower
    from fedloom.engines.flower.engine import server_app as server_app
    from fedloom.engines.flower.node import Node as Node
    from fedloom.engines.flower.node import client_app as client_app

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}
"""Settings of Flower's commands: they report to nobody and install nothing."""
for _name, _value in {**QUIET, "RAY_USAGE_STATS_ENABLED": "0"}.items():
    os.environ.setdefault(_name, _value)

__getattr__, __dir__ = lazy(__name__)
