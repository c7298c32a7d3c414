"""The client's part of a round."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fedloom.core.context import Ctx, Row, State
from fedloom.core.layout import Layout
from fedloom.core.stage import Identity
from fedloom.core.updates import RowList, Rows, Updates, row_norms
from fedloom.federation.rounds.evaluation import evaluate, example_losses
from fedloom.federation.rounds.federation import BuiltClient, BuiltFederation
from fedloom.federation.rounds.loading import load, load_personal, personal_state, task_messages
from fedloom.federation.rounds.messages import Message, Payload
from fedloom.federation.runs.checkpoint import map_tensors
from fedloom.methods.method import Method
from fedloom.training.attack import HONEST, Attack
from fedloom.training.config import Schedule, Training
from fedloom.training.flat import FlatModel
from fedloom.training.loop import Additions, LocalResult, train
from fedloom.training.rules import Phase


def client_step(
    method: Method,
    model: FlatModel,
    federation: BuiltFederation,
    client: BuiltClient,
    received: Message,
    state: State,
    ctx: Ctx,
    training: Training,
) -> tuple[Payload, LocalResult, State]:
    """One client's part of a round: load, train, subtract, transform, pack.

    `model` is scratch space: everything in it is overwritten. `state` is what the client kept from its last
    participation ({} at first); it is not changed. If the update is not finite, the state stays as it was.
    """
    part = part_of(method)(method, model, federation, client, ctx, client.settings(training))
    return part.step(received, state)


@dataclass(frozen=True, eq=False)
class ClientRound:
    """One client's part of a round, with the settings of its domain; see `client_step`."""

    method: Method
    model: FlatModel
    federation: BuiltFederation
    client: BuiltClient
    ctx: Ctx
    training: Training
    attack: Attack = HONEST

    @cached_property
    def params(self) -> Layout:
        """The model's parameters."""
        return self.model.layout.parameters

    @cached_property
    def shared(self) -> Layout:
        """Those of them that are aggregated: the columns of the matrix of updates."""
        return self.method.shared_part(self.model.layout)

    def size(self, task: str | None = None) -> float:
        """Number of examples of the client, or of one of its tasks, as it is sent: 1 where the method reads none."""
        if not self.method.counts_examples:
            return 1.0
        return float(len((self.client if task is None else self.client.only(task)).train))

    def step(self, received: Message, state: State) -> tuple[Payload, LocalResult, State]:
        """(what is sent, what training left, the client's new state)."""
        result, base = self._trained(received, state, self.client.id)
        return self.finish(base, state, result)

    def _trained(self, received: Message, state: State, who: str) -> tuple[LocalResult, Tensor]:
        """Load the received message and train; (result, parameters at the start). The model is left as trained."""
        start = load(self.method, self.model, received, state)
        base = start[: self.params.d]

        def everywhere(value: Tensor) -> Tensor:
            value = value.to(self.model.device)
            return self.params.put(torch.zeros_like(base), self.shared, value) if value.ndim == 1 else value

        broadcast = {name: everywhere(value) for name, value in received.broadcast.items()}
        added = Additions(rules=self.method.rules, phases=self.method.phases, broadcast=broadcast, received=start)
        return self._local(who, added, state), base

    def _local(self, who: str, added: Additions, memory: State) -> LocalResult:
        """Local training of the loaded model; `who` names the streams of random numbers."""
        model, client, batch_size = self.model, self.client, self.training.batch_size

        def validate() -> dict[str, float]:
            plain = {name: task for name, (task, _) in client.tasks.items()}
            scores = evaluate(model, client.part("val"), plain, batch_size)
            model.module.train()
            return {name: score["loss"] for name, score in scores.items()}

        def losses() -> Tensor:
            each = example_losses(model, client.train, client.tasks, batch_size)
            model.module.train()
            return each

        def labels() -> Iterator[Mapping[str, Tensor]]:
            for part, names in client.train.by_labels(client.tasks):
                for batch in part.index.split(batch_size):
                    yield part.examples.batch(batch, torch.device("cpu"), tasks=names)[1]

        kept: State = {kind: memory[kind] for kind in ("rules", "optimizer") if kind in memory}
        if "rules" in kept:
            kept["rules"] = map_tensors(kept["rules"], lambda t: t.to(model.device))
        added = replace(added, shared=model.spans(self.shared), validate=validate, losses=losses, labels=labels)
        return train(model, client.work(who), self.training, self.ctx, added, kept)

    def finish(self, base: Tensor, state: State, result: LocalResult) -> tuple[Payload, LocalResult, State]:
        """From the trained model (`base` is where it started) to a payload and the client's new state."""
        return finish([self], base[None], self.model.params[None], [state], [result])[0]

    def _finished(
        self, base: Tensor, delta: Tensor, state: State, result: LocalResult, packed: Mapping[str, Tensor] | None
    ) -> tuple[Payload, LocalResult, State]:
        """As `finish`, from a finite change of the parameters (p), which may be packed already."""
        method, client = self.method, self.client
        row: Row = (client.id, None)
        new, X = self._kept(base, delta, result), self.params.take(delta, self.shared)[None]
        n, extras = self.size(), self._extras(result)
        if packed is None:
            payload, kept, updates = self._packed(
                (row,), X, [n], {name: [value] for name, value in extras.items()}, state
            )
            X = updates.X
            if not payload.finite:
                return payload, result, state
            new |= kept
            n, packed, extras = payload.n, payload.packed, {name: values[0] for name, values in payload.extra.items()}
        new |= method.turn.kept(self.params.take(base, self.shared), X[0])
        # buffers that stay with the client were copied by `_kept`
        buffers, integers = self._buffers() if method.buffers != "local" else (None, {})
        sent = Payload(
            row,
            n,
            packed,
            extras,
            auxiliary={name: self.params.take(result.extra[name], self.shared).to("cpu") for name in method.auxiliary},
            support=self._support(tuple(client.tasks)) if method.wants_support else None,
            buffers=buffers,
            integers=integers,
        )
        return sent, result, new

    def _buffers(self) -> tuple[Tensor | None, dict[str, Tensor]]:
        """Copies of the float buffers that may leave the client, and of integer buffers."""
        model, layout = self.model, self.model.layout
        if not len(model.buffers) and not model.integers:
            return None, {}
        shared = layout.buffers.take(model.buffers, self.method.shared_buffers(layout))
        buffers = shared.to("cpu", copy=True) if len(shared) else None
        return buffers, {name: b.to("cpu", copy=True) for name, b in model.integers.items()}

    def _kept(self, base: Tensor, delta: Tensor, result: LocalResult) -> State:
        """What a client keeps of a round, which changed its parameters by `delta`, for its next one; stages at the
        client add their own state.
        """
        method, model, params = self.method, self.model, self.params
        private, cpu = method.private_part(model.layout), torch.device("cpu")
        new: State = {}
        if private.blocks:
            # start + update, as every server computes it, so that local training is exactly mixing with the identity
            new["private"] = (params.take(base, private) + params.take(delta, private)).to(cpu)
        if result.optimizer:
            new["optimizer"] = result.optimizer
        if method.rules:
            new["rules"] = map_tensors(result.rules, lambda t: t.to(cpu))
        for i, rule in enumerate(method.rules):
            if rule.keeps_model and (personal := rule.personal(result.rules[str(i)])) is not None:
                new["personal"] = personal_state(model, personal)
        if method.buffers == "local":
            new["buffers"], new["integers"] = self._buffers()
        layout = model.layout.buffers
        own = layout.without(method.shared_buffers(model.layout))
        if own.blocks:
            new["private_buffers"] = layout.take(model.buffers, own).to(cpu, copy=True)
        return new

    def _extras(self, result: LocalResult) -> dict[str, Any]:
        """The extras of the client's row that some stage uses."""
        wanted, client = self.method.extras, self.client
        about: dict[str, Any] = {
            "steps": float(result.steps),
            "domain": client.domain or "",
            "tasks": ",".join(sorted(client.tasks)),
        }
        if "classes" in wanted:
            about["classes"] = client.class_counts
        about |= {name: v.to("cpu") if isinstance(v, Tensor) else v for name, v in result.extra.items()}
        return {name: value for name, value in about.items() if name in wanted}

    def _support(self, tasks: tuple[str, ...]) -> Tensor:
        """Which blocks received a gradient in training these tasks."""
        trained = set(self.model.trained(tasks).names)
        return torch.tensor([b.name in trained for b in self.shared.blocks])

    def _packed(
        self,
        rows: tuple[Row, ...],
        X: Tensor | Rows,
        sizes: Sequence[float],
        extra: Mapping[str, list[Any]],
        state: State,
    ) -> tuple[Payload, State, Updates]:
        """Rows after the client's stages, its attack and the codec: (payload, their states, the rows before the codec).

        A client that sends nothing has a payload that is not finite.
        """
        method, n = self.method, torch.tensor([float(size) for size in sizes], dtype=torch.float64)
        present = self.federation.present(self.client, self.shared, tuple(task for _, task in rows if task is not None))
        updates = Updates(self.shared, rows, X, n, n.clone(), present=present, extra=extra)
        updates, edge = method.edge(updates, state.get("edge") or method.edge.init(self.shared), self.ctx)
        sent, memory = self.attack.answer(updates, state.get("attack", {}), self.ctx)
        kept = {name: value for name, value in (("edge", edge), ("attack", memory)) if value}
        if sent is None:
            return Payload(rows[0], float(n.sum()), finite=False), kept, updates
        packed = {k: v.to("cpu") for k, v in method.codec.pack(sent).items()}
        tasks = {task: size for (_, task), size in zip(rows, sent.n.tolist(), strict=True) if task is not None}
        return Payload(rows[0], float(sent.n.sum()), packed, dict(sent.extra), tasks=tasks), kept, sent


