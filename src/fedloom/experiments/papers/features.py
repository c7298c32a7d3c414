"""Features of a finished run's encoder in each domain (F2DC, Figures 1, 2 and 4, Table 7): `fedloom papers features`.

`singular_values`, `embedding`, `grad_cam` and `part_accuracy` are the four things to look at, and `features` looks at
all of them, for several runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate, relu

from fedloom.core.errors import StateError, choices, writing
from fedloom.core.lazy import need
from fedloom.core.legend import between
from fedloom.data.drawing import NEAR_TO_FAR, Cell, grid, pictures, ramp
from fedloom.data.drawing import save as save_sheet
from fedloom.experiments.export.finished import Finished, Step, Tell, open_runs, steps
from fedloom.federation.rounds.built import Built
from fedloom.federation.rounds.federation import BuiltClient, Part
from fedloom.federation.rounds.worker import check_device
from fedloom.methods.f2dc.rules import FeatureModule, decouple, gumbel_mask, map_channels
from fedloom.models.changes import Linearised
from fedloom.models.multitask import MultiTask
from fedloom.models.tasks.task import Task
from fedloom.study.agreement import Array
from fedloom.study.charts import COLORS, INK, Chart, concat, lines, save, scatter
from fedloom.study.grid import write
from fedloom.study.output import Records, Table
from fedloom.study.results import DomainScores
from fedloom.training.flat import pooled

BATCH = 64
"""Examples that go through a network together."""
PARTS = ("f+", "f-", "f*", "f~")
"""Domain-robust, domain-related, corrected and fused features, as in Table 7."""
SPECTRUM, EMBEDDING, MAPS = "singular-values.png", "tsne.png", "grad-cam.png"
RANK = "effective rank: exp of the entropy of the singular values, divided by their sum"
_LEAST = 4  # examples for t-SNE
_DECADES = 8  # singular values further below the largest are rounding
TWENTY = (*COLORS, "#aec7e8", "#ffbb78", "#98df8a", "#ff9896", "#c5b0d5", "#c49c94", "#f7b6d2", "#c7c7c7", "#dbdb8d",
          "#9edae5", "#393b79", "#637939")  # fmt: skip
"""Colours of classes."""


@torch.inference_mode()
def encoded(encoder: nn.Module, part: Part, task: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return (pooled features n x D of a part's examples, their labels of the task n), both on the CPU."""
    features, labels = [], []
    for index in part.index.split(BATCH):
        x, y = part.examples.batch(index, device, tasks=(task,))
        features.append(pooled(encoder(x)).float().cpu())
        labels.append(y[task].cpu())
    return torch.cat(features), torch.cat(labels)


@dataclass(frozen=True, eq=False)
class DomainModel:
    """A model on the test examples of a domain. `owner` is its key among the run's models, "" the global one's."""

    domain: str
    client: BuiltClient
    owner: str
    personal: bool

    @property
    def label(self) -> str:
        """The domain; with the client, where the model is that client's own."""
        return f"{self.domain}, {self.client.id}" if self.personal else self.domain


@dataclass(frozen=True, eq=False)
class DomainRun(Finished):
    """A finished run whose clients have domains, and the task that is looked at."""

    task: Task
    device: torch.device
    last_map: nn.Module | None
    """The encoder's module that gives its last map; None where there is none, or the encoder is linearised."""
    feature_module: FeatureModule | None
    """The attached feature module that is passed last; None where there is none."""

    @cached_property
    def views(self) -> tuple[DomainModel, ...]:
        """One model per domain, in the order of the data set; one per client where clients have models of their own."""
        chosen = []
        able = [client for client in self.built.federation.clients.values() if self.task.name in client.tasks]
        for domain in self.built.dataset.domains:
            views = [self._view(domain, client) for client in able if client.domain == domain]
            chosen += views if any(view.personal for view in views) else views[:1]
        return tuple(chosen)

    @property
    def domains(self) -> tuple[str, ...]:
        """Domains that clients of the task have."""
        return tuple(dict.fromkeys(view.domain for view in self.views))

    def first(self, domain: str) -> DomainModel:
        """Return the view of a domain's first client."""
        return next(view for view in self.views if view.domain == domain)

    def part(self, view: DomainModel) -> Part:
        """Return the domain's test examples that have a label of the task."""
        return view.client.test.of(self.task.name)

    def features(self, view: DomainModel, most: int) -> tuple[Tensor, Tensor]:
        """Return (pooled features n x D of at most so many test examples, evenly spaced; labels n), on the CPU."""
        return encoded(self.network(view.owner).encoder, self.part(view).spread(most), self.task.name, self.device)

    def _view(self, domain: str, client: BuiltClient) -> DomainModel:
        owner = self.owner(client.id, self.task.name)
        return DomainModel(domain, client, owner, personal=owner in (client.id, f"{client.id}/task/{self.task.name}"))


