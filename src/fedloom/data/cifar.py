"""CIFAR-10 from a local folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedloom.core.errors import DataError
from fedloom.core.extras import need
from fedloom.core.settings.section import Count
from fedloom.data.prepare import SPLITS, Array, channel_statistics, subset
from fedloom.data.registry import DATASETS

if TYPE_CHECKING:
    from fedloom.data.dataset import Dataset

BINARY, PICKLED = "cifar-10-batches-bin", "cifar-10-batches-py"
RECORD = 1 + 3 * 32 * 32
NAMES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"


@DATASETS.register("cifar10", source="Krizhevsky (2009)")
def cifar10(seed: int, *, root: str, limit: Count | None = None) -> Dataset:
    """CIFAR-10 (50,000 + 10,000 colour images of 32 x 32, task `label`) from a folder; nothing is downloaded.

    `root` holds `cifar-10-batches-bin` (the binary version) or `cifar-10-batches-py` (the Python version, which needs
    torchvision). `limit` keeps that many random examples of each part. Images are uint8, N x 3 x 32 x 32, normalised
    per channel by the mean and standard deviation of the train part. DataError where files are absent or damaged.
    """
    import torch

    from fedloom.data.dataset import Dataset, TensorExamples
    from fedloom.models.tasks.classification import Classification

    folder = Path(root).expanduser()
    if (folder / BINARY).is_dir():
        batches = [folder / BINARY / f"data_batch_{number}.bin" for number in range(1, 6)]
        parts = [_binary(batches), _binary([folder / BINARY / "test_batch.bin"])]
    elif (folder / PICKLED).is_dir():
        parts = [_pickled(folder, train) for train in (True, False)]
    else:
        raise DataError(
            f"cifar10: neither {BINARY} nor {PICKLED} is in {folder.absolute()}. To download: "
            f"mkdir -p '{folder}' && curl -fL {URL} | tar xz -C '{folder}'"
        )
    ready = []
    for split, (images, labels) in zip(SPLITS, parts, strict=True):
        kept = subset(len(images), limit, seed, split)
        if kept is not None:
            images, labels = images[kept], labels[kept]
        ready.append((torch.from_numpy(np.ascontiguousarray(images)), torch.from_numpy(labels.astype(np.int64))))
    mean, std = channel_statistics(ready[0][0])
    train, test = (TensorExamples(images, {"label": labels}, None, mean, std) for images, labels in ready)
    return Dataset("cifar10", (Classification("label", 10),), train, test, classes={"label": NAMES})


def _binary(files: list[Path]) -> tuple[Array, Array]:
    """Images (N x 3 x 32 x 32) and labels of files of records: one byte of label, then the planes red, green, blue."""
    images, labels = [], []
    for file in files:
        if not file.is_file():
            raise DataError(f"cifar10: there is no file {file}")
        raw = np.fromfile(file, np.uint8)
        if not len(raw) or len(raw) % RECORD:
            raise DataError(
                f"cifar10: {file} is cut off or damaged: expected records of {RECORD} bytes, found {len(raw)} bytes"
            )
        records = raw.reshape(-1, RECORD)
        if records[:, 0].max() > 9:
            raise DataError(f"cifar10: {file}: expected labels in 0..9, found {records[:, 0].max()}")
        images.append(records[:, 1:].reshape(-1, 3, 32, 32))
        labels.append(records[:, 0])
    return np.concatenate(images), np.concatenate(labels)


def _pickled(root: Path, train: bool) -> tuple[Array, Array]:
    """The same from the Python version, which is a set of pickles."""
    # torchvision compares every file with its published checksum before it unpickles any.
    library = need("torchvision.datasets", "vision")
    try:
        data = library.CIFAR10(root, train=train, download=False)
    except RuntimeError as error:
        raise DataError(
            f"cifar10: {root / PICKLED} is incomplete or damaged: its files do not have the published checksums"
        ) from error
    return data.data.transpose(0, 3, 1, 2), np.asarray(data.targets)
