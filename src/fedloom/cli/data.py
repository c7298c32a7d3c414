"""`fedloom init` writes a recipe for the user's own data; `fedloom data` shows data sets without training."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer

from fedloom.cli import shared
from fedloom.cli.shared import argument, flag, option
from fedloom.core.errors import RecipeError, UserError, first_of, printable, unknown

if TYPE_CHECKING:
    from fedloom.data.dataset import Dataset

Answer = TypeVar("Answer", str, int)
data = typer.Typer(name="data", help="Look at data sets without training.", no_args_is_help=True)

NameArgument = Annotated[
    str, argument("A data set, for example scenes.", "NAME", autocompletion=shared.complete_dataset)
]
Names = Annotated[str | None, option("Use exactly these columns or globs as inputs.", "NAME,...")]
Missing = Annotated[str | None, option("Treat these cell values as missing, for example -9 or '?'.", "CODE,...")]
Rename = Annotated[str | None, option("Rename these columns.", "NAME=NEW,...")]
Parameters = Annotated[list[str] | None, argument("Its parameters, for example count=20 setting=weak.", "KEY=VALUE...")]


def init(
    data: Annotated[
        Path | None,
        argument("A table (.csv, .gz, .xz, .xlsx, .dta, .parquet), a folder of images, or an .npz.", "DATA"),
    ] = None,
    labels: Annotated[
        str | None,
        option(
            "The columns to predict, one task per column; NAME=KIND sets the kind, for example visits=regression; "
            "TASK=A+B makes one task of several yes/no columns.",
            "NAME,...",
        ),
    ] = None,
    clients: Annotated[
        str | None,
        option(
            "The number of clients (per domain, if the folder has domains), or the column that names them.", "N|NAME"
        ),
    ] = None,
    method: Annotated[str | None, option("The training method.", autocompletion=shared.complete_method)] = None,
    rounds: Annotated[int | None, option("The number of rounds of training.", min=1)] = None,
    features: Names = None,
    leave_out: Annotated[str | None, option("Do not use these columns or globs as inputs.", "NAME,...")] = None,
    missing: Missing = None,
    rename: Rename = None,
    images: Annotated[
        Path | None, option("The folder of the images that the table lists in a column.", "DIR", file_okay=False)
    ] = None,
    metric: Annotated[str | None, option("The metric of all tasks: auc, accuracy, rmse ...")] = None,
    preprocess: Annotated[
        Literal["federated", "local"], option("Scale the inputs by statistics of all sites, or each site by its own.")
    ] = "federated",
    out: Annotated[Path, shared.out_file("The recipe to write.", "FILE.yaml")] = Path("recipe.yaml"),
) -> None:
    """Write a recipe for your own data. The command prompts for anything that no option sets."""
    from fedloom.core.settings.yaml import to_yaml
    from fedloom.data.tables.files import is_table_at
    from fedloom.federation.recipes.draft import choices_of, draft, look
    from fedloom.federation.recipes.loader import EDITORS, SHIPPED, load

    if out.exists():
        raise UserError(f"{out} exists already: choose another file with --out")
    name = re.sub(r"[^\w.-]+", "-", out.stem).lstrip(".-") or "recipe"
    path = Path(_ask(None if data is None else str(data), "Your data: a table, a folder of images or an .npz", ""))
    if is_table_at(path):
        named = {"features": shared.listed(features), "leave_out": shared.listed(leave_out) or []}
        settings: dict[str, Any] = {**named, "mode": preprocess}
        cells = codes(missing), renamed(rename)
        recipe = _of_table(path, name, labels, clients, method, rounds, metric, images, cells, settings)
    else:
        options = {"features": features, "leave-out": leave_out, "missing": missing, "rename": rename}
        for option, value in {**options, "metric": metric, "images": images}.items():
            if value is not None:
                raise UserError(f"--{option} is only for tables, and {path} is not a table: leave it out")
        source = look(path)
        for line in source.lines:
            typer.echo(printable(line))  # names of folders from elsewhere
        wanted: list[str] = []
        if source.columns:
            likely = (name for name in source.columns if name.startswith(("y", "label", "class")))
            guess = next(likely, source.columns[-1])
            wanted = shared.listed(_ask(labels, f"What to predict, of {', '.join(source.columns)}", guess)) or []
        elif labels is not None:
            raise UserError("--labels is not for folders of images, whose subfolders are the classes: leave it out")
        which = "How many clients for each of its domains" if source.groups else "How many clients hold it"
        or_column = ", or the column that names the client of each row" if source.columns else ""
        held = _ask(clients, which + or_column, "1" if source.groups else "5")
        is_known = clients is not None and (labels is not None or not source.columns)
        recipe = draft(source, name, wanted, held, *_training(method, rounds, is_known))
        if source.columns:
            for line in choices_of(source, recipe["data"], held):
                typer.echo(line)
    load(recipe)
    shared.put(f"{EDITORS}{SHIPPED}\n{to_yaml(recipe)}", out)
    file = shlex.quote(str(out))
    typer.echo(f"Look at it: fedloom show {file}\nTrain:      fedloom run {file}", err=True)


def _of_table(
    path: Path,
    name: str,
    labels: str | None,
    clients: str | None,
    method: str | None,
    rounds: int | None,
    metric: str | None,
    images: Path | None,
    cells: tuple[list[str | int | float], dict[str, str]],
    settings: dict[str, Any],
) -> dict[str, Any]:
    """Look at a table, print what its columns are, and return its recipe."""
    from fedloom.data.tables.columns import LISTED, draft
    from fedloom.data.tables.files import maps_in, table_at
    from fedloom.data.tables.images import draft_of_images
    from fedloom.data.tables.read import is_table
    from fedloom.federation.recipes.draft import draft_of_table

    site = None if clients is None or clients.isdigit() else clients
    table = table_at(path, site, *cells)
    maps = [] if is_table(path) else maps_in(table)
    labels = labels or ",".join(f'"{name}"' if "," in name else name for name in maps) or None
    names = first_of(table.frame.columns, LISTED)
    is_known = labels is not None and (clients is not None or table.site is not None)
    wanted = _tasks(_ask(labels, f"What to predict, of {names}", ""), [*map(str, table.frame)])
    held = ""
    if clients is not None or table.site is None:
        held = _ask(clients, "The column that names the client of each row, or the number of clients", "5")
    tasks = {name: known if metric is None else {**known, "metric": metric} for name, known in wanted.items()}
    if held and not held.isdigit() and held != site:
        site, table = held, table_at(path, held, *cells)
    chosen = settings["features"], settings["leave_out"]
    plan = draft_of_images(table, path, tasks, images, *chosen) or draft(table, tasks, site, **settings)
    for line in plan.lines():
        typer.echo(line)
    count = int(held) if held.isdigit() else None
    return draft_of_table(plan, path, name, count, *_training(method, rounds, is_known))


def _tasks(text: str, columns: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the settings of each task in `--labels`: none, its kind (NAME=KIND), or several labels (TASK=A+B)."""
    from fedloom.data.tables.columns import KINDS
    from fedloom.data.tables.preprocessing import MAPS

    tasks: dict[str, dict[str, Any]] = {}
    for name in shared.listed(text) or []:
        task, known = name, dict[str, Any]()
        if "=" in name and name not in columns:
            is_kind = (kind := name.rpartition("=")[2].strip()) in (*KINDS, *MAPS)
            task, _, words = map(str.strip, name.rpartition("=") if is_kind else name.partition("="))
            several = [each.strip() for each in words.split("+")]
            if not task or "" in several:
                raise UserError(f"--labels: {name!r} found, expected NAME, NAME=KIND or TASK=A+B")
            if not is_kind and several == [words] and task in columns and words not in columns:
                hint = f"; a count is a regression: '{task}=regression'" * (words in ("count", "counts", "poisson"))
                raise UserError(f"--labels: {name!r}: {unknown('kind', words, (*KINDS, *MAPS))}{hint}")
            known = {"kind": kind} if is_kind else {"kind": "multilabel", "columns": several}
        if task in tasks:
            raise UserError(f"--labels: {task!r} is named twice; name it once")
        tasks[task] = known
    return tasks


