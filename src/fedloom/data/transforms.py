"""Images and dense labels as batches: augmented together for training, only normalised and padded for evaluation.

`Dense` does so for archives of images with label images, `Crop` for other images. The rest of this page is about the
former.

Scale, crop and flip are one map from output pixels to source pixels, separable in rows and columns, so a batch of
equal size is warped at once: bilinear for images (`grid_sample`), and for labels one gather from their compact types,
which takes nearest values exactly. The four changes of colour are linear maps, hence one 3 x 3 matrix per image:
saturation moves colours away from their luma and hue turns them around the grey axis. HSV, which the field's code
uses, differs slightly for saturated colours and takes ten times as long.

*Raw* labels, as data sets store them, B x H x W unless noted:

- semseg, human_parts: uint8 class, 255 = ignore;
- saliency, edge: uint8 0 or 1, 255 = ignore;
- depth: floating point, metres along the optical axis, 0 = no value;
- normals: B x 3 x H x W, int8 (any common factor) or floating point; x right, y up, z towards the viewer; 0 = no value.

*Ready* labels, as losses and metrics take them; 255 always means ignore:

- semseg, human_parts: int64, B x H x W. In human_parts, an image without any part is ignored as a whole;
- saliency, edge: float32, B x 1 x H x W; depth: float32, B x 1 x H x W; normals: float32, B x 3 x H x W, unit length.

The order of steps is scale, crop, flip, colour, normalise, pad at the centre (the image with the mean colour, hence 0
after normalisation), ignore.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Generator, Tensor
from torch.nn.functional import grid_sample, pad

from fedloom.data.prepare import Augment, DenseKind
from fedloom.models.tasks.task import IGNORE

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Per channel (red, green, blue) of ImageNet, for colours in 0..1."""
Size = tuple[int, int]
LUMA = (0.299, 0.587, 0.114)
Ready = tuple[Tensor, dict[str, Tensor]]
"""Inputs and {task: ready labels}."""
STRIDE = 4  # crops are judged by every fourth pixel in either direction


def raw_ignore(kind: DenseKind) -> int:
    """Return the raw value that means 'no label'."""
    return 0 if kind in ("depth", "normals") else IGNORE


