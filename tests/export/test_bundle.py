"""A model in a folder of its own gives what the run's model gives, also without fedloom."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from typer.testing import CliRunner

import fedloom as fl
from fedloom.cli.app import app
from fedloom.data.drawing import pictures
from fedloom.data.inputs import pixels_of
from fedloom.engines.api import Result, trained_models
from fedloom.errors import StateError, UserError
from fedloom.experiments.export.bundle import Bundle, _plain, export
from fedloom.experiments.export.finished import reopen
from fedloom.experiments.export.predict import inputs, of_files
from fedloom.federation.rounds.build import load_data
from fedloom.federation.runs.reader import Run, human_bytes
from tests_support import load_recipe

Quick = Callable[..., Result]
image = pytest.importorskip("PIL.Image")


def picture(path: Path, size: tuple[int, int] = (20, 14)) -> Path:
    pixels = np.random.default_rng(0).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)
    image.fromarray(pixels).save(path)
    return path


def test_the_global_model_and_one_task(quick: Quick, tmp_path: Path) -> None:
    run = quick().folder
    bundle = Bundle.read(export(run, tmp_path / "all"))
    state = trained_models(run)[""]
    assert all(torch.equal(tensor, state[name]) for name, tensor in bundle.module.state_dict().items())
    names = [task.name for task in bundle.tasks]
    one = Bundle.read(str(export(run, tmp_path / "one", task=names[1])))
    assert [task.name for task in one.tasks] == names[1:2]
    assert not [name for name in one.module.state_dict() if f".{names[0]}." in name]
    x, back, shown = inputs(bundle, picture(tmp_path / "a.png"))
    assert tuple(x.shape[1:]) == tuple(bundle.about.input_shape)
    assert back(torch.zeros(2, *bundle.about.input_shape[1:])).shape == (2, 14, 20)
    assert shown is not None
    assert shown(0).shape == (*bundle.about.input_shape[1:], 3)
    with torch.inference_mode():
        both = bundle.module(x)[names[1]], one.module(x)[names[1]]
    assert torch.equal(*both)
    card = (tmp_path / "one" / "README.md").read_text()
    assert names[1] in card
    assert names[0] + " (" not in card
    with pytest.raises(UserError, match="no task 'nope'"):
        export(run, tmp_path / "x", task="nope")
    with pytest.raises(StateError, match="not empty"):
        export(run, tmp_path / "one")
    with pytest.raises(StateError, match="is not an exported model"):
        Bundle.read(run)


def test_a_clients_own_model(quick: Quick, tmp_path: Path) -> None:
    run = quick("method=local").folder
    with pytest.raises(UserError, match="choose a client"):
        export(run, tmp_path / "x")
    with pytest.raises(UserError, match="no client 'nobody'"):
        export(run, tmp_path / "x", client="nobody")
    client, state = next(iter(trained_models(run).items()))
    bundle = Bundle.read(export(run, tmp_path / "out", client=client))
    assert all(torch.equal(tensor, state[name]) for name, tensor in bundle.module.state_dict().items())
    about = json.loads((tmp_path / "out" / "export.json").read_text())
    assert about["client"] == client


def test_the_commands_and_files_that_are_no_images(quick: Quick, tmp_path: Path) -> None:
    run = quick().folder
    done = CliRunner().invoke(app, ["export", str(run)])
    assert done.exit_code == 0, done.output
    folder, out = run / "export", tmp_path / "seen.png"
    made = CliRunner().invoke(app, ["predict", str(folder), str(picture(tmp_path / "a.png")), "-o", str(out)])
    assert made.exit_code == 0, made.output
    assert "class" in made.output
    with image.open(out) as seen:
        assert seen.width > 100
    (tmp_path / "no.png").write_text("not an image")
    with pytest.raises(UserError, match="cannot be read as an image"):
        of_files(Bundle.read(folder), [tmp_path / "no.png"], out)


# Where torchvision was built for another torch, timm can be imported only once these operators are declared.
MEND = """
import torch
library = torch.library.Library("torchvision", "FRAGMENT")
for name in ("nms", "qnms"):
    library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""
