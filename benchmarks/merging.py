"""Measure what is left of models that were trained apart once they are merged: accuracy by rule, on finished runs.

    python benchmarks/merging.py RUN...
    python benchmarks/merging.py --quick     # a run of a few seconds: does it run at all?

Each RUN is one of `method=local` with `partition={name: one-task}`: a client a task, all from the same model. Their
models are exported and merged by `fedloom.experiments.export.merge`, once for each rule and each of a few scales; the
scale is the one with the best mean over tasks on the clients' validation examples, and the numbers are those of the
test examples. `apart` is each task's own model, `start` the model that all began with, under the heads that were
trained."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

SCALES = (0.5, 1.0, 2.0, 4.0)
RULES = {**dict.fromkeys(("mean", "ties", "consensus", "iso-c", "tsv-m", "wudi", "fedrpca"), SCALES), "emr": (1.0,)}


def scores(built: Any, folders: Sequence[Path], split: str) -> dict[str, float]:
    """Task -> accuracy, each of the client that has the task, by the only model or by its own."""
    from fedloom.experiments.export.bundle import Bundle
    from fedloom.federation.rounds.evaluation import evaluate
    from fedloom.training import FlatModel

    models = [FlatModel(Bundle.read(folder).module) for folder in folders]
    found = {}
    for i, client in enumerate(built.federation.clients.values()):
        [name] = client.tasks
        task = {t.name: t for t in built.federation.tasks if t.name == name}
        part = client.part(split)
        found[name] = evaluate(models[i if len(models) > 1 else 0], part, task, 256)[name]["accuracy"]
    return found


def of_run(run: Path) -> dict[str, dict[str, Any]]:
    """Rule -> task -> accuracy, and the scale that was taken."""
    from fedloom.experiments.export.bundle import export
    from fedloom.experiments.export.finished import reopen
    from fedloom.experiments.export.merge import merge

    built, _ = reopen(run)
    home = Path(tempfile.mkdtemp())
    each = [export(run, home / client, client=client) for client in built.federation.clients]
    nothing = merge(each, run, home / "start", scale=0.0)
    rows: dict[str, dict[str, Any]] = {
        "apart": {**scores(built, each, "test"), "scale": "-"},
        "start": {**scores(built, nothing, "test"), "scale": "-"},
    }
    for rule, scales in RULES.items():
        tried = {scale: merge(each, run, home / f"{rule}-{scale}", rule, scale) for scale in scales}
        best = max(scales, key=lambda scale: fmean(scores(built, tried[scale], "val").values()))
        rows[rule] = {**scores(built, tried[best], "test"), "scale": best}
        print(run, rule, rows[rule], file=sys.stderr)
    return rows


def main(runs: Sequence[str]) -> None:
    found = [of_run(Path(run)) for run in runs]
    tasks = [name for name in found[0]["apart"] if name != "scale"]
    print(f"| rule | scale | {' | '.join(tasks)} | mean | least and most of the runs |")
    print("|---|---|" + "---:|" * (len(tasks) + 2))
    for rule in found[0]:
        by_task = [fmean(rows[rule][task] for rows in found) for task in tasks]
        means = [fmean(rows[rule][task] for task in tasks) for rows in found]
        scales = ", ".join(sorted({str(rows[rule]["scale"]) for rows in found}))
        cells = [f"{v:.3f}" for v in (*by_task, fmean(means))]
        print(f"| {rule} | {scales} | {' | '.join(cells)} | {min(means):.3f} to {max(means):.3f} |")


def quick() -> None:
    import fedloom

    with tempfile.TemporaryDirectory() as home:
        changes = ("method=local", "partition={name: one-task}", "training.rounds=1", "training.steps=1")
        fedloom.run("digits-tasks", Path(home) / "run", overrides=[*changes, "training.epochs=null"])
        main([str(Path(home) / "run")])


if __name__ == "__main__":
    quick() if sys.argv[1:] == ["--quick"] else main(sys.argv[1:])
