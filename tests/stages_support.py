"""One of every stage, and what a row may have beside its update, for tests that all stages go through."""

from __future__ import annotations

import torch

from fedloom import stages
from tests_support import installed

STAGES: dict[str, stages.Stage] = {
    "identity": stages.Identity(),
    "mean": stages.Mean(),
    "support-mean": stages.SupportMean(),
    "top": stages.TopMagnitude(0.3),
    "top-per-block": stages.TopMagnitude(0.3, per_block=True),
    "smallest": stages.TopMagnitude(0.3, keep="smallest", rescale=False),
    "random": stages.TopMagnitude(0.3, keep="random"),
    "chain": stages.TopMagnitude(0.5) >> stages.Mean(),
    "split": stages.Split({"encoder": stages.Mean(), "*": stages.SupportMean()}),
    "split-mixed": stages.Split({"encoder": stages.Identity(), "*": stages.Mean()}),
    "scope": stages.Scope("encoder", stages.TopMagnitude(0.5)),
    "per-task": stages.Split({"encoder": stages.Mean(), "head": stages.PerTask(stages.Mean())}),
    "per-task-rows": stages.Scope("head", stages.PerTask(stages.TopMagnitude(0.5))),
    "group-by": stages.GroupBy("domain", stages.TopMagnitude(0.5) >> stages.Mean()),
    "switch": stages.Switch(2, stages.Mean(), stages.TopMagnitude(0.5) >> stages.Mean()),
    "heal": stages.Heal() >> stages.Mean(),
    "heal-none": stages.Heal(zeros="none") >> stages.Mean(),
    "heal-split": stages.Split({"encoder": stages.Heal() >> stages.Mean(), "*": stages.SupportMean()}),
    "pcgrad": stages.PCGrad(),
    "pcgrad-sum": stages.PCGrad("sum") >> stages.Mean(),
    "cagrad": stages.CAGrad(),
    "cagrad-after": stages.TopMagnitude(0.5) >> stages.PCGrad() >> stages.CAGrad(0.6, "1+c^2"),
    "min-norm": stages.MinNorm(),
    "mgda": stages.MinNorm(unit=False),
    "conflict-split": stages.Split({"encoder": stages.CAGrad(), "head": stages.PerTask(stages.MinNorm())}),
    "config": stages.ConFIG(),
    "gradvac": stages.GradVac() >> stages.Mean(),
    "upgrad": stages.UPGrad(),
    "dualproj": stages.DualProj(),
    "aligned-mtl": stages.AlignedMTL(),
    "imtl-g": stages.IMTLG(),
    "fairgrad": stages.FairGrad(),
    "exact-factors": stages.ExactFactors(),
    "factor-products": stages.FactorProducts() >> stages.Mean(),
    "elected-mean": stages.TopMagnitude(0.5, rescale=False) >> stages.ElectedMean(),
    "consensus-mask": stages.ConsensusMask(),
    "isotropic-merge": stages.IsotropicMerge(),
    "singular-merge": stages.SingularMerge(),
    "least-interference": stages.LeastInterference(),
    "low-rank-and-sparse": stages.LowRankAndSparse(),
    "activated-dimensions": stages.ActivatedDimensions(0.3),
    "hyper-conflict-averse": stages.HyperConflictAverse(),
    "hyper-cross-attention": stages.HyperCrossAttention(),
    "fedhca2": stages.Split(
        {"encoder": stages.HyperConflictAverse(0.2, rescale="none"), "*": stages.HyperCrossAttention(0.3)}
    ),
    "control-variates": stages.ControlVariates() >> stages.Mean(),
    "dual-shift": stages.DualShift(stages.TopMagnitude(0.5) >> stages.Mean()),
    "normalise-steps": stages.NormaliseSteps() >> stages.Mean(),
    "normalise-steps-counted": stages.NormaliseSteps("steps") >> stages.PCGrad() >> stages.Mean(),
    "gap-weights": stages.GapWeights() >> stages.Mean(),
    "gap-weights-centred": stages.GapWeights(relative=False, centre=True, floor=0.1) >> stages.Mean(),
    "loss-weights": stages.LossWeights() >> stages.Mean(),
    "domain-weights": stages.DomainWeights(classes=2) >> stages.Mean(),
    "domain-weights-class": stages.DomainWeights(beta=2.0, domains=3, discrepancy="class") >> stages.Mean(),
    "attention": stages.Attention(0.5, 100.0),
    "attention-across-tasks": stages.AttentionAcrossTasks(0.5, 100.0),
    "across-tasks": stages.Split({"encoder": stages.Mean(), "*": stages.AcrossTasks()}),
    "task-covariance": stages.TaskCovariance(),
    "single-task-models": stages.SingleTaskModels(),
    "similar-groups": stages.SimilarGroups(),
    "similar-groups-soft": stages.SimilarGroups(soft=True, threshold=0.5, source="update"),
    "splitting-clusters": stages.SplittingClusters(start=0, eps1=10, eps2=0, stage=stages.PCGrad() >> stages.Mean()),
    "chosen-clusters": stages.ChosenClusters(stage=stages.TopMagnitude(0.5) >> stages.Mean()),
    "chosen-clusters-noise": stages.ChosenClusters(3, "noise"),
    "merged-models": stages.MergedModels(2),
    "soft-clusters": stages.SoftClusters(),
    "partly-shared": stages.PartlyShared(
        "encoder", stages.Mean(), stages.Every(2, stages.PerTask(stages.SimilarGroups(1)))
    ),
    "history-attention": stages.HistoryAttention(),
    "mean-prototypes": stages.MeanPrototypes() >> stages.Mean(),
    "mean-prototypes-clients": stages.MeanPrototypes("clients"),
    "clustered-prototypes": stages.ClusteredPrototypes() >> stages.PCGrad() >> stages.Mean(),
    "trained-prototypes": stages.TrainedPrototypes(epochs=3) >> stages.Mean(),
    "moving-anchors": stages.MovingAnchors(0.9) >> stages.Mean(),
    "gossip": stages.Gossip(),
    "gossip-random": stages.Gossip("small-world", {"k": 2, "p": 0.5}, every=1),
    "sheaf-links": stages.SheafLinks("full"),
    "cosine-mix": stages.CosineMix(0.3),
    "per-block": stages.PerBlock(stages.MinNorm()),
    "erasers": stages.PartlyShared(
        "encoder", stages.PerBlock(stages.TopMagnitude(0.5) >> stages.Mean()), stages.PerBlock(stages.CosineMix())
    ),
    "similarity-mix": stages.SimilarityMix(2),
    "krum": stages.Krum(1, "all") >> stages.Mean(),
    "multi-krum": stages.MultiKrum(1, "all") >> stages.Mean(),
    "mda": stages.MinimumDiameter(1, "all") >> stages.Mean(),
    "nnm": stages.NearestMix(1, "all") >> stages.TrimmedMean(1, "all") >> stages.Mean(),
    "rfa": stages.GeometricMedian(within="all") >> stages.Mean(),
    "centred-clip": stages.CentredClip(within="all") >> stages.Mean(),
    "clip": stages.ClipNorms(within="all"),
    "trimmed-mean": stages.TrimmedMean(1, "all") >> stages.Mean(),
    "median": stages.Median(within="all"),
    "median-within-tasks": stages.Median(0) >> stages.Mean(),
    "similarity-mix-release": stages.Split(
        {"encoder": stages.SimilarityMix(1, 0.0, include_self=False), "*": stages.Mean()}
    ),
}
"""A new stage joins by a line here."""
STAGES = {name: stage for name, stage in STAGES.items() if installed(stage)}

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
    "edges": [torch.tensor([[i]]) for i in range(4)],
    "projections": [torch.full((1, 3), float(i)) for i in range(4)],
    "prototype_labels": [torch.tensor([[0, 0, i], [0, 1, 2]]) for i in range(4)],
    "share0": [1.0, 0.5, 0.25, 0.0],
    "share1": [0.0, 0.5, 0.75, 1.0],
}
"""What stages may ask for, of each row."""
