"""Two data sets side by side."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedloom.data import DATASETS, PARTITIONERS, Pool
from fedloom.errors import DataError, RecipeError
from fedloom.federation.recipes import load as load_recipe

REST = {"partition": {"name": "iid", "clients": 2}, "model": "small-cnn", "method": "fedavg"}
CPU = torch.device("cpu")
SETS = {
    "a": {"name": "digits", "tasks": ["digit", "parity"], "size": 8},
    "b": {"name": "digits", "tasks": ["digit"], "size": 16},
}


def load(sets=SETS):
    return DATASETS["several"].function(0, sets=sets)


def test_tasks_carry_the_name_of_their_set_and_examples_their_domain():
    dataset = load()
    assert [t.name for t in dataset.tasks] == ["a-digit", "a-parity", "b-digit"]
    assert dataset.domains == ("a", "b")
    assert dataset.classes == {"a-parity": ("even", "odd")}, "digits are called as they are numbered"
    pool = Pool.of(dataset)
    half = len(pool) // 2
    assert (pool.domain == np.repeat([0, 1], half)).all()
    assert (pool.labels["b-digit"][:half] == -1).all()
    assert (pool.labels["a-digit"][:half] == pool.labels["b-digit"][half:]).all()


def test_a_batch_comes_from_one_set():
    train = load().train
    half = len(train) // 2
    x, y = train.batch(torch.tensor([0, 1]), CPU)
    assert x.shape == (2, 1, 8, 8)
    assert set(y) == {"a-digit", "a-parity"}
    x, y = train.batch(torch.tensor([half]), CPU, tasks=["b-digit"])
    assert x.shape == (1, 1, 16, 16)
    assert y["b-digit"].tolist() == [train.labels_of("b-digit")[half]]
    with pytest.raises(DataError, match="expected a batch of one data set, found a, b"):
        train.batch(torch.tensor([0, half]), CPU)


def test_it_can_be_dealt_out():
    partition = PARTITIONERS["single-and-multi"].function(Pool.of(load()), 0, single={"a": 1}, multi={"b": 2})
    assert [s.client for s in partition.shares] == ["a-digit-0", "a-parity-0", "b-multi-0", "b-multi-1"]


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        ({"a": {}}, "set 'a': names no data set"),
        ({"a": {"name": "nothing"}}, "set 'a': unknown data set 'nothing'"),
        ({"a": {"name": "digits", "sizes": 8}}, "set 'a': sizes: Extra inputs are not permitted"),
        ({"a": {"name": "digits", "size": 0}}, "set 'a': size: Input should be greater than"),
        ({}, "sets"),
    ],
)
def test_a_wrong_set_is_named_when_the_recipe_is_read(sets, message):
    with pytest.raises(RecipeError, match=message):
        load_recipe({"name": "x", "data": {"name": "several", "sets": sets}, **REST})


def test_a_set_has_no_domains_of_its_own():
    with pytest.raises(DataError, match="set 'a' has domains of its own"):
        load({"a": {"name": "digits", "domains": ["plain", "noisy"]}})


def test_inputs_of_two_kinds_are_refused(tmp_path):
    """Tokens and features of one shape are not the same inputs."""
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "a.npz", x=rng.integers(0, 9, (20, 6)), y=np.arange(20) % 2)
    of = {
        "name": "arrays",
        "path": str(tmp_path / "a.npz"),
        "images": "x",
        "labels": {"odd": "y"},
        "test_fraction": 0.5,
    }
    sets = {"a": {**of, "signal": "tokens"}, "b": {**of, "signal": "features"}}
    with pytest.raises(DataError, match=r"not of one kind: 'a' has tokens of 6 \(positions\).* 'b' has features of 6"):
        load(sets)
    assert load({"a": sets["a"], "b": sets["a"]}).signal.vocabulary == 9
