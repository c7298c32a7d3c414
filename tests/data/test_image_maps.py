"""Images with a label for each pixel, named by a table or lying in folders: `image-table`, `init`, `predict`."""

from __future__ import annotations

import shutil
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
from fedloom.data.inputs import frames_of, pixels_of, read_folders
from fedloom.data.tables.files import by_stem, table_at
from fedloom.data.tables.preprocessing import Label
from fedloom.data.transforms import Crop
from fedloom.engines import api
from fedloom.engines.flower.node import NodeConfig
from fedloom.engines.flower.nodes import own_data
from fedloom.errors import DataError, RecipeError
from fedloom.federation.recipes.loader import load
from fedloom.federation.rounds.build import with_options
from fedloom.models.tasks.dense import Semseg

OUTLINE = {"kind": "segmentation", "classes": ["0", "255"]}


def read(path: Path, tasks: dict[str, Any], **about: Any) -> Any:
    entry = DATASETS["image-table"]
    return entry.function(0, **vars(entry.params(path=str(path), tasks=tasks, **{"size": 32, **about})))


def blob(rng: np.random.Generator, side: int = 24) -> Any:
    inside = np.zeros((side, side), bool)
    inside[: rng.integers(side // 4, side - 4), : rng.integers(side // 4, side - 4)] = True
    return inside


def save(file: Path, pixels: Any) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(file)


@pytest.fixture
def sites(tmp_path: Path) -> Path:
    """Two sites with a folder of images and one of black and white masks, which are missing for every fourth image."""
    rng = np.random.default_rng(0)
    for site in ("north", "south"):
        for i in range(16):
            inside = blob(rng)
            save(
                tmp_path / f"all/{site}/images/{i}.png", (inside * 120 + rng.integers(0, 60, (24, 24))).astype("uint8")
            )
            if i % 4:
                save(tmp_path / f"all/{site}/masks/{i}_mask.png", inside.astype("uint8") * 255)
    return tmp_path


def command(*words: str) -> str:
    done = CliRunner().invoke(app, [*words])
    assert done.exit_code == 0, f"{done.output} {done.exception}"
    return done.output


def test_folders_of_images_and_masks_are_found_trained_on_and_predicted(
    sites: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(sites)
    save(sites / "all/north/masks/of_nothing.png", np.zeros((24, 24), "uint8"))
    said = command("init", "all", "--rounds", "12", "--out", "r.yaml")
    assert "labels: masks (segmentation: 0, 255)" in said
    assert "masks: 1 files are of no image, such as of_nothing.png" in said
    recipe = load("r.yaml", ["data.size=32", "data.pad=2", "training.epochs=3", "training.batch_size=4"])
    assert recipe.partition.name == "own"
    final = api.run(recipe, sites / "run").final().values["masks"]
    assert final["miou"] > 0.8
    command("export", "run", "--out", "bundle")
    command("predict", "bundle", "all/north/images", "--out", "seen.png")
    masks = {i: np.asarray(Image.open(sites / f"all/north/masks/{i}_mask.png")) for i in range(16) if i % 4}
    seen = {i: np.asarray(Image.open(sites / f"seen/masks/{i}.png")) for i in masks}
    rows = pandas.read_csv("seen/predictions.csv")
    assert {f"seen/{file}" for file in rows.masks} == {f"seen/masks/{i}.png" for i in range(16)}
    assert [Path(file).stem for file in rows.masks] == [Path(file).stem for file in rows.input]
    assert {*np.unique(np.stack([*seen.values()])).tolist()} == {0, 255}  # the values that masks of training have
    assert np.mean([(seen[i] == masks[i]).mean() for i in masks]) > 0.9


def test_a_label_of_each_pixel_is_the_nearest_one_of_its_file(sites: Path) -> None:
    data = read(sites / "all", {"masks": OUTLINE}, image="images", site="site")
    assert data.domains == ("north", "south")
    assert [(task.name, task.kind, task.channels) for task in data.tasks] == [("masks", "semseg", 2)]
    assert len(data.train) + len(data.test) == 24  # others have no label
    for part in (data.train, data.test):
        assert part.labels["masks"].shape[1:] == (32, 32)
        bright = part.images.float().mean(1) > 90
        assert (
            (part.labels["masks"] == 1) == bright
        ).float().mean() > 0.93  # but at borders, which are mixed in images
        _, y = part.batch(torch.arange(2), torch.device("cpu"))
        assert set(y["masks"].unique().tolist()) == {0, 1}
    whole = read(sites / "all", {"masks": OUTLINE}, image="images", site="site", size=24)
    one = np.asarray(Image.open(sites / "all/north/masks/1_mask.png")) // 255
    every = torch.cat([whole.train.labels["masks"], whole.test.labels["masks"]])
    assert any(torch.equal(each, torch.from_numpy(one)) for each in every)


def test_folders_of_parts_are_the_split_and_unlike_depths_are_refused(sites: Path) -> None:
    for part in ("train", "test"):
        for kind in ("images", "masks"):
            for file in (sites / "all" / {"train": "north", "test": "south"}[part] / kind).iterdir():
                target = sites / "cut" / part / kind / file.name
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(file.read_bytes())
    table = table_at(sites / "cut", None)
    assert table.site is None
    assert table.frame.split.value_counts().to_dict() == {"train": 16, "test": 16}
    data = read(sites / "cut", {"masks": OUTLINE}, image="images", split="split")
    assert (len(data.train), len(data.test)) == (12, 12)
    (sites / "cut/train").rename(sites / "all/west")
    (sites / "all/west").rename(sites / "cut/deeper")
    (sites / "cut/more").mkdir()
    (sites / "cut/deeper").rename(sites / "cut/more/deeper")
    with pytest.raises(DataError, match="expected them at one depth"):
        table_at(sites / "cut", None)


def test_folders_of_classes_are_no_masks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("dark", "light"):
        for i in range(6):
            save(tmp_path / f"photos/{kind}/{i}.png", np.full((8, 8, 3), 40 if kind == "dark" else 200, "uint8"))
    monkeypatch.chdir(tmp_path)
    said = command("init", "photos", "--clients", "2", "--method", "fedavg", "--rounds", "1", "--out", "r.yaml")
    assert "classes and their images: dark (6), light (6)" in said


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """A table of 40 images with a class, a folder of masks with other names, and depths in millimetres for a half."""
    rng, rows = np.random.default_rng(1), []
    for i in range(40):
        inside, ill = blob(rng), int(rng.integers(2))
        save(tmp_path / f"images/p{i}.png", (inside * 90 + 80 * ill + rng.integers(0, 40, (24, 24))).astype("uint8"))
        save(tmp_path / f"lesion/p{i}_seg.png", (inside * 7).astype("uint8"))
        if i % 2:
            save(tmp_path / f"depth/p{i}.png", (1000 + 1500 * inside).astype("uint16"))
        rows.append({"name": f"p{i}", "hospital": "ab"[i % 2], "ill": ("no", "yes")[ill]})
    pandas.DataFrame(rows).to_csv(tmp_path / "labels.csv", index=False)
    return tmp_path


def test_classes_of_images_and_maps_of_some_are_learned_together(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(table)
    said = command("init", "labels.csv", "--labels", "ill,lesion,depth", "--clients", "hospital", "--out", "r.yaml")
    assert "labels: lesion (segmentation: 0, 7), depth (depth), ill (binary: no, yes)" in said
    recipe = load("r.yaml", ["data.size=32", "data.tasks.lesion.metric=dice", "training.rounds=1"])
    assert recipe.data.arguments["tasks"]["depth"].factor == 0.001
    result = api.run(recipe, table / "run")
    assert next(iter(result.final().values["lesion"])) == "dice"
    depth = {"kind": "depth", "factor": 0.001, "column": "name", "root": str(table / "depth")}
    about = {"image": "name", "root": str(table / "images"), "site": "hospital"}
    both = read(table / "labels.csv", {"depth": depth, "ill": {"kind": "binary", "classes": ["no", "yes"]}}, **about)
    held = {share.client: [*share.tasks] for share in both.deal(Pool.of(both), 0).shares}
    assert held == {"a": ["ill"], "b": ["depth", "ill"]}
    data = read(table / "labels.csv", {"depth": depth}, **about)
    assert {*data.train.labels["depth"].unique().tolist()} == {1.0, 2.5}
    assert data.notes[:2] == (
        "rows without a label of any task, left out: 20",
        "site 'a' is left out: 0 labelled rows found, at least 1 needed",
    )


def test_dice_is_the_mean_over_classes_but_the_background() -> None:
    task = Semseg("lesion", 3, judge=("dice",))
    truth = torch.tensor([[[0, 1, 1, 2, 255]]])
    guess = torch.tensor([[[0, 1, 2, 2, 1]]])
    metric = task.metric()
    metric.update(torch.nn.functional.one_hot(guess, 3).permute(0, 3, 1, 2).float(), truth)
    values = metric.compute()
    assert task.primary == "dice"
    assert values["dice"] == pytest.approx((2 / 3 + 2 / 3) / 2)
    assert values["miou"] == pytest.approx((1 + 1 / 2 + 1 / 2) / 3)
    assert [*Semseg("lesion", 3).metrics] == ["miou", "pixel_accuracy"]


def test_labels_move_with_their_images() -> None:
    rng = torch.Generator().manual_seed(0)
    x = torch.randint(0, 255, (6, 1, 16, 16), dtype=torch.uint8).expand(-1, 3, -1, -1)
    y = {"outline": x[:, 0].clamp(max=254), "class": torch.arange(6)}
    moved, labels = Crop(3, flip=True)(x, y, torch.device("cpu"), rng)
    assert torch.equal(labels["class"], y["class"])
    plain = (moved[:, 0] * 0.229 + 0.485).mul(255).round()
    inside = labels["outline"] != 255
    assert 0.4 < inside.float().mean() < 1
    assert torch.equal(plain[inside].clamp(max=254), labels["outline"][inside].float())
    assert (plain[~inside] == 0).all()


def test_slices_of_volumes_are_examples_that_stay_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nibabel = pytest.importorskip("nibabel")
    rng = np.random.default_rng(0)
    for site in ("a", "b"):
        for i in range(6):
            inside = np.stack([blob(rng) for _ in range(3 + i % 2)], -1)
            for kind, values in (("images", inside * 900.0 + rng.normal(0, 50, inside.shape)), ("labels", inside * 2)):
                (tmp_path / site / kind).mkdir(parents=True, exist_ok=True)
                volume = nibabel.Nifti1Image(values.astype("float32" if kind == "images" else "int16"), np.eye(4))
                nibabel.save(volume, tmp_path / site / kind / f"case{i}.nii.gz")
    monkeypatch.chdir(tmp_path)
    said = command("init", ".", "--rounds", "8", "--out", "r.yaml")
    assert "labels: labels (segmentation: 0, 2)" in said
    recipe = load("r.yaml", ["data.size=32", "training.epochs=4", "training.batch_size=4"])
    data = read(tmp_path, {"labels": {"kind": "segmentation", "classes": ["0", "2"]}}, image="images", site="site")
    assert data.notes == ("12 images have 42 slices, each an example with its row's labels",)
    assert len(data.train) + len(data.test) == 42
    assert data.train.images.dtype == torch.float32
    sizes = [sum(range(3, 5)) - 3 - 4 + n for n in (3, 4)]
    assert len(data.test) in {a + b for a in sizes for b in sizes}  # whole volumes, one of each site
    assert api.run(recipe, tmp_path / "run").final().values["labels"]["miou"] > 0.8
    command("export", "run", "--out", "bundle")
    command("predict", "bundle", "a/images/case1.nii.gz", "--out", "seen.png")
    seen = np.asarray(nibabel.load(tmp_path / "seen/labels/case1.nii.gz").dataobj)
    truth = np.asarray(nibabel.load(tmp_path / "a/labels/case1.nii.gz").dataobj)
    assert seen.shape == truth.shape
    assert (seen == truth).mean() > 0.9


def test_what_does_not_fit_is_named(table: Path) -> None:
    lesion = {"kind": "segmentation", "classes": ["0", "7"], "column": "name", "root": str(table / "lesion")}
    depth = {"kind": "depth", "column": "name", "root": str(table / "depth")}
    own = {"image": "name", "root": str(table / "images"), "site": "hospital"}

    def refused(expected: str, tasks: dict[str, Any], error: type[Exception] = DataError, **about: Any) -> None:
        with pytest.raises(error, match=expected):
            read(table / "labels.csv", tasks, **{**own, **about})

    refused("a pixel of 7 found, expected 0, 1; add it to the task's classes", {"t": {**lesion, "classes": ["0", "1"]}})
    read(table / "labels.csv", {"t": {**lesion, "classes": ["0", "1"]}}, **own, missing=[7])
    refused("depths of .* in the middle, expected metres below 80; set data.tasks.t.factor", {"t": depth})
    refused("has no classes, expected those of kind segmentation", {"t": {**lesion, "classes": []}})
    refused("crop found, expected stretch for labels of pixels", {"t": lesion}, RecipeError, fit="crop")
    refused("'name' is both a label and an input", {"name": {"kind": "depth"}})
    for outside in ("../x", "/etc/passwd", "C:\\x.png"):
        cells = pandas.read_csv(table / "labels.csv")
        cells.assign(other=[outside, *cells.name[1:]]).to_csv(table / "odd.csv", index=False)
        with pytest.raises(DataError, match="column 'other': .* found, expected the name of a file below"):
            read(table / "odd.csv", {"t": {**lesion, "column": "other", "root": None}}, **own)
    save(table / "lesion/p3_seg.png", np.zeros((20, 24), "uint8"))
    refused("p3_seg.png is 1 x 20 x 24, expected 1 x 24 x 24 .* as .*p3.png", {"t": lesion})
    save(table / "lesion/p3_b.png", np.zeros((24, 24), "uint8"))
    refused("p3_b.png and p3_seg.png found, expected one file for 'p3'", {"t": lesion})
    with pytest.raises(ValueError, match="class 'inside' found, expected the values of pixels"):
        Label(kind="segmentation", classes=("inside", "outside"))
    data = {"name": "table", "path": "x.csv", "inputs": {"a": "number"}, "tasks": {"b": OUTLINE}}
    with pytest.raises(RecipeError, match="kind segmentation found, which is for images"):
        load({"name": "t", "data": data, "partition": "own", "model": "mlp", "method": "fedavg"})


def test_masks_that_are_none_are_refused_by_init(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(table)

    def refused(labels: str) -> str:
        words = ["init", "labels.csv", "--labels", labels, "--clients", "hospital", "--out", "r.yaml"]
        return str(CliRunner().invoke(app, words).exception)

    rng = np.random.default_rng(0)
    for i in range(40):
        save(table / f"smooth/p{i}.png", rng.integers(0, 255, (24, 24)).astype("uint8"))
        save(table / f"empty/p{i}.png", np.zeros((24, 24), "uint8"))
        save(table / f"colour/p{i}.png", rng.integers(0, 255, (24, 24, 3)).astype("uint8"))
    assert "different values of pixels found" in refused("smooth")
    assert "all pixels have the value 0" in refused("empty")
    assert "expected one channel (the label of each pixel), found RGB" in refused("colour")
    assert "kind 'ordinal' found, expected segmentation or depth" in refused("lesion=ordinal")
    assert "no column 'nothing'" in refused("nothing")
    assert "no names of images found, expected those of maps" in refused("ill=segmentation")


def test_masks_with_smoothed_edges_are_refused_and_thin_classes_are_not(tmp_path: Path) -> None:
    soft, thin = (np.zeros((24, 24), "uint8") for _ in range(2))
    soft[5:15, 5:15] = 255
    for step in range(6):  # nested squares, whose edges touch a lower and a higher class, but have an inside
        thin[2 * step : 24 - 2 * step, 2 * step : 24 - 2 * step] = 40 * step
    edges = np.asarray(Image.fromarray(soft).resize((48, 48), Image.Resampling.BILINEAR))
    for kind, mask in {"soft": edges, "thin": thin}.items():
        for i in range(4):
            save(tmp_path / kind / f"images/{i}.png", np.zeros(mask.shape, "uint8"))
            save(tmp_path / kind / f"masks/{i}.png", mask if i else np.minimum(mask // 100 * 255, 255).astype("uint8"))
    words = ["--clients", "2", "--rounds", "1", "--method", "fedavg", "--out", str(tmp_path / "r.yaml")]
    refused = str(CliRunner().invoke(app, ["init", str(tmp_path / "soft"), *words]).exception)
    assert "column 'masks': " in refused
    assert f"most of them on edges only, as in {tmp_path / 'soft/masks/1.png'}" in refused
    assert "the mask was resized or smoothed; save it with the values of classes alone" in refused
    assert "labels: masks (segmentation: 0, 40, 80, 120, 160" in command("init", str(tmp_path / "thin"), *words)


def test_a_mask_belongs_to_the_image_with_the_longest_name(tmp_path: Path) -> None:
    for name in ("a_1_seg.png", "a_seg.png", "b_SEG.tif", ".a_2.png", "notes.txt", "a_1_seg_old.txt"):
        (tmp_path / name).touch()
    found = by_stem(tmp_path, {"a", "a_1", "b", "c"}, is_map=True)
    assert {name: found[name].name for name in ("a", "a_1", "b")} == {
        "a": "a_seg.png",
        "a_1": "a_1_seg.png",
        "b": "b_SEG.tif",
    }
    assert "c" not in found
    (tmp_path / "c-2_seg.png").touch()  # the image c-2 is gone, and c has no mask
    with pytest.raises(DataError, match="a_1_seg.png and c-2_seg.png found, with different texts after the names"):
        by_stem(tmp_path, {"a", "a_1", "b", "c"}, is_map=True)
    (tmp_path / "a_seg.gif").touch()
    assert "a_seg" in by_stem(tmp_path)
    (tmp_path / "a_seg.jpg").touch()
    with pytest.raises(DataError, match="a_seg.jpg and a_seg.png found, expected one file for 'a_seg'"):
        by_stem(tmp_path)


def test_folders_inside_folders_of_images_have_the_masks_of_their_own(sites: Path) -> None:
    for site in ("north", "south"):
        for kind, end in (("images", ""), ("masks", "_mask")):
            for i in range(16):
                file = sites / f"all/{site}/{kind}/{i}{end}.png"
                if file.exists():
                    target = file.parent / f"p{i // 4}" / f"{i % 4}{end}.png"
                    target.parent.mkdir(exist_ok=True)
                    file.rename(target)
    frame = table_at(sites / "all", None).frame
    assert {*frame.folder} == {"p0", "p1", "p2", "p3"}
    said = command("init", str(sites / "all"), "--out", str(sites / "r.yaml"))
    assert "images lie in 4 folders of their own: if each is a patient, set data.group=folder" in said
    known = frame.dropna()
    assert len(frame) == 32
    assert [*known.masks] == [name.replace("images", "masks").replace(".png", "_mask.png") for name in known.images]
    data = read(sites / "all", {"masks": OUTLINE}, image="images", site="site", group="folder")
    assert len(data.train) + len(data.test) == 24


def test_sites_that_differ_are_named(sites: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(sites)
    for name, kind in (("west", "imgs"), ("east", "images")):
        for file in (sites / "all/north/images").iterdir():
            save(sites / f"all/{name}/{kind}/{file.name}", np.asarray(Image.open(file)))
    for file in (sites / "all/north/masks").iterdir():
        save(sites / f"all/west/masks/{file.name}", np.asarray(Image.open(file)))
    said = command("init", "all", "--out", "r.yaml")
    assert "sites and their rows: north (16), south (16), west (16)" in said  # west's folder has another name
    assert "all/east/images is left out: no file beside it has the name of an image there" in said
    assert "left out: it has no folder of images" not in said
    save(sites / "all/far/ill/0.png", np.zeros((24, 24), "uint8"))
    assert (
        f"{sites / 'all/far'} is left out: it has no folder of images with masks beside it"
        in table_at(sites / "all", None).notes
    )
    shutil.rmtree(sites / "all/far")
    (sites / "all/west").rename(sites / "all/test")
    with pytest.raises(DataError, match="folders 'test' and 'north' found beside each other, expected .* parts"):
        table_at(sites / "all", None)
    (sites / "all/test").rename(sites / "all/west")
    for file in (sites / "all/west/masks").iterdir():
        save(file, np.asarray(Image.open(file)) // 255)
    refused = str(CliRunner().invoke(app, ["init", "all", "--out", "s.yaml"]).exception)
    assert "pixels of 255 in all/north/masks/1_mask.png found, and of other classes only in others, as" in refused
    data = read(sites / "all", {"masks": {**OUTLINE, "classes": ["0", "1"]}}, image="images", site="site")
    assert [doubt for doubt in data.doubts if "class 0 only" in doubt and "'north'" in doubt]
    assert "pixels without a label found, too" in " ".join(data.doubts)
    assert "class 1 of masks is only at west: do sites code it alike?" in data.doubts
    assert "outlines only some classes belongs in tasks.masks.labelled={SITE: [CLASS]}" in " ".join(data.doubts)
    hint, only = (next(doubt for doubt in data.doubts if text in doubt) for text in ("labelled=", "only at west"))
    single = next(doubt for doubt in data.doubts if "class 0 only" in doubt and "'north'" in doubt)
    for labelled, left in (
        ({"west": (1,)}, {single}),  # west outlines this class, and others do not
        ({"north": (1,)}, {only}),  # north has nothing but the background
        ({"west": (1,), "north": (1,)}, set()),
    ):
        told = {*with_options(data, {"masks": {"labelled": labelled}}).doubts} & {hint, only, single}
        assert told == left
    assert {hint, only, single} <= {*with_options(data, {}).doubts}
    command("init", "all", "--missing", "255", "--out", "s.yaml")
    for file in (sites / "all/north/masks").iterdir():
        save(file, np.asarray(Image.open(file)) // 255 * 2)
    for file in (sites / "all/south/masks").iterdir():
        save(file, np.asarray(Image.open(file)) // 255)
    data = read(sites / "all", {"masks": {**OUTLINE, "classes": ["0", "1", "2"]}}, image="images", site="site")
    assert "class 2 of masks is only at north, class 1 is not there: do sites code it alike?" in data.doubts


def test_255_is_a_class_among_values_of_its_size(sites: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(sites)
    for site in ("north", "south"):
        for file in (sites / f"all/{site}/masks").iterdir():
            mask = np.array(Image.open(file))
            mask[20:] = 128
            save(file, mask)
    assert "masks (segmentation: 0, 128, 255)" in command("init", "all", "--out", "r.yaml")
    for file in (sites / "all/north/masks").iterdir():
        save(file, np.where((mask := np.array(Image.open(file))) == 128, 1, mask))
    for file in (sites / "all/south/masks").iterdir():
        save(file, np.where((mask := np.array(Image.open(file))) == 128, 1, mask))
    assert "masks (segmentation: 0, 1)" in command("init", "all", "--out", "s.yaml")


@pytest.mark.parametrize(
    ("mode", "found"), [("1", "masks (segmentation: 0, 1)"), ("P", "(segmentation: 0, 1)"), ("RGBA", "0, 255")]
)
def test_masks_of_any_mode_are_read(sites: Path, mode: str, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(sites)
    for site in ("north", "south"):
        for file in (sites / f"all/{site}/masks").iterdir():
            mask = Image.open(file)
            if mode == "P":
                mask = Image.fromarray(np.asarray(mask) // 255)
                mask.putpalette([0, 0, 0, 200, 0, 0])
            (mask if mode == "P" else mask.convert(mode)).save(file)
    assert found in command("init", "all", "--out", "r.yaml")
    if mode == "RGBA":
        for site in ("north", "south"):
            for file in (sites / f"all/{site}/masks").iterdir():
                mask = np.array(Image.open(file))
                mask[..., 3], mask[..., :3] = mask[..., 0], 0
                save(file, mask)
        refused = str(CliRunner().invoke(app, ["init", "all", "--out", "s.yaml"]).exception)
        assert "pixels differ only in transparency, expected one channel" in refused


def test_masks_that_init_cannot_pair_are_no_classes(sites: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(sites)
    for site in ("north", "south"):
        for file in (sites / f"all/{site}/masks").iterdir():
            file.rename(file.with_name(f"mask_{file.name}"))
    refused = str(CliRunner().invoke(app, ["init", "all", "--out", "r.yaml"]).exception)
    assert "all/north: folders images, masks found; expected classes, or masks in a folder beside the images" in refused


def test_names_in_cells_are_of_one_file_each(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(table)
    cells = pandas.read_csv(table / "labels.csv")
    cells["name"] = "images/" + cells["name"] + ".png"
    cells["outline"] = [f"lesion/p{i}_seg.png" for i in range(40)]
    cells.to_csv("t.csv", index=False)
    words = ("--clients", "hospital", "--out")
    said = command("init", "t.csv", "--labels", "ill,lesion,outline", *words, "r.yaml")
    assert "labels: lesion (segmentation: 0, 7), outline (segmentation: 0, 7)" in said  # the folder is no part of names
    cells[["outline", *cells.columns[:-1]]].rename(columns={"name": "image"}).to_csv("turned.csv", index=False)
    for number, labels in enumerate(("ill", "ill,outline")):
        said = command("init", "turned.csv", "--labels", labels, *words, f"turned{number}.yaml")
        assert "inputs: the images that image names" in said  # not the masks, though their column is the first
    (table / "lesion/p3_seg.png").rename(table / "lesion/p3_seg_old.png")
    outline = {"kind": "segmentation", "classes": ["0", "7"]}
    data = read(table / "t.csv", {"outline": outline}, image="name", site="hospital")
    assert f"outline: 1 cells name no file in {table}, so 'outline' has no label there" in data.notes
    cells["name"] = [f"{i:03d}" for i in range(40)]
    for i in range(40):
        (table / f"images/p{i}.png").rename(table / f"images/{i:03d}.png")
    cells.to_csv("t.csv", index=False)
    command("init", "t.csv", "--labels", "ill", *words, "numbers.yaml")
    cells["name"] = [f"C:\\images\\{i}.png" for i in range(40)]
    cells.drop(columns="outline").to_csv("t.csv", index=False)
    refused = str(CliRunner().invoke(app, ["init", "t.csv", "--labels", "ill,lesion", *words, "x.yaml"]).exception)
    assert r"no column names images in . or a folder there" in refused
    assert "found in column 'name'" in refused


def test_a_node_has_masks_of_its_own(sites: Path) -> None:
    data = {"name": "image-table", "path": str(sites / "all/south"), "image": "images", "size": 32}
    recipe = load(
        {
            "name": "t",
            "data": {**data, "tasks": {"masks": OUTLINE}},
            "partition": "own",
            "model": "tiny-pyramid",
            "method": "fedavg",
        }
    )
    _, client = own_data(recipe, NodeConfig(client="south", data=recipe.data))
    assert [*client.tasks] == ["masks"]
    assert len(client.train) + len(client.val) + len(client.test) == 12


def test_files_of_several_images_that_no_slices_are_read_from_are_named(tmp_path: Path) -> None:
    for i in range(6):
        for kind in ("images", "masks"):
            save(tmp_path / f"{kind}/{i}.tif", np.full((8, 8), i % 2, "uint8"))
    first = Image.open(tmp_path / "images/2.tif").copy()
    first.save(tmp_path / "images/2.tif", save_all=True, append_images=[first])
    with pytest.raises(DataError, match=r"2.tif: cannot be read \(2 images found in one file, expected one"):
        read(tmp_path, {"masks": {"kind": "segmentation", "classes": ["0", "1"]}}, image="images")


def dicom(pixels: Any, means: str) -> Any:
    """Return a DICOM scan of pixels of 8 bits, of which `means` says how they are shown."""
    pydicom = pytest.importorskip("pydicom")
    scan = pydicom.Dataset()
    scan.file_meta = pydicom.dataset.FileMetaDataset()
    scan.file_meta.TransferSyntaxUID = pydicom.uid.ExplicitVRLittleEndian
    scan.SOPClassUID = scan.file_meta.MediaStorageSOPClassUID = pydicom.uid.CTImageStorage
    scan.SOPInstanceUID = scan.file_meta.MediaStorageSOPInstanceUID = pydicom.uid.generate_uid()
    scan.Rows, scan.Columns = pixels.shape[:2]
    scan.SamplesPerPixel, scan.PhotometricInterpretation = 3 if pixels.ndim == 3 else 1, means
    scan.BitsAllocated = scan.BitsStored = 8
    scan.HighBit, scan.PixelRepresentation, scan.PlanarConfiguration = 7, int(pixels.dtype == np.int8), 0
    scan.PixelData = pixels.tobytes()
    return scan


@pytest.mark.parametrize("kind", ["uint8", "int8"])
def test_scans_whose_least_number_is_white_are_read_as_the_others(tmp_path: Path, kind: str) -> None:
    white = np.arange(64).reshape(8, 8).astype(kind)
    black = ((-1 if kind == "int8" else 255) - white.astype(int)).astype(kind)
    for name, pixels, means in (("a.dcm", black, "MONOCHROME2"), ("b.dcm", white, "MONOCHROME1")):
        scan = dicom(pixels, means)
        scan.RescaleSlope, scan.RescaleIntercept = 2, 5
        scan.save_as(tmp_path / name, enforce_file_format=True)
    assert (pixels_of(tmp_path / "a.dcm") == 2.0 * black.astype(float) + 5).all()
    assert (pixels_of(tmp_path / "b.dcm") == pixels_of(tmp_path / "a.dcm")).all()
    assert (pixels_of(tmp_path / "b.dcm", as_label=True) == 2.0 * white.astype(float) + 5).all()


def test_scans_without_an_ending_are_found(tmp_path: Path) -> None:
    (tmp_path / "README").write_text("about the scans")
    (tmp_path / "1.2.55").mkdir()
    for name in ("IM_0001", "1.2.840.7"):
        dicom(np.arange(64).reshape(8, 8).astype("uint8"), "MONOCHROME2").save_as(
            tmp_path / name, enforce_file_format=True
        )
    assert by_stem(tmp_path) == {name: tmp_path / name for name in ("1.2.840.7", "IM_0001")}
    images, _, _ = read_folders(tmp_path, {"age": {"IM_0001": 4, "1.2.840.7": 5}}, {}, {}, "here")
    assert (images.shape, images.dtype, frames_of(tmp_path / "IM_0001")) == ((2, 1, 8, 8), np.float32, (1, 8, 8))


def test_volumes_that_are_no_numbers_and_headers_that_claim_too_much_are_named(tmp_path: Path) -> None:
    nibabel = pytest.importorskip("nibabel")
    nibabel.save(
        nibabel.Nifti1Image(np.zeros((4, 4, 2), [("R", "u1"), ("G", "u1"), ("B", "u1")]), np.eye(4)),
        tmp_path / "c.nii",
    )
    with pytest.raises(DataError, match="c.nii: cannot be read .* expected one number in each place"):
        pixels_of(tmp_path / "c.nii")
    scan = dicom(np.zeros((8, 8, 3), "uint8"), "RGB")
    scan.save_as(tmp_path / "c.dcm", enforce_file_format=True)
    with pytest.raises(DataError, match="c.dcm: cannot be read .3 channels found, expected one"):
        pixels_of(tmp_path / "c.dcm")
    scan.NumberOfFrames = 100_000_000
    scan.save_as(tmp_path / "c.dcm", enforce_file_format=True)
    with pytest.raises(DataError, match="c.dcm: cannot be read .its header claims 100000000 images of 8 x 8"):
        frames_of(tmp_path / "c.dcm")


def test_a_folder_that_is_no_mask_can_be_left_out(sites: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(sites)
    for site in ("north", "south"):
        for file in (sites / f"all/{site}/images").iterdir():
            save(sites / f"all/{site}/shown, red/{file.name}", np.full((24, 24, 3), [200, 0, 0], "uint8"))
        (sites / f"all/{site}/notes").mkdir()
    refused = str(CliRunner().invoke(app, ["init", "all", "--out", "r.yaml"]).exception)
    assert "found RGB); if it has no labels of pixels, leave it out: name the others with --labels" in refused
    said = command("init", "all", "--labels", "masks", "--out", "r.yaml")
    assert "labels: masks (segmentation: 0, 255)" in said
    assert "not used: shown, red" in said


def test_a_folder_without_masks_is_no_table(sites: Path) -> None:
    for file in (sites / "all/north/masks").iterdir():
        file.unlink()
    with pytest.raises(DataError, match="north: no table found, expected one, or a folder of images .* and a folder"):
        read(sites / "all/north", {"masks": OUTLINE}, image="images")


def test_masks_in_class_folders_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for kind in ("benign", "malignant"):
        for i in range(4):
            save(tmp_path / f"busi/{kind}/{kind} ({i}).png", np.full((8, 8), i, "uint8"))
            save(tmp_path / f"busi/{kind}/{kind} ({i})_mask.png", np.full((8, 8), 255, "uint8"))
    said = command("init", "busi", "--clients", "2", "--method", "fedavg", "--rounds", "1", "--out", "r.yaml")
    assert "note: 8 images are called like masks of others, such as busi/benign/benign (0)_mask.png" in said


def test_check_counts_images_with_masks(sites: Path) -> None:
    words = [f"path={sites / 'all'}", "image=images", 'tasks={masks: {kind: segmentation, classes: ["0", "255"]}}']
    said = command("data", "check", "image-table", "--root", str(sites / "all"), *words)
    assert "usable" in said
    assert "classes" not in said


def test_names_of_masks_that_are_not_there_are_named(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(table)
    cells = pandas.read_csv(table / "labels.csv")
    cells["mask"] = [f"gone/p{i}.png" for i in range(40)]

    def refused(name: str) -> str:
        words = ["init", name, "--labels", "mask", "--clients", "hospital", "--out", "r.yaml"]
        return str(CliRunner().invoke(app, words).exception)

    cells.to_csv("masks.csv", index=False)
    assert "column 'mask': no names of images found, expected those of maps" in refused("masks.csv")
    cells["name"] = [f"./images/../images/p{i}.png" for i in range(40)]
    cells.to_csv("images.csv", index=False)
    assert "no column names images in . or a folder there" in refused("images.csv")
    about = {"image": "name", "root": str(table / "images"), "site": "hospital"}
    task = {"kind": "segmentation", "classes": ["0", "7"], "column": "name", "root": "lesion"}
    with pytest.raises(DataError, match="no file with the labels of an image's pixels found in .*images/lesion"):
        read(table / "labels.csv", {"lesion": task}, **about)
