"""Nodes whose tables are preprocessed by what all of them send before the first round."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import yaml
from PIL import Image
from typer.testing import CliRunner

import fedloom as fl
from fedloom.cli.app import app
from fedloom.data.tables.columns import draft
from fedloom.engines.api import resume, run
from fedloom.errors import DataError, StateError, UserError
from fedloom.experiments.export.bundle import export
from fedloom.experiments.export.predict import of_table
from fedloom.federation.recipes.loader import dump, load
from fedloom.federation.recipes.schema import Recipe
from fedloom.federation.rounds.privacy import PrivacyTerms
from fedloom.federation.runs.folder import RunFolder
from fedloom.federation.runs.reader import Run
from sites_support import RECIPE, events, trained

pytest.importorskip("flwr")

from fedloom.data.tables.preprocessing import Input
from fedloom.data.tables.table import TableReport, together
from fedloom.engines.flower import Node, client_app
from fedloom.engines.flower.engine import LocalGrid, OverGrid
from fedloom.engines.flower.nodes import NodeConfig, about, build_from, own_data, own_table
from fedloom.engines.flower.wire import head_of

SITES = ("aachen", "bonn", "cologne")
MODEL: dict[str, Any] = {
    "name": "sites",
    "model": {"name": "mlp", "hidden": [4]},
    "training": {"rounds": 2, "optimizer": {"name": "adam", "lr": 0.01}},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a table for each of three sites, of which one lacks a label and one has few of a category."""
    rng = np.random.default_rng(0)
    path = tmp_path / "tables"
    path.mkdir()
    for number, site in enumerate(SITES):
        count = 40 + 10 * number
        x, kind = rng.normal(50 + number, 10, count), np.array(list("uvw"))[rng.integers(0, 3 - (number == 0), count)]
        ill = (x + rng.normal(0, 5, count) > 50).astype(int)
        table = pandas.DataFrame({"x": np.where(rng.random(count) < 0.2, np.nan, x), "kind": kind, "ill": ill,
                                  "score": np.nan if number == 2 else 200 + 30 * rng.normal(ill)})  # fmt: skip
        table.to_csv(path / f"{site}.csv", index=False)
    return path


def section(folder: Path) -> dict[str, Any]:
    return {"name": "table", **draft(folder, {"ill": {}, "score": {"kind": "regression"}}).section}


def homes(folder: Path, **more: Any) -> dict[int, dict[str, str]]:
    """Node configs: each node reads its own file; `more` are sections of the first one's node.yaml."""
    configs = {}
    for number, site in enumerate(SITES):
        home = folder.parent / "nodes" / site
        home.mkdir(parents=True, exist_ok=True)
        data = {key: value for key, value in section(folder).items() if key != "site"}
        node = {"client": site, "data": {**data, "path": str(folder / f"{site}.csv")}, **(more if not number else {})}
        (home / "node.yaml").write_text(yaml.safe_dump(node, sort_keys=False))
        configs[9 - number] = {"home": str(home)}
    return configs


def over_nodes(folder: Path, out: Path, *changes: str, **more: Any) -> fl.Result:
    recipe = load({**RECIPE, **MODEL}, changes)
    grid = LocalGrid(client_app(recipe), homes(folder, **more))
    return run(recipe, out, engine=OverGrid(grid, out))


def test_nodes_train_bit_for_bit_what_one_machine_trains(folder: Path, tmp_path: Path) -> None:
    data = {**section(folder), "path": str(folder)}
    here = fl.run({**MODEL, "data": data, "partition": "own", "method": "fedavg"}, tmp_path / "here")
    there = over_nodes(folder, tmp_path / "there")
    tables = [json.loads((result.folder / "run.json").read_text())["table"] for result in (here, there)]
    assert [table["scales"] for table in tables] == [tables[0]["scales"]] * 2
    assert [table["inputs"] for table in tables] == [tables[0]["inputs"]] * 2
    assert tables[1]["tasks"]["score"]["std"] == tables[0]["tasks"]["score"]["std"]
    weights = [(result.folder / "model.safetensors").read_bytes() for result in (here, there)]
    assert weights[0] == weights[1]
    bundles = [export(result.folder, tmp_path / f"bundle-{i}") for i, result in enumerate((here, there))]
    pandas.testing.assert_frame_equal(*(of_table(bundle, folder / "bonn.csv") for bundle in bundles))
    facts = json.loads((there.folder / "run.json").read_text())["clients"]
    assert {name: [*client["tasks"]] for name, client in facts.items()} == {
        "aachen": ["ill", "score"], "bonn": ["ill", "score"], "cologne": ["ill"],
    }  # fmt: skip
    lines = [json.loads(line) for line in (folder.parent / "nodes" / "bonn" / "audit.jsonl").read_text().splitlines()]
    assert [line["columns"] for line in lines if line["what"] == "statistics"] == [["x", "kind", "score"]]


