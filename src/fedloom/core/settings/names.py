"""Names of the form `package.module:name`: what they stand for, and where it came from.

Names of clients, which become names of folders. Free of torch.

Key paths of nested plain values: where two of them differ, and the value at one."""

from __future__ import annotations

import hashlib
import inspect
import re
import sys
from collections.abc import Mapping
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

from pydantic import AfterValidator

from fedloom.core.settings.problems import found

_NAME = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


def is_import(name: str) -> bool:
    """Return whether a name has the form `package.module:name`."""
    return _NAME.fullmatch(name) is not None


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


_CLIENT = re.compile(r"\w[\w .-]*")
_LONGEST = 200


def folder_name(client: str) -> str:
    """Return the name of a client's folder: letters outside ASCII are written as %XX, byte by byte."""
    return quote(client, safe=" ")


def client_name(name: Any) -> str:
    """Return a client's name. Raises ValueError for one that cannot be the name of a folder on every system."""
    if not isinstance(name, str) or not _CLIENT.fullmatch(name):
        raise ValueError(
            f"{found(name)} found, expected a client's name: letters, digits, '_', '-', '.' and spaces, "
            "the first a letter, a digit or '_'"
        )
    if len(folder_name(name)) > _LONGEST:
        raise ValueError(
            f"{found(name)} found, expected a client's name of at most {_LONGEST} characters, "
            f"of which a letter outside ASCII counts as 6 to 12, found {len(folder_name(name))}"
        )
    return name


ClientId = Annotated[str, AfterValidator(client_name)]
"""A client's name, in a recipe, in node.yaml and in what a node sends."""


def differs(path: str, one: Any, two: Any) -> list[str]:
    """Key paths of the leaves in which two plain values differ."""
    if isinstance(one, Mapping) and isinstance(two, Mapping):
        return [
            key
            for name in {*one, *two}
            for key in differs(f"{path}.{name}" if path else name, one.get(name), two.get(name))
        ]
    return [] if one == two else [path]


def value_at(value: Any, path: str) -> Any:
    """The value at a key path of nested mappings, None where there is none."""
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value
