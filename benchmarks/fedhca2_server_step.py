"""Measure what FedHCA2's server round costs on large models: N = 6 clients, d = 27.5 million float32, nine decoders.

Five single-task clients and one with four tasks, an encoder in 170 tensors and decoders as FedHCA2's (175,776 values,
12 tensors). A round in which weights are learned, so the second. Side by side with a straightforward version on
dictionaries of tensors, as one would write it from the paper and as its authors did: updates tensor by tensor,
concatenated per client for the direction, results with an autograd graph from which torch's SGD learns the weights in
the next round. Both use the same solver.

Times are the least of several turns. Memory: peak resident memory (VmHWM of Linux) of a process of its own, less what
is resident before; the models that the clients started from are there before, updates are not. The aim is
(2 N + 2) d floats for the encoder's stage: the matrix of updates, the result, U and the U of the round before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from _common import arguments, interleaved, machine, peaks, resident, threads, without_data

TASKS = tuple("abcdefghi")
CLIENTS = {**{f"c{i}": (t,) for i, t in enumerate(TASKS[:5])}, "c5": TASKS[5:]}
N = len(CLIENTS)
DECODER = {
    **{f"linears.{i}.weight": (96, 96 * 2**i, 1, 1) for i in range(4)},
    **{f"linears.{i}.bias": (96,) for i in range(4)},
    "fuse.weight": (96, 384, 1, 1),
    "fuse.bias": (96,),
    "norm.weight": (96,),
    "norm.bias": (96,),
}
WAYS = ("fedloom: encoder's stage", "fedloom: both stages", "fedloom: server step", "dictionaries")


class Work:
    """A federation without data, in which d is the encoder's size; every way works on the same random updates."""

    def __init__(self, d: int) -> None:
        from fedloom.core.context import Ctx
        from fedloom.core.layout import Block, Layout
        from fedloom.federation.rounds.federation import BuiltFederation
        from fedloom.methods import fedhca2

        tensors = [d // 170] * 169 + [d - 169 * (d // 170)]
        self.layout = Layout(
            (
                *(Block(f"encoder.{i}.weight", (size,)) for i, size in enumerate(tensors)),
                *(Block(f"decoders.{t}.{n}", s, role="decoder", task=t) for t in TASKS for n, s in DECODER.items()),
            )
        )
        clients = without_data({c: dict.fromkeys(held) for c, held in CLIENTS.items()})
        self.federation = BuiltFederation((), clients, unified=False)
        self.present: list[Any] = [self.federation.presence(self.layout, [(client, None)]) for client in clients]
        self.method = fedhca2(average_identical=False)
        self.rows = tuple((c, None) for c in CLIENTS)
        self.ctx = Ctx(2, 0, self.rows)

    def update(self, i: int) -> Any:
        """Client i's update (d): with a common part, and zero where it has no decoder."""
        import torch

        x = 1e-4 * torch.randn(self.layout.d, generator=torch.Generator().manual_seed(i))
        x += 1e-5
        for s, has in zip(self.layout.slices, self.present[i][0].tolist(), strict=True):
            if not has:
                x[s] = 0
        return x

    def matrix(self, encoder: bool = False) -> Any:
        """All updates as stages see them, or those of the encoder alone."""
        import torch

        from fedloom.core.updates import Updates

        layout = self.layout.select("encoder") if encoder else self.layout
        X = torch.empty(N, layout.d)
        for i in range(N):
            X[i] = self.update(i)[: layout.d]
        present = torch.cat(self.present)[:, : len(layout.blocks)]
        return Updates.of(X, None, layout, list(CLIENTS), present=present)

    def state(self) -> dict[str, Any]:
        """The server's after a first round: a model for each client, and what was added to it."""
        import torch

        from fedloom.federation.rounds.server import server_init

        start = torch.zeros(self.layout.d)
        state = server_init(self.method, self.layout, start, {})
        payloads = (self.payload(i, self.update(i)) for i in range(N))
        return self.step(payloads, state)

    def payload(self, i: int, x: Any) -> Any:
        """Client i's update as it arrives."""
        import torch

        from fedloom.federation.rounds.messages import Payload

        extra = {"domain": "", "tasks": ",".join(CLIENTS[self.rows[i][0]])}
        trained = self.present[i][0] if self.method.wants_support else None
        extra = {k: v for k, v in extra.items() if k in self.method.extras}
        assert trained is None or isinstance(trained, torch.Tensor)
        return Payload(self.rows[i], 10.0, {"values": x}, extra, support=trained)

    def step(self, payloads: Iterable[Any], state: Any) -> dict[str, Any]:
        """The server's part of a round."""
        from fedloom.federation.rounds.federation import Common
        from fedloom.federation.rounds.server import server_step

        return server_step(Common(self.method, self.layout, self.federation), payloads, state, self.ctx)

    def named(self, i: int, x: Any) -> dict[str, Any]:
        """A vector of client i as a dictionary of its tensors, each with memory of its own."""
        has = self.present[i][0].tolist()
        blocks = zip(self.layout.blocks, self.layout.slices, has, strict=True)
        return {b.name: x[s].view(b.shape).clone() for b, s, mine in blocks if mine}


class Dictionaries:
    """FedHCA2's server on dictionaries of tensors, with autograd and torch.optim.SGD."""

    def __init__(self, work: Work) -> None:
        import torch

        self.decoders = [(i, t) for i, tasks in enumerate(CLIENTS.values()) for t in tasks]
        self.layers = sorted({name.rsplit(".", 1)[0] for name in DECODER})
        self.alpha = torch.full((N,), 0.1, requires_grad=True)
        self.beta = {n: torch.full((len(self.decoders),), 0.1, requires_grad=True) for n in self.layers}
        self.sgd = torch.optim.SGD([self.alpha, *self.beta.values()], lr=0.01, momentum=0.9, weight_decay=1e-4)
        self.models = [work.named(i, torch.zeros(work.layout.d)) for i in range(N)]
        self.outputs: list[dict[str, Any]] = []

    def round(self, trained: list[dict[str, Any]]) -> None:
        """From the clients' trained models to those they start from next."""
        import torch

        if self.outputs:
            self.sgd.zero_grad()
            for output, new in zip(self.outputs, trained, strict=True):
                names = list(output)
                back = [output[n].detach() - new[n] for n in names]
                torch.autograd.backward([output[n] for n in names], back, retain_graph=True)
            self.sgd.step()
        deltas = [{n: new[n] - old[n] for n in new} for old, new in zip(self.models, trained, strict=True)]
        self.outputs = self.aggregate(deltas)
        self.models = [{n: v.detach().clone() for n, v in output.items()} for output in self.outputs]

    def aggregate(self, deltas: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The personalised models, with a graph to the weights."""
        import torch

        from fedloom.stages import conflict_averse_weights

        names = [n for n in deltas[0] if n.startswith("encoder.")]
        D = torch.stack([torch.cat([delta[n].flatten() for n in names]) for delta in deltas])
        w = conflict_averse_weights(D @ D.t(), 0.4).float()
        mean, g = D.mean(0), w @ D
        U = (mean + 0.4 * mean.norm() / g.norm() * g) / (1 + 0.4**2)
        outputs: list[dict[str, Any]] = [{} for _ in deltas]
        at = 0
        for n in names:
            u = U[at : at + deltas[0][n].numel()].view(deltas[0][n].shape)
            at += u.numel()
            for i, delta in enumerate(deltas):
                outputs[i][n] = self.models[i][n] + delta[n] + self.alpha[i].clamp(0, 1) * u
        for n, shape in DECODER.items():
            V = torch.stack([deltas[i][f"decoders.{t}.{n}"].flatten() for i, t in self.decoders])
            A = torch.softmax(V @ V.t() / V.shape[1] ** 0.5, dim=1) @ V
            beta = self.beta[n.rsplit(".", 1)[0]].clamp(0, 1)
            for k, (i, t) in enumerate(self.decoders):
                name = f"decoders.{t}.{n}"
                outputs[i][name] = self.models[i][name] + deltas[i][name] + beta[k] * A[k].view(shape)
        return outputs


def way(name: str, work: Work) -> tuple[Callable[[], object], Callable[[], object]]:
    """(make what is there before the round, the round with its updates made in it)."""
    made: dict[str, Any] = {}

    def before() -> None:
        if name == "dictionaries":
            made["it"] = Dictionaries(work)
            made["it"].round([work.named(i, work.update(i)) for i in range(N)])
        elif name.endswith("server step"):
            made["it"] = work.state()

    def now() -> object:
        if name == "dictionaries":
            updates = (work.named(i, work.update(i)) for i in range(N))
            return made["it"].round(
                [{n: m[n] + x for n, x in u.items()} for m, u in zip(made["it"].models, updates, strict=True)]
            )
        if name.endswith("server step"):
            return work.step((work.payload(i, work.update(i)) for i in range(N)), made["it"])
        return stage_round(name, work, work.matrix("encoder" in name))

    return before, now


def stage_round(name: str, work: Work, updates: Any, state: Any = None) -> object:
    """One call of a stage and its result worked out; `state` is from the round before."""
    import torch

    stage: Any = work.method.stage
    if "encoder" in name:
        updates, stage = updates.select(updates.layout.select("encoder")), stage.parts["encoder"]
    if state is None:
        state = stage.init(updates.layout)
        here = state if "encoder" in name else state["0"]
        here["direction"] = torch.ones(work.layout.select("encoder").d)
        here["received"] = list(CLIENTS)
    out, state = stage(updates, state, work.ctx)
    return out.X, state


def peak(name: str, d: int) -> float:
    """Peak memory of a round in units of d floats."""
    import torch

    torch.set_num_threads(1)
    before, now = way(name, Work(100_000))
    before()
    now()  # imports and the like
    before, now = way(name, Work(d))
    before()
    start = resident("VmRSS")
    now()
    return (resident("VmHWM") - start) / (4 * d)


def times(d: int, repeats: int) -> None:
    """Print times of a round, updates lying ready."""
    import torch

    work = Work(d)
    updates = work.matrix()
    state = work.state()
    ready = [work.payload(i, x) for i, x in enumerate(updates.X)]
    plain = Dictionaries(work)
    trained = [work.named(i, x) for i, x in enumerate(updates.X)]
    plain.round(trained)
    first: Mapping[str, Any] = state["stage"]
    target = torch.empty_like(updates.X)
    ways: dict[str, Callable[[], object]] = {
        "copy of the matrix": lambda: target.copy_(updates.X),
        WAYS[0]: lambda: stage_round(WAYS[0], work, updates.replace(), first["0"]),
        WAYS[1]: lambda: stage_round(WAYS[1], work, updates.replace(), first),
        WAYS[2]: lambda: work.step(iter(ready), state),
        WAYS[3]: lambda: plain.round(trained),
    }
    for _ in threads("a round, "):
        seconds = interleaved(ways, repeats, min)
        for name, s in seconds.items():
            print(f"  {name:<26} {s * 1e3:8.1f} ms  dictionaries/this {seconds[WAYS[3]] / s:6.2f}", flush=True)


def main() -> None:
    quick = arguments(__doc__).quick
    d = 200_000 if quick else 27_500_000
    print(f"{machine()}; N = {N}, d = {d:,} float32 and {len(TASKS)} decoders")
    # an encoder's tensor has 0.6 MB
    peaks(f"for the encoder's stage: 2 N + 2 = {2 * N + 2}", peak, {name: (name, d) for name in WAYS}, mapped=1 << 16)
    times(d, 1 if quick else 3)


if __name__ == "__main__":
    main()