class BesideRound(ClientRound):
    """A client's part of a round if it trains a model of its own beside the shared one."""

    def step(self, received: Message, state: State) -> tuple[Payload, LocalResult, State]:
        model = self.model
        result, base = self._trained(received, state, self.client.id)
        payload, result, new = self.finish(base, state, result)
        if not payload.finite:
            return payload, result, new
        trained = model.vector.clone()
        memory = state.get("personal", {})
        load_personal(model, memory)
        if not memory:
            model.params.copy_(base)
        added = Additions(rules=self.method.turn.beside or (), broadcast={"anchor": base})
        beside = self._local(f"{self.client.id}/personal", added, memory)
        new["personal"] = memory
        if bool(torch.isfinite(model.vector).all()):
            more = {"rules": beside.rules, "optimizer": beside.optimizer}
            new["personal"] = personal_state(model, model.params, more)
        model.vector.copy_(trained)
        return payload, result, new


class EachTaskRound(ClientRound):
    """A client's part of a round if it trains each of its tasks alone."""

    def step(self, received: Message, state: State) -> tuple[Payload, LocalResult, State]:
        model, client = self.model, self.client
        initial = model.initial[: self.params.d]
        starts = task_messages(self.method, model, self.federation, client.id, received)
        memories = state.get("tasks", {})
        new: State = {"tasks": dict(memories)}
        results: dict[str, LocalResult] = {}
        rows: dict[str, Tensor] = {}
        extra: dict[str, list[Any]] = {}
        support: list[Tensor] = []
        for task in sorted(client.tasks):
            one, memory = replace(self, client=client.only(task)), memories.get(task, {})
            result, base = one._trained(starts[task], memory, f"{client.id}/{task}")
            results[task] = result
            delta = model.params - base
            if not _finite(model, delta[None])[0]:
                continue
            new["tasks"][task] = self._kept(base, delta, result)
            # task vectors are from the initial model, which every client and the server know
            if self.method.task_vectors:
                torch.sub(model.params, initial, out=delta)
            rows[task] = self.params.take(delta, self.shared)
            for name, value in one._extras(result).items():
                extra.setdefault(name, []).append(value)
            support.append(self._support((task,)))
        merged = LocalResult(
            sum(r.steps for r in results.values()),
            sum(r.examples for r in results.values()),
            {task: results[task].losses[task] for task in client.tasks},
            waiting=sum(r.waiting for r in results.values()),
            by_task=results,
        )
        row: Row = (client.id, None)
        if not rows:
            return Payload(row, self.size(), finite=False), merged, state
        sizes = {task: self.size(task) for task in rows}
        keys = tuple((client.id, task) for task in rows)
        payload, kept, _ = self._packed(keys, RowList(tuple(rows.values())), list(sizes.values()), extra, state)
        if not payload.finite:
            return replace(payload, row=row), merged, state
        new |= kept
        rows_support = torch.stack(support) if self.method.wants_support else None
        return replace(payload, row=row, n=self.size(), support=rows_support), merged, new


