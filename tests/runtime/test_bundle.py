"""A model in a folder of its own gives what the run's model gives, also without fedloom."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from fedloom.cli import app
from fedloom.errors import StateError, UserError
from fedloom.runtime.api import Result, trained_models
from fedloom.runtime.bundle import Bundle, export

Quick = Callable[..., Result]
image = pytest.importorskip("PIL.Image")


def picture(path: Path, size: tuple[int, int] = (20, 14)) -> Path:
    pixels = np.random.default_rng(0).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)
    image.fromarray(pixels).save(path)
    return path


def test_the_global_model_and_one_task(quick: Quick, tmp_path: Path) -> None:
    run = quick().folder
    bundle = Bundle.read(export(run, tmp_path / "all"))
    state = trained_models(run)[""]
    assert all(torch.equal(tensor, state[name]) for name, tensor in bundle.module.state_dict().items())
    names = [task.name for task in bundle.tasks]
    one = Bundle.read(export(run, tmp_path / "one", task=names[1]))
    assert [task.name for task in one.tasks] == names[1:2]
    assert not [name for name in one.module.state_dict() if f".{names[0]}." in name]
    x, shown = bundle.input(picture(tmp_path / "a.png"))
    assert (tuple(x.shape), shown.shape) == (bundle.input_shape, (*bundle.input_shape[1:], 3))
    with torch.inference_mode():
        both = bundle.module(x[None])[names[1]], one.module(x[None])[names[1]]
    assert torch.equal(*both)
    card = (tmp_path / "one" / "README.md").read_text()
    assert names[1] in card
    assert names[0] + " (" not in card
    with pytest.raises(UserError, match="no task 'nope'"):
        export(run, tmp_path / "x", task="nope")
    with pytest.raises(StateError, match="not empty"):
        export(run, tmp_path / "one")
    with pytest.raises(StateError, match="no exported model"):
        Bundle.read(run)


def test_a_clients_own_model(quick: Quick, tmp_path: Path) -> None:
    run = quick("method=local").folder
    with pytest.raises(UserError, match="name the client"):
        export(run, tmp_path / "x")
    with pytest.raises(UserError, match="no client 'nobody'"):
        export(run, tmp_path / "x", client="nobody")
    client, state = next(iter(trained_models(run).items()))
    bundle = Bundle.read(export(run, tmp_path / "out", client=client))
    assert all(torch.equal(tensor, state[name]) for name, tensor in bundle.module.state_dict().items())
    about = json.loads((tmp_path / "out" / "export.json").read_text())
    assert about["client"] == client


def test_the_commands_and_files_that_are_no_images(quick: Quick, tmp_path: Path) -> None:
    run = quick().folder
    done = CliRunner().invoke(app, ["export", str(run)])
    assert done.exit_code == 0, done.output
    folder, out = run / "export", tmp_path / "seen.png"
    made = CliRunner().invoke(app, ["predict", str(folder), str(picture(tmp_path / "a.png")), "-o", str(out)])
    assert made.exit_code == 0, made.output
    assert "class" in made.output
    with image.open(out) as seen:
        assert seen.width > 100
    (tmp_path / "no.png").write_text("not an image")
    with pytest.raises(UserError, match="cannot be read as an image"):
        Bundle.read(folder).predict([tmp_path / "no.png"])


@pytest.mark.slow
def test_without_fedloom(quick: Quick, tmp_path: Path) -> None:
    if subprocess.run([sys.executable, "-c", "import timm"], capture_output=True).returncode:
        pytest.skip("timm cannot be imported by itself here")
    run = quick("model={name: tiny-vit, width: 16, depth: 1}").folder
    out = export(run, tmp_path / "out")
    file = picture(tmp_path / "a.png")
    code = "import sys; sys.modules['fedloom'] = None; sys.argv = ['load.py', sys.argv[1]]; "
    code += f"exec(compile(open({str(out / 'load.py')!r}).read(), 'load.py', 'exec'), "
    code += f"{{'__name__': '__main__', '__file__': {str(out / 'load.py')!r}}})"
    told = subprocess.run([sys.executable, "-c", code, str(file)], capture_output=True, text=True, check=True).stdout
    bundle = Bundle.read(out)
    x, _ = bundle.input(file)
    with torch.inference_mode():
        outputs = bundle.module(x[None])
    for line in told.splitlines():
        task, _, numbers = line.removeprefix(f"{file} ").partition(" ")
        torch.testing.assert_close(torch.tensor(json.loads(numbers)), outputs[task][0])
    assert len(told.splitlines()) == len(bundle.tasks)
