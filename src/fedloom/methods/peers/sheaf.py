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
    (n x m_i), with the number of each link (i, j) in the extra `edges` (n x 1). It is sent the numbers of all its links
    as `edges` (n x 1), and the neighbours' P_ji theta_j as `projections`, filled up to n x m_i with NaN. A link's
    number is a seed, which follows from the run's seed and the two names. State: client -> neighbour -> number of the
    link; number -> last projection.
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
        links, sent, nothing = state["links"], state["sent"], torch.zeros(0)
        for client in links.keys() & received.keys():
            if own := links[client]:
                # no longer than the client's own, so that no neighbour can send what does not fit
                widths = {j: len(sent.get(str(number), nothing)) for j, number in own.items()}
                heard = [sent.get(str(links[j][client]), nothing)[:width] for j, width in widths.items()]
                projections = pad_sequence(heard, batch_first=True, padding_value=torch.nan)
                received[client] = {"edges": torch.tensor([*own.values()])[:, None], "projections": projections}
        return received

    def __call__(self, updates: Updates, state: State, ctx: Ctx) -> tuple[Updates, State]:
        links, names = state["links"], sorted({*state["links"], *(client for client, _ in updates.rows)})
        if len(names) > len(links):
            graph = self.graph(names, ctx) if len(names) > 1 else Graph((*names,), frozenset())
            links = {i: {j: derive_seed(ctx.seed, "sheaf", i, j) for j in sorted(graph.senders(i))} for i in names}
        sent = dict(state["sent"])
        each = zip(updates.rows, updates.extra["edges"], updates.extra["projections"], strict=True)
        for (client, _), edges, projections in each:
            received = zip(edges.flatten().tolist(), projections, strict=True)
            own = {*links[client].values()}
            sent |= {str(number): q if q.isfinite().all() else q[:0] for number, q in received if number in own}
        return updates, {"links": links, "sent": sent}


@dataclass(frozen=True)
class RestrictionMaps(RestrictionMapsSettings, LocalRule):
    """Adds lam sum_j P_j^T (P_j y - q_j) to the gradient at y, and lets the maps P_j follow (Sheaf-FMTL).

    y (d) are the parameters that the client trains; a map has m = floor(gamma d) rows, at least 1. The broadcast
    `edges` (n x 1) has the number of each of the client's links, from which a new map (m x d) is drawn, and
    `projections` q_j in its rows (n x m), NaN where nothing came; these rows of P_j do not take part. Provides P_j y
    of all links, with their numbers. State: the numbers of the links, their maps (n x m x d).

    Raises RecipeError where the maps of a client need more than `megabytes`.
    """

    needs = frozenset({"broadcast:edges", "broadcast:projections"})
    provides = frozenset({"extra:edges", "extra:projections"})

    def begin(self, view: View, state: State) -> State:
        y, links = _joined(view), view.broadcast.get("edges", torch.zeros(0, 1, dtype=torch.int64))
        rows, count = max(int(self.gamma * len(y)), 1), max(len(links), 1)  # one at least: refused in the first round
        if (needed := count * rows * y.nbytes / 1e6) > self.megabytes:
            raise RecipeError(
                f"sheaf-fmtl: {count} maps of {rows} x {len(y)} numbers need {needed:,.0f} MB at a client, but "
                f"megabytes is {self.megabytes:g}; lower gamma, choose a topology with fewer neighbours, train "
                "adapters (model.lora), or raise megabytes"
            )
        numbers, known = links.flatten().tolist(), dict(zip(state.get("links", ()), state.get("maps", ()), strict=True))
        maps = [known[number] if number in known else _drawn(number, rows, y) for number in numbers]
        joined = torch.stack(maps) if maps else y.new_zeros(0, rows, len(y))
        q, heard = torch.full_like(joined[..., 0], torch.nan), view.broadcast.get("projections", links)[:, :rows]
        q[:, : heard.shape[1]] = heard
        return {"links": numbers, "maps": joined, "q": q}

    def grad(self, view: View, state: State) -> None:
        if self.lam and state["links"]:
            pull = torch.einsum("nmd,nm->d", state["maps"], _gaps(_joined(view), state))
            for s, part in zip(view.trained, pull.split([len(view.params[s]) for s in view.trained]), strict=True):
                view.grad[s].add_(part, alpha=self.lam)

    def finish(self, view: View, state: State) -> tuple[State, dict[str, Any]]:
        y, links = _joined(view), state["links"]
        maps = state["maps"] - self.eta * self.lam * _gaps(y, state)[:, :, None] * y
        return {"links": links, "maps": maps}, {
            "edges": torch.tensor(links).long()[:, None],
            "projections": maps @ y if links else y.new_zeros(0, 0),
        }


def _gaps(y: Tensor, state: State) -> Tensor:
    """Return P_j y - q_j of every link (n x m), 0 where q_j has no number."""
    return torch.where(state["q"].isnan(), 0.0, state["maps"] @ y - state["q"])


def _joined(view: View) -> Tensor:
    """Return the parameters that the client trains, in one vector (d)."""
    return torch.cat([view.params[s] for s in view.trained])


def _drawn(seed: int, rows: int, like: Tensor) -> Tensor:
    """Return a new map (rows x d): normal, with deviation 0.01 as in the release."""
    draws = torch.randn(rows, len(like), generator=torch.Generator().manual_seed(seed))
    return (0.01 * draws).to(like)
