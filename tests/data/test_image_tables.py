"""Images that a table names: the data set `image-table`, and the recipe that `init` writes for one."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from fedloom.cli.app import app
from fedloom.data import DATASETS, Pool
from fedloom.data.combine import loaded
from fedloom.data.inputs import is_deep, opened, pixels_of
from fedloom.engines import api
from fedloom.engines.flower.node import NodeConfig
from fedloom.engines.flower.nodes import own_data
from fedloom.errors import DataError
from fedloom.federation.recipes.loader import load

TASKS: dict[str, Any] = {
    "grade": {"kind": "classification", "classes": ["low", "mid", "high"]},
    "age": {"kind": "regression"},
    "signs": {"kind": "multilabel", "columns": ["left", "right"]},
}


def read(folder: Path, **about: Any) -> Any:
    entry = DATASETS["image-table"]
    arguments = {"path": str(folder / "labels.csv"), "root": str(folder / "scans"), "tasks": TASKS, "site": "clinic"}
    return entry.function(0, **vars(entry.params(**{**arguments, "size": 16, **about})))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """60 scans of two clinics, half of them in a folder below, whose brightness tells the grade and the age."""
    rng, rows = np.random.default_rng(0), []
    for i in range(60):
        level = int(rng.integers(0, 3))
        name = f"{'old/' * (i % 2)}scan{i:02d}"
        pixels = rng.normal(50 + 70 * level, 15, (20, 14)).clip(0, 255).astype("uint8")
        file = tmp_path / "scans" / f"{name}.{'png' if i % 3 else 'jpg'}"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(file)
        rows.append(
            {
                "scan": name if i % 4 else f"{name}{file.suffix}",
                "clinic": ("north", "south")[i // 30],
                "patient": i // 3,
                "grade": TASKS["grade"]["classes"][level] if i % 10 else None,
                "age": 30 + 20 * level + rng.normal(),
                "left": ("no", "yes")[level > 0],
                "right": ("no", "yes")[level > 1],
            }
        )
    pandas.DataFrame(rows).to_csv(tmp_path / "labels.csv", index=False)
    return tmp_path


def test_labels_of_all_kinds_stand_beside_the_images_that_their_row_names(folder: Path) -> None:
    data = read(folder, image="scan")
    assert data.domains == ("north", "south")
    assert data.input_shape == (3, 16, 16)
    assert [(task.name, task.kind) for task in data.tasks] == [
        ("grade", "classification"), ("age", "regression"), ("signs", "multilabel")
    ]  # fmt: skip
    assert len(data.train) + len(data.test) == 60
    assert data.notes == () == data.doubts
    table = pandas.read_csv(folder / "labels.csv")
    ages = torch.cat([data.train.labels["age"], data.test.labels["age"]])
    images = torch.cat([data.train.images, data.test.images])
    for age, image in zip(ages.tolist(), images, strict=True):
        (row,) = np.flatnonzero(np.isclose(table.age, age, atol=1e-5))
        (file,) = [each for each in (folder / "scans").rglob("*") if each.stem == f"scan{row:02d}"]
        assert torch.equal(
            image, torch.tensor(np.asarray(Image.open(file).convert("RGB").resize((16, 16), 2))).permute(2, 0, 1)
        )
    trained = data.train.labels["age"][np.concatenate([share.train for share in data.deal(Pool.of(data), 0).shares])]
    (age,) = [task for task in data.tasks if task.name == "age"]
    assert (age.mean, age.std) == pytest.approx((float(trained.mean()), float(trained.std(correction=0))), rel=1e-5)


def test_images_of_a_patient_stay_together_and_rows_without_an_image_are_left_out(folder: Path) -> None:
    for lost in ("scan00.jpg", "scan03.jpg", "old/scan07.png"):
        (folder / "scans" / lost).unlink(missing_ok=True)
    data = read(folder, image="scan", group="patient")
    table = pandas.read_csv(folder / "labels.csv")
    whose = [{int(table.patient[np.isclose(table.age, age, atol=1e-5)].iloc[0]) for age in part.labels["age"].tolist()}
             for part in (data.train, data.test)]  # fmt: skip
    assert not whose[0] & whose[1]
    assert len(whose[1]) >= 2
    assert data.notes == (f"rows whose image is not in {folder / 'scans'}, left out: 2, the first is row 1",)


def test_images_that_several_rows_name_are_said(folder: Path) -> None:
    table = pandas.read_csv(folder / "labels.csv")
    table.assign(scan=[table.scan[1], *table.scan[1:]]).to_csv(folder / "labels.csv", index=False)
    said = "1 images are named by several rows, such as scan01.png; data.group=scan keeps these rows in one part"
    assert said in read(folder, image="scan").notes


def test_names_of_images_that_are_not_found_are_no_silent_loss(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    words = ["init", "labels.csv", "--labels", "grade", "--clients", "clinic", "--method", "fedavg", "--out", "r.yaml"]
    table = pandas.read_csv("labels.csv").assign(scan=lambda of: of.scan.map(lambda name: f"{Path(name).stem}.png"))
    away = table.assign(scan=[str(folder / "scans" / "scan00.png"), *table.scan[1:]])
    away.to_csv("labels.csv", index=False)
    refused = str(CliRunner().invoke(app, words).exception)
    assert f"column 'scan': {away.scan[0]!r} found, expected the name of a file below" in refused
    assert "inputs: age" in CliRunner().invoke(app, [*words, "--leave-out", "scan"]).output
    Path("r.yaml").unlink()
    table.to_csv("labels.csv", index=False)
    (folder / "scans").rename(folder.parent / f"{folder.name}-elsewhere")
    assert "left out: scan: it names images, which no folder beside" in CliRunner().invoke(app, words).output


def test_copies_among_the_tests_are_said(folder: Path) -> None:
    for file in (folder / "scans" / "old").iterdir():
        Image.new("L", (20, 14), 9).save(file)
    (doubt,) = read(folder, image="scan").doubts
    assert "are copies of training images, for example old/scan" in doubt


def test_what_does_not_fit_is_named(folder: Path) -> None:
    table = pandas.read_csv(folder / "labels.csv")

    def refused(expected: str, **about: Any) -> None:
        with pytest.raises(DataError, match=expected):
            read(folder, **{"image": "scan", **about})

    refused("no column 'image'", image="image")
    refused("column 'clinic': no cell names an image in .*, expected files that end in .jpg", image="clinic", site=None)
    refused("'grade' is both a label and an input", image="grade")
    refused("has no classes, expected those of kind classification", tasks={"grade": {"kind": "classification"}})
    for outside in ("../labels", "/etc/passwd.png", "old\\..\\..\\x.png"):
        table.assign(scan=[outside, *table.scan[1:]]).to_csv(folder / "labels.csv", index=False)
        refused("column 'scan': .* found, expected the name of a file below")
    table.to_csv(folder / "labels.csv", index=False)
    (folder / "scans" / "scan02.png").write_bytes(b"no image")
    refused("scan02.png: cannot be read as an image")


def test_init_finds_the_images_and_its_recipe_learns(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)

    def init(*more: str) -> Any:
        labels = "grade,age,signs=left+right"
        chosen = ["--labels", labels, "--clients", "clinic", "--rounds", "12", "--method", "fedavg"]
        return CliRunner().invoke(app, ["init", "labels.csv", *chosen, "--out", "r.yaml", *more])

    for more, expected in (
        (("--images", "."), "no column names images in ., expected names of files below it"),
        (("--images", "scans", "--features", "patient"), "images are the inputs, so features cannot be"),
        (("--leave-out", "patient"), "only the images that 'scan' names are inputs, so none can be left out"),
    ):
        assert expected in str(init(*more).exception)
    said = init().output
    assert "inputs: the images that scan names, in scans" in said
    assert "not used: patient" in said
    assert "patient: 20 values in 60 rows, so rows of one patient can be in train and test" in said
    recipe = load("r.yaml", ["data.size=16", "data.group=patient", "training.epochs=4", "training.batch_size=8"])
    assert recipe.data.arguments["tasks"]["age"].std > 10
    final = api.run(recipe, folder / "run").final()
    assert final.values["grade"]["accuracy"] > 0.8
    assert final.values["age"]["r2"] > 0.5


def test_ages_are_no_names_of_images_by_chance(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    for number in range(90):
        Image.new("L", (4, 4)).save(folder / "scans" / f"{number}.png")
    table = pandas.read_csv("labels.csv").drop(columns="scan").assign(years=[30 + i % 25 for i in range(60)])
    table.to_csv("labels.csv", index=False)
    words = ["init", "labels.csv", "--labels", "grade", "--clients", "clinic", "--method", "fedavg", "--out", "r.yaml"]
    assert "years (number)" in CliRunner().invoke(app, words).output


def test_images_of_more_than_8_bits_are_predicted_as_they_were_trained_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = pandas.read_csv(folder / "labels.csv")
    for place, name in enumerate(table.scan):
        (file,) = (folder / "scans").rglob(f"{Path(name).stem}.*")
        pixels = np.asarray(Image.open(file).resize((20 + place % 3, 17))).astype(np.uint16) * 40 + 1000
        file.unlink()
        Image.fromarray(pixels).save(file.with_suffix(".png"))
    table.scan = [name.removesuffix(".jpg").removesuffix(".png") for name in table.scan]
    table.assign(fold=["test" if i % 3 == 0 else "train" for i in range(60)]).to_csv(folder / "labels.csv", index=False)
    about = {"name": "image-table", "path": str(folder / "labels.csv"), "root": str(folder / "scans"), "image": "scan"}
    about |= {"size": 16, "tasks": {"grade": TASKS["grade"]}, "site": "clinic", "split": "fold"}
    training = {"rounds": 3, "batch_size": 8, "optimizer": {"name": "adam", "lr": 0.01}}
    sections = {"partition": "own", "model": "small-cnn", "method": "fedavg", "training": training}
    recipe = load({"name": "t", "data": about, **sections})
    data = loaded(recipe.data.entry, 0, recipe.data.arguments)
    assert (data.train.images.dtype, data.input_shape) == (torch.float32, (1, 16, 16))
    assert abs(float(data.train.batch(torch.arange(len(data.train)), torch.device("cpu"))[0].mean())) < 1e-3
    final = api.run(recipe, folder / "run").final().values["grade"]["accuracy"]
    monkeypatch.chdir(folder)
    for words in (["export", "run", "--out", "bundle"], ["predict", "bundle", "scans", "--out", "seen.png"]):
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, done.output
    refused = CliRunner().invoke(app, ["predict", "bundle", "labels.csv"]).exception
    assert "predict the images, not the table that names them" in str(refused)
    answers = pandas.read_csv("seen/predictions.csv")
    seen = {Path(file).stem: grade for file, grade in zip(answers.input, answers.grade, strict=True)}
    tests = table[::3].dropna(subset="grade")
    right = tests.grade == [seen[Path(name).stem] for name in tests.scan]
    assert right.groupby(tests.clinic).mean().mean() == pytest.approx(final)
    Image.new("L", (20, 14), 9).save(folder / "scans" / "scan58.png")
    first = folder / "scans" / "scan00.png"
    with pytest.raises(DataError, match=f"58.png: 8 bits found, expected one image of more than 8 bits, as {first}"):
        read(folder, image="scan")


def test_all_files_that_cannot_be_used_are_named_at_once(folder: Path) -> None:
    for i in range(1, 8):
        (file,) = (folder / "scans").rglob(f"scan{i:02d}.*")
        file.write_bytes(b"no image")
    with pytest.raises(DataError, match="cannot be read") as caught:
        read(folder, image="scan")
    *lines, last = str(caught.value).split("\n")
    assert [Path(line.partition(":")[0]).stem for line in lines] == [f"scan{i:02d}" for i in range(1, 6)]
    assert last == "and 2 more that cannot be used"


def test_a_node_has_images_of_its_own(folder: Path) -> None:
    table = pandas.read_csv(folder / "labels.csv")
    table[table.clinic == "south"].drop(columns="clinic").to_csv(folder / "labels.csv", index=False)
    tasks = {"grade": TASKS["grade"], "age": {"kind": "regression", "mean": 50, "std": 20}}
    about = {"name": "image-table", "path": str(folder / "labels.csv"), "root": str(folder / "scans"), "image": "scan"}
    recipe = load(
        {"name": "t", "data": {**about, "tasks": tasks}, "partition": "own", "model": "small-cnn", "method": "fedavg"}
    )
    _, client = own_data(recipe, NodeConfig(client="south", data=recipe.data))
    assert [*client.tasks] == ["age", "grade"]
    assert (client.tasks["age"][0].mean, client.tasks["age"][0].std) == (50, 20)
    assert len(client.train) + len(client.val) + len(client.test) == 30


def wide_png(path: Path, pixels: Any) -> None:
    """Write a colour PNG with 16 bits per channel, which Pillow only reads."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    high, wide, _ = pixels.shape
    head = struct.pack(">IIBBBBB", wide, high, 16, 2, 0, 0, 0)
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in pixels)
    chunks = [(b"IHDR", head), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*each) for each in chunks))


