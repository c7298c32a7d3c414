"""Rendered scenes: labels that agree with geometry and with each other, and a cache that mends itself."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fedloom.data import DATASETS, Pool, prepare
from fedloom.data import scenes as store
from fedloom.data.scenes import render, world
from fedloom.data.scenes.world import BALL, BOX, CYLINDER, FLOOR, PERSON, SKY, Material, Scene
from fedloom.errors import RecipeError

CPU = torch.device("cpu")
LOOK = {"height": 48, "width": 64, "outdoor": 0.35, "people": 0.8, "shadows": True, "noise": 0.01}
SETTINGS = {"seed": 0, "split": "train", "count": 40, **LOOK}
scenes = DATASETS["scenes"].function


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDLOOM_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def made() -> dict[str, np.ndarray]:
    return store.examples(SETTINGS, range(40))


def one_solid(shape: int, kind: int, half: tuple[float, float, float], distance: float, **more: object) -> Scene:
    """A solid straight ahead in an empty open place."""
    scene = Scene(False, (0, 0, 0), eye=(0.0, 5.0, 0.0), lamp=(10.0, 50.0, 10.0))
    grey = Material(world.PLAIN, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    for background in (world.GROUND, SKY):
        scene.add(world.SURFACE, (0, 0, 0), (1, 1, 1), background, scene.new(), grey)
    scene.add(shape, (0.0, 5.0, -distance), half, kind, scene.new(), grey, **more)
    return scene


def rays(scene: Scene, height: int, width: int) -> np.ndarray:
    focal = max(height, width) / 2 / math.tan(scene.field_of_view / 2)
    y, x = np.mgrid[:height, :width]
    return np.stack([(x + 0.5 - width / 2) / focal, (height / 2 - y - 0.5) / focal, -np.ones(x.shape)])


def rendered(scene: Scene) -> tuple[dict[str, np.ndarray], np.ndarray]:
    found = render.render([scene], [0], 40, 56, True, 0.0)
    return {key: value[0].astype(np.float64) for key, value in found.items()}, rays(scene, 40, 56)


def test_a_ball_has_the_depth_and_normals_of_a_ball():
    found, d = rendered(one_solid(world.SPHERE, BALL, (0.7, 0.7, 0.7), 3.0))
    ball = found["semseg"] == BALL
    points = d * found["depth"]
    away = points - np.array([0, 0, -3.0])[:, None, None]
    np.testing.assert_allclose(np.linalg.norm(away, axis=0)[ball], 0.7, atol=3e-3)
    # and where the ray through a pixel passes the ball within its radius, there it is
    along = -3 * d[2] / (d**2).sum(0)
    passes = np.linalg.norm(d * along - np.array([0, 0, -3.0])[:, None, None], axis=0)
    assert np.array_equal(ball, passes < 0.7)
    # Normals, against those of the exact point: rounded to 8 bits, they are off by 0.4 degrees at most.
    front = along - np.sqrt(np.maximum(0.49 - passes**2, 0) / (d**2).sum(0))
    exact = (d * front - np.array([0, 0, -3.0])[:, None, None])[:, ball] / 0.7
    apart = np.linalg.norm(np.cross(found["normals"][:, ball].T / 127, exact.T), axis=1)
    assert np.degrees(np.arcsin(apart)).max() < 0.45
    assert bool((found["normals"][:, found["semseg"] == SKY] == 0).all())
    assert bool((found["depth"][found["semseg"] == SKY] == 0).all())


def test_a_box_and_a_cylinder_stand_at_their_front():
    found, _ = rendered(one_solid(world.CUBE, BOX, (0.5, 0.5, 0.5), 3.0))
    assert found["semseg"][20, 28] == BOX
    np.testing.assert_allclose(found["depth"][found["semseg"] == BOX], 2.5, atol=2e-3)
    assert found["normals"][:, 20, 28].tolist() == [0, 0, 127]
    found, d = rendered(one_solid(world.ROUND, CYLINDER, (0.5, 0.9, 0.5), 3.0))
    there = found["semseg"] == CYLINDER
    points = d * found["depth"]
    np.testing.assert_allclose(np.hypot(points[0], points[2] + 3)[there], 0.5, atol=3e-3)
    assert float(np.abs(points[1][there]).max()) <= 0.9


def test_a_capsule_lies_at_its_radius_from_its_axis():
    scene = one_solid(world.CAPSULE, PERSON, (0.3, 0.3, 0.3), 3.0, axes=world.turned(0.5), length=2.0, part=2)
    found, d = rendered(scene)
    there = found["semseg"] == PERSON
    points = d * found["depth"] + np.array([0, 0, 3.0])[:, None, None]
    points[1] -= np.clip(points[1], -0.6, 0.6)
    np.testing.assert_allclose(np.linalg.norm(points, axis=0)[there], 0.3, atol=3e-3)
    assert bool((found["human_parts"][there] == 2).all())


def test_values_are_in_their_ranges(made):
    shape = (40, 48, 64)
    assert made["image"].shape == made["normals"].shape == (40, 3, 48, 64)
    assert (made["image"].dtype, made["normals"].dtype, made["depth"].dtype) == (np.uint8, np.int8, np.float16)
    for task in ("semseg", "human_parts", "saliency", "edge", "depth"):
        assert made[task].shape == shape
    assert made["semseg"].max() < len(world.CLASSES)
    assert made["human_parts"].max() < len(world.PARTS)
    assert set(np.unique(made["edge"])) == set(np.unique(made["saliency"])) == {0, 1}
    assert made["depth"].max() <= render.FAR
    length = np.linalg.norm(made["normals"].astype(float) / 127, axis=1)
    sky = made["semseg"] == SKY
    assert bool((length[sky] == 0).all())
    np.testing.assert_allclose(length[~sky], 1, atol=0.01)
    assert 60 < made["image"].mean() < 190
    assert bool((made["image"].reshape(40, -1).std(1) > 15).all())


def test_every_class_and_part_occurs_and_scenes_differ(made):
    assert set(np.unique(made["semseg"])) >= set(range(len(world.CLASSES))) - {world.WINDOW}
    assert set(np.unique(made["human_parts"])) == set(range(len(world.PARTS)))
    assert 0.15 < 1 - made["indoor"].mean() < 0.6
    assert 0.6 < made["person"].mean() < 0.95
    assert len({image.tobytes() for image in made["image"]}) == 40


def test_labels_agree_with_each_other(made):
    person = made["semseg"] == PERSON
    assert np.array_equal(person, made["human_parts"] > 0)
    assert np.array_equal(person.reshape(40, -1).any(1), made["person"] > 0)
    # Every boundary of classes has an edge on one of its sides.
    for axis in (1, 2):
        ahead = [slice(None)] * 3
        behind = [slice(None)] * 3
        ahead[axis], behind[axis] = slice(1, None), slice(None, -1)
        a, b = tuple(behind), tuple(ahead)
        differ = made["semseg"][a] != made["semseg"][b]
        assert bool((made["edge"][a] | made["edge"][b])[differ].all())
    assert 0.02 < made["edge"].mean() < 0.2
    # What is salient is one of the things, and a person where one is large.
    things = made["semseg"][made["saliency"] > 0]
    assert set(np.unique(things)) <= {PERSON, BALL, BOX, CYLINDER, world.TABLE, world.TREE}
    large = person.reshape(40, -1).mean(1) > 0.05
    assert bool((made["saliency"] & person).reshape(40, -1).any(1)[large].all())


def test_normals_agree_with_depth(made):
    """On the floor, points of the depth map lie in the plane that the normals state."""
    numbers = [i for i in range(40) if (made["semseg"][i] == FLOOR).mean() > 0.1]
    assert len(numbers) > 5
    for i in numbers:
        seed = store.derive_seed(0, "scenes", "train", i)
        scene = world.scene(seed, LOOK["outdoor"], LOOK["people"])
        points = rays(scene, 48, 64) * made["depth"][i].astype(float)
        floor = made["semseg"][i] == FLOOR
        normal = made["normals"][i][:, floor].astype(float).mean(1)
        normal /= np.linalg.norm(normal)
        assert normal[1] > 0.85  # up, but for the camera's pitch
        heights = normal @ points[:, floor]
        np.testing.assert_allclose(heights, -scene.eye[1], atol=0.06)


def test_an_image_depends_on_seed_split_and_number_alone(made):
    some = store.examples(SETTINGS, range(7, 9))
    for key, value in some.items():
        assert np.array_equal(value, made[key][7:9]), key
    other = store.examples({**SETTINGS, "split": "test"}, range(7, 8))
    assert not np.array_equal(other["image"], made["image"][7:8])
    other = store.examples({**SETTINGS, "seed": 1}, range(7, 8))
    assert not np.array_equal(other["image"], made["image"][7:8])


@pytest.mark.parametrize("size", [(32, 32), (96, 64), (128, 160)])
def test_sizes(size):
    found = store.examples({**SETTINGS, "height": size[0], "width": size[1]}, range(2))
    assert found["depth"].shape == (2, *size)


def test_the_data_set():
    data = scenes(0, count=12, test_count=5, height=32, width=48)
    assert (len(data.train), len(data.test)) == (12, 5)
    assert data.domains == ("indoor", "outdoor")
    assert data.input_shape == (3, 32, 48)
    assert [(task.name, task.channels) for task in data.tasks] == [
        ("semseg", 13), ("human_parts", 7), ("saliency", 2), ("normals", 3), ("depth", 1), ("edge", 1),
    ]  # fmt: skip
    x, y = data.train.batch(torch.arange(12), CPU)
    assert x.shape == (12, 3, 32, 48)
    assert abs(float(x.mean())) < 1
    nobody = y["human_parts"].flatten(1).amin(1) == 255
    assert np.array_equal(data.train.labels_of("human_parts") < 0, nobody.numpy())
    assert set(Pool.of(data).labels) == set(y)
    g = torch.Generator().manual_seed(0)
    assert not torch.equal(data.train.batch(torch.arange(12), CPU, g)[0], x)
    assert torch.equal(
        scenes(0, count=3, test_count=1, height=32, width=48).train.batch(torch.arange(3), CPU)[0], x[:3]
    )
    for task in data.tasks:
        assert bool(torch.isfinite(task.loss(torch.zeros(12, task.channels, 32, 48), y[task.name])))


def test_settings_and_domains():
    small = {"count": 3, "test_count": 1, "height": 32, "width": 32}
    assert [t.name for t in scenes(0, **small, setting="strong").tasks] == ["semseg", "normals", "depth"]
    assert [t.name for t in scenes(0, **small, setting="weak").tasks] == ["semseg", "human_parts", "edge"]
    assert [t.name for t in scenes(0, **small, tasks=["edge"]).tasks] == ["edge"]
    with pytest.raises(RecipeError, match="determines the tasks"):
        scenes(0, **small, tasks=["edge"], setting="weak")
    with pytest.raises(RecipeError, match="named twice"):
        scenes(0, **small, tasks=["edge", "edge"])
    for outdoor, name in ((0.0, "indoor"), (1.0, "outdoor")):
        data = scenes(0, **small, outdoor=outdoor)
        assert data.domains == (name,)
        assert data.train.domain.tolist() == [0, 0, 0]
    assert scenes(0, **small, augment=False).train.change.augment is None
    assert scenes(0, **small).train.change.augment.scale == (0.75, 1.5)


def folders(tmp_path) -> list:
    return sorted((tmp_path / "cache" / "scenes").iterdir())


def test_scenes_are_rendered_once(tmp_path, monkeypatch):
    settings = {**SETTINGS, "count": 3}
    first = store.split(settings)
    assert [p.name for p in folders(tmp_path)] == [store.key(settings)]
    assert isinstance(first["image"], np.memmap)

    def never(*_: object) -> None:
        raise AssertionError("rendered again")

    monkeypatch.setattr(store, "examples", never)
    again = store.split(settings)
    assert all(np.array_equal(first[key], again[key]) for key in first)
    assert store.key({**settings, "noise": 0.02}) != store.key(settings)


@pytest.mark.parametrize("damage", ["cut", "flip", "shape", "type", "absent", "manifest", "nonsense", "nothing"])
def test_a_damaged_cache_is_built_again(tmp_path, damage):
    settings = {**SETTINGS, "count": 3}
    first = {key: np.array(value) for key, value in store.split(settings).items()}
    place = folders(tmp_path)[0]
    file = place / "depth.npy"
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:-100])
    elif damage == "flip":
        content = bytearray(file.read_bytes())
        content[-50] ^= 1
        file.write_bytes(content)
    elif damage in ("shape", "type"):
        right, wrong = {"shape": (b")", b"("), "type": (b"<", b">")}[damage]
        file.write_bytes(file.read_bytes().replace(right, wrong, 1))
    elif damage == "absent":
        file.unlink()
    else:
        (place / prepare.MANIFEST).write_text({"manifest": "{", "nonsense": "[1]", "nothing": "{}"}[damage])
    again = store.split(settings)
    assert all(np.array_equal(first[key], again[key]) for key in first)
    assert prepare._load(place) is not None
    assert folders(tmp_path) == [place]


def test_a_cache_that_cannot_be_written_is_no_obstacle(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FEDLOOM_CACHE", str(tmp_path / "file"))
    assert len(store.split({**SETTINGS, "count": 2})["image"]) == 2
    monkeypatch.delenv("FEDLOOM_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert str(store.cache_folder()) == "/somewhere/fedloom"
