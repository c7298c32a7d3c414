"""Test what a finished run keeps of its predictions: confusion matrices that agree with the final numbers, and
pictures.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import fedloom
from fedloom.data.drawing import label, wrong
from fedloom.federation.recipes import load
from fedloom.federation.recipes.schema import recipe_hash
from fedloom.federation.rounds import measure, showing
from fedloom.federation.rounds.build import build
from fedloom.federation.rounds.worker import EvalJob, Worker
from fedloom.federation.runs.folder import RunFolder
from fedloom.federation.runs.reader import Run
from fedloom.models.tasks.dense import Depth, as_label
from tests_support import Stop, load_recipe

Image = pytest.importorskip("PIL.Image")

SCENES = (
    *("data.count=24", "data.test_count=6", "training.rounds=1", "training.epochs=1", "early_stopping=null"),
    "training.schedule.warmup=0",
)


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Peers with personal models and dense tasks."""
    return fedloom.run(load("dfmtl-scenes", SCENES), tmp_path_factory.mktemp("scenes") / "run").folder


def kept(folder: Path, name: str = showing.CONFUSION) -> dict[str, Any]:
    return json.loads((folder / showing.PREDICTIONS / name).read_text())


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((folder / showing.PREDICTIONS).iterdir())}


def shares(folder: Path) -> dict[tuple[str, str], float]:
    """(client, task) -> share of what is counted that is right."""
    return {
        (client, task): np.trace(counts) / counts.sum()
        for task, about in kept(folder)["tasks"].items()
        for one in about["models"]
        for client in one["clients"]
        for counts in [np.array(one["counts"])]
    }


def finals(folder: Path, metric: str) -> dict[tuple[str, str], float]:
    run = Run.read(folder)
    return {
        (client, task): value
        for task in run.info["tasks"]
        for client, value in run.scores(task, metric).get(run.info["final_round"], {}).items()
    }


@pytest.mark.parametrize(
    "changes",
    [
        ("method=fedavg",),
        ("method=local",),
        ("method=ditto",),
        ("method=fedper",),
        ("method={name: fedbabu, tune: 1}",),
        ("method=matu",),
        ("method=fedproto",),
        ("method=fedavg", "recipe=digits-domains"),
        ("method=fedavg", "peers={graph: ring}"),
        ("method=ditto", "evaluation.models=[global]"),
    ],
    ids=lambda changes: " ".join(changes),
)
def test_the_diagonal_is_the_final_accuracy(changes: tuple[str, ...], tmp_path: Path) -> None:
    names = [change.removeprefix("recipe=") for change in changes if change.startswith("recipe=")]
    plain = [change for change in changes if not change.startswith("recipe=")]
    folder = fedloom.run(load_recipe(*plain, recipe=names[0] if names else "digits-tasks"), tmp_path / "run").folder
    wanted = finals(folder, "accuracy")
    assert wanted
    assert shares(folder) == wanted


def test_pixels_agree_with_pixel_accuracy(scenes: Path) -> None:
    wanted = finals(scenes, "pixel_accuracy")
    assert wanted
    assert shares(scenes) == pytest.approx(wanted)


def test_early_stopping_shows_the_model_that_is_kept(tmp_path: Path) -> None:
    # nothing is better by so much
    recipe = load_recipe("training.rounds=4", "early_stopping={patience: 2, min_delta: 5}")
    folder = fedloom.run(recipe, tmp_path / "run").folder
    info = Run.read(folder).info
    assert (info["status"], kept(folder)["round"]) == ("stopped early", info["final_round"])
    assert info["final_round"] < info["rounds"]
    assert shares(folder) == finals(folder, "accuracy")


def test_clients_with_one_model_and_the_same_data_share_a_matrix(tmp_path: Path) -> None:
    tasks = kept(fedloom.run(load_recipe("method=fedavg"), tmp_path / "run").folder)["tasks"]
    clients = build(load_recipe()).federation.clients
    for task, about in tasks.items():
        (one,) = about["models"]
        assert one["clients"] == [name for name, client in clients.items() if task in client.tasks]
        assert (one["model"], one["data"], about["in_all"]) == ("global", "shared test", 1)
        assert sum(map(sum, one["counts"])) == one["examples"] == one["examples_in_all"]


