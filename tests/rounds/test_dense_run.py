"""Dense tasks through the runner: same results everywhere, own decoders only, and a picture."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import fedloom
from fedloom.errors import RecipeError, StateError
from fedloom.experiments.export.predictions import predictions
from fedloom.federation.recipes import load
from fedloom.federation.recipes.schema import Recipe
from fedloom.federation.rounds.build import build
from fedloom.federation.rounds.rounds import initial_state
from fedloom.federation.rounds.server import dispatch
from fedloom.training import FlatModel
from tests_support import assert_same, client_step, load_recipe

SMALL = (
    "data.count=24",
    "data.test_count=4",
    "training.rounds=2",
    "training.epochs=1",
    "training.batch_size=4",
    "evaluation.every=2",
)


def recipe(*changes: str) -> Recipe:
    return load("feddea/scenes", (*SMALL, *changes))


def test_workers_and_resume_do_not_matter_with_augmentation_and_batch_norm(tmp_path: Path) -> None:
    class Stop(Exception):
        pass

    class Crash(fedloom.engines.api.Progress):
        def client(self, round: int, done: int, of: int) -> None:
            if round == 2 and done == of:
                raise Stop

    whole = fedloom.run(recipe(), tmp_path / "one")
    assert_same(whole, fedloom.run(recipe("runtime.workers=2"), tmp_path / "two"))
    with pytest.raises(Stop):
        fedloom.run(recipe(), tmp_path / "stopped", progress=Crash())
    assert_same(whole, fedloom.resume(tmp_path / "stopped"))


def test_a_client_moves_its_own_decoder_and_no_other_by_one_bit() -> None:
    built = build(recipe("training.optimizer.weight_decay=0.5"))
    model = FlatModel.copy_of(built.module)
    client = built.federation.clients["depth-0"]
    message = dispatch(built, initial_state(built)["server"], [client.id])[client.id]
    client_step(built.method, model, built.federation, client, message, {}, fedloom.Ctx(1), built.recipe.training)
    moved = {b.task for b, s in zip(model.layout.blocks, model.layout.slices, strict=True)
             if not torch.equal(model.vector[s], model.initial[s])}  # fmt: skip
    assert moved == {None, "depth"}  # running statistics of other decoders stay as well


def test_a_task_of_weight_zero_is_never_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = "[{semseg: 1, depth: 0}, {depth: 1, normals: 0.5}, {edge: 1}]"
    built = build(recipe(f"partition={{name: task-weights, weights: {rows}}}"))
    client = built.federation.clients["c00"]
    assert set(client.tasks) == {"semseg"}
    called = []
    for name, decoder in built.module.decoders.items():
        decoder.register_forward_hook(lambda *args, name=name: called.append(name))
    model = FlatModel(built.module, built.layout)
    message = dispatch(built, initial_state(built)["server"], ["c00"])["c00"]
    args = (built.federation, client, message, {}, fedloom.Ctx(1), built.recipe.training)
    client_step(built.method, model, *args)
    assert set(called) == {"semseg"}


def test_dense_data_is_not_stacked() -> None:
    with pytest.raises(RecipeError, match="training.stacked: data set 'scenes' may augment its batches"):
        build(recipe("training.stacked=true"))


@pytest.mark.parametrize("method", ["fedavg", "local"])
def test_a_picture_of_a_run(tmp_path: Path, method: str) -> None:
    result = fedloom.run(recipe(f"method={method}"), tmp_path / "run")
    picture = predictions(result.folder, count=3)
    assert picture.size[0] > 5 * 100  # the image and four tasks; truth and prediction stand below each other
    colours = picture.getcolors(1 << 24)
    assert len(colours) > 100


def test_a_picture_needs_dense_tasks_and_a_finished_run(tmp_path: Path) -> None:
    result = fedloom.run(load_recipe(), tmp_path / "digits")
    with pytest.raises(StateError, match=r"none of its tasks \(digit, parity, large, holes\) is dense"):
        predictions(result.folder)
    result = fedloom.run(recipe(), tmp_path / "run")
    (result.folder / "model.safetensors").unlink()
    with pytest.raises(StateError, match="has no model.safetensors: the run has not finished"):
        predictions(result.folder)
