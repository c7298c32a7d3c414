"""fedloom report, on a real run."""

from __future__ import annotations

import base64
import gzip
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedloom.cli.app import app
from fedloom.engines.api import Result
from fedloom.federation.runs.reader import Run
from fedloom.study.tables.compare import compare

pytest.importorskip("plotly")


def data_of(file: Path) -> dict:
    text = file.read_text("utf-8")
    return json.loads(text.partition('id="report-data">')[2].partition("</script>")[0])


def test_a_run(quick: Callable[..., Result], tmp_path: Path) -> None:
    folder = quick("method=fedhca2", "training.rounds=2").folder
    out = tmp_path / "made" / "page.html"
    result = CliRunner().invoke(app, ["report", str(folder), "-o", str(out)])
    assert result.exit_code == 0, result.output
    assert result.output.strip() == str(out)
    data = data_of(out)
    packed = out.read_text("utf-8").partition('id="plotly">')[2].partition("</script>")[0]
    assert "plotly.js v" in gzip.decompress(base64.b64decode(packed)).decode()[:500]
    assert out.stat().st_size < 3_000_000
    run = Run.read(folder)
    final = run.final()
    means = {(s["task"], s["metric"]): s["mean"] for s in data["scores"] if s["split"] == "test"}
    assert means == {(t, m): v for t, metrics in final.values.items() for m, v in metrics.items()}
    drawn = 0
    for number, task in enumerate(run.info["tasks"]):
        for view in data["figures"][f"curves-{number}"]["views"]:
            metric, split, model = view["name"].split(", ")
            for trace in view["data"]:
                if trace["meta"]["kind"] != "client" or split == "train":
                    continue
                client = trace["meta"]["name"]
                wanted = {
                    line["round"]: e["value"]
                    for line in run.rounds
                    for e in line["metrics"]
                    if (e["client"], e["task"], e["metric"], e["split"], e["model"])
                    == (client, task, metric, split, model)
                }
                assert dict(zip(trace["x"], trace["y"], strict=True)) == wanted
                drawn += 1
    assert drawn
    assert {"examples", "bytes", "seconds", "alpha"} <= set(data["figures"])


def test_where_it_is_written(quick: Callable[..., Result]) -> None:
    folder = quick("training.rounds=1").folder
    result = CliRunner().invoke(app, ["report", str(folder)])
    assert result.output.strip() == str(folder / "report.html")
    assert (folder / "report.html").is_file()


def test_without_torch() -> None:
    code = "import sys, fedloom.cli.look, fedloom.study.report; print('torch' in sys.modules, 'plotly' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_images_ask_for_their_extra(
    quick: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fedloom_: Callable[..., tuple]
) -> None:
    folder = quick("training.rounds=1").folder
    monkeypatch.setitem(sys.modules, "kaleido", None)
    code, _, err = fedloom_("report", folder, "--svg", tmp_path / "svg")
    assert code == 2
    assert "pip install 'fedloom[report]'" in err
    assert (folder / "report.html").is_file()  # the page is written as before


def test_a_run_against_another(quick: Callable[..., Result], tmp_path: Path, fedloom_: Callable[..., tuple]) -> None:
    fedavg, local = (quick(f"method={name}", "training.rounds=1").folder for name in ("fedavg", "local"))
    out = tmp_path / "page.html"
    assert fedloom_("report", fedavg, "--base", local, "-o", out)[0] == 0
    held = data_of(out)["base"]
    # every client of the one is in the other, each with all its tasks
    clients = Run.read(fedavg).info["clients"]
    expected = {(name, task) for name, about in clients.items() for task in about["tasks"]}
    assert {(c["client"], c["task"]) for c in held["clients"] if c["base"] is not None} == expected
    assert held["about"]["data"].startswith("the same")
    delta = compare([local, fedavg]).columns[1].delta
    assert delta is not None
    assert held["delta_m"]["test"] == pytest.approx(delta.mean)
    code, _, err = fedloom_("report", fedavg, "--base", tmp_path)
    assert code == 2
    assert "run.json" in err
    (tmp_path / "relatedness.json").write_text("{}")
    code, _, err = fedloom_("report", tmp_path, "--base", local)
    assert code == 2
    assert "is a relatedness study" in err
