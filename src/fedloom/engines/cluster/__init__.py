"""Many processes on one or many machines, started by torchrun: the engine `cluster`. This module is free of torch."""

from __future__ import annotations

import os


def rank() -> int | None:
    """Return the rank of this process in the run, from 0; None if torchrun did not start it."""
    return int(os.environ["RANK"]) if "RANK" in os.environ and "WORLD_SIZE" in os.environ else None
