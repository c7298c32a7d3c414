"""Several methods on one federation, or one recipe, side by side; without named methods: does training together pay?"""

from __future__ import annotations

import shlex
import shutil
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from math import isfinite, nan
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from fedloom.core.errors import DataError, RecipeError, StateError, UserError, choices, parsing
from fedloom.core.settings.section import as_plain
from fedloom.core.settings.yaml import section_of
from fedloom.data.own import Federation
from fedloom.engines.api import START, Source, recipe_of, resume, run
from fedloom.experiments import tune
from fedloom.experiments.grid_run import Place, Watch, bytes_of, run_at_once
from fedloom.federation.recipes.loader import texts
from fedloom.federation.recipes.schema import Recipe, recipe_hash
from fedloom.federation.recipes.schema import described as in_words
from fedloom.federation.rounds.build import build
from fedloom.federation.rounds.progress import Progress
from fedloom.federation.runs.folder import check_parts
from fedloom.federation.runs.reader import IN_VAIN, Run, TaskMetric, clock
from fedloom.federation.runs.recorded import TEMPORARY, began, changed, other_code, recipe_in
from fedloom.study.comparison import Comparison, RunSet, save
from fedloom.study.comparison import compare as put_side_by_side
from fedloom.study.grid import CHANGES, SMALLEST, Changes, is_over
from fedloom.study.report.records import small_clients
from fedloom.study.results import UNKNOWN, is_validated, near_0, unsettled_among
from fedloom.study.significance import contrasts, holders, sites
from fedloom.study.statistics import FRACTIONS, judge, paired

OWN_HEADS = {"model.heads": "own"}
PAYS: Mapping[str, Changes] = {
    "local": {"method": "local", "privacy": None},
    "separate": {"method": "separate"},
    "fedavg": {"method": "fedavg", **OWN_HEADS},
    "fedhca2": {"method": "fedhca2", **OWN_HEADS},
    **{name: CHANGES[name] for name in ("centralised", "simple", "constant")},
}
"""The runs of a comparison without named methods: training alone, one FedAvg per task, FedAvg with own heads, FedHCA2,
all data in one place, a linear model, and the constant prediction. What the library refuses is left out."""
TOGETHER = ("separate", "fedavg", "fedhca2")


