"""A run is text until a site's terms agree to it: nothing that it names is imported or called before that."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedloom.cli.app import app
from fedloom.core.settings import trust
from fedloom.errors import RecipeError
from fedloom.federation.recipes.loader import dump
from fedloom.federation.recipes.schema import recipe_hash
from fedloom.federation.runs.track import verified
from sites_support import Demand, configured, make_homes, recipe

pytest.importorskip("flwr")

from fedloom.engines.flower import client_app
from fedloom.engines.flower.at_nodes import ClientManager
from fedloom.engines.flower.engine import LocalGrid
from fedloom.engines.flower.terms import Offer, SitePolicy
from fedloom.engines.flower.wire import RefusedError

EVIL = """
from pathlib import Path

from torch import nn

Path({owned!r}).touch()


class Net(nn.Module):
    features = 4
"""
TIMEIT = 'model={{name: "timeit:timeit", setup: "open({owned!r}, chr(119))", timer: null}}'
OWN = 'model={{name: "evil_net:Net"}}'
TRICKS = {"timeit": TIMEIT, "a module of the sender's": OWN}


@pytest.fixture
def sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An app's folder as it came: a recipe, and a module that importing would run."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "evil_net", raising=False)
    (tmp_path / "evil_net.py").write_text(EVIL.format(owned=str(tmp_path / "owned")))
    (tmp_path / "recipe.yaml").write_text(dump(recipe()))
    return tmp_path


def ask(sent: Path, homes: dict[int, dict[str, str]], changes: str = "") -> tuple[dict[str, int], dict[str, str]]:
    """(who joins, why others do not) of a run of this app."""
    # the server expects what the nodes run, so nodes refuse for no other reason
    grid = configured(LocalGrid(client_app(sent / "recipe.yaml"), homes), {"changes": changes})
    client_manager, why = ClientManager(grid, recipe_hash(recipe()), recipe().runtime.flower), dict[str, str]()
    client_manager.log = lambda event, fields: why.update({homes[fields["node"]]["home"]: fields["why"]})
    client_manager.meet()
    return client_manager.there(), {Path(home).name: text for home, text in why.items()}


@pytest.mark.parametrize("terms", [None, {}, {"code": "none"}, {"code": None}, {"leaves": ["encoder.*"]}], ids=repr)
@pytest.mark.parametrize("trick", TRICKS)
def test_code_that_changes_name_is_not_run(
    sent: Path, homes: dict[int, dict[str, str]], demand: Demand, trick: str, terms: dict[str, Any] | None
) -> None:
    """It is refused before anything is imported, with terms or without, and the audit says so."""
    home = demand(**terms) if terms is not None else Path(homes[100]["home"])
    there, why = ask(sent, homes, TRICKS[trick].format(owned=str(sent / "owned")))
    assert there == {}
    name = "timeit:timeit" if trick == "timeit" else "evil_net:Net"
    for text in (why["clinic"], why["lab"], verified(home / "audit.jsonl")[-1]["why"]):
        assert f"this site's terms: code: '{name}' (sha256 " in text
        assert text.rstrip('"').endswith("found, expected none; nothing was imported")
    assert verified(home / "audit.jsonl")[-1]["what"] == "refuse"
    assert not (sent / "owned").exists()
    assert "evil_net" not in sys.modules


@pytest.mark.parametrize("place", ["model", "method", "method.codec", "data", "tasks.digit.loss", "attack.name"])
def test_code_in_the_recipe_itself_is_not_run(sent: Path, homes: dict[int, dict[str, str]], place: str) -> None:
    value = json.loads(recipe().model_dump_json())
    *above, last = place.split(".")
    level = value
    for key in above:
        level[key] = level = level.get(key) or {}
    level[last] = {"name": "evil_net:Net"} if len(above) == 0 else "evil_net:Net"
    (sent / "recipe.yaml").write_text(json.dumps(value))
    there, why = ask(sent, homes)
    assert there == {}
    assert all("code: 'evil_net:Net'" in text for text in why.values())
    assert not (sent / "owned").exists()


def test_code_that_the_terms_list_with_its_checksum_may_run(sent: Path, demand: Demand) -> None:
    digest = hashlib.sha256((sent / "evil_net.py").read_bytes()).hexdigest()
    offer = Offer.of(recipe(), OWN.format())
    with pytest.raises(RefusedError, match=rf"sha256 {digest}\) found, expected evil_net with sha256 {'0' * 64}"):
        SitePolicy(code={"evil_net": "0" * 64}).agree_to_offer(offer)
    with pytest.raises(RecipeError, match="Nothing was imported"):
        offer.resolved()
    assert SitePolicy(code=[{"evil_net": digest}]) == SitePolicy(code={"evil_net": digest})
    assert SitePolicy(code=[]).code == {}
    SitePolicy(code={"evil_net": digest}).agree_to_offer(offer)
    assert offer.resolved().model.name == "evil_net:Net"
    assert (sent / "owned").exists(), "now it is imported"


def test_code_none_holds_whatever_the_machine_allows(sent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offer = Offer.of(recipe(), OWN.format())
    monkeypatch.setenv(trust.ALLOW, "evil_net")
    SitePolicy().agree_to_offer(offer)
    with pytest.raises(RefusedError, match="expected none; nothing was imported"):
        SitePolicy(code="none").agree_to_offer(offer)


OFFERS: list[tuple[dict[str, Any], str, str]] = [
    ({}, "training.rounds=9; seed=3", ""),
    ({"changes": []}, "", ""),
    ({"changes": []}, "seed=3", "changes: 'seed' found, expected none"),
    ({"changes": ["training.*", "seed"]}, "training.rounds=9; seed=3", ""),
    ({"changes": ["training.*"]}, "training={rounds: 9}", "changes: 'training' found, expected training.*"),
    ({"changes": ["training.*"]}, "training.rounds=9; method=fedper", "changes: 'method' found, expected training.*"),
    ({"recipes": ["0" * 64]}, "", "recipes: sha256 "),
    ({"recipes": ["right"]}, "", ""),
    ({"recipes": ["right"]}, "seed=3", "changes: 'seed' found, expected none"),
    ({"recipes": ["right"], "changes": ["seed"]}, "seed=3", ""),
]


@pytest.mark.parametrize(("terms", "changes", "why"), OFFERS)
def test_recipes_and_changes(sent: Path, terms: dict[str, Any], changes: str, why: str) -> None:
    file = sent / "recipe.yaml"
    right = hashlib.sha256(file.read_bytes()).hexdigest()
    site = SitePolicy.model_validate({**terms, **({"recipes": [right]} if terms.get("recipes") == ["right"] else {})})
    offer = Offer.of(file, changes)
    assert offer.sha256 == right
    if not why:
        site.agree_to_offer(offer)
        return
    with pytest.raises((RefusedError, RecipeError)) as refused:
        site.agree_to_offer(offer)
    assert why in str(refused.value)


def test_what_was_accepted_is_on_record_once_with_its_text(sent: Path, tmp_path: Path) -> None:
    (tmp_path / "sites").mkdir()
    homes = make_homes(tmp_path / "sites")
    assert sorted(ask(sent, homes)[0]) == ["clinic", "lab", "office"]
    ask(sent, homes)
    ask(sent, homes, "seed=3")
    lines = [line for line in verified(Path(homes[100]["home"]) / "audit.jsonl") if line["what"] == "recipe"]
    text = (sent / "recipe.yaml").read_text()
    assert [(line["changes"], line["text"]) for line in lines] == [([], text), (["seed=3"], text)]
    assert {line["sha256"] for line in lines} == {hashlib.sha256(text.encode()).hexdigest()}


def test_text_that_is_no_recipe_is_refused_and_on_record(sent: Path, homes: dict[int, dict[str, str]]) -> None:
    for text in ("[1, 2]", "a: [", "\x00", "name: 3"):
        (sent / "recipe.yaml").write_text(text)
        assert ask(sent, homes)[0] == {}
        assert verified(Path(homes[100]["home"]) / "audit.jsonl")[-1]["what"] == "refuse"


def test_flower_new_and_check_say_what_a_site_may_write_into_its_terms(tmp_path: Path) -> None:
    run, out = CliRunner(), tmp_path / "sites"
    made = run.invoke(app, ["flower", "new", "digits-tasks", "--out", str(out)])
    file = next(out.rglob("recipe.yaml"))
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    assert f"sha256 {digest}" in made.output
    readme = (out / "README.md").read_text()
    for line in ("code: none ", "changes: [] ", f"recipes: [{digest}]"):
        assert line in readme
    home = tmp_path / "home"
    home.mkdir()
    node = home / "node.yaml"
    node.write_text(f"client: digit-0\nterms: {{code: none, changes: [], recipes: [{digest}]}}\n")
    good = run.invoke(app, ["flower", "check", str(out), "--home", str(home)])
    assert good.exit_code == 0, good.output
    assert f"sha256 {digest}" in good.output
    file.write_text(file.read_text() + "\n")
    bad = run.invoke(app, ["flower", "check", str(out), "--home", str(home)])
    assert bad.exit_code == 1
    assert "this site's terms: recipes: sha256" in bad.output
