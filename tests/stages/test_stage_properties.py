"""Every stage goes through the same checks. A new stage joins by a line in STAGES."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from fedloom import stages
from fedloom.core.context import Ctx
from fedloom.core.layout import Block, Layout
from fedloom.core.updates import Updates
from fedloom.runs import checkpoint
from fedloom.stages import (
    AcrossTasks,
    ActivatedDimensions,
    Attention,
    AttentionAcrossTasks,
    CAGrad,
    ChosenClusters,
    ClusteredPrototypes,
    ControlVariates,
    CosineMix,
    DomainWeights,
    DualShift,
    Every,
    GapWeights,
    Gossip,
    GroupBy,
    Heal,
    HistoryAttention,
    HyperConflictAverse,
    HyperCrossAttention,
    Identity,
    Mean,
    MeanPrototypes,
    MinNorm,
    MovingAnchors,
    NormaliseSteps,
    PartlyShared,
    PCGrad,
    PerBlock,
    PerTask,
    Scope,
    SimilarGroups,
    SimilarityMix,
    SoftClusters,
    Split,
    SplittingClusters,
    Stage,
    SupportMean,
    Switch,
    TaskCovariance,
    TopMagnitude,
    TrainedPrototypes,
)

STAGES: dict[str, Stage] = {
    "identity": Identity(),
    "mean": Mean(),
    "support-mean": SupportMean(),
    "top": TopMagnitude(0.3),
    "top-per-block": TopMagnitude(0.3, per_block=True),
    "smallest": TopMagnitude(0.3, keep="smallest", rescale=False),
    "random": TopMagnitude(0.3, keep="random"),
    "chain": TopMagnitude(0.5) >> Mean(),
    "split": Split({"encoder": Mean(), "*": SupportMean()}),
    "split-mixed": Split({"encoder": Identity(), "*": Mean()}),
    "scope": Scope("encoder", TopMagnitude(0.5)),
    "per-task": Split({"encoder": Mean(), "head": PerTask(Mean())}),
    "per-task-rows": Scope("head", PerTask(TopMagnitude(0.5))),
    "group-by": GroupBy("domain", TopMagnitude(0.5) >> Mean()),
    "switch": Switch(2, Mean(), TopMagnitude(0.5) >> Mean()),
    "heal": Heal() >> Mean(),
    "heal-none": Heal(zeros="none") >> Mean(),
    "heal-split": Split({"encoder": Heal() >> Mean(), "*": SupportMean()}),
    "pcgrad": PCGrad(),
    "pcgrad-sum": PCGrad("sum") >> Mean(),
    "cagrad": CAGrad(),
    "cagrad-after": TopMagnitude(0.5) >> PCGrad() >> CAGrad(0.6, "1+c^2"),
    "min-norm": MinNorm(),
    "mgda": MinNorm(unit=False),
    "conflict-split": Split({"encoder": CAGrad(), "head": PerTask(MinNorm())}),
    "activated-dimensions": ActivatedDimensions(0.3),
    "hyper-conflict-averse": HyperConflictAverse(),
    "hyper-cross-attention": HyperCrossAttention(),
    "fedhca2": Split({"encoder": HyperConflictAverse(0.2, rescale="none"), "*": HyperCrossAttention(0.3)}),
    "control-variates": ControlVariates() >> Mean(),
    "dual-shift": DualShift(TopMagnitude(0.5) >> Mean()),
    "normalise-steps": NormaliseSteps() >> Mean(),
    "normalise-steps-counted": NormaliseSteps("steps") >> PCGrad() >> Mean(),
    "gap-weights": GapWeights() >> Mean(),
    "gap-weights-centred": GapWeights(relative=False, centre=True, floor=0.1) >> Mean(),
    "domain-weights": DomainWeights(classes=2) >> Mean(),
    "domain-weights-class": DomainWeights(beta=2.0, domains=3, discrepancy="class") >> Mean(),
    "attention": Attention(0.5, 10.0),
    "across-tasks": Split({"encoder": Mean(), "*": AcrossTasks()}),
    "attention-across-tasks": AttentionAcrossTasks(0.5, 10.0),
    "task-covariance": TaskCovariance(),
    "similar-groups": SimilarGroups(),
    "similar-groups-soft": SimilarGroups(soft=True, threshold=0.5, source="update"),
    "splitting-clusters": SplittingClusters(start=0, eps1=10, eps2=0, stage=PCGrad() >> Mean()),
    "chosen-clusters": ChosenClusters(stage=TopMagnitude(0.5) >> Mean()),
    "chosen-clusters-noise": ChosenClusters(3, "noise"),
    "soft-clusters": SoftClusters(),
    "partly-shared": PartlyShared("encoder", Mean(), Every(2, PerTask(SimilarGroups(1)))),
    "history-attention": HistoryAttention(),
    "mean-prototypes": MeanPrototypes() >> Mean(),
    "mean-prototypes-clients": MeanPrototypes("clients"),
    "clustered-prototypes": ClusteredPrototypes() >> PCGrad() >> Mean(),
    "trained-prototypes": TrainedPrototypes(epochs=3) >> Mean(),
    "moving-anchors": MovingAnchors(0.9) >> Mean(),
    "gossip": Gossip(),
    "gossip-random": Gossip("small-world", {"k": 2, "p": 0.5}, every=1),
    "cosine-mix": CosineMix(0.3),
    "per-block": PerBlock(MinNorm()),
    "erasers": PartlyShared("encoder", PerBlock(TopMagnitude(0.5) >> Mean()), PerBlock(CosineMix())),
    "similarity-mix": SimilarityMix(2),
    "similarity-mix-release": Split({"encoder": SimilarityMix(1, 0.0, include_self=False), "*": Mean()}),
}
# A softmax over inner products of updates depends on their size.
NOT_HOMOGENEOUS = {"hyper-cross-attention", "fedhca2"}
LAYOUT = Layout(
    (
        Block("encoder.w", (4, 3), role="encoder"),
        Block("heads.a.w", (5,), role="head", task="a"),
        Block("heads.b.w", (3,), role="head", task="b"),
    )
)
ROWS = ["c0", "c1", "c2", "c3"]
BESIDE = {
    "domain": ["x", "y", "x", "y"],
    "tasks": ["a", "b", "a", "a,b"],
    "a": [2.0, 3.0, 4.5, 1.0],
    "steps": [2.0, 3.0, 4.0, 1.0],
    "loss_received": [1.0, 2.0, 0.5, 0.7],
    "loss_trained": [0.5, 0.4, 0.6, 0.1],
    "cluster": [0.0, 1.0, 0.0, 1.0],
    "classes": [torch.tensor([3.0, 0.0]), torch.tensor([0.0, 4.0]), torch.tensor([2.0, 1.0]), torch.tensor([1.0, 5.0])],
    "prototypes": [torch.full((2, 3), float(i)) for i in range(4)],
    "prototype_labels": [torch.tensor([[0, 0, i], [0, 1, 2]]) for i in range(4)],
    "share0": [1.0, 0.5, 0.25, 0.0],
    "share1": [0.0, 0.5, 0.75, 1.0],
}
"""What stages may ask for, of each row."""

every_stage = pytest.mark.parametrize("stage", STAGES.values(), ids=STAGES.keys())


def matrix(scale: float = 1.0) -> Tensor:
    return scale * torch.randn(4, LAYOUT.d, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def beside(order: list[int]) -> dict[str, object]:
    control = torch.randn(len(ROWS) + 1, LAYOUT.d, generator=torch.Generator().manual_seed(2))
    extra = {name: [(*values, values[0])[i] for i in order] for name, values in BESIDE.items()}
    return {**extra, "auxiliary": {"control": control[order]}}


def apply(stage: Stage, X: Tensor, order: list[int] | None = None, round_: int = 1) -> Updates:
    order = order or list(range(len(X)))
    updates = Updates.of(X[order], [1.0 + i for i in order], LAYOUT, [ROWS[i] for i in order], **beside(order))
    out, _ = stage(updates, stage.init(LAYOUT), Ctx(round=round_, seed=3))
    return out


@every_stage
def test_the_order_of_clients_does_not_matter(stage: Stage) -> None:
    a, b = apply(stage, matrix()), apply(stage, matrix(), [2, 0, 3, 1])
    assert a.rows == b.rows
    assert torch.equal(a.X, b.X)


@every_stage
def test_inputs_are_not_changed(stage: Stage) -> None:
    X = matrix()
    updates = Updates.of(X.clone(), None, LAYOUT, ROWS, **beside([0, 1, 2, 3]))
    state = stage.init(LAYOUT)
    before = copy.deepcopy(state)
    stage(updates, state, Ctx(1))
    assert torch.equal(updates.X, X)
    assert checkpoint.same(state, before)


@every_stage
def test_state_survives_a_checkpoint(stage: Stage, tmp_path: object) -> None:
    updates = Updates.of(matrix(), None, LAYOUT, ROWS, **beside([0, 1, 2, 3]))
    state = stage.init(LAYOUT)
    for round_ in (1, 2):
        _, state = stage(updates, state, Ctx(round_))
    checkpoint.save(tmp_path, "s", state, round=2)  # type: ignore[arg-type]
    again, labels, problems = checkpoint.load(tmp_path, "s", lambda head: head["round"])  # type: ignore[arg-type]
    assert checkpoint.same(state, again)
    assert labels == {"round": 2}
    assert problems == []


@every_stage
@pytest.mark.parametrize("round_", [1, 5])
def test_zero_rows_give_zero(stage: Stage, round_: int) -> None:
    out = apply(stage, torch.zeros(4, LAYOUT.d), round_=round_)
    assert not out.X.any()
    assert torch.isfinite(out.X).all()


@pytest.mark.parametrize("name", [name for name in STAGES if name not in NOT_HOMOGENEOUS])
@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1e15])
def test_updates_scale_through(name: str, scale: float) -> None:
    stage = STAGES[name]
    expected = scale * apply(stage, matrix()).X
    torch.testing.assert_close(apply(stage, matrix(scale)).X, expected, rtol=1e-9, atol=0)


@every_stage
def test_no_participant_is_no_update(stage: Stage) -> None:
    updates = Updates.of(torch.zeros(0, LAYOUT.d), None, LAYOUT, [], **beside([]))
    out, _ = stage(updates, stage.init(LAYOUT), Ctx(1))
    assert not out.X.any()


@every_stage
def test_repr_rebuilds_the_stage(stage: Stage) -> None:
    names = {name: getattr(stages, name) for name in stages.__all__ if name in repr(stage)}
    assert eval(repr(stage), names) == stage


@pytest.mark.parametrize(
    "stage", [Mean(), SupportMean(), Identity(), PCGrad(), CAGrad(rescale="1+c"), MinNorm(), MinNorm(False)], ids=repr
)
def test_one_row_comes_back_bit_for_bit(stage: Stage) -> None:
    X = matrix().float()[:1]
    assert torch.equal(stage.on(X, n=[7])[0], X)


@pytest.mark.parametrize("stage", [Mean(), SupportMean(), CAGrad(rescale="1+c"), MinNorm()], ids=repr)
def test_equal_rows_come_back(stage: Stage) -> None:
    X = matrix()[:1].repeat(3, 1)
    torch.testing.assert_close(stage.on(X, n=[1, 2, 4])[0], X[:1])


@every_stage
def test_a_row_that_is_not_finite_is_left_out(stage: Stage) -> None:
    X = matrix()
    bad = torch.cat([X, torch.full((1, LAYOUT.d), float("nan"))])
    extras = {"layout": LAYOUT, "seed": 3}
    clean, _ = stage.on(X, rows=ROWS, **beside([0, 1, 2, 3]), **extras)
    mended, _ = stage.on(bad, rows=[*ROWS, "c9"], **beside([0, 1, 2, 3, 4]), **extras)
    assert torch.equal(clean, mended)
