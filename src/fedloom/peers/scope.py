"""Exchange the encoder only, or the whole model? Decided from how well updates agree (DFMTL thesis, section 6.4.3)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal

Exchange = Literal["encoder", "full"]


def alignment(cosines: Iterable[float]) -> float:
    """Mean of the finite ones of a peer's cosines with its candidates, in [-1, 1]; nan where there is none."""
    finite = [float(c) for c in cosines if math.isfinite(float(c))]
    return math.fsum(finite) / len(finite) if finite else math.nan


def next_scope(alignment: float, current: Exchange = "full", enter: float = 0.6, leave: float = 0.3) -> Exchange:
    """What to exchange in the next round: "encoder" from an alignment of `enter` on, "full" again below `leave`.

    The thesis saw exchange of the encoder alone hold where gradients had cosines of 0.6 to 0.8 (NYU depth v2) and
    oscillate where they were low or negative (Pascal Context), with exchange of everything stable in both; it advises
    the latter wherever correlation is weak or unknown. So `enter` is the lower end of what it saw to be safe, an
    alignment that is nan gives "full", and so does the first round. It names no lower threshold: `leave` is ours, half
    way from 0.6 to orthogonal updates, so that noise around one number does not flip the scope every round.

    These are cosines of eq. 4.3, not of the unit scale. After many local steps cosines of updates are far below those
    of gradients: choose both thresholds by what is measured.
    """
    if not -1 <= leave <= enter <= 1:
        raise ValueError(f"expected -1 <= leave <= enter <= 1, found leave = {leave} and enter = {enter}")
    if current not in ("encoder", "full"):
        raise ValueError(f"current: expected 'encoder' or 'full', found {current!r}")
    return "encoder" if alignment >= (leave if current == "encoder" else enter) else "full"
