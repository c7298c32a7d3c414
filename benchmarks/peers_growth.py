"""What a round of N peers costs: seconds, bytes and memory, with exact signals and with sketches.

All may hear all, everybody chooses three. The model is one vector of d numbers whose local training is one step, so
what is measured is the peers' own work: signals, similarities, messages, mixing. Bytes are those that all peers send in
a round, by what they are for. Memory is the largest resident size of a process that runs this one case.

Run as `python benchmarks/peers_growth.py`; `--quick` stops at 30 peers.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from pathlib import Path

from _common import arguments, machine

SIZES = (6, 30, 100, 300, 1000)
D, M = 20_000, 512


def case(n: int, sketched: bool) -> dict[str, float]:
    """One round after one that warms up."""
    import torch

    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from peers_support import Valleys

    torch.set_num_threads(1)
    g = torch.Generator().manual_seed(0)
    b = torch.randn(n, D, generator=g).tolist()
    section = {"choose": {"top": 3}, "similarity": {"sketch": {"m": M} if sketched else None}}
    peers = Valleys(section, 1.0, b, steps=1)
    peers.go()
    start = time.perf_counter()
    peers.go()
    seconds = time.perf_counter() - start
    up: dict[str, int] = {}
    for counts in peers.ledgers[-1].up.values():
        for (role, _), count in counts.items():
            up[role] = up.get(role, 0) + count
    models = sum(count for role, count in up.items() if role != "signal")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"seconds": seconds, "signals": up["signal"], "models": models, "memory": peak}


def main() -> None:
    """Print the table; each case in a process of its own."""
    if sys.argv[1:2] == ["--case"]:
        print(json.dumps(case(int(sys.argv[2]), sys.argv[3] == "sketched")))
        return
    quick = arguments(__doc__).quick
    print(machine(), f"\nd = {D}, sketches of {M}\n")
    print(f"{'peers':>6} {'signals':>9} {'seconds':>9} {'MB signals':>11} {'MB models':>10} {'MB memory':>10}")
    for n in SIZES[:2] if quick else SIZES:
        for kind in ("exact", "sketched"):
            command = [sys.executable, __file__, "--case", str(n), kind]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            r = json.loads(done.stdout)
            mb = [r[key] / 1e6 for key in ("signals", "models", "memory")]
            print(f"{n:>6} {kind:>9} {r['seconds']:>9.2f} {mb[0]:>11.2f} {mb[1]:>10.2f} {mb[2]:>10.0f}")


if __name__ == "__main__":
    main()
