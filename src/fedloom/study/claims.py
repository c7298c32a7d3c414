"""Decide on validation data, before any method runs, whether a benchmark is sensitive (docs/benchmarks.md).

The verdicts on claims, from the seeds of their grids in CSV files (`fedloom study claims`). Free of torch.

A file of claims lists the grids with their budgets, and the claims: a sentence, and which method of a grid must gain
over which other one. Beside it lie seeds/GRID.csv, the numbers on test data, and rules/GRID.csv, those of the rows by
which the benchmark is judged on validation data. The same files give the same verdicts everywhere.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from pydantic import Field

from fedloom.core.errors import RecipeError, StateError, at, nearest
from fedloom.core.settings.section import Count, Problems, Section
from fedloom.core.settings.yaml import read_section
from fedloom.study.grid import Grid, cell_of, load_grid, together
from fedloom.study.output import HasTable, Records, Table
from fedloom.study.results import (
    STILL,
    Seeds,
    at_constant,
    change,
    deltas,
    gaps_of,
    near_0,
    of_seeds,
    read_seeds,
    uneven,
    unfit,
)
from fedloom.study.statistics import Estimate, Tested, delta_terms, family, mean_of_known, p_text

ALONE = "Local"
"""The base of a benchmark's grid in which every client trains alone."""
OVER_CONSTANT = 5.0
"""Percent by which training alone must be better than the constant prediction, on every task."""
OVER_ALONE = 5.0
"""Percent (mean over tasks) by which training on all data in one place must be better than training alone."""
LEAST = 3
"""Seeds that an interval needs."""


@dataclass(frozen=True)
class Sensitivity:
    """The result of a benchmark's three rules on validation data: estimates over seeds, in percent."""

    data: str
    tasks: tuple[str, ...]
    over_constant: Mapping[str, Estimate]
    """Task -> how much better training alone is than the constant prediction."""
    over_alone: Mapping[str, Estimate]
    """Task -> how much better the better of the two centralised trainings is than training alone."""
    gain: Estimate
    """The mean of that over tasks."""
    falling: Mapping[str, Estimate]
    """Task -> how much the training loss of clients that train alone falls in the last tenth of the rounds."""
    seeds: tuple[int, ...]
    uneven: tuple[str, ...] = ()
    """The rows that learned nothing at some seeds, in words."""

    @property
    def reasons(self) -> list[str]:
        """Return why the benchmark is not sensitive enough; empty if it is."""
        if len(self.seeds) < LEAST:
            return [f"{len(self.seeds)} validation seeds found, expected {LEAST} or more: the rule is about intervals"]
        unmeasured = [t for t in self.tasks if math.isnan(self.over_constant[t].half + self.over_alone[t].half)]
        if unmeasured:
            return [
                f"no change in percent on validation data of {', '.join(unmeasured)}, in some seed: are there clients, "
                "and validation data, of these tasks in each? Is their metric 0 for the baseline?"
            ]
        end = "at the lower end of the interval"
        failed = [
            f"{task}: training alone is {gain.signed} % better than the constant prediction, expected "
            f"{OVER_CONSTANT:g} % or more {end}"
            for task, gain in self.over_constant.items()
            if gain.mean - gain.half < OVER_CONSTANT
        ]
        if self.gain.mean - self.gain.half < OVER_ALONE:
            failed.append(
                f"all data in one place is {self.gain.signed} % better than training alone (mean over tasks), expected "
                f"{OVER_ALONE:g} % or more {end}"
            )
        failed += [
            f"{task}: the loss still falls by {fall.signed} % per tenth of the rounds, expected {STILL:g} % "
            "or less at the upper end of the interval"
            for task, fall in self.falling.items()
            if not fall.mean + fall.half <= STILL
        ]
        return failed + [f"{of}: tune it with more seeds" for of in self.uneven if failed]

    @property
    def rows(self) -> list[tuple[str, str, str, str]]:
        """Return one line per task: (task, and the three numbers in percent)."""
        first, second, third = self.over_constant, self.over_alone, self.falling
        return [(t, first[t].signed, second[t].signed, third[t].signed) for t in self.tasks]


