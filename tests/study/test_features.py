"""Features of finished runs, domain by domain."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedloom
from fedloom.engines.api import Result
from fedloom.errors import StateError
from fedloom.experiments.papers.features import (
    PARTS,
    effective_rank,
    embedding,
    features,
    grad_cam,
    part_accuracy,
    read,
    singular_values,
)
from fedloom.federation.runs.reader import Run
from fedloom.models.multitask import MultiTask
from fedloom.models.nets import Encoder
from fedloom.models.tasks.labels import Classification
from fedloom.study.results import domain_history
from tests_support import load_recipe

TINY = (
    *("data.size=8", "model.width=2", "training.rounds=1", "training.batch_size=16"),
    *("evaluation.splits=[test]", "evaluation.every=1"),
)


def small(folder: Path, *changes: str) -> Result:
    return fedloom.run(load_recipe(*TINY, *changes, recipe="f2dc/digits-embedded"), folder)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    home = tmp_path_factory.mktemp("features")
    methods = {
        "f2dc": "f2dc",
        "fedavg": "fedavg",
        "local": "{name: fedavg, add: {feature-modules: {scope: local}}}",
    }
    return {name: small(home / name, f"method={method}").folder for name, method in methods.items()}


@pytest.mark.parametrize("rank", [1, 2, 5])
def test_effective_rank_of_equal_values_is_their_number(rank: int) -> None:
    assert effective_rank([3.0] * rank + [0.0] * 4) == pytest.approx(rank, rel=1e-12)


def test_effective_rank_by_hand() -> None:
    # shares 3/4 and 1/4: entropy 3/4 ln(4/3) + 1/4 ln 4
    assert effective_rank([6.0, 2.0]) == pytest.approx((4 / 3) ** 0.75 * 4**0.25, rel=1e-12)
    assert effective_rank([0.0, 0.0]) == 0


def test_singular_values_of_features_by_hand() -> None:
    # covariance diag(2/3, 8/3) about the mean (7, 7)
    x = torch.tensor([[1.0, 0], [-1, 0], [0, 2], [0, -2]]) + 7
    assert np.allclose(singular_values(x), [8 / 3, 2 / 3], rtol=1e-12)
    line = torch.arange(6.0)[:, None] * torch.tensor([[1.0, -2, 3]])
    assert effective_rank(singular_values(line)) == pytest.approx(1, abs=1e-6)
    with pytest.raises(ValueError, match="at least two examples, found 1"):
        singular_values(x[:1])


class Line(Encoder):
    """A 1 x 1 convolution to two channels, and the mean over positions."""

    def __init__(self) -> None:
        super().__init__()
        self.features = 2
        self.conv = nn.Conv2d(1, 2, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x).mean((2, 3))


def test_grad_cam_of_a_linear_network_by_hand() -> None:
    model = MultiTask(Line(), (Classification("digit", 2),)).eval()
    with torch.no_grad():
        model.encoder.conv.weight.copy_(torch.tensor([1.0, -2]).view(2, 1, 1, 1))  # type: ignore[union-attr, operator]
        model.heads["digit"].weight.copy_(torch.tensor([[4.0, 1], [0, 8]]))  # type: ignore[operator]
        model.heads["digit"].bias.zero_()  # type: ignore[operator, union-attr]
    x = torch.tensor([[[[1.0, -1], [3, 0]]]]).repeat(2, 1, 1, 1)
    # a_k = W[c, k] / 4; class 0: (4 * x - 2 * x) / 4 = x / 2; class 1: -16 x / 4 = -4 x
    heat, logits = grad_cam(model, model.encoder.conv, x, "digit", torch.tensor([0, 1]))  # type: ignore[arg-type]
    assert torch.allclose(heat[0], torch.tensor([[0.5, 0], [1.5, 0]]))
    assert torch.allclose(heat[1], torch.tensor([[0.0, 4], [0, 0]]))
    assert torch.allclose(logits[0], torch.tensor([4 * 0.75 - 1.5, -12.0]))
    assert all(p.grad is None for p in model.parameters())
    assert not model.encoder.conv._forward_hooks  # type: ignore[union-attr]


def test_a_map_is_resized_to_the_image() -> None:
    model = MultiTask(Line(), (Classification("digit", 2),)).eval()
    model.encoder.conv = nn.Conv2d(1, 2, 1, stride=2)  # type: ignore[assignment]
    x = torch.rand(3, 1, 8, 6)
    heat, _ = grad_cam(model, model.encoder.conv, x, "digit", torch.zeros(3, dtype=torch.int64))  # type: ignore[arg-type]
    assert heat.shape == (3, 8, 6)


def test_embedding_is_the_same_twice() -> None:
    x = torch.randn(12, 5, generator=torch.Generator().manual_seed(0))
    assert embedding(x).shape == (12, 2)
    assert np.array_equal(embedding(x), embedding(x))
    with pytest.raises(ValueError, match="at least four examples, found 3"):
        embedding(x[:3])


@pytest.mark.parametrize("name", ["f2dc", "local"])
def test_fused_features_give_the_accuracy_that_the_run_measured(runs: dict[str, Path], name: str) -> None:
    (run,) = read([runs[name]])
    measured = domain_history(Run.read(runs[name])).last.values
    by_domain: dict[str, list[float]] = {}
    for view in run.views:
        accuracy = part_accuracy(run, view)
        assert tuple(accuracy) == PARTS
        by_domain.setdefault(view.domain, []).append(accuracy["f~"])
    assert {d: sum(v) / len(v) for d, v in by_domain.items()} == pytest.approx(dict(measured))


def test_parts_add_up_behind_a_linear_classifier(runs: dict[str, Path]) -> None:
    (run,) = read([runs["f2dc"]])
    view = run.first("plain")
    seen: list[Tensor] = []
    run.feature_module.register_forward_hook(lambda _m, inputs, output: seen.append(output))  # type: ignore[union-attr]
    handle = run.built.module.heads["digit"].register_forward_hook(lambda _m, x, y: seen.append(x[0]))
    part_accuracy(run, view)
    handle.remove()
    robust, _, corrected, fused = seen[-1].chunk(4)
    assert torch.allclose(robust + corrected, fused, atol=1e-5)
    assert not torch.allclose(robust, fused, atol=1e-5)


def test_views_are_domains_or_clients(runs: dict[str, Path]) -> None:
    shared, own = read([runs["fedavg"], runs["local"]])
    assert [view.label for view in shared.views] == ["plain", "inverted", "thickened", "textured"]
    assert [view.domain for view in own.views] == [
        d for d, n in zip(shared.domains, (1, 2, 2, 2), strict=True) for _ in range(n)
    ]
    assert all(view.label == f"{view.domain}, {view.client.id}" for view in own.views)


def test_tables_and_files(runs: dict[str, Path], tmp_path: Path) -> None:
    told: list[tuple[int, int, str]] = []
    found = features([runs["f2dc"], runs["fedavg"]], examples=20, images=1, tell=lambda *step: told.append(step))
    assert told[-1] == (16, 16, "")
    assert {s.examples for s in found.spectra} == {20}
    assert {len(s.values) for s in found.spectra} == {16}
    assert list(found.parts) == ["f2dc"]
    assert found.notes == ("fedavg has no feature modules, so it has no f+, f-, f* and f~",)
    text = found.to_text()
    assert "effective rank: exp of the entropy" in text
    assert "f2dc: accuracy in percent" in text
    files = found.write(tmp_path / "o")
    names = ["singular-values.csv", "parts.csv", "singular-values.png", "tsne.png", "grad-cam.png"]
    assert [file.name for file in files] == names
    assert all(file.stat().st_size for file in files)
    rows = list(csv.DictReader(files[0].read_text().splitlines()))
    assert len(rows) == 2 * 4 * 16
    assert math.isclose(float(rows[0]["effective rank"]), found.spectra[0].rank)
    assert len(list(csv.DictReader(files[1].read_text().splitlines()))) == 4 * 4


def test_few_examples_have_no_embedding(runs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedloom.experiments.papers.features._LEAST", 9)
    found = features([runs["fedavg"]], examples=2, images=1)
    assert found.notes[-1] == "fedavg has no t-SNE: 8 test examples found, expected at least 9"
    assert [file.name for file in found.write(tmp_path / "o")] == [
        "singular-values.csv", "singular-values.png", "grad-cam.png",
    ]  # fmt: skip


def test_runs_that_lack_something(tmp_path: Path, runs: dict[str, Path]) -> None:
    (run,) = read([runs["fedavg"]])
    with pytest.raises(StateError, match="expected a run with feature modules"):
        part_accuracy(run, run.views[0])
    with pytest.raises(StateError, match="no task 'digits'.*Tasks: digit"):
        read([runs["f2dc"]], task="digits")
    plain = fedloom.run(load_recipe("training.rounds=1", "data.tasks=[digit]"), tmp_path / "plain")
    with pytest.raises(StateError, match="client .* has no domain"):
        read([plain.folder])
    with pytest.raises(StateError, match="not comparable, because the data differ"):
        read([runs["f2dc"], small(tmp_path / "seed", "method=fedavg", "seed=1").folder])