def compare(
    what: Source,
    *,
    methods: Sequence[Any] | None = None,
    seeds: int | Sequence[int] | None = None,
    model: Any = None,
    folder: Path | str | None = None,
    base: str | None = None,
    split: str = "test",
    metric: str | None = None,
    budget: tune.Budget | Mapping[str, Any] | None = None,
    tell: Callable[[str], None] | None = None,
    jobs: int | None = 1,
    **options: Any,
) -> Comparison:
    """Run each method with each seed, and compare the runs: one column per method, with an interval over seeds.

    `methods` are names, mappings as in a recipe, Methods or functions that make one; `seeds` a number of seeds from 0
    or the seeds. The change Δm is relative to `base`, by default the first method. `split` and `metric` are as in
    `fedloom compare`, everything else as in `fl.run`. Runs are in FOLDER/METHOD-sSEED; without a folder they go with
    the result.

    Without `methods`, test whether training together pays off: `local`, `separate`, `fedavg` with own heads, `fedhca2`
    and `centralised` are each tuned with the same `budget` on validation data, an `fl.Budget` or a mapping of its keys,
    by default that of `fedloom tune`, and run with three seeds. The table ends with a sentence for all tasks together,
    each task and each client. Named methods are not tuned.

    `jobs` is how many runs of a recipe go at once (None: as many as the CPUs can take); those of a federation, a model
    or a method in memory go one by one. `tell` receives a line for each run, by default on stderr. Finished runs in
    FOLDER are not repeated, and interrupted ones are continued. Runs of another recipe, other data, other code or other
    weights are refused.

    Raises UserError for bad input.
    """
    if methods is not None and (isinstance(methods, str | Mapping) or not isinstance(methods, Sequence) or not methods):
        raise RecipeError(
            f"compare: methods={methods!r} found, expected a list of methods, such as ['local', 'fedavg']"
        )
    named = [method for method in methods or () if isinstance(method, str | Mapping)]
    if again := [method for i, method in enumerate(named) if method in named[:i]]:
        raise RecipeError(f"compare: methods={methods!r} found: {again[0]!r} occurs twice")
    if seeds is None:
        seeds = 3 if methods is None else 1
    seeds = as_plain(seeds)
    if isinstance(seeds, bool) or not isinstance(seeds, int | Sequence) or isinstance(seeds, str) or not seeds:
        raise RecipeError(f"compare: seeds={seeds!r} found, expected the number of seeds, or a list of them")
    for one, several in (("seed", "seeds=, a number of seeds or a list"), ("method", "methods=, a list")):
        if one in options:
            raise RecipeError(f"compare: {one}={options[one]!r} found, expected {several}")
    if split not in ("test", "val"):
        raise RecipeError(f"compare: split={split!r} found, expected 'test' or 'val'")
    if split == "test" and isinstance(what, Federation) and not len(what.dataset.test):
        ways = "give clients test=, or the federation one that all share; or compare on validation data: split='val'"
        raise DataError(f"compare: split='test' found, but the federation has no test data: {ways}")
    every = tuple(range(seeds)) if isinstance(seeds, int) else tuple(seeds)
    if len({*every}) < len(every):
        raise RecipeError(f"compare: seeds={seeds!r} found: a seed occurs twice")
    given = {"base": base} if methods is None else {"budget": budget}
    if wrong := [name for name, value in given.items() if value is not None]:
        ways = (
            "methods are tuned, and compared with local, where none is named; named methods run with their own settings"
        )
        raise RecipeError(f"compare: {wrong[0]}={given[wrong[0]]!r} found, expected none: {ways}")
    if not isinstance(budget, tune.Budget):
        budget = section_of(tune.Budget, {} if budget is None else budget, "compare: budget", RecipeError)
    if methods is None:
        tune.refuse_used("compare", every, budget.seeds)
    home = Path(tempfile.mkdtemp(prefix=TEMPORARY)) if folder is None else Path(folder)
    say = partial(print, file=sys.stderr, flush=True)
    try:
        asked = _Question(what, model, options, home, every, budget, tell or say, metric, jobs)
        if methods is None:
            comparison = asked.answered(split)
        else:
            if base is not None and base not in methods and all(isinstance(method, str) for method in methods):
                raise RecipeError(f"compare: base={base!r} found.{choices('Methods', base, methods)}")
            comparison = asked.side_by_side(methods, base, split)
    except BaseException:
        if folder is None:
            shutil.rmtree(home, ignore_errors=True)
        raise
    if folder is None:
        weakref.finalize(comparison, shutil.rmtree, home, ignore_errors=True)
        return comparison
    save(comparison, home)
    page = f"Write a page of this, to send to others: fedloom report {shlex.quote(str(home))}"
    return replace(comparison, notes=(*comparison.notes, f"The runs: {home}. {page}"))


class _UnvalidatedError(Exception):
    """A run had no validation data."""


