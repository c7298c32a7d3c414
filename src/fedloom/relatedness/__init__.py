"""How related tasks are: T x T matrices by several metrics, how far the metrics agree, heat maps (MaTU's Figures 2, 3).

Directed metrics (`logme`, `etran`) score one pair: the features that a model tuned on task s computes for the data of
task t, and the labels of t. Put the scores into a matrix R[s, t] and take `symmetrised(R)`. `logme`, `etran` and `wte`
look at data or features of all tasks, so they are for simulations.

    sign, cosine    task vectors, T x d
    logme, etran    features (n x D) and labels (n)
    fim             diagonals of the Fisher information, from `fisher_diagonal`
    wte             inputs or features and labels of every task; a distance, all others are similarities

Free of torch until one of its functions needs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedloom._lazy import lazy

if TYPE_CHECKING:
    from fedloom.relatedness.compare import Agreement, agreement, draw, picture, symmetrised
    from fedloom.relatedness.evidence import logme
    from fedloom.relatedness.fisher import fim, fisher_diagonal
    from fedloom.relatedness.scores import EtranScore, etran, etran_totals
    from fedloom.relatedness.vectors import cosine, sign
    from fedloom.relatedness.wasserstein import wte, wte_embeddings

__getattr__, __dir__ = lazy(
    __name__,
    {
        "compare": "Agreement agreement draw picture symmetrised",
        "evidence": "logme",
        "fisher": "fim fisher_diagonal",
        "scores": "EtranScore etran etran_totals",
        "vectors": "cosine sign",
        "wasserstein": "wte wte_embeddings",
    },
)
__all__ = [
    "Agreement", "EtranScore", "agreement", "cosine", "draw", "etran", "etran_totals", "fim", "fisher_diagonal",
    "logme", "picture", "sign", "symmetrised", "wte", "wte_embeddings",
]  # fmt: skip
