"""The stages of fedloom in a Flower app that exists: a Strategy to copy, for clients that all have the same model.

Flower's strategies cannot carry clients with different heads or tasks, private parts, rows of several tasks, stages at
the client, codecs, or server rules that look ahead. For these there is `server_app`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from fedloom.core.context import Ctx, State
from fedloom.core.errors import RecipeError
from fedloom.core.layout import Block, Layout
from fedloom.core.lazy import need
from fedloom.core.stage import Stage
from fedloom.core.updates import Updates


def as_strategy(stage: Stage, seed: int = 0, client_key: str = "client-id", **options: Any) -> Any:
    """Return a Flower FedAvg whose mean is replaced by a stage, such as `TopMagnitude(0.3) >> PCGrad() >> Mean()`.

    `options` are FedAvg's own, and clients answer as they do to FedAvg. Rows are named, and sorted, by the value under
    `client_key` in an answer's ConfigRecord. Without it they are named by node ids, which Flower draws anew for every
    run, so that stages with random draws do not repeat. For integer arrays (counters) the largest values are kept.

    Raises RecipeError for a stage that leaves a model for each client, adds noise, or reads values that such clients do
    not send.
    """
    strategy = need("flwr.serverapp.strategy", "flower")
    app = need("flwr.app", "flower")
    needs = sorted(f for f in stage.traits.reads if f.startswith(("extra:", "auxiliary:")) or f == "base")
    if needs:
        raise RecipeError(f"as_strategy: {stage!r} reads {', '.join(needs)}, which clients of FedAvg do not send")
    if stage.traits.hides:
        raise RecipeError(
            f"as_strategy: {stage!r} adds noise, but a strategy keeps no privacy budget; use server_app, with "
            "privacy in "
            "the recipe"
        )
    if not stage.traits.reduces:
        raise RecipeError(
            f"as_strategy: {stage!r} returns a model per client, but a strategy has one model for all clients"
        )

    class Stages(strategy.FedAvg):  # type: ignore[name-defined]
        """FedAvg with a stage in the place of the mean."""

        state: State | None = None
        before: Mapping[str, Any] = {}

        def configure_train(self, server_round: int, arrays: Any, config: Any, grid: Any) -> Iterable[Any]:
            self.before = {name: array.numpy() for name, array in arrays.items()}
            messages: Iterable[Any] = super().configure_train(server_round, arrays, config, grid)
            return messages

        def aggregate_train(self, server_round: int, replies: Iterable[Any]) -> tuple[Any, Any]:
            replies = list(replies)
            mean, metrics = super().aggregate_train(server_round, replies)  # also checks them
            if mean is None:
                return None, metrics
            rows = {_name(reply, client_key): reply.content for reply in replies if not reply.has_error()}
            changed = self._apply(server_round, dict(sorted(rows.items())))
            return app.ArrayRecord({name: app.Array(value) for name, value in changed.items()}), metrics

        def _apply(self, round_: int, rows: dict[str, Any]) -> Mapping[str, Any]:
            before = {name: torch.from_numpy(value) for name, value in self.before.items()}
            floats = {name: t for name, t in before.items() if t.is_floating_point()}
            layout = Layout(tuple(Block(name, tuple(t.shape), str(t.dtype), "encoder") for name, t in floats.items()))
            start = _flat(floats)
            arrays = [next(iter(content.array_records.values())) for content in rows.values()]
            X = torch.stack([_flat({n: torch.from_numpy(a[n].numpy()) for n in floats}) - start for a in arrays])
            sizes = [next(iter(content.metric_records.values()))[self.weighted_by_key] for content in rows.values()]
            n = torch.tensor(sizes, dtype=torch.float64)
            keys = tuple((name, None) for name in rows)
            updates, _ = Updates(layout, keys, X, n, n.clone()).finite()
            ctx = Ctx(round_, seed, keys, len(keys))
            out, self.state = stage(updates, stage.init(layout) if self.state is None else self.state, ctx)
            if not len(out):
                return self.before
            after = dict(zip(floats, (start + out.X[0]).split([t.numel() for t in floats.values()]), strict=True))
            result = {name: after[name].view(t.shape).numpy() for name, t in floats.items()}
            for name in before.keys() - floats.keys():
                result[name] = torch.stack([torch.from_numpy(a[name].numpy()) for a in arrays]).amax(0).numpy()
            return {name: result[name] for name in before}

    return Stages(**options)


def _flat(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([t.reshape(-1) for t in tensors.values()])


def _name(reply: Any, key: str) -> str:
    for record in reply.content.config_records.values():
        if key in record:
            return str(record[key])
    return str(reply.metadata.src_node_id)
