"""Models of finished runs and exports with the right checksums whose tensors no run wrote: each reader refuses them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import fedloom
from fedloom.engines.result import Result
from fedloom.errors import StateError
from fedloom.experiments.export.bundle import Bundle, export
from fedloom.experiments.export.finished import open_runs, task_models
from fedloom.federation.runs.recorded import MODEL, checksum, sum_of
from tests_support import load_recipe

TINY = (
    *("data={name: digits, tasks: [digit, holes], size: 8}", "partition={name: one-task}", "method=local"),
    *("model={name: small-cnn, width: 4, hidden: 8}", "training.rounds=1", "training.batch_size=16"),
)
READERS: dict[str, Callable[[Path, str, Path], Any]] = {
    "model": lambda run, client, out: Result(run, "").model(client),
    "export": lambda run, client, out: export(run, out, client=client),
    "task vectors": lambda run, client, out: task_models(run),
    "open runs": lambda run, client, out: open_runs([run])[0].network(client),
}


def others(value: Tensor) -> Iterator[tuple[str, Tensor | None]]:
    """What a stranger may put in a tensor's place (None: nothing), with what is said of it."""
    shape, expected = [*value.shape], f"expected {[*value.shape]}"
    yield f"nothing found, {expected}", None
    for kind, what in ((torch.int64, "integers"), (torch.bool, "integers"), (torch.complex64, "complex numbers")):
        yield f"{shape} of {what} found, {expected}", value.to(kind)
    yield f"{[value.numel()]} found, {expected}", value.reshape(-1)
    yield f"{[1, *shape]} found, {expected}", value[None]
    yield f"expected finite numbers, found {value.numel()} that are not finite", value * torch.nan


def resigned(run: Path) -> None:
    """Write the checksum of the models into a run's files, as a stranger would."""
    info = json.loads((run / "run.json").read_text())
    info["files"][MODEL] = sum_of(run / MODEL)
    info["check"] = checksum({key: value for key, value in info.items() if key != "check"})
    (run / "run.json").write_text(json.dumps(info))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fedloom.run(load_recipe(*TINY), tmp_path_factory.mktemp("runs") / "run").folder


@pytest.mark.parametrize("reader", READERS)
def test_a_run_with_a_tensor_of_another(reader: str, finished: Path, tmp_path: Path) -> None:
    run, tensors = tmp_path / "run", load_file(finished / MODEL)
    shutil.copytree(finished, run)
    key = next(key for key in tensors if key.endswith("conv2.weight"))
    _, client, name = key.split("/")
    for sentence, other in others(tensors[key]):
        save_file({k: t for k, t in {**tensors, key: other}.items() if t is not None}, run / MODEL)
        resigned(run)
        with pytest.raises(StateError) as caught:
            READERS[reader](run, client, tmp_path / "out")
        assert str(caught.value) == f"{run / MODEL} does not fit the recipe: {client}: {name}: {sentence}"
    save_file({**tensors, f"client/{client}/more": torch.zeros(1)}, run / MODEL)
    resigned(run)
    with pytest.raises(StateError, match=r"more: \[1\] found, expected nothing"):
        READERS[reader](run, client, tmp_path / "out")


def test_an_export_with_a_tensor_of_another(finished: Path, tmp_path: Path) -> None:
    client = next(iter(Result(finished, "").run.info["clients"]))
    folder = export(finished, tmp_path / "export", client=client)
    about, tensors = json.loads((folder / "export.json").read_text()), load_file(folder / MODEL)
    key = "encoder.conv2.weight"
    for sentence, other in others(tensors[key]):
        save_file({k: t for k, t in {**tensors, key: other}.items() if t is not None}, folder / MODEL)
        about["weights_sha256"] = sum_of(folder / MODEL)[1]
        (folder / "export.json").write_text(json.dumps(about))
        with pytest.raises(StateError) as caught:
            Bundle.read(folder)
        assert str(caught.value) == f"{folder / MODEL} does not fit recipe.yaml: {key}: {sentence}"


def test_no_run_starts_from_a_model_that_another_did_not_write(tmp_path: Path) -> None:
    run = fedloom.run(load_recipe(*TINY, "method=fedavg"), tmp_path / "run").folder
    save_file({key: t + 1 for key, t in load_file(run / MODEL).items()}, run / MODEL)
    for start in (run, run / MODEL):
        with pytest.raises(StateError, match=r"model\.safetensors: the content differs from what the run wrote"):
            fedloom.run(load_recipe(*TINY, "method=fedavg", f"model.start={start}"), tmp_path / "next")
