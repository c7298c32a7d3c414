"""Measure what odsF costs, and what is won by treating all thresholds together.

`OdsF` thins up to 64 thresholds at once and matches all with one growing matching. Beside it, on the same soft map:
each threshold alone, thinned by scikit-image and matched by scipy's largest flow; its counts must be the same. That is
done for every 11th of the 99 thresholds, and its time counts 11 times. Two kinds of maps, with the distance of NYUD:
boundaries of random regions, blurred, with noise (as from a network), and noise alone. CPU seconds of one thread, the
two ways in turn.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import numpy as np
import torch
from _common import arguments, machine
from numpy.typing import NDArray
from scipy import ndimage, sparse
from scipy.sparse.csgraph import maximum_flow
from scipy.spatial import cKDTree
from skimage import morphology

from fedloom.models.tasks.edges import suppress
from fedloom.tasks import OdsF

DISTANCE, THRESHOLDS, STEP = 0.011, 99, 11
Floats = NDArray[np.float64]
Counts = tuple[list[int], list[int]]


def maps(size: tuple[int, int], seed: int) -> tuple[Floats, dict[str, Floats]]:
    """(truth, soft map by kind) of an image."""
    rng = np.random.default_rng(seed)
    regions = ndimage.gaussian_filter(rng.normal(size=size), size[0] / 24)
    classes = np.digitize(regions, np.quantile(regions, (0.2, 0.4, 0.6, 0.8)))
    truth = (ndimage.grey_dilation(classes, 2) != classes).astype(np.float64)
    blurred, noise = (ndimage.gaussian_filter(x, s) for x, s in ((truth, 3), (rng.normal(size=size), 2)))
    logits = 6 * blurred / blurred.max() - 3 + noise / noise.std()
    return truth, {"boundaries": 1 / (1 + np.exp(-logits)), "noise": rng.random(size)}


def together(soft: Floats, truth: Floats) -> Counts:
    """Hits and predicted pixels by `OdsF`, of some thresholds."""
    measure = OdsF(DISTANCE, THRESHOLDS)
    measure.update(torch.logit(torch.from_numpy(soft))[None, None], torch.from_numpy(truth)[None])
    return measure.hits[::STEP].tolist(), measure.predicted[::STEP].tolist()


def alone(soft: Floats, truth: Floats) -> Counts:
    """The same with each of some thresholds alone."""
    crests = suppress(torch.logit(torch.from_numpy(soft)).sigmoid().numpy())
    line = cKDTree(np.argwhere(morphology.thin(truth > 0)))
    hits, predicted = [], []
    for i in range(0, THRESHOLDS, STEP):
        found = np.argwhere(morphology.thin(crests >= (i + 1) / (THRESHOLDS + 1)))
        predicted.append(len(found))
        near = line.query_ball_point(found, DISTANCE * math.hypot(*soft.shape)) if len(found) else []
        hits.append(flow([np.asarray(ends, dtype=np.int64) for ends in near], line.n))
    return hits, predicted


def flow(near: list[NDArray[np.int64]], right: int) -> int:
    """The size of a largest matching, from the neighbours of each left node."""
    left = len(near)
    if not left:
        return 0
    source, sink = left + right, left + right + 1
    start = np.concatenate([np.repeat(np.arange(left), [len(n) for n in near]), np.full(left, source)])
    start = np.concatenate([start, np.arange(left, left + right)])
    end = np.concatenate([left + np.concatenate(near), np.arange(left), np.full(right, sink)])
    graph = sparse.csr_array((np.ones(len(start), np.int32), (start, end)), shape=(sink + 1,) * 2)
    return int(maximum_flow(graph, source, sink, method="dinic").flow_value)


def seconds(way: Callable[[Floats, Floats], Counts], *image: Floats) -> tuple[float, Counts]:
    """CPU seconds of one call, and its result."""
    start = time.process_time()
    found = way(*image)
    return time.process_time() - start, found


def main() -> None:
    quick = arguments(__doc__).quick
    torch.set_num_threads(1)
    print(machine())
    print(f"{'image':<12} {'map':<12} {'together':>9} {'alone':>9} {'ratio':>6}")
    for size in ((96, 128),) if quick else ((96, 128), (448, 576)):
        images = [maps(size, seed) for seed in range(1 if quick else 3)]
        for kind in images[0][1]:
            spent = []
            for truth, soft in images:
                (ours, counts), (theirs, expected) = (seconds(way, soft[kind], truth) for way in (together, alone))
                assert counts == expected, f"{kind} {size}: the counts differ"
                spent.append((ours, STEP * theirs))
            ours, theirs = np.mean(spent, axis=0)
            height, width = size
            print(f"{height} x {width:<6} {kind:<12} {ours:>7.3f} s {theirs:>7.2f} s {theirs / ours:>6.1f}", flush=True)


if __name__ == "__main__":
    main()
