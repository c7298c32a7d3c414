"""The functions run, resume and plan; and engines by name, the places where the jobs of a run are done.

Rounds and their results are the same in all engines.
"""

from __future__ import annotations

import shutil
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from fedloom.core.context import State
from fedloom.core.errors import RecipeError, RunWarning, StateError
from fedloom.core.settings.section import differs, found
from fedloom.core.settings.trust import admit, names_in
from fedloom.data.own import Federation
from fedloom.data.partition import Partition
from fedloom.engines.peers.rounds import initial_peers, without_server
from fedloom.engines.plan import Plan
from fedloom.engines.plan import plan as plan_built
from fedloom.engines.pool import executor
from fedloom.engines.result import Result, model_file, trained_models
from fedloom.federation.recipes.draft import MODELS
from fedloom.federation.recipes.loader import load, read
from fedloom.federation.recipes.objects import separated, undone, with_keywords, without_method
from fedloom.federation.recipes.schema import GIVEN, Recipe, described
from fedloom.federation.rounds.build import build
from fedloom.federation.rounds.built import Built
from fedloom.federation.rounds.measure import complete, export, labels
from fedloom.federation.rounds.progress import Progress, shown
from fedloom.federation.rounds.round import Advance
from fedloom.federation.rounds.rounds import form_of, initial_state, run_rounds, status
from fedloom.federation.rounds.showing import keep
from fedloom.federation.rounds.worker import Executor, check_device, set_algorithms, set_torch
from fedloom.federation.runs.folder import RunFolder
from fedloom.federation.runs.reader import Run
from fedloom.federation.runs.recorded import TEMPORARY
from fedloom.federation.runs.track import Tracking
from fedloom.training.flat import learning_rate

__all__ = ["Plan", "Result", "model_file", "plan", "resume", "run", "trained_models"]

START = "start.safetensors"
"""The weights with which a model that was made in Python began."""

Source = Federation | Recipe | str | Path | Mapping[str, Any]


def recipe_of(
    what: Source, model: Any = None, method: Any = None, overrides: Sequence[str] = (), **options: Any
) -> Recipe:
    """Return the recipe of a run: a federation with a model, or a recipe, with its objects in it (see `run`)."""
    changes = model is not None or isinstance(method, str | Mapping) or overrides or options
    if isinstance(what, Recipe) and not changes:
        recipe, objects = what, dict[str, Any]()
    else:
        value, objects = separated(with_keywords(_content(what, model, method), options))
        recipe = load(value, overrides)
    if method is not None and not isinstance(method, str | Mapping):
        objects["method"] = method
        undone(recipe.method, described(method))
    return recipe.holding(**objects)


def _content(what: Source, model: Any, method: Any) -> dict[str, Any]:
    if isinstance(what, Federation):
        value: dict[str, Any] = {"name": "run", "data": what, "partition": "own", "method": "fedavg"}
        if model is None:
            signal = what.dataset.signal
            if signal is None:
                raise RecipeError(
                    "run: model= is missing, expected a torch.nn.Module, fl.model(...) or an encoder's name"
                )
            model = "tiny-pyramid" if any(task.dense for task in what.dataset.tasks) else MODELS[signal.kind]
    elif isinstance(what, Recipe | Mapping | str | Path):
        where, value, origin, _ = read(what.model_dump(mode="json") if isinstance(what, Recipe) else what)
        admit(names_in(value), origin, where)  # before what was typed joins what a file says
        if not isinstance(value, Mapping):
            return load(what).model_dump(mode="json")  # says what is wrong with it
    else:
        raise RecipeError(
            f"run: {type(what).__name__} found, expected a fl.Federation, or a recipe: a name, a file, a mapping or a "
            "Recipe"
        )
    if model is not None:
        value = {**value, "model": model}
    return {**value, "method": method} if isinstance(method, str | Mapping) else dict(value)


