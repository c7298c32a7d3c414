"""Exported models merged by their task vectors: by hand, through every rule, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner

import fedloom
from fedloom.cli.app import app
from fedloom.errors import DataError, StateError, UserError
from fedloom.experiments.export.bundle import Bundle, export
from fedloom.experiments.export.finished import reopen
from fedloom.experiments.export.merge import merge
from fedloom.stages import ElectedMean, TopMagnitude
from tests_support import load_recipe


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path]]:
    """A run without a federation, and three of its clients' models; two of them have the task digit."""
    home = tmp_path_factory.mktemp("merge")
    run = fedloom.run(load_recipe("method=local"), home / "run").folder
    tasks = ("digit", "parity", "digit")
    owners = zip(("digit-0", "parity-0", "all-0"), tasks, strict=True)
    more = {"digit-0": "apache-2.0"}
    return run, [
        export(run, home / client, client=client, task=task, licence=more.get(client, "unknown"))
        for client, task in owners
    ]


def encoder(module: torch.nn.Module) -> Tensor:
    """Return what the tasks share, as one vector."""
    return torch.cat([p.detach().flatten() for name, p in module.named_parameters() if name.startswith("encoder")])


def test_rules_by_hand(trained: tuple[Path, list[Path]], tmp_path: Path) -> None:
    run, folders = trained
    start = encoder(reopen(run)[0].module)
    models = [Bundle.read(folder).module for folder in folders]
    X = torch.stack([encoder(model) - start for model in models])
    assert float(X.norm(dim=1).min()) > 0
    [out] = merge(folders, run, tmp_path / "mean", scale=0.5)
    merged = Bundle.read(out)
    torch.testing.assert_close(encoder(merged.module), start + 0.5 * X.mean(0))
    assert [task.name for task in merged.tasks] == ["digit", "parity"]
    state, own = merged.module.state_dict(), [model.state_dict() for model in models]
    for name, value in state.items():
        if name.startswith("heads.parity"):
            assert torch.equal(value, own[1][name])
        if name.startswith("heads.digit"):
            torch.testing.assert_close(value, (own[0][name] + own[2][name]) / 2)
    card = (out / "README.md").read_text()
    assert "merged by mean" in card
    assert "license: other" in card  # one of them has a licence of its own
    ties = merge(folders, run, tmp_path / "ties", "ties={keep: 0.3}")
    expected = (TopMagnitude(0.3, rescale=False) >> ElectedMean()).on(X)[0][0]
    torch.testing.assert_close(encoder(Bundle.read(ties[0]).module), start + expected)
    [pair] = merge(folders[1:], folders[0], tmp_path / "pair")  # an exported model may be the base too
    torch.testing.assert_close(encoder(Bundle.read(pair).module), (encoder(models[1]) + encoder(models[2])) / 2)


def test_models_that_normalise_their_inputs_differently_stay_apart(
    trained: tuple[Path, list[Path]], tmp_path: Path
) -> None:
    run, folders = trained
    shutil.copytree(folders[1], other := tmp_path / "other")
    about = json.loads((other / "export.json").read_text()) | {"mean": [0.25]}
    (other / "export.json").write_text(json.dumps(about))
    [together] = merge(folders[:2], run, tmp_path / "together")
    both = [Bundle.read(folder) for folder in merge([folders[0], other], run, tmp_path / "apart")]
    assert [(b.about.mean, [t.name for t in b.tasks]) for b in both][1] == ([0.25], ["parity"])
    for bundle in both:
        assert torch.equal(encoder(bundle.module), encoder(Bundle.read(together).module))


