"""Names that import their module on first use, so that `import fedloom` and `--help` do not pay for torch."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from functools import cache
from typing import Any


def lazy(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a package, in whose file each name stands once; they also make its `__all__`.

    A name is offered by a line `from MODULE import NAME as NAME`. It is imported on first use where the line is below
    `if TYPE_CHECKING:`, which type checkers read and Python does not.
    """

    @cache
    def home() -> dict[str, str]:
        """Name -> module."""
        import ast

        loader: Any = sys.modules[package].__loader__
        if (source := loader.get_source(package)) is None:
            raise ImportError(f"{package} is installed without its source files, which list the names that it offers")
        lines = [line for top in ast.parse(source).body for line in getattr(top, "body", [top])]
        imports = [line for line in lines if isinstance(line, ast.ImportFrom)]
        return {name.name: str(line.module) for line in imports for name in line.names if name.name == name.asname}

    def getter(name: str) -> Any:
        if name == "__all__":
            return sorted(home())
        if name in home():
            return getattr(importlib.import_module(home()[name]), name)
        try:
            if not name.startswith("__"):  # a module that is no package is asked for its __path__
                return importlib.import_module(f"{package}.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"{package}.{name}":
                raise
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return getter, lambda: sorted(home())