def run(
    what: Source,
    folder: Path | str | None = None,
    *,
    model: Any = None,
    method: Any = None,
    overrides: Sequence[str] = (),
    progress: Progress | None = None,
    engine: Engine | None = None,
    **options: Any,
) -> Result:
    """Run a federation or a recipe and return the result.

    what       a `fl.Federation`, or a recipe: a packaged name, a file, a mapping or a Recipe; a mapping may have
               objects in place of names
    folder     must be new or empty; without it the run uses a temporary one, which is deleted with the result: nothing
               is left of `fl.run(...).folder` unless the result is stored
    model      a torch.nn.Module, `fl.model(...)`, a function or class that makes one, an encoder's name, or a mapping
               with such a `name` and keys of the section model. It is not changed. The default for a federation is the
               small encoder for its kind of inputs
    method     a Method, a function that makes one, or a name with its parameters as in a recipe
    overrides  "key.path=value" texts
    progress   receives the events of the run; by default bars where stderr is a terminal, and in a notebook
    engine     an existing engine, used in place of the one that the recipe names
    options    a recipe's sections (evaluation={"every": 5}), and single keys of `training` and `runtime`
               (rounds=20, epochs=2, batch_size=16, lr=0.1, workers=2)

    Objects from Python are not in the folder: `resume` needs them again. Without `progress`, a run that dropped updates
    or lost rounds warns (RunWarning); `Result.table()` reports it too. Raises UserError (RecipeError, DataError,
    StateError) for bad input.
    """
    if not isinstance(folder, str | Path | None):
        raise RecipeError(f"run: folder={found(folder)} found, expected a path; give the model as model=")
    recipe = _ready(recipe_of(what, model, method, overrides, **options))
    engine = engine or _engine_of(recipe)
    warn, progress = progress is None, _reports(progress)
    path = Path(tempfile.mkdtemp(prefix=TEMPORARY)) if folder is None else Path(folder)
    try:
        if (ended := engine.takes_over(recipe, path, progress, fresh=True)) is not None:
            return Result(path, ended, temporary=folder is None)
        built = engine.build(recipe)
        for doubt in built.dataset.doubts:
            progress.warn(f"data: {doubt}")
        with RunFolder.create(path, recipe, built.dealt, built.about, progress.warn) as run_folder:
            if recipe.model.is_held or built.modules:
                run_folder.save_model(built.start, {"round": "0"}, START)
            ended = _go(engine, built, run_folder, engine.initial(built), progress)
    except BaseException:
        if folder is None:
            shutil.rmtree(path, ignore_errors=True)
        raise
    return _warned(Result(path, ended, built, temporary=folder is None), warn)


def _warned(result: Result, warn: bool) -> Result:
    """Return a result, and warn of trouble in its run, unless a caller's Progress has reported it."""
    if warn and (trouble := result.trouble):
        warnings.warn(f"{trouble}; see {result.folder / 'metrics.jsonl'}", RunWarning, stacklevel=3)
    return result