ALONE = """
import runpy, sys
sys.modules["fedloom"] = None
script, sys.argv = sys.argv[1], ["load.py", sys.argv[2]]
runpy.run_path(script, run_name="__main__")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    [
        "{name: tiny-vit, width: 16, depth: 1}",
        "{name: timm, architecture: resnet10t, pretrained: false}",
        "{name: vit, architecture: vit_tiny_patch16_224, pretrained: false}",
    ],
)
def test_without_fedloom(quick: Quick, tmp_path: Path, model: str) -> None:
    pytest.importorskip("fedloom.models.timm_encoder")
    broken = subprocess.run([sys.executable, "-c", "import timm"], capture_output=True).returncode
    run = quick(f"model={model}", "data.size=32", "training.rounds=1").folder
    out = export(run, tmp_path / "out")
    assert "load.py" in (out / "README.md").read_text()
    file = picture(tmp_path / "a.png")
    code = (MEND if broken else "") + ALONE
    command = [sys.executable, "-c", code, str(out / "load.py"), str(file)]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    bundle = Bundle.read(out)
    x, _, _ = inputs(bundle, file)
    with torch.inference_mode():
        outputs = bundle.module(x)
    for line in told.splitlines():
        task, _, numbers = line.removeprefix(f"{file} ").partition(" ")
        torch.testing.assert_close(torch.tensor(json.loads(numbers)), outputs[task][0], atol=1e-5, rtol=1e-4)
    assert len(told.splitlines()) == len(bundle.tasks)


@pytest.mark.slow
def test_what_is_more_than_a_network_of_timm_has_no_loader(quick: Quick, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    out = export(quick("model={name: tiny-vit, width: 16, depth: 1, lora: {rank: 2}}").folder, tmp_path / "out")
    assert not (out / "load.py").exists()
    assert "load.py" not in (out / "README.md").read_text()


def card(*arguments: object, **options: Any) -> str:
    return (export(*arguments, **options) / "README.md").read_text()  # type: ignore[arg-type]


def test_the_card_says_what_there_is_to_know(quick: Quick, tmp_path: Path) -> None:
    run = quick()
    text = card(run.folder, tmp_path / "a", licence="cc-by-4.0")
    assert text.startswith("---\nlicense: cc-by-4.0\n")
    assert "inherit" in text
    assert "license: unknown" in card(run.folder, tmp_path / "b")
    sent, about = run.run.bytes_total(), run.run.info["clients"]
    assert f"{human_bytes(sent['up'])} by clients, {human_bytes(sent['down'])} to clients" in text
    for split in ("train", "val"):
        sizes = [client[split] for client in about.values()]
        each = f"{min(sizes)} to {max(sizes)}" if len(set(sizes)) > 1 else f"{sizes[0]}"
        assert f"| {split} | {sum(sizes):,} | {each} |" in text
    assert "| test (shared) | 359 | 359 |" in text
    assert "Method: fedavg; seed 0;" in text
    client = next(iter(about))
    assert f"of client {client} |" in card(run.folder, tmp_path / "c", client=client)
    for bad in ("a: b", "", "x\ny"):
        with pytest.raises(UserError, match="expected an identifier"):
            export(run.folder, tmp_path / "d", licence=bad)


def test_the_card_of_the_shared_model_has_its_own_numbers(quick: Quick, tmp_path: Path) -> None:
    """Where clients have personal models as well, which are what a run is judged by."""
    run = quick("method=ditto")
    text = card(run.folder, tmp_path / "all")
    value = re.search(r"digit \(loss\) ↓ \| ([\d.]+)", text)
    assert value is not None
    each = [
        m["value"]
        for m in run.run.rounds[-1]["metrics"]
        if (m["model"], m["split"], m["task"], m["metric"]) == ("global", "test", "digit", "loss")
        and (m["client"] is None or "digit" in run.run.info["clients"][m["client"]]["tasks"])
    ]
    assert float(value[1]) == pytest.approx(sum(each) / len(each), abs=1e-4)
    alone = quick("method=ditto", "evaluation.models=[personal]")
    assert "did not measure this model" in card(alone.folder, tmp_path / "unmeasured")


def test_the_card_of_a_tasks_model(quick: Quick, tmp_path: Path) -> None:
    run = quick("method=matu").folder
    with pytest.raises(UserError, match="choose a task with --task"):
        export(run, tmp_path / "x")
    assert "This is the model of task digit of a federated run" in card(run, tmp_path / "digit", task="digit")


def test_names_cannot_break_the_card() -> None:
    """Clients are named after folders, which may have any name."""
    assert _plain("x|<b>\n\n# [y](http://z) `c` *d*") == r"x\|\<b\> # \[y\](http://z) \`c\` \*d\*"
    assert _plain("digit-0") == "digit-0"


def test_a_model_of_vectors_predicts_arrays(quick: Quick, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(0)
    labels = {f"y_{s}": rng.integers(0, 2, n) for s, n in (("train", 40), ("test", 10))}
    arrays = {f"x_{s[2:]}": (rng.normal(3, 2, (len(y), 5)) + 4 * y[:, None]).astype("f4") for s, y in labels.items()}
    np.savez(tmp_path / "rows.npz", **arrays, **labels)
    data = f"data={{name: arrays, path: {tmp_path / 'rows.npz'}, images: 'x_{{split}}', labels: {{t: 'y_{{split}}'}}}}"
    run = quick(data, "partition={name: iid, clients: 2}", "model={name: mlp}").folder
    out = export(run, tmp_path / "out")
    assert "fedloom predict . inputs.npy" in (out / "README.md").read_text()
    bundle = Bundle.read(out)
    with pytest.raises(UserError, match="which are not images"):
        of_files(bundle, [picture(tmp_path / "a.png")], tmp_path / "p.png")
    np.save(tmp_path / "new.npy", arrays["x_test"])
    answers = of_files(bundle, [tmp_path / "new.npy"], tmp_path / "p.png")
    assert answers.picture is None
    found = pd.read_csv(answers.table)
    assert [*found.columns] == ["input", "t", "p(t=0)", "p(t=1)"]
    assert [*found["input"]][1] == f"{tmp_path / 'new.npy'} [1]"
    assert (found["t"] == labels["y_test"]).mean() == pytest.approx(Run.read(run).final().values["t"]["accuracy"])
    for wrong, match in {
        "more": (arrays["x_test"][:, :4], r"inputs of shape \(4,\) found, expected \(5,\)"),
        "nan": (np.full((2, 5), np.nan, np.float32), "NaN or infinity"),
        "text": (np.array(["a"]), "expected numbers|expected features"),
        "object": (np.array([None]), "cannot be read as a plain array"),
    }.items():
        np.save(tmp_path / f"{wrong}.npy", match[0], allow_pickle=True)
        with pytest.raises(UserError, match=match[1]):
            of_files(bundle, [tmp_path / f"{wrong}.npy"], tmp_path / "p.png")


def test_an_export_that_was_changed_is_refused(quick: Quick, tmp_path: Path) -> None:
    about = export(quick("training.rounds=1").folder, tmp_path / "all") / "export.json"
    right = json.loads(about.read_text())
    for key, wrong in {"mean": [0.5] * 7, "std": [0.0], "input_shape": [1, 0, 8], "tasks": 3}.items():
        about.write_text(json.dumps({**right, key: wrong}))
        with pytest.raises(StateError, match=rf"export.json.*\n.*{key}|export.json.*{key}"):
            Bundle.read(about.parent)
    about.write_text(json.dumps(right))
    weights = about.with_name("model.safetensors")
    weights.write_bytes((content := weights.read_bytes())[:-1] + bytes([content[-1] ^ 64]))
    with pytest.raises(StateError, match=r"model.safetensors was changed after the export: its sha256 is \w{64}, "):
        Bundle.read(about.parent)
    del right["weights_sha256"]  # an earlier version wrote none
    about.write_text(json.dumps(right))
    Bundle.read(about.parent)


def test_each_set_of_images_is_normalised_by_itself(quick: Quick, tmp_path: Path) -> None:
    data = "data={name: digits-many, count: 2, limit: 40}"
    done = quick(data, "partition={name: task-dirichlet, clients: 4, min_examples: 2}")
    names = list(done.run.info["tasks"])
    with pytest.raises(UserError, match=r"normalised in 2 ways.*choose one task with --task"):
        export(done.folder, tmp_path / "all")
    bundles = [Bundle.read(export(done.folder, tmp_path / name, task=name)) for name in names]
    assert bundles[0].about.mean != bundles[1].about.mean
    recipe = load_recipe(data)
    test = load_data(recipe.data, recipe.seed).test
    for name, bundle in zip(names, bundles, strict=True):
        where = torch.from_numpy(np.flatnonzero(test.labels_of(name) >= 0)[:1])
        x, _ = test.batch(where, torch.device("cpu"))
        raw = pictures(test, x, where)[0]
        file = tmp_path / f"{name}.png"
        image.fromarray(raw).save(file)
        torch.testing.assert_close(inputs(bundle, file)[0], x)


def test_the_hub_gets_a_configuration_and_results_in_the_head_of_the_card(quick: Quick, tmp_path: Path) -> None:
    result = quick()
    plain = export(result.folder, tmp_path / "plain")
    out = tmp_path / "hub"
    asked = CliRunner().invoke(app, ["export", str(result.folder), "--hub-format", "--license", "mit", "-o", str(out)])
    assert asked.exit_code == 0, asked.output
    assert {path.name for path in out.iterdir()} == {path.name for path in plain.iterdir()} | {"config.json"}
    head = yaml.safe_load((out / "README.md").read_text("utf-8").split("---")[1])
    assert (head["license"], head["library_name"]) == ("mit", "fedloom")
    (model,) = head["model-index"]
    measured = {r["task"]["name"]: {m["type"]: m["value"] for m in r["metrics"]} for r in model["results"]}
    assert measured == {task: pytest.approx(dict(values), abs=1e-6) for task, values in result.final().values.items()}
    assert "model-index" not in (plain / "README.md").read_text("utf-8")
    config = json.loads((out / "config.json").read_text("utf-8"))
    assert (config["model_type"], config["licence"]) == ("fedloom", "mit")
    assert [task["name"] for task in config["tasks"]] == [*measured]
    assert [task.name for task in Bundle.read(out).tasks] == [*measured]


def _npz(tmp_path: Path, images: np.ndarray, **labels: np.ndarray) -> dict[str, object]:
    """A recipe's data section of images, half of them for the test."""
    half = len(images) // 2
    arrays = {"x_train": images[:half], "x_test": images[half:]}
    for task, label in labels.items():
        arrays |= {f"{task}_train": label[:half], f"{task}_test": label[half:]}
    np.savez(tmp_path / "images.npz", **arrays)
    named = {task: f"{task}_{{split}}" for task in labels}
    return {"name": "arrays", "path": str(tmp_path / "images.npz"), "images": "x_{split}", "labels": named}


