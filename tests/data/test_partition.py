"""Every partitioner: exact, disjoint, a function of seed and parameters alone, and clear where it cannot be had."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom.core.settings.section import folder_name
from fedloom.data import PARTITIONERS, Partition, Pool, Share
from fedloom.errors import DataError, RecipeError
from fedloom.federation.recipes import dump, load
from fedloom.federation.rounds.build import build
from tests_support import load_recipe

quick = settings(max_examples=20)
seeds = st.integers(0, 2**40)


def same_images(n: int = 600, seed: int = 0, tasks: int = 3, classes: int = 5) -> Pool:
    """Every task on every image, and three domains."""
    rng = np.random.default_rng(seed)
    labels = {f"t{i}": rng.integers(0, classes, n) for i in range(tasks)}
    return Pool(labels, rng.integers(0, 3, n), ("photo", "art", "sketch"))


def own_images(n: int = 600, seed: int = 0, tasks: int = 3, classes: int = 4) -> Pool:
    """Each image has a label of exactly one task; every tenth has none."""
    rng = np.random.default_rng(seed)
    owner = rng.integers(0, tasks, n)
    owner[::10] = -1
    return Pool({f"t{i}": np.where(owner == i, rng.integers(0, classes, n), -1) for i in range(tasks)})


def split(name: str, pool: Pool, seed: int = 0, **params: object) -> Partition:
    """Call a partitioner as a recipe does: parameters validated by its schema."""
    entry = PARTITIONERS[name]
    valid = entry.params.model_validate(params)
    return entry.function(pool, seed, **{key: getattr(valid, key) for key in type(valid).model_fields})


def held(partition: Partition) -> list[int]:
    """All positions that clients hold, with repetition."""
    return [int(i) for s in partition.shares for part in (s.train, s.val) for i in part]


def labelled(pool: Pool) -> list[int]:
    return np.flatnonzero(np.any([pool.labelled(task) for task in pool.tasks], axis=0)).tolist()


# Name, parameters, pool; what these deal out is everything that has a label.
EXACT = [
    ("iid", {"clients": 7}, same_images),
    ("iid", {"clients": 7}, own_images),
    ("class-dirichlet", {"clients": 6, "alpha": 0.3, "min_examples": 2}, same_images),
    ("class-dirichlet", {"clients": 4, "alpha": 0.5, "min_examples": 2, "task": "t1"}, own_images),
    ("class-dirichlet", {"clients": 5, "alpha": 0.1, "balanced": True, "task": "t2"}, same_images),
    ("task-dirichlet", {"clients": 6, "alpha_tasks": 0.2}, same_images),
    ("task-dirichlet", {"clients": 6, "alpha_tasks": 0.5, "alpha_classes": 0.5}, same_images),
    ("task-dirichlet", {"clients": 6, "alpha_tasks": 0, "alpha_classes": 0.5}, own_images),
    ("one-task", {}, same_images),
    ("one-task", {"clients_per_task": 2, "all_task_clients": 1}, own_images),
    ("task-weights", {}, same_images),
    ("task-weights", {"weights": "single", "clients": 6}, own_images),
    ("task-weights", {"weights": "multi", "clients": 5}, same_images),
    ("task-weights", {"weights": [{"t0": 1}, {"t1": 2, "t2": 0.5}]}, own_images),
    ("task-weights", {"weights": "single", "sizes": [1, 2, 6]}, same_images),
    ("task-weights", {"weights": "multi", "clients": 4, "sizes": [1, 2, 3, 0.5]}, own_images),
    ("domains", {"clients": 3}, same_images),
    ("task-groups", {"clients": 6, "tasks_per_client": 2, "alpha_classes": 0.5}, own_images),
    ("task-groups", {"clients": 4, "groups": [["t0", "t1"], ["t1", "t2"]]}, same_images),
]
LOOSE = [
    ("one-task", {"images": "shared", "clients_per_task": 2, "all_task_clients": 1}, same_images),
    ("domains", {"clients": {"photo": 2, "sketch": 3}, "fraction": 0.2}, same_images),
    ("domains", {"clients": 2, "fraction": 0.15, "allocation": "random", "cover_classes": True}, same_images),
]


def label(case: tuple) -> str:
    name, params, pool = case
    return f"{name}-{pool.__name__}-" + "-".join(f"{k}={v}" for k, v in params.items())


@pytest.mark.parametrize("case", EXACT, ids=label)
@quick
@given(seed=seeds)
def test_all_labelled_examples_go_to_exactly_one_client(case, seed):
    name, params, make = case
    pool = make(seed=seed)
    assert sorted(held(split(name, pool, seed, **params))) == labelled(pool)


@pytest.mark.parametrize("case", EXACT + LOOSE, ids=label)
@quick
@given(seed=seeds)
def test_a_partition_is_a_function_of_its_arguments(case, seed):
    name, params, make = case
    pool = make(seed=1)
    first = split(name, pool, seed, **params)
    np.random.default_rng(5).random(10)
    assert first.to_json() == split(name, pool, seed, **params).to_json()
    assert first.hash != split(name, pool, seed + 1, **params).hash
    assert split(name, pool, seed, **params, val_fraction=0.3).hash != first.hash

    again = Partition.from_json(json.loads(json.dumps(first.to_json())))
    assert again.hash == first.hash
    again.check(pool, shared=params.get("images") == "shared")
    clients = [s.client for s in first.shares]
    assert clients == sorted(clients)
    for s in first.shares:
        assert s.train.dtype == s.val.dtype == np.int64
        assert np.all(np.diff(s.train) > 0)
        assert np.all(np.diff(s.val) > 0)
        n = len(s.train) + len(s.val)
        assert len(s.val) == min(max(1, round(0.1 * n)), n - 1)


PINNED = {
    "iid": ({"clients": 3}, [200, 200, 200]),
    "class-dirichlet": ({"clients": 4}, [251, 188, 142, 19]),
    "task-dirichlet": ({"clients": 4, "alpha_classes": 0.5}, [200, 80, 200, 120]),
    "one-task": ({"all_task_clients": 1}, [150, 150, 150, 150]),
    "task-weights": ({}, [100] * 6),
    "task-groups": ({"clients": 4, "tasks_per_client": 2, "alpha_classes": 0.5}, [189, 137, 176, 98]),
    "domains": ({"clients": {"photo": 2, "art": 1}, "fraction": 0.25}, [49, 49, 48]),
}


def test_pinned_sizes():
    """Notices a changed rule or random stream, which would silently change every result."""
    pool = same_images()
    sizes = {
        name: [len(s.train) + len(s.val) for s in split(name, pool, 7, **params).shares]
        for name, (params, _) in PINNED.items()
    }
    assert {name: value for name, (_, value) in PINNED.items()} == sizes


def test_ids_sort_as_numbers():
    ids = [s.client for s in split("iid", same_images(), clients=101).shares]
    assert ids[:2] == ["c000", "c001"]
    assert ids[-1] == "c100"


def test_iid_gives_equal_shares_of_every_task():
    pool = own_images()
    for s in split("iid", pool, clients=5).shares:
        assert set(s.tasks) == {"t0", "t1", "t2"}
        assert len(s.train) + len(s.val) in (108, 109)


@quick
@given(seed=seeds, alpha=st.sampled_from([1e-300, 1e-12, 1e-4, 0.1, 1.0, 1e6]))
def test_dirichlet_of_any_alpha_is_finite(seed, alpha):
    pool = same_images(classes=8)
    partition = split("class-dirichlet", pool, seed, clients=3, alpha=alpha, min_examples=1)
    assert sorted(held(partition)) == labelled(pool)
    if alpha <= 1e-12:  # then every class lies with one client
        for value in range(8):
            at = [pool.labels["t0"][np.r_[s.train, s.val]] for s in partition.shares]
            assert sum(value in labels for labels in at) == 1


def test_large_alpha_is_near_iid_and_small_alpha_is_not():
    pool = same_images(6000)

    def spread(alpha: float) -> float:
        rows = split("class-dirichlet", pool, clients=5, alpha=alpha, task="t1").table(pool)
        return float(np.std([row["labels"]["t1"] for row in rows]))

    assert spread(1000) < 20 < 150 < spread(0.1)


def test_balanced_shares_are_of_similar_size():
    pool = same_images(2000, classes=10)
    sizes = {
        balanced: [len(s.train) for s in split("class-dirichlet", pool, clients=5, balanced=balanced).shares]
        for balanced in (False, True)
    }
    assert np.std(sizes[True]) < np.std(sizes[False])


@quick
@given(seed=seeds, clients=st.integers(3, 8))
def test_task_dirichlet_zero_is_one_task_each_and_covers_all(seed, clients):
    partition = split("task-dirichlet", same_images(), seed, clients=clients, alpha_tasks=0)
    assert all(len(s.tasks) == 1 for s in partition.shares)
    counts = Counter(task for s in partition.shares for task in s.tasks)
    assert max(counts.values()) - min(counts.values()) <= 1


@quick
@given(seed=seeds, clients=st.integers(1, 6), alpha=st.sampled_from([1e-6, 0.2, 0.5, 5.0]))
def test_task_dirichlet_leaves_no_task_out(seed, clients, alpha):
    pool = same_images(tasks=5)
    partition = split("task-dirichlet", pool, seed, clients=clients, alpha_tasks=alpha)
    assert {task for s in partition.shares for task in s.tasks} == set(pool.tasks)


def test_task_dirichlet_splits_each_data_set_among_its_holders():
    pool = own_images(3000)
    partition = split("task-dirichlet", pool, 3, clients=6, alpha_tasks=0.5)
    assert len({tuple(s.tasks) for s in partition.shares}) > 1
    for s in partition.shares:
        index = np.r_[s.train, s.val]
        has = {task for task in pool.tasks if pool.labelled(task)[index].any()}
        assert has == set(s.tasks)


def test_one_task_names_clients_by_what_they_hold():
    pool = same_images()
    partition = split("one-task", pool, clients_per_task=2, all_task_clients=2)
    tasks = {s.client: set(s.tasks) for s in partition.shares}
    every = {"t0", "t1", "t2"}
    single = {f"t{i}-{k}": {f"t{i}"} for i in range(3) for k in range(2)}
    assert tasks == {"all-0": every, "all-1": every, **single}


def test_shared_images_are_the_same_for_all_tasks_and_so_is_validation():
    pool = same_images()
    partition = split("one-task", pool, images="shared", val_fraction=0.2)
    first, *others = partition.shares
    assert len(first.train) + len(first.val) == len(pool)
    for s in others:
        np.testing.assert_array_equal(s.train, first.train)
        np.testing.assert_array_equal(s.val, first.val)
    with pytest.raises(DataError, match=r"'t0-0' and 't1-0' both hold example \d+ \(600 in common\)"):
        partition.check(pool)


def test_shared_groups_are_disjoint_inside_and_complete():
    pool = own_images()
    partition = split("one-task", pool, images="shared", clients_per_task=2, all_task_clients=2)
    for task in (*pool.tasks, "all"):
        group = [s for s in partition.shares if s.client.startswith(task)]
        wanted = labelled(pool) if task == "all" else np.flatnonzero(pool.labelled(task)).tolist()
        assert sorted(held(Partition(tuple(group)))) == wanted


def test_task_weights_modes():
    pool = same_images()
    pairs = [s.tasks for s in split("task-weights", pool).shares]
    assert pairs[0] == {"t0": 0.7, "t1": 0.3}
    assert len({tuple(p) for p in pairs}) == 6
    single = [s.tasks for s in split("task-weights", pool, weights="single", clients=4).shares]
    assert single == [{"t0": 1}, {"t1": 1}, {"t2": 1}, {"t0": 1}]
    for s in split("task-weights", pool, weights="multi", clients=2).shares:
        assert s.tasks == dict.fromkeys(pool.tasks, 1 / 3)


def test_task_weights_deals_in_proportion_to_sizes():
    """600 images, 64 : 136 : 208 : 280 of 688, rounded at the ends of the parts; a scale changes nothing."""
    for scale in (1, 0.01):
        sizes = [scale * size for size in (64, 136, 208, 280)]
        shares = split("task-weights", same_images(), weights="multi", clients=4, sizes=sizes, val_fraction=0).shares
        assert [len(s.train) for s in shares] == [56, 118, 182, 244]


@quick
@given(seed=seeds)
def test_domains_draw_the_stated_number_without_replacement(seed):
    pool = same_images(seed=2)
    wanted = {"photo": 2, "art": 1, "sketch": 3}
    fraction = {"photo": 0.5, "art": 0.1, "sketch": 1 / 3}
    partition = split("domains", pool, seed, clients=wanted, fraction=fraction)
    assert Counter(s.domain for s in partition.shares) == wanted
    assert len(held(partition)) == len(set(held(partition)))
    for s in partition.shares:
        index = np.r_[s.train, s.val]
        number = pool.domains.index(s.domain)
        assert set(pool.domain[index]) == {number}
        assert len(index) == math.floor(fraction[s.domain] * (pool.domain == number).sum() + 1e-9)


def test_domain_order_is_shuffled():
    orders = {tuple(s.domain for s in split("domains", same_images(), i, clients=2).shares) for i in range(6)}
    assert len(orders) > 3


@quick
@given(seed=seeds)
def test_cover_classes_gives_every_client_every_class(seed):
    pool = same_images(seed=3, classes=7)
    partition = split("domains", pool, seed, clients=3, fraction=0.06, cover_classes=True)
    assert len(held(partition)) == len(set(held(partition)))
    for row in partition.table(pool):
        assert min(row["labels"]["t0"]) >= 1
        assert row["train"] + row["val"] == int(0.06 * (pool.domain == pool.domains.index(row["domain"])).sum())


def test_validation_part_of_small_clients():
    pool = Pool({"t": np.zeros(5, int)})
    sizes = [(len(s.train), len(s.val)) for s in split("iid", pool, clients=3).shares]
    assert sizes == [(1, 1), (1, 1), (1, 0)]
    assert all(not len(s.val) for s in split("iid", pool, clients=3, val_fraction=0).shares)
    assert [len(s.val) for s in split("iid", pool, clients=1, val_fraction=0.99).shares] == [4]


def test_unsigned_and_dense_labels_count_as_labelled():
    pool = Pool({"u": np.array([0, 1, 255], np.uint8), "map": np.zeros((3, 2, 2), np.int64)})
    assert pool.labelled("u").all()
    assert pool.labelled("map").all()
    (row,) = split("iid", pool, clients=1).table(pool)
    assert row["labels"]["map"] == 3
    assert sum(row["labels"]["u"]) == 3


def test_table_counts_labels_of_train_and_validation():
    pool = own_images()
    rows = split("one-task", pool).table(pool)
    assert [row["client"] for row in rows] == ["t0-0", "t1-0", "t2-0"]
    for row in rows:
        (task,) = row["tasks"]
        assert sum(row["labels"][task]) == row["train"] + row["val"] == pool.labelled(task).sum()
        assert row["labels"][task] == np.bincount(pool.labels[task][pool.labelled(task)]).tolist()


def share(client="a", tasks=None, train=(0, 1), val=(2,), domain=None) -> Share:
    return Share(client, tasks or {"t": 1.0}, np.array(train, np.int64), np.array(val, np.int64), domain)


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        ([share(train=())], "client 'a' has no training example"),
        ([replace(share(), tasks={})], "client 'a' has no task"),
        ([share(train=(0, 9))], "client 'a', tasks t: position 9 found, expected 0 to 5"),
        ([share(train=(-1, 0))], "position -1 found, expected 0 to 5"),
        ([share(train=(0, 2))], "client 'a' holds an example twice"),
        ([share(tasks={"tt": 1.0})], r"client 'a': unknown task 'tt'. Did you mean 't'\? Known: t, u"),
        ([share(tasks={"t": 0.0})], "client 'a', task 't': expected a weight above 0, found 0.0"),
        ([share(tasks={"t": float("nan")})], "expected a weight above 0, found nan"),
        ([share(tasks={"u": 1.0})], "client 'a' has no labelled example of its task 'u'"),
        ([share(domain="x")], "client 'a': unknown domain 'x'. Known: none"),
        ([share(), share("b", train=(1, 3), val=())], r"'a' and 'b' both hold example 1 \(1 in common\)"),
        ([share("b"), share("a", train=(3,), val=())], r"sorted order, found \['b', 'a'\]"),
        ([share(), share()], "different client ids"),
        ([share()], "no client holds the task 'u'"),
    ],
)
def test_check_finds(shares, message):
    pool = Pool({"t": np.zeros(6, int), "u": np.array([-1, -1, -1, 0, 0, 0])})
    with pytest.raises(DataError, match=message):
        Partition(tuple(shares)).check(pool)


def test_hash_changes_with_every_field():
    of_tasks = [share(tasks={"t": 2.0}), share(tasks={"u": 1.0})]
    of_parts = [share(train=(0, 3)), share(train=(0,), val=(1, 2))]
    different = [share(), share("b"), *of_tasks, *of_parts, share(domain="x")]
    assert len({Partition((s,)).hash for s in different}) == 7


def test_a_changed_file_is_noticed():
    value = Partition((share(),)).to_json()
    value["clients"][0]["train"] = [0, 3]
    with pytest.raises(DataError, match="x.json: the partition was changed: expected hash"):
        Partition.from_json(value, "x.json")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("domain", ..., r"domain: missing, expected a text or null"),
        ("train", [4, -1], r"train\[1\]: -1 found, expected an integer of at least 0"),
        ("val", -1, r"val: -1 found, expected a list"),
        ("val", [True], r"val\[0\]: true found"),
        ("train", [1 << 64], r"train\[0\]: 18446744073709551616 found"),
        ("tasks", {"t": "much"}, r"tasks.t: 'much' found, expected a number greater than 0"),
        ("tasks", -1, r"tasks: -1 found, expected a mapping"),
        ("client", "..", r"client: '\.\.' found, expected a client's name"),
        ("client", 7, r"client: 7 found, expected a text"),
    ],
)
def test_a_file_with_another_value_is_refused_with_file_client_and_tasks(key, value, message):
    saved = Partition((share(),)).to_json()
    if value is ...:
        del saved["clients"][0][key]
    else:
        saved["clients"][0][key] = value
    whose = {"client": rf"client 0 \({value!r}\), tasks t", "tasks": r"client 0 \('a'\)"}.get(
        key, r"client 0 \('a'\), tasks t"
    )
    with pytest.raises(DataError, match=rf"^x.json, {whose}.*, {message}"):
        Partition.from_json(saved, "x.json")


@pytest.mark.parametrize("value", [None, -1, [], {}, {"hash": "x"}, {"hash": "x", "clients": [-1]}])
def test_a_file_that_is_no_partition_is_refused(value):
    with pytest.raises(DataError, match=r"^x.json"):
        Partition.from_json(value, "x.json")


@pytest.mark.parametrize(
    "name", ["..", ".", "", " a", "-a", "a/b", "a\\b", "a\n", "a\x1b[2J", "\ud800", "a" * 300, "西" * 201, 7]
)
def test_a_client_has_a_name_that_a_folder_can_have(name):
    with pytest.raises(DataError, match="clients: .* found, expected a client's name"):
        share(name)


@pytest.mark.parametrize("name", ["a", "7", "_", "St. Anna 2", "Köln-Süd", "a" * 200, "西安", "西" * 200])
def test_usual_names_of_clients(name, tmp_path):
    (tmp_path / folder_name(share(name).client)).mkdir()
    assert folder_name("St. Anna 2") == "St. Anna 2"


def two_sets(n: int = 300) -> Pool:
    """Two data sets, each with its own tasks on its own images: pascal has two, nyud has three."""
    domain = np.arange(n) % 3 > 0
    labels = {f"pascal-{t}": np.where(domain, -1, 0) for t in "ab"} | {
        f"nyud-{t}": np.where(domain, 0, -1) for t in "abc"
    }
    return Pool(labels, domain.astype(np.int64), ("pascal", "nyud"))


@pytest.mark.parametrize("scale", [1, 2, 4])
def test_single_and_multi_split_each_set_evenly_among_its_clients(scale):
    pool = two_sets()
    found = split("single-and-multi", pool, single={"pascal": scale}, multi={"nyud": scale})
    by_domain = {name: [s for s in found.shares if s.domain == name] for name in pool.domains}
    assert [len(s.tasks) for s in by_domain["pascal"]] == [1] * 2 * scale
    assert [set(s.tasks) for s in by_domain["nyud"]] == [{"nyud-a", "nyud-b", "nyud-c"}] * scale
    assert {s.client for s in by_domain["nyud"]} == {f"nyud-multi-{i}" for i in range(scale)}
    for name, shares in by_domain.items():
        sizes = [len(s.train) + len(s.val) for s in shares]
        assert max(sizes) - min(sizes) <= 1
        assert sum(sizes) == int((pool.domain == pool.domains.index(name)).sum())


@quick
@given(seed=seeds, tasks=st.integers(1, 9), clients=st.integers(1, 12), data=st.data())
def test_drawn_groups_hold_every_task_about_equally_often(seed, tasks, clients, data):
    least = -(-tasks // clients)
    each = data.draw(st.integers(least, tasks))
    pool = own_images(n=900, tasks=tasks)
    partition = split("task-groups", pool, seed, clients=clients, tasks_per_client=each)
    assert {len(s.tasks) for s in partition.shares} == {each}
    holders = Counter(task for s in partition.shares for task in s.tasks)
    assert set(holders) == set(pool.tasks)
    assert max(holders.values()) - min(holders.values()) <= 1
    if each > least:
        with pytest.raises(RecipeError, match="cannot cover"):
            split("task-groups", pool, seed, clients=clients, tasks_per_client=tasks + 1)


def test_given_groups_go_round_and_share_the_examples_of_a_task():
    pool = own_images(tasks=4)
    partition = split("task-groups", pool, clients=4, groups=[["t3", "t0"], ["t0", "t1", "t2"]])
    assert [set(s.tasks) for s in partition.shares] == [{"t0", "t3"}, {"t0", "t1", "t2"}] * 2
    assert len(split("task-groups", pool, groups=[["t3", "t0"], ["t0", "t1", "t2"]]).shares) == 2
    for s in partition.shares:
        index = np.concatenate([s.train, s.val])
        for task in pool.tasks:
            mine = int((pool.labels[task][index] >= 0).sum())
            holders = sum(task in other.tasks for other in partition.shares)
            everything = int((pool.labels[task] >= 0).sum())
            assert mine in ((everything // holders, -(-everything // holders)) if task in s.tasks else (0,))


def test_groups_may_be_unequal_within_tasks():
    pool = own_images()
    rows = split("task-groups", pool, clients=4, groups=[["t0", "t1", "t2"]], alpha_classes=0.1).table(pool)
    shares = np.array([row["labels"]["t0"] for row in rows])
    assert shares.sum(0).tolist() == np.bincount(pool.labels["t0"][pool.labels["t0"] >= 0]).tolist()
    assert (shares.max(0) / shares.sum(0)).mean() > 0.6


SAME, OWN = same_images(), own_images()
MAPS = Pool({"depth": np.zeros((20, 4, 4), np.float32)})
RARE = Pool({"t": np.r_[np.zeros(50, int), 1]}, np.zeros(51, int), ("only",))
NOBODY = Pool({"a": np.zeros(20, int), "b": np.full(20, -1)})
REFUSED = [
    ("iid", {"clients": 21}, same_images(20), "client 'c20' would get no example"),
    ("iid", {"clients": 2}, NOBODY, "no client holds the task 'b'"),
    ("one-task", {}, NOBODY, "client 'b-0' would get no example"),
    ("one-task", {"all_task_clients": 1}, Pool(dict.fromkeys(("all", "t"), np.zeros(9, int))), "rename the task 'all'"),
    ("class-dirichlet", {"clients": 5, "alpha": 1e-6, "max_tries": 50}, same_images(classes=2),
     "over task 't0': after 50 draws with alpha 1e-06 the smallest of 5 clients"),
    ("class-dirichlet", {"clients": 100}, SAME, "100 clients with at least 10 examples each need 1000, found 600"),
    ("class-dirichlet", {"clients": 3, "task": "tt1"}, SAME, r"task 'tt1'. Did you mean 't1'\? Known: t0, t1, t2"),
    ("class-dirichlet", {"clients": 2}, MAPS, r"'depth': expected one class per example .* shape \(20, 4, 4\)"),
    ("task-dirichlet", {"clients": 2, "alpha_tasks": 0}, SAME, "at least 3 clients for 3 tasks, found 2"),
    ("task-dirichlet", {"clients": 6, "alpha_tasks": 0, "alpha_classes": 1, "min_examples": 200}, OWN,
     "task-dirichlet, task 't0': 2 clients with at least 200 examples each"),
    ("task-weights", {"weights": "multi"}, SAME, "'multi' needs the number of clients"),
    ("task-weights", {}, same_images(tasks=1), "at least two tasks, found 1"),
    ("task-weights", {"weights": [dict.fromkeys(("t0", "t1", "t2"), 1)], "clients": 3}, SAME,
     "expected 3 rows of weights, found 1"),
    ("task-weights", {"weights": [{"t0": 1}, {"tt1": 1}]}, SAME, r"row 1: unknown task 'tt1'. Did you mean 't1'\?"),
    ("task-weights", {"weights": "single", "sizes": [1, 2]}, SAME, "expected 3 sizes, one per client, found 2"),
    ("task-weights", {"weights": "single", "clients": 2}, SAME, "no client holds task 't2'; found 2 clients"),
    ("domains", {"clients": 4, "fraction": 0.3}, SAME, "domain 'photo': 4 clients x fraction 0.3 = 1.2 of it"),
    ("domains", {"clients": {"foto": 1}}, SAME, r"domain 'foto'. Did you mean 'photo'\? Known: photo, art, sketch"),
    ("domains", {"clients": 1, "fraction": {"photo": 0.1, "sketch": 0.1}}, SAME,
     "fractions has no number for domain 'art'"),
    ("domains", {"clients": 1}, OWN, "the data set has no domains"),
    ("domains", {"clients": 1, "fraction": 0.001}, SAME, "client 'c00' would get no example"),
    ("domains", {"clients": 1, "fraction": 0.01, "cover_classes": True}, SAME,
     r"domain '\w+': expected at least 5 examples per client to cover"),
    ("domains", {"clients": 2, "cover_classes": True}, RARE,
     "domain 'only', class 1: expected an example for each of 2 clients, found 1"),
    ("domains", {"clients": 2, "fraction": 0.6, "allocation": "random", "max_tries": 20}, SAME,
     "no random allocation of 6 clients in 20 draws"),
    ("single-and-multi", {"single": {"pascl": 1}, "multi": {}}, two_sets(), "domain 'pascl'. Did you mean 'pascal'"),
    ("single-and-multi", {"single": {}, "multi": {"x": 1}}, OWN, "the data set has no domains"),
    ("single-and-multi", {"single": {}, "multi": {"nyud": 1}}, two_sets(), "no client holds the task 'pascal-a'"),
    *(("task-groups", {"clients": 4, **params}, OWN, message) for params, message in (
        ({}, "expected either groups or tasks_per_client"),
        ({"groups": [["t0"]], "tasks_per_client": 1}, "expected either groups or tasks_per_client"),
        ({"groups": [["t0", "t1", "t2"], ["t0", "tt1"]]}, "group 1: unknown task 'tt1'. Did you mean 't1'"),
        ({"groups": [["t0", "t0"]]}, "group 0: task 't0' is named twice"),
        ({"groups": [["t0"], ["t2"]]}, "no group holds task 't1'"),
        ({"groups": [["t0"], ["t1"], ["t2"]], "clients": 2}, "a client for each of 3 groups, found 2"),
        ({"tasks_per_client": 2, "clients": None}, "needs the number of clients"),
        ({"tasks_per_client": 4}, r"cannot cover 3 tasks; expected tasks_per_client in 1..3"),
    )),
]  # fmt: skip


@pytest.mark.parametrize(("name", "params", "pool", "message"), REFUSED, ids=[f"{c[0]}-{c[3][:24]}" for c in REFUSED])
def test_what_cannot_be_dealt_out_is_refused(name, params, pool, message):
    with pytest.raises((DataError, RecipeError), match=message):
        split(name, pool, **params)


@pytest.mark.parametrize("alpha", [0.0, 0.2, 0.5])
def test_the_settings_of_matu_can_be_drawn(alpha):
    """8 and 30 tasks, 30 clients, classes by Dirichlet(0.1): every task is held, and 0 means one task each."""
    for tasks in (8, 30):
        pool = own_images(n=300 * tasks, tasks=tasks, classes=10)
        partition = split("task-dirichlet", pool, clients=30, alpha_tasks=alpha, alpha_classes=0.1)
        counts = [len(s.tasks) for s in partition.shares]
        assert {task for s in partition.shares for task in s.tasks} == set(pool.tasks)
        assert (max(counts) == 1) == (alpha == 0)
        assert len(counts) == 30


@pytest.mark.parametrize("change", ["name: iid, clients: 1000000000", "name: one-task, all_task_clients: 1000000000"])
def test_more_clients_than_examples_are_refused_before_they_are_made(change: str) -> None:
    with pytest.raises(
        RecipeError, match=r"clients: 1000000000 found, but the data set has only \d+ training examples"
    ):
        build(load_recipe(f"partition={{{change}}}"))


@pytest.mark.parametrize("name", ["..", "a/b", "a" * 300])
@pytest.mark.parametrize("key", ["partition.clients", "runtime.flower.keys"])
def test_a_recipe_with_a_name_that_is_a_path_is_refused_with_file_and_key(key, name, tmp_path):
    value = {"name": "listed", "clients": {name: [0, 1]}} if key.startswith("partition") else {name: "0" * 64}
    file = tmp_path / "mine.yaml"
    file.write_text(dump(load_recipe()))
    with pytest.raises(RecipeError) as error:
        load(file, [f"{key.removesuffix('.clients')}={json.dumps(value)}"])
    assert str(file) in str(error.value)
    assert re.search(
        rf"^{key}\W+{re.escape(name[:40])}.*found, expected a client's name", str(error.value), re.MULTILINE
    )


def test_clients_may_be_called_like_their_domains() -> None:
    """Numbers follow an order that each seed draws, so that one number would be several sites over seeds."""
    domain = np.repeat([0, 1, 2], 20)
    pool = Pool({"y": np.tile([0, 1], 30)}, domain, ("oslo", "Rio de Janeiro", "9"))
    for seed in (0, 1, 2):
        one = PARTITIONERS["domains"].function(pool, seed, clients=1, named=True)
        assert {share.client: share.domain for share in one.shares} == {name: name for name in pool.domains}
        two = PARTITIONERS["domains"].function(pool, seed, clients={"oslo": 2, "9": 1}, named=True)
        assert {share.client: share.domain for share in two.shares} == {"oslo-0": "oslo", "oslo-1": "oslo", "9": "9"}
        numbered = PARTITIONERS["domains"].function(pool, seed, clients=1)
        assert all(np.array_equal(share.train, next(s for s in numbered.shares if s.domain == share.domain).train)
                   for share in one.shares)  # fmt: skip
    odd = Pool(pool.labels, domain, ("a/b", "c", "d"))
    assert [s.client for s in PARTITIONERS["domains"].function(odd, 0, clients=1, named=True).shares] == [
        "c00",
        "c01",
        "c02",
    ]
