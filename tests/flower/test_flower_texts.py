"""Nodes with texts of their own."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from fedloom.engines.api import run
from fedloom.experiments.export.bundle import Bundle, export
from fedloom.experiments.export.predict import of_table
from fedloom.federation.recipes import load

pytest.importorskip("flwr")

from fedloom.engines.flower import client_app
from fedloom.engines.flower.engine import LocalGrid, OverGrid

WORDS = ("awful", "great", "of", "the")


def test_a_node_exports_a_model_that_predicts_texts(tmp_path: Path) -> None:
    (tmp_path / "words").write_text("\n".join(WORDS))
    homes: dict[int, dict[str, str]] = {}
    for number, site in enumerate(("oslo", "rome")):
        rows = [(f"the {('awful', 'great')[i % 2]} {site}", ("bad", "good")[i % 2]) for i in range(40)]
        with (tmp_path / f"{site}.csv").open("w", newline="") as file:
            csv.writer(file).writerows([("text", "mood"), *rows])
        data: dict[str, Any] = {"name": "texts", "path": str(tmp_path / f"{site}.csv"), "labels": {"mood": "mood"}}
        data |= {"words": str(tmp_path / "words"), "length": 4, "classes": {"mood": ["bad", "fair", "good"]}}
        (tmp_path / site).mkdir()
        (tmp_path / site / "node.yaml").write_text(json.dumps({"client": site, "data": data}))
        homes[number + 1] = {"home": str(tmp_path / site)}
    recipe = load({
        "name": "t", "data": "nodes", "partition": "nodes", "method": "fedavg",
        "model": {"name": "transformer", "width": 8, "num_heads": 2, "depth": 1},
        "training": {"rounds": 3, "batch_size": 8, "optimizer": {"name": "adam", "lr": 0.05}},
        "runtime": {"engine": "flower", "flower": {"nodes": 2, "wait": 1.0, "deadline": 60.0}},
    })  # fmt: skip
    result = run(recipe, tmp_path / "run", engine=OverGrid(LocalGrid(client_app(recipe), homes), tmp_path / "run"))
    (own,) = (tmp_path / "oslo" / "runs").iterdir()
    bundle = Bundle.read(export(own, tmp_path / "bundle"))
    assert bundle.words is not None
    assert bundle.words.listed == WORDS
    assert bundle.about.classes == {"mood": ["bad", "fair", "good"]}
    with (tmp_path / "new.csv").open("w") as file:
        file.write("text\nThe awful!\ngreat\n")
    assert of_table(tmp_path / "bundle", tmp_path / "new.csv")["mood"].tolist() == ["bad", "good"]
    assert [*result.run.info["clients"]] == ["oslo", "rome"]
