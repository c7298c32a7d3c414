"""The client's part of a round: load what was sent and what it keeps, train, subtract, transform, pack."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from fedloom.core.context import Ctx, Row, State
from fedloom.core.layout import Layout
from fedloom.core.stage import Identity
from fedloom.core.updates import RowList, Rows, Updates, row_norms
from fedloom.federation.rounds.evaluation import evaluate, example_losses
from fedloom.federation.rounds.federation import BuiltClient, Common
from fedloom.federation.rounds.messages import Message, Payload, unpacked
from fedloom.federation.runs.checkpoint import map_tensors
from fedloom.methods.method import Method
from fedloom.training.attack import Attack
from fedloom.training.config import Schedule, Training
from fedloom.training.flat import FlatModel
from fedloom.training.loop import Additions, LocalResult, train
from fedloom.training.rules import LocalRule, Phase


@dataclass(frozen=True, eq=False)
class ClientRound(Common):
    """One client's part of a round: load, train, subtract, transform, pack. `model` is scratch space."""

    model: FlatModel
    client: BuiltClient
    ctx: Ctx
    training: Training
    attack: Attack | None = None
    """None: the client is honest."""

    @property
    def params(self) -> Layout:
        """The model's parameters."""
        return self.layout.parameters

    def size(self, task: str | None = None) -> float:
        """Return the number of examples of the client, or of a task, as it is sent: 1 where the method reads none."""
        if not self.method.counts_examples:
            return 1.0
        return float(len((self.client if task is None else self.client.only(task)).train))

    def step(self, received: Message, state: State) -> tuple[Payload, LocalResult, State]:
        """Return (what is sent, the result of training, the client's new state).

        `state` is what the client kept from its last participation ({} at first); it is not changed. If the update is
        not finite, the state stays as it was.
        """
        result, base = self._trained(received, state, self.client.id)
        return finish([self], base[None], self.model.params[None], [state], [result])[0]

    def _trained(self, received: Message, state: State, who: str) -> tuple[LocalResult, Tensor]:
        """Load the received message and train; (result, parameters at the start). The model is left as trained."""
        start = load(self.method, self.model, received, state)
        broadcast = {name: self._everywhere(value) for name, value in received.broadcast.items()}
        result = self._local(who, state, self.method.rules, self.method.phases, broadcast, start)
        # put together only now, because it would be in memory while the client trains
        return result, begin(self.method, self.model, received, state) if start is None else start

    def _everywhere(self, value: Tensor) -> Tensor:
        """Return a broadcast vector over all parameters; other tensors as they are."""
        value = value.to(self.model.device)
        return self.params.put(torch.zeros_like(self.model.params), self.shared, value) if value.ndim == 1 else value

    def _local(
        self,
        who: str,
        memory: State,
        rules: Sequence[LocalRule],
        phases: tuple[Phase, ...] = (),
        broadcast: Mapping[str, Tensor] = MappingProxyType({}),
        received: Tensor | None = None,
    ) -> LocalResult:
        """Train the loaded model; `who` names the streams of random numbers."""
        added = Additions(phases=phases)
        if rules:
            if "rules" in memory:
                memory = {**memory, "rules": map_tensors(memory["rules"], lambda t: t.to(self.model.device))}
            look = self._validate, self._losses, self._labels
            added = Additions(self.params.spans(self.shared), rules, phases, broadcast, received, *look)
        return train(self.model, self.client.work(who), self.training, self.ctx, added, memory)

    def _validate(self) -> float:
        part = self.client.part("val")
        labelled = {name: each for name, each in self.client.tasks.items() if len(part.of(name))}
        tasks = {name: task for name, (task, _) in labelled.items()}
        scores = evaluate(self.model, part, tasks, self.training.batch_size)
        self.model.module.train()
        return sum(weight * scores[name]["loss"] for name, (_, weight) in labelled.items())

    def _losses(self) -> Tensor:
        each = example_losses(self.model, self.client.train, self.client.tasks, self.training.batch_size)
        self.model.module.train()
        return each

    def _labels(self) -> Iterator[Mapping[str, Tensor]]:
        for part, names in self.client.train.by_labels(self.client.tasks):
            for batch in part.index.split(self.training.batch_size):
                yield part.examples.batch(batch, torch.device("cpu"), tasks=names)[1]

    def finished(
        self,
        base: Tensor,
        delta: Tensor,
        finite: bool,
        state: State,
        result: LocalResult,
        packed: Mapping[str, Tensor] | None = None,
    ) -> tuple[Payload, LocalResult, State]:
        """Return what `step` does, from a change `delta` of the parameters `base` (p each), which may be packed."""
        method, row, n = self.method, (self.client.id, None), self.size()
        if not finite:
            return Payload(row, n, finite=False), result, state
        new, X = self._kept(base, delta, result), self.params.take(delta, self.shared)[None]
        extra = self._extras(result) if method.extras else {}
        if packed is None:
            payload, kept, updates = self._packed((row,), X, [n], {name: [v] for name, v in extra.items()}, state)
            if not payload.finite:
                return payload, result, state
            X, new, n, packed = updates.X, new | kept, payload.n, payload.packed
            extra = {name: values[0] for name, values in payload.extra.items()}
        # from the update that was sent, so that client and server continue from the same model
        new |= method.turn.kept(self.params.take(base, self.shared), X[0])
        plain = not (method.auxiliary or method.wants_support or self.model.has_buffers)
        return Payload(row, n, packed, extra, **({} if plain else self._beside(result))), result, new

    def _beside(self, result: LocalResult) -> dict[str, Any]:
        """Return what a payload has beside its packed row and extras, by field."""
        method, beside = self.method, dict[str, Any]()
        if method.auxiliary:
            take, extra = self.params.take, result.extra
            beside["auxiliary"] = {name: take(extra[name], self.shared).to("cpu") for name in method.auxiliary}
        if method.wants_support:
            beside["support"] = self._support(tuple(self.client.tasks))
        if method.buffers != "local" and self.model.has_buffers:  # else they were copied by `_kept`
            beside["buffers"], beside["integers"] = self._buffers()
        return beside

    def _buffers(self) -> tuple[Tensor | None, dict[str, Tensor]]:
        """Return copies of the float buffers that may leave the client, and of integer buffers."""
        model = self.model
        shared = self.layout.buffers.take(model.buffers, self.shared_buffers)
        buffers = shared.to("cpu", copy=True) if len(shared) else None
        return buffers, {name: b.to("cpu", copy=True) for name, b in model.integers.items()}

    def _kept(self, base: Tensor, delta: Tensor, result: LocalResult) -> State:
        """Return what a client keeps of a round for its next one, without the states of its stages."""
        method, model = self.method, self.model
        new: State = {"optimizer": result.optimizer} if result.optimizer else {}
        if method.private is None and not (method.rules or method.buffers == "local" or model.has_buffers):
            return new
        if method.private is not None and (private := method.private_part(self.layout)).blocks:
            # start + update, as every server computes it, so that local training is exactly mixing with the identity
            own = self.params.take(base, private) + self.params.take(delta, private)
            new["private"] = own.to("cpu")
        if method.rules:
            new["rules"] = map_tensors(result.rules, lambda t: t.to("cpu"))
            for i, rule in enumerate(method.rules):
                if rule.keeps_model and (personal := rule.personal(result.rules[str(i)])) is not None:
                    new["personal"] = personal_state(model, personal)
        if method.buffers == "local":
            new["buffers"], new["integers"] = self._buffers()
        if (mine := self.layout.buffers.without(self.shared_buffers)).blocks:
            new["private_buffers"] = self.layout.buffers.take(model.buffers, mine).to("cpu", copy=True)
        return new

    def _extras(self, result: LocalResult) -> dict[str, Any]:
        """Return the extras of the client's row that some stage uses: no others leave the client."""
        names, client = self.method.extras, self.client
        about: dict[str, Any] = {"steps": float(result.steps), **client.extras}
        if "classes" in names:
            about["classes"] = client.class_counts
        about |= {name: v.to("cpu") if isinstance(v, Tensor) else v for name, v in result.extra.items()}
        return {name: value for name, value in about.items() if name in names}

    def _support(self, tasks: tuple[str, ...]) -> Tensor:
        """Return which blocks received a gradient in training these tasks."""
        trained = set(self.layout.trained(tasks).names)
        return torch.tensor([b.name in trained for b in self.shared.blocks])

    def _packed(
        self,
        rows: tuple[Row, ...],
        X: Tensor | Rows,
        sizes: Sequence[float],
        extra: Mapping[str, list[Any]],
        state: State,
    ) -> tuple[Payload, State, Updates]:
        """Pass rows through the client's stages, its attack and the codec: (payload, their states, rows as sent).

        A client that sends nothing has a payload that is not finite.
        """
        method, n, kept = self.method, torch.tensor(sizes, dtype=torch.float64), dict[str, Any]()
        present = self.federation.presence(self.shared, rows)
        updates = Updates(self.shared, rows, X, n, n.clone(), present=present, extra=extra)
        if not isinstance(method.edge, Identity):
            updates, edge = method.edge(updates, state.get("edge") or method.edge.init(self.shared), self.ctx)
            kept |= {"edge": edge} if edge else {}
        if self.attack is not None:  # after its stages: a hostile client obeys no clipping of its own
            sent, memory = self.attack.answer(updates, state.get("attack", {}), self.ctx)
            kept |= {"attack": memory} if memory else {}
            if sent is None:
                return Payload(rows[0], float(n.sum()), finite=False), kept, updates
            updates = sent
        packed = {name: value.to("cpu") for name, value in method.codec.pack(updates).items()}
        counts = {task: n for (_, task), n in zip(rows, updates.n.tolist(), strict=True) if task is not None}
        return Payload(rows[0], float(updates.n.sum()), packed, dict(updates.extra), tasks=counts), kept, updates


