"""The verdicts on claims, from the seeds of their grids in CSV files (`fedloom study claims`). Free of torch.

A file of claims lists the grids with their budgets, and the claims: a sentence, and which method of a grid must gain
over which other one. Beside it lie seeds/GRID.csv, the numbers on test data, and rules/GRID.csv, those of the rows by
which the benchmark is judged on validation data. The same files give the same verdicts everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field

from fedloom.core.errors import RecipeError, nearest
from fedloom.core.settings.section import Count, Section
from fedloom.core.settings.yaml import read_section
from fedloom.study.benchmark import Sensitivity, sensitivity
from fedloom.study.grid import Grid, cell_of, load_grid, together
from fedloom.study.significance.statistics import NOISE, Paired, Verdict, against_zero, holm, judge, p_text
from fedloom.study.tables.output import HasTable, Records, Table
from fedloom.study.tables.results import at_constant, deltas
from fedloom.study.tables.seeds import Seeds, read_seeds

UNTUNED = "before equal tuning"
SENSITIVE = "sensitive"
ABOUT = (
    "Verdict on a gain of {smallest} % or more, mean over the tasks: yes, if p after Holm's correction over the "
    "grid's family is at most 0.05 and the mean gain is that large; no, if the 95 % interval excludes such a gain; "
    "else cannot tell, with the gain that these seeds detect with a power of 80 %. Where the benchmark is not "
    "sensitive, or a method has not converged, there is neither yes nor no."
)
HEAD = ("claim", "paper", "method", "compared with", "benchmark", "state", "seeds", "gain %", "p, Holm", "verdict")
CSV = (
    *("claim", "paper", "method", "baseline", "grid", "data", "state", "seeds", "gain", "ci95_low", "ci95_high"),
    *("p", "p_holm", "family", "ratio", "smallest", "detectable", "verdict"),
)


class Effort(Section):
    """The budget of a grid of claims; the defaults are those of the project's own claims."""

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
    """Return the content of a file of claims. Raises RecipeError where it is none."""
    return read_section(Claims, file)


def file_of(claims: Path, grid: Grid, kind: str) -> Path:
    """Return the CSV file of a grid beside the file of claims; `kind` is seeds, rules or tuning."""
    return claims.parent / kind / f"{grid.name}.csv"


@dataclass(frozen=True)
class Comparison:
    """One comparison of a grid's family: what its seeds say."""

    change: Paired | None
    holm: float
    ratio: float
    verdict: Verdict


@dataclass(frozen=True)
class Judged:
    """All comparisons that a grid's family names."""

    grid: Grid
    comparisons: Mapping[tuple[str, str, str], Comparison]
    """(data, method, the one that it is compared with) -> the comparison."""
    sensitivity: Mapping[str, Sensitivity]

    @property
    def is_decided(self) -> bool:
        """Return whether more seeds would change no verdict: each is yes or no, or the numbers allow neither."""
        return all(of.verdict.answer != "cannot tell" or of.verdict.reason for of in self.comparisons.values())


def judged(grid: Grid, seeds: Seeds, rule: Seeds | None) -> Judged:
    """Return the verdicts of a grid's family, after Holm's correction over it.

    None is yes or no where a row has not converged, or where the validation numbers `rule` do not show that the
    benchmark is sensitive.
    """
    found: dict[tuple[str, str, str], Paired | None] = {}
    why: dict[tuple[str, str, str], str] = {}
    known: dict[str, Sensitivity] = {}
    for data in grid.data:
        if rule is not None and rule.methods(data):
            known[data] = sensitivity(rule, data)
        state = _state(known.get(data))
        barred = "" if state == SENSITIVE else f"benchmark {state}"
        directions = _counted(grid, seeds, data)
        for cell in grid.combinations:
            for other in grid.compared(*cell):
                key = data, together(*cell), together(*other)
                found[key] = _paired(seeds, key, directions)
                moving = [name for name in key[1:] if seeds.is_moving(data, name)]
                why[key] = barred or (f"not converged: {', '.join(moving)}" if moving else "")
    ps = dict(zip(found, holm([math.nan if of is None else of.p for of in found.values()]), strict=True))
    comparisons = {
        key: Comparison(of, ps[key], seeds.ratio(key[0]), judge(of, grid.smallest, ps[key], why[key]))
        for key, of in found.items()
    }
    return Judged(grid, comparisons, known)


