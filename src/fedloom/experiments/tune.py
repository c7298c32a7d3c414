"""Choose each method's settings on validation data, with the same number of trials for every method.

A trial is a recipe's learning rate and the method's own numbers. Learning rates lie on a grid of half powers of ten
over two decades around the recipe's own, and beyond while the best one is at an end; the trials that are left go to the
method's first numbers, unless the user has set them, and then to rates closer and closer to the best.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from pydantic import Field

from fedloom.core.errors import RecipeError, StateError, nearest
from fedloom.core.grouping import nested
from fedloom.core.server import ServerRule
from fedloom.core.settings.section import FIXED, Count, Problems, Section, value_at
from fedloom.core.settings.trust import Origin
from fedloom.experiments.grid_run import BENCHMARK, SILENT, Runner
from fedloom.federation.recipes import loader
from fedloom.federation.recipes.loader import changed, load, texts
from fedloom.federation.recipes.schema import Recipe
from fedloom.federation.rounds.build import build_method
from fedloom.federation.runs.reader import TaskMetric
from fedloom.methods import ADDONS, METHODS
from fedloom.study.grid import (
    FILE,
    Changes,
    Grid,
    cells,
    load_grid,
    means_grid,
    names,
    parts_of,
    recipes,
    write,
)
from fedloom.study.output import Records, without_mark
from fedloom.study.results import SIGNED, Values, of_grid
from fedloom.study.statistics import delta_m

RATE = "training.optimizer.lr"
STEPS = (0, 1, -1, 2, -2)
"""Half powers of ten around the recipe's learning rate: two decades."""
ENDS = (0, 2, -2)
"""The same two decades, for fewer trials than steps."""
FACTORS = (3.0, 1 / 3)
"""The factors that a number of the method is multiplied by."""
POWERS = tuple(2.0**-n for n in range(2, 9))
"""The powers of ten between the best rate and the finer ones; after rounding, smaller powers give the same rate."""
NUMBERS = 2
"""The number of a method's numeric parameters that are tuned, in the order of their declaration."""

Scores = Mapping[str, float]
"""A trial as JSON -> its score on validation data; -inf after divergence."""


class RefusedError(RecipeError):
    """A method that the library refuses on this benchmark."""


class UnlearnedError(RecipeError):
    """A method of which no trial learned anything."""


class CrashedError(StateError):
    """A trial that crashed, which says nothing about its settings: they may be the best."""


class Budget(Section):
    """The budget that every method may spend on its settings."""

    trials: Count = 8
    seeds: tuple[Count, ...] = Field((100, 101), min_length=1)
    """Seeds of the trials, which nothing else uses (`tuning_seeds`)."""

    def _problems(self) -> Problems:
        if len({*self.seeds}) < len(self.seeds):
            yield "seeds", f"{list(self.seeds)} found: a seed occurs twice"


def tuning_seeds(count: int) -> tuple[int, ...]:
    """Return seeds for trials: 100, 101, then downwards, as a benchmark is judged with those from 102."""
    return tuple([100, 101, *range(99, -1, -1)][:count])


def refuse_used(where: str, seeds: Collection[int], used: Collection[int], what: str = "tunes the methods") -> None:
    """Raise StateError where a seed of results is one of those `used` before, which did `what`."""
    if both := sorted({*seeds} & {*used}):
        raise StateError(f"{where}: seed {both[0]} {what}; take others")