def test_the_files_of_a_folder_are_one_sites_rows(folder: Path, tmp_path: Path) -> None:
    """A hospital has a file per ward or year; the run is that of one file with all rows."""
    one = over_nodes(folder, tmp_path / "one", "training.rounds=1")
    rows = pandas.read_csv(folder / "aachen.csv")
    path = tmp_path / "wards"
    path.mkdir()
    for name, part in (("ward A", rows[:15]), ("ward B", rows[15:])):
        part.to_csv(path / f"{name}.csv", index=False)
    data = {**section(folder), "path": str(path)}
    del data["site"]
    more = over_nodes(folder, tmp_path / "more", "training.rounds=1", data=data)
    weights = [(result.folder / "model.safetensors").read_bytes() for result in (one, more)]
    assert weights[0] == weights[1]
    config = NodeConfig.model_validate({"client": "aachen", "data": data})
    assert not any("column 'site'" in note for note in own_data(load({**RECIPE, **MODEL}), config)[0].notes)


def test_a_site_without_a_task_predicts_its_own_with_its_run(folder: Path, tmp_path: Path) -> None:
    """The model that it got has heads of the others' tasks, too."""
    there = over_nodes(folder, tmp_path / "there")
    (own,) = (folder.parent / "nodes" / "cologne" / "runs").iterdir()
    mine, whole = (of_table(run, folder / "cologne.csv") for run in (own, there.folder))
    pandas.testing.assert_frame_equal(mine, whole[[*mine]])
    assert [*mine] == ["ill", "p(ill=0)", "p(ill=1)"]


def test_a_site_whose_file_has_no_column_of_a_task(folder: Path, tmp_path: Path) -> None:
    """It trains what it trains if the column is empty, and its check names the column."""
    weights = [(over_nodes(folder, tmp_path / "empty").folder / "model.safetensors").read_bytes()]
    file = folder / "cologne.csv"
    pandas.read_csv(file).drop(columns="score").to_csv(file, index=False)
    weights += [(over_nodes(folder, tmp_path / "none").folder / "model.safetensors").read_bytes()]
    assert weights[0] == weights[1]
    data = {**section(folder), "path": str(file), "site": None}
    config = NodeConfig.model_validate({"client": "cologne", "data": data})
    dataset, _ = own_data(load(RECIPE), config)
    assert "task 'score' is left out: no column 'score'. Found: x, kind, ill" in dataset.doubts
    pandas.read_csv(file).drop(columns="ill").to_csv(file, index=False)
    with pytest.raises(DataError, match="no column 'ill'"):
        own_data(load(RECIPE), config)


def test_a_site_whose_columns_have_other_names(folder: Path, tmp_path: Path) -> None:
    """It says so in its node.yaml, sends the names that all agree on, and predicts its file as it is."""
    whole = over_nodes(folder, tmp_path / "whole")
    configs = homes(folder)
    file, own, agreed = folder.parent / "nodes/aachen/node.yaml", folder / "aachen.csv", tmp_path / "agreed.csv"
    node = yaml.safe_load(file.read_text())
    node["data"]["rename"] = {"Alter": "x", "krank": "ill"}
    file.write_text(yaml.safe_dump(node, sort_keys=False))
    own.rename(agreed)
    own.write_text(agreed.read_text().replace("x,kind,ill", "Alter,kind,krank", 1))
    recipe, out = load({**RECIPE, **MODEL}), tmp_path / "there"
    there = run(recipe, out, engine=OverGrid(LocalGrid(client_app(recipe), configs), out))
    assert (there.folder / "model.safetensors").read_bytes() == (whole.folder / "model.safetensors").read_bytes()
    assert "Alter" not in (there.folder / "run.json").read_text()
    mine = max((folder.parent / "nodes" / "aachen" / "runs").iterdir(), key=lambda run: run.stat().st_mtime)
    for file in (own, agreed):
        pandas.testing.assert_frame_equal(of_table(mine, file), of_table(whole.folder, agreed))


