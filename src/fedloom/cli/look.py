"""The commands of the group Look: list recipes and methods, show a planned run, its progress and its results."""

from __future__ import annotations

import json
import time
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedloom.cli import shared
from fedloom.cli.shared import argument, flag, option
from fedloom.core.errors import UserError, unknown
from fedloom.core.settings.trust import Origin, admit, is_import

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.console import RenderableType

    from fedloom.core.settings.registry import Registered, Registry
    from fedloom.study.watch import Now

MOST = 8
"""The largest number of clients that `show` lists; --full lists all."""


def show(
    recipe: shared.RecipeArgument,
    changes: shared.Changes = None,
    full: Annotated[
        bool, flag("--full", "Show all clients and all settings of the recipe, defaults included.")
    ] = False,
    as_json: shared.Json = False,
) -> None:
    """Print the clients with their tasks and examples, and the cost of a round, without training."""
    from fedloom.federation.recipes import dump, load

    checked = load(recipe, changes or ())
    from fedloom.engines import api
    from fedloom.federation.runs.reader import human_bytes

    plan = api.plan(checked)
    constant = [f"{task} {metric} {value:.4f}" for task, (metric, value) in plan.constant.items()]
    if not full and len(constant) > 4:
        constant[4:] = [f"and {len(constant) - 4} more (--full)"]
    sent = {"up": plan.bytes_up, "down": plan.bytes_down}
    up, down = (f"{plan.rough.get(way, '')} {human_bytes(count)}".strip() for way, count in sent.items())
    facts = {
        "method": plan.method.strip().splitlines()[0],
        "parameters": ", ".join(f"{role} {count:,}" for role, count in plan.parameters.items()),
        "memory": ", ".join(f"{part} {human_bytes(count)}" for part, count in plan.memory.items()),
        "bytes per round": f"{up} from clients, {down} to clients",
        "constant prediction": ", ".join(constant),
    }
    clients = plan.clients
    if not full:
        few = clients if len(clients) <= MOST else clients[: MOST - 1]
        clients = [{key: value for key, value in client.items() if key != "labels"} for client in few]
    more = len(plan.clients) - len(clients)
    shared.answer(
        {
            "recipe": checked.model_dump(mode="json"),
            **vars(plan),
            "code": [{"name": code.name, "file": code.file, "sha256": code.sha256} for code in checked.code],
        },
        as_json,
        *((f"{dump(checked)}\n", f"{plan.method.rstrip()}\n\n") if full else ()),
        shared.table_of(clients),
        *([f"  ... and {more} more clients"] if more else []),
        shared.table_of([{"what": what, "value": value} for what, value in facts.items() if value], header=False),
        *(f"code: {code}" for code in checked.code),
        *(f"note: {note}" for note in plan.notes),
        *([] if full else ["every setting: the same command with --full"]),
    )


def picture(
    folders: Annotated[
        list[Path], argument("Folders of finished runs; for a grid, the runs of its first seed.", "RUN...")
    ],
    out: Annotated[Path, shared.out_file("The picture to write.", "FILE.png")],
    count: Annotated[int, option("The number of test examples.", min=1)] = 4,
    rounds: Annotated[
        bool, flag("--over-rounds", "Draw one run's predictions on the same images after several rounds.")
    ] = False,
) -> None:
    """Draw input, truth and prediction of every dense task, with one column of predictions per run."""
    from fedloom.data.drawing import save
    from fedloom.experiments.export.predictions import over_rounds, predictions
    from fedloom.study.grid import runs_in

    runs = [run for folder in folders for run in runs_in(folder)]
    if rounds and len(runs) > 1:
        raise UserError(f"--over-rounds: expected one run, found {len(runs)}")
    save(over_rounds(runs[0], count) if rounds else predictions(runs, count), out)
    typer.echo(f"{out}")


