"""Aggregation, one idea a file: stages that a round's matrix of updates passes through."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedloom._lazy import lazy

if TYPE_CHECKING:
    from fedloom.stages.blocks import PerBlock
    from fedloom.stages.centres import ChosenClusters, SoftClusters
    from fedloom.stages.clusters import SimilarGroups, SplittingClusters
    from fedloom.stages.combine import GroupBy, PerTask, Scope, Split, Switch
    from fedloom.stages.conflict import CAGrad, MinNorm, PCGrad
    from fedloom.stages.cosine import CosineMix
    from fedloom.stages.decoders import AcrossTasks
    from fedloom.stages.domains import DomainWeights
    from fedloom.stages.drift import ControlVariates, DualShift, NormaliseSteps
    from fedloom.stages.gap import GapWeights
    from fedloom.stages.groups import TaskLeaders
    from fedloom.stages.heal import Heal
    from fedloom.stages.history import HistoryAttention
    from fedloom.stages.hyper import HyperConflictAverse, HyperCrossAttention, conflict_averse_weights
    from fedloom.stages.magnitude import TopMagnitude
    from fedloom.stages.mean import Mean, SupportMean
    from fedloom.stages.mixing import Gossip, SimilarityMix
    from fedloom.stages.overlap import ActivatedDimensions
    from fedloom.stages.peer import AtPeer, ConflictAverseMix
    from fedloom.stages.prototypes import (
        ClusteredPrototypes,
        MeanPrototypes,
        MovingAnchors,
        TrainedPrototypes,
    )
    from fedloom.stages.relations import Attention, TaskCovariance
    from fedloom.stages.shared import Every, PartlyShared
    from fedloom.stages.stage import Chain, Identity, Stage
    from fedloom.stages.staleness import Staleness
    from fedloom.stages.taskvectors import TaskVectors

__getattr__, __dir__ = lazy(
    __name__,
    {
        "blocks": "PerBlock",
        "centres": "ChosenClusters SoftClusters",
        "clusters": "SimilarGroups SplittingClusters",
        "combine": "GroupBy PerTask Scope Split Switch",
        "conflict": "CAGrad MinNorm PCGrad",
        "cosine": "CosineMix",
        "decoders": "AcrossTasks",
        "domains": "DomainWeights",
        "drift": "ControlVariates DualShift NormaliseSteps",
        "gap": "GapWeights",
        "groups": "TaskLeaders",
        "heal": "Heal",
        "history": "HistoryAttention",
        "hyper": "HyperConflictAverse HyperCrossAttention conflict_averse_weights",
        "magnitude": "TopMagnitude",
        "mean": "Mean SupportMean",
        "mixing": "Gossip SimilarityMix",
        "overlap": "ActivatedDimensions",
        "peer": "AtPeer ConflictAverseMix",
        "prototypes": "ClusteredPrototypes MeanPrototypes MovingAnchors TrainedPrototypes",
        "relations": "Attention TaskCovariance",
        "shared": "Every PartlyShared",
        "stage": "Chain Identity Stage",
        "staleness": "Staleness",
        "taskvectors": "TaskVectors",
    },
)
__all__ = [
    "AcrossTasks", "ActivatedDimensions", "AtPeer", "Attention", "CAGrad", "Chain", "ChosenClusters",
    "ClusteredPrototypes", "ConflictAverseMix", "ControlVariates", "CosineMix", "DomainWeights", "DualShift", "Every",
    "GapWeights", "Gossip", "GroupBy", "Heal", "HistoryAttention", "HyperConflictAverse", "HyperCrossAttention",
    "Identity", "Mean", "MeanPrototypes", "MinNorm", "MovingAnchors", "NormaliseSteps", "PCGrad", "PartlyShared",
    "PerBlock", "PerTask", "Scope", "SimilarGroups", "SimilarityMix", "SoftClusters", "Split", "SplittingClusters",
    "Stage", "Staleness", "SupportMean", "Switch", "TaskCovariance", "TaskLeaders", "TaskVectors", "TopMagnitude",
    "TrainedPrototypes", "conflict_averse_weights",
]  # fmt: skip
