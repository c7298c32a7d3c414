"""Features of a finished run's encoder in each domain (F2DC, Figures 1, 2 and 4, Table 7): `fedloom papers features`.

`singular_values`, `embedding`, `grad_cam` and `part_accuracy` are the four things to look at, and `features` looks at
all of them, for several runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate, relu

from fedloom.core.errors import StateError, writing
from fedloom.core.lazy import need
from fedloom.data.drawing import pictures
from fedloom.data.drawing import save as save_sheet
from fedloom.experiments.export.finished import Steps, Tell
from fedloom.experiments.papers.domain_runs import BATCH, DomainModel, DomainRun, read
from fedloom.experiments.papers.feature_figures import MAPS, RANK, Array, Embedded, HeatMaps, Spectrum, draw, maps
from fedloom.methods.f2dc.rules import FeatureModule, decouple, gumbel_mask
from fedloom.models.multitask import MultiTask
from fedloom.study.charts import save
from fedloom.study.tables.output import Records, Table
from fedloom.study.tables.results import DomainScores

PARTS = ("f+", "f-", "f*", "f~")
"""Domain-robust, domain-related, corrected and fused features, as in Table 7."""


def singular_values(features: Tensor) -> Array:
    """Return singular values of the covariance matrix of features (n x D), largest first: min(n, D) of them.

    The covariance divides by n - 1. Values that are not given are 0. ValueError for fewer than two examples.
    """
    if len(features) < 2:
        raise ValueError(f"singular_values: expected at least two examples, found {len(features)}")
    centred = features.double() - features.double().mean(0)
    return (torch.linalg.svdvals(centred) ** 2 / (len(features) - 1)).numpy()


def effective_rank(values: Any) -> float:
    """Return exp of the entropy of singular values divided by their sum (Roy and Vetterli, 2007); 0 where all are 0.

    Between 1 and the rank; the rank exactly where all values above 0 are equal.
    """
    values = np.asarray(values, float)
    shares = values[values > 0] / values.sum() if values.any() else np.zeros(0)
    return float(np.exp(-(shares * np.log(shares)).sum())) if len(shares) else 0.0


def grad_cam(model: MultiTask, layer: nn.Module, x: Tensor, task: str, classes: Tensor) -> tuple[Tensor, Tensor]:
    """Return (heat maps B x H x W, all at least 0, as large as the inputs; the logits B x C) by Grad-CAM.

    With A the map that `layer` gives (B x K x h x w) and y the logit of `classes` (B, int64): weights a_k = mean over
    positions of dy/dA_k; ReLU(sum_k a_k A_k), resized (bilinear). x is B x C x H x W. The model should be in evaluation
    mode, in which an example's map does not depend on the others.

    Source: Selvaraju et al., Grad-CAM: Visual Explanations from Deep Networks via Gradient-based Localization,
    equations 1 and 2.
    """
    maps: list[Tensor] = []

    def keep(_module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
        maps.append(output.detach().requires_grad_())
        return maps[-1].clone()  # what follows may work in place

    handle = layer.register_forward_hook(keep)
    try:
        with torch.enable_grad():
            logits = model(x, (task,))[task]
            scores = logits.gather(1, classes[:, None]).sum()
            (gradient,) = torch.autograd.grad(scores, maps[-1])
    finally:
        handle.remove()
    weights = gradient.mean((2, 3), keepdim=True)
    heat = relu((weights * maps[-1].detach()).sum(1, keepdim=True))
    return interpolate(heat, size=x.shape[2:], mode="bilinear", align_corners=False)[:, 0], logits.detach()


def part_accuracy(run: DomainRun, view: DomainModel) -> dict[str, float]:
    """Return f+, f-, f* and f~ -> the accuracy of the run's own classifier on them, over all of a domain's test
    examples.

    They are those of the feature module that is passed last, and take the place of its output; its mask is without
    noise. f~ is what the run measures unless it has noise in evaluation, or leaves its modules out (scope identity).
    Raises StateError where the run has no feature modules.
    """
    attached = run.feature_module
    if attached is None:
        raise StateError(f"{run.name}: expected a run with feature modules (method f2dc), found none")

    def parts(module: FeatureModule, inputs: tuple[Tensor], _output: Tensor) -> Tensor:
        (f,) = inputs
        mask = gumbel_mask(module.decoupler(f), module.about.sigma)
        features = decouple(f, mask, module.corrector or torch.zeros_like)
        return torch.cat([features.robust, features.related, features.corrected, features.fused])

    model, part, name = run.loaded(view), run.part(view), run.task.name
    metrics = [run.task.metric() for _ in PARTS]
    handle = attached.register_forward_hook(parts)
    try:
        with torch.inference_mode():
            for index in part.index.split(BATCH):
                x, y = part.examples.batch(index, run.device, tasks=(name,))
                for metric, output in zip(metrics, model(x, (name,))[name].chunk(len(PARTS)), strict=True):
                    metric.update(output, y[name])
    finally:
        handle.remove()
    return {label: metric.compute()["accuracy"] for label, metric in zip(PARTS, metrics, strict=True)}


def embedding(features: Tensor, seed: int = 0) -> Array:
    """Return t-SNE of features (n x D) in the plane (n x 2), from their principal components; needs scikit-learn.

    The perplexity is 30, or a third of n - 1 where that is less. ValueError for fewer than four examples.
    """
    if len(features) < 4:
        raise ValueError(f"embedding: expected at least four examples, found {len(features)}")
    library = need("sklearn.manifold", "report")
    perplexity = min(30.0, (len(features) - 1) / 3)
    tsne = library.TSNE(2, perplexity=perplexity, init="pca", learning_rate="auto", random_state=seed)
    return np.asarray(tsne.fit_transform(features.numpy()))


@dataclass(frozen=True, eq=False)
class FeatureStudy:
    """The result of `features`. `parts` holds Table 7 by run, part and domain, `notes` what was left out and why."""

    spectra: tuple[Spectrum, ...]
    parts: Mapping[str, Mapping[str, DomainScores]]
    embedded: tuple[Embedded, ...]
    heat: tuple[HeatMaps, ...]
    notes: tuple[str, ...]

    def to_text(self) -> str:
        """Return effective ranks by run and domain, then Table 7 of every run with feature modules, then notes."""
        texts = [self._ranks().to_text(), *(_table(run, rows).to_text() for run, rows in self.parts.items())]
        return "\n".join(texts) + "".join(f"note: {note}\n" for note in self.notes)

    def write(self, folder: Path) -> list[Path]:
        """Write singular-values.csv, parts.csv (with feature modules), and the figures singular-values.png, tsne.png
        and
        grad-cam.png. Raises UserError where the folder cannot be written."""
        figures = draw(self.spectra, self.embedded)
        tables = {f"{name}.csv": records.to_csv() for name, records in self.records().items()}
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            for name, text in tables.items():
                (folder / name).write_text(text, encoding="utf-8")
        for name, figure in figures.items():
            save(figure, folder / name)
        if self.heat:
            save_sheet(maps(self.heat), folder / MAPS)
        return [folder / name for name in (*tables, *figures, *([MAPS] if self.heat else []))]

    def records(self) -> dict[str, Records]:
        """Return the singular values, and with feature modules Table 7, in full precision."""
        head = ("run", "domain", "client", "examples", "features", "effective rank", "number", "singular value")
        values = [
            (s.run, s.view.domain, s.view.client.id if s.view.personal else "", s.examples, s.width, s.rank, number,
             float(value))
            for s in self.spectra
            for number, value in enumerate(s.values, 1)
        ]  # fmt: skip
        parts = [
            (run, part, domain, value)
            for run, scores in self.parts.items()
            for part, by_domain in scores.items()
            for domain, value in by_domain.values.items()
        ]
        by_name = {"singular-values": Records(head, values)}
        return by_name | ({"parts": Records(("run", "features", "domain", "accuracy"), parts)} if parts else {})

    def _ranks(self) -> Table:
        domains = tuple(dict.fromkeys(s.view.domain for s in self.spectra))
        lines = []
        for run in dict.fromkeys(s.run for s in self.spectra):
            mine = [s for s in self.spectra if s.run == run]
            means = {d: fmean(r) for d in domains if (r := [s.rank for s in mine if s.view.domain == d])}
            ranks = [f"{means[d]:.2f}" if d in means else "" for d in domains]
            lines.append((run, str(mine[0].width), *ranks, f"{fmean(means.values()):.2f}"))
        counts = sorted({s.examples for s in self.spectra})
        of = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else f"{counts[0]}"
        title = f"Singular values of the covariance of pooled features, {of} test examples a domain; {RANK}"
        return Table(title, ("run", "features", *domains, "average"), tuple(lines))


def _table(run: str, rows: Mapping[str, DomainScores]) -> Table:
    domains = tuple(next(iter(rows.values())).values)
    lines = tuple(
        (part, *(f"{100 * v:.2f}" for v in (*scores.values.values(), scores.average, scores.deviation)))
        for part, scores in rows.items()
    )
    title = f"{run}: accuracy in percent of the classifier on each kind of features"
    return Table(title, ("features", *domains, "average", "deviation"), lines)


def features(
    folders: Sequence[Path | str],
    examples: int = 500,
    images: int = 2,
    task: str | None = None,
    figures: bool = True,
    device: str | None = None,
    tell: Tell = lambda *_: None,
) -> FeatureStudy:
    """Look at the features of finished runs on the same data, domain by domain.

    Figure 1: singular values of the covariance of pooled encoder features, of at most `examples` test examples of each
    domain (ranks are comparable between equal numbers only). Table 7, for runs with feature modules: `part_accuracy`.
    With `figures` also Figure 4, t-SNE of the same features, and Figure 2, Grad-CAM of the true class for `images` test
    images of each domain at the encoder's last map. Where clients have models of their own, Figure 1 looks at each,
    Table 7 takes the mean over a domain's clients, and Figures 2 and 4 show each domain by its first client.

    Raises what `read` raises, and StateError for a domain with fewer than two test examples.
    """
    runs = read(folders, task, device, tell)
    total = sum(
        len(run.views) * (1 + (run.feature_module is not None)) + figures * (1 + (run.last_map is not None))
        for run in runs
    )
    step = Steps(total, tell)
    spectra: list[Spectrum] = []
    parts: dict[str, dict[str, DomainScores]] = {}
    embedded: list[Embedded] = []
    notes: list[str] = []
    for run in runs:
        seen: dict[DomainModel, tuple[Tensor, Tensor]] = {}
        for view in run.views:
            step(f"{run.name}: features of {view.label}")
            seen[view] = run.features(view, examples)
            spectra.append(_spectrum(run, view, seen[view][0]))
        if run.feature_module is None:
            notes.append(f"{run.name} has no feature modules, so it has no f+, f-, f* and f~")
        else:
            parts[run.name] = _accuracies(run, step)
            if run.feature_module.about.scope == "identity":
                notes.append(f"{run.name} measures its models without feature modules; here they are in")
        if figures:
            step(f"{run.name}: t-SNE")
            embedded.append(_embed(run, seen))
    heat: tuple[HeatMaps, ...] = ()
    if figures:
        notes += [f"{run.name} has no maps for Grad-CAM" for run in runs if run.last_map is None]
        heat = _heat_maps(runs, images, step)
    step.finished()
    return FeatureStudy(tuple(spectra), parts, tuple(embedded), heat, tuple(notes))


def _spectrum(run: DomainRun, view: DomainModel, features: Tensor) -> Spectrum:
    if len(features) < 2:
        raise StateError(
            f"{run.name}: domain {view.domain!r}: expected at least two test examples, found {len(features)}"
        )
    values = singular_values(features)
    return Spectrum(run.name, view, len(features), features.shape[1], values, effective_rank(values))


def _accuracies(run: DomainRun, step: Steps) -> dict[str, DomainScores]:
    """Return kind of features -> its accuracy on each domain, the mean over the domain's models."""
    each: dict[str, dict[str, list[float]]] = {part: {d: [] for d in run.domains} for part in PARTS}
    for view in run.views:
        step(f"{run.name}: accuracy of {view.label}")
        for part, accuracy in part_accuracy(run, view).items():
            each[part][view.domain].append(accuracy)
    return {part: DomainScores(run.round, {d: fmean(v) for d, v in of.items()}) for part, of in each.items()}


