"""The bundled digits: real, several tasks on one image, each image in one domain."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from fedloom.data import DATASETS, Pool
from fedloom.errors import RecipeError

ALL = ["plain", "inverted", "noisy", "thickened", "textured"]
digits = DATASETS["digits"].function


def test_defaults():
    data = digits(0)
    assert [(task.name, task.channels) for task in data.tasks] == [
        ("digit", 10),
        ("parity", 2),
        ("large", 2),
        ("holes", 3),
    ]
    assert data.input_shape == (1, 16, 16)
    assert data.domains == ("plain",)
    assert (len(data.train), len(data.test)) == (1438, 359)
    assert data.train.images.dtype == torch.float32
    assert 0 <= float(data.train.images.min()) < float(data.train.images.max()) <= 1
    x, y = data.train.batch(torch.arange(len(data.train)), torch.device("cpu"))
    assert x.mean().abs() < 1e-4
    assert abs(float(x.std()) - 1) < 1e-3
    assert all(labels.dtype == torch.int64 for labels in y.values())


def test_images_are_those_of_scikit_learn():
    data = digits(3, size=8)
    found = torch.cat([data.train.images, data.test.images]).flatten(1).numpy()
    truth = torch.cat([data.train.labels["digit"], data.test.labels["digit"]]).numpy()
    raw = load_digits()
    key = {(row * 16).astype(int).tobytes(): label for row, label in zip(raw.images / 16, raw.target, strict=True)}
    assert [key[np.rint(row * 16).astype(int).tobytes()] for row in found] == truth.tolist()
    assert len(found) == 1797


def test_tasks_agree_with_the_digit():
    labels = digits(0).train.labels
    digit = labels["digit"]
    assert torch.equal(labels["parity"], digit % 2)
    assert torch.equal(labels["large"], (digit > 4).long())
    holes = {0: 1, 6: 1, 9: 1, 8: 2}
    assert labels["holes"].tolist() == [holes.get(int(d), 0) for d in digit]


def test_split_is_stratified_by_digit_and_domain():
    data = digits(1, domains=ALL, test_fraction=0.25)
    for number in range(5):
        for value in range(10):
            train, test = (
                int(((part.labels["digit"] == value) & (part.domain == number)).sum())
                for part in (data.train, data.test)
            )
            assert 33 <= train + test <= 38
            assert test == round(0.25 * (train + test))


def test_a_domain_is_a_rendering():
    data = digits(0, domains=ALL, size=28)
    means = [float(data.train.images[data.train.domain == number].mean()) for number in range(5)]
    assert means[1] > 0.6 > means[3] > 1.3 * means[0]
    for part in (data.train, data.test):
        assert 0 <= float(part.images.min()) < float(part.images.max()) <= 1
    assert Pool.of(data).domains == tuple(ALL)


def test_same_seed_same_data():
    first, again, other = (digits(seed, domains=["noisy", "textured"]) for seed in (0, 0, 1))
    for part in ("train", "test"):
        a, b, c = (getattr(data, part) for data in (first, again, other))
        assert torch.equal(a.images, b.images)
        assert torch.equal(a.domain, b.domain)
        assert all(torch.equal(a.labels[task], b.labels[task]) for task in a.labels)
        assert not torch.equal(a.images, c.images)


def test_global_random_state_is_left_alone():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    digits(0, domains=ALL)
    assert torch.equal(before, torch.get_rng_state())


def test_a_name_given_twice_is_an_error():
    with pytest.raises(RecipeError, match="digits: domain 'plain' is named twice"):
        digits(0, domains=["plain", "noisy", "plain"])
    with pytest.raises(RecipeError, match="digits: task 'digit' is named twice"):
        digits(0, tasks=["digit", "digit"])


def test_they_come_with_the_package(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "sklearn", None)
    assert len(digits(0).train) == 1438
