"""`fedloom methods` and `fedloom recipes`: lists of everything that has a name."""

from __future__ import annotations

import json
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedloom.cli import complete, shared
from fedloom.cli.shared import argument, flag
from fedloom.core.errors import UserError, unknown
from fedloom.core.settings.trust import Origin, admit, is_import

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fedloom.core.settings.registry import Registered, Registry
    from fedloom.federation.recipes.loader import Entry


def methods(
    name: Annotated[
        str | None, argument("A method or add-on, to print its details.", "NAME", autocompletion=complete.method)
    ] = None,
    as_json: shared.Json = False,
) -> None:
    """List methods and add-ons, or describe one."""
    from fedloom.methods import ADDONS, METHODS

    if name is not None:
        _describe(*_find(name, METHODS, ADDONS), as_json)
        return
    kinds = {
        registry.kind: [
            {registry.kind: e.name, "what it does": e.summary, "source": e.source or e.package} for e in registry
        ]
        for registry in (METHODS, ADDONS)
    }
    shared.answer(kinds, as_json, *map(shared.table_of, kinds.values()), "Details: fedloom methods NAME")


def recipes(
    text: Annotated[
        str | None, argument("List only recipes whose name or description contains this text.", "TEXT")
    ] = None,
    free: Annotated[bool, flag("--free", "List only recipes that need no file and no download.")] = False,
    papers: Annotated[
        bool, flag("--papers", "List all recipes, also those of the five papers and those that need files.")
    ] = False,
    as_schema: Annotated[
        bool, flag("--schema", "Print the JSON Schema of recipes instead, for editors and programs.")
    ] = False,
    as_json: shared.Json = False,
    out: Annotated[Path | None, shared.out_option("Write the schema to this file.", dir_okay=False)] = None,
) -> None:
    """List recipes for a start; with TEXT, --free or --papers all packaged recipes, with what they need.

    The minutes were measured once, on one core.
    """
    from fedloom.federation.recipes.loader import catalogue

    if as_schema:
        schema(out)
        return
    if out is not None:
        raise UserError("--out is only for --schema: add --schema, or leave --out out")
    first = not (text or free or papers or as_json)
    rows: list[dict[str, Any]] = [
        {"recipe": entry.name, "what it trains": entry.summary, "needs": entry.needs, "minutes": entry.minutes}
        for entry in catalogue()
        if (not first or _begins(entry))
        and (not free or not entry.needs)
        and (text or "").lower() in f"{entry.name} {entry.summary}".lower()
    ]
    if not rows:
        which = " that needs no file and no download" if free else ""
        raise UserError(
            f"no packaged recipe{which} has {text!r} in its name or description: run `fedloom recipes --papers` to "
            "list all"
        )
    about = "minutes: of one core, as measured once; blank where a whole run was not"
    if first:
        lines = [f"{row['recipe']:20} {shorten(row['what it trains'], 99, placeholder=' ...')}" for row in rows]
        typer.echo("\n".join([*lines, "", "All recipes, those of five papers too: fedloom recipes --papers"]))
        return
    shown = [{**row, "needs": ", ".join(row["needs"]) or None} for row in rows]
    shared.answer(rows, as_json, shared.table_of(shown), about)


def schema(
    out: Annotated[Path | None, shared.out_option("Write to this file instead.", dir_okay=False)] = None,
) -> None:
    """Print the JSON Schema of recipes, with which editors complete and check them."""
    from fedloom.federation.recipes.json_schema import schema as made

    shared.put(json.dumps(made(), indent=1) + "\n", out)


def _begins(entry: Entry) -> bool:
    """Return whether a recipe is for a beginner: it needs no file and belongs to no paper."""
    return not entry.needs and entry.name.partition("/")[0] in (entry.name, "benchmarks")


def _find(name: str, *registries: Registry) -> tuple[Registry, Registered]:
    admit([name] if is_import(name) else [], Origin.TYPED, "fedloom methods")
    for registry in registries:
        if registry.problem(name) is None:
            return registry, registry[name]
    if is_import(name):
        raise UserError(str(registries[0].problem(name)))
    known = sorted(name for registry in registries for name in registry.names)
    raise UserError(unknown("method or add-on", name, known))


def parameters(entry: Registered) -> list[dict[str, Any]]:
    """Return the recipe keys of what is registered: their names, defaults, and what they may be, in words."""
    from fedloom.core.settings.section import expected, found

    return [
        {
            "parameter": key,
            "default": "required" if f.is_required() else found(f.default),
            "allowed": expected(f.annotation, [f]),
        }
        for key, f in entry.params.model_fields.items()
    ]


def required(entry: Registered) -> list[str]:
    """Return the recipe keys of what is registered that have no default."""
    return [key for key, field in entry.params.model_fields.items() if field.is_required()]


def chosen(registry: Registry, entry: Registered, values: Mapping[str, Any]) -> list[str]:
    """Return the changes of a recipe by which a method or an add-on is chosen, with values of its keys."""
    if registry.kind == "add-on":
        key = f"method.add.{entry.name}"
        return [f"{key}.{name}={value}" for name, value in values.items()] or [f"{key}={{}}"]
    return [f"method={entry.name}", *(f"method.{name}={value}" for name, value in values.items())]


def _describe(registry: Registry, entry: Registered, as_json: bool) -> None:
    import inspect

    about = (inspect.getdoc(entry.function) or "") + "\n"
    rows = parameters(entry)
    changes = chosen(registry, entry, dict.fromkeys(required(entry), "VALUE"))
    shared.answer(
        {"name": entry.name, "kind": registry.kind, "source": entry.source, "about": about, "parameters": rows},
        as_json,
        f"{entry.name} ({registry.kind}{', ' + entry.source if entry.source else ''})\n\n",
        f"{about}\n",
        *([shared.table_of(rows)] if rows else []),
        f"Use it: fedloom run RECIPE {' '.join(changes)}",
    )
