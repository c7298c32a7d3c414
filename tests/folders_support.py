"""Tiny copies of the published data sets in their folders."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image
from scipy.io import savemat

SIZE = (12, 16)


def save(file: Path, array: np.ndarray) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.suffix == ".npy":
        np.save(file, array)
    else:
        Image.fromarray(array).save(file)


def lists(root: Path, folder: str, split: dict[str, list[str]]) -> None:
    (root / folder).mkdir(parents=True, exist_ok=True)
    for name, ids in split.items():
        (root / folder / f"{name}.txt").write_text("\n".join(ids) + "\n")


def nyud(root: Path, train: int = 3, val: int = 2) -> Path:
    rng = np.random.default_rng(0)
    ids = [f"{i:04d}" for i in range(train + val)]
    lists(root, "gt_sets", {"train": ids[:train], "val": ids[train:]})
    for i in ids:
        save(root / f"images/{i}.png", rng.integers(0, 256, (*SIZE, 3), dtype=np.uint8))
        save(root / f"segmentation/{i}.png", rng.integers(0, 41, SIZE, dtype=np.uint8))
        save(root / f"normals/{i}.png", rng.integers(0, 256, (*SIZE, 3), dtype=np.uint8))
        save(root / f"depth/{i}.npy", rng.uniform(0.7, 9, SIZE).astype(np.float32))
        save(root / f"edge/{i}.png", (rng.random(SIZE) < 0.2).astype(np.uint8) * 255)
    return root


def structs(**fields: list) -> np.ndarray:
    """A MATLAB struct array, as the annotations hold them."""
    count = len(next(iter(fields.values())))
    array = np.zeros((1, count), dtype=[(name, object) for name in fields])
    for name, values in fields.items():
        for i, value in enumerate(values):
            array[name][0, i] = value
    return array


def anno(file: Path, objects: list[tuple[str, int, list[tuple[str, np.ndarray]]]]) -> None:
    """A PASCAL-Part annotation: (class, number, [(part, mask)]) per object."""
    file.parent.mkdir(parents=True, exist_ok=True)
    parts = [
        structs(part_name=[n for n, _ in p], mask=[m.astype(np.uint8) for _, m in p]) if p else np.zeros((0, 0))
        for _, _, p in objects
    ]
    body = structs(
        **{"class": [o[0] for o in objects], "class_ind": [float(o[1]) for o in objects], "parts": parts}
        if objects
        else {"class": [], "class_ind": [], "parts": []}
    )
    savemat(file, {"anno": structs(imname=[file.stem], objects=[body])})


def rows(first: int, last: int) -> np.ndarray:
    mask = np.zeros(SIZE, bool)
    mask[first:last] = True
    return mask


def pascal(root: Path, train: int = 3, val: int = 2) -> Path:
    rng = np.random.default_rng(0)
    ids = [f"2008_{i:06d}" for i in range(train + val)]
    lists(root, "ImageSets/Context", {"train": ids[:train], "val": ids[train:]})
    for n, i in enumerate(ids):
        save(root / f"JPEGImages/{i}.jpg", rng.integers(0, 256, (*SIZE, 3), dtype=np.uint8))
        save(root / f"semseg/{'VOC12' if n % 2 else 'pascal-context'}/{i}.png", rng.integers(0, 21, SIZE, np.uint8))
        save(root / f"sal_distill/{i}.png", rng.integers(0, 256, SIZE, dtype=np.uint8))
        save(root / f"normals_distill/{i}.png", rng.integers(0, 256, (*SIZE, 3), dtype=np.uint8))
        labels = np.where(np.arange(SIZE[1]) < 8, 72, 360) * np.ones(SIZE, np.uint16)
        (root / "pascal-context/trainval").mkdir(parents=True, exist_ok=True)
        savemat(root / f"pascal-context/trainval/{i}.mat", {"LabelMap": labels.astype(np.uint16)})
        person = ("person", 15, [("hair", rows(0, 2)), ("torso", rows(2, 6)), ("rlarm", rows(4, 5))])
        anno(root / f"human_parts/{i}.mat", [person, ("dog", 12, [("tail", rows(0, 1))])])
    return root