def sensitivities(grid: Grid, folder: Path) -> tuple[list[Sensitivity], list[str]]:
    """Return the results for each data set of a grid, and why others have none. StateError where all lack one."""
    seeds = of_seeds(grid, folder, "val")
    judged: list[Sensitivity] = []
    unjudged: list[str] = []
    for data in grid.data:
        try:
            judged.append(sensitivity(seeds, data))
        except StateError as error:
            unjudged.append(str(error))
    if not judged:
        raise StateError(unjudged[0])
    return judged, unjudged


def sensitivity(lines: Seeds, data: str) -> Sensitivity:
    """Return the result for one data set, by validation numbers. Raises StateError where a row is absent."""
    names = lines.methods(data)
    for base in (ALONE, "constant", "centralised"):
        if base not in names:
            raise StateError(f"{data}: {base} has not been run; a benchmark needs {ALONE}, centralised and constant")
    directions = lines.directions(data)
    of = {name: lines.values(data, name) for name in names if name in (ALONE, "constant") or name.startswith("central")}
    seeds = tuple(sorted(set.intersection(*map(set, of.values()))))
    if not seeds:
        raise StateError(f"{data}: {', '.join(of)} have no seed in common")

    def changes(name: str, base: str) -> dict[str, list[float]]:
        # Each seed's difference, in percent of the base's mean: a base that varies, such as the accuracy of a constant
        # prediction, does not make the interval wide.
        usual = {task: fmean(of[base][seed].get(task, math.nan) for seed in seeds) for task in directions}
        usual |= dict.fromkeys(near_0(of[base], lines.metrics(data)), math.nan)
        pairs = [(of[name][seed], of[base][seed]) for seed in seeds]
        moved = [{t: usual[t] + v - theirs[t] for t, v in mine.items() if t in theirs} for mine, theirs in pairs]
        terms = [delta_terms(mine, usual, directions) for mine in moved]
        return {task: [by_task.get(task, math.nan) for by_task in terms] for task in directions}

    # A grid of one task has centralised training once.
    each = [changes(name, ALONE) for name in of if name.startswith("central")]
    better = {task: max((one[task] for one in each), key=lambda of: (not math.isnan(fmean(of)), fmean(of)))
              for task in directions}  # fmt: skip
    fall, ratio = lines.values(data, ALONE, "falling"), lines.ratio(data)
    return Sensitivity(
        data,
        tuple(directions),
        {task: Estimate.of(gains, ratio) for task, gains in changes(ALONE, "constant").items()},
        {task: Estimate.of(gains, ratio) for task, gains in better.items()},
        Estimate.of([fmean(gains[at] for gains in better.values()) for at in range(len(seeds))], ratio),
        {task: Estimate.of([fall[seed].get(task, math.nan) for seed in seeds]) for task in directions},
        seeds,
        tuple(uneven(of, directions)),
    )


def sentences(found: Sequence[Sensitivity]) -> list[str]:
    """Return the lines to print below the tables."""
    lines = []
    for one in found:
        seeds = ", ".join(map(str, one.seeds))
        said = one.reasons or [f"this benchmark is sensitive (validation data, seeds {seeds})"]
        lines += [f"{one.data}: {reason}" for reason in said]
    return lines


UNTUNED = "before equal tuning"
SENSITIVE = "sensitive"
ABOUT = (
    "Verdict on a gain of {smallest} % or more, mean over the tasks: yes, if p after Holm's correction over the "
    "grid's family is at most 0.05 and the mean gain is that large; no, if the 95 % interval excludes such a gain; "
    "else cannot tell, with the gain that these seeds detect with a power of 80 %. Where the benchmark is not "
    "sensitive, or a method has not converged, there is neither yes nor no."
)
ABOUT_METHODS = (
    "Gain: mean over tasks and seeds, in percent of training alone, with a 95 % interval. Loss: the training loss of "
    "the last round, mean over tasks and seeds. Falls: by how many percent it still falls per tenth of the rounds."
)
METHODS = ("grid", "data", "method", "seeds", "gain over Local %", "loss", "falls %")
HEAD = ("claim", "paper", "method", "compared with", "benchmark", "state", "seeds", "gain %", "p, Holm", "verdict")
CSV = (
    *("claim", "paper", "method", "baseline", "grid", "data", "state", "seeds", "gain", "ci95_low", "ci95_high"),
    *("p", "p_holm", "family", "ratio", "smallest", "detectable", "verdict"),
)


