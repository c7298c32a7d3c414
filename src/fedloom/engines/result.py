"""The result of a run."""

from __future__ import annotations

import copy
import math
import shutil
import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor, nn

from fedloom.core.errors import StateError, parsing, unknown
from fedloom.core.grouping import nested
from fedloom.federation.rounds.build import build
from fedloom.federation.rounds.built import Built
from fedloom.federation.runs.folder import RunFolder
from fedloom.federation.runs.reader import Final, Run, frame
from fedloom.federation.runs.recorded import MODEL, verify_model
from fedloom.models.build import is_whole
from fedloom.models.nets import check_weights


@dataclass(frozen=True, repr=False)
class Result:
    """A finished run. Everything in it is read from the run folder."""

    folder: Path
    status: str
    """finished or stopped early; nothing learned, where no round had an update that could be used; gave up, where
    several rounds in a row had none."""
    built: Built | None = field(default=None, repr=False, compare=False)
    """The objects that the run was built from, where that happened in this process."""
    _: KW_ONLY
    temporary: InitVar[bool] = False
    """If true, the folder is deleted with this object."""

    def __post_init__(self, temporary: bool) -> None:
        if temporary:
            weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)

    @property
    def run(self) -> Run:
        """The run as it was recorded: rounds, final numbers, bytes."""
        return Run.read(self.folder)

    def table(self, split: str | None = None) -> str:
        """Return tasks x metrics of the final model on test data (else val), or a sentence if all are withheld."""
        run = self.run
        trouble = [run.trouble] if run.trouble else []
        if not _is_measured(run):
            return "\n".join([f"no scores: {', '.join(run.withheld)} withhold them", *trouble])
        final = _final(run, split)
        return "\n".join([*texts_of(final.values), final.caption, *trouble])

    @property
    def trouble(self) -> str:
        """Return how the run ended, unless normally, and how many updates and rounds were lost; '' if all went well."""
        return self.run.trouble

    def __repr__(self) -> str:
        trouble = self.trouble if (self.folder / "run.json").is_file() else ""
        return f"Result({str(self.folder)!r}, {self.status}{f'; {trouble}' if trouble else ''})"

    @property
    def measured(self) -> bool:
        """Return whether there are scores: nodes may withhold theirs."""
        return _is_measured(self.run)

    def to_pandas(self) -> Any:
        """Return a pandas.DataFrame with one row per number.

        Columns: seed, round, client (None: all), task, metric, split, model, value.
        """
        return frame([({}, self.run)])

    def model(self, client: str | None = None, task: str | None = None) -> nn.Module:
        """Return the final model that a client uses, in evaluation mode; without a client, the model that all share.

        It is a new module, of the user's class if the run began with a whole model. `task` is for methods with one
        model per task. Raises StateError if there is no such model.
        """
        models = trained_models(self.folder)
        if (built := self.built) is None:
            recipe, partition = RunFolder.read(self.folder)
            built = build(recipe, partition)
        if client is not None and client not in built.federation.clients:
            raise StateError(f"{self.folder}: {unknown('client', client, built.federation.clients)}")
        key = model_key(models, client, task)
        if key is None:
            known = ", ".join(sorted(models))
            what = "one model for all" if client is None else f"one model of client {client!r}"
            raise StateError(f"{self.folder}: the run has no {what}; name a client or a task. Its models: {known}")
        module = copy.deepcopy(built.modules.get(client or "", built.module))
        fill(module, models[key], self.folder, key)
        inner: nn.Module = module.encoder.net if is_whole(module) else module  # type: ignore[assignment]
        return inner.eval()

    def final(self, split: str | None = None) -> Final:
        """Return the numbers behind `table`."""
        return _final(self.run, split)

    def _repr_html_(self) -> str:
        """Return a table, curves and the place of the report, for notebooks."""
        return page(run := self.run, _final(run), self.status)


def _is_measured(run: Run) -> bool:
    return not run.withheld or any(line["metrics"] for line in run.rounds)


def _final(run: Run, split: str | None = None) -> Final:
    measured = {entry["split"] for line in run.rounds for entry in line["metrics"]}
    return run.final(split or ("val" if measured == {"val"} else "test"))


def model_key(models: Collection[str], client: str | None, task: str | None) -> str | None:
    """Return the key in `trained_models` of the model that a client (None: all) uses for a task; None without."""
    own = [] if client is None else [f"{client}/task/{task}", client]
    return next((key for key in [*own, f"task/{task}", ""] if key in models), None)


