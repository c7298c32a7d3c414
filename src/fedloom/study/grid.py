"""Grids: every combination of data set, base method, add-on and seed as an ordinary run folder below one folder.

A grid is a YAML file, checked as recipes are. Its cells are resolved recipes; which of them have been run, and how
far, is read from their folders. Free of torch.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, PrivateAttr

from fedloom.core.errors import RecipeError, StateError, choices, first_of, in_one_line, naming, nearest, warn
from fedloom.core.settings import renamed
from fedloom.core.settings.section import Problems, Section, differs, found, value_at
from fedloom.core.settings.trust import Origin, admit, names_in
from fedloom.core.settings.yaml import checked, parse, to_yaml
from fedloom.federation.recipes import loader
from fedloom.federation.recipes.loader import load, texts
from fedloom.federation.recipes.schema import Named, Recipe, recipe_hash
from fedloom.federation.runs.recorded import RUNNING, json_of, other_code, read_info, recipe_in

HOME = files("fedloom.study") / "grids"
"""Where the packaged grids are."""
FILE = "grid.yaml"
REFUSED = "refused.json"
OWN = ("references", "seeds", "delta", "family", "smallest", "show", "at", "metric", "columns", "also", "title")
"""Keys that KEY=VALUE sets in the grid itself; all others are set in every cell's recipe."""
BENCHMARK = ("data", "tasks", "partition", "model")
"""Sections of a recipe that are its benchmark: a grid on another benchmark does not change them in every cell."""
SETTINGS = ("training", "evaluation", "runtime")
"""Sections of a recipe that every recipe has and that are no choice among names: each key is a setting of its own."""
SMALLEST = 1.0
"""The smallest change in percent that counts, where nothing else is stated."""
GRIDS = Path("grids")
"""The folder of the folders, by name, in which grids run by default."""
NO_VALIDATION = "at is best-validation, and there is no validation score to choose a round by"

Changes = dict[str, Any]
"""Dotted recipe key -> value, as KEY=VALUE sets it: a whole section is replaced, a key in it is changed."""


Reference = Literal["centralised", "centralised-by-task", "separate", "simple", "constant"]
"""The methods `centralised` (for all tasks at once and for each alone), `separate`, `simple` and `constant`."""

_POOLED: dict[str, Any] = {"evaluation.models": ["global"], "peers": None, "privacy": None}
CHANGES: dict[str, Changes] = {
    "centralised": {"method": "centralised", **_POOLED},
    "centralised-by-task": {"method": {"name": "centralised", "by": "task"}, **_POOLED},
    "separate": {"method": "separate", "peers": None},
    "simple": {"method": "simple", "peers": None, "privacy": None},
    "constant": {
        "method": "constant",
        **_POOLED,
        "training.rounds": 1,  # there is nothing to train
        "training.schedule": {"name": "constant"},
        "early_stopping": None,
    },
}
"""The changes of a grid's recipe that make a cell of them: one model, measured on the data of every client."""


class DataRow(Section):
    """A data set of the grid: the recipe that its cells start from, and changes to it."""

    recipe: str | dict[str, Any]
    """A packaged recipe, a file (relative to the grid's own), or, in a grid folder, the recipe itself."""
    set: Changes = Field(default_factory=dict)
    bases: tuple[str, ...] | None = Field(None, min_length=1)
    """The bases that are run on it; by default all."""


class FigureSection(Named):
    """The figure that `fedloom plot figure` draws."""

    home = ("fedloom.study.figures", "FIGURES")


