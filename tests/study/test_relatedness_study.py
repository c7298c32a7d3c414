"""Test how related the tasks of a run are, from its folder."""

from __future__ import annotations

import csv
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import fedloom
from fedloom.engines.api import Result, trained_models
from fedloom.errors import StateError, UserError
from fedloom.experiments.export.finished import task_models
from fedloom.experiments.papers.relatedness import METRICS, clustered, relatedness
from fedloom.federation.runs.folder import RunFolder
from fedloom.relatedness import fisher_diagonal, logme
from fedloom.study.report.related import FILE, PICTURE, Relatedness
from fedloom.taskvectors import sign_similarity
from tests_support import load_recipe

Quick = Callable[..., Result]
SMALL = ("training.rounds=1", "model.width=4", "model.hidden=8", "data.size=8", "evaluation.splits=[test]")
ALONE = "partition={name: one-task, clients_per_task: 2}"
TASKS = ("digit", "parity", "large", "holes")


@pytest.fixture(scope="module")
def matu(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fedloom.run(load_recipe("method=matu", *SMALL), tmp_path_factory.mktemp("matu") / "run").folder


def test_task_vectors_are_the_servers(matu: Path) -> None:
    found = task_models(matu)
    assert found.tasks == TASKS
    with RunFolder(matu) as opened:
        state = opened.load()
    assert state is not None
    for task, vector in found.vectors().items():
        whole = state[0]["server"]["tasks"][task]
        expected = found.built.layout.parameters.take(whole, found.common)
        assert expected.any()
        assert torch.allclose(vector, expected, atol=1e-7)
    assert found.clients["digit"] == ("all-0", "digit-0")
    assert found.notes == ()
    exact = relatedness(matu, ["sign"])
    at = [found.tasks.index(task) for task in exact.tasks]
    S = sign_similarity(torch.stack(list(found.vectors().values()))).numpy()
    assert np.array_equal(exact.scores["sign"], S[np.ix_(at, at)])


def test_of_local_runs_it_is_the_mean_of_those_who_hold_the_task_alone(quick: Quick) -> None:
    partition = "partition={name: one-task, clients_per_task: 2, all_task_clients: 1}"
    folder = quick("method=local", partition, *SMALL).folder
    found = task_models(folder)
    assert found.clients["parity"] == ("parity-0", "parity-1")
    assert found.notes == ("clients with several tasks are left out: all-0",)
    models = trained_models(folder)
    initial = dict(found.built.module.named_parameters())
    name = "encoder.linear.weight"
    place = found.common.slice(name)
    for task in TASKS:
        change = [models[f"{task}-{i}"][name] - initial[name].detach() for i in (0, 1)]
        assert not torch.equal(*change)
        expected = (change[0] + change[1]).reshape(-1) / 2
        assert torch.allclose(found.vectors()[task][place], expected, atol=1e-7)

    saved = load_file(folder / "model.safetensors")
    kept = {key: value for key, value in saved.items() if not key.startswith("client/large-")}
    save_file(kept, folder / "model.safetensors")
    info = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**info, "files": {}, "check": None}))
    with pytest.raises(StateError, match="task 'large' does not have its own model: no client holds it alone"):
        task_models(folder)


def test_all_metrics(matu: Path, tmp_path: Path) -> None:
    told: list[tuple[int, int, str]] = []
    found = relatedness(matu, None, 24, tell=lambda *step: told.append(step))
    assert tuple(found.scores) == METRICS
    assert sorted(found.tasks) == sorted(TASKS)
    for R in found.scores.values():
        assert R.shape == (4, 4)
        assert np.isfinite(R).all()
    assert not np.array_equal(found.scores["logme"], found.scores["logme"].T)  # directed
    assert np.allclose(found.scores["wte"].diagonal(), 0)
    assert np.allclose(found.scores["fim"].diagonal(), 1)
    assert [done for done, _, _ in told] == list(range(10))  # four encoders, four diagonals, one of WTE, the end
    assert {total for _, total, _ in told} == {9}

    both = found.agreement
    assert both.names == METRICS
    text = found.to_text()
    assert "wte, a distance" in text
    assert "Spearman's correlation of metrics over 6 pairs of tasks" in text
    value = json.loads(found.to_json())
    assert value["tasks"] == list(found.tasks)
    assert value["agreement"]["pearson"][0][1] == pytest.approx(both.pearson[0, 1])
    rows = list(csv.DictReader(io.StringIO(found.to_csv())))
    assert len(rows) == 6 * 16
    one = next(r for r in rows if (r["metric"], r["encoder"], r["task"]) == ("logme", "digit", "holes"))
    i, j = found.tasks.index("digit"), found.tasks.index("holes")
    assert float(one["score"]) == found.scores["logme"][i, j]
    assert float(one["symmetrised"]) == pytest.approx((found.scores["logme"][i, j] + found.scores["logme"][j, i]) / 2)

    files = found.write(tmp_path / "out")
    assert [file.name for file in files] == [*(f"{m}.csv" for m in METRICS), "agreement.csv", FILE, PICTURE]
    assert json.loads((tmp_path / "out" / FILE).read_text()) == value
    assert value["about"] == {
        "name": "digits-tasks",
        "method": "matu",
        "data": "digits",
        "seed": 0,
        "clients": dict.fromkeys(TASKS, 2),
        "examples": dict.fromkeys(TASKS, 24),
    }
    assert value["distances"] == ["wte"]
    assert files[-1].stat().st_size > 10_000
    lines = list(csv.reader(files[2].read_text().splitlines()))
    assert lines[0] == ["", *found.tasks]
    assert float(lines[1][2]) == found.scores["logme"][0, 1]


