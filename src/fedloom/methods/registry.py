"""The tables of methods and add-ons that recipes and the command line name."""

from __future__ import annotations

from fedloom.settings.registry import Registry

METHODS = Registry("method")
"""Functions (*, parameters) -> Method."""
ADDONS = Registry("add-on")
"""Functions (method, *, parameters) -> Method."""
