"""Recipes: what is read, what is filled in, and what each mistake is answered with."""

from __future__ import annotations

import re
from copy import deepcopy
from functools import partial
from typing import Annotated, Literal

import pytest
import yaml
from pydantic import Field

import fedloom as fl
from fedloom.core.settings.registry import Registry
from fedloom.core.settings.yaml import parse
from fedloom.errors import RecipeError
from fedloom.federation.recipes import Recipe, dump, load, recipe_hash
from fedloom.federation.recipes.schema import DataSection, MethodSection, ModelSection, Named, PartitionSection
from fedloom.methods import CODECS

DATA, PARTITION, MODEL = (Registry(kind, gives=("builtins:object",)) for kind in ("data set", "partition", "encoder"))
METHOD, ADDON = (Registry(kind, gives=("builtins:object",)) for kind in ("method", "add-on"))
Clients = Annotated[int, Field(ge=1)]


@DATA.register("toy")
def toy(seed: int, *, size: Annotated[int, Field(ge=8)] = 16, tasks: tuple[Literal["a", "b"], ...] = ("a", "b")):
    """Two tasks."""


@PARTITION.register("one-task")
def one_task(
    pool: object,
    seed: int,
    *,
    clients: Clients | dict[str, Clients] = 1,
    order: Literal["none"] | list[Literal["a", "b"]] = "none",
):
    """One task a client."""


@MODEL.register("small-cnn")
def small_cnn(*, width: int = 8):
    """Small."""


@METHOD.register("local")
def local():
    """No exchange."""


@METHOD.register("fedprox")
def fedprox(*, mu: Annotated[float, Field(ge=0)] = 0.01):
    """Proximal."""


@ADDON.register("feddea")
def feddea(*, rho: Annotated[float, Field(gt=0, le=1)] = 0.3, keep: bool = False):
    """Top magnitude."""


@ADDON.register("clip")
def clip(*, norm: float):
    """Clip."""


HOMES = {
    ("fedloom.data", "DATASETS"): DATA,
    ("fedloom.data.partition", "PARTITIONERS"): PARTITION,
    ("fedloom.models", "ENCODERS"): MODEL,
    ("fedloom.methods", "METHODS"): METHOD,
    ("fedloom.methods", "ADDONS"): ADDON,
    ("fedloom.methods", "CODECS"): CODECS,
}
BASE = {"name": "t", "data": "toy", "partition": "one-task", "model": "small-cnn", "method": "fedprox"}


@pytest.fixture
def toys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registries of this file's own, so that these tests do not depend on what fedloom registers."""
    monkeypatch.setattr("fedloom.federation.recipes.schema.registry", lambda module, name: HOMES[module, name])


@pytest.fixture
def refused(toys: None):
    """The lines, without the heading, that a changed recipe is refused with."""

    def check(*overrides: str, **sections: object) -> list[str]:
        with pytest.raises(RecipeError) as caught:
            load({**BASE, **sections}, overrides)
        return str(caught.value).splitlines()[1:]

    return check


def test_bare_names_and_defaults_are_resolved(toys):
    recipe = load(BASE)
    assert recipe.data.name == "toy"
    assert recipe.data.params == {"size": 16, "tasks": ("a", "b")}
    assert recipe.method.params == {"mu": 0.01}
    assert recipe.model.heads == "all"
    assert (recipe.method.weights, recipe.method.buffers, recipe.method.codec) == (None, None, None)
    assert recipe.method.entry.function is fedprox
    assert recipe.training.rounds == 10


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["method.add.feddea=", "method.add.clip.norm=1"],
        ["early_stopping.patience=3", "training.optimizer.lr=1e-8", "runtime.device=[cuda:0, cuda:1]"],
        ["name='1e5'", "data.tasks=[b]", "training.steps=4"],
    ],
)
def test_dump_is_complete_and_reads_back(toys, overrides, tmp_path):
    recipe = load(BASE, overrides)
    file = tmp_path / "r.yaml"
    file.write_text(dump(recipe))
    again = load(file)
    assert again == recipe
    assert recipe_hash(again) == recipe_hash(recipe)
    assert dump(again) == dump(recipe)
    value = yaml.safe_load(dump(recipe))
    assert list(value) == list(Recipe.model_fields)
    assert value["training"]["optimizer"]["name"] == "sgd"
    assert value["method"]["mu"] == 0.01
    # Python users get the same check as YAML.
    assert Recipe.model_validate(recipe.model_dump()) == recipe


