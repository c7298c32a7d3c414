"""Losses of dense prediction, as the authors' release of FedHCA2 has them (Lu et al., CVPR 2024, supplement C).

Predictions are B x C x H x W before any activation, labels are of the same B, H and W (see the functions `read_` for
their layouts and for what counts as valid); other sizes are a DataError. Every loss is a sum over the valid pixels of
the batch divided by their number. Where no pixel is valid it is 0 and has a gradient, also 0. All of them compute in
float32 (float64 for float64), also under autocast, and work under `torch.func.vmap`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from fedloom.core.errors import DataError
from fedloom.models.tasks.task import IGNORE


def _flat(labels: Tensor, pred: Tensor) -> Tensor:
    """Return labels as B x H x W, from that or from B x 1 x H x W; DataError for another size than that of `pred`."""
    if labels.ndim == 4 and labels.shape[1] == 1:
        labels = labels[:, 0]
    _same(labels, (pred.shape[0], *pred.shape[2:]))
    return labels


def _same(labels: Tensor, expected: Sequence[int]) -> None:
    if labels.shape != tuple(expected):
        raise DataError(
            f"expected labels of shape {' x '.join(map(str, expected))}, found {' x '.join(map(str, labels.shape))}"
        )


def read_classes(labels: Tensor, pred: Tensor, ignore: int = IGNORE) -> Tensor:
    """Return class numbers, B x H x W int64, with `ignore` (also for -1) where there is no label."""
    classes = _flat(labels, pred).long()
    return torch.where(classes == -1, ignore, classes)


def read_binary(labels: Tensor, pred: Tensor) -> tuple[Tensor, Tensor]:
    """Return (y in [0, 1], valid), both B x H x W. What is outside 0..1, so 255 and -1, is not valid; y is 0 there."""
    values = real(_flat(labels, pred))
    valid = (values >= 0) & (values <= 1)
    return torch.where(valid, values, 0.0), valid


def read_depth(labels: Tensor, pred: Tensor) -> tuple[Tensor, Tensor]:
    """Return (metres, valid), both B x H x W. Valid: finite, above 0 and not 255; the depth is 1 elsewhere."""
    depth = real(_flat(labels, pred))
    valid = depth.isfinite() & (depth > 0) & (depth != IGNORE)
    return torch.where(valid, depth, 1.0), valid


def read_normals(labels: Tensor, pred: Tensor) -> tuple[Tensor, Tensor]:
    """Return (vectors B x 3 x H x W as given, valid B x H x W). Valid: finite, no channel 255, not the zero vector; the
    vector is 0 elsewhere."""
    _same(labels, pred.shape)
    normals = real(labels)
    valid = (normals.isfinite() & (normals != IGNORE)).all(1) & (normals != 0).any(1)
    return torch.where(valid.unsqueeze(1), normals, 0.0), valid


def real(x: Tensor) -> Tensor:
    """Return a tensor as float32; float64 stays float64."""
    return x if x.dtype == torch.float64 else x.float()


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    ignore: int = IGNORE,
    weights: Sequence[float] | None = None,
    sets: Sequence[Sequence[int]] = (),
) -> Tensor:
    """Compute the cross entropy in nats over classes: semantic segmentation and human parts.

    `logits` B x C x H x W; `labels` B x H x W or B x 1 x H x W, class numbers below C. `ignore` and -1 do not count.
    `weights` are those of the classes; the mean is then weighted. Label C + j means one of the classes `sets[j]`, whose
    probabilities add up (the marginal loss); it weighs as much as the set's first class.
    """
    target = read_classes(labels, logits, ignore)
    of = None if weights is None else real(logits).new_tensor([*weights, *(weights[some[0]] for some in sets)])
    log_p = real(logits).log_softmax(1)
    if sets:
        log_p = torch.cat([log_p, *(log_p[:, list(some)].logsumexp(1, keepdim=True) for some in sets)], 1)
    total = functional.nll_loss(log_p, target, of, ignore_index=ignore, reduction="sum")
    if of is None:
        return total / (target != ignore).sum().clamp(min=1)
    whole = torch.where(target != ignore, of[torch.where(target == ignore, 0, target)], 0.0).sum()
    return total / torch.where(whole > 0, whole, 1.0)


def balanced_bce(logits: Tensor, labels: Tensor) -> Tensor:
    """Compute the two-class cross entropy in nats, balanced over the batch: saliency.

    The weights are q for salient pixels and 1 - q for others, where q is the share of the others among the valid
    pixels. `logits` B x 2 x H x W (background, salient) or B x 1 x H x W (their difference: the same loss);
    `labels` B x H x W or B x 1 x H x W in 0..1.
    """
    y, valid = read_binary(labels, logits)
    count = valid.sum().clamp(min=1)
    others = torch.where(valid, 1 - y, 0).sum() / count
    return _weighted_bce(logit(logits), y, valid, others, 1 - others)


def edge_bce(
    logits: Tensor, labels: Tensor, positive_weight: float = 0.95, negative_weight: float | None = None
) -> Tensor:
    """Compute the binary cross entropy in nats with fixed weights: edges.

    `logits` B x 1 x H x W; `labels` B x H x W or B x 1 x H x W in 0..1, where fractions are allowed.
    `negative_weight` is 1 - `positive_weight` unless given: (10, 1) is a cross entropy with pos_weight 10.
    """
    y, valid = read_binary(labels, logits)
    negative = 1 - positive_weight if negative_weight is None else negative_weight
    return _weighted_bce(logit(logits), y, valid, positive_weight, negative)


def normals_l1(pred: Tensor, labels: Tensor) -> Tensor:
    """Compute the L1 distance, summed over the three channels, of normalised predictions to the labels as they are.

    `pred` and `labels` B x 3 x H x W; labels in -1..1. A pixel counts unless a channel is 255 or all are 0.
    """
    target, valid = read_normals(labels, pred)
    distance = (unit(real(pred)) - target).abs().sum(1)
    return _mean(distance, valid)


def depth_l1(pred: Tensor, labels: Tensor, log: bool = False) -> Tensor:
    """Compute the L1 distance in metres.

    `pred` B x 1 x H x W; `labels` B x 1 x H x W or B x H x W in metres; 255, values of 0 or less and those that
    are not finite do not count. With `log`, predictions are log(1 + metres), and so is the distance.
    """
    target, valid = read_depth(labels, pred)
    if log:
        target = target.log1p()
    return _mean((real(pred)[:, 0] - target).abs(), valid)


def logit(pred: Tensor) -> Tensor:
    """Return the logit of class 1, B x H x W, from one channel or from those of two classes (class 1 minus class 0)."""
    if pred.shape[1] not in (1, 2):
        raise DataError(f"expected a prediction of 1 or 2 channels, found {pred.shape[1]}")
    values = real(pred)
    return values[:, 0] if pred.shape[1] == 1 else values[:, 1] - values[:, 0]


def unit(vectors: Tensor) -> Tensor:
    """Scale vectors (channels second) to length 1; vectors shorter than 1e-12 stay as they are.

    With u the unit roundoff (2^-24, in float64 2^-53), each component of up to three is within 4 u of the exact one,
    relative to it: three roundings of the sum of squares count half, then one of the root and one of the quotient.
    With torch's norm, which was used before, it is too, so components differ from then by at most 8 u of themselves and
    the L1 distance of a pixel, but for its own rounding, by at most 8 sqrt(3) u. Holds for lengths up to 1e19 (float64:
    1e154), above which squares overflow.
    """
    # Torch's norm along channels takes a hundred times as long as squares and their sum.
    square = vectors.square().sum(1, keepdim=True)
    # Not divided by a small number instead: the gradient at zero would be its inverse.
    return vectors / torch.where(square > 1e-24, square, 1.0).sqrt()


def _weighted_bce(z: Tensor, y: Tensor, valid: Tensor, positive: Tensor | float, negative: Tensor | float) -> Tensor:
    """Mean over valid pixels of positive y -log s(z) + negative (1 - y) -log(1 - s(z)), s the sigmoid."""
    cost = positive * y * functional.softplus(-z) + negative * (1 - y) * functional.softplus(z)
    return _mean(cost, valid)


def _mean(values: Tensor, valid: Tensor) -> Tensor:
    return torch.where(valid, values, 0).sum() / valid.sum().clamp(min=1)
