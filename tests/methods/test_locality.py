"""A block that only some clients hold ends where it would end in a federation of these clients alone.

Every stage says which law it obeys (`Traits.presence`): "block" the strong one, "row" the weak one, where these clients
share no block with others, and "coupled" neither, by design. Runs have several rounds, unequal sizes and steps, and
absences, with rounds in which none of these clients takes part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fedloom import Ctx, Method, methods, server
from fedloom.codecs import Raw
from fedloom.core.layout import Block, Layout
from fedloom.core.stage import Traits
from fedloom.core.updates import Updates
from fedloom.errors import RecipeError
from fedloom.federation.rounds.build import build
from fedloom.federation.rounds.federation import BuiltClient, BuiltFederation, Common, Part
from fedloom.federation.rounds.messages import Payload
from fedloom.federation.rounds.server import dispatch, server_init, server_step
from fedloom.methods import ADDONS, METHODS
from fedloom.stages import CosineMix, Mean, PCGrad, PerBlock, Stage, TopMagnitude
from fedloom.training.rules import LocalRule
from quadratics import TaskQuadratics, Valley
from stages_support import BESIDE, STAGES
from tests_support import POOLED, installed, load_recipe, needed

OVERLAPPING = {"c0": "a", "c1": "ab", "c2": "b", "c3": "a", "c4": "b"}
APART = {"c0": "a", "c1": "b", "c2": "b", "c3": "a", "c4": "a"}
COHORTS = (
    ("c0", "c1", "c2", "c3", "c4"),
    ("c0", "c2"),
    ("c1", "c3", "c4"),
    ("c2",),
    ("c3",),
    ("c0", "c1", "c2", "c4"),
    ("c0", "c3"),
)


def holders(held: Mapping[str, str], task: str) -> list[str]:
    return [client for client, tasks in held.items() if task in tasks]


def agree(method: Method, law: str) -> None:
    """Run with all clients, and with the holders of each task alone."""
    held, encoder = (OVERLAPPING, 1.0) if law == "block" else (APART, 0.0)
    whole = TaskQuadratics(method, held, sorted(held), encoder)
    whole.go(len(COHORTS), COHORTS)
    for task in "ab":
        mine = holders(held, task)
        alone = TaskQuadratics(method, held, mine, encoder)
        alone.go(len(COHORTS), [[c for c in cohort if c in mine] for cohort in COHORTS])
        for client in mine:
            seen = whole.sees(client, task)
            assert method.private is not None or bool((seen != 1).any())
            torch.testing.assert_close(seen, alone.sees(client, task), rtol=1e-9, atol=1e-12)


def law_of(method: Method) -> str | None:
    return (method.edge >> method.stage).traits.presence


CASES: dict[str, Any] = {
    name: lambda name=name: METHODS[name].function() for name in METHODS.entries if name not in POOLED
} | {
    name: lambda name=name: ADDONS[name].function(methods.fedavg(), **needed(name))
    for name in ADDONS.entries
    if name not in ("staleness", "activated-dimensions")
}
# These work on features of a model with an encoder; their stages are tested below.
WITH_FEATURES = {
    *("condistfl", "f2dc", "fdse", "fedmd", "fedproto", "fedrcl", "fedsa", "fedtgp", "fpl", "moon", "matu"),
    "feature-modules",
}


@pytest.mark.parametrize("name", sorted(CASES))
def test_every_method_and_add_on_obeys_the_law_that_it_declares(name: str) -> None:
    method = CASES[name]()
    law = law_of(method)
    entry = METHODS[name] if name in METHODS.entries else ADDONS[name]
    assert (law in ("coupled", None)) == ("Couples tasks by design: " in (entry.function.__doc__ or "")), f"it is {law}"
    if law in ("block", "row") and name not in WITH_FEATURES and installed(method.stage) and not method.task_vectors:
        agree(method, str(law))


RULES = [
    server.Plain(0.5),
    *(server.Adaptive(kind, step=0.1) for kind in ("adam", "yogi", "adagrad")),
    server.Adaptive(step=0.1, b1=0.0),
    server.Lookahead(0.8),
    server.Momentum(0.9),
]


@pytest.mark.parametrize(
    ("rule", "name"),
    [
        *((rule, "fedavg") for rule in RULES),
        *((RULES[-1], name) for name in ("scaffold", "feddyn", "fednova", "pfedme", "ditto")),
    ],
    ids=repr,
)
def test_every_server_rule_leaves_blocks_alone_that_nobody_sent(rule: server.ServerRule, name: str) -> None:
    agree(replace(METHODS[name].function(), server=rule), "block")


# stages alone, with what methods on features send


@dataclass(frozen=True)
class Everything(LocalRule):
    """Provides whatever a stage may read."""

    provides = frozenset(f"extra:{name}" for name in BESIDE) | {"auxiliary:control"}


BLOCKS = (Block("heads.a.w", (5,), role="head", task="a"), Block("heads.b.w", (5,), role="head", task="b"))
WITH_ENCODER = Layout((Block("encoder.w", (4, 3), role="encoder"), *BLOCKS))
WITHOUT = Layout((replace(WITH_ENCODER.blocks[0], task="a"), Block("encoder.v", (2,), task="b"), *BLOCKS))
"""No block that all clients have: two groups that share nothing."""


class Sent:
    """Rounds of a server in which clients send random updates.

    In blocks of tasks they are the same whoever else is there, in the common block they are not.
    """

    def __init__(self, stage: Stage, held: Mapping[str, str], clients: Sequence[str], layout: Layout, seed: int):
        self.method = Method(name="sent", stage=stage, local=(Everything(),))
        self.layout, self.clients, self.seed = layout, sorted(clients), seed
        tasks = {t: Valley(t, 1) for t in "ab"}
        nothing = Part(None, [], "own")  # type: ignore[arg-type]
        members = {
            name: BuiltClient(name, {t: (tasks[t], 1.0) for t in held[name]}, nothing, nothing, nothing)
            for name in self.clients
        }
        self.federation = BuiltFederation(tuple(tasks.values()), members, unified=False)
        self.server = server_init(self.method, layout, torch.ones(layout.d, dtype=torch.float64), {})

    @property
    def common(self) -> Common:
        return Common(self.method, self.layout, self.federation)

    def row(self, client: str, round_: int, purpose: str) -> Tensor:
        present = self.federation.presence(self.layout, [(client, None)])
        assert present is not None
        rng = Ctx(round_, self.seed).rng(client, purpose)
        x = torch.randn(1, self.layout.d, generator=rng, dtype=torch.float64)
        for block, s, there in zip(self.layout.blocks, self.layout.slices, present[0].tolist(), strict=True):
            x[:, s] *= there
            if block.task is None:
                x[:, s] *= 1 + torch.arange(s.stop - s.start) % len(self.clients)
        return x

    def payload(self, client: str, round_: int) -> Payload:
        i = int(client[1:])
        one = torch.ones(1, dtype=torch.float64)
        present = self.federation.presence(self.layout, [(client, None)])
        updates = Updates(self.layout, ((client, None),), self.row(client, round_, "x"), one, one, present=present)
        extra = {name: values[(i + round_) % 4] for name, values in BESIDE.items() if name in self.method.extras}
        if "tasks" in extra:
            extra["tasks"] = ",".join(self.federation.clients[client].tasks)
        support = present[0] if present is not None and self.method.wants_support else None
        beside = {name: self.row(client, round_, name)[0] for name in self.method.auxiliary}
        return Payload((client, None), 1.0 + 2 * i, Raw().pack(updates), extra, beside, support)

    def go(self, clients: Sequence[str], task: str) -> list[Tensor]:
        """Return what these clients get of a task's blocks after each round."""
        found = []
        for round_, cohort in enumerate(COHORTS, 1):
            if here := [name for name in cohort if name in self.clients]:
                rows = tuple((name, None) for name in here)
                ctx = Ctx(round_, self.seed, rows, len(self.clients), held=self.federation.held)
                payloads = [self.payload(name, round_) for name in here]
                self.server = server_step(self.common, payloads, self.server, ctx)
            found += [self.sees(client, task) for client in clients]
        return found

    def sees(self, client: str, task: str) -> Tensor:
        """The blocks of a task as the client gets them, and what is broadcast to it of them."""
        message = dispatch(self.common, self.server, [client])[client]
        assert message.vector is not None
        wide = self.method.stage.broadcast(self.server["stage"], [client], self.server["personal"])[client]
        vectors = [message.vector, *(v for _, v in sorted(wide.items()) if v.shape == message.vector.shape)]
        return self.layout.take(torch.stack(vectors), self.layout.select(task=task))