def test_a_recipe_does_not_change_once_read(toys):
    with pytest.raises(ValueError, match="frozen"):
        load(BASE).seed = 3


def test_add_ons_keep_their_order_and_take_their_defaults(toys):
    first = load({**BASE, "method": {"name": "local", "add": {"feddea": None, "clip": {"norm": 2}}}})
    second = load({**BASE, "method": {"name": "local", "add": {"clip": {"norm": 2}, "feddea": {}}}})
    assert list(first.method.add.items()) == [("feddea", {"rho": 0.3, "keep": False}), ("clip", {"norm": 2.0})]
    assert list(second.method.add) == ["clip", "feddea"]
    assert recipe_hash(first) != recipe_hash(second)


def test_overrides(toys):
    recipe = load(
        BASE,
        [
            "training.optimizer.lr=1e-3",
            "method.mu=1",
            "data.tasks=[b]",
            "method.add.feddea.rho=0.5",
            "model.heads=own",
            "seed=7",
        ],
    )
    assert recipe.training.optimizer.lr == 1e-3
    assert recipe.method.params == {"mu": 1.0}
    assert recipe.data.params["tasks"] == ("b",)
    assert recipe.method.add["feddea"]["rho"] == 0.5
    assert (recipe.model.heads, recipe.seed) == ("own", 7)
    assert load(BASE, ["method=local"]).method.params == {}
    assert load(BASE, ["method.name=local"]).method.name == "local"
    assert load(BASE, ["method.mu=1", "method=fedprox"]).method.params == {"mu": 0.01}


