"""Parts that several commands share: options with their completion, output as tables or as JSON, a progress bar."""

from __future__ import annotations

import csv
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from fedloom.core.errors import StateError, printable, writing
from fedloom.core.settings.trust import allow

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from fedloom.experiments.export.finished import Tell
    from fedloom.study.output import HasTable


def argument(about: str, metavar: str | None = None, **more: Any) -> Any:
    """Return an argument of a command with its help, and a name for its value."""
    return typer.Argument(help=about, metavar=metavar, **more)


def option(about: str, metavar: str | None = None, name: str | None = None, **more: Any) -> Any:
    """Return an option of a command with its help, a name for its value, and its own name if that differs."""
    return typer.Option(*([name] if name else []), help=about, metavar=metavar, **more)


def flag(name: str, about: str) -> Any:
    """Return an option of a command that takes no value."""
    return typer.Option(name, help=about)


def out_file(about: str, metavar: str | None = None, default: str | None = None, folder: bool = False) -> Any:
    """Return the option --out for the file that a command writes; `default` describes the default in words."""
    look: Any = {"help": about, "metavar": metavar, "show_default": default or True}
    return typer.Option("--out", "-o", file_okay=not folder, dir_okay=folder, **look)


out_folder = partial(out_file, folder=True)
"""The same for a folder."""


# Completion in a shell (TAB). It never loads torch.


def _completion(*homes: str) -> Callable[[str], list[str]]:
    """Return a completion over the names in each MODULE:NAME, a collection or a function that returns one."""

    def complete(incomplete: str) -> list[str]:
        each = (found() if callable(found := resolve_name(f"fedloom.{home}")) else found for home in homes)
        return _that_begin(incomplete, [*dict.fromkeys(name for names in each for name in names)])

    return complete


complete_recipe = _completion("federation.recipes.loader:names")
complete_grid = _completion("study.grid:names", "study.grid:ran")
complete_method = _completion("methods:METHODS.names", "methods:ADDONS.names")
complete_dataset = _completion("data:DATASETS.names")


def complete_change(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the keys of a recipe; after data=, partition=, model= and method=, the names that may follow."""
    from fedloom.federation.recipes.schema import Named, Recipe

    before = list(ctx.params.get("changes") or ())
    key, equals, value = incomplete.partition("=")
    split = not equals and before[-1:] == ["="] and len(before) > 1  # bash splits KEY=VALUE into three words
    if split:
        key, value = before[-2], incomplete
    elif not equals:
        return _that_begin(key, _keys("", Recipe))
    field = Recipe.model_fields.get(key.removesuffix(".name"))
    section: Any = field.annotation if field is not None else None
    if not (isinstance(section, type) and issubclass(section, Named)):
        return []
    return [name if split else f"{key}={name}" for name in _that_begin(value, section.names())]


def _keys(path: str, section: Any) -> list[str]:
    """Return KEY= for each key of a section, and KEY.KEY= for the keys of its subsections."""
    from pydantic import BaseModel

    keys = []
    for name, field in section.model_fields.items():
        inner = field.annotation
        keys.append(f"{path}{name}=")
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            keys += [key for key in _keys(f"{path}{name}.", inner) if not key.endswith(("params=", "name="))]
    return keys


def _that_begin(with_: str, names: list[str]) -> list[str]:
    return [name for name in names if name.startswith(with_)]


_RECIPE = argument(
    "A packaged recipe (see `fedloom recipes`) or a YAML file.", "RECIPE", autocompletion=complete_recipe
)
RecipeArgument = Annotated[str, _RECIPE]
PerhapsRecipe = Annotated[str | None, _RECIPE]
Changes = Annotated[
    list[str] | None,
    argument("Changes, for example training.rounds=5 method=fedprox.", "KEY=VALUE...", autocompletion=complete_change),
]
AllowCode = Annotated[
    list[str] | None,
    option("Allow recipes, run folders and bundles to import code from these packages.", "PKG[,PKG]", "--allow-code"),
]
Out = Annotated[Path | None, out_file("Write to this file instead.")]
Json = Annotated[bool, flag("--json", "Print JSON for programs; a missing number is null.")]
Kind = Annotated[Literal["text", "markdown", "csv", "latex", "html"], option("The output format.", name="--format")]
Device = Annotated[str | None, option("The device, such as cpu or cuda.", show_default="as the run")]
Jobs = Annotated[
    int | None, option("The number of runs at the same time.", min=1, show_default="as many as the CPUs allow")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print the result only, without progress.")]
SplitOption = Annotated[Literal["test", "val"], option("The examples that the metrics are measured on.")]


def allowing_code(command: Callable[..., Any]) -> Callable[..., None]:
    """Return the command with the option --allow-code, which is applied before the command runs."""

    @wraps(command)
    def called(*, allow_code: list[str] | None = None, **given: Any) -> None:
        allow(name for text in allow_code or () for name in text.split(","))
        command(**given)

    signature = inspect.signature(command, eval_str=True)
    option = inspect.Parameter("allow_code", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=AllowCode)
    with_option = signature.replace(parameters=[*signature.parameters.values(), option])
    called.__signature__ = with_option  # type: ignore[attr-defined]
    called.__annotations__ = {p.name: p.annotation for p in with_option.parameters.values()}
    return called


def renamed(command: Callable[..., None], former: str, now: str) -> Callable[..., None]:
    """Return the command under its former name; it prints the present name and runs."""

    @wraps(command)
    def called(**given: Any) -> None:
        typer.echo(f"`fedloom {former}` is now called `fedloom {now}`", err=True)
        command(**given)

    return called


def answer(result: Any, as_json: bool, *shown: str | RenderableType) -> None:
    """Print the result of a command as JSON, or `shown` for people; by default a table of its rows."""
    if as_json:
        from fedloom.study.output import json_text

        typer.echo(json_text(result), nl=False)
        return
    from rich.console import Console

    console = Console()
    wide = None if console.is_terminal else max(console.width, 200)  # lines in a file are not wrapped
    for part in shown or (table_of(result),):
        if isinstance(part, str):
            typer.echo(part, nl=not part.endswith("\n"))
        else:
            Console(width=wide).print(part)


def put_table(table: HasTable, kind: str, as_json: bool, out: Path | None) -> None:
    """Print a table as text of a kind (`Kind`) or as JSON, or write it to a file and print the file's name."""
    written = "json" if as_json else kind
    put(getattr(table, f"to_{written}")(), out, written)


def put(text: str, out: Path | None, kind: str = "") -> None:
    """Print a text, or write it to a file and print the file's name; `kind` as in `writing`."""
    if out is None:
        typer.echo(text, nl=False)
        return
    with writing(out, kind):
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text, encoding="utf-8")
    typer.echo(f"{out}")


