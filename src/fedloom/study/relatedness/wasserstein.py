"""WTE: a distance of data sets by optimal transport to a common reference (Liu et al., Neural Networks 2025)."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

import numpy as np

from fedloom.core.extras import need
from fedloom.study.relatedness._arrays import Array, array, classes_of, features_of


def wte(
    inputs: Sequence[Any], labels: Sequence[Any], *, reference: int = 64, label_dims: int = 10, seed: int = 0
) -> Array:
    """Distances (T x T) of T data sets; no model is needed. See `wte_embeddings`; the distance is the Euclidean one."""
    V = wte_embeddings(inputs, labels, reference=reference, label_dims=label_dims, seed=seed)
    D = np.zeros((len(V), len(V)))
    for i in range(len(V)):
        for j in range(i):
            D[i, j] = D[j, i] = np.linalg.norm(V[i] - V[j])
    return D


def wte_embeddings(
    inputs: Sequence[Any], labels: Sequence[Any], *, reference: int = 64, label_dims: int = 10, seed: int = 0
) -> Array:
    """One vector per data set (T x (m (p + q))), from inputs or features (n_t x p) and integer labels (n_t).

    1. 2-Wasserstein distances between the inputs of all classes of all data sets; classical multidimensional scaling
       puts each class at a point with q <= `label_dims` coordinates.
    2. A sample is its input and its class's point. The reference is m = `reference` different samples, drawn with
       `seed` from all data sets together (all of them where there are fewer).
    3. Of the optimal plan from the reference to a data set, the barycentric projection: where the mass of each
       reference sample goes on average. The embedding is how far that is from the sample, over sqrt(m).

    Transport is exact: for equal sizes an assignment, else POT where it is installed, else a linear programme of SciPy.
    So data sets should be small (hundreds of samples); scale their inputs alike. Their order does not matter.
    """
    if len(inputs) != len(labels) or not len(inputs):
        raise ValueError(f"wte: expected inputs and labels of some data sets, found {len(inputs)} and {len(labels)}")
    sets = [features_of(x) for x in inputs]
    if len({x.shape[1] for x in sets}) > 1 or not all(len(x) for x in sets):
        raise ValueError(f"wte: expected samples of one size, found {[x.shape for x in sets]}")
    of = [classes_of(y, len(x)) for x, y in zip(sets, labels, strict=True)]
    groups = [x[index == c] for x, (found, index) in zip(sets, of, strict=True) for c in range(len(found))]
    points = _scaling(_between(groups), label_dims)
    joint, start = [], 0
    for x, (found, index) in zip(sets, of, strict=True):
        joint.append(np.hstack([x, points[start : start + len(found)][index]]))
        start += len(found)
    base = _reference(np.vstack(joint), sets[0].shape[1], reference, seed)
    m = len(base)
    return np.stack([((m * plan(_squares(base, z)) @ z - base) / np.sqrt(m)).ravel() for z in joint])


def plan(cost: Any) -> Array:
    """The optimal transport plan (n x m) between uniform weights for a cost matrix; its entries sum to 1."""
    C = array(cost).astype(np.float64)
    n, m = C.shape
    optimize = need("scipy.optimize", "data")
    if n == m:
        P = np.zeros((n, n))
        P[optimize.linear_sum_assignment(C)] = 1 / n
        return P
    if min(n, m) == 1:
        return np.full((n, m), 1 / (n * m))
    if importlib.util.find_spec("ot") is not None:
        return np.asarray(need("ot", "data").emd(np.full(n, 1 / n), np.full(m, 1 / m), C))
    sparse = need("scipy.sparse", "data")
    sums = sparse.vstack([sparse.kron(sparse.eye(n), np.ones((1, m))), sparse.kron(np.ones((1, n)), sparse.eye(m))])
    weights = np.concatenate([np.full(n, 1 / n), np.full(m, 1 / m)])
    scale = float(C.max()) or 1.0
    found = optimize.linprog(C.ravel() / scale, A_eq=sums.tocsr()[:-1], b_eq=weights[:-1], method="highs")
    if found.x is None:
        raise RuntimeError(f"optimal transport of {n} to {m} points: {found.message}")
    return np.asarray(found.x).reshape(n, m).clip(min=0)


def _squares(a: Array, b: Array) -> Array:
    """Squared Euclidean distances."""
    return np.asarray(((a[:, None] - b[None]) ** 2).sum(-1))


def _between(groups: Sequence[Array]) -> Array:
    """2-Wasserstein distances of point sets."""
    W = np.zeros((len(groups), len(groups)))
    for i, a in enumerate(groups):
        for j, b in enumerate(groups[:i]):
            cost = _squares(a, b)
            W[i, j] = W[j, i] = np.sqrt((plan(cost) * cost).sum())
    return W


def _scaling(D: Array, dims: int) -> Array:
    """Classical multidimensional scaling of a distance matrix: C x q, directions of positive eigenvalues only."""
    J = np.eye(len(D)) - 1 / len(D)
    values, vectors = np.linalg.eigh(-J @ (D * D) @ J / 2)
    keep = [i for i in np.argsort(-values)[:dims] if values[i] > 1e-12 * max(float(values.max()), 1e-300)]
    return np.asarray(vectors[:, keep] * np.sqrt(values[keep]))


def _reference(samples: Array, p: int, m: int, seed: int) -> Array:
    """m different samples, chosen in a way that depends on neither the order of samples nor the scaling's rotation."""
    size = (samples[:, p:] ** 2).sum(1).round(9)
    _, first = np.unique(np.column_stack([samples[:, :p], size]), axis=0, return_index=True)
    m = min(m, len(first))
    return samples[np.sort(first[np.random.default_rng(seed).choice(len(first), m, replace=False)])]
