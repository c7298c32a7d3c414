"""Mathematics of rules that compare rows: the K x K Gram matrix of a round, and minima over the simplex."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fedloom.core.layout import pieces
from fedloom.core.updates import Updates, columns_here

_VALUES, _COLUMNS = 1 << 17, 1 << 10
"""The matrix is read in chunks of about so many float64 values, which stay in a core's cache, and of at least so many
columns, for each chunk reads and writes all sums.
"""
_EPS = 2.0**-52


def gram(updates: Updates, columns: Sequence[slice] | None = None) -> Tensor:
    """Return inner products of the rows (K x K, float64, on the CPU), over all columns or some slices, by chunks."""
    return inner_products(updates, None, columns)[0]


def inner_products(
    updates: Updates, vector: Tensor | None, columns: Sequence[slice] | None = None
) -> tuple[Tensor, Tensor]:
    """Return in one pass (`gram`, inner products of the rows with a vector (d)): K x K and K; 0 without a vector."""
    X, k = updates.data, len(updates)
    G = torch.zeros(k, k, dtype=torch.float64, device=X.device)
    h = torch.zeros(k, dtype=torch.float64, device=X.device)
    step = max(_COLUMNS, _VALUES // max(k, 1))
    for s in [slice(0, updates.layout.d)] if columns is None else columns:
        for piece in pieces(s, step):
            part = X[:, piece].double()
            G.addmm_(part, part.t())
            if vector is not None:
                h.addmv_(part, vector[piece].to(part))
    G, h = columns_here().total(G.cpu()), h.cpu() if vector is None else columns_here().total(h.cpu())
    if updates.mixing is not None:
        M = updates.mixing.cpu()
        G, h = M @ G @ M.t(), M @ h
    return (G + G.t()) / 2, h


def normalised(G: Tensor) -> tuple[Tensor, float]:
    """Return (G divided by its mean diagonal, that mean), so that a problem does not depend on the updates' scale."""
    scale = float(G.diagonal().mean()) if len(G) else 0.0
    return (G / scale if scale > 0 else torch.zeros_like(G)), scale


def nonzero(G: Tensor) -> Tensor:
    """Return the rows that are not zero (K, bool): norms above 1e-12 of the largest one."""
    squares = G.diagonal()
    return squares > 1e-24 * squares.max() if len(G) else squares.bool()


def cancels(G: Tensor, w: Tensor) -> bool:
    """Return whether sum_i w_i X_i (w >= 0) is within a millionth of sum_i w_i |X_i|: too short for a direction."""
    parts = float(w @ G.diagonal().clamp(min=0).sqrt())
    return float(w @ G @ w) <= (1e-6 * parts) ** 2


def simplex_minimum(Q: Tensor, b: Tensor | None = None, start: Tensor | None = None) -> Tensor:
    """Return argmin of w'Qw / 2 + b'w over w >= 0, sum w = 1, positive semidefinite Q (K x K, float64, K up to ~100).

    Wolfe's active-set method (Math. Programming 11, 1976): exact but for round-off, for singular Q too. No tolerance
    is absolute, so rows of very different sizes are no problem. `start` is a solution of a similar problem.
    """
    k = len(Q)
    b = Q.new_zeros(k) if b is None else b
    if start is None:
        w = Q.new_zeros(k)
        w[int((Q.diagonal() / 2 + b).argmin())] = 1.0
    else:
        w = start.clone()
    size = Q.abs()
    blocked = torch.zeros(k, dtype=torch.bool)
    for _ in range(100 * (k + 1)):
        slope = Q @ w + b
        level = float(w @ slope)
        noise = 64 * _EPS * (size @ w + b.abs() + float(w @ (size @ w + b.abs())))
        gain = torch.where(blocked, -math.inf, level - slope - noise)
        j = int(gain.argmax())
        if float(gain[j]) <= 0:
            break
        for ridge in (0.0, 1e-12):  # the second for faces on which Q is singular
            new = _face_minimum(Q, b, w, j, ridge)
            if better := _value(Q, b, new) < _value(Q, b, w):
                w = new
                blocked[:] = False
                break
        blocked[j] |= not better
    return w