def test_the_source_mapping_is_left_alone(toys):
    source = {**BASE, "training": {"rounds": 3}}
    load(source, ["training.rounds=4", "method.mu=2"])
    assert source == {**BASE, "training": {"rounds": 3}}


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("training.optimizer.lr=-1", "training.optimizer.lr: -1 found, expected a number greater than 0"),
        ("training.optimizer.lr=.inf", "training.optimizer.lr: inf found. Input should be a finite number"),
        ("training.optimizer.lr=fast", "training.optimizer.lr: 'fast' found, expected a number greater than 0"),
        (
            "training.optimizer.momentum=1",
            "training.optimizer.momentum: 1 found, expected a number of at least 0 and less than 1",
        ),
        ("training.optimizer.nesterov=true", "training.optimizer: nesterov needs momentum > 0"),
        (
            "training.optimizer.name=adamm",
            "training.optimizer.name: 'adamm' found, expected 'sgd', 'adam' or 'adamw'. Did you mean 'adam'?",
        ),
        ("training.rounds=true", "training.rounds: true found, expected an integer of at least 1"),
        ("training.rounds='10'", "training.rounds: '10' found, expected an integer of at least 1"),
        ("training.rounds=2.5", "training.rounds: 2.5 found, expected an integer of at least 1"),
        ("training.rounds=", "training.rounds: null found, expected an integer of at least 1"),
        (
            "training.epochs=0",
            "training.epochs: 0 found, expected an integer of at least 1 or a mapping (each value: an integer of "
            "at least 1) or null",
        ),
        ("training.keep_optimizer=1", "training.keep_optimizer: 1 found, expected true or false"),
        ("training.optimizer.betas=[0.9]", "training.optimizer.betas[1]: missing, expected a number"),
        ("training.steps=3 ", None),
        ("evaluation.splits=[tset]",
         "evaluation.splits[0]: 'tset' found, expected 'val' or 'test'. Did you mean 'test'?"),
        (
            "evaluation.splits=test",
            "evaluation.splits: 'test' found, expected a list (each item: 'val' or 'test')",
        ),
        ("runtime.device=3", "runtime.device: 3 found, expected a text or a list (each item: a text)"),
        ("runtime.worker=3", "runtime.worker: unknown key. Did you mean 'workers'? "
         "Allowed: checkpoint_every, deterministic, device, diagnostics, engine, exact, flower, mirror, threads, "
         "track, workers"),
        ("early_stopping.patience=0", "early_stopping.patience: 0 found, expected an integer of at least 1"),
        ("early_stopping.min_delta=0", "early_stopping.patience: missing, expected an integer of at least 1"),
        ("early_stopping={patience: 1, patient: 2}", "early_stopping.patient: unknown key. Did you mean 'patience'? "
         "Allowed: min_delta, patience, relative, restore_best"),
        ("trainig.rounds=3", "trainig: unknown key. Did you mean 'training'? Nearest of 14: training, runtime, "
         "early_stopping"),
        ("seed=-1", "seed: -1 found, expected an integer of at least 0 and less than 9223372036854775808"),
        ("name=a b", "name: 'a b' found, expected a name of letters, digits, '_', '-' and '.'"),
        ("name=2024-01-01", None),
        ("training=5", "training: 5 found, expected a mapping with rounds, epochs, steps, batch_size, optimizer, "
         "schedule, clip_norm, keep_optimizer, participation, precision, channels_last, stacked"),
        ("data=5", "data: 5 found, expected a name, or a mapping with 'name' and its parameters"),
        ("data=toi", "data.name: unknown data set 'toi'. Did you mean 'toy'? Allowed: toy, or package.module:name"),
        ("data={size: 8}", "data.name: missing, expected one of toy"),
        ("data.size=4", "data.size: 4 found, expected an integer of at least 8"),
        ("data.sise=16", "data.sise: unknown key. Did you mean 'size'? Allowed: name, size, tasks"),
        ("data.tasks=[a, c]", "data.tasks[1]: 'c' found, expected 'a' or 'b'"),
        ("method.mu=-1", "method.mu: -1 found, expected a number of at least 0"),
        (
            "method.weights=sise",
            "method.weights: 'sise' found, expected 'size', 'declared' or 'uniform' or null. Did you mean 'size'?",
        ),
        ("method.rho=1", "method.rho: unknown key. Allowed: add, buffers, codec, max_examples, mu, name, python, "
         "weights"),
        ("partition.clients=0", "partition.clients: 0 found, expected an integer of at least 1 or a mapping "
         "(each value: an integer of at least 1)"),
        ("partition.clients={a: 0}", "partition.clients.a: 0 found, expected an integer of at least 1"),
        ("partition.order=[x]", "partition.order[0]: 'x' found, expected 'a' or 'b'"),
        ("runtime.device=[cuda:0, 1]", "runtime.device[1]: 1 found, expected a text"),
        ("method.add=feddea", "method.add: 'feddea' found, expected a mapping of add-ons, each with its parameters"),
        ("method.add.fedea=", "method.add.fedea: unknown add-on 'fedea'. Did you mean 'feddea'? Allowed: clip, "
         "feddea, or package.module:name"),
        (
            "method.add.feddea=0.3",
            "method.add.feddea: 0.3 found, expected a mapping with its parameters",
        ),
        (
            "method.add.feddea.rho=0",
            "method.add.feddea.rho: 0 found, expected a number greater than 0 and of at most 1",
        ),
        ("method.add.clip=", "method.add.clip.norm: missing, expected a number"),
    ],
)  # fmt: skip
def test_each_mistake_is_named(refused, toys, override, line):
    if line is None:
        load(BASE, [override])
    else:
        assert refused(override) == [line]


def test_all_mistakes_come_in_one_error(refused):
    lines = refused(
        "training.rouds=3", "training.batch_size=0", "data.size=1", "method.mu=x", "method.codec=zip", "model=vgg"
    )
    assert [line.partition(":")[0] for line in lines] == [
        "data.size",
        "model.name",
        "method.mu",
        "method.codec",
        "training.batch_size",
        "training.rouds",
    ]


