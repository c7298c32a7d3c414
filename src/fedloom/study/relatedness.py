"""Six measures of how related two tasks are.

sign, cosine    agreement of the task vectors themselves
etran           how familiar the data is to a model, and how well its features separate the labels
                (Gholami et al., ICCV 2023)
logme           evidence of labels under Bayesian linear regression on features (You et al., ICML 2021)
fim             similarity of the diagonals of Fisher information
wte             distance of data sets by optimal transport to a common reference (Liu et al., Neural Networks 2025)
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from fedloom.core.taskvectors import Zeros, choose, sign_similarity
from fedloom.study.agreement import Array, array


def features_of(x: Any) -> Array:
    """Return n x D, float64; inputs with more dimensions are flattened."""
    F = array(x).astype(np.float64)
    if F.ndim < 2:
        raise ValueError(f"features: expected n x D, found shape {F.shape}")
    F = F.reshape(len(F), math.prod(F.shape[1:]))
    if not np.isfinite(F).all():
        raise ValueError("features: found nan or inf")
    return F


def standardised(F: Array) -> Array:
    """Scale every column to mean 0 and standard deviation 1; constant columns become 0."""
    F = F - F.mean(0)
    spread = F.std(0)
    return F / np.where(spread > 1e-12 * spread.max(initial=1.0), spread, np.inf)


def classes_of(y: Any, n: int) -> tuple[Array, Array]:
    """Return (classes that occur, index into them of each sample) of integer labels (n)."""
    labels = array(y)
    if labels.shape != (n,) or labels.dtype.kind not in "iub":
        raise ValueError(f"labels: expected {n} integers, found shape {labels.shape} of {labels.dtype}")
    values, index = np.unique(labels, return_inverse=True)
    return values, index


def is_classes(y: Any) -> bool:
    """Return whether labels are classes (integers), not targets of a regression (floats)."""
    return array(y).dtype.kind in "iub"


def targets_of(y: Any, n: int) -> Array:
    """Return n x C, float64, of regression targets (n, or n x C)."""
    targets = array(y).astype(np.float64)
    if len(targets) != n or not np.isfinite(targets).all():
        raise ValueError(f"targets: expected {n} finite values or rows, found shape {targets.shape}")
    return targets.reshape(n, math.prod(targets.shape[1:]))


@dataclass(frozen=True)
class EtranScore:
    """The two parts of ETran; they have different scales, see `etran_totals`."""

    energy: float
    """Mean over samples of the logsumexp over features: higher means more like what the model was trained on."""
    labels: float
    """Classes: mean log probability of the true class under LDA. Regression: minus the mean squared error of a fit."""


def etran(features: Any, labels: Any, shrinkage: float = 1e-2, energy_kept: float = 0.8) -> EtranScore:
    """Compute ETran's scores of features (n x D) for labels (n), in float64; higher is better.

    Classes (integer labels): linear discriminant analysis with class means, class shares as priors, and the pooled
    covariance within classes, shrunk by `shrinkage` towards a multiple of the identity; the score is the mean log
    probability of the true class on the same data. Labels of a single class give nan.
    Regression (float labels, n or n x C): targets, centred, are projected on the leading left singular vectors of the
    centred features, as many as hold `energy_kept` of their squared singular values; the score is minus the mean
    squared error. The choices of shrinkage and truncation are ours.
    """
    if not 0 < shrinkage <= 1 or not 0 < energy_kept <= 1:
        raise ValueError(f"expected 0 < shrinkage, energy_kept <= 1, found {shrinkage} and {energy_kept}")
    F = features_of(features)
    n = len(F)
    if not n:
        return EtranScore(math.nan, math.nan)
    energy = float(np.logaddexp.reduce(F, axis=1).mean())
    if not is_classes(labels):
        return EtranScore(energy, _regression(F, targets_of(labels, n), energy_kept))
    values, index = classes_of(labels, n)
    return EtranScore(energy, _discriminant(F, index, len(values), shrinkage) if len(values) > 1 else math.nan)


def _discriminant(F: Array, index: Array, classes: int, shrinkage: float) -> float:
    n, D = F.shape
    counts = np.bincount(index, minlength=classes)
    means = np.stack([F[index == c].mean(0) for c in range(classes)])
    # Of the centred features only the span of the samples matters, which keeps this small for D > n.
    F, means = F - F.mean(0), means - F.mean(0)
    _, s, Vt = np.linalg.svd(F, full_matrices=False)
    basis = Vt[s > 1e-12 * s.max(initial=0.0)]
    if not len(basis):
        return float((np.log(counts / n) * counts).sum() / n)
    F, means = F @ basis.T, means @ basis.T
    inside = F - means[index]
    S = inside.T @ inside / n
    level = np.trace(S) / D or np.trace(F.T @ F) / (n * D)
    S = (1 - shrinkage) * S + shrinkage * level * np.eye(len(S))
    W = np.linalg.solve(S, means.T)
    score = F @ W - (means * W.T).sum(1) / 2 + np.log(counts / n)
    log_p = score - np.logaddexp.reduce(score, axis=1, keepdims=True)
    return float(log_p[np.arange(n), index].mean())


def _regression(F: Array, Y: Array, energy_kept: float) -> float:
    F, Y = F - F.mean(0), Y - Y.mean(0)
    U, s, _ = np.linalg.svd(F, full_matrices=False)
    share = np.cumsum(s * s)
    k = int(np.searchsorted(share, energy_kept * share[-1:].sum() * (1 - 1e-12))) + 1
    U = U[:, :k][:, s[:k] > 1e-12 * s.max(initial=0.0)]
    return -float(((Y - U @ (U.T @ Y)) ** 2).mean())


def etran_totals(energy: Any, labels: Any) -> Array:
    """Compute ETran's total (S candidates x T tasks): each part scaled to [0, 1] over the candidates, then added.

    The candidates of a task are the rows of its column. A part that is the same for all of them counts as 0.
    """
    return _scaled(array(energy)) + _scaled(array(labels))


def _scaled(R: Array) -> Array:
    low, high = R.min(0), R.max(0)
    spread = high - low
    return np.asarray((R - low) / np.where(spread > 0, spread, 1.0))


_VALUES = 1 << 21  # float64 values at a time


def sign(vectors: Tensor, zeros: Zeros = "half") -> Tensor:
    """Compute MaTU's similarity (eq. 5) of task vectors (T x d): T x T in [0, 1]. See `taskvectors.sign_similarity`."""
    return sign_similarity(vectors, zeros)