def _value(Q: Tensor, b: Tensor, w: Tensor) -> float:
    return float(w @ Q @ w / 2 + b @ w)


def _face_minimum(Q: Tensor, b: Tensor, w: Tensor, j: int, ridge: float) -> Tensor:
    """Return the minimum over the face of w's support and j, or over a smaller face that is met on the way."""
    w = w.clone()
    active = w > 0
    active[j] = True
    while True:
        index = active.nonzero().squeeze(1)
        at, by = _on_face(Q, index, -b[index], ridge)
        target, now = at + by, w[index]
        falling = target <= 0
        if not bool(falling.any()):
            w[:] = 0.0
            w[index] = target
            return w / w.sum()
        # Go as far as the face allows. A weight that is 0 and would fall leaves the face at once.
        ratio = torch.where(falling, now / (now - target).clamp(min=5e-324), math.inf)
        alpha = float(ratio.min())
        w[index] = torch.where(ratio <= alpha, 0.0, now + alpha * (target - now)).clamp(min=0.0)
        active = w > 0
        if alpha == 0:
            return w  # j would fall: round-off


def _on_face(Q: Tensor, index: Tensor, right: Tensor, ridge: float = 0.0) -> tuple[Tensor, Tensor]:
    """Return argmin of 1/2 w'Qw - right'w on rows `index`, sum w = 1, signs free: (w for right = 0, the rest)."""
    m = len(index)
    part = Q[index][:, index]
    scale = float(part.diagonal().max())
    scale = scale if scale > 0 else 1.0
    system = Q.new_zeros(m + 1, m + 1)
    system[:m, :m] = part / scale + ridge * torch.eye(m, dtype=Q.dtype)
    system[:m, m] = system[m, :m] = 1.0
    sides = Q.new_zeros(m + 1, 2)
    sides[m, 0] = 1.0
    sides[:m, 1] = right / scale
    solution, info = torch.linalg.solve_ex(system, sides)
    if int(info) or not bool(torch.isfinite(solution).all()):
        solution = torch.linalg.pinv(system) @ sides
    else:
        solution = solution + torch.linalg.solve_ex(system, sides - system @ solution)[0]
    return solution[:m, 0], solution[:m, 1]


def min_norm(G: Tensor, unit: bool = True) -> Tensor:
    """Return coefficients q (K) of the shortest convex combination of the rows, from their Gram matrix.

    With `unit` rows are made unit vectors, and the combination is multiplied by their mean norm (q is of the rows as
    they are). Zero rows are left out. A combination that vanishes (see `cancels`) is exactly zero: q = 0.
    """
    q = torch.zeros(len(G), dtype=torch.float64)
    some = nonzero(G)
    if not bool(some.any()):
        return q
    part, _ = normalised(G[some][:, some])
    norms = part.diagonal().sqrt() if unit else torch.ones(len(part), dtype=torch.float64)
    part = part / norms / norms[:, None]
    w = simplex_minimum(part)
    if not cancels(part, w):
        q[some] = w * (norms.mean() / norms)
    return q


def conflict_free(G: Tensor, p: Tensor) -> Tensor:
    """Compute ConFIG in Gram space: coefficients q of u = <g_0, v> v / |v|^2 with v = pinv(R) 1 and g_0 = sum p_i X_i.

    R are the unit rows, without zero rows; C = R R' is their Gram matrix, and pinv(R) 1 = R' pinv(C) 1. Singular values
    of R below 3e-7 of the largest, which is the resolution of float32 rows, count as zero. A direction that vanishes
    (see `cancels`) or that the mean points away from gives q = 0.
    """
    q = torch.zeros(len(G), dtype=torch.float64)
    some = nonzero(G)
    if not bool(some.any()):
        return q
    G, _ = normalised(G)
    norms = G.diagonal()[some].sqrt()
    C = G[some][:, some] / norms / norms[:, None]
    v = torch.linalg.pinv(C, rtol=1e-13, hermitian=True).sum(1)
    square, reach = float(v @ C @ v), float((G @ p)[some] / norms @ v)
    if square > (1e-6 * float(v.abs().sum())) ** 2 and reach > 0:
        q[some] = reach / square * v / norms
    return q


