"""Trials say how many cases they tried."""

from __future__ import annotations

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One line a test: its counts, as it recorded them with `record_property`."""
    for report in [r for kind in ("passed", "failed") for r in terminalreporter.stats.get(kind, [])]:
        if report.user_properties and "/trials/" in report.nodeid:
            counts = ", ".join(f"{value} {name}" for name, value in report.user_properties)
            terminalreporter.write_line(f"{report.nodeid.rpartition('/')[2]}: {counts}")
