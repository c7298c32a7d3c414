"""One process of several that torchrun starts, which runs many recipes one after another (see test_cluster.py).

torchrun ... cluster_support.py OUT: reads OUT/cases.json, a list of [name, [recipe, *changes]]; runs each in OUT/name.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

Cases = Mapping[str, Sequence[str]]


def start(out: Path, cases: Cases, ranks: int) -> None:
    """Run cases with so many processes; an error in one is written to OUT/name.error."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "cases.json").write_text(json.dumps([[name, list(changes)] for name, changes in cases.items()]))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    here = Path(__file__)
    paths = [str(here.parent), *filter(None, [os.environ.get("PYTHONPATH")])]  # the latter where a worktree is tested
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run([*command, str(here), str(out)], env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]


def main() -> None:
    """Run one process of the cluster."""
    import torch

    from fedloom.engines.cluster.comm import Comm
    from fedloom.engines.cluster.launch import take_part
    from fedloom.errors import UserError
    from tests_support import load_recipe

    torch.set_num_threads(1)
    out = Path(sys.argv[1])
    comm = Comm.join()
    for name, changes in json.loads((out / "cases.json").read_text()):
        try:
            take_part(comm, out / name, load_recipe(*changes[1:], recipe=changes[0]))
        except UserError as error:
            if comm.rank == 0:
                (out / f"{name}.error").write_text(str(error))
    comm.leave()


if __name__ == "__main__":
    main()
