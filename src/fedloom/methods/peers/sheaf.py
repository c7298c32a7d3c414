"""Models of neighbours that are coupled by learned linear maps (Sheaf-FMTL): the stage and the local rule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fedloom.core.context import Broadcast, Ctx, State, derive_seed
from fedloom.core.errors import RecipeError
from fedloom.core.layout import Layout
from fedloom.core.stage import Identity, Traits
from fedloom.core.untrusted import Array
from fedloom.core.updates import Updates
from fedloom.methods.peers import RestrictionMapsSettings
from fedloom.methods.peers.aggregation import OnGraph
from fedloom.methods.peers.graph import Graph
from fedloom.training.rules import LocalRule, View


@dataclass(frozen=True)
class SheafLinks(OnGraph, Identity):
    """Carries the projections of clients to their neighbours; rows pass as they are (Sheaf-FMTL).

    The graph covers all clients that have taken part. A client i sends P_ij theta_i as rows of the extra `projections`
    (n x m_i), with the number of each link (i, j) in the extra `edges` (n x 1). It is sent all its links as `edges`
    (n x 2: number, how many numbers of the neighbour's projection come), and these `projections` P_ji theta_j, filled
    up to n x m_i. A link's number is a seed, which follows from the run's seed and the two names. State: client ->
    neighbour -> number of the link, last projection.
    """

    traits = Traits(
        "mix",
        reads={"X", "extra:edges", "extra:projections"},
        writes={"broadcast:edges", "broadcast:projections"},
        separable=True,
        presence="coupled",
        extras={"edges": Array(("edges", 1), torch.int64), "projections": Array(("edges", "width"))},
    )

    def init(self, layout: Layout) -> State:
        return {"links": {}, "sent": {}}

    def broadcast(self, state: State, clients: Sequence[str], models: Mapping[str, Tensor]) -> dict[str, Broadcast]:
        received: dict[str, Broadcast] = {client: {} for client in clients}
        sent, nothing = state["sent"], torch.zeros(0)
        for client in sent.keys() & received.keys():
            if links := state["links"][client]:
                # no longer than the client's own, so that no neighbour can send what does not fit
                heard = {j: sent[j].get(client, nothing)[: len(sent[client].get(j, nothing))] for j in sorted(links)}
                edges = torch.tensor([[links[j], len(q)] for j, q in heard.items()])
                received[client] = {"edges": edges, "projections": pad_sequence([*heard.values()], batch_first=True)}
        return received

    def __call__(self, updates: Updates, state: State, ctx: Ctx) -> tuple[Updates, State]:
        links, names = state["links"], sorted({*state["links"], *(client for client, _ in updates.rows)})
        if len(names) > len(links):
            graph = self.graph(names, ctx) if len(names) > 1 else Graph((*names,), frozenset())
            links = {i: {j: derive_seed(ctx.seed, "sheaf", i, j) for j in graph.senders(i)} for i in names}
        sent = {name: state["sent"].get(name, {}) for name in names}
        each = zip(updates.rows, updates.extra["edges"], updates.extra["projections"], strict=True)
        for (client, _), edges, projections in each:
            finite = projections.isfinite().all(1)
            received = dict(zip(edges[finite].flatten().tolist(), projections[finite], strict=True))
            sent[client] = {j: received[link] for j, link in links[client].items() if link in received}
        return updates, {"links": links, "sent": sent}


@dataclass(frozen=True)
class RestrictionMaps(RestrictionMapsSettings, LocalRule):
    """Adds lam sum_j P_j^T (P_j y - q_j) to the gradient at y, and lets the maps P_j follow (Sheaf-FMTL).

    y (d) are the parameters that the client trains; a map has m = floor(gamma d) rows, at least 1. The broadcast
    `edges` (n x 2) has the number of each of the client's links, from which a new map (m x d) is drawn, and the width
    of q_j in the rows of `projections` (n x m), 0 where none came; of P_j only as many rows take part. Provides P_j y
    of all links, with their numbers. State: number of a link -> map.

    Raises RecipeError where the maps of a client need more than `megabytes`.
    """

    needs = frozenset({"broadcast:edges", "broadcast:projections"})
    provides = frozenset({"extra:edges", "extra:projections"})

    def begin(self, view: View, state: State) -> State:
        y = _joined(view)
        rows, edges = max(int(self.gamma * len(y)), 1), view.broadcast.get("edges", torch.zeros(0, 2)).tolist()
        count = max(len(edges), 1)  # one at least, so that a map which can never fit is refused in the first round
        needed = count * rows * y.nbytes / 1e6
        if needed > self.megabytes:
            raise RecipeError(
                f"sheaf-fmtl: {count} maps of {rows} x {len(y)} numbers need {needed:,.0f} MB at a client, but "
                f"megabytes is {self.megabytes:g}; lower gamma, choose a topology with fewer neighbours, train "
                "adapters (model.lora), or raise megabytes"
            )
        maps = state.get("maps", {})
        heard = {
            str(link): q[:width][:rows].to(y)
            for (link, width), q in zip(edges, view.broadcast.get("projections", ()), strict=False)
        }
        return {"heard": heard, "maps": {n: maps[n] if n in maps else _drawn(int(n), rows, y) for n in heard}}

    def grad(self, view: View, state: State) -> None:
        if self.lam == 0 or not any(map(len, state["heard"].values())):
            return
        y = _joined(view)
        pull = torch.zeros_like(y)
        for link, q in state["heard"].items():
            P = state["maps"][link][: len(q)]
            pull += P.T @ (P @ y - q)
        for s, part in zip(view.trained, pull.split([len(view.params[s]) for s in view.trained]), strict=True):
            view.grad[s].add_(part, alpha=self.lam)

    def finish(self, view: View, state: State) -> tuple[State, dict[str, Any]]:
        y, maps = _joined(view), dict(state["maps"])
        for link, q in state["heard"].items():
            if width := len(q):
                maps[link] = P = maps[link].clone()  # the state of the round before stays
                P[:width] -= self.eta * self.lam * torch.outer(P[:width] @ y - q, y)
        links = torch.tensor([[int(link)] for link in maps], dtype=torch.int64).view(-1, 1)
        projections = torch.stack([P @ y for P in maps.values()]) if maps else y.new_zeros(0, 0)
        return {"maps": maps}, {"edges": links, "projections": projections}


def _joined(view: View) -> Tensor:
    """Return the parameters that the client trains, in one vector (d)."""
    return torch.cat([view.params[s] for s in view.trained])


def _drawn(seed: int, rows: int, like: Tensor) -> Tensor:
    """Return a new map (rows x d): normal, with deviation 0.01 as in the release."""
    draws = torch.randn(rows, len(like), generator=torch.Generator().manual_seed(seed))
    return (0.01 * draws).to(like)