def _counted(grid: Grid, seeds: Seeds, data: str) -> dict[str, str]:
    """Return the tasks of a data set that count, with their directions: those on which some method learns something."""
    directions = seeds.directions(data)
    rows = []
    for name in seeds.methods(data):
        values = seeds.values(data, name).values()
        means = {t: math.fsum(v.get(t, math.nan) for v in values) / len(values) for t in directions}
        rows.append((name if name in grid.reference_rows else "", means))
    out = at_constant(rows, directions)
    return {task: direction for task, direction in directions.items() if task not in out}


def _paired(seeds: Seeds, key: tuple[str, str, str], directions: Mapping[str, str]) -> Paired | None:
    """Return the test of the gains over the seeds that both methods have; None without two finite ones."""
    data, method, over = key
    gains = list(deltas(seeds.values(data, method), seeds.values(data, over), directions).values())
    if len(gains) < 2 or not all(map(math.isfinite, gains)):
        return None
    return against_zero(gains, NOISE * 100, seeds.ratio(data))


@dataclass(frozen=True)
class Verdicts(HasTable):
    """The verdict on each claim of a file."""

    claims: tuple[Claim, ...]
    grids: Mapping[str, Judged]
    """Those whose seeds are there."""

    def _of(self, claim: Claim) -> tuple[str, str, str, Comparison | None]:
        """Return (data, method, the one it is compared with, the comparison)."""
        grid = self.grids[claim.grid].grid if claim.grid in self.grids else load_grid(claim.grid)
        data = claim.data or next(iter(grid.data))
        method, over = (together(base, addon or "-") for base, addon in map(cell_of, (claim.method, claim.over)))
        if claim.grid not in self.grids:
            return data, method, over, None
        family = self.grids[claim.grid].comparisons
        if (data, method, over) not in family:
            names = [f"{m} over {o} on {d}" for d, m, o in family]
            asked = f"{method} over {over} on {data}"
            hint = nearest(asked, names)
            raise RecipeError(f"claim {claim.claim!r}: {asked} is not in the family of grid {claim.grid}.{hint}")
        return data, method, over, family[data, method, over]

    def as_table(self) -> Table:
        """Return one line per claim."""
        lines = []
        for claim in self.claims:
            data, method, over, of = self._of(claim)
            where = f"{claim.grid}, {data}"
            if of is None:
                lines.append((claim.claim, claim.paper, method, over, where, UNTUNED, "", "", "", "none"))
                continue
            f, known = of.change, self.grids[claim.grid].sensitivity.get(data)
            gain = "" if f is None else f"{f.mean:+.1f} (95 % CI {f.low:+.1f} to {f.high:+.1f})"
            p, n = ("", "") if f is None else (p_text(of.holm), str(f.n))
            said = (_state(known), n, gain, p, of.verdict.in_words(" %"))
            lines.append((claim.claim, claim.paper, method, over, where, *said))
        return Table("Verdicts", HEAD, tuple(lines), tuple(self._notes()))

    def to_markdown(self) -> str:
        """Return claims and verdicts in two columns, which a phone can show, and the whole table folded below them."""
        whole = self.as_table()
        lines = ["| claim | verdict |", "|---|---|"]
        for claim, *_, gain, _, verdict in whole.lines:
            mark = {"yes": "✓ ", "no": "✗ ", "cannot": "? "}.get(verdict.replace(",", " ").split(" ")[0], "")
            percent = f": {gain.replace(' (', ' % (', 1)}" if gain else ""
            lines.append(f"| {claim} | {mark}**{verdict}**{percent} |")
        folded = f"<details><summary>Grids, seeds and numbers</summary>\n\n{whole.to_markdown()}\n</details>\n"
        return "\n".join(lines) + "\n\n" + folded

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
        notes.append(f"{UNTUNED}: all methods shared one learning rate, and the seeds are not here: no verdict.")
        return notes

    def records(self) -> Records:
        """Return one line per claim, in full precision."""
        lines = []
        for claim in self.claims:
            data, method, over, of = self._of(claim)
            head = (claim.claim, claim.paper, method, over, claim.grid, data)
            if of is None:
                lines.append((*head, UNTUNED, None, *[math.nan] * 9, "none"))
                continue
            f, grid = of.change, self.grids[claim.grid]
            numbers = (None, *[math.nan] * 4) if f is None else (f.n, f.mean, f.low, f.high, f.p)
            size = sum(not math.isnan(each.holm) for each in grid.comparisons.values())
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
        if (seeds := file_of(file, grid, "seeds")).is_file():
            rule = file_of(file, grid, "rules")
            found[name] = judged(grid, read_seeds(seeds), read_seeds(rule) if rule.is_file() else None)
    return Verdicts(claims.claims, found)
