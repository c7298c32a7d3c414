"""Training on a client: the local loop, its settings and its rules."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedloom.core.lazy import lazy

if TYPE_CHECKING:
    from fedloom.methods.clusters.centres import BestCluster as BestCluster
    from fedloom.methods.clusters.centres import DrawnCluster as DrawnCluster
    from fedloom.methods.clusters.centres import SoftAnchors as SoftAnchors
    from fedloom.methods.conflict.aggregation import ValidationLosses as ValidationLosses
    from fedloom.methods.distill.rules import ConditionalDistillation as ConditionalDistillation
    from fedloom.methods.distill.rules import Digest as Digest
    from fedloom.methods.drift.aggregation import ControlVariate as ControlVariate
    from fedloom.methods.drift.aggregation import CountedSteps as CountedSteps
    from fedloom.methods.drift.aggregation import Dual as Dual
    from fedloom.methods.f2dc.rules import AttachFeatureModules as AttachFeatureModules
    from fedloom.methods.f2dc.rules import AuxiliaryHead as AuxiliaryHead
    from fedloom.methods.f2dc.rules import Corrector as Corrector
    from fedloom.methods.f2dc.rules import Decoupled as Decoupled
    from fedloom.methods.f2dc.rules import Decoupler as Decoupler
    from fedloom.methods.f2dc.rules import FeatureLosses as FeatureLosses
    from fedloom.methods.f2dc.rules import FeatureModules as FeatureModules
    from fedloom.methods.f2dc.rules import decouple as decouple
    from fedloom.methods.f2dc.rules import feature_losses as feature_losses
    from fedloom.methods.f2dc.rules import gumbel_mask as gumbel_mask
    from fedloom.methods.fdse.rules import Consistency as Consistency
    from fedloom.methods.lora.aggregation import MergeFactors as MergeFactors
    from fedloom.methods.lora.aggregation import OwnRank as OwnRank
    from fedloom.methods.peers.aggregation import Plateau as Plateau
    from fedloom.methods.peers.sheaf import RestrictionMaps as RestrictionMaps
    from fedloom.methods.personal.aggregation import Anchor as Anchor
    from fedloom.methods.personal.aggregation import Envelope as Envelope
    from fedloom.methods.personal.aggregation import TaskCoupling as TaskCoupling
    from fedloom.methods.prototypes.maths import ClusterPrototypes as ClusterPrototypes
    from fedloom.methods.prototypes.maths import PrototypeGenerator as PrototypeGenerator
    from fedloom.methods.prototypes.maths import Prototypes as Prototypes
    from fedloom.methods.prototypes.maths import class_prototypes as class_prototypes
    from fedloom.methods.prototypes.maths import cluster_prototypes as cluster_prototypes
    from fedloom.methods.prototypes.maths import fpl_loss as fpl_loss
    from fedloom.methods.prototypes.maths import prototype_pull as prototype_pull
    from fedloom.methods.prototypes.maths import relaxed_contrast as relaxed_contrast
    from fedloom.methods.prototypes.rules import ClusterContrast as ClusterContrast
    from fedloom.methods.prototypes.rules import CollectPrototypes as CollectPrototypes
    from fedloom.methods.prototypes.rules import ModelContrast as ModelContrast
    from fedloom.methods.prototypes.rules import PrototypePull as PrototypePull
    from fedloom.methods.prototypes.rules import RelaxedContrast as RelaxedContrast
    from fedloom.methods.prototypes.rules import SemanticAnchors as SemanticAnchors
    from fedloom.methods.prototypes.rules import TapLevels as TapLevels
    from fedloom.training.config import Optimizer as Optimizer
    from fedloom.training.config import Schedule as Schedule
    from fedloom.training.config import Training as Training
    from fedloom.training.flat import FlatModel as FlatModel
    from fedloom.training.rules import LabelMeans as LabelMeans
    from fedloom.training.rules import LocalRule as LocalRule
    from fedloom.training.rules import Proximal as Proximal
    from fedloom.training.rules import View as View

__getattr__, __dir__ = lazy(__name__)
