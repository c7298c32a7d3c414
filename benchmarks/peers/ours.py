"""fedloom: `fedloom.run` with a recipe; a folder with metrics is written, with or without checkpoints of rounds."""

import sys
import tempfile
from pathlib import Path
from typing import Any

from job import BATCH, CLIENTS, LR, ROUNDS, Clock


def recipe(path: str, workers: str, every: str = "auto") -> dict[str, Any]:
    """Return the job as a recipe, with a checkpoint after every so many rounds."""
    return {
        "name": "peers",
        "data": {"name": "arrays", "path": path},
        "partition": {"name": "iid", "clients": CLIENTS, "val_fraction": 0.0},
        "model": {"name": "small-cnn", "width": 16, "hidden": 48},
        "method": "fedavg",
        "training": {"rounds": ROUNDS, "epochs": 1, "batch_size": BATCH, "optimizer": {"name": "sgd", "lr": LR}},
        "runtime": {
            "workers": workers if workers == "auto" else int(workers),
            "checkpoint_every": every if every == "auto" else int(every),
        },
        "evaluation": {"every": 1000, "splits": ["test"], "predictions": False},
    }


def main(path: str, workers: str, every: str = "auto") -> None:
    import fedloom
    from fedloom.federation.rounds.round import Progress

    clock = Clock()
    progress = Progress()
    progress.start = progress.round = clock.tick  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as folder:
        fedloom.run(recipe(path, workers, every), folder=Path(folder) / "run", progress=progress)
    clock.tell()


if __name__ == "__main__":
    main(*sys.argv[1:])
