"""Encoders from timm: the layout of their feature maps, their input sizes and their weights files."""

from __future__ import annotations

import os
import pickle
import sys
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedloom.errors import RecipeError, UserError, nearest
from fedloom.extras import need
from fedloom.models.nets import PyramidEncoder

WEIGHTS = "FEDLOOM_WEIGHTS"


class TimmPyramid(PyramidEncoder):
    """A timm architecture as a pyramid: its maps at strides of 4 and more (the last of each stride), B x C x H x W.

    Swin transformers get a LayerNorm on every map, as the reference backbone of dense prediction has (Swin-T then has
    27,520,698 parameters), accept inputs of any size that is a multiple of 32, and have no float buffers. A window is
    never larger than the map it was built for, so `shape` decides the shapes of Swin's bias tables.

    `weights` is a .safetensors file or a .pth file without pickled code. `overrides` goes to timm.create_model.
    """

    def __init__(
        self,
        architecture: str,
        shape: tuple[int, int, int],
        dim: int | None = None,
        drop_path: float | None = None,
        weights: Path | None = None,
        **overrides: Any,
    ) -> None:
        super().__init__()
        timm = need("timm", "vision")
        if not timm.is_model(architecture):
            hint = nearest(architecture.split(".")[0], timm.list_models())
            raise RecipeError(f"timm: unknown architecture {architecture!r}.{hint}")
        swin = architecture.startswith("swin")
        if swin:
            # The shifted windows' masks are then made for the map at hand, not kept as buffers for one size.
            overrides = {"img_size": shape[1:], "strict_img_size": False, **overrides}
        if drop_path is None and swin:
            drop_path = 0.1
        if drop_path is not None:
            overrides["drop_path_rate"] = drop_path
        try:
            net = timm.create_model(architecture, pretrained=False, in_chans=shape[0], num_classes=0, **overrides)
        except TypeError as error:
            raise RecipeError(f"timm, {architecture!r}: {error}") from None
        whole = set(net.state_dict())
        info = [(level["num_chs"], level["reduction"]) for level in getattr(net, "feature_info", ())]
        levels = {stride: number for number, (_, stride) in enumerate(info) if stride >= 4}
        if len(levels) < 2 or not hasattr(net, "forward_intermediates"):
            raise RecipeError(
                f"timm, {architecture!r}: expected feature maps at several strides, found {sorted(levels)}"
            )
        self.strides = tuple(sorted(levels))
        self.levels = [levels[stride] for stride in self.strides]
        self.channels = tuple(info[level][0] for level in self.levels)
        self.features = self.channels[-1]
        self.dim = dim or min(128, max(32, self.channels[0]))
        net.prune_intermediate_layers(self.levels, prune_norm=True, prune_head=True)
        self.net = net
        self.norms = nn.ModuleList(nn.LayerNorm(c) for c in self.channels) if swin else None
        if weights is not None:
            _load(self, whole, weights)
        self._check(f"timm {timm.__version__}, {architecture!r}", shape[0])

    def _check(self, what: str, channels: int) -> None:
        """Compare the maps with their description: versions of timm number some architectures' maps differently."""
        side = 2 * self.strides[-1]
        with torch.no_grad():
            found = [tuple(m.shape[1:3]) for m in self.eval()(torch.zeros(1, channels, side, side))]
        self.train()
        expected = [(c, side // s) for c, s in zip(self.channels, self.strides, strict=True)]
        if found != expected:
            raise RecipeError(f"{what}: expected maps of (channels, height) {expected}, found {found}; update timm")

    def forward(self, x: Tensor) -> list[Tensor]:
        """B x C x H x W to feature maps (B x C_i x H/s_i x W/s_i), finest first."""
        maps: list[Tensor] = self.net.forward_intermediates(
            x, indices=self.levels, output_fmt="NCHW", intermediates_only=True
        )
        if self.norms is None:
            return maps
        return [norm(m.permute(0, 2, 3, 1)).permute(0, 3, 1, 2) for norm, m in zip(self.norms, maps, strict=True)]


def weights_file(architecture: str, pretrained: bool, weights: str | None) -> Path | None:
    """The file to load, or None. UserError where weights are wanted and no file is there; nothing is downloaded."""
    if weights is not None:
        file = Path(weights).expanduser()
        if not file.is_file():
            raise UserError(f"timm: weights file {file} is absent")
        return file
    if not pretrained:
        return None
    folder = Path(os.environ.get(WEIGHTS, "~/.cache/fedloom/weights")).expanduser()
    file = folder / f"{architecture}.safetensors"
    if file.is_file():
        return file
    timm = need("timm", "vision")
    hub = timm.get_pretrained_cfg(architecture) if timm.is_model(architecture) else None
    name = getattr(hub, "hf_hub_id", None) or f"timm/{architecture}"
    raise UserError(
        f"timm: pretrained weights of {architecture!r} are absent: expected {file}. A run downloads nothing. Where "
        f"there is a network: pip install huggingface_hub && hf download {name} model.safetensors --local-dir "
        f"'{folder}' && mv '{folder / 'model.safetensors'}' '{file}'. Or name a file with the key `weights`, or a "
        f"folder with the environment variable {WEIGHTS}."
    )


def _load(encoder: TimmPyramid, whole: set[str], file: Path) -> None:
    """Load timm's own weights, or a segmentation checkpoint whose backbone uses the original Swin names.

    `whole` names the tensors of the architecture before it was cut to a pyramid. UserError names what is missing,
    unexpected or of another shape; a classifier and the heads of a segmentation network are left out.
    """
    state = _read(file)
    if any(key.startswith("backbone.") for key in state):
        state = {key.removeprefix("backbone."): v for key, v in state.items() if key.startswith("backbone.")}
    net: Any = encoder.net
    norms = {f"norm{i}.{which}": f"{i}.{which}" for i in range(len(encoder.channels)) for which in ("weight", "bias")}
    found_norms = {norms[key]: state.pop(key) for key in norms if encoder.norms is not None and key in state}
    convert: Any = getattr(sys.modules[type(net).__module__], "checkpoint_filter_fn", None)
    if convert is not None:
        try:
            with warnings.catch_warnings():  # timm's resizing of bias tables warns about its own speed
                warnings.simplefilter("ignore")
                state = convert(state, net)
        except (AttributeError, LookupError, RuntimeError) as error:
            raise UserError(f"timm, weights file {file}: is not of this architecture ({error})") from error
    classifier = net.pretrained_cfg.get("classifier") or ()
    heads = tuple(f"{name}." for name in ((classifier,) if isinstance(classifier, str) else classifier))
    wanted = net.state_dict()
    state = {key: v for key, v in state.items() if not key.startswith(heads)}
    missing = sorted(key for key in wanted.keys() - state.keys() if not key.endswith("num_batches_tracked"))
    unexpected = sorted(state.keys() - whole)
    shapes = [
        f"{key}: expected shape {tuple(wanted[key].shape)}, found {tuple(state[key].shape)}"
        for key in wanted
        if key in state and wanted[key].shape != state[key].shape
    ]
    problems = [f"{what} {_few(keys)}" for what, keys in (("missing", missing), ("unexpected", unexpected)) if keys]
    if problems or shapes:
        raise UserError(f"timm, weights file {file}: {'; '.join([*problems, *shapes[:3]])}")
    net.load_state_dict({key: v for key, v in state.items() if key in wanted}, strict=False)
    if encoder.norms is not None and found_norms:
        encoder.norms.load_state_dict(found_norms)


def _read(file: Path) -> dict[str, Tensor]:
    """The tensors of a weights file, without the prefix that distributed training adds."""
    try:
        if file.suffix == ".safetensors":
            from safetensors.torch import load_file

            content: Any = load_file(file)
        else:
            content = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise UserError(
            f"timm, weights file {file}: it holds more than tensors and plain values, which could run foreign code. "
            "Save its state_dict alone, or as .safetensors."
        ) from error
    except (OSError, ValueError, RuntimeError, EOFError, zipfile.BadZipFile, _safetensors_error()) as error:
        raise UserError(f"timm, weights file {file}: cannot be read ({error})") from error
    for key in ("state_dict", "model"):
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    tensors = {key.removeprefix("module."): v for key, v in content.items() if isinstance(v, Tensor)}
    if not tensors:
        raise UserError(f"timm, weights file {file}: expected named tensors, found none")
    return tensors


def _safetensors_error() -> type[Exception]:
    from safetensors import SafetensorError

    return SafetensorError


def _few(keys: list[str]) -> str:
    more = f" and {len(keys) - 5} more" if len(keys) > 5 else ""
    return ", ".join(map(repr, keys[:5])) + more