def codes(text: str | None) -> list[str | int | float]:
    """Return the codes of missing values; a code that is a number becomes a number."""
    from fedloom.data.tables.read import number_of

    cells = [(text, number_of(text)) for text in shared.listed(text) or ()]
    return [name if number is None else int(number) if number.is_integer() else number for name, number in cells]


def renamed(text: str | None) -> dict[str, str]:
    """Return the new names of columns. Raises UserError if a part is not NAME=NEW."""
    new: dict[str, str] = {}
    for each in shared.listed(text) or ():
        name, _, wanted = map(str.strip, each.partition("="))
        if not (name and wanted):
            raise UserError(f"--rename: {each!r} found, expected NAME=NEW")
        new[name] = wanted
    return new


def _training(method: str | None, rounds: int | None, is_known: bool) -> tuple[str, int]:
    """Return the method and the rounds. If all that has no default `is_known`, nothing is asked."""
    if is_known:
        return method or "fedavg", rounds or 20
    return _ask(method, "Which method (see `fedloom methods`)", "fedavg"), _ask(rounds, "How many rounds", 20)


def _ask(given: Answer | None, question: str, guess: Answer) -> Answer:
    """Return the value of the option if it was given, else what the user types."""
    if given is not None:
        return given
    try:
        answer: Answer = typer.prompt(question, default=guess or None, type=type(guess))
    except typer.Abort:
        if sys.stdin.isatty():
            raise
        raise UserError(f"no answer found, expected an option (fedloom init --help) or a line: {question}") from None
    return answer