def read(
    folders: Sequence[Path | str], task: str | None = None, device: str | None = None, tell: Tell = lambda *_: None
) -> list[DomainRun]:
    """Open finished runs on the same data; see `open_runs` for the errors.

    `task` names the classification task to look at, by default the only one; `device` is each run's own by default.
    """
    runs = []
    for run in open_runs(folders, tell):
        chosen = _task(run, task)
        where = torch.device(check_device(device or run.built.recipe.runtime.devices[0]))
        last_map, module = _places(run.built)
        run.built.module.to(where)
        runs.append(DomainRun(**vars(run), task=chosen, device=where, last_map=last_map, feature_module=module))
    return runs


def _task(run: Finished, name: str | None) -> Task:
    """Return the task that is looked at, whose clients have domains."""
    folder, federation = run.folder, run.built.federation
    tasks = {task.name: task for task in federation.tasks}
    if name is not None and name not in tasks:
        raise StateError(f"{folder}: no task {name!r}.{choices('Tasks', name, tasks)}")
    chosen = [task for task in tasks.values() if task.kind == "classification" and name in (None, task.name)]
    if not chosen:
        kinds = ", ".join(f"{task.name} ({task.kind})" for task in tasks.values() if name in (None, task.name))
        raise StateError(f"{folder}: expected a task with one class per example, found {kinds}")
    if len(chosen) > 1:
        raise StateError(
            f"{folder}: the run has several tasks; choose one with --task: {', '.join(t.name for t in chosen)}"
        )
    for client in federation.clients.values():
        if client.domain is None and chosen[0].name in client.tasks:
            raise StateError(f"{folder}: client {client.id!r} has no domain; expected a partition by domains")
    return chosen[0]


def _places(built: Built) -> tuple[nn.Module | None, FeatureModule | None]:
    """Return (the module of the encoder's last map, the feature module that is passed last)."""
    encoder = built.module.encoder
    if isinstance(encoder, Linearised):
        return None, None
    passed: list[FeatureModule] = []
    attached = [m for m in encoder.modules() if isinstance(m, FeatureModule)]
    handles = [m.register_forward_hook(lambda module, *_: passed.append(module)) for m in attached]
    maps = map_channels(encoder, built.dataset.input_shape)
    for handle in handles:
        handle.remove()
    return encoder.get_submodule(list(maps)[-1]) if maps else None, passed[-1] if passed else None


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


def singular_values(features: Tensor) -> Array:
    """Return singular values of the covariance matrix of features (n x D), largest first: min(n, D) of them.

    The covariance divides by n - 1. Values that are not given are 0. ValueError for fewer than two examples.
    """
    if len(features) < 2:
        raise ValueError(f"singular_values: expected at least two examples, found {len(features)}")
    centred = features.double() - features.double().mean(0)
    return (torch.linalg.svdvals(centred) ** 2 / (len(features) - 1)).numpy()


def effective_rank(values: Any) -> float:
    """Return exp of the entropy of normalised singular values (Roy and Vetterli, 2007); 0 where all are 0."""
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
            (gradient,) = torch.autograd.grad(logits.gather(1, classes[:, None]).sum(), maps[-1])
    finally:
        handle.remove()
    weights = gradient.mean((2, 3), keepdim=True)
    heat = relu((weights * maps[-1].detach()).sum(1, keepdim=True))
    return interpolate(heat, size=x.shape[2:], mode="bilinear", align_corners=False)[:, 0], logits.detach()


