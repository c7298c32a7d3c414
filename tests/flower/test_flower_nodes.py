"""Nodes with their own data, nodes that fail, and nodes that send what no honest node would."""

from __future__ import annotations

import io
import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import fedloom
from fedloom.cli.app import app
from fedloom.data.dataset import Dataset
from fedloom.data.tables.preprocessing import Label
from fedloom.data.tables.table import TableReport
from fedloom.engines.api import resume, run
from fedloom.errors import DataError, RecipeError, StateError, UserError
from fedloom.experiments.export.bundle import Bundle, export
from fedloom.experiments.export.finished import reopen
from fedloom.experiments.export.predict import inputs, of_files
from fedloom.federation.recipes.schema import recipe_hash
from fedloom.federation.rounds.federation import BuiltClient, Part
from fedloom.federation.runs.reader import Run
from fedloom.models.tasks.labels import Classification
from sites_support import SITES, Go, Server, configured, events, recipe, trained

pytest.importorskip("flwr")

from flwr.app import ConfigRecord, Context, RecordDict

from fedloom.engines.flower import Node, client_app, server_app
from fedloom.engines.flower.at_nodes import _HELLO
from fedloom.engines.flower.engine import LocalGrid, OverGrid
from fedloom.engines.flower.nodes import Elsewhere, NodeReport, about, agreed, federation_of
from fedloom.engines.flower.wire import VERSIONS, encode, size_of