class BesideRound(ClientRound):
    """A client's part of a round if it trains a model of its own beside the shared one."""

    def step(self, received: Message, state: State) -> tuple[Payload, LocalResult, State]:
        # its own first: the model is left as the shared one was trained, whose update need not wait meanwhile
        model, memory = self.model, state.get("personal", {})
        start = load(self.method, model, received, state)
        base = model.params.clone() if start is None else start
        own = load_personal(model, memory)
        rules = self.method.turn.beside or ()
        beside = self._local(f"{self.client.id}/personal", memory, rules, broadcast={"anchor": base}, received=own)
        if bool(torch.isfinite(model.vector).all()):
            memory = personal_state(model, model.params, {"rules": beside.rules, "optimizer": beside.optimizer})
        del start, base, own, beside
        payload, result, new = super().step(received, state)
        return payload, result, {**new, "personal": memory} if payload.finite else new


class EachTaskRound(ClientRound):
    """A client's part of a round if it trains each of its tasks alone."""

    def step(self, received: Message, state: State) -> tuple[Payload, LocalResult, State]:
        model, client, row = self.model, self.client, (self.client.id, None)
        initial = model.initial[: self.params.d]
        starts = task_messages(self, model, client.id, received)
        memories = state.get("tasks", {})
        new: State = {"tasks": dict(memories)}
        results: dict[str, LocalResult] = {}
        rows: dict[str, Tensor] = {}
        extra: dict[str, list[Any]] = {}
        support: list[Tensor] = []
        sent: list[tuple[Tensor | None, dict[str, Tensor]]] = []
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
            if self.method.buffers != "local" and model.has_buffers:
                sent.append(self._buffers())
        merged = LocalResult(
            sum(r.steps for r in results.values()),
            sum(r.examples for r in results.values()),
            {task: results[task].losses[task] for task in client.tasks},
            waiting=sum(r.waiting for r in results.values()),
            by_task=results,
        )
        if not rows:
            return Payload(row, self.size(), finite=False), merged, state
        sizes = [self.size(task) for task in rows]
        keys = tuple((client.id, task) for task in rows)
        payload, kept, _ = self._packed(keys, RowList(tuple(rows.values())), sizes, extra, state)
        if not payload.finite:
            return replace(payload, row=row), merged, state
        beside: dict[str, Any] = {"support": torch.stack(support) if self.method.wants_support else None}
        if sent:
            floats = [buffers for buffers, _ in sent if buffers is not None]
            beside["buffers"] = torch.stack(floats) if floats else None
            beside["integers"] = {name: torch.stack([i[name] for _, i in sent]).amax(0) for name in model.integers}
        return replace(payload, row=row, n=self.size(), **beside), merged, new | kept


