"""Every kind of task, from a user's arrays and files to a model that beats the constant predictor."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.nn.functional import max_pool2d

import fedloom as fl
from fedloom.data import inputs
from fedloom.errors import DataError, RecipeError
from fedloom.tasks import Depth


class Net(nn.Module):
    """A small model of a user: maps of the size of the input for some tasks, numbers per image for others."""

    def __init__(self, maps: dict[str, int], vectors: dict[str, int]) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU())
        self.heads = nn.ModuleDict({task: nn.Conv2d(16, width, 1) for task, width in maps.items()})
        self.outputs = nn.ModuleDict({task: nn.Linear(16, width) for task, width in vectors.items()})

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        z = self.body(x)
        found = {task: head(z) for task, head in self.heads.items()}
        return found | {task: head(z.mean((2, 3))) for task, head in self.outputs.items()}


def images(n: int, seed: int) -> torch.Tensor:
    """Images with a bright rectangle on a noisy ground."""
    rng = np.random.default_rng(seed)
    x = rng.normal(0, 0.1, (n, 1, 12, 12))
    for image in x:
        top, left = rng.integers(0, 6, 2)
        height, width = rng.integers(3, 7, 2)
        image[0, top : top + height, left : left + width] += 1
    return torch.tensor(x, dtype=torch.float32)


def labels_of(kind: str, x: torch.Tensor) -> torch.Tensor:
    inside = (x[:, 0] > 0.5).float()
    size = inside.mean((1, 2))
    if kind == "segmentation":
        return inside.long()
    if kind == "depth":
        return 1 + 2 * inside
    if kind == "normals":
        return torch.stack([inside, 1 - inside, torch.zeros_like(inside)], 1)
    if kind == "edges":
        return inside - (1 - max_pool2d(1 - inside[:, None], 3, 1, 1))[:, 0]
    if kind == "multilabel":
        return torch.stack([size > 0.12, size > 0.17], 1).float()
    if kind == "regression":
        return size * 10
    return torch.bucketize(size, torch.tensor([0.12, 0.18]))


CLASSES = {"segmentation": 2, "multilabel": 2, "ordinal": 3, "classification": 3}
WIDTHS = {"depth": 1, "normals": 3, "edges": 1, "regression": 1} | CLASSES
MAPS = ("segmentation", "depth", "normals", "edges")


def federation(kind: str, missing: bool = True, **options: Any) -> fl.Federation:
    """Two clients with one task of a kind; the second one's first labels are missing."""

    def part(n: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = images(n, seed)
        return x, labels_of(kind, x)

    x, y = part(60, 2)
    if missing:
        blank = {"multilabel": torch.nan, "regression": torch.nan, "ordinal": -1, "classification": -1}
        y[:5] = 0 if kind in ("normals", "depth") else blank.get(kind, 255)
    clients = {"ann": fl.Client(part(60, 1)), "bob": fl.Client((x, y))}
    return fl.Federation(clients, {"t": fl.task(kind, classes=CLASSES.get(kind), **options)}, test=part(60, 3))


def model(kind: str) -> nn.Module:
    torch.manual_seed(0)
    width = {"t": WIDTHS[kind]}
    return Net(width, {}) if kind in MAPS else Net({}, width)


@pytest.mark.parametrize("kind", WIDTHS)
def test_a_short_training_beats_the_constant_predictor(kind: str) -> None:
    fed = federation(kind)
    how = {"rounds": 4, "epochs": 4, "training": {"optimizer": {"name": "adam", "lr": 0.01}}}
    trained = fl.run(fed, model=model(kind), **how)
    constant = fl.run(fed, model=model(kind), method="constant", **how)
    ours, base = (run.final().values["t"] for run in (trained, constant))
    assert ours["loss"] < 0.9 * base["loss"]
    task = fed.tasks[0]
    better = 1 if task.metrics[task.primary] == "max" else -1
    assert better * ours[task.primary] > better * base[task.primary]


@pytest.mark.parametrize("kind", ["segmentation", "classification", "ordinal", "multilabel"])
def test_class_weights_move_what_the_constant_predictor_would_lose(kind: str) -> None:
    """With a weight of 0 for one class, examples of that class teach nothing."""
    count = CLASSES[kind]
    task = fl.task(kind=kind, classes=count, class_weights=[0.0] + [1.0] * (count - 1)).named("t")
    shape = (2, count, 4, 4) if kind == "segmentation" else (2, count)
    output = torch.zeros(shape, requires_grad=True)
    zero = torch.zeros(2, 4, 4) if kind == "segmentation" else torch.zeros(2)
    if kind == "multilabel":
        zero = torch.tensor([[1.0, torch.nan]] * 2)
    loss = task.loss(output, zero if kind == "multilabel" else zero.long())
    loss.backward()
    assert loss.item() == 0
    assert not output.grad.any()


def test_a_value_to_ignore_is_no_label() -> None:
    x = images(20, 1)
    y = labels_of("segmentation", x)
    fed = fl.Federation({"a": fl.Client((x, y * 9))}, {"t": fl.task(kind="segmentation", classes=2, ignore=9)})
    assert set(fed.dataset.train.labels["t"].unique().tolist()) == {0, 255}


def test_clients_with_and_without_maps_train_together() -> None:
    x = images(40, 1)
    mask, size = labels_of("segmentation", x), labels_of("regression", x)
    fed = fl.Federation(
        {
            "a": fl.Client((x[:20], {"mask": mask[:20]}), tasks=["mask"]),
            "b": fl.Client((x[20:], {"size": size[20:]}), tasks=["size"]),
        },
        {"mask": fl.task(kind="segmentation", classes=2), "size": fl.task(kind="regression")},
        test=(x, {"mask": mask, "size": size}),
    )
    result = fl.run(fed, model=Net({"mask": 2}, {"size": 1}), rounds=1)
    assert result.final().values.keys() == {"mask", "size"}


WRONG: dict[str, tuple[str, Any, str]] = {
    "black and white": ("segmentation", lambda y: y * 255, "only the labels 0 and 255 found"),
    "a class too many": ("segmentation", lambda y: y * 3, "the label 3 found, expected 0 to 1"),
    "fractions": ("segmentation", lambda y: y * 0.5, "expected whole numbers"),
    "another size": ("depth", lambda y: y[:, 1:], "expected N x H x W labels of N x C x H x W inputs"),
    "two vectors": ("normals", lambda y: y[:, :2], "expected N x 3 x H x W labels"),
    "no edge": ("edges", lambda y: y * 7, "the label 7 found, expected 0 to 1"),
    "three labels": ("multilabel", lambda y: y.repeat(1, 2)[:, :3], "expected N x 2"),
    "no yes or no": ("multilabel", lambda y: y * 2, "the label 2 found, expected 0 or 1"),
}


@pytest.mark.parametrize("case", WRONG)
def test_labels_of_another_kind_are_refused(case: str) -> None:
    kind, change, said = WRONG[case]
    x = images(10, 1)
    with pytest.raises(DataError, match=f"client 'a', train, task 't': .*{said}"):
        fl.Federation(
            {"a": fl.Client((x, change(labels_of(kind, x))))}, {"t": fl.task(kind=kind, classes=CLASSES.get(kind))}
        )


def test_what_a_kind_cannot_have_is_said() -> None:
    for wrong, said in (
        ({"kind": "mask"}, "kind='mask'"),
        ({"kind": "depth", "classes": 3}, "depth has no classes"),
        ({"kind": "segmentation"}, "classes=None"),
        ({"classes": 3, "class_weights": [1, 2]}, "3 numbers"),
        ({"kind": "regression", "class_weights": [1]}, "regression has no classes"),
        ({"kind": "normals", "ignore": 1}, r"\(for normals: None\)"),
        ({"kind": "depth", "metric": "auc"}, "unknown metric 'auc'"),
    ):
        with pytest.raises(RecipeError, match=said):
            fl.task(**wrong)


def write_pictures(home: Path, x: torch.Tensor, masks: torch.Tensor) -> None:
    for folder, arrays in {"images": x[:, 0].clamp(0, 1) * 255, "masks": masks * 255}.items():
        (home / folder).mkdir(parents=True)
        for i, array in enumerate(arrays):
            if folder == "images" or i:  # the first image has no mask
                Image.fromarray(array.numpy().astype(np.uint8)).save(home / folder / f"{i:03}.png")


def test_folders_of_pictures_are_images_and_masks(tmp_path: Path) -> None:
    x = images(12, 1)
    mask, size = labels_of("segmentation", x), labels_of("regression", x)
    write_pictures(tmp_path, x, mask)
    tasks = {"mask": fl.task(kind="segmentation", classes=2), "size": fl.task(kind="regression")}
    train = (tmp_path / "images", {"mask": tmp_path / "masks", "size": size})
    fed = fl.Federation({"a": fl.Client(train)}, tasks)
    read = fed.dataset.train.labels["mask"]
    assert set(read[0].unique().tolist()) == {255}
    assert torch.equal(read[1:].long(), mask[1:])
    assert fl.run(fed, model=Net({"mask": 2}, {"size": 1}), rounds=1).status == "finished"
    (tmp_path / "masks" / "stray.png").write_bytes((tmp_path / "masks" / "001.png").read_bytes())
    with pytest.raises(DataError, match=r"task 'mask': .*'stray' belongs to no image"):
        fl.Federation({"a": fl.Client(train)}, tasks)
    (tmp_path / "masks" / "stray.png").write_text("no picture")
    (tmp_path / "images" / "stray.png").write_text("no picture")
    with pytest.raises(DataError, match=r"stray.png: cannot be read"):
        fl.Federation({"a": fl.Client(train)}, tasks)


def test_white_in_masks_is_class_1_unless_it_is_stated_or_there_are_more_classes(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    for i in range(4):
        Image.fromarray(np.full((8, 8), i, np.uint8)).save(tmp_path / f"images/{i}.png")

    def read(name: str, *values: int, classes: int = 2, ignore: int | None = None) -> set[int]:
        (tmp_path / name).mkdir()
        for i in range(3):  # the last image has no mask
            mask = np.resize(np.array(values, np.uint8), (8, 8))
            Image.fromarray(mask).save(tmp_path / name / f"{i}.png")
        task = fl.task(kind="segmentation", classes=classes, ignore=ignore)
        fed = fl.Federation({"a": fl.Client((tmp_path / "images", {"mask": tmp_path / name}))}, {"mask": task})
        masks = fed.dataset.train.labels["mask"]
        assert masks[3].unique().tolist() == [255]
        return {*masks[:3].unique().tolist()}

    assert read("both", 0, 255) == {0, 1}
    assert read("white", 255) == {1}
    assert read("black", 0) == {0}
    assert read("stated", 0, 255, ignore=255) == {0, 255}
    assert read("other", 0, 9, 255, ignore=9) == {0, 1, 255}
    assert read("three", 0, 1, 255) == {0, 1, 255}
    with pytest.raises(DataError, match="client 'a', train, task 'mask': only the labels 0 and 255 found"):
        read("classes", 0, 255, classes=3)
    with pytest.raises(DataError, match=f"task 'mask': {tmp_path / 'stray' / '0.png'}: the label 7 found"):
        read("stray", 0, 7)


def test_depth_in_millimetres_is_refused_and_files_of_metres_are_read(tmp_path: Path) -> None:
    metres = np.linspace(0.2, 4, 64).reshape(8, 8).astype(np.float32)
    far = np.where(metres > 3, 100, metres)  # less than half
    files = {
        "images/0.png": metres.astype(np.uint8),
        "deep/0.png": (metres * 1000).astype(np.uint16),
        "metres/0.tif": metres,
        "far/0.tif": far,
    }
    for name, array in files.items():
        (tmp_path / name).parent.mkdir()
        Image.fromarray(array).save(tmp_path / name)

    def read(labels: Any, **settings: Any) -> torch.Tensor:
        train = (tmp_path / "images", {"depth": labels})
        return fl.Federation({"a": fl.Client(train)}, {"depth": Depth("depth", **settings)}).dataset.train.labels[
            "depth"
        ]

    assert torch.equal(read(tmp_path / "metres")[0], torch.from_numpy(metres))
    assert torch.equal(read(tmp_path / "far")[0], torch.from_numpy(far))
    assert read(tmp_path / "deep", limit=5000)[0].max() == 4000
    for labels in (tmp_path / "deep", metres[None] * 1000):
        with pytest.raises(DataError, match="client 'a', train, task 'depth': depths from 200 to 4000 .* by 1000"):
            read(labels)


def test_files_of_one_name_or_of_different_bits_are_refused(tmp_path: Path) -> None:
    def read() -> Any:
        fed = fl.Federation({"a": fl.Client((tmp_path, {"ill": [0, 1, 0]}))}, {"ill": fl.task(classes=2)})
        return fed.dataset.train.images  # type: ignore[attr-defined]

    grey = np.full((8, 8), 9, np.uint8)
    for name in ("1.png", "2.png", "3.png"):
        Image.fromarray(grey).save(tmp_path / name)
    assert len(read()) == 3
    Image.fromarray(grey.astype(np.uint16) * 256).save(tmp_path / "2.png")
    with pytest.raises(DataError, match="'3.png' is 1 x 8 x 8 with 8 bits and '2.png' is 1 x 8 x 8 with more bits"):
        read()
    Image.fromarray(grey).save(tmp_path / "1.JPG")
    with pytest.raises(DataError, match="client 'a', train: .*'1.JPG' and '1.png' found; names without their ending"):
        read()


def test_images_of_different_sizes_are_resized_with_their_masks(tmp_path: Path) -> None:
    """The right half is bright and of class 1, whatever the size; an image without a mask has no label."""
    for folder in ("images", "masks"):
        (tmp_path / folder).mkdir()
    for i, (high, wide) in enumerate([(8, 8), (16, 24), (40, 32), (24, 16)]):
        bright = np.broadcast_to(np.arange(wide) >= wide // 2, (high, wide))
        Image.fromarray(bright.astype(np.uint8) * 200).save(tmp_path / "images" / f"{i}.png")
        if i:
            Image.fromarray(bright.astype(np.uint8)).save(tmp_path / "masks" / f"{i}.png")
    pair = tmp_path / "images", {"outline": tmp_path / "masks"}
    tasks = {"outline": fl.task(kind="segmentation", classes=2)}
    with pytest.raises(DataError, match=r"'0.png' is 1 x 8 x 8 .* '1.png' is 1 x 16 x 24 .*; make all images the same"):
        fl.Federation({"ann": fl.Client(pair)}, tasks)
    fed = fl.Federation({"ann": fl.Client(pair)}, tasks, pair, size=8)
    x, labels = fed.dataset.test.batch(torch.arange(4), torch.device("cpu"))
    right = torch.arange(8) >= 4
    assert labels["outline"].tolist() == [[[255] * 8] * 8, *[[right.long().tolist()] * 8] * 3]
    assert x.shape == (4, 1, 8, 8)
    assert fed.dataset.reading.stored is None
    off = (x * 255 - right * 200.0).abs()
    assert off[0].max() < 1
    assert off[..., [0, 1, 6, 7]].max() < 1  # antialiasing touches the border of the halves alone
    deep = np.arange(16 * 24, dtype=np.uint16).reshape(16, 24) * 100
    (tmp_path / "deep").mkdir()
    Image.fromarray(deep).save(tmp_path / "deep" / "1.png")
    fed = fl.Federation({"ann": fl.Client((tmp_path / "deep", [1.0]))}, {"age": fl.task()}, size=8)
    assert (fed.dataset.input_shape, fed.dataset.reading.stored) == ((1, 8, 8), "stretched")
    for bad in (0, 2.5, True):
        with pytest.raises(DataError, match=f"size={bad} found, expected a whole number of pixels"):
            fl.Federation({"ann": fl.Client(pair)}, tasks, size=bad)
    with pytest.raises(DataError, match="client 'ann', train: size=8 found, which is for folders of images"):
        fl.Federation({"ann": fl.Client((x, labels))}, tasks, size=8)


def test_a_turned_photograph_is_set_upright(tmp_path: Path) -> None:
    upright = np.arange(48, dtype=np.uint8).reshape(8, 6)
    turn = Image.Exif()
    turn[0x0112] = 6  # the camera was held so that its rows are the image's columns
    Image.fromarray(upright).save(tmp_path / "0.png")
    Image.fromarray(np.rot90(upright).copy()).save(tmp_path / "1.png", exif=turn)
    fed = fl.Federation({"a": fl.Client((tmp_path, {"ill": [0, 1]}))}, {"ill": fl.task(classes=2)})
    for image in fed.dataset.train.images:  # type: ignore[attr-defined]
        assert np.array_equal(image[0].numpy(), upright)


def test_labels_beside_a_folder_are_joined_by_file_name(tmp_path: Path) -> None:
    """As text scan10 comes before scan2, so labels in the order of a list would belong to other images."""
    pandas = pytest.importorskip("pandas")
    for i in range(12):
        Image.fromarray(np.full((8, 8), i, np.uint8)).save(tmp_path / f"scan{i}.png")
    tasks = {"ill": fl.task(classes=2)}

    def read(labels: Any) -> Any:
        train = fl.Federation({"a": fl.Client((tmp_path, {"ill": labels}))}, tasks).dataset.train
        return [int(y) for _, y in sorted(zip(train.images[:, 0, 0, 0].tolist(), train.labels["ill"], strict=True))]  # type: ignore[attr-defined]

    ill = {f"scan{i}": int(i > 5) for i in range(12)}
    assert read(ill) == read({f"{name}.png": y for name, y in ill.items()}) == list(ill.values())
    assert read(pandas.Series(ill)[::-1]) == list(ill.values())
    assert read({"scan3": 0, "scan10": 1}) == [-1, -1, -1, 0, -1, -1, -1, -1, -1, -1, 1, -1]
    for wrong, said in (
        (list(ill.values()), "labels without .* but scan10.png comes before scan2.png as text .* give a mapping"),
        (pandas.Series(list(ill.values())), "labels without file names found"),
        ({**ill, "scan12": 0}, "a label for 'scan12' found, expected the name of an image"),
        ({**ill, "scan3.png": 0}, "two labels for 'scan3.png' found"),
    ):
        with pytest.raises(DataError, match=f"client 'a', train, task 'ill': {tmp_path}: {said}"):
            read(wrong)
    with pytest.raises(DataError, match="task 'ill': .*scan3.png: the label 7 found, expected 0 to 1"):
        read({**ill, "scan3": 7})


def test_a_volume_whose_header_claims_more_than_its_file_can_hold(tmp_path: Path) -> None:
    nibabel = pytest.importorskip("nibabel")
    file = tmp_path / "p1.nii.gz"
    nibabel.save(nibabel.Nifti1Image(np.zeros((4, 4, 2), np.int16), np.eye(4)), file)
    header = bytearray(gzip.decompress(file.read_bytes()))
    header[42:48] = np.full(3, 32767, "<i2").tobytes()  # dim[1:4]
    file.write_bytes(gzip.compress(header))
    with pytest.raises(DataError, match=r"p1.nii.gz: cannot be read \(its header claims 70362301923326 bytes"):
        inputs.pixels_of(file)


def test_volumes_are_read_slice_by_slice(tmp_path: Path) -> None:
    nibabel = pytest.importorskip("nibabel")
    x = images(6, 1)
    mask = labels_of("segmentation", x)
    for folder, volume in {"images": x[:, 0].numpy(), "masks": mask.numpy().astype(np.int16)}.items():
        (tmp_path / folder).mkdir()
        nibabel.save(nibabel.Nifti1Image(np.moveaxis(volume, 0, 2), np.eye(4)), tmp_path / folder / "p1.nii.gz")
    fed = fl.Federation(
        {"a": fl.Client((tmp_path / "images", tmp_path / "masks"))}, {"mask": fl.task(kind="segmentation", classes=2)}
    )
    assert fed.dataset.input_shape == (1, 12, 12)
    assert torch.equal(fed.dataset.train.labels["mask"].long(), mask)


def test_dicom_images_are_read_in_their_units(tmp_path: Path) -> None:
    pydicom = pytest.importorskip("pydicom")
    from pydicom.uid import ExplicitVRLittleEndian

    pixels = np.arange(144, dtype=np.uint16).reshape(12, 12)
    made = pydicom.Dataset()
    made.file_meta = pydicom.dataset.FileMetaDataset()
    made.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    made.file_meta.MediaStorageSOPClassUID = made.SOPClassUID = "1.2.840.10008.5.1.4.1.1.2"
    made.file_meta.MediaStorageSOPInstanceUID = made.SOPInstanceUID = "1.2.3"
    made.Rows, made.Columns, made.SamplesPerPixel, made.PhotometricInterpretation = 12, 12, 1, "MONOCHROME2"
    made.BitsAllocated, made.BitsStored, made.HighBit, made.PixelRepresentation = 16, 16, 15, 0
    made.RescaleSlope, made.RescaleIntercept, made.PixelData = 2, -100, pixels.tobytes()
    for name in ("a", "b"):
        made.save_as(tmp_path / f"{name}.dcm", enforce_file_format=True)
    fed = fl.Federation({"a": fl.Client((tmp_path, torch.tensor([1.0, 2.0])))}, {"age": fl.task(kind="regression")})
    assert torch.equal(fed.dataset.train.images[0, 0], torch.tensor(pixels * 2.0 - 100).float())