def resume(
    folder: Path | str,
    *,
    federation: Federation | None = None,
    model: Any = None,
    method: Any = None,
    progress: Progress | None = None,
    engine: Engine | None = None,
    accept_changes: bool = False,
    overrides: Sequence[str] = (),
    **options: Any,
) -> Result:
    """Continue a run after its last whole checkpoint, bit for bit as if it had never stopped.

    `overrides` ("training.rounds=50") and `options` (rounds=50) may change keys of `runtime` and the number of rounds,
    unless that would change the finished rounds. It begins a new segment of the run, which run.json, an event and the
    report show.

    `federation`, `model` and `method` are the objects with which the run began, if any; the model gets the run's
    initial weights. `accept_changes` lets the recipe in the folder differ from the one that the run began with,
    except for its method, model and data, and records the differences. These changes need the engine process.

    Raises StateError if the folder is no run folder or is damaged, or if the data, model, method or recipe changed.
    """
    path = Path(folder)
    warn, progress = progress is None, _reports(progress)
    recipe, partition = RunFolder.read(path)
    if isinstance(model, Mapping):  # keys beside an object, as `run` takes them
        options["model"] = recipe.model.model_dump(mode="json") | {k: v for k, v in model.items() if k != "name"}
        model = model.get("name")
    if isinstance(method, str | Mapping):
        options["method"], method = method, None
    objects = {"data": federation, "model": model, "method": method}
    for key, thing in objects.items():
        section = getattr(recipe, key)
        if thing is not None and key != "method" and section.name != GIVEN:
            raise StateError(
                f"{folder}: the run has {key}: {section.name}, so {section.argument}= has no place: leave it out"
            )
    changed: list[str] = []
    if overrides or options:
        recipe, changed = _extended(path, recipe, overrides, options)
    recipe = recipe.holding(**{key: thing for key, thing in objects.items() if thing is not None})
    without_method(recipe.method)
    engine = engine or _engine_of(recipe)
    if (accept_changes or changed) and recipe.runtime.engine != "process":
        what = "--accept-changes works" if accept_changes else f"{', '.join(changed)} can be changed"
        raise StateError(f"{folder}: {what} only with runtime.engine: process, found {recipe.runtime.engine}")
    if (ended := engine.takes_over(recipe, path, progress, fresh=False)) is not None:
        return Result(path, ended)
    built = engine.build(recipe, partition)
    if recipe.model.is_held or built.modules:
        try:
            built.begin_again(load_file(path / START))
        except (OSError, RuntimeError, SafetensorError) as error:
            raise StateError(f"{path / START}: the model is not the one that the run began with: {error}") from None
    if ROUNDS in changed and "rounds" in built.method.stage.traits.reads:
        raise StateError(
            f"{folder}: {ROUNDS} cannot change, because {built.method.name} depends on the number of rounds"
        )
    with RunFolder(path, recipe.runtime.mirror, progress.warn) as run_folder:
        accepted = accept_changes or changed
        form = form_of(built, engine.initial(built))
        state = run_folder.continued(built.about, lambda: engine.initial(built), progress.event, accepted, form)
        ended = _go(engine, built, run_folder, state, progress)
    return _warned(Result(path, ended, built), warn)


ROUNDS = "training.rounds"


def _extended(
    folder: Path, before: Recipe, overrides: Sequence[str], options: Mapping[str, Any]
) -> tuple[Recipe, list[str]]:
    """Return the recipe of a run that goes on with changes, and the changed keys. Raises StateError for others."""
    old = before.model_dump(mode="json")
    after = load(with_keywords(old, options), overrides)
    changed = sorted(differs("", old, after.model_dump(mode="json")))
    own = "runtime.engine" if "flower" in (before.runtime.engine, after.runtime.engine) else None  # nodes have states
    if fixed := [key for key in changed if key != ROUNDS and (key[:8] != "runtime." or key == own)]:
        typed = " ".join(overrides) or f"{fixed[0]}=..."
        raise StateError(
            f"{folder}: {', '.join(fixed)} cannot change after the run has begun; only {ROUNDS} and keys of runtime "
            f"can. Start a new run from its model: fedloom run --from {folder} {typed}"
        )
    run = Run.read(folder)
    if ROUNDS in changed and (run.info["status"] == "stopped early" or run.last_round > after.training.rounds):
        why = "stopped early" if run.info["status"] == "stopped early" else f"has had {run.last_round} rounds"
        raise StateError(f"{folder}: the run {why}, so {ROUNDS} cannot become {after.training.rounds}")
    schedule = after.training.schedule
    if ROUNDS in changed and (schedule.name == "cosine" or schedule.warmup_share):
        what = "cosine" if schedule.name == "cosine" else f"warmup_share: {schedule.warmup_share:g}"
        last = before.training.rounds
        was, now = (learning_rate(t.of(None), last, 0) for t in (before.training, after.training))
        raise StateError(
            f"{folder}: {ROUNDS} cannot change from {last} to {after.training.rounds}, because training.schedule "
            f"({what}) spans all rounds: the finished rounds would have had other learning rates (round {last}: "
            f"{now:.3g}, not {was:.3g}). Start a new run from its model: fedloom run --from {folder}"
        )
    return after, changed


def plan(recipe: Source, method: Any = None, *, model: Any = None, **options: Any) -> Plan:
    """Plan a run without training: parameters, partition, bytes per round, memory. It takes the arguments of `run`."""
    return plan_built(build(_ready(recipe_of(recipe, model, method, **options))))


