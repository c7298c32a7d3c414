"""Imports on first use: the names of a package, so that `--help` does not load torch, and optional dependencies."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

from fedloom.core.errors import UserError


def lazy(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a package, which also make its `__all__`.

    A name is offered by a line `from MODULE import NAME as NAME`, and imported on first use where the line is below `if
    TYPE_CHECKING:`, which type checkers read and Python does not.
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


_kept: list[Any] = []  # operator schemas must outlive their declaration


def need(module: str, extra: str) -> ModuleType:
    """Import `module`, or raise an error that names the extra of fedloom that installs it."""
    if module.split(".")[0] in {"torchvision", "timm", "peft", "torchmetrics"}:
        _mend_torchvision()
    try:
        return _installed(module)
    except ImportError as error:
        package = module.split(".")[0]
        raise UserError(
            f"This needs the package {package!r}, which is not installed: pip install 'fedloom[{extra}]'"
        ) from error


def _installed(module: str) -> ModuleType:
    """Import a module, unless its package is a file or folder of the current folder, which nobody installed."""
    package = module.partition(".")[0]
    if package not in sys.modules and (spec := importlib.util.find_spec(package)) is not None:
        places = spec.submodule_search_locations or [spec.origin or ""]
        if any(os.path.dirname(place) == os.getcwd() for place in places):
            raise ImportError(f"{package} is in the current folder, but it is not installed")
    return importlib.import_module(module)


def _mend_torchvision() -> None:
    """Make a torchvision built for CUDA importable beside a CPU build of torch.

    Its extension then fails to load and two operators stay undeclared, which breaks timm, peft and torchmetrics too.
    """
    try:
        _installed("torchvision")
    except ImportError:
        return
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        import torch

        library = torch.library.Library("torchvision", "FRAGMENT")
        _kept.append(library)
        for operator in ("nms", "qnms"):
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        importlib.import_module("torchvision")
