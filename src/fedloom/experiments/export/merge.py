"""Exported models made into one by what each has learned: task vectors, merged once and added to where they began."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from fedloom._version import __version__
from fedloom.core.context import Ctx
from fedloom.core.errors import RecipeError, UserError, check_empty
from fedloom.core.layout import Layout
from fedloom.core.stage import Stage, every
from fedloom.core.taskvectors import modulate, unify
from fedloom.core.updates import Updates
from fedloom.experiments.export.bundle import ABOUT, CARD, RECIPE, Bundle, described, loader, network, words_file, write
from fedloom.experiments.export.finished import reopen
from fedloom.federation.recipes.loader import dump, load
from fedloom.federation.rounds.build import build_method
from fedloom.methods import Method
from fedloom.models.multitask import MultiTask
from fedloom.models.tasks.task import Task


def merge(models: Sequence[Path], base: Path, out: Path, rule: str = "mean", scale: float = 1.0) -> list[Path]:
    """Merge what exported models have in common, by their differences to `base`, and write the result to `out`.

    What tasks share becomes base + scale u, with u from the models' task vectors (model - base) by `rule`: mean, emr,
    or an add-on that combines rows without anything beside them, with its keys if wanted: "ties={keep: 0.3}". Heads and
    decoders stay those of the model that has the task, or become their mean; so do running statistics. `base` is an
    exported model, or a finished run: then the model that it began with. Returns the folders.

    emr (Huang et al., NeurIPS 2024) gives each model back, from one vector for all with a mask and a scale for each. So
    it writes a folder for each into `out`, and so does any rule where models normalise their inputs differently: the
    merged part is then the same in all, the rest each model's own.

    Raises StateError and DataError for what is no exported model; UserError where models do not fit together, and for
    a rule that needs more than models.
    """
    check_empty(out)
    if not 0 <= scale < math.inf:
        raise UserError(f"merge: --scale {scale} found, expected a number of at least 0")
    if len(models) < 2:
        raise UserError(f"merge: {len(models)} model found, expected at least two")
    stage = None if rule == "emr" else _stage(rule)
    bundles = [Bundle.read(folder) for folder in models]
    start = Bundle.read(base).module if (base / ABOUT).is_file() else reopen(base)[0].module
    licence = bundles[0].about.licence if len({bundle.about.licence for bundle in bundles}) == 1 else "other"
    first, layout = bundles[0], _common(bundles[0].module)
    for folder, module in [*zip(models, [b.module for b in bundles], strict=True), (base, start)]:
        _same_network(folder, module, models[0], first.module)
    for folder, other in zip(models, bundles, strict=True):
        (shape, signal), mine = (other.about.input_shape, other.about.signal), first.about
        if (shape, signal) != (mine.input_shape, mine.signal):
            inputs = f"{shape}, {signal} in {folder}, {mine.input_shape}, {mine.signal} in {models[0]}"
            raise UserError(f"merge: input_shape and signal: {inputs} found, expected the same inputs")
    tasks = _tasks(models, bundles)
    theta = layout.flatten(start).clone()
    X = torch.stack([layout.flatten(bundle.module) - theta for bundle in bundles])
    if stage is None:
        vector, masks, scales = unify(X)
        vectors = [modulate(vector, mask, size) for mask, size in zip(masks, scales, strict=True)]
    else:
        updates = Updates.of(X, layout=layout, rows=[f"{i:06}" for i in range(len(X))])
        for why in (why for one in every(stage) for why in one.unfit(updates, len(X))):
            raise UserError(f"merge: --rule {rule}: {why}")
        vectors = [stage(updates, stage.init(layout), Ctx(1))[0].X[0]] * len(X)
    moved = (theta + scale * vector for vector in vectors)
    places = [*zip(layout.blocks, layout.slices, strict=True)]
    parts = [{b.name: x[s].view(b.shape).clone() for b, s in places} for x in moved]
    inputs_as = [(b.about.mean, b.about.std, b.about.pixels) for b in bundles]
    if stage is not None and inputs_as == inputs_as[:1] * len(bundles):
        classes = {task: names for b in bundles for task, names in b.about.classes.items()}
        first = replace(first, about=first.about.model_copy(update={"classes": classes}))
        whole = _averaged([bundle.module for bundle in bundles]) | parts[0]
        return [_written(out, first, tasks, whole, rule, models, licence)]
    return [
        _written(out / f"{number}", bundle, bundle.tasks, {**bundle.module.state_dict(), **part}, rule, models, licence)
        for number, (bundle, part) in enumerate(zip(bundles, parts, strict=True), 1)
    ]


def _stage(rule: str) -> Stage:
    """Return what the rule does with rows."""
    name, equals, keys = rule.partition("=")
    try:
        more = () if name == "mean" and not equals else (f"method.add.{name}={keys if equals else '{}'}",)
        method = build_method(load("digits-tasks", more).method)
    except RecipeError as error:
        raise UserError(f"merge: --rule {rule}: {str(error).splitlines()[-1]}") from None
    plain, stage = Method(name=method.name), method.edge >> method.stage
    beside = sorted(field for field in stage.traits.reads if ":" in field)
    if beside:
        raise UserError(
            f"merge: --rule {rule} reads {beside[0].partition(':')[2]} from training, which exported models do not have"
        )
    if replace(method, edge=plain.edge, stage=plain.stage) != plain or not stage.traits.reduces:
        raise UserError(
            f"merge: --rule {rule} changes more than the combination of rows, and merging does only that; choose "
            "another rule"
        )
    return stage


def _common(module: MultiTask) -> Layout:
    """Return what tasks share and training changes."""
    return Layout.from_module(module).common.parameters


def _same_network(folder: Path, module: MultiTask, other: Path, first: MultiTask) -> None:
    """Refuse networks whose common parts differ, and frozen parts with other values."""
    mine, theirs = ({b.name: b.shape for b in _common(m).blocks} for m in (module, first))
    for name in sorted({*mine, *theirs}):
        if mine.get(name) != theirs.get(name):
            raise UserError(f"merge: {name} is {mine.get(name)} in {folder} and {theirs.get(name)} in {other}")
    frozen = {name: p for name, p in module.named_parameters() if not p.requires_grad}
    for name, value in first.named_parameters():
        if name in frozen and not torch.equal(frozen[name], value):
            raise UserError(
                f"merge: {name}, which was not trained, differs in {folder} and {other}: the models have no common "
                "start"
            )


def _tasks(models: Sequence[Path], bundles: Sequence[Bundle]) -> list[Task]:
    """Return all tasks, in order; refuse two that are not the same under one name."""
    by_name: dict[str, tuple[Task, Path]] = {}
    for folder, bundle in zip(models, bundles, strict=True):
        for task in bundle.tasks:
            known, where = by_name.setdefault(task.name, (task, folder))
            named = [b.about.classes.get(task.name) for b in bundles if task.name in {t.name for t in b.tasks}]
            if described([known]) != described([task]) or named != named[:1] * len(named):
                raise UserError(f"merge: task {task.name!r} is not the same in {folder} and {where}")
    return [task for task, _ in by_name.values()]


def _averaged(modules: Sequence[MultiTask]) -> dict[str, Tensor]:
    """Return each tensor as the mean over the models that have it; of whole numbers the first."""
    states = [module.state_dict() for module in modules]
    means = {}
    for name in {name: None for state in states for name in state}:
        values = [state[name] for state in states if name in state]
        floating = values[0].is_floating_point() and len(values) > 1
        means[name] = torch.stack(values).mean(0) if floating else values[0]
    return means


def _written(
    out: Path,
    like: Bundle,
    tasks: Sequence[Task],
    state: Mapping[str, Tensor],
    rule: str,
    models: Sequence[Path],
    licence: str,
) -> Path:
    """Return a merged model in its folder, with a card that says what it is made of."""
    module = network(like.recipe, like.about.input_shape, like.about.signal, tasks)
    try:
        module.load_state_dict(state)
    except RuntimeError as error:
        raise UserError(f"merge: expected models with the parts of {models[0]}: {error}") from None
    made = {"fedloom": __version__, "method": f"{rule} of {len(models)} models", "licence": licence, "table": None}
    facts = like.about.model_copy(update={**made, "client": None, "task": None, "tasks": described(tasks)})
    names = ", ".join(folder.name for folder in models)
    card = (
        f"---\nlicense: {licence}\nlibrary_name: fedloom\n---\n\n# {like.recipe.name}: merged by {rule}\n\n"
        f"`fedloom study merge` made this of {names}. It was not measured. {RECIPE} is the recipe of one of them.\n"
    )
    files = {RECIPE: dump(like.recipe), CARD: card, **loader(module, facts, tasks), **words_file(like.words)}
    return write(out, state, facts, files)
