"""Tables of docs/results say what the files beside them say: typed ones by their numbers, others by including them."""

from __future__ import annotations

import csv
import re
import subprocess
from collections import defaultdict
from functools import cache
from itertools import permutations
from pathlib import Path
from statistics import fmean

import pytest

from fedloom.study.claims import file_of, load_claims, verdicts
from fedloom.study.grid import load_grid, names
from fedloom.study.results import change, read_seeds

RESULTS = Path(__file__).parents[1] / "docs" / "results"
PAGE = (RESULTS / "peers-growth.md").read_text(encoding="utf-8")
NUMBER = r"([+-]?\d+\.\d+)"
GAIN = re.compile(rf"{NUMBER} %[^()%]{{0,40}}?[(,] ?(?:95 % CI )?{NUMBER} to {NUMBER}")
"""A gain in percent with its interval: "+6.1 % (5.2 to 6.9)", "1.7 % behind (-2.3 to -1.1)"."""
Gain = tuple[float, float, float]


def numbers(name: str) -> list[dict[str, str]]:
    with (RESULTS / name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def table(beginning: str) -> list[list[str]]:
    """The rows of the page's table whose head begins so, without their marks for bold."""
    lines = PAGE[PAGE.index(beginning) :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip(" *") for cell in line.strip("|").split("|")] for line in lines]


def test_how_a_round_grows() -> None:
    expected = []
    for row in numbers("peers-growth.csv"):
        peers = int(row["peers"])
        seconds, training, sent, models, memory = (
            float(row[key]) for key in ("seconds", "training", "signal bytes", "model bytes", "memory")
        )
        digits = ((seconds, 2), (1000 * seconds / peers, 1), (training, 2), (sent / 1e6, 2), (sent / 1e3 / peers, 0))
        each = [f"{value:.{n}f}" for value, n in (*digits, (models / 1e6, 1), (memory / 1e6, 0))]
        expected.append([row["peers"], row["candidates"], row["signals"], *each])
    assert table("| N | candidates |") == expected


def test_how_many_choices_a_sketch_keeps() -> None:
    found = defaultdict(list)
    for row in numbers("sketch-choices.csv"):
        if row["kind"] == "count":
            found[row["peers"], row["m"]].append({k: float(row[k]) for k in ("strict", "0.01", "bound", "recipe")})
    shown, peers = {}, ""
    for first, m, _, *cells in table("| peers | m |"):
        peers = first.split()[0] if first else peers
        shown[peers, m] = [float(cell.removesuffix(" %")) for cell in cells]
    for case, (kept, worst, near, bound, recipe) in shown.items():
        rows = found[case]
        means = {key: 100 * fmean(row[key] for row in rows) for key in rows[0]}
        least = 100 * min(row["strict"] for row in rows)
        for told, true in zip(
            (kept, worst, near, bound, recipe),
            (means["strict"], least, means["0.01"], means["bound"], means["recipe"]),
            strict=True,
        ):
            assert abs(told - true) < 0.06, (case, told, true)
    assert len(shown) == 8


@pytest.mark.parametrize("file", sorted((RESULTS / "tables").iterdir()), ids=lambda file: file.stem)
def test_a_table_is_on_a_page_and_says_what_made_it(file: Path) -> None:
    block = f"```{{include}} tables/{file.name}\n"
    pages = [page.name for page in RESULTS.glob("*.md") if block in page.read_text("utf-8")]
    assert len(pages) == 1, f"{file.name} is included by {pages}, expected one page of docs/results"
    table, _, tests = file.read_text("utf-8").partition("<details>")
    assert file.stem in {name.replace("/", "-") for name in names()}
    for made in (table, *filter(None, [tests])):
        assert re.search(rf"[1-9]\d* runs of the grid {file.stem} by fedloom \d+\.\d+\.\d+\.", made)
    assert re.search(r"; (mean ± 95 % t-interval over seeds \d+(, \d+)+|seed \d+)[,;]", table)


def test_the_page_of_verdicts_is_made_of_the_seeds() -> None:
    made = verdicts(RESULTS / "claims.yaml").to_markdown()
    assert made == (RESULTS / "verdicts.md").read_text("utf-8"), (
        "make it again: fedloom study claims docs/results/claims.yaml --format markdown --out docs/results/verdicts.md"
    )
    assert "```{include} verdicts.md\n" in (RESULTS / "claims.md").read_text("utf-8")


def test_seeds_stand_beside_what_chose_their_settings_and_judged_their_benchmark() -> None:
    file = RESULTS / "claims.yaml"
    grids = [load_grid(name) for name in load_claims(file).grids]
    known = {file_of(file, grid, "seeds") for grid in grids}
    kept = set((RESULTS / "seeds").glob("*.csv"))
    assert kept <= known
    for grid in grids:
        if file_of(file, grid, "seeds") in kept:
            assert file_of(file, grid, "rules").is_file()
            assert file_of(file, grid, "tuning").is_file()


