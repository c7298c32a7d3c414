"""The features of a frozen encoder as a data set, computed once and kept."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import AfterValidator

from fedloom.core.errors import DataError
from fedloom.data.combine import load
from fedloom.data.prepare import DATASETS, SPLITS, Array, cache_folder, digest, kept
from fedloom.models.encoders import ENCODERS

if TYPE_CHECKING:
    from torch import Tensor

    from fedloom.data.dataset import Dataset, Examples
    from fedloom.models.nets import Encoder

BATCH = 128  # images that pass an encoder together
STATED = {"arrays", "digits", "digits-many", "many", "joined-domains"}
"""Data sets of classes that follow from their parameters, the seed and the files that `path` names."""
ROOT = Path(__file__).parents[1]


@DATASETS.register("embedded", source="the linear-probe protocol: features of an encoder that does not change")
def embedded(
    seed: int,
    *,
    of: Annotated[dict[str, Any], AfterValidator(DATASETS.fits)],
    encoder: Annotated[dict[str, Any], AfterValidator(ENCODERS.fits)],
    weights: str | None = None,
) -> Dataset:
    """Replace the inputs of the data set `of`, {name: a data set, its parameters}, by an encoder's features.

    `encoder` is {name: an encoder, its parameters}, for example {name: vit, architecture: tf_efficientnet_lite0,
    pretrained: true}; `weights` is a file with its weights, as of `model.weights`. An encoder with neither is drawn
    from the seed. It sees each input once, as evaluation does (nothing is augmented), normalised as its weights want
    it where that is known. Of an encoder with feature maps the features are the mean of the last one over positions.

    Features are N x F, float32, each scaled to mean 0 and deviation 1 over the train part. They are kept in
    FEDLOOM_CACHE, so that only the first run computes them. Raises DataError for dense tasks, which features without
    positions cannot answer, and for data sets whose inputs differ in shape.
    """
    import torch

    from fedloom.data.dataset import Dataset, TensorExamples

    make = partial(_computed, seed, of, encoder, weights)
    place = _place(seed, of, encoder, weights)
    data = make(_kept) if place is None else _restored(kept(place, lambda: _stored(make(_features))))
    assert isinstance(data.train, TensorExamples)
    std, mean = torch.std_mean(data.train.images, 0, correction=0)

    def scaled(part: Any) -> Examples:
        return replace(part, images=(part.images - mean) / std.clamp(min=1e-6))

    return Dataset(
        data.name, data.tasks, scaled(data.train), scaled(data.test), data.domains, data.deal, redrawn=data.redrawn
    )


def _computed(
    seed: int,
    of: Mapping[str, Any],
    encoder: Mapping[str, Any],
    weights: str | None,
    features: Callable[[Encoder, Examples], Tensor],
) -> Dataset:
    """Load the data set and the encoder; return the data set with `features` as its inputs."""
    import torch

    from fedloom.data.dataset import Dataset, Labelled, TensorExamples
    from fedloom.models.build import build_model

    data = load(seed, of)
    if dense := [task.name for task in data.tasks if task.dense]:
        raise DataError(f"embedded: features have no positions, but the dense task {dense[0]!r} needs them")
    if not (isinstance(data.train, Labelled) and isinstance(data.test, Labelled)):
        raise DataError(f"embedded: data {data.name!r} has inputs of several shapes, expected one; see `many`")
    params = {key: value for key, value in encoder.items() if key != "name"}
    model = build_model(encoder["name"], params, data.input_shape, data.tasks, seed, weights, signal=data.signal)
    net = model.encoder.eval()

    def part(of: Any) -> Examples:
        x = features(net, of)
        labels = of.columns(torch.arange(len(x)), torch.device("cpu"), [task.name for task in data.tasks])
        return TensorExamples(x, labels, of.domain)

    both = part(data.train), part(data.test)
    return Dataset(f"embedded-{data.name}", data.tasks, *both, data.domains, data.deal, redrawn=data.redrawn)


def _place(seed: int, of: Mapping[str, Any], encoder: Mapping[str, Any], weights: str | None) -> Path | None:
    """Return the folder of a data set's features, by what determines them. Nothing is decoded for that.

    These are the sections, the seed, the contents of the files that they name, the code and its versions. None where
    one of them is known only after loading.
    """
    import torch

    from fedloom.models.nets import pretrained_file

    files = _files(of)
    if files is None or ENCODERS[encoder["name"]].package:
        return None
    if weights is not None:
        files.append(Path(weights).expanduser())
    if encoder.get("pretrained"):
        files.append(pretrained_file(encoder["architecture"]))
    if not all(file.is_file() for file in files):
        return None  # loading says what is missing
    code = sorted(
        file for room in ("data", "models") for file in (ROOT / room).rglob("*") if file.suffix in {".py", ".npz"}
    )
    versions = [torch.__version__, *(package.version for package in metadata.distributions(name="timm"))]
    key = json.dumps([seed, of, encoder, versions, len(files)], default=str).encode() + digest(files) + digest(code)
    return cache_folder() / "embedded" / hashlib.sha256(key).hexdigest()[:20]


def _files(section: Mapping[str, Any], root: str = "") -> list[Path] | None:
    """Return the files of which a data set in STATED is made; None for any other."""
    if section["name"] not in STATED:
        return None
    if "sets" in section:
        each = [_files(one, section.get("root") or "") for one in section["sets"].values()]
        return None if None in each else [file for files in each for file in files or ()]
    if "path" not in section:
        return []
    path = Path(root, section["path"]).expanduser()
    return sorted(path.glob("*.npy")) if path.is_dir() else [path]


def _stored(data: Dataset) -> dict[str, Array]:
    """Return a data set of features and classes as arrays; what is no array is JSON."""
    about = {
        "name": data.name,
        "tasks": [(task.name, task.channels) for task in data.tasks],
        "domains": data.domains,
        "redrawn": data.redrawn,
    }
    arrays = {"about": np.frombuffer(json.dumps(about).encode(), np.uint8)}
    for split in SPLITS:
        part: Any = getattr(data, split)
        arrays[f"{split}-features"] = part.images.numpy()
        arrays[f"{split}-labels"] = np.stack([part.labels[task.name].numpy() for task in data.tasks])
        if part.domain is not None:
            arrays[f"{split}-domain"] = part.domain.numpy()
    return arrays


def _restored(arrays: Mapping[str, Array]) -> Dataset:
    """Return the data set that `_stored` made arrays of."""
    import torch

    from fedloom.data.dataset import Dataset, TensorExamples
    from fedloom.models.tasks.classification import Classification

    about = json.loads(arrays["about"].tobytes())
    tasks = tuple(Classification(name, classes) for name, classes in about["tasks"])

    def part(split: str) -> Examples:
        x, columns = (torch.from_numpy(arrays[f"{split}-{what}"]) for what in ("features", "labels"))
        domain = arrays.get(f"{split}-domain")
        labels = {task.name: column for task, column in zip(tasks, columns, strict=True)}
        return TensorExamples(x, labels, None if domain is None else torch.from_numpy(domain))

    return Dataset(about["name"], tasks, part("train"), part("test"), tuple(about["domains"]), redrawn=about["redrawn"])


def _features(net: Encoder, part: Examples) -> Tensor:
    """Compute the encoder's features of each input of a part, N x F."""
    import torch

    rows = []
    with torch.inference_mode():
        for index in torch.arange(len(part)).split(BATCH):
            out: Tensor | list[Tensor] = net(_seen(net, part, index))
            # Of feature maps, finest first, the last one tells most about the whole image.
            rows.append(out[-1].mean((2, 3)) if isinstance(out, list) else out)
    return torch.cat(rows)


