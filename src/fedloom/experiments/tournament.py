"""`fedloom tournament`: tune every method with the same budget, then add seeds until the intervals tell."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fedloom.core.errors import RecipeError, UserError
from fedloom.core.settings.names import is_import
from fedloom.core.settings.registry import Registered
from fedloom.core.settings.trust import Origin, admit, names_in
from fedloom.experiments.grid_run import Watch, prepare, run_prepared
from fedloom.federation.recipes import load
from fedloom.methods import ADDONS, METHODS
from fedloom.study.grid import FILE, Changes, Grid, cells, load_grid, same, texts, write
from fedloom.study.references import CHANGES
from fedloom.study.tournament import (
    ALONE,
    BED,
    Standings,
    Tournament,
    Tries,
    best,
    final_grid,
    label,
    opened,
    save,
    scores,
    standings,
    tuning_grid,
)
from fedloom.study.tournament import FILE as TOURNAMENT

FACTORS = (0.5, 1.0, 2.0)
"""What a number of a method is multiplied with in a drawn setting."""
DECADES = 0.75
"""A drawn learning rate is at most so many powers of ten above or below the bed's."""
DRAWS = 50
"""After so many settings that are no valid recipe a method has fewer tries."""


REFERENCES = tuple(CHANGES)
"""They stand in every table anyway, so they do not take part."""


def all_methods() -> tuple[str, ...]:
    """Every registered method but the references."""
    return tuple(entry.name for entry in METHODS if entry.name not in REFERENCES)


def planned(
    bed: str, changes: Sequence[str], out: Path | None, entered: Sequence[str], given: Mapping[str, int]
) -> tuple[Tournament, Path]:
    """(the tournament on a bed, or the one of a folder with who joins it and what is given anew; its folder).

    Raises UserError for names that do not exist, and for another bed than the folder's.
    """
    admit(_code(entered), Origin.TYPED, "--methods")
    for name in entered:
        named(name)
    begun = (Path(bed) / TOURNAMENT).is_file()
    if begun and (changes or out is not None):
        raise UserError(f"{bed} is a tournament that has begun: its recipe and its folder cannot be changed")
    recipe = None if begun else load(bed, changes)
    folder = Path(bed) if recipe is None else out or Path("tournaments") / recipe.name
    if not (folder / TOURNAMENT).is_file():
        assert recipe is not None
        defaults = {"tries": 4, "tuning": (100,), "least": 3, "most": 10, "methods": entered or all_methods()}
        return Tournament(name=recipe.name, recipe=recipe.model_dump(mode="json"), **{**defaults, **given}), folder
    before = opened(folder)
    admit([*_code(before.methods), *names_in(before.recipe)], Origin.FOLDER, f"{folder / TOURNAMENT}")
    # what an older version wrote lacks keys that came later
    held = load(before.recipe, origin=Origin.FOLDER)
    if recipe is not None:
        same(f"{folder} was begun", held, recipe)
    joined = tuple(dict.fromkeys((*before.methods, *entered)))
    about = {"recipe": (recipe or held).model_dump(mode="json"), "methods": joined}
    return before.model_copy(update={**about, **given}), folder


def tries(tournament: Tournament) -> tuple[Tries, dict[str, str]]:
    """(the settings of each method, why others have none).

    The first are the defaults; the others multiply the learning rate by a factor that is the same for all methods,
    above and below 1 in turn, and every number of the method and its add-ons by 1/2, 1 or 2. What is drawn depends on
    the method's name and the number of the try alone, so that a method that comes later changes nothing for the others.
    """
    found: dict[str, list[Changes]] = {}
    refused: dict[str, str] = {}
    for method in (ALONE, *(name for name in tournament.methods if name != ALONE)):
        try:
            found[method] = _settings(tournament, method, named(method))
        except RecipeError as error:
            refused[method] = " ".join(str(error).split())
    return found, refused


def play(
    tournament: Tournament,
    folder: Path,
    watch: Callable[[], Watch],
    tell: Callable[[str], None],
    jobs: int | None = None,
) -> Standings:
    """Run what is missing, and give the standings, which are written to the folder as well.

    What was run before is not run again. A method whose run fails is left out, with the reason; raises UserError where
    that is training alone.
    """
    save(tournament, folder)
    settings, refused = tries(tournament)
    if ALONE in refused:
        raise RecipeError(f"tournament {tournament.name}: {refused[ALONE]}")
    grid = tuning_grid(tournament, settings)
    tell(f"tuning: {sum(map(len, settings.values()))} settings of {len(settings)} methods on validation data")
    # A setting that diverges is no reason to leave a method out.
    reasons = _run(grid, folder / "tuning", watch, jobs)
    refused |= {method: reasons[name] for method in settings if (name := label(method, 0)) in reasons}
    if ALONE in refused:
        raise RecipeError(f"tournament {tournament.name}: {ALONE}: {refused[ALONE]}")
    found = scores(grid, folder / "tuning", label(ALONE, 0))
    chosen = {method: settings[method][number] for method, number in best(found, settings).items()}
    for method, where in _set_aside(final_grid(tournament, chosen, tournament.least), folder / "final"):
        tell(f"{method}: other settings are the best now; its final runs with the earlier ones are in {where}")
    for seeds in range(tournament.least, tournament.most + 1):
        grid = final_grid(tournament, chosen, seeds)
        tell(f"final: {len(chosen)} methods, {seeds} seeds")
        made = standings(tournament, grid, folder / "final", refused | _run(grid, folder / "final", watch, jobs))
        write(folder, {"standings.csv": made.to_csv(), "standings.md": made.to_markdown()})
        if made.is_settled:
            break
    return made