def test_what_the_last_round_measured_is_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[tuple[str, bool]] = []
    evaluate = Worker.evaluate

    def noted(self: Worker, job: EvalJob) -> Any:
        counted.extend([(job.client, job.personal)] if job.counted else [])
        return evaluate(self, job)

    monkeypatch.setattr(Worker, "evaluate", noted)
    run = fedloom.run(load_recipe(), tmp_path / "run")
    matrices = (run.folder / showing.PREDICTIONS / showing.CONFUSION).read_text()
    once = [*counted]
    assert len(once) == len({*once}) > 0
    shutil.rmtree(run.folder / showing.PREDICTIONS)
    fedloom.resume(run.folder)  # it knows only what is on disk
    assert counted == [*once, *once]
    assert (run.folder / showing.PREDICTIONS / showing.CONFUSION).read_text() == matrices


def test_workers_do_not_change_what_is_kept(scenes: Path, tmp_path: Path) -> None:
    fedloom.run(load("dfmtl-scenes", (*SCENES, "runtime.workers=2")), tmp_path / "run")
    assert files(tmp_path / "run") == files(scenes)


def test_pictures_are_of_the_input_the_label_and_the_kept_models_answer(scenes: Path) -> None:
    (part,) = kept(scenes, showing.INDEX)["parts"]
    built = build(*RunFolder.read(scenes)[:1], partition=RunFolder.read(scenes)[1])
    assert [e["position"] for e in part["examples"]] == [0, 1, 3, 5]  # evenly spaced over six
    models = fedloom.engines.api.trained_models(scenes)
    dense = {task.name: task for task in built.federation.tasks}
    assert [about["task"] for about in part["tasks"]] == list(dense)
    for about in part["tasks"]:
        task = dense[about["task"]]
        client = built.federation.clients[about["client"]]
        built.module.load_state_dict(models[client.id])
        built.module.eval()
        x, truth = client.test.examples.batch(torch.tensor([3]), torch.device("cpu"))
        with torch.inference_mode():
            output = built.module(x, (task.name,))[task.name][0]
        target = truth[task.name][0]
        for what, (drawn, text) in {
            "truth": label(task, target),
            "answer": label(task, as_label(task, output), target),
            "wrong": wrong(task, target, as_label(task, output)),
        }.items():
            cell = about[what][2]
            assert cell["text"] == text
            with Image.open(scenes / showing.PREDICTIONS / cell["file"]) as picture:
                found = np.asarray(picture, np.int64)
            assert drawn is not None
            # batches of other sizes round otherwise
            assert (np.abs(found - drawn) > 2).mean() < 0.001


def answers(folder: Path, name: str) -> dict[tuple[str, int], bytes]:
    """(task, number of the example) -> the picture of the answer that an index names."""
    return {
        (task["task"], number): (folder / showing.PREDICTIONS / cell["file"]).read_bytes()
        for part in kept(folder, name)["parts"]
        for task in part["tasks"]
        for number, cell in enumerate(task["answer"])
    }


def test_the_answers_of_earlier_rounds_stay(scenes: Path, tmp_path: Path) -> None:
    folder = fedloom.run(load("dfmtl-scenes", (*SCENES, "training.rounds=2")), tmp_path / "run").folder
    indices = [name for name in files(folder) if name.endswith(".json")]
    assert indices == [showing.CONFUSION, showing.INDEX, "round-1.json", "round-2.json"]
    assert answers(folder, "round-2.json") == answers(folder, showing.INDEX)  # kept too, for the run may go on
    assert answers(folder, "round-1.json") == answers(scenes, showing.INDEX)  # whose only round it is
    assert answers(folder, "round-1.json") != answers(folder, showing.INDEX)


