"""`fedloom run`, `resume`, `demo` and `pretrain`: the commands that train."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from fedloom.cli import shared
from fedloom.cli.grid import grid
from fedloom.cli.look import report
from fedloom.cli.shared import argument, flag, option
from fedloom.cli.tables import compare
from fedloom.core.errors import StateError, UserError
from fedloom.engines import cluster, processes

if TYPE_CHECKING:
    from fedloom.federation.rounds.progress import Progress


def run(
    recipe: shared.PerhapsRecipe = None,
    changes: shared.Changes = None,
    out: Annotated[Path | None, shared.out_folder("The folder of the run.", default="runs/NAME-METHOD-sSEED")] = None,
    start: Annotated[
        Path | None, option("Start from this run's model; without RECIPE, also use its recipe.", "RUN", name="--from")
    ] = None,
    quiet: shared.Quiet = False,
    as_json: shared.Json = False,
) -> None:
    """Train as a recipe says, and write a run folder."""
    from fedloom.federation.recipes import load

    overrides = list(changes or ())
    if start is not None:
        if recipe is None or "=" in recipe:  # no recipe, and the first change in its place
            from fedloom.federation.runs.recorded import recipe_in

            recipe_in(start)  # by the rule of run folders, before the changes are applied
            overrides, recipe = [*([recipe] if recipe else []), *overrides], str(start / "recipe.yaml")
        overrides.append(f"model.start={start.resolve()}")
    if recipe is None:
        raise UserError("run: RECIPE is missing, expected a packaged recipe (see `fedloom recipes`) or a YAML file")
    checked = load(recipe, overrides)
    names = "+".join(name.rpartition(":")[2] for name in (checked.method.name, *checked.method.add))
    after = f"-after-{Path(checked.model.start).name}" if checked.model.start else ""
    folder = out or Path("runs") / f"{checked.name}-{names}-s{checked.seed}{after}"
    # of several processes, only the first one writes the folder and prints
    rank = cluster.rank() if checked.runtime.engine == "cluster" else None
    if rank is None and folder.is_dir() and any(folder.iterdir()):
        resume = f"continue it with `fedloom resume {folder}`, or " if (folder / "run.json").is_file() else ""
        raise StateError(f"{folder} is not empty: {resume}choose another folder with --out")
    if checked.runtime.engine == "process" and checked.runtime.workers not in (1, "auto"):
        processes.prepare()
    with _watched(folder, quiet or bool(rank)) as progress:
        from fedloom.engines import api

        result = api.run(checked, folder, progress=progress)
    if not rank:
        _conclude(result, as_json)


def resume(
    folder: Annotated[Path, argument("The folder of an interrupted run.", "RUN")],
    changes: Annotated[
        list[str] | None,
        argument("Changes: training.rounds=50 extends the run; keys of runtime may change too.", "KEY=VALUE..."),
    ] = None,
    accept_changes: Annotated[
        bool, flag("--accept-changes", "Continue even if the recipe in the folder was edited, and record the changes.")
    ] = False,
    quiet: shared.Quiet = False,
    as_json: shared.Json = False,
) -> None:
    """Continue an interrupted run or extend a finished one. The result equals one uninterrupted run, bit for bit."""
    shared.check_run(folder)
    with _watched(folder, quiet) as progress:
        from fedloom.engines import api

        result = api.resume(folder, progress=progress, accept_changes=accept_changes, overrides=changes or ())
    _conclude(result, as_json)


def demo(
    changes: shared.Changes = None,
    data: Annotated[
        Literal["ist", "digits"], option("Stroke patients of 16 countries (ist), or handwritten digits.")
    ] = "ist",
    out: Annotated[Path, shared.out_folder("The grid's folder.")] = Path("grids/demo"),
    quiet: shared.Quiet = False,
    tests: Annotated[bool, flag("--tests", "Also print paired tests of every method and task.")] = False,
) -> None:
    """Train 16 sites alone and together, with several tasks and three seeds; write a table and a page of every site."""
    with_page = find_spec("vl_convert") is not None
    if not with_page:  # before minutes of training, not after
        typer.echo(
            "The demo will end without a page, because vl-convert is not installed: pip install 'fedloom[report]'",
            err=True,
        )
    grid("demo", changes, out, quiet=quiet, benchmark=None if data == "ist" else data)
    compare([out])
    if tests:
        compare([out], tests=True)
    typer.echo("\n".join(_gains(out)))
    if with_page:
        report(str(out))


def _gains(folder: Path) -> list[str]:
    """Return one sentence per method of the demo: its change compared with training alone, over all tasks."""
    from fedloom.study.grid import against, open_folder
    from fedloom.study.results import of_grid
    from fedloom.study.significance import contrasts

    grid, folder = open_folder(folder)
    return [
        f"{test.method} changes the metrics by {test.mean:+.1f} %"
        + (f" (95 % CI {test.change.low:+.1f} to {test.change.high:+.1f})" if test.change else "")
        + " compared with training alone."
        for test in contrasts(of_grid(against(grid, grid.delta), folder)).tests
        if test.row is None and test.gains
    ]


def pretrain(
    recipe: shared.RecipeArgument,
    epochs: Annotated[int, option("The number of passes over all training examples.", min=1)],
    out: Annotated[Path, shared.out_file("The file to write.", "FILE.safetensors")],
    changes: shared.Changes = None,
    quiet: shared.Quiet = False,
    as_json: shared.Json = False,
) -> None:
    """Train the model of a recipe on all of its data in one place, and write the encoder for `model.weights`."""
    from fedloom.federation.recipes import load

    checked = load(recipe, changes or ())
    import torch

    from fedloom.experiments.pretrain import pretrain as train

    torch.set_num_threads(checked.runtime.threads)
    saved = 0
    with shared.bar(quiet) as advance:

        def tell(epoch: int, loss: float) -> None:
            nonlocal saved
            saved = epoch
            advance(epoch, epochs, f"loss {loss:.4g}, saved")

        try:
            done = train(checked, epochs, out, tell)
        except KeyboardInterrupt:
            kept = f"{out} holds epoch {saved} of {epochs}" if saved else "nothing was written yet"
            typer.echo(f"interrupted; {kept}", err=True)
            raise typer.Exit(130) from None
    after = f"after epoch {done.epochs} of {epochs}, on all test examples"
    shared.answer(done, as_json, done.table(), after, f"its encoder: {out}; use it with model.weights={out}")


@contextmanager
def _watched(folder: Path, quiet: bool) -> Iterator[Progress]:
    """Show progress while a run trains; Ctrl-C ends it with exit code 130 and prints how to continue."""
    from fedloom.federation.rounds.progress import progress

    watch = progress(quiet)
    with shared.interruptible(folder / "recipe.yaml", f"continue with: fedloom resume {folder}"):
        try:
            yield watch
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
