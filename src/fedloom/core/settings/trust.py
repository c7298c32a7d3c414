"""Decide which code a recipe may import: data never becomes code that its reader did not allow.

The origin of a name `package.module:name` decides: what the user types is allowed; a recipe file is asked about once in
a terminal; a run folder is allowed where this user began the run and the source is the same; a bundle and the network
are not. `--allow-code` and FEDLOOM_ALLOW_CODE allow packages from every origin.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.machinery
import inspect
import os
import re
import sys
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from enum import Enum
from functools import cache, cached_property, partial
from importlib import metadata
from pathlib import Path
from typing import Any

from fedloom.core.errors import RecipeError, nearest, printable

ALLOW = "FEDLOOM_ALLOW_CODE"
"""Packages, modules or whole names, separated by commas, that may be imported whoever names them."""
CONFIG = "FEDLOOM_CONFIG"
"""The user's configuration folder; by default `fedloom` in XDG_CONFIG_HOME or in ~/.config."""

_PLACES = {"name", "data", "partition", "model", "method", "graph", "attack", "codec", "loss", "metrics"}
"""Keys of a recipe whose value may name code."""
_SUFFIXES = tuple(importlib.machinery.all_suffixes())
_KNOWN = {"fedloom", "numpy", "peft", "pydantic", "sklearn", "timm", "torch", "torchjd", "torchvision"}
_KNOWN |= sys.stdlib_module_names
"""Packages that built-in models, methods and tasks hold parts of; nobody's own code, as is Python's."""
UNKNOWN = "unknown"
"""In place of a checksum: nothing with it is remembered."""
_allowed: set[str] = set()
"""Names that may be imported in this process. An entry, once there, stays: its code may have run."""
_IMPORT = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_version = cache(metadata.version)  # it reads the package's files; that a package is absent is not remembered


def is_import(name: str) -> bool:
    """Return whether a name has the form `package.module:name`."""
    return _IMPORT.fullmatch(name) is not None


def source(thing: Any) -> dict[str, str | None]:
    """Return the origin of a function, a class or an object; None where it is not known.

    It has the module, its package's version, and 16 hexadecimal digits over the file, or over a notebook's text.
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
        version: str | None = _version(package)
    except metadata.PackageNotFoundError:  # a file, or a package whose name is not that of its module
        version = getattr(sys.modules.get(package), "__version__", None)
    digest = None if text is None else hashlib.sha256(text).hexdigest()[:16]
    return {"module": module, "version": version, "source": digest}


def sources(things: Iterable[Any]) -> dict[str, dict[str, str | None]]:
    """Return module:name -> origin of users' classes and functions among `things` and their fields, once per file."""
    result: dict[str, dict[str, str | None]] = {}
    left, seen = [*things], dict[int, Any]()  # with the objects: what is gone may leave its id to another
    for thing in left:  # which grows
        thing = thing.func if isinstance(thing, partial) else thing
        if id(thing) in seen:
            continue
        seen[id(thing)] = thing
        if isinstance(thing, Mapping):
            left += thing.values()
        elif isinstance(thing, tuple | list | set | frozenset):
            left += thing
        homes: tuple[Any, ...] = inspect.getmro(thing if inspect.isclass(thing) else type(thing))
        homes = (inspect.unwrap(thing),) if inspect.isroutine(thing) else homes  # of a method, not of its object
        own = [home for home in homes if package_of(home.__module__ or "fedloom") not in _KNOWN]
        for home in own:
            if (origin := source(home)) not in result.values():
                result[f"{home.__module__}:{home.__qualname__}"] = origin
        if not inspect.isclass(thing) and (is_dataclass(thing) or own):
            left += getattr(thing, "__dict__", {}).values()
    return result


class Origin(Enum):
    """The origin of a name of code."""

    TYPED = "typed"
    """On the command line or in Python: allowed."""
    FILE = "file"
    """In a recipe file given by path: asked once in a terminal."""
    FOLDER = "run folder"
    """In a run folder: allowed where this user began a run with the same source."""
    ELSEWHERE = "elsewhere"
    """In a bundle, or in what came over the network: never allowed without `--allow-code`."""