class Effort(Section):
    """The budget of a grid of claims; the defaults are those of the project's own claims."""

    given: tuple[str, ...] = ()
    """Keys that the command line must state, such as the folder of the data; without them the grid is not run."""
    trials: Count = 8
    """Settings that each method is tried with on validation data."""
    tuning: tuple[Count, ...] = Field((100, 101), min_length=1)
    """Seeds of these runs."""
    rule: tuple[Count, ...] = Field((102, 103, 104), min_length=3)
    """Seeds of the runs on validation data that say whether the benchmark is sensitive."""
    least: Count = 5
    """Seeds, from 0, that every method has on test data."""
    most: Count = 10
    """Seeds up to which the grid goes on while some verdict is open."""

    def _problems(self) -> Problems:
        if self.least > self.most:
            yield "least", f"{self.least} found, expected at most {self.most} (most)"
        uses = (("tuning", self.tuning), ("rule", self.rule), ("test, from 0", range(self.most)))
        for (one, seeds), (other, others) in itertools.combinations(uses, 2):
            if both := sorted({*seeds} & {*others}):
                yield f"seed {both[0]} is one of {one} and of {other}: expected seeds that are used for nothing else"


class Claim(Section):
    """A sentence that is true if a method gains over another one in a grid."""

    claim: str
    paper: str
    grid: str
    data: str = ""
    """The label of a data set of the grid; by default its only one."""
    method: str
    """A base of the grid, or BASE/ADDON."""
    over: str
    """The baseline, likewise."""


class Claims(Section):
    """A file of claims."""

    grids: dict[str, Effort]
    """The grids that `--run` runs, each with its budget."""
    claims: tuple[Claim, ...] = Field(min_length=1)


def load_claims(file: Path) -> Claims:
    """Return the content of a file of claims; its grids may be files beside it. Raises RecipeError where it is none."""
    claims = read_section(Claims, file)

    def path_of(name: str) -> str:
        beside = file.parent / name
        return str(beside) if not Path(name).is_file() and beside.is_file() else name

    own = [claim.model_copy(update={"grid": path_of(claim.grid)}) for claim in claims.claims]
    return Claims(grids={path_of(name): effort for name, effort in claims.grids.items()}, claims=tuple(own))


def file_of(claims: Path, grid: Grid, kind: str) -> Path:
    """Return the CSV file of a grid beside the file of claims; `kind` is seeds, rules or tuning."""
    return claims.parent / kind / f"{grid.name}.csv"


@dataclass(frozen=True)
class Judged:
    """All comparisons that a grid's family names."""

    grid: Grid
    comparisons: Mapping[tuple[str, str, str], Tested]
    """(data, method, the one that it is compared with) -> the comparison."""
    sensitivity: Mapping[str, Sensitivity]
    methods: tuple[tuple[str, ...], ...] = ()
    """Data set, method, seeds, gain over training alone, last training loss and by how much that still falls."""
    gaps: tuple[str, ...] = ()
    """The numbers that compared methods lack, and on which data."""

    @property
    def is_decided(self) -> bool:
        """Return whether more seeds would change no verdict: each is yes or no, or the numbers allow neither."""
        return all(of.verdict.answer != "cannot tell" or of.verdict.reason for of in self.comparisons.values())


