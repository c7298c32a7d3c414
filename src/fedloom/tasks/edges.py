"""odsF: how well predicted boundaries agree with true ones, when a pixel may be a little off.

The protocol is that of the Berkeley benchmark (Martin, Fowlkes and Malik, 2004) with the non-maximum suppression of
Dollar and Zitnick (Structured Forests, 2013), written from their descriptions with numpy and scipy.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedloom.extras import need
from fedloom.tasks import labels as read
from fedloom.tasks.metrics import Measure, best_f, levels, probability

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class OdsF(Measure):
    """The best F over thresholds, with hits, predictions and true edge pixels pooled over images per threshold.

    Per image: pixels whose probability is not the largest across their edge are dropped, once; at every threshold
    what is left is thinned to lines and matched one-to-one with the thinned truth, as many pairs as can be, none
    further apart than `max_dist` times the diagonal (0.0075 for PASCAL-Context, 0.011 for NYUD). Truth is thinned
    as predictions are, so that a perfect map scores 1 also where labels are wider than a pixel.
    The image is the smallest box around the pixels that have a label, so padding with 255 changes nothing.
    `thresholds`: their number, at equal steps between 0 and 1; the benchmark has 99. Needs scipy.
    """

    kind = "odsf"

    def __init__(self, max_dist: float = 0.0075, thresholds: int = 99) -> None:
        if not max_dist > 0:
            raise ValueError(f"max_dist is above 0, not {max_dist}")
        need("scipy.sparse.csgraph", "data")
        self.max_dist = max_dist
        self.levels = levels(thresholds).numpy()
        self.hits = torch.zeros(thresholds, dtype=torch.int64)
        self.predicted = torch.zeros(thresholds, dtype=torch.int64)
        self.actual = 0
        self.seen = False

    def update(self, pred: Tensor, target: Tensor) -> None:
        """Take logits B x 1 x H x W and labels; those from 0.5 up are edges."""
        y, valid = read.binary(target.cpu(), pred)
        for one, truth, known in zip(probability(pred).numpy(), (y >= 0.5).numpy(), valid.numpy(), strict=True):
            if known.any():
                box = np.ix_(*(slice_of(known.any(axis)) for axis in (1, 0)))
                self._add(one[box], truth[box], known[box])

    def _add(self, soft: Floats, truth: Bools, known: Bools) -> None:
        """Count one image, all H x W."""
        radius = self.max_dist * math.hypot(*truth.shape)
        line = thin((truth & known)[None])[0]
        crests = np.where(known, suppress(soft), 0.0)
        # Sets at rising thresholds are nested, so sets of one size are one set.
        size = (crests.reshape(-1, 1) >= self.levels).sum(0)
        _, first, which = np.unique(size, return_index=True, return_inverse=True)
        thinned = thin(crests >= self.levels[first, None, None])
        hits = pairs(thinned, line, radius)
        self.hits += torch.from_numpy(hits[which])
        self.predicted += torch.from_numpy(thinned.sum((1, 2))[which])
        self.actual += int(line.sum())
        self.seen = True

    def all(self) -> dict[str, float]:
        """`odsf`; 0 where there are no true edges."""
        return {"odsf": best_f(self.hits, self.predicted, self.actual, 1.0) if self.seen else math.nan}


def slice_of(on: Bools) -> Ints:
    """The positions from the first to the last that is on."""
    places = np.flatnonzero(on)
    return np.arange(places[0], places[-1] + 1)


def suppress(soft: Floats) -> Floats:
    """Zero where the map (H x W) is larger one pixel further across the edge, by more than 1 %.

    Across is the direction in which the map, smoothed with a Gaussian of 2 pixels, is curved the most: downwards on a
    crest, upwards beside it. Equal neighbours stay, as thinning deals with them.
    """
    ndimage = need("scipy.ndimage", "data")
    xx, xy, yy = (ndimage.gaussian_filter(soft, 2.0, order, mode="nearest") for order in ((0, 2), (1, 1), (2, 0)))
    across = 0.5 * np.arctan2(2 * xy, xx - yy) + np.where(xx + yy < 0, np.pi / 2, 0)
    y, x = np.indices(soft.shape)
    dy, dx = np.sin(across), np.cos(across)
    sides = [ndimage.map_coordinates(soft, (y + s * dy, x + s * dx), order=1, mode="nearest") for s in (1, -1)]
    found: Floats = np.where(soft * 1.01 >= np.maximum(*sides), soft, 0.0)
    return found


@cache
def _removable() -> Bools:
    """For both halves of a thinning pass and each of the 256 neighbourhoods: may the pixel go?

    The conditions are G1 to G3 of Lam, Lee and Suen (1992), after Guo and Hall (1989). Bit i of a neighbourhood is
    x[i + 1], counted from the east against the clock.
    """
    x = (np.arange(256)[:, None] >> np.arange(8) & 1).astype(bool).T
    east, ne, north, nw, west, sw, south, se = x
    sides, corners = x[::2], x[1::2]
    following = np.roll(sides, -1, axis=0)
    crossings = (~sides & (corners | following)).sum(0)
    neighbours = np.minimum((sides | corners).sum(0), (corners | following).sum(0))
    both = (crossings == 1) & (neighbours >= 2) & (neighbours <= 3)
    return np.stack([both & ~((ne | north | ~se) & east), both & ~((sw | south | ~nw) & west)])


def thin(maps: Bools) -> Bools:
    """Each map of N x H x W reduced to lines of one pixel, with the same connected parts and holes."""
    padded = np.pad(maps, ((0, 0), (1, 1), (1, 1)))
    wide = padded.shape[2]
    on = padded.reshape(-1)
    around = np.array([1, 1 - wide, -wide, -wide - 1, -1, wide - 1, wide, wide + 1])
    half, gone = 0, [np.flatnonzero(on)] * 2
    while len(gone[0]) or len(gone[1]):
        # A half has something new to see only next to what went since it was last tried.
        near = (np.concatenate(gone)[:, None] + around).reshape(-1)
        near = np.sort(near[on[near]])
        near = near[np.diff(near, prepend=-1) > 0]
        codes = np.zeros(len(near), dtype=np.uint8)
        for bit, step in enumerate(around):
            codes |= on[near + step].view(np.uint8) << bit
        gone = [gone[1], near[_removable()[half][codes]]]
        on[gone[1]] = False
        half = 1 - half
    found: Bools = padded[:, 1:-1, 1:-1]
    return found


def pairs(maps: Bools, truth: Bools, radius: float) -> Ints:
    """For each map of N x H x W: the most one-to-one pairs with pixels of `truth` (H x W) within `radius` pixels."""
    reach = int(radius)
    height, width = (side + 2 * reach for side in truth.shape)
    number = np.full((height, width), -1, dtype=np.int32)
    number[reach : height - reach, reach : width - reach][truth] = np.arange(truth.sum())
    y, x = np.indices((2 * reach + 1,) * 2) - reach
    steps = (y * width + x)[y**2 + x**2 <= radius**2]
    found = np.zeros(len(maps), dtype=np.int64)
    for i, one in enumerate(maps):
        rows, columns = np.nonzero(one)
        near = number.reshape(-1)[((rows + reach) * width + columns + reach)[:, None] + steps]
        close = near >= 0
        found[i] = _most_pairs(close.sum(1), near[close], int(truth.sum()))
    return found


def _most_pairs(degrees: Ints, ends: NDArray[np.int32], right: int) -> int:
    """The size of a largest matching in a graph between two sides, given as the neighbours of each left node in turn.

    As a flow: scipy's own search for matchings takes exponential time on graphs as dense as these.
    """
    left, edges = len(degrees), len(ends)
    sink, source = left + right, left + right + 1
    # One row a node: the left ones lead to their neighbours, the right ones to the sink, the source to the left ones.
    indices = np.concatenate([left + ends, np.full(right, sink), np.arange(left)])
    counts = np.concatenate([[0], degrees, np.ones(right, np.int64), [0, left]])
    units = np.ones(edges + right + left, np.int32)
    layout = (units, indices.astype(np.int32), counts.cumsum().astype(np.int32))
    graph = need("scipy.sparse", "data").csr_array(layout, shape=(source + 1,) * 2)
    flow = need("scipy.sparse.csgraph", "data").maximum_flow(graph, source, sink, method="dinic")
    return int(flow.flow_value)
