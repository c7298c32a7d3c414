"""Early stopping on a score that should fall."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Patience:
    """Counts evaluations without improvement (DFMTL thesis, section 5; its rule replayed on its published runs).

    An improvement is score < best - min_delta, absolute. nan never improves, not even at first.
    """

    patience: int
    min_delta: float = 0.0
    best: float = float("inf")
    best_round: int = 0
    waited: int = 0

    def see(self, score: float, round: int) -> Patience:
        """The state after one more score."""
        if score < self.best - self.min_delta:
            return replace(self, best=score, best_round=round, waited=0)
        return replace(self, waited=self.waited + 1)

    @property
    def stop(self) -> bool:
        """Whether patience has run out."""
        return self.waited >= self.patience
