"""fedloom study pretrain: a file of weights that a run starts from."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import fedloom.experiments.pretrain as module
from fedloom.cli.app import main
from fedloom.errors import DataError, RecipeError, StateError, UserError
from fedloom.experiments.pretrain import pretrain
from fedloom.federation.recipes import load
from fedloom.federation.rounds.build import build
from fedloom.training.config import Training

QUICK = ("model.width=4", "model.hidden=8", "data.size=8", "training.batch_size=64")


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Run the command; returns (exit code, stdout, stderr)."""

    def call(*args: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["fedloom", "study", "pretrain", "digits-tasks", *QUICK, *args])
        with pytest.raises(SystemExit) as done:
            main()
        return int(done.value.code or 0), *capsys.readouterr()

    return call


def labels(file: Path) -> dict[str, str]:
    with safe_open(file, "pt") as opened:
        return dict(opened.metadata())


def test_a_run_starts_from_what_was_pretrained(command, tmp_path):
    file = tmp_path / "new" / "encoder.safetensors"
    code, out, err = command("--epochs", "2", "--out", str(file))
    assert code == 0
    assert [line.split("  ")[0] for line in err.splitlines()] == ["1/2", "2/2"]
    assert "after epoch 2 of 2, on all test examples" in out
    assert f"model.weights={file}" in out
    shown = labels(file)
    assert {k: shown[k] for k in ("recipe", "seed", "epochs", "of")} == {
        "recipe": "digits-tasks", "seed": "0", "epochs": "2", "of": "2",
    }  # fmt: skip
    assert shown["tasks"] == "digit, parity, large, holes"
    assert f"accuracy {float(shown['digit/accuracy']):.4f}" in out

    recipe = load("digits-tasks", [*QUICK, f"model.weights={file}"])
    model, plain = build(recipe).module, build(load("digits-tasks", QUICK)).module
    tensors = load_file(file)
    assert tensors.keys() == model.encoder.state_dict().keys()
    for name, value in tensors.items():
        assert torch.equal(model.encoder.state_dict()[name], value)
        assert not torch.equal(plain.encoder.state_dict()[name], value)
    assert torch.equal(model.heads["digit"].weight, plain.heads["digit"].weight)
    assert not list(tmp_path.rglob("*.part"))


def test_it_learns_and_depends_on_the_recipe_alone(tmp_path):
    changes = ["model.hidden=32", "training.optimizer.name=adam", "training.optimizer.lr=0.01"]
    recipe = load("digits-tasks", [*QUICK, *changes])
    losses: list[float] = []
    torch.manual_seed(1)
    one = pretrain(recipe, 4, tmp_path / "one.safetensors", lambda epoch, loss: losses.append(loss))
    torch.manual_seed(2)
    two = pretrain(recipe, 4, tmp_path / "two.safetensors")
    assert losses[-1] < losses[0] / 2
    assert one.scores["digit"]["accuracy"] > 0.6  # one in ten by chance
    assert one.scores == two.scores
    first, second = load_file(one.file), load_file(two.file)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_schedule_and_momentum_go_over_all_epochs(tmp_path, monkeypatch):
    seen: list[tuple[Training, int, bool]] = []

    def spy(model, work, training, ctx, memory):
        seen.append((training, ctx.round, bool(memory["optimizer"])))
        assert work.index.tolist() == list(range(len(work.examples)))
        return train(model, work, training, ctx, memory=memory)

    train = module.train
    monkeypatch.setattr(module, "train", spy)
    changes = ["training.optimizer.momentum=0.9", "training.epochs=null", "training.steps=1"]
    pretrain(load("digits-tasks", [*QUICK, *changes]), 3, tmp_path / "a.safetensors")
    assert [(round_, kept) for _, round_, kept in seen] == [(1, False), (2, True), (3, True)]
    assert {(t.rounds, t.epochs, t.steps, t.keep_optimizer) for t, _, _ in seen} == {(3, 1, None, True)}


def test_what_is_saved_when_it_is_interrupted(command, tmp_path, monkeypatch):
    train = module.train

    def interrupted(*args, **options):
        if args[3].round == 3:
            raise KeyboardInterrupt
        return train(*args, **options)

    monkeypatch.setattr(module, "train", interrupted)
    file = tmp_path / "encoder.safetensors"
    code, _, err = command("--epochs", "5", "--out", str(file))
    assert code == 130
    assert f"interrupted; {file} holds epoch 2 of 5" in err
    assert (labels(file)["epochs"], labels(file)["of"]) == ("2", "5")
    assert not [key for key in labels(file) if "/" in key]  # no metrics yet


def test_what_is_refused(command, tmp_path):
    recipe = load("digits-tasks", QUICK)
    there = tmp_path / "there.safetensors"
    there.write_bytes(b"precious")
    with pytest.raises(StateError, match=r"there\.safetensors exists already: choose another"):
        pretrain(recipe, 1, there)
    assert there.read_bytes() == b"precious"
    with pytest.raises(UserError, match=r"a\.pth: expected a file that ends in \.safetensors"):
        pretrain(recipe, 1, tmp_path / "a.pth")
    with pytest.raises(RecipeError, match=r"set model\.lora=null"):
        pretrain(load("digits-tasks", ["model=tiny-vit", "model.lora={}"]), 1, tmp_path / "a.safetensors")
    sets = {"a": {"name": "digits", "tasks": ["holes"]}, "b": {"name": "digits", "tasks": ["digit"]}}
    mixed = load({**load("digits-tasks").model_dump(mode="json"), "data": {"name": "several", "sets": sets}})
    with pytest.raises(DataError, match=r"those of a, b cannot share batches; pretrain on one of them"):
        pretrain(mixed, 1, tmp_path / "a.safetensors")
    with pytest.raises(UserError, match="epoch 1: the model is no longer finite; try a smaller learning rate"):
        pretrain(load("digits-tasks", [*QUICK, "training.optimizer.lr=1e30"]), 1, tmp_path / "a.safetensors")
    assert not (tmp_path / "a.safetensors").exists()
    assert command("--epochs", "0", "--out", str(tmp_path / "a.safetensors"))[0] == 2