def _bright(count: int = 80) -> tuple[np.ndarray, np.ndarray]:
    """Images (uint8), every second one bright, and whether they are."""
    rng = np.random.default_rng(0)
    bright = np.arange(count) % 2
    return (rng.integers(0, 100, (count, 16, 16)) + 150 * bright[:, None, None]).astype(np.uint8), bright


TRAINED = {
    "name": "t",
    "model": "small-cnn",
    "method": "fedavg",
    "training": {"rounds": 4, "optimizer": {"name": "adam", "lr": 0.01}},
}


@pytest.mark.parametrize(("scale", "reads"), [(1.0, True), (1 / 255, True), (1 / 64, False)])
def test_files_predict_what_the_run_measured_or_nothing(tmp_path: Path, scale: float, reads: bool) -> None:
    """Bytes and their shares of 255 are what files become; of other floats nobody knows the scale."""
    images, bright = _bright()
    inputs_of = images if scale == 1.0 else (images * scale).astype(np.float32)
    data = _npz(tmp_path, inputs_of, bright=bright)
    run = fl.run({**TRAINED, "data": data, "partition": {"name": "iid", "clients": 2}}, tmp_path / "run")
    out = export(run.folder, tmp_path / "out")
    bundle, files = Bundle.read(out), [tmp_path / f"{i}.png" for i in range(40)]
    for file, pixels in zip(files, images[40:], strict=True):
        image.fromarray(pixels).save(file)
    if not reads:
        assert "no files of pictures" in (out / "README.md").read_text()
        with pytest.raises(UserError, match="trained on other values than 0 to 1"):
            of_files(bundle, files, tmp_path / "p.png")
    measured = run.final().values["bright"]["accuracy"]
    assert measured > 0.9
    as_trained, otherwise = (tmp_path / f"{name}.npy" for name in ("as", "otherwise"))
    np.save(as_trained, inputs_of[40:])
    np.save(otherwise, (images * 5.0)[40:].astype(np.float32) if reads else images[40:])
    with pytest.raises(UserError, match="found, but the model was trained on"):
        of_files(bundle, [otherwise], tmp_path / "p.png")
    for several in ([as_trained], files if reads else []):
        if several:
            table = pd.read_csv(of_files(bundle, several, tmp_path / "p.png").table)
            assert (table["bright"] == bright[40:]).mean() == pytest.approx(measured)