def watch(
    run: Annotated[Path, argument("The folder of a run; with --browser, a folder that contains runs.", "RUN")],
    every: Annotated[float, option("Seconds between two readings of the files.", min=0.1)] = 2.0,
    once: Annotated[
        bool, flag("--once", "Print the state once and exit; the default if the output is not a terminal.")
    ] = False,
    browser: Annotated[
        bool, flag("--browser", "Serve a page that lists the runs and grids in a folder, for you only.")
    ] = False,
    port: Annotated[int, option("The port of --browser; 0 chooses a free port.", min=0, max=65535)] = 8765,
    as_json: shared.Json = False,
) -> None:
    """Show rounds, tasks, losses, bytes and time left of a run, read from its files, until the run ends or Ctrl-C.

    With --browser a server on this machine shows all runs in a folder until Ctrl-C. Its address ends in a secret
    token, so other users of this machine cannot see the page.
    """
    from rich.console import Console
    from rich.live import Live

    from fedloom.study.watch import Server, now

    try:
        if browser:
            with Server(run, port) as serving:
                typer.echo(f"{serving.url} (Ctrl-C ends it)")
                serving.serve_forever()
        console = Console()
        state = now(run)
        if once or as_json or not console.is_terminal:
            shared.answer(state, as_json, shown(state))
            return
        with Live(shown(state), console=console, auto_refresh=False) as live:
            while state.quiet is not None:
                time.sleep(every)
                state = now(run)
                live.update(shown(state), refresh=True)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def shown(state: Now) -> RenderableType:
    """Return the state of a run, formatted for the terminal."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    table = Table("task", "over the rounds", "training loss", "now", "best", "round", "split", box=SIMPLE_HEAD)
    for task in state.tasks:
        best = "" if task.best_round is None else f"{task.best_round}"
        numbers = ("" if value is None else f"{value:.4g}" for value in (task.loss, task.value, task.best))
        table.add_row(*map(Text, (task.name, task.sparkline(), *numbers, best, task.split)))
    bar = Table.grid()
    if state.rounds is not None:
        bar.add_row(ProgressBar(total=state.rounds, completed=state.round, width=60))
    events = [Text(event, style="dim") for event in state.events]
    return Group(Text(state.title, style="bold"), bar, Text(state.facts()), table, *events)


def _also(what: str) -> Any:
    return option(f"Also write {what}.", "DIR", file_okay=False)


def report(
    source: Annotated[
        str,
        argument(
            "The folder of a run, of a grid, of `fedloom compare RECIPE` or of `fedloom study relatedness`; or the "
            "name of a grid that has run.",
            "RUN|GRID|DIR",
        ),
    ],
    out: Annotated[Path | None, shared.out_file("The file to write.", default="report.html in the folder")] = None,
    png: Annotated[Path | None, _also("every figure to this folder, for papers")] = None,
    svg: Annotated[Path | None, _also("every figure to this folder as SVG")] = None,
    pdf: Annotated[Path | None, _also("every figure to this folder as PDF")] = None,
    csv: Annotated[Path | None, _also("the numbers behind every figure to this folder as CSV")] = None,
    base: Annotated[
        str | None, option("The baseline: for a run, the folder of another run; for a grid, a cell.", "RUN|CELL")
    ] = None,
) -> None:
    """Write one HTML page of a run or a grid, finished or not, of a comparison or of a relatedness study.

    The page needs no network.
    """
    from fedloom.study.report import write

    folders = {"png": png, "svg": svg, "pdf": pdf, "csv": csv}
    images = {kind: folder for kind, folder in folders.items() if folder is not None}
    for written in (write(source, out, images, base), *dict.fromkeys(images.values())):
        typer.echo(f"{written}")


def methods(
    name: Annotated[
        str | None, argument("Describe this method or add-on.", "NAME", autocompletion=shared.complete_method)
    ] = None,
    as_json: shared.Json = False,
) -> None:
    """List all methods and add-ons, or describe one of them."""
    from fedloom.methods import ADDONS, METHODS

    if name is not None:
        _describe(*_find(name, METHODS, ADDONS), as_json)
        return
    kinds = {
        each.kind: [{each.kind: e.name, "what it does": e.summary, "source": e.source or e.package} for e in each]
        for each in (METHODS, ADDONS)
    }
    shared.answer(kinds, as_json, *map(shared.table_of, kinds.values()), "Details: fedloom methods NAME")


def recipes(
    text: Annotated[
        str | None, argument("List only recipes whose name or description contains this text.", "TEXT")
    ] = None,
    free: Annotated[bool, flag("--free", "List only recipes that need no file and no download.")] = False,
    papers: Annotated[
        bool, flag("--papers", "List all recipes, including those of the five papers and those that need files.")
    ] = False,
    as_schema: Annotated[
        bool, flag("--schema", "Print the JSON Schema of recipes instead, for editors and programs.")
    ] = False,
    as_json: shared.Json = False,
    out: Annotated[Path | None, shared.out_file("Write the schema to this file.")] = None,
) -> None:
    """List recipes to start with. TEXT, --free and --papers search all packaged recipes, and print what they need.

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
        # a recipe for beginners needs no file and belongs to no paper
        if (not first or entry.name.partition("/")[0] in (entry.name, "benchmarks"))
        and (not (first or free) or not entry.needs)
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


def schema(out: shared.Out = None) -> None:
    """Print the JSON Schema of recipes, which lets editors complete and check them."""
    from fedloom.federation.recipes.loader import schema as made

    shared.put(json.dumps(made(), indent=1) + "\n", out)


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
    """Return the recipe keys of a registered entry: names, defaults, and allowed values in words."""
    from fedloom.core.settings.section import expected, found

    fields = entry.params.model_fields.items()
    defaults = {key: "required" if f.is_required() else found(f.default) for key, f in fields}
    return [{"parameter": key, "default": defaults[key], "allowed": expected(f.annotation, [f])} for key, f in fields]


def required(entry: Registered) -> list[str]:
    """Return the recipe keys of a registered entry that have no default."""
    return [key for key, field in entry.params.model_fields.items() if field.is_required()]


def chosen(registry: Registry, entry: Registered, values: Mapping[str, Any]) -> list[str]:
    """Return the changes of a recipe that choose a method or an add-on, with values of its keys."""
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
