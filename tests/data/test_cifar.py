"""CIFAR-10 in its published binary form, on a small fake folder."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedloom.data import DATASETS
from fedloom.errors import DataError

cifar10 = DATASETS["cifar10"].function


@pytest.fixture
def root(tmp_path):
    rng = np.random.default_rng(0)
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]:
        records = rng.integers(0, 256, (20, 3073)).astype(np.uint8)
        records[:, 0] = np.arange(20) % 10
        records[0, 1:1025] = 200  # the red plane
        (folder / f"{name}.bin").write_bytes(records.tobytes())
    return tmp_path


def test_reads_the_binary_version(root):
    data = cifar10(0, root=str(root))
    assert (len(data.train), len(data.test)) == (100, 20)
    assert data.input_shape == (3, 32, 32)
    assert data.train.images.dtype == torch.uint8
    assert bool((data.train.images[20, 0] == 200).all())
    assert not (data.train.images[20, 1] == 200).all()
    assert data.test.labels["label"].tolist() == [*range(10), *range(10)]
    x = data.train.images.double() / 255
    np.testing.assert_allclose(data.train.mean, x.mean((0, 2, 3)))
    np.testing.assert_allclose(data.test.std, x.std((0, 2, 3), correction=0))


def test_limit(root):
    data = cifar10(0, root=str(root), limit=7)
    assert (len(data.train), len(data.test)) == (7, 7)
    assert not torch.equal(data.train.images, cifar10(1, root=str(root), limit=7).train.images)


def test_absent_folder_says_how_to_download(tmp_path):
    with pytest.raises(
        DataError, match=r"curl -fL https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz \| tar xz"
    ) as e:
        cifar10(0, root=str(tmp_path / "no"))
    assert str(tmp_path / "no") in str(e.value)


def test_damaged_files(root):
    folder = root / "cifar-10-batches-bin"
    batch = folder / "data_batch_3.bin"
    whole = batch.read_bytes()
    batch.write_bytes(whole[:-100])
    with pytest.raises(DataError, match=r"data_batch_3.bin is cut off or damaged: .* 3073 bytes, found 61360 bytes"):
        cifar10(0, root=str(root))
    batch.write_bytes(b"")
    with pytest.raises(DataError, match=r"data_batch_3.bin is cut off"):
        cifar10(0, root=str(root))
    batch.write_bytes(b"\x0b" + whole[1:])
    with pytest.raises(DataError, match=r"data_batch_3.bin: expected labels in 0\.\.9, found 11"):
        cifar10(0, root=str(root))
    batch.unlink()
    with pytest.raises(DataError, match=r"there is no file .*data_batch_3.bin"):
        cifar10(0, root=str(root))


def test_foreign_pickles_are_refused(tmp_path):
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    (folder / "data_batch_1").write_bytes(b"not the published file")
    with pytest.raises(DataError, match="do not have the published checksums"):
        cifar10(0, root=str(tmp_path))