def _ready(recipe: Recipe) -> Recipe:
    """Return a recipe to build. Raises UserError, before the data is loaded, for no Method and for a wrong device."""
    without_method(recipe.method)
    for device in recipe.runtime.devices:
        check_device(device)
    return recipe


def _reports(progress: Progress | None) -> Progress:
    """Return what receives the events of a run, by default what is shown. RecipeError for what cannot."""
    if progress is not None and not hasattr(progress, "event"):
        expected = "an object of a class that derives from fedloom.federation.rounds.progress.Progress"
        raise RecipeError(f"progress={found(progress)} found, expected {expected}, or None")
    return progress or shown()


def _go(engine: Engine, built: Built, folder: RunFolder, state: State, progress: Progress) -> str:
    recipe = built.recipe
    folder.tracker = Tracking(built.about["recipe"], folder.path, progress.event)
    progress.start(recipe.training.rounds, state["round"])
    try:
        with _torch_as(recipe), engine.start(built, folder) as (executor, advance):
            show = partial(engine.show, built, executor, folder.path, final=False)
            state = run_rounds(built, executor, folder, state, progress, advance, show)
            return engine.conclude(built, executor, folder, state)
    finally:
        progress.stop()


@contextmanager
def _torch_as(recipe: Recipe) -> Iterator[None]:
    """Set torch during a run as the recipe states."""
    cudnn, products = torch.backends.cudnn, torch.backends.cuda.matmul
    before = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    flags = cudnn.deterministic, cudnn.allow_tf32, products.allow_tf32
    set_torch(recipe.runtime, recipe.training)
    try:
        yield
    finally:
        torch.set_num_threads(before[0])
        set_algorithms(before[1])
        cudnn.deterministic, cudnn.allow_tf32, products.allow_tf32 = flags


ENGINES = {
    "process": "fedloom.engines.api:Engine",
    "cluster": "fedloom.engines.cluster.launch:Cluster",
    "flower": "fedloom.engines.flower.engine:Flower",
}
"""Name -> module:class, a subclass of Engine, imported when a recipe asks for it."""


class Engine:
    """The engine that runs jobs in this process or in a pool of workers. No subclass has state between two runs."""

    def takes_over(self, recipe: Recipe, folder: Path, progress: Progress, fresh: bool) -> str | None:
        """Do the whole run, or its rest, in other processes, and return how it ended; None: this process does it."""
        return None

    def build(self, recipe: Recipe, partition: Partition | None = None) -> Built:
        """Build a recipe; `partition` is the saved one, when resuming."""
        return build(recipe, partition)

    def initial(self, built: Built) -> State:
        """Return the state before the first round."""
        return initial_peers(built) if built.recipe.peers else initial_state(built)

    @contextmanager
    def start(self, built: Built, folder: RunFolder) -> Iterator[tuple[Executor, Advance | None]]:
        """Start for a run; yield the executor of jobs, and the function that does a round (None: with a server)."""
        runtime = built.recipe.runtime
        workers = executor(built.setup, runtime.devices, runtime.processes, runtime.workers == "auto")
        try:
            yield workers, without_server(built) if built.recipe.peers else None
        finally:
            workers.close()

    def show(self, built: Built, executor: Executor, folder: Path, state: State, final: bool = True) -> None:
        """Store predictions on test data, of the final models or of earlier ones; called before `start` ends."""
        keep(folder, built, executor, state, final)

    def export(self, built: Built, state: State) -> dict[str, Tensor]:
        """Return the final models as named tensors; called before `start` ends."""
        return export(built, state)

    def conclude(self, built: Built, executor: Executor, folder: RunFolder, state: State) -> str:
        """Write the files of a finished run, and return how it ended."""
        final = folder.kept(state, built.recipe.early_stopping)
        complete(built, executor, folder, final)
        folder.save_model(self.export(built, final), labels(built, final))
        self.show(built, executor, folder.path, final)
        folder.describe(built.about, status(state), state["round"], final["round"])
        return status(state)


def _engine_of(recipe: Recipe) -> Engine:
    """Return the engine that a recipe names."""
    return resolve_name(ENGINES[recipe.runtime.engine])()