def test_several_labels_and_names_of_classes_are_predicted(tmp_path: Path) -> None:
    images, bright = _bright()
    for number, name in enumerate(("dark", "light")):
        for split in ("train", "test"):
            (tmp_path / "sets" / "s" / split / name).mkdir(parents=True)
        for place, pixels in enumerate(images[bright == number]):
            file = tmp_path / "sets" / "s" / ("test" if place > 20 else "train") / name / f"{place}.png"
            image.fromarray(np.repeat(np.repeat(pixels, 3, 0), 2, 1)).save(file)  # 48 x 32
    data = {"name": "class-folders", "root": str(tmp_path / "sets"), "sets": ["s"], "size": 16, "fit": "crop"}
    run = fl.run({**TRAINED, "data": data, "partition": {"name": "iid", "clients": 2}}, tmp_path / "run")
    bundle = Bundle.read(export(run.folder, tmp_path / "out"))
    files = sorted((tmp_path / "sets" / "s" / "test").rglob("*.png"))
    texts = [text["s"] for _, text in of_files(bundle, files, tmp_path / "p.png").words]
    assert {text.split(" (")[0] for text in texts} <= {"class dark", "class light"}
    hits = [text.startswith(f"class {file.parent.name}") for text, file in zip(texts, files, strict=True)]
    assert np.mean(hits) == pytest.approx(run.final().values["s"]["accuracy"])
    built = reopen(run.folder)[0]
    place = [Path(file).name for file in built.dataset.test.files].index(files[0].name)
    x = built.dataset.test.batch(torch.tensor([place]), torch.device("cpu"))[0]
    assert torch.allclose(inputs(bundle, Path(built.dataset.test.files[place]))[0], x, atol=1e-6)


