"""The run folder: what is written, when, and how it survives a crash."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import Tensor

from fedloom._version import __version__
from fedloom.core.context import State
from fedloom.core.errors import StateError, check_empty, check_links, first_of, naming, of_system, warn
from fedloom.core.grouping import grouped
from fedloom.core.machine import LOCK, elsewhere, locked, message_of
from fedloom.core.settings.section import differs, folder_name, value_at
from fedloom.core.settings.trust import keep_run
from fedloom.core.settings.yaml import to_yaml
from fedloom.core.untrusted import Among, Exactly, Sender, Untrusted
from fedloom.data.partition import Partition
from fedloom.federation.recipes.loader import dump
from fedloom.federation.recipes.runtime import EarlyStopping
from fedloom.federation.recipes.schema import Recipe, came_later
from fedloom.federation.runs import checkpoint, recorded
from fedloom.federation.runs.reader import DIAGNOSTICS
from fedloom.federation.runs.track import Audit, Tracking

_CHANGED = "recipe changed"
MIRROR_FAILED = "mirror failed"
"""The event of a round after whose checkpoint the copy could not be brought up to date."""
_METRICS, _BYTES, _DIAGNOSTICS = recorded.LOGS
_SAME = {
    "recipe_text": "method",
    "layout_hash": "model",
    "data_hash": "data set",
    "inputs_hash": "data set, in its inputs,",
    "frozen_hash": "frozen part of the model",
    "graph_hash": "graph of the peers",
    "partition_hash": "partition",
}
"""Parts that must be unchanged when a run is resumed: key of run.json -> the word for it."""
_UNKNOWN = hashlib.sha256().hexdigest()[:16]
"""The hash that older runs recorded of inputs that they did not read."""


def check_parts(path: Path, about: Mapping[str, Any]) -> None:
    """Raise StateError where data, model, method or partition are not those of the run in a folder. `about` has all or
    some parts of `Built.about`."""
    before = recorded.read_info(path)
    for key, what in _SAME.items():
        if key in about and before.get(key, _UNKNOWN) != _UNKNOWN and before[key] != about[key]:
            raise StateError(
                f"{path}: the {what} has changed since the run began ({key}: {before.get(key)!r} "
                f"then, {about[key]!r} now)"
            )


class RunFolder:
    """Reads and writes one run folder.

    A round's lines are synced before the next checkpoint, so a crash leaves too many lines, never too few, and `resume`
    cuts them off. Checkpoints have the checksums of the lines before them and of the partition, run.json its own.
    """

    def __init__(self, path: Path, copies: str | None = None, warn: Callable[[str], None] = warn) -> None:
        """Open an existing directory for this process alone. Raises InUseError if another process is at work there,
        StateError for a link in it, or where `copies` has files of another run in the place of its copy.

        What resuming needs is copied into the folder `copies` with each checkpoint; `warn` hears where that fails.
        """
        self.warn = warn
        self._unmirrored: str | None = None  # why the mirror is not up to date; None where it is
        self.path = path
        self.mirror = checkpoint.mirror_of(path, copies)
        self.tracker: Tracking | None = None  # receives each round, once the run goes on
        self.audit: Audit | None = None  # where what happens is written down for others to check, if anywhere
        self._events: list[dict[str, Any]] = []  # events between two sessions, for the next round's line
        self._written: dict[str, tuple[int, Any]] = {}  # log -> (bytes, running checksum) of what it holds
        self._named: int | None = None  # the best round that the newest checkpoint names
        self._unsynced: set[str] = set()  # logs with lines that may not be on the disk yet
        self._turns: list[checkpoint.Turn] = []  # what the tensor files hold of the checkpoints that this process saved
        self._form: Untrusted | None = None  # of the states of a run that goes on
        self._read: State | None = None  # the last state that such a run has read, while parts of it are in use
        self._lock = ExitStack()
        check_links((*path.glob("*"), *path.glob("predictions/*")))  # links of Weights & Biases are its own
        self._refuse_other_mirror()
        self._lock.enter_context(locked(path / LOCK, path))

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close(ok=error is None)
        if self._read is not None and isinstance(error, Exception) and message_of(error) is elsewhere(error) is None:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            raise StateError(
                f"{self.path}: the run cannot continue from its checkpoint (state.json), which holds what this method "
                f"cannot read. If nothing but fedloom wrote it, please report this as a bug: {type(error).__name__}: "
                f"{error} ({Path(frame.filename).name}, line {frame.lineno})"
            ) from error

    def close(self, ok: bool = True) -> None:
        """Let other processes open the folder. `ok` is False if an error ended the run."""
        if self.tracker is not None:
            self.tracker.close(ok)
        with self._lock:
            self._sync()

    @staticmethod
    def create(
        path: Path,
        recipe: Recipe,
        partition: Mapping[str, Any],
        about: Mapping[str, Any],
        warn: Callable[[str], None] = warn,
    ) -> RunFolder:
        """Return a new folder with partition.json and run.json. Raises StateError if the folder is not empty."""
        check_empty(path, "continue the run with `fedloom resume`, or choose another folder")
        copy = checkpoint.mirror_of(path, recipe.runtime.mirror)
        if copy is not None and copy.exists():
            raise StateError(
                f"runtime.mirror: {copy} exists already and may be the copy of another run; choose another folder"
            )
        path.mkdir(parents=True, exist_ok=True)
        folder = RunFolder(path, recipe.runtime.mirror, warn)
        checkpoint.write_text(path / "partition.json", json.dumps(partition))
        folder.describe(about, recorded.RUNNING, 0)
        # last, because a folder with a recipe is one that can be resumed
        checkpoint.write_text(path / "recipe.yaml", dump(recipe))
        keep_run(code.name for code in recipe.code)
        return folder

    def close_run(self, recipe: Recipe, partition: Mapping[str, Any], about: Mapping[str, Any], round_: int) -> None:
        """Make the folder one of a finished run, where no other process can resume it: a node's."""
        checkpoint.write_text(self.path / "partition.json", json.dumps(partition))
        checkpoint.write_text(self.path / "recipe.yaml", dump(recipe))
        keep_run(code.name for code in recipe.code)
        self.describe(about, "finished", round_)

    @staticmethod
    def read(path: Path) -> tuple[Recipe, Partition]:
        """Return the recipe and the partition in a folder. Raises StateError if it is no run folder or is damaged."""
        for name in ("recipe.yaml", "partition.json"):
            if not (path / name).is_file():
                raise recorded.no_run(path, name)
        file = path / "partition.json"
        return recorded.recipe_in(path), Partition.from_json(recorded.json_of(file), str(file))

    def describe(self, about: Mapping[str, Any], status: str, round_: int, final_round: int | None = None) -> None:
        """Write run.json: what this run is (`Built.about`) and how far it has come.

        Events that no round has taken, because none came after them, go to the last round's line.
        """
        if self._events and (lines := recorded.lines_of(self.path / _METRICS)):
            last = max(lines, key=lambda line: int(line["round"]))
            self._append(_METRICS, {**last, "events": [*last.get("events", ()), *self._events]})
            self._note_events(last["round"], self._events)
            self._events = []
        self._sync()
        final_round = round_ if final_round is None else final_round
        value = {"fedloom": __version__, **about, "status": status, "rounds": round_, "final_round": final_round}
        if self.changes:
            value["changes"] = self.changes
        if status != recorded.RUNNING:
            value["files"] = recorded.sums(self.path)
        self._describe(value)
        self._copy()

    def _describe(self, value: Mapping[str, Any]) -> None:
        checkpoint.write_text(self.path / "run.json", json.dumps({**value, "check": recorded.checksum(value)}))

    @property
    def changes(self) -> list[dict[str, Any]]:
        """The changes of the recipe that were accepted, as run.json has them."""
        return list(recorded.read_info(self.path).get("changes", [])) if (self.path / "run.json").exists() else []

    def check(self, about: Mapping[str, Any], accept: bool | Collection[str] = False) -> dict[str, Any] | None:
        """Check that a resumed run is still the same. Raises StateError that names what changed.

        With `accept` other keys of the recipe than those of method, model and data may differ, or only the keys that it
        names. Returns these, {key: [was, is]}, or None where the recipe is the same. Another version of the package, or
        of another package's source, is an event of the next round.
        """
        before = recorded.read_info(self.path)
        recorded.check("run.json", before, str(self.path / "run.json"))
        if before.get("fedloom") != __version__:
            self._events.append({"event": "version changed", "was": before.get("fedloom"), "now": __version__})
        for name, now in about.get("origins", {}).items():
            was = before.get("origins", {}).get(name)
            if was is not None and was != now:
                self._events.append({"event": "source changed", "of": name, "was": _origin(was), "now": _origin(now)})
        check_parts(self.path, about)
        if before.get("recipe_hash") == about["recipe_hash"]:
            return None
        was, now = before.get("recipe", {}), about["recipe"]
        keys = sorted(differs("", was, now)) if was else []
        keys = [key for key in keys if not came_later(key, was, now)]  # the fedloom that began the run lacked them
        changed = {key: [value_at(was, key), value_at(now, key)] for key in keys}
        if not accept or (accept is not True and not set(keys) <= set(accept)):
            raise StateError(
                f"{self.path}: the recipe has changed since the run began: {_words(changed)}. Change it back, "
                "or continue with --accept-changes, which records the change"
            )
        return changed

    def _accept(self, about: Mapping[str, Any], changed: Mapping[str, Any] | None, round_: int) -> None:
        """Put another recipe in the place of the folder's, and write into run.json which keys `changed`, if any did.

        First it has another name, then run.json is written: which recipe a killed run has, `recorded.replaced` tells.
        """
        checkpoint.write_text(self.path / recorded.NEXT, to_yaml(about["recipe"]))
        if changed is not None:
            before = recorded.read_info(self.path)
            origins = {**about.get("origins", {}), **before.get("origins", {})}  # the next start compares with them
            changes = [*before.get("changes", []), {"after_round": round_, "keys": changed}]
            value = {**before, **about, **({"origins": origins} if origins else {})}
            self._describe({**value, "status": recorded.RUNNING, "changes": changes})
        os.replace(self.path / recorded.NEXT, self.path / "recipe.yaml")

    def _unlogged(self) -> list[dict[str, Any]]:
        """Return the events of changes in run.json that no line of metrics.jsonl has."""
        if not (changes := self.changes):
            return []
        events = [e for line in recorded.lines_of(self.path / _METRICS) for e in line.get("events", ())]
        logged = Counter(event.get("keys") for event in events if event["event"] == _CHANGED)
        missing = []
        for text in (_words(change["keys"]) for change in changes):
            if logged[text]:
                logged[text] -= 1
            else:
                missing.append({"event": _CHANGED, "keys": text})
        return missing

    def write_round(self, line: Mapping[str, Any], sent: Mapping[str, Any]) -> None:
        """Append one round to metrics.jsonl, the bytes `sent` to bytes.jsonl, and any diagnostics to their file."""
        if self._events:
            line = {**line, "events": [*self._events, *line["events"]]}
            self._events = []
        looked = {k: v for k, v in line.items() if k in ("round", DIAGNOSTICS)}
        line = {k: v for k, v in line.items() if k != DIAGNOSTICS}
        bytes_ = {"round": line["round"], **sent}
        logs = {_METRICS: line, _BYTES: bytes_}
        if len(looked) > 1:
            logs = {_DIAGNOSTICS: looked, **logs}
        for name, value in logs.items():
            self._append(name, value)
        self._note_events(line["round"], line.get("events", ()))
        if self.tracker is not None:
            self.tracker.round(logs[_METRICS], bytes_)

    def later(self, event: Mapping[str, Any]) -> None:
        """Add an event that happened between rounds to the next round's line."""
        self._events.append(dict(event))

    def add_metrics(self, round_: int, records: Sequence[Mapping[str, Any]]) -> None:
        """Append a round's line of metrics once more, with the records that it has not; a line where there was none."""
        names = ("client", "task", "metric", "model", "split")
        path = self.path / _METRICS
        if path.is_file() and not path.read_bytes().endswith(b"\n"):  # a crash cut off its last line
            self.cut(sys.maxsize)
        line = {"metrics": [], **(recorded.line_of(path, round_) or {"round": round_})}
        known = {tuple(record[name] for name in names) for record in line["metrics"]}
        more = [record for record in records if tuple(record[name] for name in names) not in known]
        if more:
            self._append(path.name, {**line, "metrics": [*line["metrics"], *more]})

    def cut(self, round_: int) -> None:
        """Drop lines of rounds after `round_`, and a torn last line."""
        for name in recorded.LOGS:
            path = self.path / name
            if not path.exists():
                continue
            size = 0
            with path.open("rb") as lines:
                for text in lines:
                    try:
                        if not text.endswith(b"\n") or json.loads(text)["round"] > round_:
                            break
                    except (ValueError, KeyError, TypeError):
                        break
                    size += len(text)
            with naming(path):
                os.truncate(path, size)
            self._written.pop(name, None)

    def _append(self, name: str, line: Mapping[str, Any]) -> None:
        size, digest = self._log(name)
        line = recorded.packed(line)
        try:
            text = f"{json.dumps(line, allow_nan=False)}\n".encode()
        except ValueError:
            text = f"{json.dumps(recorded.plainly(line), allow_nan=False)}\n".encode()
        with naming(self.path / name), (self.path / name).open("ab") as opened:
            opened.write(text)
        self._unsynced.add(name)
        digest.update(text)
        self._written[name] = size + len(text), digest

    def _sync(self) -> None:
        """Wait until all lines are on the disk."""
        while self._unsynced:
            checkpoint.sync(self.path / self._unsynced.pop())

    def _log(self, name: str) -> tuple[int, Any]:
        """Return (bytes, running checksum) of a log."""
        if name not in self._written:
            size, digest = 0, hashlib.sha256()
            if (self.path / name).exists():
                with (self.path / name).open("rb") as file:
                    digest = hashlib.file_digest(file, "sha256")
                    size = file.tell()
            self._written[name] = size, digest
        return self._written[name]

    def save(self, state: State, name: str = "state") -> None:
        """Checkpoint a state. It is there once the rest is written: each peer's own is before that in peers/NAME, under
        the round's number, and stays until no checkpoint of the rest asks for it. So does a best state, `name` "best",
        which is saved before the first state that names its round."""
        round_ = state["round"]
        if self._read is not None and _parts(self._read).isdisjoint(_parts(state)):
            self._read = None
        file = name if name == "state" else f"{name}-{round_}"
        self._sync()
        # peers first: the rest names their round, so a crash in between leaves a checkpoint that has all it names
        for peer, own in state.get("peers", {}).items():
            home = _peer(self.path, peer)
            home.mkdir(parents=True, exist_ok=True)
            checkpoint.save(home, f"{name}-{round_}", own, round=round_)
        rest = state if "peers" not in state else {**state, "peers": sorted(state["peers"])}
        logs = {name: self._log(name) for name in recorded.LOGS}  # a resumed run reads them beside the checkpoint
        sums = {name: [size, digest.hexdigest()] for name, (size, digest) in logs.items() if size}
        turns = self._turns if name == "state" else None
        checkpoint.save(self.path, file, rest, turns=turns, round=round_, logs=sums)
        if self.audit is not None:
            digest = recorded.sum_of(self.path / f"{file}.json")[1]
            self._note("checkpoint", round=round_, state=name, digest=digest, logs=sums)
        if name == "state":
            named = _best_round(state)
            homes = [_peer(self.path, peer) for peer in state.get("peers", {})]
            for home in homes:  # this round's stays, and that of the last round before it
                _delete(home, name, set(sorted(number for number in _numbered(home, name) if number <= round_)[-2:]))
            for home in [self.path, *homes]:
                _delete(home, "best", {named, self._named})
            self._named = named
        self._copy()

    def _copy(self) -> None:
        """Bring the mirror up to date. Where that fails the run goes on; a warning and the next round's line say so."""
        if self.mirror is None:
            return
        why = None
        try:
            checkpoint.mirror(self.path, self.mirror)
        except OSError as error:
            why = of_system(error)
            self._events.append({"event": MIRROR_FAILED, "why": why})
        if why is not None and self._unmirrored is None:
            self.warn(f"runtime.mirror: {why}. The run continues; its copy stays out of date until this is corrected")
        self._unmirrored = why

    def agreed(self, decision: bool) -> bool:
        """Return a decision that all processes of a run take together."""
        return decision

    def load(self, name: str = "state", home: Path | None = None) -> tuple[State, dict[str, Any], list[str]] | None:
        """Return (state, labels, problems) of the newest whole checkpoint in the folder, or in `home`, or None."""
        home = home or self.path
        if not any(home.glob(f"{name}.*json")):
            return None

        def whole(tree: State, labels: Mapping[str, Any]) -> State:
            kind, number = name.partition("-")[0], labels["round"]
            Among({"round": Exactly(number)}).read(tree, Sender())
            if "peers" in tree:
                tree = {**tree, "peers": {peer: self._own(_peer(home, peer), kind, number) for peer in tree["peers"]}}
            if self._form is not None:
                self._form.read(tree, Sender())
                self._read = tree
            return tree

        return checkpoint.load(home, name, newest=lambda head: int(head["round"]), complete=whole)

    @staticmethod
    def _own(home: Path, name: str, round_: int) -> State:
        """Return a peer's state of a round. Runs from before had the newest two under one name."""
        named = f"{name}-{round_}"
        file = named if any(home.glob(f"{named}.*json")) else name
        tree, labels, _ = checkpoint.load(home, file, newest=lambda head: head["round"] == round_)
        if labels["round"] != round_:
            raise StateError(f"{home}: a checkpoint of round {labels['round']} found, expected {round_}")
        return tree

    def continued(
        self,
        about: Mapping[str, Any],
        initial: Callable[[], State],
        tell: Callable[[str], None],
        accept: bool | Collection[str] = False,
        form: Untrusted | None = None,
    ) -> State:
        """Return the state to go on from, of this `form`, or `initial` where nothing was saved; cut off lines of rounds
        after it.

        An accepted change of the recipe is written, and is an event of the next round. `tell` hears of damaged
        checkpoints. Raises StateError where the run is not what it was (`check`), or checkpoints are gone.
        """
        if (self.path / recorded.NEXT).exists():  # a change that was cut off
            if recorded.replaced(self.path):
                os.replace(self.path / recorded.NEXT, self.path / "recipe.yaml")
            else:
                (self.path / recorded.NEXT).unlink()
        changed = self.check(about, accept)
        self._form = form
        try:
            newest = self._newest()
        except StateError as error:
            if self.mirror is None or not (kept := self.load("state", self.mirror)):
                raise
            checkpoint.mirror(self.mirror, self.path)
            self._written = {}
            tell(f"{error}; the copy in {self.mirror} is intact and has round {kept[0]['round']}")
            newest = self._newest()
        state, _, problems = newest or (initial(), {}, [])
        for problem in [*problems, *self._damaged_before(state["round"])]:
            tell(f"checkpoint: {problem}; continuing from round {state['round']}")
        self._named = _best_round(state)
        info = recorded.read_info(self.path)
        if info.get("status") != recorded.RUNNING:  # what is cut off and written again is no finished run
            self._describe({key: value for key, value in info.items() if key != "files"} | {"status": recorded.RUNNING})
        self.cut(state["round"] or -1)  # round 0 is measured anew
        if changed is not None or (accept and accept is not True):
            self._accept(about, changed, state["round"])
        self._events += self._unlogged()
        return state

    def _damaged_before(self, round_: int) -> list[str]:
        """Return what is wrong with the peers' checkpoints of the round before, which are not read otherwise."""
        problems = []
        for home in sorted(self.path.glob("peers/*")):
            for number, files in sorted(_numbered(home, "state").items()):
                if number < round_ and any(file.suffix == ".json" for file in files):
                    try:
                        checkpoint.load(home, f"state-{number}", newest=lambda head: head["round"])
                    except StateError as error:
                        problems.append(str(error))
        return problems

    def _newest(self) -> tuple[State, dict[str, Any], list[str]] | None:
        """Return the state of `load`; None if no round was saved.

        Raises StateError where a log's lines before the checkpoint are not those that were there when it was saved.
        """
        newest = self.load()
        if newest is not None:
            labels = newest[1]
            # round 0 is measured anew, and a run that is killed meanwhile has cut its lines off
            for name, (size, digest) in (labels.get("logs", {}) if labels["round"] else {}).items():
                if recorded.sum_of(self.path / name, size) != [size, digest]:
                    raise StateError(
                        f"{self.path / name}: the lines up to round {labels['round']} are not those that the run "
                        "wrote: they were changed or truncated; restore the file"
                    )
            return newest
        metrics = self.path / _METRICS
        if metrics.exists() and (last := max((line["round"] for line in recorded.lines_of(metrics)), default=0)):
            raise StateError(
                f"{self.path}: the checkpoints (state.json, state.safetensors) are missing, but {metrics.name} has "
                f"{last} rounds: restore them, or start again in another folder"
            )
        return None

    def _refuse_other_mirror(self) -> None:
        """Raise StateError where the mirror has files that a copy would replace or delete, and that are not this run's.

        The copy's recipe may have other keys of runtime, and others among those that run.json notes as changed.
        """
        copy = self.mirror
        if copy is None or not any(checkpoint.needed(copy)):
            return
        info = recorded.read_info(self.path)
        # of run.json, because the recipe beside it may have changes that are accepted only later
        now = info.get("recipe") or recorded.recipe_of(self.path)
        was = recorded.recipe_of(copy) if (copy / "recipe.yaml").is_file() else {}
        free = {key for change in info.get("changes", ()) for key in change["keys"]}
        keys = [key for key in differs("", was, now) if key not in free and not came_later(key, was, now)]
        other = sorted(key for key in keys if not key.startswith("runtime."))
        if not other and (copy / "partition.json").is_file():
            other = differs("partition", *(recorded.json_of(home / "partition.json") for home in (copy, self.path)))[:1]
        if other:
            raise StateError(
                f"runtime.mirror: {copy}: the copy is of another run ({first_of(other)} differ), or no copy of a run; "
                "choose another folder, or move this one away"
            )

    def kept(self, state: State, early: EarlyStopping | None) -> State:
        """Return the state to keep of a run that ended in `state`: the best one if it stopped early and wants it."""
        if early is None or not (state["stopped"] and early.restore_best):
            return state
        number = _best_round(state)
        best = self.load(f"best-{number}") or self.load("best")  # the name that all had before
        if best is None or best[0]["round"] != number:
            raise StateError(f"{self.path}: the state of round {number}, the best one, is missing")
        return best[0]

    def save_model(self, tensors: Mapping[str, Tensor], labels: Mapping[str, str], name: str = recorded.MODEL) -> None:
        """Write model.safetensors, or another file of tensors, readable without fedloom."""
        part = self.path / f"{name}.part"
        checkpoint.save_tensors(tensors, part, labels)
        os.replace(part, self.path / name)
        if self.audit is not None:
            self._note("export", file=name, digest=recorded.sum_of(self.path / name)[1])

    def _note_events(self, round_: int, events: Iterable[Mapping[str, Any]]) -> None:
        for event in events:
            what = ": ".join(str(event[k]) for k in ("event", "what") if k in event)
            self._note(what, round=round_, **{k: v for k, v in event.items() if k not in ("event", "what")})

    def _note(self, what: str, **about: Any) -> None:
        if self.audit is not None:
            self.audit.note(what, **about)