@dataclass(frozen=True)
class Search:
    """The trials of one method, each proposed from the scores of the ones before it; deterministic."""

    rate: float | None
    """The recipe's learning rate; None where it has none."""
    numbers: Mapping[str, float]
    """Recipe key -> value of the method's own numbers."""
    trials: int
    valid: Callable[[Changes], bool] = lambda trial: True

    def next(self, scores: Scores) -> list[Changes]:
        """Return the trials to run now; none when the budget is spent or nothing is left to try."""
        left = self.trials - len(scores)
        for batch in self._batches(scores):
            new = [trial for trial in batch if key(trial) not in scores and self.valid(trial)]
            if new and left > 0:
                return new[:left]
        return []

    def _batches(self, scores: Scores) -> Any:
        if self.rate is None:
            steps: list[float] = []
            yield [{}]
        else:
            yield [self._at(step) for step in (STEPS if self.trials >= len(STEPS) else ENDS)]
            steps = [step for step in range(-40, 41) if key(self._at(step)) in scores]
            top = max(steps, key=lambda step: scores[key(self._at(step))])
            if scores[key(self._at(top))] > -math.inf:
                yield [self._at(top + (1 if top == max(steps) else -1))] if top in (min(steps), max(steps)) else []
            else:  # all diverged: smaller ones
                yield [self._at(min(steps) - 1)]
        kept = [self._at(step) for step in steps] or [{}]

        def score(trial: Changes) -> float:
            return scores.get(key(trial), -math.inf)

        for name, value in self.numbers.items():
            centre = max(kept, key=score)
            near = dict.fromkeys(rounded(value, factor) for factor in FACTORS)
            tried = [{**centre, name: other} for other in near if other != value]
            yield tried
            kept += tried
        if self.rate is None:
            return
        for power in POWERS:
            yield (tried := self._beside(max(kept, key=score), power))
            kept += tried
        for centre in sorted(kept, key=score, reverse=True):  # nothing is left around the best: around the next ones
            yield [trial for power in POWERS for trial in self._beside(centre, power)]

    def _beside(self, centre: Changes, power: float) -> list[Changes]:
        """Return a trial with a larger and one with a smaller rate."""
        assert self.rate is not None
        rates = [rounded(centre.get(RATE, self.rate), 10**sign) for sign in (power, -power)]
        rest = {name: value for name, value in centre.items() if name != RATE}
        return [rest if rate == self.rate else {**rest, RATE: rate} for rate in rates]

    def _at(self, step: float) -> Changes:
        assert self.rate is not None
        return {RATE: rounded(self.rate, 10 ** (step / 2))} if step else {}

    def curve(self, label: str, run: Callable[[list[Changes]], Scores]) -> Curve:
        """Return all trials; `run` runs those so far that it has not run, and returns the scores of all."""
        proposed: list[Changes] = []
        scores: Scores = {}
        while new := self.next(scores):
            proposed += new
            scores = run(proposed)
        return Curve(label, scores, self.at_edge(scores))

    def at_edge(self, scores: Scores) -> bool:
        """Return whether the best learning rate is the largest or the smallest that was tried."""
        if self.rate is None or not scores:
            return False
        rates = {name: json.loads(name).get(RATE, self.rate) for name in scores}
        return rates[max(scores, key=lambda name: scores[name])] in (min(rates.values()), max(rates.values()))


def key(trial: Changes) -> str:
    """Return a trial as text, the same for equal trials."""
    return json.dumps(trial, sort_keys=True)


def rounded(value: float, factor: float) -> float:
    """Return value x factor with two digits; of a whole number, a whole number of at least 1."""
    return max(1, round(value * factor)) if isinstance(value, int) else float(f"{value * factor:.2g}")


