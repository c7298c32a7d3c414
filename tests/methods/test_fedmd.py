"""FedMD: predictions on a public set as rows of the matrix, by hand and through whole runs, with models that differ."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedloom as fl
from fedloom.engines.api import Result, recipe_of, trained_models
from fedloom.errors import DataError, RecipeError
from fedloom.federation.rounds.build import build
from fedloom.federation.runs.reader import Run
from tests_support import assert_same, load_recipe

Quick = Callable[..., Result]
ALIKE = f"partition={{name: task-groups, groups: [{', '.join(['[digit, parity, large, holes]'] * 3)}]}}"
PUBLIC = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])


def linear(*weights: float) -> nn.Linear:
    layer = nn.Linear(2, 1, bias=False)
    layer.weight.data = torch.tensor([weights]).float()
    return layer


def deep(width: int = 4) -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, 1))


def data(n: int, seed: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(n, 2, generator=torch.Generator().manual_seed(seed))
    return x, x @ torch.tensor([1.0, -2.0])


def federation(models: dict[str, Any], **more: Any) -> fl.Federation:
    clients = {who: fl.Client(data(8, i), val=0, model=model) for i, (who, model) in enumerate(models.items())}
    return fl.Federation(clients, {"y": fl.task()}, test=data(20, 9), public=PUBLIC, **more)


def outputs(result: Result, who: str) -> Tensor:
    return trained_models(result.folder)[who]["public_outputs.y"]


def test_the_server_has_the_mean_of_the_predictions_and_clients_digest_it(tmp_path: Path) -> None:
    """One step of SGD a round, by hand: revisit, then the consensus, then digest and revisit."""
    fed = federation({"a": linear(1.0, 0.0), "b": linear(0.0, 3.0)})
    how: dict[str, Any] = {"batch_size": 8, "epochs": 1, "lr": 0.1, "model": linear(0.0, 0.0)}
    weights = {"a": torch.tensor([1.0, 0.0]), "b": torch.tensor([0.0, 3.0])}
    consensus = torch.zeros(3)
    for rounds in (1, 2):
        for i, who in enumerate(weights):
            w, (x, y) = weights[who], data(8, i)
            if rounds > 1:  # the mean of |X w - consensus|, over the public set as one batch
                w = w - 0.1 * torch.sign(PUBLIC @ w - consensus) @ PUBLIC / 3
            weights[who] = w - 0.1 * 2 * ((x @ w - y)[:, None] * x).mean(0)
        consensus = torch.stack([PUBLIC @ w for w in weights.values()]).mean(0)
        result = fl.run(fed, tmp_path / str(rounds), method="fedmd", rounds=rounds, **how)
        for who, w in weights.items():
            found = trained_models(result.folder)[who]
            torch.testing.assert_close(next(v for k, v in found.items() if k.startswith("encoder"))[0], w)
            torch.testing.assert_close(found["public_outputs.y"][:, 0], consensus)


def test_models_of_any_shape_learn_together() -> None:
    models = {"a": linear(0.0, 0.0), "b": deep(), "c": deep(9)}
    result = fl.run(federation(models), model=linear(0.0, 0.0), method="fedmd", rounds=30, lr=0.1)
    assert result.final().values["y"]["rmse"] < 1
    assert torch.equal(outputs(result, "a"), outputs(result, "c"))
    assert result.model("c")[0].out_features == 9  # type: ignore[index]


def test_bytes_are_those_of_the_predictions(tmp_path: Path) -> None:
    """Three numbers of four bytes each way, and the number of examples beside them on the way up."""
    fed = federation({"a": linear(1, 1), "b": deep()})
    result = fl.run(fed, tmp_path / "run", model=linear(0, 0), method="fedmd", rounds=1)
    assert Run.read(result.folder).bytes_total() == {"up": 2 * (12 + 8), "down": 2 * 12}


def test_a_resumed_run_is_the_same_with_models_of_their_own(tmp_path: Path) -> None:
    def fed(seed: int = 3) -> fl.Federation:
        torch.manual_seed(seed)
        return federation({"a": linear(0.0, 0.0), "b": deep(), "c": deep(9)})

    how: dict[str, Any] = {"method": "fedmd", "lr": 0.1, "training": {"participation": 0.6}}
    whole = fl.run(fed(), tmp_path / "whole", model=linear(0, 0), rounds=6, **how)
    part = fl.run(fed(), tmp_path / "part", model=linear(0, 0), rounds=3, **how)
    fl.resume(part.folder, federation=fed(4), model=linear(0, 0), rounds=6)  # they get the weights of the start
    a, b = trained_models(whole.folder), trained_models(part.folder)
    assert all(torch.equal(tensor, b[who][name]) for who, model in a.items() for name, tensor in model.items())
    workers = fl.run(fed(), tmp_path / "workers", model=linear(0, 0), rounds=6, workers=2, **how)
    c = trained_models(workers.folder)
    assert all(torch.equal(tensor, c[who][name]) for who, model in a.items() for name, tensor in model.items())


def test_methods_that_share_parameters_refuse_other_shapes() -> None:
    fed = federation({"north": deep(), "south": deep(9)})
    with pytest.raises(RecipeError, match=r"client 'south': 'encoder.net.0.weight' of shape 9 x 2 found .* has 4 x 2"):
        fl.run(fed, model=deep(), method="fedavg", rounds=1)
    assert fl.run(fed, model=deep(), method="local", rounds=1).measured


@pytest.mark.parametrize("where", [{"peers": {}}, {"runtime": {"engine": "flower"}}])
def test_engines_with_one_model_for_all_refuse_others(where: dict[str, Any]) -> None:
    with pytest.raises(RecipeError, match="client 'b': a model of its own found, but with"):
        build(recipe_of(federation({"b": deep()}), linear(0, 0), "fedmd", rounds=1, **where))


def test_a_public_set_of_another_shape_is_refused() -> None:
    with pytest.raises(DataError, match=r"public: an array of shape \(3, 5\) found, expected at least one input"):
        fl.Federation({"a": fl.Client(data(8, 0))}, {"y": fl.task()}, public=torch.zeros(3, 5))


def test_examples_of_the_public_set_are_in_nobodys_share() -> None:
    with_them, without = (build(load_recipe(f"method={m}")) for m in ("fedavg", "{name: fedmd, public: 40}"))
    held = [{i for s in b.partition.shares for i in (*s.train, *s.val)} for b in (with_them, without)]
    assert held[1] < held[0]
    assert len(held[0] - held[1]) == 40
    assert without.module.public is not None
    assert len(without.module.public) == 40
    again = build(load_recipe("method={name: fedmd, public: 40}"), partition=without.partition)
    assert again.partition.hash == without.partition.hash
    assert torch.equal(again.module.public, without.module.public)  # type: ignore[arg-type]


def test_too_few_examples_for_a_public_set_are_refused(quick: Quick) -> None:
    with pytest.raises(RecipeError, match="method.public: 100000 found, but the data set has only"):
        quick("method={name: fedmd, public: 100000}")


@pytest.mark.parametrize("engine", ["cluster", "flower"])
def test_every_engine_gives_the_same(quick: Quick, engine: str) -> None:
    method = "method={name: fedmd, public: 20}"
    assert_same(quick(method), quick(method, f"runtime.engine={engine}", "runtime.workers=2"))


@pytest.mark.parametrize(
    "changes",
    [
        ("peers={weights: {kind: uniform}}",),
        ("privacy={clip: 1, noise: 0.5, delta: 1.0e-3}",),
        ("method.codec=sparse", "method.add={feddea: {rho: 0.5}}"),
        (
            "method.add={median: }",
            "attack=sign-flip",
            "attack.clients=1",
            ALIKE,
        ),
    ],
    ids=lambda changes: changes[0].partition("=")[0],
)
def test_stages_codecs_and_noise_act_on_predictions(quick: Quick, changes: tuple[str, ...]) -> None:
    result = quick("method={name: fedmd, public: 20}", *changes)
    assert result.status == "finished"
    assert not any(event["event"] == "round lost" for line in result.run.rounds for event in line["events"])
