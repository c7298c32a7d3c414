"""Test how large a suite of trials is."""

from __future__ import annotations

import os


def cases(small: int, large: int) -> int:
    """The number of cases of a suite: `small` in the default test run, `large` in `make trials`."""
    return large if os.environ.get("FEDLOOM_TRIALS") == "large" else small
