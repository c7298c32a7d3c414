"""Named, typed functions that a recipe may call: methods, add-ons, data sets, partitioners, encoders.

A function's signature is the schema of its recipe section. What stands under a name is registered here, announced by an
installed package as an entry point, or, as `package.module:name`, imported, if `core/settings/trust.py` allowed it.
Modules that register must not import torch at module level, so that a recipe can be checked without it.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from functools import cached_property, partial, wraps
from importlib import import_module, metadata
from types import NoneType, SimpleNamespace, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from fedloom.core.errors import RecipeError, UserError, choices, unknown
from fedloom.core.settings import renamed
from fedloom.core.settings.section import PARTS, one_of
from fedloom.core.settings.trust import announced, imported, is_import, package_of, source

R = TypeVar("R")


@dataclass(frozen=True)
class Registered:
    """One named function: `params` is the pydantic model of its parameters that are keyword-only or have a default."""

    name: str
    function: Callable[..., Any]
    params: type[BaseModel]
    summary: str
    source: str
    takes: int
    """The number of its positional arguments."""
    package: str = ""
    """The package that it comes from; empty for this one."""
    thing: Any = None
    """The object of that name: the function, or the object that it gives."""
    kind: str = ""
    """The word for it in messages."""

    def make(self, *given: Any, **params: Any) -> Any:
        """Call the function with those values that it takes. Raises RecipeError for others, and where it fails."""
        what = f"{self.kind} {getattr(self.thing, '__qualname__', self.name)}"
        if self.takes > len(given):
            raise RecipeError(
                f"{what}: expected a function with at most {len(given)} required arguments, found {self.takes}"
            )
        try:
            return self.function(*given[: self.takes], **params)
        except (UserError, MemoryError):
            raise
        except Exception as error:
            if self.origin is None:
                raise
            raise RecipeError(f"{what}: {type(error).__name__}: {error}") from error

    @property
    def origin(self) -> dict[str, str | None] | None:
        """Module, package, version and source of a function that is not fedloom's own."""
        code = source(getattr(self.thing, "module", self.thing))  # of fl.model(...), the module in it
        return None if str(code["module"]).partition(".")[0] == "fedloom" else code