class Grid(Section):
    """The shape of a grid file."""

    name: str = Field(pattern=r"^\w[\w.-]*$", description="a name of letters, digits, '_', '-' and '.'")
    title: str = ""
    data: dict[str, DataRow] = Field(min_length=1)
    bases: dict[str, Changes] = Field(min_length=1)
    addons: dict[str, Changes] = Field({"-": {}}, min_length=1)
    """Changes after the base's. The first is the one that Delta is against where `delta` is 'base'."""
    cells: dict[str, Changes] = Field(default_factory=dict)
    """BASE/ADDON -> changes of this combination alone, after the add-on's."""
    references: tuple[Reference, ...] | None = None
    """The references below the bases, without add-ons (see `CHANGES`); by default all, in a grid with a figure none."""
    seeds: tuple[Annotated[int, Field(ge=0)], ...] = Field((0, 1, 2), min_length=1)
    delta: str = "base"
    """The reference of Delta: 'base' (the same base with the first add-on), 'none', or a cell called BASE/ADDON."""
    family: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """The comparisons that Holm's correction is over, named before the grid runs: BASE/ADDON -> the cells it is
    compared with. By default every cell is compared with the reference of Delta."""
    smallest: float = Field(SMALLEST, gt=0)
    """The smallest change in percent that counts: smaller ones are never a yes, and a no excludes larger ones."""
    show: Literal["unified", "clients", "domains"] = "unified"
    """unified: one line per cell. clients: one line per client's personal model, as papers on one-task clients have.
    domains: as unified, with the domains of the only task as columns in the place of tasks."""
    at: Literal["last", "best-validation"] = "last"
    """The model of a run that counts. last: the one it keeps at the end. best-validation: the one of the round with the
    best mean over the tasks (or domains), which must have one metric, on validation data; test data plays no part."""
    metric: str | None = None
    """Show this metric, of the tasks that have it; by default each task's own."""
    columns: tuple[str, ...] | None = Field(None, min_length=1)
    """The tasks that tables and figures show and that Delta counts, in their order; by default all."""
    also: tuple[Literal["average", "spread", "bits"], ...] = ()
    """More columns: mean and standard deviation over the tasks (or domains), which must have one metric; megabits sent
    per client, round and task."""
    set: Changes = Field(default_factory=dict)
    """Changes to every cell, after all others."""
    tuned: dict[str, dict[str, Changes]] = Field(default_factory=dict)
    """Data set -> BASE/ADDON -> the settings that `fedloom tune` chose on validation data, after all others."""
    tuned_on: tuple[int, ...] = ()
    """The seeds of the trials that chose them, which no cell may have."""
    figure: FigureSection | None = None
    figures: dict[str, FigureSection] = Field(default_factory=dict)
    """More figures by their names, which `fedloom plot figure --named` asks for."""
    _origin: Origin = PrivateAttr(Origin.TYPED)  # where names of code in its recipes come from

    def _problems(self) -> Problems:
        changes = {f"data.{label}.set": row.set for label, row in self.data.items()} | {"set": self.set}
        for key, several in (("bases", self.bases), ("cells", self.cells), ("addons", self.addons)):
            changes |= {f"{key}.{label}": keys for label, keys in several.items()}
        for where, keys in changes.items():
            if "seed" in keys:
                yield f"{where}.seed", "a cell's seed comes from 'seeds'"
        for key, labels in (("data", self.data), ("bases", self.bases), ("addons", self.addons)):
            seen: dict[str, str] = {}
            for label in labels:
                if "/" in label or not label.strip() or not in_one_line(label):
                    yield f"{key}.{label}", "a label is a text without '/', in one line"
                elif len(safe(label).encode()) > 200:
                    yield f"{key}.{label}", f"a label has at most 200 bytes, found {len(label.encode())}"
                if (other := seen.setdefault(safe(label).lower(), label)) != label:
                    yield f"{key}.{label}", f"would share its folder with {other!r}: choose another label"
        if len(set(self.seeds)) < len(self.seeds):
            yield "seeds", f"{list(self.seeds)} found: a seed occurs twice"
        if len({*(self.columns or ())}) < len(self.columns or ()):
            yield "columns", f"{list(self.columns or ())} found: a task occurs twice"
        if both := sorted({*self.seeds} & {*self.tuned_on}):
            yield "seeds", f"seed {both[0]} found, which chose the settings under 'tuned': expected others"
        for label in filter(self.reference_rows.__contains__, self.bases):
            yield f"bases.{label}", "the name is that of a reference: choose another, or leave it out of 'references'"
        cells = [f"{base}/{addon}" for base, addon in self.combinations]
        for label in self.cells:
            if label not in cells:
                yield f"cells.{label}", f"no such cell, expected BASE/ADDON.{nearest(label, cells)}"
        for data, label in ((data, label) for data, by_label in self.tuned.items() for label in by_label):
            if data not in self.data or label not in cells:
                hint = nearest(label, cells)
                yield f"tuned.{data}.{label}", f"no such data set and cell, expected DATA and BASE/ADDON.{hint}"
        for label, base in ((label, base) for label, row in self.data.items() for base in row.bases or ()):
            if base not in self.bases:
                yield f"data.{label}.bases", f"no base {base!r}.{nearest(base, self.bases)}"
        for label, each in ((name, each) for name, of in self.family.items() for each in (name, *of)):
            if each not in cells:
                yield f"family.{label}", f"no cell {each!r}, expected BASE/ADDON.{nearest(each, cells)}"
        for label, of in self.family.items():  # each comparison counts in Holm's correction, so none counts twice
            if label in of:
                yield f"family.{label}", "it is compared with itself: expected other cells"
            elif not of or len({*of}) < len(of):
                yield f"family.{label}", f"{list(of)} found: expected one or more cells, each once"
        if self.delta not in ("base", "none", *cells):
            hint = nearest(self.delta, cells)
            yield "delta", f"{self.delta!r} found, expected 'base', 'none' or a cell as BASE/ADDON.{hint}"

    def __eq__(self, other: object) -> bool:
        """Return whether two grids have the same content, wherever it came from."""
        return isinstance(other, Grid) and self.model_dump() == other.model_dump()

    @property
    def combinations(self) -> tuple[tuple[str, str], ...]:
        """(base, add-on) of every line, the references last; these have '-', whatever the grid's add-ons are."""
        own = tuple((base, addon) for base in self.bases for addon in self.addons)
        return *own, *((name, "-") for name in self.reference_rows)

    @property
    def reference_rows(self) -> tuple[Reference, ...]:
        """`references`, or their default."""
        default: tuple[Reference, ...] = () if self.figure else get_args(Reference)
        if self.show == "domains":  # one task, so both are the same
            default = tuple(name for name in default if name != "centralised-by-task")
        return default if self.references is None else self.references

    def compared(self, base: str, addon: str) -> tuple[tuple[str, str], ...]:
        """Return the (base, add-on) that tests compare a cell with."""
        if self.family:
            return tuple(map(cell_of, self.family.get(f"{base}/{addon}", ())))
        named = None if base in self.reference_rows else self.reference(base)
        return () if named is None or named == (base, addon) else (named,)

    def reference(self, base: str) -> tuple[str, str] | None:
        """Return (base, add-on) that cells of `base` are compared with, None for none."""
        if self.delta == "none":
            return None
        if self.delta == "base":
            return base, "-" if base in self.reference_rows else next(iter(self.addons))
        return cell_of(self.delta)


