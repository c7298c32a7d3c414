"""Data sets made of others: as tasks of one, side by side, and as features of a frozen encoder."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import fedloom
from fedloom.data import DATASETS, PARTITIONERS, Pool, combine
from fedloom.errors import DataError, RecipeError
from fedloom.federation.recipes import load as load_recipe
from fedloom.models.build import build_model

REAL = Path(__file__).parents[3] / "shared" / "data"
CPU = torch.device("cpu")
SMALL = (
    "model={name: small-cnn, width: 2, hidden: 4, heads: own}", "training.rounds=1", "training.steps=1",
    "training.epochs=null", "evaluation={every: 1, splits: [test]}",
)  # fmt: skip
REST = {"partition": {"name": "iid", "clients": 2}, "model": "small-cnn", "method": "fedavg"}


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """`grey`: 8 x 8, 3 classes, two domains; `colour`: 16 x 16, 4 classes, two tasks."""
    rng = np.random.default_rng(0)
    grey = {"domain_names": np.array(["left hand", "right_(hand)"])}
    colour = {}
    for split, n in (("train", 12), ("test", 6)):
        grey[f"x_{split}"] = rng.integers(0, 256, (n, 8, 8), dtype=np.uint8)
        grey[f"y_{split}"] = np.arange(n) % 3
        grey[f"domain_{split}"] = np.arange(n) // 3 % 2
        colour[f"x_{split}"] = rng.integers(0, 128, (n, 16, 16, 3), dtype=np.uint8)
        colour[f"y_{split}"] = np.arange(n) % 4
        colour[f"z_{split}"] = np.arange(n) % 2
    np.savez(tmp_path / "grey.npz", **grey)
    np.savez(tmp_path / "colour.npz", **colour)
    return tmp_path


def arrays(name: str, **more: object) -> dict[str, object]:
    return {"name": "arrays", "path": f"{name}.npz", **more}


def load(root: Path, size: int = 8, **params):
    sets = params.pop("sets", {"a": arrays("grey"), "b": arrays("colour")})
    return DATASETS["many"].function(0, sets=sets, root=str(root), size=size, **params)


def test_tasks_are_sets_and_examples_have_labels_of_their_own(files):
    data = load(files)
    assert [(t.name, t.channels) for t in data.tasks] == [("a", 3), ("b", 4)]
    assert data.domains == ("a", "b")
    assert data.train.labels_of("a").tolist() == [0, 1, 2] * 4 + [-1] * 12
    assert data.train.labels_of("b").tolist() == [-1] * 12 + [0, 1, 2, 3] * 3
    assert data.test.labels_of("b").tolist() == [-1] * 6 + [0, 1, 2, 3, 0, 1]
    assert data.train.domain.tolist() == [0] * 12 + [1] * 12
    assert data.input_shape == (3, 8, 8)
    assert data.train.images[torch.tensor([0, 13])].dtype == torch.uint8
    assert data.train.nbytes == 24 * 3 * 64 + 2 * 24 * 2
    assert not data.train.prefetch


def test_every_example_is_normalised_by_its_own_set_whatever_is_beside_it(files):
    data = load(files)
    x, y = data.train.batch(torch.arange(24), CPU)
    assert {name: labels.dtype for name, labels in y.items()} == {"a": torch.int64, "b": torch.int64}
    for own in (x[:12], x[12:]):
        assert own.mean((0, 2, 3)).abs().max() < 1e-5
        assert (own.std((0, 2, 3), unbiased=False) - 1).abs().max() < 1e-5
    mixed, _ = data.train.batch(torch.tensor([20, 3, 12]), CPU, tasks=["a"])
    assert torch.equal(mixed, x[[20, 3, 12]])
    nothing, labels = data.train.batch(torch.arange(0), CPU)
    assert (nothing.shape, len(labels["a"])) == ((0, 3, 8, 8), 0)
    raw = np.load(files / "grey.npz")
    expected = (raw["x_test"] / 255 - raw["x_train"].mean() / 255) / (raw["x_train"] / 255).std()
    found, _ = data.test.batch(torch.arange(6), CPU)
    assert np.allclose(found[:, 2].numpy(), expected, atol=1e-5)


def test_a_set_with_several_tasks_prefixes_them(files):
    data = load(files, sets={"b": arrays("colour", labels={"y": "y_{split}", "z": "z_{split}"}, size=8)})
    assert [t.name for t in data.tasks] == ["b-y", "b-z"]
    _, y = data.train.batch(torch.tensor([3]), CPU)
    assert (y["b-y"].item(), y["b-z"].item()) == (3, 1)


def test_domains_become_tasks_under_names_that_parameters_may_have(files):
    with_domains = arrays("grey", domain="domain_{split}", domain_names="domain_names")
    data = load(files, sets={"a": with_domains, "b": arrays("colour")}, by_domain=["a"])
    assert [t.name for t in data.tasks] == ["a-left_hand", "a-right_hand", "b"]
    assert data.train.labels_of("a-left_hand")[:12].tolist() == [0, 1, 2, -1, -1, -1] * 2
    assert data.train.labels_of("a-right_hand")[:12].tolist() == [-1, -1, -1, 0, 1, 2] * 2
    assert len(data.train) == 24


def test_groups_of_classes_become_tasks_numbered_from_zero(files):
    data = load(files, classes={"b": {"high": [3, 1]}})
    assert [(t.name, t.channels) for t in data.tasks] == [("a", 3), ("b-high", 2)]
    assert data.train.labels_of("b-high").tolist() == [-1] * 12 + [1, 0] * 3
    kept = data.train.images[torch.arange(12, 18)]
    whole = load(files).train.images[torch.arange(12, 24)]
    assert torch.equal(kept, whole[1::2])
    both = load(files, classes={"b": {"high": [3, 1], "low": [0, 2]}})
    labels = np.stack([both.train.labels_of("b-high"), both.train.labels_of("b-low")])
    assert ((labels >= 0).sum(0)[12:] == 1).all()


def test_common_parameters_do_not_overrule_a_set(files):
    data = load(files, sets={"a": arrays("grey", limit=4), "b": arrays("colour")}, limit=9)
    assert data.train.domain.tolist() == [0] * 4 + [1] * 9
    assert data.test.domain.tolist() == [0] * 4 + [1] * 6
    again = load(files, sets={"a": arrays("grey", limit=4), "b": arrays("colour")}, limit=9)
    assert again.train.fingerprint() == data.train.fingerprint()
    with pytest.raises(DataError, match="set 'a': expected uint8 images 3 x 8 x 8 in memory, found torch.uint8 3 x 16"):
        load(files, sets={"a": arrays("grey", size=16)})


@pytest.mark.parametrize(
    ("params", "error", "message"),
    [
        ({"by_domain": ["c"]}, RecipeError, "by_domain names the set 'c'"),
        ({"by_domain": ["a"]}, RecipeError, "set 'a', which has no domains"),
        ({"classes": {"aa": {"x": [0, 1]}}}, RecipeError, "the set 'aa', which sets does not list. Did you mean 'a'"),
        ({"classes": {"a": {"x": [0, 1], "y": [1, 2]}}}, RecipeError, "classes.a names class 1 twice"),
        ({"classes": {"a": {"x": [0, 3]}}}, RecipeError, "classes.a names class 3 of 0..2"),
        ({"classes": {"a": {"x": [0, 1]}}, "by_domain": ["a"]}, RecipeError, "and both of them"),
        ({"sets": {"d": {"name": "digits"}}}, DataError, "set 'd': expected uint8 images 3 x 8 x 8"),
        ({"sets": {"a": arrays("none")}}, DataError, "file or folder .* does not exist"),
        ({"sets": {"a-b": arrays("grey"), "a": arrays("colour")}, "classes": {"a": {"b": [0, 1]}}}, DataError,
         "another task has the name 'a-b' too"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(files, params, error, message):
    with pytest.raises(error, match=message):
        load(files, **params)


def test_a_part_without_a_label_of_a_task_is_an_error(files):
    sets = {"a": arrays("grey", limit=1)}
    (only,) = load(files, sets=sets).test.labels_of("a").tolist()
    with pytest.raises(DataError, match="set 'a': no (train|test) example has a label of task 'a-x'"):
        load(files, sets=sets, classes={"a": {"x": [c for c in range(3) if c != only]}})


def test_a_wrong_group_is_named_when_the_recipe_is_read():
    data = {"name": "many", "sets": {"a": arrays("grey")}, "classes": {"a": {"x": [0]}}}
    with pytest.raises(RecipeError, match=r"data.classes.a.x: .*at least 2"):
        load_recipe({"name": "x", "data": data, **REST})


def test_digits_many_has_thirty_different_tasks():
    data = DATASETS["digits-many"].function(0, count=30, limit=60)
    assert len({t.name for t in data.tasks}) == 30
    assert {t.name: t.channels for t in data.tasks}["noisy-digit"] == 10
    assert data.domains == ("plain", "inverted", "noisy", "thickened", "textured")
    for task in data.tasks:
        assert (data.train.labels_of(task.name) >= 0).sum() == 60
        assert (data.test.labels_of(task.name) >= 0).sum() == 359
    labels = np.stack([data.train.labels_of(t.name) for t in data.tasks])
    assert ((labels >= 0).sum(0) == 1).all()
    assert data.train.images[torch.arange(3)].dtype == torch.uint8
    x, _ = data.train.batch(torch.from_numpy(np.flatnonzero(data.train.domain.numpy() == 1)), CPU)
    assert x.mean().abs() < 1e-4
    assert DATASETS["digits-many"].function(0, count=30, limit=60).train.fingerprint() == data.train.fingerprint()


def test_digits_many_asks_what_it_says():
    data = DATASETS["digits-many"].function(1, count=8, size=8)
    names = [t.name for t in data.tasks]
    assert names == ["plain-digit", "plain-parity", "inverted-parity", "inverted-large", "noisy-large", "noisy-holes",
                     "thickened-holes", "textured-remainder"]  # fmt: skip
    labels = data.train.labels
    digit = labels["plain-digit"][labels["plain-digit"] >= 0]
    # Without a limit every task has the same images in the same order.
    assert torch.equal(labels["inverted-parity"][labels["inverted-parity"] >= 0], digit % 2)
    assert torch.equal(labels["textured-remainder"][labels["textured-remainder"] >= 0], digit % 3)
    images = [data.train.images[torch.from_numpy(np.flatnonzero(labels[n] >= 0))] for n in names[:3]]
    assert torch.equal(images[0], images[1])
    assert (images[2].int() - (255 - images[0]).int()).abs().max() <= 1  # rounded after inversion


def test_a_client_with_several_tasks_trains_on_mixed_batches(tmp_path):
    data = {"name": "digits-many", "count": 4, "limit": 60, "size": 8}
    recipe = {"name": "t", "data": data, **REST, "model": {"name": "small-cnn", "width": 4, "hidden": 8}}
    recipe["training"] = {"rounds": 2}
    result = fedloom.run(recipe, tmp_path / "run")
    assert set(result.run.final().values) == {"plain-digit", "inverted-parity", "noisy-large", "thickened-holes"}
    losses = {r["task"]: r["value"] for r in result.run.rounds[-1]["metrics"] if r["metric"] == "loss"}
    assert all(value > 0.3 for value in losses.values()), losses  # not diluted by the other tasks' examples


@pytest.mark.parametrize(("name", "tasks"), [("eight", 8), pytest.param("thirty", 30, marks=pytest.mark.slow)])
def test_embedded_recipe_trains(name, tasks, tmp_path):
    result = fedloom.run(f"matu/{name}-embedded", tmp_path / "run", overrides=SMALL)
    assert len(result.run.final().values) == tasks


@pytest.mark.parametrize(("name", "tasks"), [("eight", 8), pytest.param("thirty", 30, marks=pytest.mark.slow)])
def test_real_twin_trains(name, tasks, tmp_path):
    if not (REAL / "digits_mnist.npz").exists():
        pytest.skip("the small real sets are not here")
    overrides = [f"data.root={REAL}", *SMALL, "partition.min_examples=1"]
    result = fedloom.run(f"matu/{name}-real", tmp_path / "run", overrides=overrides)
    assert len(result.run.final().values) == tasks


SETS = {
    "a": {"name": "digits", "tasks": ["digit", "parity"], "size": 8},
    "b": {"name": "digits", "tasks": ["digit"], "size": 16},
}


def side_by_side(sets=SETS):
    return DATASETS["several"].function(0, sets=sets)


def test_tasks_carry_the_name_of_their_set_and_examples_their_domain():
    dataset = side_by_side()
    assert [t.name for t in dataset.tasks] == ["a-digit", "a-parity", "b-digit"]
    assert dataset.domains == ("a", "b")
    assert dataset.classes == {"a-parity": ("even", "odd")}, "digits are called as they are numbered"
    pool = Pool.of(dataset)
    half = len(pool) // 2
    assert (pool.domain == np.repeat([0, 1], half)).all()
    assert (pool.labels["b-digit"][:half] == -1).all()
    assert (pool.labels["a-digit"][:half] == pool.labels["b-digit"][half:]).all()


def test_a_batch_comes_from_one_set():
    train = side_by_side().train
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
    partition = PARTITIONERS["single-and-multi"].function(Pool.of(side_by_side()), 0, single={"a": 1}, multi={"b": 2})
    assert [s.client for s in partition.shares] == ["a-digit-0", "a-parity-0", "b-multi-0", "b-multi-1"]


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        ({"a": {}}, "set 'a': no name of a data set found"),
        ({"a": {"name": "nothing"}}, "set 'a': unknown data set 'nothing'"),
        ({"a": {"name": "digits", "sizes": 8}}, "set 'a': sizes: Extra inputs are not permitted"),
        ({"a": {"name": "digits", "size": 0}}, "set 'a': size: Input should be greater than"),
        ({}, "sets"),
    ],
)
def test_a_wrong_set_beside_others_is_named_when_the_recipe_is_read(sets, message):
    with pytest.raises(RecipeError, match=message):
        load_recipe({"name": "x", "data": {"name": "several", "sets": sets}, **REST})


def test_a_set_has_no_domains_of_its_own():
    with pytest.raises(DataError, match="set 'a' has the domains"):
        side_by_side({"a": {"name": "digits", "domains": ["plain", "noisy"]}})


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
    with pytest.raises(
        DataError, match=r"expected inputs of one kind, found 'a' has tokens of 6 \(positions\).* 'b' has features of 6"
    ):
        side_by_side(sets)
    assert side_by_side({"a": sets["a"], "b": sets["a"]}).signal.vocabulary == 9


CNN = {"name": "small-cnn", "width": 2, "hidden": 6}


@pytest.fixture
def two_files(files: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two sets of images with 3 and 4 classes; the cache is empty."""
    monkeypatch.setenv("FEDLOOM_CACHE", str(files / "cache"))
    return files