def check_model(module: nn.Module, model: Mapping[str, Tensor], folder: Path, owner: str) -> None:
    """Raise StateError where one of a run's models, `owner` in `trained_models`, is not one of the network's."""
    check_weights(model, module, f"{folder / MODEL} does not fit the recipe{owner and ': ' + owner}")


def fill(module: nn.Module, model: Mapping[str, Tensor], folder: Path, owner: str) -> None:
    """Copy one of a run's models into a network, in place. Raises what `check_model` does."""
    check_model(module, model, folder, owner)
    module.load_state_dict(model, strict=False)  # without counters of batch norms


def model_file(folder: Path | str) -> Path:
    """Return the file of a run's final models. Raises StateError if it does not exist yet or was changed."""
    path = Path(folder) / MODEL
    if not path.is_file():
        raise StateError(f"{folder} has no {MODEL}: the run has not finished")
    verify_model(Path(folder))
    return path


def trained_models(folder: Path | str) -> dict[str, dict[str, Tensor]]:
    """Return a finished run's models as state dictionaries: "" is the global one, others are clients or task/NAME.

    Raises StateError if the run has not saved a model yet, or if only its nodes have the models.
    """
    file = model_file(folder)
    with parsing(f"{file}: cannot be read"):
        tensors = load_file(file)
    if not tensors:
        raise StateError(f"{folder} has no model, because each node keeps its client's: use runs/RUN in a node's home")
    places = [(*key.rpartition("/"), tensor) for key, tensor in tensors.items()]
    return nested((owner.removeprefix("client/"), name, tensor) for owner, _, name, tensor in places)


def texts_of(scores: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return a line of text for each task, with its metrics."""
    width = max(map(len, scores), default=0)
    return [
        f"{task:<{width}}  " + "  ".join(f"{metric} {value:.4f}" for metric, value in values.items())
        for task, values in scores.items()
    ]


WIDTH, HEIGHT = 260, 110  # of a curve, in pixels


def page(run: Run, final: Final, status: str) -> str:
    """Return HTML without scripts."""
    import pandas  # it takes half a second to import

    rows = {task: {metric: f"{value:.4f}" for metric, value in of.items()} for task, of in final.values.items()}
    table = pandas.DataFrame.from_dict(rows, orient="index").to_html(na_rep="", border=0)
    history = run.history(final.split)
    curves = "".join(
        _curve(f"{judged.task}: {judged.metric}", {h.round: h.values[judged.task][judged.metric] for h in history})
        for judged in run.judged
        if all(judged.metric in h.values.get(judged.task, {}) for h in history)
    )
    report = run.folder / "report.html"
    where = f"<code>fedloom report {escape(str(run.folder))}</code> writes its page"
    if report.is_file():
        where = f'<a href="{escape(report.resolve().as_uri())}">{escape(str(report))}</a>'
    about = f"{escape(run.label)}, {escape(status)}: {escape(final.caption)}"
    return f"<p>{about}</p>{table}<div>{curves}</div><p>{where}</p>"


def _curve(title: str, points: Mapping[int, float]) -> str:
    """Return a polyline over the rounds, with the smallest and the largest value at its side."""
    known = {x: y for x, y in points.items() if math.isfinite(y)}
    if len(known) < 2:
        return ""
    left, right, low, high = min(known), max(known), min(known.values()), max(known.values())
    places: Sequence[str] = [
        f"{45 + (x - left) / (right - left) * (WIDTH - 50):.1f},"
        f"{HEIGHT - 15 - ((y - low) / (high - low) if high > low else 0.5) * (HEIGHT - 40):.1f}"
        for x, y in known.items()
    ]
    line = f'<polyline fill="none" stroke="#1f77b4" stroke-width="1.5" points="{" ".join(places)}"/>'
    texts = ((5, 14, title), (2, 28, f"{high:.3g}"), (2, HEIGHT - 12, f"{low:.3g}"), (45, HEIGHT - 1, f"round {left}"))
    marks = [f'<text x="{x}" y="{y}" font-size="10" fill="currentColor">{escape(text)}</text>' for x, y, text in texts]
    marks.append(f'<text x="{WIDTH - 30}" y="{HEIGHT - 1}" font-size="10" fill="currentColor">{right}</text>')
    return f'<svg width="{WIDTH}" height="{HEIGHT}" role="img">{line}{"".join(marks)}</svg>'
