"""Trackers, which are sent each round's numbers; the files of the run folder hold all of them anyway."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from fedloom.core.errors import UserError
from fedloom.core.extras import need
from fedloom.federation.recipes.schema import Recipe
from fedloom.federation.runs.checkpoint import write_text
from fedloom.federation.runs.reader import Run, number_of

MEMORY = "track.json"
"""The file of a run folder that maps a tracker to the id of the run there."""

_PARAMS, _METRICS, _LONGEST = 100, 1000, 6000  # MLflow's limits: two of a request, and the length of a parameter


class Tracker(Protocol):
    """Is sent each round's line of metrics.jsonl and of bytes.jsonl, once they are written."""

    def round(self, line: Mapping[str, Any], traffic: Mapping[str, Any]) -> None: ...
    def close(self, ok: bool = True) -> None: ...


class TensorBoard:
    """Writes events to the folder `tensorboard` of a run: means over clients, bytes, seconds.

    `done` is the last round that counts: later rounds of an interrupted run are not shown.
    """

    def __init__(self, recipe: Recipe, folder: Path, done: int) -> None:
        writer = need("torch.utils.tensorboard", "track").SummaryWriter
        # without a finished round nothing counts, not even round 0: it is measured anew
        self._writer = writer(str(folder / "tensorboard"), purge_step=done + 1 if done else 0)

    def round(self, line: Mapping[str, Any], traffic: Mapping[str, Any]) -> None:
        for tag, value in scalars(line, traffic).items():
            self._writer.add_scalar(tag, value, line["round"])
        self._writer.flush()

    def close(self, ok: bool = True) -> None:
        self._writer.close()


