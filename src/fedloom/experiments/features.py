"""What a finished run's encoder sees in each domain (F2DC, Figures 1, 2 and 4, Table 7): `fedloom features`.

`read` opens run folders; `singular_values`, `embedding`, `grad_cam` and `part_accuracy` are the four things to look at,
and `features` does so for several runs.
"""

from __future__ import annotations

import csv
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

from fedloom.data.preview import pictures
from fedloom.errors import StateError, UserError, nearest
from fedloom.export.finished import Finished, Tell, open_runs
from fedloom.extras import need
from fedloom.models.linearised import Linearised
from fedloom.models.multitask import MultiTask
from fedloom.rounds.built import Built
from fedloom.rounds.federation import Client, Part
from fedloom.rounds.worker import check_device
from fedloom.study.papers.domains import DomainScores
from fedloom.study.tables.sheet import Sheet
from fedloom.tasks.task import Task
from fedloom.training.decoupling import decouple, gumbel_mask
from fedloom.training.feature_modules import FeatureModule, map_channels
from fedloom.training.features import pooled

PARTS = ("f+", "f-", "f*", "f~")
"""Domain-robust, domain-related, corrected and fused features, as in Table 7."""
SPECTRUM, EMBEDDING, MAPS = "singular-values.png", "tsne.png", "grad-cam.png"
RANK = "effective rank: exp of the entropy of the singular values, divided by their sum"
_BATCH = 64
_DECADES = 8  # singular values further below the largest are rounding
_MARKERS = "os^Dvp<>hX"

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, eq=False)
class View:
    """A model on the test examples of a domain. `owner` is its key among the run's models, "" the global one's."""

    domain: str
    client: Client
    owner: str
    personal: bool

    @property
    def label(self) -> str:
        """The domain, with the client where the model is the client's own."""
        return f"{self.domain}, {self.client.id}" if self.personal else self.domain


@dataclass(frozen=True, eq=False)
class Trained(Finished):
    """A finished run whose clients have domains, and the task that is looked at."""

    task: Task
    device: torch.device
    last_map: nn.Module | None
    """The encoder's module that gives its last map; None where there is none, or the encoder is linearised."""
    feature_module: FeatureModule | None
    """The attached feature module that is passed last; None where there is none."""

    @cached_property
    def views(self) -> tuple[View, ...]:
        """One for each domain, in the order of the data set, or for each of its clients that has a model of its own."""
        found = []
        for domain in self.built.dataset.domains:
            held = [
                c for c in self.built.federation.clients.values() if c.domain == domain and self.task.name in c.tasks
            ]
            views = [self._view(domain, client) for client in held]
            found += views if any(view.personal for view in views) else views[:1]
        return tuple(found)

    @property
    def domains(self) -> tuple[str, ...]:
        """Domains that clients of the task have."""
        return tuple(dict.fromkeys(view.domain for view in self.views))

    def first(self, domain: str) -> View:
        """The view of a domain's first client."""
        return next(view for view in self.views if view.domain == domain)

    def loaded(self, view: View) -> MultiTask:
        """The network with the view's model in it, in evaluation mode."""
        own = self.built.module.state_dict()
        for name, tensor in self.models[view.owner].items():  # load_state_dict wants a counter of every batch norm
            own[name].copy_(tensor)
        return self.built.module.eval()

    def part(self, view: View) -> Part:
        """The domain's test examples that have a label of the task."""
        return view.client.test.of(self.task.name)

    def features(self, view: View, most: int) -> tuple[Tensor, Tensor]:
        """(pooled features n x D of at most so many test examples, evenly spaced; their labels n), on the CPU."""
        encoder = self.loaded(view).encoder
        part = self.part(view)
        x, labels = [], []
        with torch.inference_mode():
            for index in _spread(part, most).split(_BATCH):
                batch, y = part.examples.batch(index, self.device, tasks=(self.task.name,))
                x.append(pooled(encoder(batch)).float().cpu())
                labels.append(y[self.task.name].cpu())
        return torch.cat(x), torch.cat(labels)

    def _view(self, domain: str, client: Client) -> View:
        own, name = client.id, self.task.name
        keys = {f"{own}/task/{name}": True, own: True, f"task/{name}": False, "": False}
        owner, personal = next((key, mine) for key, mine in keys.items() if key in self.models)
        return View(domain, client, owner, personal)


