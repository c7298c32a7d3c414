"""The app: all commands. What needs torch is imported inside them, so that help and mistakes answer at once."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedloom._version import __version__
from fedloom.cli import doctor, export, features, grid, pretrain, records, report, shared, tasks, watch
from fedloom.cli.data import data
from fedloom.cli.flower import flower
from fedloom.engines.cluster import torchrun
from fedloom.errors import StateError, UserError, unknown, writing
from fedloom.settings.names import is_import

if TYPE_CHECKING:
    from fedloom.recipes import Recipe
    from fedloom.rounds.progress import Progress
    from fedloom.settings.registry import Registered, Registry

app = typer.Typer(
    name="fedloom",
    help="Federated multi-task learning: clients with different tasks train together.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.add_typer(data, name="data")
app.add_typer(flower, name="flower")
recipe_app = typer.Typer(help="Help for writing recipes.", no_args_is_help=True)
app.add_typer(recipe_app, name="recipe")

Changes = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE...", help="Changes, for example training.rounds=5 method=fedprox."),
]


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
        return f"{error.filename}: {error.strerror or error}" if error.filename else error.strerror or str(error)
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
        typer.Argument(metavar="RECIPE", help="A packaged recipe (see `fedloom recipes`) or a YAML file."),
    ] = None,
    changes: Changes = None,
    out: Annotated[
        Path | None, typer.Option(help="Run folder.", show_default="runs/NAME-METHOD-sSEED", file_okay=False)
    ] = None,
    start: Annotated[
        Path | None,
        typer.Option("--from", metavar="RUN", help="Begin with this run's model; without RECIPE, with its recipe."),
    ] = None,
    quiet: shared.Quiet = False,
) -> None:
    """Train as a recipe says and write a run folder."""
    from fedloom.recipes import load

    asked = list(changes or ())
    if start is not None:
        if recipe is None or "=" in recipe:  # no recipe, and the first change in its place
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
        _conclude(result)


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
) -> None:
    """Continue an interrupted run, or extend a finished one; the result is the same, bit for bit, as in one go."""
    if not (folder / "recipe.yaml").is_file():
        raise StateError(f"{folder} is not a run folder: recipe.yaml is absent")
    with _watched(folder, quiet) as progress:
        from fedloom.engines import api

        result = api.resume(folder, progress=progress, accept_changes=accept_changes, overrides=changes or ())
    _conclude(result)


@app.command()
def show(recipe: shared.RecipeArgument, changes: Changes = None) -> None:
    """Print what a run would do, and what it would cost, without training."""
    from fedloom.recipes import dump, load

    checked = load(recipe, changes or ())
    from fedloom.engines import api
    from fedloom.runs.reader import human_bytes

    plan = api.plan(checked)
    typer.echo(dump(checked))
    typer.echo(plan.method.rstrip() + "\n")
    columns = [key for key in plan.clients[0] if any(row[key] is not None for row in plan.clients)]
    shared.print_table(columns, [[_text(row[key]) for key in columns] for row in plan.clients])
    facts = [("parameters", role, f"{count:,}") for role, count in plan.parameters.items()]
    facts += [("memory", part, human_bytes(count)) for part, count in plan.memory.items()]
    facts += [("bytes a round", "sent by clients", human_bytes(plan.bytes_up))]
    facts += [("bytes a round", "sent to clients", human_bytes(plan.bytes_down))]
    facts += [("trivial answer", task, f"{metric} {value:.4f}") for task, (metric, value) in plan.trivial.items()]
    shared.print_table(["", "", ""], facts)
    for note in plan.notes:
        typer.echo(f"note: {note}")


@app.command()
def picture(
    folders: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="The folders of finished runs; a grid is its first seed's.")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT.png", help="The picture to write.", dir_okay=False)],
    count: Annotated[int, typer.Option(min=1, help="How many test examples.")] = 4,
) -> None:
    """Draw input, truth and prediction of every dense task; with several runs, a column for each run's prediction."""
    from fedloom.data.preview import save
    from fedloom.export.picture import predictions
    from fedloom.study.grid import runs_in

    save(predictions([run for folder in folders for run in runs_in(folder)], count), out)
    typer.echo(f"{out}")


@app.command()
def methods(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="A method or add-on, for its details.")] = None,
) -> None:
    """List methods and add-ons, or describe one."""
    from fedloom.methods import ADDONS, METHODS

    if name is None:
        for registry in (METHODS, ADDONS):
            shared.print_table(
                [registry.kind, "what it does", "source"],
                [(e.name, e.summary, e.source or e.package) for e in registry],
            )
        typer.echo("Details: fedloom methods NAME")
    else:
        _describe(*_find(name, METHODS, ADDONS))


@app.command()
def recipes() -> None:
    """List the packaged recipes."""
    from fedloom.recipes.loader import names, summary

    shared.print_table(["recipe", "what it trains"], [(name, summary(name)) for name in names()])


@recipe_app.command()
def schema() -> None:
    """Print the JSON Schema of recipes, with which editors complete and check them."""
    import json

    from fedloom.recipes.json_schema import schema as made

    typer.echo(json.dumps(made(), indent=1))


@recipe_app.callback()
def _recipe() -> None:
    pass