def conflict_averse(G: Tensor, p: Tensor, c: float) -> tuple[Tensor, float]:
    """Compute CAGrad in Gram space: (w, lam) so that its direction is sum_i (p_i + lam w_i) X_i.

    w = argmin over the simplex of <g_w, g_0> + phi |g_w| with g_0 = sum p_i X_i and phi = c |g_0|; lam = phi / |g_w|.
    lam = 0, so that g_0 remains, where g_w vanishes (see `cancels`) and where c or g_0 is 0. Rows that are zero or do
    not count (p = 0) get w = 0.

    The norm is written as phi |g| = min over t of (|g|^2 / tau + phi^2 tau) / 2 with tau = t / phi. So each tau leaves
    a quadratic problem, and the tau sought is the one with |g_w(tau)| = phi tau. On a fixed set of active rows w is
    affine in tau, which makes this a quadratic equation; so a few exact solves end at round-off.
    """
    w = torch.zeros(len(G), dtype=torch.float64)
    some = nonzero(G) & (p > 0)
    count = int(some.sum())
    if count == 0:
        return w, 0.0
    G, _ = normalised(G)
    mean_square = float(p @ G @ p)
    part, slope = G[some][:, some], (G @ p)[some]
    if c == 0 or cancels(G, p):
        w[some] = p[some] / p[some].sum()
        return w, 0.0
    phi = c * math.sqrt(mean_square)
    solution, is_long = _conflict_averse(part, slope, phi)
    w[some] = solution
    if not is_long:
        return w, 0.0
    if count == 1 and bool((p[some] == 1).all()):
        return w, c
    return w, phi / math.sqrt(float(solution @ part @ solution))


def _conflict_averse(G: Tensor, slope: Tensor, phi: float) -> tuple[Tensor, bool]:
    """Return (argmin of slope'w + phi sqrt(w'Gw) over the simplex, whether sqrt(w'Gw) is not 0 there)."""
    norms = G.diagonal().sqrt()
    low, high = 0.0, 2 * float(norms.max()) / phi
    least = 1e-7 * float(norms.min()) / phi  # a shorter sum cancels
    tau, w = high, None
    for _ in range(200):
        w = simplex_minimum(G, tau * slope, w)
        length = math.sqrt(max(float(w @ G @ w), 0.0))
        if length > phi * tau:
            low = tau
        else:
            high = tau
        again = _length_equation(G, slope, phi, w)
        if again is not None and abs(again - tau) <= 4 * _EPS * tau:
            break
        inside = again is not None and low < again < high
        tau = again if inside and again is not None else (low + high) / 2
        if high - low <= 4 * _EPS * high or high <= least:
            break
    assert w is not None
    return w, not cancels(G, w)


def _length_equation(G: Tensor, slope: Tensor, phi: float, w: Tensor) -> float | None:
    """Return the tau > 0 with |g_w(tau)| = phi tau if the active rows of w stay active."""
    index = (w > 0).nonzero().squeeze(1)
    at, by = _on_face(G, index, -slope[index])
    part = G[index][:, index]
    A, B, C = float(at @ part @ at), float(at @ part @ by), float(by @ part @ by) - phi * phi
    # A + 2 B tau + C tau^2 = 0
    root = B * B - A * C
    if root < 0:
        return None
    q = -(B + math.copysign(math.sqrt(root), B))
    lengths = [x for x in ((q / C if C else math.inf), (A / q if q else math.inf)) if 0 < x < math.inf]
    # Where C < 0, which is the rule, one root is positive.
    return min(lengths) if lengths else None