def read(
    folders: Sequence[Path | str], task: str | None = None, device: str | None = None, tell: Tell = lambda *_: None
) -> list[Trained]:
    """Open finished runs on the same data, called by their methods; by their place too, where some have the same.

    `task` names the classification task to look at, by default the only one; `device` is the first run's by default.
    Raises StateError where a run has not finished, its clients have no domains, the task is no classification, the
    model is not what it was, or runs have different data.
    """
    found = []
    for folder, run in zip(map(Path, folders), open_runs(folders, tell), strict=True):
        built = run.built
        chosen = _task(folder, built, task)
        own = built.recipe.runtime.device
        where = torch.device(check_device(device or (own if isinstance(own, str) else own[0])))
        last_map, module = _places(built)
        built.module.to(where)
        found.append(Trained(run.name, run.round, built, run.models, chosen, where, last_map, module))
    return found


def _task(folder: Path, built: Built, name: str | None) -> Task:
    """The task that is looked at, whose clients have domains."""
    tasks = {task.name: task for task in built.federation.tasks}
    if name is not None and name not in tasks:
        raise StateError(f"{folder}: no task {name!r}.{nearest(name, tasks)} Tasks: {', '.join(tasks)}")
    chosen = [task for task in tasks.values() if task.kind == "classification" and name in (None, task.name)]
    if not chosen:
        kinds = ", ".join(f"{task.name} ({task.kind})" for task in tasks.values() if name in (None, task.name))
        raise StateError(f"{folder}: expected a task with one class per example, found {kinds}")
    if len(chosen) > 1:
        raise StateError(f"{folder}: has several tasks, name one with --task: {', '.join(t.name for t in chosen)}")
    for client in built.federation.clients.values():
        if client.domain is None and chosen[0].name in client.tasks:
            raise StateError(f"{folder}: client {client.id!r} has no domain; the partition must be by domains")
    return chosen[0]


def _places(built: Built) -> tuple[nn.Module | None, FeatureModule | None]:
    """(the module of the encoder's last map, the feature module that is passed last)."""
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


def _spread(part: Part, most: int) -> Tensor:
    """Positions of at most so many examples, evenly spaced."""
    return part.index[torch.linspace(0, len(part) - 1, min(most, len(part))).long()]


def singular_values(features: Tensor) -> Array:
    """Singular values of the covariance matrix of features (n x D), largest first: min(n, D) of them.

    The covariance divides by n - 1. Values that are not given are 0. ValueError for fewer than two examples.
    """
    if len(features) < 2:
        raise ValueError(f"singular_values: expected at least two examples, found {len(features)}")
    centred = features.double() - features.double().mean(0)
    return (torch.linalg.svdvals(centred) ** 2 / (len(features) - 1)).numpy()


def effective_rank(values: Any) -> float:
    """exp of the entropy of singular values divided by their sum (Roy and Vetterli, 2007); 0 where all are 0.

    Between 1 and the rank; the rank exactly where all values above 0 are equal.
    """
    values = np.asarray(values, float)
    shares = values[values > 0] / values.sum() if values.any() else np.zeros(0)
    return float(np.exp(-(shares * np.log(shares)).sum())) if len(shares) else 0.0


@dataclass(frozen=True, eq=False)
class Spectrum:
    """The covariance of one view's pooled features (Figure 1): of `examples` test examples, `width` features wide."""

    run: str
    view: View
    examples: int
    width: int
    values: Array
    """Singular values, largest first."""

    @property
    def rank(self) -> float:
        """See `effective_rank`."""
        return effective_rank(self.values)