def test_which_encoder_and_whose_examples(matu: Path) -> None:
    """R[s, t] of LogME, and FIM's diagonals, computed here from the saved models and the clients' train examples."""
    found = relatedness(matu, ["logme", "fim"], 10_000)
    tasks = task_models(matu)
    built, models = tasks.built, trained_models(matu)

    def examples(task: str) -> tuple[torch.Tensor, torch.Tensor]:
        held = [c.train.positions for c in built.federation.clients.values() if task in c.tasks]
        x, y = built.dataset.train.batch(torch.from_numpy(np.unique(np.concatenate(held))), torch.device("cpu"))
        return x, y[task]

    built.module.load_state_dict(models["task/holes"])
    x, y = examples("parity")
    with torch.no_grad():
        expected = logme(built.module.encoder(x), y)
    s, t = found.tasks.index("holes"), found.tasks.index("parity")
    assert found.scores["logme"][s, t] == pytest.approx(expected, rel=1e-5)

    class Answers(torch.nn.Module):
        def __init__(self, task: str) -> None:
            super().__init__()
            self.module, self.task = built.module, task

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.module(x, (self.task,))[self.task]

    diagonals = []
    for task in ("holes", "parity"):
        built.module.load_state_dict(models[f"task/{task}"])
        batches = [tuple(part.split(64)) for part in examples(task)]
        diagonals.append(
            fisher_diagonal(Answers(task), zip(*batches, strict=True), "true", parameters=["module.encoder.*"], seed=0)
        )
    a, b = diagonals
    assert found.scores["fim"][s, t] == pytest.approx(float(a @ b / (a.norm() * b.norm())), rel=1e-6)


def test_the_examples_are_capped_and_drawn_from_the_seed(matu: Path) -> None:
    one, two = (relatedness(matu, ["logme"], 16) for _ in range(2))
    assert np.array_equal(one.scores["logme"], two.scores["logme"])
    assert not np.array_equal(one.scores["logme"], relatedness(matu, ["logme"], 17).scores["logme"])


def test_what_is_indistinguishable(quick: Quick) -> None:
    with pytest.raises(StateError, match="'digit' does not have its own model: fedavg leaves one model for all tasks"):
        task_models(quick("method=fedavg", *SMALL).folder)
    with pytest.raises(StateError, match="with fedper all tasks have the same encoder"):
        task_models(quick("method=fedper", ALONE, *SMALL).folder)
    grouped = task_models(quick("method=matfl", "partition=one-task", *SMALL).folder)
    assert any(note.startswith("the same encoder, which cannot be distinguished: ") for note in grouped.notes)


def test_an_unfinished_run_and_unknown_metrics(matu: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"unknown metric 'cosin'\. Did you mean 'cosine'\?"):
        relatedness(matu, ["cosin"])
    copy = shutil.copytree(matu, tmp_path / "copy")
    (copy / "model.safetensors").unlink()
    with pytest.raises(StateError, match="the run has not finished"):
        relatedness(copy)


def test_dense_tasks_have_task_vectors_only(quick: Quick) -> None:
    data = "data={name: scenes, count: 8, test_count: 2, height: 32, width: 32}"
    model = "model={name: tiny-pyramid, width: 4, dim: 8, decoder_norm: group}"
    changes = ("method=local", "partition=one-task", "training.batch_size=2", "training.rounds=1")
    folder = quick(data, model, *changes).folder
    found = relatedness(folder)
    assert tuple(found.scores) == ("sign", "cosine")
    assert sum("is left out: task " in note and "no single answer per example" in note for note in found.notes) == 4
    with pytest.raises(UserError, match="logme cannot be computed: task 'semseg'"):
        relatedness(folder, ["logme"])


def test_clustered_order() -> None:
    S = np.array([[1, 0.1, 0.9, 0.2], [0.1, 1, 0.3, 0.8], [0.9, 0.3, 1, 0.4], [0.2, 0.8, 0.4, 1]])
    # 0 and 2 are merged, then 1 and 3; 2 and 3 are the most similar of different groups, so they touch
    assert clustered(S) == [0, 2, 3, 1]
    S[0, 2] = S[2, 0] = np.nan  # counts as the least
    assert clustered(S)[:1] in ([0], [2], [1])
    assert sorted(clustered(S)) == [0, 1, 2, 3]
    assert clustered(np.ones((1, 1))) == [0]


def test_many_tasks_are_not_printed_as_matrices() -> None:
    names = tuple(f"t{i}" for i in range(13))
    found = Relatedness("made", names, {"sign": np.eye(13), "cosine": np.eye(13)}, ("a note",))
    text = found.to_text()
    assert text.startswith("made: 13 tasks: t0, t1")
    assert "over 78 pairs" in text
    assert text.endswith("note: a note\n")
    assert json.loads(found.to_json())["agreement"]["pearson"] == [[None, None], [None, None]]  # constant off diagonal