def search_of(of: Callable[[Changes], Recipe], trials: int, stated: Mapping[str, Any] = {}) -> Search:
    """Return the search for a method: the recipe's learning rate, and the first numbers of the method and add-ons.

    `of` makes the recipe of a trial; trials that it refuses with a RecipeError are not proposed. Numbers that
    `stated`, a part of a recipe, has keep their values.
    """

    def is_valid(trial: Changes) -> bool:
        try:
            of(trial)
        except RecipeError:
            return False
        return True

    recipe = of({})
    plain = recipe.model_dump(mode="json")
    section = plain["method"]
    parts = [("method", METHODS, section["name"], section)]
    parts += [(f"method.add.{addon}", ADDONS, addon, held) for addon, held in (section.get("add") or {}).items()]
    numbers: dict[str, float] = {}
    for where, registry, name, held in parts:
        if registry.problem(name):
            continue
        rule: ServerRule | None = None
        with suppress(RecipeError):  # the library may refuse the method
            rule = build_method(recipe.method).server if where == "method" else None
        for field, info in registry[name].params.model_fields.items():
            if info.json_schema_extra == FIXED:
                continue
            value = held.get(field, info.default)
            if value is None:  # the method's own choice, such as the step of fedopt
                value = getattr(rule, field, None)
            if isinstance(value, int | float) and not isinstance(value, bool) and value:
                numbers[f"{where}.{field}"] = value
    first = {name: value for name, value in list(numbers.items())[:NUMBERS] if value_at(stated, name) is None}
    still = section["name"] == "constant"
    return Search(None if still else plain["training"]["optimizer"].get("lr"), first, 1 if still else trials, is_valid)


def weighted(method: Mapping[str, Any]) -> Changes:
    """Return how a recipe's section `method` weighs clients, which holds for all that are compared on it: under privacy
    sizes need a bound."""
    return {f"method.{name}": method[name] for name in ("weights", "max_examples") if method.get(name) is not None}


@dataclass(frozen=True)
class Curve:
    """All trials of one method and the one with the best score."""

    label: str
    scores: Scores
    """A trial as JSON -> mean over seeds and tasks of its change against the recipe's own settings, in percent."""
    at_edge: bool

    @property
    def key(self) -> str:
        """The trial with the best score as JSON, the first of equal ones."""
        return max(self.scores, key=lambda name: self.scores[name])

    @property
    def is_known(self) -> bool:
        """Return whether a trial ended with finite numbers."""
        return self.scores[self.key] > -math.inf

    @property
    def best(self) -> Changes:
        """The trial with the best score."""
        return json.loads(self.key)


def tune(
    recipe: Mapping[str, Any],
    changes: Changes,
    budget: Budget,
    folder: Path,
    *,
    label: str,
    stated: Mapping[str, Any] = {},
    origin: Origin = Origin.TYPED,
    runner: Runner = SILENT,
) -> Curve:
    """Run one method's trials on validation data of the budget's seeds, and return their scores.

    `changes` make the method's recipe of `recipe`, and `stated` is as in `search_of`. Trials that were run before in
    `folder` are not run again. Raises RefusedError where the library refuses the method, with its reason;
    UnlearnedError where no trial learned anything; CrashedError where a run fails; StateError where a stored file is
    damaged. Other settings than the recipe's own that the library refuses are left out.
    """
    unfit: dict[str, str] = {}

    def of(trial: Changes) -> Recipe:
        if key(trial) in unfit:
            raise RefusedError(unfit[key(trial)])
        return load(recipe, [*texts(changes), *texts(trial)], origin)

    try:
        last = on_validation(of({}))
        of(last)
    except RecipeError as error:
        raise RefusedError(str(error)) from None

    def ran(proposed: list[Changes]) -> Scores:
        proposed = [trial for trial in proposed if key(trial) not in unfit]
        about = {"name": "trials", "data": {BENCHMARK: {"recipe": dict(recipe)}}, "references": [], "delta": "none"}
        # named by their settings, so that a search with more seeds or trials finds those that ran before
        bases = {described(trial): {**changes, **last, **trial} for trial in proposed}
        grid = load_grid({**about, "bases": bases, "seeds": list(budget.seeds)}, origin=origin)
        with stored(label):
            outcome = runner.run(grid, folder)
        refused = {cell.base: why for cell in cells(grid) if (why := outcome.refused.get(cell.combination))}
        unfit.update({key(trial): refused[described(trial)] for trial in proposed if described(trial) in refused})
        of({})
        for cell, reason in outcome.failed.items():
            raise CrashedError(f"{label}: {cell.base}, seed {cell.seed}: {reason}")
        with stored(label):
            return scores_of(grid, folder, [trial for trial in proposed if key(trial) not in unfit])

    search = search_of(of, budget.trials, stated)
    apart = last.get("partition.val_fraction")
    share = "" if apart is None else f"; {apart:.0%} of each client's examples validate, because the recipe has none"
    most = f"up to {search.trials} settings, each" if search.trials > 1 else "one setting,"
    runner.tell(f"{label}: {most} with seed {', '.join(map(str, budget.seeds))}{share}")
    curve = search.curve(label, ran)
    if not curve.is_known:
        raise UnlearnedError(
            f"none of {len(curve.scores)} settings learned anything or ended with finite numbers; the search begins at "
            f"{RATE}={of({}).training.optimizer.lr:g}, expected a smaller one"
        )
    return curve


