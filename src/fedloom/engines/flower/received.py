"""Checks of what nodes send: it is accepted only if an honest node could send it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fedloom.engines.flower.relay import as_counts
from fedloom.engines.flower.wire import RefusedError, decode, expect, head_of, numbers_of
from fedloom.engines.peers.transport import Letter
from fedloom.rounds.built import Built
from fedloom.rounds.evaluation import Scores
from fedloom.rounds.messages import Payload, blank, rows_of
from fedloom.tasks.task import Task
from fedloom.training.flat import integer_buffers
from fedloom.training.loop import LocalResult

_BESIDE = 1 << 20
"""Most bytes of one extra of one row."""
_FIELDS = {"n", "packed", "extra", "side", "support", "buffers", "integers", "tasks"}


def open_reply(content: Any, limit: float = math.inf, **expected: Any) -> tuple[Any, dict[str, float]]:
    """(tree, numbers) of an answer. Raises RefusedError with the node's own words if the node failed."""
    head = head_of(content)
    if "error" in head:
        raise RefusedError(str(head["error"])[:4000])
    expect(head, **expected)
    return decode(content, limit), numbers_of(content)


def limit_of(built: Built, client: str) -> int:
    """Most bytes of a client's payload: the largest result of the codec, and all that travels beside it."""
    method, shared = built.method, built.method.shared_part(built.layout)
    rows = len(rows_of(method, built.federation, [client]))
    vector = 4 * shared.d
    packed = rows * (vector + shared.d // 8 + len(shared.blocks) + 1024)
    beside = len(method.auxiliary) * vector + rows * (len(method.extras) * _BESIDE + len(shared.blocks))
    buffers = 8 * built.layout.buffers.d + sum(t.nbytes for t in integer_buffers(built.module).values())
    return packed + beside + buffers + (1 << 16)


def payload_of(built: Built, client: str, tree: Any) -> Payload:
    """A client's payload. Raises RefusedError, with the field, if it does not fit the method and the model."""
    held = built.federation.clients[client]
    _check(
        isinstance(tree, dict) and set(tree) - {"finite"} == _FIELDS,
        "payload",
        f"the fields {', '.join(sorted(_FIELDS))}",
    )
    _check(tree["n"] == len(held.train), "n", f"{len(held.train)} examples", tree["n"])
    row = (client, None)
    if tree.get("finite", True) is not True:
        return Payload(row, tree["n"], finite=False)
    by_task = built.method.rows == "client-task"
    sizes = tree["tasks"]
    good = isinstance(sizes, dict) and all(isinstance(n, float) and 0 < n <= len(held.train) for n in sizes.values())
    _check(good and set(sizes) <= set(held.tasks) and bool(sizes) == by_task, "tasks", "examples of the client's tasks")
    payload = Payload.of(client, tree)
    _check_vectors(built, payload)
    _check_beside(built, payload)
    return payload


def letters_of(built: Built, client: str, tree: Any) -> dict[str, Any]:
    """The result of a peer's turn: letters (receiver, bytes), all its own, records, events and byte counts."""
    try:
        for receiver, data in tree["letters"]:
            _check(receiver in built.federation.clients, "letters", "a client of this run", receiver)
            letter = Letter.decode(data.numpy().tobytes())
            _check(letter.sender == client, "letters", f"sender {client!r}", letter.sender)
            _check(letter.layout == built.layout.hash, "letters", f"layout {built.layout.hash}", letter.layout)
            _check(_finite(dict(letter.tensors)), "letters", "finite values")
        for kind, fields in (*tree["records"], *tree["events"]):
            _check(isinstance(kind, str) and isinstance(fields, dict), "records", "names with fields")
        return {**tree, "up": as_counts(tree["up"]), "down": as_counts(tree["down"])}
    except RefusedError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RefusedError(f"letters: {type(error).__name__}: {str(error)[:200]}") from None


def _check_vectors(built: Built, payload: Payload) -> None:
    method, layout = built.method, built.layout
    shared, rows = method.shared_part(layout), len(payload.rows)
    try:
        X = method.codec.unpack(
            payload.packed, blank(shared, built.federation, payload.rows, torch.zeros(rows, shared.d))
        )
        good = X.shape == (rows, shared.d) and bool(torch.isfinite(X).all())
    except (RuntimeError, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise RefusedError(f"packed: {type(error).__name__}: {str(error)[:200]}") from None
    _check(good, "packed", f"{rows} x {shared.d} finite values")
    _check(set(payload.auxiliary) == set(method.auxiliary), "auxiliary", ", ".join(method.auxiliary) or "nothing")
    for name, vector in payload.auxiliary.items():
        _check_tensor(vector, f"auxiliary.{name}", (shared.d,))
    sent = method.buffers != "local"
    floats = method.shared_buffers(layout).d if sent else 0
    if floats:
        _check_tensor(payload.buffers, "buffers", (floats,))
    else:
        _check(payload.buffers is None, "buffers", "none")
    integers = integer_buffers(built.module) if sent else {}
    _check(payload.integers.keys() == integers.keys(), "integers", ", ".join(integers) or "nothing")
    for name, value in integers.items():
        _check_tensor(payload.integers[name], f"integers.{name}", tuple(value.shape))


def _check_beside(built: Built, payload: Payload) -> None:
    method, rows = built.method, len(payload.rows)
    names = method.extras
    _check(set(payload.extra) == names, "extra", ", ".join(sorted(names)) or "nothing", sorted(payload.extra))
    for name, value in payload.extra.items():
        _check(_finite(value), f"extra.{name}", "finite values")
        if payload.tasks:
            _check(isinstance(value, list) and len(value) == rows, f"extra.{name}", f"{rows} values")
    blocks = len(method.shared_part(built.layout).blocks)
    if method.wants_support:
        _check_tensor(payload.support, "support", (rows, blocks) if payload.tasks else (blocks,))
    else:
        _check(payload.support is None, "support", "none")


def _finite(value: Any) -> bool:
    if isinstance(value, Tensor):
        return bool(torch.isfinite(value).all())
    if isinstance(value, Mapping):
        return all(map(_finite, value.values()))
    if isinstance(value, list):
        return all(map(_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


def _check_tensor(value: Any, field: str, shape: tuple[int, ...]) -> None:
    found = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
    _check(found == shape, field, f"shape {shape}", found)
    _check(_finite(value), field, "finite values")


def _check(good: bool, field: str, expected: str, found: Any = None) -> None:
    if not good:
        raise RefusedError(f"{field}: expected {expected}" + ("" if found is None else f", found {str(found)[:200]}"))


def result_of(numbers: Mapping[str, float], tasks: Mapping[str, Any]) -> LocalResult:
    """The numbers of a training: steps, examples, losses by task."""
    by_task = {
        task: LocalResult(_count(numbers, f"steps/{task}"), _count(numbers, f"examples/{task}"))
        for task in tasks
        if f"loss/{task}" in numbers
    }
    return LocalResult(
        _count(numbers, "steps"),
        _count(numbers, "examples"),
        {task: float(numbers[f"loss/{task}"]) for task in by_task},
        waiting=float(numbers.get("waiting", 0.0)),
        by_task=by_task,
    )


def _count(numbers: Mapping[str, float], name: str) -> int:
    value = numbers.get(name, 0)
    return int(value) if math.isfinite(value) and value >= 0 else 0


def scores_of(prefix: str, numbers: Mapping[str, float], tasks: Mapping[str, Task]) -> Scores:
    """Scores that arrived as PREFIX/TASK/METRIC: only these tasks, and only metrics that they have."""
    return {
        name: {
            metric: float(numbers[f"{prefix}/{name}/{metric}"])
            for metric in (*task.metrics, "loss")
            if f"{prefix}/{name}/{metric}" in numbers
        }
        for name, task in tasks.items()
    }
