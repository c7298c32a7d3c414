"""The tables of methods and add-ons that recipes and the command line name, and `Method` for modules that fill them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fedloom.settings.registry import Registry

if TYPE_CHECKING:
    from fedloom.methods.method import Method as Method

METHODS = Registry("method")
"""Functions (*, parameters) -> Method."""
ADDONS = Registry("add-on")
"""Functions (method, *, parameters) -> Method."""

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """`Method` on first use, because it imports torch, and modules that register must not."""
        if name != "Method":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from fedloom.methods.method import Method

        return Method