@contextmanager
def stored(label: str) -> Iterator[None]:
    """Turn an error about what earlier runs have stored, which is no refusal of the method, into one with advice."""
    try:
        yield
    except (RecipeError, StateError) as error:
        advice = "" if "delete" in str(error) else "; delete the file (of a run: its whole folder) and try again"
        raise StateError(f"{label}: {error}{advice}") from None


def on_validation(recipe: Recipe) -> Changes:
    """Return the changes that measure a run on validation data: a fifth of the examples where it has none."""
    changes: Changes = {"evaluation.splits": ["val"], "evaluation.every": recipe.training.rounds}
    if recipe.partition.params.get("val_fraction") == 0:
        changes["partition.val_fraction"] = 0.2
    return changes


def scores_of(grid: Grid, folder: Path, trials: Sequence[Changes]) -> dict[str, float]:
    """Return the score of each trial of a grid: the change against the first one that learned something."""
    results = of_grid(grid, folder, "val")
    values = {base: side.values for (_, base, _), side in results.sides.items()
              if not side.is_in_vain and len(side.values) == len(grid.seeds)}  # fmt: skip
    return scored({key(trial): values.get(described(trial), {}) for trial in trials}, results.rows[BENCHMARK])


def scored(values: Mapping[str, Values], rows: Sequence[TaskMetric]) -> dict[str, float]:
    """Return the score of each name, from its numbers by seed and task; -inf without a seed."""
    means = {
        name: {row.task: fmean(of.get(row.task, math.nan) for of in by_seed.values()) for row in rows if by_seed}
        for name, by_seed in values.items()
    }
    signed = {row.task for row in rows if row.metric in SIGNED}
    return changes_against_first(means, {row.task: row.direction for row in rows}, signed)


def changes_against_first(
    means: Mapping[str, Mapping[str, float]], directions: Mapping[str, str], signed: Collection[str] = ()
) -> dict[str, float]:
    """Return each trial's mean change over tasks, in percent of the first finite trial; -inf without.

    Of the tasks in `signed`, whose metric may be about 0, it is in hundredths of the metric: a percent of R2 = 0.01
    would outweigh all other tasks.
    """
    known = {task for values in means.values() for task, value in values.items() if math.isfinite(value)}
    finite = {name: {t: values[t] for t in known} for name, values in means.items()
              if known and all(math.isfinite(values.get(t, math.nan)) for t in known)}  # fmt: skip
    if not finite:
        return dict.fromkeys(means, -math.inf)
    base = next(iter(finite.values()))
    moved = {name: {t: 1 + (v - base[t]) if t in signed else v for t, v in of.items()} for name, of in finite.items()}
    usual = {task: 1.0 if task in signed else value for task, value in base.items()}
    changes = {name: delta_m(values, usual, directions) for name, values in moved.items()}
    return {name: changes[name] if math.isfinite(changes.get(name, math.nan)) else -math.inf for name in means}


