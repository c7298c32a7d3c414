"""Class prototypes and batch contrast: what FedProto, FPL, FedTGP, FedSA and FedRCL add to a loss or do on a server.

Pure functions. Features are B x F, labels B int64 with -1 for unlabelled, classes numbered from 0. A loss is the mean
over the examples that it can judge. It is 0 where there are none: before the first prototypes, or for classes that no
client has. Losses on prototypes may instead be a sum over these, divided by all labelled examples of the batch (`over:
batch`), as in the releases of FPL and FedTGP: then examples of a class without a prototype weaken the term.

Sources: FedProto (Tan et al., AAAI 2022), FPL (Huang et al., CVPR 2023), FINCH (Sarfraz et al., CVPR 2019), FedTGP
(Zhang et al., AAAI 2024), FedSA (Zhou et al., AAAI 2025), FedRCL (Seo et al., CVPR 2024), and their releases.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize, one_hot

from fedloom.core.context import generator

SMALL = 1e-12  # keeps the slope of a square root at 0 finite
Over = Literal["known", "batch"]
"""The divisor of a sum of losses: the examples of classes with a prototype, or all labelled ones of the batch."""


@dataclass(frozen=True, eq=False)
class Prototypes:
    """One vector per class: `means` (C x F; 0 without examples), and how many examples it averages (`counts`)."""

    means: Tensor
    counts: Tensor

    @property
    def known(self) -> Tensor:
        """Return which classes (C, bool) have a prototype."""
        return self.counts > 0


def class_prototypes(features: Tensor, labels: Tensor, classes: int) -> Prototypes:
    """Return the mean feature of each class; unlabelled examples are left out."""
    labelled = labels >= 0
    member = one_hot(labels[labelled], classes).to(features.dtype)
    counts = member.sum(0)
    means = member.t() @ features[labelled] / counts.clamp(min=1)[:, None]
    return Prototypes(means, counts.double())


def aggregated(prototypes: Sequence[Prototypes], by: Literal["counts", "clients"] = "counts") -> Prototypes:
    """Return the mean prototype of each class over the clients that have it (FedProto), or over a client's batches.

    `counts`: weighted by the numbers of examples, as in the paper; `clients`: all alike, as in the release.
    """
    means = torch.stack([p.means for p in prototypes])
    counts = torch.stack([p.counts for p in prototypes])
    weights = counts if by == "counts" else (counts > 0).double()
    weights = weights / weights.sum(0).clamp(min=SMALL)
    return Prototypes((weights.to(means)[:, :, None] * means).sum(0), counts.sum(0))


def distances(features: Tensor, points: Tensor) -> Tensor:
    """Return 2-norms |z_b - p_m| (B x M), with a zero gradient where they are 0."""
    return (features[:, None] - points).square().sum(2).clamp(min=SMALL).sqrt()


def prototype_pull(
    features: Tensor,
    labels: Tensor,
    prototypes: Prototypes,
    distance: Literal["mse", "norm"] = "mse",
    over: Over = "known",
) -> Tensor:
    """Compute the mean distance of features to their class's prototype (FedProto; also in FPL, FedTGP and FedSA).

    `mse`: squared and averaged over the dimensions, as in the releases; `norm`: the 2-norm, as in FedProto's paper.
    """
    z, mine, _ = _judged(features, labels, prototypes.known)
    if not len(z):
        return features.new_zeros(())
    apart = z - prototypes.means[mine]
    pull = apart.square().mean() if distance == "mse" else apart.square().sum(1).clamp(min=SMALL).sqrt().mean()
    return pull * _share(len(z), labels, over)


def _share(judged: int, labels: Tensor, over: Over) -> float:
    """Return what turns a mean over the judged examples into a loss of the batch (`Over`)."""
    return judged / int((labels >= 0).sum()) if over == "batch" else 1.0


def _judged(features: Tensor, labels: Tensor, known: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return features and labels of the examples whose class has a prototype, and which these are (B, bool)."""
    which = (labels >= 0) & known[labels.clamp(min=0)]
    return features[which], labels[which], which


# FINCH and FPL


def first_neighbours(points: Tensor) -> Tensor:
    """Return FINCH's first partition (N cluster numbers from 0) of points (N x F), by cosine; it has no parameter.

    Points are linked if one is the other's nearest or both have the same; of equally near points the first counts.
    """
    n = len(points)
    if n < 2:
        return torch.zeros(n, dtype=torch.int64)
    unit = normalize(points.double(), dim=1)
    nearest = (unit @ unit.t()).fill_diagonal_(-math.inf).argmax(1)
    each = torch.arange(n)
    links = (nearest[:, None] == each) | (nearest == each[:, None]) | (nearest[:, None] == nearest)
    links |= torch.eye(n, dtype=torch.bool)
    lowest = each
    while True:  # the lowest number spreads along the links
        spread = torch.where(links, lowest, n).amin(1)
        if torch.equal(spread, lowest):
            return torch.unique(lowest, return_inverse=True)[1]
        lowest = spread


