"""What `fedloom features` shows of features, as pictures: their spectra, t-SNE and Grad-CAM."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedloom.core.extras import figure, need
from fedloom.experiments.papers.domain_runs import DomainModel
from fedloom.study.palette import color

SPECTRUM, EMBEDDING, MAPS = "singular-values.png", "tsne.png", "grad-cam.png"
RANK = "effective rank: exp of the entropy of the singular values, divided by their sum"
_DECADES = 8  # singular values further below the largest are rounding
_MARKERS = "os^Dvp<>hX"

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, eq=False)
class Spectrum:
    """The covariance of one model's pooled features (Figure 1): `width` features of `examples` test examples."""

    run: str
    view: DomainModel
    examples: int
    width: int
    values: Array
    """Singular values, largest first."""
    rank: float
    """Their effective rank."""


@dataclass(frozen=True, eq=False)
class Embedded:
    """t-SNE of one run's features (Figure 4): points n x 2, their classes and the names of their domains."""

    run: str
    points: Array
    classes: Array
    domains: tuple[str, ...]
    note: str


@dataclass(frozen=True, eq=False)
class HeatMaps:
    """Grad-CAM of some test images of a domain (Figure 2): pictures, classes, and each run's maps and answers."""

    domain: str
    images: Array
    """n x H x W x 3, uint8."""
    classes: Array
    maps: Mapping[str, tuple[Array, Array]]
    """Run -> (heat maps n x H x W for the true class, predicted classes n)."""


def _panels(rows: int, columns: int, width: float, height: float, **options: Any) -> tuple[Any, Any]:
    """(figure, its axes rows x columns) with panels of a size in inches."""
    page = figure(width * columns, height * rows + 0.5)
    return page, page.subplots(rows, columns, squeeze=False, **options)


def draw(spectra: Sequence[Spectrum], embedded: Sequence[Embedded], heat: Sequence[HeatMaps]) -> dict[str, Any]:
    """File name -> matplotlib Figure."""
    figures = {SPECTRUM: _spectra(spectra), EMBEDDING: _embedded(embedded)}
    return figures | ({MAPS: _heat(heat)} if heat else {})


def _spectra(spectra: Sequence[Spectrum]) -> Any:
    """One panel per run, one line per model, one colour per domain."""
    runs = list(dict.fromkeys(s.run for s in spectra))
    colors = {domain: color(i) for i, domain in enumerate(dict.fromkeys(s.view.domain for s in spectra))}
    page, axes = _panels(1, len(runs), 4.2, 3.6, sharey=True)
    largest = max((float(s.values[0]) for s in spectra), default=0.0)
    for run, panel in zip(runs, axes[0], strict=True):
        for s in (s for s in spectra if s.run == run):
            label = f"{s.view.label}: {s.rank:.1f}"
            known = s.values[s.values > 0]
            panel.plot(range(1, len(known) + 1), known, color=colors[s.view.domain], linewidth=1, label=label)
        panel.set_title(run, fontsize=10)
        panel.set_xlabel("number")
        panel.grid(alpha=0.3)
        panel.legend(fontsize=6, title="effective rank", title_fontsize=6)
    axes[0][0].set_ylabel("singular value")
    if largest > 0:
        axes[0][0].set_yscale("log")
        axes[0][0].set_ylim(largest * 10.0**-_DECADES, largest * 2)
    page.suptitle(f"Singular values of the covariance of pooled features\n{RANK}", fontsize=9)
    return page


def _embedded(embedded: Sequence[Embedded]) -> Any:
    """One panel per run: colours are classes, markers are domains, and a star is at the mean of each class."""
    page, axes = _panels(1, len(embedded), 4.2, 4.2)
    palette = need("matplotlib", "report").colormaps["tab20"]
    for found, panel in zip(embedded, axes[0], strict=True):
        domains = list(dict.fromkeys(found.domains))
        of = np.asarray(found.domains)
        for number, domain in enumerate(domains):
            here = of == domain
            colors = [palette(int(c) % 20) for c in found.classes[here]]
            marker = _MARKERS[number % len(_MARKERS)]
            panel.scatter(*found.points[here].T, c=colors, marker=marker, s=9, linewidths=0)
            panel.scatter([], [], c="grey", marker=marker, s=16, label=domain)
        for c in np.unique(found.classes):
            centre = found.points[found.classes == c].mean(0)
            color = palette(int(c) % 20)
            panel.scatter(*centre, color=color, marker="*", s=130, edgecolors="black", linewidths=0.6)
            panel.scatter([], [], color=color, marker="*", s=30, label=f"class {c}")
        panel.set_title(f"{found.run}\n{found.note}" if found.note else found.run, fontsize=9)
        panel.set_xticks([])
        panel.set_yticks([])
    page.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=6, fontsize=7)
    page.suptitle("t-SNE of pooled features; stars are the classes' means", fontsize=9)
    return page


def _heat(heat: Sequence[HeatMaps]) -> Any:
    """One column per test image: the image, and below it each run's map over it with the class that the run answers."""
    runs = list(heat[0].maps)
    page, axes = _panels(1 + len(runs), sum(len(h.images) for h in heat), 1.2, 1.5)
    columns = iter(axes.T)
    for h in heat:
        for i, (image, true) in enumerate(zip(h.images, h.classes, strict=True)):
            top, *below = next(columns)
            top.set_title(f"{h.domain}, class {true}", fontsize=7)
            for panel, run in zip(below, runs, strict=True):
                maps, answers = h.maps[run]
                panel.imshow(image)
                panel.imshow(maps[i], cmap="jet", alpha=0.45, vmin=0, vmax=max(float(maps[i].max()), 1e-12))
                panel.set_title(f"answers {answers[i]}", fontsize=7, color="black" if answers[i] == true else "red")
            top.imshow(image)
            for panel in (top, *below):
                panel.set_xticks([])
                panel.set_yticks([])
    for row, name in zip(axes, ("image", *runs), strict=True):
        row[0].set_ylabel(textwrap.fill(name, 20), fontsize=7)
    page.suptitle("Grad-CAM of the true class at the last map; red: a wrong answer", fontsize=9)
    return page