def many_of(root: Path) -> dict[str, object]:
    sets = {"a": arrays("grey"), "b": arrays("colour")}
    return {"name": "many", "root": str(root), "size": 8, "sets": sets}


def embed(of: dict[str, object], encoder: dict[str, object] = CNN, seed: int = 0):
    return DATASETS["embedded"].make(seed, of=of, encoder=encoder)


def test_features_are_what_the_encoder_gives_scaled_over_the_train_part(two_files):
    data = embed(many_of(two_files))
    inner = DATASETS["many"].make(0, **{k: v for k, v in many_of(two_files).items() if k != "name"})
    model = build_model("small-cnn", {"width": 2, "hidden": 6}, inner.input_shape, inner.tasks, 0)
    index = torch.arange(24)
    with torch.no_grad():
        train = model.encoder(inner.train.batch(index, CPU)[0])
        test = model.encoder(inner.test.batch(index[:12], CPU)[0])
    for rows, part in ((train, data.train), (test, data.test)):
        expected = (rows - train.mean(0)) / train.std(0, correction=0).clamp(min=1e-6)
        assert torch.allclose(part.batch(index[: len(part)], CPU)[0], expected, atol=1e-5)
    assert (data.tasks, data.domains) == (inner.tasks, inner.domains)
    assert data.signal.kind == "features"
    for task in ("a", "b"):
        assert data.test.labels_of(task).tolist() == inner.test.labels_of(task).tolist()
    assert data.train.domain.tolist() == inner.train.domain.tolist()