@dataclass
class _Question:
    """The runs of a comparison, in the folder `home`; without named methods, does training together pay?"""

    what: Source
    model: Any
    options: Mapping[str, Any]
    home: Path
    seeds: Sequence[int]
    budget: tune.Budget
    tell: Callable[[str], None]
    metric: str | None
    """The metric of the table; settings are chosen by each task's own."""
    jobs: int | None
    told: set[Path] = field(default_factory=set)
    """The folders of the runs that `_ahead` has counted."""
    needs: dict[str, int] = field(default_factory=dict)
    """Method -> the bytes that a run of it may need."""
    splits: dict[int, Federation] = field(default_factory=dict)
    """Seed -> the federation with its split."""
    done: int = 0
    total: int = 0
    changed: float | None = None
    """When a file of the data last changed."""
    began: float = field(default_factory=time.monotonic)
    progress: Progress = field(default_factory=Progress)

    def side_by_side(self, methods: Sequence[Any], base: str | None, split: str) -> Comparison:
        """Run every method with the settings that it was given, and return the table."""
        named = [(f"{number}-{_called(method)}", method) for number, method in enumerate(methods)]
        runs = {
            self.home / f"{name}-s{seed}": (method, self._recipe_of(method, (), seed))
            for name, method in named
            for seed in self.seeds
        }
        self.total = len(runs)
        for place, (method, recipe) in runs.items():
            self._run(place.name, recipe, place, method)
            if self.done == 1:
                Run.read(place).judged_by(self.metric)  # one that no task has is said before the others run
                self._ahead({at: (at.name, of) for at, (_, of) in runs.items()})
        made = put_side_by_side([*runs], base, split, self.metric)
        return replace(made, notes=(*made.notes, "Not tuned: each method has the settings it was given."))

    def answered(self, split: str) -> Comparison:
        """Tune and run every method of `PAYS`, and return the table with the answer below it."""
        trials, tuning, seeds = self.budget.trials, len(self.budget.seeds), len(self.seeds)
        self.total = len(PAYS) * (trials * tuning + seeds)
        self._recipe(PAYS["local"], self.seeds[0])  # what is wrong with the options is said before anything runs
        self.tell(f"compare: {len(PAYS)} methods, each with {trials} settings on validation data ({tuning} seeds), "
                  f"then {seeds} seeds: at most {self.total} runs")  # fmt: skip
        chosen: dict[str, Changes] = {}
        notes: list[str] = []
        for name, changes in PAYS.items():
            before = self.done
            try:
                chosen[name] = {**changes, **self._tuned(name, changes, notes)}
            except UserError as error:
                if name == "local" or isinstance(error, StateError):  # a damaged folder is no refusal
                    raise
                notes.append(f"{name} is left out: {' '.join(str(error).split())}")
                self.tell(notes[-1])
                self.total -= trials * tuning + seeds - (self.done - before)
        finals = {
            self.home / f"{name}-s{seed}": (f"{name}, seed {seed}", self._recipe(changes, seed))
            for name, changes in chosen.items()
            for seed in self.seeds
        }
        self._ahead(finals)
        folders = [self._run(label, recipe, place) for place, (label, recipe) in finals.items()]
        comparison = put_side_by_side(folders, None, split, self.metric)
        columns = dict(zip(chosen, comparison.columns, strict=True))
        best = None
        if is_validated(Run.read(folders[0])):
            judged = put_side_by_side(folders, None, "val", self.metric)
            best = _best(dict(zip(chosen, judged.columns, strict=True)), comparison.rows)
        unjudged = ["No validation data, so no way of training together is recommended."]
        said = unjudged if best is None else answer(columns, comparison, best)
        return replace(comparison, notes=(*comparison.notes, *notes, *said))

    def _tuned(self, name: str, changes: Changes, notes: list[str]) -> Changes:
        """Return the settings with the best validation score."""
        trials, seeds, before = self.budget.trials, self.budget.seeds, self.done
        values: dict[str, dict[int, Mapping[str, float]]] = {}
        rows: list[TaskMetric] = []

        def of(trial: Changes, seed: int = seeds[0]) -> Recipe:
            return self._recipe({**changes, **trial}, seed)

        def measured(place: Path, label: str, recipe: Recipe) -> dict[str, float]:
            run = Run.read(self._run(label, recipe, place))
            run.judged_by(self.metric)  # one that no task has is said at the first trial
            if not is_validated(run):
                raise _UnvalidatedError
            rows[:] = run.judged
            final = {} if run.info["status"] in IN_VAIN else run.final("val").values
            return {row.task: final.get(row.task, {}).get(row.metric, nan) for row in run.judged}

        def ran(proposed: list[Changes]) -> tune.Scores:
            new = {
                self.home / "trials" / f"{name}-{number}-s{seed}": (trial, seed)
                for number, trial in enumerate(proposed)
                for seed in seeds
                if tune.key(trial) not in values
            }
            runs = {
                place: (f"{name} with {tune.described(trial)}, seed {seed}", of(trial, seed))
                for place, (trial, seed) in new.items()
            }
            if self.done:
                self._ahead(runs)
            for place, (trial, seed) in new.items():
                values.setdefault(tune.key(trial), {})[seed] = measured(place, *runs[place])
                if self.done == 1:  # the first run of all showed alone that nothing is wrong
                    self._ahead(runs)
            return tune.scored(values, rows)

        try:
            curve = tune.search_of(of, trials).curve(name, ran)
        except _UnvalidatedError:
            notes.append(f"{name}: not tuned: no validation data, so its settings are the recipe's own.")
            self.total -= trials * len(seeds) - (self.done - before)
            return {}
        self.total -= (trials - len(curve.scores)) * len(seeds)
        if not curve.is_known:
            notes.append(f"{name}: not tuned: no number on validation data, so its settings are the recipe's own.")
            return {}
        settings, edge = tune.described(curve.best), ", at the end of the learning rates tried" * curve.at_edge
        best = f", the best of {len(curve.scores)} settings on validation data{edge}" if len(curve.scores) > 1 else ""
        notes.append(f"{name}: {settings}{best}.")
        return curve.best

    def _recipe(self, changes: Changes, seed: int) -> Recipe:
        """Return the recipe of one run, measured on validation data too."""
        is_whole = self.model is not None and not isinstance(self.model, str | Mapping)  # it has no heads of ours
        left = {"method", *(OWN_HEADS if is_whole else ())}
        own = {name: value for name, value in changes.items() if name not in left}
        return self._recipe_of(changes["method"], texts({**self._weights, **own}), seed)

    @cached_property
    def _weights(self) -> Changes:
        return tune.weighted(self._recipe_of(None, (), self.seeds[0]).method.model_dump())

    def _recipe_of(self, method: Any, overrides: Sequence[str], seed: int) -> Recipe:
        options = {**self.options, "seed": seed}
        given = options.pop("overrides", ())
        every = [*given, *overrides] if isinstance(given, list | tuple) else given  # which `load` refuses
        return recipe_of(self._data(seed), self.model, method, every, **options)

    def _data(self, seed: int) -> Source:
        """Return what to compare on: of a federation from a table the split of this seed, as a recipe has it."""
        if not isinstance(self.what, Federation):
            return self.what
        if seed not in self.splits:
            self.splits[seed] = self.what.redrawn(seed)
        return self.splits[seed]

    def _run(self, label: str, recipe: Recipe, place: Path, method: Any = None) -> Path:
        """Return the folder of a finished run: run it, or continue it, where that has not happened."""
        has_begun = (place / "run.json").is_file()
        with tune.stored(label):
            is_there = has_begun and is_over(place)
            if has_begun and recipe_hash(recipe_in(place)) != recipe_hash(recipe):
                raise StateError(
                    f"{place} has a run of another recipe: choose another folder (in a command: name=OTHER), or delete "
                    f"{self.home}"
                )
            if has_begun and (code := other_code(place, recipe.origins)):
                raise StateError(
                    f"{place} has a run of other code ({code}): choose another folder, or delete {self.home}"
                )
        if is_there:
            if self.changed is None:
                self.changed = changed(recipe)
            if began(place) < self.changed or recipe.method.is_held:
                with tune.stored(label):
                    check_parts(place, build(recipe).about)
                self.changed = 0.0  # their content is what it was
        with parsing(f"{place / START}: cannot be read"):
            start = load_file(place / START) if has_begun and (place / START).is_file() else None
        if start is not None and not _same(start, build(recipe).start):
            raise StateError(
                f"{place} began with a model of other weights: pass the same ones (torch.manual_seed before the "
                f"model is made), choose another folder, or delete {self.home}"
            )
        if has_begun and not is_there:
            data = self._data(recipe.seed)
            federation = data if isinstance(data, Federation) else None
            model, rule = (self.model if recipe.model.is_held else None, method if recipe.method.is_held else None)
            resume(place, federation=federation, model=model, method=rule, progress=self.progress)
        elif not is_there:
            shutil.rmtree(place, ignore_errors=True)  # what ended before it began
            run(recipe, place, progress=self.progress)
        if place not in self.told:
            self.note(label)
        return place

    def note(self, label: str) -> None:
        """Count a run that is over, and say so."""
        self.done += 1
        spent = time.monotonic() - self.began
        left = clock(spent / self.done * max(0, self.total - self.done))
        self.tell(f"[{self.done}/{self.total}] {label}; {clock(spent)} spent, about {left} left")

    def _ahead(self, runs: Mapping[Path, tuple[str, Recipe]]) -> None:
        """Run what is missing of folder -> (label, recipe), several at once; `_run` repeats what fails."""
        if self.jobs == 1 or isinstance(self.what, Federation):
            return
        todo: dict[Place, Recipe] = {}
        needs: dict[Place, int] = {}
        for folder, (label, recipe) in runs.items():
            with tune.stored(label):
                if is_over(folder) or recipe.model.is_held or recipe.method.is_held:
                    continue
            place = Place(str(folder.relative_to(self.home)), label)
            method = recipe.method.name
            needs[place] = self.needs[method] = self.needs.get(method) or bytes_of(recipe)
            todo[place] = recipe
        if len(todo) > 1:
            run_at_once(todo, self.home, needs, _Ahead(self), self.jobs)