def distance(stage: Stage, held: Mapping[str, str], layout: Layout, seed: int) -> float:
    """The largest difference between all clients together and the holders of one task alone."""
    largest = 0.0
    for task in "ab":
        mine = holders(held, task)
        whole, alone = (Sent(stage, held, clients, layout, seed).go(mine, task) for clients in (sorted(held), mine))
        for one, other in zip(whole, alone, strict=True):
            if one.shape != other.shape:
                return float("inf")
            largest = max(largest, float((one - other).abs().max()))
    return largest


NOT_SHARP = {
    "attention-across-tasks": "no two tasks have decoders of the same shapes here",
    "conflict-split": "it is coupled or not in the encoder only",
    "heal-split": "it is coupled or not in the encoder only",
    "scope": "it is coupled or not in the encoder only",
    "sheaf-links": "rows pass as they are; what couples clients is broadcast beside them",
    "similarity-mix-release": "it is coupled or not in the encoder only",
    "similarity-mix": "the two most similar clients are never of another task here",
    "similar-groups-soft": "updates of different tasks are orthogonal here, and no cosine is centred",
    "gossip-random": "the graph does not exist for two clients",
}
"""Stages that couple blocks, but not in this test."""


@pytest.mark.parametrize("name", sorted(STAGES))
def test_every_stage_obeys_the_law_that_it_declares_and_no_stronger_one(name: str) -> None:
    stage = STAGES[name]
    law = stage.traits.presence
    if name == "gossip-random":
        pytest.skip(NOT_SHARP[name])
    # two seeds: rules that choose rows may choose alike by chance
    together = max(distance(stage, OVERLAPPING, WITH_ENCODER, seed) for seed in range(2))
    apart = max(distance(stage, APART, WITHOUT, seed) for seed in range(2))
    assert law != "block" or together < 1e-9
    assert law in ("coupled", None) or apart < 1e-9
    if name not in NOT_SHARP:
        assert law == "block" or together > 1e-6, "it declares less than it keeps"
        assert law in ("row", "block") or apart > 1e-6, "it declares less than it keeps"


