"""The JSON Schema of recipes accepts what is packaged, and refuses what is wrong."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from fedloom.cli.app import app
from fedloom.recipes.loader import names, read


def schema() -> dict:
    return json.loads(CliRunner().invoke(app, ["recipe", "schema"]).output)


def test_it_knows_the_parameters_of_every_name():
    method = schema()["$defs"]["MethodSection"]
    (prox,) = [shape for shape in method["anyOf"] if shape.get("title") == "fedprox"]
    assert prox["properties"]["mu"]["minimum"] == 0
    assert {"name", "mu", "add", "weights", "codec"} <= set(prox["properties"])
    assert "fedhca2" in method["anyOf"][0]["anyOf"][0]["enum"]


def test_packaged_recipes_fit_and_mistakes_do_not():
    jsonschema = pytest.importorskip("jsonschema")
    check = jsonschema.Draft202012Validator(schema())
    for name in names():
        assert not list(check.iter_errors(read(name)[1])), name
    for wrong in (
        {"data": "digitz"},
        {"method": {"name": "fedprox", "nu": 1}},
        {"training": {"rounds": "ten"}},
        {"model": {"name": "mlp", "hidden": 0}},
    ):
        assert list(check.iter_errors({**read("digits-tasks")[1], **wrong})), wrong
    assert not list(check.iter_errors({**read("digits-tasks")[1], "data": "mine.data:digits"}))