class _Ahead(Watch):
    """Tells a comparison of each run that is over."""

    def __init__(self, question: _Question) -> None:
        self.question, self.warned = question, question.progress.warned

    def ended(self, cell: Any, how: str, seconds: float, rounds: int) -> None:
        """Count a run, unless it failed."""
        super().ended(cell, how, seconds, rounds)
        if not how.startswith(("failed", "refused")):
            self.question.told.add(cell.folder(self.question.home))
            self.question.note(f"{cell}")

    def event(self, text: str) -> None:
        """Say what a run says."""
        self.question.tell(text)


def _same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Return whether tensors have equal names and values."""
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def _best(columns: Mapping[str, RunSet], rows: Sequence[TaskMetric]) -> str | None:
    """Return the way of training together with the best validation numbers, over seeds against training alone."""
    scores = tune.scored({name: columns[name].values for name in ("local", *TOGETHER) if name in columns}, rows)
    known = {name: value for name, value in scores.items() if name in TOGETHER and isfinite(value)}
    return max(known, key=lambda name: known[name], default=None)


def answer(columns: Mapping[str, RunSet], made: Comparison, best: str) -> list[str]:
    """Return sentences on how `best` compares with training alone (1 % counts), and what to do.

    One is about all tasks together that the change counts, where there are several. Then there is one for each task and
    one for each client.
    """
    alone, together, rows = columns["local"], columns[best], made.rows
    seeds = [seed for seed in alone.values if seed in together.values]
    lines = [f"Of the ways of training together, {best} is the best on validation data. Compared with training alone:"]
    if len({alone.runs[seed].info.get("data_hash") for seed in seeds}) == 1 < len(seeds):
        lines.insert(0, FIXED)
    gains, tested, unfit = 0, 0, unsettled_among({side.label: side.unsettled for side in (alone, together)})
    compared = [columns[name] for name in ("local", best, "constant") if name in columns]
    if len(rows) - len(made.excluded) > 1 and (found := _over_tasks(made, compared, unfit)):
        gains, tested = gains + (found[0] == "yes"), tested + 1
        but = f" but {', '.join(made.excluded)}" if made.excluded else ""
        lines.append(f"All tasks{but} together: {_SAID[found[0]][0].format(best)}, {found[1]}.")
    for row in rows:
        numbers = [[side.values[seed].get(row.task, nan) for seed in seeds] for side in compared]
        verdict, text = _compared(numbers, row, together.ratio, unfit)
        gains, tested = gains + (verdict == "yes"), tested + (verdict != "unknown")
        lines.append(f"{row.task}: {_SAID[verdict][0].format(best)}, {row.metric} {text}.")
    few = {client for seed in seeds for client in small_clients(alone.runs[seed], made.results.split)}
    for site, clients in sites({seed: alone.runs[seed] for seed in seeds}).items():
        if few & {*clients.values()}:
            lines.append(f"{site}: too few rows, so no verdict.")
            continue
        by_verdict: dict[str, list[str]] = {}
        for row in rows:
            if not all(client in holders(alone.runs[seed], row.task) for seed, client in clients.items()):
                continue
            finals = [[side.clients[seed][client] for seed, client in clients.items()] for side in compared]
            numbers = [[final.values.get(row.task, {}).get(row.metric, nan) for final in of] for of in finals]
            verdict, text = _compared(numbers, row, together.ratio, unfit)
            tested += verdict != "unknown"
            by_verdict.setdefault(verdict, []).append(
                f"{row.task} ({row.metric} {text})" if verdict != "unknown" else row.task
            )
        parts = [f"{said} {', '.join(by_verdict[one])}" for one, (_, said) in _SAID.items() if one in by_verdict]
        if parts:
            lines.append(f"{'site ' * site.isdecimal()}{site} {'; '.join(parts)}.")
    lines.append(f"Each verdict stands alone: of {tested} intervals, about {tested * 0.05:.1f} exclude 0 by chance.")
    lines += [
        f"{side.label} has not converged: its loss still falls by {side.fall:.1f} % per tenth of the rounds, "
        "so nothing is a yes or a no. More rounds (training.rounds) may change that."
        for side in (alone, together)
        if side.is_moving
    ]
    if unknown := [side.label for side in (alone, together) if side.unsettled == UNKNOWN]:
        lines.append(f"Too few rounds (training.rounds) to know whether {' and '.join(unknown)} converged.")
    if unfit:
        lines.append(f"Next: neither yes nor no is possible ({unfit}): try more rounds (training.rounds) first.")
    else:
        lines.append(
            f"Next: look at the page (fedloom report FOLDER of a run), try {MORE}, or deploy (fedloom flower demo)."
            if gains
            else f"Next: more data or {MORE}; on these data training together does not pay clearly."
        )
    return lines


MORE = "more seeds (--seed-count; in Python seeds=)"
FIXED = (
    "All seeds have the same test examples: the intervals and verdicts below are about these examples, and do not say "
    "what others would give."
)
_SAID = {
    "yes": ("yes, {} is better", "gains on"),
    "no, worse": ("no, {} is worse", "loses on"),
    "no": (f"no, {{}} is not better by {SMALLEST:g} % or more", "does not gain on"),
    "cannot tell": ("cannot tell", "cannot tell on"),
    "unknown": ("no number", "has no number at some seed on"),
}
"""Verdict -> what is said of the best method after a task, and what is said before the tasks of a site."""


def _over_tasks(made: Comparison, compared: Sequence[RunSet], unfit: str) -> tuple[str, str] | None:
    """Return the verdict on the mean change over tasks and 'change +7.6 %, 95 % CI +0.2 to +14.9'; None without one.

    `compared` and `unfit` are as in `_compared`.
    """
    alone, together, *constant = compared
    tests = (test for test in contrasts(made.results).tests if test.row is None and test.method == together.label)
    if (test := next(tests, None)) is None or test.change is None:
        return None
    counted = [row for row in made.rows if row.task in made.results.directions("")]
    reason = unfit or made.results.unfit("", together.label, alone.label, counted)
    verdict, change = judge(test.change, test.smallest, reason=reason), test.change
    text = f"change {change.mean:+.1f} %, 95 % CI {change.low:+.1f} to {change.high:+.1f}"
    if verdict.answer == "cannot tell" and isfinite(verdict.detectable):
        text += f", detectable {verdict.detectable:.1f} %"
    if verdict.answer == "yes" and constant and (of := constant[0].delta) is not None and of.mean >= change.mean:
        return "cannot tell", f"{text}, but the constant prediction has {of.mean:+.1f} %"
    return verdict.label, text


def _compared(numbers: Sequence[Sequence[float]], row: TaskMetric, ratio: float, unfit: str) -> tuple[str, str]:
    """Return the verdict of paired numbers and '0.79 -> 0.82, difference +0.03, 95 % CI +0.01 to +0.05'.

    The numbers are those of training alone, of training together and, where it ran, of the constant prediction. What is
    not better than that is no yes: then training alone only made it worse. `unfit` says why neither yes nor no is
    possible; '' where it is.
    """
    alone, together, *constant = numbers
    sign = -1 if row.direction == "min" else 1
    if len(alone) < 2 or not all(map(isfinite, (*alone, *together))):
        return "unknown", "without a number at each seed"
    found = paired([sign * b for b in together], [sign * a for a in alone], ratio)
    vague = near_0({pair: {row.task: value} for pair, value in enumerate(alone)}, {row.task: row.metric})
    verdict = judge(found, SMALLEST / 100 * abs(fmean(alone)), reason=unfit or "about 0 alone" * bool(vague))
    mean, *ends = (round(sign * value, 9) + 0.0 for value in (found.mean, found.low, found.high))  # 0, not 3.7e-17
    low, high = sorted(max(-1.0, min(1.0, end)) if row.metric in FRACTIONS else end for end in ends)
    interval = "the same at every seed" if found.is_constant else f"95 % CI {low:+.2g} to {high:+.2g}"
    text = f"{fmean(alone):.3g} -> {fmean(together):.3g}, difference {mean:+.2g}, {interval}"
    if verdict.answer == "cannot tell" and isfinite(verdict.detectable):
        text += f", detectable {verdict.detectable:.2g}"
    if vague:
        text += ", about 0 alone, so no percent"
    if verdict.answer == "yes" and constant and sign * fmean(together) <= sign * fmean(constant[0]):
        return "cannot tell", f"{text}, but the constant prediction has {fmean(constant[0]):.3g}"
    return verdict.label, text


def _called(method: Any) -> str:
    """Return a method's name as part of a folder's."""
    name = method.get("name", "") if isinstance(method, Mapping) else method if isinstance(method, str) else None
    text = in_words(method) if name is None else str(name)
    return "".join(c if c.isalnum() or c in "-+." else "-" for c in text.replace(" ", ""))
