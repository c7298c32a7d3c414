"""Names of the form `package.module:name`: what they stand for, and where it came from."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import os
import re
import sys
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from fedloom.errors import RecipeError, nearest

_NAME = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


def is_import(name: str) -> bool:
    """Whether a name has the form `package.module:name`."""
    return _NAME.fullmatch(name) is not None


def imported(name: str) -> Any:
    """What `package.module:name` stands for. Modules in the current folder are found too.

    Importing runs the module's code. Raises RecipeError where the module or the name in it is not there.
    """
    module_name, _, path = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # a console script has its own folder there, not that in which it was started
    try:
        thing: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if not f"{module_name}.".startswith(f"{error.name}."):
            raise RecipeError(f"{name!r}: importing {module_name} needs {error.name!r}, which is not there") from None
        raise RecipeError(
            f"{name!r}: there is no module {error.name!r}, neither installed nor in the folder {os.getcwd()}"
        ) from None
    except Exception as error:
        raise RecipeError(f"{name!r}: importing {module_name} failed: {type(error).__name__}: {error}") from error
    for part in path.split("."):
        if not hasattr(thing, part):
            public = [known for known in vars(thing) if not known.startswith("_")]
            raise RecipeError(f"{name!r}: {module_name} has no {part!r}.{nearest(part, public)}")
        thing = getattr(thing, part)
    return thing


def source(thing: Any) -> dict[str, str | None]:
    """Where a function, a class or an object of one comes from.

    Its module; the version of the package that brings it; 16 hexadecimal digits over the module's file, or over the
    text of what a notebook defines. None where that is not known.
    """
    thing = inspect.unwrap(thing.func if isinstance(thing, partial) else thing)
    home = thing if inspect.isroutine(thing) or inspect.isclass(thing) else type(thing)
    module = str(home.__module__)
    try:
        file = None if module == "__main__" else inspect.getsourcefile(home)
        text = Path(file).read_bytes() if file else inspect.getsource(home).encode()
    except (OSError, TypeError):
        text = None
    package = module.partition(".")[0]
    try:
        version: str | None = metadata.version(package)
    except metadata.PackageNotFoundError:  # a file, or a package whose name is not that of its module
        version = getattr(sys.modules.get(package), "__version__", None)
    return {
        "module": module,
        "version": version,
        "source": None if text is None else hashlib.sha256(text).hexdigest()[:16],
    }
