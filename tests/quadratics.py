"""A federation of quadratics, F_k(y) = sum_i h_i (y_i - b_ki)^2 / 2, run through the real client and server steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from fedloom import Ctx, Method
from fedloom.core.context import Log
from fedloom.data.dataset import TensorExamples
from fedloom.federation.rounds.federation import BuiltClient, BuiltFederation, Common, Part
from fedloom.federation.rounds.messages import rows_of
from fedloom.federation.rounds.server import dispatch, server_init, server_step
from fedloom.models.tasks.task import Metric, Task
from fedloom.training import FlatModel, Training
from tests_support import client_step


class Nothing(Metric):
    def update(self, output: Tensor, target: Tensor) -> None:
        """Nothing to measure."""

    def compute(self) -> dict[str, float]:
        return {}


@dataclass(frozen=True)
class Valley(Task):
    kind = "valley"
    metrics: ClassVar[Mapping[str, Any]] = {}  # type: ignore[misc]
    primary = ""  # type: ignore[assignment]

    def head(self, features: int) -> nn.Module:
        raise NotImplementedError

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        h, b = target.unbind(-1)
        return (h * (output - b).square() / 2).sum(-1).mean()

    def metric(self) -> Metric:
        return Nothing()


class Point(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.y = nn.Parameter(torch.zeros(d, dtype=torch.float64))

    def forward(self, x: Tensor, tasks: Sequence[str] | None = None) -> dict[str, Tensor]:
        return {"valley": self.y.expand(len(x), -1)}

    def roles(self) -> dict[str, str]:
        return {"y": "encoder"}


class Points(nn.Module):
    """An encoder of d numbers, and d numbers for each task; a task's output is both."""

    def __init__(self, d: int, tasks: Sequence[str]) -> None:
        super().__init__()
        self.y = nn.Parameter(torch.ones(d, dtype=torch.float64))
        self.heads = nn.ParameterDict({t: nn.Parameter(torch.ones(d, dtype=torch.float64)) for t in tasks})

    def forward(self, x: Tensor, tasks: Sequence[str] | None = None) -> dict[str, Tensor]:
        wanted = self.heads if tasks is None else tasks
        return {t: torch.cat([self.y, self.heads[t]]).expand(len(x), -1) for t in wanted}

    def roles(self) -> dict[str, Any]:
        return {"y": "encoder", **{f"heads.{t}": ("head", t) for t in self.heads}}


class Quadratics:
    """`h` and `b` are K x d; `n` are the sizes that weigh the clients, `steps` the local steps of each.

    With `owns` the rows of h and b are examples, of which each client has some.
    """

    def __init__(
        self,
        method: Method,
        h: Any,
        b: Any,
        n: Sequence[float] | None = None,
        owns: Sequence[Sequence[int]] | None = None,
        **training: Any,
    ) -> None:
        h, b = torch.tensor(h, dtype=torch.float64), torch.tensor(b, dtype=torch.float64)
        h, b = (v if v.ndim == 2 else v.unsqueeze(1) for v in (h, b))
        self.h, self.b, self.method = h.expand_as(b), b, method
        owns = owns or [[k] for k in range(len(b))]
        self.names = [f"c{k:02d}" for k in range(len(owns))]
        self.n = dict(zip(self.names, n or [1.0] * len(owns), strict=True))
        examples = TensorExamples(torch.zeros(len(b), 1), {"valley": torch.stack([self.h, b], dim=-1)})
        task = Valley("valley", 1)
        clients = {}
        for name, mine in zip(self.names, owns, strict=True):
            part = Part(examples, np.array(mine), "own")
            clients[name] = BuiltClient(name, {"valley": (task, 1.0)}, part, part, part)
        self.federation = BuiltFederation((task,), clients)
        self.model = FlatModel(Point(b.shape[1]))
        steps = training.pop("steps")
        self.training = {
            name: Training(**{"steps": s, "batch_size": 1, **training})
            for name, s in zip(self.names, steps if isinstance(steps, Sequence) else [steps] * len(owns), strict=True)
        }
        self.server = server_init(method, self.model.layout, torch.zeros(b.shape[1], dtype=torch.float64), {})
        self.clients: dict[str, Any] = {}
        self.round = 0

    @property
    def common(self) -> Common:
        return Common(self.method, self.model.layout, self.federation)

    @property
    def optimum(self) -> Tensor:
        """Of the uniform mean of the F_k."""
        return (self.h * self.b).sum(0) / self.h.sum(0)

    @property
    def point(self) -> Tensor:
        """The global model."""
        return self.server["model"]

    def go(
        self,
        rounds: int = 1,
        members: Sequence[Sequence[str]] | None = None,
        reverse: bool = False,
        log: Log = lambda event, fields: None,
    ) -> Tensor:
        """Run some rounds; `members` are those of each round. Returns the global model."""
        for i in range(rounds):
            self.round += 1
            here = sorted(self.names if members is None else members[i])
            if not here:
                continue
            rows, every = (rows_of(self.common, names) for names in (here, self.names))
            ctx = Ctx(self.round, 0, rows, len(every), log=log, held=self.federation.held)
            messages = dispatch(self.common, self.server, here)
            payloads = []
            for name in reversed(here) if reverse else here:
                client, state = self.federation.clients[name], self.clients.get(name, {})
                payload, _, self.clients[name] = client_step(
                    self.method, self.model, self.federation, client, messages[name], state, ctx, self.training[name]
                )
                payloads.append(type(payload)(**{**vars(payload), "n": self.n[name]}))
            self.server = server_step(self.common, payloads, self.server, ctx)
        return self.point

    def fixed_point(self) -> float:
        """Of one round's map, for one dimension and methods without memory: the map is affine."""
        ends = []
        for start in (0.0, 1.0):
            self.server["model"] = torch.tensor([start], dtype=torch.float64)
            ends.append(float(self.go()))
        return ends[0] / (1 - (ends[1] - ends[0]))


