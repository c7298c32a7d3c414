"""Predictions of a run's models on test data, for people to look at: confusion matrices of the final ones, and answers
to a few images over the rounds. Kept in the folder `predictions` of the run, as JSON and small PNGs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedloom.core.context import State
from fedloom.core.errors import UserError, naming
from fedloom.core.grouping import grouped
from fedloom.core.lazy import need
from fedloom.data.drawing import extent, label, legend_of_wrong, legends, pictures, wrong
from fedloom.data.prepare import Array
from fedloom.federation.rounds.built import Built
from fedloom.federation.rounds.federation import BuiltClient
from fedloom.federation.rounds.measure import SEEN, SPLIT, MeasuredGroup, counted_tasks, groups
from fedloom.federation.rounds.worker import COUNTS, Executor, LookJob
from fedloom.federation.runs import checkpoint
from fedloom.federation.runs.reader import CONFUSION, INDEX, PREDICTIONS, index_of
from fedloom.models.tasks.dense import DenseTask, as_label
from fedloom.models.tasks.task import IGNORE

EXAMPLES = 4
"""Images whose predictions are kept."""
SIDE = 160
"""At most so many pixels on the longer side of a picture."""
_FAR = 1e6  # larger answers are drawn as this


def keep(folder: Path, built: Built, executor: Executor, state: State, final: bool = True) -> None:
    """Write the folder `predictions` of a run from its final state, with the models that a task's final numbers belong
    to. Nothing is written if the recipe does not want it or does not measure on test data.

    With another state than the final one there are only pictures. A round's answers stay when later ones take their
    place, those of the final one too, for the run may go on. Pictures need Pillow; without it there are none.
    """
    evaluation = built.recipe.evaluation
    if not evaluation.predictions or SPLIT not in evaluation.splits:
        return
    used = groups(built, state, (SPLIT,), used=True)
    counted, shown = counted_tasks(built, used) if final else [()] * len(used), _shown(built, used)
    if not any(counted) and not any(shown):
        return
    counts = [
        state.get(SEEN, {}).get(group.key, {}) if tasks else {} for group, tasks in zip(used, counted, strict=True)
    ]
    jobs = [group.job(number, state["round"], counted=counted[number]) for number, group in enumerate(used)]
    for number, scores in executor.run([job for job in jobs if job.counted and not counts[job.key]]):
        counts[number] = scores[COUNTS]
    looks = [LookJob(**{**vars(job), "shown": tasks, "some": EXAMPLES}) for job, tasks in zip(jobs, shown, strict=True)]
    seen: dict[int, Mapping[str, Tensor]] = dict(executor.run([job for job in looks if job.shown]))
    home = folder / PREDICTIONS
    home.mkdir(exist_ok=True)
    about = {"round": state["round"], "split": SPLIT}
    if any(counted):
        matrices = _confusions(built, used, counts)
        checkpoint.write_text(home / CONFUSION, json.dumps({**about, "tasks": matrices}))
    if any(shown):
        parts = _pictures(built, used, shown, seen, home)
        checkpoint.write_text(home / INDEX, json.dumps({**about, "parts": parts}))
        for task in (task for part in parts for task in part["tasks"]):
            task["wrong"] = []
            for cell in task["answer"]:
                name = f"round-{state['round']}-{cell['file']}"
                shutil.copy(home / cell["file"], home / name)
                cell["file"] = name
        checkpoint.write_text(home / index_of(state["round"]), json.dumps({**about, "parts": parts}))


def some_examples(
    client: BuiltClient, tasks: Sequence[DenseTask], count: int
) -> tuple[Tensor, Mapping[str, Tensor], Array]:
    """Return (inputs, labels, inputs as pictures) of at most `count` examples, evenly spaced over a test part."""
    part = client.test.spread(count)
    x, truth = part.examples.batch(part.index, torch.device("cpu"), tasks=[task.name for task in tasks])
    return x, truth, pictures(part.examples, x, part.index)


def _shown(built: Built, used: Sequence[MeasuredGroup]) -> list[tuple[str, ...]]:
    """Return, for each group, the dense tasks whose pictures show its model: that of the first client with the task."""
    shape = built.dataset.input_shape
    try:
        need("PIL.Image", "vision")
    except UserError:
        return [()] * len(used)
    if len(shape) != 3 or shape[0] not in (1, 3):
        return [()] * len(used)
    holders = {t.name: built.federation.holder(t.name).id for t in built.federation.tasks if isinstance(t, DenseTask)}
    return [
        tuple(t for client, model in group.members for t in model.tasks if holders.get(t) == client.id)
        for group in used
    ]


def _confusions(built: Built, used: Sequence[MeasuredGroup], counts: Sequence[Mapping[str, Tensor]]) -> dict[str, Any]:
    """Return task -> what is counted, the number of models, and for some of them the owner and the counts."""
    clients = built.federation.clients
    by_task: dict[str, Any] = {}
    for task in built.federation.tasks:
        with_it = [number for number, group in enumerate(used) if task.name in group.tasks]
        of = []
        for number in (number for number in with_it if task.name in counts[number]):
            group = used[number]
            part = clients[group.client].part(SPLIT)
            looked = len(part.of(task.name))
            of.append(
                {
                    "clients": [client.id for client, model in group.members if task.name in model.tasks],
                    "model": group.model.name,
                    "data": f"{part.name} {SPLIT}",
                    "examples": looked,
                    "examples_in_all": looked,
                    "counts": counts[number][task.name].tolist(),
                }
            )
        if of:
            unit = "pixels" if task.dense else "examples"
            names = list(built.dataset.classes.get(task.name, ()))
            by_task[task.name] = {"unit": unit, "models": of, "in_all": len(with_it), "classes": names}
    return by_task


def _pictures(
    built: Built,
    used: Sequence[MeasuredGroup],
    shown: Sequence[tuple[str, ...]],
    seen: Mapping[int, Mapping[str, Tensor]],
    home: Path,
) -> list[dict[str, Any]]:
    """Write the pictures, and return what they show: for each part of the test data, its examples and its tasks."""
    of = {task: number for number, tasks in enumerate(shown) for task in tasks}
    dense = [task for task in built.federation.tasks if isinstance(task, DenseTask) and task.name in of]
    by_part = grouped((id(built.federation.holder(task.name).test), task) for task in dense)
    parts = []
    for place, tasks in enumerate(by_part.values()):
        holder = built.federation.holder(tasks[0].name)
        _, truth, inputs = some_examples(holder, tasks, EXAMPLES)
        positions = holder.test.spread(EXAMPLES).positions.tolist()
        examples = [
            {"position": position, "input": _save(home, f"{place}-{row}-input.png", picture, smooth=True)}
            for row, (position, picture) in enumerate(zip(positions, inputs, strict=True))
        ]
        about = []
        for column, task in enumerate(tasks):
            group = used[of[task.name]]
            cells: dict[str, list[dict[str, Any]]] = {"truth": [], "answer": [], "wrong": []}
            answers = [_drawable(as_label(task, out)) for out in seen[of[task.name]][task.name]]
            for row, (target, answer) in enumerate(zip(truth[task.name], answers, strict=True)):
                drawn = {
                    "truth": label(task, target),
                    "answer": label(task, answer, target),
                    "wrong": wrong(task, target, answer),
                }
                for what, (picture, text) in drawn.items():
                    assert picture is not None  # a dense label is drawn
                    file = _save(home, f"{place}-{row}-{column}-{what}.png", picture)
                    cells[what].append({"file": file, "text": text})
                if task.kind == "depth":
                    cells["truth"][-1]["ends"] = [f"{end:.1f} m" for end in extent(target)]
            client = built.federation.holder(task.name).id
            meant = legends(built.dataset, [task], truth, {task.name: torch.stack(answers)})[task.name]
            means = {"legend": dict(meant), "wrong_legend": dict(legend_of_wrong(task))}
            whose = {"task": task.name, "kind": task.kind, "model": group.model.name, "client": client}
            about.append({**whose, **cells, **means})
        data = f"{holder.test.name} {SPLIT}"
        parts.append({"data": data, "domain": holder.domain, "examples": examples, "tasks": about})
    return parts


def _drawable(answer: Tensor) -> Tensor:
    """Return predictions that can be drawn: nan of a diverged model becomes black, and no number is too large."""
    if not answer.is_floating_point():
        return answer
    return answer.nan_to_num(IGNORE, _FAR, -_FAR).clamp(-_FAR, _FAR)


def _save(home: Path, name: str, picture: Array, smooth: bool = False) -> str:
    """Write a picture (H x W x 3), shrunk if it is large; returns its name."""
    library = need("PIL.Image", "vision")
    image = library.fromarray(picture)
    how = library.Resampling.BOX if smooth else library.Resampling.NEAREST
    if max(image.size) > SIDE:
        scale = SIDE / max(image.size)
        image = image.resize(tuple(max(1, round(side * scale)) for side in image.size), how)
    with naming(home / name):
        image.save(home / name)
    return name