@pytest.mark.parametrize("name", ["many", "joined-domains", "several", "embedded"])
def test_groups_and_doubts_of_a_set_stay_with_it(name, two_files):
    made = dict(np.load(two_files / "grey.npz"))
    made["person_train"] = made["person_test"] = np.array([*"ABCDEF"])
    made["person_train"] = np.repeat(made["person_train"], 2)
    np.savez(two_files / "grey.npz", **made)
    one = {"name": "arrays", "path": str(two_files / "grey.npz"), "group": "person_{split}"}
    section = {"of": one, "encoder": CNN} if name == "embedded" else {"sets": {"a": one, "b": {**one, "group": None}}}
    for _ in range(2):  # the second time, features are kept
        data = DATASETS[name].make(0, **section)
        group = Pool.of(data).group.tolist()
        assert group[:12] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
        assert len({*group}) == (6 if name == "embedded" else 18)
        assert "6 of 6 groups of the test part are in the train part too" in data.doubts[0]


def test_features_are_computed_once_and_anew_for_another_encoder_or_other_data(two_files, monkeypatch):
    first = embed(many_of(two_files))
    monkeypatch.setattr(combine, "_seen", None)  # nothing passes the encoder
    again = embed(many_of(two_files))
    assert torch.equal(first.train.images, again.train.images)
    for change in ({"seed": 1}, {"encoder": {**CNN, "hidden": 5}}, {"of": {**many_of(two_files), "limit": 5}}):
        with pytest.raises(TypeError):
            embed(**{"of": many_of(two_files), **change})


