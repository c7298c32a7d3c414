"""How far runs have come, from their files, in the terminal and served to this machine alone."""

from __future__ import annotations

import http.client
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from typer.testing import CliRunner

from fedloom.cli.app import app
from fedloom.errors import StateError, UserError
from fedloom.federation.runs.reader import Run
from fedloom.study.grid import Cell
from fedloom.study.report.records import scores
from fedloom.study.watch import Server, TaskNow, index, now, table
from grid_support import FEDAVG, paper_grid, write_grid, write_run
from report_support import NASTY, Page, write_files

TASKS = {
    "seg": {"primary": "miou", "metrics": {"miou": "max"}},
    "depth": {"primary": "rmse", "metrics": {"rmse": "min"}},
}
CLIENTS = {"a": {"tasks": {"seg": 1.0}}, "b": {"tasks": {"seg": 1.0, "depth": 1.0}}}


def folder(path: Path, rounds: int, status: str = "running", torn: str = "", **change: Any) -> Path:
    info = {"method": "fedavg", "tasks": TASKS, "clients": CLIENTS, "status": status, "final_round": rounds, **change}
    lines, sent = [], []
    for r in range(rounds + 1):
        measured = ("a", "seg", "miou", 0.1 * (r + 1)), ("b", "seg", "miou", 0.3), ("b", "depth", "rmse", 9 - r)
        metrics = [
            {"client": c, "task": t, "metric": m, "value": v, "model": "global", "split": "test", "data": "d"}
            for c, t, m, v in measured
        ]
        losses = (("b", "depth", 1 / r), ("a", "seg", None)) if r else ()
        train = [{"client": c, "task": t, "loss": loss} for c, t, loss in losses]
        seconds = {"train and aggregate": 3.0, "evaluate": 1.0, "diagnostics": 5.0, "x, sum over clients": 50.0}
        lines.append({"round": r, "cohort": ["a", "b"] if r else [], "metrics": metrics, "train": train})
        happened = [{"event": NASTY, "client": "a"}] if r else []
        lines[-1] |= {"seconds": seconds if r else {}, "seconds_of": {"a": 0.5, "b": 1.5}, "events": happened}
        sent.append({"round": r, "up": [{"client": "a", "role": "x", "task": None, "bytes": 10 * bool(r)}], "down": []})
    write_files(path, info, lines, sent, name=NASTY, seed=3)
    with (path / "metrics.jsonl").open("a") as file:
        file.write(torn)
    return path


def test_a_run_that_goes_on(tmp_path: Path) -> None:
    found = now(folder(tmp_path, 4, torn='{"round": 5, "coh'))
    assert (found.round, found.rounds, found.cohort, found.clients, found.up) == (4, 9, 2, 2, 40)
    assert (found.seconds, found.left) == (4.0, 20.0)
    assert found.quiet is not None
    seg, depth = found.tasks
    assert (depth.loss, depth.value) == (0.25, 5.0)
    assert (depth.best, depth.best_round) == (None, None), "by test data none is best"
    assert seg.loss != seg.loss
    assert seg.value == pytest.approx(0.4)
    assert depth.series == {0: 9, 1: 8, 2: 7, 3: 6, 4: 5}


def test_a_run_that_is_over_and_one_that_has_not_begun(tmp_path: Path) -> None:
    over = now(folder(tmp_path / "over", 2, "finished"))
    assert (over.left, over.quiet, over.status) == (None, None, "finished")
    begun = now(folder(tmp_path / "begun", 0))
    assert (begun.round, begun.seconds, begun.left) == (0, None, None)
    with pytest.raises(StateError, match="not a run folder"):
        now(tmp_path)


def test_the_command(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["watch", str(folder(tmp_path, 4))])
    assert result.exit_code == 0, result.output
    text = re.sub(r"\s+", " ", result.output)
    for part in (": fedavg, seed 3", "round 4 of 9", "0:20 left", "40 B sent by clients", "depth (rmse) ↓ █▆▅▃▁"):
        assert part in text


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Server]:
    folder(tmp_path / "runs" / "deep" / "one & two", 2)
    folder(tmp_path / "elsewhere", 2)
    (tmp_path / "runs" / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "runs" / "broken").mkdir()
    (tmp_path / "runs" / "broken" / "run.json").write_text("{")
    with Server(tmp_path / "runs", 0) as serving:
        threading.Thread(target=serving.serve_forever, args=(0.01,), daemon=True).start()
        yield serving
        serving.shutdown()


