"""Centralised training of a recipe's model, for an encoder to start from: what `fedloom study pretrain` does."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from fedloom.core.context import Ctx, State
from fedloom.core.errors import DataError, RecipeError, StateError, UserError, writing
from fedloom.data.dataset import JoinedExamples
from fedloom.engines.result import texts_of
from fedloom.federation.recipes.schema import Recipe
from fedloom.federation.rounds.build import load_data, starting_model, with_options
from fedloom.federation.rounds.evaluation import Scores, evaluate
from fedloom.federation.rounds.federation import Part
from fedloom.federation.rounds.worker import check_device
from fedloom.federation.runs.checkpoint import save_tensors
from fedloom.training.flat import FlatModel
from fedloom.training.loop import Work, train


@dataclass(frozen=True)
class Pretrained:
    """An encoder's weights in `file`, and what the whole model scored on the test examples."""

    file: Path
    epochs: int
    scores: Scores

    def table(self) -> str:
        """Return tasks x metrics as text."""
        return "\n".join(texts_of(self.scores))


def pretrain(
    recipe: Recipe, epochs: int, file: Path, tell: Callable[[int, float], None] = lambda epoch, loss: None
) -> Pretrained:
    """Train the recipe's encoder with the heads of all tasks on all train examples, and write the encoder to `file`.

    The recipe's partition and method are not used; of `training`, batch size, optimiser (one for all epochs), schedule
    (over these epochs), clip_norm and precision are. The result is a function of the recipe and `epochs`.

    `file` (.safetensors, new) has the encoder's tensors under its own names, as the key `model.weights` reads them, and
    as text: recipe, seed, tasks, epochs (how many are in it), of (how many there will be), and in the end the metrics.
    It is replaced, in one piece, after every epoch; `tell` then gets the epoch's number and its mean loss, summed over
    the tasks with their weights.

    Raises RecipeError for a recipe with LoRA or frozen parts, StateError where the file exists, UserError for another
    suffix and where the model is not finite any more, DataError for data sets that share no batches (`several`).
    """
    if recipe.model.lora is not None:
        raise RecipeError("model.lora: pretraining trains the whole encoder; set model.lora=null")
    if recipe.model.freeze is not None:
        raise RecipeError("model.freeze: pretraining trains the whole encoder; set model.freeze=null")
    if file.suffix != ".safetensors":
        raise UserError(f"{file}: expected a file that ends in .safetensors")
    if file.exists():
        raise StateError(f"{file} exists already: choose another file")
    device = check_device(recipe.runtime.devices[0])
    dataset = with_options(load_data(recipe.data, recipe.seed), recipe.tasks)
    if isinstance(dataset.train, JoinedExamples):
        raise DataError(
            f"data set {dataset.name!r}: batches of pretraining mix all examples, but those of "
            f"{', '.join(dataset.train.pieces)} cannot share batches; pretrain on one of them, or use 'many'"
        )
    seed = recipe.seed
    model = FlatModel(starting_model(recipe.model, seed, dataset), device=device)
    tasks = {task.name: (task, task.weight) for task in dataset.tasks}
    once = {"rounds": epochs, "epochs": 1, "steps": None, "keep_optimizer": True}
    training = recipe.training.model_copy(update=once)
    labels = {"recipe": recipe.name, "seed": str(seed), "tasks": ", ".join(tasks), "of": str(epochs)}
    work = Work("pretrain", dataset.train, torch.arange(len(dataset.train)), tasks)
    optimizer: State = {}
    for epoch in range(1, epochs + 1):
        result = train(model, work, training, Ctx(epoch, seed), memory={"optimizer": optimizer})
        if not bool(torch.isfinite(model.vector).all()):
            kept = f"; {file} holds epoch {epoch - 1}" if epoch > 1 else ""
            raise UserError(f"epoch {epoch}: the model is no longer finite; try a smaller learning rate{kept}")
        optimizer = result.optimizer
        _save(model, file, {**labels, "epochs": str(epoch)})
        tell(epoch, sum(tasks[name][1] * loss for name, loss in result.losses.items()))
    part = Part(dataset.test, np.arange(len(dataset.test), dtype=np.int64), "shared")
    plain = {task.name: task for task in dataset.tasks}
    scores = evaluate(model, part, plain, recipe.evaluation.batch_size, training.channels_last, costly=True)
    metrics = {f"{task}/{name}": f"{value:.6g}" for task, values in scores.items() for name, value in values.items()}
    _save(model, file, {**labels, "epochs": str(epochs), **metrics})
    return Pretrained(file, epochs, scores)


def _save(model: FlatModel, file: Path, labels: dict[str, str]) -> None:
    encoder = model.module.get_submodule("encoder")
    tensors = {name: t.to("cpu", copy=True).contiguous() for name, t in encoder.state_dict().items()}
    part = file.with_suffix(".safetensors.part")
    with writing(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        save_tensors(tensors, part, labels)
        os.replace(part, file)
