"""Names that import their module on first use, so that `import fedloom` and `--help` do not pay for torch."""

from __future__ import annotations

import ast
import importlib
import pkgutil
from collections.abc import Callable
from typing import Any


def lazy(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """`__getattr__`, `__dir__` and `__all__` of a package, in whose file each name stands once.

    A name is offered by a line `from MODULE import NAME as NAME`. It is imported on first use where the line is below
    `if TYPE_CHECKING:`, which type checkers read and Python does not.
    """
    source = pkgutil.get_data(package, "__init__.py") or b""
    lines = [line for top in ast.parse(source).body for line in (top.body if isinstance(top, ast.If) else [top])]
    imports = [line for line in lines if isinstance(line, ast.ImportFrom)]
    home = {name.name: str(line.module) for line in imports for name in line.names if name.name == name.asname}

    def getter(name: str) -> Any:
        if name in home:
            return getattr(importlib.import_module(home[name]), name)
        try:
            return importlib.import_module(f"{package}.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"{package}.{name}":
                raise
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return getter, lambda: sorted(home), sorted(home)