def test_missing_sections_are_named(toys):
    with pytest.raises(RecipeError) as caught:
        load({"name": "t"})
    assert [line.partition(":")[0] for line in str(caught.value).splitlines()[1:]] == [
        "data",
        "partition",
        "model",
        "method",
    ]


def test_a_changed_name_that_leaves_parameters_behind_is_explained(refused):
    lines = refused("method.name=local", method={"name": "fedprox", "mu": 1})
    assert lines == [
        "method.mu: unknown key. Allowed: add, buffers, codec, max_examples, name, python, weights",
        "(method.name=local keeps the other keys; method=local replaces the whole section)",
    ]


@pytest.mark.parametrize(
    ("changes", "places"),
    [
        (("attack=alie", "clients=3"), "attack.clients=3"),
        (("partition={name: iid, clients: 2}", "clients=3"), "partition.clients=3 or attack.clients=3"),
        (("rounds=3",), "training.rounds=3"),
        (("factor=3",), None),
        (("attack=alie", "factor=3"), "attack.factor=3"),
        (("lr=3",), "training.optimizer.lr=3"),
        (("scenario.speed=3",), "peers.scenario.speed=3"),
    ],
)
def test_a_key_without_its_section_is_not_guessed_but_it_is_said_where_it_stands(changes, places):
    with pytest.raises(RecipeError) as caught:
        load("digits-tasks", changes)
    _, unknown, *hint = str(caught.value).splitlines()
    assert ": unknown key" in unknown
    assert hint == ([] if places is None else [f"(write {places})"])


def test_a_key_without_its_section_in_a_file_as_well(tmp_path):
    (tmp_path / "r.yaml").write_text("like: digits-tasks\nrounds: 3\n")
    with pytest.raises(RecipeError, match=r"\(write training.rounds\)"):
        load(tmp_path / "r.yaml")


def test_selection_on_the_test_split_is_refused(refused):
    assert refused("early_stopping.patience=2", "evaluation.splits=[test]") == [
        "evaluation.splits: ['test'] found, but early_stopping needs 'val': a model is never chosen on the test split"
    ]


@pytest.mark.parametrize("override", ["training", "=3", "training..rounds=3", ".=1"])
def test_an_override_needs_a_path_and_a_value(toys, override):
    with pytest.raises(RecipeError, match=r"expected key\.path=value"):
        load(BASE, [override])


@pytest.mark.parametrize("given", ["seed=3", 3, [("seed", 3)], None])
def test_overrides_are_a_list_of_texts(toys, given):
    for run in (load, partial(fl.compare, methods=["local"])):
        with pytest.raises(RecipeError, match=rf"^overrides={re.escape(repr(given))} found, expected a list of texts"):
            run(BASE, overrides=given)


def test_an_override_cannot_go_below_a_value(toys):
    with pytest.raises(RecipeError, match=r"seed is 3, not a section"):
        load(BASE, ["seed=3", "seed.x=1"])
    with pytest.raises(RecipeError, match=r"override 'seed=\[1', line"):
        load(BASE, ["seed=[1"])


def test_yaml_mistakes_are_placed(toys, tmp_path):
    file = tmp_path / "r.yaml"
    file.write_text("name: t\ntraining:\n  rounds: 3\n  rounds: 4\n")
    with pytest.raises(RecipeError, match=r"r\.yaml, line 4, column 3: the key 'rounds' occurs twice"):
        load(file)
    file.write_text("name: t\ntraining: [3\n")
    with pytest.raises(RecipeError, match=r"r\.yaml, line 3, column 1: "):
        load(file)
    file.write_text("name: !!python/object/apply:os.system [true]\n")
    with pytest.raises(RecipeError, match=r"line 1, column 7: could not determine a constructor"):
        load(file)
    file.write_text("- a\n")
    with pytest.raises(RecipeError, match=r"\['a'\] found, expected a mapping with name, seed"):
        load(file)
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RecipeError, match=r"r\.yaml: "):
        load(file)


