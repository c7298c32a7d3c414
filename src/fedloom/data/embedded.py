"""What a frozen encoder makes of a data set's inputs, computed once: training then costs what its last layers cost."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator

from fedloom.core.errors import DataError
from fedloom.data.kept import kept
from fedloom.data.prepare import Array, cache_folder
from fedloom.data.registry import DATASETS
from fedloom.data.several import load
from fedloom.models.encoders import ENCODERS

if TYPE_CHECKING:
    from torch import Tensor

    from fedloom.data.dataset import Dataset, Examples
    from fedloom.models.nets import Encoder

BATCH = 128  # images that pass the encoder together


@DATASETS.register("embedded", source="the linear-probe protocol: features of an encoder that does not change")
def embedded(
    seed: int,
    *,
    of: Annotated[dict[str, Any], AfterValidator(DATASETS.fits)],
    encoder: Annotated[dict[str, Any], AfterValidator(ENCODERS.fits)],
    weights: str | None = None,
) -> Dataset:
    """The data set `of`, {name: a data set, its parameters}, with an encoder's features in the place of its inputs.

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
    from fedloom.data.joined import JoinedExamples
    from fedloom.models.build import build_model

    data = load(seed, of)
    if dense := [task.name for task in data.tasks if task.dense]:
        raise DataError(f"embedded: features have no positions, which the dense task {dense[0]!r} asks for")
    if isinstance(data.train, JoinedExamples):
        raise DataError(f"embedded: data {data.name!r} has inputs of several shapes, expected one; see `many`")
    params = {key: value for key, value in encoder.items() if key != "name"}
    model = build_model(encoder["name"], params, data.input_shape, data.tasks, seed, weights, signal=data.signal)
    net = model.encoder.eval()
    train, test = (_features(net, part) for part in (data.train, data.test))
    std, mean = torch.std_mean(train, 0, correction=0)

    def part(rows: Tensor, of: Examples) -> Examples:
        return TensorExamples((rows - mean) / std.clamp(min=1e-6), _labels(of, data), of.domain)

    both = part(train, data.train), part(test, data.test)
    return Dataset(f"embedded-{data.name}", data.tasks, *both, data.domains, data.deal)


def _features(net: Encoder, part: Examples) -> Tensor:
    """What the encoder gives for each input of a part, N x F; from the cache where it is there."""
    import torch

    from fedloom.data.dataset import contents, tensor_digest

    def rows(index: Tensor) -> Tensor:
        out: Tensor | list[Tensor] = net(_seen(net, part, index))
        # Of feature maps, finest first, the last one tells most about the whole image.
        return out[-1].mean((2, 3)) if isinstance(out, list) else out

    def made() -> dict[str, Array]:
        with torch.inference_mode():
            return {"features": torch.cat([rows(index) for index in torch.arange(len(part)).split(BATCH)]).numpy()}

    digest = hashlib.sha256(repr(net).encode())  # the encoder, its weights and the data
    for name, value in net.state_dict().items():
        digest.update(name.encode() + tensor_digest(value))
    digest.update(part.fingerprint() + contents(part))
    place = cache_folder() / "embedded" / digest.hexdigest()[:20]
    return torch.from_numpy(kept(place, made)["features"])


def _seen(net: Encoder, part: Examples, index: Tensor) -> Tensor:
    """The inputs at `index`, normalised as the encoder's weights want it where that is known."""
    import torch

    from fedloom.data.preview import normal

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


def _labels(part: Examples, data: Dataset) -> dict[str, Tensor]:
    """{task: the labels of all examples}."""
    import torch

    names = [task.name for task in data.tasks]
    batches = [part.batch(index, torch.device("cpu"), None, names)[1] for index in torch.arange(len(part)).split(BATCH)]
    return {name: torch.cat([labels[name] for labels in batches]) for name in names}