def test_the_readme_shows_the_table_of_the_demo() -> None:
    readme = (RESULTS.parents[1] / "README.md").read_text("utf-8")
    shown = readme[readme.index("<!-- table of the demo -->") :].split("```")[1].splitlines()[3:]
    made = (RESULTS / "tables" / "demo.md").read_text("utf-8").splitlines()[4:12]
    assert [re.split(r"\s{2,}", line.strip()) for line in shown] == [
        [cell.strip().replace("\\\\", "\\") for cell in line.strip("|").split("|")] for line in made
    ]


def test_every_table_has_a_command_that_makes_it_again() -> None:
    root = RESULTS.parents[1]
    pages = [root / "README.md", *(root / "docs").glob("*.md"), *RESULTS.glob("*.md")]
    named = {name for page in pages for name in re.findall(r"`make results-([\w/-]+)", page.read_text("utf-8"))}
    made = {name for name in names() if (RESULTS / "tables" / f"{name.replace('/', '-')}.md").is_file()}
    named -= {"GRID", "NAME", "claims"}
    assert named <= set(names())
    targets = ["results-claims", *(f"results-{name}" for name in sorted(named | made))]
    asked = subprocess.run(["make", "-n", *targets], cwd=root, capture_output=True, text=True, check=False)
    assert asked.returncode == 0, asked.stderr
    assert "fedloom grid claims/fedhca2-scenes --out grids/claims/fedhca2-scenes" in asked.stdout


@cache
def gains_of_seeds() -> list[Gain]:
    """The gain of every method over every other one of a grid, with the ends of its interval."""
    found = []
    for file in (RESULTS / "seeds").glob("*.csv"):
        seeds = read_seeds(file)
        for data in dict.fromkeys(line.data for line in seeds.lines):
            values = {method: seeds.values(data, method) for method in seeds.methods(data)}
            for one, other in permutations(values, 2):
                if gain := change(values[one], values[other], seeds.directions(data), seeds.ratio(data)):
                    found.append((gain.mean, gain.mean - gain.half, gain.mean + gain.half))
    return found


def gains_of_tables() -> list[Gain]:
    """Those of tests and of tournaments."""
    texts = [file.read_text("utf-8") for file in (RESULTS / "tables").iterdir()]
    texts += [file.read_text("utf-8") for file in RESULTS.glob("tournament-*.md")]
    ends = rf"\| {NUMBER} (?:\| \[{NUMBER}, {NUMBER}\]|\({NUMBER} to {NUMBER}\))"
    each = [tuple(float(end) for end in of if end) for text in texts for of in re.findall(ends, text)]
    rows = [row for name in ("tournament-office.csv", "tournament-eight-real.csv") for row in numbers(name)]
    halves = [(float(row["delta"]), float(row["half"])) for row in rows]
    return [(a, b, c) for a, b, c in each] + [(mean, mean - half, mean + half) for mean, half in halves]


def not_among(text: str, known: list[Gain]) -> list[Gain]:
    """The gains of a text that are none of the known ones; "behind" may turn the sign of the gain, or of all."""
    told = [(float(a), float(b), float(c)) for a, b, c in GAIN.findall(" ".join(text.split()))]
    assert told
    signs = [*known, *((-a, -c, -b) for a, b, c in known), *((-a, b, c) for a, b, c in known)]
    ways = {(round(a, 1), round(b, 1), round(c, 1)) for a, b, c in signs}
    return [gain for gain in told if gain not in ways]


def test_gains_on_the_page_of_methods_are_those_of_seeds_and_tables() -> None:
    page = (RESULTS.parent / "which-method.md").read_text("utf-8")
    assert not_among(page, gains_of_seeds() + gains_of_tables()) == []


@pytest.mark.parametrize("page", ["dfmtl", "f2dc", "feddea", "fedhca2", "matu"])
def test_gains_beside_a_verdict_are_those_of_seeds(page: str) -> None:
    lines = (RESULTS / f"{page}.md").read_text("utf-8").splitlines()
    verdicts = "\n".join(line for line in lines if re.search(r"[✓✗?] \*\*", line))
    assert not_among(verdicts, gains_of_seeds()) == []


def test_every_file_of_seeds_can_be_read() -> None:
    files = [file for home in ("seeds", "rules", "tournaments") for file in (RESULTS / home).rglob("*.csv")]
    files = [file for file in files if file.read_text("utf-8").startswith("data,method,seed,")]
    assert len(files) > 30
    assert all(read_seeds(file).lines for file in files)
