"""`fedloom show`, `watch`, `report` and `plot picture`: what a run would do, its progress and its results."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedloom.cli import shared
from fedloom.cli.shared import argument, flag, option
from fedloom.core.errors import UserError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from fedloom.study.watch import Now


MOST = 8
"""`show` lists so many clients; --full lists all."""


def show(
    recipe: shared.RecipeArgument,
    changes: shared.Changes = None,
    full: Annotated[
        bool, flag("--full", "Show all clients, and every setting of the recipe with its default.")
    ] = False,
    as_json: shared.Json = False,
) -> None:
    """Print the clients with their tasks and examples, and the costs of a round, without training."""
    from fedloom.federation.recipes import dump, load

    checked = load(recipe, changes or ())
    from fedloom.engines import api
    from fedloom.federation.runs.reader import human_bytes

    plan = api.plan(checked)
    facts = {
        "method": plan.method.strip().splitlines()[0],
        "parameters": ", ".join(f"{role} {count:,}" for role, count in plan.parameters.items()),
        "memory": ", ".join(f"{part} {human_bytes(count)}" for part, count in plan.memory.items()),
        "bytes per round": f"{human_bytes(plan.bytes_up)} from clients, {human_bytes(plan.bytes_down)} to clients",
        "constant prediction": ", ".join(
            f"{task} {metric} {value:.4f}" for task, (metric, value) in [*plan.constant.items()][: None if full else 4]
        ),
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
        list[Path], argument("The folders of finished runs; a grid stands for the runs of its first seed.", "RUN...")
    ],
    out: Annotated[Path, shared.out_option("The picture to write.", metavar="FILE.png", dir_okay=False)],
    count: Annotated[int, option("The number of test examples.", min=1)] = 4,
    rounds: Annotated[
        bool, flag("--over-rounds", "Draw one run's predictions on the same images after several rounds.")
    ] = False,
) -> None:
    """Draw input, truth and prediction of every dense task; with several runs, a column for each run's prediction."""
    from fedloom.data.drawing import save
    from fedloom.experiments.export.picture import over_rounds, predictions
    from fedloom.study.grid import runs_in

    runs = [run for folder in folders for run in runs_in(folder)]
    if rounds and len(runs) > 1:
        raise UserError(f"--over-rounds: expected one run, found {len(runs)}")
    save(over_rounds(runs[0], count) if rounds else predictions(runs, count), out)
    typer.echo(f"{out}")


def watch(
    run: Annotated[Path, argument("A run's folder; with --browser, a folder with runs.", "RUN")],
    every: Annotated[float, option("Seconds between two readings of the files.", min=0.1)] = 2.0,
    once: Annotated[
        bool, flag("--once", "Print the state once and end; the default where the output is not a terminal.")
    ] = False,
    browser: Annotated[
        bool, flag("--browser", "Serve one table of the runs and grids in a folder, to you only.")
    ] = False,
    port: Annotated[int, option("The port of --browser; 0 chooses a free port.", min=0, max=65535)] = 8765,
    as_json: shared.Json = False,
) -> None:
    """Show rounds, tasks, losses, bytes and the time left of a run, from its files, until the run or Ctrl-C ends it.

    With --browser a server on this machine shows all runs in a folder until Ctrl-C. Its address ends in a token: other
    users of this machine, who do not know it, see nothing.
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
    """Return the state of a run as a drawing for the terminal."""
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


def report(
    source: Annotated[
        str,
        argument(
            "The folder of a run, of a grid or of `fedloom study relatedness`; or the name of a grid that has run.",
            "RUN|GRID|DIR",
        ),
    ],
    out: Annotated[
        Path | None, shared.out_option("The file to write.", show_default="report.html in the folder", dir_okay=False)
    ] = None,
    png: Annotated[
        Path | None, option("Also write every figure to this folder, for papers.", "DIR", file_okay=False)
    ] = None,
    svg: Annotated[
        Path | None, option("Also write every figure to this folder as SVG.", "DIR", file_okay=False)
    ] = None,
    pdf: Annotated[
        Path | None, option("Also write every figure to this folder as PDF.", "DIR", file_okay=False)
    ] = None,
    csv: Annotated[
        Path | None, option("Also write the numbers behind every figure to this folder as CSV.", "DIR", file_okay=False)
    ] = None,
    base: Annotated[
        str | None, option("The baseline: for a run, another run's folder; for a grid, a cell.", "RUN|CELL")
    ] = None,
) -> None:
    """Show a run or a grid, finished or not, or a relatedness study as one HTML page that needs no network."""
    from fedloom.study.report import write

    folders = {"png": png, "svg": svg, "pdf": pdf, "csv": csv}
    images = {kind: folder for kind, folder in folders.items() if folder is not None}
    for written in (write(source, out, images, base), *dict.fromkeys(images.values())):
        typer.echo(f"{written}")