SEVERAL = """
import numpy as np
import fedloom as fl

def several() -> fl.Federation:
    images = np.load({file!r})
    bright = np.arange(len(images)) % 2
    seen = np.stack([bright, 1 - bright, np.zeros_like(bright)], 1).astype(np.float32)
    images = images[:, None]
    sites = {{f"s{{i}}": fl.Client((images[i * 40 :][:40], {{"seen": seen[i * 40 :][:40]}})) for i in range(2)}}
    return fl.Federation(sites, tasks={{"seen": fl.task(kind="multilabel", classes=3)}})
"""


def test_an_image_may_show_several_things_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images, _ = _bright()
    np.save(tmp_path / "images.npy", images)
    (tmp_path / "several_labels.py").write_text(SEVERAL.format(file=str(tmp_path / "images.npy")))
    monkeypatch.syspath_prepend(tmp_path)
    run = fl.run({**TRAINED, "data": "several_labels:several", "partition": "own"}, tmp_path / "run", rounds=8)
    bundle = Bundle.read(export(run.folder, tmp_path / "out"))
    image.fromarray(images[1]).save(tmp_path / "a.png")
    answers = of_files(bundle, [tmp_path / "a.png"], tmp_path / "p.png")
    ((_, words),) = answers.words
    assert [*pd.read_csv(answers.table).columns] == ["input", *(f"p(seen={label})" for label in range(3))]
    shares = [int(part.split()[1].rstrip("%")) for part in words["seen"].split(", ")]
    assert len(shares) == 3
    assert shares[0] > 50 > shares[1]
    assert shares[2] < 50


OUTLINES = """
import fedloom as fl

def outlines() -> fl.Federation:
    site = lambda name: (f"{top}/{{name}}/images", {{"outline": f"{top}/{{name}}/masks"}})
    sites = {{name: fl.Client(site(name)) for name in ("a", "b")}}
    return fl.Federation(sites, {{"outline": fl.task(kind="segmentation", classes=2)}}, test=site("new"))
"""