def as_grid(source: str, changes: Sequence[str] = ()) -> Grid:
    """Return a grid by name or file; a recipe's has its method alone. Raises RecipeError where there is neither."""
    if not Path(source).exists() and source not in (known := (*loader.names(), *names())):
        raise RecipeError(f"no recipe or grid {source!r}: neither a file nor a packaged one.{nearest(source, known)}")
    if means_grid(source):
        return load_grid(source, changes)
    recipe = loader.load(source, changes)
    value = recipe.model_dump(mode="json")
    made = {"name": recipe.name, "data": {recipe.name: {"recipe": value}}, "bases": {value["method"]["name"]: {}}}
    # a grid has seeds of its own
    rest = [change for change in changes if change.partition("=")[0].strip() != "seed"]
    return load_grid({**made, "references": [], "delta": "none"}, rest)


def tune_grid(
    grid: Grid, budget: Budget, folder: Path, runner: Runner = SILENT
) -> tuple[Grid, list[tuple[str, Curve]], dict[str, RefusedError | UnlearnedError | CrashedError]]:
    """Tune every combination of a grid, the references too.

    Returns the tuned grid, the curves by data set, and why combinations have none. The chosen settings stand under the
    grid's key `tuned`. Raises StateError where a seed of the grid is one of the budget.
    """
    refuse_used(f"grid {grid.name}", grid.seeds, budget.seeds)
    if (folder / "cells").is_dir() and (folder / FILE).is_file() and not load_grid(folder / FILE).tuned_on:
        raise StateError(
            f"{folder} is the folder of a grid, whose {FILE} the tuned grid would replace: choose another with --out"
        )
    curves: list[tuple[str, Curve]] = []
    left_out: dict[str, RefusedError | UnlearnedError | CrashedError] = {}
    tuned: dict[str, dict[str, Changes]] = {}
    untuned = grid.model_copy(update={"tuned": {}, "seeds": grid.seeds[:1]})
    for cell, recipe in recipes(untuned).items():
        label, place = f"{cell.base}/{cell.addon}", cell.folder(folder / "trials").parent
        value = recipe.model_dump(mode="json")
        stated = changed(label, {}, [text for part in parts_of(grid, cell) for text in texts(part)])
        try:
            curve = tune(value, {}, budget, place, label=label, stated=stated, origin=grid._origin, runner=runner)
        except (RefusedError, UnlearnedError, CrashedError) as error:
            left_out[cell.combination] = error
            runner.tell(f"{cell.data}: {label}: {' '.join(str(error).split())}")
            continue
        curves.append((cell.data, curve))
        runner.tell(f"{cell.data}: {label}: {described(curve.best)} ({len(curve.scores)} trials)")
        if curve.best:
            tuned.setdefault(cell.data, {})[label] = curve.best
    more = {"tuned": tuned, "tuned_on": list(budget.seeds)}
    tuned_grid = load_grid({**grid.model_dump(mode="json"), **more}, origin=grid._origin)
    write(folder, {"curves.csv": curves_csv(curves)})
    return tuned_grid, curves, left_out


def described(trial: Changes) -> str:
    """Return settings as text: 'training.optimizer.lr=0.05, method.mu=0.1'."""
    return ", ".join(f"{name}={json.dumps(value)}" for name, value in trial.items()) or "the recipe's own settings"


def curves_csv(curves: Sequence[tuple[str, Curve]]) -> str:
    """Return all trials as CSV, a line each."""
    head = ("data", "method", "trial", "settings", "validation", "chosen", "rate_at_edge")
    lines = [
        (data, curve.label, n, name, f"{score:.4g}", name == curve.key, name == curve.key and curve.at_edge)
        for data, curve in curves
        for n, (name, score) in enumerate(curve.scores.items())
    ]
    return Records(head, lines).to_csv()


def chosen_of(file: Path) -> dict[str, dict[str, Changes]]:
    """Return data set -> combination -> chosen settings of a file of `curves_csv`. Raises StateError for others."""
    try:
        rows = [row for row in csv.DictReader(io.StringIO(file.read_text("utf-8"))) if row["chosen"] == "True"]
        return nested(
            (without_mark(row["data"]), without_mark(row["method"]), json.loads(row["settings"])) for row in rows
        )
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise StateError(f"{file}: no file of trials, which `fedloom study claims --run` writes ({error})") from None