def ask(serving: Server, path: str, method: str = "GET", token: str | None = "", **headers: str) -> tuple[int, str]:
    """(status, text) of an answer; the server's own token goes with the path unless another one does, or none."""
    connection = http.client.HTTPConnection("127.0.0.1", serving.server_port, timeout=20)
    token = serving.token if token == "" else token
    mark = "&" if "?" in path else "?"
    connection.request(method, path if token is None else f"{path}{mark}token={token}", headers=headers)
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def test_the_list_and_the_page_of_a_run(serving: Server, tmp_path: Path) -> None:
    status, text = ask(serving, "/")
    assert status == 200
    page = Page(text)
    (link,) = [a["href"] for tag, a in page.elements if tag == "a" and "href" in a]
    assert link == f"/run?at=deep/one%20%26%20two&token={serving.token}"
    assert ask(serving, link, token=None)[0] == 200
    for part in ("running, 0:28 left", "2 of 9", "broken", "recipe.yaml is absent", "seg (miou) ↑", "0.3000"):
        assert part in " ".join(page.text.split())
    assert not [tag for tag, _ in page.elements if tag == "img"]
    status, text = ask(serving, "/run?at=deep/one%20%26%20two")
    assert status == 200
    before = sorted(tmp_path.rglob("*"))
    folder(tmp_path / "runs" / "deep" / "one & two", 4)
    assert "4 of 9" in " ".join(Page(ask(serving, "/")[1]).text.split())
    assert "round 4 of 9" in ask(serving, "/run?at=deep/one%20%26%20two")[1]
    assert sorted(tmp_path.rglob("*")) == before  # it only reads


@pytest.mark.parametrize(
    "headers", [{"Host": "evil.example"}, {"Host": "evil.example:80"}, {"Origin": "http://evil.example"}]
)
def test_other_sites_are_refused(serving: Server, headers: dict[str, str]) -> None:
    status, text = ask(serving, "/", **headers)
    assert status == 403
    assert "Runs in" not in text
    assert ask(serving, "/", Origin=f"http://127.0.0.1:{serving.server_port}")[0] == 200
    assert ask(serving, "/", Host=f"localhost:{serving.server_port}")[0] == 200


@pytest.mark.parametrize("path", ["/", "/run?at=deep/one%20%26%20two", "/nothing", "/?token=", "//["])
@pytest.mark.parametrize("token", [None, "x", "\u00e9", "{token}x", "{token}&token={token}", "{short}"])
def test_who_has_not_the_token_sees_nothing(serving: Server, path: str, token: str | None) -> None:
    """As another user of this machine, who can reach the port."""
    token = token and token.format(token=serving.token, short=serving.token[:-1])
    status, text = ask(serving, path, token=token and quote(token, safe="&="))
    assert status == 403
    assert text == "This page is for whoever started it: open the address that `fedloom watch` printed, with its token."


def test_the_token_is_long_new_and_in_the_address(serving: Server, tmp_path: Path) -> None:
    with Server(tmp_path, 0) as other:
        assert other.token != serving.token
    assert len(serving.token) >= 43  # 256 bits
    assert serving.url == f"http://127.0.0.1:{serving.server_port}/?token={serving.token}"
    assert serving.server_address[0] == "127.0.0.1"


def test_the_command_prints_the_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(self: Server) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Server, "serve_forever", interrupt)
    done = CliRunner().invoke(app, ["watch", str(tmp_path), "--browser", "--port", "0"])
    assert done.exit_code == 130
    assert re.search(r"http://127\.0\.0\.1:\d+/\?token=[\w-]{43} ", done.output)


