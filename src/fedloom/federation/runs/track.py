"""Others that hear of a run's rounds: trackers of experiments, and an audit file for others to check.

Each line of an audit file has the hash of the one before, so changes show; but who writes it can begin anew or cut off
its end, so another party may keep the last hash. Free of torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import re
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from fedloom.core.errors import StateError, UserError, naming
from fedloom.core.lazy import need
from fedloom.federation.runs.checkpoint import write_text
from fedloom.federation.runs.reader import Run, number_of

MEMORY = "track.json"
"""The file of a run folder that maps a tracker to the id of the run there."""


class Tracker(Protocol):
    """Keeps a run's numbers elsewhere. Made of the recipe (plain values), the run folder and the id of a known run."""

    id: str
    last: int
    """The last round that it has, -1 for none."""

    def log(self, round: int, values: Mapping[str, float]) -> None:
        """Send a round's values."""

    def close(self, ok: bool) -> None:
        """End; `ok` is False if an error ended the run."""


class TensorBoard(Tracker):
    """Writes events to the folder `tensorboard` of a run; a resumed run writes all of them anew."""

    id, last = "", -1

    def __init__(self, config: Mapping[str, Any], folder: Path, known: str | None) -> None:
        writer = need("torch.utils.tensorboard", "track").SummaryWriter
        self._writer = writer(str(folder / "tensorboard"), purge_step=0)

    def log(self, round: int, values: Mapping[str, float]) -> None:
        for tag, value in values.items():
            self._writer.add_scalar(tag, value, round)
        self._writer.flush()

    def close(self, ok: bool) -> None:
        self._writer.close()


class MLflow(Tracker):
    """Sends to an MLflow server (MLFLOW_TRACKING_URI), else to a database `mlflow.db` in the run folder.

    The experiment is MLFLOW_EXPERIMENT_NAME, else fedloom. Characters that MLflow refuses in names are replaced.
    """

    def __init__(self, config: Mapping[str, Any], folder: Path, known: str | None) -> None:
        # with MLflow's default of seven attempts, a missing server would delay a run by minutes
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        self._mlflow = need("mlflow", "track")
        logging.getLogger("mlflow").setLevel(logging.WARNING)
        uri, place = os.environ.get("MLFLOW_TRACKING_URI"), None
        if not uri:
            uri = f"sqlite:///{(folder / 'mlflow.db').absolute()}"
            place = (folder / "mlflow").absolute().as_uri()
        self._client = self._mlflow.MlflowClient(tracking_uri=uri)
        if known is not None:
            self._client.update_run(known, status="RUNNING")
            history = self._client.get_metric_history(known, "bytes/up")
            self.id, self.last = known, max((metric.step for metric in history), default=-1)
            return
        called = os.environ.get("MLFLOW_EXPERIMENT_NAME", "fedloom")
        existing = self._client.get_experiment_by_name(called)
        experiment = existing.experiment_id if existing is not None else self._client.create_experiment(called, place)
        self.id, self.last = self._client.create_run(experiment, run_name=folder.absolute().name).info.run_id, -1
        param = self._mlflow.entities.Param
        self._send(100, params=[param(_allowed(key), value[:6000]) for key, value in flat(config).items()])

    def _send(self, most: int, **named: list[Any]) -> None:
        """Send values, at most so many in a request: MLflow's limits."""
        ((kind, values),) = named.items()
        for at in range(0, len(values), most):
            self._client.log_batch(self.id, **{kind: values[at : at + most]})

    def log(self, round: int, values: Mapping[str, float]) -> None:
        now, metric = int(time.time() * 1000), self._mlflow.entities.Metric
        self._send(1000, metrics=[metric(_allowed(tag), value, now, round) for tag, value in values.items()])

    def close(self, ok: bool) -> None:
        self._client.set_terminated(self.id, "FINISHED" if ok else "FAILED")


