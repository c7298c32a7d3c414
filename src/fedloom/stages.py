"""The stages of aggregation, through which a round's matrix of updates passes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedloom.core.lazy import lazy

if TYPE_CHECKING:
    from fedloom.core.combine import Every as Every
    from fedloom.core.combine import GroupBy as GroupBy
    from fedloom.core.combine import PartlyShared as PartlyShared
    from fedloom.core.combine import PerBlock as PerBlock
    from fedloom.core.combine import PerTask as PerTask
    from fedloom.core.combine import Scope as Scope
    from fedloom.core.combine import Split as Split
    from fedloom.core.combine import Switch as Switch
    from fedloom.core.mean import Mean as Mean
    from fedloom.core.mean import SupportMean as SupportMean
    from fedloom.core.mean import TaskMeans as TaskMeans
    from fedloom.core.stage import Chain as Chain
    from fedloom.core.stage import Identity as Identity
    from fedloom.core.stage import Stage as Stage
    from fedloom.core.stage import Traits as Traits
    from fedloom.methods.clusters.aggregation import CosineMix as CosineMix
    from fedloom.methods.clusters.aggregation import HistoryAttention as HistoryAttention
    from fedloom.methods.clusters.aggregation import SimilarGroups as SimilarGroups
    from fedloom.methods.clusters.aggregation import SingleTaskModels as SingleTaskModels
    from fedloom.methods.clusters.aggregation import SplittingClusters as SplittingClusters
    from fedloom.methods.clusters.aggregation import TaskLeaders as TaskLeaders
    from fedloom.methods.clusters.centres import ChosenClusters as ChosenClusters
    from fedloom.methods.clusters.centres import MergedModels as MergedModels
    from fedloom.methods.clusters.centres import SoftClusters as SoftClusters
    from fedloom.methods.conflict.aggregation import IMTLG as IMTLG
    from fedloom.methods.conflict.aggregation import AlignedMTL as AlignedMTL
    from fedloom.methods.conflict.aggregation import CAGrad as CAGrad
    from fedloom.methods.conflict.aggregation import ConFIG as ConFIG
    from fedloom.methods.conflict.aggregation import DualProj as DualProj
    from fedloom.methods.conflict.aggregation import FairGrad as FairGrad
    from fedloom.methods.conflict.aggregation import GapWeights as GapWeights
    from fedloom.methods.conflict.aggregation import GradVac as GradVac
    from fedloom.methods.conflict.aggregation import LossWeights as LossWeights
    from fedloom.methods.conflict.aggregation import MinNorm as MinNorm
    from fedloom.methods.conflict.aggregation import PCGrad as PCGrad
    from fedloom.methods.conflict.aggregation import UPGrad as UPGrad
    from fedloom.methods.conflict.aggregation import conflict_averse_weights as conflict_averse_weights
    from fedloom.methods.drift.aggregation import ControlVariates as ControlVariates
    from fedloom.methods.drift.aggregation import DualShift as DualShift
    from fedloom.methods.drift.aggregation import NormaliseSteps as NormaliseSteps
    from fedloom.methods.f2dc.rules import DomainWeights as DomainWeights
    from fedloom.methods.feddea.aggregation import ActivatedDimensions as ActivatedDimensions
    from fedloom.methods.feddea.aggregation import Heal as Heal
    from fedloom.methods.feddea.aggregation import TopMagnitude as TopMagnitude
    from fedloom.methods.fedhca2.aggregation import AcrossTasks as AcrossTasks
    from fedloom.methods.fedhca2.aggregation import AttentionAcrossTasks as AttentionAcrossTasks
    from fedloom.methods.fedhca2.aggregation import HyperConflictAverse as HyperConflictAverse
    from fedloom.methods.fedhca2.aggregation import HyperCrossAttention as HyperCrossAttention
    from fedloom.methods.lora.aggregation import ExactFactors as ExactFactors
    from fedloom.methods.lora.aggregation import FactorProducts as FactorProducts
    from fedloom.methods.merging.aggregation import ConsensusMask as ConsensusMask
    from fedloom.methods.merging.aggregation import ElectedMean as ElectedMean
    from fedloom.methods.merging.aggregation import IsotropicMerge as IsotropicMerge
    from fedloom.methods.merging.aggregation import LeastInterference as LeastInterference
    from fedloom.methods.merging.aggregation import LowRankAndSparse as LowRankAndSparse
    from fedloom.methods.merging.aggregation import SingularMerge as SingularMerge
    from fedloom.methods.merging.aggregation import TaskVectors as TaskVectors
    from fedloom.methods.peers.aggregation import AtPeer as AtPeer
    from fedloom.methods.peers.aggregation import ConflictAverseMix as ConflictAverseMix
    from fedloom.methods.peers.aggregation import Gossip as Gossip
    from fedloom.methods.peers.aggregation import SimilarityMix as SimilarityMix
    from fedloom.methods.peers.aggregation import Staleness as Staleness
    from fedloom.methods.peers.sheaf import SheafLinks as SheafLinks
    from fedloom.methods.personal.aggregation import Attention as Attention
    from fedloom.methods.personal.aggregation import TaskCovariance as TaskCovariance
    from fedloom.methods.prototypes.aggregation import ClusteredPrototypes as ClusteredPrototypes
    from fedloom.methods.prototypes.aggregation import MeanPrototypes as MeanPrototypes
    from fedloom.methods.prototypes.aggregation import MovingAnchors as MovingAnchors
    from fedloom.methods.prototypes.aggregation import TrainedPrototypes as TrainedPrototypes
    from fedloom.methods.robust.aggregation import CentredClip as CentredClip
    from fedloom.methods.robust.aggregation import ClipNorms as ClipNorms
    from fedloom.methods.robust.aggregation import GeometricMedian as GeometricMedian
    from fedloom.methods.robust.aggregation import Krum as Krum
    from fedloom.methods.robust.aggregation import Median as Median
    from fedloom.methods.robust.aggregation import MinimumDiameter as MinimumDiameter
    from fedloom.methods.robust.aggregation import MultiKrum as MultiKrum
    from fedloom.methods.robust.aggregation import NearestMix as NearestMix
    from fedloom.methods.robust.aggregation import TrimmedMean as TrimmedMean

__getattr__, __dir__ = lazy(__name__)
