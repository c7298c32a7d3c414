"""Runs whose clients are nodes of Flower: rounds, methods and files are the same, jobs travel as its messages.

Only `flwr.app`, `flwr.clientapp` and `flwr.serverapp` are imported, where they are needed, so that fedloom works
without flwr. Flower reports to its makers unless it is told not to: it is told not to here, before it is imported.
"""

import os

from fedloom._lazy import lazy

for _name, _value in (
    ("FLWR_TELEMETRY_ENABLED", "0"),
    ("FLWR_DISABLE_UPDATE_CHECK", "1"),
    ("FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION", "1"),
    ("RAY_USAGE_STATS_ENABLED", "0"),
):
    os.environ.setdefault(_name, _value)

__all__ = ["Flower", "Node", "as_strategy", "client_app", "server_app"]

_LAZY = {"apps": "client_app server_app", "engine": "Flower", "node": "Node", "strategy": "as_strategy"}
__getattr__, __dir__ = lazy("fedloom.runtime.flower", _LAZY)
