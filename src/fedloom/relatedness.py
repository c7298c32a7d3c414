"""Relatedness of tasks: T x T matrices by several metrics, how far the metrics agree, heat maps (MaTU's Figures 2, 3).

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

from fedloom.core.lazy import lazy

if TYPE_CHECKING:
    from fedloom.study.agreement import Agreement as Agreement
    from fedloom.study.agreement import agreement as agreement
    from fedloom.study.agreement import symmetrised as symmetrised
    from fedloom.study.relatedness import EtranScore as EtranScore
    from fedloom.study.relatedness import cosine as cosine
    from fedloom.study.relatedness import etran as etran
    from fedloom.study.relatedness import etran_totals as etran_totals
    from fedloom.study.relatedness import fim as fim
    from fedloom.study.relatedness import fisher_diagonal as fisher_diagonal
    from fedloom.study.relatedness import logme as logme
    from fedloom.study.relatedness import sign as sign
    from fedloom.study.relatedness import wte as wte
    from fedloom.study.relatedness import wte_embeddings as wte_embeddings

__getattr__, __dir__ = lazy(__name__)
