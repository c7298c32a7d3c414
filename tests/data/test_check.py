"""`fedloom data check`: what it finds, and what it lets pass."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from typer.testing import CliRunner

from fedloom.cli.app import app
from fedloom.data.folders import check
from fedloom.errors import UserError
from folders_support import SIZE, nyud, pascal, save


def rows(report):
    return {(part, what): found for part, what, found, _ in report.rows}


def test_a_complete_folder(tmp_path):
    report = check("nyud", str(nyud(tmp_path)))
    assert report.usable
    assert report.notes == [
        "train: 3 images, the published set has 795",
        "val: 2 images, the published set has 654",
    ]
    found = rows(report)
    assert found["train", "sizes"] == "12 x 16 to 12 x 16"
    assert found["train", "semseg"].startswith("3 of 3 images, 40 classes, 0 to 39, 9")
    assert " m, 100.0% of the pixels labelled" in found["val", "depth"]
    assert "% positive" in found["val", "edge"]


def test_pascal_context(tmp_path):
    report = check("pascal-context", str(pascal(tmp_path)), limit=2)
    assert report.usable
    found = rows(report)
    assert found["train", "images read"] == "2"
    assert found["train", "human_parts"] == "3 of 3 images, 4 classes, 0 to 4, 100.0% of the pixels labelled"
    assert found["train", "normals"] == "3 of 3 images, 50.0% of the pixels labelled"
    absent = "ImageSets/Parts/train.txt is absent, so images without a person count for human_parts too"
    assert f"train: {absent}" in report.notes


def test_what_is_missing_is_noted(tmp_path):
    root = nyud(tmp_path)
    (root / "edge/0001.png").unlink()
    report = check("nyud", str(root))
    assert report.usable
    assert "train: 1 images have no label of 'edge', first 0001" in report.notes


def test_problems_name_file_and_field(tmp_path):
    root = nyud(tmp_path)
    save(root / "segmentation/0001.png", np.full(SIZE, 200, np.uint8))
    save(root / "images/0003.png", np.zeros((3, 3, 3), np.uint8))
    for i in range(5):
        (root / f"depth/000{i}.npy").unlink()
    report = check("nyud", str(root))
    assert not report.usable
    text = "\n".join(report.problems)
    assert "segmentation/0001.png, semseg: expected labels in 0..40 or 255, found 200" in text
    assert "segmentation/0003.png, semseg: expected the image's size 3 x 3, found 12 x 16" in text
    assert "train: no image has a label of task 'depth'" in text


def test_large_images_are_noted(tmp_path):
    root = nyud(tmp_path, 1, 1)
    save(root / "images/0000.png", np.zeros((500, 600, 3), np.uint8))
    for file in ("segmentation/0000.png", "normals/0000.png", "depth/0000.npy", "edge/0000.png"):
        (root / file).unlink()
    report = check("nyud", str(root))
    assert "train: images of up to 500 x 600; set `size` to multiples of 32 that hold them" in report.notes


def test_an_empty_folder(tmp_path):
    report = check("nyud", str(tmp_path))
    assert len(report.problems) == 1
    assert "gt_sets is not in" in report.problems[0]


def test_an_unknown_name(tmp_path):
    done = CliRunner().invoke(app, ["data", "check", "nyudd", "--root", str(tmp_path)])
    assert done.exit_code
    assert "Did you mean 'nyud'" in str(done.exception or done.output)


def test_folders_of_classes(tmp_path):
    for split, count in (("train", 3), ("test", 1)):
        for kind in ("a", "b"):
            (tmp_path / "fruit" / split / kind).mkdir(parents=True)
            for i in range(count):
                save(tmp_path / f"fruit/{split}/{kind}/{i}.png", np.zeros((9, 9, 3), np.uint8))
    (tmp_path / "fruit/train/b/2.png").write_bytes(b"no image")

    def checked(*parameters: str) -> tuple[int, str]:
        done = CliRunner().invoke(app, ["data", "check", "class-folders", *parameters, "--root", str(tmp_path)])
        return done.exit_code, done.output

    code, text = checked("sets=[fruit]", "size=8")
    assert code == 2
    assert "6 of 6 images, 2 classes" in text
    assert "2.png: cannot be read as an image" in text
    (tmp_path / "fruit/train/b/2.png").unlink()
    (tmp_path / "fruit/train/b/notes.txt").write_text("no image")
    code, text = checked("sets=[fruit]")
    assert code == 0
    assert "note: files that are not images (.txt) are left out: 1 of 3 in fruit/train/b" in text
    assert "note: 2 of 2 test images are copies of training images, for example" in text
    code, text = checked("sets=[fruit, cars]")
    assert code == 2
    assert "The address of Stanford Cars no longer answers" in text


def test_each_image_that_cannot_be_read_is_a_problem(tmp_path: Path) -> None:
    for name in ("a/0.png", "a/1.png", "b/0.png", "b/1.png"):
        save(tmp_path / "north" / name, np.zeros((9, 9, 3), np.uint8))
    for name in ("a/1.png", "b/0.png"):
        (tmp_path / "north" / name).write_bytes(b"no image")
    done = CliRunner().invoke(app, ["data", "check", "domain-folders", "--root", str(tmp_path)])
    assert done.exit_code == 2
    problems = [line for line in done.output.splitlines() if line.startswith("problem: ")]
    assert [line.partition(": cannot be read as an image")[0][-7:] for line in problems] == ["a/1.png", "b/0.png"]


def test_data_without_a_folder_is_not_checked(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["data", "check", "arrays", "--root", str(tmp_path)])
    assert isinstance(done.exception, UserError)
    assert "it checks" in str(done.exception)
    (tmp_path / "own.yaml").touch()
    done = CliRunner().invoke(app, ["data", "check", str(tmp_path / "own.yaml")])
    assert "own.yaml' is no data set that is read from a folder of files" in str(done.exception)
    assert "`fedloom show RECIPE` says what it found" in str(done.exception)
    done = CliRunner().invoke(app, ["data", "check", "nyud"])
    assert "--root is missing, expected the folder that holds the data set" in str(done.exception)
    done = CliRunner().invoke(app, ["data", "check", "cars", "--root", str(tmp_path)])
    assert "'cars' is a set of class-folders. The address of Stanford Cars no longer answers" in str(done.exception)
    assert "class-folders" in str(done.exception)