class _Remembered:
    """A tracker that knows a run by an id. The run folder keeps the id, so that a resumed run continues under it.

    MLflow keeps both values of a step that is sent twice, and wandb may lose what was sent just before a process was
    killed. So the tracker is asked for the last round that it has, and is then sent the rounds that it lacks, from the
    files of the run folder, and no round twice.
    """

    name: str
    """The tracker's name in a recipe."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._last = -1
        memory = json.loads((folder / MEMORY).read_text("utf-8")) if (folder / MEMORY).is_file() else {}
        self._id: str | None = memory.get(self.name)

    def _start(self, name: str, last: int) -> None:
        """Keep the id, and send the finished rounds after `last`."""
        if name != self._id:
            write_text(self._folder / MEMORY, json.dumps({self.name: name}))
        self._id, self._last = name, last
        run = Run.read(self._folder)
        for line, traffic in zip(run.rounds, run.traffic, strict=False):
            self.round(line, traffic)

    def round(self, line: Mapping[str, Any], traffic: Mapping[str, Any]) -> None:
        if line["round"] > self._last:
            self._log(line["round"], scalars(line, traffic))
            self._last = line["round"]

    def _log(self, round: int, values: Mapping[str, float]) -> None:
        raise NotImplementedError


class MLflow(_Remembered):
    """Sends to an MLflow server (MLFLOW_TRACKING_URI), else to a database `mlflow.db` in the run folder.

    The experiment is MLFLOW_EXPERIMENT_NAME, else fedloom. Characters that MLflow refuses in names are replaced.
    """

    name = "mlflow"

    def __init__(self, recipe: Recipe, folder: Path, done: int) -> None:
        super().__init__(folder)
        # with MLflow's default of seven attempts, a missing server would delay a run by minutes
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        self._mlflow = need("mlflow", "mlflow")
        logging.getLogger("mlflow").setLevel(logging.WARNING)
        uri, place = os.environ.get("MLFLOW_TRACKING_URI"), None
        if not uri:
            for module in ("sqlalchemy", "alembic"):
                need(module, "mlflow")
            uri = f"sqlite:///{(folder / 'mlflow.db').absolute()}"
            place = (folder / "mlflow").absolute().as_uri()
        self._client = self._mlflow.MlflowClient(tracking_uri=uri)
        if self._id is not None:
            self._client.update_run(self._id, status="RUNNING")
            told = self._client.get_metric_history(self._id, "bytes/up")
            self._start(self._id, max((metric.step for metric in told), default=-1))
            return
        called = os.environ.get("MLFLOW_EXPERIMENT_NAME", "fedloom")
        found = self._client.get_experiment_by_name(called)
        experiment = found.experiment_id if found is not None else self._client.create_experiment(called, place)
        run = self._client.create_run(experiment, run_name=folder.absolute().name).info.run_id
        param = self._mlflow.entities.Param
        given = [param(_allowed(k), v[:_LONGEST]) for k, v in flat(recipe.model_dump(mode="json")).items()]
        for at in range(0, len(given), _PARAMS):
            self._client.log_batch(run, params=given[at : at + _PARAMS])
        self._start(run, -1)

    def _log(self, round: int, values: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        metrics = [self._mlflow.entities.Metric(_allowed(tag), value, now, round) for tag, value in values.items()]
        for at in range(0, len(metrics), _METRICS):
            self._client.log_batch(self._id, metrics=metrics[at : at + _METRICS])

    def close(self, ok: bool = True) -> None:
        self._client.set_terminated(self._id, "FINISHED" if ok else "FAILED")


class Wandb(_Remembered):
    """Sends to Weights & Biases, as its own variables say (WANDB_MODE, WANDB_PROJECT, ...); its files are in `wandb`.

    The project is fedloom if none is named. An offline run leaves a folder with all rounds so far at each start: the
    newest folder is the one for `wandb sync`.
    """

    name = "wandb"

    def __init__(self, recipe: Recipe, folder: Path, done: int) -> None:
        super().__init__(folder)
        wandb = need("wandb", "wandb")
        name = self._id or uuid.uuid4().hex[:12]
        self._run = wandb.init(
            id=name,
            resume="allow",
            reinit="create_new",
            dir=str(folder),
            name=folder.absolute().name,
            project=os.environ.get("WANDB_PROJECT", "fedloom"),
            config=recipe.model_dump(mode="json"),
            settings=wandb.Settings(console="off"),
        )
        self._start(name, self._run.starting_step - 1)

    def _log(self, round: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=round)

    def close(self, ok: bool = True) -> None:
        self._run.finish(exit_code=0 if ok else 1)


TRACKERS: Mapping[str, Callable[[Recipe, Path, int], Tracker]] = {
    "tensorboard": TensorBoard,
    "mlflow": MLflow,
    "wandb": Wandb,
}


class _Forgiving:
    """A tracker whose errors (the network, a full disk) end the tracking, not the run; they are reported once."""

    def __init__(self, make: Callable[[], Tracker], tell: Callable[[str], None]) -> None:
        self._tell, self._tracker = tell, None
        self._tracker = self._do(make)

    def _do(self, work: Callable[[], Any]) -> Any:
        try:
            return work()
        except UserError:  # a missing package
            raise
        except Exception as error:  # whatever the tracker's library or its server may raise
            self._tracker = None
            self._tell(f"tracking stopped, the run goes on: {type(error).__name__}: {error}")
            return None

    def round(self, line: Mapping[str, Any], traffic: Mapping[str, Any]) -> None:
        if (tracker := self._tracker) is not None:
            self._do(lambda: tracker.round(line, traffic))

    def close(self, ok: bool = True) -> None:
        if (tracker := self._tracker) is not None:
            self._do(lambda: tracker.close(ok))


def scalars(line: Mapping[str, Any], traffic: Mapping[str, Any]) -> dict[str, float]:
    """Tag -> number of one round: 'TASK/METRIC, SPLIT, MODEL', 'TASK/training loss', 'bytes/up', 'seconds/PHASE'.

    Metrics of clients become their mean; a mean that is not finite is left out.
    """
    each: dict[str, list[float]] = defaultdict(list)
    for e in line["metrics"]:
        each[f"{e['task']}/{e['metric']}, {e['split']}, {e['model']}"].append(number_of(e["value"]))
    for e in line.get("train", ()):
        each[f"{e['task']}/training loss"].append(number_of(e["loss"]))
    for way in ("up", "down"):
        each[f"bytes/{way}"].append(math.fsum(entry["bytes"] for entry in traffic[way]))
    for phase, seconds in line["seconds"].items():
        each[f"seconds/{phase}"].append(seconds)
    means = {tag: math.fsum(values) / len(values) for tag, values in each.items()}
    return {tag: mean for tag, mean in means.items() if math.isfinite(mean)}


def flat(value: Any, key: str = "") -> dict[str, str]:
    """A recipe as 'key.path' -> text; lists as JSON."""
    if not isinstance(value, Mapping) or (key and not value):
        return {key: value if isinstance(value, str) else json.dumps(value)}
    return {k: v for name, inner in value.items() for k, v in flat(inner, f"{key}.{name}" if key else name).items()}


def tracker_of(recipe: Recipe, folder: Path, done: int, tell: Callable[[str], None]) -> Tracker | None:
    """The tracker that a recipe asks for; `done` rounds are over. `tell` receives the reason if tracking stops.

    Raises UserError if a package that it needs is not installed.
    """
    if (name := recipe.runtime.track) is None:
        return None
    return _Forgiving(lambda: TRACKERS[name](recipe, folder, done), tell)


def _allowed(name: str) -> str:
    """A name that MLflow accepts: commas are left out, other refused characters are written as their number."""
    return re.sub(r"[^\w./ -]", lambda c: f":{ord(c[0]):x}:", name.replace(", ", " "))