@dataclass
class Registry:
    """The functions of one kind; `kind` is the word used in messages, `group` that of entry points."""

    kind: str
    group: str = ""
    gives: tuple[str, ...] = ()
    """module:Class of what an imported function of this kind must return, or an imported object be. Empty: names of
    code are refused."""
    older: Mapping[str, str] = field(default_factory=dict)
    """Names of older versions, and what they are called now."""
    registered: dict[str, tuple[Callable[..., Any], str]] = field(default_factory=dict)
    """Name -> (function, source)."""

    @cached_property
    def _used(self) -> dict[str, Registered]:
        return {}  # those of them that were used so far: `--help` does not build the others' schemas

    @property
    def entries(self) -> dict[str, Registered]:
        """All that is registered here, by name."""
        return {name: self[name] for name in self.registered}

    def __contains__(self, name: str) -> bool:
        """Return whether a name is registered or announced."""
        return name in self.registered or name in self.announced

    def register(
        self, name: str, source: str = "", order: Sequence[str] = (), note: str = ""
    ) -> Callable[[Callable[..., R]], Callable[..., R]]:
        """Register a function under `name`. Its parameters that are keyword-only become recipe keys.

        So do the parameters of a part that it takes, such as `rule: training.Proximal`. Keys in `order` come first.
        `note` ends its docstring: what it has in common with others, said once.
        """

        def add(function: Callable[..., R]) -> Callable[..., R]:
            if name in self.registered:
                raise ValueError(f"{self.kind} {name!r} is registered twice")
            if note:
                function.__doc__ = f"{inspect.getdoc(function)}\n\n{note}"
            function = _with_parts(function, order)
            self.registered[name] = (function, source)
            return function

        return add

    def of(self, name: str, thing: Any, source: str = "", package: str = "") -> Registered:
        """Return the entry of a name. An object that is no function and no class is its own result."""
        called = inspect.isroutine(thing) or inspect.isclass(thing) or isinstance(thing, partial)
        function = thing if called else lambda: thing
        params = inspect.signature(function).parameters.values()
        required = [
            p for p in params if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty
        ]
        keys = [
            p for p in params if p.kind is p.KEYWORD_ONLY or (p.kind is p.POSITIONAL_OR_KEYWORD and p not in required)
        ]
        # Only the keys need to resolve: positional arguments and results may be typed with torch.
        own = SimpleNamespace(__annotations__={p.name: Any if p.annotation is p.empty else p.annotation for p in keys})
        home = function.__init__ if inspect.isclass(function) else inspect.unwrap(function)
        space = getattr(home.func if isinstance(home, partial) else home, "__globals__", {})
        for base in function.__mro__ if inspect.isclass(function) else ():
            space = {**vars(sys.modules[base.__module__]), **space}
        for _, declared in getattr(function, "parts", {}).values():
            space = {**vars(sys.modules[declared.__module__]), **space}
        try:
            hints = get_type_hints(own, globalns=space, include_extras=True)
            fields: dict[str, Any] = {p.name: (hints[p.name], ... if p.default is p.empty else p.default) for p in keys}
            model = create_model(f"{self.kind}:{name}", __config__=ConfigDict(extra="forbid", strict=False), **fields)
        except (TypeError, ValueError, NameError) as error:
            what = getattr(thing, "__qualname__", name)
            raise RecipeError(f"{self.kind} {what}: its parameters cannot be recipe keys: {error}") from None
        summary = (inspect.getdoc(thing) or "").split("\n\n")[0].replace("\n", " ")
        return Registered(name, function, model, summary, source, len(required), package, thing, self.kind)

    @cached_property
    def announced(self) -> Mapping[str, metadata.EntryPoint]:
        """Name -> what an installed package announces under it. Nobody installed what is in the current folder."""
        installed = [path for path in sys.path if os.path.abspath(path) != os.getcwd()]
        packages = metadata.distributions(path=installed) if self.group else ()
        points = [point for package in packages for point in package.entry_points if point.group == self.group]
        return {point.name: point for point in reversed(points)}  # of two with one name the first on the path

    @property
    def names(self) -> list[str]:
        """Return all names except imported ones."""
        return sorted({*self.registered, *self.announced})

    def current(self, name: str) -> str:
        """Return today's name for a name of an older version."""
        return renamed.current(self.kind, name, self.older)

    def problem(self, name: str) -> str | None:
        """Return the error message for an unknown name; None for a known one."""
        if name in self or name in self.older:
            return None
        if is_import(name) and self.gives:
            try:
                self[name]
            except RecipeError as error:
                return str(error)
            return None
        more = ", or package.module:name" if self.gives else ""
        return f"unknown {self.kind} {name!r}.{choices('Allowed', name, self.names)}{more}"

    def fits(self, section: dict[str, Any]) -> dict[str, Any]:
        """Return a section {name: a registered name, its parameters} as it is. Raises ValueError for anything else."""
        if "name" not in section:
            raise ValueError(f"no name of a {self.kind} found, expected a mapping with 'name' and its parameters")
        if problem := self.problem(str(section["name"])):
            raise ValueError(problem)
        try:
            given = {key: value for key, value in section.items() if key != "name"}
            self[section["name"]].params.model_validate(given)
        except ValidationError as error:
            wrong = error.errors()[0]
            raise ValueError(f"{'.'.join(map(str, wrong['loc']))}: {wrong['msg']}") from None
        return section

    def __getitem__(self, name: str) -> Registered:
        name = self.current(name)
        if name in self.registered:
            if name not in self._used:
                self._used[name] = self.of(name, *self.registered[name])
            return self._used[name]
        if name in self.announced:
            point = self.announced[name]
            return self.of(name, announced(point.value), package=point.dist.name if point.dist else "")
        if is_import(name) and self.gives:
            thing = imported(name)
            self._is_of_this_kind(name, thing)
            return self.of(name, thing, package=package_of(name))
        raise RecipeError(unknown(self.kind, name, self.names))

    def _is_of_this_kind(self, name: str, thing: Any) -> None:
        """Raise RecipeError before an imported thing is called that this registry would not hold.

        Expected: an object or a subclass of one of the classes `gives`, a function that is annotated as returning one,
        or one that is registered here. A recipe chooses the arguments, so nothing else may be called.
        """
        if any(entry.thing is thing for entry in self.entries.values()):
            return
        wanted = [getattr(import_module(module), cls) for module, _, cls in (one.partition(":") for one in self.gives)]
        inner = inspect.unwrap(thing.func if isinstance(thing, partial) else thing)
        if inspect.isclass(thing):
            fits, what = issubclass(thing, tuple(wanted)), f"the class {thing.__qualname__}"
        elif inspect.isroutine(inner):
            returns = _returned(inner)
            fits = bool(returns) and all(_is_one(one, wanted) for one in returns)
            names = " or ".join(str(getattr(one, "__name__", one)) for one in returns)
            what = f"a function {f'that returns {names}' if names else 'whose return is not annotated'}"
        else:
            fits, what = isinstance(thing, tuple(wanted)), f"an object of {type(thing).__qualname__}"
        if not fits:
            names = one_of([cls.__name__ for cls in wanted])
            raise RecipeError(
                f"{self.kind} {name!r}: {what} found, expected {names}: an object, a subclass, or a function annotated "
                f"as returning it (def ...(...) -> {wanted[0].__name__})"
            )

    def __iter__(self) -> Iterator[Registered]:
        return iter(self[name] for name in self.names)