def test_one_sites_section_serves_all_and_the_run_predicts(folder: Path, tmp_path: Path) -> None:
    """`fedloom init` at one site writes it; another site has no value of an input, and keeps its file's path."""
    home = tmp_path / "bonn.yaml"
    wanted = ["init", folder / "bonn.csv", "--labels", "ill,score=regression", "--clients", "1", "--out", home]
    assert CliRunner().invoke(app, list(map(str, wanted))).exit_code == 0
    data = yaml.safe_load(home.read_text())["data"]
    lacking = pandas.read_csv(folder / "cologne.csv").assign(x=np.nan)
    lacking.to_csv(folder / "cologne.csv", index=False)
    configs = homes(folder)
    for config in configs.values():
        file = Path(config["home"]) / "node.yaml"
        node = yaml.safe_load(file.read_text())
        file.write_text(yaml.safe_dump({**node, "data": {**data, "path": node["data"]["path"]}}))
    recipe = load({**RECIPE, **MODEL})
    result = run(recipe, tmp_path / "run", engine=OverGrid(LocalGrid(client_app(recipe), configs), tmp_path / "run"))
    facts = json.loads((result.folder / "run.json").read_text())["clients"]
    assert {name: [*client["tasks"]] for name, client in facts.items()}["cologne"] == ["ill"]
    for site in SITES:
        found = of_table(result.folder, folder / f"{site}.csv")
        assert found["p(ill=1)"].between(0, 1).all()
        assert found["score"].between(100, 400).all()


def test_a_run_over_tables_at_nodes_goes_on(folder: Path, tmp_path: Path) -> None:
    """With the statistics that the nodes sent at first."""
    whole = over_nodes(folder, tmp_path / "whole")
    recipe = load({**RECIPE, **MODEL}, ("runtime.flower.min_clients=3",))
    grid = LocalGrid(client_app(recipe), homes(folder))
    pull = grid.pull_messages

    def pulled(ids: Any) -> Any:
        if (tmp_path / "run" / "metrics.jsonl").is_file() and len(trained(tmp_path / "run")) == 1:
            grid.silent.add(9)
        return pull(ids)

    grid.pull_messages = pulled  # type: ignore[method-assign]
    with pytest.raises(StateError, match="round 2: 2 of 3 clients answered"):
        run(recipe, tmp_path / "run", engine=OverGrid(grid, tmp_path / "run"))
    grid = LocalGrid(client_app(recipe), homes(folder))
    result = resume(tmp_path / "run", engine=OverGrid(grid, tmp_path / "run"))
    assert (result.folder / "model.safetensors").read_bytes() == (whole.folder / "model.safetensors").read_bytes()


def test_a_file_that_changes_during_a_run_costs_its_site_the_rounds(folder: Path, tmp_path: Path) -> None:
    """Its rows would be split anew: some that were for training would be for tests."""
    recipe = load({**RECIPE, **MODEL}, ("runtime.flower.min_clients=2",))
    grid = LocalGrid(client_app(recipe), homes(folder))

    def fresh(message: Any, context: Any) -> Any:  # as in a deployment, where each message has a process of its own
        if head_of(message.content).get("round") == 2:
            frame = pandas.read_csv(folder / "bonn.csv")
            frame.assign(x=frame.x + 1).to_csv(folder / "bonn.csv", index=False)
        return client_app(recipe)(message, context)

    grid.app = fresh
    result = run(recipe, tmp_path / "run", engine=OverGrid(grid, tmp_path / "run"))
    assert [*map(sorted, trained(result.folder))] == [[*SITES], ["aachen", "cologne"]]
    lines = [json.loads(line) for line in (folder.parent / "nodes" / "bonn" / "audit.jsonl").read_text().splitlines()]
    assert "its data have changed since round-1" in next(line["why"] for line in lines if line["what"] == "refuse")


def test_the_server_names_a_column_that_one_site_has_in_another_unit(folder: Path, tmp_path: Path) -> None:
    def doubts() -> tuple[str, ...]:
        reports = {}
        for config in homes(folder).values():
            one = NodeConfig.read(Path(config["home"]) / "node.yaml")
            own = own_table(load({**RECIPE, **MODEL}), one)
            assert own is not None
            dataset, client = own_data(load({**RECIPE, **MODEL}), one, own)
            reports[one.client] = about(client, dataset, table=own.report)
        return build_from(load({**RECIPE, **MODEL}), reports).dataset.doubts

    assert doubts() == ()
    frame = pandas.read_csv(folder / "bonn.csv")
    frame.assign(x=frame.x * 1000).to_csv(folder / "bonn.csv", index=False)
    assert doubts() == ("x: the numbers at bonn lie far from those of other sites: are they in another unit?",)


