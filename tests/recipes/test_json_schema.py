"""The JSON Schema of recipes accepts what is packaged, and refuses what is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedloom.cli.app import app
from fedloom.core.settings.yaml import parse
from fedloom.federation.recipes.loader import EDITORS, HOME, SHIPPED, load, names, packaged, read
from fedloom.federation.recipes.schema import recipe_hash


def schema() -> dict:
    return json.loads(CliRunner().invoke(app, ["recipes", "--schema"]).output)


def test_it_knows_the_parameters_of_every_name():
    method = schema()["$defs"]["MethodSection"]
    (prox,) = [shape for shape in method["anyOf"] if shape.get("title") == "fedprox"]
    assert prox["properties"]["mu"]["minimum"] == 0
    assert {"name", "mu", "add", "weights", "codec"} <= set(prox["properties"])
    assert "fedhca2" in method["anyOf"][0]["anyOf"][0]["enum"]


def test_packaged_recipes_fit_and_mistakes_do_not():
    jsonschema = pytest.importorskip("jsonschema")
    check = jsonschema.Draft202012Validator(schema())
    texts = {its.text: name for name, its in packaged(HOME).items()}
    for value in (*(read(name).value for name in names()), *(parse(text, name) for text, name in texts.items())):
        assert not list(check.iter_errors(value)), value
    for wrong in (
        {"data": "digitz"},
        {"method": {"name": "fedprox", "nu": 1}},
        {"training": {"rounds": "ten"}},
        {"model": {"name": "mlp", "hidden": 0}},
    ):
        assert list(check.iter_errors({**read("digits-tasks").value, **wrong})), wrong
    assert list(check.iter_errors({"name": "mine", "data": "digits"}))
    assert not list(check.iter_errors({"like": "digits-tasks", "training.rounds": 3}))
    for fits in ({"data": "mine.data:digits"}, {"method": "feddea"}, {"method": {"name": "feddea", "rho": 0.3}}):
        assert not list(check.iter_errors({**read("digits-tasks").value, **fits}))


def test_the_shipped_schema_is_the_one_that_the_command_prints():
    # in a Python of its own, where no test has registered anything, and without what other packages bring
    code = (
        "import json; from fedloom.federation.recipes.loader import schema; "
        "from fedloom.core.settings.registry import Registry; "
        "Registry.announced = {}; print(json.dumps(schema()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    again = "run `fedloom recipes --schema --out src/fedloom/federation/recipes/recipe.schema.json`"
    assert json.loads(SHIPPED.read_text("utf-8")) == json.loads(done.stdout), again


def test_packaged_recipes_name_the_shipped_schema():
    for file in Path(str(HOME)).rglob("*.yaml"):
        first = file.read_text("utf-8").splitlines()[0]
        assert (file.parent / first.removeprefix(EDITORS)).resolve() == Path(str(SHIPPED)).resolve(), file


def test_the_line_for_editors_changes_no_hash():
    text = packaged(HOME)["digits-tasks"].text
    without = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    assert recipe_hash(load(parse(without, "without"))) == recipe_hash(load("digits-tasks"))
