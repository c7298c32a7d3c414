"""The run folder: what is written, when, and how it survives a crash."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote

from safetensors.torch import save_file
from torch import Tensor

from fedloom._version import __version__
from fedloom.core.context import State
from fedloom.data.partition import Partition
from fedloom.errors import StateError
from fedloom.recipes.loader import dump, load
from fedloom.recipes.runtime import EarlyStopping
from fedloom.recipes.schema import Recipe
from fedloom.runs import checkpoint
from fedloom.runs.ledger import Ledger
from fedloom.runs.reader import DIAGNOSTICS, lines_of
from fedloom.runs.track import Tracker

_LOGS = ("metrics.jsonl", "bytes.jsonl")
_DIAGNOSTICS = f"{DIAGNOSTICS}.jsonl"
_SAME = {
    "recipe_text": "method",
    "layout_hash": "model",
    "data_hash": "data set",
    "frozen_hash": "frozen part of the model",
}
"""What must be unchanged when a run is resumed: key of run.json -> the word for it."""


class RunFolder:
    """Reads and writes one run folder.

    A round's lines are appended (and synced) before its checkpoint. So a crash between the two leaves too many lines,
    never too few, and `resume` cuts off the extra ones.
    """

    def __init__(self, path: Path) -> None:
        """Opens an existing directory for this process alone. Raises StateError if another process is at work there."""
        self.path = path
        self.tracker: Tracker | None = None
        """The tracker that is sent each round, if any."""
        self._lock: IO[str] | None = None
        try:
            import fcntl
        except ImportError:  # not a POSIX system
            return
        lock = (path / ".lock").open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            lock.close()
            raise StateError(f"{path} is in use by another process") from error
        self._lock = lock

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *error: object) -> None:
        self.close(ok=error[0] is None)

    def close(self, ok: bool = True) -> None:
        """Let other processes open the folder. `ok` is False if an error ended the run."""
        if self.tracker is not None:
            self.tracker.close(ok)
        if self._lock is not None:
            self._lock.close()

    @staticmethod
    def create(path: Path, recipe: Recipe, partition: Mapping[str, Any], about: Mapping[str, Any]) -> RunFolder:
        """A new folder with partition.json and run.json. Raises StateError if the folder is not empty."""
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise StateError(f"{path} exists and is not empty; continue it with resume, or choose another folder")
        path.mkdir(parents=True, exist_ok=True)
        folder = RunFolder(path)
        checkpoint.write_text(path / "partition.json", json.dumps(partition))
        folder.describe(about, "running", 0)
        # last, because a folder with a recipe is one that can be resumed
        checkpoint.write_text(path / "recipe.yaml", dump(recipe))
        return folder

    @staticmethod
    def read(path: Path) -> tuple[Recipe, Partition]:
        """The recipe and the partition in a folder. Raises StateError if it is no run folder or is damaged."""
        if not (path / "recipe.yaml").is_file():
            raise StateError(f"{path} is not a run folder: it has no recipe.yaml")
        try:
            partition = Partition.from_json(json.loads((path / "partition.json").read_text()))
        except (OSError, ValueError) as error:
            raise StateError(f"{path / 'partition.json'} cannot be read: {error}") from error
        return load(path / "recipe.yaml"), partition

    def describe(self, about: Mapping[str, Any], status: str, round_: int, final_round: int | None = None) -> None:
        """Write run.json: what this run is (`Built.about`) and how far it has come."""
        final_round = round_ if final_round is None else final_round
        value = {"fedloom": __version__, **about, "status": status, "rounds": round_, "final_round": final_round}
        checkpoint.write_text(self.path / "run.json", json.dumps(value, indent=1))

    def check(self, about: Mapping[str, Any]) -> None:
        """Check that a resumed run is still the same. Raises StateError that names what changed."""
        try:
            before = json.loads((self.path / "run.json").read_text())
        except (OSError, ValueError) as error:
            raise StateError(f"{self.path / 'run.json'} cannot be read: {error}") from error
        for key, what in _SAME.items():
            if before.get(key) != about[key]:
                raise StateError(
                    f"{self.path}: the {what} is not what it was when the run began ({key}: {before.get(key)!r} "
                    f"recorded, {about[key]!r} now)"
                )

    def write_round(self, line: Mapping[str, Any], ledger: Ledger) -> None:
        """Append one round to metrics.jsonl and bytes.jsonl, and its diagnostics, if there are any, to their file."""
        looked = {k: v for k, v in line.items() if k in ("round", DIAGNOSTICS)}
        line = {k: v for k, v in line.items() if k != DIAGNOSTICS}
        bytes_ = {"round": line["round"], "up": ledger.entries("up"), "down": ledger.entries("down")}
        logs = dict(zip(_LOGS, ({**line, "seconds": ledger.seconds}, bytes_), strict=True))
        if len(looked) > 1:
            logs = {_DIAGNOSTICS: looked, **logs}
        for name, value in logs.items():
            _append(self.path / name, value)
        if self.tracker is not None:
            self.tracker.round(logs[_LOGS[0]], bytes_)

    def add_metrics(self, round_: int, records: Sequence[Mapping[str, Any]]) -> None:
        """Append a round's line of metrics once more, with those of the records that it has not."""
        names = ("client", "task", "metric", "model", "split")
        path = self.path / _LOGS[0]
        line = next(line for line in lines_of(path) if line["round"] == round_)
        known = {tuple(record[name] for name in names) for record in line["metrics"]}
        more = [record for record in records if tuple(record[name] for name in names) not in known]
        if more:
            _append(path, {**line, "metrics": [*line["metrics"], *more]})

    def cut(self, round_: int) -> None:
        """Drop lines of rounds after `round_`, and a torn last line."""
        for name in (*_LOGS, _DIAGNOSTICS):
            path = self.path / name
            if not path.exists():
                continue
            kept = []
            for text in path.read_text(encoding="utf-8").splitlines():
                try:
                    if json.loads(text)["round"] > round_:
                        break
                except (ValueError, KeyError, TypeError):
                    break
                kept.append(text + "\n")
            checkpoint.write_text(path, "".join(kept))

    def save(self, state: State, name: str = "state") -> None:
        """Checkpoint a state. Each peer's state is in a folder of its own, peers/NAME, written before the rest."""
        for peer, own in state.get("peers", {}).items():
            home = self.peer(peer)
            home.mkdir(parents=True, exist_ok=True)
            checkpoint.save(home, name, own, round=state["round"])
        rest = state if "peers" not in state else {**state, "peers": sorted(state["peers"])}
        checkpoint.save(self.path, name, rest, round=state["round"])

    def peer(self, name: str) -> Path:
        """The folder of one peer's own files."""
        return self.path / "peers" / quote(name, safe=" ")

    def load(self, name: str = "state") -> tuple[State, list[str]] | None:
        """The newest whole checkpoint and the problems met, or None if none was ever written."""
        if not any(self.path.glob(f"{name}*.json")):
            return None
        tree, _, problems = checkpoint.load(self.path, name, newest=lambda head: int(head["round"]))
        if "peers" in tree:
            tree = {**tree, "peers": {peer: self._own(peer, name, tree["round"], problems) for peer in tree["peers"]}}
        return tree, problems

    def continued(self, about: Mapping[str, Any], initial: Callable[[], State], tell: Callable[[str], None]) -> State:
        """The state to go on from, `initial` where nothing was saved; lines of rounds after it are cut off.

        `tell` hears of damaged checkpoints. Raises StateError where the run is not what it was (see `check`).
        """
        self.check(about)
        found = self.load()
        if found is None:
            self.cut(-1)
            return initial()
        state, problems = found
        for problem in problems:
            tell(f"checkpoint: {problem}; continuing from round {state['round']}")
        self.cut(state["round"] or -1)  # round 0 is measured anew
        return state

    def kept(self, state: State, early: EarlyStopping | None) -> State:
        """The state to keep of a run that ended in `state`: the best one if it stopped early and wants that back."""
        if early is None or not (state["stopped"] and early.restore_best):
            return state
        found = self.load("best")
        if found is None:
            raise StateError(f"{self.path}: the best state is missing")
        return found[0]

    def _own(self, peer: str, name: str, round_: int, problems: list[str]) -> State:
        """A peer's state in the round that all peers have; its newest may be one round ahead."""
        own, labels, more = checkpoint.load(self.peer(peer), name, newest=lambda head: head["round"] == round_)
        problems += [f"peer {peer!r}: {problem}" for problem in more]
        if labels["round"] != round_:
            raise StateError(
                f"{self.peer(peer)}: peer {peer!r} has a checkpoint of round {labels['round']}, expected {round_}"
            )
        state: State = own
        return state

    def save_model(self, tensors: Mapping[str, Tensor], labels: Mapping[str, str]) -> None:
        """Write model.safetensors, readable without fedloom."""
        part = self.path / "model.safetensors.part"
        save_file({k: t.clone() for k, t in tensors.items()}, part, metadata=dict(labels))
        os.replace(part, self.path / "model.safetensors")


def _append(file: Path, line: Mapping[str, Any]) -> None:
    with file.open("a", encoding="utf-8") as opened:
        opened.write(json.dumps(_finite(line), allow_nan=False) + "\n")
        opened.flush()
        os.fsync(opened.fileno())


def _finite(value: Any) -> Any:
    """nan and inf as null, because JSON cannot hold them."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return value
