"""Data as users have it: it works, or one sentence says what to do; and no run loses anything without a word."""

from __future__ import annotations

import math
import re
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import fedloom as fl
import fedloom.tasks
from fedloom.data import Signal
from fedloom.engines.api import resume
from fedloom.errors import DataError, RecipeError, RunWarning, UserError

RNG = torch.Generator().manual_seed(0)
X = torch.randn(24, 3, generator=RNG)
Y = (X[:, 0] > 0).long()
TASKS = {"ill": fl.task(classes=2)}
TOKENS = [[1 + i % 5] * (2 + i % 3) for i in range(24)]


def federation(train: Any, **options: Any) -> fl.Federation:
    return fl.Federation({"ann": fl.Client(train), "bob": fl.Client((X, Y))}, TASKS, **options)


def test_inputs_that_are_not_finite_are_counted_by_client() -> None:
    x = X.clone()
    x[3, 1], x[7, 0] = math.nan, math.inf
    said = "client 'ann', train: 2 of 24 inputs have NaN or infinity, the first at position 3"
    with pytest.raises(DataError, match=said):
        federation((x, Y))
    with pytest.raises(DataError, match="client 'ann', train, example 3: 1 of 1 inputs"):
        federation(list(zip(x, Y, strict=True)))


@pytest.mark.parametrize("infinite", [math.inf, -math.inf, 1e300])
def test_labels_that_are_not_finite_are_refused_with_their_place(infinite: float) -> None:
    y = np.linspace(-1, 1, 24)
    bad = y.copy()
    bad[[5, 9]] = infinite
    said = re.escape(f"task 'w': 2 of 24 labels are infinite or too large, the first ({infinite}) at position 5; exp")
    tasks = {"w": fl.task()}
    with pytest.raises(DataError, match=f"client 'ann', train, {said}"):
        fl.Federation({"ann": fl.Client((X, bad))}, tasks)
    with pytest.raises(DataError, match=f"Federation, test, {said}"):
        fl.Federation({"ann": fl.Client((X, y))}, tasks, test=(X, bad))
    bad[[5, 9]] = math.nan
    fl.Federation({"ann": fl.Client((X, bad))}, tasks)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda x: x, None),
        (
            lambda x: x + 1000,
            r"inputs: channel \d has mean 1e\+03 and standard deviation 1.* converge; subtract a mean",
        ),
        (lambda x: x * 1000, "inputs: channel 1 has mean .* and standard deviation"),
        (lambda x: x * 0.001, "inputs: channel 1 has mean .* and standard deviation .*may not converge"),
    ],
)
def test_inputs_on_whose_scale_training_may_not_converge(change: Any, said: str | None) -> None:
    series = torch.randn(24, 2, 20, generator=RNG)
    series[:, 1] *= 1.5
    clients = {who: fl.Client((change(series + place), Y)) for place, who in enumerate(("ann", "bob"))}
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        fl.Federation(clients, TASKS, signal="series")
    texts = [str(each.message) for each in heard]
    assert len(texts) == (said is not None)
    assert said is None or re.match(said, texts[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the scale of images is none of ours, and neither are features far below 1
        fl.Federation({"ann": fl.Client((change(series[..., None]), Y))}, TASKS)


def test_a_client_of_other_units_is_named() -> None:
    clients = {who: fl.Client((X + torch.rand(3, generator=RNG), Y)) for who in ("ann", "bob", "eve")}
    other = {"dan": fl.Client((X * torch.tensor([1, 1, 50]) + torch.tensor([0, 0, 500]), Y), val=(X, Y))}
    said = r"client 'dan', train: feature 2 has mean \d+, where the others have about \S+ \(standard deviation 1"
    with pytest.warns(RunWarning, match=said) as heard:
        fl.Federation(clients | other, TASKS)
    assert len(heard) == 1


def test_copies_in_train_and_test_data_are_said() -> None:
    other = X + 1
    clients = {"ann": fl.Client((X, Y)), "bob": fl.Client((other, Y), val=(other, Y), test=(X[4:6], Y[4:6]))}
    (doubt,) = fl.Federation(clients, TASKS, test=(other[:9], Y[:9])).dataset.doubts
    assert doubt.startswith(
        "11 of 11 test examples are copies of training examples, for example Federation, test[0] and "
        "client 'bob', train[0]: test scores are too good"
    )
    grown = {"ann": fl.Client((X.clone().requires_grad_(), Y))}
    assert fl.Federation(grown, TASKS, test=(X[:2], Y[:2])).dataset.doubts[0].startswith("2 of 2 test examples")
    assert not fl.Federation(clients | {"bob": fl.Client((other, Y))}, TASKS, test=(X + 2, Y)).dataset.doubts
    held = {"ann": fl.Client((X, Y), val=(other, Y))}
    assert not fl.Federation(held, TASKS, test=(other, Y)).dataset.doubts, "nobody trained on these"


UNEVEN = [torch.randn(3, 20 + i % 3, generator=RNG) for i in range(24)]


@pytest.mark.parametrize(
    "x",
    [UNEVEN, [x.numpy() for x in UNEVEN], [x.tolist() for x in UNEVEN], [x[0].tolist() for x in UNEVEN]],
    ids=["tensors", "arrays", "lists", "channels"],
)
def test_series_of_unequal_length_are_not_padded(x: Any) -> None:
    said = r"client 'ann', train: inputs of different shapes found \(.*20 and .*22\); only lists of tokens .*numpy.pad"
    for signal in (None, "series"):
        with pytest.raises(DataError, match=said):
            federation((x, Y), signal=signal)
    with pytest.raises(DataError, match=r"inputs of different shapes found \(2 and 4\); only lists of tokens"):
        federation((TOKENS, Y), signal="series")


def test_a_class_that_is_missing_in_a_data_frame_is_no_label() -> None:
    """Then pandas has real numbers for classes, also at a site without a missing one."""
    y = Y.numpy().astype(float)
    y[[2, 7]] = np.nan
    known = fl.Federation({"ann": fl.Client((X, pd.Series(y)))}, TASKS).dataset.train.labels["ill"]
    assert known.tolist() == [-1 if i in (2, 7) else int(label) for i, label in enumerate(Y)]
    whole = fl.Federation({"ann": fl.Client((X, np.nan_to_num(y)))}, TASKS).dataset.train.labels["ill"]
    assert whole.tolist() == np.nan_to_num(y).tolist()
    with pytest.raises(DataError, match="labels of torch.float64 found, expected whole numbers from 0 to 1"):
        fl.Federation({"ann": fl.Client((X, y + 0.5))}, TASKS)


def test_arrays_of_objects_that_are_numbers_are_numbers() -> None:
    """A data frame with columns of several types gives such arrays."""
    labels: list[Any] = [None if i in (2, 7) else int(label) for i, label in enumerate(Y)]
    train = (X.numpy().astype(object), np.array(labels, dtype=object))
    known = fl.Federation({"ann": fl.Client(train)}, TASKS).dataset.train
    assert torch.equal(known.images[:24], X)
    assert known.labels["ill"].tolist() == [-1 if label is None else label for label in labels]
    with pytest.raises(DataError, match="labels such as yes found, expected numbers; number the classes from 0"):
        fl.Federation({"ann": fl.Client((X, np.array(["yes"] * 24, dtype=object)))}, TASKS)
    with pytest.raises(DataError, match="client 'ann', train: an array of object found"):
        fl.Federation({"ann": fl.Client((np.array([["a", 1.0]] * 24, dtype=object), Y))}, TASKS)


def test_inputs_of_yes_and_no_are_features_and_no_tokens() -> None:
    fed = fl.Federation({"ann": fl.Client((X > 0, Y))}, TASKS)
    assert fed.dataset.signal is not None
    assert fed.dataset.signal.kind == "features"
    x, _ = fed.dataset.train.batch(torch.arange(24), torch.device("cpu"))
    assert torch.equal(x, (torch.as_tensor(X) > 0).float())


def test_series_and_features_of_whole_numbers_become_real_ones() -> None:
    sensor = (torch.randn(24, 3, 16, generator=RNG) * 3).to(torch.int16)
    whole = {"ann": fl.Client((sensor, Y)), "bob": fl.Client([(x.numpy(), y) for x, y in zip(sensor, Y, strict=True)])}
    fed = fl.Federation(whole, TASKS, test=(sensor.numpy(), Y), signal="series", public=sensor)
    for x in (fed.dataset.test.batch(torch.arange(9), torch.device("cpu"))[0], fed.dataset.public):
        assert x.dtype == torch.float32
        assert torch.equal(x[:9], sensor[:9].float())
    assert fl.run(fed, model="conv1d", rounds=1).status == "finished"
    flat = fl.Federation({"ann": fl.Client((sensor[:, 0], Y))}, TASKS, signal="features")
    assert flat.dataset.train.batch(torch.arange(9), torch.device("cpu"))[0].dtype == torch.float32
    with pytest.raises(DataError, match=r"whole numbers of shape \(3, 16\) found, .* add signal='series'"):
        fl.Federation({"ann": fl.Client((sensor, Y))}, TASKS)
    rows = fl.Federation({"ann": fl.Client((sensor.abs(), Y))}, TASKS, signal="tokens")  # for a model that takes them
    assert rows.dataset.train.images.dtype == torch.int64


def test_an_input_of_another_shape_or_type_names_its_client_before_anything_is_trained() -> None:
    pairs = list(zip(X, Y, strict=True))
    short = [(x if i != 3 else x[:2], y) for i, (x, y) in enumerate(pairs)]
    said = (
        r"client 'bob', train, example 3: an input of shape \(2,\) found, expected \(3,\) as the first .*; pad or cut"
    )
    with pytest.raises(DataError, match=said):
        fl.Federation({"ann": fl.Client((X, Y)), "bob": fl.Client(short, val=0)}, TASKS)
    whole = [(x if i != 3 else x.long(), y) for i, (x, y) in enumerate(pairs)]
    with pytest.raises(DataError, match=r"client 'ann', train, example 3: an input of torch.int64 found, .*float32"):
        federation(whole)


class Growing(list[Any]):
    """A data set whose inputs are shorter when they are read again."""

    times = 0

    def __getitem__(self, place: Any) -> Any:
        self.times += 1
        x, y = super().__getitem__(place)
        return x[: 3 if self.times <= len(self) else 2], y


def test_an_input_whose_shape_changes_names_its_client() -> None:
    fed = federation(Growing(zip(X, Y, strict=True)))
    with pytest.raises(DataError, match=r"client 'ann', train, example 0: an input of shape \(2,\) found, expected"):
        fed.dataset.train.batch(torch.arange(48), torch.device("cpu"))


def test_masked_values_are_no_inputs_and_no_labels() -> None:
    masked = np.ma.masked_array(X.numpy(), X.numpy() > 1)
    with pytest.raises(DataError, match=r"client 'ann', train: \d+ masked values found, .* x.filled\(...\) fills"):
        federation((masked, Y))
    with pytest.raises(DataError, match=r"client 'ann', train, example \d+: \d masked values found"):
        federation(list(zip(masked, Y, strict=True)))
    gone = np.arange(24) % 3 == 0
    for dtype in (np.uint8, np.int64):
        labels = np.ma.masked_array(Y.numpy().astype(dtype), gone)
        for train in ((X, labels), list(zip(X, labels, strict=True))):
            column = federation(train).dataset.train.labels["ill"][:24]
            assert torch.equal(column, torch.where(torch.from_numpy(gone), -1, Y))
            known = fl.Federation({"ann": fl.Client(train)}, {"ill": fl.task()}).dataset.train.labels["ill"]
            assert torch.equal(known.isnan(), torch.from_numpy(gone))
    assert torch.equal(federation((np.ma.masked_array(X.numpy()), Y)).dataset.train.images[:24], X)


def test_arrays_of_another_byte_order_and_columns_of_arrays() -> None:
    big = federation((X.numpy().astype(">f8"), Y.numpy().astype(">i2"))).dataset.train
    column = federation((pd.Series([*X.numpy()]), Y)).dataset.train
    for train in (big, column):
        torch.testing.assert_close(train.images[:24], X)
        assert torch.equal(train.labels["ill"][:24], Y)


def test_what_is_no_number_is_named_by_its_type() -> None:
    with pytest.raises(DataError, match="client 'ann', train: an array of <U3 found, expected a tensor"):
        federation((np.array([f"s{place}" for place in range(10, 34)]), Y))
    with pytest.raises(DataError, match=r"client 'ann', train, task 'ill': labels such as no found, expected numbers"):
        federation((X, pd.Series(["no", "yes"] * 12, index=range(50, 74))))
    with pytest.raises(DataError, match=r"a tensor of layout torch.sparse_coo found, expected a dense one"):
        federation((X.to_sparse(), Y))


def test_examples_of_one_group_are_set_apart_together() -> None:
    whose = np.repeat(["p", "q", "r"], 8)
    clients = {"ann": fl.Client((X, Y), group=whose, val=0.4), "bob": fl.Client((X, Y), val=(X[:5], Y[:5]))}
    shares = {share.client: share for share in fl.Federation(clients, TASKS).partition().shares}
    assert len({*whose[shares["ann"].val]}) == 1
    assert not {*whose[shares["ann"].val]} & {*whose[shares["ann"].train]}
    assert (len(shares["bob"].train), len(shares["bob"].val)) == (24, 5)
    fed = fl.Federation(data=(X, Y), partition=[[*range(24)]], tasks=TASKS, group=whose)
    assert len({*whose[fed.partition().shares[0].val]}) == 1
    with pytest.raises(DataError, match=r"client 'ann', train: group= with int64 of shape \(3,\) found, expected 24"):
        fl.Federation({"ann": fl.Client((X, Y), group=[1, 2, 3])}, TASKS)
    with pytest.raises(DataError, match=r"Federation: group= found, but it is for data= with positions"):
        fl.Federation(clients, TASKS, group=whose)
    alone = {"ann": fl.Client((X, Y), group=["p"] * 24)}
    with pytest.raises(RecipeError, match=r"no client has val examples \(each has the examples of one group"):
        fl.run(fl.Federation(alone, TASKS), model="mlp", rounds=1)


def test_a_client_with_one_example_is_named_where_nobody_has_validation_data() -> None:
    with pytest.raises(RecipeError, match=r"no client has val examples \(1 example, too few to set one apart: ann\)"):
        fl.run(fl.Federation({"ann": fl.Client((X[:1], Y[:1]))}, TASKS), model=nn.Linear(3, 2), rounds=1)


class Lost(nn.Module):
    """A model whose training gives NaN for inputs above a bound."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x) * torch.where(x.abs().amax() > 1e3, math.inf, 1.0)


@pytest.mark.parametrize("everyone", [False, True])
def test_a_run_that_loses_updates_warns_and_says_so(everyone: bool, tmp_path: Any) -> None:
    bad = X * 1e4
    fed = fl.Federation({"ann": fl.Client((bad, Y)), "bob": fl.Client((bad if everyone else X, Y))}, TASKS, test=(X, Y))
    with pytest.warns(RunWarning, match=r"updates dropped \(ann 2") as heard:
        result = fl.run(fed, model=Lost(), rounds=2, folder=tmp_path / "run")
    assert ("nothing learned" in str(heard[0].message)) == everyone
    for text in (result.table(), repr(result)):
        assert "updates dropped (ann 2" in text
        assert ("nothing learned" in text) == everyone


def test_a_run_that_loses_nothing_does_not_warn(tmp_path: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = fl.run(federation((X, Y)), model="mlp", rounds=1, folder=tmp_path / "run")
        resume(result.folder, federation=federation((X, Y)), rounds=2)
    assert "dropped" not in result.table() + repr(result)


def test_keywords_of_local_training_stand_by_themselves() -> None:
    fed = federation((X, Y))
    result = fl.run(fed, model="mlp", rounds=1, lr=0.2, epochs=3, batch_size=5, optimizer={"momentum": 0.5})
    training = result.run.recipe["training"]
    assert (training["epochs"], training["batch_size"]) == (3, 5)
    assert (training["optimizer"]["lr"], training["optimizer"]["momentum"]) == (0.2, 0.5)
    table = fl.compare(fed, model="mlp", methods=["local"], rounds=1, lr=0.2, split="val")
    assert next(iter(table.columns[0].runs.values())).recipe["training"]["optimizer"]["lr"] == 0.2
    with pytest.raises(RecipeError, match=r"training.optimizer.lr"):
        fl.run(fed, model="mlp", lr=-1)


def test_a_client_with_one_example_and_batch_norm_is_told_what_to_do() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    with pytest.raises(
        UserError, match=r"client 'ann' .*batch norm cannot train on a batch of one example.*batch_size"
    ):
        fl.run(federation((X[:1], Y[:1])), model=net, rounds=1)


def test_axes_of_series() -> None:
    steps_first = torch.randn(24, 30, 2, generator=RNG)

    def of(x: Any, **options: Any) -> fl.Federation:
        return fl.Federation({"ann": fl.Client(x)}, TASKS, signal="series", **options)

    with pytest.warns(RunWarning, match="series of 30 x 2 .*more channels than steps: add axes='NTC'"):
        of((steps_first, Y))
    turned = of((steps_first, Y), axes="NTC")
    assert turned.dataset.input_shape == (2, 30)
    read = of(list(zip(steps_first, Y, strict=True)), axes="NTC").dataset.train
    for examples in (turned.dataset.train, read):
        x, _ = examples.batch(torch.tensor([4]), torch.device("cpu"))
        assert torch.equal(x[0], steps_first[4].T)
    assert of((steps_first, Y), axes="NCT").dataset.input_shape == (30, 2)
    with pytest.raises(DataError, match=r"client 'ann', train: inputs of shape \(24, 30\) found, expected N x steps x"):
        of((steps_first[..., 0], Y), axes="NTC")
    with pytest.raises(DataError, match="axes='NCT' of features found, expected axes for series only"):
        federation((X, Y), axes="NCT")
    with pytest.raises(DataError, match="axes='TNC' found"):
        of((steps_first, Y), axes="TNC")


def test_tokens_of_different_lengths_are_filled_up() -> None:
    long = [[2] * 9, [3]] * 12
    fed = fl.Federation({"ann": fl.Client((TOKENS, Y)), "bob": fl.Client((long, Y))}, TASKS, test=(TOKENS, Y))
    assert fed.dataset.input_shape == (9,)
    assert fed.dataset.signal == Signal(kind="tokens", vocabulary=6, padding=0)
    assert fl.run(fed, model="transformer", rounds=1).status == "finished"
    zeros = [[0, *row] for row in TOKENS]
    with pytest.raises(DataError, match="client 'ann', train: .*0 is a token too"):
        fl.Federation({"ann": fl.Client((zeros, Y))}, TASKS)
    signal = Signal(kind="tokens", padding=9, vocabulary=10)
    assert 9 in fl.Federation({"ann": fl.Client((zeros, Y))}, TASKS, signal=signal).dataset.train.images


@pytest.mark.parametrize("form", [np.array, torch.tensor, lambda row: [*np.array(row)]])
def test_arrays_of_tokens_of_different_lengths_are_filled_up(form: Any) -> None:
    (as_lists, as_others, column) = (
        fl.Federation({"ann": fl.Client((x, Y))}, TASKS).dataset
        for x in (TOKENS, [form(row) for row in TOKENS], pd.Series([form(row) for row in TOKENS]))
    )
    for dataset in (as_others, column):
        assert torch.equal(dataset.train.images, as_lists.train.images)
        assert dataset.signal == as_lists.signal
    sounds = [np.array([-1, 3, *row], np.int16) for row in TOKENS]
    with pytest.raises(DataError, match=r"inputs of different shapes found \(4 and 6\); only lists of tokens"):
        federation((sounds, Y))


def test_lists_of_tokens_beside_a_data_set_of_tokens() -> None:
    def beside(width: int) -> fl.Federation:
        rows = [(torch.full((width,), 2), int(y)) for y in Y]
        return fl.Federation({"ann": fl.Client((TOKENS, Y)), "bob": fl.Client(rows)}, TASKS)

    assert beside(6).dataset.input_shape == (6,)
    with pytest.raises(DataError, match=r"client 'bob', train: inputs of shape \(3,\) found, but client 'ann'"):
        beside(3)


def test_lists_mappings_and_pandas() -> None:
    table = pd.DataFrame({"a": X[:, 0], "b": X[:, 1], "c": X[:, 2], "ill": Y})
    same = [
        federation((X.tolist(), Y.tolist())),
        federation((table[["a", "b", "c"]], table["ill"])),
        fl.Federation(
            {who: fl.Client({"x": X.tolist(), "y": Y.tolist()}) for who in ("ann", "bob")},
            TASKS,
            inputs="x",
            labels={"ill": "y"},
        ),
    ]
    for fed in same:
        torch.testing.assert_close(fed.dataset.train.images[:24], X)
        assert torch.equal(fed.dataset.train.labels["ill"][:24], Y)
    with pytest.raises(DataError, match=r"client 'ann', train: a table found, .*from_table"):
        federation(table)
    with pytest.raises(DataError, match=r"its keys are x, y: name them with inputs= and labels="):
        federation({"x": X.tolist(), "y": Y.tolist()})


def test_a_client_without_any_label_of_a_task_lacks_it() -> None:
    x, none = np.zeros((6, 3), np.float32), np.full(6, -1)
    y = np.array([0, 1] * 3)
    clients = {
        "both": fl.Client((x, {"a": y, "b": y.astype(float)})),
        "one": fl.Client((x, {"a": none, "b": y.astype(float)}), val=(x, {"a": none, "b": y.astype(float)})),
        "other": fl.Client((x, {"a": y})),
    }
    tasks = {"a": fl.task(classes=2), "b": fl.task()}
    held = {share.client: [*share.tasks] for share in fl.Federation(clients, tasks).partition().shares}
    assert held == {"both": ["a", "b"], "one": ["b"], "other": ["a"]}
    clients["one"] = replace(clients["one"], tasks=["a", "b"])
    with pytest.raises(DataError, match="client 'one' has no labelled example of its task 'a'"):
        fl.Federation(clients, tasks).partition()
    with pytest.raises(DataError, match=r"client 'none', train: no example has a label of any task \(a, b\)"):
        fl.Federation({"none": fl.Client((x, {"a": none}))}, tasks)


def test_large_labels_of_a_regression_warn_with_the_task_that_trains() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(80, 2)).astype(np.float32)
    clients = {"c": fl.Client((x, (200 + 50 * x[:, 0]).astype(np.float32)))}
    with pytest.warns(
        RunWarning, match=r"task 'w': labels of mean 196 .*tasks=\{'w': fedloom.tasks.Regression"
    ) as warned:
        fl.Federation(clients, {"w": fl.task()})
    said = str(warned[0].message)
    task = eval(said[said.index("fedloom.tasks.Regression") : -1], {"fedloom": fedloom})  # as a user would paste it
    result = fl.run(fl.Federation(clients, {"w": task}), model="mlp", rounds=10, lr=0.1)
    assert result.run.final("val").values["w"]["rmse"] < 25  # in the labels' own unit