def table_of(rows: Sequence[Mapping[str, Any]], header: bool = True) -> Table:
    """Return rows as a table with a column per key of the first row, unless the key is None in all rows."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    columns = [key for key in next(iter(rows), {}) if any(row[key] is not None for row in rows)]
    table = Table(*columns, box=SIMPLE_HEAD, show_header=header)
    for row in rows:
        table.add_row(*(Text(printable(_cell(row[key]), "\n")) for key in columns))
    return table


def listed(text: str | None) -> list[str] | None:
    """Return the names of a comma-separated list."""
    cells = next(csv.reader([text or ""], skipinitialspace=True), [])
    return None if text is None else [name.strip() for name in cells if name.strip()]


def _cell(value: Any) -> str:
    """Return the text of a cell: mappings as 'key value', without loss weights of 1."""
    if isinstance(value, Mapping):
        return ", ".join(key if v == 1.0 else f"{key} {_cell(v)}" for key, v in value.items())
    if isinstance(value, list):
        return "/".join(map(str, value))
    return "" if value is None else str(value)


def check_run(folder: Path) -> None:
    """Raise StateError for a folder without a recipe, before torch is loaded."""
    if not (folder / "recipe.yaml").is_file():
        raise StateError(f"{folder} is not a run folder: recipe.yaml is absent")


def threads_of(folder: Path) -> None:
    """Let torch use as many threads as the run did, because results may depend on their number."""
    check_run(folder)
    from fedloom.federation.runs.recorded import recipe_in

    threads = recipe_in(folder).runtime.threads
    import torch

    torch.set_num_threads(threads)


@contextmanager
def bar(quiet: bool) -> Iterator[Tell]:
    """Show a progress bar on a terminal, and otherwise print one line per step."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    console.quiet = quiet or not console.is_terminal  # an older rich ends with a line, disabled or not
    with Progress(console=console, disable=console.quiet) as bars:
        item = bars.add_task("loading", total=None)

        def advance(done: int, total: int, what: str) -> None:
            bars.update(item, completed=done, total=total, description=what or "done")
            if what and not quiet and not console.is_terminal:
                typer.echo(f"{done}/{total}  {what}", err=True)

        yield advance


@contextmanager
def interruptible(written: Path, goes_on: str) -> Iterator[None]:
    """On Ctrl-C, end all child processes, print how to continue if `written` exists, and exit with code 130."""
    try:
        yield
    except KeyboardInterrupt:
        import multiprocessing

        for child in multiprocessing.active_children():  # else Python waits for one that nobody has on a list yet
            child.terminate()
        typer.echo(f"interrupted; {goes_on if written.exists() else 'nothing was written yet'}", err=True)
        raise typer.Exit(130) from None