def test_what_pillow_would_read_in_part_is_refused(tmp_path: Path) -> None:
    """Of several pages it reads the first, and of colours of 16 bits the upper 8: numbers below 256 would be black."""
    grey = Image.fromarray(np.full((4, 4), 9, "uint8"))
    for name in ("two.tif", "two.webp", "two.png"):
        grey.save(tmp_path / name, save_all=True, append_images=[Image.fromarray(np.full((4, 4), 90, "uint8"))])
    wide_png(tmp_path / "wide.png", np.full((4, 4, 3), 255))
    Image.fromarray(np.full((4, 4), 255, "uint16")).save(tmp_path / "grey.png")
    for read_one in (opened, is_deep, pixels_of):
        for name in ("two.tif", "two.webp", "two.png"):
            with pytest.raises(DataError, match=f"{name}.*2 images found in one file, expected one"):
                read_one(tmp_path / name)
        with pytest.raises(DataError, match="wide.png.*colours of 16 bits found, expected 8 bits per channel"):
            read_one(tmp_path / "wide.png")
    assert pixels_of(tmp_path / "grey.png").max() == 255
    grey.save(tmp_path / "camera.jpg", format="MPO", save_all=True, append_images=[grey])
    assert np.asarray(opened(tmp_path / "camera.jpg")).max() == 9  # a photo with a preview beside it


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparent_pixels_are_white(tmp_path: Path, mode: str) -> None:
    """A viewer shows no colour below them, whatever the file has there."""
    pixels = np.zeros((4, 4, 4), "uint8")
    pixels[:2], pixels[2:] = (0, 0, 0, 0), (60, 60, 60, 255)
    file, image = tmp_path / "a.png", Image.fromarray(pixels)
    if mode == "P":
        image.convert("RGB").quantize(2).save(file, transparency=int(image.convert("RGB").quantize(2).getpixel((0, 0))))
    else:
        image.convert(mode).save(file)
    for seen in (np.asarray(opened(file)), np.moveaxis(pixels_of(file)[0], 0, 2)):
        assert (np.unique(seen[:2]).tolist(), np.unique(seen[2:]).tolist()) == ([255], [60])
