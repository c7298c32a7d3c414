"""The finished runs of a grid, read from its folder: which of them there are, and the numbers that count."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import nan
from pathlib import Path

from fedloom.core.errors import RecipeError, StateError
from fedloom.federation.runs.reader import Final, Run, best_round
from fedloom.study.delta import delta_m
from fedloom.study.grid import NO_VALIDATION, Cell, Grid, cells, is_over, refused_in
from fedloom.study.tables.compare import Estimate
from fedloom.study.tables.domains import domain_history
from fedloom.study.tables.markup import span

Values = Mapping[int, Mapping[str, float]]
"""Seed -> task -> the task's own metric."""
Combination = tuple[str, str, str]
"""Labels of data set, base and add-on."""


@dataclass(frozen=True)
class CombinationRuns:
    """The runs of one combination of labels, by seed, and the numbers of the models that count."""

    runs: Mapping[int, Run]
    finals: Mapping[int, Final]
    by_domain: bool = False

    def values(self, finals: Mapping[int, Final] | None = None) -> Values:
        """Each task's own metric, of these models or of others of the same runs; or each domain's of the only task."""
        if self.by_domain:
            return self._of_domains
        return {
            seed: {t: v.get(self.runs[seed].info["tasks"][t]["primary"], nan) for t, v in final.values.items()}
            for seed, final in (self.finals if finals is None else finals).items()
        }

    @cached_property
    def _of_domains(self) -> Values:
        return {s: over_rounds(self.runs[s], f.split, True)[f.round] for s, f in self.finals.items()}

    def owned(self, split: str) -> dict[str, Values]:
        """Client -> the values of its personal model; empty where all clients share one model.

        A client is called by its tasks, or by its own name where another client has the same tasks.
        """
        by_client: dict[str, dict[int, Final]] = {}
        for seed, run in self.runs.items():
            names = {client: "+".join(info["tasks"]) for client, info in run.info["clients"].items()}
            for client, final in run.personal(split, self.finals[seed].round).items():
                if not final.values:  # none of its tasks is shown
                    continue
                name = names[client] if list(names.values()).count(names[client]) == 1 else client
                by_client.setdefault(name, {})[seed] = final
        return {name: self.values(finals) for name, finals in by_client.items()}


def read(grid: Grid, folder: Path, split: str) -> tuple[dict[Combination, CombinationRuns], list[Cell]]:
    """(each combination's finished runs, the cells that have not finished); refused cells are in neither.

    Raises StateError where no run has finished.
    """
    runs: dict[Combination, dict[int, Run]] = {}
    missing, refused = [], refused_in(folder)
    for cell in cells(grid):
        path = cell.folder(folder)
        if is_over(path):
            runs.setdefault((cell.data, cell.base, cell.addon), {})[cell.seed] = Run.read(path)
        elif cell.combination not in refused:
            missing.append(cell)
    if not runs:
        raise StateError(f"no cell of grid {grid.name} has finished in {folder}")
    by_domain = grid.show == "domains"
    found = {}
    for labels, by_seed in runs.items():
        judged = {seed: run.judged_by(grid.metric) for seed, run in by_seed.items()}
        # the round is chosen by the tasks' own metrics, whichever is shown
        finals = {seed: run.final(split, _round(grid, by_seed[seed], split)) for seed, run in judged.items()}
        found[labels] = CombinationRuns(judged, finals, by_domain)
    return found, missing


def over_rounds(run: Run, split: str, by_domain: bool, client: str | None = None) -> dict[int, Mapping[str, float]]:
    """Round -> each task's own metric (of this client, or the mean over clients), or each domain's of the only task.

    A task whose own metric takes long has it in fewer rounds than others.
    """
    if by_domain:
        return {scores.round: scores.values for scores in domain_history(run, split=split).rounds}
    primary = {task: info["primary"] for task, info in run.info["tasks"].items()}
    each = {
        f.round: {t: v[primary[t]] for t, v in f.values.items() if primary[t] in v} for f in run.history(split, client)
    }
    return {round: values for round, values in each.items() if values}


def about_model(grid: Grid, results: Mapping[Combination, CombinationRuns]) -> str:
    """The round of the models whose numbers are shown, and how it was chosen."""
    rounds = span([final.round for result in results.values() for final in result.finals.values()])
    if grid.at == "last":
        return f"model kept at the end (round {rounds})"
    over = "domains" if grid.show == "domains" else "tasks"
    return f"model of each run's best round by its mean over {over} on validation data (round {rounds})"


def made_by(grid: Grid, results: Mapping[Combination, CombinationRuns]) -> str:
    """How many runs of which grid the numbers are of, and which version of fedloom made them."""
    runs = [run for result in results.values() for run in result.runs.values()]
    versions = ", ".join(sorted({run.info.get("fedloom", "of unknown version") for run in runs}))
    return f"{len(runs)} run{'s' * (len(runs) > 1)} of the grid {grid.name} by fedloom {versions}"


def _round(grid: Grid, run: Run, split: str) -> int | None:
    """The round whose model counts; None for the one that the run keeps. Never chosen by test data."""
    if grid.at == "last":
        return None
    by_domain = grid.show == "domains"
    metrics = {(info["primary"], info["metrics"][info["primary"]]) for info in run.info["tasks"].values()}
    if len(metrics) > 1:
        names = ", ".join(sorted(name for name, _ in metrics))
        raise RecipeError(f"grid {grid.name}: at: a mean over tasks needs one metric, found {names}")
    ((_, direction),) = metrics
    if not any(entry["split"] == "val" for line in run.rounds for entry in line["metrics"]):
        raise StateError(f"{run.folder}: {NO_VALIDATION}: nothing was measured on val")
    measured = over_rounds(run, split, by_domain)
    validated = over_rounds(run, "val", by_domain)
    means = {number: statistics.fmean(scores.values()) for number, scores in validated.items() if number in measured}
    best = best_round(means, direction)
    if best is None:
        raise StateError(
            f"{run.folder}: {NO_VALIDATION}: expected a round with a number of every client on val and on {split}, "
            "found none"
        )
    return best


def change(values: Values, base: Values, directions: Mapping[str, str]) -> Estimate | None:
    """Delta over the seeds that both have, and over the tasks of `directions` in `values`; None without such a seed."""
    seeds = [seed for seed in values if seed in base]
    shared = [{t: v for t, v in values[seed].items() if t in base[seed] and t in directions} for seed in seeds]
    deltas = [delta_m(mine, base[seed], directions) for seed, mine in zip(seeds, shared, strict=True)]
    return Estimate.of(deltas) if deltas else None