@pytest.mark.parametrize("path", ["/run", "/run?at=../elsewhere", "/run?at=link", "/run?at=/etc", "/run.json"])
def test_nothing_else_is_served(serving: Server, path: str) -> None:
    assert ask(serving, path)[0] == 404


def test_a_browser_that_asks_for_an_icon_has_nothing_to_complain_about(serving: Server) -> None:
    assert ask(serving, "/favicon.ico") == (204, "")


def test_it_takes_no_orders(serving: Server) -> None:
    assert ask(serving, "/", "POST")[0] == 501


def test_no_folder_and_a_port_that_is_taken(serving: Server, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such folder"):
        Server(tmp_path / "nowhere", 0)
    with pytest.raises(UserError, match=f"port {serving.server_port}: .*--port"):
        Server(tmp_path, serving.server_port)
    (tmp_path / "empty").mkdir()
    assert "There is no run here yet" in index(tmp_path / "empty", "")


def test_a_number_is_of_the_split_and_the_round_of_the_report(tmp_path: Path) -> None:
    """Test data before validation data, at the kept round."""
    path = folder(tmp_path / "run", 4, "finished", final_round=2)
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line["metrics"] += [{**m, "split": "val", "value": 7.0 - line["round"] % 3} for m in line["metrics"]]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    seg, depth = now(path).tasks
    (score,) = [s for s in scores(Run.read(path)) if (s.task, s.split, s.metric) == ("depth", "test", "rmse")]
    assert (depth.value, depth.split) == (score.mean, score.split) == (7.0, "test")
    assert (depth.best, depth.best_round, seg.best_round) == (5.0, 2, 0), "of equally good rounds the first"


def test_a_grid_is_one_line_with_its_runs_below_it(tmp_path: Path) -> None:
    folder(tmp_path / "alone", 2, "finished")
    home = write_grid(tmp_path / "grids" / "paper", paper_grid(), {})
    for seed, better in ((0, 0.0), (1, 0.125)):
        values = {task: value + better for task, value in FEDAVG.items()}
        write_run(home, Cell("NYUD", "FedAvg", "-", seed), values)
    lines = {line.name: line for line in table(tmp_path)}
    assert lines.keys() == {"alone", "grids/paper"}
    grid = lines["grids/paper"]
    assert [line.name.rpartition("/")[2] for line in grid.below] in (["s0", "s1"], ["s1", "s0"])
    assert (grid.run, grid.finished, lines["alone"].below) == (None, 2, ())
    for task in now(tmp_path / grid.below[0].name).tasks:
        each = [line.score(task.name, "test") for line in grid.below]
        assert grid.score(task.name, "test") == (max if task.direction == "max" else min)(each)  # type: ignore[type-var]
    text = " ".join(Page(index(tmp_path, "T")).text.split())
    assert "paper 2 runs finished" in text


def test_two_runs_are_compared_and_a_grid_has_its_page(serving: Server) -> None:
    folder(serving.root / "other", 3, "finished")
    home = write_grid(serving.root / "paper", paper_grid(), {})
    write_run(home, Cell("NYUD", "FedAvg", "-", 0), FEDAVG)
    one = "/run?at=deep/one%20%26%20two"
    assert "Compared with the baseline" not in ask(serving, one)[1]
    status, text = ask(serving, f"{one}&base=other")
    assert status == 200
    assert "Compared with the baseline" in text
    status, text = ask(serving, "/run?at=paper")
    assert (status, "Change per method" in text or "1 of" in text) == (200, True)
    for wrong in ("base=../elsewhere", "base=link", "base=deep/one%20%26%20two", "base=paper"):
        assert ask(serving, f"{one}&{wrong}")[0] == 404


def test_sparklines() -> None:
    def line(series: dict[int, float]) -> str:
        return TaskNow("", "", None, None, None, None, "test", series).sparkline()

    assert line({1: 0.0, 2: 0.5, 3: 1.0}) == "▁▅█"
    assert line({1: 1.0, 2: float("nan"), 3: 1.0}) == "▁ ▁"
    assert line({}) == ""
    assert len(line({r: float(r) for r in range(300)})) == 24
