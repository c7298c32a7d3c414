"""What happens on a client: the local loop, its settings and its rules."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedloom._lazy import lazy
from fedloom.training.config import Optimizer, Schedule, Training

if TYPE_CHECKING:
    from fedloom.training.clusters import BestCluster, SoftAnchors
    from fedloom.training.contrast import ModelContrast
    from fedloom.training.decoupling import (
        AuxiliaryHead,
        Corrector,
        Decoupled,
        Decoupler,
        FeatureLosses,
        decouple,
        feature_losses,
        gumbel_mask,
    )
    from fedloom.training.drift import ControlVariate, CountedSteps, Dual
    from fedloom.training.eraser import Consistency
    from fedloom.training.feature_modules import AttachFeatureModules, FeatureModules
    from fedloom.training.flat import FlatModel
    from fedloom.training.gap import ValidationLosses
    from fedloom.training.personal import Anchor, TaskCoupling
    from fedloom.training.prototype_rules import (
        ClusterContrast,
        CollectPrototypes,
        PrototypePull,
        RelaxedContrast,
        SemanticAnchors,
        TapLevels,
    )
    from fedloom.training.prototypes import (
        ClusterPrototypes,
        PrototypeGenerator,
        Prototypes,
        class_prototypes,
        cluster_prototypes,
        fpl_loss,
        prototype_pull,
        relaxed_contrast,
    )
    from fedloom.training.rules import LocalRule, Proximal, View

__getattr__, __dir__ = lazy(
    __name__,
    {
        "clusters": "BestCluster SoftAnchors",
        "contrast": "ModelContrast",
        "decoupling": "AuxiliaryHead Corrector Decoupled Decoupler FeatureLosses decouple feature_losses gumbel_mask",
        "drift": "ControlVariate CountedSteps Dual",
        "eraser": "Consistency",
        "feature_modules": "AttachFeatureModules FeatureModules",
        "flat": "FlatModel",
        "gap": "ValidationLosses",
        "personal": "Anchor TaskCoupling",
        "prototype_rules": "ClusterContrast CollectPrototypes PrototypePull RelaxedContrast SemanticAnchors TapLevels",
        "prototypes": (
            "ClusterPrototypes PrototypeGenerator Prototypes class_prototypes cluster_prototypes fpl_loss"
            " prototype_pull relaxed_contrast"
        ),
        "rules": "LocalRule Proximal View",
    },
)
__all__ = [
    "Anchor", "AttachFeatureModules", "AuxiliaryHead", "BestCluster", "ClusterContrast", "ClusterPrototypes",
    "CollectPrototypes", "Consistency", "ControlVariate", "Corrector", "CountedSteps", "Decoupled", "Decoupler", "Dual",
    "FeatureLosses", "FeatureModules", "FlatModel", "LocalRule", "ModelContrast", "Optimizer", "PrototypeGenerator",
    "PrototypePull", "Prototypes", "Proximal", "RelaxedContrast", "Schedule", "SemanticAnchors", "SoftAnchors",
    "TapLevels", "TaskCoupling", "Training", "ValidationLosses", "View", "class_prototypes", "cluster_prototypes",
    "decouple", "feature_losses", "fpl_loss", "gumbel_mask", "prototype_pull", "relaxed_contrast",
]  # fmt: skip