def _kept(net: Encoder, part: Examples) -> Tensor:
    """Return the features, from the cache if it has those of this encoder, its weights and these inputs."""
    import torch

    from fedloom.data.dataset import contents, tensor_digest

    key = hashlib.sha256(repr(net).encode())
    for name, value in net.state_dict().items():
        key.update(name.encode() + tensor_digest(value))
    key.update(part.fingerprint() + contents(part))
    place = cache_folder() / "embedded" / key.hexdigest()[:20]
    return torch.from_numpy(kept(place, lambda: {"features": _features(net, part).numpy()})["features"])


def _seen(net: Encoder, part: Examples, index: Tensor) -> Tensor:
    """Return the inputs at `index`, normalised as the encoder's weights want it where that is known."""
    import torch

    from fedloom.data.dataset import normal

    x, _ = part.batch(index, torch.device("cpu"), None, ())
    if net.seen is None:
        return x
    if x.shape[1] != len(net.seen[0]):
        raise DataError(f"embedded: the encoder's weights are for {len(net.seen[0])} channels, found {x.shape[1]}")
    shape = (-1, x.shape[1], *(1,) * (x.ndim - 2))
    if (own := normal(part, index)) is not None:
        x = x * own[1].to(x).view(shape) + own[0].to(x).view(shape)
    mean, std = (torch.tensor(list(value)).view(shape) for value in net.seen)
    return (x - mean) / std