def _with_parts(function: Callable[..., R], order: Sequence[str]) -> Callable[..., R]:
    """Return a function that takes parts by their parameters: for `rule: training.Proximal` the fields of Proximal."""
    named = {name: str(hint).rpartition(".")[2] for name, hint in function.__annotations__.items() if name != "return"}
    parts = {name: PARTS[part] for name, part in named.items() if part in PARTS}
    if not parts:
        return function

    @wraps(function)
    def with_parts(*args: Any, **params: Any) -> R:
        for name, (path, declared) in parts.items():
            module, _, cls = path.partition(":")
            own = {field.name: params.pop(field.name) for field in fields(declared) if field.name in params}
            params[name] = getattr(import_module(module), cls)(**own)
        return function(*args, **params)

    keys: list[inspect.Parameter] = []
    for key in inspect.signature(function).parameters.values():
        declared = parts[key.name][1] if key.name in parts else None
        own = getattr(declared, "__annotations__", {})
        if not declared:
            keys.append(key)
            continue
        for one in sorted(fields(declared), key=lambda one: one.name not in own):
            default = inspect.Parameter.empty if one.default is MISSING else one.default
            keys.append(inspect.Parameter(one.name, key.KEYWORD_ONLY, default=default, annotation=one.type))
    if order:
        keys.sort(key=lambda key: (key.kind, order.index(key.name) if key.name in order else len(order)))
    with_parts.__dict__.update(parts=parts, __signature__=inspect.Signature(keys))
    return with_parts


def _returned(function: Any) -> list[Any]:
    """Return the members of a function's return annotation: classes, or texts where they cannot be resolved."""
    try:
        hint = get_type_hints(function).get("return")
    except Exception:  # names that only a type checker imports, and modules that are absent
        hint = getattr(function, "__annotations__", {}).get("return")
    members = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    return [get_origin(one) or one for one in members if one not in (None, NoneType, Any)]


def _is_one(returned: Any, classes: Sequence[type]) -> bool:
    if inspect.isclass(returned):
        return issubclass(returned, tuple(classes))
    return str(returned).strip("'\"").rpartition(".")[2] in {cls.__name__ for cls in classes}
