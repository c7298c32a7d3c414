"""What `fedloom flower check` says of a node's messages names all that they hold, and nothing that they do not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from sites_support import Go, recipe

pytest.importorskip("flwr")

from fedloom.data.tables.table import OwnTable
from fedloom.engines.flower.engine import LocalGrid
from fedloom.engines.flower.nodes import NodeConfig, own_data, own_table
from fedloom.engines.flower.sends import sentences
from fedloom.engines.flower.terms import SitePolicy, agree_to_statistics
from fedloom.engines.flower.wire import RefusedError, decode

PRIVATE = "method={name: fedper, weights: uniform}", "privacy={clip: 1, noise: 2.0, delta: 1.0e-3, trust: %s}"
CASES: dict[str, tuple[str, ...]] = {
    "fedavg": (),
    "its own heads, and scores after training": ("model.heads=own", "evaluation.models=[global, trained]"),
    "prototypes": ("method=fedproto",),
    "nothing but numbers": ("method=local",),
    "an auxiliary vector": ("method=scaffold",),
    "a row per task, packed": ("method=matu",),
    "losses beside the update": ("method=fedga",),
    "steps beside the update": ("method=fednova",),
    "a share of examples for each model": ("method=fedsoft",),
    "running statistics": ("model={name: resnet10, width: 4}",),
    "central noise": (PRIVATE[0], PRIVATE[1] % "central"),
    "local noise": (PRIVATE[0], PRIVATE[1] % "local"),
    "peers": ("peers={choose: {top: 1}, similarity: {signals: {features: 0.5, gradient: 0.5}}}",),
}


def told(home: Path, *changes: str) -> tuple[set[str], str]:
    """Return (fields that the sentences about a site name, the sentences)."""
    config, one = NodeConfig.read(home / "node.yaml"), recipe(*changes).at_nodes()
    said = [*sentences(one, config, *own_data(one, config), None)]
    return {field for _, fields, _ in said for field in fields.split()}, "\n".join(text for _, _, text in said)


def found(content: Any) -> Iterator[tuple[str, Any]]:
    """Yield the fields of a node's message with their values, without those that are empty."""
    yield from content["meta"].items()
    for name, value in content["metrics"].items():
        first = name.partition("/")[0]
        yield "scores" if first.isdigit() or first == "trained" else first, value
    for name, value in (decode(content) or {}).items():
        if name in ("extra", "side"):
            yield from ((f"{name}.{each}", one) for each, one in value.items())
        elif value is not None and not (hasattr(value, "__len__") and not len(value)):
            yield name, value


@pytest.mark.parametrize("case", CASES)
def test_each_field_that_leaves_is_named_and_no_other(
    go: Go, homes: dict[int, dict[str, str]], case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "privacy" in "".join(CASES[case]):
        pytest.importorskip("dp_accounting", reason="needs the extra `privacy`")
    home = Path(next(config["home"] for config in homes.values() if config["home"].endswith("office")))
    sent: dict[str, Any] = {}
    pull = LocalGrid.pull_messages

    def listen(grid: LocalGrid, numbers: Any) -> list[Any]:
        answers = pull(grid, numbers)
        for answer in answers:
            if answer.content["meta"]["client"] == "office":
                sent.update(found(answer.content))
        return answers

    monkeypatch.setattr(LocalGrid, "pull_messages", listen)
    go(*CASES[case])
    named, text = told(home, *CASES[case])
    assert sent.keys() <= named, text
    always = {"error", "again", "withheld", "finite", "domain", "classes", "digests", "signal", "table", "tasks"}
    peers = {"n", "packed", "loss", "events", "buffers", "integers"} if case == "peers" else set()
    assert named - sent.keys() - always <= peers, text
    if case in ("its own heads, and scores after training", "local noise"):  # no heads of others are beside its own
        assert f"changed {sent['packed']['values'].numel():,} parameters" in text


def of_table(folder: Path, rows: int, *changes: str) -> tuple[OwnTable, list[tuple[str, str, str]]]:
    """Return a table of so many rows, and the sentences about it."""
    lines = ["age,ward,ill", *(f"{40 + i % 30},{'ab'[i % 2]},{i % 2}" for i in range(rows))]
    (folder / "own.csv").write_text("\n".join(lines))
    data = {"name": "table", "path": str(folder / "own.csv"), "inputs": {"age": "number", "ward": ["a", "b"]}}
    data |= {"tasks": {"ill": {"kind": "binary", "classes": ["0", "1"]}}, "ranges": {"age": [0, 110]}}
    config = NodeConfig.model_validate({"client": "clinic", "data": data})
    one = recipe("model={name: mlp, hidden: [4]}", "method={name: fedavg, weights: uniform}", *changes)
    own = own_table(one, config)
    assert own is not None
    return own, [*sentences(one, config, *own_data(one, config, own), own)]


@pytest.mark.parametrize("trust", [None, "central", "local"])
def test_statistics_of_a_table_are_named_with_who_adds_noise(tmp_path: Path, trust: str | None) -> None:
    if trust is not None:
        pytest.importorskip("dp_accounting", reason="needs the extra `privacy`")
    own, said = of_table(tmp_path, 60, *([] if trust is None else [PRIVATE[1] % trust]))
    (table,) = (text for _, fields, text in said if fields == "table")
    assert f"of {', '.join([*own.report.sent, *own.report.shares])} in training rows" in table
    who = {None: "counts (also of missing cells), means", "central": "the server adds noise", "local": "this node adds"}
    assert who[trust] in table
    assert any("how training changed about" in text for _, _, text in said), said


@pytest.mark.parametrize("trust", ["central", "local"])
def test_shares_of_rows_are_counts_unless_this_node_adds_noise(trust: str) -> None:
    privacy = recipe(PRIVATE[0], PRIVATE[1] % trust).privacy
    with pytest.raises(RefusedError, match="sends counts") if trust == "central" else nullcontext():
        agree_to_statistics(SitePolicy(withhold=("examples",)), {"examples"}, privacy, table=True, scales=())


def test_what_depends_on_other_sites_is_left_open(tmp_path: Path) -> None:
    """A site with few rows sends no counts, so its own table does not tell the inputs."""
    _, said = of_table(tmp_path, 6)
    assert "cannot be said before the run: " in said[-1][2]
    assert not any("after each training" in text for _, _, text in said)
