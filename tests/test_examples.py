"""Examples run as they stand."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))


@pytest.mark.usefixtures("torch_stays_as_it_is")
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_example_runs(path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", [str(path)])
    runpy.run_path(str(path), run_name="__main__")
    out = capsys.readouterr().out.split()
    assert out
    if path.stem == "one_round_by_hand":
        assert len(path.read_text().splitlines()) < 80, "it fits a screen"
        assert float(out[out.index("after") + 2]) > float(out[out.index("before") + 2]) + 0.3


def test_public_names() -> None:
    import fedloom
    from fedloom import methods, stages, training

    for module in (fedloom, methods, stages, training):
        for name in module.__all__:
            assert getattr(module, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'nope'"):
        _ = fedloom.nope