class Wandb(Tracker):
    """Sends to Weights & Biases, as its own variables say (WANDB_MODE, WANDB_PROJECT, ...); its files are in `wandb`.

    The project is fedloom by default. Offline, the newest folder has all rounds: it is the one for `wandb sync`.
    """

    def __init__(self, config: Mapping[str, Any], folder: Path, known: str | None) -> None:
        wandb = need("wandb", "track")
        self.id = known or uuid.uuid4().hex[:12]
        self._run = wandb.init(
            id=self.id,
            resume="allow",
            reinit="create_new",
            dir=str(folder),
            name=folder.absolute().name,
            project=os.environ.get("WANDB_PROJECT", "fedloom"),
            config=dict(config),
            settings=wandb.Settings(console="off"),
        )
        self.last = self._run.starting_step - 1

    def log(self, round: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=round)

    def close(self, ok: bool) -> None:
        self._run.finish(exit_code=0 if ok else 1)


TRACKERS: Mapping[str, Callable[[Mapping[str, Any], Path, str | None], Tracker]] = {
    "tensorboard": TensorBoard,
    "mlflow": MLflow,
    "wandb": Wandb,
}


class Tracking:
    """Sends a run's rounds to the tracker that its recipe names (`config`); `tell` receives why tracking stops.

    A tracker is sent the rounds that it lacks, from the run folder, and none twice, which MLflow would keep; wandb may
    have lost some. An error ends the tracking, not the run. Raises UserError if a package is not installed.
    """

    def __init__(self, config: Mapping[str, Any], folder: Path, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._tracker: Tracker | None = None
        if (name := config["runtime"]["track"]) is not None:
            self._do(lambda: self._start(name, config, folder))

    def _start(self, name: str, config: Mapping[str, Any], folder: Path) -> None:
        memory = json.loads((folder / MEMORY).read_text("utf-8")) if (folder / MEMORY).is_file() else {}
        self._tracker = TRACKERS[name](config, folder, memory.get(name))
        if self._tracker.id != memory.get(name, ""):
            write_text(folder / MEMORY, json.dumps({name: self._tracker.id}))
        run = Run.read(folder)
        for line, traffic in zip(run.rounds, run.traffic, strict=False):
            self.round(line, traffic)

    def _do(self, work: Callable[[], None]) -> None:
        try:
            work()
        except UserError:  # a missing package
            raise
        except Exception as error:  # whatever the tracker's library or its server may raise
            self._tracker = None
            self._tell(f"tracking has stopped, the run continues: {type(error).__name__}: {error}")

    def round(self, line: Mapping[str, Any], traffic: Mapping[str, Any]) -> None:
        """Send a round's line of metrics.jsonl and of bytes.jsonl, once they are written."""
        if (tracker := self._tracker) is not None and line["round"] > tracker.last:
            self._do(lambda: tracker.log(line["round"], scalars(line, traffic)))
            tracker.last = line["round"]

    def close(self, ok: bool) -> None:
        """End the tracking; `ok` is False if an error ended the run."""
        if (tracker := self._tracker) is not None:
            self._do(lambda: tracker.close(ok))


def scalars(line: Mapping[str, Any], traffic: Mapping[str, Any]) -> dict[str, float]:
    """Return tag -> finite number of one round, such as 'TASK/METRIC, SPLIT, MODEL', means over clients."""
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
    """Return a recipe as 'key.path' -> text; lists as JSON."""
    if not isinstance(value, Mapping) or (key and not value):
        return {key: value if isinstance(value, str) else json.dumps(value)}
    return {k: v for name, inner in value.items() for k, v in flat(inner, f"{key}.{name}" if key else name).items()}


def _allowed(name: str) -> str:
    """Return a name that MLflow accepts: commas are left out, other refused characters are written as their number."""
    return re.sub(r"[^\w./ -]", lambda c: f":{ord(c[0]):x}:", name.replace(", ", " "))


FILE = "audit.jsonl"
START = "0" * 64
"""The hash before the first line."""


class Audit:
    """The audit file of a server's run, or of a node's home."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._lines: list[dict[str, Any]] = []
        self._size = 0  # bytes of the file that `lines` has read

    def note(self, what: str, **about: Any) -> None:
        """Append what happened; it is on the disk when this returns. Raises StateError for a file of another end."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with naming(self.file), self.file.open("a+b") as file:
            with contextlib.suppress(ImportError):  # not a POSIX system
                import fcntl

                fcntl.flock(file, fcntl.LOCK_EX)  # a node's messages may come to several processes
            number, before = self._end(file)
            line = {"number": number, "at": datetime.now(UTC).isoformat(), "what": what, **about, "before": before}
            file.write(json.dumps({**line, "hash": _hash(line)}, sort_keys=True).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def lines(self) -> Sequence[dict[str, Any]]:
        """Return all whole lines, each checked once; none without a file. Raises StateError as `verified`."""
        if not self.file.is_file():
            self._lines, self._size = [], 0
            return self._lines
        with self.file.open("rb") as file:
            if file.seek(0, os.SEEK_END) < self._size:
                self._lines, self._size = [], 0
            file.seek(self._size)
            raw = file.read()
        raw = raw[: raw.rfind(b"\n") + 1]
        self._lines += _following(raw, self._lines, self.file)
        self._size += len(raw)
        return self._lines

    def _end(self, file: Any) -> tuple[int, str]:
        """Return (number of the next line, hash of the last one)."""
        size, length = file.seek(0, os.SEEK_END), 1 << 12
        tail = b""
        while tail.count(b"\n") < 2 and len(tail) < size:  # the line before the last one, too
            file.seek(max(size - length, 0))
            tail, length = file.read(), 4 * length
        whole = tail[: tail.rfind(b"\n") + 1]
        if len(whole) < len(tail):
            file.truncate(size - len(tail) + len(whole))
        if not whole:
            return 0, START
        last = _read(whole.splitlines()[-1], f"{self.file}, last line")
        return last["number"] + 1, last["hash"]


def verified(file: Path, kept: str | None = None) -> list[dict[str, Any]]:
    """Return the lines of an audit file. Raises StateError, with the line, where one is not what was written.

    `kept` is the hash of a line that was there once: without it nobody sees that the end was cut off between two lines,
    or that the file was written anew from its beginning.
    """
    try:
        raw = file.read_bytes()
    except OSError as error:
        raise StateError(f"{file} cannot be read: {error.strerror}") from None
    lines = _following(raw, (), file)
    if kept is not None and kept not in {START, *(line["hash"] for line in lines)}:
        raise StateError(
            f"{file}: none of its {len(lines)} lines has the hash {kept}: lines at the end were removed, or the "
            "file was replaced"
        )
    return lines


def _following(raw: bytes, lines: Sequence[Mapping[str, Any]], file: Path) -> list[dict[str, Any]]:
    """Return the lines in `raw`, which follow others. Raises StateError as `verified`."""
    checked: list[dict[str, Any]] = []
    before = lines[-1]["hash"] if lines else START
    for number, text in enumerate(raw.splitlines(), len(lines)):
        where = f"{file}, line {number + 1}"
        line = _read(text, where)
        if line["number"] != number or line.get("before") != before:
            raise StateError(f"{where}: the line does not follow the one before it: lines were removed, added or moved")
        checked.append(line)
        before = line["hash"]
    if raw and not raw.endswith(b"\n"):
        raise StateError(f"{file}, line {len(lines) + len(checked)}: the line is truncated")
    return checked


def _read(text: bytes, where: str) -> dict[str, Any]:
    """Return one line. Raises StateError where it is not what was written."""
    try:
        line = json.loads(text)
        as_written = json.dumps(line, sort_keys=True).encode() == text  # else a key may occur twice
        stated = line.pop("hash")
        right = isinstance(line["number"], int) and isinstance(line["what"], str) and isinstance(line["at"], str)
        if as_written and stated == _hash(line) and right:
            return {**line, "hash": stated}
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        pass
    raise StateError(f"{where}: the content does not match its hash: the line was changed or truncated")


def _hash(line: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(line, sort_keys=True).encode()).hexdigest()
