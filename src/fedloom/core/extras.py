"""Optional dependencies: imported when needed; the error says how to install what is missing."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from types import ModuleType
from typing import Any

from fedloom.core.errors import UserError

_kept: list[Any] = []  # operator schemas must outlive their declaration


def need(module: str, extra: str) -> ModuleType:
    """Import `module`, or say which extra of fedloom brings it."""
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
            raise ImportError(f"{package} is in the current folder, not installed")
    return importlib.import_module(module)


def _mend_torchvision() -> None:
    """Make a torchvision built for CUDA importable beside a CPU build of torch.

    Its extension then fails to load and two operators stay undeclared. This breaks torchvision and also timm, peft and
    torchmetrics, because each of them imports torchvision if it is there.
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