def test_merge_keys_and_anchors_still_work(toys, tmp_path):
    file = tmp_path / "r.yaml"
    file.write_text("""
name: t
data: toy
partition: one-task
model: small-cnn
method: local
training: {optimizer: &o {lr: 1e-2, momentum: 0.5}}
""")
    assert load(file).training.optimizer.momentum == 0.5
    assert parse("a: &a {x: 1, y: 2}\nb: {<<: *a, y: 3}\n", "") == {"a": {"x": 1, "y": 2}, "b": {"x": 1, "y": 3}}


def test_an_unknown_recipe_lists_the_packaged_ones(tmp_path):
    with pytest.raises(RecipeError, match=r"Did you mean 'digits-tasks'\? Nearest of \d+: digits-tasks, "):
        load("digit-task")
    with pytest.raises(RecipeError, match=r"It is a folder without recipe\.yaml\."):
        load(tmp_path)
    (tmp_path / "recipe.yaml").write_text("name: x")
    with pytest.raises(RecipeError, match=r"It is a folder, with .*recipe\.yaml\."):
        load(tmp_path)
    (tmp_path / "site.csv").write_text("age,ill\n3,1\n")
    with pytest.raises(RecipeError, match=r"is a table, and no recipe: make a recipe of it with `fedloom init"):
        load(tmp_path / "site.csv")


def test_hash_covers_what_determines_results(toys):
    recipe = load(BASE)
    same = load(BASE, ["name=other", "runtime.workers=4", "runtime.checkpoint_every=5", "runtime.engine=flower"])
    assert recipe_hash(same) == recipe_hash(recipe)
    assert recipe_hash(yaml.safe_load(dump(recipe))) == recipe_hash(recipe)
    for override in ("seed=1", "method.mu=0.02", "training.rounds=3", "runtime.threads=2", "data.size=8"):
        assert recipe_hash(load(BASE, [override])) != recipe_hash(recipe), override
    assert recipe_hash(load(BASE, ["seed=1"]).model_copy(update={"seed": 0})) == recipe_hash(recipe)
    assert len(recipe_hash(recipe)) == 16


def test_peers_are_measured_after_every_fifth_round_unless_something_else_is_said():
    said = ((), ("evaluation.every=2",), ("evaluation.costly_every=3",), ("early_stopping={patience: 3}",))
    assert [load("digits-tasks", ["peers={}", *more]).evaluation.every for more in said] == [5, 2, 1, 1]
    assert load("digits-tasks").evaluation.every == 1


# With another value each, or None where that is more than a word.
LATER = {
    "attack": "replay",
    "early_stopping.relative": "true",
    "evaluation.costly_every": "20",
    "method.max_examples": "9",
    "model.freeze": None,
    "model.frozen_statistics": None,
    "model.inputs": None,
    "peers.choose.recency": "1",
    "peers.rollback": "5",
    "peers.warmup.alone": "2",
    "training.optimizer.encoder_lr": "0.01",
    "training.schedule.warmup_share": "0.5",
}


def test_keys_that_came_later_leave_the_hash_of_older_recipes():
    recipe = yaml.safe_load(dump(load("dfmtl-digits", ["early_stopping={patience: 3}"])))
    older = deepcopy(recipe)
    for key, other in LATER.items():
        *sections, last = key.split(".")
        section = older
        for name in sections:
            section = section[name]
        del section[last]
        assert other is None or recipe_hash(load(recipe, [f"{key}={other}"])) != recipe_hash(recipe), key
    assert recipe_hash(older) == recipe_hash(recipe)


SECTIONS = [DataSection, PartitionSection, ModelSection, MethodSection]


@pytest.mark.parametrize("section", SECTIONS)
def test_no_registered_parameter_hides_a_common_key(section: type[Named]):
    for entry in section.registry():
        assert not set(entry.params.model_fields) & {*section.common(), "params"}, entry.name