@pytest.mark.parametrize(
    ("shape", "drawn"), [((1, 8, 8), True), ((3, 8, 8), True), ((2, 8, 8), False), ((4, 8, 8), False), ((8,), False)]
)
def test_only_grey_and_coloured_images_are_drawn(shape: tuple[int, ...], drawn: bool) -> None:
    client = SimpleNamespace(id="a")
    federation = SimpleNamespace(tasks=(Depth("depth"),), holder=lambda task: client)
    built: Any = SimpleNamespace(dataset=SimpleNamespace(input_shape=shape), federation=federation)
    group: Any = SimpleNamespace(members=[(client, SimpleNamespace(tasks=("depth", "other")))])
    assert showing._shown(built, [group]) == [("depth",) if drawn else ()]


def test_a_large_picture_is_shrunk(tmp_path: Path) -> None:
    showing._save(tmp_path, "a.png", np.zeros((200, 400, 3), np.uint8))
    with Image.open(tmp_path / "a.png") as picture:
        assert picture.size == (160, 80)


def test_a_model_that_went_astray_is_drawn_black_and_not_an_error() -> None:
    depth = next(t for t in build(load("dfmtl-scenes", SCENES)).federation.tasks if t.kind == "depth")
    astray = torch.tensor([[[float("nan"), float("inf")], [3e38, 1.0]]])
    drawn, _ = label(depth, showing._drawable(as_label(depth, astray)), torch.tensor([[[1.0, 1.0], [1.0, 1.0]]]))
    assert drawn is not None
    assert drawn[0, 0].tolist() == [0, 0, 0]
    assert drawn[0, 1].any()


def test_written_when_a_run_was_stopped_just_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load_recipe("method=ditto")
    whole = files(fedloom.run(recipe, tmp_path / "whole").folder)

    def crash(*args: Any) -> None:
        raise Stop

    with monkeypatch.context() as patch:
        patch.setattr("fedloom.engines.api.keep", crash)
        with pytest.raises(Stop):
            fedloom.run(recipe, tmp_path / "run")
    assert not (tmp_path / "run" / showing.PREDICTIONS).exists()
    fedloom.resume(tmp_path / "run")
    assert files(tmp_path / "run") == whole
    shutil.rmtree(tmp_path / "run" / showing.PREDICTIONS)
    fedloom.resume(tmp_path / "run")  # which is finished, as one from before there were predictions
    assert files(tmp_path / "run") == whole


def test_without_pillow_there_are_matrices_and_no_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    fedloom.run(load("dfmtl-scenes", SCENES), tmp_path / "run")
    assert list(files(tmp_path / "run")) == [showing.CONFUSION]


def test_nothing_where_the_recipe_says_so(tmp_path: Path) -> None:
    off = load_recipe("evaluation.predictions=false")
    for number, recipe in enumerate((off, load_recipe("evaluation.splits=[val]"))):
        assert not (fedloom.run(recipe, tmp_path / str(number)).folder / showing.PREDICTIONS).exists()
    assert recipe_hash(off) == recipe_hash(load_recipe())  # no result differs


def test_caps_leave_out_what_is_too_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "MODELS", 1)
    tasks = kept(fedloom.run(load_recipe("method=local"), tmp_path / "all").folder)["tasks"]
    assert {(len(about["models"]), about["in_all"]) for about in tasks.values()} == {(1, 2)}
    monkeypatch.setattr(measure, "CLASSES", 9)  # digits are ten
    fewer = kept(fedloom.run(load_recipe("method=local"), tmp_path / "fewer").folder)["tasks"]
    assert set(tasks) - set(fewer) == {"digit"}


def test_examples_at_nodes_stay_there(tmp_path: Path) -> None:
    pytest.importorskip("flwr")
    fedloom.run(load_recipe("runtime.engine=flower", "training.rounds=1"), tmp_path / "run")
    assert (tmp_path / "run" / "model.safetensors").is_file()
    assert not (tmp_path / "run" / showing.PREDICTIONS).exists()
