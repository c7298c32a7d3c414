"""Measure what FedDEA and a server step cost on large models: d = 28 million float32, K = 5 clients.

Selection: `top_mask` and the whole stage `TopMagnitude` on one row against `torch.sort` of its magnitudes.

Server step: `server_step` with `Mean` and `Plain` on payloads that lie ready, against torch's `copy_` of the K x d
matrix. Bytes are those read plus those written, each buffer once per pass over it: 2 K d values for the copy; for the
step K d to clear the matrix, K d and the payloads to fill it, K d for the check for nan and inf, (K + 1) d for the
mean, 3 d for the model. The step's memory is fresh, which costs page faults, so a copy into fresh memory stands
beside it.

Memory: peak resident memory (VmHWM of Linux) of a process of its own, less what is resident before the step (the model
and one payload to copy from). Payloads come from a generator that makes one at a time. The aim is (K + 3) d floats.
torch's allocations are mapped one by one above 1 MiB, so that freed memory goes back at once.

Times are the least of several turns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from _common import arguments, interleaved, machine, peaks, resident, threads, without_data

K = 5
STEPS = ("FedAvg", "FedDEA 0.1", "FedDEA 0.5", "FedDEA 0.1, sparse", "FedDEA 0.5, sparse")


class Round:
    """A federation of K clients without data, a method by its name in STEPS, and packed updates."""

    def __init__(self, name: str, d: int) -> None:
        from fedloom.codecs import Raw, Sparse
        from fedloom.core.context import Ctx
        from fedloom.core.layout import Block, Layout
        from fedloom.federation.rounds.federation import BuiltFederation, Common
        from fedloom.methods.method import Method
        from fedloom.stages import Identity, TopMagnitude

        self.federation = BuiltFederation((), without_data({f"c{i}": {} for i in range(K)}))
        edge = TopMagnitude(float(name.split()[1].rstrip(","))) if name.startswith("FedDEA") else Identity()
        self.method = Method(name, edge=edge, codec=Sparse() if name.endswith("sparse") else Raw())
        self.layout = Layout((Block("body", (d // 2,)), Block("head", (d - d // 2,), role="head")))
        self.common = Common(self.method, self.layout, self.federation)
        self.rows = tuple((client, None) for client in self.federation.clients)
        self.ctx = Ctx(1, 0, self.rows)

    def pack(self, x: Any) -> dict[str, Any]:
        """One client's update (d) as it travels."""
        from fedloom.core.updates import Updates

        updates, _ = self.method.edge(Updates.of(x[None], layout=self.layout), {}, self.ctx)
        return self.method.codec.pack(updates)

    def state(self) -> dict[str, Any]:
        """The server's state before the round."""
        import torch

        from fedloom.federation.rounds.server import server_init

        return server_init(self.method, self.layout, torch.ones(self.layout.d), {})

    def step(self, packed: Iterable[Mapping[str, Any]], state: dict[str, Any]) -> object:
        """The server's part of the round; `packed` is asked for one client at a time."""
        from fedloom.federation.rounds.messages import Payload
        from fedloom.federation.rounds.server import server_step

        # a payload's tensors are held by nobody but the payload
        payloads = map(lambda row, one: Payload(row, 10.0, one), self.rows, packed)
        return server_step(self.common, payloads, state, self.ctx)


def peak(name: str, d: int) -> float:
    """Peak memory of a server step (or, for "client", of TopMagnitude on one row) in units of d floats."""
    import torch

    torch.set_num_threads(1)
    small = Round(name if name in STEPS else "FedDEA 0.5", 100_000)
    small.step([small.pack(torch.randn(small.layout.d))] * K, small.state())  # imports and the like
    if name == "client":
        work = Round("FedDEA 0.5", d)
        x = torch.randn(d)
        before = resident("VmRSS")
        work.pack(x)
    else:
        work = Round(name, d)
        model = work.state()
        one = work.pack(torch.randn(d))
        before = resident("VmRSS")
        work.step(({key: value.clone() for key, value in one.items()} for _ in range(K)), model)
    return (resident("VmHWM") - before) / (4 * d)


def selection(d: int, repeats: int) -> None:
    """Print times of the selection beside a full sort."""
    import torch

    from fedloom.core.context import Ctx
    from fedloom.core.updates import Updates
    from fedloom.methods.feddea.aggregation import top_mask
    from fedloom.stages import TopMagnitude

    gauss = 1e-3 * torch.randn(d)
    zeros = gauss.clone()
    zeros[: int(0.6 * d)] = 0
    rows = {
        "gaussian": gauss,
        "heavy tails": gauss / (torch.rand(d) + 1e-6),
        "60 % zeros": zeros,
        "all equal": torch.full((d,), 0.5),
    }
    for _ in threads("selection, "):
        for name, x in rows.items():
            ways: dict[str, Callable[[], object]] = {"sort": lambda x=x: torch.sort(x.abs())}
            updates = Updates.of(x[None])
            for rho in (0.1, 0.5):
                stage, k = TopMagnitude(rho), int(rho * d)
                ways[f"mask {rho}"] = lambda x=x, k=k: top_mask(x, k)
                ways[f"stage {rho}"] = lambda stage=stage, updates=updates: stage(updates, {}, Ctx(1, 0))
            seconds = interleaved(ways, repeats, min)
            parts = [f"{way} {s * 1e3:5.0f} ms ({s / seconds['sort']:.3f})" for way, s in seconds.items()]
            print(f"  {name:<12} {'  '.join(parts)}", flush=True)


def steps(d: int, repeats: int) -> None:
    """Print times of server steps beside plain copies of the matrix."""
    import torch

    X = torch.randn(K, d)
    target = torch.empty_like(X)
    ways: dict[str, Callable[[], object]] = {"copy": lambda: target.copy_(X), "copy, fresh": lambda: X.clone()}
    values = {"copy": 2.0 * K * d, "copy, fresh": 2.0 * K * d}
    for name in STEPS:
        work = Round(name, d)
        packed = [work.pack(x) for x in X]
        model = work.state()
        ways[name] = lambda work=work, packed=packed, model=model: work.step(packed, model)
        values[name] = (4 * K + 4) * d + sum(t.nbytes for one in packed for t in one.values()) / 4
    for _ in threads("server step, "):
        seconds = interleaved(ways, repeats, min)
        speed = {name: 4 * values[name] / s for name, s in seconds.items()}
        for name, s in seconds.items():
            ratios = (
                f"copy/this {speed['copy'] / speed[name]:5.2f}  fresh/this {speed['copy, fresh'] / speed[name]:5.2f}"
            )
            print(f"  {name:<20} {s * 1e3:7.1f} ms  {speed[name] / 1e9:6.2f} GB/s  {ratios}", flush=True)


def main() -> None:
    quick = arguments(__doc__).quick
    d = 200_000 if quick else 28_000_000
    print(f"{machine()}; K = {K}, d = {d:,} float32")
    cases = {**{f"server step, {name}": (name, d) for name in STEPS}, "TopMagnitude(0.5) at the client": ("client", d)}
    peaks(f"for a server step: K + 3 = {K + 3}", peak, cases)
    steps(d, 1 if quick else 5)
    selection(d, 1 if quick else 3)


if __name__ == "__main__":
    main()