def part_of(method: Method) -> type[ClientRound]:
    """Return the class of a client's part of a round, by the method's turns."""
    if method.turn.by_task:
        return EachTaskRound
    return ClientRound if method.turn.beside is None else BesideRound


def finish(
    turns: Sequence[ClientRound], base: Tensor, params: Tensor, states: Sequence[State], results: Sequence[LocalResult]
) -> list[tuple[Payload, LocalResult, State]]:
    """Return what clients of one model and the same tasks send and keep, from parameters before and after (K x p)."""
    first, method = turns[0], turns[0].method
    delta = params - base
    packed: Sequence[Mapping[str, Tensor] | None] = [None] * len(turns)
    if isinstance(method.edge, Identity) and all(turn.attack is None for turn in turns):
        present = first.federation.presence(first.shared, [(first.client.id, None)])
        packed = method.codec.pack_each(first.params.take(delta, first.shared), first.shared, present) or packed
    each = zip(turns, base, delta, _finite(first.model, delta), states, results, packed, strict=True)
    return [turn.finished(*given) for turn, *given in each]


def _finite(model: FlatModel, delta: Tensor) -> list[bool]:
    """Return of changes of the parameters (K x p) whether each, and the model's buffers, are finite."""
    return [*map(bool, row_norms(delta).isfinite() & torch.isfinite(model.buffers).all())]


