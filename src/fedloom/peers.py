"""Learning without a server: graphs, similarities, the choice of neighbours, mixing, and the cost of messages.

Pure functions: nothing here sends a message or keeps a model. A peer calls them on its own and received values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedloom.core.lazy import lazy

if TYPE_CHECKING:
    from fedloom.methods.peers.config import Safeguards as Safeguards
    from fedloom.methods.peers.graph import TOPOLOGIES as TOPOLOGIES
    from fedloom.methods.peers.graph import Graph as Graph
    from fedloom.methods.peers.graph import candidates as candidates
    from fedloom.methods.peers.graph import metropolis as metropolis
    from fedloom.methods.peers.neighbours import alignment as alignment
    from fedloom.methods.peers.neighbours import coarse_clusters as coarse_clusters
    from fedloom.methods.peers.neighbours import fine_clusters as fine_clusters
    from fedloom.methods.peers.neighbours import next_scope as next_scope
    from fedloom.methods.peers.neighbours import recent as recent
    from fedloom.methods.peers.neighbours import similar_enough as similar_enough
    from fedloom.methods.peers.neighbours import soft_weights as soft_weights
    from fedloom.methods.peers.neighbours import task_groups as task_groups
    from fedloom.methods.peers.neighbours import top_k as top_k
    from fedloom.methods.peers.safeguards import Mixed as Mixed
    from fedloom.methods.peers.safeguards import conflict_averse_mix as conflict_averse_mix
    from fedloom.methods.peers.scenario import Arrival as Arrival
    from fedloom.methods.peers.scenario import Events as Events
    from fedloom.methods.peers.scenario import Scenario as Scenario
    from fedloom.methods.peers.scenario import Timing as Timing
    from fedloom.methods.peers.scenario import synchronous as synchronous
    from fedloom.methods.peers.similarity import Sketch as Sketch
    from fedloom.methods.peers.similarity import combined as combined
    from fedloom.methods.peers.similarity import cross_loss as cross_loss
    from fedloom.methods.peers.similarity import disparity as disparity
    from fedloom.methods.peers.similarity import feature_statistics as feature_statistics
    from fedloom.methods.peers.similarity import features as features
    from fedloom.methods.peers.similarity import gradient as gradient
    from fedloom.methods.peers.similarity import normalised as normalised
    from fedloom.methods.peers.similarity import overlap as overlap
    from fedloom.methods.peers.similarity import parameters as parameters
    from fedloom.methods.peers.similarity import per_task as per_task
    from fedloom.methods.peers.similarity import shared_columns as shared_columns
    from fedloom.methods.peers.similarity import task_weights as task_weights

__getattr__, __dir__ = lazy(__name__)
