"""`fedloom demo` runs the packaged grid and shows what came out."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Fedloom = Callable[..., tuple[int, str, str]]


@pytest.mark.slow
def test_the_demo_ends_with_a_table_tests_and_a_page(fedloom_: Fedloom, tmp_path: Path) -> None:
    code, out, err = fedloom_("demo", "training.rounds=1", "seeds=[0]", "--out", tmp_path / "demo", "-q")
    assert code == 0, err
    assert out.index("5 of 5 runs are finished") < out.index("joint") < out.index("paired tests") < out.index("page")
    assert (tmp_path / "demo" / "report.html").stat().st_size > 100_000


@pytest.mark.slow
def test_without_an_extra_the_demo_lacks_only_its_page(
    fedloom_: Fedloom, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for package in ("plotly", "scipy", "sklearn", "matplotlib"):
        monkeypatch.setitem(sys.modules, package, None)
    code, out, err = fedloom_("demo", "training.rounds=1", "seeds=[0,1]", "--out", tmp_path / "demo", "-q")
    assert code == 0, err
    assert err.startswith("This will end without a page, which needs plotly: pip install 'fedloom[report]'")
    assert "paired tests" in out
    assert not (tmp_path / "demo" / "report.html").exists()