def cell_of(label: str) -> tuple[str, str]:
    """Return (base, add-on) of BASE/ADDON."""
    base, _, addon = label.partition("/")
    return base, addon


@dataclass(frozen=True)
class Cell:
    """One run of a grid, known by its labels and its seed."""

    data: str
    base: str
    addon: str
    seed: int

    def __str__(self) -> str:
        return f"{self.combination} s{self.seed}"

    @property
    def combination(self) -> str:
        """The labels without the seed; the add-on is left out where it is '-'."""
        return " / ".join(label for label in (self.data, self.base, self.addon) if label != "-")

    def folder(self, grid_folder: Path) -> Path:
        """Return the folder of its run."""
        parts = (safe(self.data), safe(self.base), safe(self.addon), f"s{self.seed}")
        folder = grid_folder.joinpath("cells", *parts)
        begun = grid_folder.joinpath("cells", *(renamed.FOLDERS.get(part, part) for part in parts))
        return begun if begun != folder and begun.is_dir() else folder


def together(base: str, addon: str) -> str:
    """Return 'base', or 'base add-on'."""
    return base if addon == "-" else f"{base} {addon}"


def safe(label: str) -> str:
    """Return a label as the name of a directory: '+DEA (a)' -> '+DEA_a', '-' -> 'plain'."""
    return re.sub(r"[^\w.+=,-]+", "_", label).strip("_.-") or "plain"


def cells(grid: Grid) -> Iterator[Cell]:
    """Yield the cells seed by seed, so that every combination has a first number early."""
    for seed in grid.seeds:
        for data, row in grid.data.items():
            for base, addon in grid.combinations:
                if row.bases is None or base in (*row.bases, *grid.reference_rows):
                    yield Cell(data, base, addon, seed)


