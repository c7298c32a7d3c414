"""Three sites with their own handwritten digits and different tasks, as nodes of a deployment on this machine."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from fedloom.core.settings.yaml import to_yaml
from fedloom.data.digits import digits
from fedloom.engines.flower.deployment import deployment
from fedloom.engines.flower.project import new
from fedloom.engines.result import Result

SITES = {"clinic": ("digit",), "lab": ("parity",), "office": ("digit", "large")}
_RECIPE = {
    "name": "sites",
    "data": "nodes",
    "partition": "nodes",
    "model": "small-cnn",
    "method": "fedavg",
    "training": {"rounds": 3, "epochs": 5},
    "runtime": {"engine": "flower", "flower": {"nodes": 3, "min_clients": 2, "deadline": 300}},
}


def prepare(out: Path) -> dict[str, str]:
    """Write the app and a third of the digits for each site into a folder; return the text of node.yaml by site."""
    (out / "data").mkdir(parents=True, exist_ok=True)
    (out / "recipe.yaml").write_text(to_yaml(_RECIPE))
    new(out / "sites", str(out / "recipe.yaml"))
    dataset = digits(0, tasks=["digit", "parity", "large"])
    configs = {}
    for number, (site, tasks) in enumerate(SITES.items()):
        arrays = {}
        for split, part in (("train", dataset.train), ("test", dataset.test)):
            mine = np.random.default_rng(0).permutation(len(part))[number :: len(SITES)]
            arrays[f"x_{split}"] = part.images.numpy()[mine]  # type: ignore[attr-defined]
            arrays |= {f"{task}_{split}": part.labels_of(task)[mine] for task in tasks}
        file = out / "data" / f"{site}.npz"
        np.savez(file, **arrays)
        data = {"name": "arrays", "path": str(file), "labels": {task: f"{task}_{{split}}" for task in tasks}}
        configs[site] = to_yaml({"client": site, "data": data})
    return configs


def demo(out: Path | None, rounds: int, tell: Callable[[str], None]) -> str:
    """Run the sites over Flower, with TLS and node keys, and return the table; everything that starts is stopped.

    Without `out` the files are deleted in the end.
    """
    home = Path(tempfile.mkdtemp(prefix="fedloom-flower-")) if out is None else out.resolve()
    try:
        configs = prepare(home)
        with deployment(home) as here:
            for site, config in configs.items():
                tell(f"start site {site}: {', '.join(SITES[site])}")
                here.start_node(site, config)
            tell(f"run {rounds} rounds of FedAvg over TLS; logs are in {here.logs}")
            run = here.submit(home / "sites", home / "run", f"training.rounds={rounds}")
            here.finished(run, home / "run", 600 + 60 * rounds)
        return Result(home / "run", "finished").table()
    finally:
        if out is None:
            shutil.rmtree(home, ignore_errors=True)