def cosine(vectors: Tensor) -> Tensor:
    """Compute cosines of task vectors (T x d; no whole weights): T x T, float64; 0 for a vector that is zero."""
    T, d = vectors.shape
    G = torch.zeros(T, T, dtype=torch.float64, device=vectors.device)
    step = max(1, _VALUES // max(T, 1))
    for a in range(0, d, step):
        part = vectors[:, a : a + step].double()
        G.addmm_(part, part.t())
    G = (G + G.t()) / 2
    norms = G.diagonal().sqrt()
    scale = torch.where(norms > 0, 1 / norms, 0.0)
    C = (G * scale * scale[:, None]).clamp_(-1, 1)
    C.diagonal().copy_((norms > 0).double())
    return C


_SMALL = 1e-5  # keeps beta finite where the residual vanishes
_REACH = 35.0  # how far log(alpha / beta) may be from the log of the largest squared singular value


def logme(features: Any, labels: Any) -> float:
    """Compute the maximal log evidence per sample of labels (n) given features (n x D), averaged over classes.

    Higher is better.

    Integer labels are classes, each a regression on its indicator; float labels (n, or n x C) are regression targets,
    averaged over C. For one target y, over alpha and beta:

        log ev = D/2 log alpha + n/2 log beta - n/2 log 2 pi - beta/2 |F m - y|^2 - alpha/2 |m|^2
                 - 1/2 log det(alpha I + beta F'F),    m = beta (alpha I + beta F'F)^-1 F'y.

    The maximum is that to which the usual fixed point (gamma = sum s^2 / (s^2 + alpha / beta), alpha = gamma / |m|^2,
    beta = (n - gamma) / |F m - y|^2) converges. It is computed directly, because the fixed point may need thousands of
    steps. The determinant is the full one, also where D > n or the features have a lower rank. The public LogME.fit
    leaves out directions that its truncated decomposition drops, so its values differ there. Labels of a single class,
    or no samples, give nan. Every feature has mean 0 and variance 1 first: scores would depend on the features' scale.
    """
    F = features_of(features)
    n, D = F.shape
    if is_classes(labels):
        values, index = classes_of(labels, n)
        if len(values) < 2:
            return math.nan
        Y = (index[:, None] == np.arange(len(values))).astype(np.float64)
    else:
        Y = targets_of(labels, n)
        if not n or bool((Y[:1] == Y).all()):
            return math.nan
    U, s, _ = np.linalg.svd(standardised(F), full_matrices=False)
    Z = U.T @ Y
    rest = np.maximum((Y * Y).sum(0) - (Z * Z).sum(0), 0.0)
    if n <= D:
        rest[:] = 0.0  # U spans everything; what is left is round-off
    return float(np.mean([_evidence(s * s, z * z, r, n) for z, r in zip(Z.T, rest, strict=True)]))


def _evidence(s2: Array, z2: Array, rest: float, n: int) -> float:
    """Return the largest log evidence per sample.

    s2: squared singular values, z2: squared coordinates of y, rest: |y|^2 outside.

    In terms of r = alpha / beta, beta |F m - y|^2 + alpha |m|^2 is beta Q(r), the best beta is n / Q, and the powers of
    alpha and the determinant are together -1/2 sum log(1 + s^2 / r), in which D no longer occurs. One variable is left,
    whose logarithm is searched from end to end.
    """
    top = float(s2.max(initial=0.0)) or 1.0
    low, high = math.log(top) - _REACH, math.log(top) + _REACH
    best = -math.inf
    for _ in range(8):
        t = np.linspace(low, high, 201)
        r = np.exp(t)[:, None]
        Q = (z2 * (r / (s2 + r))).sum(1) + rest
        beta = n / (Q + _SMALL)
        value = (n * np.log(beta / (2 * math.pi)) - beta * Q - np.log1p(s2 / r).sum(1)) / (2 * n)
        i = int(value.argmax())
        best = max(best, float(value[i]))
        low, high = t[max(i - 1, 0)], t[min(i + 1, len(t) - 1)]
    return best


Kind = Literal["empirical", "true"]
Likelihood = Literal["categorical", "gaussian"]


def fisher_diagonal(
    module: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    kind: Kind = "empirical",
    *,
    likelihood: Likelihood = "categorical",
    parameters: Sequence[str] | None = None,
    seed: int = 0,
    at_once: int = 32,
) -> Tensor:
    """Compute the diagonal of the Fisher information: the mean over samples of (d log p(y | x) / d theta_i)^2.

    The result has shape (d) and is float64.

    `batches` gives (inputs, targets). kind="empirical" takes the targets as y; "true" draws y from the model, one per
    sample, and does not look at them. "categorical": the module's output is logits (n x C, or n x C x ..; log p of a
    sample is the sum over positions), y class numbers, positions with y = 255 left out. "gaussian": y is normal
    around the output with variance 1.

    `parameters` are globs on names, for example those of the shared encoder; without, all parameters. They follow each
    other in the result in the order of the module. The module runs as in evaluation, `at_once` samples at a time.
    """
    choose("kind", kind, Kind)
    choose("likelihood", likelihood, Likelihood)
    wanted = {
        name: p.detach()
        for name, p in module.named_parameters()
        if parameters is None or any(fnmatch.fnmatchcase(name, g) for g in parameters)
    }
    if not wanted:
        raise ValueError(f"parameters: no parameter of the module matches {parameters}")
    device = next(iter(wanted.values())).device
    rest = {k: v.detach() for k, v in (*module.named_parameters(), *module.named_buffers()) if k not in wanted}

    def log_p(some: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        out = functional_call(module, {**rest, **some}, (x[None],))[0]
        if likelihood == "gaussian":
            return -((out - y.reshape(out.shape)) ** 2).sum() / 2
        unlabelled = y == 255
        chosen = out.log_softmax(0).gather(0, torch.where(unlabelled, 0, y)[None])[0]
        return torch.where(unlabelled, 0.0, chosen).sum()

    each = vmap(grad(log_p), in_dims=(None, 0, 0))
    total = torch.zeros(sum(p.numel() for p in wanted.values()), dtype=torch.float64, device=device)
    count, generator = 0, torch.Generator().manual_seed(seed)
    was_training = module.training
    module.eval()
    try:
        for x, y in batches:
            for part, target in zip(x.to(device).split(at_once), y.to(device).split(at_once), strict=True):
                drawn = _drawn(module, part, likelihood, generator) if kind == "true" else target
                squares = each(wanted, part, drawn if drawn.is_floating_point() else drawn.long())
                total += torch.cat([squares[name].double().square().sum(0).reshape(-1) for name in wanted])
                count += len(part)
    finally:
        module.train(was_training)
    return total / max(count, 1)


@torch.no_grad()
def _drawn(module: nn.Module, x: Tensor, likelihood: Likelihood, generator: torch.Generator) -> Tensor:
    """Draw one target per sample (and position) from the predictions of the model."""
    out = module(x)
    if likelihood == "gaussian":
        return out + torch.randn(out.shape, generator=generator).to(out)
    p = out.movedim(1, -1).softmax(-1)
    drawn = torch.multinomial(p.reshape(-1, p.shape[-1]).cpu(), 1, generator=generator)
    return drawn.reshape(p.shape[:-1]).to(x.device)


def fim(diagonals: Tensor | Sequence[Tensor]) -> Tensor:
    """Compute the cosines of the diagonals (T x d) of tasks' Fisher information: T x T, float64, in [0, 1].

    A diagonal that is all zero has similarity 0 to every task, itself too.
    """
    rows = [f.double() for f in diagonals]
    S = torch.zeros(len(rows), len(rows), dtype=torch.float64)
    for i, a in enumerate(rows):
        for j, b in enumerate(rows[: i + 1]):
            size = float(a.norm() * b.norm())
            S[i, j] = S[j, i] = min(float(a @ b) / size, 1.0) if size > 0 else 0.0
    return S


def wte(inputs: Sequence[Any], labels: Sequence[Any], *, reference: int = 64, seed: int = 0) -> Array:
    """Compute Euclidean distances (T x T) of the embeddings of T data sets, see `wte_embeddings`; without a model."""
    V = wte_embeddings(inputs, labels, reference=reference, seed=seed)
    return np.stack([np.linalg.norm(V - v, axis=1) for v in V])


def wte_embeddings(inputs: Sequence[Any], labels: Sequence[Any], *, reference: int = 64, seed: int = 0) -> Array:
    """Compute one vector per data set (T x (m (p + q))), from inputs or features (n_t x p) and integer labels (n_t).

    1. 2-Wasserstein distances between the inputs of all classes of all data sets; classical multidimensional scaling
       puts each class at a point with q <= 10 coordinates.
    2. A sample is its input and its class's point. The reference is m = `reference` different samples, drawn with
       `seed` from all data sets together (all of them where there are fewer).
    3. Of the optimal plan from the reference to a data set, the barycentric projection: where the mass of each
       reference sample goes on average. The embedding is how far that is from the sample, over sqrt(m).

    Transport is exact: for equal sizes an assignment, else a linear programme of SciPy.
    So data sets should be small (hundreds of samples); scale their inputs alike. Their order does not matter.
    """
    if len(inputs) != len(labels) or not len(inputs):
        raise ValueError(f"wte: expected inputs and labels of some data sets, found {len(inputs)} and {len(labels)}")
    sets = [features_of(x) for x in inputs]
    if len({x.shape[1] for x in sets}) > 1 or not all(len(x) for x in sets):
        raise ValueError(f"wte: expected samples of one size, found {[x.shape for x in sets]}")
    of = [classes_of(y, len(x)) for x, y in zip(sets, labels, strict=True)]
    groups = [x[index == c] for x, (values, index) in zip(sets, of, strict=True) for c in range(len(values))]
    points = _scaling(_between(groups), 10)
    joint, start = [], 0
    for x, (values, index) in zip(sets, of, strict=True):
        joint.append(np.hstack([x, points[start : start + len(values)][index]]))
        start += len(values)
    base = _reference(np.vstack(joint), sets[0].shape[1], reference, seed)
    m = len(base)
    return np.stack([((m * plan(_distances(base, z)) @ z - base) / np.sqrt(m)).ravel() for z in joint])


def plan(cost: Any) -> Array:
    """Compute the optimal transport plan (n x m) between uniform weights for a cost matrix; its entries sum to 1."""
    from scipy import optimize, sparse

    C = array(cost).astype(np.float64)
    n, m = C.shape
    if n == m:
        P = np.zeros((n, n))
        P[optimize.linear_sum_assignment(C)] = 1 / n
        return P
    if min(n, m) == 1:
        return np.full((n, m), 1 / (n * m))
    sums = sparse.vstack([sparse.kron(sparse.eye(n), np.ones((1, m))), sparse.kron(np.ones((1, n)), sparse.eye(m))])
    weights = np.concatenate([np.full(n, 1 / n), np.full(m, 1 / m)])
    scale = float(C.max()) or 1.0
    solution = optimize.linprog(C.ravel() / scale, A_eq=sums.tocsr()[:-1], b_eq=weights[:-1], method="highs")
    if solution.x is None:
        raise RuntimeError(f"optimal transport of {n} to {m} points: {solution.message}")
    return np.asarray(solution.x).reshape(n, m).clip(min=0)


def _distances(a: Array, b: Array) -> Array:
    """Return squared Euclidean distances."""
    return np.asarray(((a[:, None] - b[None]) ** 2).sum(-1))


def _between(groups: Sequence[Array]) -> Array:
    """Return 2-Wasserstein distances of point sets."""
    W = np.zeros((len(groups), len(groups)))
    for i, a in enumerate(groups):
        for j, b in enumerate(groups[:i]):
            cost = _distances(a, b)
            W[i, j] = W[j, i] = np.sqrt((plan(cost) * cost).sum())
    return W


def _scaling(D: Array, dims: int) -> Array:
    """Scale a distance matrix to points by classical scaling: C x q, directions of positive eigenvalues only."""
    J = np.eye(len(D)) - 1 / len(D)
    values, vectors = np.linalg.eigh(-J @ (D * D) @ J / 2)
    keep = [i for i in np.argsort(-values)[:dims] if values[i] > 1e-12 * max(float(values.max()), 1e-300)]
    return np.asarray(vectors[:, keep] * np.sqrt(values[keep]))


def _reference(samples: Array, p: int, m: int, seed: int) -> Array:
    """Return m different samples; the choice depends on neither their order nor the scaling's rotation."""
    size = (samples[:, p:] ** 2).sum(1).round(9)
    _, first = np.unique(np.column_stack([samples[:, :p], size]), axis=0, return_index=True)
    m = min(m, len(first))
    return samples[np.sort(first[np.random.default_rng(seed).choice(len(first), m, replace=False)])]
