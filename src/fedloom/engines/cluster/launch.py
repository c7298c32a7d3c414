"""Starting the processes of a cluster on this machine, and watching them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedloom.core.errors import RecipeError, UserError
from fedloom.core.settings.trust import ALLOW, allowed
from fedloom.engines import cluster
from fedloom.engines.engine import Engine
from fedloom.engines.processes import SAFE_PATH
from fedloom.federation.recipes.schema import Recipe
from fedloom.federation.rounds.build import build
from fedloom.federation.rounds.built import Built
from fedloom.federation.rounds.measure import headline
from fedloom.federation.rounds.progress import Progress
from fedloom.federation.runs.folder import MIRROR_FAILED, RunFolder
from fedloom.federation.runs.reader import described
from fedloom.federation.runs.recorded import unpacked

ERROR_FILE = "FEDLOOM_ERROR_FILE"
LOG = "cluster.log"
_RESTARTS = 3
_TAIL = 30


class Cluster(Engine):
    """One process per rank, started by torchrun; without torchrun this engine starts `runtime.workers` of them."""

    def takes_over(self, recipe: Recipe, folder: Path, progress: Progress, fresh: bool) -> str | None:
        """Do the whole run in the processes of a cluster, and return how it ended."""
        for section in recipe.named:
            if section.is_held:
                raise RecipeError(
                    f"runtime.engine: the processes of a cluster cannot receive a {section.section} that is a "
                    "Python object. "
                    "Name it in the recipe as package.module:name, or use runtime.engine=process"
                )
        if recipe.peers is not None and recipe.peers.mode == "asynchronous":
            raise RecipeError("peers.mode: asynchronous peers need runtime.engine=process")
        if cluster.rank() is not None:
            from fedloom.engines.cluster.session import join

            return join(folder, recipe if fresh else None, progress)
        if fresh:
            built = build(recipe)
            RunFolder.create(folder, built.recipe, built.dealt, built.about).close()
        else:
            built = build(recipe, RunFolder.read(folder)[1])
            RunFolder(folder).close()
        _Watched(built, folder, progress).run()
        status: str = json.loads((folder / "run.json").read_text(encoding="utf-8"))["status"]
        return status


class _Watched:
    """The run of torchrun on this machine; the lines of metrics.jsonl show its progress."""

    def __init__(self, built: Built, folder: Path, progress: Progress) -> None:
        self.built, self.folder, self.progress = built, folder, progress
        self.done, self.offset = -1, 0

    def run(self) -> None:
        """Start, watch, and end. Raises UserError if a process reports a mistake, or if all of them are lost."""
        runtime = self.built.recipe.runtime
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(runtime.processes), "--max-restarts", str(_RESTARTS)),
            *("-m", "fedloom.engines.cluster", str(self.folder.resolve())),
        ]
        self._read(silent=True)
        self.progress.start(self.built.recipe.training.rounds, max(self.done, 0))
        with tempfile.TemporaryDirectory(prefix="fedloom-") as scratch, (self.folder / LOG).open("a") as log:
            errors = Path(scratch) / "error.txt"
            environment = {
                **os.environ,
                "OMP_NUM_THREADS": str(runtime.threads),
                # a rank finds what this process finds, such as modules beside the script that runs here
                "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
                SAFE_PATH: "1",  # python -m looks into the current folder first
                ERROR_FILE: str(errors),
                ALLOW: ",".join(filter(None, (os.environ.get(ALLOW), *allowed()))),
            }
            process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
            try:
                while process.poll() is None:
                    time.sleep(0.1)
                    self._read()
                self._read()
            finally:
                if process.poll() is None:
                    process.terminate()
                    process.wait()
                self.progress.stop()
            if errors.is_file():
                raise UserError(errors.read_text(encoding="utf-8"))
            if process.returncode:
                tail = "\n".join((self.folder / LOG).read_text(errors="replace").splitlines()[-_TAIL:])
                raise UserError(
                    f"the processes of the cluster failed {_RESTARTS + 1} times (exit code {process.returncode}). The "
                    "last finished round is saved; continue with `fedloom resume`. The end of "
                    f"{self.folder / LOG}:\n{tail}"
                )

    def _read(self, silent: bool = False) -> None:
        """Report the rounds written since the last look, but no round twice."""
        path = self.folder / "metrics.jsonl"
        size = path.stat().st_size if path.exists() else 0
        if size < self.offset:  # lines after the last checkpoint were cut
            self.offset = 0
        if size == self.offset:
            return
        with path.open("rb") as file:
            file.seek(self.offset)
            for text in file:
                if not text.endswith(b"\n"):
                    break
                self.offset += len(text)
                line = unpacked(json.loads(text))
                if line["round"] <= self.done:
                    continue
                self.done = line["round"]
                if silent or not self.done:
                    continue
                for event in line["events"]:
                    about = described({k: v for k, v in event.items() if k != "event"})
                    say = self.progress.warn if event["event"] == MIRROR_FAILED else self.progress.event
                    say(f"round {self.done}: {event['event']}{about}")
                self.progress.round(self.done, headline(self.built, _numbers(line)))


def _numbers(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return a line with nan where its file has null."""
    metrics = [{**r, "value": float("nan") if r["value"] is None else r["value"]} for r in line["metrics"]]
    train = [{**r, "loss": float("nan") if r["loss"] is None else r["loss"]} for r in line["train"]]
    return {**line, "metrics": metrics, "train": train}