def part_accuracy(run: DomainRun, view: DomainModel) -> dict[str, float]:
    """Return f+, f-, f* and f~ -> the accuracy of the run's own classifier on them, over a domain's test examples.

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

    model, part, name = run.network(view.owner), run.part(view), run.task.name
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


def embedding(features: Tensor) -> Array:
    """Return t-SNE of features (n x D) in the plane (n x 2). ValueError for fewer than _LEAST examples."""
    if len(features) < _LEAST:
        raise ValueError(f"embedding: expected at least four examples, found {len(features)}")
    library = need("sklearn.manifold", "report")
    perplexity = min(30.0, (len(features) - 1) / 3)
    tsne = library.TSNE(2, perplexity=perplexity, init="pca", learning_rate="auto", random_state=0)
    return np.asarray(tsne.fit_transform(features.numpy()))


@dataclass(frozen=True, eq=False)
class FeatureStudy:
    """The result of `features`. `parts` holds Table 7 by run, part and domain, `notes` what was left out and why."""

    spectra: tuple[Spectrum, ...]
    parts: Mapping[str, Mapping[str, DomainScores]]
    embedded: tuple[Chart, ...]
    """t-SNE of each run's features (Figure 4)."""
    heat: Any
    """The picture of Grad-CAM (Figure 2), None without."""
    notes: tuple[str, ...]

    def to_text(self) -> str:
        """Return effective ranks by run and domain, then Table 7 of every run with feature modules, then notes."""
        texts = [self._ranks().to_text(), *(_table(run, rows).to_text() for run, rows in self.parts.items())]
        return "\n".join(texts) + "".join(f"note: {note}\n" for note in self.notes)

    def write(self, folder: Path) -> list[Path]:
        """Write singular-values.csv, parts.csv (with feature modules), singular-values.png, and where there are such
        figures tsne.png and grad-cam.png.

        Raises UserError where the folder cannot be written."""
        figures: dict[str, Any] = {SPECTRUM: _spectra(self.spectra)}
        if self.embedded:
            title = "t-SNE of pooled features; the large points are the classes' means"
            figures[EMBEDDING] = concat(self.embedded, 3, title)
        tables = {f"{name}.csv": records.to_csv() for name, records in self.records().items()}
        with writing(folder):
            write(folder, tables)
        for name, figure in figures.items():
            save(figure, folder / name)
        if self.heat is not None:
            save_sheet(self.heat, folder / MAPS)
        return [folder / name for name in (*tables, *figures, *([MAPS] if self.heat is not None else []))]

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
    step = steps(total, tell)
    spectra: list[Spectrum] = []
    parts: dict[str, dict[str, DomainScores]] = {}
    embedded: list[Chart] = []
    notes: list[str] = []
    for run in runs:
        seen: dict[DomainModel, tuple[Tensor, Tensor]] = {}
        for view in run.views:
            step(f"{run.name}: features of {view.label}")
            x, _ = seen[view] = run.features(view, examples)
            if len(x) < 2:
                raise StateError(
                    f"{run.name}: domain {view.domain!r}: expected at least two test examples, found {len(x)}"
                )
            values = singular_values(x)
            spectra.append(Spectrum(run.name, view, len(x), x.shape[1], values, effective_rank(values)))
        if run.feature_module is None:
            notes.append(f"{run.name} has no feature modules, so it has no f+, f-, f* and f~")
        else:
            parts[run.name] = _accuracies(run, step)
            if run.feature_module.about.scope == "identity":
                notes.append(f"{run.name} measures its models without feature modules; here they are in")
        count = sum(len(seen[run.first(domain)][0]) for domain in run.domains)
        if figures and count < _LEAST:
            notes.append(f"{run.name} has no t-SNE: {count} test examples found, expected at least {_LEAST}")
        elif figures:
            step(f"{run.name}: t-SNE")
            embedded.append(_embedded(run, seen))
    heat = None
    if figures:
        notes += [f"{run.name} has no maps for Grad-CAM" for run in runs if run.last_map is None]
        heat = _heat_maps(runs, images, step)
    step("")
    return FeatureStudy(tuple(spectra), parts, tuple(embedded), heat, tuple(notes))


