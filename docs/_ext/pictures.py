"""The pictures of the page that says what federated multi-task learning is."""

from __future__ import annotations

from pathlib import Path

import torch
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

from fedloom.stages import Mean, PCGrad

INK, SHARED, TASKS = "#444444", "#7a8ea8", {"sort": "#d98032", "odd": "#3f8f5b", "depth": "#8a5aa8"}
HELD = {"ann": ("sort", "odd"), "bob": ("odd",), "cleo": ("depth",)}


def draw(folder: Path) -> None:
    """Write all pictures as SVG files that are the same each time."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, make in (("federation", _federation), ("matrix", _matrix), ("conflict", _conflict)):
        figure = make()
        figure.savefig(folder / f"{name}.svg", metadata={"Date": None}, transparent=True)


def _bare(width: float, height: float, x: float, y: float) -> tuple[Figure, object]:
    figure = Figure((width, height), layout="constrained")
    axes = figure.add_subplot()
    axes.set(xlim=(0, x), ylim=(0, y))
    axes.axis("off")
    return figure, axes


def _box(axes, x, y, width, height, colour, text, size=10):
    axes.add_patch(FancyBboxPatch((x, y), width, height, boxstyle="round,pad=0.03", fc=colour, ec="none", alpha=0.9))
    axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", color="white", fontsize=size)


def _federation():
    """Clients with private data and their own sets of tasks around a server."""
    figure, axes = _bare(7, 3.4, 9, 4.4)
    _box(axes, 3.4, 3.4, 2.2, 0.8, INK, "server: models, no data")
    for i, (who, tasks) in enumerate(HELD.items()):
        x = 0.3 + 3 * i
        axes.add_patch(FancyBboxPatch((x, 0.1), 2.4, 2, boxstyle="round,pad=0.05", fc="none", ec=INK))
        axes.text(x + 1.2, 1.95, f"client {who}", ha="center", va="center", color=INK, fontsize=10)
        _box(axes, x + 0.1, 1.2, 2.2, 0.45, SHARED, "encoder")
        for j, task in enumerate(tasks):
            _box(
                axes, x + 0.1 + 1.13 * j, 0.65, 2.2 if len(tasks) == 1 else 1.07, 0.42, TASKS[task], f"head: {task}", 9
            )
        axes.text(x + 1.2, 0.3, "private images and labels", ha="center", va="center", color=INK, fontsize=8)
        for shift, style in ((-0.12, "-|>"), (0.12, "<|-")):
            ends = ((x + 1.2 + shift, 2.2), (4.5 + (i - 1) * 0.6 + shift, 3.35))
            axes.add_patch(FancyArrowPatch(*ends, arrowstyle=style, mutation_scale=12, color=INK))
    axes.text(0.3, 3.1, "updates go up,\nmodels come down", color=INK, fontsize=9)
    return figure


def _matrix():
    """A round as a matrix: one row a client, one block of columns a part; what a client lacks is blank."""
    figure, axes = _bare(7, 2.4, 10, 3.6)
    parts = {"encoder": 4.2, **dict.fromkeys(TASKS, 1.5)}
    x = 1.2
    for part, width in parts.items():
        title = part if part == "encoder" else f"head: {part}"
        axes.text(x + width / 2, 3.3, title, ha="center", color=INK, fontsize=9)
        for row, tasks in enumerate(HELD.values()):
            has = part == "encoder" or part in tasks
            colour, line = (TASKS.get(part, SHARED), "-") if has else ("none", ":")
            axes.add_patch(Rectangle((x, 2.2 - row), width - 0.1, 0.8, fc=colour, ec=INK, lw=0.6, ls=line))
        x += width
    for row, who in enumerate(HELD):
        axes.text(1, 2.6 - row, who, ha="right", va="center", color=INK, fontsize=10)
    return figure


def _conflict():
    """Two updates that conflict: their mean, and the mean after PCGrad. Computed, not sketched."""
    figure = Figure((7, 2.6), layout="constrained")
    updates = torch.tensor([[3.0, 0.6], [-1.6, 1.2]])
    shown = {"two updates and their mean": Mean(), "PCGrad, then the mean": PCGrad() >> Mean()}
    for i, (title, stage) in enumerate(shown.items()):
        axes = figure.add_subplot(1, 2, i + 1)
        (result,), _ = stage.on(updates)
        rows = updates if i == 0 else PCGrad().on(updates)[0]
        for row, colour in ((updates[0], TASKS["sort"]), (updates[1], TASKS["odd"])):
            _arrow(axes, row, colour, 0.35 if i else 1)
        for row, colour in zip(rows, (TASKS["sort"], TASKS["odd"]), strict=True):
            _arrow(axes, row, colour, 1)
        _arrow(axes, result, INK, 1)
        axes.set(xlim=(-2.2, 3.4), ylim=(-0.4, 2.2), aspect="equal", title=title)
        axes.title.set(color=INK, fontsize=10)
        axes.axis("off")
    return figure


def _arrow(axes, tip, colour, alpha):
    end = (float(tip[0]), float(tip[1]))
    axes.add_patch(FancyArrowPatch((0, 0), end, arrowstyle="-|>", mutation_scale=12, color=colour, alpha=alpha, lw=2))
