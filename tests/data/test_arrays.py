"""The general data set: layouts, splits, and a clear word about everything that may be wrong with a file."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from fedloom.data import DATASETS, PARTITIONERS, Pool
from fedloom.errors import DataError, RecipeError, UserError

arrays = DATASETS["arrays"].function
CPU = torch.device("cpu")


def columns(n_train: int = 40, n_test: int = 20, shape: tuple[int, ...] = (8, 8), **more: object) -> dict:
    rng = np.random.default_rng(0)
    made: dict = {}
    for split, n in (("train", n_train), ("test", n_test)):
        made[f"x_{split}"] = rng.integers(0, 256, (n, *shape)).astype(np.uint8)
        made[f"y_{split}"] = (np.arange(n) % 4).astype(np.uint8)
    return {**made, **more}


@pytest.fixture(params=["npz", "compressed", "folder"])
def save(request, tmp_path):
    """A function that stores arrays in one of the ways that are read, and returns the path."""

    def write(made: dict) -> str:
        if request.param == "folder":
            for key, value in made.items():
                np.save(tmp_path / f"{key}.npy", value)
            return str(tmp_path)
        path = tmp_path / "set.npz"
        (np.savez if request.param == "npz" else np.savez_compressed)(path, **made)
        return str(path)

    return write


@pytest.fixture
def npz(tmp_path):
    def write(made: dict) -> str:
        np.savez(tmp_path / "set.npz", **made)
        return str(tmp_path / "set.npz")

    return write


def test_grey_images(save):
    made = columns()
    data = arrays(0, path=save(made))
    assert data.input_shape == (1, 8, 8)
    assert data.train.images.dtype == torch.uint8
    assert [(task.name, task.channels) for task in data.tasks] == [("label", 4)]
    assert data.train.images[:, 0].numpy().tolist() == made["x_train"].tolist()
    assert data.test.labels["label"].tolist() == made["y_test"].tolist()
    assert data.test.labels["label"].dtype == torch.int64
    x = made["x_train"] / 255
    np.testing.assert_allclose(data.train.mean, [x.mean()])
    np.testing.assert_allclose(data.train.std, [x.std()])
    assert data.test.mean == data.train.mean
    batch, _ = data.train.batch(torch.arange(40), CPU)
    assert abs(float(batch.mean())) < 1e-5
    assert abs(float(batch.std(correction=0)) - 1) < 1e-5


@pytest.mark.parametrize("layout", ["nhwc", "nchw"])
def test_colour_images(save, layout):
    made = columns(shape=(8, 6, 3))
    want = {key: value.transpose(0, 3, 1, 2) for key, value in made.items() if key.startswith("x")}
    if layout == "nchw":
        made.update({key: np.ascontiguousarray(value) for key, value in want.items()})
    data = arrays(0, path=save(made))
    assert data.input_shape == (3, 8, 6)
    assert data.train.images.numpy().tolist() == want["x_train"].tolist()
    np.testing.assert_allclose(data.train.std, (want["x_train"] / 255).std((0, 2, 3)))


def test_folder_stays_on_disk(tmp_path):
    made = columns(shape=(8, 8, 3))
    for key, value in made.items():
        np.save(tmp_path / f"{key}.npy", value)
    data = arrays(0, path=str(tmp_path))
    assert not data.train.images.is_contiguous()  # a view of the file's own order
    changed = np.load(tmp_path / "x_train.npy", mmap_mode="r+")
    changed[5] = 77
    changed.flush()
    assert bool((data.train.images[5] == 77).all())
    data.train.images[6] = 1  # and what is done to the tensor is not written
    assert (np.load(tmp_path / "x_train.npy")[6] == made["x_train"][6]).all()


def test_feature_vectors(save):
    rng = np.random.default_rng(0)
    features = rng.normal(3, 2, (60, 5))
    features[:, 4] = 1.5
    made = columns(x_train=features[:40], x_test=features[40:])
    data = arrays(0, path=save(made))
    assert data.input_shape == (5,)
    assert data.train.images.dtype == torch.float32
    assert data.train.std[4] == 1
    batch, _ = data.train.batch(torch.arange(40), CPU)
    np.testing.assert_allclose(batch.mean(0), np.zeros(5), atol=1e-5)
    np.testing.assert_allclose(batch.std(0, correction=0), [1, 1, 1, 1, 0], atol=1e-5)


@pytest.mark.parametrize("dtype", [np.float16, np.float64, ">f4"])
def test_every_float_becomes_float32(npz, dtype):
    made = columns(x_train=np.ones((40, 4, 4), dtype), x_test=np.ones((20, 4, 4), dtype))
    assert arrays(0, path=npz(made)).train.images.dtype == torch.float32


def test_several_tasks_unlabelled_examples_and_domains(npz):
    made = columns(
        part_train=np.where(np.arange(40) % 2, 2, -1),
        part_test=np.full(20, -1),
        place_train=np.arange(40) % 2,
        place_test=np.zeros(20, int),
        names=np.array(["here", "there"]),
    )
    keys = {"labels": {"label": "y_{split}", "part": "part_{split}"}, "domain": "place_{split}"}
    data = arrays(0, path=npz(made), **keys, domain_names="names", classes={"part": 5})
    assert [(task.name, task.channels) for task in data.tasks] == [("label", 4), ("part", 5)]
    assert data.domains == ("here", "there")
    pool = Pool.of(data)
    assert pool.labelled("part").sum() == 20
    assert pool.domain.tolist() == made["place_train"].tolist()


def test_domains_without_names_are_named_by_their_values(npz):
    made = columns(d_train=np.where(np.arange(40) % 2, 7, 30), d_test=np.full(20, 11))
    data = arrays(0, path=npz(made), domain="d_{split}")
    assert data.domains == ("7", "11", "30")
    assert data.train.domain[:3].tolist() == [2, 0, 2]
    assert set(data.test.domain.tolist()) == {1}


def test_one_pool_is_split_by_class_and_domain(save):
    made = {"x": np.arange(400, dtype=np.float32).reshape(100, 4), "y": np.arange(100) % 5, "d": np.arange(100) // 50}
    path = save(made)

    def read(seed: int) -> tuple:
        data = arrays(seed, path=path, images="x", labels={"kind": "y", "half": "d"}, domain="d", test_fraction=0.3)
        return data, data.train.images[:, 0].tolist(), data.test.images[:, 0].tolist()

    data, train, test = read(0)
    assert sorted(train + test) == made["x"][:, 0].tolist()
    assert np.bincount(data.test.labels["kind"]).tolist() == [6] * 5
    assert np.bincount(data.test.domain).tolist() == [15] * 2
    assert read(0)[1:] == (train, test)
    assert read(1)[1:] != (train, test)


def test_size_and_channels(save):
    made = columns(shape=(12, 10, 3), x_train=np.full((40, 12, 10, 3), (255, 0, 0), np.uint8))
    path = save(made)
    data = arrays(0, path=path, size=9, channels=1)
    assert data.input_shape == (1, 9, 9)
    assert data.train.images.dtype == torch.uint8
    assert set(data.train.images.unique().tolist()) == {76}  # 0.299 * 255
    grey = columns(shape=(12, 10))
    data = arrays(0, path=save(grey), size=24, channels=3)
    assert data.input_shape == (3, 24, 24)
    assert torch.equal(data.train.images[:, 0], data.train.images[:, 2])
    same = arrays(0, path=save(columns()), size=8, channels=1)
    assert torch.equal(same.train.images, arrays(0, path=save(columns())).train.images)


def test_limit_draws_from_each_part(npz):
    made = columns(x_train=np.arange(40.0)[:, None], x_test=np.arange(20.0)[:, None])
    data = arrays(0, path=npz(made), limit=30)
    assert (len(data.train), len(data.test)) == (30, 20)
    kept = data.train.images[:, 0].int()
    assert torch.equal(kept, kept.sort().values)
    assert torch.equal(data.train.labels["label"], kept.long() % 4)
    other = arrays(1, path=npz(made), limit=30).train.images[:, 0].int()
    assert not torch.equal(kept, other)
    assert arrays(0, path=npz(made), limit=1).tasks[0].channels == 4


@pytest.mark.parametrize(
    ("change", "params", "message"),
    [
        ({}, {"images": "xx_{split}"}, r"no key 'xx_train'\. Did you mean 'x_train'\? Found: x_test, x_train, y_test"),
        ({}, {"labels": {"label": "label_{split}"}}, "no key 'label_train'"),
        ({"y_test": np.zeros(19, int)}, {}, "'y_test': expected 20 values, as many as 'x_test', found 19"),
        ({"y_train": np.full(40, -2)}, {}, "task 'label': expected labels from 0, or -1 for unlabelled, found -2"),
        ({"y_train": np.full(40, 2**64 - 1, np.uint64)}, {}, r"'y_train': expected integers below 2\^63, found 18"),
        ({"y_train": np.zeros(40)}, {}, "'y_train': expected one integer or text per .* found float64 .*; real"),
        ({"y_train": np.full(40, "a")}, {}, "task 'label': expected texts in both .* found <U1 and int64"),
        ({"y_train": np.full(40, "a"), "y_test": np.full(20, "b")}, {"classes": {"label": 3}},
         r"2 classes found \(a, b\); list the names of all 3 as classes"),
        ({"y_train": np.full(40, "a"), "y_test": np.full(20, "b")}, {"classes": {"label": ["b", "c"]}},
         "the label 'a' found, expected b, c"),
        ({"y_train": np.full(40, ""), "y_test": np.full(20, "")}, {}, "task 'label': no example is labelled"),
        ({"y_train": np.full(40, b"\xff"), "y_test": np.full(20, "b")}, {}, "'y_train' cannot be read as texts"),
        ({"d_train": np.full(40, "here"), "d_test": np.full(20, "")}, {"domain": "d_{split}"}, "without a domain"),
        ({"d_train": np.full(40, "a"), "d_test": np.full(20, "a"), "n": np.array(["a", "b"])}, {
            "domain": "d_{split}", "domain_names": "n"}, "leave domain_names out"),
        ({"y_train": np.zeros((40, 2), int)}, {}, r"found int64 of shape \(40, 2\)"),
        ({"y_train": np.full(40, -1), "y_test": np.full(20, -1)}, {}, "task 'label': no example is labelled"),
        ({}, {"classes": {"label": 3}}, "task 'label': expected labels below 3, found 3"),
        ({"x_test": np.ones((20, 8, 8))}, {}, "train and test inputs of one shape and type"),
        (
            {"x_train": np.ones((40, 4)), "x_test": np.full((20, 4), np.nan)},
            {},
            "'x_test': 20 of 20 inputs have NaN or infinity, the first at position 0; replace",
        ),
        ({"x_train": np.diag(np.r_[np.ones(38), np.inf, 1e300])}, {"limit": 5}, "'x_train': 2 of 40 .* at position 38"),
        ({"x_test": np.zeros((20, 9, 9), np.uint8)}, {}, r"found \(1, 8, 8\) torch.uint8 and \(1, 9, 9\)"),
        ({"x_train": np.zeros((40, 8, 8), np.int16)}, {}, r"found int16 of shape \(40, 8, 8\)"),
        ({"x_train": np.zeros(40, np.uint8)}, {}, r"found uint8 of shape \(40,\)"),
        ({"x_train": np.zeros((40, 0), np.uint8)}, {}, "'x_train' is empty"),
        ({"x_train": np.zeros((40, 8, 8, 5), np.uint8)}, {}, r"1 or 3 channels .* found \(40, 8, 8, 5\)"),
        ({"x_train": np.array([None] * 40)}, {}, "'x_train' cannot be read as a plain array .*; pad inputs of unequal"),
        ({"d_train": np.full(40, 2), "d_test": np.zeros(20, int), "n": np.array(["a", "b"])}, {
            "domain": "d_{split}", "domain_names": "n"}, r"expected domains in 0\.\.1, found 2"),
        ({"d_train": np.zeros(40, int), "d_test": np.zeros(20, int), "n": np.zeros(2)}, {
            "domain": "d_{split}", "domain_names": "n"}, "'n': expected a list of names, found float64"),
        ({"y": np.arange(40), "x": np.ones((40, 2))}, {
            "images": "x", "labels": {"label": "y"}, "test_fraction": 0.1}, "no class has two examples"),
    ],
)  # fmt: skip
def test_bad_arrays(save, change, params, message):
    with pytest.raises(DataError, match=message) as caught:
        arrays(0, path=save(columns(**change)), **params)
    assert "set.npz" in str(caught.value) or str(caught.value).count("/") > 1  # names the file or folder


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"images": "x"}, "expected {split} in all keys or in none, found x, y_{split}"),
        ({"test_fraction": 0.2}, "'x_{split}' has a test part, so test_fraction has no use"),
        ({"images": "x", "labels": {"label": "y"}}, "'x' needs test_fraction"),
        ({"domain_names": "n"}, "domain, which is missing"),
        ({"classes": {"lable": 3}}, r"classes names the task 'lable', .* Did you mean 'label'\?"),
    ],
)
def test_bad_parameters(npz, params, message):
    with pytest.raises(RecipeError, match=message):
        arrays(0, path=npz(columns()), **params)


def test_bad_files(tmp_path):
    with pytest.raises(DataError, match=r"file or folder .*nowhere.npz does not exist"):
        arrays(0, path=str(tmp_path / "nowhere.npz"))
    text = tmp_path / "text.npz"
    text.write_text("hello")
    with pytest.raises(DataError, match=r"text.npz is neither an .npz archive nor a folder"):
        arrays(0, path=str(text))
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"no key 'x_train'\. Found: none"):
        arrays(0, path=str(tmp_path / "empty"))
    whole = tmp_path / "whole.npz"
    np.savez_compressed(whole, **columns())
    damaged = bytearray(whole.read_bytes())
    damaged[200:1200] = bytes(1000)
    (tmp_path / "damaged.npz").write_bytes(damaged)
    with pytest.raises(DataError, match=r"damaged.npz: '\w+' cannot be read"):
        arrays(0, path=str(tmp_path / "damaged.npz"))
    (tmp_path / "cut").mkdir()
    for key, value in columns().items():
        np.save(tmp_path / "cut" / f"{key}.npy", value)
    part = tmp_path / "cut" / "x_train.npy"
    part.write_bytes(part.read_bytes()[:500])
    with pytest.raises(DataError, match="'x_train' cannot be read as a plain array"):
        arrays(0, path=str(tmp_path / "cut"))


def test_labels_that_would_make_billions_of_classes(npz):
    labels = np.arange(40) % 3
    labels[7] = 2_000_000_000
    with pytest.raises(UserError, match=r"set\.npz: task 'label': the confusion matrix of 2000000001 classes needs"):
        arrays(0, path=npz(columns(y_train=labels)))


@pytest.mark.parametrize("shape", [(20_000_000_000,), (40, 8, 9), (-40, 8, 8), (40, 8, 10**30)])
def test_headers_that_lie(shape, tmp_path):
    for name, value in columns().items():
        np.save(tmp_path / f"{name}.npy", value)
    file = tmp_path / "x_train.npy"
    with file.open("wb") as opened:
        np.lib.format.write_array_header_1_0(opened, {"descr": "|u1", "fortran_order": False, "shape": shape})
        opened.write(bytes(40 * 8 * 8))
    with pytest.raises(DataError, match=r"its header says uint8 of shape .*, but 2560 bytes follow"):
        arrays(0, path=str(tmp_path))
    with zipfile.ZipFile(tmp_path / "set.npz", "w") as archive:
        for part in tmp_path.glob("*.npy"):
            archive.write(part, part.name)
    with pytest.raises(DataError, match=r"its header says uint8 of shape .*, but 2560 bytes follow"):
        arrays(0, path=str(tmp_path / "set.npz"))


def test_pickles_are_never_opened(tmp_path):
    import pickle

    class Trap:
        def __reduce__(self):
            return (open, (str(tmp_path / "sprung"), "w"))

    for name, value in columns().items():
        np.save(tmp_path / f"{name}.npy", value)
    (tmp_path / "x_train.npy").write_bytes(pickle.dumps(Trap()))
    with pytest.raises(DataError, match="cannot be read as a plain array"):
        arrays(0, path=str(tmp_path))
    assert not (tmp_path / "sprung").exists()


def test_a_csv_file_is_for_the_data_set_table(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("a,b\n1,2\n")
    with pytest.raises(DataError, match=r"t\.csv is a table: use `data: \{name: table\}`"):
        arrays(0, path=str(tmp_path / "t.csv"), images="a", labels={"b": "b"}, test_fraction=0.2)


def windows(**more: np.ndarray) -> dict:
    """Ten windows of each of 40 people, ten people at each of four sites; a person has one label."""
    person = np.repeat(np.arange(40), 10)
    x = np.random.default_rng(0).normal(size=(400, 3)).astype(np.float32)
    return {"x": x, "y": person % 2, "site": person // 10, "person": person, **more}


POOL = {"images": "x", "labels": {"y": "y"}, "domain": "site", "test_fraction": 0.2}


def test_texts_are_classes_and_domains(save):
    words = np.array(["run", "", "walk", "sit"])
    cities = np.array(["k\u00f6ln", "oslo"])
    made = columns(place_train=cities[np.arange(40) % 2], place_test=np.full(20, "rome"))
    made |= {key: words[made[key]] for key in ("y_train", "y_test")}
    path = save(made)
    data = arrays(0, path=path, domain="place_{split}")
    assert [(task.name, task.channels) for task in data.tasks] == [("label", 3)]
    assert data.classes == {"label": ("run", "sit", "walk")}
    assert data.train.labels["label"][:4].tolist() == [0, -1, 2, 1]
    assert data.domains == ("k\u00f6ln", "oslo", "rome")
    assert (data.train.domain[:2].tolist(), data.test.domain[:2].tolist()) == ([0, 1], [2, 2])
    stated = arrays(0, path=path, classes={"label": ["walk", "run", "sit", "stand"]})
    assert stated.train.labels["label"][:4].tolist() == [1, -1, 0, 2]
    assert (stated.tasks[0].channels, stated.classes["label"][3]) == (4, "stand")


def test_classes_of_integers_may_have_names(npz):
    data = arrays(0, path=npz(columns()), classes={"label": ["a", "b", "c", "d", "e"]})
    assert (data.tasks[0].channels, data.classes["label"][4]) == (5, "e")
    with pytest.raises(RecipeError, match="arrays, classes, task 'label': class 'a' is named twice"):
        arrays(0, path=npz(columns()), classes={"label": ["a", "a", "b", "c"]})


def test_texts_in_a_pool_are_split_as_their_numbers(npz):
    made = windows()
    texts = made | {"y": np.array(["a", "b"])[made["y"]], "site": np.array([*"abcd"])[made["site"]]}
    one, other = (arrays(0, path=npz(each), **POOL).train for each in (made, texts))
    assert torch.equal(one.images, other.images)
    assert torch.equal(one.labels["y"], other.labels["y"])


@pytest.mark.parametrize("texts", [False, True])
def test_examples_of_one_group_stay_in_one_part(npz, texts):
    made = windows()
    made["person"] = np.char.add("p", made["person"].astype(str)) if texts else made["person"] * 7 - 3
    data = arrays(0, path=npz(made), **POOL, group="person")
    whose = {tuple(x): who for x, who in zip(made["x"].tolist(), made["person"].tolist(), strict=True)}
    train, test = ([whose[tuple(x)] for x in part.images.tolist()] for part in (data.train, data.test))
    assert not {*train} & {*test}
    assert np.bincount(data.test.domain).tolist() == [20] * 4  # two people of each site
    assert np.bincount(data.test.labels["y"]).tolist() == [40, 40]
    assert data.group.tolist() == train
    assert {*train} != {*arrays(1, path=npz(made), **POOL, group="person").group.tolist()}
    for name, params in {"domains": {"clients": 2}, "iid": {"clients": 3}}.items():
        for share in PARTITIONERS[name].function(Pool.of(data), 0, **params, val_fraction=0.25).shares:
            val, learned = ({train[i] for i in part} for part in (share.val, share.train))
            assert val
            assert not val & learned
    assert np.setdiff1d(train, arrays(0, path=npz(made), **POOL, group="person", limit=50).group).size  # and with limit


def test_groups_that_a_file_splits_itself_are_a_doubt(npz):
    made = windows()
    cut = {"train": slice(0, 305), "test": slice(295, 400)}
    split = {f"{key}_{part}": made[key][rows] for part, rows in cut.items() for key in made}
    params = {"labels": {"y": "y_{split}"}, "group": "person_{split}"}
    doubts = arrays(0, path=npz(split), **params).doubts
    assert doubts[0].startswith("2 of 11 groups of the test part are in the train part too, for example 29 of 'person_")


def test_copies_in_both_parts_are_said(save):
    made = columns(shape=(8, 8, 3))
    made["x_test"][3:7] = made["x_train"][10:14]
    path = save(made)
    (doubt,) = arrays(0, path=path).doubts
    assert doubt == (
        "4 of 20 test examples are copies of training examples, for example x_test[3] and x_train[10]: "
        "test scores are too good, so remove one of each pair"
    )
    assert "for example" not in arrays(0, path=path, limit=30).doubts[0]  # whose positions are others


@pytest.mark.parametrize(
    "signal",
    ["series", "features"],  # rows of a few codes are alike by chance
)
def test_copies_in_a_pool(npz, signal):
    x = np.concatenate([np.arange(200.0).reshape(40, 5)] * 2)
    made = {"x": x, "y": np.arange(80) % 2}
    doubts = arrays(0, path=npz(made), images="x", labels={"y": "y"}, test_fraction=0.2, signal=signal).doubts
    assert bool(doubts) == (signal == "series")
    if doubts:
        assert re.match(r"\d+ of 16 test examples are copies of training examples: test", doubts[0])


def test_large_data_are_not_compared(npz, monkeypatch):
    made = columns()
    made["x_test"][0] = made["x_train"][0]
    monkeypatch.setattr("fedloom.data.inputs.COMPARED", 60)
    assert arrays(0, path=npz(made)).doubts
    monkeypatch.setattr("fedloom.data.inputs.COMPARED", 59)
    assert not arrays(0, path=npz(made)).doubts


def test_a_site_with_one_group_cannot_be_split(npz):
    made = windows()
    with pytest.raises(DataError, match=r"no domain has two groups \('site'\), so no test part can be split off"):
        arrays(0, path=npz(made), **POOL, group="site")


@pytest.mark.parametrize("kind", ["series", "features", "image"])
def test_a_site_of_other_units_is_a_doubt(npz, kind):
    rng = np.random.default_rng(0)
    site = np.arange(80) % 4
    x = rng.normal(1, 1, (80, 3, 16)) if kind == "series" else rng.normal(1, 1, (80, 3 if kind == "features" else 256))
    x[site == 2, 1] *= 1000
    if kind == "image":
        x = x.reshape(80, 16, 16)
    names = {"x": x.astype(np.float32), "y": np.arange(80) % 2, "site": np.array([*"abcd"])[site]}
    keys = {"images": "x", "labels": {"y": "y"}, "test_fraction": 0.2, "domain": "site", "signal": kind}
    doubts = arrays(0, path=npz(names), **keys).doubts
    if kind == "image":
        assert not doubts
        return
    (doubt,) = doubts
    unit = "channel" if kind == "series" else "feature"
    assert re.fullmatch(
        rf"domain 'c': {unit} 1 has mean \S+, where the others have about [01]\.\d+ \(standard deviation [01]\.\d+\); "
        "if these are other units, convert them",
        doubt,
    )


def test_rare_features_are_no_other_units(npz):
    rng = np.random.default_rng(0)
    site = np.repeat(np.arange(4), 50)
    x = (rng.random((200, 6)) < np.where(site[:, None] == 1, 0.3, [0, 0.01, 0.02, 0.5, 1, 0.1])).astype(np.float32)
    made = {"x": x, "y": np.arange(200) % 2, "site": site}
    assert not arrays(0, path=npz(made), **POOL | {"labels": {"y": "y"}}).doubts