def _embed(run: DomainRun, seen: Mapping[DomainModel, tuple[Tensor, Tensor]]) -> Embedded:
    """Return t-SNE of each domain's features by its first client's model."""
    first = [run.first(domain) for domain in run.domains]
    x, y = (torch.cat([seen[view][i] for view in first]) for i in (0, 1))
    domains = tuple(view.domain for view in first for _ in seen[view][1])
    note = "personal models of a domain's first client" if any(view.personal for view in first) else ""
    return Embedded(run.name, embedding(x), y.numpy(), domains, note)


def _images(run: DomainRun, domain: str, count: int) -> tuple[Tensor, Tensor, Array]:
    """Return (inputs, classes, inputs as pictures) of a domain's test examples, evenly spaced."""
    part = run.part(run.first(domain)).spread(count)
    x, y = part.examples.batch(part.index, torch.device("cpu"), tasks=(run.task.name,))
    return x, y[run.task.name], pictures(part.examples, x, part.index)


def _heat_maps(runs: Sequence[DomainRun], count: int, step: Steps) -> tuple[HeatMaps, ...]:
    """Return Grad-CAM of the domains that all runs have, by each run that has maps."""
    domains = [d for d in runs[0].domains if all(d in run.domains for run in runs)]
    maps: dict[str, dict[str, tuple[Array, Array]]] = {}
    for run in runs:
        if run.last_map is not None:
            step(f"{run.name}: Grad-CAM")
            maps[run.name] = {domain: _heat(run, run.last_map, domain, count) for domain in domains}
    pictures = []
    for domain in domains if maps else ():
        _, classes, shown = _images(runs[0], domain, count)
        pictures.append(HeatMaps(domain, shown, classes.numpy(), {name: of[domain] for name, of in maps.items()}))
    return tuple(pictures)


def _heat(run: DomainRun, layer: nn.Module, domain: str, count: int) -> tuple[Array, Array]:
    """Return (heat maps for the true class, predicted classes) of a domain's images."""
    x, classes, _ = _images(run, domain, count)
    x, classes = x.to(run.device), classes.to(run.device)
    heat, logits = grad_cam(run.loaded(run.first(domain)), layer, x, run.task.name, classes)
    return heat.cpu().numpy(), logits.argmax(1).cpu().numpy()
