"""Combinators, and the refusal of combinations that would silently do nothing."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from fedloom import Method
from fedloom.core.context import Ctx, State
from fedloom.core.layout import Block, Layout
from fedloom.core.stage import Traits, check_closed
from fedloom.core.updates import Updates
from fedloom.methods.personal.aggregation import attention
from fedloom.stages import (
    AcrossTasks,
    AtPeer,
    Attention,
    AttentionAcrossTasks,
    Chain,
    ChosenClusters,
    CosineMix,
    Every,
    GroupBy,
    Identity,
    Mean,
    PartlyShared,
    PCGrad,
    PerTask,
    Scope,
    SoftClusters,
    Split,
    SplittingClusters,
    Stage,
    SupportMean,
    Switch,
    TopMagnitude,
)


@dataclass(frozen=True)
class Reweigh(Stage):
    """Writes weight, as a distance-based rule does."""

    traits = Traits(writes={"X", "weight"})

    def __call__(self, updates: Updates, state: State, ctx: Ctx) -> tuple[Updates, State]:
        return updates.replace(weight=torch.arange(1.0, len(updates) + 1, dtype=torch.float64)), state


@dataclass(frozen=True)
class Count(Stage):
    """Adds the number of rounds it has seen."""

    def init(self, layout: Layout) -> State:
        return {"rounds": 0}

    def __call__(self, updates: Updates, state: State, ctx: Ctx) -> tuple[Updates, State]:
        return updates.replace(X=updates.X + state["rounds"]), {"rounds": state["rounds"] + 1}


@dataclass(frozen=True)
class MixAll(Stage):
    """A rule that compares rows and ignores weights."""

    traits = Traits("mix")

    def __call__(self, updates: Updates, state: State, ctx: Ctx) -> tuple[Updates, State]:
        return updates.replace(X=updates.X.mean(0, keepdim=True).expand_as(updates.X)), state


LAYOUT = Layout(
    (
        Block("encoder.w", (2,), role="encoder"),
        Block("heads.a.w", (1,), role="head", task="a"),
        Block("heads.b.w", (1,), role="head", task="b"),
    )
)
X = torch.tensor([[1.0, 2, 3, 0], [3.0, 4, 0, 5]])


def run(stage: Stage, state: State | None = None, round_: int = 1, **extra: object) -> tuple[Updates, State]:
    updates = Updates.of(X, None, LAYOUT, ["p", "q"], **extra)
    return stage(updates, stage.init(LAYOUT) if state is None else state, Ctx(round_))


def test_chain_is_flat_and_keeps_state_by_position() -> None:
    chain = (Count() >> Count()) >> (TopMagnitude(1.0) >> Mean())
    assert isinstance(chain, Chain)
    assert len(chain.stages) == 4
    assert chain.traits.reduces
    _, state = run(chain)
    out, state = run(chain, state)
    assert state == {"0": {"rounds": 2}, "1": {"rounds": 2}, "2": {}, "3": {}}
    assert out.X.tolist() == [[4, 5, 3.5, 4.5]]


def test_split_gives_each_part_its_stage_and_everyone_the_single_row() -> None:
    out, _ = run(Split({"encoder": Mean(), "head": Identity()}))
    assert out.rows == (("*", None), ("p", None), ("q", None))
    assert out.X.tolist() == [[2, 3, 0, 0], [2, 3, 3, 0], [2, 3, 0, 5]]
    out, _ = run(Split({"encoder": Mean(), "*": SupportMean()}))
    assert out.X.tolist() == [[2, 3, 3, 5]]


def test_split_must_take_every_block_once() -> None:
    with pytest.raises(ValueError, match="no selector takes block 'heads.a.w'"):
        Split({"encoder": Mean()}).init(LAYOUT)
    with pytest.raises(ValueError, match="no block matches; roles here: encoder, head"):
        Split({"decoder": Mean(), "*": Mean()}).init(LAYOUT)
    from fedloom.core.layout import Select

    with pytest.raises(ValueError, match="'heads.a.w' is taken by 'head' and by"):
        Split({"encoder": Mean(), "head": Mean(), Select(task="a"): Mean()}).init(LAYOUT)


def test_scope_leaves_the_rest_alone() -> None:
    out, _ = run(Scope("encoder", MixAll()))
    assert out.X.tolist() == [[2, 3, 3, 0], [2, 3, 0, 5]]
    with pytest.raises(ValueError, match=r"Scope\('encoder'\): Mean\(\) leaves one row"):
        Scope("encoder", Mean())


def test_per_task_works_over_those_who_hold_the_task() -> None:
    stage = Split({"encoder": Mean(), "head": PerTask(Mean())})
    diluted, _ = run(stage)
    assert diluted.X.tolist() == [[2, 3, 1.5, 2.5]]
    support = torch.tensor([[True, True, False], [True, False, True]])
    out, _ = run(stage, support=support)
    assert out.X.tolist() == [[2, 3, 3, 5]]
    out, _ = run(stage, present=support)
    assert out.X.tolist() == [[2, 3, 3, 5]]
    nobody = torch.tensor([[True, False, False], [True, False, True]])
    out, _ = run(stage, support=nobody)
    assert out.X.tolist() == [[2, 3, 0, 5]]
    with pytest.raises(ValueError, match=r"block 'encoder.w' belongs to no task"):
        PerTask(Mean()).init(LAYOUT)


def test_group_by_keeps_groups_and_their_state_apart() -> None:
    stage = GroupBy("domain", Count() >> Mean())
    out, state = run(stage, domain=["x", "y"])
    assert out.X.tolist() == X.tolist()
    assert set(state) == {"x", "y"}
    out, state = run(stage, state, domain=["x", "x"])
    assert out.X.tolist() == [[3, 4, 2.5, 3.5]] * 2
    assert state["x"]["0"] == {"rounds": 2}
    assert state["y"]["0"] == {"rounds": 1}
    with pytest.raises(ValueError, match="no extra 'domain'"):
        run(stage)
    with pytest.raises(ValueError, match="Extras: none"):
        GroupBy("domain", Mean()).on(torch.eye(2))
    with pytest.raises(ValueError, match="Extras: age, size"):
        GroupBy("domain", Mean()).on(torch.eye(2), age=[1, 2], size=[3, 4])


def test_switch_changes_at_the_round_and_only_touches_the_active_state() -> None:
    stage = Switch(3, Count(), Identity())
    state = stage.init(LAYOUT)
    for round_, expected in [(1, 0), (2, 1), (3, 0), (4, 0)]:
        out, state = run(stage, state, round_)
        assert torch.equal(out.X, X + expected)
    assert state["before"] == {"rounds": 2}


def test_a_field_that_nobody_reads_is_refused_and_both_are_named() -> None:
    with pytest.raises(ValueError, match=r"Reweigh\(\) writes 'weight', but MixAll\(\) after it does not read it"):
        Method(name="m", stage=Reweigh() >> MixAll())
    with pytest.raises(ValueError, match=r"Reweigh\(\) writes 'weight', but nothing comes after it"):
        Method(name="m", stage=Reweigh())
    assert Method(name="m", stage=Reweigh() >> MixAll() >> Mean()).stage.traits.reduces
    with pytest.raises(
        ValueError, match=r"Reweigh\(\) writes 'weight' at the client \(edge\), which the client does not send"
    ):
        Method(name="m", edge=Reweigh())


def test_a_field_that_is_overwritten_unread_is_refused() -> None:
    with pytest.raises(ValueError, match=r"writes 'weight', but Reweigh\(\) overwrites it without reading it"):
        check_closed([Reweigh(), Reweigh(), Mean()], "m")


def test_a_switch_must_read_in_both_phases() -> None:
    with pytest.raises(ValueError, match="writes 'weight'"):
        Method(name="m", stage=Reweigh() >> Switch(5, Mean(), MixAll()))
    assert Method(name="m", stage=Reweigh() >> Switch(5, Mean(), SupportMean()))


def test_inside_a_scope_everything_must_be_read_inside() -> None:
    with pytest.raises(ValueError, match=r"Scope\('encoder'\): Reweigh\(\) writes 'weight'"):
        Method(name="m", stage=Scope("encoder", Reweigh()) >> Mean())


def test_rules_that_compare_rows_are_refused_after_one_row_is_left_and_at_the_edge() -> None:
    with pytest.raises(ValueError, match=r"MixAll\(\) compares rows, but Mean\(\) before it leaves only one"):
        Method(name="m", stage=Mean() >> MixAll())
    with pytest.raises(ValueError, match=r"MixAll\(\) compares rows, so it cannot run at the client"):
        Method(name="m", edge=MixAll())
    assert Method(name="m", stage=Mean() >> TopMagnitude(0.5))


def test_an_extra_that_nobody_provides_is_refused() -> None:
    with pytest.raises(ValueError, match="reads extra:gap, which no local rule provides"):
        Method(name="m", stage=GroupBy("gap", Mean()))
    assert Method(name="m", stage=GroupBy("domain", Mean())).extras == {"domain"}


def test_a_transform_of_nothing_is_refused() -> None:
    from fedloom.methods import feddea, local

    with pytest.raises(ValueError, match="would have no effect, because everything is private"):
        feddea(local(), rho=0.5)


def test_printing_a_method_shows_its_recipe() -> None:
    text = str(Method(name="m", stage=Split({"encoder": Reweigh() >> Mean(), "*": Identity()})).plus(TopMagnitude(0.1)))
    for part in ("method m", "TopMagnitude(rho=0.1", "in 'encoder':", "    Reweigh()", "Plain(step=1.0)"):
        assert part in text
    assert "weights: size; buffers: mean" in text
    assert "weights: size, at most 9 examples;" in str(Method(name="m", max_examples=9))


def test_across_tasks_all_decoders_become_the_mean_of_their_models() -> None:
    layout = Layout(
        (
            Block("decoders.a.fuse.w", (2,), role="decoder", task="a"),
            Block("decoders.b.fuse.w", (2,), role="decoder", task="b"),
            Block("decoders.b.other.w", (3,), role="decoder", task="b"),
        )
    )
    X = torch.tensor([[1.0, 2, 0, 0, 0, 0, 0], [0, 0, 3, 4, 5, 6, 7], [5, 5, 7, 7, 1, 1, 1]])
    base = torch.tensor([[10.0, 10, 0, 0, 0, 0, 0], [0, 0, 20, 20, 1, 1, 1], [30, 30, 40, 40, 2, 2, 2]])
    present = [[True, False, False], [False, True, True], [True, True, True]]
    out, _ = AcrossTasks().on(X, layout=layout, base=base, present=present)
    mean = [(11 + 23 + 35 + 47) / 4, (12 + 24 + 35 + 47) / 4]
    after = base + out
    assert after[0, :2].tolist() == after[1, 2:4].tolist() == after[2, :2].tolist() == after[2, 2:4].tolist() == mean
    assert after[1, 4:].tolist() == after[2, 4:].tolist() == [4.5, 5.0, 5.5]
    assert not out[0, 2:].any()


ALIKE = Layout(
    (
        Block("encoder.w", (1,), role="encoder"),
        Block("decoders.a.fuse.w", (2,), role="decoder", task="a"),
        Block("decoders.b.fuse.w", (2,), role="decoder", task="b"),
        Block("decoders.c.fuse.w", (3,), role="decoder", task="c"),
    )
)
HELD = [[True, True, False, False], [True, False, True, True], [True, True, True, False]]
MODELS = {
    "c0": torch.tensor([0.0, 1, 2, 99, 99, 99, 99, 99]),
    "c1": torch.tensor([1.0, 99, 99, 3, 4, 5, 6, 7]),
    "c2": torch.tensor([5.0, 0, 0, 2, 2, 99, 99, 99]),
}


def test_attention_across_tasks_is_attention_among_encoders_and_among_decoders() -> None:
    stage = AttentionAcrossTasks(alpha=1, sigma=10)
    _, state = stage.on(torch.zeros(3, 8), layout=ALIKE, present=HELD)
    sent = stage.broadcast(state, ["c0", "c1", "c2", "new"], MODELS)
    assert sent["new"] == {}
    u = {client: sent[client]["anchor"] for client in MODELS}
    encoders = torch.tensor([[0.0], [1], [5]])
    fours = torch.tensor([[1.0, 2], [3, 4], [0, 0], [2, 2]])  # c0's a, c1's b, c2's a and b
    expected = attention(encoders, 1, 10).float() @ encoders
    torch.testing.assert_close(torch.stack([u[c][:1] for c in MODELS]), expected)
    mixed = attention(fours, 1, 10).float() @ fours
    found = torch.stack([u["c0"][1:3], u["c1"][3:5], u["c2"][1:3], u["c2"][3:5]])
    torch.testing.assert_close(found, mixed)
    assert (found - fours).abs().min() > 1e-3  # every decoder is drawn to the others
    assert torch.equal(u["c1"][5:], MODELS["c1"][5:])  # alone of its shape
    assert torch.equal(u["c0"][3:], MODELS["c0"][3:])  # blocks that the client lacks


def test_attention_across_tasks_counts_absent_clients_too() -> None:
    stage = AttentionAcrossTasks(alpha=1, sigma=10)
    _, state = stage.on(torch.zeros(3, 8), layout=ALIKE, present=HELD)
    _, later = stage.on(torch.zeros(1, 8), layout=ALIKE, present=HELD[1:2], rows=["c1"], state=state)
    before, after = (stage.broadcast(s, ["c1"], MODELS)["c1"]["anchor"] for s in (state, later))
    assert torch.equal(before, after)


def test_traits_are_sets_of_names_in_one_value() -> None:
    with pytest.raises(TypeError, match="Traits: reads: expected a set of names, found the text 'weight'"):
        Traits(reads="weight")  # type: ignore[arg-type]
    assert Chain(()).traits == Traits(reads=frozenset(), writes=frozenset(), separable=True, presence="block")


@pytest.mark.parametrize(("shared", "own"), [(Identity(), Identity()), (Mean(), Mean()), (Identity(), Mean())])
def test_one_update_for_all_needs_a_stage_that_leaves_one_row_and_one_that_keeps_all(shared: Stage, own: Stage) -> None:
    with pytest.raises(ValueError, match="expected a stage that leaves one row and one that keeps all"):
        PartlyShared("encoder", shared, own)


def test_alternatives_are_drawn_beside_each_other() -> None:
    parts = Split({"encoder": Mean(), "decoder": Mean(), "*": Mean()}), Switch(2, Mean(), Identity())
    parts = *parts, PartlyShared("encoder", Mean(), Identity())
    assert [[box.beside for box in stage.boxes] for stage in parts] == [
        [False, True, True],
        [False, True],
        [False, True],
    ]


def test_every_applies_its_stage_in_each_so_many_rounds() -> None:
    X = torch.ones(2, 3)
    for rounds, expected in ((1, [1, 2, 3, 4, 5, 6]), (2, [2, 4, 6]), (3, [3, 6])):
        stage = Every(rounds, TopMagnitude(1 / 3, rescale=False))
        assert [r for r in range(1, 7) if not torch.equal(stage.on(X, round=r)[0], X)] == expected


def test_a_switch_leaves_one_row_only_if_both_stages_do() -> None:
    for before, after in ((Mean(), Mean()), (Mean(), Identity()), (Identity(), Mean()), (Identity(), Identity())):
        assert Switch(3, before, after).traits.reduces == (before == after == Mean())


def test_every_reads_only_what_is_never_lost() -> None:
    with pytest.raises(ValueError, match="leaves one row"):
        Every(2, MixByStarts() >> Mean())
    assert Every(2, GroupBy("domain", MixByStarts())).traits.reads == {"X", "base", "extra:domain"}
    assert Every(2, CosineMix()).traits.reads - {"support"} == {"X", "base"}


@dataclass(frozen=True)
class MixByStarts(Stage):
    """Reads a field of each kind."""

    traits = Traits("matrix", reads={"X", "base", "weight", "support"}, presence="row")

    def __call__(self, updates: Updates, state: State, ctx: Ctx) -> tuple[Updates, State]:
        return updates, state


def test_a_switch_asks_for_the_extras_of_either_phase() -> None:
    domains = GroupBy("domain", Mean())
    for switch in (Switch(3, domains, SupportMean()), Switch(3, SupportMean(), domains)):
        assert "extra:domain" in switch.traits.reads
    assert "weight" not in Switch(3, Identity(), Mean()).traits.reads
    assert "weight" in Switch(3, SupportMean(), Mean()).traits.reads


def test_what_stages_around_others_read_and_want() -> None:
    mean = {"X", "coef", "weight"}
    assert GroupBy("domain", SupportMean()).traits.reads == {*mean, "extra:domain"}
    assert GroupBy("domain", SupportMean()).traits.wants == {"support"}
    assert GroupBy("client", Mean()).traits.reads == GroupBy("task", Mean()).traits.reads == mean
    assert PerTask(Mean()).traits.wants == PerTask(SupportMean()).traits.wants == {"support"}
    assert PerTask(Mean()).traits.reduces
    assert not PerTask(Identity()).traits.reduces
    chosen = ChosenClusters(3, stage=GroupBy("domain", Identity()) >> Mean()).traits
    assert chosen.reads == {*mean, "base", "extra:cluster", "extra:domain"}
    assert chosen.broadcasts == {f"broadcast:cluster{j}" for j in range(3)}
    assert SplittingClusters(stage=PCGrad() >> Mean()).traits.reads == mean
    assert SoftClusters().traits.reads == {"X", "base", "weight", "extra:share0", "extra:share1"}
    peer = AtPeer(GroupBy("domain", Mean()), also=frozenset({"broadcast:pull"})).traits
    assert (peer.reads, peer.writes) == ({*mean, "extra:domain"}, {"X", "broadcast:pull"})
    assert peer.broadcasts == {"broadcast:pull"}
    assert AtPeer(Attention()).traits.broadcasts == {"broadcast:anchor"}
    assert AtPeer(Attention()).traits.writes == {"broadcast:anchor"}
