"""Measure how close the stage Mean comes to the memory's speed: K = 20 rows of d = 10 million float32.

Bytes are counted in the same manner on both sides, those read plus those written: a copy of the K x d matrix moves
2 K d values, a mean (K + 1) d. The ratio is bytes/s of the copy over bytes/s of the stage; the aim is at most 2.
"""

from __future__ import annotations

from _common import arguments, interleaved, machine, threads


def main() -> None:
    quick = arguments(__doc__).quick
    import torch

    from fedloom.core.context import Ctx
    from fedloom.core.layout import Block, Layout
    from fedloom.core.updates import Updates
    from fedloom.stages import Mean

    K, d = 20, 1_000_000 if quick else 10_000_000
    repeats = 3 if quick else 9
    X = torch.randn(K, d)
    target = torch.empty_like(X)
    n = torch.arange(1, K + 1)
    blocks = Layout((Block("body", (d // 2,)), Block("head", (d - d // 2,), role="head")))
    present = torch.ones(K, 2, dtype=torch.bool)
    present[::2, 1] = False  # half of the clients lack the second block
    plain = Updates.of(X, n, blocks)
    partial = Updates.of(X, n, blocks, present=present)
    mean, ctx = Mean(), Ctx(1, 0)

    ways = {
        "copy": lambda: target.copy_(X),
        "Mean": lambda: mean(plain, {}, ctx),
        "Mean, half the rows lack a block": lambda: mean(partial, {}, ctx),
        "check for nan and inf": lambda: plain.finite(),
    }
    values = {
        "copy": 2 * K * d,
        "Mean": (K + 1) * d,
        "Mean, half the rows lack a block": (K + 1) * d,
        "check for nan and inf": K * d,
    }
    print(f"{machine()}; K = {K}, d = {d:,} float32, median of {repeats}")
    for _ in threads():
        seconds = interleaved(ways, repeats)
        speed = {name: 4 * values[name] / s for name, s in seconds.items()}
        for name, s in seconds.items():
            ratio = speed["copy"] / speed[name]
            print(f"  {name:<34} {s * 1e3:7.1f} ms  {speed[name] / 1e9:6.2f} GB/s  copy/this {ratio:5.2f}")


if __name__ == "__main__":
    main()
