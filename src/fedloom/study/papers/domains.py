"""A picture of a metric on each domain over the rounds of a run (F2DC, Tables 1 and 2)."""

from __future__ import annotations

from pathlib import Path

from fedloom.core.extras import figure, save_figure
from fedloom.study.tables.domains import DomainHistory


def draw(history: DomainHistory, path: str | Path) -> None:
    """The metric of each domain, and their average, over the rounds. Raises UserError where matplotlib is absent."""
    page = figure(6, 4)
    axes = page.subplots()
    rounds = [scores.round for scores in history.rounds]
    for domain in history.last.values:
        axes.plot(rounds, [scores.values[domain] for scores in history.rounds], marker=".", label=domain)
    axes.plot(rounds, [scores.average for scores in history.rounds], color="black", linewidth=2, label="average")
    axes.set(title=history.label, xlabel="round", ylabel=f"{history.task} {history.metric}")
    axes.legend()
    save_figure(page, path)
