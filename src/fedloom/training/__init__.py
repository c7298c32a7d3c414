"""What happens on a client: the local loop, its settings and its rules."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedloom._lazy import lazy

if TYPE_CHECKING:
    from fedloom.maths.prototypes import ClusterPrototypes as ClusterPrototypes
    from fedloom.maths.prototypes import PrototypeGenerator as PrototypeGenerator
    from fedloom.maths.prototypes import Prototypes as Prototypes
    from fedloom.maths.prototypes import class_prototypes as class_prototypes
    from fedloom.maths.prototypes import cluster_prototypes as cluster_prototypes
    from fedloom.maths.prototypes import fpl_loss as fpl_loss
    from fedloom.maths.prototypes import prototype_pull as prototype_pull
    from fedloom.maths.prototypes import relaxed_contrast as relaxed_contrast
    from fedloom.training.averages import LabelMeans as LabelMeans
    from fedloom.training.clusters import BestCluster as BestCluster
    from fedloom.training.clusters import DrawnCluster as DrawnCluster
    from fedloom.training.clusters import SoftAnchors as SoftAnchors
    from fedloom.training.config import Optimizer as Optimizer
    from fedloom.training.config import Schedule as Schedule
    from fedloom.training.config import Training as Training
    from fedloom.training.contrast import ModelContrast as ModelContrast
    from fedloom.training.decoupling import AuxiliaryHead as AuxiliaryHead
    from fedloom.training.decoupling import Corrector as Corrector
    from fedloom.training.decoupling import Decoupled as Decoupled
    from fedloom.training.decoupling import Decoupler as Decoupler
    from fedloom.training.decoupling import FeatureLosses as FeatureLosses
    from fedloom.training.decoupling import decouple as decouple
    from fedloom.training.decoupling import feature_losses as feature_losses
    from fedloom.training.decoupling import gumbel_mask as gumbel_mask
    from fedloom.training.drift import ControlVariate as ControlVariate
    from fedloom.training.drift import CountedSteps as CountedSteps
    from fedloom.training.drift import Dual as Dual
    from fedloom.training.eraser import Consistency as Consistency
    from fedloom.training.factors import MergeFactors as MergeFactors
    from fedloom.training.factors import OwnRank as OwnRank
    from fedloom.training.feature_modules import AttachFeatureModules as AttachFeatureModules
    from fedloom.training.feature_modules import FeatureModules as FeatureModules
    from fedloom.training.flat import FlatModel as FlatModel
    from fedloom.training.gap import ValidationLosses as ValidationLosses
    from fedloom.training.personal import Anchor as Anchor
    from fedloom.training.personal import TaskCoupling as TaskCoupling
    from fedloom.training.prototype_rules import ClusterContrast as ClusterContrast
    from fedloom.training.prototype_rules import CollectPrototypes as CollectPrototypes
    from fedloom.training.prototype_rules import PrototypePull as PrototypePull
    from fedloom.training.prototype_rules import RelaxedContrast as RelaxedContrast
    from fedloom.training.prototype_rules import SemanticAnchors as SemanticAnchors
    from fedloom.training.prototype_rules import TapLevels as TapLevels
    from fedloom.training.rules import LocalRule as LocalRule
    from fedloom.training.rules import Proximal as Proximal
    from fedloom.training.rules import View as View

__getattr__, __dir__ = lazy(__name__)