def padded(size: tuple[int, int], multiple: int) -> tuple[int, int]:
    """Return the smallest height and width that hold `size` and are divisible by `multiple`."""
    return -(-size[0] // multiple) * multiple, -(-size[1] // multiple) * multiple


@dataclass(frozen=True, eq=False)
class Warp:
    """The map from pixels of an augmented batch to those of its source.

    `rows` (B x h) and `cols` (B x w) are continuous source coordinates in pixels, pixel i reaching from i to i + 1;
    those outside the source are padding. `scale` (B) is the factor of size, `flip` (B, bool) whether it is mirrored.
    """

    rows: Tensor
    cols: Tensor
    scale: Tensor
    flip: Tensor

    def to(self, device: torch.device) -> Warp:
        """Return the same on `device`."""
        return Warp(*(part.to(device) for part in (self.rows, self.cols, self.scale, self.flip)))

    def inside(self, source: tuple[int, int]) -> Tensor:
        """Return which output pixels (B x h x w, bool) show the source."""
        rows = (self.rows >= 0) & (self.rows < source[0])
        cols = (self.cols >= 0) & (self.cols < source[1])
        return rows[:, :, None] & cols[:, None, :]

    def index(self, source: tuple[int, int]) -> Tensor:
        """Return the nearest source pixel, y W + x, of every output pixel (B x h x w); outside, of the border."""
        rows = self.rows.floor().long().clamp_(0, source[0] - 1)
        cols = self.cols.floor().long().clamp_(0, source[1] - 1)
        return rows[:, :, None] * source[1] + cols[:, None, :]


def draw_warp(
    count: int, source: Size, size: Size, augment: Augment, rng: Generator, semseg: Tensor | None = None
) -> Warp:
    """Draw scale, crop to `size` and flip for `count` images of height and width `source`. `semseg` (B x H x W, raw)
    makes crops that one class fills be drawn again. All draws come from `rng`."""
    u = torch.rand(count, 2, generator=rng)
    places = torch.rand(augment.crop_tries, count, 2, generator=rng)
    scale = augment.scale[0] + (augment.scale[1] - augment.scale[0]) * u[:, 0]
    flip = u[:, 1] < augment.flip
    along = []
    for axis in (0, 1):
        # Scaled images have whole pixels, as if they were resized first.
        scaled = (source[axis] * scale).round().clamp_(min=1)
        free = scaled - size[axis]
        start = torch.where(free >= 0, -(places[:, :, axis] * (free + 1)).floor(), (-free / 2).floor())
        pixels = torch.arange(size[axis]) + 0.5
        along.append((pixels - start[:, :, None]) * (source[axis] / scaled)[:, None])
    rows, cols = along
    chosen = torch.zeros(count, dtype=torch.int64)
    if semseg is not None and augment.crop_tries > 1:
        chosen = _choose(rows, cols, semseg, augment.crop_share)
    images = torch.arange(count)
    rows, cols = rows[chosen, images], cols[chosen, images]
    return Warp(rows, torch.where(flip[:, None], cols.flip(1), cols), scale, flip)


def _choose(rows: Tensor, cols: Tensor, semseg: Tensor, share: float) -> Tensor:
    """Return the number of each image's first crop (B) in which no class fills `share`, or of its last crop."""
    tries, count = rows.shape[:2]
    source = (semseg.shape[1], semseg.shape[2])
    flat = semseg.flatten(1)
    chosen = torch.full((count,), tries - 1)
    waiting = torch.arange(count)
    for number in range(tries - 1):
        nothing = torch.zeros(len(waiting))
        crop = Warp(rows[number, waiting, ::STRIDE], cols[number, waiting, ::STRIDE], nothing, nothing.bool())
        values = flat[waiting].gather(1, crop.index(source).flatten(1)).long()
        values = torch.where(crop.inside(source).flatten(1), values, IGNORE)
        values += torch.arange(len(waiting))[:, None] * (IGNORE + 1)
        counts = torch.bincount(values.flatten(), minlength=len(waiting) * (IGNORE + 1)).view(-1, IGNORE + 1)[:, :-1]
        good = counts.amax(1) < share * counts.sum(1)
        chosen[waiting[good]] = number
        waiting = waiting[~good]
        if not len(waiting):
            break
    return chosen


def warp_image(images: Tensor, warp: Warp) -> Tensor:
    """Warp float images (B x C x H x W) bilinearly to B x C x h x w; padding repeats the border."""
    height, width = images.shape[2:]
    y = warp.rows * (2 / height) - 1
    x = warp.cols * (2 / width) - 1
    shape = (len(images), y.shape[1], x.shape[1])
    grid = torch.stack([x[:, None, :].expand(shape), y[:, :, None].expand(shape)], -1)
    return grid_sample(images, grid, mode="bilinear", padding_mode="border", align_corners=False)


def warp_label(kind: DenseKind, raw: Tensor, index: Tensor, inside: Tensor) -> Tensor:
    """Return raw labels at `index` (see Warp), ignored outside. Values are taken as they are, never mixed."""
    shape = (*raw.shape[:-2], *index.shape[-2:])
    if raw.ndim == 4:
        index, inside = index[:, None].expand(shape), inside[:, None]
    taken = raw.flatten(-2).gather(-1, index.flatten(-2)).view(shape)
    return taken.masked_fill_(~inside, raw_ignore(kind))


def draw_colours(count: int, augment: Augment, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw changes of colour: M (B x 3 x 3) and b (B x 3), to be used as M x + b on colours x in 0..1."""
    u = torch.rand(count, 8, generator=rng)
    amount = torch.where(u[:, :4] < augment.jitter, 2 * u[:, 4:] - 1, 0.0)
    shift = augment.brightness * amount[:, 0]
    contrast = 1 + augment.contrast * amount[:, 1]
    keep = (1 + augment.saturation * amount[:, 2])[:, None, None]
    angle = (math.radians(augment.hue) * amount[:, 3])[:, None, None]
    eye = torch.eye(3)
    saturate = keep * eye + (1 - keep) * torch.tensor(LUMA).expand(3, 3)
    turn = torch.tensor([[0.0, -1, 1], [1, 0, -1], [-1, 1, 0]]) / math.sqrt(3)
    rotate = angle.cos() * eye + (1 - angle.cos()) / 3 + angle.sin() * turn
    matrix = contrast[:, None, None] * (rotate @ saturate)
    return matrix, (contrast * shift)[:, None].expand(count, 3)


def normalise(images: Tensor) -> Tensor:
    """Normalise colours in 0..1 (B x 3 x H x W), in place, by ImageNet's mean and standard deviation."""
    mean, std = images.new_tensor(MEAN), images.new_tensor(STD)
    return images.sub_(mean[:, None, None]).div_(std[:, None, None])


def ready(kind: DenseKind, raw: Tensor, scale: Tensor | None = None, flip: Tensor | None = None) -> Tensor:
    """Return raw labels as losses take them; `scale` and `flip` (B each) say how they were warped."""
    if kind in ("semseg", "human_parts"):
        label = raw.long()
        if kind == "human_parts":
            nobody = ~((label > 0) & (label != IGNORE)).flatten(1).any(1)
            label[nobody] = IGNORE
        return label
    if kind in ("saliency", "edge"):
        return raw[:, None].float()
    if kind == "depth":
        depth = raw[:, None].float()
        if scale is not None:
            depth = depth / scale.view(-1, 1, 1, 1)
        return torch.where((depth > 0) & (depth < math.inf), depth, float(IGNORE))
    normals = raw.float()
    if flip is not None:
        normals[:, 0] *= torch.where(flip, -1.0, 1.0)[:, None, None]
    length = normals.square().sum(1, keepdim=True).sqrt_()
    return torch.where(length > 0, normals / length, float(IGNORE))


@dataclass(frozen=True, eq=False)
class Dense:
    """Batches of images (B x 3 x H x W, uint8) with dense labels, raw and on the CPU.

    `kinds` maps every task to its kind; several tasks may have one kind. In training images are augmented and cropped
    or padded to `crop` (default: `size`); without `augment` they are treated as in evaluation, which only normalises
    and pads to `size` (height, width).
    """

    kinds: Mapping[str, DenseKind]
    size: tuple[int, int]
    augment: Augment | None = None
    crop: tuple[int, int] | None = None
    slow: bool = True

    def __call__(self, x: Tensor, y: Mapping[str, Tensor], device: torch.device, rng: Generator | None) -> Ready:
        """Return a training batch with `rng`, where there is an `augment`, else one for evaluation, on `device`.

        Inputs are float32, labels ready. Draws come from `rng`, a generator of the CPU, and from nothing else. Raises
        ValueError for images in evaluation that are larger than `size`.
        """
        if rng is None or self.augment is None:
            return self._plain(x, y, device)
        source = (x.shape[2], x.shape[3])
        segmented = next((y[task] for task in y if self.kinds[task] == "semseg"), None)
        warp = draw_warp(len(x), source, self.crop or self.size, self.augment, rng, segmented).to(device)
        matrix, shift = (t.to(device) for t in draw_colours(len(x), self.augment, rng))
        inside, index = warp.inside(source), warp.index(source)
        colours = warp_image(x.to(device).float().div_(255), warp)
        colours = torch.baddbmm(shift[:, :, None], matrix, colours.flatten(2)).view_as(colours).clamp_(0, 1)
        labels = {}
        for task, raw in y.items():
            warped = warp_label(self.kinds[task], raw.to(device), index, inside)
            labels[task] = ready(self.kinds[task], warped, warp.scale, warp.flip)
        return normalise(colours).masked_fill_(~inside[:, None], 0), labels

    def _plain(self, x: Tensor, y: Mapping[str, Tensor], device: torch.device) -> Ready:
        high, wide = self.size[0] - x.shape[2], self.size[1] - x.shape[3]
        if min(high, wide) < 0:
            shape = f"{x.shape[2]} x {x.shape[3]}"
            raise ValueError(f"expected images of at most {self.size[0]} x {self.size[1]}, found {shape}")
        margin = (wide // 2, wide - wide // 2, high // 2, high - high // 2)
        padded = {task: pad(raw.to(device), margin, value=raw_ignore(self.kinds[task])) for task, raw in y.items()}
        labels = {task: ready(self.kinds[task], raw) for task, raw in padded.items()}
        return pad(normalise(x.to(device).float().div_(255)), margin), labels


@dataclass(frozen=True, eq=False)
class Crop:
    """Batches of images (B x 3 x H x W, uint8), always normalised by ImageNet's mean and standard deviation.

    In training they are padded by `pad` black pixels, cropped at random, and mirrored half of the time if `flip`. A
    label for each pixel (B x H x W) moves with the image, without one where that is padded.
    """

    pad: int
    flip: bool
    size: None = None

    @property
    def slow(self) -> bool:
        """Return whether batches are augmented."""
        return self.pad > 0 or self.flip

    def __call__(self, x: Tensor, y: Mapping[str, Tensor], device: torch.device, rng: Generator | None) -> Ready:
        """Return a training batch with `rng`, else one for evaluation."""
        count, x = len(x), x.to(device, non_blocking=True)
        labels = {task: label.to(device, non_blocking=True) for task, label in y.items()}
        if rng is not None and self.slow:
            top, left = torch.randint(2 * self.pad + 1, (2, count), generator=rng).to(device)
            mirrored = torch.rand(count, generator=rng) < 0.5 if self.flip else torch.zeros(count).bool()
            moved = partial(crop, edge=self.pad, top=top, left=left, mirrored=mirrored.to(device))
            x = moved(x)
            for task, label in labels.items():
                labels[task] = moved(label[:, None], outside=IGNORE)[:, 0] if label.ndim == 3 else label
        return normalise(x.float().div_(255)), labels


def crop(x: Tensor, edge: int, top: Tensor, left: Tensor, mirrored: Tensor, outside: int = 0) -> Tensor:
    """Return windows of the size of `x` (B x C x H x W) out of `x` with `edge` pixels of `outside` on every side.

    `top` and `left` (B, 0..2 edge) are the corners, `mirrored` (B, bool) says which windows are exchanged left and
    right. In memory the channels of the result are innermost, as convolutions like them.
    """
    batch, _, height, width = x.shape
    rows = top[:, None] + torch.arange(height, device=x.device)
    cols = left[:, None] + torch.arange(width, device=x.device)
    cols = torch.where(mirrored[:, None], cols.flip(1), cols)
    which = torch.arange(batch, device=x.device)[:, None, None]
    padded = pad(x, (edge, edge, edge, edge), value=outside)
    return padded[which, :, rows[:, :, None], cols[:, None, :]].permute(0, 3, 1, 2)
