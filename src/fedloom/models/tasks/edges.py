"""The parts of odsF: how well predicted boundaries agree with true ones, when a pixel may be a little off.

The protocol is that of the Berkeley benchmark (Martin, Fowlkes and Malik, 2004) with the non-maximum suppression of
Dollar and Zitnick (Structured Forests, 2013), written from their descriptions with numpy and scipy.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

import numpy as np
from numpy.typing import NDArray

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def suppress(soft: Floats) -> Floats:
    """Zero where the map (H x W) is larger one pixel further across the edge, by more than 1 %.

    Across is the direction in which the map, smoothed with a Gaussian of 2 pixels, is curved the most: downwards on a
    crest, upwards beside it. Equal neighbours stay, as thinning deals with them.
    """
    from scipy import ndimage

    xx, xy, yy = (ndimage.gaussian_filter(soft, 2.0, order, mode="nearest") for order in ((0, 2), (1, 1), (2, 0)))
    across = 0.5 * np.arctan2(2 * xy, xx - yy) + np.where(xx + yy < 0, np.pi / 2, 0)
    y, x = np.indices(soft.shape)
    dy, dx = np.sin(across), np.cos(across)
    sides = [ndimage.map_coordinates(soft, (y + s * dy, x + s * dx), order=1, mode="nearest") for s in (1, -1)]
    return np.where(soft * 1.01 >= np.maximum(*sides), soft, 0.0)


def faded(peaks: Floats) -> Floats:
    """Multiply the map (H x W) by a ramp that is 0 in the outermost rows and columns and 1 from 5 pixels on. The
    last step of `edgesNms` in the code of Dollar and Zitnick, in which predictions at the border count for less."""
    width = min(5, *(side // 2 for side in peaks.shape))
    if not width:
        return peaks
    ramps = [np.minimum(np.minimum(at := np.arange(side), at[::-1]) / width, 1) for side in peaks.shape]
    return peaks * np.outer(*ramps)


def thin(maps: Bools) -> Bools:
    """Reduce each map of N x H x W to lines of one pixel, with the same connected parts and holes. Up to 64 maps are
    thinned at once, each in a bit of its own of one number a pixel."""
    height, width = (side + 2 for side in maps.shape[1:])  # a frame of pixels that are off
    inside = np.flatnonzero(maps.any(0))
    places = np.flatnonzero(np.pad(maps.any(0), 1))
    thinned = np.zeros_like(maps)
    for first in range(0, len(maps), 64):
        some = maps[first : first + 64].reshape(-1, maps[0].size)[:, inside]
        spread = np.zeros((len(inside), 64), dtype=np.bool_)
        spread[:, : len(some)] = some.T
        bits = np.zeros(height * width, dtype=np.uint64)
        bits[places] = np.packbits(spread, axis=1).view(np.uint64)[:, 0]
        _thin(bits, places, width)
        left = np.unpackbits(bits[places, None].view(np.uint8), axis=1, count=len(some))
        thinned.reshape(len(maps), -1)[first : first + 64, inside] = left.T
    return thinned


def _thin(bits: NDArray[np.uint64], places: Ints, width: int) -> None:
    """Thin the maps in the bits of an image with rows of `width` pixels, which are off except at `places`."""
    around = np.array([1, 1 - width, -width, -width - 1, -1, width - 1, width, width + 1])
    half, gone = 0, [places, places]
    while len(gone[0]) or len(gone[1]):
        # A half has something new to see only next to what went since it was last tried.
        beside = np.zeros(len(bits), dtype=np.bool_)
        beside[np.concatenate(gone)[:, None] + around] = True
        near = np.flatnonzero(beside & (bits != 0))
        left = bits[near] & ~_removable(bits[near + around[:, None]], half)
        changed = left != bits[near]
        gone = [gone[1], near[changed]]
        bits[near] = left
        half = 1 - half


def _removable(x: NDArray[np.uint64], half: int) -> NDArray[np.uint64]:
    """Return in which of 64 maps each of P pixels may go in this half of a thinning pass, by its neighbours x (8 x P).

    The conditions are G1 to G3 of Lam, Lee and Suen (1992), after Guo and Hall (1989). Neighbours are counted from the
    east against the clock.
    """
    east, ne, north, nw, west, sw, south, se = x
    sides, corners = x[::2], x[1::2]
    following = np.roll(sides, -1, axis=0)
    crossings, before, after = ~sides & (corners | following), sides | corners, corners | following
    one_crossing = np.bitwise_or.reduce(crossings) & ~_two(crossings)
    two_or_three = _two(before) & _two(after) & ~np.bitwise_and.reduce(before & after)
    kept = (sw | south | ~nw) & west if half else (ne | north | ~se) & east
    return one_crossing & two_or_three & ~kept


def _two(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the bits that at least two of four numbers have."""
    a, b, c, d = x
    return (a & b) | (c & d) | ((a | b) & (c | d))


def pairs(maps: Bools, truth: Bools, radius: float) -> Ints:
    """Return, for each map of N x H x W, the most one-to-one pairs with pixels of `truth` (H x W) within `radius`
    pixels. Right for any maps, and fast where most pixels of a map are in all maps before it too."""
    from scipy import spatial

    inside, tree = maps.any(0), spatial.KDTree(np.argwhere(truth))
    near: list[list[int]] = tree.query_ball_point(np.argwhere(inside), radius).tolist()
    matching = Matching([ends for ends in near if ends], tree.n)
    # A pixel that is in a map and in all before it stays to the end, when maps are taken from the last to the first.
    on = maps[:, inside][:, [*map(bool, near)]]
    staying = np.logical_and.accumulate(on)
    new = staying.copy()
    new[:-1] &= ~staying[1:]
    sizes = np.zeros(len(maps), dtype=np.int64)
    for i in reversed(range(len(maps))):
        matching.add(np.flatnonzero(new[i]))
        whole = matching.copy()
        whole.add(np.flatnonzero(on[i] & ~staying[i]))
        sizes[i] = whole.size
    return sizes


class Matching:
    """A largest one-to-one matching between nodes of a left side, added one by one, and those of a right side.

    A left node that finds no partner when it is added never will: all right nodes that it can reach are taken, by left
    nodes that reach no others (a Hungarian tree; Kuhn, 1955). So each node is tried once, and what a vain search saw is
    closed for good.
    """

    def __init__(self, near: Sequence[Sequence[int]], right: int) -> None:
        """`near`: the neighbours of each left node among the `right` nodes."""
        self.near, self.size = near, 0
        self.partner = [-1] * right
        self.closed = bytearray(right)

    def copy(self) -> Matching:
        """Return a copy, to which nodes can be added independently."""
        other = copy(self)
        other.partner, other.closed = self.partner.copy(), self.closed.copy()
        return other

    def add(self, nodes: Ints) -> None:
        """Add left nodes."""
        self.size += sum(map(self._placed, nodes.tolist()))

    def _placed(self, node: int) -> bool:
        """Add one left node and return whether it found a partner: a free one, or one whose partner finds another."""
        partner, closed = self.partner, self.closed
        queue, given_up = [node], [-1]  # left nodes, and the right node that each would give up
        seen: dict[int, int] = {}  # right node -> the place in the queue of the left node that asks for it
        for place, left in enumerate(queue):
            for right in self.near[left]:
                if closed[right]:
                    continue
                if partner[right] >= 0:
                    closed[right], seen[right] = True, place
                    queue.append(partner[right])
                    given_up.append(right)
                    continue
                for other in seen:
                    closed[other] = False
                while right >= 0:
                    partner[right], right = queue[place], given_up[place]
                    place = seen.get(right, -1)
                return True
        return False