def part_of(method: Method) -> type[ClientRound]:
    """Return the class of a client's part of a round, by the method's turns."""
    if method.turn.by_task:
        return EachTaskRound
    return ClientRound if method.turn.beside is None else BesideRound


def finish(
    turns: Sequence[ClientRound],
    base: Tensor,
    params: Tensor,
    states: Sequence[State],
    results: Sequence[LocalResult],
) -> list[tuple[Payload, LocalResult, State]]:
    """What clients of one model send and keep, from their parameters before (`base`) and after training (K x p).

    Clients that do nothing to their rows, and hold the same tasks, pack them together.
    """
    method, model, first = turns[0].method, turns[0].model, turns[0]
    delta = params - base
    fine = _finite(model, delta)
    packed = None
    if len(turns) > 1 and isinstance(method.edge, Identity) and all(turn.attack is HONEST for turn in turns):
        X, present = first.params.take(delta, first.shared), first.federation.present(first.client, first.shared)
        packed = method.codec.pack_each(X, first.shared, present)
    done = []
    for k, (turn, before, change) in enumerate(zip(turns, base, delta, strict=True)):
        if fine[k]:
            done.append(turn._finished(before, change, states[k], results[k], packed[k] if packed else None))
        else:
            nothing = Payload((turn.client.id, None), turn.size(), finite=False)
            done.append((nothing, results[k], states[k]))
    return done


def _finite(model: FlatModel, delta: Tensor) -> list[bool]:
    """Of changes of the parameters (K x p): whether each, and the model's buffers, are finite."""
    found: list[bool] = (row_norms(delta).isfinite() & torch.isfinite(model.buffers).all()).tolist()
    return found


def tune(method: Method, model: FlatModel, client: BuiltClient, training: Training, ctx: Ctx) -> None:
    """Tune the loaded model before a personal model is measured, as the method says, at the full learning rate."""
    if method.tune is None:
        return
    ctx = replace(ctx, round=max(ctx.round, 1))  # the initial model is measured too
    changes = {"epochs": method.tune.epochs, "steps": None, "keep_optimizer": False, "schedule": Schedule()}
    longer = training.model_copy(update=changes)
    work = replace(client.work(f"{client.id}/tune"), draws=("tune", client.id))
    train(model, work, longer, ctx, Additions(phases=(Phase(method.tune.select),)))
