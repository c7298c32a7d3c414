"""A recipe made concrete: everything that a run works with."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fedloom.core.context import Log, Row, State, generator, row_key
from fedloom.core.errors import RecipeError, nearest
from fedloom.core.grouping import grouped
from fedloom.core.settings.trust import sources
from fedloom.data.dataset import Dataset, contents
from fedloom.data.partition import Partition, Pool
from fedloom.federation.recipes.schema import Recipe, recipe_hash
from fedloom.federation.rounds.federation import BuiltClient, BuiltFederation, Common
from fedloom.federation.rounds.messages import Payload, rows_of, unpacked
from fedloom.federation.rounds.privacy import PrivacyTerms
from fedloom.federation.rounds.worker import Setup
from fedloom.methods.peers.graph import Graph, candidates
from fedloom.models.multitask import MultiTask
from fedloom.training.attack import HONEST, Attack
from fedloom.training.rules import within


@dataclass(frozen=True, eq=False)
class Built(Common):
    """A recipe made concrete."""

    recipe: Recipe
    dataset: Dataset
    pool: Pool
    partition: Partition
    module: MultiTask
    terms: PrivacyTerms | None = None
    """The privacy cost of a round, where the recipe has a section for it."""
    modules: Mapping[str, MultiTask] = field(default_factory=dict)
    """Client -> its own model, of those that do not have `module`."""
    stacked: bool = False
    """True if clients train stacked, as the recipe says or by itself."""

    @cached_property
    def attacks(self) -> Mapping[str, Attack]:
        """Client -> its attack, of the hostile ones: those that the recipe names, or as many, drawn from its seed.

        Raises RecipeError for an unknown client, without an honest client, and for an attack that would do nothing.
        """
        section, clients = self.recipe.attack, sorted(self.federation.clients)
        if section is None:
            return {}
        if isinstance(section.clients, int):
            if not self.whole:
                raise RecipeError(
                    f"attack.clients: {section.clients} found, but a node with its own data does not know the other "
                    "clients, so it cannot draw some of them; list the clients' names"
                )
            order = torch.randperm(len(clients), generator=generator(self.recipe.seed, "attack")).tolist()
            names = sorted(clients[i] for i in order[: section.clients])
        else:
            names = sorted(name for name in set(section.clients) if self.whole or name in self.federation.clients)
        for name in names:
            if name not in self.federation.clients:
                raise RecipeError(
                    f"attack.clients: no client {name!r}.{nearest(name, clients)} Clients: {', '.join(clients)}"
                )
        if self.whole and len(names) == len(clients):
            raise RecipeError(
                f"attack.clients: {len(names)} of {len(clients)} clients are hostile, expected at least one honest "
                "client"
            )
        attack: Attack = section.make()
        for name in names:
            if why := attack.unfit({task: each for task, (each, _) in self.federation.clients[name].tasks.items()}):
                raise RecipeError(f"attack: {section.name} at client {name!r}: {why}")
        return dict.fromkeys(names, attack)

    @property
    def attacked_groups(self) -> Iterator[tuple[str, int, int, float | None]]:
        """Yield (group, clients, hostile ones, their factor) where these act together among honest ones."""
        rows = rows_of(self, self.federation.trainers)
        for group, clients in grouped((group_of(self.federation, row), row[0]) for row in rows).items():
            hostile = [self.attacks[name] for name in clients if name in self.attacks]
            if hostile and hostile[0].knows_all and len(hostile) < len(clients):
                yield group, len(clients), len(hostile), hostile[0].factor_among(len(clients), len(hostile))

    @property
    def whole(self) -> bool:
        """Return whether all clients are known here: a node with data of its own knows only itself."""
        return bool(self.partition.shares)

    @property
    def honest(self) -> tuple[BuiltClient, ...]:
        """The clients that numbers are of."""
        return tuple(c for name, c in self.federation.clients.items() if name not in self.attacks)

    @cached_property
    def about(self) -> dict[str, Any]:
        """The contents of run.json: the method, its tasks and clients, and what may not change at a resume."""
        return {
            "method": self.method.name,
            "recipe_text": str(self.method),
            "outline": asdict(self.method.outline),
            "recipe": self.recipe.model_dump(mode="json"),
            "recipe_hash": recipe_hash(self.recipe),
            **({"origins": origins} if (origins := self.origins) else {}),
            **({"hostile": sorted(self.attacks)} if self.attacks else {}),
            **({"table": table.model_dump(mode="json")} if (table := self.dataset.table) is not None else {}),
            "partition_hash": self.partition.hash,
            "layout_hash": self.layout.hash,
            "data_hash": self.data_hash,
            **({"redrawn": self.dataset.ratio} if self.dataset.redrawn else {}),
            **({"validated": self.dataset.ratio_of(share)} if (share := self.validated) else {}),
            "inputs_hash": hashlib.sha256(contents(self.dataset.train) + contents(self.dataset.test)).hexdigest()[:16],
            "frozen_hash": self.frozen_hash,
            **({"graph_hash": self.graph_hash} if self.recipe.peers is not None and self.whole else {}),
            "parameters": self.layout.parameters.d,
            **self.measured,
        }

    @property
    def measured(self) -> dict[str, Any]:
        """The part of run.json that says whose numbers there will be: the tasks and the clients."""
        return {
            "tasks": {
                t.name: {"kind": t.kind, "primary": t.primary, "metrics": dict(t.metrics), "weight": t.weight}
                for t in self.federation.tasks
            },
            "clients": {
                c.id: {
                    "tasks": {n: w for n, (_, w) in c.tasks.items()},
                    "domain": c.domain,
                    **({"train": len(c.train), "val": len(c.val)} if c.counted else {}),
                    **({"test": len(c.test)} if c.counted and self.dataset.table is not None else {}),
                }
                for c in self.federation.clients.values()
            },
        }

    @property
    def validated(self) -> float:
        """The share of the clients' training examples that validates; 0 where it is unknown."""
        sizes = [(len(c.train), len(c.val)) for c in self.federation.clients.values() if c.counted]
        train, val = (sum(each) for each in zip(*sizes, strict=True)) if sizes else (0, 0)
        return 0.0 if self.deployed or not val else val / (train + val)

    @property
    def origins(self) -> dict[str, dict[str, str | None]]:
        """The recipe's origins, and those of what the named and the given things are made of."""
        modules = [part for module in (self.module, *self.modules.values()) for part in module.modules()]
        origins = self.recipe.origins
        parts = sources([self.method, self.federation.tasks, self.attacks, *modules])
        return origins | {name: origin for name, origin in parts.items() if origin not in origins.values()}

    @cached_property
    def models(self) -> tuple[str, ...]:
        """Return the models that clients may use: "global", the server's for all, and "personal", their own."""
        method = self.method
        if method.turn.pool:
            return ("global",)
        by_task = method.task_vectors
        own_parts = bool(method.private_part(self.layout).blocks)
        own_buffers = method.buffers == "local" and bool(self.layout.buffers.blocks)
        common = by_task or (method.stage.traits.reduces and not own_buffers)
        names = ("global",) if common and not own_parts and self.recipe.peers is None else ()
        if by_task or not names or method.own_model or method.tune:
            names = (*names, "personal")
        return names

    @cached_property
    def dealt(self) -> dict[str, Any]:
        """The contents of partition.json: who holds which examples, and how many of each class."""
        labels = {row["client"]: row["labels"] for row in self.partition.table(self.pool)}
        return {**self.partition.to_json(), "labels": labels}

    @property
    def start(self) -> dict[str, Tensor]:
        """The initial tensors of all models: the common one's under their own names, others under client/NAME/."""
        own = {f"client/{c}/{k}": v for c, module in self.modules.items() for k, v in module.state_dict().items()}
        return {**self.module.state_dict(), **own}

    def begin_again(self, start: Mapping[str, Tensor]) -> None:
        """Give all models these initial tensors (see `start`). Raises RuntimeError where they do not fit."""
        self.module.load_state_dict({k: v for k, v in start.items() if not k.startswith("client/")})
        for client, module in self.modules.items():
            module.load_state_dict(
                {key: start.get(f"client/{client}/{key}", v) for key, v in module.state_dict().items()}
            )

    @property
    def setup(self) -> Setup:
        """The part that workers need."""
        r = self.recipe
        training = r.training.model_copy(update={"stacked": self.stacked})
        parts = self.method, self.layout, self.federation, self.module
        how = training, r.evaluation, r.seed, r.runtime
        return Setup(*parts, *how, self.deployed, self.attacks, self.modules)

    @property
    def deployed(self) -> bool:
        """Return whether noise must not come from the recipe's seed, which those know from whom it hides something."""
        return self.terms is not None and self.recipe.runtime.engine == "flower"

    @property
    def frozen(self) -> dict[str, Tensor]:
        """Parameters that no client trains or sends: all that need no gradient, such as the weights beside LoRA's."""
        return {name: p.detach() for name, p in self.module.named_parameters() if not p.requires_grad}

    @property
    def frozen_hash(self) -> str:
        """16 hexadecimal digits over the frozen parameters: whether a resumed run begins from the same weights."""
        digest = hashlib.sha256()
        for name, p in self.frozen.items():
            digest.update(name.encode() + p.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()[:16]

    @cached_property
    def graph(self) -> Graph:
        """The links of the first round among peers. Raises RecipeError where the graph does not fit them."""
        assert self.recipe.peers is not None
        section, names = self.recipe.peers.graph, tuple(self.federation.clients)
        return candidates(section.name, names, seed=self.recipe.seed, every=section.every, **section.params)

    @property
    def graph_hash(self) -> str:
        """16 hexadecimal digits over the peers' graph, whose links may be in a file."""
        digest = hashlib.sha256()
        for peer in self.graph.peers:
            digest.update("\n".join([peer, *self.graph.senders(peer), "", ""]).encode())
        return digest.hexdigest()[:16]

    @property
    def data_hash(self) -> str:
        """16 hexadecimal digits over the labels and the inputs' shape: whether a resumed run sees the same data."""
        digest = hashlib.sha256(repr((self.dataset.name, self.dataset.input_shape)).encode())
        for part in (self.dataset.train, self.dataset.test):
            digest.update(part.fingerprint())
        return digest.hexdigest()[:16]


def group_of(federation: BuiltFederation, row: Row) -> str:
    """Return the name of the group that a row is in: the row's task, or the tasks of its client."""
    client, task = row
    return task or federation.client(client).extras["tasks"]


def conspired(
    common: Common, attacks: Mapping[str, Attack], payloads: Iterable[Payload], memory: State, log: Log
) -> Iterator[Payload]:
    """Return the payloads, those of hostile clients that know all others last, and with what these send together.

    `memory`, what the hostile clients of each group remember, is changed, and a change is logged.
    """
    if not any(attack.knows_all for attack in attacks.values()):
        yield from payloads
        return
    federation = common.federation
    honest: dict[str, dict[Row, Tensor]] = {}
    waiting: list[Payload] = []
    for payload in payloads:
        if attacks.get(payload.row[0], HONEST).knows_all and payload.finite:
            waiting.append(payload)
            continue
        if payload.finite:
            theirs, _ = unpacked(common, payload.rows, payload.packed)
            for row, x in zip(payload.rows, theirs, strict=True):
                honest.setdefault(group_of(federation, row), {})[row] = x.clone()
        yield payload
    hostile = sorted((row for payload in waiting for row in payload.rows), key=row_key)
    count = Counter(group_of(federation, row) for row in hostile)
    sent: dict[str, Tensor | None] = {}
    for client, task in hostile:
        group = group_of(federation, (client, task))
        if group in sent or group not in honest:
            continue
        # in the order of their names, for a mean of rows depends on their order in its last bits
        names, before = sorted(honest[group], key=row_key), memory.get(group, {})
        rows = torch.stack([honest[group][name] for name in names])
        sent[group], after = attacks[client].together(rows, [name for name, _ in names], count[group], before)
        if after != before:
            memory[group] = after
            log("attack", {"tasks": group, **after})
    for payload in waiting:
        own, like = unpacked(common, payload.rows, payload.packed)
        X = []
        for row, x in zip(payload.rows, own, strict=True):
            agreed = sent.get(group_of(federation, row))
            X.append(x if agreed is None else agreed)
        yield replace(payload, packed=common.method.codec.pack(within(like.replace(X=torch.stack(X)))))