class TaskQuadratics(Quadratics):
    """Clients with heads of their own tasks only (or `unified`). `held` is client -> tasks; only `clients` are there.

    The targets, curvatures and sizes of a client do not depend on who else is there. `encoder` multiplies the curvature
    of the common part: with 0 only heads move. `optima` are the points of a task's head that are best for the uniform
    mean of its holders.
    """

    def __init__(
        self,
        method: Method,
        held: Mapping[str, str],
        clients: Sequence[str],
        encoder: float = 1.0,
        unified: bool = False,
        steps: int | None = None,
        d: int = 5,
    ) -> None:
        self.method, self.names = method, sorted(clients)
        tasks = sorted(set("".join(held.values())))
        rng = torch.Generator().manual_seed(3)
        target = torch.randn(len(held), len(tasks), 2 * d, generator=rng, dtype=torch.float64)
        h = 0.5 + torch.rand(len(held), len(tasks), 2 * d, generator=rng, dtype=torch.float64)
        h[..., :d] *= encoder
        labels = {t: torch.stack([h[:, i], target[:, i]], dim=-1) for i, t in enumerate(tasks)}
        examples = TensorExamples(torch.zeros(len(held), 1), labels)
        known = {t: Valley(t, 1) for t in tasks}
        everybody = sorted(held)
        self.n = {name: float(1 + 2 * i) for i, name in enumerate(everybody)}
        members = {}
        for name in self.names:
            part = Part(examples, np.array([everybody.index(name)]), "own")
            members[name] = BuiltClient(name, {t: (known[t], 1.0) for t in held[name]}, part, part, part)
        self.federation = BuiltFederation(tuple(known.values()), members, unified)
        self.model = FlatModel(Points(d, tasks))
        number = {name: steps or 1 + i for i, name in enumerate(everybody)}
        self.training = {
            name: Training(steps=number[name], batch_size=1, optimizer={"lr": 0.1, "momentum": 0.5})
            for name in self.names
        }
        rows = {t: [i for i, name in enumerate(everybody) if name in self.names and t in held[name]] for t in tasks}
        self.optima = {
            t: (h[r, i, d:] * target[r, i, d:]).sum(0) / h[r, i, d:].sum(0) for i, (t, r) in enumerate(rows.items())
        }
        self.server = server_init(method, self.model.layout, self.model.initial.clone(), {})
        self.clients: dict[str, Any] = {}
        self.round = 0

    def sees(self, client: str, task: str) -> Tensor:
        """Return what the client would be sent of a task's head (d); what it keeps to itself where heads are
        private.
        """
        shared = self.method.shared_part(self.model.layout)
        name = f"heads.{task}"
        if name not in shared.names:
            return torch.zeros(0)
        vector = dispatch(self.common, self.server, [client])[client].vector
        vector = self.server["personal"].get(client, self.point) if vector is None else vector
        return vector[shared.slice(name)]
