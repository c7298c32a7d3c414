"""A folder of runs, served to this machine alone."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from fedloom.cli.watch import sparkline
from fedloom.errors import UserError
from fedloom.study.ui import Folder, server
from report_support import NASTY, Page

TASKS = {"seg": {"primary": "miou", "metrics": {"miou": "max"}}}


@pytest.fixture(autouse=True)
def quick_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pytest.importorskip("plotly.offline"), "get_plotlyjs", lambda: "/* plotly */")


def run(path: Path, rounds: int = 2) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    recipe = {"name": NASTY, "seed": 3, "data": {"name": "toy"}, "method": {"name": "m"}, "training": {"rounds": 9}}
    clients = {"a": {"tasks": {"seg": 1.0}}, "b": {"tasks": {"seg": 1.0}}}
    (path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    (path / "run.json").write_text(json.dumps({"method": "m", "tasks": TASKS, "clients": clients, "status": "running"}))
    where = {"task": "seg", "metric": "miou", "model": "global", "split": "test", "data": "d"}
    lines = [
        {
            "round": r,
            "cohort": ["a", "b"],
            "metrics": [{"client": c, "value": r / 8, **where} for c in "ab"],
            "seconds_of": {"a": 0.5, "b": 1.5},
            "events": [{"event": NASTY, "client": "a"}],
        }
        for r in range(1, rounds + 1)
    ]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def port(tmp_path: Path) -> Iterator[int]:
    run(tmp_path / "runs" / "deep" / "one & two")
    run(tmp_path / "elsewhere")
    (tmp_path / "runs" / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "runs" / "broken").mkdir()
    (tmp_path / "runs" / "broken" / "run.json").write_text("{")
    with server(tmp_path / "runs", 0) as serving:
        threading.Thread(target=serving.serve_forever, daemon=True).start()
        yield serving.server_port
        serving.shutdown()


def ask(port: int, path: str, method: str = "GET", **headers: str) -> tuple[int, str, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    return answer.status, answer.read().decode(), answer.getheader("ETag", "")


def test_the_list_and_the_page_of_a_run(port: int, tmp_path: Path) -> None:
    status, text, tag = ask(port, "/")
    assert status == 200
    page = Page(text)
    assert [a["href"] for tag, a in page.elements if tag == "a"] == ["/run?at=deep/one%20%26%20two"]
    assert [a["value"] for tag, a in page.elements if tag == "progress"] == ["2"]
    for part in ("running, round 2 of 9", "slowest b, 1.5 s", "broken", "recipe.yaml is absent"):
        assert part in " ".join(page.text.split())
    for part in ("seg mIoU, higher is better", "0.2500 test"):
        assert part in " ".join(page.text.split())
    assert not [tag for tag, _ in page.elements if tag == "img"]
    assert ask(port, "/", **{"If-None-Match": tag})[:2] == (304, "")
    status, text, _ = ask(port, "/run?at=deep/one%20%26%20two")
    assert status == 200
    assert "data-live" in next(a for tag, a in Page(text).elements if tag == "body")
    before = sorted(tmp_path.rglob("*"))
    run(tmp_path / "runs" / "deep" / "one & two", 4)
    assert "round 4 of 9" in " ".join(Page(ask(port, "/")[1]).text.split())
    assert "round 4 of 9" in ask(port, "/run?at=deep/one%20%26%20two")[1]
    assert sorted(tmp_path.rglob("*")) == before  # it only reads


@pytest.mark.parametrize(
    "headers", [{"Host": "evil.example"}, {"Host": "evil.example:80"}, {"Origin": "http://evil.example"}]
)
def test_other_sites_are_refused(port: int, headers: dict[str, str]) -> None:
    status, text, _ = ask(port, "/", **headers)
    assert status == 403
    assert "Runs in" not in text
    assert ask(port, "/", Origin=f"http://127.0.0.1:{port}")[0] == 200
    assert ask(port, "/", Host=f"localhost:{port}")[0] == 200


@pytest.mark.parametrize("path", ["/run", "/run?at=../elsewhere", "/run?at=link", "/run?at=/etc", "/run.json"])
def test_nothing_else_is_served(port: int, path: str) -> None:
    assert ask(port, path)[0] == 404


def test_a_browser_that_asks_for_an_icon_has_nothing_to_complain_about(port: int) -> None:
    assert ask(port, "/favicon.ico")[:2] == (204, "")


def test_it_takes_no_orders(port: int) -> None:
    assert ask(port, "/", "POST")[0] == 501


def test_no_folder_and_a_port_that_is_taken(port: int, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such folder"):
        server(tmp_path / "nowhere", 0)
    with pytest.raises(UserError, match=f"port {port}: .*--port"):
        server(tmp_path, port)
    (tmp_path / "empty").mkdir()
    assert "There is no run here yet" in Folder(tmp_path / "empty").index()


def test_sparklines_of_the_terminal() -> None:
    assert sparkline({1: 0.0, 2: 0.5, 3: 1.0}) == "▁▅█"
    assert sparkline({1: 1.0, 2: float("nan"), 3: 1.0}) == "▁ ▁"
    assert sparkline({}) == ""
    assert len(sparkline({r: float(r) for r in range(300)})) == 24
