"""FedHCA2's hyper weights of a run, read from its records: alpha per client, beta per decoder and layer, as a picture.

The run must use the method `fedhca2`, or one of its stages. Free of torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedloom.core.errors import StateError
from fedloom.core.extras import figure, save_figure
from fedloom.federation.runs.reader import Run, number_of
from fedloom.study.palette import color
from fedloom.study.tables.sheet import Recorded, Records, Sheet

KIND = "hyper-weights"
CSV = ("round", "weight", "client", "task", "layer", "value", "used")
_LINES = 12
_NAMED = 12  # lines of one panel that are drawn and named each

Decoder = tuple[str, str]
"""(client, task)"""
Series = tuple[tuple[int, float], ...]
"""(round, weight) of the rounds in which it was used."""


def used(value: float) -> float:
    """A weight as a round uses it: clamped to [0, 1]. The learned weight itself may lie outside."""
    return min(max(value, 0.0), 1.0)


@dataclass(frozen=True)
class HyperWeights(Recorded):
    """The weights of one run, as learned, not clamped. A client has no weight in rounds without it."""

    label: str
    rounds: tuple[int, ...]
    alpha: Mapping[str, Series]
    """Client -> its weight over the rounds."""
    beta: Mapping[Decoder, Mapping[str, Series]]
    """(client, task) -> layer -> its weight over the rounds."""

    @property
    def layers(self) -> tuple[str, ...]:
        """Layers of decoders, in the order of the network."""
        return tuple(dict.fromkeys(layer for layers in self.beta.values() for layer in layers))

    def alphas(self) -> Sheet:
        """Rounds by clients; of a long run, some rounds evenly spaced. In brackets what lies outside [0, 1]."""
        return self._over_rounds("alpha of the encoders", self.alpha)

    def betas(self) -> Sheet:
        """Decoders by layers: first use > last use."""
        lines = []
        for decoder, layers in self.beta.items():
            cells = [" > ".join(_text(v) for _, v in _ends(layers[n])) if n in layers else "" for n in self.layers]
            lines.append((_name(decoder), *cells))
        return Sheet(f"{self.label}: beta of the decoders, first > last", ("decoder", *self.layers), tuple(lines))

    def _over_rounds(self, what: str, series: Mapping[str, Series]) -> Sheet:
        last = len(self.rounds) - 1
        shown = sorted({self.rounds[round(j * last / (_LINES - 1))] for j in range(_LINES)})
        of = {name: dict(points) for name, points in series.items()}
        lines = [(str(r), *(_text(of[name][r]) if r in of[name] else "" for name in series)) for r in shown]
        return Sheet(f"{self.label}: {what}", ("round", *series), tuple(lines))

    @property
    def _sheets(self) -> list[Sheet]:
        return [*([self.alphas()] if self.alpha else []), *([self.betas()] if self.beta else [])]

    def to_text(self) -> str:
        """The tables for a terminal."""
        return "\n".join(sheet.to_text() for sheet in self._sheets)

    def to_markdown(self) -> str:
        """The tables in Markdown."""
        return "\n".join(sheet.to_markdown() for sheet in self._sheets)

    def records(self) -> Records:
        """Every weight of every round, as learned and as used."""
        lines = [(r, "alpha", client, "", "", v) for client, points in self.alpha.items() for r, v in points]
        for (client, task), layers in self.beta.items():
            lines += [(r, "beta", client, task, layer, v) for layer, points in layers.items() for r, v in points]
        ordered = sorted(lines, key=lambda line: line[0])
        return Records(CSV, [(*line, used(line[-1])) for line in ordered])


def table(run: str | Path | Run) -> HyperWeights:
    """What a run recorded about its hyper weights. Raises StateError where it recorded nothing of the kind."""
    run = run if isinstance(run, Run) else Run.read(run)
    alpha: dict[str, list[tuple[int, float]]] = {}
    beta: dict[Decoder, dict[str, list[tuple[int, float]]]] = {}
    rounds = []
    for round, record in run.records(KIND):
        rounds.append(round)
        for client, value in record["weights"].items():
            if record["part"] == "encoder":
                alpha.setdefault(client, []).append((round, number_of(value)))
                continue
            for task, layers in value.items():
                mine = beta.setdefault((client, task), {})
                for layer, weight in layers.items():
                    mine.setdefault(layer, []).append((round, number_of(weight)))
    if not rounds:
        raise StateError(f"{run.folder}: no hyper weights recorded; run with method=fedhca2")
    return HyperWeights(
        f"{run.recipe['name']}, {run.label}, seed {run.seed}",
        tuple(dict.fromkeys(rounds)),
        {client: tuple(points) for client, points in sorted(alpha.items())},
        {k: {layer: tuple(points) for layer, points in layers.items()} for k, layers in sorted(beta.items())},
    )


def draw(run: str | Path | Run | HyperWeights, path: str | Path) -> None:
    """Draw a run's picture (see `picture`) to a file; its ending (.png, .svg, .pdf) says the format."""
    save_figure(picture([run if isinstance(run, HyperWeights) else table(run)]), path)


