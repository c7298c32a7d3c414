"""Measure what MaTU's task vectors cost: T = 30 tasks, N = 30 clients, d = 1.2 million float32.

`unify` of T task vectors against torch's `copy_` of the same T x d values, into memory that is there and into fresh
memory (the result of `unify` is fresh, too). The aim is three times a memory pass.

`aggregate_tasks` (eqs. 3 to 7) of N clients that hold 3 or all 30 tasks each, with packed masks and three partners for
every task; the whole server step, in which each client's new vectors are unified afterwards, one client at a time; and
the same through the runtime: `server_step` of the method `matu` on the clients' payloads, then what each is sent.

Memory: peak resident memory (VmHWM of Linux) of a process of its own, less what is resident before (the clients' N
vectors and packed masks). The aim is (T + 3) d floats and packed masks.

Times are the least of several turns.
"""

from __future__ import annotations

from typing import Any

from _common import arguments, interleaved, machine, peaks, resident, threads, without_data

N = T = 30
TASKS = [f"t{i:02d}" for i in range(T)]
WORK = ("aggregate_tasks", "server step", "through the runtime")


def uploads(k: int, d: int) -> list[Any]:
    """N clients with k tasks each."""
    import torch

    from fedloom.taskvectors import Upload, unify

    common = torch.randn(d)
    found = []
    for n in range(N):
        mine = sorted(TASKS[(3 * n + i) % T] for i in range(k))
        vector, masks, scales = unify([common + torch.randn(d) for _ in range(k)], packed=True)
        found.append(Upload(vector, tuple(mine), (10,) * k, masks, scales, f"c{n:02d}"))
    return found


def step(clients: list[Any], work: str) -> None:
    """The server's part of a round: eqs. 3 to 7, and except in `aggregate_tasks` what each client is sent, not kept."""
    from fedloom.taskvectors import aggregate_tasks, unify

    if work == "through the runtime":
        through_the_runtime(clients)
        return
    new = aggregate_tasks(clients)
    assert bool(((new.partners > 0).sum(1) == 3).all())
    rows = dict(zip(new.tasks, new.vectors, strict=True))
    for client in clients if work == "server step" else []:
        unify([rows[t] for t in client.tasks], packed=True)


def through_the_runtime(clients: list[Any]) -> None:
    """`server_step` and `dispatch` of the method matu."""
    import torch

    from fedloom.core.context import Ctx
    from fedloom.core.layout import Block, Layout
    from fedloom.federation.rounds.federation import BuiltFederation, Common
    from fedloom.federation.rounds.messages import Payload, rows_of
    from fedloom.federation.rounds.server import dispatch, server_init, server_step
    from fedloom.methods import matu
    from fedloom.models.tasks.labels import Classification

    tasks = {name: (Classification(name, 2), 1.0) for name in TASKS}
    held = without_data({c.client: {t: tasks[t] for t in c.tasks} for c in clients})
    federation = BuiltFederation(tuple(task for task, _ in tasks.values()), held)
    layout, method = Layout((Block("encoder.w", (len(clients[0].vector),)),)), matu()
    payloads = (
        Payload(
            (c.client, None),
            10.0,
            {"vector": c.vector, "masks": c.masks, "scales": c.scales},
            tasks=dict(zip(c.tasks, c.counts, strict=True)),
        )
        for c in clients
    )
    state = {
        **server_init(method, layout, torch.zeros(1).expand(layout.d), {}),
        "model": torch.zeros(1).expand(layout.d),
    }
    common = Common(method, layout, federation)
    state = server_step(common, payloads, state, Ctx(1, 0, rows_of(common, held)))
    for client in held:
        dispatch(common, state, [client])


def peak(k: int, d: int, work: str, count: int) -> float:
    """Peak memory of the server's part, by so many threads, in units of d floats."""
    import torch

    torch.set_num_threads(count)
    step(uploads(k, min(d, 50_000)), work)  # imports and the like
    clients = uploads(k, d)
    with open("/proc/self/clear_refs", "w") as reset:
        reset.write("5")  # VmHWM starts anew
    before = resident("VmRSS")
    step(clients, work)
    return (resident("VmHWM") - before) / (4 * d)


def main() -> None:
    quick = arguments(__doc__).quick
    import torch

    from fedloom.taskvectors import unify

    d = 5_000 if quick else 1_200_000
    repeats = 1 if quick else 5
    print(f"{machine()}; N = {N}, T = {T}, d = {d:,} float32")
    held, counts = ((3,), (1,)) if quick else ((3, T), (1, 2))
    cases = {
        f"{k:>2} tasks a client, {work:<20} {count} thread(s)": (k, d, work, count)
        for k in held
        for work in WORK
        for count in counts
    }
    peaks(f"T + 3 = {T + 3}", peak, cases)
    X = torch.randn(T, d)
    target = torch.empty_like(X)
    for _ in threads():
        seconds = interleaved(
            {
                "copy": lambda: target.copy_(X),
                "copy, fresh": lambda: X.clone(),
                "unify": lambda: unify(X),
                "unify, packed": lambda: unify(X, packed=True),
            },
            2 * repeats,
            min,
        )
        for name, s in seconds.items():
            ratios = f"this/copy {s / seconds['copy']:5.2f}  this/fresh {s / seconds['copy, fresh']:5.2f}"
            print(f"  {name:<16} {s * 1e3:7.1f} ms  {ratios}", flush=True)
        for k in held:
            clients = uploads(k, d)
            ways = {work: lambda c=clients, w=work: step(c, w) for work in WORK}
            for name, s in interleaved(ways, 1 if quick else 2, min).items():
                print(f"  {k:>2} tasks a client, {name:<20} {s * 1e3:7.0f} ms", flush=True)


if __name__ == "__main__":
    main()