def test_nodes_with_other_versions_are_named_before_training(
    go: Go, homes: dict[int, dict[str, str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = "fedloom 9.9, torch 2\x1b[31m"
    monkeypatch.setattr("fedloom.engines.flower.node.VERSIONS", theirs)
    go("training.rounds=1")
    said = f'other versions: client clinic, its node says "fedloom 9.9, torch 2 [31m", expected "{VERSIONS}"'
    assert said in capsys.readouterr().out.partition("round 1/1")[0]
    with pytest.raises(DataError, match="no node has reported"):
        Server(homes, deployed=recipe("training.rounds=2"))
    assert f"this node's has {recipe_hash(recipe('training.rounds=2'))}; the server has '{VERSIONS}', this node" in (
        capsys.readouterr().out
    )


@pytest.mark.parametrize(
    "changes",
    [
        ("method={name: fedavg, add: {feddea: {rho: 0.3}}, codec: sparse}",),
        ("method=matu",),
        ("method=fedper", "model.heads=own"),
        ("peers={}",),
    ],
)
def test_a_server_without_data(go: Go, homes: dict[int, dict[str, str]], changes: tuple[str, ...]) -> None:
    result = go(*changes)
    assert trained(result.folder) == [sorted(SITES)] * 3
    assert events(result.folder) == []
    about = json.loads((result.folder / "run.json").read_text())
    assert {c: set(v["tasks"]) for c, v in about["clients"].items()} == {c: set(t) for c, t in SITES.items()}
    assert {v["train"] + v["val"] for v in about["clients"].values()} == {60}
    run_id = json.loads((result.folder / "flower.json").read_text())["run"]
    counted = [json.loads(line) for line in (result.folder / "bytes.jsonl").read_text().splitlines()][1:]
    for config in homes.values():
        home = Path(config["home"])
        mine = [json.loads(line) for line in (home / "runs" / run_id / "bytes.jsonl").read_text().splitlines()]
        assert [line["round"] for line in mine] == [1, 2, 3]
        for way in ("up", "down"):
            whole = [[entry for entry in line[way] if entry["client"] == home.name] for line in counted]
            assert [line[way] for line in mine] == whole
            assert any(whole)
    labels = json.loads((result.folder / "partition.json").read_text())["labels"]
    assert labels == {site: {task: [0] for task in tasks} for site, tasks in SITES.items()}  # nobody has told


def test_a_node_exports_its_own_model_of_images(go: Go, homes: dict[int, dict[str, str]], tmp_path: Path) -> None:
    """Only the node knows how its images are scaled."""
    result = go("method=fedavg")
    with pytest.raises(UserError, match="only the nodes know how their inputs are scaled"):
        export(result.folder, tmp_path / "server")
    shutil.rmtree(result.folder)
    result = go("method=fedper", "model.heads=own")
    run_id = json.loads((result.folder / "flower.json").read_text())["run"]
    home = next(Path(config["home"]) for config in homes.values() if config["home"].endswith("clinic"))
    with pytest.raises(StateError, match="has no model, because each node keeps its client's"):
        export(result.folder, tmp_path / "server", client="clinic")
    assert [*Run.read(home / "runs" / run_id).info["tasks"]] == ["digit"]  # the lab has another one
    bundle = Bundle.read(export(home / "runs" / run_id, tmp_path / "bundle"))
    images = np.load(home.parent / "clinic.npz")["x_test"]
    Image.fromarray(images[0, 0]).save(tmp_path / "digit.png")
    x, _, _ = inputs(bundle, tmp_path / "digit.png")
    assert bundle.about.mean == pytest.approx([np.load(home.parent / "clinic.npz")["x_train"].mean() / 255], rel=0.1)
    answers = of_files(bundle, [tmp_path / "digit.png"], tmp_path / "p.png")
    built = reopen(home / "runs" / run_id)[0]
    assert answers.words[0][1]["digit"].startswith("class ")
    client = built.federation.clients["clinic"]
    shown = client.test.examples.batch(client.test.index[:1], torch.device("cpu"))
    assert torch.allclose(x, shown[0], atol=1e-5)


def test_a_node_at_work_has_no_finished_run(homes: dict[int, dict[str, str]]) -> None:
    server = Server(homes)
    server.train()
    file = server.home("clinic") / "runs" / server.at.run_id / "run.json"
    file.write_text("{}")
    server.train(round=2)
    assert not file.exists()


def test_answers_do_not_depend_on_node_ids(homes: dict[int, dict[str, str]], tmp_path: Path) -> None:
    outcomes = []
    for name, keys in (("a", sorted(homes)), ("b", [7, 5, 6])):
        grid = LocalGrid(client_app(recipe()), dict(zip(keys, homes.values(), strict=True)))
        result = run(recipe(), tmp_path / name, engine=OverGrid(grid, tmp_path / name))
        outcomes.append(fedloom.engines.api.trained_models(result.folder)[""])
    assert all(torch.equal(value, outcomes[1][key]) for key, value in outcomes[0].items())


@pytest.mark.parametrize("field", ["layout", "round", "run", "client"])
def test_an_answer_about_something_else_is_dropped(go: Go, field: str) -> None:
    def change(grid: LocalGrid) -> None:
        honest = grid.app

        def app(message: Any, context: Any) -> Any:
            reply = honest(message, context)
            meta = dict(reply.content["meta"])
            if meta["client"] == "lab" and message.metadata.message_type == "train.fedloom":
                reply.content["meta"] = ConfigRecord({**meta, field: "0"})
            return reply

        grid.app = app

    result = go("training.rounds=1", change=change)
    (event,) = events(result.folder)
    assert event["client"] == "lab"
    assert event["why"].startswith(f"{field}: expected")


def test_a_node_that_fails_says_why_in_its_own_log(
    go: Go, homes: dict[int, dict[str, str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    honest = Node.train

    def train(self: Node, head: Any, tree: Any) -> Any:
        if self.client == "lab":
            raise OSError("the disk is full")
        return honest(self, head, tree)

    monkeypatch.setattr(Node, "train", train)
    found = events(go("training.rounds=1").folder)
    assert {event["why"] for event in found} == {'its node says "the node failed (OSError): the node\'s log says more"'}
    said = capsys.readouterr().err
    assert ("the disk is full" in said, "Traceback" in said) == (True, False)
    assert any("the disk is full" in (Path(each["home"]) / "audit.jsonl").read_text() for each in homes.values())


def test_a_site_is_told_that_the_run_has_another_recipe_than_its_kit(
    go: Go, homes: dict[int, dict[str, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    """The server brings the recipe: a change of the kit's file, or of the server's after the kits were made, is said
    where it has no effect."""
    file = Path(homes[100]["home"]).parent / "recipe.yaml"  # the folder around all three homes
    try:
        file.write_text("training: {rounds: 1}\n")
        go("training.rounds=1")
        said = capsys.readouterr().err.splitlines()
    finally:
        file.unlink()
    (line,) = [line for line in said if line.startswith(f"client 'clinic': {file} has sha256 ")]
    assert ", the recipe of this run " in line
    assert line.endswith("clinic/audit.jsonl has its text")


def test_a_server_that_waits_says_for_whom(
    homes: dict[int, dict[str, str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = f"runtime.flower.keys={json.dumps({'never': '1' * 64})}"
    one = recipe("training.rounds=1", keys, "runtime.flower.nodes=4")
    run(one, tmp_path / "run", engine=OverGrid(LocalGrid(client_app(one), homes), tmp_path / "run"))
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("waits for nodes")]
    why = "client 'never': no node has registered as this client"
    assert said == [f"waits for nodes: here 3, expected 4, seconds 1, {why}"]


def test_a_node_that_refuses_a_hello_says_whose_it_is(
    go: Go, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Until it has joined, the server knows it by Flower's number, by which nobody finds the site."""
    honest = Node.hello

    def hello(self: Node, head: Any, tree: Any) -> Any:
        if self.client == "lab":
            raise DataError("lab.npz: the file or folder does not exist")
        return honest(self, head, tree)

    monkeypatch.setattr(Node, "hello", hello)
    with pytest.raises(UserError, match="client 'lab': the site's data or settings do not fit the run") as caught:
        go("training.rounds=1", "runtime.flower.min_clients=3", "runtime.flower.wait=1")
    assert "client 'lab': no node has registered" not in str(caught.value)
    said = capsys.readouterr()
    assert "its node says \"client 'lab': the site's data" in said.out
    assert "lab.npz: the file or folder does not exist" in said.err


def test_a_node_may_be_silent_or_gone_and_come_back(go: Go) -> None:
    """A node is silent in round 1 and gone in round 2; in round 3 it has a new id."""

    def change(grid: LocalGrid) -> None:
        asked = {"train": 0}
        push, lab = grid.push_messages, 99

        def pushed(messages: Any) -> list[str]:
            messages = list(messages)
            asked["train"] += any(m.metadata.message_type == "train.fedloom" for m in messages)
            if asked["train"] == 1:
                grid.silent.add(lab)
            return push(messages)

        def there() -> list[int]:
            if asked["train"] == 1 and lab in grid.contexts and grid.silent:
                grid.contexts[1000] = grid.contexts.pop(lab)
                grid.silent = set()
                asked["hidden"] = 1
            hidden = asked["train"] == 1 and asked.get("hidden")
            return [node for node in grid.contexts if not (hidden and node == 1000)]

        grid.push_messages, grid.get_node_ids = pushed, there  # type: ignore[method-assign]

    result = go("evaluation.every=3", change=change)
    assert trained(result.folder)[0] == ["clinic", "office"]
    assert trained(result.folder)[-1] == sorted(SITES)
    assert {e["client"] for e in events(result.folder)} == {"lab"}


def test_too_few_end_the_run_and_it_can_be_resumed(go: Go, homes: dict[int, dict[str, str]], tmp_path: Path) -> None:
    def change(grid: LocalGrid) -> None:
        pull = grid.pull_messages

        def pulled(ids: Any) -> Any:
            if (tmp_path / "run" / "metrics.jsonl").is_file() and len(trained(tmp_path / "run")) == 1:
                grid.silent.add(99)
            return pull(ids)

        grid.pull_messages = pulled  # type: ignore[method-assign]

    with pytest.raises(StateError, match=r"round 2: 2 of 3 clients answered.*'lab', train.fedloom: no answer within"):
        go("runtime.flower.min_clients=3", "evaluation.every=3", change=change)
    one = recipe("runtime.flower.min_clients=3", "evaluation.every=3")
    result = resume(tmp_path / "run", engine=OverGrid(LocalGrid(client_app(one), homes), tmp_path / "run"))
    assert trained(result.folder) == [sorted(SITES)] * 3


@pytest.mark.parametrize(
    ("name", "spoil", "said"),
    [
        ("nodes.json", lambda value: {"..": {**value["lab"], "client": ".."}}, "expected a client's name"),
        ("nodes.json", lambda value: {"lab": value["office"]}, "client: expected 'lab', found 'office'"),
        ("nodes.json", lambda value: [-1], "cannot be read"),
        ("keys.json", lambda value: {"..": "0" * 64}, "expected a client's name"),
        ("flower.json", lambda value: {"run": "../.."}, "run: '../..' found, expected 16 hexadecimal digits"),
        ("flower.json", lambda value: [], "expected a mapping with run"),
    ],
)
def test_a_run_folder_names_no_other_place(
    go: Go, homes: dict[int, dict[str, str]], tmp_path: Path, name: str, spoil: Callable[[Any], Any], said: str
) -> None:
    file = go("training.rounds=1").folder / name
    file.write_text(json.dumps(spoil(json.loads(file.read_text()))))
    with pytest.raises(StateError) as error:
        resume(tmp_path / "run", engine=OverGrid(LocalGrid(client_app(recipe()), homes), tmp_path / "run"))
    assert str(error.value).startswith(str(file))
    assert said in str(error.value)


def test_a_round_needs_only_enough_answers(go: Go) -> None:
    """The lab is slow: its answers come a round late, and are dropped and counted."""

    def change(grid: LocalGrid) -> None:
        pull, lab = grid.pull_messages, 99
        asked = {"lab": 0}

        def pulled(ids: Any) -> Any:
            trains = [each for each in ids if grid._waiting[each].metadata.message_type == "train.fedloom"]
            slow = [each for each in trains if grid._waiting[each].metadata.dst_node_id == lab]
            asked["lab"] += len(slow) > 0 and len(ids) == 3
            return pull([each for each in ids if each not in slow] if len(ids) > 1 and asked["lab"] < 3 else ids)

        grid.pull_messages = pulled  # type: ignore[method-assign]

    result = go("runtime.flower.enough=2", "evaluation.every=3", change=change)
    assert trained(result.folder)[:2] == [["clinic", "office"]] * 2
    said = events(result.folder)
    assert {(e["came"], e["asked"]) for e in said if e["event"] == "enough answers"} == {(2, 3)}
    assert [e["client"] for e in said if e["event"] == "late answer dropped"][:2] == ["lab", "lab"]
    assert result.status == "finished"


def test_enough_is_at_least_the_least_and_not_for_peers(go: Go) -> None:
    with pytest.raises(RecipeError, match=r"runtime\.flower\.enough: 1 found, expected at least min_clients \(2\)"):
        go("runtime.flower.enough=1", "runtime.flower.min_clients=2")
    with pytest.raises(RecipeError, match=r"runtime\.flower\.enough: only for runs with a server"):
        go("runtime.flower.enough=2", "peers={}")


def test_two_nodes_of_one_client_and_another_recipe(homes: dict[int, dict[str, str]], tmp_path: Path) -> None:
    doubled = {**homes, 200: homes[100]}
    grid = LocalGrid(client_app(recipe()), doubled)
    assert run(recipe(), tmp_path / "run", engine=OverGrid(grid, tmp_path / "run")).status == "finished"
    other = LocalGrid(client_app(recipe("seed=5")), homes)
    with pytest.raises(UserError, match="0 of 3 nodes reported"):
        run(recipe(), tmp_path / "other", engine=OverGrid(other, tmp_path / "other"))


def test_what_cannot_be_run_is_refused(homes: dict[int, dict[str, str]], tmp_path: Path) -> None:
    grid = LocalGrid(client_app(recipe()), homes)
    with pytest.raises(RecipeError, match=r"runtime\.flower\.nodes: null found"):
        run(recipe("runtime.flower.nodes=null"), tmp_path / "a", engine=OverGrid(grid, tmp_path / "a"))
    with pytest.raises(DataError, match="start the run with `flwr run`"):
        run(recipe(), tmp_path / "b")
    with pytest.raises(RecipeError, match=r"training\.stacked"):
        run(recipe("training.stacked=true"), tmp_path / "c", engine=OverGrid(grid, tmp_path / "c"))


def report(client: str, channels: int = 2, **more: Any) -> NodeReport:
    """A node's report with one task, mood."""
    task = {"kind": "Classification", "name": "mood", "channels": channels}
    sizes = {"train": 9, "val": 0, "test": 3}
    plain = {"client": client, "tasks": [task], "weights": {"mood": 1}, "sizes": sizes, "domain": None}
    return NodeReport.read({**plain, "input_shape": [8], **more}, client)


def told(client: str, *classes: str) -> NodeReport:
    """The report of a node whose data have the task mood with these classes, as a server reads it."""
    task = Classification("mood", len(classes))
    examples = Elsewhere(4, (8,))
    dataset = Dataset("own", (task,), examples, examples, classes={"mood": classes})
    own = Part(examples, np.arange(4), "own")
    node = about(BuiltClient(client, {"mood": (task, 1.0)}, own, own, own), dataset)
    hello = encode(node.model_dump(mode="json"), {"client": client})
    assert size_of(hello) <= _HELLO
    return NodeReport.read(json.loads(node.model_dump_json()), client)


def test_names_of_classes_are_compared_one_by_one() -> None:
    split = {"bonn": told("bonn", "x, y", "z"), "oslo": told("oslo", "x", "y, z")}
    assert agreed(split)[1]["oslo"].startswith("task mood, classes: it has 'x', 'y, z', client 'bonn' has 'x, y', 'z'")
    many = [f"c{i}" for i in range(500)]
    out = agreed({"bonn": told("bonn", *many), "oslo": told("oslo", *many[:7], "other", *many[8:])})[1]
    assert out["oslo"].startswith("task mood, classes: it has 'other' as class 7, client 'bonn' has 'c7' as class 7")


def test_labels_of_tables_that_differ_are_said_by_their_fields() -> None:
    def site(client: str, **label: Any) -> NodeReport:
        tasks = {"mood": Label(kind="classification", classes=("x", "y"), **label)}
        table = TableReport(site=None, minimum=5, inputs={"age": "number"}, tasks=tasks)
        return told(client, "x", "y").model_copy(update={"table": table})

    out = agreed({"bonn": site("bonn"), "oslo": site("oslo", column="state"), "rome": site("rome")})[1]
    assert out == {"oslo": "task mood, label: it has column state, client 'bonn' has column None"}


@pytest.mark.parametrize(
    "names",
    [
        [f"class {i}" for i in range(10_000)],
        ["\U0001f600" * 150 + str(i) for i in range(1000)],
        ["a", "two\nlines"],
        ["a", "b" * 201],
    ],
    ids=["many", "large", "lines", "long"],
)
def test_names_that_do_not_fit_a_report_are_compared_by_checksum(names: list[str]) -> None:
    nodes = {client: told(client, *names) for client in ("bonn", "oslo")}
    assert nodes["bonn"].classes == {}
    assert agreed(nodes)[1] == {}
    assert federation_of(nodes, True)[1].classes == {}
    out = agreed({**nodes, "rome": told("rome", *reversed(names))})[1]
    assert out["rome"].startswith("task mood, classes: its names differ from those of client 'bonn'; list all sites'")
    unnamed = report("rome", len(names), signal={"kind": "features"})  # labels that are numbers have no names
    assert agreed({**nodes, "rome": unnamed})[1] == {}


def test_checksums_that_are_not_those_of_the_names() -> None:
    other = told("rome", "good", "poor").digests
    assert report("rome", classes={"mood": ["good", "poor"]}, digests=other).digests == other
    wrongs = ({"mood": "no"}, {"temper": other["mood"]}, other)
    for digests in wrongs:
        with pytest.raises(ValueError, match="digests"):
            report("rome", classes={"mood": ["bad", "good"]}, digests=digests)


def test_nodes_whose_classes_have_other_names_do_not_train_together() -> None:
    """A node numbers the classes that it knows, so other names would be other labels without a word."""
    named = {name: report(name, classes={"mood": ["bad", "good"]}) for name in ("bonn", "oslo")}
    other = report("rome", classes={"mood": ["good", "poor"]})
    fitting, out = agreed({**named, "rome": other, "nice": report("nice")})
    assert out["rome"].startswith("task mood, classes: it has good, poor, client 'bonn' has bad, good; list all sites'")
    assert [*fitting] == ["bonn", "nice", "oslo"]  # labels that are numbers have no names
    assert federation_of(fitting, True)[1].classes == {"mood": ("bad", "good")}
    more = agreed({**named, "rome": report("rome", 3, classes={"mood": ["bad", "fair", "good"]})})[1]
    assert more["rome"].startswith("task mood, classes: it has bad, fair, good, client 'bonn' has bad, good")
    plain = agreed({"bonn": report("bonn"), "oslo": report("oslo"), "rome": report("rome", 3)})[1]
    assert plain == {"rome": "task mood: it has channels 3, client 'bonn' has channels 2"}
    for wrong in ({"mood": ["one"]}, {"temper": ["bad", "good"]}, {"mood": ["bad", "\x1b[2J"]}, {"mood": []}):
        with pytest.raises(ValueError, match="classes|texts without control characters"):
            report("rome", classes=wrong)


def test_a_run_goes_on_only_with_the_recipe_and_the_changes_that_it_began_with(
    homes: dict[int, dict[str, str]], tmp_path: Path
) -> None:
    def start(*own: str, changes: str = "") -> None:
        one, config = recipe("training.rounds=1", *own), {"folder": str(tmp_path / "run"), "changes": changes}
        grid = configured(LocalGrid(client_app(one), homes), config)
        server_app(one)(grid, Context(1, 0, {}, RecordDict(), config))

    start(changes="seed=3")
    start(changes="seed=3")
    for own, changes, keys in (((), "seed=4", "seed"), (("training.rounds=2",), "seed=3", "training.rounds")):
        with pytest.raises(StateError, match=f"began with other values of {keys}, which cannot change"):
            start(*own, changes=changes)


def test_flower_logs_a_refusal_as_one_sentence_and_a_bug_with_its_traceback() -> None:
    stream = io.StringIO()
    handler, log = logging.StreamHandler(stream), logging.getLogger("flwr")
    server_app(recipe())
    log.addHandler(handler)
    try:
        for error in (StateError("the run began with another seed"), KeyError("a bug")):
            try:
                raise error
            except (StateError, KeyError):  # as Flower does for any error of a ServerApp
                log.error("%s raised an exception", "ServerApp", exc_info=error)
    finally:
        log.removeHandler(handler)
    first, second, *rest = stream.getvalue().splitlines()
    assert (first, second) == ("the run began with another seed", "ServerApp raised an exception")
    assert "Traceback" in rest[0]


def test_runs_with_other_settings_are_compared_on_validation_data_at_the_server(
    homes: dict[int, dict[str, str]], tmp_path: Path
) -> None:
    for name, change in {
        "a": "training.optimizer.lr=0.001",
        "b": "training.optimizer.lr=0.01",
        "c": "method=local",
    }.items():
        one, config = recipe("training.rounds=1"), {"folder": str(tmp_path / name), "changes": change}
        grid = configured(LocalGrid(client_app(one), homes), config)
        server_app(one)(grid, Context(1, 0, {}, RecordDict(), config))
    told = CliRunner().invoke(app, ["compare", *(str(tmp_path / name) for name in "abc"), "--split", "val"])
    assert told.exit_code == 0, told.output
    assert "fedavg [lr=0.001]" in told.output
    assert "val split" in told.output