def names() -> list[str]:
    """Return the names of the packaged grids."""
    return sorted(loader.packaged(HOME))


def means_grid(source: str, if_ran: bool = False) -> bool:
    """Return whether a source is a grid: a name, a grid's folder, or a file with keys that only a grid has, its own or
    those of what it is `like`.

    A name that a packaged recipe has, too, means the grid, with `if_ran` only where that has run, and this is said. In
    a file, what both are called, such as `like: benchmarks/digits`, counts as the recipe.
    """
    if (Path(source) / FILE).is_file() or (if_ran and source in ran()):
        return True
    if source in loader.names():
        if source not in names() or (if_ran and not (GRIDS / load_grid(source).name / FILE).is_file()):
            return False
        how = f"for the recipe, name a file with the line `like: {source}`"
        warn(f"{source} is the name of a grid and of a recipe: this takes the grid; {how}")
        return True
    if source in names() or not Path(source).exists():
        return True
    for kind, home in (("recipe", loader.HOME), ("grid", HOME)):
        with suppress(RecipeError):
            value = loader.read(source, kind, home).value
            return isinstance(value, dict) and bool(value.keys() & (Grid.model_fields.keys() - Recipe.model_fields))
    return False


def summary(name: str) -> str:
    """Return the first comment line of a packaged grid."""
    return loader.summary(name, HOME)


def load_grid(
    source: str | Path | Mapping[str, Any],
    changes: Sequence[str] = (),
    origin: Origin | None = None,
    benchmark: str | None = None,
) -> Grid:
    """Return a checked grid from a packaged name, a file or a mapping; the result contains its recipes.

    A key `like` names another grid, of which it takes all keys that it does not have itself. `benchmark` is
    one of its benchmarks, or a recipe (a packaged name, a file) that takes the place of its data sets.
    `changes` are KEY=VALUE texts: those that `OWN` names, such as seeds, change the grid, others every cell's recipe.
    `origin` says where names of code in it come from, by default as for recipes; a grid's folder counts as a run's.
    Raises RecipeError with all that is wrong with the grid; `recipes` checks the cells.
    """
    where, value, its_origin, benchmarks = loader.read(source, "grid", HOME, benchmark)
    if origin is None:
        origin = its_origin
        admit(loader.names_typed(changes), Origin.TYPED, where)
        if origin is Origin.FILE and Path(where).name == FILE and Path(where).with_name("cells").is_dir():
            origin = Origin.FOLDER
    if not isinstance(value, dict):
        raise RecipeError(f"{where}: {found(value)} found, expected a mapping with {', '.join(Grid.model_fields)}")
    if "method" in value and "bases" not in value:
        raise RecipeError(f"{where} is a recipe, and no grid: run it first, with `fedloom run {where}`")
    if benchmark is not None and benchmark not in benchmarks:
        value = _on_recipe(value, benchmark, where, benchmarks)
    head = f"{where} is not a valid grid:\n"
    grid = checked(Grid, value, head)
    own, all_cells = _split(changes)
    grid = checked(Grid, {**value, **renamed.grid(own), "set": {**grid.set, **all_cells}}, head)
    beside = Path(where).parent if Path(where).is_file() else Path()
    rows = {}
    for label, row in grid.data.items():
        recipe = row.recipe
        if isinstance(recipe, str) and recipe not in (*loader.names(), benchmark) and (beside / recipe).is_file():
            recipe = str(beside / recipe)
        try:
            content = loader.read(recipe, follow=not isinstance(recipe, dict))
        except RecipeError as error:
            raise RecipeError(f"{where} is not a valid grid:\ndata.{label}.recipe: {error}") from None
        rows[label] = row.model_copy(update={"recipe": content.value})
        if origin is Origin.TYPED and content.origin is Origin.FILE:
            admit(_code(grid), Origin.TYPED, where)
            origin = Origin.FILE
    grid = grid.model_copy(update={"data": rows})
    grid._origin = origin
    return grid