def _parts(tree: Any) -> set[int]:
    """Return the identities of what a state is made of, but for values that may be shared anyway."""
    inner = tree.values() if isinstance(tree, Mapping) else tree if isinstance(tree, list) else ()
    own = {id(tree)} if len(inner) or (isinstance(tree, Tensor) and tree.numel()) else set()
    return own.union(*map(_parts, inner))


def _words(changed: Mapping[str, Any]) -> str:
    """Return the keys of a recipe that changed, with both values of each."""
    keys = ", ".join(f"{key} was {was!r}, is {now!r}" for key, (was, now) in changed.items())
    return keys or "which keys is not known"


def _origin(value: Mapping[str, Any]) -> str:
    """Return version and source of what a package brings."""
    return ", ".join(str(value[key]) for key in ("module", "version", "source") if value.get(key))


def _peer(home: Path, name: str) -> Path:
    """Return the folder of one peer's own files, in a run's folder or in its mirror."""
    return home / "peers" / folder_name(name)


def _best_round(state: State) -> int | None:
    """Return the best round that a state names."""
    return (state.get("early") or {}).get("best_round")


def _delete(home: Path, name: str, but: Collection[int | None]) -> None:
    """Delete the checkpoints that are named by rounds other than these."""
    for number, files in _numbered(home, name).items():
        for path in files if number not in but else []:
            path.unlink(missing_ok=True)


def _numbered(home: Path, name: str) -> dict[int, list[Path]]:
    """Return the files of checkpoints that are named by their round, by that round."""
    files = ((path.name.removeprefix(f"{name}-").partition(".")[0], path) for path in home.glob(f"{name}-*"))
    return grouped((int(number), path) for number, path in files if number.isdecimal())
