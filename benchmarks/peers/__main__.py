"""The same FedAvg job by hand, by fedloom and by other frameworks, in turns.

    python benchmarks/peers [--quick] [NAME ...]

Ten clients with 600 grey images each, a convolutional network of 16 and 32 channels (1.02 million multiply-adds an
image), an epoch a round, three rounds (job.py). Each framework has a virtual environment of its own under
benchmarks/peers/.venvs, made at the first call with this torch and PIP_ARGS; one that pip cannot install is skipped,
and that is said. Every run is a process of its own and the ways take turns, so that other load hits all alike; look at
the machine's load all the same.

    rounds        all training rounds, on the wall
    warm rounds   all but the first, which holds what a framework and torch do once in a process
    process       everything, from the interpreter's start to its end
    CPU           the same in CPU seconds of the process and its children that ended before it

What the frameworks do beside is their own: fedloom writes metrics and checkpoints with fsync, as often as its
default or the row says, Flower starts Ray, pfl does not shuffle. BlazeFL asks for a newer Python: the command
python3.12 or later. `--quick`: one turn of what is installed already.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from job import write

HERE = Path(__file__).parent
PACKAGES = {
    "flower_simulation": ["flwr[simulation]"],
    "pfl_simulation": ["pfl"],
    "fluke_federation": ["fluke-fl"],
    "blazefl_simulation": ["blazefl[contrib,reproducibility]<3"],  # 3 asks for Python 3.14
}
"""Script with an environment of its own -> what pip installs into it; all others run in this one."""
NEWER = {"blazefl_simulation": ("python3.12", "python3.13", "python3.14")}
"""Script -> commands, of which the first that is there makes its environment; all others take this Python."""
WAYS = {
    "by hand, 1 thread": ("loop", "1"),
    "by hand, 2 threads": ("loop", "2"),
    "by hand, channels last, 1 thread": ("loop", "1", "channels last"),
    "by hand, channels last, 2 threads": ("loop", "2", "channels last"),
    "fedloom, 1 worker": ("ours", "1"),
    "fedloom, 1 worker, a checkpoint each round": ("ours", "1", "1"),
    "fedloom, 1 worker, no checkpoints": ("ours", "1", "1000"),
    "fedloom, 2 workers": ("ours", "2"),
    "fedloom, workers: auto": ("ours", "auto"),
    "Flower's simulation, 1 at a time": ("flower_simulation", "1"),
    "Flower's simulation, 2 at a time": ("flower_simulation", "2"),
    "pfl": ("pfl_simulation", ""),
    "fluke": ("fluke_federation", ""),
    "BlazeFL": ("blazefl_simulation", ""),
}
# Nobody shall report to its makers; one thread a process where nothing else is said.
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "OMP_NUM_THREADS": "1",
}


def python(kind: str, make: bool = True) -> str:
    """Return the interpreter of an environment, which is made if it is not there. Raises OSError with what pip says."""
    if kind not in PACKAGES:
        return sys.executable
    home = HERE / ".venvs" / kind
    found, done = home / "bin" / "python", home / "installed"
    if not done.exists():
        if not make:
            raise OSError("not installed")
        bases = NEWER.get(kind, (sys.executable,))
        base = next((base for base in bases if starts(base)), None)
        if base is None:
            raise OSError(f"none of {', '.join(bases)} starts")
        subprocess.run([base, "-m", "venv", "--clear", home], check=True)
        version = torch.__version__.partition("+")[0]
        wanted = [f"torch=={version}", *PACKAGES[kind], *shlex.split(os.environ.get("PIP_ARGS", ""))]
        said = subprocess.run([found, "-m", "pip", "install", "-q", *wanted], capture_output=True, text=True)
        if said.returncode:
            raise OSError(said.stderr.strip().splitlines()[-1])
        done.touch()
    return str(found)


def starts(command: str) -> bool:
    """Return whether a Python is there; a version manager's command may be there without one behind it."""
    return shutil.which(command) is not None and not subprocess.run([command, "-c", ""], capture_output=True).returncode


def once(kind: str, *options: str, data: Path) -> tuple[float, ...]:
    """Seconds of (rounds, warm rounds, process), and its CPU seconds."""

    def used() -> float:
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        return children.ru_utime + children.ru_stime

    path = os.pathsep.join([str(HERE.resolve()), *filter(None, [os.environ.get("PYTHONPATH")])])
    before, start = used(), time.perf_counter()
    command = [python(kind), str(HERE / f"{kind}.py"), data, *options]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **QUIET, "PYTHONPATH": path})
    whole = time.perf_counter() - start
    if done.returncode:
        raise OSError((done.stderr.strip().splitlines() or ["it said nothing"])[-1])
    rounds = json.loads(done.stdout.strip().splitlines()[-1])
    return sum(rounds), sum(rounds[1:]), whole, used() - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of: {', '.join(WAYS)}")
    parser.add_argument("--quick", action="store_true", help="one turn: does it run at all?")
    given = parser.parse_args()
    if unknown := set(given.names) - WAYS.keys():
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(WAYS)}")
    ways = {name: way for name, way in WAYS.items() if name in (given.names or WAYS)}
    for name, (kind, *_) in list(ways.items()):
        try:
            python(kind, make=not given.quick)
        except OSError as error:
            print(f"skipped {name}: {error}", flush=True)
            del ways[name]
    taken: dict[str, list[tuple[float, ...]]] = {name: [] for name in ways}
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "images.npz"
        write(data)
        for _ in range(1 if given.quick else 4):
            for name, way in list(ways.items()):
                try:
                    taken[name].append(once(*way, data=data))
                except OSError as error:
                    print(f"failed {name}: {error}", flush=True)
                    del ways[name], taken[name]
    print(f"{os.cpu_count()} cores, Python {platform.python_version()}, torch {torch.__version__}; in seconds")
    # Other work on the machine only ever adds time, and to two busy cores the most: so the least is shown as well.
    for what, pick in (("median", statistics.median), ("least", min)):
        print(f"\n{what:<44} {'rounds':>12} {'warm rounds':>12} {'process':>12} {'CPU':>12}")
        for name, turns in taken.items():
            print(f"{name:<44} " + " ".join(f"{pick(v):12.2f}" for v in zip(*turns, strict=True)))


if __name__ == "__main__":
    main()