def _on_recipe(value: Mapping[str, Any], benchmark: str, where: str, benchmarks: Collection[str]) -> dict[str, Any]:
    """Return a grid's plain content with a recipe in the place of its data sets and of what belongs to these."""
    if benchmark not in loader.names() and not Path(benchmark).is_file():
        raise RecipeError(
            f"{where}: no benchmark {benchmark!r}, expected one of its own or a recipe (a file, a packaged name)."
            f"{choices('Its benchmarks', benchmark, benchmarks)}"
        )
    label = re.sub(r"[^\w.-]+", "-", benchmark if benchmark in loader.names() else Path(benchmark).stem)
    rest = {key: kept for key, kept in value.items() if key not in ("columns", "tuned")}
    if isinstance(changes := value.get("set"), dict):
        rest["set"] = {key: kept for key, kept in changes.items() if str(key).partition(".")[0] not in BENCHMARK}
    return {**rest, "name": f"{value.get('name')}-{label}", "data": {label: {"recipe": benchmark}}}


def _code(grid: Grid) -> Iterator[str]:
    """Yield the names of code in all cells."""
    yield from names_in([row.recipe for row in grid.data.values()])
    rows = (row.set for row in grid.data.values())
    for part in (*rows, *grid.bases.values(), *grid.addons.values(), *grid.cells.values(), grid.set):
        with suppress(RecipeError):  # `recipes` tells in which cell
            yield from loader.names_typed(texts(part))


def against(grid: Grid, reference: str) -> Grid:
    """Return the grid with another `delta`, and without a family. Raises RecipeError where that is no cell."""
    labels = [f"{base}/{addon}" for base, addon in grid.combinations]
    if renamed.grid({"delta": reference})["delta"] not in ("base", "none", *labels):
        raise RecipeError(
            f"--base: {reference!r} found, expected 'base' or a cell of the grid as BASE/ADDON."
            f"{choices('Cells', reference, labels)}"
        )
    changes = [f"delta={json.dumps(reference)}", "family={}"]
    return load_grid(grid.model_dump(mode="json"), changes, grid._origin)


def _split(changes: Sequence[str]) -> tuple[Changes, Changes]:
    """Split KEY=VALUE texts into (changes of the grid, changes of every cell)."""
    own: Changes = {}
    all_cells: Changes = {}
    for change in changes:
        key, equals, text = change.partition("=")
        key = key.strip()
        if not equals or not all(key.split(".")):
            raise RecipeError(f"{change!r}: expected key.path=value, for example training.rounds=20 or seeds=[0,1]")
        if key == "seed":
            raise RecipeError(f"{change!r}: a grid has several seeds: seeds=[0,1,2]")
        (own if key in OWN else all_cells)[key] = parse(text, f"{change!r}")
    return own, all_cells


def recipes(grid: Grid) -> dict[Cell, Recipe]:
    """Return the recipe of every cell. Raises RecipeError that names the cells whose recipe is not valid."""
    admit(_code(grid), grid._origin, f"grid {grid.name}")
    result: dict[Cell, Recipe] = {}
    wrong: dict[str, str] = {}
    same: dict[str, Cell] = {}
    for cell in cells(grid):
        label, tuned = f"{cell.base}/{cell.addon}", grid.tuned.get(cell.data, {})
        changes = [text for part in (*parts_of(grid, cell), tuned.get(label, {})) for text in texts(part)]
        try:
            recipe = load(grid.data[cell.data].recipe, [*changes, f"seed={cell.seed}"], grid._origin)
        except RecipeError as error:
            text = str(error).removeprefix("the mapping is not a valid recipe:").strip()
            wrong.setdefault(text, cell.combination)
            continue
        if grid.at == "best-validation":
            if "val" not in recipe.evaluation.splits:
                wrong.setdefault(f"{NO_VALIDATION}: evaluation.splits has no val", cell.combination)
            elif recipe.partition.params.get("val_fraction") == 0:
                wrong.setdefault(f"{NO_VALIDATION}: partition.val_fraction is 0", cell.combination)
        result[cell] = recipe
        twin = same.setdefault(recipe_hash(recipe), cell)
        if twin is not cell and not {label, f"{twin.base}/{twin.addon}"} & tuned.keys():  # tuning may make twins
            wrong.setdefault("the recipe is the same in both", f"{twin.combination} and {cell.combination}")
    if wrong:
        raise RecipeError("\n".join([f"grid {grid.name}:", *(f"{cell}: {text}" for text, cell in wrong.items())]))
    return result