def _set_aside(grid: Grid, folder: Path) -> Iterator[tuple[str, Path]]:
    """Move away the runs of bases whose changes are not those of the folder's grid: (base, where they are now)."""
    before = load_grid(folder / FILE).bases if (folder / FILE).is_file() else {}
    earlier = folder / "earlier"
    for cell in cells(grid):
        home = cell.folder(folder).parent  # of all seeds
        if cell.base in before and before[cell.base] != grid.bases.get(cell.base) and home.is_dir():
            earlier.mkdir(exist_ok=True)
            yield cell.base, home.rename(earlier / f"{home.parent.name} {sum(1 for _ in earlier.iterdir()) + 1}")


def _run(grid: Grid, folder: Path, watch: Callable[[], Watch], jobs: int | None) -> dict[str, str]:
    """Run what is missing. Base of the grid -> why it was refused, or failed."""
    prepared = prepare(grid, folder)
    outcome = run_prepared(prepared, watch(), jobs)
    failed = {cell.base: f"seed {cell.seed} failed: {message}" for cell, message in outcome.failed.items()}
    reasons = {**prepared.refused, **outcome.refused}
    return {base: reason for base in grid.bases if (reason := reasons.get(f"{BED} / {base}"))} | failed


def _code(methods: Sequence[str]) -> list[str]:
    """Return the names of code among methods and their add-ons."""
    return [one for method in methods for one in method.split("+") if is_import(one)]


def named(method: str) -> list[Registered]:
    """The method and its add-ons of METHOD+ADDON. Raises RecipeError where there is none of that name."""
    name, *addons = method.split("+")
    if name in REFERENCES:
        raise RecipeError(f"{name} stands in every table, and does not take part")
    for registry, given in ((METHODS, [name]), (ADDONS, addons)):
        for one in given:
            if problem := registry.problem(one):
                raise RecipeError(problem)
    return [METHODS[name], *(ADDONS[one] for one in addons)]


def _settings(tournament: Tournament, method: str, entries: Sequence[Registered]) -> list[Changes]:
    """Valid settings of a method, the default ones first. RecipeError where these are no valid recipe."""
    rate = load(tournament.recipe).model_dump(mode="json")["training"]["optimizer"].get("lr")
    found: list[Changes] = [_change(entries, [{} for _ in entries])]
    load(tournament.recipe, texts(found[0]))
    for number in range(1, DRAWS):
        if len(found) == tournament.tries:
            break
        common, own = random.Random(f"rate {number}"), random.Random(f"{method} {number}")
        changes = _change(entries, [_drawn(entry, own) for entry in entries])
        if rate is not None:  # above the bed's and below it in turn, so that few draws see both sides
            power = common.uniform(0, DECADES) * (1 if number % 2 else -1)
            changes["training.optimizer.lr"] = float(f"{rate * 10**power:.2g}")
        try:
            load(tournament.recipe, texts(changes))
        except RecipeError:
            continue
        if changes not in found:
            found.append(changes)
    return found


def _change(entries: Sequence[Registered], params: Sequence[Mapping[str, Any]]) -> Changes:
    """The recipe's section method."""
    name, addons = entries[0].name, {e.name: dict(p) for e, p in zip(entries[1:], params[1:], strict=True)}
    more = {"add": addons} if addons else {}
    section = {"name": name, **params[0], **more}
    return {"method": name if section == {"name": name} else section}


def _drawn(entry: Registered, rng: random.Random) -> dict[str, Any]:
    """The numbers of a method or an add-on that differ from their defaults, each valid alone."""
    found: dict[str, Any] = {}
    for key, field in entry.params.model_fields.items():
        default = field.default
        if isinstance(default, bool) or not isinstance(default, int | float) or not default:
            continue
        value = default * rng.choice(FACTORS)
        value = max(1, round(value)) if isinstance(default, int) else value
        try:
            entry.params.model_validate({**found, key: value})
        except ValidationError:
            continue
        if value != default:
            found[key] = value
    return found
