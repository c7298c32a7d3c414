"""Run folders that version 0.1 wrote, before modules moved, are read, resumed and reported.

Each was stopped in round 3 of 4; `whole` is what the same run left when nothing stopped it.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import fedloom
from fedloom.federation.runs.reader import Run
from fedloom.study.report import write

HOME = Path(__file__).with_name("folders")
each = pytest.mark.parametrize("name", ["server", "gossip"])


def lines(folder: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return [json.loads(text) for text in (folder / name).read_text().splitlines()]


def without_side(folder: Path) -> list[dict[str, Any]]:
    """Bytes by round, without vectors beside the model, which were then counted whole, whatever a client had."""
    return [
        {**line, **{way: [e for e in line[way] if e["role"] != "side"] for way in ("up", "down")}}
        for line in lines(folder, "bytes.jsonl")
    ]


@each
def test_it_is_read(name: str) -> None:
    run, whole = Run.read(HOME / name / "stopped"), Run.read(HOME / name / "whole")
    assert (run.last_round, run.is_finished) == (2, False)
    assert (whole.last_round, whole.is_finished) == (4, True)
    assert set(whole.final().values) == {"digit", "parity"}
    assert run.group == whole.group


@each
def test_it_is_resumed(name: str, tmp_path: Path) -> None:
    stopped, whole, folder = HOME / name / "stopped", HOME / name / "whole", tmp_path / "run"
    shutil.copytree(stopped, folder)
    result = fedloom.resume(folder)
    assert result.status == "finished"
    expected = lines(whole)
    assert lines(folder)[:3] == lines(stopped)[:3]
    assert [(line["round"], line["cohort"]) for line in lines(folder)] == [(e["round"], e["cohort"]) for e in expected]
    sent, before = lines(folder, "bytes.jsonl"), lines(whole, "bytes.jsonl")
    assert sent[:3] == before[:3]
    if name == "server":
        assert without_side(folder) == without_side(whole)
        for line in sent[3:]:  # a vector of control variates has the blocks that its client has
            for way, more in (("up", 8), ("down", 0)):
                parts = {e["client"]: [0, more] for e in line[way]}
                for e in line[way]:
                    parts[e["client"]][e["role"] != "side"] += e["bytes"]
                assert all(side == rest for side, rest in parts.values())
    else:
        assert sent == before
    for now, then in zip(lines(folder)[3:], expected[3:], strict=True):
        assert [list(m) for m in now["metrics"]] == [list(m) for m in then["metrics"]]
        assert [t["loss"] for t in now["train"]] == pytest.approx([t["loss"] for t in then["train"]], rel=0.05)
    # another processor may round otherwise
    models, before = load_file(folder / "model.safetensors"), load_file(whole / "model.safetensors")
    assert models.keys() == before.keys()
    for key, tensor in before.items():
        torch.testing.assert_close(models[key], tensor, rtol=0, atol=0.05, msg=key)


@each
def test_it_is_reported(name: str, tmp_path: Path) -> None:
    page = write(HOME / name / "whole", tmp_path / "page.html").read_text()
    assert Run.read(HOME / name / "whole").info["recipe_text"].splitlines()[0] in page
    assert "digit" in page
