"""fedloom: `fedloom.run` with a recipe; a folder with checkpoints and metrics is written."""

import sys
import tempfile
from pathlib import Path

from job import BATCH, CLIENTS, LR, ROUNDS, Clock


def main(path: str, workers: str) -> None:
    import fedloom
    from fedloom.federation.rounds.round import Progress

    clock = Clock()
    progress = Progress()
    progress.start = progress.round = clock.tick  # type: ignore[method-assign]
    recipe = {
        "name": "peers",
        "data": {"name": "arrays", "path": path},
        "partition": {"name": "iid", "clients": CLIENTS, "val_fraction": 0.0},
        "model": {"name": "cnn", "width": 4, "hidden": 48},
        "method": "fedavg",
        "training": {"rounds": ROUNDS, "epochs": 1, "batch_size": BATCH, "optimizer": {"name": "sgd", "lr": LR}},
        "runtime": {"workers": workers if workers == "auto" else int(workers)},
        "evaluation": {"every": 1000, "splits": ["test"], "predictions": False},
    }
    with tempfile.TemporaryDirectory() as folder:
        fedloom.run(recipe, folder=Path(folder) / "run", progress=progress)
    clock.tell()


if __name__ == "__main__":
    main(*sys.argv[1:])