@dataclass(frozen=True)
class Code:
    """The source that a name stands for. Nothing of it has been imported."""

    name: str
    file: Path | None
    """The module's file; None where there is none, as for built-in modules."""
    root: Path | None
    """The top-level package's folder, or the module's file where it stands alone."""

    @cached_property
    def sha256(self) -> str:
        """The checksum of the file, or of the package's; `UNKNOWN` where they cannot all be read, or lie elsewhere."""
        digest = hashlib.sha256()
        try:
            if self.root is None or not self.root.is_dir():
                return hashlib.sha256(self.root.read_bytes()).hexdigest() if self.root else UNKNOWN
            for path in sorted(self.root.rglob("*")):
                if path.is_symlink() and path.is_dir():
                    return UNKNOWN
                if path.name.endswith(_SUFFIXES) and path.parent.name != "__pycache__" and path.is_file():
                    digest.update(f"{path.relative_to(self.root).as_posix()}\0{path.stat().st_size}\0".encode())
                    with path.open("rb") as file:
                        digest.update(hashlib.file_digest(file, "sha256").digest())
        except OSError:
            return UNKNOWN
        return digest.hexdigest()

    def __str__(self) -> str:
        if self.file is None:
            return f"{self.name} (no source found: absent here, or built into Python)"
        here = Path.cwd().resolve()
        file = self.file.relative_to(here) if self.file.is_relative_to(here) else self.file
        return f"{self.name} ({file}, sha256 {self.sha256})"


def names_in(value: Any, key: str = "") -> Iterator[str]:
    """Yield the names of code in a recipe as it was parsed, before any of it is resolved."""
    if isinstance(value, Mapping):
        for inner, content in value.items():
            if key == "add" and isinstance(inner, str) and is_import(inner):
                yield inner
            yield from names_in(content, key if key == "metrics" else str(inner))
    elif isinstance(value, list | tuple):
        for content in value:
            yield from names_in(content, key)
    elif isinstance(value, str) and key in _PLACES and is_import(value):
        yield value


def located(name: str) -> Code:
    """Find the source of `package.module:name` where importing would find it, without importing anything."""
    module, file = "", None
    path: list[str] | None = None
    tops: list[str] = []
    for part in name.partition(":")[0].split("."):
        module = f"{module}.{part}" if module else part
        spec, above = _spec(module, path), path or ()
        if spec is not None:
            path, file = list(spec.submodule_search_locations or ()), _file(spec)
        else:  # a folder without __init__.py in another one is found only once that is imported
            path, file = [folder for one in above if os.path.isdir(folder := os.path.join(one, part))], None
            if not path:
                return Code(name, None, None)
        tops = tops or path
    if file is None:
        return Code(name, None, None)
    package = (Path(top).absolute() for top in tops)
    return Code(name, file.resolve(), next((top for top in package if file.is_relative_to(top)), file))


def _spec(module: str, path: list[str] | None, here: bool = True) -> importlib.machinery.ModuleSpec | None:
    """Return the module's spec; a top-level module is looked for in the current folder last, if `here`."""
    for finder in sys.meta_path:
        with contextlib.suppress(ImportError, ValueError, KeyError):
            if (spec := finder.find_spec(module, path)) is not None:
                return spec
    if path is None and here:
        return importlib.machinery.PathFinder.find_spec(module, [os.getcwd()])
    return None


def _file(spec: importlib.machinery.ModuleSpec) -> Path | None:
    frozen = getattr(spec.loader_state, "filename", None)  # a frozen module of Python itself
    origin = frozen or spec.origin
    return Path(origin).absolute() if origin and Path(origin).is_file() else None


def allow(packages: Iterable[str]) -> None:
    """Allow packages, modules or whole names for the rest of the process and for processes that it starts."""
    before = [text for text in os.environ.get(ALLOW, "").split(",") if text.strip()]
    os.environ[ALLOW] = ",".join(dict.fromkeys([*before, *packages]))


def package_of(name: str) -> str:
    """Return the package of a name such as package.module:thing."""
    return name.partition(":")[0].partition(".")[0]


def is_allowed(name: str) -> bool:
    """Return whether a name may be imported in this process."""
    module = name.partition(":")[0]
    listed = {text.strip() for text in os.environ.get(ALLOW, "").split(",")}
    return name in _allowed or name in listed or any(f"{module}.".startswith(f"{one}.") for one in listed if one)


def allowed() -> list[str]:
    """Return the names that were allowed so far, for processes that do the same work."""
    return sorted(_allowed)


