"""Three sites with their own data and different tasks train together over Flower, on this machine.

python run.py [OUT] [METHOD...]: makes certificates and keys, starts a SuperLink and three SuperNodes on loopback with
TLS and node authentication, runs FedAvg + FedDEA (or other methods), and stops everything that it started.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from deployment import deployment
from sklearn.datasets import load_digits

from fedloom.engines.flower.project import new

METHODS = {
    "feddea": "method={name: fedavg, add: {feddea: {rho: 0.3}}, codec: sparse}",
    "matu": "method=matu",
    "fedhca2": "method=fedhca2; model.heads=own",
    "peers": "method=fedavg; peers={choose: {top: 1}}",
}
SITES = {"clinic": ("digit",), "lab": ("even",), "office": ("digit", "large")}
NODE = "client: {site}\ndata: {{name: arrays, path: {path}, labels: {{{labels}}}}}\n"


def make_data(folder: Path) -> dict[str, str]:
    """A third of the digits for each site, with labels of its own tasks; node.yaml by site."""
    digits = load_digits()
    images = (digits.images * 15).astype(np.uint8)[:, None]
    labels = {"digit": digits.target, "even": (digits.target % 2 == 0) * 1, "large": (digits.target >= 5) * 1}
    order = np.random.default_rng(0).permutation(len(images))
    configs = {}
    for site, part in zip(SITES, np.array_split(order, len(SITES)), strict=True):
        train, test = part[:-100], part[-100:]
        arrays = {f"x_{split}": images[index] for split, index in (("train", train), ("test", test))}
        for task in SITES[site]:
            arrays |= {f"{task}_{split}": labels[task][index] for split, index in (("train", train), ("test", test))}
        folder.mkdir(parents=True, exist_ok=True)
        np.savez(folder / f"{site}.npz", **arrays)
        named = ", ".join(f"{task}: '{task}_{{split}}'" for task in SITES[site])
        configs[site] = NODE.format(site=site, path=folder / f"{site}.npz", labels=named)
    return configs


def main(out: Path, methods: list[str]) -> None:
    new(out / "sites", str(Path(__file__).with_name("recipe.yaml")))
    configs = make_data(out / "data")
    with deployment(out) as here:
        for site, config in configs.items():
            here.start_node(site, config)
        for method in methods:
            start = time.monotonic()
            folder = out / "runs" / method
            run = here.submit(out / "sites", folder, METHODS[method])
            about = here.finished(run, folder, 1800)
            last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
            scores = {
                f"{r['client']}/{r['task']}": round(r["value"], 3)
                for r in last["metrics"]
                if r["split"] == "test" and r["metric"] == "accuracy"
            }
            seconds = time.monotonic() - start
            print(f"{method}: {about['status']} after {about['rounds']} rounds, {seconds:.0f} s, {scores}", flush=True)
    print(f"everything is stopped; files are in {out}")


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(tempfile.mkdtemp(prefix="fedloom-flower-"))
    main(target.resolve(), sys.argv[2:] or ["feddea"])