def parts_of(grid: Grid, cell: Cell) -> list[Changes]:
    """Return the changes of the data set's recipe that make a cell's, in their order, without those of tuning."""
    first = grid.data[cell.data].set
    if cell.base not in grid.bases:
        return [first, grid.set, CHANGES[cell.base]]
    single = grid.cells.get(f"{cell.base}/{cell.addon}", {})
    return [first, grid.bases[cell.base], grid.addons[cell.addon], single, grid.set]


def replaced(grid: Grid) -> list[str]:
    """Return a sentence for each change of settings that leaves out keys which the data set's recipe sets.

    Their defaults then count in some cells alone, such as the number of rounds, which nobody means. Other sections are
    choices as a whole, such as the signals that peers compare, and packaged grids replace them as such.
    """
    lines: dict[tuple[str, ...], str] = {}
    for cell in cells(grid):
        recipe = grid.data[cell.data].recipe
        for key, value in ((k, v) for part in parts_of(grid, cell) for k, v in part.items()):
            lost = [*_lost(key, value_at(recipe, key), value)] if key.partition(".")[0] in SETTINGS else []
            if lost:
                lines.setdefault(
                    (key, *lost),
                    f"{cell.combination}: {key} replaces the whole section, so these keys of the recipe do not count: "
                    f"{', '.join(lost)}. To change one key, write it with dots, such as {key}.KEY: VALUE",
                )
    return [*lines.values()]


def _lost(path: str, before: Any, after: Any) -> Iterator[str]:
    """Yield the keys of a section that a change leaves out; one that names its kind (`name`) is meant to be new."""
    if isinstance(before, Mapping) and isinstance(after, Mapping) and "name" not in after:
        for key, value in before.items():
            yield from _lost(f"{path}.{key}", value, after[key]) if key in after else [f"{path}.{key}"]


def select(grid: Grid, labels: Sequence[str]) -> set[Cell]:
    """Return the cells with one of `labels` of each kind that occurs in them. Raises RecipeError for an unknown one."""
    bases = [base for base, _ in grid.combinations]
    kinds: dict[str, Collection[str]] = {"data": grid.data, "base": bases, "addon": grid.addons}
    for label in labels:
        known = list(dict.fromkeys(one for kind in kinds.values() for one in kind))
        if label not in known:
            raise RecipeError(f"no label {label!r} in the grid.{choices('Labels', label, known)}")
    wanted = {kind: chosen for kind, known in kinds.items() if (chosen := set(labels) & set(known))}
    return {cell for cell in cells(grid) if all(getattr(cell, kind) in chosen for kind, chosen in wanted.items())}


def state_of(cell: Cell, recipe: Recipe, grid_folder: Path) -> Literal["new", "interrupted", "finished"]:
    """Return the state of a cell's folder. Raises StateError where another recipe or other code was run there."""
    folder = cell.folder(grid_folder)
    if not (folder / "recipe.yaml").is_file():
        return "new"
    same(f"{cell}: {folder} was run", recipe_in(folder), recipe)
    if not is_over(folder):
        return "interrupted"
    if code := other_code(folder):
        raise StateError(
            f"{cell}: {folder} was run with other code ({code}). Choose another folder with --out, or delete this one"
        )
    return "finished"


def same(what: str, before: Recipe, now: Recipe) -> None:
    """Raise StateError where `what`, '... was run', was with a recipe of other results, with the keys that differ."""
    if recipe_hash(before) == recipe_hash(now):
        return
    keys = sorted(differs("", before.model_dump(mode="json"), now.model_dump(mode="json")))
    raise StateError(
        f"{what} with another recipe; they differ in {', '.join(keys or ['the order of method.add'])}. "
        "Choose another folder with --out, or delete this one"
    )


def same_family(grid: Grid, folder: Path) -> None:
    """Raise StateError where a grid would change what its folder said about tests before it ran."""
    if not (folder / FILE).is_file():
        return
    before = load_grid(folder / FILE)
    for key in ("family", "smallest"):
        if (old := getattr(before, key)) != (new := getattr(grid, key)):
            raise StateError(
                f"grid {grid.name}: {key}: {new!r} found, but {folder} ran with {old!r}. A test that is chosen "
                "after the runs proves nothing: choose another folder with --out"
            )