def admit(names: Iterable[str], origin: Origin, where: str, recorded: Mapping[str, Any] | None = None) -> None:
    """Allow names of code, by the rule of their origin, or raise RecipeError with all that would be imported.

    `where` names the sender. `recorded` is what a run's folder says of its sources: name -> {module, source}, or None.
    """
    new = [name for name in dict.fromkeys(names) if not is_allowed(name)]
    if origin is Origin.TYPED:
        _allowed.update(new)
        return
    codes = [located(name) for name in new]
    if origin is Origin.FILE:
        codes = [code for code in codes if not _kept(code, "answers")]
    if origin is Origin.FOLDER:
        codes = [code for code in codes if not (_kept(code, "runs") and _as_recorded(code, recorded))]
    if codes and not (origin is Origin.FILE and _agreed(where, codes)):
        listed = "\n".join(f"  {code}" for code in codes)
        packages = ",".join(sorted({package_of(code.name) for code in codes}))
        raise RecipeError(
            f"{where} names code that would be imported and run:\n{listed}\nNothing was imported. Read the code; then "
            f"allow it with --allow-code {packages}, or with {ALLOW}={packages}"
        )
    _allowed.update(new)


def _as_recorded(code: Code, recorded: Mapping[str, Any] | None) -> bool:
    """Return whether the source is the one that a run's folder recorded, if the folder does that."""
    if recorded is None:
        return True
    origin = recorded.get(code.name)
    if not isinstance(origin, Mapping) or not isinstance(origin.get("module"), str):
        return False
    now = _source_now(origin["module"])
    return now is not None and now == origin.get("source")


def _source_now(module: str) -> str | None:
    """Return 16 hexadecimal digits over a module's file, as `source` has them; None where there is none."""
    file = located(module).file
    return None if file is None else hashlib.sha256(file.read_bytes()).hexdigest()[:16]


def changed_sources(recorded: Mapping[str, Any], held: Mapping[str, Any]) -> Iterator[str]:
    """Yield 'MODULE: source WAS, now IS' of the modules whose source is not as a run's folder recorded it.

    `held` are the origins of objects that are here: what a notebook defines has no file. Nothing is imported.
    """
    for name, origin in recorded.items():
        module, was = origin.get("module"), origin.get("source")
        if isinstance(module, str) and isinstance(was, str):
            now = held[name]["source"] if name in held else _source_now(module)
            if now is not None and now != was:
                yield f"{module}: source {was}, now {now}"


def _agreed(where: str, codes: Collection[Code]) -> bool:
    """Ask in a terminal, and remember a yes."""
    if not (sys.stdin and sys.stdin.isatty() and sys.stderr.isatty()):
        return False
    question = f"{where} uses {', '.join(map(str, codes))}. Allow? [y/N] "
    sys.stderr.write(printable(question))  # control characters in a file's name could hide the question
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        return False
    for code in codes:
        _keep(code, "answers")
    return True


def keep_run(names: Iterable[str]) -> None:
    """Remember that this user began a run with this code, so that resuming it needs no confirmation."""
    for name in names:
        _keep(located(name), "runs")


def _entry(code: Code, kind: str) -> Path:
    """Return the file that stands for a name and its source, as direnv keeps what it may load."""
    named = os.environ.get(CONFIG)
    config = Path(named) if named else Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "fedloom"
    digest = hashlib.sha256(f"{code.name}\0{code.file}\0{code.sha256}".encode()).hexdigest()
    return config / "allowed-code" / kind / digest


def _kept(code: Code, kind: str) -> bool:
    return code.sha256 != UNKNOWN and _entry(code, kind).is_file()


def _keep(code: Code, kind: str) -> None:
    entry = _entry(code, kind)
    with contextlib.suppress(OSError):  # without it the next time asks again
        entry.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.NamedTemporaryFile("w", dir=entry.parent, delete=False, encoding="utf-8") as file:
            file.write(f"{code}\n")
        os.replace(file.name, entry)


def imported(name: str) -> Any:
    """Import what `package.module:name` stands for. Modules in the current folder are found too.

    Importing runs the module's code. Raises RecipeError where the name was not allowed, or does not exist.
    """
    if not is_allowed(name):
        raise RecipeError(f"{name!r} is code that nobody has allowed; allow it with --allow-code or {ALLOW}")
    top = package_of(name)
    if _spec(top, None) is not None and not _spec(top, None, here=False):
        sys.path.append(os.getcwd())  # only for what is allowed: a module there could stand for one that is missing
    return announced(name)


def announced(name: str) -> Any:
    """Import what an installed package announces as its own; whoever installed it allowed it."""
    module_name, _, path = name.partition(":")
    try:
        thing: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if not f"{module_name}.".startswith(f"{error.name}."):
            raise RecipeError(
                f"{name!r}: importing {module_name} needs {error.name!r}, which is not installed"
            ) from None
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
