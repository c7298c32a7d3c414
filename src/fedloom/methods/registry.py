"""The tables of methods and add-ons that recipes and the command line name, and `Method` for modules that fill them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import TYPE_CHECKING, Any, cast

from fedloom.settings.registry import F, Registry

if TYPE_CHECKING:
    from fedloom.methods.method import Method as Method


class AddOns(Registry):
    """Add-ons; the method that one returns is called as in a recipe: 'fedavg + feddea'."""

    def register(self, name: str, source: str = "") -> Callable[[F], F]:
        """Register an add-on under `name`, which it adds to the method's."""
        add = super().register(name, source)

        def named(function: F) -> F:
            @wraps(function)
            def made(method: Method, **params: Any) -> Method:
                return replace(function(method, **params), name=f"{method.name} + {name}")

            return add(cast(F, made))

        return named


METHODS = Registry("method")
"""Functions (*, parameters) -> Method."""
ADDONS = AddOns("add-on")
"""Functions (method, *, parameters) -> Method."""

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """`Method` on first use, because it imports torch, and modules that register must not."""
        if name != "Method":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from fedloom.methods.method import Method

        return Method