def test_emr_gives_each_model_back_from_one_vector(trained: tuple[Path, list[Path]], tmp_path: Path) -> None:
    """sgn of the sum, the largest value with that sign; each model the part that has its sign, as long in sum."""
    run, folders = trained
    start = encoder(reopen(run)[0].module)
    X = torch.stack([encoder(Bundle.read(folder).module) - start for folder in folders]).double()
    sign = X.sum(0).sign()
    top = (X * sign).clamp(min=0).amax(0) * sign
    written = merge(folders, run, tmp_path / "emr", "emr")
    assert [folder.name for folder in written] == ["1", "2", "3"]
    for folder, x, source in zip(written, X, folders, strict=True):
        part = torch.where(x * top > 0, top, 0.0)
        found = Bundle.read(folder)
        torch.testing.assert_close(
            encoder(found.module).double(), start + part * x.abs().sum() / part.abs().sum(), rtol=1e-4, atol=1e-6
        )
        assert [t.name for t in found.tasks] == [t.name for t in Bundle.read(source).tasks]


def test_rules_that_are_refused(trained: tuple[Path, list[Path]], tmp_path: Path) -> None:
    run, folders = trained
    for rule, message in (
        ("tiess", "unknown add-on 'tiess'. Did you mean 'ties'"),
        ("ties={keep: 3}", r"method.add.ties.keep: 3 found, expected a number greater than 0"),
        ("famo", "reads loss_received from training, which exported models do not have"),
        ("feature-modules", "changes more than the combination of rows"),
        ("by-task", "changes more than the combination of rows"),
        ("server-step={step: 2}", "changes more than the combination of rows"),
        ("krum", "needs at least 3 rows"),
    ):
        with pytest.raises(UserError, match=message):
            merge(folders[:2], run, tmp_path / "out", rule)
    assert not (tmp_path / "out").exists()


def test_models_that_are_refused(trained: tuple[Path, list[Path]], tmp_path: Path) -> None:
    run, folders = trained
    out = tmp_path / "out"

    def refused(
        message: str, kind: type[Exception] = UserError, models: list[Path] = folders, base: Path = run
    ) -> None:
        with pytest.raises(kind, match=message):
            merge(models, base, out)
        assert not out.exists()

    refused("1 model found, expected at least two", models=folders[:1])
    refused("is not an exported model", StateError, [run, *folders])
    refused("not a run folder|recipe.yaml is absent", StateError, base=tmp_path)
    with pytest.raises(UserError, match="--scale nan found"):
        merge(folders, run, out, scale=float("nan"))
    with pytest.raises(StateError, match="not empty"):
        merge(folders, run, folders[0])

    def damaged(change: Callable[[Path], object]) -> list[Path]:
        bad = tmp_path / "bad"
        shutil.rmtree(bad, ignore_errors=True)
        shutil.copytree(folders[1], bad)
        change(bad)
        return [folders[0], bad]

    def weights(change: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], object]:
        def to(folder: Path) -> None:
            tensors = load_file(folder / "model.safetensors")
            change(tensors)
            save_file(tensors, folder / "model.safetensors")

        return to

    def about(**more: object) -> Callable[[Path], object]:
        file = "export.json"
        return lambda f: (f / file).write_text(json.dumps(json.loads((f / file).read_text()) | more))

    name = next(n for n in load_file(folders[1] / "model.safetensors") if n.startswith("encoder"))
    refused("encoder.* that are not finite", models=damaged(weights(lambda t: t[name].fill_(float("inf")))))
    refused(r"yaml: encoder.*\[1\] found", StateError, damaged(weights(lambda t: t.update({name: torch.zeros(1)}))))
    refused("cannot be read", DataError, damaged(lambda f: (f / "model.safetensors").write_bytes(b"\xff" * 99)))
    refused("input_shape and signal: .*expected the same inputs", models=damaged(about(input_shape=[1, 9, 9])))
    refused("export.json, licence: .*expected an identifier", StateError, damaged(about(licence="a b\nc: d")))
    tasks = json.loads((folders[0] / "export.json").read_text())["tasks"]
    refused("classes: unknown key", StateError, damaged(about(tasks=[{**tasks[0], "classes": 7}])))


def test_the_command(trained: tuple[Path, list[Path]], tmp_path: Path) -> None:
    run, folders = trained
    words = ["study", "merge", *map(str, folders), "--base", str(run), "--out", str(tmp_path / "m"), "--rule", "tsv-m"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert done.output.strip() == str(tmp_path / "m")
    assert len(Bundle.read(tmp_path / "m").tasks) == 2