def finch(points: Tensor) -> list[Tensor]:
    """Return FINCH's partitions (N cluster numbers each), from the finest to the coarsest with several clusters."""
    partitions = [first_neighbours(points)]
    # Two clusters are each other's nearest, so they would become one.
    while len(points) and (count := int(partitions[-1].amax()) + 1) > 2:
        finer = partitions[-1]
        coarser = first_neighbours(class_prototypes(points, finer, count).means)[finer]
        if int(coarser.amax()) == 0:
            break
        partitions.append(coarser)
    return partitions


@dataclass(frozen=True, eq=False)
class ClusterPrototypes:
    """Several prototypes per class: `points` (M x F) and the class of each (`labels`, M)."""

    points: Tensor
    labels: Tensor

    def unbiased(self, classes: int) -> Prototypes:
        """Return the plain mean of each class's points."""
        return class_prototypes(self.points, self.labels, classes)


def cluster_prototypes(
    prototypes: Sequence[Prototypes], partition: Literal["first", "last"] = "last"
) -> ClusterPrototypes:
    """Return, per class, the means of FINCH's clusters of the clients' prototypes; `last`: the coarsest (FPL)."""
    points, labels = [], []
    for c in range(len(prototypes[0].counts)):
        own = [p.means[c] for p in prototypes if p.counts[c] > 0]
        if not own:
            continue
        stacked = torch.stack(own)
        clusters = finch(stacked)[0 if partition == "first" else -1]
        means = class_prototypes(stacked, clusters, int(clusters.amax()) + 1).means
        points.append(means)
        labels += [c] * len(means)
    width = prototypes[0].means.shape[1]
    return ClusterPrototypes(
        torch.cat(points) if points else prototypes[0].means.new_zeros(0, width),
        torch.tensor(labels, dtype=torch.int64),
    )


def cluster_contrast(
    features: Tensor, labels: Tensor, clusters: ClusterPrototypes, temperature: float = 0.02, over: Over = "known"
) -> Tensor:
    """Compute -log of the share that the points of an example's own class have in sum_c exp(cos(z, c) / T) (FPL)."""
    mine = labels[:, None] == clusters.labels
    judged = mine.any(1)
    if not bool(judged.any()):
        return features.new_zeros(())
    logits = normalize(features[judged], dim=1) @ normalize(clusters.points, dim=1).t() / temperature
    own = logits.masked_fill(~mine[judged], -math.inf).logsumexp(1)
    return (logits.logsumexp(1) - own).mean() * _share(len(own), labels, over)


def fpl_loss(
    features: Tensor,
    labels: Tensor,
    clusters: ClusterPrototypes,
    classes: int,
    temperature: float = 0.02,
    over: Over = "known",
) -> Tensor:
    """Return FPL's term beside cross entropy: `cluster_contrast` plus the pull to the mean of the class's clusters."""
    pull = prototype_pull(features, labels, clusters.unbiased(classes), over=over)
    return cluster_contrast(features, labels, clusters, temperature, over) + pull


# FedTGP


def nearest_gaps(prototypes: Prototypes) -> Tensor:
    """Return the distance of each known prototype to the nearest other known one (one value each; empty below two)."""
    points = prototypes.means[prototypes.known]
    if len(points) < 2:
        return points.new_zeros(0)
    return distances(points, points).fill_diagonal_(math.inf).amin(1)


def adaptive_margin(prototypes: Sequence[Prototypes], limit: float = 100.0) -> float:
    """Return FedTGP's margin: the largest gap between neighbouring class means, at most `limit`; 0 for one class."""
    gaps = nearest_gaps(aggregated(prototypes, "clients"))
    return min(float(gaps.max()), limit) if len(gaps) else 0.0


def margin_cross_entropy(features: Tensor, labels: Tensor, points: Tensor, margin: float = 0.0) -> Tensor:
    """Compute the cross entropy with logits -(|z - p_j| + margin [j = y]): the own class must be nearer by the margin.

    `points` (C x F) are prototypes or anchors of all classes (FedTGP; FedSA's margin term).
    """
    z, mine, _ = _judged(features, labels, torch.ones(len(points), dtype=torch.bool, device=points.device))
    if not len(z):
        return features.new_zeros(())
    return cross_entropy(-(distances(z, points) + margin * one_hot(mine, len(points))), mine)


