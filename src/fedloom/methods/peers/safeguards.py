"""Conflict-averse mixing at one peer, and what keeps it from exploding (DFMTL thesis, sections 6.2.5 and 6.3.4).

A peer sees few updates, of tasks whose losses differ by orders of magnitude. Each safeguard can be switched off, and
what acted is returned, so that a run can tell which of them it needed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fedloom.core.gram import cancels, gram
from fedloom.core.updates import Updates
from fedloom.methods.conflict.aggregation import Rescale, conflict_averse_weights, rescaling
from fedloom.methods.peers.config import Safeguards


@dataclass(frozen=True, eq=False)
class Mixed:
    """The result of `conflict_averse_mix`.

    update        d: to be added to the peer's model
    weights       name -> weight in g_w, with sum 1; to be given as `before` in the next round, together with those of
                  earlier rounds for peers that may come back
    coefficients  name -> how much of that row, as it came, is in `update`
    acted         safeguard -> what it did, for those that did something; plain values, fit for a log
    """

    update: Tensor
    weights: dict[str, float]
    coefficients: dict[str, float]
    acted: dict[str, Any] = field(default_factory=dict)


def conflict_averse_mix(
    own: str,
    rows: Mapping[str, Tensor],
    *,
    c: float = 0.4,
    rescale: Rescale = "1+c^2",
    add_own: bool = False,
    safeguards: Safeguards = Safeguards(),  # noqa: B008
    before: Mapping[str, float] | None = None,
) -> Mixed:
    """Return a peer's update from its own and its neighbours' (name -> d), by conflict-averse mixing.

    U = (g_0 + c |g_0| g_w / |g_w|) / (1 + c^2) with g_0 the plain mean of the rows and g_w the convex combination that
    minimises <g_w, g_0> + c |g_0| |g_w| (FedHCA2; see `fedloom.stages.conflict_averse_weights`). The second part is
    left out where g_w vanishes, which without a ridge is all there is against exactly opposing updates.

    `add_own` returns the peer's own update plus U, as the release does: FedHCA2 with alpha = 1, which counts the own
    update twice. Its divisor is 1.5 + c^2, which `rescale` offers. A peer without neighbours gets its own update back.
    """
    if own not in rows:
        raise ValueError(f"rows: expected an update of peer {own!r} itself, found those of {sorted(rows)}")
    names = sorted(rows)
    X = torch.stack([rows[name].detach() for name in names])
    acted: dict[str, Any] = {}
    keep = list(range(len(names)))
    if safeguards.nonfinite is not None:
        keep = [i for i in keep if bool(torch.isfinite(X[i]).all())]
        if len(keep) < len(names):
            acted["nonfinite"] = {"left out": [names[i] for i in range(len(names)) if i not in keep]}
    here = [names[i] for i in keep]
    if not here:
        return Mixed(torch.zeros_like(X[0]), {}, dict.fromkeys(names, 0.0), acted)
    X = X[keep]
    at = here.index(own) if own in here else None

    factors = torch.ones(len(here), dtype=torch.float64)
    G = gram(Updates.of(X))
    lengths = G.diagonal().clamp(min=0).sqrt()
    if safeguards.normalise is not None:
        factors = equalising(lengths, at, 1.0 if safeguards.normalise == "unit-norm" else None)
        if bool((factors != 1).any()):
            acted["normalise"] = dict(zip(here, factors.tolist(), strict=True))
    if safeguards.clip is not None:
        short = shortening(lengths * factors, safeguards.clip)
        if bool((short < 1).any()):
            acted["clip"] = {name: f for name, f in zip(here, short.tolist(), strict=True) if f < 1}
        factors = factors * short
    G = G * factors * factors[:, None]

    k = len(here)
    mean = torch.full((k,), 1 / k, dtype=torch.float64)
    if k == 1:
        w, q = mean, mean
    else:
        w = _solved(G, c, safeguards, acted)
        if safeguards.bounds is not None:
            w = _noted("bounds", w, bounded(w, *safeguards.bounds), here, acted)
        if safeguards.ema is not None and before:
            w = _noted("ema", w, smoothed(w, here, before, safeguards.ema), here, acted)
        if safeguards.ridge is not None and cancels(G, w):
            acted["ridge"] = {"g_w vanishes": dict(zip(here, w.tolist(), strict=True))}
        q = (mean + _length(G, w, c, safeguards) * w) / rescaling(rescale, c)
        if add_own and at is not None:
            q[at] += 1.0
    if safeguards.clip_result is not None:
        short = shortening((q @ G @ q).clamp(min=0).sqrt().reshape(1), safeguards.clip_result)
        if float(short) < 1:
            acted["clip_result"] = float(short)
        q = q * short
    share = q * factors
    return Mixed(
        share.to(X) @ X,
        dict(zip(here, w.tolist(), strict=True)),
        {**dict.fromkeys(names, 0.0), **dict(zip(here, share.tolist(), strict=True))},
        acted,
    )


def equalising(lengths: Tensor, own: int | None = None, to: float | None = None) -> Tensor:
    """Return factors (n) that give every row the length `to`, by default that of row `own`, or the median length if
    that is 0 or absent.

    Rows of length 0 or without a finite one keep theirs.
    """
    usable = torch.isfinite(lengths) & (lengths > 0)
    if not bool(usable.any()):
        return torch.ones_like(lengths)
    if to is None:
        to = float(lengths[own] if own is not None and bool(usable[own]) else lengths[usable].median())
    return torch.where(usable, to / lengths, 1.0)


def shortening(lengths: Tensor, most: float) -> Tensor:
    """Return factors min(1, most / length) (n): gradient clipping, layer 1."""
    return torch.where(lengths > most, most / lengths, 1.0)


def bounded(w: Tensor, low: float = 0.0, high: float = 1.0) -> Tensor:
    """Return the nearest weights (n) with low <= w_i <= high and sum 1: layer 3. Equal ones where there are none."""
    n = len(w)
    if not low * n < 1 < high * n:
        return torch.full_like(w, 1 / max(n, 1))
    if bool(((w >= low) & (w <= high)).all()) and abs(float(w.sum()) - 1) <= 1e-12:
        return w
    # The projection is clamp(w + t, low, high), and its sum grows with t.
    a, b = float(low - w.max()), float(high - w.min())
    for _ in range(200):
        t = (a + b) / 2
        a, b = (t, b) if float((w + t).clamp(low, high).sum()) < 1 else (a, t)
    return (w + (a + b) / 2).clamp(low, high)


def smoothed(w: Tensor, names: Sequence[str], before: Mapping[str, float], ema: float) -> Tensor:
    """Return ema w_before + (1 - ema) w, divided by its sum: layer 5. A new neighbour enters with the new weight."""
    old = torch.tensor([before.get(name, float(new)) for name, new in zip(names, w, strict=True)], dtype=w.dtype)
    mixed = ema * old + (1 - ema) * w
    total = float(mixed.sum())
    return mixed / total if total > 0 else w


def _ridged(G: Tensor, safeguards: Safeguards) -> Tensor:
    """Return G + lambda s I with s the mean of its diagonal: |g_w|^2 becomes |g_w|^2 + lambda s |w|^2."""
    if safeguards.ridge is None or not len(G):
        return G
    return G + safeguards.ridge * float(G.diagonal().mean()) * torch.eye(len(G), dtype=G.dtype)


def _solved(G: Tensor, c: float, safeguards: Safeguards, acted: dict[str, Any]) -> Tensor:
    """Return w (n); equal weights where there is no finite answer."""
    uniform = torch.full((len(G),), 1 / len(G), dtype=torch.float64)
    if not bool(torch.isfinite(G).all()):
        if safeguards.nonfinite is not None:
            acted.setdefault("nonfinite", {})["equal weights"] = True
        return uniform
    return conflict_averse_weights(_ridged(G, safeguards), c)


def _length(G: Tensor, w: Tensor, c: float, safeguards: Safeguards) -> float:
    """Return what g_w is multiplied with: c |g_0| / |g_w|, both with the ridge in |g_w|; 0 where g_w vanishes."""
    mean = torch.full_like(w, 1 / len(w))
    if not bool(torch.isfinite(G).all()) or not bool(G.any()):
        return 0.0
    R = _ridged(G, safeguards)
    if safeguards.ridge is None and cancels(G, w):
        return 0.0
    return c * math.sqrt(max(float(mean @ G @ mean), 0.0) / float(w @ R @ w))


def _noted(name: str, w: Tensor, new: Tensor, rows: Sequence[str], acted: dict[str, Any]) -> Tensor:
    if float((new - w).abs().max()) > 1e-9:
        acted[name] = {
            "from": dict(zip(rows, w.tolist(), strict=True)),
            "to": dict(zip(rows, new.tolist(), strict=True)),
        }
    return new