def grad_cam(model: MultiTask, layer: nn.Module, x: Tensor, task: str, classes: Tensor) -> tuple[Tensor, Tensor]:
    """(heat maps B x H x W, all at least 0, as large as the inputs; the logits B x C) by Grad-CAM.

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


def part_accuracy(run: Trained, view: View) -> dict[str, float]:
    """f+, f-, f* and f~ -> the accuracy of the run's own classifier on them, over all of a domain's test examples.

    They are those of the feature module that is passed last, and take the place of its output; its mask is without
    noise. f~ is what the run measures unless it has noise in evaluation, or leaves its modules out (scope identity).
    Raises StateError where the run has no feature modules.
    """
    attached = run.feature_module
    if attached is None:
        raise StateError(f"{run.name}: the run has no feature modules")

    def parts(module: FeatureModule, inputs: tuple[Tensor], _output: Tensor) -> Tensor:
        (f,) = inputs
        mask = gumbel_mask(module.decoupler(f), module.sigma)
        found = decouple(f, mask, module.corrector or torch.zeros_like)
        return torch.cat([found.robust, found.related, found.corrected, found.fused])

    model, part, name = run.loaded(view), run.part(view), run.task.name
    metrics = [run.task.metric() for _ in PARTS]
    handle = attached.register_forward_hook(parts)
    try:
        with torch.inference_mode():
            for index in part.index.split(_BATCH):
                x, y = part.examples.batch(index, run.device, tasks=(name,))
                for metric, output in zip(metrics, model(x, (name,))[name].chunk(len(PARTS)), strict=True):
                    metric.update(output, y[name])
    finally:
        handle.remove()
    return {label: metric.compute()["accuracy"] for label, metric in zip(PARTS, metrics, strict=True)}


def embedding(features: Tensor, seed: int = 0) -> Array:
    """t-SNE of features (n x D) in the plane (n x 2), from their principal components; needs scikit-learn.

    The perplexity is 30, or a third of n - 1 where that is less. ValueError for fewer than four examples.
    """
    if len(features) < 4:
        raise ValueError(f"embedding: expected at least four examples, found {len(features)}")
    library = need("sklearn.manifold", "digits")
    perplexity = min(30.0, (len(features) - 1) / 3)
    tsne = library.TSNE(2, perplexity=perplexity, init="pca", learning_rate="auto", random_state=seed)
    return np.asarray(tsne.fit_transform(features.numpy()))


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


@dataclass(frozen=True, eq=False)
class Features:
    """What `features` found. `parts` holds Table 7 by run, part and domain, `notes` what was left out and why."""

    spectra: tuple[Spectrum, ...]
    parts: Mapping[str, Mapping[str, DomainScores]]
    embedded: tuple[Embedded, ...]
    heat: tuple[HeatMaps, ...]
    notes: tuple[str, ...]

    def to_text(self) -> str:
        """Effective ranks by run and domain, then Table 7 of every run with feature modules, then notes."""
        texts = [self._ranks().to_text(), *(_table(run, rows).to_text() for run, rows in self.parts.items())]
        return "\n".join(texts) + "".join(f"note: {note}\n" for note in self.notes)

    def write(self, folder: Path) -> list[Path]:
        """singular-values.csv, parts.csv (with feature modules), and the figures singular-values.png, tsne.png and
        grad-cam.png. Raises UserError where the folder cannot be written."""
        figures = {SPECTRUM: _draw_spectra(self.spectra), EMBEDDING: _draw_embedded(self.embedded)}
        if self.heat:
            figures[MAPS] = _draw_heat(self.heat)
        tables = {"singular-values.csv": self._values()}
        if self.parts:
            tables["parts.csv"] = self._accuracies()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for name, rows in tables.items():
                with open(folder / name, "w", encoding="utf-8", newline="") as file:
                    csv.writer(file, lineterminator="\n").writerows(rows)
            for name, figure in figures.items():
                figure.savefig(folder / name, dpi=150)
        except OSError as error:
            raise UserError(f"{folder}: {error.strerror}") from None
        return [folder / name for name in (*tables, *figures)]

    def _values(self) -> list[tuple[Any, ...]]:
        head = ("run", "domain", "client", "examples", "features", "effective rank", "number", "singular value")
        rows: list[tuple[Any, ...]] = [head]
        for s in self.spectra:
            about = (s.run, s.view.domain, s.view.client.id if s.view.personal else "", s.examples, s.width, s.rank)
            rows += [(*about, number, float(value)) for number, value in enumerate(s.values, 1)]
        return rows

    def _accuracies(self) -> list[tuple[Any, ...]]:
        rows: list[tuple[Any, ...]] = [("run", "features", "domain", "accuracy")]
        for run, scores in self.parts.items():
            rows += [(run, part, d, value) for part, by in scores.items() for d, value in by.values.items()]
        return rows

    def _ranks(self) -> Sheet:
        domains = tuple(dict.fromkeys(s.view.domain for s in self.spectra))
        lines = []
        for run in dict.fromkeys(s.run for s in self.spectra):
            mine = [s for s in self.spectra if s.run == run]
            means = {d: fmean(r) for d in domains if (r := [s.rank for s in mine if s.view.domain == d])}
            width = str(mine[0].width)
            lines.append(
                (
                    run,
                    width,
                    *(f"{means[d]:.2f}" if d in means else "" for d in domains),
                    f"{fmean(means.values()):.2f}",
                )
            )
        counts = sorted({s.examples for s in self.spectra})
        of = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else f"{counts[0]}"
        title = f"Singular values of the covariance of pooled features, {of} test examples a domain; {RANK}"
        return Sheet(title, ("run", "features", *domains, "average"), tuple(lines))


def _table(run: str, rows: Mapping[str, DomainScores]) -> Sheet:
    domains = tuple(next(iter(rows.values())).values)
    lines = tuple(
        (part, *(f"{100 * v:.2f}" for v in (*scores.values.values(), scores.average, scores.deviation)))
        for part, scores in rows.items()
    )
    title = f"{run}: accuracy in percent of the classifier on each kind of features"
    return Sheet(title, ("features", *domains, "average", "deviation"), lines)


def features(
    folders: Sequence[Path | str],
    examples: int = 500,
    images: int = 2,
    task: str | None = None,
    figures: bool = True,
    device: str | None = None,
    tell: Tell = lambda *_: None,
) -> Features:
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
    done = 0
    spectra: list[Spectrum] = []
    parts: dict[str, dict[str, DomainScores]] = {}
    embedded: list[Embedded] = []
    notes: list[str] = []

    def step(what: str) -> None:
        nonlocal done
        tell(done, total, what)
        done += 1

    for run in runs:
        seen: dict[View, tuple[Tensor, Tensor]] = {}
        for view in run.views:
            step(f"{run.name}: features of {view.label}")
            x, _ = seen[view] = run.features(view, examples)
            if len(x) < 2:
                raise StateError(
                    f"{run.name}: domain {view.domain!r}: expected two or more test examples, found {len(x)}"
                )
            spectra.append(Spectrum(run.name, view, len(x), x.shape[1], singular_values(x)))
        if run.feature_module is None:
            notes.append(f"{run.name} has no feature modules, so it has no f+, f-, f* and f~")
        else:
            accuracy: dict[View, dict[str, float]] = {}
            for view in run.views:
                step(f"{run.name}: accuracy of {view.label}")
                accuracy[view] = part_accuracy(run, view)
            parts[run.name] = {part: _by_domain(run, part, accuracy) for part in PARTS}
            if run.feature_module.bypass:
                notes.append(f"{run.name} measures its models without feature modules; here they are in")
        if figures:
            step(f"{run.name}: t-SNE")
            embedded.append(_embed(run, seen))
    heat: dict[str, dict[str, tuple[Array, Array]]] = {}
    shown = tuple(d for d in runs[0].domains if all(d in run.domains for run in runs))
    for run in runs if figures else ():
        if run.last_map is None:
            notes.append(f"{run.name} has no maps for Grad-CAM")
            continue
        step(f"{run.name}: Grad-CAM")
        for domain in shown:
            heat.setdefault(domain, {})[run.name] = _heat(run, domain, images)
    tell(total, total, "")
    return Features(tuple(spectra), parts, tuple(embedded), _sheets(runs[0], heat, images), tuple(notes))


def _by_domain(run: Trained, part: str, accuracy: Mapping[View, Mapping[str, float]]) -> DomainScores:
    """The mean over the views of each domain."""
    each = {d: [a[part] for view, a in accuracy.items() if view.domain == d] for d in run.domains}
    return DomainScores(run.round, {d: fmean(values) for d, values in each.items()})


def _embed(run: Trained, seen: Mapping[View, tuple[Tensor, Tensor]]) -> Embedded:
    """t-SNE of each domain's features by its first client's model."""
    first = [run.first(domain) for domain in run.domains]
    x, y = (torch.cat([seen[view][i] for view in first]) for i in (0, 1))
    domains = tuple(view.domain for view in first for _ in seen[view][1])
    note = "personal models of a domain's first client" if any(view.personal for view in first) else ""
    return Embedded(run.name, embedding(x), y.numpy(), domains, note)


def _images(run: Trained, domain: str, count: int) -> tuple[Tensor, Tensor, Array]:
    """(inputs, classes, inputs as pictures) of a domain's test examples, evenly spaced."""
    part = run.part(run.first(domain))
    index = _spread(part, count)
    x, y = part.examples.batch(index, torch.device("cpu"), tasks=(run.task.name,))
    return x, y[run.task.name], pictures(part.examples, x, index)


