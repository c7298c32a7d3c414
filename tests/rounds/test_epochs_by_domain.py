"""Clients of one domain may train for longer than others (FedHCA2: 1 epoch on PASCAL-Context, 4 on NYUD-v2)."""

from __future__ import annotations

from pathlib import Path

import pytest

import fedloom
from fedloom.errors import RecipeError
from fedloom.federation.recipes.loader import load
from tests_support import assert_same

SMALL = ("training.rounds=2", "evaluation.every=2", "training.batch_size=200", "model={name: mlp, hidden: [8]}")


def steps(folder: Path) -> dict[tuple[int, str], int]:
    """(round, client) -> steps."""
    run = fedloom.study.Run.read(folder)
    return {(line["round"], e["client"]): e["steps"] for line in run.rounds for e in line.get("train", ())}


def recipe(epochs: str):
    return load("digits-domains", (*SMALL, f"training.epochs={epochs}", "training.schedule.name=cosine"))


def test_each_domain_has_its_own_number_of_epochs(tmp_path: Path) -> None:
    domains = recipe("1").data.params["domains"]
    some, others = domains[0], domains[1:]
    mixed = "{" + ", ".join([f"{some}: 3", *(f"{name}: 1" for name in others)]) + "}"
    folders = {name: fedloom.run(recipe(text), tmp_path / name).folder for name, text in
               {"one": "1", "three": "3", "mixed": mixed}.items()}  # fmt: skip
    clients = fedloom.study.Run.read(folders["one"]).info["clients"]
    one, three, mixed_steps = (steps(folders[name]) for name in ("one", "three", "mixed"))
    expected = {key: (three if clients[key[1]]["domain"] == some else one)[key] for key in one}
    assert mixed_steps == expected
    assert one != three
    again = fedloom.run(recipe("{" + ", ".join(f"{name}: 3" for name in domains) + "}"), tmp_path / "all")
    assert_same(again.folder, folders["three"])


@pytest.mark.parametrize(
    ("epochs", "message"),
    [
        ("{plain: 1}", r"training.epochs: client '.*' has domain '.*', but the keys are plain$"),
        ("{plain: 0}", "training.epochs.plain"),
    ],
)
def test_what_does_not_fit_is_refused(epochs: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        fedloom.run(recipe(epochs))


def test_clients_without_domains_and_strangers_are_refused() -> None:
    with pytest.raises(RecipeError, match="client '.*' has no domain, but the keys are a$"):
        fedloom.run(load("digits-tasks", ("training.epochs={a: 1}",)))
    names = ", ".join(f"{name}: 1" for name in recipe("1").data.params["domains"])
    with pytest.raises(RecipeError, match=r"training.epochs.nowhere: no client has this domain"):
        fedloom.run(recipe("{" + names + ", nowhere: 1}"))
