"""Several methods on one federation, or one recipe, side by side."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedloom.core.errors import RecipeError
from fedloom.engines.api import Source, run
from fedloom.federation.recipes.objects import described
from fedloom.federation.runs.recorded import TEMPORARY
from fedloom.study.tables.compare import Comparison
from fedloom.study.tables.compare import compare as put_side_by_side


def compare(
    what: Source,
    *,
    methods: Sequence[Any],
    seeds: int | Sequence[int] = 1,
    model: Any = None,
    folder: Path | str | None = None,
    base: str | None = None,
    split: str = "test",
    metric: str | None = None,
    **options: Any,
) -> Comparison:
    """Run each method at each seed, and put the runs side by side: a column a method, with an interval over seeds.

    `methods` are names, mappings as in a recipe, Methods or functions that make one; `seeds` a number of seeds from 0
    or the seeds. The change Δm is against `base`, by default the first method. `split` and `metric` are as in `fedloom
    compare`, everything else as in `fl.run`. Runs are in FOLDER/METHOD-sSEED; without a folder they go with the result.

    Raises UserError for bad input.
    """
    if isinstance(methods, str | Mapping) or not isinstance(methods, Sequence) or not methods:
        raise RecipeError(
            f"compare: methods={methods!r} found, expected a list of methods, such as ['local', 'fedavg']"
        )
    if isinstance(seeds, bool) or not isinstance(seeds, int | Sequence) or isinstance(seeds, str) or not seeds:
        raise RecipeError(f"compare: seeds={seeds!r} found, expected how many, or a list of seeds")
    every = range(seeds) if isinstance(seeds, int) else seeds
    home = Path(tempfile.mkdtemp(prefix=TEMPORARY)) if folder is None else Path(folder)
    runs = []
    try:
        for number, method in enumerate(methods):
            for seed in every:
                place = home / f"{number}-{_called(method)}-s{seed}"
                runs.append(run(what, place, model=model, method=method, seed=seed, **options).folder)
        made = put_side_by_side(runs, base, split, metric)
    except BaseException:
        if folder is None:
            shutil.rmtree(home, ignore_errors=True)
        raise
    if folder is None:
        weakref.finalize(made, shutil.rmtree, home, ignore_errors=True)
    return made


def _called(method: Any) -> str:
    """A method's name as part of a folder's."""
    name = method.get("name", "") if isinstance(method, Mapping) else method if isinstance(method, str) else None
    text = described(method) if name is None else str(name)
    return "".join(c if c.isalnum() or c in "-+." else "-" for c in text.replace(" ", ""))
