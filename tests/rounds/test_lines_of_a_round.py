"""Test how much of the library a plain round of FedAvg passes through, which is what a reader of the round has to read.

Counted are the distinct lines of src/fedloom that run from the moment at which the server chooses the cohort of the
second of three rounds to the moment at which its new state is known: dispatch, local training, counting of bytes,
aggregation. Four clients with the same task train a linear model on arrays in this process, with plain SGD and no
diagnostics. Measuring, the observers of the loop and the checkpoint come after it; they are counted apart, and printed.

PYTHONPATH=src:tests python -m rounds.test_lines_of_a_round    # prints both counts, file by file
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import fedloom as fl
from fedloom.core.context import State, generator
from fedloom.engines.api import Engine
from fedloom.federation.rounds.built import Built
from fedloom.federation.rounds.round import Advance, Round, with_server
from fedloom.federation.rounds.worker import Executor
from fedloom.federation.runs.folder import RunFolder

HOME = str(Path(fl.__file__).parent)
LINES, FILES = 450, 20
Found = dict[str, set[int]]


class Watching(Engine):
    """Notes the lines of the second round, and those from its beginning to the beginning of the third."""

    def __init__(self) -> None:
        self.round: Found = defaultdict(set)
        self.whole: Found = defaultdict(set)
        self.into: tuple[Found, ...] = ()

    def trace(self, frame: FrameType, event: str, arg: Any) -> Callable[..., Any] | None:
        if not frame.f_code.co_filename.startswith(HOME):
            return None
        if event == "line":
            for found in self.into:
                found[frame.f_code.co_filename].add(frame.f_lineno)
        return self.trace

    @contextmanager
    def start(self, built: Built, folder: RunFolder) -> Iterator[tuple[Executor, Advance | None]]:
        with super().start(built, folder) as (executor, _):
            yield executor, self.advance

    def advance(self, built: Built, executor: Executor, state: State, now: Round) -> tuple[State, Sequence[str]]:
        before = sys.gettrace()
        if now.number == 2:
            sys.settrace(self.trace)
        self.into = {2: (self.round, self.whole)}.get(now.number, ())
        try:
            return with_server(built, executor, state, now)
        finally:
            self.into = {2: (self.whole,)}.get(now.number, ())
            if now.number == 3:
                sys.settrace(self.before)
            elif now.number == 2:
                self.before = before


def watched(folder: Path) -> Watching:
    """Return the engine after three rounds."""
    x = torch.randn(4, 24, 6, generator=generator(0, "inputs"))
    clients = {f"c{i}": fl.Client((x[i], (x[i, :, 0] > 0).long())) for i in range(4)}
    training = {"rounds": 3, "epochs": 1, "batch_size": 8, "optimizer": {"name": "sgd", "lr": 0.1}}
    engine, federation = Watching(), fl.Federation(clients, {"sign": fl.task(classes=2)})
    plain = {"runtime": {"diagnostics": False}, "evaluation": {"splits": ["val"]}}
    fl.run(federation, folder, model=nn.Linear(6, 2), training=training, engine=engine, **plain)
    return engine


def count(found: Found) -> int:
    return sum(map(len, found.values()))


def test_a_plain_round_is_short(tmp_path: Path) -> None:
    found = watched(tmp_path / "run").round
    assert count(found) > 200, "the trace saw the round"
    assert (count(found) <= LINES, len(found) <= FILES) == (True, True), (count(found), sorted(found))


if __name__ == "__main__":
    import tempfile

    engine = watched(Path(tempfile.mkdtemp()) / "run")
    for name, found in (("round", engine.round), ("with measuring, observers and checkpoint", engine.whole)):
        print(f"{name}: {count(found)} lines in {len(found)} files")
        for file in sorted(found, key=lambda file: -len(found[file])):
            print(f"{len(found[file]):5} {file.removeprefix(HOME)}")