def is_over(folder: Path) -> bool:
    """Return whether a run has ended, with whatever status. Raises StateError where its run.json is damaged."""
    file = folder / "run.json"
    if not file.is_file():
        return False
    if "status" not in (info := read_info(folder)):
        raise StateError(f"{file}, status: field required")
    return bool(info["status"] != RUNNING)


def save(grid: Grid, folder: Path, refused: Mapping[str, str]) -> None:
    """Write the files that a table needs beside the runs: the grid, and the refused combinations with reasons."""
    write(folder, {FILE: to_yaml(grid.model_dump(mode="json")), REFUSED: json.dumps(dict(refused), indent=1)})


def write(folder: Path, texts: Mapping[str, str]) -> None:
    """Write files of a folder, {name: text}; a reader finds the old or the new file, never a part of one."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        part = folder / f"{name}.{os.getpid()}.part"  # its own, because another grid may write the same file
        with naming(part):
            part.write_text(text, encoding="utf-8")
        part.replace(folder / name)


def open_folder(source: str | Path) -> tuple[Grid, Path]:
    """Return (grid, folder) of a grid's folder; or of a packaged grid, a grid file or a name, from where it ran."""
    folder = _folder(source)
    if not (folder / FILE).is_file():
        if folder.is_dir() and str(source) not in names():
            raise StateError(f"{folder} is not a grid's folder: {FILE} is absent")
        known = [*names(), *ran()]
        if not folder.exists() and str(source) not in known and folder.suffix != ".yaml":
            raise StateError(
                f"{source}: no such folder, and no grid of this name is packaged or was run in {GRIDS}."
                f"{choices('Grids', str(source), sorted(known))}"
            )
        now = load_grid(source)
        folder = GRIDS / now.name
        if not (folder / FILE).is_file():
            raise StateError(
                f"grid {source} has not been run in {folder}: run `fedloom grid {source}`, or name a folder"
            )
        _tell_changes(Path(source), now, folder / FILE)
    return load_grid(folder / FILE), folder


def _tell_changes(file: Path, now: Grid, before: Path) -> None:
    """Warn where a grid's file was changed after the grid ran, whose folder has a copy of what ran."""
    if not file.is_file() or file.stat().st_mtime <= before.stat().st_mtime:
        return
    if keys := sorted(differs("", load_grid(before).model_dump(mode="json"), now.model_dump(mode="json"))):
        warn(
            f"{file} was changed after its grid ran ({first_of(keys)}); this is the grid as it ran, from {before}. "
            f"To use the changes: fedloom grid {file}"
        )


def ran() -> list[str]:
    """Return the names of the grids that ran in their default place."""
    return sorted(file.parent.name for file in GRIDS.glob(f"*/{FILE}"))


def _folder(source: str | Path) -> Path:
    """Return the folder itself, or that of the grid that ran under this name in its default place."""
    home = GRIDS / source
    return home if not Path(source).exists() and (home / FILE).is_file() else Path(source)


def runs_in(source: Path) -> list[Path]:
    """Return the finished runs of a grid's first seed, in the order of its cells; or the folder of a single run.

    `source` is as in `open_folder`. Raises StateError where no run of the seed has finished.
    """
    if not (_folder(source) / FILE).is_file() and str(source) not in names():
        return [source]
    grid, folder = open_folder(source)
    folders = [path for cell in cells(grid) if cell.seed == grid.seeds[0] and is_over(path := cell.folder(folder))]
    if not folders:
        raise StateError(f"no cell of grid {grid.name} with seed {grid.seeds[0]} has finished in {folder}")
    return folders


def refused_in(folder: Path) -> dict[str, str]:
    """Return combination -> the reason why the library refused it, as recorded when the grid ran."""
    try:
        value = json_of(folder / REFUSED)
    except FileNotFoundError:
        return {}
    if not isinstance(value, dict):
        raise StateError(f"{folder / REFUSED}: expected an object, found {type(value).__name__}")
    return {str(key): str(reason) for key, reason in value.items()}
