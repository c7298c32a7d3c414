"""The neighbours that a peer mixes with, their weights, groups and scope (DFMTL thesis, sections 4.3 and 6.4.3).

Similarities come as name -> number. One that is not finite is unknown: such a peer is never chosen.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from fedloom.core.grouping import grouped
from fedloom.core.lazy import need

if TYPE_CHECKING:
    from torch import Tensor

Groups = tuple[tuple[str, ...], ...]
"""Names in groups, sorted in each; groups are in the order of their first names."""


def top_k(similarity: Mapping[str, float], k: int) -> tuple[str, ...]:
    """Return the k most similar candidates (eq. 4.8), best first, or all if there are fewer; ties go by name."""
    if k < 0:
        raise ValueError(f"k: expected at least 0, found {k}")
    return _best(similarity)[:k]


def similar_enough(similarity: Mapping[str, float], threshold: float) -> tuple[str, ...]:
    """Return candidates with a similarity of at least `threshold`, best first."""
    return tuple(name for name in _best(similarity) if similarity[name] >= threshold)


def recent(similarity: Mapping[str, float], since: Mapping[str, int], rate: float) -> dict[str, float]:
    """Return similarities s less |s| exp(-rate t), t >= 1 being the rounds `since` a candidate was last chosen.

    So candidates that were not chosen for long get their turn, and those never chosen keep their similarity (PFedDST:
    Fan et al., 2025, whose score is the factor 1 - exp(-rate t) times one of losses and of the similarity of tasks,
    which is not negative; one that is, as from losses below 0, gets smaller too).
    """
    if not rate > 0:
        raise ValueError(f"rate: expected a number above 0, found {rate}")
    return {name: s - abs(s) * math.exp(-rate * since[name]) if name in since else s for name, s in similarity.items()}


def _best(similarity: Mapping[str, float]) -> tuple[str, ...]:
    known = {name: float(s) for name, s in similarity.items() if math.isfinite(float(s))}
    return tuple(sorted(known, key=lambda name: (-known[name], name)))


def soft_weights(
    own: str, similarity: Mapping[str, float], chosen: Collection[str], *, include_self: bool = True, step: float = 1.0
) -> dict[str, float]:
    """Return weights of a peer's own model and those of its neighbours, by similarity; they sum to 1.

    s_ij = max(similarity, 0), s_ii = 1, w_ij = s_ij / sum over the chosen and i (eqs. 4.9, 4.10).
    `step` is eta of eq. 4.11, 0 < eta <= 1: neighbours get eta w_ij, the peer's own model what is left, which is
    eq. 4.12 for eta = 1. Where the sum vanishes, and for those without neighbours, the own model has weight 1.

    The epsilon in the denominator of eq. 4.10 is left out, or weights would not sum to 1. `include_self` = False is
    what the release does: s_ii is not used and the own model is replaced by the neighbours' mean.
    """
    if not 0 < step <= 1:
        raise ValueError(f"expected 0 < step <= 1, found {step}")
    names = sorted(set(chosen))
    if own in names:
        raise ValueError(f"peer {own!r} is among its own neighbours: {names}")
    s = {name: max(value, 0.0) if math.isfinite(value := float(similarity[name])) else 0.0 for name in names}
    total = math.fsum([*s.values(), 1.0 if include_self else 0.0])
    weights = {name: step * s[name] / total if total > 0 else 0.0 for name in names}
    return {own: max(0.0, 1.0 - math.fsum(weights.values())), **weights}


def coarse_clusters(names: Sequence[str], similarity: Tensor, low: int = 2, high: int = 4, seed: int = 0) -> Groups:
    """Return groups of peers by spectral clustering of a similarity matrix (N x N, at least 0): C2's first level.

    The number of groups, `low` to `high`, is the one with the best silhouette on distances 1 - s / max s, and the
    smallest of equally good ones. Peers are sorted first. `low` peers or fewer are one group, and so are peers without
    any similarity.

    The release gives the silhouette similarities, not distances. Their diagonal of 1 is refused, so it takes `low`.
    """
    if not 2 <= low <= high:
        raise ValueError(f"expected 2 <= low <= high, found {low} and {high}")
    order, S = _sorted(names, similarity)
    S[range(len(S)), range(len(S))] = top = S.max(initial=0.0)
    if len(order) <= low or top == 0:
        return (tuple(order),) if order else ()
    cluster, metrics = need("sklearn.cluster", "data"), need("sklearn.metrics", "data")
    distance = 1 - S / top
    # Peers without any similarity would leave the graph in pieces, on which the method is not defined.
    affinity = (S / top).clip(min=1e-9)
    best: tuple[float, Groups] | None = None
    for count in range(low, min(high, len(S) - 1) + 1):
        labels = cluster.SpectralClustering(count, affinity="precomputed", random_state=seed).fit_predict(affinity)
        if len(set(labels.tolist())) < 2:
            continue
        score = float(metrics.silhouette_score(distance, labels, metric="precomputed"))
        if best is None or score > best[0] + 1e-12:
            best = score, _groups(order, labels.tolist())
    return best[1] if best is not None else (tuple(order),)


def fine_clusters(names: Sequence[str], similarity: Tensor, threshold: float = 0.4) -> Groups:
    """Return groups by average linkage, merged while their mean distance 1 - s is at most `threshold` (C2's level 2).

    The thesis' similarity here is that of the peers' outputs on the same data. Peers are sorted first.
    """
    order, S = _sorted(names, similarity)
    if len(order) < 2:
        return (tuple(order),) if order else ()
    from scipy.cluster import hierarchy
    from scipy.spatial import distance

    D = 1 - S
    D[range(len(D)), range(len(D))] = 0.0
    tree = hierarchy.linkage(distance.squareform(D.clip(min=0.0)), "average")
    return _groups(order, hierarchy.fcluster(tree, threshold, "distance").tolist())


def _sorted(names: Sequence[str], similarity: Tensor) -> tuple[list[str], Any]:
    """Return (sorted names, their similarities, symmetrised, as a numpy array)."""
    S = similarity.detach().cpu().double().numpy()
    if S.shape != (len(names), len(names)) or len(set(names)) != len(names):
        raise ValueError(f"expected different names and N x N similarities, found {len(names)} and {S.shape}")
    if not all(0 <= s < math.inf for s in S.ravel().tolist()):
        raise ValueError("similarity: expected finite numbers >= 0")
    order = sorted(range(len(names)), key=lambda i: names[i])
    S = S[order][:, order]
    return [names[i] for i in order], (S + S.T) / 2


def _groups(names: Sequence[str], labels: Sequence[int]) -> Groups:
    return tuple(map(tuple, grouped(zip(labels, names, strict=True)).values()))


def task_groups(tasks: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """Return ColNet's groups (Feng et al., 2025): task -> peers that have it, sorted. Leaders exchange their means."""
    return {task: tuple(sorted(p for p in tasks if tasks[p] == task)) for task in sorted(set(tasks.values()))}


Exchange = Literal["encoder", "full"]


def alignment(cosines: Iterable[float]) -> float:
    """Return the mean of a peer's finite cosines with its candidates, in [-1, 1]; nan if there are none."""
    finite = [float(c) for c in cosines if math.isfinite(float(c))]
    return math.fsum(finite) / len(finite) if finite else math.nan


def next_scope(alignment: float, current: Exchange = "full", enter: float = 0.6, leave: float = 0.3) -> Exchange:
    """Return the scope of the next round: "encoder" from an alignment of `enter` on, "full" again below `leave`.

    The thesis saw exchange of the encoder alone hold where gradients had cosines of 0.6 to 0.8 (NYU depth v2) and
    oscillate where they were low or negative (Pascal Context), with exchange of everything stable in both; it advises
    the latter wherever correlation is weak or unknown. So `enter` is the lower end of what it saw to be safe, an
    alignment that is nan gives "full", and so does the first round. It names no lower threshold: `leave` is ours, half
    way from 0.6 to orthogonal updates, so that noise around one number does not flip the scope every round.

    These are cosines of eq. 4.3, not of the unit scale. After many local steps cosines of updates are far below those
    of gradients: choose both thresholds by what is measured.
    """
    if not -1 <= leave <= enter <= 1:
        raise ValueError(f"expected -1 <= leave <= enter <= 1, found leave = {leave} and enter = {enter}")
    if current not in ("encoder", "full"):
        raise ValueError(f"current: expected 'encoder' or 'full', found {current!r}")
    return "encoder" if alignment >= (leave if current == "encoder" else enter) else "full"