def judged(grid: Grid, seeds: Seeds, rule: Seeds | None, counted: Mapping[str, str] | None = None) -> Judged:
    """Return the verdicts of a grid's family, after Holm's correction over it.

    None is yes or no where it is not known that a row has converged, where one lacks a seed, where the baseline is
    about 0 on a task, or where the validation numbers `rule` do not show that the benchmark is sensitive. `counted` are
    the tasks of the gain with their directions, by default those on which some method learns something.
    """
    gains: dict[tuple[str, str, str], list[float]] = {}
    why: dict[tuple[str, str, str], str] = {}
    known: dict[str, Sensitivity] = {}
    rows: list[tuple[str, ...]] = []
    gaps: dict[str, None] = {}
    for data in grid.data:
        if rule is not None and rule.methods(data):
            known[data] = sensitivity(rule, data)
        state = _state(known.get(data))
        barred = "" if state == SENSITIVE else f"benchmark {state}"
        directions = counted_tasks(grid, seeds, data) if counted is None else counted
        rows += [(data, name, *_row(seeds, data, name, directions)) for name in seeds.methods(data)]
        every = {line.seed for line in seeds.lines if line.data == data}
        metrics = {task: metric for task, metric in seeds.metrics(data).items() if task in directions}
        for cell in grid.combinations:
            for other in grid.compared(*cell):
                method, over = together(*cell), together(*other)
                values = {name: seeds.values(data, name) for name in (method, over)}
                open_ = {name: seeds.unsettled(data, name) for name in values}
                gains[data, method, over] = list(deltas(values[method], values[over], directions).values())
                why[data, method, over] = barred or unfit(values, open_, every, metrics)
                gaps |= dict.fromkeys(f"{data}: {gap}" for gap in gaps_of(values, every, metrics))
    ratios = {key: seeds.ratio(key[0]) for key in gains}
    return Judged(grid, family(gains, ratios, grid.smallest, why), known, tuple(rows), tuple(gaps))


def _row(seeds: Seeds, data: str, name: str, directions: Mapping[str, str]) -> tuple[str, ...]:
    """Return a method's seeds, its mean gain over training alone, its last training loss and the fall of that."""
    values, alone = seeds.values(data, name), seeds.values(data, ALONE)
    gain = change(values, alone, directions, seeds.ratio(data)) if name != ALONE else None
    loss, fall = (
        mean_of_known(getattr(line, of) for line in seeds.of(data, name)) for of in ("training_loss", "falling")
    )
    texts = ("" if gain is None else gain.signed, *("" if math.isnan(x) else f"{x:.2g}" for x in (loss, fall)))
    return str(len(values)), *texts


def counted_tasks(grid: Grid, seeds: Seeds, data: str) -> dict[str, str]:
    """Return the tasks of a data set that count, with their directions: those on which some method learns something."""
    directions = seeds.directions(data)
    rows = []
    for name in seeds.methods(data):
        values = seeds.values(data, name).values()
        means = {t: math.fsum(v.get(t, math.nan) for v in values) / len(values) for t in directions}
        rows.append((name if name in grid.reference_rows else "", means))
    out = at_constant(rows, directions)
    return {task: direction for task, direction in directions.items() if task not in out}