# numbers


def off(run: TaskQuadratics) -> float:
    """Return how far the heads are from the optimum of their holders."""
    return max(
        float((run.sees(client, task) - run.optima[task]).abs().max())
        for client in run.names
        for task in run.federation.clients[client].tasks
    )


FOUR = {"c0": "a", "c1": "a", "c2": "b", "c3": "b"}
HALVES = (("c0", "c1"), ("c0", "c2"), ("c0", "c3"), ("c1", "c2"), ("c1", "c3"), ("c2", "c3"))


def test_feddyn_finds_the_optimum_of_heads_when_half_of_the_clients_take_part() -> None:
    run = TaskQuadratics(methods.feddyn(alpha=1.0), FOUR, sorted(FOUR), steps=20)
    run.go(240, [HALVES[i * 5 % 6] for i in range(240)])
    assert off(run) < 1e-6


@pytest.mark.parametrize("unified", [False, True])
def test_scaffold_trains_the_head_of_one_holder_as_fast_as_fedavg(unified: bool) -> None:
    """If c were the mean over all four clients, a lone holder would see a quarter of its gradient."""
    held = {"c0": "a", "c1": "b", "c2": "c", "c3": "d"}
    ends = [TaskQuadratics(method, held, sorted(held), unified=unified) for method in (methods.scaffold(), UNIFORM)]
    for run in ends:
        run.go(12)
    for client, task in held.items():
        torch.testing.assert_close(ends[0].sees(client, task), ends[1].sees(client, task), rtol=1e-9, atol=1e-12)


UNIFORM = replace(methods.fedavg(), weights="uniform")


