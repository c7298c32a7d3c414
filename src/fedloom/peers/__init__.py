"""Learning without a server: who may talk to whom, who is alike, whom to choose, how to mix, what a message costs.

Pure building blocks. Nothing here sends a message or keeps a model; a peer calls them with what it has and received.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedloom._lazy import lazy

if TYPE_CHECKING:
    from fedloom.peers.clock import Arrival, Events, Timing, synchronous
    from fedloom.peers.graph import TOPOLOGIES, Graph, candidates, metropolis
    from fedloom.peers.neighbours import (
        coarse_clusters,
        fine_clusters,
        inter_cluster_penalty,
        leader,
        similar_enough,
        soft_weights,
        task_groups,
        top_k,
        uniform_weights,
    )
    from fedloom.peers.safeguards import Mixed, Safeguards, conflict_averse_mix
    from fedloom.peers.scenario import Scenario
    from fedloom.peers.scope import alignment, next_scope
    from fedloom.peers.similarity import (
        combined,
        cross_loss,
        feature_statistics,
        features,
        gradient,
        normalised,
        overlap,
        parameters,
        per_task,
        shared_columns,
        task_weights,
    )
    from fedloom.peers.sketch import Sketch

__getattr__, __dir__ = lazy(
    __name__,
    {
        "clock": "Arrival Events Timing synchronous",
        "graph": "Graph TOPOLOGIES candidates metropolis",
        "neighbours": (
            "coarse_clusters fine_clusters inter_cluster_penalty leader similar_enough soft_weights task_groups top_k "
            "uniform_weights"
        ),
        "safeguards": "Mixed Safeguards conflict_averse_mix",
        "scenario": "Scenario",
        "scope": "alignment next_scope",
        "similarity": (
            "combined cross_loss feature_statistics features gradient normalised overlap parameters per_task "
            "shared_columns task_weights"
        ),
        "sketch": "Sketch",
    },
)
__all__ = [
    "TOPOLOGIES", "Arrival", "Events", "Graph", "Mixed", "Safeguards", "Scenario", "Sketch", "Timing", "alignment",
    "candidates", "coarse_clusters", "combined", "conflict_averse_mix", "cross_loss", "feature_statistics", "features",
    "fine_clusters", "gradient", "inter_cluster_penalty", "leader", "metropolis", "next_scope", "normalised",
    "overlap", "parameters", "per_task", "shared_columns", "similar_enough", "soft_weights", "synchronous",
    "task_groups", "task_weights", "top_k", "uniform_weights",
]  # fmt: skip