@data.command()
def preview(
    name: NameArgument,
    out: Annotated[Path, shared.out_file("The picture to write.", "FILE.png")],
    parameters: Parameters = None,
    count: Annotated[int, option("The number of examples.", min=1)] = 6,
    split: Annotated[Literal["train", "test"], option("Which examples.")] = "train",
    seed: Annotated[int, option("The seed of the data set.", min=0)] = 0,
    augmented: Annotated[bool, flag("--augmented", "Apply the augmentation of training.")] = False,
) -> None:
    """Draw some examples of a data set with all of their labels."""
    dataset = build(name, parameters or (), seed)
    from fedloom.data.drawing import save, sheet

    save(sheet(dataset, count, split, seed if augmented else None), out)
    typer.echo(f"{dataset.name}: {len(dataset.train)} train, {len(dataset.test)} test; {out}")


@data.command()
def check(
    name: NameArgument,
    parameters: Parameters = None,
    root: Annotated[Path | None, option("The folder that holds the data set.", "DIR", file_okay=False)] = None,
    limit: Annotated[int, option("The number of images to read per part; 0 reads all.", min=0)] = 100,
    as_json: shared.Json = False,
) -> None:
    """Check counts, sizes and labels of a data set of files. The exit code is 2 if a run cannot use it."""
    from fedloom.data import DATASETS, folders
    from fedloom.data.class_folders import GONE

    if name in GONE:
        raise UserError(f"data check: {name!r} is a set of class-folders{GONE[name]}")
    checked = [each for each in DATASETS.entries if "root" in DATASETS[each].params.model_fields]
    if name not in checked and (name in DATASETS.registered or Path(name).exists()):
        raise UserError(
            f"data check: {name!r} is no data set that is read from a folder of files; it checks {', '.join(checked)}. "
            "Of other data, `fedloom show RECIPE` says what it found"
        )
    if root is None:
        raise UserError("data check: --root is missing, expected the folder that holds the data set")
    if name in folders.CHECKABLE:
        report = folders.check(name, str(root), limit or None)
    else:
        report = folders.check_classes(lambda: build(name, [f"root={root}", *(parameters or ())]), limit or None)
    shared.answer({"usable": report.usable, **vars(report)}, as_json, report.text())
    if not report.usable:
        raise typer.Exit(2)


@data.command()
def statistics(
    file: Annotated[Path, argument("A table, or a recipe that reads a table.", "FILE|RECIPE")],
    labels: Annotated[str | None, option("The columns to predict (only for a table).", "NAME,...")] = None,
    clients: Annotated[
        str | None, option("The column that names the site of each row (only for a table).", "NAME")
    ] = None,
    missing: Missing = None,
    rename: Rename = None,
    minimum: Annotated[int, option("Hide counts below this number.", min=1)] = 5,
    as_json: shared.Json = False,
) -> None:
    """Print per site of a table: rows, labels and shares of missing cells. Counts below --minimum are hidden."""
    from fedloom.data.tables.read import is_table, read
    from fedloom.data.tables.table import counts

    if is_table(file):
        if labels is None:
            raise UserError("statistics: --labels is missing, expected the columns to predict")
        from fedloom.data.tables.columns import draft

        table = read(file, clients, codes(missing), renamed(rename))
        plan = draft(table, _tasks(labels, [*map(str, table.frame)]))
        about: dict[str, Any] = {"inputs": plan.inputs, "tasks": plan.tasks, "path": str(file)}
        about |= {"site": plan.table.site, "missing": plan.table.missing, "rename": plan.table.rename}
    else:
        from fedloom.federation.recipes.loader import load

        section = load(str(file)).data
        if section.name not in ("table", "image-table"):
            raise RecipeError(f"{file}: data: {section.name} found, expected data: table")
        about = {"inputs": {}, **section.params}
    sites, columns, notes = counts(about, minimum)
    tables = shared.table_of(sites), shared.table_of(columns)
    everything = {"sites": sites, "columns": columns, "notes": notes}
    shared.answer(everything, as_json, *tables, *(f"note: {note}" for note in notes))


def build(name: str, parameters: list[str] | tuple[str, ...], seed: int = 0) -> Dataset:
    """Return the named data set with `key.path=value` parameters, checked like the data section of a recipe."""
    from fedloom.core.settings.yaml import checked
    from fedloom.federation.recipes.loader import changed
    from fedloom.federation.recipes.schema import DataSection

    what = f"data set {name!r}"
    section = checked(DataSection, changed(what, {"name": name}, parameters), f"{what}:\n")
    from fedloom.data.combine import loaded

    return loaded(section.entry, seed, section.arguments)