@pytest.mark.parametrize("depth", [np.uint8, np.uint16])
def test_masks_are_written_at_the_images_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, depth: Any) -> None:
    """What the masks say has the score that the run measured; files that cannot be read are named and left out."""
    rng = np.random.default_rng(0)
    for site, count in {"a": 16, "b": 16, "new": 6}.items():
        for kind in ("images", "masks"):
            (tmp_path / site / kind).mkdir(parents=True)
        for number in range(count):
            mask = np.repeat(np.arange(32)[None] < rng.integers(8, 30), 32, 0)
            pixels = (rng.integers(0, 90, (32, 32)) + 150 * mask) * (1 if depth is np.uint8 else 200)
            image.fromarray(pixels.astype(depth)).save(tmp_path / site / "images" / f"{number}.png")
            image.fromarray(mask.astype(np.uint8) * 255).save(tmp_path / site / "masks" / f"{number}.png")
    (tmp_path / f"outlines_{depth.__name__}.py").write_text(OUTLINES.format(top=tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    data = {"data": f"outlines_{depth.__name__}:outlines", "partition": "own", "model": "tiny-pyramid"}
    run = fl.run({**TRAINED, **data}, tmp_path / "run", rounds=9, lr=0.003)
    out, new = export(run.folder, tmp_path / "bundle"), tmp_path / "new" / "images"
    (new / "damaged.png").write_bytes(b"no picture")
    done = CliRunner().invoke(app, ["predict", f"{out}", f"{new}", "--out", f"{tmp_path / 'p.png'}", "--json"])
    assert done.exit_code == 1
    assert "left out" in done.stderr
    found = json.loads(done.stdout)
    assert [*found["unread"]] == [f"{new / 'damaged.png'}"]
    assert found["maps"] == [f"{tmp_path / 'p' / 'outline' / f'{number}.png'}" for number in range(6)]
    assert (tmp_path / "p.png").stat().st_size > 1000
    predicted = np.stack([pixels_of(Path(file), as_label=True)[0, 0] for file in found["maps"]])
    truth = np.stack([pixels_of(new.parent / "masks" / f"{n}.png", as_label=True)[0, 0] > 0 for n in range(6)])
    both = [((predicted == k) & (truth == k)).sum() / ((predicted == k) | (truth == k)).sum() for k in (0, 1)]
    assert np.mean(both) == pytest.approx(run.final().values["outline"]["miou"])
    assert np.mean(both) > 0.6
    larger = tmp_path / "larger.png"
    image.fromarray(pixels.astype(depth)).resize((48, 64)).save(larger)
    if depth is np.uint16:
        with pytest.raises(UserError, match=r"float32 of shape \(1, 64, 48\) found, expected more than 8 bits"):
            of_files(Bundle.read(out), [larger], tmp_path / "q.png")
        return
    (map_of,) = of_files(Bundle.read(out), [larger], tmp_path / "q.png").maps
    assert pixels_of(map_of, as_label=True).shape == (1, 1, 64, 48)
    larger.with_suffix(".bmp").write_bytes(larger.read_bytes())
    with pytest.raises(UserError, match="would have maps of one name"):
        of_files(Bundle.read(out), [larger, larger.with_suffix(".bmp")], tmp_path / "q.png")
    with pytest.raises(UserError, match="where predictions go"):
        of_files(Bundle.read(out), [new], tmp_path / "new.png")


def test_a_result_of_data_made_in_python_is_exported_as_it_is(tmp_path: Path) -> None:
    """The run's folder has no data from which it could be built again."""
    rng = np.random.default_rng(0)
    x, y = torch.tensor(rng.normal(size=(60, 5)), dtype=torch.float32), torch.tensor(rng.integers(0, 2, 60))
    clients = {name: fl.Client((x[at : at + 20], y[at : at + 20])) for name, at in {"a": 0, "b": 20}.items()}
    fed = fl.Federation(clients, {"t": fl.task(classes=2)}, test=(x[40:], y[40:]))
    result = fl.run(fed, tmp_path / "run", rounds=2, lr=0.05)
    bundle = Bundle.read(fl.export(result, tmp_path / "out"))
    np.save(tmp_path / "new.npy", x[40:].numpy())
    found = pd.read_csv(of_files(bundle, [tmp_path / "new.npy"], tmp_path / "p.png").table)
    assert (found["t"].to_numpy() == y[40:].numpy()).mean() == pytest.approx(result.final().values["t"]["accuracy"])
    with pytest.raises(UserError, match="is a Python object"):
        fl.export(tmp_path / "run", tmp_path / "again")
    own = fl.run(fed, tmp_path / "own", model=fl.model(torch.nn.Linear(5, 4), heads="linear"), rounds=1)
    with pytest.raises(UserError, match=r"made in Python.*`Result.model` returns it"):
        fl.export(own, tmp_path / "again")


def test_series_are_predicted_in_the_axes_of_their_file(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    y = rng.integers(0, 2, 120)
    x = (rng.normal(5, 1, (120, 20, 3)) + 2 * y[:, None, None] * (np.arange(3) == 1)).astype(np.float32)
    np.savez(tmp_path / "pool.npz", x=x, y=y)
    data = {"name": "arrays", "path": str(tmp_path / "pool.npz"), "images": "x", "labels": {"t": "y"}, "axes": "NTC"}
    recipe = {**TRAINED, "data": {**data, "test_fraction": 0.3}, "partition": {"name": "iid", "clients": 2}}
    run = fl.run({**recipe, "model": {"name": "conv1d", "depth": 1}}, tmp_path / "run")
    bundle, built = Bundle.read(export(run.folder, tmp_path / "out")), reopen(run.folder)[0]
    np.save(tmp_path / "whole.npy", x)
    predicted = pd.read_csv(of_files(bundle, [tmp_path / "whole.npy"], tmp_path / "p.png").table)["t"].to_numpy()
    test = built.dataset.test
    places = [int(np.flatnonzero((x == raw.T).all((1, 2)))[0]) for raw in test.images.numpy()]
    assert (predicted == y)[places].mean() == pytest.approx(run.final().values["t"]["accuracy"])
    assert (predicted == y)[places].mean() > 0.8
    np.save(tmp_path / "turned.npy", x.transpose(0, 2, 1))
    with pytest.raises(UserError, match="expected \\(3, 20\\), as in training; exchange the last two axes"):
        of_files(bundle, [tmp_path / "turned.npy"], tmp_path / "p.png")


def _predicted(bundle: Bundle, array: Any, folder: Path) -> pd.DataFrame:
    """Predict an array as an .npy file."""
    np.save(folder / "rows.npy", array)
    return pd.read_csv(of_files(bundle, [folder / "rows.npy"], folder / "rows-out.png").table)


def test_archives_of_tables_are_predicted_from_their_own_numbers(tmp_path: Path) -> None:
    """They are standardised when they are read, so that the bundle has to know by what."""
    rng = np.random.default_rng(0)
    x = rng.normal(1000, 300, (90, 4))
    y, who = x[:, 0] * 2 + rng.normal(0, 30, 90), np.arange(90) % 2
    np.savez(tmp_path / "t.npz", x=x, y=y, who=who)
    keys = {"features": "x", "targets": "y", "task_by": "who", "test_fraction": 0.3}
    data = {"name": "tables", "path": str(tmp_path / "t.npz"), "kind": "regression", **keys}
    recipe = {**TRAINED, "data": data, "model": "mlp", "partition": {"name": "domains", "clients": 1}}
    run = fl.run(recipe, tmp_path / "run", rounds=10)
    bundle, test = Bundle.read(export(run.folder, tmp_path / "out")), reopen(run.folder)[0].dataset.test
    found = _predicted(bundle, x, tmp_path)
    scaled = (x - x.mean(0)) / x.std(0)
    for task, values in run.final().values.items():
        index = np.flatnonzero(~np.isnan(test.labels[task].numpy()))
        places = [int(np.abs(scaled - each).sum(1).argmin()) for each in test.images.numpy()[index]]
        truth = test.labels[task].numpy()[index]
        off = found[task].to_numpy()[places] - truth
        assert np.sqrt(np.mean(off**2)) == pytest.approx(values["rmse"], rel=0.1)


def test_bytes_are_no_other_numbers(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    y = rng.integers(0, 2, 80)
    x = (rng.integers(0, 60, (80, 6)) + 90 * y[:, None]).astype(np.uint8)
    np.savez(tmp_path / "t.npz", x=x, y=y)
    data = {
        "name": "arrays",
        "path": str(tmp_path / "t.npz"),
        "images": "x",
        "labels": {"t": "y"},
        "test_fraction": 0.3,
    }
    recipe = {**TRAINED, "model": "mlp", "partition": {"name": "iid", "clients": 2}}
    for kind in ("uint8", "float32"):
        np.savez(tmp_path / "t.npz", x=x.astype(kind), y=y)
        run = fl.run({**recipe, "data": data}, tmp_path / kind)
        bundle = Bundle.read(export(run.folder, tmp_path / f"{kind}-out"))
        assert (_predicted(bundle, x.astype(kind), tmp_path)["t"] == y).mean() > 0.9
        with pytest.raises(UserError, match="found, but the model was trained on .*uint8"):
            _predicted(bundle, x.astype("float32" if kind == "uint8" else "uint8"), tmp_path)
    with pytest.raises(UserError, match=r"shape \(0, 6\) found, expected N x 6 with N above 0"):
        _predicted(bundle, x[:0].astype("float32"), tmp_path)
    np.save(tmp_path / "big.npy", x[:3].astype("float32"))
    (tmp_path / "BIG.NPY").write_bytes((tmp_path / "big.npy").read_bytes())
    np.save(tmp_path / "BIG.npy", x.astype("float32"))
    assert len(of_files(bundle, [tmp_path / "BIG.NPY"], tmp_path / "b.png").words) == 3
    for method, client in ({"name": "constant"}, None), ({"name": "fedmd", "public": 10}, "c00"):
        other = fl.run({**recipe, "data": data, "method": method}, tmp_path / method["name"], rounds=1)
        out = export(other.folder, tmp_path / f"{method['name']}-out", client)
        assert len(_predicted(Bundle.read(out), x.astype("float32"), tmp_path)) == 80


def test_dense_images_are_padded_as_in_training_and_nothing_is_overwritten(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    masks = np.repeat((np.arange(48)[None] < rng.integers(8, 44, 40)[:, None])[:, None], 40, 1).astype(np.uint8)
    x = (rng.integers(0, 90, (40, 40, 48, 3)) + 120 * masks[..., None]).astype(np.uint8)
    np.savez(tmp_path / "a.npz", x_train=x[:28], x_test=x[28:], m_train=masks[:28], m_test=masks[28:])
    dense = {"seg": {"kind": "semseg", "key": "m_{split}"}}
    data = {"name": "arrays", "path": str(tmp_path / "a.npz"), "dense": dense, "augment": False}
    run = fl.run(
        {**TRAINED, "data": data, "model": "tiny-pyramid", "partition": {"name": "iid", "clients": 2}}, tmp_path / "r"
    )
    bundle = Bundle.read(export(run.folder, tmp_path / "out"))
    assert bundle.about.pixels == "pad"
    files = [tmp_path / "in" / f"{number}.png" for number in range(12)]
    files[0].parent.mkdir()
    for file, pixels in zip(files, x[28:], strict=True):
        image.fromarray(pixels).save(file)
    np.save(tmp_path / "in.npy", x[28:])
    maps = of_files(bundle, files, tmp_path / "p.png").maps
    predicted = np.stack([np.asarray(image.open(file)) for file in maps])
    (whole,) = of_files(bundle, [tmp_path / "in.npy"], tmp_path / "q.png").maps
    assert (np.load(whole) == predicted).mean() > 0.999
    truth = masks[28:]
    both = [((predicted == k) & (truth == k)).sum() / ((predicted == k) | (truth == k)).sum() for k in (0, 1)]
    assert np.mean(both) == pytest.approx(run.final().values["seg"]["miou"], abs=1e-6)
    image.fromarray(np.tile(x[0], (3, 2, 1))).save(tmp_path / "large.png")
    (large,) = of_files(bundle, [tmp_path / "large.png"], tmp_path / "l.png").maps
    assert np.asarray(image.open(large)).shape == (120, 96)

    (tmp_path / "drawn" / "seg").mkdir(parents=True)
    (tmp_path / "drawn" / "seg" / "0.png").write_bytes(b"by hand")
    with pytest.raises(UserError, match="holds other files"):
        of_files(bundle, files, tmp_path / "drawn.png")
    (tmp_path / "link").symlink_to(tmp_path / "in")
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "predictions.csv").touch()
    (tmp_path / "s" / "seg").symlink_to(tmp_path / "in")
    with pytest.raises(UserError, match="inputs lie in"):
        of_files(bundle, [tmp_path / "link"], tmp_path / "s.png")
    with pytest.raises(UserError, match="expected the name of a picture"):
        of_files(bundle, files, tmp_path / "x.v1")
