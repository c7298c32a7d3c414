"""What a round cost: bytes up and down per client, role and task, and seconds per phase."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from fedloom.core.codecs import ByteCount


@dataclass
class Ledger:
    """The entries of one round."""

    up: dict[str, ByteCount] = field(default_factory=dict)
    down: dict[str, ByteCount] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time spent inside to a phase."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - start)

    def add(self, name: str, seconds: float) -> None:
        """Add seconds to a phase."""
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def entries(self, direction: str) -> list[dict[str, Any]]:
        """One entry per client, role and task."""
        return [
            {"client": client, "role": role, "task": task, "bytes": count}
            for client, counts in sorted({"up": self.up, "down": self.down}[direction].items())
            for (role, task), count in sorted(counts.items(), key=lambda c: (c[0][0], c[0][1] or ""))
        ]