@app.command()
def compare(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="Run folders; runs that differ only in the seed become one column."),
    ],
    base: Annotated[
        str | None, typer.Option(help="Column or run folder that the change (Δm) is against; default: the first.")
    ] = None,
    split: shared.SplitOption = "test",
    metric: Annotated[str | None, typer.Option(help="Metric to judge by.", show_default="each task's own")] = None,
    tests: shared.TestsOption = False,
    over: shared.OverOption = "seeds",
    ranks: shared.RanksOption = None,
    plot: shared.PlotOption = None,
    csv: Annotated[Path | None, typer.Option(help="Write the numbers to this file too.", dir_okay=False)] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write the table to this file too.", dir_okay=False)] = None,
    latex: Annotated[Path | None, typer.Option(help="Write the table to this file too.", dir_okay=False)] = None,
) -> None:
    """Put runs side by side, task by task, with intervals over seeds; or test or rank them."""
    from fedloom.study import Comparison
    from fedloom.study import compare as put_side_by_side
    from fedloom.study.significance.contrasts import contrasts
    from fedloom.study.significance.ranks import Ranks, ranked

    shared.one_of(tests, over, ranks, plot)
    comparison = put_side_by_side(runs, base, split, metric)
    made = contrasts(comparison, over) if tests else ranked(comparison, ranks) if ranks else comparison
    if isinstance(made, Comparison):
        shared.print_wide(made.table())
    else:
        typer.echo(made.to_text(), nl=False)
    if isinstance(made, Ranks):
        shared.draw_ranks(made, plot)
    for file, text in ((csv, made.to_csv), (markdown, made.to_markdown), (latex, made.to_latex)):
        if file is not None:
            with writing(file):
                file.write_text(text(), encoding="utf-8")


for command in (
    *(doctor.doctor, export.export, export.predict, features.features, grid.grid, grid.table, grid.figure, grid.bed),
    *(pretrain.pretrain, records.activated, records.hyper, records.domains, report.report),
    *(tasks.relatedness, tasks.join, watch.watch),
):
    app.command()(command)


PANELS = {
    "Train": ("run", "resume", "grid", "pretrain"),
    "Look": ("show", "watch", "report", "picture", "methods", "recipes", "recipe"),
    "Compare": ("compare", "table", "figure", "bed", "relatedness"),
    "Data": ("data",),
    "Deploy": ("export", "predict", "flower", "doctor"),
    "Papers": ("activated", "hyper", "domains", "join", "features"),
}
"""The groups of the help, with their commands."""
everything: list[Any] = [*app.registered_commands, *app.registered_groups]
for entry in everything:
    called = entry.name or entry.callback.__name__
    entry.rich_help_panel = next((panel for panel, members in PANELS.items() if called in members), None)


def _default_folder(recipe: Recipe) -> Path:
    method = "+".join(name.rpartition(":")[2] for name in (recipe.method.name, *recipe.method.add))
    after = f"-after-{Path(recipe.model.start).name}" if recipe.model.start else ""
    return Path("runs") / f"{recipe.name}-{method}-s{recipe.seed}{after}"


@contextmanager
def _watched(folder: Path, quiet: bool) -> Iterator[Progress]:
    """Progress while a run goes on; Ctrl-C ends it with exit code 130 and the way to go on."""
    from fedloom.rounds.progress import progress

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


def _conclude(result: Any) -> None:
    from fedloom.runs.reader import IN_VAIN, Run, human_bytes

    total = Run.read(result.folder).bytes_total()
    typer.echo(result.table())
    typer.echo(f"sent by clients: {human_bytes(total['up'])}, sent to clients: {human_bytes(total['down'])}")
    typer.echo(f"{result.status}: {result.folder}")
    if why := IN_VAIN.get(result.status):
        typer.echo(f"{why} (see the events in the report)", err=True)
        raise typer.Exit(1)


def _find(name: str, *registries: Registry) -> tuple[Registry, Registered]:
    for registry in registries:
        if registry.problem(name) is None:
            return registry, registry[name]
    if is_import(name):
        raise UserError(str(registries[0].problem(name)))
    known = sorted(name for registry in registries for name in registry.names)
    raise UserError(unknown("method or add-on", name, known))


def _describe(registry: Registry, entry: Registered) -> None:
    import inspect

    from fedloom.settings.problems import expected, found

    typer.echo(f"{entry.name} ({registry.kind}{', ' + entry.source if entry.source else ''})\n")
    typer.echo((inspect.getdoc(entry.function) or "") + "\n")
    fields = entry.params.model_fields.items()
    if fields:
        rows = [
            (key, "required" if f.is_required() else found(f.default), expected(f.annotation, [f])) for key, f in fields
        ]
        shared.print_table(["parameter", "default", "allowed"], rows)
    use = f"method.add.{entry.name}={{}}" if registry.kind == "add-on" else f"method={entry.name}"
    typer.echo(f"Use it: fedloom run RECIPE {use}")


def _text(value: Any) -> str:
    """The text of a cell: mappings as 'key value'; loss weights of 1 are left out."""
    if isinstance(value, Mapping):
        return ", ".join(key if v == 1.0 else f"{key} {_text(v)}" for key, v in value.items())
    if isinstance(value, list):
        return "/".join(map(str, value))
    return "" if value is None else str(value)
