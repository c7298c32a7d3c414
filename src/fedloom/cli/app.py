"""The app: all commands. What needs torch is imported inside them, so that help and mistakes answer at once."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedloom._version import __version__
from fedloom.cli import (
    atlas,
    audit,
    complete,
    demo,
    doctor,
    export,
    features,
    grid,
    init,
    lists,
    pretrain,
    records,
    report,
    shared,
    tables,
    tasks,
    tournament,
    ui,
    watch,
)
from fedloom.cli.data import data
from fedloom.cli.flower import flower
from fedloom.core.errors import StateError, UserError, of_system
from fedloom.engines.cluster import torchrun

if TYPE_CHECKING:
    from fedloom.federation.recipes import Recipe
    from fedloom.federation.rounds.progress import Progress

app = typer.Typer(
    name="fedloom",
    help="Federated multi-task learning: clients with different tasks train together.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.add_typer(data, name="data")
app.add_typer(flower, name="flower")
app.add_typer(lists.recipe_app, name="recipe")


def main() -> None:
    """Entry point: what the user or the machine can mend ends in one message and exit code 2; a bug shows itself."""
    try:
        app()
    except Exception as error:
        text = told(error)
        if text is None:
            traceback.print_exc()
            typer.echo("This is a bug of fedloom, not your mistake: please report it with the lines above.", err=True)
            sys.exit(1)
        typer.echo(f"{typer.style('error:', fg='red', bold=True)} {text}", err=True)
        sys.exit(2)


def told(error: Exception) -> str | None:
    """One sentence for what the user or the machine can mend, None for a bug."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, OSError):
        return of_system(error)
    if isinstance(error, MemoryError) or "allocate memory" in str(error) or "out of memory" in str(error):
        return f"memory ran out: {str(error).splitlines()[0] if str(error) else 'nothing more is known'}"
    return None


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
def run(
    recipe: Annotated[
        str | None,
        typer.Argument(
            metavar="RECIPE",
            help="A packaged recipe (see `fedloom recipes`) or a YAML file.",
            autocompletion=complete.recipe,
        ),
    ] = None,
    changes: shared.Changes = None,
    out: Annotated[
        Path | None, shared.out_option("Run folder.", show_default="runs/NAME-METHOD-sSEED", file_okay=False)
    ] = None,
    start: Annotated[
        Path | None,
        typer.Option("--from", metavar="RUN", help="Begin with this run's model; without RECIPE, with its recipe."),
    ] = None,
    quiet: shared.Quiet = False,
    as_json: shared.Json = False,
) -> None:
    """Train as a recipe says and write a run folder."""
    from fedloom.federation.recipes import load

    asked = list(changes or ())
    if start is not None:
        if recipe is None or "=" in recipe:  # no recipe, and the first change in its place
            from fedloom.federation.runs.recorded import recipe_in

            recipe_in(start)  # by the rule of run folders, before the changes are applied
            asked, recipe = [*([recipe] if recipe else []), *asked], str(start / "recipe.yaml")
        asked.append(f"model.start={start.resolve()}")
    if recipe is None:
        raise UserError("run: RECIPE is missing, expected a packaged recipe (see `fedloom recipes`) or a YAML file")
    checked = load(recipe, asked)
    folder = out or _default_folder(checked)
    # of several processes, only the first one writes the folder and prints
    rank = torchrun.rank() if checked.runtime.engine == "cluster" else None
    if rank is None and folder.is_dir() and any(folder.iterdir()):
        resume = f"continue it with `fedloom resume {folder}`, or " if (folder / "run.json").is_file() else ""
        raise StateError(f"{folder} is not empty: {resume}name another folder with --out")
    with _watched(folder, quiet or bool(rank)) as progress:
        from fedloom.engines import api

        result = api.run(checked, folder, progress=progress)
    if not rank:
        _conclude(result, as_json)


@app.command()
def resume(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of an interrupted run.")],
    changes: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE...", help="training.rounds=50 extends the run; keys of runtime may change."),
    ] = None,
    accept_changes: Annotated[
        bool, typer.Option("--accept-changes", help="Go on although the recipe in the folder was changed; record that.")
    ] = False,
    quiet: shared.Quiet = False,
    as_json: shared.Json = False,
) -> None:
    """Continue an interrupted run, or extend a finished one; the result is the same, bit for bit, as in one go."""
    if not (folder / "recipe.yaml").is_file():
        raise StateError(f"{folder} is not a run folder: recipe.yaml is absent")
    with _watched(folder, quiet) as progress:
        from fedloom.engines import api

        result = api.resume(folder, progress=progress, accept_changes=accept_changes, overrides=changes or ())
    _conclude(result, as_json)


