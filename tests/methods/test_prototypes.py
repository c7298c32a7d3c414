"""Methods on prototypes through whole runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fedloom import methods
from fedloom.core.untrusted import Sender
from fedloom.engines.api import Result, trained_models
from fedloom.methods.prototypes.aggregation import ClassLabels
from tests_support import assert_same

Quick = Callable[..., Result]


def beside(result: Result, direction: str, round_: int) -> dict[str, int]:
    """Bytes beside the model, by client."""
    lines = map(json.loads, (result.folder / "bytes.jsonl").read_text().splitlines())
    line = next(line for line in lines if line["round"] == round_)
    return {e["client"]: e["bytes"] for e in line[direction] if e["role"] == "side"}


@pytest.mark.parametrize(
    "method",
    [
        "{name: fedproto, lam: 0}",
        "{name: fedtgp, lam: 0, server_epochs: 2}",
        "{name: fedsa, lam: 0, margin: 0, calibration: 0}",
        "{name: fedrcl, lam: 0}",
    ],
)
def test_without_its_terms_it_is_fedavg(quick: Quick, method: str) -> None:
    assert_same(quick(), quick(f"method={method}"))


def test_labels_of_prototypes_are_of_the_senders_own_tasks() -> None:
    def read(labels: torch.Tensor) -> torch.Tensor:
        return ClassLabels().read(labels, Sender(classes={0: 2, 3: 1}))

    for good in ([[0, 0, 5], [0, 1, 0]], [[3, 0, 7]], [[0, 0, 5], [0, 1, 0], [3, 0, 7]]):
        assert read(torch.tensor(good)).tolist() == good
    for bad in ([[0, 0, 5]], [[0, 1, 5], [0, 0, 5]], [[7, 0, 5]], [[3, 0, 7], [0, 0, 5], [0, 1, 0]], [[3, 0, -1]]):
        with pytest.raises(ValueError, match="expected"):
            read(torch.tensor(bad))


def test_without_a_classification_it_is_fedavg(quick: Quick, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDLOOM_CACHE", str(tmp_path / "cache"))
    small = ("data.count=24", "data.test_count=4", "training.batch_size=4", "training.steps=1", "evaluation.every=2")
    expected, found = (quick(f"method={m}", *small, recipe="feddea/scenes") for m in ("fedavg", "fedsa"))
    assert_same(expected, found)


@pytest.mark.parametrize("name", ["fedproto", "fpl", "fedtgp", "fedsa"])
def test_terms_start_in_the_second_round(quick: Quick, name: str) -> None:
    method = f"method={name}"
    assert_same(quick("training.rounds=1"), quick(method, "training.rounds=1"), models_only=True)
    with pytest.raises(AssertionError):
        assert_same(quick("training.rounds=2"), quick(method, "training.rounds=2"), models_only=True)


def test_what_travels_beside_the_model_is_counted(quick: Quick) -> None:
    result = quick("method=fedproto", "model={name: small-cnn, hidden: 5}")
    # n, prototypes of ten classes, their labels
    assert beside(result, "up", 1)["digit-0"] == 8 + 10 * 5 * 4 + 10 * 3 * 8
    assert not beside(result, "down", 1)
    down = beside(result, "down", 2)
    assert len(set(down.values())) == 1
    assert next(iter(down.values())) % (5 * 4 + 2 * 8) == 0


def test_prototypes_alone_may_travel(quick: Quick) -> None:
    method = methods.fedproto(share="nothing")
    assert method.shares_nothing
    result = quick("method={name: fedproto, share: nothing, lam: 0}")
    local = quick("method=local")
    a, b = trained_models(result.folder), trained_models(local.folder)
    assert a.keys() == b.keys()
    for client, model in a.items():
        assert all(torch.equal(model[name], tensor) for name, tensor in b[client].items()), client
    pulled = trained_models(quick("method={name: fedproto, share: nothing}").folder)
    assert any(not torch.equal(pulled["digit-0"][name], tensor) for name, tensor in a["digit-0"].items())


def test_modules_of_f2dc_go_with_fpl(quick: Quick) -> None:
    options: dict[str, Any] = {"recipe": "f2dc/digits-embedded"}
    tiny = ("data.size=16", "model.width=4", "training.batch_size=16", "evaluation.splits=[test]")
    method = "method={name: fpl, add: {feature-modules: {}}}"
    (model,) = trained_models(quick(method, *tiny, **options).folder).values()
    assert all(bool(torch.isfinite(v).all()) for v in model.values() if v.is_floating_point())
