"""Measure what sketches of updates keep, and what they save: Top-3 choices and time, N = 30 to 1000 peers.

Synthetic updates in clusters of ten: of every peer's update half the squared length is common to its cluster, and a
tenth to all, so that cosines within a cluster are about 0.6 and 0.1 between clusters. Beside "flat" clusters, in which
all members are alike but for noise and the exact Top-3 is decided by chance, there are "graded" ones: how much is
common falls from member to member, as for clients that hold more or less of a domain, and the best three are better
than the rest.

For each m: the share of the exact Top-3 choices that sketches keep, and the share of sketched choices that are in the
peer's own cluster. Then times in one run: sketching one update, one peer's similarities from N exact updates and from N
sketches, all N x N similarities from both, as ratios.

Quality is measured at d = 100,000; it depends on m and hardly on d. Times at d = 1.2 million while N updates fit into a
gigabyte, else at the d that does.
"""

from __future__ import annotations

from typing import Any

from _common import arguments, interleaved, machine

CLUSTER, TOP = 10, 3
SIZES = (64, 256, 1024, 4096, 16384)


def updates(n: int, d: int, graded: bool, seed: int = 0) -> Any:
    """N x d rows; peers i with the same i // 10 are a cluster."""
    import torch

    g = torch.Generator().manual_seed(seed)
    X = torch.randn(n, d, generator=g)
    common = torch.randn(d, generator=g)
    for first in range(0, n, CLUSTER):
        centre = torch.randn(d, generator=g)
        for i in range(first, min(first + CLUSTER, n)):
            share = 0.8 - 0.06 * (i - first) if graded else 0.5
            X[i] = (0.9 - share) ** 0.5 * X[i] + share**0.5 * centre + 0.1**0.5 * common
    return X


def best(S: Any) -> Any:
    """N x N, bool: the Top-3 of each row but itself."""
    import torch

    S = S.clone().fill_diagonal_(-torch.inf)
    chosen = torch.zeros_like(S, dtype=torch.bool)
    return chosen.scatter_(1, S.topk(TOP, dim=1).indices, True)


def quality(n: int, d: int) -> None:
    """Print the shares for both kinds of clusters."""
    import torch

    from fedloom.peers import Sketch, gradient

    cluster = torch.arange(n) // CLUSTER
    same = cluster[:, None] == cluster
    for kind in ("flat", "graded"):
        X = updates(n, d, kind == "graded")
        exact = best(gradient(X))
        line = [f"exact: own cluster {float((exact & same).sum() / exact.sum()):.3f}"]
        for m in SIZES:
            found = best(gradient(Sketch(m, seed=1)(X)))
            kept = float((found & exact).sum() / exact.sum())
            own = float((found & same).sum() / found.sum())
            line.append(f"m {m}: {kept:.3f} kept, {own:.3f} own")
        print(f"  N {n:>4} {kind:<6}  " + "; ".join(line), flush=True)


def seconds(n: int, d: int, m: int, repeats: int) -> None:
    """Print times and their ratios."""
    import torch

    from fedloom.peers import Sketch, gradient

    X = torch.randn(n, d, generator=torch.Generator().manual_seed(0))
    sketch = Sketch(m, seed=1)
    S = sketch(X)
    ways = {
        "sketch": lambda: sketch(X[0]),
        "copy": lambda: X[0].clone(),
        "one exact": lambda: gradient(X[0], X[1:]),
        "one sketched": lambda: gradient(S[0], S[1:]),
        "all exact": lambda: gradient(X),
        "all sketched": lambda: gradient(S),
    }
    t = interleaved(ways, repeats)
    whole = t["sketch"] + t["one sketched"]
    print(
        f"  N {n:>4} d {d:>9,} m {m}: sketch {t['sketch'] * 1e3:.1f} ms ({t['sketch'] / t['copy']:.1f} copies of d); "
        f"one peer exact/(its sketch + sketched) {t['one exact'] / whole:.1f}; "
        f"all pairs exact/sketched {t['all exact'] / t['all sketched']:.0f}; bytes {d / m:.0f}",
        flush=True,
    )


def main() -> None:
    quick = arguments(__doc__).quick
    import torch

    torch.set_num_threads(1)
    print(f"{machine()}; one thread")
    print("\nshare of the exact Top-3 that sketches keep; share of sketched choices in the own cluster")
    for n in (30, 100) if quick else (30, 100, 300, 1000):
        quality(n, 10_000 if quick else 100_000)
    print("\ntimes")
    for n in (30, 100) if quick else (30, 100, 300, 1000):
        d = 100_000 if quick else min(1_200_000, (1 << 28) // n)
        seconds(n, d, 1024, 1 if quick else 3)


if __name__ == "__main__":
    main()