@app.command()
def show(recipe: shared.RecipeArgument, changes: shared.Changes = None, as_json: shared.Json = False) -> None:
    """Print what a run would do, and what it would cost, without training."""
    from fedloom.federation.recipes import dump, load

    checked = load(recipe, changes or ())
    from fedloom.engines import api
    from fedloom.federation.runs.reader import human_bytes

    plan = api.plan(checked)
    facts = [("parameters", role, f"{count:,}") for role, count in plan.parameters.items()]
    facts += [("memory", part, human_bytes(count)) for part, count in plan.memory.items()]
    facts += [("bytes a round", "sent by clients", human_bytes(plan.bytes_up))]
    facts += [("bytes a round", "sent to clients", human_bytes(plan.bytes_down))]
    facts += [("trivial answer", task, f"{metric} {value:.4f}") for task, (metric, value) in plan.trivial.items()]
    rows = [dict(zip("abc", fact, strict=True)) for fact in facts]
    shared.answer(
        {
            "recipe": checked.model_dump(mode="json"),
            **vars(plan),
            "code": [{"name": code.name, "file": code.file, "sha256": code.sha256} for code in checked.code],
        },
        as_json,
        f"{dump(checked)}\n",
        f"{plan.method.rstrip()}\n\n",
        shared.table_of(plan.clients),
        shared.table_of(rows, header=False),
        *(f"code: {code}" for code in checked.code),
        *(f"note: {note}" for note in plan.notes),
    )


@app.command()
def picture(
    folders: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="The folders of finished runs; a grid is its first seed's.")
    ],
    out: Annotated[Path, shared.out_option("The picture to write.", metavar="FILE.png", dir_okay=False)],
    count: Annotated[int, typer.Option(min=1, help="How many test examples.")] = 4,
    rounds: Annotated[
        bool, typer.Option("--over-rounds", help="One run's answers to the same images after some of its rounds.")
    ] = False,
) -> None:
    """Draw input, truth and prediction of every dense task; with several runs, a column for each run's prediction."""
    from fedloom.data.canvas import save
    from fedloom.experiments.export.picture import predictions
    from fedloom.experiments.over_rounds import over_rounds
    from fedloom.study.grid import runs_in

    runs = [run for folder in folders for run in runs_in(folder)]
    if rounds and len(runs) > 1:
        raise UserError(f"--over-rounds: expected one run, found {len(runs)}")
    save(over_rounds(runs[0], count) if rounds else predictions(runs, count), out)
    typer.echo(f"{out}")


for command in (
    *(
        atlas.atlas,
        audit.audit,
        demo.demo,
        doctor.doctor,
        export.export,
        export.merge,
        export.predict,
        features.features,
        grid.grid,
        init.init,
        lists.methods,
        lists.recipes,
    ),
    *(tables.compare, tables.table, tables.figure, tables.bed),
    *(pretrain.pretrain, records.activated, records.hyper, records.domains, report.report),
    *(tasks.relatedness, tasks.join, tournament.tournament, ui.ui, watch.watch),
):
    app.command()(command)


PANELS = {
    "Train": ("demo", "run", "resume", "grid", "pretrain"),
    "Look": ("show", "watch", "ui", "report", "picture", "methods", "recipes", "recipe"),
    "Compare": ("compare", "table", "figure", "bed", "tournament", "atlas", "relatedness"),
    "Data": ("init", "data"),
    "Deploy": ("export", "predict", "merge", "flower", "audit", "doctor"),
    "Papers": ("activated", "hyper", "domains", "join", "features"),
}
"""The groups of the help in their order, with their commands; all commands are in one."""
_ORDER = {name: panel for panel, members in PANELS.items() for name in members}


def _called(entry: Any) -> str:
    return str(entry.name or entry.callback.__name__)


app.registered_commands.sort(key=lambda entry: [*_ORDER].index(_called(entry)))
entries: list[Any] = [*app.registered_commands, *app.registered_groups]
for entry in entries:
    entry.rich_help_panel = _ORDER[_called(entry)]
commands: list[Any] = [each for group in (app, data, flower) for each in group.registered_commands]
for entry in commands:
    entry.callback = shared.allowing_code(entry.callback)


def _default_folder(recipe: Recipe) -> Path:
    method = "+".join(name.rpartition(":")[2] for name in (recipe.method.name, *recipe.method.add))
    after = f"-after-{Path(recipe.model.start).name}" if recipe.model.start else ""
    return Path("runs") / f"{recipe.name}-{method}-s{recipe.seed}{after}"


@contextmanager
def _watched(folder: Path, quiet: bool) -> Iterator[Progress]:
    """Progress while a run goes on; Ctrl-C ends it with exit code 130 and the way to go on."""
    from fedloom.federation.rounds.progress import progress

    watch = progress(quiet)
    try:
        yield watch
    except KeyboardInterrupt:
        can_resume = (folder / "recipe.yaml").is_file()
        more = f"continue with: fedloom resume {folder}" if can_resume else "nothing was written yet"
        typer.echo(f"interrupted; {more}", err=True)
        raise typer.Exit(130) from None
    finally:
        watch.stop()


def _conclude(result: Any, as_json: bool) -> None:
    from fedloom.federation.runs.reader import IN_VAIN, Run, human_bytes

    total = Run.read(result.folder).bytes_total()
    final = result.final() if result.measured else None
    shared.answer(
        {"folder": result.folder, "status": result.status, "final": final, "bytes": total},
        as_json,
        result.table(),
        f"sent by clients: {human_bytes(total['up'])}, sent to clients: {human_bytes(total['down'])}",
        f"{result.status}: {result.folder}",
    )
    if why := IN_VAIN.get(result.status):
        typer.echo(f"{why} (see the events in the report)", err=True)
        raise typer.Exit(1)