def tune(method: Method, model: FlatModel, client: BuiltClient, training: Training, ctx: Ctx) -> None:
    """Tune the loaded model before a personal model is measured, as the method says, at the full learning rate."""
    if method.tune is None:
        return
    ctx = replace(ctx, round=max(ctx.round, 1))  # the initial model is measured too
    changes = {"epochs": method.tune.epochs, "steps": None, "keep_optimizer": False, "schedule": Schedule()}
    longer = training.model_copy(update=changes)
    work = replace(client.work(f"{client.id}/tune"), draws=("tune", client.id))
    train(model, work, longer, ctx, Additions(phases=(Phase(method.tune.select),)))


def task_messages(common: Common, model: FlatModel, client: str, received: Message) -> dict[str, Message]:
    """Return a received message as one per task, each with a whole vector: the task's own, or that of all."""
    tasks = common.federation.client(client).tasks
    if not common.method.task_vectors:
        return dict.fromkeys(tasks, received)
    params = model.layout.parameters
    origin = params.take(model.initial[: params.d], common.shared).to("cpu")
    start = {task: Message(origin, None, received.integers) for task in tasks}
    if received.tasks:
        rows = tuple((client, task) for task in received.tasks)
        X, _ = unpacked(common, rows, received.packed, origin.dtype)
        buffers = [None] * len(X) if received.buffers is None or received.buffers.ndim < 2 else received.buffers
        for task, x, own in zip(received.tasks, X, buffers, strict=True):
            start[task] = Message(origin + x, own, received.integers)
    return start


def for_task(common: Common, model: FlatModel, client: str, received: Message, task: str | None) -> Message:
    """Return a message with the whole vector of one task; unchanged if tasks have no models of their own."""
    return received if task is None else task_messages(common, model, client, received)[task]


def personal_state(model: FlatModel, params: Tensor, more: State | None = None) -> State:
    """Return a client's own model as state."""
    state: State = {"vector": torch.cat([params, model.buffers]), "integers": dict(model.integers), **(more or {})}
    return dict(map_tensors(state, lambda t: t.to("cpu", copy=True)))


def load_personal(model: FlatModel, personal: State) -> Tensor | None:
    """Load a client's own model over the loaded one, and return it, if there is one."""
    if not personal:
        return None
    vector: Tensor = personal["vector"].to(model.device)
    model.vector.copy_(vector)
    model.load_integers(personal["integers"])
    return vector


def load(method: Method, model: FlatModel, received: Message, state: State) -> Tensor | None:
    """Load what the server sent and what the client keeps into the model; return the vector if all of it was sent."""
    start = begin(method, model, received, state, model.params)
    model.params.copy_(start)
    if model.has_buffers:
        _load_buffers(method, model, received, state)
    return None if start is model.params or len(model.buffers) else start


def begin(method: Method, model: FlatModel, received: Message, state: State, into: Tensor | None = None) -> Tensor:
    """Return the parameters from which a client starts: those that were sent, if they are all (which may not change,
    because clients that start from one model share its memory), else a vector, or `into`, with those that it keeps."""
    params, shared = model.layout.parameters, method.shared_part(model.layout)
    vector = (state["own"] if received.vector is None else received.vector).to(model.device)
    if shared is params:
        return vector
    start = torch.empty_like(model.params) if into is None else into
    rest = params.without(shared)
    params.put(start, rest, params.take(model.initial[: params.d], rest))
    if "private" in state:
        params.put(start, method.private_part(model.layout), state["private"].to(model.device))
    return params.put(start, shared, vector)


def _load_buffers(method: Method, model: FlatModel, received: Message, state: State) -> None:
    """Load float buffers, the client's own among them, and integer buffers."""
    layout, local = model.layout, method.buffers == "local"
    shared = method.shared_buffers(layout)
    # first all as they were at the start: an earlier client has left its own here
    model.buffers.copy_(model.initial[layout.parameters.d :])
    model.load_integers(model.initial_integers)
    buffers = state.get("buffers") if local else received.buffers
    if buffers is not None:
        layout.buffers.put(model.buffers, shared, buffers.to(model.device))
    if "private_buffers" in state:
        layout.buffers.put(model.buffers, layout.buffers.without(shared), state["private_buffers"].to(model.device))
    model.load_integers(state.get("integers", {}) if local else dict(received.integers))