@pytest.mark.parametrize(
    "changes",
    [("method=fedavg",), ("method=ditto",), ("method=fedper", "model.heads=own"), ("method=matu",), ("peers={}",)],
)
def test_a_site_ends_with_a_run_folder_of_its_own(folder: Path, tmp_path: Path, changes: tuple[str, ...]) -> None:
    result = over_nodes(folder, tmp_path / "run", *changes)
    (own,) = (folder.parent / "nodes" / "bonn" / "runs").iterdir()
    mine = Run.read(own)
    assert (mine.is_finished, [*mine.info["clients"]]) == (True, ["bonn"])
    measured = [str(row) for row in result.run.rows() if row["client"] == "bonn"]
    assert measured
    assert sorted(map(str, mine.rows())) == sorted(measured)
    of_site = of_table(own, folder / "bonn.csv")
    if changes == ("method=fedavg",):
        pandas.testing.assert_frame_equal(of_site, of_table(result.folder, folder / "bonn.csv"))
    task = "ill" if changes == ("method=matu",) else None
    bundle = of_table(export(own, tmp_path / "bundle", task=task), folder / "bonn.csv")
    pandas.testing.assert_frame_equal(bundle, of_site[bundle.columns])
    assert "as client bonn recorded it" in (tmp_path / "bundle" / "README.md").read_text()
    page = tmp_path / "page.html"
    assert CliRunner().invoke(app, ["report", str(own), "--out", str(page)]).exit_code == 0
    with (folder / "bonn.csv").open("a") as table:
        table.write("1,u,0,1\n")
    with pytest.raises(StateError, match="the data set has changed since the run began"):
        export(own, tmp_path / "changed", task=task)


def test_a_server_that_dies_at_the_end_lets_its_sites_finish_again(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = OverGrid.export

    def export_then_die(self: OverGrid, built: Any, state: Any) -> Any:
        honest(self, built, state)
        raise KeyboardInterrupt

    monkeypatch.setattr(OverGrid, "export", export_then_die)
    with pytest.raises(KeyboardInterrupt):
        over_nodes(folder, tmp_path / "run", "method=ditto")
    monkeypatch.setattr(OverGrid, "export", honest)
    (own,) = (folder.parent / "nodes" / "bonn" / "runs").iterdir()
    rows, models = sorted(map(str, Run.read(own).rows())), (own / "model.safetensors").read_bytes()
    recipe = load({**RECIPE, **MODEL}, ("method=ditto",))
    resume(tmp_path / "run", engine=OverGrid(LocalGrid(client_app(recipe), homes(folder)), tmp_path / "run"))
    assert sorted(map(str, Run.read(own).rows())) == rows
    assert (own / "model.safetensors").read_bytes() == models


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tasks": [{"kind": "os.system", "name": "ill"}]}, "kind 'os.system' found, expected one of"),
        ({"config": {"client": "bonn", "data": "evil:data"}}, r"evil:data.*\nNothing was imported"),
        ({"config": {"client": "../x"}}, "config.client: '../x' found, expected"),
        ({"more": 1}, "more: unknown key"),
    ],
)
def test_a_sites_run_folder_names_nothing_that_runs(
    folder: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    over_nodes(folder, tmp_path / "run", "training.rounds=1")
    (own,) = (folder.parent / "nodes" / "bonn" / "runs").iterdir()
    file = own / "node.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(UserError, match=message):
        export(own, tmp_path / "bundle")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"terms": {"statistics": "forbid"}}, "statistics: forbid, but data.preprocess is federated"),
        ({"terms": {"withhold": ["examples"]}}, "withhold: examples, but data.preprocess: federated sends counts"),
    ],
)
def test_a_site_may_forbid_statistics(folder: Path, tmp_path: Path, more: dict[str, Any], message: str) -> None:
    result = over_nodes(folder, tmp_path / "run", "method.weights=uniform", "runtime.flower.min_clients=2", **more)
    (event,) = [event for event in events(result.folder) if event["event"] == "begins without some"]
    assert message in event["why"]
    assert {*result.run.info["clients"]} == {"bonn", "cologne"}
    lines = (folder.parent / "nodes" / "aachen" / "audit.jsonl").read_text()
    assert {json.loads(line)["what"] for line in lines.splitlines()} >= {"policy", "refuse"}
    assert "statistics" not in {json.loads(line)["what"] for line in lines.splitlines()}


