"""LogME: the evidence of labels under Bayesian linear regression on features (You et al., ICML 2021)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fedloom.study.relatedness._arrays import Array, classes_of, features_of, is_classes, standardised, targets_of

_SMALL = 1e-5  # keeps beta finite where the residual vanishes
_REACH = 35.0  # how far log(alpha / beta) may be from the log of the largest squared singular value


def logme(features: Any, labels: Any, standardise: bool = True) -> float:
    """Maximal log evidence per sample of labels (n) given features (n x D), averaged over classes; higher is better.

    Integer labels are classes, each a regression on its indicator; float labels (n, or n x C) are regression targets,
    averaged over C. For one target y, over alpha and beta:

        log ev = D/2 log alpha + n/2 log beta - n/2 log 2 pi - beta/2 |F m - y|^2 - alpha/2 |m|^2
                 - 1/2 log det(alpha I + beta F'F),    m = beta (alpha I + beta F'F)^-1 F'y.

    The maximum is that to which the usual fixed point (gamma = sum s^2 / (s^2 + alpha / beta), alpha = gamma / |m|^2,
    beta = (n - gamma) / |F m - y|^2) converges, but found directly, for the fixed point may need thousands of steps.
    The determinant is the full one, also where D > n or the features have a lower rank. The public LogME.fit leaves out
    directions that its truncated decomposition drops, so its values differ there. Labels of a single class, or no
    samples, give nan. `standardise` gives every feature mean 0 and variance 1 first; without, scores depend on the
    features' scale.
    """
    F = features_of(features)
    n, D = F.shape
    if is_classes(labels):
        found, index = classes_of(labels, n)
        if len(found) < 2:
            return math.nan
        Y = (index[:, None] == np.arange(len(found))).astype(np.float64)
    else:
        Y = targets_of(labels, n)
        if not n or bool((Y[:1] == Y).all()):
            return math.nan
    if standardise:
        F = standardised(F)
    U, s, _ = np.linalg.svd(F, full_matrices=False)
    Z = U.T @ Y
    rest = np.maximum((Y * Y).sum(0) - (Z * Z).sum(0), 0.0)
    if n <= D:
        rest[:] = 0.0  # U spans everything; what is left is round-off
    return float(np.mean([_evidence(s * s, z * z, r, n) for z, r in zip(Z.T, rest, strict=True)]))


def _evidence(s2: Array, z2: Array, rest: float, n: int) -> float:
    """Largest log evidence per sample; s2: squared singular values, z2: squared coordinates of y, rest: |y|^2 outside.

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
