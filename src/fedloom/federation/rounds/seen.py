"""Visibility of clients' updates in a run: the needs of its stages, and the rows that personal mixes give away."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedloom.core.context import Row, generator, row_key
from fedloom.core.errors import first_of
from fedloom.core.stage import Stage, in_turn
from fedloom.core.updates import Updates
from fedloom.federation.rounds.built import Built
from fedloom.federation.rounds.messages import rows_of
from fedloom.federation.rounds.progress import Progress
from fedloom.federation.rounds.round import Round

LARGEST = 50_000_000
"""Mixes of at most so many numbers are tried."""
LABELS = "median correlation 0.99, benchmarks/label_counts.py"


def needed(stage: Stage) -> str:
    """Return what a stage needs of the clients' updates to do its work, by its traits."""
    if stage.traits.hides or stage.traits.sums:
        return "only their sum"
    return "their inner products or extras" if stage.traits.kind == "mix" else "each of them"


def visibility(built: Built) -> list[str]:
    """Return who sees what, in sentences, for the dry run."""
    method, peers = built.method, built.recipe.peers
    if method.turn.pool or method.shares_nothing:
        who, values = "the server" if peers is None else "each peer", " and ".join(sorted(method.extras))
        return [f"who sees what: {who} sees no updates, but {values} of the clients"] if values else []
    local = built.terms is not None and built.terms.trust == "local"
    sees = "individual updates, with noise" if local else "individual updates"
    counts = [f"who sees what: {text}" for text in label_counts(built)]
    if peers is not None:
        return [f"who sees what: each peer sees {sees} of the peers it hears", *counts]
    stages = in_turn(method.stage)
    until = next((i for i, stage in enumerate(stages) if stage.traits.reduces), len(stages))
    needs = ", ".join(f"{type(stage).__name__} needs {needed(stage)}" for stage in stages[: until + 1])
    mixes = [] if method.stage.traits.reduces else [f"who sees what: {_given_away(built)}"]
    return [f"who sees what: the server sees {sees}; of these {needs}", *mixes, *counts]


def label_counts(built: Built) -> list[str]:
    """Return a sentence that names the tasks whose label counts updates show; nothing where noise hides them."""
    if built.terms is not None and built.terms.trust == "local":
        return []
    shared = built.shared
    biased = {block.task for block in shared.blocks if block.role == "head" and block.name.endswith("bias")}
    tasks = [task.name for task in built.federation.tasks if task.kind == "classification" and task.name in biased]
    if not tasks:
        return []
    despite = "; clipping and noise at the server do not hide it" if built.terms is not None else ""
    return [
        f"the update of a head's bias reveals how many examples of each class a client has, in "
        f"{', '.join(tasks)} ({LABELS}{despite}); it does not where heads stay with the clients (fedper)"
    ]


def _given_away(built: Built) -> str:
    """Return which rows follow from the personal mixes of a round, in a sentence."""
    try:
        rows = _tried(built)
    except _UnknownError as why:
        return f"each client receives its own mix; whether these reveal updates is not known before the run ({why})"
    if not rows:
        return "the personal mixes together reveal no single update (tried with random ones)"
    some = first_of(row_key(row).replace("\x1f", "/") for row in rows)
    return f"the personal mixes together reveal the updates of {some}: hiding them from the server would not help"


class _UnknownError(Exception):
    pass


def _tried(built: Built) -> list[Row]:
    """Return the rows that follow from what the aggregation makes of random ones."""
    method, federation = built.method, built.federation
    shared = built.shared
    rows = tuple(sorted(rows_of(built, federation.trainers), key=row_key))
    if len(rows) * shared.d > LARGEST:
        raise _UnknownError("the model is too large")
    present = federation.presence(shared, rows)
    X = torch.randn(len(rows), shared.d, generator=generator(0, "who sees what"), dtype=torch.float64)
    if present is not None:
        for i, s in enumerate(shared.slices):
            X[:, s] *= present[:, i : i + 1]
    ones = torch.ones(len(rows), dtype=torch.float64)
    updates = Updates(shared, rows, X, ones, ones, present=present, extra=_extras(built, rows))
    if "base" in method.stage.traits.reads:
        updates = updates.replace(base=torch.zeros_like(X))
    ctx = Round(built, 1, Progress()).ctx(tuple(federation.trainers))
    try:
        out, _ = method.stage(updates, method.stage.init(shared), ctx)
    except (RuntimeError, ValueError, KeyError, IndexError, AttributeError) as error:
        raise _UnknownError("it reads more than rows") from error
    exposed: set[int] = set()
    for s in shared.slices:
        if s.stop - s.start >= len(rows):
            W = mixing_of(X[:, s], out.X[:, s])
            if W is None:
                raise _UnknownError("it does more than mix")
            exposed |= set(leaked(W))
    return [rows[i] for i in sorted(exposed)]


def _extras(built: Built, rows: tuple[Row, ...]) -> dict[str, list[Any]]:
    """Return the extras that are known before a run."""
    each = [{"steps": 1.0, **built.federation.client(client).extras} for client, _ in rows]
    for name in built.method.extras - {"steps", "domain", "tasks"}:
        raise _UnknownError(f"it reads {name}")
    return {name: [known[name] for known in each] for name in built.method.extras}


_SMALL = 1e-4
"""Singular values below this share of the largest one, and differences below this share, are rounding."""


def leaked(W: Tensor) -> list[int]:
    """Return the rows of X (K x d) that follow from the mixes W X; W is M x K.

    Row i does where its unit vector lies in the row space of W, so that some combination of the mixes is row i alone:
    (W^+ W)_ii = 1. With as many independent mixes as rows that is every row.
    """
    W = W.double()
    return [i for i, own in enumerate((torch.linalg.pinv(W, rtol=_SMALL) @ W).diagonal().tolist()) if own > 1 - _SMALL]


def mixing_of(X: Tensor, Y: Tensor) -> Tensor | None:
    """Return W (M x K) with Y = W X, from rows that are independent; None where Y is no such mix."""
    X, Y = X.double(), Y.double()
    W = Y @ torch.linalg.pinv(X)
    return W if (W @ X - Y).norm() <= _SMALL * Y.norm() else None
