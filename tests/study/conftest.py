"""Pages without the large script that draws their charts, which only the browser's tests need."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def quick_script(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "browser" not in request.path.name:
        monkeypatch.setattr("fedloom.study.report.pages.script", lambda: "/* vega */")