def test_fednova_leaves_the_update_of_a_lone_holder_as_it_is() -> None:
    """tau_eff is over the rows that have a block, so alone it is the client's own a."""
    layout = Layout((Block("common", (1,)), *(replace(b, shape=(1,)) for b in BLOCKS)))
    present = [[True, True, False], [True, False, True]]
    u, _ = (
        METHODS["fednova"]
        .function()
        .stage.on([[1.0, 1.0, 0.0], [1.0, 0.0, 1.0]], n=[1, 1], layout=layout, present=present, a=[2.0, 20.0])
    )
    # in the common block tau_eff = 11 and u = 11 (1/2 + 1/20) / 2
    torch.testing.assert_close(u, torch.tensor([[3.025, 1.0, 1.0]]))


def test_pcgrad_sum_counts_the_rows_that_have_a_block() -> None:
    layout = Layout((Block("common", (1,)), *(replace(b, shape=(1,)) for b in BLOCKS)))
    present = [[True, True, False], [True, False, True], [True, True, False]]
    X = [[1.0, 2.0, 0.0], [3.0, 0.0, 4.0], [2.0, 6.0, 0.0]]
    u, _ = (PCGrad("sum") >> Mean()).on(X, layout=layout, present=present)
    torch.testing.assert_close(u, torch.tensor([[6.0, 8.0, 4.0]]))


def test_cosines_of_models_leave_out_what_a_row_lacks() -> None:
    """The base has large values in the block that both rows lack: with them the models would look alike."""
    layout = Layout(BLOCKS)
    base = torch.ones(2, layout.d, dtype=torch.float64)
    base[:, 5:] = 100.0
    present = torch.tensor([[True, False], [True, False]])
    X = torch.zeros(2, layout.d, dtype=torch.float64)
    X[0, 0], X[1, 1] = 1.0, 2.0
    alone, _ = CosineMix(0.3).on(X[:, :5], layout=layout.select(task="a"), base=base[:, :5])
    whole, _ = CosineMix(0.3).on(X, layout=layout, base=base, present=present)
    torch.testing.assert_close(whole[:, :5], alone)


@dataclass(frozen=True)
class TrimmedMean(Stage):
    """An outsider's: the mean without the smallest and the largest value of each coordinate."""

    traits = Traits("matrix", reduces=True)

    def __call__(self, updates: Updates, state: Any, ctx: Ctx) -> Any:
        return updates.reduced(updates.X.sort(dim=0).values[1:-1].mean(0)), state


ROWS = torch.tensor([[4.0, 6.0], [4.0, 0.0], [4.0, 6.0], [4.0, 6.0], [4.0, 0.0]])


def test_a_stage_that_knows_nothing_of_presence_is_refused_where_rows_may_lack_blocks() -> None:
    """Five rows of 4, three of them also of 6: rows that lack the block would count as zeros."""
    layout = Layout((Block("common", (1,)), replace(BLOCKS[0], shape=(1,))))
    present = ROWS > 0
    assert TrimmedMean().on(ROWS, layout=layout, present=present)[0].tolist() == [[4.0, 4.0]]  # 4 instead of 6
    assert PerBlock(TrimmedMean()).on(ROWS, layout=layout, present=present)[0].tolist() == [[4.0, 6.0]]

    def built(change: str, stage: Stage) -> None:
        build(load_recipe(change).holding(method=Method(name="trimmed", stage=stage)))

    trimmed = TopMagnitude(0.5) >> TrimmedMean()
    built("seed=0", trimmed)
    for change in (
        "model.heads=own",
        "peers={scope: encoder, weights: {kind: uniform}}",
        "peers={warmup: {until: 2}, weights: {kind: uniform}}",
    ):
        with pytest.raises(
            RecipeError, match=r"trimmed: TrimmedMean\(\) does not declare how it treats rows that lack"
        ):
            built(change, trimmed)
    built("model.heads=own", PerBlock(TrimmedMean()))
    built("peers={weights: {kind: uniform}}", trimmed)


@pytest.mark.parametrize("name", ["fedamp", "fedmtl"])
def test_models_with_blocks_that_nobody_trained_are_not_compared(name: str) -> None:
    with pytest.raises(RecipeError, match=rf"{name}: .* does not declare how .*share: encoder"):
        build(load_recipe("model.heads=own", f"method={name}"))
    build(load_recipe("model.heads=own", f"method={{name: {name}, share: encoder}}"))


def test_presence_is_one_of_three_words() -> None:
    with pytest.raises(ValueError, match="presence: expected block, row, coupled or None, found 'rows'"):
        Traits(presence="rows")  # type: ignore[arg-type]