class PrototypeGenerator(nn.Module):
    """FedTGP's trainable prototypes: an embedding per class, then linear, ReLU, linear. `forward()` gives C x F."""

    def __init__(self, classes: int, features: int, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embedding = nn.Parameter(torch.randn(classes, features))
            self.layers = nn.Sequential(nn.Linear(features, features), nn.ReLU(), nn.Linear(features, features))

    def forward(self) -> Tensor:
        """Return prototypes of all classes."""
        prototypes: Tensor = self.layers(self.embedding)
        return prototypes


def trained_generator(
    start: PrototypeGenerator,
    prototypes: Sequence[Prototypes],
    *,
    epochs: int = 1000,
    lr: float = 0.01,
    batch_size: int = 10,
    limit: float = 100.0,
    seed: int = 0,
) -> PrototypeGenerator:
    """Return the server's part of FedTGP: a copy of `start`, trained by SGD on the clients' prototypes (`start` stays).

    Minimises `margin_cross_entropy` of every client's prototypes against the generated ones, with `adaptive_margin`.
    Batches are shuffled by `seed`. Without any prototype nothing is trained.
    """
    model = copy.deepcopy(start)
    points = torch.cat([p.means[p.known] for p in prototypes])
    labels = torch.cat([p.known.nonzero()[:, 0] for p in prototypes])
    margin = adaptive_margin(prototypes, limit)
    optimizer = torch.optim.SGD(model.parameters(), lr)
    rng = generator(seed, "fedtgp")
    for _ in range(epochs if len(points) else 0):
        for batch in torch.randperm(len(points), generator=rng).split(batch_size):
            optimizer.zero_grad()
            margin_cross_entropy(points[batch], labels[batch], model(), margin).backward()
            optimizer.step()
    return model


# FedSA


def random_anchors(classes: int, features: int, seed: int = 0) -> Tensor:
    """Return FedSA's first anchors (C x F): normal vectors through a random, frozen (linear, batch norm, ReLU) twice.

    They are not negative. The same seed gives the same anchors on every client.
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        layers = [
            layer for _ in range(2) for layer in (nn.Linear(features, features), nn.BatchNorm1d(features), nn.ReLU())
        ]
        anchors: Tensor = nn.Sequential(*layers)(torch.randn(classes, features))
    return anchors


def moved_anchors(anchors: Tensor, prototypes: Sequence[Prototypes], momentum: float = 0.9999) -> Tensor:
    """Return A_c <- momentum A_c + (1 - momentum) mean_c; a class that no client has keeps its anchor (FedSA)."""
    mean = aggregated(prototypes, "clients")
    moved = momentum * anchors + (1 - momentum) * mean.means
    return torch.where(mean.known[:, None], moved, anchors)


def anchor_margin(anchors: Tensor, own: Prototypes | None = None) -> float:
    """Return FedSA's margin: the larger mean gap, of neighbouring anchors or of own prototypes; 0 without two."""
    every = Prototypes(anchors, torch.ones(len(anchors), dtype=torch.float64))
    gaps = [nearest_gaps(p) for p in ([every] if own is None else [every, own])]
    return max((float(g.mean()) for g in gaps if len(g)), default=0.0)


def anchor_losses(
    features: Tensor, labels: Tensor, anchors: Tensor, head: nn.Module, margin: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return FedSA's terms beside cross entropy, unweighted, each a scalar; the release's weights are 1.

    They are the squared distance to the own class's anchor (mean over the dimensions), the contrast with all anchors,
    with `margin` (see `anchor_margin`), and the cross entropy of the client's head on the anchors themselves. `head`
    maps features (B x F) to logits (B x C).
    """
    every = Prototypes(anchors, torch.ones(len(anchors), device=anchors.device, dtype=torch.float64))
    return (
        prototype_pull(features, labels, every),
        margin_cross_entropy(features, labels, anchors, margin),
        cross_entropy(head(anchors), torch.arange(len(anchors), device=anchors.device)),
    )


# FedRCL


def relaxed_contrast(
    features: Tensor,
    labels: Tensor,
    temperature: float = 0.05,
    threshold: float = 0.7,
    positives: int = 1,
    negatives: int = 2,
    weight: float = 1.0,
) -> Tensor:
    """Return FedRCL's supervised contrast within a batch, with the penalty that keeps a class from collapsing.

    `fedrcl` has the equations; `weight` is the penalty's. An example is among those of its class that it is compared
    with, so one without another of its class has similarity 1, but not in the penalty.
    """
    known = labels >= 0
    z, y = normalize(features[known], dim=1), labels[known]
    if not len(z):
        return features.new_zeros(())
    similar = z @ z.t()
    same = y[:, None] == y
    itself = torch.eye(len(y), dtype=torch.bool, device=y.device)

    def chosen(mask: Tensor, count: int, largest: bool) -> Tensor:
        """Return similarities of each row's most or least similar within the mask (n x count); else -inf."""
        outside = -math.inf if largest else math.inf
        values = similar.masked_fill(~mask, outside).topk(min(count, len(y)), dim=1, largest=largest)[0]
        return values.masked_fill(values.isinf(), -math.inf)

    near = chosen(same, positives, largest=False) / temperature
    far = chosen(~same, negatives, largest=True) / temperature
    real = near.isfinite()
    near = near.masked_fill(~real, 0)
    against = torch.cat([near[:, :, None], far[:, None].expand(-1, near.shape[1], -1)], 2).logsumexp(2)
    loss = (((against - near) * real).sum(1) / real.sum(1)).mean()

    alike = chosen(same & ~itself, positives, largest=False)
    alike = (alike - 1).masked_fill(alike < threshold, -math.inf) / temperature
    return loss + weight * torch.cat([torch.zeros_like(alike[:, :1]), alike], 1).logsumexp(1).mean()
