"""PASCAL-Context in the folders of the field's multi-task repositories."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.io import savemat

from fedloom.data import DATASETS
from fedloom.data.pascal_context import CLASS_OF_PART, NORMALS, edges_of
from fedloom.errors import DataError
from folders_support import SIZE, anno, pascal, rows, save

CPU = torch.device("cpu")
FIRST = "2008_000000"


def load(root, **params):
    entry = DATASETS["pascal-context"]
    given = {"root": str(root), "size": SIZE, "augment": False, **params}
    return entry.function(0, **entry.params.model_validate(given).model_dump())


def label(examples, task, i=0):
    return examples.batch(torch.tensor([i]), CPU)[1][task][0]


@pytest.fixture
def root(tmp_path):
    return pascal(tmp_path)


def test_labels_follow_the_conventions(root):
    dataset = load(root)
    names = ["semseg", "human_parts", "saliency", "normals", "edge"]
    assert [(t.name, t.channels) for t in dataset.tasks] == list(zip(names, [21, 7, 2, 3, 1], strict=True))
    assert (len(dataset.train), len(dataset.test)) == (3, 2)
    train = dataset.train
    for i, folder in enumerate(["pascal-context", "VOC12"]):
        stored = np.array(Image.open(root / f"semseg/{folder}/2008_00000{i}.png"))
        assert np.array_equal(label(train, "semseg", i), stored)
    stored = np.array(Image.open(root / f"sal_distill/{FIRST}.png"))
    assert np.array_equal(label(train, "saliency")[0], stored / 255 > 0.5)
    parts = label(train, "human_parts")
    # the later part covers the earlier, and the dog is not there
    assert parts[:, 0].tolist() == [1, 1, 2, 2, 4, 2] + [0] * 6
    normals = label(train, "normals")
    assert (normals[:, :, 8:] == 255).all()  # sky is no class of NYU
    vectors = np.array(Image.open(root / f"normals_distill/{FIRST}.png"))[:, :8] * 2.0 / 255 - 1
    vectors /= np.linalg.norm(vectors, axis=-1, keepdims=True)
    assert np.allclose(normals[:, :, :8].permute(1, 2, 0), vectors, atol=1e-5)
    edge = label(train, "edge")[0]
    assert edge[1:-1].sum(1).tolist() == [1] * (SIZE[0] - 2)  # thinning shortens lines
    assert not edge[:, :7].any()
    assert not edge[:, 9:].any()


def test_all_24_parts_have_a_class():
    for number, classes in CLASS_OF_PART.items():
        assert len(classes) == 24
        assert set(classes.values()) == set(range(1, number + 1))


def test_edges_are_thin_lines_where_labels_change():
    labels = np.zeros((20, 20), int)
    labels[5:15, 5:15] = 400
    edge = edges_of(labels)
    assert edge.any()
    assert not edge[:3].any()
    assert not edge[8:12, 8:12].any()
    assert edge.sum() < 44  # both sides of the border are 36 + 40 pixels
    assert not edges_of(np.full((9, 9), 7)).any()


def test_normals_count_where_a_class_is_one_of_nyus():
    """By the published lists: 459 names in alphabetical order, of which NYU has 169, and tvmonitor."""
    chair, person, sky, tvmonitor, unknown, window = 72, 284, 360, 427, 431, 454
    assert len(NORMALS) == len(set(NORMALS)) == 170
    assert {chair, person, tvmonitor, window} < set(NORMALS) <= set(range(1, 460)) - {sky, unknown}


def test_classes_of_the_thesis(root):
    save(root / f"semseg/pascal-context/{FIRST}.png", np.arange(192).reshape(SIZE).astype(np.uint8))
    dataset = load(root, classes=59, tasks=["semseg"])
    assert dataset.tasks[0].channels == 59
    assert label(dataset.train, "semseg").flatten()[[58, 59, 191]].tolist() == [58, 255, 255]
    assert dataset.train.labels_of("semseg").tolist() == [0, -1, 0]


def test_fifteen_parts_join_left_and_right_only(root):
    given = [
        ("head", rows(0, 1)),
        ("leye", rows(1, 2)),
        ("reye", rows(2, 3)),
        ("llarm", rows(3, 4)),
        ("rhand", rows(4, 5)),
    ]
    anno(root / f"human_parts/{FIRST}.mat", [("person", 15, given)])
    six, fifteen = (load(root, tasks=["human_parts"], parts=parts) for parts in (6, 15))
    assert [dataset.tasks[0].channels for dataset in (six, fifteen)] == [7, 16]
    assert label(six.train, "human_parts")[:6, 0].tolist() == [1, 1, 1, 4, 4, 0]
    assert label(fifteen.train, "human_parts")[:6, 0].tolist() == [1, 3, 3, 11, 12, 0]


def test_images_without_people_are_ignored_for_their_parts(root):
    anno(root / f"human_parts/{FIRST}.mat", [("dog", 12, [("tail", rows(0, 1))])])
    anno(root / "human_parts/2008_000001.mat", [("person", 15, []), ("cat", 8, [])])
    (root / "human_parts/2008_000002.mat").unlink()
    (root / "ImageSets/Parts").mkdir()
    listed = {FIRST: [12], "2008_000001": [15, 8], "2008_000002": ["person"]}
    (root / "ImageSets/Parts/train.txt").write_text(json.dumps(listed))
    train = load(root, tasks=["human_parts"]).train
    assert train.labels_of("human_parts").tolist() == [-1, 0, -1]
    for i in range(3):
        assert (label(train, "human_parts", i) == 255).all()


def test_annotations_in_cells_and_without_objects(root):
    """A single struct, a cell of structs and an empty list read alike."""
    person = {"class": "person", "class_ind": 15, "parts": {"part_name": "torso", "mask": rows(3, 4).astype(np.uint8)}}
    savemat(root / f"human_parts/{FIRST}.mat", {"anno": {"imname": FIRST, "objects": person}})
    savemat(root / "human_parts/2008_000001.mat", {"anno": {"imname": "x", "objects": [person, person]}})
    savemat(root / "human_parts/2008_000002.mat", {"anno": {"imname": "x", "objects": np.zeros((0, 0))}})
    train = load(root, tasks=["human_parts"]).train
    assert label(train, "human_parts")[:, 0].tolist() == [0, 0, 0, 2, *[0] * 8]
    assert torch.equal(label(train, "human_parts"), label(train, "human_parts", 1))
    assert (label(train, "human_parts", 2) == 255).all()


@pytest.mark.parametrize("task", ["semseg", "saliency", "normals", "edge", "human_parts"])
def test_absent_label_files_are_ignored_for_their_image(root, task):
    for file in root.glob(f"*/**/{FIRST}.*"):
        if "JPEGImages" not in file.parts:
            file.unlink()
    train = load(root).train
    assert train.labels_of(task).tolist() == [-1, 0, 0]
    assert (label(train, task) == 255).all()


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        (f"semseg/pascal-context/{FIRST}.png", np.full(SIZE, 21, np.uint8), r"labels in 0\.\.20 or 255, found 21"),
        (f"semseg/pascal-context/{FIRST}.png", np.zeros((9, 9), np.uint8), "semseg: expected the image's size 12 x 16"),
        (f"sal_distill/{FIRST}.png", np.zeros((9, 9), np.uint8), "saliency: expected the image's size"),
        (f"normals_distill/{FIRST}.png", np.zeros(SIZE[:1] * 2 + (3,), np.uint8), "normals: expected the image's size"),
        (f"pascal-context/trainval/{FIRST}.mat", {"LabelMap": np.zeros((3, 3))}, "LabelMap: expected the image's size"),
        (f"pascal-context/trainval/{FIRST}.mat", {"Labels": np.zeros(SIZE)}, "expected a variable 'LabelMap'"),
        (f"pascal-context/trainval/{FIRST}.mat", {"LabelMap": np.full(SIZE, 0.5)}, "LabelMap: expected H x W whole"),
        (f"pascal-context/trainval/{FIRST}.mat", None, "LabelMap: cannot be read"),
        (f"human_parts/{FIRST}.mat", [("person", 15, [("wing", rows(0, 1))])], "part_name: expected .*found 'wing'"),
        (
            f"human_parts/{FIRST}.mat",
            [("person", 15, [("hair", np.ones((3, 3)))])],
            "mask of part 'hair': expected the",
        ),
        (f"human_parts/{FIRST}.mat", {"anno": {"objects": {"class": "person"}}}, "class_ind: expected a number"),
        (f"human_parts/{FIRST}.mat", {"anno": 3}, "anno: expected a struct, found"),
        (f"human_parts/{FIRST}.mat", None, "anno: cannot be read"),
    ],
)
def test_files_that_are_not_as_stated(root, file, content, message):
    path = root / file
    if content is None:
        path.write_bytes(b"MATLAB 5.0 MAT-file, but cut")
    elif isinstance(content, dict):
        savemat(path, content)
    elif isinstance(content, list):
        anno(path, content)
    else:
        save(path, content)
    train = load(root).train
    with pytest.raises(DataError, match=message) as error:
        label(train, "edge")
    assert file in str(error.value)
    label(train, "edge", 1)


def test_lists_that_are_not_as_stated(root):
    (root / "ImageSets/Context/train.txt").unlink()
    with pytest.raises(DataError, match=r"train\.txt: cannot be read"):
        load(root, tasks=["edge"])