def _accuracies(run: DomainRun, step: Step) -> dict[str, DomainScores]:
    """Return kind of features -> its accuracy on each domain, the mean over the domain's models."""
    each: dict[str, dict[str, list[float]]] = {part: {d: [] for d in run.domains} for part in PARTS}
    for view in run.views:
        step(f"{run.name}: accuracy of {view.label}")
        for part, accuracy in part_accuracy(run, view).items():
            each[part][view.domain].append(accuracy)
    return {part: DomainScores(run.round, {d: fmean(v) for d, v in of.items()}) for part, of in each.items()}


def _embedded(run: DomainRun, seen: Mapping[DomainModel, tuple[Tensor, Tensor]]) -> Chart:
    """Draw t-SNE of each domain's features by its first client's model; the large points are means of classes."""
    first = [run.first(domain) for domain in run.domains]
    x, y = (torch.cat([seen[view][i] for view in first]) for i in (0, 1))
    places, classes = embedding(x), y.numpy()
    domains = [view.domain for view in first for _ in seen[view][1]]
    points = [
        {"name": f"class {c}, {domain}", "x": float(x), "y": float(y), "class": str(c), "domain": domain}
        for (x, y), c, domain in zip(places, classes, domains, strict=True)
    ]
    centres = [(c, places[classes == c].mean(0)) for c in np.unique(classes)]
    means = [{"x": float(x), "y": float(y), "class": str(c)} for c, (x, y) in centres]
    title = run.name + ": personal models of a domain's first client" * any(view.personal for view in first)
    look: dict[str, Any] = {"color_by": "class", "shape_by": "domain", "size": 12, "axes": False, "colors": TWENTY}
    chart = scatter(points, "", "", title=title, **look)
    mark = {"type": "point", "filled": True, "size": 130, "stroke": INK, "opacity": 1}
    color = {"color": chart["layer"][0]["encoding"]["color"]}
    chart["layer"].append({"data": {"values": means}, "mark": mark, "encoding": color})
    return chart


def _images(run: DomainRun, domain: str, count: int) -> tuple[Tensor, Tensor, Array]:
    """Return (inputs, classes, inputs as pictures) of a domain's test examples, evenly spaced."""
    part = run.part(run.first(domain)).spread(count)
    x, y = part.examples.batch(part.index, torch.device("cpu"), tasks=(run.task.name,))
    return x, y[run.task.name], pictures(part.examples, x, part.index)


def _heat_maps(runs: Sequence[DomainRun], count: int, step: Step) -> Any:
    """Draw Grad-CAM of the domains that all runs have: one row per test image, with the image and each run's map over
    it, with the class that the run answers. None where no run has maps, or no domain is in all."""
    domains = [d for d in runs[0].domains if all(d in run.domains for run in runs)]
    maps: dict[str, dict[str, tuple[Array, Array]]] = {}
    for run in runs:
        if run.last_map is not None:
            step(f"{run.name}: Grad-CAM")
            maps[run.name] = {domain: _heat(run, run.last_map, domain, count) for domain in domains}
    rows: list[list[Cell]] = []
    for domain in domains if maps else ():
        _, classes, shown = _images(runs[0], domain, count)
        for i, (image, true) in enumerate(zip(shown, classes.tolist(), strict=True)):
            row: list[Cell] = [(image, f"{domain}, class {true}")]
            for heat, answers in (of[domain] for of in maps.values()):
                share = heat[i] / max(float(heat[i].max()), 1e-12)
                over = 0.5 * image + 0.5 * ramp(share, np.ones_like(share, dtype=bool), NEAR_TO_FAR[::-1])
                wrong = "" if answers[i] == true else ", wrong"
                row.append((over.astype(np.uint8), f"answers {answers[i]}{wrong}"))
            rows.append(row)
    if not rows:
        return None
    legend = between("nothing", "most", NEAR_TO_FAR[::-1])
    return grid(["image", *maps], rows, "Grad-CAM of the true class at the last map", {"what it looks at": legend})


def _heat(run: DomainRun, layer: nn.Module, domain: str, count: int) -> tuple[Array, Array]:
    """Return (heat maps for the true class, predicted classes) of a domain's images."""
    x, classes, _ = _images(run, domain, count)
    x, classes = x.to(run.device), classes.to(run.device)
    heat, logits = grad_cam(run.network(run.first(domain).owner), layer, x, run.task.name, classes)
    return heat.cpu().numpy(), logits.argmax(1).cpu().numpy()