@pytest.mark.parametrize(
    ("terms", "changes", "why"),
    [
        ({"statistics": "forbid"}, (), "statistics: forbid, but the report of this node has the mean"),
        ({"statistics": "forbid"}, ("tasks={task-1: {mean: 100}}",), "statistics: forbid, but the report"),
        ({"withhold": ["examples"]}, (), "withhold: examples, but the report of this node has the mean"),
        (None, ("privacy={clip: 1, noise: 2.0, delta: 1.0e-3, trust: local}",), "withhold: examples, but the report"),
        ({"statistics": "forbid"}, ("tasks={task-1: {mean: 100, std: 9}}",), ""),
        ({"statistics": "allow", "withhold": ["examples"]}, (), ""),
    ],
)
def test_the_scale_of_a_sites_labels_is_a_statistic(
    tmp_path: Path, terms: dict[str, Any] | None, changes: tuple[str, ...], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "privacy" in "".join(changes):
        pytest.importorskip("dp_accounting", reason="needs the extra `privacy`")
    x = np.random.default_rng(0).normal(size=(40, 3))
    arrays: dict[str, Any] = {"x": x, "y": 100 + 9 * x[:, 0], "task": np.ones(40, np.int64)}
    np.savez(tmp_path / "own.npz", **{f"{k}_{part}": v for k, v in arrays.items() for part in ("train", "test")})
    data = {"name": "tables", "path": str(tmp_path / "own.npz"), "kind": "regression"}
    (tmp_path / "node.yaml").write_text(json.dumps({"client": "aachen", "data": data, "terms": terms}))
    sent: list[str] = []
    pull = LocalGrid.pull_messages

    def listen(grid: LocalGrid, numbers: Any) -> list[Any]:
        answers = pull(grid, numbers)
        sent.extend(str(answer.content["meta"]) for answer in answers)
        return answers

    monkeypatch.setattr(LocalGrid, "pull_messages", listen)
    recipe = load(
        {**RECIPE, **MODEL}, ["runtime.flower.nodes=1", "training.rounds=1", "method.weights=uniform", *changes]
    )
    engine = OverGrid(LocalGrid(client_app(recipe), {1: {"home": str(tmp_path)}}), tmp_path / "run")
    if why:
        with pytest.raises(UserError, match=why):
            run(recipe, tmp_path / "run", engine=engine)
    else:
        assert run(recipe, tmp_path / "run", engine=engine).status == "finished"
    assert any(float(arrays["y"].mean()).hex() in text for text in sent) == ("allow" in str(terms))
    lines = [json.loads(line) for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
    noted = [line["labels"] for line in lines if line["what"] == "statistics"]
    assert noted == ([["task-1"]] if "allow" in str(terms) else [])
    said = (
        CliRunner().invoke(app, ["flower", "check", str(folder_of(tmp_path, recipe)), "--home", str(tmp_path)]).output
    )
    assert ("WRONG node: this site's terms: " + why in said) == bool(why), said


def folder_of(home: Path, recipe: Recipe) -> Path:
    """Return an app with a recipe."""
    (home / "recipe.yaml").write_text(dump(recipe))
    CliRunner().invoke(app, ["flower", "new", str(home / "recipe.yaml"), "--out", str(home / "app")])
    return home / "app"


@pytest.mark.parametrize("column", ["x", "ill"])
def test_a_cell_that_cannot_be_read_stays_at_its_site(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], column: str
) -> None:
    configs = homes(folder)  # the sections are drafted of the good tables
    table = pandas.read_csv(folder / "aachen.csv").astype({column: object})
    table.loc[3, column] = "Anna Mueller"
    table.to_csv(folder / "aachen.csv", index=False)
    recipe, out = load({**RECIPE, **MODEL}, ("runtime.flower.min_clients=2",)), tmp_path / "run"
    run(recipe, out, engine=OverGrid(LocalGrid(client_app(recipe), configs), out))
    (event,) = [event for event in events(out) if event["event"] == "begins without some"]
    assert "the site's data or settings do not fit the run: the node's log says more" in event["why"]
    said, audit = capsys.readouterr(), Path(configs[9]["home"]) / "audit.jsonl"
    everywhere = said.out + "".join(file.read_text("utf-8", "ignore") for file in out.rglob("*") if file.is_file())
    assert "Anna" not in everywhere
    assert "aachen.csv" not in everywhere
    assert "Anna Mueller" in said.err
    assert "Anna Mueller" in json.loads(audit.read_text().splitlines()[-1])["why"]


def test_a_recipe_with_data_of_its_own_is_refused_where_a_node_has_data(folder: Path, tmp_path: Path) -> None:
    recipe = load({**RECIPE, **MODEL, "data": {**section(folder), "path": str(folder)}, "partition": "own"})
    with pytest.raises(UserError, match="has data of its own, and the recipe has data: table, expected data: nodes"):
        run(recipe, tmp_path / "run", engine=OverGrid(LocalGrid(client_app(recipe), homes(folder)), tmp_path / "run"))


def test_a_code_for_missing_at_a_site_is_known_before_statistics_are_sent(folder: Path) -> None:
    config = NodeConfig.read(Path(homes(folder)[9]["home"]) / "node.yaml")
    table = pandas.read_csv(folder / "aachen.csv")
    table.assign(x=table.x.where(table.index % 7 > 0, 9999)).to_csv(folder / "aachen.csv", index=False)
    dataset, _ = own_data(load({**RECIPE, **MODEL}), config)
    assert [doubt.split(" found")[0] for doubt in dataset.doubts] == ["column 'x': cells with 9999"]


def test_a_server_gets_no_column_that_the_site_left_out(folder: Path) -> None:
    config = NodeConfig.read(Path(homes(folder)[9]["home"]) / "node.yaml")
    own = own_table(load({**RECIPE, **MODEL}), config)
    assert own is not None
    fitted = together({"aachen": own.report})
    asked = fitted.model_copy(update={"inputs": (*fitted.inputs, Input(column="id", kind="number", indicator=True))})
    with pytest.raises(DataError, match="the server's inputs are not those of this site's data.inputs"):
        own.dataset(asked)
    assert own.dataset(fitted).input_shape == (len(fitted.names),)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"inputs": {"x": "number"}}, "inputs columns: it has x, client 'bonn' has kind, x"),
        ({"minimum": 9}, "inputs minimum: it has 9, client 'bonn' has 5"),
    ],
)
def test_nodes_with_other_columns_are_left_out(
    folder: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    data = {**section(folder), **change, "path": str(folder / "aachen.csv")}
    result = over_nodes(folder, tmp_path / "run", "runtime.flower.min_clients=2",
                        data={key: value for key, value in data.items() if key != "site"})  # fmt: skip
    (event,) = [event for event in events(result.folder) if event["event"] == "begins without some"]
    assert message in event["why"]


@pytest.mark.parametrize(
    ("column", "sent", "message"),
    [
        ("x", {"mean": -1e155}, "table.sent.x.mean"),
        ("x", {"count": 10**400}, "table.sent.x.count"),
        ("x", {"count": 1 << 52, "mean": 1e99, "squares": 1e308}, "table.sent.x.squares"),
        ("kind", {"values": {"u\x1b[2J": 40}}, "expected texts without control characters"),
    ],
)
def test_statistics_that_cannot_be_added_cost_their_site_its_place(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, column: str, sent: dict[str, Any], message: str
) -> None:
    honest = Node.hello

    def answer(self: Node, head: Any, tree: Any) -> Any:
        report, numbers = honest(self, head, tree)
        if self.client == "aachen":
            assert report is not None
            report["table"]["sent"][column] |= sent
        return report, numbers

    monkeypatch.setattr(Node, "hello", answer)
    result = over_nodes(folder, tmp_path / "run", "runtime.flower.min_clients=2", "training.rounds=1")
    assert trained(result.folder) == [["bonn", "cologne"]]
    (event,) = [event for event in events(result.folder) if event["event"] == "begins without some"]
    assert message in event["why"]


def test_shares_with_noise_that_cannot_be_added_are_refused() -> None:
    value = {"site": None, "minimum": 5, "inputs": {"x": "number"}, "tasks": {"y": {"kind": "regression"}}}
    for largest in (1e9, 1.7e308):
        shares = {"x": (largest, largest, largest)}
        if largest < 1e100:
            TableReport.model_validate({**value, "shares": shares})
            continue
        with pytest.raises(ValueError, match="less than or equal to"):
            TableReport.model_validate({**value, "shares": shares})


PRIVATE = {"clip": 1.0, "noise": 0.1, "delta": 1e-3}


def private(folder: Path, out: Path, **privacy: Any) -> fl.Result:
    data = {**section(folder), "ranges": {"x": [20, 80], "score": [100, 300]}}
    data["inputs"] |= {"kind": ["u", "v", "w"]}
    recipe = load({**RECIPE, **MODEL, "method": {"name": "fedavg", "weights": "uniform"},
                   "privacy": {**PRIVATE, **privacy}})  # fmt: skip
    configs = homes(folder)
    for config in configs.values():
        file = Path(config["home"]) / "node.yaml"
        node = yaml.safe_load(file.read_text())
        node["data"] |= {key: value for key, value in data.items() if key not in ("site", "path")}
        file.write_text(yaml.safe_dump(node, sort_keys=False))
    return run(recipe, out, engine=OverGrid(LocalGrid(client_app(recipe), configs), out))


def test_under_privacy_the_server_adds_noise_that_nobody_can_repeat(folder: Path, tmp_path: Path) -> None:
    tables, spent = [], []
    for name in ("one", "two"):
        result = private(folder, tmp_path / name)
        tables.append(result.run.info["table"])
        spent.append([record["epsilon"] for _, record in result.run.records("privacy")][-1])
    assert tables[0]["noise"] == tables[1]["noise"] == 0.1
    assert tables[0]["scales"] != tables[1]["scales"]
    assert spent[0] == PrivacyTerms(0.1, 1e-3, "rdp", "central", "poisson", 0, 1.0, statistics=True).epsilon(2)
    recipe, partition = RunFolder.read(tmp_path / "one")
    again = OverGrid(LocalGrid(client_app(recipe), homes(folder)), tmp_path / "one").build(recipe, partition)
    assert again.dataset.table.model_dump(mode="json") == tables[0]  # not drawn a second time


def test_with_local_trust_each_node_draws_its_noise_once(folder: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        result = private(folder, tmp_path / name, trust="local", noise=2.0)
        assert result.run.info["table"]["noise"] == 2.0
    stored = json.loads((folder.parent / "nodes" / "bonn" / "statistics.json").read_text())
    (shares,) = stored.values()  # the same recipe and data: the same answer
    assert np.abs(shares).max() > 1  # nobody sends more without noise
    report = json.loads((tmp_path / "two" / "nodes.json").read_text())["bonn"]["table"]
    assert [*report["shares"].values()] == shares
    assert report["sent"] == {}


def test_nodes_with_images_that_their_own_tables_name_train_together(tmp_path: Path) -> None:
    rng, configs = np.random.default_rng(0), {}
    age = {"kind": "regression", "mean": 50, "std": 10}
    for number, site in enumerate(SITES):
        (home := tmp_path / site).mkdir()
        rows = []
        for i in range(24):
            level = int(rng.integers(2))
            picture = rng.normal(60 + 120 * level, 20, (12, 12)).clip(0, 255).astype("uint8")
            Image.fromarray(picture).save(home / f"{i}.png")
            rows.append({"file": i, "ill": level, "age": 40 + 20 * level + rng.normal()})
        pandas.DataFrame(rows).to_csv(home / "labels.csv", index=False)
        tasks = {"ill": {"kind": "binary", "classes": ["0", "1"]}} | ({"age": age} if number else {})
        data = {"name": "image-table", "path": str(home / "labels.csv"), "image": "file", "size": 12, "tasks": tasks}
        (home / "node.yaml").write_text(yaml.safe_dump({"client": site, "data": data}))
        configs[9 - number] = {"home": str(home)}
    training = {"rounds": 6, "batch_size": 8, "optimizer": {"name": "adam", "lr": 0.01}}
    recipe = load({**RECIPE, "name": "images", "model": "small-cnn", "training": training})
    result = run(recipe, tmp_path / "run", engine=OverGrid(LocalGrid(client_app(recipe), configs), tmp_path / "run"))
    final = result.final().values
    assert final["ill"]["auc"] > 0.9
    assert final["age"]["r2"] > 0
    facts = json.loads((result.folder / "run.json").read_text())["clients"]
    assert {name: [*client["tasks"]] for name, client in facts.items()} == {
        "aachen": ["ill"], "bonn": ["age", "ill"], "cologne": ["age", "ill"],
    }  # fmt: skip
