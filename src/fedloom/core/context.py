"""The context of a call of a stage or a rule: the round, the seed, and the rows that need an output."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from fedloom.core.draws import Draws

Row = tuple[str, str | None]
"""Key of one row of the matrix of updates: (client id, task name or None)."""
State = dict[str, Any]
"""Nested dictionaries and lists of tensors, numbers, strings and None: anything a checkpoint can hold."""
Fields = frozenset[str]
"""Names of fields of Updates (X, n, weight, coef, base, support, extra:NAME, auxiliary:NAME), or broadcast:NAME."""
Broadcast = dict[str, "torch.Tensor"]
"""The broadcast of a stage to the local rules of one client: name -> tensor."""


def row_key(row: Row) -> str:
    """Return a row's key as one text, for states."""
    client, task = row
    return client if task is None else f"{client}\x1f{task}"


def derive_seed(seed: int, *purpose: object) -> int:
    """Derive a 63-bit seed from (seed, purpose), the same on every machine and in every process."""
    text = "\x1f".join(map(str, (seed, *purpose)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def generator(seed: int, *purpose: object) -> torch.Generator:
    """Return a torch generator of its own for (seed, purpose), so that no draw depends on any other draw."""
    import torch

    return torch.Generator().manual_seed(derive_seed(seed, *purpose))


@contextmanager
def seeded(seed: int, *purpose: object, devices: Sequence[torch.device] = ()) -> Iterator[torch.Generator]:
    """Seed torch's default generator, which is returned, from (seed, purpose) inside, and set it back afterwards.

    So draws without a generator of their own, such as dropout's, repeat. `devices` are GPUs to treat alike.
    """
    import torch

    with torch.random.fork_rng(devices=devices):
        # torch.manual_seed walks the stack for each absent accelerator, which outlasts a small model's step
        yield (torch.manual_seed if devices else torch.default_generator.manual_seed)(derive_seed(seed, *purpose))


def new_secret() -> bytes:
    """Return a secret that nobody can guess, for `Ctx.secret`: 32 bytes from the operating system."""
    return secrets.token_bytes(32)


def draws(key: int | bytes, *purpose: object) -> Draws:
    """Return the draws of a purpose, which depend on no other: from torch for a number, from a cipher for bytes."""
    from fedloom.core.draws import SecretDraws, SeededDraws

    return SecretDraws(key, *purpose) if isinstance(key, bytes) else SeededDraws(generator(key, *purpose))


Log = Callable[[str, dict[str, Any]], None]
"""Takes (event, what belongs to it)."""


@dataclass(frozen=True)
class Ctx:
    """The context of one round.

    `round` counts from 1; round 0 is the initial model. `targets` are the rows that need an output: all participants on
    a server, `[me]` on a peer; None means all rows. `population` is the number of rows of all clients, present or
    absent; None means that all are present. `held` is the number of them that train each task; without it all count for
    every task. `rounds` is the number of rounds in the whole run, if it is known. `log` takes (event, fields) for a
    person to read. `record` takes (kind, fields) for the run's records only; in place of the fields it takes a function
    that makes them if needed. `peer` is the peer that aggregates; None is a server. `secret` are the 32 bytes from
    which a deployment draws noise, because everyone knows the seed.
    """

    round: int = 0
    seed: int = 0
    targets: tuple[Row, ...] | None = None
    population: int | None = None
    rounds: int | None = None
    log: Log = field(default=lambda event, fields: None, repr=False)
    record: Callable[[str, Any], None] = field(default=lambda kind, fields: None, repr=False)
    peer: str | None = None
    secret: bytes | None = field(default=None, repr=False)
    held: Mapping[str, int] | None = None

    def trainers(self, task: str | None, present: int) -> int:
        """Return how many clients train the blocks of a task (None: of no task), at least 1; `present` if unknown."""
        known = self.population if task is None or self.held is None else self.held.get(task, 0)
        return max(present if known is None else known, 1)

    def among(self, task: str | None) -> Ctx:
        """Return the context for a stage that sees only the blocks of a task, and only rows that hold it."""
        held = self.held if task is None or self.held is None else {task: self.held.get(task, 0)}
        known = self.population is not None and task is not None and self.held is not None
        return replace(self, held=held, population=self.trainers(task, 0) if known else self.population)

    def rng(self, *purpose: object) -> torch.Generator:
        """Return a generator derived from (seed, round, purpose): independent of arrival order, workers and resume."""
        return generator(self.seed, self.round, *purpose)

    def hidden(self, *purpose: object) -> Draws:
        """Return a generator that nobody else can repeat, for noise: from the secret, or without one from the seed."""
        return draws(self.seed if self.secret is None else self.secret, self.round, *purpose)