def _heat(run: Trained, domain: str, count: int) -> tuple[Array, Array]:
    """(heat maps for the true class, predicted classes) of a domain's images."""
    assert run.last_map is not None
    x, classes, _ = _images(run, domain, count)
    x, classes = x.to(run.device), classes.to(run.device)
    heat, logits = grad_cam(run.loaded(run.first(domain)), run.last_map, x, run.task.name, classes)
    return heat.cpu().numpy(), logits.argmax(1).cpu().numpy()


def _sheets(run: Trained, heat: Mapping[str, Mapping[str, tuple[Array, Array]]], count: int) -> tuple[HeatMaps, ...]:
    found = []
    for domain, maps in heat.items():
        _, classes, shown = _images(run, domain, count)
        found.append(HeatMaps(domain, shown, classes.numpy(), maps))
    return tuple(found)


def _figure(rows: int, columns: int, width: float, height: float, **options: Any) -> tuple[Any, Any]:
    """(figure, its axes rows x columns) with panels of a size in inches."""
    figure = need("matplotlib.figure", "report").Figure(
        figsize=(width * columns, height * rows + 0.5), layout="constrained"
    )
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def _draw_spectra(spectra: Sequence[Spectrum]) -> Any:
    """A panel a run, a line a view, a colour a domain."""
    runs = list(dict.fromkeys(s.run for s in spectra))
    colors = {domain: f"C{i % 10}" for i, domain in enumerate(dict.fromkeys(s.view.domain for s in spectra))}
    figure, axes = _figure(1, len(runs), 4.2, 3.6, sharey=True)
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
    figure.suptitle(f"Singular values of the covariance of pooled features\n{RANK}", fontsize=9)
    return figure


