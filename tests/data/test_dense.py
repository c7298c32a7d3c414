"""Dense examples: the same batches from memory, from disk and from files read one by one."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from fedloom.data.dataset import ItemExamples, TensorExamples
from fedloom.data.dense import DenseFiles, annotated_in, checksum
from fedloom.data.dense import stored as make
from fedloom.data.prepare import Augment
from fedloom.data.transforms import Dense
from fedloom.errors import DataError

CPU = torch.device("cpu")
KINDS = {"semseg": "semseg", "parts": "human_parts", "normals": "normals", "depth": "depth", "edge": "edge"}


def arrays(n: int = 6, height: int = 16, width: int = 20) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "image": rng.integers(0, 256, (n, height, width, 3)).astype(np.uint8),
        "semseg": rng.integers(0, 5, (n, height, width)).astype(np.uint8),
        "parts": rng.integers(0, 7, (n, height, width)).astype(np.uint8),
        "normals": rng.integers(-100, 100, (n, height, width, 3)).astype(np.int8),
        "depth": rng.random((n, height, width)).astype(np.float16) + 1,
        "edge": rng.integers(0, 2, (n, height, width)).astype(np.uint8),
    }


def stored(made: dict[str, np.ndarray], *change: object, size=(16, 20), annotated=None, version="") -> TensorExamples:
    tensors = {key: torch.from_numpy(value) for key, value in made.items()}
    images = tensors.pop("image").permute(0, 3, 1, 2)
    tensors["normals"] = tensors["normals"].permute(0, 3, 1, 2)
    return make(images, tensors, Dense(KINDS, size, *change), annotated or {}, None, version)


def files(read, count: int, *change: object) -> ItemExamples:
    dense = Dense(KINDS, *change)
    annotated = {task: np.ones(count, bool) for task in KINDS}
    return ItemExamples(DenseFiles(read, dense, tuple(range(count))), count, (3, *dense.size), annotated=annotated)


def reader(made: dict[str, np.ndarray]):
    return lambda i, tasks: {key: value[i] for key, value in made.items()}


def test_stored_and_read_examples_agree():
    made = arrays()
    index = torch.tensor([4, 0, 2])
    a = stored(made, size=(16, 32))
    b = files(reader(made), 6, (16, 32))
    (x, y), (x2, y2) = a.batch(index, CPU), b.batch(index, CPU)
    assert torch.equal(x, x2)
    assert x.shape == (3, 3, 16, 32) == (3, *a.input_shape)
    for task in KINDS:
        assert torch.equal(y[task], y2[task]), task
    assert torch.equal(y["semseg"][:, :, 6:26], torch.from_numpy(made["semseg"][[4, 0, 2]]).long())
    assert torch.equal(y["depth"][:, 0, :, 6:26], torch.from_numpy(made["depth"][[4, 0, 2]]).float())
    assert a.nbytes == sum(value.nbytes for value in made.values())
    assert b.nbytes == 0


def test_files_of_different_sizes_are_cropped_in_training_and_padded_in_evaluation():
    sizes = [(10, 30), (24, 12), (16, 16)]

    def read(i: int, tasks) -> dict[str, np.ndarray | None]:
        height, width = sizes[i]
        image = np.full((height, width, 3), 90, np.uint8)
        return {"image": image, "semseg": np.full((height, width), i), "depth": None, "edge": np.ones(sizes[i], bool)}

    examples = files(read, 3, (24, 32), Augment(), (16, 16))
    x, y = examples.batch(torch.arange(3), CPU)
    assert x.shape == (3, 3, 24, 32)
    assert [(y["semseg"][i] == i).sum().item() for i in range(3)] == [h * w for h, w in sizes]
    assert bool((y["depth"] == 255).all())
    assert bool((y["normals"] == 255).all())
    assert y["normals"].shape == (3, 3, 24, 32)
    assert float((y["edge"] == 1).sum()) == sum(h * w for h, w in sizes)
    x, y = examples.batch(torch.arange(3), CPU, torch.Generator().manual_seed(0))
    assert x.shape == (3, 3, 16, 16)
    small = files(read, 3, (16, 32))
    with pytest.raises(DataError, match="example 1: expected images of at most 16 x 32, found 24 x 12"):
        small.batch(torch.arange(3), CPU)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image": np.zeros((4, 4), np.uint8)}, "example 0: expected an image H x W x 3, uint8, found uint8"),
        ({"image": None}, "expected an image H x W x 3, uint8, found none"),
        (
            {"semseg": np.zeros((4, 5), np.uint8)},
            r"example 0, task 'semseg': expected shape \(16, 20\), found \(4, 5\)",
        ),
        ({"semseg": np.full((16, 20), 300)}, r"task 'semseg': expected integers in 0..255, found int64 300..300"),
        ({"edge": np.zeros((16, 20), np.float32)}, "task 'edge': expected integers in 0..255, found float32"),
    ],
)
def test_a_reader_that_breaks_its_contract_is_named(change, message):
    made = arrays(1)
    examples = files(lambda i, tasks: {**reader(made)(i, tasks), **change}, 1, (16, 20))
    with pytest.raises(DataError, match=message):
        examples.batch(torch.tensor([0]), CPU)


def test_annotated_examples():
    made = arrays()
    made["depth"][1] = 0
    made["semseg"][2] = 255
    made["parts"][3] = 0
    made["parts"][4] = 255
    annotated = {task: annotated_in(kind, made[task], rows=2) for task, kind in KINDS.items()}
    examples = stored(made, annotated=annotated)
    assert np.flatnonzero(examples.labels_of("depth") < 0).tolist() == [1]
    assert np.flatnonzero(examples.labels_of("semseg") < 0).tolist() == [2]
    assert np.flatnonzero(examples.labels_of("parts") < 0).tolist() == [3, 4]
    assert examples.labels_of("edge").tolist() == [0] * 6
    assert stored(made).labels_of("depth").tolist() == [0] * 6
    assert examples.fingerprint() != stored(made).fingerprint() == stored(made).fingerprint()
    assert stored(made, version=checksum(made)).fingerprint() != stored(made).fingerprint()


def test_mapped_arrays_and_threads(tmp_path):
    made = arrays(32)
    for key, value in made.items():
        np.save(tmp_path / f"{key}.npy", value)
    mapped = {key: np.load(tmp_path / f"{key}.npy", mmap_mode="c") for key in made}
    examples = stored(mapped, Augment())
    jobs = [(torch.arange(i, i + 8), i) for i in range(24)]
    alone = [examples.batch(index, CPU, torch.Generator().manual_seed(i))[0] for index, i in jobs]
    results: dict[int, torch.Tensor] = {}

    def work(numbers: range) -> None:
        for i in numbers:
            index, seed = jobs[i]
            results[i] = examples.batch(index, CPU, torch.Generator().manual_seed(seed))[0]

    threads = [threading.Thread(target=work, args=(range(k, 24, 4),)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(results[i], alone[i]) for i in range(24))