def picture(several: Sequence[HyperWeights]) -> Any:
    """A matplotlib Figure, one run below the other, of the weights as they were used (clamped to [0, 1]).

    alpha of each client over the rounds; beta of each decoder over the rounds, the mean of its layers; and the last
    beta of every decoder and layer (FedHCA2's Figures 6 and 7; 2 and 3 of its supplement).
    """
    heights = [4.2 + 0.15 * max(0, len(found.beta) - 12) for found in several]
    widths = [3 if found.alpha and found.beta else 2 if found.beta else 1 for found in several]
    whole = figure(max(8, 5.6 * max(widths)), sum(heights), dpi=110)
    pages = whole.subfigures(len(several), 1, squeeze=False, height_ratios=heights)[:, 0]
    for page, width, found in zip(pages, widths, several, strict=True):
        page.suptitle(found.label)
        columns = list(page.subplots(1, width, squeeze=False)[0])
        if found.alpha:
            alphas = {client: [points] for client, points in found.alpha.items()}
            _over_rounds(columns.pop(0), "encoder of each client", r"$\alpha$", alphas)
        if found.beta:
            betas = {_name(decoder): list(layers.values()) for decoder, layers in found.beta.items()}
            _over_rounds(columns.pop(0), "decoders: mean of their layers", r"$\beta$", betas)
            _last(page, columns.pop(0), found)
    return whole


def _over_rounds(axes: Any, title: str, weight: str, lines: Mapping[str, Sequence[Series]]) -> None:
    """Lines with their names beside their ends; of many, those with the least and the largest end, and a band."""
    means = {name: _means(several) for name, several in lines.items()}
    ranked = sorted(means, key=lambda name: means[name][-1][1])
    named = ranked if len(ranked) <= _NAMED else [ranked[0], ranked[-1]]
    if len(named) < len(ranked):
        rounds, values = zip(*_by_round([means[name] for name in ranked[1:-1]]), strict=True)
        axes.fill_between(rounds, *([side(of) for of in values] for side in (min, max)), color="0.5", alpha=0.2)
    for number, name in enumerate(named):
        x, y = zip(*means[name], strict=True)
        axes.plot(x, y, linewidth=1.5, marker="." if len(x) < 20 else None, color=color(number))
    first, last = (side(r for points in means.values() for r, _ in points) for side in (min, max))
    low, high = axes.get_ylim()
    step = 0.055 * (high - low)
    place = low - step
    for number, name in enumerate(named):
        round, end = means[name][-1]
        place = max(place + step, end)
        lead = {"arrowstyle": "-", "color": color(number), "linewidth": 0.7, "shrinkA": 1, "shrinkB": 1}
        look = {"fontsize": 8, "va": "center", "annotation_clip": False}
        beside = last + 0.08 * (last - first)
        axes.annotate(name, (round, end), (beside, place), arrowprops={**lead, "relpos": (0, 0.5)}, **look)
    axes.set_xlabel("round")
    axes.set_ylabel(weight)
    axes.set_title(title, fontsize=10)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def _means(several: Sequence[Series]) -> Series:
    """The mean over several lines in each round that one of them has."""
    return tuple((round, math.fsum(values) / len(values)) for round, values in _by_round(several))


def _by_round(several: Sequence[Series]) -> list[tuple[int, list[float]]]:
    """Round -> the weights of several lines as used, in the order of the rounds."""
    each: dict[int, list[float]] = {}
    for points in several:
        for round, value in points:
            each.setdefault(round, []).append(used(value))
    return sorted(each.items())


def _last(page: Any, axes: Any, found: HyperWeights) -> None:
    layers = found.layers
    last = [[used(of[n][-1][1]) if n in of else float("nan") for n in layers] for of in found.beta.values()]
    shown = [value for row in last for value in row if value == value]
    low, high = min(shown), max(shown)
    image = axes.imshow(last, aspect="auto", cmap="Blues", vmin=low, vmax=high if high > low else low + 1e-6)
    axes.set_xticks(range(len(layers)), layers, rotation=45, ha="right", fontsize=8)
    axes.set_yticks(range(len(last)), [_name(decoder) for decoder in found.beta], fontsize=8)
    axes.set_title(rf"decoders: $\beta$ in round {found.rounds[-1]} or last used", fontsize=10)
    page.colorbar(image, ax=axes, pad=0.01).set_label(r"$\beta$")
    if len(last) * len(layers) <= 120:
        for i, row in enumerate(last):
            for j, value in enumerate(row):
                if value == value:
                    ink = "white" if value > low + 0.6 * (high - low) else "black"
                    axes.text(j, i, f"{value:.3f}", ha="center", va="center", fontsize=7, color=ink)


def _ends(points: Series) -> Series:
    return points if len(points) < 2 else (points[0], points[-1])


def _text(value: float) -> str:
    return f"{value:.4f}" if 0 <= value <= 1 else f"{used(value):.4f} ({value:.3g})"


def _name(decoder: Decoder) -> str:
    client, task = decoder
    return f"{client} {task}".strip()