def test_features_that_are_kept_are_found_without_loading_data_or_encoder(two_files, monkeypatch):
    of = {"name": "many", "root": str(two_files), "size": 8, "sets": {"a": arrays("grey"), "b": arrays("colour")}}
    first = embed(of)
    with monkeypatch.context() as without:
        without.setattr(combine, "load", None)
        again = embed(of)
    assert again.tasks == first.tasks
    for known in ("name", "domains", "redrawn", "drawn_from"):
        assert getattr(again, known) == getattr(first, known)
    for split in ("train", "test"):
        one, other = getattr(first, split), getattr(again, split)
        assert torch.equal(one.images, other.images)
        assert torch.equal(one.domain, other.domain)
        assert {t: y.tolist() for t, y in one.labels.items()} == {t: y.tolist() for t, y in other.labels.items()}
    monkeypatch.setattr(combine, "load", None)
    with pytest.raises(TypeError):  # the order of the sets is that of the tasks
        embed({**of, "sets": dict(reversed(of["sets"].items()))})
    archive = dict(np.load(two_files / "grey.npz"))
    archive["x_train"][0] += 1
    np.savez(two_files / "grey.npz", **archive)
    with pytest.raises(TypeError):
        embed(of)


def test_an_encoder_that_knows_how_its_images_were_normalised_sees_them_so(two_files):
    class Known(torch.nn.Module):
        seen = ((0.5, 0.25, 0.0), (0.5, 1.0, 2.0))

    inner = DATASETS["many"].make(0, **{k: v for k, v in many_of(two_files).items() if k != "name"})
    index = torch.arange(24)
    raw = inner.train.images[index].float() / 255
    expected = (raw - torch.tensor(Known.seen[0]).view(3, 1, 1)) / torch.tensor(Known.seen[1]).view(3, 1, 1)
    assert torch.allclose(combine._seen(Known(), inner.train, index), expected, atol=1e-5)
    Known.seen = ((0.5,), (0.5,))
    with pytest.raises(DataError, match="the encoder's weights are for 1 channels, found 3"):
        combine._seen(Known(), inner.train, index)


def test_what_has_no_features_is_refused(two_files):
    scenes = {"name": "scenes", "tasks": ["depth"], "count": 2, "test_count": 2, "height": 32, "width": 32}
    with pytest.raises(DataError, match="features have no positions, but the dense task 'depth' needs them"):
        embed(scenes)
    with pytest.raises(DataError, match="'several' has inputs of several shapes, expected one"):
        embed({"name": "several", "sets": SETS})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("data.encoder={name: small-cn}", "data.encoder.*unknown encoder 'small-cn'"),
        ("data.encoder={name: small-cnn, width: -1}", "data.encoder.*width"),
        ("data.encoder={width: 2}", "data.encoder.*expected a mapping with 'name'"),
        ("data.of={name: array}", "data.of.*unknown data set 'array'"),
        ("data.of={}", "data.of.*no name of a data set found"),
    ],
)
def test_a_wrong_recipe_is_refused(change, message):
    data = {"name": "embedded", "of": {"name": "digits"}, "encoder": CNN}
    recipe = {"name": "x", "data": data, **REST, "model": "mlp"}
    assert load_recipe(recipe).data.name == "embedded"
    with pytest.raises(RecipeError, match=message):
        load_recipe(recipe, [change])
