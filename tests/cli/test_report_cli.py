"""fedloom report, on a real run."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedloom.cli.app import app
from fedloom.engines.api import Result
from fedloom.federation.runs.reader import Run
from fedloom.study.charts import script
from fedloom.study.comparison import compare
from report_support import drawn

pytest.importorskip("vl_convert")


def data_of(file: Path) -> dict:
    text = file.read_text("utf-8")
    return json.loads(text.partition('id="report-data">')[2].partition("</script>")[0])


def test_a_run(quick: Callable[..., Result], tmp_path: Path) -> None:
    folder = quick("method=fedhca2", "training.rounds=2").folder
    out = tmp_path / "made" / "page.html"
    result = CliRunner().invoke(app, ["report", str(folder), "-o", str(out)])
    assert result.exit_code == 0, result.output
    assert result.output.strip() == str(out)
    refused = CliRunner().invoke(app, ["report", str(folder), "-o", str(tmp_path / "t.csv")])
    assert "what is written here is no .csv file" in str(refused.exception)
    data = data_of(out)
    assert "window.vegaEmbed=" in out.read_text("utf-8").partition('id="vega">')[2].partition("</script>")[0]
    assert out.stat().st_size < 2_000_000
    run = Run.read(folder)
    final = run.final()
    means = {(s["task"], s["metric"]): s["mean"] for s in data["scores"] if s["split"] == "test"}
    assert means == {(t, m): v for t, metrics in final.values.items() for m, v in metrics.items()}
    checked = 0
    for number, task in enumerate(run.info["tasks"]):
        for view in data["figures"][f"curves-{number}"]:
            metric, split, model = view["name"].split(", ")
            for client, points in drawn(view["chart"]).items():
                if client not in run.info["clients"] or split == "train":
                    continue
                wanted = {
                    line["round"]: e["value"]
                    for line in run.rounds
                    for e in line["metrics"]
                    if (e["client"], e["task"], e["metric"], e["split"], e["model"])
                    == (client, task, metric, split, model)
                }
                assert points == wanted
                checked += 1
    assert checked
    assert {"examples", "bytes", "seconds", "alpha"} <= set(data["figures"])


def test_where_it_is_written(quick: Callable[..., Result]) -> None:
    folder = quick("training.rounds=1").folder
    result = CliRunner().invoke(app, ["report", str(folder)])
    assert result.output.strip() == str(folder / "report.html")
    assert (folder / "report.html").is_file()


def test_figures_as_files_and_their_extra(
    quick: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fedloom_: Callable[..., tuple]
) -> None:
    folder = quick("training.rounds=1").folder
    assert fedloom_("report", folder, "--svg", tmp_path / "svg", "--csv", tmp_path / "csv")[0] == 0
    names = [sorted(file.stem for file in (tmp_path / kind).glob(f"*.{kind}")) for kind in ("svg", "csv")]
    assert names[0] == names[1]
    assert len(names[0]) > 10
    script.cache_clear()
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    code, _, err = fedloom_("report", folder)
    assert code == 2
    assert "pip install 'fedloom[report]'" in err


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
