"""`fedloom data check` on the command line."""

from __future__ import annotations

from typer.testing import CliRunner

from fedloom.cli.app import app
from folders_support import nyud


def test_a_folder_that_can_be_used_and_one_that_cannot(tmp_path):
    root = nyud(tmp_path)
    result = CliRunner().invoke(app, ["data", "check", "nyud", "--root", str(root), "--limit", "1"])
    assert result.exit_code == 0, result.output
    assert "train  images       3" in result.output
    assert "note: train: 3 images, the published set has 795" in result.output
    assert result.output.endswith("\nusable\n")
    (root / "gt_sets/val.txt").unlink()
    result = CliRunner().invoke(app, ["data", "check", "nyud", "--root", str(root)])
    assert result.exit_code == 2
    assert "val.txt: cannot be read as a list of images" in result.output
    assert result.output.endswith("\nnot usable\n")