@dataclass(frozen=True)
class Verdicts(HasTable):
    """The verdict on each claim of a file."""

    claims: Mapping[int, Claim]
    """Number, from 1 -> claim."""
    grids: Mapping[str, Judged]
    """Those whose seeds are there."""

    def _of(self, claim: Claim) -> tuple[str, str, str, Tested | None]:
        """Return (data, method, the one it is compared with, the comparison)."""
        grid = self.grids[claim.grid].grid if claim.grid in self.grids else load_grid(claim.grid)
        data = claim.data or next(iter(grid.data))
        method, over = (together(base, addon or "-") for base, addon in map(cell_of, (claim.method, claim.over)))
        if claim.grid not in self.grids:
            return data, method, over, None
        family = self.grids[claim.grid].comparisons
        if (data, method, over) not in family:
            asked = f"{method} over {over} on {data}"
            hint = nearest(asked, [f"{m} over {o} on {d}" for d, m, o in family])
            raise RecipeError(f"claim {claim.claim!r}: {asked} is not in the family of grid {claim.grid}.{hint}")
        return data, method, over, family[data, method, over]

    def as_table(self) -> Table:
        """Return one line per claim."""
        lines = []
        for number, claim in self.claims.items():
            data, method, over, of = self._of(claim)
            head = (f"{number}. {claim.claim}", claim.paper, method, over, f"{claim.grid}, {data}")
            if of is None:
                lines.append((*head, UNTUNED, "", "", "", "none"))
                continue
            f, known = of.change, self.grids[claim.grid].sensitivity.get(data)
            gain = "" if f is None else f"{f.mean:+.1f} (95 % CI {f.low:+.1f} to {f.high:+.1f})"
            p, n = ("", "") if f is None else (p_text(of.holm), str(f.n))
            said = (_state(known), n, gain, p, of.verdict.in_words(" %"))
            lines.append((*head, *said))
        return Table("Verdicts", HEAD, tuple(lines), tuple(self._notes()))

    def to_markdown(self) -> str:
        """Return claims and verdicts in two columns, which a phone can show, and the whole table folded below them."""
        whole = self.as_table()
        lines = ["| claim | verdict |", "|---|---|"]
        for claim, *_, gain, _, verdict in whole.lines:
            mark = {"yes": "✓ ", "no": "✗ ", "cannot": "? "}.get(verdict.replace(",", " ").split(" ")[0], "")
            percent = f": {gain.replace(' (', ' % (', 1)}" if gain else ""
            lines.append(f"| {claim} | {mark}**{verdict}**{percent} |")
        rows = tuple((name, *row) for name, of in self.grids.items() for row in of.methods)
        parts = {"Grids, seeds and numbers": whole, "All methods": Table("Methods", METHODS, rows, (ABOUT_METHODS,))}
        folded = [
            f"<details><summary>{what}</summary>\n\n{of.to_markdown()}\n</details>\n" for what, of in parts.items()
        ]
        return "\n".join([*lines, "", *folded])

    def _notes(self) -> list[str]:
        smallest = sorted({of.grid.smallest for of in self.grids.values()})
        notes = [ABOUT.format(smallest=" or ".join(f"{of:g}" for of in smallest))] if smallest else []
        ratios = sorted({of.ratio for g in self.grids.values() for of in g.comparisons.values()} - {0})
        if ratios:
            each = ", ".join(f"{ratio:.3g}" for ratio in ratios)
            notes.append(
                "Seeds that redraw the test part from one pool are tested by the corrected resampled t-test of Nadeau "
                f"and Bengio: variance (1/n + r) sd², r the smaller of the two parts over the larger one: {each}."
            )
        for name, of in self.grids.items():
            for data, known in of.sensitivity.items():
                notes += [f"{name}, {data}: not sensitive: {reason}." for reason in known.reasons]
            notes += [f"{gap}." for gap in of.gaps]
        if any(claim.grid not in self.grids for claim in self.claims.values()):
            notes.append(f"{UNTUNED}: no numbers of tuned methods are here, so there is no verdict; --run makes them.")
        return notes

    def records(self) -> Records:
        """Return one line per claim, in full precision."""
        lines = []
        for claim in self.claims.values():
            data, method, over, of = self._of(claim)
            head = (claim.claim, claim.paper, method, over, claim.grid, data)
            if of is None:
                lines.append((*head, UNTUNED, None, *[math.nan] * 9, "none"))
                continue
            f, grid = of.change, self.grids[claim.grid]
            numbers = (None, *[math.nan] * 4) if f is None else (f.n, f.mean, f.low, f.high, f.p)
            size = sum(each.change is not None for each in grid.comparisons.values())
            state = _state(grid.sensitivity.get(data))
            more = (of.holm, size, of.ratio, grid.grid.smallest, of.verdict.detectable, of.verdict.label)
            lines.append((*head, state, *numbers, *more))
        return Records(CSV, lines)


def _state(known: Sensitivity | None) -> str:
    return "not judged" if known is None else "not sensitive" if known.reasons else SENSITIVE


def verdicts(file: Path) -> Verdicts:
    """Return the verdicts on all claims of a file, from the CSV files beside it. Raises RecipeError or StateError."""
    claims = load_claims(file)
    found = {}
    for name in dict.fromkeys(claim.grid for claim in claims.claims):
        grid = load_grid(name)
        files = {kind: of for kind in ("seeds", "rules") if (of := file_of(file, grid, kind)).is_file()}
        if files:
            known = {kind: read_seeds(of) for kind, of in files.items()}
            with at(str(files.get("rules", ""))):
                made = judged(grid, known.get("seeds", Seeds(grid.name, ())), known.get("rules"))
            gaps = [f"{files['seeds']}, {gap}" for gap in made.gaps]
            gaps += (
                [] if "rules" in files else [f"{file_of(file, grid, 'rules')} is absent: the benchmark is not judged"]
            )
            found[name] = replace(made, gaps=tuple(gaps))
    return Verdicts(dict(enumerate(claims.claims, 1)), found)