def _draw_embedded(embedded: Sequence[Embedded]) -> Any:
    """A panel a run: a colour a class, a marker a domain, and a star at the mean of each class."""
    figure, axes = _figure(1, len(embedded), 4.2, 4.2)
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
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=6, fontsize=7)
    figure.suptitle("t-SNE of pooled features; stars are the classes' means", fontsize=9)
    return figure


def _draw_heat(heat: Sequence[HeatMaps]) -> Any:
    """A row a test image; columns are the image and each run's map over it, with the class that it answers."""
    runs = list(heat[0].maps)
    figure, axes = _figure(sum(len(h.images) for h in heat), 1 + len(runs), 1.7, 1.9)
    rows = iter(axes)
    for h in heat:
        for i, (image, true) in enumerate(zip(h.images, h.classes, strict=True)):
            row = next(rows)
            row[0].imshow(image)
            row[0].set_title(f"{h.domain}, class {true}", fontsize=7)
            for panel, run in zip(row[1:], runs, strict=True):
                maps, answers = h.maps[run]
                panel.imshow(image)
                panel.imshow(maps[i], cmap="jet", alpha=0.45, vmin=0, vmax=max(float(maps[i].max()), 1e-12))
                panel.set_title(f"{run}: {answers[i]}", fontsize=7, color="black" if answers[i] == true else "red")
            for panel in row:
                panel.set_axis_off()
    figure.suptitle("Grad-CAM of the true class at the last map; red: a wrong answer", fontsize=9)
    return figure
