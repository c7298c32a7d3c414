"""The pictures of `fedloom papers features`: their spectra, t-SNE and Grad-CAM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedloom.data.drawing import NEAR_TO_FAR, Cell, Legend, grid, ramp
from fedloom.experiments.papers.domain_runs import DomainModel
from fedloom.study.charts import COLORS, INK, Chart, concat, lines, scatter

SPECTRUM, EMBEDDING, MAPS = "singular-values.png", "tsne.png", "grad-cam.png"
RANK = "effective rank: exp of the entropy of the singular values, divided by their sum"
_DECADES = 8  # singular values further below the largest are rounding
TWENTY = (*COLORS, "#aec7e8", "#ffbb78", "#98df8a", "#ff9896", "#c5b0d5", "#c49c94", "#f7b6d2", "#c7c7c7", "#dbdb8d",
          "#9edae5", "#393b79", "#637939")  # fmt: skip
"""Colours of classes."""

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


def draw(spectra: Sequence[Spectrum], embedded: Sequence[Embedded]) -> dict[str, Chart]:
    """Draw spectra and embeddings; returns file name -> chart."""
    return {SPECTRUM: _spectra(spectra), EMBEDDING: _embedded(embedded)}


def _spectra(spectra: Sequence[Spectrum]) -> Chart:
    """Draw one panel per run, one line per model, one colour per domain; the axis upwards is logarithmic."""
    largest = max((float(s.values[0]) for s in spectra), default=0.0)
    drawn = []
    for run in dict.fromkeys(s.run for s in spectra):
        several, groups = {}, {}
        for s in (s for s in spectra if s.run == run):
            name = f"{s.view.label}: {s.rank:.1f}"
            known = s.values[s.values > largest * 10.0**-_DECADES]
            several[name] = {number: float(v) for number, v in enumerate(known, 1)}
            groups[name] = s.view.domain
        log = "y" if any(several.values()) else ""
        drawn.append(lines(several, "number", "singular value", title=run, groups=groups, log=log))
    return concat(drawn, 3, "Singular values of the covariance of pooled features, with the effective rank", RANK)


def _embedded(embedded: Sequence[Embedded]) -> Chart:
    """Draw one panel per run: colours are classes, shapes are domains, and the large points are means of classes."""
    drawn = []
    for embedding in embedded:
        points = [
            {"name": f"class {c}, {domain}", "x": float(x), "y": float(y), "class": str(c), "domain": domain}
            for (x, y), c, domain in zip(embedding.points, embedding.classes, embedding.domains, strict=True)
        ]
        centres = [(c, embedding.points[embedding.classes == c].mean(0)) for c in np.unique(embedding.classes)]
        means = [{"x": float(x), "y": float(y), "class": str(c)} for c, (x, y) in centres]
        title = f"{embedding.run}: {embedding.note}" if embedding.note else embedding.run
        chart = scatter(
            points, "", "", title=title, color_by="class", shape_by="domain", size=12, axes=False, colors=TWENTY
        )
        mark = {"type": "point", "filled": True, "size": 130, "stroke": INK, "opacity": 1}
        color = {"color": chart["layer"][0]["encoding"]["color"]}
        chart["layer"].append({"data": {"values": means}, "mark": mark, "encoding": color})
        drawn.append(chart)
    return concat(drawn, 3, "t-SNE of pooled features; the large points are the classes' means")


def maps(heat: Sequence[HeatMaps]) -> Any:
    """Draw one row per test image: the image, and each run's map over it with the class that the run answers."""
    runs = list(heat[0].maps)
    rows: list[list[Cell]] = []
    for h in heat:
        for i, (image, true) in enumerate(zip(h.images, h.classes, strict=True)):
            row: list[Cell] = [(image, f"{h.domain}, class {true}")]
            for run in runs:
                pictures, answers = h.maps[run]
                share = pictures[i] / max(float(pictures[i].max()), 1e-12)
                over = 0.5 * image + 0.5 * ramp(share, np.ones_like(share, dtype=bool), NEAR_TO_FAR[::-1])
                wrong = "" if answers[i] == true else ", wrong"
                row.append((over.astype(np.uint8), f"answers {answers[i]}{wrong}"))
            rows.append(row)
    legend = Legend(ramp=NEAR_TO_FAR[::-1], ends=("nothing", "most"))
    return grid(["image", *runs], rows, "Grad-CAM of the true class at the last map", {"what it looks at": legend})
